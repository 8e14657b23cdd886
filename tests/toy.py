"""Tiny pictures, tiny runs, and processes that run them: shared by the tests of training and the command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mocokit import files
from mocokit.errors import DamagedError
from tests.crash import harness

OPTIONS: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 8,
    "queue_size": 20,
    "backbone": "small-cnn-8-8",
    "dim": 8,
    "precision": "fp32",
    "layout": "contiguous",
    "threads": 1,
    "checkpoint_every": 4,
}
"""With `pictures(50)`: 12 steps, 6 an epoch; checkpoints at 4, 8 and 12, of which the last two are kept."""
STEPS = 12


def flags(**changes: Any) -> list[str]:
    """`OPTIONS` with changes, as words of the command line; None leaves one out."""
    words: list[str] = []
    for name, value in (OPTIONS | changes).items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def pictures(count: int = 50, side: int = 16, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [count, side, side, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def npz(path: Path, count: int = 50, **arrays: Any) -> Path:
    """Pictures as an .npz file, with further arrays beside them."""
    np.savez(path, images=pictures(count), **arrays)
    return path


def labelled_npz(path: Path, count: int = 120, classes: int = 2) -> Path:
    """Pictures whose brightness tells their class, in all three splits."""
    labels = np.arange(count) % classes
    images = (pictures(count) // 3 + (labels * (150 // max(classes - 1, 1)))[:, None, None, None]).astype(np.uint8)
    split = np.where(np.arange(count) // classes % 3 == 0, "test", "train")
    split[np.arange(count) // classes % 6 == 1] = "val"
    np.savez(path, images=images, labels=labels, split=split)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative name; links by where they lead."""
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def flip_bit(path: Path, bit: int) -> None:
    """Change one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)


def verified_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder` that verify, ascending."""
    found = []
    for path in folder.glob("step-*"):
        with contextlib.suppress(DamagedError):
            files.verify_folder(path)
            found.append(int(path.name.removeprefix("step-")))
    return sorted(found)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A real file system of a few megabytes at `path`; skips the test where mounting isn't allowed."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a small tmpfs can't be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextlib.contextmanager
def without_privileges() -> Iterator[Path]:
    """Root may do anything; inside, files are judged as for an ordinary user, whose home is the folder given."""
    with tempfile.TemporaryDirectory() as home:
        if os.geteuid() != 0:
            yield Path(home)
            return
        os.chown(home, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(home)
        finally:
            os.seteuid(0)


@contextlib.contextmanager
def search_server(index: Path, token: str, seconds: float = 120) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`mocokit search serve` in a process of its own, and its address; killed after `seconds` at the latest."""
    words = ["search", "serve", str(index), "--port", "0", "--token", token, "-q"]
    process = subprocess.Popen([sys.executable, "-m", "mocokit", *words], stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(seconds, process.kill)
    watchdog.start()
    assert process.stdout
    try:
        yield process, process.stdout.readline().strip()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def _cli(words: Sequence[str], errors: str) -> None:
    from mocokit.cli import main

    sys.stderr = Path(errors).open("w", encoding="utf-8")  # noqa: SIM115 it lives as long as the process
    sys.exit(main(list(words)))


def start_cli(words: Sequence[str], errors: Path) -> ForkServerProcess:
    """The command line in a process of its own, forked after the slow imports; its stderr goes to a file."""
    process = harness.CONTEXT.Process(target=_cli, args=(list(words), str(errors)))
    process.start()
    return process
