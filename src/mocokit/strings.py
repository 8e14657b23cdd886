"""What pages say, in Chinese and English: one table a page, each entry `{"en": ..., "zh": ...}`.

The tables are JSON files in `texts/`. `{name}` in a text stands for a value; both languages must name the same ones.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from typing import Literal

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")
PAGES = ("report", "stepper", "learn", "search")


@functools.cache
def table(page: str) -> dict[str, dict[str, str]]:
    """A page's texts: key -> language -> text. Not to be changed by the caller."""
    text = (importlib.resources.files("mocokit") / "texts" / f"{page}.json").read_text("utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def load(page: str, language: Language) -> dict[str, str]:
    """A page's texts in one language."""
    return {key: both[language] for key, both in table(page).items()}


def values_named(text: str) -> set[str]:
    """The names in braces that a text leaves a place for."""
    return set(re.findall(r"\{(\w+)\}", text))
