"""Batch norm over groups of a batch, and the shuffle of the key batch that makes it worth having.

In a batch that is normalised as one, a query shares its batch statistics with its own key and with no key of the
queue, which were made in other batches. A network can learn to read that signature instead of the image: the loss
falls, the features go bad (He et al. 2020, section 3.3, "Shuffling BN"). The cure on several devices is to shuffle
the key batch over them; on one device, to normalise in groups and shuffle the key batch over the groups. With one
group a shuffle changes nothing.

Groups are made by running the network once per group, which is right for every kind of batch norm in any backbone.
It costs little on a CPU: on one core, 128 images of 32 px in 8 groups of 16 took 0.8 times as long as in one, forward
and backward, with a small CNN and with ResNet-18 (smaller batches sit better in the cache), and 1.3 times as long in 8
groups of 4. A GPU is used worse by small groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def in_groups(forward: Callable[[Tensor], Tensor], x: Tensor, groups: int) -> Tensor:
    """`forward` of each of `groups` consecutive parts of x [N, ...], joined again.

    Of unequal parts the first ones are one longer. In train mode each part is normalised by its own statistics, and
    running statistics see every part in turn. Raises ValueError unless every part has at least 2 rows.
    """
    if groups == 1:
        return forward(x)
    if len(x) < 2 * groups:
        raise ValueError(f"{groups} batch-norm groups need at least {2 * groups} images at once. Got {len(x)}.")
    return torch.cat([forward(part) for part in x.tensor_split(groups)])


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How the key batch reaches f_k in another order, and how the keys come back.

    there: images [N, ...] -> images, those that f_k sees here. back: keys [N, D] -> keys, in the images' first order.
    """

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


def shuffle_by(order: Tensor) -> Shuffle:
    """The shuffle on one device: f_k sees image order[i] as its i-th. order: int64 [N], a permutation."""
    return Shuffle(
        there=lambda x: x[order],
        back=lambda k: torch.empty_like(k).index_copy_(0, order, k),
    )


def deal(N: int, groups: int) -> Tensor:
    """The order in which a batch is dealt out over `groups`, like cards: int64 [N].

    The query's groups are runs of consecutive images; a key's group takes every groups-th. So no group of keys is
    made of the images of any group of queries, for any N >= 2 groups and groups >= 2: no query shares its statistics
    with its key. Needs no random numbers: which images meet in a batch is random already.
    """
    return torch.cat([torch.arange(first, N, groups) for first in range(groups)])


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Every batch norm inside `module`, of one, two or three dimensions."""
    return [child for child in module.modules() if isinstance(child, _BatchNorm)]


@contextmanager
def statistics_untouched(module: nn.Module) -> Iterator[None]:
    """Forward passes in here normalise as ever and leave the running statistics alone."""
    tracking = [norm for norm in batch_norms(module) if norm.track_running_stats]
    for norm in tracking:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in tracking:
            norm.track_running_stats = True
