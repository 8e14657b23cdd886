"""`mocokit compare`: what differs is named, what can't be compared is said, and any run can be shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mocokit.api.comparing import compare
from mocokit.cli import main
from mocokit.errors import DamagedError, UsageError
from mocokit.reporting.compare import comparison_text, shares
from mocokit.training.runfolder import foreign_files
from tests.toy import flags, labelled_npz

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Trains a tiny run with changed flags; the same changes give the same folder."""
    folder = tmp_path_factory.mktemp("runs")
    data = labelled_npz(folder / "toy.npz")
    made: dict[str, Path] = {}

    def make(name: str, **changes: Any) -> Path:
        if name not in made:
            words = ["pretrain", str(data), "--out", str(folder / name), "-q", "--monitor", str(data)]
            assert main([*words, "--eval-every", "1", *flags(**changes)]) == 0
            made[name] = folder / name
        return made[name]

    make.data = data  # type: ignore[attr-defined]
    return make


def test_seeds_alone_are_no_factor(make_once: Make) -> None:
    found = compare([make_once("a"), make_once("b", seed=3)])
    assert found.factors == {}
    assert found.seeds == [0, 3]
    assert found.environments == {}
    assert [text.partition(":")[0] for text in found.warnings] == ["not evaluated yet"]
    assert "nothing differs but the seed" in comparison_text(found)


def test_one_factor_is_named_and_two_are_warned_of(make_once: Make) -> None:
    one = compare([make_once("a"), make_once("t", temperature=0.3)])
    assert one.factors == {"contrast.T": [0.1, 0.3]}
    assert not any("factors beside the seed" in text for text in one.warnings)
    two = compare([make_once("a"), make_once("tk", temperature=0.3, queue_size=24)])
    assert two.factors == {"contrast.T": [0.1, 0.3], "contrast.K": [20, 24]}
    assert any("differ in 2 factors beside the seed (contrast.K, contrast.T)" in text for text in two.warnings)


def test_the_same_images_under_another_path_are_no_factor_and_others_are_one(make_once: Make, tmp_path: Path) -> None:
    shutil.copy2(make_once.data, tmp_path / "moved.npz")  # type: ignore[attr-defined]
    words = ["--out", str(tmp_path / "run"), "-q", *flags()]
    assert main(["pretrain", str(tmp_path / "moved.npz"), *words]) == 0
    assert compare([make_once("a"), tmp_path / "run"]).factors == {}
    other = labelled_npz(tmp_path / "other.npz", 90)
    assert main(["pretrain", str(other), "--out", str(tmp_path / "run2"), "-q", *flags()]) == 0
    assert list(compare([make_once("a"), tmp_path / "run2"]).factors) == ["data.spec"]


def test_evaluated_runs_show_their_scores(make_once: Make, tmp_path: Path) -> None:
    runs = [shutil.copytree(make_once(name), tmp_path / name) for name in ("a", "t")]
    data = make_once.data  # type: ignore[attr-defined]
    assert (
        main(["evaluate", str(runs[0]), "--labelled", str(data), "--labels-per-class", "3", "--draws", "2", "-q"]) == 0
    )
    assert main(["evaluate", str(runs[1]), "--labelled", str(data), "--labels-per-class", "all", "-q"]) == 0
    found = compare(runs, html=tmp_path / "page.html")
    verdicts = [json.loads((run / "eval" / "verdict.json").read_text()) for run in runs]
    assert [run.verdict for run in found.runs] == verdicts
    told = "\n".join(found.warnings)
    assert "different questions: labels_per_class is 3, None" in told
    assert "not evaluated" not in told
    text = comparison_text(found)
    assert f"{100 * verdicts[0]['score']:.1f} [" in text
    page = (tmp_path / "page.html").read_text()
    assert page.count("data:image/png") == 1
    assert "contrast.T" in page
    assert "random init" in page
    assert all(foreign_files(run) == [] for run in runs)


def test_the_curve_is_the_loss_over_its_chance(make_once: Make) -> None:
    run = compare([make_once("a"), make_once("b", seed=3)]).runs[0]
    course = shares(run)
    assert len(course) == len(run.losses)
    for (epoch, share), row in zip(course, run.losses, strict=True):
        assert epoch == row["step"] / (run.config.data.images // 8)
        assert share == row["loss"] / row["chance"]
    assert len(run.monitor) == 2


def test_runs_that_stand_differently_far_and_environments(make_once: Make, tmp_path: Path) -> None:
    late = shutil.copytree(make_once("a"), tmp_path / "late")
    status = json.loads((late / "status.json").read_text())
    (late / "status.json").write_text(json.dumps(status | {"state": "interrupted", "step": 4}))
    environment = json.loads((late / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    (late / "environment.json").write_text(json.dumps(environment))
    found = compare([make_once("a"), late])
    assert list(found.environments) == ["packages torch"]
    assert any("differently far" in text for text in found.warnings)
    assert any("not finished: late interrupted" in text for text in found.warnings)


def test_what_is_wrong_is_said(make_once: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least two runs"):
        compare([make_once("a")])
    with pytest.raises(UsageError, match="does not exist"):
        compare([make_once("a"), tmp_path / "nowhere"])
    broken = shutil.copytree(make_once("a"), tmp_path / "broken")
    (broken / "eval").mkdir(exist_ok=True)
    (broken / "eval" / "verdict.json").write_text("[1, 2]")
    with pytest.raises(DamagedError, match=r"verdict\.json is not what mocokit wrote"):
        compare([make_once("a"), broken])
    same = shutil.copytree(make_once("a"), tmp_path / "deep" / "a")
    names = [run.name for run in compare([make_once("a"), same]).runs]
    assert names == [f"{make_once('a').parent.name}/a", "deep/a"]


def test_the_command(make_once: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(make_once("a")), str(make_once("t", temperature=0.3))]
    capsys.readouterr()
    assert main(["compare", *runs, "--html", str(tmp_path / "c.html")]) == 0
    out = capsys.readouterr().out
    assert "differs: contrast.T: 0.1, 0.3" in out
    assert "WARNING: not evaluated yet: a, t" in out
    assert main(["compare", *runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["factors"] == {"contrast.T": [0.1, 0.3]}
    assert main(["compare", runs[0]]) == 2
