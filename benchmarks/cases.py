"""What is measured: one network, one batch, one queue, one set of pictures for all arms of a case."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from mocokit.contrast.encoders import Encoder, EncoderConfig, build_encoder

SGD_MOMENTUM, WEIGHT_DECAY = 0.9, 1e-4


@dataclass(frozen=True, kw_only=True)
class Case:
    """batch: images a step. K: keys. size: side of a view. images: how many pictures there are, of side `picture`.

    fed: side that the network shrinks its views to, None for none (a mean over areas, the same in every arm).
    drain: untimed steps at the start of a block, so that no arm begins with more views in store than it keeps up.
    jpegs: the pictures are files, about `picture` pixels long. stem: as `EncoderConfig` has it.
    """

    name: str
    backbone: str
    head: str = "mlp"
    dim: int = 128
    size: int = 32
    batch: int = 256
    K: int = 4096
    images: int = 5120
    picture: int = 32
    fed: int | None = None
    drain: int = 5
    jpegs: bool = False
    stem: Literal["auto", "small", "standard"] = "auto"
    T: float = 0.2
    m: float = 0.999
    lr: float = 0.03


CASES = {
    case.name: case
    for case in (
        Case(
            name="tiny", backbone="small-cnn-12-24-24", head="linear", dim=16, size=16, batch=60, K=240,
            images=3000, picture=16, drain=20,
        ),
        Case(name="small", backbone="small-cnn-32-64-128"),
        Case(name="medium", backbone="small-cnn-48-96-192"),
        Case(name="resnet18", backbone="resnet18", batch=32, images=640, drain=1),
        # The usual stem, as for the 224 px of its views: the small one, usual at the 64 px that it is fed, is 15 times
        # the arithmetic and would leave nothing to see of the views.
        Case(
            name="photos", backbone="resnet18", size=224, batch=32, images=320, picture=500, fed=64, drain=4,
            jpegs=True, stem="standard",
        ),
        # speedrun_cifar10.py puts its own pictures in place; T and m are those of the released code's CIFAR notebook.
        Case(name="cifar10", backbone="small-cnn-32-64-128", images=50_000, T=0.1, m=0.99, drain=0),
        # For the tests: over in a second.
        Case(
            name="smoke", backbone="small-cnn-8", head="linear", dim=8, size=16, batch=8, K=32, images=64, picture=16,
            drain=1,
        ),
    )
}  # fmt: skip


def network(case: Case, seed: int) -> Encoder:
    """The case's encoder with its first weights: the same ones in every arm."""
    config = EncoderConfig(backbone=case.backbone, head=case.head, dim=case.dim, stem=case.stem)  # type: ignore[arg-type]
    encoder = build_encoder(config, image_size=case.fed or case.size, seed=seed)
    if case.fed:
        encoder.backbone.trunk = nn.Sequential(nn.AdaptiveAvgPool2d(case.fed), encoder.backbone.trunk)
    return encoder


def first_queue(case: Case, seed: int) -> Tensor:
    """The keys that every arm's queue starts with: random unit rows [K, D]."""
    rows = torch.randn(case.K, case.dim, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=1)


def gate_batch(case: Case) -> tuple[Tensor, Tensor]:
    """Two views of the images that the gate's one step is made on: [N, 3, size, size], N at most 32."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(2, min(case.batch, 32), 3, case.size, case.size, generator=drawn)
    return x[0], x[1]


def pictures(case: Case) -> NDArray[np.uint8]:
    """uint8 [images, picture, picture, 3]: patches of colour with a little noise, so that a JPEG has a usual size."""
    draw = np.random.default_rng(0)
    made = np.empty((case.images, case.picture, case.picture, 3), np.uint8)
    for row in made:
        rough = Image.fromarray(draw.integers(0, 256, (9, 9, 3), np.uint8)).resize((case.picture, case.picture), 3)
        noisy = np.asarray(rough, np.int16) + draw.integers(-12, 13, row.shape, np.int16)
        row[:] = noisy.clip(0, 255)
    return made


def data_of(case: Case, folder: Path) -> Path:
    """The case's pictures in `folder`, made if they are not there: an .npz, or a folder of JPEGs in one sub-folder."""
    target = folder / f"{case.name}-{case.images}-{case.picture}"
    if not case.jpegs:
        target = target.with_suffix(".npz")
        if not target.exists():
            np.savez(target, images=pictures(case))
        return target
    if not target.exists():
        (target / "all").mkdir(parents=True)
        for number, picture in enumerate(pictures(case)):
            wide = Image.fromarray(picture).crop((0, 0, case.picture, case.picture * 3 // 4))
            data = io.BytesIO()
            wide.save(data, "JPEG", quality=90)
            (target / "all" / f"{number:05d}.jpg").write_bytes(data.getvalue())
    return target
