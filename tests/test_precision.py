"""What decides bits and speed: settled once, without a trace in the weights."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import replace

import pytest
import torch

from mocokit.contrast.encoders import Encoder, EncoderConfig, build_encoder
from mocokit.errors import UsageError
from mocokit.training import precision
from mocokit.training.precision import (
    ExecutionConfig,
    apply_execution,
    choose_execution,
    compile_,
    num_threads,
    view_threads,
)

PLAIN = ExecutionConfig(device="cpu", threads=1, precision="fp32", layout="contiguous")


def small() -> Encoder:
    return build_encoder(EncoderConfig(backbone="small-cnn-4-8", head="mlp", dim=8), image_size=16, seed=0)


def views(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_a_choice_leaves_weights_statistics_and_gradients_as_they_were() -> None:
    encoder = small()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    chosen = choose_execution(encoder, views(), ExecutionConfig(threads=1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    assert all(p.grad is None for p in encoder.parameters())
    assert (chosen.device, chosen.threads, chosen.compile) == ("cpu", 1, "off")
    assert chosen.precision in ("fp32", "bf16")
    assert chosen.layout in ("contiguous", "channels-last")
    assert "8 images" in chosen.reason
    assert f"{chosen.precision} {chosen.layout}" in chosen.reason


def test_what_is_named_is_not_timed() -> None:
    assert choose_execution(small(), views(), PLAIN) == PLAIN
    with num_threads(1):  # where torch would use one, there is nothing to time
        assert choose_execution(small(), views(), replace(PLAIN, threads=None)) == PLAIN


@pytest.mark.parametrize(("together", "threads"), [(0.3, 4), (0.95, 4), (1.04, 4), (1.06, 1), (1.5, 1)])
def test_one_thread_must_be_worth_it(monkeypatch: pytest.MonkeyPatch, together: float, threads: int) -> None:
    """Only where its step is 5 % faster than that of all: a machine whose cores are busy for a moment shows less."""

    def clocked(*_: object, **__: object) -> float:
        return 1.0 if torch.get_num_threads() == 1 else together

    monkeypatch.setattr(precision, "time_step", clocked)
    encoder = small()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with num_threads(4):
        chosen = choose_execution(encoder, views(), replace(PLAIN, threads=None))
        assert choose_execution(encoder, views(), replace(PLAIN, threads=3)).threads == 3
    assert chosen.threads == threads
    assert f"{together * 1e3:.3g} ms with 4 threads; 1e+03 ms with one" in chosen.reason
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ([1.0, 0.985, 0.96, 0.955], "fp32 contiguous"),
        ([1.0, 0.97, 0.96, 0.93], "fp32 channels-last"),
        ([1.0, 1.2, 0.94, 0.93], "bf16 contiguous"),
        ([1.0, 1.2, 0.94, 0.92], "bf16 channels-last"),
        ([1.0, 0.97, 0.99, 0.9], "bf16 channels-last"),
    ],
)
def test_what_gains_little_is_left(monkeypatch: pytest.MonkeyPatch, seconds: list[float], chosen: str) -> None:
    """5 % for bf16, 2 % for a layout; and a moment in which the machine did something else decides nothing."""
    arms = [("fp32", "contiguous"), ("fp32", "channels-last"), ("bf16", "contiguous"), ("bf16", "channels-last")]
    visits: list[int] = []

    def clocked(encoder: Encoder, *_: object, **__: object) -> float:
        last = encoder.backbone.trunk[0].weight.is_contiguous(memory_format=torch.channels_last)
        arm = arms.index(("bf16" if encoder.autocast else "fp32", "channels-last" if last else "contiguous"))
        visits.append(arm)
        return seconds[arm] * (3.0 if 3 <= len(visits) < 6 else 1.0)  # a busy moment

    monkeypatch.setattr(precision, "time_step", clocked)
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device: True)
    found = choose_execution(small(), views(), replace(PLAIN, precision="auto", layout="auto"))
    assert f"{found.precision} {found.layout}" == chosen
    assert visits[:8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_slow_step_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = []
    monkeypatch.setattr(precision, "time_step", lambda *_, **__: visits.append(0) or 40.0)  # type: ignore[func-returns-value]
    monkeypatch.setattr(precision, "LONG_TRIAL", -1.0)
    choose_execution(small(), views(), replace(PLAIN, layout="auto"))
    assert len(visits) == 2


def test_trying_to_compile_leaves_no_trace_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "compile_", lambda encoder: None)
    monkeypatch.setattr(precision, "_compiler_missing", lambda device: "")
    monkeypatch.setattr(precision, "LONG_RUN", 0)
    encoder = small()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    assert "compiled " in choose_execution(encoder, views(), replace(PLAIN, compile="auto"), steps=1).reason
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    assert all(p.grad is None for p in encoder.parameters())


def test_what_a_compiler_gains_is_measured_against_a_pass_as_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first passes of a process are slower; a compiler that does nothing must not profit from that."""
    passes = []

    def clocked(*_: object, **__: object) -> float:
        passes.append(0)
        return 1.3 if len(passes) <= 6 else 1.0

    monkeypatch.setattr(precision, "time_step", clocked)
    monkeypatch.setattr(precision, "compile_", lambda encoder: None)
    monkeypatch.setattr(precision, "_compiler_missing", lambda device: "")
    chosen = choose_execution(small(), views(), replace(PLAIN, layout="auto", compile="auto"), steps=10**9)
    assert chosen.compile == "off"
    assert len(passes) > 6


def test_views_get_a_thread_of_their_own_where_a_core_is_left() -> None:
    cores = len(os.sched_getaffinity(0))
    for threads in (1, cores, cores + 1):
        assert view_threads(None, replace(PLAIN, threads=threads)) == (0 if threads >= cores else 1)
        assert view_threads(3, replace(PLAIN, threads=threads)) == 3
        assert view_threads(0, replace(PLAIN, threads=threads)) == 0
        assert view_threads(None, replace(PLAIN, device="cuda:0", threads=threads)) == 1


def test_bf16_keeps_parameters_and_outputs_in_fp32() -> None:
    encoder = small()
    exact = encoder.eval()(views())
    apply_execution(encoder, replace(PLAIN, precision="bf16"))
    rounded = encoder(views())
    assert {p.dtype for p in encoder.parameters()} == {rounded.dtype} == {torch.float32}
    assert not torch.equal(rounded, exact)  # it does have an effect
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.02)


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with num_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_short_run_is_not_compiled_and_the_reason_said() -> None:
    chosen = choose_execution(small(), views(), replace(PLAIN, compile="auto"), steps=10)
    assert chosen.compile == "off"
    assert "not compiled: the run is short" in chosen.reason


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UsageError, match=r"--compile on: torch.compile needs a C\+\+ compiler"):
        choose_execution(small(), views(), replace(PLAIN, compile="on"))
    chosen = choose_execution(small(), views(), replace(PLAIN, compile="auto"), steps=10**9)
    assert chosen.compile == "off"
    assert "needs a C++ compiler" in chosen.reason


@pytest.mark.slow
def test_a_compiled_encoder_is_the_same_function_with_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler on the path")
    plain, compiled = small().train(), small().train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it compiles
        compile_(compiled)
        torch.testing.assert_close(compiled(views()), plain(views()), rtol=1e-5, atol=1e-6)
        assert list(compiled.state_dict()) == list(plain.state_dict())
        torch.testing.assert_close(compiled.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
        monkeypatch.setattr(precision, "LONG_RUN", 0)
        chosen = choose_execution(small(), views(), replace(PLAIN, compile="auto"), steps=1)
    assert chosen.compile in ("on", "off")
    assert "compiled " in chosen.reason
