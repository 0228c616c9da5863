"""How far a task and a model meet the assumptions of the theory: three diagnostics beside the accuracies.

Source of all three: Saunshi, Malladi, Arora (ICLR 2021).

- `natural_coefficients`: a task is (τ, B)-natural if some linear classifier on next-word probabilities with coefficients of
  absolute value at most B has classification loss at most τ. Here τ is given as a function of B.
- `affine_fit`: where log Σ_w exp(φ_w·f) is quadratic in f, its gradient Φᵀp_f is affine in f; R² says how nearly.
- `share_of_gain`: how much of what a probe on f gains over chance another feature set recovers.

**Known gap.** The paper's definition is about the true distribution p*, which no one has. With a model's p_f, τ says how
natural the task is as this model completes sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_softmax

from harness_ext.evaluators import _checks
from harness_ext.evaluators.scores import tie_aware_accuracy

__all__ = [
    "DEFAULT_BOUNDS",
    "AffineFit",
    "NaturalCoefficient",
    "NaturalCoefficients",
    "ShareOfGain",
    "affine_fit",
    "natural_coefficients",
    "share_of_gain",
]

DEFAULT_BOUNDS: tuple[float, ...] = tuple(float(f"1e{exponent}") for exponent in range(7))
"""B from 1 to 1e6. A word of probability p moves the logit by at most B p, and label words after a prompt have
probabilities from 1e-6 to 1e-2: below the first B nothing happens, beyond the last little is left to happen."""

_RIDGE = 1e-10
"""Of `affine_fit`, relative to the variance of a standardised feature. The rounding of float32 features has variances of
1e-14, so it is damped; directions with 1e-8 of a feature's variance are shrunk by a hundredth."""

_NOTABLE_FREE_R2 = 0.1
"""Expected R² of unrelated targets, d/(n - 1), from which a note is made."""


@dataclass(frozen=True)
class NaturalCoefficient:
    """The best classifier within one bound.

    Attributes:
        bound: B.
        tau: Mean cross-entropy on the training rows, in nats; the minimum under this bound.
        sup_norm: Largest absolute coefficient, <= B. Below B, the bound does not bind and a larger one changes nothing.
        accuracy: On the training rows, a tie among t classes counting 1/t.
        held_out_tau: Mean cross-entropy of the same classifier on the held-out rows, in nats; None where none were given.
        held_out_accuracy: Likewise.
        converged: Whether the solver reached its tolerance. If not, `tau` is an upper bound on the minimum.
    """

    bound: float
    tau: float
    sup_norm: float
    accuracy: float
    held_out_tau: float | None
    held_out_accuracy: float | None
    converged: bool


@dataclass(frozen=True)
class NaturalCoefficients:
    """τ as a function of B.

    Attributes:
        coefficients: One for each bound, B ascending; `tau` never rises along them.
        label_entropy: Entropy of the training labels, in nats: τ of the best constant. A τ no lower says that the label
            words tell nothing of the class within that bound.
        num_rows: Training rows.
        num_held_out_rows: Held-out rows, 0 where none were given.
        num_words: Label words.
    """

    coefficients: tuple[NaturalCoefficient, ...]
    label_entropy: float
    num_rows: int
    num_held_out_rows: int
    num_words: int


@dataclass(frozen=True)
class AffineFit:
    """How well targets are an affine function of features.

    Attributes:
        r2_train: 1 - Σ‖y - ŷ‖² / Σ‖y - ȳ‖² over the training rows and all columns, in [0, 1]; None where it would mean
            nothing, see `notes`. It grows with d/n even for unrelated targets.
        r2_held_out: The same sums over the held-out rows, with ȳ the mean of the training rows: 0 is a fit no better than
            always answering that mean, and worse ones are negative. None where no rows were given or they do not vary.
        rank: Rank of the standardised features as far as their numbers tell, <= d.
        num_rows: Training rows.
        num_held_out_rows: Held-out rows, 0 where none were given.
        notes: Why a value is None, and what else to know, in sentences.
    """

    r2_train: float | None
    r2_held_out: float | None
    rank: int
    num_rows: int
    num_held_out_rows: int
    notes: tuple[str, ...]


class ShareOfGain(NamedTuple):
    """A share of a gain in accuracy, or why there is none.

    Attributes:
        value: (accuracy - chance) / (reference - chance); 1 recovers the reference, below 0 is worse than chance.
        reason: Why `value` is None, in a sentence; None where it is not.
    """

    value: float | None
    reason: str | None


def natural_coefficients(
    probabilities: ArrayLike,
    labels: ArrayLike,
    num_classes: int,
    *,
    bounds: Sequence[float] = DEFAULT_BOUNDS,
    held_out: tuple[ArrayLike, ArrayLike] | None = None,
) -> NaturalCoefficients:
    """Return, for each B, the least cross-entropy of a bounded linear classifier on label-word probabilities.

    The classifier is v ∈ R^V with ‖v‖_∞ <= B, constant on all words that are no label words. Its logit v·p is then linear in
    the W + 1 numbers (1 - Σ_w p(w), p(1), …, p(W)), each coefficient within B: there is no intercept, but equal coefficients
    make one, as the numbers sum to 1. As in the source, two classes share one v and the loss log(1 + exp(∓v·p)), with class 1
    on the positive side; K > 2 classes have a v each and a softmax.

    The problem is convex. It is solved by L-BFGS-B in coordinates scaled to unit second moment (coefficients reach 1e6 where
    probabilities are 1e-8), each B from the solution of the one before.

    Args:
        probabilities: p(w|s) of each label word after each prompt (not its logarithm), shape (n, W), W >= 1. The words are
            different tokens, so a row sums to at most 1.
        labels: Integers in 0..K-1, shape (n,).
        num_classes: K, >= 2.
        bounds: Values of B, >= 0. B = 0 gives log K.
        held_out: Probabilities (m, W) and labels (m,) of other rows, on which each classifier is scored.

    Raises:
        ValueError: If shapes do not fit, there are no rows, a number is not a probability, a label is outside 0..K-1, or a
            bound is negative or not finite.
    """
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; expected at least two classes to tell apart.")
    radii = sorted({float(bound) for bound in bounds})
    if not radii or not all(np.isfinite(radius) and radius >= 0 for radius in radii):
        raise ValueError(f"bounds is {tuple(bounds)}; expected at least one finite number >= 0.")
    inputs = _word_features(probabilities, "probabilities")
    gold = _checks.class_labels(labels, "labels", num_classes, len(inputs))
    others: tuple[NDArray[np.float64], NDArray[np.int64]] | None = None
    if held_out is not None:
        other_inputs = _word_features(held_out[0], "held-out probabilities", num_words=inputs.shape[1] - 1)
        others = other_inputs, _checks.class_labels(held_out[1], "held-out labels", num_classes, len(other_inputs))

    scale = np.sqrt(np.square(inputs).mean(axis=0))
    scale = np.where(scale > 0, scale, 1.0)
    scaled = inputs / scale
    num_logits = 1 if num_classes == 2 else num_classes
    point = np.zeros((num_logits, inputs.shape[1]))
    found = []
    for radius in radii:
        point, converged = _bounded_minimum(scaled, gold, radius * scale, point)
        coefficients = point / scale
        scores = _class_scores(inputs @ coefficients.T)
        held_out_tau, held_out_accuracy = None, None
        if others is not None:
            other_scores = _class_scores(others[0] @ coefficients.T)
            held_out_tau = _cross_entropy(other_scores, others[1])
            held_out_accuracy = float(tie_aware_accuracy(other_scores, others[1]).values.mean())
        found.append(
            NaturalCoefficient(
                bound=radius,
                tau=_cross_entropy(scores, gold),
                # Dividing by the scale may round to just above the bound.
                sup_norm=min(float(np.abs(coefficients).max()), radius),
                accuracy=float(tie_aware_accuracy(scores, gold).values.mean()),
                held_out_tau=held_out_tau,
                held_out_accuracy=held_out_accuracy,
                converged=converged,
            )
        )
    shares = np.bincount(gold, minlength=num_classes) / len(gold)
    shares = shares[shares > 0]
    return NaturalCoefficients(
        coefficients=tuple(found),
        label_entropy=float(-(shares * np.log(shares)).sum()),
        num_rows=len(inputs),
        num_held_out_rows=0 if others is None else len(others[1]),
        num_words=inputs.shape[1] - 1,
    )


def affine_fit(
    features: ArrayLike,
    targets: ArrayLike,
    *,
    held_out: tuple[ArrayLike, ArrayLike] | None = None,
    ridge: float = _RIDGE,
) -> AffineFit:
    """Fit targets ≈ A features + c by least squares and return its R², over all target columns together.

    Columns with more variance weigh more, as they do in Φᵀp_f. The normal equations are formed in float64 from centred blocks
    of rows, with features scaled to unit variance; constant features are left out.

    Args:
        features: Such as f(s), shape (n, d).
        targets: Such as Φᵀp_f(·|s), shape (n, m).
        held_out: Features (n', d) and targets (n', m) of other rows to score the fit on.
        ridge: Added to the correlation matrix of the features, >= 0. The default keeps numerically dependent features from
            spoiling the fit; with 0 directions of rounding size are left out. It shows where rows are few and some direction
            of the features has a standard deviation of 1e-5 of theirs or less: for 40 rows of 32 features with deviations
            over six decades, `r2_train` was 0.977 in place of 0.984 and `r2_held_out` 0.65 in place of 0.45 (medians of 20
            random draws); over three decades no R² moved by more than 0.0002.

    Raises:
        ValueError: If shapes do not fit, there are no rows, an entry is not finite, or `ridge` is negative.
    """
    if not (np.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"ridge is {ridge}; expected a finite number >= 0.")
    inputs = _checks.matrix(features, "features")
    outputs = _checks.matrix(targets, "targets", rows=len(inputs))
    others: tuple[NDArray[np.floating[Any]], NDArray[np.floating[Any]]] | None = None
    if held_out is not None:
        other_inputs = _checks.matrix(held_out[0], "held-out features", columns=inputs.shape[1])
        other_outputs = _checks.matrix(
            held_out[1], "held-out targets", rows=len(other_inputs), columns=outputs.shape[1]
        )
        others = other_inputs, other_outputs

    num_rows, dim = inputs.shape
    input_mean, output_mean = _mean(inputs, "features"), _mean(outputs, "targets")
    second, cross, total = np.zeros((dim, dim)), np.zeros((dim, outputs.shape[1])), 0.0
    for rows in _checks.row_blocks(inputs, outputs):
        x, y = inputs[rows] - input_mean, outputs[rows] - output_mean
        second += x.T @ x
        cross += x.T @ y
        total += float(np.vdot(y, y))

    deviation = np.sqrt(np.diagonal(second) / num_rows)
    # A constant column leaves its rounding behind, relative to its size.
    varying = deviation > 4 * float(np.finfo(inputs.dtype).eps) * np.abs(input_mean)
    scale = np.where(varying, deviation, np.inf)
    correlation = second / num_rows / np.outer(scale, scale)
    values, basis = np.linalg.eigh(correlation)
    kept = values > dim * np.finfo(np.float64).eps * max(float(values[-1]), 0.0)
    values, basis = values[kept], basis[:, kept]
    scaled_cross = cross / num_rows / scale[:, np.newaxis]
    projected = basis.T @ scaled_cross
    solution = (basis @ (projected / (values + ridge)[:, np.newaxis])) / scale[:, np.newaxis]

    notes = []
    r2_train: float | None = None
    constant = total <= outputs.size * (4 * float(np.finfo(outputs.dtype).eps)) ** 2 * float(
        np.square(output_mean).max()
    )
    if num_rows <= int(varying.sum()) + 1:
        notes.append(
            f"r2_train is None: {num_rows} rows and {int(varying.sum())} features that vary; an affine fit of so few rows "
            "passes through them all. Use more rows than features."
        )
    elif constant:
        notes.append("r2_train is None: the training targets are constant, so there is no variance to explain.")
    else:
        # Σ‖y - ŷ‖² = Σ‖y‖² - Σ_i (q_i² / λ_i) (1 - (r / (λ_i + r))²) for the projections q and the ridge r.
        explained = np.square(projected).sum(axis=1) / values * (1 - np.square(ridge / (values + ridge)))
        r2_train = float(np.clip(explained.sum() * num_rows / total, 0.0, 1.0))
        free = len(values) / (num_rows - 1)
        if free > _NOTABLE_FREE_R2:
            notes.append(
                f"r2_train is optimistic: with {num_rows} rows and {len(values)} independent features, unrelated targets "
                f"would reach {free:.2f} in the mean. r2_held_out falls short of that of many rows."
            )

    r2_held_out: float | None = None
    if others is not None:
        residual, spread = 0.0, 0.0
        for rows in _checks.row_blocks(*others):
            x = _checks.finite_block(others[0], rows, "held-out features") - input_mean
            y = _checks.finite_block(others[1], rows, "held-out targets") - output_mean
            error = y - x @ solution
            spread += float(np.vdot(y, y))
            residual += float(np.vdot(error, error))
        if spread > 0:
            r2_held_out = 1 - residual / spread
        else:
            notes.append("r2_held_out is None: every held-out target is the mean of the training targets.")
    return AffineFit(
        r2_train=r2_train,
        r2_held_out=r2_held_out,
        rank=len(values),
        num_rows=num_rows,
        num_held_out_rows=0 if others is None else len(others[0]),
        notes=tuple(notes),
    )


def share_of_gain(accuracy: float, reference_accuracy: float, chance: float) -> ShareOfGain:
    """Return (accuracy - chance) / (reference_accuracy - chance), or None where the reference gains nothing.

    Args:
        accuracy: Of the features in question, in [0, 1].
        reference_accuracy: Of the probe on f, in [0, 1].
        chance: Share of the majority class, or 1/K, in [0, 1].

    Raises:
        ValueError: If a number is outside [0, 1].
    """
    for name, value in (("accuracy", accuracy), ("reference_accuracy", reference_accuracy), ("chance", chance)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; expected a share in [0, 1], not a percentage.")
    if reference_accuracy <= chance:
        return ShareOfGain(
            value=None,
            reason=f"The reference accuracy {reference_accuracy:.4f} is not above chance {chance:.4f}: there is no gain to "
            "take a share of.",
        )
    return ShareOfGain(value=float((accuracy - chance) / (reference_accuracy - chance)), reason=None)


def _bounded_minimum(
    inputs: NDArray[np.float64], labels: NDArray[np.int64], limits: NDArray[np.float64], start: NDArray[np.float64]
) -> tuple[NDArray[np.float64], bool]:
    """Minimise the mean cross-entropy over points (K', D) with |point[k, j]| <= limits[j], from a point that is allowed.

    Returns:
        The minimiser, and whether the solver says so. It is never worse than the start.
    """
    shape = start.shape
    box = np.broadcast_to(limits, shape).ravel()

    def objective(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        value, gradient = _loss_and_gradient(point.reshape(shape), inputs, labels)
        return value, gradient.ravel()

    result = minimize(
        objective,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        bounds=np.stack([-box, box], axis=1),
        # Tolerances near rounding: on a path of seven bounds the last digits cost a second in all.
        options={"maxiter": 10_000, "maxfun": 20_000, "maxcor": 20, "ftol": 1e-15, "gtol": 1e-10},
    )
    if result.fun > objective(start.ravel())[0]:
        return start, bool(result.success)
    return result.x.reshape(shape), bool(result.success)


def _loss_and_gradient(
    point: NDArray[np.float64], inputs: NDArray[np.float64], labels: NDArray[np.int64]
) -> tuple[float, NDArray[np.float64]]:
    """Mean cross-entropy in nats, and its gradient of shape (K', D)."""
    logits = inputs @ point.T
    if len(point) == 1:
        sign = 2.0 * labels - 1.0
        margin = sign * logits[:, 0]
        slope = -sign * expit(-margin)
        return float(np.logaddexp(0.0, -margin).mean()), (slope @ inputs)[np.newaxis] / len(labels)
    rows = np.arange(len(labels))
    log_probs = log_softmax(logits, axis=1)
    residual = np.exp(log_probs)
    residual[rows, labels] -= 1.0
    return float(-log_probs[rows, labels].mean()), residual.T @ inputs / len(labels)


def _class_scores(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores (n, K); the single logit z of two classes is (-z/2, z/2)."""
    return logits if logits.shape[1] > 1 else np.concatenate([-logits / 2, logits / 2], axis=1)


def _cross_entropy(scores: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    """Mean of -log softmax(scores)[label], in nats."""
    return float(-log_softmax(scores, axis=1)[np.arange(len(labels)), labels].mean())


def _word_features(probabilities: ArrayLike, name: str, *, num_words: int | None = None) -> NDArray[np.float64]:
    """Return (1 - Σ_w p(w), p(1), …, p(W)), or say which entry is no probability."""
    values = _checks.matrix(probabilities, name, columns=num_words, axes=("rows", "label words")).astype(np.float64)
    proper = (values >= 0) & (values <= 1)
    _checks.refuse(~proper, values, name, "a probability in [0, 1]. Take exp of log-probabilities.")
    total = values.sum(axis=1)
    # Half precision sums to 1 within about 1e-2.
    if total.max() > 1.01:
        row = int(total.argmax())
        raise ValueError(f"{name}[{row}] sums to {total[row]:.4g}; expected at most 1. Give each token once.")
    return np.concatenate([np.maximum(1 - total, 0.0)[:, np.newaxis], values], axis=1)


def _mean(matrix: NDArray[np.floating[Any]], name: str) -> NDArray[np.float64]:
    """Return the column means in float64, or say which entry is not finite."""
    total = np.zeros(matrix.shape[1])
    for rows in _checks.row_blocks(matrix):
        total += _checks.finite_block(matrix, rows, name).sum(axis=0)
    return np.asarray(total / len(matrix))
