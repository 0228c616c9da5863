"""The leading directions of features that are too many to hold, such as p_f(·|s) over a whole vocabulary.

A ridge-penalised linear model of x ∈ R^V whose columns are all scaled alike does not change when x is rotated, and its
weights lie in the span of the training rows. So features V_k x of the k ≤ n directions along which the training rows
vary give the fit on all V columns: exactly where k is their rank, and else without what the rows have outside, whose
share of the variance is measured. A fit that leaves out the residuals E (n, V) of the rows changes the logits by C E Eᵀr,
r the vector of the loss's derivatives, |r| ≤ 1: directions of variance ν count where n ν C is not small against 1.

Rows come in blocks and are seen twice, however many there are. The first pass finds an orthonormal basis of the rows of
Yᵀ X̃, with X̃ the centred rows and Y = X̃ Ω (n, k) a random sketch of them; Ω adds every column with a random sign to one of
k sums, at a cost of n V. That is randomised range finding of X̃ᵀ with half a step of power iteration (Halko, Martinsson &
Tropp 2011, section 4.5; sparse sketches: Clarkson & Woodruff 2013). Where there are no more than k rows, they themselves
are the basis; where there are no more than k columns, every direction is kept. The second pass multiplies by the basis,
and the principal axes of what comes out are the directions.
On p_f of SmolLM2-135M over SST-2 (6,920 × 49,152) k = 1,024 leaves out 2.2e-4 of the variance, the best basis of that
size 1.4e-4, and a sketch of the rows alone, without Y, 4.2e-4.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness_ext.evaluators._solvers import full_precision

__all__ = ["Directions", "leading_directions"]

Blocks = Callable[[], Iterator[NDArray[np.float32]]]
"""Each call yields the same rows in the same order, in blocks of shape (rows, V), which are overwritten."""

_RESOLUTION = 1e-14
"""Of squared singular values, relative to the largest: about float32's resolution of the singular values themselves."""

_NOTHING_VARIES = "all rows are equal, so there is no direction along which they vary"

_BLOCK_NUMBERS = 2**22
"""Numbers converted to float64 at once."""


@dataclass(frozen=True)
class Directions:
    """An affine map of features to their coordinates along orthonormal directions.

    Attributes:
        mean: Mean of the rows that the directions are of, float32, shape (V,).
        basis: Orthonormal directions in its rows, by descending variance, float32, shape (k, V).
        variance_left_out: Share of the rows' variance outside the directions, in [0, 1].
    """

    mean: Tensor
    basis: Tensor
    variance_left_out: float

    def coordinates(self, blocks: Blocks, num_rows: int) -> NDArray[np.float32]:
        """Return (x - mean)·basisᵀ for all rows, shape (num_rows, k)."""
        result = np.empty((num_rows, len(self.basis)), dtype=np.float32)
        start = 0
        with full_precision():
            for block in blocks():
                result[start : start + len(block)] = (_less(block, self.mean) @ self.basis.T).cpu().numpy()
                start += len(block)
        return result


def leading_directions(
    blocks: Blocks, num_rows: int, most: int, *, device: torch.device | str = "cpu"
) -> tuple[Directions, NDArray[np.float32]]:
    """Find the leading directions of rows of V features; see the module. The draw is the same in every run.

    Beside the blocks, memory holds most·V + num_rows·most float32 numbers.

    Args:
        blocks: The rows, finite. It is called twice.
        num_rows: How many there are, n >= 1.
        most: Limit on k, >= 1.
        device: Where to compute; it needs float64.

    Returns:
        The directions, and the coordinates of the rows, float32 of shape (n, k). There is at least one direction.

    Raises:
        ValueError: If all rows are equal.
    """
    with full_precision():
        mean, basis = _orthonormal_basis(blocks, num_rows, most, torch.device(device))
        coordinates = torch.empty((num_rows, len(basis)))
        total = kept = 0.0
        start = 0
        for block in blocks():
            centred = _less(block, mean)
            of_block = centred @ basis.T
            total += float(centred.square().sum(dtype=torch.float64))
            kept += float(of_block.square().sum(dtype=torch.float64))
            coordinates[start : start + len(block)] = of_block.cpu()
            start += len(block)
        if total <= num_rows * float(mean.double().square().sum()) * _RESOLUTION:
            raise ValueError(_NOTHING_VARIES)
        axes = _principal_axes(coordinates)
        for rows in _slices(num_rows, coordinates.shape[1]):
            coordinates[rows] = coordinates[rows] @ axes
        _transform(basis, axes.T.to(basis.device))
    return Directions(mean, basis, max(0.0, 1.0 - kept / total)), coordinates.numpy()


def _orthonormal_basis(blocks: Blocks, num_rows: int, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first pass: return the rows' mean (V,) and an orthonormal basis (k, V)."""
    stream = blocks()
    first = next(stream)
    dim = first.shape[1]
    # Any shift does, as the mean is taken out at the end; one close to the mean spares digits.
    shift = torch.from_numpy(first).to(device).mean(dim=0)
    row_sum = torch.zeros(dim, dtype=torch.float64, device=device)
    by_row = num_rows <= min(most, dim)
    size = num_rows if by_row else min(most, dim)
    sketch = torch.zeros((size, dim), device=device)
    sketch_sum = torch.full((size,), float(by_row), dtype=torch.float64, device=device)
    generator = torch.Generator().manual_seed(0)
    # Twice as many sums as wanted: the second half counts with a minus sign.
    bucket = torch.randint(2 * size, (dim,), generator=generator).to(device)
    start = 0
    for block in itertools.chain([first], stream):
        rows = _less(block, shift)
        row_sum += rows.sum(dim=0, dtype=torch.float64)
        if by_row:
            sketch[start : start + len(rows)] = rows
        elif size < dim:
            plus, minus = torch.zeros((len(rows), 2 * size), device=device).index_add_(1, bucket, rows).chunk(2, dim=1)
            mixed = plus - minus
            sketch_sum += mixed.sum(dim=0, dtype=torch.float64)
            sketch += mixed.T @ rows
        start += len(rows)
    mean = row_sum / num_rows
    if not by_row and size == dim:
        return (shift + mean).float(), torch.eye(dim, device=device)
    # Yᵀ(X - 1 mᵀ) = YᵀX - (Yᵀ1) mᵀ, with X the shifted rows and m their mean. Of the rows themselves, Y is the identity.
    for columns in _slices(dim, size):
        sketch[:, columns] -= (sketch_sum[:, None] * mean[columns]).float()
    return (shift + mean).float(), _orthonormal(_orthonormal(sketch))


def _orthonormal(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the rows' span, in their memory; twice gives it to the last digit.

    From the eigenvectors of the Gram matrix, which cost far less than Householder reflections of long rows.

    Raises:
        ValueError: If there is no row but zero.
    """
    gram = torch.zeros((len(rows), len(rows)), dtype=torch.float64, device=rows.device)
    for columns in _slices(rows.shape[1], len(rows)):
        part = rows[:, columns].double()
        gram += part @ part.T
    values, vectors = torch.linalg.eigh(gram)
    kept = values > values[-1] * _RESOLUTION
    if not float(values[-1]) > 0:
        raise ValueError(_NOTHING_VARIES)
    return _transform(rows, (vectors[:, kept] / values[kept].sqrt()).float().T)


def _transform(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return matrix @ rows, of no more rows than there were, in the memory of the rows."""
    for columns in _slices(rows.shape[1], len(rows)):
        rows[: len(matrix), columns] = matrix @ rows[:, columns]
    return rows[: len(matrix)]


def _principal_axes(coordinates: Tensor) -> Tensor:
    """Return the eigenvectors of ZᵀZ in columns, by descending eigenvalue, float32 of shape (k, k)."""
    gram = torch.zeros((coordinates.shape[1],) * 2, dtype=torch.float64)
    for rows in _slices(*coordinates.shape):
        part = coordinates[rows].double()
        gram += part.T @ part
    return torch.linalg.eigh(gram).eigenvectors.flip(1).float()


def _less(block: NDArray[np.float32], mean: Tensor) -> Tensor:
    """Return the block less the mean, on the mean's device; on the CPU, in the block's memory."""
    return torch.from_numpy(block).to(mean.device).sub_(mean)


def _slices(length: int, width: int) -> Iterator[slice]:
    """Yield slices of a dimension that has `width` numbers an entry."""
    step = max(1, _BLOCK_NUMBERS // width)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
