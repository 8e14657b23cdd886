"""The folders that `mocokit export` writes: one function per format, all from the same weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn

from mocokit import files
from mocokit.exporting import onnx, snippets, standalone
from mocokit.exporting.blueprint import (
    RESNETS,
    BackboneFacts,
    Blueprint,
    backbone_tensors,
    blueprint_of,
    head_tensors,
    moved_to,
)
from mocokit.exporting.card import Sections, model_card
from mocokit.exporting.loading import FrozenEncoder, freeze
from mocokit.exporting.parity import Parity, measure
from mocokit.exporting.trained import Trained

Format = Literal["safetensors", "timm", "torchvision", "onnx", "hf"]
WEIGHTS, HEAD, FACTS, CARD, MODEL, GRAPH, CONFIG = (
    "model.safetensors", "head.safetensors", "encoder.json", "README.md", "model.py", "encoder.onnx", "config.json",
)  # fmt: skip

Pictures = Sequence[npt.NDArray[np.uint8]]
"""RGB [H, W, 3] each, or clips [T, H, W, 3]."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What all formats start from."""

    blueprint: Blueprint
    tensors: dict[str, Tensor]
    head: dict[str, Tensor] | None
    frozen: FrozenEncoder

    @property
    def stem_width(self) -> int:
        return int(self.tensors["conv1.weight"].shape[0]) if self.blueprint.backbone.small_stem else 0

    def ours(self, x: Tensor) -> Sequence[Tensor]:
        """h, and z where the head is exported, by the run's own encoder."""
        if self.head is None:
            return (self.frozen.encoder.features(x),)  # type: ignore[operator]
        return self.frozen.encoder.h_and_z(x)  # type: ignore[operator,no-any-return]


def export_folder(
    trained: Trained,
    format: Format,
    *,
    pictures: Pictures,
    source: str,
    which: Literal["query", "key"] = "query",
    head: bool = False,
    licence: str = "unknown",
) -> tuple[dict[str, bytes], Parity]:
    """The files of an export (name -> bytes) and its parity on `pictures` (uint8 RGB [H, W, 3]) of `source`.

    Raises UsageError where the format has no such network, MissingDependencyError, MocokitError when it differs.
    """
    if head and trained.run is None:
        raise trained.refuse("projection head")
    frozen = freeze(trained, "h" if which == "query" else "key-h")
    encoder = frozen.encoder
    blueprint = blueprint_of(encoder, trained.config, trained.views)  # type: ignore[arg-type]
    tensors = backbone_tensors(encoder, blueprint.backbone)  # type: ignore[arg-type]
    if format in ("timm", "torchvision"):
        blueprint = moved_to(blueprint, format, tensors)
    parts = _Parts(blueprint, tensors, head_tensors(encoder) if head else None, frozen)  # type: ignore[arg-type]
    contents, sections, run_it, transform = _FORMATS[format](parts)
    if head and format != "onnx":
        contents[HEAD] = safetensors.torch.save(parts.head or {})
    parity = measure(parts.ours, run_it, frozen, transform, pictures, source)
    facts = {**blueprint.to_dict(), "which": which, "step": trained.step, "licence": licence}
    if not head:
        facts["head"] = None
    contents[FACTS] = files.to_json(facts).encode()
    card = model_card(trained, blueprint, sections, parity, which=which, licence=licence, format=format)
    contents[CARD] = card.encode()
    return contents, parity


_Made = tuple[dict[str, bytes], Sections, Callable[[Tensor], Sequence[Tensor]], Callable[[Any], Tensor]]


def _safetensors(parts: _Parts) -> _Made:
    contents = {WEIGHTS: safetensors.torch.save(parts.tensors), MODEL: inspect.getsource(standalone).encode()}
    clip, facts = parts.blueprint.clip, asdict(parts.blueprint.input)
    name = "frames" if clip else "image"
    more = (
        ("With the head", f"encoder, transform = load(head=True)\nh, z = encoder.h_and_z(transform({name})[None])"),
    )
    sections = Sections(
        library="safetensors",
        load=snippets.own_model(name),
        transform=None,
        more=more if parts.head is not None else (),
    )
    transform = standalone.make_clip_transform(facts) if clip else standalone.make_transform(facts)
    return contents, sections, _reloaded(parts, contents), transform


def _torchvision(parts: _Parts) -> _Made:
    from torchvision import transforms as T

    blueprint, facts = parts.blueprint, parts.blueprint.input
    contents = {WEIGHTS: safetensors.torch.save(parts.tensors)}
    detection = snippets.detection_backbone(blueprint, parts.stem_width)
    sections = Sections(
        library="torchvision",
        load=snippets.torchvision_model(blueprint, parts.stem_width),
        transform=snippets.torchvision_transform(facts),
        more=(*_head_lines(parts), *((("As a detection backbone", detection),) if detection else ())),
    )
    transform = T.Compose(
        [T.Resize(facts.size), T.CenterCrop(facts.size), T.ToTensor(), T.Normalize(facts.mean, facts.std)]
    )
    return contents, sections, _reloaded(parts, contents), transform


def _timm(parts: _Parts) -> _Made:
    import timm.data

    blueprint, facts = parts.blueprint, parts.blueprint.input
    contents = {WEIGHTS: safetensors.torch.save(parts.tensors)}
    sections = Sections(
        library="timm",
        load=snippets.timm_model(blueprint, parts.stem_width),
        transform="import timm\n" + snippets.timm_transform(facts),
        more=_head_lines(parts),
    )
    transform = timm.data.create_transform(
        (3, facts.size, facts.size), interpolation="bilinear", crop_pct=1.0, mean=facts.mean, std=facts.std
    )
    return contents, sections, _reloaded(parts, contents), transform


def _onnx(parts: _Parts) -> _Made:
    facts, with_head = parts.blueprint.input, parts.head is not None
    clip = parts.blueprint.clip
    graph = onnx.to_onnx(parts.frozen.encoder, facts.size, head=with_head, clip=clip)
    name = snippets.NUMPY_CLIP if clip else "transform(image)"
    sections = Sections(
        library="onnx", load=snippets.onnx_model(name), transform=snippets.numpy_transform(facts),
        more=(("With the head", f'h, z = session.run(["h", "z"], {{"images": {name}[None]}})'),)
        if with_head
        else (),
    )  # fmt: skip
    one = _numpy_transform(facts)
    transform = (lambda frames: torch.stack([one(frame) for frame in frames], 1)) if clip else one
    return {GRAPH: graph}, sections, onnx.runner(graph, head=with_head), transform


def _hf(parts: _Parts) -> _Made:
    """As timm lays out a folder for a hub, where timm's own model pools as ours does; with model.py otherwise."""
    blueprint = parts.blueprint
    facts = blueprint.backbone
    resnet = facts.library in ("timm", "torchvision") and facts.name.startswith(RESNETS)
    in_timm = resnet and not facts.small_stem and not blueprint.clip
    if not in_timm:
        contents, sections, run_it, transform = _safetensors(parts)
        contents[CONFIG] = files.to_json({"model_type": "mocokit-encoder", **blueprint.to_dict()}).encode()
        return contents, sections, run_it, transform
    moved = _Parts(moved_to(blueprint, "timm", parts.tensors), parts.tensors, parts.head, parts.frozen)
    contents, sections, run_it, transform = _timm(moved)
    contents[CONFIG] = files.to_json(_timm_config(moved.blueprint)).encode()
    load = snippets.hub_folder()
    head = (("With the head", "from safetensors.torch import load_file\n" + snippets.head_lines(blueprint)),)
    more = head if parts.head is not None else ()
    sections = Sections(library="timm", load=load, transform=sections.transform, more=more)
    return contents, sections, run_it, transform


_FORMATS: dict[str, Callable[[_Parts], _Made]] = {
    "safetensors": _safetensors,
    "torchvision": _torchvision,
    "timm": _timm,
    "onnx": _onnx,
    "hf": _hf,
}


def _timm_config(blueprint: Blueprint) -> dict[str, Any]:
    """config.json as timm reads it from a local folder or a hub."""
    facts = blueprint.input
    return {
        "architecture": blueprint.backbone.name,
        "num_classes": 0,
        "num_features": blueprint.feature_dim,
        "pretrained_cfg": {
            "input_size": [3, facts.size, facts.size],
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(facts.mean),
            "std": list(facts.std),
            "num_classes": 0,
            "first_conv": "conv1",
            "classifier": "fc",
        },
    }


def _head_lines(parts: _Parts) -> tuple[tuple[str, str], ...]:
    return (("With the head", snippets.head_lines(parts.blueprint)),) if parts.head is not None else ()


def _reloaded(parts: _Parts, contents: Mapping[str, bytes]) -> Callable[[Tensor], Sequence[Tensor]]:
    """The encoder as somebody without mocokit gets it: its own library's model, the weights as written."""
    backbone = rebuild(parts.blueprint.backbone, contents[WEIGHTS])
    head: nn.Module | None = None
    if parts.head is not None:
        head = standalone.build_head(json.loads(json.dumps(parts.blueprint.head)))
        head.load_state_dict(parts.head)
    encoder = standalone.Encoder(backbone, head, parts.blueprint.frame_by_frame).eval()

    def run(x: Tensor) -> Sequence[Tensor]:
        return (encoder(x),) if head is None else encoder.h_and_z(x)

    return run


def rebuild(facts: BackboneFacts, weights: bytes) -> nn.Module:
    """The backbone by its own library, with safetensors weights."""
    with torch.random.fork_rng(devices=[]):
        backbone = standalone.build_backbone(asdict(facts))
    backbone.load_state_dict(safetensors.torch.load(weights))
    return backbone


def _numpy_transform(facts: Any) -> Callable[[Image.Image], Tensor]:
    from PIL import ImageOps

    mean, std = np.array(facts.mean), np.array(facts.std)

    def transform(image: Image.Image) -> Tensor:
        square = ImageOps.fit(image.convert("RGB"), (facts.size, facts.size), Image.Resampling.BILINEAR)
        x = (np.asarray(square) / 255 - mean) / std
        return torch.from_numpy(x.transpose(2, 0, 1).astype(np.float32))

    return transform
