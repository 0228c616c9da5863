"""Small GPT-2s of the lab."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from harness_ext.lab.languages.reviews import build_tokenizer, default_grammar
from harness_ext.lab.model import ModelConfig, build_model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(default_grammar(), max_length=64)


def test_weights_depend_on_the_seed_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    config = ModelConfig(width=16, depth=1, heads=2)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = build_model(config, tokenizer, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    again = build_model(config, tokenizer, seed=3).state_dict()
    other = build_model(config, tokenizer, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])


def test_model_has_the_size_that_was_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    model = build_model(ModelConfig(width=16, depth=3, heads=2, context=40), tokenizer, seed=0)
    assert model.get_output_embeddings().weight.shape == (len(tokenizer), 16)
    assert len(model.transformer.h) == 3
    assert model.config.max_position_embeddings == 40
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_wrong_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="multiple of heads, got width 10 and 4 heads"):
        ModelConfig(width=10, heads=4)
    with pytest.raises(ValueError, match="at least 1"):
        ModelConfig(depth=0)
