"""Class scores against sums of probabilities, and what the calibrations leave alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harness_ext.evaluators.natural import centred_scores, class_log_scores, class_probabilities, pmi_scores

# Log-probabilities as models give them; -inf is drawn separately.
log_probs = st.floats(min_value=-60, max_value=0)


def score_matrices(num_classes: int = 3) -> st.SearchStrategy[np.ndarray]:
    return st.integers(1, 8).flatmap(lambda rows: arrays(np.float64, (rows, num_classes), elements=log_probs))


@given(arrays(np.float64, (4, 5), elements=st.one_of(log_probs, st.just(-np.inf))))
def test_class_score_is_the_log_of_the_summed_probabilities(values: np.ndarray) -> None:
    owners = np.array([1, 0, 1, 2, 1])
    scores = class_log_scores(values, owners, 3)
    for label in range(3):
        with np.errstate(divide="ignore"):
            expected = np.log(np.exp(values[:, owners == label]).sum(axis=1))
        np.testing.assert_allclose(scores[:, label], expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(np.isneginf(scores[:, label]), np.isneginf(expected))


def test_one_word_per_class_keeps_the_log_probabilities() -> None:
    values = np.array([[-1.5, -0.25, -np.inf], [-np.inf, -np.inf, -np.inf]])
    np.testing.assert_array_equal(class_log_scores(values, [0, 1, 2], 3), values)


def test_class_scores_do_not_underflow() -> None:
    scores = class_log_scores(np.full((1, 2), -5000.0), [0, 0], 1)
    np.testing.assert_allclose(scores, -5000 + np.log(2), rtol=1e-15)


@pytest.mark.parametrize(
    ("values", "owners", "num_classes", "message"),
    [
        ([[-1.0, np.nan]], [0, 1], 2, r"log_probs\[0, 1\] is NaN"),
        ([[-1.0, np.inf]], [0, 1], 2, r"log_probs\[0, 1\] is \+inf"),
        ([[-1.0, -1.0]], [0, 0], 2, "Class 1 has no label word"),
        ([[-1.0, -1.0]], [0, 2], 2, r"class_of_word\[1\] is 2; expected a class in 0..1"),
        ([[-1.0, -1.0]], [0], 1, r"class_of_word has shape \(1,\)"),
        ([[-1.0, -1.0]], [0.0, 1.0], 2, "expected integers"),
        ([-1.0, -1.0], [0, 1], 2, r"log_probs has shape \(2,\)"),
    ],
)
def test_class_log_scores_says_what_is_wrong(values: list, owners: list, num_classes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_log_scores(values, owners, num_classes)


@given(score_matrices(), st.floats(-1000, 1000))
def test_probabilities_are_normalised_and_ignore_a_shift_of_a_row(scores: np.ndarray, shift: float) -> None:
    probabilities = class_probabilities(scores)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(class_probabilities(scores + shift), probabilities, atol=1e-9)


def test_probabilities_of_impossible_classes() -> None:
    probabilities = class_probabilities([[-np.inf, -3.0, -3.0], [-np.inf, -np.inf, -np.inf]])
    np.testing.assert_allclose(probabilities, [[0, 0.5, 0.5], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-15)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_probabilities_refuse_what_is_not_a_log_score(bad: float) -> None:
    with pytest.raises(ValueError, match=r"scores\[1, 0\]"):
        class_probabilities([[0.0, 0.0], [bad, 0.0]])


@given(score_matrices())
def test_pmi_subtracts_the_premise_and_leaves_its_input(scores: np.ndarray) -> None:
    premise = np.array([-1.0, -2.0, -4.0])
    before = scores.copy()
    np.testing.assert_array_equal(pmi_scores(scores, premise), scores - [[-1.0, -2.0, -4.0]])
    np.testing.assert_array_equal(pmi_scores(scores, np.broadcast_to(premise, scores.shape)), scores - premise)
    np.testing.assert_array_equal(scores, before)


@pytest.mark.parametrize(
    ("premise", "message"),
    [([0.0, -np.inf], r"premise_scores\[1\] is -inf"), ([0.0, 0.0, 0.0], r"shape \(3,\); expected \(2,\)")],
)
def test_pmi_says_what_is_wrong(premise: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pmi_scores([[-1.0, -2.0]], premise)


@given(score_matrices())
def test_centred_scores_have_mean_zero_and_ignore_a_bias_of_a_class(scores: np.ndarray) -> None:
    centred = centred_scores(scores)
    np.testing.assert_allclose(centred.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(centred_scores(scores + np.array([5.0, -3.0, 0.0])), centred, atol=1e-12)


@given(score_matrices())
def test_normalising_documents_first_moves_all_classes_alike(scores: np.ndarray) -> None:
    normalised = np.log(class_probabilities(scores))
    gap = centred_scores(normalised) - centred_scores(scores)
    np.testing.assert_allclose(gap, np.broadcast_to(gap[:, :1], gap.shape), atol=1e-9)


def test_centring_leaves_impossible_scores_out_of_the_mean() -> None:
    centred = centred_scores([[-1.0, -np.inf], [-3.0, -2.0], [-5.0, -4.0]])
    np.testing.assert_array_equal(centred, [[2.0, -np.inf], [0.0, 1.0], [-2.0, -1.0]])


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.zeros((0, 2)), "at least one document"),
        ([[0.0, -np.inf]], "Class 1 has score -inf for every document"),
        ([[0.0, np.inf]], r"scores\[0, 1\] is \+inf"),
        ([[np.nan, 0.0]], r"scores\[0, 0\] is NaN"),
    ],
)
def test_centring_says_what_is_wrong(scores: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        centred_scores(scores)
