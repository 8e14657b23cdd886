"""The linear probe: multinomial logistic regression on frozen features, by L-BFGS.

With W [D, C] the weights and b [C] the biases, the minimum over both is taken of

    mean over the M images of  -log softmax(x W + b)[label]  +  ||W||^2 / (2 strength M)

where x is the feature vector standardised by the mean and standard deviation of the labelled images that the probe is
fitted to. That is scikit-learn's `make_pipeline(StandardScaler(), LogisticRegression(C=strength))`, of two classes
too (where scikit-learn counts the penalty of the difference of both weight vectors, that is twice). Everything is
computed in float64, beyond 20 million feature values in float32. There is no randomness: the start is zero.

The solution lies in the span of the images, so with fewer images than dimensions the problem is solved in their
principal axes, exactly and much faster.

Shapes: M bank rows, Q queries, D dimensions, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from mocokit.errors import DivergedError, UsageError
from mocokit.evaluation.protocol import folds_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""What `choose_strength` tries: scikit-learn's C, the inverse of the penalty."""
DEFAULT_STRENGTH = 1.0
"""Where nothing can be tried, with one label a class."""
_FLOAT64_VALUES = 20_000_000
_REDUCED_IMAGES = 1000  # up to so many images the principal axes cost less than they save
_ITERATIONS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A fitted probe. Classes that no image of the bank had get probability 0."""

    centre: Tensor
    """[D] mean of the bank's features."""
    weight: Tensor
    """[D, C'] of the classes in `classes`, on features divided by their standard deviation: that is put in here."""
    bias: Tensor
    """[C']"""
    classes: Ints
    """[C'] numbers of the classes that there were."""
    n_classes: int
    strength: float

    def probabilities(self, queries: Tensor) -> Floats:
        """float64 [Q, C] of queries [Q, D]; rows add up to 1. Raises DivergedError for features not finite."""
        _check_finite(queries, "query")
        logits = (queries.to(self.weight.dtype) - self.centre) @ self.weight + self.bias
        found = torch.softmax(logits.double(), dim=1).cpu().numpy()
        if len(self.classes) == self.n_classes:
            return np.asarray(found, np.float64)
        whole = np.zeros((len(queries), self.n_classes))
        whole[:, self.classes] = found
        return whole


def fit_probe(
    bank: Tensor, labels: Ints, *, n_classes: int, strength: float = DEFAULT_STRENGTH, tolerance: float = 1e-7
) -> Probe:
    """The probe of bank [M, D] (floating point) with labels int64 [M] in 0..n_classes-1.

    strength: scikit-learn's C, above 0. tolerance: of the largest component of the gradient. Raises UsageError for
    labels or a strength out of range, DivergedError for features that are not finite.
    """
    return _path(bank, labels, (strength,), n_classes=n_classes, tolerance=tolerance)[0]


def choose_strength(
    bank: Tensor,
    labels: Ints,
    units: Ints,
    *,
    n_classes: int,
    held: Bools | None = None,
    seed: int = 0,
    strengths: Sequence[float] = STRENGTHS,
    folds: int = 5,
) -> float:
    """The strength under which labelled images that a fit has not seen are likeliest (mean log probability).

    held: bool [M], images of the validation split: the fit is to the others, judged on these. None: five folds of the
    bank, each judged by a fit to the others; units: int64 [M], groups or ids, each in one fold. Held-out images of a
    class that the fit has not seen are not judged. The smaller strength (the stronger penalty) wins ties, and
    DEFAULT_STRENGTH is the answer where nothing can be judged.
    """
    ordered = sorted(strengths)
    fold = np.where(held, 0, -1) if held is not None else folds_of(labels, units, folds, seed)
    score = np.zeros(len(ordered))
    judged = 0
    for number in range(int(fold.max()) + 1):
        inside, outside = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        outside = outside[np.isin(labels[outside], labels[inside])]
        if len(np.unique(labels[inside])) < 2 or not len(outside):
            continue
        judged += len(outside)
        fits = _path(bank[inside], labels[inside], ordered, n_classes=n_classes, tolerance=1e-4)
        for place, probe in enumerate(fits):
            likely = probe.probabilities(bank[outside])[np.arange(len(outside)), labels[outside]]
            score[place] += float(np.log(np.maximum(likely, 1e-300)).sum())
    return ordered[int(score.argmax())] if judged else DEFAULT_STRENGTH


def _path(bank: Tensor, labels: Ints, strengths: Sequence[float], *, n_classes: int, tolerance: float) -> list[Probe]:
    """Probes of the same images for ascending strengths, each started from the one before."""
    M, D = bank.shape
    if len(labels) != M or not M or labels.min() < 0 or labels.max() >= n_classes:
        raise UsageError(
            f"The bank has {M} vectors and {len(labels)} labels, which must be as many, at least one, and lie in "
            f"0..{n_classes - 1}. Leave unlabelled samples out of the bank."
        )
    if not all(strength > 0 for strength in strengths):
        raise UsageError(f"The strength of a probe must be above 0. Got {min(strengths)}.")
    _check_finite(bank, "bank")
    classes, y = np.unique(labels, return_inverse=True)
    x = bank.to(torch.float64 if M * D <= _FLOAT64_VALUES else torch.float32)
    centre = x.mean(0)
    scale = (x - centre).square().mean(0).sqrt()
    scale = torch.where(scale > 10 * torch.finfo(x.dtype).eps * centre.abs().clamp(min=1e-30), scale, 1.0)
    x = (x - centre) / scale
    axes: Tensor | None = None
    if min(D, _REDUCED_IMAGES) >= M:
        U, S, Vt = torch.linalg.svd(x, full_matrices=False)
        x, axes = U * S, Vt.T
    target = torch.from_numpy(y.astype(np.int64)).to(x.device)
    weight, bias = x.new_zeros(x.shape[1], len(classes)), x.new_zeros(len(classes))
    found = []
    for strength in strengths:
        if len(classes) > 1:
            weight, bias = _minimise(x, target, weight, bias, strength, tolerance)
        full = weight if axes is None else axes @ weight
        found.append(Probe(centre, full / scale[:, None], bias, classes, n_classes, strength))
    return found


def _minimise(
    x: Tensor, target: Tensor, weight: Tensor, bias: Tensor, strength: float, tolerance: float
) -> tuple[Tensor, Tensor]:
    """L-BFGS (Liu and Nocedal 1989) with a strong Wolfe line search, from the weights given."""
    C = len(bias)
    penalty = (2 if C == 2 else 1) / (2 * strength * len(x))
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [weight, bias],
        max_iter=_ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=1e-12 if x.dtype == torch.float64 else 1e-9,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, target) + penalty * weight.square().sum()
        torch.autograd.backward(loss)
        return loss

    with torch.inference_mode(False), torch.enable_grad():
        search.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def _check_finite(x: Tensor, name: str) -> None:
    if not bool(torch.isfinite(x).all()):
        raise DivergedError(f"Some {name} features are not finite: the encoder diverged. Evaluate an earlier step.")
