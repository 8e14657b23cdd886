from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mocokit import files
from mocokit.errors import LockedError, UsageError
from mocokit.studies.ablation import Judged, _holm, _with, run_plan, study_table
from mocokit.studies.study_plan import Plan, read_plan
from tests.toy import labelled_npz

PLAN: dict[str, Any] = {
    "name": "momentum",
    "data": "moved-digits",
    "labelled": "moved-digits",
    "base": {"recipe": "digits", "train": {"epochs": 2}},
    "factor": "contrast.m",
    "values": [0.5, 0.9, 0.99],
    "baseline": 0.9,
    "seeds": [0, 1, 2],
}


def write(folder: Path, plan: Mapping[str, Any]) -> Path:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(dict(plan)))
    return path


class Recorder:
    """Stands where training and judging are handed in; a run's accuracy is 0.5 + m / 10 with a seed's own offset."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.trained: list[tuple[float, int]] = []
        self.fail_at = fail_at

    def train(self, config: Mapping[str, Any], data: str, folder: Path) -> None:
        assert data == "moved-digits"
        if self.fail_at is not None and len(self.trained) == self.fail_at:
            raise KeyboardInterrupt
        assert config["recipe"] == "digits"
        assert config["train"]["epochs"] == 2
        self.trained.append((config["contrast"]["m"], config["train"]["seed"]))
        folder.mkdir()
        (folder / "config.txt").write_text(f"{config['contrast']['m']} {config['train']['seed']}")

    def score(self, folder: Path, labelled: str, plan: Plan) -> Judged:
        m, seed = (folder / "config.txt").read_text().split()
        images = np.random.default_rng(7).random(400)  # an image is as easy in every cell
        noise = np.random.default_rng(int(seed) + 10).random(400)
        correct = ((images + 0.3 * noise) / 1.3 < 0.4 + float(m) / 4).astype(np.float64)
        return Judged(correct, ((0.0, 1.0), (4.0, float(m) - int(seed) / 100)), int(seed) / 10, 2.0 + int(seed))


def test_a_plan_is_registered_first_and_carried_out_once(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, PLAN))
    out = tmp_path / "study"
    stopped = Recorder(fail_at=4)
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, out, train=stopped.train, score=stopped.score, say=print)
    assert files.read_json(out / "plan.json")["sha256"] == plan.digest
    assert stopped.trained == [(0.5, 0), (0.9, 0), (0.99, 0), (0.5, 1)]
    going_on = Recorder()
    study = run_plan(plan, out, train=going_on.train, score=going_on.score, say=print)
    assert going_on.trained == [(0.9, 1), (0.99, 1), (0.5, 2), (0.9, 2), (0.99, 2)]
    scores = {cell.value[0]: cell.score.mean for cell in study.cells}
    assert scores[0.5] < scores[0.9] < scores[0.99]
    low = next(cell for cell in study.cells if cell.value == (0.5,))
    assert low.difference is not None
    assert low.difference.mean == pytest.approx(scores[0.5] - scores[0.9])
    assert low.difference.high < 0
    assert low.p_holm is not None
    assert low.p_holm < 0.05
    assert next(cell for cell in study.cells if cell.value == (0.9,)).difference is None
    assert low.staleness == ((0.0, 1.0), (4.0, pytest.approx(0.49)))  # the mean over seeds 0, 1, 2
    assert (low.masked_share, low.seconds) == (pytest.approx(0.1), pytest.approx(3.0))
    text = study_table(study)
    assert (out / "results.txt").read_text() == text
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "0.490 at age 4" in text
    assert "baseline" in text
    assert plan.digest[:16] in text
    nothing = Recorder(fail_at=0)
    assert run_plan(plan, out, train=nothing.train, score=nothing.score, say=print).to_dict() == study.to_dict()


def test_two_at_once_never_read_the_test_split_twice(tmp_path: Path) -> None:
    plan, out = read_plan(write(tmp_path, PLAN)), files.make_folder(tmp_path / "study")
    second = Recorder()
    with files.RunLock(out), pytest.raises(LockedError, match="study is in use by process"):
        run_plan(plan, out, train=second.train, score=second.score, say=print)
    assert second.trained == []


def test_a_registered_plan_is_not_changed(tmp_path: Path) -> None:
    recorder = Recorder()
    run_plan(read_plan(write(tmp_path, PLAN)), tmp_path / "s", train=recorder.train, score=recorder.score, say=print)
    other = read_plan(write(tmp_path, {**PLAN, "seeds": [0, 1]}))
    with pytest.raises(UsageError, match="another plan"):
        run_plan(other, tmp_path / "s", train=recorder.train, score=recorder.score, say=print)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"factors": {"contrast.m": [0, 1], "contrast.K": [4, 8]}, "factor": None}, "factorial: true"),
        ({"values": [0.5]}, "at least two values"),
        ({"factor": "momentum"}, "SECTION.KEY"),
        ({"seeds": [1, 1]}, "different whole numbers"),
        ({"metric": "linear"}, "h, z, key-h or key-z"),
        ({"baseline": 0.7}, "not among the values"),
        ({"labels_per_class": 0}, "whole number or all"),
        ({"base": {"contrast": {"m": 0.9}}}, "both set the same"),
        ({"base": {"train": {"seed": 3}}}, "no effect"),
        ({"label_column": 3}, "must be a text"),
        ({"companions": {0.7: {"train": {"epochs": 3}}}}, "no value of a single factor"),
        ({"companions": [1]}, "must map values"),
        ({"factor": "recipe", "values": ["a", "b"], "baseline": "a"}, "both set the same"),
        ({"sedes": [1]}, "Did you mean 'seeds'"),
    ],
)
def test_bad_plans_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    changed = {key: value for key, value in {**PLAN, **change}.items() if value is not None}
    with pytest.raises(UsageError, match=words):
        read_plan(write(tmp_path, changed))


def test_a_factorial_plan_says_so(tmp_path: Path) -> None:
    factors = {"contrast.m": [0.5, 0.9], "train.batch_size": [32, 64]}
    plan_text = {k: v for k, v in PLAN.items() if k not in ("factor", "values", "baseline")}
    plan = read_plan(write(tmp_path, {**plan_text, "factors": factors, "factorial": True}))
    assert plan.cells() == [(0.5, 32), (0.5, 64), (0.9, 32), (0.9, 64)]
    assert plan.baseline == (0.5, 32)


def test_a_recipe_can_be_the_factor_and_values_can_have_companions(tmp_path: Path) -> None:
    base = {"encoder": {"dim": 8}}
    changed = {"base": base, "factor": "recipe", "values": ["small", "digits"], "baseline": "small"}
    plan = read_plan(write(tmp_path, {**PLAN, **changed, "companions": {"digits": {"train": {"epochs": 9}}}}))
    fixed = {"encoder": {"dim": 8}, "execution": {"precision": "fp32", "layout": "contiguous"}}
    assert _with(plan, ("small",), 1) == fixed | {"recipe": "small", "train": {"seed": 1}}
    assert _with(plan, ("digits",), 2) == fixed | {"recipe": "digits", "train": {"epochs": 9, "seed": 2}}


def test_holm_by_hand() -> None:
    assert _holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert _holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert _holm([]) == []


SHIPPED = sorted((Path(__file__).parent.parent / "examples" / "plans").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_plans_are_valid_down_to_every_cell(path: Path, tmp_path: Path) -> None:
    from mocokit.api.opening import configure, read_config
    from mocokit.options import PretrainOptions

    plan = read_plan(path)
    for number, cell in enumerate(plan.cells()):
        settings = tmp_path / f"{number}.yaml"
        settings.write_text(yaml.safe_dump(_with(plan, cell, plan.seeds[0])))
        _, config = configure(plan.data, PretrainOptions(), read_config(settings))
        for key, value in zip(plan.factors, cell, strict=True):
            section, _, name = key.partition(".")
            assert (getattr(getattr(config, section), name) if name else config.recipe) == value


@pytest.mark.slow
def test_the_verb_carries_out_a_plan(tmp_path: Path) -> None:
    import mocokit

    study = mocokit.ablate(SHIPPED[0].parent / "smoke.yaml", tmp_path / "study", quiet=True)
    assert [cell.value for cell in study.cells] == [(0.9,), (0.99,)]
    assert all(0 < cell.score.mean < 1 for cell in study.cells)
    assert (tmp_path / "study" / "results.json").exists()


@pytest.mark.slow
def test_a_cell_stopped_before_its_run_began_is_trained_as_planned(tmp_path: Path) -> None:
    """Between run.json and config.yaml nothing in the run folder says how to train: while pixels are read, say."""
    import mocokit
    from mocokit.training.runfolder import claim_run

    data = str(labelled_npz(tmp_path / "toy.npz", 60))
    base = {"train": {"epochs": 1, "batch_size": 10}, "encoder": {"backbone": "small-cnn-8-8", "dim": 8}}
    plan = PLAN | {"data": data, "labelled": data, "base": base, "values": [0.5, 0.9], "seeds": [3], "draws": 2}
    stopped, other = (tmp_path / "study" / "cells" / f"m-{m}-seed3" for m in (0.5, 0.9))
    stopped.parent.mkdir(parents=True)
    claim_run(stopped, "new")[1].release()
    mocokit.ablate(write(tmp_path, plan), tmp_path / "study", quiet=True)
    found, whole = (yaml.safe_load((run / "config.yaml").read_text()) for run in (stopped, other))
    assert found["contrast"].pop("m") == 0.5
    assert whole["contrast"].pop("m") == 0.9
    assert found == whole
    assert (found["train"]["batch_size"], found["train"]["seed"]) == (10, 3)
