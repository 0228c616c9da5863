"""Cross-entropy of windows of a corpus: the body once for each window, and the head a few positions at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from harness_ext.engine.forward import LastStateModel

__all__ = ["window_nats"]

logger = logging.getLogger("lm_eval.harness_ext.engine")


def window_nats(
    windows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    model: LastStateModel,
    max_rows: int,
    max_tokens: int,
    progress: bool = True,
) -> list[float]:
    """Return −Σ log p(target) of each window, in nats.

    Token losses are float32, from logits of the model's head in float32, and add up in float64.

    Args:
        windows: Token ids and targets; targets belong to the last positions. See `engine.windows`.
        model: The model.
        max_rows: Windows in a batch at most.
        max_tokens: Tokens in a batch, padding counted, at most; a single longer window makes a batch of its own.
        progress: Whether to show a progress bar.
    """
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i][0]))
    found = [0.0] * len(windows)
    started = time.perf_counter()
    bar: Any = tqdm(total=len(windows), desc="Windows", unit=" windows", disable=not progress)
    position = 0
    while position < len(order):
        # The first of a batch is the longest.
        rows = max(1, min(max_rows, max_tokens // len(windows[order[position]][0])))
        batch = order[position : position + rows]
        states = model.token_states([tuple(windows[i][0]) for i in batch])
        scored = torch.cat(
            [of_row[len(of_row) - len(windows[i][1]) :] for of_row, i in zip(states, batch, strict=True)]
        )
        targets = [[target] for i in batch for target in windows[i][1]]
        log_probs, _ = model.readout.read(scored, targets)
        nats = -torch.cat(log_probs).double()
        lengths = [len(windows[i][1]) for i in batch]
        for i, of_window in zip(batch, nats.split(lengths), strict=True):
            found[i] = float(of_window.sum())
        position += len(batch)
        bar.update(len(batch))
    bar.close()
    seconds = time.perf_counter() - started
    tokens = sum(len(tokens) for tokens, _ in windows)
    logger.info(
        "Losses of %d windows, %d tokens, %.1f s (%.0f tokens/s).", len(windows), tokens, seconds, tokens / seconds
    )
    return found
