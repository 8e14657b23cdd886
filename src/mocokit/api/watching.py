"""The verb `motion`: what runs on videos know of motion, beside the classes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from mocokit import files
from mocokit.api.evaluating import open_runs
from mocokit.errors import UsageError
from mocokit.evaluation.labelled_videos import open_labelled_videos
from mocokit.evaluation.motion_study import MotionResult, study_motion
from mocokit.training import runlog
from mocokit.training.run import Run
from mocokit.training.state import pick_device


def motion(
    runs: str | Path | Run | Sequence[str | Path | Run],
    labelled: str | Path,
    *,
    unusual: Sequence[str] = (),
    label_column: str | None = None,
    group_column: str | None = None,
    quiet: bool = False,
) -> MotionResult:
    """Retrieval, temporal order and unusual behaviour of runs on videos (`pretrain --video clips` or `frames`).

    labelled: labelled videos; their own splits are used, or a fixed one by hash, by video or group. unusual: classes
    to leave out of the videos compared with, in turn; none named = every class.

    Writes motion.json into every run's eval folder and a line into its ledger. Raises UsageError, DataError,
    DamagedError, MissingDependencyError, and LockedError when another evaluation of a run is going on.
    """
    progress = runlog.Progress(quiet=quiet)
    opened = open_runs(runs, progress, "motion")
    first = opened[0]
    if first.config.data.video == "off":
        raise UsageError(f"{first.path} was trained on images. Evaluate it with `mocokit evaluate`.")
    with contextlib.ExitStack() as locks:
        for run in sorted(opened, key=lambda one: str(one.path.resolve())):
            files.make_folder(run.folder.evaluation)
            locks.enter_context(files.RunLock(run.folder.evaluation))
        data = open_labelled_videos(
            str(labelled),
            first.config.data,
            size=first.config.views.size,
            label_column=label_column,
            group_column=group_column,
            cache=first.path / "cache" / "labelled.u8",
            progress=lambda done, total: progress.show(f"reading videos  {done}/{total}"),
        )
        result = study_motion(opened, data, unusual=unusual, device=pick_device("auto"), say=progress.say)
        for run in opened:
            files.write_json(run.folder.evaluation / "motion.json", result.to_dict())
    return result
