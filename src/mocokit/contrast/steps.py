"""The training steps by name: what a loop needs of this room.

The steps themselves are in `steps_queue` (MoCo v1 and v2) and `steps_batch` (MoCo v3, SimCLR, BYOL).
"""

from __future__ import annotations

from mocokit.contrast.method import ContrastConfig, Method, Scoring
from mocokit.contrast.parts import Gather, Step, UpdateQuery, ViewPair
from mocokit.contrast.steps_batch import byol_step, moco_v3_step, simclr_step
from mocokit.contrast.steps_queue import both_ways, moco_step_ema_first, moco_step_paper

STEPS: dict[str, Step] = {
    "paper": moco_step_paper,
    "ema-first": moco_step_ema_first,
    "moco-v3": moco_v3_step,
    "simclr": simclr_step,
    "byol": byol_step,
}
"""Every step function: MoCo's by its order, the others by their method."""


def step_of(config: ContrastConfig) -> Step:
    """The step that a configuration asks for."""
    if config.method != "moco":
        return STEPS[config.method]
    one_way = STEPS[config.order]
    return both_ways(one_way) if config.symmetric else one_way


__all__ = [
    "STEPS",
    "ContrastConfig",
    "Gather",
    "Method",
    "Scoring",
    "Step",
    "UpdateQuery",
    "ViewPair",
    "both_ways",
    "byol_step",
    "moco_step_ema_first",
    "moco_step_paper",
    "moco_v3_step",
    "simclr_step",
    "step_of",
]
