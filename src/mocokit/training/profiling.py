"""Where a run's time goes: the parts of its steps, measured by hooks on what the steps use anyway.

Nothing of it exists unless a profile is asked for; a step that is not profiled runs the same code.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mocokit.data.loader import Batch, BatchLoader
from mocokit.training.precision import ExecutionConfig, has_fast_bf16
from mocokit.training.state import TrainState

PARTS = {
    "wait": "wait for views",
    "forward-backward": "encoders, forward and backward",
    "loss": "loss and its masks",
    "update": "optimiser, EMA and queue",
    "other": "checks, logs, checkpoints",
}
"""The parts that add up to a step's time, with what they are."""

WARM_STEPS, MEASURED_STEPS = 10, 50


class StepClock:
    """Adds up the seconds of each of `PARTS`. Exactly one part runs at any time: the one that was named last.

    The loop names "wait", "update" and "other"; hooks on the encoders name the rest (`watching`). Backward is
    "loss" until the gradient has reached an encoder's output, "forward-backward" from there on.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self._part = "other"
        self._since = time.perf_counter()
        self._cpu = time.process_time()

    @property
    def cpu(self) -> float:
        """Seconds of processor time that all threads of the process took together."""
        return time.process_time() - self._cpu

    def mark(self, part: str) -> None:
        """From now on it is `part` that runs."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # kernels run on after their call returns
        now = time.perf_counter()
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def end_step(self) -> None:
        """A step is done."""
        self.steps += 1

    def restart(self) -> None:
        """Forget what was measured."""
        self.mark(self._part)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0
        self._cpu = time.process_time()

    @contextlib.contextmanager
    def watching(self, state: TrainState) -> Iterator[StepClock]:
        """Hooks on the state's networks, gone again on leaving."""
        hooks: list[Any] = []
        for network in state.modules().values():
            hooks.append(network.register_forward_pre_hook(lambda *_: self.mark("forward-backward")))
            hooks.append(network.register_forward_hook(self._encoded))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _encoded(self, network: nn.Module, inputs: Any, output: Tensor) -> None:
        self.mark("loss")
        if output.requires_grad:
            output.register_hook(lambda gradient: self.mark("forward-backward"))  # type: ignore[no-untyped-call]


class TimedLoader(BatchLoader):
    """A loader that adds up what the batches taken from it cost to make: `made` batches, `seconds`."""

    made, seconds = 0, 0.0

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._cost: dict[int, float] = {}  # of the batches that are made and not taken, by step

    def make_together(self, steps: range) -> list[Batch]:
        """As `BatchLoader.make_together`."""
        start = time.perf_counter()
        batches = super().make_together(steps)
        each = (time.perf_counter() - start) / len(batches)
        self._cost |= dict.fromkeys(steps, each)
        return batches

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """As `BatchLoader.batches`."""
        for batch in super().batches(start, stop):
            self.made, self.seconds = self.made + 1, self.seconds + self._cost.pop(batch.step)
            yield batch
            del batch  # as in `run_training`

    def restart(self) -> None:
        """Forget what was measured."""
        self.made, self.seconds = 0, 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What the steps of a run cost. seconds: of each of `PARTS`, over `steps` steps of `images` images.

    augment: seconds that making the views of one batch takes; on `workers` threads beside the step, or with 0 workers
    within "wait". cpu: seconds of processor time of the whole process.
    """

    steps: int
    images: int
    seconds: Mapping[str, float]
    augment: float
    workers: int
    cpu: float

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        """The share of the time that a part takes, in 0..1."""
        return self.seconds[part] / self.total

    def lines(self, execution: ExecutionConfig) -> list[str]:
        """The split as a table, and what bounds the run with what can be done about it."""
        step = self.total / self.steps
        rate = self.images / step
        where = f"on {self.workers} threads beside the step" if self.workers else "part of the wait"
        rows = [
            f"Profile of {self.steps} steps of {self.images} images: {step * 1e3:.1f} ms a step, {rate:.0f} images/s.",
            *(
                f"  {words:<32}{self.seconds[part] / self.steps * 1e3:9.2f} ms {self.share(part):5.0%}"
                for part, words in PARTS.items()
            ),
            f"  {'(making a batch of views)':<32}{self.augment * 1e3:9.2f} ms, {where}",
        ]
        return rows + self.advice(execution)

    def advice(self, execution: ExecutionConfig) -> list[str]:
        """What bounds the run, and what to change, in a line or two."""
        device = torch.device(execution.device)
        cores = len(os.sched_getaffinity(0))
        if self.share("wait") > 0.15:
            more = (
                f"raise --workers (now {self.workers}, {cores} cores)"
                if self.workers < cores
                else "all cores make views already: lower --image-size, or leave blur out (--no-blur) where it is on"
            )
            return [f"Bound by the views: the steps wait {self.share('wait'):.0%} of their time. To do: {more}."]
        if self.share("other") > 0.15:
            return [
                "Bound by checks, logs and checkpoints. To do: raise --checkpoint-every, or write to a faster disk."
            ]
        if self.share("loss") > 0.25:
            return ["Bound by the loss. To do: a smaller --queue-size, or a larger backbone for the same queue."]
        if self.share("update") > 0.25:
            return ["Bound by optimiser, EMA and queue: their cost is per step. To do: a larger --batch-size."]
        threads = execution.threads or 1
        if device.type == "cpu" and self.cpu / self.total < 0.6 * threads:
            return [
                f"Bound by the encoders, which got {self.cpu / self.total:.1f} cores for {threads} threads: other "
                "programs use the machine. To do: stop them, or share the cores out (taskset, --threads)."
            ]
        timed = execution.reason  # what "auto" has compared already needs no advice
        todo = []
        if execution.precision != "bf16" and has_fast_bf16(device) and "bf16" not in timed:
            todo.append("--precision auto")
        if execution.layout != "channels-last" and "channels-last" not in timed:
            todo.append("--layout auto")
        if device.type == "cpu" and threads < cores:
            todo.append(f"--threads {cores}")
        if execution.compile == "off" and "compiled" not in timed:
            todo.append("--compile auto")
        todo.append("a smaller --backbone or --image-size")
        return [
            f"Bound by the encoders' own arithmetic ({self.share('forward-backward'):.0%}). "
            f"To try in a new run: {', '.join(todo)}."
        ]


class RunProfiler:
    """Profiles `MEASURED_STEPS` steps of a run after `WARM_STEPS` others, tells them, and lets go of the run.

    tell: is given the lines. A run that ends before then tells what there is.
    """

    def __init__(
        self, loader: TimedLoader, batch_size: int, execution: ExecutionConfig, tell: Callable[[str], None]
    ) -> None:
        self.loader, self.batch_size, self.execution, self.tell = loader, batch_size, execution, tell
        self.clock = StepClock()
        self.profile: Profile | None = None
        self._hooks = contextlib.ExitStack()
        self._warm = False

    def start(self, state: TrainState) -> None:
        """Put the hooks in place."""
        self._hooks.enter_context(self.clock.watching(state))

    def mark(self, part: str) -> None:
        """As `StepClock.mark`; nothing once the profile is told."""
        if self.profile is None:
            self.clock.mark(part)

    def end_step(self) -> None:
        """A step is done: maybe the last one of the warm steps, maybe the last one that is measured."""
        if self.profile is not None:
            return
        self.clock.end_step()
        if not self._warm and self.clock.steps == WARM_STEPS:
            self._warm = True
            self.clock.restart()
            self.loader.restart()
        elif self.clock.steps == MEASURED_STEPS:
            self.finish()

    def finish(self) -> None:
        """Tell what was measured, if that was not done."""
        self._hooks.close()
        if self.profile is not None or not (self.clock.steps and self.loader.made):
            return
        self.clock.mark("other")
        seconds = dict(self.clock.seconds)
        if self.loader.workers == 0:  # views of several steps may be made in one of them: each step bears its share
            seconds["wait"] = self.loader.seconds
        self.profile = Profile(
            self.clock.steps,
            self.batch_size,
            seconds,
            self.loader.seconds / self.loader.made,
            self.loader.workers,
            self.clock.cpu,
        )
        for line in self.profile.lines(self.execution):
            self.tell(line)
