"""Pictures of a classifier: what was taken for what, and whether its confidence can be believed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
_INK, _CHANCE = "#1b4965", "#b5651d"
_WRITTEN = 15  # up to so many classes the share is written into each cell


def confusion_figure(panels: Sequence[tuple[str, Floats]], class_names: Sequence[str]) -> Figure:
    """Confusion matrices beside each other: (title, counts [C, C] with rows by class). Rows are shown as shares."""
    C = len(class_names)
    side = min(max(0.42 * C + 2.2, 3.6), 14)
    figure = Figure(figsize=(side * len(panels) + 0.6, side), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, counts) in zip(axes, panels, strict=True):
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-12)
        drawn = axis.imshow(share, vmin=0, vmax=1, cmap="Blues")
        names = [name if len(name) <= 20 else f"{name[:18]}.." for name in class_names]
        step = 1 if C <= 40 else 5
        places = range(0, C, step)
        axis.set_xticks(places, names[::step], rotation=90, fontsize=7)
        axis.set_yticks(places, names[::step], fontsize=7)
        axis.set(title=title, xlabel="taken for", ylabel="class")
        if C <= _WRITTEN:
            for row, column in np.ndindex(C, C):
                if share[row, column] >= 0.005:
                    ink = "white" if share[row, column] > 0.5 else "black"
                    text = f"{100 * share[row, column]:.0f}"
                    axis.text(column, row, text, ha="center", va="center", fontsize=7, color=ink)
    figure.colorbar(drawn, ax=axes[-1], label="share of the class", fraction=0.04)
    return figure


def reliability_figure(panels: Sequence[tuple[str, Floats, Floats, Floats, float]]) -> Figure:
    """Accuracy against confidence: (title, share, confidence, accuracy, all [bins]; ECE in 0..1). Below: how often."""
    figure = Figure(figsize=(3.6 * len(panels) + 0.4, 4.6), layout="constrained")
    axes = figure.subplots(2, len(panels), squeeze=False, height_ratios=[3, 1], sharex=True)
    for column, (title, share, confidence, accuracy, ece) in enumerate(panels):
        top, bottom = axes[0][column], axes[1][column]
        used = share > 0
        top.plot([0, 1], [0, 1], color=_CHANCE, ls="--", lw=1.2, label="as sure as right")
        top.plot(confidence[used], accuracy[used], "o-", color=_INK, ms=4)
        top.set(title=f"{title}: ECE {100 * ece:.1f} %", ylabel="accuracy", ylim=(0, 1))
        top.legend(frameon=False, fontsize=8)
        bottom.stairs(share, np.linspace(0, 1, len(share) + 1), fill=True, color=_INK, alpha=0.6)
        bottom.set(xlabel="confidence", ylabel="share", xlim=(0, 1))
        for axis in (top, bottom):
            axis.spines[["top", "right"]].set_visible(False)
    return figure
