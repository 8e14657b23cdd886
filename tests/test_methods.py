"""Whole runs of every method: what they leave behind, that they resume exactly, and what the tracker and probe see."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from torch import nn

import mocokit
from mocokit.data.loader import Batch, BatchLoader
from mocokit.errors import UsageError
from mocokit.training.run import Run
from mocokit.training.runfolder import claim_run, foreign_files
from mocokit.training.runlog import read_health, read_losses, read_metrics
from tests.toy import OPTIONS, STEPS, npz

METHODS: dict[str, dict[str, Any]] = {
    "moco": {"contrast": {"K": 20}},
    "moco-symmetric-groups": {"contrast": {"K": 20, "symmetric": True, "bn_groups": 2}},
    "moco-v3": {"contrast": {"method": "moco-v3", "m_end": 1.0}, "encoder": {"predictor": "mlp-bn-all"}},
    "simclr": {"recipe": "simclr-small"},
    "byol": {"recipe": "byol-small"},
}
COMMON = {name: value for name, value in OPTIONS.items() if name != "queue_size"}


class StoppedError(Exception):
    """What a batch raises in place of a power cut."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npz(tmp_path_factory.mktemp("data") / "toy.npz")


def start(method: str, data: Path, out: Path, **changes: Any) -> Run:
    settings = out.with_name(f"{out.name}.yaml")
    settings.write_text(yaml.safe_dump(METHODS[method]))
    return mocokit.pretrain(data, out, config_file=settings, quiet=True, **(COMMON | changes))


@pytest.fixture(scope="module", params=list(METHODS))
def trained(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    return request.param, start(request.param, data, tmp_path_factory.mktemp(request.param) / "run")


def stored_names(run: Run) -> set[str]:
    """The first parts of the names of the tensors in a run's checkpoint."""
    with safe_open(run.found.path / "model.safetensors", "pt") as stored:
        return {name.partition(".")[0] for name in stored.keys()}  # noqa: SIM118 no mapping


def test_a_checkpoint_holds_what_the_method_has(trained: tuple[str, Run]) -> None:
    method, run = trained
    expected = {"query"}
    if method != "simclr":
        expected.add("key")
    if method in ("moco-v3", "byol"):
        expected.add("predictor")
    if method.startswith("moco") and method != "moco-v3":
        expected.add("queue")
    assert stored_names(run) == expected
    with safe_open(run.found.path / "optim.safetensors", "pt") as stored:
        names = list(stored.keys())
    assert any("predictor." in name for name in names) == ("predictor" in expected)
    assert not any("key." in name for name in names)


def test_the_log_says_only_what_the_method_has(trained: tuple[str, Run]) -> None:
    method, run = trained
    losses = read_losses(run.folder)
    assert [line["step"] for line in losses] == list(range(STEPS))
    queued = method in ("moco", "moco-symmetric-groups")
    for line in losses:
        assert (line["fill"] is not None) == (line["masked"] is not None) == queued
        assert (line["m"] is None) == (method == "simclr")
        assert (line["chance"] is None) == (method == "byol")
    N = OPTIONS["batch_size"]
    last = losses[-1]
    if method == "simclr":
        assert last["chance"] == pytest.approx(math.log(2 * N - 1))
    if method == "moco-v3":
        assert last["chance"] == pytest.approx(4 * run.config.contrast.T * math.log(N))
    if method == "byol":
        assert 0 <= last["loss"] <= 8
    if method == "moco-symmetric-groups":
        assert [line["fill"] for line in losses[:2]] == [16, 20]  # both views of 8 images enter the queue


def test_chance_is_what_the_first_loss_of_random_weights_is_near(trained: tuple[str, Run]) -> None:
    """The level named before the run, against what the step itself computed."""
    method, run = trained
    told = run.config.contrast.chance(OPTIONS["batch_size"])
    measured = read_losses(run.folder)[-1]["chance"]
    if method == "byol":
        assert told is measured is None
    elif method.startswith("moco") and method != "moco-v3":
        assert measured <= told == pytest.approx(math.log(21))  # masked rows are not counted in the step's own
    else:
        assert told == pytest.approx(measured)


def test_health_is_measured_and_drawn(trained: tuple[str, Run]) -> None:
    method, run = trained
    rows = read_health(run.folder)
    assert [row["step"] for row in rows] == [1, STEPS]
    assert all(row["probe"] == 50 and 1 <= row["rank_z"] <= row["rank_limit"] for row in rows)
    assert ("staleness" in rows[-1]) == (method in ("moco", "moco-symmetric-groups"))
    if "staleness" in rows[-1]:
        age, cosine = rows[0]["staleness"][0]
        assert (age, cosine) == (0, pytest.approx(1.0, abs=1e-6))  # the same view in the same batch, encoded again
        assert max(age for age, _ in rows[-1]["staleness"]) == int(20 / (16 if "symmetric" in method else 8))
    assert ("theta_distance" in rows[-1]) == (method != "simclr")
    assert [row["epoch"] for row in read_metrics(run.folder)] == [1, 2]


def test_both_readouts_load(trained: tuple[str, Run]) -> None:
    method, run = trained
    query, key = run.encoder("query").state_dict(), run.encoder("key").state_dict()
    assert query.keys() == key.keys()
    same = all(torch.equal(query[name], key[name]) for name in query)
    assert same == (method == "simclr")


@pytest.mark.parametrize(("step", "accumulate"), [(3, 1), (9, 1), (6, 2)])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    trained: tuple[str, Run], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, accumulate: int
) -> None:
    method, run = trained
    if accumulate > 1:
        run = start(method, data, tmp_path / "whole", accumulate=2)
    original = BatchLoader.batches

    def batches(self: BatchLoader, first: int, stop: int) -> Iterator[Batch]:
        for batch in original(self, first, stop):
            if batch.step == step:
                raise StoppedError
            yield batch

    monkeypatch.setattr(BatchLoader, "batches", batches)
    with pytest.raises(StoppedError):
        start(method, data, tmp_path / "run", accumulate=accumulate)
    monkeypatch.undo()
    mocokit.pretrain(data, tmp_path / "run", resume=True, quiet=True)
    for name in ("loss.jsonl", *(f"checkpoints/step-12/{part}" for part in ("model.safetensors", "optim.safetensors"))):
        assert (tmp_path / "run" / name).read_bytes() == (run.path / name).read_bytes()


@pytest.mark.parametrize("method", list(METHODS))
def test_the_head_is_not_the_backbone_and_everything_trains(method: str, data: Path, tmp_path: Path) -> None:
    """Every trained parameter moves, and the key encoder's only by EMA."""
    run = start(method, data, tmp_path / "run", epochs=1)
    before = mocokit.build_encoder(run.config.encoder, image_size=run.config.views.size, seed=run.config.train.seed)
    after = run.encoder()
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(old, new), name
    assert isinstance(after.head, nn.Module)


def test_trackers_get_every_row_and_overwrite_takes_them_away(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard tracker is an optional part")
    run = start("moco", data, tmp_path / "run", track=["tensorboard"])
    written = list((run.path / "trackers" / "tensorboard").iterdir())
    assert len(written) == 1
    assert foreign_files(run.path) == []
    folder, lock = claim_run(run.path, "overwrite")
    with lock:
        folder.clear()
    assert not (run.path / "trackers").exists()


def test_a_tracker_of_no_name_is_refused_before_anything_is_trained(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean 'tensorboard'"):
        start("moco", data, tmp_path / "run", track=["tensorbord"])
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"
