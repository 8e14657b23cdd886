"""Evaluation finds test images that have a near twin in train, and tells the score with and without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

import mocokit
from mocokit.evaluation.frozen import FrozenPlan, FrozenResult, evaluate_frozen
from mocokit.evaluation.interval import crossed_interval
from mocokit.evaluation.labelled import LabelledData, open_labelled
from mocokit.evaluation.near_twins import near_twins_line
from mocokit.evaluation.table import table_and_verdict
from mocokit.training.run import Run
from tests.toy import OPTIONS

PLANTED = ("a/1", "a/4", "b/2")


def picture(rng: np.random.Generator) -> Image.Image:
    """A smooth picture that no other one looks like."""
    noise = gaussian_filter(rng.normal(size=(64, 64, 3)), (5, 5, 0))
    return Image.fromarray(np.clip(128 + 60 * noise / noise.std(), 0, 255).astype(np.uint8))


def save(image: Image.Image, path: Path, quality: int = 95) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=quality)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("twins"), np.random.default_rng(0)
    for split, count in (("train", 14), ("test", 8)):
        for name in ("a", "b"):
            for number in range(count):
                save(picture(rng), root / split / name / f"{number}.jpg")
    return root


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("run") / "run"
    return mocokit.pretrain(str(folder), out, split="train", quiet=True, **(OPTIONS | {"epochs": 1, "image_size": 64}))


@pytest.fixture(scope="module")
def planted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LabelledData:
    """Three test images again in train: smaller, recompressed, brighter, and labelled as they are in test."""
    root = tmp_path_factory.mktemp("planted")
    for path in sorted(folder.rglob("*.jpg")):
        save(Image.open(path), root / path.relative_to(folder))
    changes = (
        lambda image: image.resize((48, 48), Image.Resampling.LANCZOS),
        lambda image: image,
        lambda image: image.point(lambda value: min(255, int(1.1 * value))),
    )
    for name, change in zip(PLANTED, changes, strict=True):
        save(change(Image.open(folder / "test" / f"{name}.jpg")), root / "train" / name[0] / f"copy-{name[2]}.jpg", 60)
    return open_labelled(str(root), size=64)


def judge(run: Run, data: LabelledData, **plan: object) -> FrozenResult:
    settings = FrozenPlan(labels_per_class=None, k=1, **plan)  # type: ignore[arg-type]
    return evaluate_frozen([run], data, settings, device=torch.device("cpu"), say=lambda _: None)


def test_planted_copies_are_found_and_the_score_told_without_them(run: Run, planted: LabelledData) -> None:
    result = judge(run, planted, classifiers=("knn", "linear"))
    found = result.near_twins
    assert found is not None
    names = [planted.index.names[row] for row in planted.split.test[found.rows]]
    assert names == [f"test/{name}.jpg" for name in PLANTED]
    assert (found.pairs, found.n_test) == (3, 16)
    assert found.examples[0] == ("test/a/1.jpg", "train/a/copy-1.jpg")

    keep = [place for place in range(16) if place not in found.rows.tolist()]
    without = found.without["knn"]
    assert without.n_test == 13
    mine, theirs = result.correct["h"][:, keep], result.correct[without.baseline["name"]][:, keep]
    delta = crossed_interval(mine - theirs, None, bounds=(-1, 1))
    assert (without.score, without.delta) == pytest.approx((mine.mean(), delta.mean))
    assert without.ci95 == pytest.approx((delta.low, delta.high))
    assert (result.correct["pixels"][:, found.rows] == 1).all()  # what the copies give away
    text = table_and_verdict(result)
    assert "Near twins: 3 of 16 test images have one among the training images ('test/a/1.jpg' and" in text
    assert f"Without them kNN {100 * without.score:.1f} % (with them {100 * result.verdict.score:.1f} %)" in text
    assert "Without them linear probe" in text
    assert result.to_dict()["near_twins"]["verdicts_without"]["linear"]["n_test"] == 13


def test_strangers_are_no_twins(run: Run, folder: Path) -> None:
    result = judge(run, open_labelled(str(folder), size=64))
    assert result.near_twins is not None
    assert (len(result.near_twins.rows), result.near_twins.without) == (0, {})
    assert near_twins_line(result.near_twins, result.verdicts) == (
        "Near twins: none of the 16 test images has one among the training images."
    )


def test_where_all_are_twins_nothing_is_left_to_judge(run: Run, folder: Path, tmp_path: Path) -> None:
    for path in sorted((folder / "test").rglob("*.jpg")):
        for split in ("train", "test"):
            save(Image.open(path), tmp_path / split / path.parent.name / path.name)
    result = judge(run, open_labelled(str(tmp_path), size=64))
    assert result.near_twins is not None
    assert len(result.near_twins.rows) == 16
    line = near_twins_line(result.near_twins, result.verdicts)
    assert line.endswith("No test image is left without them.")


def test_shuffled_labels_leave_nothing_to_tell(run: Run, planted: LabelledData) -> None:
    assert judge(run, planted, shuffle_labels=True).near_twins is None
