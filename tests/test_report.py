"""The run report: the verdict first, every number from the run's own files, readable by everybody, deaf to markup."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import mocokit
from mocokit import api
from mocokit.cli import main
from mocokit.contrast.health import findings
from mocokit.errors import DamagedError, UsageError
from mocokit.evaluation.showing import chosen_neighbours, principal_map
from mocokit.evaluation.verdict import Baseline, Verdict, verdict_line, verdict_sentence
from mocokit.reporting import charts, plots
from mocokit.reporting.charts import Series, line_chart, thinned, ticks
from mocokit.reporting.page import embedded
from mocokit.reporting.sentences import finding_sentence, twins_sentence
from mocokit.training.runfolder import foreign_files
from tests.browser import HOSTILE, accessibility, chromium, opened
from tests.toy import flags, labelled_npz


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on labelled pictures with two copies among them, evaluated, monitored and traced."""
    folder = tmp_path_factory.mktemp("report")
    data = labelled_npz(folder / "data.npz")
    with np.load(data) as found:
        arrays = dict(found)
    train = np.flatnonzero(arrays["split"] == "train")
    arrays["images"][train[5]] = arrays["images"][train[2]]
    np.savez(data, **arrays)
    words = ["pretrain", str(data), "--out", str(folder / "run"), *flags(), "--quiet"]
    assert main([*words, "--monitor", str(data), "--trace", "first"]) == 0
    assert main(["evaluate", str(folder / "run"), "--labelled", str(data), "--draws", "3", "--quiet"]) == 0
    api.report(folder / "run", labelled=data, quiet=True)
    return folder / "run"


def test_the_files(run: Path) -> None:
    for name in ("report.html", "README.md", "report.json", "results.png"):
        assert (run / name).stat().st_size > 500, name
    assert foreign_files(run) == []
    told = json.loads((run / "report.json").read_text())
    verdict = json.loads((run / "eval" / "verdict.json").read_text())
    assert told["verdict"] == verdict
    assert told["images"] == {"used": 60, "skipped": 0, "compared_for_duplicates": 60, "duplicate_groups": 1}
    assert told["ledger"]["test"] == 1
    assert told["ledger"]["val"] >= 2  # the monitor's and the report's own
    lines = [json.loads(line) for line in (run / "loss.jsonl").read_text().splitlines()]
    assert told["loss"] == {"first": lines[0], "last": lines[-1]}
    assert told["settings_not_the_recipes"]["contrast.K"] == "20"
    assert "train.checkpoint_every" not in told["settings_not_the_recipes"]


def test_no_path_of_this_machine(run: Path) -> None:
    for name in ("report.html", "README.md", "report.json"):
        assert str(run.parent) not in (run / name).read_text("utf-8"), name


def test_the_card_is_a_model_card(run: Path) -> None:
    text = (run / "README.md").read_text("utf-8")
    front = yaml.safe_load(text.split("---\n")[1])
    verdict = json.loads((run / "eval" / "verdict.json").read_text())
    assert front["library_name"] == "mocokit"
    value = front["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert value == pytest.approx(100 * verdict["score"], abs=0.005)
    assert "VERDICT: " in text
    assert "he2020moco" in text
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert len(code.strip().splitlines()) == 3


def test_the_three_lines_load_the_encoder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    code = re.findall(r"```python\n(.*?)```", (run / "README.md").read_text("utf-8"), re.DOTALL)[0]
    space: dict[str, Any] = {"x": torch.zeros(2, 3, 16, 16)}
    exec(code, space)
    assert space["h"].shape == (2, 8)
    assert not space["encoder"].training


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
def test_in_a_browser(browser: Any, run: Path, language: str) -> None:
    verdict = json.loads((run / "eval" / "verdict.json").read_text())
    for width in (1280, 390):
        with opened(browser, run / "report.html", f"#lang={language}", width=width) as page:
            assert accessibility(page) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            text = page.inner_text("body")
            line = {"en": "VERDICT", "zh": "结论："}[language]
            assert text.index(line) < text.index(f"{100 * verdict['score']:.1f} %\t" if width > 400 else "kNN")
            assert (re.search(r"[\u4e00-\u9fff]{4}", text) is not None) == (language == "zh")
            for one in verdict["scores"].values():
                assert f"{100 * one['score']:.1f} %" in text
    with opened(browser, run / "report.html", "#lang=en") as page:
        page.locator("[data-set-lang=zh]").click()
        assert page.get_attribute("html", "lang") == "zh"
        assert page.locator("svg.chart").count() == page.locator("figure:has(svg.chart) details").count() >= 5


@pytest.mark.slow
def test_not_evaluated_and_without_its_images(browser: Any, tmp_path: Path) -> None:
    data = labelled_npz(tmp_path / "data.npz")
    assert main(["pretrain", str(data), "--out", str(tmp_path / "r"), *flags(epochs=1), "--quiet"]) == 0
    data.unlink()
    assert main(["report", str(tmp_path / "r"), "--quiet", "--json"]) == 0
    told = json.loads((tmp_path / "r" / "report.json").read_text())
    assert told["verdict"] is None
    assert told["images"]["duplicate_groups"] is None
    with opened(browser, tmp_path / "r" / "report.html", "#lang=en") as page:
        text = page.inner_text("body")
        assert "Not evaluated yet" in text
        assert "mocokit evaluate r --labelled DATA" in text
        assert "can't be opened any more" in text
        assert accessibility(page) == []


@pytest.mark.slow
def test_hostile_names_run_no_script(browser: Any, tmp_path: Path) -> None:
    """The fifty texts as file names, as class names, as the run's name, in settings and in the environment."""
    root = tmp_path / "<img src=x onerror=alert(1)>"
    noise = np.random.default_rng(0)
    for number, text in enumerate(HOSTILE):
        name = text.replace("/", "\u2215").encode()[:180].decode("utf-8", "ignore").strip() or "x"
        for copy in range(2):
            folder = root / "train" / (name if number < 12 else "b")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}{copy}{name}.png", "PNG")
    (root / "train" / "b" / "<script>alert(1)<\u2215script>.png").write_bytes(b"no picture")
    run = tmp_path / "'><script>alert(1)<\u2215script>"
    words = ["pretrain", str(root), "--out", str(run), *flags(epochs=1), "--quiet", "--trace", "first"]
    assert main([*words, "--max-bad", "0.5"]) == 0
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(environment | {f"e{i}": text for i, text in enumerate(HOSTILE)}))
    done = api.report(run, quiet=True)
    assert done.facts.shown is not None
    with opened(browser, run / "report.html") as page:
        assert page.locator("script").count() == 1
        assert page.locator("main iframe, main object, main embed, main form, main link, main video").count() == 0
        page.locator("summary >> nth=0").click()
    page_file = api.stepper(run).path
    with opened(browser, page_file, "#t=2&s=logits&key=3") as page:
        page.keyboard.press("ArrowRight")
        assert page.locator("script").count() == 4
    card = re.sub(r"```python\n.*?```\n", "", (run / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert "<script>alert" not in re.sub(r"`[^`]*`", "", card)


def test_a_verdict_that_was_changed_is_named(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "eval" / "verdict.json").write_text('{"verdict": "BETTER"}')
    with pytest.raises(DamagedError, match=r"verdict\.json is not what mocokit wrote"):
        api.report(copy, quiet=True)
    with pytest.raises(UsageError, match="does not exist"):
        api.report(tmp_path / "nowhere", quiet=True)


def test_public_names() -> None:
    assert mocokit.report is api.report
    assert mocokit.stepper is api.stepper


# ------------------------------------------------------------------------------------------------- the parts


def test_neighbours_are_ranked_by_rule() -> None:
    """Against brute force: the share of neighbours of the own class, the query itself left out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(40, 5, generator=generator), dim=1)
    labels = np.arange(40) % 4
    found = chosen_neighbours(x, x, k=3, each=2, bank_labels=labels, query_labels=labels, same=np.arange(40))
    cosines = (x @ x.T).numpy() - 9 * np.eye(40)
    order = np.argsort(-cosines, axis=1)[:, :3]
    shares = (labels[order] == labels[:, None]).mean(1)
    assert found.shared == pytest.approx(shares.mean())
    assert found.kind == ["good"] * 2 + ["median"] * 2 + ["worst"] * 2
    np.testing.assert_array_equal(found.found, order[found.queries])
    ranked = np.sort(shares)[::-1]
    assert shares[found.queries[:2]] == pytest.approx(ranked[:2])
    assert shares[found.queries[-2:]] == pytest.approx(ranked[-2:])


def test_map_is_the_principal_one() -> None:
    x = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    flat = principal_map(x)
    unit = torch.nn.functional.normalize(x.double(), dim=1)
    values = torch.linalg.eigvalsh(torch.cov(unit.T)).flip(0)[:2]
    np.testing.assert_allclose(flat.var(0, ddof=1), values.numpy(), rtol=1e-9)
    assert flat.shape == (30, 2)


def test_chart_draws_every_point() -> None:
    drawn = line_chart([Series("loss", [(0, 1.0), (10, 3.0)])], label="x", low=0.0)
    points = re.findall(r'points="([^"]+)"', drawn)[0].split()
    (x0, y0), (x1, y1) = (tuple(map(float, point.split(","))) for point in points)
    floor = charts.HEIGHT - 26
    assert x0 == 52
    assert x1 == charts.WIDTH - 12
    assert (floor - y0) / (floor - y1) == pytest.approx(1 / 3, abs=1e-3)
    assert line_chart([Series("loss", [])], label="x") == ""


def test_ticks_and_thinning() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(3, 3) == [3]
    points = [(float(i), float(i % 2)) for i in range(1000)]
    thin = thinned(points)
    assert len(thin) == 200
    assert np.mean([y for _, y in thin]) == pytest.approx(0.5)


@pytest.mark.parametrize("text", HOSTILE)
def test_embedded_json_holds_no_markup(text: str) -> None:
    written = str(embedded({"name": text}))
    assert not set("<>&") & set(written)
    assert json.loads(written) == {"name": text}


# --------------------------------------------------------------------------------------------------- in two languages


def a_verdict(**changes: Any) -> Verdict:
    known = (("pixels", 0.3), ("w (a)", 0.4))
    ran = [Baseline(name=name, score=one, low=one, high=one, ran=True, why_not=None) for name, one in known]
    gone = Baseline(name="timm:x", score=None, low=None, high=None, ran=False, why_not="no network")
    given: dict[str, Any] = {
        "verdict": "BETTER",
        "metric": "kNN",
        "score": 0.713,
        "score_ci95": (0.7, 0.72),
        "baseline": {"name": "w (a)", "score": 0.4},
        "baselines": (*ran, Baseline(name="w (b)", score=0.35, low=0.3, high=0.4, ran=True, why_not=None), gone),
        "delta": 0.313,
        "ci95": (0.3, 0.32),
        "n_test": 90,
        "seeds": 1,
        "readout": "h",
        "encoder": "query",
        "step": 12,
        "this_run_only": True,
        "draws": None,
        "labels_per_class": None,
    }
    return Verdict(**(given | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"verdict": "WORSE", "delta": -0.0},
        {"verdict": "NO CLEAR DIFFERENCE", "draws": 1},
        {"draws": 20, "labels_per_class": 5},
        {"judged": "videos"},
        {"seeds": 5, "this_run_only": False, "draws": 3, "labels_per_class": 10},
        {"baselines": (Baseline(name="w (a)", score=0.4, low=0.3, high=0.5, ran=True, why_not=None),)},
    ],
)
def test_the_verdict_is_the_same_in_both_languages(changes: dict[str, Any]) -> None:
    verdict = a_verdict(**changes)
    assert verdict_sentence(verdict.to_json() | {"baselines": _as_json(verdict)}, "en") == verdict_line(verdict)
    chinese = verdict_sentence(verdict.to_json() | {"baselines": _as_json(verdict)}, "zh")
    assert re.findall(r"[+-]?\d+\.\d", chinese) == re.findall(r"[+-]?\d+\.\d", verdict_line(verdict))
    words = chinese
    for name in ("kNN", "pixels", "timm:x", "w (a)", "w (b)", "n="):
        words = words.replace(name, "")
    assert not re.search(r"[A-Za-z]", words), chinese


def _as_json(verdict: Verdict) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in verdict.baselines]


def test_near_twins_are_told_in_both_languages() -> None:
    whole, without = a_verdict(), a_verdict(score=0.25, delta=-0.05, ci95=(-0.1, 0.02)).to_json()
    found = {"n_test": 40, "test_images": 3, "verdicts_without": {"knn": without, "linear": a_verdict().to_json()}}
    for language, words in (("en", "3 of 40 test images"), ("zh", "40 张测试图像中有 3 张")):
        text = twins_sentence(whole.to_json() | {"near_twins": found}, language)  # type: ignore[arg-type]
        assert text is not None
        assert words in text
        assert all(number in text for number in ("25.0 %", f"{100 * whole.score:.1f} %", "-5.0", "[-10.0, +2.0]"))
        for changes, count in (({"test_images": 0}, "40"), ({"verdicts_without": {}}, "40")):
            short = twins_sentence(whole.to_json() | {"near_twins": found | changes}, language)  # type: ignore[arg-type]
            assert short is not None
            assert count in short
            assert "%" not in short
        assert twins_sentence(whole.to_json() | {"near_twins": None}, language) is None  # type: ignore[arg-type]


def test_what_health_found_is_the_same_in_both_languages() -> None:
    row = {
        "step": 0,
        "epoch": 0.0,
        "rank_z": 40.0,
        "spread_z": 0.9,
        "rank_limit": 128,
        "chance": 5.0,
        "loss": 4.99,
        "probe": 128,
        "batch_accuracy": 0.01,
        "queue_fill": 512,
        "queue_size": 4096,
        "staleness": [[4, 0.31]],
    }
    rows = [
        row,
        row | {"epoch": 4.0, "step": 4},
        row | {"epoch": 5.0, "step": 5, "rank_z": 1.2, "spread_z": 0.01, "loss": 3.0},
        row | {"epoch": 6.0, "step": 6, "rank_z": 1.2, "spread_z": 0.01, "loss": 3.0},
    ]
    health = [one | {"findings": findings(rows[: number + 1])} for number, one in enumerate(rows)]
    told = {code: number for number, one in enumerate(health) for code in one["findings"]}
    assert set(told) == {"collapsed", "at-chance", "drift", "stale", "filling"}
    for code, number in told.items():
        said = finding_sentence(health, number, code)
        assert said["en"] == health[number]["findings"][code]
        numbers = {language: sorted(re.findall(r"\d[\d.,]*\d|\d", text)) for language, text in said.items()}
        assert numbers["zh"] == numbers["en"], code
        assert not re.search(r"[A-Za-z]", re.sub(r"--[a-z-]+", "", said["zh"])), said["zh"]
    health[-1]["findings"]["stale"] = "what another version wrote"
    assert finding_sentence(health, 3, "stale") == {"en": "what another version wrote"}
    health[-1]["findings"]["new-kind"] = "what a later version found"
    assert finding_sentence(health, 3, "new-kind") == {"en": "what a later version found"}


def test_the_curve_names_its_data(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    drawn = plots.results_figure

    def seen(*given: Any, **named: Any) -> Any:
        titles.append(named["monitor"])
        return drawn(*given, **named)

    monkeypatch.setattr(plots, "results_figure", seen)
    api.report(run, quiet=True)
    assert titles == ["data.npz"]
