"""Which method a run trains by, and its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from mocokit.contrast.encoders import EncoderConfig
from mocokit.contrast.momentum import momentum_at

Method = Literal["moco", "moco-v3", "simclr", "byol"]

_QUEUE = ("K", "order", "mask_source", "queue_init", "symmetric", "bn_groups", "shuffle_bn")
_EFFECTIVE: dict[str, tuple[str, ...]] = {
    "moco": (*_QUEUE, "T", "m", "m_end", "mask_group"),
    "moco-v3": ("T", "m", "m_end", "mask_group"),
    "simclr": ("T", "mask_group"),
    "byol": ("m", "m_end"),
}


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
    """The method, its dictionary and its loss. What has no effect on the method must stay at its default."""

    method: Method = "moco"
    """`moco` (v1 and v2: a queue), `moco-v3` and `simclr` (negatives within the batch), `byol` (no negatives)."""
    K: int = 65536
    """Dictionary size in keys (He et al. 2020, section 4: 65,536). MoCo with a queue only."""
    T: float = 0.2
    """Temperature (MoCo v1: 0.07; v2 and v3: 0.2; SimCLR: 0.1 to 0.5). Not for BYOL."""
    m: float = 0.999
    """Momentum of the key encoder's EMA at the start (MoCo v1, v2: 0.999; v3: 0.99; BYOL: 0.996). Not for SimCLR."""
    m_end: float | None = None
    """Momentum at the end, approached by a half cosine (MoCo v3, BYOL: 1); the same as `m` when None."""
    order: Literal["paper", "ema-first"] = "paper"
    """`paper` = Algorithm 1; `ema-first` = the released code. The same losses, query weights and queue."""
    symmetric: bool = False
    """Let both views be queries and both be keys, against the same queue. Deviation: MoCo v1 and v2 use one way."""
    bn_groups: int = 1
    """Groups of a batch that batch norm treats apart, the key batch shuffled over them; 1 = no groups."""
    shuffle_bn: bool = True
    """Shuffle the key batch over groups and ranks, where there are several (He et al. 2020, section 3.3)."""
    mask_source: bool = True
    """Leave older keys of a query's own image out of its negatives. Deviation: the paper scores them."""
    mask_group: bool = False
    """Leave keys of a query's own group (patient, product, video) out as well."""
    queue_init: Literal["empty", "random"] = "empty"
    """`empty` = score real keys only; `random` = start with random unit vectors, as the released code does."""

    def __post_init__(self) -> None:
        if self.method not in _EFFECTIVE:
            raise ValueError(f"`method` must be moco, moco-v3, simclr or byol. Got {self.method!r}.")
        if self.K < 1:
            raise ValueError(f"`K` must be at least 1. Got {self.K}.")
        for name, value in (("m", self.m), ("m_end", self.m_end)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"`{name}` must lie in [0, 1]. Got {value}.")
        if self.order not in ("paper", "ema-first"):
            raise ValueError(f"`order` must be paper or ema-first. Got {self.order!r}.")
        if self.queue_init not in ("empty", "random"):
            raise ValueError(f"`queue_init` must be empty or random. Got {self.queue_init!r}.")
        if self.bn_groups < 1:
            raise ValueError(f"`bn_groups` must be at least 1. Got {self.bn_groups}.")
        for field in fields(self):
            value = getattr(self, field.name)
            if not self.uses(field.name) and value != field.default:
                raise ValueError(
                    f"`{field.name}` has no effect on {self.method}: leave it out. Got {value}."
                    + (" Its loss takes both views as it is." if field.name == "symmetric" else "")
                )
        self.scoring()

    def uses(self, name: str) -> bool:
        """Whether the setting of that name has an effect on the method."""
        return name == "method" or name in _EFFECTIVE[self.method]

    @property
    def has_queue(self) -> bool:
        """Whether keys of earlier steps are kept."""
        return self.method == "moco"

    @property
    def has_momentum(self) -> bool:
        """Whether there is a key encoder that follows by EMA (SimCLR has one encoder)."""
        return self.method != "simclr"

    def chance(self, N: int) -> float | None:
        """The loss of a network that tells nothing apart, N images a step, once the queue is full. None for BYOL.

        ln(1 + K) with a queue; ln(2N - 1) for SimCLR; for MoCo v3, whose two halves are scaled by 2T each, 4T ln N.
        """
        if self.method == "byol":
            return None
        if self.method == "simclr":
            return math.log(2 * N - 1)
        return 4 * self.T * math.log(N) if self.method == "moco-v3" else math.log1p(self.K)

    @property
    def losses_per_part(self) -> int:
        """How many losses a step yields for each micro-batch: what their sum must be divided by to be the mean."""
        return 2 if self.symmetric else 1

    def scoring(self) -> Scoring:
        """The part of this configuration that scoring needs; raises ValueError when it contradicts itself."""
        return Scoring(self.T, self.mask_source, self.mask_group)

    def m_at(self, step: int, total_steps: int) -> float:
        """m of the EMA that the step numbered `step` performs, in this order's indexing."""
        index = step + 1 if self.order == "paper" else step
        return momentum_at(index, total_steps, self.m, self.m if self.m_end is None else self.m_end)

    def check(self, encoder: EncoderConfig, part_size: int) -> None:
        """Raise ValueError where the method and the encoder, or images per micro-batch, do not go together."""
        if encoder.predictor != "none" and self.method not in ("moco-v3", "byol"):
            raise ValueError(f"`predictor` has no effect on {self.method}: leave it out. Got {encoder.predictor}.")
        if self.bn_groups > 1 and part_size < 2 * self.bn_groups:
            raise ValueError(
                f"`bn_groups: {self.bn_groups}` needs at least {2 * self.bn_groups} images at once. Got {part_size}."
            )
