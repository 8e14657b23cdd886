"""Momentum contrast with a queue: one whole step, in the paper's order and in the released code's, side by side.

Shapes: N images in the step, D dimensions. A step changes three things and says so in its five numbered lines:
the query encoder by gradient, the key encoder by EMA, the queue by first-in, first-out.

The two orders are one algorithm. Let m(t) be the momentum of the EMA that precedes key forward t. Then both give
the same losses, query weights and queue to the last bit; the key encoders differ by one EMA at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mocokit.contrast.encoders import EncoderPair
from mocokit.contrast.key_queue import KeyQueue, Keys, join
from mocokit.contrast.losses import Contrast, info_nce, require_ids, same_source
from mocokit.contrast.method import Scoring
from mocokit.contrast.momentum import ema_update_
from mocokit.contrast.parts import Gather, Step, UpdateQuery, ViewPair, encode_keys, swapped, unit_rows


def moco_step_paper(
    pair: EncoderPair,
    queue: KeyQueue,
    parts: Sequence[ViewPair],
    *,
    scoring: Scoring,
    m: float,
    step: int,
    update_query_: UpdateQuery,
    gather: Gather,
) -> None:
    """He et al. 2020, Algorithm 1: keys, loss, query update, EMA, enqueue. `m` is m(step + 1).

    parts: the step's images in one or more micro-batches. However many, EMA and queue change once.
    """
    # 1. keys, without gradient
    keys = encode_keys(pair, parts)
    everyone = gather(join(keys))
    # 2. loss: own key against the keys of earlier steps
    dictionary = queue.snapshot() if queue.fill else everyone
    losses = score(pair, parts, keys, dictionary, scoring, first=dictionary is everyone)
    # 3. query update: the only gradient there is
    update_query_(losses)
    # 4. EMA: parameters of f_k follow f_q
    ema_update_(pair.theta_k, pair.theta_q, m)
    # 5. enqueue this step's keys; the oldest leave
    queue.enqueue_(everyone, step)


def moco_step_ema_first(
    pair: EncoderPair,
    queue: KeyQueue,
    parts: Sequence[ViewPair],
    *,
    scoring: Scoring,
    m: float,
    step: int,
    update_query_: UpdateQuery,
    gather: Gather,
) -> None:
    """The released code's order: EMA, keys, loss, query update, enqueue. `m` is m(step).

    parts: the step's images in one or more micro-batches. However many, EMA and queue change once.
    """
    # 4. EMA: parameters of f_k follow f_q
    ema_update_(pair.theta_k, pair.theta_q, m)
    # 1. keys, without gradient
    keys = encode_keys(pair, parts)
    everyone = gather(join(keys))
    # 2. loss: own key against the keys of earlier steps
    dictionary = queue.snapshot() if queue.fill else everyone
    losses = score(pair, parts, keys, dictionary, scoring, first=dictionary is everyone)
    # 3. query update: the only gradient there is
    update_query_(losses)
    # 5. enqueue this step's keys; the oldest leave
    queue.enqueue_(everyone, step)


def score(
    pair: EncoderPair,
    parts: Sequence[ViewPair],
    keys: Sequence[Keys],
    dictionary: Keys,
    scoring: Scoring,
    *,
    first: bool,
) -> Iterable[Contrast]:
    """InfoNCE of each micro-batch, computed when asked for: backward can free one graph before the next is built.

    first: the queue is empty and the dictionary is this step's own keys. Then a query's own key is always left out
    of the negatives (it is the positive), so chance is ln N.
    """
    for part, own in zip(parts, keys, strict=True):
        q_ND = unit_rows(pair.query(part.x_q))
        excluded = None
        if first:
            require_ids(part.ids)
        if scoring.mask_source or first:
            excluded = same_source(part.ids, part.groups, dictionary, by_group=scoring.mask_group)
        yield info_nce(q_ND, own.vectors, dictionary, scoring.T, excluded)


def both_ways(one_way: Step) -> Step:
    """The same step with a symmetric loss: each view is query once and key once.

    Both halves are scored against one snapshot of the queue, taken before either is enqueued. Then the keys of both
    views enter it, first those of view b (the usual ones) of all images, then those of view a: 2N keys per step, so
    a key stays K / 2N steps. The loss is the mean over both halves, so that it compares with the one-way loss and its
    chance; where others add the halves, their learning rate acts twice as strong under plain SGD.

    It is the one-way step over twice as many micro-batches: `update_query_` is given 2 len(parts) losses. In the very
    first step both keys of an image are among its candidates: its own key is the positive, the other is left out.
    """

    def step_both_ways(
        pair: EncoderPair, queue: Any, parts: Sequence[ViewPair], *, gather: Gather, **rest: Any
    ) -> None:
        one_way(pair, queue, [*parts, *swapped(parts)], gather=lambda keys: _gather_halves(keys, gather), **rest)

    return step_both_ways


def _gather_halves(keys: Keys, gather: Gather) -> Keys:
    """Every process's first halves, then every process's second halves: the order of one process with all images."""
    N = len(keys) // 2
    halves = (Keys(keys.vectors[rows], keys.ids[rows], keys.groups[rows]) for rows in (slice(N), slice(N, None)))
    return join([gather(half) for half in halves])
