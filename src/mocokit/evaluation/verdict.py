"""From paired scores to a verdict: an interval that crosses runs with test images, and one line of text.

The same test images are read by every run (or label draw), so runs and images are crossed, not nested: a test image
that is easy is easy in all of them. With D[r, i] = mu + run_r + image_i + rest_ri the grand mean has variance

    Var(mean) = (MS_R + MS_I - MS_RI) / (R I)        (two-way random effects, one observation per cell)

where the three mean squares are those of the analysis of variance. With 3 or 5 runs MS_R has 2 or 4 degrees of
freedom, and the usual route (this sum, Satterthwaite's degrees of freedom, one Student t) covers as little as 88 % in
place of 95: when MS_R happens to be small, both the variance and its claimed precision go wrong at once. So each
part gets its own t quantile, squared and added (Cochran's approximation):

    half width^2 = [ t(R-1)^2 MS_R + t(I-1)^2 max(MS_I - MS_RI, 0) ] / (R I),
    and never less than t(I-1)^2 MS_I / (R I), the interval with the runs at hand held fixed.

The table of coverages measured with it is in docs/evaluation.md; a test repeats a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from mocokit.errors import DataError, UsageError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Outcome = Literal["BETTER", "NO CLEAR DIFFERENCE", "WORSE"]

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float
    df: float
    this_run_only: bool


def crossed_interval(
    D: npt.ArrayLike,
    groups: Ints | None = None,
    confidence: float = CONFIDENCE,
    bounds: tuple[float, float] | None = None,
) -> Interval:
    values = np.asarray(D, np.float64)
    R, I = values.shape
    rows = values.mean(axis=1)
    mean = float(rows.mean())
    deviations, df_I = _deviations(values, rows, groups)
    G = deviations.shape[1]
    columns = deviations.mean(axis=0)
    sum_I = R * float((columns**2).sum())
    centre = mean
    if bounds is not None:
        sum_I += R * sum(((bound - mean) * G / I) ** 2 for bound in bounds)
        centre = (I * mean + sum(bounds)) / (I + 2)
    MS_I = sum_I / (G - 1)
    t_I = float(stats.t.ppf((1 + confidence) / 2, df_I))
    if R == 1:
        half2, df = t_I**2 * MS_I, df_I
    else:
        MS_R = G * float(((rows - mean) ** 2).sum()) / (R - 1)
        MS_RI = float(((deviations - columns) ** 2).sum()) / ((R - 1) * (G - 1))
        t_R = float(stats.t.ppf((1 + confidence) / 2, R - 1))
        c = 0.5 if R > 2 else 0.0
        half2 = max(t_R**2 * max(MS_R - c * MS_RI, 0.0) + t_I**2 * max(MS_I - (1 - c) * MS_RI, 0.0), t_I**2 * MS_I)
        df = 0.
    half = (half2 / (R * G)) ** 0.5
    return Interval(mean=mean, low=centre - half, high=centre + half, df=df, this_run_only=R == 1)


def _deviations(values: Floats, rows: Floats, groups: Ints | None) -> tuple[Floats, float]:
    I = values.shape[1]
    if groups is None:
        return values - rows[:, None], I - 1.0
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    G = len(sizes)
    sums = np.zeros((len(rows), G))
    np.add.at(sums, (slice(None), member), values)
    share = sizes / I
    leverage = (1 - 1 / G) / (1 - share)
    deviations = (sums - sizes * rows[:, None]) * (G / I) * leverage
    return deviations, max(1.0, 1 / float((share**2).sum()) - 1)
