"""A run's backbone as dense models want it: the feature map at every stride it has, not the last one alone."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from mocokit.contrast.backbones import Backbone
from mocokit.errors import UsageError

MAX_LEVELS = 4


class Pyramid(nn.Module):
    """Feature maps of a backbone, finest first: level name -> [N, C, h, w].

    Of all layers whose output has the same size the last one is taken, so a ResNet gives the outputs of its stages. The
    coarsest `levels` strides are used, and none finer than `min_stride`. strides, channels: of every level.
    """

    def __init__(self, backbone: Backbone, *, side: int, levels: int = MAX_LEVELS, min_stride: int = 2) -> None:
        super().__init__()
        if not backbone.spatial:
            raise UsageError(
                "This backbone has no feature map (a vision transformer), so it can't be transferred here."
            )
        self.body = backbone.trunk
        sizes = _sizes(self.body, side)
        strides = {name: round(side / height) for name, (_, height) in sizes.items()}
        finest_last = sorted(set(strides.values()), reverse=True)
        wanted = [stride for stride in finest_last if stride >= min_stride][:levels] or finest_last[:1]
        self._taken: dict[str, Tensor] = {}
        chosen = OrderedDict()
        for stride in sorted(wanted):
            chosen[str(stride)] = next(name for name in reversed(sizes) if strides[name] == stride)
        self.strides = sorted(wanted)
        self.channels = [sizes[name][0] for name in chosen.values()]
        modules = dict(self.body.named_modules())
        for level, name in chosen.items():
            modules[name].register_forward_hook(self._take(level))
        self._levels = list(chosen)

    def _take(self, level: str):  # type: ignore[no-untyped-def]
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            self._taken[level] = output

        return hook

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        """The maps of images x [N, 3, H, W]."""
        self._taken = {}
        self.body(x)
        found = OrderedDict((level, self._taken[level]) for level in self._levels)
        self._taken = {}
        return found


def _sizes(body: nn.Module, side: int) -> OrderedDict[str, tuple[int, int]]:
    """Layer -> (channels, height) of its output for an image of `side` pixels, in the order in which they end."""
    found: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def watch(name: str):  # type: ignore[no-untyped-def]
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.ndim == 4:
                found.pop(name, None)
                found[name] = (output.shape[1], output.shape[2])

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in body.named_modules() if name]
    training = body.training
    try:
        body.eval()
        with torch.no_grad():
            body(torch.zeros(1, 3, side, side))
    finally:
        body.train(training)
        for handle in handles:
            handle.remove()
    return found
