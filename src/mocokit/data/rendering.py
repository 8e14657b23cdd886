"""Parameters become pictures: on a CPU by compiled loops, picture by picture; elsewhere by tensors, all at once.

On a CPU the two give the same bits (see fused_ops.py): the tensors are the definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mocokit.data import fused_ops, image_ops
from mocokit.data.image_ops import BoolArray, FloatArray, IntArray
from mocokit.data.threads import spread
from mocokit.data.view_parameters import ViewParameters, draw_parameters
from mocokit.data.view_recipes import ViewConfig

_TILE = {"cpu": 2**19, "cuda": 2**24}  # float32 elements rendered at a time; on a CPU they should stay in the cache
_WORTH_A_THREAD = 2**14  # pixels of all views below which handing some to a further thread costs more than it saves


def render(config: ViewConfig, images_u8: Tensor, parameters: ViewParameters, *, threads: int = 1) -> Tensor:
    """float32 [V, B, 3, size, size] from images [B, 3, S, S] and the parameters of V B pictures. See make_views."""
    if images_u8.device.type == "cpu":
        return render_compiled(config, images_u8, parameters, threads=threads)
    return render_by_tensors(config, images_u8, parameters)


def render_compiled(config: ViewConfig, images_u8: Tensor, p: ViewParameters, *, threads: int = 1) -> Tensor:
    """`render` on a CPU; the pictures are shared out to `threads` of them."""
    size, batch, count = config.size, len(images_u8), len(p.flip)
    out = torch.empty(count, 3, size, size)
    pixels, images, source = out.numpy(), images_u8.numpy(), np.arange(count) % batch
    mean, std = np.array(config.mean, np.float32), np.array(config.std, np.float32)
    factors = p.colour.astype(np.float32)
    is_blurred = p.sigma > 0
    shares = image_ops.gaussian_shares(p.sigma[is_blurred], config.blur_kernel)
    blurred = np.where(is_blurred, np.cumsum(is_blurred) - 1, -1)

    def crop(rows: slice) -> None:
        fused_ops.crop_resize(images, source[rows], p.boxes[rows], p.flip[rows], pixels[rows])

    def colour(rows: slice) -> None:
        fused_ops.colour(
            pixels[rows], p.swap[rows], p.grey[rows], config.grayscale_first, p.order[rows], factors[rows],
            blurred[rows], shares, p.solarize[rows],
        )  # fmt: skip

    def normalise(rows: slice) -> None:
        fused_ops.normalise(pixels[rows], mean, std)

    def all_of_it(rows: slice) -> None:
        crop(rows)
        colour(rows)
        normalise(rows)

    share = functools.partial(spread, count=count, threads=threads if out[:, 0].numel() >= _WORTH_A_THREAD else 1)
    if not config.moves and config.noise == 0:
        share(all_of_it)
        return out.view(-1, batch, 3, size, size)
    share(crop)  # what is not compiled has threads of its own and is done in between
    if config.moves:
        out.copy_(image_ops.affine(out, p.inverse))
    share(colour)
    if config.noise > 0:
        image_ops.noise_(out, p.noise_key, config.noise)
    share(normalise)
    return out.view(-1, batch, 3, size, size)


def compile_views() -> None:
    """Have the loops compiled now (some seconds, the first time on a machine) and not in the middle of something."""
    config = ViewConfig(size=2)
    drawn = draw_parameters(config, np.ones((1, 2), np.int64), np.zeros(1, np.int64), seed=0, epoch=0, views=(0,))
    render_compiled(config, torch.zeros(1, 3, 1, 1, dtype=torch.uint8), drawn)


def render_by_tensors(config: ViewConfig, images_u8: Tensor, parameters: ViewParameters) -> Tensor:
    """`render` on any device."""
    device, size, batch = images_u8.device, config.size, len(images_u8)
    numbers = np.arange(len(parameters.flip)).reshape(-1, batch)
    out = torch.empty(*numbers.shape, 3, size, size, device=device)
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (config.mean, config.std))
    tile = max(1, _TILE[device.type] // out[:, 0].numel())
    for start in range(0, batch, tile):
        samples = slice(start, start + tile)
        x = _render_tile(config, images_u8[samples], parameters.take(numbers[:, samples].ravel()))
        out[:, samples] = x.sub_(mean).div_(std).view(len(numbers), -1, 3, size, size)
    return out


def _render_tile(config: ViewConfig, images_u8: Tensor, p: ViewParameters) -> Tensor:
    x = image_ops.crop_resize(images_u8, p.boxes, p.flip, config.size)
    if config.moves:
        x = image_ops.affine(x, p.inverse)
    _to_some_(x, p.swap, lambda some: some.flip(1))
    if config.grayscale_first:
        _to_some_(x, p.grey, _grey)
    x = _jitter(x, p.order, p.colour)
    if not config.grayscale_first:
        _to_some_(x, p.grey, _grey)
    blurred = p.sigma > 0
    _to_some_(x, blurred, lambda some: image_ops.gaussian_blur(some, p.sigma[blurred], config.blur_kernel))
    _to_some_(x, p.solarize, _solarize)
    return image_ops.noise_(x, p.noise_key, config.noise) if config.noise > 0 else x


def _grey(x: Tensor) -> Tensor:
    return image_ops.luminance(x).expand(-1, 3, -1, -1)


def _solarize(x: Tensor) -> Tensor:
    return torch.where(x < 0.5, x, 1.0 - x)


def _to_some_(x: Tensor, chosen: BoolArray, operation: Callable[[Tensor], Tensor]) -> None:
    """Replace the chosen pictures of x by what the operation makes of them."""
    if chosen.any():
        rows = torch.from_numpy(np.flatnonzero(chosen)).to(x.device)
        x.index_copy_(0, rows, operation(x.index_select(0, rows)))


def _jitter(x: Tensor, order: IntArray, colour: FloatArray) -> Tensor:
    """The colour operations on x [n, 3, s, s], for each picture in its own order.

    Step by step the pictures are sorted by the operation that is due, so that each works in place on its rows.
    """
    if not (order >= 0).any():
        return x
    operations = (image_ops.brightness_, image_ops.contrast_, image_ops.saturation_, image_ops.hue_)
    factors = torch.from_numpy(colour.astype(np.float32)).to(x.device)
    held = np.arange(len(order))  # the picture that each row of x holds
    for due in order.T:
        rows = np.argsort(due[held], kind="stable")
        held, x = held[rows], x.index_select(0, torch.from_numpy(rows).to(x.device))
        bounds = np.searchsorted(due[held], np.arange(len(operations) + 1))
        for number, operation in enumerate(operations):
            group = slice(*bounds[number : number + 2])
            if group.start < group.stop:
                operation(x[group], factors[torch.from_numpy(held[group]).to(x.device), number])
    return x.index_select(0, torch.from_numpy(np.argsort(held)).to(x.device))
