"""Rank correlations against scipy, enumeration and simulation; what cannot be computed says why."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from harness_ext.correlation import heterogeneity, partial_spearman, ranks, spearman, spearman_rho

FEW = {"num_resamples": 200, "num_permutations": 200}


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


small = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=12)


@given(st.lists(st.integers(-3, 3), max_size=20))
def test_ranks_are_those_of_scipy(values: list[int]) -> None:
    np.testing.assert_array_equal(ranks(values), stats.rankdata(values))


@given(small)
def test_rho_with_ties_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    x, y = zip(*pairs, strict=True)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(spearman_rho(x, y))
    else:
        assert spearman_rho(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def slow_rho(x: np.ndarray, y: np.ndarray, groups: np.ndarray) -> float:
    """The definition: ranks in each group over n_g + 1, less their mean; correlation of all."""
    a, b = np.zeros(len(x)), np.zeros(len(x))
    for group in set(groups):
        here = groups == group
        for scores, values in ((a, x), (b, y)):
            scores[here] = stats.rankdata(values[here]) / (here.sum() + 1)
            scores[here] -= scores[here].mean()
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def test_rho_within_groups_is_its_definition_and_ignores_levels() -> None:
    rng = generator(1)
    groups = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
    x, y = rng.integers(0, 5, size=(2, 9)).astype(float)
    assert spearman_rho(x, y, groups) == pytest.approx(slow_rho(x, y, groups), abs=1e-12)
    assert spearman_rho(x + 100 * groups, y - 100 * groups, groups) == pytest.approx(slow_rho(x, y, groups), abs=1e-12)
    # Opposite trends within and between groups.
    assert spearman_rho([1, 2, 11, 12], [12, 13, 1, 2], [0, 0, 1, 1]) == 1.0


# ------------------------------------------------------------------------------------------------------ permutations


def test_the_p_value_is_that_of_all_permutations() -> None:
    rng = generator(2)
    x, y = rng.normal(size=6), rng.integers(0, 4, size=6).astype(float)
    found = spearman(x, y, rng=rng, **FEW)
    values = [abs(stats.spearmanr(np.array(order), y).statistic) for order in itertools.permutations(x)]
    assert found.is_enumerated
    assert found.num_permutations == 720
    assert found.p_value == pytest.approx(np.mean(np.array(values) >= abs(found.value) - 1e-9), abs=1e-12)


def test_the_p_value_within_groups_is_that_of_all_permutations_within_groups() -> None:
    rng = generator(3)
    groups = np.array([0, 1, 0, 1, 0, 1, 1])
    x, y = rng.normal(size=7), rng.integers(0, 3, size=7).astype(float)
    found = spearman(x, y, groups=groups, rng=rng, **FEW)
    first, second = np.flatnonzero(groups == 0), np.flatnonzero(groups == 1)
    values = []
    for one in itertools.permutations(x[first]):
        for two in itertools.permutations(x[second]):
            permuted = x.copy()
            permuted[first], permuted[second] = one, two
            values.append(abs(slow_rho(permuted, y, groups)))
    assert len(values) == found.num_permutations == 6 * 24
    assert found.value == pytest.approx(slow_rho(x, y, groups), abs=1e-12)
    assert found.p_value == pytest.approx(np.mean(np.array(values) >= abs(found.value) - 1e-9), abs=1e-12)


def test_perfect_order_of_three_groups_of_four() -> None:
    # Of 24³ permutations two are as extreme: all in order, and all in reverse.
    x = np.tile(np.arange(4.0), 3)
    found = spearman(x, x, groups=np.repeat([0, 1, 2], 4), rng=generator(), **FEW)
    assert found.value == 1.0
    assert found.p_value == pytest.approx(2 / 24**3, rel=1e-9)
    assert found.num_groups == 3


def test_monte_carlo_agrees_with_scipy_and_is_never_zero() -> None:
    rng = generator(4)
    x = rng.normal(size=30)
    y = 0.35 * x + rng.normal(size=30)
    found = spearman(x, y, rng=rng, num_permutations=20_000, num_resamples=200)
    # The t approximation at n = 30 is within 0.003 here; 4.5 standard deviations of 20,000 draws: false alarms below 1e-5.
    p = stats.spearmanr(x, y).pvalue
    assert abs(found.p_value - p) < 4.5 * math.sqrt(p * (1 - p) / 20_000) + 0.003
    assert not found.is_enumerated
    assert spearman(x, x, rng=rng, **FEW).p_value == 1 / 201


def rejections(p_values: list[float], alpha: float) -> int:
    return sum(p <= alpha for p in p_values)


@pytest.mark.parametrize("kind", ["enumerated", "sampled", "groups", "partial"])
def test_p_values_under_the_null_are_calibrated(kind: str) -> None:
    # P(p <= 0.1) <= 0.1 holds exactly for all but the partial one, here with x independent of (y, z). With 600 repeats, more
    # than 95 rejections have probability 7e-6 (binomial); fewer than 20 below 1e-9 were the test to reject at 0.08.
    rng = generator(5)
    found = []
    for _ in range(600):
        size = 7 if kind == "enumerated" else 12
        x, y, z = rng.normal(size=(3, size))
        if kind == "partial":
            found.append(partial_spearman(x, y + 2 * z, z, rng=rng, num_resamples=100, num_permutations=199).p_value)
        else:
            groups = np.repeat([0, 1, 2], 4) if kind == "groups" else None
            y = y + (0 if groups is None else 5 * groups)
            found.append(spearman(x, y, groups=groups, rng=rng, num_resamples=100, num_permutations=199).p_value)
    assert stats.binom.sf(95, 600, 0.1) < 1e-5
    assert 20 <= rejections(found, 0.1) <= 95


def test_units_are_permuted_whole_in_all_groups() -> None:
    """Five runs: four in both groups, in another order in each, and one that has company in the first only."""
    rng = generator(7)
    runs = np.array(list("abcde" + "dbca"))
    groups = np.repeat([0, 1], [5, 4])
    x, y = rng.normal(size=9), rng.integers(0, 4, size=9).astype(float)
    found = spearman(x, y, groups=groups, units=runs, rng=rng, **FEW)
    ranks_of_x = np.concatenate([ranks(x[:5]) / 6, ranks(x[5:]) / 5])
    place = {(run, group): number for number, (run, group) in enumerate(zip(runs, groups, strict=True))}
    values = []
    for order in itertools.permutations("abcd"):
        permuted = ranks_of_x.copy()
        for run, other in zip("abcd", order, strict=True):
            for group in (0, 1):
                permuted[place[run, group]] = ranks_of_x[place[other, group]]
        values.append(abs(slow_rho(permuted, y, groups)))
    assert len(values) == found.num_permutations == 24
    assert found.value == pytest.approx(slow_rho(x, y, groups), abs=1e-12)
    assert found.p_value == pytest.approx(np.mean(np.array(values) >= abs(found.value) - 1e-9), abs=1e-12)


@pytest.mark.parametrize("partial", [False, True])
def test_models_of_one_run_each_are_on_their_own(partial: bool) -> None:
    x, y, z = generator(8).normal(size=(3, 12))
    found = [
        partial_spearman(x, y, z, units=units, rng=generator(9), **FEW)
        if partial
        else spearman(x, y, units=units, rng=generator(9), **FEW)
        for units in (None, range(12))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("partial", [False, True])
def test_p_values_of_checkpoints_of_the_same_runs_are_calibrated(partial: bool) -> None:
    """Eleven runs in three groups, mostly alike in them. As if the 33 were independent, over a fifth would be below 0.1.

    Bounds as for independent models: 7e-6 above and 1e-9 below.
    """
    rng = generator(6)
    groups, runs = np.repeat([0, 1, 2], 11), np.tile(np.arange(11), 3)
    whole, apart = [], []
    for _ in range(600):
        x, y = rng.normal(size=(2, 11))[:, runs] + 0.4 * rng.normal(size=(2, 33))
        for units, found in ((runs, whole), (None, apart)):
            options = {"units": units, "rng": rng, "num_resamples": 100, "num_permutations": 199}
            found.append(
                partial_spearman(x, y, groups + 0.1 * rng.normal(size=33), **options).p_value
                if partial
                else spearman(x, y, groups=groups, **options).p_value
            )
    assert 20 <= rejections(whole, 0.1) <= 95
    assert rejections(apart, 0.1) > 120


def test_the_p_value_within_groups_is_not_fooled_by_differences_between_them() -> None:
    rng = generator(6)
    groups = np.repeat([0, 1, 2], 4)
    x, y = rng.normal(size=(2, 12)) + 10 * groups
    assert spearman(x, y, rng=rng, **FEW).p_value < 0.01
    assert spearman(x, y, groups=groups, rng=rng, **FEW).p_value > 0.01


# ----------------------------------------------------------------------------------------------------------- partial


def residual_oracle(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> float:
    design = np.column_stack([np.ones(len(z)), stats.rankdata(z)])
    left = [stats.rankdata(v) - design @ np.linalg.lstsq(design, stats.rankdata(v), rcond=None)[0] for v in (x, y)]
    return float(np.corrcoef(*left)[0, 1])


@pytest.mark.parametrize("seed", range(5))
def test_partial_is_the_correlation_of_rank_residuals(seed: int) -> None:
    rng = generator(seed)
    x, y, z = rng.integers(0, 6, size=(3, 10)).astype(float)
    assert partial_spearman(x, y, z, rng=rng, **FEW).value == pytest.approx(residual_oracle(x, y, z), abs=1e-12)


def test_partial_enumerates_freedman_and_lane() -> None:
    rng = generator(7)
    x, y, z = rng.normal(size=(3, 5))
    found = partial_spearman(x, y, z, rng=rng, **FEW)
    design = np.column_stack([np.ones(5), stats.rankdata(z)])
    clean = np.eye(5) - design @ np.linalg.pinv(design)
    e, f = clean @ stats.rankdata(x), clean @ stats.rankdata(y)
    values = np.array([np.corrcoef(clean @ np.array(order), f)[0, 1] for order in itertools.permutations(e)])
    assert found.p_value == pytest.approx(np.mean(np.abs(values) >= abs(found.value) - 1e-9), abs=1e-12)


def test_partial_takes_out_what_z_explains() -> None:
    rng = generator(8)
    z = rng.normal(size=200)
    x, y = z + 0.5 * rng.normal(size=(2, 200))
    assert spearman_rho(x, y) > 0.6
    # The residuals are independent: |ρ| > 0.33 at n = 200 has probability below 3e-6; ranks leave a little of z.
    assert abs(partial_spearman(x, y, z, rng=rng, **FEW).value) < 0.33


# --------------------------------------------------------------------------------------------------------- bootstrap


def test_the_interval_is_that_of_slow_resampling() -> None:
    rng = generator(9)
    x, y = rng.integers(0, 6, size=(2, 9)).astype(float)
    found = spearman(x, y, rng=generator(10), num_resamples=4000, num_permutations=10)
    slow, again = [], generator(11)
    while len(slow) < 4000:
        rows = again.integers(0, 9, size=9)
        slow.append(spearman_rho(x[rows], y[rows]))
    # 0.5 % of resamples have one value of x only; 3 to 41 of 4,000 but for 1e-4 in each direction.
    assert 3 <= found.num_undefined <= 41
    lowest, highest = np.nan_to_num(slow, nan=-1.0), np.nan_to_num(slow, nan=1.0)
    # The 2.5 % point of 4,000 draws lies between the 1.4 % and the 3.9 % points of 4,000 others but for 1e-5.
    assert np.quantile(lowest, 0.014) - 1e-9 <= found.low <= np.quantile(lowest, 0.039) + 1e-9
    assert np.quantile(highest, 0.961) - 1e-9 <= found.high <= np.quantile(highest, 0.986) + 1e-9


def test_coverage_of_the_interval() -> None:
    # ρ of a bivariate normal with correlation r is (6 / π) asin(r / 2). 300 repeats at a coverage of 0.93 fall
    # below 0.86 with probability 2e-5.
    rng = generator(12)
    truth = 6 / math.pi * math.asin(0.5 / 2)
    covered = 0
    for _ in range(300):
        x = rng.normal(size=20)
        y = 0.5 * x + math.sqrt(0.75) * rng.normal(size=20)
        found = spearman(x, y, rng=rng, num_resamples=400, num_permutations=1)
        covered += found.low <= truth <= found.high
    assert covered >= 0.86 * 300


def test_undefined_resamples_widen_the_interval() -> None:
    # y differs in one model of six, which 33.5 % of resamples leave out: the interval is all there is.
    found = spearman([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1], rng=generator(), num_resamples=1000, num_permutations=10)
    assert 0.25 < found.num_undefined / 1000 < 0.42
    assert (found.low, found.high) == (-1.0, 1.0)
    assert found.value == pytest.approx(stats.spearmanr([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1]).statistic)


def test_too_few_resamples_give_no_interval() -> None:
    found = spearman([1, 2, 3, 4], [1, 2, 4, 3], rng=generator(), **FEW)
    assert math.isnan(found.low)
    assert found.interval_reason == "4 models have 35 different resamples, too few for an interval"
    assert found.to_dict()["low"] is None
    assert found.p_value == pytest.approx(8 / 24)


def test_perfect_order_has_no_interval() -> None:
    found = spearman(range(12), range(12), rng=generator(), **FEW)
    assert found.value == 1.0
    assert math.isnan(found.low)
    assert str(found) == "ρ = 1.00, p = 0.005"
    assert found.interval_reason == "every resample has the same value"


def test_one_seed_gives_one_result() -> None:
    x, y = generator(13).normal(size=(2, 12))
    assert spearman(x, y, rng=generator(1), **FEW) == spearman(x, y, rng=generator(1), **FEW)


@given(small)
@settings(max_examples=50, deadline=None)
def test_properties(pairs: list[tuple[int, int]]) -> None:
    x, y = map(np.array, zip(*pairs, strict=True))
    found = spearman(x, y, rng=generator(), num_resamples=100, num_permutations=50)
    if found.reason is not None:
        assert math.isnan(found.value)
        assert math.isnan(found.p_value)
        return
    assert -1 <= found.value <= 1
    assert 0 < found.p_value <= 1
    turned = spearman(np.exp(x), -y, rng=generator(), num_resamples=100, num_permutations=50)
    assert turned.value == pytest.approx(-found.value, abs=1e-12)
    assert turned.p_value == pytest.approx(found.p_value, abs=1e-9)
    if found.interval_reason is None:
        assert found.low <= found.high


# ----------------------------------------------------------------------------------------------- what has no value


@pytest.mark.parametrize(
    ("x", "y", "groups", "reason"),
    [
        ([1, 2], [1, 2], None, "2 models are too few"),
        ([], [], None, "0 models are too few"),
        ([1, 2, 3], [5, 5, 5], None, "y is the same for all models"),
        ([1, 1, 2, 2, 3, 3], [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 2, 2], "x is the same for all models of a group"),
        ([1, 2, 3], [1, 2, 3], [0, 1, 2], "0 models in 0 groups"),
        ([1, 2, 3], [1, 2, 3], [0, 0, 1], "2 models in 1 groups"),
    ],
)
def test_no_value_has_a_reason(x: list[float], y: list[float], groups: list[int] | None, reason: str) -> None:
    found = spearman(x, y, groups=groups, rng=generator(), **FEW)
    assert math.isnan(found.value)
    assert math.isnan(found.p_value)
    assert reason in str(found)
    assert found.to_dict()["value"] is None


def test_partial_without_a_value_has_a_reason() -> None:
    rng = generator()
    assert "needs 4" in str(partial_spearman([1, 2, 3], [1, 3, 2], [3, 1, 2], rng=rng))
    assert "z is the same" in str(partial_spearman([1, 2, 3, 4], [1, 3, 2, 4], [1, 1, 1, 1], rng=rng))
    assert "determine those of x" in str(partial_spearman([1, 2, 3, 4], [1, 3, 2, 4], [8, 6, 4, 2], rng=rng))


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        (([1, 2], [1, 2, 3]), {}, r"x \(2,\), y \(3,\)"),
        (([1, math.nan, 3], [1, 2, 3]), {}, r"x\[1\] is nan"),
        (([1, 2, 3], [1, 2, 3]), {"groups": [1, 2]}, "got 2 for 3"),
        (([1, 2, 3], [1, 2, 3]), {"confidence": 95}, "such as 0.95"),
        (([1, 2, 3], [1, 2, 3]), {"num_resamples": 10}, "at least 100 resamples"),
    ],
)
def test_bad_input(arguments: tuple[list[float], list[float]], options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        spearman(*arguments, rng=generator(), **options)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------ spread


def test_q_by_hand_and_of_two_values_the_square_of_z() -> None:
    found = heterogeneity([0.80, 0.86], [0.03, 0.04])
    assert found.statistic == pytest.approx((0.06 / 0.05) ** 2)
    assert found.p_value == pytest.approx(2 * stats.norm.sf(0.06 / 0.05))
    assert not found.exceeds_error()
    assert heterogeneity([0.70, 0.86], [0.03, 0.04]).exceeds_error()


def test_q_within_groups_is_the_sum() -> None:
    values, errors = [0.1, 0.3, 0.9, 0.8, 0.85, 0.5], [0.1, 0.1, 0.02, 0.03, 0.02, 0.1]
    both = heterogeneity(values, errors, list("aabbbc"))
    first, second = heterogeneity(values[:2], errors[:2]), heterogeneity(values[2:5], errors[2:5])
    assert both.statistic == pytest.approx(first.statistic + second.statistic)
    assert both.degrees_of_freedom == 3


def test_p_values_of_equal_accuracies_are_calibrated() -> None:
    # Accuracies of 500 documents with their estimated errors: 2,000 repeats at 0.05 exceed 0.075 with probability 1e-6, the
    # error of the normal approximation included.
    rng = generator(14)
    accuracies = rng.binomial(500, 0.8, size=(2000, 6)) / 500
    hits = sum(heterogeneity(row, np.sqrt(row * (1 - row) / 500)).exceeds_error(0.05) for row in accuracies)
    assert 0.03 <= hits / 2000 <= 0.075


def test_zero_errors_stand_for_the_others() -> None:
    with_zero = heterogeneity([1.0, 0.98, 0.96], [0.0, 0.01, 0.02])
    assert with_zero == heterogeneity([1.0, 0.98, 0.96], [math.sqrt(2.5e-4), 0.01, 0.02])
    assert heterogeneity([1.0, 1.0], [0.0, 0.0]).p_value == 1.0
    assert heterogeneity([1.0, 0.0], [0.0, 0.0]).p_value == 0.0


def test_a_spread_that_cannot_be_known_is_not_called_real() -> None:
    for found in (heterogeneity([0.1, 0.9], [0.1, math.nan]), heterogeneity([0.5], [0.1])):
        assert found.reason
        assert math.isnan(found.p_value)
        assert not found.exceeds_error()
    with pytest.raises(ValueError, match="not negative"):
        heterogeneity([0.1, 0.9], [0.1, -1])
