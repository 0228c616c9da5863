"""Which token sequences are forwarded, and together with which others. Pure: token ids in, index lists out.

Prompts that begin alike, such as one document under several templates or one prompt continued by the first tokens of several
label words, make a *tree*: their common beginnings are forwarded once. The plan works on token ids, so it is right for any
tokenizer: where the end of a document is tokenised differently under two templates, the shared beginning is that much
shorter. A sequence that shares nothing is a tree of one.

Rounding depends on what is computed together, so what is computed together must not depend on how many processes share the work
or on how much of it an earlier run has left in the store: batches are planned for all sequences, and `Portion`s of the plan are
given to processes, or left out, as a whole.

`pack` lays a tree out as one row of tokens, each of which attends to its own ancestors only. Whether a model computes such
rows exactly is not the plan's business; see `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PackedTree",
    "Portion",
    "SequenceTable",
    "Tree",
    "common_prefix_length",
    "make_batches",
    "make_portions",
    "pack",
    "sequence_key",
    "share_prefixes",
]

NUM_PORTIONS = 64
"""Portions that a plan is cut into where it has the batches: with eight processes the busiest then has a few per cent too much,
and to read out one batch at a time costs little even where a batch takes milliseconds."""

MIN_SHARED = 0.25
"""Share of its tokens that a sequence must find in a tree to join it: below, a longer row costs about what it saves."""

WIDE_ROW = 256
"""Tokens that a tree may have whatever the length of its sequences. A row of N tokens costs N² in attention, of which a tree
uses a part only, so a tree has at most as many tokens as this or twice its longest sequence."""


def sequence_key(token_ids: Sequence[int]) -> bytes:
    """16-byte BLAKE2b hash of token ids (as little-endian int32): equal sequences have equal keys."""
    return blake2b(np.asarray(token_ids, dtype="<i4").tobytes(), digest_size=16).digest()


class SequenceTable:
    """Distinct token sequences in order of first appearance.

    Attributes:
        token_ids: The sequences.
        keys: `sequence_key` of each.
    """

    def __init__(self) -> None:
        self.token_ids: list[tuple[int, ...]] = []
        self.keys: list[bytes] = []
        self._index: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_ids: Sequence[int]) -> int:
        """Return the index of a sequence, which is added if it is new.

        Raises:
            ValueError: If the sequence is empty.
        """
        if not len(token_ids):
            raise ValueError("A sequence needs at least one token.")
        key = sequence_key(token_ids)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.token_ids)
            self.token_ids.append(tuple(token_ids))
            self.keys.append(key)
        return index


@dataclass(frozen=True, slots=True)
class Tree:
    """Sequences that are forwarded as one row.

    Attributes:
        sequences: Indices into the table, in the lexicographic order of their token ids.
        num_tokens: Tokens of the row: distinct beginnings of its sequences.
    """

    sequences: tuple[int, ...]
    num_tokens: int

    def halves(self, token_ids: Sequence[tuple[int, ...]]) -> tuple[Tree, Tree]:
        """Two trees with half of the sequences each; needs two sequences."""
        middle = len(self.sequences) // 2
        parts = (self.sequences[:middle], self.sequences[middle:])
        return Tree(parts[0], _count_tokens(parts[0], token_ids)), Tree(parts[1], _count_tokens(parts[1], token_ids))


@dataclass(frozen=True)
class Portion:
    """Work that one process does, and states that are read out together.

    Attributes:
        batches: Batches to forward.
        stored: Sequences whose states are in the store.
    """

    batches: tuple[tuple[Tree, ...], ...]
    stored: tuple[int, ...] = ()

    @property
    def cost(self) -> int:
        """Tokens that are forwarded, padding included, and one for each state that is read out."""
        forwarded = sum(
            len(batch) * batch[0].num_tokens + sum(len(tree.sequences) for tree in batch) for batch in self.batches
        )
        return forwarded + len(self.stored)


@dataclass(frozen=True)
class PackedTree:
    """A tree as one row of N tokens.

    Attributes:
        token_ids: Shape (N,), int64.
        positions: Position of each token in its own sequence, from 0, shape (N,), int64.
        visible: visible[i, j] says whether token i attends to token j: its ancestors and itself. Shape (N, N), bool.
        paths: For each sequence of the tree, in its order, where its tokens stand in the row.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    visible: NDArray[np.bool_]
    paths: tuple[NDArray[np.int64], ...]


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    length = min(len(first), len(second))
    # Tuples compare at the speed of C: most pairs that are asked about are a prefix of one another, or differ at once.
    if first[:length] == second[:length]:
        return length
    low, high = 0, length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low


def share_prefixes(token_ids: Sequence[tuple[int, ...]], chosen: Sequence[int]) -> list[Tree]:
    """Group sequences that begin alike.

    In lexicographic order the longest beginning that a sequence shares with any earlier one is what it shares with the one
    before, so one walk finds the trees.

    Args:
        token_ids: All sequences.
        chosen: Indices of those to group.

    Returns:
        Trees in which every chosen sequence occurs exactly once.
    """
    trees: list[Tree] = []
    members: list[int] = []
    num_tokens = longest = 0
    for index in sorted(chosen, key=lambda i: token_ids[i]):
        ids = token_ids[index]
        shared = common_prefix_length(token_ids[members[-1]], ids) if members else 0
        longest_then = max(longest, len(ids))
        fits = num_tokens + len(ids) - shared <= max(WIDE_ROW, 2 * longest_then)
        if members and shared >= MIN_SHARED * len(ids) and fits:
            members.append(index)
            num_tokens, longest = num_tokens + len(ids) - shared, longest_then
            continue
        if members:
            trees.append(Tree(tuple(members), num_tokens))
        members, num_tokens, longest = [index], len(ids), len(ids)
    if members:
        trees.append(Tree(tuple(members), num_tokens))
    return trees


def make_batches(
    trees: Sequence[Tree], *, max_rows: int | None, max_tokens: int, batch_cost: int = 0
) -> list[tuple[Tree, ...]]:
    """Group trees into batches, longest first, so that memory runs out in the first batches or never.

    Trees of one sequence make batches of their own: they need no mask.

    Args:
        trees: Of `share_prefixes`.
        max_rows: Most trees in a batch; None: only `max_tokens` counts.
        max_tokens: Most tokens in a batch, padding included. A longer tree makes a batch of one.
        batch_cost: What one more batch costs, in tokens. A batch ends early where filling it up with shorter trees would
            cost more than that in padding; 0: it never does.

    Returns:
        Batches in which every tree occurs exactly once, the longest tree first in each.
    """
    single = [tree for tree in trees if len(tree.sequences) == 1]
    shared = [tree for tree in trees if len(tree.sequences) > 1]
    batches = [
        batch
        for kind in (single, shared)
        for batch in _batches_of_a_kind(kind, max_rows=max_rows, max_tokens=max_tokens, batch_cost=batch_cost)
    ]
    batches.sort(key=lambda batch: (-batch[0].num_tokens, batch[0].sequences))
    return batches


def make_portions(
    token_ids: Sequence[tuple[int, ...]],
    is_stored: NDArray[np.bool_],
    *,
    max_rows: int | None,
    max_tokens: int,
    batch_cost: int = 0,
    max_sequences: int,
) -> list[Portion]:
    """Plan the forward passes of all sequences that are not stored.

    Where the store has whole batches of the plan for all sequences (nothing, or what a run has left that was broken off), the
    plan is that one without them. Else only what is missing is planned: a prompt that is stored is not forwarded again.

    Args:
        token_ids: All sequences.
        is_stored: Which of them are in the store, shape (n,).
        max_rows: As in `make_batches`.
        max_tokens: Likewise.
        batch_cost: Likewise.
        max_sequences: Most sequences in a portion, but for one of a single batch.

    Returns:
        Portions, the longest batches first, in which every sequence occurs exactly once.
    """

    def batches_of(chosen: Sequence[int]) -> list[tuple[Tree, ...]]:
        trees = share_prefixes(token_ids, chosen)
        return make_batches(trees, max_rows=max_rows, max_tokens=max_tokens, batch_cost=batch_cost)

    num_sequences = min(max_sequences, -(-len(token_ids) // NUM_PORTIONS))
    batches = batches_of(range(len(token_ids)))
    sequences_of = [[sequence for tree in batch for sequence in tree.sequences] for batch in batches]
    share = [is_stored[sequences].mean() for sequences in sequences_of]
    if all(found in (0, 1) for found in share):
        pieces = [
            ((), tuple(sequences)) if found else ((batch,), ())
            for batch, sequences, found in zip(batches, sequences_of, share, strict=True)
        ]
    else:
        stored = np.flatnonzero(is_stored).tolist()
        pieces = [
            ((), tuple(stored[start : start + num_sequences])) for start in range(0, len(stored), num_sequences)
        ] + [((batch,), ()) for batch in batches_of(np.flatnonzero(~is_stored).tolist())]
    portions: list[Portion] = []
    size = 0
    for forwarded, known in pieces:
        new = len(known) + sum(len(tree.sequences) for batch in forwarded for tree in batch)
        if portions and size + new <= num_sequences:
            last = portions.pop()
            portions.append(Portion(last.batches + forwarded, last.stored + known))
            size += new
        else:
            portions.append(Portion(forwarded, known))
            size = new
    return portions


def _batches_of_a_kind(
    trees: Sequence[Tree], *, max_rows: int | None, max_tokens: int, batch_cost: int
) -> list[tuple[Tree, ...]]:
    # Trees of equal length stay in the order of their indices, so that a plan depends on nothing but its input.
    ordered = sorted(trees, key=lambda tree: (-tree.num_tokens, tree.sequences))
    groups: list[list[Tree]] = []
    for position, tree in enumerate(ordered):
        if groups:
            group = groups[-1]
            longest = group[0].num_tokens
            capacity = max_tokens // longest if max_rows is None else min(max_rows, max_tokens // longest)
            room = min(capacity - len(group), len(ordered) - position)
            padding = room * (longest - tree.num_tokens)
            if room > 0 and (not batch_cost or padding <= batch_cost):
                group.append(tree)
                continue
        groups.append([tree])
    return [tuple(group) for group in groups]


def pack(tree: Tree, token_ids: Sequence[tuple[int, ...]]) -> PackedTree:
    """Lay a tree out as one row: the first sequence, then of each further one what it does not share with the one before."""
    tokens = np.empty(tree.num_tokens, dtype=np.int64)
    positions = np.empty(tree.num_tokens, dtype=np.int64)
    visible = np.zeros((tree.num_tokens, tree.num_tokens), dtype=np.bool_)
    paths: list[NDArray[np.int64]] = []
    used = 0
    previous: tuple[int, ...] = ()
    for index in tree.sequences:
        ids = token_ids[index]
        shared = common_prefix_length(previous, ids)
        new = np.arange(used, used + len(ids) - shared)
        path = np.concatenate([paths[-1][:shared], new]) if paths else new
        tokens[new] = ids[shared:]
        positions[new] = np.arange(shared, len(ids))
        visible[np.ix_(new, path[:shared])] = True
        visible[np.ix_(new, new)] = np.tri(len(new), dtype=np.bool_)
        paths.append(path)
        used += len(new)
        previous = ids
    assert used == tree.num_tokens, "a tree counts its distinct tokens"
    return PackedTree(tokens, positions, visible, tuple(paths))


def _count_tokens(sequences: Sequence[int], token_ids: Sequence[tuple[int, ...]]) -> int:
    previous: tuple[int, ...] = ()
    total = 0
    for index in sequences:
        total += len(token_ids[index]) - common_prefix_length(previous, token_ids[index])
        previous = token_ids[index]
    return total
