"""Weighted k-nearest-neighbour classification by cosine similarity (Wu et al. 2018, section 3.4).

A query's k nearest bank rows vote for their classes, each with weight exp(similarity / knn_temperature). All
similarities of a tile of queries come from one matrix product, and a tile is only as large as `memory` allows.

Ties are decided, never left to the sort: of bank rows with equal (computed) similarity the one with the lower row
number is nearer, and of classes with equal votes the one with the lower number wins.

Shapes: M bank rows, Q queries, D dimensions, k neighbours.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from mocokit.errors import DivergedError, UsageError

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.floating]
Weights = Literal["similarity", "uniform"]

KNN_TEMPERATURE = 0.07  # Wu et al. 2018
TILE_BYTES = 64 * 2**20


def knn_predict(
    bank: Tensor,
    bank_labels: Ints,
    queries: Tensor,
    *,
    k: int,
    n_classes: int,
    knn_temperature: float = KNN_TEMPERATURE,
    weights: Weights = "similarity",
    memory: int = TILE_BYTES,
) -> Ints:
    """The predicted class of every query, int64 [Q].

    bank [M, D] and queries [Q, D] are floating point, on one device, normalised here; float64 is computed in float64.
    bank_labels: int64 [M] in 0..n_classes-1. weights: "similarity" (above) or "uniform" (one neighbour, one vote).
    Raises UsageError when k is not within 1..M, for a temperature not above 0 or labels out of range, and
    DivergedError for features that are not finite.
    """
    similarities, rows = nearest(bank, queries, k, memory=memory)
    if len(bank_labels) != len(bank) or bank_labels.min() < 0 or bank_labels.max() >= n_classes:
        raise UsageError(
            f"The bank has {len(bank)} vectors and {len(bank_labels)} labels, which must be as many and lie in "
            f"0..{n_classes - 1}. Leave unlabelled samples out of the bank."
        )
    return vote(similarities, bank_labels[rows], n_classes=n_classes, knn_temperature=knn_temperature, weights=weights)


def nearest(bank: Tensor, queries: Tensor, k: int, *, memory: int = TILE_BYTES) -> tuple[Reals, Ints]:
    """Similarities [Q, k] and bank rows int64 [Q, k] of each query's k nearest bank rows, nearest first.

    Cosine similarity, in -1..1 up to rounding; a zero vector has similarity 0 to everything. `memory` bounds the
    bytes of one tile of similarities (one query's M similarities at the least).
    """
    M = len(bank)
    if not 1 <= k <= M:
        raise UsageError(
            f"k is {k}, but the bank holds {M} labelled vectors. Choose k from 1 to {M}, or let it be chosen from the "
            "labels."
        )
    bank_MD, queries_QD = (_unit_rows(x, name) for x, name in ((bank, "bank"), (queries, "query")))
    tile = max(1, memory // (M * bank_MD.element_size()))
    starts = range(0, max(1, len(queries)), tile)
    parts = [_nearest_in_tile(queries_QD[start : start + tile] @ bank_MD.T, k) for start in starts]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def vote(
    similarities: Reals,
    labels: Ints,
    *,
    n_classes: int,
    knn_temperature: float = KNN_TEMPERATURE,
    weights: Weights = "similarity",
) -> Ints:
    """The class with most votes, int64 [Q], from the neighbours' similarities and labels, both [Q, k]."""
    if not knn_temperature > 0:
        raise UsageError(f"knn_temperature is {knn_temperature}, but must be above 0; Wu et al. use 0.07.")
    Q, k = labels.shape
    ballots = np.ones((Q, k))
    if weights == "similarity":
        # Relative to the nearest neighbour: the same ratios, and exp never overflows at a small temperature.
        exact = similarities.astype(np.float64)
        ballots = np.exp((exact - exact.max(axis=1, keepdims=True)) / knn_temperature)
    boxes = np.arange(Q)[:, None] * n_classes + labels
    votes = np.bincount(boxes.ravel(), ballots.ravel(), Q * n_classes).reshape(Q, n_classes)
    winners: Ints = votes.argmax(axis=1).astype(np.int64)
    return winners


def _unit_rows(x: Tensor, name: str) -> Tensor:
    unit = F.normalize(x if x.dtype == torch.float64 else x.float(), dim=1)
    if not bool(torch.isfinite(unit).all()):
        raise DivergedError(f"Some {name} features are not finite: the encoder diverged. Evaluate an earlier step.")
    return unit


def _nearest_in_tile(similarities: Tensor, k: int) -> tuple[Reals, Ints]:
    M = similarities.shape[1]
    top = similarities.topk(min(k + 1, M), dim=1)
    values, rows = top.values[:, :k].cpu().numpy(), top.indices[:, :k].cpu().numpy()
    if k < M:
        # The k-th and the next are equal: topk may have kept any of the equals. Take the lowest rows instead.
        tied = (top.values[:, k - 1] == top.values[:, k]).nonzero().squeeze(1)
        if len(tied):
            chosen = _lowest_rows(similarities[tied], top.values[tied, k - 1], k)
            rows[tied.cpu().numpy()] = chosen.cpu().numpy()
            values[tied.cpu().numpy()] = similarities[tied].gather(1, chosen).cpu().numpy()
    order = np.lexsort((rows, -values))
    return np.take_along_axis(values, order, 1), np.take_along_axis(rows, order, 1)


def _lowest_rows(similarities: Tensor, threshold: Tensor, k: int) -> Tensor:
    """[q, k] rows: all above each query's threshold, then the lowest rows that equal it."""
    equals, others = similarities == threshold[:, None], similarities > threshold[:, None]
    column = torch.arange(similarities.shape[1], dtype=torch.int32, device=similarities.device)
    last = column.new_tensor(similarities.shape[1])
    place = torch.where(equals, column, last).masked_fill_(others, -1)  # fewer than k are above: all of them are in
    return place.topk(k, dim=1, largest=False).indices
