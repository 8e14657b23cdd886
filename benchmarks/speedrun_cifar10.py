"""CIFAR-10 on two CPU cores: time to a kNN accuracy that is fixed beforehand from a plain PyTorch loop's own result.

    python -m benchmarks.speedrun_cifar10 cifar10.parquet --epochs 20 --seeds 5

Four runs for every seed. `plain`: the loop of arms/plain.py with its best workers. `mocokit`: the same recipe
(network, first weights, views, queue, T, m, SGD) through the library's loop. `mocokit, bf16`: the same in bfloat16.
`mocokit, another recipe`: the library's own `small` recipe in the precision that suits the machine, for so many epochs
of its own (`--other-epochs`), which is another training and says so. All are read by one evaluator: kNN (cosine,
k = 200, T = 0.1) of backbone features, from the training pictures to held-out ones of the training split; the test
split is never read.

The threshold is the median over seeds of the plain loop's accuracy at its last epoch, less half a point. The clock
stands still during readings; what they take is given too. First it is shown that accuracy at equal steps agrees within
the spread of seeds: speed did not buy another algorithm. Then, for each arm, every seed's time, the median, the range,
and how many never came there. This file's text, all readings and the machine go into the record (--out).
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from benchmarks.arms import Order
from numpy.typing import NDArray
from PIL import Image

from mocokit.contrast.encoders import Encoder
from mocokit.evaluation.knn import knn_predict
from mocokit.options import PretrainOptions

Batch = TypeVar("Batch")
HALF_A_POINT = 0.005
ROUNDED, OTHER = "mocokit, bf16", "mocokit, another recipe"


@dataclass
class Course:
    """One run's readings: after how many seconds of training and epochs, what accuracy. asked: seconds of reading."""

    arm: str
    seed: int
    seconds: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    asked: float = 0.0

    def reached(self, threshold: float) -> float | None:
        """Seconds of training until a reading is at the threshold or above; None if none is."""
        return next((s for s, a in zip(self.seconds, self.accuracy, strict=True) if a >= threshold), None)


class Readings:
    """A pace (see `pace.Pace`) that lets whole epochs pass and takes a reading after each."""

    def __init__(self, course: Course, per_epoch: int, epochs: int, read: Callable[[], float]) -> None:
        self.course, self.per_epoch, self.epochs, self.read = course, per_epoch, epochs, read

    def __call__(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of all epochs; the last reading comes after the last step."""
        stream, total, spent = iter(batches), self.per_epoch * self.epochs, 0.0
        start = time.perf_counter()
        for step in range(total + 1):
            if step and step % self.per_epoch == 0:
                now = time.perf_counter()
                spent += now - start
                self.course.seconds.append(spent)
                self.course.epochs.append(step / self.per_epoch)
                self.course.accuracy.append(self.read())
                start = time.perf_counter()
                self.course.asked += start - now
            if step < total:
                yield next(stream)


def cifar(path: Path, count: int, held: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], Any]:
    """`count` training pictures and `held` others of the training split, with labels: uint8 [S, 32, 32, 3], int64."""
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["image", "label", "split"])
    rows = np.flatnonzero(np.array(table["split"].to_pylist()) == "train")
    rows = np.random.default_rng(0).permutation(rows)[: count + held]
    if len(rows) < count + held:
        raise SystemExit(f"{path} has {len(rows)} training pictures; {count + held} are asked for.")
    part = table.take(rows)
    images = np.stack(
        [np.asarray(Image.open(io.BytesIO(one["bytes"])).convert("RGB")) for one in part["image"].to_pylist()]
    )
    labels = np.array(part["label"].to_pylist(), np.int64)
    return images[:count], labels[:count], images[count:], labels[count:]


def accuracy(encoder: Encoder, bank: tuple[Any, Any], queries: tuple[Any, Any]) -> float:
    """kNN accuracy of h. Batch norm uses its running statistics; the encoder is in train mode again afterwards."""
    encoder.eval()

    def features(images: NDArray[np.uint8]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat(
                [
                    encoder.features(torch.from_numpy(part).permute(0, 3, 1, 2).float().div(127.5).sub(1))
                    for part in np.array_split(images, max(1, len(images) // 500))
                ]
            )

    found = knn_predict(
        features(bank[0]), bank[1], features(queries[0]), k=min(200, len(bank[0])), n_classes=10, knn_temperature=0.1
    )
    encoder.train()
    return float(np.mean(found == queries[1]))


def race(options: argparse.Namespace) -> list[Course]:
    """Every arm and seed, one after the other, the arms of a seed together."""
    from benchmarks import cases
    from benchmarks.arms.ours import Ours
    from benchmarks.arms.plain import Plain

    images, labels, others, their_labels = cifar(options.parquet, options.images, options.held)
    case = cases.CASES["cifar10"]
    case = replace(case, images=options.images)
    cases.CASES["cifar10"] = case
    courses = []
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / f"{case.name}-{case.images}-{case.picture}.npz", images=images)
        for seed in range(options.seeds):
            order = Order(
                case="cifar10", seed=seed, folder=folder, threads=options.threads, layout="auto", workers=None
            )
            plain = Order(case="cifar10", seed=seed, folder=folder, threads=options.threads, workers=options.workers)
            small = PretrainOptions(
                recipe="small", epochs=options.other_epochs or options.epochs, batch_size=case.batch,
                backbone=case.backbone, seed=seed, image_size=case.size, threads=options.threads,
            )  # fmt: skip
            arms: dict[str, Callable[[], Any]] = {
                "plain": lambda: Plain(plain),  # noqa: B023
                "mocokit": lambda: Ours(order),  # noqa: B023
                ROUNDED: lambda: Ours(replace(order, precision="bf16")),  # noqa: B023
                OTHER: lambda: Ours(order, small),  # noqa: B023
            }
            for name in options.arms:
                arm = arms[name]()
                course = Course(name, seed)
                read = lambda arm=arm: accuracy(arm.encoder, (images, labels), (others, their_labels))  # noqa: E731
                epochs = small.epochs if name == OTHER else options.epochs
                arm.train(Readings(course, options.images // case.batch, epochs, read))
                courses.append(course)
                print(f"{name}, seed {seed}: {course.accuracy[-1]:.3f} after {course.seconds[-1]:.0f} s", flush=True)
    return courses


def claims(courses: list[Course]) -> list[str]:
    """What can be said, in lines: agreement at equal steps first, then times to the threshold."""
    by_arm = {arm: [c for c in courses if c.arm == arm] for arm in dict.fromkeys(c.arm for c in courses)}
    lines = []
    for arm, runs in by_arm.items():
        last = sorted(run.accuracy[-1] for run in runs)
        lines.append(
            f"{arm}: kNN after {runs[0].epochs[-1]:g} epochs {np.median(last):.3f} (median of n={len(last)}, "
            f"{last[0]:.3f} to {last[-1]:.3f})"
        )
    if "plain" not in by_arm:
        return [*lines, "No threshold: it comes from the plain arm."]
    threshold = float(np.median([run.accuracy[-1] for run in by_arm["plain"]])) - HALF_A_POINT
    lines.append(f"Threshold: {threshold:.3f}, the plain arm's median less half a point.")
    for arm, runs in by_arm.items():
        times = [run.reached(threshold) for run in runs]
        there = sorted(t for t in times if t is not None)
        told = ", ".join("never" if t is None else f"{t:.0f}" for t in times)
        summary = f"median {np.median(there):.0f} s, {there[0]:.0f} to {there[-1]:.0f} s, " if there else ""
        lines.append(
            f"{arm}: {summary}{len(times) - len(there)} of {len(times)} never came there; all seeds: {told} (readings "
            f"took {np.median([run.asked for run in runs]):.0f} s more)"
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Parse, race, tell, record."""
    from mocokit.training.environment import environment

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parquet", type=Path, help="columns image {bytes}, label, split")
    parser.add_argument("--images", type=int, default=45_000, help="training pictures, all of them the kNN's bank")
    parser.add_argument("--held", type=int, default=5_000, help="pictures that are asked for")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="of the plain arm's DataLoader")
    every = ["plain", "mocokit", ROUNDED, OTHER]
    parser.add_argument("--other-epochs", type=int, help="of the other recipe; default as many as --epochs")
    parser.add_argument("--arms", nargs="+", choices=every, default=every)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speedrun_cifar10.json"))
    options = parser.parse_args(arguments)
    courses = race(options)
    told = claims(courses)
    print("\n".join(told))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "speedrun": [asdict(course) for course in courses],
        "claims": told,
        "options": {name: str(value) for name, value in vars(options).items()},
        "environment": environment(),
        "code": Path(__file__).read_text(),
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
