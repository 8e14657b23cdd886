"""`mocokit motion`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app


@app.command
def motion(
    runs: Annotated[list[Path], Parameter(group=REQUIRED, negative=())],
    /,
    *,
    labelled: Annotated[str, Parameter(group=REQUIRED)],
    unusual: Annotated[list[str] | None, Parameter(group="Protocol", negative=())] = None,
    label_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    group_column: Annotated[str | None, Parameter(group="Protocol")] = None,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> None:
    """What a run on videos knows: nearest videos, the order of time, unusual behaviour.

    For a run made with `pretrain --video clips` (or `frames`, without the order of time); `evaluate` gives its
    verdict. Everything beside random weights, the frames' pixels and their colours.

    Examples:

        mocokit motion runs/clips --labelled videos/
        mocokit motion runs/a runs/b runs/c --labelled videos/ --unusual falling

    Parameters
    ----------
    runs
        One run, or several that differ in their seed only.
    labelled
        Labelled videos: ROOT/{train,val,test}/CLASS/..., ROOT/CLASS/..., a table with a label column, or
        `moving-shapes`.
    unusual
        A class to leave out of the videos that others are compared with: do its videos stand out? May be given
        several times. Default: every class in turn.
    label_column
        Column of a table that holds the label; of moving-shapes motion, shape or color.
    group_column
        Column that holds the group (recording, camera); a group is never split.
    json
        Print everything as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api
    from mocokit.evaluation.motion_study import motion_table

    result = api.motion(
        runs,
        labelled,
        unusual=unusual or (),
        label_column=label_column,
        group_column=group_column,
        quiet=quiet,
    )
    print(files.to_json(result.to_dict()) if json else motion_table(result), end="")
