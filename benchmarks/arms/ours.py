"""mocokit: `run_training` over `BatchLoader`, put together as `mocokit pretrain` does, with its log and health probe.

Left out, as in every other arm: checkpoints and evaluation. Own older keys are left out of the negatives, which is
the default and costs this arm a search that the others do without; images of the gate have no id.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks import cases
from benchmarks.arms import Order, Step
from benchmarks.pace import Clock, Pace
from torch import Tensor

from mocokit.api.measuring import probe_of
from mocokit.api.opening import build_store, configure
from mocokit.contrast.encoders import Encoder
from mocokit.contrast.key_queue import NO_ID
from mocokit.contrast.steps import ViewPair, step_of
from mocokit.data.loader import Batch, BatchLoader, BatchPlan
from mocokit.options import PretrainOptions
from mocokit.training.allocator import keep_freed_memory
from mocokit.training.distributed import Ranks, settle_execution
from mocokit.training.loop import QueryUpdate, Schedule, StopRequest, run_training
from mocokit.training.precision import num_threads, view_threads
from mocokit.training.profiling import StepClock
from mocokit.training.runfolder import RunFolder
from mocokit.training.runlog import Progress, RunLog
from mocokit.training.state import TrainState, make_encoder, make_state

ENDLESS = 10**9


class OurClock(Clock):
    """The pace's clock as mocokit's own: its hooks are there only while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.state: TrainState | None = None
        self._hooks = contextlib.ExitStack()

    def start(self) -> None:
        """As `Clock.start`."""
        assert self.state is not None
        watcher = StepClock()
        watcher.mark = self.mark  # type: ignore[method-assign]
        self._hooks.enter_context(watcher.watching(self.state))
        super().start()

    def stop(self) -> dict[str, float]:
        """As `Clock.stop`."""
        self._hooks.close()
        return super().stop()


class Ours:
    """The arm. recipe: other settings than the case's, where the same mathematics is not the question."""

    def __init__(self, order: Order, recipe: PretrainOptions | None = None) -> None:
        self.order, self.clock = order, OurClock()
        case, start = order.what, time.perf_counter()
        options = recipe or PretrainOptions(
            recipe="moco-v2", epochs=1, batch_size=case.batch, seed=order.seed, backbone=case.backbone,
            image_size=case.size, queue_size=case.K, temperature=case.T, momentum=case.m, queue_init="random",
            head=case.head, dim=case.dim, lr=case.lr, sgd_momentum=cases.SGD_MOMENTUM,
            weight_decay=cases.WEIGHT_DECAY, schedule="constant", threads=order.threads, workers=order.workers,
            precision=order.precision, layout=order.layout,
        )  # fmt: skip
        self.source, config = configure(str(cases.data_of(case, order.home)), options, {})
        store = build_store(self.source, side=config.data.side, cache=None, max_bad=0.0)
        decoded = time.perf_counter() - start
        plan = BatchPlan(self.source.index.ids, config.train.batch_size, order.seed)
        self.loader = BatchLoader(store, self.source.index, config.views, plan, workers=0)
        self._first = make_encoder(config.encoder, case.size, order.seed) if recipe else cases.network(case, order.seed)
        chosen = settle_execution(self._first, lambda: self.loader.make(0).x_q, config.execution, Ranks(), steps=1)
        self.config, self.execution = config, chosen
        self.loader.workers = view_threads(order.workers, chosen)
        self.facts: dict[str, Any] = {
            "precision": chosen.precision,
            "layout": chosen.layout,
            "threads": chosen.threads,
            "workers": self.loader.workers,
            "chosen by": chosen.reason,
            "seconds to decode": round(decoded, 3),
        }

    def _state(self, encoder: Encoder, **execution: Any) -> TrainState:
        config = dataclasses.replace(self.config, execution=dataclasses.replace(self.execution, **execution))
        state = make_state(config, encoder)
        if state.queue is not None and config.contrast.queue_init == "random":
            state.queue.vectors.copy_(cases.first_queue(self.order.what, self.order.seed))
        return state

    @property
    def encoder(self) -> Encoder:
        """The network that is being trained."""
        assert self.clock.state is not None
        return self.clock.state.pair.query

    def gate(self) -> Step:
        """One real step up to its optimiser, which is to get these gradients."""
        state = self._state(copy.deepcopy(self._first), precision="fp32", layout="contiguous")
        x_q, x_k = cases.gate_batch(self.order.what)
        unknown = torch.full((len(x_q),), NO_ID)
        update = QueryUpdate(state, 0.0, 1, lambda: "the gate's batch")
        gradients: list[Tensor] = []

        def take(closure: Any = None) -> None:
            gradients.extend(p.grad for p in state.pair.trained.values() if p.grad is not None)

        state.optimizer.step = take  # type: ignore[assignment, method-assign]
        step_of(self.config.contrast)(
            state.pair,
            state.queue,
            [ViewPair(x_q, x_k, unknown, unknown)],
            scoring=self.config.contrast.scoring(),
            m=self.order.what.m,
            step=0,
            update_query_=update,
            gather=lambda keys: keys,
        )
        return Step(update.loss, gradients)

    def train(self, pace: Pace) -> None:
        """The library's loop, until the pace ends. It trains the arm's own network: once, and after the gate."""
        state = self.clock.state = self._state(self._first)
        per_epoch = self.loader.plan.steps_per_epoch
        steps = per_epoch * self.config.train.epochs if self.config.train.epochs > 1 else ENDLESS
        schedule = Schedule(per_epoch, steps, ENDLESS, ENDLESS)

        def batches(start: int, stop: int) -> Iterator[Batch]:
            yield from pace(self.loader.batches(start, stop))

        keep_freed_memory()
        with (
            tempfile.TemporaryDirectory() as folder,
            num_threads(self.execution.threads or 1),
            contextlib.closing(RunLog(RunFolder(Path(folder)))) as log,
            StopRequest() as stop,
        ):
            run_training(
                state,
                batches,
                contrast=self.config.contrast,
                optim=self.config.optim,
                schedule=schedule,
                log=log,
                progress=Progress(quiet=True),
                save=lambda state: None,
                on_eval=None,
                name_of=str,
                stop=stop,
                probe=probe_of(self.loader, self.config, schedule, [], torch.device("cpu")),
                clock=self.clock,
            )


make = Ours
