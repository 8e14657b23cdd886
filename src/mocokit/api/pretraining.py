"""The verb `pretrain`: one run from its folder's lock to its last picture."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mocokit import config as configuration
from mocokit import files
from mocokit.api.measuring import monitor_of, open_monitor, probe_of
from mocokit.api.opening import VIDEO_TABLES, Store, build_store, configure, open_store, options_from, read_config
from mocokit.api.starting import (
    begin_from_weights,
    digests,
    note_change,
    note_passed_over,
    remember_images,
    same_images,
)
from mocokit.api.telling import StarvingRemark, announce, save_pairs
from mocokit.api.tracing import planned, run_recorder
from mocokit.contrast.batch_norm import batch_norms
from mocokit.data.loader import BatchLoader, BatchPlan
from mocokit.data.pixels import SkippedSample, write_skipped
from mocokit.data.rendering import compile_views
from mocokit.errors import (
    DamagedError,
    InterruptedRunError,
    MocokitError,
    StorageError,
    UsageError,
)
from mocokit.options import PretrainOptions
from mocokit.reporting import plots
from mocokit.training import runlog
from mocokit.training.allocator import keep_freed_memory
from mocokit.training.checkpoint import (
    check_room,
    checkpoint_steps,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from mocokit.training.distributed import RANK_TIMEOUT, Ranks, open_ranks, settle_execution
from mocokit.training.environment import environment
from mocokit.training.failure import FailureCapture
from mocokit.training.launch import read_launch
from mocokit.training.loop import Schedule, StopRequest, bn_shuffle, run_training
from mocokit.training.precision import num_threads, view_threads
from mocokit.training.profiling import RunProfiler, TimedLoader
from mocokit.training.run import Run, load_run
from mocokit.training.runfolder import RunFolder, claim_run
from mocokit.training.settings import RunConfig, from_yaml, to_yaml
from mocokit.training.state import TrainState, make_encoder, make_state
from mocokit.training.trackers import check_trackers, open_trackers


def pretrain(
    data: str | Path,
    out: str | Path,
    *,
    options: PretrainOptions | None = None,
    config_file: Path | None = None,
    monitor: str | None = None,
    track: Sequence[str] = (),
    trace: str | None = None,
    profile: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    accept_data_change: bool = False,
    stop_after: int | None = None,
    quiet: bool = False,
    rank_timeout: float = RANK_TIMEOUT,
    claimed: tuple[RunFolder, files.RunLock] | None = None,
    **flags: Any,
) -> Run:
    """Train an encoder on unlabelled images by momentum contrast; the run folder is `out`.

    data: a folder, a table (.csv, .txt, .parquet), .npz arrays or a generated set. options, or the same names as
    keywords (`epochs=20, queue_size=4096`): what changes in the recipe. monitor: labelled data whose validation
    split is read by kNN now and then, for the curve; labels never enter training. track: trackers (tensorboard, wandb,
    mlflow) that get every number, in `out`/trackers. trace: steps to record for the step viewer, as `plan_windows`
    takes them; into `out`/trace.json. profile: measure where the time of some warm steps goes, and say what bounds the
    run. resume: continue the run in `out`
    exactly where its last checkpoint stands. overwrite: replace an earlier run there. accept_data_change: go on
    although the images are not those the run started with. stop_after: save after so many steps of the run and raise
    InterruptedRunError, as a signal does.

    Under torchrun every process calls this with the same arguments and they train together; rank 0 alone writes.
    rank_timeout: seconds that one waits for the others within a step.

    Raises UsageError, DataError, StorageError, DivergedError, LockedError, InterruptedRunError (after saving),
    RankLostError, RanksApartError.
    """
    options = options_from(options, flags)
    keep_freed_memory()
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them.")
    first = read_launch().rank == 0
    run, lock = RunFolder(Path(out)), None
    if first:
        run, lock = claimed or claim_run(run.path, "resume" if resume else "overwrite" if overwrite else "new")
    progress = runlog.Progress(quiet=quiet, silent=not first)
    with lock or contextlib.nullcontext(), open_ranks(rank_timeout, runlog.Progress(quiet=quiet).say) as ranks:
        try:
            _pretrain(
                str(data),
                run,
                options,
                progress,
                ranks,
                config_file=config_file,
                monitor=monitor,
                track=track,
                trace=trace,
                profile=profile,
                resume=resume,
                accept_data_change=accept_data_change,
                stop_after=stop_after,
            )
        except BaseException as error:
            if first:
                _record_failure(run, error)
            raise
    return load_run(run.path)


def _stored(run: RunFolder, progress: runlog.Progress) -> RunConfig | None:
    """The configuration of the run to resume; None when it was stopped before anything was written down."""
    if run.config.exists():
        return from_yaml(run.config)
    if run.began:
        raise DamagedError(
            f"{run.config} is missing beside its checkpoints: it was removed, or an --overwrite was interrupted. "
            "Put it back, or start again with --overwrite."
        )
    progress.say(f"{run.path} was stopped before it began; starting it from the beginning.")
    return None


def _record_failure(run: RunFolder, error: BaseException) -> None:
    """status.json says how it ended, unless it tells of an earlier run that this attempt did not get to touch."""
    status = run.status()
    if run.began and status.get("state") not in (None, "running"):
        return
    stopped = isinstance(error, InterruptedRunError | KeyboardInterrupt)
    message = str(error) if isinstance(error, MocokitError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    steps = status.get("total_steps")
    with contextlib.suppress(StorageError):  # the disk may be what failed; the error itself is raised
        runlog.write_status(
            run,
            "interrupted" if stopped else "failed",
            max(checkpoint_steps(run.checkpoints), default=0),
            steps if isinstance(steps, int) else 0,
            message,
        )


def _pretrain(
    data: str,
    run: RunFolder,
    options: PretrainOptions,
    progress: runlog.Progress,
    ranks: Ranks,
    *,
    config_file: Path | None,
    monitor: str | None,
    track: Sequence[str],
    trace: str | None,
    profile: bool,
    resume: bool,
    accept_data_change: bool,
    stop_after: int | None,
) -> None:
    with ranks.phase("reading the settings and the list of images"):
        if ranks.first:
            check_trackers(track)
        stored = _stored(run, progress) if resume else None
        from_file = read_config(config_file)
        if stored is None:
            source, config = configure(
                data,
                options,
                from_file,
                lambda done, total: progress.show(f"looking at videos  {done}/{total}"),
                run.path / "cache" / VIDEO_TABLES,
            )
        else:
            if config_file is not None:
                raise UsageError(
                    "--config has no effect with --resume: the run keeps the configuration it started with."
                )
            asked_for = configuration.resumed(stored, options)
            source, config = same_images(data, asked_for, run, accept_change=accept_data_change)
        _check_shares(config, ranks)
    ranks.require_same("The images or settings", config.digest())
    pixels: dict[str, Any] = {
        "side": config.data.side,
        "cache": run.path / "cache" / "pixels.u8",
        "max_bad": config.data.max_bad,
    }
    store = ranks.first_then_others(
        "reading the pixels",
        lambda: build_store(
            source,
            **pixels,
            progress=lambda done, total: progress.show(f"reading images  {done}/{total}"),
        ),
        lambda: open_store(source, **pixels),
    )
    batch_plan = BatchPlan(
        source.index.ids, config.train.batch_size, config.train.seed, rank=ranks.rank, ranks=ranks.size
    )
    with ranks.phase("making the networks"):
        device = ranks.device(config.execution.device)
        encoder = make_encoder(config.encoder, config.views.size, config.train.seed).to(device)
    begin = functools.partial(begin_from_weights, config, encoder, run, progress, resume=stored is not None)
    config = ranks.first_then_others("reading the weights to start from", begin, begin)
    progress.show("making ready to make views (loops are compiled once on a machine)")
    compile_views()
    if stored is None:
        config = _measured(config, from_file.get("views", {}), store)
        loader = BatchLoader(store, source.index, config.views, batch_plan, workers=0)
        chosen = settle_execution(
            encoder,
            lambda: loader.make(0).x_q.to(device),
            config.execution,
            ranks,
            steps=batch_plan.steps_per_epoch * config.train.epochs,
        )
        config = dataclasses.replace(config, execution=chosen)
    schedule = Schedule(
        steps_per_epoch=batch_plan.steps_per_epoch,
        total_steps=batch_plan.steps_per_epoch * config.train.epochs,
        checkpoint_every=config.train.checkpoint_every,
        eval_every=config.train.eval_every,
    )
    labelled = log = reading = tracker = probe = recorder = profiler = None
    with ranks.phase("making ready"):
        state = make_state(config, encoder)
        bn_shuffle(config.contrast, state, ranks)  # whether it can be done
        windows = planned(trace, config, schedule.total_steps, ranks.size) if trace else []
        if ranks.first:
            labelled = open_monitor(monitor, run, config) if monitor else None
            check_room(state, run.checkpoints)
            # Whatever the user can get wrong is found out by now: an earlier run is replaced only from here on.
            if stored is None:
                run.clear()
            passed_over = [SkippedSample(row=-1, name=name, reason=reason) for name, reason in source.report.broken]
            write_skipped(run.path / "skipped.jsonl", [*passed_over, *store.skipped])
    with contextlib.ExitStack() as stack:
        workers = view_threads(config.train.workers, config.execution)
        loader = (TimedLoader if profile else BatchLoader)(
            store, source.index, config.views, batch_plan, workers=workers
        )
        with ranks.phase("beginning"):
            if ranks.first:
                log = stack.enter_context(contextlib.closing(runlog.RunLog(run)))
            _restore_or_begin(run, config, state, log, progress, stored is not None, ranks)
            if ranks.first:
                assert log is not None
                if stored is None:
                    remember_images(run, source.index)
                elif stored.data.index_hash != config.data.index_hash:
                    note_change(run, stored, config, source.index, state.step)
                if state.step >= schedule.total_steps:
                    progress.say(f"{run.path} is complete ({state.step} steps); nothing to do.")
                announce(config, state, schedule, store, source, progress)
                if ranks.size == config.contrast.bn_groups == 1 and not config.contrast.shuffle_bn:
                    progress.warn("--no-shuffle-bn has no effect on one process without --bn-groups.")
                if ranks.size > 1:
                    progress.say(f"{ranks.size} ranks, {batch_plan.block} images of each step on every one.")
                runlog.write_status(run, "running", state.step, schedule.total_steps)
                if state.step == 0:
                    save_pairs(run, loader, store, config)
                reading = monitor_of(labelled, run, config) if labelled else None
                tracker = open_trackers(
                    track, run.path / "trackers", run_name=run.path.name, config=config.to_dict(), step=state.step
                )
                stack.callback(tracker.close)
                probe = probe_of(loader, config, schedule, log.health_rows(), device)
                if windows:
                    recorder = run_recorder(windows, config, run, source.index, store, resumed_at=state.step)
                    stack.callback(recorder.close)
        if isinstance(loader, TimedLoader):
            profiler = RunProfiler(loader, batch_plan.block, config.execution, progress.say)
            profiler.start(state)
            stack.callback(profiler.finish)
        facts = {
            "config": config.digest(),
            "order": config.contrast.order,
            "torch": torch.__version__,
            "ranks": ranks.size,
        }
        names = dict(zip(source.index.ids.tolist(), source.index.names, strict=True))

        capture = stack.enter_context(FailureCapture(run, config, state, names, ranks))

        def batches(start: int, end: int) -> Any:
            if stop_after is not None and stop_after <= start < end:
                raise InterruptedRunError(f"{run.path} is at step {start} already; nothing was done.", signal.SIGTERM)
            for batch in loader.batches(start, end):
                if batch.step + 1 == stop_after:
                    stop.signal = signal.SIGTERM
                batch = batch.to(device)
                capture.remember(batch)
                yield batch
                capture.forget()
                del batch  # its views need not be there while the next ones are made

        def save(now: TrainState) -> None:
            assert log is not None
            _save(now, run, facts, log, schedule.total_steps)

        with num_threads(config.execution.threads or torch.get_num_threads()), StopRequest() as stop:
            run_training(
                state,
                batches,
                contrast=config.contrast,
                optim=config.optim,
                schedule=schedule,
                accumulate=config.train.accumulate,
                ranks=ranks,
                log=log,
                progress=progress,
                save=save,
                on_eval=(lambda s: reading(s.pair.query, s.step)) if reading else None,
                name_of=lambda ids: ", ".join(names[i] for i in ids.tolist()[:4]) + (" ..." if len(ids) > 4 else ""),
                stop=stop,
                probe=probe,
                **({"track": StarvingRemark(tracker.log, progress, workers)} if tracker else {}),
                recorder=recorder,
                clock=profiler,
            )
        with ranks.phase("finishing"):
            if log is not None:
                plots.save_figure(
                    plots.results_figure(
                        runlog.read_losses(run),
                        log.rows(),
                        title=f"{config.recipe}, {config.encoder.backbone}",
                        monitor=reading.name if reading else None,
                        health=log.health_rows(),
                    ),
                    run.path / "results.png",
                )
                runlog.write_status(run, "completed", state.step, schedule.total_steps)


def _check_shares(config: RunConfig, ranks: Ranks) -> None:
    """Raise UsageError unless a step's images can be dealt out evenly, enough of them for batch norm."""
    train, groups = config.train, config.contrast.bn_groups
    parts = ranks.size * train.accumulate
    if train.batch_size % parts or train.batch_size < 2 * parts:
        raise UsageError(
            f"A batch of {train.batch_size} can't be dealt out to {ranks.size} ranks in {train.accumulate} parts of at "
            f"least 2 images each. Choose a --batch-size that is a multiple of {parts}."
        )
    if ranks.size > 1 and (train.batch_size // parts) % groups:
        raise UsageError(
            f"`bn_groups: {groups}` must divide the {train.batch_size // parts} images that a rank has at once: keys "
            "are shuffled over all groups of all ranks."
        )


def _measured(config: RunConfig, named: Mapping[str, Any], store: Store) -> RunConfig:
    """With the pixels' own mean and standard deviation, where the configuration file names none."""
    found = {name: value for name, value in store.statistics().items() if name not in named}
    return dataclasses.replace(config, views=dataclasses.replace(config.views, **found))  # type: ignore[arg-type]


def _restore_or_begin(
    run: RunFolder,
    config: RunConfig,
    state: TrainState,
    log: runlog.RunLog | None,
    progress: runlog.Progress,
    resume: bool,
    ranks: Ranks,
) -> None:
    """Load the newest checkpoint that verifies, or write down how the run begins (where there is a log to write)."""
    if resume:
        if not checkpoint_steps(run.checkpoints):
            if log is not None:
                log.cut({"loss": 0, "metrics": 0})
            return
        found = find_checkpoint(run.checkpoints)
        for reason in found.passed_over:
            progress.warn(f"passed over a damaged checkpoint: {reason}")
        if found.manifest.get("config") not in digests(run, from_yaml(run.config)):
            raise UsageError(
                f"{found.path} was written under another configuration than {run.config}. Restore config.yaml, or "
                "start another run with another --out."
            )
        if (before := found.manifest.get("torch")) != torch.__version__:
            progress.warn(
                f"the run was made with torch {before}, this is {torch.__version__}: going on may not be "
                "bit-identical to a run that was never interrupted."
            )
        if (count := found.manifest.get("ranks", 1)) != ranks.size:
            progress.warn(
                f"the checkpoint was written by {count} rank(s), now there are {ranks.size}: images and their order "
                "stay, but sums are taken in another order"
                + (", and batch norm sees other batches" if batch_norms(state.pair.query) else "")
                + ", so going on is not bit-identical to a run that was never interrupted."
            )
        load_checkpoint(state, found)
        if log is not None:
            note_passed_over(run, found)
            log.cut(found.manifest["log"])
        progress.say(f"Resuming {run.path} from step {state.step}.")
        return
    if log is None:
        return
    files.write_json(run.path / "environment.json", environment() | {"ranks": ranks.size})
    files.write_text(run.path / "command.txt", shlex.join(sys.argv) + "\n")
    files.write_text(run.config, to_yaml(config))


def _save(state: TrainState, run: RunFolder, facts: dict[str, Any], log: runlog.RunLog, total_steps: int) -> None:
    save_checkpoint(state, run.checkpoints, {**facts, "log": log.lengths()})
    runlog.write_status(run, "running", state.step, total_steps)
