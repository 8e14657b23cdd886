"""The named recipes: the papers' values, what they adapt to, what they say of it, and the verb that prints them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mocokit import named_recipes, recipe_sheet
from mocokit.cli import main
from mocokit.config import assemble, read_yaml
from mocokit.contrast.encoders import EncoderPair, build_encoder, build_predictor
from mocokit.errors import UsageError
from mocokit.options import PretrainOptions
from mocokit.recipes import RECIPES, DataFacts, default_queue_size, is_vit, recipe_notes
from mocokit.training.settings import RunConfig

ROOT = Path(__file__).parent.parent
METHODS = ("moco-v1", "moco-v2", "moco-v3", "simclr", "byol")


def made(name: str, images: int = 1_281_167, size: int = 224, text: Path | None = None, **flags: Any) -> RunConfig:
    return assemble(
        "photos",
        PretrainOptions(recipe=name, **flags),
        read_yaml(text) if text else {},
        images=images,
        native_side=size,
        side_for=lambda side: side,
        split=None,
        index_hash="x",
    )


def test_every_method_has_every_setting() -> None:
    expected = {"small", "digits", "moving-shapes", "moco-v3-vit"}
    expected |= {method + suffix for method in METHODS for suffix in ("", "-cifar", "-small", "-medical")}
    assert set(RECIPES) == expected


# ------------------------------------------------------------------------------------- the papers' values

ASYMMETRIC = {"blur": 1.0, "blur_second": 0.1, "solarize": 0.0, "solarize_second": 0.2}
PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "moco-v3": {
        "views": {"crop_area": (0.2, 1.0), "saturation": 0.2, "hue": 0.1, **ASYMMETRIC},
        "encoder": {"head": "mlp-bn-all", "head_layers": 2, "hidden": 4096, "dim": 256, "predictor": "mlp-bn"},
        "contrast": {"method": "moco-v3", "T": 1.0, "m": 0.99, "m_end": 1.0},
        "optim": {"kind": "lars", "lr": 0.3 * 16, "weight_decay": 1e-6, "warmup_epochs": 10, "schedule": "cosine"},
        "train": {"epochs": 300, "batch_size": 4096},
    },
    "moco-v3-vit": {
        "views": {"crop_area": (0.08, 1.0), **ASYMMETRIC},
        "encoder": {
            "backbone": "vit_base_patch16_224", "head": "mlp-bn-all", "head_layers": 3, "hidden": 4096, "dim": 256,
            "predictor": "mlp-bn-all", "freeze_patches": True,
        },
        "contrast": {"method": "moco-v3", "T": 0.2, "m": 0.99, "m_end": 1.0},
        "optim": {"kind": "adamw", "lr": 1.5e-4 * 16, "weight_decay": 0.1, "warmup_epochs": 40},
        "train": {"epochs": 300, "batch_size": 4096},
    },
    "simclr": {
        "views": {"crop_area": (0.08, 1.0), "brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2,
            "jitter": 0.8, "grayscale": 0.2, "blur": 0.5, "blur_second": None},
        "encoder": {"head": "mlp-bn-all", "head_layers": 2, "hidden": None, "dim": 128, "predictor": "none"},
        "contrast": {"method": "simclr", "T": 0.1},
        "optim": {"kind": "lars", "lr": 4.8, "weight_decay": 1e-6, "warmup_epochs": 10},
        "train": {"epochs": 100, "batch_size": 4096},
    },
    "byol": {
        "views": {"crop_area": (0.08, 1.0), "brightness": 0.4, "saturation": 0.2, "hue": 0.1, **ASYMMETRIC},
        "encoder": {"head": "mlp-bn", "head_layers": 2, "hidden": 4096, "dim": 256, "predictor": "mlp-bn"},
        "contrast": {"method": "byol", "m": 0.996, "m_end": 1.0},
        "optim": {"kind": "lars", "lr": 3.2, "weight_decay": 1.5e-6, "warmup_epochs": 10, "schedule": "cosine"},
        "train": {"epochs": 1000, "batch_size": 4096},
    },
    "moco-v1-cifar": {
        "views": {"crop_area": (0.08, 1.0), "blur": 0.0, "hue": 0.1, "jitter": 0.8},
        "encoder": {"backbone": "resnet18", "head": "linear", "dim": 128},
        "contrast": {"K": 4096, "T": 0.1, "m": 0.99, "bn_groups": 8, "symmetric": False},
        "optim": {"kind": "sgd", "lr": 0.06, "weight_decay": 5e-4, "schedule": "cosine"},
        "train": {"epochs": 200, "batch_size": 512},
    },
    "simclr-cifar": {
        "views": {"brightness": 0.4, "hue": 0.1, "blur": 0.0},
        "encoder": {"backbone": "resnet18"},
        "contrast": {"method": "simclr", "T": 0.5},
        "optim": {"kind": "lars", "lr": 2.0, "weight_decay": 1e-6, "warmup_epochs": 10},
        "train": {"epochs": 1000, "batch_size": 512},
    },
}  # fmt: skip
"""As the papers and the authors' releases have them; moco-v1 and moco-v2 are in test_config.py."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_say_what_the_papers_say(name: str) -> None:
    found = made(name).to_dict()
    for section, values in PUBLISHED[name].items():
        plain = json.loads(json.dumps(values))
        for key, value in plain.items():
            expected = pytest.approx(value) if isinstance(value, float) else value
            assert found[section][key] == expected, f"{section}.{key}"


def test_moco_v3_takes_its_other_form_for_a_vit(tmp_path: Path) -> None:
    by_flag = made("moco-v3", backbone="vit_small_patch16_224")
    (tmp_path / "c.yaml").write_text("encoder: {backbone: timm:deit_tiny_patch16_224}")
    by_file = made("moco-v3", text=tmp_path / "c.yaml")
    for config in (by_flag, by_file):
        assert (config.optim.kind, config.encoder.freeze_patches, config.contrast.T) == ("adamw", True, 0.2)
    assert by_flag.encoder.backbone == "vit_small_patch16_224"
    assert made("moco-v3", backbone="resnet50").optim.kind == "lars"
    assert [is_vit(name) for name in (None, "resnet50", "vit_b_16", "torchvision:vit_b_16")] == [0, 0, 1, 1]
    for setting in ("cifar", "small", "medical"):
        config = made(f"moco-v3-{setting}", backbone="vit_tiny_patch16_224")
        assert (config.encoder.backbone, config.optim.kind) == ("vit_tiny_patch16_224", "adamw")
        assert config.optim.lr == pytest.approx(1.5e-4 * config.train.batch_size / 256)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "moco-v3-vit"])
def test_every_recipe_makes_an_encoder_that_can_be_trained(name: str) -> None:
    config = made(name, images=60_000, size=32, backbone="small-cnn-4-6", hidden=None)
    encoder = build_encoder(config.encoder, image_size=32, seed=0)
    predictor = build_predictor(config.encoder, feature_dim=encoder.feature_dim, seed=0)
    pair = EncoderPair(encoder, predictor, momentum=config.contrast.has_momentum)
    assert (predictor is not None) == (config.contrast.method in ("moco-v3", "byol"))
    assert len(pair.trained) >= len(pair.theta_q) > 0


# --------------------------------------------------------------------------------------------- adaptation


def test_small_is_moco_v2_small() -> None:
    for images in (300, 5000, 199_999, 2_000_000):
        one, other = made("small", images, 64), made("moco-v2-small", images, 64)
        assert dataclasses.replace(one, recipe="moco-v2-small") == other
        assert recipe_notes(one) == recipe_notes(other)


@pytest.mark.parametrize(
    ("images", "epochs", "m"), [(300, 100, 0.99), (200_000, 100, 0.99), (400_000, 50, 0.999), (10**7, 20, 0.999)]
)
def test_small_takes_epochs_and_momentum_from_the_number_of_images(images: int, epochs: int, m: float) -> None:
    config = made("moco-v2-small", images)
    assert (config.train.epochs, config.contrast.m, config.contrast.K) == (epochs, m, default_queue_size(images, 256))


@pytest.mark.parametrize("method", METHODS)
def test_medical_views_keep_colours_and_most_of_the_picture(method: str) -> None:
    config, views = made(f"{method}-medical"), made(f"{method}-medical").views
    assert (views.hue, views.saturation, views.grayscale, views.blur, views.solarize) == (0, 0, 0, 0, 0)
    assert views.crop_area is not None
    assert views.crop_area[0] >= 0.5
    assert any("--mask-group" in note for note in recipe_notes(config)) == (method != "byol")


def test_a_recipe_says_what_it_adapted_and_nothing_that_was_set_by_hand() -> None:
    notes = recipe_notes(made("moco-v2-small", 50_000, 32))
    assert "K 8,192: the power of two nearest to an eighth of 50,000 images" in notes
    assert "backbone small-cnn: for views of 32 px; name another freely" in notes
    assert any(note.startswith("epochs 100: ") for note in notes)
    assert any(
        note.startswith("m 0.99: the recipe's queue for 50,000 images, 8,192 keys, is renewed within 32 of")
        for note in notes
    )
    by_hand = recipe_notes(
        made("moco-v2-small", 50_000, 32, queue_size=100, backbone="resnet18", epochs=3, momentum=0.5)
    )
    assert not any(note.startswith(("K ", "backbone ", "epochs ", "m ")) for note in by_hand)
    assert any(note.startswith("K 65,536: the most") for note in recipe_notes(made("moco-v1")))
    assert any(note.startswith("K 1,024: 4 batches of 256") for note in recipe_notes(made("small", 300)))
    assert any("--backbone resnet50" in note for note in recipe_notes(made("moco-v2")))
    assert recipe_notes(dataclasses.replace(made("small"), recipe="somebody's own")) == []


def test_the_learning_rate_is_for_the_recipes_batches_and_that_is_said() -> None:
    for name in RECIPES:
        config = made(name, 60_000, batch_size=64)
        usual = RECIPES[name].make(DataFacts(60_000, 224))
        assert config.optim.lr == usual.optim.lr
        said = [note for note in recipe_notes(config) if note.startswith("batch_size ")]
        assert len(said) == (name != "digits")
        if said:
            proportion = usual.optim.lr * 64 / usual.train.batch_size
            assert float(re.findall(r"--lr ([\d.e+-]+)$", said[0])[0]) == pytest.approx(proportion, rel=1e-2)
        assert not any(note.startswith("batch_size") for note in recipe_notes(made(name, 60_000)))
    notes = recipe_notes(made("simclr"))
    assert "lr 4.8: 0.3 for every 256 images of the recipe's batches of 4,096; --batch-size leaves it as it is" in notes


def test_notes_change_no_digest_and_are_those_of_the_recipe() -> None:
    for name, recipe in RECIPES.items():
        found = recipe.make(recipe.usual)
        config = made(name, recipe.usual.images, recipe.usual.image_size)
        assert set(found.notes) <= set(recipe_notes(config)), name
        assert not any(note in json.dumps(config.to_dict()) for note in found.notes)


# ----------------------------------------------------------------------------------------------- the verb


@pytest.mark.parametrize("name", RECIPES)
def test_the_printed_yaml_is_the_recipe(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = RECIPES[name].usual
    assert main(["recipes", name]) == 0
    text = capsys.readouterr().out
    assert f"# For {facts.images:,} images at {facts.image_size} px" in text
    path = tmp_path / "c.yaml"
    path.write_text(text)
    plain = made(name, facts.images, facts.image_size)
    again = assemble(
        "photos", PretrainOptions(), read_yaml(path), images=facts.images, native_side=500,
        side_for=lambda side: side, split=None, index_hash="x",
    )  # fmt: skip
    assert dataclasses.replace(again, data=plain.data) == plain
    assert not {"mean", "std"} & read_yaml(path)["views"].keys()  # else they would not be measured on the data


def test_the_sheet_is_fitted_to_the_facts_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipes", "moco-v2", "--images", "50000", "--image-size", "64", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["image_size"], found["sections"]["contrast"]["K"]) == (50_000, 64, 8192)
    assert found["sections"]["views"]["size"] == 64
    assert "trust" not in found["sections"]["optim"]
    assert "K" not in recipe_sheet("byol").sections()["contrast"]
    assert recipe_sheet("moco-v3", backbone="vit_small_patch16_224").row["published"].startswith("76.7 %")


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["recipes"]
    assert rows == named_recipes()
    assert [row["name"] for row in rows] == list(RECIPES)
    for row in rows:
        assert re.search(rf"(?m)^{row['name']} +{row['method']} +{row['setting']} +", lines)
        assert row["published"] in lines


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["moco-v22"], "No recipe is called 'moco-v22'. Did you mean 'moco-v2'?"),
        (["byol", "--images", "100"], "byol trains with batches of 4,096: --images must be at least that. Got 100."),
        (["byol", "--images", "0"], "--images must be at least 1. Got 0."),
        (["byol", "--image-size", "4"], "must be a whole number from 8 to 2048 pixels. Got 4."),
        (["--images", "5000"], "--images has no effect on the list. Name a recipe"),
        (["--backbone", "resnet18"], "--backbone has no effect on the list"),
        (["small", "--images", "1.5"], "must be a whole number"),
    ],
)
def test_mistakes(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_an_unknown_recipe_from_python() -> None:
    with pytest.raises(UsageError, match="mocokit recipes"):
        recipe_sheet("simcrl")


# ----------------------------------------------------------------------------------------------- the page


def table() -> list[str]:
    """The table of docs/recipes.md, from the recipes themselves."""
    rows = [
        "| recipe | epochs | batch | optimiser, lr, weight decay | warm-up, schedule | T | m | K | head, predictor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, recipe in RECIPES.items():
        facts = recipe.usual
        c = made(name, facts.images, facts.image_size)
        contrast, optim, encoder = c.contrast, c.optim, c.encoder
        m = f"{contrast.m:g}" + (f" to {contrast.m_end:g}" if contrast.m_end is not None else "")
        head = encoder.head + (f" x{encoder.head_layers}" if encoder.head != "linear" else "")
        head += f" {encoder.hidden or 'h'}-{encoder.dim}" if encoder.head != "linear" else f" {encoder.dim}"
        rows.append(
            f"| `{name}` | {c.train.epochs:,} | {c.train.batch_size:,} "
            f"| {optim.kind}, {optim.lr:g}, {optim.weight_decay:g} | {optim.warmup_epochs:g}, {optim.schedule} "
            f"| {f'{contrast.T:g}' if contrast.uses('T') else '-'} | {m if contrast.uses('m') else '-'} "
            f"| {f'{contrast.K:,}' if contrast.uses('K') else '-'} "
            f"| {head}{'' if encoder.predictor == 'none' else ', ' + encoder.predictor} |"
        )
    return rows


def test_the_page_shows_the_recipes_as_they_are() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    shown = [line for line in page.splitlines() if line.startswith("|")]
    assert shown[: len(table())] == table(), "docs/recipes.md is stale; its table must be:\n" + "\n".join(table())
    for row in named_recipes():
        assert row["published"] in page
