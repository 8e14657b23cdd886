"""The verbs `lab` and `ablate`: experiments that are more than one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from mocokit import files
from mocokit.api.evaluating import evaluate
from mocokit.api.pretraining import pretrain
from mocokit.training import runlog
from mocokit.training.runfolder import RunFolder
from mocokit.training.settings import from_yaml

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
    from mocokit.studies.ablation import Judged, run_plan
    from mocokit.studies.study_plan import Plan as StudyPlan
    from mocokit.studies.study_plan import read_plan

    progress = runlog.Progress(quiet=quiet)

    def train(settings: Mapping[str, Any], data: str, folder: Path) -> None:
        if RunFolder(folder).began:  # not run.json: stopped between the two, nothing says yet how to train
            pretrain(data, folder, resume=True, quiet=True)
            return
        path = folder.with_name(f"{folder.name}.yaml")
        files.write_text(path, yaml.safe_dump(dict(settings), sort_keys=False))
        pretrain(data, folder, config_file=path, quiet=True)

    def score(folder: Path, labelled: str, study: StudyPlan) -> Judged:
        result = evaluate(
            folder,
            labelled,
            labels_per_class="all" if study.labels_per_class is None else study.labels_per_class,
            draws=study.draws,
            readout=study.metric,
            label_column=study.label_column,
            quiet=True,
        )
        run = RunFolder(folder)
        epochs, health = runlog.read_metrics(run), runlog.read_health(run)
        images = epochs[0]["step"] * from_yaml(run.config).train.batch_size
        ages: dict[float, list[float]] = {}
        for age, cosine in (point for row in health for point in row.get("staleness", [])):
            ages.setdefault(age, []).append(cosine)
        return Judged(
            result.correct[study.metric].mean(0),
            tuple((age, float(np.mean(ages[age]))) for age in sorted(ages)),
            epochs[-1]["masked_share"],
            sum(images / epoch["images_per_second"] for epoch in epochs),
        )

    return run_plan(read_plan(Path(plan_file)), Path(out), train=train, score=score, say=progress.say)
