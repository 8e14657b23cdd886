"""Views against Pillow, torchvision and float64 loops; and the same bits for a sample in whatever batch it comes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from mocokit.data import image_ops
from mocokit.data.randomness import hash_words, sample_id, uniform, word
from mocokit.data.views import ViewConfig, draw_parameters, make_views, plain_view, view_recipe
from mocokit.errors import UsageError

RECIPES = ("moco-v1", "moco-v2", "simclr", "byol", "mnist-like")
EVERYTHING = ViewConfig(
    size=17, crop_area=(0.2, 1.0), flip=0.5, rotation=20.0, zoom=(0.8, 1.2), shift=0.1, shear=10.0,
    jitter=0.8, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4,
    grayscale=0.3, blur=0.5, blur_kernel=5, solarize=0.3, blur_second=0.2, solarize_second=0.6, noise=0.1,
)  # fmt: skip


def pictures(count: int, side: int, seed: int = 0) -> tuple[Tensor, Tensor, npt.NDArray[np.int64]]:
    """Canvases with smooth and rough parts, extents of many shapes, ids."""
    rng = np.random.default_rng(seed)
    coarse = torch.from_numpy(rng.random((count, 3, 5, 5)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 1) * 255
    rough = torch.from_numpy(rng.integers(0, 256, (count, 3, side, side)).astype(np.float32))
    mix = torch.from_numpy(rng.random((count, 1, 1, 1)) < 0.5)
    extents = torch.from_numpy(rng.integers(max(1, side // 3), side + 1, (count, 2)))
    ids = np.array([sample_id(f"{seed}/{k}.png") for k in range(count)], np.int64)
    return torch.where(mix, smooth, rough).to(torch.uint8), extents, ids


def floats(count: int, side: int, seed: int = 0) -> Tensor:
    return pictures(count, side, seed)[0].float() / 255


def factors(count: int, low: float, high: float) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).uniform(low, high, count).astype(np.float32))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Geometry


@pytest.mark.parametrize(("side", "size"), [(32, 32), (40, 24), (20, 48), (97, 16), (64, 7)])
def test_crop_resize_is_pillows(side: int, size: int) -> None:
    images, extents, _ = pictures(40, side)
    rng = np.random.default_rng(1)
    height, width = (rng.integers(1, extents[:, k].numpy() + 1) for k in (0, 1))
    corner = [rng.integers(0, extents[:, k].numpy() - length + 1) for k, length in enumerate((height, width))]
    boxes = np.stack([*corner, height, width], 1)
    ours = image_ops.crop_resize(images, boxes, np.zeros(40, np.bool_), size) * 255
    wide = []
    for image, (top, left, h, w), result in zip(images, boxes, ours, strict=True):
        box = Image.fromarray(image.permute(1, 2, 0).numpy()).crop((left, top, left + w, top + h))
        pillow = np.asarray(box.resize((size, size), Image.Resampling.BILINEAR), np.float32)
        difference = np.abs(result.permute(1, 2, 0).numpy() - pillow)
        assert difference.max() <= 1.001
        if h <= w:  # every version of Pillow does the rows first
            wide.append((difference > 0.001).mean())
    assert np.mean(wide) < 0.01


def test_a_flip_is_the_mirror_image_to_the_bit() -> None:
    images, extents, ids = pictures(12, 30)
    boxes = draw_parameters(EVERYTHING, extents.numpy(), ids, seed=0, epoch=0, views=(0,)).boxes
    straight = image_ops.crop_resize(images, boxes, np.zeros(12, np.bool_), 17)
    assert same_bits(straight.flip(3), image_ops.crop_resize(images, boxes, np.ones(12, np.bool_), 17))


def test_several_boxes_of_each_picture() -> None:
    images, extents, ids = pictures(5, 30)
    boxes = draw_parameters(EVERYTHING, extents.numpy(), ids, seed=0, epoch=0, views=(0, 1, 2)).boxes
    together = image_ops.crop_resize(images, boxes, np.zeros(15, np.bool_), 9)
    alone = [image_ops.crop_resize(images, part, np.zeros(5, np.bool_), 9) for part in np.split(boxes, 3)]
    assert same_bits(together, torch.cat(alone))


@pytest.mark.parametrize("config", [EVERYTHING, ViewConfig(size=17)])
def test_nothing_outside_the_extent_is_read(config: ViewConfig) -> None:
    images, extents, ids = pictures(30, 24)
    outside = torch.arange(24) >= extents[:, :, None]
    outside = outside[:, 0, :, None] | outside[:, 1, None, :]
    blackened = images.masked_fill(outside[:, None], 0)
    assert not torch.equal(images, blackened)
    for a, b in zip(*(make_views(config, x, extents, ids, seed=1, epoch=2) for x in (images, blackened)), strict=True):
        assert same_bits(a, b)


def affine_loop(picture: npt.NDArray[np.float64], inverse: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Bilinear resampling with black outside, one pixel at a time in float64."""
    side = picture.shape[1]
    out = np.zeros_like(picture)
    for row in range(side):
        for column in range(side):
            x, y = inverse @ [column - (side - 1) / 2, row - (side - 1) / 2, 1] + (side - 1) / 2
            for r in (math.floor(y), math.floor(y) + 1):
                for c in (math.floor(x), math.floor(x) + 1):
                    if 0 <= r < side and 0 <= c < side:
                        out[:, row, column] += picture[:, r, c] * (1 - abs(y - r)) * (1 - abs(x - c))
    return out


def test_affine_is_the_float64_loop_and_torchvisions() -> None:
    x, rng = floats(12, 13), np.random.default_rng(5)
    rotation, zoom, shear = rng.uniform(-180, 180, 12), rng.uniform(0.5, 2, 12), rng.uniform(-30, 30, 12)
    shift = rng.uniform(-4, 4, (12, 2))
    inverse = image_ops.inverse_affine(rotation, zoom, shift, shear)
    ours = image_ops.affine(x, inverse)
    for n in range(12):
        np.testing.assert_allclose(ours[n], affine_loop(x[n].double().numpy(), inverse[n]), atol=2e-5)
        theirs = tv.affine(
            x[n], angle=float(rotation[n]), translate=shift[n].tolist(), scale=float(zoom[n]),
            shear=[float(shear[n]), 0.0], interpolation=InterpolationMode.BILINEAR,
        )  # fmt: skip
        torch.testing.assert_close(ours[n], theirs, atol=2e-4, rtol=0)  # theirs computes coordinates in float32


# Colour, blur, noise

COLOUR: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Any, float], Any], float, float]] = {
    "brightness": (image_ops.brightness_, tv.adjust_brightness, 0.0, 2.5),
    "contrast": (image_ops.contrast_, tv.adjust_contrast, 0.0, 2.5),
    "saturation": (image_ops.saturation_, tv.adjust_saturation, 0.0, 2.5),
    "hue": (image_ops.hue_, tv.adjust_hue, -0.5, 0.5),
}


@pytest.mark.parametrize("name", COLOUR)
def test_colour_operations_are_torchvisions(name: str) -> None:
    ours, theirs, low, high = COLOUR[name]
    x, factor = floats(50, 19), factors(50, low, high)
    x[:8, 1] = x[:8, 0]  # ties between channels
    x[4:12, 2] = x[4:12, 1]
    x[12] = 0
    factor[-3:] = torch.tensor([low, high, (low + high) / 2])
    expected = torch.stack([theirs(picture, float(f)) for picture, f in zip(x, factor, strict=True)])
    torch.testing.assert_close(ours(x.clone(), factor), expected, atol=1e-5, rtol=0)


def test_luminance_is_torchvisions_grayscale() -> None:
    x = floats(9, 19)
    torch.testing.assert_close(image_ops.luminance(x), tv.rgb_to_grayscale(x), atol=1e-6, rtol=0)


def gaussian_matrix(side: int, sigma: float, kernel: int) -> npt.NDArray[np.float64]:
    """The blur along one axis as a float64 matrix, mirrored at the border."""
    matrix = np.zeros((side, side))
    for offset in range(-(kernel // 2), kernel // 2 + 1):
        for row in range(side):
            column = abs(row + offset)
            matrix[row, min(column, 2 * (side - 1) - column)] += math.exp(-(offset**2) / (2 * sigma**2))
    return matrix / matrix.sum(1, keepdims=True)


@pytest.mark.parametrize("kernel", [1, 3, 9, 23])
def test_blur_is_the_float64_gaussian_and_torchvisions(kernel: int) -> None:
    x, sigma = floats(20, 21), np.random.default_rng(2).uniform(0.1, 3.0, 20)
    ours = image_ops.gaussian_blur(x, sigma, kernel)
    for n in range(20):
        matrix = gaussian_matrix(21, sigma[n], kernel)
        np.testing.assert_allclose(ours[n], matrix @ x[n].double().numpy() @ matrix.T, atol=1e-5)
        torch.testing.assert_close(
            ours[n], tv.gaussian_blur(x[n], [kernel] * 2, [float(sigma[n])] * 2), atol=2e-5, rtol=0
        )


def test_noise_has_the_stated_form_and_moments() -> None:
    key = hash_words(7, np.arange(40, dtype=np.int64))
    added = (image_ops.noise_(torch.full((40, 3, 32, 32), 0.5), key, 0.05) - 0.5) / 0.05
    assert torch.equal(added[:, 0], added[:, 2])
    bits = int(hash_words(int(key[3]), 2 * 32 + 5)[0])
    four = sum((bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    assert float(added[3, 1, 2, 5]) == pytest.approx((four / 65535 - 2) / math.sqrt(1 / 3), abs=2e-4)
    values = added[:, 0].double().numpy().ravel()
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    assert abs(stats.skew(values)) < 0.05
    assert stats.kurtosis(values) == pytest.approx(-0.3, abs=0.06)  # Irwin-Hall of four: -6 / (5 * 4)
    assert torch.equal(image_ops.noise_(torch.ones(1, 3, 8, 8), key[:1], 0.5).clamp(0, 1).max(), torch.tensor(1.0))


# Whole views


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_view_is_the_chain_of_torchvisions_operations(recipe: str) -> None:
    config = replace(view_recipe(recipe, 21), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3), noise=0.0)
    assert config.solarize_second is None or config.solarize_second > 0  # in view 1
    images, extents, ids = pictures(24, 30)
    p = draw_parameters(config, extents.numpy(), ids, seed=4, epoch=5, views=(1,))
    (ours,) = make_views(config, images, extents, ids, seed=4, epoch=5, views=(1,))
    operations = [theirs for _, theirs, _, _ in COLOUR.values()]
    for n in range(24):
        x = image_ops.crop_resize(images[n : n + 1], p.boxes[n : n + 1], p.flip[n : n + 1], 21)
        if recipe == "mnist-like":
            x = image_ops.affine(x, p.inverse[n : n + 1])
        if config.grayscale_first and p.grey[n]:
            x = tv.rgb_to_grayscale(x, 3)
        for number in p.order[n]:
            x = operations[number](x, float(p.colour[n, number])) if number >= 0 else x
        if not config.grayscale_first and p.grey[n]:
            x = tv.rgb_to_grayscale(x, 3)
        if p.sigma[n] > 0:
            x = tv.gaussian_blur(x, [config.blur_kernel] * 2, [float(p.sigma[n])] * 2)
        if p.solarize[n]:
            x = tv.solarize(x, 0.5)
        torch.testing.assert_close(ours[n : n + 1], tv.normalize(x, config.mean, config.std), atol=1e-4, rtol=0)


def test_plain_view_is_pillows_central_square() -> None:
    images, extents, _ = pictures(20, 50)
    views = plain_view(images, extents, size=20, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    assert views.dtype == torch.float32
    for image, (height, width), view in zip(images, extents.tolist(), views, strict=True):
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = Image.fromarray(image.permute(1, 2, 0).numpy()).crop((left, top, left + side, top + side))
        pillow = np.asarray(square.resize((20, 20), Image.Resampling.BILINEAR), np.float32) / 255
        ours = view.permute(1, 2, 0).numpy() * [0.5, 0.6, 0.7] + [0.1, 0.2, 0.3]
        assert np.abs(ours - pillow).max() <= 1.001 / 255


def test_one_size_fits_itself() -> None:
    images, _, _ = pictures(3, 24)
    assert torch.equal(plain_view(images, torch.full((3, 2), 24), size=24, mean=(0, 0, 0), std=(1, 1, 1)), images / 255)


# Bits


@settings(max_examples=25, deadline=None)
@given(
    config=st.sampled_from([*(view_recipe(name, 16) for name in RECIPES), EVERYTHING, replace(EVERYTHING, size=23)]),
    rows=st.one_of(
        st.lists(st.integers(0, 63), min_size=1, max_size=7),
        st.permutations(range(64)),
        st.sampled_from([[k] for k in range(0, 64, 9)]),
    ),
    views=st.sampled_from([(0, 1), (1, 0), (0,), (1,), (0, 1, 2)]),
    n_threads=st.sampled_from([1, 2]),
)
def test_a_samples_bits_do_not_depend_on_its_batch(
    config: ViewConfig, rows: list[int], views: tuple[int, ...], n_threads: int
) -> None:
    images, extents, ids = pictures(64, 20)
    with threads(n_threads):
        whole = make_views(config, images, extents, ids, seed=1, epoch=3, views=(0, 1, 2))
        part = make_views(config, images[rows], extents[rows], ids[rows], seed=1, epoch=3, views=views)
    for view, ours in zip(views, part, strict=True):
        assert same_bits(ours, whole[view][rows])


@pytest.mark.parametrize("size", [64, 224])
def test_bits_of_large_views_in_tiles_of_their_own(size: int) -> None:
    config = replace(EVERYTHING, size=size, blur_kernel=size // 10 // 2 * 2 + 1)
    images, extents, ids = pictures(5, size + 30)
    whole = make_views(config, images, extents, ids, seed=0, epoch=0)
    for n in (0, 3):
        alone = make_views(config, images[n : n + 1], extents[n : n + 1], ids[n : n + 1], seed=0, epoch=0)
        assert same_bits(torch.cat(alone), torch.stack([view[n] for view in whole]))


def test_autocast_around_it_changes_nothing() -> None:
    images, extents, ids = pictures(6, 20)
    plain = torch.cat(make_views(EVERYTHING, images, extents, ids, seed=1, epoch=3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(torch.cat(make_views(EVERYTHING, images, extents, ids, seed=1, epoch=3)), plain)


def test_seed_epoch_view_and_id_decide_and_nothing_else() -> None:
    images, extents, ids = pictures(8, 20)
    config = view_recipe("moco-v2", 16)

    def views(seed: int = 1, epoch: int = 0, which: tuple[int, ...] = (0, 1), ids: Any = ids) -> tuple[Tensor, ...]:
        return make_views(config, images, extents, ids, seed=seed, epoch=epoch, views=which)

    first, second = views()
    assert first.shape == (8, 3, 16, 16)
    assert all(same_bits(a, b) for a, b in zip((first, second), views(), strict=True))
    for other in (second, views(seed=2)[0], views(epoch=1)[0], views(ids=ids + 1)[0]):
        assert all(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert same_bits(views(which=(5,))[0], views(which=(3, 5))[1])


@pytest.mark.parametrize(("recipe", "digest"), [("moco-v1", "90d7821398f6e816"), ("moco-v2", "fa40cce11697e875")])
def test_bits_are_those_of_earlier_versions(recipe: str, digest: str) -> None:
    """Other bits mean that no run saved before resumes exactly: say so in the change log.

    The same on AVX-512, AVX2 and plain kernels: by the rules of image_ops.py there is nothing they could do otherwise.
    """
    images = torch.arange(4 * 3 * 20 * 20, dtype=torch.int64).mul(7919).bitwise_and(255).to(torch.uint8)
    extents = torch.tensor([[20, 20], [13, 20], [20, 9], [11, 12]])
    ids = np.array([sample_id(f"{k}.png") for k in range(4)], np.int64)
    views = make_views(view_recipe(recipe, 16), images.view(4, 3, 20, 20), extents, ids, seed=11, epoch=2)
    assert hashlib.sha256(torch.cat(views).numpy().tobytes()).hexdigest()[:16] == digest


# Parameters


def draws(config: ViewConfig, count: int = 4000, extent: tuple[int, int] = (48, 64)) -> Any:
    ids = np.array([sample_id(str(k)) for k in range(count)], np.int64)
    return draw_parameters(config, np.tile(extent, (count, 1)), ids, seed=0, epoch=0, views=(0, 1))


def assert_uniform(values: npt.NDArray[np.float64], low: float, high: float) -> None:
    assert low <= values.min()
    assert values.max() <= high
    assert stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > 0.001


def test_every_number_is_a_hash_of_seed_name_epoch_id_and_view() -> None:
    config = replace(EVERYTHING, jitter=1.0, blur=1.0, blur_second=None)
    ids = np.array([5, 123456789, 2**62 + 3], np.int64)
    p = draw_parameters(config, np.full((3, 2), 40), ids, seed=9, epoch=4, views=(2, 7))
    for row, (view, identity) in enumerate((view, int(identity)) for view in (2, 7) for identity in ids):

        def u(name: str, view: int = view, identity: int = identity) -> float:
            return float(uniform(9, word(name), 4, identity, view)[0])

        assert p.flip[row] == (u("flip") < 0.5)
        assert p.colour[row, 0] == pytest.approx(0.6 + 0.8 * u("brightness"))
        assert p.colour[row, 3] == pytest.approx(0.8 * u("hue") - 0.4)
        assert p.sigma[row] == pytest.approx(0.1 + 1.9 * u("blur sigma"))
        assert p.solarize[row] == (u("solarize") < (0.6 if view % 2 else 0.3))
        assert p.noise_key[row] == hash_words(9, word("noise"), 4, identity, view)[0]


def crop_by_torchvisions_rule(
    height: int, width: int, area: tuple[float, float], ratio: tuple[float, float], u: Callable[[str], float]
) -> tuple[int, int, int, int]:
    """RandomResizedCrop.get_params in plain Python, with our numbers for its random ones."""
    for attempt in range(10):
        target = height * width * (area[0] + (area[1] - area[0]) * u(f"crop area {attempt}"))
        log = math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * u(f"crop ratio {attempt}")
        w, h = round(math.sqrt(target * math.exp(log))), round(math.sqrt(target / math.exp(log)))
        if 0 < w <= width and 0 < h <= height:
            return int(u("crop top") * (height - h + 1)), int(u("crop left") * (width - w + 1)), h, w
    w, h = width, height
    if width / height < min(ratio):
        h = round(w / min(ratio))
    elif width / height > max(ratio):
        w = round(h * max(ratio))
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("area", [(0.2, 1.0), (0.9, 1.0)])
def test_crop_boxes_follow_torchvisions_rule(area: tuple[float, float]) -> None:
    extents = np.array([[32, 32], [20, 60], [60, 20], [5, 64], [64, 5], [1, 1], [1, 9], [48, 37]] * 12)
    ids = np.arange(len(extents), dtype=np.int64)
    boxes = draw_parameters(replace(EVERYTHING, crop_area=area), extents, ids, seed=3, epoch=1, views=(1,)).boxes
    for n, (height, width) in enumerate(extents.tolist()):
        expected = crop_by_torchvisions_rule(
            height, width, area, (3 / 4, 4 / 3), lambda name, n=n: float(uniform(3, word(name), 1, n, 1)[0])
        )
        assert tuple(boxes[n]) == expected


def test_parameters_have_the_distributions_of_the_papers() -> None:
    p = draws(view_recipe("moco-v2", 224))
    assert p.flip.mean() == pytest.approx(0.5, abs=0.02)
    assert p.grey.mean() == pytest.approx(0.2, abs=0.02)
    assert (p.sigma > 0).mean() == pytest.approx(0.5, abs=0.02)
    assert_uniform(p.sigma[p.sigma > 0], 0.1, 2.0)
    assert (p.order[:, 0] >= 0).mean() == pytest.approx(0.8, abs=0.02)
    for k in range(3):
        assert_uniform(p.colour[:, k], 0.6, 1.4)
    assert_uniform(p.colour[:, 3], -0.1, 0.1)
    jittered = p.order[p.order[:, 0] >= 0]
    orders, counts = np.unique(jittered, axis=0, return_counts=True)
    assert len(orders) == 24
    assert stats.chisquare(counts).pvalue > 0.001
    share = p.boxes[:, 2] * p.boxes[:, 3] / (48 * 64)
    assert 0.19 < share.min() < 0.22
    assert share.max() <= 1
    ratio = p.boxes[:, 3] / p.boxes[:, 2]
    assert 0.7 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 1.4
    assert (p.boxes[:, :2] >= 0).all()
    assert (p.boxes[:, :2] + p.boxes[:, 2:] <= [48, 64]).all()
    pairs = np.stack([p.colour[:, 0], p.colour[:, 1], p.sigma, p.flip, p.boxes[:, 0]])
    off_diagonal = np.corrcoef(pairs)[~np.eye(5, dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.05
    assert abs(np.corrcoef(*p.colour[:, 0].reshape(2, -1))[0, 1]) < 0.05  # the two views of a sample


def test_v1_jitters_always_and_strongly_and_v2_does_not() -> None:
    p = draws(view_recipe("moco-v1", 224))
    assert (p.order >= 0).all()
    assert_uniform(p.colour[:, 3], -0.4, 0.4)
    assert (p.sigma == 0).all()
    assert view_recipe("moco-v1", 224).grayscale_first
    assert not view_recipe("moco-v2", 224).grayscale_first
    assert view_recipe("moco-v2", 224).blur_kernel == 23


def test_byol_blurs_and_solarises_the_two_views_unlike() -> None:
    p = draws(view_recipe("byol", 224))
    first, second = np.split(p.sigma > 0, 2)
    assert first.all()
    assert second.mean() == pytest.approx(0.1, abs=0.02)
    first, second = np.split(p.solarize, 2)
    assert not first.any()
    assert second.mean() == pytest.approx(0.2, abs=0.02)
    assert_uniform(p.colour[:, 2], 0.8, 1.2)


def test_every_second_view_is_like_the_second() -> None:
    seed = 2
    config, extents, ids = view_recipe("byol", 32), np.full((400, 2), 32), np.arange(400)
    p = draw_parameters(config, extents, ids, seed=seed, epoch=0, views=(3, 0, 2, 1))
    shares = [float(part.mean()) for part in np.split(p.sigma > 0, 4)]
    assert (shares[1], shares[2]) == (1.0, 1.0)
    assert max(shares[0], shares[3]) < 0.2
    same = draw_parameters(
        replace(config, blur_second=1.0, solarize_second=0.0), extents, ids, seed=seed, epoch=0, views=(0, 1)
    )
    none = draw_parameters(
        replace(config, blur_second=None, solarize_second=None), extents, ids, seed=seed, epoch=0, views=(0, 1)
    )
    np.testing.assert_array_equal(same.sigma, none.sigma)
    np.testing.assert_array_equal(same.solarize, none.solarize)


def test_mnist_like_neither_flips_nor_crops_nor_colours() -> None:
    config = view_recipe("mnist-like", 24)
    p = draws(config, extent=(24, 24))
    assert not p.flip.any()
    assert not p.grey.any()
    assert (p.boxes == [0, 0, 24, 24]).all()
    assert set(np.unique(p.order)) == {-1, 0, 1}
    grey = pictures(9, 24)[0][:, :1].expand(-1, 3, -1, -1).contiguous()
    views = torch.cat(make_views(config, grey, torch.full((9, 2), 24), np.arange(9), seed=0, epoch=0))
    assert torch.equal(views[:, 0], views[:, 1])
    assert torch.equal(views[:, 0], views[:, 2])


def test_switching_something_off_moves_no_other_number() -> None:
    config = view_recipe("moco-v2", 32)
    full, less = draws(config, 50), draws(replace(config, blur=0.0, hue=0.0, crop_area=(0.5, 1.0)), 50)
    np.testing.assert_array_equal(full.flip, less.flip)
    np.testing.assert_array_equal(full.colour[:, :3], less.colour[:, :3])
    kept = full.order[(full.order >= 0).all(1)]
    np.testing.assert_array_equal(
        kept[kept != 3].reshape(-1, 3), (rest := less.order[(less.order >= 0).any(1)])[rest >= 0].reshape(-1, 3)
    )


# Settings


def test_an_unknown_recipe_suggests_a_near_one() -> None:
    with pytest.raises(UsageError, match=r"no view recipe 'mocov2'.*Did you mean 'moco-v2'\?.*Choose one of: moco-v1"):
        view_recipe("mocov2", 32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 1), ("size", 32.0), ("crop_area", (0.0, 1.0)), ("crop_area", (0.5, 0.2)), ("crop_area", (0.2, 1.5)),
        ("crop_ratio", (0.0, 1.0)), ("crop_ratio", (2.0, 1.0)), ("flip", 1.5), ("flip", float("nan")),
        ("rotation", -1.0), ("zoom", (0.0, 1.0)), ("zoom", (1.0, math.inf)), ("shift", 2.0), ("shear", 90.0),
        ("jitter", -0.1), ("brightness", -0.4), ("contrast", math.inf), ("saturation", float("nan")), ("hue", 0.6),
        ("grayscale", 2.0), ("blur", -1.0), ("blur_sigma", (0.0, 1.0)), ("blur_sigma", (2.0, 1.0)),
        ("blur_kernel", 4), ("blur_kernel", 99), ("blur_kernel", -3), ("noise", -0.1), ("mean", (0.5, 0.5)),
        ("solarize", 1.5), ("blur_second", -0.1), ("solarize_second", math.nan),
        ("mean", (0.5, 0.5, math.nan)), ("std", (0.5, 0.0, 0.5)), ("std", (1.0,)),
    ],
)  # fmt: skip
def test_a_setting_out_of_range_is_named(field: str, value: object) -> None:
    config = view_recipe("moco-v2", 32)
    with pytest.raises(UsageError, match=rf"The view setting {field} is .* must be .*\. Change {field}\."):
        replace(config, **{field: value})  # type: ignore[arg-type]


def test_channel_swap_exchanges_red_and_blue_of_about_the_share_asked_for() -> None:
    pictures = torch.randint(0, 256, (200, 3, 8, 8), dtype=torch.uint8)
    extents, ids = torch.full((200, 2), 8), np.arange(200)
    plain = make_views(ViewConfig(size=8), pictures, extents, ids, seed=0, epoch=0)[0]
    mixed = make_views(ViewConfig(size=8, channel_swap=0.5), pictures, extents, ids, seed=0, epoch=0)[0]
    swapped = (mixed == plain.flip(1)).flatten(1).all(1)
    kept = (mixed == plain).flatten(1).all(1)
    assert bool((swapped | kept).all())
    assert 70 <= int(swapped.sum()) <= 130
