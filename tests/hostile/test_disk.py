"""A disk that fails once, at any call of a whole run: the error is raised, and what was committed loads."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import mocokit
from mocokit.errors import StorageError
from mocokit.reporting import plots
from mocokit.training.checkpoint import find_checkpoint
from tests.faults import CODES, Faults
from tests.toy import OPTIONS, npz, verified_steps

RUN = OPTIONS | {"epochs": 1, "checkpoint_every": 2}
"""6 steps, checkpoints at 2, 4 and 6."""


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes three quarters of such a run; here it matters only that each picture's file is written."""
    for name in ("results_figure", "pairs_figure"):
        monkeypatch.setattr(plots, name, lambda *_, **__: Figure(figsize=(0.2, 0.2)))


def run_with_fault(data: Path, out: Path, n: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call n of all of a run fails once with an errno."""
    faults = Faults(monkeypatch, fail_at=n, code=code)
    try:
        with pytest.raises(StorageError, match=r"Could not"):
            mocokit.pretrain(data, out, quiet=True, **RUN)
    finally:
        faults.stop()
    assert faults.calls >= n
    folder = out / "checkpoints"
    there = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*")) if folder.is_dir() else []
    assert verified_steps(folder) == there, "a committed checkpoint that does not verify"
    if there:
        assert find_checkpoint(folder).manifest["step"] == there[-1]
    assert mocokit.pretrain(data, out, quiet=True, resume=(out / "run.json").exists(), **RUN).step == 6


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize(
    "every", [pytest.param(29, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)]
)
def test_every_call_of_a_run_that_fails_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, every: int
) -> None:
    data = npz(tmp_path / "toy.npz")
    total = Faults(monkeypatch).count(lambda: mocokit.pretrain(data, tmp_path / "counted", quiet=True, **RUN))
    assert total > 100
    first = 1 + CODES.index(code) * (every // len(CODES))
    for n in range(first, total + 1, every):
        run_with_fault(data, tmp_path / str(n), n, code, monkeypatch)
