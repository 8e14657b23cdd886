"""The run report: one page that says first whether the run is better than its baselines, then everything behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from mocokit import strings
from mocokit.evaluation.verdict import verdict_sentence
from mocokit.reporting import charts
from mocokit.reporting.charts import Series, course, thinned
from mocokit.reporting.page import Speaker, read_template, render, spoken
from mocokit.reporting.sentences import finding_sentence, saw_key, twins_sentence

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of the run; `default` is the recipe's where the run has another value."""

    name: str
    value: str
    default: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A query with its neighbours, as data URLs with names; right: shares the query's label (None without labels)."""

    kind: str
    query: str
    query_name: str
    query_label: str | None
    found: list[tuple[str, str, str | None, float, bool | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapped:
    """A map of features: how it was made (`PCA`, `UMAP`, `t-SNE`), its points, and the label number of each or -1."""

    how: str
    points: list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What looking at pictures gave. where: the data's name and the split that was looked at."""

    where: str
    neighbours: list[Row]
    shared: float | None
    maps: list[Mapped]
    names: list[str]
    kinds: list[int]
    kind_names: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that the report says, as plain values."""

    name: str
    method: str
    status: Mapping[str, Any]
    config: Mapping[str, Any]
    settings: Sequence[Setting]
    environment: Mapping[str, Any]
    losses: Sequence[Mapping[str, Any]]
    metrics: Sequence[Mapping[str, Any]]
    health: Sequence[Mapping[str, Any]]
    verdict: Mapping[str, Any] | None
    verdict_line: str | None
    ledger: Sequence[Mapping[str, Any]]
    skipped: Sequence[Mapping[str, Any]]
    duplicates: Sequence[Sequence[str]] | None
    """Groups of images with the same pixels; None where the images were not there to be compared."""
    compared: int
    """How many images were compared for duplicates."""
    views: Sequence[tuple[str, str, str]]
    """Image, query view and key view as data URLs."""
    pairs: str | None
    """The picture of views that the run left, where its images are not there any more."""
    shown: Shown | None
    not_shown: str | None
    """Why there are no neighbours and no map."""
    checkpoint: str | None
    has_trace: bool
    size: int
    mean: Sequence[float]
    std: Sequence[float]
    files: Mapping[str, str] = field(default_factory=dict)


def report_json(facts: Facts) -> dict[str, Any]:
    """The report's numbers as JSON values, without its pictures."""
    last = facts.losses[-1] if facts.losses else None
    return {
        "format": "mocokit report",
        "version": VERSION,
        "run": facts.name,
        "method": facts.method,
        "status": dict(facts.status),
        "checkpoint": facts.checkpoint,
        "verdict": None if facts.verdict is None else dict(facts.verdict),
        "loss": None if last is None else {"first": dict(facts.losses[0]), "last": dict(last)},
        "metrics": dict(facts.metrics[-1]) if facts.metrics else None,
        "health": {k: v for k, v in facts.health[-1].items() if not isinstance(v, list)} if facts.health else None,
        "images": {
            "used": facts.config["data"]["images"],
            "skipped": len(facts.skipped),
            "compared_for_duplicates": facts.compared,
            "duplicate_groups": None if facts.duplicates is None else len(facts.duplicates),
        },
        "ledger": readings(facts.ledger),
        "neighbours_sharing_the_label": None if facts.shown is None else facts.shown.shared,
        "settings_not_the_recipes": {s.name: s.value for s in facts.settings if s.default is not None},
        "config": dict(facts.config),
        "environment": dict(facts.environment),
    }


def readings(ledger: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How often each labelled split was read."""
    counts: dict[str, int] = {}
    for line in ledger:
        counts[str(line["split"])] = counts.get(str(line["split"]), 0) + 1
    return counts


def report_html(facts: Facts) -> str:
    """The page."""
    t = Speaker("report")
    return render(
        "report.html",
        read_template("report.js"),
        t=t,
        facts=facts,
        spoken=spoken,
        percent=percent,
        four=four,
        charts=_charts(facts),
        scores=_scores(facts),
        readings=readings(facts.ledger),
        findings=_findings(facts, t),
        verdict_sentence=verdict_sentence,
        saw_key=saw_key,
        twins_sentence=twins_sentence,
        load_zh=strings.load("report", "zh"),
        maps=_maps(facts),
        tone=_tone(facts),
        hours=_hours(facts),
        load=load_lines(facts),
        mark=lambda kind: Markup(charts.mark(kind, 0, 0, f"mark kind{kind % 10}")),  # noqa: S704 numbers
    )


def load_lines(facts: Facts) -> list[str]:
    """Three lines of Python that load the encoder."""
    return [
        "import mocokit",
        f"encoder = mocokit.load_run({spoken(facts.name)!r}).encoder()  # the run's folder; in eval mode",
        "h = encoder.features(x)",
    ]


def percent(fraction: float | None) -> str:
    """A share as 71.3 %, or a dash."""
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def four(value: Any) -> str:
    """A number with four significant digits, as text."""
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def _tone(facts: Facts) -> str:
    if facts.verdict is None:
        return "none"
    return {"BETTER": "better", "WORSE": "worse"}.get(str(facts.verdict["verdict"]), "unclear")


def _hours(facts: Facts) -> float | None:
    """Images seen divided by images a second, summed over epochs: seconds of training that the log tells of."""
    N = facts.config["train"]["batch_size"]
    seconds, before = 0.0, 0
    for row in facts.metrics:
        if row.get("images_per_second"):
            seconds += (row["step"] - before) * N / row["images_per_second"]
        before = row["step"]
    return seconds or None


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with what the page says about it. head: keys of the columns; rows: the same numbers as a table."""

    name: str
    svg: Markup
    legend: list[Series]
    head: list[str]
    rows: list[list[str]]


def _chart(name: str, x: str, series: list[Series], **options: Any) -> Chart | None:
    series = [one for one in series if one.points]
    if not series:
        return None
    table: dict[float, list[str]] = {}
    for number, one in enumerate(series):
        for place, value in one.points:
            table.setdefault(place, ["–"] * len(series))[number] = four(float(value))
    svg = charts.line_chart(series, label=f"chart-{name}", **options)
    rows = [[four(float(place)), *cells] for place, cells in sorted(table.items())]
    return Chart(name, svg, series, [x, *(one.name for one in series)], rows)


def _charts(facts: Facts) -> list[Chart]:
    losses, rows, health = facts.losses, facts.metrics, facts.health
    found = [
        _chart(
            "loss",
            "step",
            [
                Series("loss", thinned(course(losses, "step", "loss")), 0),
                Series("chance", thinned(course(losses, "step", "chance")), 1),
            ],
            low=0.0,
        ),
        _chart("queue", "step", [Series("queue_fill", thinned(course(losses, "step", "fill")), 2)], low=0.0),
        _chart(
            "knn",
            "epoch",
            [
                Series("knn_h", course(rows, "epoch", "knn_h", 100), 0),
                Series("knn_z", course(rows, "epoch", "knn_z", 100), 1),
            ],
            low=0.0,
        ),
        _chart(
            "rank",
            "step",
            [
                Series("rank_h", course(health, "step", "rank_h"), 0),
                Series("rank_z", course(health, "step", "rank_z"), 1),
            ],
            low=0.0,
        ),
        _chart(
            "spread",
            "step",
            [
                Series("spread_h", course(health, "step", "spread_h"), 0),
                Series("spread_z", course(health, "step", "spread_z"), 1),
            ],
            low=0.0,
            high=1.05,
        ),
        _chart(
            "batch_accuracy",
            "step",
            [Series("batch_accuracy", course(health, "step", "batch_accuracy", 100), 0)],
            low=0.0,
            high=100.0,
        ),
        _chart("staleness", "age", _staleness(health), high=1.02),
        _chart(
            "theta",
            "step",
            [
                Series("theta_distance", course(health, "step", "theta_distance"), 0),
                Series("gradient_norm", course(health, "step", "gradient_norm"), 1),
            ],
            log=True,
        ),
    ]
    return [chart for chart in found if chart is not None]


def _staleness(health: Sequence[Mapping[str, Any]]) -> list[Series]:
    told = [row for row in health if row.get("staleness") and row["staleness"][-1][0] > 0]
    if not told:
        return []
    points = [(0.0, 1.0), *((float(age), float(cosine)) for age, cosine in told[-1]["staleness"] if age > 0)]
    return [Series("staleness", points, 0)]


def _scores(facts: Facts) -> list[dict[str, Any]]:
    """The table of scores, the method's first, then baselines by score; those that did not run with the reason."""
    if facts.verdict is None:
        return []
    verdict = facts.verdict
    prefix = "key-" if verdict["encoder"] == "key" else ""
    mine = prefix + str(verdict["readout"])
    rows: list[dict[str, Any]] = []
    for name, one in verdict.get("scores", {}).items():
        rows.append(
            {
                "name": name,
                "score": one["score"],
                "low": one["ci95"][0],
                "high": one["ci95"][1],
                "mine": name == mine,
                "strongest": name == verdict["baseline"]["name"],
                "why_not": None,
            }
        )
    rows.sort(key=lambda row: (not row["mine"], -row["score"]))
    for one in verdict["baselines"]:
        if not one["ran"]:
            rows.append(
                {"name": one["name"], "score": None, "why_not": one["why_not"], "mine": False, "strongest": False}
            )
    return rows


def _findings(facts: Facts, t: Speaker) -> list[dict[str, Any]]:
    """What health found, newest first: the page's own word for its kind, when it was so, and the measured sentence."""
    spans: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(facts.health):
        for code in row.get("findings", {}):
            entry = spans.setdefault(code, {"code": code, "first": row["step"]})
            entry |= {"last": row["step"], "row": number}
    newest = facts.health[-1]["step"] if facts.health else None
    told = sorted(spans.values(), key=lambda one: -int(one["last"]))
    for one in told:
        key = f"finding_{one['code'].replace('-', '_')}"
        one["heading"] = t(key) if key in t.texts else one["code"]
        one["said"] = finding_sentence(facts.health, one["row"], one["code"])
        one["now"] = one["last"] == newest
    return told


def _maps(facts: Facts) -> list[dict[str, Any]]:
    if facts.shown is None:
        return []
    shown = facts.shown
    texts = [
        f"{name} ({shown.kind_names[kind]})" if kind >= 0 else name
        for name, kind in zip(shown.names, shown.kinds, strict=True)
    ]
    return [
        {
            "how": one.how,
            "svg": charts.scatter(one.points, shown.kinds, texts, label=f"map-{number}"),
            "rows": [[text, four(x), four(y)] for text, (x, y) in zip(texts, one.points, strict=True)],
        }
        for number, one in enumerate(shown.maps)
    ]
