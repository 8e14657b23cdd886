"""The tables of benchmarks/README.md, from the JSON that the measurements wrote.

python -m benchmarks.report benchmarks/results            # prints them
python -m benchmarks.report benchmarks/results --write    # puts them into benchmarks/README.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PARTS = ("wait", "forward-backward", "loss", "update", "other")


def case_lines(record: dict[str, Any]) -> list[str]:
    """A case's table in Markdown, under a line that says what was run."""
    case = record["case"]
    lines = [
        f"**{case['name']}, {record['precision']}**: {case['backbone']} at {case['fed'] or case['size']} px, batch "
        f"{case['batch']}, K {case['K']}; {record['rounds']} rounds of {record['block']:g} s blocks.",
        "",
        "| | img/s | mocokit is | 95 % | peak memory, MiB | " + " | ".join(PARTS) + " | cores | setting |",
        "|---|---|---|---|---|" + "---|" * (len(PARTS) + 2),
    ]
    for row in record["rows"]:
        middle, low, high = record["ratios"].get(row["label"], (1.0, None, None))
        times = "" if low is None else f"{middle:.3f}x"
        between = "" if low is None else f"{low:.3f} to {high:.3f}"
        shares = " | ".join(f"{row['split'][part]:.0%}" for part in PARTS)
        weight = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        lines.append(
            f"| {row['label']} | {np.median(row['rates']):.0f} | {times} | {between} | {weight} | {shares} "
            f"| {row['cores']:.1f} | {_setting(row)} |"
        )
    return lines + first_epoch_lines(record)


def first_epoch_lines(record: dict[str, Any]) -> list[str]:
    """Of pictures in files: a row and a sentence on mocokit's first epoch, which decodes them all before it starts.

    The others decode every picture in every epoch: their first is like any other.
    """
    case, rows = record["case"], {row["label"]: row for row in record["rows"]}
    if not case["jpegs"] or "mocokit" not in rows:
        return []
    decoding, images = rows["mocokit"]["facts"]["seconds to decode"], case["images"]
    rates = {label: float(np.median(row["rates"])) for label, row in rows.items()}
    first = images / (images / rates["mocokit"] + decoding)
    others = [f"{first / rates[label]:.2f}x {label}" for label in ("plain PyTorch", "lightly") if label in rates]
    return [
        f"| mocokit, first epoch | {first:.0f} | {rates['mocokit'] / first:.3f}x |" + " |" * (len(PARTS) + 4),
        "",
        f"mocokit decodes all {images} pictures before its first epoch, in {decoding:.1f} s ({images / decoding:.0f} a "
        "second), and never again; the others decode each in every epoch."
        + (f" In that first epoch it is {' and '.join(others)}." if others else ""),
    ]


def _setting(row: dict[str, Any]) -> str:
    order = row["order"]
    return f"{order['precision']}, {order['layout']}, {order['threads']} threads, {order['workers'] or 0} workers"


def part_lines(record: dict[str, Any]) -> list[str]:
    """What `benchmarks.parts` measured, as a table of its own columns."""
    names = list(dict.fromkeys(name for row in record["rows"] for name in row))
    lines = [f"**{record['part']}**: {record['what']}", "", f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in record["rows"]]
    return lines


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def tables(folder: Path) -> list[str]:
    """Every record's table, the cases first."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    order = ["tiny", "small", "medium", "resnet18", "photos"]
    timed = [r for r in records if "case" in r and r["case"]["name"] in order]
    timed.sort(key=lambda r: (order.index(r["case"]["name"]), r["precision"] != "fp32"))
    lines: list[str] = []
    for record in timed:
        lines += [*case_lines(record), ""]
    for record in (r for r in records if "part" in r):
        lines += [*part_lines(record), ""]
    if records:
        machine = records[0]["environment"]
        facts = {key: value for key, value in machine.items() if isinstance(value, str | int)}
        lines += ["Machine and versions: " + ", ".join(f"{key} {value}" for key, value in facts.items()) + "."]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    made = "\n".join(tables(options.folder))
    if not options.write:
        print(made)
        return
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")


if __name__ == "__main__":
    main()
