"""Several processes train one run: the same numbers as one process, the same end for all of them."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mocokit.contrast.encoders import Backbone, Encoder, EncoderConfig, EncoderPair, build_encoder
from mocokit.contrast.key_queue import NO_ID, KeyQueue
from mocokit.contrast.losses import Contrast
from mocokit.contrast.steps import ContrastConfig, ViewPair, step_of
from mocokit.data import loader as loader_module
from mocokit.data.loader import BatchPlan
from mocokit.data.sources import open_source
from mocokit.errors import DivergedError, RanksApartError, UsageError
from mocokit.training import distributed, loop
from mocokit.training.checkpoint import find_checkpoint, load_checkpoint, read_tensors, save_checkpoint
from mocokit.training.distributed import Ranks, open_ranks
from mocokit.training.launch import Launch, read_launch
from mocokit.training.loop import Schedule, StopRequest, bn_shuffle, run_training
from mocokit.training.optim import OptimConfig, build_optimizer
from mocokit.training.runfolder import RunFolder, foreign_files
from mocokit.training.runlog import Progress, RunLog, read_losses
from mocokit.training.state import TrainState
from tests.crash import harness
from tests.ranks import cli, cli_of_each, environment, finish, free_port, leave, said, start, together
from tests.toy import OPTIONS, flags, npz

N, S, D, STEPS = 16, 100, 8, 50
METHODS: dict[str, ContrastConfig] = {
    "paper": ContrastConfig(K=37, m=0.9, T=0.2),
    "ema-first": ContrastConfig(K=37, m=0.9, T=0.2, order="ema-first", mask_group=True),
    "symmetric": ContrastConfig(K=80, m=0.9, T=0.2, symmetric=True),
    "moco-v3": ContrastConfig(method="moco-v3", m=0.9, m_end=1.0, T=0.2),
    "simclr": ContrastConfig(method="simclr", T=0.2),
    "byol": ContrastConfig(method="byol", m=0.9, m_end=1.0),
}
QUEUED = ("paper", "ema-first", "symmetric")


def optim_of(name: str) -> OptimConfig:
    """SimCLR and BYOL at a higher rate let the last bits grow above 1e-5 within fifty steps, as any chaos does."""
    return OptimConfig(lr=0.1 if name in QUEUED else 0.02, warmup_epochs=0.5)


# ------------------------------------------------------------------------------ a network without batch norm, in a loop


def plain_state(name: str) -> TrainState:
    """A small network of convolutions and linear layers; a predictor where the method has one."""
    config = METHODS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU())
        head = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, D))
        predictor = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, D))
    encoder = Encoder(Backbone(body, spatial=True), head, 12, D)
    asymmetric = config.method in ("moco-v3", "byol")
    pair = EncoderPair(encoder, predictor if asymmetric else None, momentum=config.has_momentum)
    queue = KeyQueue(config.K, D) if config.has_queue else None
    return TrainState(pair, queue, build_optimizer(optim_of(name), pair.trained))


@dataclass
class Pictures:
    x_q: Tensor
    x_k: Tensor
    ids: Tensor
    groups: Tensor


def pictures_of(plan: BatchPlan, start: int, stop: int) -> Iterator[Pictures]:
    """This rank's pictures of each step: noise that depends on image, view and epoch alone."""
    for step in range(start, stop):
        ids = plan.ids[plan.rows(step)]
        views = []
        for view in (0, 1):
            made = [
                np.random.default_rng([int(i), view, step // plan.steps_per_epoch]).normal(size=(3, 8, 8)) for i in ids
            ]
            views.append(torch.tensor(np.stack(made), dtype=torch.float32) + torch.tensor(ids % 7)[:, None, None, None])
        yield Pictures(*views, torch.tensor(ids), torch.tensor(ids % 9))


def plain_run(
    name: str,
    folder: Path,
    ranks: Ranks,
    accumulate: int = 1,
    *,
    until: int = STEPS,
    state: TrainState | None = None,
    spoil: Any = None,
) -> TrainState:
    """Train to step `until` of STEPS; rank 0 logs into `folder` and saves a checkpoint there at the end."""
    config, state = METHODS[name], state or plain_state(name)
    plan = BatchPlan(np.arange(S, dtype=np.int64), N, 0, rank=ranks.rank, ranks=ranks.size)
    run = RunFolder(folder)
    (folder / "checkpoints").mkdir(exist_ok=True, parents=True)
    log = RunLog(run) if ranks.first else None

    class Enough(Exception):  # noqa: N818
        pass

    def batches(start: int, stop: int) -> Iterator[Pictures]:
        for step, batch in enumerate(pictures_of(plan, start, min(stop, until)), start):
            if spoil is not None:
                spoil(state, step, batch, ranks)
            yield batch
        if stop > until:
            raise Enough

    try:
        run_training(
            state,
            batches,
            contrast=config,
            optim=optim_of(name),
            schedule=Schedule(plan.steps_per_epoch, STEPS, checkpoint_every=1000, eval_every=1000),
            accumulate=accumulate,
            ranks=ranks,
            log=log,
            progress=Progress(silent=True),
            save=lambda s: None,
            on_eval=None,
            name_of=lambda ids: ", ".join(f"picture {i}" for i in ids.tolist()),
            stop=StopRequest(),
        )
    except Enough:
        pass
    finally:
        if log is not None:
            log.close()
    if ranks.first:
        save_checkpoint(state, folder / "checkpoints", {})
    return state


def of(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a `plain_run` and the tensors of its checkpoint."""
    losses = [line["loss"] for line in read_losses(RunFolder(folder))]
    return losses, read_tensors(find_checkpoint(folder / "checkpoints").path / "model.safetensors")


def train_all(folder: str, accumulate: int) -> None:
    """Every method, one after the other, on these ranks."""
    torch.set_num_threads(1)
    with open_ranks(60) as ranks:
        prints = [plain_run(name, Path(folder) / name, ranks, accumulate).fingerprint() for name in METHODS]
        leave(folder, ranks.rank, prints)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    for name in METHODS:
        plain_run(name, folder / name, Ranks())
    return folder


def assert_same_numbers(folder: Path, one: Path, name: str) -> None:
    (losses, tensors), (want_losses, want) = of(folder / name), of(one / name)
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    assert set(tensors) == set(want)
    for key, tensor in tensors.items():
        if tensor.dtype == torch.int64:  # ids, groups and births, in their order
            assert torch.equal(tensor, want[key]), key
        else:
            np.testing.assert_allclose(tensor, want[key], rtol=1e-3, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_accumulation_changes_no_number(tmp_path: Path, one_process: Path, name: str, accumulate: int) -> None:
    """Fifty steps: queue, key encoder and losses; a second EMA or enqueue in a step would show in all of them."""
    plain_run(name, tmp_path / name, Ranks(), accumulate)
    assert_same_numbers(tmp_path, one_process, name)
    if name in QUEUED:
        births = of(tmp_path / name)[1]["queue.births"]
        keys = N * (2 if name == "symmetric" else 1)
        assert (torch.bincount(births)[births.min() + 1 :] == keys).all()


@pytest.mark.parametrize(
    ("size", "accumulate"),
    [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_ranks_change_no_number(tmp_path: Path, one_process: Path, size: int, accumulate: int) -> None:
    """The same fifty steps on several processes, and what they hold is the same on all, to the bit."""
    prints = together(train_all, [accumulate], size, tmp_path / "ranks")
    assert all(mine == prints[0] for mine in prints)
    for name in METHODS:
        assert_same_numbers(tmp_path / "ranks", one_process, name)


def gradients(folder: str | Path, ranks: Ranks) -> dict[str, dict[str, list[float]]]:
    """Every method's gradient of its first step, by parameter."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in METHODS:
        state, mine = plain_state(name), found.setdefault(name, {})

        def keep(state: TrainState = state, mine: dict[str, list[float]] = mine) -> None:
            trained = state.pair.trained.items()
            mine |= {key: p.grad.flatten().tolist() for key, p in trained if p.grad is not None}

        state.optimizer.step = keep  # type: ignore[assignment, method-assign]
        plain_run(name, Path(folder) / name, ranks, until=1, state=state)
        assert mine.keys() == state.pair.trained.keys()
    return found


def leave_gradients(folder: str) -> None:
    torch.set_num_threads(1)
    with open_ranks(60) as ranks:
        leave(folder, ranks.rank, gradients(folder, ranks))


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """Also where negatives of other ranks carry gradient (SimCLR): it finds its way back to whose they are."""
    ranks, alone = together(leave_gradients, [], 2, tmp_path / "ranks"), gradients(tmp_path / "alone", Ranks())
    assert ranks[0] == ranks[1]
    for name, want in alone.items():
        assert set(ranks[0][name]) == set(want)
        whole = math.sqrt(sum(value**2 for values in want.values() for value in values))
        for key, values in want.items():
            np.testing.assert_allclose(
                ranks[0][name][key], values, rtol=1e-4, atol=1e-6 * whole, err_msg=f"{name} {key}"
            )


# ------------------------------------------------------------------------------------------ another number of processes


def half_way(folder: str, until: int) -> None:
    torch.set_num_threads(1)
    with open_ranks(60) as ranks:
        plain_run("paper", Path(folder) / "paper", ranks, until=until)
        leave(folder, ranks.rank, None)


def test_a_run_of_two_ranks_goes_on_alone_in_the_same_order(tmp_path: Path, one_process: Path) -> None:
    together(half_way, [23], 2, tmp_path / "ranks")
    state = plain_state("paper")
    load_checkpoint(state, find_checkpoint(tmp_path / "ranks" / "paper" / "checkpoints"))
    assert state.step == 23
    plain_run("paper", tmp_path / "ranks" / "paper", Ranks(), state=state)
    assert_same_numbers(tmp_path / "ranks", one_process, "paper")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_blocks_in_rank_order_are_the_steps_rows(ranks: int) -> None:
    ids = np.random.default_rng(0).integers(0, 2**62, 83)
    whole = BatchPlan(ids, 16, 5)
    shares = [BatchPlan(ids, 16, 5, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step in range(12):
        assert np.array_equal(np.concatenate([share.rows(step) for share in shares]), whole.rows(step))
    assert {share.steps_per_epoch for share in shares} == {5}


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="batch of 10 can't be split evenly over 4 ranks"):
        BatchPlan(np.arange(50), 10, 0, rank=1, ranks=4)


# -------------------------------------------------------------------------------------------------- shuffled batch norm


def signature_state() -> TrainState:
    """h = pixels less their batch's mean, over its deviation: the statistics lie open."""
    encoder = Encoder(Backbone(nn.BatchNorm2d(3), spatial=True), nn.Identity(), 3, 3)
    pair = EncoderPair(encoder)
    pair.train()
    return TrainState(pair, KeyQueue(64, 3), build_optimizer(OptimConfig(), pair.trained))


def shared_statistics(folder: str, n: int, groups: int, shuffle_bn: bool) -> None:
    """How many of this rank's queries are the same vector as their key, although the pixels are the same."""
    torch.set_num_threads(1)
    with open_ranks(60) as ranks:
        state = signature_state()
        state.pair.query.normalise_in_groups_(groups)
        state.pair.key.normalise_in_groups_(groups)
        everything = torch.rand(n * ranks.size, 3, 1, 1, generator=torch.Generator().manual_seed(3)).expand(-1, 3, 2, 2)
        x = everything[ranks.rank * n : (ranks.rank + 1) * n].contiguous()
        ids = torch.arange(ranks.rank * n, (ranks.rank + 1) * n)
        config = ContrastConfig(K=64, bn_groups=groups, shuffle_bn=shuffle_bn)
        part = ViewPair(x, x, ids, torch.full((n,), NO_ID), bn_shuffle(config, state, ranks)(ids))
        queries: list[Tensor] = []
        state.pair.query.register_forward_hook(lambda _, __, z: queries.append(F.normalize(z.detach(), dim=1)))

        def look(losses: Iterable[Contrast]) -> None:
            assert len(list(losses)) == 1

        step_of(config)(
            state.pair,
            state.queue,
            [part],
            scoring=config.scoring(),
            m=1.0,
            step=0,
            update_query_=look,
            gather=ranks.gather,
        )
        assert state.queue is not None
        assert state.queue.ids[: n * ranks.size].tolist() == list(range(n * ranks.size))
        own = state.queue.vectors[ranks.rank * n : (ranks.rank + 1) * n]
        leave(folder, ranks.rank, int(((queries[0] - own).abs().amax(1) < 1e-5).sum()))


@pytest.mark.parametrize(("n", "groups"), [(8, 1), (8, 2)])
def test_no_query_shares_statistics_with_its_key_over_ranks(tmp_path: Path, n: int, groups: int) -> None:
    assert together(shared_statistics, [n, groups, True], 2, tmp_path / "on") == [0, 0]
    assert together(shared_statistics, [n, groups, False], 2, tmp_path / "off") == [n, n]


def test_a_batch_norm_that_spans_ranks_is_refused_with_the_shuffle() -> None:
    state = signature_state()
    state.pair.key.backbone = Backbone(nn.SyncBatchNorm(3), spatial=True)
    two = Ranks(Launch(0, 2, 0, 2))
    with pytest.raises(UsageError, match=r"SyncBatchNorm.*--no-shuffle-bn"):
        bn_shuffle(ContrastConfig(), state, two)
    assert bn_shuffle(ContrastConfig(shuffle_bn=False), state, two)(torch.arange(4)) is None
    assert bn_shuffle(ContrastConfig(method="simclr"), state, two)(torch.arange(4)) is None
    assert bn_shuffle(ContrastConfig(), plain_state("paper"), two)(torch.arange(4)) is None


def exchange(folder: str, n: int, seeds: int) -> None:
    """Any permutation: what is seen here is what it says, what comes back is in the first order; keys are gathered."""
    torch.set_num_threads(1)
    with open_ranks(60) as ranks:
        for seed in range(seeds):
            order = torch.randperm(n * ranks.size, generator=torch.Generator().manual_seed(seed))
            shuffle = ranks.shuffle_by(order)
            own = torch.arange(ranks.rank * n, (ranks.rank + 1) * n)
            x = own[:, None].float() + torch.tensor([0.0, 0.5])
            seen = shuffle.there(x)
            assert torch.equal(seen[:, 0].long(), order[own])
            assert torch.equal(shuffle.back(seen * 2), x * 2)
        assert ranks.tell_all({"rank": ranks.rank, "text": "ä" * ranks.rank}) == [
            {"rank": rank, "text": "ä" * rank} for rank in range(ranks.size)
        ]
        mine = [torch.full((3, 5), float(ranks.rank)), torch.full((7,), 2.0 * ranks.rank)]
        mine[0] = mine[0].t().contiguous().t()  # another memory layout
        ranks.average_(mine)
        middle = (ranks.size - 1) / 2
        assert torch.equal(mine[0], torch.full((3, 5), middle))
        assert torch.equal(mine[1], torch.full((7,), 2 * middle))
        assert ranks.means([float(ranks.rank), 3.0]) == [middle, 3.0]
        assert math.isnan(ranks.means([math.nan if ranks.rank == 1 else 1.0])[0])
        assert ranks.highest(15 if ranks.rank == 1 else 0) == 15
        leave(folder, ranks.rank, "done")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_ranks_exchange(tmp_path: Path, size: int) -> None:
    assert together(exchange, [6, 10], size, tmp_path / "out") == ["done"] * size


# --------------------------------------------------------------------------------------- ends that all ranks come to


def spoil_ranks(folder: str, what: str) -> None:
    torch.set_num_threads(1)
    loop.SAME_EVERY = 10

    def spoil(state: TrainState, step: int, batch: Pictures, ranks: Ranks) -> None:
        if ranks.rank != 1 or step != 5:
            return
        if what == "image":
            batch.x_q[3, 0, 2, 2] = math.nan
        elif what == "weight":
            with torch.no_grad():
                state.pair.theta_q[-1][0] += 1e-6

    with open_ranks(60) as ranks:
        state = plain_state("paper")
        before: dict[str, str] = {}

        def watched(state: TrainState, step: int, batch: Pictures, ranks: Ranks) -> None:
            if step == 5:
                before["is"] = state.fingerprint()
            spoil(state, step, batch, ranks)

        try:
            plain_run("paper", Path(folder) / "run", ranks, state=state, spoil=watched)
            end = "finished"
        except (DivergedError, RanksApartError) as error:
            end = f"{type(error).__name__}: {error}"
        leave(folder, ranks.rank, [end, state.step, state.fingerprint() == before["is"]])


def test_what_is_not_finite_on_one_rank_stops_all_before_the_update(tmp_path: Path) -> None:
    ends = together(spoil_ranks, ["image"], 2, tmp_path / "out")
    plan = BatchPlan(np.arange(S, dtype=np.int64), N, 0, rank=1, ranks=2)
    culprits = ", ".join(f"picture {i}" for i in plan.ids[plan.rows(5)])
    for end, step, unchanged in ends:
        assert end.startswith("DivergedError")
        assert "not finite at step 5 (loss nan" in end
        assert culprits in end
        assert step == 5
        assert unchanged


def test_ranks_that_drifted_apart_are_found(tmp_path: Path) -> None:
    ends = together(spoil_ranks, ["weight"], 2, tmp_path / "out")
    for end, step, _ in ends:
        assert end.startswith("RanksApartError: Weights or queue of rank 1 are not those of rank 0 (step ")
        assert step == 10


def pretrain(folder: Path, *more: str, **changes: Any) -> list[str]:
    """Words for 48 steps with a checkpoint every 6."""
    data = folder / "toy.npz"
    if not data.exists():
        npz(data)
    return ["pretrain", str(data), "--out", str(folder / "run"), *flags(epochs=8, checkpoint_every=6, **changes), *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run of two ranks that was never stopped leaves."""
    folder = tmp_path_factory.mktemp("whole")
    assert finish(start(cli, [pretrain(folder)], 2, folder)) == [0, 0], said(folder, 2)
    assert foreign_files(folder / "run") == []
    first, second = said(folder, 2)
    assert "2 ranks, 4 images of each step on every one." in first
    assert second == ""
    return harness.fingerprint(folder / "run")


def wait_for_steps(folder: Path, count: int, processes: list[ForkServerProcess]) -> None:
    log = folder / "run" / "loss.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") >= count):
        assert all(process.is_alive() for process in processes), said(folder, len(processes))
        assert time.monotonic() < deadline
        time.sleep(0.002)


def killed(folder: Path, victim: int, at: int) -> None:
    """Kill one of two ranks after step `at`; everybody must have gone within 10 s, and fail."""
    processes = start(cli, [pretrain(folder, *(["--resume"] if (folder / "run").exists() else []))], 2, folder)
    wait_for_steps(folder, at, processes)
    os.kill(processes[victim].pid or 0, signal.SIGKILL)
    began = time.monotonic()
    codes = finish(processes, 10)
    assert time.monotonic() - began < 10
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1, (codes, said(folder, 2))
    text = said(folder, 2)[1 - victim]
    assert f"Rank {1 - victim} of 2 lost the others (step " in text
    assert "Traceback" not in text


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_when_a_rank_is_killed_the_other_leaves_and_the_run_resumes_exactly(
    tmp_path: Path, whole: dict[str, str], victim: int
) -> None:
    killed(tmp_path, victim, 15)
    assert harness.torn_checkpoints(tmp_path / "run") == []
    assert finish(start(cli, [pretrain(tmp_path, "--resume")], 2, tmp_path)) == [0, 0], said(tmp_path, 2)
    assert harness.fingerprint(tmp_path / "run") == whole


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    tmp_path: Path, whole: dict[str, str], number: signal.Signals, code: int
) -> None:
    processes = start(cli, [pretrain(tmp_path)], 2, tmp_path)
    wait_for_steps(tmp_path, 8, processes)
    os.kill(processes[1].pid or 0, number)
    assert finish(processes) == [code, code], said(tmp_path, 2)
    first, second = said(tmp_path, 2)
    done = (tmp_path / "run" / "loss.jsonl").read_bytes().count(b"\n")
    assert f"Stopped by {number.name} after step {done} of 48" in first
    assert second == ""
    assert (tmp_path / "run" / "checkpoints" / f"step-{done}").is_dir()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("interrupted", done)
    assert finish(start(cli, [pretrain(tmp_path, "--resume")], 2, tmp_path)) == [0, 0], said(tmp_path, 2)
    assert harness.fingerprint(tmp_path / "run") == whole


@pytest.mark.slow
def test_one_process_takes_over_says_so_and_keeps_the_order(tmp_path: Path, whole: dict[str, str]) -> None:
    processes = start(cli, [pretrain(tmp_path)], 2, tmp_path)
    wait_for_steps(tmp_path, 8, processes)
    os.kill(processes[0].pid or 0, signal.SIGTERM)
    finish(processes)
    assert finish(start(cli, [pretrain(tmp_path, "--resume")], 1, tmp_path)) == [0], said(tmp_path, 1)
    assert "written by 2 rank(s), now there are 1: images and their order stay" in said(tmp_path, 1)[0]
    alone = tmp_path / "alone"
    alone.mkdir()
    assert finish(start(cli, [pretrain(alone)], 1, alone)) == [0], said(alone, 1)
    mixed, plain = (
        read_tensors(find_checkpoint(folder / "run" / "checkpoints").path / "model.safetensors")
        for folder in (tmp_path, alone)
    )
    for name in ("queue.ids", "queue.births"):
        assert torch.equal(mixed[name], plain[name])


def with_a_bad_picture(words: list[str], target: int) -> None:
    """The command line where one picture's view of the second epoch has a number that is not finite."""
    original = loader_module.make_views

    def make_views(config: Any, pixels: Any, extents: Any, ids: Any, *, epoch: int, **rest: Any) -> Any:
        made = original(config, pixels, extents, ids, epoch=epoch, **rest)
        if epoch == 1 and target in ids.tolist():
            made[0][ids.tolist().index(target), 0, 3, 3] = math.nan
        return made

    loader_module.make_views = make_views  # type: ignore[assignment]
    cli(words)


@pytest.mark.slow
def test_what_was_in_the_step_of_every_rank_is_captured_and_replayed(tmp_path: Path) -> None:
    """The bad picture is rank 1's; rank 0 writes down both batches, and one process finds it again."""
    words = pretrain(tmp_path)
    index = open_source(words[1]).index
    shares = [BatchPlan(index.ids, 8, 0, rank=rank, ranks=2).rows(9) for rank in range(2)]
    target = int(index.ids[shares[1][2]])
    assert finish(start(with_a_bad_picture, [words, target], 2, tmp_path)) == [4, 4], said(tmp_path, 2)
    first, second = said(tmp_path, 2)
    run = tmp_path / "run"
    assert "not finite at step 9" in first
    assert f"`mocokit replay {run}`" in first
    assert second == ""
    facts = json.loads((run / "failure" / "failure.json").read_text())
    assert (facts["step"], facts["checkpoint"], facts["ranks"]) == (9, 6, 2)
    for rank, rows in enumerate(shares):
        assert [one["id"] for one in facts["images"] if one["rank"] == rank] == index.ids[rows].tolist()
    assert [views["x_q"]["not_finite"] for views in facts["views"]] == [0, 1]
    assert foreign_files(run) == []
    replay = ["replay", str(run), "--json", "-q"]
    assert finish(start(with_a_bad_picture, [replay, target], 1, tmp_path)) == [0], said(tmp_path, 1)
    found = json.loads(said(tmp_path, 1)[0])
    assert (found["step"], found["ranks"], found["reproduced"]) == (9, 2, True)
    assert (found["finding"]["stage"], found["finding"]["where"]) == ("view", "x_q")
    assert found["images"] == [index.names[shares[1][2]]]


@pytest.mark.slow
def test_two_ranks_start_from_weights_that_one_of_them_reads_first(tmp_path: Path, whole: dict[str, str]) -> None:
    """A pickle is turned into safetensors once; both begin with the same weights, not those of the seed."""
    words = pretrain(tmp_path)
    encoder = build_encoder(EncoderConfig(backbone=OPTIONS["backbone"], dim=OPTIONS["dim"]), image_size=16, seed=7)
    torch.save(encoder.backbone.state_dict(), tmp_path / "weights.pt")
    words += ["--init", str(tmp_path / "weights.pt")]
    assert finish(start(cli, [words], 2, tmp_path)) == [0, 0], said(tmp_path, 2)
    first, second = said(tmp_path, 2)
    assert f"Starting from {tmp_path / 'weights.pt'}" in first
    assert second == ""
    assert harness.fingerprint(tmp_path / "run") != whole


# ------------------------------------------------------------------------------------------------- errors before a step


def test_an_error_of_one_rank_is_told_once_and_ends_all(tmp_path: Path) -> None:
    words = pretrain(tmp_path)
    missing = ["pretrain", str(tmp_path / "nowhere"), *words[2:]]
    codes = finish(start(cli_of_each, [[words, missing]], 2, tmp_path))
    first, second = said(tmp_path, 2)
    assert codes == [2, 2], (first, second)
    assert "error:" not in first
    assert second.count("error:") == 1
    assert "nowhere" in second
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["message"].startswith("rank 1: ")


def test_a_usage_error_of_all_ranks_is_told_by_the_first(tmp_path: Path) -> None:
    codes = finish(start(cli, [pretrain(tmp_path, batch_size=7)], 2, tmp_path))
    first, second = said(tmp_path, 2)
    assert codes == [2, 2], (first, second)
    assert "A batch of 7 can't be dealt out to 2 ranks" in first
    assert "multiple of 2" in first
    assert second == ""


def test_other_images_on_another_rank_are_found(tmp_path: Path) -> None:
    words = pretrain(tmp_path)
    other = ["pretrain", str(npz(tmp_path / "other.npz", 60)), *words[2:]]
    codes = finish(start(cli_of_each, [[words, other]], 2, tmp_path))
    assert codes == [1, 1], said(tmp_path, 2)
    assert "The images or settings of rank 1 are not those of rank 0" in said(tmp_path, 2)[0]
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_groups_of_batch_norm_must_divide_a_ranks_images(tmp_path: Path) -> None:
    words = pretrain(tmp_path, bn_groups=3)
    assert finish(start(cli, [words], 2, tmp_path)) == [2, 2]
    assert "`bn_groups: 3` must divide the 4 images that a rank has at once" in said(tmp_path, 2)[0].replace("\n", " ")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"RANK": "x"}, "whole numbers"),
        ({"RANK": "2"}, "Rank 2 of 2"),
        ({"LOCAL_RANK": "2"}, "on this machine 2 of 2"),
    ],
)
def test_variables_that_make_no_sense_are_refused(changes: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_launch(environment(1, 2, 1) | changes)


def test_variables_are_read() -> None:
    assert read_launch({}) == read_launch({"WORLD_SIZE": "1", "RANK": "0"}) == Launch(0, 1, 0, 1)
    assert read_launch(environment(1, 2, 1)) == Launch(1, 2, 1, 2, "127.0.0.1:1")


def only_the_first(words: list[str]) -> None:
    """The command line as rank 0, which tells that it waits after a second; rank 1 never comes."""
    if os.environ["RANK"] == "0":
        distributed.WORTH_TELLING = 1.0
        cli(words)


def test_a_rank_whose_companion_never_comes_says_whom_it_waits_for_and_ends(tmp_path: Path) -> None:
    processes = start(only_the_first, [pretrain(tmp_path, "--rank-timeout", "3")], 2, tmp_path)
    assert finish(processes, 30) == [1, 0], said(tmp_path, 2)
    text = said(tmp_path, 2)[0].replace("\n", " ")
    assert "Rank 0 of 2 is waiting for the others at 127.0.0.1:" in text
    assert "did not meet the others at 127.0.0.1:" in text
    assert "Start all 2 ranks together" in text
    assert "Traceback" not in text
    assert finish(start(cli, [pretrain(tmp_path)], 2, tmp_path)) == [0, 0], said(tmp_path, 2)  # nothing is in its way


# ------------------------------------------------------------------------------------------------------------ torchrun


def torchrun(words: list[str], folder: Path, size: int = 2) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += ["--master-port", str(free_port()), "-m", "mocokit", *words]
    with (folder / "said").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


@pytest.mark.slow
def test_torchrun_trains_and_ends_in_order(tmp_path: Path, whole: dict[str, str]) -> None:
    process = torchrun(pretrain(tmp_path), tmp_path)
    assert process.wait(120) == 0, (tmp_path / "said").read_text()
    assert harness.fingerprint(tmp_path / "run") == whole


def workers_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def kill_one(process: subprocess.Popen[bytes], folder: Path, rng: random.Random) -> float | None:
    """Kill a random rank up to a second after the log has changed; seconds until all have gone. None: too late."""
    log = folder / "run" / "loss.jsonl"
    before = log.read_bytes() if log.exists() else b""
    deadline = time.monotonic() + 120
    while process.poll() is None and (not log.exists() or log.read_bytes() == before):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(rng.random())
    workers = workers_of(process.pid) if process.poll() is None else []
    status = json.loads((folder / "run" / "status.json").read_text())
    if len(workers) < 2 or status["state"] != "running":
        assert process.wait(60) == 0, (folder / "said").read_text()
        return None
    os.kill(rng.choice(workers), signal.SIGKILL)
    began = time.monotonic()
    while any(alive(pid) for pid in workers):
        assert time.monotonic() - began < 10, (folder / "said").read_text()
        time.sleep(0.01)
    code = process.wait(10)
    took = time.monotonic() - began
    assert code != 0, (folder / "said").read_text()
    return took


@pytest.mark.nightly
def test_twenty_kills_under_torchrun(tmp_path: Path, whole: dict[str, str]) -> None:
    """A random rank at a random moment: everybody gone within 10 s, exit code not zero, resume exact."""
    rng = random.Random(0)
    ends: list[float] = []
    while len(ends) < 20:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        while len(ends) < 20:
            begun = (folder / "run" / "config.yaml").exists()
            process = torchrun(pretrain(folder, *(["--resume"] if begun else [])), folder)
            if (took := kill_one(process, folder, rng)) is None:
                break
            assert harness.torn_checkpoints(folder / "run") == []
            ends.append(took)
        done = torchrun(pretrain(folder, "--resume"), folder)
        assert done.wait(120) == 0, (folder / "said").read_text()
        assert harness.fingerprint(folder / "run") == whole
    print(f"{len(ends)} kills, {len(list(tmp_path.iterdir()))} runs, slowest end {max(ends):.2f} s")


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_within_the_limit(tmp_path: Path) -> None:
    processes = start(cli, [pretrain(tmp_path, "--rank-timeout", "3")], 2, tmp_path)
    wait_for_steps(tmp_path, 8, processes)
    os.kill(processes[1].pid or 0, signal.SIGSTOP)
    began = time.monotonic()
    processes[0].join(20)
    took = time.monotonic() - began
    os.kill(processes[1].pid or 0, signal.SIGKILL)
    assert finish(processes, 10)[0] == 1, said(tmp_path, 2)
    assert took < 13
    assert "did not answer for 3 s" in said(tmp_path, 2)[0].replace("\n", " ")
