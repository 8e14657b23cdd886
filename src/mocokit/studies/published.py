"""The published figures of LAB 06 and LAB 07, and ours beside them.

Two runs were published on 2026-09-22. The first (Python 3.12, torch 2.14, CPU) is the one that is reproduced here. The
second (Python 3.13, torch 2.12.0+cu130, CPU tensors) is another measurement of the same experiment: it is quoted
beside, and never merged with anything. Accuracies in %.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mocokit.studies.lab_run import CELLS, COSINES

Figures = Mapping[str, Mapping[str, float]]
"""arm -> cell -> figure."""

_COLOR_ALL = {"h_color_knn": 100.0, "z_color_knn": 100.0, "h_color_linear": 100.0}

FIRST: Mapping[str, Figures] = {
    "06": {
        "random": {"h_shape_knn": 72.50, "h_color_knn": 100.0},
        "keep-hue": {"h_shape_knn": 47.50, "h_color_knn": 100.0},
        "swap-hue": {
            "h_shape_knn": 85.83,
            "h_color_knn": 49.17,
            "z_shape_knn": 95.42,
            "z_color_knn": 52.92,
            "h_shape_linear": 98.75,
        },
    },
    "07": {
        "random": {"h_shape_knn": 72.50, "z_shape_knn": 60.42, "h_shape_linear": 56.25, **_COLOR_ALL},
        "simclr": {"h_shape_knn": 47.50, "z_shape_knn": 58.33, "h_shape_linear": 69.17, **_COLOR_ALL},
        "moco-toy": {"h_shape_knn": 38.33, "z_shape_knn": 38.75, "h_shape_linear": 54.58, **_COLOR_ALL},
    },
}
"""The first published run, by lab."""

SECOND: Mapping[str, Figures] = {
    "06": {},
    "07": {"random": {"h_shape_knn": 72.50}, "simclr": {"h_shape_knn": 54.17}, "moco-toy": {"h_shape_knn": 37.92}},
}
"""The second published run, by lab; it also gives 100 % for every colour."""
SECOND_RAN_ON = "Python 3.13, torch 2.12.0+cu130, CPU tensors"

MOCO_LOSS = (4.793, 4.274)
MOCO_FIRST_LAYER_CHANGE = 0.7625
QUEUE_SIZES = (60, 120, 180, 240, 240)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of ours (% or a cosine) beside the published ones, where there are any."""

    arm: str
    cell: str
    ours: float
    first: float | None
    second: float | None

    @property
    def equal(self) -> bool:
        """Whether ours and the first published figure agree to the hundredth of a percent."""
        return self.first is not None and f"{self.ours:.2f}" == f"{self.first:.2f}"


def compare(lab: str, scores: Figures) -> list[Row]:
    """All figures of a lab, arm by arm. scores: as in results.json, accuracies as shares."""
    first, second = FIRST[lab], SECOND[lab]
    return [
        Row(
            arm,
            cell,
            mine[cell] * (1 if cell in COSINES else 100),
            first.get(arm, {}).get(cell),
            second.get(arm, {}).get(cell),
        )
        for arm, mine in scores.items()
        for cell in (*CELLS, *COSINES)
    ]


def comparison_text(results: Mapping[str, Any]) -> str:
    """The table that `mocokit lab` prints: ours, published, and the second published run where it was run."""
    lab = results["lab"]
    rows = compare(lab, results["scores"])
    two = any(row.second is not None for row in rows)
    lines = [f"{'LAB ' + lab:<28}{'ours':>8}{'published':>11}" + (f"{'second run':>12}" if two else "")]
    for row in rows:
        digits = 3 if row.cell in COSINES else 2
        cells = [f"{row.ours:8.{digits}f}", _cell(row.first, 11), _cell(row.second, 12) if two else ""]
        lines.append(f"{row.arm:<10}{name_of(row.cell):<18}" + "".join(cells).rstrip())
    known = [row for row in rows if row.first is not None]
    lines.append("")
    lines.append(
        f"{sum(row.equal for row in known)} of {len(known)} published figures are equal to the hundredth of a percent."
    )
    if results["digits_not_expected_because"]:
        lines.append(
            f"They need not be here: {results['digits_not_expected_because']}. The steps are chaotic, so another last "
            "bit ends in other digits; over seeds the figures lie where the published ones do."
        )
    if two:
        lines.append(f"The second published run ({SECOND_RAN_ON}; colour 100 % throughout) is another measurement.")
    if lab == "07":
        lines += _moco_lines(results)
    return "\n".join(lines) + "\n"


def _moco_lines(results: Mapping[str, Any]) -> list[str]:
    loss = results["loss_history"]["moco-toy"]
    change = results["encoder_weight_l2_change"]["moco-toy"]
    sizes = [step["queue_size"] for step in results["queue_trace"]]
    return [
        f"MoCo's loss {loss[0]:.3f} -> {loss[-1]:.3f} (published {MOCO_LOSS[0]} -> {MOCO_LOSS[1]}); change of the "
        f"first layer {change:.4f} ({MOCO_FIRST_LAYER_CHANGE}); queue {_listed(sizes)} ({_listed(QUEUE_SIZES)}).",
    ]


def _cell(value: float | None, width: int) -> str:
    return f"{value:{width}.2f}" if value is not None else f"{'-':>{width}}"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def name_of(cell: str) -> str:
    """A cell's published name in words: `h_shape_knn` -> `h shape 5NN`, `h_hue_swap_cosine` -> `h hue-swap cosine`."""
    space, rest = cell.split("_", 1)
    return f"{space} {rest.replace('_knn', ' 5NN').replace('hue_swap', 'hue-swap').replace('_', ' ')}"
