"""Exact second derivatives of the pretraining loss: slow, plain references for what the estimators do fast.

Fused attention has no second derivative in PyTorch, on the CPU either: use these functions inside `second_derivatives`, and
that inside `prepared`. All are means over the blocks of a batch, and work block by block, so that the graph of one block is
all that exists at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness_ext.flatness.loss import Blocks, PretrainingLoss
from harness_ext.flatness.signs import generator_of, random_signs
from harness_ext.flatness.weights import Weights

__all__ = [
    "MAX_PARAMETERS",
    "fisher_diagonal",
    "forward_over_reverse",
    "hessian_diagonal",
    "hessian_matrix",
    "hessian_vector_product",
    "second_derivatives",
]

MAX_PARAMETERS = 5_000
"""Where brute force stops: its matrix takes 100 MB, and its time grows with the square too."""

PLAIN_ATTENTION = frozenset({None, "eager", "sdpa"})
"""Implementations made of PyTorch's own operations. Others (flash attention, flex attention, kernels of the Hub) are fused."""

ROWS = 256
"""Rows of a matrix computed at once by brute force."""

AGREEMENT = 0.05
"""Largest relative difference from gradient differences at which operations that PyTorch does not know are believed."""


@contextlib.contextmanager
def second_derivatives(model: nn.Module) -> Iterator[str]:
    """Let the model compute its attention in a way that can be differentiated twice, and undo that on leaving.

    PyTorch's `scaled_dot_product_attention` is held to its unfused kernel, which needs no change of the model. A model with
    another fused attention is switched to `sdpa`, or to `eager` if it has no `sdpa`. That all of the model has second
    derivatives is then tried on a few tokens. Operations that are not PyTorch's own may leave terms out in silence; where
    there are such, the trial is compared with differences of gradients.

    Args:
        model: A transformers causal LM, or a PEFT model around one, made ready by `prepared`.

    Yields:
        What computes attention inside, for the results: `sdpa (math)`, `eager`, or both where parts of the model differ.

    Raises:
        ValueError: If no parameter of the model requires a gradient.
        TypeError: If the model has no second derivatives, or wrong ones.
    """
    configs = _configs(model)
    before = [(config, config._attn_implementation) for config in configs]
    try:
        if any(implementation not in PLAIN_ATTENTION for _, implementation in before):
            _switch_attention(model)
        with sdpa_kernel(SDPBackend.MATH):
            _try_second_derivatives(model)
            # In the order of the modules, each name once.
            used = dict.fromkeys(config._attn_implementation or "eager" for config in configs)
            yield ", ".join("sdpa (math)" if name == "sdpa" else name for name in used)
    finally:
        for config, implementation in before:
            # The property would write to the parts of a composite configuration too, which may have had another value.
            config._attn_implementation_internal = implementation


def hessian_vector_product(
    loss: PretrainingLoss, parameters: Mapping[str, nn.Parameter], blocks: Blocks, vectors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return H v for the Hessian H of L, by differentiating ⟨∇L, v⟩ (Pearlmutter 1994).

    Args:
        loss: L.
        parameters: What H is with respect to, by name; each requires a gradient.
        blocks: The batch; H is the mean over its blocks.
        vectors: v by the same names; of the shape, dtype and device of each parameter.

    Returns:
        H v by name; zeros for a parameter that the loss does not depend on.

    Raises:
        ValueError: If names or shapes of v are not those of the parameters.
    """
    _check_vectors(parameters, vectors)

    def product(block: Blocks) -> tuple[Tensor, ...]:
        weights = tuple(parameters.values())
        gradients = _gradients(loss.mean_loss(block), weights, create_graph=True)
        slope = sum((g * vectors[name]).sum() for g, name in zip(gradients, parameters, strict=True))
        return _gradients(slope, weights)

    return _mean(product, parameters, blocks)


def forward_over_reverse(
    loss: PretrainingLoss, parameters: Mapping[str, nn.Parameter], blocks: Blocks, vectors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return H v as `hessian_vector_product` does, by a derivative of the gradient along v in forward mode.

    It shares no code with double backward from ∇L on, which makes it a second opinion.

    Raises:
        ValueError: As `hessian_vector_product`.
        TypeError: If a part of the model cannot be differentiated in forward mode (Bloom's own GELU, for one).
    """
    _check_vectors(parameters, vectors)
    # functional_call hands its weights to every name that a tied parameter has.
    function = _LossModule(loss)
    values = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    tangents = {f"model.{name}": vectors[name] for name in parameters}

    def product(block: Blocks) -> tuple[Tensor, ...]:
        def value(weights: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(function, weights, (block,), tie_weights=True)

        try:
            _, along = torch.func.jvp(torch.func.grad(value), (values,), (tangents,))
        except (RuntimeError, NotImplementedError) as error:
            raise TypeError(
                f"{type(loss.model).__name__} cannot be differentiated in forward mode: {_first_line(error)} "
                "Use hessian_vector_product instead."
            ) from error
        return tuple(along[f"model.{name}"] for name in parameters)

    return _mean(product, parameters, blocks)


def hessian_matrix(loss: PretrainingLoss, parameters: Mapping[str, nn.Parameter], blocks: Blocks) -> Tensor:
    """Return H itself, of shape (N, N) for N parameters in the order of `parameters`, each flattened.

    Raises:
        ValueError: If N is above `MAX_PARAMETERS`.
    """
    count = _check_count(parameters)
    weights = tuple(parameters.values())
    total = torch.zeros(count, count, dtype=weights[0].dtype, device=weights[0].device)
    for row in range(len(blocks.tokens)):
        gradients = _gradients(loss.mean_loss(blocks.one(row)), weights, create_graph=True)
        for start, rows in _jacobian(torch.cat([g.flatten() for g in gradients]), weights):
            total[start : start + len(rows)] += rows
    return total / len(blocks.tokens)


def hessian_diagonal(
    loss: PretrainingLoss, parameters: Mapping[str, nn.Parameter], blocks: Blocks
) -> dict[str, Tensor]:
    """Return the diagonal of H by name and in the shape of each parameter, by brute force.

    Raises:
        ValueError: If there are more than `MAX_PARAMETERS` parameters.
    """
    return _unflatten(hessian_matrix(loss, parameters, blocks).diagonal(), parameters)


def fisher_diagonal(loss: PretrainingLoss, parameters: Mapping[str, nn.Parameter], blocks: Blocks) -> dict[str, Tensor]:
    """Return the diagonal of the Fisher matrix of L by brute force, with the exact sum over the vocabulary.

    F = (1/T) Σ_t Σ_w p_θ(w | x_≤t) ∇ log p_θ(w | x_≤t) ∇ᵀ log p_θ(w | x_≤t), which is the Gauss–Newton part of the Hessian of
    L (Martens 2020, §9): like H it is that of the mean over tokens, and the targets do not enter.

    Returns:
        The diagonal by name, in the shape of each parameter, none of it negative.

    Raises:
        ValueError: If there are more than `MAX_PARAMETERS` parameters.
    """
    count = _check_count(parameters)
    weights = tuple(parameters.values())
    total = torch.zeros(count, dtype=weights[0].dtype, device=weights[0].device)
    for row in range(len(blocks.tokens)):
        block = blocks.one(row)
        logits = loss.logits(loss.states(block.tokens).flatten(0, 1))
        for of_token in logits:
            log_probabilities = of_token.log_softmax(-1)
            for start, rows in _jacobian(log_probabilities, weights):
                probabilities = log_probabilities[start : start + len(rows)].detach().exp().to(total)
                total += probabilities @ rows.square()
    return _unflatten(total / blocks.targets.numel(), parameters)


class _LossModule(nn.Module):
    """L as a module with the model inside, which is what functional_call wants."""

    def __init__(self, loss: PretrainingLoss) -> None:
        super().__init__()
        self.model = loss.model
        self.value = loss.mean_loss

    def forward(self, blocks: Blocks) -> Tensor:
        return self.value(blocks)


def _gradients(value: Any, weights: tuple[Tensor, ...], *, create_graph: bool = False) -> tuple[Tensor, ...]:
    """Gradients of a scalar, zeros where it does not depend on a weight."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return tuple(torch.zeros_like(weight) for weight in weights)
    return torch.autograd.grad(value, weights, create_graph=create_graph, materialize_grads=True)


def _jacobian(values: Tensor, weights: tuple[Tensor, ...]) -> Iterator[tuple[int, Tensor]]:
    """The derivatives of a vector of M values as pieces (first row, (rows, N)) of the (M, N) matrix."""
    for start in range(0, len(values), ROWS):
        some = values[start : start + ROWS]
        if not some.requires_grad:
            yield start, values.new_zeros(len(some), sum(weight.numel() for weight in weights))
            continue
        rows = torch.autograd.grad(
            some,
            weights,
            grad_outputs=torch.eye(len(some), dtype=some.dtype, device=some.device),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        parts = [
            some.new_zeros(len(some), weight.numel()) if part is None else part.flatten(1)
            for part, weight in zip(rows, weights, strict=True)
        ]
        yield start, torch.cat(parts, dim=1)


def _mean(
    product: Callable[[Blocks], tuple[Tensor, ...]], parameters: Mapping[str, nn.Parameter], blocks: Blocks
) -> dict[str, Tensor]:
    """The mean of a product over the blocks of a batch, by parameter."""
    total = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for row in range(len(blocks.tokens)):
        for name, part in zip(total, product(blocks.one(row)), strict=True):
            total[name] += part / len(blocks.tokens)
    return total


def _unflatten(values: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    parts = values.split([parameter.numel() for parameter in parameters.values()])
    return {name: part.view_as(parameters[name]) for name, part in zip(parameters, parts, strict=True)}


def _check_vectors(parameters: Mapping[str, nn.Parameter], vectors: Mapping[str, Tensor]) -> None:
    if parameters.keys() != vectors.keys():
        raise ValueError(
            "vectors must have exactly the names of the parameters; these are in one of them only: "
            f"{sorted(parameters.keys() ^ vectors.keys())[:5]}."
        )
    for name, parameter in parameters.items():
        if vectors[name].shape != parameter.shape:
            raise ValueError(
                f"vectors[{name!r}] has shape {tuple(vectors[name].shape)}; expected that of the parameter, "
                f"{tuple(parameter.shape)}."
            )


def _check_count(parameters: Mapping[str, nn.Parameter]) -> int:
    count = sum(parameter.numel() for parameter in parameters.values())
    if count > MAX_PARAMETERS:
        raise ValueError(
            f"The exact matrix of {count:,} parameters would need as many gradients; brute force stops at {MAX_PARAMETERS:,}. "
            "Choose fewer parameters (the flatness options include and exclude), or use the estimators."
        )
    return count


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration that says how attention is computed, those of parts of a composite model too."""
    found: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop(0)
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation"):
            continue
        found[id(config)] = config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(found.values())


def _switch_attention(model: nn.Module) -> None:
    """Set sdpa, or eager where the model has no sdpa; whether that took effect is for the trial to find out."""
    whole = next((module for module in model.modules() if hasattr(module, "set_attn_implementation")), None)
    if whole is None:
        return
    try:
        whole.set_attn_implementation("sdpa")
    except (ValueError, ImportError):
        whole.set_attn_implementation("eager")


def _try_second_derivatives(model: nn.Module) -> None:
    """Differentiate the loss of a few tokens twice; see `second_derivatives` for what is raised."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ValueError(
            f"No parameter of {type(model).__name__} requires a gradient. Enter `prepared(model, parameters)` before."
        )
    loss = PretrainingLoss(model, device=model.get_input_embeddings().weight.device)  # type: ignore[operator]
    text = torch.arange(2, 11) % int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    block = Blocks(text[:-1].unsqueeze(0), text[1:].unsqueeze(0), (0,))
    way_out = (
        "Load it with attn_implementation=eager, or on the CPU, where transformers runs such kernels in PyTorch; estimates by "
        "differences of the loss need no second derivatives."
    )

    def signs(purpose: str, name: str, parameter: Tensor) -> Tensor:
        return random_signs(parameter.shape, generator_of(0, 0, f"{purpose} {name}")).to(parameter)

    try:
        value = loss.mean_loss(block)
        foreign = _foreign_operations(value)
        gradients = _gradients(value, tuple(parameters.values()), create_graph=True)
        slope = sum((g * signs("direction", name, g)).sum() for g, name in zip(gradients, parameters, strict=True))
        exact = _gradients(slope, tuple(parameters.values()))
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise TypeError(f"{type(model).__name__} has no second derivatives: {_first_line(error)} {way_out}") from error
    if not foreign:
        return

    def sketch(vectors: tuple[Tensor, ...]) -> Tensor:
        """One random projection of each parameter's part: enough to compare, without two vectors in memory."""
        parts = [(v * signs("sketch", name, v)).sum() for v, name in zip(vectors, parameters, strict=True)]
        return torch.stack([part.detach().double().cpu() for part in parts])

    wanted = sketch(exact)
    del value, gradients, slope, exact
    step = 3e-4  # the weights' rounding and the third derivative are equally far from mattering
    with Weights(parameters) as weights:
        sketches = []
        for scale in (step, -step):
            weights.perturb(lambda name, parameter: signs("direction", name, parameter), scale)
            sketches.append(sketch(_gradients(loss.mean_loss(block), tuple(parameters.values()))))
    measured = (sketches[0] - sketches[1]) / (2 * step)
    difference = float((wanted - measured).norm() / measured.norm().clamp_min(torch.finfo(torch.float32).tiny))
    if not difference <= AGREEMENT:
        raise TypeError(
            f"{type(model).__name__} computes wrong second derivatives: a product with its Hessian is off by "
            f"{difference:.0%} of what differences of gradients give ({AGREEMENT:.0%} is allowed). Its operations "
            f"{', '.join(foreign)} are not PyTorch's own and leave terms out. {way_out}"
        )


def _foreign_operations(value: Tensor) -> list[str]:
    """Names of the operations in a graph whose derivatives are not PyTorch's own."""
    names: set[str] = set()
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) or "CppNode" in node.name():
            names.add(node.name().removesuffix("Backward"))
        waiting += [parent for parent, _ in node.next_functions]
    return sorted(names)


def _first_line(error: BaseException) -> str:
    line = (str(error) or type(error).__name__).strip().splitlines()[0].strip()
    return line if line.endswith((".", "!", "?")) else f"{line}."
