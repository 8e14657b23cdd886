"""Order, batches and prefetch: everything follows from the step number."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mocokit.data.decode import UnreadableImageError
from mocokit.data.loader import Batch, BatchLoader, BatchPlan, Rows
from mocokit.data.pixels import PixelStore, build_pixel_store
from mocokit.data.sources import ImageSource, from_array
from mocokit.data.views import make_views, view_recipe
from mocokit.errors import OutOfMemoryError
from mocokit.training.precision import num_threads
from tests.toy import pictures

S = 53
VIEWS = view_recipe("moco-v2", 16)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.fixture(scope="module")
def source() -> ImageSource:
    return from_array(pictures(S), groups=np.arange(S) // 3)


@pytest.fixture(scope="module")
def store(source: ImageSource) -> PixelStore:
    return build_pixel_store(source, side=16)


def loader(
    source: ImageSource, store: PixelStore, *, batch: int = 8, seed: int = 0, workers: int = 0, views: int = 16
) -> BatchLoader:
    plan = BatchPlan(source.index.ids, batch, seed)
    return BatchLoader(store, source.index, view_recipe("moco-v2", views), plan, workers=workers)


def equal(a: Batch, b: Batch) -> bool:
    tensors = all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("x_q", "x_k", "ids", "groups"))
    return tensors and a.step == b.step and bool((a.rows == b.rows).all())


def test_a_batch_is_what_it_says(source: ImageSource, store: PixelStore) -> None:
    batch = next(loader(source, store).batches(0, 1))
    assert batch.x_q.shape == batch.x_k.shape == (8, 3, 16, 16)
    assert batch.x_q.dtype == torch.float32
    assert not torch.equal(batch.x_q, batch.x_k)
    np.testing.assert_array_equal(batch.ids.numpy(), source.index.ids[batch.rows])
    np.testing.assert_array_equal(batch.groups.numpy(), source.index.groups[batch.rows])


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_batches_have_the_same_bits_for_any_number_of_workers(
    source: ImageSource, store: PixelStore, workers: int
) -> None:
    inline = list(loader(source, store).batches(0, 14))
    threaded = list(loader(source, store, workers=workers).batches(0, 14))
    assert len(inline) == len(threaded) == 14
    assert all(map(equal, inline, threaded))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("views")]


def epochs(plan: BatchPlan, count: int) -> list[NDArray[np.int64]]:
    return [
        np.concatenate([plan.rows(epoch * plan.steps_per_epoch + step) for step in range(plan.steps_per_epoch)])
        for epoch in range(count)
    ]


@pytest.mark.parametrize("batch", [1, 8, 53])
def test_an_epoch_is_a_permutation_without_its_last_short_batch(source: ImageSource, batch: int) -> None:
    plan = BatchPlan(source.index.ids, batch, 0)
    assert plan.steps_per_epoch == S // batch
    assert all(len(plan.rows(step)) == batch for step in range(3 * plan.steps_per_epoch))
    found = epochs(plan, 3)
    for rows in found:
        assert len(rows) == S // batch * batch
        assert len(set(rows.tolist())) == len(rows)
        assert set(rows.tolist()) <= set(range(S))
    assert not np.array_equal(found[0], found[1])


def test_the_order_depends_on_seed_and_ids_and_not_on_the_batch_size(source: ImageSource) -> None:
    ids = source.index.ids
    small, large = epochs(BatchPlan(ids, 1, 3), 2), epochs(BatchPlan(ids, 20, 3), 2)
    for one, other in zip(small, large, strict=True):
        np.testing.assert_array_equal(one[:40], other)
    assert not np.array_equal(epochs(BatchPlan(ids, 1, 4), 1)[0], small[0])
    # The rows may be listed in any order: the pictures come in the same one.
    shuffled = np.random.default_rng(0).permutation(S)
    np.testing.assert_array_equal(ids[shuffled][epochs(BatchPlan(ids[shuffled], 1, 3), 1)[0]], ids[small[0]])


def test_the_position_is_the_step(source: ImageSource, store: PixelStore) -> None:
    """Three epochs; begun anew at every step, what is left is the same sequence."""
    steps = 18
    whole = [loader(source, store).make(step) for step in range(steps)]
    for start in range(steps):
        rest = list(loader(source, store, workers=start % 3).batches(start, steps))
        assert [batch.step for batch in rest] == list(range(start, steps))
        assert all(map(equal, rest, whole[start:]))


def test_the_position_costs_nothing(source: ImageSource, store: PixelStore) -> None:
    far = loader(source, store)
    began = time.perf_counter()
    far.make(10**9)
    assert time.perf_counter() - began < 1


def test_a_picture_has_the_same_views_in_any_company(source: ImageSource, store: PixelStore) -> None:
    def views(batch: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        one = loader(source, store, batch=batch)
        made = [one.make(step) for step in range(one.plan.steps_per_epoch)]
        return {int(b.ids[n]): (b.x_q[n], b.x_k[n]) for b in made for n in range(batch)}

    alone = views(1)
    assert len(alone) == S
    for batch in (2, 7, 26):
        for one, (x_q, x_k) in views(batch).items():
            assert torch.equal(x_q, alone[one][0])
            assert torch.equal(x_k, alone[one][1])


def test_views_change_from_epoch_to_epoch_and_with_the_seed(source: ImageSource, store: PixelStore) -> None:
    def of(picture: int, epoch: int, seed: int) -> torch.Tensor:
        one = loader(source, store, batch=1, seed=seed)
        row = next(s for s in range(epoch * S, (epoch + 1) * S) if one.plan.rows(s)[0] == picture)
        return one.make(row).x_q

    first = of(5, 0, 0)
    assert torch.equal(first, of(5, 0, 0))
    assert not torch.equal(first, of(5, 1, 0))
    assert not torch.equal(first, of(5, 0, 1))


def test_a_row_that_cannot_be_read_goes_by_the_id_of_the_one_it_shows(source: ImageSource) -> None:
    bad = {3, 17, 40}

    def read(row: int) -> NDArray[np.uint8]:
        if row in bad:
            raise UnreadableImageError("broken")
        return source.read(row)

    broken = build_pixel_store(dataclasses.replace(source, read=read), side=16, max_bad=0.1)
    one = loader(source, broken, batch=1)
    seen = set()
    for step in range(S):
        batch = one.make(step)
        row = int(batch.rows[0])
        shown = int(broken.replaced[row])
        assert (shown != row) == (row in bad)
        assert int(batch.ids[0]) == source.index.ids[shown]
        assert int(batch.groups[0]) == source.index.groups[shown]
        pixels = torch.from_numpy(source.read(shown).transpose(2, 0, 1)[None].copy())
        expected = make_views(VIEWS, pixels, torch.tensor([[16, 16]]), source.index.ids[[shown]], seed=0, epoch=0)
        assert torch.equal(batch.x_q, expected[0])
        assert torch.equal(batch.x_k, expected[1])
        seen.add(row)
    assert seen == set(range(S))


@pytest.mark.parametrize(("batch", "size"), [(3, 5), (8, 7), (4, 16)])
def test_batches_start_in_memory_as_if_each_were_alone(
    source: ImageSource, store: PixelStore, batch: int, size: int
) -> None:
    plan = BatchPlan(source.index.ids, batch, 0)
    one = BatchLoader(store, source.index, dataclasses.replace(VIEWS, size=size), plan, workers=0)
    for made in one.batches(1, 6):
        alone = one.make(made.step)
        assert (made.step, made.rows.tolist()) == (alone.step, alone.rows.tolist())
        for ours, expected in ((made.x_q, alone.x_q), (made.x_k, alone.x_k)):
            assert torch.equal(ours, expected)
            assert ours.data_ptr() % 64 == expected.data_ptr() % 64 == 0


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_while_making_a_batch_comes_out_in_its_place(source: ImageSource, workers: int) -> None:
    short = build_pixel_store(source.subset(np.arange(40)), side=16)  # the pixels of rows 40 to 52 are not there
    one = loader(source, short, batch=1, workers=workers)
    at = next(step for step in range(S) if one.plan.rows(step)[0] >= 40)
    assert at > 0
    produced = []
    with pytest.raises(IndexError, match="out of bounds"):  # noqa: PT012 the batches before it must arrive
        for batch in one.batches(0, S):
            produced.append(batch.step)
    assert produced == list(range(at))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("views")]


class Watched(BatchPlan):
    """A plan that remembers the highest step asked for."""

    highest = -1

    def rows(self, step: int) -> Rows:
        self.highest = max(self.highest, step)
        return super().rows(step)


def test_prefetch_stays_a_few_batches_ahead_and_stops_when_nobody_takes_more(
    source: ImageSource, store: PixelStore
) -> None:
    plan = Watched(source.index.ids, 4, 0)
    batches = BatchLoader(store, source.index, VIEWS, plan, workers=2).batches(0, 10**6)
    assert [next(batches).step for _ in range(3)] == [0, 1, 2]
    time.sleep(0.2)
    assert plan.highest <= 2 + 3
    batches.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("views")]


@pytest.mark.parametrize("workers", [0, 1])
def test_running_out_of_memory_names_the_step_and_its_images(
    source: ImageSource, store: PixelStore, workers: int
) -> None:
    views = dataclasses.replace(VIEWS, size=2**17)  # a view of 206 GB
    one = BatchLoader(store, source.index, views, BatchPlan(source.index.ids, 4, 0), workers=workers)
    first = source.index.names[int(one.plan.rows(2)[0])]
    with pytest.raises(OutOfMemoryError) as caught:
        next(iter(one.batches(2, 5)))
    assert str(caught.value).startswith(f"views of step 2 (4 images: {first!r}, ")
