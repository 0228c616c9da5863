"""Tiny random causal LMs of every family that the engine is tested with, and a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 320
POSITIONS = 128
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "bos_token_id": 0, "eos_token_id": 0}

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    "llama": lambda: transformers.LlamaConfig(**COMMON, **SIZES, **HEADS),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, **SIZES, **HEADS),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, **SIZES, **HEADS, head_dim=8),
    "neox": lambda: transformers.GPTNeoXConfig(**COMMON, **SIZES, num_attention_heads=4),
    "opt": lambda: transformers.OPTConfig(
        **COMMON,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=1,
    ),
    # Windows shorter than the prompts, so that a wrong treatment of padding or cache would show.
    "gemma2": lambda: transformers.Gemma2Config(**COMMON, **SIZES, **HEADS, head_dim=8, sliding_window=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, **SIZES, **HEADS, head_dim=8, sliding_window=8),
    "mistral": lambda: transformers.MistralConfig(**COMMON, **SIZES, **HEADS, sliding_window=8),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, pad_token_id=1
    ),
    "cohere": lambda: transformers.CohereConfig(**COMMON, **SIZES, **HEADS, logit_scale=0.25, pad_token_id=1),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        expand=2,
        n_groups=2,
        chunk_size=8,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    ),
}


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model in eval mode whose states and logits are far from degenerate."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(0.0, 0.3)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
    model.tie_weights()
    return model.to(dtype).eval()


def tiny_tokenizer(corpus: list[str] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `VOCABULARY` tokens, so that most words are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["this movie is great , this movie is terrible .", "the good and the bad and the film"]
    tokenizer.train_from_iterator(corpus or text * 20, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<eos>", eos_token="<eos>", pad_token="<pad>", model_max_length=POSITIONS
    )
