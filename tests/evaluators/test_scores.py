"""Metric pieces against scikit-learn, enumeration and the bootstrap that they replace."""

from __future__ import annotations

import itertools
import math
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import balanced_accuracy_score, f1_score

from harness_ext.evaluators import scores as scores_module
from harness_ext.evaluators.scores import (
    Interval,
    at_or_below_majority,
    balanced_accuracy,
    balanced_accuracy_interval,
    balanced_accuracy_stderr,
    bootstrap_interval,
    brier,
    calibration_error_interval,
    confusion_matrix,
    expected_calibration_error,
    macro_f1,
    macro_f1_interval,
    macro_f1_stderr,
    majority_rate,
    mean_interval,
    tie_aware_accuracy,
)

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


# Ratios of small integers: ties of the top class and confidences on the edge of a bin are common.
distributions = (
    arrays(np.float64, (7, 4), elements=st.integers(0, 3))
    .map(lambda weights: weights + (weights.sum(axis=1, keepdims=True) == 0))
    .map(lambda weights: weights / weights.sum(axis=1, keepdims=True))
)
seven_labels = arrays(np.int64, 7, elements=classes)


def slow_calibration_error(probabilities: np.ndarray, labels: np.ndarray, num_bins: int) -> float:
    """Guo et al. (2017), bin by bin and document by document."""
    error = 0.0
    for number in range(num_bins):
        confidences, credits = [], []
        for row, gold in zip(probabilities, labels, strict=True):
            confidence = max(row)
            if number / num_bins < confidence <= (number + 1) / num_bins:
                confidences.append(confidence)
                credits.append((row[gold] == confidence) / list(row).count(confidence))
        if confidences:
            error += len(confidences) / len(labels) * abs(np.mean(credits) - np.mean(confidences))
    return error


@given(distributions, seven_labels, st.sampled_from([1, 2, 10, 15]))
def test_calibration_error_is_that_of_a_plain_loop(
    probabilities: np.ndarray, labels: np.ndarray, num_bins: int
) -> None:
    expected = slow_calibration_error(probabilities, labels, num_bins)
    assert expected_calibration_error(probabilities, labels, num_bins=num_bins) == pytest.approx(expected, abs=1e-12)


@given(distributions, seven_labels, st.permutations(range(4)))
def test_calibration_error_ignores_the_order_of_classes_to_the_bit(
    probabilities: np.ndarray, labels: np.ndarray, order: list[int]
) -> None:
    position = np.argsort(order)
    assert expected_calibration_error(probabilities[:, order], position[labels]) == expected_calibration_error(
        probabilities, labels
    )


def test_calibration_error_of_known_cases() -> None:
    assert expected_calibration_error(np.tile([0.75, 0.25], (4, 1)), [0, 0, 0, 1]) == 0
    assert expected_calibration_error(np.tile([1.0, 0.0], (4, 1)), [1, 1, 1, 1]) == 1
    # A model that says nothing is calibrated on any labels, since ties give 1/K.
    assert expected_calibration_error(np.full((5, 4), 0.25), [0, 0, 0, 0, 1]) == 0


@pytest.mark.parametrize(
    ("probabilities", "labels", "num_bins", "message"),
    [
        (np.zeros((0, 2)), np.zeros(0, dtype=int), 15, "at least one document"),
        ([[0.5, 0.6]], [0], 15, r"probabilities\[0\]"),
        ([[0.5, 0.5]], [2], 15, r"labels\[0\] is 2"),
        ([[0.5, 0.5]], [0], 0, "num_bins is 0"),
    ],
)
def test_calibration_error_says_what_is_wrong(
    probabilities: np.ndarray, labels: np.ndarray, num_bins: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        expected_calibration_error(probabilities, labels, num_bins=num_bins)


@given(pairs)
def test_balanced_accuracy_is_that_of_scikit_learn(labels_and_predictions: tuple[np.ndarray, np.ndarray]) -> None:
    labels, predictions = labels_and_predictions
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of predicted classes that are never gold
        expected = balanced_accuracy_score(labels, predictions)
    assert balanced_accuracy(labels == predictions, labels, 4) == pytest.approx(expected, abs=1e-12)


@given(tied_scores, five_labels, st.permutations(range(4)))
def test_what_sums_over_classes_ignores_their_order_to_the_bit(
    scores: np.ndarray, labels: np.ndarray, order: list[int]
) -> None:
    credit, renamed = tie_aware_accuracy(scores, labels).values, np.argsort(order)[labels]
    assert balanced_accuracy(credit, renamed, 4) == balanced_accuracy(credit, labels, 4)
    np.testing.assert_array_equal(
        balanced_accuracy_stderr(credit, renamed, 4), balanced_accuracy_stderr(credit, labels, 4)
    )
    assert majority_rate(renamed, 4) == majority_rate(labels, 4)


@given(pairs, st.permutations(range(4)))
def test_macro_f1_ignores_the_order_of_classes(
    labels_and_predictions: tuple[np.ndarray, np.ndarray], order: list[int]
) -> None:
    position = np.argsort(order)
    labels, predictions = labels_and_predictions
    assert macro_f1(position[labels], position[predictions], 4) == pytest.approx(
        macro_f1(labels, predictions, 4), abs=1e-12
    )


@given(distributions, seven_labels, st.permutations(range(4)))
def test_brier_ignores_the_order_of_classes(probabilities: np.ndarray, labels: np.ndarray, order: list[int]) -> None:
    np.testing.assert_allclose(
        brier(probabilities[:, order], np.argsort(order)[labels]), brier(probabilities, labels), rtol=1e-12, atol=1e-15
    )


def test_balanced_stderr_of_one_class_is_that_of_a_mean() -> None:
    values = np.random.default_rng(0).random(30)
    expected = values.std(ddof=1) / np.sqrt(30)
    assert balanced_accuracy_stderr(values, np.full(30, 2), 3) == pytest.approx(expected, rel=1e-12)


def test_balanced_stderr_is_that_of_resampled_documents() -> None:
    """The bootstrap's standard deviation of 4,000 draws is 1.1 % off (relative), its divisor n_c for n_c - 1 and the
    class sizes that vary a further 2 % at these sizes: 8 % is over five sigma, p < 1e-6."""
    generator = np.random.default_rng(0)
    labels = generator.permutation(np.repeat([0, 2], [260, 90]))
    credit = (generator.random(350) < np.where(labels == 0, 0.8, 0.6)).astype(float)
    rows = generator.integers(0, 350, (4000, 350))
    resampled = np.std([balanced_accuracy(credit[row], labels[row], 3) for row in rows], ddof=1)
    assert balanced_accuracy_stderr(credit, labels, 3) == pytest.approx(resampled, rel=0.08)


def test_balanced_stderr_is_nan_where_a_class_has_one_document() -> None:
    assert math.isnan(balanced_accuracy_stderr([1.0, 0.0, 1.0], [0, 0, 1], 2))
    assert balanced_accuracy([1.0, 0.0, 1.0], [0, 0, 1], 2) == 0.75


@pytest.mark.parametrize("function", [balanced_accuracy, balanced_accuracy_stderr])
@pytest.mark.parametrize(
    ("values", "labels", "message"),
    [
        ([], np.zeros(0, dtype=int), "at least one document"),
        ([0.5, 1.5], [0, 1], r"values\[1\] is 1.5; expected an accuracy in \[0, 1\]"),
        ([np.nan], [0], r"values\[0\] is NaN"),
        ([1.0], [3], r"labels\[0\] is 3"),
        ([1.0], [0, 1], r"labels has shape \(2,\); expected \(1,\)"),
    ],
)
def test_balanced_accuracy_says_what_is_wrong(function: Callable, values: list, labels: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(values, labels, 3)


@given(arrays(np.int64, st.integers(1, 30), elements=classes))
def test_majority_rate_is_the_best_accuracy_of_a_constant_prediction(labels: np.ndarray) -> None:
    assert majority_rate(labels, 4) == max((labels == label).mean() for label in range(4))


def test_majority_rate_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one document"):
        majority_rate(np.zeros(0, dtype=int), 2)


@given(st.integers(1, 60), st.integers(2, 4))
def test_a_model_that_scores_all_classes_alike_is_at_the_majority_rate(per_class: int, num_classes: int) -> None:
    labels = np.repeat(np.arange(num_classes), per_class)
    # As a running sum, whose rounding errors are those of a plain loop.
    accuracy = sum([1 / num_classes] * len(labels)) / len(labels)
    assert at_or_below_majority(accuracy, labels, num_classes)
    one_tie_better = accuracy + (1 - 1 / num_classes) / len(labels)
    assert not at_or_below_majority(one_tie_better, labels, num_classes)


def test_a_percentage_is_no_accuracy() -> None:
    with pytest.raises(ValueError, match="not a percentage"):
        at_or_below_majority(78.0, [0, 1], 2)


class Case(NamedTuple):
    """A metric of documents given as arrays with one row each, and its interval."""

    arrays: tuple[np.ndarray, ...]
    metric: Callable[..., float]
    interval: Callable[..., Interval]


def example(name: str, num_documents: int, seed: int = 0) -> Case:
    """Documents of three classes, two right of three, with ties in the accuracy and ragged class sizes."""
    generator = np.random.default_rng(seed)
    labels = generator.choice(3, num_documents, p=[0.5, 0.3, 0.2])
    predictions = np.where(generator.random(num_documents) < 0.6, labels, generator.integers(0, 3, num_documents))
    credit = np.where(generator.random(num_documents) < 0.1, 0.5, labels == predictions)
    probabilities = generator.dirichlet(np.ones(3), num_documents)
    cases: dict[str, Case] = {
        "accuracy": Case((credit,), np.mean, mean_interval),
        "brier": Case((brier(probabilities, labels),), np.mean, mean_interval),
        "macro_f1": Case(
            (labels, predictions),
            lambda gold, predicted: macro_f1(gold, predicted, 3),
            lambda gold, predicted, **options: macro_f1_interval(gold, predicted, 3, **options),
        ),
        "balanced": Case(
            (credit, labels),
            lambda values, gold: balanced_accuracy(values, gold, 3),
            lambda values, gold, **options: balanced_accuracy_interval(values, gold, 3, **options),
        ),
        "calibration": Case(
            (probabilities, labels),
            lambda values, gold: expected_calibration_error(values, gold, num_bins=5),
            lambda values, gold, **options: calibration_error_interval(values, gold, num_bins=5, **options),
        ),
    }
    return cases[name]


METRICS = ["accuracy", "brier", "macro_f1", "balanced", "calibration"]


@pytest.fixture(params=["cells", "documents"])
def way_of_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Draw counts of distinct documents, or document by document, whatever is faster."""
    monkeypatch.setattr(scores_module, "_ALWAYS_FEW", 0 if request.param == "documents" else 10**9)
    monkeypatch.setattr(scores_module, "_CELL_PER_DOCUMENT_COST", 10**9)
    return request.param


@pytest.mark.usefixtures("way_of_drawing")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", METRICS)
def test_ends_are_quantiles_of_all_resamples(name: str, seed: int) -> None:
    """Four documents have 4^4 equally likely resamples, all of which are listed here.

    By Dvoretzky, Kiefer and Wolfowitz the shares of 100,000 draws are all within 0.01 of the exact ones but for
    p = 2 exp(-20) < 1e-8.
    """
    case = example(name, 4, seed)
    exact = np.array(
        [case.metric(*(array[list(rows)] for array in case.arrays)) for rows in itertools.product(range(4), repeat=4)]
    )
    low, high, level = case.interval(*case.arrays, draws=100_000, level=0.8, generator=np.random.default_rng(seed))
    assert level == 0.8
    for end, share in ((low, 0.1), (high, 0.9)):
        assert (exact < end - 1e-12).mean() <= share + 0.01
        assert (exact <= end + 1e-12).mean() >= share - 0.01


@pytest.mark.parametrize("name", METRICS)
def test_interval_is_that_of_scipy(name: str) -> None:
    """An end of a 95 % interval of a normal law with deviation σ is off by √(0.025 · 0.975 / draws) / φ(1.96) · σ
    = 2.67 σ / √draws. Two intervals of 4,000 and 40,000 draws differ by 0.044 σ: 0.23 σ is five sigma, p < 1e-5 for the
    ten ends. Metrics of counts are discrete, in steps of about 1/n."""
    case = example(name, 300)
    # Rows, not documents, are what scipy resamples, since probabilities have several numbers a document.
    reference = scipy.stats.bootstrap(
        (np.arange(300),),
        lambda rows: case.metric(*(array[rows] for array in case.arrays)),
        n_resamples=4000,
        vectorized=False,
        method="percentile",
        rng=np.random.default_rng(1),
    )
    found = case.interval(*case.arrays, draws=40_000, generator=np.random.default_rng(0))
    tolerance = 0.23 * reference.standard_error + 1 / 300
    assert found.low == pytest.approx(reference.confidence_interval.low, abs=tolerance)
    assert found.high == pytest.approx(reference.confidence_interval.high, abs=tolerance)


@pytest.mark.parametrize("name", ["macro_f1", "balanced"])
def test_interval_ignores_the_order_of_classes(name: str) -> None:
    """What is drawn depends on the order, its law does not: see `test_interval_is_that_of_scipy`, here 40,000 draws on
    both sides, whose ends differ by 0.019 σ; 0.1 σ and a discrete step is five sigma, p < 1e-5."""
    case, position = example(name, 300), np.array([2, 0, 1])
    renamed = [position[array] if array.dtype.kind == "i" else array for array in case.arrays]
    first, second = (
        case.interval(*values, draws=40_000, generator=np.random.default_rng(0)) for values in (case.arrays, renamed)
    )
    tolerance = 0.1 * (first.high - first.low) / 3.92 + 1e-3
    assert second.low == pytest.approx(first.low, abs=tolerance)
    assert second.high == pytest.approx(first.high, abs=tolerance)


def test_interval_of_the_calibration_error_ignores_the_order_of_classes_to_the_bit() -> None:
    (probabilities, labels), _, interval = example("calibration", 100)
    order = np.array([1, 2, 0])
    first = interval(probabilities, labels, draws=100, generator=np.random.default_rng(0))
    second = interval(probabilities[:, order], np.argsort(order)[labels], draws=100, generator=np.random.default_rng(0))
    assert first == second


@pytest.mark.usefixtures("way_of_drawing")
@pytest.mark.parametrize("name", METRICS)
def test_interval_is_the_same_for_any_order_of_documents_and_any_block(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = example(name, 50)
    generator = np.random.default_rng(3)
    first = case.interval(*case.arrays, draws=100, generator=np.random.default_rng(0))
    order = generator.permutation(50)
    assert (
        case.interval(*(array[order] for array in case.arrays), draws=100, generator=np.random.default_rng(0)) == first
    )
    monkeypatch.setattr(scores_module, "_DRAWN_AT_ONCE", 150)
    in_blocks = case.interval(*case.arrays, draws=100, generator=np.random.default_rng(0))
    # Blocks of another size may sum in another order.
    np.testing.assert_allclose(in_blocks, first, rtol=1e-12)
    assert case.interval(*case.arrays, draws=100, generator=np.random.default_rng(1)) != first


def test_values_that_all_differ_are_drawn_without_a_matrix_of_draws_by_documents() -> None:
    values = np.random.default_rng(0).random(2000)
    tracemalloc.start()
    mean_interval(values, draws=4000, generator=np.random.default_rng(0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The matrix would take 64 MB in float64.
    assert peak < 16e6


def test_documents_that_do_not_differ_give_no_width() -> None:
    low, high, _ = mean_interval(np.ones(20), generator=np.random.default_rng(0))
    assert low == high == 1


def test_any_statistic_of_several_numbers_per_document() -> None:
    """The difference of two accuracies is the accuracy of the differences."""
    generator = np.random.default_rng(0)
    both = generator.integers(0, 2, (60, 2))

    def difference(distinct: np.ndarray, counts: np.ndarray) -> np.ndarray:
        assert (counts.sum(axis=1) == 60).all()
        return counts @ (distinct[:, 0] - distinct[:, 1]) / 60

    found = bootstrap_interval(both, difference, draws=40_000, generator=generator)
    expected = mean_interval(both[:, 0] - both[:, 1], draws=40_000, generator=generator)
    # A step of the discrete difference; five sigma of the Monte Carlo error are less, p < 1e-5.
    np.testing.assert_allclose(found[:2], expected[:2], atol=1 / 60 + 1e-12)


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (np.zeros((1, 1)), {}, r"documents has shape \(1, 1\); .* at least 2 documents"),
        (np.zeros(5), {}, r"documents has shape \(5,\)"),
        (np.array([[0.0], [np.nan]]), {}, r"documents\[1, 0\] is NaN"),
        (np.zeros((5, 1)), {"level": 95}, "level is 95; expected a coverage between 0 and 1"),
        (np.zeros((5, 1)), {"draws": 39}, "Got 39 draws; an interval of level 0.95 needs at least 40"),
        (np.zeros((5, 1)), {"draws": 19, "level": 0.9}, "needs at least 20"),
    ],
)
def test_interval_says_what_is_wrong(documents: np.ndarray, options: dict[str, Any], message: str) -> None:
    def statistic(distinct: np.ndarray, counts: np.ndarray) -> np.ndarray:
        raise AssertionError("Nothing should be drawn.")

    with pytest.raises(ValueError, match=message):
        bootstrap_interval(documents, statistic, **options, generator=np.random.default_rng(0))


def test_mean_interval_takes_one_number_per_document() -> None:
    with pytest.raises(ValueError, match=r"values has shape \(3, 2\)"):
        mean_interval(np.zeros((3, 2)), generator=np.random.default_rng(0))


def test_standard_error_of_a_mean_over_runs_is_that_of_resampled_documents() -> None:
    """Against a loop; both have 4,000 draws, so a relative difference of 10 % has a false-alarm rate below 1e-5."""
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 3, 60)
    runs = np.where(rng.random((60, 4)) < 0.6, gold[:, np.newaxis], rng.integers(0, 3, (60, 4)))
    drawn = []
    for _ in range(4000):
        chosen = rng.integers(0, 60, 60)
        drawn.append(np.mean([macro_f1(gold[chosen], runs[chosen, run], 3) for run in range(4)]))
    found = macro_f1_stderr(gold, runs, 3, draws=4000, generator=np.random.default_rng(1))
    assert found == pytest.approx(np.std(drawn, ddof=1), rel=0.1)
    alone = [macro_f1_stderr(gold, run, 3, draws=4000, generator=np.random.default_rng(1)) for run in runs.T]
    assert found < min(alone)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_one_run_in_a_column_is_that_run(num_classes: int) -> None:
    rng = np.random.default_rng(0)
    gold, predicted = rng.integers(0, num_classes, (2, 50))
    results = {
        macro_f1_stderr(gold, values, num_classes, draws=100, generator=np.random.default_rng(1))
        for values in (predicted, predicted[:, np.newaxis])
    }
    assert len(results) == 1
