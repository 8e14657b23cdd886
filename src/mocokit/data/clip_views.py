"""Two views of a clip: another stretch of the same video at another speed, and one spatial augmentation for all frames.

A clip's frames share crop, flip, colours and blur, so that what moves in a view is what moved in the video. Every
number is a function of (seed, epoch, clip id, view), as for pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mocokit.data.clips import ClipStore
from mocokit.data.randomness import uniform, word
from mocokit.data.views import ViewConfig, draw_parameters, make_views, render

Int64Array = npt.NDArray[np.int64]


def draw_stretches(
    store: ClipStore, rows: Int64Array, ids: Int64Array, *, seed: int, epoch: int, view: int
) -> tuple[Int64Array, Int64Array]:
    """Start and stride, int64 [B] each, of the stretch that a view shows.

    View 0 starts where the clip does, view 1 up to `max_gap` seconds before or after it; both are moved into the
    video where they would leave it. The stride is 1, 2, ... or `speed` times the clip's, all alike likely.
    """
    source, config = store.source, store.source.config
    video = source.video[rows]
    factor = 1 + np.floor(config.speed * uniform(seed, word("clip speed"), epoch, ids, view)).astype(np.int64)
    stride = config.stride * factor
    start = source.start[rows]
    if view % 2 and config.max_gap > 0:
        reach = config.max_gap * source.rate[video]
        drawn = reach * (2 * uniform(seed, word("clip gap"), epoch, ids, view) - 1)
        start = start + np.rint(drawn).astype(np.int64)
    latest = np.maximum(source.length[video] - ((config.frames - 1) * stride + 1), 0)
    return np.clip(start, 0, latest), stride


def make_clip_views(
    config: ViewConfig,
    store: ClipStore,
    rows: Int64Array,
    ids: Int64Array,
    *,
    seed: int,
    epoch: int,
    views: Sequence[int] = (0, 1),
    threads: int = 1,
) -> tuple[Tensor, ...]:
    """One tensor of B clips for each number in `views`, float32 [B, 3, T, size, size].

    rows: clips that could be read; ids: int64 [B]. threads: as in make_views.
    """

    def of(view: int) -> Tensor:
        start, stride = draw_stretches(store, rows, ids, seed=seed, epoch=epoch, view=view)
        clips, extents = store.cut(store.source.video[rows], start, stride)
        return moved_view(config, clips, extents, ids, seed=seed, epoch=epoch, view=view, threads=threads)

    return tuple(map(of, views))


def moved_view(
    config: ViewConfig,
    pixels: Tensor,
    extents: Tensor,
    ids: Int64Array,
    *,
    seed: int,
    epoch: int,
    view: int,
    threads: int = 1,
) -> Tensor:
    """One view of pictures uint8 [B, 3, side, side], or of clips [B, 3, T, side, side] whose frames share their draw.

    extents: int64 [B, 2], height and width. Returns float32 [B, 3, size, size] or [B, 3, T, size, size].
    """
    if pixels.ndim == 4:
        return make_views(config, pixels, extents, ids, seed=seed, epoch=epoch, views=(view,), threads=threads)[0]
    drawn = draw_parameters(config, extents.numpy(), ids, seed=seed, epoch=epoch, views=(view,))
    B, T = len(pixels), pixels.shape[2]
    frames = pixels.transpose(1, 2).flatten(0, 1)
    each = drawn.take(np.repeat(np.arange(B), T))
    x = render(config, frames, each, threads=threads)[0]
    return x.view(B, T, *x.shape[1:]).transpose(1, 2).contiguous()
