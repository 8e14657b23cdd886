"""The picture of a few-label curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

_STYLES = (("#1b4965", "o-"), ("#b5651d", "s--"), ("#5f7470", "^-."), ("#9a8c98", "v:"))


def few_label_figure(
    arms: Mapping[str, Sequence[tuple[int, float, float, float]]], *, title: str, chance: float
) -> Figure:
    """Accuracy over labels: arm -> (labels, score, low, high) in shares of 1, ascending by labels."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axis = figure.subplots()
    for (name, points), (color, mark) in zip(arms.items(), _STYLES, strict=False):
        labels = [point[0] for point in points]
        low, high = ([100 * point[end] for point in points] for end in (2, 3))
        axis.plot(labels, [100 * point[1] for point in points], mark, color=color, label=name, ms=5)
        axis.fill_between(labels, low, high, color=color, alpha=0.12, lw=0)
        axis.vlines(labels, low, high, color=color, lw=0.8, alpha=0.6)
    axis.axhline(100 * chance, color="#999999", lw=1, ls=(0, (1, 2)), label="chance")
    ticks = sorted({point[0] for points in arms.values() for point in points})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set(xlabel="labels", ylabel="accuracy, %", title=title)
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
