"""A fine-tuned model is used as a run is: load, export, embed, search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import mocokit
from mocokit import files
from mocokit.errors import UsageError
from mocokit.evaluation.tuned_folder import load_tuned
from mocokit.evaluation.tuning import TuneSettings
from mocokit.exporting import standalone
from mocokit.retrieval.layout import read_vectors
from tests.toy import OPTIONS, labelled_npz, npz


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in `run`, fine-tuned in `tuned` on labelled.npz."""
    folder = tmp_path_factory.mktemp("place")
    mocokit.pretrain(str(npz(folder / "toy.npz", count=16)), folder / "run", quiet=True, **(OPTIONS | {"epochs": 1}))
    data = labelled_npz(folder / "labelled.npz", count=60)
    mocokit.finetune(
        folder / "run",
        data,
        folder / "tuned",
        labels_per_class="4",
        draws=1,
        settings=TuneSettings(steps=8),
        quiet=True,
    )
    return folder


def test_load_gives_the_fine_tuned_backbone(place: Path) -> None:
    frozen = mocokit.load(place / "tuned")
    x = torch.stack([frozen.transform(mocokit.open_source(place / "labelled.npz").read(row)) for row in range(6)])
    expected = load_tuned(place / "tuned").model.backbone(x)
    assert torch.equal(frozen(x), expected)
    assert not torch.equal(frozen(x), mocokit.load(place / "run")(x))
    for readout in ("z", "key-h"):
        with pytest.raises(UsageError, match="was fine-tuned"):
            mocokit.load(place / "tuned", readout=readout)


def test_its_export_is_that_backbone(place: Path, tmp_path: Path) -> None:
    done = mocokit.export(place / "tuned", "safetensors", tmp_path / "out", quiet=True)
    assert done.parity.source == "shapes"
    encoder, _ = standalone.load(done.path)
    frozen = mocokit.load(place / "tuned")
    x = torch.randn(4, 3, frozen.views.size, frozen.views.size, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(encoder(x), frozen(x), atol=1e-5)
    card = (done.path / "README.md").read_text()
    assert "fine-tuned on `labelled.npz`" in card
    assert str(place) not in card
    with pytest.raises(UsageError, match="projection head"):
        mocokit.export(place / "tuned", "safetensors", tmp_path / "head", head=True, quiet=True)


def test_its_vectors_are_embedded_and_searched(place: Path, tmp_path: Path) -> None:
    done = mocokit.embed(place / "tuned", place / "labelled.npz", tmp_path / "e.parquet", quiet=True)
    assert done is not None
    _, vectors = read_vectors(done.path)
    index = mocokit.search_build(place / "tuned", place / "labelled.npz", tmp_path / "index", quiet=True).index
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(index.neighbours.vectors(), unit, atol=1e-6)
    picture = mocokit.open_source(place / "labelled.npz").read(7)
    hits = mocokit.search_query(tmp_path / "index", [picture], k=1)[0].hits
    assert hits[0].score == pytest.approx(1, abs=1e-5)
    result = mocokit.search_eval(place / "run", place / "labelled.npz", against=[f"tuned={place}/tuned"], quiet=True)
    assert "tuned" in result.scores
    model = place / "tuned" / "model"
    kept = model.rename(place / "tuned" / "away")
    with pytest.raises(UsageError, match="no longer there"):
        mocokit.search_query(tmp_path / "index", [picture])
    kept.rename(model)
    files.verify_folder(model)
