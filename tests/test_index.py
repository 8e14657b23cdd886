import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocokit.data.index import SampleIndex, make_index
from mocokit.data.randomness import sample_id
from mocokit.data.scan import EXTENSIONS, scan_folder
from mocokit.errors import DataError

ODD_NAMES = [
    "line\nbreak.jpg",
    'quote".jpg',
    "<script>alert(1)</script>.png".replace("/", "\u2215"),
    "emoji 🦊.jpg",
    "rtl \u202egpj.exe.jpg",
    "n" * 251 + ".jpg",
    "latin-1 \udce9.jpg",
    "-rf.jpg",
    "..jpg",
    "...jpg",
    "  spaces  .jpg",
    "back\\slash.JPG",
    "é.jpg",
    "e\u0301.jpg",
    "\U00010000.jpg",
    "\uffff.jpg",
]


def put(root: Path, *names: str, data: bytes = b"x") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def scan(root: Path, **options: bool) -> SampleIndex:
    return scan_folder(str(root), **options)[0]


# ---------------------------------------------------------------------------------------------------- table

texts = st.text("ab/é \udce9", min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(texts, st.tuples(st.none() | texts, st.none() | texts), min_size=1, max_size=12), st.data())
def test_a_table_keeps_its_rows(rows: dict[str, tuple[str | None, str | None]], data: st.DataObject) -> None:
    names = list(rows)
    index = make_index(names, labels=[row[0] for row in rows.values()], groups=[row[1] for row in rows.values()])
    assert index.ids.tolist() == [sample_id(name) for name in names]
    for row, (label, group) in enumerate(rows.values()):
        assert (index.class_names[index.labels[row]] if index.labels[row] >= 0 else None) == label
        assert index.groups[row] == (-1 if group is None else sample_id(group))
    chosen = data.draw(st.lists(st.sampled_from(range(len(names))), unique=True))
    part = index.subset(np.array(chosen, np.int64))
    assert part.names == tuple(names[row] for row in chosen)
    assert part.ids.tolist() == index.ids[chosen].tolist()
    assert part.class_names == index.class_names
    assert (part.hash == index.hash) == (chosen == list(range(len(names))))


def test_splits_and_their_synonyms() -> None:
    index = make_index(list("abcdef"), splits=["test", "Valid", "train", None, "fold 2", "validation"])
    assert index.split_names == ("train", "val", "test", "fold 2")
    assert index.rows_of("validation").tolist() == index.rows_of("val").tolist() == [1, 5]
    assert index.rows_of("fold 2").tolist() == [4]
    with pytest.raises(DataError, match=r"no split 'dev'; splits there are: train, val, test, fold 2\."):
        index.rows_of("dev")
    with pytest.raises(DataError, match="splits there are: none"):
        make_index(["a"]).rows_of("test")


def test_whole_numbers_sort_by_value() -> None:
    assert make_index(list("abc"), labels=["10", "9", "-1"]).class_names == ("-1", "9", "10")
    assert make_index(list("abc"), labels=["10", "9", "x"]).class_names == ("10", "9", "x")


def test_the_hash_covers_ids_sizes_times_and_content() -> None:
    base = make_index(["a", "b"], sizes=[1, 2], mtimes=[3, 4])
    assert base.hash == make_index(["a", "b"], sizes=[1, 2], mtimes=[3, 4], labels=["x", "y"]).hash
    others = [
        make_index(["a", "c"], sizes=[1, 2], mtimes=[3, 4]),
        make_index(["b", "a"], sizes=[1, 2], mtimes=[3, 4]),
        make_index(["a", "b"], sizes=[1, 3], mtimes=[3, 4]),
        make_index(["a", "b"], sizes=[1, 2], mtimes=[3, 5]),
        make_index(["a", "b"], sizes=[1, 2], mtimes=[3, 4], content="z"),
    ]
    assert len({base.hash, *(other.hash for other in others)}) == 6


def test_a_table_is_immutable_and_checked() -> None:
    sizes = np.array([1, 2], np.int64)
    index = make_index(["a", "b"], sizes=sizes)
    sizes[0] = 99
    assert index.sizes.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        index.ids[0] = 0
    with pytest.raises(AttributeError):
        index.names = ()  # type: ignore[misc]
    with pytest.raises(DataError, match="same id"):
        make_index(["a", "b", "a"])
    with pytest.raises(ValueError, match="shape"):
        make_index(["a", "b"], sizes=[1])
    with pytest.raises(ValueError, match="no name"):
        make_index(["a"], labels=np.array([3]), class_names=["only one"])


# --------------------------------------------------------------------------------------------------- layouts


def labelled(index: SampleIndex) -> list[tuple[str, str | None, str | None]]:
    return [
        (
            name,
            index.class_names[label] if label >= 0 else None,
            index.split_names[split] if split >= 0 else None,
        )
        for name, label, split in zip(index.names, index.labels, index.splits, strict=True)
    ]


def test_class_folders(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.jpg", "cat/deep/er/2.png", "dog/1.WEBP", "loose.jpg")
    assert labelled(scan(tmp_path)) == [
        ("cat/1.jpg", "cat", None),
        ("cat/deep/er/2.png", "cat", None),
        ("dog/1.WEBP", "dog", None),
        ("loose.jpg", None, None),
    ]


def test_split_folders(tmp_path: Path) -> None:
    put(tmp_path, "Train/cat/1.jpg", "Train/dog/2.jpg", "valid/dog/3.jpg", "test/4.jpg")
    assert labelled(scan(tmp_path)) == [
        ("Train/cat/1.jpg", "cat", "train"),
        ("Train/dog/2.jpg", "dog", "train"),
        ("test/4.jpg", None, "test"),
        ("valid/dog/3.jpg", "dog", "val"),
    ]


def test_layouts_without_classes(tmp_path: Path) -> None:
    put(tmp_path / "flat", "1.jpg", "2.jpg")
    put(tmp_path / "one", "images/1.jpg", "images/2.jpg")
    put(tmp_path / "splits", "train/1.jpg", "test/2.jpg")
    for layout in ("flat", "one", "splits"):
        assert scan(tmp_path / layout).class_names == ()
        assert scan(tmp_path / layout).labels.tolist() == [-1, -1]
    assert scan(tmp_path / "splits").split_names == ("train", "test")
    put(tmp_path / "vehicles", "train/1.jpg", "bus/2.jpg")  # a class may be called train
    assert scan(tmp_path / "vehicles").class_names == ("bus", "train")


# ------------------------------------------------------------------------------------------------- the scan


def test_odd_names_survive_and_sort_by_bytes(tmp_path: Path) -> None:
    put(tmp_path, *ODD_NAMES)
    index = scan(tmp_path)
    assert index.names == tuple(sorted(ODD_NAMES, key=os.fsencode))
    assert index.ids.tolist() == [sample_id(name) for name in index.names]
    assert all((tmp_path / name).read_bytes() == b"x" for name in index.names)


def test_order_is_by_bytes_of_the_whole_path(tmp_path: Path) -> None:
    names = ["a/x.jpg", "a-b/x.jpg", "a.jpg", "B/x.jpg", "a/b/x.jpg"]
    put(tmp_path, *names)
    assert scan(tmp_path).names == tuple(sorted(names, key=os.fsencode))


def test_what_is_passed_over_is_counted(tmp_path: Path) -> None:
    put(tmp_path, "a.jpg", "b.txt", "c.heic", "d", ".hidden", "e/._a.jpg", "Thumbs.db")
    index, report = scan_folder(str(tmp_path))
    assert index.names == ("a.jpg",)
    assert report.other_extensions == {".txt": 1, ".heic": 1, "": 1, ".hidden": 1, ".db": 1}
    assert report.sidecars == 1
    assert report.lines()[0].startswith("5 files with other extensions passed over (")


def test_no_pictures(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder is empty") as caught:
        scan(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert all(extension in str(caught.value) for extension in EXTENSIONS)
    put(tmp_path, "a.heic", "b.heic", "c.mp4")
    with pytest.raises(DataError, match=r"3 files with other extensions passed over \(.heic 2, .mp4 1\)"):
        scan(tmp_path)


@pytest.mark.parametrize("name", ["photos.parquet", "photos.npz", "photos.csv", "photos.tar"])
def test_a_folder_that_holds_a_table_is_told_how_to_open_it(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, "README.md")
    with pytest.raises(DataError, match=f"A {Path(name).suffix} file is opened by its own name") as caught:
        scan(tmp_path)
    assert f"{tmp_path}/NAME{Path(name).suffix}" in str(caught.value)


def test_ids_stay_when_files_come_and_go(tmp_path: Path) -> None:
    put(tmp_path, "b/1.jpg", "c/2.jpg")
    before = scan(tmp_path)
    ids = dict(zip(before.names, before.ids.tolist(), strict=True))
    put(tmp_path, "a/0.jpg", "b/0.jpg", "d/9.jpg")
    after = scan(tmp_path)
    assert {name: row for name, row in zip(after.names, after.ids.tolist(), strict=True) if name in ids} == ids
    assert after.hash != before.hash
    for folder in ("a", "d"):
        shutil.rmtree(tmp_path / folder)
    (tmp_path / "b/0.jpg").unlink()
    assert scan(tmp_path).hash == before.hash


def test_the_hash_changes_with_size_and_time(tmp_path: Path) -> None:
    put(tmp_path, "a.jpg", "b.jpg")
    os.utime(tmp_path / "a.jpg", ns=(10**18, 10**18))
    before = scan(tmp_path)
    assert before.mtimes[0] == 10**18
    assert before.sizes.tolist() == [1, 1]
    os.utime(tmp_path / "a.jpg", ns=(10**18, 10**18 + 1))
    touched = scan(tmp_path)
    put(tmp_path, "a.jpg", data=b"longer")
    os.utime(tmp_path / "a.jpg", ns=(10**18, 10**18))
    grown = scan(tmp_path)
    assert len({before.hash, touched.hash, grown.hash}) == 3
    put(tmp_path, "a.jpg")
    os.utime(tmp_path / "a.jpg", ns=(10**18, 10**18))
    assert scan(tmp_path).hash == before.hash


# -------------------------------------------------------------------------------------------------- links


def test_one_picture_stays_one(tmp_path: Path) -> None:
    put(tmp_path, "a/b/picture.jpg")
    (tmp_path / "a/b/up").symlink_to("..")
    (tmp_path / "a/b/top").symlink_to(tmp_path)
    (tmp_path / "a/self").symlink_to(".")
    (tmp_path / "again").symlink_to("a")
    (tmp_path / "copy.jpg").symlink_to("a/b/picture.jpg")
    (tmp_path / "copy of the copy.jpg").symlink_to("copy.jpg")
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "circle.jpg").symlink_to("circle.jpg")
    for follow in (False, True):
        index, report = scan_folder(str(tmp_path), follow_outside=follow)
        assert index.names == ("a/b/picture.jpg",)
        assert (report.links_inside, report.links_broken, report.links_outside) == (6, 2, 0)


def test_links_to_blobs_inside_count_once(tmp_path: Path) -> None:
    put(tmp_path, "blobs/0a1b", "blobs/2c3d")
    (tmp_path / "snapshot").mkdir()
    for name, blob in (("x.jpg", "0a1b"), ("y.jpg", "2c3d"), ("z.jpg", "0a1b"), ("notes.txt", "0a1b")):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{blob}")
    index, report = scan_folder(str(tmp_path))
    assert index.names == ("snapshot/x.jpg", "snapshot/y.jpg")
    assert report.links_inside == 1


def test_links_outside(tmp_path: Path) -> None:
    put(tmp_path / "data", "mine.jpg")
    put(tmp_path / "other", "theirs.jpg", "sub/deep.jpg")
    (tmp_path / "data/a_link").symlink_to("../other/sub")
    (tmp_path / "data/link").symlink_to("../other")
    (tmp_path / "data/link.jpg").symlink_to("../other/theirs.jpg")
    (tmp_path / "data/parent").symlink_to("..")
    (tmp_path / "other/back").symlink_to("../data")
    (tmp_path / "other/loop").symlink_to(".")
    index, report = scan_folder(str(tmp_path / "data"))
    assert index.names == ("mine.jpg",)
    assert report.links_outside == 4
    followed = scan(tmp_path / "data", follow_outside=True)
    assert followed.names == ("a_link/deep.jpg", "link/theirs.jpg", "mine.jpg")
    assert all((tmp_path / "data" / name).is_file() for name in followed.names)


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    put(tmp_path / "data", "a.jpg")
    (tmp_path / "data/b.jpg").symlink_to("a.jpg")
    (tmp_path / "link").symlink_to("data")
    assert scan(tmp_path / "link").names == ("a.jpg",)
    assert scan(tmp_path / "link").hash == scan(tmp_path / "data").hash


def test_special_files_are_never_opened(tmp_path: Path) -> None:
    put(tmp_path, "a.jpg")
    os.mkfifo(tmp_path / "fifo.jpg")  # opening it would block for ever
    (tmp_path / "link.jpg").symlink_to("fifo.jpg")
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/s.jpg")  # socket names can't be long
        (tmp_path / "socket").symlink_to(short)
        index, report = scan_folder(str(tmp_path), follow_outside=True)
    assert index.names == ("a.jpg",)
    assert report.special_files == 3


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach (pytest's own can't be)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_unreadable_folders_are_counted(open_folder: Path) -> None:
    put(open_folder, "a/1.jpg", "b/2.jpg", "c/3.jpg")
    (open_folder / "b").chmod(0)
    (open_folder / "c").chmod(0o444)  # can be listed, but nothing in it can be looked at
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)  # root may read everything
    try:
        index, report = scan_folder(str(open_folder))
    finally:
        if me == 0:
            os.seteuid(0)
    assert index.names == ("a/1.jpg",)
    assert report.unreadable == 2
    assert report.first_unreadable == "b/"


def test_a_hundred_levels(tmp_path: Path) -> None:
    deep = "/".join(f"level{level}" for level in range(100))
    put(tmp_path, f"{deep}/a.jpg")
    (tmp_path / deep / "up").symlink_to("../" * 50)
    assert scan(tmp_path).names == (f"{deep}/a.jpg",)


@pytest.mark.slow
def test_many_files_in_one_folder(tmp_path: Path) -> None:
    for number in range(100_000):
        os.close(os.open(tmp_path / f"{number:06d}.jpg", os.O_CREAT | os.O_WRONLY))
    index = scan(tmp_path)
    assert len(index) == 100_000
    assert index.names[:2] == ("000000.jpg", "000001.jpg")
