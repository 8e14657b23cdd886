import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mocokit.data.index import SampleIndex, make_index
from mocokit.errors import DamagedError, DataError, UsageError
from mocokit.evaluation.knn import knn_predict
from mocokit.evaluation.protocol import Ledger, Split, choose_k, draw_few, plan_hash, shuffled, split_rows


def table(
    count: int,
    classes: int = 4,
    groups: Sequence[str | None] | None = None,
    splits: Sequence[str | None] | None = None,
    start: int = 0,
) -> SampleIndex:
    return make_index(
        [f"class-{i % classes}/{i}.png" for i in range(start, start + count)],
        labels=[f"class {i % classes}" for i in range(start, start + count)],
        groups=groups,
        splits=splits,
    )


def sides(index: SampleIndex, split: Split) -> dict[str, str]:
    """name of the image -> name of its side."""
    return {
        index.names[row]: side
        for side, rows in (("train", split.train), ("val", split.val), ("test", split.test))
        for row in rows.tolist()
    }


# --------------------------------------------------------------------------------------------------- splits


def test_hash_split_takes_every_row_once_in_about_the_shares_asked_for() -> None:
    index = table(4000)
    split = split_rows(index, 0, test=0.2, val=0.25)
    everyone = np.concatenate([split.train, split.val, split.test])
    np.testing.assert_array_equal(np.sort(everyone), np.arange(4000))
    assert len(split.test) == pytest.approx(800, abs=4 * 25)
    assert len(split.val) == pytest.approx(800, abs=4 * 25)  # a quarter of the remaining 3,200
    for label in range(4):
        assert (index.labels[split.test] == label).sum() == pytest.approx(200, abs=4 * 13)
    other = split_rows(index, 1, test=0.2, val=0.25)
    assert len(np.intersect1d(split.test, other.test)) == pytest.approx(160, abs=50)


@given(before=st.integers(300, 400), added=st.integers(1, 300), seed=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_added_files_move_nobody(before: int, added: int, seed: int) -> None:
    small, large = table(before), table(before + added)
    old, new = sides(small, split_rows(small, seed)), sides(large, split_rows(large, seed))
    assert {name: new[name] for name in old} == old


def test_row_order_does_not_matter() -> None:
    index = table(200)
    backwards = index.subset(np.arange(199, -1, -1))
    assert sides(index, split_rows(index, 3)) == sides(backwards, split_rows(backwards, 3))


@given(seed=st.integers(0, 1000), count=st.integers(40, 120), spread=st.integers(2, 12))
@settings(max_examples=40, deadline=None)
def test_a_group_lies_wholly_on_one_side(seed: int, count: int, spread: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [None if g == 0 else f"patient {g}" for g in rng.integers(0, count // spread + 2, count)]
    index = table(count, groups=groups)
    split = split_rows(index, seed)
    where = sides(index, split)
    for group in set(groups) - {None}:
        assert len({where[index.names[i]] for i in range(count) if groups[i] == group}) == 1


def test_every_class_of_two_or_more_units_is_on_both_sides() -> None:
    for seed in range(40):
        index = table(24, classes=12)  # two images a class: chance alone leaves most classes out of the test
        split = split_rows(index, seed, val=0.0)
        assert set(index.labels[split.test]) == set(index.labels[split.train]) == set(range(12))
        assert len(split.val) == 0


def test_declared_splits_are_kept_and_only_a_missing_one_is_carved_out_of_train() -> None:
    words = ["train"] * 300 + ["test"] * 100
    index = table(400, splits=words)
    split = split_rows(index, 0, val=0.2)
    np.testing.assert_array_equal(split.test, np.arange(300, 400))
    assert len(split.val) == pytest.approx(60, abs=30)
    np.testing.assert_array_equal(np.sort(np.concatenate([split.train, split.val])), np.arange(300))

    index = table(400, splits=["train"] * 300 + ["val"] * 100)
    split = split_rows(index, 0)
    np.testing.assert_array_equal(split.val, np.arange(300, 400))
    np.testing.assert_array_equal(np.sort(np.concatenate([split.train, split.test])), np.arange(300))

    index = table(400, splits=["train"] * 200 + ["validation"] * 100 + ["test"] * 50 + [None] * 50)
    split = split_rows(index, 0)
    assert [len(split.train), len(split.val), len(split.test)] == [200, 100, 50]


def test_splits_that_cannot_serve_are_refused() -> None:
    with pytest.raises(DataError, match="no 'train'"):
        split_rows(table(20, splits=["val"] * 10 + ["test"] * 10), 0)
    with pytest.raises(DataError, match="both are needed"):
        split_rows(table(1), 0)
    with pytest.raises(UsageError, match="test=1"):
        split_rows(table(20), 0, test=1.0)
    groups = ["a", "b"] * 10
    with pytest.raises(DataError, match=r"2 group\(s\) lie in more than one"):
        split_rows(table(20, groups=groups, splits=["train"] * 10 + ["test"] * 10), 0)


# --------------------------------------------------------------------------------------------------- labels


@given(
    seed=st.integers(0, 100),
    draw=st.integers(0, 50),
    per_class=st.integers(1, 10),
    counts=st.lists(st.integers(10, 30), min_size=1, max_size=6),
    unlabelled=st.integers(0, 20),
)
@settings(max_examples=50, deadline=None)
def test_a_draw_has_exactly_so_many_of_each_class(
    seed: int, draw: int, per_class: int, counts: list[int], unlabelled: int
) -> None:
    labels = np.repeat(np.arange(-1, len(counts)), [unlabelled, *counts])
    order = np.random.default_rng(seed).permutation(len(labels))
    labels, ids = labels[order], order.astype(np.int64)
    rows = draw_few(labels, ids, per_class, draw, seed)
    assert np.bincount(labels[rows], minlength=len(counts)).tolist() == [per_class] * len(counts)
    assert len(np.unique(rows)) == len(rows)
    np.testing.assert_array_equal(rows, draw_few(labels, ids, per_class, draw, seed))
    smaller = draw_few(labels, ids, 1, draw, seed)
    assert set(smaller) <= set(rows)
    back = draw_few(labels[::-1].copy(), ids[::-1].copy(), per_class, draw, seed)
    assert set(ids[::-1][back]) == set(ids[rows])


def test_draws_are_uniform_over_images_and_differ() -> None:
    labels, ids = np.repeat([0, 1], 20), np.arange(40, dtype=np.int64)
    drawn = [draw_few(labels, ids, 5, draw, 7) for draw in range(400)]
    often = np.bincount(np.concatenate(drawn), minlength=40)
    assert often.sum() == 4000
    assert (np.abs(often - 100) < 5 * np.sqrt(400 * 0.25 * 0.75)).all()
    assert len({tuple(rows) for rows in drawn}) > 390


def test_too_few_labels_name_the_class() -> None:
    labels, ids = np.array([0, 0, 1, -1]), np.arange(4, dtype=np.int64)
    with pytest.raises(DataError, match="Class 'dog' has 1 labelled training images, fewer than the 2"):
        draw_few(labels, ids, 2, 0, 0, ["cat", "dog"])
    with pytest.raises(DataError, match="Class number 1"):
        draw_few(labels, ids, 2, 0, 0)
    with pytest.raises(DataError, match="None of the training images is labelled"):
        draw_few(np.array([-1, -1]), ids[:2], 1, 0, 0)
    with pytest.raises(UsageError, match="at least 1"):
        draw_few(labels, ids, 0, 0, 0)


def test_shuffled_labels_keep_the_counts_and_lose_the_meaning() -> None:
    labels = np.random.default_rng(0).integers(-1, 5, 5000)
    dealt = shuffled(labels, 3)
    np.testing.assert_array_equal(np.bincount(labels + 1), np.bincount(dealt + 1))
    np.testing.assert_array_equal(labels < 0, dealt < 0)
    known = labels >= 0
    assert (labels[known] == dealt[known]).mean() == pytest.approx(0.2, abs=0.03)
    np.testing.assert_array_equal(dealt, shuffled(labels, 3))
    assert (dealt != shuffled(labels, 4)).any()


# -------------------------------------------------------------------------------------------------------- k


def noisy_classes(seed: int, count: int) -> tuple[torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    return torch.from_numpy(rng.normal(size=(count, 6)) + 1.2 * np.eye(6)[labels]).float(), labels


def test_choose_k_prefers_many_votes_for_noisy_classes() -> None:
    bank, labels = noisy_classes(0, 400)
    chosen = choose_k(bank, labels, np.arange(400), n_classes=3, seed=0)
    assert chosen >= 10
    test, test_labels = noisy_classes(1, 1000)
    right = [(knn_predict(bank, labels, test, k=k, n_classes=3) == test_labels).mean() for k in (1, chosen)]
    assert right[1] > right[0]


def test_choose_k_is_not_fooled_by_copies_when_groups_stay_together() -> None:
    bank, labels = noisy_classes(2, 150)
    twice, labels = bank.repeat_interleave(2, 0), np.repeat(labels, 2)  # each picture twice
    kwargs = {"n_classes": 3, "seed": 0, "candidates": (1, 5, 20, 50)}
    assert choose_k(twice, labels, np.arange(300), **kwargs) == 1
    assert choose_k(twice, labels, np.repeat(np.arange(150), 2), **kwargs) >= 20


def test_choose_k_reads_nothing_but_the_bank_it_is_given_and_not_its_order() -> None:
    bank, labels = noisy_classes(3, 60)
    ids = np.arange(60)
    order = np.random.default_rng(0).permutation(60)
    kwargs = {"n_classes": 3, "seed": 5, "candidates": (1, 3, 5, 9, 15)}
    assert choose_k(bank, labels, ids, **kwargs) == choose_k(bank[order], labels[order], ids[order], **kwargs)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 1), (3, 1)])
def test_choose_k_with_next_to_nothing(count: int, expected: int) -> None:
    chosen = choose_k(torch.eye(count), np.arange(count), np.arange(count), n_classes=3, seed=0, candidates=(1, 5))
    assert chosen == expected
    assert choose_k(torch.eye(count), np.arange(count), np.arange(count), n_classes=3, seed=0, candidates=(9,)) == count


# --------------------------------------------------------------------------------------------------- ledger


def test_the_ledger_counts_readings_over_sessions(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    plan = plan_hash({"readout": "knn", "k": 20})
    first = Ledger(path)
    assert first.count("test") == 0
    first.record(split="val", purpose="curve", plan=plan, n=100, step=10)
    first.record(split="test", purpose="verdict", plan=plan, n=200, step=20)
    second = Ledger(path)
    second.record(split="test", purpose="verdict", plan=plan_hash({"k": 5}), n=200, step=20)
    assert [Ledger(path).count(split) for split in ("train", "val", "test")] == [0, 1, 2]
    assert Ledger(path).count("test", plan) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [set(line) for line in lines] == [{"utc", "split", "purpose", "plan", "n", "step"}] * 3
    assert lines[1] | {"utc": ""} == {
        "utc": "",
        "split": "test",
        "purpose": "verdict",
        "plan": plan,
        "n": 200,
        "step": 20,
    }
    assert lines[0]["utc"].endswith("+00:00")


@pytest.mark.parametrize("damage", ['{"utc": "2026', "[]", "7", '{"split": "test"}'])
def test_a_damaged_ledger_is_not_read_as_fewer_readings(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "ledger.jsonl"
    Ledger(path).record(split="test", purpose="p", plan="0", n=1, step=0)
    path.write_text(path.read_text() + damage + "\n")
    with pytest.raises(DamagedError, match="Line 2"):
        Ledger(path)


@given(cut=st.integers(1, 120))
@settings(max_examples=30, deadline=None)
def test_a_torn_last_line_is_set_aside_and_the_ledger_goes_on(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        for number in range(2):
            Ledger(path).record(split="test", purpose="p", plan=str(number), n=1, step=0)
        whole = path.read_bytes()
        last = whole.splitlines(keepends=True)[-1]
        cut = min(cut, len(last) - 1)
        path.write_bytes(whole[: len(whole) - cut])
        ledger = Ledger(path)
        assert ledger.count("test") == 1
        assert "cut off" in str(ledger.set_aside)
        assert (path.parent / "ledger.torn").read_bytes() == last[: len(last) - cut] + b"\n"
        ledger.record(split="test", purpose="p", plan="3", n=1, step=0)
        again = Ledger(path)
        assert again.set_aside is None
        assert [reading["plan"] for reading in again.readings] == ["0", "3"]


def test_plan_hash_is_of_the_content() -> None:
    assert plan_hash({"a": 1, "b": [2, 3]}) == plan_hash({"b": [2, 3], "a": 1})
    assert plan_hash({"a": 1}) != plan_hash({"a": 2})
    assert len(plan_hash({})) == 16
