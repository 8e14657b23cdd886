"""Sets of videos: folders, lists and the generated set; frames of them as pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mocokit.data.generated_videos import MOTIONS, generated_name, moving_shapes
from mocokit.data.pixels import build_pixel_store, side_for
from mocokit.data.randomness import sample_id
from mocokit.data.sources import open_source
from mocokit.data.videos import frame_source, holds_videos, open_videos, spaced_frames
from mocokit.errors import DataError, UsageError
from tests.clips import number_of, write_sound, write_video


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of two videos each, one file with sound alone, one cut."""
    root = tmp_path_factory.mktemp("videos")
    for place, name in enumerate(("a/1.mp4", "a/2.mkv", "b/3.avi", "b/4.mp4")):
        (root / name).parent.mkdir(exist_ok=True)
        write_video(root / name, 24 + 8 * place, start=50 * place)
    write_sound(root / "b" / "sound.mp4")
    (root / "b" / "cut.mp4").write_bytes((root / "a" / "1.mp4").read_bytes()[:300])
    (root / "notes.txt").write_text("no video")
    return root


def test_a_folder_gives_one_row_per_readable_video(folder: Path) -> None:
    videos = open_videos(folder)
    assert videos.index.names == ("a/1.mp4", "a/2.mkv", "b/3.avi", "b/4.mp4")
    assert videos.index.class_names == ("a", "b")
    assert videos.index.labels.tolist() == [0, 0, 1, 1]
    assert [len(table) for table in videos.tables] == [24, 32, 40, 48]
    assert {name for name, _ in videos.report.broken} == {"b/sound.mp4", "b/cut.mp4"}
    assert any("2 videos passed over" in line and "only sound" in line for line in videos.report.lines())
    reader = videos.reader(3)
    assert number_of(reader.frame(7)) == 157
    reader.close()


def test_subsets_keep_rows_and_readers_together(folder: Path) -> None:
    some = open_videos(folder).subset(np.array([3, 1]))
    assert some.index.names == ("b/4.mp4", "a/2.mkv")
    assert [len(table) for table in some.tables] == [48, 32]
    assert number_of(some.reader(1).frame(2)) == 52
    assert some.file is not None
    assert some.file(0).name == "4.mp4"


def test_lists_and_tables(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("file,label,group,split\na/1.mp4,x,g,train\nb/4.mp4,y,h,test\n")
    videos = open_videos(table, root=folder)
    assert videos.index.class_names == ("x", "y")
    assert videos.index.split_names == ("train", "test")
    assert videos.groups().tolist() == [sample_id("g"), sample_id("h")]
    plain = tmp_path / "list.txt"
    plain.write_text("a/2.mkv\n")
    assert open_videos(plain, root=folder).index.names == ("a/2.mkv",)
    single = open_videos(folder / "a" / "1.mp4")
    assert single.index.names == ("1.mp4",)
    assert single.groups().tolist() == single.index.ids.tolist()


def test_what_is_no_set_of_videos_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean 'moving-shapes'"):
        open_videos("moving-shape")
    (tmp_path / "x.mp4").write_text("nothing")
    with pytest.raises(DataError, match=r"None of the 1 videos .*'x.mp4'"):
        open_videos(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="No videos in"):
        open_videos(tmp_path / "empty")
    (tmp_path / "pic.png").write_text("nothing")
    with pytest.raises(UsageError, match="nothing that videos can be read from"):
        open_videos(tmp_path / "pic.png")
    with pytest.raises(DataError, match="--video frames or --video clips"):
        open_source(folder)
    with pytest.raises(UsageError, match="--video clips or --video frames"):
        open_source("moving-shapes")


def test_holds_videos(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gif").write_text("")
    (tmp_path / "l.csv").write_text("file,label\nx.mp4,1\n")
    assert [holds_videos(str(p)) for p in (folder, tmp_path, tmp_path / "l.csv", folder / "a" / "1.mp4")] == [
        True, False, True, True,
    ]  # fmt: skip
    assert holds_videos("moving-shapes")
    assert not holds_videos("digits")


def test_frames_are_pictures_with_the_video_as_group(folder: Path) -> None:
    videos = open_videos(folder)
    source = spaced_frames(videos, 1.0)
    # 24 frames at 8 a second: the frames on show at 0.5, 1.5 and 2.5 seconds are 4, 12 and 20.
    assert source.index.names[:3] == ("a/1.mp4#4", "a/1.mp4#12", "a/1.mp4#20")
    assert len(source.index) == 3 + 4 + 5 + 6
    groups = source.index.groups
    assert groups.tolist() == np.repeat([sample_id(name) for name in videos.index.names], [3, 4, 5, 6]).tolist()
    assert source.index.labels.tolist() == [0] * 7 + [1] * 11
    numbers = [number_of(source.read(row)) for row in (17, 0, 9, 1)]
    assert numbers == [150 + 44, 4, 100 + 20, 12]
    store = build_pixel_store(source, side=side_for(source, 16), workers=2)
    assert store.pixels.shape == (18, 3, 24, 24)
    assert not store.skipped
    whole = np.asarray(store.pixels[4][:, : store.extents[4][0], : store.extents[4][1]]).transpose(1, 2, 0)
    assert number_of(whole) == 50 + 12


def test_near_duplicate_frames_are_dropped(tmp_path: Path) -> None:
    import av

    path = tmp_path / "still.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for number in range(24):
            level = 40 if number < 12 else 200
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    source = spaced_frames(open_videos(path), 1.0)
    assert source.index.names == ("still.mp4#2", "still.mp4#14")


def test_long_videos_are_cut_at_key_frames_for_the_threads(tmp_path: Path) -> None:
    path = write_video(tmp_path / "long.mp4", 700, gop=100)
    videos = open_videos(path)
    source = frame_source(videos, [np.arange(700)])
    assert source.frames is not None
    runs = source.frames.run_of
    begins = np.flatnonzero(np.diff(runs)) + 1
    assert len(begins) == 2
    assert set(begins.tolist()) <= set(videos.tables[0].keys.tolist())
    assert np.diff([0, *begins, 700]).min() >= 100
    assert np.diff([0, *begins]).min() >= 256
    one, two = (build_pixel_store(source, side=16, workers=workers) for workers in (1, 3))
    assert np.array_equal(one.pixels, two.pixels)


def test_frames_that_do_not_decode_are_named(folder: Path, tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", 30, gop=30)
    import av

    with av.open(str(path)) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0) if p.size]
    raw = bytearray(path.read_bytes())
    for position, size in packets[20:]:
        raw[position : position + size] = bytes(size)
    path.write_bytes(raw)
    source = frame_source(open_videos(path), [np.arange(30)])
    store = build_pixel_store(source, side=16, max_bad=0.5)
    lost = {sample.row for sample in store.skipped}
    assert lost <= set(range(19, 30))
    assert all("frame" in sample.reason for sample in store.skipped)
    with pytest.raises(UsageError, match="frame rate"):
        spaced_frames(open_videos(path), 0.0)


# ------------------------------------------------------------------------------------------------ moving-shapes


def test_moving_shapes_are_the_same_every_time_and_balanced() -> None:
    one, two = moving_shapes(), moving_shapes()
    assert np.array_equal(one.read(123, 7), two.read(123, 7))
    assert not np.array_equal(one.read(123, 7), moving_shapes(1).read(123, 7))
    index = one.index
    assert len(index) == 840
    assert [len(index.rows_of(split)) for split in ("train", "test")] == [600, 240]
    cells = np.stack([one.labellings[name][0] for name in ("motion", "shape", "color")])
    _, counts = np.unique(np.concatenate([cells, index.splits[None]]), axis=1, return_counts=True)
    assert sorted(set(counts.tolist())) == [10, 25]
    assert one.labelled_by("shape").index.class_names == ("disc", "square", "diamond")
    with pytest.raises(UsageError, match="motion, shape, color"):
        one.labelled_by("size")


def test_a_seed_in_the_name_gives_other_videos() -> None:
    zero, named, seven = (open_videos(spec) for spec in ("moving-shapes", "moving-shapes-0", "moving-shapes-7"))
    assert np.array_equal(zero.reader(123).frame(7), named.reader(123).frame(7))
    assert np.array_equal(seven.reader(123).frame(7), moving_shapes(7).read(123, 7))
    assert zero.index.hash == named.index.hash != seven.index.hash
    assert seven.name == "moving-shapes-7"
    assert [generated_name(spec) for spec in ("moving-shapes-x", "moving-shapes-", "shapes-1", "-1")] == [None] * 4


def centres(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """[T, 2] centre of mass on a canvas without edges, by the angle of the first Fourier coefficient."""
    bright = frames.sum(3).astype(float)
    bright = np.where(bright > bright.max() / 2, bright, 0)
    side = bright.shape[1]
    wave = np.exp(2j * np.pi * (np.arange(side) + 0.5) / side)
    found = [np.angle((bright.sum(2) * wave).sum(1)), np.angle((bright.sum(1) * wave).sum(1))]
    return np.stack(found, 1) / (2 * np.pi) * side


@pytest.mark.parametrize("motion", MOTIONS)
def test_each_motion_moves_as_it_is_called(motion: str) -> None:
    made = moving_shapes()
    rows = np.flatnonzero(made.labellings["motion"][0] == MOTIONS.index(motion))[::20]
    speeds = []
    for row in rows.tolist():
        frames = np.stack([made.read(row, t) for t in range(made.frames)])
        step = np.diff(centres(frames), axis=0)
        step = (step + 12) % 24 - 12
        pace = np.linalg.norm(step, axis=1)
        speeds.append(pace.mean())
        heading = np.unwrap(np.arctan2(step[:, 0], step[:, 1]))
        if motion == "line":
            assert pace.std() < 0.25
            assert np.abs(heading - heading.mean()).max() < 0.5
        if motion == "circle":
            assert pace.std() < 0.25
            assert abs(heading[-1] - heading[0]) > np.pi
        if motion == "swing":
            assert np.linalg.norm(step.sum(0)) < 10
            assert pace.std() > 0.25
        if motion == "kick":
            assert (np.diff(pace) ** 3).mean() > 0  # it speeds up at once and slows down over several frames
    assert 0.8 < np.mean(speeds) < 1.7


def test_no_single_frame_tells_the_motion() -> None:
    """The mean picture of each motion is flat: the shape is anywhere with the same chance."""
    made = moving_shapes()
    for number in range(len(MOTIONS)):
        rows = np.flatnonzero(made.labellings["motion"][0] == number)
        means = np.mean([made.read(int(row), 0).astype(float).mean(2) for row in rows], axis=0)
        assert means.std() < 0.35 * means.mean()
