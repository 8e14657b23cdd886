"""The relatives without a queue, one whole step each: MoCo v3, SimCLR and BYOL.

The five numbered lines are those of the queue's steps, so that what a method leaves out shows. View a is `x_q`, view
b is `x_k`; both are treated alike.

Shapes: N images in the step, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mocokit.contrast.batch_norm import statistics_untouched
from mocokit.contrast.encoders import EncoderPair
from mocokit.contrast.key_queue import Keys, join
from mocokit.contrast.losses import Contrast, byol_loss, moco_v3_loss, nt_xent
from mocokit.contrast.method import Scoring
from mocokit.contrast.momentum import ema_update_
from mocokit.contrast.parts import Gather, UpdateQuery, ViewPair, encode_keys, swapped, unit_rows


def moco_v3_step(
    pair: EncoderPair,
    queue: None,
    parts: Sequence[ViewPair],
    *,
    scoring: Scoring,
    m: float,
    step: int,
    update_query_: UpdateQuery,
    gather: Gather,
) -> None:
    """Chen et al. 2021, Algorithm 1. `m` is m(step + 1).

    Exact under micro-batches: the keys take no gradient, so those of the whole step are there before the first query.
    """
    # 1. keys of both views, without gradient
    keys_b, keys_a = encode_keys(pair, parts), encode_keys(pair, swapped(parts))
    everyone = gather(join(keys_a)), gather(join(keys_b))
    # 2. loss: each view's predictions against the other view's keys of this step
    losses = score_against_batch(pair, parts, keys_a, keys_b, everyone, scoring)
    # 3. query update: the only gradient there is, the predictor's included
    update_query_(losses)
    # 4. EMA: parameters of f_k follow f_q; the predictor has no counterpart
    ema_update_(pair.theta_k, pair.theta_q, m)
    # 5. no queue: this step's keys are forgotten


def byol_step(
    pair: EncoderPair,
    queue: None,
    parts: Sequence[ViewPair],
    *,
    scoring: Scoring,
    m: float,
    step: int,
    update_query_: UpdateQuery,
    gather: Gather,
) -> None:
    """Grill et al. 2020, section 3.1. `m` is their tau, m(step + 1). Nothing is gathered: images never meet."""
    # 1. keys (targets) of both views, without gradient
    keys_b, keys_a = encode_keys(pair, parts), encode_keys(pair, swapped(parts))
    # 2. loss: each view's predictions regress to the other view's target
    losses = regress(pair, parts, keys_a, keys_b)
    # 3. query update: the only gradient there is, the predictor's included
    update_query_(losses)
    # 4. EMA: parameters of f_k follow f_q; the predictor has no counterpart
    ema_update_(pair.theta_k, pair.theta_q, m)
    # 5. no queue: there are no negatives


def simclr_step(
    pair: EncoderPair,
    queue: None,
    parts: Sequence[ViewPair],
    *,
    scoring: Scoring,
    m: float,
    step: int,
    update_query_: UpdateQuery,
    gather: Gather,
) -> None:
    """Chen et al. 2020 (SimCLR), Algorithm 1. `m` is not used.

    Exact under micro-batches, at the price of a second forward pass (`in_two_passes`).
    """
    # 1. keys: each view is the other's, from the one encoder there is
    # 2. loss: every view against every other view of this step, gradient on both sides
    if len(parts) == 1:
        losses: Iterable[Contrast] = [each_against_all([embed(pair, parts[0])], parts, scoring, gather)]
    else:
        losses = in_two_passes(pair, parts, scoring, gather)
    # 3. query update: the gradient reaches it through queries and keys
    update_query_(losses)
    # 4. no EMA: f_k is f_q
    # 5. no queue: the batch is the dictionary


def score_against_batch(
    pair: EncoderPair,
    parts: Sequence[ViewPair],
    keys_a: Sequence[Keys],
    keys_b: Sequence[Keys],
    everyone: tuple[Keys, Keys],
    scoring: Scoring,
) -> Iterable[Contrast]:
    """MoCo v3's loss of each micro-batch, computed when asked for. everyone: the step's keys of views a and b."""
    for part, own_a, own_b in zip(parts, keys_a, keys_b, strict=True):
        q_a, q_b = predictions(pair, part)
        yield moco_v3_loss(q_a, q_b, (own_a, own_b), everyone, scoring.T, by_group=scoring.mask_group)


def regress(
    pair: EncoderPair, parts: Sequence[ViewPair], keys_a: Sequence[Keys], keys_b: Sequence[Keys]
) -> Iterable[Contrast]:
    """BYOL's loss of each micro-batch, computed when asked for."""
    for part, own_a, own_b in zip(parts, keys_a, keys_b, strict=True):
        p_a, p_b = predictions(pair, part)
        yield byol_loss(p_a, p_b, own_a.vectors, own_b.vectors)


def predictions(pair: EncoderPair, part: ViewPair) -> tuple[Tensor, Tensor]:
    """normalize(predictor(f_q(x))) of view a and of view b [N, D]; each view is a batch of its own for batch norm."""
    return unit_rows(pair.predict(part.x_q)), unit_rows(pair.predict(part.x_k))


def embed(pair: EncoderPair, part: ViewPair) -> Tensor:
    """normalize(f_q(x)) of both views in one batch: [2N, D], view a first."""
    return unit_rows(pair.query(torch.cat([part.x_q, part.x_k])))


def each_against_all(
    embeddings: Sequence[Tensor], parts: Sequence[ViewPair], scoring: Scoring, gather: Gather
) -> Contrast:
    """NT-Xent of a whole step. embeddings: [2N, D] of each micro-batch, as `embed` gives them."""
    a, b = (
        join([Keys(z.chunk(2)[view], part.ids, part.groups) for z, part in zip(embeddings, parts, strict=True)])
        for view in (0, 1)
    )
    return nt_xent(a, b, scoring.T, everyone=gather(join([a, b])), by_group=scoring.mask_group)


def in_two_passes(pair: EncoderPair, parts: Sequence[ViewPair], scoring: Scoring, gather: Gather) -> Iterable[Contrast]:
    """NT-Xent of the whole step with one micro-batch's graph at a time (Gao et al. 2021, "gradient cache").

    First pass: all embeddings without a graph, the loss between all of them, and its gradient at each embedding.
    Second pass: each micro-batch again, with a graph, through which that gradient is sent on. Every yielded loss has
    the whole step's value; the mean of their gradients is the whole step's. Batch norm, as always under micro-batches,
    normalises each by itself; running statistics count the second pass only.
    """
    with torch.no_grad(), statistics_untouched(pair.query):
        embeddings = [embed(pair, part) for part in parts]
    for z in embeddings:
        z.requires_grad_()
    whole = each_against_all(embeddings, parts, scoring, gather)
    gradients = torch.autograd.grad(whole.loss, embeddings)
    for part, gradient in zip(parts, gradients, strict=True):
        sent_on = len(parts) * (embed(pair, part) * gradient).sum()
        yield replace(whole, loss=whole.loss.detach() + sent_on - sent_on.detach())
