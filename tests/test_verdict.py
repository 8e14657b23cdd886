import json

import numpy as np
import pytest

from mocokit.errors import UsageError
from mocokit.evaluation.verdict import Verdict, crossed_interval, decide, verdict_line

KEYS = {
    "verdict", "metric", "score", "score_ci95", "baseline", "baselines", "delta", "ci95", "n_test", "seeds",
    "readout", "encoder", "step", "this_run_only", "draws", "labels_per_class", "judged",
}  # fmt: skip


def answers(accuracy: float, R: int, images: int, seed: int = 0) -> np.ndarray:
    """[R, images] with exactly this share right in every row."""
    rng = np.random.default_rng(seed)
    base = np.arange(images) < round(accuracy * images)
    return np.stack([rng.permutation(base) for _ in range(R)]).astype(float)


def scores(R: int = 5, images: int = 2000) -> dict[str, np.ndarray]:
    return {
        "pixels": answers(0.521, R, images, 1),
        "mocokit": answers(0.713, R, images, 2),
        "random init": answers(0.42, R, images, 3),
        "random init (flattened)": answers(0.41, R, images, 4),
    }


def make(table: dict[str, np.ndarray], **changes: object) -> Verdict:
    settings: dict[str, object] = {"metric": "kNN", "readout": "h", "encoder": "query", "step": 7, "runs": 5}
    return decide(table, "mocokit", **(settings | changes))  # type: ignore[arg-type]


def test_the_line_has_the_agreed_form() -> None:
    verdict = make(scores())
    low, high = (f"{100 * x:+.1f}" for x in verdict.ci95)
    assert verdict_line(verdict) == (
        "VERDICT: BETTER | kNN 71.3 % vs pixels 52.1 % (strongest of 3 baselines; random init 42.0 %) | "
        f"+19.2 pp [95 % CI {low}, {high}] | n=2000 test images, 5 seeds"
    )
    assert float(low) == pytest.approx(17.4, abs=1)


def test_json_has_exactly_the_agreed_keys_and_survives_json() -> None:
    verdict = make(scores(), not_run={"imagenet": "its file was not found"})
    value = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert value == verdict.to_json()
    assert set(value) == KEYS
    assert value["baseline"] == {"name": "pixels", "score": pytest.approx(0.521)}
    assert [set(one) for one in value["baselines"]] == [{"name", "score", "low", "high", "ran", "why_not"}] * 4
    assert value["baselines"][-1] == {
        "name": "imagenet",
        "score": None,
        "low": None,
        "high": None,
        "ran": False,
        "why_not": "its file was not found",
    }
    assert value["n_test"] == 2000
    assert value["this_run_only"] is False
    assert verdict_line(verdict).count("imagenet not run") == 1


def test_delta_and_intervals_are_those_of_the_paired_differences() -> None:
    table = scores(3, 300)
    verdict = make(table, runs=3)
    expected = crossed_interval(table["mocokit"] - table["pixels"], bounds=(-1, 1))
    assert (verdict.delta, *verdict.ci95) == (expected.mean, expected.low, expected.high)
    for one in verdict.baselines:
        own = crossed_interval(table[one.name], bounds=(0, 1))
        assert (one.score, one.low, one.high) == (own.mean, own.low, own.high)
    own = crossed_interval(table["mocokit"], bounds=(0, 1))
    assert (verdict.score, *verdict.score_ci95) == (own.mean, own.low, own.high)


@pytest.mark.parametrize(("accuracy", "outcome"), [(0.713, "BETTER"), (0.525, "NO CLEAR DIFFERENCE"), (0.4, "WORSE")])
def test_the_outcome_comes_from_the_interval(accuracy: float, outcome: str) -> None:
    table = scores() | {"mocokit": answers(accuracy, 5, 2000, 9)}
    verdict = make(table)
    assert verdict.verdict == outcome
    assert verdict_line(verdict).startswith(f"VERDICT: {outcome} | kNN {100 * accuracy:.1f} %")
    low, high = verdict.ci95
    assert (low > 0, high < 0) == (outcome == "BETTER", outcome == "WORSE")


def test_the_strongest_baseline_is_taken_whichever_it_is() -> None:
    table = scores() | {"random init (flattened)": answers(0.6, 5, 2000, 5)}
    verdict = make(table)
    assert verdict.baseline["name"] == "random init (flattened)"
    assert "vs random init (flattened) 60.0 % (strongest of 3 baselines; pixels 52.1 %)" in verdict_line(verdict)


def test_equal_methods_are_no_clear_difference() -> None:
    same = answers(0.9, 3, 100)
    verdict = make({"mocokit": same, "pixels": same}, runs=3)
    assert verdict.verdict == "NO CLEAR DIFFERENCE"
    assert verdict.delta == 0
    assert "(the only baseline) | +0.0 pp [95 % CI -" in verdict_line(verdict)


def test_one_run_is_said_to_be_one_run() -> None:
    verdict = make(scores(1), runs=1)
    assert verdict.this_run_only
    assert verdict_line(verdict).endswith("| n=2000 test images, 1 seed (this run only)")


def test_label_draws_are_named() -> None:
    verdict = make(scores(20, 500), runs=1, draws=20, labels_per_class=10)
    assert verdict.this_run_only
    assert (verdict.draws, verdict.labels_per_class, verdict.seeds) == (20, 10, 1)
    assert verdict_line(verdict).endswith("n=500 test images, 1 seed (this run only), 20 label draws of 10 per class")
    several = make(scores(5, 500), draws=20, labels_per_class=10)
    assert verdict_line(several).endswith("n=500 test images, 5 seeds, 20 label draws each of 10 per class")


def test_groups_widen_the_interval() -> None:
    table = {name: np.repeat(matrix, 10, axis=1) for name, matrix in scores(3, 60).items()}
    groups = np.repeat(np.arange(60), 10)
    alone, grouped = make(table, runs=3), make(table, runs=3, groups=groups)
    assert alone.delta == pytest.approx(grouped.delta)
    assert alone.ci95[0] > grouped.ci95[0]


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one baseline"):
        make({"mocokit": answers(0.5, 5, 10)})
    with pytest.raises(UsageError, match="5 rows"):
        make(scores(3, 10))
    with pytest.raises(UsageError, match="20 rows"):
        make(scores(5, 10), runs=1, draws=20)
    with pytest.raises(UsageError, match="'pixels' have shape"):
        make(scores(5, 10) | {"pixels": answers(0.5, 5, 11)})
