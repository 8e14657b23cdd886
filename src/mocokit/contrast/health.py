"""Is it learning? Numbers that tell a healthy run from a sick one, and what they mean in plain words.

Labels, where given, are counted here for diagnosis and reach no loss. Measuring changes nothing: no gradient, running
statistics or random number.

Shapes: P images in the probe batch, N rows in general, D dimensions, K keys in the queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mocokit import strings
from mocokit.contrast.batch_norm import statistics_untouched
from mocokit.contrast.encoders import EncoderPair
from mocokit.contrast.key_queue import NO_ID, KeyQueue

BINS = 40
"""Bins of a histogram of cosines, equally wide from -1 to 1."""
COLLAPSED_RANK, COLLAPSED_SPREAD = 7.0, 0.33
"""A run is called collapsed only where effective rank and spread of z are both below these, twice running.

Measured within 200 steps on 128 images of digits, shapes and CIFAR-10: planted collapses (m = 0; BYOL without
predictor) came to ranks of 1.1 to 5.9 and spreads of 0.01 to 0.26, healthy runs stayed above 7.2 and 0.42. Random
weights of eight backbones had ranks from 15 up, whatever their spread.
"""
STALE = 0.5
"""Keys are called stale where the oldest ones' cosine with the same views encoded now is below this."""

# ------------------------------------------------------------------------------------------- of one set of vectors


def spread(x_ND: Tensor) -> float:
    """The standard deviation of each dimension of the unit rows, averaged over dimensions, times sqrt(D).

    1 for directions spread evenly over the sphere, 0 where all rows point the same way (Chen and He 2021, section
    4.1: std of z / ||z|| against 1 / sqrt(d)).
    """
    unit = F.normalize(x_ND.double(), dim=1)
    return float(unit.std(0, correction=0).mean() * math.sqrt(unit.shape[1]))


def effective_rank(x_ND: Tensor) -> float:
    """RankMe (Garrido et al. 2023, equation 1): exp of the entropy of the singular values' shares. 1 .. min(N, D).

    Not centred, as there: rows that all point nearly the same way have rank 1 whatever their small differences are. NaN
    where a value is not finite.
    """
    if not bool(torch.isfinite(x_ND).all()):
        return math.nan
    values = torch.linalg.svdvals(x_ND.double())
    shares = values / values.sum().clamp_min(torch.finfo(torch.float64).tiny) + 1e-7
    return float(torch.exp(-(shares * shares.log()).sum()))


def uniformity(x_ND: Tensor, t: float = 2.0) -> float:
    """ln of the mean of exp(-t ||x_i - x_j||^2) over pairs of unit rows (Wang and Isola 2020). Lower is more even."""
    squared = torch.pdist(F.normalize(x_ND.double(), dim=1)).square()
    return float((-t * squared).exp().mean().log())


# ----------------------------------------------------------------------------------------------- of queries and keys


def alignment(q_ND: Tensor, k_ND: Tensor) -> float:
    """The mean squared distance of unit queries to their own unit keys (Wang and Isola 2020, alpha = 2): 0 .. 4."""
    return float((F.normalize(q_ND.double(), dim=1) - F.normalize(k_ND.double(), dim=1)).square().sum(1).mean())


def batch_accuracy(q_ND: Tensor, k_ND: Tensor) -> float:
    """The share of queries nearer to their own key than to any other key of the same batch. Chance is 1 / N.

    All of these keys were made by one state of one encoder, so nothing but the image tells them apart.
    """
    cosines = F.normalize(q_ND, dim=1) @ F.normalize(k_ND, dim=1).T
    others = cosines.masked_fill(torch.eye(len(cosines), dtype=torch.bool, device=cosines.device), -torch.inf)
    return float((cosines.diagonal() > others.amax(1)).double().mean())


def mean_cosine(a_ND: Tensor, b_ND: Tensor) -> float:
    """The mean cosine of rows of the same number. Of stored keys and the same views encoded now: how fresh they are."""
    return float(F.cosine_similarity(a_ND.double(), b_ND.double(), dim=1).mean())


def histogram(cosines: Tensor) -> list[int]:
    """How many cosines lie in each of `BINS` bins from -1 to 1."""
    counts: list[int] = torch.histc(cosines.detach().float().clamp(-1, 1).flatten(), BINS, -1, 1).long().tolist()
    return counts


def same_share(own_N: Tensor, stored_K: Tensor) -> float:
    """The share of all (query, stored row) pairs with the same number (image id, class). NO_ID matches nothing."""
    if not len(own_N) or not len(stored_K):
        return 0.0
    numbers, counts = torch.unique(stored_K, return_counts=True)
    places = torch.searchsorted(numbers, own_N).clamp_max(len(numbers) - 1)
    met = counts[places] * ((numbers[places] == own_N) & (own_N != NO_ID))
    return float(met.double().sum()) / (len(own_N) * len(stored_K))


# -------------------------------------------------------------------------------------------------- of parameters


def parameter_distance(theta_q: Sequence[Tensor], theta_k: Sequence[Tensor]) -> float:
    """||theta_q - theta_k|| / ||theta_q|| over all parameters together."""
    apart = torch.nn.utils.get_total_norm([q.detach() - k.detach() for q, k in zip(theta_q, theta_k, strict=True)])
    return float(apart / torch.nn.utils.get_total_norm([q.detach() for q in theta_q]).clamp_min(1e-30))


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """The norm of all gradients together; 0 where there are none."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))) if gradients else 0.0


# ------------------------------------------------------------------------------------------------------ the probe


@dataclass(frozen=True, slots=True)
class Classes:
    """Labels for diagnosis: ids int64 [S] and the class of each, int64 [S], NO_ID where it isn't known."""

    ids: Tensor
    labels: Tensor

    def of(self, ids_N: Tensor) -> Tensor:
        """The class of each image, NO_ID where it isn't known. int64 [N]."""
        order = torch.argsort(self.ids)
        places = torch.searchsorted(self.ids[order], ids_N).clamp_max(len(order) - 1)
        rows = order[places]
        return torch.where((self.ids[rows] == ids_N) & (ids_N != NO_ID), self.labels[rows], NO_ID)


class HealthProbe:
    """Measures a pair of encoders on one fixed batch every `every` steps.

    view: gives view 0 (of queries) and view 1 (of keys) of P images, float32 [P, 3, H, W], always the same; asked for
    each when it is needed, so that they need not be held. ids: int64 [P], of these images. lifetime: steps that a key
    stays in the queue (K / batch size), 0 without a queue. classes: labels for diagnosis. rows: the measurements of the
    run so far, where it is resumed.

    A measurement is two forward passes without gradient (three the first time), and one or two more before it where
    keys live for less than `every` steps. The probe's earlier keys, at most 16 sets, are no part of a checkpoint: after
    a resume, their ages are counted anew. With several processes one of them may measure, unless batch norm is SyncBN:
    then all must.
    """

    def __init__(
        self,
        view: Callable[[int], Tensor],
        ids: Tensor,
        *,
        every: int,
        lifetime: float = 0.0,
        classes: Classes | None = None,
        rows: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        if every < 1:
            raise ValueError(f"`every` must be at least 1 step. Got {every}.")
        if len(ids) < 8:
            raise ValueError(f"A probe needs at least 8 images. Got {len(ids)}.")
        self.view, self.ids = view, ids
        self.every, self.lifetime, self.classes = every, lifetime, classes
        self.rows: list[Mapping[str, Any]] = list(rows)
        self._born: list[tuple[int, Tensor]] = []
        self._checked = False

    def after_step(
        self,
        pair: EncoderPair,
        queue: KeyQueue | None,
        *,
        step: int,
        total_steps: int,
        epoch: float,
        loss: float,
        chance: float | None,
        gradient: float,
    ) -> dict[str, Any] | None:
        """To be called after every optimiser step, the `step`-th; measures after the first, every `every`, the last.

        epoch, loss, chance, gradient (the norm): of the step just done. Returns a row of JSON values where it measured,
        with `findings` (code -> sentence); it is kept in `rows`.
        """
        row = None
        if step == 1 or step % self.every == 0 or step == total_steps:
            facts = {"step": step, "epoch": epoch, "loss": loss, "chance": chance, "gradient_norm": gradient}
            row = {name: _finite(value) for name, value in (facts | self.measure(pair, queue, step)).items()}
            row["findings"] = findings([*self.rows, row])
            self.rows.append(row)
        elif queue is not None and self._wanted(step, total_steps):
            self._born.append((step, self._keys(pair, self.view(1))))
        return row

    @torch.no_grad()
    def measure(self, pair: EncoderPair, queue: KeyQueue | None, step: int) -> dict[str, Any]:
        """The statistics alone. Raises ValueError for encoders in eval mode: they are measured as they are contrasted.

        In train mode batch norm normalises by the probe batch, as it does by a step's. Running statistics stay.
        """
        if not (pair.query.training and pair.key.training):
            raise ValueError("A probe measures encoders in train mode, as they are contrasted. Call pair.train().")
        with statistics_untouched(pair.query):
            h, z = pair.query.h_and_z(self.view(0))
        q = z
        if pair.predictor is not None:
            with statistics_untouched(pair.predictor):
                q = pair.predictor(z)
        x_k = self.view(1)
        q, k = F.normalize(q, dim=1), self._keys(pair, x_k)
        row: dict[str, Any] = {
            "probe": len(q),
            "spread_z": spread(z),
            "spread_h": spread(h),
            "rank_z": effective_rank(F.normalize(z, dim=1)),
            "rank_h": effective_rank(F.normalize(h, dim=1)),
            "rank_limit": min(z.shape),
            "alignment": alignment(q, k),
            "uniformity": uniformity(z),
            "batch_accuracy": batch_accuracy(q, k),
            "positives": histogram((q * k).sum(1)),
        }
        if pair.theta_k:
            row["theta_distance"] = parameter_distance(pair.theta_q, pair.theta_k)
        if queue is not None:
            row |= self._of_queue(q, queue)
            row["staleness"] = self._staleness(pair, x_k, k, step)
        else:
            apart = ~torch.eye(len(q), dtype=torch.bool, device=q.device)
            row["negatives"] = histogram((q @ k.T)[apart])
        return row

    def news(self) -> list[str]:
        """What the last measurement found and the one before did not."""
        before = self.rows[-2].get("findings", {}) if len(self.rows) > 1 else {}
        now: Mapping[str, str] = self.rows[-1]["findings"] if self.rows else {}
        return [text for code, text in now.items() if code not in before]

    def _of_queue(self, q: Tensor, queue: KeyQueue) -> dict[str, Any]:
        stored = queue.snapshot()
        row: dict[str, Any] = {
            "queue_fill": queue.fill,
            "queue_size": queue.K,
            "negatives": histogram(q @ stored.vectors.T),
            "same_source_share": same_share(self.ids, stored.ids),
        }
        if self.classes is not None:
            row["same_class_share"] = same_share(self.classes.of(self.ids), self.classes.of(stored.ids))
        return row

    @torch.no_grad()
    def _keys(self, pair: EncoderPair, x_k: Tensor) -> Tensor:
        with statistics_untouched(pair.key):
            return F.normalize(pair.key(x_k), dim=1)

    def _staleness(self, pair: EncoderPair, x_k: Tensor, k: Tensor, step: int) -> list[list[float]]:
        """(age in steps, cosine) of the probe's earlier keys that would still be in the queue, youngest first."""
        self._born = [(born, keys) for born, keys in self._born if step - born <= self.lifetime]
        told = [[step - born, mean_cosine(keys, k)] for born, keys in reversed(self._born)]
        if not self._checked:  # the same view in the same batch, by the same parameters: it must read 1
            told.insert(0, [0, mean_cosine(k, self._keys(pair, x_k))])
            self._checked = True
        if not self._born or step - self._born[-1][0] >= self.lifetime / 15:
            self._born.append((step, k))
        return told

    def _wanted(self, step: int, total_steps: int) -> bool:
        """Between measurements, where keys live for less than `every` steps: half a life and a life before the next."""
        life = int(self.lifetime)
        left = min(self.every - step % self.every, total_steps - step)
        return 1 <= life < self.every and left in (life, (life + 1) // 2)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------- plain language


def findings(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the newest of a run's measurements, in the light of the earlier ones, says in words: code -> sentence.

    Codes: `collapsed`, `at-chance`, `drift`, `stale`, `filling`. Empty when nothing is worth saying. In English; the
    same sentences stand in both languages in the texts of the report.
    """
    texts = strings.load("report", "en")
    return {code: texts[sentence_key(code)].format(**values) for code, values in finding_values(rows).items()}


def sentence_key(code: str) -> str:
    """The name of a finding's sentence in the texts of the report."""
    return f"health_{code.replace('-', '_')}"


def finding_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """What `findings` says as code -> the numbers in its sentence, as they are written."""
    if not rows:
        return {}
    told = {
        "collapsed": _collapsed(rows),
        "at-chance": _at_chance(rows),
        "drift": _drift(rows),
        "stale": _stale(rows[-1]),
        "filling": _filling(rows[-1]),
    }
    return {code: values for code, values in told.items() if values is not None}


def _low(row: Mapping[str, Any]) -> bool:
    rank, width = row["rank_z"], row["spread_z"]
    if rank is None or width is None:
        return False
    return bool(rank < min(COLLAPSED_RANK, row["rank_limit"] / 2) and width < COLLAPSED_SPREAD)


def _collapsed(rows: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """Both statistics low, twice running: one low reading may be a passing one."""
    if len(rows) < 2 or not (_low(rows[-2]) and _low(rows[-1])):
        return None
    last = rows[-1]
    return {"rank": f"{last['rank_z']:.1f}", "limit": f"{last['rank_limit']}", "spread": f"{last['spread_z']:.2f}"}


def _at_chance(rows: Sequence[Mapping[str, Any]], epochs: float = 3.0) -> dict[str, str] | None:
    last = rows[-1]
    since = None
    for row in reversed(rows):
        if not row["chance"] or row["loss"] is None or row["loss"] < 0.98 * row["chance"]:
            break
        since = row["epoch"]
    if since is None or last["epoch"] - since < epochs:
        return None
    return {
        "epochs": f"{last['epoch'] - since:.0f}",
        "loss": f"{last['loss']:.2f}",
        "chance": f"{last['chance']:.2f}",
    }


def _drift(rows: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """Below chance although keys of one batch can't be told apart: then it is the keys' age that is told."""
    if len(rows) < 2 or not all(_drifts(row) for row in rows[-2:]):
        return None
    row = rows[-1]
    return {"below": f"{row['chance'] - row['loss']:.2f}", "found": f"{row['batch_accuracy']:.1%}"}


def _drifts(row: Mapping[str, Any]) -> bool:
    """Of queries that guess, one on average finds its key; more than three are 2 % likely."""
    if not row["chance"] or row["loss"] is None or not row.get("queue_fill"):
        return False
    below = row["chance"] - row["loss"]
    return bool(below >= max(0.5, 0.1 * row["chance"]) and row["batch_accuracy"] <= 3 / row["probe"])


def _stale(row: Mapping[str, Any]) -> dict[str, str] | None:
    if not row.get("staleness"):
        return None
    age, cosine = row["staleness"][-1]
    if age == 0 or cosine >= STALE:
        return None
    return {"cosine": f"{cosine:.2f}", "age": f"{age:.0f}"}


def _filling(row: Mapping[str, Any]) -> dict[str, str] | None:
    fill, size = row.get("queue_fill"), row.get("queue_size")
    if not size or fill is None or fill >= size:
        return None
    return {"fill": f"{fill:,}", "size": f"{size:,}"}
