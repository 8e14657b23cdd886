import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mocokit.contrast import losses
from mocokit.contrast.key_queue import NO_ID, Keys
from mocokit.contrast.losses import Contrast, info_nce, same_source


def unit(n: int, d: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=generator, dtype=dtype), dim=1)


def dictionary(k: int, d: int, seed: int, ids: list[int] | None = None) -> Keys:
    numbers = torch.tensor(ids) if ids is not None else torch.arange(1000, 1000 + k)
    return Keys(unit(k, d, seed), numbers, torch.full((k,), NO_ID))


def numpy_info_nce(q: np.ndarray, k: np.ndarray, negatives: np.ndarray, T: float, keep: np.ndarray) -> float:
    """Equation 1 of the paper, one query at a time, in float64."""
    total = 0.0
    for i in range(len(q)):
        positive = math.exp(q[i] @ k[i] / T)
        others = sum(math.exp(q[i] @ negatives[j] / T) for j in range(len(negatives)) if keep[i, j])
        total += -math.log(positive / (positive + others))
    return total / len(q)


@pytest.mark.parametrize("T", [0.05, 0.2, 1.0])
def test_equals_the_paper_formula(T: float) -> None:
    q, k, stored = unit(6, 8, 0), unit(6, 8, 1), dictionary(20, 8, 2)
    got = info_nce(q, k, stored, T)
    keep = np.ones((6, 20), bool)
    assert float(got.loss) == pytest.approx(
        numpy_info_nce(q.double().numpy(), k.double().numpy(), stored.vectors.double().numpy(), T, keep), rel=1e-5
    )
    assert got.negatives.tolist() == [20] * 6
    assert got.chance() == pytest.approx(math.log(21))


def test_equals_cross_entropy_over_the_concatenated_logits() -> None:
    q, k, stored = unit(5, 16, 3).requires_grad_(), unit(5, 16, 4), dictionary(64, 16, 5)
    got = info_nce(q, k, stored, 0.07)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ stored.vectors.T], 1) / 0.07
    want = F.cross_entropy(logits, torch.zeros(5, dtype=torch.long))
    assert float(got.loss.detach()) == pytest.approx(float(want.detach()), rel=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(got.loss, q)[0], torch.autograd.grad(want, q)[0], rtol=1e-4, atol=1e-5
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 10**6))
def test_excluded_rows_do_not_count(n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(0, 5, n))
    groups = torch.from_numpy(rng.integers(-1, 3, n))
    stored = Keys(unit(k, 4, seed), torch.from_numpy(rng.integers(-1, 5, k)), torch.from_numpy(rng.integers(-1, 3, k)))
    for by_group in (False, True):
        same_id = (ids[:, None] == stored.ids) & (stored.ids != NO_ID)
        same_group = (groups[:, None] == stored.groups) & (stored.groups != NO_ID)
        expected = same_id | same_group if by_group else same_id
        excluded = same_source(ids, groups, stored, by_group=by_group)
        dense = torch.zeros(n, k, dtype=torch.bool)
        dense[excluded.rows, excluded.columns] = True
        assert torch.equal(dense, expected)
        with pytest.MonkeyPatch.context() as patch:  # a long dictionary is searched in another way
            patch.setattr(losses, "FEW", 0)
            as_long = same_source(ids, groups, stored, by_group=by_group)
        assert torch.equal(as_long.columns, excluded.columns)
        assert torch.equal(as_long.rows, excluded.rows)
        assert torch.equal(excluded.per_query(), expected.sum(1))
        q, own = unit(n, 4, seed + 1).requires_grad_(), unit(n, 4, seed + 2)
        got = info_nce(q, own, stored, 0.3, excluded)
        want = numpy_info_nce(
            q.detach().double().numpy(), own.double().numpy(), stored.vectors.double().numpy(), 0.3, ~expected.numpy()
        )
        assert float(got.loss.detach()) == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert got.negatives.tolist() == (k - expected.sum(1)).tolist()
        assert torch.isfinite(torch.autograd.grad(got.loss, q)[0]).all()


@pytest.mark.parametrize("counts", [[240] * 60, [7], [0, 0], [1, 2, 3], [65536] * 255 + [65535]])
def test_chance_and_masked_share_are_means_to_the_last_bit(counts: list[int]) -> None:
    negatives = torch.tensor(counts)
    got = Contrast(torch.tensor(0.0), torch.zeros(len(counts)), negatives, negatives.max() - negatives, scale=0.8)
    for _ in range(2):
        assert got.chance() == 0.8 * float(torch.log1p(negatives.double()).mean())
    assert got.masked_share() == float((negatives < negatives.max()).double().mean())


def test_a_query_without_any_negative_costs_nothing_and_moves_nothing() -> None:
    q, k = unit(1, 4, 0).requires_grad_(), unit(1, 4, 1)
    stored = dictionary(3, 4, 2, ids=[7, 7, 7])
    got = info_nce(q, k, stored, 0.1, same_source(torch.tensor([7]), torch.tensor([NO_ID]), stored))
    assert float(got.loss.detach()) == 0.0
    assert got.chance() == 0.0
    assert torch.autograd.grad(got.loss, q)[0].abs().max() == 0


def test_gradient_before_normalisation_is_the_papers() -> None:
    """dL/dq = (sum_i p_i k_i - k_plus) / T."""
    q, k, stored, T = unit(1, 8, 0).requires_grad_(), unit(1, 8, 1), dictionary(10, 8, 2), 0.2
    (gradient,) = torch.autograd.grad(info_nce(q, k, stored, T).loss, q)
    everything = torch.cat([k, stored.vectors])
    p = torch.softmax(q @ everything.T / T, 1)
    torch.testing.assert_close(gradient, (p @ everything - k).detach() / T, rtol=1e-4, atol=1e-6)


def test_no_gradient_reaches_keys_or_dictionary() -> None:
    q, k = unit(2, 4, 0).requires_grad_(), unit(2, 4, 1).requires_grad_()
    info_nce(q, k, dictionary(3, 4, 2), 0.2).loss.backward()
    assert k.grad is None
    assert q.grad is not None


def test_gradcheck_in_float64() -> None:
    q = unit(3, 5, 0, torch.float64).requires_grad_()
    k, stored = (
        unit(3, 5, 1, torch.float64),
        Keys(unit(7, 5, 2, torch.float64), torch.arange(7), torch.full((7,), NO_ID)),
    )
    excluded = same_source(torch.tensor([0, 3, 99]), torch.full((3,), NO_ID), stored)
    assert torch.autograd.gradcheck(lambda x: info_nce(x, k, stored, 0.2, excluded).loss, (q,))


def test_worked_softmax_values() -> None:
    q = torch.tensor([[1.0, 0.0]])
    candidates = F.normalize(torch.tensor([[0.8, 0.2], [0.0, 1.0], [-1.0, 0.0]]), dim=1)
    negatives = Keys(candidates[1:], torch.tensor([1, 2]), torch.full((2,), NO_ID))
    for T, p in ((0.1, 0.999939), (0.5, 0.859767)):
        loss = float(info_nce(q, candidates[:1], negatives, T).loss)
        assert math.exp(-loss) == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize(("K", "chance"), [(65536, 11.09), (4096, 8.32)])
def test_chance_line(K: int, chance: float) -> None:
    got = info_nce(unit(2, 4, 0), unit(2, 4, 1), dictionary(K, 4, 2), 0.2)
    assert got.chance() == pytest.approx(chance, abs=0.005)


@settings(max_examples=40, deadline=None)
@given(
    N=st.integers(1, 9),
    K=st.integers(1, 30),
    images=st.integers(1, 12),
    T=st.sampled_from([0.02, 0.07, 0.2, 1.0]),
    trained=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_leaving_rows_out_has_the_bits_that_autograd_gives(
    N: int, K: int, images: int, T: float, trained: bool, seed: int
) -> None:
    """Loss and gradients, also those of a dictionary that takes gradient, and where nothing is left to compare with."""
    generator = torch.Generator().manual_seed(seed)
    q, k, dictionary = (F.normalize(torch.randn(rows, 5, generator=generator), dim=1) for rows in (N, N, K))
    ids, stored = (torch.randint(0, images, (rows,), generator=generator) for rows in (N, K))
    mask = ids[:, None] == stored[None, :]
    found = []
    for own in (True, False):
        leaves = [q.clone().requires_grad_(), dictionary.clone().requires_grad_(trained)]
        if own:
            keys = Keys(leaves[1], stored, torch.full((K,), -1))
            excluded = same_source(ids, torch.full((N,), -1), keys)
            rows, _ = losses._info_nce_rows(leaves[0], k, leaves[1], T, excluded)
        else:
            logits = ((leaves[0] / T) @ leaves[1].T).masked_fill(mask, torch.finfo(torch.float32).min)
            rows = F.softplus(torch.logsumexp(logits, 1) - (leaves[0] * k).sum(1) / T)
        rows.mean().backward()
        found.append([rows.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(found[0]) == len(found[1]) == (3 if trained else 2)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
