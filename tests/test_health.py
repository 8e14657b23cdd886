import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.nn import functional as F

from mocokit.api.measuring import probe_of
from mocokit.api.opening import build_store, configure
from mocokit.contrast import health
from mocokit.contrast.encoders import EncoderConfig, EncoderPair, build_encoder, build_predictor
from mocokit.contrast.health import Classes, HealthProbe, findings
from mocokit.contrast.key_queue import KeyQueue
from mocokit.contrast.method import ContrastConfig
from mocokit.contrast.parts import ViewPair
from mocokit.contrast.steps import step_of
from mocokit.data.loader import BatchLoader, BatchPlan
from mocokit.options import PretrainOptions
from mocokit.reporting.plots import health_figure, results_figure, save_figure
from mocokit.training.loop import Schedule
from tests.toy import npz

RNG = np.random.default_rng(0)


def random_rows(n: int, d: int) -> tuple[Tensor, np.ndarray[Any, np.dtype[np.float64]]]:
    x = RNG.normal(size=(n, d)) * RNG.uniform(0.1, 3, d) + RNG.normal(size=d)
    return torch.from_numpy(x), x


def unit(x: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


# --------------------------------------------------------------------------------------- statistics, against numpy


@pytest.mark.parametrize(("n", "d"), [(40, 8), (8, 40), (33, 33)])
def test_statistics_are_their_formulas(n: int, d: int) -> None:
    (q, q_np), (k, k_np) = random_rows(n, d), random_rows(n, d)
    u, v = unit(q_np), unit(k_np)
    assert health.spread(q) == pytest.approx(np.std(u, axis=0).mean() * np.sqrt(d), rel=1e-12)
    values = np.linalg.svd(q_np, compute_uv=False)
    p = values / values.sum() + 1e-7
    assert health.effective_rank(q) == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-9)
    assert health.alignment(q, k) == pytest.approx(np.mean(np.sum((u - v) ** 2, axis=1)), rel=1e-12)
    pairs = [np.exp(-2 * np.sum((u[i] - u[j]) ** 2)) for i in range(n) for j in range(i)]
    assert health.uniformity(q) == pytest.approx(np.log(np.mean(pairs)), rel=1e-9)
    told = np.mean([np.argmax(v @ u[i]) == i for i in range(n)])
    assert health.batch_accuracy(q, k) == pytest.approx(told)
    assert health.mean_cosine(q, k) == pytest.approx(np.mean(np.sum(u * v, axis=1)), rel=1e-12)
    cosines = (u @ v.T).astype(np.float32)
    counts, _ = np.histogram(cosines, bins=health.BINS, range=(-1, 1))
    mine = health.histogram(torch.from_numpy(cosines))
    assert sum(mine) == n * n
    assert np.abs(np.cumsum(mine) - np.cumsum(counts)).max() <= 1  # a cosine on an edge may fall on either side


def test_extremes() -> None:
    same = torch.ones(20, 16)
    assert health.spread(same) == pytest.approx(0, abs=1e-6)
    assert health.effective_rank(same) == pytest.approx(1, abs=1e-3)
    assert health.batch_accuracy(same, same) == 0.0  # nothing is told apart, so nothing is found
    assert health.effective_rank(torch.eye(24)) == pytest.approx(24, rel=1e-3)
    sphere = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0))
    assert health.spread(sphere) == pytest.approx(1, abs=0.01)
    assert health.batch_accuracy(sphere[:50], sphere[:50]) == 1.0
    assert health.histogram(torch.tensor([-1.0, 1.0, 1.0000002]))[0::39] == [1, 2]
    assert math.isnan(health.effective_rank(torch.full((3, 3), torch.inf)))
    assert health.effective_rank(torch.zeros(4, 4)) < 1.001


def test_shares_distances_and_norms() -> None:
    own, stored = torch.from_numpy(RNG.integers(-1, 6, 30)), torch.from_numpy(RNG.integers(-1, 9, 200))
    told = np.mean([[a == b and a != -1 for b in stored.tolist()] for a in own.tolist()])
    assert health.same_share(own, stored) == pytest.approx(told)
    assert health.same_share(own, stored[:0]) == 0.0
    ids = torch.from_numpy(RNG.permutation(50) * 7)
    labels = ids // 70
    asked = torch.tensor([0, 343, 3, -1, 70, 9999])
    assert Classes(ids, labels).of(asked).tolist() == [0, 4, -1, -1, 1, -1]
    a = [torch.tensor([3.0, 0.0]), torch.tensor([[0.0, 4.0]])]
    b = [torch.tensor([3.0, 1.0]), torch.tensor([[2.0, 4.0]])]
    assert health.parameter_distance(a, b) == pytest.approx(math.sqrt(5) / 5)
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    assert health.gradient_norm([weight]) == 0.0
    weight.square().sum().div(2).backward()
    assert health.gradient_norm([weight]) == pytest.approx(5)


# --------------------------------------------------------------------------------------------------- tiny trainings

N, SIDE = 32, 12


def images(count: int) -> Tensor:
    """Smooth coloured pictures [count, 3, SIDE, SIDE]."""
    small = torch.randn(count, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    return F.interpolate(small, SIDE, mode="bilinear")


class Training:
    """A few steps of any method on made-up pictures, with views that are noise and brightness."""

    def __init__(
        self, *, predictor: str = "none", lr: float = 0.05, every: int = 20, K: int = 128, **contrast: Any
    ) -> None:
        method = contrast.get("method", "moco")
        self.config = ContrastConfig(**contrast, **({"K": K} if method == "moco" else {}))
        encoder = EncoderConfig(backbone="small-cnn-16-32", dim=32, predictor=predictor)  # type: ignore[arg-type]
        query = build_encoder(encoder, image_size=SIDE, seed=0)
        self.pair = EncoderPair(
            query,
            build_predictor(encoder, feature_dim=query.feature_dim, seed=0),
            momentum=self.config.has_momentum,
        )
        self.pair.train()
        self.queue = KeyQueue(K, 32) if self.config.has_queue else None
        self.optimizer = torch.optim.SGD(self.pair.trained.values(), lr=lr, momentum=0.9)
        self.images = images(320)
        self.probe = self.new_probe(every, K)
        self.told: dict[str, Any] = {}

    def new_probe(self, every: int, K: int) -> HealthProbe:
        ids = torch.arange(64)
        return HealthProbe(
            lambda number: self.view(ids, 10_001 + number),
            ids,
            every=every,
            lifetime=K / N if self.queue else 0,
            classes=Classes(torch.arange(320), torch.arange(320) % 5),
        )

    def view(self, ids: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = self.images[ids]
        x = x * (1 + 0.3 * torch.randn(len(ids), 1, 1, 1, generator=generator))
        return x + 0.2 * torch.randn(x.shape, generator=generator)

    def update(self, losses: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        (contrast,) = losses
        contrast.loss.backward()
        gradient = health.gradient_norm(self.pair.trained.values())
        self.told = {"loss": float(contrast.loss.detach()), "chance": contrast.chance(), "gradient": gradient}
        self.optimizer.step()

    def run(self, steps: int, *, probing: bool = True) -> list[dict[str, Any]]:
        rows = []
        for step in range(steps):
            ids = torch.randperm(320, generator=torch.Generator().manual_seed(step))[:N]
            part = ViewPair(self.view(ids, 2 * step), self.view(ids, 2 * step + 1), ids, torch.full((N,), -1))
            step_of(self.config)(
                self.pair,
                self.queue,
                [part],
                scoring=self.config.scoring(),
                m=self.config.m_at(step, steps),
                step=step,
                update_query_=self.update,
                gather=lambda keys: keys,
            )
            if probing and (
                row := self.probe.after_step(
                    self.pair, self.queue, step=step + 1, total_steps=steps, epoch=(step + 1) / 10, **self.told
                )
            ):
                rows.append(row)
        return rows

    def bits(self) -> list[Tensor]:
        states = [self.pair.query.state_dict(), self.pair.key.state_dict()]
        tensors = [tensor.clone() for state in states for tensor in state.values()]
        return tensors + ([tensor.clone() for tensor in self.queue.tensors().values()] if self.queue else [])


def test_measuring_changes_nothing() -> None:
    """Encoders, running statistics, queue and random numbers end as they do without a probe, to the last bit."""
    random_state = torch.get_rng_state()
    with_probe, without = Training(m=0.9, every=3), Training(m=0.9)
    with_probe.run(12)
    without.run(12, probing=False)
    for one, other in zip(with_probe.bits(), without.bits(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in with_probe.pair.key.parameters())
    byol = Training(method="byol", predictor="mlp-bn", m=0.9, lr=0.02)
    assert byol.pair.predictor is not None
    before = {name: tensor.clone() for name, tensor in byol.pair.predictor.state_dict().items()}
    byol.probe.measure(byol.pair, None, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in byol.pair.predictor.state_dict().items())


def test_eval_mode_is_refused() -> None:
    training = Training(m=0.9)
    training.pair.train(False)
    with pytest.raises(ValueError, match="train mode"):
        training.probe.measure(training.pair, training.queue, 1)
    with pytest.raises(ValueError, match="every"):
        HealthProbe(training.probe.view, torch.arange(8), every=0)
    with pytest.raises(ValueError, match="at least 8"):
        HealthProbe(training.probe.view, torch.arange(4), every=1)


@pytest.mark.parametrize(
    ("every", "K", "ages"), [(20, 128, [2, 4]), (4, 512, [4, 8, 12, 16]), (7, 32, [1]), (50, 16, [])]
)
def test_ages_of_keys_and_the_cosine_at_each(every: int, K: int, ages: list[int]) -> None:
    """Against keys that the test itself encoded at every step, in a copy of the encoder as it was."""
    training = Training(m=0.5, every=every, K=K)
    made: dict[int, Tensor] = {}
    measure_at = training.probe.after_step

    def watched(pair: EncoderPair, queue: KeyQueue | None, *, step: int, **facts: Any) -> dict[str, Any] | None:
        with torch.no_grad(), health.statistics_untouched(pair.key):
            made[step] = F.normalize(pair.key(training.probe.view(1)), dim=1)
        return measure_at(pair, queue, step=step, **facts)

    training.probe.after_step = watched  # type: ignore[method-assign]
    rows = training.run(60)
    assert rows[0]["staleness"] == [[0, pytest.approx(1.0, abs=1e-6)]]
    late = next(row for row in rows if row["step"] >= 20 and row["step"] % every == 0) if every < 50 else rows[-1]
    assert [age for age, _ in late["staleness"]] == ages
    for row in rows[1:]:
        for age, cosine in row["staleness"]:
            then, now = made[row["step"] - age], made[row["step"]]
            assert cosine == pytest.approx(float((then.double() * now.double()).sum(1).mean()), abs=1e-7)
            assert cosine < 1.0


def test_a_row_is_what_the_encoders_say() -> None:
    training = Training(m=0.9, every=10)
    row = training.run(10)[-1]
    pair, queue, probe = training.pair, training.queue, training.probe
    assert queue is not None
    with torch.no_grad(), health.statistics_untouched(pair.query), health.statistics_untouched(pair.key):
        h, z = pair.query.h_and_z(probe.view(0))
        k = pair.key(probe.view(1))
    q, k = F.normalize(z, dim=1), F.normalize(k, dim=1)
    assert row["spread_z"] == health.spread(z)
    assert row["spread_h"] == health.spread(h)
    assert row["rank_z"] == health.effective_rank(q)
    assert row["rank_limit"] == 32
    assert row["positives"] == health.histogram((q * k).sum(1))
    assert row["negatives"] == health.histogram(q @ queue.vectors.T)
    assert (row["queue_fill"], row["queue_size"]) == (128, 128)
    met = (probe.ids[:, None] == queue.ids[None, :]).double().mean()
    assert row["same_source_share"] == pytest.approx(float(met))
    classes = (probe.ids[:, None] % 5 == queue.ids[None, :] % 5).double().mean()
    assert row["same_class_share"] == pytest.approx(float(classes))
    assert row["theta_distance"] == health.parameter_distance(pair.theta_q, pair.theta_k)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


PLANTED = [
    {"m": 0.0},
    {"method": "byol", "m": 0.99},
]
HEALTHY: list[dict[str, Any]] = [
    {"m": 0.99, "lr": 0.02},
    {"method": "byol", "m": 0.99, "predictor": "mlp-bn"},
    {"method": "simclr"},
    {"method": "moco-v3", "m": 0.99, "predictor": "mlp-bn"},
]


@pytest.mark.parametrize("settings", PLANTED)
def test_planted_collapses_are_called_within_200_steps(settings: dict[str, Any]) -> None:
    rows = Training(**settings).run(120)
    called = [row for row in rows if "collapsed" in row["findings"]]
    assert called
    assert called[0]["findings"]["collapsed"].startswith("collapsed: effective rank ")
    assert called[0]["rank_z"] < health.COLLAPSED_RANK
    assert called[0]["spread_z"] < health.COLLAPSED_SPREAD


@pytest.mark.parametrize("settings", HEALTHY)
def test_healthy_runs_are_not_called_collapsed(settings: dict[str, Any]) -> None:
    rows = Training(**settings).run(120)
    assert not [row for row in rows if "collapsed" in row["findings"]]


# ------------------------------------------------------------------------------------------------------- findings


def row(step: int = 100, **changes: Any) -> dict[str, Any]:
    base = {
        "step": step,
        "epoch": step / 100,
        "loss": 3.0,
        "chance": 8.32,
        "rank_z": 40.0,
        "rank_limit": 128,
        "spread_z": 0.9,
        "batch_accuracy": 0.5,
        "probe": 128,
        "queue_fill": 4096,
        "queue_size": 4096,
        "staleness": [[0, 1.0], [100, 0.9]],
    }
    return base | changes


def codes(*rows: dict[str, Any]) -> list[str]:
    return list(findings(rows))


def test_collapse_needs_both_statistics_twice() -> None:
    low = {"rank_z": 3.3, "spread_z": 0.20}  # read in a collapsed trial
    assert codes(row(100, **low), row(200, **low)) == ["collapsed"]
    assert codes(row(100), row(200, **low)) == []
    assert codes(row(100, **low)) == []
    assert codes(row(100, **low), row(200, rank_z=8.1, spread_z=0.76)) == []  # and in a healthy one
    for half in ({"rank_z": 3.3}, {"spread_z": 0.2}):
        assert codes(row(100, **half), row(200, **half)) == []
    assert codes(row(100, rank_z=None, spread_z=None), row(200, rank_z=None, spread_z=None)) == []
    text = findings([row(100, **low), row(200, rank_z=1.3, spread_z=0.02)])["collapsed"]
    assert text.startswith("collapsed: effective rank 1.3 of 128, spread 0.02 of 1")


def test_at_chance_counts_epochs() -> None:
    lost = [row(step, loss=8.3) for step in range(100, 500, 50)]
    assert codes(*lost[:6]) == []
    assert codes(*lost) == ["at-chance"]
    assert findings(lost)["at-chance"].startswith("at chance for 4 epochs: loss 8.30, chance 8.32")
    assert codes(*lost[:4], row(300, loss=7.0), *lost[5:]) == []
    assert codes(*(dict(one, chance=None) for one in lost)) == []


def test_drift_stale_and_filling() -> None:
    drifting = {"loss": 5.0, "batch_accuracy": 1 / 128}
    assert codes(row(**drifting), row(200, **drifting)) == ["drift"]
    assert codes(row(), row(200, **drifting)) == []
    assert codes(row(**drifting), row(200, loss=5.0, batch_accuracy=0.2)) == []
    assert codes(row(**drifting), row(200, loss=8.0, batch_accuracy=1 / 128)) == []
    text = findings([row(**drifting), row(200, **drifting)])["drift"]
    assert text.startswith("told apart by drift: the loss is 3.32 below chance, yet only 0.8%")
    stale = row(staleness=[[0, 1.0], [120, 0.7], [240, 0.41]])
    assert findings([stale])["stale"].startswith("keys are stale: cosine 0.41 at age 240")
    assert codes(row(staleness=[[0, 0.3]])) == []
    assert findings([row(queue_fill=1024)])["filling"].startswith("queue still filling: 1,024 of 4,096 keys")
    assert findings([]) == {}


def test_news_are_told_once() -> None:
    training = Training(m=0.9, every=5)
    training.run(20)
    filling = [one["findings"].get("filling") for one in training.probe.rows]
    assert filling[0] is not None
    assert filling[-1] is None
    resumed = HealthProbe(training.probe.view, training.probe.ids, every=5, rows=training.probe.rows[:1])
    assert resumed.news() == [filling[0]]
    resumed.rows.append(training.probe.rows[0])
    assert resumed.news() == []


@pytest.mark.parametrize(("size", "kept"), [(16, True), (160, False)])
def test_large_views_are_made_anew_for_every_look(tmp_path: Path, size: int, kept: bool) -> None:
    source, config = configure(str(npz(tmp_path / "data.npz")), PretrainOptions(image_size=size, batch_size=8), {})
    store = build_store(source, side=config.data.side, cache=None, max_bad=0.0)
    loader = BatchLoader(store, source.index, config.views, BatchPlan(source.index.ids, 8, 0))
    probe = probe_of(loader, config, Schedule(6, 12, 10, 1), [], torch.device("cpu"))
    assert probe is not None
    rows = np.argsort(source.index.ids)
    expected = loader.of_rows(np.sort(rows), 0)
    assert torch.equal(probe.ids, expected.ids)
    for number, x in enumerate((expected.x_q, expected.x_k)):
        first, second = probe.view(number), probe.view(number)
        assert torch.equal(first, x)
        assert torch.equal(second, x)
        assert (first is second) == kept


# ------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("settings", [{"m": 0.9}, {"method": "simclr"}])
def test_figures_of_any_method(settings: dict[str, Any], tmp_path: Any) -> None:
    rows = Training(**settings, every=4).run(12)
    health_figure(rows[:1])
    losses = [{"step": step, "loss": 3.0, "chance": 4.0} for step in range(12)]
    figure = results_figure(losses, [], title="t", monitor=None, health=rows)
    save_figure(figure, tmp_path / "results.png")
    assert (tmp_path / "results.png").stat().st_size > 10_000
    assert len(figure.findobj(Axes)) == 7
