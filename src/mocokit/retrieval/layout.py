"""The Parquet layout of embedded data: what Embedding Atlas opens as it is, and what `read_vectors` takes back.

| column | type | what |
|---|---|---|
| `id` | int64 | the sample's id |
| `path` | string | its name in the data; bytes that are no UTF-8 as `\\xNN` |
| `label`, `group_id`, `split` | string, int64, string | where the data have them |
| `vector` | fixed-size list of float32 | h or z, not normalised |
| `thumbnail` | binary | PNG or JPEG |
| `projection_x`, `projection_y` | float32 | the map |
| `neighbors` | struct of `ids`, `distances` | row numbers in this file, and 1 - cosine; the row itself is left out |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mocokit.data.index import SampleIndex
from mocokit.errors import DataError, first_line
from mocokit.retrieval.encode import Encoded, Floats, Ints


def readable(name: str) -> str:
    """A name as text that any reader takes: bytes that are no UTF-8 become `\\xNN`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def vector_column(vectors: Floats) -> pa.Array:
    """float32 [M, D] as a fixed-size list column."""
    flat = pa.array(np.ascontiguousarray(vectors).ravel(), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])


def encoded_table(encoded: Encoded, index: SampleIndex) -> pa.Table:
    """The columns that each row has by itself."""
    rows = encoded.rows
    columns: dict[str, Any] = {
        "id": pa.array(index.ids[rows], pa.int64()),
        "path": pa.array([readable(index.names[row]) for row in rows.tolist()], pa.string()),
    }
    if index.class_names:
        names = [readable(name) for name in index.class_names]
        columns["label"] = pa.array([names[n] if n >= 0 else None for n in index.labels[rows].tolist()], pa.string())
    if (index.groups >= 0).any():
        groups = index.groups[rows]
        columns["group_id"] = pa.array(groups, pa.int64(), mask=groups < 0)
    if index.split_names:
        splits = index.splits[rows].tolist()
        columns["split"] = pa.array([index.split_names[n] if n >= 0 else None for n in splits], pa.string())
    if encoded.thumbnails is not None:
        columns["thumbnail"] = pa.array(list(encoded.thumbnails), pa.binary())
    columns["vector"] = vector_column(encoded.vectors)
    return pa.table(columns)


def with_map(table: pa.Table, places: Floats) -> pa.Table:
    """The table with its map, float32 [M, 2]."""
    for number, name in enumerate(("projection_x", "projection_y")):
        table = table.append_column(name, pa.array(places[:, number].astype(np.float32)))
    return table


def with_neighbours(table: pa.Table, positions: Ints, cosines: Floats) -> pa.Table:
    """The table with each row's neighbours: row numbers [M, k] (-1: none) and cosines [M, k]."""
    there = positions >= 0
    ends = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int32)
    ids = pa.ListArray.from_arrays(ends, pa.array(positions[there], pa.int64()))
    apart = pa.ListArray.from_arrays(ends, pa.array((1 - cosines[there]).astype(np.float32)))
    return table.append_column("neighbors", pa.StructArray.from_arrays([ids, apart], ["ids", "distances"]))


def vectors_of(table: pa.Table) -> Floats:
    """float32 [M, D] of the `vector` column."""
    column = table.column("vector").combine_chunks()
    width = column.type.list_size
    flat: Floats = column.values.to_numpy().reshape(-1, width)[column.offset : column.offset + len(column)]
    return flat


def read_vectors(path: Path) -> tuple[Ints, Floats]:
    """ids int64 [M] and vectors float32 [M, D] of a Parquet file with the columns `id` and `vector`.

    Raises DataError when it has no such columns, or vectors of different lengths or values that are not finite.
    """
    try:
        table = pq.read_table(path, columns=["id", "vector"])
    except (OSError, pa.ArrowException) as error:
        told = first_line(error, 160)
        raise DataError(f"{path} can't be read as Parquet with the columns id and vector ({told}).") from error
    vectors, ids = table.column("vector"), table.column("id")
    if len(table) == 0 or ids.null_count or vectors.null_count:
        raise DataError(f"{path} holds no vectors, or rows without id or vector. Name a file made by `mocokit embed`.")
    try:
        numbers = ids.to_numpy().astype(np.int64)
        if pa.types.is_fixed_size_list(vectors.type):
            values = vectors_of(table).astype(np.float32)
        else:
            flat = vectors.combine_chunks().flatten().to_numpy()
            values = flat.astype(np.float32).reshape(len(table), -1)
    except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise DataError(f"{path}: the vectors are not all of one length, or ids are no whole numbers.") from error
    if not np.isfinite(values).all():
        raise DataError(f"{path} holds vectors that are not finite numbers.")
    return numbers, values
