"""A trained encoder to be used: of a pretraining run, or of a fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mocokit import files
from mocokit.contrast.encoders import Encoder, EncoderConfig
from mocokit.data.clips import ClipConfig
from mocokit.data.views import ViewConfig
from mocokit.errors import DamagedError, UsageError
from mocokit.evaluation.tuned_folder import MARKER as TUNED_MARKER
from mocokit.evaluation.tuned_folder import TunedModel, load_tuned
from mocokit.training.run import Run, Which, load_run
from mocokit.training.runfolder import MARKER as RUN_MARKER

Place = str | Path | Run
"""A run, the folder of one, or the folder of a fine-tuning."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Weights, architecture and views; and the run or the fine-tuning that they come from."""

    path: Path
    config: EncoderConfig
    views: ViewConfig
    weights: str
    """SHA-256 of the weights' file."""
    step: int
    """Of pretraining, or optimiser steps of the fine-tuning."""
    run: Run | None
    tuned: TunedModel | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why newer checkpoints were passed over."""
        return self.run.found.passed_over if self.run is not None else ()

    @property
    def clips(self) -> ClipConfig | None:
        """The clips that the encoder reads; None for images."""
        if not self.config.clip:
            return None
        if self.run is not None:
            data = self.run.config.data
            return ClipConfig(frames=data.clip_frames, stride=data.clip_stride)
        assert self.tuned is not None
        return ClipConfig(frames=self.config.clip, stride=int(self.tuned.config["video"]["clip_stride"]))

    def encoder(self, which: Which = "query") -> Encoder:
        """The encoder, float32, in eval mode. A fine-tuned one has no head of its own: its z is h."""
        if self.run is not None:
            return self.run.encoder(which)
        assert self.tuned is not None
        backbone: Any = self.tuned.model.backbone
        width = int(self.tuned.model.centre.numel())
        return Encoder(backbone, nn.Identity(), width, width).eval()

    def refuse(self, what: str) -> UsageError:
        """An error that says what a fine-tuned encoder lacks."""
        return UsageError(f"{self.path} was fine-tuned: it has no {what}. Use readout h, or the pretraining run.")


def is_trained(path: Path) -> bool:
    """Whether the folder is a run's or a fine-tuning's."""
    return (path / RUN_MARKER).is_file() or (path / TUNED_MARKER).is_file()


def open_trained(place: Place | Trained, step: int | None = None) -> Trained:
    """Open a run (its newest checkpoint that verifies, or that of `step`) or a fine-tuning.

    Raises UsageError when the folder is neither, DamagedError when its weights don't verify.
    """
    if isinstance(place, Trained):
        return place
    path = place.path if isinstance(place, Run) else Path(place)
    if not isinstance(place, Run) and (path / TUNED_MARKER).is_file():
        return _open_tuned(path)
    run = place if isinstance(place, Run) else load_run(path, step=step)
    weights = run.found.manifest["files"]["model.safetensors"]["sha256"]
    return Trained(path, run.config.encoder, run.config.views, weights, run.step, run, None)


def _open_tuned(path: Path) -> Trained:
    tuned = load_tuned(path)
    manifest = files.verify_folder(path / "model")
    try:
        config = EncoderConfig(**tuned.config["encoder"])
        step = int(tuned.config["made_by"]["steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{path / 'model'} does not say what it was made by ({error}). Fine-tune again.") from error
    views = ViewConfig(size=tuned.size, mean=tuned.mean, std=tuned.std)
    return Trained(path, config, views, manifest["files"]["model.safetensors"]["sha256"], step, None, tuned)
