"""The loop: stops before a step that is not finite, saves when told to stop, averages epochs, follows the schedules."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mocokit.contrast.encoders import EncoderConfig, EncoderPair, build_encoder
from mocokit.contrast.key_queue import KeyQueue
from mocokit.contrast.steps import ContrastConfig
from mocokit.errors import DamagedError, DivergedError, InterruptedRunError
from mocokit.training.loop import Schedule, StopRequest, run_training
from mocokit.training.optim import OptimConfig, build_optimizer, lr_at, optimizer_tensors
from mocokit.training.precision import num_threads
from mocokit.training.runfolder import RunFolder, claim_run
from mocokit.training.runlog import Progress, RunLog, duration, read_losses, read_metrics
from mocokit.training.state import TrainState
from tests.crash import harness
from tests.toy import flags, npz, start_cli

N = 6
OPTIM = OptimConfig(lr=0.1, warmup_epochs=0.5)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@dataclass
class Pictures:
    """A batch for the loop."""

    x_q: Tensor
    x_k: Tensor
    ids: Tensor
    groups: Tensor


def picture_batches(start: int, stop: int) -> Iterator[Pictures]:
    for step in range(start, stop):
        generator = torch.Generator().manual_seed(step)
        x_q, x_k = torch.randn(2, N, 3, 8, 8, generator=generator)
        ids = torch.arange(N) + N * (step % 4)
        yield Pictures(x_q, x_k, ids, ids)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run, lock = claim_run(tmp_path / "run", "new")
    lock.release()
    return run


def fresh() -> TrainState:
    encoder = build_encoder(EncoderConfig(backbone="small-cnn-4-6", dim=8), image_size=8, seed=0)
    pair = EncoderPair(encoder)
    return TrainState(pair, KeyQueue(15, 8), build_optimizer(OPTIM, pair.trained))


def train(
    state: TrainState,
    run: RunFolder,
    *,
    batches: Callable[[int, int], Iterator[Pictures]] = picture_batches,
    steps: int = 8,
    order: Any = "paper",
    save: Callable[[TrainState], None] = lambda state: None,
    on_eval: Callable[[TrainState], dict[str, float]] | None = None,
    stop: StopRequest | None = None,
    every: int = 3,
    eval_every: int = 1,
) -> None:
    log = RunLog(run)
    try:
        run_training(
            state,
            batches,
            contrast=ContrastConfig(K=15, m=0.9, m_end=1.0, order=order),
            optim=OPTIM,
            schedule=Schedule(steps_per_epoch=4, total_steps=steps, checkpoint_every=every, eval_every=eval_every),
            log=log,
            progress=Progress(quiet=True),
            save=save,
            on_eval=on_eval,
            name_of=lambda ids: ", ".join(f"picture {i}" for i in ids.tolist()),
            stop=stop or StopRequest(),
        )
    finally:
        log.close()


# ---------------------------------------------------------------------------------------------- not finite


def what_an_update_changes(state: TrainState) -> dict[str, Tensor]:
    """Query parameters, momentum buffers and queue; in the paper's order the key parameters too."""
    found = {name: p.detach().clone() for name, p in state.pair.query.named_parameters()}
    found |= {name: b.clone() for name, b in optimizer_tensors(state.optimizer, state.pair.trained).items()}
    found |= {f"key {name}": p.detach().clone() for name, p in state.pair.key.named_parameters()}
    return found | {f"queue {name}": t.clone() for name, t in state.queue.tensors().items()}


def poison_view(value: float, which: str) -> Callable[[TrainState], Callable[[int, int], Iterator[Pictures]]]:
    def poison(_: TrainState) -> Callable[[int, int], Iterator[Pictures]]:
        def batches(start: int, stop: int) -> Iterator[Pictures]:
            for number, batch in enumerate(picture_batches(start, stop), start):
                if number == 5:
                    getattr(batch, which)[2, 0, 3, 3] = value
                yield batch

        return batches

    return poison


def poison_weight(state: TrainState) -> Callable[[int, int], Iterator[Pictures]]:
    def batches(start: int, stop: int) -> Iterator[Pictures]:
        for number, batch in enumerate(picture_batches(start, stop), start):
            if number == 5:
                with torch.no_grad():
                    state.pair.theta_q[-1][0] = math.nan
            yield batch

    return batches


def poison_gradient(value: float) -> Callable[[TrainState], Callable[[int, int], Iterator[Pictures]]]:
    """The loss stays finite and one number of one gradient does not."""

    def poison(state: TrainState) -> Callable[[int, int], Iterator[Pictures]]:
        at = [0]

        def spoil(gradient: Tensor) -> Tensor:
            spoiled = gradient.clone()
            if at[0] == 5:
                spoiled.view(-1)[0] = value
            return spoiled

        state.pair.theta_q[0].register_hook(spoil)

        def batches(start: int, stop: int) -> Iterator[Pictures]:
            for number, batch in enumerate(picture_batches(start, stop), start):
                at[0] = number
                yield batch

        return batches

    return poison


@pytest.mark.parametrize("order", ["paper", "ema-first"])
@pytest.mark.parametrize(
    "poison",
    [
        poison_view(math.nan, "x_q"),
        poison_view(math.inf, "x_q"),
        poison_view(math.nan, "x_k"),
        poison_view(-math.inf, "x_k"),
        poison_weight,
        poison_gradient(math.nan),
        poison_gradient(math.inf),
    ],
    ids=["nan query view", "inf query view", "nan key view", "inf key view", "weight", "nan gradient", "inf gradient"],
)
def test_what_is_not_finite_stops_the_run_before_the_update(run: RunFolder, poison: Any, order: str) -> None:
    state = fresh()
    saved: list[int] = []
    before: dict[str, Tensor] = {}
    batches = poison(state)

    def watched(start: int, stop: int) -> Iterator[Pictures]:
        for number, batch in enumerate(batches(start, stop), start):
            if number == 5:
                before.update(what_an_update_changes(state))
            yield batch

    with pytest.raises(
        DivergedError, match=r"not finite at step 5 .*nothing was updated.*picture 6, picture 7"
    ) as error:
        train(state, run, batches=watched, order=order, save=lambda s: saved.append(s.step))
    assert error.value.exit_code == 4
    after = what_an_update_changes(state)
    changed = {name for name in before if not torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7))}
    assert {name for name in changed if not (order == "ema-first" and name.startswith("key "))} == set()
    assert (state.step, saved) == (5, [3])
    assert [row["step"] for row in read_losses(run)] == [0, 1, 2, 3, 4]


# --------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_a_signal_ends_the_run_after_the_step_it_came_in_and_saves_once(
    run: RunFolder, number: signal.Signals, code: int, at: int
) -> None:
    state = fresh()
    saved: list[int] = []

    def batches(start: int, stop: int) -> Iterator[Pictures]:
        for step, batch in enumerate(picture_batches(start, stop), start):
            if step == at:
                os.kill(os.getpid(), number)
            yield batch

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with (
        StopRequest() as stop,
        pytest.raises(InterruptedRunError, match=rf"{number.name} after step {at + 1} of 8; .*--resume") as error,
    ):
        train(state, run, batches=batches, save=lambda s: saved.append(s.step), stop=stop)
    assert error.value.exit_code == code
    assert saved == sorted({3, 6, at + 1} & set(range(at + 2)))
    assert [row["step"] for row in read_losses(run)] == list(range(at + 1))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


def test_a_signal_in_the_last_step_is_no_interruption(run: RunFolder) -> None:
    saved: list[int] = []
    with StopRequest() as stop:

        def save(state: TrainState) -> None:
            saved.append(state.step)
            if state.step == 8:
                os.kill(os.getpid(), signal.SIGTERM)

        train(fresh(), run, save=save, stop=stop)
    assert saved == [3, 6, 8]


def test_a_signal_that_comes_while_a_checkpoint_is_not_due_never_leaves_unsaved(run: RunFolder) -> None:
    """The signal arrives in the last moment before the loop looks whether to leave."""

    class Late(StopRequest):
        asked = 0

        @property
        def signal(self) -> int | None:
            self.asked += 1
            return signal.SIGTERM if self.asked > 1 else None  # not at the first look, but at any later one

        @signal.setter
        def signal(self, value: int | None) -> None: ...

    saved: list[int] = []
    state = fresh()
    with pytest.raises(InterruptedRunError):
        train(state, run, save=lambda s: saved.append(s.step), stop=Late(), every=100)
    assert saved == [state.step]


def _twice(out: str) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        Path(out).write_text(f"first {stop.signal}")
        os.kill(os.getpid(), signal.SIGINT)
        Path(out).write_text("still here")


def test_a_second_interrupt_ends_the_process_at_once(tmp_path: Path) -> None:
    process = harness.CONTEXT.Process(target=_twice, args=(str(tmp_path / "out"),))
    process.start()
    process.join(60)
    assert process.exitcode == 130
    assert (tmp_path / "out").read_text() == "first 2"


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with StopRequest() as stop:
                assert stop.signal is None
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert signal.getsignal(signal.SIGTERM) is before


LONG = flags(epochs=60, checkpoint_every=400)  # 360 steps


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run of the same command that was never stopped leaves."""
    folder = tmp_path_factory.mktemp("whole")
    words = ["pretrain", str(npz(folder / "toy.npz")), "--out", str(folder / "run"), *LONG]
    assert harness.finish(start_cli(words, folder / "stderr")) == 0
    return harness.fingerprint(folder / "run")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_command_says_so_saves_and_resumes_exactly(
    tmp_path: Path, whole: dict[str, str], number: signal.Signals, code: int
) -> None:
    errors = tmp_path / "stderr"
    command = ["pretrain", str(npz(tmp_path / "toy.npz")), "--out", str(tmp_path / "run"), *LONG]
    process = start_cli(command, errors)
    log = tmp_path / "run" / "loss.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_bytes().count(b"\n") >= 3):
        assert process.is_alive(), errors.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert harness.finish(process) == code, errors.read_text()
    assert f"Stopped by {number.name} after step" in errors.read_text()
    assert "Traceback" not in errors.read_text()
    done = log.read_bytes().count(b"\n")
    assert done < 360
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"], status["total_steps"]) == ("interrupted", done, 360)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{done}"]
    assert harness.finish(start_cli([*command, "--resume"], errors)) == 0, errors.read_text()
    assert harness.fingerprint(tmp_path / "run") == whole


def test_nothing_of_a_step_is_held_while_the_next_views_are_made(run: RunFolder) -> None:
    state, seen = fresh(), 0

    def one(step: int, told: list[Any]) -> Pictures:
        (batch,) = picture_batches(step, step + 1)
        told.append(weakref.ref(batch.x_q))
        return batch

    def batches(start: int, stop: int) -> Iterator[Pictures]:
        nonlocal seen
        told: list[Any] = []
        for step in range(start, stop):
            assert [views() for views in told] == [None] * len(told)
            assert all(p.grad is None for p in state.pair.trained.values())
            yield one(step, told)
            seen += 1

    train(state, run, batches=batches)
    assert seen == 8


# ------------------------------------------------------------------------------------------- rows and schedules


def test_an_epochs_row_is_the_mean_of_its_steps(run: RunFolder) -> None:
    train(fresh(), run)
    rows, losses = read_metrics(run), read_losses(run)
    assert [row["epoch"] for row in rows] == [1.0, 2.0]
    for row, part in zip(rows, (losses[:4], losses[4:]), strict=True):
        for mine, theirs in (("loss", "loss"), ("chance", "chance"), ("masked_share", "masked")):
            assert row[mine] == pytest.approx(sum(line[theirs] for line in part) / 4, rel=1e-12)
        assert (row["lr"], row["m"], row["queue_fill"]) == (part[-1]["lr"], part[-1]["m"], part[-1]["fill"])
    table = (run.path / "results.csv").read_text().splitlines()
    assert len(table) == 3
    assert table[0].startswith("utc,epoch,step,loss,chance,lr,m,queue_fill,masked_share,images_per_second,data_wait")


@pytest.mark.parametrize("at", [3, 4, 5, 6, 7])
def test_rows_are_the_same_when_the_run_was_resumed_inside_an_epoch(tmp_path: Path, run: RunFolder, at: int) -> None:
    whole, lock = claim_run(tmp_path / "whole", "new")
    lock.release()
    train(fresh(), whole)
    state = fresh()

    class Enough(Exception):  # noqa: N818
        pass

    def batches(start: int, stop: int) -> Iterator[Pictures]:
        yield from picture_batches(start, at)
        raise Enough

    with pytest.raises(Enough):
        train(state, run, batches=batches)
    assert state.step == at
    train(state, run)
    clock = ("utc", "images_per_second", "data_wait")
    one, other = ([{k: v for k, v in row.items() if k not in clock} for row in read_metrics(r)] for r in (whole, run))
    assert one == other
    assert (whole.path / "loss.jsonl").read_bytes() == (run.path / "loss.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text.replace('{"step": 4', '{"step" 4'), "Line 5 of .*loss.jsonl"),
        (lambda text: text.replace('"masked"', '"mask"', 1), "Line 1 of .*loss.jsonl"),
        (lambda text: "[1]\n" + text, "Line 1 of .*loss.jsonl"),
        (lambda text: "\x00" + text, "Line 1 of .*loss.jsonl"),
    ],
)
def test_a_log_that_was_changed_is_damage_and_no_riddle(run: RunFolder, spoil: Any, says: str) -> None:
    train(fresh(), run)
    path = run.path / "loss.jsonl"
    path.write_text(spoil(path.read_text()))
    with pytest.raises(DamagedError, match=says):
        read_losses(run)
    state = fresh()
    state.step = 6
    with pytest.raises(DamagedError, match=says):
        train(state, run)


def test_the_curve_is_read_when_it_should_be_and_the_encoders_train_on(run: RunFolder) -> None:
    read: list[int] = []
    state = fresh()

    def on_eval(now: TrainState) -> dict[str, float]:
        now.pair.train(False)
        read.append(now.step)
        return {"knn_h": 0.5, "knn_z": float("nan")}

    train(state, run, steps=20, on_eval=on_eval, eval_every=2)
    assert read == [8, 16, 20]
    assert state.pair.query.training
    assert [row.get("knn_h") for row in read_metrics(run)] == [None, 0.5, None, 0.5, 0.5]
    assert read_metrics(run)[-1]["knn_z"] is None


def test_a_state_that_is_complete_does_nothing(run: RunFolder) -> None:
    state = fresh()
    state.step = 8
    train(state, run, save=lambda s: pytest.fail("saved"))
    assert read_losses(run) == []


def test_the_logged_rates_are_those_of_the_formulas(run: RunFolder) -> None:
    """Linear to 0.1 over half an epoch, then half a cosine; m a half cosine from 0.9 to 1 over the 8 steps."""
    train(fresh(), run)
    for line in read_losses(run):
        t = line["step"]
        lr = 0.1 * (t + 1) / 3 if t < 2 else 0.1 * 0.5 * (1 + math.cos(math.pi * (t - 2) / 6))
        assert line["lr"] == pytest.approx(lr, rel=1e-12)
        # The paper's order moves the key encoder after the step: m(t + 1).
        assert line["m"] == pytest.approx(1 - 0.1 * 0.5 * (1 + math.cos(math.pi * (t + 1) / 8)), rel=1e-12)
        assert line["fill"] == min(N * (t + 1), 15)


@pytest.mark.parametrize("warmup", [0.0, 1.0, 2.5])
def test_learning_rates_against_the_papers(warmup: float) -> None:
    total, epoch, lr = 200, 10, 0.03
    start = warmup * epoch

    def rates(schedule: Any) -> list[float]:
        config = OptimConfig(lr=lr, schedule=schedule, warmup_epochs=warmup)
        return [lr_at(config, step, total, epoch) for step in range(total)]

    for step, (cosine, steps, constant) in enumerate(
        zip(rates("cosine"), rates("step"), rates("constant"), strict=True)
    ):
        if step < start:
            expected = [lr * (step + 1) / (start + 1)] * 3
        else:
            # He et al. 2020, section 4: divided by 10 at 120 and 160 of 200 epochs.
            divided = lr / (100 if step >= 160 else 10 if step >= 120 else 1)
            expected = [lr * (1 + math.cos(math.pi * (step - start) / (total - start))) / 2, divided, lr]
        assert [cosine, steps, constant] == pytest.approx(expected, rel=1e-12)
        assert 0 < cosine <= lr


def test_schedules_are_functions_of_the_step_alone() -> None:
    contrast, optim = ContrastConfig(m=0.9, m_end=1.0), OptimConfig(warmup_epochs=1)
    forwards = [(lr_at(optim, t, 50, 5), contrast.m_at(t, 50)) for t in range(50)]
    backwards = [(lr_at(optim, t, 50, 5), contrast.m_at(t, 50)) for t in reversed(range(50))]
    assert forwards == backwards[::-1]


# ----------------------------------------------------------------------------------------------------- progress


class Gone(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_reader_of_the_progress_that_leaves_stops_no_training(run: RunFolder) -> None:
    progress = Progress(Gone(), every=0.0)
    progress.say("hello")
    progress.show("step 1")
    progress.warn("careful")
    assert progress.quiet


def test_progress_without_a_terminal_is_plain_lines() -> None:
    stream = io.StringIO()
    progress = Progress(stream, every=0.0)
    progress.show("step 1")
    progress.say("a remark")
    progress.show(lambda: "step 2", final=True)
    slow = Progress(stream, every=1000.0)
    slow.show("step 3")
    slow.show(lambda: pytest.fail("made although it isn't shown"))
    slow.show("step 5", final=True)
    quiet = Progress(stream, quiet=True, every=0.0)
    quiet.show("step 6", final=True)
    quiet.say("a remark")
    quiet.warn("this must be known")
    assert stream.getvalue() == "step 1\na remark\nstep 2\nstep 3\nstep 5\nWARNING: this must be known\n"
    assert [duration(x) for x in (0.4, 59.6, 61, 3661, 360000)] == ["0:00", "1:00", "1:01", "1:01:01", "100:00:00"]
