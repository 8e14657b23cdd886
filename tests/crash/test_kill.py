"""kill -9 at random instants, resumed each time: not one byte may differ from a run that was never killed."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mocokit import files
from mocokit.training import checkpoint
from mocokit.training.state import TrainState
from tests.crash import harness


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.toy_data(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def never_killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert harness.end_of(harness.start(data, out, resume=False, options=harness.TOY)) == 0
    return harness.fingerprint(out)


def compare_all(out: Path, expected: Mapping[str, str]) -> int:
    """Every run under `out` that ended must be the same to the last byte; returns how many there were."""
    ended = [run for run in sorted(out.iterdir()) if files.read_json(run / "status.json")["state"] == "completed"]
    for run in ended:
        assert harness.fingerprint(run) == expected, run
        assert not list((run / "checkpoints").glob(".tmp-*"))
    return len(ended)


@pytest.mark.slow
def test_20_kills_leave_no_differing_byte(data: Path, never_killed: dict[str, str], tmp_path: Path) -> None:
    kills = harness.run_with_kills(data, tmp_path, count=20, seed=1, options=harness.TOY)
    print(dict(kills.stages))
    assert sum(kills.stages.values()) == 20
    assert sum(kills.stages[name] for name in harness.STAGES) >= 10
    assert kills.torn == []
    assert compare_all(tmp_path, never_killed) >= 1


@pytest.mark.slow
def test_kills_of_two_ranks_leave_no_differing_byte(data: Path, tmp_path: Path) -> None:
    """Rank 0 in the middle of a save, any rank at any moment; the other one leaves, and both go on."""
    whole = tmp_path / "whole"
    assert harness.end_of(harness.start(data, whole, resume=False, options=harness.TOY, ranks=2)) == 0
    killed = files.make_folder(tmp_path / "killed")
    kills = harness.run_with_kills(data, killed, count=4, seed=4, options=harness.TOY, turn=6, ranks=2)
    print(dict(kills.stages))
    assert kills.stages.total() == 4
    assert kills.torn == []
    assert compare_all(killed, harness.fingerprint(whole)) >= 1


@pytest.mark.nightly
def test_200_kills_over_methods_and_ranks_leave_no_differing_byte(data: Path, tmp_path: Path) -> None:
    """Half inside a save, every stage of the protocol at least 5 times; 150 on one rank, 50 on two."""
    stages = Counter[str]()
    for ranks, count in ((1, 30), (2, 10)):
        results = harness.kill_all_methods(data, tmp_path / str(ranks), count, seed=100, ranks=ranks)
        stages += harness.stages_of(results)
        for method, result in results.items():
            print(ranks, method, result)
            assert result.kills.stages.total() == count, method
            assert result.kills.torn == [], method
            assert result.compared >= 1, method
            assert result.differing == [], method
    print(dict(stages))
    assert stages.total() == 200
    assert min(stages[name] for name in harness.STAGES) >= 5


def write_straight_into_the_final_name() -> None:
    """A broken protocol: the calls of the sound one in their order, but no temporary folder and so no rename."""

    def commit(final: Path, contents: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
        files._mkdir(final)
        for name, content in contents.items():
            files._write_all(final / name, content)
        files._write_all(final / files.MANIFEST, files.manifest_text(contents, facts).encode())
        files._sync_folder(final)
        files._sync_folder(final.parent)

    files.commit_folder = commit


def forget_the_queue() -> None:
    """A broken state: the queue is not restored, as in loops that keep it out of their checkpoints."""
    original = checkpoint.load_checkpoint

    def load(state: TrainState, found: checkpoint.Found) -> None:
        original(state, found)
        state.queue.vectors.zero_()

    from mocokit.api import pretraining

    pretraining.load_checkpoint = load  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_broken_protocol_is_caught(data: Path, tmp_path: Path) -> None:
    """Three kills are aimed at its first three files, so that a manifest is missing whatever the moment."""
    broken = write_straight_into_the_final_name
    kills = harness.run_with_kills(data, tmp_path, count=6, seed=2, options=harness.TOY, sabotage=broken, turn=1)
    assert len(kills.torn) >= 3, "half-written checkpoints under a committed name must be noticed"


@pytest.mark.slow
def test_a_forgotten_queue_is_caught(data: Path, never_killed: dict[str, str], tmp_path: Path) -> None:
    harness.run_with_kills(data, tmp_path, count=3, seed=3, options=harness.TOY, sabotage=forget_the_queue)
    runs = [run for run in tmp_path.iterdir() if (run / "status.json").exists()]
    assert any(harness.fingerprint(run) != never_killed for run in runs)
    shutil.rmtree(tmp_path)
