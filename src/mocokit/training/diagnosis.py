"""Where the first number that is not finite comes from: views, weights, an activation, the loss, or a gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mocokit.errors import DivergedError
from mocokit.training.loop import LoadedBatch
from mocokit.training.state import TrainState


@dataclass(frozen=True, slots=True)
class Finding:
    """The first tensor that is not finite.

    stage: weight, view, h, z, prediction, loss, gradient or gradient norm. where: the tensor's name. not_finite of
    count numbers are affected; image_ids: the images whose rows they lie in, where the tensor has a row for each image
    and not all of them are affected.
    """

    stage: str
    where: str
    not_finite: int
    count: int
    image_ids: tuple[int, ...] = ()


class Watch:
    """Looks at every tensor of one step in the order in which they come to be, and keeps the first that is not finite.

    A context manager around the step; `conclude` afterwards. `finding` is None while everything was finite.
    """

    def __init__(self, state: TrainState, batch: LoadedBatch) -> None:
        self.state, self.batch = state, batch
        self.finding: Finding | None = None
        self._first_gradient: Finding | None = None
        self._input: Tensor | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Watch:
        for name, tensor in self.state.model_tensors().items():
            self._look("weight", name, tensor)
        for name in ("x_q", "x_k"):
            view: Tensor = getattr(self.batch, name)
            self._look("view", name, view, view)
        for part, module in self.state.modules().items():
            if part != "predictor":
                self._hooks.append(module.register_forward_pre_hook(self._entered))
            for name, inner in module.named_modules(prefix=part):
                self._hooks.append(inner.register_forward_hook(self._left(name)))
        for name, parameter in self.state.pair.trained.items():
            listen: Callable[[Any], Any] = parameter.register_post_accumulate_grad_hook
            self._hooks.append(listen(functools.partial(self._gradient, name)))
        return self

    def __exit__(self, *_: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def conclude(self, error: DivergedError) -> None:
        """Settle the finding where no tensor on the way to the loss was found."""
        if self.finding is not None:
            return
        # A loss that is not finite makes gradients that are not, so gradients count only where the loss is finite.
        if not math.isfinite(error.loss):
            self.finding = Finding("loss", "loss", 1, 1)
        else:
            self.finding = self._first_gradient or Finding("gradient norm", "gradient norm", 1, 1)

    def _entered(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._input = arguments[0]

    def _left(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_: nn.Module, __: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                self._look(_stage(name), name, out, self._input)

        return look

    def _gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None and self._first_gradient is None:
            self._first_gradient = self._found("gradient", name, parameter.grad)

    def _look(self, stage: str, where: str, tensor: Tensor, rows_of: Tensor | None = None) -> None:
        if self.finding is None:
            self.finding = self._found(stage, where, tensor, rows_of)

    def _found(self, stage: str, where: str, tensor: Tensor, rows_of: Tensor | None = None) -> Finding | None:
        if not tensor.is_floating_point():
            return None
        bad = ~torch.isfinite(tensor.detach())
        count = int(bad.sum())
        return Finding(stage, where, count, tensor.numel(), self._images(bad, rows_of)) if count else None

    def _images(self, bad: Tensor, rows_of: Tensor | None) -> tuple[int, ...]:
        """The ids of the images in whose rows something is not finite; none when all rows are affected."""
        if rows_of is None or bad.dim() < 2 or len(bad) != len(rows_of):
            return ()
        rows = bad.flatten(1).any(1).nonzero().flatten().tolist()
        if len(rows) == len(bad):
            return ()
        views = (self.batch.x_q.flatten(1), self.batch.x_k.flatten(1))
        found: list[int] = []
        for row in rows:  # a shuffle or a micro-batch may have moved it: an image is known by its view
            mine = rows_of[row].flatten().nan_to_num()
            for view in views:
                same = (view.nan_to_num() == mine).all(1).nonzero().flatten().tolist()
                found += [int(self.batch.ids[i]) for i in same]
        return tuple(dict.fromkeys(found))


def _stage(name: str) -> str:
    """What a module's output is called: h in the backbone, z in the head, the prediction after the predictor."""
    parts: Sequence[str] = name.split(".")
    if parts[0] == "predictor":
        return "prediction"
    return "h" if "backbone" in parts[1:2] else "z"
