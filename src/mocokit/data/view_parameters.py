"""The numbers behind a view: hashes of (seed, epoch, sample id, view) become crop boxes, colour factors and so on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from mocokit.data import image_ops
from mocokit.data.image_ops import BoolArray, FloatArray, IntArray, each
from mocokit.data.randomness import UInt64Array, hash_words, uniform, word
from mocokit.data.view_recipes import ViewConfig

_CROP_TRIES = 10  # as torchvision's RandomResizedCrop; then the central crop
_ORDERS = np.array(list(itertools.permutations(range(4))), np.int64)  # of brightness, contrast, saturation, hue

_DRAWS = (
    "crop top", "crop left", "flip", "rotation", "zoom", "shift x", "shift y", "shear", "jitter", "jitter order",
    "brightness", "contrast", "saturation", "hue", "grayscale", "channel swap", "blur", "blur sigma", "solarize",
)  # fmt: skip
_WORDS = np.array([word(name) for name in _DRAWS], np.uint64)[:, None]
_CROP_WORDS = np.array(
    [[word(f"crop {what} {attempt}") for what in ("area", "ratio")] for attempt in range(_CROP_TRIES)], np.uint64
)[:, :, None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ViewParameters:
    """What happens to each of N pictures: arrays with N as their first axis.

    boxes: int64 [N, 4], the crop (top, left, height, width) in canvas pixels.
    flip, grey, swap: bool [N].
    inverse: float64 [N, 2, 3], the inverse affine map in view pixels (image_ops.inverse_affine).
    order: int64 [N, 4], the jitter's operations in the order they are applied (0 brightness, 1 contrast, 2 saturation,
        3 hue), -1 where nothing is done.
    colour: float64 [N, 4], factors of brightness, contrast, saturation; turns of hue.
    sigma: float64 [N], of the blur, pixels; 0 = none.
    solarize: bool [N].
    noise_key: uint64 [N], the hash from which the noise of the pixels is derived.
    """

    boxes: IntArray
    flip: BoolArray
    grey: BoolArray
    swap: BoolArray
    inverse: FloatArray
    order: IntArray
    colour: FloatArray
    sigma: FloatArray
    solarize: BoolArray
    noise_key: UInt64Array

    def take(self, pictures: IntArray) -> ViewParameters:
        """Those of the pictures with these numbers."""
        return ViewParameters(**{field.name: getattr(self, field.name)[pictures] for field in fields(self)})


def draw_parameters(
    config: ViewConfig, extents: IntArray, ids: IntArray, *, seed: int, epoch: int, views: Sequence[int]
) -> ViewParameters:
    """The parameters of V views of B samples. extents int64 [B, 2] (height, width), ids int64 [B].

    The number called "flip", say, is uniform(seed, word("flip"), epoch, id, view).
    """
    V, B = len(views), len(ids)
    view, picture = np.repeat(np.array(views, np.int64), B), np.tile(ids, V)
    u = dict(zip(_DRAWS, uniform(seed, _WORDS, epoch, picture, view), strict=True))

    def between(name: str, low: float, high: float) -> FloatArray:
        values: FloatArray = low + (high - low) * u[name]
        return values

    def either_way(name: str, largest: float) -> FloatArray:
        return between(name, -largest, largest)

    def chance(first: float, second: float | None) -> FloatArray:
        return np.where(view % 2 == 1, first if second is None else second, first)

    strengths = (config.brightness, config.contrast, config.saturation)
    named = zip(("brightness", "contrast", "saturation"), strengths, strict=True)
    colour = [between(name, max(0.0, 1 - strength), 1 + strength) for name, strength in named]
    colour.append(either_way("hue", config.hue))
    in_use = np.array([*strengths, config.hue]) > 0
    order = _ORDERS[(u["jitter order"] * len(_ORDERS)).astype(np.int64)]
    if config.moves:
        shift = np.stack([either_way("shift x", config.shift), either_way("shift y", config.shift)], 1)
        inverse = image_ops.inverse_affine(
            either_way("rotation", config.rotation),
            between("zoom", *config.zoom),
            shift * config.size,
            either_way("shear", config.shear),
        )
    else:
        inverse = np.tile(np.eye(2, 3), (V * B, 1, 1))

    def crop_numbers(attempt: int, pending: IntArray) -> FloatArray:
        return uniform(seed, _CROP_WORDS[attempt], epoch, picture[pending], view[pending])

    return ViewParameters(
        boxes=_boxes(config, np.tile(extents, (V, 1)), u["crop top"], u["crop left"], crop_numbers),
        flip=u["flip"] < config.flip,
        grey=u["grayscale"] < config.grayscale,
        swap=u["channel swap"] < config.channel_swap,
        inverse=inverse,
        order=np.where(in_use[order] & (u["jitter"] < config.jitter)[:, None], order, -1),
        colour=np.stack(colour, 1),
        sigma=np.where(
            u["blur"] < chance(config.blur, config.blur_second), between("blur sigma", *config.blur_sigma), 0.0
        ),
        solarize=u["solarize"] < chance(config.solarize, config.solarize_second),
        noise_key=hash_words(seed, word("noise"), epoch, picture, view),
    )


def central_squares(extents: IntArray) -> IntArray:
    """int64 [N, 4]: the largest square (top, left, height, width) in the middle of each extent [N, 2]."""
    side = extents.min(1)
    return np.stack([*((extents - side[:, None]) // 2).T, side, side], 1)


def _boxes(
    config: ViewConfig,
    extents: IntArray,
    from_top: FloatArray,
    from_left: FloatArray,
    numbers: Callable[[int, IntArray], FloatArray],
) -> IntArray:
    """RandomResizedCrop's boxes: ten tries at a random area and ratio, then the central crop of the nearest ratio.

    numbers: of a try and the pictures that need it, their uniform numbers for area and ratio, [2, n].
    """
    if config.crop_area is None:
        return central_squares(extents)
    height, width = extents.T
    narrow, wide = config.crop_ratio
    across = np.minimum(width, np.rint(height * wide).astype(np.int64))
    down = np.minimum(height, np.rint(width / narrow).astype(np.int64))
    boxes = np.stack([(height - down) // 2, (width - across) // 2, down, across], 1)
    low, high = config.crop_area
    pending = np.arange(len(extents))
    for attempt in range(_CROP_TRIES):
        for_area, for_ratio = numbers(attempt, pending)
        area = (height * width)[pending] * (low + (high - low) * for_area)
        ratio = each(math.exp, math.log(narrow) + math.log(wide / narrow) * for_ratio)
        down, across = (np.rint(np.sqrt(x)).astype(np.int64) for x in (area / ratio, area * ratio))
        fits = (down > 0) & (down <= height[pending]) & (across > 0) & (across <= width[pending])
        done, down, across = pending[fits], down[fits], across[fits]
        top = (from_top[done] * (height[done] - down + 1)).astype(np.int64)
        left = (from_left[done] * (width[done] - across + 1)).astype(np.int64)
        boxes[done] = np.stack([top, left, down, across], 1)
        pending = pending[~fits]
        if not len(pending):
            break
    return boxes
