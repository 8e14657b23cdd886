"""Arms side by side: a fresh pinned process each, blocks that alternate, ratios within rounds, a control, memory.

One round is every arm in order and then in the opposite order (A B C C B A), a block each, so that a machine that
warms up or slows down falls on all of them. Between its blocks an arm is stopped (SIGSTOP) with all its processes. The
statistic is the median over rounds of the ratio of images per second, with a 95 % bootstrap interval.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.arms import Order
from numpy.typing import NDArray

from mocokit.cli import SPINS

ROOT = Path(__file__).resolve().parent.parent
GATE_TOLERANCE = 1e-5


class GateError(Exception):
    """Two arms do not compute the same: there is nothing to time."""


class Child:
    """An arm's process. cpus: those it may use."""

    def __init__(self, arm: str, order: Order, *, python: str, cpus: Sequence[int], keep_memory: bool = False) -> None:
        self.arm = arm
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "OMP_NUM_THREADS": str(order.threads or 2),
        }
        if keep_memory:  # what mocokit asks of the C library from inside (training/allocator.py)
            environment |= {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
        if keep_memory or arm in ("mocokit", "encoders"):  # what the command line sets
            environment |= {"GOMP_SPINCOUNT": SPINS}
        command = ["taskset", "-c", ",".join(map(str, cpus)), python, "-m", "benchmarks.child", arm]
        self.process = subprocess.Popen(
            [*command, json.dumps(asdict(order))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def ask(self, **order: Any) -> dict[str, Any]:
        """Give an order and take the answer."""
        self.send(**order)
        return self.answer()

    def send(self, **order: Any) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for an answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"The arm {self.arm} ended (exit code {self.process.wait()}); its message is above.")
        told: dict[str, Any] = json.loads(line)
        return told

    def block(self, seconds: float, **order: Any) -> dict[str, Any]:
        """One block, with the arm stopped before and after it."""
        self.go_on()
        told = self.ask(seconds=seconds, **order)
        self.halt()
        return told

    def halt(self) -> None:
        """Stop all its processes where they are."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let them run again."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        """End it with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@dataclass
class Contestant:
    """A row of the table: an arm under a label of its own, and what was measured of it."""

    label: str
    arm: str
    order: Order
    python: str = sys.executable
    keep_memory: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    split: dict[str, float] | None = None
    cores: float | None = None
    peak_mib: float | None = None

    def start(self, cpus: Sequence[int]) -> Child:
        """Its process; `facts` are what it says of itself."""
        child = Child(self.arm, self.order, python=self.python, cpus=cpus, keep_memory=self.keep_memory)
        self.facts = child.answer()["facts"]
        return child


@contextlib.contextmanager
def running(contestants: Sequence[Contestant], cpus: Sequence[int]) -> Iterator[list[Child]]:
    """All arms, started one after the other and stopped; the gate is passed. Raises GateError."""
    children: list[Child] = []
    try:
        for contestant in contestants:
            children.append(contestant.start(cpus))
            children[-1].halt()
        require_same_step(contestants, children)
        for child in children:
            child.send(go=True)
        yield children
    finally:
        for child in children:
            child.end()


def require_same_step(contestants: Sequence[Contestant], children: Sequence[Child]) -> None:
    """Raise GateError unless one step from the same weights gives every arm the same loss and gradient.

    In float32 and the plain layout, on the same two views and the same queue: the loss within 1e-5 of its size, the
    gradient within 1e-5 of its norm. Arms without a loss, and labels that are the same arm again, are left out.
    """
    steps: dict[str, tuple[float, NDArray[np.float32]]] = {}
    with tempfile.TemporaryDirectory() as name:
        for contestant, child in zip(contestants, children, strict=True):
            plainly = contestant.order.precision == "fp32" and contestant.order.layout != "channels-last"
            if contestant.arm == "encoders" or contestant.arm in steps or not (plainly or contestant.arm == "mocokit"):
                continue
            path = Path(name) / f"{contestant.arm}.npz"
            child.go_on()
            child.ask(gate=str(path))
            child.halt()
            with np.load(path) as found:
                steps[contestant.arm] = (float(found["loss"]), found["gradient"])
    compare_steps(steps)


def compare_steps(steps: dict[str, tuple[float, NDArray[np.float32]]]) -> None:
    """Raise GateError naming the two arms whose loss or gradient differs, and by how much."""
    names = list(steps)
    for name in names[1:]:
        (loss, gradient), (other, its) = steps[names[0]], steps[name]
        apart = abs(loss - other) / abs(loss)
        if gradient.shape != its.shape:
            raise GateError(f"{names[0]} has {gradient.size} parameters and {name} {its.size}.")
        norm = float(np.linalg.norm(gradient - its) / np.linalg.norm(gradient))
        if not (apart <= GATE_TOLERANCE and norm <= GATE_TOLERANCE):
            raise GateError(
                f"One step of {names[0]} and of {name} differ: the loss by {apart:.1e}, the gradient by {norm:.1e} of "
                f"their size, at most {GATE_TOLERANCE:.0e} is allowed. Nothing was timed."
            )


def measure(contestants: Sequence[Contestant], *, rounds: int, block: float, cpus: Sequence[int]) -> None:
    """Fill in the contestants' images per second (one number a round), then their time split."""
    with running(contestants, cpus) as children:
        for child in children:  # warm up
            child.block(min(block, 1.0))
        for _ in range(rounds):
            images, seconds = np.zeros(len(children)), np.zeros(len(children))
            there = list(range(len(children)))
            for at in [*there, *reversed(there)]:
                told = children[at].block(block)
                images[at] += told["images"]
                seconds[at] += told["seconds"]
            for contestant, rate in zip(contestants, images / seconds, strict=True):
                contestant.rates.append(float(rate))
        for contestant, child in zip(contestants, children, strict=True):
            told = child.block(block, split=True)
            contestant.cores = told["cpu"] / told["seconds"]
            spent = sum(told["split"].values())
            contestant.split = {part: seconds / spent for part, seconds in told["split"].items()}


def weigh(contestant: Contestant, *, block: float, cpus: Sequence[int]) -> None:
    """Fill in a contestant's peak memory, with no other arm beside it that would share pages of libraries."""
    child = contestant.start(cpus)
    try:
        with peak_memory(child.process.pid) as peak:
            child.send(go=True)
            child.ask(seconds=block)
        contestant.peak_mib = peak[0] / 2**20
    finally:
        child.end()


def tune(contestant: Contestant, settings: Sequence[tuple[int, int]], *, seconds: float, cpus: Sequence[int]) -> None:
    """Give a contestant the (workers, threads) under which a short block is fastest; the others go into its facts."""
    found: dict[tuple[int, int], float] = {}
    for workers in sorted({workers for workers, _ in settings}):
        trial = replace(contestant, order=replace(contestant.order, workers=workers))
        child = trial.start(cpus)
        try:
            child.send(go=True)
            for threads in sorted({threads for w, threads in settings if w == workers}):
                told = child.ask(seconds=seconds, threads=threads)
                found[workers, threads] = told["images"] / told["seconds"]
        finally:
            child.end()
    workers, threads = max(found, key=lambda pair: found[pair])
    contestant.order = replace(contestant.order, workers=workers, threads=threads)


@contextlib.contextmanager
def peak_memory(pid: int, *, hertz: float = 20.0) -> Iterator[list[int]]:
    """A list whose one number is the peak, in bytes, of what a process and its descendants hold (`held`)."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], held(family(pid)))
            done.wait(1 / hertz)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has just ended
                found += [int(child) for child in children.read_text().split()]
    return found


def held(pids: Sequence[int]) -> int:
    """Bytes of memory that these processes hold together, whoever else runs on the machine.

    Pages of their own and shared memory by PSS, so that what they share counts once. Pages of files (libraries) count
    in full and once, as many as the process with most of them has: by PSS they would be the cheaper, the more
    strangers have the same libraries open, and an arm in the driver's own Python would look smaller than it is.
    """
    own, mapped = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            rollup = memory_fields(Path(f"/proc/{pid}/smaps_rollup"))
            own += rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0)
            mapped = max(mapped, memory_fields(Path(f"/proc/{pid}/status")).get("RssFile", 0))
    return own + mapped


def memory_fields(path: Path) -> dict[str, int]:
    """The amounts of memory in a file of /proc, in bytes."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def interval(ratios: Sequence[float], *, draws: int = 10_000) -> tuple[float, float, float]:
    """The median with its 95 % bootstrap interval: (median, low, high)."""
    values = np.asarray(ratios)
    chosen = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    low, high = np.quantile(np.median(values[chosen], axis=1), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def ratio(one: Contestant, other: Contestant) -> tuple[float, float, float]:
    """Images per second of `one` over `other`, round by round: (median, low, high)."""
    return interval(np.asarray(one.rates) / np.asarray(other.rates))
