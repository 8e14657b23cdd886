"""What would the features be if only one thing about the image were different?

The counterfactual probe encodes an image and the same image under one named change and takes the cosine of the two
features. No label is read. A cosine near 1 means that the features do not see the change, so it can't be read from
them; but in a network whose features of all images are alike (an untrained one, usually) everything is near 1, and
therefore the mean cosine between different images always stands beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast.encoders import Encoder
from mocokit.data.image_ops import luminance
from mocokit.data.views import Triple
from mocokit.errors import UsageError, did_you_mean
from mocokit.evaluation.features import Ints, Pixels, frozen, plain_batches

Change = Callable[[Tensor], Tensor]
"""Pictures float32 [N, 3, H, W] in 0..1 -> the same pictures with one thing changed."""


def swap_channels(images: Tensor) -> Tensor:
    """Red and blue exchanged: the geometry stays, the hue does not."""
    return images.flip(1)


def gray(images: Tensor) -> Tensor:
    """The Rec. 601 luminance in all three channels."""
    return luminance(images).expand_as(images)


def flip(images: Tensor) -> Tensor:
    """The mirror image, left and right exchanged."""
    return images.flip(3)


def shift(images: Tensor) -> Tensor:
    """Moved down and right by an eighth of each side; what leaves at one edge enters at the other."""
    return images.roll((max(images.shape[2] // 8, 1), max(images.shape[3] // 8, 1)), (2, 3))


def darken(images: Tensor) -> Tensor:
    """Brightness times 0.7, so that nothing is clipped."""
    return images * 0.7


CHANGES: dict[str, Change] = {
    "channel-swap": swap_channels,
    "grayscale": gray,
    "flip": flip,
    "shift": shift,
    "brightness": darken,
}


def find_change(name: str) -> Change:
    """The change of that name. Raises UsageError naming those there are."""
    if name not in CHANGES:
        raise UsageError(f"{name!r} is no change. Use one of {', '.join(CHANGES)}." + did_you_mean(name, CHANGES))
    return CHANGES[name]


@dataclass(frozen=True, slots=True)
class Cosines:
    """Mean cosines, in -1..1: of an image's features with those of itself changed, and with those of other images."""

    changed: float
    others: float


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """One change seen by the backbone (h) and by the head (z)."""

    h: Cosines
    z: Cosines

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def cosines(original: Tensor, changed: Tensor) -> Cosines:
    """Of features [N, H] and the features [N, H] of the same N images changed. N >= 2.

    The mean over pairs of different images comes from the sum of the unit vectors: |sum u|^2 = N + sum of the
    N (N - 1) cosines.
    """
    N = len(original)
    if N < 2:
        raise UsageError(f"The counterfactual probe needs at least 2 images. Got {N}.")
    total = F.normalize(original.double(), dim=1).sum(0)
    others = (float(total @ total) - N) / (N * (N - 1))
    return Cosines(changed=float(F.cosine_similarity(original, changed).mean()), others=others)


def counterfactual(
    h_and_z: Callable[[Tensor], tuple[Tensor, Tensor]], images: Iterable[Tensor], change: str | Change
) -> Counterfactual:
    """The probe of one network: `h_and_z` maps pictures in 0..1 to h and z.

    images: batches float32 [N, 3, H, W]. The caller freezes the network. Raises UsageError for an unknown change.
    """
    changed_of = find_change(change) if isinstance(change, str) else change
    plain: list[tuple[Tensor, Tensor]] = []
    changed: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode():
        for batch in images:
            plain.append(h_and_z(batch))
            changed.append(h_and_z(changed_of(batch)))
    h, z = (torch.cat(parts) for parts in zip(*plain, strict=True))
    changed_h, changed_z = (torch.cat(parts) for parts in zip(*changed, strict=True))
    return Counterfactual(h=cosines(h, changed_h), z=cosines(z, changed_z))


def encoder_counterfactual(
    encoder: Encoder,
    store: Pixels,
    rows: Ints,
    change: str,
    *,
    size: int,
    mean: Triple,
    std: Triple,
    batch: int = 256,
    device: torch.device | str = "cpu",
) -> Counterfactual:
    """The probe of an encoder on the plain views of `rows`: the change is made to the picture, before normalisation.

    The encoder must be on `device`; it is frozen meanwhile and left in the modes it came in.
    """
    centre, scale = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, std))

    def pictures() -> Iterator[Tensor]:
        nothing, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return plain_batches(store, rows, size=size, mean=nothing, std=one, batch=batch, device=device)

    with frozen(encoder):
        return counterfactual(lambda x: encoder.h_and_z((x - centre) / scale), pictures(), change)


def before_and_after_table(found: dict[str, dict[str, Counterfactual]]) -> str:
    """Text: one line per change and readout. found: change -> {"before": ..., "after": ...}."""
    width = max(len(name) for name in found)
    lines = [
        "Counterfactual: mean cosine between an image's features and those of the same image changed",
        "(in brackets: between different images)",
        f"{'':<{width}}     before training    after training",
    ]
    for name, both in found.items():
        for readout in ("h", "z"):
            cells = []
            for when in ("before", "after"):
                one: Cosines = getattr(both[when], readout)
                cells.append(f"{one.changed:6.3f} [{one.others:6.3f}]")
            lines.append(f"{name:<{width}}  {readout}  {cells[0]}    {cells[1]}")
    return "\n".join(lines) + "\n"


def mean_of(several: list[Counterfactual]) -> Counterfactual:
    """The mean of several networks' probes (runs that differ in their seed)."""

    def mean(readout: str) -> Cosines:
        parts: list[Cosines] = [getattr(one, readout) for one in several]
        return Cosines(
            changed=float(np.mean([part.changed for part in parts])),
            others=float(np.mean([part.others for part in parts])),
        )

    return Counterfactual(h=mean("h"), z=mean("z"))
