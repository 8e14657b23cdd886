"""Does a clip encoder learn motion without labels, what do frames learn, and what does masking the own video change?

Trains, on the generated `moving-shapes` (motion, shape and colour independent of each other), for several seeds:

    clips       clips of 8 frames, the second view elsewhere in the same video, own video's keys left out (the defaults)
    unmasked    the same, with the own video's other clips scored as negatives (--no-mask-group)
    frames      single frames as pictures (--video frames), the same views

and reads motion and shape from each with all labels, by kNN (k = 20) and by a linear probe, on 240 test videos beside
random weights, pixels and colours. Intervals (95 %) are over seeds and test videos. Frames are read by video too (the
mean over a video's frames), so that both are judged on the same videos. About two processor minutes for each seed, and
one for reading a seed.

    python -m benchmarks.motion --out runs/motion                 # three seeds
    python -m benchmarks.motion --out runs/motion --seeds 0       # one
    python -m benchmarks.motion --out runs/real --data FOLDER --arms clips --image-size 48   # labelled videos of yours
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from mocokit import api
from mocokit.errors import UsageError
from mocokit.evaluation.frozen import FrozenResult
from mocokit.evaluation.interval import crossed_interval
from mocokit.training.run import Run, load_run

ARMS: dict[str, dict[str, Any]] = {
    "clips": {"video": "clips", "clip_stride": 2},
    "unmasked": {"video": "clips", "clip_stride": 2, "mask_group": False},
    "frames": {"video": "frames", "frame_rate": 8.0, "batch_size": 64, "backbone": "small-cnn-16-32-64"},
}
EPOCHS = {"clips": 14, "unmasked": 14, "frames": 6}
NEIGHBOURS = 20
SAME = {"threads": 1, "precision": "fp32", "layout": "contiguous", "quiet": True}


def train(arm: str, seed: int, out: Path, data: str, given: dict[str, Any]) -> Run:
    """One run; one that is finished is taken as it is."""
    folder = out / f"{arm}-{seed}"
    try:
        done = load_run(folder)
        if done.folder.status().get("state") == "completed":
            return done
    except UsageError:
        pass
    started = time.process_time()
    options = {"epochs": EPOCHS[arm], **ARMS[arm], **SAME, **given}
    run = api.pretrain(data, folder, seed=seed, **options)
    print(f"{folder.name}: {time.process_time() - started:.0f} processor seconds", flush=True)
    return run


def read(runs: list[Run], data: str, label: str | None, classifier: str) -> FrozenResult:
    """All labels, one reading."""
    return api.evaluate(
        runs, data, labels_per_class="all", draws=1, k=NEIGHBOURS, classifier=classifier, label_column=label, quiet=True
    )


def cell(matrix: np.ndarray[Any, np.dtype[np.float64]], least: float = 0.0) -> dict[str, Any]:
    """A score (or difference) with its interval, in per cent."""
    one = crossed_interval(matrix, None, bounds=(least, 1.0))
    return {"mean": round(100 * one.mean, 1), "ci95": [round(100 * one.low, 1), round(100 * one.high, 1)]}


def compare(arms: dict[str, list[Run]], data: str, labels: list[str | None]) -> dict[str, Any]:
    """Every arm on every label by both classifiers, and the arms' differences video by video."""
    found: dict[str, Any] = {}
    for label in labels:
        for classifier in ("knn", "linear"):
            results = {arm: read(runs, data, label, classifier) for arm, runs in arms.items()}
            table: dict[str, Any] = {}
            for arm, result in results.items():
                for name in ("h", "random init", "random init (flattened)", "pixels", "frame colours"):
                    table[f"{arm}: {name}"] = cell(result.correct[name])
                table[f"{arm}: verdict"] = result.verdict.verdict
                table[f"{arm}: against {result.verdict.baseline['name']}"] = {
                    "mean": round(100 * result.verdict.delta, 1),
                    "ci95": [round(100 * v, 1) for v in result.verdict.ci95],
                }
            for other in [arm for arm in results if arm != "clips"]:
                if "clips" in results:
                    gap = results["clips"].correct["h"] - results[other].correct["h"]
                    table[f"clips - {other}"] = cell(gap, -1.0)
            found[f"{label or 'label'}, {classifier}"] = table
    return found


def main() -> None:
    """Parse, train, compare, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="moving-shapes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    for name in ("--epochs", "--image-size", "--batch-size", "--clip-stride"):
        parser.add_argument(name, type=int, default=None)
    given = parser.parse_args()
    own = {name: getattr(given, name) for name in ("epochs", "image_size", "batch_size", "clip_stride")}
    own = {name: value for name, value in own.items() if value is not None}
    arms = {arm: [train(arm, seed, given.out, given.data, own) for seed in given.seeds] for arm in given.arms}
    labels: list[str | None] = ["motion", "shape"] if given.data == "moving-shapes" else [None]
    result: dict[str, Any] = {"seeds": given.seeds, "scores": compare(arms, given.data, labels)}
    if "clips" in arms:
        result["clips"] = api.motion(arms["clips"], given.data, quiet=True).to_dict()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
