"""Beside accuracy: recall of each class, balanced accuracy, macro F1, confusion, calibration.

Accuracy is a mean over images, and `crossed_interval` gives its interval. Recall, balanced accuracy and F1 are ratios
of such means, and each gets the same interval by linearisation: with numerators a[i] and denominators b[i] of the
images, the ratio T = sum a / sum b changes, when an image is added or left out, by (a[i] - T b[i]) / mean(b) to first
order, so that T + (a[i] - T b[i]) / mean(b) stands in for the image's own score. Its mean is T.

Shapes: A answers to every test image (runs, and label draws of each), I images, C classes, R replicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.errors import DataError
from mocokit.evaluation.interval import Interval, between_bounds, crossed_interval

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CALIBRATION_BINS = 15
"""Equally wide bins of the confidence, the probability of the predicted class (Guo et al. 2017)."""


@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """Confidence against accuracy in each of the equally wide bins of 0..1; all have as many entries as bins.

    Where a bin is empty its confidence and accuracy are 0.
    """

    share: Floats
    """Of all answers."""
    confidence: Floats
    accuracy: Floats

    @property
    def ece(self) -> float:
        """The expected calibration error: the mean over answers of the bin's |accuracy - confidence|, in 0..1."""
        return float((self.share * np.abs(self.accuracy - self.confidence)).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How one method answered. All but `confusion` and `reliability` with intervals; fractions."""

    accuracy: Interval
    balanced_accuracy: Interval
    """The mean over classes of their recall."""
    macro_f1: Interval
    """The mean over classes of the harmonic mean of precision and recall."""
    recall: dict[int, Interval | None]
    """By class number, of the classes that the test images have; None where one image (or group) allows no interval."""
    confusion: Floats
    """[C, C]: rows are classes, columns what they were taken for; counts, the mean over answers."""
    reliability: Reliability | None
    """None for a readout without probabilities (kNN)."""

    def to_dict(self, class_names: Sequence[str]) -> dict[str, Any]:
        """As JSON values."""
        value: dict[str, Any] = {
            name: _plain(getattr(self, name)) for name in ("accuracy", "balanced_accuracy", "macro_f1")
        }
        value["recall"] = {class_names[number]: one and _plain(one) for number, one in self.recall.items()}
        value["ece"] = None if self.reliability is None else self.reliability.ece
        return value


def _plain(one: Interval) -> dict[str, Any]:
    return {"score": one.mean, "ci95": [one.low, one.high]}


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What a method said of every test image, answer by answer.

    predicted: int64 [A, I]; confidence: [A, I] in 0..1, or None; replicate: int64 [A], which of the R rows of the
    interval an answer belongs to, whose value is the mean over its answers.
    """

    predicted: Ints
    replicate: Ints
    confidence: Floats | None = None

    def rows(self, values: Floats) -> Floats:
        """Means [R, ...] over the answers of each replicate of values [A, ...]."""
        R = int(self.replicate.max()) + 1
        return np.stack([values[self.replicate == r].mean(axis=0) for r in range(R)])

    def right(self, labels: Ints) -> Floats:
        """[R, I] in 0..1: how right each replicate is on each image of labels int64 [I]."""
        return self.rows((self.predicted == labels).astype(np.float64))


def score(answers: Answers, labels: Ints, *, n_classes: int, groups: Ints | None = None) -> Scores:
    """Everything about one method's answers. labels: int64 [I] in 0..n_classes-1; groups as in `crossed_interval`."""
    right = answers.right(labels)
    by_class: dict[int, Interval | None] = {}
    for number in np.unique(labels).tolist():
        mine = np.flatnonzero(labels == number)
        try:
            by_class[number] = crossed_interval(right[:, mine], None if groups is None else groups[mine], bounds=(0, 1))
        except DataError:
            by_class[number] = None
    return Scores(
        accuracy=crossed_interval(right, groups, bounds=(0, 1)),
        balanced_accuracy=_mean_of_ratios(answers, labels, groups, _recalls),
        macro_f1=_mean_of_ratios(answers, labels, groups, _f1s),
        recall=by_class,
        confusion=confusion(answers.predicted, labels, n_classes),
        reliability=None if answers.confidence is None else reliability(answers, labels),
    )


Ratio = Callable[[Floats, Floats], tuple[Floats, Floats]]
"""(images of a class [1, I], images taken for it [A, I]), as 0 and 1 -> numerators and denominators of a ratio."""


def _recalls(of_class: Floats, taken_for: Floats) -> tuple[Floats, Floats]:
    return taken_for * of_class, of_class


def _f1s(of_class: Floats, taken_for: Floats) -> tuple[Floats, Floats]:
    return 2 * taken_for * of_class, of_class + taken_for


def _mean_of_ratios(answers: Answers, labels: Ints, groups: Ints | None, ratio: Ratio) -> Interval:
    """The mean over the classes there are of a ratio, with its interval.

    A small class that is all right (or all wrong) says too little about how sure that is, so for the interval two more
    images of each class are imagined, one right and one wrong, as `crossed_interval` does for all images together.
    """
    there = np.unique(labels)
    A, extra = len(answers.predicted), np.concatenate([there, there])
    said = np.concatenate([there, np.full(len(there), -1)])
    more = Answers(
        np.concatenate([answers.predicted, np.tile(said, (A, 1))], axis=1), answers.replicate, answers.confidence
    )
    alone = None if groups is None else np.concatenate([groups, np.full(len(extra), -1)])
    mean = float(_stand_ins(answers, labels, there, ratio).mean())
    wide = crossed_interval(_stand_ins(more, np.concatenate([labels, extra]), there, ratio), alone)
    low, high = between_bounds(wide.mean, (wide.high - wide.low) / 2, 0.0, 1.0)
    return Interval(mean=mean, low=min(low, mean), high=max(high, mean), df=wide.df, this_run_only=wide.this_run_only)


def _stand_ins(answers: Answers, labels: Ints, classes: Ints, ratio: Ratio) -> Floats:
    """[R, I]: the mean over classes of the linearised ratio."""
    parts = []
    for number in classes.tolist():
        of_class = (labels == number).astype(np.float64)[None]
        parts.append(linearised(*ratio(of_class, (answers.predicted == number).astype(np.float64))))
    return answers.rows(np.mean(parts, axis=0))


def linearised(above: Floats, below: Floats) -> Floats:
    """Stand-ins [A, I] for the images' scores whose row means are the ratios sum(above) / sum(below) (see the top).

    above, below: [A, I] (or [1, I]). A ratio of nothing to nothing is 0.
    """
    total = np.broadcast_to(below.mean(axis=1, keepdims=True), (len(above), 1))
    safe = np.where(total > 0, total, 1.0)
    ratio = above.mean(axis=1, keepdims=True) / safe
    return np.asarray(ratio + (above - ratio * below) / safe, np.float64)


def confusion(predicted: Ints, labels: Ints, n_classes: int) -> Floats:
    """[C, C] counts, rows by label and columns by prediction, the mean over the answers predicted [A, I]."""
    cells = labels * n_classes + predicted
    counts = np.bincount(cells.ravel(), minlength=n_classes**2).reshape(n_classes, n_classes)
    return np.asarray(counts / len(predicted), np.float64)


def reliability(answers: Answers, labels: Ints, bins: int = CALIBRATION_BINS) -> Reliability:
    """Confidence against accuracy of all answers together, in equally wide bins; bin k is ((k-1)/bins, k/bins]."""
    if answers.confidence is None:
        raise ValueError("these answers have no confidence")
    return calibration(answers.confidence, answers.predicted == labels, bins)


def calibration(confidence: Floats, right: npt.NDArray[np.bool_], bins: int = CALIBRATION_BINS) -> Reliability:
    """The reliability of confidences in 0..1 and whether each was right, of any equal shape."""
    place = np.clip(np.ceil(confidence.ravel() * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins).astype(np.float64)
    filled = np.maximum(counts, 1)
    return Reliability(
        share=counts / max(counts.sum(), 1),
        confidence=np.bincount(place, confidence.ravel(), bins) / filled,
        accuracy=np.bincount(place, right.ravel().astype(np.float64), bins) / filled,
    )
