"""The benchmark harness: the gate, the pace, the statistic, memory, and one small run from end to end."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import cases, harness, pace, report, speed, speedrun_cifar10
from benchmarks.arms import Order, ours, plain
from benchmarks.harness import GateError, compare_steps
from PIL import Image


@pytest.mark.parametrize("case", ["smoke", "tiny"])
def test_one_step_of_mocokit_and_of_the_plain_loop_give_the_same_loss_and_gradient(tmp_path: Path, case: str) -> None:
    one = Order(case=case, folder=str(tmp_path), threads=1)
    before = torch.get_num_threads()
    steps = {}
    for name, make in (("mocokit", ours.make), ("plain", plain.make)):
        step = make(one).gate()
        flat = torch.cat([gradient.flatten() for gradient in step.gradients]).numpy()
        steps[name] = (step.loss, flat)
    torch.set_num_threads(before)
    compare_steps(steps)
    assert 0.1 < steps["mocokit"][0] < np.log1p(cases.CASES[case].K)
    assert np.linalg.norm(steps["plain"][1]) > 0


@pytest.mark.parametrize(
    ("loss", "shift", "words"),
    [(2.001, 0.0, "the loss by 5.0e-04"), (2.0, 1e-3, "the gradient by"), (float("nan"), 0.0, "nan")],
)
def test_arms_that_do_not_compute_the_same_are_not_timed(loss: float, shift: float, words: str) -> None:
    gradient = np.ones(4, np.float32)
    with pytest.raises(GateError, match=words):
        compare_steps({"mocokit": (2.0, gradient), "other": (loss, gradient + np.float32(shift))})


def test_another_number_of_parameters_is_no_comparison() -> None:
    with pytest.raises(GateError, match="4 parameters and other 3"):
        compare_steps({"mocokit": (2.0, np.ones(4, np.float32)), "other": (2.0, np.ones(3, np.float32))})


def test_the_pace_stops_a_loop_between_two_batches_and_counts_only_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [{"seconds": 0.02, "split": True}, {"seconds": 0.0}, {"quit": True}]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(one) + "\n" for one in orders)))
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(pace, "tell", told.append)
    clock = pace.Clock()
    taken = 0
    for _ in pace.Pace(batch=10, drain=3, clock=clock)(iter(int, 1)):
        clock.mark("loss")
        taken += 1
    first, second = told
    assert first["images"] + second["images"] == 10 * (taken - 6)  # 3 untimed steps in each of two blocks
    assert second["images"] == 10  # never nothing
    assert first["seconds"] >= 0.02
    assert sum(first["split"].values()) == pytest.approx(first["seconds"], rel=0.2)
    assert second["split"] is None


def test_the_interval_holds_the_median_and_shrinks_with_agreement() -> None:
    middle, low, high = harness.interval([1.9, 2.0, 2.1, 2.0, 2.0])
    assert low <= middle == 2.0 <= high
    assert harness.interval([3.0] * 5) == (3.0, 3.0, 3.0)


def test_memory_is_that_of_a_process_and_its_children() -> None:
    child = "held = bytearray(60_000_000); print(1, flush=True); input()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        with harness.peak_memory(parent.pid) as peak:
            assert len(harness.family(parent.pid)) == 2
            total = harness.held(harness.family(parent.pid))
            alone = [harness.held([pid]) for pid in harness.family(parent.pid)]
        parent.communicate(b"\n")
    assert 60e6 < total < 200e6
    assert total < sum(alone)  # the interpreter's own pages are counted once
    assert peak[0] > 60e6
    assert harness.held([2**22 + 1]) == 0


@pytest.mark.slow
def test_two_arms_run_side_by_side_and_make_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.skip("starts pinned processes of its own")
    speed.main(
        ["--case", "smoke", "--rounds", "1", "--block", "0.1", "--arms", "mocokit", "plain", "--weigh", "mocokit",
         "--out", str(tmp_path), "--data", str(tmp_path)]
    )  # fmt: skip
    record = json.loads((tmp_path / "smoke-fp32.json").read_text())
    mocokit, other = record["rows"]
    assert len(mocokit["rates"]) == len(other["rates"]) == 1
    assert mocokit["peak_mib"] > 50
    assert sum(mocokit["split"].values()) == pytest.approx(1)
    assert record["ratios"]["plain PyTorch"][0] == pytest.approx(mocokit["rates"][0] / other["rates"][0])
    assert "| plain PyTorch |" in capsys.readouterr().out
    assert report.case_lines(record)[0].startswith("**smoke, fp32**: small-cnn-8 at 16 px, batch 8, K 32")


def test_the_first_epoch_of_files_has_the_decoding_in_it() -> None:
    row = {
        "split": dict.fromkeys(pace.PARTS, 0.2), "cores": 2.0, "peak_mib": None,
        "order": dataclasses.asdict(Order(case="photos", folder="")),
    }  # fmt: skip
    rows = [
        row | {"label": "mocokit", "rates": [90.0, 100.0, 110.0], "facts": {"seconds to decode": 1.6}},
        row | {"label": "lightly", "rates": [25.0], "facts": {}},
    ]
    record = {"case": dataclasses.asdict(cases.CASES["photos"]), "precision": "fp32", "rounds": 3, "block": 1.0,
              "rows": rows, "ratios": {"lightly": (4.0, 3.9, 4.1)}}  # fmt: skip
    lines = report.case_lines(record)  # 320 pictures: 3.2 s of training and 1.6 s of decoding
    first = next(line for line in lines if line.startswith("| mocokit, first epoch"))
    assert first.startswith("| mocokit, first epoch | 67 | 1.500x |")
    assert {line.count("|") for line in lines if line.startswith("|")} == {first.count("|")}
    assert "in 1.6 s (200 a second)" in lines[-1]
    assert "2.67x lightly" in lines[-1]
    record["case"] = dataclasses.asdict(cases.CASES["tiny"])
    assert not any("first epoch" in line for line in report.case_lines(record))


def cifar_like(path: Path) -> Path:
    """64 training pictures and 8 test pictures whose colour tells their class."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = np.arange(72) % 10
    rows = []
    for label in labels:
        data = io.BytesIO()
        Image.fromarray(np.full((32, 32, 3), 25 * label, np.uint8)).save(data, "PNG")
        rows.append({"bytes": data.getvalue()})
    pq.write_table(pa.table({"image": rows, "label": labels, "split": ["train"] * 64 + ["test"] * 8}), path)
    return path


def test_the_speed_run_reads_every_epoch_and_states_all_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = dataclasses.replace(cases.CASES["smoke"], name="cifar10", size=32, picture=32, batch=16)
    monkeypatch.setitem(cases.CASES, "cifar10", small)
    threads = torch.get_num_threads()
    speedrun_cifar10.main(
        [str(cifar_like(tmp_path / "c.parquet")), "--images", "48", "--held", "16", "--epochs", "2", "--seeds", "1",
         "--other-epochs", "3", "--threads", "1", "--workers", "0", "--out", str(tmp_path / "out.json")]
    )  # fmt: skip
    torch.set_num_threads(threads)
    record = json.loads((tmp_path / "out.json").read_text())
    arms = ["plain", "mocokit", speedrun_cifar10.ROUNDED, speedrun_cifar10.OTHER]
    assert [one["arm"] for one in record["speedrun"]] == arms
    assert all(one["epochs"] == [1.0, 2.0] and len(one["seconds"]) == 2 for one in record["speedrun"][:3])
    assert record["speedrun"][3]["epochs"] == [1.0, 2.0, 3.0]
    assert "def race" in record["code"]
    assert "Threshold: " in capsys.readouterr().out


def test_a_seed_that_never_comes_there_is_counted() -> None:
    def course(arm: str, seed: int, *accuracy: float) -> speedrun_cifar10.Course:
        return speedrun_cifar10.Course(arm, seed, [10.0, 20.0], [1.0, 2.0], list(accuracy), 1.0)

    courses = [course("plain", 0, 0.3, 0.5), course("plain", 1, 0.3, 0.52), course("plain", 2, 0.2, 0.4)]
    courses += [course("mocokit", seed, 0.51 - seed / 100, 0.53 - seed / 10) for seed in range(3)]
    told = speedrun_cifar10.claims(courses)
    assert "Threshold: 0.495" in told[2]
    assert told[3].startswith("plain: median 20 s, 20 to 20 s, 1 of 3 never came there; all seeds: 20, 20, never")
    assert told[4].startswith("mocokit: median 10 s, 10 to 10 s, 1 of 3 never came there; all seeds: 10, 10, never")
