"""What a dense transfer is asked for and what it found: the plan, the scores, the table."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mocokit.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlan:
    """The budget and the model; everything but the backbone's weights, which the arms differ in."""

    side: int = 192
    """Longer side of the images in pixels. Smaller than usual (800), so that it finishes on a CPU."""
    steps: int = 300
    """Optimiser steps."""
    batch_size: int = 4
    """Images a step."""
    lr: float = 0.02
    """Peak learning rate of SGD with momentum 0.9, after a warm-up over a tenth of the steps, then a cosine."""
    frozen: bool = False
    """Leave the backbone as it is and train the heads alone."""
    seeds: int = 1
    """Repetitions with other heads and another order."""
    channels: int = 64
    """Detection: width of the feature pyramid (256 in the paper); the box head is four times as wide."""
    proposals: int = 128
    """Detection: regions looked at in an image (1,000 in the paper)."""
    head: Literal["fcn", "deeplab"] = "fcn"
    """Segmentation: the head."""

    def __post_init__(self) -> None:
        for name, low in (
            ("side", 32),
            ("steps", 1),
            ("batch_size", 2),
            ("seeds", 1),
            ("channels", 8),
            ("proposals", 8),
        ):
            if getattr(self, name) < low:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {low}. Got {getattr(self, name)}.")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"--lr must be above 0. Got {self.lr}.")
        if self.head not in ("fcn", "deeplab"):
            raise UsageError(f"--head must be fcn or deeplab. Got {self.head!r}.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Scored:
    """A score with its 95 % interval over test images, in 0..1."""

    score: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"score": self.score, "ci95": [self.low, self.high]}


@dataclass(frozen=True, slots=True)
class TransferResult:
    """Both arms' scores and their paired difference."""

    task: str
    """detect or segment."""
    metric: str
    """mAP (overlaps .50 to .95) or mIoU."""
    plan: TransferPlan
    train_images: int
    test_images: int
    arms: dict[str, dict[str, Scored]]
    """Arm -> metric -> score; metrics: the main one, AP50 for detection, and one for each class."""
    difference: Scored
    """Pretrained minus random init in the main metric, on the same draws of test images."""
    by_seed: dict[str, list[float]]
    """The main metric of each seed."""
    losses: dict[str, tuple[float, float]]
    """Arm -> mean training loss over the first and the last tenth of the steps, first seed."""

    @property
    def outcome(self) -> str:
        """BETTER, WORSE or NO CLEAR DIFFERENCE."""
        one = self.difference
        return "BETTER" if one.low > 0 else "WORSE" if one.high < 0 else "NO CLEAR DIFFERENCE"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "task": self.task,
            "metric": self.metric,
            "verdict": self.outcome,
            "difference": self.difference.to_dict(),
            "arms": {arm: {name: one.to_dict() for name, one in found.items()} for arm, found in self.arms.items()},
            "by_seed": self.by_seed,
            "train_images": self.train_images,
            "test_images": self.test_images,
            "losses": {arm: list(pair) for arm, pair in self.losses.items()},
            "plan": self.plan.to_dict(),
            "interval": "bootstrap over test images; the trainings are held fixed",
        }

    def text(self) -> str:
        """A table and the verdict."""
        names = list(next(iter(self.arms.values())))
        width = max(len(name) for name in names)
        lines = [f"{'':<{width}}  " + "  ".join(f"{f'{arm}, % [95 %]':<22}" for arm in self.arms)]
        for name in names:
            cells = [f"{_percent(found[name]):<22}" for found in self.arms.values()]
            lines.append(f"{name:<{width}}  " + "  ".join(cells))
        one = self.difference
        seeds = "1 training an arm" if self.plan.seeds == 1 else f"{self.plan.seeds} trainings an arm"
        lines.append(
            f"{self.task.upper()}: {self.outcome} | {self.metric} {100 * one.score:+.1f} pp [95 % over images "
            f"{100 * one.low:+.1f}, {100 * one.high:+.1f}] | {'frozen' if self.plan.frozen else 'fine-tuned'}, "
            f"{self.plan.steps} steps, n={self.test_images} test images, {seeds}"
        )
        return "\n".join(line.rstrip() for line in lines) + "\n"


def _percent(one: Scored) -> str:
    return f"{100 * one.score:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]"
