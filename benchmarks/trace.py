"""What does recording a trace cost, in a recorded step and over a whole run?

Processor time of one thread, with and without a recorder, side by side: steps alternate between two equal trainings,
and runs between two `mocokit pretrain`s; the order is turned round every time. Two sizes:

    tiny    small-cnn-16-32, 16 px, N 60, K 240: a step of some 8 ms, where anything more shows
    cifar   small-cnn, 32 px, N 256, K 4096: the small form of MoCo v2 for CIFAR

    python -m benchmarks.trace                    # both sizes, about five minutes
    python -m benchmarks.trace --size tiny        # half a minute

Runs record `first,last`: of 300 steps of the tiny run 12, of 54 steps at CIFAR size 36. A run of a real length records
the same 36 among thousands.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mocokit import api
from mocokit.contrast.encoders import EncoderConfig, EncoderPair, build_encoder
from mocokit.contrast.key_queue import KeyQueue
from mocokit.contrast.method import ContrastConfig
from mocokit.contrast.parts import ViewPair
from mocokit.contrast.steps import step_of
from mocokit.training.distributed import Ranks
from mocokit.training.loop import QueryUpdate
from mocokit.training.optim import OptimConfig, build_optimizer
from mocokit.training.state import TrainState
from mocokit.training.trace import Recorder, recording
from mocokit.training.trace_format import plan_windows
from mocokit.training.trace_images import Pictured, UInt8

OPTIM = OptimConfig(lr=0.05)


@dataclass(frozen=True, slots=True)
class Size:
    """One size. images, epochs: of the whole run; steps, of the recorded steps that are timed one by one."""

    backbone: str
    side: int
    N: int
    K: int
    dim: int
    steps: int
    images: int
    epochs: int
    repeats: int


SIZES = {
    "tiny": Size("small-cnn-16-32", 16, 60, 240, 32, steps=36, images=600, epochs=30, repeats=7),
    "cifar": Size("small-cnn", 32, 256, 4096, 128, steps=18, images=2304, epochs=6, repeats=2),
}


class Training:
    """A training whose steps are taken one by one; recorded where there is a recorder."""

    def __init__(self, size: Size, recorded: bool) -> None:
        self.contrast = ContrastConfig(K=size.K, T=0.2, m=0.99)
        encoder = build_encoder(EncoderConfig(backbone=size.backbone, dim=size.dim), image_size=size.side, seed=0)
        pair = EncoderPair(encoder)
        pair.train()
        self.state = TrainState(pair, KeyQueue(size.K, size.dim), build_optimizer(OPTIM, pair.trained))
        pixels = np.random.default_rng(0).integers(0, 256, (4800, size.side, size.side, 3), dtype=np.uint8)
        self.recorder = None
        if recorded:
            self.recorder = Recorder(
                plan_windows(f"0-{size.steps - 1}", K=size.K, life=size.K / size.N, total_steps=1000),
                self.contrast,
                source={"kind": "run"},
                facts={},
                describe=lambda number: Pictured(str(number), None, pixels[number]),
                to_pixels=_to_pixels,
                save=lambda trace: None,
            )

    def step(self, part: ViewPair) -> float:
        """One step; its processor seconds."""
        update = QueryUpdate(self.state, OPTIM.lr, 1, lambda: "")
        started = time.process_time()
        with recording(self.recorder, self.state, [part], update, Ranks().gather, 0.99) as (update_query_, gather):
            step_of(self.contrast)(
                self.state.pair,
                self.state.queue,
                [part],
                scoring=self.contrast.scoring(),
                m=0.99,
                step=self.state.step,
                update_query_=update_query_,
                gather=gather,
            )
        self.state.step += 1
        return time.process_time() - started


def _to_pixels(x: torch.Tensor) -> UInt8:
    pixels: UInt8 = (x.clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).contiguous().numpy()
    return pixels


def steps_side_by_side(size: Size) -> None:
    """Prints what a recorded step costs more than the same step without."""
    trainings = Training(size, True), Training(size, False)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(size.steps):
        noise = torch.Generator().manual_seed(number)
        x_q, x_k = torch.rand(2, size.N, 3, size.side, size.side, generator=noise)
        ids = (torch.arange(size.N) + size.N * number) % 4800
        part = ViewPair(x_q, x_k, ids, torch.full((size.N,), -1))
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(trainings[which].step(part))
    more = [1000 * (a - b) for a, b in zip(*times, strict=True)]
    plain = 1000 * statistics.median(times[1])
    share = sum(times[0]) / sum(times[1]) - 1
    print(
        f"  a recorded step: {statistics.median(more):+.1f} ms in the median of {len(more)} (quarters "
        f"{np.quantile(more, 0.25):+.1f} and {np.quantile(more, 0.75):+.1f}) on one of {plain:.1f} ms; "
        f"all of them together {share:+.1%}",
        flush=True,
    )


def runs_side_by_side(size: Size, out: Path) -> None:
    """Prints how much longer a whole run takes, its pictures loaded, views made and files written as ever."""
    data = out / "pictures.npz"
    images = np.random.default_rng(0).integers(0, 256, (size.images, size.side, size.side, 3), dtype=np.uint8)
    np.savez(data, images=images)
    options: dict[str, Any] = {
        "backbone": size.backbone,
        "image_size": size.side,
        "batch_size": size.N,
        "queue_size": size.K,
        "dim": size.dim,
        "epochs": size.epochs,
        "threads": 1,
        "precision": "fp32",
        "layout": "contiguous",
        "quiet": True,
    }
    shares, plain = [], []
    for number in range(size.repeats):
        seconds = {}
        for trace in (None, "first,last") if number % 2 else ("first,last", None):
            started = time.process_time()
            api.pretrain(str(data), out / f"{number}-{trace}", trace=trace, **options)
            seconds[trace] = time.process_time() - started
        plain.append(seconds[None])
        shares.append(seconds["first,last"] / seconds[None] - 1)
    print(
        f"  a run of {size.images // size.N * size.epochs} steps, {statistics.median(plain):.1f} s: "
        f"{statistics.median(shares):+.1%} in the median of {len(shares)} pairs "
        f"({min(shares):+.1%} to {max(shares):+.1%})",
        flush=True,
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), help="one size instead of both")
    chosen = parser.parse_args().size
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, numpy {np.__version__}, {platform.processor() or platform.machine()}, 1 thread")
    for name, size in SIZES.items():
        if chosen in (None, name):
            print(name)
            steps_side_by_side(size)
            with tempfile.TemporaryDirectory() as folder:
                runs_side_by_side(size, Path(folder))


if __name__ == "__main__":
    main()
