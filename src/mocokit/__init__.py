"""Momentum-contrast representation learning: train an encoder without labels, prove what was learned.

Names are loaded when first used, so `import mocokit` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mocokit.api import Plan, ablate, doctor, evaluate, lab, load_run, pack, plan, pretrain
    from mocokit.contrast.encoders import Encoder, EncoderConfig, EncoderPair, build_encoder
    from mocokit.contrast.key_queue import KeyQueue, Keys
    from mocokit.contrast.losses import info_nce, same_source
    from mocokit.contrast.momentum import ema_update_, momentum_at
    from mocokit.contrast.steps import ContrastConfig, Scoring, ViewPair, moco_step_ema_first, moco_step_paper
    from mocokit.data.sources import open_source
    from mocokit.data.views import ViewConfig, make_views, view_recipe
    from mocokit.evaluation.verdict import Verdict
    from mocokit.options import PretrainOptions
    from mocokit.training.run import Run

__version__ = "0.1.0"

_WHERE = {
    "mocokit.api": ("Plan", "ablate", "doctor", "evaluate", "lab", "load_run", "pack", "plan", "pretrain"),
    "mocokit.contrast.encoders": ("Encoder", "EncoderConfig", "EncoderPair", "build_encoder"),
    "mocokit.contrast.key_queue": ("KeyQueue", "Keys"),
    "mocokit.contrast.losses": ("info_nce", "same_source"),
    "mocokit.contrast.momentum": ("ema_update_", "momentum_at"),
    "mocokit.contrast.steps": ("ContrastConfig", "Scoring", "ViewPair", "moco_step_ema_first", "moco_step_paper"),
    "mocokit.data.sources": ("open_source",),
    "mocokit.data.views": ("ViewConfig", "make_views", "view_recipe"),
    "mocokit.evaluation.verdict": ("Verdict",),
    "mocokit.options": ("PretrainOptions",),
    "mocokit.training.run": ("Run",),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mocokit' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
