"""Fine-tuning one classifier: a backbone and a linear layer on h, from few labels.

The linear layer starts as the linear probe of the backbone as it is, and all layers then move together (linear
probing, then fine-tuning: Kumar et al. 2022, "Fine-tuning can distort pretrained features"). A layer's learning rate
is smaller the nearer it lies to the image (layer-wise decay, as in Clark et al. 2020 and Bao et al. 2022). The learning
rate and the number of steps are chosen on labels held out of the budget; the classifier is then fitted to the whole
budget for as many steps. Zero steps, the probe itself, is one of the choices.

A video is learned from its clips (or frames) one by one, and judged by the mean of their logits.

Everything is a function of the seed: order and views are derived, and there is no dropout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mocokit.data.clip_views import moved_view
from mocokit.data.loader import BatchPlan
from mocokit.data.views import ViewConfig
from mocokit.errors import DivergedError, UsageError
from mocokit.evaluation.features import Ints, Pixels, frozen, gather, plain_batches
from mocokit.evaluation.metrics import calibration
from mocokit.evaluation.probe import choose_strength, fit_probe

CHECKS = 10  # how often the held-out labels are looked at on the way
PATIENCE = 5  # checks without a better one after which a learning rate is given up
_EPOCHS = 30
_PROBE_VIEWS = 4
LEAST_BATCH_FOR_STATISTICS = 16  # smaller batches leave a trained batch norm's statistics alone
LEAST_FOR_TEMPERATURE = 20  # held-out labels below which the probabilities are left as they are


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneSettings:
    """How a classifier is fitted; the same for every arm and budget."""

    lr: tuple[float, ...] = (0.0005, 0.003)
    """Learning rates (AdamW) of the linear layer; the held-out labels choose among several."""
    steps: int | None = None
    """Optimiser steps at most; None = 30 epochs of the budget, but no fewer than 150 and no more than 1,000."""
    batch_size: int = 32
    """Images a step; all of the budget where it has fewer."""
    weight_decay: float = 0.01
    """Of AdamW (Loshchilov and Hutter 2019)."""
    layer_decay: float = 0.75
    """Learning rate of a layer over that of the layer above it, in 0..1; for pretrained weights only."""

    def __post_init__(self) -> None:
        for name, holds, must in (
            ("lr", bool(self.lr) and all(0 < value < math.inf for value in self.lr), "be above 0"),
            ("steps", self.steps is None or self.steps >= 1, "be at least 1"),
            ("batch_size", self.batch_size >= 2, "be at least 2"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "be 0 or more"),
            ("layer_decay", 0 < self.layer_decay <= 1, "lie above 0 and up to 1"),
        ):
            if not holds:
                raise UsageError(f"--{name.replace('_', '-')} must {must}. Got {getattr(self, name)}.")

    def steps_for(self, labels: int) -> int:
        """The steps at most with so many labels."""
        return self.steps or min(max(_EPOCHS * labels // min(self.batch_size, labels), 150), 1000)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"lr": list(self.lr)}


def mild_views(views: ViewConfig) -> ViewConfig:
    """Small moves, turns and zooms of the plain view, and a mirror image where the pretraining had them.

    No crops and no change of colour: with few labels a part of the picture, or its hue, may be what the label is
    about, and the test images are looked at whole.
    """
    return ViewConfig(
        size=views.size,
        flip=views.flip,
        rotation=8.0,
        zoom=(0.95, 1.15),
        shift=0.05,
        mean=views.mean,
        std=views.std,
    )


class Classifier(nn.Module):
    """A backbone and a linear layer on h standardised by fixed numbers. `forward`: images -> logits float32 [N, C]."""

    centre: Tensor
    """[H] taken from h."""
    scale: Tensor
    """[H] by which what is left is divided, so that one learning rate suits features of any size."""

    def __init__(self, backbone: nn.Module, n_features: int, n_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.register_buffer("centre", torch.zeros(n_features))
        self.register_buffer("scale", torch.ones(n_features))
        self.classifier = nn.Linear(n_features, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images [N, 3, s, s]."""
        out: Tensor = self.classifier((self.backbone(x).float() - self.centre) / self.scale)
        return out


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
    whole: Ints | None = None
    """[S] the number of the video that a row is a part of; None: every row is judged by itself."""


def tune(
    backbone: nn.Module, task: Task, fit: Ints, held: Ints, settings: TuneSettings, *, seed: int, pretrained: bool
) -> Tuned:
    """Fit a classifier to the rows `fit` and `held`, choosing on `held` (may be empty), from `backbone`'s weights.

    The backbone itself is not changed. pretrained: its layers get smaller learning rates towards the image, and keep
    their batch norm statistics where batches are below 16 images. Raises DivergedError when no learning rate gives
    finite losses.
    """
    base = copy.deepcopy(backbone).to(task.device)
    how = _How(settings, settings.steps_for(len(fit) + len(held)), seed, pretrained)
    lr, steps, loss = settings.lr[0], how.steps, None
    temperature, ece = 1.0, None
    if len(held):
        start = _with_probe(base, task, fit, seed)
        tries = [_try(start, task, fit, held, value, how) for value in settings.lr]
        best = min(tries, key=lambda one: one.loss)
        if not math.isfinite(best.loss):
            raise DivergedError(f"Fine-tuning gave no finite loss with --lr {settings.lr}. Lower it.")
        lr, steps, loss = best.lr, best.steps, best.loss
        labels = torch.from_numpy(_judged(task, held)[1])
        if len(labels) >= LEAST_FOR_TEMPERATURE:
            temperature = fit_temperature(best.logits, labels)
        chances = torch.softmax(best.logits.double() / temperature, 1).max(1)
        ece = calibration(chances.values.numpy(), (chances.indices == labels).numpy()).ece
    rows = np.sort(np.concatenate([fit, held]))
    model = _with_probe(base, task, rows, seed)
    for done, value in _train(model, task, rows, lr, steps, how):
        if not math.isfinite(value):
            raise DivergedError(f"Fine-tuning diverged after {done} steps with --lr {lr}. Lower it.")
    return Tuned(model.eval(), lr, steps, loss, temperature, ece)


@dataclass(frozen=True, slots=True)
class _How:
    """What all fits of one cell share; steps: of the whole schedule."""

    settings: TuneSettings
    steps: int
    seed: int
    pretrained: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Try:
    lr: float
    steps: int
    loss: float
    logits: Tensor


def _try(start: Classifier, task: Task, fit: Ints, held: Ints, lr: float, how: _How) -> _Try:
    """The best of `CHECKS` looks at the held-out labels while training, the start included."""
    model = copy.deepcopy(start)
    place, truth = _judged(task, held)
    labels = torch.from_numpy(truth)

    def look(done: int) -> _Try:
        logits = mean_by(predict_logits(model, task, held), place, len(labels))
        loss = float(F.cross_entropy(logits.double(), labels))
        return _Try(lr, done, loss if math.isfinite(loss) else math.inf, logits)

    best, since, every = look(0), 0, max(1, how.steps // CHECKS)
    for done, value in _train(model, task, fit, lr, how.steps, how):
        if not math.isfinite(value):
            break
        if done % every == 0 or done == how.steps:
            found = look(done)
            best, since = (found, 0) if found.loss < best.loss else (best, since + 1)
            if since == PATIENCE:
                break
    return best


def _with_probe(backbone: nn.Module, task: Task, rows: Ints, seed: int) -> Classifier:
    """A copy of the backbone under its own linear probe of the rows.

    The probe is fitted to the plain views and a few of those used in training, or the first steps would meet
    features that it has never seen; all views of an image are in one fold.
    """
    mine = copy.deepcopy(backbone)
    with frozen(mine):
        parts = [gather(lambda x: (mine(x).float(),), _plain(task, rows), len(rows))[0]]
        for view in range(1, 1 + _PROBE_VIEWS):
            parts.append(gather(lambda x: (mine(x).float(),), _moved(task, rows, seed, view), len(rows))[0])
    h, labels = torch.cat(parts), np.tile(task.labels[rows], len(parts))
    strength = choose_strength(h, labels, np.tile(task.units[rows], len(parts)), n_classes=task.n_classes)
    probe = fit_probe(h, labels, n_classes=task.n_classes, strength=strength)
    model = Classifier(mine, h.shape[1], task.n_classes)
    spread = h.std(0, correction=0)
    with torch.no_grad():
        model.centre.copy_(probe.centre)
        # Features that hardly vary stay small.
        model.scale.copy_(spread.clamp(min=max(0.1 * float(spread.mean()), 1e-6)))
        model.classifier.weight.zero_()
        model.classifier.bias.fill_(-10.0)  # of a class that no label is of
        model.classifier.weight[probe.classes] = (probe.weight * model.scale[:, None]).T.float()
        model.classifier.bias[probe.classes] = probe.bias.float()
    return model.to(task.device)


def _moved(task: Task, rows: Ints, seed: int, view: int) -> Iterator[Tensor]:
    """View number `view` (not 0, the one of the training steps) of the rows, in their order."""
    batch = _at_once(task)
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        pixels, extents = task.store.batch(part)
        yield moved_view(task.views, pixels.to(task.device), extents, task.ids[part], seed=seed, epoch=0, view=view)


def _train(model: Classifier, task: Task, rows: Ints, lr: float, stop: int, how: _How) -> Iterator[tuple[int, float]]:
    """Steps 1 to `stop` of the schedule; yields (steps done, loss), the model in train mode between.

    A caller that looks at the model must leave it in train mode (`predict_logits` does).
    """
    settings, seed = how.settings, how.seed
    N = min(settings.batch_size, len(rows))
    groups = layer_groups(model.backbone)
    decay = settings.layer_decay if how.pretrained else 1.0
    parts = [{"params": list(model.classifier.parameters()), "scale": 1.0}]
    parts += [{"params": group, "scale": decay ** (len(groups) - i)} for i, group in enumerate(groups)]
    optimizer = torch.optim.AdamW(parts, lr=lr, weight_decay=settings.weight_decay)
    plan = BatchPlan(task.ids[rows], N, seed)
    model.train()
    if how.pretrained and N < LEAST_BATCH_FOR_STATISTICS:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()
    for step in range(stop):
        mine = rows[plan.rows(step)]
        pixels, extents = task.store.batch(mine)
        epoch = step // plan.steps_per_epoch
        x = moved_view(task.views, pixels.to(task.device), extents, task.ids[mine], seed=seed, epoch=epoch, view=0)
        loss = F.cross_entropy(model(x), torch.from_numpy(task.labels[mine]).to(task.device))
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"] * _schedule(step, how.steps)
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


def _judged(task: Task, rows: Ints) -> tuple[Ints, Ints]:
    """What is judged of some rows: for each row its place among these [M], and their labels [J]."""
    if task.whole is None:
        return np.arange(len(rows)), task.labels[rows]
    _, first, place = np.unique(task.whole[rows], return_index=True, return_inverse=True)
    return place.astype(np.int64), task.labels[rows[first]]


def mean_by(logits: Tensor, place: Ints, count: int) -> Tensor:
    """[count, C] the mean of the logits [M, C] of the rows at each place."""
    where = torch.from_numpy(place)
    total = torch.zeros(count, logits.shape[1], dtype=logits.dtype).index_add_(0, where, logits)
    return total / torch.bincount(where, minlength=count).clamp(min=1)[:, None].to(logits.dtype)


def _plain(task: Task, rows: Ints) -> Iterator[Tensor]:
    views = task.views
    return plain_batches(
        task.store, rows, size=views.size, mean=views.mean, std=views.std, batch=_at_once(task), device=task.device
    )


def _at_once(task: Task) -> int:
    """Rows that are looked at together: fewer where each may be a clip of many frames."""
    return 128 if task.whole is None else 32
