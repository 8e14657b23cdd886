"""`mocokit check`: planted copies are found, look-alikes are not, and what is on an exclude list takes no part."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

import mocokit
from mocokit.api.checking import check
from mocokit.cli import main
from mocokit.data.exclusion import read_exclude, write_exclude
from mocokit.data.fingerprints import perceptual_hash, thumbnail
from mocokit.data.pixels import build_pixel_store
from mocokit.data.randomness import sample_id
from mocokit.data.sources import from_array, open_source
from mocokit.data.twin_search import HAMMING, families, propose, twins_across
from mocokit.data.twins import compare
from mocokit.errors import DataError, UsageError
from tests.toy import flags, labelled_npz, npz

UInt8 = NDArray[np.uint8]


def scene(seed: int, side: int = 96, tint: tuple[float, float, float] | None = None) -> UInt8:
    """A picture with structure at all scales, as photographs have: smooth noise of three sizes, in colour."""
    rng = np.random.default_rng(seed)
    out = np.zeros((side, side, 3), np.float32)
    for cells, weight in ((3, 60), (8, 40), (24, 22)):
        grid = rng.normal(0, 1, (cells, cells, 3)).astype(np.float32)
        layer = np.stack(
            [
                np.asarray(Image.fromarray(grid[..., c]).resize((side, side), Image.Resampling.BICUBIC))
                for c in range(3)
            ],
            axis=2,
        )
        grey = layer.mean(2, keepdims=True)
        out += weight * (0.7 * grey + 0.5 * layer)
    middle = np.array(tint or (125, 115, 105), np.float32)
    return np.clip(out * 0.8 + middle, 0, 255).astype(np.uint8)


def framed(seed: int, side: int = 96) -> UInt8:
    """A disc of texture in a black frame: all such pictures share most of their energy."""
    y, x = np.mgrid[:side, :side] - side / 2
    inside = (x**2 + y**2 < (0.42 * side) ** 2)[..., None]
    texture = 0.25 * (scene(seed, side).astype(np.float32) - 115) + np.array([150, 90, 50], np.float32)
    return np.where(inside, texture, 4).clip(0, 255).astype(np.uint8)


def jpeg(rgb: UInt8, quality: int) -> UInt8:
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer))


def brighter(rgb: UInt8, gain: float) -> UInt8:
    return np.clip(rgb.astype(np.float32) * gain, 0, 255).astype(np.uint8)


def resized(rgb: UInt8, side: int) -> UInt8:
    return np.asarray(Image.fromarray(rgb).resize((side, side), Image.Resampling.BICUBIC))


COPIES = {
    "half the size": lambda a: resized(a, 48),
    "twice the size": lambda a: resized(a, 192),
    "JPEG quality 40": lambda a: jpeg(a, 40),
    "brighter": lambda a: brighter(a, 1.25),
    "darker": lambda a: brighter(a, 0.7),
    "all of it": lambda a: brighter(jpeg(resized(a, 80), 60), 1.15),
}


def save(path: Path, rgb: UInt8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rgb).save(path)


# ------------------------------------------------------------------------------------------------------ twins


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", [scene, framed])
def test_a_planted_copy_in_another_split_is_found_and_nothing_else(tmp_path: Path, make, copy) -> None:  # type: ignore[no-untyped-def]
    for seed in range(24):
        save(tmp_path / ("train" if seed < 16 else "test") / "thing" / f"{seed:02}.png", make(seed))
    save(tmp_path / "train" / "thing" / "planted.png", copy(make(20)))
    result = check(tmp_path, quiet=True)
    pairs = {
        key: [(result.audit.names[a], result.audit.names[b]) for a, b in v]
        for key, v in result.audit.crossing().items()
    }
    assert pairs == {("train", "test"): [("train/thing/planted.png", "test/thing/20.png")]}
    assert len(result.audit.twin_pairs()) == 1
    assert result.leaks == 1


def test_the_same_shape_in_another_colour_is_another_picture() -> None:
    base = scene(0).astype(np.float32)
    grey = base.mean(2, keepdims=True)
    red = np.clip(grey * [1.15, 0.9, 0.85], 0, 255).astype(np.uint8)
    blue = np.clip(grey * [0.85, 0.9, 1.15], 0, 255).astype(np.uint8)
    alike = compare(*(thumbnail(one, 64)[None] for one in (red, blue)))
    assert alike.structure[0] > 0.95
    assert alike.colour[0] > 10


@given(
    seed=st.integers(0, 1000),
    gain=st.floats(0.6, 1.4),
    shift=st.floats(-15, 15),
    side=st.sampled_from([8, 16, 32, 64]),
)
@settings(max_examples=40, deadline=None)
def test_a_gain_and_an_offset_leave_nothing_and_order_does_not_matter(
    seed: int, gain: float, shift: float, side: int
) -> None:
    small = thumbnail(scene(seed, 64), side).astype(np.float32) * 0.4 + 60  # nothing is clipped
    one = np.rint(small).astype(np.uint8)
    other = np.rint(one.astype(np.float32) * gain + shift).clip(0, 255).astype(np.uint8)
    forward, backward = compare(one[None], other[None]), compare(other[None], one[None])
    assert forward.structure[0] > 0.95
    assert forward.colour[0] < 2
    np.testing.assert_allclose(forward.structure, backward.structure, atol=0.02)
    np.testing.assert_allclose(forward.colour, backward.colour, atol=0.5)


def test_a_pair_is_judged_alone() -> None:
    """Its likeness does not depend on the pairs it is compared with."""
    pictures = np.stack([thumbnail(scene(seed), 64) for seed in range(8)])
    together = compare(pictures[:4], pictures[4:])
    for number in range(4):
        alone = compare(pictures[number : number + 1], pictures[4 + number : 5 + number])
        np.testing.assert_allclose(alone.structure, together.structure[number : number + 1], rtol=1e-4)
        np.testing.assert_allclose(alone.colour, together.colour[number : number + 1], rtol=1e-3)


def test_proposals_are_those_of_a_search_by_hand() -> None:
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 256, (40, 32), dtype=np.uint8)
    hashes[7] = hashes[3]
    hashes[9] = hashes[3]
    hashes[9, 0] ^= 0b111
    hashes[30] = hashes[12]
    bits = np.unpackbits(hashes, axis=1).astype(int)
    distance = np.abs(bits[:, None] - bits[None]).sum(2)
    expected = {(a, b) for a in range(40) for b in range(a + 1, 40) if distance[a, b] <= HAMMING}
    assert expected == {(3, 7), (3, 9), (7, 9), (12, 30)}
    assert set(map(tuple, propose(hashes, np.arange(40)).tolist())) == expected
    across = propose(hashes, np.arange(5), np.arange(5, 40))
    assert set(map(tuple, across.tolist())) == {(3, 7), (3, 9)}
    assert propose(hashes, np.arange(0), np.arange(5)).shape == (0, 2)


def test_the_hash_stays_for_copies_and_differs_for_others() -> None:
    hashes = perceptual_hash(np.stack([thumbnail(scene(seed), 32) for seed in range(20)]))
    copies = perceptual_hash(np.stack([thumbnail(COPIES["all of it"](scene(seed)), 32) for seed in range(20)]))
    bits, copied = np.unpackbits(hashes, axis=1).astype(int), np.unpackbits(copies, axis=1).astype(int)
    assert np.abs(bits - copied).sum(1).max() <= HAMMING
    distance = np.abs(bits[:, None] - bits[None]).sum(2)
    assert distance[~np.eye(20, dtype=bool)].min() > HAMMING


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=20))
def test_families_are_the_connected_components(pairs: list[tuple[int, int]]) -> None:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    found = families(pairs)
    members = sorted({row for pair in pairs for row in pair})
    assert sorted(row for family in found for row in family) == members
    graph = coo_array((np.ones(len(pairs)), tuple(np.array(pairs).reshape(-1, 2).T)), shape=(13, 13))
    component = connected_components(graph, directed=False)[1]
    for family in found:
        assert len({component[row] for row in family}) == 1
    assert len(found) == len({component[row] for row in members})


def test_twins_across_in_a_pixel_store() -> None:
    pictures = np.stack([scene(seed) for seed in range(12)])
    pictures[2] = brighter(jpeg(pictures[9], 60), 1.1)
    store = build_pixel_store(from_array(pictures), side=80)
    assert twins_across(store, np.arange(8, 12), np.arange(8)) == [(9, 2)]
    assert twins_across(store, np.arange(8, 12), np.arange(3, 8)) == []


# ------------------------------------------------------------------------------------------------- the whole audit


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    """A folder with one of everything."""
    folder = tmp_path / "messy"
    for seed in range(12):
        split, label = ("train" if seed < 8 else "test"), ("cat" if seed % 2 else "dog")
        save(folder / split / label / f"{seed:02}.png", scene(seed))
    copy = (folder / "train/dog/00.png").read_bytes()
    (folder / "train/dog/same-bytes.png").write_bytes(copy)
    (folder / "train/cat/other-label.png").write_bytes((folder / "train/dog/02.png").read_bytes())
    Image.fromarray(scene(4)).save(folder / "train/dog/same-pixels.png", compress_level=1, pnginfo=None)
    save(folder / "train/dog/in-test.jpg", jpeg(scene(8), 70))
    save(folder / "train/dog/flat.png", np.full((40, 40, 3), 90, np.uint8))
    (folder / "train/dog/cut.png").write_bytes(copy[: len(copy) // 2])
    (folder / "train/dog/text.jpg").write_text("not a picture at all, but quite readable as a text of some length")
    Image.fromarray(scene(40)).convert("CMYK").save(folder / "train/cat/cmyk.jpg")
    save(folder / "train/cat/long.png", scene(41, 200)[:20])
    return folder


def test_one_of_everything(messy: Path, tmp_path: Path) -> None:
    result = check(messy, html=tmp_path / "c.html", json_file=tmp_path / "c.json", quiet=True)
    facts = json.loads((tmp_path / "c.json").read_text())
    assert facts == result.facts
    assert facts["images"] == 21
    unreadable = {one["name"]: one["reason"] for one in facts["unreadable"]}
    assert set(unreadable) == {"train/dog/cut.png", "train/dog/text.jpg"}
    assert "it looks like text" in unreadable["train/dog/text.jpg"]
    assert [one["name"] for one in facts["constant"]] == ["train/dog/flat.png"]
    same_bytes = [sorted(one["name"] for one in family) for family in facts["same_bytes"]]
    assert sorted(same_bytes) == [
        ["train/cat/other-label.png", "train/dog/02.png"],
        ["train/dog/00.png", "train/dog/same-bytes.png"],
    ]
    same_pixels = {tuple(sorted(one["name"] for one in family)) for family in facts["same_pixels"]}
    assert ("train/dog/04.png", "train/dog/same-pixels.png") in same_pixels
    assert len(same_pixels) == 3
    assert {(one["first"]["name"], one["second"]["name"]) for one in facts["near"]} == {
        ("test/dog/08.png", "train/dog/in-test.jpg")
    }
    assert facts["crossing"] == {"train / test": {"pairs": 1, "images in train": 1, "images in test": 1}}
    assert [len(family) for family in facts["different_labels"]] == [2]
    assert facts["odd"]["CMYK colours"] == ["train/cat/cmyk.jpg"]
    assert facts["odd"]["more than 5 times as long as wide"] == ["train/cat/long.png"]
    assert facts["classes"]["test"] == {"cat": 2, "dog": 2}
    text = result.text()
    for said in ("1 picture(s) of test are also in train", "2 file(s) can't be read", "different labels"):
        assert f"! {line_with(text, said)}" in text
    page = (tmp_path / "c.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/jpeg") >= 8


def line_with(text: str, words: str) -> str:
    return next(line[2:] for line in text.splitlines() if words in line)


def test_names_are_text_on_the_page(tmp_path: Path) -> None:
    for seed, name in enumerate(["a.png", "<img src=x onerror=alert(1)>.png", "b\udcff.png"]):
        (tmp_path / "d").mkdir(exist_ok=True)
        Image.fromarray(scene(0)).save(tmp_path / "made.png", compress_level=seed)
        (tmp_path / "made.png").rename(tmp_path / "d" / name)
    check(tmp_path / "d", html=tmp_path / "page.html", quiet=True)
    page = (tmp_path / "page.html").read_text()
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page


def test_against_a_second_set_and_excluding_from_the_first(tmp_path: Path) -> None:
    for seed in range(10):
        save(tmp_path / ("mine" if seed < 6 else "theirs") / f"{seed}.png", scene(seed))
    save(tmp_path / "mine" / "copy.jpg", resized(scene(7), 64))
    result = check(tmp_path / "mine", tmp_path / "theirs", write_exclude_to=tmp_path / "out.txt", quiet=True)
    assert list(result.audit.crossing()) == [("mine", "theirs")]
    assert result.excluded == 1
    kept = open_source(tmp_path / "mine", exclude=tmp_path / "out.txt")
    assert kept.index.names == tuple(f"{seed}.png" for seed in range(6))
    np.testing.assert_array_equal(kept.read(3), scene(3))
    clean = check(tmp_path / "mine", tmp_path / "theirs", exclude=tmp_path / "out.txt", quiet=True)
    assert clean.leaks == 0


def test_what_is_written_to_exclude_makes_the_data_clean(messy: Path, tmp_path: Path) -> None:
    check(messy, write_exclude_to=tmp_path / "out.txt", quiet=True)
    again = check(messy, exclude=tmp_path / "out.txt", quiet=True)
    assert again.audit.twin_pairs() == []
    assert not again.audit.unreadable
    assert not again.audit.constant
    assert "test/dog/08.png" in again.audit.names  # the training copy went, not the test image
    assert "train/dog/in-test.jpg" not in again.audit.names
    assert not {"train/cat/other-label.png", "train/dog/02.png"} & set(again.audit.names)  # nothing says which is right


def test_groups_in_two_splits_and_a_class_missing_in_one(tmp_path: Path) -> None:
    lines = ["path,label,group,split"]
    for seed in range(8):
        save(tmp_path / f"{seed}.png", scene(seed, 48))
        label = "rare" if seed == 0 else "common"
        lines.append(f"{seed}.png,{label},patient {seed // 3},{'train' if seed < 5 else 'test'}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    result = check(tmp_path / "list.csv", quiet=True)
    assert [[result.audit.names[row] for row in leak] for leak in result.audit.group_leaks()] == [
        ["3.png", "4.png", "5.png"]
    ]
    assert "! 1 group(s) lie in more than one part" in result.text()
    assert "! test has no picture of rare" in result.text()


def test_arrays_and_built_in_sets_can_be_checked_too(tmp_path: Path) -> None:
    images = np.stack([scene(seed, 32) for seed in range(6)] + [scene(2, 32)])
    np.savez(tmp_path / "set.npz", images=images)
    result = check(tmp_path / "set.npz", quiet=True)
    assert result.audit.same_pixels == [[2, 6]]
    assert result.facts["same_bytes"] == []
    assert check("digits", split="test", quiet=True).facts["unreadable"] == []


def test_a_run_proposes_pairs_but_decides_nothing(tmp_path: Path) -> None:
    images = np.stack([scene(seed, 32) for seed in range(24)])
    np.savez(tmp_path / "set.npz", images=images)
    run = mocokit.pretrain(
        tmp_path / "set.npz",
        tmp_path / "run",
        quiet=True,
        epochs=1,
        batch_size=8,
        queue_size=16,
        backbone="small-cnn-8-8",
        dim=8,
        threads=1,
        precision="fp32",
        layout="contiguous",
    )
    result = check(tmp_path / "set.npz", run=run, html=tmp_path / "page.html", quiet=True)
    assert result.audit.twin_pairs() == []
    assert len(result.closest) == 24
    assert [c for _, _, c in result.closest] == sorted((c for _, _, c in result.closest), reverse=True)
    assert "Closest by the run" in (tmp_path / "page.html").read_text()


# --------------------------------------------------------------------------------------------------- exclude lists


@given(
    names=st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.just("\udcff"), min_size=1),
        max_size=8,
        unique=True,
    )
)
@settings(deadline=None)
def test_lists_hold_any_name(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    path = tmp_path_factory.mktemp("list") / "x.txt"
    write_exclude(path, [(name, "some\treason\nin two lines") for name in names])
    assert read_exclude(path).ids.tolist() == sorted({sample_id(name) for name in names})


def test_lists_say_what_is_wrong_with_them(tmp_path: Path) -> None:
    data = npz(tmp_path / "toy.npz", 10)
    with pytest.raises(UsageError, match=r"nowhere\.txt.*Check --exclude"):
        open_source(data, exclude=tmp_path / "nowhere.txt")
    bad = tmp_path / "bad.txt"
    bad.write_text("# comment\n\nid:12x\n")
    with pytest.raises(UsageError, match=r"Line 3 of .*bad\.txt.*'id:12x'"):
        open_source(data, exclude=bad)
    bad.write_text("somebody-elses.png\tcopy\n")
    with pytest.raises(DataError, match=r"None of the 1 samples.*made for others"):
        open_source(data, exclude=bad)
    bad.write_text("".join(f"{name}\n" for name in open_source(data).index.names))
    with pytest.raises(DataError, match="leaves out all 10 samples"):
        open_source(data, exclude=bad)
    bad.write_text("")
    assert len(open_source(data, exclude=bad).index) == 10


def test_a_run_keeps_to_its_list(tmp_path: Path) -> None:
    data = npz(tmp_path / "toy.npz", 50)
    names = open_source(data).index.names
    left_out = tmp_path / "out.txt"
    left_out.write_text("".join(f"{name}\n" for name in names[:6]))
    run = str(tmp_path / "run")
    assert main(["pretrain", str(data), "--out", run, "-q", "--exclude", str(left_out), *flags()]) == 0
    config = mocokit.load_run(Path(run)).config
    assert config.data.images == 44
    assert config.data.exclude == str(left_out)
    assert main(["pretrain", str(data), "--out", run, "-q", "--resume"]) == 0
    left_out.write_text("".join(f"{name}\n" for name in names[:7]))
    assert main(["pretrain", str(data), "--out", run, "-q", "--resume"]) == 3
    assert main(["pack", str(data), "--out", str(tmp_path / "shards"), "-q", "--exclude", str(left_out)]) == 0
    assert len(open_source(tmp_path / "shards").index) == 43


def test_a_run_made_before_lists_existed_still_opens(tmp_path: Path) -> None:
    data = npz(tmp_path / "toy.npz", 50)
    assert main(["pretrain", str(data), "--out", str(tmp_path / "run"), "-q", *flags()]) == 0
    path = tmp_path / "run" / "config.yaml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.strip().startswith("exclude")))
    assert main(["pretrain", str(data), "--out", str(tmp_path / "run"), "-q", "--resume"]) == 0


def test_the_command(messy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(messy), "-q", "--fail-on-leaks", "--html", str(tmp_path / "page.html")]) == 1
    out, err = capsys.readouterr()
    assert "1 picture(s) of test are also in train" in out
    assert str(tmp_path / "page.html") in out
    assert err == ""
    assert main(["check", str(messy), "-q", "--split", "test", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 4
    assert main(["check", str(messy), "-q", "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_search_and_report_take_a_list(tmp_path: Path) -> None:
    data = labelled_npz(tmp_path / "toy.npz", 48)
    run, left_out = str(tmp_path / "run"), str(tmp_path / "out.txt")
    names = open_source(data).index.names
    Path(left_out).write_text("".join(f"{name}\n" for name in names[:6]))
    assert main(["pretrain", str(data), "--out", run, "-q", *flags()]) == 0
    assert main(["search", "build", run, str(data), "-q", "--exclude", left_out]) == 0
    assert len(mocokit.search_query(run, ids=[sample_id(names[9])], k=100)[0].hits) == 41
    with pytest.raises(UsageError, match="no image with id"):
        mocokit.search_query(run, ids=[sample_id(names[3])])
    Path(left_out).write_text("".join(f"{name}\n" for name in names[1:6]))
    assert main(["search", "add", run, str(data), "-q", "--exclude", left_out]) == 0
    assert len(mocokit.search_query(run, ids=[sample_id(names[0])], k=100)[0].hits) == 42

    whole = mocokit.search_eval(run, data, quiet=True)
    part = mocokit.search_eval(run, data, exclude=left_out, quiet=True)
    index = open_source(data).index
    left = set(index.rows_of("test").tolist()) & set(range(1, 6))
    assert whole.verdict.n_test - part.verdict.n_test == len(left) > 0

    assert main(["report", run, "--labelled", str(data), "-q", "--exclude", left_out]) == 0
    with pytest.raises(UsageError, match="no effect without --labelled"):
        mocokit.report(run, exclude=left_out, quiet=True)
