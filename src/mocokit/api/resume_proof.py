"""A proof of exact resume on this machine: a copy of the run is killed, resumed, and compared to the last byte."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from mocokit import files
from mocokit.errors import DataError, InterruptedRunError, MocokitError, UsageError
from mocokit.training.checkpoint import Found, checkpoint_steps, find_checkpoint
from mocokit.training.runfolder import CHECKPOINT_FILES, RunFolder
from mocokit.training.runlog import Progress
from mocokit.training.settings import RunConfig

WINDOW = 8
"""At most so many steps after the checkpoint are trained again and again; a checkpoint every 2."""
_EVERY = 2
_LIMIT = 600.0
"""Seconds that a child may take."""


@dataclass(frozen=True, slots=True)
class ResumeProof:
    """What was done and what came out. differing: files whose bytes differ from those of the copy never killed."""

    kills: int
    where: dict[str, int]
    from_step: int
    to_step: int
    compared: int
    """How often a copy reached `to_step` and was compared."""
    differing: tuple[str, ...] = field(default=())

    @property
    def exact(self) -> bool:
        """Whether no byte differed."""
        return not self.differing

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "kills": self.kills,
            "where": self.where,
            "from_step": self.from_step,
            "to_step": self.to_step,
            "compared": self.compared,
            "exact": self.exact,
            "differing": list(self.differing),
        }

    def text(self) -> str:
        """One sentence."""
        where = ", ".join(f"{count} {name}" for name, count in sorted(self.where.items()))
        result = "0 differing bytes" if self.exact else f"DIFFERENT: {', '.join(self.differing)}"
        return (
            f"{self.kills} kills between steps {self.from_step} and {self.to_step} ({where}), resumed each time, "
            f"{self.compared} end(s) compared with a copy never killed: {result}."
        )


def prove_resume(
    folder: RunFolder, config: RunConfig, data: str, kills: int, seed: int, progress: Progress
) -> ResumeProof:
    """Kill and resume a copy of the run `kills` times within a few steps after one of its checkpoints.

    Half of the kills wait for a save to begin. Raises UsageError when no checkpoint has steps after it, DataError when
    the copy can't be trained at all.
    """
    total = (config.data.images // config.train.batch_size) * config.train.epochs
    found = _checkpoint_with_steps_left(folder, total)
    start = int(found.manifest["step"])
    until = min(start + WINDOW, total)
    rng = random.Random(seed)  # noqa: S311 instants of kills, no secrets
    where: Counter[str] = Counter()
    differing: set[str] = set()
    compared = 0
    with tempfile.TemporaryDirectory(prefix="mocokit-verify-") as aside:
        place = Path(aside)
        progress.say(f"Training steps {start} to {until} in a copy, without a kill.")
        expected = _to_the_end(_copy(folder, found, place / "whole"), data, until)
        copy = _copy(folder, found, place / "0")
        tries = 0
        while where.total() < kills and tries < 4 * kills + 8:
            tries += 1
            stage = _one_kill(copy, data, start, until, rng, inside_save=where.total() % 2 == 0)
            if stage is None:  # it came to its end before it was hit
                differing |= _differences(expected, _fingerprint(copy, until))
                compared += 1
                copy = _copy(folder, found, place / str(tries))
                continue
            where[stage] += 1
            progress.show(f"kill {where.total()} of {kills} ({stage})")
        differing |= _differences(expected, _to_the_end(copy, data, until))
        compared += 1
    return ResumeProof(where.total(), dict(where), start, until, compared, tuple(sorted(differing)))


def _checkpoint_with_steps_left(folder: RunFolder, total: int) -> Found:
    """The newest checkpoint that verifies and is not the run's end."""
    for step in sorted(checkpoint_steps(folder.checkpoints), reverse=True):
        if step < total:
            with contextlib.suppress(MocokitError):
                return find_checkpoint(folder.checkpoints, step)
    raise UsageError(f"{folder.path} has no whole checkpoint with steps after it, so there is no resume to test.")


def _copy(folder: RunFolder, found: Found, target: Path) -> RunFolder:
    """The run as it was right after a checkpoint, its pixels linked to."""
    inside = files.make_folder(target / "checkpoints" / found.path.name)
    for name in CHECKPOINT_FILES:
        files.copy_file(found.path / name, inside / name)
    for name in ("run.json", "config.yaml", "loss.jsonl", "metrics.jsonl", "data-changes.jsonl"):
        if (folder.path / name).exists():
            files.copy_file(folder.path / name, target / name)
    cache = folder.path / "cache"
    if (cache / "pixels.u8").exists() and (cache / "pixels.u8.json").exists():
        files.make_folder(target / "cache")
        files.link_file(cache / "pixels.u8", target / "cache" / "pixels.u8")
        files.copy_file(cache / "pixels.u8.json", target / "cache" / "pixels.u8.json")
    return RunFolder(target)


def _child(data: str, out: str, until: int) -> None:
    from mocokit.api.pretraining import pretrain

    with contextlib.suppress(InterruptedRunError):
        pretrain(data, out, resume=True, quiet=True, stop_after=until, checkpoint_every=_EVERY)


def _start(copy: RunFolder, data: str, until: int) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mocokit.api.pretraining"])
    process = context.Process(target=_child, args=(data, str(copy.path), until))
    process.start()
    return process


def _to_the_end(copy: RunFolder, data: str, until: int) -> dict[str, str]:
    process = _start(copy, data, until)
    process.join(_LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
    if process.exitcode != 0:
        told = copy.status().get("message") or f"its process ended with {process.exitcode}"
        raise DataError(f"The copy of the run can't be trained ({told}). Name the data with --data if they moved.")
    return _fingerprint(copy, until)


def _one_kill(
    copy: RunFolder, data: str, start: int, until: int, rng: random.Random, *, inside_save: bool
) -> str | None:
    """Start, kill with SIGKILL at an instant, and say what was hit; None when the end came first."""
    process = _start(copy, data, until)
    target = rng.randint(start, until)
    skip = rng.randrange(2)
    before: set[str] = set()
    deadline = time.monotonic() + _LIMIT
    while process.is_alive() and time.monotonic() < deadline:
        if inside_save:
            fresh = _temporaries(copy) - before
            if fresh and skip == 0:
                time.sleep(rng.random() * 0.004)
                break
            if fresh:
                before |= fresh
                skip -= 1
        elif _lines(copy) >= target:
            time.sleep(rng.random() * 0.02)
            break
        time.sleep(0.0002)
    process.kill()  # it may have ended by itself: the exit code tells
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return _stage(copy)
    if process.exitcode != 0:
        raise DataError(f"The copy of the run can't be resumed: {copy.status().get('message') or process.exitcode}.")
    return None


def _temporaries(copy: RunFolder) -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return {entry.name for entry in os.scandir(copy.checkpoints) if entry.name.startswith(files.TEMPORARY)}
    return set()


def _lines(copy: RunFolder) -> int:
    """The steps logged so far; a resume cuts what an earlier attempt logged after its checkpoint."""
    path = copy.path / "loss.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _stage(copy: RunFolder) -> str:
    left = _temporaries(copy)
    if any("removed" in name for name in left):
        return "while pruning"
    return "inside a save" if left else "between saves"


def _fingerprint(copy: RunFolder, until: int) -> dict[str, str]:
    """SHA-256 of what must be the same: the tensors and counters of the last checkpoint, and the losses up to it."""
    last = copy.checkpoints / f"step-{until}"
    found = {name: files.sha256_file(last / name) for name in CHECKPOINT_FILES if name != files.MANIFEST}
    rows = [json.loads(line) for line in (copy.path / "loss.jsonl").read_bytes().splitlines()]
    return found | {"loss.jsonl": json.dumps([row for row in rows if row["step"] < until])}


def _differences(expected: dict[str, str], found: dict[str, str]) -> set[str]:
    return {name for name in expected | found if expected.get(name) != found.get(name)}
