"""Embedding a data set into one Parquet file, in committed parts, so that any number of processes can share the work.

The rows are cut into parts of a fixed size. A part is a committed folder (`NAME.parts/part-00007`) with its manifest;
what is there and verifies is never computed again. The last step joins the parts, adds map and neighbours, and
writes the file, then its own manifest (`NAME.json`) with the file's SHA-256.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mocokit import files
from mocokit.data.pixels import SkippedSample
from mocokit.errors import DamagedError, UsageError
from mocokit.exporting.loading import FrozenEncoder
from mocokit.retrieval import ann
from mocokit.retrieval.encode import Floats, Ints, Source, canvas_side, check_bad, chunk_rows, encode_rows, unit
from mocokit.retrieval.layout import encoded_table, vectors_of, with_map, with_neighbours
from mocokit.retrieval.projection import Map, project

FORMAT = "mocokit embedding 1"
_TABLE = "rows.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedPlan:
    """What decides the bytes of the result, apart from the encoder and the data."""

    thumbnail: int = 0
    """Longer side of the thumbnails in pixels (of a clip: of a strip of four frames); 0 = none."""
    map: Map = "pca"
    """The 2-D map."""
    neighbours: int = 10
    """Neighbours listed for each row; 0 = none."""
    max_bad: float = 0.01
    """Share of unreadable pictures above which it fails."""

    def __post_init__(self) -> None:
        if not 0 <= self.thumbnail <= 1024:
            raise UsageError(f"--thumbnail must lie in [0, 1024] pixels. Got {self.thumbnail}.")
        if not 0 <= self.neighbours <= 200:
            raise UsageError(f"--neighbours must lie in [0, 200]. Got {self.neighbours}.")
        if not 0 <= self.max_bad <= 1:
            raise UsageError(f"--max-bad must lie in [0, 1]. Got {self.max_bad}.")


@dataclass(frozen=True, slots=True)
class Embedded:
    """What was written."""

    path: Path
    rows: int
    dim: int
    skipped: int
    sha256: str
    kept: int
    """Parts that were there from before."""
    recall: float | None
    """Recall@10 of the listed neighbours against exact search; None where none are listed."""


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """`2/8` as (2, 8): the second of eight. Raises UsageError."""
    if text is None:
        return None
    first, slash, last = text.partition("/")
    if slash and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last) <= 10_000:
        return int(first), int(last)
    raise UsageError(f"--shard must be I/N with I from 1 to N, such as 2/8. Got {text!r}.")


class Parts:
    """The folder of parts beside the result, and what they were made of."""

    def __init__(self, out: Path, made_of: dict[str, Any], count: int) -> None:
        self.folder = out.with_name(f"{out.name}.parts")
        self.made_of = made_of
        self.count = count

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Alone among those who write the result. Raises LockedError when another process does."""
        files.make_folder(self.folder)
        with files.RunLock(self.folder):
            try:
                yield
            finally:
                if self.folder.is_dir() and files.only_leftovers(self.folder):
                    self.remove()

    def are_there(self) -> bool:
        """Whether parts of just this embedding were begun and not yet joined."""
        facts = self.folder / "made_of.json"
        return facts.exists() and files.read_json(facts) == self.made_of

    def open(self) -> None:
        """Make the folder, or check that it holds parts of the same embedding. Raises UsageError."""
        files.make_folder(self.folder)
        facts = self.folder / "made_of.json"
        if not facts.exists():
            if any(one.name.startswith("part-") for one in self.folder.iterdir()):
                raise UsageError(f"{self.folder} holds parts of unknown origin. Remove it or choose another --out.")
            files.write_json(facts, self.made_of)
        recorded = files.read_json(facts)
        if recorded != self.made_of:
            differs = sorted(key for key in {*recorded, *self.made_of} if recorded.get(key) != self.made_of.get(key))
            raise UsageError(
                f"{self.folder} holds parts of another embedding (different: {', '.join(differs)}). Remove it, give "
                "the same arguments as before, or choose another --out."
            )

    def path(self, number: int) -> Path:
        """The folder of one part."""
        return self.folder / f"part-{number:05d}"

    def read(self, number: int) -> dict[str, Any] | None:
        """The manifest of a part that is there and whole; None when it is missing. A damaged one is removed."""
        path = self.path(number)
        if not path.exists():
            return None
        try:
            return files.verify_folder(path)
        except DamagedError:
            files.remove_folder_by_rename(path)
            return None

    def table(self, number: int) -> pa.Table:
        """A part's rows."""
        return pq.read_table(self.path(number) / _TABLE)

    def write(self, number: int, table: pa.Table, skipped: tuple[SkippedSample, ...]) -> None:
        """Commit a part. Another process may have committed the same one meanwhile: theirs has the same bytes."""
        out = io.BytesIO()
        pq.write_table(table, out, compression="zstd")
        listed = [[one.row, one.name.encode("utf-8", "surrogateescape").hex(), one.reason] for one in skipped]
        if not self.are_there():
            raise UsageError(
                f"{self.folder} was joined or removed by another process meanwhile: there is nothing to do."
            )
        with files.turn(self.folder):
            if not self.path(number).exists():
                files.commit_folder(self.path(number), {_TABLE: out.getvalue()}, {"kind": FORMAT, "skipped": listed})

    def remove(self) -> None:
        """Remove the whole folder once the result is committed, and what interrupted calls left beside it."""
        if self.folder.is_dir():
            files.remove_folder_by_rename(self.folder)
        files.sweep_leftovers(self.folder)


def part_rows(source: Source, size: int, clip: int = 0) -> tuple[int, int, int]:
    """(canvas side, rows of a part, number of parts)."""
    side = canvas_side(source, size)
    rows = chunk_rows(side, clip)
    return side, rows, -(-len(source.index) // rows)


def compute_parts(
    frozen: FrozenEncoder,
    source: Source,
    parts: Parts,
    plan: EmbedPlan,
    *,
    side: int,
    step: int,
    shard: tuple[int, int] | None,
    progress: Callable[[int, int], None],
) -> int:
    """Compute the parts that are missing (all, or those of a shard); returns how many were there from before."""
    kept = 0
    total = len(source.index)
    mine = [n for n in range(parts.count) if shard is None or n % shard[1] == shard[0] - 1]
    for number in mine:
        if parts.read(number) is not None:
            kept += 1
            continue
        rows = np.arange(number * step, min((number + 1) * step, total))
        encoded = encode_rows(frozen, source, rows, side=side, thumbnail=plan.thumbnail or None)
        check_bad(encoded.skipped, total, plan.max_bad, source.name)
        parts.write(number, encoded_table(encoded, source.index), encoded.skipped)
        progress(min(int(rows[-1]) + 1, total), total)
    return kept


def join_parts(
    parts: Parts, out: Path, plan: EmbedPlan, source: Source, say: Callable[[str], None]
) -> tuple[pa.Table, list[SkippedSample], float | None]:
    """All parts as one table with map and neighbours. Raises UsageError naming the parts that are missing."""
    missing = [n for n in range(parts.count) if parts.read(n) is None]
    if missing:
        raise UsageError(
            f"{len(missing)} of {parts.count} parts are not there yet (first: part {missing[0]}). Run the other shards."
        )
    table = pa.concat_tables([parts.table(n) for n in range(parts.count)]).combine_chunks()
    skipped = list(_skipped(parts))
    check_bad(skipped, len(source.index), plan.max_bad, source.name)
    vectors = unit(vectors_of(table))
    recall = None
    if plan.map != "none":
        say(f"map: {plan.map} of {len(vectors)} vectors")
        table = with_map(table, project(vectors, plan.map))
    if plan.neighbours:
        neighbours = ann.build(vectors, ann.resolve_kind("auto", len(vectors)))
        recall = neighbours.recall
        say(f"neighbours: {plan.neighbours} each, {neighbours.kind}, recall@10 {recall:.3f} against exact")
        table = with_neighbours(table, *neighbours_of_all(neighbours, vectors, plan.neighbours))
    return table, skipped, recall


def _skipped(parts: Parts) -> Iterator[SkippedSample]:
    for number in range(parts.count):
        for row, name, reason in (parts.read(number) or {})["skipped"]:
            yield SkippedSample(row=row, name=bytes.fromhex(name).decode("utf-8", "surrogateescape"), reason=reason)


def neighbours_of_all(neighbours: ann.Neighbours, vectors: Floats, k: int, block: int = 1024) -> tuple[Ints, Floats]:
    """Each vector's k nearest others: positions [M, k] (-1: none) and cosines [M, k], nearest first."""
    positions = np.full((len(vectors), k), -1, np.int64)
    cosines = np.zeros((len(vectors), k), np.float32)
    for start in range(0, len(vectors), block):
        scores, found = neighbours.search(vectors[start : start + block], k + 1)
        for number, (line, values) in enumerate(zip(found, scores, strict=True)):
            others = (line != start + number) & (line >= 0)
            kept = line[others][:k]
            positions[start + number, : len(kept)] = kept
            cosines[start + number, : len(kept)] = values[others][:k]
    return positions, cosines


def write_result(
    out: Path, table: pa.Table, made_of: dict[str, Any], skipped: list[SkippedSample], recall: float | None
) -> str:
    """Write the file, then its manifest; returns the file's SHA-256."""
    files.write_with(out, lambda path: pq.write_table(table, path, compression="zstd"))
    digest = files.sha256_file(out)
    manifest = {
        "kind": FORMAT,
        "file": out.name,
        "size": out.stat().st_size,
        "sha256": digest,
        "rows": len(table),
        "columns": table.column_names,
        "neighbours_recall": recall,
        "skipped": [{"row": one.row, "name": one.name, "reason": one.reason} for one in skipped],
        **made_of,
    }
    files.write_json(manifest_path(out), manifest)
    return digest


def manifest_path(out: Path) -> Path:
    """The manifest beside an embedding."""
    return out.with_name(f"{out.name}.json")


def finished(out: Path, made_of: dict[str, Any], parts: Parts) -> dict[str, Any] | None:
    """The manifest of `out` when it is whole and was made of the same; None when there is nothing, or when its parts
    are still there because it was interrupted before the manifest was written.

    Raises UsageError when something else is there.
    """
    if not manifest_path(out).exists() and (not out.exists() or (out.is_file() and parts.are_there())):
        return None
    try:
        manifest: dict[str, Any] = files.read_json(manifest_path(out))
        same = all(manifest.get(key) == value for key, value in made_of.items())
        if same and out.is_file() and files.sha256_file(out) == manifest["sha256"]:
            return manifest
    except (DamagedError, KeyError, AttributeError):
        pass
    raise UsageError(f"{out} is there and is not this embedding. Replace it with --overwrite or choose another --out.")
