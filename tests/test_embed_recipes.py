"""The recipes that hand vectors to other tools: Ray Data and LightlyStudio (when installed), FiftyOne's rows."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mocokit
from mocokit.retrieval.layout import read_vectors
from tests.toy import OPTIONS, npz, pictures

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and nine pictures of which one is broken."""
    folder = tmp_path_factory.mktemp("place")
    mocokit.pretrain(str(npz(folder / "toy.npz", count=16)), folder / "run", quiet=True, **(OPTIONS | {"epochs": 1}))
    for number, picture in enumerate(pictures(9, side=24)):
        (folder / "photos" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / "photos" / "ab"[number % 2] / f"{number}.png")
    (folder / "photos" / "a" / "8.png").write_bytes(b"broken")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'ray[data]'")
def test_ray_gives_the_vectors_of_embed(place: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    words = [sys.executable, str(ROOT / "examples" / "embed_ray.py"), str(place / "run"), str(place / "photos")]
    done = subprocess.run(
        [*words, "--out", str(tmp_path / "out"), "--workers", "1"],
        env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    table = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))])
    rows = {row["id"]: row for row in table.to_pylist()}
    embedded = mocokit.embed(place / "run", place / "photos", tmp_path / "e.parquet", max_bad=0.2, quiet=True)
    assert embedded is not None
    ids, vectors = read_vectors(embedded.path)
    assert len(rows) == 9
    for sample, vector in zip(ids.tolist(), vectors, strict=True):
        np.testing.assert_allclose(rows[sample]["vector"], vector, rtol=1e-5, atol=1e-6)
        assert rows[sample]["reason"] == ""
    assert [row["path"] for row in rows.values() if row["reason"]] == ["a/8.png"]


def recipe_named(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe


def test_fiftyone_gets_files_labels_and_the_map(place: Path, tmp_path: Path) -> None:
    recipe = recipe_named("open_in_fiftyone")
    embedded = mocokit.embed(place / "run", place / "photos", tmp_path / "e.parquet", max_bad=0.2, quiet=True)
    assert embedded is not None
    found = recipe.samples(embedded.path, place / "photos")
    assert len(found) == 8
    for one in found:
        assert Path(one["filepath"]).is_file()
        assert one["label"] == Path(one["filepath"]).parent.name
        assert len(one["vector"]) == embedded.dim
        assert len(one["place"]) == 2


def test_lightly_studio_gets_a_vector_for_each_picture_that_has_one(place: Path, tmp_path: Path) -> None:
    recipe = recipe_named("open_in_lightly_studio")
    embedded = mocokit.embed(place / "run", place / "photos", tmp_path / "e.parquet", max_bad=0.2, quiet=True)
    assert embedded is not None
    stored = recipe.vectors_by_path(embedded.path, place / "photos")
    ids, vectors = read_vectors(embedded.path)
    assert len(stored) == len(ids) == 8
    assert all(Path(path).is_file() for path in stored)
    np.testing.assert_array_equal(np.array(list(stored.values()), np.float32), vectors)


STUDIO = os.environ.get(
    "LIGHTLY_STUDIO_PYTHON"
)  # it asks for older packages than mocokit, so it has its own environment


@pytest.mark.slow
@pytest.mark.skipif(STUDIO is None, reason="LIGHTLY_STUDIO_PYTHON names no python that has lightly-studio")
def test_lightly_studio_makes_the_dataset(place: Path, tmp_path: Path) -> None:
    embedded = mocokit.embed(place / "run", place / "photos", tmp_path / "e.parquet", max_bad=0.2, quiet=True)
    assert embedded is not None
    words = [str(STUDIO), str(ROOT / "examples" / "open_in_lightly_studio.py"), str(embedded.path)]
    done = subprocess.run(
        [*words, str(place / "photos"), "--no-app"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 pictures" in done.stdout
