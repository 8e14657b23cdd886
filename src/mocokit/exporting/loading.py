"""A trained encoder as a plain module with its transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn

from mocokit.data.decode import DecodeLimits, decode, to_rgb
from mocokit.data.pixels import canvas_limit, fit_picture
from mocokit.data.views import ViewConfig, plain_view
from mocokit.errors import DataError, UsageError, did_you_mean
from mocokit.exporting.trained import Place, Trained, open_trained

Readout = Literal["h", "z", "key-h", "key-z"]
Picture = str | Path | bytes | Image.Image | npt.NDArray[np.uint8]


class FrozenEncoder(nn.Module):
    """Images float32 [N, 3, size, size] to vectors float32 [N, `dim`], with the `transform` that makes such images.

    With `clip` = T frames its inputs are clips [N, 3, T, size, size], and `transform_clip` makes them. In eval mode,
    without gradients to its weights; otherwise an ordinary module.
    """

    def __init__(self, encoder: nn.Module, views: ViewConfig, readout: Readout, dim: int, clip: int = 0) -> None:
        super().__init__()
        self.encoder = encoder
        self.readout = readout
        self.views = views
        self.dim = dim
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        """h [N, H] or z [N, D], as `readout` says; not normalised."""
        forward: Callable[[Tensor], Tensor] = self.encoder.features if self.readout.endswith("h") else self.encoder  # type: ignore[assignment]
        return forward(x)

    def transform(self, picture: Picture) -> Tensor:
        """A file's path, its bytes, a Pillow image or uint8 RGB [H, W, 3] -> float32 [3, size, size].

        The same arithmetic as in evaluation, embedding and search. Raises UnreadableImageError (a DataError).
        """
        limit = canvas_limit(self.views.size)
        rgb = fit_picture(as_rgb(picture, limit), limit)
        height, width = rgb.shape[:2]
        canvas = np.zeros((1, 3, limit, limit), np.uint8)
        canvas[0, :, :height, :width] = rgb.transpose(2, 0, 1)
        extents = torch.tensor([[height, width]])
        views = self.views
        return plain_view(torch.from_numpy(canvas), extents, size=views.size, mean=views.mean, std=views.std)[0]

    def transform_clip(self, frames: Sequence[Picture]) -> Tensor:
        """T frames, each as `transform` takes it and all of one size -> float32 [3, T, size, size].

        Raises DataError for another number of frames than the encoder reads, or frames of different sizes.
        """
        if len(frames) != self.clip:
            raise DataError(f"The encoder reads clips of {self.clip} frames. Got {len(frames)}.")
        limit = canvas_limit(self.views.size)
        rgb = [as_rgb(frame, limit) for frame in frames]
        if len({one.shape for one in rgb}) > 1:
            raise DataError(f"The frames of a clip must have one size. Got {sorted({one.shape[:2] for one in rgb})}.")
        return torch.stack([self.transform(one) for one in rgb], 1)


def as_rgb(picture: Picture, fit: int | None = None) -> npt.NDArray[np.uint8]:
    """Any picture as uint8 RGB [H, W, 3]; `fit` as in `decode`. Raises UnreadableImageError, DataError."""
    if isinstance(picture, bytes):
        return decode(picture, fit=fit)
    if isinstance(picture, Image.Image):
        return to_rgb(picture, DecodeLimits().background)
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
            raise DataError(f"A picture must be uint8 [H, W, 3]. Got {picture.dtype} {list(picture.shape)}.")
        return picture
    try:
        data = Path(picture).read_bytes()
    except OSError as error:
        raise DataError(f"{picture} can't be read: {error.strerror}. Check the name.") from error
    return decode(data, fit=fit)


def freeze(place: Place | Trained, readout: str = "h", device: torch.device | str = "cpu") -> FrozenEncoder:
    """The encoder of a run or a fine-tuning as a `FrozenEncoder`.

    Raises UsageError for an unknown readout or one that it lacks, DamagedError.
    """
    if readout not in get_args(Readout):
        choices = get_args(Readout)
        raise UsageError(
            f"readout must be one of {', '.join(choices)}. Got {readout!r}.{did_you_mean(readout, choices)}"
        )
    trained = open_trained(place)
    if trained.run is None and readout != "h":
        raise trained.refuse(f"readout {readout}")
    encoder = trained.encoder("key" if readout.startswith("key-") else "query")
    encoder.requires_grad_(False)
    dim = encoder.feature_dim if readout.endswith("h") else encoder.dim
    module = FrozenEncoder(encoder, trained.views, readout, dim, trained.config.clip)  # type: ignore[arg-type]
    return module.to(device).eval()
