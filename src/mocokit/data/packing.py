"""Pack pictures of any source into tar shards: a few large files in place of many small ones.

Each sample becomes `NUMBER.jpg` (its own bytes, or smaller ones), `NUMBER.json` (label, split, original name and group,
so that ids, splits and masks stay as they were) and, where labelled, `NUMBER.cls`. A shard appears under its name
only when it is whole; `index.json` lists those that are done, so that an interrupted packing goes on behind them. The
same data and settings give the same bytes, whatever the number of workers and interruptions.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mocokit import files
from mocokit.data.decode import UnreadableImageError, decode, picture_size
from mocokit.data.pixels import SkippedSample, fit_picture, write_skipped
from mocokit.data.shard_listing import OWN
from mocokit.data.shards import PACK_INDEX
from mocokit.data.sources import ImageSource
from mocokit.data.threads import in_order
from mocokit.errors import DamagedError, DataError, UsageError

UInt8Array = npt.NDArray[np.uint8]

SHARD_BYTES = 256 * 2**20
_FORMAT = f"{OWN} shards 1"
_MAGIC = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n", "png"),
    (b"RIFF", "webp"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"II+\0", "tif"),
    (b"MM\0+", "tif"),
    (b"P", "ppm"),
)
"""First bytes of the formats that `decode` reads -> extension. Looked up once the header was found to be good."""
_PHOTO_FORMATS = ("jpg", "webp")


@dataclass(frozen=True, slots=True)
class Packed:
    """What a packing left in its folder."""

    shards: int
    samples: int
    skipped: int
    """Pictures that can't be read; named with reasons in skipped.jsonl."""
    nbytes: int
    kept: int
    """Shards that an earlier, interrupted packing had finished."""


@dataclass(frozen=True, slots=True)
class _Settings:
    max_side: int | None
    shard_bytes: int
    quality: int
    max_bad: float
    workers: int


@dataclass(frozen=True, slots=True)
class _Encoded:
    """One sample ready to be written, or the reason why it can't be."""

    row: int
    members: tuple[tuple[str, bytes], ...]
    reason: str = ""


def pack(
    source: ImageSource,
    out_folder: Path,
    *,
    max_side: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    quality: int = 92,
    max_bad: float = 0.01,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Packed:
    """Write a source as `shards-000000.tar`, ... into `out_folder`, in the source's order.

    max_side: shrink pictures whose longer side is above this many pixels (antialiased, upright, on white where
    transparent); None, and smaller pictures, keep their own bytes. Shrunk photographs become JPEG of `quality`
    (1 to 95, 4:4:4); shrunk palette and grey pictures of lossless formats, and arrays, become PNG. shard_bytes: a shard
    is closed once it holds this much. max_bad: largest share of unreadable pictures, 0 to 1. workers: threads; None
    is one for each core.

    Where an earlier packing of the same data with the same settings was interrupted, its shards are kept. Raises
    UsageError for settings out of range or a folder with anything else in it, DataError when too much is unreadable,
    DamagedError when a finished shard was changed, StorageError, LockedError.
    """
    if (max_side is not None and max_side < 8) or shard_bytes < 1 or not 1 <= quality <= 95 or not 0 <= max_bad <= 1:
        raise UsageError(
            f"max_side is {max_side}, shard_bytes {shard_bytes}, quality {quality}, max_bad {max_bad}; they must be at "
            "least 8 (or left out), at least 1, from 1 to 95 and from 0 to 1."
        )
    made_of = {
        "index": source.index.hash,
        "rows": len(source.index),
        "max_side": max_side,
        "shard_bytes": shard_bytes,
        "quality": quality if max_side is not None else None,
    }
    files.make_folder(out_folder)
    with files.RunLock(out_folder):
        files.sweep_temporaries(out_folder)
        done = _finished(out_folder, made_of)
        before = len(done["shards"])
        if not done["complete"]:
            settings = _Settings(max_side, shard_bytes, quality, max_bad, workers or len(os.sched_getaffinity(0)))
            _write_shards(source, out_folder, done, settings, progress)
        skipped = [
            SkippedSample(row=row, name=source.index.names[row], reason=reason) for row, reason in done["skipped"]
        ]
        write_skipped(out_folder / "skipped.jsonl", skipped)
    return Packed(
        shards=len(done["shards"]),
        samples=sum(shard["samples"] for shard in done["shards"]),
        skipped=len(skipped),
        nbytes=sum(shard["bytes"] for shard in done["shards"]),
        kept=before,
    )


def _finished(folder: Path, made_of: dict[str, Any]) -> dict[str, Any]:
    """What index.json says was done. Raises UsageError for a folder of something else, DamagedError for lost shards."""
    path = folder / PACK_INDEX
    if not path.exists():
        if foreign := sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")):
            raise UsageError(f"{folder} holds {foreign[0]!r} but no {PACK_INDEX}. Name a new or empty folder.")
        begun = {"format": _FORMAT, "made_of": made_of, "complete": False, "next": 0, "shards": [], "skipped": []}
        files.write_json(path, begun)
        return begun
    done = files.read_json(path)
    if not isinstance(done, dict) or done.get("format") != _FORMAT or not isinstance(done.get("made_of"), dict):
        raise UsageError(f"{path} was not written by this version's pack. Name a new or empty folder.")
    if done["made_of"] != made_of:
        told = [f"{key} {done['made_of'].get(key)} there, {made_of[key]} now" for key in made_of]
        other = [line for key, line in zip(made_of, told, strict=True) if done["made_of"].get(key) != made_of[key]]
        raise UsageError(f"{folder} was packed from other data or otherwise ({'; '.join(other)}). Name another folder.")
    for shard in done["shards"]:
        path = folder / shard["name"]
        if not path.is_file() or path.stat().st_size != shard["bytes"]:
            raise DamagedError(f"{path} is missing or was changed. Remove {folder} and pack again.")
    return done


def _write_shards(
    source: ImageSource,
    folder: Path,
    done: dict[str, Any],
    settings: _Settings,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write what is left, shard by shard; `done` and index.json follow."""
    rows = len(source.index)
    encode = _encoder(source, settings.max_side, settings.quality)
    left, workers = range(done["next"], rows), settings.workers
    with contextlib.closing(in_order(encode, left, workers=workers, ahead=8 * workers, name="pack")) as encoded:
        samples = _readable(source, encoded, done, settings.max_bad, progress)
        waiting = next(samples, None)
        while waiting is not None:
            name = f"shards-{len(done['shards']):06d}.tar"
            first, held = waiting, _Held(waiting)
            files.write_with(folder / name, lambda path, held=held: held.write(path, samples, settings.shard_bytes))  # type: ignore[misc]
            waiting = held.waiting
            done["shards"].append(
                {
                    "name": name,
                    "first_row": first.row,
                    "samples": held.samples,
                    "bytes": (folder / name).stat().st_size,
                    "sha256": files.sha256_file(folder / name),
                }
            )
            done["next"] = rows if waiting is None else waiting.row
            # Unreadable rows behind this shard's last sample were met already; they are met again after a break.
            kept = {**done, "skipped": [one for one in done["skipped"] if one[0] < done["next"]]}
            files.write_json(folder / PACK_INDEX, kept)
    done["complete"] = True
    files.write_json(folder / PACK_INDEX, done)


class _Held:
    """The sample that begins a shard, and after `write` the one that was too many for it."""

    def __init__(self, first: _Encoded) -> None:
        self.waiting: _Encoded | None = first
        self.samples = 0

    def write(self, path: Path, samples: Iterator[_Encoded], shard_bytes: int) -> None:
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            while self.waiting is not None and (tar.offset < shard_bytes or not self.samples):
                for name, data in self.waiting.members:
                    info = tarfile.TarInfo(name)
                    info.size, info.mode = len(data), 0o644
                    tar.addfile(info, io.BytesIO(data))
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep an object for every member
                self.samples += 1
                self.waiting = next(samples, None)


def _readable(
    source: ImageSource,
    encoded: Iterator[_Encoded],
    done: dict[str, Any],
    max_bad: float,
    progress: Callable[[int, int], None] | None,
) -> Iterator[_Encoded]:
    """The samples that could be read; the others are noted. Raises DataError above `max_bad`, or when none is left."""
    rows, skipped = len(source.index), done["skipped"]
    for one in encoded:
        if one.reason:
            skipped.append([one.row, one.reason])
            if len(skipped) > max_bad * rows or len(skipped) == rows:
                first = "; ".join(f"{source.index.names[row]!r} ({reason})" for row, reason in skipped[:5])
                raise DataError(
                    f"{len(skipped):,} of the first {one.row + 1:,} pictures in {source.name} can't be read, more than "
                    f"{max_bad:.2%} of all {rows:,}. First: {first}. Remove them, or raise --max-bad."
                )
        if progress is not None:
            progress(one.row + 1, rows)
        if not one.reason:
            yield one


# ----------------------------------------------------------------------------------------------- one sample


def _encoder(source: ImageSource, max_side: int | None, quality: int) -> Callable[[int], _Encoded]:
    index = source.index

    def encode(row: int) -> _Encoded:
        try:
            data, extension = _picture(source, row, max_side, quality)
        except UnreadableImageError as error:
            return _Encoded(row, (), error.reason)
        key = f"{row:09d}"
        facts: dict[str, Any] = {}
        if (label := int(index.labels[row])) >= 0:
            facts["label"] = index.class_names[label]
        if (split := int(index.splits[row])) >= 0:
            facts["split"] = index.split_names[split]
        facts[OWN] = {"name": index.names[row]}
        if (group := int(index.groups[row])) >= 0:
            facts[OWN]["group"] = group
        members = [(f"{key}.{extension}", data), (f"{key}.json", files.to_json(facts, indent=None).encode())]
        if label >= 0:
            members.append((f"{key}.cls", b"%d" % label))
        return _Encoded(row, tuple(members))

    return encode


def _picture(source: ImageSource, row: int, max_side: int | None, quality: int) -> tuple[bytes, str]:
    """The encoded picture of a row and its extension. Raises UnreadableImageError."""
    if source.read_bytes is None:
        rgb = source.read(row)
        return _png(rgb if max_side is None else fit_picture(rgb, max_side)), "png"
    data = source.read_bytes(row)
    size = picture_size(data, source.limits)  # raises for what is no picture
    extension = next((name for magic, name in _MAGIC if data.startswith(magic)), "")
    if extension and (max_side is None or max(size) <= max_side):
        return data, extension
    rgb = decode(data, source.limits, fit=max_side)
    small = rgb if max_side is None else fit_picture(rgb, max_side)
    drawn = not extension or _has_palette(data, extension)
    if extension not in _PHOTO_FORMATS and (drawn or _is_grey(small)):
        return _png(small), "png"
    buffer = io.BytesIO()
    Image.fromarray(small).save(buffer, "JPEG", quality=quality, subsampling=0, optimize=True)
    return buffer.getvalue(), "jpg"


def _has_palette(data: bytes, extension: str) -> bool:
    """Drawings rather than photographs: in a JPEG their edges would get a fringe."""
    return extension == "gif" or (extension == "png" and data[25:26] == b"\x03")


def _is_grey(rgb: UInt8Array) -> bool:
    return bool((rgb[..., 0] == rgb[..., 1]).all() and (rgb[..., 0] == rgb[..., 2]).all())


def _png(rgb: UInt8Array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rgb[..., 0] if _is_grey(rgb) else rgb).save(buffer, "PNG")
    return buffer.getvalue()
