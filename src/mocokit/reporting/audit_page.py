"""The page and the lines of text that `mocokit check` leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mocokit.data.audit import Audit
from mocokit.data.decode import UnreadableImageError
from mocokit.data.twin_search import families
from mocokit.reporting.plain_page import picture_uri, render

MOST_FAMILIES, MOST_MEMBERS = 24, 6
"""What a section of the page shows at most, so that the page stays small however much was found."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence, and whether it is about something that should be put right."""

    text: str
    bad: bool


def findings(audit: Audit) -> list[Finding]:
    """What was found, the gravest first; a sentence also for what was looked for and not found."""
    out: list[Finding] = []
    for (one, other), pairs in audit.crossing().items():
        first, second = len({a for a, _ in pairs}), len({b for _, b in pairs})
        out.append(Finding(f"{second} picture(s) of {other} are also in {one} ({first} there)", True))
    if len(audit.part_names()) > 1 and not out:
        out.append(Finding(f"no picture is in two of {', '.join(audit.part_names())}", False))
    if len(audit.part_names()) == 1:
        out.append(Finding("no splits: give data with splits, or --against, to look for copies across them", False))
    within = [
        family for family in families(audit.twin_pairs()) if len({audit.parts[row] for row in family}) < len(family)
    ]
    copies = sum(len(family) - 1 for family in families(audit.twin_pairs()))
    exact = sum(len(family) - 1 for family in audit.same_pixels)
    if copies:
        text = f"{copies} picture(s) repeat another ({exact} to the last pixel), {len(within)} families within a part"
        out.append(Finding(text, True))
    else:
        out.append(Finding("no picture repeats another", False))
    if conflicts := audit.conflicts():
        out.append(Finding(f"{len(conflicts)} picture(s) are there with different labels", True))
    if leaks := audit.group_leaks():
        out.append(Finding(f"{len(leaks)} group(s) lie in more than one part", True))
    elif (audit.groups >= 0).any():
        out.append(Finding("every group lies in one part", False))
    if audit.unreadable:
        out.append(Finding(f"{len(audit.unreadable)} file(s) can't be read", True))
    else:
        out.append(Finding("every file can be read", False))
    if audit.constant:
        out.append(Finding(f"{len(audit.constant)} picture(s) of one colour all over", True))
    out += [Finding(f"{len(rows)} odd ({what})", False) for what, rows in audit.odd.items()]
    out += _balance(audit)
    for source in audit.sources:
        out += [Finding(line, False) for line in source.report.lines()]
    return out


def _balance(audit: Audit) -> list[Finding]:
    counts = audit.class_counts()
    if not counts:
        return []
    out = []
    totals: dict[str, int] = {}
    for in_part in counts.values():
        for label, count in in_part.items():
            totals[label] = totals.get(label, 0) + count
    named = {label: count for label, count in totals.items() if label != "(none)"}
    most, least = max(named, key=lambda label: named[label]), min(named, key=lambda label: named[label])
    ratio = named[most] / named[least]
    text = f"{len(named)} classes, from {named[least]} ({least}) to {named[most]} ({most}) pictures: 1 to {ratio:.1f}"
    out.append(Finding(text, False))
    for part, own in counts.items():
        missing = sorted(set(named) - set(own))
        if missing and any(label in named for label in own):
            out.append(Finding(f"{part} has no picture of {', '.join(missing[:5])}", True))
    return out


def findings_text(audit: Audit) -> str:
    """The findings as lines, those to put right marked."""
    return "".join(f"{'!' if finding.bad else ' '} {finding.text}\n" for finding in findings(audit))


def audit_page(audit: Audit, facts: dict[str, Any], closest: Sequence[tuple[int, int, float]] = ()) -> str:
    """The page. facts: `data.audit.summary`. closest: pairs of rows and their cosine that only features hold alike."""
    show = _Pictures(audit)
    twins = families(audit.twin_pairs())
    within = [family for family in twins if len({audit.parts[row] for row in family}) < len(family)]
    crossing = [
        {
            "title": f"{one} / {other}",
            "families": show.families([list(pair) for pair in pairs]),
            "total": len(pairs),
        }
        for (one, other), pairs in audit.crossing().items()
    ]
    conflicts, leaks = audit.conflicts(), audit.group_leaks()
    sections = {
        "crossing": crossing,
        "conflicts": {"families": show.families(conflicts), "total": len(conflicts)},
        "copies": {"families": show.families(within), "total": len(within)},
        "groups": {"families": show.families(leaks), "total": len(leaks)},
        "closest": {
            "families": show.families([[a, b] for a, b, _ in closest], [f"cosine {c:.3f}" for _, _, c in closest]),
            "total": len(closest),
        },
        "constant": {"families": show.families([[row] for row in audit.constant]), "total": len(audit.constant)},
        "odd": [
            {"title": what, "families": show.families([[row] for row in rows], most=8), "total": len(rows)}
            for what, rows in audit.odd.items()
        ],
    }
    names = [source.name for source in audit.sources]
    classes = sorted({label for counts in facts["classes"].values() for label in counts})
    return render(
        "audit.html",
        title=f"What is in {' and '.join(names)}",
        facts=facts,
        findings=findings(audit),
        sections=sections,
        class_names=classes,
    )


class _Pictures:
    """Thumbnails of rows, each made once."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._made: dict[int, str] = {}

    def families(
        self, rows: Sequence[Sequence[int]], notes: Sequence[str] = (), most: int = MOST_FAMILIES
    ) -> list[dict[str, Any]]:
        shown = []
        for number, family in enumerate(rows[:most]):
            left = len(family) - MOST_MEMBERS
            note = notes[number] if number < len(notes) else f"and {left} more" if left > 0 else ""
            shown.append({"members": [self._one(row) for row in family[:MOST_MEMBERS]], "note": note})
        return shown

    def _one(self, row: int) -> dict[str, str]:
        audit = self._audit
        if row not in self._made:
            try:
                self._made[row] = picture_uri(audit.picture(row))
            except UnreadableImageError:
                self._made[row] = ""
        return {"name": audit.names[row], "part": audit.parts[row], "label": audit.labels[row], "uri": self._made[row]}
