"""A pre-registered study of one factor: the plan is hashed and dated before the first run, then carried out as written.

A plan is a YAML file:

    name: momentum on moved digits
    data: moved-digits            # what to pretrain on
    labelled: moved-digits        # what to judge by; its test split is read once per cell
    base:                         # sections as in a run's config.yaml
      recipe: digits
      train: {epochs: 30}
    factor: contrast.m            # the one thing that varies
    values: [0.9, 0.99, 0.999]
    baseline: 0.99                # the value the others are compared with (default: the first)
    seeds: [0, 1, 2]
    metric: h                     # h, z, key-h or key-z
    labels_per_class: 10          # or all

More than one factor is refused unless the plan says `factorial: true` and gives `factors: {KEY: [values], ...}`.
Cells share their seeds, so that all arms see the same order and the same views.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from mocokit import files
from mocokit.errors import DataError, UsageError, did_you_mean
from mocokit.evaluation.interval import Interval, crossed_interval
from mocokit.training.runlog import utc_now
from mocokit.training.settings import load_yaml

KEYS = (
    "name", "data", "labelled", "base", "factor", "values", "baseline", "seeds", "metric", "labels_per_class", "draws",
    "factorial", "factors",
)  # fmt: skip
Floats = npt.NDArray[np.float64]

Train = Callable[[Mapping[str, Any], str, Path], None]
"""Pretrain `data` under a nested configuration into a run folder; resumes a run that was interrupted there."""

Score = Callable[[Path, str, "Plan"], Floats]
"""Judge a run: how right it is on each test image, [I] in 0..1. Reads the test split once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A study as it was written down."""

    name: str
    data: str
    labelled: str
    base: dict[str, Any]
    factors: dict[str, list[Any]]
    baseline: tuple[Any, ...]
    seeds: tuple[int, ...]
    metric: str
    labels_per_class: int | None
    draws: int
    factorial: bool
    digest: str

    def cells(self) -> list[tuple[Any, ...]]:
        """Every combination of the factors' values, in the order of the plan."""
        return list(itertools.product(*self.factors.values()))


def read_plan(path: Path) -> Plan:
    """Read and check a plan. Raises UsageError naming the key and what is wrong with it."""
    try:
        raw = load_yaml(path)
    except OSError as error:
        raise UsageError(f"Could not read the plan {path}: {error.strerror}. Check the path.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a readable plan: {' '.join(str(error).split())}. Correct it.") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{path} must hold keys such as `factor: contrast.m`.")
    for key in raw:
        if key not in KEYS:
            raise UsageError(f"{path}: unknown key '{key}'.{did_you_mean(str(key), KEYS)}")
    return _checked(raw, str(path))


def _checked(raw: Mapping[str, Any], where: str) -> Plan:
    def need(key: str, kind: type | tuple[type, ...], words: str) -> Any:
        value = raw.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{where}: '{key}' must be {words}. Got {value!r}.")
        return value

    factorial = raw.get("factorial", False)
    if "factors" in raw:
        if factorial is not True:
            raise UsageError(
                f"{where}: several factors vary at once, so no difference could be given to one of them. Vary one, or "
                "say `factorial: true`."
            )
        if "factor" in raw or "values" in raw:
            raise UsageError(f"{where}: give `factors` or `factor` with `values`, not both.")
        factors = {str(k): list(v) for k, v in need("factors", dict, "a mapping of keys to lists").items()}
    else:
        factors = {need("factor", str, "a key such as contrast.m"): list(need("values", list, "a list of values"))}
    for key, values in factors.items():
        if key.count(".") != 1:
            raise UsageError(f"{where}: the factor '{key}' must be SECTION.KEY as in config.yaml, such as contrast.K.")
        if len(values) < 2:
            raise UsageError(f"{where}: the factor '{key}' needs at least two values.")
    base = dict(raw.get("base") or {})
    for key in factors:
        section, name = key.split(".")
        if name in (base.get(section) or {}):
            raise UsageError(f"{where}: base.{key} and the factor {key} both set the same thing. Take one out.")
    if "seed" in (base.get("train") or {}):
        raise UsageError(f"{where}: base.train.seed has no effect: the plan's `seeds` decide. Take it out.")
    seeds = need("seeds", list, "a list of whole numbers")
    if not seeds or any(not isinstance(s, int) or isinstance(s, bool) for s in seeds) or len(set(seeds)) < len(seeds):
        raise UsageError(f"{where}: 'seeds' must be different whole numbers. Got {seeds!r}.")
    metric = raw.get("metric", "h")
    if metric not in ("h", "z", "key-h", "key-z"):
        raise UsageError(f"{where}: 'metric' must be h, z, key-h or key-z. Got {metric!r}.")
    budget = raw.get("labels_per_class", 10)
    if budget != "all" and (not isinstance(budget, int) or budget < 1):
        raise UsageError(f"{where}: 'labels_per_class' must be a whole number or all. Got {budget!r}.")
    baseline = raw.get("baseline", next(iter(factors.values()))[0])
    chosen = tuple(baseline) if isinstance(baseline, list) else (baseline,)
    if factorial and not isinstance(baseline, list):
        chosen = tuple(values[0] for values in factors.values())
    if any(value not in values for value, values in zip(chosen, factors.values(), strict=True)):
        raise UsageError(f"{where}: the baseline {baseline!r} is not among the values of the factor.")
    text = json.dumps(raw, sort_keys=True, ensure_ascii=False)
    return Plan(
        name=need("name", str, "a text"),
        data=need("data", str, "a data source"),
        labelled=need("labelled", str, "a data source"),
        base=base,
        factors=factors,
        baseline=chosen,
        seeds=tuple(seeds),
        metric=metric,
        labels_per_class=None if budget == "all" else budget,
        draws=int(raw.get("draws", 10)),
        factorial=bool(factorial),
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of the factor: its score, and its paired difference to the baseline (None for the baseline itself)."""

    value: tuple[Any, ...]
    score: Interval
    per_seed: tuple[float, ...]
    difference: Interval | None
    p_holm: float | None


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
            rows.append(row)
        return {
            "name": self.plan.name,
            "plan_sha256": self.plan.digest,
            "factorial": self.plan.factorial,
            "factors": list(self.plan.factors),
            "baseline": list(self.plan.baseline),
            "seeds": list(self.plan.seeds),
            "metric": f"kNN {self.plan.metric}",
            "cells": rows,
        }


def _interval(one: Interval) -> dict[str, float]:
    return {"mean": one.mean, "low": one.low, "high": one.high}


def run_plan(plan: Plan, out: Path, *, train: Train, score: Score, say: Callable[[str], None]) -> Study:
    """Carry out a plan in the folder `out`; what an earlier, interrupted call finished is not done again.

    Before the first run `plan.json` is written with the plan's hash and the time. Raises UsageError when the folder
    belongs to another plan.
    """
    files.make_folder(out)
    _register(plan, out)
    total = len(plan.cells()) * len(plan.seeds)
    correct: dict[tuple[Any, ...], list[Floats]] = {cell: [] for cell in plan.cells()}
    for number, (seed, cell) in enumerate(itertools.product(plan.seeds, plan.cells()), 1):
        folder = out / "cells" / f"{_slug(plan, cell)}-seed{seed}"
        stored = folder.parent / f"{folder.name}.json"  # not with_suffix: a value such as 0.5 has a dot
        label = ", ".join(f"{key} {value}" for key, value in zip(plan.factors, cell, strict=True))
        if not stored.exists():
            say(f"[{number}/{total}] {label}, seed {seed}")
            files.make_folder(folder.parent)
            train(_with(plan, cell, seed), plan.data, folder)
            files.write_json(stored, {"correct": score(folder, plan.labelled, plan).tolist()})
        correct[cell].append(np.array(files.read_json(stored)["correct"], np.float64))
    study = Study(plan, tuple(_compare(plan, correct)))
    files.write_json(out / "results.json", study.to_dict())
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
    return "-".join(f"{key.split('.')[1]}-{value}" for key, value in zip(plan.factors, cell, strict=True)).replace(
        "/", "_"
    )


def _with(plan: Plan, cell: Sequence[Any], seed: int) -> dict[str, Any]:
    """The base configuration with this cell's values and seed."""
    nested: dict[str, Any] = json.loads(json.dumps(plan.base))
    for key, value in zip(plan.factors, cell, strict=True):
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    nested.setdefault("train", {})["seed"] = seed
    return nested


def _compare(plan: Plan, correct: Mapping[tuple[Any, ...], list[Floats]]) -> list[Cell]:
    matrices = {cell: np.stack(rows) for cell, rows in correct.items()}
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
        )
        for cell, matrix in matrices.items()
    ]


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
    lines = [f"{plan.name}: kNN {plan.metric}, %, {len(plan.seeds)} seed(s) [95 % interval]"]
    if plan.factorial:
        lines.append("Factorial plan: several factors vary; a difference to the baseline belongs to the combination.")
    lines.append(f"{head:<28}{'score':>24}{'difference to baseline':>32}{'p (Holm)':>10}")
    for cell in study.cells:
        name = ", ".join(map(str, cell.value))
        row = f"{name:<28}{_text(cell.score):>24}"
        if cell.difference is None:
            row += f"{'baseline':>32}"
        else:
            row += f"{_text(cell.difference, sign=True):>32}{cell.p_holm:>10.3f}"
        lines.append(row)
    if len(plan.seeds) == 1:
        lines.append("One seed: these intervals hold for these runs only.")
    lines.append(f"Plan SHA-256 {plan.digest[:16]}, registered before the first run.")
    return "\n".join(lines) + "\n"


def _text(one: Interval, *, sign: bool = False) -> str:
    form = "+.1f" if sign else ".1f"
    return f"{100 * one.mean:{form}} [{100 * one.low:{form}}, {100 * one.high:{form}}]"


__all__ = ["Cell", "Plan", "Study", "read_plan", "run_plan", "study_table"]
