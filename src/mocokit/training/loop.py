"""The training loop: batch, step, log, maybe evaluate, maybe save, stop when asked to.

It knows neither data sets nor evaluation: batches come from an iterator, and what happens at an evaluation or at
the end is a callable handed in.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from mocokit.contrast.batch_norm import Shuffle, batch_norms, deal, shuffle_by
from mocokit.contrast.health import HealthProbe, gradient_norm
from mocokit.contrast.losses import Contrast
from mocokit.contrast.steps import ContrastConfig, ViewPair, step_of
from mocokit.errors import DivergedError, InterruptedRunError, UsageError
from mocokit.training.distributed import Ranks
from mocokit.training.optim import OptimConfig, lr_at
from mocokit.training.runlog import Progress, RunLog, StepLine, duration
from mocokit.training.state import TrainState
from mocokit.training.trace import Recorder, recording

SAME_EVERY = 100
"""Steps between comparisons of what the ranks hold."""


class LoadedBatch(Protocol):
    """What the loop needs of a batch."""

    @property
    def x_q(self) -> Tensor: ...
    @property
    def x_k(self) -> Tensor: ...
    @property
    def ids(self) -> Tensor: ...
    @property
    def groups(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long, and when what happens. Steps are optimiser steps; `eval_every` counts epochs."""

    steps_per_epoch: int
    total_steps: int
    checkpoint_every: int
    eval_every: int


class Clock(Protocol):
    """What a profile needs of the loop: which part of a step runs from now on, and when a step is done."""

    def mark(self, part: str) -> None: ...
    def end_step(self) -> None: ...


class _NoClock:
    """Measures nothing."""

    def mark(self, part: str) -> None:
        pass

    def end_step(self) -> None:
        pass


class StopRequest:
    """SIGINT, SIGTERM and SIGUSR1 ask the loop to stop after the step it is in; a second SIGINT ends it at once.

    SIGUSR1 is what batch systems send some time before they end a job.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: signals are the host program's business
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.signal == signal.SIGINT and number == signal.SIGINT:
            os._exit(128 + number)  # saving is atomic, so leaving in the middle of it tears nothing
        self.signal = number


class QueryUpdate:
    """The query update that a step asks for: backward, a check that all is finite, one optimiser step.

    Keeps what the micro-batches' losses said, for the log: loss, chance (None where there is none), masked, and the
    gradient's norm. parts: how many losses will come to this rank; the mean of all ranks' is what is descended.
    Parameters must come without gradients, and are left without.
    """

    def __init__(
        self,
        state: TrainState,
        lr: float,
        parts: int,
        batch_names: Callable[[], str],
        ranks: Ranks | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.state, self.lr, self.parts, self.batch_names = state, lr, parts, batch_names
        self.ranks, self.clock = ranks or Ranks(), clock or _NoClock()
        self.loss = self.masked = self.gradient_norm = 0.0
        self.chance: float | None = 0.0

    def __call__(self, losses: Iterable[Contrast]) -> None:
        """Raises DivergedError, on all ranks and before anything is updated, when a loss or gradient is not finite."""
        optimizer, trained = self.state.optimizer, self.state.pair.trained.values()
        for contrast in losses:
            torch.autograd.backward(contrast.loss if self.parts == 1 else contrast.loss / self.parts)
            self.clock.mark("other")
            self.loss += contrast.loss.item() / self.parts
            chance = contrast.chance()
            self.chance = None if chance is None or self.chance is None else self.chance + chance / self.parts
            self.masked += contrast.masked_share() / self.parts
        self.ranks.average_([p.grad for p in trained if p.grad is not None])
        own_loss, own_chance = self.loss, self.chance
        self.loss, chance, self.masked = self.ranks.means([self.loss, own_chance or 0.0, self.masked])
        self.chance = None if own_chance is None else chance
        self.gradient_norm = gradient_norm(trained)  # the same on every rank, as the losses are
        if not (math.isfinite(self.gradient_norm) and math.isfinite(self.loss)):
            raise DivergedError(
                f"The loss or its gradient is not finite at step {self.state.step} (loss {self.loss}, gradient norm "
                f"{self.gradient_norm}); nothing was updated. Images of the batch: {self._suspects(own_loss)}. "
                "Lower --lr, raise --warmup-epochs or --temperature, or look at these images; the last checkpoint is "
                "unharmed.",
                loss=self.loss,
                gradient_norm=self.gradient_norm,
            )
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        self.clock.mark("update")
        optimizer.step()
        for parameter in trained:  # all that the optimiser has; not held while the next step builds its graph
            parameter.grad = None

    def _suspects(self, own_loss: float) -> str:
        """The images of the first rank whose own loss is not finite; where there is none, of rank 0."""
        told = self.ranks.tell_all([math.isfinite(own_loss), self.batch_names()])
        return str(next((names for finite, names in told if not finite), told[0][1]))


def micro_batches(
    batch: LoadedBatch, count: int, shuffle: Callable[[Tensor], Shuffle | None] = lambda ids: None
) -> list[ViewPair]:
    """A step's images in `count` parts of equal size, in their order. shuffle: makes a part's, from its ids."""
    if count == 1:
        return [ViewPair(batch.x_q, batch.x_k, batch.ids, batch.groups, shuffle=shuffle(batch.ids))]
    fields = (batch.x_q, batch.x_k, batch.ids, batch.groups)
    cut = zip(*(tensor.chunk(count) for tensor in fields), strict=True)
    return [ViewPair(q, k, ids, groups, shuffle=shuffle(ids)) for q, k, ids, groups in cut]


def bn_shuffle(contrast: ContrastConfig, state: TrainState, ranks: Ranks) -> Callable[[Tensor], Shuffle | None]:
    """The fixed deal of a key batch over the groups of batch norm, those of all ranks.

    None where there is one group, or no batch norm, or `shuffle_bn` is off, or the method has no such shuffle. Raises
    UsageError for batch norm that shares its statistics between ranks.
    """
    groups, norms = contrast.bn_groups * ranks.size, batch_norms(state.pair.key)
    if groups == 1 or not (contrast.has_queue and contrast.shuffle_bn and norms):
        return lambda ids: None
    if any(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms):
        raise UsageError(
            "The backbone has SyncBatchNorm, which normalises over all ranks: shuffling keys over them has no effect "
            "then. Add --no-shuffle-bn, or take another --backbone."
        )
    shuffle_by_order = shuffle_by if ranks.size == 1 else ranks.shuffle_by
    return lambda ids: shuffle_by_order(deal(len(ids) * ranks.size, groups).to(ids.device))


def run_training(
    state: TrainState,
    batches: Callable[[int, int], Iterator[LoadedBatch]],
    *,
    contrast: ContrastConfig,
    optim: OptimConfig,
    schedule: Schedule,
    accumulate: int = 1,
    ranks: Ranks | None = None,
    log: RunLog | None,
    progress: Progress,
    save: Callable[[TrainState], None],
    on_eval: Callable[[TrainState], dict[str, float]] | None,
    name_of: Callable[[Tensor], str],
    stop: StopRequest,
    probe: HealthProbe | None = None,
    track: Callable[[Mapping[str, Any]], None] = lambda row: None,
    recorder: Recorder | None = None,
    clock: Clock | None = None,
) -> None:
    """Train from `state.step` to the end of the schedule.

    batches(start, stop) yields this rank's batches of those steps, each taken in `accumulate` micro-batches. ranks: all
    processes of the run; None for one alone. log: None on ranks that write nothing. save: commit a checkpoint; called
    on rank 0 alone. on_eval: measure the encoder, every `schedule.eval_every` epochs and at the end; its numbers join
    the epoch's row of metrics. name_of: names for a batch's ids, for error messages. probe: measures health now and
    then. track: is given every row of metrics and of health. recorder: records the steps that it wants. clock: is told
    which part of a step runs (`profiling.PARTS`). Raises InterruptedRunError after saving when a signal came,
    DivergedError when the loss is not finite, RanksApartError when the ranks do not hold the same, RankLostError.
    """
    ranks, clock = ranks or Ranks(), clock or _NoClock()
    take_step = step_of(contrast)
    scoring = contrast.scoring()
    epoch_start = state.step - state.step % schedule.steps_per_epoch
    lines = log.losses_from(epoch_start) if log is not None and state.step > epoch_start else []
    meter = _Meter()
    shuffle = bn_shuffle(contrast, state, ranks)
    _require_same(state, ranks)
    state.pair.train()
    meter.waiting()
    clock.mark("wait")
    for batch in batches(state.step, schedule.total_steps):
        meter.working()
        clock.mark("other")
        ranks.where = f"step {state.step}"
        parts = micro_batches(batch, accumulate, shuffle)
        m = contrast.m_at(state.step, schedule.total_steps)
        lr = lr_at(optim, state.step, schedule.total_steps, schedule.steps_per_epoch)
        filled = state.queue is not None and state.queue.fill > 0
        losses = len(parts) * contrast.losses_per_part
        update = QueryUpdate(state, lr, losses, lambda ids=batch.ids: name_of(ids), ranks, clock)  # type: ignore[misc]
        with recording(recorder, state, parts, update, ranks.gather, m) as (update_query_, gather):
            clock.mark("update")
            take_step(
                state.pair,
                state.queue,
                parts,
                scoring=scoring,
                m=m,
                step=state.step,
                update_query_=update_query_,
                gather=gather,
            )
            clock.mark("other")
        line = StepLine(
            state.step,
            update.loss,
            update.chance,
            lr,
            m if contrast.has_momentum else None,
            state.queue.fill if state.queue else None,
            # On the very first step only the own key is left out, and that one is the positive: nothing was masked.
            (update.masked if filled else 0.0) if state.queue else None,
        )
        state.step += 1
        if state.step % SAME_EVERY == 0:
            _require_same(state, ranks)
        lines.append(line)
        if log is not None:
            log.step(line)
        if log is not None and probe is not None:
            _look(probe, state, update, schedule, log, progress, track)
        meter.done(len(batch.ids) * ranks.size)
        last = state.step == schedule.total_steps
        progress.show(partial(_progress_line, line, state, schedule, meter), final=last)

        epoch, inside = divmod(state.step, schedule.steps_per_epoch)
        if inside == 0:
            row = _epoch_row(lines, state, schedule, meter)
            if on_eval is not None and (last or epoch % schedule.eval_every == 0):
                row |= on_eval(state)
                state.pair.train()
            if log is not None:
                log.metrics(row)
            track(row)
            lines = []
            meter = _Meter()
            ranks.wait()  # evaluation is rank 0's and may take long
        # Read once: a signal that comes between saving and leaving waits for the next step. Every rank hears it.
        asked = ranks.highest(stop.signal or 0) or None
        if asked is not None or last or state.step % schedule.checkpoint_every == 0:
            if ranks.first:
                save(state)
            ranks.wait()
        if asked is not None and not last:
            raise InterruptedRunError(
                f"Stopped by {signal.Signals(asked).name} after step {state.step} of {schedule.total_steps}; "
                "everything is saved. Continue with --resume.",
                asked,
            )
        del batch, parts, update, update_query_, gather  # the views need not be there while the next ones are made
        meter.waiting()
        clock.end_step()
        clock.mark("wait")


def _require_same(state: TrainState, ranks: Ranks) -> None:
    if ranks.size > 1:
        ranks.require_same("Weights or queue", state.fingerprint())


def _look(
    probe: HealthProbe,
    state: TrainState,
    update: QueryUpdate,
    schedule: Schedule,
    log: RunLog,
    progress: Progress,
    track: Callable[[Mapping[str, Any]], None],
) -> None:
    """Let the probe measure if it is time to, and say what is new."""
    row = probe.after_step(
        state.pair,
        state.queue,
        step=state.step,
        total_steps=schedule.total_steps,
        epoch=state.step / schedule.steps_per_epoch,
        loss=update.loss,
        chance=update.chance,
        gradient=update.gradient_norm,
    )
    if row is None:
        return
    log.health(row)
    track({"step": row["step"], "health": {k: v for k, v in row.items() if k != "step"}})
    for text in probe.news():
        progress.say(text)


class _Meter:
    """Images per second and the share of time spent waiting for batches."""

    def __init__(self) -> None:
        self.images = self.steps = 0
        self.wait = self.work = 0.0
        self._mark = time.perf_counter()

    def waiting(self) -> None:
        self._mark = time.perf_counter()

    def working(self) -> None:
        now = time.perf_counter()
        self.wait += now - self._mark
        self._mark = now

    def done(self, images: int) -> None:
        now = time.perf_counter()
        self.work += now - self._mark
        self._mark = now
        self.images += images
        self.steps += 1

    @property
    def rate(self) -> float:
        return self.images / max(self.wait + self.work, 1e-9)

    @property
    def seconds_per_step(self) -> float:
        return (self.wait + self.work) / max(self.steps, 1)

    @property
    def data_wait(self) -> float:
        return self.wait / max(self.wait + self.work, 1e-9)


def _progress_line(line: StepLine, state: TrainState, schedule: Schedule, meter: _Meter) -> str:
    epochs = schedule.total_steps / schedule.steps_per_epoch
    left = (schedule.total_steps - state.step) * meter.seconds_per_step
    chance = "" if line.chance is None else f" (chance {line.chance:.3f})"
    queue = f"  queue {line.fill}/{state.queue.K}" if state.queue else ""
    return (
        f"epoch {state.step / schedule.steps_per_epoch:.1f}/{epochs:g}  step {state.step}/{schedule.total_steps}  "
        f"loss {line.loss:.3f}{chance}{queue}  "
        f"{meter.rate:.0f} img/s  data_wait {meter.data_wait:.0%}  "
        f"ETA {duration(left)}"
    )


def _epoch_row(lines: list[StepLine], state: TrainState, schedule: Schedule, meter: _Meter) -> dict[str, Any]:

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return {
        "epoch": state.step / schedule.steps_per_epoch,
        "step": state.step,
        "loss": mean([line.loss for line in lines]),
        "chance": mean([line.chance for line in lines]),
        "lr": lines[-1].lr,
        "m": lines[-1].m,
        "queue_fill": lines[-1].fill,
        "masked_share": mean([line.masked for line in lines]),
        "images_per_second": round(meter.rate, 1),
        "data_wait": round(meter.data_wait, 4),
    }
