"""The only module that opens a file for writing.

Two promises live here. A file written with `write_bytes` is either the old one or the new one, never a part of
it. A folder written with `commit_folder` either exists whole, with a manifest of sizes and SHA-256, or does not
exist: everything is written and synced under a temporary name in the same parent, and the rename is the commit.

The six primitives (`_open`, `_write`, `_fsync`, `_rename`, `_mkdir`, `_sync_folder`) are module-level functions
so that a test can make the n-th call of any of them fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mocokit.errors import DamagedError, LockedError, StorageError

MANIFEST = "MANIFEST.json"
TEMPORARY = ".tmp-"
_OWN_HASH = "manifest_sha256"
_MAX_JSON_BYTES = 16 * 2**20


# ---------------------------------------------------------------------------------------------- primitives


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _write(descriptor: int, data: bytes | memoryview) -> int:
    return os.write(descriptor, data)


def _fsync(descriptor: int) -> None:
    os.fsync(descriptor)


def _rename(source: Path, target: Path) -> None:
    source.rename(target)


def _mkdir(path: Path) -> None:
    path.mkdir()


def _sync_folder(folder: Path) -> None:
    """Make the folder's own entries (names, renames) durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def storage_errors(path: Path, doing: str, needed: int | None = None) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the path, the cause and the free space."""
    try:
        yield
    except OSError as error:
        raise StorageError(_storage_message(path, doing, error, needed)) from error


def _storage_message(path: Path, doing: str, error: OSError, needed: int | None) -> str:
    free = free_bytes(path)
    space = "" if free is None else f" ({free:,} bytes free there"
    if space:
        space += f", {needed:,} needed)" if needed is not None else ")"
    advice = {
        errno.ENOSPC: "Free some space or choose another --out.",
        errno.EDQUOT: "Free some space or choose another --out.",
        errno.EROFS: "The file system is read-only: choose another --out.",
        errno.EACCES: "Check the folder's permissions or choose another --out.",
        errno.EPERM: "Check the folder's permissions or choose another --out.",
        errno.ELOOP: "A symbolic link stands where a file of the run belongs: remove it.",
        errno.ENOTDIR: "A file stands where a folder belongs: choose another --out.",
        errno.EEXIST: "Something that is no folder stands there: remove it or choose another --out.",
        errno.ENAMETOOLONG: "Choose a shorter --out.",
    }.get(error.errno or 0, "Check the disk and try again.")
    return f"Could not {doing} {path}: {_cause(error)}{space}. {advice}"


def _cause(error: OSError) -> str:
    """The operating system's words for the error, without the path."""
    return os.strerror(error.errno) if error.errno else str(error) or type(error).__name__


def free_bytes(path: Path) -> int | None:
    """Free bytes on the file system of the nearest existing parent of `path`, or None when it can't be told."""
    for candidate in (path, *path.parents):
        try:
            return shutil.disk_usage(candidate).free
        except OSError:
            continue
    return None


def _write_all(path: Path, data: bytes) -> None:
    """Create `path`, write every byte and sync it; the caller decides when the name becomes visible."""
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        view = memoryview(data)
        while view:
            view = view[_write(descriptor, view) :]
        _fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------- single files


def make_folder(path: Path) -> Path:
    """Create `path` and its parents, durably; existing folders are fine."""
    with storage_errors(path, "create the folder"):
        missing = list(itertools.takewhile(lambda folder: not os.path.lexists(folder), (path, *path.parents)))
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process was faster
                _mkdir(folder)
            _sync_folder(folder.parent)
        if not path.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    return path


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` atomically and durably (temporary file, fsync, rename, fsync of the folder)."""
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name[:200]}")
    with storage_errors(path, "write", len(data)):
        try:
            _write_all(temporary, data)
            _rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8 text. File names that are not UTF-8 keep their bytes (surrogateescape)."""
    write_bytes(path, text.encode("utf-8", "surrogateescape"))


def to_json(value: Any, indent: int | None = 2) -> str:
    """JSON text in one fixed form: keys in the order given, no NaN, ASCII only, newline at the end."""
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=True) + "\n"


def write_json(path: Path, value: Any) -> None:
    """`value` as JSON, atomically."""
    write_text(path, to_json(value))


def read_json(path: Path) -> Any:
    """Read a JSON file of ours. Raises DamagedError when it is missing, too large, not JSON or too deep."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise DamagedError(f"{path} is larger than {_MAX_JSON_BYTES:,} bytes; it is not a file of mocokit's.")
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing. Check that the folder is a mocokit run.") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not readable JSON ({type(error).__name__}); it was changed or cut.") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StorageError:
    """What the disk can't give back is damaged; what may not be read is another matter."""
    kind = DamagedError if error.errno == errno.EIO else StorageError
    return kind(f"Could not read {error.filename or path}: {_cause(error)}. Check the disk and the permissions.")


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal text."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class AppendLog:
    """A file of lines that only grows, except that `truncate_to` cuts it back to a recorded length.

    `size` is the number of bytes written so far; a checkpoint records it, and resuming cuts whatever was logged
    after that checkpoint. Lines go to the operating system at once (they survive kill -9) and to the disk with
    `sync` (before a checkpoint commits).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage_errors(path, "open"):
            self._descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self.size = os.fstat(self._descriptor).st_size

    def append(self, line: str) -> None:
        """Write one line (without its newline)."""
        data = memoryview((line + "\n").encode("utf-8", "surrogateescape"))
        with storage_errors(self.path, "append to", len(data)):
            while data:
                written = _write(self._descriptor, data)
                self.size += written
                data = data[written:]

    def truncate_to(self, size: int) -> None:
        """Cut the file to its first `size` bytes. Raises DamagedError when it is already shorter."""
        if size > self.size:
            raise DamagedError(
                f"{self.path} has {self.size:,} bytes but the checkpoint recorded {size:,}; the log was cut. "
                "Resume from an older checkpoint or start again with --overwrite."
            )
        with storage_errors(self.path, "truncate"):
            os.ftruncate(self._descriptor, size)
            self.size = size

    def sync(self) -> None:
        """Make everything appended so far durable."""
        with storage_errors(self.path, "sync"):
            _fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        os.close(self._descriptor)


# ---------------------------------------------------------------------------------------- committed folders


def commit_folder(final: Path, contents: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
    """Write `contents` (name -> bytes) as the folder `final`, whole or not at all.

    `facts` (JSON values) go into the manifest beside the name, size and SHA-256 of every file. Order: temporary
    folder in the same parent; each file written and synced; manifest written last and synced; the temporary
    folder synced; renamed; parent synced. Raises StorageError; `final` is then missing, or whole where only the
    last sync failed.
    """
    temporary = final.with_name(f"{TEMPORARY}{final.name}-{secrets.token_hex(4)}")
    needed = sum(len(data) for data in contents.values())
    with storage_errors(final, "write", needed):
        try:
            _mkdir(temporary)
            for name, data in contents.items():
                _write_all(temporary / name, data)
            _write_all(temporary / MANIFEST, manifest_text(contents, facts).encode())
            _sync_folder(temporary)
            _rename(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(final.parent)


def manifest_text(contents: Mapping[str, bytes], facts: Mapping[str, Any]) -> str:
    """The manifest of a committed folder: `facts`, each file's size and SHA-256, and last the SHA-256 of all that."""
    listed = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    return _signed({"files": listed, **facts})


def _signed(manifest: dict[str, Any]) -> str:
    digest = hashlib.sha256(to_json(manifest).encode()).hexdigest()
    return to_json({**manifest, _OWN_HASH: digest})


def verify_folder(folder: Path) -> dict[str, Any]:
    """Check a committed folder against its manifest and return the manifest.

    Every listed file must be there, be a regular file, and have its recorded size and SHA-256; nothing else may
    be there; the manifest itself must be as it was written. Raises DamagedError naming the first file that differs
    or that the disk can't read, StorageError when it may not be read.
    """
    manifest = _verified_manifest(folder / MANIFEST)
    files = manifest["files"]
    try:
        present = {entry.name for entry in os.scandir(folder)} - {MANIFEST}
        if extra := sorted(present - set(files)):
            raise DamagedError(f"{folder / extra[0]} is not in the folder's manifest; the folder was changed.")
        for name, recorded in files.items():
            path = folder / name
            if "/" in name or name not in present or path.is_symlink() or not path.is_file():
                raise DamagedError(f"{path} is missing; {folder.name} is damaged.")
            if not isinstance(recorded, dict) or path.stat().st_size != recorded.get("size"):
                raise DamagedError(f"{path} has another size than its manifest records; {folder.name} is damaged.")
            if sha256_file(path) != recorded.get("sha256"):
                raise DamagedError(f"{path} does not match its recorded SHA-256; {folder.name} is damaged.")
    except OSError as error:
        raise _unreadable(folder, error) from error
    return manifest


def _verified_manifest(path: Path) -> dict[str, Any]:
    """A manifest that is, byte for byte, what `manifest_text` wrote."""
    if path.is_symlink():
        raise DamagedError(f"{path} is a symbolic link; {path.parent.name} is damaged.")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise DamagedError(f"{path} lists no files; it was changed.")
    bare = {key: value for key, value in manifest.items() if key != _OWN_HASH}
    with storage_errors(path, "read"):
        text = path.read_bytes()
    try:
        whole = _signed(bare).encode() == text
    except (ValueError, RecursionError):  # what JSON can hold and we never write: NaN, endless nesting
        whole = False
    if not whole:
        raise DamagedError(f"{path} does not match its own SHA-256; {path.parent.name} is damaged.")
    return manifest


def sweep_temporaries(folder: Path) -> list[str]:
    """Remove what an interrupted write left in `folder`; returns the names removed. Call it under the run lock."""
    removed: list[str] = []
    if not folder.is_dir():
        return removed
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        if entry.name.startswith(TEMPORARY):
            remove_path(Path(entry.path))
            removed.append(entry.name)
    return removed


def sweep_leftovers(path: Path) -> None:
    """Remove what interrupted writes of this file or folder left beside it. Nobody may be writing it meanwhile."""
    name, random = re.escape(path.name[:200]), "[0-9a-f]{8}"
    pattern = re.compile(rf"{re.escape(TEMPORARY)}({random}-{name}|(removed-)?{name}-{random})")
    with storage_errors(path.parent, "read"), os.scandir(path.parent) as entries:
        found = [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name)]
    for one in found:
        remove_path(one)


def only_leftovers(folder: Path) -> bool:
    """Whether a folder holds nothing but what a start that was killed leaves: a lock, temporary files."""
    with os.scandir(folder) as entries:
        return all(entry.name == ".lock" or entry.name.startswith(TEMPORARY) for entry in entries)


def remove_folder_by_rename(path: Path) -> None:
    """Remove a committed folder so that no half of it is ever visible under its own name, whenever the power goes."""
    doomed = path.with_name(f"{TEMPORARY}removed-{path.name}-{secrets.token_hex(4)}")
    with storage_errors(path, "remove"):
        _rename(path, doomed)
        _sync_folder(path.parent)
        shutil.rmtree(doomed)


def remove_empty_folder(path: Path) -> None:
    """Remove a folder of ours unless somebody put something into it."""
    with storage_errors(path, "remove"):
        try:
            path.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def remove_path(path: Path) -> None:
    """Remove a file, link or folder of ours; a missing one is fine."""
    with storage_errors(path, "remove"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ run lock


_NAMED_WITHIN = 1.0
"""Seconds that a process that took the lock has to write its name."""


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class RunLock:
    """An exclusive `flock` on `<folder>/.lock`, released by the operating system when the process dies.

    The file names the holder (pid, host), so that a second process can say who is running. Raises LockedError at
    once when somebody else holds it; a stale file left by a killed process never blocks.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".lock"
        self._descriptor = -1
        try:
            with storage_errors(self.path, "open the lock"):
                self._descriptor = _open(self.path, os.O_RDWR | os.O_CREAT)
            self._take(folder)
        except BaseException:
            self.release()
            raise

    def _take(self, folder: Path) -> None:
        with storage_errors(self.path, "take the lock"):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LockedError(
                    f"{folder} is in use by {self._holder()}. Wait for it to end, stop it, or choose another --out."
                ) from error
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _holder(self) -> str:
        """Who holds the lock, as written in it.

        A holder that took it a moment ago has not written its name yet: what stands there is nothing, or the name of an
        earlier one that was killed. So a name of this machine counts only when there is such a process.
        """
        deadline = time.monotonic() + _NAMED_WITHIN
        while True:
            name = os.pread(self._descriptor, 400, 0).decode("utf-8", "replace").strip()
            told = re.fullmatch(r"process (\d+) on (.*)", name)
            if told and (told[2] != socket.gethostname() or _is_running(int(told[1]))):
                return name
            if time.monotonic() > deadline:
                return "another process"
            time.sleep(0.01)

    def release(self) -> None:
        """Give the folder back; doing so again is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextlib.contextmanager
def turn(folder: Path) -> Iterator[None]:
    """One process after the other: waits until no other one is inside its turn in `folder`, which is made if missing.

    For work that ends by itself soon and that the next one then finds done. The lock is the folder's own, so no file
    is left; it is given back when the process dies.
    """
    make_folder(folder)
    with storage_errors(folder, "wait for a turn in"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with storage_errors(folder, "wait for a turn in"):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------- big and encoded files


def create_memmap(path: Path, nbytes: int) -> None:
    """Create (or replace) a file of `nbytes` zero bytes with its blocks reserved, to be mapped by numpy."""
    with storage_errors(path, "create", nbytes):
        remove_path(path)
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)


def write_with(path: Path, writer: Callable[[Path], None]) -> None:
    """Let `writer` (a library that only knows file names) write a temporary file, then sync and rename it."""
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name[:200]}")
    with storage_errors(path, "write"):
        try:
            writer(temporary)
            descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _fsync(descriptor)
            finally:
                os.close(descriptor)
            _rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


def copy_file(source: Path, target: Path) -> None:
    """A copy of a file's bytes under a new name; for folders that are thrown away, so it is not synced."""
    with storage_errors(target, "write"):
        shutil.copyfile(source, target)


def link_file(source: Path, target: Path) -> None:
    """A symbolic link to a large file that is read only."""
    with storage_errors(target, "write"):
        target.symlink_to(source.resolve())
