"""The loss that is differentiated, and the state that the model is put into and taken out of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CONFIGS, tiny_model
from torch import nn

from harness_ext.flatness import loss as loss_module
from harness_ext.flatness.loss import Blocks, PretrainingLoss, prepared, select_parameters

CPU = torch.device("cpu")


def some_blocks(rows: int = 3, tokens: int = 7) -> Blocks:
    ids = torch.randint(2, 300, (rows, tokens + 1), generator=torch.Generator().manual_seed(0))
    return Blocks(ids[:, :-1], ids[:, 1:], tuple(range(rows)))


def reference(model: Any, blocks: Blocks) -> torch.Tensor:
    logits = model(input_ids=blocks.tokens).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), blocks.targets.flatten(), reduction="none").view(
        blocks.targets.shape
    )


@pytest.mark.parametrize("family", CONFIGS)
def test_losses_are_those_of_the_whole_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_VALUES", 320 * 4)  # several chunks
    model, blocks = tiny_model(family), some_blocks()
    parameters = select_parameters(model)
    with prepared(model, parameters):
        found = PretrainingLoss(model, device=CPU).token_losses(blocks)
        with torch.no_grad():
            torch.testing.assert_close(found, reference(model, blocks), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_gradients_are_those_of_the_whole_model(family: str) -> None:
    model, blocks = tiny_model(family), some_blocks()
    parameters = select_parameters(model)
    with prepared(model, parameters):
        found = torch.autograd.grad(PretrainingLoss(model, device=CPU).mean_loss(blocks), list(parameters.values()))
        expected = torch.autograd.grad(reference(model, blocks).mean(), list(parameters.values()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_model_is_in_eval_mode_and_float32_and_comes_back() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16).train()
    model.model.layers[0].eval()
    model.model.norm.weight.requires_grad_(False)
    embedding = model.get_input_embeddings()
    embedding.padding_idx = 3
    weight = model.lm_head.weight
    weight.grad = torch.ones_like(weight)
    state = {
        name: (p, p.data.data_ptr(), p.detach().clone(), p.requires_grad, p.grad)
        for name, p in model.named_parameters()
    }
    modes = [module.training for module in model.modules()]
    chosen = select_parameters(model, include=["*mlp*"])
    with pytest.raises(RuntimeError, match="stop"), prepared(model, chosen):  # noqa: PT012
        assert not any(module.training for module in model.modules())
        assert embedding.padding_idx is None
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32
            assert parameter.requires_grad == (name in chosen)
            assert parameter.grad is None
        raise RuntimeError("stop")
    assert [module.training for module in model.modules()] == modes
    assert embedding.padding_idx == 3
    for name, parameter in model.named_parameters():
        same, address, values, requires_grad, grad = state[name]
        assert parameter is same
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, values)
        assert parameter.requires_grad == requires_grad
        assert parameter.grad is grad


def test_a_tied_parameter_counts_once_and_answers_to_both_names() -> None:
    model = tiny_model("gpt2")
    every = select_parameters(model)
    assert sum(p.numel() for p in every.values()) == model.num_parameters()
    assert "transformer.wte.weight" in every
    assert "lm_head.weight" not in every
    assert set(select_parameters(model, include=["lm_head*"])) == {"transformer.wte.weight"}
    assert set(every) - set(select_parameters(model, exclude=["lm_head*"])) == {"transformer.wte.weight"}


def test_patterns_are_of_whole_names() -> None:
    model = tiny_model("llama")
    chosen = select_parameters(model, include=["*.mlp.*", "*norm*"], exclude=["*layers.1.*"])
    assert chosen
    assert all((".mlp." in name or "norm" in name) and "layers.1." not in name for name in chosen)


def test_what_has_no_derivative_is_refused() -> None:
    model = tiny_model("gpt2")
    model.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    with pytest.raises(TypeError, match=r"parameter codes has dtype torch.int8.*without quantisation"):
        select_parameters(model)
    assert "codes" not in select_parameters(model, exclude=["codes"])
    model.codes = nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(TypeError, match="parameter codes is offloaded"):
        select_parameters(model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(TypeError, match=r"GPT2Model.*expected a causal language model"):
        PretrainingLoss(tiny_model("gpt2").transformer, device=CPU)
