"""Dense transfer: a run's backbone in a detection or segmentation model, against random weights, under one budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from mocokit.contrast.backbones import Backbone
from mocokit.data.dense import IGNORED, Boxes, BoxSet, MaskSet, read_mask, read_picture
from mocokit.errors import DataError
from mocokit.evaluation import dense_scores as scoring
from mocokit.evaluation.transfer_arms import (
    PRETRAINED,
    RANDOM,
    DenseTask,
    Show,
    Triple,
    UInt8Array,
    as_tensor,
    padded,
    train_and_judge,
)
from mocokit.evaluation.transfer_plan import TransferPlan, TransferResult

__all__ = ["PRETRAINED", "RANDOM", "TransferPlan", "TransferResult", "transfer_detect", "transfer_segment"]


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
        from mocokit.evaluation.dense_models import detector  # late: torchvision.ops brings torch._dynamo with it

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
            images.append(as_tensor(rgb, device))
            labels = torch.from_numpy(boxes.labels[kept]) + 1
            targets.append({"boxes": corners.to(device), "labels": labels.to(device)})
        parts: dict[str, Tensor] = model(images, targets)
        return torch.stack(list(parts.values())).sum()

    def judge(model: nn.Module, told: Callable[[int, int], None]) -> dict[str, npt.NDArray[np.float64]]:
        found, truth = [], []
        for number, (rgb, boxes) in enumerate(test):
            with torch.inference_mode():
                one = model([as_tensor(rgb, device)])[0]
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
    task = DenseTask("detect", "mAP", pictures, len(test), build, loss, judge)
    return train_and_judge(task, backbones, plan, mean=mean, std=std, device=device, show=show)


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
        from mocokit.evaluation.dense_models import Segmenter

        return Segmenter(backbone, classes=classes, side=plan.side, head=plan.head, mean=mean, std=std)

    def loss(model: nn.Module, rows: Sequence[int], flips: Sequence[bool]) -> Tensor:
        images, masks = [], []
        for row, flip in zip(rows, flips, strict=True):
            rgb, mask = train[row]
            step = -1 if flip else 1
            images.append(padded(as_tensor(rgb[:, ::step], device), plan.side, 0.0))
            masks.append(
                padded(torch.from_numpy(mask[:, ::step].astype(np.int64)).to(device)[None], plan.side, IGNORED)
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
                scores = model(padded(as_tensor(rgb, device), plan.side, 0.0)[None])[0, :, :height, :width]
            confusions.append(scoring.confusion_of(mask, scores.argmax(0).cpu().numpy(), classes))
            told(number + 1, len(test))
        whole, by_class = scoring.mean_iou(np.stack(confusions), weights)
        return {"mIoU": whole} | {f"IoU {value}": by_class[:, c] for c, value in enumerate(values)}

    pictures = [rgb for rgb, _ in train]
    task = DenseTask("segment", "mIoU", pictures, len(test), build, loss, judge)
    return train_and_judge(task, backbones, plan, mean=mean, std=std, device=device, show=show)


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


def _shrunk(array: UInt8Array, side: int, how: Image.Resampling) -> UInt8Array:
    height, width = array.shape[:2]
    scale = side / max(height, width)
    if scale >= 1:
        return array
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(Image.fromarray(array).resize(size, how))
