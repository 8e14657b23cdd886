"""The key encoder's only way to move: an exponential moving average of the query encoder's parameters.

He et al. 2020, section 3.2, equation 2: theta_k <- m theta_k + (1 - m) theta_q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def ema_update_(theta_k: Sequence[Tensor], theta_q: Sequence[Tensor], m: float) -> None:
    """Move each key parameter towards its query parameter, in place.

    theta_k, theta_q: parameters in the same order, float32 (a bfloat16 average stops moving near m = 0.99). m in
    [0, 1]: 0 copies the query encoder, 1 freezes the key encoder. Parameters only: the key encoder's batch-norm
    running statistics come from its own forward passes.

    Deviation: computed as theta_k + (1 - m)(theta_q - theta_k) (`lerp_`), which equals the paper's formula in
    exact arithmetic and leaves theta_k unchanged to the last bit while theta_q = theta_k. The two-product form
    does not, since w m + w (1 - m) != w in floating point.
    """
    torch._foreach_lerp_(list(theta_k), list(theta_q), 1.0 - m)


def momentum_at(step: int, total_steps: int, start: float, end: float) -> float:
    """m of the EMA that precedes key forward number `step` (from 0): a half cosine from `start` to `end`.

    Constant when start == end (MoCo v1 and v2, section 4); the cosine to 1 is MoCo v3's and BYOL's (Grill et al.
    2020, section 3.3). A pure function of the step, so that resuming needs no state.
    """
    if start == end:
        return start
    progress = min(step / max(total_steps, 1), 1.0)
    return end - (end - start) * (1.0 + math.cos(math.pi * progress)) / 2.0
