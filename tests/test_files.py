"""The only module that writes: whole or not at all, every failure said, nothing outside the folder."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mocokit import files
from mocokit.errors import DamagedError, LockedError, StorageError
from tests.faults import CODES, PRIMITIVES, Faults
from tests.toy import contents, flip_bit, small_disk

OLD, NEW = b"old " * 20, b"new contents " * 30
PARTS = {"a.bin": bytes(range(48)), "b.bin": bytes(range(48, 96)), "c.json": b'{"step": 7}\n'}
FACTS = {"step": 7, "config": "ab12", "log": {"loss": 940, "metrics": 0}}


# ------------------------------------------------------------------------------------------- single files


def test_a_file_is_replaced_whole_and_nothing_is_left_over(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    files.write_bytes(path, OLD)
    files.write_bytes(path, NEW)
    assert contents(tmp_path) == {"status.json": NEW}


def test_a_reader_sees_the_old_or_the_new_file_and_nothing_between(tmp_path: Path) -> None:
    path = tmp_path / "big"
    versions = {letter * 300_000 for letter in (b"a", b"b")}
    files.write_bytes(path, min(versions))
    seen, done = set(), threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for data in itertools.islice(itertools.cycle(sorted(versions)), 30):
        files.write_bytes(path, data)
    done.set()
    reader.join()
    assert seen <= versions


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_write", lambda descriptor, data: os.write(descriptor, data[:7]))
    files.write_bytes(tmp_path / "x", NEW)
    log = files.AppendLog(tmp_path / "log")
    log.append("a line that is longer than seven bytes")
    log.close()
    assert contents(tmp_path) == {"x": NEW, "log": b"a line that is longer than seven bytes\n"}


def test_a_name_of_the_greatest_length_can_be_written(tmp_path: Path) -> None:
    files.write_text(tmp_path / ("n" * 255), "x")
    assert contents(tmp_path) == {"n" * 255: b"x"}


def test_text_keeps_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    files.write_text(tmp_path / "t", os.fsdecode(b"caf\xe9/\xff") + "\n")
    assert (tmp_path / "t").read_bytes() == b"caf\xe9/\xff\n"


def test_json_refuses_what_others_could_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert contents(tmp_path) == {}
    files.write_json(tmp_path / "x.json", {"b": "é\udcff", "a": [1, 2.5, None, True]})
    assert (tmp_path / "x.json").read_bytes().isascii()
    assert files.read_json(tmp_path / "x.json") == {"b": "é\udcff", "a": [1, 2.5, None, True]}


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"a": }', b"\xff\xfe", b"[" * 100_000, b"9" * 5000], ids=lambda data: repr(data[:9])
)
def test_what_is_no_json_is_damage(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(DamagedError, match=r"x\.json"):
        files.read_json(tmp_path / "x.json")


def test_a_missing_a_huge_and_an_unreadable_json_file(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"x\.json is missing"):
        files.read_json(tmp_path / "x.json")
    with (tmp_path / "x.json").open("wb") as stream:
        stream.truncate(2**30)
    with pytest.raises(DamagedError, match="larger than"):
        files.read_json(tmp_path / "x.json")
    (tmp_path / "d").mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        files.read_json(tmp_path / "d")


def test_a_writer_that_only_knows_file_names(tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    path.write_bytes(OLD)

    def fail(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise KeyError("a bug in the writer")

    with pytest.raises(KeyError):
        files.write_with(path, fail)
    assert contents(tmp_path) == {"array.npy": OLD}
    files.write_with(path, lambda temporary: np.save(temporary, np.arange(3)))
    np.testing.assert_array_equal(np.load(path), np.arange(3))
    assert list(contents(tmp_path)) == ["array.npy"]


# ---------------------------------------------------------------------------------------- committed folders


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    folder = tmp_path / "step-7"
    files.commit_folder(folder, PARTS, FACTS)
    return folder


def test_a_committed_folder_verifies_and_gives_its_facts_back(committed: Path) -> None:
    manifest = files.verify_folder(committed)
    assert {name: manifest[name] for name in FACTS} == FACTS
    assert contents(committed) == PARTS | {"MANIFEST.json": (committed / "MANIFEST.json").read_bytes()}
    assert [path.name for path in committed.parent.iterdir()] == ["step-7"]


def test_committing_onto_an_existing_folder_fails_and_leaves_it(committed: Path) -> None:
    before = contents(committed)
    with pytest.raises(StorageError, match="step-7"):
        files.commit_folder(committed, {"a.bin": b"other"}, {})
    assert contents(committed) == before
    assert [path.name for path in committed.parent.iterdir()] == ["step-7"]


NAMES = [*PARTS, "MANIFEST.json"]


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_noticed(committed: Path, name: str) -> None:
    whole = (committed / name).read_bytes()
    for length in {*range(0, len(whole), 5), 1, len(whole) // 2, len(whole) - 1}:
        (committed / name).write_bytes(whole[:length])
        with pytest.raises(DamagedError, match=name):
            files.verify_folder(committed)


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_bit_is_noticed(committed: Path, name: str) -> None:
    path = committed / name
    every = 7 if name == "MANIFEST.json" else 1  # 7,000 bits take long; every seventh meets each bit of a byte
    for bit in range(0, 8 * path.stat().st_size, every):
        flip_bit(path, bit)
        with pytest.raises(DamagedError, match=name):
            files.verify_folder(committed)
        flip_bit(path, bit)
    files.verify_folder(committed)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_noticed(committed: Path, name: str) -> None:
    (committed / name).unlink()
    with pytest.raises(DamagedError, match=name):
        files.verify_folder(committed)


def test_two_swapped_files_are_noticed(committed: Path) -> None:
    (committed / "a.bin").rename(committed / "x")
    (committed / "b.bin").rename(committed / "a.bin")
    (committed / "x").rename(committed / "b.bin")
    with pytest.raises(DamagedError, match=r"a\.bin"):
        files.verify_folder(committed)


def test_an_extra_file_and_a_link_are_noticed(committed: Path) -> None:
    (committed / "extra.txt").write_text("hello")
    with pytest.raises(DamagedError, match=r"extra\.txt"):
        files.verify_folder(committed)
    (committed / "extra.txt").unlink()
    (committed / "a.bin").rename(committed.parent / "a.bin")
    (committed / "a.bin").symlink_to(committed.parent / "a.bin")
    with pytest.raises(DamagedError, match=r"a\.bin"):
        files.verify_folder(committed)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m | {"step": 8},
        lambda m: m | {"log": {"loss": 941, "metrics": 0}},
        lambda m: m | {"files": {k: v for k, v in m["files"].items() if k != "a.bin"}},
        lambda m: m | {"files": m["files"] | {"a.bin": m["files"]["b.bin"]}},
        lambda m: m | {"files": []},
        lambda m: m | {"note": "added"},
        lambda m: {k: v for k, v in m.items() if k != "config"},
        lambda m: {k: v for k, v in m.items() if k != "manifest_sha256"},
        lambda m: m | {"step": float("nan")},
        lambda m: m | {"files": m["files"] | {"../outside": m["files"]["a.bin"]}},
        lambda m: [m],
    ],
)
def test_an_edited_manifest_is_noticed(committed: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = committed / "MANIFEST.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text())), indent=2) + "\n")
    with pytest.raises(DamagedError, match=r"MANIFEST\.json"):
        files.verify_folder(committed)


def test_a_manifest_that_lists_a_file_outside_is_refused_even_with_a_right_hash(committed: Path) -> None:
    (committed.parent / "outside").write_bytes(b"x")
    (committed / "MANIFEST.json").write_text(files.manifest_text({**PARTS, "../outside": b"x"}, FACTS))
    with pytest.raises(DamagedError, match="outside"):
        files.verify_folder(committed)


def test_a_disk_that_cannot_give_a_file_back_counts_as_damage(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(files, "sha256_file", fail)
    with pytest.raises(DamagedError, match=r"a\.bin: Input/output error"):
        files.verify_folder(committed)


def test_everything_is_on_the_disk_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power can fail between any two calls: contents, then names, then the commit, each synced before the next."""
    calls: list[tuple[str, str]] = []
    opened: dict[int, str] = {}

    def watch(name: str) -> None:
        original = getattr(files, name)

        def call(first: Any, *rest: Any) -> Any:
            result = original(first, *rest)
            if name == "_open":
                opened[result] = first.name
            calls.append((name, opened[first] if isinstance(first, int) else first.name.split("-")[0]))
            return result

        monkeypatch.setattr(files, name, call)

    for name in PRIMITIVES:
        watch(name)
    files.commit_folder(tmp_path / "step-7", PARTS, FACTS)
    each = [(call, name) for name in NAMES for call in ("_open", "_write", "_fsync")]
    commit = [("_sync_folder", ".tmp"), ("_rename", ".tmp"), ("_sync_folder", tmp_path.name.split("-")[0])]
    assert calls == [("_mkdir", ".tmp"), *each, *commit]
    calls.clear()
    files.write_bytes(tmp_path / "file", NEW)
    assert [call for call, _ in calls] == ["_open", "_write", "_fsync", "_rename", "_sync_folder"]


# --------------------------------------------------------------------------------------------- fault injection


def put_file(folder: Path) -> None:
    files.write_bytes(folder / "file", NEW)


def commit(folder: Path) -> None:
    files.commit_folder(folder / "step-8", PARTS | {"a.bin": b"newer"}, FACTS)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize("operation", [put_file, commit])
def test_each_call_that_fails_is_said_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: Callable[[Path], None], code: int
) -> None:
    (tmp_path / "counted").mkdir()
    total = Faults(monkeypatch).count(lambda: operation(tmp_path / "counted"))
    assert total >= 5
    for n in range(1, total + 1):
        folder = tmp_path / str(n)
        folder.mkdir()
        files.write_bytes(folder / "file", OLD)
        files.commit_folder(folder / "step-7", PARTS, FACTS)
        faults = Faults(monkeypatch, fail_at=n, code=code)
        with pytest.raises(StorageError) as caught:
            operation(folder)
        faults.stop()
        assert faults.calls >= n
        assert os.strerror(code) in str(caught.value)
        assert str(folder) in str(caught.value)
        assert files.verify_folder(folder / "step-7")["step"] == 7
        assert (folder / "file").read_bytes() in (OLD, NEW)
        if (folder / "step-8").exists():
            files.verify_folder(folder / "step-8")
        assert [p.name for p in folder.iterdir() if p.name.startswith(".tmp-")] == []


CRASH = """
import os, sys
from pathlib import Path
from mocokit import files
n, folder = int(sys.argv[1]), Path(sys.argv[2])
calls = 0
def counted(original):
    def call(*arguments):
        global calls
        calls += 1
        if calls == n:
            os._exit(9)
        return original(*arguments)
    return call
for name in sys.argv[4:]:
    setattr(files, name, counted(getattr(files, name)))
parts = {"a.bin": b"newer", "b.bin": b"x" * 1000}
if sys.argv[3] == "commit":
    files.commit_folder(folder / "step-8", parts, {})
else:
    files.write_bytes(folder / "file", parts["b.bin"])
"""


@pytest.mark.parametrize("operation", ["commit", "write"])
def test_a_process_that_ends_before_any_call_leaves_the_old_or_the_new(tmp_path: Path, operation: str) -> None:
    files.commit_folder(tmp_path / "step-7", PARTS, FACTS)
    files.write_bytes(tmp_path / "file", OLD)
    for n in range(1, 40):
        words = [sys.executable, "-c", CRASH, str(n), str(tmp_path), operation, *PRIMITIVES]
        code = subprocess.run(words, check=False).returncode
        files.verify_folder(tmp_path / "step-7")
        assert (tmp_path / "file").read_bytes() in (OLD, b"x" * 1000)
        if (tmp_path / "step-8").exists():
            files.verify_folder(tmp_path / "step-8")
            files.remove_folder_by_rename(tmp_path / "step-8")
        files.sweep_temporaries(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step-7"]
        if code == 0:
            break
        assert code == 9
    assert 5 <= n < 39


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_an_append_that_fails_is_said_and_can_be_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    log = files.AppendLog(tmp_path / "log")
    log.append("first")
    size = log.size
    for n, call in ((1, lambda: log.append("second")), (1, log.sync)):
        faults = Faults(monkeypatch, fail_at=n, code=code)
        with pytest.raises(StorageError, match=os.strerror(code)):
            call()
        faults.stop()
    log.truncate_to(size)
    log.append("third")
    log.close()
    assert (tmp_path / "log").read_text() == "first\nthird\n"
    faults = Faults(monkeypatch, fail_at=1, code=code)
    with pytest.raises(StorageError, match=os.strerror(code)):
        files.AppendLog(tmp_path / "log")
    faults.stop()


def test_removing_a_folder_never_leaves_half_of_it_under_its_name(
    committed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch, fail_at=1, code=errno.EACCES)
    with pytest.raises(StorageError, match="remove"):
        files.remove_folder_by_rename(committed)
    faults.stop()
    files.verify_folder(committed)

    def fail(path: Path) -> None:
        (path / "a.bin").unlink()
        raise OSError(errno.EIO, "stopped half-way")

    monkeypatch.setattr("shutil.rmtree", fail)
    with pytest.raises(StorageError):
        files.remove_folder_by_rename(committed)
    assert not committed.exists()
    monkeypatch.undo()
    assert len(files.sweep_temporaries(committed.parent)) == 1
    assert list(committed.parent.iterdir()) == []


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        data = random.Random(0).randbytes(1_200_000)
        files.commit_folder(disk / "step-1", {"model": data}, {"step": 1})
        log = files.AppendLog(disk / "log")
        log.append("line")
        files.write_bytes(disk / "file", OLD)
        for write in (
            lambda: files.commit_folder(disk / "step-2", {"model": data}, {"step": 2}),
            lambda: files.write_bytes(disk / "file", data),
            lambda: files.create_memmap(disk / "map", 1_200_000),
        ):
            with pytest.raises(StorageError, match=r"No space left on device \([\d,]+ bytes free there, 1,200,000 nee"):
                write()
        size = log.size
        with pytest.raises(StorageError, match="No space left"):
            log.append("x" * 2_000_000)
        log.truncate_to(size)
        log.close()
        assert files.verify_folder(disk / "step-1")["step"] == 1
        files.remove_path(disk / "map")
        assert list(contents(disk)) == ["file", "log", "step-1/MANIFEST.json", "step-1/model"]
        assert (disk / "file").read_bytes() == OLD
        assert (disk / "log").read_text() == "line\n"


# --------------------------------------------------------------------------------------------------- logs


def test_a_log_grows_is_cut_and_grows_again(tmp_path: Path) -> None:
    log = files.AppendLog(tmp_path / "log")
    sizes = []
    for line in ("one", "zwei é", os.fsdecode(b"\xff")):
        log.append(line)
        sizes.append(log.size)
    assert sizes == [4, 4 + 8, 4 + 8 + 2]
    log.close()
    again = files.AppendLog(tmp_path / "log")
    assert again.size == sizes[-1]
    with pytest.raises(DamagedError, match="has 14 bytes but the checkpoint recorded 15"):
        again.truncate_to(15)
    again.truncate_to(sizes[0])
    again.append("two")
    again.sync()
    again.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


# --------------------------------------------------------------------------------------------------- lock

HOLD = """
import sys
from pathlib import Path
from mocokit import errors, files
try:
    lock = files.RunLock(Path(sys.argv[1]))
except errors.LockedError as error:
    print(error, flush=True)
else:
    print("got it", flush=True)
    sys.stdin.read()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=20)


def test_a_second_process_is_refused_at_once_and_told_by_whom(tmp_path: Path) -> None:
    with files.RunLock(tmp_path) as lock:
        second = hold(tmp_path)
        text = said(second)
        end(second)
        assert f"{tmp_path} is in use by process {os.getpid()} on {os.uname().nodename}." in text
        with pytest.raises(LockedError):
            files.RunLock(tmp_path)
    third = hold(tmp_path)
    assert said(third) == "got it"
    lock.release()  # again: harmless
    with pytest.raises(LockedError, match=f"process {third.pid} "):
        files.RunLock(tmp_path)
    end(third)
    files.RunLock(tmp_path).release()


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    assert said(holder) == "got it"
    with pytest.raises(LockedError, match=f"process {holder.pid} "):
        files.RunLock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    end(holder)
    assert str(holder.pid) in (tmp_path / ".lock").read_text()
    began = time.monotonic()
    files.RunLock(tmp_path).release()
    assert time.monotonic() - began < 1


def test_of_six_that_start_at_once_exactly_one_gets_the_folder(tmp_path: Path) -> None:
    processes = [hold(tmp_path) for _ in range(6)]
    answers = [said(process) for process in processes]
    for process in processes:
        end(process)
    assert answers.count("got it") == 1
    assert sum("is in use by" in answer for answer in answers) == 5


def test_a_lock_that_cannot_be_taken_leaks_no_descriptor(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with files.RunLock(tmp_path):
        for _ in range(20):
            with pytest.raises(LockedError):
                files.RunLock(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --------------------------------------------------------------------------------------------------- links


def test_a_planted_link_is_never_written_through(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.write_bytes(OLD)
    for name in ("loss.jsonl", ".lock", "status.json", "pixels.u8"):
        (run / name).symlink_to(outside)
    with pytest.raises(StorageError, match="symbolic link"):
        files.AppendLog(run / "loss.jsonl")
    with pytest.raises(StorageError, match="symbolic link"):
        files.RunLock(run)
    files.write_bytes(run / "status.json", NEW)
    files.create_memmap(run / "pixels.u8", 100)
    assert outside.read_bytes() == OLD
    assert not (run / "status.json").is_symlink()
    assert (run / "status.json").read_bytes() == NEW
    assert (run / "pixels.u8").read_bytes() == bytes(100)


def test_removing_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(OLD)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".tmp-link").symlink_to(precious)
    (folder / "link").symlink_to(precious)
    assert files.sweep_temporaries(folder) == [".tmp-link"]
    files.remove_path(folder / "link")
    files.remove_path(folder / "link")  # a missing one is fine
    assert contents(tmp_path) == {"precious/file": OLD}


def test_an_empty_folder_is_removed_and_a_full_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(OLD)
    files.remove_empty_folder(tmp_path / "empty")
    files.remove_empty_folder(tmp_path / "full")
    assert contents(tmp_path) == {"full/x": OLD}
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [("file/x/y", "A file stands where a folder belongs"), ("n" * 300, "shorter"), ("dangling", "no folder stands")],
)
def test_a_folder_that_cannot_be_made(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match=says):
        files.make_folder(tmp_path / name)
