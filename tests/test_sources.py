import io
import json
import os
import threading
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from mocokit.data.decode import DecodeLimits, UnreadableImageError
from mocokit.data.randomness import sample_id
from mocokit.data.sources import from_array, open_source
from mocokit.errors import DataError, UsageError

RNG = np.random.default_rng(3)
PICTURES = RNG.integers(0, 256, (12, 5, 7, 3), dtype=np.uint8)


def png(picture: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def put(root: Path, *names: str) -> None:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(PICTURES[number]))


# ----------------------------------------------------------------------------------------------- dispatch


def test_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "shop", "train/cat/1.png", "train/dog/2.png", "test/cat/3.png")
    source = open_source(str(tmp_path / "shop"))
    assert source.name == "shop"
    assert source.index.names == ("test/cat/3.png", "train/cat/1.png", "train/dog/2.png")
    np.testing.assert_array_equal(source.read(0), PICTURES[2])
    assert source.read_bytes is not None
    assert source.read_bytes(2) == png(PICTURES[1])
    train = open_source(tmp_path / "shop", split="train")
    assert train.index.names == ("train/cat/1.png", "train/dog/2.png")
    np.testing.assert_array_equal(train.read(1), PICTURES[1])
    assert train.read_bytes is not None
    assert train.read_bytes(0) == png(PICTURES[0])
    assert train.index.class_names == ("cat", "dog")
    assert train.index.hash != source.index.hash
    with pytest.raises(DataError, match="no split 'dev'; splits there are: train, test"):
        open_source(tmp_path / "shop", split="dev")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("moved-digit", "does not exist and is no generated set .* Did you mean 'moved-digits'?"),
        ("no/such/folder", "'no/such/folder' does not exist"),
        ("bad\0path", "does not exist"),
    ],
)
def test_unknown_data(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(spec)


def test_settings_without_effect_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "list.txt").write_text("a.png\n")
    (tmp_path / "data.zip").write_bytes(b"")
    with pytest.raises(UsageError, match="no kind of data"):
        open_source(tmp_path / "data.zip")
    with pytest.raises(UsageError, match="no meaning for the generated set digits"):
        open_source("digits", label_column="x")
    with pytest.raises(UsageError, match="no meaning for the list"):
        open_source(tmp_path / "list.txt", label_column="x")
    with pytest.raises(UsageError, match="no meaning for a folder"):
        open_source(tmp_path, root=tmp_path)
    with pytest.raises(DataError, match=r"has no labels\.csv"):
        open_source(tmp_path, label_column="x")


def test_generated_sets_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source("digits", split="val")
    assert source.name == "digits"
    assert source.read(0).shape == (8, 8, 3)
    put(tmp_path, "digits/a.png")
    monkeypatch.chdir(tmp_path)
    assert len(open_source("digits").index) == 1797  # a folder of that name needs ./
    assert open_source("./digits").index.names == ("a.png",)
    monkeypatch.chdir(tmp_path / "digits")
    assert open_source(".").name == open_source("../digits/").name == "digits"


def test_reading_goes_wrong_with_a_reason(tmp_path: Path) -> None:
    put(tmp_path, "gone.png", "fifo.png", "large.png", "folder.png", "text.png")
    source = open_source(tmp_path, limits=DecodeLimits(max_bytes=1000))
    for name in source.index.names:
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "large.png").write_bytes(b"x" * 1001)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "text.png").write_text("not a picture")
    reasons = {}
    for row, name in enumerate(source.index.names):
        with pytest.raises(UnreadableImageError) as caught:
            source.read(row)
        reasons[name] = caught.value.reason
        assert str(tmp_path) not in caught.value.reason
    assert reasons["gone.png"] == "No such file or directory"
    assert reasons["fifo.png"] == "not a regular file"
    assert reasons["folder.png"] in ("Is a directory", "not a regular file")
    assert reasons["large.png"] == "1,001 bytes, more than the limit of 1,000"
    assert "looks like text" in reasons["text.png"]


# ---------------------------------------------------------------------------------------------- manifests


def test_csv_round_trip(tmp_path: Path) -> None:
    put(tmp_path, "pictures/a, b.png", "pictures/ü.png", "c.png", "d.png")
    (tmp_path / "table.csv").write_text(
        "\ufefflabel,path,group,split,price\n"
        'cat,"pictures/a, b.png",p1,train,3\n'
        "dog,./pictures/ü.png,p2,Validation,4\n"
        "\n"
        "cat,c.png,p1,test\n"
        ",d.png,,,\n",
        "utf-8",
    )
    source = open_source(tmp_path / "table.csv")
    index = source.index
    assert source.name == "table.csv"
    assert index.names == ("pictures/a, b.png", "pictures/ü.png", "c.png", "d.png")
    assert index.class_names == ("cat", "dog")
    assert index.labels.tolist() == [0, 1, 0, -1]
    assert index.groups.tolist() == [sample_id("p1"), sample_id("p2"), sample_id("p1"), -1]
    assert [index.split_names[split] if split >= 0 else None for split in index.splits] == [
        "train",
        "val",
        "test",
        None,
    ]
    for row in range(4):
        np.testing.assert_array_equal(source.read(row), PICTURES[row])
    folder = open_source(tmp_path)  # the same files have the same ids, however they are listed
    assert set(folder.index.ids.tolist()) == set(index.ids.tolist())


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("column", ["path", "file_name", "filename"])
def test_columns(tmp_path: Path, column: str, delimiter: str) -> None:
    put(tmp_path, "a.png", "b.png")
    lines = [(column, "kind", "patient", "part"), ("a.png", "x", "1", "test"), ("b.png", "y", "2", "train")]
    (tmp_path / "t.csv").write_text("\r\n".join(delimiter.join(line) for line in lines))
    plain = open_source(tmp_path / "t.csv").index
    assert plain.class_names == plain.split_names == ()
    chosen = open_source(
        tmp_path / "t.csv", label_column="kind", group_column="patient", split_column="part", split="train"
    ).index
    assert (chosen.names, chosen.class_names, chosen.labels.tolist()) == (("b.png",), ("x", "y"), [1])
    assert chosen.groups.tolist() == [sample_id("2")]
    with pytest.raises(
        DataError, match=rf"no column 'knd' for the label; its columns are: {column}, kind.* mean 'kind'"
    ):
        open_source(tmp_path / "t.csv", label_column="knd")
    with pytest.raises(DataError, match="no column 'picture' for the path"):
        open_source(tmp_path / "t.csv", path_column="picture")


def test_bare_ids_are_looked_up(tmp_path: Path) -> None:
    put(tmp_path, "images/10.png", "images/11.jpg", "images/sub/12.webp")
    (tmp_path / "labels.csv").write_text("id,kind\n11,b\n10,a\n12,b\n13,a\n")
    source = open_source(tmp_path, label_column="kind")
    assert source.name == tmp_path.name
    assert source.index.names == ("images/11.jpg", "images/10.png", "images/sub/12.webp", "13")
    assert source.report.missing == 1
    put(tmp_path, "other/10.gif")
    with pytest.raises(DataError, match=r"lists '10', which could be 'images/10.png' or 'other/10.gif'"):
        open_source(tmp_path / "labels.csv")


@pytest.mark.parametrize("escape", ["../x.png", "a/../../x.png", "/etc/passwd", "a\0.png", "a/../b.png"])
def test_no_escape_from_the_root(tmp_path: Path, escape: str) -> None:
    put(tmp_path, "data/a.png", "x.png")
    (tmp_path / "data/list.txt").write_text(f"a.png\n{escape}\n")
    with pytest.raises(DataError, match="is not a path below its root") as caught:
        open_source(tmp_path / "data/list.txt")
    assert repr(escape) in str(caught.value)


def test_links_out_of_the_root(tmp_path: Path) -> None:
    put(tmp_path, "data/a.png", "other/x.png")
    (tmp_path / "data/link").symlink_to("../other")
    (tmp_path / "data/file.png").symlink_to("../other/x.png")
    for name in ("link/x.png", "file.png"):
        (tmp_path / "data/list.txt").write_text(f"a.png\n{name}\n")
        with pytest.raises(DataError, match=f"'{name}', a link that leads outside"):
            open_source(tmp_path / "data/list.txt")
        assert len(open_source(tmp_path / "data/list.txt", follow_outside=True).index) == 2


def test_lists_and_roots(tmp_path: Path) -> None:
    put(tmp_path, "data/ a b.png", "data/#c.png")
    odd = "data/odd \udce9.png"
    put(tmp_path, odd)
    text = "data/ a b.png\r\n\r\ndata/#c.png\r\n" + odd + "\r\ndata/#c.png\ndata/none.png"
    (tmp_path / "list.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    source = open_source(tmp_path / "list.txt")
    assert source.index.names == ("data/ a b.png", "data/#c.png", odd, "data/none.png")
    assert (source.report.repeated, source.report.missing) == (1, 1)
    with pytest.raises(UnreadableImageError):
        source.read(3)
    (tmp_path / "lists").mkdir()
    (tmp_path / "list.txt").rename(tmp_path / "lists/list.txt")
    with pytest.raises(DataError, match=r"None of the 4 files .* the first is 'data/ a b\.png'"):
        open_source(tmp_path / "lists/list.txt")
    assert open_source(tmp_path / "lists/list.txt", root=tmp_path).index.names == source.index.names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("name,label\na.png,x\n", "no column of paths: looked for path, .*; its columns are: name, label"),
        ("path,label,label\na.png,x,y\n", "column 'label' twice"),
        ("path,label\na.png,x,y\n", r"line 2: 3 values for 2 columns"),
        ("path,label\n", "lists no files"),
        ("path,label\na.png,x\na.png,y\n", "lists 'a.png' twice with different values .label 'x' and 'y'"),
        ("path,label\n,x\na.png,y\n", "a line without a path"),
        ('path\n"' + "a" * 200_000 + '"\n', "not a readable CSV table"),
    ],
)
def test_wrong_tables(tmp_path: Path, text: str, message: str) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / "t.csv")


# ------------------------------------------------------------------------------------------------ parquet


def write_parquet(path: Path, images: pa.Array, metadata: dict[str, str] | None = None, **columns: pa.Array) -> None:
    table = pa.table({"image": images, **columns})
    pq.write_table(table.replace_schema_metadata(metadata), path, row_group_size=5)


ENCODED = [png(picture) for picture in PICTURES]


def test_parquet_of_structs(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    images = pa.array([{"bytes": data, "path": f"p{row}.png"} for row, data in enumerate(ENCODED)])
    labels = pa.array([row % 3 for row in range(12)])
    splits = pa.array(["train"] * 8 + ["test"] * 4).dictionary_encode()
    write_parquet(path, images, {"classes": "ant, bee,cow"}, label=labels, split=splits)
    source = open_source(path)
    assert source.name == "set.parquet"
    assert source.index.names[11] == "p11.png"
    assert source.index.class_names == ("ant", "bee", "cow")
    assert source.index.labels.tolist() == [row % 3 for row in range(12)]
    for row in (11, 0, 4, 5, 11):
        np.testing.assert_array_equal(source.read(row), PICTURES[row])
    test = open_source(path, split="test")
    np.testing.assert_array_equal(test.read(3), PICTURES[11])
    before = source.index.hash
    os.utime(path, ns=(1, 1))
    assert open_source(path).index.hash != before


def test_parquet_of_bytes_with_text_labels_and_nulls(tmp_path: Path) -> None:
    path = tmp_path / "set.parquet"
    kinds = pa.array(["b", "a", None] * 4)
    write_parquet(path, pa.array([*ENCODED[:11], None]), {"other": "x"}, kind=kinds, who=pa.array(range(12)))
    source = open_source(path, label_column="kind", group_column="who")
    assert source.index.names[11] == "row 11"
    assert source.index.class_names == ("a", "b")
    assert source.index.labels.tolist() == [1, 0, -1] * 4
    assert source.index.groups[4] == sample_id("4")
    np.testing.assert_array_equal(source.read(10), PICTURES[10])
    with pytest.raises(UnreadableImageError, match="null"):
        source.read(11)


def test_parquet_of_hugging_face(tmp_path: Path) -> None:
    features = {"image": {"_type": "Image"}, "label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    images = pa.array([{"bytes": data, "path": None} for data in ENCODED])
    write_parquet(tmp_path / "hf.parquet", images, metadata, label=pa.array([0, 1, -1] * 4))
    index = open_source(tmp_path / "hf.parquet").index
    assert (index.class_names, index.labels[:3].tolist()) == (("no", "yes"), [0, 1, -1])
    write_parquet(tmp_path / "bad.parquet", images, metadata, label=pa.array([0, 1, 2] * 4))
    with pytest.raises(DataError, match="labels from 0 to 2 but 2 class names"):
        open_source(tmp_path / "bad.parquet")


def test_parquet_is_read_by_several_threads(tmp_path: Path) -> None:
    write_parquet(tmp_path / "set.parquet", pa.array(ENCODED))
    source = open_source(tmp_path / "set.parquet")
    wrong: list[int] = []

    def work(seed: int) -> None:
        for row in np.random.default_rng(seed).integers(0, 12, 60).tolist():
            if not np.array_equal(source.read(row), PICTURES[row]):
                wrong.append(row)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_parquet_keeps_few_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mocokit.data.parquet._CACHE_BYTES", 10)
    write_parquet(tmp_path / "set.parquet", pa.array(ENCODED))
    source = open_source(tmp_path / "set.parquet")
    for row in range(11, -1, -1):
        np.testing.assert_array_equal(source.read(row), PICTURES[row])


def test_wrong_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, pa.array(["text"]), label=pa.array([1.5]))
    with pytest.raises(
        DataError, match=r"one column of encoded pictures .* found none among its columns: image, label"
    ):
        open_source(path)
    write_parquet(path, pa.array(ENCODED[:1]), label=pa.array([1.5]))
    assert open_source(path).index.class_names == ()
    with pytest.raises(DataError, match="label column 'label' holds double"):
        open_source(path, label_column="label")
    with pytest.raises(DataError, match="no picture column 'label'"):
        open_source(path, path_column="label")
    with pytest.raises(DataError, match="no column 'split2' for the split"):
        open_source(path, split_column="split2")
    write_parquet(path, pa.array([], pa.binary()))
    with pytest.raises(DataError, match="no rows"):
        open_source(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a readable Parquet file"):
        open_source(path)


# --------------------------------------------------------------------------------------- npz and in memory

GREY = PICTURES[:, :, :, :1]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (PICTURES, PICTURES),
        (PICTURES.transpose(0, 3, 1, 2), PICTURES),
        (GREY[:, :, :, 0], GREY),
        (GREY, GREY),
        (PICTURES.astype(np.int64), PICTURES),
        ((PICTURES / 255).astype(np.float32), PICTURES),
        (PICTURES.transpose(0, 3, 1, 2) / 255, PICTURES),
        (GREY[:, :, :, 0] > 127, np.where(GREY > 127, 255, 0)),
    ],
    ids=["HWC", "CHW", "grey", "grey 1", "int64", "float32", "float64 CHW", "bool"],
)
def test_npz_round_trip(tmp_path: Path, stored: NDArray[np.generic], expected: NDArray[np.uint8]) -> None:
    labels, splits = np.arange(12) % 3, np.array(["train"] * 8 + ["test"] * 4)
    np.savez_compressed(tmp_path / "set.npz", x=stored, y=labels, split=splits, group=np.arange(12) // 2)
    for source in (open_source(tmp_path / "set.npz"), from_array(stored, labels, splits=splits)):
        assert source.index.class_names == ("0", "1", "2")
        assert len(source.index.rows_of("test")) == 4
        for row in (0, 11):
            picture = source.read(row)
            assert (picture.dtype, picture.shape) == (np.uint8, (5, 7, 3))
            np.testing.assert_array_equal(picture, np.broadcast_to(expected[row], (5, 7, 3)))
    assert open_source(tmp_path / "set.npz").index.groups[3] == sample_id("1")
    assert open_source(tmp_path / "set.npz").name == "set.npz"


def test_an_array_is_known_by_its_content() -> None:
    one, same, other = open_source(PICTURES), open_source(PICTURES.copy()), open_source(PICTURES[::-1])
    assert one.index.hash == same.index.hash != other.index.hash
    assert one.index.ids.tolist() == other.index.ids.tolist()
    named = from_array(PICTURES, np.arange(12) % 2, class_names=["a", "b"], name="mine")
    assert (named.name, named.index.class_names) == ("mine", ("a", "b"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": PICTURES}, "no array images or x; it has: pictures"),
        ({"x": PICTURES.astype(np.float32)}, r"must lie in 0\.\.1, these lie in 0\.\.255"),
        ({"x": PICTURES.astype(np.int16) * 100}, r"must lie in 0\.\.255"),
        ({"x": np.full((2, 3, 3), np.nan)}, "must lie in"),
        ({"x": PICTURES[0]}, None),
        ({"x": PICTURES[0, 0]}, r"shape \(7, 3\)"),
        ({"x": np.zeros((2, 5, 5, 2))}, "shape"),
        ({"x": np.zeros((0, 5, 5, 3))}, "shape"),
        ({"x": np.zeros((2, 5, 5, 3), complex)}, "type complex128"),
        ({"x": PICTURES, "y": np.arange(11)}, r"labels have shape \(11,\)"),
        ({"x": PICTURES, "y": np.arange(12) / 2}, "type float64"),
        ({"x": np.array([{}, {}], object)}, "not a readable npz file"),
    ],
)
def test_wrong_npz(tmp_path: Path, arrays: dict[str, NDArray[np.generic]], message: str | None) -> None:
    np.savez(tmp_path / "set.npz", allow_pickle=True, **arrays)
    if message is None:  # [5, 7, 3] reads as five grey pictures
        assert open_source(tmp_path / "set.npz").read(0).shape == (7, 3, 3)
        return
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / "set.npz")


def test_npz_that_claims_more_than_it_has(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": (10**6, 10**6, 3)})
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr("x.npy", buffer.getvalue() + b"\0" * 100)
    with pytest.raises(DataError, match=r"'x' claims 3,000,000,000,\d+ bytes but has \d+"):
        open_source(tmp_path / "bomb.npz")
    (tmp_path / "text.npz").write_text("no zip")
    with pytest.raises(DataError, match="not a readable npz file"):
        open_source(tmp_path / "text.npz")


# --------------------------------------------------------------------------------------------------------- scale

MEASURE = """
import re, sys, time
from pathlib import Path
from mocokit.data.sources import open_source
start = time.perf_counter()
index = open_source(sys.argv[1]).index
seconds = time.perf_counter() - start
# VmHWM, not ru_maxrss: the latter starts with the peak of the process that forked this one, torch and all.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(len(index), seconds, int(peak[1]) / 1024)
"""


def big_manifest(path: Path, rows: int) -> Path:
    """A CSV of so many rows, of whose files the first alone is there."""
    (path.parent / "0").mkdir()
    (path.parent / "0" / "photo_00000000.jpg").write_bytes(b"x")
    with path.open("w") as stream:
        stream.write("path,label,group,split\n")
        for row in range(rows):
            stream.write(
                f"{row // 1000}/photo_{row:08d}.jpg,class{row % 50},patient{row // 4},{'test'[row % 5 :]}train\n"
            )
    return path


@pytest.mark.slow
def test_a_row_of_a_manifest_takes_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    path = big_manifest(tmp_path / "list.csv", 50_000)
    tracemalloc.start()
    try:
        assert len(open_source(path).index) == 50_000
        assert tracemalloc.get_traced_memory()[1] / 50_000 < 400  # bytes; a million rows stay below 500 MB
    finally:
        tracemalloc.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_million_rows_within_a_minute_and_500_mb(kind: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tmp_path / f"list.{kind}"
    if kind == "csv":
        big_manifest(path, 1_000_000)
    else:
        rows = range(1_000_000)
        columns = {
            "image": pa.array([b"x"] * len(rows), pa.binary()),
            "label": [f"class{row % 50}" for row in rows],
            "group": [f"patient{row // 4}" for row in rows],
        }
        pq.write_table(pa.table(columns), path, row_group_size=20_000)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    count, seconds, megabytes = (float(word) for word in done.stdout.split())
    assert count == 1_000_000
    assert seconds < 60
    assert megabytes < 500
