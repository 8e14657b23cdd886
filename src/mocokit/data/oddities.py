"""What is unusual about a readable picture: nothing that stops a training, everything that may explain its result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mocokit.data.decode import PictureFacts
from mocokit.data.fingerprints import Fingerprints

SMALL_SIDE = 16
LONG = 5.0
"""Longer side over shorter side above which a picture counts as long."""
FAR = 16.0
"""How many times more pixels than the median make a picture far larger than the others."""

_EXTENSIONS = {
    "JPEG": (".jpg", ".jpeg"),
    "MPO": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
}
_KNOWN = tuple(extension for extensions in _EXTENSIONS.values() for extension in extensions)


def oddities(names: Sequence[str], prints: Fingerprints) -> dict[str, list[int]]:
    """What is odd -> rows, ascending. A kind that fits most readable pictures is the set's nature, and left out.

    names: of the rows, as in the sample table.
    """
    found: dict[str, list[int]] = {}
    pixels = prints.shapes.prod(1)
    readable = np.flatnonzero(prints.readable)
    median = float(np.median(pixels[readable])) if len(readable) else 0.0
    mostly_grey = bool(prints.grey[readable].mean() > 0.5) if len(readable) else False
    for row in readable.tolist():
        height, width = prints.shapes[row].tolist()
        for what in _of_shape(height, width, median):
            found.setdefault(what, []).append(row)
        if bool(prints.grey[row]) != mostly_grey:
            found.setdefault("colour among grey pictures" if mostly_grey else "grey among colour pictures", []).append(
                row
            )
        if (facts := prints.facts[row]) is not None:
            for what in _of_file(names[row], facts):
                found.setdefault(what, []).append(row)
    return {what: rows for what, rows in sorted(found.items()) if 2 * len(rows) <= len(readable)}


def _of_shape(height: int, width: int, median: float) -> Iterator[str]:
    if min(height, width) < SMALL_SIDE:
        yield f"a side below {SMALL_SIDE} pixels"
    if max(height, width) > LONG * min(height, width):
        yield f"more than {LONG:g} times as long as wide"
    if height * width > FAR * median:
        yield f"more than {FAR:g} times the pixels of the median picture"


def _of_file(name: str, facts: PictureFacts) -> Iterator[str]:
    if facts.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        yield f"{facts.mode} colours"
    elif facts.mode in ("LA", "La", "PA", "RGBA", "RGBa"):
        yield "transparency (laid on white)"
    elif facts.mode.startswith("I") or facts.mode == "F":
        yield f"deep grey (mode {facts.mode})"
    elif facts.mode in ("1", "P"):
        yield "two colours (1 bit)" if facts.mode == "1" else "a palette"
    if facts.orientation != 1:
        yield "turned or mirrored by its EXIF orientation"
    if facts.animated:
        yield "several frames or pages (the first is used)"
    lower = name.lower()
    if lower.endswith(_KNOWN) and not lower.endswith(_EXTENSIONS.get(facts.format, ())):
        yield f"{facts.format} under another extension"
