"""`shapes`: generated pictures in which colour is an easy cue and shape is the harder one. LAB 06 and LAB 07 use them.

Three shapes (disc, square, diamond) times two colours (red, blue) times 140 sources: 840 RGB images of 16x16
pixels. The first 100 sources of every cell are for training, the last 40 are held out, so the split exists before
any view is made. Red and blue have the same channel sum, so the mean of the channels does not tell them apart.

The numbers are drawn in the published order from the published seed, one image after another: the normal draws use
a rejection method, so how many random words an image consumes is known only once it has been drawn. The drawing
itself (masks, colours, noise, clipping) is done for all images at once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PUBLISHED_SEED = 20260922
SHAPES = ("disc", "square", "diamond")
COLORS = ("red", "blue")
SIDE = 16
SOURCES_PER_CELL = 140
TRAIN_PER_CELL = 100

# The published data set (seed 20260922): SHA-256 of the float32 image bytes in C order.
PUBLISHED_SHA256 = "11d8e85de60c0fdcbcd73cd70a662931f92099fc2c3e41fff0f1772251fcc264"

# Uniform numbers drawn for one image, in this order: centre x, centre y, radius, 16x16 background, brightness.
_UNIFORMS = 3 + SIDE * SIDE + 1

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """The data set. A source's id is its row number; ids of one (shape, color) cell are contiguous."""

    images: npt.NDArray[np.float32]  # [840, 3, 16, 16] in [0, 1]
    shape: IntArray  # [840], index into SHAPES
    color: IntArray  # [840], index into COLORS
    train_ids: IntArray  # [600]
    test_ids: IntArray  # [240]

    def sha256(self) -> str:
        """Of the image bytes, so that a result can name its input."""
        return hashlib.sha256(self.images.tobytes()).hexdigest()


def seed_of(repetition: int) -> int:
    """The seed of a repetition of the published experiments; repetition 0 is the published one.

    They lie 1000 apart: the published experiments use seed, seed + 1, seed + 2 and seed + 6 for different purposes,
    so the next seed up would repeat numbers that another purpose has drawn.
    """
    return PUBLISHED_SEED + 1000 * repetition


def _draw(seed: int, n: int) -> tuple[FloatArray, FloatArray]:
    """Uniform [n, 260] and standard normal [n, 768] numbers, drawn image by image."""
    rng = np.random.default_rng(seed)
    uniforms = np.empty((n, _UNIFORMS))
    normals = np.empty((n, SIDE * SIDE * 3))
    for uniform_row, normal_row in zip(uniforms, normals, strict=True):
        rng.random(out=uniform_row)
        rng.standard_normal(out=normal_row)
    return uniforms, normals


def _between(unit: FloatArray, low: float, high: float) -> FloatArray:
    """Map [0, 1) to [low, high) with the arithmetic of `numpy.random.Generator.uniform`."""
    return low + (high - low) * unit


def _covered(shape: IntArray, dx: FloatArray, dy: FloatArray, radius: FloatArray) -> npt.NDArray[np.bool_]:
    """Which pixels [n, 16, 16] the shape covers; dx is [n, 1, 16], dy [n, 16, 1], radius [n, 1, 1]."""
    disc = dx * dx + dy * dy <= radius * radius
    square = np.maximum(np.abs(dx), np.abs(dy)) <= radius
    diamond = np.abs(dx) + np.abs(dy) <= radius * 1.35
    kind = shape[:, None, None]
    return np.where(kind == 0, disc, np.where(kind == 1, square, diamond))


def generate(seed: int = PUBLISHED_SEED) -> Shapes:
    """Draw the data set of a seed. The published seed gives `PUBLISHED_SHA256`."""
    cell, within = np.divmod(np.arange(len(SHAPES) * len(COLORS) * SOURCES_PER_CELL), SOURCES_PER_CELL)
    shape, color = np.divmod(cell, len(COLORS))
    n = len(cell)
    unit, noise = _draw(seed, n)

    centre = _between(unit[:, :2], 6, 10)[:, :, None, None]
    radius = _between(unit[:, 2], 3.0, 4.7)[:, None, None]
    background = _between(unit[:, 3:-1], 0.015, 0.075).reshape(n, SIDE, SIDE, 1)
    brightness = _between(unit[:, -1], 0.8, 1)[:, None, None, None]

    pixel = np.arange(SIDE)
    covered = _covered(shape, pixel - centre[:, 0], pixel[:, None] - centre[:, 1], radius)
    paint = np.array([[0.9, 0.15, 0.15], [0.15, 0.15, 0.9]])[color][:, None, None, :] * brightness
    picture = np.where(covered[..., None], paint, background)
    picture += noise.reshape(picture.shape) * 0.012
    images = np.ascontiguousarray(np.clip(picture, 0, 1).transpose(0, 3, 1, 2), dtype=np.float32)

    is_train = within < TRAIN_PER_CELL
    return Shapes(images, shape, color, np.flatnonzero(is_train), np.flatnonzero(~is_train))
