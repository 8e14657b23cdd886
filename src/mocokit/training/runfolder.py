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
from mocokit.errors import DamagedError, UsageError

MARKER = "run.json"
CHECKPOINT_FILES = ("model.safetensors", "optim.safetensors", "state.json", files.MANIFEST)
EXPORT_FILES = (
    "model.safetensors", "head.safetensors", "encoder.json", "README.md", "model.py", "encoder.onnx", "config.json",
    files.MANIFEST,
)  # fmt: skip
INDEX_FILES = ("vectors.faiss", "rows.parquet", files.MANIFEST)
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
    "passed-over.jsonl",
    "skipped.jsonl",
    "README.md",
    "report.html",
    "report.json",
    "moco-steps.html",
    "trace.json",
    "cache/*.u8",
    "cache/*.u8.json",
    "cache/*.tables",
    "cache/execution.yaml",
    "cache/init.safetensors",
    "images.npy",
    "data-changes.jsonl",
    "failure/failure.json",
    "samples/pairs0.png",
    "samples/neighbours.png",
    *(f"checkpoints/{prefix}*/{name}" for prefix in ("step-", files.TEMPORARY) for name in CHECKPOINT_FILES),
    "eval/.lock",
    "eval/verdict.json",
    "eval/knn.csv",
    "eval/linear.csv",
    "eval/recall.csv",
    "eval/confusion.csv",
    "eval/confusion.png",
    "eval/reliability.csv",
    "eval/reliability.png",
    "eval/motion.json",
    "eval/ledger.jsonl",
    "eval/ledger.torn",
    *(f"export/*/{name}" for name in EXPORT_FILES),
    *(f"search/{name}" for name in ("index.json", "CURRENT", ".lock", ".tmp-*")),
    *(f"search/{prefix}*/{name}" for prefix in ("gen-", files.TEMPORARY) for name in INDEX_FILES),
    "eval/search.json",
    "eval/transfer-detect.json",
    "eval/transfer-segment.json",
    "trackers/**",
    ".tmp-*",
    "*/.tmp-*",
)
"""Every file a run writes, as patterns relative to the run folder. Anything else in the folder is foreign.

`**` at the end stands for anything at any depth: what trackers write is named by their own libraries.
"""
_FOLDERS = (
    "trackers",
    "trackers/**",
    "checkpoints",
    "checkpoints/step-*",
    f"checkpoints/{files.TEMPORARY}*",
    "eval",
    "failure",
    "samples",
    "export",
    "export/*",
    "search",
    "search/gen-*",
    f"search/{files.TEMPORARY}*",
)

_PLACES = ("cache", *(pattern for pattern in _FOLDERS if not {"/", "*"} & set(pattern)))
"""Folders right inside a run folder: never followed when they are links."""

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

    @property
    def began(self) -> bool:
        """Whether a run was started here: its configuration is written, or a checkpoint is there."""
        return self.config.exists() or next(self.checkpoints.glob("step-*"), None) is not None

    def status(self) -> dict[str, Any]:
        """What status.json says, or {} when there is none that can be read."""
        try:
            found = files.read_json(self.path / "status.json")
        except DamagedError:
            return {}
        return found if isinstance(found, dict) else {}

    def clear(self) -> None:
        """Remove an earlier run, but not the pixel cache, which says itself what it was made of.

        Call it under the lock. The configuration goes first: interrupted, what remains is a run folder that can be
        overwritten again but not resumed as if it were whole. Raises UsageError, before anything is removed, when a
        file is there that no run writes.
        """
        _refuse_foreign(self.path)
        files.remove_path(self.config)
        for folder, names, file_names in os.walk(self.path, topdown=False):
            for name in [*file_names, *names]:
                inside = (Path(folder) / name).relative_to(self.path).as_posix()
                if inside in (".lock", MARKER) or inside.startswith("cache/"):
                    continue
                if _any_matches(inside, OWNED):
                    files.remove_path(self.path / inside)
                elif _any_matches(inside, _FOLDERS):
                    files.remove_empty_folder(self.path / inside)
        self.make_folders()

    def make_folders(self) -> None:
        """The folders that files are put into."""
        for folder in (self.checkpoints, self.evaluation, self.samples):
            files.make_folder(folder)


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

    "new": the folder must be missing, empty, or left by a start that failed before anything began. "resume": it must
    hold a run. "overwrite": it may hold a run, and no foreign file; the earlier run is still there afterwards, and
    `RunFolder.clear` removes it once everything else is known to be right. Raises UsageError (folder not as `mode`
    needs it), LockedError (another process holds it), StorageError.
    """
    run = RunFolder(path)
    with files.storage_errors(path, "use"):
        _check(run, mode)  # before anything is created in a folder that is somebody else's
        files.make_folder(path)
        lock = files.RunLock(path)
        try:
            _check(run, mode)  # again under the lock: another process may have been here in between
            for folder in (path, run.checkpoints, run.samples):
                files.sweep_temporaries(folder)
            if not (path / MARKER).is_file():
                files.write_json(path / MARKER, {"format": 1, "kind": "mocokit run"})
            run.make_folders()
        except BaseException:
            lock.release()
            raise
    return run, lock


def _check(run: RunFolder, mode: Mode) -> None:
    path = run.path
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; --out needs a folder.")
    for name in _PLACES:
        if (path / name).is_symlink():
            raise UsageError(
                f"{path / name} is a symbolic link, and a run writes nothing outside its own folder. Remove the link."
            )
    if (path / MARKER).is_file():
        open_run(path)
        if mode == "new" and run.began:
            raise UsageError(f"{path} already holds a run. Continue it with --resume or replace it with --overwrite.")
        if mode == "overwrite":
            _refuse_foreign(path)
    elif mode == "resume":
        raise UsageError(f"{path} holds no run to resume. Leave out --resume to start one.")
    elif path.is_dir():
        foreign = [entry.name for entry in os.scandir(path) if not _left_by_a_start(entry.name)]
        if foreign and (path / MARKER).is_file():
            _check(run, mode)  # another process has begun a run here since we looked for its marker
        elif foreign:
            raise UsageError(
                f"{path} is not empty and holds no run of mocokit's ({sorted(foreign)[0]!r} is in it), so neither "
                "--resume nor --overwrite can use it. Choose another --out."
            )


def _left_by_a_start(name: str) -> bool:
    """Whether a start that was killed before it had written its marker leaves such a file."""
    return name == ".lock" or fnmatch.fnmatchcase(name, f"{files.TEMPORARY}????????-{MARKER}")


def foreign_files(path: Path) -> list[str]:
    """Files in a run folder that no run writes, as relative paths; links are never followed."""
    found = []
    for folder, names, file_names in os.walk(path, followlinks=False):
        relative = Path(folder).relative_to(path)
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        for name in [*file_names, *links]:
            inside = (relative / name).as_posix()
            if not _any_matches(inside, OWNED):
                found.append(inside)
    return sorted(found)


def _any_matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(_matches(path, pattern) for pattern in patterns)


def _matches(path: str, pattern: str) -> bool:
    parts, patterns = path.split("/"), pattern.split("/")
    if patterns[-1] == "**":
        parts, patterns = parts[: len(patterns) - 1] if len(parts) >= len(patterns) else [], patterns[:-1]
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _refuse_foreign(path: Path) -> None:
    if foreign := foreign_files(path):
        raise UsageError(
            f"--overwrite refused: {path / foreign[0]} ({len(foreign)} such file(s)) was not written by mocokit. "
            "Move it away or choose another --out."
        )
