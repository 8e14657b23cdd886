"""Scores of detection and segmentation, with intervals over the test images.

Average precision is no mean over images, so a bootstrap over images counts every image as often as it was drawn and
computes the whole score again: [B] scores for B draws, the same draws for every method, so that differences are
paired. Boxes are matched once, by pycocotools.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.errors import MissingDependencyError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

DRAWS = 1000
_RECALLS = np.linspace(0, 1, 101)


@dataclass(frozen=True, slots=True, eq=False)
class Matched:
    """The detections of one class on I images, matched at T overlaps, and how many true boxes each image has."""

    image: Ints
    """[D] image of each detection, in the order of descending score."""
    right: Bools
    """[T, D] matches a true box."""
    ignored: Bools
    """[T, D] matches a difficult box: neither right nor wrong."""
    boxes: Ints
    """[I] true boxes that are not difficult."""


def need_pycocotools() -> None:
    """Raise MissingDependencyError, with the line that installs it, where pycocotools is missing."""
    try:
        import pycocotools.cocoeval  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "Detection is scored with pycocotools, which isn't installed: pip install 'mocokit[detect]'"
        ) from error


def match(
    truth: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], classes: int
) -> tuple[list[Matched], Floats]:
    """Match detections to true boxes as COCO does; a `Matched` for each class, and the T overlaps.

    truth: for each image `boxes` [B, 4] (left, top, right, bottom), `labels` [B], `difficult` [B], `size` (H, W).
    found: `boxes`, `labels`, `scores`.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        coco = COCO()
        coco.dataset = _dataset(truth, classes)
        coco.createIndex()
        results = coco.loadRes(_results(found)) if any(len(one["scores"]) for one in found) else None
        if results is None:
            results = COCO()
            results.dataset = coco.dataset | {"annotations": []}
            results.createIndex()
        judge = COCOeval(coco, results, "bbox")
        judge.params.areaRng, judge.params.areaRngLbl = [[0, 1e10]], ["all"]
        judge.params.imgIds = list(range(1, len(truth) + 1))
        judge.params.catIds = list(range(1, classes + 1))
        judge.evaluate()
    images = len(truth)
    overlaps = np.asarray(judge.params.iouThrs, np.float64)
    return [_of_class(judge.evalImgs[c * images : (c + 1) * images], len(overlaps)) for c in range(classes)], overlaps


def _dataset(truth: Sequence[dict[str, Any]], classes: int) -> dict[str, Any]:
    annotations: list[dict[str, Any]] = []
    for image, one in enumerate(truth, 1):
        for box, label, hard in zip(one["boxes"], one["labels"], one["difficult"], strict=True):
            left, top, right, bottom = (float(value) for value in box)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": int(label) + 1,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": int(hard),
                }
            )
    return {
        "info": {},
        "images": [{"id": i, "height": one["size"][0], "width": one["size"][1]} for i, one in enumerate(truth, 1)],
        "categories": [{"id": c, "name": str(c)} for c in range(1, classes + 1)],
        "annotations": annotations,
    }


def _results(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for image, one in enumerate(found, 1):
        for box, label, score in zip(one["boxes"], one["labels"], one["scores"], strict=True):
            left, top, right, bottom = (float(value) for value in box)
            out.append(
                {
                    "image_id": image,
                    "category_id": int(label) + 1,
                    "bbox": [left, top, right - left, bottom - top],
                    "score": float(score),
                }
            )
    return out


def _of_class(per_image: Sequence[dict[str, Any] | None], overlaps: int) -> Matched:
    image: list[Ints] = [np.zeros(0, np.int64)]
    scores: list[Floats] = [np.zeros(0, np.float64)]
    right: list[Bools] = [np.zeros((overlaps, 0), np.bool_)]
    ignored: list[Bools] = [np.zeros((overlaps, 0), np.bool_)]
    boxes = np.zeros(len(per_image), np.int64)
    for number, one in enumerate(per_image):
        if one is None:
            continue
        count = len(one["dtScores"])
        image.append(np.full(count, number, np.int64))
        scores.append(np.asarray(one["dtScores"], np.float64))
        right.append(np.asarray(one["dtMatches"]).reshape(overlaps, count) > 0)
        ignored.append(np.asarray(one["dtIgnore"], np.bool_).reshape(overlaps, count))
        boxes[number] = int((np.asarray(one["gtIgnore"]) == 0).sum())
    order = np.argsort(-np.concatenate(scores), kind="mergesort")
    return Matched(
        image=np.concatenate(image)[order],
        right=np.concatenate(right, axis=1)[:, order],
        ignored=np.concatenate(ignored, axis=1)[:, order],
        boxes=boxes,
    )


def average_precision(matched: Matched, weights: Floats) -> Floats:
    """COCO's average precision (101 recalls) at each overlap, images counted by weights [B, I]: [B, T].

    NaN where no true box was drawn.
    """
    B, T = len(weights), len(matched.right)
    positives = weights @ matched.boxes
    counts = weights[:, matched.image]  # [B, D]
    out = np.zeros((B, T))
    for t in range(T):
        right = np.cumsum(counts * (matched.right[t] & ~matched.ignored[t]), axis=1)
        wrong = np.cumsum(counts * (~matched.right[t] & ~matched.ignored[t]), axis=1)
        precision = right / np.maximum(right + wrong, 1e-12)
        precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        recall = right / np.maximum(positives, 1e-12)[:, None]
        for draw in range(B):
            place = np.searchsorted(recall[draw], _RECALLS, side="left")
            reached = place < precision.shape[1]
            out[draw, t] = precision[draw, place[reached]].sum() / len(_RECALLS)
    out[positives == 0] = np.nan
    return out


def mean_average_precision(
    classes: Sequence[Matched], overlaps: Floats, weights: Floats
) -> tuple[Floats, Floats, Floats]:
    """(mAP over overlaps .50 to .95 [B], AP50 [B], AP by class [B, C]); classes without a true box are left out."""
    by_class = np.stack([average_precision(one, weights) for one in classes], axis=1)  # [B, C, T]
    first = int(np.argmin(np.abs(overlaps - 0.5)))
    known = ~np.isnan(by_class[..., 0])
    number = np.maximum(known.sum(1), 1)
    filled = np.nan_to_num(by_class)
    return filled.mean(2).sum(1) / number, filled[..., first].sum(1) / number, by_class.mean(2)


def confusion_of(truth: npt.NDArray[np.integer], guess: npt.NDArray[np.integer], classes: int) -> Ints:
    """Pixels by (true class, guessed class), int64 [C, C]; pixels whose true value is not below C are left out."""
    kept = truth < classes
    pairs = truth[kept].astype(np.int64) * classes + guess[kept].astype(np.int64)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def mean_iou(confusions: Ints, weights: Floats) -> tuple[Floats, Floats]:
    """(mIoU [B], IoU by class [B, C]) of images' confusions [I, C, C] counted by weights [B, I].

    Intersections and unions are summed over images before they are divided. Classes that neither occur nor are guessed
    are left out (NaN).
    """
    images, C = confusions.shape[:2]
    total = (weights @ confusions.reshape(images, -1).astype(np.float64)).reshape(-1, C, C)
    inter = np.diagonal(total, axis1=1, axis2=2)
    union = total.sum(1) + total.sum(2) - inter
    with np.errstate(invalid="ignore"):
        by_class = np.where(union > 0, inter / np.maximum(union, 1e-12), np.nan)
    known = np.maximum((union > 0).sum(1), 1)
    return np.nan_to_num(by_class).sum(1) / known, by_class


def draw_weights(images: int, draws: int = DRAWS, seed: int = 0) -> Floats:
    """How often each of I images was drawn in each of `draws` bootstrap samples, [1 + draws, I]; row 0 is all once."""
    rng = np.random.default_rng(seed)
    sampled = rng.multinomial(images, np.full(images, 1 / images), size=draws)
    return np.concatenate([np.ones((1, images)), sampled]).astype(np.float64)


def interval(scores: Floats, confidence: float = 0.95) -> tuple[float, float, float]:
    """(score, low, high) of [1 + B] scores whose first is that of all images: percentiles of the others."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(scores[1:], [tail, 1 - tail])
    return float(scores[0]), float(low), float(high)
