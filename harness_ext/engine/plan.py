"""Which token sequences are forwarded, and together with which others. Pure: token ids in, index lists out.

A sequence may name a *root*, another sequence that is its prefix: then the forward continues from the root's key/value
cache and computes only the remaining tokens. Today roots are prompts and their branches are the prompts continued by all
but the last token of a multi-token label word; a shared document under several templates has the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

__all__ = ["NO_ROOT", "Batch", "Branch", "SequenceTable", "make_batches", "sequence_key"]

NO_ROOT = -1


def sequence_key(token_ids: Sequence[int]) -> bytes:
    """16-byte BLAKE2b hash of token ids (as little-endian int32): equal sequences have equal keys."""
    return blake2b(np.asarray(token_ids, dtype="<i4").tobytes(), digest_size=16).digest()


class SequenceTable:
    """Distinct token sequences in order of first appearance.

    Attributes:
        token_ids: The sequences.
        keys: `sequence_key` of each.
        roots: For each, the index of the sequence that it continues, or `NO_ROOT`.
    """

    def __init__(self) -> None:
        self.token_ids: list[tuple[int, ...]] = []
        self.keys: list[bytes] = []
        self.roots: list[int] = []
        self._index: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_ids: Sequence[int], root: int = NO_ROOT) -> int:
        """Return the index of a sequence, which is added if it is new.

        Args:
            token_ids: At least one token id.
            root: Index of a sequence without a root that is a proper prefix of this one. Ignored where the sequence is
                known already: whatever was known as a prompt in its own right stays one.

        Raises:
            ValueError: If the sequence is empty, or `root` is no proper prefix of it.
        """
        if not len(token_ids):
            raise ValueError("A sequence needs at least one token.")
        key = sequence_key(token_ids)
        index = self._index.get(key)
        if index is not None:
            if root == NO_ROOT:
                self.roots[index] = NO_ROOT
            return index
        if root != NO_ROOT:
            prefix = self.token_ids[root]
            if len(prefix) >= len(token_ids) or tuple(token_ids[: len(prefix)]) != prefix:
                raise ValueError(f"Sequence {root} is no proper prefix of the sequence to add.")
        index = self._index[key] = len(self.token_ids)
        self.token_ids.append(tuple(token_ids))
        self.keys.append(key)
        self.roots.append(root)
        return index


@dataclass(frozen=True)
class Branch:
    """A sequence that continues one row of a batch: `row` is the position in `Batch.sequences`."""

    sequence: int
    row: int


@dataclass(frozen=True)
class Batch:
    """Sequences that are forwarded together, longest first, and the branches that continue them."""

    sequences: tuple[int, ...]
    branches: tuple[Branch, ...] = field(default=())


def make_batches(
    lengths: Sequence[int],
    roots: Sequence[int],
    missing: Sequence[int],
    *,
    max_rows: int | None,
    max_tokens: int,
    batch_cost: int = 0,
) -> list[Batch]:
    """Group the missing sequences into batches, longest first, so that memory runs out in the first batch or never.

    Args:
        lengths: Number of tokens of every sequence.
        roots: For every sequence, the index of its root or `NO_ROOT`.
        missing: The sequences to forward. A branch whose root is not missing is forwarded on its own.
        max_rows: Most sequences in a batch; None: only `max_tokens` counts.
        max_tokens: Most tokens in a batch, padding included. A longer sequence makes a batch of one.
        batch_cost: What one more batch costs, in tokens. A batch ends early where filling it up with shorter sequences
            would cost more than that in padding; 0: it never does.

    Returns:
        Batches in which every missing sequence occurs exactly once, as a sequence or as a branch.
    """
    wanted = set(missing)
    branches: dict[int, list[int]] = {}
    tops = []
    for sequence in missing:
        root = roots[sequence]
        if root != NO_ROOT and roots[root] == NO_ROOT and root in wanted:
            branches.setdefault(root, []).append(sequence)
        else:
            tops.append(sequence)
    # Sequences of equal length stay in the order of their index, so that a plan depends on nothing but its input.
    tops.sort(key=lambda sequence: (-lengths[sequence], sequence))

    groups: list[list[int]] = []
    for position, sequence in enumerate(tops):
        if groups:
            group = groups[-1]
            longest = lengths[group[0]]
            capacity = max_tokens // longest if max_rows is None else min(max_rows, max_tokens // longest)
            room = min(capacity - len(group), len(tops) - position)
            padding = room * (longest - lengths[sequence])
            if room > 0 and (not batch_cost or padding <= batch_cost):
                group.append(sequence)
                continue
        groups.append([sequence])
    return [
        Batch(
            tuple(group),
            tuple(Branch(child, row) for row, top in enumerate(group) for child in branches.get(top, ())),
        )
        for group in groups
    ]
