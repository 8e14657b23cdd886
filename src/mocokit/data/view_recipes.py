"""What may happen to a picture on the way to a view, and the published recipes for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mocokit.errors import UsageError, did_you_mean

Range = tuple[float, float]
Triple = tuple[float, float, float]


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

    @property
    def moves(self) -> bool:
        """Whether pictures are rotated, zoomed, shifted or sheared."""
        return self.rotation > 0 or self.shift > 0 or self.shear > 0 or self.zoom != (1.0, 1.0)


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
