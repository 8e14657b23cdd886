"""Whether two pictures are one picture: the same pixels up to size, compression, brightness and contrast.

A perceptual hash (`fingerprints`) only proposes pairs. X-rays of two people, eyes in the same round frame and
catalogue photos of one shape agree in everything that a hash sees, so each proposed pair is looked at here:

    A ~ clip(g B + o) + noise        one gain g and one offset o for the whole picture and all channels

with either of the two as A, whichever leaves less (a copy may have lost its shadows or its lights), judged by

- `structure`: the local correlation of A with clip(g B + o), averaged over the places where there is texture. Borders
  of black or white areas are left out: every picture with the same frame or silhouette agrees there.
- `colour`: what is left of A - clip(g B + o) after blurring, in levels of 0..255, at its 98th percentile. Compression
  noise averages out, another colour of the same shirt stays.
- `cast`: the mean of A - clip(g B + o) in the channel where it is largest, over the places that nothing clipped: what
  is left of a slight change of colour all over, where `colour` can't tell it from compression.

Pictures that were cropped, turned, mirrored or recoloured count as different ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

_GREY = np.array([0.299, 0.587, 0.114], np.float32)
_DARK, _LIGHT = 12.0, 243.0  # levels beyond which a place may be clipped
_GAINS, _SHIFT = (0.4, 2.5), 80.0  # what still counts as brighter, darker, softer or harder
_TINY = np.float32(1e-6)


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike n pairs are, float32 [n] each; explained at the top. Identical pictures have 1, 0, 0."""

    structure: Floats
    colour: Floats
    cast: Floats


def compare(first: npt.NDArray[np.uint8], second: npt.NDArray[np.uint8]) -> Likeness:
    """`Likeness` of n pairs of thumbnails, uint8 [n, s, s, 3] each (any s from 8)."""
    side = first.shape[1]
    one, two = first.astype(np.float32), second.astype(np.float32)
    grey_one, grey_two = one @ _GREY, two @ _GREY
    either = _clipped(grey_one) | _clipped(grey_two)
    grown = _grown(either)
    inside, rim = ~grown, grown & _grown(~either)
    inside[inside.mean((1, 2)) < 0.03] = True
    soft = _blur(side, 1.2)
    A, predicted, gain = _explain(_apply(soft, one), _apply(soft, two), rim)
    left = ((A - predicted) / np.sqrt(gain)[:, None, None, None]).astype(np.float32)
    return Likeness(
        structure=_structure(A @ _GREY, predicted @ _GREY, inside),
        colour=_colour(left, rim),
        cast=_cast(A, predicted, left, inside),
    )


def _clipped(grey: Floats) -> Bools:
    return (grey < _DARK) | (grey > _LIGHT)


def _explain(one: Floats, two: Floats, rim: Bools) -> tuple[Floats, Floats, Floats]:
    """A, clip(g B + o), both [n, s, s, 3], and g [n].

    Of four explanations the one that leaves least: either picture as A, by gain and offset or by a gain alone (where
    few places are free to fit in, an offset is one too many). They are compared on every second place.
    """
    n, side = one.shape[:2]
    step = 2 if side >= 64 else 1
    few = [Z[:, ::step, ::step].reshape(n, -1, 3) for Z in (one, two)]
    keep = ~rim[:, ::step, ::step].reshape(n, -1)
    least = np.full(n, np.inf, np.float32)
    swap, gain, shift = np.zeros(n, np.bool_), np.ones(n, np.float32), np.zeros(n, np.float32)
    for swapped, (Y, X) in enumerate((few, few[::-1])):
        # Where Y is not clipped. X may well be, but then it is not the one that Y was made from.
        free = (_fold(np.minimum, Y) > _DARK) & (_fold(np.maximum, Y) < _LIGHT) & keep
        free[free.mean(1) < 0.01] = True
        for offset in (True, False):
            g, o = _fit(Y, X, free, offset=offset)
            miss = Y - np.clip(g[:, None, None] * X + o[:, None, None], 0, 255)
            left = (_fold(np.add, np.square(miss)) * keep).sum(1) / g
            better = left < least
            least[better], swap[better] = left[better], bool(swapped)
            gain[better], shift[better] = g[better], o[better]
    turn = swap[:, None, None, None]
    A, B = np.where(turn, two, one), np.where(turn, one, two)
    return A, np.clip(gain[:, None, None, None] * B + shift[:, None, None, None], 0, 255), gain


def _fit(Y: Floats, X: Floats, free: Bools, *, offset: bool) -> tuple[Floats, Floats]:
    """g and o [n] of Y ~ g X + o over the places `free` [n, p], those far off left out in a second round."""
    weight = free.astype(np.float32)
    for again in (True, False):
        total = 3 * weight.sum(1) + _TINY
        mean_x, mean_y = (np.matmul(weight[:, None], Z)[:, 0].sum(1) / total * offset for Z in (X, Y))
        dx, dy = X - mean_x[:, None, None], Y - mean_y[:, None, None]
        xx = (_fold(np.add, np.square(dx)) * weight).sum(1)
        xy = (_fold(np.add, dx * dy) * weight).sum(1)
        gain = np.clip((xy + total) / (xx + total), *_GAINS)
        if not again:
            break
        miss = _fold(np.maximum, np.abs(dy - gain[:, None, None] * dx))
        limit = 2.5 * (miss * weight).sum(1) / (weight.sum(1) + _TINY) + 1
        weight *= miss <= limit[:, None]
    shift = np.clip(mean_y - gain * mean_x, -_SHIFT, _SHIFT)
    return gain.astype(np.float32), shift.astype(np.float32)


def _colour(left: Floats, rim: Bools) -> Floats:
    """The 98th percentile of the blurred remainder [n, s, s, 3], its strongest channel at each place."""
    n, side = left.shape[:2]
    kept = (~rim).astype(np.float32)[..., None]
    wide = _blur(side, side / 16)
    coherent = np.abs(_apply(wide, left * kept)) / (_apply(wide, kept) + np.float32(0.05)) * kept
    place = round(0.98 * (side * side - 1))
    found: Floats = np.partition(_fold(np.maximum, coherent).reshape(n, -1), place, axis=1)[:, place]
    return found


def _cast(A: Floats, predicted: Floats, left: Floats, inside: Bools) -> Floats:
    """The mean remainder of the channel where it is largest, over the places that are clipped in no channel."""
    low = np.minimum(_fold(np.minimum, A), _fold(np.minimum, predicted))
    high = np.maximum(_fold(np.maximum, A), _fold(np.maximum, predicted))
    free = (inside & (low > _DARK) & (high < _LIGHT - 8)).astype(np.float32)
    total = free.sum((1, 2))
    mean = np.abs((left * free[..., None]).sum((1, 2))).max(1) / (total + 1)
    found: Floats = np.where(total < 0.02 * inside[0].size, 0, mean).astype(np.float32)
    return found


def _structure(a: Floats, b: Floats, inside: Bools) -> Floats:
    """Local correlation of a and b [n, s, s], averaged with weights that grow with the texture of either."""
    side = a.shape[1]
    seen = inside.astype(np.float32)
    parts = np.stack([seen, seen * a, seen * b, seen * a * a, seen * b * b, seen * a * b], axis=3)
    local = _apply(_blur(side, max(3 * side / 64, 2.0)), parts)
    norm, mean_a, mean_b, square_a, square_b, both = np.moveaxis(local, 3, 0)
    norm = norm + np.float32(1e-3)
    mean_a, mean_b = mean_a / norm, mean_b / norm
    var_a = np.maximum(square_a / norm - mean_a**2, 0)
    var_b = np.maximum(square_b / norm - mean_b**2, 0)
    alike = (both / norm - mean_a * mean_b + 0.5) / np.sqrt((var_a + 0.5) * (var_b + 0.5))
    most = np.maximum(var_a, var_b)
    weight = seen * most / (most + 25)
    found: Floats = ((alike * weight).sum((1, 2)) / (weight.sum((1, 2)) + _TINY)).astype(np.float32)
    return found


def _fold(how: np.ufunc, values: Floats) -> Floats:
    """A reduction over the three channels; numpy's own is slow where the last axis is that short."""
    folded: Floats = how(how(values[..., 0], values[..., 1]), values[..., 2])
    return folded


@functools.cache
def _blur(side: int, sigma: float) -> Floats:
    """A Gaussian as a matrix [s, s], rows summing to 1: blurring is K X K^T, which is fast for many small pictures."""
    place = np.arange(side)
    K = np.exp(-0.5 * ((place[:, None] - place[None]) / sigma) ** 2)
    matrix: Floats = (K / K.sum(1, keepdims=True)).astype(np.float32)
    matrix.setflags(write=False)
    return matrix


def _apply(K: Floats, X: Floats) -> Floats:
    """K X K^T for every channel of X [n, s, s, c]."""
    n, side, _, channels = X.shape
    rows = (K @ X.reshape(n, side, side * channels)).reshape(n, side, side, channels)
    blurred: Floats = np.matmul(K, rows)
    return blurred


def _grown(mask: Bools) -> Bools:
    """`mask` [n, s, s] grown by one place in all eight directions."""
    out = mask.copy()
    out[:, 1:] |= mask[:, :-1]
    out[:, :-1] |= mask[:, 1:]
    grown = out.copy()
    grown[:, :, 1:] |= out[:, :, :-1]
    grown[:, :, :-1] |= out[:, :, 1:]
    return grown
