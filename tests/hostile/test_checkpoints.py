"""Checkpoints made to harm: with manifests that match, so that only what reads the contents stands in the way."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from attacks.safetensors_files import hostile_files

import mocokit
from mocokit import files
from mocokit.errors import DamagedError
from mocokit.training.checkpoint import FORMAT
from tests.toy import OPTIONS, npz

READ_ONLY_NOT_LOADED = {"a name twice"}
"""What the library reads; its tensors do not fit the run."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npz(tmp_path_factory.mktemp("data") / "toy.npz")


@pytest.fixture(scope="module")
def once(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mocokit.pretrain(data, tmp_path_factory.mktemp("whole") / "run", quiet=True, **OPTIONS).path


@pytest.fixture
def run(once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(once, tmp_path / "run")


def replace_in_both(run: Path, name: str, data: bytes) -> None:
    """Put `data` into every checkpoint, each with a manifest that is right about it."""
    for path in sorted((run / "checkpoints").iterdir()):
        manifest = files.verify_folder(path)
        parts = {n: (path / n).read_bytes() for n in manifest["files"]} | {name: data}
        facts = {k: v for k, v in manifest.items() if k not in ("files", "manifest_sha256")}
        assert facts["format"] == FORMAT
        shutil.rmtree(path)
        files.commit_folder(path, parts, facts)


@pytest.mark.parametrize("attack", sorted(hostile_files()))
def test_hostile_safetensors(run: Path, data: Path, attack: str) -> None:
    """Refused within 5 s, naming the checkpoint; the run's log is as it was."""
    losses = (run / "loss.jsonl").read_bytes()
    replace_in_both(run, "model.safetensors", hostile_files()[attack])
    began = time.monotonic()
    with pytest.raises(DamagedError, match=r"step-12"):
        mocokit.load_run(run).encoder()
    assert time.monotonic() - began < 5
    assert mocokit.verify(run).whole == (attack in READ_ONLY_NOT_LOADED)
    assert (run / "loss.jsonl").read_bytes() == losses


def test_a_resume_refuses_it_too(run: Path, data: Path) -> None:
    replace_in_both(run, "model.safetensors", hostile_files()["overlapping tensors"])
    with pytest.raises(DamagedError, match=r"model\.safetensors is not a readable safetensors file"):
        mocokit.pretrain(data, run, resume=True, quiet=True)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-12", "step-8"]


MEMORY = """
import sys
from pathlib import Path
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
from mocokit.training.checkpoint import read_tensors
from mocokit.errors import DamagedError
before = peak()
try:
    read_tensors(Path(sys.argv[1]))
except DamagedError:
    print((peak() - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["a header of 99 MB", "300,000 tensors", "a shape of 2^62"])
def test_a_bomb_takes_little_memory(tmp_path: Path, attack: str) -> None:
    """At most twice the file and 100 MB."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(hostile_files()[attack])
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * path.stat().st_size / 2**20 + 100


def test_names_in_a_file_reach_no_place(run: Path, data: Path, tmp_path: Path) -> None:
    """Tensor names with paths and odd characters are names and nothing else."""
    odd = {"../../outside": torch.zeros(1), "query.\n\0x": torch.zeros(1), "/etc/passwd": torch.zeros(1)}
    replace_in_both(run, "model.safetensors", safetensors.torch.save(odd))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(DamagedError, match="does not fit"):
        mocokit.load_run(run).encoder()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"step": 12, "queue": {"pointer": 1e400, "fill": 20}}',
        b'{"step": NaN, "queue": {}}',
        b'{"step": ' + b"9" * 4000 + b', "queue": {}}',
        b'{"step": 12, "queue": {"pointer": -1, "fill": 20}}',
        b'{"step": 12, "queue": {"pointer": "../x", "fill": 20}}',
        b'{"step": 12, "step": 3, "queue": []}',
        b"\xef\xbb\xbf{}",
        b"null",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_hostile_counters(run: Path, data: Path, text: bytes) -> None:
    replace_in_both(run, "state.json", text)
    with pytest.raises(DamagedError, match=r"state\.json|does not fit"):
        mocokit.pretrain(data, run, resume=True, quiet=True)
