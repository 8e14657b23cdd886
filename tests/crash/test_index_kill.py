"""kill -9 during build, add and remove: the index that was committed still answers, with its own rows and vectors."""

from __future__ import annotations

import os
import random
import signal
import time
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
from tests.crash import harness

DIM = 64
FIRST = 3000


def vectors_for(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """A vector that is a function of the id, so that any index can be checked against its own rows."""
    return unit((uniform(ids[:, None], np.arange(DIM, dtype=np.int64)[None]) - 0.5).astype(np.float32))


def change(path: str, what: str, number: int) -> None:
    """One write to an index, in a process that may be killed."""
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


def kill_inside_a_write(path: Path, process: object, rng: random.Random) -> str:
    """Wait until a temporary folder or a new generation appears, and kill at a random moment after."""
    before = {entry.name for entry in os.scandir(path)}
    deadline = time.monotonic() + 60
    assert isinstance(process, harness.ForkServerProcess)
    while process.is_alive() and time.monotonic() < deadline:
        if {entry.name for entry in os.scandir(path)} - before:
            time.sleep(rng.random() * rng.choice((0.004, 0.012, 0.03)))
            process.kill()  # which bears that it ended by itself meanwhile; the caller reads how it ended
            break
    process.join()
    left = sorted(entry.name for entry in os.scandir(path) if entry.name not in before)
    return "between" if not left else "a temporary left" if left[0].startswith(files.TEMPORARY) else "two generations"


@pytest.mark.slow
def test_20_kills_leave_an_index_that_answers(tmp_path: Path) -> None:
    path = tmp_path / "index"
    change(str(path), "build", 0)
    rng, stages, killed = random.Random(5), Counter[str](), 0
    number = 0
    while killed < 20:
        number += 1
        before = store.open_index(path)
        what = ("add", "build", "remove")[number % 3]
        process = harness.CONTEXT.Process(target=change, args=(str(path), what, number))
        process.start()
        stage = kill_inside_a_write(path, process, rng)
        if process.exitcode == -signal.SIGKILL:
            killed += 1
            stages[f"{what}, {stage}"] += 1
        else:
            assert process.exitcode == 0
        after = store.open_index(path)
        assert after.generation in (before.generation, before.generation + 1)
        assert np.array_equal(after.neighbours.vectors(), vectors_for(after.rows.ids))
        if after.generation == before.generation:
            assert after.rows.table.equals(before.rows.table)
        row = len(after.rows) // 2
        hits = asking.nearest(after, after.neighbours.vectors(np.array([row])), 3)[0]
        assert hits[0].id == after.rows.ids[row]
    print(dict(stages))
    assert sum(count for name, count in stages.items() if "between" not in name) >= 8
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
