"""The smallest momentum contrast there is: one image a step, four keys, two dimensions; recorded by the same recorder.

With one image a step the fifth key enters when the first leaves, so a key's whole life is five steps long and can be
told by name; with two dimensions the vectors are points of a circle, and no projection stands in between. It trains on
twelve of the built-in shapes by the same loop's step, update and recorder as any run, and takes well under a second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from mocokit.contrast.backbones import Backbone
from mocokit.contrast.encoders import Encoder, EncoderPair
from mocokit.contrast.key_queue import KeyQueue
from mocokit.contrast.steps import ContrastConfig, step_of
from mocokit.data.loader import BatchLoader, BatchPlan
from mocokit.data.pixels import build_pixel_store
from mocokit.data.sources import ImageSource, open_source
from mocokit.data.views import view_recipe
from mocokit.training.distributed import Ranks
from mocokit.training.loop import QueryUpdate, micro_batches
from mocokit.training.optim import OptimConfig, build_optimizer
from mocokit.training.precision import num_threads
from mocokit.training.state import TrainState
from mocokit.training.trace import Recorder, recording
from mocokit.training.trace_format import Window
from mocokit.training.trace_images import Pictured, UInt8

K, D, STEPS, SEED = 4, 2, 12, 5
SIDE = 16
CONTRAST = ContrastConfig(K=K, T=0.2, m=0.9)
OPTIM = OptimConfig(lr=0.0005, sgd_momentum=0.0, weight_decay=0.0, schedule="constant")


def toy_trace(*, m: float = CONTRAST.m, order: Literal["paper", "ema-first"] = "paper") -> dict[str, Any]:
    """Train for twelve steps and return the trace of all of them; the same on every call with the same m and order."""
    contrast = replace(CONTRAST, m=m, order=order)
    source = _twelve_shapes()
    store = build_pixel_store(source, side=SIDE, cache=None, max_bad=0.0, workers=1)
    views = view_recipe("moco-v2", SIDE)
    loader = BatchLoader(store, source.index, views, BatchPlan(source.index.ids, 1, SEED), workers=0)
    mean, std = views.mean, views.std
    encoder = _tiny_encoder()
    _spread_(encoder, loader.of_rows(np.arange(STEPS), 0).x_q)
    pair = EncoderPair(encoder)
    state = TrainState(pair, KeyQueue(K, D), build_optimizer(OPTIM, pair.trained))
    kept: list[dict[str, Any]] = []

    def describe(number: int) -> Pictured:
        row = int(np.flatnonzero(source.index.ids == number)[0])
        label = source.index.class_names[source.index.labels[row]]
        return Pictured(source.index.names[row], label, np.ascontiguousarray(store.pixels[row].transpose(1, 2, 0)))

    def to_pixels(x: torch.Tensor) -> UInt8:
        levels = x * torch.tensor(std).view(1, 3, 1, 1) + torch.tensor(mean).view(1, 3, 1, 1)
        pixels: UInt8 = (levels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        return pixels

    recorder = Recorder(
        [Window("all", 0, STEPS, frozenset(range(STEPS)))],
        contrast,
        source={"kind": "built-in", "name": f"one image a step, m {m:g}, {order}", "data": "shapes"},
        facts=_facts(contrast),
        describe=describe,
        to_pixels=to_pixels,
        save=kept.append,
        every_age=True,
    )
    take_step = step_of(contrast)
    pair.train()
    with num_threads(1):
        for batch in loader.batches(0, STEPS):
            parts = micro_batches(batch, 1)
            update = QueryUpdate(state, OPTIM.lr, 1, lambda: "the toy's image")
            m = contrast.m_at(state.step, STEPS)
            with recording(recorder, state, parts, update, Ranks().gather, m) as (update_query_, gather):
                take_step(
                    pair,
                    state.queue,
                    parts,
                    scoring=contrast.scoring(),
                    m=m,
                    step=state.step,
                    update_query_=update_query_,
                    gather=gather,
                )
            state.step += 1
    return kept[0]


@torch.no_grad()
def _spread_(encoder: Encoder, x: torch.Tensor) -> None:
    """Shift and scale the head so that the images start out all around the circle, with lengths near 1."""
    z = encoder(x)
    head = encoder.head
    assert isinstance(head, nn.Linear)
    scale = z.std(0, correction=0)
    head.weight.div_(scale[:, None])
    head.bias.copy_((head.bias - z.mean(0)) / scale)


def _facts(contrast: ContrastConfig) -> dict[str, Any]:
    return {
        "recipe": "toy",
        "K": K,
        "N": 1,
        "keys_per_step": 1,
        "D": D,
        "T": contrast.T,
        "m": contrast.m,
        "m_end": None,
        "lr": OPTIM.lr,
        "seed": SEED,
        "backbone": "two convolutions",
        "order": contrast.order,
        "symmetric": False,
        "mask_source": True,
        "mask_group": False,
        "queue_init": "empty",
        "accumulate": 1,
        "precision": "fp32",
        "images": STEPS,
    }


def _twelve_shapes() -> ImageSource:
    """Twelve shapes spread evenly over the training split: one epoch meets each once."""
    whole = open_source("shapes", split="train")
    return whole.subset(np.linspace(0, len(whole.index) - 1, STEPS).astype(np.int64))


def _tiny_encoder() -> Encoder:
    """Two convolutions and a linear head, without batch norm: a batch of one has no spread to normalise by."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        trunk = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU()
        )
        return Encoder(Backbone(trunk, spatial=True), nn.Linear(8, D), feature_dim=8, dim=D)
