"""The encoder that lies beside this file. It needs torch, safetensors and Pillow; the library of its backbone, if any.

    from model import load
    encoder, transform = load()
    h = encoder(transform(Image.open("photo.jpg"))[None])

An encoder of clips takes lists of frames instead: encoder(transform([frame, frame, ...])[None]).

Written by mocokit, which is not needed to use it. Apache License 2.0.
"""

# This module is copied, as it is, into exported folders under the name model.py. It may import nothing of mocokit.

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch import Tensor, nn

Transform = Callable[[Image.Image], Tensor]
ClipTransform = Callable[[Sequence[Image.Image]], Tensor]


class Encoder(nn.Module):
    """Images float32 [N, 3, size, size], as `transform` makes them, to h [N, H]; `h_and_z` adds the head's z [N, D].

    Clips are [N, 3, T, size, size]. frame_by_frame: the backbone reads images; each frame is encoded by itself, and h
    is the mean over time.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module | None, frame_by_frame: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.frame_by_frame = frame_by_frame

    def forward(self, x: Tensor) -> Tensor:
        """h, float32 [N, H]."""
        if self.frame_by_frame:
            each = self._pooled(x.transpose(1, 2).flatten(0, 1))
            return each.view(len(x), x.shape[2], -1).mean(1)
        return self._pooled(x)

    def _pooled(self, x: Tensor) -> Tensor:
        out: Tensor = self.backbone(x)
        return out.flatten(2).mean(2) if out.ndim > 2 else out

    def h_and_z(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """h [N, H] and z [N, D], not normalised. Raises ValueError when the head was not loaded."""
        if self.head is None:
            raise ValueError("The head was not loaded. Use load(head=True) on a folder that was exported with --head.")
        h = self(x)
        return h, self.head(h)


def load(folder: str | Path | None = None, *, head: bool = False) -> tuple[Encoder, Transform | ClipTransform]:
    """The encoder of `folder` (this file's own by default) in eval mode, and the transform its images need.

    head: also load the projection head, where it was exported.
    """
    place = Path(__file__).parent if folder is None else Path(folder)
    facts = json.loads((place / "encoder.json").read_text("utf-8"))
    backbone = build_backbone(facts["backbone"])
    backbone.load_state_dict(load_file(place / "model.safetensors"))
    projection = None
    if head:
        projection = build_head(facts["head"])
        projection.load_state_dict(load_file(place / "head.safetensors"))
    encoder = Encoder(backbone, projection, facts["frame_by_frame"]).eval()
    return encoder, make_clip_transform(facts["input"]) if facts["clip"] else make_transform(facts["input"])


def build_backbone(facts: dict[str, Any]) -> nn.Module:
    """The network without weights: its output is h, or the feature map whose mean over space is h."""
    library, name = facts["library"], facts["name"]
    if library == "small-cnn":
        return _small_cnn(facts["widths"])
    if library == "small-3d":
        return _small_3d(facts["widths"])
    model: nn.Module
    if library == "timm":
        import timm

        if facts["image_size"] is not None:
            return timm.create_model(name, num_classes=0, img_size=facts["image_size"])  # type: ignore[no-any-return]
        model = timm.create_model(name, num_classes=0)
        model.reset_classifier(0, "")  # type: ignore[operator]
    else:
        import torchvision

        if library == "torchvision-video":
            model = torchvision.models.get_model(name, weights=None)
            model.fc = nn.Identity()
        elif facts["image_size"] is not None:
            model = torchvision.models.get_model(name, weights=None, image_size=facts["image_size"])
            model.heads = nn.Identity()
        elif facts["features"]:
            model = torchvision.models.get_model(name, weights=None)
            model.avgpool = nn.AdaptiveAvgPool2d(1)
            model.classifier = nn.AdaptiveAvgPool2d(1) if name.startswith("squeezenet") else nn.Flatten()
        else:
            model = torchvision.models.get_model(name, weights=None)
            model.fc = nn.Identity()
    if facts["small_stem"]:
        model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, stride=1, padding=1, bias=False)  # type: ignore[arg-type,union-attr]
        model.maxpool = nn.Identity()
    return model


def _small_cnn(widths: list[int]) -> nn.Module:
    """3x3 convolution, batch norm and ReLU per stage; each stage but the first halves the resolution."""
    layers: list[nn.Module] = []
    channels = 3
    for stage, width in enumerate(widths):
        layers += [nn.Conv2d(channels, width, 3, stride=min(stage + 1, 2), padding=1, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers)


def _small_3d(widths: list[int]) -> nn.Module:
    """3x3x3 convolution, batch norm and ReLU per stage; all but the first halve the sides, every second one time."""
    layers: list[nn.Module] = []
    channels = 3
    for stage, width in enumerate(widths):
        space, time = min(stage + 1, 2), 2 if stage and stage % 2 == 0 else 1
        layers += [nn.Conv3d(channels, width, 3, stride=(time, space, space), padding=1, bias=False)]
        layers += [nn.BatchNorm3d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers)


def build_head(layers: list[list[Any]]) -> nn.Sequential:
    """The projection head without weights, from its list of layers."""
    kinds: dict[str, Callable[..., nn.Module]] = {
        "linear": lambda before, after, bias: nn.Linear(before, after, bias=bias),
        "batch norm": lambda width, affine: nn.BatchNorm1d(width, affine=affine),
        "relu": nn.ReLU,
    }
    return nn.Sequential(*(kinds[kind](*sizes) for kind, *sizes in layers))


def make_transform(facts: dict[str, Any]) -> Transform:
    """Picture -> float32 [3, size, size]: upright, on white, central square, antialiased, normalised.

    Pictures whose longer side exceeds `canvas` pixels are first shrunk to it (bicubic); then the central square is
    resized to `size` (bilinear).
    """
    size, canvas = facts["size"], facts["canvas"]
    mean, std = (torch.tensor(facts[name])[:, None, None] for name in ("mean", "std"))

    def transform(image: Image.Image) -> Tensor:
        picture = _on_white(ImageOps.exif_transpose(image))
        width, height = picture.size
        if max(width, height) > canvas:
            shrink = canvas / max(width, height)
            width, height = max(1, round(width * shrink)), max(1, round(height * shrink))
            picture = _shrunk(picture, width, height, by_pillow=shrink <= 0.25 or min(width, height) == 1)
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        square = picture.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BILINEAR)
        levels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(size, size, 3)
        return (levels.permute(2, 0, 1) / 255 - mean) / std

    return transform


def make_clip_transform(facts: dict[str, Any]) -> ClipTransform:
    """Frames of one size -> float32 [3, T, size, size], each as `make_transform` makes it."""
    one = make_transform(facts)
    return lambda frames: torch.stack([one(frame) for frame in frames], 1)


def _shrunk(picture: Image.Image, width: int, height: int, *, by_pillow: bool) -> Image.Image:
    """As training shrinks pictures: by torch's bicubic down to a quarter, further by Pillow's."""
    if by_pillow:
        return picture.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)
    levels = nn.functional.interpolate(pixels.permute(2, 0, 1)[None], (height, width), mode="bicubic", antialias=True)
    return Image.frombytes("RGB", (width, height), bytes(levels[0].permute(1, 2, 0).flatten().tolist()))


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    over = image.convert("RGBA")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(over, mask=over)
    return white
