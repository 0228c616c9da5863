"""What the checks name: the argument, the entry by its place in the whole of it, and how many others are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from harness_ext.evaluators import _checks


@pytest.mark.parametrize("row", [0, 4, 10])
def test_an_entry_is_named_by_its_row_in_the_matrix_whatever_the_block(
    monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    monkeypatch.setattr(_checks, "BLOCK_NUMBERS", 3 * 2)
    values = np.arange(22, dtype=np.float16).reshape(11, 2)
    blocks = [_checks.finite_block(values, rows, "states") for rows in _checks.row_blocks(values)]
    assert [len(block) for block in blocks] == [3, 3, 3, 2]
    assert np.concatenate(blocks).dtype == np.float64
    np.testing.assert_array_equal(np.concatenate(blocks), values)
    values[row:, 1] = np.inf
    (block,) = [rows for rows in _checks.row_blocks(values) if rows.start <= row < rows.stop]
    with pytest.raises(ValueError, match=rf"states\[{row}, 1\] is inf; expected finite numbers"):
        _checks.finite_block(values, block, "states")


def test_blocks_fit_the_widest_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "BLOCK_NUMBERS", 10)
    assert len(_checks.row_blocks(np.zeros((6, 2)), np.zeros((6, 5)))) == 3
    assert len(_checks.row_blocks(np.zeros((6, 99)))) == 6
    assert _checks.row_blocks(np.zeros((0, 2))) == []


def test_floating_matrices_are_not_copied() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        values = np.ones((2, 3), dtype=dtype)
        assert _checks.matrix(values, "states") is values
    assert _checks.matrix([[1, 2]], "states").dtype == np.float64
    with pytest.raises(ValueError, match=r"states has shape \(0, 3\); expected \(rows, 3\), none of them zero\."):
        _checks.matrix(np.ones((0, 3)), "states", columns=3)


def test_labels_that_are_no_class_are_counted() -> None:
    assert _checks.class_labels([], "labels", 2, None).dtype == np.int64
    with pytest.raises(
        ValueError, match=r"labels\[1\] is -1; expected a class in 0\.\.1\. 2 of 3 are outside\. Hidden\?$"
    ):
        _checks.class_labels(np.array([1, -1, 2]), "labels", 2, 3, advice="Hidden?")
    with pytest.raises(ValueError, match=r"labels has shape \(2,\); expected \(3,\), one class for each row"):
        _checks.class_labels([0, 1], "labels", 2, 3)
    with pytest.raises(ValueError, match=r"labels has dtype float64; expected integers in 0\.\.1"):
        _checks.class_labels([0.0], "labels", 2, None)
