"""The command line: parse, call one function of `api`, print, exit code. Nothing heavy is imported for `--help`.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback

from cyclopts import CycloptsError, UnusedCliTokensError
from rich.console import Console

from mocokit.cli import (
    check,
    compare,
    data,
    embed,
    evaluate,
    export,
    finetune,
    machine,
    motion,
    pretrain,
    proof,
    recipes,
    report,
    search,
    studies,
    transfer,
)
from mocokit.cli.app import app
from mocokit.errors import InterruptedRunError, MocokitError, OutOfMemoryError, is_out_of_memory
from mocokit.training.launch import read_launch

__all__ = [
    "app",
    "check",
    "compare",
    "data",
    "embed",
    "evaluate",
    "export",
    "finetune",
    "machine",
    "main",
    "motion",
    "pretrain",
    "proof",
    "recipes",
    "report",
    "search",
    "studies",
    "transfer",
]


SPINS = "10000"
"""Turns that a thread of libgomp, torch's on Linux, waits awake for more work (GOMP_SPINCOUNT): a quarter of a
millisecond, longer than it is between two operations. By default it is milliseconds, in which the thread holds the core
that makes views."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is imported, which is later
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or bool(os.environ.get("MOCOKIT_DEBUG"))
    words = [word for word in words if word != "--debug"]
    if not words:
        app.help_print([])
        return 2
    try:
        result = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()  # here, where a reader that has gone can still be handled
    except UnusedCliTokensError as error:
        extra = shlex.join(error.unused_tokens or [])
        _complain(f"Too many arguments: {extra}. Put a name with spaces in quotes.", hint=_help_hint(words))
        return 2
    except CycloptsError as error:
        error.verbose = False
        _complain(str(error), hint=_help_hint(words))
        return 2
    except InterruptedRunError as error:
        if _tells(error):
            print(str(error), file=sys.stderr)
        return error.exit_code
    except MocokitError as error:
        if debug:
            traceback.print_exc()
        if _tells(error):
            _complain(str(error))
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if debug:
            traceback.print_exc()
        when = f" while {error}" if isinstance(error, OutOfMemoryError) else ""
        _complain(
            f"Not enough memory{when}. Lower --batch-size, or split its steps with --accumulate 2 (4, 8 ...); try "
            "--precision bf16; lower --queue-size or --image-size, or take a smaller --backbone."
        )
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`); say nothing more, also not at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _tells(error: MocokitError) -> bool:
    """Whether it is for this process to tell the user of an error that all ranks of a run have."""
    return error.teller is None or error.teller == read_launch().rank


def _complain(message: str, hint: str = "") -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False)
    if hint:
        console.print(hint, markup=False)


def _help_hint(words: list[str]) -> str:
    command = words[0] if words and not words[0].startswith("-") and words[0] in set(app) else ""
    return f"See `mocokit {command + ' ' if command else ''}--help`."
