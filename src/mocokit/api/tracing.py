"""A recorder for a run: which steps, and what it must be told of images that the training loop does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mocokit import __version__, files
from mocokit.api.opening import Store
from mocokit.api.telling import picture_of, strip
from mocokit.data.index import SampleIndex
from mocokit.errors import UsageError
from mocokit.reporting.plots import to_pictures
from mocokit.training.runfolder import RunFolder
from mocokit.training.settings import RunConfig
from mocokit.training.trace import Recorder
from mocokit.training.trace_format import Window, plan_windows, read_trace
from mocokit.training.trace_images import Pictured

SMALL_BATCH = 64 * 32 * 32
"""Pixels of a batch up to which keys are measured at every age: a forward pass more a step, which is nothing there."""


def planned(text: str, config: RunConfig, total_steps: int, ranks: int) -> list[Window]:
    """The windows of `--trace`. Raises UsageError for a method without a queue, several ranks, or unreadable words."""
    if ranks > 1:
        raise UsageError(f"--trace records a step that one process takes whole; this run has {ranks}. Leave it out.")
    if not config.contrast.has_queue:
        raise UsageError(f"--trace follows keys through a queue, and {config.contrast.method} has none. Leave it out.")
    return plan_windows(
        text,
        K=config.contrast.K,
        life=config.contrast.K / keys_per_step(config),
        total_steps=total_steps,
        filled=config.contrast.queue_init == "random",
    )


def keys_per_step(config: RunConfig) -> int:
    """How many keys enter the queue in one step."""
    return config.train.batch_size * (2 if config.contrast.symmetric else 1)


def trace_facts(config: RunConfig) -> dict[str, Any]:
    """The settings that a trace names."""
    contrast = config.contrast
    return {
        "recipe": config.recipe,
        "K": contrast.K,
        "N": config.train.batch_size,
        "keys_per_step": keys_per_step(config),
        "D": config.encoder.dim,
        "T": contrast.T,
        "m": contrast.m,
        "m_end": contrast.m_end,
        "lr": config.optim.lr,
        "seed": config.train.seed,
        "backbone": config.encoder.backbone,
        "order": contrast.order,
        "symmetric": contrast.symmetric,
        "mask_source": contrast.mask_source,
        "mask_group": contrast.mask_group,
        "queue_init": contrast.queue_init,
        "accumulate": config.train.accumulate,
        "precision": config.execution.precision,
        "images": config.data.images,
    }


def run_recorder(
    windows: list[Window],
    config: RunConfig,
    run: RunFolder,
    index: SampleIndex,
    store: Store,
    *,
    resumed_at: int,
) -> Recorder:
    """The recorder of a run; a resumed run's goes on with the trace that lies there."""
    order = np.argsort(index.ids)

    def describe(number: int) -> Pictured | None:
        place = int(np.searchsorted(index.ids, number, sorter=order))
        if place >= len(order) or index.ids[order[place]] != number:
            return None
        row = int(order[place])
        label = index.class_names[index.labels[row]] if index.labels[row] >= 0 else None
        return Pictured(spoken(index.names[row]), label, picture_of(store, row))

    path = run.path / "trace.json"
    source = {"kind": "run", "name": run.path.name, "data": Path(config.data.spec).name, "config": config.digest()}
    source["mocokit"] = __version__
    return Recorder(
        windows,
        config.contrast,
        source=source,
        facts=trace_facts(config),
        describe=describe,
        to_pixels=lambda x: _pictures(x, config),
        save=lambda trace: files.write_text(path, files.to_json(trace, indent=None)),
        every_age=keys_per_step(config) * config.views.size**2 <= SMALL_BATCH,
        earlier=read_trace(path) if resumed_at and path.is_file() else None,
        resumed_at=resumed_at,
    )


def _pictures(x: Tensor, config: RunConfig) -> Any:
    return to_pictures(strip(x), config.views.mean, config.views.std)


def spoken(text: str) -> str:
    """A name with bytes that are no text shown as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
