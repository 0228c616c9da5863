"""What ranks do without a process group; with one they are tested in integration/test_processes.py."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness_ext.ranks import ALONE, Lockstep, Progress, Ranks, share_out

COSTS = st.lists(st.integers(1, 50), max_size=7)


def loads(costs: list[int], rank_of: list[int], size: int) -> list[int]:
    return [sum(cost for cost, of in zip(costs, rank_of, strict=True) if of == rank) for rank in range(size)]


@given(COSTS, st.integers(1, 3))
def test_the_busiest_rank_has_little_more_than_in_the_best_of_all_ways(costs: list[int], size: int) -> None:
    best = min(max(loads(costs, list(way), size)) for way in itertools.product(range(size), repeat=len(costs)))
    found = share_out(costs, size)
    assert max(loads(costs, found, size)) <= 4 / 3 * best
    assert found == share_out(costs, size)


@given(COSTS, st.data())
def test_a_piece_goes_to_a_rank_that_may_take_it(costs: list[int], data: st.DataObject) -> None:
    ranks = st.lists(st.integers(0, 3), min_size=1, unique=True)
    possible = data.draw(st.lists(ranks, min_size=len(costs), max_size=len(costs)))
    assert all(rank in of for rank, of in zip(share_out(costs, 4, possible=possible), possible, strict=True))


def test_many_small_pieces_are_shared_evenly() -> None:
    costs = list(range(900, 1860))
    for size in (2, 3, 4, 8):
        assert max(loads(costs, share_out(costs, size), size)) < 1.02 * sum(costs) / size


class Threads(Ranks):
    """Ranks that are threads; sums only."""

    shelf: list[np.ndarray]
    barrier: threading.Barrier

    def sum(self, values: np.ndarray) -> np.ndarray:
        self.shelf[self.rank] = values
        self.barrier.wait()
        total = np.sum(self.shelf, axis=0)
        self.barrier.wait()
        return total


@pytest.mark.parametrize("calls", [(3, 0), (1, 4), (2, 2), (0, 0), (5, 1, 0)])
def test_in_lockstep_every_rank_makes_as_many_passes_as_the_one_with_most(calls: tuple[int, ...]) -> None:
    shelf: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls), timeout=30)
    passes = [0] * len(calls)
    dummies = [0] * len(calls)

    def work(rank: int) -> None:
        ranks = Threads(rank, len(calls))
        ranks.shelf, ranks.barrier = shelf, barrier
        model = torch.nn.Identity()

        def count(*_: Any) -> None:
            passes[rank] += 1

        model.register_forward_pre_hook(count)
        lockstep = Lockstep(ranks, model, lambda: model(0))
        for part in (calls[rank], calls[rank - 1]):  # two pieces of work, each with another share
            with lockstep.work():
                for _ in range(part):
                    model(1)
        dummies[rank] = lockstep.num_dummies
        assert not model._forward_pre_hooks.keys() - {next(iter(model._forward_pre_hooks))}

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passes == [2 * max(calls)] * len(calls)
    assert dummies == [2 * max(calls) - calls[rank] - calls[rank - 1] for rank in range(len(calls))]


def test_the_bar_of_rank_0_counts_what_all_do(capsys: pytest.CaptureFixture[str]) -> None:
    counters: dict[tuple[int, int], Any] = {}

    class Counting(Ranks):
        def counter(self) -> Any:
            self._counters += 1
            total = counters.setdefault((0, self._counters), [0])

            def add(number: int) -> int:
                total[0] += number
                return total[0]

            return add

    first, second = (Progress(Counting(rank, 2), total=10, initial=1, desc="All", mininterval=0) for rank in (0, 1))
    second.update(3)
    first.update(2)
    second.update(4)
    second.finish()
    first.finish()
    for bar in (first, second):
        bar.__exit__()
    shown = capsys.readouterr().err
    assert shown.count("All:") == shown.count("\rAll:") > 0
    assert "6/10" in shown  # what rank 0 sees at its own update
    assert shown.rstrip().rpartition("\r")[2].startswith("All: 100%")


def test_alone_nothing_is_exchanged() -> None:
    values = np.arange(3)
    assert ALONE.sum(values) is values
    assert ALONE.share({"a": 1}) == [{"a": 1}]
    assert ALONE.gather_flags(np.array([True, False])).tolist() == [[True, False]]
    assert list(ALONE.to_first(values, np.zeros((3, 2), dtype=np.float32))) == []
    ALONE.check_same("x", "prompts")
