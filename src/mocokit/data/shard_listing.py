"""One pass over a tar shard in the WebDataset layout: which samples it holds, and where their bytes lie."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from mocokit.data.blobs import Blob, BlobError
from mocokit.data.manifest import Columns
from mocokit.data.scan import EXTENSIONS, ScanReport
from mocokit.data.tarball import Member, NotATarError, TarNotes, members, windowed
from mocokit.errors import DataError

OWN = "mocokit"
"""Field of `key.json` in which `pack` keeps a sample's original name and group, so that ids stay as they were."""
_PICTURES = frozenset(extension[1:] for extension in EXTENSIONS)
_LOCAL_WINDOW, _REMOTE_WINDOW = 2**14, 2**22  # bytes read at once while listing: headers alone; whole stretches
_MAX_JSON, _MAX_CLASS = 2**20, 2**10


@dataclass(kw_only=True, slots=True)
class ShardReport(ScanReport):
    """What was passed over in shards."""

    sparse: int = 0
    unsafe_names: int = 0
    unknown_members: int = 0
    second_pictures: int = 0
    """Pictures of a key that already has one; the first is used."""
    without_picture: int = 0
    """Keys without any picture."""
    bad_metadata: int = 0
    """.json members that are no JSON object, and .json or .cls that are too long; their samples are unlabelled."""
    cut: list[str] = field(default_factory=list)
    """One sentence for each shard that isn't whole; what comes before the cut is used."""

    def lines(self) -> list[str]:
        """One sentence for each kind that was met."""
        told = (
            (self.sparse, "sparse members passed over"),
            (self.unsafe_names, "members with absolute, empty or `..` names passed over"),
            (self.unknown_members, "members that are no files passed over"),
            (self.second_pictures, "further pictures of a key passed over"),
            (self.without_picture, "keys without a picture passed over"),
            (self.bad_metadata, ".json or .cls members unreadable, their samples unlabelled"),
        )
        return [*ScanReport.lines(self), *(f"{count:,} {what}" for count, what in told if count), *self.cut]

    def add(self, other: ShardReport) -> None:
        """Count what another report counted, too."""
        for one in fields(self):
            mine, its = getattr(self, one.name), getattr(other, one.name)
            setattr(self, one.name, mine or its if isinstance(mine, str) else mine + its)


@dataclass(slots=True)
class ShardRows:
    """Columns of samples, in order."""

    names: list[str] = field(default_factory=list)
    shards: array[int] = field(default_factory=lambda: array("q"))
    offsets: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    labels: list[str | int | None] = field(default_factory=list)
    classes: list[str | None] = field(default_factory=list)  # from .cls
    groups: list[str | int | None] = field(default_factory=list)
    splits: list[str | int | None] = field(default_factory=list)
    group_ids: array[int] = field(default_factory=lambda: array("q"))  # as they were before `pack`

    def add(self, other: ShardRows) -> None:
        for one in fields(self):
            getattr(self, one.name).extend(getattr(other, one.name))


class ShardListing:
    """One pass over one shard."""

    def __init__(self, blob: Blob, number: int, columns: Columns) -> None:
        self.blob, self.number = blob, number
        self.fields = {role: getattr(columns, role) or role for role in ("label", "group", "split")}
        self.read_at = windowed(blob.read, _REMOTE_WINDOW if blob.remote else _LOCAL_WINDOW)
        self.rows, self.report, self.present = ShardRows(), ShardReport(), set[str]()
        self.known: dict[str, str] = {}  # of many labels few are different: each text is held once

    def run(self) -> tuple[ShardRows, ShardReport, set[str]]:
        """Raises DataError when it can't be read, is no tar, or its members are out of order."""
        notes = TarNotes()
        name, report = self.blob.name, self.report
        try:
            for key, group in self._keys(members(self.read_at, self.blob.size, notes)):
                self._key(key, group)
        except NotATarError as error:
            packed = self.read_at(0, 6)
            hint = " It is compressed: unpack it with gunzip, unzstd, unxz or bunzip2." if _compressed(packed) else ""
            raise DataError(f"{name} is not a tar that can be read by offset: {error}.{hint}") from error
        except BlobError as error:
            raise DataError(f"{error}. The shard can't be listed.") from error
        report.links_inside += notes.links
        report.special_files += notes.devices
        report.sparse, report.unsafe_names, report.unknown_members = notes.sparse, notes.unsafe, notes.unknown
        if notes.cut:
            report.cut.append(
                f"{name} is not whole: {notes.cut}; {len(self.rows.sizes):,} samples before that are used"
            )
        return self.rows, self.report, self.present

    def _keys(self, found: Iterable[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
        """(key, its members by extension). Raises DataError for a name or key that comes a second time."""
        seen: set[str] = set()
        key, group = "", dict[str, Member]()
        for member in found:
            name = member[0]
            base = name.rfind("/") + 1
            dot = name.find(".", base)
            if dot <= base:  # hidden, or without extension
                if name.startswith("._", base):
                    self.report.sidecars += 1
                else:
                    self.report.other_extensions[""] += 1
                continue
            if name[:dot] != key:
                if group:
                    yield key, group
                key, group = name[:dot], {}
                if key in seen:
                    raise DataError(self._out_of_order(name, key))
                seen.add(key)
            extension = name[dot + 1 :].lower()
            if extension in group:
                raise DataError(f"{self.blob.name} holds {name!r} twice. Write it again with every name once.")
            group[extension] = member
        if group:
            yield key, group

    def _out_of_order(self, name: str, key: str) -> str:
        earlier = members(self.read_at, self.blob.size, TarNotes())
        if next(one for one, _, _ in earlier if one.startswith(key + ".")) == name:
            return f"{self.blob.name} holds {name!r} twice. Write it again with every name once."
        return (
            f"{self.blob.name}: {name!r} comes after other samples, apart from the earlier members of its key {key!r}. "
            "The members of a key must follow one another: write the shard with sorted names (tar --sort=name)."
        )

    def _key(self, key: str, group: dict[str, Member]) -> None:
        """The row of a key; several, where dots inside of the names make one key of `a.1.jpg` and `a.2.jpg`."""
        pictures = [extension for extension in group if extension in _PICTURES]
        if not pictures:
            pictures = [extension for extension in group if extension.rpartition(".")[2] in _PICTURES]
        else:
            self.report.second_pictures += len(pictures) - 1
            del pictures[1:]
        self.report.without_picture += not pictures
        used = set(pictures)
        for extension in pictures:
            prefix = extension[: extension.rfind(".") + 1]
            used |= {prefix + "json", prefix + "cls"}
            self._row(group[extension], group.get(prefix + "json"), group.get(prefix + "cls"))
        for extension in group:
            if extension not in used and extension not in _PICTURES:
                self.report.other_extensions[f".{extension if len(extension) < 10 else extension[:8] + '…'}"] += 1

    def _row(self, picture: Member, json_member: Member | None, class_member: Member | None) -> None:
        rows = self.rows
        facts = {} if json_member is None else self._json(json_member)
        own = facts.get(OWN)
        own = own if isinstance(own, dict) else {}
        name, group_id = own.get("name"), own.get("group")
        rows.names.append(name if isinstance(name, str) and name else f"{self.blob.name}/{picture[0]}")
        rows.shards.append(self.number)
        rows.offsets.append(picture[1])
        rows.sizes.append(picture[2])
        rows.labels.append(self._value(facts, "label"))
        rows.groups.append(self._value(facts, "group"))
        rows.splits.append(self._value(facts, "split"))
        rows.group_ids.append(group_id if type(group_id) is int and 0 <= group_id < 2**63 else -1)
        rows.classes.append(None if class_member is None else self._class(class_member))

    def _json(self, member: Member) -> dict[str, Any]:
        try:
            if member[2] > _MAX_JSON:
                raise ValueError("too long")
            facts = json.loads(self.read_at(member[1], member[2]))
            if not isinstance(facts, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError):
            self.report.bad_metadata += 1
            return {}
        if len(self.present) < 1000:
            self.present.update(facts)
        return facts

    def _value(self, facts: dict[str, Any], role: str) -> str | int | None:
        value = facts.get(self.fields[role])
        if isinstance(value, str):
            return self.known.setdefault(value, value) or None
        return value if type(value) is int and abs(value) < 2**63 else None

    def _class(self, member: Member) -> str | None:
        if member[2] > _MAX_CLASS:
            self.report.bad_metadata += 1
            return None
        text = self.read_at(member[1], member[2]).decode("utf-8", "replace").strip()
        return self.known.setdefault(text, text) or None


def _compressed(start: bytes) -> bool:
    return start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"))
