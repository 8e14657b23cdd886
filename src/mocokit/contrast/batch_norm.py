"""Batch norm over groups of a batch, and the shuffle of the key batch that makes it worth having.

In a batch that is normalised as one, a query shares its batch statistics with its own key and with no key of the
queue, which were made in other batches. A network can learn to read that signature instead of the image: the loss
falls, the features go bad (He et al. 2020, section 3.3, "Shuffling BN"). The cure on several devices is to shuffle
the key batch over them; on one device, to normalise in groups and shuffle the key batch over the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SplitBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose statistics, in train mode, are those of each of `groups` equal parts of the batch.

    The parts are consecutive images: [0, N/g), [N/g, 2N/g) ... (the first parts are one larger where g does not divide
    N). The running statistics see every part in turn. In eval mode it is nn.BatchNorm2d.
    """

    groups: int = 1

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, C, H, W] with N >= 2 groups in train mode."""
        if not self.training or self.groups == 1:
            return super().forward(x)
        return torch.cat([super(SplitBatchNorm2d, self).forward(part) for part in x.tensor_split(self.groups)])


def split_batch_norm_(module: nn.Module, groups: int) -> int:
    """Make every BatchNorm2d inside `module` normalise in `groups` parts; returns how many there are.

    Names, weights and statistics stay as they are.
    """
    found = 0
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.__class__ = SplitBatchNorm2d
            child.groups = groups  # type: ignore[assignment]
            found += 1
    return found


def shuffled(x: Tensor, order: Tensor) -> Tensor:
    """x in another order: row i of the result is row order[i] of x."""
    return x[order]


def unshuffled(y: Tensor, order: Tensor) -> Tensor:
    """Undo `shuffled`: row order[i] of the result is row i of y."""
    return torch.empty_like(y).index_copy_(0, order, y)


__all__ = ["SplitBatchNorm2d", "shuffled", "split_batch_norm_", "unshuffled"]
_ = F
