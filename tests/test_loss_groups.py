"""Groups of equal loss against all partitions; pairs and tolerances for errors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_ext.loss_groups import loss_groups, nearest_pairs, round_up, smallest_tolerance


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All partitions of a set."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in partitions(rest):
        yield [[first], *partition]
        for place in range(len(partition)):
            yield [*partition[:place], [first, *partition[place]], *partition[place + 1 :]]


def score(groups: list[list[int]], losses: list[float]) -> tuple[int, int, float]:
    gaps = [max(losses[i] for i in group) - min(losses[i] for i in group) for group in groups]
    return sum(map(len, groups)), -len(groups), -sum(gaps)


def accepted(group: list[int], losses: list[float], errors: list[float], tolerance: float, z: float) -> bool:
    low, high = min(group, key=lambda i: (losses[i], i)), max(group, key=lambda i: (losses[i], i))
    error = math.sqrt(errors[low] ** 2 + errors[high] ** 2)
    gap = losses[high] - losses[low]
    return gap + z * error <= tolerance and all(z * errors[i] <= tolerance for i in group)


# Multiples of 1/64 have exact sums, so equal scores are equal.
losses_of = st.lists(st.integers(0, 40).map(lambda n: n / 64), min_size=1, max_size=7)
errors_of = st.lists(st.integers(0, 12).map(lambda n: n / 64), min_size=7, max_size=7)


@given(losses_of, st.integers(0, 16).map(lambda n: n / 64), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_exact_losses_against_all_partitions(losses: list[float], tolerance: float, min_size: int) -> None:
    found = loss_groups(losses, tolerance=tolerance, z=0, min_size=min_size)
    best = max(
        score(groups, losses)
        for partition in partitions(list(range(len(losses))))
        for groups in [[group for group in partition if len(group) > 1]]
        if all(len(g) >= min_size and accepted(g, losses, [0.0] * 7, tolerance, 0) for g in groups)
    )
    assert score([list(group.members) for group in found.groups], losses) == best


@given(losses_of, errors_of, st.integers(0, 30).map(lambda n: n / 64), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_with_errors_against_all_cuts(
    losses: list[float], errors: list[float], tolerance: float, min_size: int
) -> None:
    errors = errors[: len(losses)]
    found = loss_groups(losses, errors, tolerance=tolerance, z=1.0, min_size=min_size)
    kept = [int(i) for i in np.argsort(losses, kind="stable") if errors[i] <= tolerance]
    best = (0, 0, 0.0)
    for cuts in range(2 ** max(0, len(kept) - 1)):
        runs: list[list[int]] = [[]]
        for place, model in enumerate(kept):
            runs[-1].append(model)
            if cuts >> place & 1:
                runs.append([])
        # A run that makes no group leaves its models out; a run that does is a group.
        groups = [r for r in runs if len(r) >= min_size and accepted(r, losses, errors, tolerance, 1.0)]
        best = max(best, score(groups, losses))
    assert score([list(group.members) for group in found.groups], losses) == best
    for group in found.groups:
        assert group.bound <= tolerance
        assert accepted(list(group.members), losses, errors, tolerance, 1.0)
    members = [i for group in found.groups for i in group.members] + list(found.ungrouped)
    assert sorted(members) == list(range(len(losses)))


@given(losses_of, errors_of, st.integers(2, 4))
@settings(deadline=None)
def test_the_smallest_tolerance_is_the_smallest(losses: list[float], errors: list[float], min_size: int) -> None:
    errors = errors[: len(losses)]
    found = smallest_tolerance(losses, errors, z=1.5, min_size=min_size)
    if len(losses) < min_size:
        assert found is None
        return
    assert found is not None
    assert loss_groups(losses, errors, tolerance=found, z=1.5, min_size=min_size).groups
    smaller = math.nextafter(found, -1)
    if smaller >= 0:
        assert not loss_groups(losses, errors, tolerance=smaller, z=1.5, min_size=min_size).groups


def test_by_hand() -> None:
    found = loss_groups([3.0, 1.0, 1.004, 2.0, 1.001, 3.003], tolerance=0.005, z=0)
    assert [group.members for group in found.groups] == [(1, 4, 2), (0, 5)]
    assert found.ungrouped == (3,)
    assert found.groups[0].gap == pytest.approx(0.004)
    assert found.groups[0].stderr == 0


def test_errors_count() -> None:
    losses, errors = [1.0, 1.004], [0.0003, 0.0004]
    found = loss_groups(losses, errors, tolerance=0.005, z=1.645)
    assert found.groups[0].stderr == pytest.approx(0.0005)
    assert found.groups[0].bound == pytest.approx(0.004 + 1.645 * 0.0005)
    assert not loss_groups(losses, errors, tolerance=0.0045, z=1.645).groups
    assert loss_groups(losses, errors, tolerance=0.0045, z=0).groups


def test_a_model_known_badly_does_not_come_between_others() -> None:
    found = loss_groups([1.0, 1.001, 1.002], [1e-4, 0.5, 1e-4], tolerance=0.005)
    assert [group.members for group in found.groups] == [(0, 2)]
    assert found.ungrouped == (1,)


def test_fewest_groups_then_smallest_gaps() -> None:
    assert [g.members for g in loss_groups([0.0, 1.0, 2.0, 3.0], tolerance=3, z=0).groups] == [(0, 1, 2, 3)]
    # Five in two groups: {0, 1} and {2, 3, 4} have gaps 1 + 3, {0, 1, 2} and {3, 4} 3 + 1.5.
    found = loss_groups([0.0, 1.0, 3.0, 4.5, 6.0], tolerance=3, z=0)
    assert [g.members for g in found.groups] == [(0, 1), (2, 3, 4)]


@given(losses_of, st.randoms())
def test_the_order_of_the_input_does_not_matter(losses: list[float], random: object) -> None:
    losses = sorted(set(losses))
    order = list(range(len(losses)))
    random.shuffle(order)  # type: ignore[attr-defined]
    one = loss_groups(losses, tolerance=0.1, z=0)
    two = loss_groups([losses[i] for i in order], tolerance=0.1, z=0)
    assert [g.members for g in one.groups] == [tuple(order[i] for i in g.members) for g in two.groups]


def test_nearest_pairs() -> None:
    pairs = nearest_pairs([1.0, 5.0, 1.5, 4.8], [0.0, 0.4, 0.0, 0.3], z=1.0, count=2)
    assert [(pair.first, pair.second) for pair in pairs] == [(0, 2), (3, 1)]
    assert pairs[1].bound == pytest.approx(0.2 + 0.5)
    assert nearest_pairs([1.0]) == []


@given(st.floats(1e-9, 1e6))
def test_rounding_up_does_not_round_down(tolerance: float) -> None:
    rounded = round_up(tolerance)
    assert tolerance <= rounded <= tolerance * 1.011
    assert float(f"{rounded:g}") == rounded


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        (([1.0, math.nan],), {}, r"losses\[1\] is nan"),
        (([1.0, 2.0], [0.1]), {}, "one length"),
        (([1.0, 2.0], [0.1, -0.1]), {}, "not negative"),
        (([1.0],), {"tolerance": -1.0}, "such as 0.005"),
        (([1.0],), {"z": math.inf}, "z is inf"),
        (([1.0],), {"min_size": 1}, "at least 2"),
    ],
)
def test_bad_input(arguments: tuple[list[float], ...], options: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        loss_groups(*arguments, **({"tolerance": 0.1} | options))  # type: ignore[arg-type]
