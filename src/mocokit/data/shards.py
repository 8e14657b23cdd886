"""Tar shards in the WebDataset layout -> sample table and row -> bytes. Indexed by offset, never extracted.

A sample is what shares a key: the member's name up to the first dot of its last part. `key.jpg` (or any other
picture) is the picture; `key.json` may hold a label, group and split; `key.cls` a class number or name. The members
of one key follow one another; anything else is refused, because it would fall apart unseen.

Shards are one .tar, a folder of them, a pattern such as `shards-{0000..0011}.tar`, or a URL of one of these.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from mocokit.data.blobs import Blob, BlobError, is_url, local_blob, remote_blob, remote_list
from mocokit.data.decode import UnreadableImageError
from mocokit.data.index import SampleIndex, column_labels, column_texts, make_index
from mocokit.data.manifest import Columns
from mocokit.data.scan import EXTENSIONS
from mocokit.data.shard_listing import OWN, ShardListing, ShardReport, ShardRows
from mocokit.errors import DataError, UsageError

PACK_INDEX = "index.json"
_BESIDE_SHARDS = (".tar", ".json", ".jsonl", ".txt", ".md")
_MAX_SHARDS = 1_000_000
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def is_shards(spec: str) -> bool:
    """Whether it names tar shards: a URL, a .tar, a brace pattern, or a folder with nothing but shards in it."""
    if is_url(spec) or spec.lower().endswith(".tar"):
        return True
    found = False
    try:
        with os.scandir(spec) as entries:
            for entry in entries:
                name = entry.name.lower()
                if name.startswith("."):
                    continue
                if not name.endswith(_BESIDE_SHARDS):
                    return False
                found = found or name.endswith(".tar")
    except (OSError, ValueError):
        return False
    return found


def open_shards(
    spec: str, columns: Columns, *, follow_outside: bool = False, max_bytes: int = 100_000_000
) -> tuple[SampleIndex, Callable[[int], bytes], ShardReport]:
    """The table of tar shards, row -> the encoded picture, and what was passed over.

    columns: fields of `key.json` for label, group and split where they aren't called so. Without a label there,
    `key.cls` is the label. A sample's name is `SHARD.tar/MEMBER`, or the one it had before `pack`. max_bytes:
    the largest picture that is read.

    Raises UsageError for a pattern or protocol that can't be used, MissingDependencyError for a protocol whose
    package is missing, DataError for shards that are missing, no tars, have no pictures, or whose members are out
    of order or occur twice.
    """
    if columns.path is not None:
        raise UsageError("A path column has no meaning for tar shards. Leave it out.")
    report = ShardReport()
    blobs = _blobs(spec, report, follow_outside)
    found = ShardRows()
    fields_seen: set[str] = set()
    for part, part_report, part_fields in _listed(blobs, columns):
        if len(found.sizes):
            found.add(part)
        else:
            found = part  # of a single large shard, everything is held once
        report.add(part_report)
        fields_seen |= part_fields
    if not len(found.sizes):
        told = "; ".join(report.lines()) or "they are empty"
        raise DataError(f"No pictures in {_shown(blobs)}: looked for {' '.join(EXTENSIONS)}; {told}.")
    for role in ("label", "group", "split"):
        columns.pick(role, sorted(fields_seen), (), f"{_shown(blobs)} (key.json)")
    index = _index(found, blobs)
    shard_of, offsets, sizes = (
        np.frombuffer(column, np.int64) for column in (found.shards, found.offsets, found.sizes)
    )

    def read_bytes(row: int) -> bytes:
        size = int(sizes[row])
        if size > max_bytes:
            raise UnreadableImageError(f"{size:,} bytes, more than the limit of {max_bytes:,}")
        try:
            data = blobs[int(shard_of[row])].read(int(offsets[row]), size)
        except BlobError as error:
            raise UnreadableImageError(str(error)) from error
        if len(data) != size:
            raise UnreadableImageError(f"{blobs[int(shard_of[row])].name} was cut since it was listed")
        return data

    return index, read_bytes, report


# ------------------------------------------------------------------------------------------------ which shards


def expand_braces(pattern: str) -> list[str]:
    """`a-{08..11}.tar` -> a-08.tar ... a-11.tar; several braces give every combination. Raises UsageError."""
    pieces: list[Sequence[str]] = []
    last, count = 0, 1
    for match in _BRACES.finditer(pattern):
        low, high = match.groups()
        many = int(high) - int(low) + 1 if len(low) < 19 and len(high) < 19 else 0
        count *= many
        if not 0 < count <= _MAX_SHARDS:
            raise UsageError(
                f"{match[0]} in {pattern.rpartition('/')[2]!r} means {count:,} shards; 1 to {_MAX_SHARDS:,}."
            )
        width = len(low) if low[0] == "0" else 0
        pieces += [(pattern[last : match.start()],), [f"{one:0{width}d}" for one in range(int(low), int(high) + 1)]]
        last = match.end()
    pieces.append((pattern[last:],))
    return ["".join(parts) for parts in itertools.product(*pieces)]


def _blobs(spec: str, report: ShardReport, follow_outside: bool) -> list[Blob]:
    if is_url(spec):
        named = [spec] if spec.lower().partition("?")[0].endswith(".tar") else remote_list(spec, ".tar")
        urls = [url for one in named for url in expand_braces(one)]
        if not urls:
            raise DataError(f"{spec.rstrip('/').rpartition('/')[2]} holds no .tar files.")
        first = remote_blob(urls[0])
        with ThreadPoolExecutor(8, thread_name_prefix="shards") as pool:
            return _told_apart([first, *pool.map(remote_blob, urls[1:])], [url.partition("?")[0] for url in urls])
    path = Path(spec)
    if path.is_dir():
        return [local_blob(one) for one in _tars(path, report, follow_outside)]
    paths = [spec] if path.exists() else expand_braces(spec)
    return _told_apart([local_blob(Path(one)) for one in paths], paths)


def _told_apart(blobs: list[Blob], places: Sequence[str]) -> list[Blob]:
    """Shards of the same name in different folders are called by as much of the folder as tells them apart."""
    if len({blob.name for blob in blobs}) == len(blobs):
        return blobs
    parts = [place.split("/") for place in places]
    same = next(depth for depth, level in enumerate(zip(*parts, strict=False)) if len(set(level)) > 1)
    return [replace(blob, name="/".join(path[same:])) for blob, path in zip(blobs, parts, strict=True)]


def _tars(folder: Path, report: ShardReport, follow_outside: bool) -> list[Path]:
    """The shards in a folder, by name; links only where they lead outside and that is allowed."""
    real = folder.resolve()
    found = []
    for path in sorted(folder.glob("*.tar")):
        if path.is_symlink():
            inside = path.resolve().parent == real
            report.links_inside += inside
            report.links_outside += not inside and not follow_outside
            if inside or not follow_outside:
                continue
        if path.name[0] != ".":
            found.append(path)
    _check_packed(folder, {path.name for path in found})
    if not found:
        raise DataError(f"{folder} holds no .tar files that may be read. " + "; ".join(report.lines()))
    return found


def _check_packed(folder: Path, present: set[str]) -> None:
    """Raise DataError where `pack` left its list in the folder and the shards aren't those it lists."""
    try:
        listed = json.loads((folder / PACK_INDEX).read_bytes())
        if not str(listed["format"]).startswith(OWN):
            return
        names = {shard["name"] for shard in listed["shards"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # there is none, or it is somebody else's
    if not listed.get("complete"):
        raise DataError(
            f"{folder} is only half packed. Run the same `mocokit pack` again; it goes on where it stopped."
        )
    if missing := sorted(names - present):
        raise DataError(
            f"{folder / missing[0]} is missing, one of {len(missing):,} that {PACK_INDEX} lists. Restore it."
        )


def _shown(blobs: Sequence[Blob]) -> str:
    return blobs[0].name if len(blobs) == 1 else f"{blobs[0].name} ... {blobs[-1].name} ({len(blobs):,} shards)"


# ------------------------------------------------------------------------------------------------ their table


def _listed(blobs: Sequence[Blob], columns: Columns) -> Iterator[tuple[ShardRows, ShardReport, set[str]]]:
    """Every shard's rows, in order; remote ones several at a time, since listing them is waiting."""

    def one(number: int) -> tuple[ShardRows, ShardReport, set[str]]:
        return ShardListing(blobs[number], number, columns).run()

    if not blobs[0].remote or len(blobs) == 1:
        yield from map(one, range(len(blobs)))
        return
    with ThreadPoolExecutor(8, thread_name_prefix="shards") as pool:
        yield from pool.map(one, range(len(blobs)))


def _index(found: ShardRows, blobs: Sequence[Blob]) -> SampleIndex:
    where = _shown(blobs)
    told = found.labels if any(label is not None for label in found.labels) else found.classes
    labels, _ = column_labels(where, told, None)
    total = sum(blob.size for blob in blobs)
    index = make_index(
        found.names,
        sizes=np.frombuffer(found.sizes, np.int64),
        mtimes=np.array([blob.mtime for blob in blobs], np.int64)[np.frombuffer(found.shards, np.int64)],
        labels=labels,
        groups=column_texts(found.groups),
        splits=column_texts(found.splits),
        content=f"{len(blobs)} shards, {total} bytes",
    )
    group_ids = np.frombuffer(found.group_ids, np.int64)
    return index if group_ids.max() < 0 else replace(index, groups=np.where(group_ids < 0, index.groups, group_ids))
