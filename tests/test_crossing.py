from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mocokit.errors import DataError, UsageError
from mocokit.evaluation.crossing import Reading, answer_features, knn_reader, probe_reader
from mocokit.evaluation.interval import crossed_interval
from mocokit.evaluation.knn import knn_predict
from mocokit.evaluation.probe import choose_strength, fit_probe
from mocokit.evaluation.protocol import choose_k, draw_few, shuffled

CLASSES = 3


def blobs(seed: int, count: int, spread: float = 1.0) -> tuple[Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    return torch.from_numpy(np.eye(5)[labels] + spread * rng.normal(size=(count, 5))), labels


BANK, LABELS = blobs(0, 120)
TEST, TEST_LABELS = blobs(1, 50)
IDS = np.arange(1000, 1120, dtype=np.int64)


def evaluate_features(
    features: Mapping[str, Any], labels: np.ndarray, ids: np.ndarray, test_labels: np.ndarray, read: Any, **kwargs: Any
) -> dict[str, np.ndarray]:
    """How right each method is on each test image, [R, I]."""
    answers = answer_features(features, labels, ids, read, **kwargs)
    return {name: one.right(test_labels) for name, one in answers.items()}


def moved(seed: int) -> tuple[Tensor, Tensor]:
    """Another run's features of the same images."""
    g = torch.Generator().manual_seed(seed)
    return tuple(x + 0.3 * torch.randn(x.shape, generator=g, dtype=x.dtype) for x in (BANK, TEST))  # type: ignore[return-value]


def right(bank: Tensor, test: Tensor, rows: np.ndarray, k: int = 3) -> np.ndarray:
    return knn_predict(bank[rows], LABELS[rows], test, k=k, n_classes=CLASSES) == TEST_LABELS


def test_all_labels_give_a_row_per_run_and_fixed_features_the_same_row() -> None:
    runs = [moved(1), moved(2), moved(3)]
    got = evaluate_features(
        {"ours": runs, "pixels": (BANK, TEST)}, LABELS, IDS, TEST_LABELS, knn_reader(CLASSES, 3), seed=0
    )
    assert list(got) == ["ours", "pixels"]
    for name, features in (("ours", runs), ("pixels", [(BANK, TEST)] * 3)):
        assert got[name].dtype == np.float64
        np.testing.assert_array_equal(got[name], [right(*pair, np.arange(120)) for pair in features])


def test_one_run_with_draws_gives_a_row_per_draw_the_same_labels_for_every_method() -> None:
    ours = moved(1)
    seen: list[tuple[int, ...]] = []
    reader = knn_reader(CLASSES, 3)

    def read(bank: Tensor, labels: np.ndarray, ids: np.ndarray, queries: Tensor) -> Reading:
        seen.append(tuple(ids.tolist()))
        return reader(bank, labels, ids, queries)

    got = evaluate_features(
        {"ours": ours, "pixels": (BANK, TEST)}, LABELS, IDS, TEST_LABELS, read, seed=4, labels_per_class=5, draws=6
    )
    assert seen[:6] == seen[6:]
    assert len(set(seen)) == 6
    drawn = [draw_few(LABELS, IDS, 5, draw, 4) for draw in range(6)]
    np.testing.assert_array_equal(got["ours"], [right(*ours, rows) for rows in drawn])
    np.testing.assert_array_equal(got["pixels"], [right(BANK, TEST, rows) for rows in drawn])


def test_several_runs_average_their_own_draws() -> None:
    runs = [moved(1), moved(2)]
    got = evaluate_features(
        {"ours": runs, "pixels": (BANK, TEST)},
        LABELS,
        IDS,
        TEST_LABELS,
        knn_reader(CLASSES, 3),
        seed=4,
        labels_per_class=5,
        draws=3,
    )
    for name, features in (("ours", runs), ("pixels", [(BANK, TEST)] * 2)):
        expected = [
            np.mean([right(*features[run], draw_few(LABELS, IDS, 5, 3 * run + d, 4)) for d in range(3)], axis=0)
            for run in range(2)
        ]
        np.testing.assert_allclose(got[name], expected)
    assert (got["pixels"][0] != got["pixels"][1]).any(), "fixed features too must feel the chance of drawing"


def test_unlabelled_bank_rows_are_left_out() -> None:
    hidden = LABELS.copy()
    hidden[::2] = -1
    got = evaluate_features({"a": (BANK, TEST)}, hidden, IDS, TEST_LABELS, knn_reader(CLASSES, 3), seed=0)
    np.testing.assert_array_equal(got["a"][0], right(BANK, TEST, np.arange(1, 120, 2)))


def test_k_is_chosen_from_the_drawn_labels_alone() -> None:
    candidates = (1, 3, 7)
    got = evaluate_features(
        {"a": (BANK, TEST)},
        LABELS,
        IDS,
        TEST_LABELS,
        knn_reader(CLASSES, candidates, seed=9),
        seed=0,
        labels_per_class=8,
        draws=4,
    )
    for draw in range(4):
        rows = draw_few(LABELS, IDS, 8, draw, 0)
        k = choose_k(BANK[rows], LABELS[rows], IDS[rows], n_classes=CLASSES, seed=9, candidates=candidates)
        np.testing.assert_array_equal(got["a"][draw], right(BANK, TEST, rows, k))


def test_readouts_are_told_the_groups() -> None:
    groups = np.where(np.arange(120) < 60, np.arange(120) // 4, -1)
    seen: list[np.ndarray] = []

    def read(bank: Tensor, labels: np.ndarray, units: np.ndarray, queries: Tensor) -> Reading:
        seen.append(units)
        return Reading(np.zeros(len(queries), np.int64))

    features = {"a": (BANK, TEST)}
    evaluate_features(features, LABELS, IDS, TEST_LABELS, read, seed=0, bank_groups=groups)
    evaluate_features(features, LABELS, IDS, TEST_LABELS, read, seed=0, bank_groups=groups, labels_per_class=7, draws=1)
    units = np.where(groups >= 0, groups, IDS)
    np.testing.assert_array_equal(seen[0], units)
    np.testing.assert_array_equal(seen[1], units[draw_few(LABELS, IDS, 7, 0, 0)])


def test_more_seeds_of_a_baseline_are_dealt_out_over_the_runs() -> None:
    runs, seeds = [moved(1), moved(2)], [moved(seed) for seed in range(10, 15)]
    read = knn_reader(CLASSES, 3)
    got = answer_features({"ours": runs, "random": seeds}, LABELS, IDS, read, seed=0, runs=2)
    every = np.arange(120)
    expected = [np.mean([right(*seeds[i], every) for i in mine], axis=0) for mine in ((0, 2, 4), (1, 3))]
    np.testing.assert_allclose(got["random"].right(TEST_LABELS), expected)
    one = answer_features(
        {"ours": runs[:1], "random": seeds}, LABELS, IDS, read, seed=0, runs=1, labels_per_class=4, draws=3
    )["random"].right(TEST_LABELS)
    drawn = [draw_few(LABELS, IDS, 4, draw, 0) for draw in range(3)]
    np.testing.assert_allclose(one, [np.mean([right(*pair, rows) for pair in seeds], axis=0) for rows in drawn])


def test_the_probe_reads_what_it_would_alone_and_says_how_sure_it_is() -> None:
    got = answer_features(
        {"a": (BANK, TEST)}, LABELS, IDS, probe_reader(CLASSES, seed=3), seed=0, labels_per_class=8, draws=2
    )["a"]
    assert got.confidence is not None
    for draw in range(2):
        rows = draw_few(LABELS, IDS, 8, draw, 0)
        strength = choose_strength(BANK[rows], LABELS[rows], IDS[rows], n_classes=CLASSES, seed=3)
        expected = fit_probe(BANK[rows], LABELS[rows], n_classes=CLASSES, strength=strength).probabilities(TEST)
        np.testing.assert_array_equal(got.predicted[draw], expected.argmax(1))
        np.testing.assert_array_equal(got.confidence[draw], expected.max(1))


def test_with_all_labels_the_validation_images_decide_the_penalty_and_are_then_fitted_too() -> None:
    held = IDS[80:]
    read = probe_reader(CLASSES, held_units=held)
    got = answer_features({"a": (BANK, TEST)}, LABELS, IDS, read, seed=0)["a"]
    strength = choose_strength(BANK, LABELS, IDS, n_classes=CLASSES, held=np.arange(120) >= 80)
    expected = fit_probe(BANK, LABELS, n_classes=CLASSES, strength=strength).probabilities(TEST)
    np.testing.assert_array_equal(got.predicted[0], expected.argmax(1))


def test_shuffled_labels_score_chance() -> None:
    bank, labels = blobs(5, 600, spread=0.3)
    test, test_labels = blobs(6, 400, spread=0.3)
    ids = np.arange(600, dtype=np.int64)
    read = knn_reader(CLASSES, 20)
    honest = evaluate_features({"a": (bank, test)}, labels, ids, test_labels, read, seed=0)["a"]
    assert honest.mean() > 0.95
    rows = [
        evaluate_features({"a": (bank, test)}, shuffled(labels, seed), ids, test_labels, read, seed=0)["a"][0]
        for seed in range(10)
    ]
    interval = crossed_interval(np.stack(rows), bounds=(0, 1))
    assert interval.low < 1 / 3 < interval.high


def test_what_does_not_fit_is_refused() -> None:
    read = knn_reader(CLASSES, 3)
    fine = (BANK, TEST)
    with pytest.raises(UsageError, match="Nothing to evaluate"):
        evaluate_features({}, LABELS, IDS, TEST_LABELS, read, seed=0)
    with pytest.raises(UsageError, match="of 2 runs, others of 3"):
        evaluate_features({"a": [fine] * 3, "b": [fine] * 2}, LABELS, IDS, TEST_LABELS, read, seed=0)
    with pytest.raises(UsageError, match="119 bank images, but there are 120 labels"):
        evaluate_features({"a": (BANK[1:], TEST)}, LABELS, IDS, TEST_LABELS, read, seed=0)
    with pytest.raises(DataError, match="Class 'a' has 36 labelled"):
        evaluate_features(
            {"a": fine}, LABELS, IDS, TEST_LABELS, read, seed=0, labels_per_class=37, class_names=["a", "b", "c"]
        )
