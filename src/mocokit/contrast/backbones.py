"""Backbones by name: the built-in small network, and torchvision's and timm's, each as a trunk that gives h."""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from mocokit.contrast.clip_backbones import (
    CLIP_BACKBONES,
    Stem,
    UnknownBackboneError,
    build_clip_trunk,
)

__all__ = ["Backbone", "Stem", "UnknownBackboneError", "backbone_names", "build_backbone", "freeze_patches_"]

SMALL_IMAGE = 64  # the side, in pixels, up to which "auto" gives a ResNet the small stem


SMALL_CNN_WIDTHS = (32, 64, 128, 256)
Time = Literal["none", "mean", "inside"]


class Backbone(nn.Module):
    """A trunk that gives a spatial map [N, C, h, w], averaged over space into h [N, C]; or one that gives h itself.

    time: "none" for images. For clips x [N, 3, T, H, W]: "mean" encodes each frame by itself and averages over time,
    "inside" is a trunk over space and time that gives [N, C, t, h, w], averaged over t.
    """

    def __init__(self, trunk: nn.Module, *, spatial: bool, time: Time = "none") -> None:
        super().__init__()
        self.trunk = trunk
        self.spatial = spatial
        self.time = time

    def spatial_map(self, x: Tensor) -> Tensor:
        """The last feature map, [N, C, h, w]. Raises ValueError for a backbone without one (a ViT)."""
        if not self.spatial:
            raise ValueError("This backbone has no spatial feature map.")
        return self._out(x)

    def forward(self, x: Tensor) -> Tensor:
        """h: [N, C]."""
        out = self._out(x)
        return out.mean((2, 3)) if self.spatial else out

    def _out(self, x: Tensor) -> Tensor:
        if self.time == "mean":
            frames: Tensor = self.trunk(x.transpose(1, 2).flatten(0, 1))
            return frames.view(len(x), x.shape[2], *frames.shape[1:]).mean(1)
        out: Tensor = self.trunk(x)
        return out.mean(2) if self.time == "inside" else out


def build_backbone(name: str, stem: Stem, image_size: int, clip: int = 0) -> Backbone:
    """The backbone of that name with weights from torch's global generator, without dropout.

    image_size: the side of the square views in pixels; it decides `stem="auto"`. clip: frames of a clip, 0 for images.
    With clips a backbone for images encodes each frame by itself. Raises UnknownBackboneError.
    """
    over_time = build_clip_trunk(name, stem)
    if over_time is not None and not clip:
        raise UnknownBackboneError(f"{name} is for clips of video: add `--video clips`, or name one for images.")
    if over_time is not None:
        backbone = Backbone(over_time, spatial=True, time="inside")
    else:
        backbone = _build(name, stem, image_size)
        backbone.time = "mean" if clip else "none"
    _switch_off_dropout(backbone)
    return backbone


def freeze_patches_(backbone: Backbone, name: str) -> None:
    """Take the patch projection of a ViT out of training: it stays random (Chen et al. 2021, section 4.2).

    The largest gradients of an unstable ViT start in this layer; without it the training is steadier. What takes no
    gradient is in neither theta_q nor theta_k. Raises UnknownBackboneError for a backbone without one.
    """
    in_timm, in_torchvision = getattr(backbone.trunk, "patch_embed", None), getattr(backbone.trunk, "conv_proj", None)
    projection = getattr(in_timm, "proj", in_torchvision)
    if not isinstance(projection, nn.Module):
        raise UnknownBackboneError(f"`freeze_patches` is for vision transformers. {name} has no patch projection.")
    projection.requires_grad_(False)


def _switch_off_dropout(module: nn.Module) -> None:
    # The views are the only randomness in training; anything else would draw from a generator with a state,
    # which resuming could not restore. MoCo's encoders have no dropout.
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        elif hasattr(child, "drop_prob"):  # timm's DropPath
            child.drop_prob = 0.0  # type: ignore[assignment]
        elif type(child).__name__ == "StochasticDepth":  # torchvision's
            child.p = 0.0  # type: ignore[assignment]


def small_cnn(widths: tuple[int, ...] = SMALL_CNN_WIDTHS) -> nn.Sequential:
    """The built-in network for small images on few cores: 3x3 convolution, batch norm, ReLU per stage.

    The first stage keeps the resolution, each later one halves it. Output: [N, widths[-1], s, s] with
    s = image side / 2^(stages - 1), rounded up.
    """
    layers: list[nn.Module] = []
    channels = 3
    for stage, width in enumerate(widths):
        layers += [
            nn.Conv2d(channels, width, 3, stride=1 if stage == 0 else 2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels = width
    return nn.Sequential(*layers)


def _build(name: str, stem: Stem, image_size: int) -> Backbone:
    source, _, bare = name.rpartition(":")
    small = stem == "small" or (stem == "auto" and image_size <= SMALL_IMAGE)
    if source == "" and (bare == "small-cnn" or bare.startswith("small-cnn-")):
        if stem == "small":
            raise UnknownBackboneError(
                f"`stem: small` has no effect on {bare}, whose stem is small already. Leave it out."
            )
        return Backbone(small_cnn(*_widths(bare)), spatial=True)
    for library, names, build in _LIBRARIES:
        if source in ("", library) and bare in names():
            backbone = build(bare, image_size)
            if small and not _shrink_stem(backbone) and stem == "small":
                raise UnknownBackboneError(
                    f"`stem: small` is known for ResNets. {bare} has none: use `stem: standard`."
                )
            return backbone
    if source not in ("", "torchvision", "timm"):
        raise UnknownBackboneError(f"Unknown backbone library '{source}' in '{name}'. Use torchvision: or timm:.")
    near = difflib.get_close_matches(bare, [*backbone_names(), *CLIP_BACKBONES], n=1, cutoff=0.6)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise UnknownBackboneError(
        f"No backbone is called '{name}'.{hint} Use small-cnn, or any torchvision or timm model name."
    )


def locate_backbone(name: str) -> tuple[str, str]:
    """Where a backbone of that name is taken from: ("small-cnn" | "torchvision" | "timm", its name there).

    Raises UnknownBackboneError.
    """
    source, _, bare = name.rpartition(":")
    if source == "" and (bare == "small-cnn" or bare.startswith("small-cnn-")):
        return "small-cnn", bare
    for library, names, _build in _LIBRARIES:
        if source in ("", library) and bare in names():
            return library, bare
    raise UnknownBackboneError(f"No backbone is called '{name}'.")


def small_cnn_widths(name: str) -> tuple[int, ...]:
    """The widths of `small-cnn` or `small-cnn-8-16-...`. Raises UnknownBackboneError."""
    given = _widths(name)
    return given[0] if given else SMALL_CNN_WIDTHS


def _widths(name: str) -> tuple[tuple[int, ...], ...]:
    digits = name.removeprefix("small-cnn").removeprefix("-")
    if not digits:
        return ()
    try:
        widths = tuple(int(part) for part in digits.split("-"))
    except ValueError:
        widths = ()
    if not widths or any(not 1 <= width <= 4096 for width in widths):
        raise UnknownBackboneError(
            f"'{name}' is not small-cnn-WIDTH-WIDTH..., with widths from 1 to 4096, such as small-cnn-32-64-128."
        )
    return (widths,)


def _shrink_stem(backbone: Backbone) -> bool:
    """Give a ResNet a 3x3 stride-1 first convolution and no max-pool (SimCLR, appendix B.9). False if none."""
    resnet = dict(backbone.trunk.named_children())
    first, pool = resnet.get("conv1"), resnet.get("maxpool")
    if not isinstance(first, nn.Conv2d) or pool is None or "layer1" not in resnet:
        return False
    conv = nn.Conv2d(3, first.out_channels, 3, stride=1, padding=1, bias=first.bias is not None)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    setattr(backbone.trunk, "conv1", conv)  # noqa: B010
    setattr(backbone.trunk, "maxpool", nn.Identity())  # noqa: B010
    return True


_TORCHVISION_RESNETS = ("resnet", "resnext", "wide_resnet")
_TORCHVISION_FEATURES = ("convnext_", "efficientnet_", "mobilenet_", "vgg", "squeezenet")


def _torchvision_names() -> set[str]:
    """torchvision's models that end in one feature map or a ViT token; the others are taken from timm."""
    import torchvision

    usable = (*_TORCHVISION_RESNETS, *_TORCHVISION_FEATURES, "vit_")
    return {name for name in torchvision.models.list_models(module=torchvision.models) if name.startswith(usable)}


def _build_torchvision(name: str, image_size: int) -> Backbone:
    import torchvision

    if name.startswith("vit_"):
        model = torchvision.models.get_model(name, weights=None, image_size=image_size)
        model.heads = nn.Identity()
        return Backbone(model, spatial=False)
    children = OrderedDict(torchvision.models.get_model(name, weights=None).named_children())
    if name.startswith(_TORCHVISION_FEATURES):
        return Backbone(children["features"], spatial=True)
    return Backbone(nn.Sequential(OrderedDict(list(children.items())[:-2])), spatial=True)  # less avgpool and fc


def _timm_names() -> set[str]:
    import timm

    return set(timm.list_models())


def _build_timm(name: str, image_size: int) -> Backbone:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=0)
    if hasattr(model, "patch_embed"):  # transformers: positions belong to one image size; pooling is the model's own
        return Backbone(timm.create_model(name, pretrained=False, num_classes=0, img_size=image_size), spatial=False)
    model.reset_classifier(0, "")  # no pooling: the spatial map comes out
    with torch.no_grad():
        out = model.eval()(torch.zeros(1, 3, image_size, image_size))
    return Backbone(model, spatial=out.ndim == 4)


_LIBRARIES: tuple[tuple[str, Callable[[], set[str]], Callable[[str, int], Backbone]], ...] = (
    ("torchvision", _torchvision_names, _build_torchvision),
    ("timm", _timm_names, _build_timm),
)


def backbone_names() -> list[str]:
    """Every name `EncoderConfig.backbone` takes, without prefixes; `small-cnn` also takes widths."""
    return ["small-cnn", *sorted(_torchvision_names() | _timm_names())]
