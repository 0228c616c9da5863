"""Many L2 logistic regressions on one data matrix, solved together.

A cross-validation grid asks for the same regression once per fold f and penalty C. Written per training example, it is

    minimise over (w, b):  1/n_f Σ_{i ∉ f} loss(W x̃_i + b, y_i) + 1/(2 C n_f) ‖W‖²,      x̃ = (x - mean_f) / scale_f,

the objective of scikit-learn's `LogisticRegression` divided by C n_f: loss is the cross-entropy of one logit (K = 2) or
of a softmax (K > 2), b is not penalised, and mean and scale come from the n_f training rows only. Three steps make it
fast:

1. One matrix for all folds. With x standardised once by all rows, x̃ = stretch_f ∘ x + shift_f, so the fold's logits
   are (stretch_f ∘ w)·x + (b + shift_f·w). Every problem is then a row of one coefficient matrix, and one evaluation of
   all objectives and gradients is two matrix-matrix products.
2. One preconditioner for all problems. The Hessian of the loss is XᵀX with each row weighted by the curvature of its
   loss, at most ¼ (K = 2) or ½ (K > 2) (Böhning & Lindsay 1988; Böhning 1992). With the mean curvature at the present
   weights for all rows, and the penalty's I / (C n), its inverse is diagonal in the eigenbasis of XᵀX, for every C at
   once. Folds differ a little in XᵀX, which a preconditioner may.
3. L-BFGS in lockstep. Each problem has its own memory and step length, all problems share each evaluation, and a
   problem that has converged leaves. Source: Nocedal & Wright, Numerical Optimization, alg. 7.4; step rule of Hager &
   Zhang (2005), whose approximate Wolfe condition still works where rounding hides the decrease of the objective.

Known gap: the basis is dense. Sparse features of many dimensions need another preconditioner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.extmath import randomized_svd

__all__ = [
    "Solutions",
    "Spectrum",
    "StandardisedData",
    "count_correct",
    "solve",
    "spectrum",
    "standardise",
    "to_feature_units",
]

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]

NO_PART = -1
"""`left_out` of a problem that trains on every row."""

_MEMORY = 10
"""Pairs kept by L-BFGS, the usual choice; with this preconditioner more did not save evaluations."""

_BLOCK_BYTES = 2**23
"""Aim for the logits of one block of rows: they are passed over several times and should stay in the cache."""

_HISTORY_BYTES = 2**30
"""Limit on the L-BFGS memory of the problems that are solved together."""

_EXACT_RANK = 1024
"""Largest min(n, d) for which the whole eigenbasis is computed, a fraction of a second; its cost is cubic."""

_PARTIAL_RANK = 256
"""Leading eigenvectors computed beyond that; the rest of the spectrum shares one eigenvalue. On features with
eigenvalues 1/j (d = 2048) this took 18 % more evaluations than the whole basis, for a quarter of its time."""


class Moments(NamedTuple):
    """What standardisation needs to know about the columns of some rows; each array has shape (d,), float64.

    Attributes:
        num_rows: Number of rows.
        mean: Column means.
        squares: Σ (x - mean)².
        low: Column minima.
        high: Column maxima.
    """

    num_rows: int
    mean: FloatArray
    squares: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True)
class StandardisedData:
    """A feature matrix with its parts (the folds), ready for `solve`.

    Attributes:
        matrix: Features standardised by the statistics of all rows, shape (n, d), in the dtype of the computation. Rows
            are sorted by part and, within a part, by label. Constant columns are zero.
        labels: Labels in the order of `matrix`, shape (n,).
        num_classes: K.
        bounds: Part q is rows `bounds[q]` to `bounds[q + 1]` of `matrix`; shape (Q + 1,).
        mean: Column means over all rows, in feature units, shape (d,).
        scale: Standard deviation (divisor n) over all rows, 1 for a constant column, shape (d,).
        stretch: Row q turns `matrix` into features standardised without part q: stretch ∘ x + shift. The last row,
            which `NO_PART` indexes, leaves nothing out. Zero for a column that only part q makes vary.
            Shape (Q + 1, d).
        shift: See `stretch`.
    """

    matrix: FloatArray
    labels: IntArray
    num_classes: int
    bounds: IntArray
    mean: FloatArray
    scale: FloatArray
    stretch: FloatArray
    shift: FloatArray

    @property
    def num_logits(self) -> int:
        """1 for two classes, else K."""
        return 1 if self.num_classes == 2 else self.num_classes

    def num_training_rows(self, left_out: IntArray) -> FloatArray:
        """Return n minus the size of the part left out, for each problem, as float64."""
        sizes = np.append(np.diff(self.bounds), 0)
        return (len(self.matrix) - sizes[left_out]).astype(np.float64)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues and eigenvectors of XᵀX / n, exact or the leading ones.

    Attributes:
        values: Eigenvalues, shape (r,), >= 0.
        basis: Orthonormal eigenvectors in its columns, shape (d, r).
        rest: Eigenvalue assumed for every direction outside the basis.
    """

    values: FloatArray
    basis: FloatArray
    rest: float


@dataclass(frozen=True)
class Solutions:
    """Solutions of P problems.

    Attributes:
        coefficients: Shape (P, K', d), for features standardised by each problem's own training rows; K' = 1 or K
            logits.
        intercepts: Shape (P, K').
        objective: Objective per training example, in nats, shape (P,).
        gradient_norm: Largest absolute entry of its gradient, shape (P,).
        iterations: Evaluations of the objective, shape (P,).
        converged: Whether `gradient_norm` reached the tolerance, shape (P,).
    """

    coefficients: NDArray[np.float64]
    intercepts: NDArray[np.float64]
    objective: NDArray[np.float64]
    gradient_norm: FloatArray
    iterations: IntArray
    converged: NDArray[np.bool_]


def standardise(
    features: FloatArray, labels: IntArray, part: IntArray, *, num_classes: int, dtype: Any
) -> StandardisedData:
    """Standardise features by all rows, and note what it takes to standardise them without any one part.

    Statistics are float64 whatever the dtypes; rows are read in blocks, so the only large array made is `matrix`. A
    column counts as constant where it spans no more than four roundings of the features' dtype.

    Args:
        features: Finite, shape (n, d), float32 or float64.
        labels: In 0..K-1, shape (n,).
        part: Part of each row, 0..Q-1, shape (n,). One part only means that no problem leaves anything out.
        num_classes: K.
        dtype: np.float32 or np.float64, of `matrix` and so of all products with it.
    """
    order = np.lexsort((labels, part))
    num_parts = int(part.max()) + 1
    bounds = np.searchsorted(part[order], np.arange(num_parts + 1))
    parts = [_moments(features, order[start:stop]) for start, stop in pairwise(bounds)]
    total = _merged(parts)
    resolution = 4 * float(np.finfo(features.dtype).eps)
    mean, scale, constant = _location_and_scale(total, resolution)

    stretch = np.ones((num_parts + 1, features.shape[1]))
    shift = np.zeros_like(stretch)
    for left_out in range(num_parts if num_parts > 1 else 0):
        kept_mean, kept_scale, kept_constant = _location_and_scale(
            _merged(parts[:left_out] + parts[left_out + 1 :]), resolution
        )
        stretch[left_out] = np.where(kept_constant, 0.0, scale / kept_scale)
        shift[left_out] = np.where(kept_constant, 0.0, (mean - kept_mean) / kept_scale)

    matrix = np.empty(features.shape, dtype=dtype)
    for rows in _blocks(0, len(matrix), features.shape[1] * 8):
        matrix[rows] = (features[order[rows]].astype(np.float64) - mean) / scale
    matrix[:, constant] = 0.0
    return StandardisedData(
        matrix=matrix,
        labels=labels[order].astype(np.int64),
        num_classes=num_classes,
        bounds=bounds.astype(np.int64),
        mean=mean,
        scale=scale,
        stretch=stretch,
        shift=shift,
    )


def spectrum(matrix: FloatArray, *, exact_rank: int = _EXACT_RANK, partial_rank: int = _PARTIAL_RANK) -> Spectrum:
    """Return the eigendecomposition of XᵀX / n for X of shape (n, d), from the smaller of XᵀX and XXᵀ.

    Where min(n, d) exceeds `exact_rank`, only the `partial_rank` leading eigenvectors are computed, by randomised
    subspace iteration with a fixed seed (Halko, Martinsson & Tropp 2011), and the rest share their mean eigenvalue.

    Args:
        matrix: Standardised features, shape (n, d).
        exact_rank: Largest min(n, d) for the whole basis.
        partial_rank: Eigenvectors beyond that, < `exact_rank`.
    """
    num_rows, dim = matrix.shape
    if min(num_rows, dim) > exact_rank:
        _, singular, right = randomized_svd(
            matrix, partial_rank, n_iter=2, power_iteration_normalizer="QR", random_state=0
        )
        values = singular.astype(np.float64) ** 2 / num_rows
        # tr XᵀX / n = Σ x² / n, without a copy of the matrix.
        trace = float(np.einsum("ij,ij->", matrix, matrix, dtype=np.float64)) / num_rows
        rest = max(trace - float(values.sum()), 0.0) / (min(num_rows, dim) - partial_rank)
        return Spectrum(values=values, basis=right.T, rest=rest)
    if dim <= num_rows:
        values, basis = np.linalg.eigh(matrix.T @ matrix / num_rows)
        return Spectrum(values=np.maximum(values, 0.0).astype(np.float64), basis=basis, rest=0.0)
    # XXᵀ = U Λ Uᵀ gives XᵀX = V Λ Vᵀ with V = Xᵀ U Λ^-½. Directions of rounding size are left to `rest`, which is not 0
    # but the smallest eigenvalue: a fold's own standardisation turns its rows a little out of this space.
    values, left = np.linalg.eigh(matrix @ matrix.T / num_rows)
    kept = values > values[-1] * np.finfo(matrix.dtype).eps * num_rows
    if not kept.any():
        return Spectrum(values=np.zeros(0), basis=np.zeros((dim, 0), dtype=matrix.dtype), rest=0.0)
    values, left = values[kept], left[:, kept]
    basis = matrix.T @ (left / np.sqrt(values * num_rows))
    return Spectrum(values=values.astype(np.float64), basis=basis, rest=float(values[0]))


def solve(
    data: StandardisedData,
    curvature: Spectrum,
    left_out: IntArray,
    strengths: FloatArray,
    *,
    tolerance: float,
    max_iterations: int,
    start: tuple[FloatArray, FloatArray] | None = None,
) -> Solutions:
    """Solve one regression for each pair of a part left out and a C.

    Args:
        data: The matrix.
        curvature: Spectrum of `data.matrix`; it decides the speed only, never the result.
        left_out: The part that each problem does not train on, or `NO_PART`; shape (P,).
        strengths: C of each problem, > 0, shape (P,).
        tolerance: Stop where the largest absolute entry of the gradient, per training example, is at most this. In
            float32, what can be reached is about 1e-6.
        max_iterations: Stop a problem unconverged after so many evaluations.
        start: Coefficients (P, K', d) and intercepts (P, K') to start from. None: zero coefficients, class log-priors.
    """
    size = data.num_logits * (data.matrix.shape[1] + 1)
    group = max(1, _HISTORY_BYTES // (8 * size * (2 * _MEMORY + 6)))
    points = _initial_points(data, len(left_out), start)
    # Problems of like C take alike long, so they share a group.
    order = np.argsort(strengths, kind="stable")
    objective, gradient_norm = np.empty(len(order)), np.empty(len(order))
    iterations, converged = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=bool)
    for first in range(0, len(order), group):
        chosen = order[first : first + group]
        points[chosen], objective[chosen], gradient_norm[chosen], iterations[chosen], converged[chosen] = (
            _lockstep_lbfgs(
                _Objectives(data, curvature, left_out[chosen], strengths[chosen].astype(np.float64)),
                points[chosen],
                tolerance=tolerance,
                max_iterations=max_iterations,
            )
        )
    coefficients, intercepts = _split(points, data.num_logits)
    return Solutions(coefficients, intercepts, objective, gradient_norm, iterations, converged)


def count_correct(data: StandardisedData, solutions: Solutions, left_out: IntArray) -> IntArray:
    """Count the rows of each problem's left-out part (of all rows for `NO_PART`) that it classifies correctly.

    Returns:
        Shape (P,). A tie goes to the class of lower number.
    """
    weights, offsets = _folded(data, solutions.coefficients, solutions.intercepts, left_out)
    correct = np.zeros(len(left_out), dtype=np.int64)
    for part, rows in _part_blocks(data, len(left_out) * data.num_logits):
        chosen = np.flatnonzero((left_out == part) | (left_out == NO_PART))
        if chosen.size:
            logits = _logits(data.matrix[rows], weights[chosen], offsets[chosen])
            predicted = logits[:, 0] > 0 if data.num_classes == 2 else logits.argmax(axis=1)
            correct[chosen] += (predicted == data.labels[rows]).sum(axis=1)
    return correct


def to_feature_units(
    data: StandardisedData, coefficients: NDArray[np.float64], intercepts: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Turn a solution that left nothing out into one for the features as they came.

    w·(x - mean)/scale + b = (w/scale)·x + (b - (w/scale)·mean).

    Args:
        coefficients: Shape (K', d).
        intercepts: Shape (K',).
    """
    raw = coefficients / data.scale
    return raw, intercepts - raw @ data.mean


class _Objectives:
    """Objectives, gradients and preconditioner of some problems; points are rows (W flattened, then b)."""

    def __init__(self, data: StandardisedData, curvature: Spectrum, left_out: IntArray, strengths: FloatArray) -> None:
        self.data = data
        self.curvature = curvature
        self.left_out = left_out
        self.num_rows = data.num_training_rows(left_out)
        self.ridge = 1.0 / (strengths * self.num_rows)

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Forget the problems that have left."""
        self.left_out, self.num_rows, self.ridge = self.left_out[kept], self.num_rows[kept], self.ridge[kept]

    def __call__(self, points: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return objectives (A,), gradients (A, m) and mean curvatures of the loss (A,)."""
        data = self.data
        coefficients, intercepts = _split(points, data.num_logits)
        weights, offsets = _folded(data, coefficients, intercepts, self.left_out)
        loss, bend = np.zeros(len(points)), np.zeros(len(points))
        products = np.zeros(coefficients.shape)
        sums = np.zeros(intercepts.shape)
        for part, rows in _part_blocks(data, weights.shape[0] * weights.shape[1]):
            trained = np.flatnonzero(self.left_out != part)
            if not trained.size:
                continue
            block = data.matrix[rows]
            logits = _logits(block, weights[trained], offsets[trained])
            residuals, block_loss, block_bend = _LINKS[data.num_classes > 2](logits, data.labels[rows])
            loss[trained] += block_loss
            bend[trained] += block_bend
            sums[trained] += residuals.sum(axis=2, dtype=np.float64)
            products[trained] += (residuals.reshape(-1, residuals.shape[2]) @ block).reshape(
                trained.size, -1, block.shape[1]
            )
        # Chain rule of logits = (stretch ∘ w)·x + shift·w + b.
        gradient = products * data.stretch[self.left_out][:, np.newaxis] + (
            sums[:, :, np.newaxis] * data.shift[self.left_out][:, np.newaxis]
        )
        gradient = (
            gradient / self.num_rows[:, np.newaxis, np.newaxis] + coefficients * self.ridge[:, np.newaxis, np.newaxis]
        )
        penalty = 0.5 * self.ridge * np.einsum("akd,akd->a", coefficients, coefficients)
        return (
            loss / self.num_rows + penalty,
            _joined(gradient, sums / self.num_rows[:, np.newaxis]),
            bend / self.num_rows,
        )

    def precondition(self, vectors: FloatArray, bend: FloatArray) -> FloatArray:
        """Multiply by (bend·XᵀX/n + ridge·I)⁻¹ on coefficients and by 1/bend on intercepts; shapes (A, m), (A,)."""
        basis, values, rest = self.curvature.basis, self.curvature.values, self.curvature.rest
        coefficients, intercepts = _split(vectors, self.data.num_logits)
        shape = coefficients.shape
        flat = coefficients.reshape(-1, shape[2]).astype(basis.dtype, copy=False)
        inside = 1.0 / (bend[:, np.newaxis] * values + self.ridge[:, np.newaxis])
        if basis.shape[1] == basis.shape[0]:
            outside = np.zeros_like(bend)
        else:
            outside = 1.0 / (bend * rest + self.ridge)
        rotated = (flat @ basis).reshape(shape[0], shape[1], -1) * (inside - outside[:, np.newaxis])[:, np.newaxis]
        result = (rotated.reshape(-1, basis.shape[1]).astype(basis.dtype, copy=False) @ basis.T).reshape(shape)
        result = result + outside[:, np.newaxis, np.newaxis] * coefficients
        return _joined(result, intercepts / bend[:, np.newaxis])


def _binary_link(logits: FloatArray, labels: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Residuals σ(z) - y (A, 1, rows), summed loss log(1 + eᶻ) - y z (A,), summed curvature σ(z) (1 - σ(z)) (A,).

    Labels are sorted, so class 1 is the tail of the rows.
    """
    ones = int(np.searchsorted(labels, 1))
    decay = np.abs(logits)
    np.negative(decay, out=decay)
    np.exp(decay, out=decay)
    # log(1 + eᶻ) = max(z, 0) + log(1 + e^-|z|), exact for large |z|; σ(z) from the same exponential.
    loss = np.log1p(decay).sum(axis=(1, 2), dtype=np.float64)
    positive = np.maximum(logits, 0)
    loss += positive.sum(axis=(1, 2), dtype=np.float64) - logits[:, :, ones:].sum(axis=(1, 2), dtype=np.float64)
    small = decay / (1 + decay)
    bend = (small * (1 - small)).sum(axis=(1, 2), dtype=np.float64)
    residuals = np.where(logits >= 0, 1 - small, small)
    # For class 1, σ(z) - 1 = -σ(-z), without the cancellation.
    residuals[:, :, ones:] = -np.where(logits[:, :, ones:] >= 0, small[:, :, ones:], 1 - small[:, :, ones:])
    return residuals, loss, bend


def _softmax_link(logits: FloatArray, labels: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Residuals p - onehot (A, K, rows), summed loss log Σ e^z - z_gold (A,), summed curvature (A,).

    The curvature of one example, diag(p) - p pᵀ, has trace 1 - Σ p² and rank K - 1; their ratio stands for it. Labels
    are sorted, so each class is a slice of the rows. `logits` is overwritten.
    """
    num_classes = logits.shape[1]
    starts = np.searchsorted(labels, np.arange(num_classes + 1))
    logits -= logits.max(axis=1, keepdims=True)
    loss = np.zeros(len(logits))
    for label in np.flatnonzero(np.diff(starts)):
        loss -= logits[:, label, starts[label] : starts[label + 1]].sum(axis=1, dtype=np.float64)
    probabilities = np.exp(logits, out=logits)
    normaliser = probabilities.sum(axis=1, keepdims=True)
    loss += np.log(normaliser).sum(axis=(1, 2), dtype=np.float64)
    probabilities /= normaliser
    purity = np.einsum("akr,akr->a", probabilities, probabilities)
    for label in np.flatnonzero(np.diff(starts)):
        probabilities[:, label, starts[label] : starts[label + 1]] -= 1
    return probabilities, loss, (len(labels) - purity.astype(np.float64)) / (num_classes - 1)


_LINKS = {False: _binary_link, True: _softmax_link}


class _Pair(NamedTuple):
    """One step of each problem, for the L-BFGS memory.

    Attributes:
        move: Change of the point, shape (A, m).
        change: Change of the gradient, shape (A, m).
        inverse: 1 / (move·change), shape (A,); zero marks a problem that took no step.
    """

    move: FloatArray
    change: FloatArray
    inverse: FloatArray


def _lockstep_lbfgs(
    objectives: _Objectives, points: FloatArray, *, tolerance: float, max_iterations: int
) -> tuple[FloatArray, FloatArray, FloatArray, IntArray, NDArray[np.bool_]]:
    """Minimise all objectives from `points` (A, m); return points, then what `Solutions` has beside them, in order."""
    num = len(points)
    solution = points.copy()
    final_value, final_norm = np.zeros(num), np.zeros(num)
    iterations, converged = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=bool)
    # A relative change of the objective below this is rounding.
    slack = 10 * float(np.finfo(objectives.data.matrix.dtype).eps)

    active = np.arange(num)
    memory: deque[_Pair] = deque(maxlen=_MEMORY)
    value, gradient, bend = objectives(points)
    step = np.ones(num)
    for iteration in range(1, max_iterations + 1):
        norm = np.abs(gradient).max(axis=1)
        # A step cut to nothing means that rounding leaves no better point: stop, and let `converged` say so.
        done = (norm <= tolerance) | (step < 1e-8) | (iteration == max_iterations)
        if done.any():
            left = active[done]
            solution[left], final_value[left], final_norm[left] = points[done], value[done], norm[done]
            iterations[left], converged[left] = iteration, norm[done] <= tolerance
            kept = ~done
            if not kept.any():
                break
            active, points, value, gradient, bend, step = (
                array[kept] for array in (active, points, value, gradient, bend, step)
            )
            memory = deque((_Pair(*(array[kept] for array in pair)) for pair in memory), maxlen=_MEMORY)
            objectives.keep(kept)

        # Perfectly separated examples have no curvature left; the floor keeps the preconditioner finite.
        bend = np.maximum(bend, 1e-6)
        direction, slope = _descent(objectives, gradient, bend, memory)
        move = step[:, np.newaxis] * direction
        new_value, new_gradient, new_bend = objectives(points + move)
        new_slope = _dot(new_gradient, direction)
        accepted = (new_value <= value + 1e-4 * step * slope) | (
            (new_value <= value + slack * np.abs(value)) & (new_slope <= -0.8 * slope)
        )

        change = new_gradient - gradient
        product = _dot(move, change)
        useful = accepted & (product > 0)
        memory.append(_Pair(move, change, np.where(useful, 1 / np.where(useful, product, 1.0), 0.0)))
        points = np.where(accepted[:, np.newaxis], points + move, points)
        gradient = np.where(accepted[:, np.newaxis], new_gradient, gradient)
        value, bend = np.where(accepted, new_value, value), np.where(accepted, new_bend, bend)
        # After an overshoot, go to where the slope along the direction would vanish if it were linear.
        ratio = slope / np.where(new_slope > slope, slope - new_slope, slope)
        step = np.where(accepted, 1.0, step * np.clip(np.abs(ratio), 0.1, 0.5))
    return solution, final_value, final_norm, iterations, converged


def _descent(
    objectives: _Objectives, gradient: FloatArray, bend: FloatArray, memory: deque[_Pair]
) -> tuple[FloatArray, FloatArray]:
    """Return directions -H g (A, m) and slopes g·direction < 0 (A,), H the two-loop L-BFGS matrix."""
    vector = gradient.copy()
    weights = []
    for pair in reversed(memory):
        weights.append(pair.inverse * _dot(pair.move, vector))
        vector -= weights[-1][:, np.newaxis] * pair.change
    vector = objectives.precondition(vector, bend)
    if memory:
        # Scale the initial matrix H₀ by move·change / change·H₀·change, its size along the last step.
        last = memory[-1]
        size = _dot(last.change, objectives.precondition(last.change, bend)) * last.inverse
        vector *= np.where(size > 0, 1 / np.where(size > 0, size, 1.0), 1.0)[:, np.newaxis]
    for pair, weight in zip(memory, reversed(weights), strict=True):
        vector += (weight - pair.inverse * _dot(pair.change, vector))[:, np.newaxis] * pair.move
    slope = -_dot(gradient, vector)
    uphill = slope >= 0
    if uphill.any():
        # H is positive definite, so this is rounding: go down without the memory.
        vector[uphill] = objectives.precondition(gradient, bend)[uphill]
        slope = -_dot(gradient, vector)
    return -vector, slope


def _dot(left: FloatArray, right: FloatArray) -> FloatArray:
    """Row-wise scalar products of (A, m) and (A, m)."""
    return np.asarray(np.einsum("am,am->a", left, right))


def _initial_points(data: StandardisedData, num: int, start: tuple[FloatArray, FloatArray] | None) -> FloatArray:
    """Return `start` as points, or zero coefficients with the classes' centred log-priors; shape (P, m)."""
    if start is not None:
        return _joined(*(np.asarray(array, dtype=np.float64) for array in start))
    counts = np.bincount(data.labels, minlength=data.num_classes)
    log_priors = np.log(np.maximum(counts, 1) / len(data.labels))
    if data.num_classes == 2:
        intercepts = np.array([log_priors[1] - log_priors[0]])
    else:
        # Softmax does not see a number added to all intercepts; gradients keep their sum, so start, and end, at zero.
        intercepts = log_priors - log_priors.mean()
    zeros = np.zeros((num, data.num_logits, data.matrix.shape[1]))
    return _joined(zeros, np.broadcast_to(intercepts, (num, data.num_logits)))


def _joined(coefficients: FloatArray, intercepts: FloatArray) -> FloatArray:
    """Return (A, K' d + K') from (A, K', d) and (A, K')."""
    return np.concatenate([coefficients.reshape(len(coefficients), -1), intercepts], axis=1)


def _split(points: NDArray[Any], num_logits: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inverse of `_joined`; views."""
    split = points.shape[1] - num_logits
    return points[:, :split].reshape(len(points), num_logits, -1), points[:, split:]


def _folded(
    data: StandardisedData, coefficients: FloatArray, intercepts: FloatArray, left_out: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Coefficients and intercepts that act on `data.matrix`, in its dtype: stretch ∘ w and b + shift·w."""
    weights = coefficients * data.stretch[left_out][:, np.newaxis]
    offsets = intercepts + np.einsum("akd,ad->ak", coefficients, data.shift[left_out])
    return weights.astype(data.matrix.dtype), offsets.astype(data.matrix.dtype)


def _logits(block: FloatArray, weights: FloatArray, offsets: FloatArray) -> FloatArray:
    """Return W x + b of shape (A, K', rows): rows last, so that sums over classes run along contiguous memory."""
    logits = (weights.reshape(-1, weights.shape[2]) @ block.T).reshape(*offsets.shape, -1)
    logits += offsets[:, :, np.newaxis]
    return logits


def _part_blocks(data: StandardisedData, columns: int) -> Iterator[tuple[int, slice]]:
    """Yield all rows as (part, slice), no slice across parts, each with at most about `_BLOCK_BYTES` of logits."""
    for part in range(len(data.bounds) - 1):
        for rows in _blocks(int(data.bounds[part]), int(data.bounds[part + 1]), columns * data.matrix.itemsize):
            yield part, rows


def _blocks(start: int, stop: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of start..stop of about `_BLOCK_BYTES`, between 128 and 4096 rows."""
    rows = min(max(_BLOCK_BYTES // max(row_bytes, 1), 128), 4096)
    for first in range(start, stop, rows):
        yield slice(first, min(first + rows, stop))


def _moments(features: FloatArray, rows: IntArray) -> Moments:
    """Moments of some rows, in float64 whatever the dtype."""
    blocks = []
    for chosen in _blocks(0, len(rows), features.shape[1] * 8):
        block = features[rows[chosen]].astype(np.float64)
        mean = block.mean(axis=0)
        low, high = block.min(axis=0), block.max(axis=0)
        block -= mean
        blocks.append(Moments(len(block), mean, np.einsum("ij,ij->j", block, block), low, high))
    return _merged(blocks)


def _merged(parts: list[Moments]) -> Moments:
    """Moments of the union, by the update of Chan, Golub & LeVeque (1983), a sum of squares without cancellation."""
    total = parts[0]
    for part in parts[1:]:
        num_rows = total.num_rows + part.num_rows
        gap = part.mean - total.mean
        total = Moments(
            num_rows=num_rows,
            mean=total.mean + gap * (part.num_rows / num_rows),
            squares=total.squares + part.squares + np.square(gap) * (total.num_rows * part.num_rows / num_rows),
            low=np.minimum(total.low, part.low),
            high=np.maximum(total.high, part.high),
        )
    return total


def _location_and_scale(moments: Moments, resolution: float) -> tuple[FloatArray, FloatArray, NDArray[np.bool_]]:
    """Return mean, scale and which columns are constant (scale 1)."""
    magnitude = np.maximum(np.abs(moments.low), np.abs(moments.high))
    constant = moments.high - moments.low <= resolution * magnitude
    return moments.mean, np.where(constant, 1.0, np.sqrt(moments.squares / moments.num_rows)), constant
