"""Linear probe: L2 logistic regression on frozen features, the penalty chosen by cross-validation on training rows.

The objective is that of scikit-learn's `LogisticRegression`, C Σ_i loss_i + ½‖w‖² with an unpenalised intercept: one
logit for two classes, softmax for more. Features are standardised inside each fold, by its training rows only. Source:
Saunshi, Malladi, Arora (ICLR 2021), Table 1; theirs was one-vs-rest on raw features, by a solver that takes over a
hundred times as long.

The grid is solved in one go by `_solvers`; `benchmarks/probe_grid.py` times it, and compares it with scikit-learn. BLAS
runs with the threads it is given: where cores are shared with other work, its threads wait for each other, and one
(OPENBLAS_NUM_THREADS=1) is many times faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax
from sklearn.model_selection import StratifiedKFold

from harness_ext.evaluators import _solvers

__all__ = ["DEFAULT_C_GRID", "ProbeFit", "fit_probe"]

DEFAULT_C_GRID: tuple[float, ...] = tuple(float(f"1e{exponent}") for exponent in range(-6, 4))
"""The decades 1e-6 to 1e3: the source's grid for n < 10,000, here for every n.

On standardised features both ends are out of use, so that the best C lies inside. Along a direction of variance ν the
loss bends by at most n ν / 4, the penalty by 1/C. The mean ν is 1; the states of SmolLM2-135M on SST-2 have ν from 2e-4
to 64. At C = 1e-6 the penalty outweighs the loss in all but the leading directions even for n = 1e5, which leaves the
difference of the class means; at C = 1e3 it is outweighed in every direction. The source starts at 1e-3 for n >= 10,000,
on raw features; here the best C may be lower, as it falls with n.
"""

_CV_TOLERANCE = 1e-5
"""On the gradient per example, a tenth of scikit-learn's default. Ten times less changed no CV accuracy on
SST-2 by more than 0.02 points."""

_FIT_TOLERANCE = 1e-9
"""Of the final fit in float64: a few evaluations more for coefficients that agree to about six digits between solvers."""

_MAX_ITERATIONS = 1000

_SMALL = 2**20
"""Up to so many numbers the grid is solved in float64 too: there is no time to be saved."""

_LARGE = 2**28
"""From so many numbers (2 GiB in float64) on, the final fit stays in float32."""


@dataclass(frozen=True)
class ProbeFit:
    """A fitted probe and how it was chosen; every value but the two arrays is a plain Python value.

    Attributes:
        coefficients: float64 in the units of the features, shape (1, d) for two classes, else (K, d).
        intercept: Shape (1,) or (K,).
        num_classes: K.
        c: The C of this fit.
        c_grid: The values of C tried, ascending.
        cv_accuracy: Mean held-out accuracy over folds for each C, in [0, 1]. None where no CV was possible; see
            `notes`.
        cv_accuracy_stderr: Its standard error over folds, likewise.
        num_folds: Folds used; 0 without CV.
        num_cv_unconverged: CV fits that stopped before their tolerance.
        training_accuracy: Accuracy of this fit on its own training rows.
        num_iterations: Evaluations of the objective in this fit.
        converged: Whether this fit reached its tolerance.
        gradient_norm: Largest absolute entry of the gradient, per training example and standardised feature, that it
            reached.
        notes: What could not be done as asked, in sentences.
    """

    coefficients: NDArray[np.float64]
    intercept: NDArray[np.float64]
    num_classes: int
    c: float
    c_grid: tuple[float, ...]
    cv_accuracy: tuple[float, ...] | None
    cv_accuracy_stderr: tuple[float, ...] | None
    num_folds: int
    num_cv_unconverged: int
    training_accuracy: float
    num_iterations: int
    converged: bool
    gradient_norm: float
    notes: tuple[str, ...]

    def decision_scores(self, features: ArrayLike) -> NDArray[np.float64]:
        """Return logits of shape (n, K), float64, for features of shape (n, d); the single logit z of two classes is
        (-z/2, z/2).

        Raises:
            ValueError: If features do not have d columns or are not finite.
        """
        values = _features(features)
        if values.shape[1] != self.coefficients.shape[1]:
            raise ValueError(
                f"features has {values.shape[1]} columns; this probe was fitted on {self.coefficients.shape[1]}. "
                "Use the same model, layer and pooling as for training."
            )
        logits = np.empty((len(values), len(self.coefficients)))
        for start in range(0, len(values), 4096):
            # In float64 block by block: a column of large mean would lose its digits in float32.
            block = values[start : start + 4096].astype(np.float64)
            logits[start : start + 4096] = block @ self.coefficients.T + self.intercept
        return logits if self.num_classes > 2 else np.concatenate([-logits / 2, logits / 2], axis=1)

    def log_probabilities(self, features: ArrayLike) -> NDArray[np.float64]:
        """Return log p(class | features) of shape (n, K), in nats; raises as `decision_scores`."""
        return np.asarray(log_softmax(self.decision_scores(features), axis=1))

    def predict(self, features: ArrayLike) -> NDArray[np.int64]:
        """Return the class of highest score, shape (n,), the lower class in a tie; raises as `decision_scores`."""
        return self.decision_scores(features).argmax(axis=1).astype(np.int64)


class _CrossValidation(NamedTuple):
    """What the grid leaves behind.

    Attributes:
        accuracy: Held-out accuracy, shape (number of C, folds).
        coefficients: Averaged over folds for each C, shape (number of C, K', d); where the final fit starts.
        intercepts: Likewise, shape (number of C, K').
        num_unconverged: Fits that stopped before their tolerance.
        curvature: Spectrum of all rows, standardised by all rows: the final fit's too.
    """

    accuracy: NDArray[np.float64]
    coefficients: NDArray[np.floating[Any]]
    intercepts: NDArray[np.floating[Any]]
    num_unconverged: int
    curvature: _solvers.Spectrum


def fit_probe(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    num_classes: int,
    c_grid: Sequence[float] | None = None,
    num_folds: int = 5,
    seed: int,
) -> ProbeFit:
    """Choose C by stratified k-fold cross-validation and fit on all rows.

    The C of highest mean held-out accuracy is taken, of several the smallest: the strongest penalty. Where the rarest
    class has fewer members than `num_folds` there are as many folds as members; where it has one, there is no CV and C
    is 1.

    Args:
        features: Shape (n, d), float32 or float64 (other numbers are converted).
        labels: Integers in 0..K-1, each class present, shape (n,).
        num_classes: K, >= 2.
        c_grid: Values of C, > 0. None: `DEFAULT_C_GRID`.
        num_folds: At least 2.
        seed: Of the folds, the only thing that is random.

    Returns:
        The fit. That a solver stopped early is in its fields, never a warning.

    Raises:
        ValueError: If features are not finite, shapes do not fit, a label is outside 0..K-1, a class has no row, or an
            option is out of range.
    """
    values = _features(features)
    targets, counts = _targets(labels, num_classes, len(values))
    grid = _grid(c_grid)
    if num_folds < 2:
        raise ValueError(f"num_folds is {num_folds}; expected at least 2.")

    notes = []
    folds = min(num_folds, int(counts.min()))
    cross_validation, start, chosen = None, None, 0
    if folds < 2:
        grid = (1.0,)
        notes.append(
            f"No cross-validation: class {int(counts.argmin())} has one training row, and a fold needs one to train "
            "on and one to score. C is 1, not chosen."
        )
    else:
        if folds < num_folds:
            notes.append(
                f"{folds} folds instead of {num_folds}: class {int(counts.argmin())} has {folds} training rows."
            )
        cross_validation = _cross_validate(values, targets, num_classes, grid, folds, seed)
        means = cross_validation.accuracy.mean(axis=1)
        # Means of unequal folds may differ in the last digit where the counts are the same.
        chosen = int(np.flatnonzero(means >= means.max() - 1e-12)[0])
        start = cross_validation.coefficients[[chosen]], cross_validation.intercepts[[chosen]]
        if cross_validation.num_unconverged:
            notes.append(
                f"{cross_validation.num_unconverged} of {len(grid) * folds} cross-validation fits stopped before a "
                f"gradient of {_CV_TOLERANCE:g}."
            )

    dtype = np.float64 if values.size < _LARGE else np.float32
    data = _solvers.standardise(values, targets, np.zeros_like(targets), num_classes=num_classes, dtype=dtype)
    everything = np.array([_solvers.NO_PART])
    solution = _solvers.solve(
        data,
        _solvers.spectrum(data.matrix) if cross_validation is None else cross_validation.curvature,
        everything,
        np.array([grid[chosen]]),
        tolerance=_FIT_TOLERANCE if dtype == np.float64 else _CV_TOLERANCE,
        max_iterations=_MAX_ITERATIONS,
        start=start,
    )
    if not solution.converged[0]:
        notes.append(f"The fit stopped at a gradient of {solution.gradient_norm[0]:.1e}.")
    coefficients, intercept = _solvers.to_feature_units(data, solution.coefficients[0], solution.intercepts[0])
    return ProbeFit(
        coefficients=coefficients,
        intercept=intercept,
        num_classes=num_classes,
        c=grid[chosen],
        c_grid=grid,
        cv_accuracy=None if cross_validation is None else tuple(cross_validation.accuracy.mean(axis=1).tolist()),
        cv_accuracy_stderr=None
        if cross_validation is None
        else tuple((cross_validation.accuracy.std(axis=1, ddof=1) / np.sqrt(folds)).tolist()),
        num_folds=0 if cross_validation is None else folds,
        num_cv_unconverged=0 if cross_validation is None else cross_validation.num_unconverged,
        training_accuracy=float(_solvers.count_correct(data, solution, everything)[0] / len(targets)),
        num_iterations=int(solution.iterations[0]),
        converged=bool(solution.converged[0]),
        gradient_norm=float(solution.gradient_norm[0]),
        notes=tuple(notes),
    )


def _cross_validate(
    features: NDArray[np.floating[Any]],
    labels: NDArray[np.int64],
    num_classes: int,
    grid: tuple[float, ...],
    num_folds: int,
    seed: int,
) -> _CrossValidation:
    """Fit every C on every fold's training rows and score it on the rest."""
    part = np.empty_like(labels)
    splitter = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    for fold, (_, held_out) in enumerate(splitter.split(np.zeros(len(labels)), labels)):
        part[held_out] = fold
    dtype = np.float64 if features.size <= _SMALL else np.float32
    data = _solvers.standardise(features, labels, part, num_classes=num_classes, dtype=dtype)
    if dtype == np.float32 and max(data.stretch.max(), np.abs(data.shift).max()) > 100:
        # A column has most of its variance in one fold, such as a single huge entry: what the other folds see of it is
        # a small difference of numbers in `matrix`, too small for float32.
        data = _solvers.standardise(features, labels, part, num_classes=num_classes, dtype=np.float64)
    left_out = np.tile(np.arange(num_folds), len(grid))
    curvature = _solvers.spectrum(data.matrix)
    solutions = _solvers.solve(
        data,
        curvature,
        left_out,
        np.repeat(grid, num_folds),
        tolerance=_CV_TOLERANCE,
        max_iterations=_MAX_ITERATIONS,
    )
    correct = _solvers.count_correct(data, solutions, left_out).reshape(len(grid), num_folds)
    shape = (len(grid), num_folds)
    return _CrossValidation(
        accuracy=correct / np.diff(data.bounds),
        coefficients=solutions.coefficients.reshape(*shape, data.num_logits, -1).mean(axis=1),
        intercepts=solutions.intercepts.reshape(*shape, data.num_logits).mean(axis=1),
        num_unconverged=int((~solutions.converged).sum()),
        curvature=curvature,
    )


def _features(features: ArrayLike) -> NDArray[np.floating[Any]]:
    """Return finite float32 or float64 of shape (n, d), or say where it is not."""
    values = np.asarray(features)
    if values.ndim != 2 or not values.shape[1]:
        raise ValueError(f"features has shape {values.shape}; expected (documents, dimensions).")
    if values.dtype not in (np.float32, np.float64):
        values = values.astype(np.float32 if values.dtype == np.float16 else np.float64)
    # The sum is finite unless an entry is not, or the sum overflows; only then is each entry looked at.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not np.isfinite(values.sum(dtype=np.float64))
    if suspicious:
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            row, column = bad[0]
            raise ValueError(
                f"features[{row}, {column}] is {values[row, column]}, and {len(np.unique(bad[:, 0]))} of {len(values)} "
                "rows are not finite. Check the model's states for that document: float16 overflows where bfloat16 "
                "does not."
            )
    return values


def _targets(labels: ArrayLike, num_classes: int, num_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return labels (n,) and class counts (K,), or say which label or class is wrong."""
    values = np.asarray(labels)
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; a probe needs at least two classes to tell apart.")
    if values.shape != (num_rows,):
        raise ValueError(
            f"labels has shape {values.shape}; expected ({num_rows},), one label for each row of features."
        )
    if not num_rows:
        raise ValueError("There are no training rows; expected at least one of each class.")
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"labels has dtype {values.dtype}; expected integers in 0..{num_classes - 1}.")
    outside = np.flatnonzero((values < 0) | (values >= num_classes))
    if outside.size:
        raise ValueError(
            f"labels[{outside[0]}] is {values[outside[0]]}, and {outside.size} of {num_rows} labels are outside "
            f"0..{num_classes - 1}. A label of -1 marks a split whose labels are hidden: train on another split."
        )
    counts = np.bincount(values, minlength=num_classes).astype(np.int64)
    present = np.flatnonzero(counts)
    if len(present) == 1:
        raise ValueError(f"All {num_rows} training labels are class {present[0]}; expected {num_classes} classes.")
    if len(present) < num_classes:
        missing = np.flatnonzero(counts == 0)
        raise ValueError(
            f"No training row has class {', '.join(map(str, missing))}; expected every class of 0..{num_classes - 1}. "
            "Use more training rows, or draw them by class."
        )
    return values.astype(np.int64), counts


def _grid(c_grid: Sequence[float] | None) -> tuple[float, ...]:
    """Return the grid ascending and without repeats."""
    grid = tuple(sorted({float(value) for value in (DEFAULT_C_GRID if c_grid is None else c_grid)}))
    if not grid or not all(np.isfinite(value) and value > 0 for value in grid):
        raise ValueError(f"c_grid is {c_grid}; expected at least one value of C, each finite and above 0.")
    return grid
