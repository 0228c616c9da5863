"""The probe against scikit-learn's grid search, and what it does with awkward input."""

from __future__ import annotations

import dataclasses
import json
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from harness_ext.evaluators import _solvers, probe
from harness_ext.evaluators.probe import DEFAULT_C_GRID, ProbeFit, fit_probe, fit_probes


def features_and_labels(
    num_rows: int, dim: int, num_classes: int, *, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Features with a decaying spectrum and noisy linear labels; every class has at least two rows."""
    generator = np.random.default_rng(seed)
    latent = generator.standard_normal((num_rows, dim)) / np.sqrt(np.arange(1, dim + 1))
    logits = 3 * latent @ generator.standard_normal((dim, num_classes))
    labels = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
    labels[: 2 * num_classes] = np.arange(2 * num_classes) % num_classes
    return latent @ generator.standard_normal((dim, dim)) + generator.standard_normal(dim), labels


@pytest.mark.parametrize(("num_classes", "dtype"), [(2, np.float32), (2, np.float64), (3, np.float32)])
def test_grid_is_that_of_scikit_learn(num_classes: int, dtype: type) -> None:
    features, labels = features_and_labels(400, 12, num_classes)
    features = features.astype(dtype)
    fit = fit_probe(features, labels, num_classes=num_classes, seed=3)
    assert fit.cv_accuracy is not None
    assert fit.cv_accuracy_stderr is not None
    folds = StratifiedKFold(5, shuffle=True, random_state=3)
    for index, c in enumerate(DEFAULT_C_GRID):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=c, tol=1e-8, max_iter=2000))
        accuracy = cross_val_score(model, features.astype(np.float64), labels, cv=folds)
        # 0.1 points would be 0.4 of one document here, so equality.
        assert fit.cv_accuracy[index] == pytest.approx(accuracy.mean(), abs=1e-9)
        assert fit.cv_accuracy_stderr[index] == pytest.approx(accuracy.std(ddof=1) / np.sqrt(5), abs=1e-9)
    assert fit.c == DEFAULT_C_GRID[int(np.argmax(fit.cv_accuracy))]

    model = make_pipeline(StandardScaler(), LogisticRegression(C=fit.c, tol=1e-9, max_iter=5000))
    model.fit(features.astype(np.float64), labels)
    np.testing.assert_allclose(fit.log_probabilities(features), model.predict_log_proba(features), atol=1e-4)
    assert fit.training_accuracy == pytest.approx(model.score(features, labels))
    assert fit.converged
    assert fit.gradient_norm <= 1e-9
    assert fit.num_cv_unconverged == 0
    assert fit.num_folds == 5
    assert fit.notes == ()
    scale = model[0].scale_
    np.testing.assert_allclose(fit.coefficients * scale, model[1].coef_, atol=1e-4 * np.abs(model[1].coef_).max())


@pytest.mark.parametrize("num_classes", [2, 3])
def test_the_total_variance_is_what_c_is_weighed_against(num_classes: int) -> None:
    """Features of k times the variance take a k-th of the C, fold by fold."""
    features, labels = features_and_labels(200, 8, num_classes)
    wide = fit_probe(
        features, labels, num_classes=num_classes, c_grid=[0.01, 1], scaling="common", total_variance=80, seed=1
    )
    plain = fit_probe(features, labels, num_classes=num_classes, c_grid=[0.1, 10], scaling="common", seed=1)
    assert wide.cv_accuracy == plain.cv_accuracy
    np.testing.assert_allclose(wide.coefficients, plain.coefficients, rtol=1e-5)


def test_large_problems_take_the_float32_path_to_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = features_and_labels(500, 20, 3)
    expected = fit_probe(features, labels, num_classes=3, seed=0)
    monkeypatch.setattr(probe, "_SMALL", 0)
    fit = fit_probe(features, labels, num_classes=3, seed=0)
    assert fit.converged
    assert fit.c == expected.c
    # One document is 0.2 points.
    np.testing.assert_allclose(fit.cv_accuracy, expected.cv_accuracy, atol=0.0021)
    np.testing.assert_allclose(fit.log_probabilities(features), expected.log_probabilities(features), atol=2e-2)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_common_scaling_is_one_number_for_all_columns(num_classes: int) -> None:
    features, labels = features_and_labels(200, 8, num_classes)
    features = features / features.max() * np.logspace(0, -3, 8)
    fit = fit_probe(features, labels, num_classes=num_classes, scaling="common", seed=1)
    assert fit.cv_accuracy is not None
    folds = StratifiedKFold(5, shuffle=True, random_state=1)
    for index, c in enumerate(DEFAULT_C_GRID):
        accuracies = []
        for train, held_out in folds.split(features, labels):
            mean, scale = features[train].mean(axis=0), np.sqrt(features[train].var(axis=0).mean())
            model = LogisticRegression(C=c, solver="newton-cg", tol=1e-10, max_iter=2000)
            model.fit((features[train] - mean) / scale, labels[train])
            accuracies.append(model.score((features[held_out] - mean) / scale, labels[held_out]))
        assert fit.cv_accuracy[index] == pytest.approx(np.mean(accuracies), abs=1e-9)
    scale = np.sqrt(features.var(axis=0).mean())
    # Centring moves the intercept alone, which bears no penalty.
    model = LogisticRegression(C=fit.c, solver="newton-cg", tol=1e-10, max_iter=2000).fit(features / scale, labels)
    np.testing.assert_allclose(fit.log_probabilities(features), model.predict_log_proba(features / scale), atol=1e-5)
    whole = fit_probe(1e-4 * features, labels, num_classes=num_classes, scaling="common", seed=1)
    np.testing.assert_allclose(whole.log_probabilities(1e-4 * features), fit.log_probabilities(features), atol=1e-6)
    # The last column has a thousandth of the first one's size: under a strong penalty only "columns" gives it a say.
    shares = {}
    for scaling in ("columns", "common"):
        strong = fit_probe(features, labels, num_classes=num_classes, c_grid=[1e-3], scaling=scaling, seed=1)
        use = np.abs(strong.coefficients * features.std(axis=0)).max(axis=0)
        shares[scaling] = use[-1] / use.sum()
    assert shares["columns"] > 0.01
    assert shares["common"] < 1e-5


def test_many_feature_sets_and_seeds_are_those_one_by_one() -> None:
    _, labels = features_and_labels(120, 6, 3)
    sets = [features_and_labels(120, dim, 3)[0] for dim in (6, 4, 150)]
    seeds = [0, 1, 2, 0]
    together = fit_probes(iter(sets), labels, num_classes=3, seeds=seeds, num_folds=3)
    assert [len(fits) for fits in together] == [4, 4, 4]
    for features, fits in zip(sets, together, strict=True):
        for seed, fit in zip(seeds, fits, strict=True):
            alone = fit_probe(features, labels, num_classes=3, num_folds=3, seed=seed)
            assert fit.cv_accuracy == alone.cv_accuracy
            assert fit.c == alone.c
            np.testing.assert_allclose(fit.coefficients, alone.coefficients, atol=1e-5)
    assert len({fit.c for fits in together for fit in fits}) > 1
    assert len({fit.cv_accuracy for fit in together[0]}) == 3


def test_seeds_that_choose_the_same_c_have_the_same_fit_and_own_their_arrays() -> None:
    features, labels = features_and_labels(100, 5, 2)
    [(first, second)] = fit_probes([features], labels, num_classes=2, seeds=[0, 1], c_grid=[0.1])
    np.testing.assert_array_equal(first.coefficients, second.coefficients)
    assert first.cv_accuracy != second.cv_accuracy
    assert not np.shares_memory(first.coefficients, second.coefficients)


@pytest.mark.parametrize("num_folds_possible", [True, False])
def test_one_feature_set_is_in_memory_at_a_time(num_folds_possible: bool) -> None:
    labels = np.arange(40) % 2 if num_folds_possible else (np.arange(40) == 0).astype(int)
    last: list[weakref.ref[np.ndarray]] = []

    def layers() -> Iterator[np.ndarray]:
        for seed in range(3):
            assert not last or last[0]() is None
            features = np.random.default_rng(seed).standard_normal((40, 3))
            last[:] = [weakref.ref(features)]
            yield features
            del features

    fits = fit_probes(layers(), labels, num_classes=2, seeds=[0, 1])
    assert [len(of_layer) for of_layer in fits] == [2, 2, 2]
    assert all(bool(fit.num_folds) is num_folds_possible for of_layer in fits for fit in of_layer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"feature_sets": [np.eye(4, 2), np.eye(3, 2)]},
            r"feature_sets\[1\] has 3 rows; expected 4, one for each label",
        ),
        ({"feature_sets": [np.full((4, 2), np.nan)]}, r"feature_sets\[0\]\[0, 0\] is nan"),
        ({"seeds": []}, "seeds is empty"),
        ({"labels": np.eye(2, dtype=int)}, r"labels has shape \(2, 2\); expected \(n,\)"),
        ({"labels": np.zeros(0, dtype=int)}, "no training rows"),
    ],
)
def test_bad_feature_sets_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"feature_sets": [np.eye(4, 2)], "labels": np.array([0, 1, 0, 1])}
    with pytest.raises(ValueError, match=message):
        fit_probes(**{**arguments, "num_classes": 2, "seeds": [0], **change})


def test_no_feature_sets_are_no_fits() -> None:
    assert fit_probes([], np.array([0, 1]), num_classes=2, seeds=[0]) == []


def test_scores_probabilities_and_predictions_agree() -> None:
    for num_classes in (2, 4):
        features, labels = features_and_labels(80, 5, num_classes)
        fit = fit_probe(features, labels, num_classes=num_classes, seed=0)
        scores, log_probabilities = fit.decision_scores(features), fit.log_probabilities(features)
        assert scores.shape == log_probabilities.shape == (80, num_classes)
        np.testing.assert_allclose(np.exp(log_probabilities).sum(axis=1), 1, rtol=1e-12)
        gaps = log_probabilities - scores
        np.testing.assert_allclose(gaps, np.broadcast_to(gaps[:, :1], gaps.shape), atol=1e-9)
        np.testing.assert_array_equal(fit.predict(features), scores.argmax(axis=1))
        assert (fit.predict(features) == labels).mean() == pytest.approx(fit.training_accuracy)
        np.testing.assert_allclose(fit.decision_scores(features[3:4]), scores[3:4], rtol=1e-12)
    assert fit.coefficients.shape == (4, 5)


def test_of_equal_accuracies_the_strongest_penalty_wins() -> None:
    features = np.concatenate([np.full((20, 2), -1.0), np.full((20, 2), 1.0)])
    features += np.random.default_rng(0).normal(scale=0.01, size=features.shape)
    fit = fit_probe(features, np.repeat([0, 1], 20), num_classes=2, c_grid=[10.0, 0.01, 1.0], seed=0)
    assert fit.cv_accuracy == (1.0, 1.0, 1.0)
    assert fit.c_grid == (0.01, 1.0, 10.0)
    assert fit.c == 0.01
    assert fit.cv_accuracy_stderr == (0.0, 0.0, 0.0)


def test_scale_of_a_column_does_not_matter() -> None:
    features, labels = features_and_labels(300, 10, 2)
    fit = fit_probe(features, labels, num_classes=2, seed=0)
    scaled = features.copy()
    scaled[:, 4] *= 1000
    other = fit_probe(scaled, labels, num_classes=2, seed=0)
    assert other.converged
    assert other.num_iterations < 100
    assert other.cv_accuracy == fit.cv_accuracy
    np.testing.assert_allclose(other.log_probabilities(scaled), fit.log_probabilities(features), atol=1e-5)


def test_constant_duplicate_and_dependent_columns() -> None:
    features, labels = features_and_labels(200, 6, 2)
    total = features.sum(axis=1, keepdims=True)
    features = np.concatenate([features, features[:, :3], total, np.full((200, 1), 0.1)], axis=1).astype(np.float32)
    fit = fit_probe(features, labels, num_classes=2, seed=0)
    assert fit.converged
    np.testing.assert_allclose(fit.coefficients[:, :3], fit.coefficients[:, 6:9], atol=1e-6)
    assert (fit.coefficients[:, -1] == 0).all()


def test_one_huge_entry_spoils_no_other_column() -> None:
    features, labels = features_and_labels(300, 10, 2)
    features = np.concatenate([features, np.random.default_rng(1).standard_normal((300, 1))], axis=1)
    without = fit_probe(features[:, :-1], labels, num_classes=2, seed=0)
    features[17, -1] = 1e7
    fit = fit_probe(features, labels, num_classes=2, seed=0)
    assert fit.converged
    assert fit.num_cv_unconverged == 0
    # The column is noise: within two documents.
    assert max(fit.cv_accuracy or ()) == pytest.approx(max(without.cv_accuracy or ()), abs=0.0067)


def test_float32_is_left_where_it_would_lose_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 1e10 the column's other entries are below float32's resolution, but the fold without it can use them."""
    generator = np.random.default_rng(0)
    labels = np.arange(100) % 2
    features = (labels + 0.2 * generator.standard_normal(100))[:, np.newaxis]
    features[17] = 1e10
    expected = fit_probe(features, labels, num_classes=2, seed=0).cv_accuracy
    assert max(expected or ()) > 0.55  # One fold is right, the others guess.
    monkeypatch.setattr(probe, "_SMALL", 0)
    assert fit_probe(features, labels, num_classes=2, seed=0).cv_accuracy == expected


def test_a_large_mean_keeps_its_digits() -> None:
    features, labels = features_and_labels(100, 4, 2)
    shifted = (features + 3e5).astype(np.float32)
    fit = fit_probe(shifted, labels, num_classes=2, seed=0)
    expected = shifted.astype(np.float64) @ fit.coefficients.T + fit.intercept
    np.testing.assert_allclose(np.diff(fit.decision_scores(shifted), axis=1), expected, atol=1e-6)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("few_rows", [0, 128])
def test_fewer_rows_than_dimensions(num_classes: int, few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated and not."""
    monkeypatch.setattr(probe, "_FEW_ROWS", few_rows)
    features, labels = features_and_labels(8 * num_classes, 500, num_classes)
    features = features.astype(np.float32)
    fit = fit_probe(features, labels, num_classes=num_classes, c_grid=[0.01, 1.0, 1e3], seed=0)
    assert fit.converged
    assert fit.num_cv_unconverged == 0
    model = make_pipeline(StandardScaler(), LogisticRegression(C=fit.c, solver="newton-cg", tol=1e-10, max_iter=5000))
    model.fit(features.astype(np.float64), labels)
    expected = model.decision_function(features.astype(np.float64))
    scores = fit.decision_scores(features)
    found = scores[:, 1] - scores[:, 0] if num_classes == 2 else scores - scores.mean(axis=1, keepdims=True)
    if num_classes > 2:
        expected = expected - expected.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


def test_four_rows() -> None:
    fit = fit_probe(np.array([[0.0], [0.1], [1.0], [1.1]]), np.array([0, 0, 1, 1]), num_classes=2, seed=0)
    assert fit.num_folds == 2
    assert fit.training_accuracy == 1
    assert fit.notes == ("2 folds instead of 5: class 0 has 2 training rows.",)


def test_without_a_second_member_there_is_no_cross_validation() -> None:
    features, labels = features_and_labels(30, 4, 2)
    labels[:] = 0
    labels[3] = 1
    fit = fit_probe(features, labels, num_classes=2, seed=0)
    assert (fit.c, fit.c_grid, fit.num_folds) == (1.0, (1.0,), 0)
    assert fit.cv_accuracy is None
    assert fit.cv_accuracy_stderr is None
    assert "class 1 has one training row" in fit.notes[0]
    assert fit.converged


def test_features_that_say_nothing_give_the_prior() -> None:
    for shape, scaling in (((40, 3), "columns"), ((40, 80), "columns"), ((40, 3), "common"), ((40, 80), "common")):
        labels = np.arange(40) % 4 // 3  # 30 zeros, 10 ones
        fit = fit_probe(np.ones(shape), labels, num_classes=2, seed=0, scaling=scaling)  # type: ignore[arg-type]
        np.testing.assert_allclose(np.exp(fit.log_probabilities(np.ones((1, shape[1])))), [[0.75, 0.25]], atol=1e-6)
        assert fit.cv_accuracy == (0.75,) * 10


def test_permuted_labels_give_chance() -> None:
    """Fresh coin flips as test labels are right Binomial(4000, ½) often: five sigma, p < 1e-6."""
    generator = np.random.default_rng(0)
    features, labels = features_and_labels(300, 20, 2)
    fit = fit_probe(features, generator.permutation(labels), num_classes=2, seed=0)
    fresh = generator.standard_normal((4000, 20))
    accuracy = (fit.predict(fresh) == generator.integers(0, 2, 4000)).mean()
    assert abs(accuracy - 0.5) < 5 * 0.5 / np.sqrt(4000)


def test_only_the_seed_decides_and_inputs_stay() -> None:
    features, labels = features_and_labels(100, 5, 2)
    before = features.copy()
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    first = fit_probe(features, labels, num_classes=2, seed=1)
    np.random.seed(5)
    second = fit_probe(features, labels, num_classes=2, seed=1)
    np.testing.assert_array_equal(first.coefficients, second.coefficients)
    assert first.cv_accuracy == second.cv_accuracy
    assert first.cv_accuracy != fit_probe(features, labels, num_classes=2, seed=2).cv_accuracy
    np.testing.assert_array_equal(features, before)
    np.random.set_state(("MT19937", state, 624, 0, 0.0))


def test_all_but_the_arrays_is_plain_python() -> None:
    features, labels = features_and_labels(60, 3, 3)
    fit = fit_probe(features, labels, num_classes=3, seed=0)
    fields = {field.name: getattr(fit, field.name) for field in dataclasses.fields(ProbeFit)}
    assert fields.pop("coefficients").dtype == fields.pop("intercept").dtype == np.float64
    assert json.loads(json.dumps(fields)) == {key: _listed(value) for key, value in fields.items()}
    assert all(type(value) in (int, float, bool, tuple) for value in fields.values())


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_stopping_early_is_a_field_and_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = features_and_labels(200, 10, 2)
    monkeypatch.setattr(probe, "_MAX_ITERATIONS", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = fit_probe(features, labels, num_classes=2, seed=0)
    assert not fit.converged
    assert fit.num_cv_unconverged > 0
    assert any("cross-validation fits stopped" in note for note in fit.notes)
    assert any("The fit stopped at a gradient" in note for note in fit.notes)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 4),
    st.integers(1, 12),
    st.integers(2, 25),
    st.sampled_from([np.float32, np.float64]),
)
def test_any_small_problem_is_solved(seed: int, num_classes: int, dim: int, extra: int, dtype: type) -> None:
    """Few distinct values make rows equal, columns constant in a fold, and classes separable."""
    generator = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(num_classes), generator.integers(0, num_classes, extra)])
    features = generator.integers(0, 3, (len(labels), dim)).astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = fit_probe(features, labels, num_classes=num_classes, seed=seed)
    assert fit.converged
    assert fit.num_cv_unconverged == 0
    assert np.isfinite(fit.log_probabilities(features)).all()
    assert fit.cv_accuracy is None or all(0 <= accuracy <= 1 for accuracy in fit.cv_accuracy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"features": np.array([[0.0, 1.0], [np.nan, 0.0], [np.inf, 0.0]])},
            r"features\[1, 0\] is nan, and 2 of 3 rows",
        ),
        ({"features": np.zeros(3)}, r"features has shape \(3,\)"),
        ({"features": np.zeros((3, 0))}, r"features has shape \(3, 0\)"),
        ({"labels": np.array([0, 1])}, r"labels has shape \(2,\); expected \(3,\)"),
        ({"labels": np.array([0, 1, 2])}, r"labels\[2\] is 2; expected a class in 0..1. 1 of 3 are outside"),
        ({"labels": np.array([-1, -1, -1])}, "marks a split whose labels are hidden"),
        ({"labels": np.array([0.0, 1.0, 0.0])}, "labels has dtype float64"),
        ({"labels": np.array([1, 1, 1])}, "All 3 training labels are class 1"),
        ({"labels": np.array([0, 1, 0]), "num_classes": 3}, "No training row has class 2"),
        ({"num_classes": 1}, "at least two classes"),
        ({"num_folds": 1}, "num_folds is 1; expected at least 2"),
        ({"c_grid": []}, "at least one value of C"),
        ({"c_grid": [1.0, 0.0]}, "at least one value of C"),
        ({"c_grid": [1.0, float("inf")]}, "at least one value of C"),
        ({"features": np.zeros((0, 2)), "labels": np.zeros(0, dtype=int)}, "no training rows"),
        ({"scaling": "rows"}, "scaling is 'rows'; expected 'columns' or 'common'"),
        ({"total_variance": 3.0}, "total_variance belongs to scaling \"common\", found 'columns'"),
        ({"scaling": "common", "total_variance": 0.0}, "total_variance is 0.0; expected a finite number above 0"),
        ({"scaling": "common", "total_variance": np.inf}, "total_variance is inf; expected a finite number above 0"),
        ({"device": "mps"}, "device is 'mps', which has no float64"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"features": np.eye(3, 2), "labels": np.array([0, 1, 0]), "num_classes": 2, "seed": 0}
    with pytest.raises(ValueError, match=message):
        fit_probe(**{**arguments, **change})


def test_scoring_other_features_is_an_error() -> None:
    features, labels = features_and_labels(40, 3, 2)
    fit = fit_probe(features, labels, num_classes=2, seed=0)
    with pytest.raises(ValueError, match="features has 2 columns; this probe was fitted on 3"):
        fit.predict(features[:, :2])
    features[4, 1] = np.nan
    with pytest.raises(ValueError, match=r"features\[4, 1\] is nan"):
        fit.predict(features)


def test_integers_and_half_precision_are_taken() -> None:
    features, labels = features_and_labels(60, 3, 2)
    half = features.astype(np.float16)
    expected = fit_probe(half.astype(np.float32), labels, num_classes=2, seed=0)
    np.testing.assert_array_equal(fit_probe(half, labels, num_classes=2, seed=0).coefficients, expected.coefficients)
    assert fit_probe(np.round(features).astype(int), labels, num_classes=2, seed=0).converged


class Elsewhere(Tensor):
    """A tensor that says it is on another device ("meta" here) while its numbers lie on the CPU."""

    payload: Tensor

    @staticmethod
    def __new__(cls, payload: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(
            cls, payload.shape, strides=payload.stride(), dtype=payload.dtype, device="meta"
        )
        made.payload = payload
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the mode answers first")


class SecondDevice(TorchDispatchMode):
    """An accelerator on a machine without one: an operation that mixes devices fails, as it would there.

    As there, a number (a tensor of no dimensions) may come from the CPU, and only a copy crosses over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        there = [value for value in tensors if isinstance(value, Elsewhere)]
        target = kwargs.get("device")
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if there and not copies:
            self.operations += 1
            here = [value for value in tensors if not isinstance(value, Elsewhere) and value.ndim]
            assert not here, f"{func} mixes devices: {[tuple(value.shape) for value in tensors]}"
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        result = func(*tree_map(_payload, args), **tree_map(_payload, kwargs))
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        arrives = bool(there) if target is None else torch.device(target).type == "meta"
        return (
            tree_map(lambda value: Elsewhere(value) if isinstance(value, Tensor) else value, result)
            if arrives
            else result
        )


def _payload(value: Any) -> Any:
    return value.payload if isinstance(value, Elsewhere) else value


@pytest.mark.parametrize(
    ("shape", "dtype"),
    # In float64 throughout, with a float32 matrix, rotated, and with few rows that are too many to rotate.
    [
        ((90, 6, 3), np.float64),
        ((400, 6, 2), np.float32),
        ((400, 6, 3), np.float64),
        ((40, 90, 3), np.float32),
        ((40, 90, 2), np.float64),
        ((140, 150, 2), np.float32),
    ],
)
def test_everything_is_computed_on_the_device(
    shape: tuple[int, int, int], dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU's default, nothing may be on the other device; on the other, nothing may stay behind."""
    monkeypatch.setattr(probe, "_SMALL", 2000)
    if shape[0] == 140:  # and of these, leading eigenvectors only
        monkeypatch.setattr(_solvers, "spectrum", partial(_solvers.spectrum, exact_rank=20, partial_rank=10))
    features, labels = features_and_labels(*shape)
    features = features.astype(dtype)
    expected = fit_probe(features, labels, num_classes=shape[2], seed=0, device="cpu")
    with SecondDevice() as second:
        fit = fit_probe(features, labels, num_classes=shape[2], seed=0, device="meta")
    assert second.operations > 500
    assert isinstance(fit.coefficients, np.ndarray)
    np.testing.assert_allclose(fit.coefficients, expected.coefficients, rtol=1e-6, atol=1e-9)
    assert fit.cv_accuracy == expected.cv_accuracy
    assert fit.training_accuracy == expected.training_accuracy


def test_the_second_device_of_the_tests_refuses_what_an_accelerator_would() -> None:
    with SecondDevice():
        there = torch.arange(3.0).to("meta")
        with pytest.raises(AssertionError, match="mixes devices"):
            there + torch.arange(3.0)
        with pytest.raises((RuntimeError, TypeError)):
            there.numpy()
        assert (there * 2).sum().item() == 6


def test_global_defaults_of_torch_are_not_read() -> None:
    features, labels = features_and_labels(60, 5, 3)
    wide = features_and_labels(30, 40, 3)
    expected = [fit_probe(*data, num_classes=3, seed=0) for data in ((features, labels), wide)]
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float16)
    try:
        fits = [fit_probe(*data, num_classes=3, seed=0) for data in ((features, labels), wide)]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for fit, reference in zip(fits, expected, strict=True):
        np.testing.assert_array_equal(fit.coefficients, reference.coefficients)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3000, 400, 4), (3000, 400, 2), (40, 900, 2)])
def test_a_gpu_agrees_with_the_cpu(shape: tuple[int, int, int]) -> None:
    features, labels = features_and_labels(*shape)
    features = features.astype(np.float32)
    expected = fit_probe(features, labels, num_classes=shape[2], seed=0)
    fit = fit_probe(features, labels, num_classes=shape[2], seed=0, c_grid=[expected.c], device="cuda")
    # The matrices differ by float32 rounding at most, which the fit magnifies by the condition number.
    np.testing.assert_allclose(fit.decision_scores(features), expected.decision_scores(features), atol=1e-3)
