"""lightly in the loop that its documentation shows for MoCo: MoCoV2Transform, NTXentLoss with a memory bank,
update_momentum. The network, temperature, m and SGD are the case's, so that all arms do the same mathematics."""

from __future__ import annotations

import copy
from typing import Any

import lightly
import torch
from benchmarks import cases
from benchmarks.arms import Order, Step, autocast, laid_out
from benchmarks.arms.plain import Pictures, endless
from benchmarks.pace import Clock, Pace
from lightly.loss import NTXentLoss
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import MoCoV2Transform
from torch import Tensor


class Lightly:
    """The arm."""

    def __init__(self, order: Order) -> None:
        self.order, self.clock = order, Clock()
        torch.set_num_threads(order.threads or 2)
        case = order.what
        layout = torch.channels_last if order.layout == "channels-last" else torch.contiguous_format
        self.model = cases.network(case, order.seed).to(memory_format=layout)
        self.momentum = copy.deepcopy(self.model)
        deactivate_requires_grad(self.momentum)
        self.criterion = NTXentLoss(temperature=case.T, memory_bank_size=(case.K, case.dim))
        self.criterion.memory_bank.bank = cases.first_queue(case, order.seed)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=case.lr, momentum=cases.SGD_MOMENTUM, weight_decay=cases.WEIGHT_DECAY
        )
        self.dataset = Pictures(cases.data_of(case, order.home), MoCoV2Transform(input_size=case.size))
        self.facts: dict[str, Any] = {
            "lightly": lightly.__version__, "torch": torch.__version__, "threads": order.threads,
            "workers": order.workers,
        }  # fmt: skip

    def loss(self, x_query: Tensor, x_key: Tensor) -> Tensor:
        """As in the documented loop."""
        mark = self.clock.mark
        mark("update")
        update_momentum(self.model, self.momentum, m=self.order.what.m)
        mark("forward-backward")
        with autocast(self.order.precision):
            query = self.model(x_query)
            key = self.momentum(x_key).detach()
        mark("loss")
        found: Tensor = self.criterion(query.float(), key.float())
        return found

    def gate(self) -> Step:
        """One step without the optimiser's."""
        loss = self.loss(*cases.gate_batch(self.order.what))
        loss.backward()
        found = Step(float(loss.detach()), [p.grad.clone() for p in self.model.parameters() if p.grad is not None])
        self.optimizer.zero_grad()
        return found

    def train(self, pace: Pace) -> None:
        """Until the pace ends."""
        total_loss = torch.zeros(())
        for batch in pace(endless(self.dataset, self.order.what, self.order.workers)):
            self.clock.mark("other")
            x_query, x_key = (laid_out(x, self.order.layout) for x in batch)
            loss = self.loss(x_query, x_key)
            total_loss += loss.detach()
            self.clock.mark("forward-backward")
            loss.backward()
            self.clock.mark("update")
            self.optimizer.step()
            self.optimizer.zero_grad()


make = Lightly
