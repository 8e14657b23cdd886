"""A finished or interrupted run, opened to be read: its configuration and its encoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mocokit.contrast.encoders import Encoder, EncoderConfig, UnknownBackboneError, build_encoder
from mocokit.errors import DamagedError, UsageError, is_out_of_memory
from mocokit.training.checkpoint import Found, find_checkpoint, read_tensors
from mocokit.training.runfolder import RunFolder, open_run
from mocokit.training.settings import RunConfig, from_yaml

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
        """The query or key encoder of the checkpoint, float32, in eval mode."""
        encoder = make_encoder(self.config.encoder, self.config.views.size, self.config.train.seed)
        stored = read_tensors(self.found.path / "model.safetensors")
        prefix = f"{which}."
        mine = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
        try:
            encoder.load_state_dict(mine)
        except RuntimeError as error:
            raise DamagedError(f"{self.found.path} does not fit the run's configuration: {error}") from error
        return encoder.eval()


def load_run(path: Path, *, step: int | None = None) -> Run:
    """Open a run with its newest checkpoint that verifies, or the one of `step`.

    Raises UsageError when the folder is no run, DamagedError when no checkpoint verifies or the named one does not.
    """
    folder = open_run(path)
    return Run(folder, from_yaml(folder.config), find_checkpoint(folder.checkpoints, step))


def make_encoder(config: EncoderConfig, image_size: int, seed: int) -> Encoder:
    """`build_encoder`, with its errors as the command line reports them."""
    try:
        return build_encoder(config, image_size=image_size, seed=seed)
    except UnknownBackboneError as error:
        raise UsageError(str(error)) from error
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        # A network that shrinks its input below one pixel, a transformer whose patches do not fit, and so on.
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"The backbone {config.backbone} can't be built for views of {image_size} px ({reason}). "
            "Choose another --backbone or --image-size."
        ) from error


def pick_device(name: str) -> torch.device:
    """`auto`, or a device by name. Raises UsageError when it is unknown or not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"'{name}' is not a device. Use cpu, cuda or cuda:0.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device on this machine. Use --device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name} is not supported. Use cpu or cuda.")
    return device
