"""Did pretraining use the unlabelled test images? Asked by id and, where its images are still there, by content.

By id: the same name relative to the data root. By content: the same bytes of the encoded file (a copy under any name),
or, where there are no encoded files, the same pixels. A resized or recompressed copy is found by neither;
`mocokit check` looks for those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.decode import UnreadableImageError
from mocokit.data.sources import ImageSource
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.labelled import LabelledData
from mocokit.training.run import Run, images_of
from mocokit.training.settings import DataConfig

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How many of the test images pretraining used, as far as can be told."""

    n_test: int
    by_id: int | None
    """None where the images of the pretraining could not be opened again."""
    by_content: int | None
    """None likewise."""
    examples: tuple[str, ...]
    """Names of a few such test images."""
    text: str
    """A sentence that begins with yes, no or unknown."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "n_test": self.n_test,
            "by_id": self.by_id,
            "by_content": self.by_content,
            "examples": list(self.examples),
        }


def pretraining_overlap(runs: Sequence[Run], data: LabelledData) -> Overlap:
    """Of all the runs together: the one that used most of the test images is told."""
    return largest(runs, lambda used: _of_run(used, data))


def largest(runs: Sequence[Run], overlap_of: Callable[[DataConfig], Overlap]) -> Overlap:
    """The overlap of the run that used most; runs on the same data are asked once."""
    used: dict[str, DataConfig] = {}
    for run in runs:
        used.setdefault(run.config.data.index_hash, run.config.data)
    found = [overlap_of(data) for data in used.values()]
    return max(found, key=lambda one: (one.by_content or 0, one.by_id or 0, one.text.startswith("unknown")))


def counted(names: Sequence[str], test: Ints, same_id: Bools, same_content: Bools, what: str) -> Overlap:
    """The overlap that was found by looking. same_id, same_content: [n_test]. what: images or videos."""
    n, by_id, by_content = len(test), int(same_id.sum()), int(same_content.sum())
    examples = tuple(names[row] for row in test[same_content][:3].tolist())
    if by_content:
        whose = "all" if by_content == n else f"{by_content} of {n}"
        text = f"yes: pretraining used {whose} test {what} without labels (the same content; {examples[0]!r} is one)"
    else:
        text = f"no: 0 of {n} test {what} are among the {what} of the pretraining by content"
        text += f" ({by_id} share a name with one)" if by_id else ""
    return Overlap(n, by_id, by_content, examples, text)


def _of_run(used: DataConfig, data: LabelledData) -> Overlap:
    test = data.split.test
    n = len(test)
    names = tuple(data.index.names[row] for row in test[:3].tolist())
    if used.index_hash == data.index.hash:
        text = "yes: pretraining used all images of this data set, the test images among them, without labels"
        return Overlap(n, n, n, names, text)
    source = _reopened(used)
    if source is None:
        text = "unknown: the images of the pretraining are not where they were, so they were not compared"
        own_train = _train_hash(data)
        if used.index_hash == own_train:
            text = "no: pretraining used the train split of this data set; contents were not compared"
        return Overlap(n, None, None, (), text)
    same_id = np.isin(data.index.ids[test], source.index.ids)
    found = counted(data.index.names, test, same_id, _same_content(data.source, test, source), "images")
    if found.by_content or used.index_hash != _train_hash(data):
        return found
    text = f"no: pretraining used the train split of this data set; by content 0 of {n} test images are in it"
    return replace(found, text=text)


def _train_hash(data: LabelledData) -> str | None:
    if "train" not in data.index.split_names:
        return None
    return data.index.subset(data.index.rows_of("train")).hash


def _reopened(used: DataConfig) -> ImageSource | None:
    """The images that pretraining used, or None when they are gone or changed."""
    try:
        source = images_of(used)
    except (DataError, UsageError):
        return None
    return source if source.index.hash == used.index_hash else None


def _same_content(labelled: ImageSource, test: Ints, pretrained: ImageSource) -> Bools:
    """[n_test] whether a test image's content is among those of the pretraining."""
    encoded = labelled.read_bytes is not None and pretrained.read_bytes is not None
    rows = np.arange(len(pretrained.index), dtype=np.int64)
    sizes = labelled.index.sizes[test]
    if encoded and (sizes > 0).all() and (pretrained.index.sizes > 0).all():
        rows = rows[np.isin(pretrained.index.sizes, sizes)]  # equal files are equally long
    there = {_digest(pretrained, row, encoded) for row in rows.tolist()} - {None}
    return np.array([_digest(labelled, row, encoded) in there for row in test.tolist()], np.bool_)


def _digest(source: ImageSource, row: int, encoded: bool) -> bytes | None:
    try:
        if encoded and source.read_bytes is not None:
            return hashlib.blake2b(source.read_bytes(row), digest_size=16).digest()
        pixels = source.read(row)
    except UnreadableImageError:
        return None
    return hashlib.blake2b(np.ascontiguousarray(pixels).tobytes() + str(pixels.shape).encode(), digest_size=16).digest()
