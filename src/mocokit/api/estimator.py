"""Pretraining as a scikit-learn transformer: images in, vectors out, for a Pipeline."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from mocokit import files
from mocokit.api.pretraining import pretrain
from mocokit.data.arrays import picture_reader
from mocokit.data.pixels import canvas_limit, fit_picture
from mocokit.data.sources import ImageSource, open_source
from mocokit.errors import DataError
from mocokit.exporting.loading import FrozenEncoder, freeze
from mocokit.retrieval.encode import encode_pictures, encode_source
from mocokit.training.runlog import read_losses

Images = npt.NDArray[Any] | str | Path
_BATCH = 1024


class MoCoEncoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Learn an encoder without labels by momentum contrast; turn images into vectors.

    Images: an array [S, H, W], [S, H, W, 3] or [S, 3, H, W], uint8 or float in 0..1; or data as `mocokit.pretrain`
    takes them (a folder, a table, the name of a generated set). `y` is ignored: no label enters training.

    Parameters
    ----------
    out : run folder to keep; None trains in a temporary one that is removed afterwards.
    backbone, image_size, epochs, batch_size, queue_size, momentum, temperature, lr : as of `mocokit pretrain`; None is
        the recipe's own choice.
    readout : "h" (backbone), "z" (head), "key-h" or "key-z".
    threads : torch threads of the training; None is torch's choice.
    precision, layout : as of `mocokit pretrain`; "auto" times both choices, which may turn out differently each time.
    random_state : int, decides weights, order and views; None is 0.
    quiet : say nothing on stderr.

    Attributes
    ----------
    encoder_ : the frozen module, with its `transform` for single pictures.
    history_ : float64 [steps], the loss of each step.
    n_features_out_ : width of the vectors.

    Fitting twice with the same parameters and images gives the same bits on one machine.
    """

    def __init__(
        self,
        *,
        out: str | Path | None = None,
        backbone: str | None = None,
        image_size: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        queue_size: int | None = None,
        momentum: float | None = None,
        temperature: float | None = None,
        lr: float | None = None,
        readout: str = "h",
        threads: int | None = None,
        precision: str = "fp32",
        layout: str = "contiguous",
        random_state: int | None = None,
        quiet: bool = True,
    ) -> None:
        self.out = out
        self.backbone = backbone
        self.image_size = image_size
        self.epochs = epochs
        self.batch_size = batch_size
        self.queue_size = queue_size
        self.momentum = momentum
        self.temperature = temperature
        self.lr = lr
        self.readout = readout
        self.threads = threads
        self.precision = precision
        self.layout = layout
        self.random_state = random_state
        self.quiet = quiet

    def fit(self, X: Images, y: object = None) -> Self:
        """Train on the images. Raises what `mocokit.pretrain` raises."""
        names = (
            "backbone",
            "image_size",
            "epochs",
            "batch_size",
            "queue_size",
            "momentum",
            "temperature",
            "lr",
            "threads",
            "precision",
            "layout",
        )
        options = {name: getattr(self, name) for name in names}
        if self.random_state is not None:
            options["seed"] = int(self.random_state)
        with tempfile.TemporaryDirectory(prefix="mocokit-") as place:
            data = _as_data(X, Path(place))
            run = pretrain(data, self.out or Path(place) / "run", quiet=self.quiet, **options)
            self.history_ = np.array([row["loss"] for row in read_losses(run.folder)], np.float64)
            self.encoder_: FrozenEncoder = freeze(run, self.readout)
        self.n_features_out_ = self.encoder_.dim
        return self

    def transform(self, X: Images) -> npt.NDArray[np.float32]:
        """Vectors float32 [S, n_features_out_] of the images, whatever batch they come in. Raises DataError."""
        check_is_fitted(self)
        if not isinstance(X, np.ndarray):
            return encode_source(self.encoder_, _open(X), max_bad=0.0).vectors
        read = picture_reader("X", X)
        side = canvas_limit(self.encoder_.views.size)
        if not len(X):
            raise DataError("X holds no image. Give at least one.")
        parts = [
            encode_pictures(
                self.encoder_,
                [fit_picture(read(row), side) for row in range(start, min(start + _BATCH, len(X)))],
                side,
            )
            for start in range(0, len(X), _BATCH)
        ]
        return np.concatenate(parts)

    def get_feature_names_out(self, input_features: object = None) -> npt.NDArray[np.object_]:
        """`moco0`, `moco1`, ..."""
        check_is_fitted(self)
        return np.array([f"moco{number}" for number in range(self.n_features_out_)], dtype=object)

    def __sklearn_tags__(self) -> Tags:
        tags: Tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        return tags


def _open(X: str | Path) -> ImageSource:
    return open_source(str(X))


def _as_data(X: Images, place: Path) -> str:
    """What `pretrain` reads: the data's own name, or the array as an .npz file."""
    if not isinstance(X, np.ndarray):
        return str(X)
    picture_reader("X", X)  # refuses what is no array of images, before anything is written
    path = place / "images.npz"
    files.write_with(path, lambda temporary: np.savez(temporary, images=X))
    return str(path)
