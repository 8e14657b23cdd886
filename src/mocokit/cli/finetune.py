"""`mocokit finetune` and `mocokit predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app
from mocokit.options import whole_number


@app.command
def finetune(
    runs: Annotated[list[Path], Parameter(group=REQUIRED, negative=())],
    /,
    *,
    labelled: Annotated[str, Parameter(group=REQUIRED)],
    out: Annotated[Path, Parameter(group=REQUIRED)],
    labels_per_class: Annotated[str | None, Parameter(group="Protocol")] = None,
    label_fraction: Annotated[str | None, Parameter(group="Protocol")] = None,
    draws: Annotated[int, Parameter(group="Protocol", converter=whole_number)] = 3,
    label_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    group_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    exclude: Annotated[Path | None, Parameter(group="Protocol")] = None,
    lr: Annotated[str, Parameter(group="Training")] = "0.0005,0.003",
    steps: Annotated[int | None, Parameter(group="Training", converter=whole_number)] = None,
    batch_size: Annotated[int, Parameter(group="Training", converter=whole_number)] = 32,
    weight_decay: Annotated[float, Parameter(group="Training")] = 0.01,
    layer_decay: Annotated[float, Parameter(group="Training")] = 0.75,
    seed: Annotated[int, Parameter(group="Training", converter=whole_number)] = 0,
    threads: Annotated[int | None, Parameter(group="Training", converter=whole_number)] = None,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> None:
    """Train with few labels, from the run's encoder and from scratch, and draw the curve.

    Each label budget is drawn several times. Fine-tuned and from scratch get the same labels, schedule, augmentation
    and choices; a linear probe of the frozen encoder and of random weights stand beside them. The best fine-tuned
    model is kept for `mocokit predict`. Started again with the same arguments, it goes on where it stopped.

    Examples:

        mocokit finetune runs/scans --labelled labelled/ --out ft/scans --labels-per-class 5,10,50
        mocokit finetune runs/clips --labelled videos/ --out ft/clips --labels-per-class 5,20,all
        mocokit finetune runs/a runs/b runs/c --labelled data.parquet --out ft/abc --label-fraction 0.01,0.1,1

    Parameters
    ----------
    runs
        One run, or several that differ in their seed only.
    labelled
        Labelled data: ROOT/{train,val,test}/CLASS/..., ROOT/CLASS/..., or a table with a label column. Of videos for
        runs on clips or frames: labels are then of videos, each judged by the mean over its clips.
    out
        The folder of the curve and the model.
    labels_per_class
        Label budgets, such as 5,10,50,all. Default: 1,5,10,all.
    label_fraction
        Label budgets as shares of the training labels instead, such as 0.01,0.1,1.
    draws
        How often each budget is drawn, for each run.
    label_column
        Column of a table that holds the label.
    group_column
        Column that holds the group (patient, product); a group is never split.
    exclude
        A list of samples to leave out, as `mocokit check --write-exclude` makes it.
    lr
        Learning rates of the topmost layer (AdamW), such as 0.001 or 0.0005,0.003; the labels held out of the budget
        choose among several.
    steps
        Training steps at most; held-out labels choose how many. Default: 30 epochs of the budget, 150 to 1,000 steps.
    batch_size
        Images in a step; all of them where a budget has fewer.
    weight_decay
        Of AdamW.
    layer_decay
        Learning rate of a layer over that of the one above it, for pretrained weights; 1 = all alike.
    seed
        Decides label draws, order and views.
    threads
        Threads of torch. Default: as many as the run was trained with.
    json
        Print the curve as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api
    from mocokit.evaluation.tuning import TuneSettings

    result = api.finetune(
        runs,
        labelled,
        out,
        labels_per_class=labels_per_class,
        label_fraction=label_fraction,
        draws=draws,
        settings=TuneSettings(
            lr=_numbers(lr),
            steps=steps,
            batch_size=batch_size,
            weight_decay=weight_decay,
            layer_decay=layer_decay,
        ),
        seed=seed,
        threads=threads,
        label_column=label_column,
        group_column=group_column,
        exclude=exclude,
        quiet=quiet,
    )
    print(files.to_json(result.values) if json else result.table, end="")
    if not json and not quiet:
        print(f"Next: mocokit predict {out} IMAGES --out predictions.csv")


def _numbers(text: str) -> tuple[float, ...]:
    from mocokit.errors import UsageError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--lr takes numbers, such as 0.001 or 0.0005,0.003. Got {text!r}.") from None


@app.command
def predict(
    tuned: Annotated[Path, Parameter(group=REQUIRED)],
    images: Annotated[str, Parameter(group=REQUIRED)],
    /,
    *,
    out: Annotated[Path, Parameter(group=REQUIRED)],
    exclude: Annotated[Path | None, Parameter(group="Data")] = None,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> None:
    """Classify images with a fine-tuned model.

    Writes a CSV of id, path, class and probability. The probabilities were calibrated by a temperature on labels held
    out of the training; how far off they are still (ECE) is printed.

    Examples:

        mocokit predict ft/scans new-scans/ --out predictions.csv
        mocokit predict ft/clips new-videos/ --out predictions.csv

    Parameters
    ----------
    tuned
        A folder made by `mocokit finetune`.
    images
        A folder of images, or whatever else `mocokit pretrain` reads; videos for a model fine-tuned on videos.
    out
        The CSV file.
    exclude
        A list of samples to leave out, as `mocokit check --write-exclude` makes it.
    json
        Print a summary as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    found = api.predict(tuned, images, out, exclude=exclude, quiet=quiet)
    if json:
        summary = {"images": found.images, "unreadable": found.unreadable, "classes": found.counts, "ece": found.ece}
        print(files.to_json(summary), end="")
        return
    for name, count in found.counts.items():
        print(f"{count:>8}  {name}")
    told = [f"{100 * value:.1f} % on the {name} labels" for name, value in found.ece.items() if value is not None]
    print("Expected calibration error of the model: " + (", ".join(told) or "not measured") + ".")
    print(f"Done: {found.path}")
