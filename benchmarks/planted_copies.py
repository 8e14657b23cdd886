"""How many planted copies of test images `mocokit check` finds, by what was done to them.

    python benchmarks/planted_copies.py DATA [--label-column NAME] [--images 60]

Of 60 copies each: chest X-rays 60 in every way; CIFAR-10 59 to 60; eye fundus 58 to 60; products on white 59 to 60, but
54 at 1.2 times as bright, 49 at 1.3 times, 35 after all three changes together. Pillow 13.0, numpy 2.4; any machine.

Copies of images of the test split (the first in the order of a hash) are made in nine ways, written to a temporary
folder and looked for as `mocokit check DATA --split test --against COPIES` does. `other pairs` are pairs of a copy with
another image than its own; they are no mistakes where DATA itself holds that image twice.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mocokit.data.audit import audit
from mocokit.data.randomness import permutation
from mocokit.data.sources import open_source

UInt8 = NDArray[np.uint8]


def scaled(rgb: UInt8, factor: float, how: Image.Resampling = Image.Resampling.BICUBIC) -> UInt8:
    """The picture at `factor` times its size."""
    height, width = rgb.shape[:2]
    return np.asarray(Image.fromarray(rgb).resize((int(width * factor), int(height * factor)), how))


def lit(rgb: UInt8, gain: float) -> UInt8:
    """The picture `gain` times as bright, clipped."""
    return np.clip(rgb.astype(np.float32) * gain, 0, 255).astype(np.uint8)


WAYS: dict[str, tuple[Callable[[UInt8], UInt8], int | None]] = {
    "half the size": (lambda a: scaled(a, 0.5), None),
    "1.7 times the size": (lambda a: scaled(a, 1.7, Image.Resampling.BILINEAR), None),
    "JPEG quality 70": (lambda a: a, 70),
    "JPEG quality 40": (lambda a: a, 40),
    "0.8 times as bright": (lambda a: lit(a, 0.8), None),
    "1.1 times as bright": (lambda a: lit(a, 1.1), None),
    "1.2 times as bright": (lambda a: lit(a, 1.2), None),
    "1.3 times as bright": (lambda a: lit(a, 1.3), None),
    "0.8 of the size, 1.15 times as bright, JPEG quality 60": (lambda a: lit(scaled(a, 0.8), 1.15), 60),
}


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--label-column")
    parser.add_argument("--images", type=int, default=60)
    given = parser.parse_args()
    source = open_source(given.data, split="test", label_column=given.label_column)
    rows = permutation(0, 0, source.index.ids)[: given.images].tolist()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            for way, (make, quality) in enumerate(WAYS.values()):
                picture = Image.fromarray(make(source.read(row)))
                name = Path(folder) / f"{row}_{way}"
                if quality is None:
                    picture.save(f"{name}.png")
                else:
                    picture.save(f"{name}.jpg", quality=quality)
        start = time.process_time()
        found = audit(source, open_source(folder))
        seconds = time.process_time() - start
    own: Counter[int] = Counter()
    others = 0
    for a, b in found.twin_pairs():
        if a < len(source.index) <= b:
            row, way = found.names[b].partition(".")[0].split("_")
            own[int(way)] += int(row) == a
            others += int(row) != a
    for way, name in enumerate(WAYS):
        print(f"{name:<56} {own[way]}/{len(rows)}")
    print(f"other pairs {others}; {seconds:.0f} s of processor time for {len(found)} pictures")


if __name__ == "__main__":
    main()
