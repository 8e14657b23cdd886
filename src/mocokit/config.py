"""A run's configuration: recipe, then a YAML file, then flags; complete, checked, written beside the run.

Each section's dataclass lives beside the code that uses it. This module only puts them together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from mocokit.contrast.encoders import EncoderConfig, UnknownBackboneError
from mocokit.contrast.steps import ContrastConfig
from mocokit.data.views import ViewConfig, view_recipe
from mocokit.errors import DamagedError, UsageError, did_you_mean
from mocokit.options import PretrainOptions
from mocokit.training.optim import OptimConfig

MAX_CONFIG_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What the run reads."""

    spec: str
    """Folder, table or generated set, as `open_source` takes it."""
    split: str | None = None
    """The split that is used, or None for everything."""
    label_column: str | None = None
    """Column of a table that holds labels; never used in training."""
    group_column: str | None = None
    """Column of a table that holds groups."""
    side: int = 32
    """Side of the square canvas that pictures are decoded into, in pixels."""
    max_bad: float = 0.01
    """Share of unreadable images above which the run stops."""
    images: int = 0
    """How many images there were when the run started."""
    index_hash: str = ""
    """Hash of the sample table (ids, sizes, modification times) when the run started."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad <= 1:
            raise UsageError(f"`max_bad` must lie in [0, 1]. Got {self.max_bad}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long, how many at once, and when what is written."""

    epochs: int = 200
    """Passes over the data."""
    batch_size: int = 256
    """Images per optimiser step (MoCo v1: 256)."""
    seed: int = 0
    """Decides initial weights, order and views."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    eval_every: int = 10
    """Epochs between readings of the monitor."""
    workers: int = 1
    """Threads that make views ahead of the step."""

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch_size", 2), ("checkpoint_every", 1), ("eval_every", 1), ("workers", 0)):
            value = getattr(self, name)
            if value < low:
                raise UsageError(f"`{name}` must be at least {low}. Got {value}.")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"`seed` must lie in [0, 2^63). Got {self.seed}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionConfig:
    """What decides bits and speed on this machine; settled when the run starts, kept on resume."""

    device: str = "auto"
    """cpu, cuda, ...; auto = cuda where there is one."""
    threads: int | None = None
    """Intra-op threads; None = torch's choice."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of the encoders."""
    layout: Literal["auto", "contiguous", "channels-last"] = "auto"
    """Memory layout of the encoders."""
    reason: str = ""
    """What was timed, where something was."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"`threads` must be at least 1. Got {self.threads}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that decides a run."""

    recipe: str
    """The named recipe it started from."""
    data: DataConfig
    views: ViewConfig
    encoder: EncoderConfig
    contrast: ContrastConfig
    optim: OptimConfig
    train: TrainConfig
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, nested by section."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def digest(self) -> str:
        """A hash of everything that decides the bits of the run (not of workers or of when things are written)."""
        plain = self.to_dict()
        for name in ("workers", "checkpoint_every", "eval_every"):
            del plain["train"][name]
        del plain["execution"]["reason"]
        plain["data"]["spec"] = ""  # where the data lie may change; the index hash says what they are
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


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

_SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "views": ViewConfig,
    "encoder": EncoderConfig,
    "contrast": ContrastConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "execution": ExecutionConfig,
}


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
        if section not in _SECTIONS:
            raise UsageError(f"{path}: unknown section '{section}'.{did_you_mean(str(section), _SECTIONS)}")
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
        fitted = _fit(value, hints[key])
        if fitted is _MISFIT:
            raise UsageError(f"{where}{section}.{key} must be {_spell(hints[key])}. Got {value!r}.")
        current = _rebuild(current, {key: fitted})
    return current


def _rebuild(current: Any, changes: Mapping[str, Any]) -> Any:
    try:
        return replace(current, **changes)
    except ValueError as error:  # the contrast room knows no error classes of ours
        raise UsageError(str(error)) from error


_MISFIT = object()


def _fit(value: Any, hint: Any) -> Any:
    """`value` as the type `hint` says, or _MISFIT. PyYAML reads 1e-4 as text, so numbers in text are taken."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for option in get_args(hint):
            fitted = _fit(value, option)
            if fitted is not _MISFIT:
                return fitted
        return _MISFIT
    if hint is type(None):
        return None if value is None else _MISFIT
    if origin is Literal:
        return value if value in get_args(hint) else _MISFIT
    if origin is tuple:
        parts = get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            return _MISFIT
        fitted_parts = [_fit(item, part) for item, part in zip(value, parts, strict=True)]
        return _MISFIT if _MISFIT in fitted_parts else tuple(fitted_parts)
    if hint is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            return _MISFIT
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    return value if hint in (bool, str) and isinstance(value, hint) else _MISFIT


def _spell(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_spell(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))} numbers"
    return names.get(hint, str(hint))


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


def to_yaml(config: RunConfig) -> str:
    """config.yaml's text."""
    return str(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))


def from_yaml(path: Path) -> RunConfig:
    """Read a run's config.yaml back. Raises DamagedError when it is not what `to_yaml` writes."""
    try:
        loaded = yaml.safe_load(path.read_text("utf-8"))
        sections = {}
        for section, kind in _SECTIONS.items():
            values = dict(loaded[section])
            hints = get_type_hints(kind)
            if set(values) != {f.name for f in fields(kind)}:
                raise DamagedError(f"{path}: section '{section}' lacks or adds a key; it was changed.")
            fitted = {key: _fit(value, hints[key]) for key, value in values.items()}
            if bad := [key for key, value in fitted.items() if value is _MISFIT]:
                raise DamagedError(f"{path}: {section}.{bad[0]} is not {_spell(hints[bad[0]])}; it was changed.")
            sections[section] = kind(**fitted)
        return RunConfig(recipe=str(loaded["recipe"]), **sections)
    except OSError as error:
        raise DamagedError(f"Could not read {path}: {error.strerror}. The run folder is incomplete.") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError, UsageError) as error:
        raise DamagedError(f"{path} is not a run's configuration; it was changed or cut ({error}).") from error


FREE_ON_RESUME = {"workers", "checkpoint_every", "eval_every"}
"""Flags that change no bit of the run."""


def resumed(stored: RunConfig, options: PretrainOptions) -> RunConfig:
    """The stored configuration, with the flags that may change on a resume.

    Raises UsageError listing every other flag whose value differs from the stored one.
    """
    given = options.given()
    differences = []
    sections = {section: getattr(stored, section) for section in _SECTIONS}
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


__all__ = ["RECIPES", "RunConfig", "UnknownBackboneError", "assemble", "from_yaml", "read_yaml", "resumed", "to_yaml"]
