"""--profile: parts add up to the steps' time, nothing is left behind, no bit changes, the advice names the bound."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mocokit.api import pretrain
from mocokit.contrast.encoders import EncoderConfig
from mocokit.data.loader import BatchPlan
from mocokit.data.pixels import build_pixel_store
from mocokit.data.sources import open_source
from mocokit.data.views import view_recipe
from mocokit.training.precision import ExecutionConfig
from mocokit.training.profiling import (
    MEASURED_STEPS,
    PARTS,
    WARM_STEPS,
    Profile,
    RunProfiler,
    StepClock,
    TimedLoader,
)
from mocokit.training.state import make_encoder
from tests.toy import OPTIONS, npz

EXECUTION = ExecutionConfig(device="cpu", threads=1, precision="bf16", layout="channels-last", compile="on")


def profile(**seconds: float) -> Profile:
    """Ten steps of 100 images; whatever is not named took no time."""
    return Profile(10, 100, dict.fromkeys(PARTS, 0.0) | seconds, 0.05, 1, cpu=sum(seconds.values()))


def test_exactly_one_part_runs_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StepClock()
    now = 101.0
    clock.restart()
    for part, takes in (("wait", 1.0), ("loss", 2.0), ("update", 4.0), ("loss", 8.0), ("other", 16.0)):
        clock.mark(part)
        now += takes
    clock.mark("other")
    assert clock.seconds == {"wait": 1.0, "forward-backward": 0.0, "loss": 10.0, "update": 4.0, "other": 16.0}


def test_hooks_split_a_backward_at_the_encoders_output_and_are_gone_afterwards() -> None:
    class State:
        """What `watching` looks at."""

        encoder = make_encoder(EncoderConfig(backbone="small-cnn-8", dim=8), 16, 0)

        def modules(self) -> dict[str, torch.nn.Module]:
            return {"query": self.encoder}

    class Told(StepClock):
        """Keeps the order of the parts."""

        def __init__(self) -> None:
            super().__init__()
            self.order: list[str] = []

        def mark(self, part: str) -> None:
            super().mark(part)
            self.order.append(part)

    state, clock = State(), Told()
    with clock.watching(state):  # type: ignore[arg-type]
        state.encoder(torch.rand(4, 3, 16, 16)).square().sum().backward()
    expected = ["forward-backward", "loss", "forward-backward"]
    assert clock.order == expected
    state.encoder(torch.rand(4, 3, 16, 16)).square().sum().backward()
    assert clock.order == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_profiled_run_has_the_same_bits_and_tells_its_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    data = npz(tmp_path / "data.npz")
    options: dict[str, Any] = OPTIONS | {
        "workers": workers,
        "epochs": 11,
        "checkpoint_every": 1000,
    }  # 66 steps: 10 to warm up, 50 to measure
    plain = pretrain(data, tmp_path / "plain", **options, quiet=True)
    capsys.readouterr()
    profiled = pretrain(data, tmp_path / "profiled", **options, profile=True)
    told = capsys.readouterr().err
    assert (plain.path / "loss.jsonl").read_bytes() == (profiled.path / "loss.jsonl").read_bytes()
    assert "Profile of 50 steps of 8 images" in told
    assert told.count("Bound by") == 1
    assert all(words in told for words in PARTS.values())


def test_views_of_many_steps_made_at_once_are_shared_out(tmp_path: Path) -> None:
    """All of an epoch's views are made before its first step: no step waits for those of the others."""
    told: list[str] = []
    data = npz(tmp_path / "data.npz")
    source = open_source(data)
    config = view_recipe("moco-v2", 8)
    loader = TimedLoader(
        build_pixel_store(source, side=16), source.index, config, BatchPlan(source.index.ids, 1, 0), workers=0
    )
    profiler = RunProfiler(loader, 1, EXECUTION, told.append)
    profiler.mark("wait")
    for _ in loader.batches(0, WARM_STEPS + MEASURED_STEPS):
        profiler.mark("other")
        time.sleep(0.005)  # against tenths of a millisecond for the views
        profiler.end_step()
        profiler.mark("wait")
    assert loader.plan.steps_per_epoch >= 40
    assert profiler.profile is not None
    assert profiler.profile.steps == MEASURED_STEPS
    waited = profiler.profile.seconds["wait"] / MEASURED_STEPS
    assert waited == pytest.approx(profiler.profile.augment)
    assert 0 < waited < profiler.profile.seconds["other"] / MEASURED_STEPS


def test_a_run_that_ends_early_tells_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(npz(tmp_path / "data.npz"), tmp_path / "run", **OPTIONS, profile=True)
    assert "Profile of 2 steps of 8 images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "bound", "advice"),
    [
        ({"wait": 3.0, "forward-backward": 7.0}, "Bound by the views: the steps wait 30%", "--"),
        ({"other": 3.0, "forward-backward": 7.0}, "Bound by checks, logs and checkpoints", "--checkpoint-every"),
        ({"loss": 3.0, "forward-backward": 7.0}, "Bound by the loss", "--queue-size"),
        ({"update": 3.0, "forward-backward": 7.0}, "Bound by optimiser, EMA and queue", "--batch-size"),
        ({"loss": 1.0, "forward-backward": 9.0}, "Bound by the encoders' own arithmetic (90%)", "--backbone"),
    ],
)
def test_the_largest_cost_that_can_be_helped_is_named(seconds: dict[str, float], bound: str, advice: str) -> None:
    lines = profile(**seconds).lines(EXECUTION)
    assert "1000.0 ms a step, 100 images/s" in lines[0]
    assert lines[-1].startswith(bound)
    assert advice in lines[-1]


def test_what_auto_has_timed_is_not_advised_again() -> None:
    slow = dataclasses.replace(EXECUTION, precision="fp32", layout="contiguous", compile="off")
    told = profile(**{"forward-backward": 1.0}).advice(slow)[0]
    assert "--layout auto" in told
    assert "--compile auto" in told
    timed = dataclasses.replace(slow, reason="fp32 contiguous 3 ms, bf16 channels-last 4 ms")
    assert "--layout" not in profile(**{"forward-backward": 1.0}).advice(timed)[0]


def test_encoders_that_do_not_get_their_cores_are_told_apart() -> None:
    starved = dataclasses.replace(profile(**{"forward-backward": 10.0}), cpu=3.0)
    assert "got 0.3 cores for 1 threads" in starved.advice(EXECUTION)[0]
