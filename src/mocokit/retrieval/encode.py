"""From rows of an image source to vectors, chunk by chunk, with what can't be read named and left out."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from mocokit.data.decode import UnreadableImageError
from mocokit.data.pixels import SkippedSample, fit_picture, read_fitting, side_for
from mocokit.data.sources import ImageSource
from mocokit.errors import DataError
from mocokit.evaluation.features import extract
from mocokit.exporting.loading import FrozenEncoder

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

CHUNK_BYTES = 128 * 2**20
CHUNK_ROWS = 2048
_READERS = 2


@dataclass(frozen=True, slots=True)
class Encoded:
    """The readable ones of some rows: row numbers [M], vectors float32 [M, D], thumbnails (or None); and the rest."""

    rows: Ints
    vectors: Floats
    thumbnails: tuple[bytes, ...] | None
    skipped: tuple[SkippedSample, ...]


@dataclass(frozen=True, slots=True)
class _Canvases:
    """Pictures as evaluation keeps them (see `PixelStore`), for a few rows at a time."""

    pixels: UInt8Array
    extents: npt.NDArray[np.int64]

    def batch(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """uint8 [B, 3, side, side] and int64 [B, 2] (height, width)."""
        return torch.from_numpy(self.pixels[rows]), torch.from_numpy(self.extents[rows])


def chunk_rows(side: int) -> int:
    """How many pictures of a canvas of `side` pixels are in memory at a time."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (3 * side * side)))


def encode_source(
    frozen: FrozenEncoder,
    source: ImageSource,
    *,
    max_bad: float = 0.01,
    progress: Callable[[int, int], None] | None = None,
) -> Encoded:
    """Vectors of all readable rows of a source, in its order. Raises DataError when too many can't be read."""
    side = side_for(source, frozen.views.size)
    step = chunk_rows(side)
    parts = []
    for start in range(0, len(source.index), step):
        rows = np.arange(start, min(start + step, len(source.index)))
        parts.append(encode_rows(frozen, source, rows, side=side))
        check_bad([one for part in parts for one in part.skipped], len(source.index), max_bad, source.name)
        if progress is not None:
            progress(int(rows[-1]) + 1, len(source.index))
    if not parts:
        raise DataError(f"{source.name} has no pictures. Name another source.")
    return Encoded(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.vectors for part in parts]),
        None,
        tuple(one for part in parts for one in part.skipped),
    )


def encode_rows(
    frozen: FrozenEncoder, source: ImageSource, rows: Ints, *, side: int, thumbnail: int | None = None
) -> Encoded:
    """Vectors of the readable ones of `rows`, not normalised: what the evaluation's features are, to the last bit.

    side: of the canvas, from `side_for`. thumbnail: also make thumbnails whose longer side is at most this many pixels.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="decode") as pool:
        read = list(pool.map(lambda row: _read(source, row, side, thumbnail), rows.tolist()))
    good = [number for number, one in enumerate(read) if not isinstance(one, str)]
    skipped = tuple(
        SkippedSample(row=int(rows[number]), name=source.index.names[int(rows[number])], reason=one)
        for number, one in enumerate(read)
        if isinstance(one, str)
    )
    pictures = [one for one in read if not isinstance(one, str)]
    if not pictures:
        return Encoded(rows[:0], np.zeros((0, frozen.dim), np.float32), () if thumbnail else None, skipped)
    vectors = encode_pictures(frozen, [picture for picture, _ in pictures], side)
    small = tuple(data for _, data in pictures) if thumbnail else None
    return Encoded(rows[np.array(good, np.int64)], vectors, small, skipped)


def encode_pictures(frozen: FrozenEncoder, pictures: Sequence[UInt8Array], side: int) -> Floats:
    """Vectors float32 [M, D] of pictures uint8 [H, W, 3] that fit a canvas of `side` pixels."""
    pixels = np.zeros((len(pictures), 3, side, side), np.uint8)
    extents = np.zeros((len(pictures), 2), np.int64)
    for number, picture in enumerate(pictures):
        height, width = picture.shape[:2]
        pixels[number, :, :height, :width] = picture.transpose(2, 0, 1)
        extents[number] = height, width
    views = frozen.views
    device = next(frozen.parameters()).device
    store = _Canvases(pixels, extents)
    rows = np.arange(len(pictures))
    found = extract(
        frozen.encoder,  # type: ignore[arg-type]
        store,
        rows,
        size=views.size,
        mean=views.mean,
        std=views.std,
        device=device,
    )
    return (found.h if frozen.readout.endswith("h") else found.z).numpy()


def check_bad(skipped: Sequence[SkippedSample], rows: int, max_bad: float, name: str) -> None:
    """Raise DataError when more of `rows` pictures are unreadable than the share `max_bad` allows."""
    if len(skipped) > max_bad * rows or (skipped and len(skipped) == rows):
        first = "; ".join(f"{one.name!r} ({one.reason})" for one in skipped[:5])
        raise DataError(
            f"{len(skipped):,} of {rows:,} pictures in {name} can't be read, more than the {max_bad:.2%} that is "
            f"allowed. First: {first}. Remove them, or raise --max-bad."
        )


def unit(vectors: Floats) -> Floats:
    """Rows divided by their length, float32; a zero row stays zero."""
    length = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    scaled: Floats = (vectors / np.maximum(length, 1e-12)[:, None]).astype(np.float32)
    return scaled


def thumbnail_bytes(rgb: UInt8Array, side: int) -> bytes:
    """A picture [H, W, 3] shrunk to at most `side` pixels: PNG where it is tiny, JPEG otherwise. No metadata."""
    small = Image.fromarray(fit_picture(rgb, side))
    out = io.BytesIO()
    if max(small.size) <= 48:
        small.save(out, "PNG")
    else:
        small.save(out, "JPEG", quality=85)
    return out.getvalue()


def _read(source: ImageSource, row: int, side: int, thumbnail: int | None) -> tuple[UInt8Array, bytes] | str:
    """The picture fitted into the canvas, and its thumbnail; or why it can't be read."""
    try:
        picture = fit_picture(read_fitting(source, row, side), side)
        small = b""
        if thumbnail:
            larger = picture if thumbnail <= side else read_fitting(source, row, thumbnail)
            small = thumbnail_bytes(larger, thumbnail)
        return picture, small
    except UnreadableImageError as error:
        return error.reason
