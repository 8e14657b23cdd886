"""Whether an exported encoder computes what the run's own does, measured on images before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from mocokit.errors import MocokitError
from mocokit.exporting.loading import FrozenEncoder

LIMIT = 1e-5
IMAGES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Largest differences on `images` images of `source`."""

    images: int
    """Or clips."""
    source: str
    difference: float
    """Of the outputs for the same input tensors, relative to the largest value (or to 1 where all are smaller)."""
    transform_cosine: float
    """Smallest cosine between h through the folder's own preprocessing of the picture and through mocokit's."""
    what: str = "images"
    """Images, or clips."""

    def line(self) -> str:
        """In words."""
        return (
            f"Parity on {self.images} {self.what} of {self.source}: largest difference {self.difference:.1e} for the "
            f"same input (limit {LIMIT:.0e}); through the folder's own preprocessing, smallest cosine "
            f"{self.transform_cosine:.5f}."
        )


def measure(
    ours: Callable[[Tensor], Sequence[Tensor]],
    theirs: Callable[[Tensor], Sequence[Tensor]],
    frozen: FrozenEncoder,
    transform: Callable[[Any], Tensor],
    pictures: Sequence[npt.NDArray[np.uint8]],
    source: str,
) -> Parity:
    """Compare the outputs (h, or h and z) of two encoders at batch sizes 1, 5 and all.

    pictures: uint8 RGB [H, W, 3] each, or [T, H, W, 3] of an encoder of clips. transform: the preprocessing that the
    exported folder describes. Raises MocokitError when the difference is above 1e-5.
    """
    x = torch.stack([frozen.transform_clip(list(one)) if frozen.clip else frozen.transform(one) for one in pictures])
    worst = 0.0
    with torch.inference_mode():
        expected = [out.float() for out in ours(x)]
        for count in (1, 5, len(x)):
            for mine, other in zip(expected, theirs(x[:count]), strict=True):
                scale = max(1.0, float(mine.abs().max()))
                worst = max(worst, float((mine[:count] - other).abs().max()) / scale)
        through = torch.stack(
            [
                transform([Image.fromarray(frame) for frame in one] if frozen.clip else Image.fromarray(one))
                for one in pictures
            ]
        )
        cosine = float(F.cosine_similarity(theirs(through)[0], expected[0], dim=1).min())
    if not worst <= LIMIT:
        raise MocokitError(
            f"The exported encoder differs from the run's by {worst:.1e} on {source}, more than {LIMIT:.0e}; nothing "
            "was written. Use --format safetensors."
        )
    what = "clips" if frozen.clip else "images"
    return Parity(images=len(pictures), source=source, difference=worst, transform_cosine=cosine, what=what)
