"""Pickles that run code when they are read, as .pt files; `python -m attacks.pickles` shows what reading them does.

Each would create a marker file. `torch.load(weights_only=False)` creates it; reading through mocokit does not.
"""

from __future__ import annotations

import builtins
import io
import os
import pickle
import struct
import sys
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any


class Call:
    """Unpickles as the result of calling `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


def zipped(pickled: bytes, **members: bytes) -> bytes:
    """A file as torch.save writes one, around a pickle of our own."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return out.getvalue()


def touch(marker: Path) -> str:
    """Python that creates the marker."""
    return f"open({str(marker)!r}, 'w').close()"


def hostile_pickles(marker: Path) -> dict[str, bytes]:
    """File contents by what they try."""
    code = touch(marker)
    calls = {
        "os.system": Call(os.system, f"touch '{marker}'"),
        "eval": Call(builtins.eval, code),
        "exec": Call(builtins.exec, code),
        "open": Call(builtins.open, str(marker), "w"),
        "getattr chain": Call(getattr, Call(__import__, "os"), "system"),
    }
    found = {name: zipped(pickle.dumps({"state_dict": {"w": call}}, 2)) for name, call in calls.items()}
    found |= {f"{name}, bare": pickle.dumps(call, 2) for name, call in calls.items()}
    hidden = OrderedDict(weight=Call(builtins.exec, code))
    found["inside an OrderedDict"] = zipped(pickle.dumps(hidden, 2))
    found["protocol 4"] = zipped(pickle.dumps(Call(builtins.exec, code), 4))
    found["global by opcode"] = zipped(b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    found["builtins by instruction"] = zipped(b"\x80\x02cbuiltins\nexec\nX" + _text(code) + b"\x85R.")
    found["instance opcode"] = zipped(b"(S'touch " + str(marker).encode() + b"'\nios\nsystem\n.")
    found["extension name"] = pickle.dumps(Call(os.system, f"touch '{marker}'"), 2) + b"\0" * 100
    return found


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def bombs() -> dict[str, bytes]:
    """Small files that would take much memory or time."""
    deep = b"\x80\x02" + b"(" * 200_000 + b"." * 10
    nested = b"\x80\x02" + b"]" + b"]a" * 100_000 + b"."
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:  # torch stores, a bomb compresses
        archive.writestr("archive/data.pkl", pickle.dumps({"w": 1}, 2))
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/data/0", b"\0" * (512 * 2**20))
    doubling: list[Any] = []
    for _ in range(40):
        doubling = [doubling, doubling]
    return {
        "marks without end": zipped(deep),
        "lists in lists": zipped(nested),
        "zip bomb": out.getvalue(),
        "a tensor of 4 TB": zipped(_huge_tensor(), **{"data/0": b"\0" * 64}),
        "shared lists": zipped(pickle.dumps(doubling, 2)),
    }


def _huge_tensor() -> bytes:
    """A tensor whose shape claims far more than its storage has."""
    return (
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ\x00\x00\x00\x40tQK\x00J\x00\x00\x00\x40J\x00\x00\x00\x40\x86"
        b"J\x00\x00\x00\x40K\x01\x86\x89ccollections\nOrderedDict\n)RtRs."
    )


def main() -> None:
    """Read every one both ways and say whether the marker appeared."""
    import warnings

    import torch

    from mocokit.errors import MocokitError
    from mocokit.training.foreign import safe_load_pt

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        marker = Path(place) / "marker"
        for name, data in hostile_pickles(marker).items():
            path = Path(place) / "hostile.pt"
            path.write_bytes(data)
            try:
                torch.load(path, weights_only=False)
            except (Exception, SystemExit) as error:  # noqa: BLE001 an attack may end in anything
                said = type(error).__name__
            else:
                said = "no error"
            plain = marker.exists()
            marker.unlink(missing_ok=True)
            try:
                safe_load_pt(path, Path(place) / "out.safetensors")
            except MocokitError as error:
                ours = str(error)
            else:
                ours = "read"
            sys.stdout.write(
                f"{name:<28}torch.load(weights_only=False): {'CODE RAN' if plain else said:<20}"
                f"mocokit: {'CODE RAN' if marker.exists() else ours.partition('(')[2][:60]}\n"
            )


if __name__ == "__main__":
    main()
