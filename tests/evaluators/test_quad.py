"""Quad features against explicit minimisation of the loss through a small Φ, and what a singular ΦᵀΦ does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

from harness_ext.evaluators import quad
from harness_ext.evaluators.quad import (
    DEFAULT_RELATIVE_RIDGE,
    LinearQuadStatistics,
    plug_in_quad,
    quad_loss,
    quad_loss_terms,
)

VOCABULARY, DIM = 50, 6


def embedding(*, seed: int = 0, rank: int = DIM) -> NDArray[np.float64]:
    """Φ of shape (V, d), of a rank, with columns of unlike scale."""
    generator = np.random.default_rng(seed)
    mixed = generator.standard_normal((VOCABULARY, rank)) @ generator.standard_normal((rank, DIM))
    return generator.standard_normal((VOCABULARY, DIM)) * np.arange(1, DIM + 1) if rank == DIM else mixed


def distributions(num_rows: int, *, seed: int = 1) -> NDArray[np.float64]:
    """p(w|s), shape (n, V)."""
    return np.random.default_rng(seed).dirichlet(np.full(VOCABULARY, 0.3), size=num_rows)


def explicit_loss(features: NDArray[np.float64], phi: NDArray[np.float64], next_tokens: NDArray[np.int64]) -> float:
    """The Quad loss written as in the source, through V logits a row."""
    logits = features @ phi.T
    picked = logits[np.arange(len(next_tokens)), next_tokens]
    return float(np.mean([-pick + 0.5 * np.sum(row**2) for pick, row in zip(picked, logits, strict=True)]))


def test_plug_in_minimises_the_loss_with_the_next_token_integrated_out() -> None:
    phi, p = embedding(), distributions(4)
    found = plug_in_quad(p @ phi, phi.T @ phi, ridge=0)
    for row, expected in zip(p, found.values, strict=True):

        def loss(g: NDArray[np.float64], row: NDArray[np.float64] = row) -> float:
            logits = phi @ g
            return sum(prob * (-logit + 0.5 * np.sum(logits**2)) for prob, logit in zip(row, logits, strict=True))

        best = minimize(loss, np.zeros(DIM), method="BFGS", options={"gtol": 1e-9})
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
    monkeypatch.setattr(quad, "_BLOCK_NUMBERS", 7 * DIM)
    np.testing.assert_allclose(plug_in_quad(means, gram).values, whole, rtol=1e-6)
    np.testing.assert_allclose(plug_in_quad(means[11:12], gram).values, whole[11:12], rtol=1e-6)
    assert plug_in_quad(means[:0], gram).values.shape == (0, DIM)


@pytest.mark.parametrize("block_numbers", [2**20, 5 * DIM])
def test_loss_is_that_of_the_explicit_formula(monkeypatch: pytest.MonkeyPatch, block_numbers: int) -> None:
    monkeypatch.setattr(quad, "_BLOCK_NUMBERS", block_numbers)
    generator = np.random.default_rng(3)
    phi, tokens = embedding(), generator.integers(0, VOCABULARY, 40)
    features = 0.1 * generator.standard_normal((40, DIM))
    gram = phi.T @ phi
    assert quad_loss(features, phi[tokens], gram) == pytest.approx(explicit_loss(features, phi, tokens), rel=1e-12)
    terms = quad_loss_terms(features, phi[tokens], gram)
    np.testing.assert_allclose(terms.linear, -np.einsum("nd,nd->n", features, phi[tokens]), rtol=1e-10)
    np.testing.assert_allclose(terms.quadratic, 0.5 * np.square(features @ phi.T).sum(axis=1), rtol=1e-10)
    assert quad_loss(np.zeros((40, DIM)), phi[tokens], gram) == 0


@given(st.integers(0, 2**32 - 1), st.floats(-3, 3))
def test_no_step_away_from_the_plug_in_lowers_its_loss(seed: int, size: float) -> None:
    phi, p = embedding(), distributions(1)
    gram = phi.T @ phi
    best = plug_in_quad(p @ phi, gram, ridge=0).values
    moved = best + size * np.random.default_rng(seed).standard_normal(DIM)

    def expected_loss(g: NDArray[np.float64]) -> float:
        terms = quad_loss_terms(np.repeat(g, VOCABULARY, axis=0), phi, gram)
        return float(p[0] @ (terms.linear + terms.quadratic))

    # The loss is quadratic, so the excess is exactly ½ δᵀ(ΦᵀΦ)δ.
    excess = 0.5 * np.sum((phi @ (moved - best)[0]) ** 2)
    assert expected_loss(moved) - expected_loss(best) == pytest.approx(excess, rel=1e-9, abs=1e-12)


def text(num_rows: int, state_dim: int, *, seed: int = 5) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """States with a mean, and next tokens that depend on them."""
    generator = np.random.default_rng(seed)
    states = generator.standard_normal((num_rows, state_dim)) + 1.5
    logits = states @ generator.standard_normal((state_dim, VOCABULARY))
    return states, (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_head_minimises_the_explicit_loss(bias: bool) -> None:
    phi, (states, tokens) = embedding(), text(80, 3)
    gram = phi.T @ phi
    statistics = LinearQuadStatistics(3, DIM)
    statistics.add(states, phi[tokens])
    head = statistics.solve(gram, ridge=0, bias=bias)
    inputs = np.concatenate([states, np.ones((80, 1))], axis=1) if bias else states

    def loss(flat: NDArray[np.float64]) -> float:
        return explicit_loss(inputs @ flat.reshape(DIM, -1).T, phi, tokens)

    best = minimize(loss, np.zeros(DIM * inputs.shape[1]), method="BFGS", options={"gtol": 1e-7})
    found = np.concatenate([head.weight, head.bias[:, np.newaxis]], axis=1)[:, : inputs.shape[1]]
    np.testing.assert_allclose(found.ravel(), best.x, atol=1e-5)
    assert head.loss == pytest.approx(best.fun, abs=1e-9)
    assert head.loss == pytest.approx(quad_loss(head.features(states), phi[tokens], gram), rel=1e-10)
    assert (head.rank, head.state_rank, head.num_rows, head.notes) == (DIM, inputs.shape[1], 80, ())
    if not bias:
        np.testing.assert_array_equal(head.bias, 0)
        # The formula of the class, with inverses.
        cross, second = phi[tokens].T @ states / 80, states.T @ states / 80
        np.testing.assert_allclose(statistics.cross_moment, cross, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(statistics.second_moment, second, rtol=1e-10)
        expected = np.linalg.inv(gram) @ cross @ np.linalg.inv(second)
        np.testing.assert_allclose(head.weight, expected, atol=1e-10)


def test_one_hot_states_give_the_plug_in_of_the_observed_frequencies() -> None:
    """With one state a context, the best linear head is the best function: Quad on p(w|context)."""
    generator = np.random.default_rng(8)
    contexts, tokens = np.repeat(np.arange(4), 30), generator.integers(0, VOCABULARY, 120)
    phi = embedding()
    frequencies = np.stack([np.bincount(tokens[contexts == c], minlength=VOCABULARY) / 30 for c in range(4)])
    statistics = LinearQuadStatistics(4, DIM)
    statistics.add(np.eye(4)[contexts], phi[tokens])
    gram = phi.T @ phi
    for ridge in (0.0, 3.0):
        expected = plug_in_quad(frequencies @ phi, gram, ridge=ridge).values
        np.testing.assert_allclose(statistics.solve(gram, ridge=ridge).weight.T, expected, atol=1e-12)


@given(st.integers(0, 2**32 - 1))
def test_loss_of_any_head_follows_from_the_statistics(seed: int) -> None:
    generator = np.random.default_rng(seed)
    phi, (states, tokens) = embedding(), text(25, 4)
    weight, bias = generator.standard_normal((DIM, 4)), generator.standard_normal(DIM)
    statistics = LinearQuadStatistics(4, DIM)
    statistics.add(states, phi[tokens])
    explicit = explicit_loss(states @ weight.T + bias, phi, tokens)
    assert statistics.loss(weight, phi.T @ phi, bias=bias) == pytest.approx(explicit, rel=1e-10)
    best = statistics.solve(phi.T @ phi, ridge=0, bias=True)
    assert best.loss <= explicit
    assert best.loss <= statistics.solve(phi.T @ phi, ridge=0).loss + 1e-12


def test_state_ridge_is_noise_on_the_states_but_not_on_the_bias() -> None:
    phi, (states, tokens) = embedding(), text(60, 3)
    statistics, noisy = LinearQuadStatistics(3, DIM), LinearQuadStatistics(3, DIM)
    statistics.add(states, phi[tokens])
    # ±√(3μ) in one coordinate at a time has mean zero and covariance μI over the six choices.
    for step in np.sqrt(3 * 0.7) * np.concatenate([np.eye(3), -np.eye(3)]):
        noisy.add(states + step, phi[tokens])
    found, expected = (
        statistics.solve(phi.T @ phi, ridge=0, state_ridge=0.7, bias=True),
        noisy.solve(phi.T @ phi, ridge=0, bias=True),
    )
    np.testing.assert_allclose(found.weight, expected.weight, atol=1e-12)
    np.testing.assert_allclose(found.bias, expected.bias, atol=1e-12)


def test_batches_and_merged_parts_sum_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    phi, (states, tokens) = embedding(), text(50, 3)
    whole = LinearQuadStatistics(3, DIM)
    whole.add(states, phi[tokens])
    monkeypatch.setattr(quad, "_BLOCK_NUMBERS", 4 * 3)
    parts = [LinearQuadStatistics(3, DIM) for _ in range(2)]
    parts[0].add(states[:7].astype(np.float32), phi[tokens[:7]].astype(np.float32))
    parts[0].add(states[7:7], phi[tokens[7:7]])
    parts[1].add(states[7:], phi[tokens[7:]])
    parts[0].merge(parts[1])
    assert parts[0].num_rows == 50
    np.testing.assert_allclose(parts[0].cross_moment, whole.cross_moment, rtol=1e-6)
    np.testing.assert_allclose(parts[0].second_moment, whole.second_moment, rtol=1e-6)


def test_fewer_rows_than_dimensions_give_the_minimum_norm_head_with_a_note() -> None:
    phi, (states, tokens) = embedding(), text(3, 5)
    states /= np.sqrt(np.square(states).mean(axis=0))  # The norm is that of states of unit second moment.
    statistics = LinearQuadStatistics(5, DIM)
    statistics.add(states, phi[tokens])
    head = statistics.solve(phi.T @ phi, ridge=0)
    assert head.state_rank == 3
    assert "rank 3 of 5" in head.notes[0]
    # Three rows can be fitted one by one: g(s_i) is the plug-in of its token.
    expected = plug_in_quad(phi[tokens], phi.T @ phi, ridge=0).values
    np.testing.assert_allclose(head.features(states), expected, atol=1e-10)
    np.testing.assert_allclose(head.weight.T, np.linalg.pinv(states) @ expected, atol=1e-10)
    assert statistics.solve(phi.T @ phi, state_ridge=0.1).notes == ()


def test_a_coordinate_of_small_scale_is_not_taken_for_rounding() -> None:
    phi, (states, tokens) = embedding(), text(60, 3)
    plain, scaled = LinearQuadStatistics(3, DIM), LinearQuadStatistics(3, DIM)
    plain.add(states, phi[tokens])
    scaled.add(states * np.array([1e6, 1.0, 1e-6]), phi[tokens])
    found = scaled.solve(phi.T @ phi, ridge=0)
    assert found.state_rank == 3
    expected = plain.solve(phi.T @ phi, ridge=0).weight
    np.testing.assert_allclose(found.weight * np.array([1e6, 1.0, 1e-6]), expected, rtol=1e-6)


GRAM = np.diag([1.0, 2.0])


@pytest.mark.parametrize(
    ("means", "gram", "ridge", "message"),
    [
        (np.ones((3, 3)), GRAM, None, r"conditional_mean has shape \(3, 3\); expected \(n, 2\)"),
        (np.ones(2), GRAM, None, r"conditional_mean has shape \(2,\)"),
        ([[0.0, np.nan]], GRAM, None, r"conditional_mean\[0, 1\] is nan"),
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


def test_loss_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"next_embeddings has shape \(2, 2\); expected \(3, 2\)"):
        quad_loss(np.ones((3, 2)), np.ones((2, 2)), GRAM)
    with pytest.raises(ValueError, match="no row"):
        quad_loss(np.ones((0, 2)), np.ones((0, 2)), GRAM)
    with pytest.raises(ValueError, match=r"features\[0, 0\] is nan"):
        quad_loss(np.full((1, 2), np.nan), np.ones((1, 2)), GRAM)


def test_statistics_say_what_is_wrong_and_keep_what_they_had() -> None:
    with pytest.raises(ValueError, match="state_dim is 0"):
        LinearQuadStatistics(0, 2)
    statistics = LinearQuadStatistics(3, 2)
    for call in (lambda: statistics.cross_moment, lambda: statistics.second_moment, lambda: statistics.solve(GRAM)):
        with pytest.raises(ValueError, match="No rows were added"):
            call()
    statistics.add(np.eye(3), np.ones((3, 2)))
    before = statistics.second_moment
    with pytest.raises(ValueError, match=r"states has shape \(3, 4\); expected \(n, 3\)"):
        statistics.add(np.ones((3, 4)), np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"next_embeddings has shape \(2, 2\); expected \(3, 2\)"):
        statistics.add(np.ones((3, 3)), np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"next_embeddings\[2, 1\] is inf"):
        statistics.add(np.ones((3, 3)), [[1, 1], [1, 1], [1, np.inf]])
    assert statistics.num_rows == 3
    np.testing.assert_array_equal(statistics.second_moment, before)
    with pytest.raises(ValueError, match=r"gram has shape \(3, 3\); expected \(2, 2\)"):
        statistics.solve(np.eye(3))
    with pytest.raises(ValueError, match="state_ridge is -1"):
        statistics.solve(GRAM, state_ridge=-1)
    with pytest.raises(ValueError, match="weight, bias and gram have shapes"):
        statistics.loss(np.ones((2, 2)), GRAM)
    with pytest.raises(ValueError, match="not finite"):
        statistics.loss(np.full((2, 3), np.nan), GRAM)
    with pytest.raises(ValueError, match="these are for"):
        statistics.merge(LinearQuadStatistics(2, 2))
    silent = LinearQuadStatistics(2, 2)
    silent.add(np.zeros((4, 2)), np.ones((4, 2)))
    with pytest.raises(ValueError, match="is zero"):
        silent.solve(GRAM)
    head = statistics.solve(GRAM)
    with pytest.raises(ValueError, match=r"states has shape \(1, 2\); expected \(n, 3\)"):
        head.features(np.ones((1, 2)))
