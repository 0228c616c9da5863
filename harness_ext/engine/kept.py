"""Results that are no states of a prompt, kept in the store beside those: anything that JSON can say.

A result is found by a text that says all that it depends on besides the model. Its JSON lies in rows of bytes, so that the
store treats it like states: checksums, journals that outlive a killed process, locks and the size limit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from harness_ext.contracts import Feature
from harness_ext.engine.store import FeatureStore

__all__ = ["KeptResults"]

ROW_BYTES = 512
_LENGTH_BYTES = 8
_CHECKSUM_BYTES = 8
_HEADER_BYTES = _LENGTH_BYTES + _CHECKSUM_BYTES


class KeptResults:
    """Results of one kind about one model.

    Args:
        store: The model's.
        kind: Of the results; a name for a folder.
    """

    def __init__(self, store: FeatureStore, kind: str) -> None:
        self._store, self._feature = store, Feature(kind, "json")

    def find(self, questions: Sequence[str]) -> list[Any | None]:
        """Results by what they depend on; None for those that are not there."""
        firsts = self._rows([_key(question, 0) for question in questions])
        keys: dict[str, list[bytes]] = {}
        sizes: dict[str, int] = {}
        for question in questions:
            first = firsts.get(_key(question, 0))
            if first is not None:
                sizes[question] = int.from_bytes(first[:_LENGTH_BYTES], "little")
                keys[question] = [_key(question, place) for place in range(_num_rows(_HEADER_BYTES + sizes[question]))]
        rows = firsts | self._rows([key for of_result in keys.values() for key in of_result[1:]])
        found: dict[str, Any] = {}
        for question, of_result in keys.items():
            # The store may have lost some rows, or have others of a result that two processes have kept.
            data = b"".join(rows.get(key, b"") for key in of_result)
            text = data[_HEADER_BYTES : _HEADER_BYTES + sizes[question]]
            if data[_LENGTH_BYTES:_HEADER_BYTES] == _checksum(text):
                found[question] = json.loads(text)
        return [found.get(question) for question in questions]

    def keep(self, question: str, result: Any) -> None:
        """Keep a result, plain JSON types and floats that are no numbers; it outlives this process from here on."""
        text = json.dumps(result).encode()
        data = len(text).to_bytes(_LENGTH_BYTES, "little") + _checksum(text) + text
        count = _num_rows(len(data))
        rows = np.frombuffer(data.ljust(count * ROW_BYTES, b"\0"), dtype=np.uint8).reshape(count, ROW_BYTES)
        self._store.add(self._feature, [_key(question, place) for place in range(count)], rows)

    def _rows(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Those rows that the store has, by their keys."""
        keys = list(dict.fromkeys(keys))
        if not keys:
            return {}
        mask, rows = self._store.get(self._feature, keys)
        if rows is None:
            return {}
        return {keys[place]: row.tobytes() for place, row in zip(np.flatnonzero(mask), rows, strict=True)}


def _num_rows(num_bytes: int) -> int:
    return -(-num_bytes // ROW_BYTES)


def _checksum(text: bytes) -> bytes:
    return blake2b(text, digest_size=_CHECKSUM_BYTES).digest()


def _key(question: str, place: int) -> bytes:
    return blake2b(f"{place} {question}".encode(), digest_size=16).digest()
