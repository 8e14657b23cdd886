"""The verbs as Python functions. The only room that puts the others together.

Each function does what the command of the same name does, prints progress to stderr unless `quiet`, and raises one
of the errors of `mocokit.errors`.
"""

from mocokit.api.data import pack
from mocokit.api.evaluating import evaluate, table_and_verdict
from mocokit.api.listing import RecipeSheet, named_recipes, recipe_sheet
from mocokit.api.machine import doctor
from mocokit.api.planning import Plan, plan
from mocokit.api.pretraining import pretrain
from mocokit.api.reporting import report
from mocokit.api.stepping import stepper
from mocokit.api.studies import ablate, lab
from mocokit.training.run import Run, load_run

__all__ = [
    "Plan",
    "RecipeSheet",
    "Run",
    "ablate",
    "doctor",
    "evaluate",
    "lab",
    "load_run",
    "named_recipes",
    "pack",
    "plan",
    "pretrain",
    "recipe_sheet",
    "report",
    "stepper",
    "table_and_verdict",
]
