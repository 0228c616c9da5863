"""The shared-matrix solver against scikit-learn, one fold and one C at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch.overrides import TorchFunctionMode

from harness_ext.evaluators import _solvers
from harness_ext.evaluators._solvers import NO_PART, Scaling, StandardisedData, rotate, solve, spectrum, standardise

STRENGTHS = np.logspace(-6, 3, 10)
CPU = torch.device("cpu")


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


def unpartitioned(
    features: np.ndarray, labels: np.ndarray, dtype: torch.dtype = torch.float64, scaling: Scaling = "columns"
) -> StandardisedData:
    return partitioned(features, labels, np.zeros_like(labels), dtype, scaling)


def partitioned(
    features: np.ndarray,
    labels: np.ndarray,
    part: np.ndarray,
    dtype: torch.dtype = torch.float64,
    scaling: Scaling = "columns",
) -> StandardisedData:
    num_classes = int(labels.max()) + 1
    return standardise(features, labels, part, num_classes=num_classes, dtype=dtype, device=CPU, scaling=scaling)


class CommonScaler:
    """What `scaling="common"` says, in the words of its definition."""

    def fit(self, features: np.ndarray) -> CommonScaler:
        self.mean = features.mean(axis=0)
        self.scale = np.sqrt(features.var(axis=0).sum() / features.shape[1])
        self.constant = np.ptp(features, axis=0) == 0
        return self

    def transform(self, features: np.ndarray) -> np.ndarray:
        return np.where(self.constant, 0.0, (features - self.mean) / self.scale)


SCALERS: dict[Scaling, Any] = {"columns": StandardScaler, "common": CommonScaler}


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


@pytest.mark.parametrize(("num_classes", "scaling"), [(2, "columns"), (2, "common"), (4, "common"), (6, "columns")])
def test_solutions_are_those_of_scikit_learn_for_every_c(num_classes: int, scaling: Scaling) -> None:
    features, labels = features_and_labels(300, 20, num_classes)
    scaled = SCALERS[scaling]().fit(features).transform(features)
    for dtype, tolerance, coefficient_error, loss_error in (
        # A gradient of 1e-9 leaves errors of about 1e-9 over the smallest curvature, here about 1e-3.
        (torch.float64, 1e-9, 2e-6, 1e-8),
        (torch.float32, 1e-5, 5e-3, 2e-5),
    ):
        data = unpartitioned(features, labels, dtype, scaling)
        solutions = solve(
            data, spectrum(data), np.full(10, NO_PART), STRENGTHS, tolerance=tolerance, max_iterations=1000
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
@pytest.mark.parametrize("scaling", ["columns", "common"])
@pytest.mark.parametrize(("num_rows", "dim", "rotated"), [(120, 8, False), (30, 50, False), (30, 50, True)])
def test_each_fold_is_standardised_by_its_own_training_rows(
    num_classes: int, scaling: Scaling, num_rows: int, dim: int, rotated: bool
) -> None:
    features, labels = features_and_labels(num_rows, dim, num_classes)
    if scaling == "columns":
        features[:, 2] *= 1000
        features[5, 3] = 1e4  # Most of this column's variance is one row, which one fold does not see,
    features[:, 4] = np.arange(num_rows) == 7  # and this column is constant for it.
    part = np.arange(num_rows) % 3
    data: _solvers.Data = partitioned(features, labels, part, scaling=scaling)
    if rotated:
        data = rotate(data)
    left_out, strengths = np.repeat([0, 1, 2, NO_PART], 3), np.tile([1e-3, 0.1, 10.0], 4)
    solutions = solve(data, spectrum(data), left_out, strengths, tolerance=1e-9, max_iterations=1000)
    correct = _solvers.count_correct(data, solutions, left_out)
    assert solutions.converged.all()
    for index, (fold, c) in enumerate(zip(left_out, strengths, strict=True)):
        kept = part != fold
        scored = np.ones_like(kept) if fold == NO_PART else ~kept
        scaler = SCALERS[scaling]().fit(features[kept])
        coefficients, intercept = scikit_learn(scaler.transform(features[kept]), labels[kept], c)
        np.testing.assert_allclose(solutions.coefficients[index], coefficients, atol=3e-6 * np.abs(coefficients).max())
        logits = scaler.transform(features[scored]) @ coefficients.T + intercept
        predicted = logits[:, 0] > 0 if num_classes == 2 else logits.argmax(axis=1)
        assert correct[index] == (predicted == labels[scored]).sum()


@pytest.mark.parametrize("num_classes", [2, 4])
def test_rotated_problems_have_the_same_solutions(num_classes: int) -> None:
    """At every C, with rows that depend on each other, constant columns, and a start."""
    features, labels = features_and_labels(24, 200, num_classes)
    features[11] = features[10]
    features[:, 50:60] = 3.0
    data = partitioned(features, labels, np.arange(24) % 3)
    rotated = rotate(data)
    assert rotated.matrix.shape == (4, 24, 24)
    left_out, strengths = np.tile([0, 1, 2, NO_PART], 4), np.repeat(STRENGTHS[::3], 4)
    settings: dict[str, Any] = {"tolerance": 1e-10, "max_iterations": 5000}
    expected = solve(data, spectrum(data), left_out, strengths, **settings)
    result = solve(rotated, spectrum(rotated), left_out, strengths, **settings)
    assert expected.converged.all()
    assert result.converged.all()
    # Beyond C = 10 these separable rows have no curvature left: a gradient of 1e-10 leaves 1e-5 in the intercepts.
    compared = strengths <= 10
    np.testing.assert_allclose(result.coefficients[compared], expected.coefficients[compared], atol=1e-6)
    np.testing.assert_allclose(result.intercepts[compared], expected.intercepts[compared], atol=1e-6)
    np.testing.assert_allclose(result.objective, expected.objective, atol=1e-9)
    np.testing.assert_array_equal(
        _solvers.count_correct(rotated, result, left_out), _solvers.count_correct(data, expected, left_out)
    )
    start = expected.coefficients, expected.intercepts
    again = solve(rotated, spectrum(rotated), left_out, strengths, start=start, tolerance=1e-8, max_iterations=5)
    assert again.converged.all()
    assert again.iterations.max() == 1
    for basis, rank in zip(rotated.basis.numpy(), (16, 16, 16, 24), strict=True):
        expected_gram = np.diag(np.arange(24) < rank).astype(float)
        np.testing.assert_allclose(basis.T @ basis, expected_gram, atol=1e-12)


def test_float64_products_with_a_float32_matrix_are_exact_for_that_matrix() -> None:
    features, labels = features_and_labels(300, 20, 3)
    data = unpartitioned(features, labels, torch.float32)
    settings: dict[str, Any] = {"tolerance": 1e-10, "max_iterations": 1000}
    problem = np.array([NO_PART]), np.array([1.0])
    result = solve(data, spectrum(data), *problem, **settings, dtype=torch.float64)
    widened = replace(data, matrix=data.matrix.to(torch.float64))
    expected = solve(widened, spectrum(widened), *problem, **settings)
    assert result.converged.all()
    np.testing.assert_allclose(result.coefficients, expected.coefficients, atol=1e-7)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_gradient_is_the_slope_of_the_objective(num_classes: int) -> None:
    features, labels = features_and_labels(40, 4, num_classes)
    data = partitioned(features, labels, np.arange(40) % 2)
    left_out, strengths = np.array([0, 1, NO_PART]), np.array([0.5, 2.0, 1.0])
    objectives = _solvers._Objectives(data, spectrum(data), left_out, strengths, torch.float64)
    generator = np.random.default_rng(0)
    points = torch.from_numpy(generator.standard_normal((3, data.num_logits * 5)))
    _, gradient, bend = objectives(points)
    direction = torch.from_numpy(generator.standard_normal(points.shape))
    ahead, behind = objectives(points + 1e-5 * direction)[0], objectives(points - 1e-5 * direction)[0]
    # A central difference is off by about 1e-10 times the third derivative, and 1e-16 / 1e-5 by rounding.
    np.testing.assert_allclose((gradient * direction).sum(dim=1), (ahead - behind) / 2e-5, rtol=1e-6)
    assert ((bend > 0) & (bend <= (0.25 if num_classes == 2 else 0.5))).all()


def test_links_are_exact_far_from_zero() -> None:
    logits = torch.tensor([[[-800.0, 800.0, -800.0, 800.0]]], dtype=torch.float64)
    both = torch.cat([torch.zeros_like(logits), logits], dim=1)
    residuals, loss, bend = _solvers._binary_link(logits, [0, 2, 4])
    np.testing.assert_array_equal(residuals, [[[0, 1, -1, 0]]])
    assert loss == 1600
    assert bend == 0
    residuals, loss, bend = _solvers._softmax_link(both, [0, 2, 4])
    np.testing.assert_array_equal(residuals[0, 1], [0, 1, -1, 0])
    assert loss == 1600
    assert bend == 0


@pytest.mark.parametrize("size", [25.0, 35.0])
def test_the_links_agree_where_the_loss_is_small(size: float) -> None:
    """e^-25 is lost beside 25 by float32 and e^-35 nearly by float64; the loss of the right class is e^-size itself."""
    logits = torch.tensor([[[size, -size]]], dtype=torch.float64)
    loss = _solvers._binary_link(-logits, [0, 1, 2])[1]
    assert loss.item() == pytest.approx(2 * np.log1p(np.exp(-size)), rel=1e-12)
    wrong = _solvers._binary_link(logits.clone(), [0, 1, 2])[1]
    assert wrong.item() - 2 * size == pytest.approx(2 * np.exp(-size), abs=1e-14)


@pytest.mark.parametrize("shape", [(50, 12), (12, 50)])
def test_preconditioner_is_the_inverse_of_the_averaged_hessian(shape: tuple[int, int]) -> None:
    features, labels = features_and_labels(*shape, 2)
    data = unpartitioned(features, labels)
    curvature = spectrum(data)
    if shape[0] < shape[1]:
        # Outside the row space the eigenvalue is 0; the one that `spectrum` puts there is for folds.
        curvature = replace(curvature, rest=0.0)
    objectives = _solvers._Objectives(data, curvature, np.array([NO_PART]), np.array([0.3]), torch.float64)
    vector = np.random.default_rng(0).standard_normal((1, shape[1] + 1))
    matrix = data.matrix.numpy()
    hessian = np.zeros((shape[1] + 1, shape[1] + 1))
    hessian[:-1, :-1] = 0.2 * matrix.T @ matrix / shape[0] + np.eye(shape[1]) / (0.3 * shape[0])
    hessian[-1, -1] = 0.2
    result = objectives.precondition(torch.from_numpy(vector), torch.tensor([0.2], dtype=torch.float64))
    np.testing.assert_allclose(result[0], np.linalg.solve(hessian, vector[0]), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("shape", [(60, 20), (20, 60)])
def test_spectrum_is_that_of_the_gram_matrix(shape: tuple[int, int]) -> None:
    data = unpartitioned(*features_and_labels(*shape, 2))
    matrix = data.matrix.numpy()
    expected = np.linalg.eigvalsh(matrix.T @ matrix / shape[0])
    whole = spectrum(data)
    assert whole.basis is not None
    np.testing.assert_allclose(whole.values, expected[-len(whole.values) :], rtol=1e-9, atol=1e-9)
    assert len(whole.values) == (20 if shape[0] > shape[1] else 19)  # Centring takes one dimension of the rows.
    np.testing.assert_allclose(whole.basis.T @ whole.basis, np.eye(len(whole.values)), atol=1e-9)
    leading = spectrum(data, exact_rank=5, partial_rank=4)
    assert leading.basis is not None
    np.testing.assert_allclose(leading.values, expected[-4:], rtol=0.02)
    np.testing.assert_allclose(leading.basis.T @ leading.basis, np.eye(4), atol=1e-9)
    assert leading.rest == pytest.approx((expected.sum() - float(leading.values.sum())) / 16, rel=1e-6)


@pytest.mark.parametrize(("shape", "exact_rank"), [((60, 40), 1024), ((200, 100), 1024), ((60, 40), 5)])
@pytest.mark.parametrize("size", [1e-18, 1e-19])
def test_the_spectrum_of_columns_of_any_size(shape: tuple[int, int], exact_rank: int, size: float) -> None:
    """Three dimensions and 1e-19 of them, as log-probabilities with a floor may be: their products underflow float32."""
    generator = np.random.default_rng(0)
    features = generator.standard_normal((shape[0], 3)) @ generator.standard_normal((3, shape[1]))
    features[:, 3:] *= size
    labels = np.arange(shape[0]) % 2
    data = unpartitioned(features.astype(np.float32), labels, torch.float32, "common")
    matrix = data.matrix.numpy().astype(np.float64)
    expected = np.linalg.eigvalsh(matrix.T @ matrix / shape[0])
    found = spectrum(data, exact_rank=exact_rank, partial_rank=4)
    assert found.basis is not None
    assert found.basis.dtype == torch.float32
    np.testing.assert_allclose(found.values[-3:], expected[-3:], rtol=1e-5)
    np.testing.assert_allclose(found.values[:-3], 0.0, atol=1e-6 * expected[-1])
    np.testing.assert_allclose(found.basis.T @ found.basis, np.eye(len(found.values)), atol=1e-5)
    np.testing.assert_allclose(matrix @ found.basis.numpy()[:, :-3], 0.0, atol=1e-5)


def test_the_spectrum_draws_from_a_generator_of_its_own() -> None:
    data = unpartitioned(*features_and_labels(60, 20, 2))
    state = torch.random.get_rng_state()
    first = spectrum(data, exact_rank=5, partial_rank=4)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(spectrum(data, exact_rank=5, partial_rank=4).values, first.values, rtol=0, atol=0)


def test_spectrum_decides_the_speed_only() -> None:
    features, labels = features_and_labels(100, 30, 3)
    data = unpartitioned(features, labels)
    exact = spectrum(data)
    results = [
        solve(data, curvature, np.full(3, NO_PART), np.array([1e-3, 0.1, 10.0]), tolerance=1e-9, max_iterations=5000)
        for curvature in (
            exact,
            spectrum(data, exact_rank=5, partial_rank=4),
            replace(exact, values=torch.ones_like(exact.values)),
        )
    ]
    for other in results[1:]:
        np.testing.assert_allclose(other.coefficients, results[0].coefficients, atol=1e-6)
        assert other.iterations.sum() > results[0].iterations.sum()


def test_preconditioning_keeps_the_number_of_evaluations_small() -> None:
    """Not a timing: evaluations do not depend on the machine. Without the preconditioner this takes over 1,000."""
    features, labels = features_and_labels(400, 60, 2)
    data = unpartitioned(features, labels)
    solutions = solve(data, spectrum(data), np.full(10, NO_PART), STRENGTHS, tolerance=1e-6, max_iterations=1000)
    assert solutions.iterations.sum() <= 200


@pytest.mark.parametrize("limit", ["_BLOCK_BYTES", "_HISTORY_BYTES"])
def test_memory_limits_do_not_change_the_result(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels = features_and_labels(500, 10, 3)
    part = np.arange(500) % 2
    left_out, strengths = np.tile([0, 1], 10), np.repeat(STRENGTHS, 2)

    def run() -> _solvers.Solutions:
        data = partitioned(features, labels, part)
        return solve(data, spectrum(data), left_out, strengths, tolerance=1e-8, max_iterations=500)

    expected = run()
    monkeypatch.setattr(_solvers, limit, 1)
    result = run()
    np.testing.assert_allclose(result.coefficients, expected.coefficients, atol=1e-6)
    assert result.converged.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_classes", [2, 3])
def test_separable_rows_under_a_weak_penalty_converge(dtype: torch.dtype, num_classes: int) -> None:
    features, labels = features_and_labels(40, 100, num_classes)
    data = unpartitioned(features, labels, dtype)
    solutions = solve(data, spectrum(data), np.array([NO_PART]), np.array([1e3]), tolerance=1e-5, max_iterations=500)
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
        data, spectrum(data), np.full(2, NO_PART), np.array([1e-6, 1e2]), tolerance=1e-6, max_iterations=4
    )
    np.testing.assert_array_equal(solutions.converged, [True, False])
    assert solutions.iterations[1] == 4
    assert solutions.gradient_norm[1] > 1e-6


def test_a_tolerance_below_rounding_stops_unconverged() -> None:
    features, labels = features_and_labels(100, 10, 2)
    data = unpartitioned(features, labels, torch.float32)
    solutions = solve(data, spectrum(data), np.array([NO_PART]), np.array([1.0]), tolerance=1e-15, max_iterations=300)
    assert not solutions.converged[0]
    assert solutions.gradient_norm[0] < 1e-5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_standardisation_is_that_of_scikit_learn(dtype: type) -> None:
    features, labels = features_and_labels(90, 6, 2)
    features[:, 0] = 0.1  # Constant, and 0.1 is not a binary fraction.
    features[:, 1] += 1e4
    features = features.astype(dtype)
    part = np.arange(90) % 3
    data = partitioned(features, labels, part)
    order = np.lexsort((labels, part))
    np.testing.assert_array_equal(data.labels, labels[order])
    np.testing.assert_array_equal(data.matrix[:, 0], 0)
    for fold in (0, 1, 2, NO_PART):
        scaler = StandardScaler().fit(features[part != fold].astype(np.float64))
        scaled = scaler.transform(features[order].astype(np.float64))
        # 1e4 / 20 makes the second column lose three digits.
        result = (data.matrix * data.stretch[fold] + data.shift[fold]).numpy()
        np.testing.assert_allclose(result[:, 1:], scaled[:, 1:], rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(result[:, 0], 0)


def test_common_scaling_keeps_proportions_and_makes_the_total_variance_the_dimension() -> None:
    features, labels = features_and_labels(90, 6, 2)
    features[:, 0] = 0.1
    data = unpartitioned(features, labels, scaling="common")
    order = np.argsort(labels, kind="stable")
    centred = features[order] - features.mean(axis=0)
    matrix = data.matrix.numpy()
    np.testing.assert_array_equal(matrix[:, 0], 0)
    np.testing.assert_allclose(matrix[:, 1:] / centred[:, 1:], 1 / data.scale[0].item(), rtol=1e-9)
    assert matrix.var(axis=0).sum() == pytest.approx(6)


def test_feature_units() -> None:
    features, labels = features_and_labels(50, 5, 3)
    data = unpartitioned(features, labels)
    coefficients, intercepts = np.ones((3, 5)), np.array([1.0, 2.0, 3.0])
    raw, raw_intercepts = _solvers.to_feature_units(data, coefficients, intercepts)
    scaled = StandardScaler().fit_transform(features)
    np.testing.assert_allclose(features @ raw.T + raw_intercepts, scaled @ coefficients.T + intercepts, atol=1e-9)


class RecordedPrecision(TorchFunctionMode):
    """Notes the float32 setting under which each product is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("matmul", "__matmul__", "__rmatmul__"):
            try:
                self.seen.add(torch.get_float32_matmul_precision())
            except RuntimeError:
                self.seen.add(torch.backends.cuda.matmul.fp32_precision)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def default_precision() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("default_precision")
@pytest.mark.parametrize("switch", ["one for all backends", "one for each backend"])
def test_products_are_in_full_float32_whatever_the_caller_uses(switch: str) -> None:
    """TF32 and bfloat16 have 10 and 7 bits: too few for a gradient of 1e-5."""
    if switch == "one for all backends":
        torch.set_float32_matmul_precision("medium")
    elif hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        pytest.skip("this torch has no switch for each backend")
    features, labels = features_and_labels(60, 5, 2)
    with RecordedPrecision() as recorded:
        data = unpartitioned(features, labels, torch.float32)
        everything = np.array([NO_PART])
        solutions = solve(data, spectrum(data), everything, np.ones(1), tolerance=1e-5, max_iterations=50)
        _solvers.count_correct(data, solutions, everything)
        assert recorded.seen == {"highest"}
    if switch == "one for all backends":
        assert torch.get_float32_matmul_precision() == "medium"
    else:
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_renewed_preconditioner_reaches_the_same_solutions_sooner(num_classes: int) -> None:
    """On columns of very unequal variances, such as distributions along their principal axes, and weak penalties."""
    generator = np.random.default_rng(0)
    latent = generator.standard_normal((300, 12))
    logits = latent @ generator.standard_normal((12, 1000)) + 2 * generator.standard_normal(1000)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    left, singular, _ = np.linalg.svd(probabilities - probabilities.mean(axis=0), full_matrices=False)
    features = (left * singular)[:, :80]
    drawn = latent @ generator.standard_normal((12, num_classes)) + generator.gumbel(size=(300, num_classes))
    labels, part = drawn.argmax(axis=1), np.arange(300) % 3
    data = partitioned(features, labels, part, scaling="common")
    left_out, strengths = np.tile([0, 1, 2, NO_PART], 2), np.repeat([1.0, 100.0], 4)
    plain, renewed = (
        solve(data, spectrum(data), left_out, strengths, tolerance=1e-9, max_iterations=4000, renew=renew)
        for renew in (False, True)
    )
    assert renewed.converged.all()
    assert plain.converged.all()
    assert renewed.iterations.sum() < plain.iterations.sum() / 2
    np.testing.assert_allclose(renewed.objective, plain.objective, rtol=1e-7)
    for index, (fold, c) in enumerate(zip(left_out, strengths, strict=True)):
        scaled = CommonScaler().fit(features[part != fold]).transform(features[part != fold])
        coefficients, _ = scikit_learn(scaled, labels[part != fold], c)
        np.testing.assert_allclose(renewed.coefficients[index], coefficients, atol=1e-4 * np.abs(coefficients).max())
