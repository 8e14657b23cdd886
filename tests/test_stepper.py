"""The step viewer in a real browser: every number is the trace's, by keyboard, in two languages, without a network."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mocokit import api, strings
from mocokit.cli import main
from mocokit.contrast.encoders import EncoderConfig, EncoderPair, build_encoder
from mocokit.contrast.key_queue import KeyQueue, Keys
from mocokit.contrast.steps import ContrastConfig, step_of
from mocokit.errors import UsageError
from mocokit.reporting.page import Speaker
from mocokit.reporting.stepper import step_source, stepper_html
from mocokit.training.distributed import Ranks
from mocokit.training.loop import QueryUpdate, micro_batches
from mocokit.training.optim import OptimConfig, build_optimizer
from mocokit.training.state import TrainState
from mocokit.training.trace import Recorder, recording
from mocokit.training.trace_format import plan_windows, unpack
from mocokit.training.trace_images import Pictured
from mocokit.training.trace_toy import toy_trace
from tests.browser import HOSTILE, accessibility, chromium, opened
from tests.test_trace import Pictures
from tests.toy import flags, npz

SUBS = ("views", "k", "q", "logits", "loss", "backward", "optimiser", "ema", "enqueue", "next")


def large_trace(
    K: int = 4096, N: int = 256, D: int = 128, *, name: str = "picture", trace: str = "first", **contrast: Any
) -> dict[str, Any]:
    """A trace of the shape of a CIFAR run's: K 4096, N 256, D 128, `first`; of a very small network."""
    config = ContrastConfig(K=K, T=0.2, m=0.99, **contrast)
    pair = EncoderPair(build_encoder(EncoderConfig(backbone="small-cnn-4-6", dim=D), image_size=8, seed=0))
    pair.train()
    optim = OptimConfig(lr=0.05)
    state = TrainState(pair, KeyQueue(K, D), build_optimizer(optim, pair.trained))
    windows = plan_windows(trace, K=K, life=K / N, total_steps=1000)
    for step in range(windows[0].start):  # what steps before the window left in the queue: keys alone, no training
        noise_in = torch.randn(N, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            vectors = torch.nn.functional.normalize(pair.key(noise_in), dim=1)
        ids = (torch.arange(N) + N * step) % 3000
        state.queue.enqueue_(Keys(vectors, ids, torch.full((N,), -1)), step)
        state.step += 1
    kept: list[dict[str, Any]] = []
    noise = np.random.default_rng(0)
    facts = {"K": K, "N": N, "keys_per_step": N, "D": D, "T": 0.2, "m": 0.99, "order": config.order}
    recorder = Recorder(
        windows,
        config,
        source={"kind": "run", "name": name},
        facts=facts,
        describe=lambda i: Pictured(f"{name} {i}", name, noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)),
        to_pixels=lambda x: noise.integers(0, 256, (len(x), 32, 32, 3), dtype=np.uint8),
        save=kept.append,
    )
    for step in range(windows[0].start, windows[0].stop):
        x_q, x_k = torch.randn(2, N, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        ids = (torch.arange(N) + N * step) % 3000
        parts = micro_batches(Pictures(x_q, x_k, ids, torch.full((N,), -1)), 1)
        update = QueryUpdate(state, optim.lr, 1, lambda: "")
        with recording(recorder, state, parts, update, Ranks().gather, 0.99) as (updating, gather):
            step_of(config)(
                pair,
                state.queue,
                parts,
                scoring=config.scoring(),
                m=0.99,
                step=step,
                update_query_=updating,
                gather=gather,
            )
        state.step += 1
    return kept[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return api.stepper(out=tmp_path_factory.mktemp("page") / "moco-steps.html").path


def entry(row: Any, path: str) -> Any:
    for part in path.split("."):
        row = row[int(part)] if isinstance(row, list) else row[part]
    return row


def shown(page: Any) -> list[tuple[str, str, str]]:
    """(path, exact value, text) of every number that says which entry of the step it is."""
    nodes = "e => e.map(n => [n.dataset.path, n.dataset.value, n.textContent])"
    return [tuple(one) for one in page.eval_on_selector_all(".num[data-path]", nodes)]


def check_numbers(page: Any, row: dict[str, Any]) -> int:
    """Every number in the page that names an entry is that entry, all digits of it; gives how many there were."""
    count = 0
    for path, value, text in shown(page):
        if path in ("whatif", "positive", "staleness"):
            continue
        expected = entry(row, path)
        if expected is None:
            assert (value, text) == ("null", "∅"), path
        else:
            assert float(value) == expected, path
            assert float(text) == pytest.approx(expected, rel=5e-4, abs=1e-12), path
        count += 1
    return count


def by_hand(row: dict[str, Any], query: int, T: float, rows: list[int] | None = None) -> float:
    """InfoNCE of one query in float64 from the trace alone."""
    Q = len(row["masked"])
    cosines = unpack(row["negatives"], Q, -1)[query].astype(np.float64)
    kept = [i for i in (range(len(cosines)) if rows is None else rows) if i not in set(row["masked"][query])]
    positive = float(unpack(row["positive"], -1)[query])
    logits = np.concatenate([[positive], cosines[kept]]) / T
    return float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - positive / T)


@pytest.mark.slow
def test_walk_by_keyboard_every_number_is_the_traces(browser: Any, built_in: Path) -> None:
    steps = toy_trace()["windows"][0]["steps"]
    with opened(browser, built_in, "#t=0&s=views&lang=en") as page:
        told = set()
        for step in steps:
            for place, sub in enumerate(SUBS):
                assert page.get_attribute(f"#sub-{sub}", "aria-current") == "step"
                assert page.inner_text("#step-number") == str(step["t"])
                told.add(page.inner_text("#sentence"))
                assert check_numbers(page, step) >= 12
                assert page.locator(".code .on").count() >= 2
                assert f"s={sub}" in page.url
                if (step["t"], place) != (11, 9):
                    page.keyboard.press("ArrowRight")
        assert len(told) >= 70
        assert page.is_disabled("#next-sub")
        page.keyboard.press("Home")
        assert page.inner_text("#step-number") == "0"
        page.keyboard.press("Shift+ArrowRight")
        assert page.inner_text("#step-number") == "1"
        page.keyboard.press("ArrowLeft")
        assert page.get_attribute("#sub-next", "aria-current") == "step"
        page.keyboard.press("End")
        assert page.inner_text("#step-number") == "11"


@pytest.mark.slow
def test_follow_a_key_from_birth_to_eviction(browser: Any, built_in: Path) -> None:
    """The seeds' cycle: k5 is this step's positive, enters, is scored four times, and k1 left for it."""
    steps = toy_trace()["windows"][0]["steps"]
    with opened(browser, built_in, "#t=4&s=enqueue&lang=en") as page:
        names = page.eval_on_selector_all(".slot", "e => e.map(n => n.innerText.split('\\n')[0])")
        assert names == ["k1", "k2", "k3", "k4"]
        assert "leaves" in page.get_attribute("#block-0", "aria-label")
        assert "k5" in page.inner_text("#sentence")
        page.keyboard.press("k")
        assert "key=4" in page.url
        assert page.inner_text("#key-story").startswith("k5: born in step 4")
        rows = page.eval_on_selector_all(
            "#key-life tbody tr",
            "e => e.map(r => [...r.cells].map(c => c.querySelector('.num')?.dataset.value ?? c.textContent))",
        )
        assert [int(row[0]) for row in rows] == [5, 6, 7, 8]
        assert [int(row[1]) for row in rows] == [1, 2, 3, 4]
        assert [row[7] for row in rows] == ["", "", "", "leaves"]
        for row in rows:
            step = steps[int(row[0])]
            cosines = unpack(step["negatives"], 1, -1)[0].astype(np.float64)
            slot = 0  # k5 took k1's place
            assert float(row[2]) == cosines[slot]
            loss = by_hand(step, 0, 0.2)
            p = math.exp(cosines[slot] / 0.2 - (loss + float(unpack(step["positive"], -1)[0]) / 0.2))
            assert float(row[3]) == pytest.approx(p, rel=1e-9)
        page.locator("#sub-next").click()
        after = page.eval_on_selector_all(".slot", "e => e.map(n => n.innerText.split('\\n')[0])")
        assert after == ["k5", "k2", "k3", "k4"]
        page.locator("#block-1").click()
        assert page.inner_text("#key-story").startswith("k2")
        page.locator("#block-1").focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "block-2"
        page.keyboard.press("Home")
        assert page.evaluate("document.activeElement.id") == "block-0"
    with opened(browser, built_in, "#t=4&key=0&lang=en") as page:
        values = page.eval_on_selector_all("#key-stale .num", "e => e.map(n => +n.dataset.value)")
        recorded = [one["cosines"][0] for step in steps for one in step["staleness"] if one["birth"] == 0]
        assert values == recorded
        assert values[0] == pytest.approx(1, abs=1e-9)


@pytest.mark.slow
def test_what_if_is_pythons_to_a_millionth(browser: Any, built_in: Path) -> None:
    row = toy_trace()["windows"][0]["steps"][8]
    with opened(browser, built_in, "#t=8&s=loss&lang=en") as page:

        def loss() -> float:
            return float(page.get_attribute("#whatif-loss .num", "data-value"))

        assert loss() == pytest.approx(by_hand(row, 0, 0.2), abs=1e-6)
        assert loss() == pytest.approx(row["loss"], abs=1e-5)  # the training's own, in float32
        page.keyboard.press("t")
        assert page.evaluate("document.activeElement.id") == "temperature"
        for T in (0.01, 0.07, 0.5, 1.0):
            page.locator("#temperature").fill(str(T))
            assert loss() == pytest.approx(by_hand(row, 0, T), abs=1e-6), T
            assert f"T={T:g}" in page.url
        page.locator("#temperature").fill("0.5")
        for newest in (0, 1, 2, 3):
            page.locator("#newest").fill(str(newest))
            youngest = [(row["pointer"] - 1 - i) % 4 for i in range(newest)]
            assert loss() == pytest.approx(by_hand(row, 0, 0.5, youngest), abs=1e-6), newest
        assert "Not what happened" in page.inner_text("#whatif-same")
        page.locator("#whatif-reset").click()
        assert loss() == pytest.approx(by_hand(row, 0, 0.2), abs=1e-6)


@pytest.mark.slow
def test_both_orders_give_the_same_losses(browser: Any, built_in: Path) -> None:
    with opened(browser, built_in, "#src=0&with=1&lang=en") as page:
        assert "In 12 of 12 common steps" in page.inner_text("#compare-equal")
        page.locator("#other").select_option("2")
        assert "In 2 of 12 common steps" in page.inner_text("#compare-equal")
    with opened(browser, built_in, "#src=1&t=6&s=ema&lang=en") as page:
        assert page.inner_text("#subs button >> nth=1") == "2 EMA"
        assert "moco_step_ema_first" in page.inner_text("#card-code")
        assert check_numbers(page, toy_trace(order="ema-first")["windows"][0]["steps"][6]) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
def test_accessible_and_in_one_language(browser: Any, built_in: Path, language: str) -> None:
    for hash_ in (f"#t=5&s=loss&key=4&lang={language}", f"#t=5&s=next&with=2&learn=3&lang={language}"):
        for width in (1280, 390):
            with opened(browser, built_in, hash_, width=width) as page:
                assert page.get_attribute("html", "lang") == language
                assert accessibility(page) == []
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                han = re.search(r"[\u4e00-\u9fff]", page.inner_text("#main"))
                assert (han is not None) == (language == "zh")
    with opened(browser, built_in, f"#lang={language}") as page:
        page.locator(f"#lang-{'zh' if language == 'en' else 'en'}").click()
        assert page.get_attribute("html", "lang") != language
        page.keyboard.press("?")
        assert page.is_visible("#help")
        assert accessibility(page) == []
        page.keyboard.press("Escape")
        assert not page.is_visible("#help")


@pytest.mark.slow
def test_the_course_answers_from_the_trace(browser: Any, built_in: Path) -> None:
    with opened(browser, built_in, "#lang=en") as page:
        page.keyboard.press("l")
        pages = page.eval_on_selector_all("#learn-page option", "e => e.length")
        assert pages == 7 + 10 + 5
        for number in range(pages):
            if number < 17:
                assert page.inner_text("#learn-why") == "Decide first; then the trace answers."
                assert page.locator("#learn .right").count() == 0
                page.locator("#choice-0").click()
                assert page.locator("#learn .right").count() == 1
                options = page.eval_on_selector_all("#learn .choices button", "e => e.map(n => n.innerText)")
                assert len(set(options)) == len(options)
            assert len(page.inner_text("#learn-why")) > 60
            if number == 3:
                assert page.inner_text("#learn .right").startswith("k2")  # in step 5 of four keys
            if number < pages - 1:
                page.locator("#learn-next").click()
    with opened(browser, built_in, "#learn=8&quiz=0&hideText=1&projector=1&lang=en") as page:
        assert not page.is_visible("#learn")
        assert not page.is_visible("#sentence")


@pytest.mark.slow
def test_play_can_be_stopped(browser: Any, built_in: Path) -> None:
    with opened(browser, built_in, "#t=3&s=views&lang=en") as page:
        page.keyboard.press("Space")
        page.wait_for_selector("#sub-k[aria-current=step]", timeout=10_000)
        page.keyboard.press("Escape")
        assert page.get_attribute("#play", "aria-pressed") == "false"


@pytest.mark.slow
def test_a_trace_of_4096_keys(browser: Any, tmp_path: Path) -> None:
    trace = large_trace()
    text, data_bytes = stepper_html([trace, toy_trace()])
    assert data_bytes < 3_000_000
    assert len(text.encode()) - data_bytes < 250_000
    path = tmp_path / "moco-steps.html"
    path.write_text(text, "utf-8")
    steps = trace["windows"][0]["steps"]
    with opened(browser, path, "#t=17&s=next&q=2&lang=en") as page:
        assert page.locator(".slot").count() == 16
        assert check_numbers(page, steps[17]) >= 12
        value = float(page.get_attribute("#whatif-loss .num", "data-value"))
        assert value == pytest.approx(by_hand(steps[17], 2, 0.2), abs=1e-6)
        page.locator("#temperature").fill("0.05")
        value = float(page.get_attribute("#whatif-loss .num", "data-value"))
        assert value == pytest.approx(by_hand(steps[17], 2, 0.05), abs=1e-6)
    with opened(browser, path, f"#t=10&s=logits&key={2 * 256 + 1}&lang=en") as page:  # the second key of step 2
        ages = page.eval_on_selector_all("#key-life tbody tr", "e => e.map(r => +r.cells[1].innerText)")
        assert ages == list(range(1, 16))  # the window ends before it leaves


@pytest.mark.slow
def test_a_trace_of_65536_keys(browser: Any, tmp_path: Path) -> None:
    """The step that fills the queue and those around it; all of it within the size, exact, and walked through."""
    trace = large_trace(K=65_536, N=512, D=16, trace="126-130")
    steps = trace["windows"][0]["steps"]
    assert [step["left"] for step in steps] == [0, 0, 512, 512, 512]
    assert [step["detail"] for step in steps].count("full") == 4
    text, data_bytes = stepper_html([trace, toy_trace()])
    assert data_bytes < 3_000_000
    path = tmp_path / "moco-steps.html"
    path.write_text(text, "utf-8")
    last = steps[-1]
    assert last["detail"] == "full"
    with opened(browser, path, "#t=130&s=logits&lang=en") as page:
        assert page.locator(".slot").count() == 128
        assert check_numbers(page, last) >= 12
        for T in (0.2, 0.07):
            page.locator("#temperature").fill(str(T))
            value = float(page.get_attribute("#whatif-loss .num", "data-value"))
            assert value == pytest.approx(by_hand(last, 0, T), abs=1e-6)
        page.locator("#sub-logits").click()  # away from the slider, which the arrows would move
        for _ in range(6):
            page.keyboard.press("ArrowRight")
        assert page.get_attribute("#sub-next", "aria-current") == "step"
        assert page.inner_text("#step-number") == "130"
        page.keyboard.press("k")
        assert "k130.0: born in step 130" in page.inner_text("#key-story")


@pytest.mark.slow
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_frame_as_a_png(browser: Any, built_in: Path, tmp_path: Path, language: str) -> None:
    with opened(browser, built_in, f"#t=6&s=enqueue&lang={language}") as page:
        page.locator("#mode-png").focus()
        with page.expect_download() as begun:
            page.keyboard.press("Enter")
        assert begun.value.suggested_filename == "step-6-enqueue.png"
        begun.value.save_as(tmp_path / "frame.png")
    with Image.open(tmp_path / "frame.png") as image:
        assert (image.format, image.size) == ("PNG", (2400, 1680))
        pixels = np.asarray(image.convert("RGB")).astype(np.int64)
    assert (pixels[5, 5] == 255).all()
    for top, left in ((0, 0), (380, 40), (380, 840), (380, 1560), (1040, 40), (1040, 1560)):  # title and five drawings
        part = pixels[top : top + 300, left : left + 600]
        assert (part.min(axis=2) < 200).mean() > 0.003, (top, left)


@pytest.mark.slow
def test_names_in_the_plane_cover_nothing(browser: Any, built_in: Path) -> None:
    boxes = """e => e.map(n => { const b = n.getBBox(); return [b.x, b.y, b.x + b.width, b.y + b.height]; })"""
    with opened(browser, built_in, "#t=0&s=logits&lang=en") as page:
        for step in range(12):
            names = page.eval_on_selector_all("#card-plane text", boxes)
            # The height of a line is more than that of its letters: what must not overlap is the middle of it.
            names = [(x0 + 1, y0 + (y1 - y0) / 4, x1 - 1, y1 - (y1 - y0) / 4) for x0, y0, x1, y1 in names]
            assert len(names) >= min(step, 4) + 1
            for i, one in enumerate(names):
                assert 0 <= one[0] < one[2] <= 260
                for other in names[:i]:
                    apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
                    assert apart, (step, one, other)
            page.keyboard.press("Shift+ArrowRight")


@pytest.mark.slow
def test_a_long_life_is_followed_lightly(browser: Any, tmp_path: Path) -> None:
    """64 steps of life: detail at the start, in the middle and at the end, and the first keys all the way."""
    trace = large_trace(K=512, N=8, name="<b>long</b>")
    steps = trace["windows"][0]["steps"]
    assert [step["detail"] for step in steps].count("full") == 36
    text, data_bytes = stepper_html([trace, toy_trace()])
    assert data_bytes < 3_000_000
    path = tmp_path / "moco-steps.html"
    path.write_text(text, "utf-8")
    with opened(browser, path, "#t=14&key=1&lang=en") as page:
        assert "recorded lightly" in page.inner_text("#formula")
        rows = page.eval_on_selector_all("#key-life tbody tr", "e => e.map(r => r.cells[5].innerText)")
        assert len(rows) == 64
        assert "–" not in rows
        assert "age 64: " in page.inner_text("#key-stale")
        page.keyboard.press("ArrowRight")
        assert accessibility(page) == []


@pytest.mark.slow
def test_hostile_names_run_no_script(browser: Any, tmp_path: Path) -> None:
    """Fifty texts as file name, label, run name and setting: none is taken for markup."""
    trace = toy_trace()
    for image, text in zip(trace["images"] * 5, HOSTILE, strict=False):
        image |= {"name": text + image.get("name", "")[:4], "label": text}
    for number, text in enumerate(HOSTILE):
        trace["images"].append({"id": str(number), "name": text, "label": text, "thumb": trace["images"][0]["thumb"]})
    others = []
    for text in HOSTILE:
        one = json.loads(json.dumps(trace))
        one["source"] = {"kind": "run", "name": text, "data": text}
        one["config"] |= {"backbone": text, "recipe": text}
        one["windows"][0]["name"] = text
        one["windows"][0]["steps"] = one["windows"][0]["steps"][:6]
        for layer in one["windows"][0]["steps"][5]["layers"]:
            layer["name"] = text
        names = [{"name": text, "label": text}, {"name": text[::-1], "label": text * 2}]
        for image, given in zip(one["images"], names * 20, strict=False):
            image |= given
        others.append(one)
    path = tmp_path / "moco-steps.html"
    path.write_text(stepper_html([*others, toy_trace()])[0], "utf-8")
    with opened(browser, path, "#t=5&s=logits&key=2&lang=en") as page:
        for number in range(len(HOSTILE)):
            page.locator("#source").select_option(str(number))
            page.locator("#sub-loss").click()
            assert page.locator("script").count() == 4
            assert page.locator("main iframe, main object, main embed, main form, main link, main video").count() == 0
        assert page.locator("#source option").count() == len(HOSTILE) + 1
    with opened(
        browser, path, "#src=<img src=x onerror=alert(1)>&t=alert(1)&key=__proto__&lang=<script>&T=9e9"
    ) as page:
        assert page.inner_text("#step-number")


@pytest.mark.slow
def test_from_the_command_line(browser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = npz(tmp_path / "data.npz")
    for name, seed in (("a", "0"), ("b", "1")):
        words = ["pretrain", str(data), "--out", str(tmp_path / name), *flags(), "--quiet", "--seed", seed]
        assert main([*words, "--trace", "first,last"]) == 0
    assert main(["stepper", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "moco-steps.html" in capsys.readouterr().out
    trace = json.loads((tmp_path / "a" / "trace.json").read_text())
    with opened(browser, tmp_path / "a" / "moco-steps.html", "#with=1&t=3&lang=en") as page:
        assert page.locator("#compare-equal").is_visible()
        assert check_numbers(page, trace["windows"][0]["steps"][3]) >= 12


def test_what_can_not_be_stepped(tmp_path: Path) -> None:
    data = npz(tmp_path / "data.npz")
    assert main(["pretrain", str(data), "--out", str(tmp_path / "a"), *flags(epochs=1), "--quiet"]) == 0
    with pytest.raises(UsageError, match=r"trace\.json is missing"):
        api.stepper(tmp_path / "a")
    with pytest.raises(UsageError, match="Got 3; name two"):
        api.stepper([tmp_path / "a"] * 3)
    with pytest.raises(UsageError, match="does not exist"):
        api.stepper(tmp_path / "nowhere")


def test_the_source_beside_the_numbers_is_what_runs() -> None:
    for order, ema in (("paper", "4"), ("ema-first", "4")):
        source = step_source(order)
        assert set(source["parts"]) == {"1", "2", "3", "4", "5"}
        lines = [source["lines"][i] for i in source["parts"][ema]]
        assert lines[1] == "ema_update_(pair.theta_k, pair.theta_q, m)"
    order = list(step_source("ema-first")["parts"])
    assert order == ["4", "1", "2", "3", "5"]


# ------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("page", strings.PAGES)
def test_both_languages_say_everything(page: str) -> None:
    for key, both in strings.table(page).items():
        assert set(both) == set(strings.LANGUAGES), key
        assert all(text.strip() for text in both.values()), key
        if strings.values_named(both["en"]):
            assert strings.values_named(both["en"]) == strings.values_named(both["zh"]), key
    assert strings.load(page, "zh").keys() == strings.load(page, "en").keys()


def used(script: str, function: str) -> set[str]:
    return set(re.findall(rf'\b{function}\("([a-z_0-9A-Z]+)"[,)]', script))


def test_no_text_is_missing() -> None:
    """Every text that scripts and templates ask for is in the tables, those put together from parts included."""
    folder = Path(api.__file__).parent.parent / "reporting" / "templates"
    scripts = "\n".join(path.read_text("utf-8") for path in folder.glob("*.js"))
    stepper, learn, report = (strings.table(page) for page in ("stepper", "learn", "report"))
    wanted = (
        used(scripts, "say") | used(scripts, "heading") | {f"{kind}_{sub}" for kind in ("sub", "say") for sub in SUBS}
    )
    assert wanted <= set(stepper)
    assert used(scripts, "teach") <= set(learn)
    pages = re.findall(r'\{ id: "(\w+)"(, quiz: true|, claim: true)?', scripts)
    assert len(pages) >= 22
    for name, kind in [page for page in pages if f"{page[0]}_title" in learn]:
        parts = ("claim", "truth") if "claim" in kind else ("ask", "why") if "quiz" in kind else ("ask", "why", "body")
        assert all(f"{name}_{part}" in learn for part in parts), name
    assert used((folder / "report.html").read_text("utf-8"), "t") <= set(report)


def test_speaker_escapes_values() -> None:
    said = Speaker("report")("not_completed", state="<script>", step=1, total=2)
    assert "<script>" not in said
    assert "&lt;script&gt;" in said
