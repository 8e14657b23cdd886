"""The optimisers against their papers' formulas and torch's own, and their state to names and back."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mocokit.contrast.encoders import EncoderConfig, EncoderPair, build_encoder, build_predictor
from mocokit.training import optim as optimisers
from mocokit.training.optim import (
    LARS,
    OptimConfig,
    build_optimizer,
    load_optimizer_tensors_,
    lr_at,
    optimizer_tensors,
)
from mocokit.training.precision import num_threads

SHAPES = {"conv": (4, 3, 3, 3), "linear": (5, 4), "bias": (5,), "scale": (), "still": (2, 2)}
CONFIGS = [
    OptimConfig(kind="sgd", lr=0.1),
    OptimConfig(kind="sgd", lr=0.1, sgd_momentum=0.0),
    OptimConfig(kind="lars", lr=0.8, weight_decay=0.01, trust=0.02),
    OptimConfig(kind="adamw", lr=0.01, weight_decay=0.1),
]


def parameters(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in SHAPES.items()
    }


def gradients(step: int, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def update(optimizer: torch.optim.Optimizer, trained: dict[str, Tensor], step: int, lr: float | None = None) -> None:
    """One update with gradients that are a function of the step; `still` gets none."""
    for name, gradient in gradients(step, dtype=trained["conv"].dtype).items():
        # in the parameter's own layout, as backward leaves it
        trained[name].grad = None if name == "still" else torch.empty_like(trained[name]).copy_(gradient)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
    optimizer.step()


@pytest.mark.parametrize("few", [0, optimisers.FEW])
def test_threads_decide_no_bit_of_an_update(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """Of small and of odd sizes; with all threads (few = 0) and where the update keeps to one."""
    monkeypatch.setattr(optimisers, "FEW", few)
    ends = []
    for threads in (1, 2, 3):
        trained = parameters() | {"odd": torch.nn.Parameter(torch.linspace(-1, 1, 100_003))}
        optimizer = build_optimizer(OptimConfig(lr=0.1), trained)
        with num_threads(threads):
            for step in range(4):
                trained["odd"].grad = torch.linspace(3, -2, 100_003) * (step + 1)
                update(optimizer, {name: p for name, p in trained.items() if name != "odd"}, step)
            assert torch.get_num_threads() == threads
        ends.append([p.detach().clone() for p in trained.values()])
    for end in ends[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(end, ends[0], strict=True))


# ------------------------------------------------------------------------------------------------ formulas


def lars_in_numpy(
    w: npt.NDArray[Any], grads: list[npt.NDArray[Any]], rates: list[float], m: float, decay: float, trust: float
) -> npt.NDArray[Any]:
    """You et al. 2017, algorithm 1, one layer; without adaptation and decay for vectors and scalars."""
    w, v = w.copy(), np.zeros_like(w)
    for g, rate in zip(grads, rates, strict=True):
        if w.ndim > 1:
            local = trust * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
            v = m * v + rate * local * (g + decay * w)
        else:
            v = m * v + rate * g
        w = w - v
    return w


def test_lars_is_the_papers() -> None:
    trained = parameters(dtype=torch.float64)
    before = {name: p.detach().numpy().copy() for name, p in trained.items()}
    optimizer = LARS(trained.values(), lr=1.0, momentum=0.9, weight_decay=0.05, trust=0.02)
    rates = [0.5, 2.0, 1.0, 0.1]
    for step, rate in enumerate(rates):
        update(optimizer, trained, step, rate)
    for name, parameter in trained.items():
        grads = [gradients(step, dtype=torch.float64)[name].numpy() for step in range(len(rates))]
        expected = lars_in_numpy(before[name], grads, rates, 0.9, 0.05, 0.02)
        if name == "still":
            expected = before[name]
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-12, atol=1e-14)


@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 50))
@settings(max_examples=25, deadline=None)
def test_the_step_of_a_layer_under_lars_does_not_depend_on_the_size_of_its_gradient(scale: float, seed: int) -> None:
    moved = []
    for factor in (1.0, scale):
        generator = torch.Generator().manual_seed(seed)
        w = torch.nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64))
        before, w.grad = w.detach().clone(), factor * torch.randn(3, 4, generator=generator, dtype=torch.float64)
        LARS([w], lr=2.0, momentum=0.9, weight_decay=0.0, trust=0.01).step()
        moved.append(w.detach() - before)
        assert float(moved[-1].norm()) == pytest.approx(2.0 * 0.01 * float(before.norm()))
    torch.testing.assert_close(*moved)


def test_a_layer_of_zeros_still_moves_under_lars_and_one_without_gradient_decays_as_by_sgd() -> None:
    zero, still = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.ones(2, 2))
    zero.grad, still.grad = torch.full((2, 2), 0.5), torch.zeros(2, 2)
    LARS([zero, still], lr=0.1, momentum=0.9, weight_decay=0.2, trust=0.01).step()
    torch.testing.assert_close(zero.detach(), torch.full((2, 2), -0.05))
    torch.testing.assert_close(still.detach(), torch.full((2, 2), 1 - 0.1 * 0.2))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_sgd_and_adamw_are_torchs(kind: str) -> None:
    ours, theirs = parameters(), parameters()
    config = OptimConfig(kind=kind, lr=0.03, weight_decay=0.1)  # type: ignore[arg-type]
    optimizer = build_optimizer(config, ours)
    plain: torch.optim.Optimizer = (
        torch.optim.SGD(theirs.values(), lr=0.03, momentum=0.9, weight_decay=0.1, foreach=False)
        if kind == "sgd"
        else torch.optim.AdamW(theirs.values(), lr=0.03, weight_decay=0.1, foreach=False)
    )
    for step in range(6):
        update(optimizer, ours, step)
        update(plain, theirs, step)
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name])


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_has_the_bits_of_torchs_fused_one(momentum: float) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = build_optimizer(OptimConfig(lr=0.03, sgd_momentum=momentum, weight_decay=0.1), ours)
    plain = torch.optim.SGD(theirs.values(), lr=0.03, momentum=momentum, weight_decay=0.1, fused=True)
    for step in range(6):
        update(optimizer, ours, step, lr=0.1 / (step + 1))
        update(plain, theirs, step, lr=0.1 / (step + 1))
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


def test_the_optimiser_of_a_pair_moves_encoder_and_predictor() -> None:
    config = EncoderConfig(backbone="small-cnn-4-6", dim=6, head="mlp-bn", predictor="mlp-bn")
    encoder = build_encoder(config, image_size=8, seed=0)
    pair = EncoderPair(encoder, build_predictor(config, feature_dim=encoder.feature_dim, seed=0))
    for optim in CONFIGS:
        before = {name: p.detach().clone() for name, p in pair.trained.items()}
        key = {name: t.clone() for name, t in pair.key.state_dict().items()}
        optimizer = build_optimizer(optim, pair.trained)
        pair.train()
        pair.predict(torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(not torch.equal(before[name], p) for name, p in pair.trained.items() if "bias" not in name)
        assert all(torch.equal(key[name], tensor) for name, tensor in pair.key.state_dict().items())


# --------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kind}-{c.sgd_momentum}")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_restored_optimiser_goes_on_bit_for_bit(config: OptimConfig, layout: Any, steps: int) -> None:
    def fresh() -> dict[str, Tensor]:
        found = parameters()
        found["conv"] = torch.nn.Parameter(found["conv"].detach().to(memory_format=layout))
        return found

    trained, again = fresh(), fresh()
    optimizer = build_optimizer(config, trained)
    for step in range(steps):
        update(optimizer, trained, step)
    stored = {name: t.contiguous().clone() for name, t in optimizer_tensors(optimizer, trained).items()}
    with torch.no_grad():
        for name, parameter in again.items():
            parameter.copy_(trained[name])
    restored = build_optimizer(config, again)
    load_optimizer_tensors_(restored, again, stored)
    for step in range(steps, steps + 4):
        update(optimizer, trained, step)
        update(restored, again, step)
    for name in SHAPES:
        assert torch.equal(trained[name], again[name]), name
    one, other = optimizer_tensors(optimizer, trained), optimizer_tensors(restored, again)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    if config.kind != "adamw" and config.sgd_momentum:
        assert other["momentum.conv"].stride() == again["conv"].stride()


def test_the_names_of_the_state() -> None:
    for config, kinds in zip(CONFIGS, [["momentum"], [], ["momentum"], ["exp_avg", "exp_avg_sq", "step"]], strict=True):
        trained = parameters()
        optimizer = build_optimizer(config, trained)
        assert optimizer_tensors(optimizer, trained) == {}
        update(optimizer, trained, 0)
        moved = [name for name in SHAPES if name != "still"]
        assert sorted(optimizer_tensors(optimizer, trained)) == sorted(f"{k}.{n}" for k in kinds for n in moved)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2], CONFIGS[3]], ids=lambda c: c.kind)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(config: OptimConfig) -> None:
    trained = parameters()
    optimizer = build_optimizer(config, trained)
    update(optimizer, trained, 0)
    good = {name: t.clone() for name, t in optimizer_tensors(optimizer, trained).items()}
    first = "exp_avg" if config.kind == "adamw" else "momentum"
    bad = [
        ({f"{first}.other": torch.zeros(2)}, f"{first}.other"),
        (
            {f"{first}.conv": torch.zeros(2)},
            f"{first}.conv of the optimiser's state has the shape [2], not [4, 3, 3, 3]",
        ),
        ({"exp_avg.conv" if config.kind != "adamw" else "momentum.conv": torch.zeros(4, 3, 3, 3)}, ".conv"),
    ]
    if config.kind == "adamw":
        bad.append(({"step.conv": torch.zeros(1)}, "step.conv"))
    for change, says in bad:
        with pytest.raises(ValueError, match=re.escape(says)):
            load_optimizer_tensors_(optimizer, trained, good | change)
    if config.kind == "adamw":
        with pytest.raises(ValueError, match=r"step\.conv is missing"):
            load_optimizer_tensors_(optimizer, trained, {k: v for k, v in good.items() if k != "step.conv"})
    now = optimizer_tensors(optimizer, trained)
    assert all(torch.equal(now[name], tensor) for name, tensor in good.items())


# ------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"kind": "adam"}, "must be sgd, lars or adamw. Got 'adam'."),
        ({"kind": "adamw", "sgd_momentum": 0.5}, "`sgd_momentum` has no effect on adamw: leave it out. Got 0.5."),
        ({"kind": "adamw", "trust": 0.01}, "`trust` has no effect on adamw"),
        ({"trust": 0.01}, "`trust` has no effect on sgd: leave it out. Got 0.01."),
        ({"kind": "lars", "trust": 0.0}, "`trust` must be above 0. Got 0.0."),
    ],
)
def test_settings_that_make_no_sense_are_named(settings_: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        OptimConfig(**settings_)


@pytest.mark.parametrize("kind", ["sgd", "lars", "adamw"])
def test_each_setting_with_an_effect_has_one(kind: Any) -> None:
    """`uses` tells the truth: changing what is used changes the update, and nothing else may be changed."""

    def after(**changes: Any) -> Tensor:
        trained = parameters()
        optimizer = build_optimizer(OptimConfig(kind=kind, **{"lr": 0.1, **changes}), trained)
        for step in range(2):
            update(optimizer, trained, step)
        return trained["conv"].detach()

    base = OptimConfig(kind=kind)
    for name, value in {"lr": 0.2, "sgd_momentum": 0.5, "weight_decay": 0.3, "trust": 0.01}.items():
        if base.uses(name):
            assert not torch.equal(after(), after(**{name: value})), name
        else:
            with pytest.raises(ValueError, match=name):
                OptimConfig(kind=kind, **{name: value})


def test_the_schedule_knows_no_batch_size_and_no_kind() -> None:
    for kind in ("sgd", "lars", "adamw"):
        config = OptimConfig(kind=kind, lr=4.8, warmup_epochs=2)  # type: ignore[arg-type]
        course = [lr_at(config, step, 100, 10) for step in range(100)]
        assert max(course) <= 4.8
        assert course[20] == 4.8
        assert course[:20] == pytest.approx([4.8 * (step + 1) / 21 for step in range(20)])
        assert course[60] == pytest.approx(2.4)


def test_updates_do_not_import_the_compiler() -> None:
    """It takes 150 MiB and a second or two, which a run that compiles nothing would pay for nothing."""
    script = (
        "import sys, torch\n"
        "from mocokit.training.optim import OptimConfig, build_optimizer\n"
        "for kind in ('sgd', 'lars', 'adamw'):\n"
        "    w = torch.ones(3, requires_grad=True)\n"
        "    optimizer = build_optimizer(OptimConfig(kind=kind), {'w': w})\n"
        "    for _ in range(3):\n"
        "        w.square().sum().backward()\n"
        "        optimizer.step()\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
