"""Bytes of a picture -> RGB uint8, within limits, or a reason why not.

Only the formats named in `FORMATS` are ever handed to a decoder. The pixel limit is checked against the header
before anything is decoded, so a 20 kB file can't ask for gigabytes. What each Pillow mode becomes:

| mode | what it becomes |
|---|---|
| `RGB` | as it is; 16-bit RGB files arrive here too (their upper byte) |
| `1`, `L` | grey in all three channels |
| `P` | the palette's colours |
| `LA`, `La`, `PA`, `RGBA`, `RGBa` | composited on `DecodeLimits.background` (white) |
| `1`, `L`, `P`, `RGB` with a transparent colour | the same |
| `CMYK`, `YCbCr`, `HSV` | RGB by Pillow's formulas; colour profiles are not applied |
| `LAB` | sRGB through LittleCMS |
| `I;16`, `I;16L`, `I;16B`, `I;16N` | value x 255 / (2^bits - 1), bits = 16, or 12 where a TIFF says so |
| `I`, all values in 0..65535 (16-bit PGM) | value x 255 / 65535 |
| `I`, other values (signed, 32-bit) | the picture's own minimum..maximum to 0..255 |
| `F`, largest value <= 1 | clipped to 0..1, x 255; NaN is black |
| `F`, larger values | clipped to 0..255; NaN is black |

White-is-zero TIFFs are inverted at every depth; a transparent value of 16-bit grey is ignored.
EXIF (or XMP) orientation 1 to 8 is applied. Of an animation or a many-page TIFF the first picture is taken.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

# Named, so that opening never makes Pillow import every plugin it has (EPS, PDF, ...) to find these two.
from PIL import Image, ImageCms, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin  # noqa: F401

from mocokit.errors import DataError, UsageError

UInt8Array = npt.NDArray[np.uint8]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_PILLOW_PIXELS = 178_956_970  # above this Pillow itself refuses, whatever the limit here says
_SLOW_PIXELS = 2_000_000  # text PNMs are parsed by a Python loop: about 2 s at this size

_ORIENTATION = 0x0112
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# What Pillow raises for bad files. Each was met on real or fuzzed files, or stands in the plugins' source.
_BAD_FILE = (
    OSError,  # the usual one: truncated data, decoder errors, UnidentifiedImageError
    ValueError,
    EOFError,
    TypeError,
    SyntaxError,
    NotImplementedError,
    IndexError,
    KeyError,
    AssertionError,
    AttributeError,
    OverflowError,
    ZeroDivisionError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    ImageCms.PyCMSError,
)


_OTHERS = {
    b"<!doctype": "HTML",
    b"<html": "HTML",
    b"<svg": "SVG",
    b"%pdf": "PDF",
    b"%!ps": "PostScript",
    b"8bps": "Photoshop",
    b"version https://git-lfs": "a Git LFS pointer",
    b"pk\x03\x04": "a zip file",
}
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC", b"hevc": "HEIC"}


class UnreadableImageError(DataError):
    """One picture can't be decoded. `reason` is one line, without any path."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """What a picture may cost, and what lies behind transparent ones."""

    max_pixels: int = 50_000_000
    """Largest width x height, checked in the header before decoding; at most 178,956,970."""
    max_bytes: int = 100_000_000
    """Largest encoded size in bytes. Parsing time grows with it, so it also bounds what a hostile file can take."""
    background: tuple[int, int, int] = (255, 255, 255)
    """RGB, each 0..255, on which transparent pictures are composited."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_pixels <= _PILLOW_PIXELS:
            raise UsageError(f"max_pixels is {self.max_pixels:,}; choose 1 to {_PILLOW_PIXELS:,}.")
        if self.max_bytes < 1:
            raise UsageError(f"max_bytes is {self.max_bytes:,}; it must be at least 1.")
        if len(self.background) != 3 or not all(0 <= value <= 255 for value in self.background):
            raise UsageError(f"background is {self.background}; give three numbers from 0 to 255.")


def decode(data: bytes, limits: DecodeLimits | None = None, *, fit: int | None = None) -> UInt8Array:
    """The picture in `data` as RGB uint8 [H, W, 3], upright.

    `fit` says that the caller will shrink the picture until its longer side is at most `fit` pixels: a JPEG is
    then decoded at 1/2, 1/4 or 1/8 of its size (DCT scaling), never below twice what will be kept. The result
    may be of any size from there up. Raises UnreadableImageError for everything that isn't such a picture.
    """
    limits = limits or DecodeLimits()
    _check_bytes(data, limits)
    with _reading(data):
        image = _open(data)
        _check_pixels(image.size, limits)
        return to_rgb(_load(image, data, fit), limits.background)


def decode_indices(data: bytes, limits: DecodeLimits | None = None) -> UInt8Array:
    """The numbers in a mask (palette positions, grey levels or bits) as uint8 [H, W], never turned into colours.

    Raises UnreadableImageError for what isn't a picture, or one whose pixels are no single numbers of 0..255.
    """
    limits = limits or DecodeLimits()
    _check_bytes(data, limits)
    with _reading(data):
        image = _open(data)
        _check_pixels(image.size, limits)
        if image.mode not in ("1", "L", "P"):
            raise UnreadableImageError(f"mode {image.mode}, where a mask needs one number of 0 to 255 a pixel")
        return np.array(_load(image, data, None), np.uint8)


def picture_size(data: bytes, limits: DecodeLimits | None = None) -> tuple[int, int]:
    """(height, width) from the header alone, as the picture is stored (before orientation)."""
    limits = limits or DecodeLimits()
    _check_bytes(data, limits)
    with _reading(data):
        image = _open(data)
        _check_pixels(image.size, limits)
        return image.size[1], image.size[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureFacts:
    """What a picture is before it is decoded: as its header says."""

    format: str
    """One of FORMATS."""
    mode: str
    """Pillow's mode."""
    height: int
    """As stored, in pixels, before orientation."""
    width: int
    """The same."""
    orientation: int
    """EXIF orientation, 1 to 8; 1 where there is none."""
    animated: bool
    """More than one frame or page, of which the first is taken."""


def picture_facts(data: bytes, limits: DecodeLimits | None = None) -> PictureFacts:
    """What the header says, with nothing decoded. Raises UnreadableImageError as `decode` does."""
    limits = limits or DecodeLimits()
    _check_bytes(data, limits)
    with _reading(data):
        image = _open(data)
        _check_pixels(image.size, limits)
        return PictureFacts(
            format=image.format or "",
            mode=image.mode,
            height=image.size[1],
            width=image.size[0],
            orientation=_orientation(image),
            animated=_animated(image),
        )


def _check_bytes(data: bytes, limits: DecodeLimits) -> None:
    if not data:
        raise UnreadableImageError("empty file")
    if len(data) > limits.max_bytes:
        raise UnreadableImageError(f"{len(data):,} bytes, more than the limit of {limits.max_bytes:,}")


def _check_pixels(size: tuple[int, int], limits: DecodeLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise UnreadableImageError(f"no pixels ({width} x {height})")
    if width * height > limits.max_pixels:
        raise UnreadableImageError(
            f"{width:,} x {height:,} pixels, more than the limit of {limits.max_pixels:,}; not decoded"
        )


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=FORMATS)


def _load(image: Image.Image, data: bytes, fit: int | None) -> Image.Image:
    """Decode the opened picture and turn it upright."""
    codec = image.tile[0].codec_name if getattr(image, "tile", None) else ""  # type: ignore[attr-defined]
    if codec == "ppm":
        return _load_pnm(image, data)
    if codec == "ppm_plain" and image.size[0] * image.size[1] > _SLOW_PIXELS:
        raise UnreadableImageError(f"text PNM of more than {_SLOW_PIXELS:,} pixels; save it as binary PNM or PNG")
    if fit is not None:
        longer = max(image.size)
        # Twice what will be kept leaves the final, antialiased reduction enough to work with.
        image.draft(None, tuple(max(1, side * 2 * fit // longer) for side in image.size))  # type: ignore[arg-type]
    image.load()
    turn = _TRANSPOSE.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _load_pnm(image: Image.Image, data: bytes) -> Image.Image:
    """A binary PNM whose largest value is no full byte or word; Pillow decodes these in a Python loop."""
    tile = image.tile[0]  # type: ignore[attr-defined]
    if image.mode not in ("L", "I", "RGB"):
        raise UnreadableImageError(f"PNM of mode {image.mode}; save it as PNG")
    largest = tile.args[-1]
    width, height = image.size
    channels = 3 if image.mode == "RGB" else 1
    kind = np.dtype(np.uint8) if largest < 256 else np.dtype(">u2")
    raw = np.frombuffer(data, kind, width * height * channels, tile.offset).reshape(height, width * channels)
    table = _rounded(np.arange(256**kind.itemsize, dtype=np.float32) * np.float32(255 / largest))
    scaled = np.empty(raw.shape, np.uint8)
    for row, values in enumerate(raw):  # row by row: indexing widens every value to 8 bytes
        scaled[row] = table[values]
    return Image.fromarray(scaled.reshape((height, width, channels) if channels == 3 else (height, width)))


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8; 1 when the metadata are broken, since the pixels are fine."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except _BAD_FILE:
        return 1
    return value if isinstance(value, int) else 1


def _animated(image: Image.Image) -> bool:
    """Whether there is a second frame; a broken one counts for nothing, since the first is taken."""
    try:
        return bool(getattr(image, "is_animated", False))
    except _BAD_FILE:
        return False


def to_rgb(image: Image.Image, background: tuple[int, int, int]) -> UInt8Array:
    """An upright, loaded picture of any mode as RGB uint8 [H, W, 3] (the table at the top)."""
    mode = image.mode
    if mode == "F" or mode.startswith("I"):
        grey = _float_grey(image) if mode == "F" else _deep_grey(image)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if mode == "La":  # premultiplied: Pillow converts it to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = Image.new("RGB", image.size, background)
        image.paste(over, mask=over)
    elif mode != "RGB":
        image = image.convert("RGB")
    return np.array(image, np.uint8)


def _deep_grey(image: Image.Image) -> UInt8Array:
    """Grey of more than 8 bits as uint8 [H, W]."""
    values: npt.NDArray[np.float32] = np.asarray(image).astype(np.float32)
    low, high = 0.0, 65535.0
    if image.mode == "I":
        smallest, largest = float(values.min()), float(values.max())
        if smallest < 0 or largest > 65535:
            low, high = smallest, largest if largest > smallest else smallest + 1
    elif (bits := _tiff_tag(image, 258)) is not None and 8 < bits < 16:
        high = float(2**bits - 1)
    if _tiff_tag(image, 262) == 0:  # white is zero: Pillow inverts 8-bit pictures only
        low, high = high, low
    values -= low
    values *= 255 / (high - low)
    return _rounded(values)


def _float_grey(image: Image.Image) -> UInt8Array:
    """Floating-point grey as uint8 [H, W]."""
    values: npt.NDArray[np.float32] = np.array(image, np.float32)
    np.copyto(values, 0, where=np.isnan(values))
    if float(values.max()) <= 1:
        values *= 255
    if _tiff_tag(image, 262) == 0:
        np.subtract(255, values, out=values)
    return _rounded(values)


def _rounded(values: npt.NDArray[np.float32]) -> UInt8Array:
    """Clip to 0..255 and round, in place as far as it goes: a large picture takes hundreds of megabytes."""
    np.clip(values, 0, 255, out=values)
    np.rint(values, out=values)
    return values.astype(np.uint8)


def _tiff_tag(image: Image.Image, tag: int) -> int | None:
    value = image.tag_v2.get(tag) if isinstance(image, TiffImagePlugin.TiffImageFile) else None
    value = value[0] if isinstance(value, tuple) and value else value
    return value if isinstance(value, int) else None


# ------------------------------------------------------------------------------------------ errors and warnings


@contextlib.contextmanager
def _reading(data: bytes) -> Iterator[None]:
    """Everything Pillow raises becomes an UnreadableImageError; what it warns about stays silent."""
    with _pillow_warnings.silenced():
        try:
            yield
        except UnreadableImageError:
            raise
        except UnidentifiedImageError as error:
            raise UnreadableImageError(f"not a {', '.join(FORMATS)} picture{_looks_like(data)}") from error
        except _BAD_FILE as error:
            raise UnreadableImageError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """One line for any of Pillow's errors, with nothing in it that changes from run to run."""
    text = re.sub(r" ?<[^<>]* at 0x[0-9a-f]+>", "", " ".join(str(error).split()))[:200]
    if isinstance(error, MemoryError):
        text = "not enough memory to decode it"
    return text if type(error) is OSError and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def _looks_like(data: bytes) -> str:
    """What the bytes seem to be instead, to help whoever reads the list of skipped files."""
    start = data[:512].lstrip().lower()
    if data[4:8] == b"ftyp":
        return f" (it looks like {_BRANDS.get(data[8:12], 'an MP4 file')})"
    for magic, what in _OTHERS.items():
        if start.startswith(magic):
            return f" (it looks like {what})"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in data[:64]):
        return " (it looks like text)"
    return ""


class _PillowWarnings:
    """Silences Pillow's warnings in threads that are decoding, and nothing else anywhere.

    `warnings.catch_warnings` swaps the filters of the whole process, so two decoding threads would undo each
    other's. This object stands where a warning filter keeps the pattern of the module it applies to: the filter
    is there for everybody, but matches only Pillow's modules and only in a thread inside `silenced()`.
    """

    def __init__(self) -> None:
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._filter = ("ignore", None, Warning, self, 0)

    def match(self, module: str) -> bool:
        """Called by `warnings` with the name of the module that warns."""
        return bool(getattr(self._thread, "depth", 0)) and module.partition(".")[0] == "PIL"

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        filters = cast("list[Any]", warnings.filters)
        if not filters or filters[0] is not self._filter:  # first use, or somebody changed the filters since
            with self._lock:
                filters[:] = [self._filter, *(entry for entry in filters if entry is not self._filter)]
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._thread.depth -= 1


_pillow_warnings = _PillowWarnings()
