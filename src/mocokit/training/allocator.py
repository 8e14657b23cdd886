"""Freed memory is kept for the next step instead of being handed back to the system."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_LARGE = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let the C library's allocator keep what this process frees; returns whether it can (glibc on Linux).

    A training step allocates and frees the same large tensors again and again. By default each of them is mapped anew
    and its pages are cleared by the kernel when they are first touched: a quarter of the processor time of a small
    network at 64 px. The process then holds as much memory as it once used. It decides no bit of a result.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_TRIM_THRESHOLD, _LARGE))
