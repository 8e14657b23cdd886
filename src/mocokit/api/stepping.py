"""The verb `stepper`: a run's trace as a page to walk through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mocokit import files
from mocokit.errors import UsageError
from mocokit.reporting.stepper import stepper_html
from mocokit.training.runfolder import open_run
from mocokit.training.trace_format import read_trace
from mocokit.training.trace_toy import toy_trace

PAGE = "moco-steps.html"


@dataclass(frozen=True, slots=True)
class Stepped:
    """The page that was written, with the bytes that are code and those that are traces."""

    path: Path
    code_bytes: int
    data_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"file": str(self.path), "code_bytes": self.code_bytes, "data_bytes": self.data_bytes}


def stepper(runs: str | Path | Sequence[str | Path] = (), *, out: str | Path | None = None) -> Stepped:
    """Write the step viewer of no, one or two runs that were trained with `trace=`, or LAB 07 folders.

    out: the file; by default moco-steps.html in the first run's folder, or in the current one without a run.
    Raises UsageError (no trace, more than two runs), DamagedError, StorageError.
    """
    listed = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if len(listed) > 2:
        raise UsageError(f"The stepper shows one run, or two side by side. Got {len(listed)}; name two of them.")
    traces = [read_trace(_trace_of(path)) for path in listed]
    built_in = [toy_trace(), toy_trace(order="ema-first"), toy_trace(m=0.0), toy_trace(m=0.999)]
    page, data_bytes = stepper_html([*traces, *built_in])
    path = Path(out) if out is not None else (listed[0] if listed and listed[0].is_dir() else Path()) / PAGE
    files.make_folder(path.parent)
    files.write_text(path, page)
    return Stepped(path, len(page.encode()) - data_bytes, data_bytes)


def _trace_of(path: Path) -> Path:
    """A run's trace file, or a lab's; it may also be named itself."""
    if path.is_file():
        return path
    if (path / "results.json").is_file() and (path / "trace.json").is_file():
        return path / "trace.json"
    return open_run(path).path / "trace.json"
