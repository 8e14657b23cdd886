"""Does a clip encoder learn motion without labels, what do frames learn, and what does masking the own video change?

Trains, on the generated `moving-shapes` (motion, shape and colour independent of each other), for several seeds:

    clips            clips of 8 frames, the second view elsewhere in the same video, own video's keys left out
    clips-unmasked   the same, with the own video's other clips scored as negatives (--no-mask-group)
    frames           single frames as pictures (--video frames), the same views, own video's keys left out
    frames-unmasked  the same, with the own video's other frames as negatives

and reads motion and shape from each with all labels, by kNN (k = 20) and by a linear probe, on 240 test videos beside
random weights, pixels and colours. Intervals (95 %) are over seeds and test videos. Frames are read by video too (the
mean over a video's frames), so that both are judged on the same videos. Views, networks and lengths were chosen on the
set of seed 0 (`moving-shapes`), whose test videos were looked at on the way; the study is of another set,
`moving-shapes-1`.

Every training and every reading is one cell, written to OUT when it is done: the same command goes on where it was
stopped. One core, about 12 processor minutes and 1.3 GB of memory for three seeds.

    OMP_NUM_THREADS=1 python -m benchmarks.motion --out runs/motion            # three seeds, four arms
    OMP_NUM_THREADS=1 python -m benchmarks.motion --out runs/motion --seeds 0  # one
    python -m benchmarks.motion --out runs/real --data FOLDER --arms clips --image-size 48   # labelled videos of yours
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mocokit import api, files
from mocokit.errors import UsageError
from mocokit.evaluation.interval import crossed_interval
from mocokit.training.environment import environment
from mocokit.training.run import Run, load_run

ARMS: dict[str, dict[str, Any]] = {
    "clips": {"video": "clips", "clip_stride": 2, "epochs": 14},
    "clips-unmasked": {"video": "clips", "clip_stride": 2, "epochs": 14, "mask_group": False},
    "frames": {
        "video": "frames", "frame_rate": 8.0, "epochs": 6, "batch_size": 64, "backbone": "small-cnn-16-32-64",
    },
    "frames-unmasked": {
        "video": "frames", "frame_rate": 8.0, "epochs": 6, "batch_size": 64, "backbone": "small-cnn-16-32-64",
        "mask_group": False,
    },
}  # fmt: skip
PAIRS = (("clips", "clips-unmasked"), ("frames", "frames-unmasked"), ("clips", "frames"))
"""Arms whose difference is given, video by video."""
METHODS = ("h", "random init", "random init (flattened)", "pixels", "frame colours")
NEIGHBOURS = 20
SAME = {"precision": "fp32", "layout": "contiguous", "quiet": True}


def told(name: str, work: Callable[[], Any]) -> Any:
    """What `work` gives; its processor seconds and the process's largest memory so far are printed."""
    started = time.process_time()
    found = work()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(f"{name}: {time.process_time() - started:.0f} processor seconds, at most {peak:.1f} GiB", flush=True)
    return found


def train(arm: str, seed: int, out: Path, data: str, given: dict[str, Any]) -> Path:
    """One run; one that is finished is taken as it is, one that was stopped goes on."""
    folder = out / f"{arm}-{seed}"
    state = None
    if folder.exists():
        try:
            state = load_run(folder).folder.status().get("state")
        except UsageError:  # stopped before its first checkpoint
            state = "begun"
    if state != "completed":
        options = {**ARMS[arm], **SAME, **given}
        told(folder.name, lambda: api.pretrain(data, folder, seed=seed, resume=state is not None, **options))
    return folder


def cell(path: Path, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A reading: from its file where it was made before."""
    if not path.exists():
        files.make_folder(path.parent)
        files.write_json(path, told(path.stem, work))
    found: dict[str, Any] = files.read_json(path)
    return found


def read(runs: list[Run], data: str, label: str | None, classifier: str) -> dict[str, Any]:
    """All labels, one reading: how right every method is on each test video, [R, I], and the verdict."""
    result = api.evaluate(
        runs, data, labels_per_class="all", draws=1, k=NEIGHBOURS, classifier=classifier, label_column=label, quiet=True
    )
    return {"correct": {name: result.correct[name].tolist() for name in METHODS}, "verdict": result.verdict.to_json()}


def score(matrix: Any, least: float = 0.0) -> dict[str, Any]:
    """A score (or difference) [R, I] with its interval, in per cent."""
    one = crossed_interval(np.array(matrix), None, bounds=(least, 1.0))
    return {"mean": round(100 * one.mean, 1), "ci95": [round(100 * one.low, 1), round(100 * one.high, 1)]}


def table(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One label and classifier: every arm beside its baselines, and the arms' differences video by video."""
    found: dict[str, Any] = {}
    for arm, result in results.items():
        verdict = result["verdict"]
        found |= {f"{arm}: {name}": score(result["correct"][name]) for name in METHODS}
        found[f"{arm}: verdict"] = verdict["verdict"]
        found[f"{arm}: against {verdict['baseline']['name']}"] = {
            "mean": round(100 * verdict["delta"], 1),
            "ci95": [round(100 * value, 1) for value in verdict["ci95"]],
        }
    for one, other in PAIRS:
        if one in results and other in results:
            gap = np.array(results[one]["correct"]["h"]) - np.array(results[other]["correct"]["h"])
            found[f"{one} - {other}"] = score(gap, -1.0)
    return found


def study(out: Path, data: str, arms: list[str], seeds: list[int], given: dict[str, Any]) -> dict[str, Any]:
    """Every cell, then what they say together."""
    folders = {(arm, seed): train(arm, seed, out, data, given) for seed in seeds for arm in arms}
    labels: list[str | None] = ["motion", "shape"] if data.startswith("moving-shapes") else [None]
    which = "-".join(map(str, seeds))

    def runs(arm: str) -> list[Run]:
        return [load_run(folders[arm, seed]) for seed in seeds]

    scores: dict[str, Any] = {}
    for label in labels:
        for classifier in ("knn", "linear"):
            results = {}
            for arm in arms:
                path = out / "cells" / f"{label or 'label'}, {classifier}, {arm}, seeds {which}.json"
                results[arm] = cell(path, lambda a=arm, b=label, c=classifier: read(runs(a), data, b, c))  # type: ignore[misc]
            scores[f"{label or 'label'}, {classifier}"] = table(results)
    found: dict[str, Any] = {"data": data, "seeds": seeds, "scores": scores}
    for arm in arms:
        path = out / "cells" / f"motion, {arm}, seeds {which}.json"
        found[arm] = cell(path, lambda a=arm: api.motion(runs(a), data, quiet=True).to_dict())  # type: ignore[misc]
    return found


def main() -> None:
    """Parse, train, compare, write OUT/motion.json and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="moving-shapes-1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--threads", type=int, default=1)
    for name in ("--epochs", "--image-size", "--batch-size", "--clip-stride"):
        parser.add_argument(name, type=int, default=None)
    given = parser.parse_args()
    own = {name: getattr(given, name) for name in ("epochs", "image_size", "batch_size", "clip_stride")}
    own = {"threads": given.threads} | {name: value for name, value in own.items() if value is not None}
    torch.set_num_threads(given.threads)
    found = study(given.out, given.data, given.arms, given.seeds, own)
    files.write_json(given.out / "motion.json", {**found, "environment": environment()})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
