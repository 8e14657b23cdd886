"""The few-label curve: each arm's scores at each label budget, and how many labels from scratch equal how many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.evaluation.interval import Interval, crossed_interval
from mocokit.evaluation.metrics import Answers, score
from mocokit.evaluation.verdict import Outcome

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FINE_TUNED = "fine-tuned"
FROM_SCRATCH = "from scratch"
FROZEN = "frozen probe"
FROZEN_RANDOM = "frozen random init"
ARMS = (FINE_TUNED, FROM_SCRATCH, FROZEN, FROZEN_RANDOM)


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """One arm at one label budget. Scores are fractions, with 95 % intervals."""

    arm: str
    budget: str
    labels: int
    """Labels in all classes together."""
    accuracy: Interval
    balanced_accuracy: Interval
    macro_f1: Interval
    ece: float | None
    delta: Interval | None
    """Accuracy less that of the arm `from scratch`, paired; None for that arm itself."""
    outcome: Outcome | None
    """BETTER, WORSE or NO CLEAR DIFFERENCE than from scratch, from that interval."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""

        def plain(one: Interval | None) -> dict[str, Any] | None:
            return None if one is None else {"score": one.mean, "ci95": [one.low, one.high]}

        return {
            "arm": self.arm,
            "budget": self.budget,
            "labels": self.labels,
            "accuracy": plain(self.accuracy),
            "balanced_accuracy": plain(self.balanced_accuracy),
            "macro_f1": plain(self.macro_f1),
            "ece": self.ece,
            "delta_to_scratch": plain(self.delta),
            "outcome": self.outcome,
        }


def curve_points(
    answers: dict[str, Answers], budget: str, labels: int, truth: Ints, *, n_classes: int, groups: Ints | None
) -> list[CurvePoint]:
    """The points of one budget. answers: by arm, `from scratch` among them; truth: int64 [I] of the test images."""
    scratch = answers[FROM_SCRATCH].right(truth)
    points = []
    for arm, one in answers.items():
        told = score(one, truth, n_classes=n_classes, groups=groups)
        delta, outcome = None, None
        if arm != FROM_SCRATCH:
            delta = crossed_interval(one.right(truth) - scratch, groups, bounds=(-1, 1))
            outcome = outcome_of(delta)
        points.append(
            CurvePoint(
                arm=arm,
                budget=budget,
                labels=labels,
                accuracy=told.accuracy,
                balanced_accuracy=told.balanced_accuracy,
                macro_f1=told.macro_f1,
                ece=None if told.reliability is None else told.reliability.ece,
                delta=delta,
                outcome=outcome,
            )
        )
    return points


def outcome_of(delta: Interval) -> Outcome:
    """The three outcomes, from the interval of a paired difference."""
    return "BETTER" if delta.low > 0 else "WORSE" if delta.high < 0 else "NO CLEAR DIFFERENCE"


@dataclass(frozen=True, slots=True)
class Match:
    """How many labels from scratch are worth `labels` labels of another arm: read off the curve from scratch."""

    arm: str
    labels: int
    equal: float | None
    """None: not reached within the budgets that were run."""
    low: float | None
    """Where the curve from scratch meets the lower end of the arm's interval; None likewise."""
    high: float | None
    at_most: bool
    """`equal` is the smallest budget that was run, and from scratch is as good there already."""

    def text(self, largest: int) -> str:
        """In words; largest: labels of the largest budget."""
        if self.equal is None:
            return f"{self.labels} labels {self.arm}: not reached from scratch with {largest}"
        sign = "at most " if self.at_most else ""
        ends = f"[{_or_more(self.low, largest)}, {_or_more(self.high, largest)}]"
        return f"{self.labels} labels {self.arm}: as good as {sign}{self.equal:.0f} from scratch {ends}"


def _or_more(labels: float | None, largest: int) -> str:
    return f"more than {largest}" if labels is None else f"{labels:.0f}"


def labels_to_match(points: Sequence[CurvePoint], arm: str = FINE_TUNED) -> list[Match]:
    """For each point of an arm, how many labels from scratch have the same accuracy.

    Between budgets the curve from scratch is taken as straight over the logarithm of the labels, and where it falls
    as level, so that it has one answer. Its own interval is not in low and high, which are those of the arm's.
    """
    scratch = sorted((point.labels, point.accuracy.mean) for point in points if point.arm == FROM_SCRATCH)
    found = []
    for point in sorted((one for one in points if one.arm == arm), key=lambda one: one.labels):
        ends = [_where(scratch, value) for value in (point.accuracy.mean, point.accuracy.low, point.accuracy.high)]
        at_most = ends[0] == scratch[0][0] and scratch[0][1] >= point.accuracy.mean
        found.append(Match(arm, point.labels, ends[0], ends[1], ends[2], at_most))
    return found


def _where(curve: Sequence[tuple[int, float]], value: float) -> float | None:
    """The labels at which a curve of (labels, accuracy) first reaches a value."""
    if curve[0][1] >= value:
        return float(curve[0][0])
    best_labels, best = curve[0]
    for labels, accuracy in curve[1:]:
        if accuracy >= value:
            share = (value - best) / (accuracy - best)
            return math.exp(math.log(best_labels) + share * (math.log(labels) - math.log(best_labels)))
        if accuracy > best:
            best = accuracy
        best_labels = labels
    return None


def curve_table(points: Sequence[CurvePoint], matches: Sequence[Match], test: str, replicates: str) -> str:
    """Text: one line for each budget and arm, then the labels that match. test: such as "40 test images"."""
    width = max(len(point.arm) for point in points)
    lines = [f"{'labels':>6}  {'':<{width}}  accuracy, % [95 % interval]  balanced  against from scratch, points"]
    for point in points:
        one = point.accuracy
        ends = f"[{_percent(one.low)}, {_percent(one.high)}]"
        line = f"{point.labels:>6}  {point.arm:<{width}}  {_percent(one.mean):>5} {ends}"
        line = f"{line:<{width + 37}}  {_percent(point.balanced_accuracy.mean):>8}"
        if point.delta is not None:
            ends = f"[{100 * point.delta.low:+.1f}, {100 * point.delta.high:+.1f}]"
            line += f"  {100 * point.delta.mean:+.1f} {ends} {point.outcome}"
        lines.append(line)
    largest = max(point.labels for point in points)
    lines += [match.text(largest) for match in matches]
    lines.append(f"{test}, {replicates}.")
    return "\n".join(lines) + "\n"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def curve_rows(points: Sequence[CurvePoint]) -> tuple[list[str], list[list[str]]]:
    """A head and rows for a CSV file; fractions."""
    head = ["budget", "labels", "arm"]
    names = ("accuracy", "balanced_accuracy", "macro_f1", "delta")
    head += [f"{name}{end}" for name in names for end in ("", "_low", "_high")] + ["ece", "outcome"]
    rows = []
    for point in points:
        row = [point.budget, str(point.labels), point.arm]
        for one in (point.accuracy, point.balanced_accuracy, point.macro_f1, point.delta):
            row += ["", "", ""] if one is None else [f"{value:.6f}" for value in (one.mean, one.low, one.high)]
        rows.append([*row, "" if point.ece is None else f"{point.ece:.6f}", point.outcome or ""])
    return head, rows
