"""What a training step is handed and what the steps have in common.

Shapes: N images in a micro-batch, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mocokit.contrast.batch_norm import Shuffle
from mocokit.contrast.encoders import EncoderPair
from mocokit.contrast.key_queue import Keys
from mocokit.contrast.losses import Contrast
from mocokit.contrast.method import Scoring


@dataclass(frozen=True, slots=True)
class ViewPair:
    """Two views of each of N images, with the images' ids and groups (int64 [N]). x_q, x_k: float32 [N, 3, H, W].

    A method that treats both views alike calls x_q view a and x_k view b. shuffle: the order in which f_k sees its
    batch, or None for the images' own.
    """

    x_q: Tensor
    x_k: Tensor
    ids: Tensor
    groups: Tensor
    shuffle: Shuffle | None = None


UpdateQuery = Callable[[Iterable[Contrast]], None]
"""Takes the micro-batches' losses (made one by one as it asks for them); backward, finite check, one optimiser step."""

Gather = Callable[[Keys], Keys]
"""Makes one batch of keys out of every process's, in rank order; the identity with one process.

Vectors that carry gradient must go on doing so: the gradient of this process's own rows is the sum of what all
processes have for them (SimCLR; the others gather keys without gradient).
"""


class Step(Protocol):
    """One training step: everything that it changes, it changes on `pair`, on `queue` or through `update_query_`.

    queue: the KeyQueue of a method that has one, else None. parts: the step's images in one or more micro-batches.
    m: momentum of the EMA that this step performs. step: the number of this step.
    """

    def __call__(
        self,
        pair: EncoderPair,
        queue: Any,
        parts: Sequence[ViewPair],
        *,
        scoring: Scoring,
        m: float,
        step: int,
        update_query_: UpdateQuery,
        gather: Gather,
    ) -> None: ...


@torch.no_grad()
def encode_keys(pair: EncoderPair, parts: Sequence[ViewPair]) -> list[Keys]:
    """k = normalize(f_k(x_k)) of each micro-batch. No graph is built, so no gradient can reach theta_k or a key."""
    return [Keys(unit_rows(_key(pair, part)), part.ids, part.groups) for part in parts]


def unit_rows(z_ND: Tensor) -> Tensor:
    """Each row divided by its length: the bits of `F.normalize(z_ND, dim=1)`, by fewer calls."""
    norms_N1: Tensor = torch.linalg.vector_norm(z_ND, dim=1, keepdim=True)
    return z_ND / norms_N1.clamp_min(1e-12)


def _key(pair: EncoderPair, part: ViewPair) -> Tensor:
    if part.shuffle is None:
        z: Tensor = pair.key(part.x_k)
        return z
    return part.shuffle.back(pair.key(part.shuffle.there(part.x_k)))


def swapped(parts: Sequence[ViewPair]) -> list[ViewPair]:
    """The same images with the views' roles exchanged."""
    return [replace(part, x_q=part.x_k, x_k=part.x_q) for part in parts]
