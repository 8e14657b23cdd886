"""Did pretraining use the test videos? Asked by name and, where its files are still there, by content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mocokit.data.clips import ClipConfig, open_clips
from mocokit.data.videos import VideoSet, open_videos, spaced_frames
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.labelled import LabelledData
from mocokit.evaluation.labelled_videos import VideoData
from mocokit.evaluation.overlap import Overlap, counted, largest, pretraining_overlap
from mocokit.training.run import Run
from mocokit.training.settings import DataConfig

Ints = npt.NDArray[np.int64]


def overlap_with(runs: Sequence[Run], data: LabelledData | VideoData) -> Overlap:
    """Of all the runs together: the one that used most of the test images or videos is told."""
    return video_overlap(runs, data) if isinstance(data, VideoData) else pretraining_overlap(runs, data)


def video_overlap(runs: Sequence[Run], data: VideoData) -> Overlap:
    """Of all the runs together: the one that used most of the test videos is told. Files are compared byte by byte."""
    tables = {run.config.data.index_hash: run.path / "cache" / "frames.tables" for run in runs}
    return largest(runs, lambda used: _of_run(used, data, tables[used.index_hash]))


def _of_run(used: DataConfig, data: VideoData, tables: Path) -> Overlap:
    test = data.split.test
    try:
        pretrained = open_videos(
            used.spec,
            split=used.split,
            label_column=used.label_column,
            group_column=used.group_column,
            workers=2,
            tables=tables,
        )
    except (DataError, UsageError):
        text = "unknown: the videos of the pretraining are not where they were, so they were not compared"
        return Overlap(len(test), None, None, (), text)
    if _index_hash(pretrained, used) != used.index_hash:
        text = "unknown: the videos of the pretraining were changed since, so they were not compared"
        return Overlap(len(test), None, None, (), text)
    same_name = np.isin(data.index.ids[test], pretrained.index.ids)
    return counted(data.index.names, test, same_name, _same_content(data.videos, test, pretrained), "videos")


def _index_hash(videos: VideoSet, used: DataConfig) -> str:
    """The hash of the samples that a run with this configuration makes of the videos (names, sizes, times)."""
    if used.video == "frames":
        return spaced_frames(videos, used.frame_rate, workers=2).index.hash
    return open_clips(videos, ClipConfig(frames=used.clip_frames, stride=used.clip_stride)).index.hash


def _same_content(labelled: VideoSet, test: Ints, pretrained: VideoSet) -> npt.NDArray[np.bool_]:
    """[n_test] whether a test video is among those of the pretraining: the same bytes, or the same generated video."""
    if labelled.file is None or pretrained.file is None:
        same_set = labelled.index.content == pretrained.index.content and labelled.file is pretrained.file
        return np.isin(labelled.index.ids[test], pretrained.index.ids) & same_set
    sizes = labelled.index.sizes[test]
    rows = np.flatnonzero(np.isin(pretrained.index.sizes, sizes))
    there = {_digest(pretrained.file(row)) for row in rows.tolist()}
    return np.array([_digest(labelled.file(row)) in there for row in test.tolist()], np.bool_)


def _digest(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()
