"""Pieces of metrics: per-document accuracy and Brier score, macro-F1 and its bootstrap standard error.

A metric that is a mean over documents comes back per document, so that the caller can aggregate, pair or resample it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["TieAwareAccuracy", "brier", "confusion_matrix", "macro_f1", "macro_f1_stderr", "tie_aware_accuracy"]


class TieAwareAccuracy(NamedTuple):
    """Accuracy of each document, and how many documents had no single best class.

    Attributes:
        values: float64 of shape (n,), in [0, 1].
        num_tied: Number of documents whose highest score belongs to more than one class. A model that scores all
            classes alike shows here, not in an accuracy that happens to be the share of class 0.
    """

    values: NDArray[np.float64]
    num_tied: int


def tie_aware_accuracy(scores: ArrayLike, labels: ArrayLike) -> TieAwareAccuracy:
    """Score the gold class 1/t where it is one of t classes of highest score, else 0.

    This is the expected accuracy when ties are broken at random. It does not depend on the order of the classes, gives
    1/K where all classes tie, and is plain accuracy where nothing ties.

    Args:
        scores: Shape (n, K); -inf is allowed.
        labels: Gold classes, integers in 0..K-1, shape (n,).

    Raises:
        ValueError: If a score is NaN, shapes do not fit, or a label is outside 0..K-1.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"scores has shape {values.shape}; expected (documents, classes).")
    if np.isnan(values).any():
        row, column = np.argwhere(np.isnan(values))[0]
        raise ValueError(f"scores[{row}, {column}] is NaN; a NaN score can neither win nor lose.")
    gold = _labels(labels, "labels", values.shape[1], len(values))
    best = values == values.max(axis=1, keepdims=True)
    num_best = best.sum(axis=1)
    return TieAwareAccuracy(values=best[np.arange(len(gold)), gold] / num_best, num_tied=int((num_best > 1).sum()))


def brier(probabilities: ArrayLike, labels: ArrayLike) -> NDArray[np.float64]:
    """Return the multi-class Brier score Σ_c (p_c - [c = gold])² of each document.

    Args:
        probabilities: Shape (n, K), rows summing to 1.
        labels: Gold classes, integers in 0..K-1, shape (n,).

    Returns:
        Shape (n,), in [0, 2]; 0 is certain and right, 2 certain and wrong.

    Raises:
        ValueError: If a row is not a probability distribution (to 1e-6), shapes do not fit, or a label is outside
            0..K-1.
    """
    values = np.asarray(probabilities, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"probabilities has shape {values.shape}; expected (documents, classes).")
    proper = (values >= 0).all(axis=1) & (np.abs(values.sum(axis=1) - 1) <= 1e-6)
    if not proper.all():
        row = int(np.flatnonzero(~proper)[0])
        raise ValueError(f"probabilities[{row}] is {values[row]}; expected non-negative numbers that sum to 1.")
    gold = _labels(labels, "labels", values.shape[1], len(values))
    gap = values.copy()
    gap[np.arange(len(gold)), gold] -= 1
    return np.square(gap).sum(axis=1)


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Count documents by gold class (rows) and predicted class (columns), shape (K, K)."""
    gold = _labels(labels, "labels", num_classes, None)
    predicted = _labels(predictions, "predictions", num_classes, len(gold))
    counts = np.bincount(gold * num_classes + predicted, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes).astype(np.int64)


def macro_f1(labels: ArrayLike, predictions: ArrayLike, num_classes: int) -> float:
    """Return the mean over all K classes of F1, a class that is neither gold nor predicted counting 0.

    Equal to scikit-learn's `f1_score(labels, predictions, average="macro", labels=range(K), zero_division=0)`.

    Args:
        labels: Gold classes, integers in 0..K-1, shape (n,), n >= 1.
        predictions: Predicted classes, likewise.
        num_classes: K.

    Raises:
        ValueError: If there is no document, shapes do not fit, or a class is outside 0..K-1.
    """
    counts = confusion_matrix(labels, predictions, num_classes)
    if not counts.sum():
        raise ValueError("labels is empty; macro-F1 needs at least one document.")
    return float(_macro_f1_of_counts(counts[np.newaxis])[0])


def macro_f1_stderr(
    labels: ArrayLike, predictions: ArrayLike, num_classes: int, *, draws: int, generator: np.random.Generator
) -> float:
    """Estimate the standard error of `macro_f1` by the bootstrap over documents.

    Macro-F1 sees a document only through its cell of the confusion matrix. n documents drawn with replacement fall into
    the cells as one multinomial draw with the observed shares, so drawing the matrix is identical in law to resampling
    the documents and costs O(K²) a draw, not O(n).

    Args:
        labels: Gold classes, integers in 0..K-1, shape (n,), n >= 2.
        predictions: Predicted classes, likewise.
        num_classes: K.
        draws: Number of bootstrap draws, >= 2.
        generator: Source of the draws; the global RNG is not read.

    Returns:
        Standard deviation of macro-F1 over the draws (divisor draws - 1).

    Raises:
        ValueError: If n < 2 or draws < 2, shapes do not fit, or a class is outside 0..K-1.
    """
    counts = confusion_matrix(labels, predictions, num_classes)
    total = int(counts.sum())
    if total < 2 or draws < 2:
        raise ValueError(f"Got {total} documents and {draws} draws; a standard error needs at least 2 of each.")
    # Cells that were never seen stay empty in every draw, so only the others are drawn.
    seen = np.flatnonzero(counts)
    drawn = np.zeros((draws, num_classes**2), dtype=np.int64)
    drawn[:, seen] = generator.multinomial(total, counts.ravel()[seen] / total, size=draws)
    return float(_macro_f1_of_counts(drawn.reshape(draws, num_classes, num_classes)).std(ddof=1))


def _macro_f1_of_counts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Macro-F1 of each confusion matrix in (m, K, K): F1_c = 2 TP_c / (gold_c + predicted_c)."""
    hits = np.diagonal(counts, axis1=1, axis2=2)
    support = counts.sum(axis=2) + counts.sum(axis=1)
    return (2 * hits / np.maximum(support, 1)).mean(axis=1)


def _labels(labels: ArrayLike, name: str, num_classes: int, count: int | None) -> NDArray[np.int64]:
    """Return classes as int64 of shape (count,), or say which one is not a class."""
    values = np.asarray(labels)
    if values.ndim != 1 or (count is not None and len(values) != count):
        raise ValueError(f"{name} has shape {values.shape}; expected ({'n' if count is None else count},).")
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} has dtype {values.dtype}; expected integers in 0..{num_classes - 1}.")
    outside = np.flatnonzero((values < 0) | (values >= num_classes))
    if outside.size:
        raise ValueError(f"{name}[{outside[0]}] is {values[outside[0]]}; expected a class in 0..{num_classes - 1}.")
    return values.astype(np.int64)
