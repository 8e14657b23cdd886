"""Self-contained HTML pages: one file, pictures inside it, nothing fetched, every value escaped."""

from __future__ import annotations

import base64
import io
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image


def render(template: str, **values: Any) -> str:
    """The page `templates/<template>` with `values`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mocokit.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["name"] = printable
    return environment.get_template(template).render(**values)


def printable(text: str) -> str:
    """A file name as it can stand on a page: odd bytes and control characters escaped."""
    shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in shown)


def picture_uri(rgb: npt.NDArray[np.uint8], side: int = 112) -> str:
    """A thumbnail of uint8 [H, W, 3] in a data URI, its longer side `side` pixels (small pictures are enlarged)."""
    image = Image.fromarray(np.ascontiguousarray(rgb))
    scale = side / max(image.size)
    size = (max(1, round(image.size[0] * scale)), max(1, round(image.size[1] * scale)))
    smooth = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    buffer = io.BytesIO()
    image.resize(size, smooth, reducing_gap=3.0).save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def figure_uri(figure: Figure) -> str:
    """A figure as PNG in a data URI."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
