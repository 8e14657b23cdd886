"""The pictures that a run leaves behind: curves, the views really fed, nearest neighbours. PNG, English labels."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from torch import Tensor

from mocokit import files
from mocokit.contrast.health import COLLAPSED_RANK, COLLAPSED_SPREAD, STALE

UInt8 = npt.NDArray[np.uint8]
_INK, _CHANCE, _SECOND = "#1b4965", "#b5651d", "#5f7470"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    with matplotlib.rc_context({"savefig.dpi": 130}):
        figure.savefig(buffer, format="png", metadata={"Software": None})
    files.write_bytes(path, buffer.getvalue())


def results_figure(
    losses: Sequence[Mapping[str, Any]],
    metrics: Sequence[Mapping[str, Any]],
    *,
    title: str,
    monitor: str | None,
    health: Sequence[Mapping[str, Any]] = (),
) -> Figure:
    """Loss against its chance line, and the monitor's kNN accuracy over time where there was a monitor.

    losses: lines of loss.jsonl; metrics: rows of metrics.jsonl. monitor: name of the validation split that was read.
    health: measurements of a HealthProbe, drawn below when there are any.
    """
    width = 10 if monitor else 5.6
    figure = Figure(figsize=(12, 10.5) if health else (width, 4), layout="constrained")
    top: Figure | SubFigure = figure
    if health:
        parts: Any = figure.subfigures(2, 1, height_ratios=[4, 6.5])
        top = parts[0]
        draw_health(parts[1], health)
    panels = top.subplots(1, 2 if monitor else 1, squeeze=False)[0]
    steps = [row["step"] for row in losses]
    panels[0].plot(steps, [row["loss"] for row in losses], color=_INK, lw=0.5, alpha=0.35)
    panels[0].plot(*_smoothed(losses), color=_INK, lw=1.6, label="loss")
    if losses and losses[0]["chance"] is not None:
        chance = [row["chance"] for row in losses]
        panels[0].plot(steps, chance, color=_CHANCE, lw=1.6, ls="--", label="chance: nothing told apart")
    panels[0].set(xlabel="step", ylabel="loss", title=title)
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    if monitor:
        readings = [(row["epoch"], row["knn_h"], row.get("knn_z")) for row in metrics if row.get("knn_h") is not None]
        epochs = [epoch for epoch, _, _ in readings]
        panels[1].plot(epochs, [100 * h for _, h, _ in readings], "o-", color=_INK, label="h (backbone)")
        panels[1].plot(epochs, [100 * (z or 0) for _, _, z in readings], "s--", color=_SECOND, label="z (head)")
        panels[1].set(xlabel="epoch", ylabel="kNN accuracy, %", title=f"kNN on the validation split of {monitor}")
        panels[1].legend(frameon=False)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def health_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """What a HealthProbe measured over a run: rows of JSON values, oldest first, at least one."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    draw_health(figure, rows)
    return figure


def draw_health(figure: Figure | SubFigure, rows: Sequence[Mapping[str, Any]]) -> None:
    """Six panels; a dotted line marks the value below which (or at which) something is wrong."""
    axes: list[Axes] = list(figure.subplots(2, 3, squeeze=False).ravel())
    last = rows[-1]
    _course(axes[0], rows, {"z (head)": "rank_z", "h (backbone)": "rank_h"}, "effective rank")
    axes[0].set_ylim(bottom=0)
    axes[0].axhline(COLLAPSED_RANK, color=_CHANCE, ls=":", lw=1.2)
    _course(axes[1], rows, {"z (head)": "spread_z", "h (backbone)": "spread_h"}, "spread: std of unit rows x sqrt(d)")
    axes[1].axhline(COLLAPSED_SPREAD, color=_CHANCE, ls=":", lw=1.2)
    axes[1].set_ylim(0, 1.05)
    _course(
        axes[2],
        rows,
        {"alignment": "alignment", "uniformity": "uniformity"},
        "alignment, uniformity (lower: better)",
    )
    _similarities(axes[3], last)
    if last.get("staleness"):
        _staleness(axes[4], rows)
    else:
        _course(axes[4], rows, {"query finds its key in the batch": "batch_accuracy"}, "share of the probe batch")
        axes[4].axhline(1 / last["probe"], color=_CHANCE, ls=":", lw=1.2)
    norms = {"gradient norm": "gradient_norm", "|theta_q - theta_k| / |theta_q|": "theta_distance"}
    _course(axes[5], rows, norms, "of the parameters")
    if any((row.get(name) or 0) > 0 for row in rows for name in norms.values()):
        axes[5].set_yscale("log")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    told = list(last.get("findings", {}).values())
    figure.suptitle("health: " + (" | ".join(text.partition(":")[0] for text in told) or "no finding"), fontsize=11)


def _course(axis: Axes, rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], title: str) -> None:
    """Curves over steps of the values that were measured. names: label -> name in the rows."""
    for (label, name), color, mark in zip(names.items(), (_INK, _SECOND), ("o-", "s--"), strict=False):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), mark, color=color, ms=3, lw=1.4, label=label)
    axis.set(xlabel="step", title=title)
    axis.legend(frameon=False, fontsize=8)


def _similarities(axis: Axes, row: Mapping[str, Any]) -> None:
    for name, color in (("negatives", _SECOND), ("positives", _INK)):
        counts = np.array(row[name], np.float64)
        edges = np.linspace(-1, 1, len(counts) + 1)
        axis.stairs(counts / max(counts.sum(), 1), edges, fill=True, color=color, alpha=0.6, label=name)
    axis.set(xlabel="cosine", ylabel="share", title=f"similarities at step {row['step']}")
    axis.legend(frameon=False, fontsize=8)


def _staleness(axis: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Cosine by age, of up to four measurements spread over the run; later ones are darker."""
    told = [row for row in rows if len(row.get("staleness", ())) > 0 and row["staleness"][-1][0] > 0] or [rows[-1]]
    chosen = [told[place] for place in np.unique(np.linspace(0, len(told) - 1, 4).astype(int))]
    for number, row in enumerate(chosen, 1):
        points = [[0, 1.0], *(point for point in row["staleness"] if point[0] > 0)]
        axis.plot(
            *zip(*points, strict=True), "o-", color=_INK, alpha=number / len(chosen), ms=3, label=f"step {row['step']}"
        )
    axis.axhline(STALE, color=_CHANCE, ls=":", lw=1.2)
    axis.set(xlabel="age of a key, steps", ylabel="cosine with the view encoded now", title="staleness of keys")
    axis.set_ylim(min(0.0, *(cosine for row in chosen for _, cosine in row["staleness"])), 1.05)
    axis.legend(frameon=False, fontsize=8)


def _smoothed(losses: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    width = max(len(losses) // 100, 1)
    parts = [losses[i : i + width] for i in range(0, len(losses), width)]
    middle = [float(np.mean([row["step"] for row in part])) for part in parts]
    return middle, [float(np.mean([row["loss"] for row in part])) for part in parts]


def to_pictures(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> UInt8:
    """Normalised views [N, 3, s, s] back to uint8 pictures [N, s, s, 3]."""
    shape = (1, 3, 1, 1)
    pixels = x.detach().cpu() * torch.tensor(std).view(shape) + torch.tensor(mean).view(shape)
    levels: UInt8 = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return levels


def pairs_figure(sources: UInt8, queries: UInt8, keys: UInt8) -> Figure:
    """Rows of source, query view and key view, one column an image. Each [N, s, s, 3]."""
    return grid_figure([sources, queries, keys], ["image", "query view", "key view"])


def grid_figure(rows: Sequence[UInt8], labels: Sequence[str], title: str = "") -> Figure:
    """A labelled grid of pictures: `rows` of [N, s, s, 3]."""
    columns = max(len(row) for row in rows)
    figure = Figure(
        figsize=(max(1.0 * columns + 1.4, 4), 1.05 * len(rows) + (0.5 if title else 0.1)), layout="constrained"
    )
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for r, (row, label) in enumerate(zip(rows, labels, strict=True)):
        for c in range(columns):
            axis = axes[r][c]
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if c < len(row):
                axis.imshow(row[c], interpolation="nearest")
        axes[r][0].set_ylabel(label, rotation=0, ha="right", va="center")
    if title:
        figure.suptitle(title)
    return figure


def neighbours_figure(
    panels: Sequence[tuple[str, UInt8, UInt8, npt.NDArray[np.bool_]]], *, title: str, columns: int
) -> Figure:
    """Queries with their nearest neighbours, one block of columns per encoder.

    panels: (name, queries [Q, s, s, 3], neighbours [Q, columns, s, s, 3], right [Q, columns]); a neighbour of
    another class is framed and crossed, so that failures show without colour.
    """
    count = len(panels[0][1])
    figure = Figure(figsize=(len(panels) * (0.62 * (columns + 1) + 0.5), 0.66 * count + 1.0), layout="constrained")
    blocks = figure.subfigures(1, len(panels), squeeze=False)[0]
    for block, (name, queries, neighbours, right) in zip(blocks, panels, strict=True):
        axes = block.subplots(count, columns + 1, squeeze=False)
        block.suptitle(f"{name}: {right.mean():.0%} of neighbours share the class", fontsize=9)
        for q in range(count):
            for c in range(columns + 1):
                axis = axes[q][c]
                axis.set(xticks=[], yticks=[])
                axis.imshow(queries[q] if c == 0 else neighbours[q, c - 1], interpolation="nearest")
                wrong = c > 0 and not right[q, c - 1]
                axis.spines[:].set(
                    visible=wrong or c == 0, color="#c1121f" if wrong else "#333333", lw=2 if wrong else 1
                )
                if wrong:
                    side = axis.get_xlim()[1]
                    axis.plot([0, side], [0, side], color="#c1121f", lw=0.8)
        axes[0][0].set_title("query", fontsize=7)
    figure.suptitle(title, fontsize=10)
    return figure
