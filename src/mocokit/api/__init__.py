"""The verbs as Python functions. The only room that puts the others together.

Each function does what the command of the same name does, prints progress to stderr unless `quiet`, and raises one
of the errors of `mocokit.errors`.
"""

from mocokit.api.checking import Check, check
from mocokit.api.comparing import compare
from mocokit.api.data import pack
from mocokit.api.embedding import embed
from mocokit.api.evaluating import evaluate, table_and_verdict
from mocokit.api.exporting import Exported, export, load
from mocokit.api.finetuning import finetune, predict
from mocokit.api.judging import search_eval, search_table
from mocokit.api.listing import RecipeSheet, named_recipes, recipe_sheet
from mocokit.api.machine import doctor
from mocokit.api.planning import Plan, plan
from mocokit.api.pretraining import pretrain
from mocokit.api.replaying import Replay, replay
from mocokit.api.reporting import report
from mocokit.api.searching import (
    search_add,
    search_build,
    search_duplicates,
    search_query,
    search_remove,
)
from mocokit.api.serving import search_app, search_page, search_serve
from mocokit.api.stepping import stepper
from mocokit.api.studies import ablate, lab
from mocokit.api.transferring import transfer
from mocokit.api.verifying import Verification, verify
from mocokit.api.watching import motion
from mocokit.training.run import Run, load_run

__all__ = [
    "Check",
    "Exported",
    "Plan",
    "RecipeSheet",
    "Replay",
    "Run",
    "Verification",
    "ablate",
    "check",
    "compare",
    "doctor",
    "embed",
    "evaluate",
    "export",
    "finetune",
    "lab",
    "load",
    "load_run",
    "motion",
    "named_recipes",
    "pack",
    "plan",
    "predict",
    "pretrain",
    "recipe_sheet",
    "replay",
    "report",
    "search_add",
    "search_app",
    "search_build",
    "search_duplicates",
    "search_eval",
    "search_page",
    "search_query",
    "search_remove",
    "search_serve",
    "search_table",
    "stepper",
    "table_and_verdict",
    "transfer",
    "verify",
]
