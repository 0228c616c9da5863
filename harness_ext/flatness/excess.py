"""By how much the Hessian of a widened model exceeds what its traces alone would have it: e of `harness_ext.flatness.widen`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness_ext.flatness.widen import FAMILIES, Sizes, attention_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["hessian_excess"]


def hessian_excess(model: PreTrainedModel, tokens: Tensor, loss: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return e, by which the Hessian's diagonal grows with every copy that differs to second order; see the module.

    One forward and backward pass of the small model, and about T²·d operations more for every head, channel and sequence. The
    model is used as it is: put it into eval mode, and into float32 or better.

    Args:
        model: Causal LM of one of `FAMILIES`.
        tokens: int64 (B, T), without padding.
        loss: From the logits (B, T, V) to a scalar; of the same data as the traces.

    Returns:
        From the names of parameters to e, of the parameter's shape. Those that are not named have none. e of a mean over
        batches is the mean of e.

    Raises:
        ValueError: If the model's family is not known.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type is {config.model_type!r}, expected one of {', '.join(FAMILIES)}")
    places = _places(model)
    with _recorded(model, places) as record, torch.enable_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
        value = loss(logits)
        read = [*(f"{name}:out" for name in places.norms), *(f"{name}:in" for name in places.writers)]
        *gradients, at_logits = torch.autograd.grad(value, [*(record[key] for key in read), logits], allow_unused=True)
    gradient = {
        key: torch.zeros_like(record[key]) if found is None else found
        for key, found in zip(read, gradients, strict=True)
    }
    with torch.no_grad():
        out = _stream_excess(model, places, record, gradient, tokens, at_logits)
    for index, (attention, mlp) in enumerate(zip(places.attentions, places.mlps, strict=True)):
        out |= _unit_excess(model, mlp, record, gradient)
        with torch.no_grad():
            out |= _softmax_excess(model, attention, index, record, gradient)
    return out


@dataclass(frozen=True)
class _Places:
    """Names of modules, in the order in which the stream meets them."""

    norms: tuple[str, ...]
    attentions: tuple[str, ...]
    mlps: tuple[str, ...]
    attention_inputs: tuple[str, ...]
    attention_output: str
    mlp_inputs: tuple[str, ...]
    mlp_output: str
    activation: str

    @property
    def writers(self) -> tuple[str, ...]:
        """What adds to the stream: attention and MLP of the first layer, of the second, …"""
        return tuple(
            name
            for attention, mlp in zip(self.attentions, self.mlps, strict=True)
            for name in (f"{attention}.{self.attention_output}", f"{mlp}.{self.mlp_output}")
        )

    @property
    def readers(self) -> tuple[str, ...]:
        """What reads the norms inside the layers."""
        return tuple(
            name
            for attention, mlp in zip(self.attentions, self.mlps, strict=True)
            for name in (
                *(f"{attention}.{part}" for part in self.attention_inputs),
                *(f"{mlp}.{part}" for part in self.mlp_inputs),
            )
        )


def _places(model: PreTrainedModel) -> _Places:
    layers = [
        f"{'transformer.h' if model.config.model_type == 'gpt2' else 'model.layers'}.{index}"
        for index in range(model.config.num_hidden_layers)
    ]
    if model.config.model_type == "gpt2":
        return _Places(
            norms=(*(f"{layer}.{norm}" for layer in layers for norm in ("ln_1", "ln_2")), "transformer.ln_f"),
            attentions=tuple(f"{layer}.attn" for layer in layers),
            mlps=tuple(f"{layer}.mlp" for layer in layers),
            attention_inputs=("c_attn",),
            attention_output="c_proj",
            mlp_inputs=("c_fc",),
            mlp_output="c_proj",
            activation="act",
        )
    norms = ("input_layernorm", "post_attention_layernorm")
    return _Places(
        norms=(*(f"{layer}.{norm}" for layer in layers for norm in norms), "model.norm"),
        attentions=tuple(f"{layer}.self_attn" for layer in layers),
        mlps=tuple(f"{layer}.mlp" for layer in layers),
        attention_inputs=("q_proj", "k_proj", "v_proj"),
        attention_output="o_proj",
        mlp_inputs=("gate_proj", "up_proj"),
        mlp_output="down_proj",
        activation="act_fn",
    )


@contextmanager
def _recorded(model: PreTrainedModel, places: _Places) -> Iterator[dict[str, Any]]:
    """Inputs and outputs of norms, readers and writers of the next forward pass, and the rotations of the attentions."""
    record: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            record[f"{name}:in"], record[f"{name}:out"] = inputs[0], output

        return hook

    def keep_rotation(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            record[f"{name}:rotation"] = keywords.get("position_embeddings")

        return hook

    def start(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Gradients reach every place even if no parameter asks for its own.
        return output.detach().requires_grad_()

    handles = [model.get_input_embeddings().register_forward_hook(start)]
    try:
        for name in (*places.norms, *places.readers, *places.writers):
            handles.append(model.get_submodule(name).register_forward_hook(keep(name)))
        for name in places.attentions:
            handles.append(model.get_submodule(name).register_forward_pre_hook(keep_rotation(name), with_kwargs=True))
        yield record
    finally:
        for handle in handles:
            handle.remove()


def _linear_diagonal(model: PreTrainedModel, name: str, by_output: Tensor, inputs: Tensor) -> dict[str, Tensor]:
    """Σ_τ by_output[τ, i]·inputs[τ, j]² for a weight, Σ_τ by_output[τ, i] for a bias; of the shape of the parameter."""
    module = model.get_submodule(name)
    weight = torch.einsum("bti,btj->ij", by_output, inputs**2)
    # GPT-2's Conv1D has its inputs first.
    out = {f"{name}.weight": weight.T if model.config.model_type == "gpt2" else weight}
    if getattr(module, "bias", None) is not None:
        out[f"{name}.bias"] = by_output.sum(dim=(0, 1))
    return out


def _stream_excess(
    model: PreTrainedModel,
    places: _Places,
    record: Mapping[str, Any],
    gradient: Mapping[str, Tensor],
    tokens: Tensor,
    at_logits: Tensor,
) -> dict[str, Tensor]:
    """Cases 1 and 2 of the module: what writes to the stream."""
    config, embedding = model.config, model.get_input_embeddings().weight
    epsilon = getattr(config, Sizes.of(config).name("norm_eps"))
    width = embedding.shape[1]
    sensitivities = []
    for name in places.norms:
        stream, output, norm = record[f"{name}:in"], record[f"{name}:out"], model.get_submodule(name)
        if config.model_type == "gpt2":
            variance, output = stream.var(dim=-1, unbiased=False), output - norm.bias
        else:
            variance = stream.square().mean(dim=-1)
        sensitivities.append(-0.5 * (gradient[f"{name}:out"] * output).sum(dim=-1) / (variance + epsilon))
    # later[n], (B, T): of the norms from n on.
    later = torch.stack(sensitivities).flip(0).cumsum(dim=0).flip(0)

    out: dict[str, Tensor] = {}
    for index, name in enumerate(places.writers, start=1):
        at_stream = (2 / width * later[index])[..., None].expand(*tokens.shape, width)
        out |= _linear_diagonal(model, name, at_stream, record[f"{name}:in"])
    at_stream = (2 / width * later[0])[..., None].expand(*tokens.shape, width)
    rows = torch.zeros_like(embedding).index_add(0, tokens.flatten(), at_stream.flatten(0, 1).to(embedding.dtype))
    if config.tie_word_embeddings:
        norm = model.get_submodule(places.norms[-1])
        own = at_logits.gather(-1, tokens[..., None])[..., 0] / (variance + epsilon).sqrt()
        own = torch.zeros_like(embedding[:, 0]).index_add(0, tokens.flatten(), own.flatten().to(embedding.dtype))
        rows += 2 * own[:, None] * norm.weight
    if config.model_type == "gpt2":
        out["transformer.wte.weight"] = rows
        positions = torch.zeros_like(model.transformer.wpe.weight)
        positions[: tokens.shape[1]] = at_stream.sum(dim=0)
        out["transformer.wpe.weight"] = positions
    else:
        out["model.embed_tokens.weight"] = rows
    return out


def _unit_excess(
    model: PreTrainedModel, mlp: str, record: Mapping[str, Any], gradient: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Case 3 of the module: the nonlinearity of MLP units."""
    places = _places(model)
    first, *gated = (f"{mlp}.{name}" for name in places.mlp_inputs)
    inside = record[f"{first}:out"].detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(
            model.get_submodule(f"{mlp}.{places.activation}")(inside).sum(), inside, create_graph=True
        )
        if not slope.requires_grad:  # piecewise linear
            curvature = torch.zeros_like(inside)
        else:
            (curvature,) = torch.autograd.grad(slope.sum(), inside)
    with torch.no_grad():
        by_unit = gradient[f"{mlp}.{places.mlp_output}:in"] * curvature
        for name in gated:
            by_unit = by_unit * record[f"{name}:out"]
        return _linear_diagonal(model, first, by_unit, record[f"{first}:in"])


def _softmax_excess(
    model: PreTrainedModel, attention: str, layer: int, record: Mapping[str, Any], gradient: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Case 4 of the module: the softmax of heads."""
    config, sizes, places = model.config, Sizes.of(model.config), _places(model)
    gpt2 = config.model_type == "gpt2"
    projected = [record[f"{attention}.{name}:out"] for name in places.attention_inputs]
    if gpt2:
        projected = list(projected[0].split(sizes.width, dim=2))
    # (B, heads, T, h)
    query, key, value = (states.unflatten(-1, (-1, sizes.head_size)).transpose(1, 2) for states in projected)
    at_output = gradient[f"{attention}.{places.attention_output}:in"]
    at_output = at_output.unflatten(-1, (-1, sizes.head_size)).transpose(1, 2)
    inputs = record[f"{attention}.{places.attention_inputs[0]}:in"]
    ones = torch.ones_like(inputs[..., :1])
    inputs = torch.cat((inputs, ones), dim=-1)  # the last column is the bias

    batch, length, columns = inputs.shape
    shared = sizes.heads // sizes.key_value_heads
    place = torch.arange(length, device=inputs.device)
    seen = place[:, None] >= place
    window = attention_window(config, layer)
    if window is not None:
        seen &= place[:, None] - place < window
    scaling = model.get_submodule(attention).scaling
    of_query = inputs.new_zeros(sizes.heads, sizes.head_size, columns)
    of_key = inputs.new_zeros(sizes.key_value_heads, sizes.head_size, columns)
    rotation = record[f"{attention}:rotation"]
    for row in range(batch):
        turn = None if rotation is None else tuple(part[row % len(part)] for part in rotation)
        squares = inputs[row] ** 2
        keys = _rotated(key[row], turn)
        queries = _rotated(query[row], turn)
        for head in range(sizes.heads):
            group = head // shared
            scores = (scaling * queries[head] @ keys[group].T).masked_fill(~seen, -math.inf)
            weights = scores.softmax(dim=-1)
            pull = weights * (at_output[row, head] @ value[row, group].T)
            total = pull.sum(dim=-1)
            # (T, T, h): the score of query t and key s by channel i of the projection before it is turned.
            by_query = scaling * _turned_back(keys[group].expand(length, -1, -1), turn, dim=0)
            curvature = _softmax_curvature(
                total[:, None],
                *(torch.einsum("ts,tsi->ti", by, by_query) for by in (weights, pull)),
                *(torch.einsum("ts,tsi->ti", by, by_query**2) for by in (weights, pull)),
            )
            of_query[head] += torch.einsum("ti,tj->ij", curvature, squares)
            by_key = scaling * _turned_back(queries[head, :, None].expand(-1, length, -1), turn, dim=1)
            curvature = _softmax_curvature(
                total[:, None, None],
                *(torch.einsum("tsi,sj->tij", by[..., None] * by_key, inputs[row]) for by in (weights, pull)),
                *(torch.einsum("tsi,sj->tij", by[..., None] * by_key**2, squares) for by in (weights, pull)),
            )
            of_key[group] += curvature.sum(dim=0)
    flat = [of_query.flatten(0, 1), of_key.flatten(0, 1)]
    if gpt2:
        parts = {f"{attention}.c_attn": torch.cat((*flat, torch.zeros_like(flat[0])))}
    else:
        parts = {f"{attention}.q_proj": flat[0], f"{attention}.k_proj": flat[1]}
    out = {}
    for name, both in parts.items():
        out[f"{name}.weight"] = both[:, :-1].T if gpt2 else both[:, :-1]
        if getattr(model.get_submodule(name), "bias", None) is not None:
            out[f"{name}.bias"] = both[:, -1]
    return out


def _softmax_curvature(total: Tensor, mean: Tensor, pulled: Tensor, square: Tensor, pulled_square: Tensor) -> Tensor:
    """Σ_s G_s p_s [(κ_s − κ̄)² − var κ] from Σ G p, Σ p κ, Σ G p κ, Σ p κ² and Σ G p κ²."""
    return pulled_square - 2 * mean * pulled + mean**2 * total - total * (square - mean**2)


def _half_turned(states: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotated(states: Tensor, turn: tuple[Tensor, ...] | None) -> Tensor:
    """States (heads, T, h) turned by their positions."""
    if turn is None:
        return states
    cos, sin = turn
    return states * cos + _half_turned(states) * sin


def _turned_back(states: Tensor, turn: tuple[Tensor, ...] | None, *, dim: int) -> Tensor:
    """States (T, T, h) through the transpose of the rotation at the position that axis `dim` counts."""
    if turn is None:
        return states
    cos, sin = (part.unsqueeze(1 - dim) for part in turn)
    return states * cos - _half_turned(states * sin)
