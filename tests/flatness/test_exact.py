"""Exact derivatives against a dense Hessian by another path, and attention that is switched and put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from curvature import CONFIGS, VOCABULARY, dense_hessian, flatten, small_blocks, small_model
from tiny import CONFIGS as FAMILIES
from tiny import VOCABULARY as TINY_VOCABULARY
from tiny import tiny_model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness_ext.flatness import exact
from harness_ext.flatness.exact import (
    fisher_diagonal,
    forward_over_reverse,
    hessian_diagonal,
    hessian_matrix,
    hessian_vector_product,
    second_derivatives,
)
from harness_ext.flatness.loss import Blocks, PretrainingLoss, prepared, select_parameters
from harness_ext.flatness.weights import Weights

CPU = torch.device("cpu")


def direction(parameters: dict[str, nn.Parameter], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in parameters.items()}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def sdpa_kernels() -> tuple[bool, ...]:
    return (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


@pytest.fixture(scope="module", params=CONFIGS)
def small(request: pytest.FixtureRequest) -> Iterator[tuple[PretrainingLoss, dict[str, nn.Parameter], Blocks, Tensor]]:
    """A small model ready for second derivatives, and its dense Hessian."""
    model = small_model(request.param)
    parameters = select_parameters(model)
    blocks = small_blocks()
    with prepared(model, parameters):
        dense = dense_hessian(model, parameters, blocks)
        with second_derivatives(model):
            yield PretrainingLoss(model, device=CPU), parameters, blocks, dense


class TestSmall:
    @pytest.mark.parametrize("product", [hessian_vector_product, forward_over_reverse])
    def test_product(self, small: Any, product: Any) -> None:
        loss, parameters, blocks, dense = small
        v = direction(parameters)
        found = product(loss, parameters, blocks, v)
        assert list(found) == list(parameters)
        assert relative(flatten(found), dense @ flatten(v)) < 1e-4

    def test_matrix_and_diagonal(self, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        loss, parameters, blocks, dense = small
        matrix = hessian_matrix(loss, parameters, blocks)
        assert relative(matrix, dense) < 1e-4
        assert relative(matrix.T, matrix) < 1e-4
        monkeypatch.setattr(exact, "hessian_matrix", lambda *args: matrix)  # as computed above
        diagonal = hessian_diagonal(loss, parameters, blocks)
        assert {name: part.shape for name, part in diagonal.items()} == {n: p.shape for n, p in parameters.items()}
        assert relative(flatten(diagonal), dense.diagonal()) < 1e-4

    def test_of_some_parameters_is_a_part_of_the_whole(self, small: Any) -> None:
        loss, parameters, blocks, dense = small
        some = {name: p for name, p in parameters.items() if p.dim() == 1}
        chosen = torch.cat([torch.full((p.numel(),), name in some) for name, p in parameters.items()])
        assert relative(hessian_matrix(loss, some, blocks), dense[chosen][:, chosen]) < 1e-4

    def test_fisher(self, small: Any) -> None:
        loss, parameters, blocks, _ = small
        blocks = Blocks(blocks.tokens[:2, :4], blocks.targets[:2, :4], (0, 1))
        # The definition: a gradient for each token and each word of the vocabulary.
        expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
        logits = loss.model(input_ids=blocks.tokens, use_cache=False).logits
        scores = logits.log_softmax(-1).flatten(0, 1)
        for of_token in scores:
            for score in of_token:
                gradients = torch.autograd.grad(score, list(parameters.values()), retain_graph=True)
                for name, gradient in zip(expected, gradients, strict=True):
                    expected[name] += score.detach().exp() * gradient.square() / len(scores)
        found = fisher_diagonal(loss, parameters, blocks)
        assert relative(flatten(found), flatten(expected)) < 1e-4
        other = Blocks(blocks.tokens, (blocks.targets + 1) % VOCABULARY, blocks.numbers)
        torch.testing.assert_close(fisher_diagonal(loss, parameters, other), found)


def test_tied_weights_count_once() -> None:
    model = small_model("gpt2")
    parameters = select_parameters(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert "lm_head.weight" not in parameters
    blocks = small_blocks(1)
    with prepared(model, parameters), second_derivatives(model):
        matrix = hessian_matrix(PretrainingLoss(model, device=CPU), parameters, blocks)
        assert len(matrix) == sum(p.numel() for p in model.parameters())
        # The diagonal of a tied weight w is ∂²/∂a² + 2 ∂²/∂a∂b + ∂²/∂b² of its two uses a and b.
        untied = nn.Parameter(parameters["transformer.wte.weight"].detach().clone())
        model.lm_head.weight = untied
        both = {"wte": parameters["transformer.wte.weight"], "head": untied}
        pair = hessian_matrix(PretrainingLoss(model, device=CPU), both, blocks)
    count = untied.numel()
    folded = pair[:count, :count] + pair[:count, count:] + pair[count:, :count] + pair[count:, count:]
    assert relative(folded, matrix[:count, :count]) < 1e-4
    assert relative(pair[count:, count:], matrix[:count, :count]) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    parameters = select_parameters(model)
    tokens = torch.randint(2, TINY_VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    blocks = Blocks(tokens[:, :-1], tokens[:, 1:], (0, 1))
    loss = PretrainingLoss(model, device=CPU)
    attention, kernels = model.config._attn_implementation, sdpa_kernels()
    v = direction(parameters)
    with prepared(model, parameters):
        with second_derivatives(model) as used:
            assert used == {"sdpa": "sdpa (math)", "eager": "eager"}[attention]
            found = flatten(hessian_vector_product(loss, parameters, blocks, v))
            if family == "bloom":  # has an operation of its own
                with pytest.raises(TypeError, match=r"BloomForCausalLM cannot be .* Use hessian_vector_product"):
                    forward_over_reverse(loss, parameters, blocks, v)
            else:
                assert relative(flatten(forward_over_reverse(loss, parameters, blocks, v)), found) < 1e-4
        assert (model.config._attn_implementation, sdpa_kernels()) == (attention, kernels)
        # Central differences of gradients, with the attention that the model came with. The step is so small that no unit of
        # OPT's crosses the kink of its ReLU, where the second derivative does not see what differences do.
        sides = []
        with Weights(parameters) as weights:
            for step in (3e-5, -3e-5):
                weights.perturb(v, step)
                gradients = torch.autograd.grad(loss.mean_loss(blocks), list(parameters.values()), allow_unused=True)
                known = zip(parameters.values(), gradients, strict=True)
                sides.append(torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for p, g in known]))
    assert relative((sides[0] - sides[1]) / 6e-5, found) < 0.02


def test_fused_attention_is_switched_and_put_back() -> None:
    model = small_model("llama")
    parameters = select_parameters(model)
    blocks = small_blocks(1)
    loss = PretrainingLoss(model, device=CPU)
    v = direction(parameters)
    with prepared(model, parameters):
        with second_derivatives(model):
            expected = hessian_vector_product(loss, parameters, blocks, v)
        # What a model that was loaded with flash attention says of itself.
        model.config._attn_implementation_internal = "flash_attention_2"
        with second_derivatives(model) as used:
            assert used == "sdpa (math)"
            torch.testing.assert_close(hessian_vector_product(loss, parameters, blocks, v), expected)
        with pytest.raises(ZeroDivisionError), second_derivatives(model):
            raise ZeroDivisionError
        assert model.config._attn_implementation == "flash_attention_2"


def test_eager_where_there_is_no_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
    monkeypatch.setattr(type(model), "_supports_sdpa", False)
    monkeypatch.setattr(transformers.LlamaModel, "_supports_sdpa", False)
    model.config._attn_implementation_internal = "flex_attention"
    with prepared(model, select_parameters(model)), second_derivatives(model) as used:
        assert used == "eager"
    assert model.config._attn_implementation == "flex_attention"


class Square(torch.autograd.Function):
    """x², whose derivative can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class OnceInSilence(Square):
    """The same with a derivative that a kernel of its own computes, which PyTorch cannot look into."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return (2 * x * gradient).detach()


class OnceAsItSays(Square):
    """The same with PyTorch's own mark for it, at which `torch.autograd.grad` with given inputs stays silent."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def fused(x: Tensor) -> Tensor:
    """An operation of PyTorch's own that has a first derivative only."""
    states = x.unsqueeze(1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(states, states, states)[0].squeeze(1)  # type: ignore[no-any-return]


class Activation(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (Square.apply, None),
        (
            OnceInSilence.apply,
            r"GPT2LMHeadModel computes wrong second .* OnceInSilence are not PyTorch's own.*attn_implem",
        ),
        (OnceAsItSays.apply, r"computes wrong second derivatives: .*off by \d+% .* Its operations OnceAsItSays"),
        (fused, r"GPT2LMHeadModel has no second derivatives: .*attention_for_cpu_backward.*attn_implementation=eager"),
    ],
    ids=["differentiable", "silent", "marked", "fused"],
)
def test_operations_that_pytorch_does_not_know_are_tried(function: Any, message: str | None) -> None:
    model = small_model("gpt2")
    model.transformer.h[0].mlp.act = Activation(function)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with prepared(model, select_parameters(model)):
        if message is None:
            with second_derivatives(model) as used:
                assert used == "sdpa (math)"
        else:
            with pytest.raises(TypeError, match=message), second_derivatives(model):
                pytest.fail("was let in")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


class TestRefusals:
    def test_outside_prepared(self) -> None:
        model = small_model("gpt2").requires_grad_(False)
        with pytest.raises(ValueError, match="Enter `prepared"), second_derivatives(model):
            pytest.fail("was let in")

    @pytest.mark.parametrize("brute", [hessian_matrix, hessian_diagonal, fisher_diagonal])
    def test_too_many_parameters(self, brute: Any) -> None:
        model = tiny_model("gpt2")
        with pytest.raises(ValueError, match=r"matrix of 39,\d\d\d parameters .* stops at 5,000"):
            brute(PretrainingLoss(model, device=CPU), select_parameters(model), small_blocks())

    @pytest.mark.parametrize("product", [hessian_vector_product, forward_over_reverse])
    def test_vectors_that_do_not_fit(self, product: Any) -> None:
        model = small_model("gpt2")
        parameters = select_parameters(model)
        loss = PretrainingLoss(model, device=CPU)
        v = direction(parameters)
        with pytest.raises(ValueError, match=r"in one of them only: \['lm_head.weight'\]"):
            product(loss, parameters, small_blocks(), {**v, "lm_head.weight": v["transformer.wte.weight"]})
        turned = {**v, "transformer.wte.weight": v["transformer.wte.weight"].T}
        with pytest.raises(ValueError, match=r"wte.weight'\] has shape \(4, 11\); expected .* \(11, 4\)"):
            product(loss, parameters, small_blocks(), turned)


def test_a_parameter_that_the_loss_does_not_depend_on_has_zeros() -> None:
    model = small_model("gpt2")
    model.unused = nn.Parameter(torch.ones(3))
    parameters = select_parameters(model, include=["unused", "transformer.ln_f.*"])
    loss, blocks = PretrainingLoss(model, device=CPU), small_blocks(1)
    with prepared(model, parameters), second_derivatives(model):
        products = [
            f(loss, parameters, blocks, direction(parameters)) for f in (hessian_vector_product, forward_over_reverse)
        ]
        matrix = hessian_matrix(loss, parameters, blocks)
        only = {"unused": parameters["unused"]}
        zero = hessian_vector_product(loss, only, blocks, direction(only))
    for product in (*products, zero):
        assert not product["unused"].any()
    assert products[0]["transformer.ln_f.weight"].all()
    assert (matrix == 0).all(dim=1).sum() == 3
