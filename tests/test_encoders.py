import pytest
import torch
from torch import nn

from mocokit.contrast.encoders import EncoderConfig, EncoderPair, UnknownBackboneError, backbone_names, build_encoder


@pytest.mark.parametrize(
    ("name", "side", "features", "map_side"),
    [
        ("small-cnn", 32, 256, 4),
        ("small-cnn-8-16-24", 24, 24, 6),
        ("resnet18", 32, 512, 4),
        ("resnet18", 96, 512, 3),
        ("timm:resnet18", 32, 512, 4),
        ("mobilenet_v3_small", 64, 576, 2),
        ("vit_tiny_patch16_224", 64, 192, None),
    ],
)
def test_backbones_by_name(name: str, side: int, features: int, map_side: int | None) -> None:
    encoder = build_encoder(EncoderConfig(backbone=name), image_size=side, seed=0).eval()
    x = torch.randn(2, 3, side, side)
    h, z = encoder.h_and_z(x)
    assert h.shape == (2, features)
    assert z.shape == (2, 128)
    assert torch.equal(encoder.features(x), h)
    assert torch.equal(encoder(x), z)
    if map_side is None:
        with pytest.raises(ValueError, match="no spatial"):
            encoder.spatial_map(x)
    else:
        assert encoder.spatial_map(x).shape == (2, features, map_side, map_side)
        torch.testing.assert_close(encoder.spatial_map(x).mean((2, 3)), h)


def test_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build_encoder(EncoderConfig(), image_size=32, seed=1)
    assert torch.equal(torch.rand(3), expected)
    second = build_encoder(EncoderConfig(), image_size=32, seed=1)
    third = build_encoder(EncoderConfig(), image_size=32, seed=2)
    same = [torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)]
    assert all(same)
    assert not torch.equal(first.backbone.trunk[0].weight, third.backbone.trunk[0].weight)  # type: ignore[index, union-attr]


def test_small_stem_keeps_the_resolution() -> None:
    small = build_encoder(EncoderConfig(backbone="resnet18", stem="small"), image_size=32, seed=0)
    standard = build_encoder(EncoderConfig(backbone="resnet18", stem="standard"), image_size=32, seed=0)
    x = torch.randn(1, 3, 32, 32)
    assert small.eval().spatial_map(x).shape[-1] == 4
    assert standard.eval().spatial_map(x).shape[-1] == 1


def test_pair_starts_as_a_full_copy_without_gradient() -> None:
    pair = EncoderPair(build_encoder(EncoderConfig(), image_size=32, seed=0))
    assert len(pair.theta_q) == len(pair.theta_k) == len(list(pair.query.parameters()))
    for q, k in zip(pair.theta_q, pair.theta_k, strict=True):
        assert torch.equal(q, k)
        assert q.data_ptr() != k.data_ptr()
        assert q.requires_grad
        assert not k.requires_grad


def test_no_dropout_is_left() -> None:
    encoder = build_encoder(EncoderConfig(backbone="efficientnet_b0"), image_size=64, seed=0)
    assert all(m.p == 0 for m in encoder.modules() if isinstance(m, nn.Dropout))
    encoder.train()
    x = torch.randn(4, 3, 64, 64)
    assert torch.equal(encoder.features(x), encoder.features(x))


def test_bf16_gives_float32_and_keeps_parameters() -> None:
    encoder = build_encoder(EncoderConfig(), image_size=32, seed=0).eval()
    x = torch.randn(4, 3, 32, 32)
    exact = encoder(x)
    encoder.autocast = torch.bfloat16
    rough = encoder(x)
    assert rough.dtype == torch.float32
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet81", "Did you mean 'resnet18'"),
        ("smal-cnn", "Did you mean 'small-cnn'"),
        ("small-cnn-x", "small-cnn-32-64-128"),
        ("small-cnn-0-4", "1 to 4096"),
        ("keras:resnet18", "torchvision: or timm:"),
    ],
)
def test_unknown_names_say_what_to_do(name: str, words: str) -> None:
    with pytest.raises(UnknownBackboneError, match=words):
        build_encoder(EncoderConfig(backbone=name), image_size=32, seed=0)


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(UnknownBackboneError, match="no effect"):
        build_encoder(EncoderConfig(backbone="small-cnn", stem="small"), image_size=32, seed=0)
    with pytest.raises(UnknownBackboneError, match="ResNets"):
        build_encoder(EncoderConfig(backbone="mobilenet_v3_small", stem="small"), image_size=32, seed=0)
    with pytest.raises(ValueError, match="dim"):
        EncoderConfig(dim=1)
    assert "resnet50" in backbone_names()
