"""Make the n-th call of any primitive of files.py fail, as a disk would, or kill the process at one."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from mocokit import files

PRIMITIVES = ("_open", "_write", "_fsync", "_rename", "_mkdir", "_sync_folder")
CODES = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS)


class Faults:
    """Counts calls of the primitives from now on; number `fail_at` raises OSError(code) instead of being done.

    A write that fails has written half of its bytes before, as on a disk that fills up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail_at: int = 0, code: int = 0) -> None:
        self.calls, self.fail_at, self.code = 0, fail_at, code
        self._originals = {name: getattr(files, name) for name in PRIMITIVES}
        self._monkeypatch = monkeypatch
        for name, original in self._originals.items():
            monkeypatch.setattr(files, name, self._counted(name, original))

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls != self.fail_at:
                return original(*arguments)
            if name == "_write":
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            raise OSError(self.code, os.strerror(self.code))

        return call

    def stop(self) -> None:
        """Let everything work again."""
        for name, original in self._originals.items():
            self._monkeypatch.setattr(files, name, original)

    def count(self, operation: Callable[[], Any]) -> int:
        """How many calls `operation` makes."""
        operation()
        self.stop()
        return self.calls


def die_when(due: Callable[[], bool]) -> None:
    """Before every call of a primitive of `files` `due` is asked; at a yes this process ends itself with SIGKILL.

    Where the call is a write, half of it is done before.
    """

    def asking(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if due():
                if name == "_write":
                    os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        return call

    for name in PRIMITIVES:
        setattr(files, name, asking(name, getattr(files, name)))
