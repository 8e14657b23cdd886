"""The index: exactness, ties, filters, approximate recall, generations, what is refused. Oracles: numpy, sklearn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from sklearn.metrics import average_precision_score

from mocokit import files
from mocokit.data.index import make_index
from mocokit.errors import DamagedError, DataError, LockedError, UsageError
from mocokit.retrieval import ann
from mocokit.retrieval import index as store
from mocokit.retrieval import query as asking
from mocokit.retrieval.encode import unit
from mocokit.retrieval.rows import rows_from_bytes, rows_of_index
from mocokit.retrieval.scores import rank_all
from tests.faults import CODES, Faults
from tests.toy import contents, flip_bit

Floats = npt.NDArray[np.float32]


def vectors_of(count: int, dim: int = 8, seed: int = 0) -> Floats:
    return unit(np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32))


def clustered(count: int, dim: int = 16) -> Floats:
    """What embeddings look like: clouds around centres."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((50, dim))
    return unit((centres[rng.integers(0, 50, count)] + 0.3 * rng.standard_normal((count, dim))).astype(np.float32))


def made(path: Path, count: int = 40, kind: str = "exact", **columns: Any) -> store.SearchIndex:
    """A committed index over random vectors, labelled a, b, c in turn, in groups of four."""
    names = [f"{'abc'[n % 3]}/{n:03d}.png" for n in range(count)]
    labels = ["abc"[n % 3] for n in range(count)]
    groups = [f"group {n // 4}" for n in range(count)]
    table = make_index(names, labels=columns.get("labels", labels), groups=groups)
    rows = rows_of_index(table, np.arange(count), 0)
    facts = {"weights": "0", "step": 1, "readout": "h", "run": "..", "sources": []}
    with store.claim_index(path, overwrite=False):
        vectors = columns.get("vectors", vectors_of(count))
        return store.commit(store.new_index(path, vectors, rows, facts, kind))


# ------------------------------------------------------------------------------------------ nearest neighbours


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 5), st.booleans(), st.integers(0, 2**16))
def test_exact_search_is_a_sort_by_cosine_then_position(M: int, k: int, Q: int, some: bool, seed: int) -> None:
    """Vectors on a coarse grid, so that many are equal."""
    rng = np.random.default_rng(seed)
    vectors = unit((rng.integers(0, 2, (M, 3)) + np.array([0.5, 0, 0])).astype(np.float32))
    queries = vectors[rng.integers(0, M, Q)]
    may = rng.random(M) < 0.6 if some else None
    cosines, positions = ann.build(vectors, "exact").search(queries, k, may)
    inside = np.arange(M) if may is None else np.flatnonzero(may)
    for query, line, scores in zip(queries, positions, cosines, strict=True):
        true = (vectors[inside].astype(np.float64) @ query.astype(np.float64)).round(5)
        order = inside[np.lexsort((inside, -true))][:k]
        found = line[line >= 0]
        assert len(found) == min(k, len(inside))
        assert sorted(found.tolist()) == sorted(set(found.tolist()))
        np.testing.assert_allclose(scores[: len(found)], np.sort(true)[::-1][: len(found)], atol=1e-4)
        if len({round(float(x), 4) for x in true}) == len({float(x) for x in scores[: len(found)]}):
            assert found.tolist() == order.tolist()


def test_equal_vectors_come_in_the_order_of_their_positions() -> None:
    vectors = np.concatenate([vectors_of(5), np.repeat(vectors_of(1, seed=7), 300, axis=0)])
    index = ann.build(vectors, "exact")
    _, positions = index.search(vectors[10:11], 20)
    assert positions[0].tolist() == list(range(5, 25))
    _, positions = index.search(np.repeat(vectors[10:11], 30, axis=0), 20)  # faiss computes batches another way
    assert (positions == np.arange(5, 25)).all()


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_approximate_search_reaches_its_recall_and_keeps_to_the_filter(kind: Any) -> None:
    vectors = clustered(4000)
    index = ann.build(vectors, kind)
    assert index.recall >= ann.TARGET_RECALL
    cosines = vectors[:200] @ vectors.T
    truth = np.argsort(-cosines, axis=1)[:, :10]
    _, found = index.search(vectors[:200], 10)
    share = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(truth.tolist(), found.tolist(), strict=True)])
    assert share > 0.9
    may = np.arange(4000) % 5 == 0
    _, found = index.search(vectors[:5], 10, may)  # few enough to be compared exactly
    expected = np.flatnonzero(may)[np.argsort(-(vectors[:5] @ vectors[may].T), axis=1)[:, :10]]
    assert np.array_equal(found, expected)
    again = ann.from_bytes(np.frombuffer(index.to_bytes(), np.uint8), kind, index.effort, index.recall)
    assert np.array_equal(again.search(vectors[:50], 10)[1], index.search(vectors[:50], 10)[1])
    assert np.array_equal(again.vectors(), vectors)


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_filter_that_leaves_many_is_kept_to_as_well(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ann, "FEW", 10)
    vectors = clustered(3000)
    may = np.arange(3000) % 2 == 0
    _, found = ann.build(vectors, kind).search(vectors[:50], 10, may)
    assert (found[found >= 0] % 2 == 0).all()
    assert (found >= 0).mean() > 0.95


def test_kinds_that_cannot_be() -> None:
    assert (ann.resolve_kind("auto", 10), ann.resolve_kind("auto", 300_000)) == ("exact", "hnsw")
    with pytest.raises(UsageError, match="Did you mean 'hnsw'"):
        ann.resolve_kind("hnws", 10)
    with pytest.raises(UsageError, match="1,000"):
        ann.resolve_kind("ivf", 10)
    with pytest.raises(DamagedError):
        ann.from_bytes(np.frombuffer(ann.build(vectors_of(9), "exact").to_bytes(), np.uint8), "hnsw", 1, 1.0)


# ----------------------------------------------------------------------------------------------- on the disk


def test_an_index_comes_back_as_it_was_written(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    again = store.open_index(tmp_path / "i")
    assert again.rows.table.equals(index.rows.table)
    assert np.array_equal(again.neighbours.vectors(), vectors_of(40))
    assert (again.generation, len(again)) == (1, 40)
    assert contents(tmp_path / "i").keys() == {
        ".lock", "CURRENT", "index.json",
        *(f"gen-000001/{name}" for name in store.GENERATION_FILES),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["exact", "hnsw", "ivf"])
def test_added_and_removed_images(kind: str, tmp_path: Path) -> None:
    count = 1200
    index = made(tmp_path / "i", count, kind, vectors=clustered(count))
    more = make_index([f"new/{n}" for n in range(50)] + ["a/000.png"])
    rows = rows_of_index(more, np.arange(51), 1)
    added = clustered(count + 51)[count:]
    with store.claim_index(tmp_path / "i", overwrite=None):
        index = store.commit(store.with_added(index, added, rows))
    assert (len(index), index.generation) == (1250, 2)  # one was replaced
    opened = store.open_index(tmp_path / "i")
    hits = asking.nearest(opened, added[-1:], 1)[0]
    assert (hits[0].name, round(hits[0].score, 4)) == ("a/000.png", 1.0)
    with store.claim_index(tmp_path / "i", overwrite=None):
        gone = store.find_rows(opened, labels=["b"], patterns=["new/1*"], ids=[opened.rows.ids[5]])
        index = store.commit(store.with_removed(opened, gone))
    opened = store.open_index(tmp_path / "i")
    assert len(opened) == 1250 - 400 - 11 - 1
    assert [name for name, _ in opened.rows.labels()] == ["a", "c"]
    every = [hit for line in asking.nearest(opened, clustered(20), 1000) for hit in line]
    assert not [hit for hit in every if hit.label == "b" or hit.name.startswith("new/1")]
    with pytest.raises(UsageError, match="all images"):
        store.with_removed(opened, np.flatnonzero(opened.rows.alive))


@pytest.mark.parametrize("what", ["vectors.faiss", "rows.parquet", files.MANIFEST])
def test_damage_is_found_before_anything_is_answered(what: str, tmp_path: Path) -> None:
    made(tmp_path / "i")
    path = tmp_path / "i" / "gen-000001" / what
    for bit in np.random.default_rng(0).integers(0, 8 * path.stat().st_size, 20).tolist():
        flip_bit(path, bit)
        with pytest.raises(DamagedError):
            store.open_index(tmp_path / "i")
        flip_bit(path, bit)
    path.unlink()
    with pytest.raises(DamagedError):
        store.open_index(tmp_path / "i")
    for text in ("", "gen-x", "../../gen-000001", "gen-000009\n", "\xff"):
        (tmp_path / "i" / "CURRENT").write_text(text, "latin-1")
        with pytest.raises(DamagedError):
            store.open_index(tmp_path / "i")


def test_any_file_operation_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th primitive fails, for every n: the error is raised, and the old or the new index answers."""
    index = made(tmp_path / "i")
    rows = rows_of_index(make_index(["one more"]), np.arange(1), 1)

    def change() -> None:
        with store.claim_index(tmp_path / "i", overwrite=None):
            opened = store.open_index(tmp_path / "i")
            store.commit(store.with_added(opened, vectors_of(1, seed=3), rows))

    total = Faults(monkeypatch).count(change)
    assert total > 10
    for number in range(1, total + 1):
        faults = Faults(monkeypatch, fail_at=number, code=CODES[number % len(CODES)])
        with pytest.raises(files.StorageError):
            change()
        faults.stop()
        opened = store.open_index(tmp_path / "i")
        assert len(opened) in (40, 41)
        assert np.array_equal(opened.neighbours.vectors()[:39], index.neighbours.vectors()[:39])
    change()
    assert not [p for p in (tmp_path / "i").iterdir() if p.name.startswith(".tmp-")]
    assert len(list((tmp_path / "i").glob("gen-*"))) == 1


def test_what_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "i")
    with pytest.raises(UsageError, match="already holds an index"):
        store.claim_index(tmp_path / "i", overwrite=False)
    with store.claim_index(tmp_path / "i", overwrite=True), pytest.raises(LockedError):
        store.claim_index(tmp_path / "i", overwrite=None)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")
    for overwrite in (True, False, None):
        with pytest.raises(UsageError):
            store.claim_index(tmp_path / "mine", overwrite=overwrite)
    assert contents(tmp_path / "mine") == {"notes": b"keep"}
    with pytest.raises(UsageError, match="does not exist"):
        store.open_index(tmp_path / "no")
    (tmp_path / "i" / "CURRENT").unlink()
    with pytest.raises(UsageError, match="interrupted"):
        store.open_index(tmp_path / "i")


# ------------------------------------------------------------------------------------------------- questions


def test_filters_by_label_and_group(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    hits = asking.nearest(index, vectors_of(1, seed=5), 40, chosen=asking.Filter(labels=("a", "c")))[0]
    assert {hit.label for hit in hits} == {"a", "c"}
    assert len(hits) == 27
    hits = asking.nearest(index, vectors_of(1, seed=5), 40, chosen=asking.Filter(groups=("group 3",)))[0]
    assert sorted(hit.name[2:5] for hit in hits) == ["012", "013", "014", "015"]
    number = str(hits[0].group)
    same = asking.nearest(index, vectors_of(1, seed=5), 40, chosen=asking.Filter(groups=(number,)))[0]
    assert same == hits
    both = asking.Filter(groups=("group 3",), labels=("a",))
    assert len(asking.nearest(index, vectors_of(1), 40, chosen=both)[0]) == 2
    for chosen in (asking.Filter(labels=("d",)), asking.Filter(groups=("group 99",))):
        with pytest.raises(UsageError, match=r"no (label|group)"):
            asking.nearest(index, vectors_of(1), 1, chosen=chosen)
    for k, skip in ((0, 0), (1001, 0), (5, -1)):
        with pytest.raises(UsageError, match="k must lie"):
            asking.nearest(index, vectors_of(1), k, skip=skip)


def test_pages_are_slices_of_one_order(tmp_path: Path) -> None:
    index = made(tmp_path / "i")
    query = vectors_of(1, seed=9)
    whole = asking.nearest(index, query, 40)[0]
    pages = [hit for skip in range(0, 48, 6) for hit in asking.nearest(index, query, 6, skip=skip)[0]]
    assert pages == whole
    own = asking.nearest(index, query, 40, without=[whole[0].id])[0]
    assert [hit.id for hit in own] == [hit.id for hit in whole[1:]]


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_near_duplicates_are_the_connected_components(threshold: float, tmp_path: Path) -> None:
    vectors = clustered(300)
    index = made(tmp_path / "i", 300, vectors=vectors)
    index = store.with_removed(index, np.arange(0, 300, 50))
    kept = index.neighbours.vectors()
    links = csr_array((kept @ kept.T >= threshold - 1e-6).astype(int))
    _, component = connected_components(links, directed=False)
    expected = sorted(
        (sorted(np.flatnonzero(component == c).tolist()) for c in set(component.tolist())),
        key=lambda m: (-len(m), m[0]),
    )
    found = asking.near_duplicates(index, threshold, block=64)
    assert [one.rows.tolist() for one in found] == [some for some in expected if len(some) > 1]
    for cluster in found:
        assert cluster.lowest >= threshold - 1e-5
    with pytest.raises(UsageError, match="threshold"):
        asking.near_duplicates(index, 0.0)


def test_near_duplicates_in_an_approximate_index(tmp_path: Path) -> None:
    vectors = vectors_of(1500, 24)
    vectors[700] = vectors[3]
    vectors[900] = unit(vectors[3:4] + 1e-3)[0]
    index = made(tmp_path / "i", 1500, "hnsw", vectors=vectors)
    assert [one.rows.tolist() for one in asking.near_duplicates(index, 0.99)] == [[3, 700, 900]]


def test_rows_keep_names_that_are_no_text() -> None:
    odd = [b"\xff\xfe.png".decode("utf-8", "surrogateescape"), "新/图.png", "<script>\n.png"]
    table = make_index(odd, labels=["x", None, "y"])
    rows = rows_from_bytes(rows_of_index(table, np.arange(3), 0).to_bytes())
    assert [rows.name(n) for n in range(3)] == odd
    assert [rows.label(n) for n in range(3)] == ["x", None, "y"]
    assert rows.labels() == [("x", 1), ("y", 1)]
    assert list(rows.names()) == odd


# ---------------------------------------------------------------------------------------------------- scores


def brute_force(vectors: Floats, labels: npt.NDArray[np.int64], groups: npt.NDArray[np.int64] | None) -> Any:
    """Each image's scores by definition, with scikit-learn's average precision."""
    out = {}
    for q in range(len(vectors)):
        others = np.array([i for i in range(len(vectors)) if i != q and not _same(groups, i, q)], np.int64)
        right = labels[others] == labels[q]
        if not right.any():
            continue
        scores = vectors[others].astype(np.float64) @ vectors[q]
        ranked = right[np.argsort(-scores, kind="stable")]
        R = int(right.sum())
        out[q] = {
            "recall@1": float(ranked[:1].any()),
            "recall@4": float(ranked[:4].any()),
            "mAP": average_precision_score(right, scores),
            "R-precision": float(ranked[:R].mean()),
        }
    return out


def _same(groups: npt.NDArray[np.int64] | None, i: int, q: int) -> bool:
    return groups is not None and groups[i] >= 0 and groups[i] == groups[q]


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 40), st.integers(1, 6), st.booleans(), st.integers(0, 2**16))
def test_scores_are_those_of_the_definition(M: int, classes: int, grouped: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = unit(rng.standard_normal((M, 6)).astype(np.float32))
    labels = rng.integers(0, classes, M)
    groups = rng.integers(-1, 5, M) if grouped else None
    expected = brute_force(vectors, labels, groups)
    if len(expected) < 2:
        with pytest.raises(DataError, match="No label"):
            rank_all(torch.from_numpy(vectors), labels, groups, (1, 4))
        return
    ranked = rank_all(torch.from_numpy(vectors), labels, groups, (1, 4))
    assert ranked.asked.tolist() == list(expected)
    for name, values in ranked.values.items():
        np.testing.assert_allclose(values, [expected[q][name] for q in expected], atol=1e-9, err_msg=name)
