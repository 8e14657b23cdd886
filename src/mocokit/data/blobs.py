"""Bytes by offset out of a large file: on this machine, or behind a URL that the user named (through fsspec).

Every read is a call of its own (open, read, close; or one byte range), so it is safe from any number of threads and
holds no file open.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mocokit.data.tarball import ReadAt
from mocokit.errors import DataError, MissingDependencyError, UsageError

PROTOCOLS = (
    "file", "memory", "http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "hf", "hdfs",
    "webhdfs", "sftp", "ssh", "ftp",
)  # fmt: skip
"""What may be named. Not `pipe:` (it runs a command) nor fsspec's layers over other files (`reference`, caches)."""
_ATTEMPTS = 3


class BlobError(OSError):
    """Bytes that can't be read. The text is one line, without folders or credentials."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file of `size` bytes that can be read in pieces."""

    name: str
    """Its own name, without folder or query."""
    size: int
    mtime: int
    """ns; 0 where it isn't known."""
    read: ReadAt
    """(offset, count) -> bytes, fewer only at the end of the file. Raises BlobError."""
    remote: bool = False


def local_blob(path: Path) -> Blob:
    """A regular file. Raises DataError when it is missing or something else."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} can't be read: {os.strerror(error.errno or 0)}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is not a regular file.")

    def read(offset: int, count: int) -> bytes:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # never waits on a FIFO
            try:
                now = os.fstat(descriptor)
                if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
                    raise BlobError(f"{path.name} was changed since it was listed")
                parts = []
                while count > 0 and (part := os.pread(descriptor, count, offset)):
                    parts.append(part)
                    offset, count = offset + len(part), count - len(part)
                return parts[0] if len(parts) == 1 else b"".join(parts)
            finally:
                os.close(descriptor)
        except BlobError:
            raise
        except OSError as error:
            raise BlobError(f"{path.name}: {os.strerror(error.errno or 0)}") from error

    return Blob(path.name, status.st_size, status.st_mtime_ns, read)


def is_url(spec: str) -> bool:
    """Whether it names something by protocol: `s3://...`, also `pipe:...`, which is refused later."""
    return "://" in spec or spec.startswith("pipe:")


def public_name(spec: str) -> str:
    """The last part of a path or URL, without query."""
    path = spec.split("#", 1)[0].split("?", 1)[0] if is_url(spec) else spec
    return path.rstrip("/").rpartition("/")[2] or "root"


def _check_protocol(url: str) -> str:
    protocol, _, rest = url.partition(":")
    if protocol == "pipe":
        raise UsageError("`pipe:` would run a command; only files and storage addresses are read. Download it first.")
    if "::" in url or protocol not in PROTOCOLS or not rest.startswith("//"):
        raise UsageError(
            f"{public_name(url)!r} can't be read through {protocol!r}. Protocols: {', '.join(PROTOCOLS)}; "
            "one at a time, without `::`."
        )
    return protocol


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL and the path in it. Raises UsageError, MissingDependencyError, DataError."""
    import fsspec

    protocol = _check_protocol(url)
    try:
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:
        package = {"http": "aiohttp requests", "https": "aiohttp requests", "s3": "s3fs", "s3a": "s3fs"}.get(protocol)
        hint = f"pip install {package}" if package else " ".join(str(error).split())
        raise MissingDependencyError(f"Reading {protocol}:// needs a package that isn't installed: {hint}") from error
    except remote_errors() as error:
        raise DataError(f"{public_name(url)} can't be reached: {_told(error)}.") from error


def remote_blob(url: str) -> Blob:
    """The file behind a URL. Raises UsageError, MissingDependencyError, or DataError when it isn't there."""
    name = public_name(url)
    system, path = _file_system(url)
    try:
        facts = system.info(path)
    except remote_errors() as error:
        raise DataError(f"{name} can't be reached: {_told(error)}.") from error
    size = facts.get("size")
    if facts.get("type") == "directory" or not isinstance(size, int):
        raise DataError(f"{name} has no size to be told: a server must say how long a file is, and serve parts of it.")

    def read(offset: int, count: int) -> bytes:
        wanted = max(min(count, size - offset), 0)
        if not wanted:
            return b""
        data = _tried(lambda: system.cat_file(path, start=offset, end=offset + wanted), name)
        if len(data) != wanted:
            raise BlobError(f"{name}: asked for {wanted:,} bytes, got {len(data):,}; does the server serve parts?")
        return bytes(data)

    mtime = facts.get("mtime", 0)
    return Blob(name, size, int(mtime * 1e9) if isinstance(mtime, int | float) else 0, read, remote=True)


def remote_list(url: str, suffix: str) -> list[str]:
    """The URLs of the files in a remote folder that end in `suffix`, sorted. Raises as `remote_blob`."""
    system, path = _file_system(url)
    if url.startswith(("http://", "https://")):
        raise UsageError(
            f"{public_name(url)!r}: a web server has no folders to list. Name the shards: .../name-{{0000..0011}}.tar"
        )
    try:
        found = system.ls(path, detail=False)
    except remote_errors() as error:
        raise DataError(f"{public_name(url)} can't be listed: {_told(error)}.") from error
    return [system.unstrip_protocol(one) for one in sorted(found) if one.endswith(suffix)]


def _tried(call: Any, name: str) -> bytes:
    """The result of a read that is tried again when the network fails. Raises BlobError."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            data: bytes = call()
            return data
        except FileNotFoundError as error:
            raise BlobError(f"{name} is no longer there") from error
        except remote_errors() as error:
            if attempt == _ATTEMPTS:
                raise BlobError(f"{name}: {_told(error)}, {_ATTEMPTS} times") from error
        time.sleep(0.2 * 4 ** (attempt - 1))
    raise AssertionError("unreachable")


def _told(error: BaseException) -> str:
    """What went wrong, without the library's text: that often repeats the whole address."""
    code = getattr(error, "errno", None)
    status = getattr(error, "status", None)
    return os.strerror(code) if code else f"{type(error).__name__}{f' {status}' if isinstance(status, int) else ''}"


def remote_errors() -> tuple[type[BaseException], ...]:
    """What the file systems raise when a server or a network fails. Their own classes only where they are loaded."""
    own = (("aiohttp", "ClientError"), ("botocore.exceptions", "BotoCoreError"), ("botocore.exceptions", "ClientError"))
    loaded = [getattr(sys.modules[module], name) for module, name in own if module in sys.modules]
    return (OSError, EOFError, ValueError, RuntimeError, *loaded)
