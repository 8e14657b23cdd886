"""The run folder: what belongs in it, who may write to it, and what --overwrite may remove.

Imports neither torch nor numpy, so that the lock is tried before anything slow happens.
"""

from __future__ import annotations

import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mocokit import files
from mocokit.errors import DataError, UsageError

MARKER = "run.json"
OWNED = (
    MARKER,
    ".lock",
    "config.yaml",
    "command.txt",
    "environment.json",
    "status.json",
    "loss.jsonl",
    "metrics.jsonl",
    "results.csv",
    "results.png",
    "train.log",
    "skipped.jsonl",
    "README.md",
    "report.html",
    "report.json",
    "moco-steps.html",
    "trace.json",
    "cache/*",
    "samples/*.png",
    "checkpoints/step-*/*",
    "checkpoints/.tmp-*/*",
    "eval/*.json",
    "eval/*.jsonl",
    "eval/*.csv",
    "eval/*.png",
    ".tmp-*",
    "*/.tmp-*",
)
"""Every file a run writes, as patterns relative to the run folder. Anything else in the folder is foreign."""

Mode = Literal["new", "resume", "overwrite"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The configuration the run was started with, complete."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """The folder of `step-N` folders."""
        return self.path / "checkpoints"

    @property
    def evaluation(self) -> Path:
        """Scores, verdict and ledger."""
        return self.path / "eval"

    @property
    def samples(self) -> Path:
        """Pictures of what was fed."""
        return self.path / "samples"

    def status(self) -> dict[str, Any]:
        """What status.json says, or {} before the first one is written."""
        path = self.path / "status.json"
        return dict(files.read_json(path)) if path.exists() else {}


def open_run(path: Path) -> RunFolder:
    """An existing run folder, to read. Raises UsageError when there is none or it is something else."""
    if not (path / MARKER).is_file():
        what = "is not a run folder of mocokit's" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}. Name a folder made by `mocokit pretrain ... --out {path.name}`.")
    marker = files.read_json(path / MARKER)
    if not isinstance(marker, dict) or marker.get("format") != 1:
        raise UsageError(f"{path / MARKER} is of another version of mocokit. Use the version that wrote it.")
    return RunFolder(path)


def claim_run(path: Path, mode: Mode) -> tuple[RunFolder, files.RunLock]:
    """Make or reopen a run folder and lock it; give the lock back with `release`.

    "new": the folder must be missing or empty. "resume": it must hold a run. "overwrite": the files of an earlier
    run are removed first; a foreign file makes it refuse before anything is removed. Raises UsageError (folder not
    as `mode` needs it), LockedError (another process holds it), StorageError.
    """
    run = RunFolder(path)
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; --out needs a folder.")
    is_run = (path / MARKER).is_file()
    if mode == "resume" and not is_run:
        raise UsageError(f"{path} holds no run to resume. Leave out --resume to start one.")
    if mode != "resume" and path.is_dir() and not is_run:
        foreign = [entry.name for entry in os.scandir(path) if entry.name != ".lock"]
        if foreign:
            raise UsageError(
                f"{path} is not empty and holds no run of mocokit's ({sorted(foreign)[0]!r} is in it). "
                "Choose another --out."
            )
    if mode == "new" and is_run:
        raise UsageError(f"{path} already holds a run. Continue it with --resume or replace it with --overwrite.")
    files.make_folder(path)
    lock = files.RunLock(path)
    try:
        if mode == "overwrite" and is_run:
            _remove_owned(path)
        files.sweep_temporaries(path)
        files.sweep_temporaries(run.checkpoints)
        if mode != "resume":
            files.write_json(path / MARKER, {"format": 1, "kind": "mocokit run"})
        for folder in (run.checkpoints, run.evaluation, run.samples):
            files.make_folder(folder)
    except BaseException:
        lock.release()
        raise
    return run, lock


def foreign_files(path: Path) -> list[str]:
    """Files in a run folder that no run writes, as relative paths; links are never followed."""
    found = []
    for folder, names, file_names in os.walk(path, followlinks=False):
        relative = Path(folder).relative_to(path)
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        for name in [*file_names, *links]:
            inside = (relative / name).as_posix()
            if not any(_matches(inside, pattern) for pattern in OWNED):
                found.append(inside)
    return sorted(found)


def _matches(path: str, pattern: str) -> bool:
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _remove_owned(path: Path) -> None:
    if foreign := foreign_files(path):
        raise DataError(
            f"--overwrite refused: {path / foreign[0]} ({len(foreign)} such file(s)) was not written by mocokit. "
            "Move it away or choose another --out."
        )
    for entry in sorted(os.scandir(path), key=lambda e: e.name == MARKER):  # the marker last: interrupted, it is
        if entry.name != ".lock":  # still a run folder
            files.remove_path(Path(entry.path))
