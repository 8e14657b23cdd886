"""LAB 07's first and last steps for the step viewer, recorded by the same recorder as any run's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from mocokit.contrast.encoders import EncoderPair
from mocokit.contrast.key_queue import KeyQueue
from mocokit.contrast.losses import Contrast
from mocokit.contrast.method import ContrastConfig
from mocokit.contrast.parts import Gather, UpdateQuery, ViewPair
from mocokit.data.generated_shapes import Shapes
from mocokit.studies.setting import BATCH, LEARNING_RATE, Z_DIM, T
from mocokit.training.distributed import Ranks
from mocokit.training.state import TrainState
from mocokit.training.trace import Recorder, recording
from mocokit.training.trace_format import plan_windows
from mocokit.training.trace_images import Pictured, UInt8


class LabUpdate:
    """The lab's query update, as a recorder reads one: gradients are kept in place, so they are set to 0, not freed."""

    def __init__(self, optimiser: torch.optim.Optimizer, theta_q: Tensor) -> None:
        self.optimiser, self.theta_q = optimiser, theta_q
        self.loss = self.gradient_norm = 0.0
        self.chance: float | None = None
        self.lr = LEARNING_RATE

    def __call__(self, losses: Iterable[Contrast]) -> None:
        """Backward and one optimiser step for each loss; the lab has one."""
        for contrast in losses:
            self.optimiser.zero_grad(set_to_none=False)
            torch.autograd.backward(contrast.loss)
            self.loss, self.chance = float(contrast.loss.detach()), contrast.chance()
            self.optimiser.step()
        assert self.theta_q.grad is not None
        self.gradient_norm = float(self.theta_q.grad.norm())


def lab_recorder(data: Shapes, seed: int, *, K: int, m: float, epochs: int) -> Recorder:
    """A recorder of the first steps, through the first key's eviction, and of the last. Its trace: `Recorder.trace`."""
    contrast = ContrastConfig(K=K, T=T, m=m, order="ema-first")
    steps = epochs * (len(data.train_ids) // BATCH)
    facts = {
        "recipe": "LAB 07",
        "K": K,
        "N": BATCH,
        "keys_per_step": BATCH,
        "D": Z_DIM,
        "T": T,
        "m": m,
        "m_end": None,
        "lr": LEARNING_RATE,
        "seed": seed,
        "backbone": "three convolutions and a linear layer",
        "order": "ema-first",
        "symmetric": False,
        "mask_source": True,
        "mask_group": False,
        "queue_init": "empty",
        "accumulate": 1,
        "precision": "fp32",
        "images": len(data.train_ids),
    }

    def describe(number: int) -> Pictured:
        return Pictured(f"shapes/{number}", None, to_pixels(torch.from_numpy(data.images[number : number + 1]))[0])

    return Recorder(
        plan_windows("first,last", K=K, life=K / BATCH, total_steps=steps),
        contrast,
        source={"kind": "lab", "name": "LAB 07", "data": "shapes"},
        facts=facts,
        describe=describe,
        to_pixels=to_pixels,
        save=lambda trace: None,  # it is kept in memory, and written with the lab's other files
        every_age=True,
    )


def to_pixels(x: Tensor) -> UInt8:
    """Pictures [n, 3, s, s] in 0..1 as uint8 [n, s, s, 3]."""
    pixels: UInt8 = (x.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy().astype(np.uint8)
    return pixels


@contextmanager
def recorded(
    recorder: Recorder | None,
    pair: EncoderPair,
    queue: KeyQueue,
    update: LabUpdate,
    part: ViewPair,
    step: int,
    m: float,
) -> Iterator[tuple[UpdateQuery, Gather]]:
    """`recording` for a lab's own loop: gives the update and the gather to call in the place of the step's."""
    state = TrainState(pair, queue, update.optimiser, step)
    with recording(recorder, state, [part], update, Ranks().gather, m) as seams:
        yield seams
