"""Both arms of a dense transfer, trained and judged alike under one budget.

They get the same heads (the same initial weights), the same images in the same order, the same steps and learning rate.
Batch norm's running statistics of both backbones are set anew on the training images at the side used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mocokit.contrast.backbones import Backbone
from mocokit.data.randomness import hash_words, permutation, word
from mocokit.errors import DivergedError, UsageError
from mocokit.evaluation import dense_scores as scoring
from mocokit.evaluation.baselines import calibrate
from mocokit.evaluation.transfer_plan import Scored, TransferPlan, TransferResult

UInt8Array = npt.NDArray[np.uint8]
Triple = tuple[float, float, float]
Show = Callable[[str, int, int], None]

PRETRAINED, RANDOM = "pretrained", "random init"


def padded(x: Tensor, side: int, value: float) -> Tensor:
    """The last two axes padded to `side`, right and below."""
    return F.pad(x, (0, side - x.shape[-1], 0, side - x.shape[-2]), value=value)


def as_tensor(rgb: UInt8Array, device: torch.device) -> Tensor:
    """[3, H, W] float32 in 0..1."""
    return torch.from_numpy(np.ascontiguousarray(rgb.transpose(2, 0, 1))).to(device).float() / 255


@dataclass(frozen=True, slots=True)
class DenseTask:
    """A task as both arms meet it."""

    name: str
    """detect or segment."""
    metric: str
    """The main one of what `judge` returns."""
    pictures: Sequence[UInt8Array]
    """Training pictures [H, W, 3]."""
    test_images: int
    build: Callable[[Backbone], nn.Module]
    """The model around a backbone; its heads from torch's generator."""
    loss: Callable[[nn.Module, Sequence[int], Sequence[bool]], Tensor]
    """(model, rows, whether each is mirrored) -> the loss of these training pictures."""
    judge: Callable[[nn.Module, Callable[[int, int], None]], dict[str, npt.NDArray[np.float64]]]
    """(model, told (done, total)) -> metric -> scores [draws], the first of them that of all test images."""


def train_and_judge(
    task: DenseTask,
    backbones: dict[str, Callable[[int], Backbone]],
    plan: TransferPlan,
    *,
    mean: Triple,
    std: Triple,
    device: torch.device,
    show: Show,
) -> TransferResult:
    """Every arm, `plan.seeds` times. backbones: arm -> a fresh copy for a seed. show: told (what, done, total).

    Raises UsageError for fewer pictures than a batch, DivergedError when a loss stops being finite.
    """
    pictures = task.pictures
    if len(pictures) < plan.batch_size:
        raise UsageError(f"There are {len(pictures)} training images, fewer than --batch-size {plan.batch_size}.")
    scores: dict[str, list[dict[str, npt.NDArray[np.float64]]]] = {arm: [] for arm in backbones}
    losses: dict[str, tuple[float, float]] = {}
    for seed in range(plan.seeds):
        for arm, make in backbones.items():
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)  # heads, and the samples that a detector's losses are computed on
                backbone = make(seed)
                _calibrate(backbone, pictures, plan, mean, std)
                torch.manual_seed(seed)
                model = task.build(backbone).to(device)
                course = _train(model, backbone, len(pictures), plan, seed, task.loss, _shown(show, f"{arm}: steps"))
            model.eval()
            scores[arm].append(task.judge(model, _shown(show, f"{arm}: test images")))
            if seed == 0:
                tenth = max(len(course) // 10, 1)
                losses[arm] = float(np.mean(course[:tenth])), float(np.mean(course[-tenth:]))
    means = {
        arm: {name: np.mean([one[name] for one in found], axis=0) for name in found[0]} for arm, found in scores.items()
    }
    return TransferResult(
        task=task.name,
        metric=task.metric,
        plan=plan,
        train_images=len(pictures),
        test_images=task.test_images,
        arms={arm: {name: _scored(values) for name, values in found.items()} for arm, found in means.items()},
        difference=_scored(means[PRETRAINED][task.metric] - means[RANDOM][task.metric]),
        by_seed={arm: [float(one[task.metric][0]) for one in found] for arm, found in scores.items()},
        losses=losses,
    )


def _shown(show: Show, what: str) -> Callable[[int, int], None]:
    return lambda done, total: show(what, done, total)


def _scored(values: npt.NDArray[np.float64]) -> Scored:
    known = values[~np.isnan(values)]
    return Scored(*scoring.interval(known)) if len(known) > 1 else Scored(0.0, 0.0, 0.0)


def _calibrate(
    backbone: Backbone, pictures: Sequence[UInt8Array], plan: TransferPlan, mean: Triple, std: Triple
) -> None:
    """Batch norm's running statistics on at most 64 training images at this side, for both arms alike."""
    order = permutation(0, 0, np.arange(len(pictures), dtype=np.int64))[:64]
    middle, spread = torch.tensor(mean).reshape(3, 1, 1), torch.tensor(std).reshape(3, 1, 1)
    cpu = torch.device("cpu")

    def batches() -> Any:
        for start in range(0, len(order) - 1, 8):
            part = [(as_tensor(pictures[row], cpu) - middle) / spread for row in order[start : start + 8].tolist()]
            yield torch.stack([padded(x, plan.side, 0.0) for x in part])

    calibrate(backbone, batches())


def _train(
    model: nn.Module,
    backbone: nn.Module,
    images: int,
    plan: TransferPlan,
    seed: int,
    loss: Callable[[nn.Module, Sequence[int], Sequence[bool]], Tensor],
    told: Callable[[int, int], None],
) -> list[float]:
    """SGD for `plan.steps` steps; returns the losses. The order and the flips are hashes of (seed, step)."""
    model.train()
    if plan.frozen:
        backbone.requires_grad_(False)
        backbone.eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=plan.lr, momentum=0.9, weight_decay=1e-4)
    warmup = max(plan.steps // 10, 1)
    ids = np.arange(images, dtype=np.int64)
    per_epoch = images // plan.batch_size
    course = []
    for step in range(plan.steps):
        epoch, place = divmod(step, per_epoch)
        order = permutation(seed, epoch, ids)
        rows = order[place * plan.batch_size : (place + 1) * plan.batch_size]
        flips = (hash_words(seed, word("flip"), epoch, rows) & np.uint64(1)).astype(np.bool_)
        share = min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / plan.steps)))
        for group in optimiser.param_groups:
            group["lr"] = plan.lr * share
        value = loss(model, rows.tolist(), flips.tolist())
        if not bool(torch.isfinite(value)):
            raise DivergedError(f"The loss stopped being finite at step {step}. Lower --lr.")
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(trained, 10.0)
        optimiser.step()
        course.append(float(value.detach()))
        told(step + 1, plan.steps)
    return course
