"""Speed of one case: mocokit, its encoders alone, a plain PyTorch loop, and lightly, side by side.

    python -m benchmarks.speed --case small --precision bf16 --rounds 10 --block 5 --peer-python PEER/bin/python

Run from the repository's root on an idle machine. Without --peer-python this Python is used for lightly too
(`pip install mocokit[bench]`). Writes DIR/CASE-PRECISION.json (--out DIR); `python -m benchmarks.report DIR` makes the
table. Before anything is timed, one step of each arm must give the same loss and gradients (`harness`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import cases
from benchmarks.arms import Order
from benchmarks.harness import Contestant, measure, ratio, tune, weigh

ARMS = ("mocokit", "again", "encoders", "plain", "lightly", "lightly-same")


def contestants(name: str, precision: str, folder: str, peer: str, arms: list[str], tuned: Path) -> list[Contestant]:
    """The rows of a case in the order they run.

    again: mocokit once more, the control. lightly: as documented, fp32 and the plain layout. lightly-same: lightly with
    what mocokit has found to pay, none of which its documentation shows: channels_last, this case's precision, and
    freed memory kept (`training/allocator.py`).
    """
    order = Order(case=name, precision=precision, layout="auto", workers=None, folder=folder)
    ours = Contestant("mocokit", "mocokit", order)
    found = {"mocokit": ours, "again": Contestant("mocokit again", "mocokit", order)}
    if "encoders" in arms:  # in the layout that mocokit chooses on this machine, and with all cores
        from benchmarks.arms.ours import Ours

        chosen = Ours(dataclasses.replace(order, threads=None)).facts
        fixed = dataclasses.replace(order, layout=chosen["layout"])
        found["encoders"] = Contestant("encoders alone", "encoders", fixed)
        for label in ("mocokit", "again"):
            found[label].order = dataclasses.replace(fixed, threads=chosen["threads"], workers=chosen["workers"])
    plain = Order(case=name, folder=folder)
    if {"plain", "lightly", "lightly-same"} & set(arms):
        workers, threads = tuned_setting(plain, peer, arms, tuned)
        plain = dataclasses.replace(plain, workers=workers, threads=threads)
    found["plain"] = Contestant("plain PyTorch", "plain", plain)
    found["lightly"] = Contestant("lightly", "lightly", plain, peer)
    same = dataclasses.replace(plain, layout="channels-last", precision=precision)
    label = f"lightly, channels_last, memory kept{', bf16' if precision == 'bf16' else ''}"
    found["lightly-same"] = Contestant(label, "lightly", same, peer, keep_memory=True)
    return [found[arm] for arm in arms]


def tuned_setting(plain: Order, peer: str, arms: list[str], path: Path) -> tuple[int, int]:
    """Workers {0, 1, 2} x threads {1, 2} that suit lightly best in this case; found once and kept in `path`."""
    if path.exists():
        kept = json.loads(path.read_text())
        return kept["workers"], kept["threads"]
    arm = "lightly" if any(name.startswith("lightly") for name in arms) else "plain"
    trial = Contestant(arm, arm, plain, peer if arm == "lightly" else sys.executable)
    tune(trial, [(w, t) for w in (0, 1, 2) for t in (1, 2)], seconds=1.5, cpus=cpus())
    path.write_text(json.dumps({"workers": trial.order.workers, "threads": trial.order.threads, "arm": arm}))
    return trial.order.workers or 0, trial.order.threads or 2


def cpus() -> list[int]:
    """Two of the processors that this process may use."""
    return sorted(os.sched_getaffinity(0))[:2]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a case; the record that is written."""
    from mocokit.training.environment import environment

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = options.data or name
        rows = contestants(
            options.case, options.precision, folder, options.peer_python, options.arms, out / f"{options.case}.tuned"
        )
        load = os.getloadavg()[0]
        measure(rows, rounds=options.rounds, block=options.block, cpus=cpus())
        for row in rows:
            if row.label in options.weigh:
                weigh(row, block=options.block, cpus=cpus())
    return {
        "case": dataclasses.asdict(cases.CASES[options.case]),
        "precision": options.precision,
        "rounds": options.rounds,
        "block": options.block,
        "load before": load,
        "environment": environment(),
        "rows": [dataclasses.asdict(row) for row in rows],
        "ratios": {row.label: ratio(rows[0], row) for row in rows[1:]},
    }


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(cases.CASES), required=True)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--block", type=float, default=5.0, help="seconds of a block; a round has two of each arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--weigh", nargs="*", default=["mocokit", "lightly"], help="rows whose peak memory is measured")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python that has lightly")
    parser.add_argument("--data", help="folder to keep the generated pictures in; default: a temporary one")
    parser.add_argument("--out", default="benchmarks/results")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that arms that were stopped are ended too
    record = run(options)
    path = Path(options.out) / f"{options.case}-{options.precision}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    from benchmarks.report import case_lines

    print("\n".join(case_lines(record)))


if __name__ == "__main__":
    main()
