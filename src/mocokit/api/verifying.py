"""The verb `verify`: is everything in a run folder as it was written, and does the run go on exactly?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mocokit import files
from mocokit.api.resume_proof import ResumeProof, prove_resume
from mocokit.api.starting import digests
from mocokit.data.pixels import cache_damage
from mocokit.errors import DamagedError, UsageError
from mocokit.training.checkpoint import Found, checkpoint_steps, find_checkpoint, read_tensors
from mocokit.training.runfolder import RunFolder, foreign_files, open_run
from mocokit.training.runlog import Progress, read_health, read_losses, read_metrics
from mocokit.training.settings import RunConfig, from_yaml


@dataclass(frozen=True, slots=True)
class Checked:
    """One thing of a run folder. problem: what is wrong with it, "" when it is as it was written."""

    name: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found in a run folder.

    checkpoint: the one that a resume would load, None when there is none; passed_over: newer ones, with the reason.
    remarks: what is no damage but good to know. resume: the proof of exact resume, when it was asked for.
    """

    path: Path
    checked: tuple[Checked, ...]
    checkpoint: str | None
    passed_over: tuple[str, ...]
    remarks: tuple[str, ...]
    resume: ResumeProof | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing is damaged."""
        return not any(one.problem for one in self.checked)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "run": str(self.path),
            "whole": self.whole,
            "checked": [dataclasses.asdict(one) for one in self.checked],
            "checkpoint": self.checkpoint,
            "passed_over": list(self.passed_over),
            "remarks": list(self.remarks),
            "resume": self.resume.to_dict() if self.resume else None,
        }

    def text(self) -> str:
        """In lines."""
        lines = [f"{'DAMAGED' if one.problem else 'ok':<8}{one.name}" for one in self.checked]
        lines += [f"  {one.problem}" for one in self.checked if one.problem]
        lines += [f"note: {text}" for text in self.remarks]
        lines += [f"passed over: {reason}" for reason in self.passed_over]
        if self.checkpoint:
            lines.append(
                f"A resume loads {self.checkpoint}: the newest checkpoint whose every byte is as it was written."
            )
        else:
            lines.append("A resume has no checkpoint to load: it would start from the beginning.")
        if self.resume:
            lines.append(self.resume.text())
        return "\n".join(lines) + "\n"


def verify(
    run: str | Path, *, resume_test: int = 0, data: str | Path | None = None, seed: int = 0, quiet: bool = False
) -> Verification:
    """Check every file of a run folder that can be checked, and say which checkpoint a resume would load.

    resume_test: also kill a copy of the run so many times around its newest checkpoint, resume it each time, and
    compare the bytes at the end with a copy that was not killed. data: where the images lie now, if elsewhere.
    seed: decides the instants of the kills. Nothing in the folder is changed.

    Raises UsageError when it is no run folder, or no resume can be tested.
    """
    folder = open_run(Path(run))
    if resume_test < 0:
        raise UsageError(f"--resume-test must be a number of kills, at least 1. Got {resume_test}.")
    checked: list[Checked] = []
    config = _try(checked, "config.yaml", lambda: from_yaml(folder.config)) if folder.config.exists() else None
    if config is None and not checked:
        checked.append(Checked("config.yaml", f"{folder.config} is missing; the run never began, or it was removed."))
    found, passed_over = _checkpoints(folder, config, checked)
    _logs(folder, found, checked)
    for name in ("status.json", "environment.json", "eval/verdict.json", "failure/failure.json"):
        if (folder.path / name).exists():
            _try(checked, name, lambda name=name: files.read_json(folder.path / name))  # type: ignore[misc]
    for cache in sorted((folder.path / "cache").glob("*.u8")):
        checked.append(Checked(f"cache/{cache.name}", cache_damage(cache)))
    remarks = _remarks(folder)
    proof = None
    if resume_test:
        if config is None or found is None:
            raise UsageError(f"{folder.path} has no checkpoint that a resume could be tested with.")
        proof = prove_resume(folder, config, str(data or config.data.spec), resume_test, seed, Progress(quiet=quiet))
    return Verification(
        folder.path, tuple(checked), found.path.name if found else None, tuple(passed_over), tuple(remarks), proof
    )


def _try(checked: list[Checked], name: str, read: Callable[[], Any]) -> Any:
    """What `read` returns, or None; either way the outcome is noted."""
    try:
        value = read()
    except DamagedError as error:
        checked.append(Checked(name, str(error)))
        return None
    checked.append(Checked(name))
    return value


def _checkpoints(folder: RunFolder, config: RunConfig | None, checked: list[Checked]) -> tuple[Found | None, list[str]]:
    """Every checkpoint, oldest first; the one that would be loaded, and why newer ones would not."""
    best: Found | None = None
    passed_over: list[str] = []
    for step in checkpoint_steps(folder.checkpoints):

        def whole(step: int = step) -> Found:
            found = find_checkpoint(folder.checkpoints, step)
            for name in ("model.safetensors", "optim.safetensors"):
                read_tensors(found.path / name)
            if config is not None and found.manifest.get("config") not in digests(folder, config):
                raise DamagedError(f"{found.path} was written under another configuration than {folder.config}.")
            return found

        found = _try(checked, f"checkpoints/step-{step}", whole)
        if found is None:
            passed_over.append(checked[-1].problem)
        else:
            best, passed_over = found, []
    return best, passed_over


def _logs(folder: RunFolder, found: Found | None, checked: list[Checked]) -> None:
    recorded: dict[str, Any] = found.manifest.get("log", {}) if found else {}

    def losses() -> None:
        steps = [row["step"] for row in read_losses(folder)]
        if steps != list(range(len(steps))):
            raise DamagedError(f"{folder.path / 'loss.jsonl'} does not have every step once, in order; it was changed.")
        _long_enough(folder.path / "loss.jsonl", recorded.get("loss", 0))

    def metrics() -> None:
        read_metrics(folder)
        read_health(folder)
        _long_enough(folder.path / "metrics.jsonl", recorded.get("metrics", 0))

    if (folder.path / "loss.jsonl").exists() or found:
        _try(checked, "loss.jsonl", losses)
        _try(checked, "metrics.jsonl", metrics)


def _long_enough(path: Path, recorded: int) -> None:
    size = path.stat().st_size if path.exists() else 0
    if size < recorded:
        raise DamagedError(f"{path} has {size:,} bytes but the checkpoint recorded {recorded:,}; the log was cut.")


def _remarks(folder: RunFolder) -> list[str]:
    remarks = []
    state = folder.status().get("state")
    if state:
        remarks.append(f"status.json says: {state}")
    names = foreign_files(folder.path)
    if names:
        remarks.append(f"{len(names)} file(s) that no run writes, left alone (first: {names[0]!r})")
    left = sorted(path.name for path in folder.path.rglob(f"{files.TEMPORARY}*"))
    if left:
        remarks.append(f"{len(left)} leftover(s) of an interrupted write, swept at the next start (first: {left[0]!r})")
    return remarks
