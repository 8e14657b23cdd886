"""A batch of pictures becomes batches of random views, every number a function of (seed, epoch, sample id, view).

`draw_parameters` turns hashes into crop boxes, colour factors and so on; `render` applies them with image_ops.py.
A sample's views therefore have the same bits in any batch, at any place in it and after any interruption, on one
device and thread count (image_ops.py says why). Shapes: B samples, V views of each, N = V B pictures, view by view.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from mocokit.data import image_ops
from mocokit.data.image_ops import BoolArray, FloatArray, IntArray, each
from mocokit.data.randomness import UInt64Array, hash_words, uniform, word
from mocokit.errors import UsageError, did_you_mean

Range = tuple[float, float]
Triple = tuple[float, float, float]

_CROP_TRIES = 10  # as torchvision's RandomResizedCrop; then the central crop
_ORDERS = np.array(list(itertools.permutations(range(4))), np.int64)  # of brightness, contrast, saturation, hue
_TILE = {"cpu": 2**19, "cuda": 2**24}  # float32 elements rendered at a time; on a CPU they should stay in the cache

_DRAWS = (
    "crop top", "crop left", "flip", "rotation", "zoom", "shift x", "shift y", "shear", "jitter", "jitter order",
    "brightness", "contrast", "saturation", "hue", "grayscale", "channel swap", "blur", "blur sigma", "solarize",
    *(f"crop {what} {attempt}" for attempt in range(_CROP_TRIES) for what in ("area", "ratio")),
)  # fmt: skip
_WORDS = np.array([word(name) for name in _DRAWS], np.uint64)[:, None, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewConfig:
    """Done at random to a picture: crop, flip, affine, jitter, grey, blur, solarise, noise, normalise, in order.

    The fields' defaults do nothing but the central square crop. Raises UsageError for a value out of range.

    size: side of a view, pixels.
    crop_area: range of the crop's share of the picture's area, in 0..1; None = the central square (v1, v2: 0.2 to 1).
    crop_ratio: range of the crop's width / height, drawn log-uniformly.
    flip: probability of a left-right mirror image (v1, v2: 0.5).
    rotation: largest angle either way, degrees.
    zoom: range of the magnification about the centre.
    shift: largest move either way along x and along y, as a share of the side.
    shear: largest shear angle along x either way, degrees.
    jitter: probability of the colour jitter, its four steps in random order (v1: 1; v2: 0.8).
    brightness: its factor is drawn from 1 - value (at least 0) to 1 + value; 0 = off (v1, v2: 0.4).
    contrast: likewise (v1, v2: 0.4).
    saturation: likewise (v1, v2: 0.4).
    hue: largest turn either way, in 0..0.5 of the circle; 0 = off (v1: 0.4; v2: 0.1).
    grayscale: probability of turning grey (v1, v2: 0.2).
    grayscale_first: turn grey before the jitter (v1) and not after it (v2).
    channel_swap: probability that red and blue change places; makes the hue of red and blue things useless.
    blur: probability of the Gaussian blur (v2: 0.5).
    blur_sigma: range of its standard deviation, pixels of the view (v2: 0.1 to 2, at size 224).
    blur_kernel: its odd number of taps (SimCLR: a tenth of the size).
    solarize: probability of turning the brighter half of the values about, x to 1 - x from 0.5 up.
    blur_second, solarize_second: those probabilities in every second view (numbers 1, 3, ...) where they differ from
        those in the first; None = the same (BYOL, MoCo v3: blur 1 and 0.1, solarize 0 and 0.2).
    noise: standard deviation of the added noise, in 0..1 of the pixel range.
    mean: of each channel, in pixel values 0..1; a view is (picture - mean) / std.
    std: of each channel, likewise.
    """

    size: int
    crop_area: Range | None = None
    crop_ratio: Range = (3 / 4, 4 / 3)
    flip: float = 0.0
    rotation: float = 0.0
    zoom: Range = (1.0, 1.0)
    shift: float = 0.0
    shear: float = 0.0
    jitter: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    grayscale: float = 0.0
    grayscale_first: bool = False
    channel_swap: float = 0.0
    blur: float = 0.0
    blur_sigma: Range = (0.1, 2.0)
    blur_kernel: int = 3
    solarize: float = 0.0
    blur_second: float | None = None
    solarize_second: float | None = None
    noise: float = 0.0
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        _check("size", self.size, isinstance(self.size, int) and self.size >= 2, "a whole number, 2 or more")
        if self.crop_area is not None:
            low, high = self.crop_area
            _check("crop_area", self.crop_area, 0 < low <= high <= 1, "a range inside 0..1, above 0")
        for name, least in (("crop_ratio", 0.01), ("zoom", 0.01), ("blur_sigma", 0.01)):
            low, high = getattr(self, name)
            _check(name, (low, high), least <= low <= high < math.inf, f"a range (low, high) from {least} up")
        for name in ("flip", "jitter", "grayscale", "channel_swap", "blur", "solarize", "noise", "shift"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "in 0..1")
        for name in ("blur_second", "solarize_second"):
            value = getattr(self, name)
            _check(name, value, value is None or 0 <= value <= 1, "in 0..1, or null")
        for name in ("brightness", "contrast", "saturation"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "0 (off) or more")
        _check("hue", self.hue, 0 <= self.hue <= 0.5, "in 0..0.5 of the colour circle")
        _check("rotation", self.rotation, 0 <= self.rotation <= 180, "in 0..180 degrees")
        _check("shear", self.shear, 0 <= self.shear < 90, "in 0..90 degrees, below 90")
        fits = self.blur_kernel % 2 == 1 and 0 < self.blur_kernel < 2 * self.size
        _check("blur_kernel", self.blur_kernel, fits, f"odd, 1 or more, and below 2 x size = {2 * self.size}")
        _check("mean", self.mean, len(self.mean) == 3 and all(map(math.isfinite, self.mean)), "3 finite numbers")
        _check("std", self.std, len(self.std) == 3 and all(0 < s < math.inf for s in self.std), "3 numbers above 0")


def _check(name: str, value: object, holds: bool, must_be: str) -> None:
    if not holds:
        raise UsageError(f"The view setting {name} is {value!r}, but must be {must_be}. Change {name}.")


def view_recipe(name: str, size: int) -> ViewConfig:
    """The named recipe at a view size in pixels; change fields with `dataclasses.replace`. Raises UsageError.

    "moco-v1": He et al. 2020, section 3.3, and the released code. "moco-v2": Chen et al. 2020, the released code.
    "simclr": Chen et al. 2020 (SimCLR), appendix A, at colour strength 1. "byol": Grill et al. 2020, the table of
    augmentations, with blur and solarisation unlike in the two views; MoCo v3's are these with a smallest crop of 0.2
    for ResNets. "mnist-like": for small grey drawings such as digits, which a mirror image or a crop would turn into
    something else.

    Deviation: the papers' mean and std are ImageNet's, here 0.5 and 0.5 until the data's own are put in. The released
    v2 blurs by Pillow's box filters, here a Gaussian of as many taps as SimCLR takes (three at small sizes).
    """
    taps = max(3, size // 10 // 2 * 2 + 1)
    recipes: dict[str, Callable[[], ViewConfig]] = {
        "moco-v1": lambda: ViewConfig(
            size=size, crop_area=(0.2, 1.0), flip=0.5, grayscale=0.2, grayscale_first=True,
            jitter=1.0, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4,
        ),
        "moco-v2": lambda: ViewConfig(
            size=size, crop_area=(0.2, 1.0), flip=0.5, grayscale=0.2,
            jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1,
            blur=0.5, blur_sigma=(0.1, 2.0), blur_kernel=taps,
        ),
        "simclr": lambda: ViewConfig(
            size=size, crop_area=(0.08, 1.0), flip=0.5, grayscale=0.2,
            jitter=0.8, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2,
            blur=0.5, blur_sigma=(0.1, 2.0), blur_kernel=taps,
        ),
        "byol": lambda: ViewConfig(
            size=size, crop_area=(0.08, 1.0), flip=0.5, grayscale=0.2,
            jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1,
            blur=1.0, blur_sigma=(0.1, 2.0), blur_kernel=taps, solarize=0.0, blur_second=0.1, solarize_second=0.2,
        ),
        "mnist-like": lambda: ViewConfig(
            size=size, rotation=15.0, zoom=(0.85, 1.15), shift=0.1, shear=8.0,
            jitter=1.0, brightness=0.3, contrast=0.3, noise=0.05,
        ),
    }  # fmt: skip
    if name not in recipes:
        known = ", ".join(recipes)
        raise UsageError(f"There is no view recipe {name!r}.{did_you_mean(name, recipes)} Choose one of: {known}.")
    return recipes[name]()


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
    view = np.array(views, np.int64)[:, None]
    numbers = uniform(seed, _WORDS, epoch, ids, view).reshape(len(_DRAWS), -1)
    u = dict(zip(_DRAWS, numbers, strict=True))

    def between(name: str, low: float, high: float) -> FloatArray:
        return low + (high - low) * u[name]

    def either_way(name: str, largest: float) -> FloatArray:
        return between(name, -largest, largest)

    def chance(first: float, second: float | None) -> FloatArray:
        return np.repeat(np.where(view[:, 0] % 2 == 1, first if second is None else second, first), len(ids))

    strengths = (config.brightness, config.contrast, config.saturation)
    named = zip(("brightness", "contrast", "saturation"), strengths, strict=True)
    colour = [between(name, max(0.0, 1 - strength), 1 + strength) for name, strength in named]
    colour.append(either_way("hue", config.hue))
    in_use = np.array([*strengths, config.hue]) > 0
    order = _ORDERS[(u["jitter order"] * len(_ORDERS)).astype(np.int64)]
    shift = np.stack([either_way("shift x", config.shift), either_way("shift y", config.shift)], 1)
    return ViewParameters(
        boxes=_boxes(config, np.tile(extents, (len(view), 1)), u),
        flip=u["flip"] < config.flip,
        grey=u["grayscale"] < config.grayscale,
        swap=u["channel swap"] < config.channel_swap,
        inverse=image_ops.inverse_affine(
            either_way("rotation", config.rotation),
            between("zoom", *config.zoom),
            shift * config.size,
            either_way("shear", config.shear),
        ),
        order=np.where(in_use[order] & (u["jitter"] < config.jitter)[:, None], order, -1),
        colour=np.stack(colour, 1),
        sigma=np.where(
            u["blur"] < chance(config.blur, config.blur_second), between("blur sigma", *config.blur_sigma), 0.0
        ),
        solarize=u["solarize"] < chance(config.solarize, config.solarize_second),
        noise_key=hash_words(seed, word("noise"), epoch, ids, view).reshape(-1),
    )


def central_squares(extents: IntArray) -> IntArray:
    """int64 [N, 4]: the largest square (top, left, height, width) in the middle of each extent [N, 2]."""
    side = extents.min(1)
    return np.stack([*((extents - side[:, None]) // 2).T, side, side], 1)


def _boxes(config: ViewConfig, extents: IntArray, u: dict[str, FloatArray]) -> IntArray:
    """RandomResizedCrop's boxes: ten tries at a random area and ratio, then the central crop of the nearest ratio."""
    if config.crop_area is None:
        return central_squares(extents)
    height, width = extents.T
    narrow, wide = config.crop_ratio
    across = np.minimum(width, np.rint(height * wide).astype(np.int64))
    down = np.minimum(height, np.rint(width / narrow).astype(np.int64))
    boxes = np.stack([(height - down) // 2, (width - across) // 2, down, across], 1)
    pending = np.arange(len(extents))
    for attempt in range(_CROP_TRIES):
        low, high = config.crop_area
        area = (height * width)[pending] * (low + (high - low) * u[f"crop area {attempt}"][pending])
        exponent = math.log(narrow) + math.log(wide / narrow) * u[f"crop ratio {attempt}"][pending]
        ratio = each(math.exp, exponent)
        down, across = (np.rint(np.sqrt(x)).astype(np.int64) for x in (area / ratio, area * ratio))
        fits = (down > 0) & (down <= height[pending]) & (across > 0) & (across <= width[pending])
        done, down, across = pending[fits], down[fits], across[fits]
        top = (u["crop top"][done] * (height[done] - down + 1)).astype(np.int64)
        left = (u["crop left"][done] * (width[done] - across + 1)).astype(np.int64)
        boxes[done] = np.stack([top, left, down, across], 1)
        pending = pending[~fits]
    return boxes


def make_views(
    config: ViewConfig,
    images_u8: Tensor,
    extents: Tensor,
    ids: IntArray,
    *,
    seed: int,
    epoch: int,
    views: Sequence[int] = (0, 1),
) -> tuple[Tensor, ...]:
    """One float32 tensor [B, 3, size, size] for each number in `views`, on the device of the images. B is at least 1.

    images_u8: uint8 [B, 3, S, S], RGB, on a CPU or CUDA device (float64 is needed); each picture lies in the top-left
        corner of its canvas.
    extents: int64 [B, 2], the picture's (height, width), 1..S; nothing beyond it is read. Best kept on the CPU.
    ids: int64 [B], randomness.sample_id of each sample.
    """
    assert images_u8.dtype == torch.uint8
    assert images_u8.shape == (len(ids), 3, images_u8.shape[3], images_u8.shape[3])
    assert extents.shape == (len(ids), 2)
    sizes = extents.cpu().numpy().astype(np.int64, copy=False)
    parameters = draw_parameters(config, sizes, ids, seed=seed, epoch=epoch, views=views)
    return render(config, images_u8, parameters).unbind(0)


def render(config: ViewConfig, images_u8: Tensor, parameters: ViewParameters) -> Tensor:
    """float32 [V, B, 3, size, size] from images [B, 3, S, S] and the parameters of V B pictures. See make_views."""
    device, size, batch = images_u8.device, config.size, len(images_u8)
    numbers = np.arange(len(parameters.flip)).reshape(-1, batch)
    out = torch.empty(*numbers.shape, 3, size, size, device=device)
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (config.mean, config.std))
    tile = max(1, _TILE[device.type] // out[:, 0].numel())
    for start in range(0, batch, tile):
        samples = slice(start, start + tile)
        x = _render_tile(config, images_u8[samples], parameters.take(numbers[:, samples].ravel()))
        out[:, samples] = x.sub_(mean).div_(std).view(len(numbers), -1, 3, size, size)
    return out


def _render_tile(config: ViewConfig, images_u8: Tensor, p: ViewParameters) -> Tensor:
    x = image_ops.crop_resize(images_u8, p.boxes, p.flip, config.size)
    if config.rotation > 0 or config.shift > 0 or config.shear > 0 or config.zoom != (1.0, 1.0):
        x = image_ops.affine(x, p.inverse)
    _to_some_(x, p.swap, lambda some: some.flip(1))
    if config.grayscale_first:
        _to_some_(x, p.grey, _grey)
    x = _jitter(x, p.order, p.colour)
    if not config.grayscale_first:
        _to_some_(x, p.grey, _grey)
    blurred = p.sigma > 0
    _to_some_(x, blurred, lambda some: image_ops.gaussian_blur(some, p.sigma[blurred], config.blur_kernel))
    _to_some_(x, p.solarize, _solarize)
    return image_ops.noise_(x, p.noise_key, config.noise) if config.noise > 0 else x


def _grey(x: Tensor) -> Tensor:
    return image_ops.luminance(x).expand(-1, 3, -1, -1)


def _solarize(x: Tensor) -> Tensor:
    return torch.where(x < 0.5, x, 1.0 - x)


def _to_some_(x: Tensor, chosen: BoolArray, operation: Callable[[Tensor], Tensor]) -> None:
    """Replace the chosen pictures of x by what the operation makes of them."""
    if chosen.any():
        rows = torch.from_numpy(np.flatnonzero(chosen)).to(x.device)
        x.index_copy_(0, rows, operation(x.index_select(0, rows)))


def _jitter(x: Tensor, order: IntArray, colour: FloatArray) -> Tensor:
    """The colour operations on x [n, 3, s, s], for each picture in its own order.

    Step by step the pictures are sorted by the operation that is due, so that each works in place on its rows.
    """
    if not (order >= 0).any():
        return x
    operations = (image_ops.brightness_, image_ops.contrast_, image_ops.saturation_, image_ops.hue_)
    factors = torch.from_numpy(colour.astype(np.float32)).to(x.device)
    held = np.arange(len(order))  # the picture that each row of x holds
    for due in order.T:
        rows = np.argsort(due[held], kind="stable")
        held, x = held[rows], x.index_select(0, torch.from_numpy(rows).to(x.device))
        bounds = np.searchsorted(due[held], np.arange(len(operations) + 1))
        for number, operation in enumerate(operations):
            group = slice(*bounds[number : number + 2])
            if group.start < group.stop:
                operation(x[group], factors[torch.from_numpy(held[group]).to(x.device), number])
    return x.index_select(0, torch.from_numpy(np.argsort(held)).to(x.device))


def plain_view(
    images_u8: Tensor, extents: Tensor, *, size: int, mean: Triple = (0.5, 0.5, 0.5), std: Triple = (0.5, 0.5, 0.5)
) -> Tensor:
    """The view for evaluation, float32 [B, 3, size, size]: central square, antialiased resize, normalised, no chance.

    images_u8 and extents as in make_views; or clips uint8 [B, 3, T, S, S], which give float32 [B, 3, T, size, size].
    """
    if images_u8.ndim == 5:
        B, _, T = images_u8.shape[:3]
        frames = images_u8.transpose(1, 2).flatten(0, 1)
        x = plain_view(frames, extents.repeat_interleave(T, 0), size=size, mean=mean, std=std)
        return x.view(B, T, *x.shape[1:]).transpose(1, 2).contiguous()
    config = ViewConfig(size=size, mean=mean, std=std)
    nobody = np.zeros(len(images_u8), np.int64)
    return make_views(config, images_u8, extents, nobody, seed=0, epoch=0, views=(0,))[0]
