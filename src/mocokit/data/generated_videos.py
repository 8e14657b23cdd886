"""`moving-shapes`: videos that need no files, in which motion, shape and colour have nothing to do with each other.

Four motions (line, circle, swing, kick) of three shapes in two colours, 35 videos of each kind: 840 videos of 24
frames, one second long, 24 x 24 pixels, 600 for training and 240 for testing. The canvas has no edges: what leaves on
one side enters on the other. So a shape is anywhere with the same chance at any moment of any motion, and no single
frame tells the motion; red and blue have the same channel sum.

A kick starts fast and slows down, again and again: the one motion that looks different backwards. Mirror images and
crops leave all four what they are. Every number is a hash of (seed, video, purpose), so each frame is a fixed
function of the set's seed: 0, or that in the name, as in `moving-shapes-7`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from mocokit.data.generated_shapes import COLORS, SHAPES
from mocokit.data.index import SampleIndex, make_index
from mocokit.data.randomness import hash_words, uniform, word
from mocokit.errors import UsageError, did_you_mean

UInt8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

MOTIONS = ("line", "circle", "swing", "kick")
CANVAS, FRAMES, RATE = 24, 24, 24.0
PER_CELL, TRAIN_PER_CELL = 35, 25
_KICK = 8  # frames from one kick to the next


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GeneratedVideos:
    """A table of videos, all of `frames` frames at `rate` a second, and how to make one frame."""

    index: SampleIndex
    frames: int
    rate: float
    side: int
    read: Callable[[int, int], UInt8Array]
    """Row of a video, frame number -> RGB uint8 [side, side, 3]."""
    labellings: Mapping[str, tuple[Int64Array, tuple[str, ...]]] = field(default_factory=dict)
    """What there is to tell: its name -> (class numbers [V], class names)."""

    def labelled_by(self, name: str) -> GeneratedVideos:
        """The same videos with another of `labellings`. Raises UsageError naming those there are."""
        if name not in self.labellings:
            raise UsageError(
                f"The generated videos have no label {name!r}; their labels are: {', '.join(self.labellings)}."
                + did_you_mean(name, self.labellings)
            )
        labels, class_names = self.labellings[name]
        return replace(self, index=replace(self.index, labels=labels, class_names=class_names))


def moving_shapes(seed: int = 0) -> GeneratedVideos:
    """The set described above; the label is the motion, or with `shape` or `color` that."""
    cell, within = np.divmod(np.arange(len(MOTIONS) * len(SHAPES) * len(COLORS) * PER_CELL), PER_CELL)
    motion, rest = np.divmod(cell, len(SHAPES) * len(COLORS))
    shape, color = np.divmod(rest, len(COLORS))
    names = [f"moving-shapes/{number:03d}" for number in range(len(cell))]
    labellings = {"motion": (motion, MOTIONS), "shape": (shape, SHAPES), "color": (color, COLORS)}
    index = make_index(
        names,
        labels=motion,
        class_names=MOTIONS,
        groups=names,
        splits=["train" if number < TRAIN_PER_CELL else "test" for number in within.tolist()],
        content=f"moving-shapes 1 seed {seed}",
    )
    down, across = _paths(seed, motion, index.ids)
    key = word("moving shapes")
    radius = 3.0 + 1.5 * uniform(seed, key, index.ids, word("radius"))
    bright = 0.8 + 0.2 * uniform(seed, key, index.ids, word("brightness"))
    paint = np.array([[0.9, 0.15, 0.15], [0.15, 0.15, 0.9]])[color] * bright[:, None]
    noise_keys = hash_words(seed, word("moving shapes noise"), index.ids)

    def read(row: int, number: int) -> UInt8Array:
        cover = _cover(int(shape[row]), down[row, number], across[row, number], radius[row])[:, :, None]
        bits = hash_words(noise_keys[row : row + 1], number, np.arange(CANVAS * CANVAS, dtype=np.int64)).view(np.uint16)
        fields = bits.reshape(CANVAS, CANVAS, 4)[:, :, :3].astype(np.float64)
        noise = (fields / 65535 - 0.5) * 0.06
        picture = 0.06 + cover * (paint[row] - 0.06) + noise
        levels: UInt8Array = np.rint(np.clip(picture, 0, 1) * 255).astype(np.uint8)
        return levels

    return GeneratedVideos(index=index, frames=FRAMES, rate=RATE, side=CANVAS, read=read, labellings=labellings)


def _paths(seed: int, motion: Int64Array, ids: Int64Array) -> tuple[FloatArray, FloatArray]:
    """Where the centre is, pixels down and across, [V, FRAMES]. All motions go about 1.25 pixels a frame on average."""
    key, t = word("moving shapes"), np.arange(FRAMES, dtype=np.float64)

    def draw(name: str, low: float, high: float) -> FloatArray:
        drawn: FloatArray = (low + (high - low) * uniform(seed, key, ids, word(name)))[:, None]
        return drawn

    angle, phase, pace = draw("angle", 0, 2 * math.pi), draw("phase", 0, 1), draw("pace", 0.75, 1.25)
    along = {
        "line": 1.25 * pace * t,
        "swing": 4.0 * _sine(pace * t / 12.8 + phase),
        "kick": 10.0 * _kicks(pace * t / _KICK + phase),
    }
    turn = pace * t / 16 + phase
    moved_down, moved_across = np.zeros((len(ids), FRAMES)), np.zeros((len(ids), FRAMES))
    for number, name in enumerate(MOTIONS):
        mine = motion == number
        if name == "circle":
            moved_down[mine], moved_across[mine] = 3.2 * _sine(turn)[mine], 3.2 * _sine(turn + 0.25)[mine]
        else:
            moved_down[mine] = (along[name] * _sine(angle / (2 * math.pi)))[mine]
            moved_across[mine] = (along[name] * _sine(angle / (2 * math.pi) + 0.25))[mine]
    return (
        np.round(draw("down", 0, CANVAS) + moved_down, 4) % CANVAS,
        np.round(draw("across", 0, CANVAS) + moved_across, 4) % CANVAS,
    )


def _sine(turns: FloatArray) -> FloatArray:
    """Sine of whole turns, rounded: the last bits differ between machines, and the rest is then the same everywhere."""
    return np.array([round(math.sin(2 * math.pi * x), 6) for x in turns.ravel().tolist()]).reshape(turns.shape)


def _kicks(phase: FloatArray) -> FloatArray:
    """Distance after so many kicks, each of which covers 1 and slows down evenly to a halt."""
    whole = np.floor(phase)
    return np.asarray(whole + 1 - (1 - (phase - whole)) ** 2)


def _cover(shape: int, down: float, across: float, radius: float) -> FloatArray:
    """How much of each pixel the shape covers, [CANVAS, CANVAS] in 0..1, on a canvas without edges."""
    pixel = np.arange(CANVAS)
    dy, dx = (np.abs((pixel - centre + CANVAS / 2) % CANVAS - CANVAS / 2) for centre in (down, across))
    y, x = dy[:, None], dx[None, :]
    away = (np.sqrt(y * y + x * x), np.maximum(y, x) + 0.4, (y + x) / 1.35)[shape]
    return np.asarray(np.clip(radius - away + 0.5, 0, 1))


GENERATED_VIDEOS: dict[str, Callable[[int], GeneratedVideos]] = {"moving-shapes": moving_shapes}


def generated_name(spec: str) -> tuple[str, int] | None:
    """The generated set that is meant, and its seed (`moving-shapes-7`, 0 where none is named); None for other data."""
    if spec in GENERATED_VIDEOS:
        return spec, 0
    name, _, number = spec.rpartition("-")
    named = name in GENERATED_VIDEOS and number.isascii() and number.isdigit() and len(number) <= 18
    return (name, int(number)) if named else None
