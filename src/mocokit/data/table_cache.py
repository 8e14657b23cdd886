"""Tables of frames kept in a file, so that an unchanged video is not looked through again.

A table is used again for a file of the same name, size, modification time and content at both ends (the hash of the
first and last 64 KiB), read by the same decoder. Only videos that could be read are kept; broken ones are looked at
each time. One file: a JSON head in its first line, then the arrays of all videos; the head holds the SHA-256 of both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mocokit import files
from mocokit.data.video import FrameTable

_FORMAT = "mocokit frame tables 1"
_END = 64 * 1024


@dataclass(frozen=True, slots=True)
class Looked:
    """What a file was when it was looked through."""

    name: str
    size: int
    mtime: int
    ends: str
    """BLAKE2b of its first and last 64 KiB, hex."""


def look_at(path: Path, name: str) -> Looked | None:
    """What a file is now; None when it can't be read."""
    try:
        with path.open("rb") as stream:
            status = path.stat()
            digest = hashlib.blake2b(stream.read(_END), digest_size=16)
            stream.seek(max(status.st_size - _END, 0))
            digest.update(stream.read(_END))
    except (OSError, ValueError):
        return None
    return Looked(name, status.st_size, status.st_mtime_ns, digest.hexdigest())


def read_tables(cache: Path, decoder: str) -> dict[Looked, FrameTable]:
    """What is kept in `cache` by this decoder; nothing where there is none or it is not what was written."""
    try:
        head_line, _, body = cache.read_bytes().partition(b"\n")
        head = json.loads(head_line)
        if (head["format"], head["decoder"], head["sha256"]) != (_FORMAT, decoder, _digest(head["videos"], body)):
            return {}
        return {Looked(*one["file"]): _table(one, body) for one in head["videos"]}
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return {}  # whatever is wrong with it, the videos are looked through again


def _table(one: dict[str, Any], body: bytes) -> FrameTable:
    frames, keys, start = int(one["frames"]), int(one["keys"]), int(one["start"])
    counts = [frames, frames if one["stamped"] else 0, keys]
    places = [start + 8 * sum(counts[:number]) for number in range(3)]
    times = np.frombuffer(body, "<f8", counts[0], places[0]).astype(np.float64)
    stamps = np.frombuffer(body, "<i8", counts[1], places[1]).astype(np.int64) if counts[1] else None
    numbers = np.frombuffer(body, "<i8", counts[2], places[2]).astype(np.int64)
    return FrameTable(times=times, stamps=stamps, keys=numbers, height=int(one["height"]), width=int(one["width"]))


def _digest(videos: list[dict[str, Any]], body: bytes) -> str:
    return hashlib.sha256(json.dumps(videos).encode() + body).hexdigest()


def write_tables(cache: Path, decoder: str, looked: Sequence[Looked], tables: Sequence[FrameTable]) -> None:
    """Keep these tables, whole or not at all. Raises StorageError."""
    parts: list[bytes] = []
    videos = []
    start = 0
    for one, table in zip(looked, tables, strict=True):
        arrays = [table.times.astype("<f8"), *([] if table.stamps is None else [table.stamps.astype("<i8")])]
        data = b"".join(array.tobytes() for array in [*arrays, table.keys.astype("<i8")])
        videos.append(
            {
                "file": [one.name, one.size, one.mtime, one.ends],
                "frames": len(table),
                "stamped": table.stamps is not None,
                "keys": len(table.keys),
                "height": table.height,
                "width": table.width,
                "start": start,
            }
        )
        parts.append(data)
        start += len(data)
    body = b"".join(parts)
    head = {"format": _FORMAT, "decoder": decoder, "sha256": _digest(videos, body), "videos": videos}
    files.make_folder(cache.parent)
    files.write_bytes(cache, json.dumps(head).encode() + b"\n" + body)
