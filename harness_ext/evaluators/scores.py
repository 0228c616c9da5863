"""Pieces of metrics: accuracy, Brier score, macro-F1, balanced accuracy, calibration error, and their uncertainty.

A metric that is a mean over documents comes back per document, so that the caller can aggregate, pair or resample it.

The bootstrap resamples documents. A document enters each of these metrics through a few numbers, such as its gold and
predicted class, so documents with the same numbers are interchangeable, and n of them drawn with replacement are one
multinomial draw over the distinct ones: identical in law, at a cost of the number of distinct ones and not of n. Where
most differ, as in a Brier score, documents are drawn one by one, a block of draws at a time.
`benchmarks/bootstrap.py` times both. Intervals are percentile intervals, known to be too narrow for few documents; where
no document differs from another they have no width, since resampling cannot show what did not occur.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness_ext.evaluators import _checks

__all__ = [
    "Interval",
    "Statistic",
    "TieAwareAccuracy",
    "at_or_below_majority",
    "balanced_accuracy",
    "balanced_accuracy_interval",
    "balanced_accuracy_stderr",
    "bootstrap_interval",
    "brier",
    "calibration_error_interval",
    "confusion_matrix",
    "expected_calibration_error",
    "macro_f1",
    "macro_f1_interval",
    "macro_f1_stderr",
    "majority_rate",
    "mean_interval",
    "tie_aware_accuracy",
]

Statistic = Callable[[NDArray[Any], NDArray[np.int64]], NDArray[np.float64]]
"""A metric of m resamples at once: (distinct documents (r, p), how often each was drawn (m, r)) -> (m,)."""

_DRAWN_AT_ONCE = 2**18
"""Numbers in a block of draws: 2 MiB in int64, about a core's cache."""

_CELL_PER_DOCUMENT_COST = 8
"""A cell of a multinomial draw costs about as much as drawing eight single documents (60 ns against 5 to 15)."""

_ALWAYS_FEW = 64
"""Up to so many cells, a multinomial draw takes microseconds, whatever n is."""


class Interval(NamedTuple):
    """An interval estimate.

    Attributes:
        low: Lower end, in the unit of the metric.
        high: Upper end.
        level: Nominal coverage, in (0, 1).
    """

    low: float
    high: float
    level: float


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
    values = _checks.log_scores(scores, "scores")
    gold = _checks.class_labels(labels, "labels", values.shape[1], len(values))
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
    values = _distributions(probabilities)
    gold = _checks.class_labels(labels, "labels", values.shape[1], len(values))
    gap = values.copy()
    gap[np.arange(len(gold)), gold] -= 1
    return np.square(gap).sum(axis=1)


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, *, num_bins: int = 15) -> float:
    """Return the expected calibration error of the top class, Σ_b (n_b / n) |accuracy_b - confidence_b|.

    Documents fall into `num_bins` bins of equal width, (0, 1/B], (1/B, 2/B], …, by their confidence, the highest class
    probability. Source: Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017). Where t classes tie for the
    highest probability, the document counts 1/t if the gold class is one of them, as in `tie_aware_accuracy`.

    It is biased upward, since each bin's sampling noise counts as miscalibration, and by more the fewer documents a bin
    has: numbers from different n or different bins do not compare.

    Args:
        probabilities: Shape (n, K), n >= 1, rows summing to 1.
        labels: Gold classes, integers in 0..K-1, shape (n,).
        num_bins: B, >= 1.

    Returns:
        A number in [0, 1]; 0 is calibrated as far as the bins can tell.

    Raises:
        ValueError: If there is no document, a row is not a probability distribution (to 1e-6), shapes do not fit, a
            label is outside 0..K-1, or num_bins < 1.
    """
    bins, gaps = _calibration_gaps(probabilities, labels, num_bins)
    # n_b (accuracy_b - confidence_b) is the sum of the gaps of the bin's documents.
    return float(np.abs(np.bincount(bins, weights=gaps)).sum() / len(gaps))


def balanced_accuracy(values: ArrayLike, labels: ArrayLike, num_classes: int) -> float:
    """Return the mean, over the gold classes that occur, of the mean accuracy of the class's documents.

    Equal to scikit-learn's `balanced_accuracy_score` where nothing ties. A model that always says the same class, or
    scores all classes alike, gets 1/K' for K' classes that occur.

    Args:
        values: Accuracy of each document, in [0, 1], shape (n,), n >= 1; see `tie_aware_accuracy`.
        labels: Gold classes, integers in 0..K-1, shape (n,).
        num_classes: K.

    Raises:
        ValueError: If there is no document, a value is outside [0, 1], shapes do not fit, or a label is outside 0..K-1.
    """
    by_class = _by_occurring_class(values, labels, num_classes)
    # fsum rounds once, so the result does not depend on the order of the classes.
    return math.fsum(credit.mean() for credit in by_class) / len(by_class)


def balanced_accuracy_stderr(values: ArrayLike, labels: ArrayLike, num_classes: int) -> float:
    """Return the standard error of `balanced_accuracy`, √(Σ_c s²_c / n_c) / K', s²_c the variance in class c.

    It takes the number of documents of each class as given. Letting it vary too, as the bootstrap over documents does,
    changes the standard error only by terms of higher order in 1/n.

    Args:
        values: Accuracy of each document, in [0, 1], shape (n,), n >= 1.
        labels: Gold classes, integers in 0..K-1, shape (n,).
        num_classes: K.

    Returns:
        The standard error, or NaN where a class that occurs has only one document: its variance (divisor n_c - 1)
        cannot be estimated, and leaving it out would count it as zero.

    Raises:
        ValueError: As `balanced_accuracy`.
    """
    by_class = _by_occurring_class(values, labels, num_classes)
    if min(len(credit) for credit in by_class) < 2:
        return math.nan
    return math.sqrt(math.fsum(credit.var(ddof=1) / len(credit) for credit in by_class)) / len(by_class)


def majority_rate(labels: ArrayLike, num_classes: int) -> float:
    """Return the share of the commonest gold class: the accuracy of always saying that class.

    Args:
        labels: Gold classes, integers in 0..K-1, shape (n,), n >= 1.
        num_classes: K.

    Raises:
        ValueError: If there is no document or a label is outside 0..K-1.
    """
    gold = _checks.class_labels(labels, "labels", num_classes, None)
    if not gold.size:
        raise ValueError("labels is empty; the majority rate needs at least one document.")
    return float(np.bincount(gold).max() / gold.size)


def at_or_below_majority(accuracy: float, labels: ArrayLike, num_classes: int) -> bool:
    """Tell whether an accuracy on these documents is no better than always saying the commonest class.

    An accuracy of tied documents is a sum of thirds and the like: a model that scores three equally common classes alike
    may come out an ulp above 1/3. So accuracies within 1e-9 are equal, far less than any document counts.

    Args:
        accuracy: Mean accuracy over the documents, in [0, 1].
        labels: Gold classes, integers in 0..K-1, shape (n,), n >= 1.
        num_classes: K.

    Raises:
        ValueError: If the accuracy is outside [0, 1] or NaN, there is no document, or a label is outside 0..K-1.
    """
    if not -1e-9 <= accuracy <= 1 + 1e-9:
        raise ValueError(f"accuracy is {accuracy}; expected a share in [0, 1], not a percentage.")
    return bool(accuracy <= majority_rate(labels, num_classes) + 1e-9)


def confusion_matrix(labels: ArrayLike, predictions: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Count documents by gold class (rows) and predicted class (columns), shape (K, K)."""
    gold = _checks.class_labels(labels, "labels", num_classes, None)
    predicted = _checks.class_labels(predictions, "predictions", num_classes, len(gold))
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
        predictions: Predicted classes, likewise; or those of R runs, shape (n, R), for the mean macro-F1 of the runs.
        num_classes: K.
        draws: Number of bootstrap draws, >= 2.
        generator: Source of the draws; the global RNG is not read.

    Returns:
        Standard deviation of macro-F1 over the draws (divisor draws - 1).

    Raises:
        ValueError: If n < 2 or draws < 2, shapes do not fit, or a class is outside 0..K-1.
    """
    pairs = _pairs(labels, predictions, num_classes)
    if len(pairs) < 2 or draws < 2:
        raise ValueError(f"Got {len(pairs)} documents and {draws} draws; a standard error needs at least 2 of each.")
    return float(_bootstrap(pairs, _macro_f1_statistic(num_classes), draws, generator).std(ddof=1))


def bootstrap_interval(
    documents: ArrayLike,
    statistic: Statistic,
    *,
    draws: int = 10_000,
    level: float = 0.95,
    generator: np.random.Generator,
) -> Interval:
    """Return the percentile bootstrap interval of any metric that sees a document through p numbers.

    `mean_interval`, `macro_f1_interval`, `balanced_accuracy_interval` and `calibration_error_interval` are this function
    with a statistic. The result does not depend on the order of the documents, and is the same for the same state of the
    generator. Memory does not grow with draws × n.

    Args:
        documents: What the metric sees of each document, shape (n, p), n >= 2, finite.
        statistic: (distinct rows of documents (r, p), how often each was drawn (m, r) int64) -> the metric of each of
            the m resamples (m,). Rows of the counts sum to n.
        draws: Number of resamples; at least one must fall beyond each end, so >= 2 / (1 - level).
        level: Nominal coverage, in (0, 1).
        generator: Source of the draws; the global RNG is not read.

    Raises:
        ValueError: If n < 2, a number is not finite, there are too few draws, or the level is outside (0, 1).
    """
    rows = np.asarray(documents)
    if rows.ndim != 2 or len(rows) < 2:
        raise ValueError(
            f"documents has shape {rows.shape}; expected (documents, numbers), with at least 2 documents to resample."
        )
    _checks.refuse(~np.isfinite(rows), rows, "documents", "finite numbers.")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; expected a coverage between 0 and 1, such as 0.95.")
    # Rounded, for 2 / (1 - 0.9) is 20.000000000000004.
    needed = math.ceil(round(2 / (1 - level), 6))
    if draws < needed:
        raise ValueError(f"Got {draws} draws; an interval of level {level} needs at least {needed}, better 10,000.")
    drawn = _bootstrap(rows, statistic, draws, generator)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level)


def mean_interval(
    values: ArrayLike, *, draws: int = 10_000, level: float = 0.95, generator: np.random.Generator
) -> Interval:
    """Return the bootstrap interval of the mean of a number per document, such as accuracy or Brier score.

    Args:
        values: Finite numbers of shape (n,), n >= 2. Accuracies, of few distinct values, take milliseconds for any n;
            where most values differ, the time is about 10 ns × draws × n.
        draws: See `bootstrap_interval`, as for `level` and `generator`.

    Raises:
        ValueError: If the shape does not fit, or as `bootstrap_interval`.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1:
        raise ValueError(f"values has shape {numbers.shape}; expected (documents,).")
    return bootstrap_interval(numbers[:, np.newaxis], _mean_statistic, draws=draws, level=level, generator=generator)


def macro_f1_interval(
    labels: ArrayLike,
    predictions: ArrayLike,
    num_classes: int,
    *,
    draws: int = 10_000,
    level: float = 0.95,
    generator: np.random.Generator,
) -> Interval:
    """Return the bootstrap interval of `macro_f1`; arguments and errors as there and in `bootstrap_interval`."""
    pairs = _pairs(labels, predictions, num_classes)
    statistic = _macro_f1_statistic(num_classes)
    return bootstrap_interval(pairs, statistic, draws=draws, level=level, generator=generator)


def balanced_accuracy_interval(
    values: ArrayLike,
    labels: ArrayLike,
    num_classes: int,
    *,
    draws: int = 10_000,
    level: float = 0.95,
    generator: np.random.Generator,
) -> Interval:
    """Return the bootstrap interval of `balanced_accuracy`; arguments and errors as there and in `bootstrap_interval`.

    A class with few documents may be missing from a resample, whose mean is then over the other classes.
    """
    credit, gold = _credit_and_labels(values, labels, num_classes)
    rows = np.column_stack([gold, credit])
    return bootstrap_interval(rows, _balanced_statistic, draws=draws, level=level, generator=generator)


def calibration_error_interval(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    num_bins: int = 15,
    draws: int = 10_000,
    level: float = 0.95,
    generator: np.random.Generator,
) -> Interval:
    """Return the bootstrap interval of `expected_calibration_error`; arguments and errors as there.

    A resample adds its own noise to every bin, so its error is larger on average than that of the documents, as that is
    larger than the true one. For a model that is nearly calibrated the interval can lie wholly above the estimate: read
    its width, and no lower end as evidence against calibration.
    """
    bins, gaps = _calibration_gaps(probabilities, labels, num_bins)
    rows = np.column_stack([bins, gaps])
    return bootstrap_interval(rows, _calibration_statistic, draws=draws, level=level, generator=generator)


def _bootstrap(
    documents: NDArray[Any], statistic: Statistic, draws: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """The statistic of each of `draws` resamples of n documents (n, p), shape (draws,)."""
    # Sorted, so what is drawn does not depend on the order of the documents.
    distinct, counts = np.unique(documents, axis=0, return_counts=True)
    total, num_cells = len(documents), len(distinct)
    few = num_cells <= _ALWAYS_FEW or num_cells * _CELL_PER_DOCUMENT_COST <= total
    cell_of_document = None if few else np.repeat(np.arange(num_cells), counts)
    block = max(1, _DRAWN_AT_ONCE // (num_cells if few else total))
    results = np.empty(draws)
    for start in range(0, draws, block):
        size = min(block, draws - start)
        if cell_of_document is None:
            drawn = generator.multinomial(total, counts / total, size=size)
        else:
            cells = cell_of_document[generator.integers(total, size=(size, total))]
            cells += num_cells * np.arange(size)[:, np.newaxis]
            drawn = np.bincount(cells.ravel(), minlength=size * num_cells).reshape(size, num_cells)
        results[start : start + size] = statistic(distinct, drawn)
    return results


def _mean_statistic(distinct: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    return counts @ distinct[:, 0] / counts.sum(axis=1)


def _macro_f1_statistic(num_classes: int) -> Statistic:
    """Macro-F1 of documents seen as (label, prediction of each run), a mean over the runs."""

    def statistic(distinct: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        total = np.zeros(len(counts))
        for predictions in distinct.T[1:]:
            # Several distinct documents share a cell of this run's confusion matrix: a product with 0 and 1 adds them up.
            cells = np.eye(num_classes**2)[distinct[:, 0] * num_classes + predictions]
            total += _macro_f1_of_counts((counts @ cells).reshape(-1, num_classes, num_classes))
        return total / (distinct.shape[1] - 1)

    return statistic


def _balanced_statistic(distinct: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Balanced accuracy of documents seen as (label, accuracy), over the classes that a resample has."""
    member = (distinct[:, :1] == np.unique(distinct[:, 0])).astype(np.float64)
    sizes, credits = counts @ member, counts @ (member * distinct[:, 1:])
    return (credits / np.maximum(sizes, 1)).sum(axis=1) / (sizes > 0).sum(axis=1)


def _calibration_statistic(distinct: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Expected calibration error of documents seen as (bin, gap)."""
    member = (distinct[:, :1] == np.unique(distinct[:, 0])).astype(np.float64)
    return np.abs(counts @ (member * distinct[:, 1:])).sum(axis=1) / counts.sum(axis=1)


def _macro_f1_of_counts(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Macro-F1 of each confusion matrix in (m, K, K): F1_c = 2 TP_c / (gold_c + predicted_c)."""
    hits = np.diagonal(counts, axis1=1, axis2=2)
    support = counts.sum(axis=2) + counts.sum(axis=1)
    return (2 * hits / np.maximum(support, 1)).mean(axis=1)


def _pairs(labels: ArrayLike, predictions: ArrayLike, num_classes: int) -> NDArray[np.int64]:
    """Gold class and that predicted by each run, shape (n, 1 + R)."""
    gold = _checks.class_labels(labels, "labels", num_classes, None)
    of_runs = np.asarray(predictions)
    columns = of_runs.T if of_runs.ndim == 2 else [of_runs]
    return np.column_stack(
        [gold, *(_checks.class_labels(run, "predictions", num_classes, len(gold)) for run in columns)]
    )


def _credit_and_labels(
    values: ArrayLike, labels: ArrayLike, num_classes: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return accuracies in [0, 1] and classes of the same n >= 1 documents, or say what does not fit."""
    credit = np.asarray(values, dtype=np.float64)
    if credit.ndim != 1 or not credit.size:
        raise ValueError(f"values has shape {credit.shape}; expected (documents,), with at least one document.")
    _checks.refuse(~((credit >= 0) & (credit <= 1)), credit, "values", "an accuracy in [0, 1].")
    return credit, _checks.class_labels(labels, "labels", num_classes, len(credit))


def _by_occurring_class(values: ArrayLike, labels: ArrayLike, num_classes: int) -> list[NDArray[np.float64]]:
    """The accuracies of the documents of each class that has any."""
    credit, gold = _credit_and_labels(values, labels, num_classes)
    return [credit[gold == label] for label in np.unique(gold)]


def _calibration_gaps(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Bin of each document's confidence, and its accuracy minus its confidence; both of shape (n,)."""
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}; expected at least 1.")
    values = _distributions(probabilities)
    if not len(values):
        raise ValueError("probabilities has no rows; a calibration error needs at least one document.")
    confidence = values.max(axis=1)
    inner_edges = np.arange(1, num_bins) / num_bins
    bins = np.searchsorted(inner_edges, confidence, side="left")
    return bins.astype(np.int64), tie_aware_accuracy(values, labels).values - confidence


def _distributions(probabilities: ArrayLike) -> NDArray[np.float64]:
    """Return float64 of shape (n, K) whose rows are distributions, or say which one is not."""
    given = _checks.matrix(probabilities, "probabilities", axes=("documents", "classes"), may_be_empty=True)
    values = given.astype(np.float64, copy=False)
    proper = (values >= 0).all(axis=1) & (np.abs(values.sum(axis=1) - 1) <= 1e-6)
    if not proper.all():
        row = int(np.flatnonzero(~proper)[0])
        raise ValueError(f"probabilities[{row}] is {values[row]}; expected non-negative numbers that sum to 1.")
    return values
