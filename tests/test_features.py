from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mocokit.contrast.encoders import Backbone, Encoder, EncoderConfig, build_encoder
from mocokit.data.pixels import PixelStore
from mocokit.data.views import plain_view
from mocokit.errors import DivergedError, UsageError
from mocokit.evaluation.features import Features, extract, frozen

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def make_store(images: int, side: int = 20, seed: int = 0) -> PixelStore:
    rng = np.random.default_rng(seed)
    return PixelStore(
        pixels=rng.integers(0, 256, (images, 3, side, side), dtype=np.uint8),
        extents=np.full((images, 2), side, np.int32),
        replaced=np.arange(images),
        skipped=(),
    )


@pytest.fixture
def encoder() -> Encoder:
    one = build_encoder(EncoderConfig(backbone="small-cnn-8-16", dim=6), image_size=16, seed=1)
    one.train()
    for seed in range(3):  # running statistics that differ from the batch's
        one(2 + torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(seed)))
    return one


def read(encoder: Encoder, store: PixelStore, rows: np.ndarray, batch: int) -> Features:
    return extract(encoder, store, rows, size=16, mean=MEAN, std=STD, batch=batch)


def test_an_image_has_the_same_features_in_any_batch_and_none_is_dropped(encoder: Encoder) -> None:
    store, rows = make_store(23), np.arange(22, -1, -1)
    one = read(encoder, store, rows, 1)
    assert one.h.shape == (23, 16)
    assert one.z.shape == (23, 6)
    assert one.h.dtype == one.z.dtype == torch.float32
    for batch in (5, 22, 23, 256):
        many = read(encoder, store, rows, batch)
        torch.testing.assert_close(many.h, one.h, atol=1e-5, rtol=0)
        torch.testing.assert_close(many.z, one.z, atol=1e-5, rtol=0)


def test_equals_a_plain_loop_in_the_order_of_the_rows(encoder: Encoder) -> None:
    store, rows = make_store(9), np.array([8, 0, 3, 3])
    got = read(encoder, store, rows, 3)
    encoder.eval()
    with torch.no_grad():
        images, extents = store.batch(rows)
        h, z = encoder.h_and_z(plain_view(images, extents, size=16, mean=MEAN, std=STD))
    torch.testing.assert_close(got.h, h, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.z, z, atol=1e-5, rtol=0)


def test_modes_come_back_and_nothing_moves(encoder: Encoder) -> None:
    encoder.train()
    bn = next(m for m in encoder.modules() if isinstance(m, nn.BatchNorm2d))
    bn.eval()  # one layer that its owner froze
    modes = [m.training for m in encoder.modules()]
    state = {name: value.clone() for name, value in encoder.state_dict().items()}
    read(encoder, make_store(10), np.arange(10), 4)
    assert [m.training for m in encoder.modules()] == modes
    assert all(torch.equal(state[name], value) for name, value in encoder.state_dict().items())


def test_progress_counts_every_image(encoder: Encoder) -> None:
    seen: list[tuple[int, int]] = []
    extract(
        encoder,
        make_store(10),
        np.arange(10),
        size=16,
        mean=MEAN,
        std=STD,
        batch=4,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(4, 10), (8, 10), (10, 10)]


class StubbornBatchNorm(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> "StubbornBatchNorm":
        return super().train(True)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: StubbornBatchNorm(3), "stays in train mode"),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False), "keeps no running statistics"),
        (Counter, "Evaluation must not move the encoder"),
    ],
)
def test_whatever_is_not_frozen_is_an_error(layer: Callable[[], nn.Module], message: str) -> None:
    encoder = Encoder(Backbone(nn.Sequential(layer(), nn.Conv2d(3, 4, 3)), spatial=True), nn.Linear(4, 2), 4, 2)
    encoder.train()
    with pytest.raises(UsageError, match=message):
        read(encoder, make_store(4), np.arange(4), 2)
    assert encoder.training


def test_instance_norm_is_allowed() -> None:
    with frozen(nn.Sequential(nn.InstanceNorm2d(3))):
        pass


def test_features_that_are_not_finite_are_an_error(encoder: Encoder) -> None:
    with torch.no_grad():
        next(encoder.parameters()).fill_(float("inf"))
    with pytest.raises(DivergedError, match="not finite"):
        read(encoder, make_store(4), np.arange(4), 2)


def test_no_images_is_an_error(encoder: Encoder) -> None:
    with pytest.raises(UsageError, match="0 images"):
        read(encoder, make_store(4), np.zeros(0, np.int64), 2)
