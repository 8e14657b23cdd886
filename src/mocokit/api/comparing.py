"""The verb `compare`: runs beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mocokit import files
from mocokit.errors import UsageError
from mocokit.reporting.compare import Comparison, compare_runs, comparison_page, read_run
from mocokit.training.run import Run
from mocokit.training.runfolder import open_run


def compare(runs: Sequence[str | Path | Run], *, html: str | Path | None = None) -> Comparison:
    """Scores, curves, and what differs in configuration and environment, of two or more runs.

    Reads only what the run folders hold; a run that was not evaluated yet is shown without a score. html: where to
    write the page, one file. Raises UsageError for fewer than two runs or a folder that is none, DamagedError,
    StorageError.
    """
    paths = [run.path if isinstance(run, Run) else Path(run) for run in runs]
    if len(paths) < 2:
        raise UsageError("compare needs at least two runs.")
    if html is not None and not Path(html).absolute().parent.is_dir():
        raise UsageError(f"The folder of {html} does not exist. Create it or write elsewhere.")
    comparison = compare_runs([read_run(open_run(path), name) for path, name in zip(paths, _names(paths), strict=True)])
    if html is not None:
        files.write_text(Path(html), comparison_page(comparison))
    return comparison


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' own names; with their parents' where two have the same, and numbered where that is not enough."""
    counts = Counter(path.name for path in paths)
    longer = [path.name if counts[path.name] == 1 else f"{path.absolute().parent.name}/{path.name}" for path in paths]
    again = Counter(longer)
    return [name if again[name] == 1 else f"{name} ({number})" for number, name in enumerate(longer, 1)]
