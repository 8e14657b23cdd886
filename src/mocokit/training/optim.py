"""The optimisers, their learning-rate schedule (a pure function of the step), and their state as named tensors."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from mocokit.training.precision import num_threads

FEW = 2**17
"""Numbers in all parameters below which waking torch's other threads costs an update more than they give."""

Kind = Literal["sgd", "lars", "adamw"]

_EFFECTIVE: dict[str, tuple[str, ...]] = {"sgd": ("sgd_momentum",), "lars": ("sgd_momentum", "trust"), "adamw": ()}
_EVERYWHERE = ("kind", "lr", "weight_decay", "schedule", "warmup_epochs")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimiser and the course of its learning rate. What has no effect on the kind must stay at its default."""

    kind: Kind = "sgd"
    """`sgd` with momentum (MoCo v1, v2), `lars` (SimCLR, BYOL, MoCo v3 with a ResNet), `adamw` (v3 with a ViT)."""
    lr: float = 0.03
    """Peak learning rate, for the run's batch size as it stands (MoCo v1: 0.03 for batches of 256)."""
    sgd_momentum: float = 0.9
    """Momentum of SGD and LARS, in [0, 1). Not the key encoder's m."""
    weight_decay: float = 1e-4
    """SGD: L2 penalty on every parameter; LARS: on matrices and kernels only; AdamW: decoupled, on every parameter."""
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    """`cosine` to 0 (MoCo v2), `step` = a tenth at 60 % and again at 80 % of the run (MoCo v1), or `constant`."""
    warmup_epochs: float = 0.0
    """Epochs of linear growth from 0 to `lr`."""
    trust: float = 0.001
    """LARS's trust coefficient eta (You et al. 2017, section 4): a layer's step as a share of its own norm."""

    def __post_init__(self) -> None:
        if self.kind not in _EFFECTIVE:
            raise ValueError(f"`kind` of optimiser must be sgd, lars or adamw. Got {self.kind!r}.")
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
        if not 0 < self.trust < math.inf:
            raise ValueError(f"`trust` must be above 0. Got {self.trust}.")
        for field in fields(self):
            value = getattr(self, field.name)
            if not self.uses(field.name) and value != field.default:
                raise ValueError(f"`{field.name}` has no effect on {self.kind}: leave it out. Got {value}.")

    def uses(self, name: str) -> bool:
        """Whether the setting of that name has an effect on this kind of optimiser."""
        return name in _EVERYWHERE or name in _EFFECTIVE[self.kind]


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


class _Eager(Optimizer):
    """torch's optimisers without what makes them ready for torch.compile, where a run calls them.

    Their methods are wrapped so that the first call imports the compiler: 900 modules, 150 MiB and seconds, for nothing
    in a run that compiles nothing. What is wrapped is called here as it is.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        inspect.unwrap(Optimizer.add_param_group)(self, param_group)


_SGD_SETTINGS = ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")


class SGD(_Eager, torch.optim.SGD):
    """torch's, whose later steps call its functional form.

    The method looks its parameters up and checks them anew in every step, which in a small network costs several times
    what the update does.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. closure: not supported."""
        assert closure is None
        moving = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        buffers = [[self.state[p].get("momentum_buffer") for p in params] for params in moving]
        if any(buffer is None for found in buffers for buffer in found):  # the first step, or no momentum
            inspect.unwrap(torch.optim.SGD.step)(self, closure)
            return
        few = sum(p.numel() if p.device.type == "cpu" else FEW for params in moving for p in params) < FEW
        with num_threads(1) if few else contextlib.nullcontext():
            for group, params, found in zip(self.param_groups, moving, buffers, strict=True):
                gradients = [p.grad for p in params if p.grad is not None]
                sgd(params, gradients, found, fused=True, **{name: group[name] for name in _SGD_SETTINGS})

    step.hooked = True  # type: ignore[attr-defined]  # nobody hooks in: torch then wraps nothing around it


class AdamW(_Eager, torch.optim.AdamW):
    """torch's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        inspect.unwrap(torch.optim.AdamW.step)(self, closure)


class LARS(_Eager):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888, algorithm 1).

    For a layer with weights w, gradient g, weight decay b, momentum m and learning rate lr:
    local = trust |w| / (|g| + b |w|);  v <- m v + lr local (g + b w);  w <- w - v.
    v is the state `momentum_buffer`. It holds steps, the learning rate within: a rate that falls leaves earlier steps
    as they were.

    Parameters with one dimension or none (biases, scale and shift of norms) take local = 1 and b = 0, as SimCLR, BYOL
    and MoCo v3 do. Deviation: so does, for its local, a layer whose weights or gradient are all 0, which by the formula
    would never move or divide by 0.
    """

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, momentum: float, weight_decay: float, trust: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. closure: not supported."""
        assert closure is None
        for group in self.param_groups:
            moving = [p for p in group["params"] if p.grad is not None]
            if not moving:
                continue
            for p in moving:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            grads = [p.grad for p in moving]
            adapted = [n for n, p in enumerate(moving) if p.ndim > 1]
            if adapted:
                layers, layer_grads = [moving[n] for n in adapted], [grads[n] for n in adapted]
                decay = group["weight_decay"]
                w_norms, g_norms = (torch.stack(torch._foreach_norm(x)) for x in (layers, layer_grads))
                usual = group["trust"] * w_norms / (g_norms + decay * w_norms)
                local = torch.where((w_norms > 0) & (g_norms > 0), usual, 1.0)
                scaled = torch._foreach_mul(torch._foreach_add(layer_grads, layers, alpha=decay), list(local))
                for n, grad in zip(adapted, scaled, strict=True):
                    grads[n] = grad
            buffers = [self.state[p]["momentum_buffer"] for p in moving]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads, alpha=group["lr"])
            torch._foreach_sub_(moving, buffers)


def build_optimizer(config: OptimConfig, trained: Mapping[str, Tensor]) -> Optimizer:
    """The optimiser of the named parameters (`EncoderPair.trained`); theta_k is never handed to one.

    SGD and AdamW are fused: one kernel for all parameters. On a CPU torch would otherwise loop over them.
    """
    params, lr, decay = list(trained.values()), config.lr, config.weight_decay
    if config.kind == "sgd":
        return SGD(params, lr=lr, momentum=config.sgd_momentum, weight_decay=decay, fused=True)
    if config.kind == "lars":
        return LARS(params, lr=lr, momentum=config.sgd_momentum, weight_decay=decay, trust=config.trust)
    return AdamW(params, lr=lr, weight_decay=decay, fused=True)


_STATE = {"momentum": "momentum_buffer", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step"}
"""Names in a checkpoint -> torch's own."""
_OF_KIND = {SGD: ("momentum",), LARS: ("momentum",), AdamW: ("exp_avg", "exp_avg_sq", "step")}


def optimizer_tensors(optimizer: Optimizer, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimiser's state by name: `momentum.<parameter>`, or `exp_avg.`, `exp_avg_sq.` and `step.<parameter>`.

    trained: the parameters it was built for. One that has had no update yet has no state.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in trained.items():
        state = optimizer.state.get(parameter, {})
        for ours in _OF_KIND[type(optimizer)]:
            if (value := state.get(_STATE[ours])) is not None:
                found[f"{ours}.{name}"] = value
    return found


def load_optimizer_tensors_(optimizer: Optimizer, trained: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Put what `optimizer_tensors` gave into an optimiser of the same kind, in place of any state it has.

    Raises ValueError naming the tensor that is missing, left over or of another shape; the optimiser is unchanged then.
    """
    kinds = _OF_KIND[type(optimizer)]
    left = dict(tensors)
    states: dict[Tensor, dict[str, Any]] = {}
    for name, parameter in trained.items():
        stored = {ours: left.pop(f"{ours}.{name}", None) for ours in kinds}
        missing = [ours for ours, value in stored.items() if value is None]
        if len(missing) == len(kinds):
            continue
        if missing:
            raise ValueError(f"{missing[0]}.{name} is missing from the optimiser's state.")
        states[parameter] = {}
        for ours, value in stored.items():
            assert value is not None
            shape = torch.Size() if ours == "step" else parameter.shape
            if value.shape != shape:
                raise ValueError(
                    f"{ours}.{name} of the optimiser's state has the shape {list(value.shape)}, not {list(shape)}."
                )
            if ours == "step":
                copy = value.to(parameter.device, torch.float32, copy=True)
            else:  # in the parameter's own memory layout: fused kernels walk both by stride
                copy = torch.empty_like(parameter).copy_(value)
            states[parameter][_STATE[ours]] = copy
    if left:
        raise ValueError(f"{sorted(left)[0]} of the optimiser's state belongs to no parameter that is trained.")
    optimizer.state.clear()
    optimizer.state.update(states)


def buffers_per_parameter(optimizer: Optimizer) -> int:
    """How many tensors of its size the optimiser keeps for each parameter once it has taken a step."""
    if isinstance(optimizer, AdamW):
        return 2
    return 1 if optimizer.defaults["momentum"] or isinstance(optimizer, LARS) else 0
