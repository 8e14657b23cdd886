import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from mocokit.errors import DivergedError, UsageError
from mocokit.evaluation.knn import knn_predict, nearest, vote


def clusters(seed: int, M: int, Q: int, D: int, classes: int) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, M)
    bank = rng.normal(size=(M, D)) + rng.normal(size=(classes, D))[labels]
    return torch.from_numpy(bank), labels, torch.from_numpy(rng.normal(size=(Q, D)))


@pytest.mark.parametrize(("k", "D", "classes"), [(1, 8, 3), (5, 16, 10), (20, 3, 2), (300, 8, 4)])
def test_uniform_votes_equal_scikit_learn_in_float64(k: int, D: int, classes: int) -> None:
    bank, labels, queries = clusters(k, 300, 200, D, classes)
    distances, _ = KNeighborsClassifier(n_neighbors=300, metric="cosine").fit(bank, labels).kneighbors(queries)
    assert np.diff(distances, axis=1).min() > 0, "the data must be free of ties"
    expected = KNeighborsClassifier(n_neighbors=k, metric="cosine").fit(bank, labels).predict(queries)
    got = knn_predict(bank, labels, queries, k=k, n_classes=classes, weights="uniform")
    np.testing.assert_array_equal(got, expected)


@given(
    seed=st.integers(0, 10_000),
    M=st.integers(1, 40),
    Q=st.integers(1, 9),
    D=st.integers(1, 6),
    k=st.integers(1, 40),
    temperature=st.sampled_from([0.01, 0.07, 0.5, 10.0]),
)
@settings(max_examples=60, deadline=None)
def test_votes_equal_the_formula(seed: int, M: int, Q: int, D: int, k: int, temperature: float) -> None:
    bank, labels, queries = clusters(seed, M, Q, D, 4)
    k = min(k, M)
    a, b = bank.numpy(), queries.numpy()
    similarity = (b / np.linalg.norm(b, axis=1, keepdims=True)) @ (a / np.linalg.norm(a, axis=1, keepdims=True)).T
    expected = []
    for row in similarity.round(12):  # in one dimension all similarities are 1 or -1 up to rounding: ties by row
        near = sorted(range(M), key=lambda m: (-row[m], m))[:k]
        votes = [sum(np.exp((row[m] - 1) / temperature) for m in near if labels[m] == c) for c in range(4)]
        expected.append(votes)
    got = knn_predict(bank, labels, queries, k=k, n_classes=4, knn_temperature=temperature, memory=200)
    best = np.array(expected)
    margin = np.sort(best, axis=1)[:, -1] - np.sort(best, axis=1)[:, -2]
    clear = (margin > 1e-9 * best.max(axis=1)) & (D > 1)
    np.testing.assert_array_equal(got[clear], best.argmax(axis=1)[clear])


def test_ties_go_to_the_lower_row_and_the_lower_class() -> None:
    bank = torch.zeros(12, 4)
    bank[:, 0] = 1.0
    bank[[2, 7]] = torch.tensor([0.8, 0.6, 0.0, 0.0])
    query = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.8, 0.6, 0.0, 0.0]])
    similarities, rows = nearest(bank, query, 4)
    assert rows.tolist() == [[0, 1, 3, 4], [2, 7, 0, 1]]
    assert similarities[1] == pytest.approx([1, 1, 0.8, 0.8])
    labels = np.array([3, 1, 0, 1, 3, 0, 0, 0, 0, 0, 0, 0])
    assert knn_predict(bank, labels, query[:1], k=4, n_classes=4).tolist() == [1]


def test_all_equal_features_give_the_first_rows_at_any_tile() -> None:
    bank, queries = torch.ones(1000, 16), torch.ones(50, 16)
    for memory in (1, 40_000, 2**27):
        _, rows = nearest(bank, queries, 7, memory=memory)
        assert (rows == np.arange(7)).all()


def test_the_tile_does_not_matter() -> None:
    bank, labels, queries = clusters(1, 500, 97, 12, 5)
    whole = knn_predict(bank, labels, queries, k=9, n_classes=5)
    for memory in (1, 500 * 8 * 10, 500 * 8 * 96):
        np.testing.assert_array_equal(whole, knn_predict(bank, labels, queries, k=9, n_classes=5, memory=memory))


def test_nearest_is_sorted_and_prefixes_are_the_smaller_k() -> None:
    bank, _, queries = clusters(5, 200, 30, 3, 2)
    bank = bank.round()  # many ties
    similarities, rows = nearest(bank, queries, 50)
    assert (np.diff(similarities, axis=1) <= 0).all()
    for k in (1, 2, 17, 49):
        np.testing.assert_array_equal(nearest(bank, queries, k)[1], rows[:, :k])


def test_small_temperature_is_the_nearest_neighbour_and_large_is_uniform() -> None:
    bank, labels, queries = clusters(3, 400, 100, 6, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # exp must not overflow
        sharp = knn_predict(bank, labels, queries, k=20, n_classes=3, knn_temperature=1e-5)
    np.testing.assert_array_equal(sharp, knn_predict(bank, labels, queries, k=1, n_classes=3))
    flat = knn_predict(bank, labels, queries, k=19, n_classes=2 + 1, knn_temperature=1e6)
    similarities, rows = nearest(bank, queries, 19)
    counts = np.stack([np.bincount(row, minlength=3) for row in labels[rows]])
    clear = np.sort(counts, axis=1)[:, -1] > np.sort(counts, axis=1)[:, -2]
    np.testing.assert_array_equal(flat[clear], counts.argmax(axis=1)[clear])
    np.testing.assert_array_equal(
        vote(similarities, labels[rows], n_classes=3, weights="uniform"), counts.argmax(axis=1)
    )


def test_lengths_do_not_matter_and_a_zero_vector_is_far_from_all() -> None:
    bank, labels, queries = clusters(4, 100, 20, 5, 3)
    scaled = bank * torch.linspace(0.1, 100, 100)[:, None]
    kwargs = {"k": 5, "n_classes": 3}
    np.testing.assert_array_equal(
        knn_predict(bank, labels, queries, **kwargs), knn_predict(scaled, labels, queries * 7, **kwargs)
    )
    assert nearest(bank, torch.zeros(1, 5, dtype=torch.float64), 3)[0].tolist() == [[0, 0, 0]]


def test_empty_queries_give_no_answers() -> None:
    bank, labels, _ = clusters(4, 10, 1, 5, 3)
    assert knn_predict(bank, labels, torch.zeros(0, 5, dtype=torch.float64), k=3, n_classes=3).shape == (0,)


@pytest.mark.parametrize("k", [0, -1, 11])
def test_a_k_that_the_bank_cannot_fill_is_refused(k: int) -> None:
    bank, labels, queries = clusters(4, 10, 2, 5, 3)
    with pytest.raises(UsageError, match=rf"k is {k}, but the bank holds 10"):
        knn_predict(bank, labels, queries, k=k, n_classes=3)


def test_bad_values_are_refused() -> None:
    bank, labels, queries = clusters(4, 10, 2, 5, 3)
    with pytest.raises(UsageError, match="knn_temperature"):
        knn_predict(bank, labels, queries, k=1, n_classes=3, knn_temperature=0.0)
    with pytest.raises(UsageError, match="unlabelled"):
        knn_predict(bank, labels - 1, queries, k=1, n_classes=3)
    with pytest.raises(DivergedError, match="not finite"):
        knn_predict(bank, labels, queries * float("nan"), k=1, n_classes=3)
