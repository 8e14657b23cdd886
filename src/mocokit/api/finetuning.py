"""The verbs `finetune` and `predict`: few-label curves, and the classifier they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mocokit import files
from mocokit.api.evaluating import open_labelled_for, open_runs
from mocokit.data.exclusion import refuse_for_videos
from mocokit.data.pixels import build_pixel_store, side_for
from mocokit.data.randomness import sample_id
from mocokit.data.sources import open_source
from mocokit.data.videos import holds_videos, open_videos
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.budgets import Budget, parse_budgets
from mocokit.evaluation.curve import ARMS, CurvePoint, curve_points, curve_rows, curve_table, labels_to_match
from mocokit.evaluation.features import Ints, Pixels, frozen, gather, plain_batches
from mocokit.evaluation.few_labels import CellKey, FewLabels, answers_of, best_cell, fit_cells
from mocokit.evaluation.labelled import LabelledData
from mocokit.evaluation.labelled_videos import VideoData, sample_videos
from mocokit.evaluation.metrics import calibration
from mocokit.evaluation.protocol import Ledger, plan_hash
from mocokit.evaluation.table import csv_text
from mocokit.evaluation.tuned_folder import Cell, TunedFolder, TunedModel, claim_tuned, commit_model, load_tuned
from mocokit.evaluation.tuning import TuneSettings, mean_by
from mocokit.evaluation.video_overlap import overlap_with
from mocokit.reporting import plots
from mocokit.reporting.curves import few_label_figure
from mocokit.training import runlog
from mocokit.training.allocator import keep_freed_memory
from mocokit.training.precision import num_threads
from mocokit.training.run import Run
from mocokit.training.settings import DataConfig
from mocokit.training.state import pick_device

DEFAULT_BUDGETS = "1,5,10,all"


@dataclass(frozen=True, slots=True)
class FinetuneResult:
    """A few-label curve. `values` is what curve.json holds."""

    path: Path
    values: dict[str, Any]

    @property
    def points(self) -> list[dict[str, Any]]:
        """One entry for each budget and arm: labels, accuracy, balanced accuracy, macro F1, difference to scratch."""
        found: list[dict[str, Any]] = self.values["points"]
        return found

    @property
    def table(self) -> str:
        """The curve as text."""
        return str(self.values["table"])


def finetune(
    runs: str | Path | Run | Sequence[str | Path | Run],
    labelled: str | Path,
    out: str | Path,
    *,
    labels_per_class: str | None = None,
    label_fraction: str | None = None,
    draws: int = 5,
    settings: TuneSettings | None = None,
    seed: int = 0,
    threads: int | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    exclude: str | Path | None = None,
    quiet: bool = False,
) -> FinetuneResult:
    """Fine-tune with few labels against from scratch, a frozen probe and frozen random weights; draw the curve.

    Of labelled videos (for runs on clips, or on frames) the labels are of videos: a video is learned from its clips and
    judged by the mean over them, and no video is in two splits.

    runs: one run, or several of one recipe that differ in their seed. labelled: data with labels, split as `evaluate`
    splits them. labels_per_class: budgets such as "1,5,10,all"; or label_fraction, such as "0.01,0.1,1". draws: label
    sets for each budget and run. exclude: a list of samples to leave out. settings: how every cell is
    fitted. out: a folder; started again with the same arguments it goes on where it stopped, and a finished one is only
    read.

    Writes curve.json, curve.csv, curve.png and the best model (`predict`) into `out`, and a line into every run's
    ledger when the test labels are read. Raises UsageError, DataError, DivergedError, LockedError, StorageError.
    """
    keep_freed_memory()
    progress = runlog.Progress(quiet=quiet)
    opened = open_runs(runs, progress, "finetune")
    named = labels_per_class if labels_per_class or label_fraction else DEFAULT_BUDGETS
    budgets = parse_budgets(named, label_fraction)
    if draws < 1:
        raise UsageError(f"--draws must be at least 1. Got {draws}.")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed must lie in [0, 2^63). Got {seed}.")
    if threads is not None and threads < 1:
        raise UsageError(f"--threads must be at least 1. Got {threads}.")
    settings = settings or TuneSettings()
    first = opened[0].config
    data = open_labelled_for(
        opened[0],
        str(labelled),
        label_column=label_column,
        group_column=group_column,
        exclude=exclude,
        progress=lambda done, total: progress.show(f"reading labelled data  {done}/{total}"),
    )
    task = FewLabels(opened, data, settings, draws=draws, seed=seed, device=pick_device("auto"))
    budgets = _by_size(task, budgets)
    plan = {
        "runs": [[run.config.digest(), run.step] for run in opened],
        "data": data.name,
        "index": data.index.hash,
        "budgets": [budget.name for budget in budgets],
        "draws": draws,
        "seed": seed,
        "settings": settings.to_dict(),
    }
    folder, lock = claim_tuned(Path(out), plan)
    with lock, num_threads(threads or first.execution.threads or torch.get_num_threads()):
        finished = folder.path / "curve.json"
        if finished.exists() and folder.model.exists():
            progress.say(f"{folder.path} is finished; nothing to do.")
            return FinetuneResult(folder.path, files.read_json(finished))
        cells = fit_cells(
            task, budgets, folder, say=lambda done, total, what: progress.show(f"{done}/{total}  {what}", final=True)
        )
        for run in opened:
            ledger = Ledger(run.folder.evaluation / "ledger.jsonl")
            if ledger.set_aside:
                progress.warn(ledger.set_aside)
            n = len(data.split.test)
            ledger.record(split="test", purpose="few-label curve", plan=plan_hash(plan), n=n, step=run.step)
        return _finish(task, budgets, cells, folder)


def _by_size(task: FewLabels, budgets: Sequence[Budget]) -> tuple[Budget, ...]:
    """The budgets by how many labels they are; an impossible one is an error before anything is fitted."""
    sizes = {budget: len(task.rows(CellKey(ARMS[0], budget, 0, 0))) for budget in budgets}
    return tuple(sorted(budgets, key=lambda budget: sizes[budget]))


def _finish(
    task: FewLabels, budgets: Sequence[Budget], cells: dict[CellKey, Cell], folder: TunedFolder
) -> FinetuneResult:
    """Score the cells on the test labels, write the curve and commit the best model."""
    data, runs = task.data, task.runs
    test = data.split.test
    truth = data.index.labels[test]
    groups = data.index.groups[test] if (data.index.groups[test] >= 0).any() else None
    points: list[CurvePoint] = []
    for budget in budgets:
        labels = next(cell.facts["labels"] for key, cell in cells.items() if key.budget == budget)
        answers = answers_of(cells, budget, len(runs))
        points += curve_points(answers, budget.name, labels, truth, n_classes=data.n_classes, groups=groups)
    matches = labels_to_match(points)
    replicates = f"{len(runs)} seed{'s' if len(runs) > 1 else ' (this run only)'}, {task.draws} label draws"
    tested = f"{len(test)} test {'videos' if isinstance(data, VideoData) else 'images'}"
    table = curve_table(points, matches, tested, replicates)
    chance = 1.0 / int((np.bincount(truth, minlength=data.n_classes) > 0).sum())
    best = best_cell(cells, budgets[-1])
    chosen = cells[best]
    model = {
        **chosen.facts,
        "budget": best.budget.name,
        "run": runs[best.run].path.name,
        "test_accuracy": float(np.mean(chosen.predicted == truth)),
        "test_ece": calibration(chosen.confidence, chosen.predicted == truth).ece,
    }
    values: dict[str, Any] = {
        "points": [point.to_dict() for point in points],
        "labels_to_match": [
            {"labels": one.labels, "from_scratch": one.equal, "low": one.low, "high": one.high} for one in matches
        ],
        "n_test": len(test),
        "seeds": len(runs),
        "draws": task.draws,
        "chance": chance,
        "pretraining_saw_test_images": overlap_with(runs, data).text,
        "cells": {key.name: cell.facts for key, cell in cells.items()},
        "model": model,
        "table": table,
    }
    head, rows = curve_rows(points)
    files.write_text(folder.path / "curve.csv", csv_text(head, rows))
    arms = {
        arm: [(one.labels, one.accuracy.mean, one.accuracy.low, one.accuracy.high) for one in points if one.arm == arm]
        for arm in ARMS
    }
    figure = few_label_figure(arms, title=f"{data.name}: {tested}, {replicates}", chance=chance)
    plots.save_figure(figure, folder.path / "curve.png")
    if folder.weights(best.name).exists():
        commit_model(folder, best.name, _model_config(task, best, chosen, model, data))
    files.write_json(folder.path / "curve.json", values)  # last: it says that everything else is there
    return FinetuneResult(folder.path, values)


def _model_config(
    task: FewLabels, best: CellKey, chosen: Cell, facts: dict[str, Any], data: LabelledData | VideoData
) -> dict[str, Any]:
    """All that is needed to use the weights: architecture, preprocessing, classes, temperature; and where from."""
    config = task.runs[best.run].config.to_dict()
    read = {name: config["data"][name] for name in ("video", "frame_rate", "clip_frames", "clip_stride")}
    return {
        **({"video": read} if isinstance(data, VideoData) else {}),
        "class_names": list(data.index.class_names),
        "encoder": config["encoder"],
        "views": {name: config["views"][name] for name in ("size", "mean", "std")},
        "temperature": chosen.facts["temperature"],
        "made_by": facts,
        "labelled": data.name,
    }


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a classifier said of N images."""

    path: Path
    images: int
    unreadable: int
    counts: dict[str, int]
    """Images by predicted class."""
    ece: dict[str, float | None]
    """Of the model: expected calibration error on the labels it was calibrated on (`held`), and on the `test` split."""


def predict(
    tuned: str | Path,
    images: str | Path,
    out: str | Path,
    *,
    exclude: str | Path | None = None,
    quiet: bool = False,
) -> Predictions:
    """Classify images (or videos) with a fine-tuned model; `out` becomes a CSV of id, path, class, probability.

    tuned: a folder made by `finetune`. images: whatever `pretrain` can read; labels are not looked at. A model that was
    fine-tuned on videos classifies videos, each by the mean over its clips or frames. What can't be read has an empty
    class. exclude: a list of images to leave out. Raises UsageError, DataError, DamagedError, StorageError.
    """
    progress = runlog.Progress(quiet=quiet)
    if Path(out).is_dir():
        raise UsageError(f"{out} is a folder; --out needs a file, such as predictions.csv.")
    model = load_tuned(Path(tuned))
    video, spec = model.config.get("video"), str(images)
    if holds_videos(spec) and video is None:
        raise UsageError(f"{tuned} was fine-tuned on images, and {spec} holds videos. Fine-tune on labelled videos.")
    if video is not None and not holds_videos(spec) and (video["video"] == "clips"):
        raise UsageError(f"{tuned} was fine-tuned on clips of video, and {spec} holds none. Name a folder of videos.")
    if video is not None and holds_videos(spec):
        refuse_for_videos(exclude, spec)
        names, ids, what, logits, seen = _video_logits(model, spec, DataConfig(spec=spec, **video), progress)
    else:
        names, ids, what, logits, seen = _image_logits(model, spec, exclude, progress)
    sure = torch.softmax(logits.double() / model.temperature, 1).max(1)
    counts = dict.fromkeys(model.class_names, 0)
    table = []
    for row in range(len(names)):
        name = model.class_names[int(sure.indices[row])] if seen[row] else ""
        if seen[row]:
            counts[name] += 1
        chance = f"{float(sure.values[row]):.6f}" if seen[row] else ""
        table.append([str(ids[row]), names[row], name, chance])
    files.write_text(Path(out), csv_text(["id", "path", "class", "probability"], table))
    unreadable = int((~seen).sum())
    if unreadable:
        progress.warn(f"{unreadable} of {len(names)} {what} could not be read; their class is empty in {out}.")
    made_by = model.config.get("made_by", {})
    ece = {"held": made_by.get("held_ece"), "test": made_by.get("test_ece")}
    return Predictions(Path(out), len(names), unreadable, counts, ece)


_Said = tuple[Sequence[str], Ints, str, torch.Tensor, npt.NDArray[np.bool_]]
"""Names and ids of what was classified, what it is called, logits [S, C], and which of it could be read."""


def _image_logits(model: TunedModel, spec: str, exclude: str | Path | None, progress: runlog.Progress) -> _Said:
    source = open_source(spec, exclude=exclude)
    if not len(source.index):
        raise DataError(f"{source.name} has no images.")
    store = build_pixel_store(
        source,
        side=side_for(source, model.size),
        max_bad=1.0,
        workers=2,
        progress=lambda done, total: progress.show(f"reading images  {done}/{total}"),
    )
    rows = np.arange(len(source.index), dtype=np.int64)
    logits = _logits(model, store, rows, 128, progress)
    return source.index.names, source.index.ids, "images", logits, store.readable


def _video_logits(model: TunedModel, spec: str, config: DataConfig, progress: runlog.Progress) -> _Said:
    """The mean logits of each video's clips or frames."""
    videos = open_videos(spec, workers=2, progress=lambda done, total: progress.show(f"reading videos  {done}/{total}"))
    for line in videos.report.lines():
        progress.warn(line)
    found = sample_videos(videos, config, size=model.size, max_bad=1.0)
    each = _logits(model, found.store, found.samples, 32, progress)
    whole = found.videos.index
    seen = np.isin(np.arange(len(whole)), found.video_of)
    logits = mean_by(each, found.video_of, len(whole))
    broken = [name for name, _ in found.videos.report.broken]
    names, ids = (*whole.names, *broken), np.concatenate([whole.ids, np.array([*map(sample_id, broken)], np.int64)])
    return (
        names,
        ids,
        "videos",
        torch.cat([logits, logits.new_zeros(len(broken), logits.shape[1])]),
        np.concatenate([seen, np.zeros(len(broken), np.bool_)]),
    )


def _logits(model: TunedModel, store: Pixels, rows: Ints, batch: int, progress: runlog.Progress) -> torch.Tensor:
    device = pick_device("auto")
    network = model.model.to(device)
    with frozen(network):
        views = plain_batches(store, rows, size=model.size, mean=model.mean, std=model.std, batch=batch, device=device)
        (logits,) = gather(
            lambda x: (network(x),), views, len(rows), lambda done, total: progress.show(f"classified  {done}/{total}")
        )
    return logits
