"""One exception class and one exit code per kind of failure.

Every message reads: what happened, which file or value, what to do. The command line prints the message of a
`MocokitError` without a traceback; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MocokitError(Exception):
    """A run that failed for a reason the user can read. Exit code 1.

    teller: where all ranks of a run raise the same error together, the one that tells the user; otherwise None.
    """

    exit_code = 1
    teller: int | None = None


class UsageError(MocokitError):
    """A flag, value, name or configuration that can't be used. Exit code 2."""

    exit_code = 2


class DataError(MocokitError):
    """The data are missing, empty, unreadable or laid out in a way that can't be used. Exit code 3."""

    exit_code = 3


class DivergedError(MocokitError):
    """A loss or gradient stopped being finite; nothing was updated from it. Exit code 4. All ranks raise it.

    loss, gradient_norm: what they were.
    """

    exit_code = 4
    teller = 0

    def __init__(self, message: str, *, loss: float = 0.0, gradient_norm: float = 0.0) -> None:
        super().__init__(message)
        self.loss, self.gradient_norm = loss, gradient_norm


class MissingDependencyError(MocokitError):
    """An optional dependency is not installed. Exit code 5."""

    exit_code = 5


class StorageError(MocokitError):
    """A file could not be written or read: disk full, read-only, I/O error. Exit code 6."""

    exit_code = 6


class DamagedError(StorageError):
    """A file of ours does not match its manifest. Exit code 6."""


class LockedError(MocokitError):
    """Another process holds the run folder. Exit code 1."""


class RankLostError(MocokitError):
    """Another process of the same run ended, or did not answer in time. Exit code 1."""


class RanksApartError(MocokitError):
    """The processes of one run do not hold the same. Exit code 1. All ranks raise it."""

    teller = 0


class InterruptedRunError(MocokitError):
    """A signal stopped the run after its state was saved. Exit code 128 + signal number (130, 143); on all ranks."""

    teller = 0

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class OutOfMemoryError(MemoryError):
    """Memory ran out; the text says at what: "views of step 3 were being made"."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out. torch says so in words only: on a CPU it is a plain RuntimeError."""
    told = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or any(words in str(error) for words in told)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A sentence ` Did you mean 'x'?` for the nearest of `choices`, or an empty string."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


def first_line(error: Exception, limit: int = 200) -> str:
    """What another library's error says, short enough to be quoted in one of ours."""
    return (str(error).splitlines() or [""])[0][:limit]
