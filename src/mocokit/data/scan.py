"""A folder of pictures -> sample table. Loop-free, and nothing outside the folder unless asked for.

Real folders are walked first; symbolic links are looked at afterwards, in the order of their names. A link to
something inside the folder adds nothing (its target is found anyway), a link to the outside is refused and
counted. Nothing is opened: FIFOs, sockets and devices are only counted. Memory per file is its name and two
integers.
"""

from __future__ import annotations

import bisect
import os
import stat
import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mocokit.data.index import SPLIT_WORDS, SampleIndex, make_index, path_key
from mocokit.errors import DataError

VIDEO_EXTENSIONS = (
    ".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".ts", ".m2ts", ".wmv", ".flv", ".ogv", ".3gp",
    ".gif",
)  # fmt: skip
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_TABLES = (".parquet", ".npz", ".csv", ".tar")  # what else can be opened, by its own name


@dataclass(kw_only=True, slots=True)
class ScanReport:
    """What was passed over while the table was made; all zero for a tidy folder."""

    other_extensions: Counter[str] = field(default_factory=Counter)
    """Files whose extension isn't a picture's, by extension."""
    links_outside: int = 0
    """Links that lead out of the folder and were not followed."""
    links_inside: int = 0
    """Links to files or folders that are in the table already."""
    links_broken: int = 0
    """Links that lead nowhere, or round in a circle."""
    special_files: int = 0
    """FIFOs, sockets, devices: never opened."""
    sidecars: int = 0
    """`._name` files that macOS leaves beside pictures."""
    unreadable: int = 0
    """Folders that can't be listed and files that can't be looked at."""
    missing: int = 0
    """Lines of a manifest whose file isn't there."""
    repeated: int = 0
    """Lines of a manifest that repeat an earlier one word for word."""
    first_unreadable: str = ""
    """Name of the first of them, relative to the root."""
    broken: list[tuple[str, str]] = field(default_factory=list)
    """Videos that can't be used: name and reason. They have no rows."""

    def lines(self) -> list[str]:
        """One sentence for each kind that was met."""
        kinds = ", ".join(
            f"{extension or 'none'} {count:,}" for extension, count in self.other_extensions.most_common(5)
        )
        told = (
            (self.other_extensions.total(), f"files with other extensions passed over ({kinds})"),
            (self.links_outside, "links that lead outside the folder not followed"),
            (self.links_inside, "links to pictures already counted passed over"),
            (self.links_broken, "broken links passed over"),
            (self.special_files, "FIFOs, sockets or devices never opened"),
            (self.sidecars, "macOS ._ files passed over"),
            (self.unreadable, f"folders or files unreadable (first: {self.first_unreadable!r})"),
            (self.missing, "listed files missing"),
            (self.repeated, "repeated lines used once"),
        )
        lines = [f"{count:,} {what}" for count, what in told if count]
        if self.broken:
            first = "; ".join(f"{name!r} ({reason})" for name, reason in self.broken[:5])
            lines.append(f"{len(self.broken):,} videos passed over: {first}" + ("; ..." if self.broken[5:] else ""))
        return lines


class _Walk:
    """The state of one scan: what was found, what was passed over, which folders were seen."""

    def __init__(self, root: str, extensions: tuple[str, ...]) -> None:
        self.root = root
        self.extensions = frozenset(extensions)
        self.names: list[str] = []
        self.sizes = array("q")
        self.mtimes = array("q")
        self.links: list[str] = []
        self.seen: set[tuple[int, int]] = set()  # (device, inode) of every folder listed
        self.used: set[tuple[int, int]] = set()  # the same of every file reached through a link
        self.report = ScanReport()

    def add(self, name: str, status: os.stat_result) -> None:
        self.names.append(name)
        self.sizes.append(status.st_size)
        self.mtimes.append(status.st_mtime_ns)

    def unreadable(self, name: str) -> None:
        self.report.unreadable += 1
        self.report.first_unreadable = min(filter(None, (self.report.first_unreadable, name)), default="")

    def is_picture(self, name: str) -> bool:
        """Whether the extension is a picture's; counts it when not."""
        base = name.rpartition("/")[2]
        if base.startswith("._"):
            self.report.sidecars += 1
            return False
        extension = base[base.rfind(".") :].lower() if "." in base else ""
        if extension in self.extensions:
            return True
        self.report.other_extensions[extension if len(extension) <= 10 else extension[:9] + "…"] += 1
        return False

    def folder(self, prefix: str, *, linked: bool = False) -> None:
        """List `prefix` ("" or "a/b/") and everything below it; behind a link, nothing is listed twice."""
        waiting = [prefix]
        while waiting:
            prefix = waiting.pop()
            try:
                status = os.stat(self.root + prefix)  # noqa: PTH116
                key = (status.st_dev, status.st_ino)
                if linked and key in self.seen:
                    self.report.links_inside += 1
                    continue
                self.seen.add(key)
                with os.scandir(self.root + prefix) as entries:
                    for entry in entries:
                        self._entry(entry, prefix + entry.name, waiting, linked)
            except OSError:
                self.unreadable(prefix or ".")

    def _entry(self, entry: os.DirEntry[str], name: str, waiting: list[str], linked: bool) -> None:
        if entry.is_symlink():
            self.links.append(name)
        elif entry.is_dir(follow_symlinks=False):
            waiting.append(name + "/")
        elif not entry.is_file(follow_symlinks=False):
            self.report.special_files += 1
        elif self.is_picture(name):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                self.unreadable(name)
                return
            if linked:
                self.add_once(name, status)
            else:
                self.add(name, status)

    def add_once(self, name: str, status: os.stat_result) -> None:
        """Add a file reached through a link, unless it was added before."""
        key = (status.st_dev, status.st_ino)
        if key in self.used:
            self.report.links_inside += 1
        else:
            self.used.add(key)
            self.add(name, status)

    def follow_links(self, follow_outside: bool) -> None:
        """Decide about every link met, in the order of names; links met on the way are decided about too."""
        real_root = os.path.realpath(self.root).rstrip("/") + "/"
        in_tree = sorted(self.names)
        while self.links:
            batch, self.links = sorted(self.links, key=path_key), []
            for name in batch:
                self._follow(name, real_root, in_tree, follow_outside)

    def _follow(self, name: str, real_root: str, in_tree: list[str], follow_outside: bool) -> None:
        try:
            status = os.stat(self.root + name)  # noqa: PTH116
        except OSError:
            self.report.links_broken += 1
            return
        target = os.path.realpath(self.root + name)
        inside = (target + "/").startswith(real_root)
        if not inside and not follow_outside:
            self.report.links_outside += 1
        elif stat.S_ISDIR(status.st_mode):
            if inside:
                self.report.links_inside += 1
            else:
                self.folder(name + "/", linked=True)
        elif not stat.S_ISREG(status.st_mode):
            self.report.special_files += 1
        elif self.is_picture(name):
            relative = target[len(real_root) :] if inside else ""
            place = bisect.bisect_left(in_tree, relative)
            if inside and place < len(in_tree) and in_tree[place] == relative:
                self.report.links_inside += 1
            else:  # outside, or its target has no picture's name itself, as in caches of blobs
                self.add_once(name, status)


def scan_folder(
    root: str, *, follow_outside: bool = False, extensions: tuple[str, ...] = EXTENSIONS
) -> tuple[SampleIndex, ScanReport]:
    """The table of all pictures in `root`, sorted by the bytes of their relative paths, and what was passed over.

    extensions: what a picture's name ends in (`VIDEO_EXTENSIONS` for a table of videos).

    Labels and splits come from the layout: `SPLIT/CLASS/...` when every picture lies in a folder named train,
    val, valid, validation or test; otherwise `CLASS/...` when there are at least two such folders; otherwise none.
    `follow_outside` also follows links that lead out of `root`, each target once. Raises DataError when there is
    no picture.
    """
    walk = _Walk(root.rstrip("/") + "/", extensions)
    walk.folder("")
    if walk.links:
        walk.follow_links(follow_outside)
    if not walk.names:
        passed = "; ".join(walk.report.lines()) or "the folder is empty"
        others = walk.report.other_extensions
        hint = ""
        if any(extension in VIDEO_EXTENSIONS for extension in others):
            hint = " Videos are read with --video frames or --video clips."
        elif table := next((extension for extension in _TABLES if extension in others), None):
            hint = f" A {table} file is opened by its own name: {walk.root}NAME{table}."
        raise DataError(
            f"No {'pictures' if extensions is EXTENSIONS else 'videos'} in {root}: looked for {' '.join(extensions)}; "
            f"{passed}.{hint}"
        )
    # Code points sort as their UTF-8 bytes do, except for the escapes that stand for bytes that aren't UTF-8.
    key = walk.names.__getitem__ if all(map(str.isascii, walk.names)) else lambda row: path_key(walk.names[row])
    order = np.array(sorted(range(len(walk.names)), key=key), np.int64)
    names = [walk.names[row] for row in order]
    walk.names.clear()  # a million names are held once
    splits, labels = _layout(names)
    sizes = np.frombuffer(walk.sizes, np.int64)[order]
    mtimes = np.frombuffer(walk.mtimes, np.int64)[order]
    return make_index(names, sizes=sizes, mtimes=mtimes, labels=labels, splits=splits), walk.report


def _layout(names: Sequence[str]) -> tuple[list[str | None] | None, list[str | None] | None]:
    """Split and class text of every name, or None where the layout tells none."""
    first = [_part(name, 0) for name in names]
    top = set(first)
    if all(folder is not None and folder.lower() in SPLIT_WORDS for folder in top):
        second = [_part(name, name.index("/") + 1) for name in names]
        return first, second if len(set(second) - {None}) > 1 else None
    return None, first if len(top - {None}) > 1 else None


def _part(name: str, start: int) -> str | None:
    """The folder that begins at `start`, or None when that is the file's own name."""
    end = name.find("/", start)
    return None if end < 0 else sys.intern(name[start:end])
