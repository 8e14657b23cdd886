"""The frozen evaluation of one or several runs: features, baselines, label draws, one reading of the test split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mocokit.errors import UsageError
from mocokit.evaluation.baselines import (
    PIXELS,
    RANDOM_INIT,
    RANDOM_INIT_FLATTENED,
    calibrate,
    pixel_features,
    random_init_features,
)
from mocokit.evaluation.counterfactual import Counterfactual, encoder_counterfactual, find_change, mean_of
from mocokit.evaluation.crossing import evaluate_features, knn_reader
from mocokit.evaluation.features import extract, plain_batches
from mocokit.evaluation.labelled import LabelledData
from mocokit.evaluation.protocol import Ledger, plan_hash, shuffled
from mocokit.evaluation.verdict import Interval, Verdict, crossed_interval, decide
from mocokit.training.run import Run, Which
from mocokit.training.state import make_encoder

FEW_LABEL_K = (1, 3, 5, 10, 20)
ALL_LABEL_K = 200
Floats = npt.NDArray[np.float64]
READOUTS = ("h", "z", "key-h", "key-z")
SHUFFLE_SEED = 1
RANDOM_SEED = 1_000_003  # first seed of the random-weights baselines, away from the seeds that runs use


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
    shuffle_labels: bool = False
    """Control: the training labels are shuffled, so every score must be at chance."""

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

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class FrozenResult:
    """The verdict, and every readout's and baseline's score with its interval."""

    verdict: Verdict
    scores: dict[str, Interval]
    chance: float
    test_readings: int
    pretraining: str
    correct: dict[str, Floats]
    """How right each method is on each test image: name -> [R, I] in 0..1; R as in `crossing.evaluate_features`."""
    counterfactual: dict[str, dict[str, Counterfactual]] = field(default_factory=dict)
    """By change: `before` and `after` training; empty when none was asked for."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: the verdict's keys, and beside them the whole table."""
        table = {name: {"score": one.mean, "ci95": [one.low, one.high]} for name, one in self.scores.items()}
        return self.verdict.to_json() | {
            "scores": table,
            "chance": self.chance,
            "test_readings": self.test_readings,
            "pretraining_saw_test_images": self.pretraining,
            **({"counterfactual": self._counterfactual()} if self.counterfactual else {}),
        }

    def _counterfactual(self) -> dict[str, Any]:
        return {name: {when: one.to_dict() for when, one in both.items()} for name, both in self.counterfactual.items()}


def evaluate_frozen(
    runs: Sequence[Run],
    data: LabelledData,
    plan: FrozenPlan,
    *,
    device: torch.device,
    say: Callable[[str], None],
) -> FrozenResult:
    """Score the runs' frozen encoders against pixels and random weights on the test split.

    All runs must have the same views and architecture (several seeds of one recipe). The reading of the test split
    is put into every run's ledger before its labels are used. Raises UsageError when the runs do not belong together.
    """
    first = runs[0].config
    for run in runs[1:]:
        if run.config.views.size != first.views.size or run.config.encoder != first.encoder:
            raise UsageError(
                f"{run.path} has another image size or architecture than {runs[0].path}; evaluated together, runs may "
                "differ in their seed only. Evaluate them apart."
            )
    name = plan_hash({**plan.to_dict(), "data": data.name, "n_test": len(data.split.test)})
    ledgers = [Ledger(run.folder.evaluation / "ledger.jsonl") for run in runs]
    for run, ledger in zip(runs, ledgers, strict=True):
        n = len(data.split.test)
        ledger.record(split="test", purpose="frozen evaluation", plan=name, n=n, step=run.step)
    # Nothing is chosen on the validation split here (k is fixed, or chosen inside a draw), so its labels serve too.
    bank, test = np.sort(np.concatenate([data.split.train, data.split.val])), data.split.test
    rows = np.concatenate([bank, test])
    cut = len(bank)

    def halves(vectors: Tensor) -> tuple[Tensor, Tensor]:
        return vectors[:cut], vectors[cut:]

    view = {"size": first.views.size, "mean": first.views.mean, "std": first.views.std}
    methods: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in READOUTS}
    for run in runs:
        say(f"features of {run.path.name} ({len(rows)} images)")
        own = {"size": run.config.views.size, "mean": run.config.views.mean, "std": run.config.views.std}
        which: Which
        for which, prefix in (("query", ""), ("key", "key-")):
            found = extract(run.encoder(which).to(device), data.store, rows, device=device, **own)  # type: ignore[arg-type]
            methods[f"{prefix}h"].append(halves(found.h))
            methods[f"{prefix}z"].append(halves(found.z))
    say("baselines: pixels, random weights")
    baselines: dict[str, Any] = {PIXELS: halves(pixel_features(data.store, rows, **view))}  # type: ignore[arg-type]
    not_run: dict[str, str] = {}
    # As many random initialisations as runs, so that the baseline varies over seeds as the method does.
    inits = [
        random_init_features(
            lambda s: make_encoder(first.encoder, first.views.size, RANDOM_SEED + s),
            data.store,
            rows,
            bank,
            seed,
            device=device,
            **view,  # type: ignore[arg-type]
        )
        for seed in range(len(runs))
    ]
    baselines[RANDOM_INIT] = [halves(one.pooled) for one in inits]
    flattened = [halves(one.flattened) for one in inits if one.flattened is not None]
    if flattened:
        baselines[RANDOM_INIT_FLATTENED] = flattened
    else:
        not_run[RANDOM_INIT_FLATTENED] = f"{first.encoder.backbone} has no spatial map"
    labels = data.index.labels
    bank_labels = shuffled(labels[bank], SHUFFLE_SEED) if plan.shuffle_labels else labels[bank]
    few = plan.labels_per_class is not None
    draws = plan.draws if few else 1
    k: int | Sequence[int] = plan.k or (FEW_LABEL_K if few else min(ALL_LABEL_K, cut))
    read = knn_reader(data.n_classes, k, knn_temperature=plan.knn_temperature)
    budget = f"{draws} draws of {plan.labels_per_class} labels a class" if few else f"{cut} labels"
    say(f"kNN on {len(test)} test images, {budget}")
    matrices = evaluate_features(
        {**methods, **baselines},
        bank_labels,
        data.index.ids[bank],
        labels[test],
        read,
        seed=0,
        labels_per_class=plan.labels_per_class,
        draws=draws,
        bank_groups=data.index.groups[bank],
        class_names=data.index.class_names,
    )
    groups = data.index.groups[test] if (data.index.groups[test] >= 0).any() else None
    scores = {name: crossed_interval(matrix, groups, bounds=(0, 1)) for name, matrix in matrices.items()}
    verdict = decide(
        {name: matrix for name, matrix in matrices.items() if name in baselines or name == plan.readout},
        plan.readout,
        metric="kNN",
        readout=plan.readout.removeprefix("key-"),
        encoder="key" if plan.readout.startswith("key-") else "query",
        step=min(run.step for run in runs),
        runs=len(runs),
        draws=draws if few else None,
        labels_per_class=plan.labels_per_class,
        groups=groups,
        not_run=not_run,
    )
    counts = np.bincount(labels[test], minlength=data.n_classes)
    return FrozenResult(
        verdict=verdict,
        scores=scores,
        chance=float(counts.max() / counts.sum()) if plan.shuffle_labels else 1.0 / int((counts > 0).sum()),
        test_readings=max(ledger.count("test") for ledger in ledgers),
        pretraining=_touched(runs, data),
        correct=matrices,
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


def _touched(runs: Sequence[Run], data: LabelledData) -> str:
    """Whether pretraining used the unlabelled test images, as far as the sample table tells."""
    used = runs[0].config.data
    if used.index_hash == data.index.hash:
        return "yes: pretraining used all images of this data set, the test images among them, without labels"
    train = data.index.subset(data.index.rows_of("train")) if "train" in data.index.split_names else None
    if train is not None and used.index_hash == train.hash:
        return "no: pretraining used the train split of this data set"
    return "unknown: pretraining used other data; overlap by content was not checked"
