"""The frozen evaluation of one or several runs: features, baselines, label draws, one reading of the test split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from mocokit.errors import UsageError
from mocokit.evaluation.baselines import calibrate
from mocokit.evaluation.contenders import RANDOM_SEED, READOUTS, Contenders, contenders
from mocokit.evaluation.counterfactual import Counterfactual, encoder_counterfactual, find_change, mean_of
from mocokit.evaluation.crossing import Reader, answer_features, knn_reader, probe_reader
from mocokit.evaluation.features import plain_batches
from mocokit.evaluation.labelled import LabelledData
from mocokit.evaluation.labelled_videos import VideoData
from mocokit.evaluation.metrics import Scores, score
from mocokit.evaluation.near_twins import Bools, NearTwins, near_twins
from mocokit.evaluation.overlap import Overlap
from mocokit.evaluation.protocol import Ledger, plan_hash, shuffled
from mocokit.evaluation.verdict import Interval, Verdict, decide
from mocokit.evaluation.video_contenders import video_contenders
from mocokit.evaluation.video_overlap import overlap_with
from mocokit.evaluation.weights import NamedEncoder, NotHere
from mocokit.training.run import Run
from mocokit.training.state import make_encoder

__all__ = ["RANDOM_SEED", "READOUTS", "Classifier", "FrozenPlan", "FrozenResult", "counterfactuals", "evaluate_frozen"]

FEW_LABEL_K = (1, 3, 5, 10, 20)
ALL_LABEL_K = 200
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Classifier = Literal["knn", "linear"]
CLASSIFIERS: dict[str, str] = {"knn": "kNN", "linear": "linear probe"}
"""What reads the features, and its name in tables and verdicts."""
SHUFFLE_SEED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPlan:
    """A named plan: everything about an evaluation that is settled before a test label is read."""

    labels_per_class: int | None = 10
    """Labels per class that the classifier sees; None = all training labels."""
    draws: int = 20
    """How often such a set is drawn; 1 with all labels."""
    k: int | None = None
    """Neighbours; None = 200 with all labels, chosen by cross-validation inside each draw with few."""
    knn_temperature: float = 0.1
    """Sharpness of the votes."""
    readout: str = "h"
    """What the verdict is about: h, z (query encoder), key-h, key-z."""
    classifiers: tuple[Classifier, ...] = ("knn",)
    """What reads the features; the first one's verdict is the verdict."""
    random_seeds: int | None = None
    """Random initialisations of the baseline; None = as many as runs."""
    shuffle_labels: bool = False
    """Control: the training labels are shuffled, so every score must be at chance."""
    shuffle_seed: int = SHUFFLE_SEED
    """How they are shuffled."""

    def __post_init__(self) -> None:
        if self.readout not in READOUTS:
            raise UsageError(f"--readout must be one of {', '.join(READOUTS)}. Got {self.readout!r}.")
        if self.labels_per_class is not None and self.labels_per_class < 1:
            raise UsageError(f"--labels-per-class must be at least 1, or `all`. Got {self.labels_per_class}.")
        if self.draws < 1:
            raise UsageError(f"--draws must be at least 1. Got {self.draws}.")
        if self.k is not None and self.k < 1:
            raise UsageError(f"--k must be at least 1. Got {self.k}.")
        if not self.knn_temperature > 0:
            raise UsageError(f"--knn-temperature must be above 0. Got {self.knn_temperature}.")
        if self.random_seeds is not None and self.random_seeds < 1:
            raise UsageError(f"--random-seeds must be at least 1. Got {self.random_seeds}.")
        if not self.classifiers or not set(self.classifiers) <= set(CLASSIFIERS):
            raise UsageError(f"--classifier must be knn, linear or both. Got {self.classifiers}.")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return plain | {"classifiers": list(self.classifiers)}


@dataclass(frozen=True, slots=True)
class FrozenResult:
    """The verdict, and every readout's and baseline's score with its interval."""

    verdict: Verdict
    """The first classifier's."""
    verdicts: dict[str, Verdict]
    """By classifier (knn, linear), in the order of the plan."""
    tables: dict[str, dict[str, Scores]]
    """By classifier, then by method: accuracy, balanced accuracy, macro F1, recall, confusion, calibration."""
    class_names: tuple[str, ...]
    chance: float
    test_readings: int
    pretraining: str
    overlap: Overlap
    near_twins: NearTwins | None
    """Test images with a near twin among the training images; None for videos, and where labels are shuffled."""
    notes: dict[str, str]
    """Of baselines with named weights: what was loaded from where."""
    correct: dict[str, Floats]
    """How right each method is on each test image, read by the first classifier: name -> [R, I] in 0..1."""
    counterfactual: dict[str, dict[str, Counterfactual]] = field(default_factory=dict)
    """By change: `before` and `after` training; empty when none was asked for."""

    @property
    def scores(self) -> dict[str, Interval]:
        """Accuracy by method, of the first classifier."""
        first = next(iter(self.tables.values()))
        return {name: one.accuracy for name, one in first.items()}

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: the verdict's keys, and beside them the whole table."""
        table = {name: {"score": one.mean, "ci95": [one.low, one.high]} for name, one in self.scores.items()}
        return self.verdict.to_json() | {
            "scores": table,
            "chance": self.chance,
            "test_readings": self.test_readings,
            "pretraining_saw_test_images": self.pretraining,
            "pretraining_overlap": self.overlap.to_dict(),
            "near_twins": None if self.near_twins is None else self.near_twins.to_dict(),
            "verdicts": {name: one.to_json() for name, one in self.verdicts.items()},
            "tables": {
                classifier: {name: one.to_dict(self.class_names) for name, one in methods.items()}
                for classifier, methods in self.tables.items()
            },
            "weights": self.notes,
            **({"counterfactual": self._counterfactual()} if self.counterfactual else {}),
        }

    def _counterfactual(self) -> dict[str, Any]:
        return {name: {when: one.to_dict() for when, one in both.items()} for name, both in self.counterfactual.items()}


def evaluate_frozen(
    runs: Sequence[Run],
    data: LabelledData | VideoData,
    plan: FrozenPlan,
    *,
    named: Sequence[NamedEncoder | NotHere] = (),
    cache: Path | None = None,
    device: torch.device,
    say: Callable[[str], None],
    warn: Callable[[str], None] | None = None,
) -> FrozenResult:
    """Score the runs' frozen encoders against pixels, random weights and named weights on the test split.

    Of videos, what is classified is a video: the mean of its clips' (or frames') features; a further baseline is the
    histogram of its colours.

    The runs must be repeats of one recipe (`together.check_together`). The reading of the test split is put into every
    run's ledger before its labels are used. named: further baselines. cache: folder for their pixels. warn: told
    about a ledger that had to be repaired.
    """
    seeds = plan.random_seeds or len(runs)
    if 1 < seeds < len(runs):
        raise UsageError(
            f"--random-seeds {seeds} with {len(runs)} runs: each run needs a random initialisation beside it. Give 1 "
            f"(the same for all) or at least {len(runs)}."
        )
    test = data.split.test
    named_specs = sorted(one.name for one in named)
    name = plan_hash({**plan.to_dict(), "data": data.name, "n_test": len(test), "baselines": named_specs})
    ledgers = [Ledger(run.folder.evaluation / "ledger.jsonl") for run in runs]
    for run, ledger in zip(runs, ledgers, strict=True):
        if ledger.set_aside and warn is not None:
            warn(ledger.set_aside)
        ledger.record(split="test", purpose="frozen evaluation", plan=name, n=len(test), step=run.step)
    # The labels of the validation split serve too: k is fixed or chosen inside a draw, and the probe's penalty, with
    # all labels, is chosen on them before it is fitted to all.
    bank = np.sort(np.concatenate([data.split.train, data.split.val]))
    if isinstance(data, VideoData):
        found = video_contenders(runs, data, bank, random_seeds=seeds, device=device, say=say)
    else:
        found = contenders(runs, data, bank, random_seeds=seeds, named=named, cache=cache, device=device, say=say)
    judged = "videos" if isinstance(data, VideoData) else "images"
    labels = data.index.labels
    groups = data.index.groups[test] if (data.index.groups[test] >= 0).any() else None
    correct: dict[Classifier, dict[str, Floats]] = {}
    tables: dict[str, dict[str, Scores]] = {}
    for classifier in plan.classifiers:
        say(f"{CLASSIFIERS[classifier]} on {len(test)} test {judged}, {_budget(plan, len(bank))}")
        answers = answer_features(
            {**found.runs, **found.baselines},
            shuffled(labels[bank], plan.shuffle_seed) if plan.shuffle_labels else labels[bank],
            data.index.ids[bank],
            _reader(classifier, plan, data, bank),
            seed=0,
            labels_per_class=plan.labels_per_class,
            draws=plan.draws,
            bank_groups=data.index.groups[bank],
            class_names=data.index.class_names,
            runs=len(runs),
        )
        correct[classifier] = {method: one.right(labels[test]) for method, one in answers.items()}
        tables[classifier] = {
            method: score(one, labels[test], n_classes=data.n_classes, groups=groups) for method, one in answers.items()
        }

    def verdicts_on(keep: Bools) -> dict[str, Verdict]:
        kept_groups = None if groups is None else groups[keep]
        return {
            classifier: _verdict(
                classifier, plan, found, {name: one[:, keep] for name, one in right.items()}, runs, kept_groups, judged
            )
            for classifier, right in correct.items()
        }

    verdicts = verdicts_on(np.ones(len(test), np.bool_))
    twins = None
    if isinstance(data, LabelledData) and not plan.shuffle_labels:
        say(f"near twins of {len(test)} test images among {len(bank)} training images")
        twins = near_twins(data, bank, verdicts_on)
    counts = np.bincount(labels[test], minlength=data.n_classes)
    overlap = overlap_with(runs, data)
    first = plan.classifiers[0]
    return FrozenResult(
        verdict=verdicts[first],
        verdicts=verdicts,
        tables=tables,
        class_names=data.index.class_names,
        chance=float(counts.max() / counts.sum()) if plan.shuffle_labels else 1.0 / int((counts > 0).sum()),
        test_readings=max(ledger.count("test") for ledger in ledgers),
        pretraining=overlap.text,
        overlap=overlap,
        near_twins=twins,
        notes=found.notes,
        correct=correct[first],
    )


def _budget(plan: FrozenPlan, labels: int) -> str:
    if plan.labels_per_class is None:
        return f"{labels} labels"
    return f"{plan.draws} draws of {plan.labels_per_class} labels a class"


def _reader(classifier: Classifier, plan: FrozenPlan, data: LabelledData | VideoData, bank: Ints) -> Reader:
    few = plan.labels_per_class is not None
    if classifier == "knn":
        k: int | Sequence[int] = plan.k or (FEW_LABEL_K if few else min(ALL_LABEL_K, len(bank)))
        return knn_reader(data.n_classes, k, knn_temperature=plan.knn_temperature)
    val, groups = data.split.val, data.index.groups
    units = np.where(groups[val] >= 0, groups[val], data.index.ids[val])
    return probe_reader(data.n_classes, held_units=None if few or not len(val) else units)


def _verdict(
    classifier: Classifier,
    plan: FrozenPlan,
    found: Contenders,
    right: dict[str, Floats],
    runs: Sequence[Run],
    groups: Ints | None,
    judged: str,
) -> Verdict:
    return decide(
        {name: matrix for name, matrix in right.items() if name in found.baselines or name == plan.readout},
        plan.readout,
        metric=CLASSIFIERS[classifier],
        readout=plan.readout.removeprefix("key-"),
        encoder="key" if plan.readout.startswith("key-") else "query",
        step=min(run.step for run in runs),
        runs=len(runs),
        draws=None if plan.labels_per_class is None else plan.draws,
        labels_per_class=plan.labels_per_class,
        groups=groups,
        not_run=found.not_run,
        judged=judged,
    )


def counterfactuals(
    runs: Sequence[Run], data: LabelledData, changes: Sequence[str], *, device: torch.device
) -> dict[str, dict[str, Counterfactual]]:
    """The counterfactual probe of the query encoders on the test images, before and after training, mean over runs.

    Before: the run's own first weights, batch norm calibrated on training images. No label is read, so there is no
    line for the ledger. Raises UsageError for an unknown change.
    """
    for change in changes:
        find_change(change)
    found: dict[str, dict[str, list[Counterfactual]]] = {change: {"before": [], "after": []} for change in changes}
    for run in runs:
        views = run.config.views
        first = make_encoder(run.config.encoder, views.size, run.config.train.seed).to(device)
        some = data.split.train[:2560]
        part = {"size": views.size, "mean": views.mean, "std": views.std, "device": device}
        calibrate(first, plain_batches(data.store, some, batch=min(256, len(some)), **part))  # type: ignore[arg-type]
        for when, encoder in (("before", first), ("after", run.encoder("query").to(device))):
            for change in changes:
                probe = encoder_counterfactual(encoder, data.store, data.split.test, change, **part)  # type: ignore[arg-type]
                found[change][when].append(probe)
    return {change: {when: mean_of(several) for when, several in both.items()} for change, both in found.items()}
