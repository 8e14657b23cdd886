"""`MoCoEncoder` as scikit-learn expects a transformer to behave, and as the rest of the library computes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils import estimator_checks as checks

import mocokit
from mocokit.errors import DataError, UsageError
from tests.toy import OPTIONS, labelled_npz, npz, pictures

SMALL: dict[str, Any] = {
    "backbone": "small-cnn-8-8", "epochs": 1, "batch_size": 8, "queue_size": 16, "threads": 1, "random_state": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def fitted() -> mocokit.MoCoEncoder:
    return mocokit.MoCoEncoder(**SMALL).fit(pictures(40))


@pytest.mark.parametrize(
    "check",
    [
        checks.check_parameters_default_constructible,
        checks.check_get_params_invariance,
        checks.check_set_params,
        checks.check_no_attributes_set_in_init,
        checks.check_do_not_raise_errors_in_init_or_set_params,
        checks.check_estimator_cloneable,
        checks.check_estimator_repr,
        checks.check_mixin_order,
        checks.check_estimator_tags_renamed,
        checks.check_valid_tag_types,
    ],
    ids=lambda check: check.__name__,
)
def test_scikit_learns_checks_that_need_no_table(check: Any) -> None:
    """The others feed two-dimensional tables; what they ask is asked below with images."""
    check("MoCoEncoder", mocokit.MoCoEncoder())


def test_fit_returns_itself_and_leaves_parameters_and_images_alone(fitted: mocokit.MoCoEncoder) -> None:
    X = pictures(20)
    before, parameters = X.copy(), fitted.get_params()
    encoder = clone(fitted)
    assert encoder.fit(X) is encoder
    assert encoder.get_params() == parameters
    assert np.array_equal(X, before)
    assert encoder.n_features_out_ == 8
    assert encoder.history_.shape == (2,)
    assert encoder.get_feature_names_out().tolist() == [f"moco{n}" for n in range(8)]


def test_the_same_fit_gives_the_same_bits_and_another_seed_other_ones(fitted: mocokit.MoCoEncoder) -> None:
    X = pictures(40)
    again = clone(fitted).fit(X)
    assert np.array_equal(again.history_, fitted.history_)
    assert np.array_equal(again.transform(X), fitted.transform(X))
    assert np.array_equal(clone(fitted).fit_transform(X), fitted.transform(X))
    other = clone(fitted).set_params(random_state=1).fit(X)
    assert not np.array_equal(other.transform(X), fitted.transform(X))


def test_a_vector_depends_on_its_own_image_alone(fitted: mocokit.MoCoEncoder) -> None:
    X = pictures(30, seed=5)
    whole = fitted.transform(X)
    assert whole.dtype == np.float32
    order = np.random.default_rng(0).permutation(30)
    np.testing.assert_allclose(fitted.transform(X[order]), whole[order], rtol=1e-5, atol=1e-6)
    one_by_one = np.concatenate([fitted.transform(X[n : n + 1]) for n in range(30)])
    np.testing.assert_allclose(one_by_one, whole, rtol=1e-5, atol=1e-6)


def test_arrays_files_and_the_run_agree(fitted: mocokit.MoCoEncoder, tmp_path: Path) -> None:
    data = npz(tmp_path / "toy.npz", count=20)
    assert np.array_equal(fitted.transform(str(data)), fitted.transform(pictures(20)))
    floats = pictures(20).astype(np.float64) / 255
    assert np.array_equal(fitted.transform(floats), fitted.transform(pictures(20)))
    kept = clone(fitted).set_params(out=tmp_path / "run", readout="z").fit(pictures(20))
    frozen = mocokit.load(tmp_path / "run", readout="z")
    x = frozen.transform(pictures(20)[3])
    np.testing.assert_allclose(kept.transform(pictures(20))[3], frozen(x[None])[0].numpy(), rtol=1e-5, atol=1e-6)
    run = mocokit.pretrain(str(data), tmp_path / "b", quiet=True, **(OPTIONS | {"epochs": 1, "queue_size": 16}))
    assert run.config.encoder.backbone == SMALL["backbone"]


def test_in_a_pipeline_and_a_search(tmp_path: Path) -> None:
    with np.load(labelled_npz(tmp_path / "labelled.npz", count=60)) as arrays:
        X, y = arrays["images"], arrays["labels"]
    pipeline = make_pipeline(mocokit.MoCoEncoder(**SMALL), LogisticRegression(C=100, max_iter=2000))
    assert pipeline.fit(X, y).score(X, y) > 0.9
    search = GridSearchCV(pipeline, {"mococoder__temperature": [0.2]}, cv=2)
    with pytest.raises(ValueError, match="mococoder"):
        search.fit(X, y)
    search = GridSearchCV(pipeline, {"mocoencoder__temperature": [0.1, 0.5]}, cv=2).fit(X, y)
    assert search.best_params_["mocoencoder__temperature"] in (0.1, 0.5)


def test_labels_play_no_part(fitted: mocokit.MoCoEncoder) -> None:
    X = pictures(40)
    with_labels = clone(fitted).fit(X, np.arange(40))
    assert np.array_equal(with_labels.transform(X), fitted.transform(X))


def test_it_can_be_kept(fitted: mocokit.MoCoEncoder) -> None:
    again = pickle.loads(pickle.dumps(fitted))
    assert np.array_equal(again.transform(pictures(5)), fitted.transform(pictures(5)))


def test_what_is_refused(fitted: mocokit.MoCoEncoder, tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        mocokit.MoCoEncoder().transform(pictures(2))
    with pytest.raises(NotFittedError):
        mocokit.MoCoEncoder().get_feature_names_out()
    for X in (np.zeros((5, 7)), np.full((4, 8, 8), 2.0), np.full((4, 8, 8), np.nan), pictures(0)):
        with pytest.raises(DataError):
            mocokit.MoCoEncoder(**SMALL).fit(X)
        with pytest.raises(DataError):
            fitted.transform(X)
    with pytest.raises(UsageError, match="readout"):
        mocokit.MoCoEncoder(**(SMALL | {"readout": "q"})).fit(pictures(20))
    with pytest.raises(UsageError):
        mocokit.MoCoEncoder(**SMALL).fit(str(tmp_path / "nowhere"))
