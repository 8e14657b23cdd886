"""Features for looking at: nearest neighbours of images chosen by rule, not by hand, and a map of two dimensions."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit.evaluation.knn import nearest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Some queries with their nearest bank rows.

    kind: `good`, `median` or `worst` of each. queries: int64 [M], positions among the queries; found: int64 [M, k],
    positions in the bank; cosines: [M, k]. shared: the share of all queries' neighbours with the query's label, None
    without labels.
    """

    kind: list[str]
    queries: Ints
    found: Ints
    cosines: Floats
    shared: float | None


def chosen_neighbours(
    bank: Tensor,
    queries: Tensor,
    *,
    k: int,
    each: int,
    bank_labels: Ints | None = None,
    query_labels: Ints | None = None,
    same: Ints | None = None,
) -> Neighbours:
    """The best, the middle and the worst `each` of the queries [Q, D] by how their k neighbours in the bank [M, D] do.

    With labels a query is ranked by the share of neighbours of its class, equal ones by mean cosine; without, by mean
    cosine alone. same: int64 [Q], the bank row that is the query itself, left out; None where they are apart.
    """
    extra = 0 if same is None else 1
    cosines, rows = nearest(bank, queries, min(k + extra, len(bank)))
    if same is not None:
        kept = [np.flatnonzero(line != own)[: rows.shape[1] - 1] for line, own in zip(rows, same, strict=True)]
        cosines = np.stack([line[places] for line, places in zip(cosines, kept, strict=True)])
        rows = np.stack([line[places] for line, places in zip(rows, kept, strict=True)])
    closeness = cosines.mean(1)
    shared = None
    score = closeness.astype(np.float64)
    if bank_labels is not None and query_labels is not None:
        right = bank_labels[rows] == query_labels[:, None]
        shared = float(right.mean())
        score = right.mean(1) + 1e-3 * closeness
    order = np.argsort(-score, kind="stable")
    each = min(each, len(order) // 3) or 1
    middle = (len(order) - each) // 2
    places = np.concatenate([order[:each], order[middle : middle + each], order[-each:]]).astype(np.int64)
    kinds = ["good"] * each + ["median"] * each + ["worst"] * each
    return Neighbours(kinds, places, rows[places].astype(np.int64), cosines[places].astype(np.float64), shared)


def principal_map(features: Tensor) -> Floats:
    """Unit rows [M, D] on their two principal directions: float64 [M, 2]; the same sign on every machine."""
    unit = F.normalize(features.double(), dim=1)
    centred = unit - unit.mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False).Vh[:2]
    largest = directions.abs().argmax(1)
    directions = directions * directions[torch.arange(len(directions)), largest].sign()[:, None]
    flat: Floats = (centred @ directions.T).numpy()
    return flat if flat.shape[1] == 2 else np.pad(flat, ((0, 0), (0, 1)))


def neighbour_map(features: Tensor, seed: int = 0) -> tuple[str, Floats]:
    """A map that keeps neighbours together: UMAP where it is installed, else t-SNE. (name, float64 [M, 2])."""
    unit = F.normalize(features.float(), dim=1).numpy()
    if importlib.util.find_spec("umap") is not None:
        umap: Any = importlib.import_module("umap")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # UMAP says at every call that a fixed seed costs it its threads
            return "UMAP", np.asarray(umap.UMAP(random_state=seed).fit_transform(unit), np.float64)
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(unit) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed, max_iter=500)
    return "t-SNE", np.asarray(tsne.fit_transform(unit), np.float64)
