"""A Parquet file of encoded pictures -> sample table and row -> bytes. Read a row group at a time."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.decode import UnreadableImageError
from mocokit.data.index import SampleIndex, column_labels, column_texts, make_index
from mocokit.data.manifest import Columns
from mocokit.errors import DataError

IMAGE_COLUMNS = ("image", "img", "images", "jpg", "png", "webp", "bytes")
_CACHE_BYTES = 256 * 2**20


class _RowGroups:
    """Encoded pictures of a Parquet file, one row group at a time. Safe to call from several threads.

    Groups read last stay in memory, up to 256 MB of them and never less than one.
    """

    def __init__(self, path: Path, column: str, starts: npt.NDArray[np.int64]) -> None:
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path)
        self._column = column
        self._starts = starts  # [G + 1] first row of every group
        self._groups: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def read_bytes(self, row: int) -> bytes:
        """Row -> the encoded picture. Raises UnreadableImageError when it is null or its group is damaged."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        with self._lock:
            values = self._groups.get(group)
            if values is None:
                values = self._groups[group] = self._read(group)
                while len(self._groups) > 1 and sum(kept.nbytes for kept in self._groups.values()) > _CACHE_BYTES:
                    self._groups.popitem(last=False)
            else:
                self._groups.move_to_end(group)
        scalar = values[row - int(self._starts[group])]
        data = scalar.as_py()
        if not isinstance(data, bytes):
            raise UnreadableImageError("no picture in this row (null)")
        return data

    def _read(self, group: int) -> Any:
        import pyarrow as pa
        import pyarrow.compute

        try:
            values = self._file.read_row_group(group, columns=[self._column]).column(0)
        except (OSError, pa.ArrowException) as error:
            raise UnreadableImageError(f"row group {group} can't be read: {type(error).__name__}") from error
        return pa.compute.struct_field(values, "bytes") if pa.types.is_struct(values.type) else values


def open_parquet(path: Path, columns: Columns) -> tuple[SampleIndex, Callable[[int], bytes]]:
    """The table of a Parquet file of encoded pictures, and row -> their bytes.

    The picture column is binary, or a struct with a binary field `bytes` (and a text field `path`); a column of
    any name will do when only one is of that kind. Labels are whole numbers or text; names of numbered classes
    come from the schema's metadata (`classes`, separated by commas, or a Hugging Face description). Row names are
    the struct's paths when they are all there and all different, else `row 17`. Raises DataError.
    """
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.parquet

    try:
        status = path.stat()
        with pa.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            picture = _picture_column(path.name, schema, columns.path)
            meanings: dict[str, list[Any]] = {}
            for role in ("label", "group", "split"):
                if column := columns.pick(role, schema.names, (role,), path.name):
                    if (values := _plain_values(file, column, schema.field(column).type)) is not None:
                        meanings[role] = values
                    elif column in (columns.label, columns.group, columns.split):
                        raise DataError(
                            f"{path.name}: the {role} column {column!r} holds {schema.field(column).type}; "
                            "it must hold text or whole numbers."
                        )
            names = _row_names(file, schema, picture, sum(counts))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path.name} is not a readable Parquet file: {' '.join(str(error).split())[:200]}") from error
    if not sum(counts):
        raise DataError(f"{path.name} has no rows.")
    labels, class_names = column_labels(path.name, meanings.get("label"), _class_names(schema))
    index = make_index(
        names,
        mtimes=np.full(len(names), status.st_mtime_ns, np.int64),
        labels=labels,
        class_names=class_names,
        groups=column_texts(meanings.get("group")),
        splits=column_texts(meanings.get("split")),
        content=f"{status.st_size} bytes",
    )
    column = f"{picture}.bytes" if pa.types.is_struct(schema.field(picture).type) else picture
    groups = _RowGroups(path, column, np.cumsum([0, *counts], dtype=np.int64))
    return index, groups.read_bytes


def _picture_column(where: str, schema: Any, named: str | None) -> str:
    import pyarrow as pa

    def fits(kind: Any) -> bool:
        if pa.types.is_struct(kind):
            place = kind.get_field_index("bytes")
            return place >= 0 and fits(kind.field(place).type)
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    fitting = [name for name in schema.names if fits(schema.field(name).type)]
    if named is not None:
        if named in fitting:
            return named
        raise DataError(f"{where} has no picture column {named!r}; columns of bytes: {', '.join(fitting) or 'none'}.")
    usual = [name for name in IMAGE_COLUMNS if name in fitting] or fitting
    if not usual or (len(usual) > 1 and usual[0] not in IMAGE_COLUMNS):
        raise DataError(
            f"{where} must have one column of encoded pictures (binary, or a struct with bytes); found "
            f"{', '.join(usual) or 'none'} among its columns: {', '.join(schema.names)}. Name it with path_column."
        )
    return usual[0]


def _plain_values(file: Any, column: str, kind: Any) -> list[Any] | None:
    """Texts or whole numbers of a column, or None when it holds anything else."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return None
    # A million values a part at a time, with one object for each different value: few are different.
    known: dict[Any, Any] = {}
    parts = file.iter_batches(columns=[column])
    return [known.setdefault(value, value) for part in parts for value in part.column(0).to_pylist()]


def _row_names(file: Any, schema: Any, picture: str, rows: int) -> list[str]:
    import pyarrow as pa

    kind = schema.field(picture).type
    if pa.types.is_struct(kind) and kind.get_field_index("path") >= 0:
        parts = file.iter_batches(columns=[f"{picture}.path"])
        paths = [path for part in parts for path in pa.compute.struct_field(part.column(0), "path").to_pylist()]
        if all(paths) and len(set(paths)) == rows:
            return [str(path) for path in paths]
    return [f"row {row}" for row in range(rows)]


def _class_names(schema: Any) -> list[str] | None:
    metadata = schema.metadata or {}
    if classes := metadata.get(b"classes"):
        return [name.strip() for name in classes.decode("utf-8", "replace").split(",")]
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        names = next(kind["names"] for kind in features.values() if kind.get("_type") == "ClassLabel")
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None
