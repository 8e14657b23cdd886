"""A model of a disk that loses its power: what was synced is kept, of the rest anything may be.

`Recorder` writes down every file operation below a folder while real code runs. `Disk` takes these operations one by
one and knows, for each file, the bytes that an fsync made durable, and for each folder, the entries that a sync of the
folder made durable; the changes since then reach the disk or not, each by itself. That is stricter than a journal,
which keeps them in their order. `after_cut` says what is there after a loss of power, for one draw of what survived.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mocokit import files

Keep = Callable[[str], bool]
"""Whether a change of this kind survives: "entry" or "data"."""


@dataclass(frozen=True)
class Event:
    """open, write, cut, sync, rename, mkdir, sync folder, remove; or a mark that the test sets."""

    kind: str
    path: str
    value: Any = None


class Recorder:
    """Writes down what happens below `root` through the primitives of `files`, and what is removed there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.events = root.resolve(), list[Event]()
        after: dict[str, Callable[..., Event | None]] = {
            "_open": lambda _, path, flags: self._event("open", path) if flags & os.O_CREAT else None,
            "_write": lambda count, fd, data: self._event("write", self._of(fd), bytes(data[:count])),
            "_fsync": lambda _, fd: self._event("sync", self._of(fd)),
            "_rename": lambda _, source, target: self._event("rename", source, target.name),
            "_mkdir": lambda _, path: self._event("mkdir", path),
            "_sync_folder": lambda _, path: self._event("sync folder", path),
        }
        for name, event in after.items():
            monkeypatch.setattr(files, name, self._watched(getattr(files, name), event))
        monkeypatch.setattr(
            files.os,
            "ftruncate",
            self._watched(os.ftruncate, lambda _, fd, size: self._event("cut", self._of(fd), size)),
        )
        for owner, name in ((Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree")):
            removed = self._watched(getattr(owner, name), lambda _, path, *__, **___: self._event("remove", path))
            monkeypatch.setattr(owner, name, removed)

    def mark(self, kind: str, value: Any) -> None:
        """Something that the test wants to know the moment of."""
        self.events.append(Event(kind, "", value))

    def _watched(self, original: Callable[..., Any], event: Callable[..., Event | None]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            result = original(*arguments, **more)
            if (made := event(result, *arguments, **more)) is not None:
                self.events.append(made)
            return result

        return call

    def _of(self, descriptor: int) -> Path:
        return Path(f"/proc/self/fd/{descriptor}").readlink()

    def _event(self, kind: str, path: Path, value: Any = None) -> Event | None:
        absolute = Path(os.path.abspath(path))  # noqa: PTH100 links in the last part stay
        if not absolute.is_relative_to(self.root):
            return None
        return Event(kind, absolute.relative_to(self.root).as_posix(), value)


@dataclass
class File:
    """What a program reads, and what a sync made durable."""

    data: bytes = b""
    durable: bytes = b""

    def after_cut(self, rng: random.Random, keep: Keep) -> bytes:
        """The durable bytes; all of them; or the new length with some of what was appended, the rest zeros."""
        if self.data == self.durable or not keep("data"):
            return self.durable
        if not self.data.startswith(self.durable) or rng.random() < 0.5:
            return self.data
        appended = len(self.data) - len(self.durable)
        there = rng.randrange(appended + 1)
        return self.data[: len(self.durable) + there] + bytes(rng.choice((0, appended - there)))


@dataclass
class Folder:
    """What a program sees, what a sync made durable, and the changes since: (name that went, name that came, what)."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, File | Folder | None]] = field(default_factory=list)

    def change(self, gone: str | None, came: str | None, what: File | Folder | None) -> None:
        """An entry that went, came, or has another name now."""
        if gone is not None:
            self.entries.pop(gone, None)
        if came is not None and what is not None:
            self.entries[came] = what
        self.pending.append((gone, came, what))

    def sync(self) -> None:
        """Every entry is durable as it is."""
        self.durable, self.pending = dict(self.entries), []

    def after_cut(self, rng: random.Random, keep: Keep) -> dict[str, Any]:
        """The tree that is left: names to bytes or to trees."""
        there = dict(self.durable)
        for gone, came, what in self.pending:
            if keep("entry"):
                if gone is not None:
                    there.pop(gone, None)
                if came is not None and what is not None:
                    there[came] = what
        return {name: node.after_cut(rng, keep) for name, node in sorted(there.items())}


class Disk:
    """The state of the folder that was recorded, which was empty and durable at first."""

    def __init__(self) -> None:
        self.root = Folder()

    def do(self, event: Event) -> None:
        """One operation. A mark does nothing."""
        parent, _, name = event.path.rpartition("/")
        if event.kind == "sync folder":
            folder = self._at("" if event.path == "." else event.path)
            assert isinstance(folder, Folder)
            folder.sync()
        elif event.kind in ("open", "mkdir", "rename", "remove"):
            folder = self._at(parent)
            assert isinstance(folder, Folder)
            there = folder.entries.get(name)
            if event.kind == "rename":
                folder.change(name, event.value, there)
            elif event.kind == "remove":
                if isinstance(there, Folder):
                    for inner in list(there.entries):
                        there.change(inner, None, None)
                folder.change(name, None, None)
            elif there is None:
                folder.change(None, name, File() if event.kind == "open" else Folder())
        elif event.kind in ("write", "cut", "sync"):
            file = self._at(event.path)
            assert isinstance(file, File)
            if event.kind == "write":
                file.data += event.value
            elif event.kind == "cut":
                file.data = file.data[: event.value]
            else:
                file.durable = file.data

    def after_cut(self, rng: random.Random, keep: Keep) -> dict[str, Any]:
        """What is left when the power goes now."""
        return self.root.after_cut(rng, keep)

    def _at(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for name in path.split("/") if path else []:
            assert isinstance(node, Folder)
            node = node.entries[name]
        return node


def write_tree(tree: dict[str, Any], folder: Path) -> Path:
    """What a cut left, as real files."""
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, dict):
            write_tree(node, folder / name)
        else:
            (folder / name).write_bytes(node)
    return folder
