"""Metrics against scikit-learn, and their intervals by simulation with known truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, recall_score

from mocokit.evaluation.interval import crossed_interval
from mocokit.evaluation.metrics import Answers, calibration, linearised, score


@given(
    seed=st.integers(0, 10_000),
    A=st.integers(1, 4),
    images=st.integers(12, 60),
    C=st.integers(2, 6),
    some=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_values_equal_scikit_learn(seed: int, A: int, images: int, C: int, some: bool) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(images) % C)
    predicted = np.where(rng.random((A, images)) < 0.6, labels, rng.integers(0, C, (A, images)))
    if some:  # a class that the test images don't have
        labels[labels == 0] = 1
    there = np.unique(labels)
    got = score(Answers(predicted, np.arange(A)), labels, n_classes=C)
    assert got.accuracy.mean == pytest.approx(np.mean(predicted == labels))
    theirs = [recall_score(labels, row, labels=there, average="macro") for row in predicted]
    assert got.balanced_accuracy.mean == pytest.approx(np.mean(theirs))
    if not some:
        assert np.mean(theirs) == pytest.approx(np.mean([balanced_accuracy_score(labels, row) for row in predicted]))
    f1 = [f1_score(labels, row, labels=there, average="macro", zero_division=0) for row in predicted]
    assert got.macro_f1.mean == pytest.approx(np.mean(f1))
    matrices = [confusion_matrix(labels, row, labels=range(C)) for row in predicted]
    np.testing.assert_allclose(got.confusion, np.mean(matrices, axis=0))
    for number, one in got.recall.items():
        assert one is not None
        assert one.mean == pytest.approx(np.mean((predicted == number)[:, labels == number]))
    assert got.reliability is None


def test_answers_of_one_replicate_are_averaged() -> None:
    labels = np.array([0, 1, 1, 0])
    predicted = np.array([[0, 1, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0]])
    answers = Answers(predicted, np.array([0, 0, 1]))
    np.testing.assert_array_equal(answers.right(labels), [[1, 0.5, 0, 0.5], [0, 1, 1, 1]])
    got = score(answers, labels, n_classes=2)
    assert got.accuracy.mean == pytest.approx(answers.right(labels).mean())


def test_a_class_of_one_image_has_no_interval() -> None:
    labels = np.array([0, 0, 0, 1])
    got = score(Answers(labels[None], np.zeros(1, np.int64)), labels, n_classes=2)
    assert got.recall[1] is None
    assert got.recall[0] is not None
    told = got.to_dict(["a", "b"])
    assert told["recall"]["b"] is None
    assert told["ece"] is None


def test_the_linearised_ratio_has_the_variance_of_the_jackknife() -> None:
    rng = np.random.default_rng(0)
    below = (rng.random(400) < 0.4).astype(float)
    above = below * (rng.random(400) < 0.7)
    values = linearised(above[None], below[None])
    assert values.mean() == pytest.approx(above.sum() / below.sum())
    left_out = (above.sum() - above) / (below.sum() - below)
    jackknife = 399 / 400 * ((left_out - left_out.mean()) ** 2).sum()
    assert values.var(ddof=1) / 400 == pytest.approx(jackknife, rel=0.02)


def test_calibration_equals_the_definition() -> None:
    rng = np.random.default_rng(1)
    confidence, right = rng.random((3, 500)), rng.random((3, 500)) < 0.6
    got = calibration(confidence, right, 10)
    expected = 0.0
    for k in range(10):
        inside = (confidence > k / 10) & (confidence <= (k + 1) / 10)
        expected += abs(right[inside].mean() - confidence[inside].mean()) * inside.mean()
    assert got.ece == pytest.approx(expected)
    assert got.share.sum() == pytest.approx(1)
    assert calibration(np.array([1.0, 0.0]), np.array([True, False])).ece == 0
    sure = calibration(np.full(10, 0.9), np.arange(10) < 6)
    assert sure.ece == pytest.approx(0.3)


# ------------------------------------------------------------------------------------------------- coverage


def coverage(R: int, sizes: tuple[int, ...], accuracies: tuple[float, ...], times: int, sd_run: float) -> list[float]:
    """The shares of intervals of (balanced accuracy, macro F1) that contain the truth."""
    rng = np.random.default_rng(R)
    C = len(sizes)
    labels = np.repeat(np.arange(C), sizes)
    chance = np.zeros((C, C))
    for c, accuracy in enumerate(accuracies):
        chance[c, c] = accuracy
        chance[c, (c + 1) % C] += (1 - accuracy) * 0.6
        chance[c, (c + 2) % C] += (1 - accuracy) * 0.4
    counts = chance * np.array(sizes)[:, None]
    truth = (
        np.mean(accuracies),
        np.mean([2 * counts[c, c] / (counts[c].sum() + counts[:, c].sum()) for c in range(C)]),
    )
    hits = np.zeros(2)
    for _ in range(times):
        latent = np.sqrt(0.6) * rng.normal(size=len(labels)) + np.sqrt(0.4) * rng.normal(size=(R, len(labels)))
        latent += sd_run * rng.normal(size=(R, 1))
        right = latent < stats.norm.ppf(accuracies)[labels] * np.sqrt(1 + sd_run**2)
        other = (labels + 1 + (rng.random((R, len(labels))) < 0.4)) % C
        got = score(Answers(np.where(right, labels, other), np.arange(R)), labels, n_classes=C)
        for place, one in enumerate((got.balanced_accuracy, got.macro_f1)):
            hits[place] += one.low <= truth[place] <= one.high
    return (hits / times).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("R", [1, 3, 5])
@pytest.mark.parametrize(
    ("sizes", "accuracies"), [((200, 50, 20), (0.8, 0.7, 0.6)), ((200, 100, 15), (0.95, 0.9, 0.95))]
)
def test_coverage_with_unequal_classes(R: int, sizes: tuple[int, ...], accuracies: tuple[float, ...]) -> None:
    got = coverage(R, sizes, accuracies, 500, 0.0 if R == 1 else 0.1)
    assert min(got) >= 0.92
    # Weighing the images by class without linearising counts the difference between classes as chance.
    labels = np.repeat(np.arange(3), sizes)
    weights = len(labels) / (3 * np.bincount(labels))[labels]
    right = np.random.default_rng(0).random((R, len(labels))) < np.array(accuracies)[labels]
    plain = crossed_interval(right * weights)
    ours = score(Answers(np.where(right, labels, (labels + 1) % 3), np.arange(R)), labels, n_classes=3)
    assert ours.balanced_accuracy.mean == pytest.approx(plain.mean)
    assert ours.balanced_accuracy.high - ours.balanced_accuracy.low < plain.high - plain.low
