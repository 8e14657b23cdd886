"""From rows of a source of pictures or clips to vectors, chunk by chunk; what can't be read is named and left out."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from mocokit.data.clips import ClipSource
from mocokit.data.decode import UnreadableImageError
from mocokit.data.pixels import SkippedSample, fit_picture, read_fitting, side_for
from mocokit.data.sources import ImageSource
from mocokit.errors import DataError
from mocokit.evaluation.features import CLIPS_AT_ONCE, IMAGES_AT_ONCE, extract
from mocokit.exporting.loading import FrozenEncoder

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

Source = ImageSource | ClipSource
STRIP_FRAMES = 4
"""Frames of a clip that stand side by side in its still picture."""

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
    """Pictures (or clips) as evaluation keeps them (see `PixelStore`), for a few rows at a time."""

    pixels: UInt8Array
    extents: npt.NDArray[np.int64]

    def batch(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """uint8 [B, 3, side, side] or [B, 3, T, side, side], and int64 [B, 2] (height, width)."""
        return torch.from_numpy(self.pixels[rows]), torch.from_numpy(self.extents[rows])


def chunk_rows(side: int, clip: int = 0) -> int:
    """How many pictures (or clips of so many frames) of a canvas of `side` pixels are in memory at a time."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (3 * side * side * max(clip, 1))))


def canvas_side(source: Source, size: int) -> int:
    """The canvas side for views of `size` pixels (see `side_for`)."""
    return side_for(source.frames if isinstance(source, ClipSource) else source, size)


def encode_source(
    frozen: FrozenEncoder,
    source: Source,
    *,
    max_bad: float = 0.01,
    progress: Callable[[int, int], None] | None = None,
) -> Encoded:
    """Vectors of all readable rows of a source, in its order. Raises DataError when too many can't be read."""
    side = canvas_side(source, frozen.views.size)
    step = chunk_rows(side, frozen.clip)
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
    frozen: FrozenEncoder, source: Source, rows: Ints, *, side: int, thumbnail: int | None = None
) -> Encoded:
    """Vectors of the readable ones of `rows`, not normalised: what the evaluation's features are, to the last bit.

    side: of the canvas, from `canvas_side`. thumbnail: also make thumbnails, their longer side at most so many pixels.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="decode") as pool:
        parts = pool.map(lambda part: [_read(source, row, side, thumbnail) for row in part], _together(source, rows))
        read = [one for part in parts for one in part]
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
    """Vectors float32 [M, D] of pictures uint8 [H, W, 3], or clips [T, H, W, 3], that fit a canvas of `side` pixels."""
    time = (frozen.clip,) if frozen.clip else ()
    pixels = np.zeros((len(pictures), 3, *time, side, side), np.uint8)
    extents = np.zeros((len(pictures), 2), np.int64)
    for number, picture in enumerate(pictures):
        height, width = picture.shape[-3:-1]
        pixels[number, ..., :height, :width] = np.moveaxis(picture, -1, 0)
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
        batch=CLIPS_AT_ONCE if frozen.clip else IMAGES_AT_ONCE,
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


def strip(clip: UInt8Array, side: int, most: int = STRIP_FRAMES) -> UInt8Array:
    """Up to `most` frames of a clip [T, H, W, 3], evenly spread, side by side; none has a side above `side`."""
    places = np.unique(np.linspace(0, len(clip) - 1, min(most, len(clip))).round().astype(np.int64))
    return np.concatenate([fit_picture(clip[place], side) for place in places.tolist()], axis=1)


def _together(source: Source, rows: Ints) -> list[list[int]]:
    """Rows that one thread reads: a picture, or the clips of a video one after the other."""
    if not isinstance(source, ClipSource):
        return [[row] for row in rows.tolist()]
    cuts = [0, *(np.flatnonzero(np.diff(source.video[rows])) + 1).tolist(), len(rows)]
    return [rows[start:stop].tolist() for start, stop in itertools.pairwise(cuts)]


def _read(source: Source, row: int, side: int, thumbnail: int | None) -> tuple[UInt8Array, bytes] | str:
    """The picture (or clip) fitted into the canvas, and its thumbnail (a strip); or why it can't be read."""
    try:
        if isinstance(source, ClipSource):
            clip = source.read(row, side)
            if not thumbnail:
                return clip, b""
            frames = strip(clip, max(1, thumbnail // STRIP_FRAMES))
            return clip, thumbnail_bytes(frames, thumbnail)
        picture = fit_picture(read_fitting(source, row, side), side)
        small = b""
        if thumbnail:
            larger = picture if thumbnail <= side else read_fitting(source, row, thumbnail)
            small = thumbnail_bytes(larger, thumbnail)
        return picture, small
    except UnreadableImageError as error:
        return error.reason
