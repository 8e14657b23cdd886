"""Dense transfer: a run's backbone in a detection or segmentation model, against random weights, under one budget.

Both arms get the same heads (the same initial weights), the same images in the same order, the same steps and learning
rate. Batch norm's running statistics of both backbones are set anew on the training images at the side used here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from mocokit.contrast.backbones import Backbone
from mocokit.data.dense import IGNORED, Boxes, BoxSet, MaskSet, read_mask, read_picture
from mocokit.data.randomness import hash_words, permutation, word
from mocokit.errors import DataError, DivergedError, UsageError
from mocokit.evaluation import dense_scores as scoring
from mocokit.evaluation.baselines import calibrate
from mocokit.evaluation.dense_models import Segmenter, detector

UInt8Array = npt.NDArray[np.uint8]
Triple = tuple[float, float, float]
Say = Callable[[str], None]
Show = Callable[[str, int, int], None]

PRETRAINED, RANDOM = "pretrained", "random init"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlan:
    """The budget and the model; everything but the backbone's weights, which the arms differ in."""

    side: int = 192
    """Longer side of the images in pixels. Smaller than usual (800), so that it finishes on a CPU."""
    steps: int = 300
    """Optimiser steps."""
    batch_size: int = 4
    """Images a step."""
    lr: float = 0.02
    """Peak learning rate of SGD with momentum 0.9, after a warm-up over a tenth of the steps, then a cosine."""
    frozen: bool = False
    """Leave the backbone as it is and train the heads alone."""
    seeds: int = 1
    """Repetitions with other heads and another order."""
    channels: int = 64
    """Detection: width of the feature pyramid (256 in the paper); the box head is four times as wide."""
    proposals: int = 128
    """Detection: regions looked at in an image (1,000 in the paper)."""
    head: Literal["fcn", "deeplab"] = "fcn"
    """Segmentation: the head."""

    def __post_init__(self) -> None:
        for name, low in (
            ("side", 32),
            ("steps", 1),
            ("batch_size", 2),
            ("seeds", 1),
            ("channels", 8),
            ("proposals", 8),
        ):
            if getattr(self, name) < low:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {low}. Got {getattr(self, name)}.")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"--lr must be above 0. Got {self.lr}.")
        if self.head not in ("fcn", "deeplab"):
            raise UsageError(f"--head must be fcn or deeplab. Got {self.head!r}.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Scored:
    """A score with its 95 % interval over test images, in 0..1."""

    score: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"score": self.score, "ci95": [self.low, self.high]}


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Both arms' scores and their paired difference."""

    task: str
    """detect or segment."""
    metric: str
    """mAP (overlaps .50 to .95) or mIoU."""
    plan: TransferPlan
    train_images: int
    test_images: int
    arms: dict[str, dict[str, Scored]]
    """Arm -> metric -> score; metrics: the main one, AP50 for detection, and one for each class."""
    difference: Scored
    """Pretrained minus random init in the main metric, on the same draws of test images."""
    by_seed: dict[str, list[float]]
    """The main metric of each seed."""
    losses: dict[str, tuple[float, float]]
    """Arm -> mean training loss over the first and the last tenth of the steps, first seed."""

    @property
    def outcome(self) -> str:
        """BETTER, WORSE or NO CLEAR DIFFERENCE."""
        one = self.difference
        return "BETTER" if one.low > 0 else "WORSE" if one.high < 0 else "NO CLEAR DIFFERENCE"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "task": self.task,
            "metric": self.metric,
            "verdict": self.outcome,
            "difference": self.difference.to_dict(),
            "arms": {arm: {name: one.to_dict() for name, one in found.items()} for arm, found in self.arms.items()},
            "by_seed": self.by_seed,
            "train_images": self.train_images,
            "test_images": self.test_images,
            "losses": {arm: list(pair) for arm, pair in self.losses.items()},
            "plan": self.plan.to_dict(),
            "interval": "bootstrap over test images; the trainings are held fixed",
        }

    def text(self) -> str:
        """A table and the verdict."""
        names = list(next(iter(self.arms.values())))
        width = max(len(name) for name in names)
        lines = [f"{'':<{width}}  " + "  ".join(f"{f'{arm}, % [95 %]':<22}" for arm in self.arms)]
        for name in names:
            cells = [f"{_percent(found[name]):<22}" for found in self.arms.values()]
            lines.append(f"{name:<{width}}  " + "  ".join(cells))
        one = self.difference
        seeds = "1 training an arm" if self.plan.seeds == 1 else f"{self.plan.seeds} trainings an arm"
        lines.append(
            f"{self.task.upper()}: {self.outcome} | {self.metric} {100 * one.score:+.1f} pp [95 % over images "
            f"{100 * one.low:+.1f}, {100 * one.high:+.1f}] | {'frozen' if self.plan.frozen else 'fine-tuned'}, "
            f"{self.plan.steps} steps, n={self.test_images} test images, {seeds}"
        )
        return "\n".join(line.rstrip() for line in lines) + "\n"


def _percent(one: Scored) -> str:
    return f"{100 * one.score:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]"


# -------------------------------------------------------------------------------------------------- detection


def transfer_detect(
    backbones: dict[str, Callable[[int], Backbone]],
    data: BoxSet,
    plan: TransferPlan,
    *,
    mean: Triple,
    std: Triple,
    device: torch.device,
    show: Show,
) -> TransferResult:
    """Faster R-CNN on each backbone. backbones: arm -> a fresh copy for a seed. show: told (what, done, total).

    Raises MissingDependencyError without pycocotools, DataError, DivergedError when a loss stops being finite.
    """
    scoring.need_pycocotools()
    train = [_sized(path, boxes, plan.side) for path, boxes in data.train]
    test = [_sized(path, boxes, plan.side) for path, boxes in data.test]
    weights = scoring.draw_weights(len(test))
    names = data.class_names

    def build(backbone: Backbone) -> nn.Module:
        model: nn.Module = detector(
            backbone,
            classes=len(names),
            side=plan.side,
            channels=plan.channels,
            proposals=plan.proposals,
            mean=mean,
            std=std,
        )
        return model

    def loss(model: nn.Module, rows: Sequence[int], flips: Sequence[bool]) -> Tensor:
        images, targets = [], []
        for row, flip in zip(rows, flips, strict=True):
            rgb, boxes = train[row]
            kept = ~boxes.difficult
            corners = torch.from_numpy(boxes.corners[kept])
            if flip:
                rgb = rgb[:, ::-1]
                corners = torch.stack(
                    [rgb.shape[1] - corners[:, 2], corners[:, 1], rgb.shape[1] - corners[:, 0], corners[:, 3]], 1
                )
            images.append(_tensor(rgb, device))
            labels = torch.from_numpy(boxes.labels[kept]) + 1
            targets.append({"boxes": corners.to(device), "labels": labels.to(device)})
        parts: dict[str, Tensor] = model(images, targets)
        return torch.stack(list(parts.values())).sum()

    def judge(model: nn.Module, told: Callable[[int, int], None]) -> dict[str, npt.NDArray[np.float64]]:
        found, truth = [], []
        for number, (rgb, boxes) in enumerate(test):
            with torch.inference_mode():
                one = model([_tensor(rgb, device)])[0]
            found.append(
                {key: one[key].cpu().numpy() for key in ("boxes", "scores")}
                | {"labels": one["labels"].cpu().numpy() - 1}
            )
            truth.append(
                {"boxes": boxes.corners, "labels": boxes.labels, "difficult": boxes.difficult, "size": rgb.shape[:2]}
            )
            told(number + 1, len(test))
        matched, overlaps = scoring.match(truth, found, len(names))
        whole, at_half, by_class = scoring.mean_average_precision(matched, overlaps, weights)
        return {"mAP": whole, "AP50": at_half} | {f"AP {name}": by_class[:, c] for c, name in enumerate(names)}

    pictures = [rgb for rgb, _ in train]
    return _both("detect", "mAP", backbones, pictures, len(test), plan, build, loss, judge, mean, std, device, show)


def _sized(path: Any, boxes: Boxes, side: int) -> tuple[UInt8Array, Boxes]:
    """A picture and its boxes with the longer side at most `side`."""
    rgb = read_picture(path)
    height, width = rgb.shape[:2]
    small = _shrunk(rgb, side, Image.Resampling.BOX)
    scale = np.array([small.shape[1] / width, small.shape[0] / height] * 2, np.float32)
    limits = np.array([small.shape[1], small.shape[0]] * 2, np.float32)
    corners = np.clip(boxes.corners * scale, 0, limits)
    kept = ((corners[:, 2] - corners[:, 0]) >= 1) & ((corners[:, 3] - corners[:, 1]) >= 1)
    return small, Boxes(corners[kept], boxes.labels[kept], boxes.difficult[kept])


def _shrunk(array: UInt8Array, side: int, how: Image.Resampling) -> UInt8Array:
    height, width = array.shape[:2]
    scale = side / max(height, width)
    if scale >= 1:
        return array
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(array).resize(size, how))


# ----------------------------------------------------------------------------------------------- segmentation


def transfer_segment(
    backbones: dict[str, Callable[[int], Backbone]],
    data: MaskSet,
    plan: TransferPlan,
    *,
    mean: Triple,
    std: Triple,
    device: torch.device,
    show: Show,
) -> TransferResult:
    """A segmentation head on each backbone; arguments as for `transfer_detect`. Raises DataError, DivergedError."""
    train, test, values = _mask_pairs(data, plan.side)
    weights = scoring.draw_weights(len(test))
    classes = len(values)

    def build(backbone: Backbone) -> nn.Module:
        return Segmenter(backbone, classes=classes, side=plan.side, head=plan.head, mean=mean, std=std)

    def loss(model: nn.Module, rows: Sequence[int], flips: Sequence[bool]) -> Tensor:
        images, masks = [], []
        for row, flip in zip(rows, flips, strict=True):
            rgb, mask = train[row]
            step = -1 if flip else 1
            images.append(_padded(_tensor(rgb[:, ::step], device), plan.side, 0.0))
            masks.append(
                _padded(torch.from_numpy(mask[:, ::step].astype(np.int64)).to(device)[None], plan.side, IGNORED)
            )
        target = torch.cat(masks)
        if not bool((target != IGNORED).any()):
            raise DataError("A batch has no pixel of any class: all are marked to be ignored. Check the masks.")
        return F.cross_entropy(model(torch.stack(images)), target, ignore_index=IGNORED)

    def judge(model: nn.Module, told: Callable[[int, int], None]) -> dict[str, npt.NDArray[np.float64]]:
        confusions = []
        for number, (rgb, mask) in enumerate(test):
            height, width = mask.shape
            with torch.inference_mode():
                scores = model(_padded(_tensor(rgb, device), plan.side, 0.0)[None])[0, :, :height, :width]
            confusions.append(scoring.confusion_of(mask, scores.argmax(0).cpu().numpy(), classes))
            told(number + 1, len(test))
        whole, by_class = scoring.mean_iou(np.stack(confusions), weights)
        return {"mIoU": whole} | {f"IoU {value}": by_class[:, c] for c, value in enumerate(values)}

    pictures = [rgb for rgb, _ in train]
    return _both("segment", "mIoU", backbones, pictures, len(test), plan, build, loss, judge, mean, std, device, show)


_Pairs = list[tuple[UInt8Array, UInt8Array]]


def _mask_pairs(data: MaskSet, side: int) -> tuple[_Pairs, _Pairs, list[int]]:
    """Pictures and masks whose values are class numbers from 0; the values in the files that they stand for."""
    parts: list[_Pairs] = []
    for listed in (data.train, data.test):
        pairs = []
        for picture, mask in listed:
            rgb, numbers = read_picture(picture), read_mask(mask)
            if rgb.shape[:2] != numbers.shape:
                raise DataError(
                    f"{picture.name} has {rgb.shape[0]} x {rgb.shape[1]} pixels and its mask {numbers.shape[0]} x "
                    f"{numbers.shape[1]}. Make them the same."
                )
            pairs.append((_shrunk(rgb, side, Image.Resampling.BOX), _shrunk(numbers, side, Image.Resampling.NEAREST)))
        parts.append(pairs)
    train, test = parts
    values = sorted({int(value) for _, mask in train for value in np.unique(mask)})
    if values != [0, IGNORED]:
        values = [value for value in values if value != IGNORED]
    if len(values) < 2:
        raise DataError(f"The training masks of {data.name} hold one class only ({values}). Check the masks.")
    table = np.full(256, IGNORED, np.uint8)
    table[values] = np.arange(len(values))
    return [(rgb, table[mask]) for rgb, mask in train], [(rgb, table[mask]) for rgb, mask in test], values


def _padded(x: Tensor, side: int, value: float) -> Tensor:
    """The last two axes padded to `side`, right and below."""
    return F.pad(x, (0, side - x.shape[-1], 0, side - x.shape[-2]), value=value)


def _tensor(rgb: UInt8Array, device: torch.device) -> Tensor:
    """[3, H, W] float32 in 0..1."""
    return torch.from_numpy(np.ascontiguousarray(rgb.transpose(2, 0, 1))).to(device).float() / 255


# --------------------------------------------------------------------------------------------------- both arms

_Judge = Callable[[nn.Module, Callable[[int, int], None]], dict[str, npt.NDArray[np.float64]]]


def _both(
    task: str,
    metric: str,
    backbones: dict[str, Callable[[int], Backbone]],
    pictures: Sequence[UInt8Array],
    test_images: int,
    plan: TransferPlan,
    build: Callable[[Backbone], nn.Module],
    loss: Callable[[nn.Module, Sequence[int], Sequence[bool]], Tensor],
    judge: _Judge,
    mean: Triple,
    std: Triple,
    device: torch.device,
    show: Show,
) -> TransferResult:
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
                model = build(backbone).to(device)
                course = _train(model, backbone, len(pictures), plan, seed, loss, _shown(show, f"{arm}: steps"))
            model.eval()
            scores[arm].append(judge(model, _shown(show, f"{arm}: test images")))
            if seed == 0:
                tenth = max(len(course) // 10, 1)
                losses[arm] = float(np.mean(course[:tenth])), float(np.mean(course[-tenth:]))
    means = {
        arm: {name: np.mean([one[name] for one in found], axis=0) for name in found[0]} for arm, found in scores.items()
    }
    return TransferResult(
        task=task,
        metric=metric,
        plan=plan,
        train_images=len(pictures),
        test_images=test_images,
        arms={arm: {name: _scored(values) for name, values in found.items()} for arm, found in means.items()},
        difference=_scored(means[PRETRAINED][metric] - means[RANDOM][metric]),
        by_seed={arm: [float(one[metric][0]) for one in found] for arm, found in scores.items()},
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
            part = [(_tensor(pictures[row], cpu) - middle) / spread for row in order[start : start + 8].tolist()]
            yield torch.stack([_padded(x, plan.side, 0.0) for x in part])

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
