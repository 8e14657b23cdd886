"""The labs against the same experiment with loops over the images, side by side in one run.

Median ratio of times 0.796 [0.751, 0.845] for LAB 06 and 0.814 [0.789, 0.840] for LAB 07 (95 % bootstrap intervals, 8
rounds each; 2 idle cores of an AMD EPYC with AVX-512, torch 2.14.1, two threads; python -m benchmarks.labs --rounds 8).

Every round trains and reads out both forms of one lab in random order, so that whatever else the machine does falls on
both. Reported: the median of the rounds' ratios (ours / loops, below 1 is faster) with a 95 % bootstrap interval. Equal
results are asserted in every round: a faster lab that moves a bit would be another experiment.

    python -m benchmarks.labs                    # from the repository's root; about 4 minutes on two idle cores
    python -m benchmarks.labs --rounds 5 --part  # a few epochs only, for a quick look
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from benchmarks import plain_labs

from mocokit.studies.lab06 import lab06, train_in_batch
from mocokit.studies.lab07 import lab07, train_moco
from mocokit.studies.lab_run import start
from mocokit.studies.setting import THREADS, streams, two_threads
from mocokit.training.environment import environment

Form = Callable[[], object]
PART_EPOCHS = 3


def whole(lab: str) -> tuple[Form, Form]:
    """(ours, loops): a whole lab, data to readouts; both return the scores."""
    seeds = streams()
    run = {"06": lab06, "07": lab07}[lab]
    plain = {"06": plain_labs.lab06, "07": plain_labs.lab07}[lab]
    return lambda: dict(run(seeds).scores), lambda: plain(seeds.data)


def part(lab: str) -> tuple[Form, Form]:
    """(ours, loops): three epochs of the arm that the lab is about; both return the losses."""
    seeds = streams()
    _, images, train_ids, initial = start(seeds)
    plain = plain_labs.first_weights(seeds.init)
    if lab == "06":
        return (
            lambda: (
                train_in_batch(
                    initial, images, train_ids, seeds.in_batch, swap_hue=True, epochs=PART_EPOCHS
                ).loss_history
            ),
            lambda: plain_labs.train_in_batch(plain, images, seeds.in_batch, True, PART_EPOCHS)[1],
        )
    return (
        lambda: train_moco(initial, images, train_ids, seeds.moco, epochs=PART_EPOCHS).loss_history,
        lambda: plain_labs.train_queue(plain, images, seeds.moco, PART_EPOCHS)[4],
    )


def measure(ours: Form, loops: Form, rounds: int, rng: np.random.Generator) -> np.ndarray:
    """Seconds [rounds, 2] of ours and of the loops, in random order within each round."""
    seconds = np.empty((rounds, 2))
    for row in seconds:
        found: list[object] = [None, None]
        for which in rng.permutation(2):
            began = time.perf_counter()
            found[which] = (ours, loops)[which]()
            row[which] = time.perf_counter() - began
        if found[0] != found[1]:
            raise SystemExit("The two forms gave different results: this is no comparison of speed.")
    return seconds


def median_ratio(seconds: np.ndarray, rng: np.random.Generator) -> tuple[float, float, float]:
    """The median of the rounds' ratios and its 95 % bootstrap interval (10,000 resamples of rounds)."""
    ratios = seconds[:, 0] / seconds[:, 1]
    resampled = np.median(ratios[rng.integers(0, len(ratios), (10_000, len(ratios)))], axis=1)
    low, high = np.percentile(resampled, (2.5, 97.5))
    return float(np.median(ratios)), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--part", action="store_true", help=f"{PART_EPOCHS} epochs of one arm instead of whole labs")
    parser.add_argument("--labs", nargs="+", choices=("06", "07"), default=("06", "07"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    report = {"environment": environment() | {"torch_threads": THREADS}, "rounds": arguments.rounds, "labs": {}}
    with two_threads():
        for lab in arguments.labs:
            ours, loops = (part if arguments.part else whole)(lab)
            train_once = part(lab)
            measure(*train_once, rounds=1, rng=rng)  # warm-up of both forms
            seconds = measure(ours, loops, arguments.rounds, rng)
            middle, low, high = median_ratio(seconds, rng)
            report["labs"][lab] = {"seconds": seconds.tolist(), "ratio": middle, "ci95": [low, high]}
            if not arguments.json:
                medians = np.median(seconds, axis=0)
                print(
                    f"LAB {lab}: {medians[0]:.2f} s against {medians[1]:.2f} s with loops (medians of {len(seconds)}); "
                    f"median ratio {middle:.3f} [95 % CI {low:.3f}, {high:.3f}]; faster in "
                    f"{int((seconds[:, 0] < seconds[:, 1]).sum())} of {len(seconds)}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps(report))
    else:
        facts = report["environment"]
        print(f"{facts['processor']}, {facts['cores']} cores, torch {torch.__version__}, {THREADS} threads")


if __name__ == "__main__":
    main()
