"""The pictures of the labs: the views, the training curves with the readouts, and every seed of every figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mocokit.reporting.plots import grid_figure
from mocokit.studies.lab_run import CELLS, COSINES, TARGETS, LabRun
from mocokit.studies.lab_views import PICTURED_SOURCES, hue_pictures
from mocokit.studies.published import FIRST, name_of
from mocokit.studies.seed_table import Cell

_INK, _SECOND, _MARK = "#1b4965", "#5f7470", "#b5651d"
_STYLES = ("-", "--", ":")


def views_figure(run: LabRun) -> Figure:
    """Six sources, a view of each with the hue kept, and the same view with the hue free to swap."""
    import torch

    pictures = hue_pictures(torch.from_numpy(run.data.images), run.seeds.pictures)
    rows = [np.rint(x.permute(0, 2, 3, 1).numpy() * 255).astype(np.uint8) for x in pictures.values()]
    return grid_figure(rows, list(pictures), title=f"Sources {', '.join(map(str, PICTURED_SOURCES))}")


def training_figure(results: Mapping[str, Any]) -> Figure:
    """The loss of each arm, and what a frozen 5NN reads from h and z, shape and colour."""
    scores = results["scores"]
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    for style, (arm, losses) in zip(_STYLES, results["loss_history"].items(), strict=False):
        panels[0].plot(range(1, len(losses) + 1), losses, style, color=_INK, label=arm)
    panels[0].set(xlabel="epoch", ylabel="InfoNCE, mean of the epoch", title="Training (losses are not comparable)")
    panels[0].legend(frameon=False)
    place = np.arange(len(scores))
    for panel, target in zip(panels[1:], TARGETS, strict=True):
        for side, space, color in ((-0.19, "h", _INK), (0.19, "z", "#a9bcd0")):
            heights = [100 * one[f"{space}_{target}_knn"] for one in scores.values()]
            bars = panel.bar(place + side, heights, 0.36, color=color, label=space)
            panel.bar_label(bars, [f"{height:.1f}" for height in heights], fontsize=7)
        chance = {"shape": 100 / 3, "color": 50.0}[target]
        panel.axhline(chance, color=_MARK, ls="--", lw=1, label="chance")
        panel.set_xticks(place, list(scores))
        panel.set(ylim=(0, 112), ylabel="held-out accuracy, %", title=f"Frozen cosine 5NN: {target}")
        panel.legend(frameon=False, ncols=3, loc="upper center", fontsize=8)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def strip_figure(lab: str, table: Sequence[Cell], arms: Sequence[str]) -> Figure:
    """Every seed of every figure as a dot, with the mean, its 95 % interval and the published figure."""
    figure = Figure(figsize=(4.2 * len(arms), 5.6), layout="constrained")
    grid = figure.subplots(2, len(arms), squeeze=False, height_ratios=(4, 1.3))
    by_name = {(cell.arm, cell.cell): cell for cell in table}
    for column, arm in enumerate(arms):
        for row, names in enumerate((CELLS, COSINES)):
            axis = grid[row][column]
            for y, name in enumerate(names):
                _strip(axis, y, by_name[arm, name], FIRST[lab].get(arm, {}).get(name))
            axis.set_yticks(range(len(names)), [name_of(name) for name in names] if column == 0 else [""] * len(names))
            axis.set_ylim(len(names) - 0.4, -0.6)
            axis.set_xlim((0, 104) if row == 0 else (-1.05, 1.05))
            axis.set_xlabel("held-out accuracy, %" if row == 0 else "cosine")
            axis.grid(axis="x", lw=0.4)
            axis.spines[["top", "right"]].set_visible(False)
        grid[0][column].set_title(arm)
    count = len(table[0].values)
    figure.suptitle(f"LAB {lab}, {count} seeds: every seed (dots), mean and 95 % interval (bar), published (diamond)")
    return figure


def _strip(axis: Any, y: int, cell: Cell, published: float | None) -> None:
    spread = np.linspace(-0.22, 0.22, len(cell.values)) if len(cell.values) > 1 else np.zeros(1)
    axis.plot(cell.values, y + spread, "o", ms=3, color=_SECOND, alpha=0.8)
    axis.plot([cell.low, cell.high], [y, y], color=_INK, lw=2)
    axis.plot([cell.mean], [y], "|", color=_INK, ms=12, mew=2)
    if published is not None:
        axis.plot([published], [y - 0.33], "D", ms=4, mfc="none", mec=_MARK)
