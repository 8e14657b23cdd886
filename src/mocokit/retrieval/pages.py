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
STATIC_THUMBNAIL = 96


def facts(index: SearchIndex) -> dict[str, Any]:
    """What the page says about the index; nothing about where it lies."""
    found = {
        key: value for key, value in index.summary().items() if key not in ("index", "generation", "effort", "step")
    }
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
    """The page with all images and vectors inside. Raises UsageError for an index of more than 5,000 images.

    Vectors are kept as 16-bit integers, so a score differs from the index's by 1e-4 at most.
    """
    rows = index.rows.alive.nonzero()[0]
    if len(rows) > STATIC_LIMIT:
        raise UsageError(
            f"A page without a server holds up to {STATIC_LIMIT:,} images; the index has {len(rows):,}. Use `mocokit "
            "search serve`."
        )
    images = []
    for row in rows.tolist():
        one = hit(index, row, 0.0)
        small = pictures.thumbnail(one.id, STATIC_THUMBNAIL)
        kind, data = small if small is not None else ("image/png", b"")
        shown = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        images.append({key: value for key, value in one.to_dict().items() if key != "score"} | {"thumbnail": shown})
    vectors = (index.neighbours.vectors(rows) * 32767).round().clip(-32767, 32767).astype("<i2")
    saved = {
        "facts": facts(index),
        "images": images,
        "dim": index.neighbours.dim,
        "vectors": base64.b64encode(vectors.tobytes()).decode(),
    }
    return page({"strings": strings.table("search"), "limit": 0, "saved": saved})[0]


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
