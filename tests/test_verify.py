"""verify: every damage of a run folder is named, the checkpoint it would load is said, and a resume can be proved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import mocokit
from mocokit.api import resume_proof
from mocokit.cli import main
from mocokit.errors import DataError, UsageError
from mocokit.training.runfolder import open_run
from tests.toy import OPTIONS, contents, flip_bit, npz


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npz(tmp_path_factory.mktemp("data") / "toy.npz")


@pytest.fixture(scope="module")
def once(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    return mocokit.pretrain(data, out, quiet=True, **OPTIONS).path


@pytest.fixture
def run(once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(once, tmp_path / "run")


def test_a_whole_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out
    assert "A resume loads step-12" in said
    assert "DAMAGED" not in said
    assert contents(run) == before
    found = mocokit.verify(run)
    assert {one.name for one in found.checked} >= {
        "config.yaml", "checkpoints/step-8", "checkpoints/step-12", "loss.jsonl", "metrics.jsonl", "cache/pixels.u8",
    }  # fmt: skip
    assert found.whole
    assert (found.checkpoint, found.passed_over) == ("step-12", ())


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("name", "harm", "checkpoint"),
    [
        ("checkpoints/step-12/model.safetensors", lambda p: flip_bit(p, 999), "step-8"),
        ("checkpoints/step-12/MANIFEST.json", cut, "step-8"),
        ("checkpoints/step-8/optim.safetensors", cut, "step-12"),
        ("checkpoints/step-8/state.json", lambda p: p.unlink(), "step-12"),
        ("config.yaml", cut, "step-12"),
        ("config.yaml", lambda p: p.write_text(p.read_text().replace("m: 0.", "m: 0.1")), None),
        ("config.yaml", lambda p: p.unlink(), "step-12"),
        ("loss.jsonl", cut, "step-12"),
        ("loss.jsonl", lambda p: p.write_bytes(b"".join(p.read_bytes().splitlines(True)[1:])), "step-12"),
        ("metrics.jsonl", cut, "step-12"),
        ("status.json", cut, "step-12"),
        ("environment.json", lambda p: p.write_bytes(b"\xff"), "step-12"),
        ("cache/pixels.u8", lambda p: flip_bit(p, 99_999), "step-12"),
        ("cache/pixels.u8", cut, "step-12"),
        ("cache/pixels.u8.json", cut, "step-12"),
    ],
)
def test_damage_is_named(run: Path, name: str, harm: Callable[[Path], None], checkpoint: str | None) -> None:
    harm(run / name)
    found = mocokit.verify(run)
    assert not found.whole
    assert found.checkpoint == checkpoint
    told = " ".join(one.problem for one in found.checked if one.problem)
    assert Path(name).name.removesuffix(".json").split(".")[0] in told
    assert main(["verify", str(run), "--json"]) == 6


def test_what_would_be_passed_over_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(run / "checkpoints" / "step-12" / "state.json", 9)
    (run / "notes.txt").write_text("mine")
    (run / "checkpoints" / ".tmp-step-14-x").mkdir()
    assert main(["verify", str(run)]) == 6
    said = capsys.readouterr().out
    assert "passed over: " in said
    assert "step-12/state.json does not match its recorded SHA-256" in said
    assert "A resume loads step-8" in said
    assert "notes.txt" in said
    assert ".tmp-step-14-x" in said


def test_folders_that_are_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    with pytest.raises(UsageError, match="at least 1"):
        mocokit.verify(_empty_run(tmp_path), resume_test=-1)
    with pytest.raises(UsageError, match="no checkpoint that a resume could be tested with"):
        mocokit.verify(_empty_run(tmp_path), resume_test=2)


def _empty_run(folder: Path) -> Path:
    (folder / "run.json").write_text(json.dumps({"format": 1}))
    return folder


@pytest.mark.slow
def test_a_resume_is_proved_by_kills(run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    assert main(["verify", str(run), "--resume-test", "3", "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)["resume"]
    assert (found["kills"], found["exact"], found["differing"]) == (3, True, [])
    assert (found["from_step"], found["to_step"]) == (8, 12)
    assert sum(found["where"].values()) == 3
    assert contents(run) == before
    other = npz(tmp_path / "other.npz", 51)
    with pytest.raises(DataError, match=r"can't be trained .*are not those the run started with.*--data"):
        mocokit.verify(run, resume_test=1, data=other, quiet=True)


def test_another_byte_is_a_difference(run: Path) -> None:
    folder = open_run(run)
    expected = resume_proof._fingerprint(folder, 12)
    assert resume_proof._differences(expected, resume_proof._fingerprint(folder, 12)) == set()
    flip_bit(run / "checkpoints" / "step-12" / "model.safetensors", 4000)
    assert resume_proof._differences(expected, resume_proof._fingerprint(folder, 12)) == {"model.safetensors"}
    path = run / "loss.jsonl"
    path.write_text(path.read_text().replace('"step": 11, "loss": ', '"step": 11, "loss": 1'))
    differing = resume_proof._differences(expected, resume_proof._fingerprint(folder, 12))
    assert differing == {"model.safetensors", "loss.jsonl"}
    proof = resume_proof.ResumeProof(1, {"inside a save": 1}, 8, 12, 1, tuple(sorted(differing)))
    assert not proof.exact
    assert "DIFFERENT: loss.jsonl, model.safetensors" in proof.text()
