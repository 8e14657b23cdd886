"""Lists of samples to leave out: written by `mocokit check --write-exclude`, read by every verb's `--exclude`.

A text file. One sample a line: its name as in the sample table (the path relative to the data root), or `id:` and its
id; then, if there is more to say, a tab and the reason. Lines that begin with `#` and blank lines say nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mocokit import files
from mocokit.data.index import SampleIndex
from mocokit.data.randomness import sample_id
from mocokit.errors import DataError, UsageError

_HEADER = "# Samples to leave out (mocokit). One a line: its name, or id: and its id; a tab; the reason.\n"
_MAX_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class ExcludeList:
    """A list that was read."""

    path: Path
    ids: npt.NDArray[np.int64]
    """Ids of the samples it names, ascending, each once."""
    sha256: str
    """Of the file's bytes."""

    def kept(self, index: SampleIndex) -> npt.NDArray[np.int64]:
        """The rows of `index` that are not on the list. Raises DataError when it names none of them, or all."""
        away = np.isin(index.ids, self.ids)
        if len(self.ids) and not away.any():
            raise DataError(
                f"None of the {len(self.ids):,} samples that {self.path} lists is in these data, so it was made for "
                "others. Name the list that `mocokit check --write-exclude` made for them."
            )
        if away.all() and len(index):
            raise DataError(f"{self.path} leaves out all {len(index):,} samples. Check the list.")
        return np.flatnonzero(~away).astype(np.int64)


def refuse_for_videos(exclude: str | Path | None, spec: str) -> None:
    """Raise UsageError when a list is given where `spec` holds videos."""
    if exclude is not None:
        raise UsageError(f"--exclude is for images; {spec} holds videos. Leave it out.")


def read_exclude(path: str | Path) -> ExcludeList:
    """Read a list. Raises UsageError when it can't be read or a line is no sample."""
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"The list {path} is larger than {_MAX_BYTES:,} bytes. Check the file.")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"Could not read the list {path}: {error.strerror}. Check --exclude.") from error
    ids = set()
    for number, line in enumerate(data.decode("utf-8", "surrogateescape").split("\n"), 1):
        name = line.removesuffix("\r").partition("\t")[0]
        if not name or name.startswith("#"):
            continue
        if name.startswith("id:"):
            digits = name.removeprefix("id:")
            if not (digits.isascii() and digits.isdigit() and int(digits) < 2**63):
                raise UsageError(f"Line {number} of {path} is no sample id: {name!r}. Write `id:` and a whole number.")
            ids.add(int(digits))
        else:
            ids.add(sample_id(name))
    return ExcludeList(path, np.array(sorted(ids), np.int64), hashlib.sha256(data).hexdigest())


def write_exclude(path: Path, samples: Iterable[tuple[str, str]]) -> None:
    """Write (name, reason) lines. Names that a line can't hold as they are go by their id. Raises StorageError."""
    lines = [_HEADER]
    for name, reason in samples:
        plain = not name.startswith(("#", "id:")) and not any(mark in name for mark in "\t\n\r") and name.isprintable()
        lines.append(f"{name if plain else f'id:{sample_id(name)}'}\t{' '.join(reason.split())}\n")
    files.write_text(path, "".join(lines))
