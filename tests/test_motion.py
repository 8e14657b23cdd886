"""What is asked of representations of videos, each against an independent oracle, and the verbs from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from mocokit import api
from mocokit.data.clips import ClipConfig, build_clip_store, open_clips
from mocokit.data.pixels import build_pixel_store
from mocokit.data.sources import from_array
from mocokit.data.videos import open_videos
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.labelled_videos import by_video, open_labelled_videos
from mocokit.evaluation.motion import (
    auc,
    auc_interval,
    found_within,
    order_scores,
    reorderings,
    retrieval,
    unusual_classes,
    unusualness,
)
from mocokit.evaluation.motion_study import motion_table
from mocokit.evaluation.video_contenders import colour_histograms
from mocokit.training.settings import DataConfig, from_yaml
from tests.clips import write_motion
from tests.test_pretrain import Stopped, stop_at

RNG = np.random.default_rng(0)


def test_recall_at_k_is_the_brute_force_count() -> None:
    bank, queries = torch.randn(20, 5), torch.randn(9, 5)
    labels, wanted = RNG.integers(0, 3, 20), RNG.integers(0, 3, 9)
    cosines = torch.nn.functional.normalize(queries, dim=1) @ torch.nn.functional.normalize(bank, dim=1).T
    for k in (1, 3, 20):
        expected = [
            float(any(labels[row] == wanted[q] for row in np.argsort(-cosines[q].numpy())[:k])) for q in range(9)
        ]
        assert found_within(bank, labels, queries, wanted, k).tolist() == expected
    with pytest.raises(UsageError, match="recall@21"):
        found_within(bank, labels, queries, wanted, 21)
    table = retrieval({"x": [(bank, queries)]}, labels, wanted, [1, 3])
    assert table["x"][3].mean == pytest.approx(found_within(bank, labels, queries, wanted, 3).mean())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=40))
def test_auc_is_scikit_learns(pairs: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in pairs], np.float64)
    unusual = np.array([kind for _, kind in pairs])
    if unusual.all() or not unusual.any():
        with pytest.raises(DataError, match="held-out class"):
            auc(scores, unusual)
        return
    assert auc(scores, unusual) == pytest.approx(roc_auc_score(unusual, scores))


@pytest.mark.slow
def test_auc_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    """Scores N(1, 1) against N(0, 1): the true area is Phi(1 / sqrt 2) = 0.7602."""
    truth, held = 0.76025, 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        unusual = np.arange(60) < 20
        one = auc_interval([rng.normal(unusual.astype(float), 1.0)], unusual)
        held += one.low <= truth <= one.high
    assert 178 <= held <= 199


def test_perfect_scores_still_have_an_interval() -> None:
    unusual = np.arange(30) < 10
    one = auc_interval([unusual.astype(float)], unusual)
    assert one.mean == 1.0
    assert 0.6 < one.low < 1.0
    assert one.high == 1.0


def test_unusualness_is_the_mean_distance_to_the_nearest_five() -> None:
    bank, queries = torch.randn(12, 4), torch.randn(3, 4)
    cosines = torch.nn.functional.normalize(queries, dim=1) @ torch.nn.functional.normalize(bank, dim=1).T
    expected = 1 - np.sort(cosines.numpy(), 1)[:, -5:].mean(1)
    np.testing.assert_allclose(unusualness(bank, queries), expected, rtol=1e-5)


def test_a_class_that_is_left_out_stands_out() -> None:
    centre = torch.eye(3)
    labels, test_labels = np.repeat([0, 1, 2], 20), np.repeat([0, 1, 2], 10)
    bank = centre[torch.from_numpy(labels)] + 0.05 * torch.randn(60, 3)
    test = centre[torch.from_numpy(test_labels)] + 0.05 * torch.randn(30, 3)
    noise = (torch.randn(60, 3), torch.randn(30, 3))
    found = unusual_classes({"good": [(bank, test)], "noise": [noise]}, labels, test_labels, [0, 2])
    assert found["good"][0].mean == 1.0
    assert found["good"][2].mean == 1.0
    assert abs(found["noise"][0].mean - 0.5) < 0.35


def test_the_order_probe_finds_what_is_there_and_nothing_else() -> None:
    S = 200
    videos = np.arange(S) // 2
    plain, moved = torch.randn(S, 6), torch.randn(S, 6)
    moved[:, 0] += 3
    seen = order_scores((plain[:100], moved[:100]), (plain[100:], moved[100:]), videos[:100], videos[100:])
    assert len(seen) == 50
    assert seen.mean() > 0.85
    blind = order_scores((plain[:100], plain[:100]), (plain[100:], plain[100:]), videos[:100], videos[100:])
    assert blind.mean() == 0.5


@given(st.integers(3, 12), st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_reorderings_are_permutations_that_change_the_order(frames: int, seed: int) -> None:
    found = reorderings(5, frames, seed)
    for order in found:
        assert sorted(order.tolist()) == list(range(frames))
        assert order.tolist() not in (list(range(frames)), list(range(frames))[::-1])
    assert np.array_equal(found, reorderings(5, frames, seed))


def test_videos_are_the_mean_of_their_samples_directions() -> None:
    vectors = torch.tensor([[2.0, 0.0], [0.0, 5.0], [3.0, 4.0]])
    found = by_video(vectors, np.array([1, 1, 0]), 2)
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.5, 0.5]]))


def test_colour_histograms_count_colours() -> None:
    images = RNG.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    store = build_pixel_store(from_array(images), side=8)
    found = colour_histograms(store, np.arange(3), size=8)
    for image, row in zip(images, found, strict=True):
        codes = (image // 64).astype(int)
        counts = np.bincount((codes[..., 0] * 16 + codes[..., 1] * 4 + codes[..., 2]).ravel(), minlength=64)
        np.testing.assert_allclose(row.numpy() ** 2, counts / 64, atol=1e-6)


# ----------------------------------------------------------------------------------------------------- the verbs

OPTIONS = {
    "epochs": 2,
    "batch_size": 8,
    "queue_size": 32,
    "dim": 8,
    "image_size": 16,
    "precision": "fp32",
    "layout": "contiguous",
    "threads": 1,
    "quiet": True,
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 videos of 16 frames: a bar that goes right, or jumps about."""
    return write_motion(tmp_path_factory.mktemp("motion"))


@pytest.fixture(scope="module")
def clip_run(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "clips"
    api.pretrain(videos, out, video="clips", clip_frames=6, backbone="small-3d-4-8", max_gap=0.5, **OPTIONS)
    return out


def test_a_run_on_clips_says_what_it_was_made_of(videos: Path, clip_run: Path) -> None:
    config = from_yaml(clip_run / "config.yaml")
    assert (config.data.video, config.data.clip_frames, config.data.clip_stride) == ("clips", 6, 1)
    assert config.encoder.clip == 6
    assert config.contrast.mask_group
    assert config.data.images == 24 * 3  # clips of 6 of 16 frames at 0 and 6, and at 10 because 4 are left
    skipped = [json.loads(line) for line in (clip_run / "skipped.jsonl").read_text().splitlines()]
    assert [(one["row"], one["name"]) for one in skipped] == [(-1, "broken.mp4")]
    assert (clip_run / "samples" / "pairs0.png").stat().st_size > 1000
    masked = [json.loads(line)["masked"] for line in (clip_run / "loss.jsonl").read_text().splitlines()]
    assert masked[-1] > 0


def test_resuming_a_run_on_clips_changes_no_bit(
    videos: Path, clip_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"video": "clips", "clip_frames": 6, "backbone": "small-3d-4-8", "max_gap": 0.5, **OPTIONS}
    out = tmp_path / "resumed"
    stop_at(13, monkeypatch)
    with pytest.raises(Stopped):
        api.pretrain(videos, out, **options)  # type: ignore[arg-type]
    monkeypatch.undo()
    api.pretrain(videos, out, resume=True, **options)  # type: ignore[arg-type]
    assert (out / "loss.jsonl").read_bytes() == (clip_run / "loss.jsonl").read_bytes()


def test_evaluating_clips_by_video(videos: Path, clip_run: Path) -> None:
    result = api.evaluate(clip_run, videos, labels_per_class="all", draws=1, classifier="both", quiet=True)
    assert set(result.scores) == {"h", "z", "key-h", "key-z", "pixels", "frame colours", "random init",
                                  "random init (flattened)"}  # fmt: skip
    data = open_labelled_videos(str(videos), from_yaml(clip_run / "config.yaml").data, size=16)
    assert result.verdict.n_test == len(data.split.test)
    assert result.overlap.by_content == len(data.split.test)
    assert (clip_run / "eval" / "verdict.json").exists()
    shuffled = api.evaluate(clip_run, videos, labels_per_class="all", draws=1, shuffle_labels=True, quiet=True)
    assert 0 <= shuffled.verdict.score <= 1


def test_motion_tells_three_things(videos: Path, clip_run: Path) -> None:
    result = api.motion(clip_run, videos, quiet=True)
    assert set(result.order) == {"shuffled", "backwards"}
    assert result.order["shuffled"]["frame colours"].mean == 0.5
    assert set(result.unusual["h"]) == {"jump", "right"}
    stored = json.loads((clip_run / "eval" / "motion.json").read_text())
    assert stored["recall"]["h"]["1"]["score"] == result.retrieval["h"][1].mean
    text = motion_table(result)
    assert "recall@k" in text
    assert "ROC-AUC" in text
    purposes = [json.loads(line)["purpose"] for line in (clip_run / "eval" / "ledger.jsonl").read_text().splitlines()]
    assert "motion study" in purposes
    only = api.motion(clip_run, videos, unusual=["jump"], quiet=True)
    assert set(only.unusual["h"]) == {"jump"}
    with pytest.raises(UsageError, match=r"no class 'jumps'.*Did you mean 'jump'"):
        api.motion(clip_run, videos, unusual=["jumps"], quiet=True)


def test_frames_as_pictures_evaluated_by_video(videos: Path, tmp_path: Path) -> None:
    run = api.pretrain(videos, tmp_path / "frames", video="frames", frame_rate=4.0, backbone="small-cnn-4-8", **OPTIONS)
    assert run.config.encoder.clip == 0
    assert run.config.contrast.mask_group
    result = api.evaluate(run, videos, labels_per_class="all", draws=1, quiet=True)
    assert result.verdict.n_test > 0
    assert api.motion(run, videos, quiet=True).order == {}


def test_the_samples_of_a_video_are_spread_over_it(videos: Path) -> None:
    config = DataConfig(spec="", video="clips", clip_frames=2, clip_stride=1)
    data = open_labelled_videos(str(videos), config, size=16)
    assert data.clips is not None
    rows, place = data.of(np.array([3, 0]))
    assert set(place.tolist()) == {0, 1}
    source = data.clips.source
    assert {int(video) for video in source.video[rows]} == {3, 0}
    assert source.start[rows[place == 0]].tolist() == [0, 4, 6, 8, 10, 14] or len(rows) <= 20


def test_a_reordered_store_plays_the_same_frames(videos: Path) -> None:
    from mocokit.evaluation.motion_study import _Reordered

    store = build_clip_store(open_clips(open_videos(videos), ClipConfig(frames=4)), side=16)
    order = reorderings(len(store), 4, 0)
    rows = np.array([2, 5])
    plain, moved = store.batch(rows)[0], _Reordered(store, order).batch(rows)[0]
    for clip, row in enumerate(rows):
        assert torch.equal(moved[clip], plain[clip][:, order[row]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_frames": 8}, "--clip-frames has no effect without --video clips"),
        ({"video": "frames", "max_gap": 1.0}, "--max-gap has no effect without --video clips"),
        ({"video": "clips", "frame_rate": 1.0}, "--frame-rate has no effect without --video frames"),
        ({"video": "clips", "layout": "channels-last"}, "channels-last is for images"),
        ({"video": "frames", "backbone": "r3d_18"}, "--video clips"),
        ({"video": "clips", "clip_frames": 1}, "clip_frames"),
        ({"video": "clips", "monitor": "digits"}, "--monitor reads images"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    videos: Path, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        api.pretrain(videos, tmp_path / "x", **{**OPTIONS, **changes})  # type: ignore[arg-type]


def test_verbs_that_read_images_refuse_clips(videos: Path, clip_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="trained on clips"):
        api.embed(clip_run, "digits", tmp_path / "e.parquet")
    with pytest.raises(UsageError, match="trained on clips"):
        api.transfer("segment", clip_run, tmp_path)
    with pytest.raises(UsageError, match="--counterfactual is for images"):
        api.evaluate(clip_run, videos, counterfactual=["flip"], quiet=True)


def test_a_run_on_images_is_not_for_motion(tmp_path: Path) -> None:
    run = api.pretrain("shapes", tmp_path / "i", backbone="small-cnn-4-8", **{**OPTIONS, "epochs": 1, "batch_size": 64})
    with pytest.raises(UsageError, match="was trained on images"):
        api.motion(run, "moving-shapes", quiet=True)
