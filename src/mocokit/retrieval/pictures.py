"""The pictures behind an index's ids: found again in their sources, decoded within limits, encoded anew to be shown.

A clip is shown as a strip of four of its frames side by side, which stands still, and as a preview that moves.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mocokit.data.clips import ClipSource
from mocokit.data.decode import UnreadableImageError
from mocokit.data.pixels import fit_picture, read_fitting
from mocokit.errors import DataError, UsageError
from mocokit.retrieval.encode import STRIP_FRAMES, Source, strip, thumbnail_bytes
from mocokit.retrieval.index import SearchIndex
from mocokit.retrieval.sources import open_rows

FULL_SIDE = 2048
"""The longer side of a picture that is opened in full, at most."""
_CACHE_BYTES = 64 * 2**20
_PREVIEW_FRAMES = 16
"""Frames of a moving preview, at most."""


class Pictures:
    """Pictures by id. Only ids of living rows are answered; names are never taken from outside."""

    def __init__(self, index: SearchIndex, warn: Callable[[str], None]) -> None:
        self._sources: list[Source | None] = [_open(facts, warn) for facts in index.facts["sources"]]
        alive = index.rows.alive
        self._source_of = dict(zip(index.rows.ids[alive].tolist(), index.rows.sources[alive].tolist(), strict=True))
        self._rows = [None if source is None else _Places(source) for source in self._sources]
        self._cache: OrderedDict[tuple[str, int, int], tuple[str, bytes]] = OrderedDict()
        self._cached = 0
        self._lock = threading.Lock()

    def thumbnail(self, sample: int, side: int) -> tuple[str, bytes] | None:
        """(media type, bytes) of at most `side` pixels; None for an unknown id or an unreadable picture.

        Of a clip four frames side by side, `side` pixels in all.
        """
        return self._kept("still", sample, side, self._still)

    def preview(self, sample: int, side: int) -> tuple[str, bytes] | None:
        """A clip that plays over and over, an animated WebP of at most `side` pixels; of a picture its thumbnail."""
        return self._kept("moving", sample, side, self._moving)

    def _still(self, sample: int, side: int) -> tuple[str, bytes] | None:
        rgb = self._read(sample, side)
        if rgb is None:
            return None
        if rgb.ndim == 4:
            rgb = strip(rgb, max(1, side // STRIP_FRAMES))
        data = thumbnail_bytes(rgb, side)
        return ("image/png" if data.startswith(b"\x89PNG") else "image/jpeg"), data

    def _moving(self, sample: int, side: int) -> tuple[str, bytes] | None:
        rgb = self._read(sample, side)
        if rgb is None or rgb.ndim == 3:
            return self._still(sample, side)
        return "image/webp", moving_bytes(rgb)

    def _kept(
        self, kind: str, sample: int, side: int, make: Callable[[int, int], tuple[str, bytes] | None]
    ) -> tuple[str, bytes] | None:
        """What was made before, or is made now and kept while there is room."""
        key = (kind, sample, side)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        made = make(sample, side)
        if made is None:
            return None
        data = made[1]
        with self._lock:
            if key not in self._cache:
                self._cache[key] = made
                self._cached += len(data)
            while self._cached > _CACHE_BYTES:
                self._cached -= len(self._cache.popitem(last=False)[1][1])
        return made

    def full(self, sample: int) -> tuple[str, bytes] | None:
        """(media type, bytes) of the picture itself, up to 2,048 pixels, without its metadata; of a clip all frames."""
        rgb = self._read(sample, FULL_SIDE)
        if rgb is None:
            return None
        if rgb.ndim == 4:
            most = min(len(rgb), _PREVIEW_FRAMES)
            rgb = strip(rgb, max(FULL_SIDE // most, 1), most)
        out = io.BytesIO()
        image = Image.fromarray(fit_picture(rgb, FULL_SIDE))
        if max(image.size) <= 256:
            image.save(out, "PNG")
            return "image/png", out.getvalue()
        image.save(out, "JPEG", quality=90)
        return "image/jpeg", out.getvalue()

    def _read(self, sample: int, side: int) -> npt.NDArray[np.uint8] | None:
        number = self._source_of.get(sample)
        if number is None:
            return None
        source, places = self._sources[number], self._rows[number]
        if source is None or places is None or (row := places.row_of(sample)) is None:
            return None
        try:
            if isinstance(source, ClipSource):  # all frames of a clip together are no larger than a picture in full
                return source.read(row, min(side, FULL_SIDE // min(source.config.frames, _PREVIEW_FRAMES)))
            return read_fitting(source, row, side)
        except UnreadableImageError:
            return None  # shown as not readable


def moving_bytes(clip: npt.NDArray[np.uint8]) -> bytes:
    """Frames [T, H, W, 3] as an animated WebP that plays over and over, at most 16 of them, evenly spread."""
    places = np.unique(np.linspace(0, len(clip) - 1, min(_PREVIEW_FRAMES, len(clip))).round().astype(np.int64))
    frames = [Image.fromarray(clip[place]) for place in places.tolist()]
    out = io.BytesIO()
    frames[0].save(out, "WEBP", save_all=True, append_images=frames[1:], duration=120, loop=0, quality=70, method=2)
    return out.getvalue()


class _Places:
    """Rows of a source by id."""

    def __init__(self, source: Source) -> None:
        self.order = np.argsort(source.index.ids, kind="stable")
        self.ids = source.index.ids[self.order]

    def row_of(self, sample: int) -> int | None:
        place = int(np.searchsorted(self.ids, sample))
        return int(self.order[place]) if place < len(self.ids) and self.ids[place] == sample else None


def _open(facts: dict[str, Any], warn: Callable[[str], None]) -> Source | None:
    """A source of the index, or None, with a warning, when it is no longer there."""
    try:
        return open_rows(
            facts["spec"],
            facts.get("reading"),
            split=facts["split"],
            label_column=facts["label_column"],
            group_column=facts["group_column"],
        )
    except (UsageError, DataError) as error:
        warn(f"the pictures of {facts['name']} can't be shown: {error}")
        return None
