"""safetensors files that are not what they say: `python -m attacks.safetensors_files` shows how each is refused."""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def safetensors_file(header: Mapping[str, Any] | bytes, body: bytes = b"", *, length: int | None = None) -> bytes:
    """Length of the header, header, body; `length` may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensor(shape: list[int], begin: int, end: int, kind: str = "F32") -> dict[str, Any]:
    """A header's entry."""
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


def hostile_files() -> dict[str, bytes]:
    """File contents by what they try."""
    deep = b"[" * 100_000 + b"]" * 100_000
    twice = (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    )
    crowd = {f"t{number}": tensor([0], 0, 0) for number in range(300_000)}
    return {
        "no bytes": b"",
        "seven bytes": b"\1\0\0\0\0\0\0",
        "a header of 2^63 bytes": safetensors_file(b"{}", length=2**63),
        "a header longer than the file": safetensors_file(b"{}", length=10_000),
        "a header of 99 MB": safetensors_file(b"{" + b" " * 99_000_000 + b"}"),
        "no JSON": safetensors_file(b"\xff\xfe{}"),
        "deep JSON": safetensors_file(deep),
        "a list": safetensors_file(b"[]"),
        "300,000 tensors": safetensors_file(crowd),
        "overlapping tensors": safetensors_file({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, b"\0" * 12),
        "a hole": safetensors_file({"a": tensor([1], 0, 4), "b": tensor([1], 8, 12)}, b"\0" * 12),
        "bytes after the end": safetensors_file({"a": tensor([1], 0, 4)}, b"\0" * 400),
        "a shape of 2^62": safetensors_file({"a": tensor([2**31, 2**31], 0, 4)}, b"\0" * 4),
        "a shape that overflows": safetensors_file({"a": tensor([2**62, 8], 0, 4)}, b"\0" * 4),
        "offsets backwards": safetensors_file({"a": tensor([1], 4, 0)}, b"\0" * 4),
        "offsets beyond the end": safetensors_file({"a": tensor([1], 0, 4)}, b"\0"),
        "a negative shape": safetensors_file(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b"\0" * 4),
        "an unknown type": safetensors_file({"a": tensor([1], 0, 4, "OBJECT")}, b"\0" * 4),
        "a name twice": safetensors_file(twice, b"\0" * 8),
        "a pickle": b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93.",
        "metadata that is no text": safetensors_file({"__metadata__": {"a": 1}, "a": tensor([1], 0, 4)}, b"\0" * 4),
    }


def main() -> None:
    """Read every one and say how it ends."""
    from mocokit.errors import MocokitError
    from mocokit.training.checkpoint import read_tensors

    with tempfile.TemporaryDirectory() as place:
        for name, data in hostile_files().items():
            path = Path(place) / "hostile.safetensors"
            path.write_bytes(data)
            try:
                read_tensors(path)
            except MocokitError as error:
                said = str(error).replace(str(path), path.name)
            else:
                said = "read: its tensors are compared with the run's own before any is used"
            sys.stdout.write(f"{name:<32}{said[:120]}\n")


if __name__ == "__main__":
    main()
