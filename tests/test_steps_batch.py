"""MoCo v3, SimCLR, BYOL and the symmetric loss: each step against the same training written here once more."""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mocokit.contrast.encoders import Backbone, Encoder, EncoderConfig, EncoderPair, build_encoder, mlp
from mocokit.contrast.key_queue import NO_ID, KeyQueue, Keys, join
from mocokit.contrast.losses import Contrast
from mocokit.contrast.steps import (
    STEPS,
    ContrastConfig,
    Scoring,
    ViewPair,
    both_ways,
    byol_step,
    moco_step_ema_first,
    moco_step_paper,
    moco_v3_step,
    simclr_step,
    step_of,
)

T, M = 0.3, 0.9
CONFIGS = {
    "moco-v3": ContrastConfig(method="moco-v3", T=T, m=M),
    "simclr": ContrastConfig(method="simclr", T=T),
    "byol": ContrastConfig(method="byol", m=M),
}


def make_pair(method: str, seed: int, *, batch_norm: bool) -> EncoderPair:
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(6) if batch_norm else nn.Identity()
    trunk = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), norm, nn.ReLU())
    encoder = Encoder(Backbone(trunk, spatial=True), mlp([6, 10, 8], "mlp-bn" if batch_norm else "mlp"), 6, 8)
    predictor = None if method in ("simclr", "moco") else mlp([8, 10, 8], "mlp-bn-all" if batch_norm else "mlp")
    pair = EncoderPair(encoder, predictor, momentum=method != "simclr")
    pair.train()
    return pair


def batch(seed: int, step: int, n: int = 6, images: int = 40) -> ViewPair:
    generator = torch.Generator().manual_seed(10_000 * seed + step)
    ids = torch.randperm(images, generator=generator)[:n]
    x_q, x_k = (torch.randn(n, 3, 5, 5, generator=generator) for _ in range(2))
    return ViewPair(x_q, x_k, ids, torch.full((n,), NO_ID))


def cut(part: ViewPair, size: int) -> list[ViewPair]:
    return [
        ViewPair(*(t[i : i + size] for t in (part.x_q, part.x_k, part.ids, part.groups)))
        for i in range(0, len(part.ids), size)
    ]


class Updater:
    """Backward of the mean over the losses it is given, one SGD step; keeps what the losses said."""

    def __init__(self, pair: EncoderPair, count: int = 1) -> None:
        self.optimizer = torch.optim.SGD(list(pair.trained.values()), lr=0.1, momentum=0.9)
        self.count = count
        self.losses: list[float] = []
        self.seen: list[Contrast] = []

    def __call__(self, losses: Iterable[Contrast]) -> None:
        self.optimizer.zero_grad()
        values = []
        for contrast in losses:
            (contrast.loss / self.count).backward()
            values.append(float(contrast.loss.detach()))
            self.seen.append(contrast)
        assert len(values) == self.count
        self.losses.append(sum(values) / self.count)
        self.optimizer.step()


def alone(keys: Keys) -> Keys:
    return keys


def train(
    config: ContrastConfig, steps: int, seed: int, *, batch_norm: bool, size: int = 6
) -> tuple[EncoderPair, Any, Updater]:
    pair = make_pair(config.method, seed, batch_norm=batch_norm)
    queue = KeyQueue(config.K, 8) if config.has_queue else None
    updater = Updater(pair, 6 // size * config.losses_per_part)
    for step in range(steps):
        step_of(config)(
            pair,
            queue,
            cut(batch(seed, step), size),
            scoring=config.scoring(),
            m=config.m_at(step, steps),
            step=step,
            update_query_=updater,
            gather=alone,
        )
    return pair, queue, updater


# ------------------------------------------------------------------------------------------ the papers, once more


class Reference:
    """The networks in float64, called without the library's classes."""

    def __init__(self, pair: EncoderPair) -> None:
        self.trunk = copy.deepcopy(pair.query.backbone.trunk).double()
        self.head = copy.deepcopy(pair.query.head).double()
        self.predictor = copy.deepcopy(pair.predictor).double() if pair.predictor is not None else None
        self.trunk_k, self.head_k = copy.deepcopy(self.trunk), copy.deepcopy(self.head)
        modules = [self.trunk, self.head, *([self.predictor] if self.predictor is not None else [])]
        self.optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1, momentum=0.9)

    def z(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x.double()).mean((2, 3)))
        return out

    def prediction(self, x: Tensor) -> Tensor:
        assert self.predictor is not None
        out: Tensor = self.predictor(self.z(x))
        return out

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        out: Tensor = self.head_k(self.trunk_k(x.double()).mean((2, 3)))
        return out

    @torch.no_grad()
    def ema(self) -> None:
        for slow, fast in ((self.trunk_k, self.trunk), (self.head_k, self.head)):
            for p_k, p_q in zip(slow.parameters(), fast.parameters(), strict=True):
                p_k.copy_(M * p_k + (1 - M) * p_q)


def simclr_loss(net: Reference, x1: Tensor, x2: Tensor) -> Tensor:
    z = F.normalize(net.z(torch.cat([x1, x2])), dim=1)
    logits = (z @ z.T / T).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
    n = len(x1)
    return F.cross_entropy(logits, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


def moco_v3_loss(net: Reference, x1: Tensor, x2: Tensor) -> Tensor:
    k2, k1 = F.normalize(net.target(x2), dim=1), F.normalize(net.target(x1), dim=1)
    q1, q2 = F.normalize(net.prediction(x1), dim=1), F.normalize(net.prediction(x2), dim=1)
    labels = torch.arange(len(x1))
    return 2 * T * (F.cross_entropy(q1 @ k2.T / T, labels) + F.cross_entropy(q2 @ k1.T / T, labels))


def byol_loss(net: Reference, x1: Tensor, x2: Tensor) -> Tensor:
    t2, t1 = net.target(x2), net.target(x1)
    p1, p2 = net.prediction(x1), net.prediction(x2)
    one, two = F.cosine_similarity(p1, t2, dim=1), F.cosine_similarity(p2, t1, dim=1)
    return (2 - 2 * one).mean() + (2 - 2 * two).mean()


@pytest.mark.parametrize("batch_norm", [False, True], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize(
    ("method", "loss_of"), [("simclr", simclr_loss), ("moco-v3", moco_v3_loss), ("byol", byol_loss)]
)
def test_equals_the_paper_written_apart(
    method: str, loss_of: Callable[[Reference, Tensor, Tensor], Tensor], batch_norm: bool
) -> None:
    steps = 20
    reference = Reference(make_pair(method, 3, batch_norm=batch_norm))
    expected = []
    for step in range(steps):
        part = batch(3, step)
        loss = loss_of(reference, part.x_q, part.x_k)
        reference.optimizer.zero_grad()
        loss.backward()
        reference.optimizer.step()
        reference.ema()
        expected.append(float(loss.detach()))
    pair, _, updater = train(CONFIGS[method], steps, 3, batch_norm=batch_norm)
    assert updater.losses == pytest.approx(expected, rel=2e-3 if batch_norm else 1e-4)
    assert updater.losses[:3] == pytest.approx(expected[:3], rel=1e-5)
    assert len(set(updater.losses)) == steps
    for mine, theirs in ((pair.query.backbone.trunk, reference.trunk), (pair.key.head, reference.head_k)):
        if method == "simclr" and theirs is reference.head_k:
            continue
        for name, tensor in mine.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name].to(tensor.dtype), rtol=0.02, atol=2e-3)


# ------------------------------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("size", [3, 2, 1])
@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), ContrastConfig(K=20, T=T, m=M, symmetric=True)], ids=lambda config: config.method
)
def test_micro_batches_change_nothing_without_batch_norm(config: ContrastConfig, size: int) -> None:
    whole_pair, whole_queue, whole = train(config, 12, 1, batch_norm=False)
    pair, queue, updater = train(config, 12, 1, batch_norm=False, size=size)
    assert updater.losses == pytest.approx(whole.losses, rel=1e-5)
    for name, tensor in pair.trained.items():
        torch.testing.assert_close(tensor, whole_pair.trained[name], rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(pair.theta_k, whole_pair.theta_k, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    if config.has_queue:
        assert torch.equal(queue.ids, whole_queue.ids)
        assert torch.equal(queue.births, whole_queue.births)
        torch.testing.assert_close(queue.vectors, whole_queue.vectors, rtol=1e-3, atol=1e-5)


def test_gradient_caching_gives_the_gradient_of_the_whole_batch() -> None:
    part, gradients = batch(2, 0), []
    for size in (6, 2):
        pair = make_pair("simclr", 2, batch_norm=False)

        def keep(losses: Iterable[Contrast], pair: EncoderPair = pair, count: int = 6 // size) -> None:
            for contrast in losses:
                (contrast.loss / count).backward()
            gradients.append([p.grad.clone() for p in pair.theta_q if p.grad is not None])

        simclr_step(pair, None, cut(part, size), scoring=Scoring(T), m=M, step=0, update_query_=keep, gather=alone)
    assert len(gradients[0]) == len(gradients[1]) > 0
    for got, want in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [6, 3])
def test_running_statistics_count_each_micro_batch_once(size: int) -> None:
    pair, _, _ = train(CONFIGS["simclr"], 4, 0, batch_norm=True, size=size)
    (norm,) = (m for m in pair.query.modules() if isinstance(m, nn.BatchNorm2d))
    assert norm.num_batches_tracked == 4 * 6 // size


# ------------------------------------------------------------------------------------------- who moves what


@pytest.mark.parametrize("method", ["moco-v3", "byol"])
def test_gradient_reaches_the_query_side_and_ema_only_the_encoder(method: str) -> None:
    pair = make_pair(method, 0, batch_norm=True)
    assert pair.predictor is not None
    config = ContrastConfig(method=method, m=0.0)  # type: ignore[arg-type]
    before = {name: p.detach().clone() for name, p in pair.trained.items()}
    updater = Updater(pair)
    STEPS[method](
        pair, None, [batch(0, 0)], scoring=config.scoring(), m=0.0, step=0, update_query_=updater, gather=alone
    )
    assert all(p.grad is None and not p.requires_grad for p in pair.key.parameters())
    assert {name.split(".")[0] for name in pair.trained} == {"backbone", "head", "predictor"}
    for name, p in pair.trained.items():
        assert p.grad is not None, name
    assert not torch.equal(before["predictor.0.weight"], pair.trained["predictor.0.weight"])
    assert all(torch.equal(k, q) for k, q in zip(pair.theta_k, pair.theta_q, strict=True))  # m = 0 copies
    assert len(pair.theta_k) == len(pair.theta_q) == len(list(pair.query.parameters()))
    assert not any(name.startswith("predictor") for name, _ in pair.key.named_parameters())


def test_simclr_has_one_encoder() -> None:
    pair, queue, updater = train(CONFIGS["simclr"], 2, 0, batch_norm=True)
    assert pair.key is pair.query
    assert pair.theta_k == []
    assert queue is None
    assert all(p.requires_grad for p in pair.query.parameters())
    assert updater.seen[0].chance() == pytest.approx(math.log(11))


def test_chance_lines_and_shares_of_the_family() -> None:
    for method, chance in (("moco-v3", 4 * T * math.log(6)), ("simclr", math.log(11)), ("byol", None)):
        _, _, updater = train(CONFIGS[method], 1, 0, batch_norm=False)
        got = updater.seen[0].chance()
        assert got == (None if chance is None else pytest.approx(chance))
        assert updater.seen[0].masked_share() == 0.0


def test_moco_v3_scores_against_the_keys_of_every_process() -> None:
    pair, others = make_pair("moco-v3", 0, batch_norm=False), batch(9, 0)
    mine = batch(0, 0)
    mine = ViewPair(mine.x_q, mine.x_k, mine.ids + 100, mine.groups)
    with torch.no_grad():
        theirs = [Keys(F.normalize(pair.key(x), dim=1), others.ids, others.groups) for x in (others.x_q, others.x_k)]
    sent: list[Keys] = []

    def gather(keys: Keys) -> Keys:
        sent.append(keys)
        return join([theirs[len(sent) - 1], keys])  # this process is rank 1

    updater = Updater(pair)
    moco_v3_step(pair, None, [mine], scoring=Scoring(T), m=M, step=0, update_query_=updater, gather=gather)
    assert updater.seen[0].chance() == pytest.approx(4 * T * math.log(12))
    assert [keys.vectors.requires_grad for keys in sent] == [False, False]
    net = Reference(make_pair("moco-v3", 0, batch_norm=False))
    q1, q2 = F.normalize(net.prediction(mine.x_q), dim=1), F.normalize(net.prediction(mine.x_k), dim=1)
    k1, k2 = (
        F.normalize(net.target(torch.cat(views)), dim=1) for views in ((others.x_q, mine.x_q), (others.x_k, mine.x_k))
    )
    labels = 6 + torch.arange(6)  # the diagonal, offset by the rank
    want = 2 * T * (F.cross_entropy(q1 @ k2.T / T, labels) + F.cross_entropy(q2 @ k1.T / T, labels))
    assert updater.losses[0] == pytest.approx(float(want.detach()), rel=1e-5)


def test_frozen_patch_projection_stays_in_training() -> None:
    config = EncoderConfig(backbone="vit_tiny_patch16_224", dim=8, hidden=8, head="mlp-bn-all", freeze_patches=True)
    pair = EncoderPair(build_encoder(config, image_size=32, seed=0), mlp([8, 8, 8], "mlp-bn"))
    pair.train()
    name = "backbone.trunk.patch_embed.proj.weight"
    assert name not in pair.trained
    assert len(pair.theta_q) == len(pair.theta_k)
    before = dict(pair.query.named_parameters())[name].clone()
    generator = torch.Generator().manual_seed(0)
    x_q, x_k = (torch.randn(4, 3, 32, 32, generator=generator) for _ in range(2))
    part = ViewPair(x_q, x_k, torch.arange(4), torch.full((4,), NO_ID))
    for step in range(2):
        moco_v3_step(
            pair, None, [part], scoring=Scoring(T), m=0.5, step=step, update_query_=Updater(pair), gather=alone
        )
    for encoder in (pair.query, pair.key):
        assert torch.equal(dict(encoder.named_parameters())[name], before)
    moved = dict(pair.key.named_parameters())["backbone.trunk.blocks.0.attn.qkv.weight"]
    fresh = dict(build_encoder(config, image_size=32, seed=0).named_parameters())
    assert not torch.equal(moved, fresh["backbone.trunk.blocks.0.attn.qkv.weight"])


# ------------------------------------------------------------------------------------- symmetric, with a queue


def symmetric_reference(seed: int, steps: int, K: int) -> tuple[list[float], list[int]]:
    """MoCo with both views as queries, in plain lists: one queue for both halves, both key batches enqueued after."""
    net = Reference(make_pair("moco", seed, batch_norm=False))
    queue: list[Tensor] = []
    ids: list[int] = []
    losses = []
    for step in range(steps):
        part = batch(seed, step)
        own_ids = part.ids.tolist()
        k = [F.normalize(net.target(x), dim=1) for x in (part.x_k, part.x_q)]
        q = [F.normalize(net.z(x), dim=1) for x in (part.x_q, part.x_k)]
        stored, stored_ids = (torch.stack(queue), ids) if queue else (torch.cat(k), own_ids * 2)
        own = part.ids[:, None] == torch.tensor(stored_ids)[None]
        halves = []
        for query, key in zip(q, k, strict=True):
            negatives = (query @ stored.T).masked_fill(own, -torch.inf)
            logits = torch.cat([(query * key).sum(1, keepdim=True), negatives], 1)
            halves.append(F.cross_entropy(logits / T, torch.zeros(len(query), dtype=torch.long)))
        loss = (halves[0] + halves[1]) / 2
        net.optimizer.zero_grad()
        loss.backward()
        net.optimizer.step()
        net.ema()
        losses.append(float(loss.detach()))
        queue, ids = [*queue, *k[0], *k[1]][-K:], [*ids, *own_ids, *own_ids][-K:]
    return losses, ids


@pytest.mark.parametrize("order", ["paper", "ema-first"])
def test_symmetric_equals_its_reference(order: Any) -> None:
    config = ContrastConfig(K=31, T=T, m=M, symmetric=True, order=order)
    _, queue, updater = train(config, 15, 4, batch_norm=False)
    losses, ids = symmetric_reference(4, 15, 31)
    assert updater.losses == pytest.approx(losses, rel=1e-4)
    assert queue.ids[queue.oldest_first()].tolist() == ids


def test_both_halves_score_the_same_snapshot() -> None:
    pair, queue = make_pair("moco", 0, batch_norm=False), KeyQueue(30, 8)
    for step in range(3):
        part, before = batch(0, step), queue.vectors.clone()

        def check(losses: Iterable[Contrast], step: int = step, before: Tensor = before, part: ViewPair = part) -> None:
            own = (part.ids[:, None] == queue.ids[: queue.fill][None]).sum(1) if step else torch.full((6,), 2)
            for contrast in losses:
                assert torch.equal(queue.vectors, before)  # nothing was enqueued between the halves
                assert contrast.negatives.tolist() == [(12 * step or 12) - n for n in own.tolist()]

        both_ways(moco_step_paper)(
            pair, queue, [part], scoring=Scoring(T), m=M, step=step, update_query_=check, gather=alone
        )
        assert queue.fill == min(12 * (step + 1), 30)
        newest = queue.oldest_first()[-12:]
        assert queue.ids[newest].tolist() == part.ids.tolist() * 2
        assert queue.births[newest].tolist() == [step] * 12


def test_the_symmetric_queue_has_the_same_order_on_several_processes() -> None:
    """Two processes in turn, each with half of the images; what they would gather is made beforehand."""
    part = batch(0, 0)
    whole = KeyQueue(30, 8)

    def unused(losses: Iterable[Contrast]) -> None:
        return None

    one_process = make_pair("moco", 0, batch_norm=False)
    step = both_ways(moco_step_paper)
    step(one_process, whole, [part], scoring=Scoring(T), m=M, step=0, update_query_=unused, gather=alone)
    halves = cut(part, 3)
    for rank in (0, 1):
        pair, queue = make_pair("moco", 0, batch_norm=False), KeyQueue(30, 8)
        views: list[Keys] = []

        def gather(keys: Keys, views: list[Keys] = views, pair: EncoderPair = pair, rank: int = rank) -> Keys:
            other = halves[1 - rank]
            with torch.no_grad():
                vectors = F.normalize(pair.key(other.x_q if views else other.x_k), dim=1)
            views.append(keys)
            both = [keys, Keys(vectors, other.ids, other.groups)]
            return join(both if rank == 0 else both[::-1])

        step(pair, queue, [halves[rank]], scoring=Scoring(T), m=M, step=0, update_query_=unused, gather=gather)
        assert torch.equal(queue.ids, whole.ids)
        torch.testing.assert_close(queue.vectors, whole.vectors)


def test_symmetric_loss_is_the_mean_of_both_directions() -> None:
    pair, queue = make_pair("moco", 0, batch_norm=False), KeyQueue(30, 8)
    queue.enqueue_(Keys(F.normalize(torch.randn(20, 8), dim=1), 1000 + torch.arange(20), torch.full((20,), NO_ID)), 0)
    part = batch(0, 0)
    turned = ViewPair(part.x_k, part.x_q, part.ids, part.groups)

    def losses_of(step: Any, parts: Sequence[ViewPair]) -> list[float]:
        found: list[float] = []
        step(
            pair,
            copy.deepcopy(queue),
            parts,
            scoring=Scoring(T),
            m=1.0,
            step=1,
            update_query_=lambda losses: found.extend(float(c.loss.detach()) for c in losses),
            gather=alone,
        )
        return found

    both = losses_of(both_ways(moco_step_paper), [part])
    assert both == [*losses_of(moco_step_paper, [part]), *losses_of(moco_step_paper, [turned])]


# --------------------------------------------------------------------------------------------------- the page


@pytest.mark.parametrize("step", [moco_v3_step, simclr_step, byol_step])
def test_a_step_fits_on_one_screen(step: object) -> None:
    body = inspect.getsource(step).split('"""')[2]  # type: ignore[arg-type]
    assert len([line for line in body.splitlines() if line.strip()]) <= 25
    for number in "12345":
        assert f"# {number}." in body


def test_steps_by_configuration() -> None:
    assert step_of(ContrastConfig()) is moco_step_paper
    assert step_of(ContrastConfig(order="ema-first")) is moco_step_ema_first
    assert [step_of(CONFIGS[name]) for name in CONFIGS] == [moco_v3_step, simclr_step, byol_step]
    assert ContrastConfig(symmetric=True).losses_per_part == 2
    assert {config.losses_per_part for config in CONFIGS.values()} == {1}


def test_an_image_without_id_is_refused_where_it_would_meet_its_own_key() -> None:
    part = batch(0, 0)
    nameless = ViewPair(part.x_q, part.x_k, torch.full((6,), NO_ID), part.groups)
    for method in ("moco", "moco-v3", "simclr"):
        pair = make_pair(method, 0, batch_norm=False)
        config = ContrastConfig(method=method)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="by their ids"):
            step_of(config)(
                pair,
                KeyQueue(8, 8),
                [nameless],
                scoring=config.scoring(),
                m=M,
                step=0,
                update_query_=Updater(pair),
                gather=alone,
            )
