"""Processes that train together, started without torchrun: forked after the slow imports, told their rank like it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.children import CONTEXT


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets for one of `size` processes on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _run(target: Callable[..., Any], arguments: Sequence[Any], settings: dict[str, str], errors: str) -> None:
    os.environ.update(settings)
    sys.stderr = Path(errors).open("w", encoding="utf-8")  # noqa: SIM115 it lives as long as the process
    sys.stdout = sys.stderr
    target(*arguments)


def start(target: Callable[..., Any], arguments: Sequence[Any], size: int, folder: Path) -> list[ForkServerProcess]:
    """`target(*arguments)` on `size` ranks; what rank r says goes to folder/said-r."""
    port = free_port()
    processes = []
    for rank in range(size):
        process = CONTEXT.Process(
            target=_run, args=(target, arguments, environment(rank, size, port), str(folder / f"said-{rank}"))
        )
        process.start()
        processes.append(process)
    return processes


def finish(processes: Sequence[ForkServerProcess], limit: float = 120.0) -> list[int]:
    """Wait for all and return their exit codes; after `limit` seconds those that are left are killed and it fails."""
    deadline = time.monotonic() + limit
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.01))
    left = [number for number, process in enumerate(processes) if process.is_alive()]
    for number in left:
        os.kill(processes[number].pid or 0, signal.SIGKILL)
        processes[number].join()
    assert not left, f"ranks {left} did not end within {limit} s"
    return [int(process.exitcode or 0) for process in processes]


def said(folder: Path, size: int) -> list[str]:
    """What each rank wrote to stdout and stderr."""
    return [(folder / f"said-{rank}").read_text() for rank in range(size)]


def together(target: Callable[..., Any], arguments: Sequence[Any], size: int, folder: Path) -> list[Any]:
    """Run `target(folder, *arguments)` on all ranks; each leaves JSON in folder/rank-r.json, which is returned."""
    folder.mkdir(exist_ok=True)
    codes = finish(start(target, [str(folder), *arguments], size, folder))
    assert codes == [0] * size, "\n".join(said(folder, size))
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


def leave(folder: str, rank: int, value: Any) -> None:
    """What `together` returns for this rank."""
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(value))


def cli(words: Sequence[str]) -> None:
    """The command line as a process."""
    from mocokit.cli import main

    sys.exit(main(list(words)))


def cli_of_each(words: Sequence[Sequence[str]]) -> None:
    """The command line with words of this rank's own."""
    cli(words[int(os.environ["RANK"])])
