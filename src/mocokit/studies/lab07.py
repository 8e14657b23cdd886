"""LAB 07: a small MoCo whose mechanism works and whose features do not help.

The untrained network, in-batch contrast (40 epochs) and momentum contrast with a queue (15 epochs), from the same
weights. Epochs and candidates differ between the two trainings, so this is no ranking of methods: it shows that a
dictionary and an EMA can be right, the loss can fall, and the shape can still be harder to read than before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast.encoders import Encoder, EncoderPair
from mocokit.contrast.key_queue import NO_ID, KeyQueue, Keys
from mocokit.contrast.losses import Contrast, Excluded, same_source
from mocokit.contrast.parts import ViewPair
from mocokit.studies.lab06 import train_in_batch
from mocokit.studies.lab_run import LabRun, start
from mocokit.studies.lab_trace import LabUpdate, lab_recorder, recorded
from mocokit.studies.lab_views import ViewMaker
from mocokit.studies.setting import (
    BATCH,
    NEVER,
    Z_DIM,
    Streams,
    T,
    Trained,
    adam,
    as_one_vector_,
    two_threads,
)
from mocokit.training.trace import Recorder

EPOCHS = 15
K = 240
MOMENTUM = 0.95

# ------------------------------------------------------------------ three pieces that differ in the last bit


@torch.no_grad()
def ema_as_two_products_(theta_k: Sequence[Tensor], theta_q: Sequence[Tensor], m: float) -> None:
    """theta_k <- m theta_k + (1 - m) theta_q, in place.

    Deviation: a product and a sum, as published. `ema_update_` interpolates, which rounds differently.
    """
    for key, query in zip(theta_k, theta_q, strict=True):
        key.mul_(m).add_(query, alpha=1 - m)


def oldest_first(queue: KeyQueue) -> Keys:
    """The queue's keys in the order of their age.

    Deviation: `KeyQueue.snapshot` gives the ring as it lies, without a copy; sums over keys then add up in another
    order.
    """
    rows = queue.oldest_first()
    return Keys(queue.vectors[rows], queue.ids[rows], queue.groups[rows])


def concatenated_nce(q_ND: Tensor, k_ND: Tensor, dictionary: Keys, T: float, excluded: Excluded | None) -> Contrast:
    """InfoNCE as a classification whose right answer is column 0.

    Deviation: positive and negatives in one matrix, divided by T, cross-entropy, as published. `info_nce` scales the
    queries first and needs no concatenation: the same number but for the last bits.
    """
    positive_N1 = (q_ND * k_ND).sum(1, keepdim=True)
    negative_NK = q_ND @ dictionary.vectors.T
    if excluded is not None and len(excluded.columns):
        never = negative_NK.new_full((1,), NEVER)
        negative_NK = negative_NK.index_put((excluded.rows, excluded.columns), never)
    logits = torch.cat([positive_N1, negative_NK], dim=1).div_(T)
    loss = F.cross_entropy(logits, torch.zeros(len(q_ND), dtype=torch.long))
    left_out_N = (logits.detach() < NEVER / 2).sum(1)  # counted in what was scored, not in what was meant
    return Contrast(loss, positive_N1.detach()[:, 0], len(dictionary) - left_out_N, left_out_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """The three, exchangeable for the library's: `ema_update_`, `KeyQueue.snapshot`, `info_nce`."""

    ema_: Callable[[Sequence[Tensor], Sequence[Tensor], float], None] = ema_as_two_products_
    read: Callable[[KeyQueue], Keys] = oldest_first
    loss: Callable[[Tensor, Tensor, Keys, float, Excluded | None], Contrast] = concatenated_nce


# ---------------------------------------------------------------------------------------------- training


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueStep:
    """What a step did to the queue, read from its tensors. Ids are those of the source images, oldest key first."""

    step: int
    batch_ids: list[int]
    scored_ids: list[int]
    """The keys that the queries were scored against; empty in the first step."""
    left_out: int
    """Pairs of a query and a key whose logit was that of an impossible answer."""
    queue_ids: list[int]
    """The queue after the step."""
    births: list[int]
    """The step each of these keys was made in."""
    key_gradients: int
    """Tensors of the key encoder or the queue that had a gradient or asked for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedMoco(Trained):
    """`encoder` is the query encoder."""

    key_encoder: Encoder
    queue: KeyQueue
    steps: list[QueueStep] = field(repr=False)
    trace: dict[str, Any] | None = field(default=None, repr=False)
    """What a recorder recorded, for the step viewer."""


def train_moco(
    initial: Encoder,
    images: Tensor,
    train_ids: Tensor,
    seed: int,
    *,
    epochs: int = EPOCHS,
    pieces: Pieces = Pieces(),
    recorder: Recorder | None = None,
) -> TrainedMoco:
    """Momentum contrast (He et al. 2020) with a queue of 240 keys: EMA, keys, loss, query update, enqueue.

    images: float32 [S, 3, 16, 16]; train_ids: int64, the rows that may be seen. Both encoders start as `initial`,
    which stays as it is. recorder: records the steps that it wants, and changes no bit.
    """
    maker = ViewMaker(images, seed)
    pair = EncoderPair(copy.deepcopy(initial))
    pair.train()
    theta_q, theta_k = as_one_vector_(pair.theta_q, gradient=True), as_one_vector_(pair.theta_k)
    update = LabUpdate(adam(theta_q), theta_q)
    queue = KeyQueue(K, Z_DIM)
    nobody = torch.full((BATCH,), NO_ID)
    first_layer = pair.theta_q[0]
    before = first_layer.detach().clone()
    loss_history: list[float] = []
    steps: list[QueueStep] = []
    for _ in range(epochs):
        losses = []
        for ids, view_q, view_k in maker.epoch(train_ids):
            part = ViewPair(view_q, view_k, ids, nobody)
            with recorded(recorder, pair, queue, update, part, len(steps), MOMENTUM) as (update_query_, gather):
                # EMA: parameters of f_k follow f_q
                pieces.ema_([theta_k], [theta_q], MOMENTUM)
                # queries with gradient, keys without
                q_ND = F.normalize(pair.query(view_q), dim=1)
                with torch.no_grad():
                    keys = gather(Keys(F.normalize(pair.key(view_k), dim=1), ids, nobody))
                # loss: own key against the keys of earlier steps, those of the same image left out
                dictionary = pieces.read(queue)
                if len(dictionary):
                    excluded = same_source(ids, nobody, dictionary)
                    contrast = pieces.loss(q_ND, keys.vectors, dictionary, T, excluded)
                else:
                    contrast = warm_up(q_ND, keys.vectors)
                # query update: the only gradient there is
                update_query_([contrast])
                # enqueue this step's keys; the oldest leave
                scored_ids = dictionary.ids.tolist()  # before the queue changes: a snapshot is a view
                queue.enqueue_(keys, len(steps))
            losses.append(contrast.loss.item())
            steps.append(_record(len(steps), ids, scored_ids, contrast, queue, pair))
        loss_history.append(float(np.mean(losses)))
    return TrainedMoco(
        encoder=pair.query,
        loss_history=loss_history,
        first_layer_change=float((first_layer.detach() - before).norm()),
        key_encoder=pair.key,
        queue=queue,
        steps=steps,
        trace=recorder.trace if recorder else None,
    )


def warm_up(q_ND: Tensor, k_ND: Tensor) -> Contrast:
    """The first step has no earlier keys: the keys of the batch's other images stand in, without gradient."""
    logits = (q_ND @ k_ND.T).div_(T)
    loss = F.cross_entropy(logits, torch.arange(len(q_ND)))
    others = torch.full((len(q_ND),), len(q_ND) - 1)
    return Contrast(loss, logits.detach().diagonal() * T, others, torch.zeros_like(others))


# ------------------------------------------------------------------------------------------------- trace


def _record(
    step: int, ids: Tensor, scored_ids: list[int], contrast: Contrast, queue: KeyQueue, pair: EncoderPair
) -> QueueStep:
    by_age = queue.oldest_first()
    still = [*pair.key.parameters(), queue.vectors]
    return QueueStep(
        step=step,
        batch_ids=ids.tolist(),
        scored_ids=scored_ids,
        left_out=int(contrast.excluded.sum()),
        queue_ids=queue.ids[by_age].tolist(),
        births=queue.births[by_age].tolist(),
        key_gradients=sum(tensor.requires_grad or tensor.grad is not None for tensor in still),
    )


def check_queue(steps: Sequence[QueueStep], capacity: int = K) -> dict[str, int]:
    """Assert from the record alone what momentum contrast promises, and return what was counted.

    Only keys of earlier steps were scored; every pair of one source, and no other, was left out; the rows that left
    were the oldest; nothing on the key's side had a gradient.
    """
    ids: list[int] = []
    births: list[int] = []
    pairs = 0
    for step in steps:
        assert sorted(step.scored_ids) == sorted(ids[-capacity:]), (
            f"step {step.step} scored other keys than earlier ones"
        )
        mine = sum(step.scored_ids.count(source) for source in step.batch_ids)
        assert step.left_out == mine, f"step {step.step} left out {step.left_out} of {mine} pairs of one source"
        assert step.key_gradients == 0, f"step {step.step} had a gradient on the key's side"
        pairs += mine
        ids += step.batch_ids
        births += [step.step] * len(step.batch_ids)
        assert step.queue_ids == ids[-capacity:], f"step {step.step} evicted other rows than the oldest"
        assert step.births == births[-capacity:], f"step {step.step} has keys of another age than they should have"
    return {
        "steps": len(steps),
        "queries": len(ids),
        "same_source_pairs_left_out": pairs,
        "evicted": max(len(ids) - capacity, 0),
    }


def queue_trace(steps: Sequence[QueueStep], count: int = 5) -> list[dict[str, int]]:
    """The published trace: size, first and last source of the queue after each of the first steps."""
    return [
        {
            "step": step.step,
            "queue_size": len(step.queue_ids),
            "first_source_id": step.queue_ids[0],
            "last_source_id": step.queue_ids[-1],
        }
        for step in steps[:count]
    ]


def lab07(seeds: Streams, say: Callable[[str], None] = lambda text: None) -> LabRun:
    """Train both arms and read everything out, with two threads."""
    with two_threads():
        data, images, train_ids, initial = start(seeds)
        say("simclr: in-batch contrast, 40 epochs")
        in_batch = train_in_batch(initial, images, train_ids, seeds.in_batch)
        say("moco-toy: momentum contrast, 15 epochs")
        recorder = lab_recorder(data, seeds.data, K=K, m=MOMENTUM, epochs=EPOCHS)
        moco = train_moco(initial, images, train_ids, seeds.moco, recorder=recorder)
        check_queue(moco.steps)
        say("frozen readouts")
        return LabRun.of("07", seeds, data, initial, {"simclr": in_batch, "moco-toy": moco})
