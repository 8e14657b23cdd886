"""Image operations on a batch in which every picture has parameters of its own.

No operation lets the batch decide a picture's bits: alone, in company or in another place of the batch, a picture
comes out the same. Three rules give that.

1. Work on pixels is single IEEE operations (+ - * / min max floor round), which round the same in a vector's body and
   tail. Fused ones (`lerp`, `addcmul`, `add(alpha=)`) and vectorised `exp`, `pow`, `sin` need not: they are not used.
2. Where a library chooses the order of a sum, its terms are whole multiples of a power of two and every partial sum
   is exact. Exact sums have no order.
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
BoolArray = npt.NDArray[np.bool_]

_SHARE = 2.0**16  # filter weights are multiples of 1 / _SHARE: times 8-bit levels they add up exactly in float32
_FINE = 2.0**32  # before that, multiples of 1 / _FINE, which add up exactly in float64


def each(function: Callable[[float], float], values: FloatArray) -> FloatArray:
    """`function`, one of Python's `math`, of every element: the same bits wherever the element stands."""
    return np.array([function(value) for value in values.ravel().tolist()], np.float64).reshape(values.shape)


def crop_resize(images: Tensor, boxes: IntArray, flip: BoolArray, size: int) -> Tensor:
    """Crop a box and resize it as Pillow's `crop(box).resize((size, size), BILINEAR)`, all pictures at once.

    images uint8 [B, 3, S, S]; boxes int64 [N, 4] (top, left, height, width) with N a multiple of B, box n being cut
    from picture n % B and inside it; flip bool [N], mirror left to right. Gives float32 [N, 3, size, size] in 0..1,
    multiples of 1/255.

    Pillow's arithmetic: triangle filter, widened when shrinking and renormalised at the edges of the box, applied
    along rows, rounded to whole levels, applied along columns, rounded. At most one level differs: the weights have 16
    bits here and 22 there, and Pillow 13 does the columns first where that is cheaper. `embedding_bag` is used as just
    such a filter: every output line is a weighted sum of a few input lines.
    """
    longest = int(boxes[:, 2:].max())
    assert longest <= 256 * size, "with more than 512 taps the sums would not be exact"
    device, batch, count, side = images.device, len(images), len(boxes), images.shape[3]
    index, share = _taps(torch.from_numpy(boxes).to(device), torch.from_numpy(flip).to(device), size, longest)
    picture = torch.arange(count, device=device)[:, None, None]
    columns = images.permute(0, 3, 1, 2).float().contiguous().view(batch * side, 3 * side)
    x = _weighted_lines(columns, index[1] + picture % batch * side, share[1])
    rows = x.view(count, size, 3, side).permute(0, 3, 2, 1).contiguous().view(count * side, 3 * size)
    x = _weighted_lines(rows, index[0] + picture * side, share[0])
    x = x.view(count, size, 3, size).permute(0, 2, 1, 3).contiguous()
    return x.div_(torch.tensor(255.0, device=device))  # a number would be multiplied by its reciprocal on a GPU


def _weighted_lines(lines: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """Sums of `lines` [L, W], whole levels, by index and share [N, s, taps]; rounded half up: [N s, W]."""
    bags, weights = index.flatten(0, 1), share.flatten(0, 1)
    return functional.embedding_bag(bags, lines, mode="sum", per_sample_weights=weights).add_(0.5).floor_()


def _taps(boxes: Tensor, flip: Tensor, size: int, longest: int) -> tuple[Tensor, Tensor]:
    """Of rows and of columns (first axis), which pixels make an output pixel and their shares, multiples of 2^-16.

    Gives int64 and float32 [2, N, size, taps]. Taps outside the box have share 0 and an index inside it.
    """
    start, length = boxes.t().view(2, 2, -1, 1)
    scale = length.double() / size
    support = scale.clamp(min=1)
    place = torch.arange(size, device=boxes.device).expand(len(boxes), size)
    place = torch.stack([place, torch.where(flip[:, None], place.flip(1), place)])
    centre = (place + 0.5) * scale
    taps = torch.arange(2 * math.ceil(max(1, longest / size)) + 1, device=boxes.device)
    pixel = (centre - support + 0.5).floor() + taps[:, None, None, None]  # [taps, 2, N, size]
    share = (1 - (pixel + 0.5 - centre).abs_() / support).clamp_(min=0)
    share = share.mul_((pixel >= 0) & (pixel < length)).mul_(_FINE).round_()
    share = share.mul_(_SHARE / share.sum(0)).round_().mul_(1 / _SHARE)
    index = torch.minimum(pixel.clamp_(min=0), length - 1).add_(start)
    return index.long().movedim(0, 3), share.float().movedim(0, 3)


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
    distance in sextants around the circle from the hue to the channel's own (red 0, green 2, blue 4). All is kept
    times C, so that grey needs no special case and nothing is divided. The hue itself, -3 C to 3 C and positive
    towards green, is |G - B| from red where red is the largest, C + V - R where it is the middle one (and C = |G - B|),
    3 C - |G - B| where it is the smallest: one formula with the sign of 2 (V - R) - C, and no slow `where`.
    """
    red, green, blue = (x[:, k : k + 1] for k in range(3))
    value = torch.maximum(red, green).maximum(blue)
    chroma = value - torch.minimum(red, green).minimum(blue)
    below, towards_green = value - red, green - blue
    hue = (below * 2).sub_(chroma).sign_().mul_(chroma - towards_green.abs()).add_(below).add_(chroma)
    hue.copysign_(towards_green).add_(chroma * (6 * turns)[:, None, None, None])
    distance = (hue - chroma * torch.tensor([0.0, 2.0, 4.0], device=x.device)[:, None, None]).abs_()
    distance = torch.minimum(distance, (chroma * 6 - distance).abs_()).sub_(chroma).clamp_(min=0)
    return torch.sub(value, torch.minimum(distance, chroma), out=x)


def gaussian_shares(sigma: FloatArray, kernel: int) -> npt.NDArray[np.float32]:
    """Shares of the middle pixel and of those 1, 2, ... to either side, float32 [N, kernel // 2 + 1].

    exp(-d^2 / 2 sigma^2), rounded to 2^-20 and divided by the sum of the `kernel` (odd) taps; sigma [N] pixels, > 0.
    """
    taps = np.rint(each(math.exp, np.arange(kernel // 2 + 1) ** 2 / (-2 * sigma[:, None] ** 2)) * 2**20)
    shares: npt.NDArray[np.float32] = (taps / (2 * taps.sum(1, keepdims=True) - taps[:, :1])).astype(np.float32)
    return shares


def gaussian_blur(x: Tensor, sigma: FloatArray, kernel: int) -> Tensor:
    """Separable Gaussian of `kernel` (odd) taps and standard deviation `sigma` [N] pixels, > 0, each its own.

    The border is mirrored without repeating the edge pixel (torchvision's GaussianBlur). kernel // 2 must be smaller
    than the picture's side.
    """
    radius, share = kernel // 2, gaussian_shares(sigma, kernel)
    in_use = [d for d in range(1, radius + 1) if share[:, d].any()]  # a tap of 0 everywhere changes no bit
    weight = torch.from_numpy(share).to(x.device)[:, :, None, None, None]
    for axis, padding in ((3, (radius, radius, 0, 0)), (2, (0, 0, radius, radius))):
        padded, side = functional.pad(x, padding, mode="reflect"), x.shape[axis]
        x = x * weight[:, 0]
        for d in in_use:
            pair = padded.narrow(axis, radius - d, side) + padded.narrow(axis, radius + d, side)
            x.add_(pair.mul_(weight[:, d]))
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
    side = x.shape[3]
    m = torch.from_numpy((inverse * (2 / side)).astype(np.float32)).to(x.device)[..., None, None]
    centred = torch.arange(side, device=x.device) - (side - 1) / 2
    # Not affine_grid, a matrix product. grid_sample takes each picture on its own, its tail as a masked vector.
    grid = [(centred * m[:, k, 0] + centred[:, None] * m[:, k, 1]).add_(m[:, k, 2]) for k in (0, 1)]
    return functional.grid_sample(x, torch.stack(grid, 3), "bilinear", "zeros", align_corners=False)


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
