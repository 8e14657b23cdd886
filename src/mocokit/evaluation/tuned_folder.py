"""The folder of a fine-tuning: its plan, one file for each fitted cell, the curve, and the model that predicts.

finetune.json     the marker: what the folder is a fine-tuning of, and under which plan
cells/NAME.json   what one arm said of the test images at one budget, draw and run; written whole or not at all
curve.json/.csv/.png
model/            model.safetensors, config.json and a manifest: the classifier that `mocokit predict` uses
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
from torch import Tensor

from mocokit import files
from mocokit.contrast.encoders import EncoderConfig
from mocokit.data.views import Triple
from mocokit.errors import DamagedError, UsageError
from mocokit.evaluation.tuning import Classifier
from mocokit.training.checkpoint import read_tensors
from mocokit.training.state import make_encoder

MARKER = "finetune.json"
FORMAT = 1
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """What one fitted classifier said of the I test images, and what was chosen for it."""

    predicted: Ints
    """[I]"""
    confidence: Floats
    """[I] probability of the predicted class, in 0..1."""
    facts: dict[str, Any]
    """lr, steps, held_loss, temperature, labels, held: JSON values."""


@dataclass(frozen=True, slots=True)
class TunedFolder:
    """Paths inside a folder of fine-tuning."""

    path: Path

    @property
    def cells(self) -> Path:
        """One file a cell."""
        return self.path / "cells"

    @property
    def model(self) -> Path:
        """The committed model."""
        return self.path / "model"

    def read_cell(self, name: str, n_test: int) -> Cell | None:
        """A cell that was finished earlier, or None. Raises DamagedError when it is not what was written."""
        path = self.cells / f"{name}.json"
        if not path.exists():
            return None
        stored = files.read_json(path)
        try:
            predicted = np.array(stored["predicted"], np.int64)
            confidence = np.array(stored["confidence"], np.float64)
            facts = dict(stored["facts"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{path} is not a finished cell; it was changed. Remove it to fit it again.") from error
        if predicted.shape != (n_test,) or confidence.shape != (n_test,):
            raise DamagedError(f"{path} is of {predicted.size} test images, not {n_test}. Remove it to fit it again.")
        return Cell(predicted, confidence, facts)

    def write_cell(self, name: str, cell: Cell, model: Classifier | None) -> None:
        """Keep a cell, and its weights first where a model is given."""
        if model is not None:
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in model.state_dict().items()}
            files.write_bytes(self.weights(name), safetensors.torch.save(tensors))
        value = {
            "facts": cell.facts,
            "predicted": cell.predicted.tolist(),
            "confidence": [round(float(one), 6) for one in cell.confidence],
        }
        files.write_text(self.cells / f"{name}.json", files.to_json(value, indent=None))

    def weights(self, name: str) -> Path:
        """The weights of a cell, until the best of them is the model."""
        return self.cells / f"{name}.safetensors"


def claim_tuned(path: Path, plan: Mapping[str, Any]) -> tuple[TunedFolder, files.RunLock]:
    """Make or reopen the folder of a fine-tuning under a plan (JSON values) and lock it.

    Raises UsageError when it holds something else, or a fine-tuning under another plan; LockedError when another
    process is at it; StorageError.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; --out needs a folder.")
    marker = path / MARKER
    if path.is_dir() and not marker.is_file() and not files.only_leftovers(path):
        raise UsageError(f"{path} is not empty and holds no fine-tuning of mocokit's. Choose another --out.")
    files.make_folder(path)
    lock = files.RunLock(path)
    try:
        folder = TunedFolder(path)
        for inside in (path, folder.cells):
            files.sweep_temporaries(inside)
        wanted = {"format": FORMAT, "kind": "mocokit finetune", "plan": dict(plan)}
        if marker.is_file():
            found = files.read_json(marker)
            if differing := _differing(found, wanted):
                raise UsageError(
                    f"{path} holds a fine-tuning under another plan ({differing}). Choose another --out, or repeat the "
                    "command that made it to go on with it."
                )
        else:
            files.write_json(marker, wanted)
        files.make_folder(folder.cells)
    except BaseException:
        lock.release()
        raise
    return folder, lock


def _differing(found: Any, wanted: dict[str, Any]) -> str:
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("plan"), dict):
        return "made by another version of mocokit"
    names = [name for name, value in wanted["plan"].items() if found["plan"].get(name) != value]
    return ", ".join(f"{name}: {found['plan'].get(name)} there, {wanted['plan'][name]} now" for name in names[:3])


# ----------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True, slots=True, eq=False)
class TunedModel:
    """A classifier ready to predict."""

    model: Classifier
    """In eval mode."""
    class_names: tuple[str, ...]
    size: int
    mean: Triple
    std: Triple
    temperature: float
    config: dict[str, Any]
    """All of config.json."""


def commit_model(folder: TunedFolder, name: str, config: Mapping[str, Any]) -> None:
    """Make the weights of a cell the folder's model, whole or not at all; the other cells' weights are removed."""
    weights = folder.weights(name)
    with files.storage_errors(weights, "read"):
        data = weights.read_bytes()
    contents = {"model.safetensors": data, "config.json": files.to_json(dict(config)).encode()}
    if folder.model.exists():
        files.remove_folder_by_rename(folder.model)
    files.commit_folder(folder.model, contents, {"format": FORMAT, "kind": "mocokit classifier"})
    for path in sorted(folder.cells.glob("*.safetensors")):
        files.remove_path(path)


def load_tuned(path: Path) -> TunedModel:
    """Open the model of a fine-tuning (or the `model` folder itself), every byte checked against its manifest.

    Raises UsageError when there is none, DamagedError when it was changed.
    """
    folder = path / "model" if (path / MARKER).is_file() else path
    if not (folder / files.MANIFEST).is_file():
        there = "has no finished model yet; run the same `mocokit finetune` again" if (path / MARKER).is_file() else ""
        raise UsageError(f"{path} {there or 'is no folder made by `mocokit finetune`; name one'}.")
    files.verify_folder(folder)
    config = files.read_json(folder / "config.json")
    try:
        encoder = EncoderConfig(**config["encoder"])
        views = config["views"]
        names = tuple(str(name) for name in config["class_names"])
        size, mean, std = int(views["size"]), tuple(map(float, views["mean"])), tuple(map(float, views["std"]))
        temperature = float(config["temperature"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{folder / 'config.json'} is not a classifier's configuration ({error}).") from error
    backbone = make_encoder(encoder, size, 0).backbone
    tensors = read_tensors(folder / "model.safetensors")
    n_features = int(tensors["centre"].numel()) if "centre" in tensors else 0
    model = Classifier(backbone, n_features, len(names))
    _load(model, tensors, folder)
    return TunedModel(
        model.eval(), names, size, (mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), temperature, config
    )


def _load(model: Classifier, tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise DamagedError(f"{folder} does not fit its own configuration: {error}") from error
