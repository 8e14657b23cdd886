"""`mocokit pack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app


@app.command
def pack(
    data: Annotated[str, Parameter(group=REQUIRED)],
    /,
    *,
    out: Annotated[Path, Parameter(group=REQUIRED)],
    max_side: Annotated[int | None, Parameter(group="Shards")] = None,
    quality: Annotated[int, Parameter(group="Shards")] = 92,
    shard_mb: Annotated[int, Parameter(group="Shards")] = 256,
    split: Annotated[str | None, Parameter(group="Data")] = None,
    label_column: Annotated[str | None, Parameter(group="Data")] = None,
    group_column: Annotated[str | None, Parameter(group="Data")] = None,
    max_bad: Annotated[float, Parameter(group="Data")] = 0.01,
    exclude: Annotated[Path | None, Parameter(group="Data")] = None,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
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
    exclude
        A list of samples to leave out, as `mocokit check --write-exclude` makes it.
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
        exclude=exclude,
        quiet=quiet,
    )
    if json:
        facts = {"shards": done.shards, "samples": done.samples, "skipped": done.skipped, "bytes": done.nbytes}
        print(files.to_json({"out": str(out)} | facts), end="")
    elif not quiet:
        kept = f", {done.kept} of them kept from before" if done.kept else ""
        print(f"Done: {out}: {done.samples} images in {done.shards} shards{kept}; {done.skipped} unreadable.")
        print(f"Next: mocokit pretrain {out} --out RUN")
