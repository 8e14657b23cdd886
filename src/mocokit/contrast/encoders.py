"""Encoders: a backbone, a projection head, and the pair of them that momentum contrast trains.

Letters as in the papers: h = backbone output (what is kept), z = head output (what is contrasted), f_q the query
encoder, f_k the key encoder.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from mocokit.contrast.backbones import (
    Backbone,
    Stem,
    UnknownBackboneError,
    backbone_names,
    build_backbone,
    freeze_patches_,
)
from mocokit.contrast.batch_norm import batch_norms, in_groups

Head = Literal["linear", "mlp", "mlp-bn", "mlp-bn-all"]
Predictor = Literal["none", "mlp-bn", "mlp-bn-all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """What an encoder is made of, and the predictor on top of the query encoder."""

    backbone: str = "small-cnn"
    """`small-cnn`, `small-cnn-32-64-128`, a torchvision or timm model, or `torchvision:` / `timm:` and its name."""
    stem: Stem = "auto"
    """`small`: 3x3 stride-1 first convolution and no max-pool (ResNets on small images); `auto`: small up to 64 px."""
    head: Head = "mlp"
    """`linear` (MoCo v1), `mlp` (v2), `mlp-bn` = batch norm in hidden layers (BYOL), `-all` = after the last too."""
    head_layers: int = 2
    """Layers of an MLP head (MoCo v3 with a ViT: 3)."""
    hidden: int | None = None
    """Width of the hidden layers of head and predictor (BYOL, MoCo v3: 4096); as wide as h when None (MoCo v2)."""
    dim: int = 128
    """D, the number of dimensions of z (MoCo v1, section 3.3: 128; MoCo v3 and BYOL: 256)."""
    predictor: Predictor = "none"
    """A 2-layer MLP on f_q's side alone, with batch norm as in `head` (BYOL, MoCo v3)."""
    clip: int = 0
    """Frames of a clip, 0 for images. An image backbone then encodes each frame by itself and averages over time."""
    freeze_patches: bool = False
    """Leave a ViT's patch projection at its random start (MoCo v3, section 4.2)."""

    def __post_init__(self) -> None:
        if self.clip < 0 or self.clip == 1:
            raise ValueError(f"`clip` must be 0 (images) or at least 2 frames. Got {self.clip}.")
        if self.dim < 2:
            raise ValueError(f"`dim` must be at least 2. Got {self.dim}.")
        if self.stem not in ("auto", "small", "standard"):
            raise ValueError(f"`stem` must be auto, small or standard. Got {self.stem!r}.")
        if self.head not in ("linear", "mlp", "mlp-bn", "mlp-bn-all"):
            raise ValueError(f"`head` must be linear, mlp, mlp-bn or mlp-bn-all. Got {self.head!r}.")
        if self.predictor not in ("none", "mlp-bn", "mlp-bn-all"):
            raise ValueError(f"`predictor` must be none, mlp-bn or mlp-bn-all. Got {self.predictor!r}.")
        if not 2 <= self.head_layers <= 8:
            raise ValueError(f"`head_layers` must lie in [2, 8]; one layer is `head: linear`. Got {self.head_layers}.")
        if self.hidden is not None and self.hidden < 2:
            raise ValueError(f"`hidden` must be at least 2. Got {self.hidden}.")
        if self.head == "linear" and self.head_layers != 2:
            raise ValueError("`head_layers` has no effect with `head: linear`. Leave it out.")
        if self.head == "linear" and self.predictor == "none" and self.hidden is not None:
            raise ValueError("`hidden` has no effect with `head: linear` and no predictor. Leave it out.")


class Encoder(nn.Module):
    """Backbone and head. `forward` gives z, not normalised; `features` gives h. Both float32 whatever the precision.

    autocast: None for float32, or torch.bfloat16 to run backbone and head under autocast. Parameters stay float32.
    bn_groups: in train mode, batch norm's statistics are those of each of so many parts of the batch.
    """

    def __init__(self, backbone: Backbone, head: nn.Module, feature_dim: int, dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.feature_dim = feature_dim
        self.dim = dim
        self.autocast: torch.dtype | None = None
        self.bn_groups = 1

    def h_and_z(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """h [N, H] and z [N, D] of images x [N, 3, H, W], or clips [N, 3, T, H, W], float32."""
        with self._precision(x):
            h = in_groups(self.backbone, x, self._groups)
            z = in_groups(self.head, h, self._groups)
        return h.float(), z.float()

    def features(self, x: Tensor) -> Tensor:
        """h alone, float32 [N, H]."""
        with self._precision(x):
            h = in_groups(self.backbone, x, self._groups)
        return h.float()

    def spatial_map(self, x: Tensor) -> Tensor:
        """The backbone's last feature map, float32 [N, C, h, w]."""
        with self._precision(x):
            out = in_groups(self.backbone.spatial_map, x, self._groups)
        return out.float()

    def forward(self, x: Tensor) -> Tensor:
        """z, float32 [N, D]."""
        return self.h_and_z(x)[1]

    def normalise_in_groups_(self, groups: int) -> None:
        """Set `bn_groups`. Raises ValueError where that can't have its effect: without batch norm, or with SyncBN."""
        norms = batch_norms(self)
        if groups > 1 and not norms:
            raise ValueError("`bn_groups` has no effect on an encoder without batch norm. Leave it out.")
        if groups > 1 and any(isinstance(norm, nn.SyncBatchNorm) for norm in norms):
            raise ValueError("SyncBatchNorm shares statistics between all groups: use `bn_groups` or SyncBN, not both.")
        self.bn_groups = groups

    @property
    def _groups(self) -> int:
        return self.bn_groups if self.training else 1

    def _precision(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None)


class EncoderPair:
    """The query encoder f_q, moved by gradient, and the key encoder f_k, moved by EMA only.

    f_k starts as a copy of the whole of f_q, head included (He et al. 2020, Algorithm 1), and takes no gradient. A
    predictor belongs to the query side alone: trained by gradient, no part of the EMA (Chen et al. 2021, section 3).
    momentum=False: one encoder is both (SimCLR, "end-to-end" in He et al. 2020, figure 2a); `key` is `query` then.

    theta_q, theta_k: the parameters that the EMA couples, in the same order. trained: those that an optimiser moves,
    by name: theta_q, then the predictor's under `predictor.`.
    """

    def __init__(self, query: Encoder, predictor: nn.Module | None = None, *, momentum: bool = True) -> None:
        self.query = query
        self.predictor = predictor
        moving = {name: p for name, p in query.named_parameters() if p.requires_grad}
        self.theta_q = list(moving.values())
        if momentum:
            self.key = copy.deepcopy(query)
            self.key.requires_grad_(False)
            self.theta_k = [p for name, p in self.key.named_parameters() if name in moving]
        else:
            self.key, self.theta_k = query, []
        self.trained = dict(moving)
        if predictor is not None:
            self.trained |= {f"predictor.{name}": p for name, p in predictor.named_parameters()}

    def predict(self, x: Tensor) -> Tensor:
        """The query side's output [N, D] for images x, not normalised: z, or the predictor's of z where there is one.

        The predictor runs in float32 whatever the encoder's precision.
        """
        z: Tensor = self.query(x)
        if self.predictor is None:
            return z
        out: Tensor = self.predictor(z)
        return out

    def train(self, mode: bool = True) -> None:
        """Put all parts into train mode: f_k's batch norm normalises by its own key batch."""
        self.query.train(mode)
        self.key.train(mode)
        if self.predictor is not None:
            self.predictor.train(mode)


def build_encoder(config: EncoderConfig, *, image_size: int, seed: int) -> Encoder:
    """An encoder with random weights that are a function of `seed` alone.

    image_size: the side of the square views in pixels; it decides `stem="auto"`. Raises UnknownBackboneError.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = build_backbone(config.backbone, config.stem, image_size, config.clip)
        if config.freeze_patches:
            freeze_patches_(backbone, config.backbone)
        with torch.no_grad():
            backbone.eval()
            time = (config.clip,) if config.clip else ()
            feature_dim = backbone(torch.zeros(1, 3, *time, image_size, image_size)).shape[1]
        backbone.train()
        if config.head == "linear":
            head: nn.Module = nn.Linear(feature_dim, config.dim)
        else:
            hidden = [config.hidden or feature_dim] * (config.head_layers - 1)
            head = mlp([feature_dim, *hidden, config.dim], config.head)
    return Encoder(backbone, head, feature_dim, config.dim)


def build_predictor(config: EncoderConfig, *, feature_dim: int, seed: int) -> nn.Module | None:
    """The predictor [N, D] -> [N, D] that goes with an encoder, or None without one.

    feature_dim: H, its hidden width where `config.hidden` is None. Weights are a function of `seed` alone, others
    than the encoder's.
    """
    if config.predictor == "none":
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed + 0x9E3779B97F4A7C15) % 2**63)
        return mlp([config.dim, config.hidden or feature_dim, config.dim], config.predictor)


def mlp(widths: Sequence[int], kind: Head) -> nn.Sequential:
    """Linear layers between `widths` with ReLU in between.

    kind: `mlp` has no batch norm; `mlp-bn` has it before each ReLU; `mlp-bn-all` after the last layer too, without
    scale and shift (SimCLR and MoCo v3). A layer before a batch norm has no bias of its own.
    """
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths), start=1):
        last = number == len(widths) - 1
        norm = kind == "mlp-bn-all" or (kind == "mlp-bn" and not last)
        layers.append(nn.Linear(before, after, bias=not norm))
        if norm:
            layers.append(nn.BatchNorm1d(after, affine=not last))
        if not last:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


__all__ = [
    "Backbone",
    "Encoder",
    "EncoderConfig",
    "EncoderPair",
    "UnknownBackboneError",
    "backbone_names",
    "build_encoder",
    "build_predictor",
    "mlp",
]
