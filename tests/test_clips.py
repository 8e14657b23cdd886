"""Clips: which frames they hold, what stays the same in both views, and that one draw serves all frames of a clip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mocokit.api.measuring import probe_of
from mocokit.api.opening import build_store, configure
from mocokit.contrast.encoders import EncoderConfig, UnknownBackboneError, build_encoder
from mocokit.data.clip_views import draw_stretches, make_clip_views
from mocokit.data.clips import ClipConfig, ClipStore, build_clip_store, first_clips, open_clips, usual_stride
from mocokit.data.loader import BatchLoader, BatchPlan
from mocokit.data.videos import open_videos
from mocokit.data.views import ViewConfig, draw_parameters, plain_view, render, view_recipe
from mocokit.errors import DataError, UsageError
from mocokit.options import PretrainOptions
from mocokit.training.loop import Schedule
from tests.clips import number_of, write_video


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of 40, 20, 5 and 1 frames at 8 a second, which begin at 0, 100, 200 and 250."""
    root = tmp_path_factory.mktemp("clips")
    for name, count, start in (("a", 40, 0), ("b", 20, 100), ("c", 5, 200), ("d", 1, 250)):
        write_video(root / f"{name}.mp4", count, start=start)
    return root


def store_of(folder: Path, **settings: float) -> ClipStore:
    source = open_clips(open_videos(folder), ClipConfig(**settings))  # type: ignore[arg-type]
    return build_clip_store(source, side=24)


def numbers(clips: torch.Tensor, extents: torch.Tensor) -> list[list[int]]:
    """What the frames of uint8 [B, 3, T, S, S] spell."""
    return [
        [number_of(clip[:, t, : size[0], : size[1]].permute(1, 2, 0).numpy()) for t in range(clip.shape[1])]
        for clip, size in zip(clips, extents.tolist(), strict=True)
    ]


def test_clips_follow_each_other_and_the_last_ends_with_the_video(folder: Path) -> None:
    store = store_of(folder, frames=4, stride=3)  # a clip spans 10 frames
    source = store.source
    assert source.index.names == ("a.mp4#0+4x3", "a.mp4#10+4x3", "a.mp4#20+4x3", "a.mp4#30+4x3",
                                  "b.mp4#0+4x3", "b.mp4#10+4x3", "c.mp4#0+4x3")  # fmt: skip
    assert ("d.mp4", "1 frame: nothing moves in it") in source.report.broken
    clips, extents = store.batch(np.arange(7))
    assert clips.shape == (7, 3, 4, 24, 24)
    assert numbers(clips, extents) == [
        [0, 3, 6, 9], [10, 13, 16, 19], [20, 23, 26, 29], [30, 33, 36, 39],
        [100, 103, 106, 109], [110, 113, 116, 119], [200, 203, 204, 204],
    ]  # fmt: skip
    assert len({int(group) for group in source.index.groups}) == 3


def test_what_is_left_over_makes_a_clip_where_it_is_half_of_one(folder: Path) -> None:
    source = open_clips(open_videos(folder), ClipConfig(frames=4, stride=4))  # spans 13; 40 = 3 x 13 + 1, 20 = 13 + 7
    assert [name for name in source.index.names if name.startswith(("a", "b"))] == [
        "a.mp4#0+4x4", "a.mp4#13+4x4", "a.mp4#26+4x4", "b.mp4#0+4x4", "b.mp4#7+4x4",
    ]  # fmt: skip


def test_the_second_view_stays_in_the_video_and_within_the_gap(folder: Path) -> None:
    store = store_of(folder, frames=4, stride=2, speed=2, max_gap=1.0)
    source = store.source
    rows = np.tile(np.arange(len(source.index)), 200)
    ids = np.random.default_rng(0).integers(0, 2**62, len(rows))
    for view in (0, 1):
        start, stride = draw_stretches(store, rows, ids, seed=0, epoch=0, view=view)
        length = source.length[source.video[rows]]
        assert set(stride.tolist()) == {2, 4}
        assert (start >= 0).all()
        assert (start + 3 * stride < np.maximum(length, 3 * stride + 1)).all()
        moved = start - source.start[rows]
        latest = np.maximum(length - 3 * stride - 1, 0)
        own = np.minimum(source.start[rows], latest)
        if view == 0:
            assert np.array_equal(start, own)
        else:
            assert moved.max() == 8  # a second of 8 frames
            assert len(set(moved.tolist())) > 10
    first, second = (draw_stretches(store, rows, ids, seed=0, epoch=epoch, view=1)[0] for epoch in (0, 1))
    assert not np.array_equal(first, second)


def test_without_a_gap_both_views_show_the_same_frames(folder: Path) -> None:
    store = store_of(folder, frames=4, stride=2, max_gap=0.0)
    rows = np.arange(len(store))
    plain = ViewConfig(size=16)
    x_q, x_k = make_clip_views(plain, store, rows, store.source.index.ids, seed=0, epoch=0)
    assert torch.equal(x_q, x_k)
    clips, extents = store.batch(rows)
    assert torch.equal(x_q, plain_view(clips, extents, size=16))


def test_one_draw_serves_all_frames_of_a_clip(folder: Path) -> None:
    store = store_of(folder, frames=4, stride=2, max_gap=1.0)
    config = replace(view_recipe("moco-v2", 16), noise=0.02, rotation=20.0)
    rows, ids = np.arange(len(store)), store.source.index.ids
    views = make_clip_views(config, store, rows, ids, seed=3, epoch=5)
    for view, x in enumerate(views):
        assert x.shape == (len(rows), 3, 4, 16, 16)
        start, stride = draw_stretches(store, rows, ids, seed=3, epoch=5, view=view)
        clips, extents = store.cut(store.source.video[rows], start, stride)
        drawn = draw_parameters(config, extents.numpy(), ids, seed=3, epoch=5, views=(view,))
        for t in range(4):  # frame by frame, each with the clip's own parameters
            alone = render(config, clips[:, :, t].contiguous(), drawn)[0]
            assert torch.equal(x[:, :, t], alone)


def test_a_clip_has_the_same_bits_in_any_batch_and_with_any_worker_count(folder: Path) -> None:
    store = store_of(folder, frames=3, stride=2, max_gap=0.5)
    index = store.source.index
    plan = BatchPlan(index.ids, 4, seed=1)
    config = view_recipe("moco-v2", 16)
    batches = [list(BatchLoader(store, index, config, plan, workers=workers).batches(0, 3)) for workers in (0, 2)]
    for one, two in zip(*batches, strict=True):
        assert torch.equal(one.x_q, two.x_q)
        assert torch.equal(one.x_k, two.x_k)
        assert torch.equal(one.groups, torch.from_numpy(index.groups[one.rows]))
    batch = batches[0][0]
    alone, _ = make_clip_views(config, store, batch.rows[2:3], index.ids[batch.rows[2:3]], seed=1, epoch=0)
    assert torch.equal(alone[0], batch.x_q[2])


def test_clips_with_frames_that_do_not_decode(tmp_path: Path) -> None:
    import av

    write_video(tmp_path / "fine.mp4", 30, start=100)
    path = write_video(tmp_path / "torn.mp4", 30, gop=30)
    with av.open(str(path)) as container:
        packets = [(p.pos, p.size, p.is_keyframe) for p in container.demux(video=0) if p.size]
    raw = bytearray(path.read_bytes())
    for position, size, _ in packets[10:]:
        raw[position : position + size] = b"\xff" * size
    path.write_bytes(raw)
    source = open_clips(open_videos(tmp_path), ClipConfig(frames=5, stride=1))
    if not build_clip_store(source, side=16, max_bad=1.0).skipped:
        pytest.skip("this decoder conceals the damage")
    with pytest.raises(DataError, match=r"have frames that do not decode.*torn.mp4#"):
        build_clip_store(source, side=16)
    store = build_clip_store(source, side=16, max_bad=0.6)
    assert all(one.name.startswith("torn.mp4#") and "frame" in one.reason for one in store.skipped)
    for one in store.skipped:
        assert not store.readable[one.row]
        assert store.readable[store.replaced[one.row]]
    # Stretches that reach into the damage hold the nearest frame that could be read.
    clips, extents = store.cut(np.array([1]), np.array([25]), np.array([1]))
    held = numbers(clips, extents)[0]
    assert len(set(held)) == 1 or max(held) < 30


def test_the_cache_is_used_again(folder: Path, tmp_path: Path) -> None:
    source = open_clips(open_videos(folder), ClipConfig(frames=4, stride=3))
    cache = tmp_path / "clips.u8"
    first = build_clip_store(source, side=16, cache=cache)
    written = cache.stat().st_mtime_ns
    again = build_clip_store(source, side=16, cache=cache)
    assert cache.stat().st_mtime_ns == written
    assert all(torch.equal(a, b) for a, b in zip(first.batch(np.arange(5)), again.batch(np.arange(5)), strict=True))


def test_the_first_clips_are_a_source_of_their_own(folder: Path) -> None:
    source = open_clips(open_videos(folder), ClipConfig(frames=4, stride=3))
    few = first_clips(source, 5)
    assert few.index.names == source.index.names[:5]
    assert len(few.frames.index) == 60
    clips, extents = build_clip_store(few, side=24).batch(np.arange(5))
    assert numbers(clips, extents)[4] == [100, 103, 106, 109]


def test_settings_out_of_range_are_named() -> None:
    for settings, word in (
        ({"frames": 1}, "clip_frames"), ({"stride": 0}, "clip_stride"), ({"speed": 0}, "clip_speed"),
        ({"max_gap": -1.0}, "max_gap"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=word):
            ClipConfig(**settings)  # type: ignore[arg-type]


def test_one_frame_videos_alone_are_no_clips(tmp_path: Path) -> None:
    write_video(tmp_path / "one.mp4", 1)
    with pytest.raises(DataError, match="--video frames"):
        open_clips(open_videos(tmp_path), ClipConfig())


def test_the_usual_stride_is_about_15_frames_a_second(folder: Path) -> None:
    assert usual_stride(open_videos(folder)) == 1
    assert usual_stride(open_videos("moving-shapes")) == 2


# ------------------------------------------------------------------------------------------------------ backbones


@pytest.mark.parametrize("name", ["small-3d", "small-3d-4-8", "small-cnn-4-8"])
def test_backbones_take_clips(name: str) -> None:
    encoder = build_encoder(EncoderConfig(backbone=name, clip=6, dim=8), image_size=16, seed=0).eval()
    x = torch.randn(2, 3, 6, 16, 16)
    h, z = encoder.h_and_z(x)
    assert h.shape == (2, encoder.feature_dim)
    assert z.shape == (2, 8)
    spatial = encoder.spatial_map(x)
    assert spatial.ndim == 4
    torch.testing.assert_close(spatial.mean((2, 3)), h)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["r3d_18", "torchvision:mc3_18", "r2plus1d_18"])
def test_torchvision_video_backbones(name: str) -> None:
    encoder = build_encoder(EncoderConfig(backbone=name, clip=4, dim=8), image_size=32, seed=0).eval()
    assert encoder.features(torch.randn(1, 3, 4, 32, 32)).shape == (1, 512)


def test_an_image_backbone_on_clips_is_the_mean_over_its_frames() -> None:
    """And its tensors have the names they have on images, so that its weights serve both."""
    clips = build_encoder(EncoderConfig(backbone="small-cnn-4-8", clip=5), image_size=16, seed=0).eval()
    images = build_encoder(EncoderConfig(backbone="small-cnn-4-8"), image_size=16, seed=0).eval()
    images.load_state_dict(clips.state_dict())
    x = torch.randn(3, 3, 5, 16, 16)
    apart = torch.stack([images.features(x[:, :, t]) for t in range(5)]).mean(0)
    torch.testing.assert_close(clips.features(x), apart)
    torch.testing.assert_close(clips.features(x.flip(2)), clips.features(x))


def test_time_matters_to_a_backbone_over_time() -> None:
    encoder = build_encoder(EncoderConfig(backbone="small-3d-4-8", clip=6), image_size=16, seed=0).eval()
    x = torch.randn(2, 3, 6, 16, 16)
    assert not torch.allclose(encoder.features(x.flip(2)), encoder.features(x), atol=1e-4)


def test_backbones_that_do_not_fit_are_refused() -> None:
    for name, clip, stem, words in (
        ("r3d_18", 0, "auto", "--video clips"),
        ("small-3d", 0, "auto", "--video clips"),
        ("small-3d", 8, "small", "no effect on small-3d"),
        ("small-3d-x", 8, "auto", "small-3d-WIDTH"),
        ("small-3", 8, "auto", "Did you mean 'small-3d'"),
    ):
        with pytest.raises(UnknownBackboneError, match=words):
            build_encoder(EncoderConfig(backbone=name, clip=clip, stem=stem), image_size=16, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2 frames"):
        EncoderConfig(clip=1)


@pytest.mark.parametrize(("size", "kept"), [(24, True), (160, False)])
def test_a_probes_clips_are_kept_where_all_their_frames_are_small(folder: Path, size: int, kept: bool) -> None:
    options = PretrainOptions(video="clips", clip_frames=4, clip_stride=2, image_size=size, batch_size=4)
    source, config = configure(str(folder), options, {})
    store = build_store(source, side=24, cache=None, max_bad=0.0)
    loader = BatchLoader(store, source.index, config.views, BatchPlan(source.index.ids, 4, 0))
    probe = probe_of(loader, config, Schedule(2, 4, 10, 1), [], torch.device("cpu"))
    assert probe is not None
    expected = loader.of_rows(np.sort(np.argsort(source.index.ids)), 0)
    for number, x in enumerate((expected.x_q, expected.x_k)):
        assert torch.equal(probe.view(number), x)
        assert (probe.view(number) is probe.view(number)) == kept
