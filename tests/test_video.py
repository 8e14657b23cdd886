"""Decoding: any frame in any order is the frame that sequential decoding gives; odd files are named, not fatal."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import time
from pathlib import Path

import av
import numpy as np
import pytest

from mocokit.data.decode import UnreadableImageError
from mocokit.data.video import FrameTable, UnreadableVideoError, VideoCursor, VideoLimits, fitted_size, frame_table
from mocokit.data.videos import open_videos
from mocokit.errors import DataError
from tests.clips import number_of, picture, write_sound, write_video

KINDS = {
    "mp4": {"codec": "mpeg4", "b_frames": 2},
    "mov": {"codec": "mpeg4"},
    "mkv": {"codec": "mpeg4", "b_frames": 1},
    "avi": {"codec": "mpeg4", "b_frames": 2},
    "mpg": {"codec": "mpeg2video", "rate": 25, "b_frames": 2, "gop": 12},
    "webm": {"codec": "libvpx"},
}


def test_a_picture_survives_decoding() -> None:
    assert [number_of(picture(n)) for n in (0, 1, 37, 255)] == [0, 1, 37, 255]


@pytest.mark.parametrize("suffix", KINDS)
def test_every_frame_by_random_access_is_the_frame_of_that_number(tmp_path: Path, suffix: str) -> None:
    path = write_video(tmp_path / f"v.{suffix}", 40, **KINDS[suffix])  # type: ignore[arg-type]
    table = frame_table(path)
    assert len(table) == 40
    assert (table.height, table.width) == (32, 48)
    cursor = VideoCursor(path, table)
    sequential = [cursor.frame(number) for number in range(40)]
    assert [number_of(rgb) for rgb in sequential] == list(range(40))
    order = list(range(40)) * 2
    random.Random(0).shuffle(order)
    for number in order:
        assert np.array_equal(cursor.frame(number), sequential[number]), number
    cursor.close()


def test_decoding_agrees_with_plain_pyav(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", 20, b_frames=2)
    with av.open(str(path)) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    table = frame_table(path)
    cursor = VideoCursor(path, table)
    assert all(np.array_equal(cursor.frame(number), rgb) for number, rgb in enumerate(expected))
    assert len(expected) == len(table)


def _digests(job: tuple[str, int]) -> list[str]:
    path, seed = job
    table = frame_table(Path(path))
    cursor = VideoCursor(Path(path), table)
    order = list(range(len(table)))
    random.Random(seed).shuffle(order)
    found = {number: hashlib.sha256(cursor.frame(number).tobytes()).hexdigest() for number in order}
    return [found[number] for number in range(len(table))]


@pytest.mark.slow
def test_other_processes_get_the_same_frames(tmp_path: Path) -> None:
    paths = [str(write_video(tmp_path / f"v.{kind}", 30, **how)) for kind, how in KINDS.items()]  # type: ignore[arg-type]
    jobs = [(path, seed) for seed in (1, 2, 3) for path in paths]
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        there = pool.map(_digests, jobs, chunksize=len(paths))
    assert there[: len(paths)] == there[len(paths) : 2 * len(paths)] == there[2 * len(paths) :]
    assert all(len(set(digests)) == 30 for digests in there)


def test_a_variable_rate_gives_frames_by_time(tmp_path: Path) -> None:
    stamps = [0, 1, 2, 3, 20, 21, 22, 23, 24, 40]
    path = write_video(tmp_path / "v.mkv", len(stamps), rate=10, stamps=stamps)
    table = frame_table(path)
    np.testing.assert_allclose(table.times, np.array(stamps) / 10, atol=2e-3)
    assert not table.steady
    steady = table.steady_frames()
    due = np.arange(len(steady)) / table.rate
    brute = [max(i for i, t in enumerate(table.times) if t <= moment + 1e-9) for moment in due]
    assert steady.tolist() == brute
    assert table.at(np.array([-1.0, 0.35, 1.9, 99.0])).tolist() == [0, 3, 3, 9]


def test_a_steady_rate_keeps_all_frames(tmp_path: Path) -> None:
    table = frame_table(write_video(tmp_path / "v.mp4", 12))
    assert table.steady
    assert table.rate == pytest.approx(8)
    assert table.steady_frames().tolist() == list(range(12))


def test_smaller_frames_keep_their_shape(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", 4)
    cursor = VideoCursor(path, frame_table(path))
    small = cursor.frame(3, side=24)
    assert small.shape == (16, 24, 3)
    assert number_of(small) == 3
    assert cursor.frame(3, side=500).shape == (32, 48, 3)
    assert fitted_size(1, 1000, 10) == (1, 10)


def test_rotation_is_applied(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mov", 3)
    raw = bytearray(path.read_bytes())
    # The track header's matrix, 16.16 fixed point: (1 0 / 0 1) becomes a turn by 90 degrees.
    identity = bytes.fromhex("00010000" + "00000000" * 3 + "00010000" + "00000000" * 3 + "40000000")
    turned = bytes.fromhex("00000000" + "00010000" + "00000000" + "ffff0000" + "00000000" * 4 + "40000000")
    place = raw.find(identity, raw.find(b"tkhd"))
    assert place > 0
    raw[place : place + len(identity)] = turned
    path.write_bytes(raw)
    table = frame_table(path)
    assert (table.height, table.width) == (48, 32)
    upright = VideoCursor(path, table).frame(2)
    assert upright.shape == (48, 32, 3)
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
    assert number_of(np.rot90(upright, -(frame.rotation // 90))) == 2


def broken(folder: Path) -> dict[str, str]:
    """Files that are no videos, with a word of the reason."""
    whole = write_video(folder / "whole.mp4", 30).read_bytes()
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (folder / "noise.mkv").write_bytes(random.Random(0).randbytes(5000))
    write_sound(folder / "sound.mp4")
    (folder / "list.mp4").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{folder}/whole.mp4\n")
    (folder / "text.avi").write_text("not a video")
    return {"empty.mp4": "", "cut.mp4": "", "noise.mkv": "", "sound.mp4": "only sound", "list.mp4": "", "text.avi": ""}


def test_broken_files_are_refused_quickly(tmp_path: Path) -> None:
    for name, words in broken(tmp_path).items():
        start = time.monotonic()
        with pytest.raises(UnreadableVideoError) as caught:
            frame_table(tmp_path / name)
        assert words in caught.value.reason
        assert time.monotonic() - start < 30
    with pytest.raises(UnreadableVideoError, match="No such file"):
        frame_table(tmp_path / "missing.mp4")
    with pytest.raises(UnreadableVideoError, match="not a regular file"):
        frame_table(tmp_path)
    os.mkfifo(tmp_path / "pipe.mp4")
    with pytest.raises(UnreadableVideoError, match="not a regular file"):
        frame_table(tmp_path / "pipe.mp4")


def test_limits_are_kept(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", 10)
    for limits, words in (
        (VideoLimits(max_bytes=100), "more than the limit of 100"),
        (VideoLimits(max_pixels=1000), "frames of 48 x 32"),
        (VideoLimits(max_frames=9), "more than 9 frames"),
    ):
        with pytest.raises(UnreadableVideoError, match=words):
            frame_table(path, limits)


def test_a_damaged_stretch_names_its_frames_and_leaves_the_others(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", 30, gop=6)
    table = frame_table(path)
    with av.open(str(path)) as container:
        packets = [(p.pos, p.size, p.pts) for p in container.demux(video=0) if p.size]
    raw = bytearray(path.read_bytes())
    position, size, _ = packets[12]
    raw[position : position + size] = bytes(size)
    path.write_bytes(raw)
    cursor = VideoCursor(path, frame_table(path))
    kept, lost = [], []
    for number in range(30):
        try:
            kept.append((number, number_of(cursor.frame(number))))
        except UnreadableImageError as error:
            lost.append((number, error.reason))
    assert len(table) == 30
    assert {number for number, told in kept if told == number} >= set(range(12)) | set(range(18, 30))
    assert all(12 <= number < 18 and f"frame {number}" in reason for number, reason in lost)


def test_a_table_of_one_frame_and_of_none(tmp_path: Path) -> None:
    table = frame_table(write_video(tmp_path / "one.mp4", 1))
    assert len(table) == 1
    assert table.rate == 1.0
    assert table.steady
    assert table.steady_frames().tolist() == [0]
    with pytest.raises(UnreadableVideoError):
        frame_table(_no_frames(tmp_path / "none.mp4"))
    with pytest.raises(ValueError, match="frame 1 of a video with 1"):
        VideoCursor(tmp_path / "one.mp4", table).frame(1)


def _no_frames(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        container.start_encoding()
    return path


def test_a_file_that_goes_away_is_an_unreadable_frame(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", 10)
    cursor = VideoCursor(path, frame_table(path))
    path.unlink()
    with pytest.raises(UnreadableImageError, match="frame 2"):
        cursor.frame(2)


def test_tables_find_frames_by_time() -> None:
    table = FrameTable(times=np.array([0.0, 0.1, 0.5]), stamps=None, keys=np.zeros(1, np.int64), height=1, width=1)
    assert table.at(np.array([0.0, 0.09, 0.1, 0.3, 0.5, 2.0])).tolist() == [0, 0, 1, 1, 2, 2]


# ------------------------------------------------------------------------------------------ files that are odd


@pytest.mark.parametrize("suffix", ["mkv", "avi", "mpg", "ts"])
def test_a_file_that_was_cut_has_the_frames_before_the_cut(tmp_path: Path, suffix: str) -> None:
    how = KINDS.get(suffix, {"codec": "mpeg2video", "rate": 25, "gop": 6})
    path = write_video(tmp_path / f"v.{suffix}", 40, **how)  # type: ignore[arg-type]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 6 // 10])
    start = time.monotonic()
    table = frame_table(path)
    assert 5 < len(table) < 40
    cursor = VideoCursor(path, table)
    order = list(range(len(table)))
    random.Random(1).shuffle(order)
    read = {}
    for number in order:
        try:
            read[number] = number_of(cursor.frame(number))
        except UnreadableImageError as error:
            assert f"frame {number}" in error.reason  # noqa: PT017 some frames before a cut don't decode, some do
    assert len(read) >= len(table) - 3
    assert sum(number == told for number, told in read.items()) >= len(read) - 3
    assert time.monotonic() - start < 30


def test_a_file_without_its_key_frame_is_refused_or_read_the_same_in_any_order(tmp_path: Path) -> None:
    whole = write_video(tmp_path / "whole.mkv", 20, gop=1000)
    for kind in ("mkv", "ts"):
        path = tmp_path / f"headless.{kind}"
        with av.open(str(whole)) as source, av.open(str(path), "w") as target:
            stream = target.add_stream_from_template(source.streams.video[0])
            for packet in list(source.demux(video=0))[1:]:
                if packet.size:
                    packet.stream = stream
                    target.mux(packet)
        start = time.monotonic()
        assert _told(path, 1) == _told(path, 2)
        assert len(_told(path, 1)) <= 19
        assert time.monotonic() - start < 30


def _told(path: Path, seed: int) -> list[str]:
    """As `_digests`, with the reason in place of a frame, or of the file, that does not decode."""
    try:
        table = frame_table(path)
    except UnreadableVideoError as error:
        return [error.reason]
    cursor = VideoCursor(path, table)
    order = list(range(len(table)))
    random.Random(seed).shuffle(order)
    found = {}
    for number in order:
        try:
            found[number] = hashlib.sha256(cursor.frame(number).tobytes()).hexdigest()
        except UnreadableImageError as error:
            found[number] = error.reason
    return [found[number] for number in range(len(table))]


def test_a_wrong_duration_in_the_header_changes_nothing(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", 20)
    before = frame_table(path)
    raw = bytearray(path.read_bytes())
    for box in (b"mvhd", b"mdhd"):  # version 0: type, version and flags, two dates, units a second, duration
        place = raw.find(box) + 4 + 4 + 8 + 4
        assert int.from_bytes(raw[place : place + 4], "big") < 10**6
        raw[place : place + 4] = (2**31 - 1).to_bytes(4, "big")
    path.write_bytes(raw)
    after = frame_table(path)
    assert np.array_equal(before.times, after.times)
    cursor = VideoCursor(path, after)
    assert [number_of(cursor.frame(number)) for number in (19, 3, 11)] == [19, 3, 11]


def test_a_day_long_video_is_a_table_like_any_other(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mkv", 25, rate=1, stamps=[3600 * hour for hour in range(25)])
    table = frame_table(path)
    assert table.times[-1] == 86_400
    assert table.steady
    cursor = VideoCursor(path, table)
    assert [number_of(cursor.frame(number)) for number in (24, 0, 13)] == [24, 0, 13]


@pytest.mark.slow
def test_frames_of_8k_are_read_and_larger_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.mkv"
    for height, width in ((4320, 7680), (6000, 10_000)):
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mjpeg", rate=1)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuvj420p"
            container.mux(stream.encode(av.VideoFrame(width, height, "yuvj420p")))
            container.mux(stream.encode())
        start = time.monotonic()
        if height == 4320:
            assert VideoCursor(path, frame_table(path)).frame(0, side=96).shape == (54, 96, 3)
        else:
            with pytest.raises(UnreadableVideoError, match="frames of 10000 x 6000, more than the limit"):
                frame_table(path)
        assert time.monotonic() - start < 30


# --------------------------------------------------------------------------------------------- kept tables


def test_unchanged_videos_are_not_looked_through_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v").mkdir()
    for number in range(3):
        write_video(tmp_path / "v" / f"{number}.{('mp4', 'avi', 'mkv')[number]}", 20 + number)
    (tmp_path / "v" / "broken.mp4").write_bytes(b"\0" * 50)
    cache = tmp_path / "cache" / "frames.tables"
    first = open_videos(tmp_path / "v", tables=cache)
    looked: list[str] = []

    def looks(path: Path, limits: VideoLimits | None = None) -> FrameTable:
        looked.append(path.name)
        return frame_table(path, limits)

    monkeypatch.setattr("mocokit.data.videos.frame_table", looks)
    again = open_videos(tmp_path / "v", tables=cache)
    assert looked == ["broken.mp4"]
    for one, other in zip(first.tables, again.tables, strict=True):
        assert np.array_equal(one.times, other.times)
        assert np.array_equal(one.keys, other.keys)
        assert (one.stamps is None) == (other.stamps is None)
        assert one.stamps is None or np.array_equal(one.stamps, other.stamps)
        assert (one.height, one.width) == (other.height, other.width)
    assert first.index.hash == again.index.hash
    looked.clear()
    write_video(tmp_path / "v" / "0.mp4", 12)
    os.utime(tmp_path / "v" / "1.avi", ns=(1, 1))
    changed = open_videos(tmp_path / "v", tables=cache)
    assert sorted(looked) == ["0.mp4", "1.avi", "broken.mp4"]
    assert [len(table) for table in changed.tables] == [12, 21, 22]
    looked.clear()
    kept = cache.read_bytes()
    for damaged in (kept[:-1], b"{}\n", b"", kept.replace(b"frames", b"framez", 1), kept[:-8] + b"\1" * 8):
        cache.write_bytes(damaged)
        assert [len(table) for table in open_videos(tmp_path / "v", tables=cache).tables] == [12, 21, 22]
        assert cache.read_bytes() == kept
    assert len(looked) == 5 * 4


def test_other_limits_do_not_use_what_was_kept(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    write_video(tmp_path / "v" / "a.mp4", 20)
    open_videos(tmp_path / "v", tables=tmp_path / "t")
    with pytest.raises(DataError, match="more than 5 frames"):
        open_videos(tmp_path / "v", tables=tmp_path / "t", limits=VideoLimits(max_frames=5))
