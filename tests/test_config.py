"""Putting a configuration together: recipe, then file, then flags; nothing unknown, nothing without effect."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import yaml

from mocokit.config import _PLACES, assemble, read_yaml, resumed
from mocokit.errors import DamagedError, UsageError
from mocokit.options import PretrainOptions
from mocokit.recipes import RECIPES, auto_recipe, default_queue_size
from mocokit.training.settings import LATER, SECTIONS, RunConfig, fit, from_yaml, shown, to_yaml

OPTIONS = [field.name for field in dataclasses.fields(PretrainOptions)]


class Make(Protocol):
    def __call__(
        self, text: str = "", *, spec: str = "photos", images: int = 5000, side: int = 32, **flags: Any
    ) -> RunConfig: ...


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The configuration for a YAML text and flags."""

    def made(text: str = "", *, spec: str = "photos", images: int = 5000, side: int = 32, **flags: Any) -> RunConfig:
        from_file = {}
        if text:
            (tmp_path / "c.yaml").write_text(text)
            from_file = read_yaml(tmp_path / "c.yaml")
        return assemble(
            spec,
            PretrainOptions(**flags),
            from_file,
            images=images,
            native_side=side,
            side_for=lambda size: size + 8,
            split="train",
            index_hash="cafe",
        )

    return made


# ----------------------------------------------------------------------------------------- what has an effect

GIVEN: dict[str, tuple[Any, Any]] = {
    "recipe": ("moco-v1", "moco-v2"),
    "epochs": (7, 8),
    "batch_size": (32, 64),
    "accumulate": (2, 4),
    "seed": (5, 6),
    "backbone": ("resnet18", "resnet34"),
    "image_size": (40, 48),
    "queue_size": (300, 301),
    "temperature": (0.3, 0.4),
    "momentum": (0.5, 0.6),
    "momentum_end": (0.7, 0.8),
    "order": ("paper", "ema-first"),
    "symmetric": (True, False),
    "bn_groups": (2, 4),
    "shuffle_bn": (True, False),
    "mask_source": (True, False),
    "mask_group": (False, True),
    "queue_init": ("empty", "random"),
    "stem": ("small", "standard"),
    "head": ("mlp", "linear"),
    "head_layers": (3, 4),
    "hidden": (16, 24),
    "dim": (16, 24),
    "predictor": ("mlp-bn", "mlp-bn-all"),
    "freeze_patches": (True, False),
    "split": ("val", "test"),
    "label_column": ("name", "kind"),
    "group_column": ("patient", "product"),
    "views": ("moco-v1", "mnist-like"),
    "crop_min": (0.3, 0.4),
    "blur": (True, False),
    "exclude": ("a.txt", "b.txt"),
    "max_bad": (0.2, 0.3),
    "video": ("frames", "clips"),
    "frame_rate": (2.0, 3.0),
    "clip_frames": (4, 6),
    "clip_stride": (3, 5),
    "clip_speed": (2, 3),
    "max_gap": (0.5, 2.0),
    "optimizer": ("lars", "adamw"),
    "lr": (0.5, 0.6),
    "sgd_momentum": (0.1, 0.2),
    "weight_decay": (0.01, 0.02),
    "schedule": ("step", "constant"),
    "warmup_epochs": (3, 4),
    "device": ("cpu", "cuda"),
    "init": ("a.safetensors", "b.pt"),
    "allow_partial": (True, False),
    "threads": (1, 2),
    "workers": (0, 3),
    "precision": ("bf16", "fp32"),
    "layout": ("contiguous", "channels-last"),
    "compile": ("on", "off"),
    "checkpoint_every": (11, 12),
    "eval_every": (13, 14),
}
"""Two values of each option that no recipe has both of."""
WITH: dict[str, dict[str, Any]] = {"predictor": {"recipe": "byol-small"}}
"""What else must be given for the option to have an effect."""


def test_every_option_is_tried_here() -> None:
    assert set(GIVEN) == set(OPTIONS)
    assert set(_PLACES) == set(OPTIONS) - {"recipe", "image_size", "views", "crop_min", "blur"}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_an_effect(make: Make, name: str) -> None:
    """Two values give two configurations, and where the option has a key of its own it alone differs."""
    one, other = (make(**{name: value}, **WITH.get(name, {})).to_dict() for value in GIVEN[name])
    assert one != other
    if name in _PLACES:
        section, key = _PLACES[name]
        assert (one[section].pop(key), other[section].pop(key)) == GIVEN[name]
        if name == "epochs":  # how often the curve is read follows from it
            del one["train"]["eval_every"], other["train"]["eval_every"]
        if name == "video":  # an encoder of clips is another one
            assert (one["encoder"].pop("clip"), other["encoder"].pop("clip")) == (0, 8)
            for plain in (one, other):  # and their batches are smaller
                del plain["encoder"]["backbone"], plain["contrast"]["K"], plain["optim"]["lr"]
                del plain["train"]["batch_size"], plain["train"]["checkpoint_every"]
        if name == "batch_size":  # so do K's least value and the checkpoints
            for plain in (one, other):
                del plain["contrast"]["K"], plain["train"]["checkpoint_every"]
        assert one == other


@pytest.mark.parametrize("name", [name for name in OPTIONS if name in _PLACES and name != "split"])
def test_a_flag_wins_over_the_file_and_the_file_over_the_recipe(make: Make, name: str) -> None:
    section, key = _PLACES[name]
    in_file, by_flag = GIVEN[name]
    text = yaml.safe_dump({section: {key: in_file}})
    more = WITH.get(name, {})
    assert getattr(getattr(make(text, **more), section), key) == in_file
    assert getattr(getattr(make(text, **{name: by_flag}, **more), section), key) == by_flag


def test_a_batch_of_clips_is_smaller_and_its_learning_rate_with_it(make: Make) -> None:
    pictures, clips = make(recipe="small"), make("data: {video: clips, clip_frames: 16}", recipe="small")
    assert (pictures.train.batch_size, clips.train.batch_size) == (256, 32)
    assert clips.optim.lr == pytest.approx(pictures.optim.lr / 8)
    assert (clips.encoder.clip, clips.contrast.mask_group, pictures.contrast.mask_group) == (16, True, False)
    named = make("data: {video: clips}", recipe="small", batch_size=128, mask_group=False)
    assert (named.train.batch_size, named.optim.lr, named.contrast.mask_group) == (128, pictures.optim.lr, False)
    with pytest.raises(UsageError, match=r"encoder.clip must be 8 here"):
        make("data: {video: clips}\nencoder: {clip: 4}")


def test_flags_without_a_key_of_their_own_win_too(make: Make, tmp_path: Path) -> None:
    text = "recipe: moco-v1\nviews: {size: 48, crop_area: [0.5, 1], blur: 0.3, flip: 0.1}\n"
    plain = make(text)
    assert (plain.recipe, plain.views.size, plain.views.crop_area) == ("moco-v1", 48, (0.5, 1.0))
    assert (plain.views.blur, plain.views.flip, plain.views.hue) == (0.3, 0.1, 0.4)
    assert plain.data.side == 56
    assert make(text, recipe="moco-v2").recipe == "moco-v2"
    sized = make(text, image_size=40)
    assert (sized.views.size, sized.data.side, sized.views.flip) == (40, 48, 0.1)
    assert make(text, crop_min=0.7).views.crop_area == (0.7, 1.0)
    assert make(text, blur=False).views.blur == 0.0
    assert make(text, blur=True).views.blur == 0.3
    assert make("recipe: moco-v1", blur=True).views.blur == 0.5
    named = make(text, views="mnist-like")
    assert (named.views.size, named.views.flip, named.views.crop_area) == (48, 0.0, None)
    whole = to_yaml(make(recipe="moco-v1", image_size=64))
    assert make(whole, views="mnist-like").views.noise == 0.05
    assert make(whole, image_size=32).views.size == 32


def other_values(name: str, value: Any, hint: Any) -> list[Any]:
    """Some values of a key that differ from `value`."""
    special: dict[str, Any] = {
        "views.size": 40, "views.crop_area": [0.4, 0.9], "views.crop_ratio": [0.5, 2], "views.zoom": [0.9, 1.1],
        "views.blur_sigma": [0.5, 1], "views.blur_kernel": 5, "views.mean": [0.1, 0.2, 0.3],
        "views.std": [0.4, 0.5, 0.6],
    }  # fmt: skip
    if name in special:
        return [special[name]]
    found: list[Any] = []
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]:
        if get_origin(kind) is Literal:
            found += get_args(kind)
        else:
            usual: dict[Any, list[Any]] = {bool: [True, False], int: [4, 37], float: [0.0625], str: ["other"]}
            found += usual.get(kind, [])
    return [new for new in found if new != value]


FACTS = {"spec", "split", "images", "index_hash", "exclude_sha256"}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_file_has_an_effect(make: Make, section: str) -> None:
    """The value arrives, or the key is refused with its reason; nothing is passed over."""
    plain = make()
    taken = 0
    for key, hint in get_type_hints(SECTIONS[section]).items():
        before = getattr(getattr(plain, section), key)
        others = other_values(f"{section}.{key}", before, hint)
        assert others, f"no other value is known for {section}.{key}"
        for value in others:
            try:
                found = getattr(getattr(make(yaml.safe_dump({section: {key: value}})), section), key)
            except UsageError:
                continue
            taken += 1
            if section == "data" and key in FACTS:
                assert found == before, "a fact about the data comes from the data"
            else:
                assert json.loads(json.dumps(found)) == value
    assert taken >= len(get_type_hints(SECTIONS[section])) // 2


def test_a_runs_own_config_can_be_used_for_another_run(make: Make) -> None:
    old = make(spec="old", images=900, batch_size=16, mask_source=False, momentum_end=1.0)
    new = make(to_yaml(old), spec="new", images=700)
    assert (new.data.spec, new.data.images, new.data.index_hash) == ("new", 700, "cafe")
    assert dataclasses.replace(new, data=old.data) == old


def test_values_that_only_make_sense_together_are_put_in_together(make: Make) -> None:
    text = "contrast: {mask_group: true}"
    with pytest.raises(UsageError, match="mask_group also masks the same image: it needs mask_source"):
        make(text, mask_source=False)
    loose = make(text, mask_source=False, mask_group=False)
    assert not loose.contrast.mask_source
    assert make("contrast: {mask_source: false}", mask_source=True, mask_group=True).contrast.mask_group
    with pytest.raises(UsageError, match="blur_kernel"):
        make("views: {blur_kernel: 101}")
    assert make("views: {blur_kernel: 101}", image_size=64).views.blur_kernel == 101


# ----------------------------------------------------------------------------------------------------- recipes


def test_recipes_say_what_the_papers_say(make: Make) -> None:
    v1, v2 = make(recipe="moco-v1", images=2_000_000, side=500), make(recipe="moco-v2", images=2_000_000, side=500)
    for one in (v1, v2):
        assert (one.contrast.K, one.contrast.m, one.contrast.m_end, one.encoder.dim) == (65536, 0.999, None, 128)
        assert (one.optim.lr, one.optim.sgd_momentum, one.optim.weight_decay) == (0.03, 0.9, 1e-4)
        assert (one.train.epochs, one.train.batch_size, one.views.size) == (200, 256, 224)
    assert (v1.contrast.T, v1.encoder.head, v1.optim.schedule, v1.views.blur) == (0.07, "linear", "step", 0.0)
    assert (v2.contrast.T, v2.encoder.head, v2.optim.schedule, v2.views.blur) == (0.2, "mlp", "cosine", 0.5)


@pytest.mark.parametrize(
    ("spec", "images", "expected"),
    [("digits", 1100, "digits"), ("moved-digits", 1100, "digits"), ("x", 1100, "small"), ("x", 199_999, "small"),
     ("x", 200_000, "moco-v2"), ("moving-shapes", 600, "moving-shapes"), ("moving-shapes-7", 600, "moving-shapes")],
)  # fmt: skip
def test_what_auto_stands_for(make: Make, spec: str, images: int, expected: str) -> None:
    assert auto_recipe(spec, images) == expected
    assert make(spec=spec, images=images).recipe == make(spec=spec, images=images, recipe="auto").recipe == expected


@pytest.mark.parametrize(
    ("images", "batch", "K"),
    [(1, 2, 8), (100, 8, 32), (1100, 64, 256), (1100, 8, 128), (1455, 8, 256), (5000, 256, 1024), (10_000, 256, 1024),
     (50_000, 256, 8192), (100_000, 256, 16384), (370_000, 256, 32768), (380_000, 256, 65536),
     (1_281_167, 256, 65536), (10**9, 256, 65536), (10**9, 20_000, 65536)],
)  # fmt: skip
def test_the_default_queue_size_is_the_power_of_two_nearest_to_an_eighth(images: int, batch: int, K: int) -> None:
    assert default_queue_size(images, batch) == K


def test_the_data_decide_what_nobody_named(make: Make) -> None:
    found = make(images=5000, side=32)
    assert (found.contrast.K, found.encoder.backbone, found.train.checkpoint_every) == (1024, "small-cnn", 19)
    found = make(images=400_000, side=33)
    assert (found.contrast.K, found.encoder.backbone, found.train.checkpoint_every) == (65536, "resnet18", 500)
    assert make(epochs=5).train.eval_every == 1
    assert make(epochs=90).train.eval_every == 9
    found = make(spec="digits", images=1100, side=8)
    assert (found.contrast.K, found.encoder.backbone) == (256, "small-cnn-32-64-128-128")
    assert make(side=5).views.size == 8
    assert make(side=3000).views.size == 224


@pytest.mark.parametrize(
    ("images", "says"),
    [(1, "There are 1 images.*Add images"), (3, "Add images"), (4, "--batch-size 2 or less"),
     (255, "There are 255 images, fewer than one batch of 256. Use --batch-size 127 or less")],
)  # fmt: skip
def test_fewer_images_than_a_batch(make: Make, images: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(images=images)
    assert make(images=256).train.checkpoint_every == 1


# ------------------------------------------------------------------------------------------ mistakes in a file


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {epoch: 5}", "unknown key 'train.epoch'. Did you mean 'epochs'?"),
        ("contrast: {k: 5}", "unknown key 'contrast.k'."),
        ("optimizer: {lr: 5}", "unknown section 'optimizer'. Did you mean 'optim'?"),
        ("zzz: {}", "unknown section 'zzz'."),
        ("1: {}", "unknown section '1'."),
        ("train: {1: 5}", "unknown key 'train.1'."),
        ("train: {epochs: many}", "train.epochs must be a whole number. Got 'many'."),
        ("train: {epochs: 1.5}", "train.epochs must be a whole number. Got 1.5."),
        ("train: {epochs: true}", "train.epochs must be a whole number. Got True."),
        ("train: {epochs: null}", "train.epochs must be a whole number. Got None."),
        ("train: {epochs: 2024-01-01}", "train.epochs must be a whole number. Got datetime.date(2024, 1, 1)."),
        ("optim: {lr: fast}", "optim.lr must be a number. Got 'fast'."),
        ("optim: {lr: .nan}", "optim.lr must be a number. Got nan."),
        ("optim: {weight_decay: .inf}", "optim.weight_decay must be a number. Got inf."),
        ("optim: {schedule: linear}", "optim.schedule must be one of cosine, step, constant. Got 'linear'."),
        ("contrast: {mask_source: 1}", "contrast.mask_source must be true or false. Got 1."),
        ("contrast: {m_end: []}", "contrast.m_end must be a number or null. Got []."),
        ("views: {zoom: [1]}", "views.zoom must be a list of 2 numbers. Got [1]."),
        ("views: {zoom: [1, x]}", "views.zoom must be a list of 2 numbers. Got [1, 'x']."),
        ("views: {size: big}", "views.size must be a whole number. Got 'big'."),
        ("data: {label_column: 5}", "data.label_column must be text or null. Got 5."),
        ("recipe: [a]", "recipe must be a name. Got ['a']."),
        ("train: 5", "section 'train' must hold keys and values. Got 5."),
        ("[1, 2]", "must hold sections"),
        ("", "must hold sections"),
        ("train: {epochs: 5", "(line 1)"),
        ("train:\n  epochs: 5\n bad", "(line 3)"),
        ("train: {epochs: 5, epochs: 6}", "this mapping has the key 'epochs' twice"),
        ("train: {epochs: 5}\ntrain: {seed: 1}", "this mapping has the key 'train' twice"),
        ("a: &a {epochs: 5}\ntrain: {<<: *a}", "this mapping merges another mapping"),
        ("train: {epochs: !!python/object/apply:os.system ['touch owned']}", "could not determine a constructor"),
        ("train: !!python/name:os.system", "could not determine a constructor"),
        ("? [a, b]\n: 1", "unhashable"),
        ("train: &t {epochs: *t}", "train.epochs must be a whole number. Got {'epochs': {'epochs': {...}}}."),
        ("x: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(str(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Could not read the configuration .*none: No such file"):
        read_yaml(tmp_path / "none")
    with pytest.raises(UsageError, match="Is a directory"):
        read_yaml(tmp_path)
    (tmp_path / "c.yaml").write_bytes(b"train: {epochs: \xff}")
    with pytest.raises(UsageError, match="can't be used"):
        read_yaml(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_bytes(b"x" * 1_000_001)
    with pytest.raises(UsageError, match="larger than 1,000,000 bytes"):
        read_yaml(tmp_path / "c.yaml")


def test_a_small_file_that_describes_an_endless_value_costs_nothing(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    path = tmp_path / "c.yaml"
    path.write_text("train: {epochs: &e [1]}\n" + "\n".join(lines))
    with pytest.raises(UsageError) as caught:
        read_yaml(path)
    assert len(str(caught.value)) < 500
    path.write_text("\n".join(lines).replace("a0: ", "train: {epochs: 1}\nviews: {zoom: ", 1) + "}")
    with pytest.raises(UsageError) as caught:
        read_yaml(path)
    assert len(str(caught.value)) < 2000
    deep: Any = ["x"]
    for _ in range(60):
        deep = [deep] * 9
    assert len(shown(deep)) < 500


def test_nothing_is_expanded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/expanded")
    monkeypatch.setenv("TABLE", "expanded")
    text = "data: {label_column: $TABLE, group_column: ~/x}\nexecution: {device: '${TABLE}'}\n"
    found = make(text, spec="~/photos/$TABLE")
    assert found.data.spec == "~/photos/$TABLE"
    assert (found.data.label_column, found.data.group_column) == ("$TABLE", "~/x")
    assert found.execution.device == "${TABLE}"


def test_numbers_that_yaml_takes_for_text(make: Make) -> None:
    assert yaml.safe_load("x: 1e-4") == {"x": "1e-4"}  # the trap
    found = make("optim: {weight_decay: 1e-4, lr: 1}\nviews: {zoom: [9e-1, 1.1]}")
    assert (found.optim.weight_decay, found.optim.lr, found.views.zoom) == (1e-4, 1.0, (0.9, 1.1))
    assert isinstance(found.optim.lr, float)


# ------------------------------------------------------------------------------------------- mistakes in flags


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"epochs": 0}, "`epochs` must be at least 1. Got 0."),
        ({"batch_size": 1}, "`batch_size` must be at least 2. Got 1."),
        ({"seed": -1}, "`seed` must lie in [0, 2^63). Got -1."),
        ({"workers": -1}, "`workers` must lie in [0, 1024]. Got -1."),
        ({"threads": 0}, "`threads` must lie in [1, 1024]. Got 0."),
        ({"threads": 5000}, "`threads` must lie in [1, 1024]. Got 5000."),
        ({"checkpoint_every": 0}, "`checkpoint_every` must be at least 1. Got 0."),
        ({"eval_every": 0}, "`eval_every` must be at least 1. Got 0."),
        ({"queue_size": 0}, "`K` must be at least 1. Got 0."),
        ({"temperature": 0.0}, "temperature T must be above 0. Got 0.0."),
        ({"momentum": 1.5}, "`m` must lie in [0, 1]. Got 1.5."),
        ({"momentum_end": -0.1}, "`m_end` must lie in [0, 1]. Got -0.1."),
        ({"dim": 1}, "`dim` must be at least 2. Got 1."),
        ({"lr": 0.0}, "`lr` must be above 0. Got 0.0."),
        ({"sgd_momentum": 1.0}, "`sgd_momentum` must lie in [0, 1). Got 1.0."),
        ({"weight_decay": -1.0}, "`weight_decay` must not be negative. Got -1.0."),
        ({"warmup_epochs": -1.0}, "`warmup_epochs` must not be negative. Got -1.0."),
        ({"weight_decay": float("nan")}, "weight_decay must be a number. Got nan."),
        ({"max_bad": 1.5}, "`max_bad` must lie in [0, 1]. Got 1.5."),
        ({"crop_min": 0.0}, "crop_area is (0.0, 1.0)"),
        ({"image_size": 0}, "The image size must be a whole number from 8 to 2048 pixels. Got 0."),
        ({"image_size": 4000}, "Got 4000."),
        ({"recipe": "moco-v33"}, "No recipe is called 'moco-v33'. Did you mean 'moco-v3'? Choose one of: auto, small,"),
        ({"accumulate": 0}, "`accumulate` must divide the batch of 256 into equal parts of at least 2 images. Got 0."),
        ({"accumulate": 3}, "Got 3."),
        ({"accumulate": 256}, "Got 256."),
        ({"accumulate": 64, "bn_groups": 4}, "`bn_groups: 4` needs at least 8 images at once. Got 4."),
        ({"predictor": "mlp-bn"}, "`predictor` has no effect on moco: leave it out. Got mlp-bn."),
        ({"recipe": "byol-small", "temperature": 0.3}, "`T` has no effect on byol: leave it out. Got 0.3."),
        ({"recipe": "simclr-small", "symmetric": True}, "`symmetric` has no effect on simclr"),
        ({"optimizer": "adamw", "sgd_momentum": 0.5}, "`sgd_momentum` has no effect on adamw: leave it out. Got 0.5."),
        ({"recipe": ""}, "No recipe is called ''."),
        ({"views": "moco"}, "There is no view recipe 'moco'."),
        ({"epochs": "abc"}, "epochs must be a whole number. Got 'abc'."),
        ({"epochs": 2.5}, "epochs must be a whole number. Got 2.5."),
        ({"precision": "fp16"}, "precision must be one of auto, fp32, bf16. Got 'fp16'."),
        ({"crop_min": "small"}, "crop_min must be a number. Got 'small'."),
    ],
)
def test_a_bad_value_is_named(make: Make, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        make(**flags)


def test_numpy_numbers_are_numbers(make: Make) -> None:
    found = make(epochs=np.int64(3), lr=np.float32(0.5), temperature=1)
    assert (found.train.epochs, found.optim.lr, found.contrast.T) == (3, 0.5, 1.0)
    assert type(found.train.epochs) is int
    to_yaml(found)


def test_the_recipes_are_those_the_help_names() -> None:
    source = (Path(__file__).parents[1] / "src" / "mocokit" / "options.py").read_text()
    for name, recipe in RECIPES.items():
        suffix = f"-{recipe.setting}"
        for part in [name.removesuffix(suffix), suffix] if name.endswith(suffix) else [name]:
            assert re.search(rf" {part}[,. ]", source), part


def test_a_method_that_the_recipe_is_not_for(make: Make) -> None:
    with pytest.raises(UsageError, match="The recipe is for moco; choose one for byol with --recipe"):
        make("contrast: {method: byol}")


# ------------------------------------------------------------------------------------------------ on the disk


def test_a_configuration_survives_the_disk(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for found in (
        make(),
        make(recipe="moco-v1", momentum_end=1.0, threads=2, split="val", seed=2**63 - 1, lr=1e-7),
        make("views: {crop_area: null, mean: [0.123456, 1e-3, 0.3]}", spec="ünï/код/✓"),
        make(spec="caf\udce9/\x1b[31m:'\"\n- x"),
    ):
        path.write_bytes(to_yaml(found).encode("utf-8", "surrogateescape"))
        again = from_yaml(path)
        assert again == found
        assert again.digest() == found.digest()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("epochs: 100", "epochs: often"),
        lambda text: text.replace("epochs: 100", "epochs: -1"),
        lambda text: text.replace("epochs: 100", "epochs: 100\n  extra: 1"),
        lambda text: text.replace("  seed: 0\n", ""),
        lambda text: text.replace("order: paper", "order: sideways"),
        lambda text: text.replace("recipe:", "recipes:"),
        lambda text: "- " + text.replace("\n", "\n  "),
        lambda text: text + "train: {}\n",
        lambda text: text.replace("order: paper", "order: !!python/name:os.system"),
        lambda text: "\x00" + text,
        lambda text: "views: 5",
    ],
)
def test_a_damaged_configuration_is_refused(make: Make, tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "config.yaml"
    text = to_yaml(make())
    assert damage(text) != text
    path.write_text(damage(text))
    with pytest.raises(DamagedError, match=r"config\.yaml"):
        from_yaml(path)


GOLDEN = Path(__file__).parent / "golden"


def test_a_configuration_from_before_a_key_was_added_is_read_and_has_the_same_digest(
    make: Make, tmp_path: Path
) -> None:
    """golden/ holds what the version before the keys of LATER wrote: a config.yaml, and the digests of recipes."""
    old = from_yaml(GOLDEN / "config.yaml")
    digests = json.loads((GOLDEN / "digests.json").read_text())
    assert old.digest() == digests["small 5000 32"]
    assert old == make(recipe="small", images=5000, side=32, workers=1)  # what it wrote down, the default then
    for key, digest in digests.items():
        name, images, side = key.split()
        assert make(recipe=name, images=int(images), side=int(side)).digest() == digest, key
    (tmp_path / "config.yaml").write_text(to_yaml(old))
    assert from_yaml(tmp_path / "config.yaml") == old


def test_only_keys_that_came_later_may_be_missing(make: Make, tmp_path: Path) -> None:
    """A field that is added must be named in LATER, with a default that means "as before"."""
    before = yaml.safe_load((GOLDEN / "config.yaml").read_text())
    whole = make().to_dict()
    for section in SECTIONS:
        assert set(whole[section]) == set(before[section]) | set(LATER.get(section, ())), section
        for key in whole[section]:
            less = {**whole, section: {k: v for k, v in whole[section].items() if k != key}}
            (tmp_path / "config.yaml").write_text(yaml.safe_dump(less))
            if key in LATER.get(section, ()):
                assert from_yaml(tmp_path / "config.yaml") == make()
            else:
                with pytest.raises(DamagedError, match=f"section '{section}' lacks or adds a key"):
                    from_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section, keys in LATER.items() for key in keys if section != "data"]
)
def test_a_later_key_away_from_its_default_is_in_the_digest(make: Make, section: str, key: str) -> None:
    default = getattr(getattr(make(), section), key)
    value = other_values(f"{section}.{key}", default, get_type_hints(SECTIONS[section])[key])[0]
    changes = {section: {key: value}}
    if key == "clip":
        changes = {"data": {"video": "clips", "clip_frames": value}}
    if key == "trust":
        changes = {section: {key: value, "kind": "lars"}}
        assert make(yaml.safe_dump(changes)).digest() != make(optimizer="lars").digest()
    assert make(yaml.safe_dump(changes)).digest() != make().digest()


def test_a_missing_configuration_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"config\.yaml: No such file"):
        from_yaml(tmp_path / "config.yaml")


def test_the_digest_is_of_what_decides_the_bits(make: Make) -> None:
    base = make()
    free = {"workers", "checkpoint_every", "eval_every", "exclude"}  # the list may move; what is on it may not change
    for name in OPTIONS:
        digests = {make(**{name: value}, **WITH.get(name, {})).digest() for value in GIVEN[name]}
        assert len(digests) == (1 if name in free else 2), name
    assert make(spec="moved to another place").digest() == base.digest()
    assert make(images=6000).digest() != base.digest()
    listed = dataclasses.replace(base.data, exclude="a.txt", exclude_sha256="0" * 64)
    assert dataclasses.replace(base, data=listed).digest() != base.digest()
    reason = dataclasses.replace(base.execution, reason="timed again")
    assert dataclasses.replace(base, execution=reason).digest() == base.digest()


# ---------------------------------------------------------------------------------------------------- resuming


def test_a_resume_takes_the_stored_settings_and_the_free_flags(make: Make) -> None:
    stored = make(batch_size=64, lr=0.3)
    again = resumed(stored, PretrainOptions(workers=4, checkpoint_every=3, eval_every=2, batch_size=64, lr=0.3))
    assert (again.train.workers, again.train.checkpoint_every, again.train.eval_every) == (4, 3, 2)
    assert again.digest() == stored.digest()
    assert resumed(stored, PretrainOptions()) == stored


@pytest.mark.parametrize("name", [n for n in OPTIONS if n not in ("workers", "checkpoint_every", "eval_every")])
def test_a_resume_with_another_setting_is_refused_and_the_same_is_not(make: Make, name: str) -> None:
    one, other = GIVEN[name]
    stored = make(**{name: one}, **WITH.get(name, {}))
    assert resumed(stored, PretrainOptions(**{name: one})) == stored
    with pytest.raises(UsageError, match=f"(?m)^  --{name.replace('_', '-')}: ") as caught:
        resumed(stored, PretrainOptions(**{name: other}))
    assert str(other) in str(caught.value)


def test_a_resume_lists_every_difference(make: Make) -> None:
    stored = make(lr=0.3)
    with pytest.raises(UsageError) as caught:
        resumed(stored, PretrainOptions(epochs=5, lr=0.4, batch_size=256, image_size=64))
    assert str(caught.value).splitlines() == [
        "The run to resume was started with other settings:",
        "  --epochs: the run has 100, the command 5",
        "  --image-size: the run has 32, the command 64",
        "  --lr: the run has 0.3, the command 0.4",
        "Leave these flags out, or start another run with another --out.",
    ]


def test_the_command_that_started_a_run_resumes_it(make: Make) -> None:
    flags: dict[str, Any] = {"recipe": "auto", "views": "moco-v1", "crop_min": 0.5, "blur": True, "device": "auto"}
    stored = make(**flags)
    measured = dataclasses.replace(stored.views, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    settled = dataclasses.replace(stored.execution, device="cpu", threads=2, precision="fp32", layout="contiguous")
    stored = dataclasses.replace(stored, views=measured, execution=settled)
    assert resumed(stored, PretrainOptions(**flags, precision="auto", layout="auto", threads=2)) == stored
    with pytest.raises(UsageError, match="--threads: the run has 2, the command 1"):
        resumed(stored, PretrainOptions(threads=1))
    with pytest.raises(UsageError, match="must be a whole number"):
        resumed(stored, PretrainOptions(workers="x"))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- the fitting


def test_fitting_takes_what_means_the_same_and_nothing_else() -> None:
    from mocokit.training.settings import MISFIT

    assert fit("1e-4", float) == 1e-4
    assert fit(3, float) == 3.0
    assert fit([1, "2"], tuple[float, float]) == (1.0, 2.0)
    assert fit(None, float | None) is None
    for value, hint in (
        (True, int), (True, float), ("3", int), (3.0, int), (1, bool), ("true", bool), (5, str), (None, str),
        ([1], tuple[float, float]), ("ab", tuple[float, float]), ("inf", float), (10**400, float), ([], float),
    ):  # fmt: skip
        assert fit(value, hint) is MISFIT, (value, hint)


def test_every_recipe_has_the_same_digest_after_a_round_trip(tmp_path: Path) -> None:
    """Else a run could not be resumed: its checkpoints record the digest of the configuration in memory."""
    for name in RECIPES:
        options = PretrainOptions(recipe=name, batch_size=16, warmup_epochs=2)
        config = assemble(
            "digits",
            options,
            {},
            images=1000,
            native_side=24,
            side_for=lambda size: size,
            split=None,
            index_hash="x",
        )
        path = tmp_path / f"{name}.yaml"
        path.write_text(to_yaml(config))
        assert from_yaml(path).digest() == config.digest(), name
