"""`mocokit demo`: the whole path on built-in data, with nothing staged.

Training runs as a child process that is killed with SIGKILL on the way and then resumed; a second, uninterrupted run
says whether that changed anything. The figures printed are those of this run.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit import api, files
from mocokit.errors import MocokitError
from mocokit.evaluation.baselines import PIXELS, RANDOM_INIT, RANDOM_INIT_FLATTENED
from mocokit.evaluation.features import extract
from mocokit.evaluation.frozen import RANDOM_SEED, FrozenResult
from mocokit.evaluation.knn import nearest
from mocokit.evaluation.labelled import LabelledData, open_labelled
from mocokit.evaluation.verdict import verdict_line
from mocokit.reporting import plots
from mocokit.training.run import Run
from mocokit.training.runlog import duration
from mocokit.training.state import make_encoder

DATA = "moved-digits"
TRACE = "first,last"
QUERIES, NEIGHBOURS = 8, 6
AFTER = 60  # steps that the uninterrupted run goes on beyond the kill


def run_demo(out: Path, *, seed: int = 0, overwrite: bool = False) -> None:
    """Train, get killed, resume, compare, evaluate, draw; print where everything lies."""
    began = time.perf_counter()
    reference = out.with_name(f"{out.name}-uninterrupted")
    _say("1. Pretraining without labels on 1,100 handwritten digits, moved, turned and zoomed on a 24-px canvas.")
    killed_at = _train_until(out, seed, overwrite, lambda total: total // 8, signal.SIGKILL, monitor=True)
    print(f"   Killed with SIGKILL after step {killed_at}. Resuming it from its last checkpoint:", flush=True)
    run = api.pretrain(DATA, out, resume=True, monitor=DATA, trace=TRACE, seed=seed)
    _say("2. The same run once more, not interrupted, up to a little beyond that step: did the kill change anything?")
    execution = _same_execution(run)
    whole = _train_until(reference, seed, overwrite, lambda _: killed_at + AFTER, signal.SIGTERM, config=execution)
    _compare(run, reference, killed_at, whole)
    _say("3. Frozen evaluation: 10 labels per class, 20 draws, on 500 digits that no training has seen.")
    result = api.evaluate(run, DATA, quiet=True)
    _print_table(result)
    control = api.evaluate(run, DATA, shuffle_labels=True, quiet=True)
    print(
        f"   Control: with shuffled labels kNN reads {100 * control.verdict.score:.1f} % "
        f"[{100 * control.verdict.score_ci95[0]:.1f}, {100 * control.verdict.score_ci95[1]:.1f}]; chance is about 10 %."
    )
    print(f"   {verdict_line(result.verdict)}")
    _neighbours(run)
    _say("4. The report, and a page of single steps with their real numbers:")
    told = api.report(run, labelled=DATA, quiet=True)
    steps = api.stepper(out)
    _say(f"5. What lies where (the tour took {duration(time.perf_counter() - began)}):")
    for name, what in (
        ("results.png", "loss against its chance line; kNN on the validation digits over time"),
        ("samples/pairs0.png", "the two views of each digit that were really fed"),
        ("samples/neighbours.png", "nearest neighbours before and after training, failures crossed out"),
        ("eval/verdict.json", "every score with its interval"),
        ("config.yaml, loss.jsonl", "what was run, and every loss"),
        (f"checkpoints/step-{run.step}", "the encoder, the queue, the optimiser"),
    ):
        print(f"   {out / name.split(', ')[0]}  {what}")
    print(f"   {told.html}  all of it on one page; open it in a browser, offline")
    print(f"   {steps.path}  walk through training steps, follow a key, take the course")
    _say("The same with your own pictures:")
    print("   mocokit pretrain PHOTOS/ --out runs/photos          # any folder of images, no labels needed")
    print("   mocokit pretrain PHOTOS/ --out runs/photos --resume # after an interruption")
    print("   mocokit evaluate runs/photos --labelled LABELLED/   # one sub-folder per class")


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _train_until(
    out: Path,
    seed: int,
    overwrite: bool,
    until: Callable[[int], int],
    how: signal.Signals,
    *,
    monitor: bool = False,
    config: Path | None = None,
) -> int:
    """Start a run as a child process, end it by a signal after `until(total steps)` steps; returns the steps logged."""
    command = [sys.executable, "-m", "mocokit", "pretrain", DATA, "--out", str(out), "--seed", str(seed)]
    command += ["--overwrite"] if overwrite else []
    command += ["--monitor", DATA, "--trace", TRACE] if monitor else ["--quiet"]
    command += ["--config", str(config)] if config else []
    log, status = out / "loss.jsonl", out / "status.json"
    started = time.time()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=None if monitor else subprocess.DEVNULL)
    while child.poll() is None:
        time.sleep(0.05)
        if not (status.exists() and log.exists()) or status.stat().st_mtime < started:
            continue  # what lies there is an earlier tour's
        total = int(files.read_json(status)["total_steps"])
        if total and log.read_bytes().count(b"\n") >= until(total):
            child.send_signal(how)
            child.wait()
            return log.read_bytes().count(b"\n")
    raise MocokitError(f"The training process ended early with exit code {child.returncode}; its message is above.")


def _same_execution(run: Run) -> Path:
    """The first run's timed choices (precision, layout, threads), so that both runs compute alike."""
    execution = run.config.execution
    text = (
        f"execution: {{precision: {execution.precision}, layout: {execution.layout}, threads: {execution.threads}}}\n"
    )
    path = run.path / "cache" / "execution.yaml"
    files.make_folder(path.parent)
    files.write_text(path, text)
    return path


def _compare(killed: Run, reference: Path, killed_at: int, steps: int) -> None:
    """Compare both runs' losses, all digits of each; a loss depends on every weight, key and gradient before it."""
    lines = [(folder / "loss.jsonl").read_bytes().splitlines(keepends=True) for folder in (killed.path, reference)]
    digests = [hashlib.sha256(b"".join(one[:steps])).hexdigest() for one in lines]
    if digests[0] != digests[1]:
        first = next(i for i, (a, b) in enumerate(zip(*lines, strict=False)) if a != b)
        raise MocokitError(f"Killed and uninterrupted run differ from step {first} on: a bug, please report it.")
    print(f"   {steps} losses, {steps - killed_at} of them from after the kill, are identical in every digit:")
    print(f"   SHA-256 {digests[0][:32]}... in both runs.")


def _print_table(result: FrozenResult) -> None:
    rows = [
        ("pixels", PIXELS),
        ("random init", max((RANDOM_INIT, RANDOM_INIT_FLATTENED), key=lambda n: result.scores[n].mean)),
        ("MoCo h (backbone)", "h"),
        ("MoCo z (head)", "z"),
    ]
    print(f"   {'':<20}kNN accuracy, %   95 % interval")
    for label, name in rows:
        one = result.scores[name]
        print(f"   {label:<20}{100 * one.mean:13.1f}     [{100 * one.low:.1f}, {100 * one.high:.1f}]")
    best = max(rows, key=lambda row: result.scores[row[1]].mean)
    others = max((row for row in rows[:2]), key=lambda row: result.scores[row[1]].mean)
    gain = 100 * (result.scores[best[1]].mean - result.scores[others[1]].mean)
    if best in rows[:2]:
        print(f"   {best[0]} read the digits best: training did not help here.")
    else:
        print(f"   {best[0]} read the digits best, {gain:.1f} points above {others[0]}, the strongest baseline.")


def _neighbours(run: Run) -> None:
    """samples/neighbours.png: the same test digits searched by random and by trained weights."""
    data = open_labelled(DATA, size=run.config.views.size)
    config = run.config
    before = make_encoder(config.encoder, config.views.size, RANDOM_SEED).eval()
    panels = [_panel(name, encoder, data, run) for name, encoder in (("before", before), ("after", run.encoder()))]
    figure = plots.neighbours_figure(panels, title="Nearest neighbours among the test digits, by h", columns=NEIGHBOURS)
    plots.save_figure(figure, run.samples / "neighbours.png")


def _panel(
    name: str, encoder: torch.nn.Module, data: LabelledData, run: Run
) -> tuple[str, npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    rows = data.split.test
    views = run.config.views
    h = extract(encoder, data.store, rows, size=views.size, mean=views.mean, std=views.std).h  # type: ignore[arg-type]
    queries = np.linspace(0, len(rows) - 1, QUERIES).astype(int)  # evenly spaced, not chosen
    found = _others(F.normalize(h, dim=1), queries)
    pictures = data.store.pixels[rows].transpose(0, 2, 3, 1)
    labels = data.index.labels[rows]
    return name, pictures[queries], pictures[found], labels[found] == labels[queries][:, None]


def _others(h: Tensor, queries: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each query's nearest rows, itself left out: int64 [Q, NEIGHBOURS]."""
    _, found = nearest(h, h[queries], NEIGHBOURS + 1)
    kept = [[row for row in line if row != query][:NEIGHBOURS] for line, query in zip(found, queries, strict=True)]
    return np.array(kept, np.int64)
