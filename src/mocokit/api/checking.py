"""The verb `check`: what is in the data before anybody trains on them or trusts a score."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit import files
from mocokit.data.audit import Audit, summary, to_exclude
from mocokit.data.audit import audit as audit_sources
from mocokit.data.exclusion import write_exclude
from mocokit.data.pixels import build_pixel_store, side_for
from mocokit.data.sources import ImageSource, open_source
from mocokit.errors import UsageError
from mocokit.evaluation.features import extract
from mocokit.evaluation.nearest_pairs import nearest_pairs
from mocokit.reporting.audit_page import audit_page, findings_text
from mocokit.training import runlog
from mocokit.training.run import Run, load_run
from mocokit.training.state import pick_device

CLOSEST = 24
"""Pairs that only a run's features hold alike, shown for a look."""


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """What `check` found."""

    audit: Audit
    facts: dict[str, Any]
    """All of it as JSON values."""
    closest: tuple[tuple[int, int, float], ...]
    """With a run: pairs of rows whose features are nearest and whose pixels are not the same, and their cosine."""
    excluded: int | None
    """How many samples the exclude list names, None when none was written."""

    def text(self) -> str:
        """The findings, a line each; those to put right begin with `!`."""
        return findings_text(self.audit)

    @property
    def leaks(self) -> int:
        """Pictures of a later part (test) that are also in an earlier one (train)."""
        return sum(len({b for _, b in pairs}) for pairs in self.audit.crossing().values())


def check(
    data: str | Path,
    against: str | Path | None = None,
    *,
    run: str | Path | Run | None = None,
    html: str | Path | None = None,
    json_file: str | Path | None = None,
    write_exclude_to: str | Path | None = None,
    split: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    exclude: str | Path | None = None,
    quiet: bool = False,
) -> Check:
    """Look at every picture: unreadable, odd, constant, repeated within and across splits; groups; classes.

    against: a second set, for copies between the two. run: a run whose features propose further pairs, which are
    verified like the others; the nearest of those that are not the same picture are shown. html, json_file: where to
    write the page and the full result. write_exclude_to: where to write the list of samples of `data` to leave out.
    exclude: such a list, to be left out already. split, *_column: as for `pretrain`; they hold for both sets, but
    `split` for the first alone. Raises UsageError, DataError, StorageError.
    """
    progress = runlog.Progress(quiet=quiet)
    source = open_source(data, split=split, label_column=label_column, group_column=group_column, exclude=exclude)
    other = None
    if against is not None:
        other = open_source(against, label_column=label_column, group_column=group_column)
    for target in (html, json_file, write_exclude_to):
        if target is not None and not Path(target).absolute().parent.is_dir():
            raise UsageError(f"The folder of {target} does not exist. Create it or write elsewhere.")
    workers = len(os.sched_getaffinity(0))
    proposals: list[tuple[int, int, float]] = []
    if run is not None:
        opened = run if isinstance(run, Run) else load_run(Path(run))
        proposals = _proposals(opened, [source] if other is None else [source, other], progress)
    result = audit_sources(
        source,
        other,
        proposals=[(a, b) for a, b, _ in proposals],
        workers=workers,
        progress=lambda what, done, total: progress.show(f"{what}  {done:,}/{total:,}"),
    )
    same = set(result.twin_pairs())
    closest = tuple(pair for pair in proposals if pair[:2] not in same)[:CLOSEST]
    facts = summary(result)
    facts["closest_by_features"] = [
        {"first": result.names[a], "second": result.names[b], "cosine": round(cosine, 4)} for a, b, cosine in closest
    ]
    if html is not None:
        files.write_text(Path(html), audit_page(result, facts, closest))
    if json_file is not None:
        files.write_json(Path(json_file), facts)
    excluded = None
    if write_exclude_to is not None:
        samples = to_exclude(result)
        write_exclude(Path(write_exclude_to), samples)
        excluded = len(samples)
    return Check(result, facts, closest, excluded)


def _proposals(run: Run, sources: Sequence[ImageSource], progress: runlog.Progress) -> list[tuple[int, int, float]]:
    """Pairs of rows whose features are nearest, the nearest first, with their cosine."""
    vectors = []
    rows_of: list[npt.NDArray[np.int64]] = []
    offset = 0
    views = run.config.views
    device = pick_device("auto")
    encoder = run.encoder().to(device)
    for source in sources:
        store = build_pixel_store(
            source,
            side=side_for(source, views.size),
            max_bad=1.0,
            workers=len(os.sched_getaffinity(0)),
            progress=lambda done, total: progress.show(f"reading images for the encoder  {done:,}/{total:,}"),
        )
        rows = np.flatnonzero(store.readable)
        found = extract(
            encoder,
            store,
            rows,
            size=views.size,
            mean=views.mean,
            std=views.std,
            device=device,
            progress=lambda done, total: progress.show(f"features  {done:,}/{total:,}"),
        )
        vectors.append(found.h.numpy())
        rows_of.append(rows + offset)
        offset += len(source.index)
    return nearest_pairs(np.concatenate(vectors), np.concatenate(rows_of))
