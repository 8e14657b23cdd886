"""Eight processes start in one run folder at once: one runs, the others leave at once and say who holds it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mocokit
from tests.toy import flags, npz

START = """
import sys, time
from mocokit import files
began = []
class Timed(files.RunLock):
    def __init__(self, folder):
        began.append(time.monotonic())
        super().__init__(folder)
files.RunLock = Timed
from mocokit.cli import main
code = main(sys.argv[1:])
print("seconds", time.monotonic() - began[0], "torch", "torch" in sys.modules, flush=True)
sys.exit(code)
"""
TOGETHER = 8


def start(data: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", START, "pretrain", str(data), "--out", str(out), "-q", *flags(epochs=2000), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "rounds", [pytest.param(3, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.nightly)]
)
def test_exactly_one_of_eight_runs(tmp_path: Path, rounds: int) -> None:
    """In every other round the folder was left by a holder that was killed."""
    data = npz(tmp_path / "toy.npz")
    longest = 0.0
    for number in range(rounds):
        out = tmp_path / f"run{number // 2}"
        again = ("--overwrite",) if number % 2 else ()
        processes = [start(data, out, *again) for _ in range(TOGETHER)]
        try:
            ended: dict[int, tuple[str, str]] = {}
            while len(ended) < TOGETHER - 1:  # whoever runs has 2,000 epochs to go
                for process in processes:
                    if process.pid not in ended and process.poll() is not None:
                        ended[process.pid] = process.communicate()
            (runs,) = [process for process in processes if process.pid not in ended]
            assert runs.poll() is None, runs.communicate()
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        for told, error in ended.values():
            assert f"{out} is in use by process {runs.pid} on" in error
            seconds, torch = re.findall(r"seconds ([\d.]+) torch (\w+)", told)[0]
            assert torch == "False"
            longest = max(longest, float(seconds))
        assert {process.returncode for process in processes if process is not runs} == {1}
    print(f"longest exit after the lock attempt: {longest:.3f} s")
    assert longest < 2
    mocokit.pretrain(
        data, tmp_path / "run0", quiet=True, overwrite=True, epochs=1, batch_size=8, backbone="small-cnn-8-8"
    )
