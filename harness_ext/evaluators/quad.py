"""Features g(s) that minimise the Quad loss, from Φᵀp_f(·|s) or from states, and the loss itself.

Quad is a language-model objective that needs no partition function: for prompts s and their next tokens w,

    ℓ(g) = E_{s,w}[ -g(s)·φ_w + ½ ‖Φ g(s)‖² ],

with φ_w the rows of the output embedding Φ ∈ R^{V×d}. Source: Saunshi, Malladi, Arora (ICLR 2021), section 5. Its
optimum over all functions solves ΦᵀΦ g(s) = Φᵀp(·|s): linear in p, and all that Φg, the projection of p onto the column
span of Φ, can say of p. Three ways to it are here:

- `plug_in_quad`: the model's own p_f in the place of p. It needs Φᵀp_f, the conditional mean features, and no training.
- `LinearQuadStatistics`: the best linear function of a state, in closed form from sums over text.
- `quad_loss`: the objective for any other head, such as an MLP trained on it.

V appears nowhere: ‖Φg‖² = gᵀ(ΦᵀΦ)g, so every function takes `gram` = ΦᵀΦ. Scaling Φ by c scales g by 1/c and leaves the
loss; the loss has no unit (it is not in nats). An output bias or a cap on the logits changes p_f, which the conditional
means should reflect, but has no place in Φg: a Quad head is linear in Φ.

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

__all__ = [
    "DEFAULT_RELATIVE_RIDGE",
    "LinearQuadHead",
    "LinearQuadStatistics",
    "QuadFeatures",
    "QuadLossTerms",
    "plug_in_quad",
    "quad_loss",
    "quad_loss_terms",
]

DEFAULT_RELATIVE_RIDGE = 1e-6
"""λ of `plug_in_quad` where none is given, as a multiple of the mean eigenvalue tr(ΦᵀΦ)/d.

It is a guard and not a regulariser: too small to move g where ΦᵀΦ is regular, it bounds the inverse where it nearly is
not. For SmolLM2-135M (d = 576) the eigenvalues of ΦᵀΦ are 0.035 to 288 times their mean, a condition number of 8.3e3; this
λ moves g by 1.3e-5 of its norm. A probe on g (SST-2, 2,000 training and 600 test documents) has the same accuracy for
every multiple tried from 0 to 0.01, where g has moved by 11 %; at 0.1 it is 0.5 points lower, at 1 1.2 points higher.
"""

_NOTABLE_ERROR = 0.01
"""Relative error of g, in its weakest direction, from which a note is made."""

_BLOCK_NUMBERS = 2**20
"""float64 numbers of one block of rows (8 MiB)."""


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


class QuadLossTerms(NamedTuple):
    """The two terms of the Quad loss of each row, float64 of shape (n,); their sum is the row's loss.

    Attributes:
        linear: -g·φ_w.
        quadratic: ½ ‖Φg‖², >= 0.
    """

    linear: NDArray[np.float64]
    quadratic: NDArray[np.float64]


@dataclass(frozen=True)
class LinearQuadHead:
    """The linear function g(s) = W h(s) + b of least Quad loss.

    Attributes:
        weight: W, float64 of shape (d, k).
        bias: b, float64 of shape (d,); zero where none was asked for.
        loss: Quad loss over the rows that it was solved from, without the ridges.
        ridge: The λ that was added to ΦᵀΦ.
        state_ridge: The μ that was added to E[h hᵀ].
        rank: Rank of ΦᵀΦ.
        state_rank: Rank of E[h hᵀ], with a row and column for the bias where there is one.
        num_rows: Number of rows that it was solved from.
        notes: What could not be done as asked, in sentences.
    """

    weight: NDArray[np.float64]
    bias: NDArray[np.float64]
    loss: float
    ridge: float
    state_ridge: float
    rank: int
    state_rank: int
    num_rows: int
    notes: tuple[str, ...]

    def features(self, states: ArrayLike) -> NDArray[np.floating[Any]]:
        """Return W h + b for states of shape (n, k): shape (n, d), float64 for float64 states, else float32.

        Raises:
            ValueError: If the states do not have k columns or are not finite.
        """
        return _linear_map(_rows(states, "states", self.weight.shape[1]), "states", self.weight.T, self.bias)


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
    eigen = _eigendecomposition(gram, "gram")
    means = _rows(conditional_mean, "conditional_mean", len(eigen.basis))
    added = _ridge(ridge, eigen.mean)
    notes = [*_rank_notes(eigen, "ΦᵀΦ", ridge=added)]
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
    return QuadFeatures(
        values=_linear_map(means, "conditional_mean", inverse, None),
        ridge=added,
        condition_number=float(eigen.values[-1] / eigen.values[0]),
        rank=len(eigen.values),
        notes=tuple(notes),
    )


def quad_loss_terms(features: ArrayLike, next_embeddings: ArrayLike, gram: ArrayLike) -> QuadLossTerms:
    """Return -g·φ_w and ½‖Φg‖² of each row, for a mean or its standard error.

    Args:
        features: g(s), shape (n, d).
        next_embeddings: φ_w of the token that follows each prompt, shape (n, d).
        gram: ΦᵀΦ, shape (d, d).

    Raises:
        ValueError: If shapes do not fit, an entry is not finite, or `gram` is not symmetric.
    """
    products = _symmetric(gram, "gram")
    values = _rows(features, "features", len(products))
    targets = _rows(next_embeddings, "next_embeddings", len(products), count=len(values))
    linear, quadratic = np.empty(len(values)), np.empty(len(values))
    for rows in _blocks(values):
        block, target = _finite(values, rows, "features"), _finite(targets, rows, "next_embeddings")
        linear[rows] = -np.einsum("nd,nd->n", block, target)
        quadratic[rows] = 0.5 * np.einsum("nd,nd->n", block @ products, block)
    # gᵀ(ΦᵀΦ)g of a g in the kernel of Φ may round to just below zero.
    return QuadLossTerms(linear=linear, quadratic=np.maximum(quadratic, 0.0))


def quad_loss(features: ArrayLike, next_embeddings: ArrayLike, gram: ArrayLike) -> float:
    """Return the Quad loss, the mean over rows of -g·φ_w + ½‖Φg‖²; arguments and errors as `quad_loss_terms`.

    Zero for g = 0, so a loss above zero is worse than no features at all.

    Raises:
        ValueError: If there is no row.
    """
    terms = quad_loss_terms(features, next_embeddings, gram)
    if not terms.linear.size:
        raise ValueError("features has no row; expected at least one prompt and its next token.")
    return float(np.mean(terms.linear + terms.quadratic))


class LinearQuadStatistics:
    """Sums over (state, next token) pairs from which linear Quad heads are solved and scored, without the pairs.

    The loss of g(s) = W h(s) needs the data only through C = E[φ_w hᵀ] and S = E[h hᵀ]:

        ℓ(W) = -tr(WᵀC) + ½ tr(Wᵀ(ΦᵀΦ)W S),      minimal at  W = (ΦᵀΦ)⁻¹ C S⁻¹.

    A constant 1 is kept as a last coordinate of h, so that a bias can be had or not from the same sums. They are float64
    and take (d + k + 1)(k + 1) numbers.
    """

    def __init__(self, state_dim: int, embedding_dim: int) -> None:
        """Start with no rows.

        Args:
            state_dim: k, the size of a state h, >= 1.
            embedding_dim: d, the size of φ_w, >= 1; the two need not agree.
        """
        if state_dim < 1 or embedding_dim < 1:
            raise ValueError(f"state_dim is {state_dim} and embedding_dim {embedding_dim}; expected both to be >= 1.")
        self.state_dim = state_dim
        self.embedding_dim = embedding_dim
        self.num_rows = 0
        self._cross = np.zeros((embedding_dim, state_dim + 1))
        self._second = np.zeros((state_dim + 1, state_dim + 1))

    def add(self, states: ArrayLike, next_embeddings: ArrayLike) -> None:
        """Add m pairs; nothing is added where an error is raised.

        Args:
            states: h, shape (m, k).
            next_embeddings: φ_w of the token that follows each, shape (m, d).

        Raises:
            ValueError: If shapes do not fit or an entry is not finite.
        """
        values = _rows(states, "states", self.state_dim)
        targets = _rows(next_embeddings, "next_embeddings", self.embedding_dim, count=len(values))
        cross, second = np.zeros_like(self._cross), np.zeros_like(self._second)
        for rows in _blocks(values):
            block, target = _finite(values, rows, "states"), _finite(targets, rows, "next_embeddings")
            augmented = np.concatenate([block, np.ones((len(block), 1))], axis=1)
            cross += target.T @ augmented
            second += augmented.T @ augmented
        self._cross += cross
        self._second += second
        self.num_rows += len(values)

    def merge(self, other: LinearQuadStatistics) -> None:
        """Add the pairs of another accumulator, such as another process's.

        Raises:
            ValueError: If the sizes differ.
        """
        here, there = (self.state_dim, self.embedding_dim), (other.state_dim, other.embedding_dim)
        if here != there:
            raise ValueError(
                f"The other statistics are for (state_dim, embedding_dim) = {there}; these are for {here}."
            )
        self._cross += other._cross
        self._second += other._second
        self.num_rows += other.num_rows

    @property
    def cross_moment(self) -> NDArray[np.float64]:
        """E[φ_w hᵀ], shape (d, k).

        Raises:
            ValueError: If there are no rows.
        """
        return self._mean(self._cross)[:, :-1]

    @property
    def second_moment(self) -> NDArray[np.float64]:
        """E[h hᵀ], shape (k, k).

        Raises:
            ValueError: If there are no rows.
        """
        return self._mean(self._second)[:-1, :-1]

    def solve(
        self, gram: ArrayLike, *, ridge: float | None = None, state_ridge: float = 0.0, bias: bool = False
    ) -> LinearQuadHead:
        """Return W = (ΦᵀΦ + λI)⁻¹ E[φ_w hᵀ] (E[h hᵀ] + μI)⁻¹, and b likewise where a bias is asked for.

        λ adds ½λ‖g(s)‖² to the loss; μ is the loss for states with independent noise of variance μ in every coordinate,
        which stands in for more rows where there are few. A singular E[h hᵀ], as of fewer rows than k, gives the solution
        of smallest norm.

        Args:
            gram: ΦᵀΦ, shape (d, d), best in float64.
            ridge: λ >= 0; None as in `plug_in_quad`.
            state_ridge: μ >= 0, in the units of E[h hᵀ]. The bias is not penalised.
            bias: Whether g has a constant term.

        Raises:
            ValueError: As `plug_in_quad`, or if there are no rows, all states are zero, or `state_ridge` is negative.
        """
        eigen = _eigendecomposition(gram, "gram")
        if len(eigen.basis) != self.embedding_dim:
            raise ValueError(
                f"gram has shape {np.shape(gram)}; expected {(self.embedding_dim, self.embedding_dim)}, as "
                "next_embeddings has that many columns."
            )
        added = _ridge(ridge, eigen.mean)
        noise = _ridge(state_ridge, 0.0, name="state_ridge")
        size = self.state_dim + bias
        # The constant is the last coordinate, so leaving it out is cutting it off.
        second = self._mean(self._second)[:size, :size] if bias else self.second_moment
        cross = self._mean(self._cross)[:, :size]
        second = second + np.diag(np.where(np.arange(size) < self.state_dim, noise, 0.0))
        # Unit diagonal first: a coordinate of large scale would else decide which others count as rounding.
        scale = np.sqrt(np.diagonal(second))
        scale = np.where(scale > 0, scale, 1.0)
        states = _eigendecomposition(second / np.outer(scale, scale), "E[h hᵀ]")
        right = ((states.basis / states.values) @ states.basis.T) / np.outer(scale, scale)
        left = (eigen.basis / (eigen.values + added)) @ eigen.basis.T
        solution = left @ cross @ right
        weight = solution[:, : self.state_dim]
        offset = solution[:, -1].copy() if bias else np.zeros(self.embedding_dim)
        notes = [*_rank_notes(eigen, "ΦᵀΦ", ridge=added)]
        if len(states.values) < size:
            notes.append(
                f"E[h hᵀ] of {self.num_rows} rows has rank {len(states.values)} of {size}; the weight is the one of "
                "smallest norm (in states scaled to unit second moment). Add rows, or set state_ridge."
            )
        return LinearQuadHead(
            weight=np.ascontiguousarray(weight),
            bias=offset,
            loss=self.loss(weight, gram, bias=offset if bias else None),
            ridge=added,
            state_ridge=noise,
            rank=len(eigen.values),
            state_rank=len(states.values),
            num_rows=self.num_rows,
            notes=tuple(notes),
        )

    def loss(self, weight: ArrayLike, gram: ArrayLike, *, bias: ArrayLike | None = None) -> float:
        """Return the Quad loss of g(s) = W h(s) + b over all rows so far, for any W.

        Args:
            weight: W, shape (d, k).
            gram: ΦᵀΦ, shape (d, d).
            bias: b, shape (d,). None: zero.

        Raises:
            ValueError: If shapes do not fit, an entry is not finite, or there are no rows.
        """
        products = _symmetric(gram, "gram")
        matrix = np.asarray(weight, dtype=np.float64)
        offset = np.zeros(self.embedding_dim) if bias is None else np.asarray(bias, dtype=np.float64)
        expected = (self.embedding_dim, self.state_dim)
        if matrix.shape != expected or offset.shape != expected[:1] or len(products) != expected[0]:
            raise ValueError(
                f"weight, bias and gram have shapes {matrix.shape}, {offset.shape} and {products.shape}; expected "
                f"{expected}, {expected[:1]} and {(expected[0], expected[0])}."
            )
        if not (np.isfinite(matrix).all() and np.isfinite(offset).all()):
            raise ValueError("weight or bias has an entry that is not finite; the loss of such a head is not a number.")
        head = np.concatenate([matrix, offset[:, np.newaxis]], axis=1)
        # -tr(WᵀC) + ½ tr(Wᵀ G W S), each trace of a product as a sum of entrywise products.
        linear = np.vdot(head, self._mean(self._cross))
        quadratic = np.vdot(products @ head, head @ self._mean(self._second))
        return float(0.5 * quadratic - linear)

    def _mean(self, total: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self.num_rows:
            raise ValueError("No rows were added; call add(states, next_embeddings) first.")
        return np.asarray(total / self.num_rows)


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


def _eigendecomposition(matrix: ArrayLike, name: str) -> _Eigendecomposition:
    """Eigendecomposition in float64, or what keeps the matrix from being a Gram matrix."""
    given = np.asarray(matrix)
    symmetric = _symmetric(given, name)
    values, basis = np.linalg.eigh(symmetric)
    dtype = given.dtype if np.issubdtype(given.dtype, np.floating) else np.dtype(np.float64)
    # The rule of numpy's matrix_rank, with the precision in which the matrix was formed.
    rounding = len(values) * float(np.finfo(dtype).eps) * float(np.abs(values).max())
    if values[0] < -rounding:
        raise ValueError(
            f"{name} has the negative eigenvalue {values[0]:.3g} (largest {values[-1]:.3g}), so it is no product AᵀA. "
            "Pass it in the dtype in which it was accumulated, float32 or better float64: that decides what is rounding."
        )
    kept = values > rounding
    if not kept.any():
        raise ValueError(f"{name} is zero; expected a matrix AᵀA with A not zero.")
    return _Eigendecomposition(
        values=values[kept], basis=basis[:, kept], mean=float(np.trace(symmetric)) / len(values), dtype=dtype
    )


def _rank_notes(eigen: _Eigendecomposition, name: str, *, ridge: float) -> list[str]:
    """What to say of a matrix that is singular as far as its dtype tells."""
    rank, size = len(eigen.values), len(eigen.basis)
    if rank == size:
        return []
    precision = "" if eigen.dtype == np.float64 else f" In float64 it may have more: it came as {eigen.dtype}."
    inverse = "the pseudo-inverse" if not ridge else f"the inverse with ridge {ridge:.3g} on its range"
    return [
        f"{name} has rank {rank} of {size}, so {inverse} was used: of all minimisers the one of smallest norm.{precision}"
    ]


def _symmetric(matrix: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return the matrix as float64, exactly symmetric, or say why it is not a symmetric one."""
    values = np.asarray(matrix)
    if values.ndim != 2 or values.shape[0] != values.shape[1] or not values.size:
        raise ValueError(f"{name} has shape {values.shape}; expected a square matrix (d, d).")
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise ValueError(f"{name}[{row}, {column}] is {values[row, column]}; expected finite numbers.")
    # Products in float32 are symmetric to rounding only.
    gap = float(np.abs(values - values.T).max())
    if gap > 1e-4 * float(np.abs(values).max()):
        raise ValueError(f"{name} is not symmetric: entries differ by {gap:.3g} from their mirror images.")
    return (values + values.T) / 2


def _ridge(ridge: float | None, mean_eigenvalue: float, *, name: str = "ridge") -> float:
    """Return the ridge, the default one for None."""
    if ridge is None:
        return DEFAULT_RELATIVE_RIDGE * mean_eigenvalue
    if not (np.isfinite(ridge) and ridge >= 0):
        raise ValueError(f"{name} is {ridge}; expected a finite number >= 0.")
    return float(ridge)


def _rows(values: ArrayLike, name: str, dim: int, *, count: int | None = None) -> NDArray[np.floating[Any]]:
    """Return a real matrix with `dim` columns, uncopied where it is floating already, or say what its shape is."""
    matrix = np.asarray(values)
    if matrix.ndim != 2 or matrix.shape[1] != dim or (count is not None and len(matrix) != count):
        raise ValueError(f"{name} has shape {matrix.shape}; expected ({'n' if count is None else count}, {dim}).")
    return matrix if np.issubdtype(matrix.dtype, np.floating) else matrix.astype(np.float64)


def _blocks(matrix: NDArray[Any]) -> list[slice]:
    """Slices of rows, each small enough to be copied to float64."""
    step = max(1, _BLOCK_NUMBERS // matrix.shape[1])
    return [slice(start, start + step) for start in range(0, len(matrix), step)]


def _finite(matrix: NDArray[np.floating[Any]], rows: slice, name: str) -> NDArray[np.float64]:
    """Return some rows in float64, or say which entry is not finite."""
    block = matrix[rows].astype(np.float64)
    if not np.isfinite(block).all():
        row, column = np.argwhere(~np.isfinite(block))[0]
        raise ValueError(
            f"{name}[{rows.start + row}, {column}] is {block[row, column]}; expected finite numbers. float16 overflows "
            "where bfloat16 does not."
        )
    return block


def _linear_map(
    matrix: NDArray[np.floating[Any]], name: str, transform: NDArray[np.float64], offset: NDArray[np.float64] | None
) -> NDArray[np.floating[Any]]:
    """Return matrix @ transform (+ offset) by blocks, in float64 for a float64 matrix, else in float32."""
    dtype = np.float64 if matrix.dtype == np.float64 else np.float32
    result = np.empty((len(matrix), transform.shape[1]), dtype=dtype)
    for rows in _blocks(matrix):
        block = _finite(matrix, rows, name) @ transform
        result[rows] = block if offset is None else block + offset
    return result
