"""The verb `replay`: the captured step of a run that diverged, executed again."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mocokit.api.opening import Source, Store, build_store, open_store
from mocokit.api.starting import begin_from_weights, same_images
from mocokit.data.loader import Batch, BatchLoader, BatchPlan
from mocokit.errors import DataError, DivergedError, UsageError
from mocokit.training.checkpoint import Found, checkpoint_steps, find_checkpoint, load_checkpoint
from mocokit.training.diagnosis import Finding, Watch
from mocokit.training.failure import as_json, read_failure
from mocokit.training.loop import Schedule, StopRequest, run_training
from mocokit.training.precision import num_threads
from mocokit.training.runfolder import RunFolder, claim_run, open_run
from mocokit.training.runlog import Progress, RunLog, read_losses
from mocokit.training.settings import RunConfig, from_yaml
from mocokit.training.state import TrainState, make_encoder, make_state, pick_device


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of a captured step when it was executed again.

    from_step: the checkpoint it was reached from (0: the start). compared, equal: steps on the way whose loss the run
    had logged, and how many of them came out the same to the last digit. finding: where the first number that is not
    finite is, None when the step was finite this time.
    """

    step: int
    from_step: int
    compared: int
    equal: int
    reproduced: bool
    loss: float
    gradient_norm: float
    finding: Finding | None
    images: tuple[str, ...]
    """Names of the images in `finding`."""
    ranks: int = 1
    """Processes that trained the run; the replay is one process with all images of a step."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        plain = dataclasses.asdict(self)
        return plain | {"loss": as_json(self.loss), "gradient_norm": as_json(self.gradient_norm)}

    def text(self) -> str:
        """In sentences."""
        way = "the start" if self.from_step == 0 else f"checkpoint step-{self.from_step}"
        lines = [f"Went from {way} to step {self.step}; nothing was written."]
        if self.ranks > 1:
            lines.append(f"The run had {self.ranks} ranks; here one process took their steps: last digits may differ.")
        if self.compared:
            lines.append(f"Losses on the way: {self.equal} of {self.compared} equal to the run's log, digit by digit.")
        if not self.reproduced:
            lines.append(
                f"Step {self.step} is finite this time (loss {self.loss:.6g}). What stopped the run is not in its "
                "data, settings or weights: look at versions, the machine, its memory, and files changed since."
            )
            return "\n".join(lines) + "\n"
        lines.append(f"Step {self.step} is not finite again: loss {self.loss}, gradient norm {self.gradient_norm}.")
        if self.finding is not None:
            found = self.finding
            of = f" ({found.not_finite:,} of {found.count:,} numbers)" if found.count > 1 else ""
            lines.append(f"It begins in: {found.stage}{'' if found.where == found.stage else ' ' + found.where}{of}")
        if self.images:
            lines.append("Images: " + ", ".join(map(repr, self.images)))
        return "\n".join(lines) + "\n"


def replay(run: str | Path, *, data: str | Path | None = None, quiet: bool = False) -> Replay:
    """Execute the captured step of a run that diverged again, from the checkpoint before it, and say where it begins.

    run: a run folder with `failure/failure.json`; nothing in it is changed. data: where the images lie now, if
    elsewhere.
    Raises UsageError (no captured failure, or its checkpoint is gone), DataError (other images), DamagedError.
    """
    folder = open_run(Path(run))
    facts = read_failure(folder)
    config = from_yaml(folder.config)
    progress = Progress(quiet=quiet)
    step = int(facts["step"])
    found = _checkpoint_before(folder, step)
    source, config = same_images(str(data or config.data.spec), config, folder)
    device = pick_device(config.execution.device)
    encoder = make_encoder(config.encoder, config.views.size, config.train.seed).to(device)
    if found is None:
        with tempfile.TemporaryDirectory() as aside:  # a pickle's tensors would be put there
            begin_from_weights(config, encoder, RunFolder(Path(aside)), progress, resume=False)
    state = make_state(config, encoder)
    if found is not None:
        load_checkpoint(state, found)
    start = state.step
    plan = BatchPlan(source.index.ids, config.train.batch_size, config.train.seed)
    loader = BatchLoader(_pixels(folder, config, source), source.index, config.views, plan, workers=0)
    outcome = _go(state, loader, config, step, device, progress)
    compared, equal = _compare(folder, outcome.losses)
    names = dict(zip(source.index.ids.tolist(), source.index.names, strict=True))
    finding = outcome.watch.finding if outcome.watch else None
    return Replay(
        step=step,
        from_step=start,
        compared=compared,
        equal=equal,
        reproduced=outcome.error is not None,
        loss=outcome.error.loss if outcome.error else outcome.losses[step],
        gradient_norm=outcome.error.gradient_norm if outcome.error else 0.0,
        finding=finding if outcome.error else None,
        ranks=int(facts.get("ranks", 1)),
        images=tuple(names[i] for i in finding.image_ids) if finding and outcome.error else (),
    )


def _checkpoint_before(folder: RunFolder, step: int) -> Found | None:
    """The newest checkpoint at or before the step; None where the run had none yet."""
    there = checkpoint_steps(folder.checkpoints)
    before = [s for s in there if s <= step]
    if before:
        return find_checkpoint(folder.checkpoints, before[-1])
    if there:
        raise UsageError(
            f"{folder.path} went on after the failure at step {step}: its oldest checkpoint is step-{there[0]}, "
            "later than that. Nothing can be replayed any more."
        )
    return None


def _pixels(folder: RunFolder, config: RunConfig, source: Source) -> Store:
    """The run's pixel cache where it is whole, else the pixels decoded into memory: a replay writes nothing."""
    cache = folder.path / "cache" / "pixels.u8"
    try:
        return open_store(source, side=config.data.side, cache=cache, max_bad=config.data.max_bad)
    except DataError:
        return build_store(source, side=config.data.side, cache=None, max_bad=config.data.max_bad)


@dataclass(slots=True)
class _Outcome:
    losses: dict[int, float]
    error: DivergedError | None = None
    watch: Watch | None = None


def _go(
    state: TrainState, loader: BatchLoader, config: RunConfig, step: int, device: torch.device, progress: Progress
) -> _Outcome:
    """The training itself up to the captured step, its log in a folder that is thrown away."""
    outcome = _Outcome({})
    plan = loader.plan
    schedule = Schedule(
        steps_per_epoch=plan.steps_per_epoch,
        total_steps=plan.steps_per_epoch * config.train.epochs,
        checkpoint_every=plan.steps_per_epoch * config.train.epochs,
        eval_every=config.train.epochs,
    )
    with (
        tempfile.TemporaryDirectory() as aside,
        num_threads(config.execution.threads or torch.get_num_threads()),
        contextlib.ExitStack() as stack,
    ):
        run, lock = claim_run(Path(aside) / "replay", "new")
        stack.enter_context(lock)
        log = stack.enter_context(contextlib.closing(RunLog(run)))

        def batches(start: int, _: int) -> Iterator[Batch]:
            for number in range(start, step + 1):
                batch = loader.make(number).to(device)
                if number == step:
                    outcome.watch = stack.enter_context(Watch(state, batch))
                progress.show(f"step {number} of {step}")
                yield batch

        try:
            run_training(
                state,
                batches,
                contrast=config.contrast,
                optim=config.optim,
                schedule=schedule,
                accumulate=config.train.accumulate,
                log=log,
                progress=Progress(quiet=True),
                save=lambda _: None,
                on_eval=None,
                name_of=lambda ids: "",
                stop=StopRequest(),
            )
        except DivergedError as error:
            outcome.error = error
            if outcome.watch is not None:
                outcome.watch.conclude(error)
        outcome.losses = {int(row["step"]): float(row["loss"]) for row in read_losses(run)}
    return outcome


def _compare(folder: RunFolder, losses: dict[int, float]) -> tuple[int, int]:
    """How many of the replayed steps the run has logged, and how many of those have the same loss."""
    logged = {int(row["step"]): float(row["loss"]) for row in read_losses(folder)}
    shared = sorted(set(logged) & set(losses))
    return len(shared), sum(logged[s] == losses[s] for s in shared)
