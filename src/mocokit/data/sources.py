"""Open any kind of picture data as one table and a function from row to pixels.

A source is named by a path (folder, CSV or text manifest, Parquet, npz, tar shards), by the URL of tar shards, by the
name of a generated set, or is an array in memory. What opens which suffix stands in `_BY_SUFFIX`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.arrays import array_index, open_npz, picture_reader
from mocokit.data.blobs import public_name
from mocokit.data.decode import DecodeLimits, UnreadableImageError, decode
from mocokit.data.exclusion import read_exclude
from mocokit.data.generated import GENERATED
from mocokit.data.generated_videos import generated_name
from mocokit.data.index import SampleIndex
from mocokit.data.manifest import Columns, read_csv, read_list
from mocokit.data.parquet import open_parquet
from mocokit.data.scan import ScanReport, scan_folder
from mocokit.data.shards import is_shards, open_shards
from mocokit.errors import DataError, UsageError, did_you_mean

UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FrameReading:
    """What reading frames of videos needs to be fast: neighbours are decoded together, and only as large as needed."""

    run_of: npt.NDArray[np.int64]
    """[S] number of the stretch of video that a row lies in. Rows of a stretch are best read in order by one thread."""
    size_of: Callable[[int], tuple[int, int]]
    """Row -> height and width, without decoding."""
    fitted: Callable[[int, int], UInt8Array]
    """Row, side -> RGB uint8 [h, w, 3], shrunk until no side is longer; raises UnreadableImageError."""
    decoder: str
    """What decodes, with its version: pixels of another one may differ."""
    video_of: npt.NDArray[np.int64]
    """[S] the video that a row is of, as its row in the set of videos that was opened."""

    def subset(self, rows: npt.NDArray[np.integer]) -> FrameReading:
        """That of some rows, in the order given."""
        chosen, size_of, fitted = rows.tolist(), self.size_of, self.fitted
        return replace(
            self,
            run_of=self.run_of[rows],
            video_of=self.video_of[rows],
            size_of=lambda row: size_of(chosen[row]),
            fitted=lambda row, side: fitted(chosen[row], side),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ImageSource:
    """A sample table and how to get at the pixels of its rows. Reading is safe from several threads."""

    name: str
    """The generated set's name, or the file's or folder's own name; never an absolute path."""
    index: SampleIndex
    read: Callable[[int], UInt8Array]
    """Row -> RGB uint8 [H, W, 3]; raises UnreadableImageError."""
    read_bytes: Callable[[int], bytes] | None = None
    """Row -> the encoded picture, where there is one; raises UnreadableImageError. Row numbers as in `read`."""
    limits: DecodeLimits = field(default_factory=DecodeLimits)
    """What decoding those bytes may cost."""
    report: ScanReport = field(default_factory=ScanReport)
    """What was passed over."""
    frames: FrameReading | None = None
    """How rows are best read, where they are frames of videos."""

    def subset(self, rows: npt.NDArray[np.integer]) -> ImageSource:
        """The source of some rows, in the order given."""
        chosen = rows.tolist()
        read, read_bytes = self.read, self.read_bytes
        return replace(
            self,
            index=self.index.subset(rows),
            read=lambda row: read(chosen[row]),
            read_bytes=None if read_bytes is None else lambda row: read_bytes(chosen[row]),
            frames=None if self.frames is None else self.frames.subset(rows),
        )


def open_source(
    spec: str | os.PathLike[str] | npt.NDArray[Any],
    *,
    split: str | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    split_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    follow_outside: bool = False,
    seed: int = 0,
    limits: DecodeLimits | None = None,
    exclude: str | os.PathLike[str] | None = None,
) -> ImageSource:
    """Open a folder, manifest (.csv, .txt), .parquet, .npz, tar shards, array [S, ...] or a generated set (`digits`).

    `split` keeps the rows of one split. The `*_column` arguments name a table's columns where they aren't called
    path, label, group and split (of shards: the fields of `key.json`); given for a folder, its `labels.csv` is read.
    Shards are a .tar, a folder of nothing but .tar files, `name-{0000..0011}.tar`, or a URL of these. `label_column`
    also chooses among the labels of a generated set that has several. `root` is what a manifest's paths are relative
    to (its own folder otherwise). `follow_outside` follows links that lead out of a folder. `seed` is the generated
    sets'. `exclude` is a list of samples to leave out (`mocokit check --write-exclude`, `data.exclusion`).

    Raises UsageError for a name that is neither a path nor a generated set, or for arguments that the kind of data
    has no use for; DataError for data that can't be used or a split that isn't there.
    """
    columns = Columns(path=path_column, label=label_column, group=group_column, split=split_column)
    options = _Options(
        columns=columns,
        root=None if root is None else Path(root),
        follow_outside=follow_outside,
        limits=limits or DecodeLimits(),
    )
    if isinstance(spec, np.ndarray):
        _refuse(options, "an array", columns=True)
        source = from_array(spec)
    elif str(spec) in GENERATED:
        made = GENERATED[str(spec)](seed)
        if label_column is not None and made.labellings:
            made = made.labelled_by(label_column)
            options = replace(options, columns=replace(columns, label=None))
        _refuse(options, f"the generated set {spec}", columns=True)
        source = ImageSource(name=str(spec), index=made.index, read=made.read)
    elif is_shards(str(spec)):
        source = _open_shards(str(spec), options)
    else:
        source = _open_path(Path(spec), options)
    if exclude is not None:
        source = source.subset(read_exclude(Path(exclude)).kept(source.index))
    return source if split is None else source.subset(source.index.rows_of(split))


def from_array(
    images: npt.NDArray[Any],
    labels: npt.NDArray[Any] | None = None,
    *,
    class_names: list[str] | None = None,
    splits: npt.NDArray[Any] | None = None,
    groups: npt.NDArray[Any] | None = None,
    name: str = "array",
) -> ImageSource:
    """Pictures in memory: [S, H, W], [S, H, W, 3] or [S, 3, H, W], uint8 or float in 0..1. Not copied."""
    index = array_index(name, images, labels=labels, class_names=class_names, splits=splits, groups=groups)
    return ImageSource(name=name, index=index, read=picture_reader(name, images))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    columns: Columns
    root: Path | None
    follow_outside: bool
    limits: DecodeLimits


def _refuse(options: _Options, kind: str, *, columns: bool) -> None:
    """A setting without effect is an error, so that nobody relies on it."""
    if columns and options.columns != Columns():
        raise UsageError(f"Column names have no meaning for {kind}. Leave them out.")
    if options.root is not None:
        raise UsageError(f"root has no meaning for {kind}; only a manifest's paths are relative to it.")


def _open_path(path: Path, options: _Options) -> ImageSource:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        if generated_name(str(path)) is not None:
            raise UsageError(f"{path} is a generated set of videos. Add --video clips or --video frames.") from error
        why = "can't be looked at" if isinstance(error, PermissionError) else "does not exist"
        raise UsageError(
            f"{str(path)!r} {why} and is no generated set ({', '.join(sorted(GENERATED))})."
            + did_you_mean(str(path), GENERATED)
        ) from error
    if stat.S_ISDIR(mode):
        return _open_folder(path, options)
    opener = _BY_SUFFIX.get(path.suffix.lower())
    if opener is None or not stat.S_ISREG(mode):
        raise UsageError(
            f"{str(path)!r} is no kind of data that can be opened. Give a folder of pictures, a file ending in "
            f"{' '.join(_BY_SUFFIX)} .tar, or a generated set ({', '.join(sorted(GENERATED))})."
        )
    return opener(path, options)


def _open_folder(path: Path, options: _Options) -> ImageSource:
    if options.columns != Columns():
        manifest = path / "labels.csv"
        if not manifest.is_file():
            raise DataError(
                f"Columns were named for the folder {path.name}, but it has no labels.csv. Name the manifest instead."
            )
        source = _open_manifest(manifest, options)
        return replace(source, name=_own_name(path))
    _refuse(options, "a folder", columns=False)
    index, report = scan_folder(str(path), follow_outside=options.follow_outside)
    return _files(_own_name(path), path, index, report, options.limits)


def _open_manifest(path: Path, options: _Options) -> ImageSource:
    root = options.root or path.parent
    if path.suffix.lower() == ".csv":
        index, report = read_csv(path, root, options.columns, follow_outside=options.follow_outside)
    else:
        if options.columns != Columns():
            raise UsageError(
                f"Column names have no meaning for the list {path.name}. Leave them out or use a .csv file."
            )
        index, report = read_list(path, root, follow_outside=options.follow_outside)
    return _files(path.name, root, index, report, options.limits)


def _open_parquet(path: Path, options: _Options) -> ImageSource:
    _refuse(options, "a Parquet file", columns=False)
    index, read_bytes = open_parquet(path, options.columns)
    return _encoded(path.name, index, read_bytes, ScanReport(), options.limits)


def _open_shards(spec: str, options: _Options) -> ImageSource:
    _refuse(options, "tar shards", columns=False)
    limits = options.limits
    index, read_bytes, report = open_shards(
        spec, options.columns, follow_outside=options.follow_outside, max_bytes=limits.max_bytes
    )
    return _encoded(public_name(spec), index, read_bytes, report, limits)


def _open_npz(path: Path, options: _Options) -> ImageSource:
    _refuse(options, "an npz file", columns=True)
    index, images = open_npz(path)
    return ImageSource(name=path.name, index=index, read=picture_reader(path.name, images))


_BY_SUFFIX: dict[str, Callable[[Path, _Options], ImageSource]] = {
    ".csv": _open_manifest,
    ".txt": _open_manifest,
    ".parquet": _open_parquet,
    ".npz": _open_npz,
}


def _files(name: str, root: Path, index: SampleIndex, report: ScanReport, limits: DecodeLimits) -> ImageSource:
    folder, names = str(root), index.names

    def read_bytes(row: int) -> bytes:
        return _read_file(f"{folder}/{names[row]}", limits.max_bytes)

    return _encoded(name, index, read_bytes, report, limits)


def _encoded(
    name: str, index: SampleIndex, read_bytes: Callable[[int], bytes], report: ScanReport, limits: DecodeLimits
) -> ImageSource:
    return ImageSource(
        name=name,
        index=index,
        read=lambda row: decode(read_bytes(row), limits),
        read_bytes=read_bytes,
        limits=limits,
        report=report,
    )


def _read_file(path: str, max_bytes: int) -> bytes:
    """The bytes of a regular file; never waits on a FIFO that has taken its place since it was listed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:  # noqa: PTH123 a descriptor, not a path
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableImageError("not a regular file")
            if status.st_size > max_bytes:
                raise UnreadableImageError(f"{status.st_size:,} bytes, more than the limit of {max_bytes:,}")
            return stream.read()
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a usable path"
        raise UnreadableImageError(reason) from error


def _own_name(path: Path) -> str:
    """The folder's own name, also when it was given as `.` or `..`."""
    return path.name if path.name not in ("", "..") else path.resolve().name or "root"
