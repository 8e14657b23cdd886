"""Backbones over space and time, for clips [N, 3, T, H, W]: torchvision's 3-D ResNets and a small network.

All start from random weights. Each is a trunk that gives a map [N, C, t, h, w].
"""

from __future__ import annotations

from typing import Literal

from torch import nn

Stem = Literal["auto", "small", "standard"]

TORCHVISION_VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18")
"""Tran et al. 2018, "A closer look at spatiotemporal convolutions": R3D-18, MC3-18 and R(2+1)D-18."""
CLIP_BACKBONES = ("small-3d", *TORCHVISION_VIDEO)
_SMALL_WIDTHS = (8, 16, 32, 64)


class UnknownBackboneError(ValueError):
    """No backbone of that name, or not in the form that was asked for."""


def build_clip_trunk(name: str, stem: Stem) -> nn.Module | None:
    """The trunk of that name, or None when it is not one over time. `small-3d` takes widths (`small-3d-8-16`).

    Raises UnknownBackboneError for `stem: small` (none of them has another one) and for widths that make no network.
    """
    found = locate_clip_backbone(name)
    if found is None:
        return None
    if stem == "small":
        raise UnknownBackboneError(f"`stem: small` has no effect on {name}. Leave it out.")
    return small_3d(small_3d_widths(name)) if found[0] == "small-3d" else _torchvision(found[1])


def locate_clip_backbone(name: str) -> tuple[str, str] | None:
    """Where a backbone over time is taken from: ("small-3d" | "torchvision-video", its name there); None for others."""
    if name == "small-3d" or name.startswith("small-3d-"):
        return "small-3d", name
    bare = name.removeprefix("torchvision:")
    return ("torchvision-video", bare) if bare in TORCHVISION_VIDEO else None


def small_3d(widths: tuple[int, ...] = _SMALL_WIDTHS) -> nn.Sequential:
    """3 x 3 x 3 convolution, batch norm, ReLU per stage; every stage but the first halves the sides of the picture.

    Time is halved in every second of these, so that eight frames stay two at the end of four stages or more.
    """
    layers: list[nn.Module] = []
    channels = 3
    for stage, width in enumerate(widths):
        space, time = (1 if stage == 0 else 2), (2 if stage and stage % 2 == 0 else 1)
        layers += [
            nn.Conv3d(channels, width, 3, stride=(time, space, space), padding=1, bias=False),
            nn.BatchNorm3d(width),
            nn.ReLU(),
        ]
        channels = width
    return nn.Sequential(*layers)


def small_3d_widths(name: str) -> tuple[int, ...]:
    """The widths of `small-3d` or `small-3d-8-16-...`. Raises UnknownBackboneError."""
    digits = name.removeprefix("small-3d").removeprefix("-")
    if not digits:
        return _SMALL_WIDTHS
    parts = digits.split("-")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 4096 for part in parts):
        raise UnknownBackboneError(
            f"'{name}' is not small-3d-WIDTH-WIDTH..., with widths from 1 to 4096, such as small-3d-16-32-64."
        )
    return tuple(map(int, parts))


def _torchvision(name: str) -> nn.Module:
    from torchvision.models import video

    model = getattr(video, name)(weights=None)
    return nn.Sequential(*list(model.children())[:-2])  # less the average over space and time, and fc
