from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mocokit.contrast.key_queue import NO_ID, KeyQueue, Keys


def keys(first: int, n: int, D: int = 3) -> Keys:
    """n distinguishable keys; key j is the vector (j, j, ...), its id j, its group j // 2."""
    ids = torch.arange(first, first + n)
    return Keys(ids[:, None].expand(n, D).float(), ids, ids // 2)


def letters(queue: KeyQueue) -> list[str]:
    return [chr(ord("a") + int(queue.ids[row])) for row in queue.oldest_first()]


@pytest.mark.parametrize(
    ("capacity", "start", "more", "expected"),
    [(6, "abcdef", "gh", "cdefgh"), (4, "abcd", "ef", "cdef")],
)
def test_worked_fifo(capacity: int, start: str, more: str, expected: str) -> None:
    queue = KeyQueue(capacity, 3)
    queue.enqueue_(keys(0, len(start)), step=0)
    assert letters(queue) == list(start)
    queue.enqueue_(keys(len(start), len(more)), step=1)
    assert letters(queue) == list(expected)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 40))
def test_equals_a_deque(data: st.DataObject, K: int) -> None:
    queue, oracle = KeyQueue(K, 3), deque[tuple[int, int, int]](maxlen=K)
    total = 0
    for step in range(data.draw(st.integers(1, 8))):
        n = data.draw(st.integers(1, 3 * K))
        queue.enqueue_(keys(total, n), step)
        oracle.extend((i, i // 2, step) for i in range(total, total + n))
        total += n
        rows = queue.oldest_first()
        stored = zip(queue.ids[rows].tolist(), queue.groups[rows].tolist(), queue.births[rows].tolist(), strict=True)
        assert list(stored) == list(oracle)
        assert queue.vectors[rows].tolist() == [[float(i)] * 3 for i, _, _ in oracle]
        assert queue.fill == len(oracle)
        assert queue.pointer == total % K
        snapshot = queue.snapshot()
        assert sorted(snapshot.ids.tolist()) == sorted(i for i, _, _ in oracle)
        assert snapshot.vectors.shape == (len(oracle), 3)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=6), st.lists(st.integers(1, 30), max_size=4)
)
def test_state_round_trip_continues_the_same(K: int, before: list[int], after: list[int]) -> None:
    first, second = KeyQueue(K, 3), KeyQueue(K, 3)
    for step, n in enumerate(before):
        first.enqueue_(keys(100 * step, n), step)
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()}, first.counters())
    for step, n in enumerate(after):
        for queue in (first, second):
            queue.enqueue_(keys(7 * step, n), step)
    assert first.counters() == second.counters()
    assert all(torch.equal(a, second.tensors()[name]) for name, a in first.tensors().items())


def test_an_empty_queue_offers_no_row() -> None:
    queue = KeyQueue(5, 3)
    assert len(queue.snapshot()) == 0
    assert queue.snapshot().vectors.shape == (0, 3)


def test_stored_vectors_are_copies() -> None:
    queue, batch = KeyQueue(5, 3), keys(1, 2)
    owned = Keys(batch.vectors.clone(), batch.ids.clone(), batch.groups.clone())
    queue.enqueue_(owned, 0)
    owned.vectors.zero_()
    assert queue.vectors[0].tolist() == [1.0] * 3


def test_random_start_has_unit_rows_without_source() -> None:
    queue, again = KeyQueue(50, 8), KeyQueue(50, 8)
    queue.fill_random_(3)
    again.fill_random_(3)
    assert torch.equal(queue.vectors, again.vectors)
    assert torch.allclose(queue.vectors.norm(dim=1), torch.ones(50))
    assert set(queue.ids.tolist()) == {NO_ID}
    assert queue.fill == 50


@pytest.mark.parametrize(
    "counters",
    [{"pointer": 5, "fill": 5}, {"pointer": 0, "fill": 6}, {"pointer": 2, "fill": 3}, {"pointer": -1, "fill": 5}],
)
def test_impossible_counters_are_refused(counters: dict[str, int]) -> None:
    queue = KeyQueue(5, 3)
    with pytest.raises(ValueError, match="pointer"):
        queue.load(queue.tensors(), counters)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="vectors"):
        KeyQueue(5, 3).load(KeyQueue(5, 4).tensors(), {"pointer": 0, "fill": 0})
    with pytest.raises(ValueError, match="3 dimensions"):
        KeyQueue(5, 3).enqueue_(keys(0, 2, D=4), 0)
    with pytest.raises(ValueError, match="K >= 1"):
        KeyQueue(0, 3)
