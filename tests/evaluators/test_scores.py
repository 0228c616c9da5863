"""Metric pieces against scikit-learn, enumeration and the bootstrap that they replace."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import f1_score

from harness_ext.evaluators.scores import brier, confusion_matrix, macro_f1, macro_f1_stderr, tie_aware_accuracy

classes = st.integers(0, 3)
pairs = st.integers(1, 30).flatmap(
    lambda n: st.tuples(arrays(np.int64, n, elements=classes), arrays(np.int64, n, elements=classes))
)
# Few distinct values, so that ties are common.
tied_scores = arrays(np.float64, (5, 4), elements=st.sampled_from([-np.inf, -2.0, -1.0]))
five_labels = arrays(np.int64, 5, elements=classes)


@given(tied_scores, five_labels)
def test_ties_count_as_a_random_choice_among_the_best(scores: np.ndarray, labels: np.ndarray) -> None:
    result = tie_aware_accuracy(scores, labels)
    # Oracle: rank the classes in every order, take the first best one, and average.
    orders = list(itertools.permutations(range(4)))
    expected = np.mean([[order[row[list(order)].argmax()] for row in scores] == labels for order in orders], axis=0)
    np.testing.assert_allclose(result.values, expected, rtol=1e-12)
    assert result.num_tied == sum(np.sum(row == row.max()) > 1 for row in scores)


@given(tied_scores, five_labels, st.permutations(range(4)))
def test_the_order_of_classes_does_not_matter(scores: np.ndarray, labels: np.ndarray, order: list[int]) -> None:
    position = np.argsort(order)
    np.testing.assert_array_equal(
        tie_aware_accuracy(scores[:, order], position[labels]).values, tie_aware_accuracy(scores, labels).values
    )


def test_without_ties_it_is_accuracy() -> None:
    generator = np.random.default_rng(0)
    scores, labels = generator.standard_normal((200, 3)), generator.integers(0, 3, 200)
    result = tie_aware_accuracy(scores, labels)
    np.testing.assert_array_equal(result.values, scores.argmax(axis=1) == labels)
    assert result.num_tied == 0


def test_a_model_that_scores_all_classes_alike_gets_one_in_k() -> None:
    result = tie_aware_accuracy(np.zeros((6, 4)), [0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(result.values, 0.25)
    assert result.num_tied == 6


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([[0.0, np.nan]], [0], r"scores\[0, 1\] is NaN"),
        ([[0.0, 1.0]], [2], r"labels\[0\] is 2; expected a class in 0..1"),
        ([[0.0, 1.0]], [-1], r"labels\[0\] is -1"),
        ([[0.0, 1.0]], [0, 1], r"labels has shape \(2,\); expected \(1,\)"),
        ([[0.0, 1.0]], [0.0], "expected integers"),
        ([0.0, 1.0], [0], r"scores has shape \(2,\)"),
    ],
)
def test_accuracy_says_what_is_wrong(scores: list, labels: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tie_aware_accuracy(scores, labels)


def test_brier_is_the_squared_distance_from_the_gold_corner() -> None:
    generator = np.random.default_rng(0)
    probabilities, labels = generator.dirichlet(np.ones(3), size=50), generator.integers(0, 3, 50)
    expected = ((probabilities - np.eye(3)[labels]) ** 2).sum(axis=1)
    np.testing.assert_allclose(brier(probabilities, labels), expected, rtol=1e-12)
    np.testing.assert_array_equal(brier([[1.0, 0.0], [1.0, 0.0]], [0, 1]), [0.0, 2.0])


@pytest.mark.parametrize("row", [[0.5, 0.6], [-0.1, 1.1], [np.nan, 1.0]])
def test_brier_refuses_what_is_no_distribution(row: list) -> None:
    with pytest.raises(ValueError, match=r"probabilities\[1\]"):
        brier([[0.5, 0.5], row], [0, 0])


@given(pairs)
def test_macro_f1_is_that_of_scikit_learn(labels_and_predictions: tuple[np.ndarray, np.ndarray]) -> None:
    labels, predictions = labels_and_predictions
    expected = f1_score(labels, predictions, average="macro", labels=range(4), zero_division=0)
    assert macro_f1(labels, predictions, 4) == pytest.approx(expected, abs=1e-12)


def test_confusion_matrix_has_gold_in_rows() -> None:
    np.testing.assert_array_equal(confusion_matrix([0, 0, 1], [1, 1, 0], 2), [[0, 2], [1, 0]])


def test_stderr_is_that_of_resampled_documents() -> None:
    """Both sides are standard deviations of 4,000 draws, each 1.1 % off (relative): 8 % is five sigma, p < 1e-6."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 150)
    predictions = np.where(generator.random(150) < 0.7, labels, generator.integers(0, 3, 150))
    rows = generator.integers(0, 150, (4000, 150))
    resampled = np.std([macro_f1(labels[row], predictions[row], 3) for row in rows], ddof=1)
    drawn = macro_f1_stderr(labels, predictions, 3, draws=4000, generator=generator)
    assert drawn == pytest.approx(resampled, rel=0.08)


def test_stderr_is_reproducible_and_zero_without_variation() -> None:
    labels, predictions = np.arange(40) % 2, np.zeros(40, dtype=int)
    first, second = (
        macro_f1_stderr(labels, predictions, 2, draws=50, generator=np.random.default_rng(7)) for _ in range(2)
    )
    assert first == second > 0
    assert macro_f1_stderr(np.zeros(9, int), np.zeros(9, int), 1, draws=9, generator=np.random.default_rng(0)) == 0


@pytest.mark.parametrize(("count", "draws"), [(1, 10), (10, 1)])
def test_stderr_needs_two_of_each(count: int, draws: int) -> None:
    zeros = np.zeros(count, dtype=int)
    with pytest.raises(ValueError, match="at least 2 of each"):
        macro_f1_stderr(zeros, zeros, 2, draws=draws, generator=np.random.default_rng(0))


def test_macro_f1_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one document"):
        macro_f1(np.zeros(0, dtype=int), np.zeros(0, dtype=int), 2)
