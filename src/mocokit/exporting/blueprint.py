"""What an encoder is, in words and numbers that another library understands: `encoder.json` of an exported folder.

The weights keep the names that they have in the backbone's own library (torchvision's `features.0.0.weight`, timm's
`stem.0.weight`), so that library's own model takes them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mocokit.contrast.backbones import backbone_names, locate_backbone, small_cnn_widths
from mocokit.contrast.clip_backbones import locate_clip_backbone, small_3d_widths
from mocokit.contrast.encoders import Encoder, EncoderConfig
from mocokit.data.pixels import canvas_limit
from mocokit.data.views import ViewConfig
from mocokit.errors import UsageError
from mocokit.exporting import standalone

Library = Literal["small-cnn", "torchvision", "timm"]
RESNETS = ("resnet", "resnext", "wide_resnet")
"""Backbones that torchvision and timm both have, with the same names and the same layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneFacts:
    """The network without weights; `standalone.build_backbone` makes it from these."""

    library: str
    """`small-cnn`, `torchvision` or `timm`; of networks over time `small-3d` or `torchvision-video`."""
    name: str
    """Its name in that library."""
    widths: tuple[int, ...] | None
    """Of a small-cnn or small-3d, the stages' channels."""
    small_stem: bool
    """A ResNet's 3x3 stride-1 first convolution without max-pool."""
    features: bool
    """A torchvision model that ends in `features` (ConvNeXt, EfficientNet, ...)."""
    image_size: int | None
    """The one image side a transformer takes; None where any will do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFacts:
    """What is done to a picture before it enters the encoder."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    canvas: int
    """Pictures with a longer side than this are first shrunk to it."""
    crop: str = "central square"
    interpolation: str = "bilinear"
    antialias: bool = True
    channels: str = "RGB, 0 to 1, then (x - mean) / std"


@dataclass(frozen=True, kw_only=True, slots=True)
class Blueprint:
    """An encoder's architecture and input."""

    backbone: BackboneFacts
    input: InputFacts
    feature_dim: int
    """H, the width of h."""
    head: tuple[tuple[Any, ...], ...]
    """The head's layers: (`linear`, in, out, bias), (`batch norm`, width, affine), (`relu`,)."""
    clip: int = 0
    """T, the frames of a clip; 0 for images."""
    frame_by_frame: bool = False
    """Whether the backbone reads the frames of a clip one by one, and h is the mean over time."""

    def to_dict(self) -> dict[str, Any]:
        """encoder.json's values."""
        plain = asdict(self)
        plain["backbone"]["widths"] = list(self.backbone.widths) if self.backbone.widths else None
        plain["head"] = [list(layer) for layer in self.head]
        return {"format": "mocokit encoder 1", **plain}


def blueprint_of(encoder: Encoder, config: EncoderConfig, views: ViewConfig) -> Blueprint:
    """What `encoder` is, read off its modules."""
    over_time = locate_clip_backbone(config.backbone)
    library, name = over_time or locate_backbone(config.backbone)
    trunk = encoder.backbone.trunk
    children = dict(trunk.named_children())
    first = children.get("conv1")
    features = library == "torchvision" and encoder.backbone.spatial and not name.startswith(RESNETS)
    return Blueprint(
        backbone=BackboneFacts(
            library=library,
            name=name,
            widths=small_cnn_widths(name)
            if library == "small-cnn"
            else small_3d_widths(name)
            if library == "small-3d"
            else None,
            small_stem=isinstance(children.get("maxpool"), nn.Identity)
            and isinstance(first, nn.Conv2d)
            and first.kernel_size == (3, 3),
            features=features,
            image_size=None if encoder.backbone.spatial or not _is_transformer(trunk) else views.size,
        ),
        input=InputFacts(size=views.size, mean=views.mean, std=views.std, canvas=canvas_limit(views.size)),
        feature_dim=encoder.feature_dim,
        head=tuple(_layer(module) for module in head_layers(encoder)),
        clip=config.clip,
        frame_by_frame=bool(config.clip) and over_time is None,
    )


_VIDEO_STAGES = ("stem", "layer1", "layer2", "layer3", "layer4")


def _is_transformer(trunk: nn.Module) -> bool:
    return hasattr(trunk, "patch_embed") or hasattr(trunk, "conv_proj")


def head_layers(encoder: Encoder) -> list[nn.Module]:
    """The head as a list of layers; a linear one is a list of one, that of a fine-tuned encoder is empty."""
    if isinstance(encoder.head, nn.Identity):
        return []
    return list(encoder.head) if isinstance(encoder.head, nn.Sequential) else [encoder.head]


def _layer(module: nn.Module) -> tuple[Any, ...]:
    if isinstance(module, nn.Linear):
        return ("linear", module.in_features, module.out_features, module.bias is not None)
    if isinstance(module, nn.BatchNorm1d):
        return ("batch norm", module.num_features, module.affine)
    assert isinstance(module, nn.ReLU), f"a head has no {type(module).__name__}"
    return ("relu",)


def backbone_tensors(encoder: Encoder, facts: BackboneFacts) -> dict[str, Tensor]:
    """The backbone's parameters and buffers under their library's own names; on the CPU, contiguous."""
    prefix = "features." if facts.features else ""
    state = encoder.backbone.trunk.state_dict()
    if facts.library == "torchvision-video":  # the trunk is a sequence of torchvision's own stages
        state = {f"{_VIDEO_STAGES[int(name.split('.')[0])]}{name[1:]}": one for name, one in state.items()}
    return {f"{prefix}{name}": tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def head_tensors(encoder: Encoder) -> dict[str, Tensor]:
    """The head's parameters and buffers, named as in a sequence of its layers."""
    state = nn.Sequential(*head_layers(encoder)).state_dict()
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def moved_to(blueprint: Blueprint, library: Literal["torchvision", "timm"], tensors: Mapping[str, Tensor]) -> Blueprint:
    """The same network as `library` has it. Raises UsageError, with the formats that work, where it has none."""
    facts = blueprint.backbone
    others = "--format safetensors, hf or onnx"
    if blueprint.clip:
        raise UsageError(f"{library}'s cards load encoders of images, and this one reads clips. Use {others}.")
    if facts.library == library:
        return blueprint
    if facts.library == "small-cnn":
        raise UsageError(
            f"{facts.name} is mocokit's own network; {library} has no model to load it into. Use {others}: a "
            "safetensors folder brings the few lines that build it."
        )
    if not (facts.name.startswith(RESNETS) and facts.name in backbone_names()):
        raise UsageError(
            f"{facts.name} is {facts.library}'s; {library} has no model with these layers. Use --format "
            f"{facts.library}, or {others}."
        )
    target = replace(facts, library=library, features=False)
    try:
        with torch.device("meta"):
            expected = standalone.build_backbone(asdict(target)).state_dict()
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{library} has no model called {facts.name}. Use --format {facts.library}.") from error
    if {name: t.shape for name, t in expected.items()} != {name: t.shape for name, t in tensors.items()}:
        raise UsageError(f"{library}'s {facts.name} has other layers. Use --format {facts.library}, or {others}.")
    return replace(blueprint, backbone=target)
