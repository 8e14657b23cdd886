"""Encoders: a backbone by name, a projection head, and the pair of them that momentum contrast trains.

Letters as in the papers: h = backbone output (what is kept), z = head output (what is contrasted), f_q the query
encoder, f_k the key encoder.
"""

from __future__ import annotations

import copy
import difflib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Stem = Literal["auto", "small", "standard"]
Head = Literal["linear", "mlp"]
SMALL_IMAGE = 64  # the side, in pixels, up to which "auto" gives a ResNet the small stem


class UnknownBackboneError(ValueError):
    """No backbone of that name, or not in the form that was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """What an encoder is made of."""

    backbone: str = "small-cnn"
    """`small-cnn`, `small-cnn-32-64-128`, a torchvision or timm model, or `torchvision:` / `timm:` and its name."""
    stem: Stem = "auto"
    """`small`: 3x3 stride-1 first convolution and no max-pool (ResNets on small images); `auto`: small up to 64 px."""
    head: Head = "mlp"
    """`linear` (MoCo v1) or `mlp` with one hidden layer as wide as h (MoCo v2, section 3)."""
    dim: int = 128
    """D, the number of dimensions of z (MoCo v1, section 3.3: 128)."""

    def __post_init__(self) -> None:
        if self.dim < 2:
            raise ValueError(f"`dim` must be at least 2. Got {self.dim}.")
        if self.stem not in ("auto", "small", "standard"):
            raise ValueError(f"`stem` must be auto, small or standard. Got {self.stem!r}.")
        if self.head not in ("linear", "mlp"):
            raise ValueError(f"`head` must be linear or mlp. Got {self.head!r}.")


class Backbone(nn.Module):
    """A trunk that gives a spatial map [N, C, h, w], averaged over space into h [N, C]; or one that gives h itself."""

    def __init__(self, trunk: nn.Module, *, spatial: bool) -> None:
        super().__init__()
        self.trunk = trunk
        self.spatial = spatial

    def spatial_map(self, x: Tensor) -> Tensor:
        """The last feature map, [N, C, h, w]. Raises ValueError for a backbone without one (a ViT)."""
        if not self.spatial:
            raise ValueError("This backbone has no spatial feature map.")
        out: Tensor = self.trunk(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """h: [N, C]."""
        out: Tensor = self.trunk(x)
        return out.mean((2, 3)) if self.spatial else out


class Encoder(nn.Module):
    """Backbone and head. `forward` gives z, not normalised; `features` gives h. Both float32 whatever the precision.

    autocast: None for float32, or torch.bfloat16 to run backbone and head under autocast. Parameters stay float32.
    """

    def __init__(self, backbone: Backbone, head: nn.Module, feature_dim: int, dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.feature_dim = feature_dim
        self.dim = dim
        self.autocast: torch.dtype | None = None

    def h_and_z(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """h [N, H] and z [N, D] of images x [N, 3, H, W], float32."""
        with self._precision(x):
            h = self.backbone(x)
            z = self.head(h)
        return h.float(), z.float()

    def features(self, x: Tensor) -> Tensor:
        """h alone, float32 [N, H]."""
        with self._precision(x):
            h: Tensor = self.backbone(x)
        return h.float()

    def spatial_map(self, x: Tensor) -> Tensor:
        """The backbone's last feature map, float32 [N, C, h, w]."""
        with self._precision(x):
            out = self.backbone.spatial_map(x)
        return out.float()

    def forward(self, x: Tensor) -> Tensor:
        """z, float32 [N, D]."""
        return self.h_and_z(x)[1]

    def _precision(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None)


class EncoderPair:
    """The query encoder f_q, moved by gradient, and the key encoder f_k, moved by EMA only.

    f_k starts as a copy of the whole of f_q, head included (He et al. 2020, Algorithm 1), and takes no gradient.
    """

    def __init__(self, query: Encoder) -> None:
        self.query = query
        self.key = copy.deepcopy(query)
        self.key.requires_grad_(False)
        self.theta_q = [p for p in query.parameters() if p.requires_grad]
        names = {name for name, p in query.named_parameters() if p.requires_grad}
        self.theta_k = [p for name, p in self.key.named_parameters() if name in names]

    def train(self, mode: bool = True) -> None:
        """Put both encoders into train mode: f_k's batch norm normalises by its own key batch."""
        self.query.train(mode)
        self.key.train(mode)


def build_encoder(config: EncoderConfig, *, image_size: int, seed: int) -> Encoder:
    """An encoder with random weights that are a function of `seed` alone.

    image_size: the side of the square views in pixels; it decides `stem="auto"`. Raises UnknownBackboneError.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = _build_backbone(config, image_size)
        _switch_off_dropout(backbone)
        with torch.no_grad():
            backbone.eval()
            feature_dim = backbone(torch.zeros(1, 3, image_size, image_size)).shape[1]
        backbone.train()
        if config.head == "linear":
            head: nn.Module = nn.Linear(feature_dim, config.dim)
        else:
            head = nn.Sequential(nn.Linear(feature_dim, feature_dim), nn.ReLU(), nn.Linear(feature_dim, config.dim))
    return Encoder(backbone, head, feature_dim, config.dim)


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


# ------------------------------------------------------------------------------------------------ backbones


def small_cnn(widths: tuple[int, ...] = (32, 64, 128, 256)) -> nn.Sequential:
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


def _build_backbone(config: EncoderConfig, image_size: int) -> Backbone:
    source, _, bare = config.backbone.rpartition(":")
    small = config.stem == "small" or (config.stem == "auto" and image_size <= SMALL_IMAGE)
    if source == "" and (bare == "small-cnn" or bare.startswith("small-cnn-")):
        if config.stem == "small":
            raise UnknownBackboneError(
                f"`stem: small` has no effect on {bare}, whose stem is small already. Leave it out."
            )
        return Backbone(small_cnn(*_widths(bare)), spatial=True)
    for library, names, build in _LIBRARIES:
        if source in ("", library) and bare in names():
            backbone = build(bare, image_size)
            if small and not _shrink_stem(backbone) and config.stem == "small":
                raise UnknownBackboneError(
                    f"`stem: small` is known for ResNets. {bare} has none: use `stem: standard`."
                )
            return backbone
    if source not in ("", "torchvision", "timm"):
        raise UnknownBackboneError(
            f"Unknown backbone library '{source}' in '{config.backbone}'. Use torchvision: or timm:."
        )
    near = difflib.get_close_matches(bare, backbone_names(), n=1, cutoff=0.6)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise UnknownBackboneError(
        f"No backbone is called '{config.backbone}'.{hint} Use small-cnn, or any torchvision or timm model name."
    )


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
