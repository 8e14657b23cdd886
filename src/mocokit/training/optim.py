"""The optimiser and its learning-rate schedule, a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping
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


def build_optimizer(config: OptimConfig, trained: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """SGD over named parameters, those of the query side; theta_k is never handed to an optimiser.

    Fused: one kernel for all parameters. On a CPU torch would otherwise loop over them.
    """
    return torch.optim.SGD(
        list(trained.values()), lr=config.lr, momentum=config.sgd_momentum, weight_decay=config.weight_decay, fused=True
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimiser's buffers by the parameter's name: `momentum.*`."""
    found: dict[str, Tensor] = {}
    for name, parameter in trained.items():
        buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is not None:
            found[f"momentum.{name}"] = buffer
    return found


def load_optimizer_tensors_(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Restore what `optimizer_tensors` gave. Raises ValueError naming a tensor that does not fit."""
    left = dict(tensors)
    for name, parameter in trained.items():
        buffer = left.pop(f"momentum.{name}", None)
        if buffer is None:
            continue
        if buffer.shape != parameter.shape:
            raise ValueError(f"momentum.{name} has shape {tuple(buffer.shape)}, not {tuple(parameter.shape)}.")
        # A copy in the parameter's own memory layout: fused SGD walks both by stride.
        optimizer.state[parameter]["momentum_buffer"] = torch.empty_like(parameter).copy_(buffer)
    if left:
        raise ValueError(f"it has tensors of another network: {sorted(left)[0]}.")


def buffers_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of its size the optimiser keeps for each parameter once it has taken a step."""
    return 1 if optimizer.defaults["momentum"] else 0
