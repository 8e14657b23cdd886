"""`mocokit doctor`."""

from __future__ import annotations

from typing import Annotated

from mocokit import files
from mocokit.cli.app import Flag, app


@app.command
def doctor(*, json: Annotated[bool, Flag] = False) -> None:
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
