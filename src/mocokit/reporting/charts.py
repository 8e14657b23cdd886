"""Line charts and a scatter as inline SVG. Numbers are in the picture, words are beside it, in the page's languages.

A series is told apart by its dash or its mark as well as by its colour. Every chart has a table of the same numbers in
the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

WIDTH, HEIGHT = 640, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 26
MARKS = "osd^vxp*"
"""Circle, square, diamond, triangle up and down, cross, plus, star: as many as there are, then again."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line: the key of its name in the page's texts, its points, its number among the page's line styles."""

    name: str
    points: list[tuple[float, float]]
    style: int = 0


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high, about `count` of them."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * f for f in (1, 2, 2.5, 5, 10) if power * f >= raw), power * 10)
    start = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(start, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    series: Sequence[Series], *, label: str, low: float | None = None, high: float | None = None, log: bool = False
) -> Markup:
    """Lines over a common horizontal axis. label: id of the element that names the chart. log: logarithmic upwards."""
    points = [point for one in series for point in one.points]
    if log:
        points = [point for point in points if point[1] > 0]
    if not points:
        return Markup("")
    x0, x1 = min(x for x, _ in points), max(x for x, _ in points)
    y0 = min(y for _, y in points) if low is None else low
    y1 = max(y for _, y in points) if high is None else high
    if log:
        y0, y1 = math.log10(y0), math.log10(y1)
    if y1 - y0 < 1e-12:
        y0, y1 = y0 - 0.5, y1 + 0.5

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        up = ((math.log10(y) if log else y) - y0) / (y1 - y0)
        return (
            _LEFT + across * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM),
        )

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{escape(label)}">']
    for value in ticks(y0, y1):
        _, y = place(x0, 10**value if log else value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shown = _short(10**value if log else value)
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
    for value in ticks(x0, x1, 6):
        x, _ = place(value, 10**y0 if log else y0)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_short(value)}</text>')
    for one in series:
        placed = [place(x, y) for x, y in one.points if not log or y > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="line line{one.style}" points="{path}"/>')
        if len(placed) <= 60:
            parts += [mark(one.style, x, y, f"mark line{one.style}") for x, y in placed]
    parts.append("</svg>")
    return Markup("".join(parts))  # noqa: S704 numbers and our own class names


def scatter(
    points: Sequence[tuple[float, float]], kinds: Sequence[int], texts: Sequence[str], *, label: str, size: int = 420
) -> Markup:
    """Points of several kinds (-1: none), each with a mark of its own; a text appears where one points at it."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    span = max(max(xs) - min(xs), max(ys) - min(ys), 1e-12)
    middle = (max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2
    parts = [f'<svg class="map" viewBox="0 0 {size} {size}" role="img" aria-labelledby="{escape(label)}">']
    for (x, y), kind, text in zip(points, kinds, texts, strict=True):
        px = size / 2 + (x - middle[0]) / span * (size - 24)
        py = size / 2 - (y - middle[1]) / span * (size - 24)
        css = f"mark kind{kind % 10}" if kind >= 0 else "mark kindnone"
        parts.append(f"<g>{mark(kind, px, py, css)}")
        parts.append(f"<title>{escape(text)}</title></g>")
    parts.append("</svg>")
    return Markup("".join(parts))  # noqa: S704 texts were escaped


def mark(kind: int, x: float, y: float, css: str, r: float = 3.6) -> str:
    """One mark as SVG: `MARKS[kind]` around (x, y)."""
    shape = MARKS[kind % len(MARKS)] if kind >= 0 else "o"
    corners = {
        "s": [(-r, -r), (r, -r), (r, r), (-r, r)],
        "d": [(0, -1.3 * r), (1.3 * r, 0), (0, 1.3 * r), (-1.3 * r, 0)],
        "^": [(0, -1.2 * r), (1.2 * r, r), (-1.2 * r, r)],
        "v": [(0, 1.2 * r), (1.2 * r, -r), (-1.2 * r, -r)],
    }
    if shape == "o":
        return f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    if shape in corners:
        path = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[shape])
        return f'<polygon class="{css}" points="{path}"/>'
    crosses: dict[str, list[tuple[float, float]]] = {
        "x": [(1, 1), (1, -1)],
        "p": [(1, 0), (0, 1)],
        "*": [(1, 1), (1, -1), (0, 1.3)],
    }
    strokes = crosses[shape]
    path = "".join(f"M{x - r * a:.1f} {y - r * b:.1f}L{x + r * a:.1f} {y + r * b:.1f}" for a, b in strokes)
    return f'<path class="{css} stroke" d="{path}"/>'


def course(rows: Sequence[Mapping[str, Any]], x: str, y: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """The points (x, y) of rows that have both."""
    return [(row[x], scale * row[y]) for row in rows if row.get(x) is not None and row.get(y) is not None]


def thinned(points: Sequence[tuple[float, float]], count: int = 240) -> list[tuple[float, float]]:
    """At most `count` points: each the mean of as many neighbours."""
    width = -(-len(points) // count)
    parts = [points[i : i + width] for i in range(0, len(points), max(width, 1))]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _short(value: float) -> str:
    return f"{value:.4g}"
