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
Weights = npt.NDArray[np.float64]

_0, _HALF, _1, _2, _4, _6 = (np.float32(value) for value in (0.0, 0.5, 1.0, 2.0, 4.0, 6.0))
_RED, _GREEN, _BLUE = np.float32(0.2989), np.float32(0.587), np.float32(0.114)
_WHITE = np.float32(255.0)
_GREY_STEPS = np.float32(2**24)
_FINE, _SHARE, _ROUND, _SHARE_BITS = 2.0**32, 2.0**16, 2**15, 16
_8, _16, _24 = (np.uint32(bits) for bits in (8, 16, 24))


@compiled
def _filter(
    length: int, size: int, mirrored: bool, first: IntArray, count: IntArray, share: Shares, room: Weights
) -> None:
    """Pillow's triangle filter along one side: of each output pixel the first input, how many, and their shares.

    first, count: int64 [s], filled; share: int32 [s, taps], filled with multiples of 2^-16. room: float64
    [taps + 1, s], to work in. See image_ops._taps.
    """
    scale = length / size
    support = max(scale, 1.0)
    taps = 2 * math.ceil(support) + 1
    total = room[taps]
    total[:] = 0.0
    for t in range(taps):
        weight = room[t]
        for place in range(size):
            centre = ((size - 1 - place if mirrored else place) + 0.5) * scale
            pixel = math.floor(centre - support + 0.5) + t
            raw = 1 - abs(pixel + 0.5 - centre) / support
            inside = pixel >= 0 and pixel < length and raw > 0
            weight[place] = np.rint((raw if inside else 0.0) * _FINE)
            total[place] += weight[place]
    for t in range(taps):
        weight = room[t]
        for place in range(size):
            weight[place] = np.rint(weight[place] * (_SHARE / total[place]))
    for place in range(size):
        centre = ((size - 1 - place if mirrored else place) + 0.5) * scale
        t = 0
        while room[t, place] == 0:
            t += 1
        first[place], used = math.floor(centre - support + 0.5) + t, 0
        while t < taps and room[t, place] > 0:
            share[place, used] = np.int32(room[t, place])
            t, used = t + 1, used + 1
        count[place] = used


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
def _levels_of_two(a: Any, b: Any, w: Any, v: Any, level: Any) -> None:
    """level [L], uint8 = what `_weighted` gives for two lines (the usual number), without its fraction."""
    for i in range(level.shape[0]):
        level[i] = (a[i] * w + b[i] * v + _ROUND) >> _SHARE_BITS


@compiled
def _turn(picture: Any, words: Any, start: int, line: Any) -> None:
    """Columns of picture [h, w], uint8, become lines: four pixels a word (the lowest byte first), from word `start` on.

    words: uint32 [w, ...]; line: uint32 [w], to work in. A last word that is not full repeats the last row. One pixel
    at a time it takes twice as long, and more where the rows of the picture lie a power of two apart in memory.
    """
    height, width = picture.shape
    last = height - 1
    for block in range((height + 3) // 4):
        i = 4 * block
        a, b, c, d = picture[i], picture[min(i + 1, last)], picture[min(i + 2, last)], picture[min(i + 3, last)]
        for j in range(width):
            line[j] = (np.uint32(a[j]) | np.uint32(b[j]) << _8) | (np.uint32(c[j]) << _16 | np.uint32(d[j]) << _24)
        place = start + block
        for j in range(width):
            words[j, place] = line[j]


@compiled
def _words(pixels: int) -> int:
    """Words of a line of that many pixels of three channels: whole cache lines, and an odd number of them.

    What lies an even number of lines apart shares too few places in the cache for a column of them.
    """
    lines = (3 * ((pixels + 3) // 4) + 15) // 16
    return 16 * (lines if lines % 2 else lines + 1)


@compiled
def crop_resize(images: Levels, source: IntArray, boxes: IntArray, flip: BoolArray, out: Pictures) -> None:
    """image_ops.crop_resize into out, float32 [N, 3, s, s]. Picture n is cut from images[source[n]], [B, 3, S, S].

    Both passes run along lines as long as can be, the three channels one after the other, each begun at a whole word:
    columns are shrunk first, with a column as a line of the picture turned over, then rows. Lines are gone through by
    four words, beyond their end too: what stands there is used by nobody.
    """
    size, side = out.shape[3], images.shape[3]
    longest = 2 * math.ceil(max(1.0, side / size)) + 1
    first_x, count_x, share_x = np.empty(size, np.int64), np.empty(size, np.int64), np.empty((size, longest), np.int32)
    first_y, count_y, share_y = np.empty(size, np.int64), np.empty(size, np.int64), np.empty((size, longest), np.int32)
    weights = np.empty((longest + 1, size))
    columns, lines = np.empty((side, _words(side)), np.uint32), np.empty((side, _words(size)), np.uint32)
    columns_u8, lines_u8 = columns.view(np.uint8), lines.view(np.uint8)
    narrow = np.empty((size, columns_u8.shape[1]), np.uint8)
    most = max(columns_u8.shape[1], lines_u8.shape[1])
    line, sums = np.empty(max(side, size), np.uint32), np.empty(most, np.int32)
    across = (size + 3) // 4
    for n in range(out.shape[0]):
        top, left, height, width = boxes[n]
        _filter(width, size, flip[n], first_x, count_x, share_x, weights)
        _filter(height, size, False, first_y, count_y, share_y, weights)
        down = (height + 3) // 4
        for channel in range(3):
            box = images[source[n], channel, top : top + height, left : left + width]
            _turn(box, columns, channel * down, line)
        length = (3 * down + 3) // 4 * 16
        total = sums[:length]
        for j in range(size):
            column, level = columns_u8[first_x[j] :, :length], narrow[j, :length]
            if count_x[j] == 2:
                _levels_of_two(column[0], column[1], share_x[j, 0], share_x[j, 1], level)
                continue
            _weighted(column, share_x[j], count_x[j], total)
            for i in range(length):
                level[i] = total[i] >> _SHARE_BITS
        for channel in range(3):
            begin = 4 * channel * down
            _turn(narrow[:, begin : begin + height], lines, channel * across, line)
        length = (3 * across + 3) // 4 * 16
        total = sums[:length]
        for i in range(size):
            _weighted(lines_u8[first_y[i] :, :length], share_y[i], count_y[i], total)
            for channel in range(3):
                begin = 4 * channel * across
                pixels, whole = out[n, channel, i], total[begin : begin + size]
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
