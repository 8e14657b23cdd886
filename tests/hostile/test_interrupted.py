"""Every verb that writes: killed at any file operation and run again, and run twice at once in one place.

Pretraining has its own harness (`tests/crash`). A child counts its calls of the primitives of `files` and ends itself
with SIGKILL at a chosen one, half of a write done.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure

import mocokit
from mocokit import files
from mocokit.data.packing import pack as pack_source
from mocokit.data.sources import open_source
from mocokit.errors import MocokitError
from mocokit.reporting import plots
from tests.children import CONTEXT
from tests.faults import die_when
from tests.toy import OPTIONS, contents, labelled_npz, verified_steps

PLAN = {
    "name": "momentum",
    "data": "toy.npz",
    "labelled": "toy.npz",
    "base": {
        "train": {"epochs": 1, "batch_size": 8, "checkpoint_every": 4},
        "encoder": {"backbone": "small-cnn-8-8", "dim": 8},
        "contrast": {"K": 20},
        "execution": {"threads": 1},
    },
    "factor": "contrast.m",
    "values": [0.5, 0.9],
    "baseline": 0.9,
    "seeds": [0],
    "draws": 2,
}


def embed(place: Path) -> None:
    mocokit.embed(place / "run", place / "toy.npz", place / "out.parquet", quiet=True)


def build(place: Path) -> None:
    mocokit.search_build(place / "run", place / "toy.npz", place / "index", overwrite=True, quiet=True)


def add(place: Path) -> None:
    mocokit.search_add(place / "old-index", place / "more.npz", quiet=True)


def evaluate(place: Path) -> None:
    mocokit.evaluate(place / "run", place / "toy.npz", labels_per_class=2, draws=2, classifier="both", quiet=True)


def finetune(place: Path) -> None:
    settings = mocokit.TuneSettings(steps=4, lr=(0.001,))
    words: dict[str, Any] = {"labels_per_class": "2", "draws": 1, "settings": settings, "quiet": True}
    mocokit.finetune(place / "run", place / "toy.npz", place / "tuned", **words)


def ablate(place: Path) -> None:
    """In a process of its own: the plan names its data from where we are, and the pictures of its runs are tiny."""
    for name in ("results_figure", "pairs_figure"):  # most of the time of so small a study
        setattr(plots, name, lambda *_, **__: Figure(figsize=(0.2, 0.2)))
    os.chdir(place)
    mocokit.ablate("plan.yaml", "study", quiet=True)


def report(place: Path) -> None:
    mocokit.report(place / "run", labelled=place / "toy.npz", quiet=True)


def export(place: Path) -> None:
    mocokit.export(place / "run", out=place / "exported", overwrite=True, quiet=True)


def pack(place: Path) -> None:
    pack_source(open_source(place / "toy.npz"), place / "packed", shard_bytes=40_000, workers=1)


def index_of(path: Path) -> dict[str, bytes]:
    """What an index answers from: the generation may be another."""
    (generation,) = [path / (path / "CURRENT").read_text().strip()]
    files.verify_folder(generation)
    return {name: data for name, data in contents(generation).items() if name != files.MANIFEST}


def within(path: Path, *names: str) -> dict[str, bytes]:
    """Those files of a folder whose bytes say everything."""
    return {name: data for name, data in contents(path).items() if any(re.fullmatch(one, name) for one in names)}


def scores(path: Path) -> dict[str, bytes]:
    """An evaluation, but for how often labels were read: what was killed may have read them."""
    verdict = files.read_json(path / "verdict.json")
    verdict.pop("test_readings")
    return within(path, r".*\.csv", r".*\.png", r"\.tmp-.*") | {"verdict": json.dumps(verdict).encode()}


def study(path: Path) -> dict[str, bytes]:
    """A study, but for how many seconds each cell was trained."""
    results = files.read_json(path / "results.json")
    for cell in results["cells"]:
        assert cell.pop("seconds") > 0
    table = re.sub(r"(?m)(?<=%) +\d+$", "", (path / "results.txt").read_text())
    found = {"results.json": json.dumps(results).encode(), "results.txt": table.encode()}
    return within(path, r"results\.png", r"(.*/)?\.tmp-.*") | found


def beside(place: Path, name: str) -> dict[str, bytes]:
    """What lies beside the run and the data under this name; there must be no temporary files."""
    assert not [one.name for one in place.iterdir() if one.name.startswith(files.TEMPORARY)]
    return {key: data for key, data in contents(place).items() if key.startswith(name) and not key.endswith(".lock")}


VERBS: dict[str, tuple[Callable[[Path], None], Callable[[Path], dict[str, bytes]]]] = {
    "embed": (embed, lambda place: beside(place, "out.parquet")),
    "build": (build, lambda place: index_of(place / "index")),
    "add": (add, lambda place: index_of(place / "old-index")),
    "export": (export, lambda place: beside(place, "exported")),
    "pack": (pack, lambda place: beside(place, "packed")),
    "evaluate": (evaluate, lambda place: scores(place / "run" / "eval")),
    "report": (report, lambda place: within(place / "run", "README.md", "results.png")),
    "finetune": (finetune, lambda place: within(place / "tuned", r"curve\..*", "model/.*")),
    "ablate": (ablate, lambda place: study(place / "study")),
}
TIERS = {
    "evaluate": pytest.mark.slow,
    "report": pytest.mark.slow,
    "finetune": pytest.mark.slow,
    "ablate": pytest.mark.nightly,
}
ALL = [pytest.param(name, marks=TIERS.get(name, ())) for name in VERBS]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its data, an index and a plan."""
    place = tmp_path_factory.mktemp("origin")
    labelled_npz(place / "toy.npz", 60)
    labelled_npz(place / "more.npz", 80)
    (place / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    mocokit.pretrain(place / "toy.npz", place / "run", quiet=True, **(OPTIONS | {"epochs": 1}))
    mocokit.search_build(place / "run", place / "toy.npz", place / "old-index", quiet=True)
    return place


def _child(verb: str, place: str, told: str, at: int) -> None:
    calls = 0

    def due() -> bool:
        nonlocal calls
        calls += 1
        return calls == at

    die_when(due)
    code, said = 0, ""
    try:
        VERBS[verb][0](Path(place))
    except MocokitError as error:
        code, said = error.exit_code, f"{type(error).__name__}: {error}"
    Path(told).write_text(json.dumps([calls, said]))
    sys.exit(code)


def start(verb: str, place: Path, told: Path, at: int = 0) -> ForkServerProcess:
    process = CONTEXT.Process(target=_child, args=(verb, str(place), str(told), at))
    process.start()
    return process


def end(process: ForkServerProcess, told: Path) -> tuple[int, int, str]:
    """Exit code, calls made, what was said."""
    process.join(600)
    assert not process.is_alive()
    calls, said = json.loads(told.read_text()) if told.exists() else (0, "")
    told.unlink(missing_ok=True)
    return int(process.exitcode or 0), calls, said


def whole(verb: str, origin: Path, place: Path) -> tuple[int, dict[str, bytes]]:
    """How many calls the verb makes, and what it leaves when nothing disturbs it."""
    shutil.copytree(origin, place)
    code, calls, said = end(start(verb, place, place.parent / "told"), place.parent / "told")
    assert code == 0, said
    found = VERBS[verb][1](place)
    assert found
    return calls, found


@pytest.mark.parametrize("every", [3, pytest.param(None, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("verb", ALL)
def test_killed_and_run_again(origin: Path, tmp_path: Path, verb: str, every: int | None) -> None:
    """At some calls (all of them at night): the second time it ends as if it had never been killed."""
    calls, expected = whole(verb, origin, tmp_path / "whole")
    every = every and calls // every + 1
    place, told = tmp_path / "killed", tmp_path / "told"
    for at in range(2, calls + 1, every or 1):
        shutil.copytree(origin, place)
        assert end(start(verb, place, told, at), told)[0] == -signal.SIGKILL
        code, _, said = end(start(verb, place, told), told)
        assert code == 0, f"call {at} of {calls}: {said}"
        assert VERBS[verb][1](place) == expected, f"call {at} of {calls}"
        assert verified_steps(place / "run" / "checkpoints")
        shutil.rmtree(place)


@pytest.mark.parametrize("verb", ALL)
def test_two_at_once(origin: Path, tmp_path: Path, verb: str) -> None:
    """What is left is what one alone leaves; the other did the same, or said why not."""
    _, expected = whole(verb, origin, tmp_path / "whole")
    place = tmp_path / "both"
    shutil.copytree(origin, place)
    started = [(start(verb, place, tmp_path / f"told{n}"), tmp_path / f"told{n}") for n in range(2)]
    ended = [end(process, told) for process, told in started]
    assert 0 in [code for code, _, _ in ended], ended
    for code, _, said in ended:
        assert code == 0 or said.startswith(("LockedError: ", "UsageError: ")), said
    assert VERBS[verb][1](place) == expected
