"""The search page in a real browser: keyboard, upload, languages, phone width, hostile names, no outside request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mocokit
from mocokit.data.randomness import sample_id
from tests.browser import chromium
from tests.toy import OPTIONS, npz, search_server

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytestmark = pytest.mark.slow
TOKEN = "fedcba9876543210"
HOSTILE = '<img src=x onerror="window.hacked=1">.png'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pictures of two colours, the index over them, and the page without a server."""
    folder = tmp_path_factory.mktemp("place")
    mocokit.pretrain(str(npz(folder / "toy.npz", count=16)), folder / "run", quiet=True, **(OPTIONS | {"epochs": 1}))
    rng = np.random.default_rng(0)
    for number in range(40):
        kind = ("red", "blue")[number % 2]
        (folder / "photos" / kind).mkdir(parents=True, exist_ok=True)
        picture = rng.integers(0, 120, (48, 48, 3), dtype=np.uint8)
        picture[:, :, 0 if kind == "red" else 2] += 120
        Image.fromarray(picture).save(folder / "photos" / kind / f"{number:02d}.png")
    (folder / "photos" / "red" / "00.png").rename(folder / "photos" / "red" / HOSTILE)
    mocokit.search_build(folder / "run", folder / "photos", folder / "index", quiet=True)
    mocokit.search_page(folder / "index", folder / "page.html", quiet=True)
    return folder


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    with search_server(place / "index", TOKEN) as (_, told):
        yield told


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test when it logs an error or asks another machine."""
    context = browser.new_context(locale="en-US", viewport={"width": 1200, "height": 900})
    made = context.new_page()
    made.set_default_timeout(15_000)
    troubles: list[str] = []
    made.on("console", lambda message: troubles.append(message.text) if _is_trouble(message) else None)
    made.on("pageerror", lambda error: troubles.append(str(error)))
    made.on("request", lambda request: troubles.append(request.url) if not _ours(request.url) else None)
    yield made
    assert troubles == []
    assert made.evaluate("window.hacked") is None
    context.close()


def _is_trouble(message: Any) -> bool:
    """Errors on the console, but for the line a browser writes of any reply that refuses a picture."""
    return message.type == "error" and "status of 400" not in message.text


def _ours(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "blob:", "file:"))


def names(page: Any) -> list[str]:
    return [str(text) for text in page.locator("#grid .name").all_inner_texts()]


def settled(page: Any, text: str) -> None:
    page.wait_for_function("t => document.getElementById('status').textContent.includes(t)", arg=text)


def test_click_filter_pages_and_back(page: Any, address: str) -> None:
    page.goto(address)
    settled(page, "24 pictures on this page")
    assert "token" not in page.url
    page.click("#next")
    settled(page, "16 pictures on this page")
    page.select_option("#filter", "red")
    settled(page, "20 pictures on this page")
    assert set(page.locator("#grid .label").all_inner_texts()) == {"red"}
    page.locator("#grid .find").nth(3).click()
    settled(page, "19 similar pictures")
    scores = [float(text) for text in page.locator("#grid .score span").all_inner_texts()]
    assert scores == sorted(scores, reverse=True)
    assert page.locator("#asked img").is_visible()
    page.go_back()
    settled(page, "20 pictures on this page")
    assert HOSTILE in " ".join(names(page))


def test_an_upload_finds_the_picture_itself(page: Any, address: str, place: Path) -> None:
    page.goto(address)
    settled(page, "pictures on this page")
    page.set_input_files("#file", str(place / "photos" / "blue" / "05.png"))
    settled(page, "similar pictures")
    assert names(page)[0] == "blue/05.png"
    assert page.locator("#grid .score span").first.inner_text() == "1.000"
    page.click("#next")
    settled(page, "16 similar pictures")
    page.set_input_files("#file", {"name": "note.png", "mimeType": "image/png", "buffer": b"<html>no</html>"})
    page.wait_for_selector("#status.error")
    assert "looks like HTML" in page.locator("#status").inner_text()


def test_a_dropped_picture(page: Any, address: str, place: Path) -> None:
    page.goto(address)
    settled(page, "pictures on this page")
    data = list((place / "photos" / "red" / "02.png").read_bytes())
    page.evaluate(
        """(bytes) => { const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", {type: "image/png"}));
        document.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true})); }""",
        data,
    )
    settled(page, "similar pictures")
    assert names(page)[0] == "red/02.png"


def test_everything_by_keyboard(page: Any, address: str) -> None:
    page.goto(address)
    settled(page, "pictures on this page")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.number") == "1"
    page.keyboard.press("ArrowDown")
    below = int(page.evaluate("document.activeElement.dataset.number"))
    assert below > 2
    page.keyboard.press("o")
    page.wait_for_selector("#full[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    settled(page, "similar pictures")
    page.keyboard.press("n")
    settled(page, "15 similar pictures")
    page.keyboard.press("p")
    settled(page, "24 similar pictures")
    page.keyboard.press("b")
    settled(page, "pictures on this page")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.press("Tab")
    page.keyboard.press("?")
    page.wait_for_selector("#keys[open]")


def test_chinese_and_english_say_the_same_places(page: Any, address: str) -> None:
    page.goto(address)
    settled(page, "pictures on this page")
    page.click("#language")
    settled(page, "张图片")
    assert page.title() == "以图搜图"
    assert page.evaluate("document.documentElement.lang") == "zh-CN"
    page.reload()
    settled(page, "张图片")
    page.keyboard.press("l")
    settled(page, "pictures on this page")


def test_a_phone_needs_no_sideways_scrolling(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(address)
    settled(page, "pictures on this page")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    boxes = [page.locator("#grid li").nth(number).bounding_box() for number in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"]
    for button in ("#next", "#browse", "#language"):
        box = page.locator(button).bounding_box()
        assert min(box["width"], box["height"]) >= 24


def test_pictures_are_loaded_only_when_they_come_into_view(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 360, "height": 400})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    settled(page, "24 pictures")
    assert page.locator("#grid img[loading=lazy]").count() == 24


def test_the_page_without_a_server_finds_the_same(page: Any, place: Path) -> None:
    sample = sample_id("red/02.png")
    page.goto(f"file://{place}/page.html#id={sample}")
    settled(page, "24 similar pictures")
    expected = {hit.name: hit.score for hit in mocokit.search_query(place / "index", ids=[sample], k=39)[0].hits}
    scores = [float(text) for text in page.locator("#grid .score span").all_inner_texts()]
    best = sorted(expected.values(), reverse=True)[:24]
    for name, score, true in zip(names(page), scores, best, strict=True):
        assert abs(score - expected[name]) < 0.0007  # three digits, and vectors of 16 bits
        assert abs(score - true) < 0.0007
    assert not page.locator("#drop").is_visible()
    page.select_option("#filter", "blue")
    settled(page, "20 similar pictures")
    page.goto(f"file://{place}/page.html#id=17")
    page.wait_for_selector("#status.error")
