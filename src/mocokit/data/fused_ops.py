"""The operations of image_ops.py for a CPU, compiled: a picture goes through all of them while it lies in the cache.

Every bit is image_ops' own. Its rules (single IEEE operations, exact sums, transcendental functions from outside) leave
a compiler nothing to choose (`compiling`). Float constants are float32 by name and counters of pixels never meet a
float32, for numba would go on in float64.

Shapes: N pictures, S the side of the square uint8 canvas, s the side of a float32 picture, P = s s its pixels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.compiling import compiled
from mocokit.data.image_ops import BoolArray, IntArray

Pictures = npt.NDArray[np.float32]
Levels = npt.NDArray[np.uint8]
Shares = npt.NDArray[np.int32]

_0, _HALF, _1, _2, _4, _6 = (np.float32(value) for value in (0.0, 0.5, 1.0, 2.0, 4.0, 6.0))
_RED, _GREEN, _BLUE = np.float32(0.2989), np.float32(0.587), np.float32(0.114)
_WHITE = np.float32(255.0)
_GREY_STEPS = np.float32(2**24)
_FINE, _SHARE, _ROUND, _SHARE_BITS = 2.0**32, 2.0**16, 2**15, 16


@compiled
def _filter(length: int, size: int, mirrored: bool, first: IntArray, count: IntArray, share: Shares) -> None:
    """Pillow's triangle filter along one side: of each output pixel the first input, how many, and their shares.

    first, count: int64 [s], filled; share: int32 [s, taps], filled with multiples of 2^-16. See image_ops._taps.
    """
    scale = length / size
    support = max(scale, 1.0)
    taps = 2 * math.ceil(support) + 1
    weight = np.empty(taps)
    for place in range(size):
        centre = ((size - 1 - place if mirrored else place) + 0.5) * scale
        pixel = math.floor(centre - support + 0.5)
        total = 0.0
        for t in range(taps):
            inside = pixel + t >= 0 and pixel + t < length
            raw = max(1 - abs(pixel + t + 0.5 - centre) / support, 0.0) if inside else 0.0
            weight[t] = np.rint(raw * _FINE)
            total += weight[t]
        lowest, used = 0, 0
        for t in range(taps):
            whole = np.int32(np.rint(weight[t] * (_SHARE / total)))
            if whole > 0 and used == 0:
                lowest = t
            if whole > 0:
                used = t - lowest + 1
            if used > 0:
                share[place, t - lowest] = whole
        first[place], count[place] = pixel + lowest, used


@compiled
def _weighted(lines: Any, share: Any, count: int, total: Any) -> None:
    """total [L] = the sum of `count` lines [count, L], uint8, by their shares, plus a half."""
    length = total.shape[0]
    if count == 1:
        a, w = lines[0], share[0]
        for i in range(length):
            total[i] = a[i] * w + _ROUND
    elif count == 2:
        a, b, w, v = lines[0], lines[1], share[0], share[1]
        for i in range(length):
            total[i] = a[i] * w + b[i] * v + _ROUND
    else:
        a, b, c, w, v, u = lines[0], lines[1], lines[2], share[0], share[1], share[2]
        for i in range(length):
            total[i] = a[i] * w + b[i] * v + c[i] * u + _ROUND
        for t in range(3, count):
            a, w = lines[t], share[t]
            for i in range(length):
                total[i] += a[i] * w


@compiled
def _turn(picture: Any, turned: Any) -> None:
    """turned [w, h] = picture [h, w], both uint8. (Blocks were tried: three times slower.)"""
    height, width = picture.shape
    for j in range(width):
        for i in range(height):
            turned[j, i] = picture[i, j]


@compiled
def crop_resize(images: Levels, source: IntArray, boxes: IntArray, flip: BoolArray, out: Pictures) -> None:
    """image_ops.crop_resize into out, float32 [N, 3, s, s]. Picture n is cut from images[source[n]], [B, 3, S, S].

    Both passes run along lines as long as can be, the three channels one after the other: columns are shrunk first,
    with a column as a line of the picture turned over, then rows.
    """
    size, side = out.shape[3], images.shape[3]
    longest = 2 * math.ceil(max(1.0, side / size)) + 1
    first_x, count_x, share_x = np.empty(size, np.int64), np.empty(size, np.int64), np.empty((size, longest), np.int32)
    first_y, count_y, share_y = np.empty(size, np.int64), np.empty(size, np.int64), np.empty((size, longest), np.int32)
    turned, narrow = np.empty((side, 3 * side), np.uint8), np.empty((size, 3 * side), np.uint8)
    rows, total = np.empty((side, 3 * size), np.uint8), np.empty(3 * max(side, size), np.int32)
    for n in range(out.shape[0]):
        top, left, height, width = boxes[n]
        _filter(width, size, flip[n], first_x, count_x, share_x)
        _filter(height, size, False, first_y, count_y, share_y)
        for channel in range(3):
            box = images[source[n], channel, top : top + height, left : left + width]
            _turn(box, turned[:, channel * height : (channel + 1) * height])
        levels = total[: 3 * height]
        for j in range(size):
            _weighted(turned[first_x[j] :, : 3 * height], share_x[j], count_x[j], levels)
            line = narrow[j]
            for i in range(3 * height):
                line[i] = levels[i] >> _SHARE_BITS
        for channel in range(3):
            part = narrow[:, channel * height : (channel + 1) * height]
            _turn(part, rows[:, channel * size : (channel + 1) * size])
        levels = total[: 3 * size]
        for i in range(size):
            _weighted(rows[first_y[i] :], share_y[i], count_y[i], levels)
            for channel in range(3):
                pixels, whole = out[n, channel, i], levels[channel * size : (channel + 1) * size]
                for j in range(size):
                    pixels[j] = np.float32(whole[j] >> _SHARE_BITS) / _WHITE


@compiled
def _clamped(value: Any) -> Any:
    value = _0 if value < _0 else value
    return _1 if value > _1 else value


@compiled
def _luminance(red: Any, green: Any, blue: Any) -> Any:
    return (red * _RED + green * _GREEN) + blue * _BLUE


@compiled
def _brightness(x: Any, factor: Any) -> None:
    for channel in range(3):
        line = x[channel]
        for i in range(line.shape[0]):
            line[i] = _clamped(line[i] * factor)


@compiled
def _contrast(x: Any, factor: Any) -> None:
    red, green, blue = x[0], x[1], x[2]
    total = np.int64(0)
    for i in range(red.shape[0]):
        total += np.int32(np.rint(_luminance(red[i], green[i], blue[i]) * _GREY_STEPS))
    mean = np.float32(total / (2.0**24 * red.shape[0]))
    offset = (_1 - factor) * mean
    for channel in range(3):
        line = x[channel]
        for i in range(line.shape[0]):
            line[i] = _clamped(line[i] * factor + offset)


@compiled
def _saturation(x: Any, factor: Any) -> None:
    red, green, blue = x[0], x[1], x[2]
    rest = _1 - factor
    for i in range(red.shape[0]):
        grey = _luminance(red[i], green[i], blue[i]) * rest
        red[i] = _clamped(red[i] * factor + grey)
        green[i] = _clamped(green[i] * factor + grey)
        blue[i] = _clamped(blue[i] * factor + grey)


@compiled
def _of_hue(hue: Any, chroma: Any, value: Any, own: Any) -> Any:
    distance = abs(hue - chroma * own)
    around = abs(chroma * _6 - distance)
    distance = (distance if distance < around else around) - chroma
    distance = _0 if distance < _0 else distance
    return value - (distance if distance < chroma else chroma)


@compiled
def _hue(x: Any, turns: Any) -> None:
    red, green, blue = x[0], x[1], x[2]
    sextants = _6 * turns
    for i in range(red.shape[0]):
        r, g, b = red[i], green[i], blue[i]
        value = r if r > g else g
        value = value if value > b else b
        least = r if r < g else g
        least = least if least < b else b
        chroma = value - least
        below, towards_green = value - r, g - b
        side = below * _2 - chroma
        sign = _1 if side > _0 else (-_1 if side < _0 else _0)
        hue = abs((sign * (chroma - abs(towards_green)) + below) + chroma)
        hue = (-hue if towards_green < _0 else hue) + chroma * sextants
        red[i] = _of_hue(hue, chroma, value, _0)
        green[i] = _of_hue(hue, chroma, value, _2)
        blue[i] = _of_hue(hue, chroma, value, _4)


@compiled
def _grey(x: Any) -> None:
    red, green, blue = x[0], x[1], x[2]
    for i in range(red.shape[0]):
        grey = _luminance(red[i], green[i], blue[i])
        red[i] = grey
        green[i] = grey
        blue[i] = grey


@compiled
def _add_pairs(total: Any, before: Any, after: Any, share: Any) -> None:
    for i in range(total.shape[0]):
        total[i] += (before[i] + after[i]) * share


@compiled
def _blur(x: Any, share: Any, padded: Any, half: Any) -> None:
    """Of one picture [3, s, s]; share [radius + 1]. padded [s + 2 radius] and half [s, s] are room to work in."""
    size, radius = x.shape[2], share.shape[0] - 1
    last = radius
    while last > 0 and share[last] == _0:
        last -= 1
    for channel in range(3):
        for i in range(size):
            line, total = x[channel, i], half[i]
            padded[radius : radius + size] = line
            for d in range(1, last + 1):
                padded[radius - d] = line[d]
                padded[radius + size - 1 + d] = line[size - 1 - d]
            for j in range(size):
                total[j] = line[j] * share[0]
            for d in range(1, last + 1):
                _add_pairs(total, padded[radius - d :], padded[radius + d :], share[d])
        for i in range(size):
            total, line = x[channel, i], half[i]
            for j in range(size):
                total[j] = line[j] * share[0]
            for d in range(1, last + 1):
                above, below = abs(i - d), size - 1 - abs(size - 1 - i - d)
                _add_pairs(total, half[above], half[below], share[d])


@compiled
def colour(
    x: Pictures,
    swap: BoolArray,
    grey: BoolArray,
    grey_first: bool,
    order: IntArray,
    factors: Pictures,
    blurred: IntArray,
    shares: Pictures,
    solarize: BoolArray,
) -> None:
    """Everything that changes colours, in place on x float32 [N, 3, s, s], picture by picture.

    order: int64 [N, 4] and factors: float32 [N, 4] as in views.ViewParameters. blurred: int64 [N], the row of `shares`
    [n, radius + 1] that a picture is blurred with, -1 for none.
    """
    size, radius = x.shape[3], shares.shape[1] - 1
    padded, half = np.empty(size + 2 * radius, np.float32), np.empty((size, size), np.float32)
    for n in range(x.shape[0]):
        picture = x[n].reshape(3, size * size)
        if swap[n]:
            red, blue = picture[0], picture[2]
            for i in range(red.shape[0]):
                red[i], blue[i] = blue[i], red[i]
        if grey_first and grey[n]:
            _grey(picture)
        for step in range(4):
            due = order[n, step]
            if due == 0:
                _brightness(picture, factors[n, 0])
            elif due == 1:
                _contrast(picture, factors[n, 1])
            elif due == 2:
                _saturation(picture, factors[n, 2])
            elif due == 3:
                _hue(picture, factors[n, 3])
        if not grey_first and grey[n]:
            _grey(picture)
        if blurred[n] >= 0:
            _blur(x[n], shares[blurred[n]], padded, half)
        if solarize[n]:
            for channel in range(3):
                line = picture[channel]
                for i in range(line.shape[0]):
                    line[i] = line[i] if line[i] < _HALF else _1 - line[i]


@compiled
def normalise(x: Pictures, mean: Pictures, std: Pictures) -> None:
    """x = (x - mean) / std in place, channel by channel; x float32 [N, 3, s, s], mean and std float32 [3]."""
    for n in range(x.shape[0]):
        for channel in range(3):
            for i in range(x.shape[2]):
                line = x[n, channel, i]
                for j in range(line.shape[0]):
                    line[j] = (line[j] - mean[channel]) / std[channel]
