"""Small GPT-2s and Llamas with random weights, as ordinary transformers models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

__all__ = ["ARCHITECTURES", "ModelConfig", "build_model"]


@dataclass(frozen=True)
class ModelConfig:
    """Size of a model.

    Attributes:
        width: d, the dimension of f(s) and of the embeddings; a multiple of `heads`.
        depth: Number of transformer blocks.
        heads: Attention heads of each block.
        context: Longest input in tokens.
        architecture: One of `ARCHITECTURES`.
    """

    width: int = 64
    depth: int = 2
    heads: int = 4
    context: int = 64
    architecture: str = "gpt2"

    def __post_init__(self) -> None:
        if min(self.width, self.depth, self.heads, self.context) < 1:
            raise ValueError(f"width, depth, heads and context must be at least 1, got {self}")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture is {self.architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width {self.width} and {self.heads} heads")


def build_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreTrainedModel:
    """Return a model with random weights for `tokenizer`, in float32, without dropout and with tied embeddings.

    The weights depend on `seed` alone; the state of torch's global RNG is restored.
    """
    # transformers initialises from the global RNG and takes no generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ARCHITECTURES[config.architecture](config, len(tokenizer), tokenizer.eos_token_id)
    # Neither has a token for padding; without one `generate` warns.
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    return model


def _gpt2(config: ModelConfig, vocabulary: int, end_of_text: int) -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_embd=config.width,
            n_layer=config.depth,
            n_head=config.heads,
            n_positions=config.context,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own "gelu_new" in one kernel
            initializer_range=_initial_size(config),
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
        )
    )


def _llama(config: ModelConfig, vocabulary: int, end_of_text: int) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=config.width,
            intermediate_size=4 * config.width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=config.context,
            initializer_range=_initial_size(config),
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
        )
    )


def _initial_size(config: ModelConfig) -> float:
    """Standard deviation of random weights.

    The usual 0.02 suits a width of 768 or more. In a narrow model it makes each block's output so small beside the embedding
    that what needs attention over a whole document is learned late, or not at all.
    """
    return float(config.width**-0.5)


ARCHITECTURES: dict[str, Callable[[ModelConfig, int, int], PreTrainedModel]] = {"gpt2": _gpt2, "llama": _llama}
"""By name, from sizes, vocabulary size and end of text."""
