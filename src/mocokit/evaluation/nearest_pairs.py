"""Pairs of images whose features are nearest to each other: proposals for near copies, never a proof."""

from __future__ import annotations

import faiss
import numpy as np
import numpy.typing as npt


def nearest_pairs(
    features: npt.NDArray[np.float32], rows: npt.NDArray[np.int64], neighbours: int = 3
) -> list[tuple[int, int, float]]:
    """(row, row, cosine) for every image and its nearest others, each pair once, the nearest first.

    features: float32 [M, D] of the images `rows` int64 [M]. The features' mean is taken off first: what all images
    share (they are all X-rays) says nothing about two of them.
    """
    if len(features) < 2:
        return []
    centred = features - features.mean(0, keepdims=True)
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    index = faiss.IndexFlatIP(centred.shape[1])
    index.add(centred)
    cosines, places = index.search(centred, min(neighbours + 1, len(centred)))
    found: dict[tuple[int, int], float] = {}
    for own, (values, others) in enumerate(zip(cosines, places, strict=True)):
        for value, other in zip(values.tolist(), others.tolist(), strict=True):
            if other >= 0 and other != own:
                a, b = sorted((int(rows[own]), int(rows[other])))
                found[(a, b)] = value
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [(a, b, value) for (a, b), value in ordered]
