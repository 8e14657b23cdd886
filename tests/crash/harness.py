"""Start a toy run, kill it with SIGKILL at chosen moments, resume it, and compare the end with a run never killed.

Children come from a fork server that has imported the library and started no thread, so a cycle costs little more
than the run itself. Half of the kills are at a chosen place of a save, where the child ends itself, so that no busy
moment of the machine decides what they strike; the others come from outside at any moment. With several ranks, rank 0,
which saves, is killed inside its save, or any rank at any moment after they have met; the others must leave by
themselves. (Before, nobody can tell a dead rank from a slow one: they wait until `--rank-timeout`, or until torchrun
stops them.)
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import numpy as np

from mocokit import files
from mocokit.errors import RankLostError
from tests import ranks as launching
from tests.children import CONTEXT
from tests.faults import die_when

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

METHODS: dict[str, dict[str, Any]] = {
    "moco-v1": TOY | {"recipe": "moco-v1-small"},
    "moco-v2": TOY | {"recipe": "moco-v2-small"},
    "moco-v3": {k: v for k, v in TOY.items() if k != "queue_size"} | {"recipe": "moco-v3-small"},
    "simclr": {k: v for k, v in TOY.items() if k not in ("queue_size", "momentum")} | {"recipe": "simclr-small"},
    "byol": {k: v for k, v in TOY.items() if k != "queue_size"} | {"recipe": "byol-small"},
}
"""The same run under each method."""

STAGES = (
    "before the folder is made",
    "writing model.safetensors",
    "writing optim.safetensors",
    "writing state.json",
    "writing the manifest",
    "before the folder is synced",
    "before the rename",
    "after the rename, before its sync",
    "before pruning",
    "inside pruning",
)
"""Where in a save the aimed kills strike: in the order of the protocol."""

GONE_WITHIN = 10.0
"""Seconds after a rank was killed by when the others must have left."""


def toy_data(folder: Path) -> Path:
    """100 random 16-px pictures as .npz."""
    path = folder / "toy.npz"
    pictures = np.random.default_rng(0).integers(0, 256, (100, 16, 16, 3), dtype=np.uint8)
    np.savez(path, images=pictures)
    return path


@dataclass(frozen=True)
class Aim:
    """Where a child kills itself: in its save number `save` (from 1), at STAGES[stage]; in a file's write or sync."""

    stage: int
    save: int
    in_write: bool

    def call(self) -> int:
        """Before which call of the primitives of `files`, from 1: a folder, four files of three calls each ..."""
        if self.stage == 0:
            return 1
        if self.stage <= 4:
            return 3 * self.stage + (0 if self.in_write else 1)  # open, write, sync
        return 14 + self.stage - 5  # sync of the folder, rename, sync of the parent, rename of the pruned one

    def take(self) -> None:
        """From now on this process counts, and ends itself with SIGKILL at that call; half a write is done before."""
        from mocokit.api import pretraining

        saves = calls = 0
        inside = False
        save, remove = pretraining.save_checkpoint, files.shutil.rmtree

        def counted_save(*arguments: Any, **more: Any) -> Any:
            nonlocal saves, calls, inside
            saves, calls, inside = saves + 1, 0, True
            try:
                return save(*arguments, **more)
            finally:
                inside = False

        def due() -> bool:
            nonlocal calls
            if inside and saves == self.save:
                calls += 1
                return calls == self.call() and STAGES[self.stage] != "inside pruning"
            return False

        def half_removed(path: Path, **more: Any) -> None:
            if inside and saves == self.save and STAGES[self.stage] == "inside pruning":
                sorted(path.iterdir())[0].unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            remove(path, **more)

        pretraining.save_checkpoint = counted_save  # type: ignore[assignment]
        files.shutil.rmtree = half_removed  # type: ignore[assignment]
        die_when(due)


def _child(
    data: str,
    out: str,
    resume: bool,
    options: dict[str, Any],
    sabotage: Callable[[], None] | None,
    aim: Aim | None,
    rank: dict[str, str],
    met: Semaphore | None,
) -> None:
    from mocokit import api

    os.environ.update(rank)
    if met is not None:
        tell_of_the_meeting(met)
    if aim is not None and rank.get("RANK", "0") == "0":
        aim.take()
    if sabotage is not None:
        sabotage()
    try:
        api.pretrain(data, out, resume=resume, quiet=True, **options)
    except RankLostError as error:
        sys.exit(error.exit_code)


def tell_of_the_meeting(met: Semaphore) -> None:
    """Release `met` once this process is connected to the other ranks."""
    from mocokit.training import distributed

    connect = distributed.dist.init_process_group

    def connected(*arguments: Any, **more: Any) -> None:
        connect(*arguments, **more)
        met.release()

    distributed.dist.init_process_group = connected  # type: ignore[assignment]


def start(
    data: Path,
    out: Path,
    *,
    resume: bool,
    options: dict[str, Any],
    sabotage: Callable[[], None] | None = None,
    aim: Aim | None = None,
    ranks: int = 1,
    met: Semaphore | None = None,
) -> list[ForkServerProcess]:
    """Child processes that train one run, by rank; with an aim rank 0 kills itself. met: released by each that met."""
    port = launching.free_port() if ranks > 1 else 0
    processes = []
    for rank in range(ranks):
        settings = launching.environment(rank, ranks, port) if ranks > 1 else {}
        arguments = (str(data), str(out), resume, options, sabotage, aim, settings, met)
        processes.append(CONTEXT.Process(target=_child, args=arguments))
        processes[-1].start()
    return processes


def finish(process: ForkServerProcess, limit: float = 120.0) -> int:
    """Wait for the child and return its exit code."""
    process.join(limit)
    assert not process.is_alive(), "the child did not end in time"
    return int(process.exitcode or 0)


def end_of(processes: Sequence[ForkServerProcess], limit: float = 120.0) -> int:
    """Wait for one rank to end, then for the others.

    Returns 0 when the run succeeded, -SIGKILL when one was killed (every other one must have failed then), or the exit
    code of the first that failed. A rank that was killed when the run was done, while it left, killed nothing.
    """
    wait([process.sentinel for process in processes], limit)
    codes = launching.finish(processes, GONE_WITHIN)
    if -signal.SIGKILL in codes:
        others = {code for code in codes if code != -signal.SIGKILL}
        if others == {0}:
            return 0
        assert others <= {1}, codes
        return -signal.SIGKILL
    return next((code for code in codes if code), 0)


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
    processes: Sequence[ForkServerProcess], out: Path, rng: random.Random, met: Semaphore, kills: Kills
) -> int:
    """Kill any child after a random delay, which begins when all have met where there are several; the exit code."""
    process = rng.choice(processes)
    for _ in processes if len(processes) > 1 else []:
        assert met.acquire(timeout=60), "the ranks did not meet"
    time.sleep(rng.random() * (1.2 if len(processes) == 1 else 2.0))
    process.kill()
    code = end_of(processes)
    if code == -signal.SIGKILL:
        kills.stages[stage(out)] += 1
        kills.torn += torn_checkpoints(out)
    return code


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
    turn: int = 0,
    ranks: int = 1,
) -> Kills:
    """Kill `count` times, half of them inside a save, resuming each time; then let the run end.

    The kills inside a save go through STAGES in turn, beginning with number `turn`, and the child ends itself there (a
    sabotage that saves in another way makes the calls of `files.commit_folder` in their order). The run is started
    afresh in a new folder whenever it ends before all kills are used up. Only a sabotaged one may end by itself with
    an error: it can leave a folder that nothing can resume.
    """
    rng, kills, attempt = random.Random(seed), Kills(), 0
    folder = out / "0"
    while (done := kills.stages.total()) < count:
        resume = (folder / "run.json").exists()
        aim = None
        if done % 2 == 0:
            aim = Aim((turn + done // 2) % len(STAGES), rng.randint(1, 4), rng.random() < 0.5)
        met = CONTEXT.Semaphore(0)
        processes = start(
            data, folder, resume=resume, options=options, sabotage=sabotage, aim=aim, ranks=ranks, met=met
        )
        if aim is None:
            code = kill_at_random(processes, folder, rng, met, kills)
        else:
            code = end_of(processes)
            if code == -signal.SIGKILL:
                kills.stages[STAGES[aim.stage]] += 1
                kills.torn += torn_checkpoints(folder)
        if code != -signal.SIGKILL:
            assert code == 0 or sabotage is not None, f"the run failed with exit code {code}"
            attempt += 1
            folder = out / str(attempt)
    resume = (folder / "run.json").exists()
    processes = start(data, folder, resume=resume, options=options, sabotage=sabotage, ranks=ranks)
    assert end_of(processes) == 0 or sabotage is not None
    return kills


@dataclass(frozen=True)
class Killed:
    """What became of the runs of one method that were killed: how many ended, and which of them are not the same."""

    kills: Kills
    compared: int
    differing: list[str]


def kill_all_methods(data: Path, place: Path, count: int, seed: int, *, ranks: int = 1) -> dict[str, Killed]:
    """`count` kills of each method's run on so many ranks, compared with one never killed; by method."""
    results = {}
    for number, (method, options) in enumerate(METHODS.items()):
        whole, killed = place / method / "whole", files.make_folder(place / method / "killed")
        assert end_of(start(data, whole, resume=False, options=options, ranks=ranks)) == 0, method
        expected = fingerprint(whole)
        turn = number * -(-count // 2)
        kills = run_with_kills(data, killed, count=count, seed=seed + number, options=options, turn=turn, ranks=ranks)
        ended = [
            run for run in sorted(killed.iterdir()) if files.read_json(run / "status.json")["state"] == "completed"
        ]
        differing = [run.name for run in ended if fingerprint(run) != expected]
        results[method] = Killed(kills, len(ended), differing)
    return results


def stages_of(results: Mapping[str, Killed]) -> Counter[str]:
    """How many kills struck where, over all methods."""
    return sum((result.kills.stages for result in results.values()), Counter[str]())


def digest(values: dict[str, str]) -> str:
    """One hash of a fingerprint."""
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()
