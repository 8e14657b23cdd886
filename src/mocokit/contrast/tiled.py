"""logsumexp of similarities to a long dictionary, without ever holding all of them.

The plain way writes N x K logits, reads them for the sum, writes N x K probabilities for the gradient and multiplies
once more. Here each tile of the dictionary is multiplied, exponentiated and multiplied again while it lies in the
cache: both products of the loss, nothing kept but a sum and a weighted mean key for each query. Memory is
O(N D + K D) in place of O(N K).

Shapes: N queries, K dictionary rows, D dimensions, P pairs of a query and a row that does not count for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TILE = 1024
"""Dictionary rows a tile. With 256 queries its similarities are 1 MiB of float32."""
WORTH_IT = 2**19
"""From so many similarities on the tiles are used: below, a few large operations cost less than many small ones."""
FIXED_UNTIL = 80.0
"""exp(-80) is still a normal float32: up to this range of logits, 2 / T, one maximum known in advance will do."""


def tiled_logsumexp(
    q_ND: Tensor, dictionary_KD: Tensor, T: float, excluded: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """log sum_i exp(q.k_i / T) of each query over the rows that are not excluded for it: [N], in q's dtype.

    q_ND: unit rows, with gradient. dictionary_KD: unit rows, without. excluded: rows int64 [P] and columns int64 [P],
    the latter ascending: dictionary row columns[p] does not count for query rows[p]. A query all of whose rows are
    excluded gets -inf and no gradient. The same number as torch.logsumexp of the logits but for the order of sums.
    Differentiable once.
    """
    rows, columns = excluded if excluded is not None and len(excluded[0]) else (None, None)
    found: Tensor = _TiledLogSumExp.apply(q_ND, dictionary_KD, T, rows, columns)
    return found


class _TiledLogSumExp(torch.autograd.Function):
    """The gradient at q is softmax-weighted: sum_i p_i k_i / T. It is ready when the forward pass ends."""

    @staticmethod
    def forward(
        ctx: Any, q_ND: Tensor, dictionary_KD: Tensor, T: float, rows: Tensor | None, columns: Tensor | None
    ) -> Tensor:
        scaled_ND = q_ND / T
        fixed = 2.0 / T <= FIXED_UNTIL
        top_N1 = scaled_ND.new_full((len(q_ND), 1), 1.0 / T if fixed else -torch.inf)
        sum_N1 = scaled_ND.new_zeros(len(q_ND), 1)
        mean_ND = torch.zeros_like(scaled_ND)
        starts = range(0, len(dictionary_KD), TILE)
        bounds = _bounds(columns, starts, len(dictionary_KD))
        for number, start in enumerate(starts):
            tile_KD = dictionary_KD[start : start + TILE]
            logits_NK = scaled_ND @ tile_KD.T
            some = slice(bounds[number], bounds[number + 1])
            if rows is not None and columns is not None and some.start < some.stop:
                logits_NK[rows[some], columns[some] - start] = -torch.inf
            if not fixed:  # the running maximum of an online softmax: what is there so far is scaled to the new one
                new_N1 = torch.maximum(top_N1, logits_NK.amax(1, keepdim=True))
                shrink = torch.exp(top_N1 - new_N1).nan_to_num(0.0)  # -inf - -inf: nothing was there yet
                sum_N1 *= shrink
                mean_ND *= shrink
                top_N1 = new_N1
            weights_NK = logits_NK.sub_(top_N1.nan_to_num(neginf=0.0)).exp_()
            sum_N1 += weights_NK.sum(1, keepdim=True)
            mean_ND.addmm_(weights_NK, tile_KD)
        mean_ND /= torch.where(sum_N1 > 0, sum_N1, 1.0) * T
        ctx.save_for_backward(mean_ND)
        return (sum_N1.log() + top_N1)[:, 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor | None, ...]:
        (mean_ND,) = ctx.saved_tensors
        return gradient_N[:, None] * mean_ND, None, None, None, None


def _bounds(columns: Tensor | None, starts: Sequence[int], rows: int) -> list[int]:
    """Where in `columns` each tile begins, and where the last one ends."""
    if columns is None:
        return [0] * (len(starts) + 1)
    edges = torch.tensor([*starts, rows], device=columns.device)
    return [int(edge) for edge in torch.searchsorted(columns, edges).tolist()]
