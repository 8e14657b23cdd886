"""The verdict: one method against the strongest baseline that ran, from paired scores, in one line of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mocokit import strings
from mocokit.errors import UsageError
from mocokit.evaluation.interval import Floats, Interval, Ints, crossed_interval

__all__ = [
    "Baseline",
    "Interval",
    "Outcome",
    "Verdict",
    "crossed_interval",
    "decide",
    "verdict_line",
    "verdict_sentence",
]

Outcome = Literal["BETTER", "NO CLEAR DIFFERENCE", "WORSE"]
_OUTCOMES = {"BETTER": "outcome_better", "WORSE": "outcome_worse"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """One baseline of a verdict: its score with interval when it ran, the reason when it did not."""

    name: str
    score: float | None
    low: float | None
    high: float | None
    ran: bool
    why_not: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One method against the strongest baseline that ran. Scores and differences are fractions, 0.713 for 71.3 %."""

    verdict: Outcome
    metric: str
    """The readout's name, "kNN"."""
    score: float
    score_ci95: tuple[float, float]
    baseline: dict[str, Any]
    """{"name", "score"} of the strongest baseline that ran, the one `delta` is against."""
    baselines: tuple[Baseline, ...]
    delta: float
    ci95: tuple[float, float]
    n_test: int
    seeds: int
    """Runs, each with another seed."""
    readout: str
    """"h" or "z"."""
    encoder: str
    """"query" or "key"."""
    step: int
    this_run_only: bool
    draws: int | None
    """Label draws (per run, when there are several runs), None where all labels were used."""
    labels_per_class: int | None
    judged: str = "images"
    """What the test is of: images, or videos."""

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values, for `eval/verdict.json`."""
        value = asdict(self)
        for name in ("score_ci95", "ci95", "baselines"):
            value[name] = list(value[name])
        return value


def decide(
    scores: Mapping[str, Floats],
    method: str,
    *,
    metric: str,
    readout: str,
    encoder: str,
    step: int,
    runs: int,
    draws: int | None = None,
    labels_per_class: int | None = None,
    groups: Ints | None = None,
    not_run: Mapping[str, str] | None = None,
    judged: str = "images",
) -> Verdict:
    """The verdict on `method` from the matrices of `evaluate_features` (name -> [R, I] in 0..1, the same R and I).

    All names but `method` are baselines. The delta is against the one with the highest score; the first listed wins
    ties. not_run: name -> reason, of baselines that could not run. groups: int64 [I], as in `crossed_interval`.
    BETTER when the whole 95 % interval of the delta is above zero, WORSE when it is below. (The strongest of several
    is picked on the same test images, which can only make BETTER harder to reach.)
    Raises UsageError when no baseline ran or R does not fit runs and draws.
    """
    baselines = [name for name in scores if name != method]
    if method not in scores or not baselines:
        raise UsageError(f"A verdict needs scores of {method!r} and of at least one baseline; got {list(scores)}.")
    mine = scores[method]
    expected = runs if runs > 1 or draws is None else draws
    for name, matrix in scores.items():
        if matrix.shape != mine.shape or len(matrix) != expected:
            raise UsageError(
                f"The scores of {name!r} have shape {matrix.shape}; {expected} rows (runs, or the label draws of one "
                f"run) and {mine.shape[1]} test images are needed. Evaluate every method on the same ones."
            )
    intervals = {name: crossed_interval(scores[name], groups, bounds=(0, 1)) for name in scores}
    strongest = max(baselines, key=lambda name: intervals[name].mean)
    delta = crossed_interval(mine - scores[strongest], groups, bounds=(-1, 1))
    outcome: Outcome = "BETTER" if delta.low > 0 else "WORSE" if delta.high < 0 else "NO CLEAR DIFFERENCE"
    listed = [
        Baseline(name=name, score=one.mean, low=one.low, high=one.high, ran=True, why_not=None)
        for name, one in ((name, intervals[name]) for name in baselines)
    ]
    missing = [
        Baseline(name=name, score=None, low=None, high=None, ran=False, why_not=reason)
        for name, reason in (not_run or {}).items()
    ]
    return Verdict(
        verdict=outcome,
        metric=metric,
        score=intervals[method].mean,
        score_ci95=(intervals[method].low, intervals[method].high),
        baseline={"name": strongest, "score": intervals[strongest].mean},
        baselines=(*listed, *missing),
        delta=delta.mean,
        ci95=(delta.low, delta.high),
        n_test=mine.shape[1],
        seeds=runs,
        readout=readout,
        encoder=encoder,
        step=step,
        this_run_only=runs == 1,
        draws=draws,
        labels_per_class=labels_per_class,
        judged=judged,
    )


def verdict_line(verdict: Verdict) -> str:
    """The verdict as one line of English.

    After the strongest baseline come the best of each other kind (the name without its parenthesis) and those that
    did not run.
    """
    return verdict_sentence(verdict.to_json(), "en")


def verdict_sentence(verdict: Mapping[str, Any], language: strings.Language) -> str:
    """What `Verdict.to_json` gives (as in `eval/verdict.json`) as `verdict_line`, in a language."""
    t = strings.load("report", language)
    join = {"en": "; ", "zh": "；"}[language]
    ran = sorted((one for one in verdict["baselines"] if one["ran"]), key=lambda one: -one["score"])
    strongest = verdict["baseline"]
    notes = [t["note_only"] if len(ran) == 1 else t["note_strongest"].format(count=len(ran))]
    kinds = {_kind(strongest["name"])}
    for one in ran:
        if _kind(one["name"]) not in kinds:
            kinds.add(_kind(one["name"]))
            notes.append(t["note_other"].format(name=one["name"], score=percent(one["score"])))
    notes += [t["note_not_run"].format(name=one["name"]) for one in verdict["baselines"] if not one["ran"]]
    low, high = verdict["ci95"]
    return t["verdict_line"].format(
        outcome=t[_OUTCOMES.get(verdict["verdict"], "outcome_unclear")],
        metric=verdict["metric"],
        score=percent(verdict["score"]),
        baseline=strongest["name"],
        base=percent(strongest["score"]),
        notes=join.join(notes),
        delta=points(verdict["delta"]),
        low=points(low),
        high=points(high),
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


def _kind(name: str) -> str:
    return name.split(" (")[0]


def percent(fraction: float) -> str:
    """A share such as 0.713 as "71.3 %"."""
    return f"{100 * fraction:.1f} %"


def points(fraction: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * fraction + 0.0:+.1f}"
