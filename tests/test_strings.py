"""Every string is there in both languages, with the same places to fill, and every one that a page names exists."""

from __future__ import annotations

import re
from importlib.resources import files

from mocokit import strings

PAGES = ("retrieval/page/page.html", "retrieval/page/page.js")


def test_both_languages_say_everything_with_the_same_places() -> None:
    for key, texts in ((k, t) for page in strings.PAGES for k, t in strings.table(page).items()):
        assert set(texts) == set(strings.LANGUAGES), key
        assert all(texts.values()), key
        places = [sorted(re.findall(r"\{(\w+)\}", text)) for text in texts.values()]
        assert places[0] == places[1], key
        if texts["zh"] != texts["en"]:  # a formula or a name is the same in both
            assert re.search(r"[\u4e00-\u9fff]", texts["zh"]), key
        assert not re.search(r"[\u4e00-\u9fff]", texts["en"]), key


def test_keys_that_pages_name_exist_and_all_are_named() -> None:
    named: set[str] = set()
    for page in PAGES:
        text = (files("mocokit") / page).read_text("utf-8")
        named |= set(re.findall(r'["`](search\.\w+)["`]', text))
        if page.endswith(".js"):
            keys = re.search(r"for \(const \[key, text\] of \[(.*?)\]\) \{", text, re.DOTALL)
            assert keys
            named |= {f"search.{word}" for word in re.findall(r', "(\w+)"\]', keys.group(1))}
    assert named == set(strings.table("search"))
