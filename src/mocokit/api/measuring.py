"""What looks at a run while it trains: the probe of its health, and the monitor's kNN curve."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mocokit.api.planning import key_life
from mocokit.contrast.health import Classes, HealthProbe
from mocokit.data.loader import BatchLoader
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.labelled import LabelledData, open_labelled
from mocokit.evaluation.monitor import Monitor
from mocokit.evaluation.protocol import Ledger
from mocokit.training.loop import Schedule
from mocokit.training.runfolder import RunFolder
from mocokit.training.settings import RunConfig

PROBE_IMAGES, PROBE_EVERY, PROBE_ROWS = 128, 100, 500
"""Health is measured on so many images every so many steps; more rarely where that makes more rows than this."""
PROBE_KEPT = 2**24
"""Bytes up to which the views of these images are kept between measurements in a CPU's memory."""


def probe_of(
    loader: BatchLoader,
    config: RunConfig,
    schedule: Schedule,
    rows: list[dict[str, Any]],
    device: torch.device,
) -> HealthProbe | None:
    """What measures health: a fixed batch of views. None where there are too few images to say anything.

    On a CPU the views are kept only where they are small; else they are made for every look anew, since at 224 px they
    are as much memory as the batches of several steps. A device would wait for them, and has room.
    """
    index = loader.index
    chosen = np.sort(np.argsort(index.ids, kind="stable")[:PROBE_IMAGES])
    if len(chosen) < 8:
        return None

    def view(number: int) -> Tensor:
        return loader.views_of_rows(chosen, 0, (number,))[0].to(device)

    small = 2 * 3 * 4 * len(chosen) * loader.pixels_of_a_view <= PROBE_KEPT
    kept = [view(0), view(1)] if small or device.type != "cpu" else []
    classes = None
    if (index.labels >= 0).any():
        classes = Classes(torch.tensor(index.ids, device=device), torch.tensor(index.labels, device=device))
    return HealthProbe(
        kept.__getitem__ if kept else view,
        torch.tensor(index.ids[loader.store.replaced[chosen]], device=device),
        every=max(PROBE_EVERY, schedule.total_steps // PROBE_ROWS),
        lifetime=key_life(config) or 0.0,
        classes=classes,
        rows=rows,
    )


def open_monitor(spec: str, run: RunFolder, config: RunConfig) -> LabelledData:
    """The labelled data of `--monitor`. Raises UsageError for a run on clips, DataError without validation images."""
    if config.data.video == "clips":
        raise UsageError("--monitor reads images; clips have no such curve. Leave it out and use `mocokit evaluate`.")
    labelled = open_labelled(
        spec,
        size=config.views.size,
        label_column=config.data.label_column,
        group_column=config.data.group_column,
        cache=run.path / "cache" / "monitor.u8",
    )
    if not len(labelled.split.val):
        raise DataError(f"{labelled.name} has no labelled validation image, so --monitor can't read it. Add images.")
    return labelled


def monitor_of(labelled: LabelledData, run: RunFolder, config: RunConfig) -> Monitor:
    """What reads the curve."""
    ledger = Ledger(run.evaluation / "ledger.jsonl")
    return Monitor(labelled, ledger, size=config.views.size, mean=config.views.mean, std=config.views.std)
