"""The verbs as Python functions. The only room that puts the others together.

Each function does what the command of the same name does, prints progress to stderr unless `quiet`, and raises one
of the errors of `mocokit.errors`. A function's module is loaded when it is first used: training needs neither the
plots nor the search index, which take as much memory as a small run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mocokit.lazy import names_of

if TYPE_CHECKING:  # `as` says that the name is meant to be used from here
    from mocokit.api.checking import Check as Check
    from mocokit.api.checking import check as check
    from mocokit.api.comparing import compare as compare
    from mocokit.api.data import pack as pack
    from mocokit.api.embedding import embed as embed
    from mocokit.api.evaluating import evaluate as evaluate
    from mocokit.api.evaluating import table_and_verdict as table_and_verdict
    from mocokit.api.exporting import Exported as Exported
    from mocokit.api.exporting import export as export
    from mocokit.api.exporting import load as load
    from mocokit.api.finetuning import finetune as finetune
    from mocokit.api.finetuning import predict as predict
    from mocokit.api.judging import search_eval as search_eval
    from mocokit.api.judging import search_table as search_table
    from mocokit.api.listing import RecipeSheet as RecipeSheet
    from mocokit.api.listing import named_recipes as named_recipes
    from mocokit.api.listing import recipe_sheet as recipe_sheet
    from mocokit.api.machine import doctor as doctor
    from mocokit.api.planning import Plan as Plan
    from mocokit.api.planning import plan as plan
    from mocokit.api.pretraining import pretrain as pretrain
    from mocokit.api.replaying import Replay as Replay
    from mocokit.api.replaying import replay as replay
    from mocokit.api.reporting import report as report
    from mocokit.api.searching import search_add as search_add
    from mocokit.api.searching import search_build as search_build
    from mocokit.api.searching import search_duplicates as search_duplicates
    from mocokit.api.searching import search_query as search_query
    from mocokit.api.searching import search_remove as search_remove
    from mocokit.api.serving import search_app as search_app
    from mocokit.api.serving import search_page as search_page
    from mocokit.api.serving import search_serve as search_serve
    from mocokit.api.stepping import stepper as stepper
    from mocokit.api.studies import ablate as ablate
    from mocokit.api.studies import lab as lab
    from mocokit.api.transferring import transfer as transfer
    from mocokit.api.verifying import Verification as Verification
    from mocokit.api.verifying import verify as verify
    from mocokit.api.watching import motion as motion
    from mocokit.training.run import Run as Run
    from mocokit.training.run import load_run as load_run

_WHERE = {
    "mocokit.api.checking": ("Check", "check"),
    "mocokit.api.comparing": ("compare",),
    "mocokit.api.data": ("pack",),
    "mocokit.api.embedding": ("embed",),
    "mocokit.api.evaluating": ("evaluate", "table_and_verdict"),
    "mocokit.api.exporting": ("Exported", "export", "load"),
    "mocokit.api.finetuning": ("finetune", "predict"),
    "mocokit.api.judging": ("search_eval", "search_table"),
    "mocokit.api.listing": ("RecipeSheet", "named_recipes", "recipe_sheet"),
    "mocokit.api.machine": ("doctor",),
    "mocokit.api.planning": ("Plan", "plan"),
    "mocokit.api.pretraining": ("pretrain",),
    "mocokit.api.replaying": ("Replay", "replay"),
    "mocokit.api.reporting": ("report",),
    "mocokit.api.searching": ("search_add", "search_build", "search_duplicates", "search_query", "search_remove"),
    "mocokit.api.serving": ("search_app", "search_page", "search_serve"),
    "mocokit.api.stepping": ("stepper",),
    "mocokit.api.studies": ("ablate", "lab"),
    "mocokit.api.transferring": ("transfer",),
    "mocokit.api.verifying": ("Verification", "verify"),
    "mocokit.api.watching": ("motion",),
    "mocokit.training.run": ("Run", "load_run"),
}
__getattr__, __all__ = names_of(__name__, _WHERE)


def __dir__() -> list[str]:
    return __all__
