"""A CSV table or a plain list of paths -> sample table.

Paths are relative to the manifest's own folder, or to the root that is named; nothing outside of it can be
listed. A value without a picture's extension (the `id` column of a product catalogue) is looked up among the
names of the pictures below the root.
"""

from __future__ import annotations

import contextlib
import csv
import os
import stat
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mocokit.data.index import SampleIndex, make_index
from mocokit.data.scan import EXTENSIONS, ScanReport, scan_folder
from mocokit.errors import DataError, did_you_mean

PATH_COLUMNS = ("path", "file_name", "filename", "file", "image", "id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Which columns of a table mean what. None: the usual name, if it is there."""

    path: str | None = None
    """Default: the first there is of path, file_name, filename, file, image, id."""
    label: str | None = None
    """Default: label, if there is one."""
    group: str | None = None
    """Default: group, if there is one."""
    split: str | None = None
    """Default: split, if there is one."""

    def pick(self, role: str, present: Sequence[str], usual: Sequence[str], where: str) -> str | None:
        """The column for `role`, or None. Raises DataError when one was named that isn't there."""
        named: str | None = getattr(self, role)
        if named is None:
            return next((name for name in usual if name in present), None)
        if named not in present:
            raise DataError(
                f"{where} has no column {named!r} for the {role}; its columns are: {', '.join(present) or 'none'}."
                + did_you_mean(named, present)
            )
        return named


def read_csv(
    path: Path,
    root: Path,
    columns: Columns,
    *,
    follow_outside: bool = False,
    extensions: tuple[str, ...] = EXTENSIONS,
) -> tuple[SampleIndex, ScanReport]:
    """The table of a CSV file with a header line (comma, semicolon or tab), in the order of its lines.

    Files that are missing stay in the table and count as unreadable later. Raises DataError for missing columns,
    paths outside `root`, one path with two meanings, or when no listed file exists.
    """
    present, lines = _csv(path)
    path_column = columns.pick("path", present, PATH_COLUMNS, path.name)
    if path_column is None:
        raise DataError(
            f"{path.name} has no column of paths: looked for {', '.join(PATH_COLUMNS)}; its columns are: "
            f"{', '.join(present) or 'none'}. Name the right one with path_column."
        )
    chosen = {"path": path_column}
    for role in ("label", "group", "split"):
        if column := columns.pick(role, present, (role,), path.name):
            chosen[role] = column
    places = [present.index(column) for column in chosen.values()]
    values: list[list[str]] = [[] for _ in places]
    known: dict[str, str] = {}  # of a million labels and splits, few are different: each text is held once
    for line in lines:
        for place, texts in zip(places, values, strict=True):
            text = line[place] if place < len(line) else ""
            texts.append(text if texts is values[0] else known.setdefault(text, text))
    known.clear()
    meanings = dict(zip(chosen, values, strict=True))
    return _table(path.name, root, meanings.pop("path"), meanings, follow_outside, extensions)


def read_list(
    path: Path, root: Path, *, follow_outside: bool = False, extensions: tuple[str, ...] = EXTENSIONS
) -> tuple[SampleIndex, ScanReport]:
    """The table of a text file with one path a line (blank lines are skipped), as `read_csv`."""
    lines = [bare for line in _lines(path, "\n") if (bare := line.removesuffix("\n")).strip()]
    return _table(path.name, root, lines, {}, follow_outside, extensions)


def _lines(path: Path, newline: str) -> Generator[str]:
    """The lines of a text file, one at a time; `\\r\\n` becomes `\\n`. newline: as `open` has it."""
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline) as stream:
            for line in stream:
                yield line.replace("\r\n", "\n")
    except OSError as error:
        raise DataError(f"{path} can't be read: {os.strerror(error.errno or 0)}.") from error


def _csv(path: Path) -> tuple[list[str], Iterator[list[str]]]:
    """Column names and the lines below them, as they are read; blank lines are left out."""
    with contextlib.closing(_lines(path, "\n")) as first:
        header = next(first, "")
    delimiter = next((mark for mark in ",;\t" if mark in header), ",")
    lines = csv.reader(_lines(path, ""), delimiter=delimiter)

    def checked() -> Iterator[list[str]]:
        try:
            for line in lines:
                if len(line) > len(names) > 0:
                    raise DataError(
                        f"{path.name}, line {lines.line_num}: {len(line)} values for {len(names)} columns. "
                        "Put quotes round values that contain the separator."
                    )
                if any(line):
                    yield line
        except csv.Error as error:
            raise DataError(f"{path.name} is not a readable CSV table (line {lines.line_num}: {error}).") from error

    names: list[str] = []
    rest = checked()
    names.extend(name.strip() for name in next(rest, ()))
    if not names:
        raise DataError(f"{path.name} is empty; its first line must name the columns.")
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise DataError(f"{path.name} has the column {twice[0]!r} twice. Rename one of them.")
    return names, rest


def _table(
    manifest: str,
    root: Path,
    paths: Sequence[str],
    meanings: Mapping[str, Sequence[str]],
    follow_outside: bool,
    extensions: tuple[str, ...],
) -> tuple[SampleIndex, ScanReport]:
    if not paths:
        raise DataError(f"{manifest} lists no files.")
    report = ScanReport()
    names: Sequence[str] = _resolve(manifest, root, paths, extensions)
    if len(set(names)) < len(names):
        rows = _first_lines(manifest, names, meanings)
        report.repeated = len(names) - len(rows)
        names = [names[row] for row in rows]
        meanings = {role: [values[row] for row in rows] for role, values in meanings.items()}
    sizes, mtimes = _look(manifest, root, names, report, follow_outside)
    index = make_index(
        names,
        sizes=sizes,
        mtimes=mtimes,
        labels=meanings.get("label"),
        groups=meanings.get("group"),
        splits=meanings.get("split"),
    )
    return index, report


def _first_lines(manifest: str, names: Sequence[str], meanings: Mapping[str, Sequence[str]]) -> list[int]:
    """The rows whose name is in no earlier one. Raises DataError when a repeated line says something else."""
    first: dict[str, int] = {}
    for row, name in enumerate(names):
        before = first.setdefault(name, row)
        if any(values[before] != values[row] for values in meanings.values()):
            told = ", ".join(f"{role} {values[before]!r} and {values[row]!r}" for role, values in meanings.items())
            raise DataError(f"{manifest} lists {name!r} twice with different values ({told}). Keep one of the lines.")
    return list(first.values())


def _resolve(manifest: str, root: Path, paths: Sequence[str], extensions: tuple[str, ...]) -> list[str]:
    """Listed values -> names relative to the root. Raises DataError naming a value that leads out of it."""
    names = []
    bare = [value for value in paths if not value.lower().endswith(extensions)]
    by_stem = _stems(root, extensions) if len(bare) == len(paths) else {}
    for value in paths:
        parts = [part for part in value.split("/") if part not in ("", ".")]
        if value.startswith("/") or ".." in parts or "\0" in value:
            raise DataError(
                f"{manifest} lists {value!r}, which is not a path below its root. "
                "List paths relative to the manifest's folder, or name another root."
            )
        if not parts:
            raise DataError(f"{manifest} has a line without a path.")
        name = "/".join(parts)
        name = value if name == value else name  # one object for both
        if by_stem:
            matches = by_stem.get(name, ())
            if len(matches) > 1:
                raise DataError(f"{manifest} lists {value!r}, which could be {matches[0]!r} or {matches[1]!r}.")
            name = matches[0] if matches else name
        names.append(name)
    return names


def _stems(root: Path, extensions: tuple[str, ...]) -> dict[str, list[str]]:
    """Names of the pictures below the root by their last part without extension; empty where there are none."""
    try:
        index, _ = scan_folder(str(root), extensions=extensions)
    except DataError:
        return {}
    stems: dict[str, list[str]] = {}
    for name in index.names:
        stems.setdefault(name.rpartition("/")[2].rpartition(".")[0], []).append(name)
    return stems


def _look(
    manifest: str, root: Path, names: Iterable[str], report: ScanReport, follow_outside: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Size and modification time of every file, zero for missing ones. Opens nothing."""
    real_root = os.path.realpath(root).rstrip("/") + "/"
    folders: dict[str, bool] = {}
    sizes, mtimes, first = array("q"), array("q"), ""
    for name in names:
        path = f"{root}/{name}"
        folder = name.rpartition("/")[0]
        if folder not in folders:
            folders[folder] = (os.path.realpath(f"{root}/{folder}") + "/").startswith(real_root)
        try:
            status = os.lstat(path)
            inside = folders[folder]
            if stat.S_ISLNK(status.st_mode):
                status = os.stat(path)  # noqa: PTH116
                inside = inside and os.path.realpath(path).startswith(real_root)
        except (OSError, ValueError):
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            status = None
            report.missing += 1
            first = first or name
        elif not inside and not follow_outside:
            raise DataError(
                f"{manifest} lists {name!r}, a link that leads outside the root. "
                "Copy the file there, or allow such links (follow_outside)."
            )
        sizes.append(0 if status is None else status.st_size)
        mtimes.append(0 if status is None else status.st_mtime_ns)
    if report.missing == len(sizes):
        raise DataError(
            f"None of the {len(sizes):,} files that {manifest} lists is there; the first is {first!r}, looked for in "
            f"{root}. Name the folder that the paths are relative to (root)."
        )
    return np.frombuffer(sizes, np.int64), np.frombuffer(mtimes, np.int64)
