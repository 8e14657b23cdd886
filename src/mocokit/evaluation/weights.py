"""Weights from elsewhere: what a file fits, and the named weights that a run can be compared with.

Only safetensors files are read, never a pickle, and nothing is fetched: weights that timm would download are used
when they lie in this machine's cache already.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mocokit.contrast.backbones import UnknownBackboneError, build_backbone
from mocokit.contrast.encoders import EncoderConfig
from mocokit.data.views import Triple
from mocokit.errors import UsageError
from mocokit.training.checkpoint import read_tensors
from mocokit.training.state import make_encoder

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar", ".th")
LEAST_SHARE = 0.9
"""Of the backbone's tensors that a file must hold, by name and shape, to count as its weights."""
_PREFIXES = (
    "",
    "query.backbone.trunk.",
    "backbone.trunk.",
    "trunk.",
    "query.backbone.",
    "backbone.",
    "encoder.",
    "model.",
    "module.",
    "module.encoder_q.",
    "module.base_encoder.",
    "module.backbone.",
)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Which tensors of a backbone came from a file, by the backbone's own names."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """In the backbone, but not in the file (or of another shape there). Batch norm's step counters are not counted."""
    unexpected: tuple[str, ...]
    """In the file, but not in the backbone: a head, as a rule."""

    @property
    def share(self) -> float:
        """The share of the backbone's tensors that were loaded, in 0..1."""
        return len(self.loaded) / max(len(self.loaded) + len(self.missing), 1)

    def told(self) -> str:
        """In words."""
        text = f"{len(self.loaded)} of the backbone's {len(self.loaded) + len(self.missing)} tensors"
        return text + (f" ({self.missing[0]!r} is the first of those missing)" if self.missing else "")


def load_weights(path: Path, backbone: nn.Module, *, allow_partial: bool = False) -> LoadReport:
    """Put a safetensors file's weights into a backbone (an `Encoder.backbone`), in place.

    Names may carry the prefix of a checkpoint of mocokit's or of the usual wrappers (`backbone.`, `module.encoder_q.`);
    the one under which most tensors fit is taken, and reported. Raises UsageError for a pickle, a missing file, or
    when less than 90 % of the backbone's tensors are in the file (unless allow_partial; one at least must be);
    DamagedError when the file can't be parsed. Nothing is changed then.
    """
    stored = read_safetensors(path)
    trunk: nn.Module = getattr(backbone, "trunk", backbone)
    own = trunk.state_dict()
    counted = {name for name in own if not name.endswith("num_batches_tracked")}

    def fitting(prefix: str) -> list[str]:
        return [
            name for name in own if (there := stored.get(prefix + name)) is not None and there.shape == own[name].shape
        ]

    prefix = max(_PREFIXES, key=lambda one: len(fitting(one)))
    found = fitting(prefix)
    loaded = tuple(name for name in found if name in counted)
    used = {prefix + name for name in found}
    report = LoadReport(
        loaded, tuple(sorted(counted - set(loaded))), tuple(sorted(name for name in stored if name not in used))
    )
    if not loaded or (report.share < LEAST_SHARE and not allow_partial):
        few = "" if not loaded else "; the missing ones would stay random. --allow-partial takes it all the same"
        raise UsageError(
            f"{path} holds {report.told()}{few}. Name the backbone that the file was made for: --baseline NAME={path}."
        )
    trunk.load_state_dict({name: stored[prefix + name] for name in found}, strict=False)
    return report


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises UsageError for other kinds of file, DamagedError for a broken one."""
    if path.suffix.lower() in PICKLES:
        raise UsageError(
            f"{path} is a pickle, which can run any code when it is read, so it is not read. Save its tensors with "
            "safetensors.torch.save_file and name that file."
        )
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        what = "is no file" if path.suffix.lower() == ".safetensors" else "is no .safetensors file"
        raise UsageError(f"The weights {path} {what}. Name a .safetensors file, timm:NAME, or NAME=FILE.safetensors.")
    return read_tensors(path)


@dataclass(frozen=True, slots=True, eq=False)
class NamedEncoder:
    """A backbone with weights from elsewhere and the views that it was made for."""

    name: str
    backbone: nn.Module
    """Images [N, 3, size, size] -> h [N, H]; in eval mode."""
    size: int
    mean: Triple
    std: Triple
    note: str
    """What was loaded from where."""


@dataclass(frozen=True, slots=True)
class NotHere:
    """Weights that were named but can't be used on this machine, and why."""

    name: str
    reason: str


def open_baseline(
    spec: str,
    encoder: EncoderConfig,
    *,
    size: int,
    mean: Triple,
    std: Triple,
    allow_partial: bool = False,
    cache: Path | None = None,
) -> NamedEncoder | NotHere:
    """The weights that `--baseline SPEC` names.

    `timm:NAME`: timm's pretrained weights from this machine's cache, with timm's size, mean and std.
    `FILE.safetensors`: the run's own architecture and views (encoder, size, mean, std).
    `NAME=FILE.safetensors`: another timm or torchvision backbone, with the size, mean and std that timm has for it, or
    the run's where it has none. cache: where the hub's files lie, None = where huggingface_hub keeps them.

    Raises UsageError for a spec that can't be meant, a file that doesn't fit, or a backbone that doesn't exist.
    """
    library, colon, model = spec.partition(":")
    if colon and library in ("timm", "torchvision") and "=" not in spec:
        if library == "torchvision":
            return NotHere(spec, "torchvision ships its weights as pickles, which are not read; name timm:... instead")
        return _timm_pretrained(spec, model, cache)
    name, equals, file = spec.rpartition("=")
    path = Path(file)
    if not equals:
        built = make_encoder(encoder, size, 0)
        report = load_weights(path, built.backbone, allow_partial=allow_partial)
        return NamedEncoder(path.stem, built.backbone.eval(), size, mean, std, f"{path.name}: {report.told()}")
    read_safetensors(path)  # a wrong file is told before a backbone is built
    views = _timm_views(name.rpartition(":")[2])
    if views is not None:
        size, mean, std = views
    backbone = _build(name, size, spec)
    report = load_weights(path, backbone, allow_partial=allow_partial)
    return NamedEncoder(path.stem, backbone.eval(), size, mean, std, f"{name} from {path.name}: {report.told()}")


def _build(name: str, size: int, spec: str) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build_backbone(name, "standard", size)
    except UnknownBackboneError as error:
        raise UsageError(f"--baseline {spec}: {error}") from error


def _timm_pretrained(spec: str, model: str, cache: Path | None) -> NamedEncoder | NotHere:
    import timm
    from huggingface_hub import try_to_load_from_cache

    if not timm.is_model(model.partition(".")[0]):
        raise UsageError(f"--baseline {spec}: timm has no model {model!r}. See timm.list_models().")
    facts: Any = timm.get_pretrained_cfg(model, allow_unregistered=True)
    if facts is None or not facts.hf_hub_id:
        return NotHere(spec, "timm has no weights of that name")
    found = try_to_load_from_cache(facts.hf_hub_id, "model.safetensors", cache_dir=cache)
    if not isinstance(found, str):
        return NotHere(spec, "its weights are not on this machine, and nothing is fetched from the network")
    size, mean, std = _views_of(facts)
    backbone = _build(f"timm:{model.partition('.')[0]}", size, spec)
    report = load_weights(Path(found), backbone)
    return NamedEncoder(spec, backbone.eval(), size, mean, std, f"{facts.hf_hub_id}: {report.told()}")


def _timm_views(model: str) -> tuple[int, Triple, Triple] | None:
    import timm

    if not timm.is_model(model.partition(".")[0]):
        return None
    facts: Any = timm.get_pretrained_cfg(model, allow_unregistered=True)
    return None if facts is None else _views_of(facts)


def _views_of(facts: Any) -> tuple[int, Triple, Triple]:
    mean, std = (tuple(float(value) for value in getattr(facts, name)) for name in ("mean", "std"))
    return int(facts.input_size[-1]), (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
