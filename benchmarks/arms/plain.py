"""A plain PyTorch MoCo loop, written as the CIFAR notebook of facebookresearch/moco is, for a CPU.

DataLoader over PIL pictures with torchvision's transforms, a copy of the queue, cross entropy over the concatenated
logits with a tensor of labels, and an EMA that loops over parameters. That repository itself asks for CUDA.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import cases
from benchmarks.arms import Order, Step, autocast, laid_out
from benchmarks.cases import Case
from benchmarks.pace import Clock, Pace
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from mocokit.contrast.encoders import Encoder


class Pictures(Dataset[Any]):
    """PIL pictures under a transform: from memory as torchvision's CIFAR10 has them, or from files as ImageFolder."""

    def __init__(self, path: Path, transform: Any) -> None:
        self.transform = transform
        self.files = sorted(path.glob("*/*.jpg")) if path.is_dir() else None
        self.images = None if self.files else np.load(path)["images"]

    def __len__(self) -> int:
        return len(self.files or self.images)

    def __getitem__(self, row: int) -> Any:
        if self.files:
            with self.files[row].open("rb") as file:
                return self.transform(Image.open(file).convert("RGB"))
        return self.transform(Image.fromarray(self.images[row]))


class TwoViews:
    """Two independent views of a picture."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, picture: Image.Image) -> list[Tensor]:
        return [self.transform(picture), self.transform(picture)]


def moco_v2_views(size: int) -> transforms.Compose:
    """MoCo v2's augmentation as the released code writes it (blur as torchvision's)."""
    taps = max(3, size // 10 // 2 * 2 + 1)
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(size, scale=(0.2, 1.0)),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.RandomApply([transforms.GaussianBlur(taps, (0.1, 2.0))], p=0.5),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.5,) * 3, (0.5,) * 3),
        ]
    )


def endless(dataset: Dataset[Any], case: Case, workers: int) -> Iterator[Any]:
    """Epoch after epoch of shuffled batches."""
    loader = DataLoader(
        dataset, batch_size=case.batch, shuffle=True, drop_last=True, num_workers=workers,
        persistent_workers=workers > 0,
    )  # fmt: skip
    while True:
        yield from loader


class Plain:
    """The arm."""

    def __init__(self, order: Order) -> None:
        self.order, self.clock = order, Clock()
        torch.set_num_threads(order.threads or 2)
        case = self.case = order.what
        torch.manual_seed(order.seed)  # shuffling and views
        layout = torch.channels_last if order.layout == "channels-last" else torch.contiguous_format
        self.f_q = cases.network(case, order.seed).to(memory_format=layout)
        self.f_k = copy.deepcopy(self.f_q)
        for parameter in self.f_k.parameters():
            parameter.requires_grad = False
        self.queue = cases.first_queue(case, order.seed).T.contiguous()
        self.pointer = 0
        self.optimizer = torch.optim.SGD(
            self.f_q.parameters(), lr=case.lr, momentum=cases.SGD_MOMENTUM, weight_decay=cases.WEIGHT_DECAY
        )
        self.dataset = Pictures(cases.data_of(case, order.home), TwoViews(moco_v2_views(case.size)))
        self.facts: dict[str, Any] = {"threads": order.threads, "workers": order.workers}

    @property
    def encoder(self) -> Encoder:
        """The network that is being trained."""
        return self.f_q

    def loss(self, x_q: Tensor, x_k: Tensor) -> Tensor:
        """The contrastive loss of a batch, with the EMA before the keys and the enqueue after the logits."""
        mark = self.clock.mark
        mark("forward-backward")
        with autocast(self.order.precision):
            q = self.f_q(x_q)
        q = F.normalize(q.float(), dim=1)
        mark("update")
        with torch.no_grad():
            for theta_q, theta_k in zip(self.f_q.parameters(), self.f_k.parameters(), strict=True):
                theta_k.data = theta_k.data * self.case.m + theta_q.data * (1.0 - self.case.m)
            mark("forward-backward")
            with autocast(self.order.precision):
                k = self.f_k(x_k)
            k = F.normalize(k.float(), dim=1)
        mark("loss")
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1) / self.case.T
        labels = torch.zeros(len(logits), dtype=torch.long)
        loss = F.cross_entropy(logits, labels)
        mark("update")
        with torch.no_grad():
            columns = (self.pointer + torch.arange(len(k))) % self.queue.shape[1]
            self.queue[:, columns] = k.T
            self.pointer = (self.pointer + len(k)) % self.queue.shape[1]
        return loss

    def gate(self) -> Step:
        """One step without the optimiser's."""
        loss = self.loss(*cases.gate_batch(self.order.what))
        loss.backward()
        found = Step(float(loss.detach()), [p.grad.clone() for p in self.f_q.parameters() if p.grad is not None])
        self.optimizer.zero_grad()
        return found

    def train(self, pace: Pace) -> None:
        """Until the pace ends."""
        total, steps = 0.0, 0
        for x_q, x_k in pace(endless(self.dataset, self.order.what, self.order.workers)):
            self.clock.mark("other")
            loss = self.loss(laid_out(x_q, self.order.layout), laid_out(x_k, self.order.layout))
            self.clock.mark("other")
            total, steps = total + loss.item(), steps + 1
            self.optimizer.zero_grad()
            self.clock.mark("forward-backward")
            loss.backward()
            self.clock.mark("update")
            self.optimizer.step()


make = Plain
