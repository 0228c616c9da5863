"""Statistics of scores: intervals, paired comparisons on the same documents, and aggregates over tasks. Pure.

Sources: exact McNemar test, McNemar (1947); interval of Wilson (1927); mean win rate, HELM (Liang et al., 2023); Borda (1781).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "DRAWS",
    "PairedDifference",
    "borda",
    "interval",
    "mcnemar_exact",
    "normalised",
    "paired_bootstrap",
    "wilson",
    "win_rates",
]

DRAWS = 10_000
"""Of a bootstrap: the ends of a percentile interval then vary by about 1 % of its width from seed to seed."""

_Z = 1.959963984540054
"""The normal quantile of 97.5 %."""


def wilson(successes: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion.

    Args:
        successes: Between 0 and `count`; fractions are allowed, as tied documents count in part.
        count: Documents, >= 1.

    Raises:
        ValueError: If they are out of range.
    """
    if count < 1 or not 0 <= successes <= count:
        raise ValueError(f"expected 0 <= successes <= count and count >= 1, got {successes} of {count}")
    rate = successes / count
    spread = 1 + _Z**2 / count
    centre = (rate + _Z**2 / (2 * count)) / spread
    half = _Z * math.sqrt(rate * (1 - rate) / count + _Z**2 / (4 * count**2)) / spread
    # At 0 and 1 the ends are exact; rounding could leave them 1e-17 outside.
    return (0.0 if rate == 0 else max(centre - half, 0.0)), (1.0 if rate == 1 else min(centre + half, 1.0))


def interval(
    value: float, stderr: float | None, count: int | None, *, bounded: bool, is_share: bool
) -> tuple[float, float] | None:
    """The 95 % interval of a score.

    By its standard error; for a share of documents without one, or with one of 0 (all documents right, or all wrong), Wilson's.
    Other scores, such as F1, are no binomial and have none then.

    Args:
        value: The score.
        stderr: Its standard error; None if unknown.
        count: Documents; None if unknown.
        bounded: Whether the score lies in [0, 1]; the interval is cut there, unless the score lies outside after all.
        is_share: Whether the score is a share of documents.

    Returns:
        Lower and upper end, around the score; None if neither way is open.
    """
    is_inside = 0 <= value <= 1
    if is_share and is_inside and not stderr and count:
        low, high = wilson(value * count, count)
        # Of the rounding of value * count.
        return min(low, value), max(high, value)
    if not stderr:
        return None
    low, high = value - _Z * stderr, value + _Z * stderr
    return (max(low, 0.0), min(high, 1.0)) if bounded and is_inside else (low, high)


def mcnemar_exact(first_only: int, second_only: int) -> float:
    """Two-sided exact McNemar test: the p-value of the hypothesis that two models err equally often.

    Given the number n of discordant documents, the number that only the first has right is Binomial(n, 1/2); p is twice the
    smaller tail, at most 1. Computed in whole numbers.

    Args:
        first_only: Documents that only the first model has right.
        second_only: Documents that only the second one has right.

    Returns:
        p; 1 for no discordant document.

    Raises:
        ValueError: If a count is negative.
    """
    if first_only < 0 or second_only < 0:
        raise ValueError(f"expected counts of at least 0, got {first_only} and {second_only}")
    total = first_only + second_only
    term, tail = 1, 0
    for k in range(min(first_only, second_only) + 1):
        tail += term
        term = term * (total - k) // (k + 1)
    doubled = 2 * tail
    if doubled >= 1 << total:
        return 1.0
    # Whole numbers of any size divide exactly rounded in Python.
    return doubled / (1 << total)


@dataclass(frozen=True)
class PairedDifference:
    """A mean difference over documents, second less first.

    Attributes:
        value: The mean.
        low, high: Ends of the 95 % percentile bootstrap interval; None for fewer than two documents.
        num_documents: n.
    """

    value: float
    low: float | None
    high: float | None
    num_documents: int


def paired_bootstrap(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    *,
    rng: np.random.Generator,
    draws: int = DRAWS,
) -> PairedDifference:
    """Bootstrap the mean difference of two models over the documents they share.

    Differences take few distinct values (-1, 0, 1 for right and wrong), so a resample is a draw of how often each occurs.

    Args:
        first: Scores of a document each, shape (n,).
        second: Likewise, of the same documents in the same order.
        rng: Source of the resamples.
        draws: Of resamples, >= 100.

    Raises:
        ValueError: If shapes differ, n is 0, or there are too few draws.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or len(a) == 0:
        raise ValueError(f"expected two vectors of one length of at least 1, got shapes {a.shape} and {b.shape}")
    if draws < 100:
        raise ValueError(f"expected at least 100 draws, got {draws}")
    values, counts = np.unique(b - a, return_counts=True)
    mean = float(values @ counts / len(a))
    if len(a) < 2:
        return PairedDifference(mean, None, None, len(a))
    means = rng.multinomial(len(a), counts / len(a), size=draws) @ values / len(a)
    low, high = np.quantile(means, [0.025, 0.975])
    return PairedDifference(mean, float(low), float(high), len(a))


def normalised(value: float, chance: float) -> float:
    """0 at chance, 1 at all right, negative below chance: (value - chance) / (1 - chance).

    Raises:
        ValueError: If chance is not in [0, 1).
    """
    if not 0 <= chance < 1:
        raise ValueError(f"chance is {chance}, expected a rate of at least 0 and below 1")
    return (value - chance) / (1 - chance)


def win_rates(scores: np.ndarray, higher_is_better: Sequence[bool]) -> np.ndarray:
    """Mean over tasks of the share of the other models that a model beats, a tie counting half.

    Args:
        scores: Shape (models, tasks), all finite: models that lack a task have no part in it.
        higher_is_better: By task.

    Returns:
        Shape (models,), in [0, 1]; NaN for a single model.
    """
    if len(scores) < 2:
        return np.full(len(scores), np.nan)
    return _beaten(scores, higher_is_better).mean(axis=1) / (len(scores) - 1)


def borda(scores: np.ndarray, higher_is_better: Sequence[bool]) -> np.ndarray:
    """Sum over tasks of the number of models that a model beats, a tie counting half; arguments as in `win_rates`."""
    return _beaten(scores, higher_is_better).sum(axis=1)


def _beaten(scores: np.ndarray, higher_is_better: Sequence[bool]) -> np.ndarray:
    """How many models each beats on each task, (models, tasks): its rank from below less 1, ties at their mean rank."""
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2 or scores.shape[1] != len(higher_is_better) or scores.shape[1] == 0:
        raise ValueError(f"expected scores of shape (models, tasks), {len(higher_is_better)} tasks, got {scores.shape}")
    if not np.isfinite(scores).all():
        raise ValueError("a score is not finite; leave models that lack a task out")
    better = np.where(np.asarray(higher_is_better), scores, -scores)
    beaten = np.empty_like(better)
    for task, column in enumerate(better.T):
        ordered = np.sort(column)
        below, up_to = np.searchsorted(ordered, column, "left"), np.searchsorted(ordered, column, "right")
        # Those below, and half of those that tie but itself.
        beaten[:, task] = below + (up_to - below - 1) / 2
    return beaten
