"""Embed a small causal LM in a larger architecture without changing its function, and predict what that does to the traces.

Liu, Xie, Li and Ma (ICML 2023) compare the flatness of models of different sizes by viewing the small one as a large
one: linear weights are tiled and divided by the ratio of widths, biases and norms are tiled, new layers are zero.
`widen` does so for GPT-2, Llama, Mistral and Qwen2; `predict_traces` says what becomes of the Hessian and Fisher
traces of each parameter, and `hessian_excess` computes the one quantity of the small model, besides its traces, that
the Hessian needs.

**The embedding.** With d, m, H, G, h the small model's width, MLP width, heads, key-value heads and head size, primes
for the large one, k = d'/d, r = ⌊m'/m⌋, a = H'/H, γ = G'/G and t = h'/h, all whole numbers but m'/m:

- The residual stream of the large model is that of the small one k times: X = (x, …, x). Its mean, mean square and
  variance are those of x, so LayerNorm and RMSNorm do to every copy what they did to x, ε included; a stream scaled
  by s would need ε·s². Gains and biases of norms are tiled, and so are what writes to the stream: position
  embeddings, token embeddings, the outputs of attention and MLP and their biases.
- What reads tiled inputs is divided by the number of copies, over which it sums.
- The output embedding reads k copies: Φ' = (Φ, …, Φ)/k. Tied to the token embedding it cannot be divided, so the gain
  and bias of the last norm are divided by k in its place.
- MLP units are copied r times, with 1/r of their output each; m' − rm units are left zero, in and out.
- Heads are copied a times, with 1/a of their output each. A key-value head is copied γ times and its a·H/G query
  heads are dealt out to the copies in turn.
- Heads t times larger: values are tiled, and the output divided by t. Without rotary positions queries and keys are
  tiled too, and as qᵀk grows by t where 1/√h' makes up for √t, both are multiplied by t^(−1/4) (by t^(−1/2) where
  attention is not scaled). With rotary positions tiles would turn by other angles: pair i of a head of size h turns
  by θ^(−2i/h), which is what pair t·i of a head of size t·h turns by. So pair i goes to pair t·i, the others are
  zero, and both are multiplied by t^(1/4).
- New layers come last. All their weights and biases are zero and their gains one: they add nothing to the stream, and
  nothing but what is said below to the traces.

**What it does to the traces.** A scalar w of the small model has c copies of s·w each (s as above; for a d_out × d_in
matrix tiled k_out × k_in, c = k_out·k_in and s = 1/k_in). The copies perturb independently; permuting them maps the
widened model to itself and leaves every output alone, so that each copy has the same derivative of the outputs,
1/(c·s) of that by w. Hence for the GGN, the Fisher matrix, or any other average of products of gradients, entry by
entry

    diag G'  =  diag G / (c·s)²,        trace of the copies  =  G_ww / (c·s²),        Σ w'² G'  =  w² G_ww / c.

For the Hessian it is not so simple. The sum over all pairs of copies, s² Σ_ab H'_ab = H_ww, is all that the function
fixes, and H'_aa is larger or smaller than H'_ab wherever the copies a and b meet curvature before they are averaged.
Let μ be the number of copies that differ so; then with an excess e, which is a property of w in the small model and
does not depend on the sizes of the large one,

    diag H'  =  (diag H + (μ − 1)·e) / (c·s)².

| parameter | trace of the block, times | Σ w² H_ii, times | μ | e |
| --- | --- | --- | --- | --- |
| linear d_out × d_in, tiled k_out × k_in | k_in/k_out | 1/(k_out·k_in) | by its place, below | |
| bias, tiled k_out | 1/k_out | 1/k_out | by its place, below | |
| norm gain and bias | 1/k | 1/k | 1 | – |
| last norm of a tied model (divided by k) | k | 1/k | 1 | – |
| output embedding, not tied | k | 1/k | 1 | – |
| token and position embedding | 1/k | 1/k | k | (1) |
| token embedding, tied | 1/k | 1/k | k | (1) + (2) |
| attention and MLP outputs (written to the stream) | k_in/k | 1/(k·k_in) | k | (1) |
| MLP input or gate, k_in = k, k_out = r | k/r | 1/(k·r) | r | (3) |
| MLP up projection of a gated MLP | k/r | 1/(k·r) | 1 | – |
| values, k_out = γ·t | k/(γ·t) | 1/(k·γ·t) | 1 | – |
| queries, k_out = a·t (with rotary positions a) | k/(k_out·p²) | 1/(k·k_out) | a | (4) |
| keys, k_out = γ·t (with rotary positions γ) | k/(k_out·p²) | 1/(k·k_out) | γ | (4) |

Here k_in of the outputs is a·t in attention and r in the MLP, and p is the power of t above, 1 for t = 1, by whose
square the biases of queries and keys are divided too. The factors are exact for the Fisher matrix and the GGN
throughout, and for the Hessian where μ = 1: norms, the output embedding of an untied model, up projections, values,
and, where heads are not multiplied, queries and keys; where m' < 2m, or where it is piecewise linear, the MLP input.
Everywhere else the traces of the small model do not determine that of the large one; traces and excess do. With g =
∂L/∂· and sums over all tokens τ of the data:

1. One copy of the stream alone is perturbed. Every linear reader averages the copies, so the difference of two copies
   is felt only in the mean square of the later norms: e = (2/d) Σ_τ y_τ² Σ_n ∂L/∂v_nτ for a weight whose input is y
   (1 for a bias or an embedding that is looked up at τ), v_nτ the variance (RMSNorm: mean square) in each norm n
   after it, so that ∂L/∂v = −½ ⟨g_out, γ ⊙ x̂⟩/(v + ε).
2. The difference of two copies of a tied row passes from the input straight to its own logit: e = 2 γ_j Σ_τ
   (∂L/∂logit_τ,w)/σ_τ over the places τ where the input is the token w; γ and σ are those of the last norm.
3. The copies of a unit are apart in its nonlinearity: e = Σ_τ g_τ·φ''(z_τ)·x_τ², g by φ(z); times the up projection
   in a gated MLP.
4. The copies of a head are apart in its softmax: e = ∂²/∂w² ⟨g, o(w)⟩, o the outputs of the heads with g and all else
   held: Σ_τ Σ_s G_τs p_τs [(κ_s − κ̄)² − Σ p(κ − κ̄)²] with κ = ∂score/∂w, G_τs = g_τᵀv_s, and p the attention.

Zero units, zero pairs and new layers have zero diagonals, in the Fisher matrix as in the Hessian, as each of their
weights meets a zero on its way; but for biases of new layers that are written to the stream. These stand where the
output bias of the last layer's MLP stands, and have its block. Where H'/G' is no multiple of H/G, copies of a key-value
head serve different query heads, and nothing is said about keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "FAMILIES",
    "Axis",
    "PredictedTraces",
    "Rule",
    "Sizes",
    "attention_window",
    "plan",
    "predict_traces",
    "widen",
]

FAMILIES = ("gpt2", "llama", "mistral", "qwen2")
"""Values of `model_type` that can be widened."""

_ROPE_BY_FREQUENCY = ("default", "linear", "llama3")
"""Kinds of rotary positions in which a pair's angle depends on its own frequency θ^(−2i/h) alone."""

_PIECEWISE_LINEAR = ("relu", "leaky_relu")


@dataclass(frozen=True)
class Axis:
    """How one axis of a parameter is widened.

    Attributes:
        source: int64 (n_large,): for each index of the large model that of the small one, −1 for zeros.
        scale: float64 (n_large,): the factor of the copies; 0 where the source is −1.
        apart: int64 (n_large,): μ, how many of the copies differ to second order (see the module).
        uneven: Why the copies differ to first order already, or None where they do not.
    """

    source: Tensor
    scale: Tensor
    apart: Tensor
    uneven: str | None = None

    def copies(self) -> Tensor:
        """c: float64 (n_small,), how many copies each index of the small model has."""
        return torch.bincount(self.source[self.source >= 0]).double()

    def of_source(self, values: Tensor) -> Tensor:
        """Values (n_large,), equal for all copies, as (n_small,)."""
        kept = self.source >= 0
        out = values.new_zeros(int(self.source.max()) + 1)
        out[self.source[kept]] = values[kept]
        return out


@dataclass(frozen=True)
class Rule:
    """Where a parameter of the large model comes from.

    Attributes:
        source: Name of the small model's parameter, or None for those of new layers.
        axes: One for each axis of the parameter; empty where `source` is None.
        fill: Value of all entries where `source` is None.
        same_block_as: Name of the large model's parameter with the same Hessian block; where `source` is None.
        unknown: Why the trace cannot be predicted; None where it can.
    """

    source: str | None
    axes: tuple[Axis, ...] = ()
    fill: float = 0.0
    same_block_as: str | None = None
    unknown: str | None = None


@dataclass(frozen=True)
class PredictedTraces:
    """Traces of the blocks of a widened model.

    Attributes:
        traces: From the name of the large model's parameter to the trace of its block.
        missing: From the names of all others to the reason.
    """

    traces: dict[str, float]
    missing: dict[str, str]

    @property
    def total(self) -> float:
        """The trace of the whole matrix.

        Raises:
            ValueError: If a block is missing.
        """
        if self.missing:
            name, reason = next(iter(self.missing.items()))
            raise ValueError(
                f"the total is not known: {len(self.missing)} of its parts are missing, such as {name}: {reason}"
            )
        return math.fsum(self.traces.values())


def _axis(source: Tensor, *, scale: float = 1.0, apart: int = 1, uneven: str | None = None) -> Axis:
    return Axis(
        source=source,
        scale=torch.where(source >= 0, torch.tensor(scale, dtype=torch.float64), 0.0),
        apart=torch.full_like(source, apart),
        uneven=uneven,
    )


def _concatenated(axes: Sequence[Axis], sizes: Sequence[int]) -> Axis:
    """The axis of parameters that lie one after the other in one; `sizes` are those in the small model."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return Axis(
        source=torch.cat(
            [torch.where(axis.source >= 0, axis.source + start, -1) for axis, start in zip(axes, starts, strict=True)]
        ),
        scale=torch.cat([axis.scale for axis in axes]),
        apart=torch.cat([axis.apart for axis in axes]),
        uneven=next((axis.uneven for axis in axes if axis.uneven), None),
    )


_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}
_LLAMA_NAMES = {"norm_eps": "rms_norm_eps"}


@dataclass(frozen=True)
class Sizes:
    """What the plan needs of a config, and the names that the config has for it."""

    names: Mapping[str, str]
    width: int
    units: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Sizes:
        if config.model_type == "gpt2":
            return cls(
                names=_GPT2_NAMES,
                width=config.n_embd,
                units=config.n_inner if config.n_inner is not None else 4 * config.n_embd,
                layers=config.n_layer,
                heads=config.n_head,
                key_value_heads=config.n_head,
                head_size=config.n_embd // config.n_head,
            )
        return cls(
            names=_LLAMA_NAMES,
            width=config.hidden_size,
            units=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            key_value_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )

    def name(self, field: str) -> str:
        return self.names.get(field, field)


# Fields that change the function and cannot be made up for.
_MUST_AGREE = {
    "gpt2": (
        "vocab_size",
        "max_position_embeddings",
        "hidden_act",
        "norm_eps",
        "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx",
    ),
    "llama": ("vocab_size", "max_position_embeddings", "hidden_act", "norm_eps", "attention_bias", "mlp_bias"),
    "mistral": ("vocab_size", "max_position_embeddings", "hidden_act", "norm_eps", "sliding_window"),
    "qwen2": ("vocab_size", "max_position_embeddings", "hidden_act", "norm_eps"),
}


def _same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)  # some configs have 1e-5 as float32 has it
    return a == b


def _multiple_of(value: int, at_least: int) -> int:
    """The multiple of `value` that is nearest to `at_least` and not below `value`."""
    return value * max(1, round(at_least / value))


def _objections(small: PretrainedConfig, large: PretrainedConfig) -> Iterator[str]:
    """Why the function cannot be kept, each with the field and the value that would do."""
    if small.model_type not in FAMILIES:
        yield f"model_type of the small model is {small.model_type!r}, expected one of {', '.join(FAMILIES)}"
        return
    if large.model_type != small.model_type:
        yield f"model_type is {large.model_type!r}, expected {small.model_type!r}, that of the small model"
        return
    a, b = Sizes.of(small), Sizes.of(large)
    for field in _MUST_AGREE[small.model_type]:
        name = b.name(field)
        if not _same(getattr(small, name), getattr(large, name)):
            yield f"{name} is {getattr(large, name)!r}, expected {getattr(small, name)!r}, that of the small model"
    if small.model_type == "gpt2":
        for config, which in ((small, "of the small model "), (large, "")):
            if config.add_cross_attention:
                yield f"add_cross_attention {which}is True, expected False: a causal LM has nothing to attend to there"
    else:
        yield from _rope_objections(small, large, larger_heads=b.head_size != a.head_size)
    if small.model_type == "qwen2":
        windows = [
            [attention_window(config, layer) for layer in range(min(a.layers, b.layers))] for config in (small, large)
        ]
        if windows[0] != windows[1]:
            yield (
                f"layer_types and sliding_window give the layers the windows {windows[1]}, expected {windows[0]}, those of "
                "the small model"
            )
    if large.tie_word_embeddings and not small.tie_word_embeddings:
        yield "tie_word_embeddings is True, expected False: the two embeddings of the small model differ"

    for field, have, want in (
        ("hidden_size", b.width, a.width),
        ("num_attention_heads", b.heads, a.heads),
        ("num_key_value_heads", b.key_value_heads, a.key_value_heads),
    ):
        if field == "num_key_value_heads" and small.model_type == "gpt2":
            continue
        if have % want:
            yield (
                f"{b.name(field)} is {have}, expected a multiple of the small model's {want}, such as "
                f"{_multiple_of(want, have)}"
            )
    if b.head_size % a.head_size:
        if small.model_type == "gpt2" or getattr(large, "head_dim", None) is None:
            fix = (
                f"{b.name('num_attention_heads')} = {b.width // a.head_size} would do"
                if b.width % a.head_size == 0 and (b.width // a.head_size) % a.heads == 0
                else f"{b.name('hidden_size')} must be a multiple of {a.width} first"
            )
            yield (
                f"{b.name('hidden_size')} / {b.name('num_attention_heads')}, the size of a head, is {b.head_size}, expected a "
                f"multiple of the small model's {a.head_size}; {fix}"
            )
        else:
            yield (
                f"head_dim is {b.head_size}, expected a multiple of the small model's {a.head_size}, such as "
                f"{_multiple_of(a.head_size, b.head_size)}"
            )
    for field, have, want in (("intermediate_size", b.units, a.units), ("num_hidden_layers", b.layers, a.layers)):
        if have < want:
            yield f"{b.name(field)} is {have}, expected at least the small model's {want}"


def _rope_objections(small: PretrainedConfig, large: PretrainedConfig, *, larger_heads: bool) -> Iterator[str]:
    ropes = [
        {key: value for key, value in (config.rope_parameters or {}).items() if value is not None}
        for config in (small, large)
    ]
    if ropes[0] != ropes[1]:
        yield f"rope_parameters is {ropes[1]}, expected {ropes[0]}, those of the small model"
    kind = ropes[0].get("rope_type", "default")
    if larger_heads and (kind not in _ROPE_BY_FREQUENCY or ropes[0].get("partial_rotary_factor", 1.0) != 1.0):
        heads = Sizes.of(small).head_size
        yield (
            f"head_dim is {Sizes.of(large).head_size}, expected {heads}, that of the small model: with rope_type {kind!r} the "
            f"angles of a head depend on its size (heads can grow with {', '.join(_ROPE_BY_FREQUENCY)})"
        )


def attention_window(config: PretrainedConfig, layer: int) -> int | None:
    """How many tokens, itself among them, a token of this layer attends to; None for all before it."""
    if config.model_type == "qwen2":
        return config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
    return getattr(config, "sliding_window", None)


def plan(small: PretrainedConfig, large: PretrainedConfig) -> dict[str, Rule]:
    """Return where each parameter of the large model comes from.

    Args:
        small: Configuration of the model to widen.
        large: That of the architecture to widen it to; of the same family.

    Returns:
        From the names of the large model's parameters, tied ones once, as `named_parameters` has them.

    Raises:
        ValueError: If the function could not be kept. The message has every field in the way and a value that would do.
    """
    objections = list(_objections(small, large))
    if objections:
        raise ValueError("the large architecture cannot hold the small model: " + "; ".join(objections))
    a, b = Sizes.of(small), Sizes.of(large)
    k = b.width // a.width
    stream = torch.arange(b.width) % a.width
    written, gain, read = _axis(stream, apart=k), _axis(stream), _axis(stream, scale=1 / k)
    last_gain = read if large.tie_word_embeddings else gain
    words = _axis(torch.arange(small.vocab_size))

    ratio = b.units // a.units
    units = torch.arange(b.units)
    units = torch.where(units < ratio * a.units, units % a.units, -1)
    curved = 1 if getattr(small, a.name("hidden_act")) in _PIECEWISE_LINEAR else ratio
    unit, linear_unit, unit_out = _axis(units, apart=curved), _axis(units), _axis(units, scale=1 / ratio)
    query, key, value, head_out = _heads(small, a, b)

    layer: dict[str, tuple[Axis, ...]]
    if small.model_type == "gpt2":
        norms: tuple[str, ...] = ("ln_1", "ln_2")
        fused = _concatenated((query, key, value), (a.width,) * 3)
        layer = {
            "attn.c_attn.weight": (read, fused),
            "attn.c_attn.bias": (fused,),
            "attn.c_proj.weight": (head_out, written),
            "attn.c_proj.bias": (written,),
            "mlp.c_fc.weight": (read, unit),
            "mlp.c_fc.bias": (unit,),
            "mlp.c_proj.weight": (unit_out, written),
            "mlp.c_proj.bias": (written,),
            **{f"{norm}.{part}": (gain,) for norm in norms for part in ("weight", "bias")},
        }
        rules = {
            "transformer.wte.weight": Rule("transformer.wte.weight", (words, written)),
            "transformer.wpe.weight": Rule(
                "transformer.wpe.weight", (_axis(torch.arange(small.max_position_embeddings)), written)
            ),
            **{
                f"transformer.ln_f.{part}": Rule(f"transformer.ln_f.{part}", (last_gain,))
                for part in ("weight", "bias")
            },
        }
        layers, outputs, embedding = "transformer.h", ["attn.c_proj.bias", "mlp.c_proj.bias"], "transformer.wte.weight"
    else:
        norms = ("input_layernorm", "post_attention_layernorm")
        projections = {
            "self_attn.q_proj": (query, read),
            "self_attn.k_proj": (key, read),
            "self_attn.v_proj": (value, read),
            "self_attn.o_proj": (written, head_out),
            "mlp.gate_proj": (unit, read),
            "mlp.up_proj": (linear_unit, read),
            "mlp.down_proj": (written, unit_out),
        }
        biased = _biased(small)
        layer = {
            **{f"{name}.weight": axes for name, axes in projections.items()},
            **{f"{name}.bias": axes[:1] for name, axes in projections.items() if name in biased},
            **{f"{norm}.weight": (gain,) for norm in norms},
        }
        rules = {
            "model.embed_tokens.weight": Rule("model.embed_tokens.weight", (words, written)),
            "model.norm.weight": Rule("model.norm.weight", (last_gain,)),
        }
        layers, embedding = "model.layers", "model.embed_tokens.weight"
        outputs = [name for name in ("self_attn.o_proj.bias", "mlp.down_proj.bias") if name in layer]
    if not large.tie_word_embeddings:
        if small.tie_word_embeddings:
            unknown = "the small model ties its embeddings, and the trace of the sum does not tell those of its parts"
            rules[embedding] = Rule(embedding, rules[embedding].axes, unknown=unknown)
            rules["lm_head.weight"] = Rule(embedding, (words, read), unknown=unknown)
        else:
            rules["lm_head.weight"] = Rule("lm_head.weight", (words, read))

    for index in range(a.layers):
        for name, axes in layer.items():
            rules[f"{layers}.{index}.{name}"] = Rule(f"{layers}.{index}.{name}", axes)
    return rules | _new_layers(small, layers, range(a.layers, b.layers), layer, norms, outputs)


def _new_layers(
    small: PretrainedConfig,
    layers: str,
    indices: range,
    layer: Mapping[str, tuple[Axis, ...]],
    norms: Sequence[str],
    outputs: Sequence[str],
) -> dict[str, Rule]:
    rules = {}
    # The output bias of an MLP is the last thing that a layer adds to the stream.
    last = next((f"{layers}.{indices.start - 1}.{name}" for name in outputs if name.startswith("mlp.")), None)
    for index in indices:
        for name in layer:
            rule = Rule(None, fill=1.0 if name.removesuffix(".weight") in norms else 0.0)
            if name in outputs:
                unknown = (
                    None if last else "the small model has no bias at the end of the stream to take its trace from"
                )
                rule = Rule(None, same_block_as=last, unknown=unknown)
            rules[f"{layers}.{index}.{name}"] = rule
    return rules


def _biased(config: PretrainedConfig) -> set[str]:
    """Names of the projections of a layer of the Llama family that have a bias."""
    attention = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    if config.model_type == "qwen2":
        return attention
    names = set()
    if getattr(config, "attention_bias", False):
        names |= attention | {"self_attn.o_proj"}
    if getattr(config, "mlp_bias", False):
        names |= {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    return names


def _heads(small: PretrainedConfig, a: Sizes, b: Sizes) -> tuple[Axis, Axis, Axis, Axis]:
    """The axes of queries, keys, values, and of the heads' outputs as the output projection reads them."""
    copies, key_value_copies = b.heads // a.heads, b.key_value_heads // a.key_value_heads
    shared, shared_large = a.heads // a.key_value_heads, b.heads // b.key_value_heads  # query heads to a key-value head
    key_value = torch.arange(b.key_value_heads) % a.key_value_heads
    # Consecutive query heads share a key-value head. All that share copies of one are dealt its query heads in turn.
    head = torch.arange(b.heads)
    turn = (head // shared_large // a.key_value_heads) * shared_large + head % shared_large
    query = key_value[head // shared_large] * shared + turn % shared
    uneven = (
        None
        if shared_large % shared == 0
        else f"copies of a key-value head serve different queries, as {shared_large} query heads share one where {shared} did"
    )

    larger = b.head_size // a.head_size
    inner = torch.arange(b.head_size)
    tiled = inner % a.head_size
    if small.model_type == "gpt2":
        turned = tiled
        scale = larger**-0.25 if small.scale_attn_weights else larger**-0.5
    else:
        # Pair i is (i, i + h/2). Pair i of the small head turns as pair larger·i of the large one.
        pair, half = inner % (b.head_size // 2), inner // (b.head_size // 2)
        turned = torch.where(pair % larger == 0, half * (a.head_size // 2) + pair // larger, -1)
        scale = larger**0.25

    def within(heads: Tensor, inside: Tensor) -> Tensor:
        index = heads[:, None] * a.head_size + inside
        return torch.where(inside >= 0, index, -1).flatten()

    return (
        _axis(within(query, turned), scale=scale, apart=copies),
        _axis(within(key_value, turned), scale=scale, apart=key_value_copies, uneven=uneven),
        _axis(within(key_value, tiled), uneven=uneven),
        _axis(within(query, tiled), scale=1 / (copies * larger)),
    )


def widen(model: PreTrainedModel, large: PretrainedConfig) -> PreTrainedModel:
    """Return a model of the large architecture with the function of the small one.

    In float32 and float64 the logits are equal to rounding. Half-precision weights are kept in their dtype: tiles divided by
    a power of two are exact, others are rounded once more.

    Args:
        model: Causal LM of one of `FAMILIES`. It is left as it is.
        large: Configuration of the same family with at least its sizes; widths and heads in whole ratios. Token ids of the
            beginning, end and padding are taken from `model`, as they belong to its tokenizer. Left as it is.

    Returns:
        The large model in eval mode, with the dtype and on the device of the small one.

    Raises:
        ValueError: If the large architecture cannot hold the function, or a parameter of the model is not one of its family's.
    """
    small = model.config
    rules = plan(small, large)
    given = dict(model.named_parameters())
    if missing := {rule.source for rule in rules.values() if rule.source} ^ set(given):
        raise ValueError(
            f"{type(model).__name__}: expected the parameters of a {small.model_type} model as transformers builds it, found a "
            f"difference in {', '.join(sorted(filter(None, missing))[:5])}; merge adapters and save the model first"
        )
    if kinds := {str(weight.dtype) for weight in given.values() if not weight.is_floating_point()}:
        raise ValueError(
            f"{type(model).__name__}: expected weights in floating point, found {', '.join(kinds)}; load it unquantized"
        )
    fields = large.to_dict()
    fields.pop("quantization_config", None)  # of the weights of the large model, which are not used
    config = type(large).from_dict(fields)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(small, name, None))
    parameter = next(iter(given.values()))
    with torch.random.fork_rng(devices=[]):  # weights are first drawn at random
        wide = type(model)(config).to(parameter.dtype).to(parameter.device).eval()
    wide.config.dtype = parameter.dtype
    wide.set_attn_implementation(small._attn_implementation)
    wide.generation_config = model.generation_config
    with torch.no_grad():
        for name, target in wide.named_parameters():
            rule = rules.pop(name, None)
            if rule is None:
                raise ValueError(
                    f"{type(model).__name__}: no rule for the parameter {name}, which its family does not have"
                )
            target.copy_(
                torch.full_like(target, rule.fill) if rule.source is None else _tile(given[rule.source], rule.axes)
            )
    if rules:
        raise ValueError(f"{type(model).__name__}: expected the parameters {', '.join(rules)}, which are not there")
    return wide


def _tile(weight: Tensor, axes: Sequence[Axis]) -> Tensor:
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for dim, axis in enumerate(axes):
        scale = axis.scale.to(wide.device, wide.dtype)
        if not torch.equal(axis.source, torch.arange(wide.shape[dim])):
            wide = wide.index_select(dim, axis.source.clamp(min=0).to(wide.device))
        if not (scale == 1).all():
            wide = wide * scale.reshape([-1 if other == dim else 1 for other in range(wide.dim())])
    return wide


def predict_traces(
    small: PretrainedConfig,
    large: PretrainedConfig,
    traces: Mapping[str, float | Tensor],
    *,
    kind: str,
    weighted: bool = False,
    excess: Mapping[str, float | Tensor] | None = None,
) -> PredictedTraces:
    """Predict the trace of each block of `widen(model, large)` from those of the small model.

    Args:
        small: Configuration of the small model.
        large: That of the large one.
        traces: For each parameter of the small model, by its name, the trace of its block; or the diagonal, of the parameter's
            shape, which is needed where the entries of a parameter scale differently (GPT-2's `c_attn` with larger heads).
        kind: "ggn" for the GGN and every kind of Fisher matrix, "hessian" for the Hessian.
        weighted: If True, `traces`, `excess` and the result are Σ w_i² H_ii.
        excess: Of kind "hessian": e of the module's formula, as `hessian_excess` returns it or summed; with weights if
            `weighted`. Without it, blocks that need it are missing from the result.

    Returns:
        The traces, and why others are missing. Sums run over the data as in `traces`; e must be of the same loss.

    Raises:
        KeyError: If a parameter is missing from `traces`, or `kind` is not known.
        ValueError: If the architectures do not fit, a trace is given where a diagonal is needed, or excess is for the GGN.
    """
    if kind not in ("ggn", "hessian"):
        raise KeyError(f"unknown kind {kind!r}. Known: ggn, hessian.")
    if kind == "ggn" and excess is not None:
        raise ValueError("excess is a term of the Hessian; expected none with kind 'ggn'")
    rules = plan(small, large)
    found: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, rule in rules.items():
        reason = rule.unknown or next((axis.uneven for axis in rule.axes if axis.uneven), None)
        if weighted and rule.source is None:
            found[name] = 0.0  # its weights are zero, or it is the gain of a norm that is not read
        elif reason is not None:
            missing[name] = reason
        elif rule.source is not None:
            if rule.source not in traces:
                raise KeyError(f"traces: no parameter {rule.source!r}. Given: {', '.join(traces) or 'none'}.")
            value = _predict(rule, traces, excess, kind=kind, weighted=weighted)
            if value is None:
                missing[name] = "its copies differ to second order; give the excess (hessian_excess)"
            else:
                found[name] = value
    for name, rule in rules.items():
        if rule.source is not None or name in found or name in missing:
            continue
        if rule.same_block_as is None:
            found[name] = 0.0
        elif rule.same_block_as in found:
            found[name] = found[rule.same_block_as]
        else:
            missing[name] = missing[rule.same_block_as]
    if small.model_type == "gpt2" and not weighted and not _vanishes_at_zero(small.activation_function):
        for name, rule in rules.items():
            if name.endswith("mlp.c_proj.weight") and (rule.source is None or bool((rule.axes[0].source < 0).any())):
                found.pop(name, None)
                missing[name] = f"{small.activation_function} of zero units is not zero"
    return PredictedTraces(traces=found, missing=missing)


def _predict(
    rule: Rule,
    traces: Mapping[str, float | Tensor],
    excess: Mapping[str, float | Tensor] | None,
    *,
    kind: str,
    weighted: bool,
) -> float | None:
    """The trace of one block, or None where it needs an excess that is not given."""
    assert rule.source is not None
    factors, apart = [], []
    for axis in rule.axes:
        copies, scale = axis.copies(), axis.of_source(axis.scale)
        factors.append(1 / copies if weighted else 1 / (copies * scale**2))
        apart.append(axis.of_source(axis.apart))
    total = _weighted_sum(rule.source, traces[rule.source], factors, what="traces")
    differ = [axis - 1 for axis in apart]
    if kind == "ggn" or all(not bool(axis.any()) for axis in differ):
        return total
    if excess is None:
        return None
    if rule.source not in excess:
        raise KeyError(f"excess: no parameter {rule.source!r}. Given: {', '.join(excess) or 'none'}.")
    # At most one axis of a parameter has copies that differ. Where they do not, the excess is zero.
    dim = next(index for index, axis in enumerate(differ) if bool(axis.any()))
    times = [
        factor * axis if index == dim else factor
        for index, (factor, axis) in enumerate(zip(factors, differ, strict=True))
    ]
    value = excess[rule.source]
    if not isinstance(value, Tensor):
        times[dim] = times[dim][differ[dim] != 0]
    return total + _weighted_sum(rule.source, value, times, what="excess")


def _weighted_sum(name: str, value: float | Tensor, factors: Sequence[Tensor], *, what: str) -> float:
    """Σ over entries of value times the product of the axes' factors."""
    if isinstance(value, Tensor) and value.dim() > 0:
        shape = tuple(len(factor) for factor in factors)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{what}[{name!r}]: expected a number or a diagonal of shape {shape}, found {tuple(value.shape)}"
            )
        out = value.double()
        for factor in reversed(factors):
            out = out @ factor.to(out.device)
        return float(out)
    if any(not torch.allclose(factor, factor[:1], rtol=1e-12, atol=0) for factor in factors):
        raise ValueError(
            f"{what}[{name!r}]: expected the diagonal, found a sum; the entries of this parameter scale differently in the "
            "large model"
        )
    return float(value) * math.prod(float(factor[0]) for factor in factors)


def _vanishes_at_zero(activation: str) -> bool:
    from transformers.activations import ACT2FN

    return float(ACT2FN[activation](torch.zeros(1))) == 0.0
