"""An evaluation as text: the table on stdout and the CSV files beside the verdict."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from mocokit.evaluation.counterfactual import before_and_after_table
from mocokit.evaluation.frozen import CLASSIFIERS, FrozenResult
from mocokit.evaluation.interval import Interval
from mocokit.evaluation.metrics import CALIBRATION_BINS, Scores
from mocokit.evaluation.near_twins import near_twins_line
from mocokit.evaluation.verdict import verdict_line

_READOUTS = {"h": "query h", "z": "query z", "key-h": "key h", "key-z": "key z"}


def table_and_verdict(result: FrozenResult) -> str:
    """The scores as a table, what they rest on, and the verdict as the last line."""
    judged = result.verdict.readout if result.verdict.encoder == "query" else f"key-{result.verdict.readout}"
    lines = []
    for classifier, methods in result.tables.items():
        lines += _classifier_table(CLASSIFIERS[classifier], methods, judged, result.chance)
        lines += _recalls(methods[judged], result.class_names)
    for name, note in result.notes.items():
        lines.append(f"{name}: {note}.")
    for one in result.verdict.baselines:
        if not one.ran:
            lines.append(f"{one.name} was not run: {one.why_not}.")
    lines.append(f"Pretraining saw the test {result.verdict.judged}: {result.pretraining}.")
    if result.near_twins is not None:
        lines.append(near_twins_line(result.near_twins, result.verdicts))
    lines.append(f"The test split has been read {result.test_readings} time(s) for this run.")
    if result.counterfactual:
        lines.append(before_and_after_table(result.counterfactual).rstrip("\n"))
    lines += [verdict_line(one) for one in reversed(result.verdicts.values())]
    return "\n".join(lines) + "\n"


def _classifier_table(name: str, methods: dict[str, Scores], judged: str, chance: float) -> list[str]:
    width = max(len(_READOUTS.get(method, method)) for method in methods)
    with_ece = any(one.reliability for one in methods.values())
    head = f"{'':<{width}}  {name} accuracy, % [95 % interval]  balanced accuracy        macro F1"
    lines = [head + ("                 ECE, %" if with_ece else "")]
    for method, one in methods.items():
        cells = [_cell(value) for value in (one.accuracy, one.balanced_accuracy, one.macro_f1)]
        line = f"{_READOUTS.get(method, method):<{width}}  {cells[0]:<{len(name) + 30}}{cells[1]:<25}{cells[2]}"
        if one.reliability is not None:
            line = f"{line:<{width + len(name) + 82}}{100 * one.reliability.ece:5.1f}"
        lines.append(line.rstrip() + (" <-" if method == judged else ""))
    lines.append(f"{'chance':<{width}}  {100 * chance:5.1f}")
    if with_ece:
        lines.append(f"ECE: expected calibration error of the most likely class, {CALIBRATION_BINS} equal bins.")
    return lines


def _cell(one: Interval) -> str:
    return f"{100 * one.mean:5.1f}  [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def _recalls(one: Scores, class_names: Sequence[str]) -> list[str]:
    """Recall by class of the readout that the verdict is about; of many classes the five worst."""
    told = sorted(one.recall.items(), key=lambda item: _recall(one, item[0]))
    if len(told) > 12:
        told = told[:5]
        head = "Recall of the five worst classes, %: "
    else:
        told = sorted(told)
        head = "Recall by class, %: "
    return [head + ", ".join(f"{class_names[number]} {100 * _recall(one, number):.1f}" for number, _ in told)]


def _recall(one: Scores, number: int) -> float:
    return float(one.confusion[number, number] / one.confusion[number].sum())


def methods_csv(methods: dict[str, Scores]) -> str:
    """One line a method: accuracy, balanced accuracy, macro F1, each with its interval, and ECE (fractions)."""
    head = ["method", "accuracy", "low", "high"]
    head += [f"{name}{end}" for name in ("balanced_accuracy", "macro_f1") for end in ("", "_low", "_high")]
    rows: list[list[Any]] = []
    for name, one in methods.items():
        three = (one.accuracy, one.balanced_accuracy, one.macro_f1)
        numbers = [f"{value:.6f}" for part in three for value in (part.mean, part.low, part.high)]
        rows.append([name, *numbers, "" if one.reliability is None else f"{one.reliability.ece:.6f}"])
    return csv_text([*head, "ece"], rows)


def recall_csv(result: FrozenResult) -> str:
    """One line for each classifier, method and class."""
    rows: list[list[Any]] = []
    for classifier, methods in result.tables.items():
        for name, one in methods.items():
            for number, interval in one.recall.items():
                ends = ["", ""] if interval is None else [f"{interval.low:.6f}", f"{interval.high:.6f}"]
                images = round(float(one.confusion[number].sum()))
                rows.append(
                    [classifier, name, result.class_names[number], images, f"{_recall(one, number):.6f}", *ends]
                )
    return csv_text(["classifier", "method", "class", "images", "recall", "low", "high"], rows)


def confusion_csv(result: FrozenResult) -> str:
    """One line for each classifier, method, class and class it was taken for; counts, the mean over answers."""
    rows: list[list[Any]] = []
    for classifier, methods in result.tables.items():
        for name, one in methods.items():
            for row, own in enumerate(result.class_names):
                for column, other in enumerate(result.class_names):
                    if one.confusion[row, column] > 0:
                        rows.append([classifier, name, own, other, f"{one.confusion[row, column]:.3f}"])
    return csv_text(["classifier", "method", "class", "taken_for", "images"], rows)


def reliability_csv(methods: dict[str, Scores]) -> str:
    """One line for each method and bin of confidence."""
    rows: list[list[Any]] = []
    for name, one in methods.items():
        if one.reliability is not None:
            for number in range(CALIBRATION_BINS):
                values = (one.reliability.share, one.reliability.confidence, one.reliability.accuracy)
                rows.append([name, number, *(f"{value[number]:.6f}" for value in values)])
    return csv_text(["method", "bin", "share", "confidence", "accuracy"], rows)


def csv_text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV with a head; names with commas or quotes are quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue()
