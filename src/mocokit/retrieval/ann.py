"""Nearest neighbours by cosine among unit vectors: exact, or approximate (HNSW, IVF) with the recall it was tuned to.

Vectors have positions 0..M-1, the order in which they were added; ids and everything else about them live elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import faiss as untyped_faiss
import numpy as np
import numpy.typing as npt
import torch

from mocokit.data.randomness import hash_words, word
from mocokit.errors import DamagedError, UsageError, did_you_mean
from mocokit.retrieval.encode import Floats, Ints

faiss: Any = untyped_faiss  # its own annotations leave out what SWIG adds
Kind = Literal["exact", "hnsw", "ivf"]
AUTO_EXACT = 200_000
"""Up to so many vectors `auto` is exact."""
HNSW_LINKS = 16
HNSW_CONSTRUCTION = 80
TARGET_RECALL = 0.98
"""Of stored vectors, which a graph finds more easily than new ones: 0.985 and 0.953 (HNSW, 100,000 vectors)."""
PROBES = 500
"""Queries on which recall against exact search is measured."""
FEW = 50_000
"""Where a filter leaves no more than this many vectors, they are compared exactly."""


@dataclass(slots=True)
class Neighbours:
    """An index over M unit vectors of D dimensions.

    effort: `efSearch` of HNSW, `nprobe` of IVF, 0 when exact. recall: share of the true 10 nearest that a search
    finds, measured at build; 1 when exact.
    """

    kind: Kind
    index: Any
    effort: int
    recall: float

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @property
    def dim(self) -> int:
        """D."""
        return int(self.index.d)

    def vectors(self, positions: Ints | None = None) -> Floats:
        """Copies of the unit vectors, float32 [M, D] or [len(positions), D]."""
        if positions is None:
            found: Floats = self.index.reconstruct_n(0, len(self))
        else:
            found = self.index.reconstruct_batch(positions)
        return found

    def search(self, queries: Floats, k: int, allowed: npt.NDArray[np.bool_] | None = None) -> tuple[Floats, Ints]:
        """Cosines float32 [Q, k] and positions int64 [Q, k] of each unit query's nearest, nearest first.

        allowed: bool [M], the vectors that may be found. Where there are fewer than k, positions end in -1. Exact
        searches put the lower position first where cosines are equal.
        """
        if allowed is not None:
            inside = np.flatnonzero(allowed)
            if len(inside) <= FEW:
                return _exact_among(self.vectors(inside), inside, queries, k)
        if self.kind != "exact":
            return self._raw(queries, k, allowed)
        cosines, positions = self._raw(queries, k + 1, allowed)
        for number in np.flatnonzero((positions[:, k] >= 0) & (cosines[:, k - 1] == cosines[:, k])).tolist():
            self._settle_ties(queries[number], cosines[number], positions[number], k, allowed)
        order = np.lexsort((positions, -cosines))
        return np.take_along_axis(cosines, order, 1)[:, :k], np.take_along_axis(positions, order, 1)[:, :k]

    def _raw(self, queries: Floats, k: int, allowed: npt.NDArray[np.bool_] | None) -> tuple[Floats, Ints]:
        with _one_thread() if len(queries) == 1 else contextlib.nullcontext():
            found = self.index.search(np.ascontiguousarray(queries), k, params=self._parameters(allowed))
        cosines, positions = found
        cosines[positions < 0] = -np.inf
        return cosines, positions

    def _settle_ties(
        self, query: Floats, cosines: Floats, positions: Ints, k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> None:
        """The k-th and the next are equal: put all that are as near in the order of their positions, in place."""
        least = np.nextafter(cosines[k], np.float32(-np.inf))
        _, scores, found = self.index.range_search(query[None], least, params=self._parameters(allowed))
        order = np.lexsort((found, -scores))[: k + 1]
        cosines[: len(order)], positions[: len(order)] = scores[order], found[order]

    def _parameters(self, allowed: npt.NDArray[np.bool_] | None) -> Any:
        selector = None if allowed is None else faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        if self.kind == "hnsw":
            return faiss.SearchParametersHNSW(efSearch=self.effort, sel=selector)
        if self.kind == "ivf":
            return faiss.SearchParametersIVF(nprobe=self.effort, sel=selector)
        return faiss.SearchParameters(sel=selector)

    def add(self, vectors: Floats) -> None:
        """Append unit vectors [A, D]; their positions follow the last one's."""
        self.index.add(np.ascontiguousarray(vectors))

    def to_bytes(self) -> bytes:
        """What `from_bytes` reads: faiss's own format."""
        return faiss.serialize_index(self.index).tobytes()  # type: ignore[no-any-return]


def from_bytes(data: npt.NDArray[np.uint8], kind: str, effort: int, recall: float) -> Neighbours:
    """The index in faiss's format. Its bytes must have been verified. Raises DamagedError for another kind."""
    index = faiss.deserialize_index(data)
    expected = {"exact": faiss.IndexFlat, "hnsw": faiss.IndexHNSWFlat, "ivf": faiss.IndexIVFFlat}
    if kind not in expected or not isinstance(index, expected[kind]):
        raise DamagedError(f"The index is recorded as {kind!r} but holds something else. Build it again.")
    if kind == "ivf":
        index.make_direct_map()
    return Neighbours(kind, index, effort, recall)  # type: ignore[arg-type]


def resolve_kind(kind: str, count: int) -> Kind:
    """`auto` becomes exact up to 200,000 vectors and HNSW above. Raises UsageError for an unknown kind."""
    if kind == "auto":
        return "exact" if count <= AUTO_EXACT else "hnsw"
    if kind not in get_args(Kind):
        choices = ("auto", *get_args(Kind))
        raise UsageError(f"--kind must be one of {', '.join(choices)}. Got {kind!r}.{did_you_mean(kind, choices)}")
    if kind == "ivf" and count < 1000:
        raise UsageError(
            f"--kind ivf divides the vectors into lists and needs 1,000 of them at least; there are {count}."
        )
    return kind  # type: ignore[return-value]


def build(vectors: Floats, kind: Kind) -> Neighbours:
    """An index over unit vectors [M, D]; approximate ones are tuned to a recall@10 of 0.98 against exact search.

    HNSW: 16 links, 80 candidates at construction. IVF: 4 sqrt(M) lists. Same bits on one thread; an HNSW graph built
    on several differs from build to build.
    """
    count, dim = vectors.shape
    index: Any
    if kind == "exact":
        index = faiss.IndexFlatIP(dim)
        index.add(vectors)
        return Neighbours(kind, index, 0, 1.0)
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_CONSTRUCTION
        index.add(vectors)
    else:
        lists = max(1, min(int(4 * count**0.5), count // 39))
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.seed = 1234
        sample = vectors[_some(count, min(count, 64 * lists))]
        index.train(np.ascontiguousarray(sample))
        index.add(vectors)
        index.make_direct_map()
    return tuned(Neighbours(kind, index, 0, 0.0), vectors)


def tuned(neighbours: Neighbours, vectors: Floats) -> Neighbours:
    """Double the effort until recall@10 is 0.98; keep the last one tried. Measured on 500 of the vectors themselves."""
    probes = _some(len(vectors), min(PROBES, len(vectors)))
    truth = _without_self(_exact_in_blocks(vectors, vectors[probes], 11), probes)
    limit = len(vectors) if neighbours.kind == "hnsw" else neighbours.index.nlist
    effort = 16 if neighbours.kind == "hnsw" else 1
    while True:
        neighbours.effort = min(effort, limit)
        _, found = neighbours.search(vectors[probes], min(11, len(vectors)))
        neighbours.recall = _overlap(truth, _without_self(found, probes))
        if neighbours.recall >= TARGET_RECALL or effort >= min(limit, 4096):
            return neighbours
        effort *= 2


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """For one query: faiss shares its vectors among threads then, which took five times as long as one thread alone."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def _some(count: int, number: int) -> Ints:
    """`number` different positions of 0..count-1, by hash, ascending."""
    order = np.argsort(hash_words(word("index probes"), np.arange(count, dtype=np.int64)), kind="stable")
    return np.sort(order[:number]).astype(np.int64)


def _exact_in_blocks(vectors: Floats, queries: Floats, k: int, block: int = 100_000) -> Ints:
    """Positions [Q, k] of the exact nearest, in any order, without an index of all vectors."""
    asked = torch.from_numpy(queries)
    scores, best = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
    for start in range(0, len(vectors), block):
        cosines = asked @ torch.from_numpy(vectors[start : start + block]).T
        top = cosines.topk(min(k, cosines.shape[1]), dim=1)
        scores, best = torch.cat([scores, top.values], 1), torch.cat([best, top.indices + start], 1)
        keep = scores.topk(min(k, scores.shape[1]), dim=1).indices
        scores, best = scores.gather(1, keep), best.gather(1, keep)
    return best.numpy()


def _without_self(found: Ints, own: Ints) -> list[set[int]]:
    return [
        set([p for p in line.tolist() if p not in (-1, me)][:10]) for line, me in zip(found, own.tolist(), strict=True)
    ]


def _overlap(truth: list[set[int]], found: list[set[int]]) -> float:
    total = sum(map(len, truth))
    return sum(len(a & b) for a, b in zip(truth, found, strict=True)) / total if total else 1.0


def _exact_among(vectors: Floats, positions: Ints, queries: Floats, k: int) -> tuple[Floats, Ints]:
    """The nearest of a few vectors, by matrix product."""
    cosines, found = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
    for number, query in enumerate(queries):
        if len(positions):
            scores, places = _top(vectors @ query, k)
            cosines[number, : len(places)], found[number, : len(places)] = scores, positions[places]
    return cosines, found


def _top(scores: Floats, k: int) -> tuple[Floats, Ints]:
    """The k largest scores [k] and their places [k]; equal ones by place."""
    places = np.arange(len(scores))
    if k < len(scores):
        places = np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])
    places = places[np.argsort(-scores[places], kind="stable")][:k]
    return scores[places], places.astype(np.int64)
