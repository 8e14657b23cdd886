"""Runs on clips in use: fine-tuning and classifiers, export, vectors, search and its page."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from mocokit import api
from mocokit.contrast.encoders import EncoderConfig, build_encoder
from mocokit.data.clip_views import moved_view
from mocokit.data.videos import open_videos
from mocokit.data.views import ViewConfig, make_views
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.features import extract
from mocokit.evaluation.labelled_videos import VideoData, open_labelled_videos
from mocokit.evaluation.tuned_folder import load_tuned
from mocokit.evaluation.tuning import TuneSettings, mean_by
from mocokit.evaluation.video_overlap import video_overlap
from mocokit.exporting import formats
from mocokit.exporting.blueprint import backbone_tensors, blueprint_of
from mocokit.retrieval.index import open_index
from mocokit.retrieval.pictures import Pictures
from mocokit.training.run import load_run
from tests.browser import chromium
from tests.clips import write_motion
from tests.test_exporting import read_as_a_stranger
from tests.test_motion import OPTIONS

CLIPS = {"video": "clips", "clip_frames": 6, "backbone": "small-3d-4-8", "max_gap": 0.5}
FAST = TuneSettings(steps=3, lr=(0.001,), batch_size=8)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 videos of 16 frames and a broken one."""
    return write_motion(tmp_path_factory.mktemp("use"), per_class=10)


@pytest.fixture(scope="module")
def clip_run(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "clips"
    api.pretrain(videos, out, **{**CLIPS, **OPTIONS, "epochs": 1})  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="module")
def labelled(videos: Path, clip_run: Path) -> VideoData:
    return open_labelled_videos(str(videos), load_run(clip_run).config.data, size=16)


@pytest.fixture(scope="module")
def tuned(videos: Path, clip_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "ft"
    api.finetune(clip_run, videos, out, labels_per_class="2,all", draws=1, settings=FAST, quiet=True)
    return out


def test_logits_are_averaged_by_video() -> None:
    logits, place = torch.randn(7, 3), np.array([0, 2, 2, 1, 0, 2, 1])
    expected = np.stack([logits.numpy()[place == video].mean(0) for video in range(3)])
    assert np.allclose(mean_by(logits, place, 3).numpy(), expected, atol=1e-6)
    assert mean_by(logits, place, 4)[3].tolist() == [0, 0, 0]


def test_a_moved_clip_is_its_frames_moved_alike() -> None:
    config = ViewConfig(size=16, flip=0.5, rotation=8.0, zoom=(0.95, 1.15), shift=0.05)
    clip = torch.randint(0, 256, (3, 3, 4, 24, 24), dtype=torch.uint8)
    extents, ids = torch.full((3, 2), 24), np.array([5, 6, 7])
    moved = moved_view(config, clip, extents, ids, seed=1, epoch=2, view=3)
    assert moved.shape == (3, 3, 4, 16, 16)
    for t in range(4):
        alone = make_views(config, clip[:, :, t].contiguous(), extents, ids, seed=1, epoch=2, views=(3,))[0]
        assert torch.equal(moved[:, :, t], alone)


@pytest.mark.slow
def test_labels_and_splits_are_of_videos(labelled: VideoData, tuned: Path, clip_run: Path) -> None:
    result = api.finetune(
        clip_run, tuned_data(labelled), tuned, labels_per_class="2,all", draws=1, settings=FAST, quiet=True
    )
    bank = len(labelled.split.train) + len(labelled.split.val)
    assert result.values["n_test"] == len(labelled.split.test)
    assert {point["labels"] for point in result.points} == {4, bank}
    assert f"{len(labelled.split.test)} test videos" in result.table
    assert result.values["pretraining_saw_test_images"].startswith("yes: pretraining used all test videos")
    rows, place = labelled.of(labelled.split.test)
    assert len(rows) > len(labelled.split.test) == len(np.unique(place))


def tuned_data(labelled: VideoData) -> Path:
    """The folder that the labelled videos lie in."""
    assert labelled.videos.file is not None
    return labelled.videos.file(0).parent.parent


@pytest.mark.slow
def test_a_classifier_of_clips_says_the_mean_over_a_video(
    videos: Path, tuned: Path, labelled: VideoData, tmp_path: Path
) -> None:
    found = api.predict(tuned, videos, tmp_path / "p.csv", quiet=True)
    assert (found.images, found.unreadable, sum(found.counts.values())) == (21, 1, 20)
    with (tmp_path / "p.csv").open() as stream:
        rows = {row["path"]: row for row in csv.DictReader(stream)}
    assert (rows["broken.mp4"]["class"], rows["broken.mp4"]["probability"]) == ("", "")
    model, clips = load_tuned(tuned), labelled.clips
    assert clips is not None
    mean, std = (torch.tensor(one)[None, :, None, None, None] for one in (model.mean, model.std))
    for video in (0, 13):
        mine = labelled.of(np.array([video]))[0]
        pixels, extents = clips.batch(mine)
        height, width = extents[0].tolist()
        with torch.inference_mode():
            x = torch.stack([whole_view(clip[:, :, :height, :width], model.size) for clip in pixels])
            chance = torch.softmax(model.model((x - mean) / std).double().mean(0) / model.temperature, 0)
        row = rows[labelled.index.names[video]]
        assert row["class"] == model.class_names[int(chance.argmax())]
        assert float(row["probability"]) == pytest.approx(float(chance.max()), abs=2e-3)


def whole_view(clip: torch.Tensor, size: int) -> torch.Tensor:
    """[3, T, size, size] of a clip uint8 [3, T, H, W]: the middle square, shrunk by torch's own antialiased resize."""
    side = min(clip.shape[2:])
    top, left = (clip.shape[2] - side) // 2, (clip.shape[3] - side) // 2
    square = clip[:, :, top : top + side, left : left + side].float().transpose(0, 1) / 255
    return F.interpolate(square, (size, size), mode="bilinear", antialias=True).transpose(0, 1)


@pytest.mark.slow
def test_what_a_classifier_of_clips_can_not_read_is_named(tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Name a folder of videos"):
        api.predict(tuned, "digits", tmp_path / "p.csv", quiet=True)


def test_videos_that_changed_since_the_training_are_not_compared(videos: Path, clip_run: Path, tmp_path: Path) -> None:
    run = load_run(clip_run)
    data = open_labelled_videos(str(videos), run.config.data, size=16)
    assert video_overlap([run], data).by_content == len(data.split.test)
    victim = videos / "right" / "00.mp4"
    before = victim.read_bytes()
    try:
        victim.write_bytes((videos / "right" / "01.mp4").read_bytes())
        again = open_labelled_videos(str(videos), run.config.data, size=16)
        found = video_overlap([run], again)
    finally:
        victim.write_bytes(before)
    assert found.by_content is None
    assert found.text == "unknown: the videos of the pretraining were changed since, so they were not compared"
    assert open_videos(videos).index.names[0].startswith("jump")


# ------------------------------------------------------------------------------------------------------- export


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(np.random.default_rng(3).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    return path


@pytest.mark.parametrize("format", ["safetensors", "onnx"])
def test_an_exported_encoder_of_clips_computes_the_same_elsewhere(
    clip_run: Path, photo: Path, tmp_path: Path, format: str
) -> None:
    done = api.export(clip_run, format, tmp_path / "e", head=True, quiet=True)
    assert (done.parity.what, done.parity.images) == ("clips", 32)
    found, _ = read_as_a_stranger(tmp_path / "e", photo, "mocokit", tmp_path / "out.npz")
    mine = api.load(clip_run)
    frames = [Image.open(photo).rotate(90 * t) for t in range(6)]
    with torch.inference_mode():
        h = mine(mine.transform_clip(frames)[None]).numpy()
        backwards = mine(mine.transform_clip(frames[::-1])[None]).numpy()
    assert np.allclose(found["h"], h, atol=1e-4)
    assert np.abs(found["h"] - backwards).max() > 10 * np.abs(found["h"] - h).max()
    assert found["z"].shape == (1, 8)
    assert "Pillow images, frames of one video in order" in (tmp_path / "e" / "README.md").read_text()


def test_formats_without_clips_say_which_have_them(clip_run: Path, tmp_path: Path) -> None:
    for format in ("timm", "torchvision"):
        with pytest.raises(UsageError, match=r"reads clips\. Use --format safetensors, hf or onnx"):
            api.export(clip_run, format, tmp_path / format, quiet=True)


@pytest.mark.slow
def test_a_tuned_encoder_of_clips_is_exported_too(tuned: Path, tmp_path: Path) -> None:
    done = api.export(tuned, "hf", tmp_path / "e", quiet=True)
    assert done.parity.source == "moving-shapes"
    assert (tmp_path / "e" / "model.py").exists()


@pytest.mark.parametrize("name", ["r3d_18", "small-3d-4-6-8", "small-cnn-4-8"])
def test_a_backbone_of_clips_is_rebuilt_by_its_own_library(name: str) -> None:
    config = EncoderConfig(backbone=name, dim=8, clip=4)
    encoder = build_encoder(config, image_size=16, seed=0).eval()
    blueprint = blueprint_of(encoder, config, ViewConfig(size=16))
    weights = formats.safetensors.torch.save(backbone_tensors(encoder, blueprint.backbone))
    backbone = formats.rebuild(blueprint.backbone, weights)
    again = formats.standalone.Encoder(backbone, None, blueprint.frame_by_frame).eval()
    clip = torch.randn(2, 3, 4, 16, 16)
    with torch.inference_mode():
        assert torch.allclose(again(clip), encoder.features(clip), atol=1e-5)
    assert blueprint.frame_by_frame == (name == "small-cnn-4-8")


def test_another_number_of_frames_is_refused(clip_run: Path, photo: Path) -> None:
    mine = api.load(clip_run)
    with pytest.raises(DataError, match=r"clips of 6 frames. Got 2"):
        mine.transform_clip([photo, photo])
    with pytest.raises(DataError, match="one size"):
        mine.transform_clip([photo] * 5 + [np.zeros((8, 8, 3), np.uint8)])


# ------------------------------------------------------------------------------------------- vectors and search


@pytest.fixture(scope="module")
def index(videos: Path, clip_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("index") / "search"
    made = api.search_build(clip_run, videos, out, quiet=True)
    assert (made.added, made.skipped) == (20 * 3, 0)
    return out


def test_vectors_of_clips_are_those_of_the_evaluation(
    videos: Path, clip_run: Path, labelled: VideoData, tmp_path: Path
) -> None:
    done = api.embed(clip_run, videos, tmp_path / "e.parquet", thumbnail=64, quiet=True)
    assert done is not None
    assert done.rows == 60
    table = pq.read_table(tmp_path / "e.parquet").to_pylist()
    assert labelled.clips is not None
    assert [one["id"] for one in table] == labelled.row_ids.tolist()
    views = load_run(clip_run).config.views
    rows = np.arange(60)
    encoder = load_run(clip_run).encoder("query")
    expected = extract(encoder, labelled.clips, rows, size=views.size, mean=views.mean, std=views.std, batch=64).h
    assert np.allclose([one["vector"] for one in table], expected.numpy(), atol=1e-5)
    small = Image.open(io.BytesIO(table[0]["thumbnail"]))
    assert small.size == (64, 12)  # four frames of 32 x 24, each at most 16 pixels


def test_a_video_is_found_by_its_own_file(videos: Path, index: Path) -> None:
    answers = api.search_query(index, [videos / "right" / "03.mp4"], k=5)
    assert answers[0].hits[0].score > 0.8
    stored = api.search_query(index, ids=[answers[0].hits[0].id], k=1)
    assert len(stored[0].hits) == 1
    with pytest.raises(UsageError, match="is no video file, and the index holds clips"):
        api.search_query(index, [np.zeros((8, 8, 3), np.uint8)])
    with pytest.raises(UsageError, match=r"was trained on clips of video, and digits holds none"):
        api.search_add(index, "digits", quiet=True)
    assert api.search_add(index, videos, quiet=True).already == 60


def test_search_is_judged_by_video(videos: Path, clip_run: Path) -> None:
    lines = [
        f"{videos.name}/{kind}/{number:02d}.mp4,{kind},{'train' if number < 5 else 'test'}\n"
        for kind in ("jump", "right")
        for number in range(10)
    ]
    manifest = videos.parent / "halves.csv"
    manifest.write_text("path,label,split\n" + "".join(lines))
    result = api.search_eval(clip_run, manifest, k=(1,), quiet=True)
    assert (result.gallery, result.queries) == (10, 10)
    assert result.verdict.judged == "videos"
    assert "test videos asked" in api.search_table(result)
    assert {"h", "pixels", "random init", "random init (flattened)"} == set(result.scores)
    with pytest.raises(UsageError, match="--exclude is for images"):
        api.search_eval(clip_run, manifest, k=(1,), exclude=manifest, quiet=True)


def test_clips_are_shown_as_strips_and_as_previews_that_move(index: Path) -> None:
    opened = open_index(index)
    pictures = Pictures(opened, warn=lambda _text: None)
    one = int(opened.rows.ids[0])
    still, moving, full = pictures.thumbnail(one, 128), pictures.preview(one, 96), pictures.full(one)
    assert still is not None
    assert moving is not None
    assert full is not None
    assert Image.open(io.BytesIO(still[1])).size == (128, 24)
    film = Image.open(io.BytesIO(moving[1]))
    assert (moving[0], film.n_frames, film.size, film.info["loop"]) == ("image/webp", 6, (32, 24), 0)  # type: ignore[attr-defined]
    assert Image.open(io.BytesIO(full[1])).size == (6 * 32, 24)
    assert pictures.thumbnail(12345, 128) is None
    assert pictures.preview(12345, 128) is None


def test_frames_of_videos_are_embedded_and_found(videos: Path, tmp_path: Path) -> None:
    options = {**OPTIONS, "epochs": 1, "video": "frames", "frame_rate": 4.0, "backbone": "small-cnn-4-8"}
    run = api.pretrain(videos, tmp_path / "frames", **options)  # type: ignore[arg-type]
    made = api.search_build(run, videos, quiet=True)
    assert made.added == run.config.data.images
    pictures = Pictures(made.index, warn=lambda _text: None)
    small = pictures.thumbnail(int(made.index.rows.ids[0]), 64)
    assert small is not None
    assert Image.open(io.BytesIO(small[1])).size == (32, 24)


@pytest.mark.slow
@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_the_page_of_clips_stands_still_for_who_asks_for_less_motion(index: Path, tmp_path: Path, motion: str) -> None:
    page_file = api.search_page(index, tmp_path / "page.html", quiet=True)
    with chromium() as browser:
        context = browser.new_context(reduced_motion=motion, locale="en-US", viewport={"width": 1200, "height": 900})
        page, troubles = context.new_page(), []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda one: None if one.url.startswith(("file:", "data:")) else troubles.append(one.url))
        page.goto(page_file.as_uri())
        page.wait_for_selector("#grid picture img")
        page.wait_for_function("document.querySelector('#grid img').complete")
        source = page.evaluate("document.querySelector('#grid img').currentSrc")
        kind = "data:image/webp" if motion == "no-preference" else "data:image/"
        assert source.startswith(kind)
        assert ("image/webp" in source) == (motion == "no-preference")
        assert page.locator("#drop").is_hidden()
        page.screenshot(path=str(tmp_path / "page.png"))
        context.close()
    assert troubles == []
