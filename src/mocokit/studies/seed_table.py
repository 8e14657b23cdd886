"""What many seeds say: each figure's mean, spread and interval, and whether the published conclusions hold.

Every seed is a whole repetition: other sources, other first weights, another order and other views. The repetitions are
independent, so the interval of a mean is Student's t over them; accuracies end at 0 and 100 %, where it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from mocokit.studies.lab_run import CELLS, COSINES
from mocokit.studies.published import FIRST, MOCO_LOSS, name_of

Results = Mapping[str, Any]
"""results.json of one seed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure over the seeds, in % or as a cosine: every value, mean, standard deviation, 95 % interval."""

    arm: str
    cell: str
    values: tuple[float, ...]
    mean: float
    sd: float
    low: float
    high: float


def interval(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, standard deviation (n - 1) and the 95 % t interval of the mean. At least 2 values."""
    n = len(values)
    mean, sd = float(np.mean(values)), float(np.std(values, ddof=1))
    half = float(stdtrit(n - 1, 0.975)) * sd / math.sqrt(n)
    return mean, sd, mean - half, mean + half


def seed_table(results: Sequence[Results]) -> list[Cell]:
    """Every figure of every arm over the seeds."""
    cells = []
    for arm in results[0]["scores"]:
        for cell in (*CELLS, *COSINES):
            cosine = cell in COSINES
            values = tuple(one["scores"][arm][cell] * (1 if cosine else 100) for one in results)
            mean, sd, low, high = interval(values)
            least, greatest = (-1.0, 1.0) if cosine else (0.0, 100.0)
            cells.append(Cell(arm, cell, values, mean, sd, max(low, least), min(high, greatest)))
    return cells


# ------------------------------------------------------------------------------------------- conclusions


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A published conclusion as a number per seed.

    kind: `above` says the number is above 0; `always` says it is 0 in every seed; `near` says it is 0 within
    10 points, on average.
    """

    text: str
    kind: str
    value: Callable[[Results], float]
    unit: str = " pp"


def _percent(arm: str, cell: str) -> Callable[[Results], float]:
    return lambda one: 100 * float(one["scores"][arm][cell])


def _above(text: str, greater: tuple[str, str], lesser: tuple[str, str]) -> Claim:
    more, less = _percent(*greater), _percent(*lesser)
    return Claim(text=text, kind="above", value=lambda one: more(one) - less(one))


def _near(text: str, arm: str, cell: str, target: float) -> Claim:
    read = _percent(arm, cell)
    return Claim(text=text, kind="near", value=lambda one: read(one) - target)


def _always(text: str, arm: str, cell: str) -> Claim:
    read = _percent(arm, cell)
    return Claim(text=text, kind="always", value=lambda one: read(one) - 100)


CLAIMS: Mapping[str, Sequence[Claim]] = {
    "06": (
        _above(
            "With the hue kept, trained h reads shape worse than random weights (5NN; published 47.50 against 72.50)",
            ("random", "h_shape_knn"),
            ("keep-hue", "h_shape_knn"),
        ),
        _above(
            "With the hue swapped, h reads shape better than with the hue kept (5NN; published 85.83 against 47.50)",
            ("swap-hue", "h_shape_knn"),
            ("keep-hue", "h_shape_knn"),
        ),
        _above(
            "With the hue swapped, h reads shape better than random weights (5NN; published 85.83 against 72.50)",
            ("swap-hue", "h_shape_knn"),
            ("random", "h_shape_knn"),
        ),
        _near(
            "With the hue swapped, colour falls to chance in h (5NN; published 49.17, chance 50)",
            "swap-hue",
            "h_color_knn",
            50,
        ),
        _near(
            "With the hue swapped, colour falls to chance in z (5NN; published 52.92, chance 50)",
            "swap-hue",
            "z_color_knn",
            50,
        ),
        _near(
            "h loses the colour too: a linear readout of h is at chance as well (published for 5NN only)",
            "swap-hue",
            "h_color_linear",
            50,
        ),
        _above(
            "With the hue swapped, z reads shape better than h (5NN; published 95.42 against 85.83)",
            ("swap-hue", "z_shape_knn"),
            ("swap-hue", "h_shape_knn"),
        ),
        _above(
            "With the hue swapped, a linear readout finds more shape in h than 5NN (published 98.75 against 85.83)",
            ("swap-hue", "h_shape_linear"),
            ("swap-hue", "h_shape_knn"),
        ),
    ),
    "07": (
        _above(
            "In-batch contrast leaves shape harder to read from h than random weights (5NN; published 47.50, 72.50)",
            ("random", "h_shape_knn"),
            ("simclr", "h_shape_knn"),
        ),
        _above(
            "The small MoCo leaves shape harder to read from h than random weights (5NN; published 38.33, 72.50)",
            ("random", "h_shape_knn"),
            ("moco-toy", "h_shape_knn"),
        ),
        _always("Random weights keep the colour whole in h (5NN, published 100 %)", "random", "h_color_knn"),
        _always("In-batch contrast keeps the colour whole in h (5NN, published 100 %)", "simclr", "h_color_knn"),
        _always("The small MoCo keeps the colour whole in h (5NN, published 100 %)", "moco-toy", "h_color_knn"),
        _always("The small MoCo keeps the colour whole in z (5NN, published 100 %)", "moco-toy", "z_color_knn"),
        Claim(
            text=f"MoCo's loss falls from the first epoch to the last (published {MOCO_LOSS[0]} to {MOCO_LOSS[1]})",
            kind="above",
            value=lambda one: one["loss_history"]["moco-toy"][0] - one["loss_history"]["moco-toy"][-1],
            unit="",
        ),
        _above(
            "In-batch contrast makes shape easier to read linearly from h than random weights (published 69.17, 56.25)",
            ("simclr", "h_shape_linear"),
            ("random", "h_shape_linear"),
        ),
        _above(
            "The small MoCo makes shape harder to read linearly from h than random weights (published 54.58, 56.25)",
            ("random", "h_shape_linear"),
            ("moco-toy", "h_shape_linear"),
        ),
    ),
}
"""The conclusions of the published texts and tables, by lab."""

NEAR = 10.0
"""How far from chance still counts as near, in points."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A claim over the seeds. outcome: `holds` (`on average only`), `does not hold` or `not settled`."""

    claim: str
    outcome: str
    evidence: str

    def sentence(self) -> str:
        """The conclusion, and whether it holds over seeds, as one sentence."""
        return f"{self.claim}: {self.outcome}, {self.evidence}."


def judge(claim: Claim, results: Sequence[Results]) -> Judgement:
    """Whether a conclusion holds over these seeds (2 at least)."""
    values = [claim.value(one) for one in results]
    n = len(values)
    mean, _, low, high = interval(values)
    average = f"{mean:+.2f}{claim.unit} on average [95 % CI {low:+.2f}, {high:+.2f}]"
    if claim.kind == "always":
        same = sum(value == 0 for value in values)
        outcome = "holds" if same == n else "does not hold"
        lowest = "" if same == n else f"; the lowest is {100 + min(values):.2f} %, the mean {100 + mean:.2f} %"
        return Judgement(claim.text, outcome, f"100 % in {same} of {n} seeds{lowest}")
    if claim.kind == "near":
        away = low > NEAR or high < -NEAR
        outcome = "holds" if low >= -NEAR and high <= NEAR else "does not hold" if away else "not settled"
        return Judgement(claim.text, outcome, f"{average}, counted from chance")
    right = sum(value > 0 for value in values)
    holds = "holds" if right == n else "holds on average only"
    outcome = holds if low > 0 else "does not hold" if high < 0 else "not settled"
    return Judgement(claim.text, outcome, f"{average}, true in {right} of {n} seeds")


def seeds_text(lab: str, results: Sequence[Results]) -> str:
    """The table over seeds and one sentence per published conclusion."""
    table = seed_table(results)
    first = results[0]
    lines = [
        f"LAB {lab} over {len(results)} seeds ({first['seed']} and every 1000th after it); torch {first['torch']}, "
        f"{first['threads']} threads, {first['processor']}, {first['cpu_capability']}",
        f"{'':<28}{'mean':>8}{'sd':>7}  {'95 % interval':<18}{'min':>7}{'max':>8}{'published':>11}",
    ]
    for cell in table:
        digits = 3 if cell.cell in COSINES else 2
        published = FIRST[lab].get(cell.arm, {}).get(cell.cell)
        bounds = f"[{cell.low:.{digits}f}, {cell.high:.{digits}f}]"
        lines.append(
            f"{cell.arm:<10}{name_of(cell.cell):<18}{cell.mean:8.{digits}f}{cell.sd:7.{digits}f}  {bounds:<18}"
            f"{min(cell.values):7.{digits}f}{max(cell.values):8.{digits}f}"
            + (f"{published:11.2f}" if published is not None else f"{'-':>11}")
        )
    lines.append("")
    lines += [judge(claim, results).sentence() for claim in CLAIMS[lab]]
    return "\n".join(lines) + "\n"
