"""What is known of each vector of an index besides itself: id, name, label, group, source. One Parquet table."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mocokit.data.index import SampleIndex
from mocokit.retrieval.encode import Ints

Bools = npt.NDArray[np.bool_]
_SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "name": pa.binary(),  # names may be no UTF-8
        "label": pa.string(),
        "group": pa.int64(),  # -1: none
        "source": pa.int32(),
        "alive": pa.bool_(),  # removed rows stay until the index is compacted
    }
)


@dataclass(frozen=True, slots=True)
class Rows:
    """M rows; row i belongs to vector i."""

    table: pa.Table

    def __len__(self) -> int:
        return len(self.table)

    @property
    def ids(self) -> Ints:
        """int64 [M]; unique among those alive."""
        return self.table.column("id").to_numpy()  # type: ignore[no-any-return]

    @property
    def alive(self) -> Bools:
        """bool [M]."""
        return self.table.column("alive").to_numpy(zero_copy_only=False).astype(np.bool_)  # type: ignore[no-any-return]

    @property
    def groups(self) -> Ints:
        """int64 [M], -1 where there is none."""
        return self.table.column("group").to_numpy()  # type: ignore[no-any-return]

    @property
    def sources(self) -> Ints:
        """int64 [M]: number of the source that a row came from."""
        return self.table.column("source").to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    def name(self, row: int) -> str:
        """The row's name in its source; odd bytes as surrogate escapes."""
        return self.table.column("name")[row].as_py().decode("utf-8", "surrogateescape")  # type: ignore[no-any-return]

    def label(self, row: int) -> str | None:
        """The row's label."""
        return self.table.column("label")[row].as_py()  # type: ignore[no-any-return]

    def labels(self) -> list[tuple[str, int]]:
        """Each label and how many living rows have it, by name."""
        column = self.table.filter(pc.field("alive")).column("label").drop_null()
        counts = pc.value_counts(column).to_pylist()
        return sorted((one["values"], int(one["counts"])) for one in counts)

    def with_label(self, labels: Sequence[str]) -> Bools:
        """bool [M]: which rows have one of the labels."""
        found = pc.is_in(self.table.column("label"), value_set=pa.array(list(labels), pa.string()))
        return found.to_numpy(zero_copy_only=False).astype(np.bool_)  # type: ignore[no-any-return]

    def row_of(self, sample: int) -> int | None:
        """The living row of an id."""
        rows = np.flatnonzero((self.ids == sample) & self.alive)
        return int(rows[0]) if len(rows) else None

    def names(self) -> Iterator[str]:
        """All names, in order."""
        for chunk in self.table.column("name").chunks:
            for value in chunk:
                yield value.as_py().decode("utf-8", "surrogateescape")

    def killed(self, rows: Ints) -> Rows:
        """The same with some rows dead."""
        alive = self.alive
        alive[rows] = False
        return Rows(self.table.set_column(self.table.column_names.index("alive"), "alive", pa.array(alive)))

    def taken(self, rows: Ints) -> Rows:
        """Some rows, in the order given."""
        return Rows(self.table.take(pa.array(rows)))

    def followed_by(self, others: Rows) -> Rows:
        """These rows, then the others."""
        return Rows(pa.concat_tables([self.table, others.table]).combine_chunks())

    def to_bytes(self) -> bytes:
        """As Parquet."""
        out = io.BytesIO()
        pq.write_table(self.table, out, compression="zstd")
        return out.getvalue()


def rows_from_bytes(data: bytes) -> Rows:
    """Rows from Parquet whose bytes were verified."""
    return Rows(pq.read_table(io.BytesIO(data)).cast(_SCHEMA).combine_chunks())


def rows_of_index(index: SampleIndex, rows: Ints, source: int) -> Rows:
    """Rows of a sample table."""
    classes = [
        name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for name in index.class_names
    ]
    labels = [classes[number] if number >= 0 else None for number in index.labels[rows].tolist()]
    columns = {
        "id": pa.array(index.ids[rows], pa.int64()),
        "name": pa.array([index.names[row].encode("utf-8", "surrogateescape") for row in rows.tolist()], pa.binary()),
        "label": pa.array(labels, pa.string()),
        "group": pa.array(index.groups[rows], pa.int64()),
        "source": pa.array(np.full(len(rows), source, np.int32)),
        "alive": pa.array(np.ones(len(rows), np.bool_)),
    }
    return Rows(pa.table(columns, schema=_SCHEMA))
