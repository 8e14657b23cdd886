"""The pictures of a trace: one row for each image that it names, thumbnails within a bound of bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mocokit.contrast.key_queue import NO_ID
from mocokit.training import trace_format as form

UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Pictured:
    """What is known of an image: its name, its label where it has one, its pixels uint8 [h, w, 3]."""

    name: str
    label: str | None
    pixels: UInt8


class ImageTable:
    """The `images` of a trace, by id. describe: what is known of an image by its id; an id may be unknown."""

    def __init__(self, describe: Callable[[int], Pictured | None]) -> None:
        self.describe = describe
        self.entries: list[dict[str, Any]] = []
        self._rows: dict[int, int] = {}
        self._bytes = 0

    def take_over(self, entries: list[dict[str, Any]]) -> None:
        """Go on with the table of an earlier recording."""
        self.entries = entries
        self._rows = {int(image["id"]): number for number, image in enumerate(entries)}
        self._bytes = sum(len(image.get("thumb") or "") for image in entries)

    def row(self, number: int, *, picture: bool) -> int:
        """The row of an image's id, made when it is new; -1 for no id. picture: worth a thumbnail."""
        if number == NO_ID:
            return -1
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = len(self.entries)
            self.entries.append({"id": str(number)})
        if picture and "thumb" not in self.entries[row] and self._bytes < form.PICTURE_BYTES:
            known = self.describe(number)
            if known is not None:
                thumb = self.thumbnail(known.pixels)
                self.entries[row] |= {"name": known.name[:300], "label": known.label, "thumb": thumb}
        return row

    def thumbnail(self, pixels: UInt8) -> str:
        """A picture as a data URL, at most 32 px, PNG; counted against the bound of the file."""
        if max(pixels.shape[:2]) > form.THUMBNAIL:
            image = Image.fromarray(pixels)
            image.thumbnail((form.THUMBNAIL, form.THUMBNAIL), Image.Resampling.BOX)
            pixels = np.asarray(image)
        text = "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")
        self._bytes += len(text)
        return text


def png(pixels: UInt8) -> bytes:
    """The PNG of uint8 [h, w, 3]; at 32 px more effort makes it hardly shorter."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()
