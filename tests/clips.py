"""Small videos written for the tests: every frame tells its own number in its pixels."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray


def picture(number: int, height: int = 32, width: int = 48) -> NDArray[np.uint8]:
    """Frame `number`: eight grey blocks side by side that spell it in binary, least significant first."""
    blocks = [(number >> bit) & 1 for bit in range(8)]
    row = np.repeat(np.array(blocks, np.uint8) * 200 + 20, width // 8)
    return np.repeat(np.tile(row, (height, 1))[:, :, None], 3, axis=2)


def number_of(rgb: NDArray[np.uint8]) -> int:
    """The number that a (decoded, perhaps shrunk) frame spells."""
    width = rgb.shape[1] // 8
    means = [rgb[:, bit * width : (bit + 1) * width].mean() for bit in range(8)]
    return sum(int(mean > 120) << bit for bit, mean in enumerate(means))


def write_video(
    path: Path,
    count: int = 24,
    *,
    codec: str = "mpeg4",
    rate: int = 8,
    gop: int = 6,
    b_frames: int = 0,
    stamps: list[int] | None = None,
    start: int = 0,
    height: int = 32,
    width: int = 48,
) -> Path:
    """A video of `picture(start)`, `picture(start + 1)`, ... stamps: time of each frame, in units of 1 / rate s."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 2_000_000
        stream.codec_context.gop_size = gop
        stream.codec_context.max_b_frames = b_frames
        stream.codec_context.thread_count = 1
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(picture(start + number, height, width), format="rgb24")
            frame.pts = number if stamps is None else stamps[number]
            frame.time_base = Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound(path: Path) -> Path:
    """A file with sound and no picture."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_motion(root: Path, per_class: int = 12, count: int = 16) -> Path:
    """`right`: a bar that goes right; `jump`: one that jumps about. And a file that is no video."""
    rng = np.random.default_rng(0)
    for kind in ("jump", "right"):
        (root / kind).mkdir(parents=True)
        for number in range(per_class):
            start = int(rng.integers(0, 32))
            frames = np.zeros((count, 24, 32, 3), np.uint8)
            for t in range(count):
                place = (start + 2 * t) % 32 if kind == "right" else int(rng.integers(0, 32))
                frames[t, :, (place + np.arange(6)) % 32] = rng.integers(120, 255)
            _encode(root / kind / f"{number:02d}.mp4", frames, rate=16)
    (root / "broken.mp4").write_bytes(b"\0" * 100)
    return root


def _encode(path: Path, frames: NDArray[np.uint8], rate: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        stream.bit_rate = 1_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
