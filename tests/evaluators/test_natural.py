"""Class scores against sums of probabilities, and what the calibrations leave alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harness_ext.evaluators.natural import (
    centred_scores,
    class_log_scores,
    class_probabilities,
    context_scores,
    ensemble_scores,
    pmi_scores,
)

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
        ([[-1.0, np.inf]], [0, 1], 2, r"log_probs\[0, 1\] is inf"),
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
        ([[0.0, np.inf]], r"scores\[0, 1\] is inf"),
        ([[np.nan, 0.0]], r"scores\[0, 0\] is NaN"),
    ],
)
def test_centring_says_what_is_wrong(scores: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        centred_scores(scores)


@given(score_matrices(), arrays(np.float64, (2, 3), elements=log_probs))
def test_context_divides_by_the_mean_probability_after_content_free_inputs(
    scores: np.ndarray, content_free: np.ndarray
) -> None:
    scores[0, 0] = -np.inf
    before = scores.copy()
    with np.errstate(divide="ignore"):
        prior = np.mean([np.exp(row) / np.exp(row).sum() for row in content_free], axis=0)
        expected = np.log(np.exp(scores) / prior)
    np.testing.assert_allclose(context_scores(scores, content_free), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(scores, before)


@given(score_matrices(), arrays(np.float64, 3, elements=log_probs))
def test_context_of_one_input_is_pmi_up_to_a_shift_of_each_row(scores: np.ndarray, premise: np.ndarray) -> None:
    np.testing.assert_allclose(
        class_probabilities(context_scores(scores, premise[np.newaxis])),
        class_probabilities(pmi_scores(scores, premise)),
        atol=1e-12,
    )


@given(score_matrices(), arrays(np.float64, (2, 3), elements=log_probs))
def test_context_may_differ_from_document_to_document(scores: np.ndarray, content_free: np.ndarray) -> None:
    shifts = np.arange(len(scores))[:, np.newaxis, np.newaxis] * np.array([1.0, 0.0, -1.0])
    per_document = content_free + shifts
    expected = [context_scores(row[np.newaxis], own)[0] for row, own in zip(scores, per_document, strict=True)]
    np.testing.assert_array_equal(context_scores(scores, per_document), expected)


def test_context_counts_every_input_alike_however_likely_its_label_words() -> None:
    """Class probabilities are (0.9, 0.1) and (0.1, 0.9), the second of label words a million times less likely."""
    content_free = np.log([[0.9, 0.1], [1e-7, 9e-7]])
    np.testing.assert_allclose(context_scores([[-1.0, -2.0]], content_free), [[-1 - np.log(0.5), -2 - np.log(0.5)]])


def test_context_allows_a_class_that_is_impossible_after_some_inputs() -> None:
    corrected = context_scores([[-1.0, -1.0]], [[0.0, -np.inf], [-3.0, -3.0]])
    np.testing.assert_allclose(corrected, [[-1 - np.log(0.75), -1 - np.log(0.25)]], rtol=1e-12)


@pytest.mark.parametrize(
    ("content_free", "message"),
    [
        ([[0.0, -np.inf], [-1.0, -np.inf]], "Class 1 has probability zero after every content-free input;"),
        (
            [[[0.0, 0.0]], [[-np.inf, -1.0]]],
            "Class 0 has probability zero after every content-free input of document 1;",
        ),
        ([[0.0, 0.0], [-np.inf, -np.inf]], r"content_free_scores\[1\] is -inf for every class"),
        ([[0.0, np.nan]], r"content_free_scores\[0, 1\] is NaN"),
        ([[0.0, np.inf]], r"content_free_scores\[0, 1\] is inf"),
        ([0.0, 0.0], r"content_free_scores has shape \(2,\); expected \(inputs, 2\)"),
        ([[0.0, 0.0, 0.0]], r"expected \(inputs, 2\)"),
        ([[[0.0, 0.0]]], r"or \(2, inputs, 2\)"),
        (np.zeros((0, 2)), "at least one content-free input"),
    ],
)
def test_context_says_what_is_wrong(content_free: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        context_scores([[-1.0, -2.0], [-3.0, -4.0]], content_free)


template_scores = arrays(np.float64, (3, 4, 2), elements=st.one_of(log_probs, st.just(-np.inf)))
# Few distinct values, so that templates agree and classes tie.
tied_template_scores = arrays(np.float64, (3, 5, 3), elements=st.sampled_from([-np.inf, -2.0, -1.3, -0.1]))


@given(template_scores)
def test_ensembles_are_the_geometric_and_the_arithmetic_mean_of_class_probabilities(scores: np.ndarray) -> None:
    probabilities = np.stack([class_probabilities(template) for template in scores])
    with np.errstate(divide="ignore"):
        geometric, arithmetic = np.log(probabilities).mean(axis=0), np.log(probabilities.mean(axis=0))
    np.testing.assert_allclose(ensemble_scores(scores, "log"), geometric, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ensemble_scores(scores, "probability"), arithmetic, rtol=1e-12, atol=1e-12)


@given(tied_template_scores, st.permutations(range(3)), st.sampled_from(["log", "probability"]))
def test_ensembles_ignore_the_order_of_templates_to_the_bit(scores: np.ndarray, order: list[int], how: str) -> None:
    np.testing.assert_array_equal(ensemble_scores(scores[order], how), ensemble_scores(scores, how))


@pytest.mark.parametrize("how", ["log", "probability"])
def test_templates_that_mirror_each_other_tie_to_the_bit(how: str) -> None:
    """Six templates whose scores are rotations of each other give every class the same six probabilities."""
    scores = np.random.default_rng(0).uniform(-5, 0, (200, 6))
    ensemble = ensemble_scores(np.stack([np.roll(scores, shift, axis=1) for shift in range(6)]), how)
    np.testing.assert_array_equal(ensemble, np.repeat(ensemble[:, :1], 6, axis=1))


@given(arrays(np.float64, (3, 4, 2), elements=log_probs))
def test_the_log_ensemble_predicts_as_the_mean_of_the_scores_as_they_are(scores: np.ndarray) -> None:
    np.testing.assert_allclose(
        class_probabilities(ensemble_scores(scores, "log")), class_probabilities(scores.mean(axis=0)), atol=1e-12
    )


def test_ensembles_do_not_underflow() -> None:
    scores = np.array([[[0.0, -5000.0]], [[0.0, -5000.0]]])
    np.testing.assert_allclose(ensemble_scores(scores, "log"), [[0.0, -5000.0]])
    np.testing.assert_allclose(ensemble_scores(scores, "probability"), [[0.0, -5000.0]])


def test_one_impossible_template_vetoes_a_class_only_in_the_log_ensemble() -> None:
    scores = np.log([[[0.5, 0.5]], [[1.0, 1e-300]]])
    scores[1, 0, 1] = -np.inf
    assert np.isneginf(ensemble_scores(scores, "log")).tolist() == [[False, True]]
    np.testing.assert_allclose(np.exp(ensemble_scores(scores, "probability")), [[0.75, 0.25]], rtol=1e-12)


@pytest.mark.parametrize(
    ("scores", "how", "message"),
    [
        (np.zeros((2, 3)), "log", r"scores has shape \(2, 3\); expected \(templates, documents, classes\)"),
        (np.zeros((0, 2, 3)), "log", "templates >= 1"),
        (np.full((1, 1, 2), np.nan), "log", r"scores\[0, 0, 0\] is NaN"),
        (np.full((1, 1, 2), np.inf), "probability", r"scores\[0, 0, 0\] is inf"),
        (np.zeros((1, 2, 3)), "mean", 'how is \'mean\'; expected "log" or "probability"'),
    ],
)
def test_ensembles_say_what_is_wrong(scores: np.ndarray, how: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ensemble_scores(scores, how)


@pytest.mark.parametrize(
    "function",
    [
        class_probabilities,
        centred_scores,
        lambda scores: pmi_scores(scores, scores[0]),
        lambda scores: context_scores(scores, scores[:2]),
        lambda scores: ensemble_scores(np.stack([scores, scores[::-1]]), "log"),
        lambda scores: ensemble_scores(np.stack([scores, scores[::-1]]), "probability"),
    ],
    ids=["probabilities", "centred", "pmi", "context", "log ensemble", "probability ensemble"],
)
@given(scores=arrays(np.float64, (4, 3), elements=log_probs), order=st.permutations(range(3)))
def test_no_calibration_depends_on_the_order_of_classes(
    function: Callable[[np.ndarray], np.ndarray], scores: np.ndarray, order: list[int]
) -> None:
    np.testing.assert_allclose(function(scores[:, order]), function(scores)[:, order], rtol=1e-12, atol=1e-12)


@given(arrays(np.float64, (4, 5), elements=log_probs), st.permutations(range(5)), st.permutations(range(3)))
def test_class_scores_depend_on_the_order_of_neither_words_nor_classes(
    values: np.ndarray, words: list[int], order: list[int]
) -> None:
    owners = np.array([1, 0, 1, 2, 1])
    position = np.argsort(order)
    np.testing.assert_allclose(
        class_log_scores(values[:, words], position[owners[words]], 3),
        class_log_scores(values, owners, 3)[:, order],
        rtol=1e-12,
        atol=1e-12,
    )
