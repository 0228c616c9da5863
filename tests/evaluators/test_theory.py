"""The diagnostics against other solvers, closed forms and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import log_softmax
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from harness_ext.evaluators import _checks
from harness_ext.evaluators.theory import affine_fit, natural_coefficients, share_of_gain


def words(
    num_rows: int, num_words: int, num_classes: int, *, low: float = 1e-8, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Heavy-tailed label-word probabilities of very unlike size that depend on the class."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, num_classes, num_rows)
    labels[:num_classes] = np.arange(num_classes)
    base = np.geomspace(low, 1e-2, num_words)
    tilt = generator.standard_normal((num_classes, num_words))
    values = base * np.exp(generator.standard_normal((num_rows, num_words)) + 0.7 * tilt[labels])
    return values / np.maximum(1, 2 * values.sum(axis=1, keepdims=True)), labels


def loss(coefficients: NDArray[np.float64], probabilities: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Classification loss of the source for coefficients (1 or K, 1 + W), the first for all other words."""
    rest = 1 - probabilities.sum(axis=1)
    logits = coefficients[:, :1] * rest + coefficients[:, 1:] @ probabilities.T
    if len(coefficients) == 1:
        return float(np.mean(np.log1p(np.exp(-(2 * labels - 1) * logits[0]))))
    return float(np.mean([-log_softmax(row)[label] for row, label in zip(logits.T, labels, strict=True)]))


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("bound", [0.5, 30.0, 3e4])
def test_tau_is_the_minimum_found_by_another_solver(num_classes: int, bound: float) -> None:
    probabilities, labels = words(60, 3, num_classes, low=1e-5)
    (found,) = natural_coefficients(probabilities, labels, num_classes, bounds=[bound]).coefficients
    shape = (1 if num_classes == 2 else num_classes, 4)
    # Sequential quadratic programming with finite differences, in coordinates that scale each word's logit to 1.
    scale = np.array([1.0, *np.sqrt(np.square(probabilities).mean(axis=0))])
    best = minimize(
        lambda flat: loss(flat.reshape(shape) / scale, probabilities, labels),
        np.zeros(shape).ravel(),
        method="SLSQP",
        bounds=[(-bound * size, bound * size) for size in np.tile(scale, shape[0])],
        options={"ftol": 1e-12, "maxiter": 2000},
    )
    assert best.success
    assert found.converged
    assert found.tau == pytest.approx(best.fun, abs=1e-6)
    assert found.tau <= best.fun + 1e-9
    assert 0 < found.sup_norm <= bound


def test_two_classes_in_closed_form() -> None:
    """One word whose probability is a in class 0 and b in class 1: v(other) and v(word) go to opposite bounds."""
    probabilities, labels = np.array([[0.1], [0.6]]), np.array([0, 1])
    for bound in (0.0, 1.0, 5.0):
        (found,) = natural_coefficients(probabilities, labels, 2, bounds=[bound]).coefficients
        grid = np.linspace(-bound, bound, 401)
        first, second = np.meshgrid(grid, grid)
        logits = np.stack([first * 0.9 + second * 0.1, first * 0.4 + second * 0.6])
        expected = (np.log1p(np.exp(logits[0])) + np.log1p(np.exp(-logits[1]))) / 2
        # A grid of step B/200 around a smooth minimum is right to about (B/200)².
        assert expected.min() - (bound / 200) ** 2 <= found.tau <= expected.min() + 1e-12
        assert found.accuracy == (1.0 if bound else 0.5)
        assert found.sup_norm == pytest.approx(bound)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(1, 5))
def test_tau_falls_from_log_k_to_below_the_label_entropy(seed: int, num_classes: int, num_words: int) -> None:
    probabilities, labels = words(80, num_words, num_classes, seed=seed)
    found = natural_coefficients(
        probabilities, labels, num_classes, bounds=[1e6, 0, 1, 1e2, 1e4], held_out=(probabilities, labels)
    )
    taus = [entry.tau for entry in found.coefficients]
    assert [entry.bound for entry in found.coefficients] == [0, 1, 1e2, 1e4, 1e6]
    assert taus[0] == pytest.approx(np.log(num_classes), abs=1e-15)
    assert found.coefficients[0].accuracy == pytest.approx(1 / num_classes)
    assert (np.diff(taus) <= 1e-12).all()
    # The log-priors of 80 rows are within log 80 of each other, so B = 100 holds the best constant.
    assert taus[2] <= found.label_entropy + 1e-9
    shares = np.bincount(labels) / 80
    assert found.label_entropy == pytest.approx(-(shares * np.log(shares)).sum())
    for entry in found.coefficients:
        assert entry.sup_norm <= entry.bound
        assert entry.held_out_tau == pytest.approx(entry.tau, rel=1e-12)
        assert entry.held_out_accuracy == entry.accuracy


def test_a_word_split_in_two_changes_nothing_and_a_new_word_only_helps() -> None:
    probabilities, labels = words(100, 3, 2)
    bounds = [10.0, 1e4]

    def taus(values: NDArray[np.float64]) -> list[float]:
        return [entry.tau for entry in natural_coefficients(values, labels, 2, bounds=bounds).coefficients]

    split = np.concatenate([probabilities[:, :2], 0.3 * probabilities[:, 2:], 0.7 * probabilities[:, 2:]], axis=1)
    np.testing.assert_allclose(taus(split), taus(probabilities), atol=1e-8)
    for with_word, without in zip(taus(probabilities), taus(probabilities[:, :2]), strict=True):
        assert with_word <= without + 1e-9


def test_classes_and_words_may_be_renamed() -> None:
    probabilities, labels = words(100, 3, 3)
    order = np.array([2, 0, 1])
    found = natural_coefficients(probabilities, labels, 3, bounds=[100.0]).coefficients[0]
    renamed = natural_coefficients(probabilities[:, order], order[labels], 3, bounds=[100.0]).coefficients[0]
    assert renamed.tau == pytest.approx(found.tau, abs=1e-8)
    binary, gold = words(100, 3, 2)
    flipped = natural_coefficients(binary, 1 - gold, 2, bounds=[100.0]).coefficients[0]
    assert flipped.tau == pytest.approx(natural_coefficients(binary, gold, 2, bounds=[100.0]).coefficients[0].tau)


def test_held_out_rows_are_scored_and_never_fitted() -> None:
    probabilities, labels = words(200, 3, 2)
    alone = natural_coefficients(probabilities[:100], labels[:100], 2)
    found = natural_coefficients(probabilities[:100], labels[:100], 2, held_out=(probabilities[100:], labels[100:]))
    spoilt = natural_coefficients(
        probabilities[:100], labels[:100], 2, held_out=(probabilities[100:], 1 - labels[100:])
    )
    assert (alone.num_held_out_rows, found.num_held_out_rows, found.num_rows, found.num_words) == (0, 100, 100, 3)
    for first, second, third in zip(alone.coefficients, found.coefficients, spoilt.coefficients, strict=True):
        assert first.tau == second.tau == third.tau
        assert first.held_out_tau is None
        assert first.held_out_accuracy is None
        assert second.held_out_accuracy is not None
        assert third.held_out_accuracy == pytest.approx(1 - second.held_out_accuracy)
        assert second.held_out_tau is not None
        assert third.held_out_tau is not None
    best = found.coefficients[-1]
    assert best.held_out_tau is not None
    assert best.held_out_tau < np.log(2)


def test_separable_rows_and_words_of_probability_zero() -> None:
    probabilities = np.array([[1e-8, 0.0], [2e-8, 0.0], [5e-8, 0.0], [6e-8, 0.0]])
    found = natural_coefficients(probabilities, [0, 0, 1, 1], 2, bounds=[1.0, 1e10])
    assert found.coefficients[0].tau == pytest.approx(np.log(2), abs=1e-7)
    assert found.coefficients[1].tau < 1e-6
    assert found.coefficients[1].accuracy == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": 1}, "num_classes is 1"),
        ({"bounds": []}, "bounds is"),
        ({"bounds": [-1.0]}, "bounds is"),
        ({"probabilities": np.log([[0.5, 0.5]] * 2)}, r"\[0, 0\] is -0.69.*Take exp of log-probabilities"),
        ({"probabilities": [[0.9, 0.9], [0.1, 0.1]]}, r"probabilities\[0\] sums to 1.8.*Give each token once"),
        ({"probabilities": [[0.1, np.nan], [0.1, 0.1]]}, r"probabilities\[0, 1\] is NaN"),
        ({"probabilities": np.zeros((0, 2)), "labels": []}, r"shape \(0, 2\)"),
        ({"labels": [0]}, r"labels has shape \(1,\); expected \(2,\)"),
        ({"labels": [0, 2]}, r"labels\[1\] is 2; expected a class in 0..1"),
        ({"labels": [0.0, 1.0]}, "labels has dtype float64"),
        ({"held_out": ([[0.1]], [0])}, r"held-out probabilities has shape \(1, 1\)"),
        ({"held_out": ([[0.1, 0.1]], [5])}, r"held-out labels\[0\] is 5"),
    ],
)
def test_natural_coefficients_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    arguments = {"probabilities": [[0.1, 0.2], [0.2, 0.1]], "labels": [0, 1], "num_classes": 2, **change}
    with pytest.raises(ValueError, match=message):
        natural_coefficients(**arguments)


def pairs(num_rows: int, dim: int, *, noise: float = 0.5, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Features with a mean and unlike scales, and noisy affine targets of three columns."""
    generator = np.random.default_rng(seed)
    features = (generator.standard_normal((num_rows, dim)) + 5) * np.geomspace(1e-3, 1e3, dim)
    matrix = np.random.default_rng(99).standard_normal((dim, 3)) / np.geomspace(1e-3, 1e3, dim)[:, np.newaxis]
    targets = (features @ matrix + 7 + noise * generator.standard_normal((num_rows, 3))) * [1.0, 2.0, 0.1]
    return features, targets


@pytest.mark.parametrize("block_numbers", [2**20, 50])
def test_r2_is_that_of_scikit_learn(monkeypatch: pytest.MonkeyPatch, block_numbers: int) -> None:
    monkeypatch.setattr(_checks, "BLOCK_NUMBERS", block_numbers)
    features, targets = pairs(200, 8)
    # Scaled, as LinearRegression drops directions below 1e-6 of the largest.
    model = make_pipeline(StandardScaler(), LinearRegression()).fit(features[:120], targets[:120])
    found = affine_fit(features[:120], targets[:120], held_out=(features[120:], targets[120:]))
    # Columns weighted by their variance: total sums of squares.
    expected = r2_score(targets[:120], model.predict(features[:120]), multioutput="variance_weighted")
    assert found.r2_train == pytest.approx(expected, abs=1e-8)
    error = targets[120:] - model.predict(features[120:])
    spread = targets[120:] - targets[:120].mean(axis=0)
    assert found.r2_held_out == pytest.approx(1 - np.sum(error**2) / np.sum(spread**2), abs=1e-8)
    assert (found.rank, found.num_rows, found.num_held_out_rows, found.notes) == (8, 120, 80, ())


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_the_training_r2_is_that_of_the_same_rows_held_out(ridge: float) -> None:
    features, targets = pairs(60, 5, noise=2)
    found = affine_fit(features, targets, held_out=(features, targets), ridge=ridge)
    assert found.r2_train == pytest.approx(found.r2_held_out, abs=1e-9)


def test_exact_affine_targets_and_unrelated_ones() -> None:
    features, targets = pairs(100, 6, noise=0)
    fresh, fresh_targets = pairs(50, 6, noise=0, seed=1)
    found = affine_fit(features.astype(np.float32), targets, held_out=(fresh.astype(np.float32), fresh_targets))
    assert found.r2_train == pytest.approx(1, abs=1e-9)
    assert found.r2_held_out == pytest.approx(1, abs=1e-9)
    # Answers that are always the training mean score 0: here the only feature is constant.
    nothing = affine_fit(np.full((100, 1), 0.1), targets, held_out=(np.full((50, 1), 0.1), fresh_targets))
    assert (nothing.rank, nothing.r2_train, nothing.r2_held_out) == (0, 0.0, 0.0)
    # A fit of noise does worse than that, and its training R² is d/(n - 1) = 0.5 in the mean; over 300 target columns the
    # standard deviation is below 0.01, so a false alarm has probability below 1e-6.
    generator = np.random.default_rng(2)
    noise = generator.standard_normal((2, 41, 20)), generator.standard_normal((2, 41, 300))
    unrelated = affine_fit(noise[0][0], noise[1][0], held_out=(noise[0][1], noise[1][1]))
    assert unrelated.r2_train == pytest.approx(0.5, abs=0.05)
    assert unrelated.r2_held_out is not None
    assert unrelated.r2_held_out < 0
    assert "41 rows and 20 independent features, unrelated targets would reach 0.50" in unrelated.notes[0]


def test_dependent_and_constant_features_do_not_spoil_the_fit() -> None:
    features, targets = pairs(120, 4)
    more = np.concatenate([features, features[:, :2], features.sum(axis=1, keepdims=True), np.ones((120, 1))], axis=1)
    plain = affine_fit(features[:80], targets[:80], held_out=(features[80:], targets[80:]))
    found = affine_fit(more[:80], targets[:80], held_out=(more[80:], targets[80:]), ridge=0)
    assert found.rank == 4
    assert found.r2_train == pytest.approx(plain.r2_train, abs=1e-7)
    assert found.r2_held_out == pytest.approx(plain.r2_held_out, abs=1e-7)
    damped = affine_fit(more[:80], targets[:80], held_out=(more[80:], targets[80:]))
    assert damped.r2_held_out == pytest.approx(plain.r2_held_out, abs=1e-7)


def test_the_default_ridge_is_seen_only_where_a_direction_has_tiny_variance() -> None:
    """The figures of the docstring."""

    def medians(decades: int, **options: float) -> NDArray[np.float64]:
        found = []
        for seed in range(20):
            generator = np.random.default_rng(seed)
            axes = np.linalg.qr(generator.standard_normal((32, 32)))[0]
            features = generator.standard_normal((80, 32)) * np.logspace(0, -decades, 32) @ axes
            targets = np.tanh(features @ generator.standard_normal((32, 8)))
            fit = affine_fit(features[:40], targets[:40], held_out=(features[40:], targets[40:]), **options)
            found.append([fit.r2_train, fit.r2_held_out])
        return np.median(np.array(found, dtype=float), axis=0)

    np.testing.assert_allclose(medians(3), medians(3, ridge=0.0), atol=2e-4)
    # Without a ridge, rounding on another machine may move the third digit.
    np.testing.assert_allclose(medians(6), [0.977, 0.65], atol=5e-3)
    np.testing.assert_allclose(medians(6, ridge=0.0), [0.984, 0.45], atol=2e-2)


def test_too_few_rows_have_no_training_r2() -> None:
    features, targets = pairs(40, 8)
    found = affine_fit(features[:9], targets[:9], held_out=(features[9:], targets[9:]))
    assert found.r2_train is None
    assert found.r2_held_out is not None
    assert "9 rows and 8 features" in found.notes[0]
    assert affine_fit(features[:10], targets[:10]).r2_train is not None


def test_constant_targets_have_no_r2() -> None:
    features = pairs(40, 3)[0]
    targets = np.full((40, 2), 0.1, dtype=np.float32)
    found = affine_fit(features, targets, held_out=(features, np.full((40, 2), float(np.float32(0.1)))))
    assert found.r2_train is None
    assert found.r2_held_out is None
    assert "training targets are constant" in found.notes[0]
    assert "held-out target" in found.notes[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": np.ones((4, 2))}, r"targets has shape \(4, 2\); expected \(5, columns\)"),
        ({"features": np.ones(5)}, r"features has shape \(5,\)"),
        ({"features": np.ones((0, 2)), "targets": np.ones((0, 2))}, r"features has shape \(0, 2\)"),
        ({"features": [[1.0, np.inf]] * 5}, r"features\[0, 1\] is inf"),
        ({"ridge": -1}, "ridge is -1"),
        ({"held_out": (np.ones((3, 3)), np.ones((3, 2)))}, r"held-out features has shape \(3, 3\)"),
        ({"held_out": (np.ones((3, 2)), np.ones((2, 2)))}, r"held-out targets has shape \(2, 2\); expected \(3, 2\)"),
        ({"held_out": (np.ones((3, 2)), np.full((3, 2), np.nan))}, r"held-out targets\[0, 0\] is NaN"),
    ],
)
def test_affine_fit_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    arguments = {"features": np.eye(5)[:, :2], "targets": np.eye(5)[:, :2], **change}
    with pytest.raises(ValueError, match=message):
        affine_fit(**arguments)


def test_share_of_gain() -> None:
    assert share_of_gain(0.8, 0.9, 0.5) == pytest.approx((0.75, None))
    assert share_of_gain(0.4, 0.9, 0.5).value == pytest.approx(-0.25)
    assert share_of_gain(0.95, 0.9, 0.5).value == pytest.approx(1.125)
    for reference in (0.5, 0.4):
        share = share_of_gain(0.8, reference, 0.5)
        assert share.value is None
        assert "not above chance 0.5000" in (share.reason or "")
    with pytest.raises(ValueError, match="accuracy is 80; expected a share"):
        share_of_gain(80, 0.9, 0.5)
    with pytest.raises(ValueError, match="chance is nan"):
        share_of_gain(0.8, 0.9, float("nan"))
