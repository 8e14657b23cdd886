"""The power goes between any two file operations of a run, and of what was not synced anything may be missing.

The disk is a model (`tests.disk_model`): a real one that loses writes on demand needs device mapper and its own
machine.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import mocokit
from mocokit.api import pretraining
from mocokit.errors import MocokitError
from mocokit.reporting import plots
from mocokit.training.checkpoint import find_checkpoint
from mocokit.training.runfolder import claim_run
from tests.crash import harness
from tests.disk_model import Disk, Event, Keep, Recorder, write_tree
from tests.toy import OPTIONS, npz

RUN = OPTIONS | {"epochs": 1, "checkpoint_every": 1}
"""6 steps, a checkpoint at each, all but two pruned."""


@pytest.fixture(autouse=True)
def _small_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("results_figure", "pairs_figure"):  # what is drawn doesn't matter here
            patch.setattr(plots, name, lambda *_, **__: Figure(figsize=(0.2, 0.2)))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npz(tmp_path_factory.mktemp("data") / "toy.npz")


@pytest.fixture(scope="module")
def never_cut(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Event], dict[str, str]]:
    """Every file operation of a run below its parent folder, marked where a save was over; and how it ended."""
    root = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(root, patch)
        save = pretraining.save_checkpoint

        def marked(state: Any, *arguments: Any, **more: Any) -> Path:
            path = save(state, *arguments, **more)
            recorder.mark("saved", state.step)
            return path

        patch.setattr(pretraining, "save_checkpoint", marked)
        mocokit.pretrain(data, root / "runs" / "one", quiet=True, **RUN)
    events = [event for event in recorder.events if "/cache/" not in event.path]
    return events, harness.fingerprint(root / "runs" / "one")


def draws(rng: random.Random, count: int) -> Iterator[Keep]:
    """What survives: nothing, everything, names without contents, contents without names, and any half."""
    yield lambda kind: False
    yield lambda kind: True
    yield lambda kind: kind == "entry"
    yield lambda kind: kind == "data"
    for _ in range(count):
        share = rng.random()
        yield lambda kind, share=share: rng.random() < share  # type: ignore[misc]


def hashed(tree: dict[str, Any]) -> str:
    """One hash of a tree."""
    found = hashlib.sha256()
    for name, node in tree.items():
        found.update(f"{name} {hashed(node)}".encode() if isinstance(node, dict) else name.encode() + b" " + node)
        found.update(b" | ")
    return found.hexdigest()


def cuts(events: Sequence[Event], count: int, seed: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """After every operation: its number, the step of the last save that was over, and each different tree left."""
    disk, rng, saved = Disk(), random.Random(seed), 0
    seen: set[str] = set()
    for number, event in enumerate(events):
        disk.do(event)
        saved = event.value if event.kind == "saved" else saved
        for keep in draws(rng, count):
            tree = disk.after_cut(rng, keep)
            if (told := f"{saved} {hashed(tree)}") not in seen:
                seen.add(told)
                yield number, saved, tree


def flaw_of(run: Path, saved: int) -> str:
    """What a cut spoiled in a run whose save of step `saved` was over; "" when all is as promised."""
    if not run.is_dir():
        return "the run is gone" if saved else ""
    if torn := harness.torn_checkpoints(run):
        return f"torn: {torn[0]}"
    began = (run / "run.json").exists()
    if saved and not (began and (run / "config.yaml").exists()):
        return "the run can't be resumed"
    try:
        if not saved:
            claim_run(run, "resume" if began else "new")[1].release()
            return ""
        found = find_checkpoint(run / "checkpoints")
    except MocokitError as error:
        return str(error)
    if found.manifest["step"] < saved:
        return f"step {saved} was saved, {found.path.name} is there"
    for name, length in found.manifest["log"].items():
        if (run / f"{name}.jsonl").stat().st_size < length:
            return f"{name}.jsonl is shorter than its checkpoint says"
    return ""


def flaws(events: Sequence[Event], place: Path, count: int, seed: int = 0) -> tuple[int, list[str]]:
    """How many different cuts there were, and what they spoiled."""
    found, number = [], 0
    for number, (at, saved, tree) in enumerate(cuts(events, count, seed), 1):  # noqa: B007
        left = write_tree(tree, place / "left")
        if flaw := flaw_of(left / "runs" / "one", saved):
            found.append(f"after {events[at].kind} {events[at].path}: {flaw}")
        shutil.rmtree(left)
    return number, found


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.nightly)])
def test_what_was_saved_is_there_after_any_loss_of_power(
    never_cut: tuple[list[Event], dict[str, str]], tmp_path: Path, count: int
) -> None:
    events, _ = never_cut
    number, found = flaws(events, tmp_path, count)
    print(f"{len(events)} operations, {number} different cuts")
    assert number > len(events)
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        ("sync", "torn"),
        ("sync folder", "the run is gone"),
        ("sync of the checkpoints' folder", "No usable checkpoint"),
        ("sync of a checkpoint", "torn"),
        ("sync of the log", "loss.jsonl is shorter"),
    ],
)
def test_a_sync_that_is_left_out_is_noticed(
    never_cut: tuple[list[Event], dict[str, str]], tmp_path: Path, left_out: str, says: str
) -> None:
    def left(event: Event) -> bool:
        if left_out == "sync of the checkpoints' folder":
            return event.kind == "sync folder" and event.path.endswith("/checkpoints")
        if left_out == "sync of a checkpoint":
            return event.kind == "sync folder" and "/.tmp-step-" in event.path
        if left_out == "sync of the log":
            return event.kind == "sync" and event.path.endswith("/loss.jsonl")
        return event.kind == left_out

    events = [event for event in never_cut[0] if not left(event)]
    end = next(i for i, event in enumerate(events) if event.kind == "saved")
    _, found = flaws(events[: end + 1], tmp_path, 0)
    assert any(says in flaw for flaw in found), found


@pytest.mark.slow
def test_a_run_goes_on_exactly_after_a_loss_of_power(
    never_cut: tuple[list[Event], dict[str, str]], data: Path, tmp_path: Path
) -> None:
    events, expected = never_cut
    every = list(cuts(events, 2, 1))
    rng = random.Random(2)
    for number, (_, _, tree) in enumerate(itertools.islice(rng.sample(every, len(every)), 20)):
        run = write_tree(tree, tmp_path / str(number)) / "runs" / "one"
        mocokit.pretrain(data, run, quiet=True, resume=(run / "run.json").exists(), **RUN)
        assert harness.fingerprint(run) == expected
