"""Many L2 logistic regressions on one data matrix, solved together.

A cross-validation grid asks for the same regression once per fold f and penalty C. Written per training example, it is

    minimise over (w, b):  1/n_f Σ_{i ∉ f} loss(W x̃_i + b, y_i) + 1/(2 C n_f) ‖W‖²,      x̃ = (x - mean_f) / scale_f,

the objective of scikit-learn's `LogisticRegression` divided by C n_f: loss is the cross-entropy of one logit (K = 2) or
of a softmax (K > 2), b is not penalised, and mean and scale come from the n_f training rows only. Four steps make it
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
4. Few rows in many dimensions (`rotate`). The minimiser lies in the span of the fold's training rows, since any part of
   w outside it costs penalty and changes no logit. With X̃_f = U S Vᵀ and w = V u, the rows become U S, of n_f
   dimensions, and ‖w‖ = ‖u‖: the same problem, exactly, and in these coordinates the preconditioner is diagonal.
5. Columns of very unequal sizes (`renew`). Where a weak penalty lets columns of a millionth of the variance count, rows
   near the boundary bend the loss and all others do not, so that the mean curvature of step 2 is a poor model. There the
   preconditioner is renewed every few evaluations as the Hessian at the present points, for more than two classes its
   block of each class. One Hessian costs what d / 2 evaluations cost, and saves more: at C >= 0.1 on p_f of SST-2 a fit took
   40 to 230 evaluations instead of 140 to more than 1,000.

Every problem starts from zero coefficients, not from a solved neighbour. A start from a fit on all rows, or from another
seed's folds, leaks: where the features separate the rows and the penalty is weak, the tolerance is met long before the
start is forgotten (2,000 rows of 768 dimensions at C = 1e3: held-out accuracy 1.00 instead of 0.48). A start from the
next smaller C is clean, but then the values of C take turns, and what is saved in evaluations, a quarter, is lost in
smaller products.

Everything runs on the device of the data; what comes back is numpy. Sums over rows are float64 on every device; products
are taken in the dtype of the matrix or in float64, see `solve`.

Known gap: the basis is dense. Sparse features of many dimensions need another preconditioner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = [
    "RotatedData",
    "Scaling",
    "Solutions",
    "Spectrum",
    "StandardisedData",
    "count_correct",
    "full_precision",
    "rotate",
    "solve",
    "spectrum",
    "standardise",
    "to_feature_units",
]

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]

Scaling = Literal["columns", "common"]
"""What features are divided by: each column by its own standard deviation, or all by one number."""

NO_PART = -1
"""`left_out` of a problem that trains on every row."""

_MEMORY = 10
"""Pairs kept by L-BFGS, the usual choice; with this preconditioner more did not save evaluations."""

_BLOCK_BYTES = 2**23
"""Aim for the logits of one block of rows: they are passed over several times and should stay in the cache."""

_HISTORY_BYTES = 2**30
"""Limit on the L-BFGS memory of the problems that are solved together, and on twice their Hessians."""

_RENEWAL = 40
"""Evaluations between two renewals of the preconditioner."""

_EXACT_RANK = 1024
"""Largest min(n, d) for which the whole eigenbasis is computed, a fraction of a second; its cost is cubic."""

_PARTIAL_RANK = 256
"""Leading eigenvectors computed beyond that; the rest of the spectrum shares one eigenvalue. On features with
eigenvalues 1/j (d = 2048) this took 18 % more evaluations than the whole basis, for a quarter of its time."""


class Moments(NamedTuple):
    """What standardisation needs to know about the columns of some rows; each tensor has shape (d,), float64.

    Attributes:
        num_rows: Number of rows.
        mean: Column means.
        squares: Σ (x - mean)².
        low: Column minima.
        high: Column maxima.
    """

    num_rows: int
    mean: Tensor
    squares: Tensor
    low: Tensor
    high: Tensor


class _Segment(NamedTuple):
    """Rows that some of the problems train on, or are scored on.

    Attributes:
        matrix: Shape (rows, width), or (P, rows, width) where each problem has rows of its own.
        labels: Ascending, shape (rows,).
        problems: Indices of the problems, shape (P,).
        mask: What to add to the logits, shape (P, K', rows): ±∞ takes a row out. None: nothing.
    """

    matrix: Tensor
    labels: IntArray
    problems: IntArray
    mask: Tensor | None = None


@dataclass(frozen=True)
class StandardisedData:
    """A feature matrix with its parts (the folds), ready for `solve`.

    Attributes:
        matrix: Features standardised by the statistics of all rows, shape (n, d), float32 or float64. Rows are sorted
            by part and, within a part, by label. Constant columns are zero.
        labels: Labels in the order of `matrix`, shape (n,).
        num_classes: K.
        bounds: Part q is rows `bounds[q]` to `bounds[q + 1]` of `matrix`; shape (Q + 1,).
        mean: Column means over all rows, in feature units, float64, shape (d,).
        scale: What all rows were divided by, float64, shape (d,); see `standardise`.
        stretch: Row q turns `matrix` into features standardised without part q: stretch ∘ x + shift. The last row,
            which `NO_PART` indexes, leaves nothing out. Zero for a column that only part q makes vary. float64, shape
            (Q + 1, d).
        shift: See `stretch`.
    """

    matrix: Tensor
    labels: IntArray
    num_classes: int
    bounds: IntArray
    mean: Tensor
    scale: Tensor
    stretch: Tensor
    shift: Tensor

    @property
    def num_logits(self) -> int:
        """1 for two classes, else K."""
        return 1 if self.num_classes == 2 else self.num_classes

    @property
    def num_parts(self) -> int:
        """Q; 1 where no problem leaves anything out."""
        return len(self.bounds) - 1

    @property
    def width(self) -> int:
        """Dimensions of the coefficients that `solve` works on."""
        return self.matrix.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.matrix.device

    def num_training_rows(self, left_out: IntArray) -> NDArray[np.float64]:
        """Return n minus the size of the part left out, for each problem."""
        sizes = np.append(np.diff(self.bounds), 0)
        return (len(self.labels) - sizes[left_out]).astype(np.float64)

    def segments(self, left_out: IntArray) -> Iterator[_Segment]:
        """Yield the training rows of the problems."""
        for part, (start, stop) in enumerate(pairwise(self.bounds.tolist())):
            yield _Segment(self.matrix[start:stop], self.labels[start:stop], np.flatnonzero(left_out != part))

    def scored_segments(self, left_out: IntArray) -> Iterator[_Segment]:
        """Yield the rows of each problem's part, all rows for `NO_PART`."""
        for part, (start, stop) in enumerate(pairwise(self.bounds.tolist())):
            scored = np.flatnonzero((left_out == part) | (left_out == NO_PART))
            yield _Segment(self.matrix[start:stop], self.labels[start:stop], scored)

    def lowered(self, coefficients: Tensor, left_out: IntArray) -> Tensor:
        """Return what `solve` works on, shape (P, K', width), for coefficients (P, K', d)."""
        return coefficients

    def lifted(self, coefficients: Tensor, left_out: IntArray) -> Tensor:
        """Return coefficients (P, K', d) for those that `solve` works on, shape (P, K', width)."""
        return coefficients


@dataclass(frozen=True)
class RotatedData:
    """The same problems in as many dimensions as there are rows; made by `rotate`.

    A view is the data as the problems that leave out the same part see it. Views are in the order of the parts; the last
    one, which `NO_PART` indexes, leaves nothing out.

    Attributes:
        source: What was rotated.
        matrix: All rows in each view's coordinates, float64, shape (views, n, width). Rows are sorted by label.
        labels: Labels in that order, shape (n,).
        part: Parts in that order, shape (n,).
        mask: For each view, ±∞ at the logits of the rows it leaves out, such that their loss is 0; shape (views, K', n).
        basis: Each view's orthonormal basis in its columns, shape (views, d, width); past its rank, columns are zero.
        eigenvalues: Of X̃ᵀX̃ / n_f over each view's training rows, along its coordinates; shape (views, width).
    """

    source: StandardisedData
    matrix: Tensor
    labels: IntArray
    part: IntArray
    mask: Tensor
    basis: Tensor
    eigenvalues: Tensor

    stretch = None  # Each view is standardised by its own rows already.
    shift = None

    @property
    def num_classes(self) -> int:
        """K."""
        return self.source.num_classes

    @property
    def num_logits(self) -> int:
        """1 for two classes, else K."""
        return self.source.num_logits

    @property
    def width(self) -> int:
        """See `StandardisedData`."""
        return self.matrix.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix."""
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.matrix.device

    def num_training_rows(self, left_out: IntArray) -> NDArray[np.float64]:
        """See `StandardisedData`."""
        return self.source.num_training_rows(left_out)

    def segments(self, left_out: IntArray) -> Iterator[_Segment]:
        """See `StandardisedData`."""
        views = self._views(left_out)
        yield _Segment(self.matrix[views], self.labels, np.arange(len(left_out)), self.mask[views])

    def scored_segments(self, left_out: IntArray) -> Iterator[_Segment]:
        """See `StandardisedData`."""
        for part in np.unique(left_out):
            problems = np.flatnonzero(left_out == part)
            scored = np.arange(len(self.part)) if part == NO_PART else np.flatnonzero(self.part == part)
            yield _Segment(self.matrix[part][_indices(scored, self.device)], self.labels[scored], problems)

    def lowered(self, coefficients: Tensor, left_out: IntArray) -> Tensor:
        """See `StandardisedData`; what lies outside the span of the training rows is dropped."""
        # One problem at a time: the bases of all would be P d n numbers.
        return torch.stack([rows @ self.basis[part] for rows, part in zip(coefficients, left_out, strict=True)])

    def lifted(self, coefficients: Tensor, left_out: IntArray) -> Tensor:
        """See `StandardisedData`."""
        return torch.stack([rows @ self.basis[part].T for rows, part in zip(coefficients, left_out, strict=True)])

    def _views(self, left_out: IntArray) -> Tensor:
        return _indices(left_out % len(self.matrix), self.device)


Data = StandardisedData | RotatedData


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues and eigenvectors of XᵀX / n, exact or the leading ones.

    Attributes:
        values: Eigenvalues, >= 0, float64, shape (r,); for `RotatedData`, a row for each view.
        basis: Orthonormal eigenvectors in its columns, shape (d, r). None: the identity.
        rest: Eigenvalue assumed for every direction outside the basis.
    """

    values: Tensor
    basis: Tensor | None
    rest: float


@dataclass(frozen=True)
class Solutions:
    """Solutions of P problems.

    Attributes:
        coefficients: Shape (P, K', d), for features standardised by each problem's own training rows; K' = 1 or K
            logits.
        intercepts: Shape (P, K').
        objective: Objective per training example, in nats, shape (P,).
        gradient_norm: Largest absolute entry of its gradient, shape (P,); for `RotatedData`, in those coordinates.
        iterations: Evaluations of the objective, shape (P,).
        converged: Whether `gradient_norm` reached the tolerance, shape (P,).
    """

    coefficients: NDArray[np.float64]
    intercepts: NDArray[np.float64]
    objective: NDArray[np.float64]
    gradient_norm: NDArray[np.float64]
    iterations: IntArray
    converged: NDArray[np.bool_]


def standardise(
    features: FloatArray,
    labels: IntArray,
    part: IntArray,
    *,
    num_classes: int,
    dtype: torch.dtype,
    device: torch.device,
    scaling: Scaling = "columns",
    total_variance: float | None = None,
) -> StandardisedData:
    """Standardise features by all rows, and note what it takes to standardise them without any one part.

    Statistics are float64 whatever the dtypes; rows are read in blocks, so the only large tensor made is `matrix`. A
    column counts as constant where it spans no more than four roundings of the features' dtype.

    Args:
        features: Finite, shape (n, d), float32 or float64.
        labels: In 0..K-1, shape (n,).
        part: Part of each row, 0..Q-1, shape (n,). One part only means that no problem leaves anything out.
        num_classes: K.
        dtype: torch.float32 or torch.float64, of `matrix`.
        device: Of all tensors made.
        scaling: "columns" divides each column by its standard deviation (divisor n), so that their variances add up to
            d. "common" divides all columns by one number, √(Σ_j variance_j / total_variance), so that they keep their
            sizes relative to each other. Where nothing varies, the divisor is 1.
        total_variance: What the variances add up to under "common", > 0. None: d, so that a value of C weighs as much
            against the loss as under "columns".
    """
    order = np.lexsort((labels, part))
    num_parts = int(part.max()) + 1
    bounds = np.searchsorted(part[order], np.arange(num_parts + 1))
    parts = [_moments(features, order[start:stop], device) for start, stop in pairwise(bounds)]
    resolution = 4 * float(np.finfo(features.dtype).eps)
    total = float(features.shape[1]) if total_variance is None else total_variance
    mean, scale, constant = _location_and_scale(_merged(parts), resolution, scaling, total)

    stretch = torch.ones((num_parts + 1, features.shape[1]), dtype=torch.float64, device=device)
    shift = torch.zeros_like(stretch)
    for left_out in range(num_parts if num_parts > 1 else 0):
        kept_mean, kept_scale, kept_constant = _location_and_scale(
            _merged(parts[:left_out] + parts[left_out + 1 :]), resolution, scaling, total
        )
        stretch[left_out] = (scale / kept_scale).masked_fill(kept_constant, 0.0)
        shift[left_out] = ((mean - kept_mean) / kept_scale).masked_fill(kept_constant, 0.0)

    matrix = torch.empty(features.shape, dtype=dtype, device=device)
    for rows in _blocks(0, len(matrix), features.shape[1] * 8, device):
        matrix[rows] = ((_upload(features, order[rows], device) - mean) / scale).masked_fill(constant, 0.0)
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


def rotate(data: StandardisedData) -> RotatedData:
    """Turn each view of the data into its span: n dimensions instead of d, for n < d; see step 4 of the module.

    In float64. The cost is one SVD for each part and one for all rows, about n² d each.

    Args:
        data: Standardised features with n < d.
    """
    num_rows, dim = data.matrix.shape
    order = np.argsort(data.labels, kind="stable")
    labels, part = data.labels[order], np.repeat(np.arange(data.num_parts), np.diff(data.bounds))[order]
    rows = data.matrix[_indices(order, data.device)].to(torch.float64)
    parts = [*range(data.num_parts), NO_PART] if data.num_parts > 1 else [NO_PART]

    matrix = rows.new_empty((len(parts), num_rows, num_rows))
    mask = rows.new_zeros((len(parts), data.num_logits, num_rows))
    basis = rows.new_zeros((len(parts), dim, num_rows))
    eigenvalues = rows.new_zeros((len(parts), num_rows))
    for view, left_out in enumerate(parts):
        kept = np.flatnonzero(part != left_out)
        standardised = rows * data.stretch[left_out] + data.shift[left_out]
        _, singular, right = torch.linalg.svd(standardised[_indices(kept, data.device)], full_matrices=False)
        basis[view, :, : len(kept)] = right.T
        matrix[view] = standardised @ basis[view]
        eigenvalues[view, : len(kept)] = singular.square() / len(kept)
        mask[view] = torch.from_numpy(_certainty(labels, part == left_out, data.num_classes)).to(data.device)
    return RotatedData(data, matrix, labels, part, mask, basis, eigenvalues)


def _certainty(labels: IntArray, chosen: NDArray[np.bool_], num_classes: int) -> NDArray[np.float64]:
    """Logits (K', n) that put the chosen rows beyond doubt in their own class, where loss and gradient are 0."""
    if num_classes == 2:
        infinite = np.where(labels == 1, np.inf, -np.inf)[np.newaxis]
    else:
        infinite = np.where(labels == np.arange(num_classes)[:, np.newaxis], 0.0, -np.inf)
    return np.where(chosen, infinite, 0.0)


def spectrum(data: Data, *, exact_rank: int = _EXACT_RANK, partial_rank: int = _PARTIAL_RANK) -> Spectrum:
    """Return the eigendecomposition of XᵀX / n for X of shape (n, d), from the smaller of XᵀX and XXᵀ.

    Where min(n, d) exceeds `exact_rank`, only the `partial_rank` leading eigenvectors are computed, by randomised
    subspace iteration with a fixed seed (Halko, Martinsson & Tropp 2011), and the rest share their mean eigenvalue.

    Args:
        data: X is its matrix; of `RotatedData`, each view's training rows.
        exact_rank: Largest min(n, d) for the whole basis.
        partial_rank: Eigenvectors beyond that, < `exact_rank`.
    """
    if isinstance(data, RotatedData):
        return Spectrum(values=data.eigenvalues, basis=None, rest=0.0)
    matrix = data.matrix
    num_rows, dim = matrix.shape
    with full_precision():
        if min(num_rows, dim) > exact_rank:
            values, basis = _leading_eigenvectors(matrix, partial_rank)
            # tr XᵀX / n = Σ x² / n, block by block without a float64 copy of the matrix.
            trace = (
                sum(float(_square_sum(matrix[rows])) for rows in _blocks(0, num_rows, dim * 8, matrix.device))
                / num_rows
            )
            rest = max(trace - float(values.sum()), 0.0) / (min(num_rows, dim) - partial_rank)
            return Spectrum(values=values, basis=basis, rest=rest)
        if dim <= num_rows:
            values, basis = _eigh(matrix.T @ matrix / num_rows)
            return Spectrum(values=values.clamp(min=0.0), basis=basis, rest=0.0)
        # XXᵀ = U Λ Uᵀ gives XᵀX = V Λ Vᵀ with V = Xᵀ U Λ^-½. Directions of rounding size are left to `rest`, which is
        # not 0 but the smallest eigenvalue: a fold's own standardisation turns its rows a little out of this space.
        values, left = _eigh(matrix @ matrix.T / num_rows)
        kept = values > values[-1] * torch.finfo(matrix.dtype).eps * num_rows
        values, left = values[kept], left[:, kept]
        basis = matrix.T @ (left / (values * num_rows).sqrt().to(matrix.dtype))
        return Spectrum(values=values, basis=basis, rest=float(values[0]) if len(values) else 0.0)


def solve(
    data: Data,
    curvature: Spectrum,
    left_out: IntArray,
    strengths: FloatArray,
    *,
    tolerance: float,
    max_iterations: int,
    dtype: torch.dtype | None = None,
    start: tuple[FloatArray, FloatArray] | None = None,
    renew: bool = False,
) -> Solutions:
    """Solve one regression for each pair of a part left out and a C.

    Args:
        data: The matrix.
        curvature: Spectrum of the data; it decides the speed only, never the result.
        left_out: The part that each problem does not train on, or `NO_PART`; shape (P,).
        strengths: C of each problem, > 0, shape (P,).
        tolerance: Stop where the largest absolute entry of the gradient, per training example, is at most this. In
            float32, what can be reached is about 1e-6.
        max_iterations: Stop a problem unconverged after so many evaluations.
        dtype: Of the products with the matrix. float64 with a float32 matrix converts it block by block: the solution
            is exact for the rounded matrix, in half the memory. None: the matrix's own.
        start: Coefficients (P, K', d) and intercepts (P, K') to start from. None: zero coefficients, class log-priors.
        renew: Whether the preconditioner becomes the Hessian where a problem takes long; see step 5 of the module. It
            decides the speed only. Of `RotatedData`, nothing is renewed.
    """
    size = data.num_logits * (data.width + 1)
    renew = renew and isinstance(data, StandardisedData)
    per_problem = size * (2 * _MEMORY + 6) + (2 * size * (data.width + 1) if renew else 0)
    group = max(1, _HISTORY_BYTES // (8 * per_problem))
    points = _initial_points(data, left_out, start)
    # Problems of like C take alike long, so they share a group.
    order = np.argsort(strengths, kind="stable")
    objective, gradient_norm = np.empty(len(order)), np.empty(len(order))
    iterations, converged = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=bool)
    with full_precision():
        for first in range(0, len(order), group):
            chosen = order[first : first + group]
            index = _indices(chosen, data.device)
            points[index], objective[chosen], gradient_norm[chosen], iterations[chosen], converged[chosen] = (
                _lockstep_lbfgs(
                    _Objectives(data, curvature, left_out[chosen], strengths[chosen], dtype or data.dtype),
                    points[index],
                    tolerance=tolerance,
                    max_iterations=max_iterations,
                    renewal=_RENEWAL if renew else None,
                )
            )
        coefficients, intercepts = _split(points, data.num_logits)
        coefficients = data.lifted(coefficients, left_out)
    return Solutions(
        coefficients.cpu().numpy(), intercepts.cpu().numpy(), objective, gradient_norm, iterations, converged
    )


def count_correct(
    data: Data, solutions: Solutions, left_out: IntArray, *, dtype: torch.dtype | None = None
) -> IntArray:
    """Count the rows of each problem's left-out part (of all rows for `NO_PART`) that it classifies correctly.

    `dtype` is that of the products, as for `solve`.

    Returns:
        Shape (P,). A tie goes to the class of lower number.
    """
    dtype = dtype or data.dtype
    with full_precision():
        points = _initial_points(data, left_out, (solutions.coefficients, solutions.intercepts))
        coefficients, intercepts = _split(points, data.num_logits)
        weights, offsets = _folded(coefficients, intercepts, *_views_of(data, left_out))
        weights, offsets = weights.to(dtype), offsets.to(dtype)
        correct = torch.zeros(len(left_out), dtype=torch.int64, device=data.device)
        for segment in data.scored_segments(left_out):
            if not segment.problems.size:
                continue
            chosen = _indices(segment.problems, data.device)
            labels = _indices(segment.labels, data.device)
            row_bytes = len(segment.problems) * data.num_logits * weights.itemsize
            for rows in _blocks(0, len(segment.labels), row_bytes, data.device):
                logits = _logits(segment.matrix[rows].to(dtype), weights[chosen], offsets[chosen])
                predicted = logits[:, 0] > 0 if data.num_classes == 2 else logits.argmax(dim=1)
                correct[chosen] += (predicted == labels[rows]).sum(dim=1)
    return correct.cpu().numpy()


def to_feature_units(
    data: Data, coefficients: NDArray[np.float64], intercepts: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Turn a solution that left nothing out into one for the features as they came.

    w·(x - mean)/scale + b = (w/scale)·x + (b - (w/scale)·mean).

    Args:
        coefficients: Shape (K', d).
        intercepts: Shape (K',).
    """
    source = data.source if isinstance(data, RotatedData) else data
    raw = coefficients / source.scale.cpu().numpy()
    return raw, intercepts - raw @ source.mean.cpu().numpy()


class _Objectives:
    """Objectives, gradients and preconditioner of some problems; points are rows (W flattened, then b), float64."""

    def __init__(
        self, data: Data, curvature: Spectrum, left_out: IntArray, strengths: FloatArray, dtype: torch.dtype
    ) -> None:
        self.data = data
        self.curvature = curvature
        self.dtype = dtype
        self._factors: Tensor | None = None
        self._select(left_out, np.asarray(strengths, dtype=np.float64))

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Forget the problems that have left."""
        self._select(self.left_out[kept], self.strengths[kept])
        if self._factors is not None:
            self._factors = self._factors[_indices(np.flatnonzero(kept), self._factors.device)]

    def _select(self, left_out: IntArray, strengths: NDArray[np.float64]) -> None:
        data = self.data
        self.left_out, self.strengths = left_out, strengths
        num_rows = data.num_training_rows(left_out)
        self.num_rows = torch.from_numpy(num_rows).to(data.device)
        self.ridge = torch.from_numpy(1.0 / (strengths * num_rows)).to(data.device)
        self.stretch, self.shift = _views_of(data, left_out)
        # Eigenvalues (r,) for all, or a row for each problem.
        values = self.curvature.values
        self.values = values if values.ndim == 1 else values[_indices(left_out % len(values), data.device)]
        self.segments: list[tuple[_Segment, Tensor | slice]] = [
            # Where all problems train on the rows, a slice saves a copy of their weights.
            (
                segment,
                slice(None) if len(segment.problems) == len(left_out) else _indices(segment.problems, data.device),
            )
            for segment in data.segments(left_out)
            if segment.problems.size
        ]

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return objectives (A,), gradients (A, m) and mean curvatures of the loss (A,), float64."""
        num_logits = self.data.num_logits
        link, classes = _LINKS[self.data.num_classes > 2], np.arange(self.data.num_classes + 1)
        coefficients, intercepts = _split(points, num_logits)
        weights, offsets = _folded(coefficients, intercepts, self.stretch, self.shift)
        weights, offsets = weights.to(self.dtype), offsets.to(self.dtype)
        loss, bend = torch.zeros_like(self.num_rows), torch.zeros_like(self.num_rows)
        products, sums = torch.zeros_like(coefficients), torch.zeros_like(intercepts)
        for segment, chosen in self.segments:
            row_bytes = len(segment.problems) * num_logits * weights.itemsize
            if segment.matrix.dtype != self.dtype:
                # A converted block should stay in the cache beside the matrix and the logits.
                row_bytes = max(row_bytes, 2 * segment.matrix.shape[-1] * weights.itemsize)
            for rows in _blocks(0, len(segment.labels), row_bytes, self.data.device):
                block = segment.matrix[..., rows, :].to(self.dtype)
                logits = _logits(block, weights[chosen], offsets[chosen])
                if segment.mask is not None:
                    logits += segment.mask[..., rows]
                starts = np.searchsorted(segment.labels[rows], classes).tolist()
                residuals, block_loss, block_bend = link(logits, starts)
                loss[chosen] += block_loss
                bend[chosen] += block_bend
                sums[chosen] += residuals.sum(dim=2, dtype=torch.float64)
                products[chosen] += residuals @ block
        if self.stretch is not None and self.shift is not None:
            # Chain rule of logits = (stretch ∘ w)·x + shift·w + b.
            products *= self.stretch[:, None]
            products += sums[:, :, None] * self.shift[:, None]
        products /= self.num_rows[:, None, None]
        products += coefficients * self.ridge[:, None, None]
        penalty = 0.5 * self.ridge * coefficients.square().sum(dim=(1, 2))
        return (
            loss / self.num_rows + penalty,
            _joined(products, sums / self.num_rows[:, None]),
            bend / self.num_rows,
        )

    def renew(self, points: Tensor) -> None:
        """From now on, precondition with the Hessians at the points (A, m), of each class by itself.

        They are of the features as they are in the matrix, whose standardisation differs a little from the problems' own.
        """
        self._factors = None
        data, width = self.data, self.data.width
        coefficients, intercepts = _split(points, data.num_logits)
        weights, offsets = _folded(coefficients, intercepts, self.stretch, self.shift)
        weights, offsets = weights.to(data.dtype), offsets.to(data.dtype)
        hessians = self.ridge.new_zeros((len(points), data.num_logits, width + 1, width + 1))
        for segment, chosen in self.segments:
            problems = segment.problems.tolist()
            row_bytes = len(problems) * data.num_logits * weights.itemsize
            for rows in _blocks(0, len(segment.labels), row_bytes, data.device):
                block = segment.matrix[rows]
                logits = _logits(block, weights[chosen], offsets[chosen])
                probabilities = logits.sigmoid_() if data.num_classes == 2 else logits.softmax(dim=1)
                for problem, bends in zip(problems, probabilities - probabilities.square(), strict=True):
                    for hessian, bend in zip(hessians[problem], bends, strict=True):
                        weighted = block * bend[:, None]
                        hessian[:-1, :-1] += weighted.T @ block
                        hessian[-1, :-1] += weighted.sum(dim=0, dtype=torch.float64)
                        hessian[-1, -1] += bend.sum(dtype=torch.float64)
        hessians /= self.num_rows[:, None, None, None]
        # Of perfectly separated examples nothing is left but the penalty, and in the intercept nothing at all.
        diagonal = hessians.diagonal(dim1=2, dim2=3)
        diagonal[..., :-1] += self.ridge[:, None, None]
        diagonal[..., -1] += 1e-6
        # Any factor gives a definite preconditioner, so that float32 will do for it, and takes half the time of a solve.
        factors = torch.empty_like(hessians, dtype=torch.float32)
        failed = False
        for hessian, factor in zip(hessians.flatten(0, 1), factors.flatten(0, 1), strict=True):
            found, info = torch.linalg.cholesky_ex(hessian)  # of the lower triangle
            factor.copy_(found)
            failed |= bool(info)
        # float32 products may leave a Hessian that is not definite; then the spectrum serves once more.
        self._factors = None if failed else factors

    def precondition(self, vectors: Tensor, bend: Tensor) -> Tensor:
        """Multiply by the inverse of the Hessian, or of what stands for it; shapes (A, m), (A,)."""
        if self._factors is None:
            return self._by_spectrum(vectors, bend)
        coefficients, intercepts = _split(vectors, self.data.num_logits)
        joined = torch.cat([coefficients, intercepts[:, :, None]], dim=2)
        # A gradient near the minimum is too small for float32 to square.
        size = joined.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1e-300)
        scaled = (joined / size).to(self._factors.dtype)[..., None]
        # Not `cholesky_solve`, which copies the factors for each vector and takes five times as long on a CPU.
        halfway = torch.linalg.solve_triangular(self._factors, scaled, upper=False)
        solved = torch.linalg.solve_triangular(self._factors.mT, halfway, upper=True)[..., 0].to(joined.dtype) * size
        if self.data.num_classes > 2:
            # Softmax does not see what all classes have in common: there is but the penalty, and no gradient.
            solved -= solved.mean(dim=1, keepdim=True)
        return _joined(solved[..., :-1], solved[..., -1])

    def _by_spectrum(self, vectors: Tensor, bend: Tensor) -> Tensor:
        """Multiply by (bend·XᵀX/n + ridge·I)⁻¹ on coefficients and by 1/bend on intercepts; shapes (A, m), (A,)."""
        basis = self.curvature.basis
        coefficients, intercepts = _split(vectors, self.data.num_logits)
        inside = 1.0 / (bend[:, None] * self.values + self.ridge[:, None])
        if basis is None:
            return _joined(inside[:, None] * coefficients, intercepts / bend[:, None])
        if basis.shape[1] == basis.shape[0]:
            outside = torch.zeros_like(bend)
        else:
            outside = 1.0 / (bend * self.curvature.rest + self.ridge)
        rotated = (coefficients.to(basis.dtype) @ basis) * (inside - outside[:, None])[:, None]
        result = rotated.to(basis.dtype) @ basis.T
        return _joined(result + outside[:, None, None] * coefficients, intercepts / bend[:, None])


def _binary_link(logits: Tensor, starts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Residuals σ(z) - y (A, 1, rows), summed loss log(1 + eᶻ) - y z (A,), summed curvature σ(z) (1 - σ(z)) (A,).

    Labels are sorted: class c is the rows from `starts[c]` to `starts[c + 1]`. `logits` is overwritten.
    """
    ones = starts[1]
    # t = z for class 0 and -z for class 1 makes the loss log(1 + eᵗ) and the residual ±σ(t), without cancellation.
    logits[:, :, ones:].neg_()
    # Past 40 nats softplus(t) = t to the last digit of float64; the default threshold is not exact.
    loss = functional.softplus(logits, threshold=40.0).sum(dim=(1, 2), dtype=torch.float64)
    residuals = logits.sigmoid_()
    bend = (residuals - residuals.square()).sum(dim=(1, 2), dtype=torch.float64)
    residuals[:, :, ones:].neg_()
    return residuals, loss, bend


def _softmax_link(logits: Tensor, starts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Residuals p - onehot (A, K, rows), summed loss log Σ e^z - z_gold (A,), summed curvature (A,).

    The curvature of one example, diag(p) - p pᵀ, has trace 1 - Σ p² and rank K - 1; their ratio stands for it. Labels
    are sorted as in `_binary_link`.
    """
    log_probabilities = functional.log_softmax(logits, dim=1)
    classes = [(label, start, stop) for label, (start, stop) in enumerate(pairwise(starts)) if stop > start]
    loss = -sum(log_probabilities[:, c, start:stop].sum(dim=1, dtype=torch.float64) for c, start, stop in classes)
    residuals = log_probabilities.exp_()
    purity = residuals.square().sum(dim=(1, 2), dtype=torch.float64)
    for label, start, stop in classes:
        residuals[:, label, start:stop] -= 1
    return residuals, loss, (logits.shape[2] - purity) / (logits.shape[1] - 1)


_LINKS = {False: _binary_link, True: _softmax_link}


class _Pair(NamedTuple):
    """One step of each problem, for the L-BFGS memory.

    Attributes:
        move: Change of the point, shape (A, m).
        change: Change of the gradient, shape (A, m).
        inverse: 1 / (move·change), shape (A,); zero marks a problem that took no step.
    """

    move: Tensor
    change: Tensor
    inverse: Tensor


def _lockstep_lbfgs(
    objectives: _Objectives, points: Tensor, *, tolerance: float, max_iterations: int, renewal: int | None
) -> tuple[Tensor, NDArray[np.float64], NDArray[np.float64], IntArray, NDArray[np.bool_]]:
    """Minimise all objectives from `points` (A, m), and renew the preconditioner every `renewal` evaluations if at all.

    Returns points, then what `Solutions` has beside them, in order.
    """
    num = len(points)
    solution = points.clone()
    final_value, final_norm = np.zeros(num), np.zeros(num)
    iterations, converged = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=bool)
    # A relative change of the objective below this is rounding.
    slack = 10 * torch.finfo(objectives.dtype).eps

    active = np.arange(num)
    memory: deque[_Pair] = deque(maxlen=_MEMORY)
    value, gradient, bend = objectives(points)
    step = torch.ones_like(value)
    for iteration in range(1, max_iterations + 1):
        norm = gradient.abs().amax(dim=1)
        # A step cut to nothing means that rounding leaves no better point: stop, and let `converged` say so.
        finished = (norm <= tolerance) | (step < 1e-8) | (iteration == max_iterations)
        done = finished.cpu().numpy()
        if done.any():
            left = active[done]
            solution[_indices(left, points.device)] = points[finished]
            final_value[left], final_norm[left] = value.cpu().numpy()[done], norm.cpu().numpy()[done]
            iterations[left], converged[left] = iteration, final_norm[left] <= tolerance
            if done.all():
                break
            active, kept = active[~done], ~finished
            points, value, gradient, bend, step = (tensor[kept] for tensor in (points, value, gradient, bend, step))
            memory = deque((_Pair(*(tensor[kept] for tensor in pair)) for pair in memory), maxlen=_MEMORY)
            objectives.keep(~done)

        if renewal and iteration % renewal == 0:
            objectives.renew(points)
        # Perfectly separated examples have no curvature left; the floor keeps the preconditioner finite.
        bend = bend.clamp(min=1e-6)
        direction, slope = _descent(objectives, gradient, bend, memory)
        move = step[:, None] * direction
        new_value, new_gradient, new_bend = objectives(points + move)
        new_slope = _dot(new_gradient, direction)
        accepted = (new_value <= value + 1e-4 * step * slope) | (
            (new_value <= value + slack * value.abs()) & (new_slope <= -0.8 * slope)
        )

        change = new_gradient - gradient
        product = _dot(move, change)
        useful = accepted & (product > 0)
        memory.append(_Pair(move, change, torch.where(useful, 1 / torch.where(useful, product, 1.0), 0.0)))
        points = torch.where(accepted[:, None], points + move, points)
        gradient = torch.where(accepted[:, None], new_gradient, gradient)
        value, bend = torch.where(accepted, new_value, value), torch.where(accepted, new_bend, bend)
        # After an overshoot, go to where the slope along the direction would vanish if it were linear.
        ratio = slope / torch.where(new_slope > slope, slope - new_slope, slope)
        step = torch.where(accepted, 1.0, step * ratio.abs().clamp(0.1, 0.5))
    return solution, final_value, final_norm, iterations, converged


def _descent(objectives: _Objectives, gradient: Tensor, bend: Tensor, memory: deque[_Pair]) -> tuple[Tensor, Tensor]:
    """Return directions -H g (A, m) and slopes g·direction < 0 (A,), H the two-loop L-BFGS matrix."""
    vector = gradient.clone()
    weights = []
    for pair in reversed(memory):
        weights.append(pair.inverse * _dot(pair.move, vector))
        vector.addcmul_(weights[-1][:, None], pair.change, value=-1)
    vector = objectives.precondition(vector, bend)
    if memory:
        # Scale the initial matrix H₀ by move·change / change·H₀·change, its size along the last step.
        last = memory[-1]
        size = _dot(last.change, objectives.precondition(last.change, bend)) * last.inverse
        vector *= torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 1.0)[:, None]
    for pair, weight in zip(memory, reversed(weights), strict=True):
        vector.addcmul_((weight - pair.inverse * _dot(pair.change, vector))[:, None], pair.move)
    slope = -_dot(gradient, vector)
    uphill = slope >= 0
    if uphill.any():
        # H is positive definite, so this is rounding: go down without the memory.
        vector = torch.where(uphill[:, None], objectives.precondition(gradient, bend), vector)
        slope = -_dot(gradient, vector)
    return -vector, slope


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise scalar products of (A, m) and (A, m)."""
    return torch.linalg.vecdot(left, right)


def _initial_points(data: Data, left_out: IntArray, start: tuple[FloatArray, FloatArray] | None) -> Tensor:
    """Return `start` as points, or zero coefficients with the classes' centred log-priors; shape (P, m)."""
    if start is not None:
        coefficients, intercepts = (
            torch.from_numpy(np.asarray(array, dtype=np.float64)).to(data.device) for array in start
        )
        return _joined(data.lowered(coefficients, left_out), intercepts)
    counts = np.bincount(data.labels, minlength=data.num_classes)
    log_priors = np.log(np.maximum(counts, 1) / len(data.labels))
    if data.num_classes == 2:
        intercept = np.array([log_priors[1] - log_priors[0]])
    else:
        # Softmax does not see a number added to all intercepts; gradients keep their sum, so start, and end, at zero.
        intercept = log_priors - log_priors.mean()
    points = torch.zeros((len(left_out), data.num_logits * (data.width + 1)), dtype=torch.float64, device=data.device)
    points[:, -data.num_logits :] = torch.from_numpy(intercept).to(data.device)
    return points


def _joined(coefficients: Tensor, intercepts: Tensor) -> Tensor:
    """Return (A, K' d + K') from (A, K', d) and (A, K')."""
    return torch.cat([coefficients.flatten(1), intercepts], dim=1)


def _split(points: Tensor, num_logits: int) -> tuple[Tensor, Tensor]:
    """Inverse of `_joined`; views."""
    split = points.shape[1] - num_logits
    return points[:, :split].unflatten(1, (num_logits, -1)), points[:, split:]


def _views_of(data: Data, left_out: IntArray) -> tuple[Tensor | None, Tensor | None]:
    """Stretch and shift of each problem, shape (A, d), or None for data that needs none."""
    if data.stretch is None or data.shift is None:
        return None, None
    index = _indices(left_out % len(data.stretch), data.device)
    return data.stretch[index], data.shift[index]


def _folded(
    coefficients: Tensor, intercepts: Tensor, stretch: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Coefficients and intercepts that act on the matrix: stretch ∘ w and b + shift·w."""
    if stretch is None or shift is None:
        return coefficients, intercepts
    return coefficients * stretch[:, None], intercepts + (coefficients @ shift[:, :, None])[:, :, 0]


def _logits(block: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return W x + b of shape (A, K', rows): rows last, so that sums over classes run along contiguous memory."""
    logits = weights @ block.mT
    logits += offsets[:, :, None]
    return logits


def _blocks(start: int, stop: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of start..stop, of about `_BLOCK_BYTES` and at least 128 rows on the CPU, at most 4096 anywhere.

    An accelerator is better off with few large operations. The limit keeps float32 sums of products short; the sum over
    blocks is float64.
    """
    rows = min(max(_BLOCK_BYTES // max(row_bytes, 1), 128), 4096) if device.type == "cpu" else 4096
    for first in range(start, stop, rows):
        yield slice(first, min(first + rows, stop))


def _indices(values: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def _upload(features: FloatArray, rows: IntArray, device: torch.device) -> Tensor:
    """Some rows in float64."""
    return torch.from_numpy(features[rows]).to(device).to(torch.float64)


def _square_sum(block: Tensor) -> Tensor:
    return block.to(torch.float64).square().sum()


def _leading_eigenvectors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Leading eigenvalues (rank,) float64 and eigenvectors (d, rank) of XᵀX / n; Halko et al., algorithms 4.4 and 5.1."""
    # The seed is fixed and the draw is made on the CPU, so that every device starts alike.
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (matrix.shape[1], rank + 10)
    test = torch.randn(shape, generator=generator, dtype=matrix.dtype, device="cpu").to(matrix.device)
    for _ in range(3):
        test = torch.linalg.qr(matrix.T @ (matrix @ torch.linalg.qr(test).Q)).Q
    sketch = matrix @ test
    values, vectors = _eigh(sketch.T @ sketch / len(matrix))
    return values[-rank:].clamp(min=0.0), test @ vectors[:, -rank:]


def _eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of a symmetric matrix, float64 and ascending, and eigenvectors in the matrix's dtype.

    LAPACK's float32 routine does not converge on entries as small as 1e-38, whose products it underflows: a Gram matrix has
    them where some columns are 1e-20 of others, or where the rows span a few dimensions only. Float64 holds their squares.
    """
    values, vectors = torch.linalg.eigh(gram.to(torch.float64))
    return values, vectors.to(gram.dtype)


def _moments(features: FloatArray, rows: IntArray, device: torch.device) -> Moments:
    """Moments of some rows, in float64 whatever the dtype."""
    blocks = []
    for chosen in _blocks(0, len(rows), features.shape[1] * 8, device):
        block = _upload(features, rows[chosen], device)
        mean = block.mean(dim=0)
        low, high = block.amin(dim=0), block.amax(dim=0)
        blocks.append(Moments(len(block), mean, (block - mean).square_().sum(dim=0), low, high))
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
            squares=total.squares + part.squares + gap.square() * (total.num_rows * part.num_rows / num_rows),
            low=torch.minimum(total.low, part.low),
            high=torch.maximum(total.high, part.high),
        )
    return total


def _location_and_scale(
    moments: Moments, resolution: float, scaling: Scaling, total_variance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, scale and which columns are constant."""
    magnitude = torch.maximum(moments.low.abs(), moments.high.abs())
    constant = moments.high - moments.low <= resolution * magnitude
    variance = (moments.squares / moments.num_rows).masked_fill(constant, 0.0)
    if scaling == "common":
        variance = (variance.sum() / total_variance).expand_as(variance)
    return moments.mean, torch.where(variance > 0, variance.sqrt(), 1.0), constant


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 in float32: with TF32 or bfloat16, objective and gradient would not fit each other."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        # It refuses where torch's newer switches were used, one for each backend.
        switches = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
        settings = [switch.fp32_precision for switch in switches]
        try:
            for switch in switches:
                switch.fp32_precision = "ieee"
            yield
        finally:
            for switch, setting in zip(switches, settings, strict=True):
                switch.fp32_precision = setting
        return
    if before == "highest":
        yield
        return
    try:
        torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_float32_matmul_precision(before)
