"""A batch of pictures becomes batches of random views, every number a function of (seed, epoch, sample id, view).

`view_parameters` turns hashes into crop boxes, colour factors and so on; `rendering` applies them. A sample's views
therefore have the same bits in any batch, at any place in it and after any interruption, on any number of threads
(image_ops.py says why). Shapes: B samples, V views of each, N = V B pictures, view by view.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mocokit.data.image_ops import IntArray
from mocokit.data.rendering import render
from mocokit.data.view_parameters import ViewParameters, central_squares, draw_parameters
from mocokit.data.view_recipes import Triple, ViewConfig, view_recipe


def make_views(
    config: ViewConfig,
    images_u8: Tensor,
    extents: Tensor,
    ids: IntArray,
    *,
    seed: int,
    epoch: int,
    views: Sequence[int] = (0, 1),
    threads: int = 1,
) -> tuple[Tensor, ...]:
    """One float32 tensor [B, 3, size, size] for each number in `views`, on the device of the images. B is at least 1.

    images_u8: uint8 [B, 3, S, S], RGB, on a CPU or CUDA device (float64 is needed); each picture lies in the top-left
        corner of its canvas.
    extents: int64 [B, 2], the picture's (height, width), 1..S; nothing beyond it is read. Best kept on the CPU.
    ids: int64 [B], randomness.sample_id of each sample.
    threads: how many of them work on a CPU; more than one decide no bit.
    """
    assert images_u8.dtype == torch.uint8
    assert images_u8.shape == (len(ids), 3, images_u8.shape[3], images_u8.shape[3])
    assert extents.shape == (len(ids), 2)
    sizes = extents.cpu().numpy().astype(np.int64, copy=False)
    parameters = draw_parameters(config, sizes, ids, seed=seed, epoch=epoch, views=views)
    return render(config, images_u8, parameters, threads=threads).unbind(0)


def plain_view(
    images_u8: Tensor,
    extents: Tensor,
    *,
    size: int,
    mean: Triple = (0.5, 0.5, 0.5),
    std: Triple = (0.5, 0.5, 0.5),
    threads: int = 1,
) -> Tensor:
    """The view for evaluation, float32 [B, 3, size, size]: central square, antialiased resize, normalised, no chance.

    images_u8 and extents as in make_views; or clips uint8 [B, 3, T, S, S], which give float32 [B, 3, T, size, size].
    """
    if images_u8.ndim == 5:
        B, _, T = images_u8.shape[:3]
        frames = images_u8.transpose(1, 2).flatten(0, 1)
        x = plain_view(frames, extents.repeat_interleave(T, 0), size=size, mean=mean, std=std, threads=threads)
        return x.view(B, T, *x.shape[1:]).transpose(1, 2).contiguous()
    config = ViewConfig(size=size, mean=mean, std=std)
    nobody = np.zeros(len(images_u8), np.int64)
    return make_views(config, images_u8, extents, nobody, seed=0, epoch=0, views=(0,), threads=threads)[0]


__all__ = [
    "Triple",
    "ViewConfig",
    "ViewParameters",
    "central_squares",
    "draw_parameters",
    "make_views",
    "plain_view",
    "render",
    "view_recipe",
]
