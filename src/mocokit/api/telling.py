"""What a run tells before its first number, and the pictures it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mocokit.api.opening import Source, Store
from mocokit.api.planning import key_life, masked_share
from mocokit.data.clips import ClipSource
from mocokit.data.loader import BatchLoader
from mocokit.recipes import recipe_notes
from mocokit.reporting import plots
from mocokit.training import runlog
from mocokit.training.loop import Schedule
from mocokit.training.runfolder import RunFolder
from mocokit.training.settings import RunConfig
from mocokit.training.state import TrainState


def announce(
    config: RunConfig,
    state: TrainState,
    schedule: Schedule,
    store: Store,
    source: Source,
    progress: runlog.Progress,
) -> None:
    """What a reader wants to know before the first number appears."""
    say, train = progress.say, config.train
    for line in source.report.lines():
        say(line)
    say(
        f"{config.data.images} {_things(source)} of {source.name}"
        + (f" (split {config.data.split})" if config.data.split else "")
        + f", {len(store.skipped)} unreadable; {schedule.steps_per_epoch} steps of {train.batch_size} an epoch, "
        f"{train.epochs} epochs."
    )
    say(
        f"Recipe {config.recipe}: {', '.join(_settings(config))}, {config.execution.precision}, "
        f"{config.execution.layout}, {config.execution.threads} threads."
    )
    for line in (*recipe_notes(config), *_expectations(config), *_masking(config, source)):
        say(line)
    if state.step:
        say(f"{schedule.total_steps - state.step} of {schedule.total_steps} steps are left.")


def _things(source: Source) -> str:
    """What the samples are, in words."""
    if isinstance(source, ClipSource):
        clip = source.config
        return f"clips ({clip.frames} frames, every {clip.stride}.) of {len(source.begin)} videos"
    return "images" if source.frames is None else f"frames of {len(np.unique(source.index.groups))} videos"


def _masking(config: RunConfig, source: Source) -> list[str]:
    """How much of the queue a query leaves out because it is of the same group."""
    contrast = config.contrast
    if not (contrast.has_queue and contrast.mask_group):
        return []
    _, sizes = np.unique(source.index.groups[source.index.groups >= 0], return_counts=True)
    share = float(((sizes / len(source.index)) ** 2).sum())
    return [f"Keys of a query's own group (video) are left out: about {share:.2%} of the queue."]


def _settings(config: RunConfig) -> list[str]:
    """The method's own settings, those it uses."""
    contrast = config.contrast
    told = [contrast.method, f"{config.encoder.backbone} at {config.views.size} px"]
    told += [f"{name} {getattr(contrast, name)}" for name in ("K", "T", "m") if contrast.uses(name)]
    if contrast.m_end is not None:
        told[-1] += f" to {contrast.m_end}"
    return told


def _expectations(config: RunConfig) -> list[str]:
    """What the loss will do, how long keys live, and whether queries meet keys of their own image."""
    contrast, N, S = config.contrast, config.train.batch_size, config.data.images
    chance = contrast.chance(N)
    if chance is None:
        return ["The loss starts near 4 (unrelated directions); it has no chance level. Near 0 it may be a collapse."]
    if not contrast.has_queue:
        return [f"A network that tells nothing apart stays at a loss of {chance:.2f}."]
    K = contrast.K
    lines = [
        f"A key lives {key_life(config):.3g} steps. The loss first rises while the queue fills; a network that tells "
        f"nothing apart ends at {chance:.2f}."
    ]
    if K > S:
        kept = "left out of its negatives." if contrast.mask_source else "scored as negatives (--no-mask-source)!"
        lines.append(f"K {K} exceeds the {S} images: every image always has an own older key in the queue, {kept}")
    elif contrast.mask_source:
        lines.append(f"Own older keys are left out; about {masked_share(K, S):.1%} of the queries meet one.")
    return lines


def save_pairs(run: RunFolder, loader: BatchLoader, store: Store, config: RunConfig) -> None:
    """samples/pairs0.png: the first batch's pictures with the two views that were really fed."""
    from mocokit.data.views import plain_view

    batch = loader.make(0)
    count = min(10, len(batch.rows))
    pixels, extents = store.batch(batch.rows[:count])
    mean, std = config.views.mean, config.views.std
    whole = plain_view(pixels, extents, size=config.views.size, mean=mean, std=std)
    views = [strip(x) for x in (whole, batch.x_q[:count], batch.x_k[:count])]
    pictures = [plots.to_pictures(x, mean, std) for x in views]
    plots.save_figure(plots.pairs_figure(*pictures), run.samples / "pairs0.png")


STARVING = 0.5
"""The share of an epoch that steps may wait for views before it is remarked on."""


class StarvingRemark:
    """Passes rows of metrics on, and says once when the steps waited for their images most of an epoch.

    A first epoch is slow for other reasons, so only later ones count.
    """

    def __init__(self, track: Callable[[Mapping[str, Any]], None], progress: runlog.Progress, workers: int) -> None:
        self.track, self.progress, self.workers = track, progress, workers
        self.said = False

    def __call__(self, row: Mapping[str, Any]) -> None:
        """A row as the loop gives it to a tracker."""
        self.track(row)
        waited = row.get("data_wait")
        if self.said or waited is None or waited < STARVING or row["epoch"] <= 1:
            return
        self.said = True
        self.progress.say(
            f"The steps waited {waited:.0%} of the last epoch for their views: raise --workers (now {self.workers}), "
            "lower --image-size, or leave blur out with --no-blur where the recipe has it."
        )


def strip(x: Tensor) -> Tensor:
    """Clips [N, 3, T, H, W] as pictures: the first, middle and last frame one below the other. Images stay."""
    if x.ndim == 4:
        return x
    T = x.shape[2]
    return torch.cat([x[:, :, frame] for frame in (0, T // 2, T - 1)], 2)


def picture_of(store: Store, row: int) -> npt.NDArray[np.uint8]:
    """A row's own picture, uint8 [h, w, 3]; of a clip its first, middle and last frame side by side."""
    pixels, extents = store.batch(np.array([row]))
    height, width = extents[0].tolist()
    shown = pixels[0, ..., :height, :width]
    if shown.ndim == 4:
        T = shown.shape[1]
        shown = torch.cat([shown[:, frame] for frame in (0, T // 2, T - 1)], 2)
    return np.ascontiguousarray(shown.permute(1, 2, 0).numpy())
