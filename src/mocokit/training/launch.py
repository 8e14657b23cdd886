"""Which of several processes this one is, as torchrun tells it. Imports no torch: the run's lock comes before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mocokit.errors import UsageError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Launch:
    """This process is number `rank` of `size`, and number `local_rank` of the `local_size` on this machine.

    address: where the ranks meet, `host:port`; empty for a process alone.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """What torchrun's variables say; one process where WORLD_SIZE is not set or 1.

    Raises UsageError when variables are missing or contradict one another.
    """
    if environ.get("WORLD_SIZE", "1") == "1":
        return Launch()
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        raise UsageError(
            f"WORLD_SIZE is {environ['WORLD_SIZE']} and {missing[0]} is not set. Start several processes with "
            "`torchrun --nproc-per-node N -m mocokit ...`, or unset WORLD_SIZE."
        )
    try:
        rank, size, local_rank, local_size = (int(environ[name]) for name in _NEEDED[:4])
    except ValueError as error:
        raise UsageError(f"RANK, WORLD_SIZE and their like must be whole numbers ({error}). Use torchrun.") from error
    launch = Launch(rank, size, local_rank, local_size, f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}")
    if not (0 <= launch.rank < launch.size and 0 <= launch.local_rank < launch.local_size <= launch.size):
        raise UsageError(
            f"Rank {launch.rank} of {launch.size} (on this machine {launch.local_rank} of {launch.local_size}) can't "
            "be. Use torchrun, which sets these variables."
        )
    return launch
