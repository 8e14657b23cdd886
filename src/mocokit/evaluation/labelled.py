"""Labelled data opened for evaluation: pixels, labels and the one fixed split into train, validation and test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mocokit.data.index import SampleIndex
from mocokit.data.pixels import PixelStore, build_pixel_store, side_for
from mocokit.data.sources import ImageSource, open_source
from mocokit.errors import DataError
from mocokit.evaluation.protocol import Split, split_rows

Ints = npt.NDArray[np.int64]
SPLIT_SEED = 0
"""Decides the split of data that declare none. Fixed, so that every run is judged on the same images."""


@dataclass(frozen=True, slots=True)
class LabelledData:
    """Labelled pictures and who may see which. Rows without a label or without readable pixels are in no split."""

    name: str
    index: SampleIndex
    store: PixelStore
    split: Split
    source: ImageSource

    @property
    def n_classes(self) -> int:
        """How many classes there are."""
        return len(self.index.class_names)

    def of(self, rows: Ints) -> tuple[Ints, Ints]:
        """Rows of the store for some rows of the index, and for each its place in `rows`: they are the same here."""
        return rows, np.arange(len(rows))

    def by_row(self, values: Ints) -> Ints:
        """Values [S] of the index's rows, for every row of the store."""
        return values

    @property
    def row_ids(self) -> Ints:
        """[S] an id for every row of the store."""
        return self.index.ids

    def store_at(self, size: int, cache: Path | None = None) -> PixelStore:
        """The same pictures decoded for views of another size, for an encoder that was made for one."""
        side = side_for(self.source, size)
        if side == self.store.side:
            return self.store
        return build_pixel_store(self.source, side=side, cache=cache, max_bad=1.0, workers=2)


def open_labelled(
    spec: str,
    *,
    size: int,
    label_column: str | None = None,
    group_column: str | None = None,
    cache: Path | None = None,
    max_bad: float = 0.01,
    exclude: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LabelledData:
    """Open labelled data for views of `size` pixels, without the samples on the list `exclude`.

    Raises DataError when there are no labels or only one class.
    """
    source = open_source(spec, label_column=label_column, group_column=group_column, exclude=exclude)
    index = source.index
    if not (index.labels >= 0).any():
        raise DataError(
            f"{source.name} has no labels. Lay it out as ROOT/CLASS/..., or as ROOT/train/CLASS/... and "
            "ROOT/test/CLASS/..., or give a table with a label column (--label-column)."
        )
    if len(np.unique(index.labels[index.labels >= 0])) < 2:
        raise DataError(f"{source.name} has one class only; there is nothing to tell apart. Check the labels.")
    store = build_pixel_store(
        source, side=side_for(source, size), cache=cache, max_bad=max_bad, workers=2, progress=progress
    )
    whole = split_rows(index, SPLIT_SEED)
    usable = (index.labels >= 0) & store.readable
    split = Split(**{name: _only(getattr(whole, name), usable) for name in ("train", "val", "test")})
    return LabelledData(source.name, index, store, split, source)


def _only(rows: Ints, usable: npt.NDArray[np.bool_]) -> Ints:
    kept: Ints = rows[usable[rows]]
    return kept
