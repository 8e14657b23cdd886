"""Finding the pairs of pictures that are one picture, among many, without comparing all with all in detail.

The perceptual hashes within a Hamming distance propose pairs (the nearest few of each picture, exact search); then
thumbnails of 16, 32 and, for pictures that have as many pixels, 64 pixels are compared (`twins.compare`): the coarser
ones loosely, the last one strictly.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import faiss
import numpy as np
import numpy.typing as npt

from mocokit.data.fingerprints import LARGE, SMALL, Pictures, UInt8Array, perceptual_hash, thumbnail
from mocokit.data.pixels import PixelStore
from mocokit.data.twins import Likeness, compare

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NEIGHBOURS = 5
"""Proposals for each picture. Larger families of twins are joined by what their members find."""
HAMMING = 80
"""Of 255 bits. Copies at half size, JPEG quality 60 and 1.2 times as bright stay below on nearly all real pictures."""
LARGE_LIMITS = (0.97, 5.0, 2.3)
"""Structure at least, colour and cast at most, for pictures that are compared at 64 pixels."""
SMALL_LIMITS = (0.96, 17.0, math.inf)
"""For smaller ones, compared at 32: compression shifts their colours much further."""
_COARSE = (0.88, 25.0, math.inf), (0.92, 15.0, math.inf)  # what lets a pair through at 16 and at 32 pixels
_BATCH = 32
_CACHED = 16_384  # large thumbnails held at once: 200 MB


@dataclass(frozen=True, slots=True)
class Twin:
    """Rows of two pictures that are one, and how far they agree (`twins.Likeness`)."""

    first: int
    second: int
    structure: float
    colour: float


def find_twins(
    pictures: Pictures,
    first: Ints,
    second: Ints | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Twin]:
    """Pairs of near-identical pictures between the rows `first` and `second`, or among `first` when that is None.

    A picture is never its own twin; every pair comes once, the smaller row first. progress: called with (pairs
    verified, pairs).
    """
    hashes = perceptual_hash(pictures.small)
    return verify(pictures, propose(hashes, first, second), progress=progress)


def twins_across(
    store: PixelStore, first: Ints, second: Ints, *, progress: Callable[[int, int], None] | None = None
) -> list[tuple[int, int]]:
    """(row of `first`, row of `second`) for every two pictures of a pixel store that are one picture.

    first, second: rows int64 without a row in common (the test and the training images). What the store keeps of a
    picture is compared, at most 64 x 64 of it. progress: called with (pairs verified, pairs).
    """
    ones = set(first.tolist())
    pictures = _Stored(store, np.concatenate([first, second]))
    return sorted(
        (twin.first, twin.second) if twin.first in ones else (twin.second, twin.first)
        for twin in find_twins(pictures, first, second, progress=progress)
    )


class _Stored:
    """The pictures of a pixel store; thumbnails of `rows` only."""

    def __init__(self, store: PixelStore, rows: Ints) -> None:
        self._store = store
        self.small = np.zeros((len(store), SMALL, SMALL, 3), np.uint8)
        self.longer = store.extents.max(1).astype(np.int64)
        for row in rows.tolist():
            self.small[row] = thumbnail(self._picture(row), SMALL)

    def _picture(self, row: int) -> UInt8Array:
        height, width = self._store.extents[row].tolist()
        return self._store.pixels[row, :, :height, :width].transpose(1, 2, 0)

    def large(self, row: int) -> UInt8Array:
        """[64, 64, 3]."""
        return thumbnail(self._picture(row), LARGE)


def propose(hashes: UInt8Array, first: Ints, second: Ints | None = None) -> Ints:
    """Pairs [P, 2] of rows whose hashes (uint8 [S, 32], of all rows) are near: each once, the smaller row first."""
    base = first if second is None else second
    if not len(first) or not len(base):
        return np.zeros((0, 2), np.int64)
    index = faiss.IndexBinaryFlat(8 * hashes.shape[1])
    index.add(hashes[base])
    distances, places = index.search(hashes[first], min(NEIGHBOURS + 1, len(base)))
    near = (distances <= HAMMING) & (places >= 0)
    pairs = np.stack([np.broadcast_to(first[:, None], places.shape)[near], base[places[near]]], 1)
    return each_once(pairs[pairs[:, 0] != pairs[:, 1]])


def each_once(pairs: Ints) -> Ints:
    """Pairs [P, 2] sorted, the smaller row first, without repetitions."""
    return np.unique(np.sort(pairs.reshape(-1, 2), axis=1), axis=0)


def verify(pictures: Pictures, pairs: Ints, *, progress: Callable[[int, int], None] | None = None) -> list[Twin]:
    """The pairs [P, 2] of rows that are one picture, in their order."""
    small = pictures.small

    def coarse(rows: Ints) -> UInt8Array:
        halved: UInt8Array = small[rows].reshape(-1, SMALL // 2, 2, SMALL // 2, 2, 3).mean((2, 4)).astype(np.uint8)
        return halved

    done, total = 0, len(pairs)

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    alike = _compare(pairs, coarse)
    passed = _within(alike, _COARSE[0])
    tell(int((~passed).sum()))
    pairs = pairs[passed]
    alike = _compare(pairs, lambda rows: small[rows])
    fine = pictures.longer[pairs].min(1, initial=LARGE) >= LARGE
    found = _twins(pairs, alike, ~fine & _within(alike, SMALL_LIMITS))
    passed = fine & _within(alike, _COARSE[1])
    tell(int((~passed).sum()))
    pairs = pairs[passed]
    album = _Album(pictures.large)
    alike = _compare(pairs, album.stack, tell)
    found += _twins(pairs, alike, _within(alike, LARGE_LIMITS))
    return sorted(found, key=lambda twin: (twin.first, twin.second))


def _compare(
    pairs: Ints, thumbnails: Callable[[Ints], UInt8Array], tell: Callable[[int], None] | None = None
) -> Likeness:
    none = np.zeros(0, np.float32)
    parts = [Likeness(none, none, none)]
    for start in range(0, len(pairs), _BATCH):
        part = pairs[start : start + _BATCH]
        parts.append(compare(thumbnails(part[:, 0]), thumbnails(part[:, 1])))
        if tell is not None:
            tell(len(part))
    return Likeness(*(np.concatenate([getattr(part, name) for part in parts]) for name in Likeness.__slots__))


def _within(alike: Likeness, limits: tuple[float, float, float]) -> Bools:
    structure, colour, cast = limits
    return (alike.structure >= structure) & (alike.colour <= colour) & (alike.cast <= cast)


def _twins(pairs: Ints, alike: Likeness, chosen: Bools) -> list[Twin]:
    return [
        Twin(int(a), int(b), float(structure), float(colour))
        for (a, b), structure, colour in zip(pairs[chosen], alike.structure[chosen], alike.colour[chosen], strict=True)
    ]


def families(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Rows joined by pairs, directly or through others: ascending lists, ordered by their first row."""
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        while parent.setdefault(row, row) != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for a, b in pairs:
        low, high = sorted((root(a), root(b)))
        parent[high] = low
    joined: dict[int, list[int]] = {}
    for row in sorted(parent):
        joined.setdefault(root(row), []).append(row)
    return [joined[key] for key in sorted(joined)]


class _Album:
    """Large thumbnails, made when they are asked for; the latest ones are kept."""

    def __init__(self, make: Callable[[int], UInt8Array]) -> None:
        self._make = make
        self._kept: OrderedDict[int, UInt8Array] = OrderedDict()

    def stack(self, rows: Ints) -> UInt8Array:
        return np.stack([self._one(row) for row in rows.tolist()])

    def _one(self, row: int) -> UInt8Array:
        if row not in self._kept:
            self._kept[row] = self._make(row)
            if len(self._kept) > _CACHED:
                self._kept.popitem(last=False)
        self._kept.move_to_end(row)
        return self._kept[row]
