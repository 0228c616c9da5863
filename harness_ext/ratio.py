"""The ratio of two sums over documents, and its standard error: a mean over tokens of what is known document by document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Ratio", "ratio_of_sums"]


class Ratio(NamedTuple):
    """Σ a_i / Σ b_i, and its standard error over documents; NaN where it cannot be computed."""

    value: float
    stderr: float


def ratio_of_sums(numerators: Sequence[float] | np.ndarray, denominators: Sequence[float] | np.ndarray) -> Ratio:
    """Estimate E[a] / E[b] from n independent pairs.

    The error is that of the delta method, √(Σ r_i² / (n (n − 1))) / b̄ with r_i = a_i − value · b_i. Where all b_i are equal,
    value and error are those of the mean of a_i / b_i.

    Args:
        numerators: a, shape (n,).
        denominators: b, shape (n,).

    Returns:
        The estimate. The value is NaN if Σ b_i = 0 or n = 0, the error also if n = 1.

    Raises:
        ValueError: If the two differ in length.
    """
    a, b = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"expected two vectors of one length, got shapes {a.shape} and {b.shape}")
    total = b.sum()
    if len(a) == 0 or total == 0:
        return Ratio(float("nan"), float("nan"))
    value = a.sum() / total
    if len(a) == 1:
        return Ratio(float(value), float("nan"))
    residuals = a - value * b
    variance = (residuals @ residuals) / (len(a) * (len(a) - 1))
    return Ratio(float(value), float(np.sqrt(variance) / abs(b.mean())))
