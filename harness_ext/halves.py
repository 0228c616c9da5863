"""A causal language model called in two halves: the body, which gives states f(s), and the head, which reads them out.

Both halves are the model itself, called whole, with a hook at its output embedding. So whatever the model does to its logits (a
bias, soft-capping, scaling, a padded vocabulary) stays what it is, and the logits of a whole sequence never exist at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["capture_head_input", "replace_head_input"]


@contextlib.contextmanager
def capture_head_input(model: nn.Module, head: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the input of the output embedding, which itself is run on one row to keep the model's code happy.

    Args:
        model: The causal LM, for the error's text.
        head: Its output embedding.

    Yields:
        A list that holds f of shape (rows, tokens, d) once the model was called, with its graph if gradients are on.

    Raises:
        TypeError: On leaving, if the model did not call its head exactly once with a tensor of three axes.
    """
    captured: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        captured.append(args[0])
        return (args[0][:1, -1:], *args[1:])

    handle = head.register_forward_pre_hook(keep)
    try:
        yield captured
    finally:
        handle.remove()
    if len(captured) != 1 or captured[0].dim() != 3:
        raise TypeError(
            f"{type(model).__name__} called its output embedding {len(captured)} times in one forward pass, expected once "
            "with (rows, tokens, d), so f(s) is not defined for it. Natural tasks can run on another backend (for example "
            "--model vllm); tasks that need states cannot."
        )


@contextlib.contextmanager
def replace_head_input(head: nn.Module, states: Tensor) -> Iterator[None]:
    """Let the head read `states`, of shape (rows, tokens, d), whatever the model's body gives it.

    Call the model on a single token meanwhile: its logits are those of the states. Gradients flow to `states`.
    """

    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (states.to(device=args[0].device, dtype=args[0].dtype), *args[1:])

    handle = head.register_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()
