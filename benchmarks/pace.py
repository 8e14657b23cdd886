"""How an arm is driven: its own loop runs over `Pace`, which stops it between two batches until it is told to go on.

The loop is thus the arm's real one, and blocks of several arms can alternate. Commands are lines of JSON on stdin,
answers lines of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, TypeVar

import torch

Batch = TypeVar("Batch")
PARTS = ("wait", "forward-backward", "loss", "update", "other")


class Clock:
    """Adds up the seconds of each part while it is on; the part that was named last is the one that runs."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.on = False
        self._part, self._since = "other", 0.0

    def mark(self, part: str) -> None:
        """From now on it is `part` that runs."""
        if not self.on:
            return
        now = time.perf_counter()
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def end_step(self) -> None:
        """Part of what mocokit's loop tells a clock; steps are counted by the pace."""

    def start(self) -> None:
        """Begin to measure, with nothing."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._part, self._since, self.on = "other", time.perf_counter(), True

    def stop(self) -> dict[str, float]:
        """Measure no more; the seconds of each part."""
        self.mark("other")
        self.on = False
        return dict(self.seconds)


class Pace:
    """Passes batches on in blocks. drain: untimed steps before each block. clock: the arm's."""

    def __init__(self, batch: int, drain: int, clock: Clock) -> None:
        self.batch, self.drain, self.clock = batch, drain, clock

    def __call__(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of block after block, until told to quit."""
        stream = iter(batches)
        while (order := hear()) is not None:
            if "threads" in order:
                torch.set_num_threads(order["threads"])
            for _ in range(self.drain):
                yield next(stream)
            if order.get("split"):
                self.clock.start()
            start, cpu, images = time.perf_counter(), time.process_time(), 0
            while (elapsed := time.perf_counter() - start) < order["seconds"] or not images:
                self.clock.mark("wait")
                yield next(stream)
                images += self.batch
            tell(
                {
                    "images": images,
                    "seconds": elapsed,
                    "cpu": time.process_time() - cpu,
                    "split": self.clock.stop() if self.clock.on else None,
                }
            )


def hear() -> dict[str, Any] | None:
    """The next order; None when there are no more."""
    line = sys.stdin.readline()
    order = json.loads(line) if line.strip() else {"quit": True}
    return None if order.get("quit") else order


_answers: TextIO = sys.stdout


def take_stdout() -> None:
    """From now on answers alone go to stdout, and what libraries print there to stderr."""
    global _answers
    _answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)


def tell(answer: dict[str, Any]) -> None:
    """Answer with one line."""
    _answers.write(json.dumps(answer) + "\n")
    _answers.flush()
