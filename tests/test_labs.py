"""LAB 06 and LAB 07: the pieces against plain loops and the library's own; the figures against the published ones."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from benchmarks import plain_labs
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import mocokit
from mocokit import files
from mocokit.cli import main
from mocokit.contrast.key_queue import KeyQueue, Keys
from mocokit.contrast.losses import info_nce, nt_xent, same_source
from mocokit.contrast.momentum import ema_update_
from mocokit.data.generated_shapes import PUBLISHED_SHA256, generate, seed_of
from mocokit.errors import DamagedError, LockedError, UsageError
from mocokit.studies import lab_folder, labs, published, seed_table
from mocokit.studies.lab06 import in_batch_nce, train_in_batch
from mocokit.studies.lab07 import (
    K,
    Pieces,
    QueueStep,
    check_queue,
    concatenated_nce,
    ema_as_two_products_,
    oldest_first,
    queue_trace,
    train_moco,
)
from mocokit.studies.lab_run import CELLS, COSINES, LabRun, read_out, start, warmup
from mocokit.studies.lab_views import PICTURED_SOURCES, ViewMaker, hue_pictures
from mocokit.studies.labs import LabResult, run_lab
from mocokit.studies.setting import Streams, first_encoder, streams, two_threads, why_other_digits

ARMS = {"06": ("random", "keep-hue", "swap-hue"), "07": ("random", "simclr", "moco-toy")}


def same_bits(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(mine, theirs, strict=True))


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().contiguous() for parameter in module.parameters()]


# ----------------------------------------------------------------------------- bit for bit against plain loops


@pytest.mark.parametrize("repetition", [0, 3])
def test_data_equal_pictures_drawn_one_by_one(repetition: int) -> None:
    data = generate(seed_of(repetition))
    np.testing.assert_array_equal(data.images, plain_labs.draw_images(seed_of(repetition)))
    np.testing.assert_array_equal(data.train_ids, plain_labs.TRAIN)
    np.testing.assert_array_equal(data.shape, plain_labs.TARGETS["shape"])
    np.testing.assert_array_equal(data.color, plain_labs.TARGETS["color"])
    assert (data.sha256() == PUBLISHED_SHA256) == (repetition == 0)


@pytest.mark.parametrize("swap_hue", [False, True])
def test_views_equal_a_loop_over_the_images(swap_hue: bool) -> None:
    images = torch.from_numpy(generate().images)
    train_ids = torch.from_numpy(plain_labs.TRAIN)
    maker = ViewMaker(images, 5, swap_hue=swap_hue)
    torch.manual_seed(5)
    for _ in range(2):
        for (ids, view_a, view_b), plain_ids in zip(maker.epoch(train_ids), plain_labs.batches(), strict=True):
            assert torch.equal(ids, plain_ids)
            for view in (view_a, view_b):
                assert same_bits([view], [plain_labs.augment(images[ids], swap_hue)])


def test_pictured_views_share_their_state_and_differ_in_the_hue_or_not_at_all() -> None:
    images = torch.from_numpy(generate().images)
    pictures = hue_pictures(images, streams().pictures)
    torch.manual_seed(streams().pictures)
    for place, source in enumerate(PICTURED_SOURCES):
        state = torch.get_rng_state()
        for name, swap in (("view: hue kept", False), ("view: hue may swap", True)):
            torch.set_rng_state(state)
            assert same_bits([pictures[name][place]], [plain_labs.augment(images[source : source + 1], swap)[0]])
    kept, swapped = pictures["view: hue kept"], pictures["view: hue may swap"]
    different = (kept != swapped).flatten(1).any(1)
    assert 0 < int(different.sum()) < len(PICTURED_SOURCES)
    assert torch.equal(kept[different], swapped[different].flip(1))


def test_the_first_epochs_equal_the_plain_loop_to_the_last_bit() -> None:
    with two_threads():
        data, images, train_ids, initial = start(streams())
        plain = plain_labs.first_weights(streams().init)
        assert same_bits(weights(initial), weights(plain))
        for swap_hue in (False, True):
            mine = train_in_batch(initial, images, train_ids, 7, swap_hue=swap_hue, epochs=1)
            network, losses = plain_labs.train_in_batch(plain, images, 7, swap_hue, 1)
            assert same_bits(weights(mine.encoder), weights(network))
            assert mine.loss_history == losses
        moco = train_moco(initial, images, train_ids, 8, epochs=2)
        query, key, queue, owners, losses = plain_labs.train_queue(plain, images, 8, 2)
        assert same_bits(weights(moco.encoder), weights(query))
        assert same_bits(weights(moco.key_encoder), weights(key))
        in_order = oldest_first(moco.queue)
        assert same_bits([in_order.vectors], [queue])
        assert torch.equal(in_order.ids, owners)
        assert moco.loss_history == losses
        assert read_out(moco.encoder, data) == plain_labs.read_out(query, images)
        assert check_queue(moco.steps)["same_source_pairs_left_out"] > 0


# ------------------------------------------------------------------------------- deviations and the library's way


def test_two_products_are_the_librarys_ema_but_for_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    theta_k, theta_q = (torch.randn(10_000, generator=generator) for _ in range(2))
    two_products, lerp = theta_k.clone(), theta_k.clone()
    ema_as_two_products_([two_products], [theta_q], 0.95)
    ema_update_([lerp], [theta_q], 0.95)
    exact = 0.95 * theta_k.double() + 0.05 * theta_q.double()
    for mine in (two_products, lerp):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-6, atol=1e-6)
    assert not torch.equal(two_products, lerp)
    at_rest = theta_k.clone()
    ema_update_([at_rest], [theta_k], 0.95)
    assert torch.equal(at_rest, theta_k)
    ema_as_two_products_([at_rest], [theta_k], 0.95)
    assert not torch.equal(at_rest, theta_k)  # why the library does it the other way


def test_oldest_first_is_the_snapshot_in_order_of_age() -> None:
    queue = KeyQueue(5, 3)
    for step in range(4):
        ids = torch.tensor([2 * step, 2 * step + 1])
        queue.enqueue_(Keys(torch.randn(2, 3), ids, torch.full((2,), -1)), step)
        ordered, ring = oldest_first(queue), queue.snapshot()
        assert ordered.ids.tolist() == list(range(2 * step + 2))[-5:]
        assert sorted(ring.ids.tolist()) == ordered.ids.tolist()
        for row, source in enumerate(ordered.ids.tolist()):
            assert torch.equal(ordered.vectors[row], ring.vectors[ring.ids == source][0])
    assert ring.ids.tolist() != ordered.ids.tolist()


def unit(*shape: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_concatenated_nce_is_the_librarys_info_nce_but_for_rounding() -> None:
    k, ids = unit(60, 24, seed=1), torch.arange(60)
    dictionary = Keys(unit(240, 24, seed=2), torch.arange(240) + 50, torch.full((240,), -1))
    excluded = same_source(ids, torch.full((60,), -1), dictionary)
    gradients, losses, counts = [], [], []
    for loss in (concatenated_nce, info_nce):
        q = unit(60, 24, seed=0).requires_grad_()
        contrast = loss(q, k, dictionary, 0.2, excluded)
        torch.autograd.backward(contrast.loss)
        assert q.grad is not None
        gradients.append(q.grad)
        losses.append(contrast.loss.detach())
        counts.append((contrast.excluded, contrast.negatives))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
    assert not torch.equal(gradients[0], gradients[1])
    for one, other in zip(*counts, strict=True):
        assert torch.equal(one, other)
    assert int(counts[0][0].sum()) == 10  # sources 50..59 are in both


def test_in_batch_loss_is_the_formula_and_the_librarys_but_for_rounding() -> None:
    z_a, z_b = (torch.randn(60, 24, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    z = torch.cat([z_a, z_b]).double().numpy()
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    rows = []
    for i in range(120):
        others = [z[i] @ z[j] / 0.2 for j in range(120) if j != i]
        rows.append(np.log(np.exp(others).sum()) - z[i] @ z[(i + 60) % 120] / 0.2)
    assert float(in_batch_nce(z_a, z_b)) == pytest.approx(np.mean(rows), rel=1e-5)
    both = [Keys(F.normalize(z, dim=1), torch.arange(60), torch.full((60,), -1)) for z in (z_a, z_b)]
    assert float(nt_xent(both[0], both[1], 0.2).loss) == pytest.approx(np.mean(rows), rel=1e-5)


def test_worked_examples() -> None:
    found = warmup()
    assert found["FIFO"] == ["c", "d", "e", "f"]
    assert found["EMA"] == [0.2, 2.2]
    assert found["temperature_probabilities"]["0.1"][0] == pytest.approx(0.999939, abs=1e-6)
    assert found["temperature_probabilities"]["0.5"][0] == pytest.approx(0.859767, abs=1e-6)


# --------------------------------------------------------------------------------------------- the trace's checks


@pytest.fixture(scope="module")
def recorded() -> list[QueueStep]:
    with two_threads():
        _, images, train_ids, initial = start(streams(1))
        return train_moco(initial, images, train_ids, 9, epochs=2).steps


def test_a_whole_trace_passes(recorded: list[QueueStep]) -> None:
    counted = check_queue(recorded)
    assert counted["steps"] == 20
    assert counted["queries"] == 1200
    assert counted["evicted"] == 1200 - K
    assert [step["queue_size"] for step in queue_trace(recorded)] == [60, 120, 180, 240, 240]
    # recounted without the code under test: pairs of a query and one of the 240 keys before it
    stream = [source for step in recorded for source in step.batch_ids]
    pairs = sum(stream[max(at // 60 * 60 - K, 0) : at // 60 * 60].count(stream[at]) for at in range(len(stream)))
    assert counted["same_source_pairs_left_out"] == pairs


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        (13, lambda s: {"left_out": s.left_out - 1}, "pairs of one source"),
        (13, lambda s: {"left_out": s.left_out + 1}, "pairs of one source"),
        (6, lambda s: {"queue_ids": s.queue_ids[1:] + s.queue_ids[:1]}, "evicted other rows than the oldest"),
        (6, lambda s: {"queue_ids": s.queue_ids[:-1] + s.queue_ids[:1]}, "evicted other rows than the oldest"),
        (6, lambda s: {"births": s.births[1:] + s.births[:1]}, "another age"),
        (6, lambda s: {"scored_ids": s.scored_ids[60:] + s.batch_ids}, "scored other keys"),
        (6, lambda s: {"key_gradients": 1}, "gradient on the key's side"),
    ],
)
def test_a_broken_trace_is_caught(recorded: list[QueueStep], step: int, change: Any, message: str) -> None:
    broken = [*recorded]
    broken[step] = dataclasses.replace(recorded[step], **change(recorded[step]))
    with pytest.raises(AssertionError, match=message):
        check_queue(broken)


# ------------------------------------------------------------------------------------- a folder, with short labs


def short(lab: str) -> Any:
    """The real lab with one short epoch: one step in the batch, five with the queue."""

    def run(seeds: Streams, say: Any = None) -> LabRun:
        with two_threads():
            data, images, train_ids, initial = start(seeds)
            few = train_ids[::10]
            keep = train_in_batch(initial, images, few, seeds.in_batch, epochs=1)
            if lab == "06":
                swap = train_in_batch(initial, images, few, seeds.in_batch, swap_hue=True, epochs=1)
                return LabRun.of("06", seeds, data, initial, {"keep-hue": keep, "swap-hue": swap})
            moco = train_moco(initial, images, train_ids[::2], seeds.moco, epochs=1)
            return LabRun.of("07", seeds, data, initial, {"simclr": keep, "moco-toy": moco})

    return run


@pytest.fixture
def short_labs(monkeypatch: pytest.MonkeyPatch) -> None:
    for lab in ("06", "07"):
        monkeypatch.setitem(labs.LABS, lab, short(lab))  # type: ignore[arg-type]


@pytest.mark.usefixtures("short_labs")
def test_a_lab_folder(tmp_path: Path) -> None:
    out = tmp_path / "lab"
    with pytest.raises(UsageError, match="no LAB '08'"):
        run_lab("08", out)
    with pytest.raises(UsageError, match=r"--seeds must lie in \[1, 1000\]"):
        run_lab("07", out, seeds=0)
    assert not out.exists()
    run_lab("07", out)
    before = files.read_json(out / "results.json")
    with pytest.raises(UsageError, match="already holds a result"):
        run_lab("07", out)
    with pytest.raises(UsageError, match="holds LAB 07, not LAB 06"):
        run_lab("06", out, seeds=2)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds 'notes\.txt', which no lab writes"):
        run_lab("07", out, overwrite=True)
    (out / "notes.txt").unlink()
    with files.RunLock(out), pytest.raises(LockedError):
        run_lab("07", out, overwrite=True)
    run_lab("06", out, overwrite=True)
    names = {path.name for path in out.iterdir()}
    assert "swap-hue.safetensors" in names
    assert not {"queue-trace.json", "moco-toy.safetensors"} & names
    assert files.read_json(out / "results.json")["scores"]["keep-hue"] == before["scores"]["simclr"]


@pytest.mark.usefixtures("short_labs")
def test_seeds_go_on_where_they_were_and_never_mix_measurements(tmp_path: Path) -> None:
    out = tmp_path / "lab"
    said: list[str] = []
    run_lab("07", out)
    result = run_lab("07", out, seeds=2, say=said.append)
    assert not any("20260922" in line for line in said)  # the first seed was there already
    assert any("20261922" in line for line in said)
    assert [one["seed"] for one in result.results] == [20260922, 20261922]
    kept = (out / "seeds" / "20261922.json").read_bytes()
    assert run_lab("07", out, seeds=2).to_dict() == result.to_dict()
    assert (out / "seeds" / "20261922.json").read_bytes() == kept
    table = files.read_json(out / "seeds.json")
    assert table["seeds"] == [20260922, 20261922]
    assert len(table["cells"]) == 30
    assert (out / "seeds.png").read_bytes()[:4] == b"\x89PNG"
    assert "LAB 07 over 2 seeds" in result.text()
    assert (out / "seeds.txt").read_text() in result.text()

    other = json.loads(kept)
    other["torch"] = "2.10.0"
    files.write_json(out / "seeds" / "20261922.json", other)
    with pytest.raises(UsageError, match=r"another torch \(2\.10\.0, here 2\..* never put into one table"):
        run_lab("07", out, seeds=2)
    files.write_json(out / "seeds" / "20261922.json", json.loads(kept) | {"seed": 5})
    with pytest.raises(DamagedError, match="is the result of seed 5"):
        run_lab("07", out, seeds=2)
    files.write_text(out / "seeds" / "20261922.json", "{}")
    with pytest.raises(DamagedError, match="is no result of a lab"):
        run_lab("07", out, seeds=2)


@pytest.mark.usefixtures("short_labs")
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "lab")
    assert main(["lab", "07", "--out", out]) == 0
    said = capsys.readouterr()
    assert "of 18 published figures are equal" in said.out
    assert "MoCo's loss" in said.out
    assert said.out.endswith(f"Everything is in {out}.\n")
    assert "done in" in said.err
    assert main(["lab", "07", "--out", out]) == 2
    assert "Replace it with --overwrite" in " ".join(capsys.readouterr().err.split())
    assert main(["lab", "07", "--out", out, "--overwrite", "--json", "--quiet"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == files.read_json(Path(out) / "results.json")
    assert said.err == ""
    assert main(["lab", "06", "--seeds", "x"]) == 2
    result = mocokit.lab("06", tmp_path / "other", seeds=2, quiet=True)
    assert [one["seed"] for one in result.results] == [20260922, 20261922]


def test_code_hash_covers_what_decides_a_figure() -> None:
    assert len(lab_folder.code_sha256()) == 64
    assert lab_folder.code_sha256() == lab_folder.code_sha256()


# ----------------------------------------------------------------------------------------- tables and conclusions


def made_up(lab: str, shift: float, loss: tuple[float, float] = (4.8, 4.3)) -> dict[str, Any]:
    """A results.json with the published figures, some of them `shift` percentage points away."""
    scores = {arm: dict.fromkeys((*CELLS, *COSINES), 0.5) for arm in ARMS[lab]}
    for arm, cells in published.FIRST[lab].items():
        scores[arm].update({cell: value / 100 for cell, value in cells.items()})
    last = ARMS[lab][2]
    scores[last]["h_shape_knn"] += shift / 100
    if shift:
        scores[last]["h_color_knn"] -= shift / 100
    return {
        "lab": lab,
        "seed": 20260922,
        "scores": scores,
        "loss_history": {arm: list(loss) for arm in ARMS[lab][1:]},
        "encoder_weight_l2_change": dict.fromkeys(ARMS[lab][1:], 0.7625),
        "queue_trace": [{"queue_size": size} for size in (60, 120, 180, 240, 240)],
        "digits_not_expected_because": "",
        "torch": "2.14.1",
        "threads": 2,
        "processor": "x",
        "cpu_capability": "AVX512",
    }


@pytest.mark.parametrize(("lab", "count"), [("06", 9), ("07", 18)])
def test_comparison_with_the_published_figures(lab: str, count: int) -> None:
    text = published.comparison_text(made_up(lab, 0))
    assert f"{count} of {count} published figures are equal" in text
    assert ("second run" in text) == (lab == "07")
    moved = made_up(lab, 0.01) | {"digits_not_expected_because": "this is torch 2.13.0, not 2.14.1"}
    text = published.comparison_text(moved)
    assert f"{count - 2} of {count} published figures are equal" in text
    assert "need not be here: this is torch 2.13.0, not 2.14.1" in text


def test_interval_is_scipys() -> None:
    values = [3.0, 4.5, 1.0, 2.0, 2.5]
    mean, sd, low, high = seed_table.interval(values)
    theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (mean, sd) == (pytest.approx(2.6), pytest.approx(np.std(values, ddof=1)))
    assert (low, high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))


def test_conclusions_are_judged_by_the_seeds() -> None:
    def outcomes(shifts: Sequence[float], losses: Sequence[tuple[float, float]]) -> dict[str, str]:
        results = [made_up("07", shift, loss) for shift, loss in zip(shifts, losses, strict=True)]
        return {
            claim.text.split(" (")[0]: seed_table.judge(claim, results).outcome for claim in seed_table.CLAIMS["07"]
        }

    falls = [(4.8, 4.3), (4.9, 4.2), (4.8, 4.4)]
    found = outcomes([0, 1, 2], falls)
    shape = "The small MoCo leaves shape harder to read from h than random weights"
    color = "The small MoCo keeps the colour whole in h"
    loss = "MoCo's loss falls from the first epoch to the last"
    assert found[shape] == "holds"
    assert found[color] == "does not hold"
    assert found["In-batch contrast keeps the colour whole in h"] == "holds"
    assert found[loss] == "holds"
    assert outcomes([60, 61, 62], falls)[shape] == "does not hold"
    assert outcomes([0, 34, 70], falls)[shape] == "not settled"
    many = [(4.8 + 0.01 * i, 4.3) for i in range(7)] + [(4.3, 4.31)]
    assert outcomes([0] * 8, many)[loss] == "holds on average only"
    near = next(claim for claim in seed_table.CLAIMS["06"] if claim.kind == "near")
    for color_shifts, outcome in (
        ([1, 2, 3], "holds"),
        ([-30, -31, -32], "does not hold"),
        ([0, -10, 9], "not settled"),
    ):
        assert seed_table.judge(near, [made_up("06", shift) for shift in color_shifts]).outcome == outcome
    sentence = seed_table.judge(seed_table.CLAIMS["07"][4], [made_up("07", shift) for shift in (0, 20)]).sentence()
    assert sentence.endswith("does not hold, 100 % in 1 of 2 seeds; the lowest is 80.00 %, the mean 90.00 %.")


# ------------------------------------------------------------------------------------------------ the digits

SPREAD = {
    "random": {"h_shape_knn": (72, 79), "z_shape_knn": (60, 72), "h_shape_linear": (52, 70)},
    "keep-hue": {"h_shape_knn": (43, 57), "z_shape_knn": (42, 59), "h_shape_linear": (53, 76)},
    "swap-hue": {
        "h_shape_knn": (72, 93),
        "z_shape_knn": (79, 97),
        "h_color_knn": (47, 56),
        "z_color_knn": (47, 56),
        "h_shape_linear": (93, 99),
    },
    "moco-toy": {"h_shape_knn": (38, 50), "z_shape_knn": (25, 49), "h_shape_linear": (42, 81)},
}
"""Least and greatest of 8 seeds on x86-64 with AVX-512, torch 2.14.1, two threads, in %."""
SPREAD["simclr"] = SPREAD["keep-hue"]


@pytest.fixture(scope="module")
def both_labs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LabResult]:
    out = tmp_path_factory.mktemp("labs")
    return {lab: run_lab(lab, out / lab) for lab in ("06", "07")}


@pytest.mark.slow
@pytest.mark.parametrize("lab", ["06", "07"])
def test_every_published_figure(both_labs: dict[str, LabResult], lab: str) -> None:
    """To the hundredth of a percent where the last bits are those of the published run, else within the seeds' spread.

    240 test images and 400 chaotic steps magnify the last bit of every sum, and torch's sums are ordered by the
    processor's vector width, the thread count and the version.
    """
    results = both_labs[lab].results[0]
    rows = [row for row in published.compare(lab, results["scores"]) if row.first is not None]
    assert len(rows) == {"06": 9, "07": 18}[lab]
    if not why_other_digits():
        assert [f"{row.arm} {row.cell} {row.ours:.2f}" for row in rows] == [
            f"{row.arm} {row.cell} {row.first:.2f}" for row in rows
        ]
        return
    for row in rows:
        low, high = SPREAD[row.arm].get(row.cell, (50, 100))
        assert low - 10 <= row.ours <= high + 10, (row, why_other_digits())


@pytest.mark.slow
def test_the_published_facts_of_the_small_moco(both_labs: dict[str, LabResult]) -> None:
    results = both_labs["07"].results[0]
    loss, change = results["loss_history"]["moco-toy"], results["encoder_weight_l2_change"]["moco-toy"]
    assert [step["queue_size"] for step in results["queue_trace"]] == [60, 120, 180, 240, 240]
    assert results["queue_checks"]["steps"] == 150
    assert results["queue_checks"]["same_source_pairs_left_out"] > 0
    if not why_other_digits():
        assert (f"{loss[0]:.3f}", f"{loss[-1]:.3f}", f"{change:.4f}") == ("4.793", "4.274", "0.7625")
        assert results["queue_checks"]["same_source_pairs_left_out"] == 831
    else:
        assert 4.5 < loss[0] < 5.3
        assert 0.4 < change < 2.2


@pytest.mark.slow
@pytest.mark.parametrize("lab", ["06", "07"])
def test_artefacts(both_labs: dict[str, LabResult], lab: str) -> None:
    out, results = both_labs[lab].path, files.read_json(both_labs[lab].path / "results.json")
    arms = ARMS[lab]
    expected = {"inputs.npz", "config.json", "random-init.safetensors", "views.png", "training-and-probes.png"}
    expected |= {f"{arm}.safetensors" for arm in arms[1:]} | {"results.json", ".lock", "seeds"}
    expected |= {"queue-trace.json", "trace.json"} if lab == "07" else set()
    assert {path.name for path in out.iterdir()} == expected

    assert tuple(results["scores"]) == arms
    assert all(set(scores) == {*CELLS, *COSINES} for scores in results["scores"].values())
    assert set(CELLS) == {f"{s}_{t}_{p}" for s in "hz" for t in ("shape", "color") for p in ("knn", "linear")}
    assert {name: len(losses) for name, losses in results["loss_history"].items()} == dict.fromkeys(arms[1:], 40) | (
        {"moco-toy": 15} if lab == "07" else {}
    )
    for key in ("kind", "utc", "seconds", "code_sha256", "torch", "numpy", "scikit_learn", "python", "threads"):
        assert results[key], key
    assert results["inputs_sha256"] == hashlib.sha256((out / "inputs.npz").read_bytes()).hexdigest()
    with np.load(out / "inputs.npz") as inputs:
        assert hashlib.sha256(inputs["images"].tobytes()).hexdigest() == results["images_sha256"] == PUBLISHED_SHA256
        assert (len(inputs["train_ids"]), len(inputs["test_ids"])) == (600, 240)

    # the weights on disk are those that were read out
    last = safetensors.torch.load_file(out / f"{arms[2]}.safetensors")
    encoder = first_encoder(0)
    with two_threads():
        if lab == "06":
            encoder.load_state_dict(last)
        else:
            encoder.load_state_dict({n.removeprefix("query."): t for n, t in last.items() if n.startswith("query.")})
            assert last["queue"].shape == (240, 24)
            assert last["queue_ids"].dtype == torch.int64
            assert set(last["queue_births"].tolist()) == {146, 147, 148, 149}
            key = {n.removeprefix("key."): t for n, t in last.items() if n.startswith("key.")}
            assert set(key) == set(encoder.state_dict())
            assert not torch.equal(key["head.0.weight"], encoder.state_dict()["head.0.weight"])
            assert files.read_json(out / "queue-trace.json") == results["queue_trace"]
        assert read_out(encoder, generate()) == results["scores"][arms[2]]


@pytest.mark.slow
def test_what_the_librarys_own_pieces_would_read(both_labs: dict[str, LabResult]) -> None:
    """Each deviation alone undone. Only the last bits differ, and still some of 240 images fall to the other side."""
    ours = both_labs["07"].results[0]["scores"]["moco-toy"]
    library = {
        "lerp": Pieces(ema_=ema_update_),
        "ring": Pieces(read=KeyQueue.snapshot),
        "info_nce": Pieces(loss=info_nce),
    }
    found = {}
    with two_threads():
        data, images, train_ids, initial = start(streams())
        for name, pieces in library.items():
            trained = train_moco(initial, images, train_ids, streams().moco, pieces=pieces)
            check_queue(trained.steps)
            found[name] = {cell: 100 * value for cell, value in read_out(trained.encoder, data).items()}
    for scores in found.values():
        for cell in CELLS:
            assert abs(scores[cell] - 100 * ours[cell]) < 15
    if why_other_digits():
        return
    assert f"{found['lerp']['h_shape_knn']:.2f}" == "37.92"
    assert f"{found['ring']['z_shape_linear']:.2f}" == "41.67"
    assert all(f"{found['info_nce'][cell]:.2f}" == f"{100 * ours[cell]:.2f}" for cell in CELLS)  # the bits differ
