"""Labelled videos opened for evaluation: the samples that an encoder reads, and one split by video.

A run trained on clips reads clips, one trained on frames reads frames; both are judged on videos, whose features are
the mean over a video's samples. So the two can be compared on the same test videos.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.data.clips import ClipConfig, ClipStore, build_clip_store, open_clips, with_motion
from mocokit.data.index import SampleIndex
from mocokit.data.pixels import PixelStore, build_pixel_store, side_for
from mocokit.data.videos import VideoSet, open_videos, spaced_frames
from mocokit.errors import DataError
from mocokit.evaluation.labelled import SPLIT_SEED
from mocokit.evaluation.protocol import Split, split_rows
from mocokit.training.settings import DataConfig

Ints = npt.NDArray[np.int64]

SAMPLES_PER_VIDEO = 10
"""Clips or frames of a video that are read at most, evenly spread over it."""


@dataclass(frozen=True, slots=True, eq=False)
class VideoSamples:
    """V videos, and the clips or frames that stand for each."""

    videos: VideoSet
    store: PixelStore | ClipStore
    samples: Ints
    """Rows of the store that are read, video after video; none of a video without a readable one."""
    video_of: Ints
    """The video of each of `samples`."""
    row_ids: Ints
    """An id for every row of the store."""


@dataclass(frozen=True, slots=True, eq=False)
class VideoData:
    """V labelled videos and who may see which. Videos without a label or without a readable sample are in no split."""

    name: str
    index: SampleIndex
    """A row per video."""
    videos: VideoSet
    store: PixelStore | ClipStore
    samples: Ints
    """Rows of the store that are read, video after video."""
    video_of: Ints
    """The video of each of `samples`."""
    row_ids: Ints
    """An id for every row of the store."""
    split: Split
    """Of videos."""

    @property
    def n_classes(self) -> int:
        """How many classes there are."""
        return len(self.index.class_names)

    @property
    def clips(self) -> ClipStore | None:
        """The clips, where these are the samples."""
        return self.store if isinstance(self.store, ClipStore) else None

    def of(self, videos: Ints) -> tuple[Ints, Ints]:
        """Rows of the store for the samples of some videos, and for each the place of its video in `videos`."""
        place = np.full(len(self.index), -1, np.int64)
        place[videos] = np.arange(len(videos))
        mine = place[self.video_of] >= 0
        return self.samples[mine], place[self.video_of[mine]]

    def by_row(self, values: Ints) -> Ints:
        """Values [V] of the videos, for every row of the store; -1 for rows that are not among the samples."""
        found = np.full(len(self.row_ids), -1, np.int64)
        found[self.samples] = values[self.video_of]
        return found


def open_labelled_videos(
    spec: str,
    config: DataConfig,
    *,
    size: int,
    label_column: str | None = None,
    group_column: str | None = None,
    cache: Path | None = None,
    max_bad: float = 0.01,
    progress: Callable[[int, int], None] | None = None,
) -> VideoData:
    """Open labelled videos as a run with this configuration reads them, for views of `size` pixels.

    Raises DataError when there are no labels or only one class.
    """
    videos = open_videos(
        spec,
        label_column=label_column,
        group_column=group_column,
        workers=2,
        tables=None if cache is None else cache.with_suffix(".tables"),
        progress=progress,
    )
    labels = videos.index.labels
    if not (labels >= 0).any():
        raise DataError(
            f"{videos.name} has no labels. Lay the videos out as ROOT/CLASS/..., or as ROOT/train/CLASS/... and "
            "ROOT/test/CLASS/..., or give a table with a label column (--label-column)."
        )
    if len(np.unique(labels[labels >= 0])) < 2:
        raise DataError(f"{videos.name} has one class only; there is nothing to tell apart. Check the labels.")
    found = sample_videos(videos, config, size=size, cache=cache, max_bad=max_bad, progress=progress)
    videos = found.videos
    seen = np.zeros(len(videos.index), np.bool_)
    seen[found.video_of] = True
    usable = (videos.index.labels >= 0) & seen
    whole = split_rows(videos.index, SPLIT_SEED)
    parts = {name: getattr(whole, name) for name in ("train", "val", "test")}
    split = Split(**{name: rows[usable[rows]] for name, rows in parts.items()})
    return VideoData(
        videos.name, videos.index, videos, found.store, found.samples, found.video_of, found.row_ids, split
    )


def sample_videos(
    videos: VideoSet,
    config: DataConfig,
    *,
    size: int,
    cache: Path | None = None,
    max_bad: float = 0.01,
    progress: Callable[[int, int], None] | None = None,
) -> VideoSamples:
    """The clips or frames, as a run with this configuration reads them, of at most `SAMPLES_PER_VIDEO` a video.

    With clips, videos of a single frame are left out of `videos`.
    """
    store: PixelStore | ClipStore
    if config.video == "clips":
        videos = with_motion(videos)
        clips = open_clips(videos, ClipConfig(frames=config.clip_frames, stride=config.clip_stride))
        side = side_for(clips.frames, size)
        store = build_clip_store(clips, side=side, cache=cache, max_bad=max_bad, workers=2, progress=progress)
        video_of, ids = clips.video, clips.index.ids
    else:
        frames = spaced_frames(videos, config.frame_rate, workers=2, progress=progress)
        side = side_for(frames, size)
        store = build_pixel_store(frames, side=side, cache=cache, max_bad=max_bad, workers=2, progress=progress)
        assert frames.frames is not None
        video_of, ids = frames.frames.video_of, frames.index.ids
    samples = _spread(np.flatnonzero(store.readable), video_of)
    return VideoSamples(videos, store, samples, video_of[samples], ids)


def _spread(rows: Ints, video_of: Ints) -> Ints:
    """At most SAMPLES_PER_VIDEO of the readable rows of each video, evenly spread."""
    kept = []
    for video in np.unique(video_of[rows]):
        mine = rows[video_of[rows] == video]
        places = np.unique(np.linspace(0, len(mine) - 1, min(len(mine), SAMPLES_PER_VIDEO)).round().astype(np.int64))
        kept.append(mine[places])
    return np.concatenate(kept)


def by_video(vectors: Tensor, place: Ints, count: int) -> Tensor:
    """[count, D] the mean of the samples' unit vectors, each sample [D] counted for the video at its place."""
    total = torch.zeros(count, vectors.shape[1])
    where = torch.from_numpy(place)
    total.index_add_(0, where, F.normalize(vectors, dim=1))
    return total / torch.bincount(where, minlength=count).clamp(min=1)[:, None]
