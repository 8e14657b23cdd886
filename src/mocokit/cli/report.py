"""`mocokit report` and `mocokit stepper`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app


@app.command
def report(
    run: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    labelled: Annotated[str | None, Parameter(group="Pictures")] = None,
    label_column: Annotated[str | None, Parameter(group="Pictures")] = None,
    group_column: Annotated[str | None, Parameter(group="Pictures")] = None,
    exclude: Annotated[Path | None, Parameter(group="Pictures")] = None,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> None:
    """Write report.html, README.md (a model card), report.json and results.png into a run's folder.

    One page that opens from a disk, in English and Chinese: the verdict first, then scores, curves, health, views,
    nearest neighbours, a map of the features, data, settings, environment. It tells no path of this machine.

    Examples:

        mocokit report runs/photos
        mocokit report runs/photos --labelled labelled-photos/

    Parameters
    ----------
    run
        The run folder; evaluated or not, finished or not.
    labelled
        Labelled data whose validation images are looked at. Default: the run's own images.
    label_column
        Column of a table that holds the label.
    group_column
        Column that holds the group (patient, product).
    exclude
        A list of labelled samples to leave out, as `mocokit check --write-exclude` makes it.
    json
        Print report.json's content.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    done = api.report(
        run, labelled=labelled, label_column=label_column, group_column=group_column, exclude=exclude, quiet=quiet
    )
    if json:
        print(files.to_json(done.to_dict()), end="")
        return
    for path, what in (
        (done.html, "the report; opens in any browser, offline"),
        (done.card, "model card"),
        (done.json, "the same numbers for programs"),
    ):
        print(f"{path}  {what}")


@app.command
def stepper(
    runs: Annotated[list[Path] | None, Parameter(group=REQUIRED, negative=())] = None,
    /,
    *,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Write moco-steps.html: single steps of a run with their real numbers, to walk through.

    One page that opens from a disk, in English and Chinese: ten sub-steps a step, any key from birth to eviction,
    what another temperature or a shorter queue would give, and a course with questions. It also holds the smallest
    momentum contrast there is (one image a step, four keys), trained and recorded when the page is made.

    Examples:

        mocokit stepper                                 # the built-in one alone
        mocokit stepper runs/photos                     # a run trained with --trace
        mocokit stepper runs/m0 runs/m999               # two runs side by side

    Parameters
    ----------
    runs
        A run that was trained with --trace (or a LAB 07 folder), or two. None: the built-in trace alone.
    out
        The file to write. Default: moco-steps.html in the (first) run's folder, or in this folder.
    json
        Print the path and the file's sizes as JSON.
    """
    from mocokit import api

    done = api.stepper(runs or (), out=out)
    if json:
        print(files.to_json(done.to_dict()), end="")
    else:
        print(f"{done.path}  opens in any browser, offline")
