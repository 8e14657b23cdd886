"""The contestants: each module has `make(order)`, an arm with `gate()` and `train(pace)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from benchmarks.cases import CASES, Case
from benchmarks.pace import Clock, Pace
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Order:
    """How an arm is to run. layout, precision: as mocokit's; "auto" (or None) where it chooses itself."""

    case: str
    precision: str = "fp32"
    layout: str = "contiguous"
    threads: int | None = 2
    workers: int | None = 1
    seed: int = 0
    folder: str

    @property
    def what(self) -> Case:
        """The case."""
        return CASES[self.case]

    @property
    def home(self) -> Path:
        """Where pictures lie."""
        return Path(self.folder)


@dataclass(frozen=True)
class Step:
    """What one step of an arm computed: the loss, and the gradient of every trained parameter, in order."""

    loss: float
    gradients: Sequence[Tensor]


class Arm(Protocol):
    """What the driver needs of an arm. facts: what is worth writing down (settings chosen, seconds of preparation)."""

    facts: dict[str, Any]
    clock: Clock

    def gate(self) -> Step: ...
    def train(self, pace: Pace) -> None: ...


def autocast(precision: str) -> torch.autocast:
    """The arithmetic of the encoders."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A batch of pictures in the layout of the network that takes it."""
    return x.contiguous(memory_format=torch.channels_last) if layout == "channels-last" else x
