"""Losses of windows, kept in the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_model

from harness_ext.engine.forward import LastStateModel
from harness_ext.engine.losses import window_nats
from harness_ext.engine.store import FeatureStore

Window = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 40, 23)
    return [(tuple(rng.integers(0, 300, n).tolist()), tuple(rng.integers(0, 300, n // 2).tolist())) for n in lengths]


def losses(windows: Sequence[Window], root: Path | None) -> tuple[list[float], int]:
    """Losses and the number of tokens forwarded for them."""
    model = LastStateModel(tiny_model("gpt2"), device=torch.device("cpu"))
    store = None if root is None else FeatureStore(root, "model", description="")
    nats = window_nats(windows, model=model, max_rows=4, max_tokens=999, progress=False, store=store)
    if store is not None:
        store.close()
    return nats, model.counts.tokens


def test_a_second_run_forwards_nothing_and_finds_the_same(windows: list[Window], tmp_path: Path) -> None:
    expected, tokens = losses(windows, None)
    first, second = losses(windows, tmp_path), losses(windows, tmp_path)
    assert tokens > 0
    assert first == (expected, tokens)
    assert second == (expected, 0)


def test_other_targets_after_the_same_tokens_are_another_window(windows: list[Window], tmp_path: Path) -> None:
    changed = [(tokens, (*targets[:-1], (targets[-1] + 1) % 300)) for tokens, targets in windows]
    losses(windows, tmp_path)
    found, tokens = losses(changed, tmp_path)
    assert tokens > 0
    assert found == losses(changed, None)[0]
