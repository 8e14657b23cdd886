"""Search by a run's features against what it must beat, on the test split of labelled data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mocokit.errors import DataError, UsageError
from mocokit.evaluation.baselines import (
    PIXELS,
    RANDOM_INIT,
    RANDOM_INIT_FLATTENED,
    pixel_features,
    random_init_features,
)
from mocokit.evaluation.features import CLIPS_AT_ONCE, IMAGES_AT_ONCE, extract
from mocokit.evaluation.frozen import RANDOM_SEED
from mocokit.evaluation.interval import Interval, crossed_interval
from mocokit.evaluation.labelled import LabelledData
from mocokit.evaluation.labelled_videos import VideoData, by_video
from mocokit.evaluation.protocol import Ledger, plan_hash
from mocokit.evaluation.verdict import Verdict, decide
from mocokit.evaluation.video_contenders import CLIP_PIXEL_SIDE
from mocokit.retrieval.encode import Ints
from mocokit.retrieval.scores import Doubles, rank_all
from mocokit.training.run import Run
from mocokit.training.state import make_encoder

HEADLINE = "mAP"


@dataclass(frozen=True, slots=True)
class SearchScores:
    """Scores by method and measure, each with its interval; the verdict is about mAP."""

    scores: dict[str, dict[str, Interval]]
    verdict: Verdict
    queries: int
    gallery: int
    test_readings: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return self.verdict.to_json() | {
            "queries": self.queries,
            "gallery": self.gallery,
            "test_readings": self.test_readings,
            "search": {
                name: {measure: {"score": one.mean, "ci95": [one.low, one.high]} for measure, one in row.items()}
                for name, row in self.scores.items()
            },
        }


def judge_search(
    runs: Sequence[Run],
    data: LabelledData | VideoData,
    *,
    readout: str,
    ks: Sequence[int],
    named: Mapping[str, Callable[[Ints], Tensor]],
    device: torch.device,
    say: Callable[[str], None],
) -> SearchScores:
    """Rank the test images by the runs' features, pixels, random weights and further vectors by name.

    Of videos a whole one is ranked: the mean of its clips' (or frames') vectors. readout: h, z, key-h or key-z. ks: of
    recall@k. named: name -> function from rows to vectors [M, D]. The reading
    of the test split is recorded in every run's ledger first. Raises UsageError when the runs don't belong together,
    DataError when no label has two test images.
    """
    first = runs[0].config
    for run in runs[1:]:
        if run.config.views.size != first.views.size or run.config.encoder != first.encoder:
            raise UsageError(
                f"{run.path} has another image size or architecture than {runs[0].path}. Judge them apart."
            )
    test = data.split.test
    plan = plan_hash({"search": data.name, "readout": readout, "ks": list(ks), "named": sorted(named), "n": len(test)})
    ledgers = [Ledger(run.folder.evaluation / "ledger.jsonl") for run in runs]
    for run, ledger in zip(runs, ledgers, strict=True):
        ledger.record(split="test", purpose="search evaluation", plan=plan, n=len(test), step=run.step)
    judged = "videos" if isinstance(data, VideoData) else "images"
    labels = data.index.labels[test]
    groups = data.index.groups[test] if (data.index.groups[test] >= 0).any() else None
    own, baselines = _vectors(runs, data, readout, named, device, say)
    say(f"ranking {len(test)} test {judged} by {1 + len(baselines)} methods")
    matrices: dict[str, dict[str, Doubles]] = {}
    for name, several in {readout: own, **baselines}.items():
        ranked = [rank_all(vectors, labels, groups, ks) for vectors in several]
        asked = ranked[0].asked
        repeat = len(runs) // len(ranked)  # a method that is the same in every run
        matrices[name] = {
            measure: np.concatenate([np.stack([one.values[measure] for one in ranked])] * repeat)
            for measure in ranked[0].values
        }
    asked_groups = None if groups is None else groups[asked]
    scores = {
        name: {measure: crossed_interval(D, asked_groups, bounds=(0, 1)) for measure, D in row.items()}
        for name, row in matrices.items()
    }
    verdict = decide(
        {name: row[HEADLINE] for name, row in matrices.items()},
        readout,
        metric=HEADLINE,
        readout=readout.removeprefix("key-"),
        encoder="key" if readout.startswith("key-") else "query",
        step=min(run.step for run in runs),
        runs=len(runs),
        draws=None,
        labels_per_class=None,
        groups=asked_groups,
        not_run={}
        if RANDOM_INIT_FLATTENED in baselines
        else {RANDOM_INIT_FLATTENED: f"{first.encoder.backbone} has no spatial map"},
        judged=judged,
    )
    readings = max(ledger.count("test") for ledger in ledgers)
    return SearchScores(scores, verdict, len(asked), len(test), readings)


def _vectors(
    runs: Sequence[Run],
    data: LabelledData | VideoData,
    readout: str,
    named: Mapping[str, Callable[[Ints], Tensor]],
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """The runs' vectors of the test images, and the baselines': one for each run, or one that is the same in all."""
    first, test = runs[0].config, data.split.test
    rows, place = data.of(test)
    calibration = data.of(data.split.train)[0]
    batch = CLIPS_AT_ONCE if isinstance(data, VideoData) else IMAGES_AT_ONCE

    def whole(vectors: Tensor) -> Tensor:
        return by_video(vectors, place, len(test)) if isinstance(data, VideoData) else vectors

    own = []
    for run in runs:
        say(f"features of {run.path.name} ({len(rows)} samples)")
        encoder = run.encoder("key" if readout.startswith("key-") else "query").to(device)
        views = run.config.views
        found = extract(
            encoder, data.store, rows, size=views.size, mean=views.mean, std=views.std, batch=batch, device=device
        )
        own.append(whole(found.h if readout.endswith("h") else found.z))
    say("baselines: pixels, random weights")
    views = first.views
    side = min(views.size, CLIP_PIXEL_SIDE) if isinstance(data, VideoData) else views.size
    baselines = {PIXELS: [whole(pixel_features(data.store, rows, size=side, mean=views.mean, std=views.std))]}
    baselines[RANDOM_INIT] = []
    for seed in range(len(runs)):
        one = random_init_features(
            lambda seed: make_encoder(first.encoder, first.views.size, RANDOM_SEED + seed),
            data.store,
            rows,
            calibration,
            seed,
            size=views.size,
            mean=views.mean,
            std=views.std,
            batch=batch,
            device=device,
        )
        baselines[RANDOM_INIT].append(whole(one.pooled))
        if one.flattened is not None:
            baselines.setdefault(RANDOM_INIT_FLATTENED, []).append(whole(one.flattened))
    for name, vectors in named.items():
        if name in baselines or name == readout:
            raise UsageError(f"--against {name!r} is the name of a method that is always there. Give it another name.")
        baselines[name] = [vectors(test)]
    return own, baselines


def by_id(ids: Ints, vectors: Any, wanted: Ints, name: str) -> Tensor:
    """The vectors of the wanted ids, float32 [M, D]. Raises DataError naming how many are missing."""
    order = np.argsort(ids, kind="stable")
    place = np.searchsorted(ids[order], wanted)
    there = place < len(ids)
    there[there] = ids[order][place[there]] == wanted[there]
    if not there.all():
        raise DataError(
            f"{name} lacks vectors of {int((~there).sum())} of the {len(wanted)} test images. Embed the same data."
        )
    return torch.from_numpy(np.ascontiguousarray(vectors[order[place]]))
