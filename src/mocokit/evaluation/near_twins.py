"""Test images that are nearly one picture with a training image, and what the score is without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.twin_search import twins_across
from mocokit.evaluation.labelled import LabelledData
from mocokit.evaluation.verdict import Verdict, percent, points

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class NearTwins:
    """The test images with a near twin among the labelled training images, by what the pixel store keeps of them."""

    n_test: int
    rows: Ints
    """Places in the test split, ascending, of those that have one."""
    pairs: int
    examples: tuple[tuple[str, str], ...]
    """(test image, training image), a few."""
    without: Mapping[str, Verdict]
    """By classifier: the verdict without them; empty where there are none, or nothing else."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "n_test": self.n_test,
            "test_images": len(self.rows),
            "pairs": self.pairs,
            "examples": [list(pair) for pair in self.examples],
            "verdicts_without": {name: one.to_json() for name, one in self.without.items()},
        }


def near_twins(data: LabelledData, bank: Ints, verdict_of: Callable[[Bools], Mapping[str, Verdict]]) -> NearTwins:
    """Look for near twins between the test split and the labelled rows `bank`, and judge again without them.

    verdict_of: the verdicts on the test images that a mask [n_test] keeps.
    """
    test = data.split.test
    pairs = twins_across(data.store, test, bank[data.index.labels[bank] >= 0])
    rows = np.flatnonzero(np.isin(test, [first for first, _ in pairs]))
    keep = np.ones(len(test), np.bool_)
    keep[rows] = False
    names = data.index.names
    return NearTwins(
        n_test=len(test),
        rows=rows,
        pairs=len(pairs),
        examples=tuple((names[first], names[second]) for first, second in pairs[:3]),
        without=verdict_of(keep) if len(rows) and keep.any() else {},
    )


def near_twins_line(found: NearTwins, verdicts: Mapping[str, Verdict]) -> str:
    """What was found, with the score with and without them. verdicts: those on all test images, by classifier."""
    if not len(found.rows):
        return f"Near twins: none of the {found.n_test} test images has one among the training images."
    first, second = found.examples[0]
    text = (
        f"Near twins: {len(found.rows)} of {found.n_test} test images have one among the training images "
        f"({first!r} and {second!r}, for example)."
    )
    for classifier, one in found.without.items():
        whole = verdicts[classifier]
        low, high = map(points, one.ci95)
        text += (
            f" Without them {one.metric} {percent(one.score)} (with them {percent(whole.score)}), "
            f"{points(one.delta)} pp [{low}, {high}] to {one.baseline['name']}: {one.verdict}."
        )
    return text if found.without else f"{text} No test image is left without them."
