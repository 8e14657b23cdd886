"""Loops over numbers, compiled by numba: at their first call, then kept for later processes.

numba keeps what it compiled beside the module, or in the user's cache directory where it may not write there
(`NUMBA_CACHE_DIR` names another one). Where there is no such place at all, every process compiles anew: some seconds.
No `fastmath`: what is compiled rounds as IEEE 754 says, on any processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """The function compiled; it runs without Python's lock and divides as numpy does."""
    made: Function = _kept(lambda cache: numba.njit(cache=cache, nogil=True, error_model="numpy")(function))
    return made


def compiled_ufunc(signature: str) -> Callable[[Function], Function]:
    """A numpy ufunc out of a function of scalars, for one signature such as "uint64(uint64, uint64)"."""
    return lambda function: _kept(lambda cache: numba.vectorize([signature], cache=cache)(function))


def _kept(compile_: Callable[[bool], Any]) -> Any:
    try:
        return compile_(True)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return compile_(False)
