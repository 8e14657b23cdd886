"""`search` from a run to answers: build, add, query, eval, the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mocokit
from mocokit import api, files
from mocokit.cli import main
from mocokit.data.randomness import sample_id
from mocokit.data.sources import open_source
from mocokit.errors import DataError, UsageError
from mocokit.retrieval.index import open_index
from mocokit.training.run import Run
from mocokit.training.runfolder import foreign_files
from tests.toy import OPTIONS, labelled_npz, npz, pictures

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    data = npz(folder / "toy.npz", count=16)
    return mocokit.pretrain(str(data), folder / "run", quiet=True, **(OPTIONS | {"epochs": 1}))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve labelled pictures in a folder, one of them twice."""
    folder = tmp_path_factory.mktemp("photos")
    for number, picture in enumerate(pictures(12, side=24)):
        place = folder / ("red" if number % 2 else "blue")
        place.mkdir(exist_ok=True)
        tinted = picture // 3
        tinted[:, :, 0 if number % 2 else 2] += 150
        Image.fromarray(tinted).save(place / f"{number:02d}.png")
    shutil.copy(folder / "red" / "03.png", folder / "red" / "copy.png")
    return folder


@pytest.fixture
def index(run: Run, photos: Path, tmp_path: Path) -> Path:
    mocokit.search_build(run, photos, tmp_path / "index", quiet=True)
    return tmp_path / "index"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def words(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return words


def test_a_stored_picture_finds_itself_and_its_copy(index: Path, photos: Path) -> None:
    answer = mocokit.search_query(index, [photos / "red" / "03.png"], k=3)[0]
    assert {hit.name for hit in answer.hits[:2]} == {"red/03.png", "red/copy.png"}
    assert answer.hits[0].score == pytest.approx(1, abs=1e-5)
    assert answer.hits[1].score == pytest.approx(1, abs=1e-5)
    own = mocokit.search_query(index, ids=[sample_id("red/03.png")], k=3)[0]
    assert own.hits[0].name == "red/copy.png"
    assert "red/03.png" not in {hit.name for hit in own.hits}


def test_questions_by_several_files_a_folder_and_arrays(index: Path, photos: Path) -> None:
    each = mocokit.search_query(index, [photos / "red"], k=1)
    assert len(each) == 7
    assert all(one.hits[0].score > 0.9999 for one in each)
    pixels = np.asarray(Image.open(photos / "blue" / "00.png"))
    one, two = mocokit.search_query(index, [pixels, photos / "blue" / "00.png"], k=5)
    assert [hit.id for hit in one.hits] == [hit.id for hit in two.hits]
    opened = open_index(index)
    together = mocokit.search_query(opened, ids=[sample_id("red/01.png"), sample_id("red/05.png")], together=True, k=50)
    assert len(together[0].hits) == 11
    rows = [opened.rows.row_of(sample_id(f"red/0{n}.png")) or 0 for n in (1, 5)]
    mean = opened.neighbours.vectors(np.array(rows)).mean(axis=0)
    mean /= np.linalg.norm(mean)
    best = opened.rows.row_of(together[0].hits[0].id) or 0
    scores = opened.neighbours.vectors() @ mean
    scores[rows] = -2
    assert best == int(scores.argmax())
    blue = mocokit.search_query(index, [pixels], labels=["red"], k=20)[0]
    assert {hit.label for hit in blue.hits} == {"red"}
    with pytest.raises(UsageError, match="Ask with pictures"):
        mocokit.search_query(index)
    with pytest.raises(DataError, match=r"no.png can't be used as a question"):
        mocokit.search_query(index, [photos / "no.png"])
    with pytest.raises(UsageError, match="no image with id 5"):
        mocokit.search_query(index, ids=[5])


def test_only_new_pictures_are_encoded_and_all_end_as_if_built_at_once(
    run: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    shutil.copytree(photos / "blue", part / "blue")
    mocokit.search_build(run, part, tmp_path / "index", quiet=True)
    done = mocokit.search_add(tmp_path / "index", photos, quiet=True)
    assert (done.added, done.already) == (7, 6)
    again = mocokit.search_add(tmp_path / "index", photos, quiet=True)
    assert (again.added, again.already, again.index.generation) == (0, 13, done.index.generation)
    whole = mocokit.search_build(run, photos, tmp_path / "whole", quiet=True).index
    mine = open_index(tmp_path / "index")
    by_id = {int(i): v for i, v in zip(mine.rows.ids, mine.neighbours.vectors(), strict=True)}
    for sample, vector in zip(whole.rows.ids, whole.neighbours.vectors(), strict=True):
        assert np.array_equal(by_id[int(sample)], vector)
    Image.fromarray(pictures(1, side=24, seed=9)[0]).save(part / "blue" / "00.png")
    replaced = mocokit.search_add(tmp_path / "index", part, again=True, quiet=True)
    assert (replaced.added, len(replaced.index)) == (6, 13)
    answer = mocokit.search_query(tmp_path / "index", [part / "blue" / "00.png"], k=1)[0]
    assert (answer.hits[0].name, round(answer.hits[0].score, 4)) == ("blue/00.png", 1.0)


def test_near_duplicates(index: Path) -> None:
    clusters = mocokit.search_duplicates(index, threshold=1.0)
    assert [{hit.name for hit in cluster} for cluster in clusters] == [{"red/03.png", "red/copy.png"}]


def test_an_index_in_its_run_folder_belongs_to_the_run(run: Run, photos: Path, tmp_path: Path) -> None:
    mine = tmp_path / "run"
    shutil.copytree(run.path, mine)
    mocokit.search_build(mine, photos, quiet=True)
    assert foreign_files(mine) == []
    moved = tmp_path / "moved"
    mine.rename(moved)  # the index names its run by where it lies from the index
    assert mocokit.search_query(moved, [photos / "red" / "01.png"], k=1)[0].hits[0].name == "red/01.png"
    data = npz(tmp_path / "toy.npz", count=16)
    mocokit.pretrain(str(data), moved, overwrite=True, quiet=True, **(OPTIONS | {"epochs": 1}))
    assert not (moved / "search" / "CURRENT").exists()


def test_an_encoder_that_is_gone_is_named(run: Run, photos: Path, tmp_path: Path) -> None:
    mine = tmp_path / "run"
    shutil.copytree(run.path, mine)
    mocokit.search_build(mine, photos, tmp_path / "index", quiet=True)
    step = next((mine / "checkpoints").glob("step-*"))
    stored = sample_id("red/01.png")
    shutil.rmtree(step)
    with pytest.raises(UsageError, match="no longer there"):
        mocokit.search_query(tmp_path / "index", [photos / "red" / "01.png"])
    assert mocokit.search_query(tmp_path / "index", ids=[stored], k=2)[0].hits  # stored ids need no encoder


def test_scores_of_an_encoder_that_sees_the_label(run: Run, tmp_path: Path) -> None:
    """Brightness tells the class: everything beats chance, and the scores are those of features ranked by hand."""
    data = labelled_npz(tmp_path / "labelled.npz", count=120)
    result = mocokit.search_eval(run, data, k=[1, 3], quiet=True)
    assert set(result.scores) == {"h", "pixels", "random init", "random init (flattened)"}
    assert list(result.scores["h"]) == ["recall@1", "recall@3", "mAP", "R-precision"]
    assert result.queries == result.gallery == 40
    source = open_source(data)
    frozen = mocokit.load(run)
    rows = source.index.rows_of("test")
    x = torch.stack([frozen.transform(source.read(row)) for row in rows.tolist()])
    h = torch.nn.functional.normalize(frozen(x), dim=1)
    cosines = h @ h.T
    cosines.fill_diagonal_(-2)
    labels = source.index.labels[rows]
    right = labels[cosines.argmax(dim=1).numpy()] == labels
    assert result.scores["h"]["recall@1"].mean == pytest.approx(right.mean())
    stored = files.read_json(run.path / "eval" / "search.json")
    assert stored["search"]["h"]["mAP"]["score"] == pytest.approx(result.scores["h"]["mAP"].mean)
    assert "search evaluation" in (run.path / "eval" / "ledger.jsonl").read_text()
    assert foreign_files(run.path) == []


def test_named_baselines_are_vectors_by_id_or_another_run(run: Run, tmp_path: Path) -> None:
    data = labelled_npz(tmp_path / "labelled.npz", count=60)
    mocokit.embed(run, data, tmp_path / "same.parquet", quiet=True)
    against = [f"same={tmp_path}/same.parquet", f"itself={run.path}"]
    result = mocokit.search_eval(run, data, against=against, quiet=True)
    for name in ("same", "itself"):
        assert result.scores[name]["mAP"].mean == pytest.approx(result.scores["h"]["mAP"].mean)
    assert result.verdict.verdict == "NO CLEAR DIFFERENCE" or result.verdict.delta <= 0
    smaller = labelled_npz(tmp_path / "smaller.npz", count=12)
    mocokit.embed(run, smaller, tmp_path / "smaller.parquet", quiet=True)
    for bad, kind, says in (
        ([f"some={tmp_path}/smaller.parquet"], DataError, "lacks vectors"),
        (["nothing"], UsageError, "NAME=FILE"),
        ([f"pixels={tmp_path}/same.parquet"], UsageError, "always there"),
        ([f"a={run.path}", f"a={run.path}"], UsageError, "same name"),
    ):
        with pytest.raises(kind, match=says):
            mocokit.search_eval(run, data, against=bad, quiet=True)


def test_several_runs_are_crossed_with_the_images(run: Run, tmp_path: Path) -> None:
    data = labelled_npz(tmp_path / "labelled.npz", count=60)
    other = mocokit.pretrain(
        str(npz(tmp_path / "toy.npz", count=16)), tmp_path / "other", quiet=True, seed=1, **(OPTIONS | {"epochs": 1})
    )
    result = mocokit.search_eval([run, other], data, quiet=True)
    assert result.verdict.seeds == 2
    assert not result.verdict.this_run_only
    assert "2 seeds" in api.search_table(result)


def test_the_commands(run: Run, photos: Path, tmp_path: Path, call: Call) -> None:
    where = tmp_path / "i"
    code, out, err = call("search", "build", run.path, photos, "--out", where)
    assert code == 0
    assert "13 images" in out
    assert "compared exactly" in err
    code, out, _ = call("search", "query", where, photos / "red" / "01.png", "--k", 2)
    assert code == 0
    assert out.splitlines()[1].split()[2:] == ["red/01.png", "[red]"]
    code, out, _ = call("search", "query", where, photos / "red" / "01.png", "--json", "--labels", "red", "blue")
    assert json.loads(out)[0]["hits"][0]["id"] == str(sample_id("red/01.png"))
    code, out, _ = call("search", "query", where, "--ids", sample_id("red/01.png"))
    assert code == 0
    code, out, _ = call("search", "duplicates", where, "--threshold", "1")
    assert out.splitlines()[-1] == "1 clusters, 2 images."
    code, out, _ = call("search", "remove", where, "--names", "blue/*", "--json")
    assert json.loads(out)["removed"] == 6
    code, out, _ = call("search", "add", where, photos, "-q")
    assert "6 images added, 7 were there" in out
    for words, code, says in (
        (("search", "query", where, photos / "red" / "01.png", "--labels", "rad"), 2, "Did you mean 'red'"),
        (("search", "query", tmp_path / "no", photos), 2, "does not exist"),
        (("search", "remove", where), 2, "--ids, --names or --labels"),
        (("search", "remove", where, "--names", "zzz*"), 2, "Nothing was removed"),
        (("search", "build", run.path, photos, "--out", where), 2, "already holds an index"),
        (("search", "eval", run.path, "--labelled", photos, "--readout", "q"), 2, "readout"),
    ):
        got, out, err = call(*words)
        assert (got, out) == (code, ""), err
        assert says in err
        assert "Traceback" not in err


def test_the_table_of_the_command(run: Run, tmp_path: Path, call: Call) -> None:
    data = labelled_npz(tmp_path / "labelled.npz", count=60)
    code, out, _ = call("search", "eval", run.path, "--labelled", data, "-q", "--k", 1, 2)
    assert code == 0
    assert "recall@2, %" in out
    assert out.splitlines()[-1].startswith("VERDICT: ")
    code, out, _ = call("search", "eval", run.path, "--labelled", data, "-q", "--json")
    assert json.loads(out)["metric"] == "mAP"
