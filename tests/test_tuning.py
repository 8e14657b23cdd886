"""Fine-tuning: what it learns, what decides it, and the few-label curve from start to prediction."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.optimize import minimize_scalar

import mocokit
from mocokit import files
from mocokit.contrast.backbones import build_backbone
from mocokit.contrast.encoders import EncoderConfig, build_encoder
from mocokit.data.pixels import PixelStore
from mocokit.data.views import ViewConfig, view_recipe
from mocokit.errors import DamagedError, DataError, LockedError, UsageError
from mocokit.evaluation.budgets import Budget, hold_out, parse_budgets
from mocokit.evaluation.curve import FINE_TUNED, FROM_SCRATCH, CurvePoint, labels_to_match
from mocokit.evaluation.interval import Interval
from mocokit.evaluation.tuned_folder import load_tuned
from mocokit.evaluation.tuning import (
    Task,
    TuneSettings,
    fit_temperature,
    layer_groups,
    mild_views,
    predict_logits,
    tune,
)
from mocokit.training.run import Run
from tests.toy import OPTIONS, contents, labelled_npz, pictures

# --------------------------------------------------------------------------------------------------- budgets


def test_budgets_from_words() -> None:
    assert parse_budgets("5, 10,all", None) == (Budget(per_class=5), Budget(per_class=10), Budget())
    assert parse_budgets(None, "0.01,1") == (Budget(share=0.01), Budget())
    assert [b.name for b in parse_budgets(None, "0.015,0.5,1")] == ["1.5%", "50%", "all"]


@pytest.mark.parametrize(
    ("per_class", "fraction", "says"),
    [
        (None, None, "either as"),
        ("1", "0.1", "either as"),
        ("0,5", None, "Got '0'"),
        ("1.5", None, "Got '1.5'"),
        (None, "0", "Got '0'"),
        (None, "2", "Got '2'"),
        (None, "x", "Got 'x'"),
        ("5,5", None, "named twice"),
    ],
)
def test_budgets_that_cannot_be_meant(per_class: str | None, fraction: str | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_budgets(per_class, fraction)


@given(
    seed=st.integers(0, 1000), share=st.floats(0.01, 0.9), counts=st.lists(st.integers(1, 40), min_size=2, max_size=5)
)
@settings(max_examples=40, deadline=None)
def test_a_share_is_of_every_class_and_a_smaller_one_is_a_part(seed: int, share: float, counts: list[int]) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    ids = np.random.default_rng(seed).permutation(len(labels)).astype(np.int64)
    rows = Budget(share=share).draw(labels, ids, 3, seed, [])
    assert np.bincount(labels[rows]).tolist() == [max(1, round(share * count)) for count in counts]
    assert set(Budget(share=share / 2).draw(labels, ids, 3, seed, [])) <= set(rows)
    assert Budget().draw(np.append(labels, -1), np.append(ids, 999), 3, seed, []).tolist() == list(range(len(labels)))


@given(seed=st.integers(0, 1000), per_class=st.integers(1, 30), classes=st.integers(2, 6), twins=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_fifth_is_held_out_and_no_class_is_lost(seed: int, per_class: int, classes: int, twins: bool) -> None:
    labels = np.repeat(np.arange(classes), per_class)
    units = np.arange(len(labels)) // (2 if twins else 1)
    held = hold_out(labels, units, seed)
    assert set(labels[~held]) == set(range(classes))
    assert not set(units[held]) & set(units[~held]) or twins
    if per_class >= 5 and not twins:
        assert abs(held.sum() - len(labels) / 5) <= 1


# ---------------------------------------------------------------------------------------------------- tuning


def bright_and_dark(count: int, seed: int = 0) -> tuple[PixelStore, np.ndarray]:
    """Pictures of two classes that differ in which half is bright."""
    labels = np.arange(count) % 2
    images = (pictures(count, seed=seed) // 2).astype(np.int64)
    images[labels == 0, :8] += 80
    images[labels == 1, 8:] += 80
    store = PixelStore(
        pixels=images.astype(np.uint8).transpose(0, 3, 1, 2).copy(),
        extents=np.full((count, 2), 16, np.int32),
        replaced=np.arange(count),
        skipped=(),
    )
    return store, labels


def make_task(count: int = 80, seed: int = 0) -> Task:
    store, labels = bright_and_dark(count, seed)
    ids = np.arange(count, dtype=np.int64) + 1000
    return Task(
        store=store,
        ids=ids,
        labels=labels,
        units=ids,
        n_classes=2,
        views=ViewConfig(size=16, crop_area=(0.8, 1.0)),
        device=torch.device("cpu"),
    )


def backbone(seed: int = 0) -> torch.nn.Module:
    return build_encoder(EncoderConfig(backbone="small-cnn-8-16", dim=4), image_size=16, seed=seed).backbone


SETTINGS = TuneSettings(lr=(0.003, 0.01), steps=40, batch_size=16)


def test_it_learns_what_can_be_seen_is_repeatable_and_leaves_the_backbone_alone() -> None:
    task, network = make_task(), backbone()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    held, fit, test = np.arange(8), np.arange(8, 40), np.arange(40, 80)
    first = tune(network, task, fit, held, SETTINGS, seed=5, pretrained=True)
    logits = predict_logits(first.model, task, test)
    assert (logits.argmax(1).numpy() == task.labels[test]).mean() >= 0.9
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert first.lr in SETTINGS.lr
    assert 0 <= first.steps <= 40
    assert first.held_loss is not None
    assert first.temperature == 1  # eight labels are too few for one
    again = tune(network, task, fit, held, SETTINGS, seed=5, pretrained=True)
    torch.testing.assert_close(predict_logits(again.model, task, test), logits, rtol=0, atol=0)
    other = tune(network, task, fit, held, SETTINGS, seed=6, pretrained=True)
    assert other.steps == 0 or not torch.equal(predict_logits(other.model, task, test), logits)


def test_only_the_labels_it_was_given_matter() -> None:
    task = make_task()
    held, fit = np.arange(8), np.arange(8, 40)
    hidden = task.labels.copy()
    hidden[40:] = -1
    blind = Task(**{name: getattr(task, name) for name in Task.__slots__} | {"labels": hidden})  # type: ignore[attr-defined]
    results = [tune(backbone(), one, fit, held, SETTINGS, seed=1, pretrained=False) for one in (task, blind)]
    a, b = (predict_logits(one.model, task, np.arange(80)) for one in results)
    assert torch.equal(a, b)


def test_without_held_out_labels_all_steps_are_taken() -> None:
    got = tune(backbone(), make_task(), np.arange(4), np.arange(0), SETTINGS, seed=0, pretrained=True)
    assert (got.lr, got.steps, got.held_loss, got.held_ece) == (0.003, 40, None, None)


def test_small_batches_leave_pretrained_statistics_alone() -> None:
    network = backbone()
    got = tune(network, make_task(), np.arange(4), np.arange(0), SETTINGS, seed=0, pretrained=True)
    mine = dict(got.model.backbone.named_buffers())
    assert all(torch.equal(mine[name], buffer) for name, buffer in network.named_buffers())
    scratch = tune(network, make_task(), np.arange(4), np.arange(0), SETTINGS, seed=0, pretrained=False)
    moved = dict(scratch.model.backbone.named_buffers())
    assert any(not torch.equal(moved[name], buffer) for name, buffer in network.named_buffers())


@pytest.mark.parametrize(
    ("name", "groups"), [("small-cnn-8-16-32", 3), ("resnet18", 5), ("timm:vit_tiny_patch16_224", 13), ("vit_b_16", 13)]
)
def test_every_parameter_is_in_one_group_from_the_image_upwards(name: str, groups: int) -> None:
    network = build_backbone(name, "standard", 32)
    found = layer_groups(network)
    assert sorted(id(p) for group in found for p in group) == sorted(id(p) for p in network.parameters())
    assert len(found) == groups
    first = next(p for p in network.parameters() if p.ndim == 4)
    assert any(p is first for p in found[0] + found[1])


def test_layers_near_the_image_move_less() -> None:
    task, network = make_task(), backbone()
    slow = TuneSettings(lr=(0.003,), steps=10, batch_size=16, layer_decay=0.01, weight_decay=0.0)
    got = tune(network, task, np.arange(40), np.arange(0), slow, seed=0, pretrained=True)

    def moved(layer: str) -> float:
        return float((got.model.backbone.state_dict()[layer] - network.state_dict()[layer]).abs().max())

    assert 0 < moved("trunk.0.weight") < 0.05 * moved("trunk.3.weight")


def test_mild_views_keep_what_carries_labels() -> None:
    strong = view_recipe("moco-v2", 32)
    mild = mild_views(strong)
    assert mild.crop_area is None
    assert (mild.jitter, mild.grayscale, mild.blur, mild.channel_swap, mild.noise) == (0, 0, 0, 0, 0)
    assert (mild.mean, mild.std, mild.size, mild.flip) == (strong.mean, strong.std, 32, 0.5)
    assert mild_views(view_recipe("mnist-like", 24)).flip == 0


def test_the_temperature_is_the_likeliest() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(200, 4)) * 6)
    labels = torch.from_numpy(np.where(rng.random(200) < 0.6, logits.argmax(1).numpy(), rng.integers(0, 4, 200)))

    def loss(power: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / math.exp(power), labels))

    best = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9})
    assert fit_temperature(logits, labels) == pytest.approx(math.exp(best.x), rel=1e-4)
    assert fit_temperature(logits, logits.argmax(1)) == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"lr": (0.0,)}, "--lr must be above 0"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"batch_size": 1}, "--batch-size must be at least 2"),
        ({"layer_decay": 0.0}, "--layer-decay must lie above 0"),
        ({"weight_decay": -1.0}, "--weight-decay must be 0 or more"),
    ],
)
def test_settings_out_of_range(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TuneSettings(**values)


# ------------------------------------------------------------------------------------------- labels that match


def point(arm: str, labels: int, accuracy: float, spread: float = 0.0) -> CurvePoint:
    one = Interval(mean=accuracy, low=accuracy - spread, high=accuracy + spread, df=1, this_run_only=True)
    return CurvePoint(
        arm=arm,
        budget=str(labels),
        labels=labels,
        accuracy=one,
        balanced_accuracy=one,
        macro_f1=one,
        ece=None,
        delta=None,
        outcome=None,
    )


def test_labels_to_match_are_read_off_the_curve_from_scratch() -> None:
    scratch = [point(FROM_SCRATCH, 10, 0.4), point(FROM_SCRATCH, 40, 0.6), point(FROM_SCRATCH, 160, 0.7)]
    tuned = [point(FINE_TUNED, 10, 0.5, 0.05), point(FINE_TUNED, 40, 0.65, 0.1), point(FINE_TUNED, 160, 0.8)]
    one, two, three = labels_to_match([*tuned, *scratch])
    assert one.equal == pytest.approx(20)  # half-way in the logarithm
    assert (one.low, one.high) == (pytest.approx(10 * 4**0.25), pytest.approx(10 * 4**0.75))
    assert two.equal == pytest.approx(80)
    assert two.high is None
    assert "40 labels fine-tuned: as good as 80 from scratch [" in two.text(160)
    assert two.text(160).endswith("more than 160]")
    assert three.equal is None
    assert three.text(160) == "160 labels fine-tuned: not reached from scratch with 160"


def test_a_curve_that_falls_has_one_answer_and_a_bad_start_is_at_most() -> None:
    scratch = [point(FROM_SCRATCH, 10, 0.5), point(FROM_SCRATCH, 40, 0.4), point(FROM_SCRATCH, 160, 0.6)]
    worse, better = labels_to_match([*scratch, point(FINE_TUNED, 10, 0.3), point(FINE_TUNED, 40, 0.55)])
    assert worse.at_most
    assert "at most 10 from scratch" in worse.text(160)
    assert better.equal == pytest.approx(80)


# ------------------------------------------------------------------------------------------ the whole of it


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return labelled_npz(tmp_path_factory.mktemp("labelled") / "two.npz")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory, labelled: Path) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        mocokit.pretrain(labelled, folder / f"run{seed}", quiet=True, **(OPTIONS | {"epochs": 1, "seed": seed}))
        for seed in range(2)
    ]


QUICK = TuneSettings(lr=(0.003,), steps=10, batch_size=16)


def finetune(runs: Any, labelled: Path, out: Path, **changes: Any) -> Any:
    plan = {"labels_per_class": "2,10", "draws": 1, "settings": QUICK, "quiet": True}
    return mocokit.finetune(runs, labelled, out, **(plan | changes))


def test_a_curve_is_written_down_and_goes_on_where_it_stopped(
    seeds: list[Run], labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(seeds[0].path, tmp_path / "run")
    whole = finetune(run, labelled, tmp_path / "whole")
    written = json.loads((tmp_path / "whole" / "curve.json").read_text())
    assert written == whole.values
    assert [(p["labels"], p["arm"]) for p in whole.points][:4] == [
        (4, arm) for arm in ("fine-tuned", "from scratch", "frozen probe", "frozen random init")
    ]
    assert {p["labels"] for p in whole.points} == {4, 20}
    for p in whole.points:
        assert p["accuracy"]["ci95"][0] <= p["accuracy"]["score"] <= p["accuracy"]["ci95"][1]
        assert (p["delta_to_scratch"] is None) == (p["arm"] == "from scratch")
    with (tmp_path / "whole" / "curve.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 8
    with Image.open(tmp_path / "whole" / "curve.png") as picture:
        assert picture.size[0] > 300
    assert not list((tmp_path / "whole" / "cells").glob("*.safetensors"))
    ledger = [json.loads(line) for line in (run / "eval" / "ledger.jsonl").read_text().splitlines()]
    assert [line["purpose"] for line in ledger if line["split"] == "test"] == ["few-label curve"]
    before = contents(tmp_path / "whole")
    again = finetune(run, labelled, tmp_path / "whole")
    assert again.values == whole.values
    assert contents(tmp_path / "whole") == before
    assert len((run / "eval" / "ledger.jsonl").read_text().splitlines()) == len(ledger)

    # Stopped in the middle: the fifth cell's writing is interrupted, and then it is done again.
    original, calls = files.write_text, []

    def stop(path: Path, text: str) -> None:
        if path.parent.name == "cells":
            calls.append(path.name)
            if len(calls) == 5:
                raise KeyboardInterrupt
        original(path, text)

    monkeypatch.setattr(files, "write_text", stop)
    with pytest.raises(KeyboardInterrupt):
        finetune(run, labelled, tmp_path / "stopped")
    assert len(list((tmp_path / "stopped" / "cells").glob("*.json"))) == 4
    finetune(run, labelled, tmp_path / "stopped")
    monkeypatch.undo()
    assert len(calls) == 5 + 4
    for name in ("curve.json", "curve.csv", "model/model.safetensors", "model/config.json"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_several_seeds_are_rows_of_the_interval(seeds: list[Run], labelled: Path, tmp_path: Path) -> None:
    runs = [shutil.copytree(run.path, tmp_path / run.path.name) for run in seeds]
    result = finetune(runs, labelled, tmp_path / "ft", labels_per_class=None, label_fraction="0.2,1", draws=2)
    assert result.values["seeds"] == 2
    assert "2 seeds" in result.table
    assert {p["budget"] for p in result.points} == {"20%", "all"}
    cells = result.values["cells"]
    assert len(cells) == 2 * 4 * (2 + 1)
    # Accuracy is the mean over all cells of an arm.
    truth = np.load(labelled)["labels"][np.load(labelled)["split"] == "test"]
    mine = [json.loads(p.read_text()) for p in sorted((tmp_path / "ft" / "cells").glob("from-scratch-20%*.json"))]
    expected = np.mean([np.mean(np.array(one["predicted"]) == truth) for one in mine])
    (told,) = [p for p in result.points if (p["arm"], p["budget"]) == ("from scratch", "20%")]
    assert told["accuracy"]["score"] == pytest.approx(expected)


def test_predictions_are_those_of_the_model(seeds: list[Run], labelled: Path, tmp_path: Path) -> None:
    run = shutil.copytree(seeds[0].path, tmp_path / "run")
    result = finetune(run, labelled, tmp_path / "ft", labels_per_class="20", draws=1)
    model = load_tuned(tmp_path / "ft")
    assert model.class_names == ("0", "1")
    found = mocokit.predict(tmp_path / "ft", labelled, tmp_path / "p.csv", quiet=True)
    with (tmp_path / "p.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["id", "path", "class", "probability"]
    assert found.images == len(rows) == 120
    assert sum(found.counts.values()) == 120
    (cell,) = [
        json.loads((tmp_path / "ft" / "cells" / f"{name}.json").read_text())
        for name in result.values["cells"]
        if name.startswith("fine-tuned")
    ]
    test = np.load(labelled)["split"] == "test"
    mine = [row for row, one in zip(rows, test, strict=True) if one]
    assert [row["class"] for row in mine] == [str(one) for one in cell["predicted"]]
    np.testing.assert_allclose([float(row["probability"]) for row in mine], cell["confidence"], atol=2e-5)
    assert found.ece["test"] == result.values["model"]["test_ece"]
    (tmp_path / "out.txt").write_text("".join(f"{row['path']}\n" for row in rows[:5]))
    less = mocokit.predict(tmp_path / "ft", labelled, tmp_path / "less.csv", exclude=tmp_path / "out.txt", quiet=True)
    assert less.images == 115
    (tmp_path / "ft" / "model" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(DamagedError):
        mocokit.predict(tmp_path / "ft", labelled, tmp_path / "p.csv", quiet=True)


def test_an_image_that_cannot_be_read_has_no_class(
    seeds: list[Run], labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(seeds[0].path, tmp_path / "run")
    finetune(run, labelled, tmp_path / "ft", labels_per_class="5", draws=1)
    (tmp_path / "new").mkdir()
    for number, image in enumerate(pictures(3)):
        Image.fromarray(image).save(tmp_path / "new" / f"{number}.png")
    (tmp_path / "new" / "bad.png").write_bytes(b"not a picture")
    found = mocokit.predict(tmp_path / "ft", tmp_path / "new", tmp_path / "p.csv", quiet=True)
    assert (found.images, found.unreadable, sum(found.counts.values())) == (4, 1, 3)
    assert "1 of 4 images could not be read" in capsys.readouterr().err
    with (tmp_path / "p.csv").open() as stream:
        (bad,) = [row for row in csv.DictReader(stream) if row["path"] == "bad.png"]
    assert (bad["class"], bad["probability"]) == ("", "")


def test_what_cannot_be_done_is_said(seeds: list[Run], labelled: Path, tmp_path: Path) -> None:
    run = seeds[0]
    with pytest.raises(DataError, match="fewer than the 500 per class"):
        finetune(run, labelled, tmp_path / "ft", labels_per_class="5,500")
    assert not (tmp_path / "ft").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="full is not empty and holds no fine-tuning"):
        finetune(run, labelled, tmp_path / "full")
    with pytest.raises(UsageError, match=r"--draws must be at least 1"):
        finetune(run, labelled, tmp_path / "ft", draws=0)
    (tmp_path / "busy").mkdir()
    with files.RunLock(tmp_path / "busy"), pytest.raises(LockedError):
        finetune(run, labelled, tmp_path / "busy")
    with pytest.raises(UsageError, match="is no folder made by `mocokit finetune`"):
        mocokit.predict(run.path, labelled, tmp_path / "p.csv", quiet=True)
    copy = shutil.copytree(run.path, tmp_path / "run")
    finetune(copy, labelled, tmp_path / "ft", labels_per_class="2", draws=1)
    with pytest.raises(UsageError, match=r"holds a fine-tuning under another plan \(draws: 1 there, 2 now"):
        finetune(copy, labelled, tmp_path / "ft", labels_per_class="2", draws=2)
    (tmp_path / "dir").mkdir()
    with pytest.raises(UsageError, match="dir is a folder"):
        mocokit.predict(tmp_path / "ft", labelled, tmp_path / "dir", quiet=True)
