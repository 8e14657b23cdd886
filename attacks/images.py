"""Pictures cut, changed and blown up: `python -m attacks.images` decodes 2,000 of them and counts how each ends."""

from __future__ import annotations

import io
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP")


def seed_pictures() -> dict[str, bytes]:
    """A picture in each format, and variants that take other paths through the decoders."""
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (40, 56, 3), dtype=np.uint8))
    deep = Image.fromarray(rng.integers(0, 65536, (20, 30), dtype=np.uint16))
    made: dict[str, bytes] = {}
    for name, image, options in (
        ("JPEG", rgb, {}),
        ("JPEG progressive", rgb, {"progressive": True, "quality": 90}),
        ("PNG", rgb, {}),
        ("PNG 16", deep, {}),
        ("PNG palette", rgb.quantize(16), {"transparency": 3}),
        ("WEBP", rgb, {}),
        ("WEBP lossless", rgb, {"lossless": True}),
        ("TIFF", rgb, {}),
        ("TIFF lzw", rgb, {"compression": "tiff_lzw"}),
        ("TIFF deflate", deep, {"compression": "tiff_deflate"}),
        ("GIF", rgb.quantize(64), {}),
        ("BMP", rgb, {}),
        ("BMP palette", rgb.quantize(64), {}),
    ):
        out = io.BytesIO()
        image.save(out, name.split()[0], **options)
        made[name] = out.getvalue()
    return made


def mutated(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """`count` damaged files over all formats: cut, bits flipped, bytes overwritten, taken out, or of two formats."""
    rng = np.random.default_rng(seed)
    seeds = seed_pictures()
    names = list(seeds)
    for number in range(count):
        name = names[number % len(names)]
        data = bytearray(seeds[name])
        way = number // len(names) % 6
        if way == 0:
            data = data[: int(rng.integers(0, len(data)))]
        elif way == 1:
            for _ in range(int(rng.integers(1, 20))):
                data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        elif way == 2:  # near the start, where sizes and tables are
            for _ in range(int(rng.integers(1, 6))):
                data[int(rng.integers(min(len(data), 80)))] = int(rng.choice([0, 1, 127, 128, 255]))
        elif way == 3:
            start, length = int(rng.integers(len(data))), int(rng.integers(1, 64))
            data[start : start + length] = bytes(rng.integers(0, 256, length, dtype=np.uint8))
        elif way == 4:
            start, length = int(rng.integers(len(data))), int(rng.integers(1, 200))
            data = data[:start] + data[start + length :]
        else:
            other = seeds[names[int(rng.integers(len(names)))]]
            at = int(rng.integers(8, len(data)))
            data = data[:at] + other[int(rng.integers(len(other))) :]
        yield f"{number} {name} way {way}", bytes(data)


def chunk(kind: bytes, data: bytes) -> bytes:
    """A PNG chunk."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bombs() -> dict[str, bytes]:
    """Files of a few kilobytes that claim, or unpack to, gigabytes."""
    found = {}
    for side in (13_000, 14_000, 60_000):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        rows = zlib.compress(b"\0" * 10_000_000, 9)
        found[f"PNG of {side} x {side}"] = (
            b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
        )
    small = struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0)
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * 50_000_000))
    found["PNG with 50 MB of text"] = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", small)
        + text
        + chunk(b"IDAT", zlib.compress(b"\0" * 20))
        + chunk(b"IEND", b"")
    )
    profile = chunk(b"iCCP", b"p\0\0" + zlib.compress(b"x" * 50_000_000))
    found["PNG with a colour profile of 50 MB"] = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", small)
        + profile
        + chunk(b"IDAT", zlib.compress(b"\0" * 20))
        + chunk(b"IEND", b"")
    )
    frame = b",\0\0\0\0" + struct.pack("<HH", 60_000, 60_000) + b"\0\x08\0"
    found["GIF of 60,000 x 60,000"] = b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + b"\0\0\0" + frame + b";"
    return found


def main() -> None:
    """Decode them all."""
    from mocokit.data.decode import UnreadableImageError, decode

    ends: Counter[str] = Counter()
    slowest = 0.0
    for _, data in mutated(2000):
        began = time.monotonic()
        try:
            decode(data)
        except UnreadableImageError:
            ends["refused with a reason"] += 1
        else:
            ends["a picture"] += 1
        slowest = max(slowest, time.monotonic() - began)
    for name, data in bombs().items():
        try:
            shape = decode(data).shape
        except UnreadableImageError as error:
            sys.stdout.write(f"{name} ({len(data):,} bytes): {error.reason}\n")
        else:
            sys.stdout.write(f"{name} ({len(data):,} bytes): a picture of {shape}\n")
    sys.stdout.write(f"2,000 damaged files: {dict(ends)}, slowest {slowest:.3f} s\n")


if __name__ == "__main__":
    main()
