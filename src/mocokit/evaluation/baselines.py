"""What a representation must beat: the pixels themselves, and the same architecture before it learned anything.

Both are always run. A random network is a stronger baseline than it sounds, above all when its batch norm has seen
the training images and its feature map is not averaged over space; so it is given both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mocokit.contrast.encoders import Encoder
from mocokit.data.randomness import permutation
from mocokit.data.views import Triple
from mocokit.errors import DataError
from mocokit.evaluation.features import Ints, Pixels, Progress, frozen, gather, plain_batches

PIXELS = "pixels"
RANDOM_INIT = "random init"
RANDOM_INIT_FLATTENED = "random init (flattened)"

PIXEL_SIDE = 32  # larger views are read at this side, 3,072 values an image: finer pixels only add noise and memory
MAP_SIDE = 4  # a feature map is averaged to at most 4 x 4 places before it is flattened
MAP_VALUES = 8192  # and to fewer places where it has so many channels that it would be longer than this


def pixel_features(
    store: Pixels,
    rows: Ints,
    *,
    size: int,
    mean: Triple,
    std: Triple,
    batch: int = 256,
    progress: Progress | None = None,
) -> Tensor:
    """The plain views of `rows` flattened, float32 [M, 3 s s] with s = min(size, 32).

    They are normalised by mean and std like the encoder's input, so that cosine similarity compares contrasts and
    not brightness.
    """
    batches = plain_batches(store, rows, size=min(size, PIXEL_SIDE), mean=mean, std=std, batch=batch)
    return gather(lambda x: (x.flatten(1),), batches, len(rows), progress)[0]


@dataclass(frozen=True, slots=True, eq=False)
class RandomInit:
    """Two readouts of a random encoder for M images, float32: pooled h [M, H], and the feature map flattened [M, F].

    `flattened` is None for a backbone without a feature map (a ViT).
    """

    pooled: Tensor
    flattened: Tensor | None


def random_init_features(
    make_encoder: Callable[[int], Encoder],
    store: Pixels,
    rows: Ints,
    calibrate_rows: Ints,
    seed: int,
    *,
    size: int,
    mean: Triple,
    std: Triple,
    batch: int = 256,
    calibrate_batches: int = 10,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> RandomInit:
    """Features of `rows` from `make_encoder(seed)`: random weights, batch norm calibrated on `calibrate_rows`.

    calibrate_rows: training images, never the test images. Raises DataError when there are fewer than two.
    """
    if len(calibrate_rows) < 2:
        raise DataError(
            f"Batch norm can't be calibrated on {len(calibrate_rows)} training image(s). Give at least 2 of them."
        )
    encoder = make_encoder(seed).to(device)
    order = calibrate_rows[permutation(seed, 0, calibrate_rows)]
    full = max(2, min(batch, len(order)))
    calibration = order[
        : full * min(calibrate_batches, len(order) // full)
    ]  # a short batch would weigh like a full one
    calibrate(encoder, plain_batches(store, calibration, size=size, mean=mean, std=std, batch=full, device=device))

    def readouts(x: Tensor) -> tuple[Tensor, ...]:
        if not encoder.backbone.spatial:
            return (encoder.features(x),)
        spatial_map = encoder.spatial_map(x)
        return spatial_map.mean((2, 3)), flatten_map(spatial_map)

    with frozen(encoder):
        views = plain_batches(store, rows, size=size, mean=mean, std=std, batch=batch, device=device)
        outputs = gather(readouts, views, len(rows), progress)
    return RandomInit(outputs[0], outputs[1] if len(outputs) > 1 else None)


def calibrate(encoder: nn.Module, views: Iterator[Tensor]) -> None:
    """Set batch norm's running statistics to their mean over the batches `views`, each of two images at least.

    No weight changes and every other layer is in eval mode; afterwards all of the encoder is.
    """
    layers = [module for module in encoder.modules() if isinstance(module, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    encoder.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # torch's cumulative average
        layer.train()
    if layers:
        with torch.no_grad():
            for x in views:
                encoder(x)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        layer.eval()


def flatten_map(spatial_map: Tensor) -> Tensor:
    """A feature map [N, C, h, w] as [N, C g g], averaged to at most 4 x 4 places first, fewer when C is above 512."""
    N, C, height, width = spatial_map.shape
    side = max(1, min(MAP_SIDE, math.isqrt(MAP_VALUES // C)))
    return F.adaptive_avg_pool2d(spatial_map, (min(side, height), min(side, width))).reshape(N, -1)
