"""The search page as one HTML file: for the server, or with everything inside for `file://`."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files as resources
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from mocokit import strings
from mocokit.data.decode import DecodeLimits
from mocokit.errors import UsageError
from mocokit.retrieval.index import SearchIndex
from mocokit.retrieval.pictures import Pictures
from mocokit.retrieval.query import hit

STATIC_LIMIT = 5_000
"""A page without a server holds at most so many images."""
STATIC_CLIPS = 1_000
"""Or so many clips, each with a strip and a moving preview."""
STATIC_THUMBNAIL, STATIC_STRIP = 96, 192


def facts(index: SearchIndex) -> dict[str, Any]:
    """What the page says about the index; nothing about where it lies."""
    found = {
        key: value for key, value in index.summary().items() if key not in ("index", "generation", "effort", "step")
    }
    found["clips"] = any("clips" in (one.get("reading") or {}) for one in index.facts["sources"])
    return found | {"labels": [{"name": name, "count": count} for name, count in index.rows.labels()]}


def page(data: dict[str, Any]) -> tuple[str, str]:
    """The HTML and its content security policy: no script or style but its own, nothing from anywhere else."""
    here = resources("mocokit.retrieval") / "page"
    template, style, script = ((here / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src 'self' blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    island = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    html = (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            policy=Markup(policy),  # noqa: S704 written here, quotes and all
            style=Markup(style),  # noqa: S704 our own file
            script=Markup(script),  # noqa: S704 our own file
            data=Markup(island),  # noqa: S704 JSON without any character that HTML knows
        )
    )
    return html, policy


def server_page() -> tuple[str, str]:
    """The page that asks a server."""
    return page({"strings": strings.table("search"), "limit": DecodeLimits().max_bytes})


def static_page(index: SearchIndex, pictures: Pictures) -> str:
    """The page with all images and vectors inside. Raises UsageError for more than 5,000 images or 1,000 clips.

    Vectors are kept as 16-bit integers, so a score differs from the index's by 1e-4 at most.
    """
    rows, about = index.rows.alive.nonzero()[0], facts(index)
    limit, what, side = STATIC_LIMIT, "images", STATIC_THUMBNAIL
    if about["clips"]:
        limit, what, side = STATIC_CLIPS, "clips", STATIC_STRIP
    if len(rows) > limit:
        raise UsageError(
            f"A page without a server holds up to {limit:,} {what}; the index has {len(rows):,}. Use `mocokit "
            "search serve`."
        )
    images = []
    for row in rows.tolist():
        one = hit(index, row, 0.0)
        shown = {"thumbnail": _inline(pictures.thumbnail(one.id, side))}
        if about["clips"]:
            shown["preview"] = _inline(pictures.preview(one.id, STATIC_THUMBNAIL))
        images.append({key: value for key, value in one.to_dict().items() if key != "score"} | shown)
    vectors = (index.neighbours.vectors(rows) * 32767).round().clip(-32767, 32767).astype("<i2")
    saved = {
        "facts": about,
        "images": images,
        "dim": index.neighbours.dim,
        "vectors": base64.b64encode(vectors.tobytes()).decode(),
    }
    return page({"strings": strings.table("search"), "limit": 0, "saved": saved})[0]


def _inline(made: tuple[str, bytes] | None) -> str:
    """A picture as a data URL; an empty one where it can't be read."""
    kind, data = made if made is not None else ("image/png", b"")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
