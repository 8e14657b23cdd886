"""Loops over numbers, compiled by numba: at their first call, then kept for later processes.

What was compiled is kept beside the module, as Python keeps its own (and trusted as much), or in the user's cache
directory where the package may not be written to (`NUMBA_CACHE_DIR` names another one). Where there is no such place
at all, every process compiles anew: some seconds. A file there that can't be read counts as absent, one that can't be
written is left out; neither ends a run.

No `fastmath`: what is compiled rounds as IEEE 754 says, on any processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function compiled; it runs without Python's lock and divides as numpy does."""
    made: Any = numba.njit(nogil=True, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # numba's way to say that there is no place to keep anything
        made._cache = _Cache(function)  # what its `cache=True` does
    found: Function = made
    return found


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's, which neither a damaged file nor a full disk can stop."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        source = hashlib.sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, source)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for these types before; None if there is nothing that can be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001  pickle raises anything on a file cut short; compiling anew replaces it
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it, if that can be done."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """numba's files, each under a name made of all that it depends on, and there before the index names it.

    numba numbers them and writes the index first: a process killed in between, or two processors that share a home,
    would leave an index that names somebody else's code.
    """

    def save(self, key: Any, data: Any) -> None:
        """Add an entry, or replace it."""
        known = hashlib.sha256(repr((self._source_stamp, self._version, key)).encode()).hexdigest()[:16]
        name = f"{self._index_name.removesuffix('.nbi')}.{known}.nbc"
        self._save_data(name, data)
        try:
            index = self._load_index()
        except Exception:  # noqa: BLE001  damaged, like any other file here: written anew
            index = {}
        self._save_index(index | {key: name})
