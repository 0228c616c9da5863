"""A model in two halves: the states that its head reads, and the logits of any states."""

from __future__ import annotations

import pytest
import torch
from tiny import CONFIGS, tiny_model

from harness_ext.halves import capture_head_input, replace_head_input


@pytest.mark.parametrize("family", CONFIGS)
def test_the_halves_make_the_model(family: str) -> None:
    model = tiny_model(family)
    head = model.get_output_embeddings()
    tokens = torch.randint(2, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        with capture_head_input(model, head) as captured:
            model(input_ids=tokens)
        with replace_head_input(head, captured[0]):
            found = model(input_ids=tokens[:1, :1]).logits
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        # Nothing is left behind.
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=0, atol=0)


def test_gradients_flow_through_both() -> None:
    model = tiny_model("llama")
    head = model.get_output_embeddings()
    tokens = torch.tensor([[5, 6, 7]])
    with capture_head_input(model, head) as captured:
        model(input_ids=tokens)
    with replace_head_input(head, captured[0]):
        model(input_ids=tokens[:, :1]).logits.square().sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(input_ids=tokens).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_hooks_go_with_an_error() -> None:
    model = tiny_model("gpt2")
    head = model.get_output_embeddings()
    with pytest.raises(RuntimeError, match="stop"), capture_head_input(model, head):
        raise RuntimeError("stop")
    with pytest.raises(RuntimeError, match="stop"), replace_head_input(head, torch.zeros(1, 1, 32)):
        raise RuntimeError("stop")
    assert not head._forward_pre_hooks


def test_a_model_that_does_not_call_its_head_is_named() -> None:
    model = tiny_model("gpt2")
    with (
        pytest.raises(TypeError, match="GPT2LMHeadModel called its output embedding 0 times"),
        capture_head_input(model, model.get_output_embeddings()),
    ):
        pass
