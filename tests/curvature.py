"""Models small enough for their whole Hessian, and that Hessian by a path of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from harness_ext.flatness.loss import Blocks

VOCABULARY = 11

_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    # Tied embeddings and biases.
    "gpt2": lambda: transformers.GPT2Config(**_COMMON, n_positions=8, n_embd=4, n_layer=1, n_head=2),
    # Untied, without biases, grouped queries.
    "llama": lambda: transformers.LlamaConfig(
        **_COMMON,
        max_position_embeddings=8,
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
}


def small_model(family: str, *, seed: int = 0) -> Any:
    """A causal LM of a few hundred parameters in training mode with fused attention, as it comes from a Hub model's class."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


def small_blocks(count: int = 2, length: int = 6, *, seed: int = 0) -> Blocks:
    tokens = torch.randint(0, VOCABULARY, (count, length + 1), generator=torch.Generator().manual_seed(seed))
    return Blocks(tokens[:, :-1], tokens[:, 1:], tuple(range(count)))


def dense_hessian(model: nn.Module, parameters: Mapping[str, nn.Parameter], blocks: Blocks) -> Tensor:
    """The Hessian of the mean loss, float32 (N, N), by differentiating a function of one flat vector with PyTorch's own tool.

    The loss is written out anew: whole logits, eager attention. The model has to be in eval mode.
    """
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation("eager")  # type: ignore[operator]

    def value(weights: Tensor) -> Tensor:
        parts = weights.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
        logits = torch.func.functional_call(model, named, (blocks.tokens,), {"use_cache": False}).logits
        return -logits.log_softmax(-1).gather(-1, blocks.targets.unsqueeze(-1)).mean()

    try:
        return torch.autograd.functional.hessian(value, flat, vectorize=True)  # type: ignore[return-value]
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]


def flatten(vectors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.detach().flatten() for part in vectors.values()])
