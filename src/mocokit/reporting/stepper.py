"""The step viewer: traces, texts and the step functions' own source, put into one page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from mocokit import strings
from mocokit.contrast.steps import STEPS
from mocokit.reporting.page import embedded, read_template, render, spoken

SCRIPTS = ("trace.js", "draw.js", "learn.js", "export.js", "stepper.js")


def stepper_html(traces: Sequence[dict[str, Any]]) -> tuple[str, int]:
    """The page, and how many of its bytes are traces. The first trace is shown first; the last is the built-in one."""
    script = '"use strict";\n(function(){\n' + "\n".join(read_template(name) for name in SCRIPTS) + "\n}());"
    data = embedded(spoken(list(traces)))
    page = render(
        "stepper.html",
        script,
        data=data,
        texts=embedded({page: strings.table(page) for page in ("stepper", "learn")}),
        sources=embedded({order: step_source(order) for order in ("paper", "ema-first")}),
    )
    return page, len(data.encode())


def step_source(order: str) -> dict[str, Any]:
    """A step function's body as it is run, and which of its lines belong to which of its five numbered comments."""
    text = inspect.getsource(STEPS[order])
    lines = [line[4:] if line.startswith("    ") else line for line in text.rstrip("\n").split("\n")]
    start = next(number for number, line in enumerate(lines) if re.match(r"# \d\. ", line))
    body = lines[start:]
    parts: dict[str, list[int]] = {}
    current = ""
    for number, line in enumerate(body):
        found = re.match(r"# (\d)\. ", line)
        current = found[1] if found else current
        parts.setdefault(current, []).append(number)
    return {"name": STEPS[order].__name__, "lines": body, "parts": parts}  # type: ignore[attr-defined]
