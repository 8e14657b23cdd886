import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from mocokit import files
from mocokit.data.packing import pack
from mocokit.data.sources import ImageSource, from_array, open_source
from mocokit.errors import DamagedError, DataError, LockedError, StorageError, UsageError
from tests.toy import contents, pictures, small_disk


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def smooth(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """A coloured picture without sharp edges, as photographs are."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def photo_folder(root: Path, count: int = 12) -> Path:
    for number in range(count):
        folder = root / ("train" if number % 3 else "test") / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        kind = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")[number % 7]
        picture = Image.fromarray(smooth(40 + number, 60, number))
        (folder / f"{number}.{kind.lower()}").write_bytes(encoded(picture, kind))
    return root


def same(ours: ImageSource, theirs: ImageSource) -> None:
    """The same table and the same pixels."""
    assert ours.index.names == theirs.index.names
    for table in ("ids", "labels", "groups", "splits"):
        np.testing.assert_array_equal(getattr(ours.index, table), getattr(theirs.index, table))
    assert ours.index.class_names == theirs.index.class_names
    assert ours.index.split_names == theirs.index.split_names
    for row in range(len(ours.index)):
        np.testing.assert_array_equal(ours.read(row), theirs.read(row))


def test_a_folder_packed_and_opened_is_the_same(tmp_path: Path) -> None:
    source = open_source(photo_folder(tmp_path / "in"))
    result = pack(source, tmp_path / "out", shard_bytes=25_000)
    assert (result.samples, result.skipped, result.kept) == (12, 0, 0)
    assert result.shards > 2
    packed = open_source(tmp_path / "out")
    same(packed, source)
    assert packed.read_bytes is not None
    assert source.read_bytes is not None
    assert [packed.read_bytes(row) for row in range(12)] == [source.read_bytes(row) for row in range(12)]
    assert packed.report.lines() == []
    listing = json.loads((tmp_path / "out" / "index.json").read_text())
    for shard in listing["shards"]:
        path = tmp_path / "out" / shard["name"]
        assert (path.stat().st_size, files.sha256_file(path)) == (shard["bytes"], shard["sha256"])
    assert listing["shards"][0]["first_row"] == 0
    assert sum(shard["samples"] for shard in listing["shards"]) == 12


def test_others_can_read_the_layout(tmp_path: Path) -> None:
    pack(open_source(photo_folder(tmp_path / "in", 3)), tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "shards-000000.tar") as tar:
        told = [
            (number, ext) for number, picture in enumerate(("jpg", "webp", "png")) for ext in (picture, "json", "cls")
        ]
        assert tar.getnames() == [f"{number:09d}.{ext}" for number, ext in told]
        assert {info.mtime for info in tar} == {0}
        member = tar.extractfile("000000000.json")
        assert member is not None
        assert json.load(member) == {"label": "class0", "split": "test", "mocokit": {"name": "test/class0/0.jpeg"}}


def test_arrays_groups_and_generated_sets(tmp_path: Path) -> None:
    images = pictures(9, 8)
    images[0] = images[0, :, :, :1]  # grey
    source = from_array(
        images, np.arange(9) % 3, class_names=["a", "b", "c"], groups=np.array([f"patient {n // 2}" for n in range(9)])
    )
    pack(source, tmp_path / "array")
    same(open_source(tmp_path / "array"), source)
    digits = open_source("moved-digits", split="val")
    pack(digits, tmp_path / "digits", max_side=64)  # nothing is above it
    packed = open_source(tmp_path / "digits")
    for row in range(0, len(digits.index), 20):
        np.testing.assert_array_equal(packed.read(row), digits.read(row))
    assert packed.index.ids.tolist() == digits.index.ids.tolist()


def test_shrunk_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    photo = Image.fromarray(smooth(300, 600))
    exif = Image.Exif()
    exif[0x0112] = 6  # lying on its side
    exif[0x010F] = "maker"
    palette = Image.fromarray(smooth(200, 100)).quantize(16)
    grey = np.tile(np.linspace(0, 65535, 400).astype(np.uint16), (100, 1))
    content = {
        "a.jpg": encoded(photo, "JPEG", quality=95, exif=exif),
        "b.png": encoded(photo, "PNG"),
        "c.png": encoded(palette, "PNG"),
        "d.gif": encoded(palette, "GIF"),
        "e.png": encoded(Image.fromarray(grey), "PNG"),
        "f.webp": encoded(Image.fromarray(smooth(64, 64)), "WEBP"),
        "g.png": encoded(Image.fromarray(np.full((90, 90, 4), 200, np.uint8)), "PNG"),
    }
    for name, data in content.items():
        (folder / name).write_bytes(data)
    source = open_source(folder)
    pack(source, tmp_path / "out", max_side=64, quality=90)
    packed = open_source(tmp_path / "out")
    assert packed.read_bytes is not None
    kinds = [Image.open(io.BytesIO(packed.read_bytes(row))) for row in range(7)]
    assert [image.format for image in kinds] == ["JPEG", "JPEG", "PNG", "PNG", "PNG", "WEBP", "PNG"]
    assert [image.size for image in kinds] == [(32, 64), (64, 32), (32, 64), (32, 64), (64, 16), (64, 64), (64, 64)]
    assert kinds[4].mode == "L"
    assert dict(kinds[0].getexif()) == {}  # upright now, and nothing of the camera
    assert packed.read_bytes(5) == content["f.webp"]  # small enough: its own bytes
    for row in range(7):  # against Pillow's own antialiased reduction
        whole = source.read(row)
        height, width = packed.read(row).shape[:2]
        told = np.asarray(Image.fromarray(whole).resize((width, height), Image.Resampling.LANCZOS)).astype(int)
        assert np.abs(packed.read(row).astype(int) - told).mean() < 4


def test_the_same_bytes_with_any_workers_and_after_any_break(tmp_path: Path) -> None:
    source = open_source(photo_folder(tmp_path / "in", 14))
    settings = {"max_side": 32, "shard_bytes": 9_000}
    pack(source, tmp_path / "one", workers=1, **settings)  # type: ignore[arg-type]
    whole = contents(tmp_path / "one")
    shards = sum(name.endswith(".tar") for name in whole)
    assert shards >= 3
    for stop in range(0, 14, 2):

        def at(done: int, total: int, stop: int = stop) -> None:
            if done > stop:
                raise KeyboardInterrupt

        out = tmp_path / f"broken{stop}"
        with pytest.raises(KeyboardInterrupt):
            pack(source, out, workers=3, progress=at, **settings)  # type: ignore[arg-type]
        finished = len(list(out.glob("*.tar")))
        with pytest.raises(DataError, match="half packed" if finished else "half packed|No pictures"):
            open_source(out)
        result = pack(source, out, workers=2, **settings)  # type: ignore[arg-type]
        assert result.kept == finished
        assert {name: data for name, data in contents(out).items() if name != ".lock"} == {
            name: data for name, data in whole.items() if name != ".lock"
        }
    again = pack(source, tmp_path / "one", **settings)  # type: ignore[arg-type]
    assert (again.kept, again.shards, again.samples) == (shards, shards, 14)


def test_unreadable_pictures_are_named(tmp_path: Path) -> None:
    folder = photo_folder(tmp_path / "in", 14)
    bad = [folder / "test" / "class0" / "a.jpg", folder / "train" / "class1" / "zz.png"]
    bad[0].write_bytes(b"<html>no")
    bad[1].write_bytes(b"")
    source = open_source(folder)
    with pytest.raises(DataError, match=r"1 of the first 4 pictures in in can't be read, more than 0\.00%.*HTML"):
        pack(source, tmp_path / "strict", max_bad=0)
    result = pack(source, tmp_path / "out", max_bad=0.2, shard_bytes=20_000)
    assert (result.samples, result.skipped) == (14, 2)
    lines = [json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["test/class0/a.jpg", "train/class1/zz.png"]
    assert len(open_source(tmp_path / "out").index) == 14
    assert pack(source, tmp_path / "out", max_bad=0.2, shard_bytes=20_000).skipped == 2
    shutil.rmtree(folder / "train")
    for path in (folder / "test").rglob("*.*"):
        path.write_bytes(b"no picture")
    with pytest.raises(DataError, match="can't be read"):
        pack(open_source(folder), tmp_path / "none", max_bad=1.0)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    source = from_array(pictures(6, 8), name="six")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"holds 'thesis\.tex'"):
        pack(source, tmp_path / "mine")
    assert contents(tmp_path / "mine").keys() == {"thesis.tex", ".lock"}
    pack(source, tmp_path / "out", shard_bytes=600)
    with pytest.raises(UsageError, match=r"packed from other data or otherwise \(max_side None there, 16 now"):
        pack(source, tmp_path / "out", max_side=16, shard_bytes=600)
    with pytest.raises(UsageError, match="index"):
        pack(from_array(pictures(6, 8, seed=1), name="six"), tmp_path / "out", shard_bytes=600)
    with files.RunLock(tmp_path / "out"), pytest.raises(LockedError):
        pack(source, tmp_path / "out", shard_bytes=600)
    shard = tmp_path / "out" / "shards-000001.tar"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=r"shards-000001\.tar is missing or was changed"):
        pack(source, tmp_path / "out", shard_bytes=600)
    shard.unlink()
    with pytest.raises(DataError, match=r"shards-000001\.tar is missing"):
        open_source(tmp_path / "out")
    for bad in ({"max_side": 2}, {"shard_bytes": 0}, {"quality": 0}, {"max_bad": 2.0}):
        with pytest.raises(UsageError, match="they must be"):
            pack(source, tmp_path / "new", **bad)  # type: ignore[arg-type]


def test_a_full_disk_is_a_storage_error_and_nothing_half_remains(tmp_path: Path) -> None:
    source = from_array(pictures(40, 128), name="noise")
    with small_disk(tmp_path / "small", "1m") as disk:
        with pytest.raises(StorageError, match="Free some space"):
            pack(source, disk / "out", shard_bytes=300_000)
        left = sorted(path.name for path in (disk / "out").glob("*"))
        assert [name for name in left if name.endswith(".tar")] == sorted(
            shard["name"] for shard in json.loads((disk / "out" / "index.json").read_text())["shards"]
        )
        assert not [name for name in left if name.startswith(".tmp-")]


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mocokit.cli import main

    folder = photo_folder(tmp_path / "in", 6)
    words = ["pack", str(folder), "--out", str(tmp_path / "out"), "--max-side", "32", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["samples"], told["shards"], told["skipped"]) == (6, 1, 0)
    packed = open_source(tmp_path / "out")
    assert max(max(packed.read(row).shape[:2]) for row in range(6)) == 32
    assert packed.index.ids.tolist() == open_source(folder).index.ids.tolist()
    assert main([*words[:-1], "--quality", "80"]) == 2
    assert "quality 92 there, 80 now" in capsys.readouterr().err
    assert main(["pack", str(tmp_path / "out"), "--out", str(tmp_path / "again"), "-q"]) == 0  # shards are a source too
    same(open_source(tmp_path / "again"), packed)
