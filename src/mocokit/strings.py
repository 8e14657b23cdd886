"""What pages say, in Chinese and in English: one table, `strings.json`, of key -> {"zh", "en"}."""

from __future__ import annotations

import json
from importlib.resources import files

LANGUAGES = ("zh", "en")


def table(prefix: str = "") -> dict[str, dict[str, str]]:
    """The strings whose keys begin with `prefix`, by key and language."""
    everything = json.loads((files("mocokit") / "strings.json").read_text("utf-8"))
    return {key: texts for key, texts in everything.items() if key.startswith(prefix)}
