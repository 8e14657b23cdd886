"""The sentences that carry a run's numbers, in both languages: what health found, near twins, what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mocokit import strings
from mocokit.contrast.health import finding_values, sentence_key
from mocokit.evaluation.verdict import percent, points


def finding_sentence(health: Sequence[Mapping[str, Any]], row: int, code: str) -> dict[str, str]:
    """What measurement number `row` found, by language, with its numbers.

    A row whose numbers don't make the sentence that was written down with it (another version measured it) has that
    sentence alone, in English.
    """
    written = str(health[row]["findings"][code])
    values = finding_values(health[: row + 1]).get(code)
    if values is None:
        return {"en": written}
    key, said = sentence_key(code), dict[str, str]()
    for language in strings.LANGUAGES:
        said[language] = strings.load("report", language)[key].format(**values)
    return said if said["en"] == written else {"en": written}


def twins_sentence(verdict: Mapping[str, Any], language: strings.Language) -> str | None:
    """Test images with near twins in train, and the first score without them; None where not looked for."""
    found = verdict.get("near_twins")
    if found is None:
        return None
    t = strings.load("report", language)
    if not found["test_images"]:
        return t["twins_none"].format(n=found["n_test"])
    if not found["verdicts_without"]:
        return t["twins_all"].format(n=found["n_test"])
    without = next(iter(found["verdicts_without"].values()))
    return t["twins_some"].format(
        count=found["test_images"],
        n=found["n_test"],
        score=percent(without["score"]),
        all=percent(verdict["score"]),
        delta=points(without["delta"]),
        low=points(without["ci95"][0]),
        high=points(without["ci95"][1]),
    )


def saw_key(text: str) -> str:
    """The name of the text that says in short what `Overlap.text` says at length."""
    if text.startswith("no") and text.endswith("not compared"):
        return "saw_no_uncompared"
    return f"saw_{text.split(':')[0]}"
