"""A map of vectors in two dimensions, for looking at."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from mocokit.errors import MissingDependencyError, UsageError, did_you_mean
from mocokit.retrieval.encode import Floats

Map = Literal["pca", "tsne", "umap", "none"]
TSNE_ROWS = 20_000
"""t-SNE takes minutes beyond this many rows on few cores."""
SEED = 0


def project(vectors: Floats, how: str) -> Floats:
    """Unit vectors [M, D] as float32 [M, 2]: `pca`, `tsne` or `umap` (umap-learn, where installed).

    Each is a function of the vectors alone (fixed seeds; a principal axis points to the side of its largest
    coordinate). Raises UsageError, MissingDependencyError.
    """
    if how not in get_args(Map) or how == "none":
        choices = get_args(Map)
        raise UsageError(f"--map must be one of {', '.join(choices)}. Got {how!r}.{did_you_mean(how, choices)}")
    if how == "pca" or len(vectors) < 5:
        return pca(vectors)
    if how == "tsne":
        if len(vectors) > TSNE_ROWS:
            raise UsageError(f"--map tsne is for up to {TSNE_ROWS:,} rows; there are {len(vectors):,}. Use --map pca.")
        from sklearn.manifold import TSNE

        perplexity = min(30.0, (len(vectors) - 1) / 4)
        made = TSNE(2, perplexity=perplexity, init=pca(vectors) * 1e-2, random_state=SEED, n_jobs=1)
        return made.fit_transform(vectors).astype(np.float32)  # type: ignore[no-any-return]
    try:
        import umap
    except ImportError as error:
        raise MissingDependencyError("--map umap needs umap-learn: pip install umap-learn") from error
    made = umap.UMAP(metric="cosine", random_state=SEED, n_jobs=1)
    return made.fit_transform(vectors).astype(np.float32)  # type: ignore[no-any-return]


def pca(vectors: Floats) -> Floats:
    """The first two principal components, float32 [M, 2], from the covariance matrix in float64."""
    mean = vectors.mean(axis=0, dtype=np.float64)
    total = np.zeros((vectors.shape[1], vectors.shape[1]))
    for start in range(0, len(vectors), 65_536):
        part = vectors[start : start + 65_536] - mean
        total += part.T @ part
    _, axes = np.linalg.eigh(total)
    first = axes[:, ::-1][:, :2]
    sides = np.sign(first[np.abs(first).argmax(axis=0), np.arange(first.shape[1])])
    places: Floats = ((vectors - mean) @ (first * sides)).astype(np.float32)
    return places
