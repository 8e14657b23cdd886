"""Embedding of whole data sets: the vectors' bits, neighbours, map, shards, interruptions, what can't be read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

import mocokit
from mocokit import files
from mocokit.cli import main
from mocokit.data.pixels import build_pixel_store, side_for
from mocokit.data.randomness import sample_id
from mocokit.data.sources import open_source
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.features import extract
from mocokit.retrieval import embedding, encode
from mocokit.retrieval.layout import read_vectors, vectors_of
from mocokit.retrieval.projection import pca
from mocokit.training.run import Run
from tests.toy import OPTIONS, contents, flip_bit, labelled_npz, npz, pictures


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    data = npz(folder / "toy.npz", count=16)
    return mocokit.pretrain(str(data), folder / "run", quiet=True, **(OPTIONS | {"epochs": 1}))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return labelled_npz(tmp_path / "labelled.npz", count=50)


def embed(run: Run, data: Path, out: Path, **options: Any) -> embedding.Embedded:
    done = mocokit.embed(run, data, out, quiet=True, **options)
    assert done is not None
    return done


def folder_of(path: Path, count: int = 12, bad: tuple[int, ...] = ()) -> Path:
    path.mkdir()
    for number, picture in enumerate(pictures(count, side=40)):
        if number in bad:
            (path / f"{number:02d}.png").write_bytes(b"\x89PNG broken")
        else:
            Image.fromarray(picture).save(path / f"{number:02d}.png")
    return path


@pytest.mark.parametrize("readout", ["h", "z", "key-h"])
def test_vectors_are_the_evaluations_features_to_the_last_bit(
    readout: str, run: Run, data: Path, tmp_path: Path
) -> None:
    done = embed(run, data, tmp_path / "e.parquet", readout=readout)
    ids, vectors = read_vectors(done.path)
    source = open_source(data)
    store = build_pixel_store(source, side=side_for(source, run.config.views.size))
    views = run.config.views
    encoder = run.encoder("key" if readout.startswith("key") else "query")
    found = extract(encoder, store, np.arange(50), size=views.size, mean=views.mean, std=views.std)
    expected = found.h if readout.endswith("h") else found.z
    assert np.array_equal(vectors, expected.numpy())
    assert np.array_equal(ids, source.index.ids)


def test_every_column_of_the_file(run: Run, data: Path, tmp_path: Path) -> None:
    done = embed(run, data, tmp_path / "e.parquet", thumbnail=16, neighbours=5)
    table = pq.read_table(done.path)
    rows = table.to_pylist()
    vectors = vectors_of(table)
    assert {row["label"] for row in rows} == {"0", "1"}
    assert {row["split"] for row in rows} == {"train", "val", "test"}
    assert rows[3]["path"] == open_source(data).index.names[3]
    assert Image.open(io.BytesIO(rows[0]["thumbnail"])).size == (16, 16)
    oracle = NearestNeighbors(n_neighbors=6, metric="cosine", algorithm="brute").fit(vectors.astype(np.float64))
    distances, positions = oracle.kneighbors(vectors.astype(np.float64))
    for number, row in enumerate(rows):
        assert row["neighbors"]["ids"] == [p for p in positions[number].tolist() if p != number][:5]
        np.testing.assert_allclose(row["neighbors"]["distances"], distances[number][1:], atol=1e-5)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    places = PCA(2).fit_transform(unit.astype(np.float64))
    for axis, name in enumerate(("projection_x", "projection_y")):
        column = np.array([row[name] for row in rows])
        same = min(np.abs(column - places[:, axis]).max(), np.abs(column + places[:, axis]).max())
        assert same < 1e-5
    manifest = files.read_json(tmp_path / "e.parquet.json")
    assert manifest["sha256"] == files.sha256_file(done.path) == done.sha256
    assert manifest["columns"] == table.column_names
    assert contents(tmp_path).keys() == {"e.parquet", "e.parquet.json", "labelled.npz"}


def test_shards_and_interruptions_end_in_the_same_bytes(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "CHUNK_ROWS", 8)  # seven parts
    whole = embed(run, data, tmp_path / "whole.parquet", thumbnail=16)
    out = tmp_path / "shared.parquet"
    assert mocokit.embed(run, data, out, thumbnail=16, shard="2/3", quiet=True) is None
    with pytest.raises(UsageError, match=r"another embedding \(different: readout"):
        embed(run, data, out, thumbnail=16, readout="z")
    assert mocokit.embed(run, data, out, thumbnail=16, shard="1/3", quiet=True) is None
    parts = sorted(p.name for p in (tmp_path / "shared.parquet.parts").glob("part-*"))
    assert parts == [f"part-{n:05d}" for n in (0, 1, 3, 4, 6)]
    flip_bit(tmp_path / "shared.parquet.parts" / "part-00003" / "rows.parquet", 999)
    done = embed(run, data, out, thumbnail=16)
    assert done.kept == 4  # the damaged one and the third share's were computed
    assert done.sha256 == whole.sha256
    again = embed(run, data, out, thumbnail=16)
    assert again.sha256 == whole.sha256
    assert not (tmp_path / "shared.parquet.parts").exists()


def test_something_else_in_the_way_is_left_alone(run: Run, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.parquet"
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="--overwrite"):
        embed(run, data, out)
    assert out.read_bytes() == b"mine"
    embed(run, data, out, overwrite=True)
    flip_bit(out, 5000)
    with pytest.raises(UsageError, match="not this embedding"):
        embed(run, data, out)
    for bad, says in (("1/0", "--shard"), ("3/2", "--shard"), ("a/b", "--shard"), ("0/2", "--shard")):
        with pytest.raises(UsageError, match=says):
            embed(run, data, tmp_path / "x.parquet", shard=bad)
    for options in ({"thumbnail": -1}, {"neighbours": 999}, {"max_bad": 2.0}, {"map": "pcb"}, {"readout": "q"}):
        with pytest.raises(UsageError):
            embed(run, data, tmp_path / "x.parquet", **options)
    with pytest.raises(UsageError, match="parquet"):
        embed(run, data, tmp_path / "x.csv")


def test_unreadable_pictures_are_named_and_left_out(run: Run, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "pictures", bad=(3,))
    with pytest.raises(DataError, match=r"1 of 12 pictures .* '03.png' .*--max-bad"):
        embed(run, folder, tmp_path / "e.parquet")
    done = embed(run, folder, tmp_path / "e.parquet", max_bad=0.1)
    assert (done.rows, done.skipped) == (11, 1)
    ids, _ = read_vectors(done.path)
    assert sample_id("03.png") not in ids
    assert files.read_json(tmp_path / "e.parquet.json")["skipped"][0]["name"] == "03.png"


def test_names_that_are_no_text_round_trip_by_id(run: Run, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "pictures", count=3)
    odd = b"odd \xff\n<script>.png"
    (folder / "00.png").rename(Path(str(folder)) / odd.decode("utf-8", "surrogateescape"))
    done = embed(run, folder, tmp_path / "e.parquet")
    rows = {row["id"]: row["path"] for row in pq.read_table(done.path, columns=["id", "path"]).to_pylist()}
    name = odd.decode("utf-8", "surrogateescape")
    assert rows[sample_id(name)] == "odd \\xff\n<script>.png"


def test_large_thumbnails_come_from_the_picture_and_carry_no_metadata(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    exif = Image.Exif()
    exif[0x010E] = "secret"
    for number, picture in enumerate(pictures(2, side=120)):
        Image.fromarray(picture).save(folder / f"{number}.jpg", exif=exif)
    done = embed(run, folder, tmp_path / "e.parquet", thumbnail=64)
    for data in pq.read_table(done.path)["thumbnail"].to_pylist():
        image = Image.open(io.BytesIO(data))
        assert image.size == (64, 64)
        assert b"secret" not in data


@pytest.mark.slow
def test_a_tsne_map_is_the_same_twice(run: Run, data: Path, tmp_path: Path) -> None:
    first = embed(run, data, tmp_path / "a.parquet", map="tsne")
    second = embed(run, data, tmp_path / "b.parquet", map="tsne")
    assert first.sha256 == second.sha256
    assert "projection_x" in pq.read_table(first.path).column_names
    plain = embed(run, data, tmp_path / "c.parquet", map="none", neighbours=0)
    assert pq.read_table(plain.path).column_names[-1] == "vector"


def test_pca_of_few_vectors() -> None:
    one = np.ones((1, 4), np.float32)
    assert np.array_equal(pca(one), np.zeros((1, 2)))
    line = np.arange(6, dtype=np.float32)[:, None] * np.array([[1.0, 0, 0]], np.float32)
    assert np.allclose(np.abs(pca(line)[:, 0]), np.abs(np.arange(6) - 2.5))


def test_foreign_vectors_are_read_or_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    lists = pa.table({"id": [1, 2], "vector": [[1.0, 2.0], [3.0, 4.0]]})
    pq.write_table(lists, tmp_path / "lists.parquet")
    ids, vectors = read_vectors(tmp_path / "lists.parquet")
    assert vectors.tolist() == [[1, 2], [3, 4]]
    assert ids.tolist() == [1, 2]
    bad = {
        "ragged": {"id": [1, 2], "vector": [[1.0, 2.0], [3.0]]},
        "nan": {"id": [1], "vector": [[float("nan")]]},
        "null": {"id": [1, None], "vector": [[1.0], [2.0]]},
        "columns": {"id": [1]},
        "text": {"id": ["a"], "vector": [[1.0]]},
    }
    for name, columns in bad.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        with pytest.raises(DataError, match=name):
            read_vectors(tmp_path / f"{name}.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "lists.parquet").read_bytes()[:-10])
    with pytest.raises(DataError, match="cut"):
        read_vectors(tmp_path / "cut.parquet")


def test_the_command(run: Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["embed", str(run.path), str(data), "--out", str(tmp_path / "e.parquet"), "-q"]
    assert main([*words, "--shard", "1/2"]) == 0
    assert "share 1/2" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 50
