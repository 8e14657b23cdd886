"""`mocokit ablate` and `mocokit lab`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app
from mocokit.options import whole_number


@app.command
def ablate(
    plan: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    out: Annotated[Path, Parameter(group=REQUIRED)],
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
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
def lab(
    number: Annotated[Literal["06", "07"], Parameter(group=REQUIRED)],
    /,
    *,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    seeds: Annotated[int, Parameter(group="Common", converter=whole_number)] = 1,
    overwrite: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
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
