"""The process that reads a foreign .pt file: no network, bounded memory and time, tensors out as safetensors.

It is run by path, never imported, with an interpreter that ignores the environment (`-I`), and imports nothing of
mocokit. Arguments: the file to read, the file to write, megabytes of memory, seconds of processor time. One JSON object
goes to stdout: what was taken, what was left out, how the network was shut.

Defence in depth: `weights_only=True` refuses whatever is no tensor or plain container. Should that be got round, an
audit hook refuses to start a process, to open a socket, or to write anything but the one file; where the system allows
it, the process has no network at all.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import resource
import sys
from pathlib import Path
from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
MOST_TENSORS, MOST_DEPTH = 100_000, 8
STATES = (
    "state_dict",
    "model_state_dict",
    "model",
    "teacher",
    "student",
    "ema",
    "state_dict_ema",
    "encoder",
    "backbone",
)
"""Where the usual training loops keep the weights inside what they save."""


def shut_network() -> str:
    """Leave the network behind, where the system lets a process do so."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0 or libc.unshare(CLONE_NEWNET) == 0:
        return "network namespace without devices"
    return "audit hook"


def guard(allowed: str) -> None:
    """From here on: no process, no socket, no foreign code, no file written but `allowed`."""
    refused = (
        "socket.",
        "subprocess.",
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "pty.",
        "ctypes.",
    )
    changes = (
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "os.chmod",
        "shutil.",
    )

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(refused) or event.startswith(changes):
            raise PermissionError(f"{event} is not allowed while a foreign file is read")
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in str(mode or "") for letter in "wax+") or bool(
                int(flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            )
            if writes and path != allowed:
                raise PermissionError(f"writing {path!r} is not allowed while a foreign file is read")

    sys.addaudithook(hook)


def weights_in(loaded: Any) -> tuple[dict[str, Any], str]:
    """The dictionary that holds the tensors, and under which key it lay ("" = at the top)."""
    if not isinstance(loaded, dict):
        raise ValueError(f"it holds a {type(loaded).__name__}, not a dictionary of tensors")
    for key in STATES:
        if isinstance(loaded.get(key), dict) and loaded[key]:
            return loaded[key], key
    return loaded, ""


def flat(values: dict[Any, Any], torch: Any) -> tuple[dict[str, Any], list[str]]:
    """Tensors by dotted name, dense and in memory of their own; and the names of whatever else was there."""
    found: dict[str, Any] = {}
    other: list[str] = []
    waiting: list[tuple[str, Any, int]] = [("", values, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, dict) and depth < MOST_DEPTH:
            waiting += [(f"{name}.{key}" if name else str(key), inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
            if len(found) >= MOST_TENSORS:
                raise ValueError(f"it holds more than {MOST_TENSORS:,} tensors")
            if math.prod(value.shape) and value.untyped_storage().nbytes() < value.element_size():
                raise ValueError(f"the tensor {name!r} has no bytes")
            found[name] = value.detach().clone(memory_format=torch.contiguous_format)
        else:
            other.append(name)
    return dict(sorted(found.items())), sorted(other)


def main() -> None:
    """Read, take the tensors, write."""
    source, target, megabytes, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    network = shut_network()  # first: the system refuses it to a process with threads
    import safetensors.torch
    import torch

    torch.set_num_threads(1)
    with Path("/proc/self/statm").open(encoding="ascii") as stream:
        mapped = int(stream.read().split()[0]) * resource.getpagesize()
    limit = mapped + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes * 2**20, megabytes * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    guard(target)
    loaded = torch.load(source, map_location="cpu", weights_only=True)  # the one place where a pickle is opened
    values, under = weights_in(loaded)
    tensors, other = flat(values, torch)
    if not tensors:
        raise ValueError("it holds no tensors")
    with Path(target).open("wb") as out:
        out.write(safetensors.torch.save(tensors))
    json.dump({"tensors": len(tensors), "under": under, "other": other[:100], "network": network}, sys.stdout)


def reason(error: Exception) -> str:
    """One line for the user. torch's own text goes on to tell how to load the file unsafely, so it is cut."""
    text = " ".join(str(error).split())
    if type(error).__name__ == "UnpicklingError":
        told = re.search(
            r"WeightsUnpickler error: (?:Unsupported global: )?(.{1,120}?)(?: was not| Please|[.:] |$)", text
        )
        return "it holds more than tensors" + (f": {told[1]}" if told else "")
    return f"{type(error).__name__}: {text}"[:400]


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        sys.exit("it needs more memory than is allowed for reading it")
    except Exception as error:  # noqa: BLE001 whatever it is, the parent shows one line
        sys.exit(reason(error))
