"""The lines that load an exported encoder, as they stand in its card; tests run them in a process without mocokit."""

from __future__ import annotations

from mocokit.exporting.blueprint import RESNETS, Blueprint, InputFacts

SMALL_STEM = "model.conv1, model.maxpool = torch.nn.Conv2d(3, {width}, 3, padding=1, bias=False), torch.nn.Identity()"


NUMPY_CLIP = "numpy.stack([transform(image) for image in frames], 1)"


def own_model(name: str = "image") -> str:
    """With the model.py that the folder brings. name: `image`, or `frames` of an encoder of clips."""
    return f"""\
from model import load
encoder, transform = load()
h = encoder(transform({name})[None])"""


def torchvision_model(blueprint: Blueprint, stem_width: int) -> str:
    """With torchvision's own model."""
    facts = blueprint.backbone
    size = f", image_size={facts.image_size}" if facts.image_size is not None else ""
    lines = [
        "import torch, torchvision",
        "from safetensors.torch import load_file",
        f'model = torchvision.models.get_model("{facts.name}", weights=None{size})',
    ]
    if facts.image_size is not None:
        lines.append("model.heads = torch.nn.Identity()")
    elif facts.features:
        last = "AdaptiveAvgPool2d(1)" if facts.name.startswith("squeezenet") else "Flatten()"
        lines.append(f"model.avgpool, model.classifier = torch.nn.AdaptiveAvgPool2d(1), torch.nn.{last}")
    else:
        lines.append("model.fc = torch.nn.Identity()")
    if facts.small_stem:
        lines.append(SMALL_STEM.format(width=stem_width))
    return "\n".join([*lines, *_weights(), "h = model(transform(image)[None])"])


def torchvision_transform(facts: InputFacts) -> str:
    """The preprocessing, with torchvision's transforms."""
    return f"""\
from torchvision import transforms as T
transform = T.Compose([
    T.Resize({facts.size}), T.CenterCrop({facts.size}), T.ToTensor(),
    T.Normalize({list(facts.mean)}, {list(facts.std)}),
])"""


def detection_backbone(blueprint: Blueprint, stem_width: int) -> str | None:
    """The same model as the feature pyramid that torchvision's detectors take; None where it has no four stages."""
    facts = blueprint.backbone
    if not facts.name.startswith(RESNETS):
        return None
    width = blueprint.feature_dim
    stages = [width // 8, width // 4, width // 2, width]
    return f"""\
from torchvision.models.detection.backbone_utils import BackboneWithFPN
stages = {{"layer1": "0", "layer2": "1", "layer3": "2", "layer4": "3"}}
backbone = BackboneWithFPN(model, stages, {stages}, 256)  # for FasterRCNN(backbone, ...), MaskRCNN, RetinaNet"""


def timm_model(blueprint: Blueprint, stem_width: int) -> str:
    """With timm's own model."""
    facts = blueprint.backbone
    size = f", img_size={facts.image_size}" if facts.image_size is not None else ""
    pooled = facts.image_size is not None or facts.name.startswith(RESNETS)
    lines = ["import timm", "from safetensors.torch import load_file"]
    if facts.small_stem:
        lines.insert(0, "import torch")
    lines.append(f'model = timm.create_model("{facts.name}", num_classes=0{size})')
    if not pooled:
        lines.append('model.reset_classifier(0, "")')
    if facts.small_stem:
        lines.append(SMALL_STEM.format(width=stem_width))
    lines += [*_weights(), "h = model(transform(image)[None])"]
    return "\n".join([*lines, *([] if pooled else ["h = h.mean((2, 3)) if h.ndim == 4 else h"])])


def hub_folder() -> str:
    """With timm, from a folder as a hub holds it; `hf-hub:owner/name` in place of `local-dir:.` once it is there."""
    return """\
import timm
model = timm.create_model("local-dir:.", pretrained=True).eval()
h = model(transform(image)[None])"""


def timm_transform(facts: InputFacts) -> str:
    """The preprocessing, with timm's transforms."""
    return f"""\
transform = timm.data.create_transform(
    (3, {facts.size}, {facts.size}), interpolation="bilinear", crop_pct=1.0,
    mean={list(facts.mean)}, std={list(facts.std)},
)"""


def onnx_model(made: str = "transform(image)") -> str:
    """With onnxruntime and numpy. made: what makes one input."""
    return f"""\
import onnxruntime
session = onnxruntime.InferenceSession("encoder.onnx")
h = session.run(["h"], {{"images": {made}[None]}})[0]"""


def numpy_transform(facts: InputFacts) -> str:
    """The preprocessing, with Pillow and numpy."""
    return f"""\
import numpy
from PIL import Image, ImageOps
mean, std = numpy.array({list(facts.mean)}), numpy.array({list(facts.std)})

def transform(image):
    square = ImageOps.fit(image.convert("RGB"), ({facts.size}, {facts.size}), Image.Resampling.BILINEAR)
    x = (numpy.asarray(square) / 255 - mean) / std
    return x.transpose(2, 0, 1).astype(numpy.float32)"""


def head_lines(blueprint: Blueprint) -> str:
    """The projection head beside the model, where it was exported."""
    layers = []
    for kind, *sizes in blueprint.head:
        if kind == "linear":
            bias = "" if sizes[2] else ", bias=False"
            layers.append(f"torch.nn.Linear({sizes[0]}, {sizes[1]}{bias})")
        elif kind == "batch norm":
            affine = "" if sizes[1] else ", affine=False"
            layers.append(f"torch.nn.BatchNorm1d({sizes[0]}{affine})")
        else:
            layers.append("torch.nn.ReLU()")
    return f"""\
import torch
head = torch.nn.Sequential({", ".join(layers)})
head.load_state_dict(load_file("head.safetensors"))
z = head.eval()(h)"""


def _weights() -> list[str]:
    return ['model.load_state_dict(load_file("model.safetensors"))', "model.eval()"]
