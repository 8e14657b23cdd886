"""`mocokit check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app


@app.command
def check(
    data: Annotated[str, Parameter(group=REQUIRED)],
    /,
    *,
    against: Annotated[str | None, Parameter(group="Data")] = None,
    run: Annotated[Path | None, Parameter(group="Data")] = None,
    split: Annotated[str | None, Parameter(group="Data")] = None,
    label_column: Annotated[str | None, Parameter(group="Data")] = None,
    group_column: Annotated[str | None, Parameter(group="Data")] = None,
    exclude: Annotated[Path | None, Parameter(group="Data")] = None,
    html: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json_file: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    write_exclude: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    fail_on_leaks: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> int:
    """Say what is in the data: unreadable, odd, repeated, in two splits, unbalanced.

    A picture counts as repeated when it is the same to the last byte or pixel, or the same up to size, compression,
    brightness and contrast. Cropped, turned, mirrored and recoloured pictures count as different ones.

    Examples:

        mocokit check photos/ --html check.html
        mocokit check train/ --against test/ --write-exclude leave-out.txt
        mocokit pretrain train/ --out runs/a --exclude leave-out.txt

    Parameters
    ----------
    data
        A folder of images, a .csv / .txt list, .parquet, .npz, tar shards, or the name of a built-in set.
    against
        A second set; copies between the two are looked for too.
    run
        A run whose features propose further pairs. The nearest that are not the same picture are shown for a look.
    split
        Only this split of DATA.
    label_column
        Column of a table that holds the label.
    group_column
        Column that holds the group (patient, product).
    exclude
        A list of samples to leave out before anything is looked at.
    html
        Write a page with the pictures, in one file.
    json_file
        Write the full result as JSON.
    write_exclude
        Write the samples of DATA to leave out: unreadable, constant, repeated, in the other set or a later split. Every
        verb's --exclude takes it.
    fail_on_leaks
        Exit with 1 when a picture is in two parts.
    json
        Print the full result as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    result = api.check(
        data,
        against,
        run=run,
        html=html,
        json_file=json_file,
        write_exclude_to=write_exclude,
        split=split,
        label_column=label_column,
        group_column=group_column,
        exclude=exclude,
        quiet=quiet,
    )
    if json:
        print(files.to_json(result.facts), end="")
    else:
        print(result.text(), end="")
        if html is not None:
            print(f"Page: {html}")
        if write_exclude is not None:
            print(f"{write_exclude}: {result.excluded} sample(s) to leave out. Next: --exclude {write_exclude}")
    return 1 if fail_on_leaks and result.leaks else 0
