"""`mocokit compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app


@app.command
def compare(
    runs: Annotated[list[Path], Parameter(group=REQUIRED, negative=())],
    /,
    *,
    html: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Put runs beside each other: scores, curves, and what differs between them.

    Warns when runs differ in more than one factor beside the seed, and when their scores answer different questions.
    Runs that were not evaluated yet are shown without a score.

    Examples:

        mocokit compare runs/a runs/b
        mocokit compare runs/a runs/b runs/c --html compare.html

    Parameters
    ----------
    runs
        Two or more runs.
    html
        Write a page, one file with the curves in it.
    json
        Print everything as JSON.
    """
    from mocokit import api
    from mocokit.reporting.compare import comparison_text

    comparison = api.compare(runs, html=html)
    print(files.to_json(comparison.to_dict()) if json else comparison_text(comparison), end="")
    if html is not None and not json:
        print(f"Page: {html}")
