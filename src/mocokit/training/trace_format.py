"""What a trace file is: which steps a trace covers, how numbers are written, and how a file is read back.

The schema is documented field by field in docs/trace.md. Numbers are those of the run: float32 arrays as base64 of
their little-endian bytes, single numbers as the shortest decimal that reads back the same.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mocokit import files
from mocokit.errors import DamagedError, UsageError

FORMAT, VERSION = "mocokit trace", 1
MAX_QUERIES = 4
"""At most so many queries of a step are recorded in full: their cosine with every key of the dictionary."""
MAX_ROWS = 64
"""At most so many queries of a step are recorded with their positive, loss, rank and hardest keys."""
MAX_KEYS = 10_240
"""Of so many keys, over all steps in detail, image and place on the plane are recorded: the first ones of each step."""
MAX_STEPS = 400
"""A window has at most so many steps: a whole life of 256 steps (65,536 keys, 256 a step) fits, with room."""
DETAILED = 36
"""A window of more steps than this is recorded in detail at its start, middle and end, and lightly in between.

Of a long dictionary it is fewer: as many as hold one query's cosines with all keys within `COSINE_BYTES`."""
COSINE_BYTES, PICTURE_BYTES, THUMBNAIL = 1_400_000, 600_000, 32
"""Bounds of a trace file, in bytes of base64; the longer side of its pictures in pixels."""
BYTES_A_COSINE = 4 * 4 / 3
MAX_FILE_BYTES = 8_000_000
"""A file longer than this is no trace of ours and is not read."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive steps start ... stop - 1, and which of them are recorded in detail."""

    name: str
    start: int
    stop: int
    detailed: frozenset[int]


def plan_windows(text: str, *, K: int, life: float, total_steps: int, filled: bool = False) -> list[Window]:
    """The windows that `--trace` asks for, ascending and apart.

    text: `first` (from the first step through a key's whole life to its eviction), `full` (around the step that fills
    the queue), `last`, a step `120`, steps `100-120`, or several with commas. life: steps that a key stays in the
    queue of K, K / keys of a step. filled: the queue starts full. Raises UsageError naming the word that can't be read
    or lies outside the run.
    """
    length = math.ceil(life) + 2
    if length > MAX_STEPS:
        length = MAX_STEPS
    found: list[Window] = []
    for word in text.split(","):
        start, stop, name = _bounds(word.strip(), length, math.ceil(life), total_steps)
        found.append(Window(name, start, stop, frozenset()))
    found.sort(key=lambda window: window.start)
    apart: list[Window] = []
    for window in found:
        if apart and window.start <= apart[-1].stop:
            before = apart.pop()
            name = before.name if window.name in before.name.split(", ") else f"{before.name}, {window.name}"
            window = Window(name, before.start, max(before.stop, window.stop), frozenset())
        apart.append(window)
    total = sum(window.stop - window.start for window in apart)
    if total > 2 * MAX_STEPS:
        raise UsageError(f"--trace {text} covers {total} steps; at most {2 * MAX_STEPS} are recorded. Name fewer.")
    return _in_detail(apart, lambda t: BYTES_A_COSINE * (K if filled else min(t * K / life, K)))


def _in_detail(windows: list[Window], cost: Callable[[int], float]) -> list[Window]:
    """The windows with their steps in detail chosen, within `DETAILED` and, with `cost` bytes a step, `COSINE_BYTES`.

    What room is left goes to the earliest steps, whose dictionary is short.
    """
    chosen: list[set[int]] = []
    for count in range(DETAILED // len(windows), -1, -1):
        chosen = [_detailed(w.start, w.stop, count) for w in windows]
        room = COSINE_BYTES - sum(cost(t) for steps in chosen for t in steps)
        if room >= 0:
            break
    left = DETAILED - sum(len(steps) for steps in chosen)
    for window, steps in zip(windows, chosen, strict=True):
        for t in range(window.start, window.stop):
            if left > 0 and t not in steps and cost(t) <= room:
                steps.add(t)
                room, left = room - cost(t), left - 1
    return [Window(w.name, w.start, w.stop, frozenset(steps)) for w, steps in zip(windows, chosen, strict=True)]


def _bounds(word: str, length: int, life: int, total_steps: int) -> tuple[int, int, str]:
    length = min(length, total_steps)
    if word == "first":
        return 0, length, word
    if word == "last":
        return total_steps - length, total_steps, word
    if word == "full":
        start = max(min(life - 2, total_steps - length), 0)
        return start, start + length, word
    match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", word)
    if match is None:
        raise UsageError(f"--trace takes first, full, last, a step (120) or steps (100-120), not {word[:40]!r}.")
    start, last = int(match[1]), int(match[2] or match[1])
    if not start <= last < total_steps:
        raise UsageError(f"--trace {word[:40]}: the run has the steps 0 to {total_steps - 1}. Name steps among them.")
    if last - start >= MAX_STEPS:
        raise UsageError(f"--trace {word[:40]} covers {last - start + 1} steps; at most {MAX_STEPS} are recorded.")
    return start, last + 1, word


def _detailed(start: int, stop: int, count: int) -> set[int]:
    """All steps of a short window; else as many at the start, in the middle and at the end as make `count`."""
    if stop - start <= count:
        return set(range(start, stop))
    if count < 3:
        return set(range(stop - count, stop))
    third = count // 3
    middle = (start + stop - third) // 2
    return {*range(start, start + third), *range(middle, middle + third), *range(stop - third, stop)}


def queries_in_full(detailed: int, N: int, K: int) -> int:
    """How many queries of a step fit the size bound in full, 1 to 4; N queries a step, K keys."""
    room = COSINE_BYTES / (max(detailed, 1) * K * BYTES_A_COSINE)
    return int(max(1, min(MAX_QUERIES, N, room)))


def pack(values: Tensor | npt.NDArray[Any]) -> str:
    """float32 values as base64 of their little-endian bytes, row by row."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode("ascii")


def unpack(text: str, *shape: int) -> npt.NDArray[np.float32]:
    """What `pack` wrote, as float32 of that shape (one side may be -1)."""
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)


def read_trace(path: Path) -> dict[str, Any]:
    """A trace file. Raises UsageError when there is none, DamagedError when it isn't one this version can show."""
    if not path.is_file():
        raise UsageError(f"{path} is missing: the run recorded no trace. Train it with `--trace first`.")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise DamagedError(f"{path} is too long for a trace ({path.stat().st_size} bytes). Record it again.")
    found = files.read_json(path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DamagedError(f"{path} is no trace of mocokit's. Record one with `mocokit pretrain ... --trace first`.")
    if found.get("version") != VERSION:
        raise DamagedError(
            f"{path} is a trace of version {found.get('version')!r}; this mocokit reads version {VERSION}. "
            "Use the version that wrote it, or record it again."
        )
    if not all(isinstance(found.get(name), kind) for name, kind in _PARTS.items()):
        raise DamagedError(f"{path} lacks a part of a trace; the file was changed. Record it again.")
    return found


_PARTS = {"source": dict, "config": dict, "images": list, "windows": list}
