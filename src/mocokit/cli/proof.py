"""`mocokit verify` and `mocokit replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app
from mocokit.errors import DamagedError
from mocokit.options import whole_number


@app.command
def verify(
    run: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    resume_test: Annotated[int, Parameter(group="Proof", converter=whole_number)] = 0,
    data: Annotated[str | None, Parameter(group="Proof")] = None,
    seed: Annotated[int, Parameter(group="Proof", converter=whole_number)] = 0,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> int:
    """Check a run folder against its manifests, and say which checkpoint a resume would load.

    Exit code 0 when everything is whole (and resumes exactly), 6 when something is damaged, 1 when a resume was not
    exact.

    Examples:

        mocokit verify runs/photos
        mocokit verify runs/photos --resume-test 10

    Parameters
    ----------
    run
        A run folder. Nothing in it is changed.
    resume_test
        Kill a copy of the run so many times around its newest checkpoint, resume it each time, and compare the bytes.
    data
        The run's images, if they lie elsewhere now.
    seed
        Decides the instants of the kills.
    json
        Print what was found as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    found = api.verify(run, resume_test=resume_test, data=data, seed=seed, quiet=quiet)
    print(files.to_json(found.to_dict()) if json else found.text(), end="")
    if not found.whole:
        return DamagedError.exit_code
    return 1 if found.resume is not None and not found.resume.exact else 0


@app.command
def replay(
    run: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    data: Annotated[str | None, Parameter(group="Proof")] = None,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> int:
    """Execute the step again at which a run stopped because a number was not finite, and say where it begins.

    Exit code 0 when it happens again, 1 when the step is finite this time.

    Examples:

        mocokit replay runs/photos

    Parameters
    ----------
    run
        A run folder with failure/failure.json. Nothing in it is changed.
    data
        The run's images, if they lie elsewhere now.
    json
        Print what was found as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    found = api.replay(run, data=data, quiet=quiet)
    print(files.to_json(found.to_dict()) if json else found.text(), end="")
    return 0 if found.reproduced else 1
