"""The shared-matrix solver against scikit-learn, one fold and one C at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from harness_ext.evaluators import _solvers
from harness_ext.evaluators._solvers import NO_PART, StandardisedData, solve, spectrum, standardise

STRENGTHS = np.logspace(-6, 3, 10)


def features_and_labels(
    num_rows: int, dim: int, num_classes: int, *, seed: int = 0, signal: float = 3.0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Correlated features of unequal scale and offset, and labels from a softmax on them; every class occurs."""
    generator = np.random.default_rng(seed)
    latent = generator.standard_normal((num_rows, dim)) / np.sqrt(np.arange(1, dim + 1))
    logits = signal * latent @ generator.standard_normal((dim, num_classes)) / np.sqrt(np.log(dim + 1))
    labels = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
    labels[: 2 * num_classes] = np.arange(2 * num_classes) % num_classes
    mixed = latent @ generator.standard_normal((dim, dim))
    return mixed * generator.uniform(0.5, 20, dim) + generator.standard_normal(dim), labels


def unpartitioned(features: np.ndarray, labels: np.ndarray, dtype: type = np.float64) -> StandardisedData:
    return standardise(features, labels, np.zeros_like(labels), num_classes=int(labels.max()) + 1, dtype=dtype)


def scikit_learn(features: np.ndarray, labels: np.ndarray, c: float) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and centred intercepts of the same problem, to about ten digits."""
    model = LogisticRegression(C=c, solver="newton-cg", tol=1e-10, max_iter=2000).fit(features, labels)
    intercept = model.intercept_ if len(model.intercept_) == 1 else model.intercept_ - model.intercept_.mean()
    return model.coef_, intercept


def mean_loss(features: np.ndarray, labels: np.ndarray, coefficients: np.ndarray, intercept: np.ndarray) -> float:
    logits = features @ coefficients.T + intercept
    if logits.shape[1] == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
    return float((np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(labels)), labels]).mean())


@pytest.mark.parametrize("num_classes", [2, 4, 6])
def test_solutions_are_those_of_scikit_learn_for_every_c(num_classes: int) -> None:
    features, labels = features_and_labels(300, 20, num_classes)
    scaled = StandardScaler().fit_transform(features)
    for dtype, tolerance, coefficient_error, loss_error in (
        # A gradient of 1e-9 leaves errors of about 1e-9 over the smallest curvature, here about 1e-3.
        (np.float64, 1e-9, 2e-6, 1e-8),
        (np.float32, 1e-5, 5e-3, 2e-5),
    ):
        data = unpartitioned(features, labels, dtype)
        solutions = solve(
            data, spectrum(data.matrix), np.full(10, NO_PART), STRENGTHS, tolerance=tolerance, max_iterations=1000
        )
        assert solutions.converged.all()
        assert (solutions.gradient_norm <= tolerance).all()
        for index, c in enumerate(STRENGTHS):
            coefficients, intercept = scikit_learn(scaled, labels, c)
            size = np.abs(coefficients).max()
            np.testing.assert_allclose(solutions.coefficients[index], coefficients, atol=coefficient_error * size)
            np.testing.assert_allclose(solutions.intercepts[index], intercept, atol=coefficient_error * max(size, 1.0))
            loss = mean_loss(scaled, labels, solutions.coefficients[index], solutions.intercepts[index])
            expected = mean_loss(scaled, labels, coefficients, intercept)
            assert loss == pytest.approx(expected, abs=loss_error)
            penalty = np.square(coefficients).sum() / (2 * c * len(labels))
            assert solutions.objective[index] == pytest.approx(expected + penalty, abs=1e-6)


@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize(("num_rows", "dim"), [(120, 8), (30, 50)])
def test_each_fold_is_standardised_by_its_own_training_rows(num_classes: int, num_rows: int, dim: int) -> None:
    features, labels = features_and_labels(num_rows, dim, num_classes)
    features[:, 2] *= 1000
    features[5, 3] = 1e4  # Most of this column's variance is one row, which one fold does not see,
    features[:, 4] = np.arange(num_rows) == 7  # and this column is constant for it.
    part = np.arange(num_rows) % 3
    data = standardise(features, labels, part, num_classes=num_classes, dtype=np.float64)
    left_out, strengths = np.repeat([0, 1, 2, NO_PART], 3), np.tile([1e-3, 0.1, 10.0], 4)
    solutions = solve(data, spectrum(data.matrix), left_out, strengths, tolerance=1e-9, max_iterations=1000)
    correct = _solvers.count_correct(data, solutions, left_out)
    assert solutions.converged.all()
    for index, (fold, c) in enumerate(zip(left_out, strengths, strict=True)):
        kept = part != fold
        scored = np.ones_like(kept) if fold == NO_PART else ~kept
        scaler = StandardScaler().fit(features[kept])
        coefficients, intercept = scikit_learn(scaler.transform(features[kept]), labels[kept], c)
        np.testing.assert_allclose(solutions.coefficients[index], coefficients, atol=3e-6 * np.abs(coefficients).max())
        logits = scaler.transform(features[scored]) @ coefficients.T + intercept
        predicted = logits[:, 0] > 0 if num_classes == 2 else logits.argmax(axis=1)
        assert correct[index] == (predicted == labels[scored]).sum()


@pytest.mark.parametrize("num_classes", [2, 3])
def test_gradient_is_the_slope_of_the_objective(num_classes: int) -> None:
    features, labels = features_and_labels(40, 4, num_classes)
    data = standardise(features, labels, np.arange(40) % 2, num_classes=num_classes, dtype=np.float64)
    left_out, strengths = np.array([0, 1, NO_PART]), np.array([0.5, 2.0, 1.0])
    objectives = _solvers._Objectives(data, spectrum(data.matrix), left_out, strengths)
    generator = np.random.default_rng(0)
    points = generator.standard_normal((3, data.num_logits * 5))
    _, gradient, bend = objectives(points)
    direction = generator.standard_normal(points.shape)
    ahead, behind = objectives(points + 1e-5 * direction)[0], objectives(points - 1e-5 * direction)[0]
    # A central difference is off by about 1e-10 times the third derivative, and 1e-16 / 1e-5 by rounding.
    np.testing.assert_allclose((gradient * direction).sum(axis=1), (ahead - behind) / 2e-5, rtol=1e-6)
    assert ((bend > 0) & (bend <= (0.25 if num_classes == 2 else 0.5))).all()


def test_links_are_exact_far_from_zero() -> None:
    logits = np.array([[[-800.0, 800.0, -800.0, 800.0]]])
    residuals, loss, bend = _solvers._binary_link(logits, np.array([0, 0, 1, 1]))
    np.testing.assert_array_equal(residuals, [[[0, 1, -1, 0]]])
    assert loss == 1600
    assert bend == 0
    both = np.concatenate([np.zeros_like(logits), logits], axis=1)
    residuals, loss, bend = _solvers._softmax_link(both, np.array([0, 0, 1, 1]))
    np.testing.assert_array_equal(residuals[0, 1], [0, 1, -1, 0])
    assert loss == 1600
    assert bend == 0


@pytest.mark.parametrize("shape", [(50, 12), (12, 50)])
def test_preconditioner_is_the_inverse_of_the_averaged_hessian(shape: tuple[int, int]) -> None:
    features, labels = features_and_labels(*shape, 2)
    data = unpartitioned(features, labels)
    curvature = spectrum(data.matrix)
    if shape[0] < shape[1]:
        # Outside the row space the eigenvalue is 0; the one that `spectrum` puts there is for folds.
        curvature = replace(curvature, rest=0.0)
    objectives = _solvers._Objectives(data, curvature, np.array([NO_PART]), np.array([0.3]))
    vector, bend = np.random.default_rng(0).standard_normal((1, shape[1] + 1)), np.array([0.2])
    hessian = np.zeros((shape[1] + 1, shape[1] + 1))
    hessian[:-1, :-1] = 0.2 * data.matrix.T @ data.matrix / shape[0] + np.eye(shape[1]) / (0.3 * shape[0])
    hessian[-1, -1] = 0.2
    np.testing.assert_allclose(
        objectives.precondition(vector, bend)[0], np.linalg.solve(hessian, vector[0]), rtol=1e-7, atol=1e-8
    )


@pytest.mark.parametrize("shape", [(60, 20), (20, 60)])
def test_spectrum_is_that_of_the_gram_matrix(shape: tuple[int, int]) -> None:
    matrix = unpartitioned(*features_and_labels(*shape, 2)).matrix
    expected = np.linalg.eigvalsh(matrix.T @ matrix / shape[0])
    whole = spectrum(matrix)
    np.testing.assert_allclose(whole.values, expected[-len(whole.values) :], rtol=1e-9, atol=1e-9)
    assert len(whole.values) == (20 if shape[0] > shape[1] else 19)  # Centring takes one dimension of the rows.
    np.testing.assert_allclose(whole.basis.T @ whole.basis, np.eye(len(whole.values)), atol=1e-9)
    leading = spectrum(matrix, exact_rank=5, partial_rank=4)
    np.testing.assert_allclose(np.sort(leading.values), expected[-4:], rtol=0.02)
    assert leading.rest == pytest.approx((expected.sum() - leading.values.sum()) / 16, rel=1e-6)


def test_spectrum_decides_the_speed_only() -> None:
    features, labels = features_and_labels(100, 30, 3)
    data = unpartitioned(features, labels)
    exact = spectrum(data.matrix)
    results = [
        solve(data, curvature, np.full(3, NO_PART), np.array([1e-3, 0.1, 10.0]), tolerance=1e-9, max_iterations=5000)
        for curvature in (
            exact,
            spectrum(data.matrix, exact_rank=5, partial_rank=4),
            replace(exact, values=np.ones_like(exact.values)),
        )
    ]
    for other in results[1:]:
        np.testing.assert_allclose(other.coefficients, results[0].coefficients, atol=1e-6)
        assert other.iterations.sum() > results[0].iterations.sum()


def test_preconditioning_keeps_the_number_of_evaluations_small() -> None:
    """Not a timing: evaluations do not depend on the machine. Without the preconditioner this takes over 1,000."""
    features, labels = features_and_labels(400, 60, 2)
    data = unpartitioned(features, labels)
    solutions = solve(data, spectrum(data.matrix), np.full(10, NO_PART), STRENGTHS, tolerance=1e-6, max_iterations=1000)
    assert solutions.iterations.sum() <= 200


@pytest.mark.parametrize("limit", ["_BLOCK_BYTES", "_HISTORY_BYTES"])
def test_memory_limits_do_not_change_the_result(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = features_and_labels(500, 10, 3)
    part = np.arange(500) % 2
    left_out, strengths = np.tile([0, 1], 10), np.repeat(STRENGTHS, 2)

    def run() -> _solvers.Solutions:
        data = standardise(features, labels, part, num_classes=3, dtype=np.float64)
        return solve(data, spectrum(data.matrix), left_out, strengths, tolerance=1e-8, max_iterations=500)

    expected = run()
    monkeypatch.setattr(_solvers, limit, 1)
    result = run()
    np.testing.assert_allclose(result.coefficients, expected.coefficients, atol=1e-6)
    assert result.converged.all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_classes", [2, 3])
def test_separable_rows_under_a_weak_penalty_converge(dtype: type, num_classes: int) -> None:
    features, labels = features_and_labels(40, 100, num_classes)
    data = unpartitioned(features, labels, dtype)
    solutions = solve(
        data, spectrum(data.matrix), np.array([NO_PART]), np.array([1e3]), tolerance=1e-5, max_iterations=500
    )
    assert solutions.converged.all()
    assert _solvers.count_correct(data, solutions, np.array([NO_PART])) == 40
    scaled = StandardScaler().fit_transform(features)
    coefficients, intercept = scikit_learn(scaled, labels, 1e3)
    best = mean_loss(scaled, labels, coefficients, intercept) + np.square(coefficients).sum() / (2e3 * 40)
    # Convexity bounds the gap by |gradient|₁ |w - w*|_∞; it is far smaller.
    assert solutions.objective[0] - best < 1e-3


def test_stopping_early_is_reported() -> None:
    features, labels = features_and_labels(100, 10, 2)
    data = unpartitioned(features, labels)
    solutions = solve(
        data, spectrum(data.matrix), np.full(2, NO_PART), np.array([1e-6, 1e2]), tolerance=1e-6, max_iterations=4
    )
    np.testing.assert_array_equal(solutions.converged, [True, False])
    assert solutions.iterations[1] == 4
    assert solutions.gradient_norm[1] > 1e-6


def test_a_tolerance_below_rounding_stops_unconverged() -> None:
    features, labels = features_and_labels(100, 10, 2)
    data = unpartitioned(features, labels, np.float32)
    solutions = solve(
        data, spectrum(data.matrix), np.array([NO_PART]), np.array([1.0]), tolerance=1e-15, max_iterations=300
    )
    assert not solutions.converged[0]
    assert solutions.gradient_norm[0] < 1e-5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_standardisation_is_that_of_scikit_learn(dtype: type) -> None:
    features, labels = features_and_labels(90, 6, 2)
    features[:, 0] = 0.1  # Constant, and 0.1 is not a binary fraction.
    features[:, 1] += 1e4
    features = features.astype(dtype)
    part = np.arange(90) % 3
    data = standardise(features, labels, part, num_classes=2, dtype=np.float64)
    order = np.lexsort((labels, part))
    np.testing.assert_array_equal(data.labels, labels[order])
    np.testing.assert_array_equal(data.matrix[:, 0], 0)
    for fold in (0, 1, 2, NO_PART):
        scaler = StandardScaler().fit(features[part != fold].astype(np.float64))
        scaled = scaler.transform(features[order].astype(np.float64))
        # 1e4 / 20 makes the second column lose three digits.
        result = data.matrix * data.stretch[fold] + data.shift[fold]
        np.testing.assert_allclose(result[:, 1:], scaled[:, 1:], rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(result[:, 0], 0)


def test_feature_units() -> None:
    features, labels = features_and_labels(50, 5, 3)
    data = unpartitioned(features, labels)
    coefficients, intercepts = np.ones((3, 5)), np.array([1.0, 2.0, 3.0])
    raw, raw_intercepts = _solvers.to_feature_units(data, coefficients, intercepts)
    scaled = StandardScaler().fit_transform(features)
    np.testing.assert_allclose(features @ raw.T + raw_intercepts, scaled @ coefficients.T + intercepts, atol=1e-9)
