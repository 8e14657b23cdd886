"""From what the user says to a source of images and a complete configuration."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from mocokit import config as configuration
from mocokit.data.exclusion import read_exclude
from mocokit.data.pixels import side_for
from mocokit.data.sources import ImageSource, open_source
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


def configure(data: str, options: PretrainOptions, from_file: FromFile) -> tuple[ImageSource, RunConfig]:
    in_data = from_file.get("data", {})
    label_column = options.label_column or in_data.get("label_column")
    group_column = options.group_column or in_data.get("group_column")
    exclude = options.exclude or in_data.get("exclude")
    source, split = open_images(data, options.split or in_data.get("split"), label_column, group_column, exclude)
    native = native_side(source)
    config = configuration.assemble(
        data,
        options,
        from_file,
        images=len(source.index),
        native_side=native,
        side_for=lambda size: side_for(source, size),
        split=split,
        index_hash=source.index.hash,
        exclude_sha256=None if exclude is None else read_exclude(exclude).sha256,
    )
    return source, config


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
