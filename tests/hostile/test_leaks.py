"""5,000 steps with 5 % unreadable pictures: memory and descriptors stay where they are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.crash import harness
from tests.toy import pictures

STEPS, EVERY = 5000, 100


def _measured(data: str, out: str, told: str) -> None:
    """Train, and write down (step, resident bytes, descriptors) now and then."""
    from mocokit import api
    from mocokit.data.loader import Batch, BatchLoader

    original = BatchLoader.batches
    rows: list[tuple[int, int, int]] = []

    def batches(self: BatchLoader, start: int, stop: int) -> Iterator[Batch]:
        for batch in original(self, start, stop):
            if batch.step % EVERY == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                descriptors = len(list(Path("/proc/self/fd").iterdir()))
                rows.append((batch.step, pages * os.sysconf("SC_PAGE_SIZE"), descriptors))
            yield batch

    BatchLoader.batches = batches  # type: ignore[method-assign]
    options = harness.TOY | {"batch_size": 8, "epochs": STEPS // 12, "checkpoint_every": 100, "max_bad": 0.1}
    api.pretrain(data, out, quiet=True, image_size=16, **options)
    Path(told).write_text(json.dumps(rows))


@pytest.mark.nightly
def test_nothing_grows(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, picture in enumerate(pictures(100)):
        path = folder / f"{number:03d}.png"
        Image.fromarray(picture).save(path)
        if number % 20 == 7:
            path.write_bytes(path.read_bytes()[:60])
    out, told = tmp_path / "run", tmp_path / "told.json"
    process = harness.CONTEXT.Process(target=_measured, args=(str(folder), str(out), str(told)))
    process.start()
    assert harness.finish(process, 1800) == 0
    assert (out / "skipped.jsonl").read_text().count("\n") == 5
    rows = np.array(json.loads(told.read_text()), float)
    assert rows[-1, 0] >= STEPS - 2 * EVERY
    warm = rows[rows[:, 0] >= 1000]
    slope = np.polyfit(warm[:, 0], warm[:, 1], 1)[0] * 1000
    print(f"slope {slope / 1e6:.3f} MB per 1,000 steps; descriptors {sorted(set(warm[:, 2]))}")
    assert slope < 1e6
    assert warm[:, 2].max() - warm[:, 2].min() <= 2  # a log or a checkpoint may be open at the moment
