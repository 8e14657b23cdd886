"""Image operations on a batch in which every picture has parameters of its own.

No operation lets the batch decide a picture's bits: alone, in company or in another place of the batch, a picture
comes out the same. Three rules give that.

1. Work on pixels is single IEEE operations (+ - * / min max floor), which round the same in vector body and tail.
   Fused ones (`lerp`, `addcmul`, `add(alpha=)`) and vectorised `exp`, `pow`, `sin` do not, and are not used.
2. Where a library chooses the order of a sum (matrix products, means), the terms are whole multiples of a power of
   two, few enough for every partial sum to be exact. Exact sums have no order.
3. Transcendental functions are called once per picture, from Python's `math`, in float64.

Shapes: N pictures, S the side of the square uint8 canvas, s the side of a float32 picture. Float pictures are
[N, 3, s, s] in 0..1; operations whose name ends in an underscore overwrite theirs and return it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from mocokit.data.randomness import UInt64Array, hash_words

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_WEIGHT_BITS = 16  # with 8-bit levels: sums below 2^24, exact in float32
_FINE = 2.0**32  # fixed point in which float64 sums of filter weights are exact


def each(function: Callable[[float], float], values: FloatArray) -> FloatArray:
    """`function`, one of Python's `math`, of every element: the same bits wherever the element stands."""
    return np.array([function(value) for value in values.ravel().tolist()], np.float64).reshape(values.shape)


def crop_resize(images: Tensor, boxes: Tensor, flip: Tensor, size: int) -> Tensor:
    """Crop a box and resize it as Pillow's `crop(box).resize((size, size), BILINEAR)`, all pictures at once.

    images uint8 [B, 3, S, S]; boxes int64 [N, 4] (top, left, height, width) with N a multiple of B, box n being cut
    from picture n % B, inside it; flip bool [N], mirror left to right. Gives float32 [N, 3, size, size] in 0..1,
    multiples of 1/255.

    Pillow's arithmetic: triangle filter, widened when shrinking and renormalised at the edges of the box, applied
    along rows, rounded to whole levels, applied along columns, rounded. The weights have 16 bits here and 22 there.
    As two batched matrix products they are exact in float32 (rule 2), so any kernel gives the same bits.
    """
    count = len(boxes)
    corner, length = boxes[:, :2], boxes[:, 2:]
    y, x = corner.amin(0).tolist()  # only the part of the canvas that some box touches is read
    rows, columns = ((corner + length).amax(0) - corner.amin(0)).tolist()
    mirror = torch.stack([torch.zeros_like(flip), flip])
    start = (corner - corner.amin(0)).t()
    down, across = _resize_weights(start, length.t(), mirror, size, max(rows, columns))
    pixels = images[:, :, y : y + rows, x : x + columns].permute(0, 2, 1, 3).float().flatten(1, 2)  # [B, 3 rows, columns]
    with torch.autocast(images.device.type, enabled=False):
        levels = torch.cat([torch.bmm(pixels, part) for part in across[:, :columns].split(len(images))])
        levels = levels.add_(0.5).floor_().view(count, rows, 3 * size)
        levels = torch.bmm(down[:, :rows].transpose(1, 2), levels).add_(0.5).floor_()
    return levels.view(count, size, 3, size).permute(0, 2, 1, 3).contiguous().div_(255)


def _resize_weights(start: Tensor, length: Tensor, mirror: Tensor, size: int, span: int) -> Tensor:
    """How much of each input pixel goes into each output pixel, in multiples of 2^-16: float32 [..., span, size].

    start, length, mirror [...]: the box along one axis, in input pixels, and whether to reverse it.
    """
    length = length[..., None, None]
    scale = length.double() / size
    support = scale.clamp(min=1)
    place = torch.arange(size, device=start.device)
    centre = (torch.where(mirror[..., None, None], size - 1 - place, place) + 0.5) * scale
    taps = torch.arange(2 * math.ceil(float(support.max())) + 1, device=start.device)[:, None]
    pixel = (centre - support + 0.5).floor() + taps  # [..., taps, size]
    weight = (1 - (pixel + 0.5 - centre).abs_() / support).clamp_(min=0)
    weight = weight.mul_((pixel >= 0) & (pixel < length)).mul_(_FINE).round_()
    share = weight.mul_(2**_WEIGHT_BITS / weight.sum(-2, keepdim=True)).round_().float().mul_(2.0**-_WEIGHT_BITS)
    index = (pixel.long() + start[..., None, None]).clamp_(0, span - 1)  # what is clamped here has weight 0
    dense = torch.zeros(*start.shape, span, size, device=start.device)
    return dense.scatter_add_(-2, index, share)


def luminance(x: Tensor) -> Tensor:
    """Rec. 601 grey, [N, 1, s, s]: 0.2989 R + 0.587 G + 0.114 B, as torchvision."""
    return (x[:, 0:1] * 0.2989).add_(x[:, 1:2] * 0.587).add_(x[:, 2:3] * 0.114)


def brightness_(x: Tensor, factor: Tensor) -> Tensor:
    """Times `factor` [N], >= 0, clamped to 0..1."""
    return x.mul_(factor[:, None, None, None]).clamp_(0, 1)


def contrast_(x: Tensor, factor: Tensor) -> Tensor:
    """factor x + (1 - factor) mean grey of the picture, clamped; factor [N], >= 0."""
    grey = luminance(x).flatten(1).mul_(2**24).round_()
    mean = (grey.sum(1, dtype=torch.float64) / (2**24 * grey.shape[1])).float()
    return x.mul_(factor[:, None, None, None]).add_(((1 - factor) * mean)[:, None, None, None]).clamp_(0, 1)


def saturation_(x: Tensor, factor: Tensor) -> Tensor:
    """factor x + (1 - factor) grey, pixel by pixel, clamped; factor [N], >= 0."""
    grey = luminance(x).mul_((1 - factor)[:, None, None, None])
    return x.mul_(factor[:, None, None, None]).add_(grey).clamp_(0, 1)


def hue_(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue in HSV space; turns [N] in -0.5..0.5, 1 being the full circle.

    With V the largest channel and C the largest minus the smallest, HSV says: channel = V - C clamp(d - 1, 0, 1), d the
    distance in sextants around the circle from the hue to the channel's own (red 0, green 2, blue 4). Everything
    is kept times C, so grey needs no special case and nothing is divided.
    """
    red, green, blue = x.split(1, dim=1)
    value = torch.maximum(red, green).maximum(blue)
    chroma = value - torch.minimum(red, green).minimum(blue)
    two = chroma * 2
    hue = torch.where(value == green, (blue - red).add_(two), (red - green).add_(two).add_(two))
    hue = torch.where(value == red, green - blue, hue).add_(chroma * (6 * turns)[:, None, None, None])
    distance = (hue - chroma * torch.tensor([0.0, 2.0, 4.0], device=x.device)[:, None, None]).abs_()
    distance = torch.minimum(distance, (chroma * 6 - distance).abs_()).sub_(chroma).clamp_(min=0)
    return torch.sub(value, torch.minimum(distance, chroma), out=x)


def gaussian_blur(x: Tensor, sigma: FloatArray, kernel: int) -> Tensor:
    """Separable Gaussian of `kernel` (odd) taps and standard deviation `sigma` [N] pixels, > 0, each its own.

    The taps are exp(-d^2 / 2 sigma^2), divided by their sum; the border is mirrored without repeating the edge pixel
    (torchvision's GaussianBlur). kernel // 2 must be smaller than the picture's side.
    """
    radius = kernel // 2
    taps = np.arange(radius + 1) ** 2 / (-2 * sigma[:, None] ** 2)
    # Fixed point makes the sum exact and drops the tiny taps that would make slow subnormal numbers.
    weights = np.rint(each(math.exp, taps) * _FINE)
    weights /= 2 * weights.sum(1, keepdims=True) - weights[:, :1]
    w = torch.from_numpy(weights.astype(np.float32)).to(x.device)[:, :, None, None, None]
    for axis in (2, 3):
        side = x.shape[axis]
        padding = (radius, radius, 0, 0) if axis == 3 else (0, 0, radius, radius)
        padded = functional.pad(x, padding, mode="reflect")
        x = padded.narrow(axis, radius, side) * w[:, 0]
        for d in range(1, radius + 1):
            pair = padded.narrow(axis, radius - d, side) + padded.narrow(axis, radius + d, side)
            x.add_(pair.mul_(w[:, d]))
    return x


def inverse_affine(rotation: FloatArray, zoom: FloatArray, shift: FloatArray, shear: FloatArray) -> FloatArray:
    """[N, 2, 3]: where each output pixel comes from, both in pixels (x, y) from the picture's centre.

    The picture is zoomed, sheared along x, rotated (clockwise) by angles [N] in degrees, then moved by shift [N, 2]
    (x, y) pixels: torchvision's `affine`, of which this is the inverse map.
    """
    degree = math.pi / 180
    cos, sin, tan = each(math.cos, rotation * degree), each(math.sin, rotation * degree), each(math.tan, shear * degree)
    linear = np.stack([cos - sin * tan, sin + cos * tan, -sin, cos], -1).reshape(-1, 2, 2) / zoom[:, None, None]
    offset = -(linear[:, :, 0] * shift[:, :1] + linear[:, :, 1] * shift[:, 1:])
    return np.concatenate([linear, offset[:, :, None]], 2)


def affine(x: Tensor, inverse: FloatArray) -> Tensor:
    """Move each picture by its inverse map [N, 2, 3] (see `inverse_affine`): bilinear, black (0) outside."""
    n, _, side, _ = x.shape
    m = torch.from_numpy(inverse.astype(np.float32)).to(x.device)[:, :, :, None, None]
    centred = torch.arange(side, device=x.device) - (side - 1) / 2
    # One black pixel before and two behind hold every neighbour of the coordinates, clamped to -1..side.
    padded = functional.pad(x, (1, 2, 1, 2)).flatten(2)
    column, row = (
        (centred * m[:, k, 0] + centred[:, None] * m[:, k, 1]).add_(m[:, k, 2] + (side - 1) / 2) for k in (0, 1)
    )
    column, row = column.clamp_(-1, side).add_(1), row.clamp_(-1, side).add_(1)
    at_column, at_row = column.floor(), row.floor()
    index = (at_row * (side + 3)).add_(at_column).long().view(n, 1, -1).expand(-1, 3, -1)
    right, below = (column - at_column).view(n, 1, -1), (row - at_row).view(n, 1, -1)
    upper = (padded.gather(2, index) * (1 - right)).add_(padded.gather(2, index + 1) * right)
    index = index + (side + 3)
    lower = (padded.gather(2, index) * (1 - right)).add_(padded.gather(2, index + 1) * right)
    return upper.mul_(1 - below).add_(lower.mul_(below)).view(n, 3, side, side)


def noise_(x: Tensor, key: UInt64Array, std: float) -> Tensor:
    """Add nearly Gaussian noise of standard deviation `std`, one plane for the three channels, and clamp to 0..1.

    The noise of a pixel is the sum of the four 16-bit numbers in hash(key [N], pixel number), centred and scaled:
    an Irwin-Hall variate, never beyond 3.47 standard deviations.
    """
    n, _, side, _ = x.shape
    bits = hash_words(key[:, None], np.arange(side * side, dtype=np.int64)).view(np.uint16)
    total = bits[:, 0::4].astype(np.float32)
    for field in (1, 2, 3):
        total += bits[:, field::4]
    total = (total - np.float32(2 * 65535)) * np.float32(std / math.sqrt((65536**2 - 1) / 3))
    return x.add_(torch.from_numpy(total).to(x.device).view(n, 1, side, side)).clamp_(0, 1)
