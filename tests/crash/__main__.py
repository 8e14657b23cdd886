"""`python -m tests.crash --kills 40 --seed 7`: that many kills over all methods, and what became of them, as JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.crash import harness


def main() -> int:
    """0 when no byte differed and no checkpoint was torn."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        data = harness.toy_data(Path(place))
        each = -(-options.kills // len(harness.METHODS))
        kills, results = harness.kill_all_methods(data, Path(place), each, options.seed)
    found = {
        "seed": options.seed,
        "kills": kills.stages.total(),
        "stages": dict(sorted(kills.stages.items())),
        "torn": kills.torn,
        "methods": results,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(found, indent=2))
    return 1 if kills.torn or any(result["differing"] for result in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
