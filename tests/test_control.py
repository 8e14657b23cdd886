"""The control: with shuffled labels there is nothing to read, so chance lies within the interval, nearly always."""

from __future__ import annotations

import pytest
import torch

import mocokit
from mocokit.evaluation.frozen import Classifier, FrozenPlan, evaluate_frozen
from mocokit.evaluation.labelled import LabelledData, open_labelled
from mocokit.training.run import Run


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, LabelledData]:
    folder = tmp_path_factory.mktemp("digits") / "run"
    fixed = {"threads": 1, "precision": "fp32", "layout": "contiguous"}  # what is timed could differ from run to run
    run = mocokit.pretrain("moved-digits", folder, epochs=1, backbone="small-cnn-8-16", quiet=True, **fixed)
    return run, open_labelled("moved-digits", size=run.config.views.size)


@pytest.mark.slow
@pytest.mark.parametrize(("classifier", "labels_per_class"), [("knn", 10), ("knn", None), ("linear", None)])
def test_shuffled_labels_are_at_chance_in_16_of_20_repeats(
    digits: tuple[Run, LabelledData], classifier: Classifier, labels_per_class: int | None
) -> None:
    run, data = digits
    hits = dict.fromkeys(("h", "pixels"), 0)
    for seed in range(20):
        plan = FrozenPlan(
            labels_per_class=labels_per_class,
            draws=5,
            classifiers=(classifier,),
            shuffle_labels=True,
            shuffle_seed=seed,
        )
        result = evaluate_frozen([run], data, plan, device=torch.device("cpu"), say=lambda _: None)
        for name in hits:
            hits[name] += result.scores[name].low <= 0.1 <= result.scores[name].high
    assert min(hits.values()) >= 16, hits
