"""One whole training step, in the paper's order and in the released code's, to be read side by side.

Shapes: N images in the step, D dimensions. A step changes three things and says so in its five numbered lines:
the query encoder by gradient, the key encoder by EMA, the queue by first-in, first-out.

The two orders are one algorithm. Let m(t) be the momentum of the EMA that precedes key forward t. Then both give
the same losses, query weights and queue to the last bit; the key encoders differ by one EMA at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast.encoders import EncoderPair
from mocokit.contrast.key_queue import KeyQueue, Keys
from mocokit.contrast.losses import Contrast, info_nce, same_source
from mocokit.contrast.momentum import ema_update_, momentum_at


@dataclass(frozen=True, slots=True)
class ViewPair:
    """Two views of each of N images, with the images' ids and groups (int64 [N]). x_q, x_k: float32 [N, 3, H, W]."""

    x_q: Tensor
    x_k: Tensor
    ids: Tensor
    groups: Tensor


@dataclass(frozen=True, slots=True)
class Scoring:
    """How queries are scored.

    T: temperature, > 0. mask_source: leave older keys of the same image out of the negatives. mask_group: leave
    keys of the same group out as well (needs mask_source).
    """

    T: float
    mask_source: bool = True
    mask_group: bool = False

    def __post_init__(self) -> None:
        if not self.T > 0:
            raise ValueError(f"The temperature T must be above 0. Got {self.T}.")
        if self.mask_group and not self.mask_source:
            raise ValueError("mask_group also masks the same image: it needs mask_source.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ContrastConfig:
    """The dictionary and the loss."""

    K: int = 65536
    """Dictionary size in keys (He et al. 2020, section 4: 65,536)."""
    T: float = 0.2
    """Temperature of InfoNCE (MoCo v1: 0.07; v2: 0.2)."""
    m: float = 0.999
    """Momentum of the key encoder's EMA at the start (He et al. 2020, section 4.1: 0.999)."""
    m_end: float | None = None
    """Momentum at the end, approached by a half cosine; the same as `m` when None."""
    order: Literal["paper", "ema-first"] = "paper"
    """`paper` = Algorithm 1; `ema-first` = the released code. The same losses, query weights and queue."""
    mask_source: bool = True
    """Leave older keys of a query's own image out of its negatives. Deviation: the paper scores them."""
    mask_group: bool = False
    """Leave keys of a query's own group (patient, product, video) out as well."""
    queue_init: Literal["empty", "random"] = "empty"
    """`empty` = score real keys only; `random` = start with random unit vectors, as the released code does."""

    def __post_init__(self) -> None:
        if self.K < 1:
            raise ValueError(f"`K` must be at least 1. Got {self.K}.")
        for name, value in (("m", self.m), ("m_end", self.m_end)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"`{name}` must lie in [0, 1]. Got {value}.")
        if self.order not in ("paper", "ema-first"):
            raise ValueError(f"`order` must be paper or ema-first. Got {self.order!r}.")
        if self.queue_init not in ("empty", "random"):
            raise ValueError(f"`queue_init` must be empty or random. Got {self.queue_init!r}.")
        self.scoring()

    def scoring(self) -> Scoring:
        """The part of this configuration that scoring needs; raises ValueError when it contradicts itself."""
        return Scoring(self.T, self.mask_source, self.mask_group)

    def m_at(self, step: int, total_steps: int) -> float:
        """m of the EMA that the step numbered `step` performs, in this order's indexing."""
        index = step + 1 if self.order == "paper" else step
        return momentum_at(index, total_steps, self.m, self.m if self.m_end is None else self.m_end)


UpdateQuery = Callable[[Iterable[Contrast]], None]
"""Takes the micro-batches' losses (made one by one as it asks for them); backward, finite check, one optimiser step."""

Gather = Callable[[Keys], Keys]
"""Makes one batch of keys out of every process's, in rank order; the identity with one process."""


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


@torch.no_grad()
def encode_keys(pair: EncoderPair, parts: Sequence[ViewPair]) -> list[Keys]:
    """k = normalize(f_k(x_k)) of each micro-batch. No graph is built, so no gradient can reach theta_k or a key."""
    return [Keys(F.normalize(pair.key(part.x_k), dim=1), part.ids, part.groups) for part in parts]


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
        q_ND = F.normalize(pair.query(part.x_q), dim=1)
        excluded = None
        if scoring.mask_source or first:
            excluded = same_source(part.ids, part.groups, dictionary, by_group=scoring.mask_group)
        yield info_nce(q_ND, own.vectors, dictionary, scoring.T, excluded)


def join(keys: Sequence[Keys]) -> Keys:
    """One batch of keys out of the micro-batches', in their order."""
    if len(keys) == 1:
        return keys[0]
    return Keys(
        torch.cat([part.vectors for part in keys]),
        torch.cat([part.ids for part in keys]),
        torch.cat([part.groups for part in keys]),
    )


STEPS = {"paper": moco_step_paper, "ema-first": moco_step_ema_first}
"""The step function of each order."""
