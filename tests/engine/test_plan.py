from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_ext.engine.plan import (
    WIDE_ROW,
    Portion,
    SequenceTable,
    Tree,
    common_prefix_length,
    make_batches,
    make_portions,
    pack,
    sequence_key,
    share_prefixes,
)

SEQUENCE = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
DISTINCT = st.lists(SEQUENCE, min_size=1, max_size=40, unique=True)


def beginnings(sequences: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {ids[:length] for ids in sequences for length in range(1, len(ids) + 1)}


@given(st.lists(SEQUENCE, min_size=1, max_size=40))
def test_table_keeps_each_distinct_sequence_once(sequences: list[tuple[int, ...]]) -> None:
    table = SequenceTable()
    indices = [table.add(sequence) for sequence in sequences]
    assert len(table) == len(set(sequences))
    assert [table.token_ids[index] for index in indices] == sequences


def test_table_refuses_an_empty_sequence() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        SequenceTable().add([])


def test_keys_tell_sequences_apart_that_print_alike() -> None:
    assert len({sequence_key(ids) for ids in ([1, 23], [12, 3], [1, 2, 3], [123], [0, 1, 23])}) == 5


@given(SEQUENCE, SEQUENCE, st.integers(0, 300))
def test_common_prefix_length_is_that_of_a_loop(first, second, shared: int) -> None:
    first, second = (7,) * shared + first, (7,) * shared + second
    expected = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    assert common_prefix_length(first, second) == (min(len(first), len(second)) if expected is None else expected)


@given(DISTINCT, st.data())
def test_trees_hold_every_chosen_sequence_once_and_count_their_beginnings(sequences, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(sequences))), unique=True))
    trees = share_prefixes(sequences, chosen)
    assert sorted(index for tree in trees for index in tree.sequences) == sorted(chosen)
    for tree in trees:
        members = [sequences[index] for index in tree.sequences]
        assert members == sorted(members)
        assert tree.num_tokens == len(beginnings(members))


def test_templates_of_one_document_make_one_tree() -> None:
    document = tuple(range(100, 130))
    templates = [(1, 2, 3), (1, 2, 4), (5,), ()]
    other = tuple(range(200, 220))
    sequences = [document + template for template in templates] + [other]
    trees = share_prefixes(sequences, range(len(sequences)))
    assert sorted(len(tree.sequences) for tree in trees) == [1, 4]
    assert max(tree.num_tokens for tree in trees) == 30 + 3 + 1 + 1


def test_a_long_common_beginning_does_not_make_one_endless_row() -> None:
    """Few-shot examples before many documents: rows stay within twice the longest sequence."""
    head = tuple(range(400))
    sequences = [(*head, 1000 + i, *range(2000 + 20 * i, 2020 + 20 * i)) for i in range(200)]
    trees = share_prefixes(sequences, range(len(sequences)))
    assert sum(len(tree.sequences) for tree in trees) == 200
    assert all(tree.num_tokens <= 2 * 421 for tree in trees)
    assert sum(tree.num_tokens for tree in trees) < 0.15 * sum(map(len, sequences))


def test_a_short_common_beginning_is_not_worth_a_row() -> None:
    sequences = [(1, 2, *range(100 * i, 100 * i + 50)) for i in range(1, 9)]
    assert all(len(tree.sequences) == 1 for tree in share_prefixes(sequences, range(len(sequences))))


@given(DISTINCT)
def test_packed_rows_hold_each_beginning_once_and_every_token_sees_its_own_past(sequences) -> None:
    for tree in share_prefixes(sequences, range(len(sequences))):
        packed = pack(tree, sequences)
        assert len(packed.token_ids) == tree.num_tokens <= max(WIDE_ROW, 2 * 9)
        for index, path in zip(tree.sequences, packed.paths, strict=True):
            assert tuple(packed.token_ids[path]) == sequences[index]
            assert packed.positions[path].tolist() == list(range(len(path)))
            for length, place in enumerate(path.tolist(), 1):
                assert np.flatnonzero(packed.visible[place]).tolist() == sorted(path[:length].tolist())
        # Which beginning each place stands for, read off the mask alone.
        found = [
            tuple(packed.token_ids[sorted(np.flatnonzero(seen), key=lambda place: packed.positions[place])])
            for seen in packed.visible
        ]
        assert sorted(found) == sorted(beginnings([sequences[index] for index in tree.sequences]))


@given(DISTINCT)
def test_halves_are_the_trees_of_their_sequences(sequences) -> None:
    for tree in share_prefixes(sequences, range(len(sequences))):
        if len(tree.sequences) < 2:
            continue
        halves = tree.halves(sequences)
        assert halves[0].sequences + halves[1].sequences == tree.sequences
        for half in halves:
            assert half.num_tokens == len(beginnings([sequences[index] for index in half.sequences]))
            assert len(pack(half, sequences).token_ids) == half.num_tokens


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12)), max_size=40),
    st.one_of(st.none(), st.integers(1, 5)),
    st.integers(1, 30),
    st.integers(0, 5),
)
def test_batches_hold_every_tree_once_and_keep_their_limits(sizes, max_rows, max_tokens: int, batch_cost: int) -> None:
    trees = [
        Tree(tuple(range(100 * i, 100 * i + members)), max(members, tokens))
        for i, (members, tokens) in enumerate(sizes)
    ]
    batches = make_batches(trees, max_rows=max_rows, max_tokens=max_tokens, batch_cost=batch_cost)
    assert sorted((tree for batch in batches for tree in batch), key=lambda tree: tree.sequences) == trees
    longest = [batch[0].num_tokens for batch in batches]
    assert longest == sorted(longest, reverse=True)
    for batch in batches:
        assert max_rows is None or len(batch) <= max_rows
        assert len(batch) == 1 or len(batch) * batch[0].num_tokens <= max_tokens
        assert all(first.num_tokens >= second.num_tokens for first, second in itertools.pairwise(batch))
        assert len({len(tree.sequences) > 1 for tree in batch}) == 1


def test_a_batch_ends_where_padding_would_cost_more_than_another_batch() -> None:
    trees = [Tree((i,), tokens) for i, tokens in enumerate([100] * 4 + [10] * 40)]
    free = make_batches(trees, max_rows=None, max_tokens=4400)
    priced = make_batches(trees, max_rows=None, max_tokens=4400, batch_cost=50)
    assert [len(batch) for batch in free] == [44]
    assert [len(batch) for batch in priced] == [4, 40]


@given(DISTINCT, st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_requests(sequences, random) -> None:
    chosen = list(range(len(sequences)))
    expected = make_batches(share_prefixes(sequences, chosen), max_rows=4, max_tokens=30)
    random.shuffle(chosen)
    assert make_batches(share_prefixes(sequences, chosen), max_rows=4, max_tokens=30) == expected


LIMITS = {"max_rows": 3, "max_tokens": 24}


@given(DISTINCT, st.data())
def test_portions_hold_every_sequence_once(sequences, data: st.DataObject) -> None:
    is_stored = np.array(data.draw(st.lists(st.booleans(), min_size=len(sequences), max_size=len(sequences))))
    portions = make_portions(sequences, is_stored, **LIMITS, max_sequences=5)
    stored = [sequence for portion in portions for sequence in portion.stored]
    forwarded = [s for portion in portions for batch in portion.batches for tree in batch for s in tree.sequences]
    assert sorted(stored) == np.flatnonzero(is_stored).tolist()
    assert sorted(forwarded) == np.flatnonzero(~is_stored).tolist()
    for portion in portions:
        count = len(portion.stored) + sum(len(tree.sequences) for batch in portion.batches for tree in batch)
        assert count <= 5 or (len(portion.batches), len(portion.stored)) in {(1, 0), (0, count)}


@given(DISTINCT, st.integers(0, 40))
def test_a_run_that_was_broken_off_goes_on_with_the_same_batches_and_portions(sequences, done: int) -> None:
    whole = make_portions(sequences, np.zeros(len(sequences), dtype=bool), **LIMITS, max_sequences=5)
    batches = [batch for portion in whole for batch in portion.batches]
    is_stored = np.zeros(len(sequences), dtype=bool)
    for batch in batches[:done]:
        is_stored[[sequence for tree in batch for sequence in tree.sequences]] = True
    rest = make_portions(sequences, is_stored, **LIMITS, max_sequences=5)
    assert [batch for portion in rest for batch in portion.batches] == batches[done:]

    def members(portions: list[Portion]) -> list[list[int]]:
        return [
            sorted([*portion.stored, *(s for batch in portion.batches for tree in batch for s in tree.sequences)])
            for portion in portions
        ]

    assert members(rest) == members(whole)
