"""The run report: the verdict first, every number from the run's own files, readable by everybody, deaf to markup."""

from __future__ import annotations

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
from mocokit.errors import DamagedError, UsageError
from mocokit.evaluation.showing import chosen_neighbours, principal_map
from mocokit.reporting import charts
from mocokit.reporting.charts import Series, line_chart, thinned, ticks
from mocokit.reporting.page import embedded
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
            assert text.index("VERDICT") < text.index(f"{100 * verdict['score']:.1f} %\t" if width > 400 else "kNN")
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
