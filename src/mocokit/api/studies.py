"""The verbs `lab` and `ablate`: experiments that are more than one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from mocokit import files
from mocokit.api.evaluating import evaluate
from mocokit.api.pretraining import pretrain
from mocokit.training import runlog

if TYPE_CHECKING:
    from mocokit.studies.ablation import Study
    from mocokit.studies.labs import LabResult


def lab(
    number: str, out: str | Path | None = None, *, seeds: int = 1, overwrite: bool = False, quiet: bool = False
) -> LabResult:
    """Run LAB `06` or `07` as published and leave its data, weights, pictures and figures in `out` (runs/labNN).

    seeds: how many repetitions; the first is the published one. With several, a table of mean, spread and interval
    per figure, and one sentence per published conclusion. Repetitions that are there already are kept.

    Raises UsageError, LockedError, StorageError, DamagedError.
    """
    from mocokit.studies.labs import run_lab  # scikit-learn takes a second to import, paid only here

    progress = runlog.Progress(quiet=quiet)
    folder = Path(out) if out is not None else Path("runs") / f"lab{number}"
    return run_lab(number, folder, seeds=seeds, overwrite=overwrite, say=progress.say)


def ablate(plan_file: str | Path, out: str | Path, *, quiet: bool = False) -> Study:
    """Carry out a pre-registered study of one factor; the plan's form is described in `studies.ablation`.

    The plan's hash and the time are written before the first run. An interrupted study goes on where it was; each
    cell's test split is read once. Raises UsageError for a plan that varies more than it says, or another plan in
    `out`; what `pretrain` and `evaluate` raise.
    """
    from mocokit.studies.ablation import Plan as StudyPlan
    from mocokit.studies.ablation import read_plan, run_plan

    progress = runlog.Progress(quiet=quiet)

    def train(settings: Mapping[str, Any], data: str, folder: Path) -> None:
        if (folder / "run.json").exists():
            pretrain(data, folder, resume=True, quiet=True)
            return
        path = folder.with_name(f"{folder.name}.yaml")
        files.write_text(path, yaml.safe_dump(dict(settings), sort_keys=False))
        pretrain(data, folder, config_file=path, quiet=True)

    def score(folder: Path, labelled: str, study: StudyPlan) -> npt.NDArray[np.float64]:
        budget = "all" if study.labels_per_class is None else study.labels_per_class
        result = evaluate(
            folder, labelled, labels_per_class=budget, draws=study.draws, readout=study.metric, quiet=True
        )
        per_image: npt.NDArray[np.float64] = result.correct[study.metric].mean(0)
        return per_image

    return run_plan(read_plan(Path(plan_file)), Path(out), train=train, score=score, say=progress.say)
