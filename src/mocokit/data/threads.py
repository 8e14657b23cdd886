"""Work done ahead of the one who needs it, on threads, and handed over in order."""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], *, workers: int, ahead: int, name: str
) -> Generator[Result]:
    """`map(work, items)` on `workers` >= 1 threads, at most `ahead` results before the one that is taken.

    Results, and errors, come in the order of `items` whatever the order they are finished in. Closing it stops the
    threads. Threads, not processes: decoding and tensor operations release the interpreter's lock.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def spread(work: Callable[[slice], None], count: int, *, threads: int) -> None:
    """Call `work` with slices that cover range(count), one on each of `threads` threads; this one takes the first.

    Raises what the work raises, once all of it has ended.
    """
    shares = max(1, min(threads, count))
    bounds = [count * share // shares for share in range(shares + 1)]
    slices = [slice(*pair) for pair in itertools.pairwise(bounds)]
    others = [_helpers(shares - 1).submit(work, rows) for rows in slices[1:]]
    try:
        work(slices[0])
    finally:
        wait(others)
    for other in others:
        other.result()


@functools.cache
def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that stay: starting one costs as much as the views of a small picture."""
    return ThreadPoolExecutor(count, thread_name_prefix="spread")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)  # a child has none of its parent's threads
