"""Linear probe: L2 logistic regression on frozen features, the penalty chosen by cross-validation on training rows.

The objective is that of scikit-learn's `LogisticRegression`, C Σ_i loss_i + ½‖w‖² with an unpenalised intercept: one
logit for two classes, softmax for more. Features are standardised inside each fold, by its training rows only. Source:
Saunshi, Malladi, Arora (ICLR 2021), Table 1; theirs was one-vs-rest on raw features, by a solver that takes over a
hundred times as long.

The grid is solved in one go by `_solvers`; `benchmarks/probe_grid.py` times it, and compares it with scikit-learn. On a
CPU it runs with the threads that torch is given: where cores are shared with other work, threads wait for each other, and
one (OMP_NUM_THREADS=1) is many times faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax
from sklearn.model_selection import StratifiedKFold

from harness_ext.evaluators import _checks, _solvers

__all__ = ["DEFAULT_C_GRID", "ProbeFit", "fit_probe", "fit_probes"]

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
"""Up to so many numbers the matrix is float64: there is no time to be saved."""

_FEW_ROWS = 128
"""Up to so many rows, and fewer than dimensions, each fold is rotated. That takes an SVD, which costs n² d, and spares
L-BFGS its vectors of length K' d. For two classes and d from 300 to 4096, whole fits on a CPU took 0.3 to
0.7 of the time at n = 32 and 64, 0.9 at n = 128, and 1.2 at n = 192; for four classes less."""


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
        gradient_norm: Largest absolute entry of the gradient that it reached, per training example; by standardised
            feature, or by rotated one where there are few rows.
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
    """What one seed's grid leaves behind.

    Attributes:
        accuracy: Held-out accuracy, shape (number of C, folds).
        chosen: Index of the C of highest mean accuracy, of several the smallest.
        start: Coefficients (1, K', d) and intercepts (1, K') at that C, averaged over folds: where the final fit
            starts.
        num_unconverged: Fits that stopped before their tolerance.
    """

    accuracy: NDArray[np.float64]
    chosen: int
    start: tuple[NDArray[np.float64], NDArray[np.float64]]
    num_unconverged: int


class _FinalFit(NamedTuple):
    """The fit on all rows; the attributes are those of `ProbeFit`."""

    coefficients: NDArray[np.float64]
    intercept: NDArray[np.float64]
    training_accuracy: float
    num_iterations: int
    converged: bool
    gradient_norm: float


class _Options(NamedTuple):
    """Checked options of a fit; see `fit_probe`."""

    grid: tuple[float, ...]
    num_folds: int
    scaling: _solvers.Scaling
    total_variance: float | None
    device: torch.device

    @property
    def renew(self) -> bool:
        """Columns that keep their sizes are very unequal; see step 5 of `_solvers`."""
        return self.scaling == "common"


def fit_probe(
    features: ArrayLike,
    labels: ArrayLike,
    *,
    num_classes: int,
    c_grid: Sequence[float] | None = None,
    num_folds: int = 5,
    seed: int,
    scaling: _solvers.Scaling = "columns",
    total_variance: float | None = None,
    device: torch.device | str | None = None,
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
        scaling: "columns" standardises each column. "common" divides all columns by one number, so that a column of
            little variance stays small and L2 sees the proportions as they are: for probabilities p_f(·|s), where most
            of the vocabulary is noise. Either way inside each fold.
        total_variance: What the variances add up to under "common", which is what C is weighed against; "columns" has
            d. None: d.
        device: Where to compute; it needs float64, which "mps" does not have. None: the CPU.

    Returns:
        The fit. That a solver stopped early is in its fields, never a warning.

    Raises:
        ValueError: If features are not finite, shapes do not fit, a label is outside 0..K-1, a class has no row, or an
            option is out of range.
    """
    values = _features(features)
    targets, counts = _targets(labels, num_classes, len(values))
    options = _options(c_grid, num_folds, scaling, total_variance, device)
    return _fit(values, targets, counts, [seed], options)[0]


def fit_probes(
    feature_sets: Iterable[ArrayLike],
    labels: ArrayLike,
    *,
    num_classes: int,
    seeds: Sequence[int],
    c_grid: Sequence[float] | None = None,
    num_folds: int = 5,
    scaling: _solvers.Scaling = "columns",
    total_variance: float | None = None,
    device: torch.device | str | None = None,
) -> list[list[ProbeFit]]:
    """Fit probes on many features of the same documents, such as the layers of a model, under several seeds.

    Seeds share the features' spectrum, and those that choose the same C share the final fit, which no seed changes.
    Where each seed draws its own training rows, call `fit_probe` on each sample.

    Args:
        feature_sets: Arrays of shape (n, d); d may differ. No set is held while the next is made, so a generator needs
            memory for one.
        labels: As for `fit_probe`, for the rows of every set.
        num_classes: As for `fit_probe`, like all that follows.
        seeds: Seeds of the folds, at least one.
        c_grid: See there.
        num_folds: See there.
        scaling: See there.
        total_variance: See there.
        device: See there.

    Returns:
        Fits by feature set, then by seed.

    Raises:
        ValueError: As `fit_probe`, with the number of the set; or if there is no seed.
    """
    if not len(seeds):
        raise ValueError("seeds is empty; expected at least one seed of the folds, such as [0].")
    targets, counts = _targets(labels, num_classes, None)
    options = _options(c_grid, num_folds, scaling, total_variance, device)
    fits: list[list[ProbeFit]] = []
    # `enumerate` would hold on to the last set while the next one is made.
    for features in feature_sets:
        name = f"feature_sets[{len(fits)}]"
        fits.append(_fit(_features(features, name, len(targets)), targets, counts, seeds, options))
        del features
    return fits


def _fit(
    features: NDArray[np.floating[Any]],
    labels: NDArray[np.int64],
    counts: NDArray[np.int64],
    seeds: Sequence[int],
    options: _Options,
) -> list[ProbeFit]:
    """Fit one feature set under each seed."""
    num_classes, rarest = len(counts), int(counts.argmin())
    notes: list[str] = []
    grid, folds = options.grid, min(options.num_folds, int(counts[rarest]))
    if folds < 2:
        grid, folds = (1.0,), 0
        notes.append(
            f"No cross-validation: class {rarest} has one training row, and a fold needs one to train on and one to "
            "score. C is 1, not chosen."
        )
    elif folds < options.num_folds:
        notes.append(f"{folds} folds instead of {options.num_folds}: class {rarest} has {folds} training rows.")

    curvature: _solvers.Spectrum | None = None
    cross_validations: list[_CrossValidation | None] = []
    for seed in seeds if folds else seeds[:1]:
        data = None  # Frees the last seed's matrix before the next is made.
        data = _prepare(features, labels, num_classes, _parts(labels, folds, seed), options)
        if curvature is None or isinstance(data, _solvers.RotatedData):
            # Another order of the same rows has the same spectrum; rotated rows depend on the folds.
            curvature = _solvers.spectrum(data)
        cross_validations.append(_cross_validate(data, curvature, options, grid, folds) if folds else None)
    assert data is not None
    assert curvature is not None
    if not folds:
        cross_validations *= len(seeds)

    final: dict[int, _FinalFit] = {}
    for cross_validation in cross_validations:
        chosen = 0 if cross_validation is None else cross_validation.chosen
        if chosen not in final:
            start = None if cross_validation is None else cross_validation.start
            final[chosen] = _final_fit(data, curvature, options, grid[chosen], start)
    return [
        _described(final[0 if found is None else found.chosen], grid, folds, found, notes)
        for found in cross_validations
    ]


def _described(
    final: _FinalFit, grid: tuple[float, ...], num_folds: int, found: _CrossValidation | None, notes: Sequence[str]
) -> ProbeFit:
    """Put a `ProbeFit` together, with the notes of its own seed after those of all."""
    own = list(notes)
    accuracy = None if found is None else found.accuracy
    if found is not None and found.num_unconverged:
        own.append(
            f"{found.num_unconverged} of {len(grid) * num_folds} cross-validation fits stopped before a gradient of "
            f"{_CV_TOLERANCE:g}."
        )
    if not final.converged:
        own.append(f"The fit stopped at a gradient of {final.gradient_norm:.1e}.")
    return ProbeFit(
        coefficients=final.coefficients.copy(),
        intercept=final.intercept.copy(),
        num_classes=max(2, len(final.coefficients)),
        c=grid[0 if found is None else found.chosen],
        c_grid=grid,
        cv_accuracy=None if accuracy is None else tuple(accuracy.mean(axis=1).tolist()),
        cv_accuracy_stderr=None
        if accuracy is None
        else tuple((accuracy.std(axis=1, ddof=1) / np.sqrt(num_folds)).tolist()),
        num_folds=num_folds,
        num_cv_unconverged=0 if found is None else found.num_unconverged,
        training_accuracy=final.training_accuracy,
        num_iterations=final.num_iterations,
        converged=final.converged,
        gradient_norm=final.gradient_norm,
        notes=tuple(own),
    )


def _parts(labels: NDArray[np.int64], num_folds: int, seed: int) -> NDArray[np.int64]:
    """Return the fold that leaves each row out, shape (n,); all 0 without folds."""
    part = np.zeros_like(labels)
    if num_folds:
        splitter = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
        for fold, (_, held_out) in enumerate(splitter.split(np.zeros(len(labels)), labels)):
            part[held_out] = fold
    return part


def _prepare(
    features: NDArray[np.floating[Any]],
    labels: NDArray[np.int64],
    num_classes: int,
    part: NDArray[np.int64],
    options: _Options,
) -> _solvers.Data:
    """Standardise, and rotate where that is faster."""

    def standardised(dtype: torch.dtype) -> _solvers.StandardisedData:
        return _solvers.standardise(
            features,
            labels,
            part,
            num_classes=num_classes,
            dtype=dtype,
            device=options.device,
            scaling=options.scaling,
            total_variance=options.total_variance,
        )

    num_rows, dim = features.shape
    if num_rows <= _FEW_ROWS and num_rows < dim:
        return _solvers.rotate(standardised(torch.float64))
    data = standardised(torch.float64 if features.size <= _SMALL else torch.float32)
    if data.dtype == torch.float32 and max(float(data.stretch.max()), float(data.shift.abs().max())) > 100:
        # A column has most of its variance in one fold, such as a single huge entry: what the other folds see of it is
        # a small difference of numbers in `matrix`, too small for float32.
        del data
        data = standardised(torch.float64)
    return data


def _cross_validate(
    data: _solvers.Data, curvature: _solvers.Spectrum, options: _Options, grid: tuple[float, ...], num_folds: int
) -> _CrossValidation:
    """Fit every C on every fold's training rows and score it on the rest."""
    left_out = np.tile(np.arange(num_folds), len(grid))
    solutions = _solvers.solve(
        data,
        curvature,
        left_out,
        np.repeat(grid, num_folds),
        tolerance=_CV_TOLERANCE,
        max_iterations=_MAX_ITERATIONS,
        renew=options.renew,
    )
    correct = _solvers.count_correct(data, solutions, left_out)
    sizes = len(data.labels) - data.num_training_rows(left_out)
    accuracy = (correct / sizes).reshape(len(grid), num_folds)
    means = accuracy.mean(axis=1)
    # Means of unequal folds may differ in the last digit where the counts are the same.
    chosen = int(np.flatnonzero(means >= means.max() - 1e-12)[0])
    of_chosen = slice(chosen * num_folds, (chosen + 1) * num_folds)
    return _CrossValidation(
        accuracy=accuracy,
        chosen=chosen,
        start=(
            solutions.coefficients[of_chosen].mean(axis=0, keepdims=True),
            solutions.intercepts[of_chosen].mean(axis=0, keepdims=True),
        ),
        num_unconverged=int((~solutions.converged).sum()),
    )


def _final_fit(
    data: _solvers.Data,
    curvature: _solvers.Spectrum,
    options: _Options,
    c: float,
    start: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
) -> _FinalFit:
    """Fit on all rows, in float64 whatever the dtype of the matrix."""
    everything = np.array([_solvers.NO_PART])
    solution = _solvers.solve(
        data,
        curvature,
        everything,
        np.array([c]),
        tolerance=_FIT_TOLERANCE,
        max_iterations=_MAX_ITERATIONS,
        dtype=torch.float64,
        start=start,
        renew=options.renew,
    )
    coefficients, intercept = _solvers.to_feature_units(data, solution.coefficients[0], solution.intercepts[0])
    correct = int(_solvers.count_correct(data, solution, everything, dtype=torch.float64)[0])
    return _FinalFit(
        coefficients=coefficients,
        intercept=intercept,
        training_accuracy=correct / len(data.labels),
        num_iterations=int(solution.iterations[0]),
        converged=bool(solution.converged[0]),
        gradient_norm=float(solution.gradient_norm[0]),
    )


def _features(features: ArrayLike, name: str = "features", num_rows: int | None = None) -> NDArray[np.floating[Any]]:
    """Return finite float32 or float64 of shape (n, d), or say where it is not; `num_rows` is n where it is known."""
    values = _checks.matrix(features, name, axes=("documents", "dimensions"), may_be_empty=True)
    if num_rows is not None and len(values) != num_rows:
        raise ValueError(
            f"{name} has {len(values)} rows; expected {num_rows}, one for each label. Every set needs the same documents."
        )
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
                f"{name}[{row}, {column}] is {values[row, column]}, and {len(np.unique(bad[:, 0]))} of {len(values)} "
                "rows are not finite. Check the model's states for that document: float16 overflows where bfloat16 "
                "does not."
            )
    return values


def _targets(labels: ArrayLike, num_classes: int, num_rows: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return labels (n,) and class counts (K,), or say which label or class is wrong; `num_rows` is n if known."""
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; a probe needs at least two classes to tell apart.")
    advice = "A label of -1 marks a split whose labels are hidden: train on another split."
    values = _checks.class_labels(labels, "labels", num_classes, num_rows, each="row of features", advice=advice)
    if not len(values):
        raise ValueError("There are no training rows; expected at least one of each class.")
    counts = np.bincount(values, minlength=num_classes).astype(np.int64)
    present = np.flatnonzero(counts)
    if len(present) == 1:
        raise ValueError(f"All {len(values)} training labels are class {present[0]}; expected {num_classes} classes.")
    if len(present) < num_classes:
        missing = np.flatnonzero(counts == 0)
        raise ValueError(
            f"No training row has class {', '.join(map(str, missing))}; expected every class of 0..{num_classes - 1}. "
            "Use more training rows, or draw them by class."
        )
    return values, counts


def _options(
    c_grid: Sequence[float] | None,
    num_folds: int,
    scaling: _solvers.Scaling,
    total_variance: float | None,
    device: torch.device | str | None,
) -> _Options:
    """Check the options; the grid is ascending and without repeats."""
    grid = tuple(sorted({float(value) for value in (DEFAULT_C_GRID if c_grid is None else c_grid)}))
    if not grid or not all(np.isfinite(value) and value > 0 for value in grid):
        raise ValueError(f"c_grid is {c_grid}; expected at least one value of C, each finite and above 0.")
    if num_folds < 2:
        raise ValueError(f"num_folds is {num_folds}; expected at least 2.")
    if scaling not in get_args(_solvers.Scaling):
        known = " or ".join(map(repr, get_args(_solvers.Scaling)))
        raise ValueError(f"scaling is {scaling!r}; expected {known}.")
    if total_variance is not None and scaling != "common":
        raise ValueError(f'total_variance belongs to scaling "common", found {scaling!r}. Leave it out.')
    if total_variance is not None and not 0 < total_variance < np.inf:
        raise ValueError(f"total_variance is {total_variance}; expected a finite number above 0.")
    where = torch.device("cpu" if device is None else device)
    if where.type == "mps":
        raise ValueError("device is 'mps', which has no float64; fit the probe on 'cpu'.")
    return _Options(grid, num_folds, scaling, total_variance, where)
