"""`python -m tests.crash --kills 40 --seed 7`: that many kills over all methods, and what became of them, as JSON.

A quarter of the kills are of runs on two ranks, unless `--two-ranks` says how many.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.crash import harness


def main() -> int:
    """0 when no byte differed and no checkpoint was torn."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--two-ranks", type=int, help="how many of the kills are of runs on two ranks; a quarter")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    two = options.kills // 4 if options.two_ranks is None else options.two_ranks
    found: dict[str, Any] = {"seed": options.seed, "ranks": {}}
    failed = False
    for ranks, kills in ((1, options.kills - two), (2, two)):
        began = time.monotonic()
        if kills <= 0:
            continue
        with tempfile.TemporaryDirectory() as place:
            data = harness.toy_data(Path(place))
            each = -(-kills // len(harness.METHODS))
            results = harness.kill_all_methods(data, Path(place), each, options.seed, ranks=ranks)
        stages = harness.stages_of(results)
        failed |= any(result.differing or result.kills.torn for result in results.values())
        found["ranks"][str(ranks)] = {
            "kills": stages.total(),
            "stages": dict(sorted(stages.items())),
            "methods": {
                method: {
                    "kills": result.kills.stages.total(),
                    "compared": result.compared,
                    "differing": result.differing,
                    "torn": result.kills.torn,
                }
                for method, result in results.items()
            },
            "seconds": round(time.monotonic() - began),
        }
    print(json.dumps(found, indent=2))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
