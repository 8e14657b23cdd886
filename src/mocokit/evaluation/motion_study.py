"""Retrieval, temporal order and unusual behaviour of runs on videos: all of `motion` for one set of labelled videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mocokit.data.clips import ClipStore
from mocokit.errors import UsageError, did_you_mean
from mocokit.evaluation.baselines import RANDOM_INIT, calibrate
from mocokit.evaluation.contenders import RANDOM_SEED
from mocokit.evaluation.crossing import BankAndTest
from mocokit.evaluation.features import CLIPS_AT_ONCE, Ints, extract, plain_batches
from mocokit.evaluation.interval import Interval, crossed_interval
from mocokit.evaluation.labelled_videos import VideoData
from mocokit.evaluation.motion import order_scores, reorderings, retrieval, unusual_classes
from mocokit.evaluation.protocol import Ledger, plan_hash
from mocokit.evaluation.video_contenders import COLOURS, colour_histograms, video_contenders
from mocokit.training.run import Run
from mocokit.training.state import make_encoder

KS = (1, 5, 10)
ORDER_SEED = 2
ORDERS = ("shuffled", "backwards")


@dataclass(frozen=True, slots=True)
class MotionResult:
    """By method: recall@k, how well changed clips are told from unchanged ones, how much each class stands out."""

    data: str
    n_test: int
    retrieval: dict[str, dict[int, Interval]]
    order: dict[str, dict[str, Interval]]
    """By change (shuffled, backwards), then method; empty for runs on frames."""
    unusual: dict[str, dict[str, Interval]]
    """By method, then class name."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "data": self.data,
            "n_test": self.n_test,
            "recall": {name: {str(k): _plain(one) for k, one in by_k.items()} for name, by_k in self.retrieval.items()},
            "order": {change: {n: _plain(one) for n, one in found.items()} for change, found in self.order.items()},
            "unusual_auc": {name: {c: _plain(one) for c, one in found.items()} for name, found in self.unusual.items()},
        }


def _plain(one: Interval) -> dict[str, Any]:
    return {"score": one.mean, "ci95": [one.low, one.high]}


def study_motion(
    runs: Sequence[Run],
    data: VideoData,
    *,
    unusual: Sequence[str] = (),
    device: torch.device,
    say: Callable[[str], None],
) -> MotionResult:
    """Everything about the runs' h and the baselines on the test videos; the reading goes into every run's ledger.

    unusual: classes to leave out of the bank in turn; none named = every class. Raises UsageError for an unknown one.
    """
    names = list(data.index.class_names)
    for name in unusual:
        if name not in names:
            raise UsageError(f"There is no class {name!r} in {data.name}.{did_you_mean(name, names)}")
    test = data.split.test
    bank = np.sort(np.concatenate([data.split.train, data.split.val]))
    plan = plan_hash({"motion": data.name, "n_test": len(test), "unusual": list(unusual), "k": list(KS)})
    for run in runs:
        ledger = Ledger(run.folder.evaluation / "ledger.jsonl")
        ledger.record(split="test", purpose="motion study", plan=plan, n=len(test), step=run.step)
    found = video_contenders(runs, data, bank, random_seeds=len(runs), device=device, say=say)
    features: dict[str, Sequence[BankAndTest]] = {"h": found.runs["h"], "z": found.runs["z"], **found.baselines}
    labels = data.index.labels
    groups = data.index.groups[test] if (data.index.groups[test] >= 0).any() else None
    there = np.unique(labels[test]).tolist()
    numbers = [names.index(name) for name in unusual] or [one for one in there if len(there) > 1]
    ks = [k for k in KS if k <= len(bank)]
    say("retrieval and unusual behaviour")
    stand_out = unusual_classes(features, labels[bank], labels[test], numbers, groups)
    return MotionResult(
        data=data.name,
        n_test=len(test),
        retrieval=retrieval(features, labels[bank], labels[test], ks, groups),
        order={} if data.clips is None else _orders(runs, data, data.clips, bank, groups, device, say),
        unusual={name: {names[c]: one for c, one in by_class.items()} for name, by_class in stand_out.items()},
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Reordered:
    """A clip store whose clips play in another order."""

    store: ClipStore
    order: Ints
    """[S, T] the frame that stands at each place."""

    def batch(self, rows: Ints, /) -> tuple[Tensor, Tensor]:
        clips, extents = self.store.batch(rows)
        index = torch.from_numpy(self.order[rows])[:, None, :, None, None].expand_as(clips)
        return clips.gather(2, index), extents


def _orders(
    runs: Sequence[Run],
    data: VideoData,
    store: ClipStore,
    bank: Ints,
    groups: Ints | None,
    device: torch.device,
    say: Callable[[str], None],
) -> dict[str, dict[str, Interval]]:
    """Does h know the order of time? A counterfactual: the same frames, another order."""
    T = store.source.config.frames
    orders = {
        "shuffled": reorderings(len(store), T, ORDER_SEED),
        "backwards": np.tile(np.arange(T)[::-1], (len(store), 1)),
    }
    rows, place = data.of(bank)
    test_rows, test_place = data.of(data.split.test)
    encoders = {"h": [run.encoder("query") for run in runs], RANDOM_INIT: _random(runs, data, rows, device)}
    size = runs[0].config.views.size
    out: dict[str, dict[str, Interval]] = {}
    kept: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    for change in ORDERS:
        say(f"temporal order: clips {change}")
        changed = _Reordered(store, orders[change])
        out[change] = {}
        for name, several in encoders.items():
            scores = []
            for number, encoder in enumerate(several):
                views = runs[number].config.views
                part: Mapping[str, Any] = {"size": views.size, "mean": views.mean, "std": views.std, "device": device}
                moved = encoder.to(device)
                if (name, number) not in kept:
                    kept[name, number] = (
                        extract(moved, store, rows, batch=CLIPS_AT_ONCE, **part).h,
                        extract(moved, store, test_rows, batch=CLIPS_AT_ONCE, **part).h,
                    )
                plain, plain_test = kept[name, number]
                train = (plain, extract(moved, changed, rows, batch=CLIPS_AT_ONCE, **part).h)
                tested = (plain_test, extract(moved, changed, test_rows, batch=CLIPS_AT_ONCE, **part).h)
                scores.append(order_scores(train, tested, place, test_place))
            out[change][name] = crossed_interval(np.stack(scores), groups, bounds=(0, 1))
        train = (colour_histograms(store, rows, size=size), colour_histograms(changed, rows, size=size))
        tested = (colour_histograms(store, test_rows, size=size), colour_histograms(changed, test_rows, size=size))
        scores = [order_scores(train, tested, place, test_place)]
        out[change][COLOURS] = crossed_interval(np.stack(scores), groups, bounds=(0, 1))
    return out


def _random(runs: Sequence[Run], data: VideoData, rows: Ints, device: torch.device) -> list[Any]:
    """As many random encoders as runs, batch norm calibrated on the bank's clips."""
    first, found = runs[0].config, []
    for seed in range(len(runs)):
        encoder = make_encoder(first.encoder, first.views.size, RANDOM_SEED + seed).to(device)
        some = rows[:640]
        calibrate(
            encoder,
            plain_batches(
                data.store,
                some,
                size=first.views.size,
                mean=first.views.mean,
                std=first.views.std,
                batch=min(CLIPS_AT_ONCE, len(some)),
                device=device,
            ),
        )
        found.append(encoder)
    return found


def motion_table(result: MotionResult) -> str:
    """The three parts as text."""
    lines = [f"Nearest videos on {result.n_test} test videos of {result.data}: recall@k, % [95 % interval]"]
    ks = list(next(iter(result.retrieval.values())))
    width = max(len(name) for name in result.retrieval)
    lines.append(f"{'':<{width}}  " + "  ".join(f"{f'k = {k}':<21}" for k in ks).rstrip())
    for name, by_k in result.retrieval.items():
        lines.append(f"{name:<{width}}  " + "  ".join(f"{_cell(by_k[k]):<21}" for k in ks).rstrip())
    for change, found in result.order.items():
        lines.append(f"Temporal order: clips as they are told from the same {change}, % right [95 %], chance 50")
        lines += [f"{name:<{width}}  {_cell(one)}" for name, one in found.items()]
    lines.append("Unusual behaviour: ROC-AUC, % [95 %], of a class that is in none of the videos compared with")
    for name, classes in result.unusual.items():
        told = ", ".join(f"{label} {_cell(one)}" for label, one in classes.items())
        mean = np.mean([one.mean for one in classes.values()])
        lines.append(f"{name:<{width}}  mean {100 * mean:.1f}: {told}")
    return "\n".join(lines) + "\n"


def _cell(one: Interval) -> str:
    return f"{100 * one.mean:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]"
