"""What every page shares: templates that escape, a policy without network, two languages, pictures as data URLs.

A page is one file that opens from a disk. Its policy allows the page's own script by hash and nothing else to run, so a
file name, label or setting stays text whatever it says.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import io
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from PIL import Image

from mocokit import strings

UInt8 = npt.NDArray[np.uint8]


def read_template(name: str) -> str:
    """A file of `templates/` as text."""
    return (importlib.resources.files("mocokit.reporting") / "templates" / name).read_text("utf-8")


def render(template: str, script: str, **values: Any) -> str:
    """A page from a template. script: the page's only script; the template puts it where it says `{{ script }}`."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_template), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    style = Markup(read_template("page.css"))  # noqa: S704 our own files are the only markup that is not escaped
    return environment.get_template(template).render(
        script=Markup(script),  # noqa: S704
        policy=policy(script),
        page_style=style,
        **values,
    )


def policy(script: str) -> str:
    """The content security policy of a page with this script: no network, no other script, pictures as data only."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def embedded(value: Any) -> Markup:
    """JSON for a `<script type="application/json">`: no `<`, `>` or `&` is left that HTML could read."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign, escape in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):
        text = text.replace(sign, escape)
    return Markup(text)  # noqa: S704


class Speaker:
    """Says a page's texts in both languages at once; the page shows one of them.

    `t(key, name=value)` is markup: one span a language, values escaped.
    """

    def __init__(self, page: str) -> None:
        self.texts = strings.table(page)

    def __call__(self, key: str, **values: Any) -> Markup:
        both = self.texts[key]
        shown = {name: html.escape(str(value)) for name, value in values.items()}
        spans = [
            f'<span lang="{language}">{html.escape(both[language], quote=False).format(**shown)}</span>'
            for language in strings.LANGUAGES
        ]
        return Markup("".join(spans))  # noqa: S704 every part of it was escaped above


def data_url(pixels: UInt8, longest: int = 64) -> str:
    """A picture uint8 [h, w, 3] as a PNG data URL, made smaller where a side is longer than `longest`."""
    image = Image.fromarray(pixels)
    image.thumbnail((longest, longest), Image.Resampling.BOX)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return png_url(buffer.getvalue())


def png_url(data: bytes) -> str:
    """The bytes of a PNG as a data URL."""
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def spoken(value: Any) -> Any:
    """The same JSON values with bytes that are no text (surrogates in file names) shown as question marks."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {spoken(key): spoken(inner) for key, inner in value.items()}
    return [spoken(inner) for inner in value] if isinstance(value, list | tuple) else value
