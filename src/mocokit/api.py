"""The verbs as Python functions. The only module that puts the rooms together.

Each function does what the command of the same name does, prints progress to stderr unless `quiet`, and raises one
of the errors of `mocokit.errors`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import yaml
from torch import Tensor

from mocokit import config as configuration
from mocokit import files
from mocokit.contrast.encoders import EncoderPair
from mocokit.contrast.key_queue import KeyQueue
from mocokit.data.loader import BatchLoader, BatchPlan
from mocokit.data.packing import Packed
from mocokit.data.packing import pack as pack_source
from mocokit.data.pixels import PixelStore, build_pixel_store, side_for, write_skipped
from mocokit.data.sources import ImageSource, open_source
from mocokit.errors import (
    DamagedError,
    DataError,
    InterruptedRunError,
    MocokitError,
    StorageError,
    UsageError,
    did_you_mean,
)
from mocokit.evaluation.counterfactual import before_and_after_table, find_change
from mocokit.evaluation.frozen import FrozenPlan, FrozenResult, counterfactuals, evaluate_frozen
from mocokit.evaluation.labelled import LabelledData, open_labelled
from mocokit.evaluation.monitor import Monitor
from mocokit.evaluation.protocol import Ledger
from mocokit.evaluation.verdict import verdict_line
from mocokit.options import PretrainOptions
from mocokit.reporting import plots
from mocokit.training import runlog
from mocokit.training.checkpoint import (
    TrainState,
    check_room,
    checkpoint_steps,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from mocokit.training.environment import environment
from mocokit.training.loop import Schedule, StopRequest, run_training
from mocokit.training.optim import build_optimizer
from mocokit.training.precision import Execution, apply_execution, choose_execution, has_fast_bf16, num_threads
from mocokit.training.run import Run, load_run, make_encoder, pick_device
from mocokit.training.runfolder import RunFolder, claim_run
from mocokit.training.settings import ExecutionConfig, RunConfig, from_yaml, to_yaml

if TYPE_CHECKING:
    from mocokit.studies.ablation import Study
    from mocokit.studies.labs import LabResult

# ------------------------------------------------------------------------------------------------ pretrain


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do, without doing it. seconds: an estimate from a few timed steps."""

    config: RunConfig
    images: int
    steps_per_epoch: int
    total_steps: int
    queue_life_steps: float
    chance_loss: float
    masked_share: float
    parameters: int
    state_bytes: int
    pixel_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return plain | {"config": self.config.to_dict()}


def pretrain(
    data: str | Path,
    out: str | Path,
    *,
    options: PretrainOptions | None = None,
    config_file: Path | None = None,
    monitor: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    claimed: tuple[RunFolder, files.RunLock] | None = None,
    **flags: Any,
) -> Run:
    """Train an encoder on unlabelled images by momentum contrast; the run folder is `out`.

    data: a folder, a table (.csv, .txt, .parquet), .npz arrays or a generated set. options, or the same names as
    keywords (`epochs=20, queue_size=4096`): what changes in the recipe. monitor: labelled data whose validation
    split is read by kNN now and then, for the curve; labels never enter training. resume: continue the run in `out`
    exactly where its last checkpoint stands. overwrite: replace an earlier run there.

    Raises UsageError, DataError, StorageError, DivergedError, LockedError, InterruptedRunError (after saving).
    """
    options = _options(options, flags)
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them.")
    progress = runlog.Progress(quiet=quiet)
    run, lock = claimed or claim_run(Path(out), "resume" if resume else "overwrite" if overwrite else "new")
    with lock:
        try:
            stored = _stored(run, progress) if resume else None
            return _pretrain(str(data), run, options, config_file, monitor, stored, progress)
        except BaseException as error:
            _record_failure(run, error)
            raise


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


def plan(
    data: str | Path,
    *,
    options: PretrainOptions | None = None,
    config_file: Path | None = None,
    **flags: Any,
) -> Plan:
    """What `pretrain` would do with these arguments: the whole configuration, steps, memory, a time estimate.

    Opens the index and decodes one batch; writes nothing.
    """
    source, config = _configure(str(data), _options(options, flags), _read_config(config_file))
    rows = np.arange(min(config.train.batch_size, len(source.index)))
    sample = ImageSource(name=source.name, index=source.index.subset(rows), read=source.read)
    store = build_pixel_store(sample, side=config.data.side, cache=None, max_bad=1.0, workers=2)
    device = pick_device(config.execution.device)
    encoder = make_encoder(config.encoder, config.views.size, config.train.seed).to(device)
    loader = BatchLoader(store, sample.index, config.views, BatchPlan(sample.index.ids, len(rows), 0), workers=0)
    batch = loader.make(0)
    execution = config.execution
    chosen = choose_execution(
        encoder, batch.x_q.to(device), precision=execution.precision, layout=execution.layout, threads=execution.threads
    )
    apply_execution(encoder, chosen)
    with num_threads(chosen.threads):
        seconds = _time_step(encoder, batch.x_q.to(device))
    steps = config.data.images // config.train.batch_size
    K, S, D = config.contrast.K, config.data.images, config.encoder.dim
    parameters = sum(p.numel() for p in encoder.parameters())
    return Plan(
        config=dataclasses.replace(config, execution=_settled(chosen, device)),
        images=S,
        steps_per_epoch=steps,
        total_steps=steps * config.train.epochs,
        queue_life_steps=K / config.train.batch_size,
        chance_loss=math.log1p(K),
        masked_share=_masked_share(K, S),
        parameters=parameters,
        state_bytes=3 * 4 * parameters + K * (4 * D + 24),
        pixel_bytes=3 * config.data.side**2 * S,
        seconds=seconds * steps * config.train.epochs,
    )


def _time_step(encoder: torch.nn.Module, x: Tensor) -> float:
    import time

    encoder.train()
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        torch.autograd.backward(encoder(x).square().mean())
        with torch.no_grad():
            encoder(x)
        best = min(best, time.perf_counter() - start)
    return best


def _masked_share(K: int, S: int) -> float:
    """The share of queries with an own older key in the queue, averaged over an epoch (K <= S: K^2 / 2 S^2)."""
    return min(K * K / (2 * S * S), 1.0) if K <= S else 1.0 - S / (2 * K)


def _options(options: PretrainOptions | None, flags: dict[str, Any]) -> PretrainOptions:
    names = [field.name for field in dataclasses.fields(PretrainOptions)]
    for name in flags:
        if name not in names:
            raise UsageError(f"pretrain has no option '{name}'.{did_you_mean(name, names)}")
    return dataclasses.replace(options or PretrainOptions(), **flags)


FromFile = dict[str, dict[str, Any]]


def _read_config(config_file: Path | None) -> FromFile:
    return configuration.read_yaml(config_file) if config_file else {}


def _configure(data: str, options: PretrainOptions, from_file: FromFile) -> tuple[ImageSource, RunConfig]:
    in_data = from_file.get("data", {})
    label_column = options.label_column or in_data.get("label_column")
    group_column = options.group_column or in_data.get("group_column")
    source, split = _open(data, options.split or in_data.get("split"), label_column, group_column)
    native = _native_side(source)
    config = configuration.assemble(
        data,
        options,
        from_file,
        images=len(source.index),
        native_side=native,
        side_for=lambda size: side_for(source, size),
        split=split,
        index_hash=source.index.hash,
    )
    return source, config


def _open(
    data: str, split: str | None, label_column: str | None, group_column: str | None
) -> tuple[ImageSource, str | None]:
    """The source, and the split that is used: the one asked for, else train where there is one, else everything."""
    if split is None:
        whole = open_source(data, label_column=label_column, group_column=group_column)
        if "train" not in whole.index.split_names:
            return whole, None
        split = "train"
    return open_source(data, split=split, label_column=label_column, group_column=group_column), split


def _native_side(source: ImageSource) -> int:
    """The longer side of the pictures, from an evenly spread handful of readable ones."""
    count = len(source.index)
    sides = []
    for row in np.unique(np.linspace(0, count - 1, min(count, 16)).astype(int)).tolist():
        try:
            sides.append(max(source.read(row).shape[:2]))
        except DataError:
            continue  # counted and named when the pixels are read in full
    if not sides:
        raise DataError(f"None of {min(count, 16)} images looked at in {source.name} could be read. Check the files.")
    return int(np.median(sides))


def _settled(execution: Execution, device: torch.device) -> ExecutionConfig:
    return ExecutionConfig(
        device=str(device),
        threads=execution.threads,
        precision=execution.precision,
        layout=execution.layout,
        reason=execution.reason,
    )


def _pretrain(
    data: str,
    run: RunFolder,
    options: PretrainOptions,
    config_file: Path | None,
    monitor: str | None,
    stored: RunConfig | None,
    progress: runlog.Progress,
) -> Run:
    from_file = _read_config(config_file)
    if stored is None:
        source, config = _configure(data, options, from_file)
    else:
        if config_file is not None:
            raise UsageError("--config has no effect with --resume: the run keeps the configuration it started with.")
        config = configuration.resumed(stored, options)
        source, _ = _open(data, config.data.split, config.data.label_column, config.data.group_column)
        if source.index.hash != config.data.index_hash:
            raise DataError(
                f"The images of {source.name} are not those the run started with ({config.data.images} then, "
                f"{len(source.index)} now, or changed files). Restore them, or start another run with another --out."
            )
    store = build_pixel_store(
        source,
        side=config.data.side,
        cache=run.path / "cache" / "pixels.u8",
        max_bad=config.data.max_bad,
        workers=2,
        progress=lambda done, total: progress.show(f"reading images  {done}/{total}"),
    )
    device = pick_device(config.execution.device)
    encoder = make_encoder(config.encoder, config.views.size, config.train.seed).to(device)
    batch_plan = BatchPlan(source.index.ids, config.train.batch_size, config.train.seed)
    if stored is None:
        named = from_file.get("views", {})
        measured = {name: value for name, value in store.statistics().items() if name not in named}
        views = dataclasses.replace(config.views, **measured)  # type: ignore[arg-type]
        loader = BatchLoader(store, source.index, views, batch_plan, workers=config.train.workers)
        wanted = config.execution
        chosen = choose_execution(
            encoder,
            loader.make(0).x_q.to(device),
            precision=wanted.precision,
            layout=wanted.layout,
            threads=wanted.threads,
        )
        config = dataclasses.replace(config, views=views, execution=_settled(chosen, device))
    execution = config.execution
    apply_execution(
        encoder,
        Execution(threads=execution.threads or 1, precision=execution.precision, layout=execution.layout),  # type: ignore[arg-type]
    )
    try:
        encoder.normalise_in_groups_(config.contrast.bn_groups)
    except ValueError as error:
        raise UsageError(str(error)) from error
    pair = EncoderPair(encoder)
    queue = KeyQueue(config.contrast.K, config.encoder.dim, device)
    if config.contrast.queue_init == "random":
        queue.fill_random_(config.train.seed)
    state = TrainState(pair, queue, build_optimizer(config.optim, pair.theta_q))
    schedule = Schedule(
        steps_per_epoch=batch_plan.steps_per_epoch,
        total_steps=batch_plan.steps_per_epoch * config.train.epochs,
        checkpoint_every=config.train.checkpoint_every,
        eval_every=config.train.eval_every,
    )
    labelled = _open_monitor(monitor, run, config) if monitor else None
    check_room(state, run.checkpoints)
    # Whatever the user can get wrong is found out by now: an earlier run is replaced only from here on.
    if stored is None:
        run.clear()
    write_skipped(run.path / "skipped.jsonl", store.skipped)
    log = runlog.RunLog(run)
    try:
        _restore_or_begin(run, config, state, log, progress, stored is not None)
        if state.step >= schedule.total_steps:
            progress.say(f"{run.path} is complete ({state.step} steps); nothing to do.")
        _announce(config, state, schedule, store, source, progress)
        runlog.write_status(run, "running", state.step, schedule.total_steps)
        loader = BatchLoader(store, source.index, config.views, batch_plan, workers=config.train.workers)
        if state.step == 0:
            _save_pairs(run, loader, store, config)
        reading = _monitor(labelled, run, config) if labelled else None
        facts = {"config": config.digest(), "order": config.contrast.order, "torch": torch.__version__}
        names = dict(zip(source.index.ids.tolist(), source.index.names, strict=True))

        def batches(start: int, stop: int) -> Any:
            for batch in loader.batches(start, stop):
                yield _on_device(batch, device)

        with num_threads(execution.threads or torch.get_num_threads()), StopRequest() as stop:
            run_training(
                state,
                batches,
                contrast=config.contrast,
                optim=config.optim,
                schedule=schedule,
                log=log,
                progress=progress,
                save=lambda s: _save(s, run, facts, log, schedule.total_steps),
                on_eval=(lambda s: reading(s.pair.query, s.step)) if reading else None,
                name_of=lambda ids: ", ".join(names[i] for i in ids.tolist()[:4]) + (" ..." if len(ids) > 4 else ""),
                stop=stop,
            )
        plots.save_figure(
            plots.results_figure(
                runlog.read_losses(run),
                log.rows(),
                title=f"{config.recipe}, {config.encoder.backbone}, K {config.contrast.K}",
                monitor=reading.name if reading else None,
            ),
            run.path / "results.png",
        )
        runlog.write_status(run, "completed", state.step, schedule.total_steps)
    finally:
        log.close()
    return load_run(run.path)


def _open_monitor(spec: str, run: RunFolder, config: RunConfig) -> LabelledData:
    labelled = open_labelled(
        spec,
        size=config.views.size,
        label_column=config.data.label_column,
        group_column=config.data.group_column,
        cache=run.path / "cache" / "monitor.u8",
    )
    if not len(labelled.split.val):
        raise DataError(f"{labelled.name} has no labelled validation image, so --monitor can't read it. Add images.")
    return labelled


def _monitor(labelled: LabelledData, run: RunFolder, config: RunConfig) -> Monitor:
    ledger = Ledger(run.evaluation / "ledger.jsonl")
    return Monitor(labelled, ledger, size=config.views.size, mean=config.views.mean, std=config.views.std)


def _restore_or_begin(
    run: RunFolder, config: RunConfig, state: TrainState, log: runlog.RunLog, progress: runlog.Progress, resume: bool
) -> None:
    """Load the newest checkpoint that verifies, or write down how the run begins."""
    if resume:
        if not checkpoint_steps(run.checkpoints):
            log.cut({"loss": 0, "metrics": 0})
            return
        found = find_checkpoint(run.checkpoints)
        for reason in found.passed_over:
            progress.warn(f"passed over a damaged checkpoint: {reason}")
        if found.manifest.get("config") != config.digest():
            raise UsageError(
                f"{found.path} was written under another configuration than {run.config}. Restore config.yaml, or "
                "start another run with another --out."
            )
        if (before := found.manifest.get("torch")) != torch.__version__:
            progress.warn(
                f"the run was made with torch {before}, this is {torch.__version__}: going on may not be "
                "bit-identical to a run that was never interrupted."
            )
        load_checkpoint(state, found)
        log.cut(found.manifest["log"])
        progress.say(f"Resuming {run.path} from step {state.step}.")
        return
    files.write_json(run.path / "environment.json", environment())
    files.write_text(run.path / "command.txt", shlex.join(sys.argv) + "\n")
    files.write_text(run.config, to_yaml(config))


def _save(state: TrainState, run: RunFolder, facts: dict[str, Any], log: runlog.RunLog, total_steps: int) -> None:
    save_checkpoint(state, run.checkpoints, {**facts, "log": log.lengths()})
    runlog.write_status(run, "running", state.step, total_steps)


def _on_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    moved = {name: getattr(batch, name).to(device) for name in ("x_q", "x_k", "ids", "groups")}
    return dataclasses.replace(batch, **moved)


def _announce(
    config: RunConfig,
    state: TrainState,
    schedule: Schedule,
    store: PixelStore,
    source: ImageSource,
    progress: runlog.Progress,
) -> None:
    """What a reader wants to know before the first number appears."""
    K, S, N = config.contrast.K, config.data.images, config.train.batch_size
    say = progress.say
    say(
        f"{S} images of {source.name}"
        + (f" (split {config.data.split})" if config.data.split else "")
        + f", {len(store.skipped)} unreadable; {schedule.steps_per_epoch} steps of {N} an epoch, "
        f"{config.train.epochs} epochs."
    )
    say(
        f"Recipe {config.recipe}: {config.encoder.backbone} at {config.views.size} px, K {K}, T {config.contrast.T}, "
        f"m {config.contrast.m}, {config.execution.precision}, {config.execution.layout}, "
        f"{config.execution.threads} threads."
    )
    say(
        f"A key lives {K / N:.3g} steps. The loss first rises while the queue fills; a network that tells nothing "
        f"apart ends at {math.log1p(K):.2f}."
    )
    if K > S:
        say(
            f"K {K} exceeds the {S} images: every image always has an own older key in the queue. They are "
            + (
                "left out of its negatives."
                if config.contrast.mask_source
                else "scored as negatives (--no-mask-source)!"
            )
        )
    elif config.contrast.mask_source:
        say(f"Own older keys are left out; about {_masked_share(K, S):.1%} of the queries meet one.")
    if state.step:
        say(f"{schedule.total_steps - state.step} of {schedule.total_steps} steps are left.")


def _save_pairs(run: RunFolder, loader: BatchLoader, store: PixelStore, config: RunConfig) -> None:
    """samples/pairs0.png: the first batch's pictures with the two views that were really fed."""
    from mocokit.data.views import plain_view

    batch = loader.make(0)
    count = min(10, len(batch.rows))
    pixels, extents = store.batch(batch.rows[:count])
    mean, std = config.views.mean, config.views.std
    whole = plain_view(pixels, extents, size=config.views.size, mean=mean, std=std)
    pictures = [plots.to_pictures(x, mean, std) for x in (whole, batch.x_q[:count], batch.x_k[:count])]
    plots.save_figure(plots.pairs_figure(*pictures), run.samples / "pairs0.png")


# ------------------------------------------------------------------------------------------------ evaluate


def evaluate(
    runs: str | Path | Run | Sequence[str | Path | Run],
    labelled: str | Path,
    *,
    labels_per_class: int | str | None = 10,
    draws: int = 20,
    k: int | None = None,
    knn_temperature: float = 0.1,
    readout: str = "h",
    label_column: str | None = None,
    group_column: str | None = None,
    shuffle_labels: bool = False,
    counterfactual: Sequence[str] = (),
    quiet: bool = False,
) -> FrozenResult:
    """Score frozen encoders by kNN against pixels and random weights, and give a verdict.

    runs: one run, or several of one recipe that differ in their seed. labelled: data with labels; its own splits
    are used, or a fixed one by hash. labels_per_class: labels the classifier may see, or "all" / None; draws: how
    often they are drawn. k: None = chosen by cross-validation inside each draw (200 with all labels). counterfactual:
    changes (`channel-swap`, `grayscale`, `flip`, `shift`, `brightness`) under which the features are compared with
    those of the test images as they are, before and after training.

    Writes eval/verdict.json and eval/knn.csv into every run folder and a line into its ledger. Raises UsageError,
    DataError, DamagedError.
    """
    listed = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    if not listed:
        raise UsageError("evaluate needs at least one run.")
    opened = [run if isinstance(run, Run) else load_run(Path(run)) for run in listed]
    frozen_plan = FrozenPlan(
        labels_per_class=_label_budget(labels_per_class),
        draws=draws,
        k=k,
        knn_temperature=knn_temperature,
        readout=readout,
        shuffle_labels=shuffle_labels,
    )
    for change in counterfactual:
        find_change(change)
    progress = runlog.Progress(quiet=quiet)
    first = opened[0]
    for run in opened:
        for reason in run.found.passed_over:
            progress.warn(f"passed over a damaged checkpoint: {reason}")
    data = open_labelled(
        str(labelled),
        size=first.config.views.size,
        label_column=label_column,
        group_column=group_column,
        cache=first.path / "cache" / "labelled.u8",
        progress=lambda done, total: progress.show(f"reading images  {done}/{total}"),
    )
    result = evaluate_frozen(opened, data, frozen_plan, device=pick_device("auto"), say=progress.say)
    if counterfactual:
        progress.say(f"counterfactual: {', '.join(counterfactual)}")
        probes = counterfactuals(opened, data, counterfactual, device=pick_device("auto"))
        result = dataclasses.replace(result, counterfactual=probes)
    if not shuffle_labels:
        for run in opened:
            files.write_json(run.folder.evaluation / "verdict.json", result.to_dict())
            files.write_text(run.folder.evaluation / "knn.csv", _knn_csv(result))
    return result


def _label_budget(value: int | str | None) -> int | None:
    if value is None or value == "all":
        return None
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"--labels-per-class must be a whole number or `all`. Got {value!r}.") from None


def _knn_csv(result: FrozenResult) -> str:
    lines = ["method,accuracy,low,high"]
    lines += [f"{name},{one.mean:.6f},{one.low:.6f},{one.high:.6f}" for name, one in result.scores.items()]
    return "\n".join(lines) + "\n"


def table_and_verdict(result: FrozenResult) -> str:
    """The scores as a table, what they rest on, and the verdict as the last line."""
    names = {"h": "query h", "z": "query z", "key-h": "key h", "key-z": "key z"}
    width = max(len(names.get(name, name)) for name in result.scores)
    lines = [f"{'':<{width}}  kNN accuracy, % [95 % interval]"]
    for name, one in result.scores.items():
        mark = " <-" if name == result.verdict.readout and result.verdict.encoder == "query" else ""
        label = names.get(name, name)
        lines.append(f"{label:<{width}}  {100 * one.mean:5.1f}  [{100 * one.low:.1f}, {100 * one.high:.1f}]{mark}")
    lines.append(f"{'chance':<{width}}  {100 * result.chance:5.1f}")
    lines.append(f"Pretraining saw the test images: {result.pretraining}.")
    lines.append(f"The test split has been read {result.test_readings} time(s) for this run.")
    if result.counterfactual:
        lines.append(before_and_after_table(result.counterfactual).rstrip("\n"))
    lines.append(verdict_line(result.verdict))
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------- labs


def lab(
    number: str, out: str | Path | None = None, *, seeds: int = 1, overwrite: bool = False, quiet: bool = False
) -> LabResult:
    """Run LAB `06` or `07` as published and leave its data, weights, pictures and figures in `out` (runs/labNN).

    seeds: how many repetitions; the first is the published one. With several, a table of mean, spread and interval
    per figure, and one sentence per published conclusion. Repetitions that are there already are kept.

    Raises UsageError, LockedError, StorageError, DamagedError.
    """
    from mocokit.studies.labs import run_lab  # scikit-learn takes a second to import, paid only here

    progress = runlog.Progress(quiet=quiet)
    folder = Path(out) if out is not None else Path("runs") / f"lab{number}"
    return run_lab(number, folder, seeds=seeds, overwrite=overwrite, say=progress.say)


# ------------------------------------------------------------------------------------------------ ablations


def ablate(plan_file: str | Path, out: str | Path, *, quiet: bool = False) -> Study:
    """Carry out a pre-registered study of one factor; the plan's form is described in `studies.ablation`.

    The plan's hash and the time are written before the first run. An interrupted study goes on where it was; each
    cell's test split is read once. Raises UsageError for a plan that varies more than it says, or another plan in
    `out`; what `pretrain` and `evaluate` raise.
    """
    from mocokit.studies.ablation import Plan as StudyPlan
    from mocokit.studies.ablation import read_plan, run_plan

    progress = runlog.Progress(quiet=quiet)

    def train(settings: Mapping[str, Any], data: str, folder: Path) -> None:
        if (folder / "run.json").exists():
            pretrain(data, folder, resume=True, quiet=True)
            return
        path = folder.with_name(f"{folder.name}.yaml")
        files.write_text(path, yaml.safe_dump(dict(settings), sort_keys=False))
        pretrain(data, folder, config_file=path, quiet=True)

    def score(folder: Path, labelled: str, study: StudyPlan) -> npt.NDArray[np.float64]:
        budget = "all" if study.labels_per_class is None else study.labels_per_class
        result = evaluate(
            folder, labelled, labels_per_class=budget, draws=study.draws, readout=study.metric, quiet=True
        )
        per_image: npt.NDArray[np.float64] = result.correct[study.metric].mean(0)
        return per_image

    return run_plan(read_plan(Path(plan_file)), Path(out), train=train, score=score, say=progress.say)


# ---------------------------------------------------------------------------------------------------- pack


def pack(
    data: str | Path,
    out: str | Path,
    *,
    max_side: int | None = None,
    shard_mb: int = 256,
    quality: int = 92,
    split: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    max_bad: float = 0.01,
    quiet: bool = False,
) -> Packed:
    """Write images of any source as tar shards in the WebDataset layout into the folder `out`.

    max_side: shrink pictures whose longer side is above this many pixels; the others keep their own bytes. shard_mb:
    size at which a shard is closed, in MB. quality: of JPEGs made from shrunk photographs, 1 to 95. Ids, labels, groups
    and splits stay as they are in `data`. An interrupted packing goes on where it stopped. Raises as `open_source` and
    `mocokit.data.packing.pack` do.
    """
    progress = runlog.Progress(quiet=quiet)
    source = open_source(data, split=split, label_column=label_column, group_column=group_column)
    for line in source.report.lines():
        progress.say(line)
    return pack_source(
        source,
        Path(out),
        max_side=max_side,
        shard_bytes=shard_mb * 10**6,
        quality=quality,
        max_bad=max_bad,
        progress=lambda done, total: progress.show(f"packing images  {done}/{total}", final=done == total),
    )


# -------------------------------------------------------------------------------------------------- doctor


def doctor() -> dict[str, Any]:
    """What this machine and installation can do: versions, cores, precision, optional parts."""
    facts = environment()
    bf16 = has_fast_bf16(pick_device("auto"))
    gpus = ", ".join(facts["gpus"]) or "none that torch sees"
    findings = [
        ("python", facts["python"]),
        *((name, version or "not installed") for name, version in facts["packages"].items()),
        ("processor", f"{facts['processor']}, {facts['cores']} cores, {facts['cpu_capability']}"),
        ("memory", f"{(facts['memory_bytes'] or 0) / 2**30:.0f} GiB"),
        ("gpu", gpus),
        ("bf16 in hardware", "yes: --precision auto will time it" if bf16 else "no: fp32 is used"),
        *((f"extra: {name}", _extra(module)) for name, module in EXTRAS.items()),
    ]
    return facts | {"bf16": bf16, "findings": findings}


EXTRAS: dict[str, str] = {}
"""Optional parts: extra -> module that shows it is there."""


def _extra(module: str) -> str:
    return "installed" if importlib.util.find_spec(module) else "not installed"


__all__ = [
    "Plan",
    "Run",
    "ablate",
    "doctor",
    "evaluate",
    "lab",
    "load_run",
    "pack",
    "plan",
    "pretrain",
    "table_and_verdict",
]
