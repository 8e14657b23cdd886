"""The verb `export`, and `load`: a trained encoder for use elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mocokit import files
from mocokit.data.blobs import public_name
from mocokit.data.clips import ClipConfig, open_clips
from mocokit.data.pixels import canvas_limit
from mocokit.data.randomness import permutation
from mocokit.data.sources import open_source
from mocokit.data.videos import open_videos
from mocokit.errors import DamagedError, DataError, UsageError, did_you_mean
from mocokit.exporting.formats import Format, export_folder
from mocokit.exporting.loading import FrozenEncoder, freeze
from mocokit.exporting.parity import IMAGES, Parity
from mocokit.exporting.trained import Place, Trained, open_trained
from mocokit.training import runlog
from mocokit.training.run import images_of

KIND = "mocokit export"
SPARE_PICTURES, SPARE_CLIPS = "shapes", "moving-shapes"
"""Generated sets, for the parity check where the run's own pictures are no longer there."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written where, and how close it is to the run."""

    path: Path
    format: str
    files: tuple[str, ...]
    parity: Parity

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "out": str(self.path),
            "format": self.format,
            "files": list(self.files),
            self.parity.what: self.parity.images,
            "source": self.parity.source,
            "difference": self.parity.difference,
            "transform_cosine": self.parity.transform_cosine,
        }


def load(run: Place, *, readout: str = "h", step: int | None = None, device: str = "cpu") -> FrozenEncoder:
    """A run's frozen encoder as a plain torch module: images [N, 3, size, size] -> vectors [N, dim], float32.

    Its `transform(picture)` makes such images from a path, bytes, a Pillow image or uint8 RGB [H, W, 3]. readout: `h`
    (backbone) or `z` (head) of the query encoder, `key-h` or `key-z` of the key encoder. step: of which checkpoint;
    the newest that verifies when None. Raises UsageError, DamagedError.
    """
    return freeze(open_trained(run, step), readout, device)


def export(
    run: Place,
    format: str = "safetensors",
    out: str | Path | None = None,
    *,
    which: Literal["query", "key"] = "query",
    head: bool = False,
    licence: str = "unknown",
    overwrite: bool = False,
    quiet: bool = False,
) -> Exported:
    """Write a run's encoder as a folder that loads without mocokit, after checking that it computes the same.

    format: `safetensors` (weights and a small model.py), `timm`, `torchvision`, `onnx`, `hf` (as a hub lays it out).
    out: RUN/export/FORMAT when None. head: export the projection head too. licence: an identifier for the card.
    overwrite: replace an earlier export. Raises UsageError, MissingDependencyError, DamagedError, StorageError, and
    MocokitError where the exported encoder differs by more than 1e-5 on 32 images.
    """
    if format not in get_args(Format):
        choices = get_args(Format)
        raise UsageError(
            f"--format must be one of {', '.join(choices)}. Got {format!r}.{did_you_mean(format, choices)}"
        )
    opened = open_trained(run)
    progress = runlog.Progress(quiet=quiet)
    for reason in opened.warnings:
        progress.warn(f"passed over a damaged checkpoint: {reason}")
    folder = opened.path / "export" / format if out is None else Path(out)
    _may_write(folder, overwrite)
    pictures, source = _pictures(opened) if opened.clips is None else _clips(opened, opened.clips)
    what = "images" if opened.clips is None else "clips"
    progress.say(f"{format}: step {opened.step} of {opened.path.name}, compared on {len(pictures)} {what} of {source}")
    contents, parity = export_folder(
        opened,
        format,  # type: ignore[arg-type]
        pictures=pictures,
        source=source,
        which=which,
        head=head,
        licence=licence,
    )
    with files.turn(folder.parent):
        _may_write(folder, overwrite)  # another process may have exported to the same place meanwhile
        files.sweep_leftovers(folder)
        if folder.exists():
            files.remove_folder_by_rename(folder)
        files.commit_folder(folder, contents, {"kind": KIND, "step": opened.step})
    return Exported(folder, format, tuple(contents), parity)


def _may_write(folder: Path, overwrite: bool) -> None:
    """Raise UsageError unless `folder` is missing, empty, or an earlier export that may be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        ours = folder.is_dir() and files.verify_folder(folder).get("kind") == KIND
    except DamagedError:
        ours = False
    if not ours:
        raise UsageError(f"{folder} is there and is no unchanged export of mocokit's. Choose another --out.")
    if not overwrite:
        raise UsageError(f"{folder} already holds an export. Replace it with --overwrite or choose another --out.")


def _pictures(trained: Trained) -> tuple[list[npt.NDArray[np.uint8]], str]:
    """32 pictures to compare on: the run's own, chosen by hash, or generated ones where those are gone."""
    if trained.run is None:
        source = open_source(SPARE_PICTURES)
        name = source.name
    else:
        data = trained.run.config.data
        try:
            source = images_of(data)
            name = source.name
        except (UsageError, DataError):
            source = open_source(SPARE_PICTURES)
            name = f"{SPARE_PICTURES} ({public_name(data.spec)} is not there)"
    found: list[npt.NDArray[np.uint8]] = []
    for row in permutation(0, 0, source.index.ids)[: 4 * IMAGES].tolist():
        try:
            found.append(source.read(row))
        except DataError:
            continue  # unreadable pictures were counted and named by the run
        if len(found) == IMAGES:
            break
    if not found:
        raise DataError(f"None of the pictures of {name} can be read, so nothing can be compared. Check the files.")
    return found, name


def _clips(trained: Trained, config: ClipConfig) -> tuple[list[npt.NDArray[np.uint8]], str]:
    """32 clips [T, H, W, 3] to compare on, chosen and fallen back on like `_pictures`."""
    source, name = None, SPARE_CLIPS
    if trained.run is not None:
        data = trained.run.config.data
        try:
            videos = open_videos(data.spec, split=data.split, label_column=data.label_column, workers=2)
            source, name = open_clips(videos, config), videos.name
        except (UsageError, DataError):
            name = f"{SPARE_CLIPS} ({public_name(data.spec)} is not there)"
    source = source or open_clips(open_videos(SPARE_CLIPS), config)
    limit, found = canvas_limit(trained.views.size), []
    for row in permutation(0, 0, source.index.ids)[: 4 * IMAGES].tolist():
        try:
            found.append(source.read(row, limit))
        except DataError:
            continue  # a clip with a frame that does not decode was counted and named by the run
        if len(found) == IMAGES:
            break
    if not found:
        raise DataError(f"None of the clips of {name} can be read, so nothing can be compared. Check the files.")
    return found, name
