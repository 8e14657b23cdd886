import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from mocokit.data import pixels
from mocokit.data.decode import UnreadableImageError
from mocokit.data.index import make_index
from mocokit.data.pixels import (
    PixelStore,
    SkippedSample,
    build_pixel_store,
    fit_picture,
    side_for,
    store_bytes,
    write_skipped,
)
from mocokit.data.sources import ImageSource, from_array, open_source
from mocokit.errors import DataError, StorageError, UsageError

RNG = np.random.default_rng(11)


def png(picture: NDArray[np.generic]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def noise(height: int, width: int) -> NDArray[np.uint8]:
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


def broken_source(
    rows: int, bad: set[int], splits: list[str] | None = None, seen: list[int] | None = None
) -> ImageSource:
    """Row r is a 2 x 3 picture of value r % 251; rows in `bad` can't be read."""

    def read(row: int) -> NDArray[np.uint8]:
        if seen is not None:
            seen.append(row)
        if row in bad:
            raise UnreadableImageError(f"reason {row}")
        return np.full((2, 3, 3), row % 251, np.uint8)

    return ImageSource(name="made", index=make_index([f"n{row}" for row in range(rows)], splits=splits), read=read)


def same(a: PixelStore, b: PixelStore) -> bool:
    return (
        np.array_equal(a.pixels, b.pixels)
        and np.array_equal(a.extents, b.extents)
        and np.array_equal(a.replaced, b.replaced)
        and a.skipped == b.skipped
    )


# ----------------------------------------------------------------------------------------------- the store


def test_pictures_lie_in_the_corner_unchanged() -> None:
    shapes = [(8, 8), (5, 8), (8, 3), (1, 1), (2, 7)]
    pictures = [noise(*shape) for shape in shapes]
    source = ImageSource(name="x", index=make_index(list("abcde")), read=lambda row: pictures[row])
    store = build_pixel_store(source, side=8)
    assert (len(store), store.side) == (5, 8)
    assert store.extents.tolist() == [list(shape) for shape in shapes]
    for row, (height, width) in enumerate(shapes):
        np.testing.assert_array_equal(store.pixels[row, :, :height, :width].transpose(1, 2, 0), pictures[row])
        assert store.pixels[row].sum(dtype=int) == pictures[row].sum(dtype=int)
    images, extents = store.batch(np.array([4, 0, 4]))
    assert (images.dtype, images.shape) == (torch.uint8, (3, 3, 8, 8))
    assert (extents.dtype, extents.tolist()) == (torch.int64, [[2, 7], [8, 8], [2, 7]])
    np.testing.assert_array_equal(images.numpy(), store.pixels[[4, 0, 4]])
    images.zero_()
    assert store.pixels[0].any()
    assert store.readable.all()


def test_large_pictures_are_reduced_and_small_ones_never_enlarged() -> None:
    smooth = np.asarray(Image.fromarray(noise(4, 6)).resize((300, 200), Image.Resampling.BICUBIC))
    reduced = fit_picture(smooth, 60)
    assert reduced.shape == (40, 60, 3)
    blocks = smooth.reshape(40, 5, 60, 5, 3).mean((1, 3))
    assert np.abs(reduced - blocks).mean() < 2
    checks = (np.indices((200, 200)).sum(0) % 2 * 255).astype(np.uint8)
    flat = fit_picture(np.repeat(checks[:, :, None], 3, axis=2), 20)
    assert np.abs(flat[2:-2, 2:-2].astype(int) - 128).max() <= 3  # antialiased: no checkerboard is left
    assert fit_picture(smooth, 300) is smooth
    assert fit_picture(noise(1, 500), 10).shape == (1, 10, 3)
    assert fit_picture(noise(500, 2), 100).shape == (100, 1, 3)


@pytest.mark.parametrize(
    ("height", "width", "side"),
    [(375, 500, 256), (500, 375, 200), (1, 39, 10), (168, 1, 77), (60, 2, 20), (200, 200, 199)],
)
def test_pictures_are_reduced_as_pillow_does_it(height: int, width: int, side: int) -> None:
    picture = noise(height, width)
    picture.setflags(write=False)
    reduced = fit_picture(picture, side)
    longer = max(height, width)
    target = (max(1, round(width * side / longer)), max(1, round(height * side / longer)))
    expected = np.asarray(Image.fromarray(picture).resize(target, Image.Resampling.BICUBIC))
    assert reduced.shape == expected.shape
    apart = np.abs(reduced.astype(int) - expected)
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.05


def test_reduced_pictures_are_the_same_bits_whatever_the_processor_can_do() -> None:
    script = (
        "import hashlib, numpy as np\n"
        "from mocokit.data.pixels import fit_picture\n"
        "for height, width, side in ((301, 407, 128), (168, 1, 77), (60, 2, 20), (500, 9, 130)):\n"
        "    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)\n"
        "    print(hashlib.sha256(fit_picture(noise, side).tobytes()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
            capture_output=True, text=True, check=True,
        ).stdout
        for capability in ("default", "avx2")
    }  # fmt: skip
    assert len(found) == 1


def test_the_side_follows_size_and_pictures(tmp_path: Path) -> None:
    assert side_for(open_source("digits"), 32) == 8
    assert side_for(open_source("moved-digits"), 24) == 24
    large = from_array(np.zeros((3, 500, 400, 3), np.uint8))
    assert [side_for(large, size) for size in (16, 32, 64, 96, 224)] == [24, 48, 96, 144, 336]
    assert side_for(large, 17) == 32  # 25.5, rounded up to a multiple of 8
    (tmp_path / "a.png").write_bytes(png(noise(20, 33)))
    (tmp_path / "b.png").write_text("unreadable")
    assert side_for(open_source(tmp_path), 32) == 33
    assert store_bytes(1000, 32) == 1000 * (3072 + 16)


def test_statistics_count_pixels_inside_only() -> None:
    pictures = [noise(8, 8), noise(3, 8), noise(8, 2)]
    source = ImageSource(name="x", index=make_index(list("abc")), read=lambda row: pictures[row])
    values = np.concatenate([picture.reshape(-1, 3) for picture in pictures]) / 255
    statistics = build_pixel_store(source, side=8).statistics()
    np.testing.assert_allclose(statistics["mean"], values.mean(0), atol=1e-6)
    np.testing.assert_allclose(statistics["std"], values.std(0), atol=1e-6)
    flat = build_pixel_store(from_array(np.full((2, 4, 4), 51, np.uint8)), side=4).statistics()
    assert flat == {"mean": (0.2, 0.2, 0.2), "std": (0.003922,) * 3}


# --------------------------------------------------------------------------------------------------- bad rows


def test_the_mixed_folder(tmp_path: Path) -> None:
    """Whatever a folder has in it, the good pictures are used, and each bad one is named once, with the reason."""
    root = tmp_path / "photos"
    root.mkdir()
    jpeg = io.BytesIO()
    Image.fromarray(noise(40, 60)).save(jpeg, "JPEG")
    ramp = np.linspace(0, 65535, 1024).astype(np.uint16).reshape(32, 32)
    (root / "good.jpg").write_bytes(jpeg.getvalue())
    (root / "cut.jpg").write_bytes(jpeg.getvalue()[: len(jpeg.getvalue()) // 2])
    (root / "deep.png").write_bytes(png(ramp))
    (root / "text.jpg").write_text("I am not a picture\n")
    (root / "empty.jpg").write_bytes(b"")
    (root / "notes.txt").write_text("passed over")
    (root / "parent").symlink_to("..")
    (root / "self").symlink_to(root)
    (root / "again.jpg").symlink_to("good.jpg")
    source = open_source(root)
    assert source.index.names == ("cut.jpg", "deep.png", "empty.jpg", "good.jpg", "text.jpg")
    assert source.report.lines() == [
        "1 files with other extensions passed over (.txt 1)",
        "1 links that lead outside the folder not followed",
        "2 links to pictures already counted passed over",
    ]
    with pytest.raises(DataError, match=r"^3 of 5 pictures in photos can't be read, more than the 1.00% .*'cut\.jpg'"):
        build_pixel_store(source, side=32)
    store = build_pixel_store(source, side=32, max_bad=0.6)
    assert [sample.name for sample in store.skipped] == ["cut.jpg", "empty.jpg", "text.jpg"]
    assert "truncated" in store.skipped[0].reason
    assert store.skipped[1].reason == "empty file"
    assert "looks like text" in store.skipped[2].reason
    assert store.readable.tolist() == [False, True, False, True, False]
    assert store.replaced[[1, 3]].tolist() == [1, 3]
    assert len(np.unique(store.pixels[1])) >= 250
    for row in (0, 2, 4):
        np.testing.assert_array_equal(store.pixels[row], store.pixels[store.replaced[row]])
        np.testing.assert_array_equal(store.extents[row], store.extents[store.replaced[row]])
        assert store.replaced[row] in (1, 3)


def test_replacement_does_not_depend_on_workers_or_other_bad_rows() -> None:
    bad = set(RNG.permutation(500)[:60].tolist())
    stores = [build_pixel_store(broken_source(500, bad), side=3, max_bad=0.5, workers=count) for count in (1, 2, 7)]
    assert same(stores[0], stores[1])
    assert same(stores[0], stores[2])
    store = stores[0]
    assert {sample.row for sample in store.skipped} == bad == set(np.flatnonzero(~store.readable).tolist())
    assert not bad & set(store.replaced.tolist())
    assert len({int(store.replaced[row]) for row in bad}) > 40  # spread, not all the same
    fewer = build_pixel_store(broken_source(500, {min(bad)}), side=3)
    more = build_pixel_store(broken_source(500, bad - {int(store.replaced[min(bad)])}), side=3, max_bad=0.5)
    assert more.replaced[min(bad)] == store.replaced[min(bad)]
    assert fewer.skipped == (SkippedSample(row=min(bad), name=f"n{min(bad)}", reason=f"reason {min(bad)}"),)


def test_replacement_stays_in_the_split() -> None:
    splits = ["train", "test", "val"] * 100
    bad = set(range(0, 300, 4))
    store = build_pixel_store(broken_source(300, bad, splits), side=3, max_bad=1)
    assert all(splits[int(store.replaced[row])] == splits[row] for row in range(300))
    alone = build_pixel_store(broken_source(3, {0}, ["train", "test", "test"]), side=3, max_bad=1)
    assert alone.replaced[0] in (1, 2)  # a split with nothing readable in it has to borrow
    nearly = build_pixel_store(broken_source(3000, set(range(2999))), side=3, max_bad=1)
    assert set(nearly.replaced.tolist()) == {2999}


def test_too_many_bad_rows_stop_early_and_in_the_same_place() -> None:
    messages, told, read = [], [], []
    for workers in (1, 4):
        with pytest.raises(DataError) as caught:
            build_pixel_store(
                broken_source(10_000, set(range(0, 10_000, 2)), seen=read),
                side=3,
                workers=workers,
                max_bad=0.01,
                progress=lambda done, total: told.append((done, total)),
            )
        messages.append(str(caught.value))
        count = len(read)
        assert count < 2_000  # the rest is left alone
        time.sleep(0.05)
        assert len(read) == count  # also by threads
    assert messages[0] == messages[1]
    assert messages[0].startswith("112 of the first 224 of 10,000 pictures in made can't be read, more than the 1.00%")
    assert "First: 'n0' (reason 0); 'n2' (reason 2);" in messages[0]
    assert "--max-bad" in messages[0]
    assert told[:7] == [(done, 10_000) for done in range(32, 224, 32)] + [(32, 10_000)]


def test_limits_of_max_bad() -> None:
    build_pixel_store(broken_source(100, {5}), side=3, max_bad=0.01)
    with pytest.raises(DataError, match="1 of 100 pictures"):
        build_pixel_store(broken_source(100, {99}), side=3, max_bad=0.0099)
    with pytest.raises(DataError, match=r"3 of 3 pictures in made can't be read. First: 'n0'"):
        build_pixel_store(broken_source(3, {0, 1, 2}), side=3, max_bad=1)
    for wrong in ({"side": 0}, {"side": 3, "max_bad": -0.1}, {"side": 3, "max_bad": 1.1}):
        with pytest.raises(UsageError):
            build_pixel_store(broken_source(3, set()), **wrong)
    with pytest.raises(DataError, match=r"take [\d,.]+ GB, this machine has"):
        build_pixel_store(broken_source(2000, set()), side=10_000)


def test_the_list_of_skipped_files(tmp_path: Path) -> None:
    names = ["plain.jpg", "line\nbreak.jpg", 'quote".jpg', "odd \udce9.jpg", "</script>\u2028.jpg"]
    skipped = [SkippedSample(row=row, name=name, reason="why") for row, name in enumerate(names)]
    write_skipped(tmp_path / "skipped.jsonl", skipped)
    lines = (tmp_path / "skipped.jsonl").read_text("ascii").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"row": row, "name": name, "reason": "why"} for row, name in enumerate(names)
    ]
    write_skipped(tmp_path / "skipped.jsonl", [])
    assert (tmp_path / "skipped.jsonl").read_bytes() == b""


# ------------------------------------------------------------------------------------------------------ cache


class Counting:
    """A folder of pictures and a count of how often one was decoded."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        for number in range(40):
            (root / f"{number:02d}.png").write_bytes(png(np.full((6, 4 + number % 5, 3), number, np.uint8)))
        (root / "13.png").write_bytes(b"broken")

    def build(self, cache: Path | None, side: int = 8, **options: float) -> tuple[PixelStore, int]:
        source = open_source(self.root)
        seen: list[int] = []
        store = build_pixel_store(
            source,
            side=side,
            cache=cache,
            max_bad=options.get("max_bad", 0.1),
            progress=lambda done, _: seen.append(done),
        )
        return store, max(seen, default=0)


@pytest.fixture
def folder(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "pictures")


@pytest.mark.parametrize("small", [True, False])
def test_a_cache_is_used_again(folder: Counting, tmp_path: Path, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(pixels, "IN_MEMORY_BYTES", 0)
    cache = tmp_path / "new" / "cache" / "pixels.u8"
    memory, _ = folder.build(None)
    first, decoded = folder.build(cache)
    assert decoded == 40
    second, decoded = folder.build(cache)
    assert decoded == 0
    assert same(memory, first)
    assert same(first, second)
    assert [sample.name for sample in second.skipped] == ["13.png"]
    assert cache.stat().st_size == store_bytes(40, 8)
    assert sorted(path.name for path in cache.parent.iterdir()) == ["pixels.u8", "pixels.u8.json"]
    images, _ = second.batch(np.arange(3))
    images.zero_()
    assert same(memory, second)
    with pytest.raises(DataError, match="1 of 40"):
        folder.build(cache, max_bad=0)


def test_a_cache_of_anything_else_is_made_anew(folder: Counting, tmp_path: Path) -> None:
    cache = tmp_path / "pixels.u8"
    folder.build(cache)
    assert folder.build(cache, side=7)[1] == 40
    assert folder.build(cache, side=7)[1] == 0
    os.utime(folder.root / "00.png", ns=(1, 1))
    assert folder.build(cache, side=7)[1] == 40
    (folder.root / "40.png").write_bytes(png(noise(3, 3)))
    store, decoded = folder.build(cache, side=7)
    assert (decoded, len(store)) == (41, 41)
    arrays = [from_array(np.full((4, 3, 3), value, np.uint8)) for value in (1, 2)]
    stores = [build_pixel_store(source, side=3, cache=cache) for source in arrays]
    assert [int(store.pixels.max()) for store in stores] == [1, 2]


def test_what_a_killed_start_left_beside_the_cache_goes(folder: Counting, tmp_path: Path) -> None:
    cache, other = tmp_path / "pixels.u8", tmp_path / ".tmp-0a1b2c3d-other.u8.json"
    for left in (other, tmp_path / ".tmp-0a1b2c3d-pixels.u8.json"):
        left.write_text("{")
    folder.build(cache)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert names == [other.name, "pixels.u8", "pixels.u8.json"]


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("damage", ["no json", "cut json", "other json", "cut", "longer", "tables", "zeros", "gone"])
def test_a_torn_cache_is_never_used(
    folder: Counting, tmp_path: Path, damage: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(pixels, "IN_MEMORY_BYTES", 0)
    cache, sidecar = tmp_path / "pixels.u8", tmp_path / "pixels.u8.json"
    good, _ = folder.build(None)
    folder.build(cache)
    whole = cache.read_bytes()
    match damage:
        case "no json":
            sidecar.unlink()
        case "cut json":
            sidecar.write_bytes(sidecar.read_bytes()[:-30])
        case "other json":
            sidecar.write_text('{"made_of": 3}')
        case "cut":
            cache.write_bytes(whole[:-1])
        case "longer":
            cache.write_bytes(whole + b"\0")
        case "tables":
            cache.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        case "zeros":
            cache.write_bytes(bytes(len(whole)))
        case "gone":
            cache.unlink()
    again, decoded = folder.build(cache)
    assert decoded == 40
    assert same(good, again)
    assert cache.read_bytes() == whole
    assert folder.build(cache)[1] == 0


def test_damaged_pixels_of_a_small_cache_are_noticed(folder: Counting, tmp_path: Path) -> None:
    cache = tmp_path / "pixels.u8"
    good, _ = folder.build(cache)
    data = bytearray(cache.read_bytes())
    data[-1] ^= 1
    cache.write_bytes(data)
    again, decoded = folder.build(cache)
    assert decoded == 40
    assert same(good, again)


def test_an_interrupted_build_leaves_nothing_that_counts(folder: Counting, tmp_path: Path) -> None:
    cache = tmp_path / "pixels.u8"
    folder.build(cache)
    os.utime(folder.root / "00.png", ns=(1, 1))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_pixel_store(open_source(folder.root), side=8, cache=cache, max_bad=0.1, progress=stop)
    assert [path.name for path in tmp_path.glob("pixels*")] == ["pixels.u8"]
    os.utime(folder.root / "00.png")
    assert folder.build(cache)[1] == 40


def test_a_cache_that_cannot_be_written(folder: Counting, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        folder.build(tmp_path / "file" / "pixels.u8")
