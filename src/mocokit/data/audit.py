"""What is in the data: unreadable, odd and constant pictures, copies within and across splits, groups and classes.

Two sets can be looked at together (`against`): then a split of one set is never the same part as a split of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.fingerprints import LARGE, Fingerprints, UInt8Array, perceptual_hash, take_fingerprints, thumbnail
from mocokit.data.oddities import oddities
from mocokit.data.sources import ImageSource
from mocokit.data.twin_search import Twin, each_once, families, propose, verify

Ints = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]

UNSPLIT = "all"
"""The part that rows without a split are in."""


@dataclass(frozen=True, slots=True, eq=False)
class Audit:
    """Everything that was found about S pictures of one or two sets; rows number them, the second set's last."""

    sources: tuple[ImageSource, ...]
    names: tuple[str, ...]
    """[S] as in the sample table."""
    parts: tuple[str, ...]
    """[S] split (`train`), or set and split where there are two sets (`DATA: train`)."""
    labels: tuple[str, ...]
    """[S] class text, empty where there is none."""
    groups: Ints
    """[S] group id or -1; the same number means the same group, also in two sets."""
    fingerprints: tuple[Fingerprints, ...]
    unreadable: dict[int, str]
    """Row -> reason."""
    odd: dict[str, list[int]]
    """What is odd -> rows."""
    constant: list[int]
    same_bytes: list[list[int]]
    """Families of rows whose files are the same to the last byte."""
    same_pixels: list[list[int]]
    """Families of rows whose decoded pixels are the same, files of the same bytes included."""
    near: list[Twin]
    """Pairs of near-identical pictures; of rows with the same pixels only the first stands for all."""

    def __len__(self) -> int:
        return len(self.names)

    def picture(self, row: int) -> UInt8Array:
        """The decoded picture, uint8 [H, W, 3]. Raises UnreadableImageError."""
        source, own = self.place(row)
        return source.read(own)

    def place(self, row: int) -> tuple[ImageSource, int]:
        """The set a row belongs to, and its row number there."""
        first = len(self.sources[0].index)
        return (self.sources[0], row) if row < first else (self.sources[1], row - first)

    @property
    def shapes(self) -> Ints:
        """[S, 2] height and width, 0 where unreadable."""
        return np.concatenate([one.shapes for one in self.fingerprints])

    def twin_pairs(self) -> list[tuple[int, int]]:
        """All pairs (a < b) that are one picture, same pixels and near ones, every member of both families."""
        member = {row: family for family in self.same_pixels for row in family}
        pairs = {pair for family in self.same_pixels for pair in combinations(family, 2)}
        for twin in self.near:
            for a in member.get(twin.first, [twin.first]):
                pairs |= {(min(a, b), max(a, b)) for b in member.get(twin.second, [twin.second])}
        return sorted(pairs)

    def crossing(self) -> dict[tuple[str, str], list[tuple[int, int]]]:
        """Twins in two parts: (part, part) in the order of `part_names` -> pairs of rows in that order."""
        order = {name: place for place, name in enumerate(self.part_names())}
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for a, b in self.twin_pairs():
            if self.parts[a] != self.parts[b]:
                a, b = sorted((a, b), key=lambda row: order[self.parts[row]])
                found.setdefault((self.parts[a], self.parts[b]), []).append((a, b))
        return found

    def part_names(self) -> list[str]:
        """The parts there are, in the order of their first row's set and of the splits in it."""
        wanted = [_part(self, source, split) for source in self.sources for split in (*source.index.split_names, "")]
        there = set(self.parts)
        return [name for name in dict.fromkeys(wanted) if name in there]

    def conflicts(self) -> list[list[int]]:
        """Families of twins whose members carry different labels (in one set)."""
        one_set = [
            (a, b)
            for a, b in self.twin_pairs()
            if self.place(a)[0] is self.place(b)[0] and self.labels[a] and self.labels[b]
        ]
        joined = families(one_set)
        return [family for family in joined if len({self.labels[row] for row in family}) > 1]

    def group_leaks(self) -> list[list[int]]:
        """Rows of every group that lies in more than one part, a list for each group."""
        rows: dict[int, list[int]] = {}
        for row in np.flatnonzero(self.groups >= 0).tolist():
            rows.setdefault(int(self.groups[row]), []).append(row)
        return [members for members in rows.values() if len({self.parts[row] for row in members}) > 1]

    def class_counts(self) -> dict[str, dict[str, int]]:
        """Part -> class -> pictures; empty when nothing is labelled."""
        if not any(self.labels):
            return {}
        counts: dict[str, Counter[str]] = {name: Counter() for name in self.part_names()}
        for part, label in zip(self.parts, self.labels, strict=True):
            counts[part][label or "(none)"] += 1
        return {part: dict(sorted(count.items())) for part, count in counts.items()}


def _part(audit: Audit, source: ImageSource, split: str) -> str:
    return part_name(audit.sources, source, split)


def part_name(sources: tuple[ImageSource, ...], source: ImageSource, split: str) -> str:
    """The name of a part: the split alone, or with its set in front of it where there are two."""
    if len(sources) == 1:
        return split or UNSPLIT
    own = source.name
    if sources[0].name == sources[1].name:
        own = f"{own} ({1 + (source is sources[1])})"
    return f"{own}: {split}" if split else own


@dataclass(frozen=True, slots=True, eq=False)
class _Joint:
    """The pictures of all sets as one numbered row of them, for `verify`."""

    sources: tuple[ImageSource, ...]
    small: UInt8Array
    longer: Ints

    def large(self, row: int) -> UInt8Array:
        first = len(self.sources[0].index)
        source, own = (self.sources[0], row) if row < first else (self.sources[1], row - first)
        return thumbnail(source.read(own), LARGE)


def audit(
    source: ImageSource,
    against: ImageSource | None = None,
    *,
    proposals: Iterable[tuple[int, int]] = (),
    workers: int = 1,
    progress: Progress | None = None,
) -> Audit:
    """Look at every picture of one set, or of two sets together.

    proposals: pairs of rows to verify besides those that the perceptual hash proposes (the second set's rows begin
    at len(source.index)). workers: decoding threads. progress: called with what is done, how many, of how many.
    """
    say = progress or (lambda _what, _done, _total: None)
    sources = (source,) if against is None else (source, against)
    total = sum(len(one.index) for one in sources)
    prints: list[Fingerprints] = []
    for one in sources:
        before = sum(len(done.small) for done in prints)
        prints.append(
            take_fingerprints(
                one,
                workers=workers,
                progress=partial(_read_so_far, say, before, total),
            )
        )
    readable = np.concatenate([one.readable for one in prints])
    constant = np.concatenate([one.constant for one in prints])
    shapes = np.concatenate([one.shapes for one in prints])
    joint = _Joint(sources, np.concatenate([one.small for one in prints]), shapes.max(1))
    parts, labels = _texts(sources)
    rows = np.flatnonzero(readable)
    same_pixels = _same(np.concatenate([one.pixel_hash for one in prints]), rows)
    files = np.concatenate([one.file_hash for one in prints])
    copies = {row for family in same_pixels for row in family[1:]}
    one_each = np.array([row for row in rows.tolist() if row not in copies and not constant[row]], np.int64)
    offsets = np.cumsum([0, *(len(one.small) for one in prints)])
    odd: dict[str, list[int]] = {}
    for offset, one, looked in zip(offsets, sources, prints, strict=False):
        for reason, found in oddities(one.index.names, looked).items():
            odd.setdefault(reason, []).extend(int(offset) + row for row in found)
    return Audit(
        sources=sources,
        names=tuple(name for one in sources for name in one.index.names),
        parts=parts,
        labels=labels,
        groups=np.concatenate([one.index.groups for one in sources]),
        fingerprints=tuple(prints),
        unreadable={
            int(offset) + row: reason
            for offset, one in zip(offsets, prints, strict=False)
            for row, reason in sorted(one.unreadable.items())
        },
        odd=odd,
        constant=np.flatnonzero(constant).tolist(),
        same_bytes=_same(files, rows[files[rows].any(1)]),
        same_pixels=same_pixels,
        near=_near(joint, one_each, parts, proposals, say),
    )


def _read_so_far(say: Progress, before: int, total: int, done: int, _rows: int) -> None:
    say("reading images", before + done, total)


def _texts(sources: tuple[ImageSource, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    parts: list[str] = []
    labels: list[str] = []
    for source in sources:
        index = source.index
        names = [part_name(sources, source, split) for split in (*index.split_names, "")]
        parts += [names[number] for number in index.splits.tolist()]  # -1 is the last: no split
        labels += [index.class_names[number] if number >= 0 else "" for number in index.labels.tolist()]
    return tuple(parts), tuple(labels)


def _same(hashes: npt.NDArray[np.uint64], rows: Ints) -> list[list[int]]:
    """Families of `rows` with equal hashes, ascending, ordered by their first row."""
    if not len(rows):
        return []
    _, number, counts = np.unique(hashes[rows], axis=0, return_inverse=True, return_counts=True)
    number = number.ravel()
    found: dict[int, list[int]] = {}
    for row, family in zip(rows.tolist(), number.tolist(), strict=True):
        if counts[family] > 1:
            found.setdefault(family, []).append(row)
    return sorted(found.values())


def _near(
    joint: _Joint,
    rows: Ints,
    parts: tuple[str, ...],
    proposals: Iterable[tuple[int, int]],
    say: Progress,
) -> list[Twin]:
    """Near twins among `rows`. Each part is searched against the others too, so that a crowd of alike pictures in its
    own part can't hide the one that matters."""
    allowed = set(rows.tolist())
    also = [(a, b) for a, b in proposals if a in allowed and b in allowed and a != b]
    hashes = perceptual_hash(joint.small)
    part = np.array(parts)[rows] if len(rows) else np.zeros(0, "U1")
    names = np.unique(part)
    say("looking for near copies", 0, len(rows))
    pairs = [propose(hashes, rows), np.array(also, np.int64).reshape(-1, 2)]
    pairs += [propose(hashes, rows[part == name], rows[part != name]) for name in names if len(names) > 1]
    return verify(
        joint, each_once(np.concatenate(pairs)), progress=lambda done, total: say("comparing likely pairs", done, total)
    )


def to_exclude(audit: Audit) -> list[tuple[str, str]]:
    """Samples of the first set to leave out, with reasons: (name, reason), in the order of rows.

    Unreadable and constant pictures; of twins in one part all but the first; of twins in two parts those that training
    would see: against a second set the first set's, else the train split's before the validation split's before the
    test split's. Families with different labels go altogether, where nothing tells which label is right.
    """
    reasons: dict[int, str] = {}
    for row, reason in audit.unreadable.items():
        reasons[row] = f"unreadable: {reason}"
    for row in audit.constant:
        reasons.setdefault(row, "one colour all over")
    wrong = {row for family in audit.conflicts() for row in family}
    for a, b in audit.twin_pairs():
        if a in wrong and b in wrong and audit.labels[a] != audit.labels[b]:
            reasons.setdefault(a, f"same picture as {audit.names[b]!r} with another label")
            reasons.setdefault(b, f"same picture as {audit.names[a]!r} with another label")
    order = {name: place for place, name in enumerate(audit.part_names())}
    # Pairs across parts first: which side goes is not free there.
    pairs = sorted(audit.twin_pairs(), key=lambda pair: audit.parts[pair[0]] == audit.parts[pair[1]])
    for a, b in pairs:
        if a in reasons or b in reasons:
            continue
        across = audit.parts[a] != audit.parts[b]
        goes, stays = (a, b) if across and order[audit.parts[a]] < order[audit.parts[b]] else (b, a)
        reasons[goes] = f"same picture as {audit.names[stays]!r} in {audit.parts[stays]}"
    first = len(audit.sources[0].index)
    return [(audit.names[row], reasons[row]) for row in sorted(reasons) if row < first]


def summary(audit: Audit) -> dict[str, Any]:
    """All of it as JSON values: counts, and every row that was found, by name."""
    shapes = audit.shapes[audit.shapes.min(1) > 0]
    facts = [fact for one in audit.fingerprints for fact in one.facts if fact is not None]

    def sample(row: int) -> dict[str, str]:
        return {"name": audit.names[row], "part": audit.parts[row], "label": audit.labels[row]}

    near = [
        {
            "first": sample(twin.first),
            "second": sample(twin.second),
            "structure": round(twin.structure, 4),
            "colour": round(twin.colour, 2),
        }
        for twin in audit.near
    ]
    crossing = {
        f"{one} / {other}": {
            "pairs": len(pairs),
            f"images in {one}": len({a for a, _ in pairs}),
            f"images in {other}": len({b for _, b in pairs}),
        }
        for (one, other), pairs in audit.crossing().items()
    }
    return {
        "data": audit.sources[0].name,
        "against": audit.sources[1].name if len(audit.sources) > 1 else None,
        "images": len(audit),
        "parts": dict(Counter(audit.parts)),
        "unreadable": [sample(row) | {"reason": reason} for row, reason in audit.unreadable.items()],
        "odd": {reason: [audit.names[row] for row in rows] for reason, rows in audit.odd.items()},
        "constant": [sample(row) for row in audit.constant],
        "formats": dict(Counter(fact.format for fact in facts).most_common()),
        "modes": dict(Counter(fact.mode for fact in facts).most_common()),
        "sizes": _sizes(shapes),
        "same_bytes": [[sample(row) for row in family] for family in audit.same_bytes],
        "same_pixels": [[sample(row) for row in family] for family in audit.same_pixels],
        "near": near,
        "crossing": crossing,
        "different_labels": [[sample(row) for row in family] for family in audit.conflicts()],
        "groups_in_two_parts": [[sample(row) for row in members] for members in audit.group_leaks()],
        "classes": audit.class_counts(),
    }


def _sizes(shapes: Ints) -> dict[str, Any]:
    if not len(shapes):
        return {}
    common = Counter(map(tuple, shapes.tolist())).most_common(5)
    return {
        "smallest": [int(value) for value in shapes[shapes.prod(1).argmin()]],
        "median": [int(value) for value in np.median(shapes, axis=0)],
        "largest": [int(value) for value in shapes[shapes.prod(1).argmax()]],
        "most_common": [{"height": h, "width": w, "images": count} for (h, w), count in common],
        "different": len({tuple(shape) for shape in shapes.tolist()}),
    }
