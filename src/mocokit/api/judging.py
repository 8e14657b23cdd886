"""The verb `search eval`: how well search brings back images of the same label, against baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mocokit import files
from mocokit.api.evaluating import open_labelled_for
from mocokit.errors import UsageError
from mocokit.evaluation.features import extract
from mocokit.evaluation.labelled import LabelledData, open_labelled
from mocokit.evaluation.labelled_videos import VideoData, by_video
from mocokit.evaluation.verdict import verdict_line
from mocokit.exporting.trained import Trained, open_trained
from mocokit.retrieval.encode import Ints
from mocokit.retrieval.judging import SearchScores, by_id, judge_search
from mocokit.retrieval.layout import read_vectors
from mocokit.training import runlog
from mocokit.training.run import Run, load_run
from mocokit.training.state import pick_device


def search_eval(
    runs: str | Path | Run | Sequence[str | Path | Run],
    labelled: str | Path,
    *,
    readout: str = "h",
    k: Sequence[int] = (1, 5, 10),
    label_column: str | None = None,
    group_column: str | None = None,
    exclude: str | Path | None = None,
    against: Sequence[str] = (),
    device: str = "auto",
    quiet: bool = False,
) -> SearchScores:
    """recall@k, mAP and R-precision of search among the test images, by label, with intervals and a verdict on mAP.

    against: further baselines, `NAME=FILE.parquet` (columns id and vector, as `embed` writes) or `NAME=RUN`. Pixels
    and random weights are always run. exclude: a list of samples to leave out. Writes eval/search.json into every
    run folder and a line into its ledger. Raises UsageError, DataError, DamagedError.
    """
    listed = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    if not listed:
        raise UsageError("search eval needs at least one run.")
    opened = [run if isinstance(run, Run) else load_run(Path(run)) for run in listed]
    if readout not in ("h", "z", "key-h", "key-z"):
        raise UsageError(f"--readout must be one of h, z, key-h, key-z. Got {readout!r}.")
    progress = runlog.Progress(quiet=quiet)
    chosen = pick_device(device)

    def data_for(size: int) -> LabelledData:
        return open_labelled(
            str(labelled),
            size=size,
            label_column=label_column,
            group_column=group_column,
            exclude=exclude,
            cache=opened[0].path / "cache" / f"labelled-{size}.u8",
            progress=lambda done, total: progress.show(f"reading images  {done}/{total}"),
        )

    data: LabelledData | VideoData
    if opened[0].config.data.video == "off":
        data = data_for(opened[0].config.views.size)
    else:
        data = open_labelled_for(
            opened[0],
            str(labelled),
            label_column=label_column,
            group_column=group_column,
            exclude=exclude,
            cache=opened[0].path / "cache" / "labelled.u8",
            progress=lambda done, total: progress.show(f"reading labelled data  {done}/{total}"),
        )
    named = dict(_named(text, data, data_for, chosen) for text in against)
    if len(named) < len(against):
        raise UsageError("Two of --against have the same name.")
    result = judge_search(opened, data, readout=readout, ks=k, named=named, device=chosen, say=progress.say)
    for run in opened:
        files.write_json(run.folder.evaluation / "search.json", result.to_dict())
    return result


Vectors = Callable[[Ints], torch.Tensor]


def _named(
    text: str, data: LabelledData | VideoData, data_for: Callable[[int], LabelledData], device: torch.device
) -> tuple[str, Vectors]:
    """A baseline by name: vectors from a file by id, or another run's features."""
    name, sign, place = text.partition("=")
    if not (name and sign and place):
        raise UsageError(f"--against must be NAME=FILE.parquet or NAME=RUN. Got {text!r}.")
    path = Path(place)
    if path.suffix == ".parquet":
        ids, vectors = read_vectors(path)
        return name, lambda rows: by_id(ids, vectors, data.index.ids[rows], place)
    trained = open_trained(path)
    if isinstance(data, VideoData):
        return name, _video_features(trained, data, device)
    if trained.clips is not None:
        raise UsageError(f"--against {text}: {place} reads clips of video, and {data.name} holds images.")

    def features(rows: Ints) -> torch.Tensor:
        views = trained.views
        encoder, same = trained.encoder().to(device), data_for(views.size)
        return extract(encoder, same.store, rows, size=views.size, mean=views.mean, std=views.std, device=device).h

    return name, features


def _video_features(trained: Trained, data: VideoData, device: torch.device) -> Vectors:
    """Another run's vectors of videos, where it reads the same clips (or frames) at the same size."""
    same = data.clips.source.config if data.clips is not None else None
    if (trained.clips is None) != (same is None) or (trained.clips and same and trained.clips.span != same.span):
        raise UsageError(f"{trained.path} reads other samples of videos than the runs that are judged. Judge it apart.")

    def features(videos: Ints) -> torch.Tensor:
        rows, place = data.of(videos)
        views, encoder = trained.views, trained.encoder().to(device)
        found = extract(
            encoder, data.store, rows, size=views.size, mean=views.mean, std=views.std, batch=64, device=device
        )
        return by_video(found.h, place, len(videos))

    return features


def search_table(result: SearchScores) -> str:
    """The scores as a table, what they rest on, and the verdict as the last line."""
    measures = list(next(iter(result.scores.values())))
    width = max(map(len, result.scores))
    lines = [f"{'':<{width}}" + "".join(f"  {measure + ', %':>21}" for measure in measures)]
    for name, row in result.scores.items():
        cells = (f"{100 * one.mean:5.1f} [{100 * one.low:5.1f}, {100 * one.high:5.1f}]" for one in row.values())
        lines.append(f"{name:<{width}}" + "".join(f"  {cell:>21}" for cell in cells))
    lines.append(
        f"{result.queries} of {result.gallery} test {result.verdict.judged} asked; each is searched among the others. "
        f"The test split has been read {result.test_readings} time(s) for this run."
    )
    lines.append(verdict_line(result.verdict))
    return "\n".join(lines) + "\n"
