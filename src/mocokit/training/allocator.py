"""Freed memory is kept for the next step instead of being handed back to the system."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_LARGE = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let the C library's allocator keep what this process frees; returns whether it can (glibc on Linux).

    A training step allocates and frees the same large tensors again and again. By default each of them is mapped anew
    and its pages are cleared by the kernel when they are first touched: a quarter of the processor time of a small
    network at 64 px. The process then holds as much memory as it once used. It decides no bit of a result.
    """
    mallopt = _of_the_c_library("mallopt")
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_TRIM_THRESHOLD, _LARGE))


def release_freed_memory() -> None:
    """Give what is kept back to the system (glibc on Linux; nothing elsewhere), where other work begins.

    What one kind of step leaves free is in other pieces than the next kind needs, which would then grow beside it.
    """
    trim = _of_the_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def _of_the_c_library(name: str) -> Any:
    """A function of glibc; None with another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
