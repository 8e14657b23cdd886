"""Several runs beside each other: scores, what differs in their configurations and environments, their curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mocokit import files
from mocokit.errors import DamagedError
from mocokit.reporting.plain_page import figure_uri, render
from mocokit.training import runlog
from mocokit.training.runfolder import RunFolder
from mocokit.training.settings import RunConfig, from_yaml

SEED = "train.seed"
_SILENT = {
    "recipe",
    "data.images",
    "data.index_hash",
    "data.exclude",
    "train.workers",
    "train.checkpoint_every",
    "train.eval_every",
    "execution.reason",
}
"""Keys that decide nothing, or follow from one that is compared."""
_WITH_DATA = {"views.mean", "views.std", "data.side"}
"""Keys that follow from the data: no factor of their own where the data differ."""
_READ_ALIKE = ("metric", "readout", "encoder", "labels_per_class", "draws", "n_test")
"""What must agree in two verdicts for their scores to be about the same question."""
_POINTS = 300


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run folder tells without its weights. Missing files are told as missing: any run can be compared."""

    name: str
    config: RunConfig
    state: str
    """running, completed, failed, interrupted, or unknown."""
    step: int
    losses: list[dict[str, Any]]
    monitor: list[dict[str, Any]]
    """Rows of metrics with a kNN reading on the validation split."""
    environment: dict[str, Any]
    verdict: dict[str, Any] | None
    """eval/verdict.json, None before `mocokit evaluate`."""

    @property
    def setting(self) -> dict[str, Any]:
        """The configuration flat: `section.key` -> value."""
        plain = self.config.to_dict()
        flat = {"recipe": plain.pop("recipe")}
        for section, values in plain.items():
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        return flat


def read_run(run: RunFolder, name: str) -> RunFacts:
    """Read a run folder. Raises DamagedError for files that are there and are not what mocokit wrote."""
    status = run.status()
    step = status.get("step")
    return RunFacts(
        name=name,
        config=from_yaml(run.config),
        state=str(status.get("state", "unknown")),
        step=step if isinstance(step, int) else 0,
        losses=runlog.read_losses(run),
        monitor=[row for row in runlog.read_metrics(run) if row.get("knn_h") is not None],
        environment=_optional(run, "environment.json") or {},
        verdict=_optional(run, "eval/verdict.json"),
    )


def _optional(run: RunFolder, name: str) -> dict[str, Any] | None:
    path = run.path / name
    if not path.exists():
        return None
    found = files.read_json(path)
    if not isinstance(found, dict):
        raise DamagedError(f"{path} is not what mocokit wrote; it was changed.")
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs beside each other. In every list of values the runs keep their order."""

    runs: list[RunFacts]
    factors: dict[str, list[Any]]
    """What differs beside the seed: `section.key` -> the runs' values."""
    seeds: list[int]
    environments: dict[str, list[Any]]
    """What differs in the environments."""
    warnings: list[str]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "runs": [
                {
                    "name": run.name,
                    "recipe": run.config.recipe,
                    "state": run.state,
                    "step": run.step,
                    "seed": seed,
                    "share_of_chance": last_share(run),
                    "monitor_knn_h": run.monitor[-1]["knn_h"] if run.monitor else None,
                    "verdict": run.verdict,
                }
                for run, seed in zip(self.runs, self.seeds, strict=True)
            ],
            "factors": self.factors,
            "environments": self.environments,
            "warnings": self.warnings,
        }


def compare_runs(runs: Sequence[RunFacts]) -> Comparison:
    """Put runs beside each other and say what stands against reading their scores as the effect of one factor."""
    settings = [run.setting for run in runs]
    differing = _differences(settings)
    seeds = [int(one[SEED]) for one in settings]
    factors = {key: values for key, values in differing.items() if key != SEED and key not in _SILENT}
    hashes = {(one["data.index_hash"], one["data.split"]) for one in settings}
    if len(hashes) > 1:
        factors = {key: values for key, values in factors.items() if key not in _WITH_DATA}
        factors.setdefault("data.spec", [one["data.spec"] for one in settings])
    elif "data.spec" in factors:
        del factors["data.spec"]  # the same images under another path
    environments = _differences([_flat(run.environment) for run in runs])
    return Comparison(list(runs), factors, seeds, environments, _warnings(runs, factors))


def _warnings(runs: Sequence[RunFacts], factors: Mapping[str, Any]) -> list[str]:
    told = []
    names = {key.replace("data.", "data: ") if key.startswith("data.") else key for key in factors}
    if len(factors) > 1:
        told.append(
            f"the runs differ in {len(factors)} factors beside the seed ({', '.join(sorted(names))}): a difference in "
            "score can't be put down to one of them"
        )
    if missing := [run.name for run in runs if run.verdict is None]:
        told.append(f"not evaluated yet: {', '.join(missing)} (mocokit evaluate RUN --labelled DATA)")
    judged = [run.verdict for run in runs if run.verdict is not None]
    for key in _READ_ALIKE:
        if len({str(one.get(key)) for one in judged}) > 1:
            values = ", ".join(str(one.get(key)) for one in judged)
            told.append(f"the scores answer different questions: {key} is {values}")
    if len({(run.config.train.epochs, run.step) for run in runs}) > 1 and "train.epochs" not in factors:
        told.append(f"the runs have come differently far: step {', '.join(str(run.step) for run in runs)}")
    if [run for run in runs if run.state not in ("completed", "unknown")]:
        states = ", ".join(f"{run.name} {run.state}" for run in runs if run.state != "completed")
        told.append(f"not finished: {states}")
    return told


def _differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for one in settings for key in one)
    found = {}
    for key in keys:
        values = [one.get(key) for one in settings]
        if any(value != values[0] for value in values):
            found[key] = values
    return found


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            out |= _flat(inner, f"{before}{key} ")
        else:
            out[f"{before}{key}"] = inner
    return out


def shares(run: RunFacts) -> list[tuple[float, float]]:
    """(epoch, loss as share of its chance level), averaged to at most 300 points; empty where there is no chance."""
    rows = [row for row in run.losses if row.get("chance")]
    if not rows:
        return []
    steps_per_epoch = max(run.config.data.images // run.config.train.batch_size, 1)
    values = np.array([(row["step"] / steps_per_epoch, row["loss"] / row["chance"]) for row in rows], np.float64)
    parts = np.array_split(values, min(len(values), _POINTS))
    return [(float(part[:, 0].mean()), float(part[:, 1].mean())) for part in parts]


def last_share(run: RunFacts) -> float | None:
    """The last point of `shares`, None where there is none."""
    course = shares(run)
    return course[-1][1] if course and math.isfinite(course[-1][1]) else None


def curves_figure(runs: Sequence[RunFacts]) -> Figure:
    """Loss as share of chance, and the monitor's kNN accuracy where any run had a monitor."""
    readings = any(run.monitor for run in runs)
    figure = Figure(figsize=(11 if readings else 6, 3.8), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, 2 if readings else 1, squeeze=False)[0])
    styles = ("-", "--", "-.", ":")
    for number, run in enumerate(runs):
        line: dict[str, Any] = {"color": f"C{number % 10}", "ls": styles[number % 4], "lw": 1.5, "label": run.name}
        if course := shares(run):
            axes[0].plot(*zip(*course, strict=True), **line)
        if readings and run.monitor:
            points = [(row["epoch"], 100 * row["knn_h"]) for row in run.monitor]
            axes[1].plot(*zip(*points, strict=True), marker="o", ms=3, **line)
    axes[0].axhline(1, color="0.6", lw=0.8)
    axes[0].set(xlabel="epoch", ylabel="loss / chance", title="InfoNCE as share of its chance level")
    if readings:
        axes[1].set(xlabel="epoch", ylabel="kNN accuracy of h, %", title="monitor: validation split")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    return figure


# ------------------------------------------------------------------------------------------------------- text


def score_text(verdict: Mapping[str, Any] | None) -> str:
    """`71.3 [69.8, 72.7]` in percent, or `not evaluated`."""
    if verdict is None:
        return "not evaluated"
    low, high = verdict["score_ci95"]
    return f"{100 * verdict['score']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def delta_text(verdict: Mapping[str, Any] | None) -> str:
    """The difference to the strongest baseline in points, with its interval and the outcome."""
    if verdict is None:
        return ""
    low, high = verdict["ci95"]
    points = f"{100 * verdict['delta']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{points} vs {verdict['baseline']['name']}: {verdict['verdict']}"


def comparison_text(comparison: Comparison) -> str:
    """A table of the runs, what differs, and the warnings."""
    rows = [("run", "seed", "step", "loss/chance", "score, % [95 %]", "difference, pp [95 %]")]
    for run, seed in zip(comparison.runs, comparison.seeds, strict=True):
        share = last_share(run)
        rows.append(
            (
                run.name,
                str(seed),
                str(run.step),
                "" if share is None else f"{share:.3f}",
                score_text(run.verdict),
                delta_text(run.verdict),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"differs: {key}: {', '.join(_shown(value) for value in v)}" for key, v in comparison.factors.items()]
    if not comparison.factors:
        lines.append("nothing differs but the seed" if len(set(comparison.seeds)) > 1 else "nothing differs")
    lines += [f"environment: {key}: {', '.join(map(_shown, v))}" for key, v in comparison.environments.items()]
    lines += [f"WARNING: {text}" for text in comparison.warnings]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def comparison_page(comparison: Comparison) -> str:
    """One HTML file with all of it."""
    runs = comparison.runs
    methods = list(dict.fromkeys(name for run in runs for name in (run.verdict or {}).get("scores", {})))
    table = [(name, [_one_score((run.verdict or {}).get("scores", {}).get(name)) for run in runs]) for name in methods]
    return render(
        "compare.html",
        title="Runs compared",
        comparison=comparison,
        scores=[(score_text(run.verdict), delta_text(run.verdict)) for run in runs],
        shares=[last_share(run) for run in runs],
        methods=table,
        curves=figure_uri(curves_figure(runs)),
        without_chance=[run.name for run in runs if run.losses and not shares(run)],
        shown=_shown,
    )


def _one_score(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    low, high = found["ci95"]
    return f"{100 * found['score']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
