"""Dense transfer: layouts are read as they are meant, scores agree with pycocotools and numpy, both arms are alike."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mocokit.api.transferring import transfer
from mocokit.cli import main
from mocokit.contrast.backbones import build_backbone
from mocokit.data.decode import UnreadableImageError, decode_indices
from mocokit.data.dense import open_boxes, open_masks
from mocokit.errors import DataError, MissingDependencyError, UsageError
from mocokit.evaluation import dense_scores as scoring
from mocokit.evaluation.pyramid import Pyramid
from mocokit.evaluation.transfer import TransferPlan
from mocokit.training.runfolder import foreign_files
from tests.toy import flags, npz


def png(path: Path, array: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def squares(seed: int, side: int = 48) -> tuple[Any, list[tuple[int, int, int, int]], Any]:
    """A noisy picture with one or two bright squares; their boxes, and the mask that shows them."""
    rng = np.random.default_rng(seed)
    image = rng.integers(40, 90, (side, side, 3), dtype=np.uint8)
    mask = np.zeros((side, side), np.uint8)
    boxes = []
    for place in range(1 + seed % 2):
        size = int(rng.integers(12, 18))
        left, top = int(rng.integers(0, side // 2 - size + 6)) + place * side // 2, int(rng.integers(0, side - size))
        left = min(left, side - size)
        image[top : top + size, left : left + size] = (220, 200, 60)
        mask[top : top + size, left : left + size] = 1
        boxes.append((left, top, left + size, top + size))
    return image, boxes, mask


def voc(folder: Path, count: int = 12) -> Path:
    for number in range(count):
        image, boxes, _ = squares(number)
        png(folder / "JPEGImages" / f"{number:02}.png", image)
        objects = "".join(
            f"<object><name>square</name><difficult>0</difficult><bndbox><xmin>{a}</xmin><ymin>{b}</ymin>"
            f"<xmax>{c}</xmax><ymax>{d}</ymax></bndbox></object>"
            for a, b, c, d in boxes
        )
        path = folder / "Annotations" / f"{number:02}.xml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<annotation>{objects}</annotation>")
    sets = folder / "ImageSets" / "Main"
    sets.mkdir(parents=True)
    (sets / "train.txt").write_text("".join(f"{n:02}\n" for n in range(8)))
    (sets / "test.txt").write_text("".join(f"{n:02}  1\n" for n in range(8, count)))
    return folder


def coco(folder: Path) -> Path:
    for split, numbers in (("train", range(8)), ("val", range(8, 12))):
        images, annotations = [], []
        for number in numbers:
            image, boxes, _ = squares(number)
            png(folder / f"{split}2017" / f"{number}.png", image)
            images.append({"id": number, "file_name": f"{number}.png"})
            for a, b, c, d in boxes:
                annotations.append(
                    {
                        "id": len(annotations),
                        "image_id": number,
                        "category_id": 7,
                        "bbox": [a, b, c - a, d - b],
                        "iscrowd": 0,
                    }
                )
        (folder / "annotations").mkdir(exist_ok=True)
        content = {"categories": [{"id": 7, "name": "square"}], "images": images, "annotations": annotations}
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    return folder


def masks(folder: Path, scale: int = 255) -> Path:
    for number in range(12):
        image, _, mask = squares(number)
        split = "train" if number < 8 else "test"
        png(folder / split / "images" / f"{number}.png", image)
        png(folder / split / "masks" / f"{number}.png", mask * scale)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data = npz(folder / "toy.npz", 24)
    changes = {"epochs": 1, "backbone": "small-cnn-8-8-16"}
    assert main(["pretrain", str(data), "--out", str(folder / "run"), "-q", *flags(**changes)]) == 0
    return folder / "run"


# -------------------------------------------------------------------------------------------------------- data


def test_voc_and_coco_hold_the_same(tmp_path: Path) -> None:
    one, other = open_boxes(voc(tmp_path / "voc")), open_boxes(coco(tmp_path / "coco"))
    assert one.class_names == other.class_names == ("square",)
    for mine, theirs, numbers in ((one.train, other.train, range(8)), (one.test, other.test, range(8, 12))):
        assert [path.stem for path, _ in mine] == [f"{n:02}" for n in numbers]
        for (_, a), (_, b), number in zip(mine, theirs, numbers, strict=True):
            np.testing.assert_array_equal(a.corners, np.array(squares(number)[1], np.float32))
            np.testing.assert_array_equal(a.corners, b.corners)
            assert a.labels.tolist() == [0] * len(a.corners)


def test_masks_are_numbers_and_splits_are_made_where_there_are_none(tmp_path: Path) -> None:
    found = open_masks(masks(tmp_path / "pairs"))
    assert (len(found.train), len(found.test)) == (8, 4)
    flat = tmp_path / "flat"
    for number in range(30):
        image, _, mask = squares(number)
        png(flat / "images" / f"{number}.png", image)
        png(flat / "masks" / f"{number}.png", mask)
    once, again = open_masks(flat), open_masks(flat)
    assert once == again
    assert len(once.test) + len(once.train) == 30
    assert 2 <= len(once.test) <= 14
    image = Image.fromarray(squares(0)[2])
    image.putpalette([0, 0, 0, 255, 0, 0] + [9] * 762)
    buffer = io.BytesIO()
    image.convert("P").save(buffer, "PNG")
    np.testing.assert_array_equal(decode_indices(buffer.getvalue()), squares(0)[2])
    buffer = io.BytesIO()
    Image.fromarray(squares(0)[0]).save(buffer, "PNG")
    with pytest.raises(UnreadableImageError, match="mode RGB, where a mask needs one number"):
        decode_indices(buffer.getvalue())


def test_what_is_wrong_with_the_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no folder"):
        open_boxes(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no boxes: looked for Annotations/"):
        open_boxes(tmp_path / "empty")
    with pytest.raises(DataError, match=r"has no masks: looked for images/"):
        open_masks(tmp_path / "empty")
    folder = voc(tmp_path / "voc")
    xml = folder / "Annotations" / "03.xml"
    good = xml.read_text()
    xml.write_text('<!DOCTYPE a [<!ENTITY x "y">]>' + good)
    with pytest.raises(DataError, match=r"03\.xml defines entities"):
        open_boxes(folder)
    xml.write_text(good.replace("<xmin>", "<left>"))
    with pytest.raises(DataError, match=r"03\.xml is no Pascal VOC annotation"):
        open_boxes(folder)
    xml.write_text(good)
    (folder / "JPEGImages" / "05.png").unlink()
    with pytest.raises(DataError, match="has no picture called '05'"):
        open_boxes(folder)
    (folder / "ImageSets/Main/train.txt").write_text("../../etc/passwd\n")
    with pytest.raises(DataError, match="which is no file name"):
        open_boxes(folder)
    other = coco(tmp_path / "coco")
    path = other / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    content["images"][0]["file_name"] = "../../secret.png"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="leads out of"):
        open_boxes(other)
    path.write_text('{"images": []}')
    with pytest.raises(DataError, match=r"instances_train2017\.json is no COCO annotation file"):
        open_boxes(other)


# ------------------------------------------------------------------------------------------------------- scores


def detections(seed: int, images: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """True boxes of two classes, and found ones near some of them, with wrong ones among them."""
    rng = np.random.default_rng(seed)
    truth, found = [], []
    for _ in range(images):
        count = int(rng.integers(0, 5))
        corner = rng.uniform(0, 60, (count, 2))
        boxes = np.concatenate([corner, corner + rng.uniform(8, 40, (count, 2))], axis=1)
        labels = rng.integers(0, 2, count)
        hard = rng.uniform(size=count) < 0.15
        truth.append({"boxes": boxes, "labels": labels, "difficult": hard, "size": (100, 100)})
        near = boxes + rng.normal(0, 3, boxes.shape)
        extra = rng.uniform(0, 50, (2, 2))
        wrong = np.concatenate([extra, extra + 20], axis=1)
        guess = np.concatenate([near, wrong])
        guess[:, 2:] = np.maximum(guess[:, 2:], guess[:, :2] + 1)
        found.append(
            {
                "boxes": guess,
                "labels": np.concatenate([labels, rng.integers(0, 2, 2)]),
                "scores": rng.uniform(size=count + 2).round(3),
            }
        )
    return truth, found


def coco_by_itself(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> tuple[float, float]:
    """(mAP, AP50) by pycocotools from start to end."""
    coco_module = pytest.importorskip("pycocotools.coco", reason="detection scores need the extra `detect`")
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        gt = coco_module.COCO()
        gt.dataset = scoring._dataset(truth, 2)
        gt.createIndex()
        judge = COCOeval(gt, gt.loadRes(scoring._results(found)), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return float(judge.stats[0]), float(judge.stats[1])


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_cocos(seed: int) -> None:
    pytest.importorskip("pycocotools", reason="detection scores need the extra `detect`")
    truth, found = detections(seed, 12)
    matched, overlaps = scoring.match(truth, found, 2)
    whole, at_half, by_class = scoring.mean_average_precision(matched, overlaps, np.ones((1, 12)))
    expected = coco_by_itself(truth, found)
    np.testing.assert_allclose((whole[0], at_half[0]), expected, atol=1e-9)
    assert by_class.shape == (1, 2)


def test_a_draw_counts_images_as_if_they_were_there_so_often() -> None:
    pytest.importorskip("pycocotools", reason="detection scores need the extra `detect`")
    truth, found = detections(11, 8)
    matched, overlaps = scoring.match(truth, found, 2)
    counts = [2, 0, 1, 3, 0, 1, 1, 0]
    drawn = [number for number, count in enumerate(counts) for _ in range(count)]
    whole, at_half, _ = scoring.mean_average_precision(matched, overlaps, np.array([counts], np.float64))
    # Equal scores of repeated images stand in another order there, which moves the average by a little.
    expected = coco_by_itself([truth[n] for n in drawn], [found[n] for n in drawn])
    np.testing.assert_allclose((whole[0], at_half[0]), expected, atol=0.02)


def test_nothing_found_scores_nothing() -> None:
    pytest.importorskip("pycocotools", reason="detection scores need the extra `detect`")
    truth, found = detections(1, 6)
    empty = [{"boxes": np.zeros((0, 4)), "labels": np.zeros(0, int), "scores": np.zeros(0)} for _ in found]
    matched, overlaps = scoring.match(truth, empty, 2)
    assert scoring.mean_average_precision(matched, overlaps, np.ones((1, 6)))[0].tolist() == [0.0]


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_mean_iou_is_that_of_the_pixels_put_together(seed: int) -> None:
    rng = np.random.default_rng(seed)
    C = int(rng.integers(2, 5))
    truth = rng.integers(0, C + 1, (5, 9, 7))  # C stands for ignored
    guess = rng.integers(0, C, (5, 9, 7))
    confusions = np.stack([scoring.confusion_of(t, g, C) for t, g in zip(truth, guess, strict=True)])
    counts = np.array([1, 0, 2, 1, 1])
    score, by_class = scoring.mean_iou(confusions, counts[None].astype(float))
    t = np.concatenate([truth[i] for i, n in enumerate(counts) for _ in range(n)]).ravel()
    g = np.concatenate([guess[i] for i, n in enumerate(counts) for _ in range(n)]).ravel()
    g, t = g[t < C], t[t < C]
    expected = [((t == c) & (g == c)).sum() / ((t == c) | (g == c)).sum() for c in range(C)]
    np.testing.assert_allclose(by_class[0], expected)
    np.testing.assert_allclose(score[0], np.mean(expected))


def test_the_interval_is_the_bootstraps() -> None:
    weights = scoring.draw_weights(50, draws=4000, seed=1)
    assert weights.shape == (4001, 50)
    assert (weights.sum(1) == 50).all()
    values = np.random.default_rng(0).normal(0.4, 0.1, 50)
    mean, low, high = scoring.interval(weights @ values / 50)
    assert mean == pytest.approx(values.mean())
    half = 1.96 * values.std() / np.sqrt(50)
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)


# ------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("name", "stem", "strides"),
    [
        ("small-cnn", "auto", [2, 4, 8]),
        ("torchvision:resnet18", "standard", [4, 8, 16, 32]),
        ("torchvision:resnet18", "small", [2, 4, 8]),
        ("timm:resnet18", "standard", [4, 8, 16, 32]),
        ("timm:convnext_atto", "auto", [4, 8, 16, 32]),
    ],
)
def test_a_pyramid_has_the_last_map_of_every_stride(name: str, stem: Any, strides: list[int]) -> None:
    torch.manual_seed(0)
    backbone = build_backbone(name, stem, 128).eval()
    pyramid = Pyramid(backbone, side=128).eval()
    assert pyramid.strides == strides
    x = torch.randn(2, 3, 128, 96)
    with torch.no_grad():
        maps = pyramid(x)
        last = backbone.spatial_map(x)
    assert list(maps) == [str(stride) for stride in strides]
    for (level, found), channels in zip(maps.items(), pyramid.channels, strict=True):
        assert found.shape == (2, channels, 128 // int(level), 96 // int(level))
    torch.testing.assert_close(maps[str(strides[-1])], last)


def test_a_vision_transformer_is_refused() -> None:
    backbone = build_backbone("timm:vit_tiny_patch16_224", "auto", 64)
    with pytest.raises(UsageError, match="has no feature map"):
        Pyramid(backbone, side=64)


def test_segmentation_learns_and_is_the_same_again(run: Path, tmp_path: Path) -> None:
    data = masks(tmp_path / "data")
    plan: dict[str, Any] = {"steps": 100, "side": 48, "batch_size": 4, "lr": 0.2, "quiet": True, "threads": 1}
    result = transfer("segment", run, data, **plan)
    assert result.arms["random init"]["mIoU"].score > 0.8
    assert result.arms["pretrained"]["mIoU"].score > 0.8
    assert list(result.arms["pretrained"]) == ["mIoU", "IoU 0", "IoU 255"]
    assert result.losses["pretrained"][1] < 0.5 * result.losses["pretrained"][0]
    assert transfer("segment", run, data, **plan).to_dict() == result.to_dict()
    difference = result.arms["pretrained"]["mIoU"].score - result.arms["random init"]["mIoU"].score
    assert result.difference.score == pytest.approx(difference)
    assert foreign_files(run) == []
    ledger = (run / "eval" / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["purpose"] for line in ledger[-2:]] == ["transfer segment"] * 2


def test_a_frozen_backbone_does_not_move(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mocokit.evaluation.transfer_arms as module

    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    train = module._train

    def watched(model: Any, backbone: Any, *rest: Any) -> list[float]:
        before.append(torch.cat([v.flatten().float() for v in backbone.state_dict().values()]))
        course = train(model, backbone, *rest)
        after.append(torch.cat([v.flatten().float() for v in backbone.state_dict().values()]))
        return course

    monkeypatch.setattr(module, "_train", watched)
    data = masks(tmp_path / "data", scale=1)
    for frozen in (True, False):
        transfer("segment", run, data, steps=3, side=48, batch_size=2, frozen=frozen, head="deeplab", quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(before[:2], after[:2], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before[2:], after[2:], strict=True))
    assert not torch.equal(before[0], before[1])  # the arms differ


def test_detection_learns(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("pycocotools", reason="detection scores need the extra `detect`")
    data = voc(tmp_path / "voc", 14)
    result = transfer(
        "detect",
        run,
        data,
        steps=60,
        side=48,
        batch_size=4,
        channels=16,
        proposals=32,
        lr=0.02,
        threads=1,
        quiet=True,
    )
    assert result.metric == "mAP"
    assert list(result.arms["pretrained"]) == ["mAP", "AP50", "AP square"]
    for arm in ("pretrained", "random init"):
        assert result.arms[arm]["AP50"].score > 0.3
        assert result.losses[arm][1] < result.losses[arm][0]
    stored = json.loads((run / "eval" / "transfer-detect.json").read_text())
    assert stored["verdict"] == result.outcome
    assert stored["test_images"] == 6
    assert result.text().splitlines()[-1].startswith(f"DETECT: {result.outcome} | mAP")


def test_without_pycocotools_the_install_line_is_given(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools.cocoeval", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'mocokit\[detect\]'"):
        transfer("detect", run, voc(tmp_path / "voc"), quiet=True)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--side must be at least 32\. Got 8"):
        TransferPlan(side=8)
    with pytest.raises(UsageError, match="--lr must be above 0"):
        TransferPlan(lr=0)


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = masks(tmp_path / "data")
    words = [
        "transfer",
        "segment",
        str(run),
        "--data",
        str(data),
        "--steps",
        "2",
        "--side",
        "48",
        "-q",
        "--threads",
        "1",
    ]
    assert main(words) == 0
    assert "SEGMENT: " in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metric"] == "mIoU"
    assert main(["transfer", "segment", str(run), "--data", str(tmp_path / "nowhere"), "-q"]) == 3
    capsys.readouterr()
    png(data / "train" / "masks" / "0.png", np.zeros((40, 48), np.uint8))
    assert main(words) == 3
    assert "0.png has 48 x 48 pixels and its mask 40 x 48" in capsys.readouterr().err
