"""Every method reads the same test images with the same labels: matrices of right answers, paired and crossed.

Two things can vary besides the test images: the run (another seed of pretraining, or of a random baseline) and the
label draw (which few images have labels). They combine like this:

- all labels: one row per run.
- few labels, one run: one row per label draw. Draws are the replicates, and the verdict holds for this run only.
- few labels, several runs: one row per run, the mean over that run's own draws. Each run has other draws than the
  next, so the chance of drawing is part of the differences between rows and is not left out of the interval.

Every method gets the same draws in the same row, so differences between methods are paired in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mocokit.errors import UsageError
from mocokit.evaluation.knn import KNN_TEMPERATURE, knn_predict
from mocokit.evaluation.protocol import choose_k, draw_few

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BankAndTest = tuple[Tensor, Tensor]
Reader = Callable[[Tensor, Ints, Ints, Tensor], Ints]
"""A frozen readout: (bank [M, D], labels [M], units [M], queries [Q, D]) -> predicted classes int64 [Q].

units: the bank images' groups, or ids where there is none; whoever cross-validates keeps a unit in one fold.
"""


def knn_reader(
    n_classes: int, k: int | Sequence[int], *, seed: int = 0, knn_temperature: float = KNN_TEMPERATURE
) -> Reader:
    """A kNN readout with a k fixed in advance, or chosen among several by cross-validation on the labels it gets."""

    def read(bank: Tensor, labels: Ints, units: Ints, queries: Tensor) -> Ints:
        chosen = (
            k
            if isinstance(k, int)
            else choose_k(
                bank, labels, units, n_classes=n_classes, seed=seed, candidates=k, knn_temperature=knn_temperature
            )
        )
        return knn_predict(bank, labels, queries, k=chosen, n_classes=n_classes, knn_temperature=knn_temperature)

    return read


def evaluate_features(
    features: Mapping[str, BankAndTest | Sequence[BankAndTest]],
    bank_labels: Ints,
    bank_ids: Ints,
    test_labels: Ints,
    read: Reader,
    *,
    seed: int,
    labels_per_class: int | None = None,
    draws: int = 1,
    bank_groups: Ints | None = None,
    class_names: Sequence[str] | None = None,
) -> dict[str, Floats]:
    """How right each method is on each test image: name -> float64 [R, I] in 0..1, in the order of `features`.

    features: per method (bank [M, D], test [I, D]); a list of them, one per run, for a method that differs by run.
    A method given once (pixels) is the same in every run. bank_labels, test_labels: int64, -1 for unlabelled bank
    rows, which are left out; bank_ids: int64 [M]; bank_groups: int64 [M], -1 for none. labels_per_class: None for all
    labels. R as above.
    Raises UsageError when lengths disagree and DataError when a class has too few labels.
    """
    runs = {name: [one] if isinstance(one, tuple) else list(one) for name, one in features.items()}
    R = max((len(pairs) for pairs in runs.values()), default=0)
    _check(runs, R, bank_labels, test_labels, draws if labels_per_class is not None else 1)
    labelled = np.flatnonzero(bank_labels >= 0)
    units = bank_ids if bank_groups is None else np.where(bank_groups >= 0, bank_groups, bank_ids)
    out: dict[str, Floats] = {}
    for name, pairs in runs.items():
        rows: list[Floats] = []
        for run in range(R):
            bank, test = pairs[run % len(pairs)]
            if labels_per_class is None:
                if run < len(pairs):
                    answer = read(bank[labelled], bank_labels[labelled], units[labelled], test)
                    right = (answer == test_labels).astype(np.float64)
                rows.append(right)
                continue
            drawn = []
            for draw in range(run * draws, (run + 1) * draws):
                few = draw_few(bank_labels, bank_ids, labels_per_class, draw, seed, class_names)
                answer = read(bank[few], bank_labels[few], units[few], test)
                drawn.append((answer == test_labels).astype(np.float64))
            rows += drawn if R == 1 else [np.mean(drawn, axis=0)]
        out[name] = np.stack(rows)
    return out


def _check(runs: Mapping[str, Sequence[BankAndTest]], R: int, bank_labels: Ints, test_labels: Ints, draws: int) -> None:
    if R == 0 or draws < 1:
        raise UsageError(f"Nothing to evaluate: {len(runs)} methods, {R} runs, {draws} label draws.")
    if (test_labels < 0).any():
        raise UsageError("Some test images have no label. Leave them out of the test rows.")
    for name, pairs in runs.items():
        if len(pairs) not in (1, R):
            raise UsageError(f"{name!r} has features of {len(pairs)} runs, others of {R}. Give 1 or {R}.")
        for bank, test in pairs:
            if len(bank) != len(bank_labels) or len(test) != len(test_labels):
                raise UsageError(
                    f"{name!r} has features of {len(bank)} bank and {len(test)} test images, but there are "
                    f"{len(bank_labels)} and {len(test_labels)} labels. Extract them from the same rows."
                )
