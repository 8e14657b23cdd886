"""A set of videos: folder, manifest or generated set -> a table with one row per video, and readers of their frames.

What can't be used is passed over and named (`ScanReport.broken`). From a set come pictures (`spaced_frames`, frames
at a low rate as an ordinary `ImageSource`) and clips (`mocokit.data.clips`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mocokit.data.generated_videos import GENERATED_VIDEOS, generated_name
from mocokit.data.index import SampleIndex, make_index
from mocokit.data.manifest import Columns, read_csv, read_list
from mocokit.data.randomness import sample_id
from mocokit.data.scan import VIDEO_EXTENSIONS, ScanReport, scan_folder
from mocokit.data.sources import FrameReading, ImageSource
from mocokit.data.table_cache import Looked, look_at, read_tables, write_tables
from mocokit.data.threads import in_order
from mocokit.data.video import (
    FrameTable,
    UnreadableVideoError,
    VideoCursor,
    VideoLimits,
    fitted_size,
    frame_table,
    require_av,
)
from mocokit.errors import DataError, UsageError, did_you_mean

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

STRETCH = 256
"""Frames that one worker decodes at least before another takes over in the same file (at a key frame)."""
NEAR_DUPLICATE = 3.0
"""Grey levels of 255: frames whose 16-pixel pictures differ by less on average are near-duplicates."""


class FrameReader(Protocol):
    """Gives frames of one video; not for several threads at once."""

    def frame(self, number: int, side: int | None = None) -> UInt8Array:
        """RGB uint8 [h, w, 3], shrunk until no side exceeds `side`. Raises UnreadableImageError."""

    def close(self) -> None:
        """Let the file go."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VideoSet:
    """V videos that can be read."""

    name: str
    """The generated set's name, or the file's or folder's own name."""
    index: SampleIndex
    """A row per video."""
    tables: tuple[FrameTable, ...]
    """V tables of frames."""
    reader: Callable[[int], FrameReader]
    """Row -> a new reader of that video."""
    decoder: str
    """What decodes, with its version."""
    file: Callable[[int], Path] | None = None
    """Row -> the video's file; None for a generated set."""
    report: ScanReport = field(default_factory=ScanReport)
    """What was passed over."""

    def subset(self, rows: npt.NDArray[np.integer]) -> VideoSet:
        """The set of some videos, in the order given."""
        chosen, reader, file = rows.tolist(), self.reader, self.file
        return replace(
            self,
            index=self.index.subset(rows),
            tables=tuple(self.tables[row] for row in chosen),
            reader=lambda row: reader(chosen[row]),
            file=None if file is None else lambda row: file(chosen[row]),
        )

    def groups(self) -> Int64Array:
        """[V] the group of each video: its own where the data name one, else the video itself."""
        return np.where(self.index.groups >= 0, self.index.groups, self.index.ids)


def open_videos(
    spec: str | os.PathLike[str],
    *,
    split: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    limits: VideoLimits | None = None,
    workers: int | None = None,
    tables: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VideoSet:
    """Open a folder of videos, a manifest (.csv, .txt), one video file, or the generated set `moving-shapes`
    (`moving-shapes-7` is that of seed 7).

    Labels, splits and groups come as for pictures (`open_source`): from the folders' names or the table's columns.
    `split` keeps one split. `label_column` also chooses among the labels of the generated set. workers: files looked
    at side by side; None is one for each core. tables: a file that keeps the tables of frames, so that videos that did
    not change are not looked through again (see `table_cache`).

    Raises UsageError for a name that is none of these, DataError when no video can be read, MissingDependencyError
    without PyAV (the generated set needs none).
    """
    columns = Columns(label=label_column, group=group_column)
    if (made := generated_name(str(spec))) is not None:
        if group_column is not None or root is not None:
            raise UsageError(f"The generated set {spec} has no table: leave out group_column and root.")
        found = _generated(str(spec), made, label_column)
    else:
        found = _open_files(Path(spec), columns, root, limits or VideoLimits(), workers, tables, progress)
    return found if split is None else found.subset(found.index.rows_of(split))


def holds_videos(spec: str) -> bool:
    """Whether the name is that of videos and not of pictures: a generated set, a video, a folder or list with some."""
    if generated_name(spec) is not None:
        return True
    path = Path(spec)
    plain = tuple(extension for extension in VIDEO_EXTENSIONS if extension != ".gif")  # a GIF is a picture as well
    if path.is_dir():
        return any(name.lower().endswith(plain) for _, _, names in os.walk(path) for name in names)
    if path.suffix.lower() in (".csv", ".txt") and path.is_file():
        with path.open(encoding="utf-8", errors="replace") as stream:
            start = stream.read(65536).lower()
        return any(extension in start for extension in plain)
    return is_video_file(path)


def is_video_file(path: Path) -> bool:
    """Whether the name is that of a single video."""
    return path.suffix.lower() in VIDEO_EXTENSIONS


def _generated(name: str, which: tuple[str, int], label: str | None) -> VideoSet:
    made = GENERATED_VIDEOS[which[0]](which[1])
    if label is not None:
        made = made.labelled_by(label)
    table = FrameTable(
        times=np.arange(made.frames) / made.rate,
        stamps=None,
        keys=np.zeros(1, np.int64),
        height=made.side,
        width=made.side,
    )
    read, count = made.read, len(made.index)
    return VideoSet(
        name=name,
        index=made.index,
        tables=(table,) * count,
        reader=lambda row: _Drawn(read, row),
        decoder="drawn",
    )


class _Drawn:
    """Frames of a generated video. They are small; `side` never shrinks them further than a picture store would."""

    def __init__(self, read: Callable[[int, int], UInt8Array], row: int) -> None:
        self._read, self._row = read, row

    def frame(self, number: int, side: int | None = None) -> UInt8Array:
        """See FrameReader. A smaller side takes the mean of the pixels that fall together."""
        picture = self._read(self._row, number)
        height, width = fitted_size(picture.shape[0], picture.shape[1], side)
        if (height, width) == picture.shape[:2]:
            return picture
        from PIL import Image

        return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BOX))

    def close(self) -> None:
        """Nothing is open."""


def _open_files(
    path: Path,
    columns: Columns,
    root: str | os.PathLike[str] | None,
    limits: VideoLimits,
    workers: int | None,
    cache: Path | None,
    progress: Callable[[int, int], None] | None,
) -> VideoSet:
    av = require_av()
    decoder = f"av {av.__version__}"
    name, folder, listed, report = _listing(path, columns, None if root is None else Path(root))
    tables: list[FrameTable] = []
    usable: list[int] = []
    looked: list[Looked] = []
    count = workers or len(os.sched_getaffinity(0))
    kept_from = "" if limits == VideoLimits() else f" {limits}"
    known = {} if cache is None else read_tables(cache, decoder + kept_from)

    def look(row: int) -> tuple[FrameTable | UnreadableVideoError, Looked | None]:
        file = _file(folder, listed.names[row])
        seen = None if cache is None else look_at(file, listed.names[row])
        if seen is not None and seen in known:
            return known[seen], seen
        try:
            return frame_table(file, limits), seen
        except UnreadableVideoError as error:
            return error, seen

    rows = range(len(listed))
    with contextlib.closing(in_order(look, rows, workers=count, ahead=4 * count, name="videos")) as results:
        for row, (found, seen) in zip(rows, results, strict=True):
            if isinstance(found, UnreadableVideoError):
                report.broken.append((listed.names[row], found.reason))
            else:
                tables.append(found)
                usable.append(row)
                looked += [] if seen is None else [seen]
            if progress is not None:
                progress(row + 1, len(listed))
    if not usable:
        first = "; ".join(f"{name!r} ({reason})" for name, reason in report.broken[:5])
        raise DataError(f"None of the {len(listed):,} videos in {name} can be read. First: {first}. Check the files.")
    if cache is not None and len(looked) == len(tables) and set(looked) != set(known):
        write_tables(cache, decoder + kept_from, looked, tables)
    index = listed.subset(np.array(usable, np.int64))
    names, kept = index.names, tuple(tables)
    return VideoSet(
        name=name,
        index=index,
        tables=kept,
        reader=lambda row: VideoCursor(_file(folder, names[row]), kept[row], limits),
        decoder=decoder,
        file=lambda row: _file(folder, names[row]),
        report=report,
    )


def _file(folder: str, name: str) -> Path:
    return Path(folder) / name


def _listing(path: Path, columns: Columns, root: Path | None) -> tuple[str, str, SampleIndex, ScanReport]:
    """The set's name, its root, the table of all files that may be videos, and what was passed over."""
    name = path.name or path.resolve().name or "root"
    if path.is_dir():
        manifest = path / "labels.csv"
        if columns != Columns():
            if not manifest.is_file():
                raise DataError(
                    f"Columns were named for the folder {name}, but it has no labels.csv. Name the manifest instead."
                )
            return name, str(path), *read_csv(manifest, root or path, columns, extensions=VIDEO_EXTENSIONS)
        if root is not None:
            raise UsageError("root has no meaning for a folder; only a manifest's paths are relative to it.")
        return name, str(path), *scan_folder(str(path), extensions=VIDEO_EXTENSIONS)
    if not path.is_file():
        raise UsageError(
            f"{str(path)!r} does not exist and is no generated set of videos ({', '.join(GENERATED_VIDEOS)})."
            + did_you_mean(str(path), GENERATED_VIDEOS)
        )
    folder = root or path.parent
    if path.suffix.lower() == ".csv":
        return name, str(folder), *read_csv(path, folder, columns, extensions=VIDEO_EXTENSIONS)
    if columns != Columns() or (is_video_file(path) and root is not None):
        raise UsageError(f"Column names and root have no meaning for {name}. Leave them out or use a .csv file.")
    if path.suffix.lower() == ".txt":
        return name, str(folder), *read_list(path, folder, extensions=VIDEO_EXTENSIONS)
    if is_video_file(path):
        status = path.stat()
        index = make_index([path.name], sizes=[status.st_size], mtimes=[status.st_mtime_ns])
        return name, str(folder), index, ScanReport()
    raise UsageError(
        f"{str(path)!r} is nothing that videos can be read from. Give a folder, a .csv or .txt list, a video "
        f"({' '.join(VIDEO_EXTENSIONS)}), or the generated set {', '.join(GENERATED_VIDEOS)}."
    )


# ------------------------------------------------------------------------------------------------ frames as pictures


def frame_source(videos: VideoSet, picks: Sequence[Int64Array], *, named: str = "#") -> ImageSource:
    """Chosen frames of every video as pictures: row names `video#number`, the video's label, split and group.

    picks: V arrays of rising frame numbers; a video with none has no row. Reading is safe from several threads: each
    keeps one video open.
    """
    counts = np.array([len(one) for one in picks], np.int64)
    if not counts.sum():
        raise DataError(f"No frame of the {len(counts):,} videos in {videos.name} was chosen.")
    video = np.repeat(np.arange(len(counts)), counts)
    number = np.concatenate([np.asarray(one, np.int64) for one in picks])
    names = [f"{videos.index.names[v]}{named}{n}" for v, n in zip(video.tolist(), number.tolist(), strict=True)]
    index = rows_of_videos(videos, video, names)
    here = threading.local()

    def reader(row: int) -> FrameReader:
        """This thread's reader of the row's video; the one before is closed."""
        wanted = int(video[row])
        if getattr(here, "video", None) != wanted:
            if getattr(here, "open", None) is not None:
                here.open.close()
            here.video, here.open = wanted, videos.reader(wanted)
        kept: FrameReader = here.open
        return kept

    def size_of(row: int) -> tuple[int, int]:
        table = videos.tables[int(video[row])]
        return table.height, table.width

    return ImageSource(
        name=videos.name,
        index=index,
        read=lambda row: reader(row).frame(int(number[row])),
        report=videos.report,
        frames=FrameReading(
            run_of=_stretches(videos, video, number),
            size_of=size_of,
            fitted=lambda row, side: reader(row).frame(int(number[row]), side),
            decoder=videos.decoder,
            video_of=video.astype(np.int64),
        ),
    )


def rows_of_videos(videos: VideoSet, video: Int64Array, names: Sequence[str]) -> SampleIndex:
    """A table whose row s, called names[s], belongs to video[s]: its label, split, size, and the video as group."""
    of = videos.index
    return SampleIndex(
        names=tuple(names),
        ids=np.fromiter((sample_id(name) for name in names), np.int64, len(names)),
        sizes=of.sizes[video],
        mtimes=of.mtimes[video],
        labels=of.labels[video],
        class_names=of.class_names,
        groups=videos.groups()[video],
        splits=of.splits[video],
        split_names=of.split_names,
        content=of.content,
    )


def _stretches(videos: VideoSet, video: Int64Array, number: Int64Array) -> Int64Array:
    """[S] numbers of stretches: a video, cut at key frames where it is long, so that threads can share it."""
    cut = np.zeros(len(video), np.int64)
    for row in np.unique(video).tolist():
        mine = np.flatnonzero(video == row)
        starts, last = [0], 0
        for key in videos.tables[row].keys.tolist():
            if key - last >= STRETCH:
                starts.append(key)
                last = key
        cut[mine] = np.searchsorted(np.array(starts), number[mine], side="right")
    change = (np.diff(video) != 0) | (np.diff(cut) != 0)
    return np.concatenate([[0], np.cumsum(change)]).astype(np.int64)


def spaced_frames(
    videos: VideoSet,
    rate: float = 1.0,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ImageSource:
    """Frames at `rate` a second as pictures, near-duplicates dropped: frame mode.

    The frame in the middle of each interval; the middle frame of a video shorter than half an interval. A frame is
    dropped when its 16-pixel picture differs from that of the last one kept by less than `NEAR_DUPLICATE` levels on
    average; a frame that does not decode stays, to be named when the pixels are read.
    """
    if not 0 < rate < 1000:
        raise UsageError(f"The frame rate must lie above 0 and below 1000 a second. Got {rate:g}.")
    picks = [_spaced(table, rate) for table in videos.tables]
    source = frame_source(videos, picks)
    count = workers or len(os.sched_getaffinity(0))
    reading = source.frames
    assert reading is not None
    cuts = np.concatenate([[0], np.cumsum([len(one) for one in picks])])
    parts = [range(cuts[row], cuts[row + 1]) for row in range(len(picks))]

    def work(part: range) -> list[int]:
        kept: list[int] = []
        last: npt.NDArray[np.float64] | None = None
        for row in part:
            try:
                small = reading.fitted(row, 16).astype(np.float64).mean(2)
            except DataError:
                kept.append(row)
                continue
            if last is None or float(np.abs(small - last).mean()) >= NEAR_DUPLICATE:
                kept.append(row)
                last = small
        return kept

    rows: list[int] = []
    with contextlib.closing(in_order(work, parts, workers=count, ahead=4 * count, name="frames")) as results:
        for done, kept in enumerate(results, 1):
            rows += kept
            if progress is not None:
                progress(done, len(parts))
    return source.subset(np.array(rows, np.int64))


def _spaced(table: FrameTable, rate: float) -> Int64Array:
    middles = (np.arange(int(table.times[-1] * rate) + 1) + 0.5) / rate
    inside = middles[middles <= table.times[-1]]
    if not len(inside):
        return np.array([len(table) // 2], np.int64)
    return np.unique(table.at(inside)).astype(np.int64)
