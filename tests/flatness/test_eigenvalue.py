"""The largest eigenvalue against dense Hessians and closed forms, and weights that come back bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from curvature import CONFIGS, dense_hessian, small_blocks, small_model
from tiny import CONFIGS as FAMILIES
from tiny import VOCABULARY as TINY_VOCABULARY
from tiny import tiny_model
from torch import Tensor, nn

from harness_ext.flatness import eigenvalue
from harness_ext.flatness.eigenvalue import TopEigenvalue, top_eigenvalue
from harness_ext.flatness.loss import Blocks, PretrainingLoss, prepared, select_parameters
from harness_ext.flatness.weights import Weights

CPU = torch.device("cpu")


class Small(NamedTuple):
    model: nn.Module
    parameters: dict[str, nn.Parameter]
    blocks: Blocks
    of_block: np.ndarray
    """Dense Hessians, float64 of shape (blocks, N, N)."""


@pytest.fixture(scope="module", params=CONFIGS)
def small(request: pytest.FixtureRequest) -> Iterator[Small]:
    model = small_model(request.param)
    parameters = select_parameters(model)
    blocks = small_blocks(4)
    with prepared(model, parameters):
        dense = [dense_hessian(model, parameters, blocks.one(row)).double().numpy() for row in range(4)]
        yield Small(model, parameters, blocks, np.stack([(h + h.T) / 2 for h in dense]))


def find(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    blocks_list: list[Blocks],
    *,
    seed: int = 0,
    max_iterations: int = 100,
    tolerance: float = 0.005,
) -> TopEigenvalue:
    loss = PretrainingLoss(model, device=CPU)
    return top_eigenvalue(loss, parameters, blocks_list, seed=seed, max_iterations=max_iterations, tolerance=tolerance)


@pytest.fixture(scope="module")
def top(small: Small) -> TopEigenvalue:
    return find(small.model, small.parameters, [small.blocks])


class TestDense:
    def test_value(self, small: Small, top: TopEigenvalue) -> None:
        largest, second = np.linalg.eigvalsh(small.of_block.mean(axis=0))[[-1, -2]]
        assert top.converged
        assert top.residual <= 0.005 * top.value
        # Kato and Temple: the error is at most residual² / gap. What is added is the error of products by differences.
        assert largest - top.residual**2 / (largest - second) - 1e-3 * largest < top.value < largest + 1e-3 * largest

    def test_values_of_blocks_are_derivatives_of_the_eigenvalue(self, small: Small, top: TopEigenvalue) -> None:
        """uᵀH_b u is dλ/dw_b where the Hessian is Σ_b w_b H_b."""
        assert top.per_block.shape == (4,)
        assert top.per_block.dtype == np.float64
        assert top.per_block.mean() == pytest.approx(top.value, rel=1e-12)

        def largest(weights: np.ndarray) -> float:
            return float(np.linalg.eigvalsh(np.tensordot(weights, small.of_block, 1))[-1])

        step = 1e-4 * np.eye(4)
        slopes = [(largest(0.25 + row) - largest(0.25 - row)) / 2e-4 for row in step]
        # To first order in the error of u, which the residual bounds; H_b u is not parallel to u, so it counts.
        np.testing.assert_allclose(top.per_block, slopes, atol=0.02 * max(np.abs(slopes)))

    def test_of_some_parameters(self, small: Small) -> None:
        some = {name: p for name, p in small.parameters.items() if "mlp" in name}
        chosen = np.concatenate([np.full(p.numel(), "mlp" in name) for name, p in small.parameters.items()])
        others = [p for name, p in small.parameters.items() if name not in some]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            top = find(small.model, some, [small.blocks], tolerance=0.02)
        finally:
            for parameter in others:
                parameter.requires_grad_(True)
        dense = small.of_block.mean(axis=0)[chosen][:, chosen]
        assert top.value == pytest.approx(np.linalg.eigvalsh(dense)[-1], rel=0.01)

    def test_neither_batches_nor_the_order_matter(self, small: Small) -> None:
        rows = [small.blocks.one(row) for row in range(4)]
        whole, single, turned = (
            find(small.model, small.parameters, batches, max_iterations=2)
            for batches in ([small.blocks], rows, rows[::-1])
        )
        assert whole._replace(per_block=None) == single._replace(per_block=None)
        np.testing.assert_array_equal(whole.per_block, single.per_block)
        assert turned.value == pytest.approx(whole.value, rel=2e-3)
        np.testing.assert_allclose(turned.per_block[::-1], whole.per_block, atol=0.01 * np.abs(whole.per_block).max())

    def test_chunks_of_the_vocabulary_add_up(self, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = find(small.model, small.parameters, [small.blocks], max_iterations=1)
        monkeypatch.setattr("harness_ext.flatness.loss.CHUNK_VALUES", 2 * 11)
        parts = find(small.model, small.parameters, [small.blocks], max_iterations=1)
        assert parts.value == pytest.approx(whole.value, rel=2e-3)

    def test_pieces_of_vectors_add_up(self, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = find(small.model, small.parameters, [small.blocks], max_iterations=3)
        monkeypatch.setattr(eigenvalue, "PIECE", 7)
        parts = find(small.model, small.parameters, [small.blocks], max_iterations=3)
        assert parts.value == pytest.approx(whole.value, rel=2e-3)

    def test_not_converged(self, small: Small, top: TopEigenvalue) -> None:
        short = find(small.model, small.parameters, [small.blocks], max_iterations=1)
        assert not short.converged
        assert short.iterations == 1
        assert short.residual > 0.005 * abs(short.value)
        assert short.value < top.value
        # Even so, an eigenvalue is as near as the residual says.
        values = np.linalg.eigvalsh(small.of_block.mean(axis=0))
        assert np.abs(values - short.value).min() <= short.residual * 1.01

    def test_seeds(self, small: Small, top: TopEigenvalue) -> None:
        first, again, other = (
            find(small.model, small.parameters, [small.blocks], seed=seed, max_iterations=1) for seed in (0, 0, 5)
        )
        assert first.value == again.value
        np.testing.assert_array_equal(first.per_block, again.per_block)
        assert first.value != other.value
        converged = find(small.model, small.parameters, [small.blocks], seed=5, tolerance=0.02)
        assert converged.value == pytest.approx(top.value, rel=5e-3)


class Toy(nn.Module):
    """A causal LM whose state is `sign` θ² at every position and whose output embedding is the first columns of an identity.

    At θ = 0 its gradient is zero and its Hessian diagonal: 2 · sign · (1/V − frequency of word i) in the i-th of the weights.
    """

    def __init__(self, words: int, vocabulary: int, sign: float = 1.0) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(words))
        self.spare = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(words, vocabulary, bias=False)
        self.head.weight.data = torch.eye(vocabulary)[:, :words].contiguous()
        self.sign = sign
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=vocabulary))

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        states = (self.sign * self.theta.square()).expand(*input_ids.shape, -1)
        return SimpleNamespace(logits=self.head(states))


class TestClosedForm:
    # Frequencies of words 0 to 3 in the two blocks: 1/2, 1/2, 0, 0 and 1/2, 1/4, 1/4, 0.
    blocks = Blocks(torch.zeros(2, 4, dtype=torch.long), torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]]), (3, 4))

    def run(self, toy: Toy, include: str = "theta", **options: Any) -> TopEigenvalue:
        parameters = select_parameters(toy, include=[include])
        with prepared(toy, parameters):
            return find(toy, parameters, [self.blocks], **options)

    def test_positive(self) -> None:
        top = self.run(Toy(words=4, vocabulary=4))
        assert top.converged
        assert top.value == pytest.approx(2 * 0.25, rel=1e-3)
        np.testing.assert_allclose(top.per_block, [0.5, 0.5], rtol=1e-2)

    def test_negative_definite(self) -> None:
        """Words 0 and 1 alone are both more frequent than 1/4: eigenvalues −1/2 and −1/4."""
        top = self.run(Toy(words=2, vocabulary=4))
        assert top.converged
        assert top.value == pytest.approx(-0.25, rel=1e-3)
        np.testing.assert_allclose(top.per_block, [-0.5, 0.0], atol=5e-3)

    def test_the_largest_is_not_the_largest_in_size(self) -> None:
        """With the sign turned, eigenvalues are 1/2, 1/4, −1/4 and −1/2."""
        top = self.run(Toy(words=4, vocabulary=4, sign=-1.0))
        assert top.value == pytest.approx(0.5, rel=1e-3)
        np.testing.assert_allclose(top.per_block, [0.5, 0.5], rtol=1e-2)

    def test_zero_is_never_converged(self) -> None:
        top = self.run(Toy(words=4, vocabulary=4), include="spare")
        assert (top.value, top.residual, top.iterations, top.converged) == (0.0, 0.0, 0, False)
        np.testing.assert_array_equal(top.per_block, [0.0, 0.0])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_weights_come_back(family: str) -> None:
    """With the model as it was loaded: bfloat16, default attention, tied weights."""
    model = tiny_model(family, dtype=torch.bfloat16)
    parameters = select_parameters(model)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    tokens = torch.randint(2, TINY_VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    blocks = Blocks(tokens[:, :-1], tokens[:, 1:], (0,))
    with prepared(model, parameters):
        loss_before = PretrainingLoss(model, device=CPU).token_losses(blocks)
        top = find(model, parameters, [blocks], max_iterations=4, tolerance=0.3)
        assert torch.equal(PretrainingLoss(model, device=CPU).token_losses(blocks), loss_before)
        assert all(p.grad is None for p in parameters.values())
    assert top.value > 0
    assert math.isfinite(top.residual)
    for name, parameter in model.named_parameters():
        pointer, value = before[name]
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter, value)


class Interrupting(PretrainingLoss):
    """Stops after some calls, as a user or the memory may."""

    calls = 0

    def states(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 6:  # in the middle of a product, at moved weights
            raise KeyboardInterrupt
        return super().states(tokens)


def test_weights_and_gradients_come_back_after_an_interruption() -> None:
    model = small_model("llama")
    parameters = select_parameters(model)
    with prepared(model, parameters):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, 7.0)
        before = {name: (p.data_ptr(), p.detach().clone(), p.grad) for name, p in parameters.items()}
        with pytest.raises(KeyboardInterrupt):
            top_eigenvalue(
                Interrupting(model, device=CPU), parameters, [small_blocks()], seed=0, max_iterations=9, tolerance=0.01
            )
        for name, parameter in parameters.items():
            pointer, value, gradient = before[name]
            assert parameter.data_ptr() == pointer
            assert torch.equal(parameter, value)
            assert parameter.grad is gradient
            assert (gradient == 7).all()


def test_parameters_that_share_memory_without_being_one() -> None:
    """They are two to the gradient, so they are two here; and both come back."""
    model = small_model("llama").to(torch.bfloat16).float()
    values = model.lm_head.weight.detach().clone()
    model.model.embed_tokens.weight = nn.Parameter(values.clone())
    parameters = select_parameters(model)
    with prepared(model, parameters):
        expected = find(model, parameters, [small_blocks()], max_iterations=2)
    model.model.embed_tokens.weight = nn.Parameter(model.lm_head.weight.data)
    parameters = select_parameters(model)
    with prepared(model, parameters):
        assert find(model, parameters, [small_blocks()], max_iterations=2).value == expected.value
    assert torch.equal(model.lm_head.weight, values)


class TestRefusals:
    def test_no_blocks(self) -> None:
        model = small_model("llama")
        with pytest.raises(ValueError, match="blocks_list is empty"):
            find(model, select_parameters(model), [])

    @pytest.mark.parametrize("options", [{"max_iterations": 0}, {"tolerance": 0.0}, {"tolerance": 1.0}])
    def test_options(self, options: dict[str, Any]) -> None:
        model = small_model("llama")
        with pytest.raises(ValueError, match="expected at least 1, and between 0 and 1"):
            find(model, select_parameters(model), [small_blocks()], **options)

    @pytest.mark.parametrize("spoil", [nn.Module.half, lambda model: model.requires_grad_(False)])
    def test_outside_prepared(self, spoil: Callable[[nn.Module], nn.Module]) -> None:
        model = spoil(small_model("llama"))
        with pytest.raises(ValueError, match=r"parameter model.embed_tokens.weight .* Enter `prepared"):
            find(model, select_parameters(model), [small_blocks()])

    def test_a_loss_that_is_not_finite(self) -> None:
        model = small_model("llama")
        parameters = select_parameters(model)
        with torch.no_grad():
            model.lm_head.weight[3, 0] = math.nan
        with prepared(model, parameters), pytest.raises(FloatingPointError, match=r"blocks \[0, 1\] is not finite"):
            find(model, parameters, [small_blocks()])


class TestWeights:
    def test_compact(self) -> None:
        """Weights that bfloat16 holds exactly move in place, the others do not, and all come back."""
        model = small_model("llama")
        with torch.no_grad():
            model.lm_head.to(torch.bfloat16).float()
            model.lm_head.weight[0, :3] = torch.tensor([-0.0, math.inf, 2.0**-130])
        parameters = select_parameters(model)
        exactly = {name: torch.equal(p, p.bfloat16().float()) for name, p in parameters.items()}
        assert {name for name in exactly if exactly[name]} == {"lm_head.weight"}
        before = {name: (p.data_ptr(), p.detach().clone()) for name, p in parameters.items()}
        ones = {name: torch.ones_like(p) for name, p in parameters.items()}
        with Weights(parameters, compact=True) as weights:
            for scale in (0.5, -0.25):
                weights.perturb(ones, scale)
                for name, parameter in parameters.items():
                    pointer, value = before[name]
                    assert torch.equal(parameter, value + scale)
                    assert (parameter.data_ptr() == pointer) == exactly[name]
            weights.perturb(lambda name, theta: theta, 1.0)
            for name, parameter in parameters.items():
                assert torch.equal(parameter, 2 * before[name][1])
            weights.perturb({}, 1.0)
            for name, parameter in parameters.items():
                assert torch.equal(parameter, before[name][1])
            weights.perturb(ones, 1.0)
        for name, parameter in parameters.items():
            pointer, value = before[name]
            assert parameter.data_ptr() == pointer
            assert torch.equal(parameter.detach().view(torch.int32), value.view(torch.int32))

    def test_displacement_is_what_rounding_has_left(self) -> None:
        theta = nn.Parameter(torch.tensor([1.0, 1024.0]))
        with Weights({"w": theta}) as weights:
            weights.perturb({"w": torch.ones(2)}, 2.0**-20)
            # Float32 has 23 bits after the first: 1024 does not move.
            assert weights.displacement({"w": torch.tensor([3.0, 5.0])}) == 3 * 2.0**-20

    def test_moves_start_from_where_the_context_was_entered(self) -> None:
        model = small_model("llama")
        parameters = select_parameters(model)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        pointers = {name: p.data_ptr() for name, p in parameters.items()}
        ones = {name: torch.ones_like(p, dtype=torch.bfloat16) for name, p in parameters.items()}
        with Weights(parameters) as weights:
            weights.perturb(ones, 0.5)
            weights.perturb(ones, -0.25)
            for name, parameter in parameters.items():
                assert torch.equal(parameter, before[name] - 0.25)
            weights.perturb(lambda name, theta: theta, 1.0)
            for name, parameter in parameters.items():
                assert torch.equal(parameter, 2 * before[name])
            weights.perturb({"lm_head.weight": ones["lm_head.weight"]}, 1.0)
            for name, parameter in parameters.items():
                assert torch.equal(parameter, before[name] + (name == "lm_head.weight"))
            weights.restore()
            assert {name: p.data_ptr() for name, p in parameters.items()} == pointers
            weights.perturb(ones, 1.0)
        for name, parameter in parameters.items():
            assert parameter.data_ptr() == pointers[name]
            assert torch.equal(parameter, before[name])

    def test_it_is_a_context(self) -> None:
        weights = Weights(select_parameters(small_model("llama")))
        with pytest.raises(RuntimeError, match="Enter the context first"):
            weights.perturb({}, 1.0)
        with weights, pytest.raises(RuntimeError, match="moved already"), weights:
            pytest.fail("was let in")


def test_combination_of_nearly_dependent_vectors() -> None:
    """The third vector is the sum of the others up to rounding: it is left out rather than blown up."""
    rng = np.random.default_rng(0)
    h = np.diag([3.0, 1.0, -5.0])
    x, d = rng.normal(size=(2, 3))
    vectors = np.stack([x, d, x + d + 1e-9 * rng.normal(size=3)])
    found = np.array(eigenvalue._largest(np.triu(vectors @ h @ vectors.T), vectors @ vectors.T)) @ vectors
    basis, _ = np.linalg.qr(vectors[:2].T)
    assert found @ found == pytest.approx(1, abs=1e-6)
    assert found @ h @ found == pytest.approx(np.linalg.eigvalsh(basis.T @ h @ basis)[-1], abs=1e-6)
