"""The verbs of `search`: an index over a data set's vectors, and questions to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.api.embedding import facts_of, open_data
from mocokit.data.clips import open_clips
from mocokit.data.generated import GENERATED
from mocokit.data.generated_videos import generated_name
from mocokit.data.pixels import canvas_limit, fit_picture
from mocokit.data.sources import open_source
from mocokit.data.videos import is_video_file, open_videos
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.labelled_videos import SAMPLES_PER_VIDEO
from mocokit.exporting.loading import FrozenEncoder, Picture, as_rgb, freeze
from mocokit.exporting.trained import Place, Trained, is_trained, open_trained
from mocokit.retrieval import index as store
from mocokit.retrieval import query as asking
from mocokit.retrieval.encode import Encoded, Source, encode_pictures, encode_source, unit
from mocokit.retrieval.index import SearchIndex
from mocokit.retrieval.query import Filter, Hit
from mocokit.retrieval.rows import rows_of_index
from mocokit.retrieval.sources import Reading, clips_of, reading_of
from mocokit.training import runlog
from mocokit.training.state import pick_device

Floats = npt.NDArray[np.float32]
MAX_QUERY_PICTURES = 1000


@dataclass(frozen=True, slots=True)
class Change:
    """What a write to an index did."""

    index: SearchIndex
    added: int = 0
    removed: int = 0
    already: int = 0
    skipped: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        counts = {"added": self.added, "removed": self.removed, "already": self.already, "skipped": self.skipped}
        return self.index.summary() | counts


def search_build(
    run: Place,
    data: str | Path,
    out: str | Path | None = None,
    *,
    readout: str = "h",
    kind: str = "auto",
    split: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    exclude: str | Path | None = None,
    max_bad: float = 0.01,
    device: str = "auto",
    overwrite: bool = False,
    quiet: bool = False,
) -> Change:
    """Make an index over the images of `data`, in RUN/search when `out` is None; over clips for a run on clips.

    kind: `exact`, `hnsw`, `ivf`, or `auto` (exact up to 200,000 images, then HNSW); the recall@10 of an approximate
    one against exact search is measured. exclude: a list of samples to leave out. Raises UsageError, DataError,
    DamagedError, LockedError, StorageError.
    """
    opened = open_trained(run)
    path = opened.path / "search" if out is None else Path(out)
    progress = runlog.Progress(quiet=quiet)
    with store.claim_index(path, overwrite=overwrite):
        reading = reading_of(opened, str(data))
        source = open_data(data, reading, split, label_column, group_column, progress, exclude)
        frozen = freeze(opened, readout, pick_device(device))
        encoded = _encode(frozen, source, max_bad, progress)
        made_by = facts_of(opened, readout, source)
        facts: dict[str, Any] = {key: made_by[key] for key in ("weights", "step", "readout")}
        facts["run"] = os.path.relpath(opened.path.resolve(), path.resolve())
        facts["sources"] = [_source_facts(data, source, reading, split, label_column, group_column)]
        rows = rows_of_index(source.index, encoded.rows, 0)
        index = store.commit(store.new_index(path, encoded.vectors, rows, facts, kind))
        progress.say(recall_line(index))
    return Change(index, added=len(encoded.rows), skipped=len(encoded.skipped))


def search_add(
    index: str | Path,
    data: str | Path,
    *,
    split: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    exclude: str | Path | None = None,
    again: bool = False,
    max_bad: float = 0.01,
    device: str = "auto",
    quiet: bool = False,
) -> Change:
    """Add the images of `data` whose ids the index lacks (with `again`, replace the others too).

    Only new images are encoded; those on the list `exclude` are not added (and stay when they are there). Raises as
    `search_build`.
    """
    path = index_path(index)
    progress = runlog.Progress(quiet=quiet)
    with store.claim_index(path, overwrite=None):
        opened = store.open_index(path)
        trained = _trained_of(opened)
        reading = reading_of(trained, str(data))
        source = open_data(data, reading, split, label_column, group_column, progress, exclude)
        there = np.isin(source.index.ids, opened.rows.ids[opened.rows.alive])
        wanted = np.arange(len(source.index)) if again else np.flatnonzero(~there)
        if not len(wanted):
            return Change(opened, already=int(there.sum()))
        frozen = freeze(trained, opened.facts["readout"], pick_device(device))
        part = source.subset(wanted)
        encoded = _encode(frozen, part, max_bad, progress)
        facts = dict(opened.facts)
        facts["sources"] = [*facts["sources"], _source_facts(data, source, reading, split, label_column, group_column)]
        rows = rows_of_index(part.index, encoded.rows, len(facts["sources"]) - 1)
        changed = store.with_added(replace(opened, facts=facts), encoded.vectors, rows)
        committed = store.commit(changed)
        progress.say(recall_line(committed))
    already = 0 if again else int(there.sum())
    return Change(committed, added=len(encoded.rows), already=already, skipped=len(encoded.skipped))


def search_remove(
    index: str | Path,
    *,
    ids: Sequence[int] = (),
    names: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> Change:
    """Remove images by id, by name (shell patterns such as `summer/*`) or by label. UsageError when none fits."""
    if not (ids or names or labels):
        raise UsageError("Say what to remove: --ids, --names or --labels.")
    path = index_path(index)
    with store.claim_index(path, overwrite=None):
        opened = store.open_index(path)
        rows = store.find_rows(opened, ids=ids, patterns=names, labels=labels)
        if not len(rows):
            raise UsageError(f"No image of {path} fits {', '.join([*names, *labels])}. Nothing was removed.")
        committed = store.commit(store.with_removed(opened, rows))
    return Change(committed, removed=len(rows))


@dataclass(frozen=True, slots=True)
class Answer:
    """One question and its answer."""

    asked: str
    hits: list[Hit]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"asked": self.asked, "hits": [one.to_dict() for one in self.hits]}


def search_query(
    index: str | Path | SearchIndex,
    pictures: Sequence[Picture] = (),
    *,
    ids: Sequence[int] = (),
    k: int = 10,
    labels: Sequence[str] = (),
    groups: Sequence[str] = (),
    together: bool = False,
    device: str = "auto",
) -> list[Answer]:
    """The k most similar images of each picture (files, folders, arrays) and of each stored id, most similar first.

    An index of clips is asked with video files, each by the mean of up to 10 of its clips, evenly spread. together: one
    question, the mean of all. A stored image is left out of its own answer. labels, groups: only images
    with one of them. Raises UsageError, DataError, DamagedError.
    """
    opened = index if isinstance(index, SearchIndex) else store.open_index(index_path(index))
    vectors: list[Floats] = [asking.stored_vector(opened, one) for one in ids]
    names = [f"id {one}" for one in ids]
    files_named = list(_expanded(pictures))
    if not files_named and not ids:
        raise UsageError("Ask with pictures (files or a folder) or with the ids of stored images.")
    if files_named:
        frozen = encoder_of(opened, device)
        for name, picture in files_named:
            names.append(name)
            vectors.append(query_vector(frozen, picture, name, clip_reading(opened)))
    chosen = Filter(labels=tuple(labels), groups=tuple(groups))
    if together and len(vectors) > 1:
        mean = unit(np.concatenate(vectors).mean(axis=0, keepdims=True))
        hits = asking.nearest(opened, mean, k, chosen=chosen, without=ids)
        return [Answer(f"{len(vectors)} together", hits[0])]
    found = []
    for number, (name, vector) in enumerate(zip(names, vectors, strict=True)):
        without = [ids[number]] if number < len(ids) else []
        found.append(Answer(name, asking.nearest(opened, vector, k, chosen=chosen, without=without)[0]))
    return found


def search_duplicates(index: str | Path, *, threshold: float = 0.98) -> list[list[Hit]]:
    """Clusters of nearly the same images, largest first; a hit's score is its cosine to the cluster's first."""
    opened = store.open_index(index_path(index))
    found = []
    for cluster in asking.near_duplicates(opened, threshold):
        vectors = opened.neighbours.vectors(cluster.rows)
        scores = (vectors @ vectors[0]).tolist()
        found.append([asking.hit(opened, row, score) for row, score in zip(cluster.rows.tolist(), scores, strict=True)])
    return found


def index_path(place: str | Path) -> Path:
    """The index folder that is meant: the folder itself, or `search` in the folder of a run or a fine-tuning."""
    path = Path(place)
    return path / "search" if is_trained(path) else path


def encoder_of(index: SearchIndex, device: str = "auto") -> FrozenEncoder:
    """The encoder that the index's vectors were made by. Raises UsageError when it is no longer there."""
    return freeze(_trained_of(index), index.facts["readout"], pick_device(device))


def _trained_of(index: SearchIndex) -> Trained:
    path = Path(os.path.normpath(index.path.resolve() / index.facts["run"]))
    advice = "Build the index again with a run that is there."
    step = index.facts["step"]
    if not (path / "checkpoints" / f"step-{step}").is_dir() and not (path / "model").is_dir():
        raise UsageError(f"The encoder of {index.path} (step {step} of {path}) is no longer there. {advice}")
    trained = open_trained(path, step)
    if trained.weights != index.facts["weights"]:
        raise UsageError(f"{path} holds other weights than those that made {index.path}. {advice}")
    return trained


def clip_reading(index: SearchIndex) -> Reading | None:
    """How clips were cut for the index; None where its rows are pictures."""
    reading: Reading | None = index.facts["sources"][0].get("reading")
    return reading if reading is not None and "clips" in reading else None


def query_vector(frozen: FrozenEncoder, picture: Picture, name: str, reading: Reading | None = None) -> Floats:
    """The unit vector [1, D] of one picture, or of one video for an encoder of clips. Raises DataError naming it."""
    if frozen.clip:
        return _video_vector(frozen, picture, name, reading)
    limit = canvas_limit(frozen.views.size)
    try:
        rgb = fit_picture(as_rgb(picture, limit), limit)
    except DataError as error:
        raise DataError(f"{name} can't be used as a question: {error}") from error
    return unit(encode_pictures(frozen, [rgb], limit))


def _video_vector(frozen: FrozenEncoder, picture: Picture, name: str, reading: Reading | None) -> Floats:
    """The unit vector of the mean over a video's clips."""
    if reading is None or not isinstance(picture, str | Path) or not is_video_file(Path(picture)):
        raise UsageError(
            f"{name} is no video file, and the index holds clips of video. Ask with a video file (`mocokit search "
            "query INDEX clip.mp4`) or with a stored clip."
        )
    config = clips_of(reading)
    assert config is not None
    source = open_clips(open_videos(picture, workers=1), config)
    rows = np.unique(np.linspace(0, len(source.index) - 1, min(len(source.index), SAMPLES_PER_VIDEO)).round())
    return unit(unit(encode_source(frozen, source.subset(rows.astype(np.int64))).vectors).mean(0, keepdims=True))


def recall_line(index: SearchIndex) -> str:
    """What kind of index it is, in words."""
    neighbours = index.neighbours
    if neighbours.kind == "exact":
        return f"{len(index)} vectors of {neighbours.dim} dimensions, compared exactly"
    name = "efSearch" if neighbours.kind == "hnsw" else "nprobe"
    return (
        f"{len(index)} vectors of {neighbours.dim} dimensions, {neighbours.kind} ({name} {neighbours.effort}): "
        f"recall@10 {neighbours.recall:.3f} against exact search, measured on stored vectors"
    )


def _encode(frozen: FrozenEncoder, source: Source, max_bad: float, progress: runlog.Progress) -> Encoded:
    return encode_source(
        frozen,
        source,
        max_bad=max_bad,
        progress=lambda done, total: progress.show(f"encoding  {done}/{total}", final=done == total),
    )


def _source_facts(
    data: str | Path,
    source: Source,
    reading: Reading | None,
    split: str | None,
    label_column: str | None,
    group_column: str | None,
) -> dict[str, Any]:
    """How to open the pictures again. The path stays in the index folder, on this machine."""
    spec = str(data)
    local = spec not in GENERATED and generated_name(spec) is None and "://" not in spec
    return {
        "spec": str(Path(spec).absolute()) if local else spec,
        "name": source.name,
        "split": split,
        "label_column": label_column,
        "group_column": group_column,
        **({} if reading is None else {"reading": reading}),
    }


def _expanded(pictures: Sequence[Picture]) -> list[tuple[str, Picture]]:
    """Each picture with a name for messages; a folder stands for the pictures in it."""
    found: list[tuple[str, Picture]] = []
    for picture in pictures:
        if isinstance(picture, str | Path) and Path(picture).is_dir():
            source = open_source(str(picture))
            found += [(f"{picture}/{name}", Path(picture) / name) for name in source.index.names]
        else:
            named = isinstance(picture, str | Path)
            found.append((str(picture) if named else "the picture", picture))
    if len(found) > MAX_QUERY_PICTURES:
        raise UsageError(
            f"{len(found):,} pictures ask; {MAX_QUERY_PICTURES:,} at most can. Use `mocokit embed` for all."
        )
    return found
