"""The command line: parse, call one function of `api`, print, exit code. Nothing heavy is imported for `--help`.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError
from rich.console import Console

from mocokit import __version__, files
from mocokit.errors import InterruptedRunError, MocokitError, is_out_of_memory
from mocokit.options import PretrainOptions, whole_number
from mocokit.training.runfolder import claim_run

_EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 data, 4 diverged, 5 optional dependency missing, "
    "6 storage, 130 / 143 stopped by SIGINT / SIGTERM after saving. `--debug` shows tracebacks."
)

app = App(
    name="mocokit",
    version=__version__,
    help="Learn image representations without labels by momentum contrast, and prove what was learned.\n\n"
    "Start with: `mocokit demo`",
    help_epilogue=_EXIT_CODES,
    help_format="markdown",
    suppress_keyboard_interrupt=False,  # `main` handles it
)

_REQUIRED = Group("Required", sort_key=0)
_OUTPUT = Group("Output", sort_key=6)
_Flag = Parameter(negative=(), group=_OUTPUT)


@app.command
def pretrain(
    data: Annotated[str, Parameter(group=_REQUIRED)],
    /,
    *,
    out: Annotated[Path, Parameter(group=_REQUIRED)],
    options: PretrainOptions = PretrainOptions(),
    config: Annotated[Path | None, Parameter(group=Group("Common", sort_key=1))] = None,
    monitor: Annotated[str | None, Parameter(group=_OUTPUT)] = None,
    resume: Annotated[bool, _Flag] = False,
    overwrite: Annotated[bool, _Flag] = False,
    dry_run: Annotated[bool, _Flag] = False,
    json: Annotated[bool, _Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=_OUTPUT)] = False,
) -> None:
    """Train an encoder on unlabelled images.

    Examples:

        mocokit pretrain photos/ --out runs/photos
        mocokit pretrain photos/ --out runs/photos --resume
        mocokit pretrain data.parquet --split train --out runs/a --epochs 20 --backbone resnet18 --image-size 64

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
    resume
        Continue the run in --out exactly where its last checkpoint stands.
    overwrite
        Replace an earlier run in --out. Files that are not a run's are never removed.
    dry_run
        Print what would happen: settings, steps, queue life, memory, time. Writes nothing.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    """
    if dry_run:
        from mocokit import api

        _print_plan(api.plan(data, options=options, config_file=config), as_json=json)
        return
    if resume and overwrite:
        from mocokit.errors import UsageError

        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them.")
    # The lock comes before torch is imported, so that a second start fails at once.
    claimed = claim_run(out, "resume" if resume else "overwrite" if overwrite else "new")
    from mocokit import api

    run = api.pretrain(
        data,
        out,
        options=options,
        config_file=config,
        monitor=monitor,
        resume=resume,
        overwrite=overwrite,
        quiet=quiet,
        claimed=claimed,
    )
    if json:
        print(files.to_json({"run": str(run.path), "step": run.step, "checkpoint": run.found.path.name}), end="")
    elif not quiet:
        print(f"Done: {run.found.path}")
        print(f"Next: mocokit evaluate {out} --labelled DATA   (a labelled folder: one sub-folder per class)")


def _print_plan(plan: Any, *, as_json: bool) -> None:
    if as_json:
        print(files.to_json(plan.to_dict()), end="")
        return
    from mocokit.training.runlog import duration
    from mocokit.training.settings import to_yaml

    print(to_yaml(plan.config))
    print(f"images            {plan.images}")
    print(f"steps             {plan.total_steps} ({plan.steps_per_epoch} an epoch)")
    print(f"a key lives       {plan.queue_life_steps:.3g} steps (K / batch)")
    print(f"chance loss       {plan.chance_loss:.3f} once the queue is full: ln(1 + K)")
    print(f"own older keys    met by {plan.masked_share:.1%} of the queries on average, and left out")
    print(f"parameters        {plan.parameters:,} in each encoder")
    print(
        f"memory            {plan.state_bytes / 2**20:.0f} MiB of state, {plan.pixel_bytes / 2**20:.0f} MiB of pixels"
    )
    print(f"time              about {duration(plan.seconds)} for forward and backward passes on this machine")


@app.command
def evaluate(
    runs: Annotated[list[Path], Parameter(group=_REQUIRED, negative=())],
    /,
    *,
    labelled: Annotated[str, Parameter(group=_REQUIRED)],
    labels_per_class: Annotated[str, Parameter(group="Protocol")] = "10",
    draws: Annotated[int, Parameter(group="Protocol", converter=whole_number)] = 20,
    k: Annotated[int | None, Parameter(group="Protocol", converter=whole_number)] = None,
    knn_temperature: Annotated[float, Parameter(group="Protocol")] = 0.1,
    readout: Annotated[Literal["h", "z", "key-h", "key-z"], Parameter(group="Protocol")] = "h",
    label_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    group_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    shuffle_labels: Annotated[bool, Parameter(group="Protocol", negative=())] = False,
    counterfactual: Annotated[list[str] | None, Parameter(group="Protocol", negative=())] = None,
    fail_unless_better: Annotated[bool, _Flag] = False,
    json: Annotated[bool, _Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=_OUTPUT)] = False,
) -> int:
    """Score the frozen encoder by kNN against pixels and random weights; print the verdict.

    Examples:

        mocokit evaluate runs/photos --labelled photos-with-labels/
        mocokit evaluate runs/a runs/b runs/c --labelled data.parquet --labels-per-class all

    Parameters
    ----------
    runs
        One run, or several that differ in their seed only.
    labelled
        Labelled data: ROOT/{train,val,test}/CLASS/..., ROOT/CLASS/..., or a table with a label column.
    labels_per_class
        Labels per class that the classifier may see, or `all`.
    draws
        How often such a set of labels is drawn.
    k
        Neighbours that vote. Default: chosen inside each label draw by cross-validation; 200 with all labels.
    knn_temperature
        Sharpness of the votes, exp(cosine / knn_temperature). Not InfoNCE's T.
    readout
        What the verdict is about: h (backbone) or z (head) of the query encoder, or of the key encoder.
    label_column
        Column of a table that holds the label.
    group_column
        Column that holds the group (patient, product); a group is never split.
    shuffle_labels
        Control: shuffle the training labels; every score must fall to chance.
    counterfactual
        Also compare the features of the test images with those of the same images changed, before and after
        training: channel-swap, grayscale, flip, shift or brightness. May be given several times.
    fail_unless_better
        Exit with 1 unless the verdict is BETTER.
    json
        Print the verdict as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    result = api.evaluate(
        runs,
        labelled,
        labels_per_class=labels_per_class,
        draws=draws,
        k=k,
        knn_temperature=knn_temperature,
        readout=readout,
        label_column=label_column,
        group_column=group_column,
        shuffle_labels=shuffle_labels,
        counterfactual=counterfactual or (),
        quiet=quiet,
    )
    print(files.to_json(result.to_dict()) if json else api.table_and_verdict(result), end="")
    return 1 if fail_unless_better and result.verdict.verdict != "BETTER" else 0


@app.command
def ablate(
    plan: Annotated[Path, Parameter(group=_REQUIRED)],
    /,
    *,
    out: Annotated[Path, Parameter(group=_REQUIRED)],
    json: Annotated[bool, _Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=_OUTPUT)] = False,
) -> None:
    """Vary one factor, with a plan that is hashed and dated before the first run.

    Examples:

        mocokit ablate examples/plans/momentum.yaml --out runs/momentum

    Parameters
    ----------
    plan
        A YAML plan: base configuration, one factor and its values, seeds, metric.
    out
        Folder for the registered plan, the runs and the results; calling again goes on where it was.
    json
        Print the results as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api
    from mocokit.studies.ablation import study_table

    study = api.ablate(plan, out, quiet=quiet)
    print(files.to_json(study.to_dict()) if json else study_table(study), end="")


@app.command
def demo(
    *,
    out: Annotated[Path, Parameter(group=_OUTPUT)] = Path("runs/demo"),
    seed: Annotated[int, Parameter(group="Common", converter=whole_number)] = 0,
    overwrite: Annotated[bool, _Flag] = False,
) -> None:
    """The whole tour on built-in data, offline, in about two minutes.

    Trains on 1,100 handwritten digits that were moved, turned and zoomed; is killed in the middle and resumed; is
    scored against pixels and random weights; and leaves pictures.

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


@app.command
def lab(
    number: Annotated[Literal["06", "07"], Parameter(group=_REQUIRED)],
    /,
    *,
    out: Annotated[Path | None, Parameter(group=_OUTPUT)] = None,
    seeds: Annotated[int, Parameter(group="Common", converter=whole_number)] = 1,
    overwrite: Annotated[bool, _Flag] = False,
    json: Annotated[bool, _Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=_OUTPUT)] = False,
) -> None:
    """Repeat a published experiment: our figures beside the published ones, and what other seeds say.

    06: in-batch contrast with the hue kept and with the hue free to swap. 07: in-batch contrast and a small MoCo.

    Examples:

        mocokit lab 07
        mocokit lab 06 --out runs/lab06 --seeds 8

    Parameters
    ----------
    number
        06 or 07.
    out
        Folder for data, weights, pictures and figures. Default: runs/lab06, runs/lab07.
    seeds
        Repetitions, the first of them the published one. Those already in --out are kept.
    overwrite
        Replace an earlier result there.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    result = api.lab(number, out, seeds=seeds, overwrite=overwrite, quiet=quiet)
    print(files.to_json(result.to_dict()) if json else result.text(), end="")
    if not (json or quiet):
        print(f"\nEverything is in {result.path}.")


@app.command
def pack(
    data: Annotated[str, Parameter(group=_REQUIRED)],
    /,
    *,
    out: Annotated[Path, Parameter(group=_REQUIRED)],
    max_side: Annotated[int | None, Parameter(group="Shards")] = None,
    quality: Annotated[int, Parameter(group="Shards")] = 92,
    shard_mb: Annotated[int, Parameter(group="Shards")] = 256,
    split: Annotated[str | None, Parameter(group="Data")] = None,
    label_column: Annotated[str | None, Parameter(group="Data")] = None,
    group_column: Annotated[str | None, Parameter(group="Data")] = None,
    max_bad: Annotated[float, Parameter(group="Data")] = 0.01,
    json: Annotated[bool, _Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=_OUTPUT)] = False,
) -> None:
    """Write images as tar shards: a few large files in place of many small ones.

    Interrupted, it goes on where it stopped when the same command is given again.

    Examples:

        mocokit pack photos/ --out shards/
        mocokit pack data.parquet --out shards/ --max-side 256

    Parameters
    ----------
    data
        A folder of images, a .csv / .txt list, .parquet, .npz, tar shards, or the name of a built-in set.
    out
        The folder of shards: new, empty, or an interrupted packing of the same data.
    max_side
        Shrink images whose longer side is above this many pixels. Default: every image keeps its own bytes.
    quality
        Quality of the JPEGs made from shrunk photographs, 1 to 95.
    shard_mb
        Size at which a shard is closed, in MB.
    split
        Only this split.
    label_column
        Column of a table that holds the label.
    group_column
        Column that holds the group (patient, product).
    max_bad
        Share of unreadable images above which it stops. They are named in skipped.jsonl.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    done = api.pack(
        data,
        out,
        max_side=max_side,
        shard_mb=shard_mb,
        quality=quality,
        split=split,
        label_column=label_column,
        group_column=group_column,
        max_bad=max_bad,
        quiet=quiet,
    )
    if json:
        facts = {"shards": done.shards, "samples": done.samples, "skipped": done.skipped, "bytes": done.nbytes}
        print(files.to_json({"out": str(out)} | facts), end="")
    elif not quiet:
        kept = f", {done.kept} of them kept from before" if done.kept else ""
        print(f"Done: {out}: {done.samples} images in {done.shards} shards{kept}; {done.skipped} unreadable.")
        print(f"Next: mocokit pretrain {out} --out RUN")


@app.command
def doctor(*, json: Annotated[bool, _Flag] = False) -> None:
    """Say what this machine and installation can do.

    Parameters
    ----------
    json
        Print it as JSON.
    """
    from mocokit import api

    report = api.doctor()
    if json:
        print(files.to_json(report), end="")
        return
    for name, value in report["findings"]:
        print(f"{name:<22}{value}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or bool(os.environ.get("MOCOKIT_DEBUG"))
    words = [word for word in words if word != "--debug"]
    if not words:
        app.help_print([])
        return 2
    try:
        result = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()  # here, where a reader that has gone can still be handled
    except UnusedCliTokensError as error:
        extra = shlex.join(error.unused_tokens or [])
        _complain(f"Too many arguments: {extra}. Put a name with spaces in quotes.", hint=_help_hint(words))
        return 2
    except CycloptsError as error:
        error.verbose = False
        _complain(str(error), hint=_help_hint(words))
        return 2
    except InterruptedRunError as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    except MocokitError as error:
        if debug:
            traceback.print_exc()
        _complain(str(error))
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if debug:
            traceback.print_exc()
        _complain("Not enough memory. Lower --batch-size, --queue-size or --image-size, or take a smaller --backbone.")
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`); say nothing more, also not at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _complain(message: str, hint: str = "") -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False)
    if hint:
        console.print(hint, markup=False)


def _help_hint(words: list[str]) -> str:
    known = ("pretrain", "evaluate", "lab", "ablate", "demo", "pack", "doctor")
    command = words[0] if words and words[0] in known else ""
    return f"See `mocokit {command + ' ' if command else ''}--help`."
