"""Label budgets: how many labels a classifier may see, which images have them, and which of these are held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mocokit.data.randomness import hash_words, word
from mocokit.errors import UsageError
from mocokit.evaluation.protocol import draw_few, folds_of

Ints = npt.NDArray[np.int64]
HELD_SHARE = 5  # one in five labels of a budget is held out to choose by


@dataclass(frozen=True, slots=True)
class Budget:
    """So many labels of each class, or such a share of them, or (with neither) all."""

    per_class: int | None = None
    share: float | None = None

    @property
    def name(self) -> str:
        """For tables and file names: `5`, `1%`, `all`."""
        if self.per_class is not None:
            return str(self.per_class)
        return "all" if self.share is None else f"{100 * self.share:g}%"

    @property
    def whole(self) -> bool:
        """Whether it is all labels, so that there is nothing to draw."""
        return self.per_class is None and self.share is None

    def draw(self, labels: Ints, ids: Ints, number: int, seed: int, class_names: Sequence[str]) -> Ints:
        """Positions, ascending, of the images whose labels may be seen in draw `number`. labels: int64 [M], -1: none.

        Within one draw a smaller budget is a part of a larger one. Raises DataError naming a class with too few.
        """
        if self.per_class is not None:
            return draw_few(labels, ids, self.per_class, number, seed, class_names)
        if self.share is None:
            return np.flatnonzero(labels >= 0).astype(np.int64)
        order = np.argsort(hash_words(seed, word("label draw"), number, ids), kind="stable")
        chosen = []
        for label in np.unique(labels[labels >= 0]).tolist():
            mine = order[labels[order] == label]
            chosen.append(mine[: max(1, round(self.share * len(mine)))])
        return np.sort(np.concatenate(chosen)).astype(np.int64)


def parse_budgets(labels_per_class: str | None, label_fraction: str | None) -> tuple[Budget, ...]:
    """Budgets from `1,5,10,all` or from `0.01,0.1,1`. Raises UsageError for both, for none, or for other words."""
    if (labels_per_class is None) == (label_fraction is None):
        raise UsageError("Give label budgets either as --labels-per-class 1,5,all or as --label-fraction 0.01,0.1,1.")
    if labels_per_class is not None:
        found = tuple(_per_class(text.strip()) for text in labels_per_class.split(","))
    else:
        found = tuple(_fraction(text.strip()) for text in str(label_fraction).split(","))
    if len(set(found)) != len(found):
        raise UsageError("A label budget is named twice. Name each once.")
    return found


def _per_class(text: str) -> Budget:
    if text == "all":
        return Budget()
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise UsageError(f"--labels-per-class takes whole numbers from 1 and `all`, such as 1,5,10,all. Got {text!r}.")
    return Budget(per_class=int(text))


def _fraction(text: str) -> Budget:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise UsageError(f"--label-fraction takes shares above 0 up to 1, such as 0.01,0.1,1. Got {text!r}.")
    return Budget() if share == 1 else Budget(share=share)


def hold_out(labels: Ints, units: Ints, seed: int) -> npt.NDArray[np.bool_]:
    """[M] which of a budget's images are held out to choose by: one in five, whole units, by hash.

    labels: int64 [M]; units: int64 [M], groups or ids. A class keeps one image at least for fitting: where its only
    ones would be held out, none are.
    """
    held = folds_of(labels, units, HELD_SHARE, seed) == 0
    for label in np.unique(labels).tolist():
        mine = labels == label
        if held[mine].all():
            held[mine] = False
    return np.asarray(held, np.bool_)
