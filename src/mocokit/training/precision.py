"""What decides the bits and the speed of a run besides its configuration: threads, precision, memory layout.

Picked once, when a run starts, recorded, and used again on every resume.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mocokit.contrast.encoders import Encoder
from mocokit.errors import UsageError
from mocokit.training.allocator import release_freed_memory

Precision = Literal["auto", "fp32", "bf16"]
Layout = Literal["auto", "contiguous", "channels-last"]
Compile = Literal["off", "on", "auto"]
MAX_THREADS = 1024
"""More threads than any machine has use for; asking for more is a slip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionConfig:
    """What decides bits and speed on this machine; settled when the run starts, kept on resume."""

    device: str = "auto"
    """cpu, cuda, ...; auto = cuda where there is one."""
    threads: int | None = None
    """Intra-op threads; None = all that torch would use, or one where these do not pay (timed)."""
    precision: Precision = "auto"
    """Arithmetic of the encoders."""
    layout: Layout = "auto"
    """Memory layout of the encoders."""
    compile: Compile = "off"
    """Whether torch.compile translates the encoders; auto = where that pays within the run."""
    reason: str = ""
    """What was timed, where something was."""

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise UsageError(f"`threads` must lie in [1, {MAX_THREADS}]. Got {self.threads}.")


def has_fast_bf16(device: torch.device) -> bool:
    """Whether this device multiplies bfloat16 in hardware; elsewhere it would be slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("amx_tile"))


def choose_execution(encoder: Encoder, sample: Tensor, wanted: ExecutionConfig, *, steps: int = 0) -> ExecutionConfig:
    """Settle everything that is "auto" or None, on the device of `sample`.

    sample: float32 [N, 3, H, W], a batch as training will see it. Precision and layout are decided by timing a few
    forward and backward passes by turns. bfloat16 is chosen only where the hardware has it and a step is at least 5 %
    faster for it, another layout than torch's own where it is 2 % faster. On a CPU, threads None: all that torch would
    use, or one where its step is at least 5 % faster. Compiling is tried only where `steps` of them take 20 minutes or
    more: the trial alone takes about one. Leaves the encoder's weights, statistics and gradients as they were. Raises
    UsageError where compiling is asked for and can't be done.
    """
    settled = replace(wanted, device=str(sample.device), threads=wanted.threads or torch.get_num_threads(), reason="")
    precisions: list[Precision] = [wanted.precision]
    if wanted.precision == "auto":
        precisions = ["fp32", "bf16"] if has_fast_bf16(sample.device) else ["fp32"]
    both: list[Layout] = ["contiguous", "channels-last"] if sample.ndim == 4 else ["contiguous"]  # clips: one layout
    layouts = both if wanted.layout == "auto" else [wanted.layout]
    if wanted.compile == "on" and (missing := _compiler_missing(sample.device)):
        raise UsageError(f"--compile on: {missing} Leave the flag out, or install one.")
    arms = [replace(settled, precision=p, layout=o) for p in precisions for o in layouts]
    one_thread_too = wanted.threads is None and sample.device.type == "cpu" and (settled.threads or 1) > 1
    if len(arms) == 1 and wanted.compile != "auto" and not one_thread_too:
        return arms[0]
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    seconds = _by_turns(encoder, sample, arms)
    best = 0  # the plainer arm keeps its place where another gains little
    for index in range(1, len(arms)):
        same = arms[index].precision == arms[best].precision
        if seconds[index] < (LAYOUT_GAIN if same else GAIN) * seconds[best]:
            best = index
    timings = ", ".join(f"{a.precision} {a.layout} {s * 1e3:.3g} ms" for a, s in zip(arms, seconds, strict=True))
    chosen, fastest = arms[best], seconds[best]
    if one_thread_too:
        one = replace(chosen, threads=1)
        alone, together = _by_turns(encoder, sample, [one, chosen])
        fastest = min(fastest, together)
        timings += f" with {chosen.threads} threads; {alone * 1e3:.3g} ms with one"
        if alone < GAIN * fastest:
            chosen, fastest = one, alone
    chosen = replace(chosen, reason=f"forward and backward of {len(sample)} images: {timings}")
    if chosen.compile == "auto":
        chosen = _try_compiling(encoder, sample, chosen, fastest, steps)
    encoder.load_state_dict(before)
    return chosen


GAIN, LAYOUT_GAIN = 0.95, 0.98
"""Seconds of a step over those of the plainer one up to which another precision or one thread pays, and a layout."""
ROUNDS, TRIAL, LONG_TRIAL = 3, 0.25, 60.0
"""Rounds of a trial; more, up to 5, while it has taken fewer seconds than TRIAL an arm, none anew after LONG_TRIAL."""
LONG_RUN = 20 * 60
"""Seconds of forward and backward passes from which on trying torch.compile can pay."""


def _by_turns(encoder: Encoder, sample: Tensor, arms: Sequence[ExecutionConfig]) -> list[float]:
    """Seconds of a step under each of `arms`, by turns: what else the machine did for a moment must not decide."""
    best = [math.inf] * len(arms)
    begin = time.perf_counter()
    for trial in range(5):
        passed = time.perf_counter() - begin
        if trial and (passed > LONG_TRIAL or (trial >= ROUNDS and passed > TRIAL * len(arms))):
            break
        for number, arm in enumerate(arms):
            apply_execution(encoder, arm)
            with num_threads(arm.threads or 1):
                best[number] = min(best[number], time_step(encoder, sample, least=1))
    release_freed_memory()  # not before: a pass whose pages must be cleared anew says little about one in training
    return best


def _try_compiling(
    encoder: Encoder, sample: Tensor, plain: ExecutionConfig, seconds: float, steps: int
) -> ExecutionConfig:
    """`plain` with compile on where it makes a step at least 5 % faster, else off; the reason says what was found."""
    if missing := _compiler_missing(sample.device):
        return replace(plain, compile="off", reason=f"{plain.reason}; not compiled: {missing}")
    if steps * seconds < LONG_RUN:
        return replace(plain, compile="off", reason=f"{plain.reason}; not compiled: the run is short")
    trial = copy.deepcopy(encoder)
    apply_execution(trial, plain)
    compile_(trial)
    apply_execution(encoder, plain)
    with num_threads(plain.threads or 1):
        compiled = time_step(trial, sample)
        seconds = min(seconds, time_step(encoder, sample))  # as warm as the other
    found: Compile = "on" if compiled < GAIN * seconds else "off"
    return replace(plain, compile=found, reason=f"{plain.reason}; compiled {compiled * 1e3:.0f} ms")


def _compiler_missing(device: torch.device) -> str:
    """What torch.compile lacks here, in words; empty where it lacks nothing."""
    if device.type != "cpu" or any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        return ""
    return "torch.compile needs a C++ compiler (g++ or clang++), and there is none on the path."


def compile_(encoder: Encoder) -> None:
    """Have torch.compile translate backbone and head at their first use. Names and parameters stay as they are."""
    encoder.backbone.compile()
    encoder.head.compile()


def time_step(encoder: Encoder, sample: Tensor, *, keys: bool = False, least: int = 3) -> float:
    """Seconds of a forward and backward pass of `sample`, the best of some. keys: and one forward pass without graph.

    At least `least`, up to twenty in a tenth of a second: short passes vary more. Running statistics move; gradients
    are removed.
    """
    encoder.train()
    best, begin = math.inf, time.perf_counter()
    for trial in range(20):
        start = time.perf_counter()
        if trial >= least and start - begin > 0.1:
            break
        torch.autograd.backward(encoder(sample).square().mean())
        if keys:
            with torch.no_grad():
                encoder(sample)
        if sample.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        encoder.zero_grad(set_to_none=True)
    return best


def apply_execution(encoder: Encoder, execution: ExecutionConfig) -> None:
    """Give an encoder the run's precision and layout. Parameters stay float32."""
    encoder.autocast = torch.bfloat16 if execution.precision == "bf16" else None
    wanted = torch.channels_last if execution.layout == "channels-last" else torch.contiguous_format
    encoder.to(memory_format=wanted)


def view_threads(wanted: int | None, execution: ExecutionConfig) -> int:
    """Threads that make views beside the step: as many as wanted; None = one, or none where the step has every core.

    There a further thread gives the step nothing but a rival for its cores: views are then made between the steps, on
    all of them. Never changes a view.
    """
    if wanted is not None:
        return wanted
    on_cpu = execution.device == "cpu"
    return 0 if on_cpu and (execution.threads or 1) >= len(os.sched_getaffinity(0)) else 1


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Use `count` intra-op threads inside; the number decides the order of sums, so it decides bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
