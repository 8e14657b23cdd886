"""The linear probe against scikit-learn's logistic regression, and against what it must not depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from mocokit.errors import DivergedError, UsageError
from mocokit.evaluation.probe import DEFAULT_STRENGTH, STRENGTHS, choose_strength, fit_probe

Data = tuple[np.ndarray, np.ndarray]


def blobs(seed: int, count: int, D: int = 6, classes: int = 3, noise: float = 1.0) -> tuple[torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % classes)
    centres = np.random.default_rng(99).normal(size=(classes, D))
    return torch.from_numpy(1.5 * centres[labels] + noise * rng.normal(size=(count, D))), labels


def scikit(bank: np.ndarray, labels: np.ndarray, C: float) -> object:
    return make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=20_000, tol=1e-8)).fit(bank, labels)


def generated() -> Data:
    return make_classification(1200, 40, n_informative=8, n_classes=5, class_sep=0.8, random_state=0)


@pytest.mark.parametrize(
    "load", [load_digits, load_wine, load_breast_cancer, None], ids=lambda f: getattr(f, "__name__", "made")
)
@pytest.mark.parametrize("strength", [0.01, 1.0])
def test_equals_scikit_learn(load: object, strength: float) -> None:
    X, y = load(return_X_y=True) if load else generated()  # type: ignore[operator]
    held = np.arange(len(X)) % 3 == 0
    theirs = scikit(X[~held], y[~held], strength)
    n_classes = int(y.max()) + 1
    ours = fit_probe(torch.from_numpy(X[~held]), y[~held], n_classes=n_classes, strength=strength)
    probabilities = ours.probabilities(torch.from_numpy(X[held]))
    accuracy = (probabilities.argmax(1) == y[held]).mean()
    assert abs(accuracy - theirs.score(X[held], y[held])) <= 0.002  # type: ignore[attr-defined]
    np.testing.assert_allclose(probabilities, theirs.predict_proba(X[held]), atol=2e-4)  # type: ignore[attr-defined]
    single = fit_probe(torch.from_numpy(X[~held]).float(), y[~held], n_classes=n_classes, strength=strength)
    np.testing.assert_allclose(single.probabilities(torch.from_numpy(X[held]).float()), probabilities, atol=2e-3)


def test_more_dimensions_than_images_is_solved_exactly_too() -> None:
    rng = np.random.default_rng(0)
    bank, queries = rng.normal(size=(40, 300)), rng.normal(size=(50, 300))
    labels = np.arange(40) % 4
    bank[:, :4] += 2 * np.eye(4)[labels]
    theirs = scikit(bank, labels, 0.1).predict_proba(queries)  # type: ignore[attr-defined]
    ours = fit_probe(torch.from_numpy(bank), labels, n_classes=4, strength=0.1).probabilities(torch.from_numpy(queries))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_constant_and_repeated_features_are_harmless() -> None:
    bank, labels = blobs(0, 60)
    wide = torch.cat([bank, bank[:, :1], torch.full((60, 1), 3.7, dtype=bank.dtype), torch.zeros(60, 1)], 1)
    theirs = scikit(wide.numpy(), labels, 1.0).predict_proba(wide.numpy())  # type: ignore[attr-defined]
    ours = fit_probe(wide, labels, n_classes=3)
    np.testing.assert_allclose(ours.probabilities(wide), theirs, atol=1e-4)
    assert torch.isfinite(ours.weight).all()


@given(seed=st.integers(0, 1000), count=st.integers(6, 40), D=st.integers(1, 50), classes=st.integers(2, 4))
@settings(max_examples=25, deadline=None)
def test_scale_shift_and_order_do_not_matter_and_a_second_fit_is_the_same(
    seed: int, count: int, D: int, classes: int
) -> None:
    bank, labels = blobs(seed, count, D, classes)
    queries = blobs(seed + 1, 20, D, classes)[0]
    first = fit_probe(bank, labels, n_classes=classes).probabilities(queries)
    np.testing.assert_array_equal(first, fit_probe(bank, labels, n_classes=classes).probabilities(queries))
    np.testing.assert_allclose(first.sum(1), 1)
    order = np.random.default_rng(seed).permutation(count)
    moved = fit_probe(bank[order] * 7 - 3, labels[order], n_classes=classes).probabilities(queries * 7 - 3)
    np.testing.assert_allclose(moved, first, atol=1e-3)


def test_a_class_without_an_image_has_probability_zero() -> None:
    bank, labels = blobs(0, 60)
    some = labels != 1
    got = fit_probe(bank[some], labels[some], n_classes=3).probabilities(bank)
    assert (got[:, 1] == 0).all()
    np.testing.assert_allclose(got.sum(1), 1)
    only = fit_probe(bank[labels == 2], labels[labels == 2], n_classes=3).probabilities(bank)
    np.testing.assert_array_equal(only, np.tile([0, 0, 1.0], (60, 1)))


def test_the_strength_is_chosen_by_images_that_the_fit_has_not_seen() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 2
    noise = torch.from_numpy(rng.normal(size=(80, 200)))
    kwargs = {"n_classes": 2, "seed": 0}
    assert choose_strength(noise, labels, np.arange(80), **kwargs) == 1e-4  # nothing to learn: the strongest penalty
    clear, classes = blobs(1, 300, noise=0.6)
    assert choose_strength(clear, classes, np.arange(300), n_classes=3, seed=0) >= 0.1
    held = np.arange(300) >= 200
    got = choose_strength(clear, classes, np.arange(300), n_classes=3, held=held)
    scores = {}
    for strength in STRENGTHS:
        theirs = scikit(clear[:200].numpy(), classes[:200], strength)
        scores[strength] = theirs.predict_log_proba(clear[200:].numpy())[np.arange(100), classes[200:]].mean()  # type: ignore[attr-defined]
    assert got == max(scores, key=scores.__getitem__)


def test_copies_in_one_group_do_not_fool_the_choice() -> None:
    bank, labels = blobs(4, 60, D=30, noise=6.0)
    twice, labels = bank.repeat_interleave(2, 0), np.repeat(labels, 2)
    apart = choose_strength(twice, labels, np.arange(120), n_classes=3)
    together = choose_strength(twice, labels, np.repeat(np.arange(60), 2), n_classes=3)
    assert together < apart


def test_the_choice_with_next_to_nothing() -> None:
    bank = torch.eye(3, dtype=torch.float64)
    assert choose_strength(bank, np.arange(3), np.arange(3), n_classes=3) == DEFAULT_STRENGTH
    held = np.array([True, True, True])
    assert choose_strength(bank, np.arange(3), np.arange(3), n_classes=3, held=held) == DEFAULT_STRENGTH


def test_bad_values_are_refused() -> None:
    bank, labels = blobs(0, 20)
    with pytest.raises(UsageError, match="unlabelled"):
        fit_probe(bank, labels - 1, n_classes=3)
    with pytest.raises(UsageError, match=r"above 0. Got -1"):
        fit_probe(bank, labels, n_classes=3, strength=-1.0)
    bank[3, 2] = float("nan")
    with pytest.raises(DivergedError, match="bank features are not finite"):
        fit_probe(bank, labels, n_classes=3)
