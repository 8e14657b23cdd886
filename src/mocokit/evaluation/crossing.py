"""Every method reads the same test images with the same labels: answers that are paired and crossed.

Two things can vary besides the test images: the run (another seed of pretraining, or of a random baseline) and the
label draw (which few images have labels). They combine like this:

- all labels: one row per run.
- few labels, one run: one row per label draw. Draws are the replicates, and the verdict holds for this run only.
- few labels, several runs: one row per run, the mean over that run's own draws. Each run has other draws than the
  next, so the chance of drawing is part of the differences between rows and is not left out of the interval.

Every method gets the same draws in the same row, so differences between methods are paired in both directions. A
baseline with other seeds than the runs (more random initialisations, say) gives each row the mean over its share of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mocokit.errors import UsageError
from mocokit.evaluation.knn import KNN_TEMPERATURE, knn_predict
from mocokit.evaluation.metrics import Answers
from mocokit.evaluation.probe import choose_strength, fit_probe
from mocokit.evaluation.protocol import choose_k, draw_few

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BankAndTest = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a readout says of Q queries: classes int64 [Q], and where it knows them their probabilities [Q] in 0..1."""

    predicted: Ints
    confidence: Floats | None = None


Reader = Callable[[Tensor, Ints, Ints, Tensor], Reading]
"""A frozen readout: (bank [M, D], labels [M], units [M], queries [Q, D]) -> its reading of the queries.

units: the bank images' groups, or ids where there is none; whoever cross-validates keeps a unit in one fold.
"""


def knn_reader(
    n_classes: int, k: int | Sequence[int], *, seed: int = 0, knn_temperature: float = KNN_TEMPERATURE
) -> Reader:
    """A kNN readout with a k fixed in advance, or chosen among several by cross-validation on the labels it gets."""

    def read(bank: Tensor, labels: Ints, units: Ints, queries: Tensor) -> Reading:
        chosen = (
            k
            if isinstance(k, int)
            else choose_k(
                bank, labels, units, n_classes=n_classes, seed=seed, candidates=k, knn_temperature=knn_temperature
            )
        )
        predicted = knn_predict(bank, labels, queries, k=chosen, n_classes=n_classes, knn_temperature=knn_temperature)
        return Reading(predicted)

    return read


def probe_reader(n_classes: int, *, held_units: Ints | None = None, seed: int = 0) -> Reader:
    """A linear probe whose penalty is chosen by cross-validation on the labels it gets, or on a validation split.

    held_units: groups or ids of the validation images; the penalty is chosen by fits to the others, judged on these,
    and the probe is then fitted to all.
    """

    def read(bank: Tensor, labels: Ints, units: Ints, queries: Tensor) -> Reading:
        held = None if held_units is None else np.isin(units, held_units)
        strength = choose_strength(bank, labels, units, n_classes=n_classes, held=held, seed=seed)
        probe = fit_probe(bank, labels, n_classes=n_classes, strength=strength)
        probabilities = probe.probabilities(queries)
        return Reading(probabilities.argmax(axis=1).astype(np.int64), probabilities.max(axis=1))

    return read


def answer_features(
    features: Mapping[str, BankAndTest | Sequence[BankAndTest]],
    bank_labels: Ints,
    bank_ids: Ints,
    read: Reader,
    *,
    seed: int,
    labels_per_class: int | None = None,
    draws: int = 1,
    bank_groups: Ints | None = None,
    class_names: Sequence[str] | None = None,
    runs: int | None = None,
) -> dict[str, Answers]:
    """What each method says of each test image, by name in the order of `features`.

    features: per method (bank [M, D], test [I, D]); a list of them, one per run, for a method that differs by run.
    A method given once (pixels) is the same in every run. bank_labels: int64 [M], -1 for unlabelled bank rows, which
    are left out; bank_ids: int64 [M]; bank_groups: int64 [M], -1 for none. labels_per_class: None for all labels.
    runs: R where there are several; None: as many as the longest list. A list that is longer is dealt out over the
    runs, one after the other.

    The replicates of the answers are the R rows above. Raises UsageError when lengths disagree and DataError when a
    class has too few labels.
    """
    several = {name: [one] if isinstance(one, tuple) else list(one) for name, one in features.items()}
    R = max((len(pairs) for pairs in several.values()), default=0) if runs is None else runs
    few = labels_per_class is not None
    _check(several, R, bank_labels, draws if few else 1)
    labelled = np.flatnonzero(bank_labels >= 0)
    units = bank_ids if bank_groups is None else np.where(bank_groups >= 0, bank_groups, bank_ids)
    out: dict[str, Answers] = {}
    for name, pairs in several.items():
        readings: list[Reading] = []
        rows: list[int] = []
        whole: dict[int, Reading] = {}
        for run in range(R):
            for member in range(run, len(pairs), R) or (run % len(pairs),):
                bank, test = pairs[member]
                if labels_per_class is None:
                    if member not in whole:
                        whole[member] = read(bank[labelled], bank_labels[labelled], units[labelled], test)
                    readings.append(whole[member])
                    rows.append(run)
                    continue
                for draw in range(draws):
                    number = run * draws + draw
                    chosen = draw_few(bank_labels, bank_ids, labels_per_class, number, seed, class_names)
                    readings.append(read(bank[chosen], bank_labels[chosen], units[chosen], test))
                    rows.append(draw if R == 1 else run)
        confidences = [one.confidence for one in readings if one.confidence is not None]
        out[name] = Answers(
            np.stack([one.predicted for one in readings]),
            np.array(rows, np.int64),
            np.stack(confidences) if confidences else None,
        )
    return out


def _check(several: Mapping[str, Sequence[BankAndTest]], R: int, bank_labels: Ints, draws: int) -> None:
    if R == 0 or draws < 1:
        raise UsageError(f"Nothing to evaluate: {len(several)} methods, {R} runs, {draws} label draws.")
    for name, pairs in several.items():
        if len(pairs) != 1 and len(pairs) < R:
            raise UsageError(f"{name!r} has features of {len(pairs)} runs, others of {R}. Give 1, or {R} at least.")
        for bank, _ in pairs:
            if len(bank) != len(bank_labels):
                raise UsageError(
                    f"{name!r} has features of {len(bank)} bank images, but there are {len(bank_labels)} labels. "
                    "Extract them from the same rows."
                )
