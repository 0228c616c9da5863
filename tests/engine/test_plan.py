from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_ext.engine.plan import NO_ROOT, SequenceTable, make_batches, sequence_key

SEQUENCES = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=40)


@given(SEQUENCES)
def test_table_keeps_each_distinct_sequence_once(sequences: list[list[int]]) -> None:
    table = SequenceTable()
    indices = [table.add(sequence) for sequence in sequences]
    assert len(table) == len({tuple(sequence) for sequence in sequences})
    assert [list(table.token_ids[index]) for index in indices] == sequences


def test_keys_tell_sequences_apart_that_print_alike() -> None:
    assert len({sequence_key(ids) for ids in ([1, 23], [12, 3], [1, 2, 3], [123], [0, 1, 23])}) == 5


def test_a_sequence_known_as_a_prompt_needs_no_root() -> None:
    table = SequenceTable()
    prompt = table.add([1, 2])
    child = table.add([1, 2, 3], root=prompt)
    assert table.roots[child] == prompt
    assert table.add([1, 2, 3]) == child
    assert table.roots[child] == NO_ROOT
    assert table.add([1, 2, 3], root=prompt) == child
    assert table.roots[child] == NO_ROOT


@pytest.mark.parametrize("ids", [[1, 2], [2, 1, 3], []])
def test_a_root_is_a_proper_prefix(ids: list[int]) -> None:
    table = SequenceTable()
    prompt = table.add([1, 2])
    if ids == [1, 2]:  # known already: nothing to continue
        assert table.add(ids, root=prompt) == prompt
        return
    with pytest.raises(ValueError, match=r"prefix|at least one token"):
        table.add(ids, root=prompt)


@given(st.data(), SEQUENCES, st.one_of(st.none(), st.integers(1, 5)), st.integers(1, 30), st.integers(0, 5))
def test_batches_hold_every_missing_sequence_once_and_keep_their_limits(
    data: st.DataObject, sequences: list[list[int]], max_rows: int | None, max_tokens: int, batch_cost: int
) -> None:
    table = SequenceTable()
    for sequence in sequences:
        prompt = table.add(sequence)
        if data.draw(st.booleans()):
            table.add([*sequence, 7], root=prompt)
    missing = [index for index in range(len(table)) if data.draw(st.booleans())]
    lengths = [len(ids) for ids in table.token_ids]
    batches = make_batches(
        lengths, table.roots, missing, max_rows=max_rows, max_tokens=max_tokens, batch_cost=batch_cost
    )

    planned = [index for batch in batches for index in batch.sequences]
    planned += [branch.sequence for batch in batches for branch in batch.branches]
    assert sorted(planned) == missing
    tops = [lengths[index] for batch in batches for index in batch.sequences]
    assert tops == sorted(tops, reverse=True)
    for batch in batches:
        assert max_rows is None or len(batch.sequences) <= max_rows
        assert len(batch.sequences) == 1 or len(batch.sequences) * lengths[batch.sequences[0]] <= max_tokens
        for branch in batch.branches:
            assert table.roots[branch.sequence] == batch.sequences[branch.row]


def test_a_branch_whose_root_is_known_is_forwarded_alone() -> None:
    table = SequenceTable()
    prompt = table.add([1, 2])
    child = table.add([1, 2, 3], root=prompt)
    (batch,) = make_batches([2, 3], table.roots, [child], max_rows=8, max_tokens=100)
    assert batch.sequences == (child,)
    assert batch.branches == ()


def padding(lengths: list[int], batch_cost: int) -> tuple[int, int]:
    batches = make_batches(
        lengths, [NO_ROOT] * len(lengths), range(len(lengths)), max_rows=64, max_tokens=10**6, batch_cost=batch_cost
    )
    padded = sum(len(batch.sequences) * lengths[batch.sequences[0]] for batch in batches)
    return len(batches), padded - sum(lengths)


def test_a_batch_ends_where_padding_would_cost_more_than_a_new_batch() -> None:
    lengths = [10] * 32 + [5] * 32
    assert padding(lengths, 0) == (1, 160)
    assert padding(lengths, 159) == (2, 0)
    assert padding(lengths, 160) == (1, 160)
    # Nothing is gained by keeping room for sequences that do not exist.
    assert padding([10] * 3 + [9], 2) == (1, 1)
