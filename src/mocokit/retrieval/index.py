"""A search index on disk: generations, of which one is the committed one at every instant.

    INDEX/index.json      marks the folder
    INDEX/CURRENT         the name of the committed generation, replaced atomically
    INDEX/gen-000003/     vectors.faiss, rows.parquet, MANIFEST.json with sizes and SHA-256

Every change (build, add, remove) writes a whole new generation beside the committed one, commits it by rename, then
replaces CURRENT, then removes what is no longer named. Killed at any instant, the folder answers with the old
generation or the new one.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mocokit import files
from mocokit.errors import DamagedError, UsageError, did_you_mean
from mocokit.retrieval import ann
from mocokit.retrieval.ann import Neighbours
from mocokit.retrieval.encode import Floats, Ints, unit
from mocokit.retrieval.rows import Rows, rows_from_bytes

MARKER, CURRENT = "index.json", "CURRENT"
_VECTORS, _ROWS = "vectors.faiss", "rows.parquet"
GENERATION_FILES = (_VECTORS, _ROWS, files.MANIFEST)
DEAD_SHARE = 0.2
"""Approximate indexes keep removed vectors until they are more than this share; then they are built anew."""


@dataclass(frozen=True, slots=True)
class SearchIndex:
    """A generation that was read and verified.

    facts: what the vectors were made by (`weights`, `step`, `readout`, `run`), and `sources`.
    """

    path: Path
    generation: int
    facts: dict[str, Any]
    rows: Rows
    neighbours: Neighbours

    def __len__(self) -> int:
        return int(self.rows.alive.sum())

    def summary(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "index": str(self.path),
            "generation": self.generation,
            "images": len(self),
            "dim": self.neighbours.dim,
            "kind": self.neighbours.kind,
            "effort": self.neighbours.effort,
            "recall": self.neighbours.recall,
            "readout": self.facts["readout"],
            "step": self.facts["step"],
        }


def is_index(path: Path) -> bool:
    """Whether the folder is an index of ours."""
    return (path / MARKER).is_file()


def open_index(path: Path) -> SearchIndex:
    """Read the committed generation and verify it. Raises UsageError when there is none, DamagedError."""
    if not is_index(path):
        what = "is no search index" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}. Make one with `mocokit search build RUN DATA`.")
    while True:
        name = _current(path)
        if name is None:
            raise UsageError(f"{path} has no committed index yet: its build was interrupted. Build it again.")
        try:
            return _read(path, name)
        except DamagedError:
            if _current(path) == name:  # else another process has just committed a newer one and removed this
                raise


def _current(path: Path) -> str | None:
    try:
        name = (path / CURRENT).read_text("ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path / CURRENT} can't be read. The index is damaged: build it again.") from error
    if not (name.startswith("gen-") and name[4:].isdigit()):
        raise DamagedError(f"{path / CURRENT} names no generation. The index is damaged: build it again.")
    return name


def _read(path: Path, name: str) -> SearchIndex:
    folder = path / name
    manifest = files.verify_folder(folder)
    facts = manifest.get("facts")
    if manifest.get("kind") != "mocokit search index" or not isinstance(facts, dict):
        raise DamagedError(f"{folder} is no generation of a search index. Build it again.")
    with files.storage_errors(folder, "read"):
        rows = rows_from_bytes((folder / _ROWS).read_bytes())
        data = np.fromfile(folder / _VECTORS, np.uint8)
    neighbours = ann.from_bytes(data, manifest["ann"]["kind"], manifest["ann"]["effort"], manifest["ann"]["recall"])
    if len(neighbours) != len(rows):
        raise DamagedError(f"{folder} has {len(neighbours)} vectors and {len(rows)} rows. Build it again.")
    return SearchIndex(path, int(name[4:]), facts, rows, neighbours)


def claim_index(path: Path, *, overwrite: bool | None) -> files.RunLock:
    """Lock an index for writing and sweep what an interrupted write left; give the lock back with `release`.

    overwrite: None to change an index that is there; else make a new one, or replace it if True. Raises UsageError
    (the folder is not as it must be), LockedError, StorageError.
    """
    _check(path, overwrite)
    files.make_folder(path)
    lock = files.RunLock(path)
    try:
        _check(path, overwrite)
        files.sweep_temporaries(path)
        if not is_index(path):
            files.write_json(path / MARKER, {"format": 1, "kind": "mocokit search index"})
        _sweep_generations(path)
    except BaseException:
        lock.release()
        raise
    return lock


def _check(path: Path, overwrite: bool | None) -> None:
    if is_index(path):
        marker = files.read_json(path / MARKER)
        if not isinstance(marker, dict) or marker.get("format") != 1:
            raise UsageError(f"{path / MARKER} is of another version of mocokit. Use the version that wrote it.")
        if overwrite is False and (path / CURRENT).exists():
            raise UsageError(f"{path} already holds an index. Use `search add`, --overwrite, or another --out.")
    elif overwrite is None:
        raise UsageError(f"{path} is no search index. Make one with `mocokit search build RUN DATA`.")
    elif path.exists() and (not path.is_dir() or not files.only_leftovers(path)):
        raise UsageError(f"{path} is not empty and is no search index of mocokit's. Choose another --out.")


def _sweep_generations(path: Path) -> None:
    """Remove generations that CURRENT does not name. Call it under the lock."""
    name = _current(path)
    for entry in sorted(path.iterdir()):
        if entry.name.startswith("gen-") and entry.name != name:
            files.remove_folder_by_rename(entry)


def commit(index: SearchIndex) -> SearchIndex:
    """Write the index as the next generation and make it the committed one. Call it under the lock."""
    old = _current(index.path)
    number = int(old[4:]) + 1 if old else 1
    name = f"gen-{number:06d}"
    ann_facts = {
        "kind": index.neighbours.kind,
        "effort": index.neighbours.effort,
        "recall": index.neighbours.recall,
    }
    contents = {_VECTORS: index.neighbours.to_bytes(), _ROWS: index.rows.to_bytes()}
    facts = {"kind": "mocokit search index", "generation": number, "ann": ann_facts, "facts": index.facts}
    files.commit_folder(index.path / name, contents, facts)
    files.write_text(index.path / CURRENT, name + "\n")
    _sweep_generations(index.path)
    return replace(index, generation=number)


def new_index(path: Path, vectors: Floats, rows: Rows, facts: dict[str, Any], kind: str) -> SearchIndex:
    """An index over vectors [M, D] (normalised here), not written yet. Raises UsageError for an unknown kind."""
    return SearchIndex(path, 0, facts, rows, ann.build(unit(vectors), ann.resolve_kind(kind, len(vectors))))


def with_added(index: SearchIndex, vectors: Floats, rows: Rows) -> SearchIndex:
    """The index with further vectors; living rows with the same ids are replaced. The old one can't be used any more.

    The recall of an approximate one is measured anew.
    """
    same = np.flatnonzero(np.isin(index.rows.ids, rows.ids) & index.rows.alive)
    if len(same):
        index = with_removed(index, same.astype(np.int64))
    index.neighbours.add(unit(vectors))
    if index.neighbours.kind != "exact":
        ann.tuned(index.neighbours, index.neighbours.vectors())
    return replace(index, rows=index.rows.followed_by(rows))


def with_removed(index: SearchIndex, rows: Ints) -> SearchIndex:
    """The index without some rows: an exact one drops their vectors, others mark them and are rebuilt now and then.

    Raises UsageError when none would be left.
    """
    marked = index.rows.killed(rows)
    alive = np.flatnonzero(marked.alive)
    if not len(alive):
        raise UsageError(f"That would remove all images of {index.path}. Remove the folder instead.")
    if index.neighbours.kind != "exact" and 1 - len(alive) / len(marked) <= DEAD_SHARE:
        return replace(index, rows=marked)
    vectors = index.neighbours.vectors(alive)
    kind = index.neighbours.kind if len(alive) >= 1000 else "exact"
    return replace(index, rows=marked.taken(alive), neighbours=ann.build(vectors, kind))


def find_rows(
    index: SearchIndex, *, ids: Sequence[int] = (), patterns: Sequence[str] = (), labels: Sequence[str] = ()
) -> Ints:
    """Living rows by id, name (shell patterns) or label. Raises UsageError for an id or label that isn't there."""
    chosen = np.zeros(len(index.rows), np.bool_)
    for sample in ids:
        row = index.rows.row_of(sample)
        if row is None:
            raise UsageError(f"The index has no image with id {sample}.")
        chosen[row] = True
    if labels:
        chosen |= allowed_labels(index, labels)
    if patterns:
        names = np.fromiter(
            (any(fnmatch.fnmatchcase(name, one) for one in patterns) for name in index.rows.names()),
            np.bool_,
            len(index.rows),
        )
        chosen |= names
    return np.flatnonzero(chosen & index.rows.alive).astype(np.int64)


def allowed_labels(index: SearchIndex, labels: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """bool [M]: rows with one of the labels. Raises UsageError for a label that no living row has."""
    there = [name for name, _ in index.rows.labels()]
    for label in labels:
        if label not in there:
            raise UsageError(f"The index has no label {label!r}.{did_you_mean(label, there)}")
    return index.rows.with_label(labels)
