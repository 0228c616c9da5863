"""Small GPT-2s with random weights, as ordinary transformers models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

__all__ = ["ModelConfig", "build_model"]


@dataclass(frozen=True)
class ModelConfig:
    """Size of a model.

    Attributes:
        width: d, the dimension of f(s) and of the embeddings; a multiple of `heads`.
        depth: Number of transformer blocks.
        heads: Attention heads of each block.
        context: Longest input in tokens.
    """

    width: int = 64
    depth: int = 2
    heads: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        if min(self.width, self.depth, self.heads, self.context) < 1:
            raise ValueError(f"width, depth, heads and context must be at least 1, got {self}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width {self.width} and {self.heads} heads")


def build_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> GPT2LMHeadModel:
    """Return a GPT-2 with random weights for `tokenizer`, in float32, without dropout and with tied embeddings.

    The weights depend on `seed` alone; the state of torch's global RNG is restored.
    """
    end_of_text = tokenizer.eos_token_id
    gpt2_config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=config.width,
        n_layer=config.depth,
        n_head=config.heads,
        n_positions=config.context,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own "gelu_new" in one kernel
        # GPT-2's 0.02 suits a width of 768 or more. In a narrow model it makes each block's output so small beside the
        # embedding that what needs attention over a whole document is learned late, or not at all.
        initializer_range=config.width**-0.5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
    )
    # transformers initialises from the global RNG and takes no generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(gpt2_config)
    # GPT-2 has no token for padding; without one `generate` warns.
    model.generation_config.pad_token_id = end_of_text
    return model
