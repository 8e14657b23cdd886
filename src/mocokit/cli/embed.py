"""`mocokit embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app
from mocokit.options import whole_number


@app.command
def embed(
    run: Annotated[Path, Parameter(group=REQUIRED)],
    data: Annotated[str, Parameter(group=REQUIRED)],
    /,
    *,
    out: Annotated[Path, Parameter(group=REQUIRED)],
    readout: Annotated[Literal["h", "z", "key-h", "key-z"], Parameter(group="Encoder")] = "h",
    split: Annotated[str | None, Parameter(group="Data")] = None,
    label_column: Annotated[str | None, Parameter(group="Data")] = None,
    group_column: Annotated[str | None, Parameter(group="Data")] = None,
    exclude: Annotated[Path | None, Parameter(group="Data")] = None,
    max_bad: Annotated[float, Parameter(group="Data")] = 0.01,
    thumbnail: Annotated[int, Parameter(group="Columns", converter=whole_number)] = 0,
    map: Annotated[Literal["pca", "tsne", "umap", "none"], Parameter(group="Columns")] = "pca",
    neighbours: Annotated[int, Parameter(group="Columns", converter=whole_number)] = 10,
    shard: Annotated[str | None, Parameter(group="Hardware")] = None,
    device: Annotated[str, Parameter(group="Hardware")] = "auto",
    overwrite: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> None:
    """Write the vectors of a data set to Parquet: id, path, vector, a 2-D map, neighbours.

    Interrupted, it goes on where it stopped when the same command is given again. The file opens in Embedding Atlas:
    `embedding-atlas FILE.parquet --x projection_x --y projection_y --neighbors neighbors --image thumbnail`.

    Examples:

        mocokit embed runs/photos photos/ --out photos.parquet --thumbnail 96
        mocokit embed runs/photos photos/ --out photos.parquet --shard 1/4
        mocokit embed runs/clips videos/ --out clips.parquet --thumbnail 256

    Parameters
    ----------
    run
        A run folder, or one made by `mocokit finetune`.
    data
        A folder of images, a .csv / .txt list, .parquet, .npz, tar shards, or the name of a built-in set; for a run
        on clips or frames a folder or list of videos: one row a clip or frame.
    out
        The .parquet file. A manifest with its SHA-256 is written beside it.
    readout
        h (backbone) or z (head) of the query encoder, or of the key encoder.
    split
        Only this split.
    label_column
        Column of a table that holds the label.
    group_column
        Column that holds the group (patient, product).
    exclude
        A list of samples to leave out, as `mocokit check --write-exclude` makes it.
    max_bad
        Share of unreadable images above which it stops; they are named in the manifest.
    thumbnail
        Add thumbnails whose longer side is at most this many pixels; of a clip four frames side by side.
    map
        How the 2-D map is made; umap needs umap-learn.
    neighbours
        Nearest neighbours listed for each image, by cosine.
    shard
        I/N: compute one of N shares only, for several processes or machines that share the folder. The last call is
        one without --shard.
    device
        cpu, cuda, cuda:1; auto = cuda where there is one.
    overwrite
        Replace the file.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    done = api.embed(
        run,
        data,
        out,
        readout=readout,
        split=split,
        label_column=label_column,
        group_column=group_column,
        exclude=exclude,
        thumbnail=thumbnail,
        map=map,
        neighbours=neighbours,
        max_bad=max_bad,
        shard=shard,
        device=device,
        overwrite=overwrite,
        quiet=quiet,
    )
    if done is None:
        if json:
            print(files.to_json({"out": str(out), "shard": shard}), end="")
        else:
            print(f"Done: share {shard}. When all shares are: the same command without --shard.")
    elif json:
        facts = {"rows": done.rows, "dim": done.dim, "skipped": done.skipped, "sha256": done.sha256}
        print(files.to_json({"out": str(done.path)} | facts | {"neighbours_recall": done.recall}), end="")
    else:
        print(f"Done: {done.path}: {done.rows} vectors of {done.dim} dimensions; {done.skipped} images unreadable.")
