"""`mocokit pretrain` and `mocokit demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app
from mocokit.options import PretrainOptions, whole_number
from mocokit.training.launch import read_launch
from mocokit.training.runfolder import claim_run


@app.command
def pretrain(
    data: Annotated[str, Parameter(group=REQUIRED)],
    /,
    *,
    out: Annotated[Path, Parameter(group=REQUIRED)],
    options: PretrainOptions = PretrainOptions(),
    config: Annotated[Path | None, Parameter(group=Group("Common", sort_key=1))] = None,
    monitor: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    track: Annotated[list[str] | None, Parameter(group=OUTPUT, negative=())] = None,
    trace: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    profile: Annotated[bool, Flag] = False,
    resume: Annotated[bool, Flag] = False,
    overwrite: Annotated[bool, Flag] = False,
    accept_data_change: Annotated[bool, Flag] = False,
    dry_run: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
    rank_timeout: Annotated[float, Parameter(group=Group("Hardware", sort_key=5))] = 600.0,
) -> None:
    """Train an encoder on unlabelled images.

    Examples:

        mocokit pretrain photos/ --out runs/photos
        mocokit pretrain photos/ --out runs/photos --resume
        mocokit pretrain photos/ --out runs/photos --epochs 1 --profile
        mocokit pretrain shapes --out runs/shapes -K 240 --batch-size 60 --trace first,last
        mocokit pretrain data.parquet --split train --out runs/a --epochs 20 --backbone resnet18 --image-size 64
        torchrun --nproc-per-node 2 -m mocokit pretrain photos/ --out runs/photos

    Parameters
    ----------
    data
        A folder of images (nested as you like), a .csv / .txt list, .parquet, .npz, or a built-in set:
        `digits`, `moved-digits`, `shapes`.
    out
        The run folder: configuration, checkpoints, logs, pictures.
    config
        YAML with sections as in a run's config.yaml; flags win over it.
    monitor
        Labelled data whose validation split is read by kNN now and then, for the curve. Never used in training.
    track
        Also give every number to tensorboard, wandb (offline) or mlflow (files), in OUT/trackers. Several may be given.
    trace
        Record steps for the step viewer (`mocokit stepper OUT`): first, full (the queue fills), last, a step (120),
        steps (100-120), or several with commas.
    profile
        After 10 steps, measure 50: where their time goes (waiting for views, encoders, loss, optimiser and EMA, the
        rest), what bounds the run, and what to do about it; on stderr, so not with --quiet.
    resume
        Continue the run in --out exactly where its last checkpoint stands.
    overwrite
        Replace an earlier run in --out. Files that are not a run's are never removed.
    accept_data_change
        With --resume: go on although images were added, changed or removed since; what differs is written down.
    dry_run
        Print what would happen: settings, steps, queue life, memory, time. Writes nothing.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    rank_timeout
        With several processes (torchrun): seconds that one waits for the others within a step.
    """
    first = read_launch().rank == 0
    if dry_run:
        if not first:
            return
        from mocokit import api

        _print_plan(api.plan(data, options=options, config_file=config), as_json=json)
        return
    if resume and overwrite:
        from mocokit.errors import UsageError

        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them.")
    if accept_data_change and not resume:
        from mocokit.errors import UsageError

        raise UsageError("--accept-data-change has no effect without --resume. Leave it out.")
    # The lock comes before torch is imported, so that a second start fails at once.
    claimed = claim_run(out, "resume" if resume else "overwrite" if overwrite else "new") if first else None
    from mocokit import api

    run = api.pretrain(
        data,
        out,
        options=options,
        config_file=config,
        monitor=monitor,
        track=track or (),
        trace=trace,
        profile=profile,
        resume=resume,
        overwrite=overwrite,
        accept_data_change=accept_data_change,
        quiet=quiet,
        rank_timeout=rank_timeout,
        claimed=claimed,
    )
    if not first:
        return
    if json:
        print(files.to_json({"run": str(run.path), "step": run.step, "checkpoint": run.found.path.name}), end="")
    elif not quiet:
        print(f"Done: {run.found.path}")
        print(f"Next: mocokit evaluate {out} --labelled DATA   (a labelled folder: one sub-folder per class)")


def _print_plan(plan: Any, *, as_json: bool) -> None:
    if as_json:
        print(files.to_json(plan.to_dict()), end="")
        return
    from mocokit.recipes import recipe_notes
    from mocokit.training.runlog import duration
    from mocokit.training.settings import to_yaml

    print(to_yaml(plan.config))
    for note in recipe_notes(plan.config):
        print(f"# {note}")
    print()
    print(f"images            {plan.images}")
    print(f"steps             {plan.total_steps} ({plan.steps_per_epoch} an epoch)")
    if plan.queue_life_steps is not None:
        print(f"a key lives       {plan.queue_life_steps:.3g} steps (K / keys of a step)")
    if plan.chance_loss is not None:
        print(f"chance loss       {plan.chance_loss:.3f}: what a network that tells nothing apart ends at")
    if plan.masked_share is not None:
        kept = "left out" if plan.config.contrast.mask_source else "scored as negatives"
        print(f"own older keys    met by {plan.masked_share:.1%} of the queries on average, and {kept}")
    print(f"parameters        {plan.parameters:,} in each encoder")
    print(
        f"memory            {plan.state_bytes / 2**20:.0f} MiB of state, {plan.pixel_bytes / 2**20:.0f} MiB of pixels"
    )
    print(f"time              about {duration(plan.seconds)} for forward and backward passes on this machine")


@app.command
def demo(
    *,
    out: Annotated[Path, Parameter(group=OUTPUT)] = Path("runs/demo"),
    seed: Annotated[int, Parameter(group="Common", converter=whole_number)] = 0,
    overwrite: Annotated[bool, Flag] = False,
) -> None:
    """The whole tour on built-in data, offline, in about two minutes.

    Trains on 1,100 handwritten digits that were moved, turned and zoomed; is killed in the middle and resumed; is
    scored against pixels and random weights; and leaves pictures, a report and a page of single steps.

    Parameters
    ----------
    out
        Where the tour's run goes.
    seed
        The run's seed.
    overwrite
        Replace an earlier tour there.
    """
    from mocokit.demo import run_demo

    run_demo(out, seed=seed, overwrite=overwrite)
