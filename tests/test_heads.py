"""Projection heads, the predictor, and what of an encoder is trained."""

import pytest
import torch
from torch import nn

from mocokit.contrast.encoders import EncoderConfig, EncoderPair, UnknownBackboneError, build_encoder, build_predictor


def layers(module: nn.Module | None) -> list[str]:
    """The layers of an MLP as text: 16>8 a linear layer, +b with bias; bn, bn* without scale and shift."""
    assert module is not None
    found = []
    for layer in [module] if isinstance(module, nn.Linear) else module:  # type: ignore[union-attr]
        if isinstance(layer, nn.Linear):
            found.append(f"{layer.in_features}>{layer.out_features}{'' if layer.bias is None else '+b'}")
        elif isinstance(layer, nn.BatchNorm1d):
            found.append("bn" if layer.affine else "bn*")
        else:
            assert isinstance(layer, nn.ReLU)
            found.append("relu")
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"head": "linear"}, ["16>8+b"]),
        ({}, ["16>16+b", "relu", "16>8+b"]),
        ({"hidden": 32}, ["16>32+b", "relu", "32>8+b"]),
        ({"head": "mlp-bn", "hidden": 32}, ["16>32", "bn", "relu", "32>8+b"]),
        ({"head": "mlp-bn-all"}, ["16>16", "bn", "relu", "16>8", "bn*"]),
        (
            {"head": "mlp-bn-all", "head_layers": 3, "hidden": 4},
            ["16>4", "bn", "relu", "4>4", "bn", "relu", "4>8", "bn*"],
        ),
    ],
)
def test_heads(settings: dict[str, object], expected: list[str]) -> None:
    config = EncoderConfig(backbone="small-cnn-4-16", dim=8, **settings)  # type: ignore[arg-type]
    encoder = build_encoder(config, image_size=8, seed=0)
    assert layers(encoder.head) == expected
    assert encoder(torch.randn(4, 3, 8, 8)).shape == (4, 8)
    assert build_predictor(config, feature_dim=16, seed=0) is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"predictor": "mlp-bn"}, ["8>16", "bn", "relu", "16>8+b"]),
        ({"predictor": "mlp-bn", "hidden": 32}, ["8>32", "bn", "relu", "32>8+b"]),
        ({"predictor": "mlp-bn-all", "hidden": 32, "head": "linear"}, ["8>32", "bn", "relu", "32>8", "bn*"]),
    ],
)
def test_predictors(settings: dict[str, object], expected: list[str]) -> None:
    config = EncoderConfig(backbone="small-cnn-4-16", dim=8, **settings)  # type: ignore[arg-type]
    assert layers(build_predictor(config, feature_dim=16, seed=0)) == expected


def test_the_papers_sizes() -> None:
    """MoCo v3: a 2-layer projector for ResNets, a 3-layer one for ViTs, 4096 wide, 256 out; BYOL: 4096 and 256."""
    v3 = EncoderConfig(backbone="small-cnn-4-16", head="mlp-bn-all", hidden=4096, dim=256, predictor="mlp-bn")
    encoder = build_encoder(v3, image_size=8, seed=0)
    assert layers(encoder.head) == ["16>4096", "bn", "relu", "4096>256", "bn*"]
    predictor = build_predictor(v3, feature_dim=16, seed=0)
    assert layers(predictor) == ["256>4096", "bn", "relu", "4096>256+b"]


def test_the_predictor_is_a_function_of_the_seed_and_not_of_the_encoder() -> None:
    config = EncoderConfig(backbone="small-cnn-4-16", dim=8, predictor="mlp-bn", head="mlp-bn")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, three = (build_predictor(config, feature_dim=16, seed=seed) for seed in (1, 1, 2**63 - 1))
    assert torch.equal(torch.rand(3), expected)
    assert one is not None
    assert two is not None
    assert three is not None
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(three.parameters()))


def test_the_pair_predicts_on_the_query_side_only() -> None:
    config = EncoderConfig(backbone="small-cnn-4-16", dim=8, predictor="mlp-bn")
    encoder = build_encoder(config, image_size=8, seed=0)
    predictor = build_predictor(config, feature_dim=16, seed=0)
    assert predictor is not None
    pair = EncoderPair(encoder, predictor)
    pair.train(False)
    assert not predictor.training
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(pair.predict(x), predictor(encoder(x)))
    assert torch.equal(pair.key(x), encoder(x))
    assert torch.equal(EncoderPair(encoder).predict(x), encoder(x))
    assert list(pair.trained)[: len(pair.theta_q)] == [name for name, _ in encoder.named_parameters()]
    assert list(pair.trained)[len(pair.theta_q) :] == [f"predictor.{name}" for name, _ in predictor.named_parameters()]
    assert list(pair.trained.values())[: len(pair.theta_q)] == pair.theta_q
    pair.train()
    assert predictor.training


def test_one_encoder_without_momentum() -> None:
    encoder = build_encoder(EncoderConfig(backbone="small-cnn-4-16", dim=8), image_size=8, seed=0)
    pair = EncoderPair(encoder, momentum=False)
    assert pair.key is encoder
    assert pair.theta_k == []
    assert len(pair.theta_q) == len(pair.trained) == len(list(encoder.parameters()))
    assert all(p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize(
    ("name", "frozen"),
    [("timm:vit_tiny_patch16_224", "trunk.patch_embed.proj"), ("torchvision:vit_b_32", "trunk.conv_proj")],
)
def test_a_frozen_patch_projection_is_in_neither_half(name: str, frozen: str) -> None:
    encoder = build_encoder(EncoderConfig(backbone=name, dim=8, freeze_patches=True), image_size=32, seed=0)
    still = {n for n, p in encoder.named_parameters() if not p.requires_grad}
    assert still == {f"backbone.{frozen}.weight", f"backbone.{frozen}.bias"}
    pair = EncoderPair(encoder)
    assert len(pair.theta_q) == len(pair.theta_k) == len(list(encoder.parameters())) - 2
    assert not still & set(pair.trained)


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(UnknownBackboneError, match="no patch projection"):
        build_encoder(EncoderConfig(backbone="resnet18", freeze_patches=True), image_size=32, seed=0)
    for bad, words in (
        ({"head": "mlp3"}, "`head`"),
        ({"predictor": "linear"}, "`predictor`"),
        ({"head_layers": 1}, "head: linear"),
        ({"hidden": 1}, "`hidden`"),
        ({"head": "linear", "head_layers": 3}, "no effect"),
        ({"head": "linear", "hidden": 64}, "no effect"),
    ):
        with pytest.raises(ValueError, match=words):
            EncoderConfig(**bad)  # type: ignore[arg-type]
    EncoderConfig(head="linear", hidden=64, predictor="mlp-bn")
