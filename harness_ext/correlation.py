"""Rank correlations over a few models, overall or within loss-matched groups, and whether their spread exceeds their errors.

Spearman's ρ is the correlation of ranks, ties at their average rank. Within groups, ranks are taken in each group of n_g
models and divided by n_g + 1 (van Elteren's weights, 1960: each model counts about the same in small groups and large ones),
so that differences between groups, such as their losses, have no part in it; with one group it is Spearman's ρ.

Intervals: percentile bootstrap over models (within each group where there are groups), ranks taken anew in each resample.
P-values: two-sided permutation tests (within each group), all permutations where they are few, otherwise Monte Carlo with
p = (1 + hits) / (1 + permutations), which is valid too (Phipson and Smyth, 2010).

Checkpoints of one training run are alike, so that three groups of the same eleven runs say hardly more than eleven models
do. `units` names the run of each model: runs are then permuted and resampled whole, in all groups at once, among runs that
have models in the same groups.

The 95 % interval covered the true ρ of independent bivariate normals 94 to 99.7 times in 100 at 6 to 20 models and in 3
groups of 4; it is too wide where ρ is large and models are few, and some samples have none there.

Known gaps: measurement errors of the two variables are part of the scatter and are not corrected for: they pull ρ towards 0.
A run that no other shares its pattern of groups with is neither exchanged nor resampled: it is in every resample as it is, so
that intervals are too narrow where many runs are so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["Correlation", "Heterogeneity", "heterogeneity", "partial_spearman", "ranks", "spearman", "spearman_rho"]

_LARGEST_ENUMERATED = 8
"""Models of a group of which all permutations are made: 8! = 40,320."""

_MOST_SUMS = 2_000_000
"""Distinct values of the statistic over the permutations of all groups; with more, Monte Carlo."""

_FEWEST_RESAMPLES = 100
"""Distinct bootstrap resamples below which a tail of some per cent has no place."""

_ROUNDING = 1e-9
"""Two values of a correlation that differ by less are equal: ranks are multiples of 1/2, so real differences are larger."""

_CHUNK = 2_000_000
"""Numbers held at once in each work array."""

Vector = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Correlation:
    """A rank correlation of two variables over models. What cannot be computed is NaN, with a reason.

    Attributes:
        value: ρ in [−1, 1].
        low: Lower end of the bootstrap interval.
        high: Upper end.
        p_value: Two-sided, of the hypothesis that the order of x has nothing to do with that of y.
        confidence: Of the interval.
        num_models: Models; in groups, those that have company.
        num_groups: Groups of two models or more; 1 without groups.
        num_resamples: Resamples of the bootstrap.
        num_undefined: Resamples without a value, x or y being constant in them. They widen the interval: each stands at −1
            for its lower end and at +1 for its upper.
        num_permutations: Permutations looked at, or in existence where all were.
        is_enumerated: Whether the p-value is over all permutations.
        reason: Why there is no value; None if there is.
        interval_reason: Why there is a value and no interval.
    """

    value: float
    low: float
    high: float
    p_value: float
    confidence: float
    num_models: int
    num_groups: int
    num_resamples: int
    num_undefined: int
    num_permutations: int
    is_enumerated: bool
    reason: str | None = None
    interval_reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: NaN as None."""
        return {name: _without_nan(value) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        if self.reason is not None:
            return self.reason
        interval = "" if self.interval_reason else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"ρ = {self.value:.2f}{interval}, p = {self.p_value:.2g}"


@dataclass(frozen=True)
class Heterogeneity:
    """Whether values differ by more than their errors. What cannot be computed is NaN, with a reason.

    Attributes:
        statistic: Cochran's Q, Σ (v_i − v̄)² / s_i² with v̄ weighted by 1 / s_i²; summed over groups where there are groups.
        degrees_of_freedom: n − 1, or Σ (n_g − 1).
        p_value: P(χ² ≥ Q), if all values were equal (within each group).
        reason: Why there is no p-value; None if there is.
    """

    statistic: float
    degrees_of_freedom: int
    p_value: float
    reason: str | None = None

    def exceeds_error(self, alpha: float = 0.05) -> bool:
        """Whether the spread is more than error at level `alpha`; never where that cannot be known."""
        return self.p_value <= alpha

    def to_dict(self) -> dict[str, Any]:
        """For JSON: NaN as None."""
        return {name: _without_nan(value) for name, value in asdict(self).items()}


def _without_nan(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ranks(values: Vector) -> np.ndarray:
    """Ranks from 1 in ascending order, float64 (n,), ties at the mean of their ranks."""
    values = np.asarray(values, dtype=np.float64)
    return _ranks_of_resamples(values, np.ones((1, len(values))))[0]


def spearman_rho(x: Vector, y: Vector, groups: Sequence[Any] | np.ndarray | None = None) -> float:
    """Spearman's ρ, within groups if there are any; see the module.

    Args:
        x: Finite, shape (n,).
        y: Likewise.
        groups: Group of each model, hashable; None: all are one.

    Returns:
        ρ; NaN if x or y does not vary (within any group).

    Raises:
        ValueError: If lengths differ or a value is not finite.
    """
    x, y = _vectors(x=x, y=y)
    return float(_rho_of_counts([x, y], _members(groups, len(x)), np.ones((1, len(x))))[0])


def spearman(
    x: Vector,
    y: Vector,
    *,
    rng: np.random.Generator,
    groups: Sequence[Any] | np.ndarray | None = None,
    units: Sequence[Any] | np.ndarray | None = None,
    num_resamples: int = 10_000,
    num_permutations: int = 10_000,
    confidence: float = 0.95,
) -> Correlation:
    """Spearman's ρ with bootstrap interval and permutation p-value, within groups if there are any; see the module.

    Args:
        x: Finite, shape (n,).
        y: Likewise.
        rng: Source of resamples and permutations.
        groups: Group of each model, hashable; None: all are one. A model alone in its group has no part in ρ.
        units: What each model is a part of, such as its training run, hashable; None: each is on its own.
        num_resamples: Of the bootstrap.
        num_permutations: Of Monte Carlo, if there are too many to look at all.
        confidence: Of the interval, in (0, 1).

    Returns:
        The correlation; without a value if x or y does not vary within any group, or Σ (n_g − 1) < 2.

    Raises:
        ValueError: If lengths differ, a value is not finite, or an option is out of range.
    """
    _check_options(num_resamples, num_permutations, confidence)
    x, y = _vectors(x=x, y=y)
    members = [group for group in _members(groups, len(x)) if len(group) > 1]
    total = sum(map(len, members))
    reason = None
    if total - len(members) < 2:
        reason = (
            f"{total} models in {len(members)} groups of two or more are too few: Σ (n_g − 1) has to be at least 2"
            if groups is not None
            else f"{len(x)} models are too few for a rank correlation, which needs 3"
        )
    else:
        for name, values in (("x", x), ("y", y)):
            if all(np.ptp(values[group]) == 0 for group in members):
                reason = f"{name} is the same for all models" + (" of a group" if groups is not None else "")
    if reason is not None:
        return _no_value(reason, total, len(members), confidence)

    value = float(_rho_of_counts([x, y], members, np.ones((1, len(x))))[0])
    a, b = _scores(x, members), _scores(y, members)
    strata = _strata(units, members, len(x))
    p_value, permutations, enumerated = _permutation_test(a, b, strata, num_permutations, rng)
    return _with_interval(
        value,
        p_value,
        permutations,
        enumerated,
        [x, y],
        members,
        strata,
        _rho_of_counts,
        num_resamples,
        confidence,
        rng,
    )


def partial_spearman(
    x: Vector,
    y: Vector,
    z: Vector,
    *,
    rng: np.random.Generator,
    units: Sequence[Any] | np.ndarray | None = None,
    num_resamples: int = 10_000,
    num_permutations: int = 10_000,
    confidence: float = 0.95,
) -> Correlation:
    """Partial Spearman correlation of x and y given z: the correlation of what is left of their ranks after regression on z's.

    The p-value permutes the residuals of x (Freedman and Lane, 1983), which is exact where x has nothing to do with z and
    approximate otherwise.

    Args:
        x: Finite, shape (n,).
        y: Likewise.
        z: Likewise, what is held fixed.
        rng: Source of resamples and permutations.
        units: As in `spearman`; units of equally many models are exchanged.
        num_resamples: Of the bootstrap.
        num_permutations: Of Monte Carlo, used above 8 models and with units of several.
        confidence: Of the interval, in (0, 1).

    Returns:
        The correlation; without a value if n < 4, if a variable does not vary, or if the ranks of z determine those of x or y.

    Raises:
        ValueError: If lengths differ, a value is not finite, or an option is out of range.
    """
    _check_options(num_resamples, num_permutations, confidence)
    x, y, z = _vectors(x=x, y=y, z=z)
    members = [np.arange(len(x))]
    reason = None
    if len(x) < 4:
        reason = f"{len(x)} models are too few for a partial rank correlation, which needs 4"
    else:
        constant = [name for name, values in (("x", x), ("y", y), ("z", z)) if np.ptp(values) == 0]
        if constant:
            reason = f"{constant[0]} is the same for all models"
    if reason is not None:
        return _no_value(reason, len(x), 1, confidence)

    a, b, c = (_scores(values, members) for values in (x, y, z))
    left_a, left_b = _residuals(a[None], c)[0], _residuals(b[None], c)[0]
    for name, left, scores in (("x", left_a, a), ("y", left_b, b)):
        if left @ left <= _ROUNDING * (scores @ scores):
            return _no_value(f"the ranks of z determine those of {name}", len(x), 1, confidence)
    value = float(left_a @ left_b / math.sqrt((left_a @ left_a) * (left_b @ left_b)))

    strata = _strata(units, members, len(x))
    enumerated = len(x) <= _LARGEST_ENUMERATED and strata[0].shape == (len(x), 1)
    if enumerated:
        chunks: Iterator[np.ndarray] = iter([left_a[_all_permutations(len(x))]])
    else:
        chunks = _shuffled(left_a, strata, num_permutations, rng)
    hits = seen = 0
    for permuted in chunks:
        again = _residuals(permuted, c)
        norms = np.sqrt(np.einsum("ij,ij->i", again, again) * (left_b @ left_b))
        # A permutation that z determines says nothing against the observed value; it counts as a hit, so p is not too small.
        found = np.divide(again @ left_b, norms, out=np.ones(len(again)), where=norms > _ROUNDING)
        hits += int(np.count_nonzero(np.abs(found) >= abs(value) - _ROUNDING))
        seen += len(permuted)
    p_value = hits / seen if enumerated else (1 + hits) / (1 + seen)
    return _with_interval(
        value, p_value, seen, enumerated, [x, y, z], members, strata, _partial_of_counts, num_resamples, confidence, rng
    )


def heterogeneity(values: Vector, stderrs: Vector, groups: Sequence[Any] | np.ndarray | None = None) -> Heterogeneity:
    """Test whether values differ by more than their standard errors (Cochran, 1954), within groups if there are any.

    Errors are taken as independent. Accuracies on the same documents have errors in common, so their differences are known
    better than this test thinks, and it calls too few spreads real rather than too many.

    An error of 0 is that of an accuracy of 0 or 1 as lm_eval gives it, and stands for the root mean square of the other
    errors (of all groups).

    Args:
        values: Finite, shape (n,).
        stderrs: Not negative, shape (n,); NaN where there is none.
        groups: Group of each value, hashable; None: all are one.

    Returns:
        The test; without a p-value if an error is NaN, or no group has two values.

    Raises:
        ValueError: If lengths differ, a value is not finite, or an error is negative.
    """
    values = _vectors(values=values)[0]
    errors = np.asarray(stderrs, dtype=np.float64)
    if errors.shape != values.shape:
        raise ValueError(f"expected an error for each value, got shapes {errors.shape} and {values.shape}")
    if np.any(errors < 0):
        raise ValueError(f"expected errors that are not negative, got {errors.min()}")
    members = [group for group in _members(groups, len(values)) if len(group) > 1]
    freedom = sum(map(len, members)) - len(members)
    nan = float("nan")
    if freedom < 1:
        return Heterogeneity(nan, 0, nan, "a spread needs two models" + (" of a group" if groups is not None else ""))
    used = np.concatenate(members)
    missing = int(np.count_nonzero(~np.isfinite(errors[used])))
    if missing:
        return Heterogeneity(nan, freedom, nan, f"{missing} of {len(used)} values have no standard error")
    positive = errors[used][errors[used] > 0]
    if len(positive) == 0:
        differ = any(np.ptp(values[group]) > 0 for group in members)
        return Heterogeneity(float("inf") if differ else 0.0, freedom, 0.0 if differ else 1.0)
    errors = np.where(errors > 0, errors, math.sqrt(float(np.mean(positive**2))))
    statistic = 0.0
    for group in members:
        weights = 1 / errors[group] ** 2
        centre = weights @ values[group] / weights.sum()
        statistic += float(weights @ (values[group] - centre) ** 2)

    from scipy.stats import chi2

    return Heterogeneity(statistic, freedom, float(chi2.sf(statistic, freedom)))


# ------------------------------------------------------------------------------------------------------------- input


def _vectors(**named: Vector) -> list[np.ndarray]:
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in named.items()}
    if len({array.shape for array in arrays.values()}) > 1 or any(array.ndim != 1 for array in arrays.values()):
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"expected vectors of one length, got {shapes}")
    for name, array in arrays.items():
        bad = np.flatnonzero(~np.isfinite(array))
        if len(bad):
            raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}, expected a number; leave models without one out")
    return list(arrays.values())


def _check_options(num_resamples: int, num_permutations: int, confidence: float) -> None:
    if num_resamples < _FEWEST_RESAMPLES or num_permutations < 1:
        raise ValueError(
            f"expected at least {_FEWEST_RESAMPLES} resamples and one permutation, got {num_resamples} and {num_permutations}"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}, expected a number between 0 and 1, such as 0.95")


def _members(groups: Sequence[Any] | np.ndarray | None, num_models: int) -> list[np.ndarray]:
    """Places of each group's models, groups in order of appearance."""
    if groups is None:
        return [np.arange(num_models)]
    if len(groups) != num_models:
        raise ValueError(f"expected a group for each model, got {len(groups)} for {num_models}")
    places: dict[Any, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return [np.array(found) for found in places.values()]


def _strata(
    units: Sequence[Any] | np.ndarray | None, members: Sequence[np.ndarray], num_models: int
) -> list[np.ndarray]:
    """What may be exchanged: of each stratum the places of its units' models, shape (units, models of each).

    Units of one stratum have equally many models in each group, which stand in the order of the groups.
    """
    if units is None:
        return [group[:, np.newaxis] for group in members]
    if len(units) != num_models:
        raise ValueError(f"expected a unit for each model, got {len(units)} for {num_models}")
    places: dict[Any, list[int]] = {}
    pattern: dict[Any, list[int]] = {}
    for number, group in enumerate(members):
        for place in group:
            places.setdefault(units[place], []).append(int(place))
            pattern.setdefault(units[place], []).append(number)
    alike: dict[tuple[int, ...], list[list[int]]] = {}
    for unit, found in places.items():
        alike.setdefault(tuple(pattern[unit]), []).append(found)
    return [np.array(found) for found in alike.values()]


def _no_value(reason: str, num_models: int, num_groups: int, confidence: float) -> Correlation:
    nan = float("nan")
    return Correlation(nan, nan, nan, nan, confidence, num_models, num_groups, 0, 0, 0, False, reason)


# ------------------------------------------------------------------------------------------------------------- ranks


def _ranks_of_resamples(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Rank of each of n models in resamples that hold it `counts` times (resamples, n); a model that is not there has one too.

    A value's copies have the mean of their ranks: those before it, plus (copies + 1) / 2.
    """
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    is_first = np.append(True, ascending[1:] != ascending[:-1]) if len(values) else np.zeros(0, dtype=bool)
    copies = np.add.reduceat(counts[:, order], np.flatnonzero(is_first), axis=1) if len(values) else counts
    of_value = np.cumsum(copies, axis=1) - copies + (copies + 1) / 2
    result = np.empty(counts.shape)
    result[:, order] = of_value[:, np.cumsum(is_first) - 1]
    return result


def _scores_of_resamples(values: np.ndarray, members: Sequence[np.ndarray], counts: np.ndarray) -> np.ndarray:
    """Ranks within each group over n_g + 1, less 1/2, their mean; 0 for models of no group."""
    scores = np.zeros(counts.shape)
    for group in members:
        scores[:, group] = _ranks_of_resamples(values[group], counts[:, group]) / (len(group) + 1) - 0.5
    return scores


def _scores(values: np.ndarray, members: Sequence[np.ndarray]) -> np.ndarray:
    return _scores_of_resamples(values, members, np.ones((1, len(values))))[0]


def _rho_of_counts(variables: Sequence[np.ndarray], members: Sequence[np.ndarray], counts: np.ndarray) -> np.ndarray:
    """ρ in each resample; NaN where a variable is constant."""
    a, b = (_scores_of_resamples(values, members, counts) for values in variables)
    return _weighted_correlation(a, b, counts)


def _partial_of_counts(
    variables: Sequence[np.ndarray], members: Sequence[np.ndarray], counts: np.ndarray
) -> np.ndarray:
    """(ρ_xy − ρ_xz ρ_yz) / √((1 − ρ_xz²)(1 − ρ_yz²)) in each resample; NaN where that is not defined."""
    a, b, c = (_scores_of_resamples(values, members, counts) for values in variables)
    ab, ac, bc = (_weighted_correlation(u, v, counts) for u, v in ((a, b), (a, c), (b, c)))
    left = (1 - ac**2) * (1 - bc**2)
    defined = left > _ROUNDING**2
    return np.divide(ab - ac * bc, np.sqrt(np.maximum(left, 0)), out=np.full(len(left), np.nan), where=defined).clip(
        -1, 1
    )


def _weighted_correlation(a: np.ndarray, b: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Σ w a b / √(Σ w a² Σ w b²) in each row; the weighted means of a and b are 0 already."""
    products = np.einsum("ij,ij,ij->i", weights, a, b)
    norms = np.einsum("ij,ij->i", weights, a**2) * np.einsum("ij,ij->i", weights, b**2)
    return np.divide(products, np.sqrt(norms), out=np.full(len(a), np.nan), where=norms > _ROUNDING**2).clip(-1, 1)


def _residuals(rows: np.ndarray, regressor: np.ndarray) -> np.ndarray:
    """What is left of each row (n,) after regression on a regressor of mean 0; the rows have mean 0."""
    return rows - np.outer(rows @ regressor, regressor) / (regressor @ regressor)


# ---------------------------------------------------------------------------------------------------------- bootstrap


def _with_interval(
    value: float,
    p_value: float,
    num_permutations: int,
    is_enumerated: bool,
    variables: Sequence[np.ndarray],
    members: Sequence[np.ndarray],
    strata: Sequence[np.ndarray],
    statistic: Callable[[Sequence[np.ndarray], Sequence[np.ndarray], np.ndarray], np.ndarray],
    num_resamples: int,
    confidence: float,
    rng: np.random.Generator,
) -> Correlation:
    sizes = [len(group) for group in members]
    # The multisets of n units out of n.
    distinct = math.prod(math.comb(2 * len(stratum) - 1, len(stratum)) for stratum in strata)
    low = high = float("nan")
    undefined = 0
    reason = None
    if distinct < _FEWEST_RESAMPLES:
        num_resamples = 0
        reason = f"{sum(sizes)} models have {distinct} different resamples, too few for an interval"
    else:
        num_models = len(variables[0])
        found = []
        for size in _chunks(num_resamples, num_models):
            counts = np.zeros((size, num_models))
            for stratum in strata:
                number = len(stratum)
                counts[:, stratum] = rng.multinomial(number, np.full(number, 1 / number), size=size)[:, :, np.newaxis]
            found.append(statistic(variables, members, counts))
        values = np.concatenate(found)
        is_undefined = np.isnan(values)
        undefined = int(np.count_nonzero(is_undefined))
        tail = (1 - confidence) / 2
        low = float(np.quantile(np.where(is_undefined, -1.0, values), tail))
        high = float(np.quantile(np.where(is_undefined, 1.0, values), 1 - tail))
        if np.nanmax(values, initial=-1.0) - np.nanmin(values, initial=1.0) <= _ROUNDING:
            # Models in perfect order are so in every resample, which does not make ρ certain.
            low = high = float("nan")
            reason = "every resample has the same value"
    return Correlation(
        value=value,
        low=low,
        high=high,
        p_value=p_value,
        confidence=confidence,
        num_models=sum(sizes),
        num_groups=len(sizes),
        num_resamples=num_resamples,
        num_undefined=undefined,
        num_permutations=num_permutations,
        is_enumerated=is_enumerated,
        interval_reason=reason,
    )


def _chunks(rows: int, columns: int) -> Iterator[int]:
    at_once = max(1, _CHUNK // max(1, columns))
    for start in range(0, rows, at_once):
        yield min(at_once, rows - start)


# ------------------------------------------------------------------------------------------------------- permutations


def _permutation_test(
    a: np.ndarray, b: np.ndarray, strata: Sequence[np.ndarray], num_permutations: int, rng: np.random.Generator
) -> tuple[float, int, bool]:
    """P(|Σ a_π b| ≥ |Σ a b|) over permutations π of units within strata, their number, and whether they are all.

    The norms of a and b do not change, so Σ a b stands for ρ.
    """
    observed = abs(float(a @ b)) - _ROUNDING
    if max(map(len, strata)) <= _LARGEST_ENUMERATED:
        # Strata are permuted independently, so the distribution of the sum is the convolution of theirs.
        sums, weights = np.zeros(1), np.ones(1)
        for stratum in strata:
            # Of b's unit in the row with a's unit in the column.
            products, number = b[stratum] @ a[stratum].T, len(stratum)
            own, own_counts = _counted(products[np.arange(number), _all_permutations(number)].sum(axis=1)[None], None)
            if len(sums) * len(own) > _MOST_SUMS:
                break
            sums, weights = _counted(np.add.outer(sums, own), np.multiply.outer(weights, own_counts / own_counts.sum()))
        else:
            p_value = float(weights[np.abs(sums) >= observed].sum())
            return min(1.0, p_value), math.prod(math.factorial(len(stratum)) for stratum in strata), True
    hits = 0
    for permuted in _shuffled(a, strata, num_permutations, rng):
        hits += int(np.count_nonzero(np.abs(permuted @ b) >= observed))
    return (1 + hits) / (1 + num_permutations), num_permutations, False


def _counted(values: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values up to rounding, and the sum of the weights of each."""
    flat = values.ravel()
    _, first, inverse = np.unique(np.round(flat / _ROUNDING), return_index=True, return_inverse=True)
    return flat[first], np.bincount(inverse.ravel(), weights=None if weights is None else weights.ravel()).astype(float)


def _all_permutations(size: int) -> np.ndarray:
    """All permutations of 0 … size − 1, int8 (size!, size)."""
    flat = itertools.chain.from_iterable(itertools.permutations(range(size)))
    return np.fromiter(flat, dtype=np.int8, count=size * math.factorial(size)).reshape(-1, size)


def _shuffled(
    values: np.ndarray, strata: Sequence[np.ndarray], number: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Copies of values, the units of each stratum shuffled, in chunks (rows, n)."""
    for size in _chunks(number, len(values)):
        rows = np.tile(values, (size, 1))
        for stratum in strata:
            order = rng.permuted(np.tile(np.arange(len(stratum)), (size, 1)), axis=1)
            rows[:, stratum] = values[stratum[order]]
        yield rows
