"""A ratio of sums and its error, against the mean, against simulation and at the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness_ext.ratio import ratio_of_sums


def test_equal_weights_give_the_mean_and_its_usual_error() -> None:
    values = np.array([1.0, 4.0, 2.5, -1.0])
    value, stderr = ratio_of_sums(values * 128, np.full(4, 128.0))
    assert value == pytest.approx(values.mean(), rel=1e-15)
    assert stderr == pytest.approx(values.std(ddof=1) / 2, rel=1e-14)


def test_by_hand() -> None:
    value, stderr = ratio_of_sums([2.0, 4.0], [1.0, 3.0])
    assert value == 1.5
    # Residuals 0.5 and -0.5; variance 0.5 / (2 * 1); mean denominator 2.
    assert stderr == pytest.approx(math.sqrt(0.25) / 2)


def test_the_interval_covers_the_ratio_of_expectations() -> None:
    # 4,000 repeats at coverage 0.95 have a standard deviation of 0.0034; false-alarm rate of 4.4 of these below 2e-5, plus
    # the bias of the delta method at n = 100, which is of the order of 1/n.
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 129, size=(4000, 100)).astype(float)
    nats = lengths * rng.gamma(4.0, 1.0, size=lengths.shape)
    hits = 0
    for a, b in zip(nats, lengths, strict=True):
        value, stderr = ratio_of_sums(a, b)
        hits += abs(value - 4.0) <= 1.959964 * stderr
    assert abs(hits / 4000 - 0.95) < 0.015 + 0.01


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0, 2.0], [0.0, 0.0])])
def test_no_value_without_a_denominator(a: list[float], b: list[float]) -> None:
    assert all(map(math.isnan, ratio_of_sums(a, b)))


def test_one_pair_has_no_error() -> None:
    value, stderr = ratio_of_sums([3.0], [2.0])
    assert value == 1.5
    assert math.isnan(stderr)


def test_lengths_have_to_agree() -> None:
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(1,\)"):
        ratio_of_sums([1.0, 2.0], [1.0])
