"""A CSV table or a plain list of paths -> sample table.

Paths are relative to the manifest's own folder, or to the root that is named; nothing outside of it can be
listed. A value without a picture's extension (the `id` column of a product catalogue) is looked up among the
names of the pictures below the root.
"""

from __future__ import annotations

import csv
import io
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    path: Path, root: Path, columns: Columns, *, follow_outside: bool = False
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
    for line in lines:
        for place, texts in zip(places, values, strict=True):
            texts.append(line[place] if place < len(line) else "")
    meanings = dict(zip(chosen, values, strict=True))
    return _table(path.name, root, meanings.pop("path"), meanings, follow_outside)


def read_list(path: Path, root: Path, *, follow_outside: bool = False) -> tuple[SampleIndex, ScanReport]:
    """The table of a text file with one path a line (blank lines are skipped), as `read_csv`."""
    lines = [line for line in _text(path).split("\n") if line.strip()]
    return _table(path.name, root, lines, {}, follow_outside)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig", "surrogateescape").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(f"{path} can't be read: {os.strerror(error.errno or 0)}.") from error


def _csv(path: Path) -> tuple[list[str], Iterator[list[str]]]:
    """Column names and the lines below them, as they are read; blank lines are left out."""
    text = _text(path)
    header = text.partition("\n")[0]
    delimiter = next((mark for mark in ",;\t" if mark in header), ",")
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)

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
) -> tuple[SampleIndex, ScanReport]:
    if not paths:
        raise DataError(f"{manifest} lists no files.")
    report = ScanReport()
    found = _resolve(manifest, root, paths)
    rows: dict[str, tuple[str, ...]] = {}
    for number, name in enumerate(found):
        meaning = tuple(values[number] for values in meanings.values())
        if rows.setdefault(name, meaning) != meaning:
            told = ", ".join(
                f"{role} {a!r} and {b!r}" for role, a, b in zip(meanings, rows[name], meaning, strict=True)
            )
            raise DataError(f"{manifest} lists {name!r} twice with different values ({told}). Keep one of the lines.")
        report.repeated += 1
    report.repeated -= len(rows)
    sizes, mtimes = _look(manifest, root, rows, report, follow_outside)
    texts = {role: [meaning[place] for meaning in rows.values()] for place, role in enumerate(meanings)}
    index = make_index(
        list(rows),
        sizes=sizes,
        mtimes=mtimes,
        labels=texts.get("label"),
        groups=texts.get("group"),
        splits=texts.get("split"),
    )
    return index, report


def _resolve(manifest: str, root: Path, paths: Sequence[str]) -> list[str]:
    """Listed values -> names relative to the root. Raises DataError naming a value that leads out of it."""
    names = []
    bare = [value for value in paths if not value.lower().endswith(EXTENSIONS)]
    by_stem = _stems(root) if len(bare) == len(paths) else {}
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
        if by_stem:
            matches = by_stem.get(name, ())
            if len(matches) > 1:
                raise DataError(f"{manifest} lists {value!r}, which could be {matches[0]!r} or {matches[1]!r}.")
            name = matches[0] if matches else name
        names.append(name)
    return names


def _stems(root: Path) -> dict[str, list[str]]:
    """Names of the pictures below the root by their last part without extension; empty where there are none."""
    try:
        index, _ = scan_folder(str(root))
    except DataError:
        return {}
    stems: dict[str, list[str]] = {}
    for name in index.names:
        stems.setdefault(name.rpartition("/")[2].rpartition(".")[0], []).append(name)
    return stems


def _look(
    manifest: str, root: Path, names: Iterable[str], report: ScanReport, follow_outside: bool
) -> tuple[list[int], list[int]]:
    """Size and modification time of every file, zero for missing ones. Opens nothing."""
    real_root = os.path.realpath(root).rstrip("/") + "/"
    folders: dict[str, bool] = {}
    sizes, mtimes, first = [], [], ""
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
    return sizes, mtimes
