"""Putting a run's configuration together: recipe, then a YAML file, then flags; complete and checked.

Each section's dataclass lives beside the code that uses it. This module only puts them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from mocokit.data.views import ViewConfig, view_recipe
from mocokit.errors import UsageError, did_you_mean
from mocokit.options import PretrainOptions
from mocokit.recipes import RECIPES, DataFacts, auto_recipe, default_backbone, default_clip_backbone, default_queue_size
from mocokit.training.precision import ExecutionConfig
from mocokit.training.settings import (
    MISFIT,
    SECTIONS,
    DataConfig,
    RunConfig,
    TrainConfig,
    default_of,
    fit,
    load_yaml,
    shown,
    spell,
)

# ------------------------------------------------------------------------------------------------ assembly

_PLACES: dict[str, tuple[str, str]] = {
    "epochs": ("train", "epochs"),
    "batch_size": ("train", "batch_size"),
    "accumulate": ("train", "accumulate"),
    "seed": ("train", "seed"),
    "checkpoint_every": ("train", "checkpoint_every"),
    "eval_every": ("train", "eval_every"),
    "workers": ("train", "workers"),
    "backbone": ("encoder", "backbone"),
    "stem": ("encoder", "stem"),
    "head": ("encoder", "head"),
    "head_layers": ("encoder", "head_layers"),
    "hidden": ("encoder", "hidden"),
    "dim": ("encoder", "dim"),
    "predictor": ("encoder", "predictor"),
    "freeze_patches": ("encoder", "freeze_patches"),
    "queue_size": ("contrast", "K"),
    "temperature": ("contrast", "T"),
    "momentum": ("contrast", "m"),
    "momentum_end": ("contrast", "m_end"),
    "order": ("contrast", "order"),
    "symmetric": ("contrast", "symmetric"),
    "bn_groups": ("contrast", "bn_groups"),
    "shuffle_bn": ("contrast", "shuffle_bn"),
    "mask_source": ("contrast", "mask_source"),
    "mask_group": ("contrast", "mask_group"),
    "queue_init": ("contrast", "queue_init"),
    "optimizer": ("optim", "kind"),
    "lr": ("optim", "lr"),
    "sgd_momentum": ("optim", "sgd_momentum"),
    "weight_decay": ("optim", "weight_decay"),
    "schedule": ("optim", "schedule"),
    "warmup_epochs": ("optim", "warmup_epochs"),
    "split": ("data", "split"),
    "label_column": ("data", "label_column"),
    "group_column": ("data", "group_column"),
    "exclude": ("data", "exclude"),
    "max_bad": ("data", "max_bad"),
    "init": ("data", "init"),
    "allow_partial": ("data", "allow_partial"),
    "video": ("data", "video"),
    "frame_rate": ("data", "frame_rate"),
    "clip_frames": ("data", "clip_frames"),
    "clip_stride": ("data", "clip_stride"),
    "clip_speed": ("data", "clip_speed"),
    "max_gap": ("data", "max_gap"),
    "device": ("execution", "device"),
    "threads": ("execution", "threads"),
    "precision": ("execution", "precision"),
    "layout": ("execution", "layout"),
    "compile": ("execution", "compile"),
}
"""Where each flag goes; recipe, image_size, views, crop_min and blur are handled by name."""

DATA_FACTS = ("spec", "split", "images", "index_hash", "exclude_sha256")
"""What a run's config.yaml records about its own data. In a file for another run they say nothing."""


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """A configuration file: sections of plain values, each of the type that its key needs. Nothing is expanded.

    A run's own config.yaml is one; what it records about its data (spec, images, index_hash) is not taken over.
    Raises UsageError naming the file and the unknown section, the unknown key, or the key and its value.
    """
    try:
        loaded = load_yaml(path)
    except OSError as error:
        raise UsageError(f"Could not read the configuration {path}: {error.strerror}. Check the path.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise UsageError(f"{path} can't be used{where}: {error.problem or error.context}. Correct it.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UsageError(f"{path} can't be used: {reason}. Correct it.") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path} must hold sections such as `train:` with `epochs: 100` under it.")
    found: dict[str, dict[str, Any]] = {}
    for section, values in loaded.items():
        if section == "recipe":
            if not isinstance(values, str):
                raise UsageError(f"{path}: recipe must be a name. Got {shown(values)}.")
            found["recipe"] = {"name": values}
            continue
        if section not in SECTIONS:
            raise UsageError(f"{path}: unknown section '{section}'.{did_you_mean(str(section), SECTIONS)}")
        if not isinstance(values, dict):
            raise UsageError(f"{path}: section '{section}' must hold keys and values. Got {shown(values)}.")
        found[section] = _fitted(SECTIONS[section], values, f"{path}: ", f"{section}.")
    return found


def _fitted(kind: type, values: Mapping[str, Any], where: str, prefix: str) -> dict[str, Any]:
    """`values` as the types of the fields of the dataclass `kind`. Raises UsageError naming key and value."""
    hints = get_type_hints(kind)
    found = {}
    for key, value in values.items():
        if key not in hints:
            raise UsageError(f"{where}unknown key '{prefix}{key}'.{did_you_mean(str(key), hints)}")
        found[key] = fit(value, hints[key])
        if found[key] is MISFIT:
            what = spell(hints[key]) if prefix else spell(hints[key]).removesuffix(" or null")  # a flag is left out
            raise UsageError(f"{where}{prefix}{key} must be {what}. Got {shown(value)}.")
    return found


def _rebuild(current: Any, changes: Mapping[str, Any]) -> Any:
    """`current` with all changes made at once: some values only make sense together."""
    try:
        return replace(current, **changes)
    except ValueError as error:  # the contrast room knows no error classes of ours
        method = changes.get("method", getattr(current, "method", None))
        other = method != getattr(current, "method", None)
        hint = f" The recipe is for {current.method}; choose one for {method} with --recipe." if other else ""
        raise UsageError(f"{error}{hint}") from error


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
    exclude_sha256: str | None = None,
    clip_stride: int | None = None,
) -> RunConfig:
    """The whole configuration of a new run.

    images, native_side: how many pictures there are, and their longer side in pixels. side_for: the canvas side
    for a view size. split: the one that is used. exclude_sha256: of the list of samples left out. clip_stride: of the
    clips, where they are the samples.

    A recipe is a starting point wherever it is named; after it the
    file's values count, and over them the flags (`--views` replaces the file's whole section). Raises UsageError
    naming the key or flag and the value.
    """
    given = _fitted(PretrainOptions, options.given(), "", "")
    chosen = _first(given.pop("recipe", None), from_file.get("recipe", {}).get("name"), "auto")
    name = auto_recipe(spec, images) if chosen == "auto" else chosen
    if name not in RECIPES:
        known = ", ".join(["auto", *RECIPES])
        raise UsageError(f"No recipe is called '{name}'.{did_you_mean(str(name), RECIPES)} Choose one of: {known}.")
    # Below 8 px there is next to nothing to see; pictures that small are enlarged.
    size = _first(given.pop("image_size", None), from_file.get("views", {}).get("size"), min(max(native_side, 8), 224))
    if not 8 <= size <= 2048:
        raise UsageError(f"The image size must be a whole number from 8 to 2048 pixels. Got {size}.")
    backbone = given.get("backbone", from_file.get("encoder", {}).get("backbone"))
    recipe = RECIPES[name].make(DataFacts(images, size, backbone))
    sections: dict[str, Any] = {
        "data": DataConfig(
            spec=spec,
            split=split,
            side=side_for(size),
            images=images,
            index_hash=index_hash,
            exclude_sha256=exclude_sha256,
        ),
        "views": recipe.views,
        "encoder": recipe.encoder,
        "contrast": recipe.contrast,
        "optim": recipe.optim,
        "train": recipe.train,
        "execution": ExecutionConfig(),
    }
    changes: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section, values in from_file.items():
        if section != "recipe":
            changes[section] |= {k: v for k, v in values.items() if section != "data" or k not in DATA_FACTS}
    if (view_name := given.pop("views", None)) is not None:
        sections["views"], changes["views"] = view_recipe(view_name, size), {}
    changes["views"]["size"] = size
    if (crop_min := given.pop("crop_min", None)) is not None:
        changes["views"]["crop_area"] = (crop_min, 1.0)
    if (blur := given.pop("blur", None)) is not None:
        usual = changes["views"].get("blur", sections["views"].blur) or 0.5
        changes["views"]["blur"] = usual if blur else 0.0
        if not blur:
            changes["views"]["blur_second"] = None  # as in the first view: none
    for flag, value in given.items():
        section, key = _PLACES[flag]
        changes[section][key] = value
    explicit = {(section, key) for section, values in changes.items() for key in values}
    if clip_stride is not None:
        changes["data"]["clip_stride"] = clip_stride
    _fit_to_video(changes, explicit)
    sections = {section: _rebuild(current, changes[section]) for section, current in sections.items()}
    _fit_to_data(sections, explicit, recipe.fitted, images, size)
    _check_method(sections)
    return RunConfig(recipe=name, **sections)


def _fit_to_video(changes: dict[str, dict[str, Any]], explicit: set[tuple[str, str]]) -> None:
    """What videos change: an encoder of clips, and a video's own frames or clips left out of its negatives."""
    data = changes["data"]
    clips = data.get("video") == "clips"
    length = data.get("clip_frames", default_of(DataConfig, "clip_frames")) if clips else 0
    if ("encoder", "clip") in explicit and changes["encoder"]["clip"] != length:
        raise UsageError(
            f"encoder.clip must be {length} here, as many as data.clip_frames with `video: clips`. Leave it out."
        )
    changes["encoder"]["clip"] = length
    if clips and changes["execution"].get("layout") == "channels-last":
        raise UsageError("--layout channels-last is for images; clips have one layout. Leave it out.")


def _check_method(sections: Mapping[str, Any]) -> None:
    """Method, encoder and the images that are in the network at once must go together."""
    train: TrainConfig = sections["train"]
    try:
        sections["contrast"].check(sections["encoder"], train.batch_size // train.accumulate)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _first(*choices: Any) -> Any:
    return next(choice for choice in choices if choice is not None)


FRAMES_AT_ONCE = 512
"""Frames of a batch of clips where nobody names the batch size: 64 clips of 8 frames."""


def _fit_to_data(
    sections: dict[str, Any], explicit: set[tuple[str, str]], fitted: tuple[str, ...], images: int, size: int
) -> None:
    """Settle what nobody named: K, backbone, checkpoint and evaluation intervals."""
    train: TrainConfig = sections["train"]
    most = max(FRAMES_AT_ONCE // max(sections["encoder"].clip, 1), 2)
    if sections["encoder"].clip and train.batch_size > most and ("train", "batch_size") not in explicit:
        # A batch of clips fills the memory of as many times more pictures; the learning rate goes with it.
        if ("optim", "lr") not in explicit:
            lr = sections["optim"].lr * most / train.batch_size
            sections["optim"] = replace(sections["optim"], lr=lr)
        train = sections["train"] = replace(train, batch_size=most)
    if images < train.batch_size:
        raise UsageError(
            f"There are {images} images, fewer than one batch of {train.batch_size}. "
            + (
                f"Use --batch-size {max(images // 2, 2)} or less."
                if images >= 4
                else "Add images: contrast needs several."
            )
        )
    if "K" in fitted and ("contrast", "K") not in explicit and sections["contrast"].has_queue:
        sections["contrast"] = replace(sections["contrast"], K=default_queue_size(images, train.batch_size))
    if "backbone" in fitted and ("encoder", "backbone") not in explicit:
        clip = sections["encoder"].clip
        backbone = default_clip_backbone(size) if clip else default_backbone(size)
        sections["encoder"] = replace(sections["encoder"], backbone=backbone)
    contrast = sections["contrast"]
    if sections["data"].video != "off" and ("contrast", "mask_group") not in explicit:
        # Frames and clips of one video are false negatives of each other.
        sections["contrast"] = replace(contrast, mask_group=contrast.uses("mask_group") and contrast.mask_source)
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
    given = _fitted(PretrainOptions, options.given(), "", "")
    differences = []
    sections = {section: getattr(stored, section) for section in SECTIONS}
    stored_values: dict[str, Any] = {
        "recipe": stored.recipe,
        "image_size": stored.views.size,
        "crop_min": (stored.views.crop_area or (1.0,))[0],
        "blur": stored.views.blur > 0,
    }
    for flag, value in given.items():
        if flag == "recipe" and value == "auto":
            continue
        if flag == "views":
            if not _views_are(stored.views, value, given):
                differences.append(f"  --views: the run's views are not those of {value}")
            continue
        if flag in FREE_ON_RESUME:
            section, key = _PLACES[flag]
            sections[section] = _rebuild(sections[section], {key: value})
            continue
        section, key = _PLACES.get(flag, ("", ""))
        before = getattr(getattr(stored, section), key) if section else stored_values[flag]
        if before != value and not (flag in ("precision", "layout", "compile", "device") and value == "auto"):
            differences.append(f"  --{flag.replace('_', '-')}: the run has {before}, the command {value}")
    if differences:
        raise UsageError(
            "The run to resume was started with other settings:\n"
            + "\n".join(differences)
            + "\nLeave these flags out, or start another run with another --out."
        )
    return dataclasses.replace(stored, **sections)


def _views_are(views: ViewConfig, name: str, given: Mapping[str, Any]) -> bool:
    """Whether a run's views are those of a named recipe, but for what is measured or has a flag of its own."""
    own: dict[str, Any] = {"mean": views.mean, "std": views.std}
    if "crop_min" in given:
        own["crop_area"] = views.crop_area
    if "blur" in given:
        own |= {"blur": views.blur, "blur_second": views.blur_second}
    return replace(view_recipe(name, views.size), **own) == views
