"""The tiled logsumexp against torch's own over all logits, values and gradients, and what it keeps in memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast import losses, tiled
from mocokit.contrast.key_queue import Keys
from mocokit.contrast.losses import Excluded, info_nce, same_source
from mocokit.contrast.tiled import tiled_logsumexp


def unit(rows: int, D: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return F.normalize(torch.randn(rows, D, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=1)


def plain(q: Tensor, dictionary: Tensor, T: float, excluded: Excluded | None = None) -> Tensor:
    logits = q @ dictionary.T / T
    if excluded is not None:
        mask = torch.zeros(logits.shape, dtype=torch.bool)
        mask[excluded.rows, excluded.columns] = True
        logits = logits.masked_fill(mask, -torch.inf)
    return torch.logsumexp(logits, 1)


@settings(max_examples=60, deadline=None)
@given(
    N=st.integers(1, 9),
    K=st.integers(1, 40),
    D=st.integers(1, 6),
    tile=st.integers(1, 45),
    T=st.sampled_from([0.001, 0.02, 0.07, 0.2, 1.0, 5.0]),
    images=st.integers(1, 12),
    seed=st.integers(0, 2**16),
)
def test_values_and_gradients_are_those_of_the_whole_matrix(
    N: int, K: int, D: int, tile: int, T: float, images: int, seed: int
) -> None:
    """Any tile, also one that does not divide K; temperatures on both sides of the fixed maximum; any exclusions."""
    q, dictionary = unit(N, D, seed, torch.float64), unit(K, D, seed + 1, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, images, (N + K,), generator=generator)
    groups = torch.full((K,), -1)
    excluded = same_source(ids[:N], groups[:N].new_full((N,), -1), Keys(dictionary, ids[N:], groups))
    ours, theirs = q.clone().requires_grad_(), q.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "TILE", tile)
        found = tiled_logsumexp(ours, dictionary, T, (excluded.rows, excluded.columns))
    expected = plain(theirs, dictionary, T, excluded)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    some = torch.isfinite(expected)  # a query all of whose rows are excluded has nothing to differentiate
    if some.any():
        weights = torch.rand(N, dtype=torch.float64, generator=generator)
        (found[some] * weights[some]).sum().backward()
        (expected[some] * weights[some]).sum().backward()
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad[some], theirs.grad[some], rtol=1e-10, atol=1e-12)
        assert not ours.grad[~some].any()


@pytest.mark.parametrize("T", [0.01, 0.2])
def test_gradcheck_in_float64(monkeypatch: pytest.MonkeyPatch, T: float) -> None:
    monkeypatch.setattr(tiled, "TILE", 5)
    q, dictionary = unit(4, 3, 0, torch.float64).requires_grad_(), unit(13, 3, 1, torch.float64)
    pairs = torch.tensor([1, 0, 3, 1, 2]), torch.tensor([2, 7, 7, 12, 12])
    assert torch.autograd.gradcheck(lambda x: tiled_logsumexp(x, dictionary, T, pairs), (q,))


def test_float32_stays_within_1e_6_of_float64() -> None:
    q, dictionary = unit(64, 128, 0), unit(20_000, 128, 1)
    for T in (0.02, 0.07, 0.2):
        found = tiled_logsumexp(q, dictionary, T)
        exact = plain(q.double(), dictionary.double(), T)
        assert ((found.double() - exact).abs() / exact.abs()).max() < 1e-6


def test_the_loss_takes_tiles_from_a_size_on_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    N, K, D = 16, 3000, 8
    k, dictionary = unit(N, D, 1), Keys(unit(K, D, 2), torch.arange(K) % 40, torch.full((K,), -1))
    ids, groups = torch.arange(N), torch.full((N,), -1)
    excluded = same_source(ids, groups, dictionary)
    found = {}
    calls: list[int] = []
    original = losses.tiled_logsumexp

    def counted(*arguments: object) -> Tensor:
        calls.append(1)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(losses, "tiled_logsumexp", counted)
    for size in (N * K, N * K + 1):
        monkeypatch.setattr(losses, "WORTH_IT", size)
        q = unit(N, D, 0).requires_grad_()
        contrast = info_nce(q, k, dictionary, 0.1, excluded)
        contrast.loss.backward()
        found[size] = (contrast, q.grad)
    assert len(calls) == 1
    (one, grad_one), (other, grad_other) = found.values()
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad_one, grad_other, rtol=1e-4, atol=1e-6)
    assert torch.equal(one.negatives, other.negatives)


def test_a_query_with_no_negative_left_has_no_loss_and_no_gradient() -> None:
    dictionary = Keys(unit(2000, 4, 1), torch.zeros(2000, dtype=torch.int64), torch.full((2000,), -1))
    ids = torch.tensor([0, 1])
    excluded = same_source(ids, torch.full((2,), -1), dictionary)
    q = unit(2, 4, 0).requires_grad_()
    found = tiled_logsumexp(q, dictionary.vectors, 0.2, (excluded.rows, excluded.columns))
    assert found[0] == -math.inf
    loss = F.softplus(found - 1.0)
    loss.sum().backward()
    assert loss[0] == 0
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()
    assert not q.grad[0].any()
    assert q.grad[1].any()


def test_nothing_of_the_size_of_all_similarities_is_kept() -> None:
    """What autograd holds between forward and backward, against the plain way's N x K."""
    N, K, D = 32, 50_000, 16
    q, dictionary = unit(N, D, 0).requires_grad_(), unit(K, D, 1)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tiled_logsumexp(q, dictionary, 0.2)
    assert max(saved) <= N * D
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.logsumexp(q @ dictionary.T, 1)
    assert max(saved) >= N * K
