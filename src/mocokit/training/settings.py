"""A run's complete configuration as it lies beside the run, and how values from a file are checked against it."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import reprlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, SupportsIndex, Union, get_args, get_origin, get_type_hints

import yaml

from mocokit.contrast.encoders import EncoderConfig
from mocokit.contrast.steps import ContrastConfig
from mocokit.data.clips import ClipConfig
from mocokit.data.views import ViewConfig
from mocokit.errors import DamagedError, UsageError
from mocokit.training.optim import OptimConfig
from mocokit.training.precision import MAX_THREADS, ExecutionConfig


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
    exclude: str | None = None
    """List of samples that are left out, as `mocokit check --write-exclude` makes it."""
    exclude_sha256: str | None = None
    """SHA-256 of that file when the run started."""
    init: str | None = None
    """File of weights that the backbone started from; None = random weights."""
    init_sha256: str | None = None
    """SHA-256 of that file. In a configuration for a new run: what the file must have."""
    allow_partial: bool = False
    """Whether less than 90 % of the backbone's tensors may come from that file."""
    video: Literal["off", "frames", "clips"] = "off"
    """Whether the data are videos, and whether their frames or clips of them are the samples."""
    frame_rate: float = 1.0
    """With `video: frames`: frames a second that are taken."""
    clip_frames: int = 8
    """With `video: clips`: frames of a clip."""
    clip_stride: int = 1
    """With `video: clips`: a clip takes every so many-th frame."""
    clip_speed: int = 1
    """With `video: clips`: a view plays at up to so many times the speed; 1 = as it is."""
    max_gap: float = 1.0
    """With `video: clips`: the second view is of the same video, at most so many seconds away; 0 = the same clip."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad <= 1:
            raise UsageError(f"`max_bad` must lie in [0, 1]. Got {self.max_bad}.")
        if not 0 < self.frame_rate < 1000:
            raise UsageError(f"`frame_rate` must lie above 0 and below 1000 a second. Got {self.frame_rate}.")
        ClipConfig(frames=self.clip_frames, stride=self.clip_stride, speed=self.clip_speed, max_gap=self.max_gap)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long, how many at once, and when what is written."""

    epochs: int = 200
    """Passes over the data."""
    batch_size: int = 256
    """Images per optimiser step (MoCo v1: 256)."""
    accumulate: int = 1
    """Micro-batches that a step is taken in; must divide `batch_size`."""
    seed: int = 0
    """Decides initial weights, order and views."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    eval_every: int = 10
    """Epochs between readings of the monitor."""
    workers: int | None = None
    """Threads that make views ahead of the step; None = see `precision.view_threads`."""

    def __post_init__(self) -> None:
        for name, low in (("epochs", 1), ("batch_size", 2), ("checkpoint_every", 1), ("eval_every", 1)):
            value = getattr(self, name)
            if value < low:
                raise UsageError(f"`{name}` must be at least {low}. Got {value}.")
        if self.accumulate < 1 or self.batch_size % self.accumulate or self.batch_size < 2 * self.accumulate:
            raise UsageError(
                f"`accumulate` must divide the batch of {self.batch_size} into equal parts of at least 2 images. "
                f"Got {self.accumulate}."
            )
        if self.workers is not None and not 0 <= self.workers <= MAX_THREADS:
            raise UsageError(f"`workers` must lie in [0, {MAX_THREADS}]. Got {self.workers}.")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"`seed` must lie in [0, 2^63). Got {self.seed}.")


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
        """A hash of everything that decides the bits of the run (not of workers or of when things are written).

        A key of `LATER` at its default is left out: the hash is the one from before there was that key.
        """
        plain = self.to_dict()
        for section, keys in LATER.items():
            for key in keys:
                if getattr(getattr(self, section), key) == default_of(SECTIONS[section], key):
                    del plain[section][key]
        for name in ("workers", "checkpoint_every", "eval_every"):
            del plain["train"][name]
        del plain["execution"]["reason"]
        plain["data"]["spec"] = ""  # where the data lie may change; the index hash says what they are
        plain["data"].pop("exclude", None)  # so may the list; its own hash says what is on it
        return hashlib.sha256(json.dumps(_numbers_as_floats(plain), sort_keys=True).encode()).hexdigest()


def _numbers_as_floats(value: Any) -> Any:
    """The same values with 3 written as 3.0: a whole number in a field of floats comes back from YAML as a float."""
    if isinstance(value, dict):
        return {key: _numbers_as_floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers_as_floats(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "views": ViewConfig,
    "encoder": EncoderConfig,
    "contrast": ContrastConfig,
    "optim": OptimConfig,
    "train": TrainConfig,
    "execution": ExecutionConfig,
}
"""The sections of a configuration, in the order they are written."""


LATER: dict[str, tuple[str, ...]] = {
    "data": (
        "exclude",
        "exclude_sha256",
        "init",
        "init_sha256",
        "allow_partial",
        "video",
        "frame_rate",
        "clip_frames",
        "clip_stride",
        "clip_speed",
        "max_gap",
    ),
    "encoder": ("clip",),
    "views": ("solarize", "blur_second", "solarize_second"),
    "contrast": ("shuffle_bn",),
    "optim": ("kind", "trust"),
    "train": ("accumulate",),
    "execution": ("compile",),
}
"""Keys that came after runs with checkpoints had been made, and whose default means "as before".

A config.yaml without them is one from before: it is read, and its digest, which its checkpoints record, is unchanged.
Whoever adds a field to a section names it here. `tests/golden/` keeps a config.yaml from before with its digest.
"""


def default_of(kind: type, key: str) -> Any:
    """The default of a section's field."""
    return next(f.default for f in fields(kind) if f.name == key)


MAX_CONFIG_BYTES = 1_000_000
MISFIT = object()
"""What `fit` returns for a value that is not of the type."""


def fit(value: Any, hint: Any) -> Any:
    """`value` as the type `hint` says, or MISFIT. PyYAML reads 1e-4 as text, so numbers in text are taken."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for option in get_args(hint):
            fitted = fit(value, option)
            if fitted is not MISFIT:
                return fitted
        return MISFIT
    if hint is type(None):
        return None if value is None else MISFIT
    if origin is Literal:
        return value if value in get_args(hint) else MISFIT
    if origin is tuple:
        parts = get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            return MISFIT
        fitted_parts = [fit(item, part) for item, part in zip(value, parts, strict=True)]
        return MISFIT if MISFIT in fitted_parts else tuple(fitted_parts)
    if hint is float and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return MISFIT
        return number if math.isfinite(number) else MISFIT
    if hint is int and isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    return value if hint in (bool, str) and isinstance(value, hint) else MISFIT


_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother = 2, 80, 80


def shown(value: Any) -> str:
    """A value for an error message. Cut short: a few lines of YAML can describe an endless one."""
    return _short.repr(value)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader, but a key that stands there twice is an error, where it would take the last one silently.

    So are merge keys (`<<`), with which a small file can describe an endless one.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping's keys and values."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if key == "<<" or keys.count(key) > 1:
                what = "merges another mapping" if key == "<<" else f"has the key '{key}' twice"
                raise yaml.constructor.ConstructorError(None, None, f"this mapping {what}", node.start_mark)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def load_yaml(path: Path) -> Any:
    """The plain values of a small YAML file. Raises OSError, yaml.YAMLError, ValueError, RecursionError."""
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"it is larger than {MAX_CONFIG_BYTES:,} bytes")
    loader = _Loader(path.read_text("utf-8"))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def spell(hint: Any) -> str:
    """The type in words, for an error message."""
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(spell(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))} numbers"
    return names.get(hint, str(hint))


def to_yaml(config: RunConfig) -> str:
    """config.yaml's text."""
    return str(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))


def from_yaml(path: Path) -> RunConfig:
    """Read a run's config.yaml back. Raises DamagedError when it is not what `to_yaml` writes, or wrote (`LATER`)."""
    try:
        loaded = load_yaml(path)
        sections = {}
        for section, kind in SECTIONS.items():
            values = dict(loaded[section])
            hints = get_type_hints(kind)
            missing = {f.name for f in fields(kind)} - set(values)
            if set(values) - set(hints) or missing - set(LATER.get(section, ())):
                raise DamagedError(f"{path}: section '{section}' lacks or adds a key; it was changed.")
            fitted = {key: fit(value, hints[key]) for key, value in values.items()}
            if bad := [key for key, value in fitted.items() if value is MISFIT]:
                raise DamagedError(f"{path}: {section}.{bad[0]} is not {spell(hints[bad[0]])}; it was changed.")
            sections[section] = kind(**fitted)
        return RunConfig(recipe=str(loaded["recipe"]), **sections)
    except OSError as error:
        raise DamagedError(f"Could not read {path}: {error.strerror}. The run folder is damaged.") from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError, UsageError) as error:
        raise DamagedError(f"{path} is not a run's configuration; it was changed or cut ({error}).") from error
