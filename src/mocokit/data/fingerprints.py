"""One look at every picture of a source: exact hashes, a perceptual hash, a small thumbnail, and what is odd about it.

The perceptual hash is the sign pattern of the 16 x 16 lowest frequencies of the grey 32 x 32 thumbnail around their
median (without the mean): 255 bits that a new size, compression or brightness hardly moves. It only proposes pairs;
`twins` decides.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.fft import dctn

from mocokit.data.decode import PictureFacts, UnreadableImageError, decode, picture_facts
from mocokit.data.sources import ImageSource
from mocokit.data.threads import in_order

UInt8Array = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

SMALL, LARGE = 32, 64
"""Sides of the thumbnails that pairs are found and verified with."""
HASH_BYTES = 32
_KEPT = 16  # lowest frequencies in each direction
_CHUNK = 32
_GREY = np.array([0.299, 0.587, 0.114], np.float32)
_FLAT = 2  # levels: a picture that varies by no more is constant


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprints:
    """What one look at S pictures gave. Rows that can't be read have zeros and False."""

    small: UInt8Array
    """[S, 32, 32, 3] thumbnails, the whole picture stretched to a square."""
    shapes: Ints
    """[S, 2] height and width in pixels, upright; 0 where unreadable."""
    file_hash: npt.NDArray[np.uint64]
    """[S, 2] 128 bits of the SHA-256 of the encoded bytes; 0 where there are none."""
    pixel_hash: npt.NDArray[np.uint64]
    """[S, 2] 128 bits of the SHA-256 of shape and decoded RGB."""
    constant: npt.NDArray[np.bool_]
    """[S] one colour all over (within 2 levels)."""
    grey: npt.NDArray[np.bool_]
    """[S] red, green and blue are equal everywhere."""
    facts: tuple[PictureFacts | None, ...]
    """What the headers say; None for pictures without (arrays) and unreadable ones."""
    unreadable: dict[int, str]
    """Row -> reason."""

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """[S] the rows that could be read."""
        out = np.ones(len(self.small), np.bool_)
        out[list(self.unreadable)] = False
        return out


class Pictures(Protocol):
    """What the search for twins needs of S pictures."""

    @property
    def small(self) -> UInt8Array:
        """[S, 32, 32, 3] thumbnails."""

    @property
    def longer(self) -> Ints:
        """[S] the longer side of each picture in pixels, 0 where there is none."""

    def large(self, row: int) -> UInt8Array:
        """[64, 64, 3] thumbnail of a picture whose longer side is at least 64."""


def take_fingerprints(
    source: ImageSource, *, workers: int = 1, progress: Callable[[int, int], None] | None = None
) -> Fingerprints:
    """Decode every row once, in full. Memory: about 3.2 kB a row.

    workers: decoding threads. progress: called with (rows done, rows).
    """
    rows = len(source.index)
    found = Fingerprints(
        small=np.zeros((rows, SMALL, SMALL, 3), np.uint8),
        shapes=np.zeros((rows, 2), np.int64),
        file_hash=np.zeros((rows, 2), np.uint64),
        pixel_hash=np.zeros((rows, 2), np.uint64),
        constant=np.zeros(rows, np.bool_),
        grey=np.zeros(rows, np.bool_),
        facts=(),
        unreadable={},
    )
    facts: list[PictureFacts | None] = [None] * rows

    def work(start: int) -> list[tuple[int, str]]:
        bad = []
        for row in range(start, min(start + _CHUNK, rows)):
            try:
                facts[row] = _look(source, row, found)
            except UnreadableImageError as error:
                bad.append((row, error.reason))
        return bad

    unreadable: dict[int, str] = {}
    starts = range(0, rows, _CHUNK)
    with contextlib.closing(in_order(work, starts, workers=workers, ahead=4 * workers, name="look")) as results:
        for start, bad in zip(starts, results, strict=True):
            unreadable.update(bad)
            if progress is not None:
                progress(min(start + _CHUNK, rows), rows)
    found.unreadable.update(unreadable)
    return Fingerprints(
        small=found.small,
        shapes=found.shapes,
        file_hash=found.file_hash,
        pixel_hash=found.pixel_hash,
        constant=found.constant,
        grey=found.grey,
        facts=tuple(facts),
        unreadable=unreadable,
    )


def _look(source: ImageSource, row: int, found: Fingerprints) -> PictureFacts | None:
    facts = None
    if source.read_bytes is None:
        rgb = source.read(row)
    else:
        data = source.read_bytes(row)
        found.file_hash[row] = _words(hashlib.sha256(data))
        facts = picture_facts(data, source.limits)
        rgb = decode(data, source.limits)
    digest = hashlib.sha256(np.array(rgb.shape, "<i8").tobytes())
    digest.update(np.ascontiguousarray(rgb).data)
    found.pixel_hash[row] = _words(digest)
    found.shapes[row] = rgb.shape[:2]
    found.constant[row] = bool((np.ptp(rgb.reshape(-1, 3), axis=0) <= _FLAT).all())
    found.grey[row] = bool((rgb[..., 0] == rgb[..., 1]).all() and (rgb[..., 1] == rgb[..., 2]).all())
    found.small[row] = thumbnail(rgb, SMALL)
    return facts


def _words(digest: hashlib._Hash) -> npt.NDArray[np.uint64]:
    return np.frombuffer(digest.digest()[:16], "<u8").astype(np.uint64)


def thumbnail(rgb: UInt8Array, side: int) -> UInt8Array:
    """RGB uint8 [H, W, 3] stretched to [side, side, 3]: every value the mean of what it covers."""
    image = Image.fromarray(np.ascontiguousarray(rgb))
    smaller = image.size[0] < side or image.size[1] < side
    filter_ = Image.Resampling.BILINEAR if smaller else Image.Resampling.BOX
    return np.asarray(image.resize((side, side), filter_, reducing_gap=4.0))


def perceptual_hash(small: UInt8Array) -> UInt8Array:
    """255 bits for each of the thumbnails [S, 32, 32, 3], as uint8 [S, 32]; the last bit is 0."""
    out = np.zeros((len(small), HASH_BYTES), np.uint8)
    for start in range(0, len(small), 4096):
        grey = small[start : start + 4096].astype(np.float32) @ _GREY
        low = dctn(grey, axes=(1, 2), norm="ortho")[:, :_KEPT, :_KEPT].reshape(len(grey), -1)[:, 1:]
        bits = low > np.median(low, axis=1, keepdims=True)
        out[start : start + len(grey)] = np.packbits(bits, axis=1)
    return out
