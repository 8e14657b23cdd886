"""The verb `pack`: what is done to data before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mocokit.data.packing import Packed
from mocokit.data.packing import pack as pack_source
from mocokit.data.sources import open_source
from mocokit.training import runlog

if TYPE_CHECKING:
    pass


def pack(
    data: str | Path,
    out: str | Path,
    *,
    max_side: int | None = None,
    shard_mb: int = 256,
    quality: int = 92,
    split: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    max_bad: float = 0.01,
    exclude: str | Path | None = None,
    quiet: bool = False,
) -> Packed:
    """Write images of any source as tar shards in the WebDataset layout into the folder `out`.

    max_side: shrink pictures whose longer side is above this many pixels; the others keep their own bytes. shard_mb:
    size at which a shard is closed, in MB. quality: of JPEGs made from shrunk photographs, 1 to 95. Ids, labels, groups
    and splits stay as they are in `data`; the samples on the list `exclude` are left out. An interrupted packing goes
    on where it stopped. Raises as `open_source` and `mocokit.data.packing.pack` do.
    """
    progress = runlog.Progress(quiet=quiet)
    source = open_source(data, split=split, label_column=label_column, group_column=group_column, exclude=exclude)
    for line in source.report.lines():
        progress.say(line)
    return pack_source(
        source,
        Path(out),
        max_side=max_side,
        shard_bytes=shard_mb * 10**6,
        quality=quality,
        max_bad=max_bad,
        progress=lambda done, total: progress.show(f"packing images  {done}/{total}", final=done == total),
    )
