"""`python -m tests.golden.make_run` makes a stored run anew: when the format changes, under a new name, beside the old.

A tiny run of today's format, stopped after 8 of 12 steps, with the losses of the whole run beside it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import mocokit
from mocokit.errors import InterruptedRunError
from tests.toy import OPTIONS, npz

HERE = Path(__file__).parent
GOLDEN = OPTIONS | {"backbone": "small-cnn-4-4", "dim": 4}


def main() -> None:
    """Train twice: to the end, for the losses, and to step 8, for the folder."""
    target = HERE / "run-1"
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        data = npz(Path(place) / "toy.npz")
        whole = mocokit.pretrain(data, Path(place) / "whole", quiet=True, **GOLDEN)
        half = Path(place) / "half"
        with contextlib.suppress(InterruptedRunError):
            mocokit.pretrain(data, half, quiet=True, stop_after=8, **GOLDEN)
        kept = ["run.json", "config.yaml", "loss.jsonl", "metrics.jsonl", "checkpoints/step-4", "checkpoints/step-8"]
        for name in kept:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if (half / name).is_dir() else shutil.copyfile)(half / name, target / name)
        config = (target / "config.yaml").read_text().replace(str(data), "toy.npz")
        (target / "config.yaml").write_text(config)
        shutil.copyfile(whole.path / "loss.jsonl", target.with_name("run-1-losses.jsonl"))


if __name__ == "__main__":
    main()
