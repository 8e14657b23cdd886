"""What a run tells before its first number, and the pictures it leaves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mocokit.data.loader import BatchLoader
from mocokit.data.pixels import PixelStore
from mocokit.data.sources import ImageSource
from mocokit.reporting import plots
from mocokit.training import runlog
from mocokit.training.checkpoint import (
    TrainState,
)
from mocokit.training.loop import Schedule
from mocokit.training.runfolder import RunFolder
from mocokit.training.settings import RunConfig

if TYPE_CHECKING:
    pass
from mocokit.api.planning import masked_share


def announce(
    config: RunConfig,
    state: TrainState,
    schedule: Schedule,
    store: PixelStore,
    source: ImageSource,
    progress: runlog.Progress,
) -> None:
    """What a reader wants to know before the first number appears."""
    K, S, N = config.contrast.K, config.data.images, config.train.batch_size
    say = progress.say
    say(
        f"{S} images of {source.name}"
        + (f" (split {config.data.split})" if config.data.split else "")
        + f", {len(store.skipped)} unreadable; {schedule.steps_per_epoch} steps of {N} an epoch, "
        f"{config.train.epochs} epochs."
    )
    say(
        f"Recipe {config.recipe}: {config.encoder.backbone} at {config.views.size} px, K {K}, T {config.contrast.T}, "
        f"m {config.contrast.m}, {config.execution.precision}, {config.execution.layout}, "
        f"{config.execution.threads} threads."
    )
    say(
        f"A key lives {K / N:.3g} steps. The loss first rises while the queue fills; a network that tells nothing "
        f"apart ends at {math.log1p(K):.2f}."
    )
    if K > S:
        say(
            f"K {K} exceeds the {S} images: every image always has an own older key in the queue. They are "
            + (
                "left out of its negatives."
                if config.contrast.mask_source
                else "scored as negatives (--no-mask-source)!"
            )
        )
    elif config.contrast.mask_source:
        say(f"Own older keys are left out; about {masked_share(K, S):.1%} of the queries meet one.")
    if state.step:
        say(f"{schedule.total_steps - state.step} of {schedule.total_steps} steps are left.")


def save_pairs(run: RunFolder, loader: BatchLoader, store: PixelStore, config: RunConfig) -> None:
    """samples/pairs0.png: the first batch's pictures with the two views that were really fed."""
    from mocokit.data.views import plain_view

    batch = loader.make(0)
    count = min(10, len(batch.rows))
    pixels, extents = store.batch(batch.rows[:count])
    mean, std = config.views.mean, config.views.std
    whole = plain_view(pixels, extents, size=config.views.size, mean=mean, std=std)
    pictures = [plots.to_pictures(x, mean, std) for x in (whole, batch.x_q[:count], batch.x_k[:count])]
    plots.save_figure(plots.pairs_figure(*pictures), run.samples / "pairs0.png")
