import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from mocokit.data import generated_shapes
from mocokit.data.generated import CANVAS, GENERATED, GeneratedSet, digits, moved_digits, shapes
from mocokit.data.sources import open_source
from mocokit.errors import UsageError
from mocokit.evaluation.protocol import split_rows


@pytest.fixture(scope="module")
def moved() -> GeneratedSet:
    return moved_digits()


def pictures(made: GeneratedSet) -> NDArray[np.uint8]:
    return np.stack([made.read(row) for row in range(len(made.index))])


@pytest.mark.parametrize("name", ["digits", "moved-digits"])
def test_every_set_of_digits_is_whole(name: str) -> None:
    made = GENERATED[name](0)
    index = made.index
    assert len(index) == 1797
    assert index.names[:2] == (f"{name}/0000", f"{name}/0001")
    assert [len(index.rows_of(split)) for split in ("train", "val", "test")] == [1100, 197, 500]
    assert index.class_names == tuple("0123456789")
    assert np.bincount(index.labels[index.rows_of("test")]).min() >= 40
    picture = made.read(17)
    assert picture.dtype == np.uint8
    assert picture.shape[2] == 3
    np.testing.assert_array_equal(picture[:, :, 0], picture[:, :, 2])


def test_digits_are_scikit_learns() -> None:
    made, bunch = digits(), load_digits()
    np.testing.assert_array_equal(made.index.labels, bunch.target)
    assert np.abs(pictures(made)[:, :, :, 0] / 255 - bunch.images / 16).max() <= 0.5 / 255


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("digits", "9b4db4a52cd44d7912d814df3b00d430f197438716221fbf947eb11ab3e55db3"),
        ("moved-digits", "e09bda6774d746c35f9da3cb9d1cf561cd19aa2bbe4a52020908d95dc09e8736"),
    ],
)
def test_the_bytes_are_fixed(name: str, sha256: str) -> None:
    assert hashlib.sha256(pictures(GENERATED[name](0)).tobytes()).hexdigest() == sha256


def test_both_sets_split_the_same_digits_the_same_way(moved: GeneratedSet) -> None:
    np.testing.assert_array_equal(digits().index.splits, moved.index.splits)
    np.testing.assert_array_equal(digits().index.groups, moved.index.groups)
    np.testing.assert_array_equal(moved_digits(1).index.splits, moved.index.splits)


def test_a_moved_digit_keeps_its_ink_and_stays_inside(moved: GeneratedSet) -> None:
    grey = pictures(moved)[:, :, :, 0].astype(float)
    assert grey.shape == (1797, CANVAS, CANVAS)
    original = load_digits().images / 16 * 255
    scale = grey.sum((1, 2)) / original.sum((1, 2))  # ink grows with the area
    assert scale.min() > 0.9 * (10 / 8) ** 2
    assert scale.max() < 1.1 * (17 / 8) ** 2
    place = np.arange(CANVAS) + 0.5
    for axis in (1, 2):
        middle = (grey.sum(3 - axis) * place).sum(1) / grey.sum((1, 2))
        assert middle.min() > 4
        assert middle.max() < CANVAS - 4
        assert middle.std() > 1.5


def test_an_upright_digit_in_the_middle_is_plain_bilinear_scaling() -> None:
    from mocokit.data.generated import _place

    source = load_digits().images[:3] / 16
    one = np.ones(3)
    drawn = _place(source, 24 * one, one, 0 * one, 12 * one, 12 * one)
    # At three times the size, pixel 3k + 1 of the canvas lies on the middle of pixel k of the original.
    np.testing.assert_allclose(drawn[:, 1::3, 1::3], source, atol=1e-12)


def test_the_seed_moves_them_elsewhere(moved: GeneratedSet) -> None:
    other = moved_digits(1)
    assert other.index.hash != moved.index.hash
    assert np.mean([np.array_equal(other.read(row), moved.read(row)) for row in range(100)]) == 0


def test_difficulty(moved: GeneratedSet) -> None:
    """Pixels see through neither place nor size: 20 to 30 % from ten labels a class, where the unmoved give 90 %."""
    index, labels = moved.index, moved.index.labels
    train, test = index.rows_of("train"), index.rows_of("test")
    flat = {made.index.names[0]: pictures(made)[:, :, :, 0].reshape(1797, -1) / 255 for made in (moved, digits())}

    def accuracy(x: NDArray[np.float64], k: int, draw: int) -> float:
        rng = np.random.default_rng(draw)
        few = np.concatenate([rng.permutation(train[labels[train] == digit])[:10] for digit in range(10)])
        return float(KNeighborsClassifier(k).fit(x[few], labels[few]).score(x[test], labels[test]))

    for k in (1, 5):
        assert 0.15 < np.mean([accuracy(flat["moved-digits/0000"], k, draw) for draw in range(5)]) < 0.35
    assert np.mean([accuracy(flat["digits/0000"], 1, draw) for draw in range(5)]) > 0.85


def test_shapes_are_whole() -> None:
    made = shapes()
    index = made.index
    assert len(index) == 840
    assert index.names[:2] == ("shapes/000", "shapes/001")
    assert index.split_names == ("train", "test")
    assert [len(index.rows_of(split)) for split in ("train", "test")] == [600, 240]
    assert index.class_names == ("disc", "square", "diamond")
    assert np.bincount(index.labels[index.rows_of("test")]).tolist() == [80, 80, 80]
    data = generated_shapes.generate()
    np.testing.assert_array_equal(index.rows_of("train"), data.train_ids)
    levels = pictures(made)
    assert levels.shape == (840, 16, 16, 3)
    assert np.abs(levels / 255 - data.images.transpose(0, 2, 3, 1)).max() <= 0.5 / 255 + 1e-7
    red = levels[index.labels == 1].astype(int)[:140]  # the red squares
    assert (red[:, :, :, 0].sum((1, 2)) > 2 * red[:, :, :, 2].sum((1, 2))).all()


def test_the_bytes_of_shapes_are_fixed() -> None:
    expected = "66b8325c1a90d4e20b9a07409f2ad03f52e6493766d6fd7f82b58035aae93e0b"
    assert hashlib.sha256(pictures(shapes()).tobytes()).hexdigest() == expected
    assert generated_shapes.generate().sha256() == generated_shapes.PUBLISHED_SHA256
    assert shapes(1).index.hash != shapes().index.hash
    assert not np.array_equal(shapes(1).read(0), shapes().read(0))


def test_shapes_can_be_labelled_by_colour() -> None:
    plain, colored = open_source("shapes"), open_source("shapes", label_column="color")
    assert colored.index.class_names == ("red", "blue")
    assert colored.index.hash == plain.index.hash
    np.testing.assert_array_equal(open_source("shapes", label_column="shape").index.labels, plain.index.labels)
    red = colored.index.labels == 0
    ink = np.stack([colored.read(row) for row in range(840)]).astype(int).sum((1, 2))
    assert (ink[red, 0] > ink[red, 2]).all()
    assert (ink[~red, 0] < ink[~red, 2]).all()
    with pytest.raises(UsageError, match=r"no label 'colour'; its labels are: shape, color\. Did you mean 'color'\?"):
        open_source("shapes", label_column="colour")
    with pytest.raises(UsageError, match="no meaning for the generated set shapes"):
        open_source("shapes", group_column="color")


def test_validation_is_carved_out_of_the_training_shapes() -> None:
    index = shapes().index
    split = split_rows(index, 0)
    np.testing.assert_array_equal(split.test, index.rows_of("test"))
    assert len(split.train) + len(split.val) == 600
    assert 80 < len(split.val) < 160
