"""How a lab begins and what it leaves: data, first weights, trained networks, and the frozen readouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn import functional as F

from mocokit.contrast.encoders import Encoder
from mocokit.contrast.key_queue import NO_ID, KeyQueue, Keys
from mocokit.contrast.momentum import ema_update_
from mocokit.data.generated_shapes import Shapes, generate
from mocokit.evaluation.counterfactual import counterfactual
from mocokit.evaluation.features import frozen
from mocokit.studies.setting import Streams, Trained, first_encoder

TARGETS = ("shape", "color")
CELLS = tuple(f"{space}_{target}_{probe}" for space in "hz" for target in TARGETS for probe in ("knn", "linear"))
"""The accuracies of one network, by their published names."""
COSINES = ("h_hue_swap_cosine", "z_hue_swap_cosine")

Scores = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabRun:
    """One repetition of a lab, in memory."""

    lab: str
    """`06` or `07`."""
    seeds: Streams
    data: Shapes
    initial: Encoder
    trained: Mapping[str, Trained]
    """By arm, in the published order."""
    scores: Mapping[str, Scores]
    """By arm, `random` (the first weights) before the others."""

    @classmethod
    def of(cls, lab: str, seeds: Streams, data: Shapes, initial: Encoder, trained: Mapping[str, Trained]) -> LabRun:
        """Read out the first weights and every arm."""
        encoders = {"random": initial, **{name: one.encoder for name, one in trained.items()}}
        scores = {name: read_out(encoder, data) for name, encoder in encoders.items()}
        return cls(lab=lab, seeds=seeds, data=data, initial=initial, trained=trained, scores=scores)

    def results(self) -> dict[str, Any]:
        """The figures as JSON values, under the published names."""
        return {
            "scores": dict(self.scores),
            "loss_history": {name: one.loss_history for name, one in self.trained.items()},
            "encoder_weight_l2_change": {name: one.first_layer_change for name, one in self.trained.items()},
            "warmup": warmup(),
            "images_sha256": self.data.sha256(),
        }


def start(seeds: Streams) -> tuple[Shapes, Tensor, Tensor, Encoder]:
    """The data, its images [840, 3, 16, 16] and training rows as tensors, and the first weights."""
    data = generate(seeds.data)
    return data, torch.from_numpy(data.images), torch.from_numpy(data.train_ids), first_encoder(seeds.init)


def read_out(encoder: Encoder, data: Shapes) -> Scores:
    """Frozen readouts of h and z: cosine 5NN and a linear probe, fitted on the 600, scored on the 240.

    Also the counterfactual: the mean cosine between the features of a held-out image and of the same image with red
    and blue exchanged. Deviation: 5NN with equal votes and scikit-learn's logistic regression, as published; the
    library's kNN weighs votes by similarity.
    """
    images = torch.from_numpy(data.images)
    labels = np.stack([data.shape, data.color], axis=1)
    with frozen(encoder):
        with torch.inference_mode():
            h, z = encoder.h_and_z(images)
        swapped = counterfactual(encoder.h_and_z, [images[data.test_ids]], "channel-swap")
    scores: Scores = {}
    for space, features, cosine in (("h", h, swapped.h), ("z", z, swapped.z)):
        unit = F.normalize(features, dim=1).numpy()
        train, test = unit[data.train_ids], unit[data.test_ids]
        train_labels, test_labels = labels[data.train_ids], labels[data.test_ids]
        knn = KNeighborsClassifier(n_neighbors=5, metric="cosine").fit(train, train_labels)
        knn_right = knn.predict(test) == test_labels  # both targets from one search for neighbours
        scaler = StandardScaler().fit(train)
        for column, target in enumerate(TARGETS):
            linear = LogisticRegression(C=1, max_iter=1000).fit(scaler.transform(train), train_labels[:, column])
            linear_right = linear.predict(scaler.transform(test)) == test_labels[:, column]
            scores[f"{space}_{target}_knn"] = float(knn_right[:, column].mean())
            scores[f"{space}_{target}_linear"] = float(linear_right.mean())
        scores[f"{space}_hue_swap_cosine"] = cosine.changed
    return scores


def warmup() -> dict[str, Any]:
    """The three worked examples with the library's own pieces: two temperatures, one FIFO step, one EMA step."""
    query = torch.tensor([1.0, 0.0], dtype=torch.float64)
    keys = F.normalize(torch.tensor([[0.8, 0.2], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64), dim=1)
    probabilities = {str(t): torch.softmax(keys @ query / t, 0).tolist() for t in (0.1, 0.5)}
    letters = "abcdef"
    queue = KeyQueue(4, 1)
    for step, batch in enumerate(([0, 1, 2, 3], [4, 5])):
        ids = torch.tensor(batch)
        queue.enqueue_(Keys(torch.ones(len(batch), 1), ids, torch.full_like(ids, NO_ID)), step)
    theta_k, theta_q = (torch.tensor(values, dtype=torch.float64) for values in ([0.0, 2.0], [2.0, 4.0]))
    ema_update_([theta_k], [theta_q], 0.9)
    return {
        "temperature_probabilities": probabilities,
        "FIFO": [letters[number] for number in queue.ids[queue.oldest_first()].tolist()],
        "EMA": [round(value, 12) for value in theta_k.tolist()],
    }
