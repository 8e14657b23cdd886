"""The curve during training: kNN accuracy on a validation split, each reading in the ledger. Never the test split."""

from __future__ import annotations

import numpy as np

from mocokit.contrast.encoders import Encoder
from mocokit.evaluation.features import extract
from mocokit.evaluation.knn import knn_predict
from mocokit.evaluation.labelled import LabelledData
from mocokit.evaluation.protocol import Ledger, plan_hash

K_NEIGHBOURS = 20
KNN_TEMPERATURE = 0.1
MAX_BANK = 10_000
CURVE = "curve during training"
"""The purpose of the monitor's readings in the ledger."""
Triple = tuple[float, float, float]


class Monitor:
    """Scores an encoder on the validation split of labelled data by kNN (k 20, knn_temperature 0.1, fixed in advance).

    The bank is the training split's labelled images (the first 10,000 by id, so that a reading stays cheap).
    """

    def __init__(self, data: LabelledData, ledger: Ledger, *, size: int, mean: Triple, std: Triple) -> None:
        self.data, self.ledger = data, ledger
        self.size, self.mean, self.std = size, mean, std
        bank = data.split.train
        self.bank = np.sort(bank[np.argsort(data.index.ids[bank], kind="stable")[:MAX_BANK]])
        self.plan = plan_hash({"monitor": data.name, "k": K_NEIGHBOURS, "knn_temperature": KNN_TEMPERATURE})

    @property
    def name(self) -> str:
        """The data's name, for the picture."""
        return self.data.name

    def __call__(self, encoder: Encoder, step: int) -> dict[str, float]:
        """kNN accuracy of h and z on the validation split: {"knn_h", "knn_z"} in 0..1."""
        held = self.data.split.val
        self.ledger.record(split="val", purpose=CURVE, plan=self.plan, n=len(held), step=step, data=self.name)
        device = next(encoder.parameters()).device
        rows = np.concatenate([self.bank, held])
        found = extract(encoder, self.data.store, rows, size=self.size, mean=self.mean, std=self.std, device=device)
        labels, cut = self.data.index.labels, len(self.bank)
        scores = {}
        for name, vectors in (("knn_h", found.h), ("knn_z", found.z)):
            predicted = knn_predict(
                vectors[:cut],
                labels[self.bank],
                vectors[cut:],
                k=min(K_NEIGHBOURS, cut),
                n_classes=self.data.n_classes,
                knn_temperature=KNN_TEMPERATURE,
            )
            scores[name] = float(np.mean(predicted == labels[held]))
        return scores
