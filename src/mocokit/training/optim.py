"""The optimiser and its learning-rate schedule, a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """SGD with momentum, as MoCo v1 and v2 use (He et al. 2020, section 4)."""

    lr: float = 0.03
    """Peak learning rate (0.03 for batches of 256 in the paper)."""
    sgd_momentum: float = 0.9
    """Momentum of SGD, in [0, 1). Not the key encoder's m."""
    weight_decay: float = 1e-4
    """L2 penalty on every parameter."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """`cosine` to 0 (MoCo v2), `step` = a tenth at 60 % and again at 80 % of the run (MoCo v1), or `constant`."""
    warmup_epochs: float = 0.0
    """Epochs of linear growth from 0 to `lr`."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"`lr` must be above 0. Got {self.lr}.")
        if not 0 <= self.sgd_momentum < 1:
            raise ValueError(f"`sgd_momentum` must lie in [0, 1). Got {self.sgd_momentum}.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"`weight_decay` must not be negative. Got {self.weight_decay}.")
        if self.schedule not in ("cosine", "step", "constant"):
            raise ValueError(f"`schedule` must be cosine, step or constant. Got {self.schedule!r}.")
        if not 0 <= self.warmup_epochs < math.inf:
            raise ValueError(f"`warmup_epochs` must not be negative. Got {self.warmup_epochs}.")


def lr_at(config: OptimConfig, step: int, total_steps: int, steps_per_epoch: int) -> float:
    """The learning rate of the update numbered `step` (from 0)."""
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "step":
        return config.lr * 0.1 ** ((step >= 0.6 * total_steps) + (step >= 0.8 * total_steps))
    progress = (step - warmup) / max(total_steps - warmup, 1)
    return config.lr * (1.0 + math.cos(math.pi * min(progress, 1.0))) / 2.0


def build_optimizer(config: OptimConfig, theta_q: Sequence[Tensor]) -> torch.optim.SGD:
    """SGD over the query encoder's parameters; theta_k is never handed to an optimiser.

    Fused: one kernel for all parameters. On a CPU torch would otherwise loop over them.
    """
    return torch.optim.SGD(
        theta_q, lr=config.lr, momentum=config.sgd_momentum, weight_decay=config.weight_decay, fused=True
    )
