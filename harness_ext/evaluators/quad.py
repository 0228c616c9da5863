"""Plug-in Quad features: the g(s) of least Quad loss, with the model's p_f(·|s) for the true distribution.

Quad is a language-model objective that needs no partition function: for prompts s and their next tokens w,

    ℓ(g) = E_{s,w}[ -g(s)·φ_w + ½ ‖Φ g(s)‖² ],

with φ_w the rows of the output embedding Φ ∈ R^{V×d}. Source: Saunshi, Malladi, Arora (ICLR 2021), section 5. Its
optimum over all functions solves ΦᵀΦ g(s) = Φᵀp(·|s): linear in p, and all that Φg, the projection of p onto the column
span of Φ, can say of p. With p_f for p it needs Φᵀp_f, the conditional mean features, and no training; heads that are
trained on text are in `harness_ext.engine.quad_head`.

V appears nowhere: ‖Φg‖² = gᵀ(ΦᵀΦ)g, so what is asked for is `gram` = ΦᵀΦ. Scaling Φ by c scales g by 1/c. An output bias
or a cap on the logits changes p_f, which the conditional means should reflect, but has no place in Φg: a Quad head is
linear in Φ.

**ΦᵀΦ may be singular or nearly so.** With UΛUᵀ its eigendecomposition, (ΦᵀΦ)⁻¹ is read as the pseudo-inverse: only
directions whose eigenvalue exceeds rounding (d · machine epsilon of `gram` · the largest eigenvalue) are kept, with a
ridge or without. Φ maps the others to zero, so they carry no part of Φᵀp but its rounding, and neither the loss nor p can
tell them apart; leaving them out gives the minimiser of smallest norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness_ext.evaluators import _checks

__all__ = ["DEFAULT_RELATIVE_RIDGE", "QuadFeatures", "plug_in_quad"]

DEFAULT_RELATIVE_RIDGE = 1e-6
"""λ of `plug_in_quad` where none is given, as a multiple of the mean eigenvalue tr(ΦᵀΦ)/d.

It is a guard and not a regulariser: too small to move g where ΦᵀΦ is regular, it bounds the inverse where it nearly is
not. For SmolLM2-135M (d = 576) the eigenvalues of ΦᵀΦ are 0.035 to 288 times their mean, a condition number of 8.3e3; this
λ moves g by 1.3e-5 of its norm. A probe on g (SST-2, 2,000 training and 600 test documents) has the same accuracy for
every multiple tried from 0 to 0.01, where g has moved by 11 %; at 0.1 it is 0.5 points lower, at 1 1.2 points higher.
"""

_NOTABLE_ERROR = 0.01
"""Relative error of g, in its weakest direction, from which a note is made."""


@dataclass(frozen=True)
class QuadFeatures:
    """Plug-in Quad features and how well they are determined.

    Attributes:
        values: g(s) of each row, shape (n, d); float64 for float64 conditional means, else float32.
        ridge: The λ that was added to ΦᵀΦ, in the units of ΦᵀΦ.
        condition_number: Largest eigenvalue of ΦᵀΦ over its smallest within `rank`, before the ridge.
        rank: Eigenvalues of ΦᵀΦ above rounding; d for a regular one.
        notes: What could not be done as asked, in sentences.
    """

    values: NDArray[np.floating[Any]]
    ridge: float
    condition_number: float
    rank: int
    notes: tuple[str, ...]


def plug_in_quad(conditional_mean: ArrayLike, gram: ArrayLike, *, ridge: float | None = None) -> QuadFeatures:
    """Return g(s) = (ΦᵀΦ + λI)⁻¹ Φᵀp_f(·|s), the Quad optimum with the model's distribution for the true one.

    With λ > 0 it minimises the loss with ½λ‖g‖² added. All algebra is float64; rows are read and written in blocks.

    Args:
        conditional_mean: Φᵀp_f(·|s) of each prompt, shape (n, d).
        gram: ΦᵀΦ over the rows of Φ that p_f ranges over, shape (d, d), best in float64: eigenvalues below the rounding
            of its dtype are taken for zero.
        ridge: λ >= 0, in the units of `gram`. None: `DEFAULT_RELATIVE_RIDGE` times tr(ΦᵀΦ)/d.

    Returns:
        The features. A singular ΦᵀΦ, or conditional means whose rounding matters, is said in `notes`.

    Raises:
        ValueError: If shapes do not fit, an entry is not finite, `gram` is zero or not symmetric positive
            semi-definite, or `ridge` is negative.
    """
    eigen = _eigendecomposition(gram)
    means = _checks.matrix(conditional_mean, "conditional_mean", columns=len(eigen.basis), may_be_empty=True)
    added = _ridge(ridge, eigen.mean)
    notes = _rank_notes(eigen, ridge=added)
    # An error ε ‖Φᵀp‖ of the conditional means becomes ε ‖Φᵀp‖ / (λ_min + λ) in g, whose norm is at least
    # ‖Φᵀp‖ / (λ_max + λ). This is the worst case: Φᵀp all in the strongest direction.
    amplification = (eigen.values[-1] + added) / (eigen.values[0] + added)
    error = amplification * float(np.finfo(means.dtype).eps)
    if error > _NOTABLE_ERROR:
        notes.append(
            f"The inverse of ΦᵀΦ + {added:.3g} I amplifies the rounding of {means.dtype} conditional means to as much as "
            f"{error:.2g} of g; compute them in float64, or raise ridge (tr(ΦᵀΦ)/d is {eigen.mean:.3g})."
        )
    inverse = (eigen.basis / (eigen.values + added)) @ eigen.basis.T
    features = np.empty(means.shape, dtype=np.float64 if means.dtype == np.float64 else np.float32)
    for rows in _checks.row_blocks(means):
        features[rows] = _checks.finite_block(means, rows, "conditional_mean") @ inverse
    return QuadFeatures(
        values=features,
        ridge=added,
        condition_number=float(eigen.values[-1] / eigen.values[0]),
        rank=len(eigen.values),
        notes=tuple(notes),
    )


class _Eigendecomposition(NamedTuple):
    """Of a symmetric positive semi-definite (d, d) matrix, without its kernel.

    Attributes:
        values: Eigenvalues above rounding, ascending, shape (r,), r >= 1.
        basis: Their eigenvectors in columns, shape (d, r).
        mean: Mean of all d eigenvalues, tr/d.
        dtype: Of the matrix as it came; decides what counts as rounding.
    """

    values: NDArray[np.float64]
    basis: NDArray[np.float64]
    mean: float
    dtype: np.dtype[Any]


def _eigendecomposition(gram: ArrayLike) -> _Eigendecomposition:
    """Eigendecomposition in float64, or what keeps the matrix from being a Gram matrix."""
    given = np.asarray(gram)
    symmetric = _symmetric(given)
    values, basis = np.linalg.eigh(symmetric)
    dtype = given.dtype if np.issubdtype(given.dtype, np.floating) else np.dtype(np.float64)
    # The rule of numpy's matrix_rank, with the precision in which the matrix was formed.
    rounding = len(values) * float(np.finfo(dtype).eps) * float(np.abs(values).max())
    if values[0] < -rounding:
        raise ValueError(
            f"gram has the negative eigenvalue {values[0]:.3g} (largest {values[-1]:.3g}), so it is no ΦᵀΦ. "
            "Pass it in the dtype in which it was accumulated, float32 or better float64: that decides what is rounding."
        )
    kept = values > rounding
    if not kept.any():
        raise ValueError("gram is zero; expected ΦᵀΦ of an output embedding that is not zero.")
    return _Eigendecomposition(
        values=values[kept], basis=basis[:, kept], mean=float(np.trace(symmetric)) / len(values), dtype=dtype
    )


def _rank_notes(eigen: _Eigendecomposition, *, ridge: float) -> list[str]:
    """What to say of a matrix that is singular as far as its dtype tells."""
    rank, size = len(eigen.values), len(eigen.basis)
    if rank == size:
        return []
    precision = "" if eigen.dtype == np.float64 else f" In float64 it may have more: it came as {eigen.dtype}."
    inverse = "the pseudo-inverse" if not ridge else f"the inverse with ridge {ridge:.3g} on its range"
    return [
        f"ΦᵀΦ has rank {rank} of {size}, so {inverse} was used: of all minimisers the one of smallest norm.{precision}"
    ]


def _symmetric(gram: NDArray[Any]) -> NDArray[np.float64]:
    """Return the matrix as float64, exactly symmetric, or say why it is not a symmetric one."""
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or not gram.size:
        raise ValueError(f"gram has shape {gram.shape}; expected a square matrix (d, d).")
    values = gram.astype(np.float64)
    _checks.refuse(~np.isfinite(values), values, "gram", "finite numbers.")
    # Products in float32 are symmetric to rounding only.
    gap = float(np.abs(values - values.T).max())
    if gap > 1e-4 * float(np.abs(values).max()):
        raise ValueError(f"gram is not symmetric: entries differ by {gap:.3g} from their mirror images.")
    return (values + values.T) / 2


def _ridge(ridge: float | None, mean_eigenvalue: float) -> float:
    """Return the ridge, the default one for None."""
    if ridge is None:
        return DEFAULT_RELATIVE_RIDGE * mean_eigenvalue
    if not (np.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"ridge is {ridge}; expected a finite number >= 0.")
    return float(ridge)
