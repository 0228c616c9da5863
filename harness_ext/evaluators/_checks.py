"""Checks of what the evaluators are given: each error names the argument and the entry, what it is, and what was expected.

Matrices that may be large are neither copied nor looked at as a whole: `matrix` checks the shape, and `finite_block` the
entries of a block of rows on its way to float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["BLOCK_NUMBERS", "class_labels", "finite_block", "log_scores", "matrix", "refuse", "row_blocks"]

BLOCK_NUMBERS = 2**20
"""float64 numbers of one block of rows (8 MiB)."""


def refuse(bad: NDArray[np.bool_], values: NDArray[Any], name: str, expected: str, *, first_row: int = 0) -> None:
    """Raise a ValueError for the first entry that is bad, if there is one.

    Args:
        bad: Which entries are, in the shape of `values`.
        values: Numbers of any shape but ().
        name: Of the argument.
        expected: End of the message: what was expected, and what to do, with a full stop.
        first_row: Row of the argument that `values` begins with.
    """
    if not bad.any():
        return
    position = np.argwhere(bad)[0]
    value = values[tuple(position)]
    position[0] += first_row
    raise ValueError(f"{name}{position.tolist()} is {'NaN' if np.isnan(value) else value}; expected {expected}")


def class_labels(
    labels: ArrayLike, name: str, num_classes: int, count: int | None, *, each: str = "row", advice: str = ""
) -> NDArray[np.int64]:
    """Return classes as int64 of shape (count,), or say which one is not in 0..K-1.

    Args:
        labels: Integers; of any dtype where there are none.
        name: Of the argument.
        num_classes: K.
        count: How many there must be; None for any number.
        each: What has a class each.
        advice: What to do about one that is no class.
    """
    values = np.asarray(labels)
    if values.ndim != 1 or (count is not None and len(values) != count):
        expected = "n" if count is None else count
        raise ValueError(f"{name} has shape {values.shape}; expected ({expected},), one class for each {each}.")
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} has dtype {values.dtype}; expected integers in 0..{num_classes - 1}.")
    outside = (values < 0) | (values >= num_classes)
    others = f" {int(outside.sum())} of {len(values)} are outside."
    refuse(outside, values, name, f"a class in 0..{num_classes - 1}.{others}{advice and f' {advice}'}")
    return values.astype(np.int64)


def matrix(
    values: ArrayLike,
    name: str,
    *,
    rows: int | None = None,
    columns: int | None = None,
    axes: tuple[str, str] = ("rows", "columns"),
    may_be_empty: bool = False,
) -> NDArray[np.floating[Any]]:
    """Return a real matrix, uncopied where it is floating already and else in float64, or say what its shape is.

    Args:
        values: At least one column.
        name: Of the argument.
        rows: How many there must be; None for any number.
        columns: Likewise.
        axes: What the rows and the columns are.
        may_be_empty: Whether it may have no rows.
    """
    found = np.asarray(values)
    fits = found.ndim == 2 and rows in {None, len(found)} and columns in {None, found.shape[1]}
    if not fits or not found.shape[1] or not (may_be_empty or len(found)):
        shape = f"({axes[0] if rows is None else rows}, {axes[1] if columns is None else columns})"
        nonzero = "" if may_be_empty else ", none of them zero"
        raise ValueError(f"{name} has shape {found.shape}; expected {shape}{nonzero}.")
    return found if np.issubdtype(found.dtype, np.floating) else found.astype(np.float64)


def log_scores(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return float64 of shape (n, columns), infinite or not but never NaN, or say where it is not."""
    scores = matrix(values, name, axes=("documents", "columns"), may_be_empty=True).astype(np.float64, copy=False)
    refuse(np.isnan(scores), scores, name, "a number. Look for NaN in the model's output first.")
    return scores


def row_blocks(*matrices: NDArray[Any]) -> list[slice]:
    """Return slices of the rows of matrices of one length, each small enough to be copied to float64."""
    step = max(1, BLOCK_NUMBERS // max(each.shape[1] for each in matrices))
    return [slice(start, start + step) for start in range(0, len(matrices[0]), step)]


def finite_block(values: NDArray[np.floating[Any]], rows: slice, name: str) -> NDArray[np.float64]:
    """Return some rows of a matrix in float64, or say which entry is not finite."""
    block = values[rows].astype(np.float64)
    refuse(
        ~np.isfinite(block),
        block,
        name,
        "finite numbers. float16 overflows where bfloat16 does not.",
        first_row=rows.start,
    )
    return block
