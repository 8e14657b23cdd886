"""From a folder of videos to small frames in memory: ours against PyAV alone, side by side in one run.

On 17 real clips (3,362 frames, 176 to 640 pixels wide, MP4, MKV, MPEG and AVI) with two threads: by processor seconds
1.46 [1.14, 1.53] against PyAV as its documentation shows it, 0.96 [0.82, 0.99] against PyAV with one scaler kept for
all frames of a file; by the clock 1.54 [0.73, 1.81] and 1.19 [0.81, 1.32] (medians of 6 rounds with 95 % bootstrap
intervals; 2 cores of an AMD EPYC that much other work kept busy, av 18.1.0). What the second leaves is the tables of
frames: AVI has no time stamps, so that its frames are counted by decoding them once more. A run keeps its tables.

Ours is everything that `pretrain --video clips` does before its first step: list the files, make the table of frames,
decode every frame by number, shrink it and put it into the store. PyAV alone opens each file, decodes it from beginning
to end and shrinks every frame with the same filter into an array made beforehand. Both use as many threads, each with
files of its own, one decoder thread each. Reported: the median over rounds of PyAV's time / ours (above 1 is faster)
with a 95 % bootstrap interval, by the clock and by processor seconds, which what else the machine does hardly moves.
The ways come in random order within a round, and their frames are compared.

    python -m benchmarks.video FOLDER                       # videos of your own
    python -m benchmarks.video --rounds 10 --threads 2      # 8 written ones, 640 x 360
    python -m benchmarks.video FOLDER --check 3             # no times: is every frame exact, in 3 processes?
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

from mocokit.data.pixels import build_pixel_store
from mocokit.data.video import VideoCursor, fitted_size, frame_table
from mocokit.data.videos import VideoSet, frame_source, open_videos
from mocokit.training.environment import environment

UInt8Array = npt.NDArray[np.uint8]
SIDE = 112


def write_videos(folder: Path, count: int = 8, frames: int = 150, height: int = 360, width: int = 640) -> None:
    """Moving gratings with noise, MPEG-4 with B-frames, a key frame every 30."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    for number in range(count):
        with av.open(str(folder / f"{number}.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=30)
            stream.width, stream.height, stream.pix_fmt, stream.bit_rate = width, height, "yuv420p", 3_000_000
            stream.codec_context.gop_size, stream.codec_context.max_b_frames = 30, 2
            for t in range(frames):
                wave = 127 + 90 * np.sin((x * (1 + number) + y * 3 + 11 * t) / 40)
                picture = np.stack([wave, wave[::-1], 255 - wave], 2) + rng.normal(0, 6, (height, width, 1))
                frame = av.VideoFrame.from_ndarray(np.clip(picture, 0, 255).astype(np.uint8), format="rgb24")
                frame.pts, frame.time_base = t, Fraction(1, 30)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())


def ours(folder: Path, threads: int) -> UInt8Array:
    """All frames of all videos, [F, 3, SIDE, SIDE]."""
    videos = open_videos(folder, workers=threads)
    source = frame_source(videos, [np.arange(len(table)) for table in videos.tables])
    return build_pixel_store(source, side=SIDE, workers=threads, max_bad=0.0).pixels


def alone(folder: Path, threads: int, sizes: dict[str, int], *, reuse: bool) -> UInt8Array:
    """The same by PyAV alone. sizes: how many frames each file has, so that the array can be made beforehand.

    reuse: one scaler for all frames of a file; without it every frame sets up its own, as `frame.reformat` does.
    """
    names = list(sizes)
    starts = np.concatenate([[0], np.cumsum([sizes[name] for name in names])])
    out = np.zeros((int(starts[-1]), 3, SIDE, SIDE), np.uint8)

    def work(number: int) -> None:
        with av.open(str(folder / names[number]), metadata_errors="replace") as container:
            container.streams.video[0].codec_context.thread_count = 1
            scaler = av.video.reformatter.VideoReformatter()
            for place, frame in enumerate(container.decode(video=0), int(starts[number])):
                height, width = fitted_size(frame.height, frame.width, SIDE)
                if reuse:
                    small = scaler.reformat(frame, width, height, "rgb24", interpolation="AREA")
                else:
                    small = frame.reformat(width=width, height=height, format="rgb24", interpolation="AREA")
                rgb = small.to_ndarray()
                out[place, :, :height, :width] = rgb.transpose(2, 0, 1)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(len(names))))
    return out


def plain(videos: VideoSet) -> dict[str, int]:
    """Files that need no turning, so that PyAV alone gives the same pictures, with their numbers of frames."""
    found = {}
    for row, name in enumerate(videos.index.names):
        assert videos.file is not None
        with av.open(str(videos.file(row)), metadata_errors="replace") as container:
            turned = next(container.decode(video=0)).rotation != 0
        if turned:
            raise SystemExit(f"{name} asks to be turned; PyAV alone would not. Leave it out.")
        found[name] = len(videos.tables[row])
    return found


def compare(folder: Path, rounds: int, threads: int) -> dict[str, object]:
    """The rounds and what they say."""
    sizes = plain(open_videos(folder, workers=threads))
    frames = sum(sizes.values())
    rng = np.random.default_rng(0)
    arms: dict[str, Callable[[], UInt8Array]] = {
        "ours": lambda: ours(folder, threads),
        "PyAV": lambda: alone(folder, threads, sizes, reuse=False),
        "PyAV, one scaler": lambda: alone(folder, threads, sizes, reuse=True),
    }
    clock: dict[str, list[float]] = {name: [] for name in arms}
    processor: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        pictures = {}
        for name in rng.permutation(list(clock)).tolist():
            start, used = time.perf_counter(), time.process_time()
            pictures[name] = arms[name]()
            clock[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - used)
        assert all(np.array_equal(pictures["ours"], other) for other in pictures.values()), "the frames differ"
    start = time.perf_counter()
    for name in sizes:
        frame_table(folder / name)
    tables = time.perf_counter() - start
    return {
        "frames": frames,
        "videos": len(sizes),
        "threads": threads,
        "rounds": rounds,
        "frames a second": {name: round(frames / float(np.median(took)), 1) for name, took in clock.items()},
        "ratio by the clock": _ratios(clock, rng),
        "ratio by processor seconds": _ratios(processor, rng),
        "seconds for the tables alone, one thread": round(tables, 3),
    }


def _ratios(seconds: dict[str, list[float]], rng: np.random.Generator) -> dict[str, object]:
    """Against each way of PyAV alone: the median of its time / ours with its interval."""
    found: dict[str, object] = {}
    for name, took in seconds.items():
        if name != "ours":
            ratios = np.array(took) / np.array(seconds["ours"])
            drawn = np.median(rng.choice(ratios, (10_000, len(ratios))), 1)
            low, high = (round(float(v), 3) for v in np.quantile(drawn, (0.025, 0.975)))
            found[name] = {"median": round(float(np.median(ratios)), 3), "ci95": [low, high]}
    return found


def check(folder: Path, processes: int, limit: int = 10) -> dict[str, object]:
    """Every frame of up to `limit` videos, out of order, in several processes, against decoding from the beginning.

    Each process visits all frames in strides of its own, the passes in random order, and jumps about 20 times more.
    """
    names = open_videos(folder).index.names[:limit]
    jobs = [(str(folder / name), seed) for seed in range(processes) for name in names]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.map(_out_of_order, jobs, chunksize=1)
    wrong = []
    frames = 0
    for place, name in enumerate(names):
        with av.open(str(folder / name), metadata_errors="replace") as container:
            container.streams.video[0].codec_context.thread_count = 1
            turned = [(np.rot90(f.to_ndarray(format="rgb24"), f.rotation // 90)) for f in container.decode(video=0)]
        expected = [hashlib.sha256(np.ascontiguousarray(rgb).tobytes()).hexdigest() for rgb in turned]
        frames += len(expected)
        wrong += [name for part in found[place :: len(names)] if part != expected]
    return {"videos": list(names), "frames": frames, "processes": processes, "wrong": wrong}


def _out_of_order(job: tuple[str, int]) -> list[str]:
    path, seed = Path(job[0]), job[1]
    table = frame_table(path)
    rng = np.random.default_rng(seed)
    cursor = VideoCursor(path, table)
    found: dict[int, str] = {}
    step = 4 + seed
    visits = [number for start in rng.permutation(step) for number in range(int(start), len(table), step)]
    for number in [*visits, *rng.integers(0, len(table), 20).tolist()]:
        digest = hashlib.sha256(cursor.frame(number).tobytes()).hexdigest()
        if found.setdefault(number, digest) != digest:
            found[number] = "two different ones"
    return [found[number] for number in range(len(table))]


def main() -> None:
    """Parse, compare, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", type=int, default=0, metavar="PROCESSES")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        if given.folder is None:
            write_videos(folder)
        result = check(folder, given.check) if given.check else compare(folder, given.rounds, given.threads)
    print(json.dumps({**result, "environment": environment()}, indent=2))


if __name__ == "__main__":
    main()
