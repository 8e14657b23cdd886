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
_ROUGH = 1e-3  # the gradient's tolerance while penalties are compared


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
    return _Problem(bank, labels, n_classes).solve(strength, tolerance)


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
    fold = np.where(held, 0, -1) if held is not None else folds_of(labels, units, folds, seed)
    parts = []
    for number in range(int(fold.max()) + 1):
        inside, outside = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        outside = outside[np.isin(labels[outside], labels[inside])]
        if len(np.unique(labels[inside])) > 1 and len(outside):
            parts.append((_Problem(bank[inside], labels[inside], n_classes), outside))
    best, best_score, falling = DEFAULT_STRENGTH, -np.inf, 0
    for strength in sorted(strengths) if parts else ():
        score = 0.0
        for problem, outside in parts:
            chances = problem.solve(strength, _ROUGH).probabilities(bank[outside])
            score += float(np.log(np.maximum(chances[np.arange(len(outside)), labels[outside]], 1e-300)).sum())
        if score > best_score:
            best, best_score, falling = strength, score, 0
        else:
            falling += 1
        if falling == 2:
            break  # the likelihood has one peak over the penalty, and weaker penalties take longest to fit
    return best


class _Problem:
    """Labelled images, standardised and in their principal axes; each fit starts from the last one's weights."""

    def __init__(self, bank: Tensor, labels: Ints, n_classes: int) -> None:
        M, D = bank.shape
        if len(labels) != M or not M or labels.min() < 0 or labels.max() >= n_classes:
            raise UsageError(
                f"The bank has {M} vectors and {len(labels)} labels, which must be as many, at least one, and lie in "
                f"0..{n_classes - 1}. Leave unlabelled samples out of the bank."
            )
        _check_finite(bank, "bank")
        self.n_classes = n_classes
        self.classes, y = np.unique(labels, return_inverse=True)
        x = bank.to(torch.float64 if M * D <= _FLOAT64_VALUES else torch.float32)
        self.centre = x.mean(0)
        scale = (x - self.centre).square().mean(0).sqrt()
        constant = scale <= 10 * torch.finfo(x.dtype).eps * self.centre.abs().clamp(min=1e-30)
        self.scale = torch.where(constant, 1.0, scale)
        x = (x - self.centre) / self.scale
        self.axes: Tensor | None = None
        if min(D, _REDUCED_IMAGES) >= M:
            U, S, Vt = torch.linalg.svd(x, full_matrices=False)
            x, self.axes = U * S, Vt.T
        self.x, self.target = x, torch.from_numpy(y.astype(np.int64)).to(x.device)
        self.weight, self.bias = x.new_zeros(x.shape[1], len(self.classes)), x.new_zeros(len(self.classes))

    def solve(self, strength: float, tolerance: float) -> Probe:
        """The probe of that strength, by L-BFGS (Liu and Nocedal 1989) with a strong Wolfe line search."""
        if not strength > 0:
            raise UsageError(f"The strength of a probe must be above 0. Got {strength}.")
        if len(self.classes) > 1:
            self._minimise(strength, tolerance)
        full = self.weight if self.axes is None else self.axes @ self.weight
        return Probe(self.centre, full / self.scale[:, None], self.bias, self.classes, self.n_classes, strength)

    def _minimise(self, strength: float, tolerance: float) -> None:
        x, target, M = self.x, self.target, len(self.x)
        penalty = (2 if len(self.classes) == 2 else 1) / (2 * strength * M)
        hot = F.one_hot(target, len(self.classes)).to(x.dtype)
        weight, bias = self.weight.clone(), self.bias.clone()
        search = torch.optim.LBFGS(
            [weight, bias],
            max_iter=_ITERATIONS,
            tolerance_grad=tolerance,
            tolerance_change=1e-12 if x.dtype == torch.float64 else 1e-9,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            """The loss; its gradient is written out, which is twice as fast as autograd on such small problems."""
            log_chances = torch.log_softmax(x @ weight + bias, 1)
            slope = (log_chances.exp() - hot) / M
            weight.grad = x.T @ slope + 2 * penalty * weight
            bias.grad = slope.sum(0)
            return penalty * weight.square().sum() - (log_chances * hot).sum() / M

        search.step(closure)  # type: ignore[no-untyped-call]
        self.weight, self.bias = weight, bias


def _check_finite(x: Tensor, name: str) -> None:
    if not bool(torch.isfinite(x).all()):
        raise DivergedError(f"Some {name} features are not finite: the encoder diverged. Evaluate an earlier step.")
