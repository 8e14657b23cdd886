"""One immutable, hashed table of samples for every kind of data.

Files of a folder, lines of a manifest, rows of a Parquet or npz file, generated pictures: each becomes a row of a
`SampleIndex`. Order, sharding, resuming, skip lists, duplicates, evaluation and search ids all refer to it, so
each exists once. A row's id is a hash of its name alone, so it stays when other files come and go.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.randomness import sample_id
from mocokit.errors import DataError

Int64Array = npt.NDArray[np.int64]

SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_SPLIT_ORDER = {"train": 0, "val": 1, "test": 2}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleIndex:
    """A table of S samples. All arrays are read-only and have S entries; -1 means "not known".

    `names` are paths relative to the data root (`/` between parts, odd bytes as surrogate escapes) or a member
    or row (`row 17`). Raises DataError when two rows have the same id, ValueError when the parts don't fit.
    """

    names: tuple[str, ...]
    """What the id hashes. Unique."""
    ids: Int64Array
    """[S] `sample_id(name)`: 63-bit, never negative."""
    sizes: Int64Array
    """[S] bytes of the sample's own file, 0 where it has none."""
    mtimes: Int64Array
    """[S] modification time in ns of the file the sample lies in, 0 where there is none."""
    labels: Int64Array
    """[S] position in `class_names`, or -1."""
    class_names: tuple[str, ...]
    """C names; empty when nothing is labelled."""
    groups: Int64Array
    """[S] `sample_id(group text)` or -1. Rows of one group (patient, recording) must stay in one split."""
    splits: npt.NDArray[np.int8]
    """[S] position in `split_names`, or -1."""
    split_names: tuple[str, ...]
    """Splits that the data themselves bring: `train`, `val`, `test` first, others after them."""
    content: str = ""
    """What else identifies the pixels where rows are no files: a container's size, an array's SHA-256, a version."""

    def __post_init__(self) -> None:
        rows = len(self.names)
        for field in ("ids", "sizes", "mtimes", "labels", "groups", "splits"):
            array: npt.NDArray[np.integer] = getattr(self, field)
            if array.shape != (rows,):
                raise ValueError(f"{field} has shape {array.shape}, expected ({rows},)")
            kind = np.int8 if field == "splits" else np.int64
            fixed = array.astype(kind, copy=array.flags.writeable)
            fixed.setflags(write=False)
            object.__setattr__(self, field, fixed)
        if rows and (self.labels.max() >= len(self.class_names) or self.splits.max() >= len(self.split_names)):
            raise ValueError("a label or split number has no name")
        order = np.argsort(self.ids, kind="stable")
        if (same := np.flatnonzero(np.diff(self.ids[order]) == 0)).size:
            first, second = (self.names[order[same[0] + step]] for step in (0, 1))
            raise DataError(f"Two samples have the same id: {first!r} and {second!r}. Rename or remove one of them.")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def hash(self) -> str:
        """SHA-256 (hexadecimal) over ids, sizes, modification times and `content`, in row order."""
        digest = hashlib.sha256()
        for array in (self.ids, self.sizes, self.mtimes):
            digest.update(array.astype("<i8", copy=False).tobytes())
        digest.update(self.content.encode())
        return digest.hexdigest()

    def subset(self, rows: npt.NDArray[np.integer]) -> SampleIndex:
        """The table of some rows, in the order given; class and split names stay as they are."""
        return SampleIndex(
            names=tuple(self.names[row] for row in rows.tolist()),
            ids=self.ids[rows],
            sizes=self.sizes[rows],
            mtimes=self.mtimes[rows],
            labels=self.labels[rows],
            class_names=self.class_names,
            groups=self.groups[rows],
            splits=self.splits[rows],
            split_names=self.split_names,
            content=self.content,
        )

    def rows_of(self, split: str) -> Int64Array:
        """Row numbers of one split, ascending. Raises DataError naming the splits there are."""
        name = SPLIT_WORDS.get(split.lower(), split)
        if name not in self.split_names:
            there = ", ".join(self.split_names) if self.split_names else "none"
            raise DataError(f"The data have no split {split!r}; splits there are: {there}.")
        return np.flatnonzero(self.splits == self.split_names.index(name)).astype(np.int64)


def make_index(
    names: Sequence[str],
    *,
    sizes: npt.ArrayLike | None = None,
    mtimes: npt.ArrayLike | None = None,
    labels: Sequence[str | None] | Int64Array | None = None,
    class_names: Sequence[str] | None = None,
    groups: Sequence[str | None] | None = None,
    splits: Sequence[str | None] | None = None,
    content: str = "",
) -> SampleIndex:
    """Build a table from text: ids, class, group and split numbers are worked out here.

    `labels` are class texts (None or "": unlabelled), numbered in the order of `class_names` or sorted (as numbers
    when all are); or class numbers already, with `class_names`. Splits named `valid` or `validation` become `val`.
    """
    rows = len(names)
    nowhere = np.full(rows, -1, np.int64)
    if isinstance(labels, np.ndarray):
        label_numbers = labels.astype(np.int64)
        found = tuple(class_names or ())
    else:
        found = tuple(class_names) if class_names is not None else _sorted_texts(labels or ())
        label_numbers = nowhere if labels is None else _numbers(labels, found)
    split_words = [None if not word else SPLIT_WORDS.get(word.lower(), word) for word in splits or ()]
    split_names = tuple(
        sorted({word for word in split_words if word}, key=lambda name: (_SPLIT_ORDER.get(name, 3), name))
    )
    if len(split_names) > 127:
        raise DataError(f"There are {len(split_names)} different splits, more than 127. Check the split column.")
    group_ids = {text: sample_id(text) for text in set(groups or ()) if text}
    return SampleIndex(
        names=tuple(names),
        ids=np.fromiter((sample_id(name) for name in names), np.int64, rows),
        sizes=np.zeros(rows, np.int64) if sizes is None else np.array(sizes, np.int64),
        mtimes=np.zeros(rows, np.int64) if mtimes is None else np.array(mtimes, np.int64),
        labels=label_numbers,
        class_names=found,
        groups=np.array([group_ids.get(text or "", -1) for text in groups], np.int64) if groups else nowhere,
        splits=(_numbers(split_words, split_names) if splits else nowhere).astype(np.int8),
        split_names=split_names,
        content=content,
    )


def column_labels(
    where: str, values: Sequence[Any] | None, names: list[str] | None
) -> tuple[Int64Array | list[str | None] | None, list[str] | None]:
    """A column of labels (whole numbers or texts; None or -1: unlabelled) -> `labels, class_names` of `make_index`.

    Numbers with known `names` stay numbers; everything else becomes text. Raises DataError for a number without
    a name. `where` is the file for the message.
    """
    if values is None:
        return None, None
    if names is not None and all(value is None or isinstance(value, int) for value in values):
        numbers = np.array([-1 if value is None else value for value in values], np.int64)
        if numbers.size and (numbers.max() >= len(names) or numbers.min() < -1):
            raise DataError(
                f"{where} has labels from {numbers.min()} to {numbers.max()} but {len(names)} class names. Correct one."
            )
        return numbers, names
    return [None if value is None or value == -1 else str(value) for value in values], None


def column_texts(values: Sequence[Any] | None) -> list[str | None] | None:
    """A column of groups or splits as texts."""
    return None if values is None else [None if value is None else str(value) for value in values]


def _numbers(texts: Iterable[str | None], names: tuple[str, ...]) -> Int64Array:
    position = {name: number for number, name in enumerate(names)}
    return np.array([position[text] if text else -1 for text in texts], np.int64)


def _sorted_texts(texts: Iterable[str | None]) -> tuple[str, ...]:
    """The different texts: by value when all are whole numbers, else by their UTF-8 bytes."""
    distinct = {text for text in texts if text}
    if all(text.isascii() and text.removeprefix("-").isdigit() and len(text) < 18 for text in distinct):
        return tuple(sorted(distinct, key=lambda text: (int(text), text)))
    return tuple(sorted(distinct, key=path_key))


def path_key(name: str) -> bytes:
    """The bytes by which names are sorted, so that the order is the same on every machine."""
    return name.encode("utf-8", "surrogateescape")
