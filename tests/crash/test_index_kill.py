"""kill -9 during build, add and remove: the index that was committed still answers, with its own rows and vectors."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mocokit import files
from mocokit.data.index import make_index
from mocokit.data.randomness import uniform
from mocokit.retrieval import index as store
from mocokit.retrieval import query as asking
from mocokit.retrieval.encode import unit
from mocokit.retrieval.rows import rows_of_index
from tests.children import CONTEXT
from tests.faults import die_when

DIM = 64
FIRST = 3000


def vectors_for(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """A vector that is a function of the id, so that any index can be checked against its own rows."""
    return unit((uniform(ids[:, None], np.arange(DIM, dtype=np.int64)[None]) - 0.5).astype(np.float32))


def change(path: str, what: str, number: int, last: int | None = None) -> None:
    """One write to an index. last: before which call of the primitives of `files` the process ends itself."""
    if last is not None:
        calls = itertools.count(1)
        die_when(lambda: next(calls) == last)
    place = Path(path)
    names = [f"{what}-{number}/{n}" for n in range(FIRST if what == "build" else 200)]
    table = make_index(names, labels=[what] * len(names))
    rows = rows_of_index(table, np.arange(len(names)), 0)
    vectors = vectors_for(table.ids)
    facts = {"weights": "0", "step": 1, "readout": "h", "run": "..", "sources": []}
    if what == "build":
        with store.claim_index(place, overwrite=True):
            store.commit(store.new_index(place, vectors, rows, facts, "exact"))
        return
    with store.claim_index(place, overwrite=None):
        opened = store.open_index(place)
        if what == "add":
            store.commit(store.with_added(opened, vectors, rows))
        else:
            store.commit(store.with_removed(opened, np.arange(0, len(opened.rows), 7)))


def stage(path: Path, before: set[str]) -> str:
    """What a write had done, by what is new in the folder."""
    left = sorted(entry.name for entry in os.scandir(path) if entry.name not in before)
    if any(name.startswith("gen-") for name in left):
        return "a new generation"
    return "a temporary left" if any(name.startswith(files.TEMPORARY) for name in left) else "nothing new"


@pytest.mark.slow
def test_a_kill_at_every_call_leaves_an_index_that_answers(tmp_path: Path) -> None:
    path = tmp_path / "index"
    change(str(path), "build", 0)
    stages = Counter[str]()
    for number in range(78):
        what, last = ("add", "build", "remove")[number % 3], 1 + number // 3
        before = store.open_index(path)
        there = {entry.name for entry in os.scandir(path)}
        process = CONTEXT.Process(target=change, args=(str(path), what, number, last))
        process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        stages[stage(path, there) if process.exitcode else "done"] += 1
        after = store.open_index(path)
        assert after.generation in (before.generation, before.generation + 1)
        assert np.array_equal(after.neighbours.vectors(), vectors_for(after.rows.ids))
        if after.generation == before.generation:
            assert after.rows.table.equals(before.rows.table)
        row = len(after.rows) // 2
        hits = asking.nearest(after, after.neighbours.vectors(np.array([row])), 3)[0]
        assert hits[0].id == after.rows.ids[row]
    print(dict(stages))
    assert stages["a temporary left"] >= 20
    assert stages["done"] >= 1, "some kills must come after the last call"
    assert stages["a new generation"] >= 5
    change(str(path), "add", 10_000)  # sweeps what the kills left
    assert sorted(entry.name for entry in path.iterdir() if entry.name.startswith((".tmp", "gen-"))) == [
        (path / "CURRENT").read_text().strip()
    ]


@pytest.mark.slow
def test_a_pointer_that_moves_first_is_caught(tmp_path: Path) -> None:
    """The check itself: CURRENT named before its generation is whole must be noticed."""
    path = tmp_path / "index"
    change(str(path), "build", 0)
    (path / "gen-000002").mkdir()
    files.write_text(path / "CURRENT", "gen-000002\n")
    with pytest.raises(files.DamagedError):
        store.open_index(path)
