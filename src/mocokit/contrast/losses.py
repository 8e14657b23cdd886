"""The losses of the family: InfoNCE against a dictionary, NT-Xent, MoCo v3's symmetric contrast, BYOL's regression.

Three of them are one thing: a query, its own key, and a dictionary from which the rows of its own source are left
out. They differ in what the dictionary holds (keys of earlier steps; this step's keys; this step's embeddings with
gradient). Rows are known by the ids of their images, so a loss need not know how batches were split over processes.

Shapes: N queries or images, K dictionary rows, D dimensions. Vectors are unit rows. All loss arithmetic is float32 or
wider.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast.key_queue import NO_ID, Keys, join
from mocokit.contrast.tiled import WORTH_IT, tiled_logsumexp

FEW = 1024
"""Up to so many dictionary rows, Python finds a query's own faster than a dozen tensor operations do."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """Which dictionary rows are no negatives of which query, kept as pairs: most rows concern nobody.

    Pair p says that row columns[p] of the dictionary is excluded for query rows[p]; both are int64 [P], columns
    ascending. N: how many queries there are.
    """

    rows: Tensor
    columns: Tensor
    N: int

    def per_query(self) -> Tensor:
        """How many rows are excluded for each query: int64 [N]."""
        return torch.bincount(self.rows, minlength=self.N)


def same_source(ids_N: Tensor, groups_N: Tensor, dictionary: Keys, *, by_group: bool = False) -> Excluded:
    """Find dictionary rows that come from a query's own image (or, with `by_group`, its own group).

    An older key of the same image is not a negative: it would push an image away from itself. With K keys and S
    images the share of queries that meet one is about K/S at the start of an epoch, so on small data this matters.
    Unknown ids and groups (NO_ID) match nothing.
    """
    columns = _columns_of(ids_N, dictionary.ids)
    if by_group:
        columns = torch.unique(torch.cat([columns, _columns_of(groups_N, dictionary.groups)]))
    if not len(columns):  # the usual case where the queue is short beside the data
        return Excluded(columns, columns, len(ids_N))
    column_ids, column_groups = dictionary.ids[columns], dictionary.groups[columns]
    hits_CN = (ids_N[None, :] == column_ids[:, None]) & (column_ids != NO_ID)[:, None]
    if by_group:
        hits_CN |= (groups_N[None, :] == column_groups[:, None]) & (column_groups != NO_ID)[:, None]
    places, rows = hits_CN.nonzero(as_tuple=True)
    return Excluded(rows, columns[places], len(ids_N))


def require_ids(ids_N: Tensor) -> None:
    """Raise ValueError for images without an id: among its own step's keys a query's own could not be found."""
    if bool((ids_N == NO_ID).any()):
        raise ValueError("A contrast within a step tells images apart by their ids, and some have none (NO_ID).")


def _columns_of(wanted_N: Tensor, stored_K: Tensor) -> Tensor:
    # Each stored number is looked up among the few wanted ones: torch.isin would sort all of them together.
    if len(stored_K) <= FEW:
        wanted = set(wanted_N.tolist()) - {NO_ID}
        found = [column for column, number in enumerate(stored_K.tolist()) if number in wanted]
        return torch.tensor(found, dtype=torch.int64, device=stored_K.device)
    ascending_N = wanted_N.sort().values
    places_K = torch.searchsorted(ascending_N, stored_K).clamp_(max=len(ascending_N) - 1)
    columns = (ascending_N[places_K] == stored_K).nonzero()[:, 0]
    return columns[stored_K[columns] != NO_ID] if len(columns) else columns


@dataclass(frozen=True, slots=True)
class Contrast:
    """What scoring a batch of queries gave, for any method.

    loss: scalar with graph. positive: float32 [N], cosine of each query with its positive (BYOL: with its target).
    negatives: int64 [N], rows each query was scored against. excluded: int64 [N], rows left out as its own source;
    in a contrast within the batch, without the query itself and its positive. scale: the loss is so many times the
    mean of -log softmax over the queries; None for a loss that is no softmax at all.
    """

    loss: Tensor
    positive: Tensor
    negatives: Tensor
    excluded: Tensor
    scale: float | None = 1.0

    def chance(self) -> float | None:
        """The loss where every query can tell nothing apart: scale times the mean of ln(1 + negatives).

        None where there is nothing to tell apart (BYOL).
        """
        if self.scale is None:
            return None
        counts = self.negatives.tolist()
        if counts.count(counts[0]) == len(counts):
            return self.scale * _mean_log1p_of_equal(counts[0], len(counts), self.negatives.device)
        return self.scale * _mean_log1p(self.negatives)

    def masked_share(self) -> float:
        """The share of queries that had at least one row left out."""
        counts = self.excluded.tolist()
        return (len(counts) - counts.count(0)) / len(counts)


def _mean_log1p(counts_N: Tensor) -> float:
    return float(torch.log1p(counts_N.double()).mean())


@functools.lru_cache(maxsize=64)
def _mean_log1p_of_equal(count: int, N: int, device: torch.device) -> float:
    """The same number to the last bit, without asking the device anew: with a full queue it is that of every step."""
    return _mean_log1p(torch.full((N,), count, device=device))


def info_nce(q_ND: Tensor, k_ND: Tensor, dictionary: Keys, T: float, excluded: Excluded | None = None) -> Contrast:
    """Equation 1 of He et al. 2020: -log exp(q.k/T) / (exp(q.k/T) + sum_i exp(q.k_i/T)), averaged over queries.

    q_ND: unit queries with gradient. k_ND: their own keys, without gradient. dictionary: the negatives, keys of
    earlier steps. T > 0.
    """
    rows_N, positive_N = _info_nce_rows(q_ND, k_ND.detach(), dictionary.vectors, T, excluded)
    excluded_N = _left_out(q_ND, excluded)
    return Contrast(rows_N.mean(), positive_N.detach(), len(dictionary) - excluded_N, excluded_N)


def _info_nce_rows(
    q_ND: Tensor, k_ND: Tensor, dictionary_KD: Tensor, T: float, excluded: Excluded | None
) -> tuple[Tensor, Tensor]:
    """The loss and the positive cosine of each query, both with whatever gradient the arguments carry.

    Written as softplus(logsumexp_i(q.k_i/T) - q.k/T), the same number without concatenating the positive to K columns.
    A long dictionary without gradient is gone through in tiles (`tiled`).
    """
    q_ND, k_ND = _wide(q_ND), _wide(k_ND)
    positive_N = (q_ND * k_ND).sum(1)
    if len(q_ND) * len(dictionary_KD) >= WORTH_IT and not dictionary_KD.requires_grad:
        pairs = (excluded.rows, excluded.columns) if excluded is not None else None
        others_N = tiled_logsumexp(q_ND, _wide(dictionary_KD), T, pairs)
        return F.softplus(others_N - positive_N / T), positive_N
    logits_NK = (q_ND / T) @ _wide(dictionary_KD).T
    if excluded is not None and len(excluded.columns):
        # The lowest finite number, not -inf: a query all of whose negatives are excluded keeps a zero gradient. It is
        # put there behind autograd's back: the gradient of what is left out is its softmax, exactly 0, as it should be.
        logits_NK.detach()[excluded.rows, excluded.columns] = torch.finfo(logits_NK.dtype).min
    return F.softplus(torch.logsumexp(logits_NK, 1) - positive_N / T), positive_N


def _left_out(q_ND: Tensor, excluded: Excluded | None) -> Tensor:
    if excluded is not None and len(excluded.columns):
        return excluded.per_query()
    return torch.zeros(len(q_ND), dtype=torch.int64, device=q_ND.device)


def moco_v3_loss(
    q_a: Tensor, q_b: Tensor, own: tuple[Keys, Keys], everyone: tuple[Keys, Keys], T: float, *, by_group: bool = False
) -> Contrast:
    """Algorithm 1 of Chen et al. 2021: 2T (InfoNCE(q_a, keys of b) + InfoNCE(q_b, keys of a)).

    q_a, q_b: unit queries [N, D] of both views, with gradient. own: the keys of the same images, of view a and of
    view b. everyone: the keys of the whole step in which a query's own are among the candidates, a and b. by_group:
    leave other keys of a query's own group out. A query's negatives are the other images' keys of the other view.
    The factor 2T keeps the gradient's size independent of T. Chance is 4T ln N for N images in the step.
    """
    halves = [
        _within_batch(q_a, _still(own[1]), _still(everyone[1]), T, among=1, by_group=by_group),
        _within_batch(q_b, _still(own[0]), _still(everyone[0]), T, among=1, by_group=by_group),
    ]
    return Contrast(
        2 * T * (halves[0].loss + halves[1].loss),
        torch.cat([half.positive for half in halves]),
        torch.cat([half.negatives for half in halves]),
        torch.cat([half.excluded for half in halves]),
        scale=4 * T,
    )


def nt_xent(a: Keys, b: Keys, T: float, *, everyone: Keys | None = None, by_group: bool = False) -> Contrast:
    """Equation 1 of Chen et al. 2020 (SimCLR), averaged over the 2N views: every other view is a candidate.

    a, b: unit embeddings of both views of N images, with gradient. everyone: both views of the images of all
    processes, with gradient to a's and b's own rows; None with one process. Of 2N views the positive of view i is
    (i + N) mod 2N, the diagonal is masked, 2N - 2 are negatives; chance is ln(2N - 1). by_group: leave other views
    of a query's own group out. Here both sides of the product take gradient, positives and negatives alike.
    """
    both = join([a, b])
    return _within_batch(
        both.vectors,
        join([b, a]),
        both if everyone is None else everyone,
        T,
        among=2,
        by_group=by_group,
    )


def byol_loss(p_a: Tensor, p_b: Tensor, target_a: Tensor, target_b: Tensor) -> Contrast:
    """Equation 2 of Grill et al. 2020, symmetrised: |p_a - target_b|^2 + |p_b - target_a|^2, averaged over images.

    p_a, p_b: unit predictions [N, D] of both views, with gradient. target_a, target_b: unit projections of f_k,
    without gradient. For unit rows each term is 2 - 2 cos, so the loss lies in [0, 8]. Nothing is told apart: no
    negatives, no chance line. A loss near 0 from the start can be a collapse and says nothing good by itself.
    """
    p_ND, target_ND = _wide(torch.cat([p_a, p_b])), _wide(torch.cat([target_b, target_a]).detach())
    cosine_N = (p_ND * target_ND).sum(1)
    none_N = torch.zeros(len(p_ND), dtype=torch.int64, device=p_ND.device)
    return Contrast(2 * (2 - 2 * cosine_N).mean(), cosine_N.detach(), none_N, none_N, scale=None)


def _within_batch(q_ND: Tensor, own: Keys, everyone: Keys, T: float, *, among: int, by_group: bool) -> Contrast:
    """InfoNCE of queries against the candidates of their own step, own included.

    among: how many rows of `everyone` are a query itself or its positive: these are no negatives and are not counted
    as left out.
    """
    require_ids(own.ids)
    excluded = same_source(own.ids, own.groups, everyone, by_group=by_group)
    rows_N, positive_N = _info_nce_rows(q_ND, own.vectors, everyone.vectors, T, excluded)
    left_out_N = excluded.per_query()
    return Contrast(rows_N.mean(), positive_N.detach(), len(everyone) - left_out_N, left_out_N - among)


def _still(keys: Keys) -> Keys:
    return Keys(keys.vectors.detach(), keys.ids, keys.groups)


def _wide(x: Tensor) -> Tensor:
    """float32 for narrower types; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
