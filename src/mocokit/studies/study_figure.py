"""The picture of a study: every cell's score with its interval and every seed, and how stale its keys are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

_INK, _SECOND, _MARK = "#1b4965", "#5f7470", "#b5651d"


def study_figure(study: Mapping[str, Any]) -> Figure:
    """study: `Study.to_dict()`. Left the scores, right the staleness by age where keys are kept."""
    cells = study["cells"]
    stale = [cell for cell in cells if any(age > 0 for age, _ in cell["staleness"])]
    figure = Figure(figsize=(11 if stale else 6, 0.5 * len(cells) + 1.8), layout="constrained")
    panels = figure.subplots(1, 2 if stale else 1, squeeze=False)[0]
    for y, cell in enumerate(cells):
        score = cell["score"]
        color = _MARK if cell["value"] == study["baseline"] else _INK
        panels[0].plot([100 * score["low"], 100 * score["high"]], [y, y], color=color, lw=2)
        panels[0].plot([100 * x for x in cell["per_seed"]], [y] * len(cell["per_seed"]), "|", color=_SECOND, ms=9)
        panels[0].plot(100 * score["mean"], y, "o", color=color)
    panels[0].set_yticks(range(len(cells)), [", ".join(map(str, cell["value"])) for cell in cells])
    panels[0].set_ylim(len(cells) - 0.4, -0.6)
    panels[0].set(
        xlabel=f"{study['metric']}, % (dot: mean, bar: 95 % interval, ticks: seeds)",
        ylabel=", ".join(study["factors"]),
        title=study["name"],
    )
    if stale:
        for number, cell in enumerate(stale, 1):
            panels[1].plot(
                *zip(*cell["staleness"], strict=True),
                "o-",
                color=_INK,
                alpha=number / len(stale),
                ms=3,
                label=", ".join(map(str, cell["value"])),
            )
        panels[1].set(
            xlabel="age of a key, steps", ylabel="cosine with the view encoded now", title="staleness of keys"
        )
        panels[1].legend(frameon=False, fontsize=8, title=", ".join(study["factors"]))
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure
