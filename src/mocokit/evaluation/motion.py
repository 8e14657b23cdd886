"""What a representation of videos knows beside the classes: nearest clips, the order of time, unusual behaviour.

All three compare the same features as the evaluation does (runs, random weights, colours, pixels), on test videos,
with intervals over test videos crossed with runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata
from torch import Tensor
from torch.nn import functional as F

from mocokit.data.randomness import hash_words, word
from mocokit.errors import DataError, UsageError
from mocokit.evaluation.crossing import BankAndTest
from mocokit.evaluation.interval import Interval, between_bounds, crossed_interval
from mocokit.evaluation.knn import nearest
from mocokit.evaluation.probe import choose_strength, fit_probe

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NEIGHBOURS = 5
"""Training videos whose mean distance says how unusual a video is."""


def found_within(bank: Tensor, bank_labels: Ints, queries: Tensor, query_labels: Ints, k: int) -> Floats:
    """[Q] 1 where one of a query's k nearest bank rows (cosine) has its class, else 0: recall@k is the mean."""
    if not 1 <= k <= len(bank):
        raise UsageError(f"recall@{k} needs at least {k} videos to search among; there are {len(bank)}.")
    _, rows = nearest(bank, queries, k)
    return np.asarray((bank_labels[rows] == query_labels[:, None]).any(1), np.float64)


def retrieval(
    features: Mapping[str, Sequence[BankAndTest]],
    bank_labels: Ints,
    test_labels: Ints,
    ks: Sequence[int],
    groups: Ints | None = None,
) -> dict[str, dict[int, Interval]]:
    """Recall@k by method and k: test videos whose k nearest training videos hold one of their class."""
    return {
        name: {
            k: _interval([found_within(bank, bank_labels, test, test_labels, k) for bank, test in pairs], groups)
            for k in ks
        }
        for name, pairs in features.items()
    }


def _interval(rows: Sequence[Floats], groups: Ints | None) -> Interval:
    return crossed_interval(np.stack(rows), groups, bounds=(0, 1))


# ------------------------------------------------------------------------------------------------ order of time


def reorderings(clips: int, frames: int, seed: int) -> Ints:
    """[clips, frames] a random order of frames for each clip, never the order there is nor its reverse."""
    out = np.empty((clips, frames), np.int64)
    forward = np.arange(frames)
    for clip in range(clips):
        for attempt in range(100):
            key = hash_words(seed, word("shuffled frames"), clip, attempt, np.arange(frames, dtype=np.int64))
            out[clip] = np.argsort(key, kind="stable")
            if frames < 3 or not (np.array_equal(out[clip], forward) or np.array_equal(out[clip], forward[::-1])):
                break
    return out


def order_scores(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], train_videos: Ints, test_videos: Ints
) -> Floats:
    """[V'] share right, by test video: a linear probe tells clips as they are from changed ones.

    train, test: features [S, D] of the clips as they are, and of the same clips changed (shuffled or played
    backwards). *_videos: the video of each clip. The probe's penalty is chosen by cross-validation over the training
    videos, both versions of a clip in one fold. Chance is 0.5: features that do not see the change are the same.
    """
    x = torch.cat(train)
    labels = np.repeat(np.array([0, 1], np.int64), [len(train[0]), len(train[1])])
    units = np.concatenate([train_videos, train_videos])
    strength = choose_strength(x, labels, units, n_classes=2)
    probe = fit_probe(x, labels, n_classes=2, strength=strength)
    # A probe that sees no difference answers alike for both versions, which is right for one of the two.
    right = [(probe.probabilities(part).argmax(1) == truth).astype(np.float64) for truth, part in enumerate(test)]
    per_clip = (right[0] + right[1]) / 2
    _, place = np.unique(test_videos, return_inverse=True)
    return np.asarray(np.bincount(place, per_clip) / np.bincount(place), np.float64)


# ---------------------------------------------------------------------------------------------- unusual behaviour


def unusualness(bank: Tensor, queries: Tensor) -> Floats:
    """[Q] mean cosine distance to the NEIGHBOURS nearest bank rows, 0..2: no label is read."""
    k = min(NEIGHBOURS, len(bank))
    similarities, _ = nearest(F.normalize(bank, dim=1), queries, k)
    return np.asarray(1.0 - np.asarray(similarities, np.float64).mean(1), np.float64)


def auc(scores: Floats, unusual: Bools) -> float:
    """ROC-AUC of scores [Q]: the share of (unusual, usual) pairs in which the unusual one scores higher; ties half.

    Raises DataError when one of the kinds is missing.
    """
    return float(_auc_numbers(scores, unusual).mean())


def _auc_numbers(scores: Floats, unusual: Bools) -> Floats:
    """[Q] numbers whose mean is the AUC and whose spread is its own to first order (DeLong et al. 1988).

    A video's number is the AUC, plus how far the share of pairs that it wins is from it, times all videos for each of
    its kind.
    """
    positive, negative = scores[unusual], scores[~unusual]
    if not len(positive) or not len(negative):
        raise DataError("A ROC curve needs test videos of the held-out class and of others.")
    ranks = rankdata(scores)
    wins = np.empty(len(scores))
    wins[unusual] = (ranks[unusual] - rankdata(positive)) / len(negative)
    wins[~unusual] = 1 - (ranks[~unusual] - rankdata(negative)) / len(positive)
    area = wins[unusual].mean()
    weight = len(scores) / np.where(unusual, len(positive), len(negative))
    return np.asarray(area + (wins - area) * weight, np.float64)


def auc_interval(scores: Sequence[Floats], unusual: Bools, groups: Ints | None = None) -> Interval:
    """The mean AUC over runs, scores R x [Q], with its interval over runs and test videos.

    A class that is told apart perfectly says too little about how sure that is, so for the interval two more videos
    of each kind are imagined, one above and one below all others, as `crossed_interval` does for scores.
    """
    mean = float(np.mean([auc(one, unusual) for one in scores]))
    kinds = np.concatenate([unusual, [True, True, False, False]])
    more = [np.concatenate([one, np.array([2.0, -2.0, 2.0, -2.0]) * (1 + np.abs(one).max())]) for one in scores]
    alone = None if groups is None else np.concatenate([groups, np.full(4, -1)])
    wide = crossed_interval(np.stack([_auc_numbers(one, kinds) for one in more]), alone)
    low, high = between_bounds(wide.mean, (wide.high - wide.low) / 2, 0.0, 1.0)
    return Interval(mean=mean, low=min(low, mean), high=max(high, mean), df=wide.df, this_run_only=wide.this_run_only)


def unusual_classes(
    features: Mapping[str, Sequence[BankAndTest]],
    bank_labels: Ints,
    test_labels: Ints,
    classes: Sequence[int],
    groups: Ints | None = None,
) -> dict[str, dict[int, Interval]]:
    """ROC-AUC by method and class: each class in turn is left out of the bank, and its test videos should stand out."""
    out: dict[str, dict[int, Interval]] = {}
    for name, pairs in features.items():
        out[name] = {}
        for number in classes:
            usual = torch.from_numpy(np.flatnonzero(bank_labels != number))
            scores = [unusualness(bank[usual], test) for bank, test in pairs]
            out[name][number] = auc_interval(scores, test_labels == number, groups)
    return out
