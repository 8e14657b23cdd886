"""Questions to an index: what is most like this, and what is there twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mocokit.data.randomness import sample_id
from mocokit.errors import UsageError
from mocokit.retrieval.encode import Floats, Ints
from mocokit.retrieval.index import SearchIndex, allowed_labels
from mocokit.retrieval.layout import readable


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """One image found."""

    id: int
    name: str
    label: str | None
    group: int | None
    score: float
    """Cosine, -1 to 1."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values. Ids are text: JavaScript's numbers don't hold 63 bits."""
        return {
            "id": str(self.id),
            "name": readable(self.name),
            "label": self.label,
            "group": None if self.group is None else str(self.group),
            "score": round(self.score, 6),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Which images may be found; empty = all."""

    labels: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    """Group texts as in the data, or numbers as they are printed."""


def allowed(index: SearchIndex, chosen: Filter) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """bool [M], or None where everything may be found. Raises UsageError for a label or group that isn't there."""
    alive = index.rows.alive
    if not chosen.labels and not chosen.groups and alive.all():
        return None
    may = alive
    if chosen.labels:
        may = may & allowed_labels(index, chosen.labels)
    if chosen.groups:
        numbers = [_group_number(index, text) for text in chosen.groups]
        may = may & np.isin(index.rows.groups, numbers)
    return may


def _group_number(index: SearchIndex, text: str) -> int:
    groups = index.rows.groups
    for number in (sample_id(text), int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1):
        if number >= 0 and (groups == number).any():
            return number
    raise UsageError(f"The index has no group {text!r}.")


def nearest(
    index: SearchIndex,
    queries: Floats,
    k: int,
    *,
    chosen: Filter | None = None,
    without: Sequence[int] = (),
    skip: int = 0,
) -> list[list[Hit]]:
    """The k most similar images of each unit query [Q, D], most similar first; fewer where there are fewer.

    without: ids that are left out (a query that is itself stored). skip: how many of the nearest to pass over, for
    pages. Raises UsageError for k or skip out of range.
    """
    if not 1 <= k <= 1000 or not 0 <= skip <= 100_000:
        raise UsageError(f"k must lie in [1, 1000] and skip in [0, 100,000]. Got {k} and {skip}.")
    may = allowed(index, chosen or Filter())
    if without:
        may = index.rows.alive if may is None else may
        may = may & ~np.isin(index.rows.ids, list(without))
    wanted = min(skip + k, len(index.rows))
    cosines, positions = index.neighbours.search(queries, wanted, may)
    return [
        [hit(index, int(row), float(score)) for row, score in zip(line, scores, strict=True) if row >= 0][skip:]
        for line, scores in zip(positions, cosines, strict=True)
    ]


def hit(index: SearchIndex, row: int, score: float) -> Hit:
    """A row of the index as a hit."""
    group = int(index.rows.table.column("group")[row].as_py())
    return Hit(
        id=int(index.rows.table.column("id")[row].as_py()),
        name=index.rows.name(row),
        label=index.rows.label(row),
        group=group if group >= 0 else None,
        score=score,
    )


def stored_vector(index: SearchIndex, sample: int) -> Floats:
    """The unit vector [1, D] of a stored image. Raises UsageError when its id isn't there."""
    row = index.rows.row_of(sample)
    if row is None:
        raise UsageError(f"The index has no image with id {sample}.")
    return index.neighbours.vectors(np.array([row], np.int64))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Images that are nearly the same: each is linked to another one by at least the threshold."""

    rows: Ints
    lowest: float
    """The lowest cosine of a link that holds the cluster together."""


def near_duplicates(index: SearchIndex, threshold: float, *, block: int = 1024, links: int = 50) -> list[Cluster]:
    """Clusters of two and more living rows whose cosines reach `threshold`, largest first.

    All pairs are compared where the index is exact; where it is approximate, each image with its 50 nearest. Raises
    UsageError for a threshold outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise UsageError(f"--threshold must lie in (0, 1]. Got {threshold}.")
    rows = np.flatnonzero(index.rows.alive)
    parent = np.arange(len(index.rows))
    strength: dict[int, float] = {}

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = int(parent[row])
        return row

    pairs = _pairs(index, rows, threshold, block, links)
    for score, first, second in sorted(pairs, key=lambda pair: (-pair[0], pair[1], pair[2])):
        a, b = root(first), root(second)
        if a != b:
            a, b = min(a, b), max(a, b)
            parent[b] = a
            strength[a] = score  # pairs come strongest first, so this is the weakest link so far
    members: dict[int, list[int]] = {}
    for row in rows.tolist():
        members.setdefault(root(row), []).append(row)
    clusters = [Cluster(np.array(some), strength[first]) for first, some in members.items() if len(some) > 1]
    return sorted(clusters, key=lambda one: (-len(one.rows), int(one.rows[0])))


def _pairs(index: SearchIndex, rows: Ints, threshold: float, block: int, links: int) -> list[tuple[float, int, int]]:
    """(cosine, row, later row) of all pairs that reach the threshold, up to rounding."""
    found: list[tuple[float, int, int]] = []
    least = np.float32(threshold - 1e-6)
    exact = index.neighbours.kind == "exact"
    vectors = index.neighbours.vectors(rows)
    may = None if index.rows.alive.all() else index.rows.alive
    for start in range(0, len(rows), block):
        here = vectors[start : start + block]
        if exact:
            cosines = here @ vectors[start:].T
            first, second = np.nonzero(cosines >= least)
            later = second > first
            first, second = first[later], second[later]
            scores = cosines[first, second]
            left, right = rows[start + first], rows[start + second]
        else:
            cosines, positions = index.neighbours.search(here, links, may)
            first, place = np.nonzero((cosines >= least) & (positions >= 0))
            left, right, scores = rows[start + first], positions[first, place], cosines[first, place]
            left, right = np.minimum(left, right), np.maximum(left, right)
            apart = left != right
            left, right, scores = left[apart], right[apart], scores[apart]
        found += zip(scores.tolist(), left.tolist(), right.tolist(), strict=True)
    return found
