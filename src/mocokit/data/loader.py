"""Order, batches and prefetch. A position in training is one integer, the step; everything else follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mocokit.data.clip_views import make_clip_views
from mocokit.data.clips import ClipStore
from mocokit.data.index import SampleIndex
from mocokit.data.pixels import PixelStore
from mocokit.data.randomness import permutation
from mocokit.data.threads import in_order
from mocokit.data.views import ViewConfig, make_views
from mocokit.errors import OutOfMemoryError, is_out_of_memory

Rows = npt.NDArray[np.int64]

_TOGETHER = 2**20
"""Pixels up to which views of several steps are made at once between the steps."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Two views of N images, float32 [N, 3, H, W], or of N clips, [N, 3, T, H, W].

    ids, groups: int64 [N]. rows: the index rows asked for.
    """

    step: int
    x_q: Tensor
    x_k: Tensor
    ids: Tensor
    groups: Tensor
    rows: Rows

    def cut(self, steps: range) -> list[Batch]:
        """This batch as those of several steps, in equal parts, each on memory aligned as if it were alone."""
        size = len(self.rows) // len(steps)
        parts = [slice(start, start + size) for start in range(0, len(self.rows), size)]
        return [
            Batch(step, _aligned(self.x_q[at]), _aligned(self.x_k[at]), self.ids[at], self.groups[at], self.rows[at])
            for step, at in zip(steps, parts, strict=True)
        ]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on a device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            x_q=self.x_q.to(device),
            x_k=self.x_k.to(device),
            ids=self.ids.to(device),
            groups=self.groups.to(device),
        )


def _aligned(x: Tensor) -> Tensor:
    """x, copied where it does not start as new memory does: the bits of a matrix product can depend on that."""
    return x if x.data_ptr() % 64 == 0 else x.clone()


class BatchPlan:
    """Which rows make up which step: a pure function of (seed, step), so resuming needs no state.

    Each epoch is one permutation of the rows; its last short batch is dropped. batch_size counts the rows of all
    ranks; rank r of `ranks` takes the r-th block of each step's rows: how many there are changes no order.
    """

    def __init__(
        self, ids: npt.NDArray[np.int64], batch_size: int, seed: int, *, rank: int = 0, ranks: int = 1
    ) -> None:
        if batch_size % ranks:
            raise ValueError(f"A batch of {batch_size} can't be split evenly over {ranks} ranks.")
        self.ids, self.batch_size, self.seed = ids, batch_size, seed
        self.rank, self.block = rank, batch_size // ranks
        self.steps_per_epoch = len(ids) // batch_size
        self._order: tuple[int, Rows] | None = None

    def rows(self, step: int) -> Rows:
        """This rank's rows of the step numbered `step` (from 0): int64 [batch_size / ranks]."""
        epoch, position = divmod(step, self.steps_per_epoch)
        cached = self._order
        if cached is None or cached[0] != epoch:
            cached = self._order = (epoch, permutation(self.seed, epoch, self.ids))
        start = position * self.batch_size + self.rank * self.block
        return cached[1][start : start + self.block]


class BatchLoader:
    """Makes batches of views in order, inline or ahead of the step on `workers` threads.

    The views of a sample do not depend on the number of workers (see `randomness`). Of a ClipStore the views are of
    clips, float32 [N, 3, T, H, W].
    """

    def __init__(
        self, store: PixelStore | ClipStore, index: SampleIndex, views: ViewConfig, plan: BatchPlan, *, workers: int = 1
    ) -> None:
        self.store, self.index, self.views, self.plan, self.workers = store, index, views, plan, workers

    @property
    def pixels_of_a_view(self) -> int:
        """Places in one view of one sample, those of all frames of a clip."""
        frames = self.store.source.config.frames if isinstance(self.store, ClipStore) else 1
        return frames * self.views.size**2

    def make(self, step: int) -> Batch:
        """The batch of one step, from nothing but its number. Raises OutOfMemoryError naming images."""
        return self.make_together(range(step, step + 1))[0]

    def make_together(self, steps: range) -> list[Batch]:
        """The batches of steps of one epoch by one call. Raises OutOfMemoryError naming images."""
        rows = np.concatenate([self.plan.rows(step) for step in steps])
        try:
            whole = self.of_rows(rows, steps[0])
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
            named = ", ".join(repr(self.index.names[row]) for row in rows[:3].tolist())
            raise OutOfMemoryError(f"views of {which} ({len(rows)} images: {named} ...) were being made") from error
        return whole.cut(steps)

    def of_rows(self, rows: Rows, step: int) -> Batch:
        """The batch that these rows (int64 [N]) make at a step; it is the epoch that decides their views."""
        shown = self.store.replaced[rows]  # a row that can't be read shows another one; its id goes with it
        x_q, x_k = self.views_of_rows(rows, step)
        ids, groups = self.index.ids[shown], self.index.groups[shown]
        return Batch(step, x_q, x_k, torch.from_numpy(ids), torch.from_numpy(groups), rows)

    def views_of_rows(self, rows: Rows, step: int, views: Sequence[int] = (0, 1)) -> tuple[Tensor, ...]:
        """Views of these rows alone: x_q is number 0, x_k number 1."""
        shown = self.store.replaced[rows]
        ids = self.index.ids[shown]
        seed, epoch = self.plan.seed, step // self.plan.steps_per_epoch
        threads = 1 if self.workers else torch.get_num_threads()
        how: dict[str, Any] = {"seed": seed, "epoch": epoch, "views": views, "threads": threads}
        if isinstance(self.store, ClipStore):
            return make_clip_views(self.views, self.store, shown, ids, **how)
        pixels, extents = self.store.batch(rows)
        return make_views(self.views, pixels, extents, ids, **how)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of steps start ... stop - 1."""
        if self.workers == 0:
            for steps in self._groups(start, stop):
                yield from self._in_their_place(steps)
            return
        yield from in_order(self.make, range(start, stop), workers=self.workers, ahead=self.workers, name="views")

    def _in_their_place(self, steps: range) -> Iterable[Batch]:
        """`make_together`; where one batch can't be made, those before it still come, and then its error."""
        try:
            return self.make_together(steps)
        except Exception:
            if len(steps) == 1:
                raise
        return map(self.make, steps)

    def _groups(self, start: int, stop: int) -> Iterator[range]:
        """Steps whose batches are made by one call: small ones share what every call costs, none crosses an epoch."""
        count = max(1, _TOGETHER // (2 * self.plan.block * self.pixels_of_a_view))
        while start < stop:
            epoch_end = (start // self.plan.steps_per_epoch + 1) * self.plan.steps_per_epoch
            end = min(start + count, stop, epoch_end)
            yield range(start, end)
            start = end
