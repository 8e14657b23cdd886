"""Fine-tuning one classifier: a backbone and a linear layer on h, from few labels.

The linear layer starts as the linear probe of the backbone as it is, and all layers then move together (linear
probing, then fine-tuning: Kumar et al. 2022, "Fine-tuning can distort pretrained features"). A layer's learning rate
is smaller the nearer it lies to the image (layer-wise decay, as in Clark et al. 2020 and Bao et al. 2022). The learning
rate and the number of steps are chosen on labels held out of the budget; the classifier is then fitted to the whole
budget for as many steps. Zero steps, the probe itself, is one of the choices.

Everything is a function of the seed: order and views are derived, and there is no dropout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mocokit.data.loader import BatchPlan
from mocokit.data.views import ViewConfig, make_views
from mocokit.errors import DivergedError, UsageError
from mocokit.evaluation.features import Ints, Pixels, frozen, gather, plain_batches
from mocokit.evaluation.metrics import calibration
from mocokit.evaluation.probe import choose_strength, fit_probe

CHECKS = 10  # how often the held-out labels are looked at on the way
PATIENCE = 3  # checks without a better one after which a learning rate is given up
LEAST_BATCH_FOR_STATISTICS = 16  # smaller batches leave a trained batch norm's statistics alone
LEAST_FOR_TEMPERATURE = 20  # held-out labels below which the probabilities are left as they are


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneSettings:
    """How a classifier is fitted; the same for every arm and budget."""

    lr: tuple[float, ...] = (0.0005, 0.003)
    """Learning rates (AdamW) of the linear layer; the held-out labels choose among several."""
    steps: int = 150
    """Optimiser steps at most."""
    batch_size: int = 32
    """Images a step; all of the budget where it has fewer."""
    weight_decay: float = 0.01
    """Of AdamW (Loshchilov and Hutter 2019)."""
    layer_decay: float = 0.75
    """Learning rate of a layer over that of the layer above it, in 0..1; for pretrained weights only."""

    def __post_init__(self) -> None:
        for name, holds, must in (
            ("lr", bool(self.lr) and all(0 < value < math.inf for value in self.lr), "be above 0"),
            ("steps", self.steps >= 1, "be at least 1"),
            ("batch_size", self.batch_size >= 2, "be at least 2"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "be 0 or more"),
            ("layer_decay", 0 < self.layer_decay <= 1, "lie above 0 and up to 1"),
        ):
            if not holds:
                raise UsageError(f"--{name.replace('_', '-')} must {must}. Got {getattr(self, name)}.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"lr": list(self.lr)}


def mild_views(views: ViewConfig) -> ViewConfig:
    """A pretraining's views toned down for training with labels.

    Crops keep half of the area at least, jitter is half as strong, geometric changes stay as they are, and what could
    take away the label (grey, exchanged channels, blur, noise) is off.
    """
    crop = None if views.crop_area is None else (max(0.5, views.crop_area[0]), 1.0)
    return replace(
        views,
        crop_area=crop,
        brightness=views.brightness / 2,
        contrast=views.contrast / 2,
        saturation=views.saturation / 2,
        hue=views.hue / 2,
        grayscale=0.0,
        channel_swap=0.0,
        blur=0.0,
        noise=0.0,
    )


class Classifier(nn.Module):
    """A backbone and a linear layer on h. `forward`: images [N, 3, s, s] -> logits float32 [N, C]."""

    def __init__(self, backbone: nn.Module, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            self.classifier.weight.copy_(weight)
            self.classifier.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, float32 [N, C]."""
        out: Tensor = self.classifier(self.backbone(x))
        return out.float()


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """A fitted classifier and what was chosen for it."""

    model: Classifier
    lr: float
    steps: int
    held_loss: float | None
    """Mean negative log probability of the held-out labels at the choice; None when none were held out."""
    temperature: float
    """Divides the logits, so that the held-out labels are likeliest (Guo et al. 2017); 1 with fewer than 20 of them."""
    held_ece: float | None
    """Expected calibration error of the held-out images after the temperature; None when none were held out."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """What is to be learned: pictures, their labels, and how they are looked at."""

    store: Pixels
    ids: Ints
    """[S] of every row of the store."""
    labels: Ints
    """[S]; only those of rows that are handed to `tune` are read."""
    units: Ints
    """[S] groups, or ids where there is none."""
    n_classes: int
    views: ViewConfig
    """For training; its size, mean and std are those of evaluation too."""
    device: torch.device


def tune(
    backbone: nn.Module, task: Task, fit: Ints, held: Ints, settings: TuneSettings, *, seed: int, pretrained: bool
) -> Tuned:
    """Fit a classifier to the rows `fit` and `held`, choosing on `held` (may be empty), from `backbone`'s weights.

    The backbone itself is not changed. pretrained: its layers get smaller learning rates towards the image, and keep
    their batch norm statistics where batches are below 16 images. Raises DivergedError when no learning rate gives
    finite losses.
    """
    base = copy.deepcopy(backbone).to(task.device)
    lr, steps, loss = settings.lr[0], settings.steps, None
    temperature, ece = 1.0, None
    if len(held):
        start = _with_probe(base, task, fit)
        tries = [
            _try(start, task, fit, held, settings, value, seed=seed, pretrained=pretrained) for value in settings.lr
        ]
        best = min(tries, key=lambda one: one.loss)
        if not math.isfinite(best.loss):
            raise DivergedError(f"Fine-tuning gave no finite loss with --lr {settings.lr}. Lower it.")
        lr, steps, loss = best.lr, best.steps, best.loss
        labels = torch.from_numpy(task.labels[held])
        if len(held) >= LEAST_FOR_TEMPERATURE:
            temperature = fit_temperature(best.logits, labels)
        chances = torch.softmax(best.logits.double() / temperature, 1).max(1)
        ece = calibration(chances.values.numpy(), (chances.indices == labels).numpy()).ece
    rows = np.sort(np.concatenate([fit, held]))
    model = _with_probe(base, task, rows)
    for done, value in _train(model, task, rows, settings, lr, steps, seed=seed, pretrained=pretrained):
        if not math.isfinite(value):
            raise DivergedError(f"Fine-tuning diverged after {done} steps with --lr {lr}. Lower it.")
    return Tuned(model.eval(), lr, steps, loss, temperature, ece)


@dataclass(frozen=True, slots=True, eq=False)
class _Try:
    lr: float
    steps: int
    loss: float
    logits: Tensor


def _try(
    start: Classifier,
    task: Task,
    fit: Ints,
    held: Ints,
    settings: TuneSettings,
    lr: float,
    *,
    seed: int,
    pretrained: bool,
) -> _Try:
    """The best of `CHECKS` looks at the held-out labels while training, the start included."""
    model = copy.deepcopy(start)
    labels = torch.from_numpy(task.labels[held])

    def look(done: int) -> _Try:
        logits = predict_logits(model, task, held)
        loss = float(F.cross_entropy(logits.double(), labels))
        return _Try(lr, done, loss if math.isfinite(loss) else math.inf, logits)

    best, since, every = look(0), 0, max(1, settings.steps // CHECKS)
    for done, value in _train(model, task, fit, settings, lr, settings.steps, seed=seed, pretrained=pretrained):
        if not math.isfinite(value):
            break
        if done % every == 0 or done == settings.steps:
            found = look(done)
            best, since = (found, 0) if found.loss < best.loss else (best, since + 1)
            if since == PATIENCE:
                break
    return best


def _with_probe(backbone: nn.Module, task: Task, rows: Ints) -> Classifier:
    """A copy of the backbone under its own linear probe of the rows."""
    mine = copy.deepcopy(backbone)
    with frozen(mine):
        h = gather(lambda x: (mine(x).float(),), _plain(task, rows), len(rows))[0]
    labels = task.labels[rows]
    strength = choose_strength(h, labels, task.units[rows], n_classes=task.n_classes)
    probe = fit_probe(h, labels, n_classes=task.n_classes, strength=strength)
    weight, bias = torch.zeros(task.n_classes, h.shape[1]), torch.full((task.n_classes,), -10.0)
    weight[probe.classes] = probe.weight.T.float()
    bias[probe.classes] = (probe.bias - probe.centre @ probe.weight).float()
    return Classifier(mine, weight, bias).to(task.device)


def _train(
    model: Classifier,
    task: Task,
    rows: Ints,
    settings: TuneSettings,
    lr: float,
    stop: int,
    *,
    seed: int,
    pretrained: bool,
) -> Iterator[tuple[int, float]]:
    """Steps 1 to `stop` of a schedule of `settings.steps`; yields (steps done, loss), the model in train mode between.

    A caller that looks at the model must leave it in train mode (`predict_logits` does).
    """
    N = min(settings.batch_size, len(rows))
    groups = layer_groups(model.backbone)
    decay = settings.layer_decay if pretrained else 1.0
    parts = [{"params": list(model.classifier.parameters()), "scale": 1.0}]
    parts += [{"params": group, "scale": decay ** (len(groups) - i)} for i, group in enumerate(groups)]
    optimizer = torch.optim.AdamW(parts, lr=lr, weight_decay=settings.weight_decay)
    plan = BatchPlan(task.ids[rows], N, seed)
    model.train()
    if pretrained and N < LEAST_BATCH_FOR_STATISTICS:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()
    for step in range(stop):
        mine = rows[plan.rows(step)]
        pixels, extents = task.store.batch(mine)
        epoch = step // plan.steps_per_epoch
        (x,) = make_views(
            task.views, pixels.to(task.device), extents, task.ids[mine], seed=seed, epoch=epoch, views=(0,)
        )
        loss = F.cross_entropy(model(x), torch.from_numpy(task.labels[mine]).to(task.device))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"] * _schedule(step, settings.steps)
        value = float(loss.detach())
        if math.isfinite(value):
            optimizer.step()
        yield step + 1, value


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then half a cosine to zero."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def layer_groups(backbone: nn.Module) -> list[list[nn.Parameter]]:
    """The backbone's parameters in groups from the image upwards, each parameter once.

    A group is a child of the trunk (of a transformer, a block) that has a weight of two or more axes; what has none, a
    batch norm, joins the one before it, and bare parameters (a ViT's positions) the first.
    """
    trunk: nn.Module = getattr(backbone, "trunk", backbone)
    groups: list[list[nn.Parameter]] = [[]]
    opened = False
    for child in _children(trunk):
        mine = [p for p in child.parameters() if p.requires_grad]
        if not mine:
            continue
        if opened and any(p.ndim > 1 for p in mine):
            groups.append([])
        opened = opened or any(p.ndim > 1 for p in mine)
        groups[-1] += mine
    taken = {id(p) for group in groups for p in group}
    groups[0] += [p for p in trunk.parameters() if p.requires_grad and id(p) not in taken]
    return [group for group in groups if group]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """The children, a transformer's blocks one by one."""
    for name, child in module.named_children():
        if name == "encoder":
            yield from _children(child)
        elif name in ("blocks", "layers"):
            yield from child.children()
        else:
            yield child


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The temperature in 0.05..20 under which the labels int64 [N] are likeliest given logits [N, C].

    The mean log probability is concave in 1 / temperature; golden sections on its logarithm find the peak.
    """
    exact = logits.double()

    def loss(power: float) -> float:
        return float(F.cross_entropy(exact / math.exp(power), labels))

    low, high = math.log(0.05), math.log(20.0)
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if loss(left) < loss(right):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def predict_logits(model: nn.Module, task: Task, rows: Ints) -> Tensor:
    """Logits float32 [M, C] on the CPU of the plain views of rows [M]; every layer's mode comes back afterwards."""
    with frozen(model):
        return gather(lambda x: (model(x),), _plain(task, rows), len(rows))[0]


def _plain(task: Task, rows: Ints) -> Iterator[Tensor]:
    views = task.views
    return plain_batches(
        task.store, rows, size=views.size, mean=views.mean, std=views.std, batch=128, device=task.device
    )
