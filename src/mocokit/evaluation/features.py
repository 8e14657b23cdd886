"""Frozen features: h (backbone) and z (head) of every image, with the encoder in eval mode and nothing moved.

Batch norm uses its running statistics, so an image's features don't depend on the batch it happens to be in, and the
last short batch is encoded like the others. Whatever could break that (a layer that stays in train mode, a batch
norm without running statistics, a buffer that moves) is an error, not a slightly better number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mocokit.contrast.encoders import Encoder
from mocokit.data.views import Triple, plain_view
from mocokit.errors import DivergedError, UsageError

Ints = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]  # images done, images in all
IMAGES_AT_ONCE, CLIPS_AT_ONCE = 256, 64
"""Rows of a store that go through a network together, where they are images and where they may be clips."""


class Pixels(Protocol):
    """What evaluation needs of a pixel store."""

    def batch(self, rows: Ints, /) -> tuple[Tensor, Tensor]:
        """uint8 [B, 3, side, side] and int64 [B, 2] (height, width) of some rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Both readouts of M images, float32 on the CPU: h [M, H] of the backbone, z [M, D] of the head."""

    h: Tensor
    z: Tensor


def extract(
    encoder: Encoder,
    store: Pixels,
    rows: Ints,
    *,
    size: int,
    mean: Triple,
    std: Triple,
    batch: int = 256,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Features:
    """h and z of the plain views of `rows` int64 [M], in their order.

    The encoder must be on `device`; it is left in the modes it came in. size: side of the views in pixels; mean and
    std: what the encoder was trained with. `progress(done, M)` is called after every batch. Raises UsageError when
    the encoder is not frozen in eval mode (see `frozen`), DivergedError when a feature is not finite.
    """
    with frozen(encoder):
        h, z = gather(
            encoder.h_and_z,
            plain_batches(store, rows, size=size, mean=mean, std=std, batch=batch, device=device),
            len(rows),
            progress,
        )
    if not (bool(torch.isfinite(h).all()) and bool(torch.isfinite(z).all())):
        raise DivergedError(
            "Some features are not finite numbers: the encoder's weights diverged. Evaluate an earlier checkpoint."
        )
    return Features(h, z)


def plain_batches(
    store: Pixels, rows: Ints, *, size: int, mean: Triple, std: Triple, batch: int, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """The plain views of `rows`, float32 [B, 3, size, size] with B <= batch, none dropped."""
    if len(rows) == 0 or batch < 1:
        raise UsageError(f"There must be images and a batch of at least 1; got {len(rows)} images, batch {batch}.")
    for start in range(0, len(rows), batch):
        images, extents = store.batch(rows[start : start + batch])
        threads = torch.get_num_threads()  # views and the encoder take turns
        yield plain_view(images.to(device), extents.to(device), size=size, mean=mean, std=std, threads=threads)


def gather(
    forward: Callable[[Tensor], tuple[Tensor, ...]],
    batches: Iterator[Tensor],
    count: int,
    progress: Progress | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of `forward` for all batches, `count` images together: float32 on the CPU, one tensor per output."""
    outputs: tuple[Tensor, ...] = ()
    done = 0
    with torch.inference_mode():
        for x in batches:
            parts = forward(x)
            if not outputs:
                outputs = tuple(torch.empty(count, *part.shape[1:], dtype=torch.float32) for part in parts)
            for output, part in zip(outputs, parts, strict=True):
                output[done : done + len(x)] = part
            done += len(x)
            if progress is not None:
                progress(done, count)
    assert done == count, f"{done} images came, {count} were announced"
    return outputs


@contextlib.contextmanager
def frozen(encoder: nn.Module) -> Iterator[None]:
    """Eval mode for every layer, checked; each layer's own mode comes back afterwards.

    Raises UsageError for a layer that stays in train mode, for a batch norm without running statistics (it would
    normalise by the test batch), and afterwards when a forward moved a buffer, running statistics above all.
    """
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.eval()
    try:
        for name, module in encoder.named_modules():
            if module.training:
                raise UsageError(f"Layer {name!r} stays in train mode when evaluated. Remove it from the backbone.")
            if (
                isinstance(module, _NormBase)
                and not isinstance(module, _INSTANCE_NORMS)
                and module.running_mean is None
            ):
                raise UsageError(
                    f"Batch norm {name!r} keeps no running statistics, so features would depend on the test batch. "
                    "Build it with track_running_stats=True."
                )
        before = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
        yield
        for name, buffer in encoder.named_buffers():
            if name not in before or not torch.equal(before[name], buffer):
                raise UsageError(f"A forward in eval mode changed {name!r}. Evaluation must not move the encoder.")
    finally:
        for module, training in modes:
            module.training = training


_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
