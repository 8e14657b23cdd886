"""How well search by picture brings back pictures of the same label.

Every image of a set asks once and all the others answer, ranked by cosine. With N_q others of its own label:

- recall@k: 1 where at least one of the k nearest has the label, else 0;
- average precision: the mean, over the places of those N_q, of the share of right ones up to there (its mean is mAP);
- R-precision: the share of right ones among the first N_q.

Equal similarities are ranked by row. An image whose label nothing else has does not ask. Where images have groups
(frames of one recording), an image's own group is left out of its answers: finding the next frame proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from mocokit.errors import DataError, UsageError
from mocokit.retrieval.encode import Ints

Doubles = npt.NDArray[np.float64]
TILE = 2**22  # similarities in memory at a time


@dataclass(frozen=True, slots=True)
class Ranked:
    """Scores of each image that asked: its place among the images, int64 [Q], and values in 0..1 by name, [Q] each."""

    asked: Ints
    values: dict[str, Doubles]


def rank_all(vectors: Tensor, labels: Ints, groups: Ints | None = None, ks: Sequence[int] = (1, 5, 10)) -> Ranked:
    """Score vectors [M, D] (normalised here) with labels int64 [M] and groups int64 [M] (-1: none).

    Raises UsageError for a k below 1, DataError when no label has two images.
    """
    if not ks or min(ks) < 1:
        raise UsageError(f"k must be at least 1. Got {list(ks)}.")
    own = np.arange(len(labels), dtype=np.int64) if groups is None else _units(groups)
    asked = np.flatnonzero(_mates(labels, own) > 0).astype(np.int64)
    if len(asked) < 2:
        raise DataError("No label has two images apart, so nothing can be found. Use data with several images a label.")
    unit = F.normalize(vectors.float(), dim=1)
    M = len(unit)
    names = [*(f"recall@{k}" for k in ks), "mAP", "R-precision"]
    values = {name: np.zeros(len(asked)) for name in names}
    numbers, units = torch.from_numpy(labels), torch.from_numpy(own)
    tile = max(1, TILE // M)
    for start in range(0, len(asked), tile):
        rows = torch.from_numpy(asked[start : start + tile])
        cosines = unit[rows] @ unit.T
        same = units[rows][:, None] == units
        cosines.masked_fill_(same, -torch.inf)  # the asking image and its group come last, and are never right
        order = torch.sort(cosines, dim=1, descending=True, stable=True).indices[:, : M - 1]
        right = ((numbers[order] == numbers[rows][:, None]) & ~same.gather(1, order)).double()
        mates = right.sum(1)
        places = torch.arange(1, M, dtype=torch.float64)
        cumulated = right.cumsum(1)
        part = slice(start, start + tile)
        for k in ks:
            values[f"recall@{k}"][part] = (cumulated[:, min(k, M - 1) - 1] > 0).double().numpy()
        values["mAP"][part] = ((cumulated / places * right).sum(1) / mates).numpy()
        values["R-precision"][part] = (cumulated.gather(1, mates.long()[:, None] - 1).squeeze(1) / mates).numpy()
    return Ranked(asked, values)


def _units(groups: Ints) -> Ints:
    """The groups as numbers 0..; an image without one is a group of its own."""
    own = groups.copy()
    alone = groups < 0
    own[alone] = -1 - np.arange(int(alone.sum()))
    return np.unique(own, return_inverse=True)[1].astype(np.int64)


def _mates(labels: Ints, units: Ints) -> Ints:
    """How many images outside its own unit share each image's label."""
    _, pair, together = np.unique(np.stack([labels, units]), axis=1, return_inverse=True, return_counts=True)
    return (np.bincount(labels)[labels] - together[pair.reshape(-1)]).astype(np.int64)
