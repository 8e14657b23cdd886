"""Weights from elsewhere: what fits is loaded and counted, what doesn't is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from mocokit.contrast.backbones import build_backbone
from mocokit.contrast.encoders import EncoderConfig, build_encoder
from mocokit.errors import DamagedError, DataError, UsageError
from mocokit.evaluation.weights import NamedEncoder, NotHere, open_baseline
from mocokit.training.foreign import load_weights

CONFIG = EncoderConfig(backbone="small-cnn-4-8", dim=4)
VIEWS = {"size": 16, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.2, 0.2)}


def trained() -> dict[str, torch.Tensor]:
    encoder = build_encoder(CONFIG, image_size=16, seed=7)
    encoder.train()
    encoder(torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)))
    return {name: tensor.clone() for name, tensor in encoder.backbone.trunk.state_dict().items()}


@pytest.mark.parametrize("prefix", ["", "query.backbone.trunk.", "backbone.", "module.encoder_q.", "encoder."])
def test_the_usual_prefixes_are_found(tmp_path: Path, prefix: str) -> None:
    weights = trained()
    head = {f"{prefix}fc.weight": torch.zeros(3, 3)}
    save_file({f"{prefix}{name}": tensor for name, tensor in weights.items()} | head, tmp_path / "w.safetensors")
    backbone = build_encoder(CONFIG, image_size=16, seed=0).backbone
    report = load_weights(tmp_path / "w.safetensors", backbone)
    assert (report.share, report.missing, report.unexpected) == (1.0, (), (f"{prefix}fc.weight",))
    assert len(report.loaded) == 10
    assert all(torch.equal(backbone.trunk.state_dict()[name], tensor) for name, tensor in weights.items())


def test_a_file_that_fits_too_little_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    weights = trained()
    path = tmp_path / "part.safetensors"
    save_file({name: tensor for name, tensor in weights.items() if name.startswith("0")}, path)
    backbone = build_encoder(CONFIG, image_size=16, seed=0).backbone
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    with pytest.raises(UsageError, match=r"holds 1 of the backbone's 10 tensors .*--allow-partial.*--backbone"):
        load_weights(path, backbone)
    assert all(torch.equal(backbone.state_dict()[name], tensor) for name, tensor in before.items())
    report = load_weights(path, backbone, allow_partial=True)
    assert report.loaded == ("0.weight",)
    assert len(report.missing) == 9
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(UsageError, match="holds 0 of the backbone's 10"):
        load_weights(path, backbone, allow_partial=True)
    save_file({name: tensor[..., :1].contiguous() for name, tensor in weights.items() if tensor.ndim}, path)
    with pytest.raises(UsageError, match="tensors"):
        load_weights(path, backbone)


@pytest.mark.slow
def test_a_pickle_is_read_in_a_process_of_its_own_or_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": trained()}, tmp_path / "good.pth.tar")
    got = open_baseline(str(tmp_path / "good.pth.tar"), CONFIG, **VIEWS)
    assert isinstance(got, NamedEncoder)
    assert all(torch.equal(got.backbone.trunk.state_dict()[name], tensor) for name, tensor in trained().items())
    (tmp_path / "w.pt").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(DataError, match=r"w\.pt could not be read safely \(it holds more than tensors"):
        open_baseline(f"resnet18={tmp_path / 'w.pt'}", CONFIG, **VIEWS)
    with pytest.raises(UsageError, match=r"good\.pth\.tar holds 0 of .*--baseline NAME="):
        open_baseline(f"resnet18={tmp_path / 'good.pth.tar'}", CONFIG, **VIEWS)


def test_files_that_are_not_there_or_broken(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.safetensors are no file"):
        open_baseline(str(tmp_path / "no.safetensors"), CONFIG, **VIEWS)
    with pytest.raises(UsageError, match=r"resnet18 are no file of weights.*timm:NAME"):
        open_baseline("resnet18", CONFIG, **VIEWS)
    (tmp_path / "w.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DamagedError, match=r"w.safetensors is not a readable"):
        open_baseline(str(tmp_path / "w.safetensors"), CONFIG, **VIEWS)


def test_a_file_alone_has_the_runs_architecture_and_views(tmp_path: Path) -> None:
    save_file(trained(), tmp_path / "mine.safetensors")
    got = open_baseline(str(tmp_path / "mine.safetensors"), CONFIG, **VIEWS)
    assert isinstance(got, NamedEncoder)
    assert (got.name, got.size, got.mean, got.std) == ("mine", 16, VIEWS["mean"], VIEWS["std"])
    assert not any(module.training for module in got.backbone.modules())
    x = torch.rand(2, 3, 16, 16)
    expected = build_encoder(CONFIG, image_size=16, seed=0)
    expected.backbone.trunk.load_state_dict(trained())
    torch.testing.assert_close(got.backbone(x), expected.eval().features(x))


def test_a_named_backbone_has_views_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(dict(timm.create_model("resnet10t", pretrained=False).state_dict()), path)
    got = open_baseline(f"timm:resnet10t={path}", CONFIG, **VIEWS)
    assert isinstance(got, NamedEncoder)
    assert got.size == timm.get_pretrained_cfg("resnet10t").input_size[-1]
    assert got.mean == pytest.approx((0.485, 0.456, 0.406))
    assert "timm:resnet10t from w.safetensors" in got.note
    with pytest.raises(UsageError, match="No backbone is called"):
        open_baseline(f"resnot={path}", CONFIG, **VIEWS)
    with pytest.raises(UsageError, match="holds 0 of"):
        open_baseline(f"small-cnn={path}", CONFIG, **VIEWS)


def test_pretrained_weights_come_from_this_machine_or_not_at_all(tmp_path: Path) -> None:
    missing = open_baseline("timm:resnet10t", CONFIG, **VIEWS, cache=tmp_path)
    assert isinstance(missing, NotHere)
    assert "not on this machine" in missing.reason
    facts = timm.get_pretrained_cfg("resnet10t", allow_unregistered=True)
    folder = tmp_path / f"models--{facts.hf_hub_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    torch.manual_seed(3)
    model = timm.create_model("resnet10t", pretrained=False)
    save_file(dict(model.state_dict()), folder / "snapshots" / ("0" * 40) / "model.safetensors")
    got = open_baseline("timm:resnet10t", CONFIG, **VIEWS, cache=tmp_path)
    assert isinstance(got, NamedEncoder)
    x = torch.rand(2, 3, got.size, got.size)
    torch.testing.assert_close(got.backbone(x), model.eval().forward_features(x).mean((2, 3)), atol=1e-5, rtol=1e-4)
    pickled = open_baseline("torchvision:resnet18", CONFIG, **VIEWS, cache=tmp_path)
    assert isinstance(pickled, NotHere)
    assert "pickles" in pickled.reason
    with pytest.raises(UsageError, match="timm has no model 'resnot'"):
        open_baseline("timm:resnot", CONFIG, **VIEWS, cache=tmp_path)


def test_opening_leaves_torchs_generator_alone(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(dict(build_backbone("timm:resnet10t", "standard", 64).trunk.state_dict()), path)
    before = torch.get_rng_state()
    open_baseline(f"timm:resnet10t={path}", CONFIG, **VIEWS)
    assert torch.equal(torch.get_rng_state(), before)
