"""What a run writes down while it trains: losses, metrics, status and one line of progress.

`loss.jsonl` has one line per step and no clock, so that two runs with the same losses have the same bytes.
`metrics.jsonl` and `results.csv` have one row per epoch, with speeds and evaluations.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from mocokit import files
from mocokit.errors import DamagedError
from mocokit.training.runfolder import RunFolder


@dataclass(frozen=True, slots=True)
class StepLine:
    """One line of loss.jsonl.

    chance: None where the loss has no chance level (BYOL). m: None without a key encoder. fill, masked (the share of
    queries that met a key of their own image): None without a queue.
    """

    step: int
    loss: float
    chance: float | None
    lr: float
    m: float | None
    fill: int | None
    masked: float | None

    def text(self) -> str:
        """JSON with every digit of the floats."""
        return _encode({name: getattr(self, name) for name in _STEP_KEYS})


_STEP_KEYS = tuple(field.name for field in fields(StepLine))
_encode = json.JSONEncoder(allow_nan=False).encode


class RunLog:
    """The logs of one run. `lengths` goes into a checkpoint; `cut` returns to it."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._loss = files.AppendLog(run.path / "loss.jsonl")
        self._metrics = files.AppendLog(run.path / "metrics.jsonl")
        self._table: list[dict[str, Any]] | None = None  # `rows`, once they are read

    def lengths(self) -> dict[str, int]:
        """Make both logs durable and say how long they are, in bytes."""
        self._loss.sync()
        self._metrics.sync()
        return {"loss": self._loss.size, "metrics": self._metrics.size}

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Forget what was logged after the checkpoint that recorded `lengths`."""
        self._loss.truncate_to(lengths["loss"])
        self._metrics.truncate_to(lengths["metrics"])
        self._table = None

    def step(self, line: StepLine) -> None:
        """Append one step."""
        self._loss.append(line.text())

    def losses_from(self, first_step: int) -> list[StepLine]:
        """The logged steps from `first_step` on."""
        rows = _read_lines(self._loss.path, set(_STEP_KEYS))
        return [StepLine(**{name: row[name] for name in _STEP_KEYS}) for row in rows if row["step"] >= first_step]

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Append one row of metrics and write results.csv again."""
        if self._table is None:
            self._table = self.rows()
        self._table.append(json.loads(self._append(row)))
        files.write_text(self.run.path / "results.csv", _csv(self._table))

    def health(self, row: Mapping[str, Any]) -> None:
        """Append one measurement of a HealthProbe, under `health`."""
        self._append({"epoch": row["epoch"], "step": row["step"], "health": row})

    def _append(self, row: Mapping[str, Any]) -> str:
        clean = {key: _finite(value) for key, value in row.items()}
        line = _encode({"utc": utc_now(), **clean})
        self._metrics.append(line)
        return line

    def rows(self) -> list[dict[str, Any]]:
        """Every epoch's row of metrics so far."""
        return read_metrics(self.run)

    def health_rows(self) -> list[dict[str, Any]]:
        """Every measurement of health so far."""
        return read_health(self.run)

    def close(self) -> None:
        """Close both files."""
        self._loss.close()
        self._metrics.close()


def read_metrics(run: RunFolder) -> list[dict[str, Any]]:
    """The epochs' rows of metrics.jsonl, oldest first."""
    return [row for row in _read_lines(run.path / "metrics.jsonl", {"epoch", "step"}) if "health" not in row]


def read_health(run: RunFolder) -> list[dict[str, Any]]:
    """The measurements of health in metrics.jsonl, oldest first."""
    rows = _read_lines(run.path / "metrics.jsonl", {"epoch", "step"})
    return [row["health"] for row in rows if "health" in row]


def read_losses(run: RunFolder) -> list[dict[str, Any]]:
    """The lines of loss.jsonl, oldest first."""
    return _read_lines(run.path / "loss.jsonl", set(_STEP_KEYS))


def _read_lines(path: Path, keys: set[str]) -> list[dict[str, Any]]:
    """The objects of a .jsonl file of ours, which have at least `keys`. Raises DamagedError naming the line."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    with files.storage_errors(path, "read"):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"Line {number} of {path} is not what mocokit wrote; the log was changed.") from error
        if not isinstance(row, dict) or not keys <= set(row):
            raise DamagedError(f"Line {number} of {path} is not what mocokit wrote; the log was changed.")
        rows.append(row)
    return rows


def _finite(value: Any) -> Any:
    """The same values with None for those that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def write_status(run: RunFolder, state: str, step: int, total_steps: int, message: str = "") -> None:
    """status.json: running | completed | failed | interrupted, where the run is, and when that was written."""
    status = {"state": state, "step": step, "total_steps": total_steps, "message": message, "utc": utc_now()}
    files.write_json(run.path / "status.json", status)


def utc_now() -> str:
    """The time as text, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Progress:
    """One line on stderr: rewritten in place on a terminal, otherwise a plain line every `every` seconds.

    silent: say nothing at all, warnings neither, because another process does.
    """

    def __init__(
        self, stream: TextIO | None = None, *, quiet: bool = False, every: float = 10.0, silent: bool = False
    ) -> None:
        self.stream = stream or sys.stderr
        self.quiet, self.silent = quiet or silent, silent
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.every = 0.2 if self.live else every
        self._next = 0.0
        self._open = False

    def show(self, text: str | Callable[[], str], *, final: bool = False) -> None:
        """Show `text`, or what it returns, if it is time to; a final one always."""
        now = time.monotonic()
        if self.quiet or (now < self._next and not final):
            return
        self._next = now + self.every
        text = text if isinstance(text, str) else text()
        if self.live:
            width = max(os.get_terminal_size(self.stream.fileno()).columns - 1, 20)  # some terminals say 0
            self._write("\r" + text[:width].ljust(width) + ("\n" if final else ""))
            self._open = not final
        else:
            self._write(text + "\n")

    def say(self, text: str) -> None:
        """A line of its own, above the progress line."""
        if self.quiet:
            return
        self._write(("\n" if self._open else "") + text + "\n")
        self._open = False

    def warn(self, text: str) -> None:
        """A warning on a line of its own, said also when quiet."""
        if self.silent:
            return
        self._write(("\n" if self._open else "") + f"WARNING: {text}\n")
        self._open = False

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # whoever read it has gone (`2>&1 | head`): no reason to stop a run
            self.quiet = True


def duration(seconds: float) -> str:
    """Seconds as `1:05` or `2:03:04`."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    minutes, seconds_left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"
