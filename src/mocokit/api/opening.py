"""From what the user says to a source of images and a complete configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mocokit import config as configuration
from mocokit.data.clips import (
    ClipConfig,
    ClipSource,
    ClipStore,
    build_clip_store,
    open_clip_store,
    open_clips,
    usual_stride,
)
from mocokit.data.exclusion import read_exclude
from mocokit.data.pixels import PixelStore, build_pixel_store, open_pixel_store, side_for
from mocokit.data.sources import ImageSource, open_source
from mocokit.data.videos import open_videos, spaced_frames
from mocokit.errors import DataError, UsageError, did_you_mean
from mocokit.options import PretrainOptions
from mocokit.training.settings import DataConfig, RunConfig

FromFile = dict[str, dict[str, Any]]
"""A configuration file's sections, as they were read."""


def options_from(options: PretrainOptions | None, flags: dict[str, Any]) -> PretrainOptions:
    names = [field.name for field in dataclasses.fields(PretrainOptions)]
    for name in flags:
        if name not in names:
            raise UsageError(f"pretrain has no option '{name}'.{did_you_mean(name, names)}")
    return dataclasses.replace(options or PretrainOptions(), **flags)


def read_config(config_file: Path | None) -> FromFile:
    return configuration.read_yaml(config_file) if config_file else {}


VIDEO_TABLES = "frames.tables"
"""The file in a run's cache that keeps the tables of frames of its videos."""
Source = ImageSource | ClipSource
"""What is trained on: pictures (frames of videos among them), or clips."""
Store = PixelStore | ClipStore
Progress = Callable[[int, int], None]


def configure(
    data: str,
    options: PretrainOptions,
    from_file: FromFile,
    progress: Progress | None = None,
    tables: Path | None = None,
) -> tuple[Source, RunConfig]:
    in_data = from_file.get("data", {})
    label_column = options.label_column or in_data.get("label_column")
    group_column = options.group_column or in_data.get("group_column")
    exclude = options.exclude or in_data.get("exclude")
    wanted = options.split or in_data.get("split")
    settings, stride = video_settings(data, options, in_data)
    if settings.video == "off":
        source: Source
        source, split = open_images(data, wanted, label_column, group_column, exclude)
    else:
        if exclude is not None:
            raise UsageError("--exclude is for images; leave it out, and the videos out of the folder or list.")
        settings = dataclasses.replace(settings, split=wanted, label_column=label_column, group_column=group_column)
        source, split = open_moving(settings, stride, progress, tables)
    pictures = source.frames if isinstance(source, ClipSource) else source
    native = native_side(pictures)
    config = configuration.assemble(
        data,
        options,
        from_file,
        images=len(source.index),
        native_side=native,
        side_for=lambda size: side_for(pictures, size),
        split=split,
        index_hash=source.index.hash,
        exclude_sha256=None if exclude is None else read_exclude(exclude).sha256,
        clip_stride=source.config.stride if isinstance(source, ClipSource) else None,
    )
    return source, config


_FRAMES_ONLY = ("frame_rate",)
_CLIPS_ONLY = ("clip_frames", "clip_stride", "clip_speed", "max_gap")


def video_settings(data: str, options: PretrainOptions, in_data: Mapping[str, Any]) -> tuple[DataConfig, int | None]:
    """What flags and file say about videos, and the clips' stride where it was named.

    Raises UsageError for a flag that has no effect beside the others.
    """
    names = ("video", *_FRAMES_ONLY, *_CLIPS_ONLY)
    flags = {name: value for name in names if (value := getattr(options, name)) is not None}
    said = {name: in_data[name] for name in names if name in in_data} | flags
    kind = said.get("video", "off")
    idle = [name for name in _FRAMES_ONLY if kind != "frames"] + [name for name in _CLIPS_ONLY if kind != "clips"]
    for name in idle:
        if name in flags:
            needed = "frames" if name in _FRAMES_ONLY else "clips"
            raise UsageError(f"--{name.replace('_', '-')} has no effect without --video {needed}. Leave it out.")
    return DataConfig(spec=data, **said), said.get("clip_stride")


def open_moving(
    settings: DataConfig, stride: int | None, progress: Progress | None = None, tables: Path | None = None
) -> tuple[Source, str | None]:
    """Frames or clips of videos, and the split that is used (see `open_images`). stride: None = the usual one.

    tables: a file that keeps the tables of frames (see `open_videos`).
    """
    videos = open_videos(
        settings.spec,
        label_column=settings.label_column,
        group_column=settings.group_column,
        workers=2,
        tables=tables,
        progress=progress,
    )
    split = settings.split
    if split is None and "train" in videos.index.split_names:
        split = "train"
    if split is not None:
        videos = videos.subset(videos.index.rows_of(split))
    if settings.video == "frames":
        return spaced_frames(videos, settings.frame_rate, workers=2, progress=progress), split
    return open_clips(videos, clip_config(settings, stride or usual_stride(videos))), split


def clip_config(settings: DataConfig, stride: int) -> ClipConfig:
    """The clips that a run's settings describe."""
    return ClipConfig(frames=settings.clip_frames, stride=stride, speed=settings.clip_speed, max_gap=settings.max_gap)


def reopen(data: str, config: DataConfig, progress: Progress | None = None, tables: Path | None = None) -> Source:
    """What a run was started on, opened again as its configuration says. tables: as in `open_moving`."""
    if config.video == "off":
        return reopen_images(data, config)
    return open_moving(dataclasses.replace(config, spec=data), config.clip_stride, progress, tables)[0]


def build_store(
    source: Source, *, side: int, cache: Path | None, max_bad: float, progress: Progress | None = None
) -> Store:
    """The pixels of what is trained on, decoded once."""
    if isinstance(source, ClipSource):
        return build_clip_store(source, side=side, cache=cache, max_bad=max_bad, workers=2, progress=progress)
    return build_pixel_store(source, side=side, cache=cache, max_bad=max_bad, workers=2, progress=progress)


def open_images(
    data: str,
    split: str | None,
    label_column: str | None,
    group_column: str | None,
    exclude: str | None = None,
) -> tuple[ImageSource, str | None]:
    """The source, and the split that is used: the one asked for, else train where there is one, else everything."""
    whole = open_source(data, label_column=label_column, group_column=group_column, exclude=exclude)
    if split is None:
        if "train" not in whole.index.split_names:
            return whole, None
        split = "train"
    return whole.subset(whole.index.rows_of(split)), split


def reopen_images(data: str, stored: DataConfig) -> ImageSource:
    """The source a run was started with. Raises DataError when its list of samples to leave out has changed."""
    if stored.exclude is not None and read_exclude(stored.exclude).sha256 != stored.exclude_sha256:
        raise DataError(
            f"The list {stored.exclude} is not what it was when the run started. Restore it, or start another run "
            "with another --out."
        )
    return open_images(data, stored.split, stored.label_column, stored.group_column, stored.exclude)[0]


def native_side(source: ImageSource) -> int:
    """The longer side of the pictures, from an evenly spread handful of readable ones."""
    count = len(source.index)
    sides = []
    for row in np.unique(np.linspace(0, count - 1, min(count, 16)).astype(int)).tolist():
        if source.frames is not None:
            sides.append(max(source.frames.size_of(row)))
            continue
        try:
            sides.append(max(source.read(row).shape[:2]))
        except DataError:
            continue  # counted and named when the pixels are read in full
    if not sides:
        raise DataError(f"None of {min(count, 16)} images looked at in {source.name} could be read. Check the files.")
    return int(np.median(sides))


def open_store(source: Source, *, side: int, cache: Path, max_bad: float) -> Store:
    """The pixels that another process of the run has put into `cache`. Raises DataError when they are not there."""
    if isinstance(source, ClipSource):
        return open_clip_store(source, side=side, cache=cache, max_bad=max_bad)
    return open_pixel_store(source, side=side, cache=cache, max_bad=max_bad)
