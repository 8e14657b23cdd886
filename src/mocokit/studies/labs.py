"""Run a lab: once with the published seed and everything it leaves, or over many seeds with a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mocokit import files
from mocokit.errors import DamagedError, UsageError
from mocokit.reporting.plots import save_figure
from mocokit.studies import lab_folder
from mocokit.studies.lab06 import lab06
from mocokit.studies.lab07 import lab07
from mocokit.studies.lab_figures import strip_figure
from mocokit.studies.lab_run import LabRun
from mocokit.studies.published import comparison_text
from mocokit.studies.seed_table import CLAIMS, judge, seed_table, seeds_text
from mocokit.studies.setting import Streams, streams

LABS: Mapping[str, Callable[[Streams, Callable[[str], None]], LabRun]] = {"06": lab06, "07": lab07}


@dataclass(frozen=True, kw_only=True, slots=True)
class LabResult:
    """A lab's figures, and with several seeds those of each. results[0] is the published seed's."""

    lab: str
    path: Path
    results: Sequence[Mapping[str, Any]]

    def text(self) -> str:
        """Our figures beside the published ones, then the table and the conclusions over seeds."""
        parts = [comparison_text(self.results[0])]
        if len(self.results) > 1:
            parts.append(seeds_text(self.lab, self.results))
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: results.json, and with several seeds their table and conclusions."""
        plain: dict[str, Any] = dict(self.results[0])
        if len(self.results) > 1:
            plain["over_seeds"] = _over_seeds(self.lab, self.results)
        return plain


def run_lab(
    lab: str,
    out: Path,
    *,
    seeds: int = 1,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> LabResult:
    """Run LAB `06` or `07` into the folder `out`.

    seeds: repetitions; the first is the published run, which leaves every artefact, each further one a file
    `seeds/SEED.json`. Repetitions that are there already, from the same code, versions, threads and processor, are
    kept, so an interrupted run goes on where it was.

    Raises UsageError (unknown lab, folder in use for something else, results of another measurement), LockedError,
    StorageError, DamagedError.
    """
    if lab not in LABS:
        raise UsageError(f"There is no LAB {lab!r}. Use one of {', '.join(LABS)}.")
    if not 1 <= seeds <= 1000:
        raise UsageError(f"--seeds must lie in [1, 1000]. Got {seeds}.")
    lab_folder.code_sha256()  # now: the source on disk may have changed by the end of a long run
    with lab_folder.claim(out, lab, overwrite=overwrite, add_seeds=seeds > 1):
        results: list[dict[str, Any]] = []
        for repetition in range(seeds):
            path = out / "results.json" if repetition == 0 else out / "seeds" / f"{streams(repetition).data}.json"
            one = _stored(path, repetition, results[0] if results else None)
            if one is None:
                named = f"LAB {lab}, seed {streams(repetition).data}" + (
                    f" ({repetition + 1}/{seeds})" if seeds > 1 else ""
                )
                one = _run(lab, repetition, out, path, partial(_say, say, named))
                if results:
                    lab_folder.refuse_to_merge(results[0], one, out / "results.json")
            results.append(one)
        if seeds > 1:
            _write_table(out, lab, results)
    return LabResult(lab=lab, path=out, results=results)


def _say(say: Callable[[str], None], named: str, text: str) -> None:
    say(f"{named}: {text}")


def _run(lab: str, repetition: int, out: Path, path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    started = time.perf_counter()
    run = LABS[lab](streams(repetition), say)
    results = lab_folder.payload(run, time.perf_counter() - started)
    say(f"done in {results['seconds']:.0f} s")
    if repetition == 0:
        return lab_folder.write_artefacts(out, run, results)
    files.write_json(path, results)
    return results


def _stored(path: Path, repetition: int, first: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An earlier result of this repetition, or None. Raises UsageError when it is of another measurement."""
    if not path.exists():
        return None
    results = lab_folder.read_results(path)
    if results["seed"] != streams(repetition).data:
        raise DamagedError(f"{path} is the result of seed {results['seed']}; it was moved there. Remove it.")
    lab_folder.refuse_to_merge(results, first or lab_folder.measurement(results["lab"]), path)
    return results


def _over_seeds(lab: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    judgements = [judge(claim, results) for claim in CLAIMS[lab]]
    return {
        "seeds": [one["seed"] for one in results],
        "measured_with": {name: results[0][name] for name in lab_folder.MEASUREMENT},
        "cells": [
            {
                "arm": cell.arm,
                "cell": cell.cell,
                "mean": cell.mean,
                "sd": cell.sd,
                "ci95": [cell.low, cell.high],
                "values": list(cell.values),
            }
            for cell in seed_table(results)
        ],
        "conclusions": [{"claim": j.claim, "outcome": j.outcome, "evidence": j.evidence} for j in judgements],
    }


def _write_table(out: Path, lab: str, results: Sequence[Mapping[str, Any]]) -> None:
    files.write_json(out / "seeds.json", _over_seeds(lab, results))
    files.write_text(out / "seeds.txt", seeds_text(lab, results))
    save_figure(strip_figure(lab, seed_table(results), list(results[0]["scores"])), out / "seeds.png")
