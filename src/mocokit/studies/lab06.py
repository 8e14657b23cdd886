"""LAB 06: what one choice in the views decides. In-batch contrast with the hue kept, and with the hue free to swap.

Two trainings from the same weights, in the same order, with the same views but for one thing: whether red and blue may
be exchanged in a view. No label is read before the weights are frozen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast.encoders import Encoder
from mocokit.studies.lab_run import LabRun, start
from mocokit.studies.lab_views import ViewMaker
from mocokit.studies.setting import (
    NEVER,
    Streams,
    T,
    Trained,
    adam,
    as_one_vector_,
    two_threads,
)

EPOCHS = 40


def in_batch_nce(z_a: Tensor, z_b: Tensor) -> Tensor:
    """SimCLR's loss (Chen et al. 2020, equation 1) of N images, z [N, D] of both views: scalar.

    Of the 2N - 1 candidates of row i one is the positive, the other view of the same image: row (i + N) mod 2N.
    Deviation: one matrix of similarities, divided by T after the product, and cross-entropy, as published; the
    library's `nt_xent` scales the queries first, which rounds differently.
    """
    z = F.normalize(torch.cat([z_a, z_b]), dim=1)
    self_pair = torch.eye(len(z), dtype=torch.bool)
    logits = (z @ z.T).div_(T).masked_fill_(self_pair, NEVER)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z_a)))


def train_in_batch(
    initial: Encoder, images: Tensor, train_ids: Tensor, seed: int, *, swap_hue: bool = False, epochs: int = EPOCHS
) -> Trained:
    """In-batch contrast: both views of every image of a batch are told from those of all others.

    images: float32 [S, 3, 16, 16]; train_ids: int64, the rows that may be seen. Returns a trained copy of `initial`.
    """
    maker = ViewMaker(images, seed, swap_hue=swap_hue)
    encoder = copy.deepcopy(initial).train()
    theta = as_one_vector_(list(encoder.parameters()), gradient=True)
    optimiser = adam(theta)
    first_layer = next(encoder.parameters())
    before = first_layer.detach().clone()
    loss_history = []
    for _ in range(epochs):
        losses = []
        for _ids, view_a, view_b in maker.epoch(train_ids):
            # Two forwards, not one of 2N: the sums of the weights' gradients would round differently.
            loss = in_batch_nce(encoder(view_a), encoder(view_b))
            optimiser.zero_grad(set_to_none=False)
            torch.autograd.backward(loss)
            optimiser.step()
            losses.append(loss.item())
        loss_history.append(float(np.mean(losses)))
    change = float((first_layer.detach() - before).norm())
    return Trained(encoder=encoder, loss_history=loss_history, first_layer_change=change)


def lab06(seeds: Streams, say: Callable[[str], None] = lambda text: None) -> LabRun:
    """Train both arms and read both out, with two threads."""
    with two_threads():
        data, images, train_ids, initial = start(seeds)
        say("keep-hue: in-batch contrast, 40 epochs")
        keep = train_in_batch(initial, images, train_ids, seeds.in_batch)
        say("swap-hue: the same with the hue free to swap")
        swap = train_in_batch(initial, images, train_ids, seeds.in_batch, swap_hue=True)
        say("frozen readouts")
        return LabRun.of("06", seeds, data, initial, {"keep-hue": keep, "swap-hue": swap})
