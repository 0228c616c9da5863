"""Slow, obvious references."""

from __future__ import annotations

from typing import Any

import torch


def last_state(model: Any, token_ids: list[int]) -> torch.Tensor:
    """f(s) of one unpadded prompt: what the output embedding is given at the last position."""
    seen = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    handle.remove()
    return seen[0][0, -1]


def hidden_states(model: Any, token_ids: list[int]) -> tuple[torch.Tensor, ...]:
    """All hidden states of one unpadded prompt, each of shape (tokens, d)."""
    with torch.no_grad():
        return tuple(state[0] for state in model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states)


def continuation_log_prob(model: Any, context: list[int], continuation: list[int]) -> float:
    """log p(continuation | context) from the logits of one forward of both."""
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0].double().log_softmax(-1)
    return sum(float(logits[len(context) + i - 1, token]) for i, token in enumerate(continuation))


def next_token_probabilities(model: Any, token_ids: list[int]) -> torch.Tensor:
    """p_f(·|s) of one unpadded prompt in float64: an explicit softmax of the model's own logits, shape (V,)."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, -1].double()
    weights = torch.exp(logits - logits.max())
    return weights / weights.sum()
