"""InfoNCE against a dictionary, with the keys of a query's own source left out.

Shapes: N queries, K dictionary rows, D dimensions. All loss arithmetic is float32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast.key_queue import NO_ID, Keys


@dataclass(frozen=True, slots=True)
class Excluded:
    """Which dictionary rows are no negatives of which query, kept sparse: most rows concern nobody.

    columns: int64 [C], the dictionary rows that are excluded for at least one query. hits: bool [N, C].
    """

    columns: Tensor
    hits: Tensor

    def per_query(self) -> Tensor:
        """How many rows are excluded for each query: int64 [N]."""
        return self.hits.sum(1)


@torch.no_grad()
def same_source(ids_N: Tensor, groups_N: Tensor, dictionary: Keys, *, by_group: bool = False) -> Excluded:
    """Find dictionary rows that come from a query's own image (or, with `by_group`, its own group).

    An older key of the same image is not a negative: it would push an image away from itself. With K keys and S
    images the share of queries that meet one is about K/S at the start of an epoch, so on small data this matters.
    Unknown ids and groups (NO_ID) match nothing.
    """
    columns = _columns_of(ids_N, dictionary.ids)
    if by_group:
        columns = torch.unique(torch.cat([columns, _columns_of(groups_N, dictionary.groups)]))
    column_ids, column_groups = dictionary.ids[columns], dictionary.groups[columns]
    hits = (ids_N[:, None] == column_ids[None, :]) & (column_ids != NO_ID)[None, :]
    if by_group:
        hits |= (groups_N[:, None] == column_groups[None, :]) & (column_groups != NO_ID)[None, :]
    return Excluded(columns, hits)


def _columns_of(wanted_N: Tensor, stored_K: Tensor) -> Tensor:
    return (torch.isin(stored_K, wanted_N) & (stored_K != NO_ID)).nonzero()[:, 0]


@dataclass(frozen=True, slots=True)
class Contrast:
    """What scoring a batch of queries gave.

    loss: scalar with graph. positive: float32 [N], cosine of each query with its own key. negatives: int64 [N],
    dictionary rows each query was scored against. excluded: int64 [N], rows left out as its own source.
    """

    loss: Tensor
    positive: Tensor
    negatives: Tensor
    excluded: Tensor

    def chance(self) -> float:
        """The loss of a query that can tell nothing apart: the mean of ln(1 + negatives)."""
        return float(torch.log1p(self.negatives.double()).mean())

    def masked_share(self) -> float:
        """The share of queries that had at least one dictionary row left out."""
        return float((self.excluded > 0).double().mean())


def info_nce(q_ND: Tensor, k_ND: Tensor, dictionary: Keys, T: float, excluded: Excluded | None = None) -> Contrast:
    """Equation 1 of He et al. 2020: -log exp(q.k/T) / (exp(q.k/T) + sum_i exp(q.k_i/T)), averaged over queries.

    q_ND: unit queries with gradient. k_ND: their own keys, without gradient. dictionary: the negatives, keys of
    earlier steps. T > 0. Written as softplus(logsumexp_i(q.k_i/T) - q.k/T), the same number without
    concatenating the positive to K columns.
    """
    q_ND, k_ND = _wide(q_ND), _wide(k_ND.detach())
    positive_N = (q_ND * k_ND).sum(1)
    logits_NK = (q_ND / T) @ dictionary.vectors.T
    excluded_N = torch.zeros(len(q_ND), dtype=torch.int64, device=q_ND.device)
    if excluded is not None and len(excluded.columns):
        # The lowest finite number, not -inf: a query all of whose negatives are excluded keeps a zero gradient.
        lowest = torch.finfo(logits_NK.dtype).min
        logits_NK[:, excluded.columns] = logits_NK[:, excluded.columns].masked_fill(excluded.hits, lowest)
        excluded_N = excluded.per_query()
    loss = F.softplus(torch.logsumexp(logits_NK, 1) - positive_N / T).mean()
    return Contrast(loss, positive_N.detach(), len(dictionary) - excluded_N, excluded_N)


def _wide(x: Tensor) -> Tensor:
    """float32 for narrower types; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
