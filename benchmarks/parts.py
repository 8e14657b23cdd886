"""Parts on their own: augmentation per core, the loss of a long queue, and how costs grow with a folder.

    python -m benchmarks.parts augment --peer-python PEER/bin/python   # views a second and core, ours and lightly's
    python -m benchmarks.parts loss                                    # K 65,536: tiles against their two products
    python -m benchmarks.parts queue                                   # K 1,000,000: peak memory
    python -m benchmarks.parts folder --counts 1000 10000 50000        # index, cache, epoch, kNN: seconds and slopes

From the repository's root, on an idle machine. Each writes DIR/PART.json (--out DIR) and prints its table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness import memory_fields
from PIL import Image

Rows = list[dict[str, Any]]


def best_of(work: Callable[[], object], *, times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of `times` calls after one to warm up."""
    work()
    found = []
    for _ in range(times):
        start = clock()
        work()
        found.append(clock() - start)
    return min(found)


# ------------------------------------------------------------------------------------------------ augmentation


SIZES = ((16, 16), (32, 32), (224, 336))
"""(side of a view, side of the picture it is cut from)."""

_PEER = """
import json, sys, time, numpy, torch
from PIL import Image
from lightly.transforms import MoCoV2Transform
torch.set_num_threads(1)
size, side, repeats = map(int, sys.argv[1:])
views = MoCoV2Transform(input_size=size)
draw = numpy.random.default_rng(0)
pictures = [Image.fromarray(draw.integers(0, 256, (side, side, 3), numpy.uint8)) for _ in range(32)]
best = float("inf")
for _ in range(repeats):
    start = time.process_time()
    for picture in pictures: views(picture)
    best = min(best, time.process_time() - start)
print(json.dumps(2 * len(pictures) / best))
"""


def augment(options: argparse.Namespace) -> tuple[str, Rows]:
    """Views a second on one core, by processor time, both with MoCo v2's recipe."""
    from mocokit.data.views import make_views, view_recipe

    torch.set_num_threads(1)
    rows: Rows = []
    for size, side in SIZES:
        batch = 256 if size < 100 else 16
        draw = np.random.default_rng(0)
        images = torch.from_numpy(draw.integers(0, 256, (batch, 3, side, side), np.uint8))
        extents, ids = torch.full((batch, 2), side), draw.integers(0, 2**62, batch)
        config = view_recipe("moco-v2", size)
        epochs = iter(range(10**9))  # other views each time
        seconds = best_of(
            lambda: make_views(config, images, extents, ids, seed=0, epoch=next(epochs)),  # noqa: B023
            times=options.times,
            clock=time.process_time,
        )
        found = subprocess.run(
            [options.peer_python, "-c", _PEER, str(size), str(side), str(options.times)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        ours, theirs = 2 * batch / seconds, float(json.loads(found.stdout))
        rows.append(
            {"view": size, "picture": side, "ours, views/s": ours, "lightly, views/s": theirs, "ratio": ours / theirs}
        )
    return "views a second on one core by processor time, moco-v2, pictures decoded", rows


# ------------------------------------------------------------------------------------------------------ the loss


def loss(options: argparse.Namespace) -> tuple[str, Rows]:
    """The loss and its gradient at q against the two matrix products that any way of computing it needs."""
    from torch.nn import functional as F

    from mocokit.contrast.key_queue import Keys
    from mocokit.contrast.losses import info_nce

    N, D, T = 256, 128, 0.2
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows: Rows = []
    for K in options.counts or [4096, 16384, 65536]:
        drawn = torch.Generator().manual_seed(0)
        queue = F.normalize(torch.randn(K, D, generator=drawn), dim=1)
        q = F.normalize(torch.randn(N, D, generator=drawn), dim=1).requires_grad_(True)
        k = F.normalize(torch.randn(N, D, generator=drawn), dim=1)
        dictionary = Keys(queue, torch.full((K,), -1), torch.full((K,), -1))
        logits = torch.empty(N, K)
        gradient = torch.empty(N, D)
        labels = torch.zeros(N, dtype=torch.long)

        def products() -> None:
            torch.mm(q.detach(), queue.T, out=logits)  # noqa: B023
            torch.mm(logits, queue, out=gradient)  # noqa: B023

        def ours() -> None:
            torch.autograd.grad(info_nce(q, k, dictionary, T).loss, q)  # noqa: B023

        def plain() -> None:
            all_logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.clone().T], 1) / T  # noqa: B023
            torch.autograd.grad(F.cross_entropy(all_logits, labels), q)  # noqa: B023

        seconds = {name: best_of(work, times=options.times) for name, work in
                   (("products", products), ("ours", ours), ("plain", plain))}  # fmt: skip
        rows.append(
            {"K": K}
            | {f"{name}, ms": value * 1e3 for name, value in seconds.items()}
            | {"ours / products": seconds["ours"] / seconds["products"]}
            | {"plain / products": seconds["plain"] / seconds["products"]}
        )
    return f"loss and its gradient at {N} queries of {D} dimensions, against its two matrix products alone", rows


def queue(options: argparse.Namespace) -> tuple[str, Rows]:
    """Peak memory of a loss step with a very long queue, above what the queue itself takes."""
    from torch.nn import functional as F

    from mocokit.contrast.key_queue import KeyQueue
    from mocokit.contrast.losses import info_nce

    N, D = 256, 128
    rows: Rows = []
    for K in options.counts or [250_000, 1_000_000]:
        keys = KeyQueue(K, D)
        keys.fill_random_(0)
        q = F.normalize(torch.randn(N, D), dim=1).requires_grad_(True)
        k = F.normalize(torch.randn(N, D), dim=1)
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten: filling the queue had one
        before = memory_fields(Path("/proc/self/status"))["VmRSS"]
        start = time.perf_counter()
        torch.autograd.grad(info_nce(q, k, keys.snapshot(), 0.2).loss, q)
        seconds = time.perf_counter() - start
        peak = memory_fields(Path("/proc/self/status"))["VmHWM"]
        rows.append(
            {"K": K, "queue, MiB": K * D * 4 / 2**20, "logits would be, MiB": N * K * 4 / 2**20,
             "peak above the queue, MiB": (peak - before) / 2**20, "seconds": seconds}
        )  # fmt: skip
    return f"memory of one loss with gradient, {N} queries of {D} dimensions", rows


# ---------------------------------------------------------------------------------------------------- the folder


def folder(options: argparse.Namespace) -> tuple[str, Rows]:
    """Seconds of indexing, decoding into the cache, an epoch of views, and kNN, for folders of 32 px JPEGs.

    The slope is that of log seconds over log images between neighbouring rows: 1 is linear.
    """
    from mocokit.data.loader import BatchLoader, BatchPlan
    from mocokit.data.pixels import build_pixel_store
    from mocokit.data.sources import open_source
    from mocokit.data.views import view_recipe
    from mocokit.evaluation.knn import knn_predict

    rows: Rows = []
    for count in options.counts or [1000, 10_000, 50_000]:
        with tempfile.TemporaryDirectory() as name:
            home = Path(name)
            draw = np.random.default_rng(0)
            for label in range(10):
                (home / "data" / str(label)).mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8))
                picture.save(home / "data" / str(number % 10) / f"{number:06d}.jpg")
            seconds: dict[str, float] = {}
            start = time.perf_counter()
            source = open_source(str(home / "data"))
            seconds["index"] = time.perf_counter() - start
            start = time.perf_counter()
            store = build_pixel_store(source, side=32, cache=home / "pixels.u8", workers=2)
            seconds["cache"] = time.perf_counter() - start
            plan = BatchPlan(source.index.ids, 250, 0)
            loader = BatchLoader(store, source.index, view_recipe("moco-v2", 32), plan, workers=1)
            start = time.perf_counter()
            for _ in loader.batches(0, plan.steps_per_epoch):
                pass
            seconds["epoch"] = time.perf_counter() - start
            features = torch.nn.functional.normalize(torch.randn(count, 128), dim=1)
            start = time.perf_counter()
            knn_predict(features, source.index.labels, features[:1000], k=20, n_classes=10)
            seconds["kNN of 1,000"] = time.perf_counter() - start
        row: dict[str, Any] = {"images": count} | {f"{what}, s": value for what, value in seconds.items()}
        if rows:
            steps = np.log(count / rows[-1]["images"])
            row |= {f"{what}, slope": float(np.log(v / rows[-1][f"{what}, s"]) / steps) for what, v in seconds.items()}
        rows.append(row)
    return "a folder of 32 px JPEGs in ten sub-folders; slope 1 is linear", rows


PARTS: dict[str, Callable[[argparse.Namespace], tuple[str, Rows]]] = {
    "augment": augment,
    "loss": loss,
    "queue": queue,
    "folder": folder,
}


def main(arguments: list[str] | None = None) -> None:
    """Parse, measure, write, print."""
    from benchmarks.report import part_lines

    from mocokit.training.environment import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--counts", type=int, nargs="+", help="K, or images in the folder")
    parser.add_argument("--times", type=int, default=5, help="the best of so many")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python that has lightly")
    parser.add_argument("--out", default="benchmarks/results")
    options = parser.parse_args(arguments)
    what, rows = PARTS[options.part](options)
    record = {"part": options.part, "what": what, "rows": rows, "environment": environment()}
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{options.part}.json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(part_lines(record)))


if __name__ == "__main__":
    main()
