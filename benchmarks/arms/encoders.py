"""The bound: forward of f_k, forward and backward of f_q, on batches that lie ready. No views, loss, EMA, optimiser."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from benchmarks import cases
from benchmarks.arms import Order, Step
from benchmarks.pace import Clock, Pace

from mocokit.training.allocator import keep_freed_memory
from mocokit.training.precision import ExecutionConfig, apply_execution

READY = 4  # batches that are gone round


class Encoders:
    """The arm; its precision, layout and allocator are those that the whole step has."""

    def __init__(self, order: Order) -> None:
        self.order, self.clock = order, Clock()
        torch.set_num_threads(order.threads or 2)
        self.query = cases.network(order.what, order.seed)
        execution = ExecutionConfig(precision=order.precision, layout=order.layout)  # type: ignore[arg-type]
        apply_execution(self.query, execution)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.facts: dict[str, Any] = {}

    def gate(self) -> Step:
        """Nothing to compare: it has no loss."""
        raise NotImplementedError

    def train(self, pace: Pace) -> None:
        """Until the pace ends."""
        case = self.order.what
        ready = [torch.randn(2, case.batch, 3, case.size, case.size) for _ in range(READY)]
        gradient = torch.randn(case.batch, case.dim) / case.batch
        keep_freed_memory()
        for x_q, x_k in pace(itertools.cycle(ready)):
            self.clock.mark("forward-backward")
            with torch.no_grad():
                self.key(x_k)
            self.query(x_q).backward(gradient)
            self.query.zero_grad(set_to_none=True)


make = Encoders
