"""The interval against direct formulas, and its coverage by simulation with known truth."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mocokit.errors import DataError
from mocokit.evaluation.interval import crossed_interval


def mean_squares(D: np.ndarray) -> tuple[float, float, float]:
    """Analysis of variance by least squares on dummy variables: runs, images, rest."""
    R, I = D.shape  # noqa: E741
    run, image = np.divmod(np.arange(R * I), I)

    def rest(*factors: np.ndarray) -> float:
        X = np.concatenate([np.ones((R * I, 1)), *(f[:, None] == np.unique(f) for f in factors)], axis=1)
        y = D.ravel()
        return float(((y - X @ np.linalg.lstsq(X, y)[0]) ** 2).sum())

    nothing, runs, images, both = rest(), rest(run), rest(image), rest(run, image)
    return (nothing - runs) / (R - 1), (nothing - images) / (I - 1), both / ((R - 1) * (I - 1))


@pytest.mark.parametrize("R", [2, 3, 7])
@pytest.mark.parametrize(("sd_run", "sd_image"), [(0.0, 0.0), (0.2, 0.1), (1.0, 0.0), (0.0, 1.0)])
def test_equals_the_formula_on_least_squares_mean_squares(R: int, sd_run: float, sd_image: float) -> None:
    rng = np.random.default_rng(R)
    D = rng.normal(size=(R, 12)) + sd_run * rng.normal(size=(R, 1)) + sd_image * rng.normal(size=12)
    MS_R, MS_I, MS_RI = mean_squares(D)
    t_R, t_I = stats.t.ppf(0.975, R - 1), stats.t.ppf(0.975, 11)
    share = 0.5 if R > 2 else 0.0
    square = t_R**2 * max(MS_R - share * MS_RI, 0) + t_I**2 * max(MS_I - (1 - share) * MS_RI, 0)
    half = np.sqrt(max(square, t_I**2 * MS_I) / (R * 12))
    got = crossed_interval(D)
    assert (got.mean, got.low, got.high) == pytest.approx((D.mean(), D.mean() - half, D.mean() + half))
    assert got.df > 0
    assert not got.this_run_only


def test_one_run_is_the_t_interval_over_images() -> None:
    D = np.random.default_rng(0).normal(size=(1, 40))
    expected = stats.t.interval(0.9, 39, D.mean(), stats.sem(D[0]))
    got = crossed_interval(D, confidence=0.9)
    assert (got.low, got.high) == pytest.approx(expected)
    assert got.df == 39
    assert got.this_run_only


def test_equal_runs_add_nothing_but_are_no_new_images_either() -> None:
    D = np.random.default_rng(0).normal(size=(1, 40))
    one, five = crossed_interval(D), crossed_interval(np.repeat(D, 5, axis=0))
    assert (one.low, one.high) == pytest.approx((five.low, five.high))


@given(seed=st.integers(0, 10_000), R=st.integers(1, 6), images=st.integers(2, 40), grouped=st.booleans())
@settings(max_examples=150, deadline=None)
def test_never_narrower_than_with_the_runs_held_fixed_and_always_around_the_mean(
    seed: int, R: int, images: int, grouped: bool
) -> None:
    rng = np.random.default_rng(seed)
    D = (rng.random((R, images)) < rng.choice([0.02, 0.5, 0.97])).astype(float)
    groups = rng.integers(0, images, images) if grouped else None
    if grouped and len(np.unique(groups)) < 2:
        return
    crossed = crossed_interval(D, groups)
    fixed = crossed_interval(D.mean(axis=0, keepdims=True), groups)
    assert crossed.high - crossed.low >= (fixed.high - fixed.low) * (1 - 1e-9)
    for bounds in ((0.0, 1.0), (-1.0, 1.0)):
        bounded = crossed_interval(D, groups, bounds=bounds)
        assert bounds[0] <= bounded.low <= bounded.mean + 1e-12
        assert bounded.mean - 1e-12 <= bounded.high <= bounds[1]
        assert bounded.high > bounded.low
    negated = crossed_interval(-D, groups, bounds=(-1, 1))
    assert (negated.low, negated.high) == pytest.approx((-bounded.high, -bounded.low), abs=1e-12)


def test_equal_groups_are_like_one_value_per_group() -> None:
    rng = np.random.default_rng(1)
    D = rng.normal(size=(4, 60)) + np.repeat(rng.normal(size=12), 5)
    order = rng.permutation(60)
    groups = np.repeat(np.arange(12) * 10**17, 5)
    got = crossed_interval(D[:, order], groups[order])
    expected = crossed_interval(D.reshape(4, 12, 5).mean(axis=2))
    assert (got.mean, got.low, got.high, got.df) == pytest.approx(
        (expected.mean, expected.low, expected.high, expected.df)
    )


def test_unequal_groups_equal_the_jackknife_over_groups() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(1, 15, 9)
    groups = np.repeat(np.arange(9), sizes)
    D = (rng.normal(size=9)[groups] + rng.normal(size=len(groups)))[None]
    left_out = np.array([D[0, groups != g].mean() for g in range(9)])
    error = np.sqrt(8 / 9 * ((left_out - D.mean()) ** 2).sum())
    got = crossed_interval(D, groups)
    df = 1 / ((sizes / sizes.sum()) ** 2).sum() - 1
    assert got.mean == pytest.approx(D.mean())
    assert got.df == pytest.approx(df)
    assert (got.high - got.low) / 2 == pytest.approx(stats.t.ppf(0.975, df) * error)


def test_images_without_a_group_are_groups_of_their_own() -> None:
    D = np.random.default_rng(3).normal(size=(3, 20))
    apart, none = crossed_interval(D, np.full(20, -1)), crossed_interval(D)
    assert (apart.low, apart.high, apart.df) == pytest.approx((none.low, none.high, none.df))


@pytest.mark.parametrize("n", [50, 100, 5000])
def test_few_differences_are_judged_as_by_the_sign_test(n: int) -> None:
    for wins in range(1, 12):
        D = np.zeros((1, n))
        D[0, :wins] = 1
        clear = crossed_interval(D, bounds=(-1, 1)).low > 0
        assert clear == (stats.binomtest(wins, wins).pvalue < 0.05)


def test_a_perfect_score_is_not_certain() -> None:
    for R in (1, 3):
        got = crossed_interval(np.ones((R, 100)), bounds=(0, 1))
        assert 0.95 < got.low < 0.975  # the rule of three: 1 - 3 / 100
        assert got.high == 1.0
    videos = crossed_interval(np.ones((1, 100)), np.repeat(np.arange(10), 10), bounds=(0, 1))
    assert 0.5 < videos.low < 0.75  # ten videos are ten things, not a hundred: 1 - 3 / 10, and wider for the t


def test_too_little_or_not_a_number_is_refused() -> None:
    with pytest.raises(DataError, match="at least 2"):
        crossed_interval(np.ones((3, 1)))
    with pytest.raises(DataError, match="at least 2"):
        crossed_interval(np.ones((3, 10)), np.zeros(10, np.int64))
    with pytest.raises(ValueError, match="finite"):
        crossed_interval(np.full((3, 10), np.nan))
    with pytest.raises(ValueError, match="2 axes"):
        crossed_interval(np.ones(10))


# ------------------------------------------------------------------------------------------------- coverage
#
# A latent number per answer: the run's, the image's (partly shared by the two methods) and a rest; right above a
# threshold. The true accuracy is the threshold's normal tail. The other method may be the same in every run.


def covered(
    R: int, images: int, sd_run: float, alike: float, shared: float, same_in_all_runs: bool, times: int, seed: int
) -> float:
    """The share of intervals for a difference of 70 % and 60 % that contain 10 points."""
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(times):
        both = rng.normal(size=images)

        def answers(accuracy: float, rows: int, sd: float, both: np.ndarray = both) -> np.ndarray:
            image = np.sqrt(shared) * both + np.sqrt(1 - shared) * rng.normal(size=images)
            latent = np.sqrt(alike) * image + np.sqrt(1 - alike) * rng.normal(size=(rows, images))
            latent += sd * rng.normal(size=(rows, 1))
            return latent < stats.norm.ppf(accuracy) * np.sqrt(1 + sd**2)

        other = answers(0.6, 1, 0.0) if same_in_all_runs else answers(0.6, R, sd_run)
        D = answers(0.7, R, sd_run).astype(float) - other
        got = crossed_interval(D, bounds=(-1, 1))
        hits += got.low <= 0.1 <= got.high
    return hits / times


SMALL_GRID = [(3, 200, 0.1, 0.8, 0.8, False), (5, 200, 0.1, 0.8, 0.5, True), (10, 100, 0.2, 0.5, 0.5, False)]


@pytest.mark.parametrize("case", SMALL_GRID)
def test_coverage_with_few_runs(case: tuple[int, int, float, float, float, bool]) -> None:
    assert 0.93 <= covered(*case, times=600, seed=0) <= 0.985


@pytest.mark.slow
@pytest.mark.parametrize("R", [1, 2, 3, 5, 10, 20])
def test_coverage_over_a_grid(R: int) -> None:
    got = [
        covered(R, images, sd_run, *rest, times=1000, seed=R)
        for images in (100, 300)
        for sd_run in ((0.0,) if R == 1 else (0.0, 0.1, 0.4))
        for rest in ((0.3, 0.5, False), (0.8, 0.8, False), (0.8, 0.5, True))
    ]
    assert min(got) >= 0.925  # 0.93 and the noise of 1,000 simulations
    assert np.mean(got) <= (0.975 if R > 2 else 0.99)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [lambda rng: np.full(20, 10), lambda rng: rng.geometric(0.1, 20)], ids=["equal", "geometric"]
)
def test_coverage_with_groups(sizes: Callable[[np.random.Generator], np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    with_groups = without = 0
    for _ in range(1000):
        groups = np.repeat(np.arange(20), sizes(rng))
        latent = np.sqrt(0.6) * rng.normal(size=20)[groups] + np.sqrt(0.2) * rng.normal(size=len(groups))
        latent = latent + np.sqrt(0.2) * rng.normal(size=(3, len(groups))) + 0.1 * rng.normal(size=(3, 1))
        D = (latent < stats.norm.ppf(0.7) * np.sqrt(1.01)).astype(float)
        one, two = crossed_interval(D, groups, bounds=(0, 1)), crossed_interval(D, bounds=(0, 1))
        with_groups += one.low <= 0.7 <= one.high
        without += two.low <= 0.7 <= two.high
    assert 0.925 <= with_groups / 1000 <= 0.985
    assert without / 1000 < 0.9, "ignoring groups must be seen to fail, or this test shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("R", [3, 5, 10])
def test_coverage_of_a_paired_difference_with_seeds_groups_and_correlated_methods(R: int) -> None:
    """1,000 experiments: R seeds of both methods, 60 unequal groups of images that are alike, methods that agree."""
    rng = np.random.default_rng(R)
    hits = 0
    for _ in range(1000):
        groups = np.repeat(np.arange(60), rng.integers(1, 9, 60))
        images = len(groups)
        both = np.sqrt(0.5) * rng.normal(size=60)[groups] + np.sqrt(0.5) * rng.normal(size=images)

        def answers(accuracy: float, both: np.ndarray = both, images: int = images) -> np.ndarray:
            image = np.sqrt(0.7) * both + np.sqrt(0.3) * rng.normal(size=images)
            latent = np.sqrt(0.7) * image + np.sqrt(0.3) * rng.normal(size=(R, images)) + 0.1 * rng.normal(size=(R, 1))
            return (latent < stats.norm.ppf(accuracy) * np.sqrt(1.01)).astype(float)

        got = crossed_interval(answers(0.75) - answers(0.65), groups, bounds=(-1, 1))
        hits += got.low <= 0.1 <= got.high
    assert 0.93 <= hits / 1000 <= 0.97
