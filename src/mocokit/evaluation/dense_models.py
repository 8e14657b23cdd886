"""torchvision's detection and segmentation models on a run's backbone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.segmentation.deeplabv3 import DeepLabHead
from torchvision.models.segmentation.fcn import FCNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from mocokit.contrast.backbones import Backbone
from mocokit.evaluation.pyramid import Pyramid

Triple = Sequence[float]
ANCHOR = 8
"""Sides of an anchor in strides, as in torchvision's and the paper's (32 pixels at stride 4)."""


class _WithFPN(nn.Module):
    """A pyramid of equal channels, and one coarser level made by pooling (Lin et al. 2017)."""

    def __init__(self, pyramid: Pyramid, channels: int) -> None:
        super().__init__()
        self.pyramid = pyramid
        self.fpn = FeaturePyramidNetwork(pyramid.channels, channels, extra_blocks=LastLevelMaxPool())
        self.out_channels = channels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Level -> [N, channels, h, w]."""
        maps: dict[str, Tensor] = self.fpn(self.pyramid(x))
        return maps


def detector(
    backbone: Backbone, *, classes: int, side: int, channels: int, proposals: int, mean: Triple, std: Triple
) -> FasterRCNN:
    """Faster R-CNN with a feature pyramid (Ren et al. 2015; Lin et al. 2017) for images of at most `side` pixels.

    classes: without background. channels: of the pyramid; 256 in the paper. proposals: kept of each image; 1,000.
    Images are given in 0..1; mean and std normalise them. Heads take their weights from torch's generator.
    """
    pyramid = Pyramid(backbone, side=side)
    body = _WithFPN(pyramid, channels)
    strides = [*pyramid.strides, 2 * pyramid.strides[-1]]
    levels = [str(stride) for stride in pyramid.strides]
    hidden = 4 * channels
    return FasterRCNN(
        body,
        num_classes=None,
        min_size=side,
        max_size=side,
        image_mean=list(mean),
        image_std=list(std),
        rpn_anchor_generator=AnchorGenerator(
            sizes=tuple((ANCHOR * stride,) for stride in strides), aspect_ratios=((0.5, 1.0, 2.0),) * len(strides)
        ),
        rpn_pre_nms_top_n_train=2 * proposals,
        rpn_pre_nms_top_n_test=proposals,
        rpn_post_nms_top_n_train=2 * proposals,
        rpn_post_nms_top_n_test=proposals,
        box_batch_size_per_image=min(512, proposals),
        box_roi_pool=MultiScaleRoIAlign(featmap_names=levels, output_size=7, sampling_ratio=2),
        box_head=TwoMLPHead(channels * 49, hidden),
        box_predictor=_Predictor(hidden, classes + 1),
        box_detections_per_img=100,
    )


class _Predictor(nn.Module):
    """Scores and boxes of a region; class 0 is background."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, classes)
        self.boxes = nn.Linear(width, 4 * classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[R, classes] and [R, 4 classes]."""
        return self.scores(x), self.boxes(x)


class Segmenter(nn.Module):
    """A feature map, a head on it, and its scores enlarged to the image: [N, 3, H, W] -> [N, classes, H, W]."""

    def __init__(
        self, backbone: Backbone, *, classes: int, side: int, head: str, mean: Triple, std: Triple, max_stride: int = 8
    ) -> None:
        super().__init__()
        # The coarsest map that is not coarser than `max_stride`: a stride of 32 loses what masks are about.
        self.pyramid = Pyramid(backbone, side=side, levels=16, min_stride=1)
        fitting = [number for number, stride in enumerate(self.pyramid.strides) if stride <= max_stride]
        self._level = fitting[-1] if fitting else 0
        width = self.pyramid.channels[self._level]
        self.head = FCNHead(width, classes) if head == "fcn" else DeepLabHead(width, classes)
        for part in self.head.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        self.register_buffer("mean", torch.tensor(mean).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).reshape(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of images in 0..1."""
        mean, std = self.get_buffer("mean"), self.get_buffer("std")
        maps: OrderedDict[str, Tensor] = self.pyramid((x - mean) / std)
        scores: Tensor = self.head(list(maps.values())[self._level])
        return F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=False)
