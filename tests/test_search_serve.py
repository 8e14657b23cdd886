"""The search page's server: what it answers, whom it answers, and a thousand requests it was not made for."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import mocokit
from mocokit import files
from mocokit.cli import main
from mocokit.data.randomness import sample_id
from mocokit.errors import UsageError
from mocokit.retrieval import serve
from mocokit.retrieval.index import open_index
from mocokit.retrieval.openapi import openapi
from mocokit.retrieval.pages import server_page
from tests.toy import OPTIONS, contents, npz, pictures, search_server

pytest.importorskip("starlette", reason="the extra `serve` is not installed")
from starlette.testclient import TestClient

TOKEN = "fedcba9876543210"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, thirty pictures and an index; two names are hostile, one picture has gone since."""
    folder = tmp_path_factory.mktemp("place")
    mocokit.pretrain(str(npz(folder / "toy.npz", count=16)), folder / "run", quiet=True, **(OPTIONS | {"epochs": 1}))
    photos = folder / "photos"
    for number, picture in enumerate(pictures(30, side=40)):
        (photos / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(photos / "ab"[number % 2] / f"{number:02d}.png")
    (photos / "a" / "00.png").rename(photos / "a" / "<script>alert(1)<\\script>.png")
    Image.fromarray(pictures(1, side=300)[0]).save(photos / "b" / "large.jpg", exif=_exif())
    (folder / "secret.txt").write_text("secret")
    mocokit.search_build(folder / "run", photos, folder / "index", quiet=True)
    (photos / "b" / "29.png").unlink()
    return folder


def _exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x010E] = "secret"
    return exif


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[TestClient]:
    app = mocokit.search_app(place / "index", TOKEN, quiet=True)
    with TestClient(app, base_url="http://127.0.0.1:8765", headers={"Authorization": f"Bearer {TOKEN}"}) as made:
        yield made


def png(seed: int = 0, side: int = 40) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pictures(1, side=side, seed=seed)[0]).save(out, "PNG")
    return out.getvalue()


# ---------------------------------------------------------------------------------------------------- answers


def test_a_stored_image_asks_and_pages_follow_one_another(client: TestClient, place: Path) -> None:
    sample = str(sample_id("a/02.png"))
    expected = mocokit.search_query(place / "index", ids=[int(sample)], k=100)[0].hits
    found: list[str] = []
    skip = 0
    while True:
        reply = client.get("/api/similar", params={"id": sample, "k": 7, "skip": skip}).json()
        assert reply["asked"]["id"] == sample
        found += [hit["id"] for hit in reply["hits"]]
        skip += 7
        if not reply["more"]:
            break
    assert found == [str(hit.id) for hit in expected]


def test_an_uploaded_picture_asks_and_nothing_is_written(client: TestClient, place: Path) -> None:
    before = contents(place)
    data = (place / "photos" / "a" / "04.png").read_bytes()
    reply = client.post("/api/similar", content=data, params={"k": 3, "label": "a"}).json()
    assert reply["hits"][0]["name"] == "a/04.png"
    assert reply["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    assert {hit["label"] for hit in reply["hits"]} == {"a"}
    assert reply["asked"] is None
    assert contents(place) == before


def test_browsing_and_the_index(client: TestClient) -> None:
    about = client.get("/api/index").json()
    assert (about["images"], about["labels"]) == (31, [{"name": "a", "count": 15}, {"name": "b", "count": 16}])
    first = client.get("/api/images", params={"k": 20, "label": "b"}).json()
    rest = client.get("/api/images", params={"k": 20, "skip": 20}).json()
    assert (len(first["hits"]), first["more"], len(rest["hits"]), rest["more"]) == (16, False, 11, False)


def test_pictures_are_encoded_anew_without_metadata(client: TestClient, place: Path) -> None:
    sample = sample_id("b/large.jpg")
    small, full = client.get(f"/api/thumbnail/{sample}"), client.get(f"/api/picture/{sample}")
    assert Image.open(io.BytesIO(small.content)).size == (192, 192)
    assert Image.open(io.BytesIO(full.content)).size == (300, 300)
    assert b"secret" in (place / "photos" / "b" / "large.jpg").read_bytes()
    assert b"secret" not in small.content + full.content
    assert small.headers["content-type"] == "image/jpeg"
    tiny = client.get(f"/api/thumbnail/{sample_id('a/02.png')}")
    assert tiny.headers["content-type"] == "image/png"
    pixels = np.asarray(Image.open(io.BytesIO(tiny.content)))
    assert np.array_equal(pixels, np.asarray(Image.open(place / "photos" / "a" / "02.png")))
    assert client.get(f"/api/thumbnail/{sample_id('b/29.png')}").status_code == 404  # gone since the build
    assert client.get("/api/thumbnail/5").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "code", "says"),
    [
        ("GET", "/api/similar", 400, "id must be"),
        ("GET", "/api/similar?id=..%2F..%2Fsecret.txt", 400, "id must be"),
        ("GET", "/api/similar?id=77", 404, "no image"),
        ("GET", "/api/similar?id=1&k=0", 400, "k must be"),
        ("GET", "/api/images?k=201", 400, "k must be"),
        ("GET", "/api/images?skip=-1", 400, "skip must be"),
        ("GET", "/api/images?label=nothing", 400, "no label"),
        ("GET", "/api/images?group=nothing", 400, "no group"),
        ("GET", "/api/thumbnail/..%2F..%2Fsecret.txt", 404, ""),
        ("GET", "/api/thumbnail/abc", 400, "id must be"),
        ("GET", "/photos/a/02.png", 404, ""),
        ("GET", "/../secret.txt", 404, ""),
        ("DELETE", "/api/similar", 405, ""),
        ("PUT", "/", 405, ""),
        ("POST", "/api/images", 405, ""),
    ],
)
def test_mistakes_are_answered_with_a_sentence(
    method: str, path: str, code: int, says: str, client: TestClient
) -> None:
    reply = client.request(method, path)
    assert reply.status_code == code
    assert says in reply.json()["error"]


def test_pictures_that_cannot_be_read_are_refused_with_the_reason(client: TestClient) -> None:
    for data, says in (
        (b"", "empty file"),
        (b"<html>", "looks like HTML"),
        (png()[:60], ""),
        (_bomb(), "exceeds limit"),
        (b"%PDF-1.4", "PDF"),
    ):
        reply = client.post("/api/similar", content=data)
        assert reply.status_code == 400
        assert says in reply.json()["error"]
        assert str(Path.cwd()) not in reply.json()["error"]


def _bomb() -> bytes:
    out = io.BytesIO()
    Image.new("1", (14_000, 14_000)).save(out, "PNG")
    return out.getvalue()


def test_an_upload_is_cut_off_at_the_limit(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    from mocokit.data.decode import DecodeLimits

    monkeypatch.setattr(serve, "DecodeLimits", lambda: DecodeLimits(max_bytes=1000))
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        while read < 10**7:
            read += 500
            yield b"x" * 500

    assert client.post("/api/similar", content=b"x" * 1001).status_code == 413
    assert client.post("/api/similar", content=endless()).status_code == 413
    assert client.post("/api/similar", content=png(), headers={"Content-Length": "-5"}).status_code in (400, 413)


# ------------------------------------------------------------------------------------------------ who is answered


def test_without_the_token_nothing_is_told(place: Path) -> None:
    app = mocokit.search_app(place / "index", TOKEN, quiet=True)
    with TestClient(app, base_url="http://127.0.0.1:8765") as stranger:
        for path in (
            "/",
            "/api/index",
            "/openapi.json",
            f"/api/thumbnail/{sample_id('a/02.png')}",
            "/?token=wrong",
            "/x",
        ):
            reply = stranger.get(path)
            assert reply.status_code == 401, path
            assert "token" in reply.json()["error"]
        assert stranger.get("/api/index", headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert stranger.get("/api/index", headers={"Authorization": f"Basic {TOKEN}"}).status_code == 401
        reply = stranger.get(f"/?token={TOKEN}", follow_redirects=False)
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        assert "HttpOnly" in reply.headers["set-cookie"]
        assert "samesite=strict" in reply.headers["set-cookie"].lower()
        assert stranger.get("/api/index").status_code == 200  # by the cookie


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8765", "192.168.1.5:8765", "", "localhost@x"])
def test_other_hosts_are_refused(host: str, client: TestClient) -> None:
    assert client.get("/api/index", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "[::1]:8765"])
def test_this_machine_is_answered(host: str, client: TestClient) -> None:
    assert client.get("/api/index", headers={"Host": host}).status_code == 200


def test_every_reply_is_locked_down(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    for path in ("/", "/api/index", "/nowhere", "/api/thumbnail/1"):
        reply = client.get(path)
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert reply.headers["x-frame-options"] == "DENY"


def test_the_page_asks_nobody_else() -> None:
    html, _ = server_page()
    assert not re.findall(r"https?://(?!www\.w3\.org)", html)
    assert "innerHTML" not in html
    assert "eval(" not in html
    json.loads(re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)[0])


# --------------------------------------------------------------------------------------------------------- API


def test_the_openapi_document_is_what_the_server_does(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document == openapi()
    paths = {route.path.replace("{sample}", "{id}") for route in client.app.routes if route.path.startswith("/api")}  # type: ignore[attr-defined]
    assert set(document["paths"]) == paths
    hit = document["components"]["schemas"]["Hit"]
    reply = client.get("/api/similar", params={"id": str(sample_id("a/02.png"))}).json()
    assert set(reply) == set(document["components"]["schemas"]["Hits"]["required"])
    for one in [*reply["hits"], reply["asked"]]:
        assert set(one) == set(hit["required"])
    about = client.get("/api/index").json()
    assert set(about) == set(document["components"]["schemas"]["Index"]["required"])


# --------------------------------------------------------------------------------------------------------- fuzz

_ODD = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["../../secret.txt", "..%2f..%2fsecret.txt", "/etc/passwd", "\x00", "%00", "-1", "1e9", "9" * 400, "٣", "NaN",
         "𝟙", "' OR 1=1", "<script>", "\ud800", "%ff%fe", "a/02.png", "file:///etc/passwd"]
    ),
    st.integers(-(2**70), 2**70).map(str),
)  # fmt: skip
_PATHS = st.one_of(
    st.sampled_from(["/", "/api/index", "/api/images", "/api/similar", "/openapi.json"]),
    st.builds(lambda kind, odd: f"/api/{kind}/{odd}", st.sampled_from(["thumbnail", "picture"]), _ODD),
    st.builds(lambda odd: f"/{odd}", _ODD),
)
_BODIES = st.one_of(
    st.none(),
    st.binary(max_size=300),
    st.builds(lambda cut: png()[:cut], st.integers(0, 2000)),
    st.builds(lambda place, value: _flipped(place, value), st.integers(0, 2000), st.integers(0, 255)),
)


def _flipped(place: int, value: int) -> bytes:
    data = bytearray(png())
    data[place % len(data)] = value
    return bytes(data)


@pytest.mark.slow
@settings(
    max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(
    st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH", "BREW"]),
    _PATHS,
    st.dictionaries(st.sampled_from(["id", "k", "skip", "label", "group", "token", "x"]), _ODD, max_size=4),
    _BODIES,
    st.dictionaries(
        st.sampled_from(
            ["Content-Type", "Content-Length", "Range", "Cookie", "Accept", "If-None-Match", "X-Forwarded-Host"]
        ),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
        max_size=2,
    ),
)
def test_a_thousand_odd_requests(
    client: TestClient, method: str, path: str, query: dict[str, str], body: bytes | None, headers: dict[str, str]
) -> None:
    """No 500, nothing from outside the index, no hang."""
    from urllib.parse import quote, urlencode

    address = quote(path, safe="/%", errors="replace") + "?" + urlencode(query, errors="replace")
    began = time.monotonic()
    reply = client.request(method, address, content=body, headers=headers, follow_redirects=False)
    assert time.monotonic() - began < 10
    assert reply.status_code < 500, (method, address, reply.text)
    assert b"secret" not in reply.content
    assert b"root:" not in reply.content


# ------------------------------------------------------------------------------------------------- a real server


@pytest.mark.slow
def test_a_real_server_listens_on_this_machine_alone_and_ends(place: Path) -> None:
    import signal
    import urllib.request

    with search_server(place / "index", TOKEN, seconds=60) as (process, address):
        assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/\?token={TOKEN}", address)
        base = address.partition("/?")[0]
        request = urllib.request.Request(f"{base}/api/index", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=20) as reply:
            assert json.load(reply)["images"] == 31
        port = int(base.rpartition(":")[2])
        local = f"0100007F:{port:04X}"
        listening = [line.split()[1] for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
                     if line.split()[3] == "0A"]  # fmt: skip
        assert local in listening
        assert f"00000000:{port:04X}" not in listening
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) in (0, 130)


def test_what_cannot_be_served(place: Path, tmp_path: Path) -> None:
    for options, says in (
        ({"port": 70_000}, "--port"),
        ({"token": "short"}, "--token"),
        ({"token": "a b c d e f"}, "--token"),
    ):
        with pytest.raises(UsageError, match=says):
            mocokit.search_serve(place / "index", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not exist"):
        mocokit.search_app(tmp_path / "no", TOKEN)


# --------------------------------------------------------------------------------------------- without a server


def test_a_page_without_a_server_holds_everything(place: Path, tmp_path: Path) -> None:
    out = mocokit.search_page(place / "index", tmp_path / "page.html", quiet=True)
    html = out.read_text("utf-8")
    island = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[0]
    saved = json.loads(island)["saved"]
    assert "<" not in island
    assert str(place) not in html
    assert [one["name"] for one in saved["images"]].count("a/<script>alert(1)<\\script>.png") == 1
    import base64

    vectors = np.frombuffer(base64.b64decode(saved["vectors"]), "<i2").reshape(31, -1) / 32767
    index = open_index(place / "index")
    stored = index.neighbours.vectors()
    assert np.abs(vectors @ vectors.T - stored @ stored.T).max() < 1e-3
    assert json.loads(island)["strings"]["search.title"]["zh"] == "以图搜图"


def test_too_many_images_for_one_page(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mocokit.retrieval import pages

    monkeypatch.setattr(pages, "STATIC_LIMIT", 30)
    with pytest.raises(UsageError, match="search serve"):
        mocokit.search_page(place / "index", tmp_path / "page.html", quiet=True)
    with pytest.raises(UsageError, match=r"\.html"):
        mocokit.search_page(place / "index", tmp_path / "page.txt", quiet=True)


def test_the_page_command(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "page", str(place / "index"), "--out", str(tmp_path / "p.html"), "-q"]) == 0
    assert "p.html" in capsys.readouterr().out


def test_pictures_that_are_gone_are_warned_about(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(place / "index", tmp_path / "index")
    shutil.copytree(place / "run", tmp_path / "run")
    mocokit.search_build(tmp_path / "run", npz(tmp_path / "toy.npz", count=8), tmp_path / "other", quiet=True)
    (tmp_path / "toy.npz").unlink()
    capsys.readouterr()
    mocokit.search_app(tmp_path / "other", TOKEN, quiet=True)
    assert "toy.npz can't be shown" in capsys.readouterr().err
    assert files.read_json(tmp_path / "other" / "index.json")["format"] == 1
