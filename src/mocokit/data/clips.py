"""Clips: T frames of a video in even steps. A table of them, and their pixels decoded once and kept small.

A row of the table is a clip, its group the video (or what the data name as group). All frames of all videos lie in
one `PixelStore`; a clip is T row numbers into it, so clips may overlap, move in time and change their speed without
anything being decoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mocokit.data.index import SampleIndex
from mocokit.data.pixels import (
    PixelStore,
    SkippedSample,
    build_pixel_store,
    fit_picture,
    open_pixel_store,
    replacements,
)
from mocokit.data.scan import ScanReport
from mocokit.data.sources import ImageSource
from mocokit.data.videos import VideoSet, frame_source, rows_of_videos
from mocokit.errors import DataError, UsageError

Int64Array = npt.NDArray[np.int64]

USUAL_RATE = 15.0
"""Frames a second that the default stride comes nearest to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """What a clip is, and how far apart its two views may be. Raises UsageError for a value out of range."""

    frames: int = 8
    """T, at least 2."""
    stride: int = 1
    """A clip takes every `stride`-th frame."""
    speed: int = 1
    """A view plays at 1, 2, ... up to `speed` times the speed."""
    max_gap: float = 0.0
    """Seconds between the starts of the two views, at most; 0 = both views are of the same clip."""

    def __post_init__(self) -> None:
        for name, least, most in (("frames", 2, 512), ("stride", 1, 1000), ("speed", 1, 16)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise UsageError(f"`clip_{name}` must be a whole number from {least} to {most}. Got {value}.")
        if not 0 <= self.max_gap <= 86400:
            raise UsageError(f"`max_gap` must lie in [0, 86400] seconds. Got {self.max_gap}.")

    @property
    def span(self) -> int:
        """Frames from a clip's first to its last, both counted."""
        return (self.frames - 1) * self.stride + 1


def usual_stride(videos: VideoSet) -> int:
    """The stride that takes about 15 frames a second of the video with the median rate."""
    rate = float(np.median([table.rate for table in videos.tables]))
    return max(1, round(rate / USUAL_RATE))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClipSource:
    """S clips of V videos, and the frames they are made of."""

    name: str
    index: SampleIndex
    """A row per clip: name `VIDEO#first+frames x stride`, the video's label and split, the video as group."""
    config: ClipConfig
    frames: ImageSource
    """F frames, those of a video side by side."""
    timeline: Int64Array
    """Rows of `frames` in even steps of time, video after video. At a variable rate a frame may stand there twice."""
    begin: Int64Array
    """[V] where a video's part of `timeline` begins."""
    length: Int64Array
    """[V] how long it is."""
    rate: npt.NDArray[np.float64]
    """[V] steps a second."""
    video: Int64Array
    """[S] the video of a clip."""
    start: Int64Array
    """[S] the step at which it starts."""
    report: ScanReport

    def steps(self, video: Int64Array, start: Int64Array, stride: Int64Array) -> Int64Array:
        """[B, T] places in `timeline` of clips that start at `start`; a video that ends early holds its last frame."""
        wanted = start[:, None] + stride[:, None] * np.arange(self.config.frames)
        inside: Int64Array = self.begin[video][:, None] + np.minimum(wanted, self.length[video][:, None] - 1)
        return inside

    def subset(self, rows: npt.NDArray[np.integer]) -> ClipSource:
        """Some of the clips, in the order given; the frames stay."""
        return replace(self, index=self.index.subset(rows), video=self.video[rows], start=self.start[rows])

    def read(self, row: int, side: int) -> npt.NDArray[np.uint8]:
        """The frames of a clip, RGB uint8 [T, H, W, 3], shrunk until no side exceeds `side`.

        Clips of one video are best read in their order. Raises UnreadableImageError.
        """
        reading = self.frames.frames
        assert reading is not None
        stride = np.array([self.config.stride])
        steps = self.steps(self.video[row : row + 1], self.start[row : row + 1], stride)[0]
        return np.stack([fit_picture(reading.fitted(frame, side), side) for frame in self.timeline[steps].tolist()])


def with_motion(videos: VideoSet) -> VideoSet:
    """The videos of at least two frames; the others are named in the report. Raises DataError when there are none."""
    still = [row for row, table in enumerate(videos.tables) if len(table) < 2]
    if len(still) == len(videos.tables):
        raise DataError(f"None of the {len(still):,} videos in {videos.name} has two frames. Use --video frames.")
    broken = [(videos.index.names[row], "1 frame: nothing moves in it") for row in still]
    report = replace(videos.report, broken=[*videos.report.broken, *broken])
    moving = np.setdiff1d(np.arange(len(videos.tables)), np.array(still, np.int64))
    return replace(videos.subset(moving), report=report)


def open_clips(videos: VideoSet, config: ClipConfig) -> ClipSource:
    """The clips of a set: one after the other, and a last one that ends with the video where half a clip is left.

    A video shorter than a clip gives one that holds its last frame; one of a single frame gives none and is named in
    the report. Raises DataError when no video has two frames.
    """
    videos = with_motion(videos)
    shown = [table.steady_frames() for table in videos.tables]
    kept = [np.unique(one) for one in shown]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in kept])])
    timeline = [np.searchsorted(one, all_) + offset for one, all_, offset in zip(kept, shown, offsets, strict=False)]
    length = np.array([len(one) for one in shown], np.int64)
    starts = [_starts(int(steps), config.span) for steps in length]
    video = np.repeat(np.arange(len(starts)), [len(one) for one in starts])
    start = np.concatenate(starts)
    what = f"{config.frames}x{config.stride}"
    names = [f"{videos.index.names[v]}#{s}+{what}" for v, s in zip(video.tolist(), start.tolist(), strict=True)]
    return ClipSource(
        name=videos.name,
        index=rows_of_videos(videos, video, names),
        config=config,
        frames=frame_source(videos, kept),
        timeline=np.concatenate(timeline).astype(np.int64),
        begin=np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int64),
        length=length,
        rate=np.array([table.rate for table in videos.tables]),
        video=video.astype(np.int64),
        start=start.astype(np.int64),
        report=videos.report,
    )


def first_clips(source: ClipSource, count: int) -> ClipSource:
    """The first `count` clips with the videos they are of, and no other frames: a sample to time a step with."""
    last = int(source.video[count - 1])
    steps = int(source.begin[last] + source.length[last])
    frames = np.arange(int(source.timeline[:steps].max()) + 1)
    return replace(
        source,
        index=source.index.subset(np.arange(count)),
        frames=source.frames.subset(frames),
        timeline=source.timeline[:steps],
        begin=source.begin[: last + 1],
        length=source.length[: last + 1],
        rate=source.rate[: last + 1],
        video=source.video[:count],
        start=source.start[:count],
    )


def _starts(steps: int, span: int) -> Int64Array:
    """Where the clips of a video of `steps` steps begin."""
    starts = list(range(0, max(steps - span, 0) + 1, span))
    if steps - span - starts[-1] >= max(span // 2, 1):
        starts.append(steps - span)
    return np.array(starts, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClipStore:
    """The pixels of all clips, resident like a `PixelStore`: the same contract, with frames in the middle."""

    source: ClipSource
    frames: PixelStore
    shown: Int64Array
    """[len(timeline)] the row of `frames` that a step shows: the nearest one of its video that could be read."""
    replaced: Int64Array
    """[S] the clip that clip s shows: s itself when all of its frames could be read."""
    skipped: tuple[SkippedSample, ...]
    """Clips with a frame that does not decode."""

    def __len__(self) -> int:
        return len(self.replaced)

    @property
    def side(self) -> int:
        """Side of the square canvas of a frame, pixels."""
        return self.frames.side

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """[S] True where a row shows its own clip. Evaluation uses these rows only."""
        own: npt.NDArray[np.bool_] = self.replaced == np.arange(len(self.replaced))
        return own

    def statistics(self) -> dict[str, tuple[float, float, float]]:
        """`mean` and `std` per channel in 0..1, over the frames (see PixelStore)."""
        return self.frames.statistics()

    def batch(self, rows: npt.NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Copies of some clips: uint8 [B, 3, T, side, side] and their extents, int64 [B, 2]."""
        of = self.replaced[rows]
        stride = np.full(len(of), self.source.config.stride, np.int64)
        return self.cut(self.source.video[of], self.source.start[of], stride)

    def cut(self, video: Int64Array, start: Int64Array, stride: Int64Array) -> tuple[Tensor, Tensor]:
        """As `batch`, of any clips: int64 [B] each."""
        rows = self.shown[self.source.steps(video, start, stride)]
        pixels = self.frames.pixels[rows].transpose(0, 2, 1, 3, 4)
        return torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(
            self.frames.extents[rows[:, 0]].astype(np.int64)
        )


def build_clip_store(
    source: ClipSource,
    *,
    side: int,
    cache: Path | None = None,
    max_bad: float = 0.01,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ClipStore:
    """Decode every frame once, shrunk into squares of `side` pixels; see `build_pixel_store` for cache and workers.

    A clip with a frame that does not decode counts as unreadable and shows another one. max_bad: largest share of
    such clips. Raises DataError when there are more.
    """
    frames = build_pixel_store(source.frames, side=side, cache=cache, max_bad=1.0, workers=workers, progress=progress)
    return _of_frames(source, frames, max_bad)


def open_clip_store(source: ClipSource, *, side: int, cache: Path, max_bad: float = 0.01) -> ClipStore:
    """The store whose frames another process has put into `cache`; nothing is written. Raises DataError without it."""
    return _of_frames(source, open_pixel_store(source.frames, side=side, cache=cache, max_bad=1.0), max_bad)


def _of_frames(source: ClipSource, frames: PixelStore, max_bad: float) -> ClipStore:
    good = frames.readable
    shown = _nearest_readable(source, good)
    own = np.full(len(source.video), source.config.stride, np.int64)
    used = source.timeline[source.steps(source.video, source.start, own)]
    bad = np.flatnonzero(~good[used].all(1))
    reasons = {sample.row: f"{sample.name}: {sample.reason}" for sample in frames.skipped}
    skipped = tuple(
        SkippedSample(
            row=int(row),
            name=source.index.names[row],
            reason=next(reasons[int(frame)] for frame in used[row] if int(frame) in reasons),
        )
        for row in bad
    )
    if len(bad) > max_bad * len(own) or len(bad) == len(own):
        first = "; ".join(f"{one.name!r} ({one.reason})" for one in skipped[:5])
        raise DataError(
            f"{len(bad):,} of {len(own):,} clips in {source.name} have frames that do not decode, more than the "
            f"{max_bad:.2%} that is allowed. First: {first}. Remove these videos, or raise --max-bad."
        )
    return ClipStore(
        source=source, frames=frames, shown=shown, replaced=replacements(source.index, bad.tolist()), skipped=skipped
    )


def _nearest_readable(source: ClipSource, good: npt.NDArray[np.bool_]) -> Int64Array:
    """`timeline` with every frame that could not be read replaced by the last readable one before it in its video.

    The first one after it where there is none before; a video without any keeps its rows, none of its clips is used.
    """
    shown = source.timeline.copy()
    for begin, length in zip(source.begin.tolist(), source.length.tolist(), strict=True):
        part = shown[begin : begin + length]
        fine = np.flatnonzero(good[part])
        if len(fine) < length and len(fine):
            before = np.searchsorted(fine, np.arange(length), side="right") - 1
            part[:] = part[fine[np.maximum(before, 0)]]
    return shown
