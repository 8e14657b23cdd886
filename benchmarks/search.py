"""Search over many vectors: build, single-query latency, memory and recall of exact, HNSW and IVF indexes.

The vectors are real ones (the column `vector` of a file that `mocokit embed` wrote) repeated with jitter until there
are enough: isotropic random vectors have no neighbourhoods, which is unfairly hard for graphs. Questions are further
jittered copies that the index does not hold. Each kind runs in a process of its own.

    mocokit embed RUN DATA --out vectors.parquet --readout z
    OMP_NUM_THREADS=2 python benchmarks/search.py vectors.parquet --count 1000000

Prints a Markdown table under a line with machine, versions, threads and command, and writes the figures as JSON where
--json says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("exact", "hnsw", "ivf")
QUERIES = 1000
K = 10


def main() -> None:
    """Parse, make the vectors, run each kind in a child, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parquet", type=Path)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--jitter", type=float, default=0.3, help="length of the noise beside a unit vector")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only, options.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        real = make_vectors(options.parquet, options.count, options.jitter, folder)
        rows = [child(kind, options.parquet, folder) for kind in KINDS]
    print(facts(real, options))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"facts": facts(real, options), "rows": rows}, indent=2) + "\n")


def make_vectors(parquet: Path, count: int, jitter: float, folder: Path) -> tuple[int, int]:
    """vectors.npy and queries.npy, unit rows; returns how many real ones there are and their width."""
    from mocokit.retrieval.encode import unit
    from mocokit.retrieval.layout import read_vectors

    base = unit(read_vectors(parquet)[1])
    rng = np.random.default_rng(0)
    out = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float32, (count, base.shape[1]))
    for start in range(0, count, 50_000):
        out[start : start + 50_000] = jittered(base, min(50_000, count - start), jitter, rng)
    out.flush()
    np.save(folder / "queries.npy", jittered(base, QUERIES, jitter, rng))
    return base.shape


def jittered(base: Any, count: int, jitter: float, rng: np.random.Generator) -> Any:
    """Unit vectors near randomly chosen real ones."""
    from mocokit.retrieval.encode import unit

    noise = rng.standard_normal((count, base.shape[1]), dtype=np.float32) * np.float32(jitter / base.shape[1] ** 0.5)
    return unit(base[rng.integers(0, len(base), count)] + noise)


def child(kind: str, parquet: Path, folder: Path) -> dict[str, Any]:
    """Measure one kind in a fresh process."""
    words = [sys.executable, __file__, str(parquet), "--only", kind, "--folder", str(folder)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def measure(kind: Any, folder: Path) -> dict[str, Any]:
    """Build, ask one at a time, add, and write; peak memory is the process's own."""
    from mocokit.retrieval import ann

    vectors, queries = np.load(folder / "vectors.npy"), np.load(folder / "queries.npy")
    before = peak_mb()
    began = time.perf_counter()
    index = ann.build(vectors, kind)
    build = time.perf_counter() - began
    truth_path = folder / "truth.npy"
    if kind == "exact":
        np.save(truth_path, index.search(queries, K)[1])
    truth = np.load(truth_path)
    for query in queries[:20]:
        index.search(query[None], K)
    seconds, found = [], []
    for query in queries:
        began = time.perf_counter()
        positions = index.search(query[None], K)[1]
        seconds.append(time.perf_counter() - began)
        found.append(positions[0])
    added = peak_mb() - before
    hits = [len(set(a.tolist()) & set(b.tolist())) / K for a, b in zip(truth, found, strict=True)]
    began = time.perf_counter()
    index.add(queries)
    add = time.perf_counter() - began
    began = time.perf_counter()
    size = len(index.to_bytes())
    return {
        "kind": kind,
        "effort": index.effort,
        "build_s": build,
        "p50_ms": 1e3 * float(np.percentile(seconds, 50)),
        "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
        "recall": float(np.mean(hits)),
        "recall_at_build": index.recall,
        "add_1000_s": add,
        "index_mb": size / 1e6,
        "added_mb": added,
        "serialise_s": time.perf_counter() - began,
    }


def peak_mb() -> float:
    """The most memory this process has had, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def facts(real: tuple[int, int], options: argparse.Namespace) -> str:
    """One line: what was measured, with what, on what."""
    import faiss

    from mocokit.training.environment import processor_name

    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    return (
        f"{options.count:,} vectors of {real[1]} dimensions from {real[0]:,} real ones with jitter {options.jitter}; "
        f"{QUERIES} single queries, k={K}; OMP_NUM_THREADS={threads}, {os.cpu_count()} cores of {processor_name()}; "
        f"faiss {faiss.__version__}, numpy {np.__version__}, Python {platform.python_version()}."
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown."""
    lines = [
        "| kind | build | query p50 | query p99 | recall@10 | index | memory above the vectors | adding 1,000 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["kind"] if row["kind"] == "exact" else f"{row['kind']} ({row['effort']})"
        lines.append(
            f"| {name} | {row['build_s']:.1f} s | {row['p50_ms']:.2f} ms | {row['p99_ms']:.2f} ms "
            f"| {row['recall']:.3f} | {row['index_mb']:.0f} MB | {row['added_mb']:.0f} MB | {row['add_1000_s']:.2f} s |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
