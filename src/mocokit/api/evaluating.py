"""The verb `evaluate`: frozen encoders against their baselines."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mocokit import files
from mocokit.data.exclusion import refuse_for_videos
from mocokit.data.videos import holds_videos
from mocokit.errors import UsageError
from mocokit.evaluation.counterfactual import find_change
from mocokit.evaluation.frozen import (
    CLASSIFIERS,
    Classifier,
    FrozenPlan,
    FrozenResult,
    counterfactuals,
    evaluate_frozen,
)
from mocokit.evaluation.labelled import LabelledData, open_labelled
from mocokit.evaluation.labelled_videos import VideoData, open_labelled_videos
from mocokit.evaluation.table import confusion_csv, methods_csv, recall_csv, reliability_csv, table_and_verdict
from mocokit.evaluation.together import check_together
from mocokit.evaluation.weights import NamedEncoder, NotHere, open_baseline
from mocokit.reporting import plots
from mocokit.reporting.classes import confusion_figure, reliability_figure
from mocokit.training import runlog
from mocokit.training.allocator import keep_freed_memory
from mocokit.training.run import Run, load_run
from mocokit.training.state import pick_device

__all__ = ["evaluate", "open_runs", "table_and_verdict"]

WRITTEN = (
    "verdict.json",
    *(f"{classifier}.csv" for classifier in CLASSIFIERS),
    "recall.csv",
    "confusion.csv",
    "confusion.png",
    "reliability.csv",
    "reliability.png",
)
_CLASSIFIERS: dict[str, tuple[Classifier, ...]] = {"knn": ("knn",), "linear": ("linear",), "both": ("knn", "linear")}


def evaluate(
    runs: str | Path | Run | Sequence[str | Path | Run],
    labelled: str | Path,
    *,
    classifier: str = "knn",
    labels_per_class: int | str | None = 10,
    draws: int = 20,
    k: int | None = None,
    knn_temperature: float = 0.1,
    readout: str = "h",
    random_seeds: int | None = None,
    baseline: Sequence[str] = (),
    allow_partial: bool = False,
    label_column: str | None = None,
    group_column: str | None = None,
    exclude: str | Path | None = None,
    shuffle_labels: bool = False,
    counterfactual: Sequence[str] = (),
    quiet: bool = False,
) -> FrozenResult:
    """Score frozen encoders by kNN or a linear probe against pixels, random and named weights, and give a verdict.

    runs: one run, or several of one recipe that differ in their seed. labelled: data with labels; its own splits
    are used, or a fixed one by hash (labelled videos for runs on clips, and for runs on frames where they are videos).
    classifier: `knn`, `linear` or `both` (the verdict is then kNN's, the probe's
    stands beside it). labels_per_class: labels the classifier may see, or "all" / None; draws: how often they are
    drawn. k: None = chosen by cross-validation inside each draw (200 with all labels). random_seeds: random
    initialisations of the baseline, None = as many as runs. baseline: further weights, `timm:NAME` (when on this
    machine), `FILE.safetensors` or `NAME=FILE.safetensors`; allow_partial: also files that hold less than 90 % of the
    backbone's tensors. exclude: a list of samples to leave out. counterfactual: changes (`channel-swap`,
    `grayscale`, `flip`, `shift`, `brightness`) under which the features are compared with those of the test images as
    they are, before and after training.

    Writes verdict.json, tables and pictures into every run's eval folder, and a line into its ledger. Raises
    UsageError, DataError, DamagedError, and LockedError when another evaluation of a run is going on.
    """
    keep_freed_memory()
    progress = runlog.Progress(quiet=quiet)
    opened = open_runs(runs, progress, "evaluate")
    if classifier not in _CLASSIFIERS:
        raise UsageError(f"--classifier must be knn, linear or both. Got {classifier!r}.")
    frozen_plan = FrozenPlan(
        labels_per_class=label_budget(labels_per_class),
        draws=draws,
        k=k,
        knn_temperature=knn_temperature,
        readout=readout,
        classifiers=_CLASSIFIERS[classifier],
        random_seeds=random_seeds,
        shuffle_labels=shuffle_labels,
    )
    for change in counterfactual:
        find_change(change)
    first = opened[0]
    named = _open_baselines(baseline, first, allow_partial)
    with contextlib.ExitStack() as locks:
        for run in sorted(opened, key=lambda one: str(one.path.resolve())):
            files.make_folder(run.folder.evaluation)
            locks.enter_context(files.RunLock(run.folder.evaluation))
        data = open_labelled_for(
            first,
            str(labelled),
            label_column=label_column,
            group_column=group_column,
            exclude=exclude,
            cache=first.path / "cache" / "labelled.u8",
            progress=lambda done, total: progress.show(f"reading labelled data  {done}/{total}"),
        )
        if isinstance(data, VideoData) and (baseline or counterfactual):
            flag = "--baseline" if baseline else "--counterfactual"
            raise UsageError(
                f"{flag} is for images; {labelled} holds videos. Leave it out; for motion use `mocokit motion`."
            )
        device = pick_device("auto")
        result = evaluate_frozen(
            opened,
            data,
            frozen_plan,
            named=named,
            cache=first.path / "cache",
            device=device,
            say=progress.say,
            warn=progress.warn,
        )
        if counterfactual and isinstance(data, LabelledData):
            progress.say(f"counterfactual: {', '.join(counterfactual)}")
            probes = counterfactuals(opened, data, counterfactual, device=device)
            result = dataclasses.replace(result, counterfactual=probes)
        if not shuffle_labels:
            for run in opened:
                _write(run.folder.evaluation, result)
    return result


def open_labelled_for(
    run: Run,
    spec: str,
    *,
    label_column: str | None,
    group_column: str | None,
    exclude: str | Path | None,
    progress: Callable[[int, int], None],
    cache: Path | None = None,
) -> LabelledData | VideoData:
    """Labelled videos where the run reads clips, or frames and these are videos; else images."""
    config, size = run.config, run.config.views.size
    columns: dict[str, Any] = {"label_column": label_column, "group_column": group_column}
    if config.data.video == "clips" or (config.data.video == "frames" and holds_videos(spec)):
        refuse_for_videos(exclude, spec)
        return open_labelled_videos(spec, config.data, size=size, cache=cache, progress=progress, **columns)
    return open_labelled(spec, size=size, cache=cache, progress=progress, exclude=exclude, **columns)


def open_runs(runs: str | Path | Run | Sequence[str | Path | Run], progress: runlog.Progress, verb: str) -> list[Run]:
    """The runs, which must be repeats of one recipe; what is odd about them is told as a warning."""
    listed = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    if not listed:
        raise UsageError(f"{verb} needs at least one run.")
    opened = [run if isinstance(run, Run) else load_run(Path(run)) for run in listed]
    for warning in check_together(opened):
        progress.warn(warning)
    for run in opened:
        for reason in run.found.passed_over:
            progress.warn(f"passed over a damaged checkpoint: {reason}")
    return opened


def label_budget(value: int | str | None) -> int | None:
    """Labels per class; None for all of them."""
    if value is None or value == "all":
        return None
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"--labels-per-class must be a whole number or `all`. Got {value!r}.") from None


def _open_baselines(specs: Sequence[str], run: Run, allow_partial: bool) -> list[NamedEncoder | NotHere]:
    if allow_partial and not specs:
        raise UsageError("--allow-partial has no effect without --baseline. Leave it out.")
    views = run.config.views
    found = [
        open_baseline(
            spec,
            run.config.encoder,
            size=views.size,
            mean=views.mean,
            std=views.std,
            allow_partial=allow_partial,
        )
        for spec in specs
    ]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"Two baselines are called {name!r}. Name each once, or rename one of the files.")
    return found


def _write(folder: Path, result: FrozenResult) -> None:
    """Everything about an evaluation; what an earlier one left and this one has not is removed."""
    for name in WRITTEN:
        files.sweep_leftovers(folder / name)
    judged = result.verdict.readout if result.verdict.encoder == "query" else f"key-{result.verdict.readout}"
    files.write_json(folder / "verdict.json", result.to_dict())
    for classifier in CLASSIFIERS:
        if classifier in result.tables:
            files.write_text(folder / f"{classifier}.csv", methods_csv(result.tables[classifier]))
        else:
            files.remove_path(folder / f"{classifier}.csv")
    files.write_text(folder / "recall.csv", recall_csv(result))
    files.write_text(folder / "confusion.csv", confusion_csv(result))
    panels = [
        (f"{CLASSIFIERS[classifier]} of {judged}", methods[judged].confusion)
        for classifier, methods in result.tables.items()
    ]
    plots.save_figure(confusion_figure(panels, result.class_names), folder / "confusion.png")
    if "linear" not in result.tables:
        files.remove_path(folder / "reliability.csv")
        files.remove_path(folder / "reliability.png")
        return
    methods = result.tables["linear"]
    files.write_text(folder / "reliability.csv", reliability_csv(methods))
    shown = (judged, result.verdicts["linear"].baseline["name"])
    told = [(name, methods[name].reliability) for name in shown]
    plots.save_figure(
        reliability_figure([(n, r.share, r.confidence, r.accuracy, r.ece) for n, r in told if r is not None]),
        folder / "reliability.png",
    )
