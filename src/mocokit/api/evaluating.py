"""The verb `evaluate`: frozen encoders against their baselines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mocokit import files
from mocokit.errors import (
    UsageError,
)
from mocokit.evaluation.counterfactual import before_and_after_table, find_change
from mocokit.evaluation.frozen import FrozenPlan, FrozenResult, counterfactuals, evaluate_frozen
from mocokit.evaluation.labelled import open_labelled
from mocokit.evaluation.verdict import verdict_line
from mocokit.training import runlog
from mocokit.training.run import Run, load_run
from mocokit.training.state import pick_device

if TYPE_CHECKING:
    pass


def evaluate(
    runs: str | Path | Run | Sequence[str | Path | Run],
    labelled: str | Path,
    *,
    labels_per_class: int | str | None = 10,
    draws: int = 20,
    k: int | None = None,
    knn_temperature: float = 0.1,
    readout: str = "h",
    label_column: str | None = None,
    group_column: str | None = None,
    shuffle_labels: bool = False,
    counterfactual: Sequence[str] = (),
    quiet: bool = False,
) -> FrozenResult:
    """Score frozen encoders by kNN against pixels and random weights, and give a verdict.

    runs: one run, or several of one recipe that differ in their seed. labelled: data with labels; its own splits
    are used, or a fixed one by hash. labels_per_class: labels the classifier may see, or "all" / None; draws: how
    often they are drawn. k: None = chosen by cross-validation inside each draw (200 with all labels). counterfactual:
    changes (`channel-swap`, `grayscale`, `flip`, `shift`, `brightness`) under which the features are compared with
    those of the test images as they are, before and after training.

    Writes eval/verdict.json and eval/knn.csv into every run folder and a line into its ledger. Raises UsageError,
    DataError, DamagedError.
    """
    listed = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    if not listed:
        raise UsageError("evaluate needs at least one run.")
    opened = [run if isinstance(run, Run) else load_run(Path(run)) for run in listed]
    frozen_plan = FrozenPlan(
        labels_per_class=_label_budget(labels_per_class),
        draws=draws,
        k=k,
        knn_temperature=knn_temperature,
        readout=readout,
        shuffle_labels=shuffle_labels,
    )
    for change in counterfactual:
        find_change(change)
    progress = runlog.Progress(quiet=quiet)
    first = opened[0]
    for run in opened:
        for reason in run.found.passed_over:
            progress.warn(f"passed over a damaged checkpoint: {reason}")
    data = open_labelled(
        str(labelled),
        size=first.config.views.size,
        label_column=label_column,
        group_column=group_column,
        cache=first.path / "cache" / "labelled.u8",
        progress=lambda done, total: progress.show(f"reading images  {done}/{total}"),
    )
    result = evaluate_frozen(opened, data, frozen_plan, device=pick_device("auto"), say=progress.say)
    if counterfactual:
        progress.say(f"counterfactual: {', '.join(counterfactual)}")
        probes = counterfactuals(opened, data, counterfactual, device=pick_device("auto"))
        result = dataclasses.replace(result, counterfactual=probes)
    if not shuffle_labels:
        for run in opened:
            files.write_json(run.folder.evaluation / "verdict.json", result.to_dict())
            files.write_text(run.folder.evaluation / "knn.csv", _knn_csv(result))
    return result


def _label_budget(value: int | str | None) -> int | None:
    if value is None or value == "all":
        return None
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"--labels-per-class must be a whole number or `all`. Got {value!r}.") from None


def _knn_csv(result: FrozenResult) -> str:
    lines = ["method,accuracy,low,high"]
    lines += [f"{name},{one.mean:.6f},{one.low:.6f},{one.high:.6f}" for name, one in result.scores.items()]
    return "\n".join(lines) + "\n"


def table_and_verdict(result: FrozenResult) -> str:
    """The scores as a table, what they rest on, and the verdict as the last line."""
    names = {"h": "query h", "z": "query z", "key-h": "key h", "key-z": "key z"}
    width = max(len(names.get(name, name)) for name in result.scores)
    lines = [f"{'':<{width}}  kNN accuracy, % [95 % interval]"]
    for name, one in result.scores.items():
        mark = " <-" if name == result.verdict.readout and result.verdict.encoder == "query" else ""
        label = names.get(name, name)
        lines.append(f"{label:<{width}}  {100 * one.mean:5.1f}  [{100 * one.low:.1f}, {100 * one.high:.1f}]{mark}")
    lines.append(f"{'chance':<{width}}  {100 * result.chance:5.1f}")
    lines.append(f"Pretraining saw the test images: {result.pretraining}.")
    lines.append(f"The test split has been read {result.test_readings} time(s) for this run.")
    if result.counterfactual:
        lines.append(before_and_after_table(result.counterfactual).rstrip("\n"))
    lines.append(verdict_line(result.verdict))
    return "\n".join(lines) + "\n"
