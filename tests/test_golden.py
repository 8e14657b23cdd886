"""Runs stored by earlier versions load, verify, and go on with the losses they had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import mocokit
from tests.golden.make_run import GOLDEN
from tests.toy import npz, verified_steps

HERE = Path(__file__).parent / "golden"
RUNS = sorted(path.name for path in HERE.glob("run-*") if path.is_dir())


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_run_goes_on(tmp_path: Path, name: str) -> None:
    run = shutil.copytree(HERE / name, tmp_path / "run")
    assert mocokit.verify(run).whole
    assert verified_steps(run / "checkpoints") == [4, 8]
    opened = mocokit.load_run(run)
    assert opened.step == 8
    assert opened.config.encoder.backbone == GOLDEN["backbone"]
    done = mocokit.pretrain(npz(tmp_path / "toy.npz"), run, resume=True, quiet=True)
    assert done.step == 12
    expected = [json.loads(line) for line in (HERE / f"{name}-losses.jsonl").read_text().splitlines()]
    found = [json.loads(line) for line in (run / "loss.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    # Equal bits are promised on one machine only; a different forward or a lost queue would differ in the first digits.
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-4)
    assert [row["fill"] for row in found] == [row["fill"] for row in expected]


def test_there_is_one() -> None:
    assert RUNS
