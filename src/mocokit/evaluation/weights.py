"""Weights from elsewhere that a run can be compared with.

Files are read as `training.foreign` does: never a pickle in this process. Nothing is fetched: weights that timm would
download are used when they lie in this machine's cache already.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mocokit.contrast.backbones import UnknownBackboneError, build_backbone
from mocokit.contrast.encoders import EncoderConfig
from mocokit.data.views import Triple
from mocokit.errors import UsageError
from mocokit.training.checkpoint import read_tensors
from mocokit.training.foreign import PICKLES, as_safetensors, load_weights
from mocokit.training.state import make_encoder


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
    `FILE.safetensors` or `.pt`: the run's own architecture and views (encoder, size, mean, std).
    `NAME=FILE.safetensors`: another timm or torchvision backbone, with the size, mean and std that timm has for it, or
    the run's where it has none. cache: where the hub's files lie, None = where huggingface_hub keeps them.

    Raises UsageError for a spec that can't be meant, a file that doesn't fit, or a backbone that doesn't exist;
    DataError for a pickle that is refused.
    """
    library, colon, model = spec.partition(":")
    if colon and library in ("timm", "torchvision") and "=" not in spec:
        if library == "torchvision":
            return NotHere(spec, "torchvision ships its weights as pickles, which are not read; name timm:... instead")
        return _timm_pretrained(spec, model, cache)
    name, equals, file = spec.rpartition("=")
    path = Path(file)
    if path.suffix.lower() not in (".safetensors", *PICKLES):
        raise UsageError(
            f"The weights {path} are no file of weights. Name a .safetensors or .pt file, timm:NAME, or NAME=FILE."
        )
    with tempfile.TemporaryDirectory() as aside:
        weights, _ = as_safetensors(path, Path(aside) / "weights.safetensors")
        read_tensors(weights)  # a wrong file is told before a backbone is built
        label = path.name
        if equals:
            views = _timm_views(name.rpartition(":")[2])
            if views is not None:
                size, mean, std = views
            backbone, label = _build(name, size, spec), f"{name} from {path.name}"
        else:
            backbone = make_encoder(encoder, size, 0).backbone
        report = load_weights(
            weights, backbone, allow_partial=allow_partial, source=path, flag=f"--baseline NAME={path}"
        )
    return NamedEncoder(path.stem, backbone.eval(), size, mean, std, f"{label}: {report.told()}")


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
