"""The scripts of examples/: what they show is so."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def mini() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mini_moco_numpy", EXAMPLES / "mini_moco_numpy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gradients_of_the_numpy_moco_are_the_losss_slopes(mini: ModuleType) -> None:
    rng = np.random.default_rng(3)
    theta = [rng.normal(size=(5, 7)), rng.normal(size=(7, 4))]
    x, k, queue = rng.normal(size=(6, 5)), rng.normal(size=(6, 4)), rng.normal(size=(9, 4))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    queue /= np.linalg.norm(queue, axis=1, keepdims=True)
    same = rng.random((6, 9)) < 0.2
    assert same.any()
    loss, gradient = mini.loss_and_gradient(theta, x, k, queue, same)
    assert loss > 0
    for layer, row, column in [(0, 0, 0), (0, 4, 6), (0, 2, 3), (1, 0, 0), (1, 6, 3), (1, 3, 2)]:
        slopes = []
        for step in (1e-6, -1e-6):
            moved = [w.copy() for w in theta]
            moved[layer][row, column] += step
            slopes.append(mini.loss_and_gradient(moved, x, k, queue, same)[0])
        assert (slopes[0] - slopes[1]) / 2e-6 == pytest.approx(gradient[layer][row, column], rel=1e-5, abs=1e-9)


def test_the_numpy_moco_learns_what_is_the_same_in_both_views(mini: ModuleType) -> None:
    losses, theta, _ = mini.train(steps=300)
    chance = np.log(1 + mini.K)
    assert losses[0] < np.log(mini.N) + 1
    assert np.mean(losses[4:10]) > 0.7 * chance  # the queue has just filled up with real competitors
    assert np.mean(losses[-20:]) < 0.4 * chance
    weight = np.linalg.norm(theta[0], axis=1)
    assert weight[: mini.SIGNAL].mean() > 2 * weight[mini.SIGNAL :].mean()
    again, _, _ = mini.train(steps=5)
    assert again == losses[:5]


def test_the_numpy_moco_is_short() -> None:
    lines = (EXAMPLES / "mini_moco_numpy.py").read_text("utf-8").splitlines()
    code = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) <= 70
