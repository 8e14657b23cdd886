"""Work done ahead of the one who needs it, on threads, and handed over in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
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
