"""A finished or interrupted run, opened to be read: its configuration and its encoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mocokit.contrast.encoders import Encoder
from mocokit.data.sources import ImageSource, open_source
from mocokit.errors import DamagedError
from mocokit.training.checkpoint import Found, find_checkpoint, read_tensors
from mocokit.training.runfolder import RunFolder, open_run
from mocokit.training.settings import DataConfig, RunConfig, from_yaml
from mocokit.training.state import make_encoder

Which = Literal["query", "key"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder with its configuration and the checkpoint that would be used."""

    folder: RunFolder
    config: RunConfig
    found: Found

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def samples(self) -> Path:
        """The run's folder of pictures."""
        return self.folder.samples

    @property
    def step(self) -> int:
        """The step of the checkpoint that is used."""
        return int(self.found.manifest["step"])

    def encoder(self, which: Which = "query") -> Encoder:
        """The query or key encoder of the checkpoint, float32, in eval mode. SimCLR has one encoder for both names."""
        encoder = make_encoder(self.config.encoder, self.config.views.size, self.config.train.seed)
        stored = read_tensors(self.found.path / "model.safetensors")
        prefix = f"{which}." if self.config.contrast.has_momentum else "query."
        mine = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
        try:
            encoder.load_state_dict(mine)
        except RuntimeError as error:
            raise DamagedError(f"{self.found.path} does not fit the run's configuration: {error}") from error
        return encoder.eval()


def images_of(data: DataConfig) -> ImageSource:
    """The images that a run's configuration names, as they lie there now. Raises DataError, UsageError."""
    return open_source(
        data.spec,
        split=data.split,
        label_column=data.label_column,
        group_column=data.group_column,
        exclude=data.exclude,
    )


def load_run(path: str | Path, *, step: int | None = None) -> Run:
    """Open a run with its newest checkpoint that verifies, or the one of `step`.

    Raises UsageError when the folder is no run, DamagedError when no checkpoint verifies or the named one does not.
    """
    folder = open_run(Path(path))
    return Run(folder, from_yaml(folder.config), find_checkpoint(folder.checkpoints, step))
