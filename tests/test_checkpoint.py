"""The whole training state to disk and back, never a damaged one, never fewer than two good ones."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mocokit import files
from mocokit.contrast.encoders import EncoderConfig, EncoderPair, build_encoder
from mocokit.contrast.key_queue import KeyQueue
from mocokit.contrast.steps import STEPS, ContrastConfig, ViewPair
from mocokit.errors import DamagedError, StorageError
from mocokit.training import checkpoint
from mocokit.training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from mocokit.training.distributed import Ranks
from mocokit.training.loop import QueryUpdate
from mocokit.training.optim import OptimConfig, build_optimizer, optimizer_tensors
from mocokit.training.precision import num_threads
from mocokit.training.state import TrainState
from tests.faults import CODES, Faults
from tests.toy import contents, flip_bit, verified_steps

FACTS = {"config": "abc", "log": {"loss": 10, "metrics": 0}}
N = 6


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


def fresh(
    seed: int = 0,
    *,
    K: int = 15,
    dim: int = 8,
    backbone: str = "small-cnn-4-6",
    optim: OptimConfig = OptimConfig(lr=0.1),
) -> TrainState:
    encoder = build_encoder(EncoderConfig(backbone=backbone, dim=dim), image_size=8, seed=seed)
    pair = EncoderPair(encoder)
    optimizer = build_optimizer(optim, pair.trained)
    return TrainState(pair, KeyQueue(K, dim), optimizer)


def train(state: TrainState, steps: int, order: str = "paper") -> list[float]:
    """Some steps on pictures that are a function of the step; returns the losses."""
    contrast = ContrastConfig(K=15, m=0.9)
    state.pair.train()
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state.step)
        x_q, x_k = torch.randn(2, N, 3, 8, 8, generator=generator)
        ids = torch.arange(N) + N * (state.step % 4)
        update = QueryUpdate(state, 0.1, 1, lambda: "")
        STEPS[order](
            state.pair,
            state.queue,
            [ViewPair(x_q, x_k, ids, ids // 2)],
            scoring=contrast.scoring(),
            m=0.9,
            step=state.step,
            update_query_=update,
            gather=Ranks().gather,
        )
        state.step += 1
        losses.append(update.loss)
    return losses


def everything(state: TrainState) -> dict[str, Tensor]:
    tensors = state.model_tensors() | optimizer_tensors(state.optimizer, state.pair.trained)
    numbers = {"step": state.step, **state.queue.counters()}
    return {k: v.clone() for k, v in tensors.items()} | {k: torch.tensor(v) for k, v in numbers.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def trained() -> TrainState:
    state = fresh()
    train(state, 4)
    return state


@pytest.fixture
def saved(trained: TrainState, tmp_path: Path) -> Path:
    return save_checkpoint(trained, tmp_path, FACTS)


# ---------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("order", ["paper", "ema-first"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_restored_state_goes_on_bit_for_bit(tmp_path: Path, order: str, layout: torch.memory_format) -> None:
    state, other = fresh(0), fresh(1)
    for one in (state, other):
        one.pair.query.to(memory_format=layout)
        one.pair.key.to(memory_format=layout)
    train(state, 4, order)
    assert state.queue.fill == 15  # full and wrapped: 24 keys went in
    assert state.queue.pointer == 24 % 15
    save_checkpoint(state, tmp_path, FACTS)
    load_checkpoint(other, find_checkpoint(tmp_path))
    assert same(everything(state), everything(other))
    assert len(optimizer_tensors(state.optimizer, state.pair.trained)) == len(state.pair.theta_q)
    assert train(state, 5, order) == train(other, 5, order)
    assert same(everything(state), everything(other))


@pytest.mark.parametrize("optim", [OptimConfig(kind="lars"), OptimConfig(kind="adamw")], ids=lambda o: o.kind)
def test_so_it_does_under_every_optimiser(tmp_path: Path, optim: OptimConfig) -> None:
    state, other = fresh(0, optim=optim), fresh(1, optim=optim)
    train(state, 4)
    train(other, 1)
    save_checkpoint(state, tmp_path, FACTS)
    load_checkpoint(other, find_checkpoint(tmp_path))
    assert same(everything(state), everything(other))
    assert train(state, 5) == train(other, 5)
    assert same(everything(state), everything(other))
    with pytest.raises(DamagedError, match=r"optim\.safetensors does not fit this run's configuration: "):
        load_checkpoint(
            fresh(optim=OptimConfig(kind="adamw" if optim.kind == "lars" else "lars")), find_checkpoint(tmp_path)
        )


def test_a_half_filled_queue_comes_back(tmp_path: Path) -> None:
    state, other = fresh(0, K=100), fresh(1, K=100)
    train(state, 2)
    save_checkpoint(state, tmp_path, FACTS)
    load_checkpoint(other, find_checkpoint(tmp_path))
    assert (other.queue.fill, other.queue.pointer) == (12, 12)
    assert torch.equal(other.queue.births, state.queue.births)


def test_the_state_before_the_first_step_and_without_momentum_has_no_buffers(tmp_path: Path) -> None:
    for number, (momentum, steps) in enumerate(((0.9, 0), (0.0, 3))):
        optim = OptimConfig(lr=0.1, sgd_momentum=momentum)
        state, other = fresh(0, optim=optim), fresh(1, optim=optim)
        train(state, steps)
        folder = files.make_folder(tmp_path / str(number))
        save_checkpoint(state, folder, FACTS)
        load_checkpoint(other, find_checkpoint(folder))
        assert optimizer_tensors(other.optimizer, other.pair.trained) == {}
        assert train(state, 2) == train(other, 2)
        assert same(everything(state), everything(other))


def test_the_same_state_gives_the_same_bytes(trained: TrainState, saved: Path, tmp_path: Path) -> None:
    again = save_checkpoint(trained, files.make_folder(tmp_path / "again"), FACTS)
    assert contents(again) == contents(saved)


def read_safetensors(data: bytes) -> dict[str, Any]:
    """The format by its specification, without the library: header length, JSON header, little-endian tensors."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kinds = {"F32": "<f4", "I64": "<i8"}
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[8 + length + begin : 8 + length + end]
        found[name] = np.frombuffer(raw, kinds[entry["dtype"]]).reshape(entry["shape"])
    return found


def test_the_files_are_safetensors_and_json_and_hold_no_pickle(trained: TrainState, saved: Path) -> None:
    assert sorted(contents(saved)) == ["MANIFEST.json", "model.safetensors", "optim.safetensors", "state.json"]
    stored = read_safetensors((saved / "model.safetensors").read_bytes())
    expected = trained.model_tensors()
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(stored[name], tensor.numpy())
    assert {"query.head.2.weight", "key.head.2.weight", "queue.vectors", "queue.births"} <= stored.keys()
    buffers = read_safetensors((saved / "optim.safetensors").read_bytes())
    parameters = dict(trained.pair.query.named_parameters())
    assert buffers.keys() == {f"momentum.{name}" for name in parameters}
    assert json.loads((saved / "state.json").read_text()) == {"step": 4, "queue": {"pointer": 9, "fill": 15}}
    for data in contents(saved).values():
        assert not data.startswith((b"\x80", b"PK"))  # a pickle, a zip of pickles
        assert b"torch._utils" not in data
        assert b"c__builtin__" not in data


# ------------------------------------------------------------------------------------------------ pruning


def test_two_are_kept_and_never_fewer_good_ones(trained: TrainState, tmp_path: Path) -> None:
    state = TrainState(trained.pair, trained.queue, trained.optimizer)
    rng = np.random.default_rng(0)
    good = 0
    for state.step in range(1, 15):
        save_checkpoint(state, tmp_path, FACTS)
        verified = verified_steps(tmp_path)
        assert verified[-1] == state.step
        assert len(verified) >= min(2, good + 1), "a good checkpoint was removed for a damaged one"
        if rng.random() < 0.4:  # the disk spoils one
            victim = int(rng.choice(verified))
            flip_bit(tmp_path / f"step-{victim}" / "model.safetensors", 1000)
        good = len(verified_steps(tmp_path))
    state.step = 15
    save_checkpoint(state, tmp_path, FACTS)
    state.step = 16
    save_checkpoint(state, tmp_path, FACTS)
    assert checkpoint.checkpoint_steps(tmp_path) == [15, 16]


def test_pruning_leaves_alone_what_is_not_a_checkpoint_of_ours(trained: TrainState, tmp_path: Path) -> None:
    state = TrainState(trained.pair, trained.queue, trained.optimizer)
    for name in ("step-x", "step-007", "steps"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-3").write_text("a file")
    for state.step in (1, 2, 4, 5):
        save_checkpoint(state, tmp_path, FACTS)
        if state.step == 1:
            (tmp_path / "step-1" / "notes.txt").write_text("why this one matters")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-007", "step-1", "step-3", "step-4", "step-5", "step-x", "steps",
    ]  # fmt: skip
    assert (tmp_path / "step-1" / "notes.txt").read_text() == "why this one matters"


def test_saving_a_step_again_replaces_a_damaged_one_only(trained: TrainState, tmp_path: Path) -> None:
    path = save_checkpoint(trained, tmp_path, FACTS)
    before = path.stat().st_ino
    save_checkpoint(trained, tmp_path, FACTS)
    assert path.stat().st_ino == before
    flip_bit(path / "optim.safetensors", 77)
    save_checkpoint(trained, tmp_path, FACTS)
    assert verified_steps(tmp_path) == [4]
    (path / "mine.txt").write_text("precious")
    with pytest.raises(StorageError, match=r"mine\.txt is in the way"):
        save_checkpoint(trained, tmp_path, FACTS)
    assert (path / "mine.txt").read_text() == "precious"


# ------------------------------------------------------------------------------------------ damage and misfits


def test_the_newest_that_verifies_is_found_and_the_reason_told(trained: TrainState, tmp_path: Path) -> None:
    state = TrainState(trained.pair, trained.queue, trained.optimizer)
    for state.step in (9, 10):
        save_checkpoint(state, tmp_path, FACTS)
    assert find_checkpoint(tmp_path).path.name == "step-10"
    assert find_checkpoint(tmp_path).passed_over == ()
    flip_bit(tmp_path / "step-10" / "model.safetensors", 3000)
    found = find_checkpoint(tmp_path)
    assert (found.path.name, found.manifest["step"]) == ("step-9", 9)
    assert len(found.passed_over) == 1
    assert str(tmp_path / "step-10" / "model.safetensors") in found.passed_over[0]
    with pytest.raises(DamagedError, match=r"step-10/model\.safetensors does not match"):
        find_checkpoint(tmp_path, 10)
    assert find_checkpoint(tmp_path, 9).path.name == "step-9"
    (tmp_path / "step-9" / "state.json").unlink()
    with pytest.raises(DamagedError, match=r"No usable checkpoint.*step-10.*step-9/state\.json.*--overwrite"):
        find_checkpoint(tmp_path)


def test_no_checkpoint_and_an_unknown_step(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"No usable checkpoint in .* There is none"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(DamagedError, match="step-3"):
        find_checkpoint(tmp_path, 3)


@pytest.mark.parametrize("name", ["model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json"])
def test_200_flipped_bits_and_cuts_of_a_real_checkpoint_are_noticed(saved: Path, name: str) -> None:
    path = saved / name
    whole = path.read_bytes()
    rng = np.random.default_rng(5)
    for bit in rng.integers(0, 8 * len(whole), 200).tolist():
        flip_bit(path, bit)
        with pytest.raises(DamagedError, match=name):
            find_checkpoint(saved.parent, 4)
        flip_bit(path, bit)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedError, match=name):
            find_checkpoint(saved.parent, 4)


def test_a_renamed_checkpoint_is_not_taken_for_a_later_one(saved: Path) -> None:
    shutil.copytree(saved, saved.parent / "step-9")
    found = find_checkpoint(saved.parent)
    assert found.path.name == "step-4"
    assert "step-9 is the checkpoint of another step" in found.passed_over[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"K": 16}, "queue"),
        ({"dim": 9}, "size mismatch"),
        ({"backbone": "small-cnn-4-7"}, "size mismatch"),
        ({"backbone": "small-cnn-4-6-6"}, "Missing key"),
    ],
)
def test_a_state_of_another_shape_is_refused(saved: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(DamagedError, match=f"(?s)step-4 does not fit this run's configuration.*{says}"):
        load_checkpoint(fresh(**changes), find_checkpoint(saved.parent))


def test_contents_that_verify_but_make_no_sense_are_refused(trained: TrainState, saved: Path, tmp_path: Path) -> None:
    good = {name: data for name, data in contents(saved).items() if name != "MANIFEST.json"}
    buffers = optimizer_tensors(trained.optimizer, trained.pair.trained)
    first = next(iter(buffers))

    def tensors(values: dict[str, Tensor]) -> bytes:
        return checkpoint._to_bytes(values)

    bad: list[dict[str, bytes]] = [
        {"state.json": b"[]"},
        {"state.json": b'{"step": 4}'},
        {"state.json": b'{"step": "x", "queue": {"pointer": 0, "fill": 15}}'},
        {"state.json": b'{"step": 4, "queue": {"pointer": 99, "fill": 15}}'},
        {"state.json": b'{"step": 4, "queue": {"pointer": 3, "fill": 4}}'},
        {"model.safetensors": b"\x80\x04K\x01."},
        {"model.safetensors": tensors({"query.x": torch.zeros(1)})},
        {"optim.safetensors": tensors(buffers | {first: torch.zeros(2)})},
        {"optim.safetensors": tensors(buffers | {"momentum.other": torch.zeros(2)})},
    ]
    for number, change in enumerate(bad):
        folder = files.make_folder(tmp_path / str(number))
        files.commit_folder(folder / "step-4", good | change, {"format": 1, "step": 4})
        with pytest.raises(DamagedError, match="step-4"):
            load_checkpoint(fresh(), find_checkpoint(folder))


# ------------------------------------------------------------------------------------------- disk and faults


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
def test_whichever_call_of_a_save_fails_it_is_said_and_a_good_checkpoint_is_there(
    trained: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    state = TrainState(trained.pair, trained.queue, trained.optimizer)
    before = files.make_folder(tmp_path / "before")
    for state.step in (1, 2):
        save_checkpoint(state, before, FACTS)
    state.step = 3
    counted = shutil.copytree(before, tmp_path / "counted")
    total = Faults(monkeypatch).count(lambda: save_checkpoint(state, counted, FACTS))
    assert total >= 16  # a folder, four files of three calls each, two syncs, the commit, the pruning
    for n in range(1, total + 1):
        folder = shutil.copytree(before, tmp_path / str(n))
        faults = Faults(monkeypatch, fail_at=n, code=code)
        with pytest.raises(StorageError, match=os.strerror(code)):
            save_checkpoint(state, folder, FACTS)
        faults.stop()
        names = sorted(path.name for path in folder.glob("step-*"))
        assert verified_steps(folder) == [int(name.removeprefix("step-")) for name in names], "half a checkpoint"
        assert len(names) >= 2
        load_checkpoint(fresh(1), find_checkpoint(folder))
        files.sweep_temporaries(folder)  # as the next start does
        save_checkpoint(state, folder, FACTS)  # and the next save works
        assert verified_steps(folder)[-2:] == [2, 3]
        assert {path.name for path in folder.iterdir()} <= {"step-1", "step-2", "step-3"}


def test_room_for_all_checkpoints_is_asked_for_before_training(
    trained: TrainState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(tensor.nbytes for tensor in itertools.chain(trained.model_tensors().values(), trained.pair.theta_q))
    monkeypatch.setattr(files, "free_bytes", lambda path: 3 * size)
    checkpoint.check_room(trained, tmp_path)
    monkeypatch.setattr(files, "free_bytes", lambda path: 3 * size - 1)
    with pytest.raises(StorageError, match=f"room for {3 * size - 1:,} bytes.*need {3 * size:,}"):
        checkpoint.check_room(trained, tmp_path)
    save_checkpoint(trained, tmp_path, FACTS)
    checkpoint.check_room(trained, tmp_path)  # what an earlier checkpoint takes will be free again
