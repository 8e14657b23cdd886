"""The trace: what is recorded is what happened, and recording changes nothing."""

from __future__ import annotations

import dataclasses
import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from mocokit.cli import main
from mocokit.contrast.encoders import EncoderConfig, EncoderPair, build_encoder
from mocokit.contrast.key_queue import KeyQueue
from mocokit.contrast.steps import ContrastConfig, step_of
from mocokit.errors import DamagedError, UsageError
from mocokit.training.distributed import Ranks
from mocokit.training.loop import QueryUpdate, micro_batches
from mocokit.training.optim import OptimConfig, build_optimizer
from mocokit.training.state import TrainState
from mocokit.training.trace import Recorder, recording
from mocokit.training.trace_format import (
    COSINE_BYTES,
    DETAILED,
    MAX_STEPS,
    Window,
    pack,
    plan_windows,
    read_trace,
    unpack,
)
from mocokit.training.trace_images import Pictured, png
from mocokit.training.trace_toy import STEPS as TOY_STEPS
from mocokit.training.trace_toy import toy_trace
from tests.toy import STEPS, flags, npz

N, D = 6, 8


@dataclasses.dataclass
class Pictures:
    x_q: Tensor
    x_k: Tensor
    ids: Tensor
    groups: Tensor


def batch(step: int) -> Pictures:
    x_q, x_k = torch.randn(2, N, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    ids = torch.arange(N) + N * (step % 3)
    return Pictures(x_q, x_k, ids, ids)


def record(steps: int = 7, *, recorded: bool = True, accumulate: int = 1, K: int = 15, **contrast: Any) -> Any:
    """Train a small net; gives the trace, and beside it what the test saw itself."""
    config = ContrastConfig(K=K, m=0.9, T=0.2, **contrast)
    pair = EncoderPair(build_encoder(EncoderConfig(backbone="small-cnn-4-6", dim=D), image_size=8, seed=0))
    pair.train()
    optim = OptimConfig(lr=0.1)
    state = TrainState(pair, KeyQueue(K, D), build_optimizer(optim, pair.trained))
    kept: list[dict[str, Any]] = []
    recorder = Recorder(
        [Window("all", 0, steps, frozenset(range(steps)))],
        config,
        source={"kind": "run"},
        facts={},
        describe=lambda i: Pictured(f"picture {i}", None, np.zeros((4, 4, 3), np.uint8)),
        to_pixels=lambda x: np.zeros((len(x), 4, 4, 3), np.uint8),
        save=kept.append,
        every_age=True,
    )
    seen = []
    for _ in range(steps):
        parts = micro_batches(batch(state.step), accumulate)
        update = QueryUpdate(state, optim.lr, len(parts) * config.losses_per_part, lambda: "")
        before = {name: t.clone() for name, t in state.queue.tensors().items()}
        theta = [p.detach().clone() for p in pair.theta_q], [p.clone() for p in pair.theta_k]
        m = config.m_at(state.step, steps)
        with recording(recorder if recorded else None, state, parts, update, Ranks().gather, m) as (updating, gather):
            step_of(config)(
                pair,
                state.queue,
                parts,
                scoring=config.scoring(),
                m=m,
                step=state.step,
                update_query_=updating,
                gather=gather,
            )
        seen.append((update.loss, before, state.queue.vectors.clone(), theta))
        state.step += 1
    return (kept[0] if kept else None), seen, state


@pytest.fixture(scope="module")
def told() -> tuple[dict[str, Any], Any, TrainState]:
    return record()


@pytest.mark.parametrize("setting", [{}, {"order": "ema-first"}, {"symmetric": True}, {"accumulate": 2}], ids=str)
def test_recording_changes_no_bit(setting: dict[str, Any]) -> None:
    _, with_it, one = record(**setting)
    _, without, other = record(recorded=False, **setting)
    assert [row[0] for row in with_it] == [row[0] for row in without]
    for name, tensor in one.model_tensors().items():
        assert torch.equal(tensor, other.model_tensors()[name]), name


@pytest.mark.parametrize("setting", [{}, {"order": "ema-first"}, {"symmetric": True}, {"accumulate": 2}], ids=str)
def test_losses_are_those_of_the_formula(setting: dict[str, Any]) -> None:
    """From the recorded cosines and masks alone, the mean over queries is the loss that was descended."""
    trace, seen, _ = record(**setting)
    T = 0.2
    for row, (loss, *_) in zip(trace["windows"][0]["steps"], seen, strict=True):
        assert row["loss"] == loss
        assert np.mean(row["losses"]) == pytest.approx(loss, rel=2e-6)
        negatives = unpack(row["negatives"], len(row["masked"]), -1).astype(np.float64)
        positive = unpack(row["positive"], -1).astype(np.float64)
        for query, masked in enumerate(row["masked"]):
            kept = np.delete(negatives[query], masked)
            logits = np.concatenate([[positive[query]], kept]) / T
            assert row["losses"][query] == pytest.approx(np.log(np.exp(logits).sum()) - logits[0], abs=1e-12)
            assert row["rank"][query] == 1 + int((kept > positive[query]).sum())


def test_vectors_are_those_of_queue_and_formula(told: Any) -> None:
    trace, seen, _ = told
    for row, (_, before, after, _) in zip(trace["windows"][0]["steps"], seen, strict=True):
        Q = len(row["masked"])
        q, k = unpack(row["q"], Q, D), unpack(row["k"], Q, D)
        stored = before["vectors"].numpy()[: row["fill"]] if row["fill"] else None
        if stored is not None:
            np.testing.assert_allclose(unpack(row["negatives"], Q, -1), q @ stored.T, atol=2e-7)
        slots = (row["pointer"] + np.arange(Q)) % 15
        np.testing.assert_array_equal(after.numpy()[slots], k)
        np.testing.assert_allclose(np.linalg.norm(q, axis=1), 1, atol=1e-6)


def test_gradient_of_backward_is_the_formulas(told: Any) -> None:
    """dL/dz that backward brought is (1 - q q^T)/|z| times (sum p_i k_i - k)/T."""
    trace, seen, _ = told
    for row, (_, before, *_) in list(zip(trace["windows"][0]["steps"], seen, strict=True))[1:]:
        Q, fill = len(row["masked"]), row["fill"]
        q, k = unpack(row["q"], Q, D).astype(np.float64), unpack(row["k"], Q, D).astype(np.float64)
        stored = before["vectors"].numpy()[:fill].astype(np.float64)
        for i in range(Q):
            kept = np.setdiff1d(np.arange(fill), row["masked"][i])
            logits = np.concatenate([[q[i] @ k[i]], stored[kept] @ q[i]]) / 0.2
            p = np.exp(logits - logits.max())
            p /= p.sum()
            gradient = (p[0] * k[i] + p[1:] @ stored[kept] - k[i]) / 0.2
            assert row["gradient_q"][i] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
            along = (gradient - q[i] * (q[i] @ gradient)) / row["z_norm"][i]
            assert row["gradient_z"][i] == pytest.approx(np.linalg.norm(along), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("order", ["paper", "ema-first"])
def test_what_ema_and_optimiser_moved(order: Any) -> None:
    trace, seen, _ = record(order=order)
    for row, (*_, theta) in zip(trace["windows"][0]["steps"], seen, strict=True):
        apart = np.sqrt(sum(float((q - k).double().square().sum()) for q, k in zip(*theta, strict=True)))
        assert row["theta"]["start"]["apart"] == pytest.approx(apart, rel=1e-5, abs=1e-9)
        before, after = ("updated", "end") if order == "paper" else ("start", "keys")
        q, k = row["parameter"][before]
        assert row["parameter"][after][1] == pytest.approx(0.9 * k + 0.1 * q, abs=1e-7)
        assert row["theta"][after]["apart"] == pytest.approx(0.9 * row["theta"][before]["apart"], rel=1e-4, abs=1e-9)
        assert row["gradient_theta_k"] is None
        assert row["with_gradient_on_key_side"] == 0


def test_keys_leave_oldest_first(told: Any) -> None:
    """By the record of pointers and counts alone, a plain list of key numbers follows the queue's births."""
    trace, _, state = told
    held: list[int] = []
    for row in trace["windows"][0]["steps"]:
        assert row["fill"] == len(held)
        held += [row["t"]] * row["entered"]
        assert row["left"] == max(len(held) - 15, 0)
        held = held[-15:]
        assert row["fill_after"] == len(held)
    assert state.queue.births[state.queue.oldest_first()].tolist() == held


def test_a_followed_key_reads_one_at_birth_and_is_read_until_it_leaves(told: Any) -> None:
    trace, *_ = told
    ages = {s["age"]: s["cosines"] for row in trace["windows"][0]["steps"] for s in row["staleness"]}
    assert set(ages) == {0, 1, 2, 3}
    assert ages[0] == pytest.approx([1.0] * 4, abs=1e-12)
    followed = [row["t"] for row in trace["windows"][0]["steps"] for one in row["followed"] if one["birth"] == 0]
    assert set(followed) == {1, 2, 3}


def test_the_built_in_trace_is_one_cycle_of_four_keys() -> None:
    trace = toy_trace()
    steps = trace["windows"][0]["steps"]
    assert trace == toy_trace()
    assert len(steps) == TOY_STEPS
    assert [row["fill"] for row in steps[:6]] == [0, 1, 2, 3, 4, 4]
    assert steps[4]["pointer"] == 0
    assert [row["left"] for row in steps] == [0] * 4 + [1] * 8
    assert all(len(unpack(row["q"], -1)) == 2 for row in steps)


def test_windows() -> None:
    assert plan_windows("first", K=32, life=4, total_steps=30) == [Window("first", 0, 6, frozenset(range(6)))]
    full = plan_windows("full", K=128, life=16, total_steps=390)[0]
    assert (full.start, full.stop) == (14, 32)
    both = plan_windows("last, first", K=32, life=4, total_steps=8)
    assert [(w.name, w.start, w.stop) for w in both] == [("first, last", 0, 8)]
    some = plan_windows("120,3-4", K=32, life=4, total_steps=200)
    assert [(w.start, w.stop) for w in some] == [(3, 5), (120, 121)]
    long = plan_windows("first", K=2048, life=256, total_steps=10_000)[0]
    assert (long.start, long.stop) == (0, 258)
    assert len(long.detailed) == 36
    assert {0, 257} <= long.detailed


@given(
    K=st.integers(1, 300_000),
    N=st.integers(1, 5000),
    text=st.sampled_from(["first", "full", "last", "first,last", "first,full,last", "5", "3-90", "1,40,70"]),
    filled=st.booleans(),
)
def test_steps_in_detail_hold_to_the_size(K: int, N: int, text: str, filled: bool) -> None:
    windows = plan_windows(text, K=K, life=K / N, total_steps=500, filled=filled)
    detailed = [t for window in windows for t in window.detailed]
    assert all(t in range(window.start, window.stop) for window in windows for t in window.detailed)
    assert len(detailed) <= DETAILED
    rows = [K if filled else min(t * N, K) for t in detailed]
    assert sum(4 * 4 / 3 * count for count in rows) <= COSINE_BYTES * (1 + 1e-9)
    left_out = [w.stop - 1 for w in windows if w.stop - 1 not in w.detailed]
    assert not left_out or K * 16 / 3 * len(windows) > COSINE_BYTES or len(windows) * 3 > DETAILED


def test_a_small_picture_is_the_same_png(tmp_path: Path) -> None:
    for shape in ((1, 1, 3), (16, 16, 3), (32, 20, 3)):
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        with Image.open(io.BytesIO(png(pixels))) as image:
            assert image.format == "PNG"
            np.testing.assert_array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize("text", ["sometimes", "", "5-2", "30", "1-99999999999", "first,", f"0-{MAX_STEPS}"])
def test_words_that_name_no_steps(text: str) -> None:
    with pytest.raises(UsageError, match="--trace"):
        plan_windows(text, K=32, life=4, total_steps=30 if text != f"0-{MAX_STEPS}" else 10_000)


def test_a_resumed_run_goes_on_with_its_trace(tmp_path: Path) -> None:
    data = npz(tmp_path / "data.npz")
    whole = ["pretrain", str(data), *flags(), "--quiet", "--trace", "0-11"]
    assert main([*whole, "--out", str(tmp_path / "whole")]) == 0
    config = (tmp_path / "whole" / "config.yaml").read_text()
    assert "trace" not in config
    first = read_trace(tmp_path / "whole" / "trace.json")
    # Cut the run back to its checkpoint of step 8, as a kill at step 11 would have left it.
    (tmp_path / "whole").rename(tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-12")
    assert main(["pretrain", str(data), "--resume", "--quiet", "--trace", "0-11", "--out", str(tmp_path / "cut")]) == 0
    again = read_trace(tmp_path / "cut" / "trace.json")
    steps = [row["t"] for window in again["windows"] for row in window["steps"]]
    assert steps == list(range(STEPS))
    for a, b in zip(first["windows"][0]["steps"], again["windows"][0]["steps"], strict=True):
        for name in ("loss", "losses", "negatives", "rank", "theta", "pointer", "images"):
            assert a[name] == b[name], (name, a["t"])


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"trace\.json is missing.*--trace first"):
        read_trace(tmp_path / "trace.json")
    for text in ("[]", '{"format": "other"}', '{"format": "mocokit trace", "version": 99}', "{", "{}"):
        (tmp_path / "trace.json").write_text(text)
        with pytest.raises(DamagedError, match=r"trace\.json"):
            read_trace(tmp_path / "trace.json")


def test_methods_without_a_queue_have_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("contrast: {method: simclr, T: 0.5, m: 0.999}\n")
    words = ["pretrain", str(npz(tmp_path / "d.npz")), "--out", str(tmp_path / "r"), "--trace", "first"]
    code = main([*words, "--config", str(config), "--batch-size", "8", "--backbone", "small-cnn-8-8"])
    assert code == 2
    assert "simclr has none" in capsys.readouterr().err


def test_pack_keeps_every_bit() -> None:
    values = torch.randn(5, 3)
    assert np.array_equal(unpack(pack(values), 5, 3), values.numpy())
