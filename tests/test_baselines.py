from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mocokit.contrast.encoders import Backbone, Encoder, EncoderConfig, build_encoder
from mocokit.data.pixels import PixelStore
from mocokit.data.views import plain_view
from mocokit.errors import DataError
from mocokit.evaluation.baselines import RandomInit, calibrate, flatten_map, pixel_features, random_init_features

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def make_store(images: int, side: int = 20) -> PixelStore:
    rng = np.random.default_rng(0)
    return PixelStore(
        pixels=rng.integers(0, 256, (images, 3, side, side), dtype=np.uint8),
        extents=np.full((images, 2), side, np.int32),
        replaced=np.arange(images),
        skipped=(),
    )


def views(store: PixelStore, rows: np.ndarray, size: int = 16) -> Tensor:
    images, extents = store.batch(rows)
    return plain_view(images, extents, size=size, mean=MEAN, std=STD)


def make_encoder(seed: int) -> Encoder:
    return build_encoder(EncoderConfig(backbone="small-cnn-8-16-24", dim=6), image_size=16, seed=seed)


read = partial(random_init_features, size=16, mean=MEAN, std=STD)


def test_pixels_are_the_plain_view_flattened() -> None:
    store, rows = make_store(11), np.array([10, 3, 4, 5, 6])
    got = pixel_features(store, rows, size=16, mean=MEAN, std=STD, batch=2)
    torch.testing.assert_close(got, views(store, rows).flatten(1))
    assert pixel_features(store, rows, size=224, mean=MEAN, std=STD).shape == (5, 3 * 32 * 32)


def test_random_init_is_a_function_of_the_seed_and_leaves_torch_alone() -> None:
    store, rows, train = make_store(30), np.arange(20, 30), np.arange(20)
    before = torch.random.get_rng_state()
    one = read(make_encoder, store, rows, train, 5, batch=8)
    torch.rand(3)
    same = read(make_encoder, store, rows, train, 5, batch=8)
    other = read(make_encoder, store, rows, train, 6, batch=8)
    torch.random.set_rng_state(before)
    assert torch.equal(one.pooled, same.pooled)
    assert one.flattened is not None
    assert same.flattened is not None
    assert torch.equal(one.flattened, same.flattened)
    assert not torch.equal(one.pooled, other.pooled)
    assert one.pooled.shape == (10, 24)
    assert one.flattened.shape == (10, 24 * 4 * 4)


def test_the_test_images_do_not_touch_the_statistics() -> None:
    store, train = make_store(25), np.arange(20)
    together = read(make_encoder, store, np.arange(20, 25), train, 1)
    alone = torch.cat([read(make_encoder, store, np.array([row]), train, 1).pooled for row in range(20, 25)])
    torch.testing.assert_close(together.pooled, alone, atol=1e-5, rtol=0)


def test_both_readouts_are_those_of_the_encoder() -> None:
    store, rows, train = make_store(30), np.arange(20, 30), np.arange(20)
    built: list[Encoder] = []

    def remember(seed: int) -> Encoder:
        built.append(make_encoder(seed))
        return built[-1]

    got = read(remember, store, rows, train, 2)
    assert not any(module.training for module in built[0].modules())
    with torch.no_grad():
        x = views(store, rows)
        torch.testing.assert_close(got.pooled, built[0].features(x))
        torch.testing.assert_close(got.flattened, built[0].spatial_map(x).flatten(1))


def test_calibrated_batch_norm_has_the_mean_statistics_of_the_batches() -> None:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, momentum=0.3)
    encoder = nn.Sequential(conv, norm, nn.Dropout(0.5))
    norm.running_mean += 7  # whatever was there before must not count
    batches = [torch.randn(6, 3, 8, 8) + shift for shift in (0.0, 1.0, 5.0)]
    calibrate(encoder, iter(batches))
    with torch.no_grad():
        maps = [conv(x) for x in batches]
    torch.testing.assert_close(norm.running_mean, torch.stack([m.mean((0, 2, 3)) for m in maps]).mean(0))
    torch.testing.assert_close(
        norm.running_var, torch.stack([m.transpose(0, 1).flatten(1).var(1) for m in maps]).mean(0)
    )
    assert norm.momentum == 0.3
    assert not any(module.training for module in encoder.modules())


def test_calibration_normalises_the_features_of_a_shifted_data_set() -> None:
    store = make_store(64)
    got = read(make_encoder, store, np.arange(64), np.arange(64), 0, batch=64)
    built = make_encoder(0).eval()
    with torch.no_grad():
        uncalibrated = built.features(views(store, np.arange(64)))
    # The last layer is ReLU of a batch norm: calibrated, its inputs have mean 0 and variance 1 over the data.
    assert float(got.pooled.mean()) == pytest.approx(0.4, abs=0.1)  # E[max(0, N(0, 1))] = 0.399
    assert not torch.allclose(got.pooled, uncalibrated, atol=0.05)


@pytest.mark.parametrize(
    ("shape", "places"),
    [
        ((2, 8, 8, 8), 16),
        ((2, 8, 3, 9), 12),
        ((2, 512, 8, 8), 16),
        ((2, 2048, 8, 8), 4),
        ((1, 9000, 2, 2), 1),
    ],
)
def test_flattened_maps_are_bounded(shape: tuple[int, ...], places: int) -> None:
    x = torch.randn(shape)
    flat = flatten_map(x)
    assert flat.shape == (shape[0], shape[1] * places)
    if shape[2] == shape[3]:  # blocks of equal size: the mean over places stays the mean over space
        torch.testing.assert_close(flat.reshape(*shape[:2], places).mean(2), x.mean((2, 3)))


def test_small_maps_are_flattened_as_they_are() -> None:
    x = torch.randn(3, 8, 4, 2)
    assert torch.equal(flatten_map(x), x.flatten(1))


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def test_a_backbone_without_a_map_has_the_pooled_readout_only() -> None:
    store = make_store(8)

    def build(seed: int) -> Encoder:
        return Encoder(Backbone(Tokens(), spatial=False), nn.Linear(3, 2), 3, 2)

    got = read(build, store, np.arange(8), np.arange(8), 0)
    assert got.flattened is None
    torch.testing.assert_close(got.pooled, views(store, np.arange(8)).mean((2, 3)))


def test_calibration_needs_two_images() -> None:
    with pytest.raises(DataError, match="at least 2"):
        read(make_encoder, make_store(8), np.arange(8), np.arange(1), 0)


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_calibration_works_with_any_batch(batch: int) -> None:
    got: RandomInit = read(make_encoder, make_store(8), np.arange(8), np.arange(7), 0, batch=batch)
    assert torch.isfinite(got.pooled).all()
