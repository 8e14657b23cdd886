"""The plan of a study, as a YAML file:

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
    label_column: color           # which labels, where the data have several; optional
    labels_per_class: 10          # or all

The factor is SECTION.KEY as in config.yaml, or `recipe`. More than one factor is refused unless the plan says
`factorial: true` and gives `factors: {KEY: [values], ...}`. `companions: {VALUE: {SECTION: {KEY: value}}}` names what
must change together with a value (epochs, where arms are given equal time); the report repeats it. Cells share their
seeds, so that all arms see the same order and the same views, and compute in fp32 and contiguous layout unless
`base: execution:` names others: what a timing picks could differ between arms.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mocokit.errors import UsageError, did_you_mean
from mocokit.training.settings import load_yaml

KEYS = (
    "name", "data", "labelled", "base", "factor", "values", "baseline", "seeds", "metric", "labels_per_class", "draws",
    "factorial", "factors", "label_column", "companions",
)  # fmt: skip


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
    label_column: str | None
    companions: dict[Any, dict[str, Any]]
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
        if key != "recipe" and key.count(".") != 1:
            raise UsageError(
                f"{where}: the factor '{key}' must be `recipe`, or SECTION.KEY as in config.yaml, such as contrast.K."
            )
        if len(values) < 2:
            raise UsageError(f"{where}: the factor '{key}' needs at least two values.")
    base = dict(raw.get("base") or {})
    for key in factors:
        section, _, name = key.partition(".")
        if name in (base.get(section) or {}) or (not name and key in base):
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
    label_column = raw.get("label_column")
    if label_column is not None and not isinstance(label_column, str):
        raise UsageError(f"{where}: 'label_column' must be a text. Got {label_column!r}.")
    companions = raw.get("companions", {})
    if not isinstance(companions, dict) or not all(isinstance(changes, dict) for changes in companions.values()):
        raise UsageError(f"{where}: 'companions' must map values of the factor to sections. Got {companions!r}.")
    strange = [value for value in companions if len(factors) > 1 or value not in next(iter(factors.values()))]
    if strange:
        raise UsageError(f"{where}: companions.{strange[0]}: that is no value of a single factor. Correct it.")
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
        label_column=label_column,
        companions=companions,
        labels_per_class=None if budget == "all" else budget,
        draws=int(raw.get("draws", 10)),
        factorial=bool(factorial),
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )
