"""Labelled picture sets that need no files: real handwritten digits, the same digits moved about, drawn shapes.

`GENERATED` maps a set's name to the function that makes it from a seed. Each picture is a fixed function of the
set's name, its number and the seed, so every machine gets the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from mocokit.data import generated_shapes
from mocokit.data.index import SampleIndex, make_index
from mocokit.data.randomness import hash_words, sample_id, uniform, word
from mocokit.errors import UsageError, did_you_mean

UInt8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]

DIGIT_TEST, DIGIT_VAL = 500, 197  # of 1,797; the other 1,100 are for training
CANVAS = 24


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GeneratedSet:
    """A sample table and how to make the picture of a row."""

    index: SampleIndex
    read: Callable[[int], UInt8Array]
    """Row -> RGB uint8 [H, W, 3]."""
    labellings: Mapping[str, tuple[npt.NDArray[np.int64], tuple[str, ...]]] = field(default_factory=dict)
    """Where there is more than one thing to tell: its name -> (class numbers [S], class names)."""

    def labelled_by(self, name: str) -> GeneratedSet:
        """The same pictures with another of `labellings`. Raises UsageError naming those there are."""
        if name not in self.labellings:
            raise UsageError(
                f"The generated set has no label {name!r}; its labels are: {', '.join(self.labellings)}."
                + did_you_mean(name, self.labellings)
            )
        labels, class_names = self.labellings[name]
        return replace(self, index=replace(self.index, labels=labels, class_names=class_names))


def digits(seed: int = 0) -> GeneratedSet:
    """The 1,797 digits of scikit-learn (UCI's optical digits), 8 x 8 pixels. The seed changes nothing.

    Grey levels 0..16 become 0..255. Split by hash into 1,100 train, 197 val and 500 test.
    """
    grey, labels = _load_digits()
    return _set("digits", np.rint(grey * (255 / 16)).astype(np.uint8), labels, "digits 1")


def moved_digits(seed: int = 0) -> GeneratedSet:
    """The same digits and splits, each once, somewhere on a 24 x 24 canvas: random place, size and turn.

    The side of the 8 x 8 original becomes 10 to 17 pixels, turned by up to 40 degrees either way (a 6 never becomes
    a 9); the place is any at which the whole square fits. Bilinear. Neighbours in pixels are then mostly pictures
    in the same place, not of the same digit, which is what a learned representation has to see through.
    """
    grey, labels = _load_digits()
    ids = _source_ids()
    key = word("moved digits")
    side = 10 + 7 * uniform(seed, key, ids, word("size"))
    turn = np.radians(40) * (2 * uniform(seed, key, ids, word("turn")) - 1)
    # Sines and cosines differ in the last bit between machines; rounded, the rest is exactly the same everywhere.
    cosine = np.array([round(math.cos(angle), 6) for angle in turn.tolist()])
    sine = np.array([round(math.sin(angle), 6) for angle in turn.tolist()])
    reach = side / 2 * (cosine + np.abs(sine))  # half the side of the upright square round the turned one
    middle = [
        reach + (CANVAS - 2 * reach) * uniform(seed, key, ids, word(axis)) for axis in ("place down", "place across")
    ]
    pictures = _place(grey / 16, side, cosine, sine, middle[0], middle[1])
    return _set("moved-digits", np.rint(pictures * 255).astype(np.uint8), labels, f"moved-digits 1 seed {seed}")


def _place(
    grey: FloatArray, side: FloatArray, cosine: FloatArray, sine: FloatArray, down: FloatArray, across: FloatArray
) -> FloatArray:
    """Draw [S, 8, 8] pictures turned about (down, across) at `side` pixels each. Returns [S, 24, 24]."""
    count, source = len(grey), grey.shape[1]
    padded = np.zeros((count, source + 2, source + 2))  # a dark border, so that edges fade out instead of being cut
    padded[:, 1:-1, 1:-1] = grey
    y, x = (axis.ravel() + 0.5 for axis in np.meshgrid(np.arange(CANVAS), np.arange(CANVAS), indexing="ij"))
    dy, dx = y[None] - down[:, None], x[None] - across[:, None]
    scale = source / side[:, None]
    back_y = (cosine[:, None] * dy - sine[:, None] * dx) * scale + source / 2 + 0.5
    back_x = (sine[:, None] * dy + cosine[:, None] * dx) * scale + source / 2 + 0.5
    back_y, back_x = (np.clip(back, 0, source + 1) for back in (back_y, back_x))
    top, left = (np.minimum(back.astype(np.int64), source) for back in (back_y, back_x))
    v, u = back_y - top, back_x - left
    rows = np.arange(count)[:, None]
    out: FloatArray = (1 - v) * ((1 - u) * padded[rows, top, left] + u * padded[rows, top, left + 1])
    out += v * ((1 - u) * padded[rows, top + 1, left] + u * padded[rows, top + 1, left + 1])
    pictures: FloatArray = out.reshape(count, CANVAS, CANVAS)
    return pictures


def _load_digits() -> tuple[FloatArray, npt.NDArray[np.int64]]:
    """Grey [1797, 8, 8] in 0..16 and labels [1797]."""
    from sklearn.datasets import load_digits  # a second of import time, paid only here

    bunch = load_digits()
    return np.asarray(bunch.images, np.float64), np.asarray(bunch.target, np.int64)


def _source_ids() -> npt.NDArray[np.int64]:
    return np.array([sample_id(f"digits/{number:04d}") for number in range(1797)], np.int64)


def _digit_splits() -> list[str]:
    """The split of every digit: the same in both sets, so that neither leaks into the other."""
    rank = np.argsort(hash_words(word("digits split"), _source_ids()), kind="stable")
    splits = np.full(len(rank), "train", dtype=object)
    splits[rank[:DIGIT_TEST]] = "test"
    splits[rank[DIGIT_TEST : DIGIT_TEST + DIGIT_VAL]] = "val"
    return [str(split) for split in splits]


def _set(name: str, grey: UInt8Array, labels: npt.NDArray[np.int64], content: str) -> GeneratedSet:
    index = make_index(
        [f"{name}/{number:04d}" for number in range(len(grey))],
        labels=labels,
        class_names=[str(digit) for digit in range(10)],
        groups=[f"digits/{number:04d}" for number in range(len(grey))],
        splits=_digit_splits(),
        content=content,
    )
    return GeneratedSet(index=index, read=lambda row: np.repeat(grey[row][:, :, None], 3, axis=2))


def shapes(seed: int = 0) -> GeneratedSet:
    """840 discs, squares and diamonds, red or blue, 16 x 16 pixels; the label is the shape, or with `color` the colour.

    Seed 0 is the published set of LAB 06 and LAB 07; seed k is drawn from the published seed + 1000 k. Split into
    600 train and 240 test, with every shape and colour alike in both. The labs train on the float pictures of
    `generated_shapes.generate`; here they are rounded to 256 levels like everything else that is read.
    """
    made = generated_shapes.generate(generated_shapes.seed_of(seed))
    levels = np.rint(made.images * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    is_test = np.zeros(len(levels), bool)
    is_test[made.test_ids] = True
    index = make_index(
        [f"shapes/{number:03d}" for number in range(len(levels))],
        labels=made.shape,
        class_names=generated_shapes.SHAPES,
        splits=["test" if test else "train" for test in is_test.tolist()],
        content=f"shapes 1 seed {seed}",
    )
    labellings = {"shape": (made.shape, generated_shapes.SHAPES), "color": (made.color, generated_shapes.COLORS)}
    return GeneratedSet(index=index, read=lambda row: levels[row].copy(), labellings=labellings)


GENERATED: dict[str, Callable[[int], GeneratedSet]] = {
    "digits": digits,
    "moved-digits": moved_digits,
    "shapes": shapes,
}
