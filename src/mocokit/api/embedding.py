"""The verb `embed`: vectors of a whole data set in one Parquet file."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mocokit import files
from mocokit.errors import UsageError
from mocokit.exporting.loading import freeze
from mocokit.exporting.trained import Place, Trained, open_trained
from mocokit.retrieval import embedding
from mocokit.retrieval.embedding import Embedded, EmbedPlan, Parts
from mocokit.retrieval.encode import Source
from mocokit.retrieval.sources import Reading, open_rows, reading_of
from mocokit.training import runlog
from mocokit.training.allocator import keep_freed_memory
from mocokit.training.state import pick_device


def embed(
    run: Place,
    data: str | Path,
    out: str | Path,
    *,
    readout: str = "h",
    split: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    exclude: str | Path | None = None,
    thumbnail: int = 0,
    map: str = "pca",
    neighbours: int = 10,
    max_bad: float = 0.01,
    shard: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    quiet: bool = False,
) -> Embedded | None:
    """Write vectors, map and neighbours of all images of `data` to the Parquet file `out`, and a manifest beside it.

    Of a run on clips the rows are the clips of the videos in `data`, of one on frames their frames. readout: `h`, `z`,
    `key-h` or `key-z`. thumbnail: longer side of thumbnails in pixels, 0 for none. map: `pca`,
    `tsne`, `umap` or `none`. exclude: a list of samples to leave out. shard: "2/8" computes the second of eight
    shares of the parts and returns None; called without, what is missing is computed and the file is written.
    Interrupted, it goes on where it stopped. Raises UsageError, DataError, DamagedError, StorageError, LockedError.
    """
    plan = EmbedPlan(thumbnail=thumbnail, map=map, neighbours=neighbours, max_bad=max_bad)  # type: ignore[arg-type]
    share = embedding.parse_shard(shard)
    opened = open_trained(run)
    keep_freed_memory()
    progress = runlog.Progress(quiet=quiet)
    path = Path(out)
    if path.suffix != ".parquet" or path.is_dir():
        raise UsageError(f"--out must be a file that ends in .parquet. Got {str(out)!r}.")
    reading = reading_of(opened, str(data))
    source = open_data(data, reading, split, label_column, group_column, progress, exclude)
    frozen = freeze(opened, readout, pick_device(device))
    vectors_of = facts_of(opened, readout, source)
    made_of = vectors_of | {"plan": asdict(plan)}
    side, step, count = embedding.part_rows(source, frozen.views.size, frozen.clip)
    files.make_folder(path.parent)
    parts = Parts(path, vectors_of | {"thumbnail": thumbnail, "rows_of_a_part": step}, count)
    with parts.claim() if share is None else contextlib.nullcontext():
        if overwrite:
            for old in (path, embedding.manifest_path(path)):
                files.remove_path(old)
        elif (manifest := embedding.finished(path, made_of, parts)) is not None:
            if share is None:
                parts.remove()
            progress.say(f"{path} is there and complete.")
            return Embedded(
                path, manifest["rows"], frozen.dim, len(manifest["skipped"]), manifest["sha256"], 0,
                manifest["neighbours_recall"],
            )  # fmt: skip
        parts.open()
        kept = embedding.compute_parts(
            frozen,
            source,
            parts,
            plan,
            side=side,
            step=step,
            shard=share,
            progress=lambda done, total: progress.show(f"embedding  {done}/{total}", final=done == total),
        )
        if share is not None:
            return None
        table, skipped, recall = embedding.join_parts(parts, path, plan, source, progress.say)
        for target in (path, embedding.manifest_path(path)):
            files.sweep_leftovers(target)
        digest = embedding.write_result(path, table, made_of, skipped, recall)
        parts.remove()
    return Embedded(path, len(table), frozen.dim, len(skipped), digest, kept, recall)


def open_data(
    data: str | Path,
    reading: Reading | None,
    split: str | None,
    label_column: str | None,
    group_column: str | None,
    progress: runlog.Progress,
    exclude: str | Path | None = None,
) -> Source:
    """The source, with what was passed over said."""
    source = open_rows(
        str(data), reading, split=split, label_column=label_column, group_column=group_column, exclude=exclude
    )
    for line in source.report.lines():
        progress.say(line)
    return source


def facts_of(trained: Trained, readout: str, source: Source) -> dict[str, Any]:
    """What vectors are made of: which weights, which readout, which rows."""
    made_of = {"weights": trained.weights, "step": trained.step, "readout": readout}
    return made_of | {"data": source.name, "index": source.index.hash}
