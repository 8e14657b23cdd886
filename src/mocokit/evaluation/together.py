"""May these runs be evaluated together? Only repeats of one recipe, which differ in nothing but their seed, may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mocokit.errors import UsageError
from mocokit.training.run import Run

_NO_EFFECT = {
    ("train", "seed"),
    ("train", "workers"),
    ("train", "checkpoint_every"),
    ("train", "eval_every"),
    ("data", "spec"),
}
"""What may differ: the seed, and what decides no bit of a run. (`execution` may too: see `check_together`.)"""


def check_together(runs: Sequence[Run]) -> list[str]:
    """Warnings about the runs; raises UsageError when they are no repeats of one recipe.

    Another architecture, view, method, optimiser, length or batch size is an error, and so are two runs of the same
    seed on the same data, which are one run counted twice. Other pretraining images (a copy of the folder has other
    modification times), threads or precision are a warning.
    """
    first = runs[0]
    warnings = []
    for place, run in enumerate(runs):
        for earlier in runs[:place]:
            same_seed = run.config.train.seed == earlier.config.train.seed
            if same_seed and all(section == "execution" for section, _ in differences(earlier, run)):
                raise UsageError(
                    f"{run.path} repeats {earlier.path}: both have seed {run.config.train.seed} and the same "
                    "configuration, so they are one run and not two. Name each once, or train it with another --seed."
                )
        if run.config.views.size != first.config.views.size or run.config.encoder != first.config.encoder:
            raise UsageError(
                f"{run.path} has another image size or architecture than {first.path}; evaluated together, runs may "
                "differ in their seed only. Evaluate them apart."
            )
        differing = differences(first, run)
        serious = [text for section, text in differing if section not in ("data", "execution")]
        if serious:
            raise UsageError(
                f"{run.path} has another recipe than {first.path} ({'; '.join(serious[:4])}); evaluated together, runs "
                "may differ in their seed only, or the interval mixes recipes with chance. Evaluate them apart."
            )
        if differing:
            warnings.append(f"{run.path} differs from {first.path} in {'; '.join(text for _, text in differing[:4])}")
    return warnings


def differences(one: Run, other: Run) -> list[tuple[str, str]]:
    """What differs in two runs' configurations beside the seed: (section, text such as "optim.lr: 0.03, 0.06")."""
    a, b = one.config.to_dict(), other.config.to_dict()
    found: list[tuple[str, str]] = []
    for section, values in a.items():
        if not isinstance(values, dict):
            continue
        for name, value in values.items():
            theirs: Any = b[section][name]
            if value != theirs and (section, name) not in _NO_EFFECT and name != "reason":
                of_data = name in ("mean", "std")  # measured on the images
                found.append(("data" if of_data else section, f"{section}.{name}: {_short(value)}, {_short(theirs)}"))
    return found


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:20]}..."
