"""Who may see what: splits, label draws, the reading ledger, and choosing k inside the label budget.

Everything here is decided by hashes of (seed, purpose, id or group), never by position or by a generator, so the
same image gets the same part in every run and on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mocokit.data.index import SampleIndex
from mocokit.data.randomness import UInt64Array, hash_words, uniform, word
from mocokit.errors import DamagedError, DataError, UsageError
from mocokit.evaluation.knn import KNN_TEMPERATURE, nearest, vote
from mocokit.files import AppendLog, storage_errors, to_json

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# --------------------------------------------------------------------------------------------------- splits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """Row numbers of an index, ascending, int64: no row and no group is in two of them."""

    train: Ints
    val: Ints
    test: Ints


def split_rows(index: SampleIndex, seed: int, test: float = 0.2, val: float = 0.2) -> Split:
    """Train, validation and test rows: the data's own splits where they have them, by hash where not.

    test: the share of all rows; val: the share of what is not test. A missing test or validation split is taken out
    of train. Each unit (a group, or an image without one) falls on its side by the hash of its own id against the
    share, so added files move nobody, and shares hold for every class up to chance. One repair: a class that chance
    left without any unit on one side (it has at least two) sends the nearest one over; in a class as small as that
    an added file can call it back. Rows that a declared split leaves out take no part.

    Raises UsageError for shares outside 0..1, DataError when train or test is empty or a declared split cuts a group.
    """
    if not (0 <= test < 1 and 0 <= val < 1):
        raise UsageError(f"The shares test={test} and val={val} must be at least 0 and below 1.")
    units = np.where(index.groups >= 0, index.groups, index.ids)
    rows = {name: index.rows_of(name) for name in ("train", "val", "test") if name in index.split_names}
    if rows and "train" not in rows:
        there = ", ".join(index.split_names)
        raise DataError(f"The data declare the splits {there} but no 'train'. Name one 'train' or declare none.")
    train = rows.get("train", np.arange(len(index), dtype=np.int64))
    parts: dict[str, Ints] = {}
    for name, share in (("test", test), ("val", val)):
        if name in rows:
            parts[name] = rows[name]
        else:
            away = _falls(units[train], index.labels[train], share, seed, name)
            parts[name], train = train[away], train[~away]
    split = Split(train=train, **parts)
    if not len(split.train) or not len(split.test):
        raise DataError(
            f"Of {len(index)} images {len(split.train)} are for training and {len(split.test)} for testing; both "
            "are needed. Add images (or groups), or change the shares."
        )
    _refuse_cut_groups(index, split)
    return split


def _falls(units: Ints, labels: Ints, share: float, seed: int, purpose: str) -> Bools:
    """Which rows go away to the split `purpose`, whole units at a time."""
    place = uniform(seed, word(f"split {purpose}"), units)
    away = place < share
    if share == 0:
        return away
    for label in np.unique(labels[labels >= 0]):
        mine = labels == label
        if away[mine].all() == away[mine].any() and len(np.unique(units[mine])) > 1:
            extreme = np.flatnonzero(mine)[place[mine].argmax() if away[mine].all() else place[mine].argmin()]
            away[units == units[extreme]] = not away[extreme]
    return away


def _refuse_cut_groups(index: SampleIndex, split: Split) -> None:
    sides = [set(index.groups[rows].tolist()) - {-1} for rows in (split.train, split.val, split.test)]
    cut = (sides[0] & sides[1]) | (sides[0] & sides[2]) | (sides[1] & sides[2])
    if cut:
        row = int(np.flatnonzero(np.isin(index.groups, list(cut)))[0])
        raise DataError(
            f"{len(cut)} group(s) lie in more than one of the declared splits, for example that of "
            f"{index.names[row]!r}, so the test images are not new. Move each group into one split, or drop the "
            "group column."
        )


# --------------------------------------------------------------------------------------------------- labels


def draw_few(
    labels: Ints,
    ids: Ints,
    per_class: int,
    draw: int,
    seed: int,
    class_names: Sequence[str] | None = None,
) -> Ints:
    """Positions, ascending, of exactly `per_class` labelled samples of every class: label draw number `draw`.

    labels: int64 [M], -1 for unlabelled ones, which are never drawn. Within one draw a smaller budget is a part of a
    larger one. Raises UsageError for a budget below 1 and DataError naming the class that has too few.
    """
    if per_class < 1:
        raise UsageError(f"The number of labels per class is {per_class}, but must be at least 1.")
    order = np.argsort(hash_words(seed, word("label draw"), draw, ids), kind="stable")
    chosen = []
    for label in np.unique(labels[labels >= 0]).tolist():
        mine = order[labels[order] == label][:per_class]
        if len(mine) < per_class:
            name = repr(class_names[label]) if class_names else f"number {label}"
            raise DataError(
                f"Class {name} has {len(mine)} labelled training images, fewer than the {per_class} per class asked "
                "for. Ask for fewer, or label more of it."
            )
        chosen.append(mine)
    if not chosen:
        raise DataError("None of the training images is labelled, so none can be drawn. Label some of them.")
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def shuffled(labels: Ints, seed: int) -> Ints:
    """The labels dealt out anew at random: the control in which nothing can be learned. Same counts per class.

    Unlabelled places (-1) stay unlabelled.
    """
    known = np.flatnonzero(labels >= 0)
    order = np.argsort(hash_words(seed, word("shuffled labels"), np.arange(len(known))), kind="stable")
    dealt = labels.copy()
    dealt[known] = labels[known[order]]
    return dealt


def choose_k(
    bank: Tensor,
    labels: Ints,
    ids: Ints,
    *,
    n_classes: int,
    seed: int,
    candidates: Sequence[int] = (1, 5, 10, 20, 50, 200),
    folds: int = 5,
    knn_temperature: float = KNN_TEMPERATURE,
) -> int:
    """The k whose votes are right most often when each fold of the bank is classified by the others.

    Only the labelled bank given is read: within a label budget, pass the labels of one draw. bank: [M, D]; labels
    int64 [M], none -1; ids: int64 [M], of the images, or of their groups so that a group is in one fold. Folds are
    stratified and made by hash. The smaller k wins ties; a k that a fold's bank can't fill is not tried. When
    nothing can be tried (one image in all, say) the answer is the smallest candidate that the bank can fill.
    """
    fold = folds_of(labels, ids, folds, seed)
    banks = [np.flatnonzero(fold != number) for number in range(folds)]
    held = [np.flatnonzero(fold == number) for number in range(folds)]
    pairs = [(b, q) for b, q in zip(banks, held, strict=True) if len(b) and len(q)]
    fits = sorted({k for k in candidates if 1 <= k <= min((len(b) for b, _ in pairs), default=0)})
    if len(pairs) < 2 or not fits:
        return min(max(1, min(candidates)), len(labels))
    right = dict.fromkeys(fits, 0)
    for b, q in pairs:
        similarities, rows = nearest(bank[b], bank[q], fits[-1])
        voters = labels[b][rows]
        for k in fits:
            predicted = vote(similarities[:, :k], voters[:, :k], n_classes=n_classes, knn_temperature=knn_temperature)
            right[k] += int((predicted == labels[q]).sum())
    return max(fits, key=lambda k: (right[k], -k))


def folds_of(labels: Ints, ids: Ints, folds: int, seed: int) -> Ints:
    """A fold number per row: the units of a class in hash order, dealt out in turn, the next class going on there."""
    units, first, member = np.unique(ids, return_index=True, return_inverse=True)
    key: UInt64Array = hash_words(seed, word("folds"), units)
    order = np.lexsort((key, labels[first]))
    fold = np.empty(len(units), np.int64)
    fold[order] = np.arange(len(units)) % folds
    return fold[member]


# --------------------------------------------------------------------------------------------------- ledger


def plan_hash(plan: Mapping[str, Any]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a named plan (JSON values), whatever its order of keys."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


class Ledger:
    """Every reading of a labelled split, one line each, in a file that only grows (`eval/ledger.jsonl`).

    Record a reading before its labels are looked at, so that an evaluation that fails half-way counts too. A last
    line without its end, left by a process that was killed or a disk that was full, is set aside in `ledger.torn`
    (`set_aside` says so); any other line that can't be read raises DamagedError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: str | None = None
        """What to tell the user about a torn last line; None when there was none."""
        self.readings: list[dict[str, Any]] = self._read() if path.exists() else []

    def record(self, *, split: str, purpose: str, plan: str, n: int, step: int, data: str | None = None) -> None:
        """Append one reading of `n` labelled images of `split` at checkpoint `step`; `plan` is a `plan_hash`.

        data: the data's name, where the reader wants to find it again.
        """
        utc = datetime.now(UTC).isoformat(timespec="seconds")
        reading: dict[str, Any] = {"utc": utc, "split": split, "purpose": purpose, "plan": plan, "n": n, "step": step}
        if data is not None:
            reading["data"] = data
        _append(self.path, to_json(reading, indent=None).rstrip("\n"))
        self.readings.append(reading)

    def count(self, split: str, plan: str | None = None) -> int:
        """How often `split` has been read, in all or for one plan."""
        return sum(r["split"] == split and plan in (None, r["plan"]) for r in self.readings)

    def _read(self) -> list[dict[str, Any]]:
        with storage_errors(self.path, "read"):
            whole = self.path.read_bytes()
        *lines, tail = whole.split(b"\n")
        readings = [self._parse(line, number) for number, line in enumerate(lines, 1)]
        if not tail:
            return readings
        torn = self.path.with_name("ledger.torn")
        _append(
            torn, tail.decode("utf-8", "replace")
        )  # first kept there, then cut here: a kill in between loses nothing
        log = AppendLog(self.path)
        try:
            log.truncate_to(len(whole) - len(tail))
            log.sync()
        finally:
            log.close()
        self.set_aside = (
            f"the last line of {self.path} was cut off when it was written; it is set aside in {torn.name} and not "
            "counted as a reading."
        )
        return readings

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            reading = json.loads(line)
            if not {"utc", "split", "purpose", "plan", "n", "step"} <= set(reading):
                raise ValueError("a field is missing")
        except (ValueError, TypeError) as error:
            raise DamagedError(
                f"Line {number} of {self.path} is no reading of a split; the file was changed. Put it back."
            ) from error
        return dict(reading)


def _append(path: Path, line: str) -> None:
    log = AppendLog(path)
    try:
        log.append(line)
        log.sync()
    finally:
        log.close()
