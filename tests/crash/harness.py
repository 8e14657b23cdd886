"""Start a toy run, kill it with SIGKILL at chosen moments, resume it, and compare the end with a run never killed.

Children come from a fork server that has imported the library and computed nothing, so a cycle costs little more
than the run itself. Kills aimed "inside a save" wait for a temporary folder to appear among the checkpoints.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

from mocokit import files

TOY: dict[str, Any] = {
    "epochs": 5,
    "batch_size": 12,
    "queue_size": 30,
    "backbone": "small-cnn-8-12",
    "dim": 16,
    "precision": "fp32",
    "layout": "contiguous",
    "threads": 1,
    "workers": 1,
    "checkpoint_every": 3,
    "momentum": 0.9,
}
"""40 steps of 12 images at 16 px; a checkpoint every 3."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["mocokit.cli", "mocokit.api", "torch._dynamo", "tests.crash.harness"])


def toy_data(folder: Path) -> Path:
    """100 random 16-px pictures as .npz."""
    path = folder / "toy.npz"
    pictures = np.random.default_rng(0).integers(0, 256, (100, 16, 16, 3), dtype=np.uint8)
    np.savez(path, images=pictures)
    return path


def _child(data: str, out: str, resume: bool, options: dict[str, Any], sabotage: Callable[[], None] | None) -> None:
    from mocokit import api

    if sabotage is not None:
        sabotage()
    api.pretrain(data, out, resume=resume, quiet=True, **options)


def start(
    data: Path, out: Path, *, resume: bool, options: dict[str, Any], sabotage: Callable[[], None] | None = None
) -> ForkServerProcess:
    """A child process that trains."""
    process = CONTEXT.Process(target=_child, args=(str(data), str(out), resume, options, sabotage))
    process.start()
    return process


def finish(process: ForkServerProcess, limit: float = 120.0) -> int:
    """Wait for the child and return its exit code."""
    process.join(limit)
    assert not process.is_alive(), "the child did not end in time"
    return int(process.exitcode or 0)


@dataclass
class Kills:
    """How many kills hit what."""

    stages: Counter[str] = field(default_factory=Counter)
    torn: list[str] = field(default_factory=list)


def stage(out: Path) -> str:
    """What the run was doing, judged by what lies on the disk."""
    folder = out / "checkpoints"
    if not (out / "config.yaml").exists():
        return "before the first file"
    temporary = [p for p in folder.iterdir() if p.name.startswith(files.TEMPORARY)] if folder.is_dir() else []
    if temporary:
        if "removed" in temporary[0].name:
            return "pruning"
        names = {p.name for p in temporary[0].iterdir()}
        return f"saving, {len(names)} of 4 files"
    return "between saves"


def kill_at_random(
    process: ForkServerProcess, out: Path, rng: random.Random, *, inside_save: bool, kills: Kills
) -> None:
    """Kill the child: after a random delay, or inside a save (one of the next three).

    A save takes milliseconds, so the child is held still first, and let go on when the save was over by then.
    """
    deadline = time.monotonic() + 60
    assert process.pid is not None
    if inside_save:
        folder = out / "checkpoints"
        skip = rng.randrange(3)  # let some saves pass
        before: set[str] = set()
        while process.is_alive() and time.monotonic() < deadline:
            try:
                current = {e.name for e in os.scandir(folder) if e.name.startswith(files.TEMPORARY)}
            except FileNotFoundError:
                continue
            if fresh := current - before:
                before |= fresh
                if skip > 0:
                    skip -= 1
                    continue
                time.sleep(rng.random() * 0.004)
                os.kill(process.pid, signal.SIGSTOP)
                if stage(out).startswith(("saving", "pruning")):
                    break
                os.kill(process.pid, signal.SIGCONT)
    else:
        time.sleep(rng.random() * 1.2)
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills.stages[stage(out)] += 1
        kills.torn += torn_checkpoints(out)


def torn_checkpoints(out: Path) -> list[str]:
    """Folders that bear a committed checkpoint's name but do not verify: there must never be one."""
    torn = []
    for path in sorted((out / "checkpoints").glob("step-*")):
        try:
            files.verify_folder(path)
        except files.DamagedError as error:
            torn.append(str(error))
    return torn


def fingerprint(out: Path) -> dict[str, str]:
    """SHA-256 of everything that must be the same: the last checkpoint's files and the loss log."""
    last = max((out / "checkpoints").glob("step-*"), key=lambda p: int(p.name.removeprefix("step-")))
    found = {f"{last.name}/{p.name}": files.sha256_file(p) for p in sorted(last.iterdir()) if p.name != files.MANIFEST}
    found["loss.jsonl"] = files.sha256_file(out / "loss.jsonl")
    return found


def run_with_kills(
    data: Path,
    out: Path,
    *,
    count: int,
    seed: int,
    options: dict[str, Any],
    sabotage: Callable[[], None] | None = None,
) -> Kills:
    """Kill `count` times, half of them inside a save, resuming each time; then let the run end.

    The run is started afresh in a new folder whenever it ends before all kills are used up. Only a sabotaged one may
    end by itself with an error: it can leave a folder that nothing can resume.
    """
    rng, kills, attempt = random.Random(seed), Kills(), 0
    folder = out / "0"
    while sum(kills.stages.values()) < count:
        resume = (folder / "run.json").exists()
        process = start(data, folder, resume=resume, options=options, sabotage=sabotage)
        done = sum(kills.stages.values())
        kill_at_random(process, folder, rng, inside_save=done % 2 == 0, kills=kills)
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0 or sabotage is not None, f"the run failed with exit code {process.exitcode}"
            attempt += 1
            folder = out / str(attempt)
    process = start(data, folder, resume=(folder / "run.json").exists(), options=options, sabotage=sabotage)
    assert finish(process) == 0 or sabotage is not None
    return kills


def digest(values: dict[str, str]) -> str:
    """One hash of a fingerprint."""
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()
