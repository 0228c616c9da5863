"""Plug-in Quad features against explicit minimisation of the loss through a small Φ, and what a singular ΦᵀΦ does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

from harness_ext.evaluators import _checks
from harness_ext.evaluators.quad import DEFAULT_RELATIVE_RIDGE, plug_in_quad

VOCABULARY, DIM = 50, 6


def embedding(*, seed: int = 0, rank: int = DIM) -> NDArray[np.float64]:
    """Φ of shape (V, d), of a rank, with columns of unlike scale."""
    generator = np.random.default_rng(seed)
    mixed = generator.standard_normal((VOCABULARY, rank)) @ generator.standard_normal((rank, DIM))
    return generator.standard_normal((VOCABULARY, DIM)) * np.arange(1, DIM + 1) if rank == DIM else mixed


def distributions(num_rows: int, *, seed: int = 1) -> NDArray[np.float64]:
    """p(w|s), shape (n, V)."""
    return np.random.default_rng(seed).dirichlet(np.full(VOCABULARY, 0.3), size=num_rows)


def quad_loss(g: NDArray[np.float64], phi: NDArray[np.float64], p: NDArray[np.float64]) -> float:
    """E_w[-g·φ_w + ½‖Φg‖²] of one prompt as in the source, with w drawn from p (V,)."""
    logits = phi @ g
    return sum(prob * (-logit + 0.5 * np.sum(logits**2)) for prob, logit in zip(p, logits, strict=True))


def test_plug_in_minimises_the_loss_with_the_next_token_integrated_out() -> None:
    phi, p = embedding(), distributions(4)
    found = plug_in_quad(p @ phi, phi.T @ phi, ridge=0)
    for row, expected in zip(p, found.values, strict=True):
        best = minimize(quad_loss, np.zeros(DIM), args=(phi, row), method="BFGS", options={"gtol": 1e-9})
        # BFGS with finite differences reaches a gradient of about 1e-6; the smallest eigenvalue of ΦᵀΦ is above 10.
        np.testing.assert_allclose(expected, best.x, atol=1e-6)
    assert found.rank == DIM
    assert found.condition_number == pytest.approx(np.linalg.cond(phi) ** 2)
    assert found.notes == ()


def test_plug_in_solves_the_ridge_regression_of_p_on_phi() -> None:
    """argmin ½‖Φg - p‖² + ½λ‖g‖² is least squares with √λ I below Φ."""
    phi, p = embedding(), distributions(7)
    for ridge in (0.0, 0.5, 100.0):
        stacked = np.concatenate([phi, np.sqrt(ridge) * np.eye(DIM)])
        expected = np.linalg.lstsq(stacked, np.concatenate([p.T, np.zeros((DIM, 7))]), rcond=None)[0].T
        found = plug_in_quad(p @ phi, phi.T @ phi, ridge=ridge)
        np.testing.assert_allclose(found.values, expected, atol=1e-12)
        assert found.ridge == ridge


def test_the_default_ridge_is_relative_and_moves_nothing() -> None:
    phi, p = embedding(), distributions(5)
    gram = phi.T @ phi
    found, exact = plug_in_quad(p @ phi, gram), plug_in_quad(p @ phi, gram, ridge=0)
    assert found.ridge == pytest.approx(DEFAULT_RELATIVE_RIDGE * np.mean(np.diag(gram)))
    # g moves by at most λ / (λ_min + λ) of its norm.
    limit = found.ridge / np.linalg.eigvalsh(gram)[0]
    assert np.linalg.norm(found.values - exact.values) <= limit * np.linalg.norm(exact.values)
    # Φ → cΦ gives g → g/c.
    scaled = plug_in_quad(p @ phi * 1000, gram * 1e6)
    np.testing.assert_allclose(scaled.values * 1000, found.values, rtol=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 1e-9, None])
def test_a_singular_gram_gives_the_minimum_norm_solution_and_says_so(ridge: float | None) -> None:
    phi, p = embedding(rank=3), distributions(20)
    gram = phi.T @ phi
    # float32 conditional means have rounding in the kernel of Φ, which an inverse would blow up.
    found = plug_in_quad((p @ phi).astype(np.float32), gram, ridge=ridge)
    expected = p @ np.linalg.pinv(phi).T
    assert found.rank == 3
    assert np.isfinite(found.condition_number)
    np.testing.assert_allclose(found.values, expected, atol=1e-4 * np.abs(expected).max())
    assert len(found.notes) == 1
    assert "rank 3 of 6" in found.notes[0]
    assert ("pseudo-inverse" in found.notes[0]) == (ridge == 0)


def test_a_float32_gram_resolves_less_and_says_so() -> None:
    phi = embedding() * np.array([1.0, 1, 1, 1, 1, 1e-5])
    p = distributions(3)
    gram = phi.T @ phi
    assert plug_in_quad(p @ phi, gram, ridge=0).rank == DIM
    coarse = plug_in_quad(p @ phi, gram.astype(np.float32), ridge=0)
    assert coarse.rank == DIM - 1
    assert "it came as float32" in coarse.notes[0]


def test_conditional_means_too_coarse_for_the_inverse_are_noted() -> None:
    phi = embedding() * np.array([1.0, 1, 1, 1, 1, 1e-5])
    means, gram = distributions(3) @ phi, phi.T @ phi
    assert plug_in_quad(means, gram, ridge=0).notes == ()
    (note,) = plug_in_quad(means.astype(np.float32), gram, ridge=0).notes
    assert "amplifies the rounding of float32" in note
    assert plug_in_quad(means.astype(np.float32), gram, ridge=0.1).notes == ()


def test_rows_are_independent_of_their_block(monkeypatch: pytest.MonkeyPatch) -> None:
    phi, p = embedding(), distributions(30)
    means, gram = (p @ phi).astype(np.float32), phi.T @ phi
    whole = plug_in_quad(means, gram).values
    assert whole.dtype == np.float32
    assert plug_in_quad(means.astype(np.float64), gram).values.dtype == np.float64
    monkeypatch.setattr(_checks, "BLOCK_NUMBERS", 7 * DIM)
    np.testing.assert_allclose(plug_in_quad(means, gram).values, whole, rtol=1e-6)
    np.testing.assert_allclose(plug_in_quad(means[11:12], gram).values, whole[11:12], rtol=1e-6)
    assert plug_in_quad(means[:0], gram).values.shape == (0, DIM)


@given(st.integers(0, 2**32 - 1), st.floats(-3, 3))
def test_no_step_away_from_the_plug_in_lowers_its_loss(seed: int, size: float) -> None:
    phi, p = embedding(), distributions(1)
    gram = phi.T @ phi
    best = plug_in_quad(p @ phi, gram, ridge=0).values[0]
    moved = best + size * np.random.default_rng(seed).standard_normal(DIM)
    # The loss is quadratic, so the excess is exactly ½ δᵀ(ΦᵀΦ)δ.
    excess = 0.5 * np.sum((phi @ (moved - best)) ** 2)
    assert quad_loss(moved, phi, p[0]) - quad_loss(best, phi, p[0]) == pytest.approx(excess, rel=1e-9, abs=1e-12)


GRAM = np.diag([1.0, 2.0])


@pytest.mark.parametrize(
    ("means", "gram", "ridge", "message"),
    [
        (np.ones((3, 3)), GRAM, None, r"conditional_mean has shape \(3, 3\); expected \(rows, 2\)"),
        (np.ones(2), GRAM, None, r"conditional_mean has shape \(2,\)"),
        ([[0.0, np.nan]], GRAM, None, r"conditional_mean\[0, 1\] is NaN"),
        (np.ones((3, 2)), np.ones((2, 3)), None, r"gram has shape \(2, 3\); expected a square"),
        (np.ones((3, 2)), np.zeros((2, 2)), None, "gram is zero"),
        (np.ones((3, 2)), [[1.0, 0.5], [0.0, 1.0]], None, "not symmetric"),
        (np.ones((3, 2)), [[1.0, 2.0], [2.0, 1.0]], None, "negative eigenvalue -1"),
        (np.ones((3, 2)), [[1.0, np.inf], [np.inf, 1.0]], None, r"gram\[0, 1\] is inf"),
        (np.ones((3, 2)), GRAM, -1.0, "ridge is -1.0; expected a finite number >= 0"),
        (np.ones((3, 2)), GRAM, np.nan, "ridge is nan"),
    ],
)
def test_plug_in_says_what_is_wrong(means: NDArray, gram: NDArray, ridge: float | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plug_in_quad(means, gram, ridge=ridge)
