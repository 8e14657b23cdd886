"""The features that an evaluation compares: the runs' readouts, and every baseline that can be run on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mocokit.evaluation.baselines import (
    PIXELS,
    RANDOM_INIT,
    RANDOM_INIT_FLATTENED,
    pixel_features,
    random_init_features,
)
from mocokit.evaluation.crossing import BankAndTest
from mocokit.evaluation.features import Ints, Pixels, extract, frozen, gather, plain_batches
from mocokit.evaluation.labelled import LabelledData
from mocokit.evaluation.weights import NamedEncoder, NotHere
from mocokit.training.run import Run, Which
from mocokit.training.settings import RunConfig
from mocokit.training.state import make_encoder

READOUTS = ("h", "z", "key-h", "key-z")
RANDOM_SEED = 1_000_003  # first seed of the random-weights baselines, away from the seeds that runs use


@dataclass(slots=True, eq=False)
class Contenders:
    """Features by name, one (bank, test) pair for each run or seed."""

    runs: dict[str, list[BankAndTest]]
    """The four readouts of the runs."""
    baselines: dict[str, list[BankAndTest]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    """Baselines that could not be run, and why."""
    notes: dict[str, str] = field(default_factory=dict)
    """Of named weights: what was loaded from where."""


def contenders(
    runs: Sequence[Run],
    data: LabelledData,
    bank: Ints,
    *,
    random_seeds: int,
    named: Sequence[NamedEncoder | NotHere] = (),
    cache: Path | None = None,
    device: torch.device,
    say: Callable[[str], None],
) -> Contenders:
    """Features of the images `bank` and of the test split. runs: of one architecture and view size.

    cache: folder for the pixels of named encoders that take other sizes. Raises UsageError, DivergedError as the
    extraction of features does.
    """
    first = runs[0].config
    rows = np.concatenate([bank, data.split.test])
    cut = len(bank)

    def halves(vectors: Tensor) -> BankAndTest:
        return vectors[:cut], vectors[cut:]

    found = Contenders({name: [] for name in READOUTS})
    add_runs(found, runs, data.store, rows, halves, device=device, say=say, what=f"{len(rows)} images")
    say("baselines: pixels, random weights" + "".join(f", {one.name}" for one in named))
    view: dict[str, Any] = {"size": first.views.size, "mean": first.views.mean, "std": first.views.std}
    found.baselines[PIXELS] = [halves(pixel_features(data.store, rows, **view))]
    add_random_init(found, first, random_seeds, data.store, rows, bank, halves, device=device)
    for one in named:
        if isinstance(one, NotHere):
            found.not_run[one.name] = one.reason
            continue
        found.baselines[one.name] = [halves(_named_features(one, data, rows, cache, device))]
        found.notes[one.name] = one.note
    return found


Halves = Callable[[Tensor], BankAndTest]
"""Vectors of all rows that were read, parted into those of the bank and of the test."""


def add_runs(
    found: Contenders,
    runs: Sequence[Run],
    store: Pixels,
    rows: Ints,
    halves: Halves,
    *,
    device: torch.device,
    say: Callable[[str], None],
    what: str,
    batch: int = 256,
) -> None:
    """The four readouts of every run. what: what is read, in words."""
    for run in runs:
        say(f"features of {run.path.name} ({what})")
        views = run.config.views
        own: dict[str, Any] = {"size": views.size, "mean": views.mean, "std": views.std, "device": device}
        which: Which
        for which, prefix in (("query", ""), ("key", "key-")):
            features = extract(run.encoder(which).to(device), store, rows, batch=batch, **own)
            found.runs[f"{prefix}h"].append(halves(features.h))
            found.runs[f"{prefix}z"].append(halves(features.z))


def add_random_init(
    found: Contenders,
    config: RunConfig,
    seeds: int,
    store: Pixels,
    rows: Ints,
    calibration: Ints,
    halves: Halves,
    *,
    device: torch.device,
    batch: int = 256,
) -> None:
    """The same architecture with random weights, `seeds` times, its batch norm calibrated on rows of the bank."""
    views = config.views
    pooled: list[BankAndTest] = []
    flattened: list[BankAndTest] = []
    for seed in range(seeds):
        one = random_init_features(
            lambda s: make_encoder(config.encoder, views.size, RANDOM_SEED + s),
            store,
            rows,
            calibration,
            seed,
            batch=batch,
            device=device,
            size=views.size,
            mean=views.mean,
            std=views.std,
        )
        pooled.append(halves(one.pooled))  # of videos their means: the samples' own are let go seed by seed
        if one.flattened is not None:
            flattened.append(halves(one.flattened))
    found.baselines[RANDOM_INIT] = pooled
    if flattened:
        found.baselines[RANDOM_INIT_FLATTENED] = flattened
    else:
        found.not_run[RANDOM_INIT_FLATTENED] = f"{config.encoder.backbone} has no spatial map"


def _named_features(
    one: NamedEncoder, data: LabelledData, rows: Ints, cache: Path | None, device: torch.device
) -> Tensor:
    store = data.store_at(one.size, None if cache is None else cache / f"labelled-{one.size}.u8")
    backbone = one.backbone.to(device)
    with frozen(backbone):
        batches = plain_batches(store, rows, size=one.size, mean=one.mean, std=one.std, batch=64, device=device)
        return gather(lambda x: (backbone(x).float(),), batches, len(rows))[0]
