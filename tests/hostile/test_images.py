"""Damaged, odd and blown-up pictures: each gives a picture or a reason; nothing crashes, hangs or eats the memory."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attacks.images import FORMATS, bombs, mutated, seed_pictures

import mocokit
from mocokit.data.decode import UnreadableImageError, decode
from tests.toy import OPTIONS

MOST_SECONDS, MOST_BYTES = 10.0, 2**30
CONTEXT = multiprocessing.get_context("spawn")


def peak_bytes() -> float:
    """This process's own peak of resident memory; getrusage would tell its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def look_at(files: Sequence[tuple[str, bytes]], out: Any) -> None:
    """Decode each and send what became of it: name, reason ("" = a picture), seconds; last the peak of memory."""
    for name, data in files:
        began = time.monotonic()
        try:
            rgb = decode(data)
            reason = "" if rgb.dtype == np.uint8 and rgb.shape[2:] == (3,) else f"made {rgb.dtype} {rgb.shape}"
        except UnreadableImageError as error:
            reason = error.reason or "no reason"
        out.send((name, reason, time.monotonic() - began))
    out.send(("", "", peak_bytes()))
    out.close()


def in_a_process_of_its_own(files: Sequence[tuple[str, bytes]]) -> tuple[dict[str, tuple[str, float]], float]:
    """What became of each file, and the peak of memory. A crash or a hang of the interpreter fails the test."""
    mine, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=look_at, args=(files, theirs))
    process.start()
    theirs.close()
    ends: dict[str, tuple[str, float]] = {}
    peak = 0.0
    try:
        while True:
            assert mine.poll(30 * MOST_SECONDS), f"hangs after {list(ends)[-1:]}"
            name, reason, number = mine.recv()
            if name:
                ends[name] = (reason, number)
            else:
                peak = number
    except EOFError:
        process.join()
    finally:
        process.kill()
    assert process.exitcode == 0, f"the interpreter died after {list(ends)[-1:]}"
    return ends, peak


def judged(files: Sequence[tuple[str, bytes]]) -> dict[str, str]:
    """The reason of each file, after every promise but the reason itself was checked."""
    ends, peak = in_a_process_of_its_own(files)
    assert len(ends) == len(files)
    assert max(seconds for _, seconds in ends.values()) < MOST_SECONDS
    assert peak < MOST_BYTES
    reasons = {name: reason for name, (reason, _) in ends.items()}
    assert not [name for name, reason in reasons.items() if reason == "no reason" or reason.startswith("made ")]
    return reasons


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.nightly)])
def test_mutated_files(count: int) -> None:
    reasons = judged(list(mutated(count)))
    assert {name.split()[1] for name in reasons} == set(FORMATS)
    assert 0.2 < sum(bool(reason) for reason in reasons.values()) / count < 0.95  # both ends are met


def test_seeds_are_pictures() -> None:
    assert set(judged(list(seed_pictures().items())).values()) == {""}


def test_bombs_are_refused_before_they_are_decoded() -> None:
    ends, peak = in_a_process_of_its_own(list(bombs().items()))
    assert all(reason for reason, _ in ends.values())
    assert max(seconds for _, seconds in ends.values()) < 1
    assert peak < 400 * 2**20  # what torch and Pillow take by themselves; 13,000 x 13,000 alone would take 500 MB


def odd_folder() -> list[Path]:
    root = Path(__file__).parents[3] / "shared" / "data" / "robust_images"
    if not root.is_dir():
        pytest.skip("the folder of odd real files is not on this machine")
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != "manifest.csv")


@pytest.mark.slow
def test_the_folder_of_odd_real_files() -> None:
    files = [(str(path), path.read_bytes()) for path in odd_folder()]
    reasons = judged(files)
    assert len(reasons) >= 500
    assert sum(not reason for reason in reasons.values()) >= 300


@pytest.mark.slow
def test_a_run_over_damaged_files_names_each(tmp_path: Path) -> None:
    """Every third picture is damaged; the run trains, each unreadable one is in skipped.jsonl once, with its reason."""
    folder = tmp_path / "photos"
    folder.mkdir()
    seeds = list(seed_pictures().items())
    good = dict(seeds)["PNG"]
    for number, (_, data) in enumerate(mutated(30, seed=4)):
        (folder / f"{number:03d} damaged.png").write_bytes(data)
        (folder / f"{number:03d} a.png").write_bytes(good)
        (folder / f"{number:03d} b.png").write_bytes(dict(seeds)["JPEG"])
    with pytest.raises(mocokit.errors.DataError, match=r"more than the 1\.00% of all that is allowed"):
        mocokit.pretrain(folder, tmp_path / "refused", quiet=True, image_size=16, **OPTIONS)
    run = mocokit.pretrain(
        folder, tmp_path / "run", quiet=True, max_bad=0.4, image_size=16, **(OPTIONS | {"epochs": 1})
    )
    skipped = [json.loads(line) for line in (run.path / "skipped.jsonl").read_text().splitlines()]
    expected = []
    for path in sorted(folder.iterdir()):
        try:
            decode(path.read_bytes())
        except UnreadableImageError:
            expected.append(path.name)
    assert [row["name"] for row in skipped] == expected
    assert all(row["reason"] for row in skipped)
    assert len(expected) >= 10
