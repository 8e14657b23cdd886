"""The verbs `report` and `stepper`: everything a run left, on pages that open from a disk."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.nn import functional as F

from mocokit import files
from mocokit.api.opening import VIDEO_TABLES, Source, Store, build_store, reopen
from mocokit.api.telling import picture_of, strip
from mocokit.data.loader import BatchLoader, BatchPlan
from mocokit.data.pixels import PixelStore, read_skipped
from mocokit.data.views import plain_view
from mocokit.errors import DamagedError, DataError, UsageError
from mocokit.evaluation.features import extract
from mocokit.evaluation.labelled import LabelledData, open_labelled
from mocokit.evaluation.monitor import CURVE
from mocokit.evaluation.protocol import Ledger, plan_hash
from mocokit.evaluation.showing import chosen_neighbours, neighbour_map, principal_map
from mocokit.evaluation.verdict import Baseline, Verdict, verdict_line
from mocokit.recipes import RECIPES, DataFacts, default_backbone, default_clip_backbone, default_queue_size
from mocokit.reporting import card, plots
from mocokit.reporting.page import data_url, png_url
from mocokit.reporting.report import Facts, Mapped, Row, Setting, Shown, report_html, report_json
from mocokit.training import runlog
from mocokit.training.checkpoint import checkpoint_steps
from mocokit.training.run import Run, load_run
from mocokit.training.runfolder import open_run
from mocokit.training.settings import RunConfig, from_yaml

NEIGHBOURS, EACH, MAP_IMAGES, BANK_IMAGES, COMPARED = 6, 4, 500, 10_000, 200_000
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reported:
    """The files that `report` wrote."""

    html: Path
    card: Path
    json: Path
    facts: Facts

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: what report.json says, and the paths."""
        return report_json(self.facts) | {"files": [str(self.html), str(self.card), str(self.json)]}


def _monitored(readings: Sequence[Mapping[str, Any]]) -> str:
    """The name of the data that the curve was read from; runs from before the ledger kept it have none to tell."""
    named = [str(one["data"]) for one in readings if one["purpose"] == CURVE and one.get("data")]
    return named[-1] if named else "labelled data"


def report(
    run: str | Path | Run,
    *,
    labelled: str | Path | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    exclude: str | Path | None = None,
    quiet: bool = False,
) -> Reported:
    """Write report.html, README.md and report.json into a run's folder, and results.png anew.

    labelled: labelled data whose validation images are the queries of the neighbour grids and the points of the map;
    one line for that goes into the ledger. exclude: a list of its samples to leave out. Without it the run's own
    images serve, where they are still there. Works for a run that was not evaluated, or is not finished; then it
    says so.

    Raises UsageError, DataError, DamagedError, StorageError.
    """
    folder = run.folder if isinstance(run, Run) else open_run(Path(run))
    if not folder.config.is_file():
        raise UsageError(f"{folder.path} was stopped before anything was written down: there is nothing to report.")
    config = from_yaml(folder.config)
    if labelled is not None and config.data.video == "clips":
        raise UsageError(f"--labelled names images, and {folder.path} was trained on clips of video. Leave it out.")
    if labelled is None and exclude is not None:
        raise UsageError("--exclude has no effect without --labelled. Leave it out.")
    progress = runlog.Progress(quiet=quiet)
    opened = load_run(folder.path) if checkpoint_steps(folder.checkpoints) else None
    images, why_not = _own_images(config, folder.path, progress)
    shown, not_shown = None, why_not
    if opened is None:
        not_shown = "the run has no checkpoint yet"
    elif labelled is not None:
        data = open_labelled(
            str(labelled),
            size=config.views.size,
            label_column=label_column,
            group_column=group_column,
            exclude=exclude,
            cache=folder.path / "cache" / "labelled.u8",
        )
        progress.say("neighbours and map: labelled validation images")
        shown = _show_labelled(opened, data)
    elif images is not None:
        progress.say("neighbours and map: the run's own images")
        shown = _show_own(opened, *images)
    losses, rows, health = runlog.read_losses(folder), runlog.read_metrics(folder), runlog.read_health(folder)
    verdict = _verdict(folder.evaluation / "verdict.json")
    pairs = folder.samples / "pairs0.png"
    facts = Facts(
        name=folder.path.resolve().name,
        method=_method(config),
        status=folder.status(),
        config=_without_paths(config.to_dict()),
        settings=_settings(config),
        environment=_environment(folder.path / "environment.json"),
        losses=losses,
        metrics=rows,
        health=health,
        verdict=verdict,
        verdict_line=None if verdict is None else verdict_line(_as_verdict(verdict)),
        ledger=Ledger(folder.evaluation / "ledger.jsonl").readings,
        skipped=[{"name": one.name, "reason": one.reason} for one in read_skipped(folder.path / "skipped.jsonl")],
        duplicates=None if images is None else _duplicates(*images),
        compared=0 if images is None else min(len(images[1]), COMPARED),
        views=[] if images is None else _views(config, *images),
        pairs=png_url(pairs.read_bytes()) if images is None and pairs.is_file() else None,
        shown=shown,
        not_shown=not_shown,
        checkpoint=opened.found.path.name if opened else None,
        has_trace=(folder.path / "trace.json").is_file(),
        size=config.views.size,
        mean=config.views.mean,
        std=config.views.std,
    )
    figure = plots.results_figure(
        losses,
        rows,
        title=f"{config.recipe}, {config.encoder.backbone}",
        monitor=_monitored(facts.ledger) if any("knn_h" in row for row in rows) else None,
        health=health,
    )
    plots.save_figure(figure, folder.path / "results.png")
    html, text, numbers = (folder.path / name for name in ("report.html", "README.md", "report.json"))
    with files.turn(folder.path):
        for target in (html, text, numbers):
            files.sweep_leftovers(target)
        files.write_text(html, report_html(facts))
        files.write_text(text, card.card(facts))
        files.write_json(numbers, report_json(facts))
    return Reported(html, text, numbers, facts)


# ------------------------------------------------------------------------------------------------- pictures

Images = tuple[Source, Store]


def _own_images(config: RunConfig, path: Path, progress: runlog.Progress) -> tuple[Images | None, str | None]:
    """The images the run was trained on, or why they can't be shown."""
    data = config.data
    try:
        source = reopen(data.spec, data, tables=path / "cache" / VIDEO_TABLES)
        if source.index.hash != data.index_hash:
            return None, "the run's images are not those it was trained on any more"
        store = build_store(
            source,
            side=data.side,
            cache=path / "cache" / "pixels.u8",
            max_bad=data.max_bad,
            progress=lambda done, total: progress.show(f"reading images  {done}/{total}"),
        )
    except (DataError, UsageError) as error:
        return None, f"the run's images can't be opened any more ({type(error).__name__})"
    return (source, store), None


def _views(config: RunConfig, source: Source, store: Store, count: int = 8) -> list[tuple[str, str, str]]:
    """The first batch's images with the two views that were really fed; of clips three frames each."""
    plan = BatchPlan(source.index.ids, config.train.batch_size, config.train.seed)
    batch = BatchLoader(store, source.index, config.views, plan, workers=0).make(0)
    rows = batch.rows[:count]
    mean, std = config.views.mean, config.views.std
    pixels, extents = store.batch(rows)
    whole = plain_view(pixels, extents, size=config.views.size, mean=mean, std=std)
    views = [strip(x) for x in (whole, batch.x_q[:count], batch.x_k[:count])]
    three = [plots.to_pictures(x, mean, std) for x in views]
    return [(data_url(a), data_url(b), data_url(c)) for a, b, c in zip(*three, strict=True)]


def _show_labelled(run: Run, data: LabelledData) -> Shown | None:
    """Neighbours of validation images among training images; both labelled."""
    held = data.split.val if len(data.split.val) else data.split.train
    bank = _spread_over(np.setdiff1d(data.split.train, held) if len(data.split.val) else data.split.train, BANK_IMAGES)
    queries = _spread_over(held, MAP_IMAGES)
    if len(bank) < 2 or len(queries) < 3:
        raise DataError(f"{data.name} has too few labelled images for neighbours ({len(bank)} and {len(queries)}).")
    Ledger(run.folder.evaluation / "ledger.jsonl").record(
        split="val",
        purpose="report: nearest neighbours and map",
        plan=plan_hash({"report": data.name, "k": NEIGHBOURS}),
        n=len(queries),
        step=run.step,
    )
    where = f"{Path(data.name).name}, validation split"
    return _shown(run, data.store, data.index, bank, queries, where)


def _show_own(run: Run, source: Source, store: Store) -> Shown | None:
    usable = np.flatnonzero(store.readable).astype(np.int64)
    if len(usable) < 8:
        return None
    bank = _spread_over(usable, BANK_IMAGES // 2)
    return _shown(run, store, source.index, bank, _spread_over(bank, MAP_IMAGES), "the run's own images")


def _shown(run: Run, store: Store, index: Any, bank: Ints, queries: Ints, where: str) -> Shown:
    views = run.config.views
    every = np.unique(np.concatenate([bank, queries]))
    h = extract(run.encoder(), store, every, size=views.size, mean=views.mean, std=views.std, batch=64).h
    places = {int(row): place for place, row in enumerate(every)}
    bank_h, query_h = (h[[places[int(row)] for row in rows]] for rows in (bank, queries))
    labels = index.labels
    known = bool((labels[bank] >= 0).all() and (labels[queries] >= 0).all())
    position = {int(row): place for place, row in enumerate(bank)}
    own = np.array([position.get(int(row), -1) for row in queries])
    found = chosen_neighbours(
        F.normalize(bank_h, dim=1),
        F.normalize(query_h, dim=1),
        k=NEIGHBOURS,
        each=EACH,
        bank_labels=labels[bank] if known else None,
        query_labels=labels[queries] if known else None,
        same=own if (own >= 0).any() else None,
    )
    rows = []
    for kind, query, near, cosines in zip(found.kind, found.queries, found.found, found.cosines, strict=True):
        row = int(queries[query])
        told = []
        for place, cosine in zip(near, cosines, strict=True):
            other = int(bank[place])
            right = bool(labels[other] == labels[row]) if known else None
            told.append((_thumb(store, other), index.names[other], _label(index, other), float(cosine), right))
        rows.append(
            Row(
                kind=kind,
                query=_thumb(store, row),
                query_name=index.names[row],
                query_label=_label(index, row),
                found=told,
            )
        )
    maps = [Mapped(how="PCA", points=_points(principal_map(query_h)))]
    if len(queries) >= 12:
        how, flat = neighbour_map(query_h)
        maps.append(Mapped(how=how, points=_points(flat)))
    return Shown(
        where=where,
        neighbours=rows,
        shared=found.shared,
        maps=maps,
        names=[index.names[row] for row in queries],
        kinds=[int(label) for label in labels[queries]],
        kind_names=list(index.class_names),
    )


def _spread_over(rows: Ints, count: int) -> Ints:
    """At most `count` rows, evenly spread: not chosen."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]


def _points(flat: npt.NDArray[np.float64]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in flat]


def _thumb(store: Store, row: int) -> str:
    pixels = picture_of(store, row)
    return data_url(pixels, 48 if isinstance(store, PixelStore) else 3 * 48)


def _label(index: Any, row: int) -> str | None:
    return index.class_names[index.labels[row]] if index.labels[row] >= 0 else None


def _duplicates(source: Source, store: Store) -> list[list[str]]:
    """Groups of readable images with the same pixels, the largest first."""
    groups: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(store.readable)[:COMPARED].tolist():
        pixels, extents = store.batch(np.array([row]))
        digest = hashlib.blake2b(pixels.numpy().tobytes(), digest_size=16)
        digest.update(extents.numpy().tobytes())
        groups.setdefault(digest.digest(), []).append(row)
    several = sorted((rows for rows in groups.values() if len(rows) > 1), key=len, reverse=True)
    return [[source.index.names[row] for row in rows] for rows in several]


# ------------------------------------------------------------------------------------------- what files say


def _method(config: RunConfig) -> str:
    names = {"moco": "MoCo", "moco-v3": "MoCo v3", "simclr": "SimCLR", "byol": "BYOL"}
    return names[config.contrast.method]


def _without_paths(plain: dict[str, Any]) -> dict[str, Any]:
    """A report is sent to others: of where the data lie only the last name is told."""
    plain["data"]["spec"] = Path(plain["data"]["spec"]).name
    return plain


def _settings(config: RunConfig) -> list[Setting]:
    """Every setting by section; those that differ from the recipe's first."""
    mine = _without_paths(config.to_dict())
    recipe = RECIPES.get(config.recipe)
    theirs: dict[str, Any] = {}
    if recipe is not None:
        made = recipe.make(DataFacts(config.data.images, config.views.size, config.encoder.backbone))
        sections = ("views", "encoder", "contrast", "optim", "train")
        theirs = {section: dataclasses.asdict(getattr(made, section)) for section in sections}
        if "K" in made.fitted and config.contrast.has_queue:
            theirs["contrast"]["K"] = default_queue_size(config.data.images, config.train.batch_size)
        if "backbone" in made.fitted:
            usual = default_clip_backbone if config.encoder.clip else default_backbone
            theirs["encoder"]["backbone"] = usual(config.views.size)
    found = []
    for section, values in mine.items():
        if not isinstance(values, Mapping):
            continue
        for name, value in values.items():
            default = theirs.get(section, {}).get(name, value)
            same = _text(default) == _text(value) or (section, name) in _FITTED
            found.append(
                Setting(name=f"{section}.{name}", value=_text(value), default=None if same else _text(default))
            )
    return sorted(found, key=lambda one: one.default is None)


_FITTED = {
    ("encoder", "clip"),
    ("views", "mean"),
    ("views", "std"),
    ("views", "size"),
    ("train", "checkpoint_every"),
    ("train", "eval_every"),
}
"""Settings that are taken from the data in every run: no deviation from a recipe."""


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_text(inner) for inner in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _environment(path: Path) -> dict[str, Any]:
    found = files.read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _verdict(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    found = files.read_json(path)
    try:
        _as_verdict(found)
        if not all({"score", "ci95"} <= set(one) for one in found["scores"].values()):
            raise ValueError("a score lacks its interval")
        float(found["chance"]), str(found["pretraining_saw_test_images"])
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DamagedError(f"{path} is not what mocokit wrote ({error}). Evaluate the run again.") from error
    return dict(found)


def _as_verdict(found: Mapping[str, Any]) -> Verdict:
    fields = dataclasses.fields(Verdict)
    later = {field.name for field in fields if field.default is not dataclasses.MISSING}  # than the first version
    values = {field.name: found[field.name] for field in fields if field.name in found or field.name not in later}
    values["baselines"] = tuple(Baseline(**one) for one in found["baselines"])
    values["ci95"], values["score_ci95"] = tuple(found["ci95"]), tuple(found["score_ci95"])
    return Verdict(**values)
