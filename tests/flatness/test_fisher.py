"""Fisher traces against plain loops of autograd, and their expectation against the sum over the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny import CONFIGS, tiny_model
from torch import Tensor, nn

from harness_ext.flatness import fisher, loss
from harness_ext.flatness.fisher import FisherTraces, fisher_traces
from harness_ext.flatness.loss import Blocks, PretrainingLoss, prepared, select_parameters


def make_blocks(size: int, rows: int = 3, tokens: int = 7) -> Blocks:
    ids = torch.randint(2, size, (rows, tokens + 1), generator=torch.Generator().manual_seed(1))
    ids[:, 3] = ids[:, 1]  # a token that comes twice in a block
    return Blocks(ids[:, :-1], ids[:, 1:], (5, 2, 9)[:rows])


def loss_of(model: Any) -> PretrainingLoss:
    return PretrainingLoss(model, device=torch.device("cpu"))


def estimate(model: Any, blocks: Blocks, names: tuple[str, ...] = ("*",), **kwargs: Any) -> FisherTraces:
    parameters = select_parameters(model, include=names)
    with prepared(model, parameters):
        return fisher_traces(loss_of(model), parameters, blocks, seed=3, **kwargs)


def gradients(output: Tensor, parameters: Mapping[str, nn.Parameter], seed: Tensor) -> dict[str, Tensor]:
    values = torch.autograd.grad(output, list(parameters.values()), seed, allow_unused=True, retain_graph=True)
    pairs = zip(parameters.items(), values, strict=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}


def plain_loop(model: Any, parameters: dict[str, nn.Parameter], block: Blocks, labels: Any) -> dict[str, list[float]]:
    """Per parameter (Σ g², Σ w² g²)/T for one block and draw: for the readout's own part the exact expectation."""
    head = loss_of(model)
    task = fisher._Task(head, parameters, 3, range(1), labels, True)
    states = head.states(block.tokens)[0]
    inputs = states.detach().requires_grad_()
    logits = head.logits(inputs)
    probabilities = logits.detach().softmax(-1)
    num_tokens = len(states)
    errors = fisher._Noise(task, block, 0).of(probabilities, slice(0, num_tokens))
    (seed,) = torch.autograd.grad(logits, inputs, errors, retain_graph=True)
    body, readout = gradients(states, parameters, seed), gradients(logits, parameters, errors)
    variances = probabilities * (1 - probabilities)
    result = {}
    for name, parameter in parameters.items():
        own = []
        for t in range(num_tokens):  # ∂z_tv/∂W has one row, D_tv h_t
            rows = gradients(logits[t].sum(), {name: parameter}, torch.tensor(1.0))[name].square()
            own.append(rows * variances[t].view(-1, *[1] * (rows.dim() - 1)) if rows.any() else torch.zeros_like(rows))
        squares = body[name].square() + 2 * body[name] * readout[name] + torch.stack(own).sum(0)
        weight = parameter.detach().square()
        result[name] = [float(v.double().sum()) / num_tokens for v in (squares, squares * weight)]
    return result


@pytest.mark.parametrize("labels", ["signs", "sampled"])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_norms_are_those_of_a_loop_over_blocks(family: str, labels: str) -> None:
    model, blocks = tiny_model(family), make_blocks(320, rows=2)
    found = estimate(model, blocks, labels=labels)
    plain = estimate(model, blocks, labels=labels, scaled=False)
    parameters = select_parameters(model)
    with prepared(model, parameters):
        token_losses = loss_of(model).token_losses(blocks).double().mean(1)
        for row in range(2):
            for name, (one, weighted) in plain_loop(model, parameters, blocks.one(row), labels).items():
                tolerance = {"rel": 2e-3, "abs": 1e-6 * found.traces[row]}
                assert found.by_parameter[name][row] == pytest.approx(one, **tolerance), name
                assert plain.by_parameter[name][row] == pytest.approx(one, **tolerance), name
                assert found.scaled_by_parameter is not None
                assert found.scaled_by_parameter[name][row] == pytest.approx(weighted, **tolerance), name
    np.testing.assert_allclose(found.losses, token_losses, rtol=1e-5)
    np.testing.assert_allclose(found.traces, sum(found.by_parameter.values()))
    assert plain.scaled_traces is None
    assert bool(found.looped) == (family in ("mamba", "mamba2"))  # state-space parameters are used in their own ways
    assert fisher._SINGLE[model] is False


def little(tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=13,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def exact_traces(model: Any, parameters: dict[str, nn.Parameter], block: Blocks) -> list[float]:
    """(1/T) Σ_t Σ_v p_tv ‖∇ log p_t(v)‖², plain and weighted by w²."""
    logs = model(input_ids=block.tokens, use_cache=False).logits[0].log_softmax(-1)
    totals = [0.0, 0.0]
    for t in range(len(logs)):
        for v in range(logs.shape[1]):
            for name, g in gradients(logs[t, v], parameters, torch.tensor(1.0)).items():
                for which, factor in enumerate((1.0, parameters[name].detach().square())):
                    totals[which] += float(logs[t, v].detach().exp() * (g.square() * factor).sum())
    return [total / len(logs) for total in totals]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("labels", ["signs", "sampled"])
@pytest.mark.parametrize("draws", [1, 3])
def test_the_expectation_is_exact(tied: bool, labels: Any, draws: int) -> None:
    """Two means of 1,000 independent blocks each within 4.5 standard errors: false alarms 1.4e-5 a test."""
    model = little(tied)
    parameters = select_parameters(model)
    block = make_blocks(13, rows=1, tokens=5)
    repeats = 1000
    copies = Blocks(block.tokens.expand(repeats, -1), block.targets.expand(repeats, -1), tuple(range(repeats)))
    with prepared(model, parameters):
        exact = exact_traces(model, parameters, block)
        found = fisher_traces(loss_of(model), parameters, copies, seed=0, labels=labels, draws=draws)
    assert found.scaled_traces is not None
    for values, truth in zip((found.traces, found.scaled_traces), exact, strict=True):
        error = values.std(ddof=1) / math.sqrt(repeats)
        assert error < 0.03 * truth
        assert abs(values.mean() - truth) < 4.5 * error


@pytest.mark.parametrize("labels", ["signs", "sampled"])
def test_batches_their_order_and_chunks_do_not_matter(labels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, blocks = tiny_model("gemma2"), make_blocks(320)
    together = estimate(model, blocks, labels=labels, draws=2)
    alone = [estimate(model, blocks.one(row), labels=labels, draws=2).traces[0] for row in range(3)]
    order = [2, 0, 1]
    shuffled = Blocks(blocks.tokens[order], blocks.targets[order], tuple(blocks.numbers[i] for i in order))
    np.testing.assert_allclose(together.traces, alone, rtol=1e-4)
    np.testing.assert_allclose(
        estimate(model, shuffled, labels=labels, draws=2).traces, together.traces[order], rtol=1e-4
    )
    for rows in (1, 4, 10):
        monkeypatch.setattr(loss, "CHUNK_VALUES", rows * 320)
        found = estimate(model, blocks, labels=labels, draws=2)
        np.testing.assert_allclose(found.traces, together.traces, rtol=1e-4)
        np.testing.assert_allclose(found.scaled_traces, together.scaled_traces, rtol=1e-4)


def test_other_seeds_and_draws_differ() -> None:
    model, blocks = tiny_model("llama"), make_blocks(320, rows=1)
    values = [estimate(model, blocks, draw=draw).traces[0] for draw in (0, 1, 0)]
    assert values[0] == values[2] != values[1]


def test_a_chosen_part_has_the_values_it_has_among_all() -> None:
    model, blocks = tiny_model("gpt2"), make_blocks(320)
    every = estimate(model, blocks)
    for pattern in ("*.mlp.*", "*.wte.*", "*.ln_f.*"):
        some = estimate(model, blocks, (pattern,))
        for name, values in some.by_parameter.items():
            np.testing.assert_allclose(values, every.by_parameter[name], rtol=1e-4)


def test_an_unused_parameter_has_trace_zero() -> None:
    model = tiny_model("llama")
    model.unused = nn.Parameter(torch.ones(3))
    found = estimate(model, make_blocks(320))
    assert not found.by_parameter["unused"].any()
    assert found.traces.all()


def test_a_parameter_used_in_an_unknown_way_is_looped() -> None:
    model, blocks = tiny_model("llama"), make_blocks(320)
    expected = estimate(model, blocks)
    norm = model.model.norm

    def forward(hidden: Tensor) -> Tensor:
        plain = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return torch.einsum("btd,d->btd", plain, norm.weight)

    norm.forward = forward
    found = estimate(model, blocks)
    assert found.looped == ("model.norm.weight",)
    np.testing.assert_allclose(found.traces, expected.traces, rtol=1e-4)
    np.testing.assert_allclose(
        found.by_parameter["model.norm.weight"], expected.by_parameter["model.norm.weight"], rtol=1e-3
    )


def test_a_model_that_mixes_up_rows_is_run_one_block_at_a_time() -> None:
    """Positions first: the shape (T, B, d) with T = B says nothing wrong, so that only the comparison can tell."""
    model, blocks = tiny_model("gpt2"), make_blocks(320, tokens=3)
    expected = [estimate(model, blocks.one(row)).traces[0] for row in range(3)]
    mlp = model.transformer.h[0].mlp
    inner = mlp.forward
    mlp.forward = lambda hidden: inner(hidden.transpose(0, 1).contiguous()).transpose(0, 1)
    found = estimate(model, blocks)
    assert fisher._SINGLE[model] is True
    np.testing.assert_allclose(found.traces, expected, rtol=1e-4)


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, blocks = tiny_model("gpt2"), make_blocks(320)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def clean() -> bool:
        hooks = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
        grads = any(parameter.grad is not None for parameter in model.parameters())
        return not hooks and not grads and not torch.overrides._get_current_function_mode_stack()

    estimate(model, blocks)
    assert clean()
    monkeypatch.setattr(fisher._Matrix, "norms", staticmethod(lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        estimate(model, blocks)
    assert clean()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_errors_say_what_to_do() -> None:
    model, blocks = tiny_model("gpt2"), make_blocks(320)
    parameters = select_parameters(model)
    with pytest.raises(ValueError, match="expected 'signs' or 'sampled'"):
        fisher_traces(loss_of(model), parameters, blocks, seed=0, labels="gold")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draws ≥ 1"):
        fisher_traces(loss_of(model), parameters, blocks, seed=0, draws=0)
    next(iter(parameters.values())).requires_grad_(False)
    with pytest.raises(ValueError, match="inside `prepared`"):
        fisher_traces(loss_of(model), parameters, blocks, seed=0)
