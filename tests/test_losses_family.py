"""NT-Xent, MoCo v3's contrast and BYOL's regression against the papers' formulas, written here once more in numpy."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast.key_queue import NO_ID, Keys, join
from mocokit.contrast.losses import Contrast, byol_loss, moco_v3_loss, nt_xent


def unit(n: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(n, d, generator=generator, dtype=dtype), dim=1)


def known(vectors: Tensor, first: int = 0, groups: Tensor | None = None) -> Keys:
    """Keys of images first, first + 1, ... without groups."""
    n = len(vectors)
    return Keys(vectors, torch.arange(first, first + n), torch.full((n,), NO_ID) if groups is None else groups)


def log_softmax_of(similarities: list[float], right: float) -> float:
    return right - math.log(sum(math.exp(s) for s in similarities))


def simclr_paper(views: np.ndarray, T: float) -> float:
    """Equation 1 and Algorithm 1: mean over the 2N views of -log exp(s_ij) / sum_{k != i} exp(s_ik)."""
    count = len(views)
    total = 0.0
    for i in range(count):
        j = (i + count // 2) % count
        candidates = [views[i] @ views[k] / T for k in range(count) if k != i]
        assert len(candidates) == count - 1
        total -= log_softmax_of(candidates, views[i] @ views[j] / T)
    return total / count


def moco_v3_paper(q: list[np.ndarray], k: list[np.ndarray], T: float) -> float:
    """Algorithm 1: ctr(q1, k2) + ctr(q2, k1), each 2T times the cross-entropy with the diagonal as labels."""
    total = 0.0
    for queries, keys in ((q[0], k[1]), (q[1], k[0])):
        logits = queries @ keys.T / T
        rows = [log_softmax_of(list(row), row[i]) for i, row in enumerate(logits)]
        total += 2 * T * -sum(rows) / len(rows)
    return total


def byol_paper(p: list[np.ndarray], z: list[np.ndarray]) -> float:
    """Equation 2 for both directions: the squared distance of the normalised vectors."""
    return float(((p[0] - z[1]) ** 2).sum(1).mean() + ((p[1] - z[0]) ** 2).sum(1).mean())


def v3(q_a: Tensor, q_b: Tensor, k_a: Tensor, k_b: Tensor, T: float) -> Contrast:
    keys = known(k_a), known(k_b)
    return moco_v3_loss(q_a, q_b, keys, keys, T)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 7), st.sampled_from([0.1, 0.5, 1.0]), st.integers(0, 10**6))
def test_nt_xent_equals_the_paper(n: int, T: float, seed: int) -> None:
    a, b = unit(n, 5, seed), unit(n, 5, seed + 1)
    got = nt_xent(known(a), known(b), T)
    assert float(got.loss) == pytest.approx(simclr_paper(torch.cat([a, b]).numpy(), T), rel=1e-12)
    assert got.negatives.tolist() == [2 * n - 2] * (2 * n)
    assert got.excluded.tolist() == [0] * (2 * n)
    torch.testing.assert_close(got.positive, (a * b).sum(1).repeat(2))
    assert got.chance() == pytest.approx(math.log(2 * n - 1))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.sampled_from([0.1, 0.5, 1.0]), st.integers(0, 10**6))
def test_moco_v3_equals_the_paper(n: int, T: float, seed: int) -> None:
    q_a, q_b, k_a, k_b = (unit(n, 5, seed + i) for i in range(4))
    got = v3(q_a, q_b, k_a, k_b, T)
    want = moco_v3_paper([q_a.numpy(), q_b.numpy()], [k_a.numpy(), k_b.numpy()], T)
    assert float(got.loss) == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert got.negatives.tolist() == [n - 1] * (2 * n)
    torch.testing.assert_close(got.positive, torch.cat([(q_a * k_b).sum(1), (q_b * k_a).sum(1)]))
    assert got.chance() == pytest.approx(4 * T * math.log(n))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(0, 10**6))
def test_byol_equals_the_paper(n: int, seed: int) -> None:
    p_a, p_b, z_a, z_b = (unit(n, 5, seed + i) for i in range(4))
    got = byol_loss(p_a, p_b, z_a, z_b)
    want = byol_paper([p_a.numpy(), p_b.numpy()], [z_a.numpy(), z_b.numpy()])
    assert float(got.loss) == pytest.approx(want, rel=1e-12)
    assert got.chance() is None
    assert got.masked_share() == 0.0
    assert got.negatives.tolist() == [0] * (2 * n)
    torch.testing.assert_close(got.positive, torch.cat([(p_a * z_b).sum(1), (p_b * z_a).sum(1)]))


def test_byol_spans_0_to_8() -> None:
    p, z = unit(3, 4, 0), unit(3, 4, 1)
    assert float(byol_loss(p, z, z, p).loss) == pytest.approx(0, abs=1e-12)
    assert float(byol_loss(p, z, -z, -p).loss) == pytest.approx(8)


def test_chance_is_the_loss_of_vectors_that_are_all_alike() -> None:
    alike = unit(1, 4, 0).expand(6, 4)
    for got in (nt_xent(known(alike), known(alike), 0.3), v3(alike, alike, alike, alike, 0.3)):
        assert float(got.loss) == pytest.approx(got.chance(), rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
def test_nt_xent_over_several_processes_is_that_of_one(ranks: int) -> None:
    """Each process scores its own views against everyone's. The mean of their losses is the loss of one process, and
    so is its gradient, if the gathered rows take gradient."""
    N, T = 8, 0.4
    a, b = unit(N, 5, 0).requires_grad_(), unit(N, 5, 1).requires_grad_()
    whole = nt_xent(known(a), known(b), T)
    expected = torch.autograd.grad(whole.loss, [a, b])
    n = N // ranks
    mine = [(known(a[r * n : r * n + n], r * n), known(b[r * n : r * n + n], r * n)) for r in range(ranks)]
    everyone = join([join(pair) for pair in mine])  # rank order: views a and b of rank 0, of rank 1, ...
    parts = [nt_xent(*pair, T, everyone=everyone) for pair in mine]
    mean = torch.stack([part.loss for part in parts]).mean()
    torch.testing.assert_close(mean, whole.loss)
    for got, want in zip(torch.autograd.grad(mean, [a, b]), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert all(part.chance() == pytest.approx(math.log(2 * N - 1)) for part in parts)


@pytest.mark.parametrize("ranks", [2, 4])
def test_moco_v3_over_several_processes_is_that_of_one(ranks: int) -> None:
    N, T = 8, 0.4
    q_a, q_b, k_a, k_b = (unit(N, 5, i) for i in range(4))
    whole = v3(q_a, q_b, k_a, k_b, T)
    n = N // ranks
    losses = []
    for r in range(ranks):
        rows = slice(r * n, r * n + n)
        own = known(k_a[rows], r * n), known(k_b[rows], r * n)
        part = moco_v3_loss(q_a[rows], q_b[rows], own, (known(k_a), known(k_b)), T)
        assert part.chance() == pytest.approx(4 * T * math.log(N))
        losses.append(part.loss)
    torch.testing.assert_close(torch.stack(losses).mean(), whole.loss)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: nt_xent(known(x), known(y), 0.3).loss,
        lambda x, y: v3(x, y, unit(4, 3, 7), unit(4, 3, 8), 0.3).loss,
        lambda x, y: byol_loss(x, y, unit(4, 3, 7), unit(4, 3, 8)).loss,
    ],
    ids=["NT-Xent", "MoCo v3", "BYOL"],
)
def test_gradcheck_in_float64(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Through the normalisation as well, which is part of every step."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda u, v: loss(F.normalize(u, dim=1), F.normalize(v, dim=1)), (x, y))


def test_keys_and_targets_take_no_gradient_of_the_momentum_methods() -> None:
    q_a, q_b, k_a, k_b = (unit(4, 3, i).requires_grad_() for i in range(4))
    keys = known(k_a), known(k_b)
    for loss in (moco_v3_loss(q_a, q_b, keys, keys, 0.2).loss, byol_loss(q_a, q_b, k_a, k_b).loss):
        loss.backward()
        assert k_a.grad is None
        assert k_b.grad is None
        assert q_a.grad is not None
        assert q_a.grad.abs().max() > 0


def test_nt_xent_sends_gradient_into_queries_and_keys() -> None:
    """With the keys held fixed the gradient would be another one: SimCLR has no stop-gradient."""
    a, b, T = unit(4, 3, 0).requires_grad_(), unit(4, 3, 1), 0.3
    (got,) = torch.autograd.grad(nt_xent(known(a), known(b), T).loss, a)
    views = torch.cat([a, b])
    logits = (views @ views.T / T).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf)
    labels = (torch.arange(8) + 4) % 8
    (want,) = torch.autograd.grad(F.cross_entropy(logits, labels), a)
    torch.testing.assert_close(got, want)
    fixed = (views @ views.detach().T / T).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf)
    (other,) = torch.autograd.grad(F.cross_entropy(fixed, labels), a)
    assert (got - other).abs().max() > 1e-3


def test_own_group_is_left_out_when_asked_for() -> None:
    a, b = unit(4, 5, 0), unit(4, 5, 1)
    groups = torch.tensor([7, 7, NO_ID, 9])
    one, two = known(a, groups=groups), known(b, groups=groups)
    got = nt_xent(one, two, 0.5, by_group=True)
    assert got.negatives.tolist() == [4, 4, 6, 6] * 2
    assert got.excluded.tolist() == [2, 2, 0, 0] * 2
    assert got.masked_share() == 0.5
    views = torch.cat([a, b]).numpy()
    total = 0.0
    for i in range(8):
        left_out = {(1 - i % 4), 5 - i % 4} if i % 4 < 2 else set()
        candidates = [views[i] @ views[k] / 0.5 for k in range(8) if k != i and k not in left_out]
        total -= log_softmax_of(candidates, views[i] @ views[(i + 4) % 8] / 0.5)
    assert float(got.loss) == pytest.approx(total / 8, rel=1e-12)
    half = moco_v3_loss(a, b, (one, two), (one, two), 0.5, by_group=True)
    assert half.negatives.tolist() == [2, 2, 3, 3] * 2
    assert half.excluded.tolist() == [1, 1, 0, 0] * 2


def test_an_image_that_is_twice_in_a_batch_is_no_negative_of_itself() -> None:
    ids = torch.tensor([5, 5, 6])
    keys = [Keys(unit(3, 4, i), ids, torch.full((3,), NO_ID)) for i in range(2)]
    assert nt_xent(*keys, 0.5).negatives.tolist() == [2, 2, 4] * 2
    assert nt_xent(*keys, 0.5).excluded.tolist() == [2, 2, 0] * 2


def test_images_without_an_id_are_refused() -> None:
    nameless = Keys(unit(3, 4, 0), torch.tensor([1, NO_ID, 2]), torch.full((3,), NO_ID))
    with pytest.raises(ValueError, match="by their ids"):
        nt_xent(nameless, nameless, 0.5)
    with pytest.raises(ValueError, match="by their ids"):
        moco_v3_loss(unit(3, 4, 1), unit(3, 4, 2), (nameless, nameless), (nameless, nameless), 0.5)


def test_bfloat16_inputs_are_scored_in_float32() -> None:
    a, b = (unit(4, 8, i, torch.float32).bfloat16() for i in range(2))
    assert nt_xent(known(a), known(b), 0.2).loss.dtype == torch.float32
    assert byol_loss(a, b, a, b).loss.dtype == torch.float32
