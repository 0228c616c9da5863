"""Groups of models with equal loss.

Rule. A group is a run of models, sorted by loss, of which the last loss exceeds the first by `gap`, and
gap + z · √(s_first² + s_last²) ≤ tolerance, with s their standard errors: `tolerance` is not only the difference that was
measured but, at z = 1.645, one that the true difference exceeds with probability 5 % at most. z = 0 takes losses as exact. A
model whose own loss is not known to the tolerance, z · s > tolerance, is in no group, and does not come between others.
Errors are taken as independent; those of losses of the same text are not, and then the rule is stricter than it need be.

Choice. Of all ways to cut the sorted models into groups of `min_size` or more and models in none, that with the most models
in groups; of these the one with fewest groups, so that most models can be compared; of these the one with the smallest sum
of gaps. Found by dynamic programming over the sorted models: the best way for the first j of them either leaves out model j,
or ends in a group that begins at some i, after the best way for the first i. At z = 0 no partition into other sets does better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["LossGroup", "LossGroups", "Pair", "Z", "loss_groups", "nearest_pairs", "round_up", "smallest_tolerance"]

Z = 1.645
"""The normal quantile of 95 %."""

Vector = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class LossGroup:
    """Models of equal loss.

    Attributes:
        members: Their places in the input, by ascending loss.
        gap: Largest loss less smallest.
        stderr: Of the gap, √(s_first² + s_last²).
        bound: gap + z · stderr, at most the tolerance.
    """

    members: tuple[int, ...]
    gap: float
    stderr: float
    bound: float


@dataclass(frozen=True)
class LossGroups:
    """Groups by ascending loss, and the places of the models in none, by ascending loss."""

    groups: tuple[LossGroup, ...]
    ungrouped: tuple[int, ...]


class Pair(NamedTuple):
    """Two models, the smaller loss first, and the gap of their losses; see `LossGroup`."""

    first: int
    second: int
    gap: float
    stderr: float
    bound: float


def loss_groups(
    losses: Vector, stderrs: Vector | None = None, *, tolerance: float, z: float = Z, min_size: int = 2
) -> LossGroups:
    """Group models whose losses are equal within a tolerance; see the module for rule and choice.

    Args:
        losses: Finite, shape (n,), all in one unit.
        stderrs: Their standard errors, shape (n,), not negative. None: 0.
        tolerance: In the unit of the losses, not negative.
        z: Standard errors that are added to a gap, not negative.
        min_size: Models of a group, at least 2.

    Returns:
        The groups, which may be none. Models of equal loss come in the order of the input.

    Raises:
        ValueError: If an argument is out of range, or not finite.
    """
    losses, stderrs = _checked(losses, stderrs, z, min_size)
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance is {tolerance}, expected a number of at least 0, such as 0.005")
    order = np.argsort(losses, kind="stable")
    kept = [int(place) for place in order if z * stderrs[place] <= tolerance]
    value, error = losses[kept].tolist(), stderrs[kept].tolist()

    # best[j]: (models in groups, -groups, -sum of gaps) for the first j models; start[j]: where their last group begins.
    best = [(0, 0, 0.0)]
    start: list[int | None] = [None]
    for last in range(len(kept)):
        choice, begin = best[last], None
        for first in range(last - min_size + 1, -1, -1):
            gap = value[last] - value[first]
            if gap > tolerance:
                break
            if gap + z * math.sqrt(error[first] ** 2 + error[last] ** 2) > tolerance:
                continue
            before = best[first]
            score = (before[0] + last - first + 1, before[1] - 1, before[2] - gap)
            if score > choice:
                choice, begin = score, first
        best.append(choice)
        start.append(begin)

    groups: list[LossGroup] = []
    end = len(kept)
    while end > 0:
        begin = start[end]
        if begin is None:
            end -= 1
            continue
        members = kept[begin:end]
        groups.append(_group(members, losses, stderrs, z))
        end = begin
    groups.reverse()
    grouped = {member for group in groups for member in group.members}
    return LossGroups(tuple(groups), tuple(int(place) for place in order if int(place) not in grouped))


def _group(members: Sequence[int], losses: np.ndarray, stderrs: np.ndarray, z: float) -> LossGroup:
    first, last = members[0], members[-1]
    gap = float(losses[last] - losses[first])
    stderr = math.sqrt(stderrs[first] ** 2 + stderrs[last] ** 2)
    return LossGroup(tuple(members), gap, stderr, gap + z * stderr)


def nearest_pairs(losses: Vector, stderrs: Vector | None = None, *, z: float = Z, count: int = 3) -> list[Pair]:
    """The pairs of models with the smallest bounds, for an error's text.

    Args:
        losses: As in `loss_groups`.
        stderrs: Likewise.
        z: Likewise.
        count: Pairs at most.

    Returns:
        Pairs by ascending bound; two models at least make one.

    Raises:
        ValueError: If an argument is out of range, or not finite.
    """
    losses, stderrs = _checked(losses, stderrs, z, 2)
    order = np.argsort(losses, kind="stable")
    firsts, seconds = np.triu_indices(len(order), 1)
    bounds = _bounds(losses[order], stderrs[order], z)[firsts, seconds]
    result = []
    for place in np.argsort(bounds, kind="stable")[:count]:
        first, second = int(order[firsts[place]]), int(order[seconds[place]])
        pair = _group([first, second], losses, stderrs, z)
        result.append(Pair(first, second, pair.gap, pair.stderr, pair.bound))
    return result


def smallest_tolerance(
    losses: Vector, stderrs: Vector | None = None, *, z: float = Z, min_size: int = 2
) -> float | None:
    """The smallest tolerance at which `loss_groups` finds a group; None if there are fewer than `min_size` models.

    Args:
        losses: As in `loss_groups`.
        stderrs: Likewise.
        z: Likewise.
        min_size: Likewise.

    Raises:
        ValueError: If an argument is out of range, or not finite.
    """
    losses, stderrs = _checked(losses, stderrs, z, min_size)
    if len(losses) < min_size:
        return None
    order = np.argsort(losses, kind="stable")
    value, error = losses[order], stderrs[order]
    bounds = _bounds(value, error, z)
    # A larger tolerance never loses a group: it only lets more models and more pairs in.
    candidates = np.unique(np.concatenate([bounds[np.triu_indices(len(value), 1)], z * error]))

    def matches(tolerance: float) -> bool:
        kept = np.flatnonzero(z * error <= tolerance)
        of_kept = bounds[np.ix_(kept, kept)]
        return bool(np.any(of_kept[np.triu_indices(len(kept), min_size - 1)] <= tolerance))

    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if matches(candidates[middle]) else (middle + 1, high)
    return float(candidates[low])


def round_up(tolerance: float) -> float:
    """The next number of three significant digits that is not smaller, so that what an error prints can be typed."""
    if tolerance <= 0:
        return 0.0
    digits = 2 - math.floor(math.log10(tolerance))
    scaled = math.ceil(tolerance * 10.0**digits)
    result = float(f"{scaled}e{-digits}")
    return result if result >= tolerance else float(f"{scaled + 1}e{-digits}")


def _bounds(value: np.ndarray, error: np.ndarray, z: float) -> np.ndarray:
    """gap + z · stderr of every two models in ascending order, (n, n); the upper triangle counts."""
    return value[None, :] - value[:, None] + z * np.sqrt(error[:, None] ** 2 + error[None, :] ** 2)


def _checked(losses: Vector, stderrs: Vector | None, z: float, min_size: int) -> tuple[np.ndarray, np.ndarray]:
    losses = np.asarray(losses, dtype=np.float64)
    stderrs = np.zeros_like(losses) if stderrs is None else np.asarray(stderrs, dtype=np.float64)
    if losses.ndim != 1 or losses.shape != stderrs.shape:
        raise ValueError(f"expected two vectors of one length, got shapes {losses.shape} and {stderrs.shape}")
    for name, array in (("losses", losses), ("stderrs", stderrs)):
        bad = np.flatnonzero(~np.isfinite(array))
        if len(bad):
            raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}, expected a number; leave models without one out")
    if np.any(stderrs < 0):
        raise ValueError(f"expected standard errors that are not negative, got {stderrs.min()}")
    if not (math.isfinite(z) and z >= 0):
        raise ValueError(f"z is {z}, expected a number of at least 0, such as {Z}")
    if min_size < 2:
        raise ValueError(f"min_size is {min_size}, expected at least 2")
    return losses, stderrs
