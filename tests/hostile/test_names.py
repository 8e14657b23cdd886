"""Odd and hostile names: they come back as they are from tables, lists and messages, and lead nowhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attacks.names import NAMES, as_text
from PIL import Image

import mocokit
from mocokit.cli import main
from mocokit.data.randomness import sample_id
from mocokit.data.sources import open_source
from mocokit.errors import MocokitError
from mocokit.training.runfolder import foreign_files
from tests.toy import OPTIONS, contents, flags, npz


def picture(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every name once as a picture, and as the name of a class folder's broken picture."""
    root = tmp_path / "photos"
    root.mkdir()
    for number, name in enumerate(NAMES.values()):
        (Path(os.fsdecode(os.fsencode(root) + b"/" + name))).write_bytes(picture(number))
    return root


def test_the_table_has_every_name_as_it_is(folder: Path) -> None:
    index = open_source(str(folder)).index
    assert set(index.names) == {as_text(name) for name in NAMES.values()}
    assert index.ids.tolist() == [sample_id(name) for name in index.names]
    (folder / "another.png").write_bytes(picture(99))
    again = open_source(str(folder)).index
    stay = dict(zip(again.names, again.ids.tolist(), strict=True))
    assert all(stay[name] == i for name, i in zip(index.names, index.ids.tolist(), strict=True))


def test_a_run_over_them_lists_them_and_writes_nothing_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [name for number, name in enumerate(NAMES.values()) if number % 3 == 0]
    for name in broken:
        (Path(os.fsdecode(os.fsencode(folder) + b"/" + name))).write_bytes(b"<html>")
    before = contents(tmp_path)
    out = tmp_path / "run"
    words = ["pretrain", str(folder), "--out", str(out), *flags(epochs=1, image_size=16)]
    assert main([*words, "--max-bad", "0.5"]) == 0
    said = capsys.readouterr()
    assert "\x1b]0;" not in said.err + said.out, "a name must not steer the terminal"
    text = (out / "skipped.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    assert {row["name"] for row in rows} == {as_text(name) for name in broken}
    assert text.isascii()
    after = contents(tmp_path)
    assert {name: data for name, data in after.items() if not name.startswith("run/")} == before
    assert foreign_files(out) == []
    # Too many: the message names them in a form that is safe to show.
    assert main([*words, "--overwrite"]) == 3
    assert "\x1b]0;" not in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_run_folder_of_any_name(tmp_path: Path, name: str) -> None:
    data = npz(tmp_path / "toy.npz")
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + NAMES[name][:200]))
    run = mocokit.pretrain(data, out, quiet=True, **(OPTIONS | {"epochs": 1}))
    assert mocokit.verify(run.path).whole
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["toy.npz", out.name])


LINKS = ["config.yaml", "loss.jsonl", "metrics.jsonl", "status.json", "skipped.jsonl", "results.png", "images.npy"]


@pytest.mark.parametrize("planted", [*LINKS, "checkpoints", "samples", "cache", "failure", ".lock"])
def test_links_planted_in_the_run_folder_lead_no_byte_outside(tmp_path: Path, planted: str) -> None:
    """A finished run, one of whose files or folders is replaced by a link to elsewhere, is resumed and overwritten."""
    data = npz(tmp_path / "toy.npz")
    out = tmp_path / "run"
    mocokit.pretrain(data, out, quiet=True, **(OPTIONS | {"epochs": 1}))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("not yours")
    target = out / planted
    if target.is_dir():
        target.rename(tmp_path / "moved")
        target.symlink_to(outside, target_is_directory=True)
    else:
        if target.exists():
            target.unlink()
        target.symlink_to(outside / "precious")
    before = contents(outside)
    for changes in ({"resume": True}, {"overwrite": True}):
        with contextlib.suppress(MocokitError):  # refusing is fine
            mocokit.pretrain(data, out, quiet=True, **(changes | (OPTIONS | {"epochs": 1})))
        assert contents(outside) == before, (planted, changes)


CONFIGS: dict[str, Any] = {
    "class path": "encoder: {_target_: os.system, backbone: small-cnn}",
    "python tag": "encoder: !!python/object/apply:os.system ['touch MARKER']",
    "python name": "recipe: !!python/name:os.system",
    "expansion": "data: {split: '${HOME}/~'}\nencoder: {backbone: '$(touch MARKER)'}",
    "backbone path": "encoder: {backbone: '../../x.py'}",
    "backbone hub": "encoder: {backbone: 'hf-hub:someone/model'}",
    "backbone local": "encoder: {backbone: 'local-dir:/tmp'}",
    "long text": "recipe: " + "x" * 2_000_000,
    "anchors": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]",
    "spec": "data: {spec: '/etc'}",
    "init pickle": "data: {init: 'MARKER.pkl'}",
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_hostile_configurations_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "marker"
    data = npz(tmp_path / "toy.npz")
    (tmp_path / "c.yaml").write_text(CONFIGS[name].replace("MARKER", str(marker)))
    words = ["pretrain", str(data), "--out", "run", "--config", "c.yaml", "-q", "--epochs", "1", "--batch-size", "8"]
    code = main(words if "backbone" in CONFIGS[name] else [*words, "--backbone", "small-cnn-8-8"])
    assert code in ((0, 2) if name == "spec" else (2, 3))
    assert not marker.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"toy.npz", "c.yaml", "run"}
