import importlib.util
import io
import itertools
import json
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mocokit.data.decode import DecodeLimits, UnreadableImageError
from mocokit.data.manifest import Columns
from mocokit.data.randomness import sample_id
from mocokit.data.shard_listing import ShardReport
from mocokit.data.shards import expand_braces, is_shards, open_shards
from mocokit.data.sources import ImageSource, open_source
from mocokit.data.tarball import Member, NotATarError, TarNotes, members, windowed
from mocokit.errors import DataError, MissingDependencyError, UsageError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (3, 4, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def tar_bytes(
    content: Iterable[tuple[str | tarfile.TarInfo, bytes]], kind: int = tarfile.PAX_FORMAT, *, end: bool = True
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind, errors="surrogateescape") as tar:
        for name, data in content:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        length = buffer.tell()
    return buffer.getvalue() if end else buffer.getvalue()[:length]


def listed(data: bytes, window: int = 4096) -> tuple[list[Member], TarNotes]:
    notes = TarNotes()
    read = windowed(lambda offset, count: data[offset : offset + count], window)
    return list(members(read, len(data), notes)), notes


def shard(path: Path, *content: tuple[str, bytes]) -> Path:
    path.write_bytes(tar_bytes(content))
    return path


def report_of(source: ImageSource) -> ShardReport:
    assert isinstance(source.report, ShardReport)
    return source.report


# ------------------------------------------------------------------------------------- headers, against tarfile

names = st.text("ab/ é\udce9\n", min_size=1, max_size=40).filter(
    lambda name: name.strip("/") == name and "//" not in name
) | st.just("long/" * 60 + "name")


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(names, st.binary(max_size=1100)), min_size=1, max_size=6),
    st.sampled_from(["gnu", "pax"]),
    st.sampled_from([512, 700, 4096, 2**20]),
)
def test_members_are_those_that_tarfile_finds(content: list[tuple[str, bytes]], kind: str, window: int) -> None:
    data = tar_bytes(content, FORMATS[kind])
    found, notes = listed(data, window)
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        told = [(info.name, info.offset_data, info.size) for info in tar]
    assert found == told
    assert [data[offset : offset + size] for _, offset, size in found] == [body for _, body in content]
    assert notes == TarNotes()


def test_old_and_ustar_headers_with_prefix_and_binary_numbers() -> None:
    prefixed = "folder" * 20 + "/" + "name" * 20
    data = tar_bytes([(prefixed, b"x"), ("b", b"yy")], tarfile.USTAR_FORMAT)
    assert [name for name, _, _ in listed(data)[0]] == [prefixed, "b"]
    info = tarfile.TarInfo("old")
    info.size = 2
    old = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    old[257:265] = bytes(8)  # before ustar there was no magic
    assert listed(checked(old) + b"ab" + bytes(510) + bytes(1024))[0] == [("old", 512, 2)]
    binary = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    binary[124:136] = b"\x80" + (2).to_bytes(11, "big")
    assert listed(checked(binary) + b"ab" + bytes(510) + bytes(1024))[0] == [("old", 512, 2)]
    binary[124:136] = b"\xff" * 12
    with pytest.raises(NotATarError, match="negative"):
        listed(checked(binary) + bytes(1024))


def checked(header: bytearray | bytes) -> bytes:
    """The header with a right checksum."""
    block = bytearray(header)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar command here")
@pytest.mark.parametrize("kind", ["gnu", "posix", "oldgnu", "v7"])
def test_files_written_by_the_tar_command(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for number in range(3):
        (folder / "sub" / f"{number}.bin").write_bytes(bytes([number + 1]) * (700 * number + 1))
    (folder / "link").symlink_to("sub/0.bin")
    os.link(folder / "sub" / "1.bin", folder / "zhard")
    fifos = kind != "v7"  # which knows none
    if fifos:
        os.mkfifo(folder / "fifo")
    holes = (folder / "holes").open("wb")
    for place in range(30):  # more pieces than one header lists
        holes.seek(place * 200_000)
        holes.write(b"data")
    holes.close()
    command = ["tar", "--sort=name", f"--format={kind}", "-C", str(folder), "-cf", str(tmp_path / "out.tar"), "."]
    subprocess.run([*command[:1], *(["--sparse"] if kind != "v7" else []), *command[1:]], check=True)
    data = (tmp_path / "out.tar").read_bytes()
    found, notes = listed(data)
    bodies = {name: data[offset : offset + size] for name, offset, size in found}
    holes_kept = kind == "v7" or notes.sparse == 0  # a file system may have no holes
    if holes_kept:
        assert bodies.pop("holes") == (folder / "holes").read_bytes()
    assert bodies == {f"sub/{number}.bin": (folder / "sub" / f"{number}.bin").read_bytes() for number in range(3)}
    assert (notes.links, notes.devices, notes.unsafe, notes.unknown) == (2, int(fifos), 0, 0)
    assert notes.cut == ""


# --------------------------------------------------------------------------------------------- hostile headers


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_hostile_members_are_passed_over_and_counted(tmp_path: Path) -> None:
    sparse = tarfile.TarInfo("sparse.png")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    path = tmp_path / "bad.tar"
    content: list[tuple[str | tarfile.TarInfo, bytes]] = [
        ("a.png", png(1)),
        (special("b.png", tarfile.SYMTYPE, "/etc/passwd"), b""),
        (special("c.png", tarfile.LNKTYPE, "../../etc/passwd"), b""),
        (special("d.png", tarfile.CHRTYPE), b""),
        (special("e.png", tarfile.BLKTYPE), b""),
        (special("f.png", tarfile.FIFOTYPE), b""),
        (sparse, b"1\n0\n5\n" + b"x" * 600),
        ("/etc/cron.d/g.png", png(2)),
        ("../h.png", png(2)),
        ("i/../../h.png", png(2)),
        (special("folder.png", tarfile.DIRTYPE), b""),
        (special("volume.png", b"V"), b""),
        (special("unheard.png", b"Q"), b"body" * 300),
        ("./j.png", png(3)),
        ("k.png", b""),
    ]
    path.write_bytes(tar_bytes(content))
    before = sorted(tmp_path.rglob("*"))
    source = open_source(path)
    assert source.index.names == ("bad.tar/a.png", "bad.tar/j.png", "bad.tar/k.png")
    assert source.index.ids.tolist() == [sample_id(name) for name in source.index.names]
    report = report_of(source)
    assert (report.links_inside, report.special_files, report.sparse) == (2, 3, 1)
    assert (report.unsafe_names, report.unknown_members) == (3, 2)
    assert source.read(0).shape == (3, 4, 3)
    with pytest.raises(UnreadableImageError, match="empty file"):
        source.read(2)
    assert sorted(tmp_path.rglob("*")) == before  # nothing was extracted
    assert "1 sparse members passed over" in report.lines()


CUTTABLE = tar_bytes(
    [("a.png", b"1" * 600), ("x" * 150 + ".png", b"2" * 512), ("c.png", b""), ("d.png", b"3" * 30)], tarfile.GNU_FORMAT
)
WHOLE, _ = listed(CUTTABLE)
END = max(offset + size for _, offset, size in WHOLE) // 512 * 512 + 512


@pytest.mark.parametrize("length", [*range(512, END + 512, 67), *range(512, END + 512, 512)])
def test_a_cut_tar_gives_what_comes_before_the_cut(length: int) -> None:
    found, notes = listed(CUTTABLE[:length])
    assert found == [member for member in WHOLE if member[1] + member[2] <= length][: len(found)]
    assert len(found) >= sum(member[1] + member[2] <= length for member in WHOLE)
    assert notes.cut != ""


def test_a_cut_shard_is_reported(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar", ("a.png", png(1)), ("b.png", b"x" * 5000))
    path.write_bytes(path.read_bytes()[:3000])
    source = open_source(path)
    assert source.index.names == ("s.tar/a.png",)
    assert source.report.lines() == [
        "s.tar is not whole: it ends at byte 3,000, inside 'b.png'; 1 samples before that are used"
    ]
    path.write_bytes(tar_bytes([("a.png", png(1))]) + tar_bytes([("b.png", png(2))]))
    assert "more data follow its end mark" in open_source(path).report.lines()[0]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_damage_ends_in_members_within_the_file_or_a_data_error(data: st.DataObject) -> None:
    raw = bytearray(CUTTABLE[: END + 1024])
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        found, _ = listed(bytes(raw))
    except DataError:
        return
    assert all(0 <= offset <= offset + size <= len(raw) for _, offset, size in found)


def test_bombs_of_headers_cost_no_more_than_their_length() -> None:
    long_name = tarfile.TarInfo("././@LongLink")
    long_name.type, long_name.size = b"L", 2
    one = long_name.tobuf(tarfile.GNU_FORMAT) + b"a\0" + bytes(510)
    found, notes = listed(one * 20_000 + tar_bytes([("b", b"x")]))  # tarfile's own reader recurses here
    assert [name for name, _, _ in found] == ["a"]
    assert notes.cut == ""
    long_name.size = 2**33
    huge = tar_bytes([("first", b"")], end=False)[:512] + long_name.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    assert "a name or attribute of 8,589,934,592 bytes" in listed(huge)[1].cut
    for record in (
        b"8 path=a\n",
        b"9 path=ab\n",
        b"x path=a\n",
        b"99999999999 path=a\n",
        b"11 size=x1\n",
        b"12 size=-99\n",
        b"7 path\n",
    ):
        header = tarfile.TarInfo("pax")
        header.type, header.size = b"x", len(record)
        raw = tar_bytes([("first", b"")], end=False)[:512] + header.tobuf(tarfile.USTAR_FORMAT)
        assert "is damaged" in listed(raw + record.ljust(512, b"\0") + tar_bytes([("b", b"x")]))[1].cut


def test_what_is_no_tar_says_so(tmp_path: Path) -> None:
    for data, message in (
        (b"", "0 bytes long"),
        (b"\x1f\x8b" + bytes(range(256)) * 4, "compressed: unpack it with gunzip"),
        (b"<html>" * 200, "not a tar"),
        (bytes(10240), "No pictures in x.tar"),
        (tar_bytes([("readme.txt", b"x")]), r"passed over \(\.txt 1\)"),
    ):
        (tmp_path / "x.tar").write_bytes(data)
        with pytest.raises(DataError, match=message):
            open_source(tmp_path / "x.tar")


# ---------------------------------------------------------------------------------------------- keys and labels


def test_names_twice_and_keys_apart_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    shard(path, ("a.png", png(1)), ("a.png", png(1)))
    with pytest.raises(DataError, match=r"holds 'a\.png' twice"):
        open_source(path)
    shard(path, ("a.png", png(1)), ("b.png", png(1)), ("a.png", png(1)))
    with pytest.raises(DataError, match=r"holds 'a\.png' twice"):
        open_source(path)
    shard(path, ("d/a.png", png(1)), ("d/b.png", png(1)), ("d/a.cls", b"1"), ("d/b.cls", b"2"))
    with pytest.raises(DataError, match=r"'d/a\.cls' comes after other samples.*key 'd/a'.*--sort=name"):
        open_source(path)


def test_pictures_of_a_key(tmp_path: Path) -> None:
    path = shard(
        tmp_path / "s.tar",
        ("a.seg.png", png(0)),
        ("a.JPG", png(1)),
        ("a.png", png(2)),
        ("a.txt", b"caption"),
        ("b.json", b"{}"),
        ("img.1.png", png(3)),
        ("img.1.json", b'{"label": "x"}'),
        ("img.2.png", png(4)),
        ("._c.png", b"x"),
        (".hidden", b"x"),
        ("plain", b"x"),
    )
    source = open_source(path)
    assert source.index.names == ("s.tar/a.JPG", "s.tar/img.1.png", "s.tar/img.2.png")
    assert source.index.labels.tolist() == [-1, 0, -1]
    report = report_of(source)
    assert (report.second_pictures, report.without_picture, report.sidecars) == (1, 1, 1)
    assert report.other_extensions == {".seg.png": 1, ".txt": 1, ".json": 1, "": 2}


def meta(**values: object) -> bytes:
    return json.dumps(values).encode()


def test_labels_groups_and_splits(tmp_path: Path) -> None:
    path = shard(
        tmp_path / "s.tar",
        ("a.png", png(1)),
        ("a.json", meta(label="cat", group="p1", split="train", kind=10)),
        ("b.cls", b"7"),
        ("b.json", meta(label="dog", group="p1", split="test", kind=9)),
        ("b.png", png(2)),
        ("c.png", png(3)),
        ("c.json", b"[1]"),
        ("d.png", png(4)),
        ("d.json", b"[" * 50_000),
        ("e.png", png(5)),
        ("e.json", meta(label=["x"], group=None, split=True, kind=None)),
    )
    source = open_source(path)
    assert source.index.class_names == ("cat", "dog")
    assert source.index.labels.tolist() == [0, 1, -1, -1, -1]
    assert source.index.groups.tolist() == [sample_id("p1")] * 2 + [-1] * 3
    assert source.index.split_names == ("train", "test")
    assert report_of(source).bad_metadata == 2
    by_kind = open_source(path, label_column="kind", split="test")
    assert by_kind.index.class_names == ("9", "10")
    assert by_kind.index.names == ("s.tar/b.png",)
    with pytest.raises(DataError, match=r"no column 'knd'.*Did you mean 'kind'"):
        open_source(path, label_column="knd")
    with pytest.raises(UsageError, match="path column"):
        open_source(path, path_column="png")


def test_class_files_are_labels_where_no_json_has_one(tmp_path: Path) -> None:
    path = shard(
        tmp_path / "s.tar",
        *((f"{n}.{ext}", png(n) if ext == "png" else b"%d\n" % (10 - n)) for n in range(3) for ext in ("cls", "png")),
    )
    index = open_source(path).index
    assert index.class_names == ("8", "9", "10")
    assert index.labels.tolist() == [2, 1, 0]


def test_odd_names_stay_themselves(tmp_path: Path) -> None:
    odd = ["line\nbreak.png", "rtl \u202egpj.png", "latin-1 \udce9.png", "emoji 🦊.png", "-rf.png", "back\\slash.png"]
    path = shard(tmp_path / "s.tar", *((name, png(number)) for number, name in enumerate(odd)))
    assert open_source(path).index.names == tuple(f"s.tar/{name}" for name in odd)


# ------------------------------------------------------------------------------------------------ which shards


def three(folder: Path) -> list[Path]:
    folder.mkdir()
    return [shard(folder / f"s-{n:02d}.tar", (f"{n}.png", png(n)), (f"{n}.cls", b"%d" % n)) for n in range(8, 11)]


def contents(source: ImageSource) -> list[tuple[str, bytes]]:
    assert source.read_bytes is not None
    return [(name, source.read_bytes(row)) for row, name in enumerate(source.index.names)]


def test_one_many_and_urls_are_the_same_samples(tmp_path: Path) -> None:
    paths = three(tmp_path / "d")
    told = [(f"s-{n:02d}.tar/{n}.png", png(n)) for n in range(8, 11)]
    folder, braces = open_source(tmp_path / "d"), open_source(str(tmp_path / "d" / "s-{08..10}.tar"))
    assert contents(folder) == contents(braces) == told
    assert folder.name == "d"
    assert braces.name == "s-{08..10}.tar"
    assert folder.index.hash == braces.index.hash
    assert contents(open_source(paths[1])) == told[1:2]
    memory = fsspec.filesystem("memory")
    for path in paths:
        memory.pipe_file(f"/{tmp_path.name}/{path.name}", path.read_bytes())
    for root in (f"file://{tmp_path}/d", f"memory://{tmp_path.name}"):
        for spec in (root, f"{root}/s-{{08..10}}.tar"):
            source = open_source(spec)
            assert contents(source) == told
            assert source.index.ids.tolist() == folder.index.ids.tolist()
            assert source.index.labels.tolist() == [0, 1, 2]
    memory.rm(f"/{tmp_path.name}", recursive=True)
    with pytest.raises(UnreadableImageError, match="no longer there"):
        source.read(0)
    paths[1].unlink()
    with pytest.raises(DataError, match=r"s-09\.tar can't be read"):
        open_source(str(tmp_path / "d" / "s-{08..10}.tar"))
    with pytest.raises(DataError, match=r"s-09\.tar can't be reached"):
        open_source(f"file://{tmp_path}/d/s-{{08..10}}.tar")


def test_equal_names_in_several_folders(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"part{number}").mkdir()
        shard(tmp_path / f"part{number}" / "s.tar", ("a.png", png(number)))
    source = open_source(str(tmp_path / "part{0..1}" / "s.tar"))
    assert source.index.names == ("part0/s.tar/a.png", "part1/s.tar/a.png")


def test_which_folders_are_shards(tmp_path: Path) -> None:
    three(tmp_path / "d")
    assert is_shards(str(tmp_path / "d"))
    (tmp_path / "d" / "index.json").write_text("{}")
    (tmp_path / "d" / ".tmp-1-s.tar").write_text("half")
    assert len(open_source(tmp_path / "d").index) == 3
    (tmp_path / "d" / "a.png").write_bytes(png(1))
    assert open_source(tmp_path / "d").index.names == ("a.png",)
    assert not is_shards(str(tmp_path))
    assert not is_shards(str(tmp_path / "nowhere"))


def test_links_in_a_folder_of_shards(tmp_path: Path) -> None:
    three(tmp_path / "d")
    (tmp_path / "d" / "again.tar").symlink_to("s-08.tar")
    outside = shard(tmp_path / "outside.tar", ("o.png", png(0)))
    (tmp_path / "d" / "out.tar").symlink_to(outside)
    source = open_source(tmp_path / "d")
    assert len(source.index) == 3
    assert (source.report.links_inside, source.report.links_outside) == (1, 1)
    assert len(open_source(tmp_path / "d", follow_outside=True).index) == 4
    os.mkfifo(tmp_path / "fifo.tar")
    with pytest.raises(DataError, match="not a regular file"):
        open_source(tmp_path / "fifo.tar")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 300), st.integers(0, 30), st.integers(1, 4), st.integers(0, 3))
def test_braces(low: int, more: int, width: int, second: int) -> None:
    first = f"{low:0{width}d}"
    pattern = f"a-{{{first}..{low + more}}}-{{0..{second}}}.tar"
    padded = len(first) if first[0] == "0" else 0
    told = [
        f"a-{one:0{padded}d}-{two}.tar" for one, two in itertools.product(range(low, low + more + 1), range(second + 1))
    ]
    assert expand_braces(pattern) == told


@pytest.mark.parametrize(
    "pattern", ["a-{3..2}.tar", "a-{0..99999999}.tar", "{0..9999}{0..9999}", "{0..9" + "9" * 5000 + "}"]
)
def test_braces_that_make_no_sense(pattern: str) -> None:
    with pytest.raises(UsageError, match="shards; 1 to"):
        expand_braces(pattern)


@pytest.mark.parametrize(
    "spec",
    [
        "pipe:cat a.tar",
        "pipe:touch {marker}; cat a.tar",
        "simplecache::https://x/a.tar",
        "reference://a.tar",
        "x://a.tar",
    ],
)
def test_only_storage_addresses_are_read(spec: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(UsageError, match=r"would run a command|can't be read through"):
        open_source(spec.replace("{marker}", str(marker)))
    assert not marker.exists()


def test_missing_protocols_and_web_folders(tmp_path: Path) -> None:
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(MissingDependencyError, match="pip install s3fs"):
            open_source("s3://bucket/a.tar")
    if importlib.util.find_spec("aiohttp") is None:
        with pytest.raises(MissingDependencyError, match="pip install aiohttp"):
            open_source("https://localhost/a.tar")
    else:
        with pytest.raises(UsageError, match="no folders to list"):
            open_source("https://localhost/folder")


def test_an_address_is_never_shown_whole(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^a\.tar can't be reached") as caught:
        open_source(f"file:///secret-{tmp_path.name}/a.tar?token=abc")
    assert "secret" not in str(caught.value)
    assert "token" not in str(caught.value)


# -------------------------------------------------------------------------------------------------------- reading


def test_reading_is_safe_from_threads_and_notices_changes(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar", *((f"{n:03d}.png", png(n)) for n in range(40)))
    source = open_source(path)
    wrong: list[int] = []

    def work(start: int) -> None:
        assert source.read_bytes is not None
        wrong.extend(row for row in range(start, 40, 2) if source.read_bytes(row) != png(row))

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for row in range(40):
        source.read(row)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    with path.open("ab") as stream:
        stream.write(bytes(512))
    with pytest.raises(UnreadableImageError, match=r"s\.tar was changed since it was listed"):
        source.read(0)


def test_a_picture_above_the_limit_is_not_read(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar", ("a.png", png(0)))
    with pytest.raises(UnreadableImageError, match="more than the limit of 10"):
        open_source(path, limits=DecodeLimits(max_bytes=10)).read(0)
    _, read_bytes, _ = open_shards(str(path), Columns(), max_bytes=10)
    with pytest.raises(UnreadableImageError, match="more than the limit of 10"):
        read_bytes(0)


@pytest.mark.slow
def test_many_samples_in_little_time(tmp_path: Path) -> None:
    import time

    path = tmp_path / "s.tar"
    with path.open("wb") as stream:
        for number in range(50_000):
            info = tarfile.TarInfo(f"{number:08d}.jpg")
            info.size = 5
            stream.write(info.tobuf(tarfile.USTAR_FORMAT) + b"bytes" + bytes(507))
        stream.write(bytes(1024))
    start = time.perf_counter()
    assert len(open_source(path).index) == 50_000
    assert time.perf_counter() - start < 10  # about 1 s on one core
