"""Results in the store: found as they were kept, or not at all."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness_ext.engine.kept import ROW_BYTES, KeptResults
from harness_ext.engine.store import FeatureStore

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda of: st.lists(of, max_size=4) | st.dictionaries(st.text(), of, max_size=4),
    max_leaves=20,
)


def open_store(folder: Path) -> FeatureStore:
    return FeatureStore(folder, "a" * 32, description="tiny")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(results=st.dictionaries(st.text(), VALUES, max_size=6), asked=st.lists(st.text(), max_size=4))
def test_results_are_found_as_they_were_kept(
    results: dict[str, Any], asked: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = open_store(folder)
    for question, result in results.items():
        KeptResults(store, "flatness").keep(question, result)
    questions = [*results, *asked, *results]
    expected = [results.get(question) for question in questions]
    assert KeptResults(store, "flatness").find(questions) == expected  # from a journal
    store.close()
    assert KeptResults(open_store(folder), "flatness").find(questions) == expected  # from a shard
    assert KeptResults(open_store(folder), "other").find(questions) == [None] * len(questions)


def test_long_results_and_numbers_that_are_none(tmp_path: Path) -> None:
    long = {"name" * 10 + str(number): [number / 7, -math.inf] for number in range(500)}
    for size in range(ROW_BYTES - 20, ROW_BYTES + 20):  # around a whole number of rows
        KeptResults(open_store(tmp_path), "flatness").keep(f"text {size}", "x" * size)
    kept = KeptResults(open_store(tmp_path), "flatness")
    kept.keep("long", long)
    kept.keep("none", {"value": math.nan})
    assert kept.find(["long"]) == [long]
    (found,) = kept.find(["none"])
    assert found is not None
    assert math.isnan(found["value"])
    sizes = range(ROW_BYTES - 20, ROW_BYTES + 20)
    assert kept.find([f"text {size}" for size in sizes]) == ["x" * size for size in sizes]


def test_rows_of_two_results_are_not_put_together(tmp_path: Path) -> None:
    """As where two processes have kept a result of the same text, and the store has lost the beginning of the older one."""
    older, newer = (["a" * ROW_BYTES * 2, value] for value in (1.25, 1.75))
    store = open_store(tmp_path)
    add = store.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "add", lambda feature, keys, rows: add(feature, keys[1:], rows[1:]))
        KeptResults(store, "flatness").keep("text", older)
    store.close()
    KeptResults(store, "flatness").keep("text", newer)
    store.close()
    assert KeptResults(open_store(tmp_path), "flatness").find(["text"]) == [None]


def test_a_result_of_which_a_part_is_damaged_is_not_found(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    KeptResults(store, "flatness").keep("short", 1)
    store.close()
    KeptResults(store, "flatness").keep("long", list(range(1000)))
    store.close()
    (large,) = [path for path in tmp_path.rglob("*.safetensors") if path.stat().st_size > 2000]
    data = bytearray(large.read_bytes())
    data[-10] ^= 1
    large.write_bytes(data)
    assert KeptResults(open_store(tmp_path), "flatness").find(["long", "short"]) == [None, 1]
