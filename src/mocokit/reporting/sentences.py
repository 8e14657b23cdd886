"""The sentences that carry a run's numbers, in both languages: the verdict, what health found, what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mocokit import strings
from mocokit.contrast.health import finding_values, sentence_key

_OUTCOMES = {"BETTER": "outcome_better", "WORSE": "outcome_worse"}


def verdict_sentence(verdict: Mapping[str, Any], language: strings.Language) -> str:
    """The verdict (as in `eval/verdict.json`) as one line; in English the line that `mocokit evaluate` prints."""
    t = strings.load("report", language)
    join = {"en": "; ", "zh": "；"}[language]
    ran = sorted((one for one in verdict["baselines"] if one["ran"]), key=lambda one: -one["score"])
    strongest = verdict["baseline"]
    notes = [t["note_only"] if len(ran) == 1 else t["note_strongest"].format(count=len(ran))]
    kinds = {_kind(strongest["name"])}
    for one in ran:
        if _kind(one["name"]) not in kinds:
            kinds.add(_kind(one["name"]))
            notes.append(t["note_other"].format(name=one["name"], score=_percent(one["score"])))
    notes += [t["note_not_run"].format(name=one["name"]) for one in verdict["baselines"] if not one["ran"]]
    low, high = verdict["ci95"]
    return t["verdict_line"].format(
        outcome=t[_OUTCOMES.get(verdict["verdict"], "outcome_unclear")],
        metric=verdict["metric"],
        score=_percent(verdict["score"]),
        baseline=strongest["name"],
        base=_percent(strongest["score"]),
        notes=join.join(notes),
        delta=_points(verdict["delta"]),
        low=_points(low),
        high=_points(high),
        n=verdict["n_test"],
        judged=t[f"judged_{verdict.get('judged', 'images')}"],
        replicates=_replicates(verdict, t, language),
    )


def _replicates(verdict: Mapping[str, Any], t: Mapping[str, str], language: strings.Language) -> str:
    alone, draws, labels = verdict["this_run_only"], verdict["draws"], verdict["labels_per_class"]
    text = t["one_seed"] if alone else t["many_seeds"].format(count=verdict["seeds"])
    if draws is None:
        return text
    text += {"en": ", ", "zh": "，"}[language]
    text += t["one_draw"] if draws == 1 else t["many_draws"].format(count=draws)
    text += "" if alone else t["each"]
    return text + ("" if labels is None else t["per_class"].format(count=labels))


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
        score=_percent(without["score"]),
        all=_percent(verdict["score"]),
        delta=_points(without["delta"]),
        low=_points(without["ci95"][0]),
        high=_points(without["ci95"][1]),
    )


def saw_key(text: str) -> str:
    """The name of the text that says in short what `Overlap.text` says at length."""
    if text.startswith("no") and text.endswith("not compared"):
        return "saw_no_uncompared"
    return f"saw_{text.split(':')[0]}"


def _kind(name: str) -> str:
    return name.split(" (")[0]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _points(fraction: float) -> str:
    return f"{100 * fraction + 0.0:+.1f}"
