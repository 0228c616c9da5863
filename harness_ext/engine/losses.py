"""Cross-entropy of windows of a corpus: the body once for each window, and the head a few positions at a time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np
import torch

from harness_ext.contracts import Feature
from harness_ext.engine.forward import LastStateModel
from harness_ext.engine.plan import sequence_key
from harness_ext.engine.store import FeatureStore
from harness_ext.ranks import ALONE, Lockstep, Progress, Ranks, share_out

__all__ = ["window_nats"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

NATS = Feature("window", "nats")
"""The name in the store of a window's loss, float64 of shape (1,)."""


def window_nats(
    windows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    model: LastStateModel,
    max_rows: int,
    max_tokens: int,
    progress: bool = True,
    ranks: Ranks = ALONE,
    lockstep: Lockstep | None = None,
    store: FeatureStore | None = None,
) -> list[float]:
    """Return −Σ log p(target) of each window, in nats.

    Token losses are float32, from logits of the model's head in float32, and add up in float64.

    Args:
        windows: Token ids and targets; targets belong to the last positions. See `engine.windows`.
        model: The model.
        max_rows: Windows in a batch at most.
        max_tokens: Tokens in a batch, padding counted, at most; a single longer window makes a batch of its own.
        progress: Whether to show a progress bar.
        ranks: The processes that share the batches, which are the same for any number of them. All call this with the same
            windows, and get all losses.
        lockstep: What makes the forward passes of a model that is spread over the ranks; None: each rank has all of it.
        store: Where losses are kept, and taken from for batches of which it has every window; None: nowhere.
    """
    keys = [sequence_key([*tokens, -1, *targets]) for tokens, targets in windows]
    ranks.check_same(blake2b(b"".join(keys), digest_size=16).hexdigest(), "windows")
    batches = list(_batches(windows, max_rows=max_rows, max_tokens=max_tokens))
    rank_of = share_out([len(batch) * len(windows[batch[0]][0]) for batch in batches], ranks.size)
    nats = np.zeros(len(windows))
    stored = _stored_nats(store, keys)
    started = time.perf_counter()
    with Progress(ranks, total=len(windows), desc="Windows", unit=" windows", shown=progress) as bar:
        with lockstep.work() if lockstep is not None else contextlib.nullcontext():
            for batch, rank in zip(batches, rank_of, strict=True):
                if rank != ranks.rank:
                    continue
                if not np.isnan(stored[batch]).any():
                    nats[batch] = stored[batch]
                else:
                    nats[batch] = _nats_of_batch([windows[i] for i in batch], model)
                    if store is not None:
                        store.add(NATS, [keys[i] for i in batch], nats[batch][:, np.newaxis])
                bar.update(len(batch))
        bar.finish()
    nats = ranks.sum(nats)
    if ranks.is_first:
        seconds = time.perf_counter() - started
        tokens = sum(len(tokens) for tokens, _ in windows)
        logger.info(
            "Losses of %d windows, %d tokens, %.1f s (%.0f tokens/s).", len(windows), tokens, seconds, tokens / seconds
        )
    return nats.tolist()


def _stored_nats(store: FeatureStore | None, keys: Sequence[bytes]) -> np.ndarray:
    """Losses by window, NaN where the store has none."""
    nats = np.full(len(keys), np.nan)
    if store is not None:
        found, values = store.get(NATS, keys)
        if values is not None:
            nats[found] = values[:, 0]
    return nats


def _batches(
    windows: Sequence[tuple[Sequence[int], Sequence[int]]], *, max_rows: int, max_tokens: int
) -> Iterator[list[int]]:
    """Yield indices of windows, the longest first."""
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i][0]))
    position = 0
    while position < len(order):
        # The first of a batch is the longest.
        rows = max(1, min(max_rows, max_tokens // len(windows[order[position]][0])))
        yield order[position : position + rows]
        position += rows


def _nats_of_batch(windows: Sequence[tuple[Sequence[int], Sequence[int]]], model: LastStateModel) -> list[float]:
    states = model.token_states([tuple(tokens) for tokens, _ in windows])
    scored = torch.cat(
        [of_row[len(of_row) - len(targets) :] for of_row, (_, targets) in zip(states, windows, strict=True)]
    )
    log_probs, _ = model.readout.read(scored, [[target] for _, targets in windows for target in targets])
    nats = -torch.cat(log_probs).double()
    return [float(of_window.sum()) for of_window in nats.split([len(targets) for _, targets in windows])]
