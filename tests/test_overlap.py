"""What pretraining saw of the test images, and which runs may be judged together."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import mocokit
from mocokit import api, files
from mocokit.errors import LockedError, UsageError
from mocokit.evaluation.labelled import LabelledData, open_labelled
from mocokit.evaluation.overlap import pretraining_overlap
from mocokit.evaluation.together import check_together, differences
from mocokit.training.run import Run
from mocokit.training.runfolder import foreign_files
from tests.toy import OPTIONS, labelled_npz


def photos(root: Path, names: list[str], seed: int) -> Path:
    rng = np.random.default_rng(seed)
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 20, 3)).astype(np.uint8)).save(path)
    return root


def pretrain(data: Path, out: Path, **changes: Any) -> Run:
    return mocokit.pretrain(str(data), out, quiet=True, **(OPTIONS | {"epochs": 1} | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("labelled")
    names = [f"{split}/{c}/{i}.png" for split in ("train", "test") for c in "ab" for i in range(12)]
    return photos(root, names, 0)


@pytest.fixture(scope="module")
def labelled(folder: Path) -> LabelledData:
    return open_labelled(str(folder), size=16)


def test_the_train_split_has_none_of_the_test_images(folder: Path, labelled: LabelledData, tmp_path: Path) -> None:
    run = pretrain(folder, tmp_path / "run")
    found = pretraining_overlap([run], labelled)
    assert (found.n_test, found.by_id, found.by_content) == (24, 0, 0)
    assert (
        found.text == "no: pretraining used the train split of this data set; by content 0 of 24 test images are in it"
    )


def test_copies_under_other_names_are_found_by_content(folder: Path, labelled: LabelledData, tmp_path: Path) -> None:
    other = photos(tmp_path / "other", [f"{i}.png" for i in range(20)], 1)
    for number in range(3):
        shutil.copy(folder / "test" / "b" / f"{number}.png", other / f"copy-{number}.png")
    run = pretrain(other, tmp_path / "run")
    found = pretraining_overlap([run], labelled)
    assert (found.by_id, found.by_content) == (0, 3)
    assert set(found.examples) == {f"test/b/{number}.png" for number in range(3)}
    assert found.text.startswith("yes: pretraining used 3 of 24 test images without labels (the same content; 'test/b/")
    honest = pretrain(folder, tmp_path / "honest")
    assert pretraining_overlap([honest, run], labelled).by_content == 3


def test_the_same_name_with_another_content_is_no_overlap(labelled: LabelledData, tmp_path: Path) -> None:
    other = photos(tmp_path / "other", [f"test/a/{i}.png" for i in range(12)], 2)
    found = pretraining_overlap([pretrain(other, tmp_path / "run", split="test")], labelled)
    assert (found.by_id, found.by_content) == (12, 0)
    assert found.text.endswith(
        "0 of 24 test images are among the images of the pretraining by content (12 share a name with one)"
    )


def test_pictures_without_files_are_compared_by_their_pixels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8), np.arange(40) % 2
    split = np.where(np.arange(40) < 24, "train", "test")
    np.savez(tmp_path / "l.npz", images=images, labels=labels, split=split)
    np.savez(
        tmp_path / "p.npz", images=np.concatenate([images[20:30], rng.integers(0, 256, (20, 16, 16, 3), np.uint8)])
    )
    run = pretrain(tmp_path / "p.npz", tmp_path / "run")
    found = pretraining_overlap([run], open_labelled(str(tmp_path / "l.npz"), size=16))
    assert found.by_content == 6  # rows 24 to 29


def test_images_that_are_gone_are_unknown(labelled: LabelledData, tmp_path: Path) -> None:
    other = photos(tmp_path / "other", [f"{i}.png" for i in range(20)], 1)
    run = pretrain(other, tmp_path / "run")
    (other / "0.png").unlink()
    found = pretraining_overlap([run], labelled)
    assert (found.by_id, found.by_content) == (None, None)
    assert found.text.startswith("unknown: the images of the pretraining are not where they were")


# ---------------------------------------------------------------------------------------------------- together


def changed(run: Run, section: str, **values: Any) -> Run:
    config = dataclasses.replace(run.config, **{section: dataclasses.replace(getattr(run.config, section), **values)})
    path = run.path.with_name(f"seed-{config.train.seed}")
    return dataclasses.replace(run, config=config, folder=dataclasses.replace(run.folder, path=path))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    return pretrain(labelled_npz(folder / "two.npz"), folder / "run")


def test_seeds_of_one_recipe_belong_together(run: Run) -> None:
    other = changed(run, "train", seed=1, workers=3, checkpoint_every=7)
    assert check_together([run, other]) == []
    assert differences(run, other) == []


def test_one_run_twice_is_no_repeat(run: Run) -> None:
    for twin in (run, changed(run, "train", workers=3), changed(run, "execution", threads=7)):
        with pytest.raises(UsageError, match=r"repeats .*both have seed 0 .*one run and not two"):
            check_together([run, twin])


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("contrast", {"T": 0.5}, "contrast.T: "),
        ("optim", {"lr": 0.123}, "optim.lr: "),
        ("train", {"epochs": 99}, "train.epochs: 1, 99"),
        ("views", {"flip": 0.123}, "views.flip: "),
    ],
)
def test_another_recipe_is_refused_by_name(run: Run, section: str, values: dict[str, Any], says: str) -> None:
    other = changed(changed(run, section, **values), "train", **({"seed": 1} | (values if section == "train" else {})))
    with pytest.raises(UsageError, match=rf"has another recipe than .*\({says}.*Evaluate them apart"):
        check_together([run, other])


def test_other_data_are_a_warning(run: Run) -> None:
    other = changed(changed(run, "data", index_hash="0" * 64), "train", seed=1)
    (warning,) = check_together([run, other])
    assert "differs from" in warning
    assert "data.index_hash" in warning


# -------------------------------------------------------------------------------------------------- evaluate


def test_two_evaluations_of_a_run_do_not_meet(run: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(run.path, tmp_path / "run")
    labelled = labelled_npz(tmp_path / "two.npz")
    with files.RunLock(copy / "eval"), pytest.raises(LockedError, match="eval is in use by process"):
        mocokit.evaluate(copy, labelled, labels_per_class=3, draws=2, quiet=True)
    assert mocokit.evaluate(copy, labelled, labels_per_class=3, draws=2, quiet=True).test_readings == 1


def test_a_torn_ledger_does_not_stop_an_evaluation(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run.path, tmp_path / "run")
    labelled = labelled_npz(tmp_path / "two.npz")
    mocokit.evaluate(copy, labelled, labels_per_class=3, draws=2, quiet=True)
    with (copy / "eval" / "ledger.jsonl").open("a") as stream:
        stream.write('{"utc": "2026-0')
    assert mocokit.evaluate(copy, labelled, labels_per_class=3, draws=2, quiet=True).test_readings == 2
    assert "WARNING: the last line of" in capsys.readouterr().err


def test_both_classifiers_and_named_weights_are_written_down(run: Run, tmp_path: Path) -> None:
    copy = shutil.copytree(run.path, tmp_path / "run")
    labelled = labelled_npz(tmp_path / "two.npz")
    tensors = {name: tensor.clone() for name, tensor in run.encoder().backbone.trunk.state_dict().items()}
    save_file(tensors, tmp_path / "mine.safetensors")
    result = mocokit.evaluate(
        copy,
        labelled,
        classifier="both",
        labels_per_class=3,
        draws=3,
        random_seeds=4,
        baseline=[str(tmp_path / "mine.safetensors"), "torchvision:resnet18"],
        quiet=True,
    )
    # The named weights are the run's own, so they read exactly as the run does.
    np.testing.assert_allclose(result.correct["mine"], result.correct["h"])
    written = json.loads((copy / "eval" / "verdict.json").read_text())
    assert set(written["verdicts"]) == {"knn", "linear"}
    assert (written["metric"], written["verdicts"]["linear"]["metric"]) == ("kNN", "linear probe")
    assert written["tables"]["knn"]["h"]["ece"] is None
    assert 0 <= written["tables"]["linear"]["h"]["ece"] <= 1
    assert written["tables"]["linear"]["h"]["recall"].keys() == {"0", "1"}
    assert [one["why_not"] for one in written["baselines"] if not one["ran"]] == [
        "torchvision ships its weights as pickles, which are not read; name timm:... instead"
    ]
    names = {path.name for path in (copy / "eval").iterdir()}
    assert names == {
        ".lock", "verdict.json", "knn.csv", "linear.csv", "recall.csv", "confusion.csv", "confusion.png",
        "reliability.csv", "reliability.png", "ledger.jsonl",
    }  # fmt: skip
    assert foreign_files(copy) == []
    text = api.table_and_verdict(result)
    assert text.splitlines()[-1].startswith("VERDICT: ")
    assert "| kNN" in text.splitlines()[-1]
    assert "| linear probe" in text.splitlines()[-2]
    assert "mine: mine.safetensors: 10 of the backbone's 10 tensors." in text
    assert "torchvision:resnet18 was not run: " in text
    again = mocokit.evaluate(copy, labelled, labels_per_class=3, draws=2, quiet=True)
    assert again.test_readings == 2
    assert not (copy / "eval" / "linear.csv").exists()
    assert not (copy / "eval" / "reliability.png").exists()


def test_settings_that_make_no_sense(run: Run, tmp_path: Path) -> None:
    labelled = labelled_npz(tmp_path / "two.npz")
    for changes, says in (
        ({"classifier": "svm"}, "--classifier must be knn, linear or both"),
        ({"random_seeds": 0}, "--random-seeds must be at least 1"),
        ({"allow_partial": True}, "--allow-partial has no effect without --baseline"),
    ):
        with pytest.raises(UsageError, match=says):
            mocokit.evaluate(run, labelled, quiet=True, **changes)
    three = [run, changed(run, "train", seed=1), changed(run, "train", seed=2)]
    with pytest.raises(UsageError, match=r"--random-seeds 2 with 3 runs.*at least 3"):
        mocokit.evaluate(three, labelled, random_seeds=2, quiet=True)
