"""Exported encoders, loaded as their cards say, in processes that can't import mocokit; `mocokit.load`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mocokit
from mocokit import files
from mocokit.contrast.encoders import EncoderConfig, build_encoder
from mocokit.data.sources import open_source
from mocokit.data.views import ViewConfig
from mocokit.errors import DataError, MocokitError, UsageError
from mocokit.evaluation.features import extract
from mocokit.evaluation.labelled import open_labelled
from mocokit.exporting import formats, parity, standalone
from mocokit.exporting.blueprint import backbone_tensors, blueprint_of
from mocokit.training.run import Run
from mocokit.training.runfolder import EXPORT_FILES, foreign_files
from tests.toy import OPTIONS, labelled_npz, npz

READER = """
import builtins, sys
blocked = set(sys.argv[1].split(","))
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(name + " is blocked here")
sys.meta_path.insert(0, Blocker())
sys.path.insert(0, ".")
import re, numpy
from PIL import Image
image = Image.open(sys.argv[2])
space = {"image": image, "frames": [image.rotate(90 * t) for t in range(6)]}
for code in re.findall(r"```python\\n(.*?)```", open("README.md").read(), re.S):
    exec(code, space)
assert "mocokit" not in sys.modules
numpy.savez(sys.argv[3], **{name: numpy.asarray(getattr(space[name], "detach", lambda: space[name])())
                            for name in ("h", "z") if name in space})
if "backbone" in space:
    import torch
    print({name: list(out.shape) for name, out in space["backbone"](torch.zeros(1, 3, 64, 64)).items()})
"""


def read_as_a_stranger(folder: Path, image: Path, blocked: str, out: Path) -> tuple[dict[str, Any], str]:
    """h (and z) of a picture by the lines of the card, in a process that imports none of `blocked`."""
    words = [sys.executable, "-c", READER, blocked, str(image), str(out)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(out) as arrays:
        return dict(arrays), done.stdout


def run_with(folder: Path, backbone: str, **options: Any) -> Run:
    """A run of two steps on 16 random pictures."""
    data = npz(folder / "toy.npz", count=16)
    small = {"backbone": backbone, "epochs": 1, "batch_size": 8, "queue_size": 8, **options}
    return mocokit.pretrain(str(data), folder / "run", quiet=True, **(OPTIONS | small))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_with(tmp_path_factory.mktemp("small"), "small-cnn-8-12")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A ResNet with the small stem."""
    return run_with(tmp_path_factory.mktemp("resnet"), "resnet18")


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    pixels = np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize("format", ["safetensors", "hf", "onnx"])
def test_a_small_cnn_loads_without_mocokit(format: str, small: Run, photo: Path, tmp_path: Path) -> None:
    done = mocokit.export(small, format, tmp_path / "out", head=True, quiet=True)
    assert done.parity.images == 16
    assert done.parity.difference < 1e-5
    assert done.parity.transform_cosine > 0.9999
    files.verify_folder(done.path)
    blocked = "mocokit,torchvision,timm" + (",torch,safetensors" if format == "onnx" else "")
    got, _ = read_as_a_stranger(done.path, photo, blocked, tmp_path / "got.npz")
    for name, value in got.items():
        frozen = mocokit.load(small, readout=name)
        expected = frozen(frozen.transform(photo)[None])
        np.testing.assert_allclose(value, expected.numpy(), atol=1e-5)
    assert set(got) == {"h", "z"}


@pytest.mark.parametrize("format", ["torchvision", "timm"])
def test_a_resnet_with_the_small_stem_loads_in_both_libraries(
    format: str, resnet: Run, photo: Path, tmp_path: Path
) -> None:
    done = mocokit.export(resnet, format, tmp_path / "out", head=True, quiet=True)
    got, said = read_as_a_stranger(
        done.path, photo, "mocokit,timm" if format == "torchvision" else "mocokit", tmp_path / "got.npz"
    )
    for name in ("h", "z"):
        frozen = mocokit.load(resnet, readout=name)
        np.testing.assert_allclose(got[name], frozen(frozen.transform(photo)[None]).numpy(), atol=1e-4)
    if format == "torchvision":  # the card's last lines made a feature pyramid for detectors
        assert "'0': [1, 256, 64, 64]" in said


def test_a_standard_resnet_lies_as_timm_reads_a_hub(photo: Path, tmp_path: Path) -> None:
    run = run_with(tmp_path, "timm:resnet18", image_size=72)
    done = mocokit.export(run, "hf", tmp_path / "out", quiet=True)
    config = json.loads((done.path / "config.json").read_text())
    assert (config["architecture"], config["pretrained_cfg"]["input_size"]) == ("resnet18", [3, 72, 72])
    got, _ = read_as_a_stranger(done.path, photo, "mocokit", tmp_path / "got.npz")
    frozen = mocokit.load(run)
    np.testing.assert_allclose(got["h"], frozen(frozen.transform(photo)[None]).numpy(), atol=1e-4)
    torchvision = mocokit.export(run, "torchvision", tmp_path / "tv", quiet=True)
    assert torchvision.parity.difference < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "size"),
    [
        ("mobilenet_v3_small", 64),
        ("squeezenet1_1", 64),
        ("vgg11", 32),
        ("vit_b_32", 64),
        ("timm:vit_tiny_patch16_224", 32),
        ("timm:convnext_atto", 64),
        ("timm:mobilenetv3_small_050", 64),
        ("efficientnet_b0", 32),
    ],
)
def test_every_kind_of_backbone_is_rebuilt_by_its_own_library(backbone: str, size: int) -> None:
    """The oracle is the run's own module; what is compared is rebuilt from encoder.json and the weights' bytes."""
    import safetensors.torch

    config = EncoderConfig(backbone=backbone, dim=8)
    encoder = build_encoder(config, image_size=size, seed=0).eval()
    blueprint = blueprint_of(encoder, config, ViewConfig(size=size))
    facts = json.loads(json.dumps(blueprint.to_dict()))
    weights = safetensors.torch.save(backbone_tensors(encoder, blueprint.backbone))
    backbone_again = standalone.build_backbone(facts["backbone"])
    backbone_again.load_state_dict(safetensors.torch.load(weights))
    again = standalone.Encoder(backbone_again, None).eval()
    x = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = encoder.features(x)
        assert (again(x) - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("head", ["linear", "mlp", "mlp-bn", "mlp-bn-all"])
def test_every_kind_of_head_is_rebuilt(head: Any) -> None:
    config = EncoderConfig(backbone="small-cnn-8", head=head, dim=6)
    encoder = build_encoder(config, image_size=16, seed=1).eval()
    from mocokit.exporting.blueprint import head_tensors

    facts = json.loads(json.dumps(blueprint_of(encoder, config, ViewConfig(size=16)).to_dict()))
    again = standalone.build_head(facts["head"])
    again.load_state_dict(head_tensors(encoder))
    h = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.eval()(h), encoder.head(h))


def test_formats_that_have_no_such_network_say_which_have(small: Run, tmp_path: Path) -> None:
    for format in ("torchvision", "timm"):
        with pytest.raises(UsageError, match="safetensors, hf or onnx"):
            mocokit.export(small, format, tmp_path / "out", quiet=True)
    with pytest.raises(UsageError, match="Did you mean 'onnx'"):
        mocokit.export(small, "onx", tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_when_the_export_differs(
    small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., dict[str, Any]] = formats.backbone_tensors

    def wrong(*arguments: Any) -> dict[str, Any]:
        tensors = original(*arguments)
        tensors["0.weight"][0] += 1e-3
        return tensors

    monkeypatch.setattr(formats, "backbone_tensors", wrong)
    with pytest.raises(MocokitError, match="differs from the run's"):
        mocokit.export(small, "safetensors", tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_an_export_is_replaced_only_when_asked_and_only_if_it_is_one(small: Run, tmp_path: Path) -> None:
    first = mocokit.export(small, "safetensors", quiet=True)
    assert first.path == small.path / "export" / "safetensors"
    assert foreign_files(small.path) == []
    assert {p.name for p in first.path.iterdir()} <= set(EXPORT_FILES)
    with pytest.raises(UsageError, match="--overwrite"):
        mocokit.export(small, "safetensors", quiet=True)
    mocokit.export(small, "safetensors", overwrite=True, quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(UsageError, match="no unchanged export"):
        mocokit.export(small, "safetensors", tmp_path / "mine", overwrite=True, quiet=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_the_card_names_no_folder_and_states_the_licence(small: Run, tmp_path: Path) -> None:
    done = mocokit.export(small, "safetensors", tmp_path / "out", licence="cc-by-4.0", quiet=True)
    card = (done.path / "README.md").read_text("utf-8")
    front = card.split("---")[1]
    assert "license: cc-by-4.0" in front
    assert "pipeline_tag: image-feature-extraction" in front
    for private in (str(tmp_path), str(small.path), str(Path.home()) + "/"):
        assert private not in "".join(p.read_bytes().decode("utf-8", "replace") for p in done.path.iterdir())
    assert re.search(r"16 images of `toy.npz`", card)
    assert "None on record" in card


def test_where_the_pictures_are_gone_generated_ones_are_compared_and_it_is_said(tmp_path: Path) -> None:
    run = run_with(tmp_path, "small-cnn-8")
    (tmp_path / "toy.npz").unlink()
    done = mocokit.export(run, "safetensors", quiet=True)
    assert done.parity.source == "shapes (toy.npz is not there)"
    assert done.parity.images == parity.IMAGES


def test_load_gives_what_the_evaluation_sees(small: Run, tmp_path: Path) -> None:
    data = open_labelled(str(labelled_npz(tmp_path / "labelled.npz", count=12)), size=small.config.views.size)
    views = small.config.views
    rows = np.arange(12)
    found = extract(small.encoder(), data.store, rows, size=views.size, mean=views.mean, std=views.std)
    frozen = mocokit.load(small.path)
    source = open_source(tmp_path / "labelled.npz")
    x = torch.stack([frozen.transform(source.read(row)) for row in rows])
    assert torch.equal(frozen(x), found.h)
    assert torch.equal(mocokit.load(small.path, readout="z")(x), found.z)
    assert not torch.equal(mocokit.load(small.path, readout="key-h")(x), found.h)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    with pytest.raises(UsageError, match="key-h"):
        mocokit.load(small.path, readout="key")


def test_a_transform_takes_pictures_in_any_form(small: Run, photo: Path) -> None:
    frozen = mocokit.load(small)
    pixels = np.asarray(Image.open(photo))
    for form in (photo, str(photo), photo.read_bytes(), Image.open(photo)):
        assert torch.equal(frozen.transform(form), frozen.transform(pixels))
    with pytest.raises(DataError, match="can't be read"):
        frozen.transform("nowhere.png")
    with pytest.raises(DataError, match="uint8"):
        frozen.transform(pixels[:, :, 0])


@pytest.mark.parametrize("shape", [(40, 30), (16, 16), (300, 7), (5, 200)])
def test_the_folders_own_transform_is_within_one_level(shape: tuple[int, int], small: Run) -> None:
    frozen = mocokit.load(small)
    views = small.config.views
    mine = standalone.make_transform(
        {"size": views.size, "canvas": 24, "mean": list(views.mean), "std": list(views.std)}
    )
    pixels = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    level = torch.tensor(views.std)[:, None, None] * 255
    difference = (mine(Image.fromarray(pixels)) - frozen.transform(pixels)) * level
    assert difference.abs().max() <= 1.01
