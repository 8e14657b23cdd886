"""Momentum-contrast representation learning: train an encoder without labels, prove what was learned.

Names are loaded when first used, so `import mocokit` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mocokit.lazy import names_of

if TYPE_CHECKING:  # `as` says that the name is meant to be used from here
    from mocokit.api import Plan as Plan
    from mocokit.api import ablate as ablate
    from mocokit.api import check as check
    from mocokit.api import compare as compare
    from mocokit.api import doctor as doctor
    from mocokit.api import embed as embed
    from mocokit.api import evaluate as evaluate
    from mocokit.api import export as export
    from mocokit.api import finetune as finetune
    from mocokit.api import lab as lab
    from mocokit.api import load as load
    from mocokit.api import load_run as load_run
    from mocokit.api import motion as motion
    from mocokit.api import named_recipes as named_recipes
    from mocokit.api import pack as pack
    from mocokit.api import plan as plan
    from mocokit.api import predict as predict
    from mocokit.api import pretrain as pretrain
    from mocokit.api import recipe_sheet as recipe_sheet
    from mocokit.api import replay as replay
    from mocokit.api import report as report
    from mocokit.api import search_add as search_add
    from mocokit.api import search_app as search_app
    from mocokit.api import search_build as search_build
    from mocokit.api import search_duplicates as search_duplicates
    from mocokit.api import search_eval as search_eval
    from mocokit.api import search_page as search_page
    from mocokit.api import search_query as search_query
    from mocokit.api import search_remove as search_remove
    from mocokit.api import search_serve as search_serve
    from mocokit.api import stepper as stepper
    from mocokit.api import transfer as transfer
    from mocokit.api import verify as verify
    from mocokit.api.estimator import MoCoEncoder as MoCoEncoder
    from mocokit.contrast.encoders import Encoder as Encoder
    from mocokit.contrast.encoders import EncoderConfig as EncoderConfig
    from mocokit.contrast.encoders import EncoderPair as EncoderPair
    from mocokit.contrast.encoders import build_encoder as build_encoder
    from mocokit.contrast.key_queue import KeyQueue as KeyQueue
    from mocokit.contrast.key_queue import Keys as Keys
    from mocokit.contrast.losses import info_nce as info_nce
    from mocokit.contrast.losses import same_source as same_source
    from mocokit.contrast.momentum import ema_update_ as ema_update_
    from mocokit.contrast.momentum import momentum_at as momentum_at
    from mocokit.contrast.steps import ContrastConfig as ContrastConfig
    from mocokit.contrast.steps import Scoring as Scoring
    from mocokit.contrast.steps import ViewPair as ViewPair
    from mocokit.contrast.steps import moco_step_ema_first as moco_step_ema_first
    from mocokit.contrast.steps import moco_step_paper as moco_step_paper
    from mocokit.data.sources import open_source as open_source
    from mocokit.data.videos import open_videos as open_videos
    from mocokit.data.views import ViewConfig as ViewConfig
    from mocokit.data.views import make_views as make_views
    from mocokit.data.views import view_recipe as view_recipe
    from mocokit.evaluation.tuning import TuneSettings as TuneSettings
    from mocokit.evaluation.verdict import Verdict as Verdict
    from mocokit.options import PretrainOptions as PretrainOptions
    from mocokit.training.foreign import safe_load_pt as safe_load_pt
    from mocokit.training.run import Run as Run

__version__ = "0.1.0"

_WHERE = {
    "mocokit.api": (
        "Plan", "ablate", "check", "compare", "doctor", "embed", "evaluate", "export", "finetune", "lab",
        "load", "load_run", "motion", "named_recipes", "pack", "plan", "predict", "pretrain", "recipe_sheet",
        "replay", "report", "search_add", "search_app", "search_build", "search_duplicates", "search_eval",
        "search_page", "search_query", "search_remove", "search_serve", "stepper", "transfer", "verify",
    ),
    "mocokit.api.estimator": ("MoCoEncoder",),
    "mocokit.contrast.encoders": ("Encoder", "EncoderConfig", "EncoderPair", "build_encoder"),
    "mocokit.contrast.key_queue": ("KeyQueue", "Keys"),
    "mocokit.contrast.losses": ("info_nce", "same_source"),
    "mocokit.contrast.momentum": ("ema_update_", "momentum_at"),
    "mocokit.contrast.steps": ("ContrastConfig", "Scoring", "ViewPair", "moco_step_ema_first", "moco_step_paper"),
    "mocokit.data.sources": ("open_source",),
    "mocokit.data.videos": ("open_videos",),
    "mocokit.data.views": ("ViewConfig", "make_views", "view_recipe"),
    "mocokit.evaluation.tuning": ("TuneSettings",),
    "mocokit.evaluation.verdict": ("Verdict",),
    "mocokit.options": ("PretrainOptions",),
    "mocokit.training.foreign": ("safe_load_pt",),
    "mocokit.training.run": ("Run",),
}  # fmt: skip
__getattr__, _NAMES = names_of(__name__, _WHERE)

__all__ = sorted([*_NAMES, "__version__"])


def __dir__() -> list[str]:
    return __all__
