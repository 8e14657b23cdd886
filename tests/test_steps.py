import inspect
import math
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mocokit.contrast.encoders import Backbone, Encoder, EncoderPair
from mocokit.contrast.key_queue import NO_ID, KeyQueue
from mocokit.contrast.losses import Contrast
from mocokit.contrast.parts import unit_rows
from mocokit.contrast.steps import STEPS, ContrastConfig, Scoring, ViewPair, moco_step_ema_first, moco_step_paper


def tiny_encoder(seed: int, *, batch_norm: bool) -> Encoder:
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(6) if batch_norm else nn.Identity()
    trunk = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), norm, nn.ReLU())
    return Encoder(Backbone(trunk, spatial=True), nn.Linear(6, 8), 6, 8)


def batch(seed: int, step: int, n: int = 6, images: int = 40) -> ViewPair:
    generator = torch.Generator().manual_seed(10_000 * seed + step)
    ids = torch.randperm(images, generator=generator)[:n]
    x_q, x_k = (torch.randn(n, 3, 6, 6, generator=generator) for _ in range(2))
    return ViewPair(x_q, x_k, ids, torch.full((n,), NO_ID))


class Updater:
    """The simplest query update: backward of the mean, one SGD step; keeps the losses."""

    def __init__(self, pair: EncoderPair) -> None:
        self.optimizer = torch.optim.SGD(pair.theta_q, lr=0.1, momentum=0.9, weight_decay=1e-4)
        self.losses: list[float] = []
        self.chances: list[float] = []
        self.negatives: list[list[int]] = []

    def __call__(self, losses: Iterable[Contrast]) -> None:
        self.optimizer.zero_grad()
        for contrast in losses:
            contrast.loss.backward()
            self.losses.append(float(contrast.loss.detach()))
            self.chances.append(contrast.chance())
            self.negatives.append(contrast.negatives.tolist())
        self.optimizer.step()


def train(config: ContrastConfig, steps: int, seed: int, *, batch_norm: bool) -> tuple[EncoderPair, KeyQueue, Updater]:
    pair = EncoderPair(tiny_encoder(seed, batch_norm=batch_norm))
    pair.train()
    queue, updater = KeyQueue(config.K, 8), Updater(pair)
    for step in range(steps):
        STEPS[config.order](
            pair,
            queue,
            [batch(seed, step)],
            scoring=config.scoring(),
            m=config.m_at(step, steps),
            step=step,
            update_query_=updater,
            gather=lambda keys: keys,
        )
    return pair, queue, updater


@pytest.mark.parametrize("m_end", [None, 0.995], ids=["constant m", "scheduled m"])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize("seed", range(5))
def test_both_orders_are_one_algorithm(seed: int, batch_norm: bool, m_end: float | None) -> None:
    steps = 60
    paper = ContrastConfig(K=15, T=0.2, m=0.9, m_end=m_end, order="paper")
    first = ContrastConfig(K=15, T=0.2, m=0.9, m_end=m_end, order="ema-first")
    pair_p, queue_p, updater_p = train(paper, steps, seed, batch_norm=batch_norm)
    pair_e, queue_e, updater_e = train(first, steps, seed, batch_norm=batch_norm)
    assert updater_p.losses == updater_e.losses
    assert len(set(updater_p.losses)) == steps
    for name, tensor in pair_p.query.state_dict().items():
        assert torch.equal(tensor, pair_e.query.state_dict()[name]), name
    for name, tensor in queue_p.tensors().items():
        assert torch.equal(tensor, queue_e.tensors()[name]), name
    behind = [k.clone() for k in pair_e.theta_k]
    assert any(not torch.equal(a, b) for a, b in zip(behind, pair_p.theta_k, strict=True))
    torch._foreach_lerp_(behind, pair_e.theta_q, 1.0 - first.m_at(steps, steps))
    assert all(torch.equal(a, b) for a, b in zip(behind, pair_p.theta_k, strict=True))


def reference_steps(seed: int, steps: int, K: int, T: float, m: float) -> list[float]:
    """Algorithm 1 once more, written apart from the library: plain lists, cross-entropy, no masking needed."""
    torch.manual_seed(seed)
    f_q, f_k = tiny_encoder(seed, batch_norm=False), tiny_encoder(seed, batch_norm=False)
    optimizer = torch.optim.SGD(f_q.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    queue: list[Tensor] = []
    ids: list[int] = []
    losses = []
    for step in range(steps):
        part = batch(seed, step)
        q = F.normalize(f_q(part.x_q), dim=1)
        k = F.normalize(f_k(part.x_k), dim=1).detach()
        if queue:
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ torch.stack(queue).T], 1)
            own = part.ids[:, None] == torch.tensor(ids)[None]
            logits[:, 1:] = logits[:, 1:].masked_fill(own, -1e9)
            loss = F.cross_entropy(logits / T, torch.zeros(len(q), dtype=torch.long))
        else:
            loss = F.cross_entropy(q @ k.T / T, torch.arange(len(q)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for p_k, p_q in zip(f_k.parameters(), f_q.parameters(), strict=True):
                p_k.copy_(m * p_k + (1 - m) * p_q)
        queue, ids = [*queue, *k][-K:], [*ids, *part.ids.tolist()][-K:]
    return losses


def test_equals_algorithm_1_written_apart() -> None:
    config = ContrastConfig(K=15, T=0.2, m=0.9)
    _, _, updater = train(config, 25, seed=3, batch_norm=False)
    assert updater.losses == pytest.approx(reference_steps(3, 25, 15, 0.2, 0.9), rel=1e-4)


def test_first_step_contrasts_the_batch_and_its_chance_is_ln_n() -> None:
    _, _, updater = train(ContrastConfig(K=64, m=0.9), 2, seed=0, batch_norm=False)
    assert updater.chances[0] == pytest.approx(math.log(6))
    assert updater.negatives[0] == [5] * 6
    assert max(updater.negatives[1]) == 6


def test_with_more_keys_than_images_no_query_meets_its_own_image() -> None:
    config = ContrastConfig(K=200, m=0.9)
    pair = EncoderPair(tiny_encoder(0, batch_norm=False))
    queue, seen = KeyQueue(200, 8), 0
    for step in range(40):
        part = batch(0, step, images=40)

        def check(losses: Iterable[Contrast], part: ViewPair = part, step: int = step) -> None:
            nonlocal seen
            (contrast,) = losses
            stored = queue.snapshot().ids
            own = (part.ids[:, None] == stored[None]).sum(1) if step else torch.ones(6, dtype=torch.long)
            assert contrast.excluded.tolist() == own.tolist()
            assert contrast.negatives.tolist() == [(len(stored) or 6) - n for n in own.tolist()]
            seen += int(own.sum())

        moco_step_paper(
            pair, queue, [part], scoring=config.scoring(), m=0.9, step=step, update_query_=check, gather=lambda k: k
        )
    assert queue.fill == 200
    assert seen > 500  # older keys of the same image were there to be left out


def test_key_encoder_takes_no_gradient_and_statistics_follow_its_own_forward() -> None:
    pair, _, _ = train(ContrastConfig(K=15, m=1.0), 3, seed=0, batch_norm=True)
    assert all(p.grad is None and not p.requires_grad for p in pair.key.parameters())
    fresh = tiny_encoder(0, batch_norm=True)
    for (name, mine), start in zip(pair.key.state_dict().items(), fresh.state_dict().values(), strict=True):
        moved = not torch.equal(mine, start)
        assert moved == ("running" in name or "num_batches" in name), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unit_rows_have_the_bits_of_normalize(dtype: torch.dtype) -> None:
    z = torch.randn(60, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    z[3] = 0
    z.requires_grad_()
    direction = torch.randn(60, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours, theirs = unit_rows(z), torch.nn.functional.normalize(z, dim=1)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad(rows, z, direction)[0] for rows in (ours, theirs)))


def test_micro_batches_change_nothing_without_batch_norm() -> None:
    _, whole_queue, whole = train(ContrastConfig(K=15, m=0.9), 20, seed=1, batch_norm=False)
    pair = EncoderPair(tiny_encoder(1, batch_norm=False))
    queue = KeyQueue(15, 8)
    updater = Updater(pair)

    def update(losses: Iterable[Contrast]) -> None:
        updater.optimizer.zero_grad()
        values = []
        for contrast in losses:
            (contrast.loss / 3).backward()
            values.append(float(contrast.loss.detach()))
        updater.losses.append(sum(values) / 3)
        updater.optimizer.step()

    for step in range(20):
        part = batch(1, step)
        parts = [
            ViewPair(part.x_q[i : i + 2], part.x_k[i : i + 2], part.ids[i : i + 2], part.groups[i : i + 2])
            for i in range(0, 6, 2)
        ]
        moco_step_paper(
            pair, queue, parts, scoring=Scoring(0.2), m=0.9, step=step, update_query_=update, gather=lambda k: k
        )
    assert updater.losses == pytest.approx(whole.losses, rel=1e-5)
    assert torch.equal(queue.ids, whole_queue.ids)
    assert torch.equal(queue.births, whole_queue.births)
    torch.testing.assert_close(queue.vectors, whole_queue.vectors, rtol=1e-4, atol=1e-5)


def test_the_queue_scored_holds_only_earlier_steps() -> None:
    """Perfectly aligned pairs: with the own key among the negatives the loss could not fall below ln 2."""
    pair = EncoderPair(tiny_encoder(0, batch_norm=False))
    queue = KeyQueue(64, 8)
    for step in range(3):
        part = batch(5, step)
        aligned = ViewPair(part.x_q, part.x_q, part.ids + 1000 * step, part.groups)

        def check(losses: Iterable[Contrast], step: int = step) -> None:
            (contrast,) = losses
            assert torch.allclose(contrast.positive, torch.ones(6), atol=1e-5)
            assert contrast.negatives.tolist() == [max(6 * step, 5)] * 6

        moco_step_paper(
            pair,
            queue,
            [aligned],
            scoring=Scoring(0.01, False),
            m=1.0,
            step=step,
            update_query_=check,
            gather=lambda k: k,
        )


@pytest.mark.parametrize("step", [moco_step_paper, moco_step_ema_first])
def test_a_step_fits_on_one_screen(step: object) -> None:
    source = inspect.getsource(step)  # type: ignore[arg-type]
    body = source.split('"""')[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 25
    for number in "12345":
        assert f"# {number}." in body


def test_bad_settings_are_refused() -> None:
    for bad in ({"K": 0}, {"T": 0.0}, {"m": 1.5}, {"m_end": -0.1}, {"mask_source": False, "mask_group": True}):
        with pytest.raises(ValueError):
            ContrastConfig(**bad)  # type: ignore[arg-type]
