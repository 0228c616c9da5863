"""Intervals, the exact McNemar test, the paired bootstrap and aggregates, against scipy and slow, obvious oracles."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from harness_ext.leaderboard import statistics

COUNTS = st.integers(0, 300)


def test_mcnemar_of_the_known_pair() -> None:
    # 220 documents, of which 25 only the first model has right and 8 only the second.
    assert statistics.mcnemar_exact(25, 8) == pytest.approx(0.00455, abs=5e-6)
    assert statistics.mcnemar_exact(25, 8) == statistics.mcnemar_exact(8, 25)


@given(COUNTS, COUNTS)
def test_mcnemar_is_the_two_sided_binomial_test(first: int, second: int) -> None:
    expected = scipy.stats.binomtest(first, first + second, 0.5).pvalue if first + second else 1.0
    assert statistics.mcnemar_exact(first, second) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (3, 3), (2, 7), (0, 12)])
def test_mcnemar_by_enumeration(first: int, second: int) -> None:
    total = first + second
    extreme = sum(
        1
        for signs in itertools.product((0, 1), repeat=total)
        if abs(sum(signs) - Fraction(total, 2)) >= abs(first - Fraction(total, 2))
    )
    assert statistics.mcnemar_exact(first, second) == pytest.approx(extreme / 2**total)


def test_mcnemar_of_many_documents_does_not_overflow() -> None:
    assert statistics.mcnemar_exact(40_000, 20_000) == 0.0
    assert statistics.mcnemar_exact(30_000, 30_000) == 1.0
    assert 0 < statistics.mcnemar_exact(10_200, 9_800) < 0.01


def test_mcnemar_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        statistics.mcnemar_exact(-1, 3)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_agrees_with_scipy(counts: tuple[int, int]) -> None:
    successes, count = counts
    expected = scipy.stats.binomtest(successes, count).proportion_ci(0.95, method="wilson")
    low, high = statistics.wilson(successes, count)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= low <= successes / count <= high <= 1


def test_wilson_refuses_what_is_no_proportion() -> None:
    for successes, count in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="successes"):
            statistics.wilson(successes, count)


def test_intervals_go_by_the_standard_error_and_else_by_wilson() -> None:
    quantile = scipy.stats.norm.ppf(0.975)
    share = {"bounded": True, "is_share": True}
    other = {"bounded": False, "is_share": False}
    by_error = statistics.interval(0.7, 0.02, 100, **share)
    assert by_error == pytest.approx((0.7 - quantile * 0.02, 0.7 + quantile * 0.02))
    assert statistics.interval(0.99, 0.02, 100, **share)[1] == 1.0  # type: ignore[index]
    assert statistics.interval(0.7, None, 100, **share) == statistics.wilson(70, 100)
    # All documents right: lm_eval's standard error is 0, and the true rate is not known to be 1.
    assert statistics.interval(1.0, 0.0, 50, **share) == statistics.wilson(50, 50)
    assert statistics.interval(5000.0, 100.0, 64, **other) == pytest.approx(
        (5000 - quantile * 100, 5000 + quantile * 100)
    )
    for unknown in (
        statistics.interval(0.7, None, None, **share),
        statistics.interval(5000.0, None, 64, **other),
        statistics.interval(5000.0, 0.0, 64, **other),
        statistics.interval(1.2, None, 64, **share),
        # F1 is no binomial.
        statistics.interval(0.7, None, 100, bounded=True, is_share=False),
    ):
        assert unknown is None


@given(
    st.floats(-1, 2) | st.sampled_from([0.0, 1.0, 1.3, 70.0]),
    st.none() | st.just(0.0) | st.floats(1e-12, 10),
    st.none() | st.integers(1, 10**6),
    st.booleans(),
    st.booleans(),
)
def test_a_score_lies_in_its_interval(
    value: float, stderr: float | None, count: int | None, bounded: bool, is_share: bool
) -> None:
    found = statistics.interval(value, stderr, count, bounded=bounded or is_share, is_share=is_share)
    if found is not None:
        assert found[0] <= value <= found[1]


def test_the_paired_bootstrap_agrees_with_resampling_documents() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 2, 220).astype(float)
    second = np.where(rng.random(220) < 0.15, 1 - first, first)
    found = statistics.paired_bootstrap(first, second, rng=np.random.default_rng(1), draws=20_000)
    draws = rng.integers(0, 220, (20_000, 220))
    low, high = np.quantile((second - first)[draws].mean(axis=1), [0.025, 0.975])
    assert found.value == pytest.approx((second - first).mean())
    # Ends are multiples of 1/220; two of them is some five standard errors of an end's place.
    assert found.low == pytest.approx(low, abs=2 / 220)
    assert found.high == pytest.approx(high, abs=2 / 220)
    again = statistics.paired_bootstrap(first, second, rng=np.random.default_rng(1), draws=20_000)
    assert again == found


def test_the_paired_bootstrap_agrees_with_scipy_on_partial_credit() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.random(300), rng.random(300)
    found = statistics.paired_bootstrap(first, second, rng=np.random.default_rng(4))
    reference = scipy.stats.bootstrap(
        (second - first,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(5)
    ).confidence_interval
    spread = (second - first).std() / math.sqrt(300)
    # An end of a percentile interval of 10,000 draws has a standard error of 0.027 spreads: seven of the difference of two.
    assert found.low == pytest.approx(reference.low, abs=0.27 * spread)
    assert found.high == pytest.approx(reference.high, abs=0.27 * spread)


def test_the_paired_bootstrap_of_equal_models_and_of_one_document() -> None:
    same = statistics.paired_bootstrap([1.0, 0.0, 1.0], [1.0, 0.0, 1.0], rng=np.random.default_rng(0))
    assert (same.value, same.low, same.high) == (0, 0, 0)
    one = statistics.paired_bootstrap([0.0], [1.0], rng=np.random.default_rng(0))
    assert (one.value, one.low, one.high) == (1, None, None)
    with pytest.raises(ValueError, match="one length"):
        statistics.paired_bootstrap([0.0], [1.0, 1.0], rng=np.random.default_rng(0))


def test_normalised_scores() -> None:
    assert statistics.normalised(0.5, 0.5) == 0
    assert statistics.normalised(1.0, 0.5) == 1
    assert statistics.normalised(0.4, 0.5) == pytest.approx(-0.2)
    with pytest.raises(ValueError, match="chance"):
        statistics.normalised(0.9, 1.0)


TABLES = st.integers(2, 7).flatmap(
    lambda models: st.lists(
        st.lists(st.sampled_from([0.1, 0.2, 0.5, 0.5, 0.9]), min_size=3, max_size=3), min_size=models, max_size=models
    )
)


@given(TABLES, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_win_rates_and_borda_by_counting_pairs(table: list[list[float]], higher: tuple[bool, ...]) -> None:
    beaten = [[0.0] * 3 for _ in table]
    for (i, first), (_, second) in itertools.permutations(enumerate(table), 2):
        for task in range(3):
            better = first[task] > second[task] if higher[task] else first[task] < second[task]
            beaten[i][task] += 1.0 if better else 0.5 if first[task] == second[task] else 0.0
    scores = np.array(table)
    assert statistics.borda(scores, higher).tolist() == [sum(row) for row in beaten]
    expected = [sum(count / (len(table) - 1) for count in row) / 3 for row in beaten]
    assert statistics.win_rates(scores, higher) == pytest.approx(expected)
    assert statistics.win_rates(scores, higher).mean() == pytest.approx(0.5)


def test_rows_that_lack_a_task_are_refused_and_one_model_wins_nothing() -> None:
    with pytest.raises(ValueError, match="not finite"):
        statistics.borda(np.array([[0.5, np.nan], [0.5, 0.5]]), [True, True])
    assert np.isnan(statistics.win_rates(np.array([[0.5]]), [True])).all()
