"""A pre-registered study of one factor: the plan is hashed and dated before the first run, then carried out."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit import files
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.interval import Interval, crossed_interval
from mocokit.reporting.plots import save_figure
from mocokit.studies.study_figure import study_figure
from mocokit.studies.study_plan import Plan
from mocokit.training.runlog import utc_now

Floats = npt.NDArray[np.float64]

Train = Callable[[Mapping[str, Any], str, Path], None]
"""Pretrain `data` under a nested configuration into a run folder; resumes a run that was interrupted there."""

Score = Callable[[Path, str, "Plan"], "Judged"]
"""Judge a run. Reads the test split once."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What one run came to.

    correct: how right it is on each test image, [I] in 0..1. staleness: (age in steps, cosine) of stored keys with the
    same views encoded now, means over the run's measurements; age 0 is the check that must read 1. masked_share:
    of the last epoch's queries, those that met a key of their own image; None without a queue. seconds: of training.
    """

    correct: Floats
    staleness: tuple[tuple[float, float], ...] = ()
    masked_share: float | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"correct": self.correct.tolist()}


def _judged(stored: Mapping[str, Any]) -> Judged:
    ages = tuple((float(age), float(cosine)) for age, cosine in stored["staleness"])
    return Judged(np.array(stored["correct"], np.float64), ages, stored["masked_share"], stored["seconds"])


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of the factor: its score, and its paired difference to the baseline (None for the baseline itself).

    staleness, masked_share, seconds: as in `Judged`, means over the seeds.
    """

    value: tuple[Any, ...]
    score: Interval
    per_seed: tuple[float, ...]
    difference: Interval | None
    p_holm: float | None
    staleness: tuple[tuple[float, float], ...]
    masked_share: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Study:
    """The whole result of a plan."""

    plan: Plan
    cells: tuple[Cell, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        rows = []
        for cell in self.cells:
            row: dict[str, Any] = {"value": list(cell.value), "score": _interval(cell.score), "per_seed": cell.per_seed}
            if cell.difference is not None:
                row |= {"difference": _interval(cell.difference), "p_holm": cell.p_holm}
            row |= {"staleness": cell.staleness, "masked_share": cell.masked_share, "seconds": cell.seconds}
            rows.append(row)
        return {
            "name": self.plan.name,
            "plan_sha256": self.plan.digest,
            "factorial": self.plan.factorial,
            "factors": list(self.plan.factors),
            "baseline": list(self.plan.baseline),
            "seeds": list(self.plan.seeds),
            "metric": f"kNN {self.plan.metric}",
            "label_column": self.plan.label_column,
            "companions": {str(value): changes for value, changes in self.plan.companions.items()},
            "cells": rows,
        }


def _interval(one: Interval) -> dict[str, float]:
    return {"mean": one.mean, "low": one.low, "high": one.high}


def run_plan(plan: Plan, out: Path, *, train: Train, score: Score, say: Callable[[str], None]) -> Study:
    """Carry out a plan in the folder `out`; what an earlier, interrupted call finished is not done again.

    Before the first run `plan.json` is written with the plan's hash and the time. Raises UsageError when the folder
    belongs to another plan, LockedError when another process carries it out at this moment.
    """
    files.make_folder(out)
    with files.RunLock(out):
        for folder in (out, out / "cells"):
            files.sweep_temporaries(folder)
        return _carry_out(plan, out, train=train, score=score, say=say)


def _carry_out(plan: Plan, out: Path, *, train: Train, score: Score, say: Callable[[str], None]) -> Study:
    _register(plan, out)
    total = len(plan.cells()) * len(plan.seeds)
    judged: dict[tuple[Any, ...], list[Judged]] = {cell: [] for cell in plan.cells()}
    for number, (seed, cell) in enumerate(itertools.product(plan.seeds, plan.cells()), 1):
        folder = out / "cells" / f"{_slug(plan, cell)}-seed{seed}"
        stored = folder.parent / f"{folder.name}.json"  # not with_suffix: a value such as 0.5 has a dot
        label = ", ".join(f"{key} {value}" for key, value in zip(plan.factors, cell, strict=True))
        if not stored.exists():
            say(f"[{number}/{total}] {label}, seed {seed}")
            files.make_folder(folder.parent)
            train(_with(plan, cell, seed), plan.data, folder)
            files.write_json(stored, score(folder, plan.labelled, plan).to_dict())
        judged[cell].append(_judged(files.read_json(stored)))
    study = Study(plan, tuple(_compare(plan, judged)))
    files.write_json(out / "results.json", study.to_dict())
    files.write_text(out / "results.txt", study_table(study))
    save_figure(study_figure(study.to_dict()), out / "results.png")
    return study


def _register(plan: Plan, out: Path) -> None:
    path = out / "plan.json"
    if path.exists():
        before = files.read_json(path)
        if before.get("sha256") != plan.digest:
            raise UsageError(
                f"{out} holds another plan ({before.get('name')!r}, registered {before.get('utc')}). A plan is not "
                "changed after its first run: use another --out."
            )
        return
    written = {"name": plan.name, "sha256": plan.digest, "utc": utc_now(), "factors": plan.factors, "base": plan.base}
    files.write_json(path, written | {"seeds": list(plan.seeds), "metric": plan.metric, "factorial": plan.factorial})


def _slug(plan: Plan, cell: Sequence[Any]) -> str:
    return "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in zip(plan.factors, cell, strict=True)).replace(
        "/", "_"
    )


FIXED = {"precision": "fp32", "layout": "contiguous"}


def _with(plan: Plan, cell: Sequence[Any], seed: int) -> dict[str, Any]:
    """The base configuration with this cell's values and seed.

    Precision and layout are fp32 and contiguous unless the plan names others: a timing could pick differently by arm.
    """
    nested: dict[str, Any] = json.loads(json.dumps(plan.base))
    for key, value in zip(plan.factors, cell, strict=True):
        section, _, name = key.partition(".")
        if name:
            nested.setdefault(section, {})[name] = value
        else:
            nested[section] = value
        for companion, changes in plan.companions.get(value, {}).items():
            nested[companion] = nested.get(companion, {}) | changes
    nested.setdefault("train", {})["seed"] = seed
    nested["execution"] = FIXED | nested.get("execution", {})
    return nested


def _compare(plan: Plan, judged: Mapping[tuple[Any, ...], list[Judged]]) -> list[Cell]:
    matrices = {cell: np.stack([one.correct for one in runs]) for cell, runs in judged.items()}
    if len({matrix.shape for matrix in matrices.values()}) != 1:
        raise DataError("The cells were judged on different test images; the labelled data changed during the study.")
    base = matrices[plan.baseline]
    differences = {cell: matrix - base for cell, matrix in matrices.items() if cell != plan.baseline}
    holm = dict(zip(differences, _holm([_p_value(d) for d in differences.values()]), strict=True))
    return [
        Cell(
            cell,
            crossed_interval(matrix, bounds=(0, 1)),
            tuple(float(x) for x in matrix.mean(1)),
            crossed_interval(differences[cell], bounds=(-1, 1)) if cell in differences else None,
            holm.get(cell),
            _mean_staleness([one.staleness for one in judged[cell]]),
            _mean([one.masked_share for one in judged[cell]]),
            _mean([one.seconds for one in judged[cell]]) or 0.0,
        )
        for cell, matrix in matrices.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _mean_staleness(runs: Sequence[tuple[tuple[float, float], ...]]) -> tuple[tuple[float, float], ...]:
    """The mean cosine at each age that every run measured; seeds have the same ages unless one was interrupted."""
    tables = [dict(run) for run in runs]
    shared = sorted(set(tables[0]).intersection(*tables[1:]))
    return tuple((age, float(np.mean([table[age] for table in tables]))) for age in shared)


def _p_value(difference: Floats) -> float:
    """Where the confidence interval of the difference first touches 0: two-sided, by bisection over confidence."""
    low, high = 0.0, 1.0 - 1e-9
    if not difference.any():
        return 1.0
    for _ in range(40):
        middle = (low + high) / 2
        one = crossed_interval(difference, confidence=middle, bounds=(-1, 1))
        if one.low > 0 or one.high < 0:
            low = middle
        else:
            high = middle
    return 1.0 - low


def _holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction for several comparisons with one baseline (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min((len(p_values) - rank) * p_values[i], 1.0))
        corrected[i] = worst
    return corrected


def study_table(study: Study) -> str:
    """The study as text: a row per cell, and what may be concluded."""
    plan = study.plan
    head = ", ".join(plan.factors)
    label = f" of {plan.label_column}" if plan.label_column else ""
    lines = [f"{plan.name}: kNN {plan.metric}{label}, %, {len(plan.seeds)} seed(s) [95 % interval]"]
    if plan.factorial:
        lines.append("Factorial plan: several factors vary; a difference to the baseline belongs to the combination.")
    for value, changes in plan.companions.items():
        lines.append(f"With {value} also goes: {json.dumps(changes)}.")
    lines.append(
        f"{head:<28}{'score':>24}{'difference to baseline':>32}{'p (Holm)':>10}{'stale keys':>19}{'masked':>8}{'s':>7}"
    )
    for cell in study.cells:
        name = ", ".join(map(str, cell.value))
        row = f"{name:<28}{_text(cell.score):>24}"
        if cell.difference is None:
            row += f"{'baseline':>32}{'':>10}"
        else:
            row += f"{_text(cell.difference, sign=True):>32}{cell.p_holm:>10.3f}"
        masked = "-" if cell.masked_share is None else f"{cell.masked_share:.0%}"
        lines.append(f"{row}{_stale(cell):>19}{masked:>8}{cell.seconds:>7.0f}")
    lines.append(
        "stale keys: cosine of the oldest keys with the same views encoded now, mean over the run. masked: queries of "
        "the last epoch that met a key of their own image. s: seconds of training, mean of the seeds."
    )
    if len(plan.seeds) == 1:
        lines.append("One seed: these intervals hold for these runs only.")
    lines.append(f"Plan SHA-256 {plan.digest[:16]}, registered before the first run.")
    return "\n".join(lines) + "\n"


def _stale(cell: Cell) -> str:
    if not cell.staleness:
        return "-"
    age, cosine = cell.staleness[-1]
    return f"{cosine:.3f} at age {age:.0f}"


def _text(one: Interval, *, sign: bool = False) -> str:
    form = "+.1f" if sign else ".1f"
    return f"{100 * one.mean:{form}} [{100 * one.low:{form}}, {100 * one.high:{form}}]"


__all__ = ["Cell", "Judged", "Study", "run_plan", "study_table"]
