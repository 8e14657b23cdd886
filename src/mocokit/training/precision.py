"""What decides the bits and the speed of a run besides its configuration: threads, precision, memory layout.

Picked once, when a run starts, recorded, and used again on every resume.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mocokit.contrast.encoders import Encoder

Precision = Literal["auto", "fp32", "bf16"]
Layout = Literal["auto", "contiguous", "channels-last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How a run computes. threads: torch's intra-op threads. seconds: what a trial step took, where one was timed."""

    threads: int
    precision: Literal["fp32", "bf16"]
    layout: Literal["contiguous", "channels-last"]
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether this device multiplies bfloat16 in hardware; elsewhere it would be slower than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("amx_tile"))


def choose_execution(
    encoder: Encoder, sample: Tensor, *, precision: Precision, layout: Layout, threads: int | None
) -> Execution:
    """Settle precision and layout; "auto" is decided by timing a few forward and backward passes of `sample`.

    sample: float32 [N, 3, H, W], a batch as training will see it. bfloat16 is chosen only where the hardware has
    it and a step is at least 5 % faster for it. Leaves the encoder's weights, statistics and gradients as they were.
    """
    count = threads or torch.get_num_threads()
    precisions: list[Literal["fp32", "bf16"]] = (
        (["fp32", "bf16"] if has_fast_bf16(sample.device) else ["fp32"]) if precision == "auto" else [precision]
    )
    layouts: list[Literal["contiguous", "channels-last"]] = (
        ["contiguous", "channels-last"] if layout == "auto" else [layout]
    )
    arms = [Execution(threads=count, precision=p, layout=o) for p in precisions for o in layouts]
    if len(arms) == 1:
        return arms[0]
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with num_threads(count):
        seconds = [_time_arm(encoder, sample, arm) for arm in arms]
    encoder.load_state_dict(before)
    encoder.zero_grad(set_to_none=True)
    # A gain below 5 % is noise: the plainer arm keeps its place.
    best = 0
    for index in range(1, len(arms)):
        if seconds[index] < 0.95 * seconds[best]:
            best = index
    chosen = arms[best]
    timings = ", ".join(f"{a.precision} {a.layout} {s * 1e3:.0f} ms" for a, s in zip(arms, seconds, strict=True))
    reason = f"forward and backward of {len(sample)} images: {timings}"
    return Execution(threads=count, precision=chosen.precision, layout=chosen.layout, reason=reason)


def _time_arm(encoder: Encoder, sample: Tensor, arm: Execution) -> float:
    apply_execution(encoder, arm)
    encoder.train()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        encoder(sample).square().mean().backward()
        if sample.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        encoder.zero_grad(set_to_none=True)
    return best


def apply_execution(encoder: Encoder, execution: Execution) -> None:
    """Give an encoder the run's precision and layout. Parameters stay float32."""
    encoder.autocast = torch.bfloat16 if execution.precision == "bf16" else None
    wanted = torch.channels_last if execution.layout == "channels-last" else torch.contiguous_format
    encoder.to(memory_format=wanted)


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Use `count` intra-op threads inside; the number decides the order of sums, so it decides bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
