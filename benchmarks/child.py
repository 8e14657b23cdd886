"""One arm in a process of its own: `python -m benchmarks.child MODULE ORDER`, driven by `harness.Arm`.

Answers first with what it is (`facts`) and, asked for it, with where its gate's loss and gradients lie; then block by
block (`pace`).
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from benchmarks.pace import Pace, hear, take_stdout, tell

ARMS = {
    "mocokit": "benchmarks.arms.ours",
    "encoders": "benchmarks.arms.encoders",
    "plain": "benchmarks.arms.plain",
    "lightly": "benchmarks.arms.peer_lightly",
}


def main() -> None:
    """Make the arm, pass the gate, train."""
    take_stdout()
    from benchmarks.arms import Arm, Order

    order = Order(**json.loads(sys.argv[2]))
    arm: Arm = importlib.import_module(ARMS[sys.argv[1]]).make(order)
    tell({"facts": arm.facts})
    while (asked := hear()) is not None and "gate" in asked:
        step = arm.gate()
        flat = torch.cat([gradient.flatten() for gradient in step.gradients])
        np.savez(Path(asked["gate"]), loss=step.loss, gradient=flat.numpy())
        tell({"loss": step.loss})
    if asked is None:
        return
    arm.train(Pace(order.what.batch, order.what.drain, arm.clock))


if __name__ == "__main__":
    main()
