"""Weights from elsewhere: what fits is loaded and told, what does not is refused, and no pickle is trusted."""

from __future__ import annotations

import contextlib
import socket
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from attacks.pickles import bombs, hostile_pickles
from torch import Tensor

import mocokit
from mocokit import files
from mocokit.cli import main
from mocokit.contrast.encoders import EncoderConfig, build_encoder
from mocokit.errors import DamagedError, DataError, UsageError
from mocokit.training.foreign import as_safetensors, load_weights, safe_load_pt
from tests.toy import OPTIONS, contents, npz

BACKBONE = "small-cnn-8-8"


def encoder(seed: int = 0) -> Any:
    return build_encoder(EncoderConfig(backbone=BACKBONE, dim=8), image_size=16, seed=seed)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """A trunk's tensors, unlike those of any fresh encoder of these tests."""
    return {name: tensor.clone() for name, tensor in encoder(99).backbone.trunk.state_dict().items()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return npz(tmp_path / "toy.npz")


def saved(path: Path, tensors: dict[str, Tensor]) -> Path:
    safetensors.torch.save_file(tensors, path)
    return path


# ----------------------------------------------------------------------------------------------------- what fits


@pytest.mark.parametrize("prefix", ["", "module.encoder_q.", "backbone.", "query.backbone.trunk."])
def test_weights_are_put_in_under_any_usual_prefix(weights: dict[str, Tensor], tmp_path: Path, prefix: str) -> None:
    extra = {"fc.weight": torch.zeros(2, 2)}
    path = saved(tmp_path / "w.safetensors", {prefix + name: tensor for name, tensor in weights.items()} | extra)
    mine = encoder().backbone
    report = load_weights(path, mine)
    for name, tensor in mine.trunk.state_dict().items():
        assert torch.equal(tensor, weights[name])
    counted = [name for name in weights if not name.endswith("num_batches_tracked")]
    assert (set(report.loaded), report.missing, report.unexpected) == (set(counted), (), ("fc.weight",))
    assert report.share == 1.0


def test_less_than_nine_tenths_are_refused_unless_told(weights: dict[str, Tensor], tmp_path: Path) -> None:
    names = sorted(weights)
    path = saved(tmp_path / "w.safetensors", {name: weights[name] for name in names[:-2]})
    mine = encoder().backbone
    before = {name: tensor.clone() for name, tensor in mine.trunk.state_dict().items()}
    with pytest.raises(UsageError, match=r"of the backbone's .*is the first of those missing.*--allow-partial"):
        load_weights(path, mine)
    assert all(torch.equal(before[name], tensor) for name, tensor in mine.trunk.state_dict().items())
    report = load_weights(path, mine, allow_partial=True)
    assert 0 < report.share < 0.9
    none = saved(tmp_path / "n.safetensors", {"other": torch.zeros(3)})
    with pytest.raises(UsageError, match="0 of the backbone's"):
        load_weights(none, mine, allow_partial=True)
    wrong = saved(tmp_path / "s.safetensors", {name: torch.zeros(7) for name in weights})
    with pytest.raises(UsageError, match="0 of the backbone's"):
        load_weights(wrong, mine)
    (tmp_path / "b.safetensors").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(DamagedError, match="not a readable safetensors file"):
        load_weights(tmp_path / "b.safetensors", mine)


# ------------------------------------------------------------------------------------------------- a run from weights


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_run_starts_from_weights_and_resumes(
    weights: dict[str, Tensor], data: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"w.{kind}"
    if kind == "pt":
        torch.save({"epoch": 3, "state_dict": {f"module.{name}": t for name, t in weights.items()}}, path)
    else:
        saved(path, weights)
    run = mocokit.pretrain(data, tmp_path / "run", init=str(path), **(OPTIONS | {"lr": 1e-30}))
    said = capsys.readouterr().err
    counted = sum(not name.endswith("num_batches_tracked") for name in weights)
    assert f"Starting from {path}: {counted} of the backbone's {counted} tensors, 0 not used." in said
    assert ("under 'state_dict'" in said) == (kind == "pt")
    assert run.config.data.init == str(path)
    assert run.config.data.init_sha256 == files.sha256_file(path)
    trained = run.encoder().backbone.trunk.state_dict()
    for name, tensor in weights.items():  # at a learning rate of next to nothing only batch norm's statistics move
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-20)
    path.unlink()  # a checkpoint has everything
    again = mocokit.pretrain(data, run.path, resume=True, quiet=True)
    assert again.step == run.step


def test_the_file_must_still_be_the_same_before_the_first_checkpoint(
    weights: dict[str, Tensor], data: Path, tmp_path: Path
) -> None:
    path = saved(tmp_path / "w.safetensors", weights)
    run = mocokit.pretrain(data, tmp_path / "run", init=str(path), quiet=True, **OPTIONS)
    losses = (run.path / "loss.jsonl").read_bytes()
    for checkpoint in list(run.folder.checkpoints.iterdir()):
        files.remove_path(checkpoint)
    again = mocokit.pretrain(data, run.path, resume=True, quiet=True)
    assert (again.path / "loss.jsonl").read_bytes() == losses
    for checkpoint in list(run.folder.checkpoints.iterdir()):
        files.remove_path(checkpoint)
    saved(path, {name: tensor + 1 for name, tensor in weights.items()})
    with pytest.raises(DataError, match="is not the file that the configuration names"):
        mocokit.pretrain(data, run.path, resume=True, quiet=True)


def test_mistakes_with_weights(
    weights: dict[str, Tensor], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pretrain", str(data), "--out", str(tmp_path / "run"), "-q", "--backbone", BACKBONE, "--batch-size", "8"]
    (tmp_path / "w.txt").write_text("x")
    (tmp_path / "w.pt").write_text("<html>")
    for name, code, says in (
        ("none.safetensors", 2, "are no file"),
        ("w.txt", 2, "Name a .safetensors, .pt or .pth file"),
        ("w.pt", 3, "could not be read safely"),
    ):
        assert main([*words, "--init", str(tmp_path / name)]) == code
        assert says in capsys.readouterr().err
    assert main([*words, "--allow-partial"]) == 2
    assert "no effect without --init" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- pickles


def test_what_a_pt_holds_comes_out_as_safetensors(tmp_path: Path) -> None:
    shared = torch.arange(12.0).reshape(3, 4)
    held = {
        "model": {
            "a": shared,
            "b": shared.T,
            "half": torch.ones(2, dtype=torch.bfloat16),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "nested": {"c": torch.tensor(3)},
            "name": "x",
            "sparse": torch.eye(3).to_sparse(),
        },
        "optimizer": {"state": {0: torch.zeros(5)}},
        "epoch": 7,
    }
    torch.save(held, tmp_path / "w.pth")
    report = safe_load_pt(tmp_path / "w.pth", tmp_path / "out" / "w.safetensors")
    found = safetensors.torch.load_file(tmp_path / "out" / "w.safetensors")
    assert set(found) == {"a", "b", "half", "parameter", "nested.c"}
    assert torch.equal(found["b"], shared.T)
    assert found["half"].dtype == torch.bfloat16
    assert (report.tensors, report.under, report.other) == (5, "model", ("name", "sparse"))
    assert report.network
    plain, remark = as_safetensors(tmp_path / "out" / "w.safetensors", tmp_path / "no")
    assert (plain, remark) == (tmp_path / "out" / "w.safetensors", "")


def refuses_all(tmp_path: Path, names: Sequence[str]) -> None:
    """Every one is refused with a reason, nothing ran, and nothing was written."""
    marker = tmp_path / "marker"
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"as before")
    seen = contents(tmp_path)
    hostile = hostile_pickles(marker)
    for name in names:
        path = tmp_path / "hostile.pt"
        path.write_bytes(hostile[name])
        with pytest.raises(DataError, match=r"could not be read safely \(it holds more than tensors") as caught:
            safe_load_pt(path, target)
        assert "weights_only" not in str(caught.value), "torch's advice to read it unsafely"
        assert not marker.exists(), name
        path.unlink()
        assert contents(tmp_path) == seen, name


@pytest.mark.slow
def test_no_hostile_pickle_runs(tmp_path: Path) -> None:
    refuses_all(tmp_path, ["exec", "os.system, bare", "global by opcode"])


@pytest.mark.nightly
def test_none_of_all_hostile_pickles_runs(tmp_path: Path) -> None:
    names = list(hostile_pickles(tmp_path / "marker"))
    assert len(names) >= 15
    refuses_all(tmp_path, names)


def test_the_attack_is_real(tmp_path: Path) -> None:
    """Without our reader most of these do run."""
    marker, ran = tmp_path / "marker", 0
    for data in hostile_pickles(marker).values():
        (tmp_path / "hostile.pt").write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(Exception):
                torch.load(tmp_path / "hostile.pt", weights_only=False)
        ran += marker.exists()
        marker.unlink(missing_ok=True)
    assert ran >= 8


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(bombs()))
def test_bombs_end_with_a_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / "bomb.pt").write_bytes(bombs()[name])
    with pytest.raises(DataError, match="could not be read safely"):
        safe_load_pt(tmp_path / "bomb.pt", tmp_path / "out.safetensors", seconds=20, spare_mb=256)
    assert not (tmp_path / "out.safetensors").exists()


CHILD = """
import sys, importlib.util
spec = importlib.util.spec_from_file_location("child", sys.argv[1])
child = importlib.util.module_from_spec(spec)
spec.loader.exec_module(child)
network = child.shut_network()
child.guard(sys.argv[2])
open(sys.argv[2], "w").close()
def tries():
    import os, socket, subprocess
    yield lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3])), 2)
    yield lambda: subprocess.run(["true"])
    yield lambda: os.system("true")
    yield lambda: os.fork()
    yield lambda: open(sys.argv[2] + "x", "w")
    yield lambda: os.open(sys.argv[2] + "y", os.O_CREAT | os.O_WRONLY)
    yield lambda: os.rename(sys.argv[2], sys.argv[2] + "z")
    yield lambda: os.remove(sys.argv[2])
    yield lambda: os.mkdir(sys.argv[2] + "d")
    yield lambda: os.symlink("/", sys.argv[2] + "s")
refused = 0
for one in tries():
    try:
        one()
    except OSError:
        refused += 1
print(refused, network)
"""


def test_the_child_can_reach_and_write_nothing_else(tmp_path: Path) -> None:
    """Suppose code did run in the child: no connection, no process, no other file."""
    import subprocess
    import sys

    from mocokit.training import foreign

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        calls: list[Any] = []

        def listen() -> None:
            try:
                calls.append(server.accept())
            except TimeoutError:
                return

        thread = threading.Thread(target=listen)
        thread.start()
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-c",
                CHILD,
                str(foreign._CHILD),
                str(tmp_path / "out"),
                str(server.getsockname()[1]),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        thread.join()
    assert done.stdout.startswith("10 "), done.stdout + done.stderr
    assert calls == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
