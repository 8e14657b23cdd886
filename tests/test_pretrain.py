"""Whole tiny runs: what they leave behind, how they go on after a stop, and what evaluation says about them."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shutil
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mocokit
from mocokit import api, files
from mocokit.api.planning import masked_share
from mocokit.cli import main
from mocokit.data.loader import Batch, BatchLoader, BatchPlan
from mocokit.errors import DataError, StorageError, UsageError
from mocokit.training.run import Run
from mocokit.training.runfolder import foreign_files
from mocokit.training.runlog import read_losses, read_metrics
from tests.toy import OPTIONS, STEPS, contents, flip_bit, labelled_npz, npz, pictures, verified_steps


def pretrain(data: Path | str, out: Path, **changes: Any) -> Run:
    return mocokit.pretrain(data, out, quiet=True, **(OPTIONS | changes))


def clockless(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what a clock says, and without the ages that a resumed probe counts anew."""
    clock = ("utc", "images_per_second", "data_wait")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.get("health", {}).pop("staleness", None)
    return [{name: value for name, value in row.items() if name not in clock} for row in rows]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npz(tmp_path_factory.mktemp("data") / "toy.npz")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return labelled_npz(tmp_path_factory.mktemp("labelled") / "two.npz")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was never interrupted."""
    return pretrain(data, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def seeds(labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two runs on the training split of the labelled data that differ in their seed only."""
    folder = tmp_path_factory.mktemp("seeds")
    return [pretrain(labelled, folder / str(seed), seed=seed, monitor=str(labelled)) for seed in (0, 1)]


# --------------------------------------------------------------------------------------- what a run leaves behind


def test_a_run_leaves_what_it_says(whole: Run) -> None:
    names = set(contents(whole.path))
    assert names == {
        ".lock", "run.json", "config.yaml", "command.txt", "environment.json", "status.json", "loss.jsonl",
        "metrics.jsonl", "results.csv", "results.png", "skipped.jsonl", "images.npy", "cache/pixels.u8",
        "cache/pixels.u8.json", "samples/pairs0.png",
        *(f"checkpoints/step-{step}/{name}" for step in (8, 12)
          for name in ("model.safetensors", "optim.safetensors", "state.json", "MANIFEST.json")),
    }  # fmt: skip
    assert foreign_files(whole.path) == []
    assert (whole.step, whole.found.path.name, whole.found.passed_over) == (STEPS, "step-12", ())
    status = json.loads((whole.path / "status.json").read_text())
    assert (status["state"], status["step"], status["total_steps"], status["message"]) == ("completed", 12, 12, "")
    assert (whole.path / "skipped.jsonl").read_bytes() == b""
    for picture in ("results.png", "samples/pairs0.png"):
        assert (whole.path / picture).read_bytes().startswith(b"\x89PNG")


def test_the_loss_log_has_every_step_and_no_clock(whole: Run) -> None:
    losses = read_losses(whole.folder)
    assert [line["step"] for line in losses] == list(range(STEPS))
    assert {tuple(line) for line in losses} == {("step", "loss", "chance", "lr", "m", "fill", "masked")}
    assert all(math.isfinite(line["loss"]) for line in losses)
    assert [line["fill"] for line in losses] == [min(8 * (step + 1), 20) for step in range(STEPS)]
    # The first step contrasts with the batch itself, its own key left out; then with all earlier keys of others.
    assert losses[0]["chance"] == pytest.approx(math.log(8), rel=1e-12)
    assert losses[1]["chance"] == pytest.approx(math.log(9), rel=1e-12)
    assert all(math.log(13) <= line["chance"] <= math.log(21) for line in losses[3:])


def test_the_table_is_the_metrics(whole: Run) -> None:
    rows = read_metrics(whole.folder)
    with (whole.path / "results.csv").open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [{name: str(value) for name, value in row.items()} for row in rows] == table
    assert [row["epoch"] for row in rows] == [1.0, 2.0]


def test_what_it_ran_on_names_no_place_and_no_person(whole: Run) -> None:
    environment = json.loads((whole.path / "environment.json").read_text())
    assert torch.__version__.startswith(environment["packages"]["torch"])
    assert str(Path.home()) not in json.dumps(environment)


def test_no_file_of_a_run_can_run_code(whole: Run) -> None:
    for name, content in contents(whole.path).items():
        assert not content.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")), name
        if not name.endswith((".png", ".u8", ".npy", ".safetensors")):
            content.decode("utf-8")


def test_the_same_command_gives_the_same_bytes(whole: Run, data: Path, tmp_path: Path) -> None:
    again = pretrain(data, tmp_path / "again", workers=3)
    assert (again.path / "loss.jsonl").read_bytes() == (whole.path / "loss.jsonl").read_bytes()
    one, other = ((r.found.path / "model.safetensors").read_bytes() for r in (whole, again))
    assert one == other
    assert clockless(again.path) == clockless(whole.path)
    seeded = pretrain(data, tmp_path / "seeded", seed=1, epochs=1)
    assert read_losses(seeded.folder)[0]["loss"] != read_losses(whole.folder)[0]["loss"]


def test_options_come_as_keywords_or_together(data: Path, tmp_path: Path, whole: Run) -> None:
    together = mocokit.pretrain(
        data, tmp_path / "run", options=mocokit.PretrainOptions(**OPTIONS), quiet=True, epochs=1
    )
    assert dataclasses.replace(together.config, train=whole.config.train) == whole.config
    with pytest.raises(UsageError, match=r"no option 'epoch'. Did you mean 'epochs'"):
        mocokit.pretrain(data, tmp_path / "x", epoch=1)
    with pytest.raises(UsageError, match=r"epochs must be a whole number. Got 'many'"):
        pretrain(data, tmp_path / "x", epochs="many")


def test_normalisation_is_measured_unless_the_file_says_otherwise(data: Path, whole: Run, tmp_path: Path) -> None:
    with np.load(data) as arrays:
        pixels = arrays["images"].reshape(-1, 3) / 255
    assert whole.config.views.mean == pytest.approx(pixels.mean(0), abs=1e-5)
    assert whole.config.views.std == pytest.approx(pixels.std(0), abs=1e-5)
    (tmp_path / "c.yaml").write_text("views: {mean: [0.1, 0.2, 0.3]}\n")
    run = pretrain(data, tmp_path / "run", config_file=tmp_path / "c.yaml", epochs=1)
    assert run.config.views.mean == (0.1, 0.2, 0.3)
    assert run.config.views.std == whole.config.views.std


def test_a_runs_own_config_repeats_it_on_the_same_data(data: Path, whole: Run, tmp_path: Path) -> None:
    run = mocokit.pretrain(data, tmp_path / "run", config_file=whole.path / "config.yaml", quiet=True)
    assert dataclasses.replace(run.config, execution=whole.config.execution) == whole.config
    assert (run.path / "loss.jsonl").read_bytes() == (whole.path / "loss.jsonl").read_bytes()


# ---------------------------------------------------------------------------------------------------- resuming


class Stopped(Exception):  # noqa: N818
    """Stands for a kill: nothing of ours catches it."""


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = BatchLoader.batches

    def batches(self: BatchLoader, start: int, stop: int) -> Iterator[Batch]:
        for batch in original(self, start, stop):
            if batch.step == step:
                raise Stopped
            yield batch

    monkeypatch.setattr(BatchLoader, "batches", batches)


@pytest.mark.parametrize("step", [0, 3, 4, 6, 7, 11])
def test_a_run_stopped_anywhere_goes_on_to_the_same_bytes(
    whole: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    out = tmp_path / "run"
    stop_at(step, monkeypatch)
    with pytest.raises(Stopped):
        pretrain(data, out)
    assert (out / "loss.jsonl").read_bytes().count(b"\n") == step
    assert verified_steps(out / "checkpoints") == [s for s in (4, 8) if s <= step]
    assert json.loads((out / "status.json").read_text())["state"] == "failed"
    monkeypatch.undo()
    pretrain(data, out, resume=True, workers=0)
    for name in ("loss.jsonl", *(f"checkpoints/step-12/{part}" for part in ("model.safetensors", "optim.safetensors"))):
        assert (out / name).read_bytes() == (whole.path / name).read_bytes()
    assert clockless(out) == clockless(whole.path)
    assert json.loads((out / "status.json").read_text())["state"] == "completed"


def test_resuming_a_complete_run_changes_nothing(whole: Run, data: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole.path, tmp_path / "run")
    before = contents(out)
    run = pretrain(data, out, resume=True)
    assert run.step == STEPS
    after = contents(out)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} <= {".lock", "status.json", "results.png"}


def test_the_data_may_move_but_not_change(tmp_path: Path) -> None:
    first = npz(tmp_path / "a.npz")
    run = pretrain(first, tmp_path / "run", epochs=1)
    moved = first.rename(tmp_path / "moved.npz")
    assert pretrain(moved, run.path, resume=True, epochs=1).step == 6
    before = contents(run.path)
    for number, changed in enumerate((npz(tmp_path / "b.npz", 51), npz(tmp_path / "c.npz", 50))):
        if number == 1:
            pixels = np.load(changed)["images"].copy()
            pixels[7, 3, 3, 0] ^= 1
            np.savez(changed, images=pixels)
        with pytest.raises(DataError, match=r"The images of .*\.npz are not those the run started with \(50 then"):
            pretrain(changed, run.path, resume=True, epochs=1)
    assert {n: d for n, d in contents(run.path).items() if n != ".lock"} == {
        n: d for n, d in before.items() if n != ".lock"
    }


def test_changed_data_are_listed_and_taken_when_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, picture in enumerate(pictures(24)):
        Image.fromarray(picture).save(folder / f"{number:02d}.png")
    changes = {"batch_size": 8, "epochs": 4, "checkpoint_every": 3}
    run = pretrain(folder, tmp_path / "run", **changes)
    shutil.rmtree(run.path / "checkpoints" / "step-12")
    Image.fromarray(pictures(1)[0]).save(folder / "new.png")
    (folder / "03.png").unlink()
    Image.fromarray(pictures(40)[39]).save(folder / "04.png")
    with pytest.raises(DataError, match=r"24 then, 24 now: 1 added .*'new.png'.*, 1 changed .*'04.png'.*, 1 missing"):
        pretrain(folder, run.path, resume=True, **changes)
    words = ["pretrain", str(folder), "--out", str(run.path), "-q", "--accept-data-change"]
    assert main(words) == 2
    assert "no effect without --resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    again = mocokit.load_run(run.path)
    assert again.step == 12
    assert again.config.data.index_hash != run.config.data.index_hash
    noted = json.loads((run.path / "data-changes.jsonl").read_text())
    assert (noted["step"], noted["images"]) == (9, [24, 24])
    assert foreign_files(run.path) == []
    # An older checkpoint, from before the change, is still one of this run's.
    shutil.rmtree(run.path / "checkpoints" / "step-12")
    pretrain(folder, run.path, resume=True, **changes)
    assert mocokit.verify(run.path).whole


def test_another_torch_is_remarked_on(
    whole: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(whole.path, tmp_path / "run")
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    mocokit.pretrain(data, out, resume=True, **OPTIONS)
    assert f"made with torch {whole.found.manifest['torch']}, this is 9.9.9" in capsys.readouterr().err


def test_a_pixel_cache_that_was_damaged_or_removed_is_made_anew(whole: Run, data: Path, tmp_path: Path) -> None:
    for number, harm in enumerate((lambda p: flip_bit(p, 9999), lambda p: p.unlink(), lambda p: p.write_bytes(b""))):
        out = shutil.copytree(whole.path, tmp_path / str(number))
        shutil.rmtree(out / "checkpoints" / "step-12")
        harm(out / "cache" / "pixels.u8")
        pretrain(data, out, resume=True)
        for name in ("loss.jsonl", "checkpoints/step-12/model.safetensors", "cache/pixels.u8"):
            assert (out / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_failing_disk_stops_the_run_with_the_reason(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = files.commit_folder
    commits: list[str] = []

    def commit(final: Path, *rest: Any) -> None:
        commits.append(final.name)
        if len(commits) == 2:
            monkeypatch.setattr(files, "_fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        original(final, *rest)

    monkeypatch.setattr(files, "commit_folder", commit)
    with pytest.raises(StorageError, match=r"Could not write .*step-8: Input/output error"):
        pretrain(data, tmp_path / "run")
    monkeypatch.undo()
    assert verified_steps(tmp_path / "run" / "checkpoints") == [4]
    assert pretrain(data, tmp_path / "run", resume=True).step == STEPS


# ---------------------------------------------------------------------------------------- the curve and the plan


def test_the_curve_reads_validation_images_only_and_is_in_the_ledger(seeds: list[Run]) -> None:
    for run in seeds:
        rows = read_metrics(run.folder)
        assert all(0 <= row["knn_h"] <= 1 and 0 <= row["knn_z"] <= 1 for row in rows)
        ledger = [json.loads(line) for line in (run.folder.evaluation / "ledger.jsonl").read_text().splitlines()]
        readings = [line for line in ledger if line["purpose"] == "curve during training"]
        assert [line["split"] for line in readings] == ["val"] * len(rows)
        assert run.config.data.split == "train"
        assert run.config.data.images == 60


def test_a_plan_is_what_a_run_becomes(whole: Run, data: Path, tmp_path: Path) -> None:
    plan = mocokit.plan(data, **OPTIONS)
    assert (plan.images, plan.steps_per_epoch, plan.total_steps) == (50, 6, STEPS)
    assert plan.queue_life_steps == 20 / 8
    assert plan.chance_loss == pytest.approx(math.log(21))
    assert plan.parameters == sum(p.numel() for p in whole.encoder().parameters())
    assert plan.seconds > 0
    assert plan.config.contrast == whole.config.contrast
    stored = (whole.found.path / "model.safetensors").stat().st_size
    assert plan.state_bytes == pytest.approx(stored + 4 * plan.parameters, rel=0.35)
    json.dumps(plan.to_dict(), allow_nan=False)


def test_the_own_keys_a_plan_expects_are_those_that_are_met() -> None:
    """K^2 / 2 S^2 of the queries meet an older key of their own: a formula against counting, in the real order."""
    S, K, N = 4000, 1000, 20
    plan = BatchPlan(np.arange(S, dtype=np.int64), N, 0)
    queue: deque[int] = deque(maxlen=K)
    met = asked = 0
    for step in range(4 * plan.steps_per_epoch):
        rows = plan.rows(step).tolist()
        if step >= plan.steps_per_epoch:  # in the first epoch everything is new
            met += len(set(rows) & set(queue))
            asked += N
        queue.extend(rows)
    assert met / asked == pytest.approx(masked_share(K, S), rel=0.1)


# --------------------------------------------------------------------------------------------------- evaluation

VERDICT_KEYS = {
    "verdict", "metric", "score", "score_ci95", "baseline", "baselines", "delta", "ci95", "n_test", "seeds", "readout",
    "encoder", "step", "this_run_only", "draws", "labels_per_class", "scores", "chance", "test_readings",
    "pretraining_saw_test_images", "pretraining_overlap", "near_twins", "verdicts", "tables", "weights", "judged",
}  # fmt: skip


def evaluate(runs: Any, labelled: Path, **changes: Any) -> Any:
    return mocokit.evaluate(runs, labelled, quiet=True, **({"labels_per_class": 3, "draws": 4} | changes))


def test_an_evaluation_is_written_down(seeds: list[Run], labelled: Path, tmp_path: Path) -> None:
    run = shutil.copytree(seeds[0].path, tmp_path / "run")
    result = evaluate(run, labelled)
    written = json.loads((run / "eval" / "verdict.json").read_text())
    assert written == json.loads(json.dumps(result.to_dict()))
    assert written.keys() == VERDICT_KEYS
    assert (written["n_test"], written["seeds"], written["draws"], written["this_run_only"]) == (40, 1, 4, True)
    assert written["chance"] == 0.5
    assert written["pretraining_saw_test_images"].startswith("no: pretraining used the train split")
    assert {"h", "z", "key-h", "key-z", "pixels"} <= written["scores"].keys()
    # The classes differ in brightness, which pixels show.
    assert written["scores"]["pixels"]["score"] > 0.9
    table = (run / "eval" / "knn.csv").read_text().splitlines()
    assert table[0].startswith("method,accuracy,low,high,balanced_accuracy,")
    assert {line.split(",")[0] for line in table[1:]} == set(written["scores"])
    assert written["test_readings"] == 1
    assert evaluate(run, labelled).test_readings == 2
    assert foreign_files(run) == []
    line = api.table_and_verdict(result).splitlines()[-1]
    assert re.fullmatch(
        r"VERDICT: (BETTER|WORSE|NO CLEAR DIFFERENCE) \| kNN .* % vs .* \| .* pp \[95 % CI .*\] \| n=40 test images, "
        r"1 seed \(this run only\), 4 label draws of 3 per class",
        line,
    )


def test_shuffled_labels_fall_to_chance_and_leave_the_verdict_alone(
    seeds: list[Run], labelled: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(seeds[0].path, tmp_path / "run")
    before = contents(run / "eval")
    result = evaluate(run, labelled, shuffle_labels=True, labels_per_class=10, draws=20)
    for name in ("h", "z", "pixels"):
        assert result.scores[name].mean == pytest.approx(0.5, abs=0.2), name
    after = contents(run / "eval")
    assert set(after) - set(before) == {".lock"}
    assert {name for name in before if after[name] != before[name]} == {"ledger.jsonl"}


def test_two_seeds_are_judged_together(seeds: list[Run], labelled: Path, tmp_path: Path) -> None:
    runs = [shutil.copytree(run.path, tmp_path / str(number)) for number, run in enumerate(seeds)]
    result = evaluate(runs, labelled)
    assert (result.verdict.seeds, result.verdict.this_run_only) == (2, False)
    alone = [evaluate(run, labelled).scores["h"].mean for run in runs]
    assert result.scores["h"].mean == pytest.approx(np.mean(alone), abs=1e-12)
    assert result.to_dict().keys() == VERDICT_KEYS
    assert "2 seeds" in api.table_and_verdict(result)
    all_labels = evaluate(runs, labelled, labels_per_class="all", k=5)
    assert (all_labels.verdict.labels_per_class, all_labels.verdict.draws) == (None, None)


def test_runs_of_different_networks_are_not_mixed(seeds: list[Run], whole: Run, labelled: Path, tmp_path: Path) -> None:
    other = pretrain(labelled, tmp_path / "other", dim=12, epochs=1)
    with pytest.raises(
        UsageError, match=r"other has another image size or architecture than .*; .*Evaluate them apart"
    ):
        evaluate([seeds[0].path, other.path], labelled)
    with pytest.raises(UsageError, match="at least one run"):
        evaluate([], labelled)


def test_an_evaluation_of_a_damaged_run_uses_the_older_checkpoint_and_says_so(
    seeds: list[Run], labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(seeds[0].path, tmp_path / "run")
    newest = verified_steps(run / "checkpoints")[-1]
    flip_bit(run / "checkpoints" / f"step-{newest}" / "model.safetensors", 12_345)
    result = mocokit.evaluate(run, labelled, labels_per_class=3, draws=2)
    assert result.verdict.step < newest
    assert f"WARNING: passed over a damaged checkpoint: {run}/checkpoints/step-{newest}" in capsys.readouterr().err


def test_a_folder_of_photos_from_start_to_verdict(tmp_path: Path) -> None:
    """The way a user goes: nested folders, two classes, no splits; the labels are the folders."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(40):
        folder = tmp_path / "photos" / ("bright" if number % 2 else "dark")
        folder.mkdir(parents=True, exist_ok=True)
        picture = rng.integers(0, 100, (20, 26, 3)) + 120 * (number % 2)
        Image.fromarray(picture.astype(np.uint8)).save(folder / f"{number}.png")
    run = pretrain(tmp_path / "photos", tmp_path / "run", epochs=1)
    assert (run.config.views.size, run.config.data.side, run.config.data.images) == (26, 26, 40)
    result = evaluate(run, tmp_path / "photos", labels_per_class=2)
    assert result.pretraining.startswith("yes: pretraining used all images of this data set")
    (tmp_path / "photos" / "dark" / "late.png").write_bytes((tmp_path / "photos" / "dark" / "0.png").read_bytes())
    with pytest.raises(DataError, match=r"not those the run started with \(40 then, 41 now"):
        pretrain(tmp_path / "photos", run.path, resume=True, epochs=1)


@pytest.mark.parametrize("profile", [False, True])
def test_no_views_of_a_step_are_held_while_the_next_ones_are_made(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: bool
) -> None:
    """Through the whole command; at this size each step's views are made by themselves."""
    made: list[weakref.ref[Any]] = []
    make_together = BatchLoader.make_together

    def watched(self: BatchLoader, steps: range) -> list[Batch]:
        assert [views() for views in made] == [None] * len(made)
        batches = make_together(self, steps)
        made.extend(weakref.ref(batch.x_q) for batch in batches)
        return batches

    monkeypatch.setattr(BatchLoader, "make_together", watched)
    pretrain(data, tmp_path / "run", epochs=1, image_size=192, workers=0, backbone="small-cnn-4-4", profile=profile)
    assert len(made) >= 6


def test_a_start_that_is_refused_is_refused_quickly(whole: Run, data: Path) -> None:
    began = time.monotonic()
    with pytest.raises(UsageError, match="already holds a run"):
        pretrain(data, whole.path)
    assert time.monotonic() - began < 1
