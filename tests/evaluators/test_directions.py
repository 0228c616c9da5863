"""Leading directions of streamed rows, against the dense singular value decomposition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_ext.evaluators.directions import leading_directions
from harness_ext.evaluators.probe import fit_probe

Blocks = Callable[[], Iterator[np.ndarray]]


def in_blocks(rows: np.ndarray, size: int = 13) -> Blocks:
    return lambda: (rows[start : start + size].copy() for start in range(0, len(rows), size))


def distributions(num_rows: int, dim: int, *, seed: int = 0, rank: int = 12) -> np.ndarray:
    """Softmax rows of low-dimensional states, as a language model has them: few tokens have most of the variance."""
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal((num_rows, rank)) @ generator.standard_normal((rank, dim))
    logits += 2 * generator.standard_normal(dim)
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (probabilities / probabilities.sum(axis=1, keepdims=True)).astype(np.float32)


def singular_values(rows: np.ndarray) -> np.ndarray:
    return np.linalg.svd(rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64), compute_uv=False)


@pytest.mark.parametrize(("num_rows", "dim", "most"), [(40, 300, 64), (300, 40, 64), (64, 300, 64), (30, 20, 64)])
def test_where_rows_or_columns_are_few_nothing_is_left_out(num_rows: int, dim: int, most: int) -> None:
    train, test = distributions(num_rows, dim), distributions(17, dim, seed=1)
    directions, found = leading_directions(in_blocks(train), num_rows, most)
    mean = train.mean(axis=0, dtype=np.float64)
    assert directions.variance_left_out < 1e-6
    assert found.dtype == np.float32
    np.testing.assert_allclose(directions.mean, mean, rtol=1e-5, atol=1e-8)
    basis = directions.basis.numpy()
    np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-5)
    # Scalar products are what a ridge-penalised model sees: those among training rows, and of others with them.
    np.testing.assert_allclose(found @ found.T, (train - mean) @ (train - mean).T, atol=1e-6)
    of_test = directions.coordinates(in_blocks(test), len(test))
    np.testing.assert_allclose(of_test @ found.T, (test - mean) @ (train - mean).T, atol=1e-6)
    rank = min(num_rows, dim)
    size = np.linalg.norm(found.astype(np.float64), axis=0)
    np.testing.assert_allclose(size[:rank], singular_values(train)[: len(size)], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("most", [5, 20, 60])
def test_what_is_left_out_is_measured_and_near_the_least_possible(most: int) -> None:
    train = distributions(200, 400)
    directions, found = leading_directions(in_blocks(train), 200, most)
    centred = train.astype(np.float64) - train.mean(axis=0, dtype=np.float64)
    basis = directions.basis.numpy().astype(np.float64)
    assert basis.shape == (most, 400)
    np.testing.assert_allclose(basis @ basis.T, np.eye(most), atol=1e-5)
    np.testing.assert_allclose(found, centred @ basis.T, atol=1e-6)
    outside = np.square(centred - centred @ basis.T @ basis).sum() / np.square(centred).sum()
    assert directions.variance_left_out == pytest.approx(outside, abs=1e-6)
    squares = np.square(singular_values(train))
    best = squares[most:].sum() / squares.sum()
    assert best - 1e-6 <= directions.variance_left_out < 3 * best
    # The directions are the principal axes of what is kept.
    gram = found.astype(np.float64).T @ found
    assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-6 * gram[0, 0]
    assert (np.diff(np.diag(gram)) <= 1e-6 * gram[0, 0]).all()


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(2, 30),
    dim=st.integers(2, 30),
    most=st.integers(1, 30),
    size=st.integers(1, 30),
    seed=st.integers(0, 9),
)
def test_coordinates_are_those_of_an_orthonormal_basis_whatever_the_shapes(
    num_rows: int, dim: int, most: int, size: int, seed: int
) -> None:
    rows = np.random.default_rng(seed).standard_normal((num_rows, dim)).astype(np.float32)
    directions, found = leading_directions(in_blocks(rows, size), num_rows, most)
    basis = directions.basis.numpy()
    assert 1 <= len(basis) <= most
    assert found.shape == (num_rows, len(basis))
    np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-5)
    np.testing.assert_allclose(found, (rows - rows.mean(axis=0)) @ basis.T, atol=1e-4)
    total = np.square(rows - rows.mean(axis=0)).sum()
    assert directions.variance_left_out == pytest.approx(max(0.0, 1 - np.square(found).sum() / total), abs=1e-5)


def test_rows_that_depend_on_each_other_and_a_large_mean() -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((20, 3)) @ generator.standard_normal((3, 100)) + 1000
    rows = np.repeat(rows, 2, axis=0).astype(np.float32)
    directions, found = leading_directions(in_blocks(rows), 40, 64)
    np.testing.assert_allclose(np.linalg.norm(found, axis=0)[:3], singular_values(rows)[:3], rtol=1e-5)
    assert directions.variance_left_out < 1e-6


@pytest.mark.parametrize(("num_rows", "dim"), [(5, 40), (40, 5), (40, 40)])
def test_rows_that_are_all_equal(num_rows: int, dim: int) -> None:
    rows = np.tile(distributions(1, dim), (num_rows, 1))
    with pytest.raises(ValueError, match="all rows are equal"):
        leading_directions(in_blocks(rows), num_rows, 10)


def test_a_probe_on_all_directions_is_a_probe_on_all_columns() -> None:
    train, test = distributions(150, 400), distributions(50, 400, seed=1)
    labels = (train[:, np.argsort(-train.var(axis=0))[5]] > 0.001).astype(int)
    directions, found = leading_directions(in_blocks(train), 150, 200)
    of_test = directions.coordinates(in_blocks(test), 50)
    dense = fit_probe(train, labels, num_classes=2, scaling="common", total_variance=32, seed=0)
    fit = fit_probe(found, labels, num_classes=2, scaling="common", total_variance=32, seed=0)
    assert fit.cv_accuracy == pytest.approx(dense.cv_accuracy, abs=1e-9)
    np.testing.assert_allclose(fit.decision_scores(of_test), dense.decision_scores(test), atol=1e-3)
