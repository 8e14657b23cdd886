"""Putting a run's configuration together: recipe, then a YAML file, then flags; complete and checked.

Each section's dataclass lives beside the code that uses it. This module only puts them together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from mocokit.contrast.encoders import EncoderConfig
from mocokit.contrast.steps import ContrastConfig
from mocokit.data.views import ViewConfig, view_recipe
from mocokit.errors import UsageError, did_you_mean
from mocokit.options import PretrainOptions
from mocokit.training.optim import OptimConfig
from mocokit.training.settings import MISFIT, SECTIONS, DataConfig, ExecutionConfig, RunConfig, TrainConfig, fit, spell

MAX_CONFIG_BYTES = 1_000_000


# ------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What a recipe may adapt to: S images, the side of the views in pixels."""

    images: int
    image_size: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sections a recipe decides, before K, backbone and canvas are fitted to the data."""

    views: ViewConfig
    encoder: EncoderConfig
    contrast: ContrastConfig
    optim: OptimConfig
    train: TrainConfig


def small(facts: DataFacts) -> Recipe:
    """For up to some hundred thousand images on modest machines: a faster key encoder, a sharper softmax."""
    return Recipe(
        views=view_recipe("moco-v2", facts.image_size),
        encoder=EncoderConfig(head="mlp"),
        contrast=ContrastConfig(T=0.1, m=0.99),
        optim=OptimConfig(lr=0.12, weight_decay=1e-4, warmup_epochs=0.5),
        train=TrainConfig(epochs=100, batch_size=256),
    )


def digits(facts: DataFacts) -> Recipe:
    """For the built-in digits: views that move, turn and zoom; no mirror image, no hue."""
    views = view_recipe("mnist-like", facts.image_size)
    return Recipe(
        views=replace(views, rotation=40.0, zoom=(0.6, 1.6), shift=0.25),
        encoder=EncoderConfig(backbone="small-cnn-32-64-128-128", head="mlp"),
        contrast=ContrastConfig(K=256, T=0.1, m=0.99),
        optim=OptimConfig(lr=0.1, weight_decay=1e-4, warmup_epochs=1),
        train=TrainConfig(epochs=60, batch_size=64),
    )


def moco_v1(facts: DataFacts) -> Recipe:
    """He et al. 2020, section 4: linear head, T 0.07, m 0.999, SGD 0.03 with a step decay, batch 256, 200 epochs."""
    return Recipe(
        views=view_recipe("moco-v1", facts.image_size),
        encoder=EncoderConfig(head="linear"),
        contrast=ContrastConfig(T=0.07, m=0.999),
        optim=OptimConfig(lr=0.03, schedule="step"),
        train=TrainConfig(epochs=200, batch_size=256),
    )


def moco_v2(facts: DataFacts) -> Recipe:
    """Chen et al. 2020: MLP head, stronger views, cosine schedule, T 0.2; otherwise as v1."""
    return Recipe(
        views=view_recipe("moco-v2", facts.image_size),
        encoder=EncoderConfig(head="mlp"),
        contrast=ContrastConfig(T=0.2, m=0.999),
        optim=OptimConfig(lr=0.03, schedule="cosine"),
        train=TrainConfig(epochs=200, batch_size=256),
    )


RECIPES: dict[str, Callable[[DataFacts], Recipe]] = {
    "small": small,
    "digits": digits,
    "moco-v1": moco_v1,
    "moco-v2": moco_v2,
}


def auto_recipe(spec: str, images: int) -> str:
    """The recipe that `auto` stands for."""
    if spec in ("digits", "moved-digits"):
        return "digits"
    return "small" if images < 200_000 else "moco-v2"


def default_queue_size(images: int, batch_size: int) -> int:
    """K for S images: the power of two nearest to S/8, at least 4 batches, at most 65,536.

    On small data a long queue mostly holds an image's own and its neighbours' old keys. Masking a query's own
    source keeps any K honest; a K of this size keeps the masked share small.
    """
    nearest = 2 ** round(math.log2(max(images / 8, 1)))
    return int(min(max(nearest, 4 * batch_size), 65536))


# ------------------------------------------------------------------------------------------------ assembly

_PLACES: dict[str, tuple[str, str]] = {
    "epochs": ("train", "epochs"),
    "batch_size": ("train", "batch_size"),
    "seed": ("train", "seed"),
    "checkpoint_every": ("train", "checkpoint_every"),
    "eval_every": ("train", "eval_every"),
    "workers": ("train", "workers"),
    "backbone": ("encoder", "backbone"),
    "stem": ("encoder", "stem"),
    "head": ("encoder", "head"),
    "dim": ("encoder", "dim"),
    "queue_size": ("contrast", "K"),
    "temperature": ("contrast", "T"),
    "momentum": ("contrast", "m"),
    "momentum_end": ("contrast", "m_end"),
    "order": ("contrast", "order"),
    "mask_source": ("contrast", "mask_source"),
    "mask_group": ("contrast", "mask_group"),
    "queue_init": ("contrast", "queue_init"),
    "lr": ("optim", "lr"),
    "sgd_momentum": ("optim", "sgd_momentum"),
    "weight_decay": ("optim", "weight_decay"),
    "schedule": ("optim", "schedule"),
    "warmup_epochs": ("optim", "warmup_epochs"),
    "split": ("data", "split"),
    "label_column": ("data", "label_column"),
    "group_column": ("data", "group_column"),
    "max_bad": ("data", "max_bad"),
    "device": ("execution", "device"),
    "threads": ("execution", "threads"),
    "precision": ("execution", "precision"),
    "layout": ("execution", "layout"),
}
"""Where each flag goes; recipe, image_size, views, crop_min and blur are handled by name."""


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """A configuration file: sections of plain values. Unknown sections and keys are errors; nothing is expanded."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UsageError(f"{path} is larger than {MAX_CONFIG_BYTES:,} bytes; it is no configuration of mocokit's.")
        loaded = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"Could not read the configuration {path}: {error.strerror}. Check the path.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = str(getattr(error, "problem_mark", "")).strip()
        raise UsageError(f"{path} is not valid YAML{' ' + where if where else ''}. Correct it.") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path} must hold sections such as `train:` with `epochs: 100` under it.")
    found: dict[str, dict[str, Any]] = {}
    for section, values in loaded.items():
        if section == "recipe":
            found["recipe"] = {"name": values}
            continue
        if section not in SECTIONS:
            raise UsageError(f"{path}: unknown section '{section}'.{did_you_mean(str(section), SECTIONS)}")
        if not isinstance(values, dict):
            raise UsageError(f"{path}: section '{section}' must hold keys and values.")
        found[section] = values
    return found


def _apply(section: str, current: Any, values: Mapping[str, Any], where: str) -> Any:
    """`current` with `values` put in, each checked against its field's type."""
    hints = get_type_hints(type(current))
    for key, value in values.items():
        if key not in hints:
            raise UsageError(f"{where}unknown key '{section}.{key}'.{did_you_mean(str(key), hints)}")
        fitted = fit(value, hints[key])
        if fitted is MISFIT:
            raise UsageError(f"{where}{section}.{key} must be {spell(hints[key])}. Got {value!r}.")
        current = _rebuild(current, {key: fitted})
    return current


def _rebuild(current: Any, changes: Mapping[str, Any]) -> Any:
    try:
        return replace(current, **changes)
    except ValueError as error:  # the contrast room knows no error classes of ours
        raise UsageError(str(error)) from error


def assemble(
    spec: str,
    options: PretrainOptions,
    from_file: Mapping[str, Mapping[str, Any]],
    *,
    images: int,
    native_side: int,
    side_for: Callable[[int], int],
    split: str | None,
    index_hash: str,
    file_name: str = "",
) -> RunConfig:
    """The whole configuration of a new run.

    images, native_side: how many pictures there are, and their longer side in pixels. side_for: the canvas side
    for a view size. Raises UsageError naming the key or flag and the value.
    """
    given = options.given()
    where = f"{file_name}: " if file_name else ""
    chosen = given.pop("recipe", None) or from_file.get("recipe", {}).get("name") or "auto"
    name = auto_recipe(spec, images) if chosen == "auto" else chosen
    if name not in RECIPES:
        known = ", ".join(["auto", *RECIPES])
        raise UsageError(f"No recipe is called '{name}'.{did_you_mean(str(name), RECIPES)} Choose one of: {known}.")
    size = given.pop("image_size", None) or from_file.get("views", {}).get("size") or min(native_side, 224)
    if not isinstance(size, int) or not 8 <= size <= 2048:
        raise UsageError(f"The image size must be a whole number from 8 to 2048 pixels. Got {size!r}.")
    recipe = RECIPES[name](DataFacts(images, size))
    views = recipe.views
    if (view_name := given.pop("views", None)) is not None:
        views = view_recipe(view_name, size)
    sections: dict[str, Any] = {
        "data": DataConfig(spec=spec, split=split, side=side_for(size), images=images, index_hash=index_hash),
        "views": views,
        "encoder": recipe.encoder,
        "contrast": recipe.contrast,
        "optim": recipe.optim,
        "train": recipe.train,
        "execution": ExecutionConfig(),
    }
    explicit: set[tuple[str, str]] = set()
    for section, values in from_file.items():
        if section != "recipe":
            sections[section] = _apply(section, sections[section], values, where)
            explicit |= {(section, key) for key in values}
    if (crop_min := given.pop("crop_min", None)) is not None:
        sections["views"] = replace(sections["views"], crop_area=(crop_min, 1.0))
    if (blur := given.pop("blur", None)) is not None:
        sections["views"] = replace(sections["views"], blur=(sections["views"].blur or 0.5) if blur else 0.0)
    for flag, value in given.items():
        section, key = _PLACES[flag]
        sections[section] = _rebuild(sections[section], {key: value})
        explicit.add((section, key))
    _fit_to_data(sections, explicit, name, images, size)
    return RunConfig(recipe=name, **sections)


def _fit_to_data(sections: dict[str, Any], explicit: set[tuple[str, str]], recipe: str, images: int, size: int) -> None:
    """Settle what nobody named: K, backbone, checkpoint and evaluation intervals."""
    train: TrainConfig = sections["train"]
    if images < train.batch_size:
        raise UsageError(
            f"There are {images} usable images, fewer than one batch of {train.batch_size}. "
            + (
                f"Use --batch-size {max(images // 2, 2)} or less."
                if images >= 4
                else "Add images: contrast needs several."
            )
        )
    if recipe != "digits":
        if ("contrast", "K") not in explicit:
            sections["contrast"] = replace(sections["contrast"], K=default_queue_size(images, train.batch_size))
        if ("encoder", "backbone") not in explicit:
            sections["encoder"] = replace(sections["encoder"], backbone="small-cnn" if size <= 32 else "resnet18")
    steps_per_epoch = images // train.batch_size
    if ("train", "checkpoint_every") not in explicit:
        train = replace(train, checkpoint_every=min(steps_per_epoch, 500))
    if ("train", "eval_every") not in explicit:
        train = replace(train, eval_every=max(train.epochs // 10, 1))
    sections["train"] = train


FREE_ON_RESUME = {"workers", "checkpoint_every", "eval_every"}
"""Flags that change no bit of the run."""


def resumed(stored: RunConfig, options: PretrainOptions) -> RunConfig:
    """The stored configuration, with the flags that may change on a resume.

    Raises UsageError listing every other flag whose value differs from the stored one.
    """
    given = options.given()
    differences = []
    sections = {section: getattr(stored, section) for section in SECTIONS}
    stored_values: dict[str, Any] = {
        "recipe": stored.recipe,
        "image_size": stored.views.size,
        "crop_min": (stored.views.crop_area or (1.0,))[0],
        "blur": stored.views.blur > 0,
    }
    for flag, value in given.items():
        if flag == "views" or (flag == "recipe" and value == "auto"):
            continue  # names of settings, not settings: the stored ones are complete
        if flag in FREE_ON_RESUME:
            section, key = _PLACES[flag]
            sections[section] = _rebuild(sections[section], {key: value})
            continue
        section, key = _PLACES.get(flag, ("", ""))
        before = getattr(getattr(stored, section), key) if section else stored_values[flag]
        if before != value and not (flag in ("precision", "layout", "device") and value == "auto"):
            differences.append(f"  --{flag.replace('_', '-')}: the run has {before}, the command {value}")
    if differences:
        raise UsageError(
            "The run to resume was started with other settings:\n"
            + "\n".join(differences)
            + "\nLeave these flags out, or start another run with another --out."
        )
    return dataclasses.replace(stored, **sections)
