"""Who may use a run folder, and what may be removed from it: nothing that a run did not write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mocokit import files
from mocokit.errors import LockedError, StorageError, UsageError
from mocokit.training import runfolder
from mocokit.training.runfolder import OWNED, RunFolder, claim_run, foreign_files, open_run
from tests.toy import contents, without_privileges


def claim(path: Path, mode: runfolder.Mode) -> RunFolder:
    run, lock = claim_run(path, mode)
    lock.release()
    return run


EXAMPLES = [
    pattern.replace("step-*", "step-12").replace(".tmp-*/", ".tmp-step-3-ab/").replace("*/", "eval/").replace("*", "x")
    for pattern in OWNED
    if pattern != ".lock"
]
"""One file name for each kind that a run writes."""


def fill(run: RunFolder) -> None:
    """A run that has everything."""
    for name in EXAMPLES:
        path = run.path / name
        if name != "run.json":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("written by the run")


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    fill(claim(path, "new"))
    return path


# ------------------------------------------------------------------------------------------ who may come in


def test_a_new_run_takes_a_missing_or_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing/and/deep"):
        run = claim(tmp_path / name, "new")
        assert json.loads((run.path / "run.json").read_text()) == {"format": 1, "kind": "mocokit run"}
        assert all(folder.is_dir() for folder in (run.checkpoints, run.evaluation, run.samples))
        assert not run.began
        assert open_run(run.path) == run


def test_a_start_that_failed_before_it_began_leaves_a_folder_that_is_still_new(tmp_path: Path) -> None:
    run = claim(tmp_path / "run", "new")
    files.write_json(run.path / "status.json", {"state": "failed"})
    (run.path / "cache").mkdir()
    (run.path / "cache" / "pixels.u8").write_bytes(b"big")
    claim(run.path, "new")
    assert (run.path / "cache" / "pixels.u8").read_bytes() == b"big"


def test_a_start_killed_before_its_marker_was_written_blocks_nothing(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on x\n")
    (tmp_path / ".tmp-0123abcd-run.json").write_text("{")
    claim(tmp_path, "new")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [".lock", "run.json"]


@pytest.mark.parametrize("sign", ["config.yaml", "checkpoints/step-4/model.safetensors"])
def test_a_run_that_began_is_not_new(tmp_path: Path, sign: str) -> None:
    run = claim(tmp_path / "run", "new")
    (run.path / sign).parent.mkdir(exist_ok=True)
    (run.path / sign).write_text("x")
    before = contents(run.path)
    with pytest.raises(UsageError, match=r"already holds a run\. Continue it with --resume or replace .* --overwrite"):
        claim(run.path, "new")
    assert contents(run.path) == before


def test_resume_needs_a_run_and_keeps_everything(begun: Path, tmp_path: Path) -> None:
    before = contents(begun)
    claim(begun, "resume")
    kept = {name: data for name, data in before.items() if not name.startswith((".tmp-", "checkpoints/.tmp-", ".lock"))}
    assert {name: data for name, data in contents(begun).items() if name != ".lock"} == kept
    for other in (tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError, match="holds no run to resume"):
            claim(other, "resume")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_a_folder_with_other_things_is_left_alone(tmp_path: Path, mode: runfolder.Mode) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"is not empty and holds no run.*'thesis\.tex' is in it.*another --out"):
        claim(tmp_path, mode)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
def test_a_file_and_a_path_below_a_file_are_no_folders(tmp_path: Path, mode: runfolder.Mode) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file; --out needs a folder"):
        claim(tmp_path / "file", mode)
    with pytest.raises((StorageError, UsageError), match="file/run"):
        claim(tmp_path / "file" / "run", mode)
    with pytest.raises(StorageError, match="shorter --out"):
        claim(tmp_path / ("n" * 300), mode)
    assert contents(tmp_path) == {"file": b"x"}


def test_a_run_of_another_version_is_not_touched(begun: Path) -> None:
    (begun / "run.json").write_text('{"format": 2}')
    before = contents(begun)
    for mode in ("new", "resume", "overwrite"):
        with pytest.raises(UsageError, match="another version"):
            claim(begun, mode)
    assert contents(begun) == before


def test_a_folder_that_may_not_be_looked_into() -> None:
    with without_privileges() as home:
        closed = home / "closed"
        closed.mkdir()
        closed.chmod(0)
        for mode in ("new", "overwrite", "resume"):
            with pytest.raises(StorageError, match=r"Permission denied.*permissions"):
                claim(closed / "run", mode)
        closed.chmod(0o500)
        with pytest.raises(StorageError, match=r"Permission denied.*permissions"):
            claim(closed / "run", "new")


# ------------------------------------------------------------------------------------------------- the lock


def test_a_claimed_folder_is_refused_to_others_and_left_as_it_is(begun: Path) -> None:
    for mode in ("resume", "overwrite"):
        _, lock = claim_run(begun, mode)
        before = contents(begun)
        with pytest.raises(LockedError, match=f"in use by process {os.getpid()} on "):
            claim_run(begun, mode)
        assert contents(begun) == before
        lock.release()
    claim(begun, "resume")


def test_a_refused_claim_gives_the_lock_back(begun: Path) -> None:
    (begun / "foreign.txt").write_text("x")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"foreign\.txt"):
            claim_run(begun, "overwrite")
    claim(begun, "resume")


def test_another_process_that_came_first_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking at the folder and locking it, somebody else ran to the end there."""
    path = tmp_path / "run"
    original = files.RunLock

    def late(folder: Path) -> files.RunLock:
        monkeypatch.setattr(files, "RunLock", original)
        fill(claim(folder, "new"))
        return original(folder)

    monkeypatch.setattr(files, "RunLock", late)
    with pytest.raises(UsageError, match="already holds a run"):
        claim(path, "new")
    assert (path / "config.yaml").read_text() == "written by the run"
    claim(path, "resume")


def test_the_lock_is_tried_before_anything_slow_is_imported(begun: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom mocokit.errors import LockedError\n"
        "from mocokit.training.runfolder import claim_run\n"
        "try:\n    claim_run(Path(sys.argv[1]), 'resume')\nexcept LockedError as error:\n    print(error)\n"
        "print(sorted({'torch', 'numpy', 'yaml', 'PIL'} & set(sys.modules)))\n"
    )
    _, lock = claim_run(begun, "resume")
    with lock:
        done = subprocess.run([sys.executable, "-c", script, str(begun)], capture_output=True, text=True, check=True)
    assert f"in use by process {os.getpid()} on " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


# ---------------------------------------------------------------------------------------------- overwriting


def test_overwrite_removes_the_earlier_run_only_when_told_to(begun: Path) -> None:
    before = contents(begun)
    run = claim(begun, "overwrite")
    swept = {name for name in before if name.startswith((".tmp-", "checkpoints/.tmp-"))}
    assert {n: d for n, d in contents(begun).items() if n != ".lock"} == {
        n: d for n, d in before.items() if n not in swept | {".lock"}
    }
    run.clear()
    kept = [f"cache/{name}" for name in ("execution.yaml", "init.safetensors", "x.tables", "x.u8", "x.u8.json")]
    assert sorted(contents(begun)) == [".lock", *kept, "run.json"]
    assert sorted(p.name for p in begun.iterdir()) == [".lock", "cache", "checkpoints", "eval", "run.json", "samples"]
    assert not run.began
    claim(begun, "new")


FOREIGN = [
    "notes.txt",
    "samples/holiday.png",
    "eval/mine.json",
    "checkpoints/step-12/notes.txt",
    "checkpoints/README",
    "checkpoints/step-12/deeper/model.safetensors",
    "cache/other.bin",
    "my folder/x.jsonl",
    "config.yaml.bak",
    "Config.yaml",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_anywhere_makes_overwrite_refuse_before_anything_is_removed(begun: Path, name: str) -> None:
    (begun / name).parent.mkdir(parents=True, exist_ok=True)
    (begun / name).write_text("mine")
    before = contents(begun)
    assert foreign_files(begun) == [name]
    with pytest.raises(UsageError, match=r"--overwrite refused: .*was not written by mocokit\. Move it away"):
        claim(begun, "overwrite")
    assert {n: d for n, d in contents(begun).items() if n != ".lock"} == {
        n: d for n, d in before.items() if n != ".lock"
    }


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_that_comes_late_is_not_deleted(begun: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = claim(begun, "overwrite")
    (begun / name).parent.mkdir(parents=True, exist_ok=True)
    (begun / name).write_text("mine")
    with pytest.raises(UsageError, match="--overwrite refused"):
        run.clear()
    monkeypatch.setattr(runfolder, "_refuse_foreign", lambda path: None)  # it came after even that look
    run.clear()
    assert (begun / name).read_text() == "mine"


def test_links_are_removed_or_refused_but_never_followed(begun: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "model.safetensors").write_text("years")
    (begun / "results.png").unlink()
    (begun / "results.png").symlink_to(precious / "model.safetensors")
    run = claim(begun, "overwrite")
    run.clear()
    assert not (begun / "results.png").is_symlink()
    for name in ("linked", "samples/linked", "checkpoints/step-77"):
        (begun / name).symlink_to(precious)
        with pytest.raises(UsageError, match="--overwrite refused"):
            claim(begun, "overwrite")
        (begun / name).unlink()
    (begun / "eval").rmdir()
    (begun / "eval").symlink_to(precious)
    with pytest.raises(UsageError, match=r"eval is a symbolic link"):
        claim(begun, "overwrite")
    assert contents(precious) == {"model.safetensors": b"years"}


def test_an_interrupted_overwrite_is_still_a_run_folder(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before each removal in turn: never a folder that passes for a whole run, never one that is stuck."""
    original = files.remove_path
    for n in range(1, 100):
        fill(claim(begun, "resume"))
        run = claim(begun, "overwrite")
        calls = 0

        def removing(path: Path, n: int = n) -> None:
            nonlocal calls
            calls += 1
            if calls == n:
                raise KeyboardInterrupt
            original(path)

        monkeypatch.setattr(files, "remove_path", removing)
        try:
            run.clear()
        except KeyboardInterrupt:
            monkeypatch.setattr(files, "remove_path", original)
        else:
            break
        assert open_run(begun) == run
        if n == 1:
            assert (begun / "checkpoints/step-12/model.safetensors").exists()
        else:
            assert not run.config.exists(), "the configuration goes first, so that nothing half is resumed"
        claim(begun, "overwrite").clear()
    assert 15 < n < 99


def test_a_status_that_cannot_be_read_counts_as_none(begun: Path) -> None:
    run = RunFolder(begun)
    for text in ("", "[]", '{"state": '):
        (begun / "status.json").write_text(text)
        assert run.status() == {}
    files.write_json(begun / "status.json", {"state": "running"})
    assert run.status() == {"state": "running"}
    (begun / "status.json").unlink()
    assert run.status() == {}


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere does not exist\. Name a folder made by `mocokit pretrain"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is not a run folder"):
        open_run(tmp_path)
