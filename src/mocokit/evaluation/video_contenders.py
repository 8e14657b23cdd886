"""What an evaluation on videos compares: the runs' readouts, and the baselines that know no more than the pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mocokit.evaluation.baselines import (
    PIXELS,
    pixel_features,
)
from mocokit.evaluation.contenders import READOUTS, Contenders, add_random_init, add_runs
from mocokit.evaluation.crossing import BankAndTest
from mocokit.evaluation.features import CLIPS_AT_ONCE, Ints, Pixels, gather, plain_batches
from mocokit.evaluation.labelled_videos import VideoData, by_video
from mocokit.training.run import Run

COLOURS = "frame colours"
_LEVELS = 4  # of each channel: 64 colours
CLIP_PIXEL_SIDE = 16
"""Side of the frames of the pixel baseline: a clip has T times this squared times 3 values."""


def video_contenders(
    runs: Sequence[Run],
    data: VideoData,
    bank: Ints,
    *,
    random_seeds: int,
    device: torch.device,
    say: Callable[[str], None],
) -> Contenders:
    """Features of the videos `bank` and of the test videos: means over each video's clips (or frames).

    Baselines: the pixels of the frames, in order; the histogram of the frames' colours; random weights of the same
    architecture, their batch norm calibrated on the bank.
    """
    first = runs[0].config
    cut = len(bank)
    videos = np.concatenate([bank, data.split.test])
    rows, place = data.of(videos)
    calibration = rows[place < cut]

    def halves(vectors: Tensor) -> BankAndTest:
        whole = by_video(vectors, place, len(videos))
        return whole[:cut], whole[cut:]

    view: dict[str, Any] = {"size": first.views.size, "mean": first.views.mean, "std": first.views.std}
    found = Contenders({name: [] for name in READOUTS})
    what = f"{len(videos)} videos, {len(rows)} samples"
    add_runs(found, runs, data.store, rows, halves, device=device, say=say, what=what, batch=CLIPS_AT_ONCE)
    say("baselines: pixels, colours, random weights")
    small = {**view, "size": min(first.views.size, CLIP_PIXEL_SIDE)}
    found.baselines[PIXELS] = [halves(pixel_features(data.store, rows, batch=CLIPS_AT_ONCE, **small))]
    found.baselines[COLOURS] = [halves(colour_histograms(data.store, rows, size=first.views.size))]
    add_random_init(
        found, first, random_seeds, data.store, rows, calibration, halves, device=device, batch=CLIPS_AT_ONCE
    )
    return found


def colour_histograms(store: Pixels, rows: Ints, *, size: int) -> Tensor:
    """How often each of 64 colours stands in the plain views of `rows`, float32 [M, 64]: roots of shares.

    The root makes the cosine of two histograms their Bhattacharyya coefficient. Of a clip all frames count together,
    so their order can't be read from it.
    """
    black, one = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return gather(_shares, plain_batches(store, rows, size=size, mean=black, std=one, batch=CLIPS_AT_ONCE), len(rows))[
        0
    ]


def _shares(x: Tensor) -> tuple[Tensor]:
    levels = (x * _LEVELS).long().clamp_(0, _LEVELS - 1).transpose(0, 1).flatten(2)
    colour = (levels[0] * _LEVELS + levels[1]) * _LEVELS + levels[2]
    counts = torch.zeros(len(x), _LEVELS**3).scatter_add_(1, colour, torch.ones(colour.shape))
    return ((counts / colour.shape[1]).sqrt(),)
