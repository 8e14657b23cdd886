"""A run that diverges leaves what is needed to come to the same step again, and replay says where it begins."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mocokit
from mocokit import files
from mocokit.cli import main
from mocokit.data import loader as loader_module
from mocokit.errors import DivergedError, UsageError
from mocokit.training.diagnosis import Watch
from mocokit.training.failure import as_json, statistics
from mocokit.training.runfolder import foreign_files
from mocokit.training.state import TrainState
from tests.test_checkpoint import fresh
from tests.test_checkpoint import train as train_steps
from tests.toy import OPTIONS, contents, npz

Poison = Callable[[pytest.MonkeyPatch], None]


def bad_view(which: str, row: int, value: float) -> Poison:
    """From now on a picture of the batch of step 6 has a number that is not finite."""

    def poison(monkeypatch: pytest.MonkeyPatch) -> None:
        original = loader_module.make_views

        def make_views(config: Any, pixels: Any, extents: Any, ids: Any, *, epoch: int, **rest: Any) -> Any:
            made = original(config, pixels, extents, ids, epoch=epoch, **rest)
            if epoch == 1 and len(ids) == 8 and TARGET in ids.tolist():
                made[("x_q", "x_k").index(which)][ids.tolist().index(TARGET), 0, 3, 3] = value
            return made

        monkeypatch.setattr(loader_module, "make_views", make_views)

    return poison


TARGET = -1


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return npz(tmp_path / "toy.npz")


def diverge(data: Path, out: Path, **changes: Any) -> str:
    with pytest.raises(DivergedError) as caught:
        mocokit.pretrain(data, out, quiet=True, **(OPTIONS | changes))
    return str(caught.value)


def target_of(data: Path, step: int) -> tuple[int, str]:
    """The id and name of an image in the batch of a step."""
    from mocokit.data.loader import BatchPlan
    from mocokit.data.sources import open_source

    index = open_source(str(data)).index
    row = int(BatchPlan(index.ids, 8, 0).rows(step)[3])
    return int(index.ids[row]), index.names[row]


@pytest.mark.parametrize("which", ["x_q", "x_k"])
@pytest.mark.parametrize("order", ["paper", "ema-first"])
def test_a_bad_picture_is_captured_and_found_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, order: str
) -> None:
    global TARGET
    step = 9  # in the second epoch; the checkpoint before it is of step 8
    TARGET, name = target_of(data, step)
    bad_view(which, 3, math.nan)(monkeypatch)
    out = tmp_path / "run"
    message = diverge(data, out, order=order)
    assert f"`mocokit replay {out}`" in message
    assert json.loads((out / "status.json").read_text())["message"] == message
    facts = json.loads((out / "failure" / "failure.json").read_text())
    assert (facts["step"], facts["checkpoint"], facts["seed"]) == (step, 8, 0)
    assert {"id": TARGET, "name": name, "rank": 0} in facts["images"]
    assert len(facts["images"]) == 8
    assert facts["views"][0][which]["not_finite"] == 1
    assert facts["loss"] == "nan"
    assert foreign_files(out) == []
    before = contents(out)
    found = mocokit.replay(out, quiet=True)
    assert contents(out) == before
    assert (found.step, found.from_step, found.reproduced) == (step, 8, True)
    assert (found.compared, found.equal) == (1, 1)
    assert found.finding is not None
    assert (found.finding.stage, found.finding.where, found.finding.not_finite) == ("view", which, 1)
    assert found.images == (name,)
    assert f"Images: {name!r}" in found.text()
    assert json.loads(files.to_json(found.to_dict()))["loss"] == "nan"


def test_a_step_before_the_first_checkpoint_is_replayed_from_the_start(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    diverge(data, out, lr=1e38, warmup_epochs=0, schedule="constant", checkpoint_every=50)
    capsys.readouterr()
    assert main(["replay", str(out), "-q"]) == 0
    said = capsys.readouterr().out
    assert "Went from the start to step 1" in said
    assert "1 of 1 equal" in said
    assert "It begins in: h" in said
    assert main(["replay", str(out), "-q", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["from_step"] == 0


def test_what_does_not_happen_again_is_said(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    global TARGET
    TARGET, _ = target_of(data, 9)
    bad_view("x_q", 3, math.inf)(monkeypatch)
    out = tmp_path / "run"
    diverge(data, out)
    monkeypatch.undo()
    capsys.readouterr()
    assert main(["replay", str(out), "-q"]) == 1
    assert "Step 9 is finite this time" in capsys.readouterr().out
    mocokit.pretrain(data, out, resume=True, quiet=True)  # it was the machine: the run goes on
    shutil.rmtree(out / "checkpoints" / "step-8")
    with pytest.raises(UsageError, match="went on after the failure at step 9: its oldest checkpoint is step-12"):
        mocokit.replay(out, quiet=True)


def test_runs_without_a_failure_say_so(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = mocokit.pretrain(data, tmp_path / "run", quiet=True, **(OPTIONS | {"epochs": 1}))
    assert main(["replay", str(run.path)]) == 2
    assert "holds no captured failure" in capsys.readouterr().err
    (run.path / "failure").mkdir()
    (run.path / "failure" / "failure.json").write_text("[]")
    assert main(["replay", str(run.path)]) == 6


# -------------------------------------------------------------------------------------------------- where it begins


def watched(change: Callable[[TrainState], None]) -> Watch:
    """One step of a state that was changed, watched."""
    state = fresh()
    train_steps(state, 2)
    change(state)
    generator = torch.Generator().manual_seed(state.step)
    x_q, x_k = torch.randn(2, 6, 3, 8, 8, generator=generator)
    ids = torch.arange(6) + 6 * (state.step % 4)

    class Pictures:
        pass

    batch: Any = Pictures()
    batch.x_q, batch.x_k, batch.ids, batch.groups = x_q, x_k, ids, ids
    watch = Watch(state, batch)
    with watch:
        try:
            train_steps(state, 1)
        except DivergedError as error:
            watch.conclude(error)
    return watch


def poke(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] = value


def spoil_gradient(state: TrainState) -> None:
    def hook(gradient: Tensor) -> Tensor:
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = math.inf
        return spoiled

    state.pair.trained["head.0.weight"].register_hook(hook)


def overflow_in_the_middle(state: TrainState) -> None:
    with torch.no_grad():
        for parameter in state.pair.query.backbone.parameters():
            parameter.mul_(1e30)


def hot_head(state: TrainState) -> None:
    state.pair.query.head[-1].register_forward_hook(lambda _, __, out: out * math.inf)


@pytest.mark.parametrize(
    ("change", "stage", "where"),
    [
        (lambda s: poke(s.pair.theta_q[0], math.nan), "weight", "query."),
        (lambda s: poke(s.pair.theta_k[-1], math.inf), "weight", "key."),
        (lambda s: poke(s.queue.vectors, math.nan), "weight", "queue.vectors"),
        (overflow_in_the_middle, "h", "query.backbone"),
        (hot_head, "z", "query.head"),
        (spoil_gradient, "gradient", "head.0.weight"),
    ],
    ids=["query weight", "key weight", "queue", "h", "z", "gradient"],
)
def test_the_first_tensor_is_named(change: Callable[[TrainState], None], stage: str, where: str) -> None:
    finding = watched(change).finding
    assert finding is not None
    assert finding.stage == stage
    assert finding.where.startswith(where)


def test_a_loss_and_a_norm_that_are_made_of_finite_numbers() -> None:
    watch = Watch(fresh(), None)  # type: ignore[arg-type]
    watch.conclude(DivergedError("", loss=math.nan, gradient_norm=math.nan))
    assert watch.finding is not None
    assert watch.finding.stage == "loss"
    watch = Watch(fresh(), None)  # type: ignore[arg-type]
    watch.conclude(DivergedError("", loss=1.0, gradient_norm=math.inf))
    assert watch.finding is not None
    assert watch.finding.stage == "gradient norm"


def test_watching_changes_nothing_and_leaves_no_hook() -> None:
    one, other = fresh(), fresh()
    train_steps(one, 3)
    train_steps(other, 2)

    class Pictures:
        x_q = x_k = torch.zeros(6, 3, 8, 8)
        ids = groups = torch.arange(6)

    watch = Watch(other, Pictures())  # type: ignore[arg-type]
    with watch:
        train_steps(other, 1)
    assert watch.finding is None
    for name, tensor in one.model_tensors().items():
        assert torch.equal(tensor, other.model_tensors()[name]), name
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in other.pair.query.modules())


def test_statistics_are_of_the_finite_numbers() -> None:
    found = statistics(torch.tensor([[1.0, math.nan], [-3.0, math.inf]]))
    assert found == {"count": 4, "not_finite": 2, "min": -3.0, "max": 1.0, "mean": -1.0, "norm": math.sqrt(10)}
    assert statistics(torch.tensor([math.nan])) == {"count": 1, "not_finite": 1}
    assert [as_json(v) for v in (1.5, math.nan, -math.inf)] == [1.5, "nan", "-inf"]


def test_a_disk_that_cannot_take_the_capture_hides_no_divergence(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = files.write_json

    def write_json(path: Path, value: Any) -> None:
        if path.name == "failure.json":
            raise mocokit_errors.StorageError("Could not write: No space left on device.")
        original(path, value)

    from mocokit import errors as mocokit_errors

    monkeypatch.setattr(files, "write_json", write_json)
    message = diverge(data, tmp_path / "run", lr=1e38, warmup_epochs=0, schedule="constant")
    assert "not finite at step 1" in message
    assert "could not be written down: Could not write: No space left" in message
