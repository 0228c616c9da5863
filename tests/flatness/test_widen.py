"""Widened models compute what the small ones do, and their traces are those that are predicted.

The oracles are brute force: logits of both models in float64, and their Hessian and GGN diagonals entry by entry.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.models.llama import modeling_llama

from harness_ext.flatness.excess import hessian_excess
from harness_ext.flatness.widen import plan, predict_traces, widen

VOCABULARY, POSITIONS = 11, 6
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(width: int, heads: int, units: int | None = None, layers: int = 1, **more: Any) -> transformers.GPT2Config:
    sizes = {"n_embd": width, "n_head": heads, "n_inner": units, "n_layer": layers}
    return transformers.GPT2Config(**{"n_positions": POSITIONS, **COMMON, **sizes, **more})


def of_llama(kind: type, width: int, heads: int, groups: int, units: int, layers: int = 1, **more: Any) -> Any:
    """A config of a family that is built as Llama is; `groups` is the number of key-value heads."""
    return kind(
        **{
            "max_position_embeddings": POSITIONS,
            **COMMON,
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "intermediate_size": units,
            "num_hidden_layers": layers,
            **more,
        }
    )


def llama(*sizes: int, **more: Any) -> transformers.LlamaConfig:
    return of_llama(transformers.LlamaConfig, *sizes, **more)


def qwen2(*sizes: int, **more: Any) -> transformers.Qwen2Config:
    return of_llama(transformers.Qwen2Config, *sizes, **more)


def mistral(*sizes: int, **more: Any) -> transformers.MistralConfig:
    return of_llama(transformers.MistralConfig, *sizes, **more)


def random_model(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Weights, biases and gains far from their usual values, so that none goes unnoticed."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.4)
    return model.to(dtype).eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On models this small threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def exact_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's norms and attention compute in float32 whatever the weights are; here in the dtype of the weights."""

    def norm(self: Any, states: Tensor) -> Tensor:
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        key, value = (states.repeat_interleave(module.num_key_value_groups, dim=1) for states in (key, value))
        weights = (query @ key.transpose(2, 3) * scaling + mask).softmax(dim=-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attention)


EXACT = {
    "more heads": (gpt2(8, 2), gpt2(24, 6)),
    "larger heads": (gpt2(8, 2), gpt2(24, 2)),
    "more and larger heads": (gpt2(8, 2), gpt2(32, 4)),
    "same size": (gpt2(8, 2), gpt2(8, 2)),
    "new layers only": (gpt2(8, 2, layers=2), gpt2(8, 2, layers=5)),
    "MLP in a ratio of its own": (gpt2(8, 2, 12), gpt2(16, 4, 36)),
    "MLP in no whole ratio": (gpt2(8, 2, 12), gpt2(16, 4, 29)),
    "untied": (gpt2(8, 2, tie_word_embeddings=False), gpt2(16, 2, tie_word_embeddings=False)),
    "tied to untied": (gpt2(8, 2), gpt2(16, 2, tie_word_embeddings=False)),
    "attention not scaled": (gpt2(8, 2, scale_attn_weights=False), gpt2(24, 2, scale_attn_weights=False)),
    "attention scaled by layer": (
        gpt2(8, 2, layers=2, scale_attn_by_inverse_layer_idx=True),
        gpt2(16, 2, layers=3, scale_attn_by_inverse_layer_idx=True),
    ),
    "large epsilon": (gpt2(8, 2, layer_norm_epsilon=0.3), gpt2(24, 6, layer_norm_epsilon=0.3)),
    "Llama": (llama(8, 2, 2, 12), llama(24, 6, 6, 36, layers=3)),
    "Llama, large epsilon": (llama(8, 2, 2, 12, rms_norm_eps=0.3), llama(24, 6, 6, 36, rms_norm_eps=0.3)),
    "Llama, tied": (llama(8, 2, 1, 12, tie_word_embeddings=True), llama(16, 4, 1, 24, tie_word_embeddings=True)),
    "Llama, biases": (
        llama(8, 2, 2, 12, attention_bias=True, mlp_bias=True),
        llama(16, 4, 2, 30, layers=2, attention_bias=True, mlp_bias=True),
    ),
    "more key-value heads": (llama(8, 4, 2, 12), llama(16, 8, 4, 12)),
    "more query heads to a key-value head": (llama(8, 4, 2, 12), llama(16, 8, 2, 12)),
    "fewer query heads to a key-value head": (llama(8, 4, 2, 12, head_dim=4), llama(16, 4, 4, 12, head_dim=4)),
    "query heads dealt out unevenly": (llama(8, 4, 2, 12, head_dim=4), llama(24, 12, 4, 12, head_dim=4)),
    "rotary, larger heads": (llama(8, 2, 1, 12), llama(24, 2, 1, 12)),
    "rotary, more and larger heads": (llama(8, 2, 1, 12), llama(32, 4, 2, 12)),
    "heads grow without the width": (llama(8, 2, 1, 12, head_dim=4), llama(8, 4, 1, 12, head_dim=8)),
    "Llama 3's rotary positions, larger heads": tuple(
        llama(
            *sizes,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 50.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        )
        for sizes in ((16, 2, 2, 12), (32, 2, 2, 12))
    ),
    "linear rotary positions, larger heads": tuple(
        llama(*sizes, rope_parameters={"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0})
        for sizes in ((16, 2, 2, 12), (32, 2, 2, 12))
    ),
    "Qwen2": (qwen2(8, 2, 1, 12), qwen2(16, 4, 2, 24, layers=2)),
    "Qwen2, larger heads": (qwen2(8, 2, 1, 12), qwen2(16, 2, 1, 24)),
    "Qwen2, a window in the second layer": tuple(
        qwen2(*sizes, use_sliding_window=True, sliding_window=2, max_window_layers=1)
        for sizes in ((8, 2, 1, 12, 2), (16, 4, 1, 24, 3))
    ),
    "Mistral with a window": tuple(
        mistral(*sizes, sliding_window=2) for sizes in ((8, 2, 1, 12, 2), (16, 2, 1, 24, 3))
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_function_is_kept(name: str, exact_llama: None) -> None:
    small_config, large_config = EXACT[name]
    small = random_model(small_config)
    large = widen(small, large_config)
    assert (large.num_parameters() > small.num_parameters()) is (name != "same size")
    sizes = {
        field: getattr(large_config, field) for field in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    }
    assert {field: getattr(large.config, field) for field in sizes} == sizes
    tokens = torch.randint(VOCABULARY, (3, POSITIONS), generator=torch.Generator().manual_seed(1))
    for model in (small, large):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        before, after = small(tokens).logits, large(tokens).logits
    assert before.std() > 0.1
    # Qwen2 and Mistral are not patched, and round to float32 inside.
    tolerance = 1e-12 if small_config.model_type in ("gpt2", "llama") else 2e-6
    assert (before - after).abs().max() < tolerance * before.abs().max()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)], ids=["float32", "bfloat16"]
)
def test_the_dtype_is_kept(dtype: torch.dtype, tolerance: float) -> None:
    small = random_model(gpt2(8, 2, layers=2), dtype=dtype)
    large = widen(small, gpt2(16, 2, layers=3))
    assert {parameter.dtype for parameter in large.parameters()} == {dtype}
    assert large.config.dtype == dtype
    with torch.no_grad():
        before, after = (model(torch.arange(6)[None]).logits.float() for model in (small, large))
    assert (before - after).abs().max() < tolerance * before.abs().max()


def test_halved_weights_in_half_precision_are_exact() -> None:
    small = random_model(gpt2(8, 2), dtype=torch.bfloat16)
    large = widen(small, gpt2(16, 4))
    block, wide = (model.transformer.h[0].mlp.c_fc.weight for model in (small, large))
    assert torch.equal(wide.float(), block.float().repeat(2, 2) / 2)


def test_the_small_model_the_config_and_the_random_state_are_left_alone() -> None:
    small, large_config = random_model(gpt2(8, 2)), gpt2(16, 2)
    before, fields = copy.deepcopy(small.state_dict()), large_config.to_dict()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    widen(small, large_config)
    assert torch.equal(torch.rand(3), expected)
    assert large_config.to_dict() == fields
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


def test_token_ids_are_those_of_the_small_model() -> None:
    small = random_model(llama(8, 2, 2, 12, pad_token_id=3, eos_token_id=4))
    large = widen(small, llama(16, 4, 4, 24, pad_token_id=7, eos_token_id=8))
    assert (large.config.pad_token_id, large.config.eos_token_id) == (3, 4)
    assert large.generation_config.eos_token_id == 4


def test_every_parameter_has_a_rule() -> None:
    for small_config, large_config in EXACT.values():
        model = transformers.AutoModelForCausalLM.from_config(large_config)
        assert set(plan(small_config, large_config)) == {name for name, _ in model.named_parameters()}


REFUSED = [
    (gpt2(8, 2), llama(16, 2, 2, 12), ["model_type is 'llama', expected 'gpt2'"]),
    (gpt2(8, 2), gpt2(20, 2), ["n_embd is 20, expected a multiple of the small model's 8, such as 16"]),
    (gpt2(8, 2), gpt2(24, 3), ["n_head is 3, expected a multiple of the small model's 2, such as 4"]),
    (
        gpt2(8, 2),
        gpt2(24, 4),
        ["size of a head, is 6, expected a multiple of the small model's 4; n_head = 6 would do"],
    ),
    (gpt2(8, 2, 12), gpt2(16, 2, 11), ["n_inner is 11, expected at least the small model's 12"]),
    (gpt2(8, 2, layers=3), gpt2(16, 2, layers=2), ["n_layer is 2, expected at least the small model's 3"]),
    (
        gpt2(8, 2),
        gpt2(16, 2, vocab_size=12, n_positions=7),
        ["vocab_size is 12, expected 11", "n_positions is 7, expected 6"],
    ),
    (gpt2(8, 2), gpt2(16, 2, activation_function="relu"), ["activation_function is 'relu', expected 'gelu_new'"]),
    (gpt2(8, 2), gpt2(16, 2, layer_norm_epsilon=1e-6), ["layer_norm_epsilon is 1e-06, expected 1e-05"]),
    (gpt2(8, 2), gpt2(16, 2, scale_attn_weights=False), ["scale_attn_weights is False, expected True"]),
    (gpt2(8, 2), gpt2(16, 2, add_cross_attention=True), ["add_cross_attention is True, expected False"]),
    (gpt2(8, 2, tie_word_embeddings=False), gpt2(16, 2), ["tie_word_embeddings is True, expected False"]),
    (llama(8, 2, 2, 12), llama(16, 4, 1, 24), ["num_key_value_heads is 1, expected a multiple of the small model's 2"]),
    (
        llama(8, 2, 2, 12, head_dim=4),
        llama(16, 2, 2, 24, head_dim=6),
        ["head_dim is 6, expected a multiple of the small model's 4, such as 8"],
    ),
    (
        llama(8, 2, 2, 12),
        llama(16, 4, 2, 24, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        ["rope_parameters is {'rope_t", "expected {'rope_t"],
    ),
    (
        *(
            llama(*sizes, rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0})
            for sizes in ((8, 2, 2, 12), (16, 2, 2, 24))
        ),
        ["head_dim is 8, expected 4, that of the small model: with rope_type 'dynamic'"],
    ),
    (llama(8, 2, 2, 12), llama(16, 2, 2, 24, attention_bias=True), ["attention_bias is True, expected False"]),
    (llama(8, 2, 2, 12, mlp_bias=True), llama(16, 2, 2, 24), ["mlp_bias is False, expected True"]),
    (mistral(8, 2, 2, 12, sliding_window=4), mistral(16, 2, 2, 24), ["sliding_window is 4096, expected 4"]),
    (
        qwen2(8, 2, 1, 12),
        qwen2(16, 2, 1, 24, use_sliding_window=True, sliding_window=2, max_window_layers=0),
        ["windows [2], expected [None]"],
    ),
]


@pytest.mark.parametrize(("small", "large", "messages"), REFUSED, ids=[case[2][0][:40] for case in REFUSED])
def test_what_cannot_be_kept_is_refused(small: Any, large: Any, messages: list[str]) -> None:
    with pytest.raises(ValueError, match="cannot hold the small model") as caught:
        plan(small, large)
    assert all(message in str(caught.value) for message in messages), caught.value


def test_a_family_that_is_not_known_is_refused() -> None:
    opt = transformers.OPTConfig()
    with pytest.raises(ValueError, match="model_type of the small model is 'opt', expected one of gpt2, llama"):
        plan(opt, opt)


def test_a_model_with_other_parameters_is_refused() -> None:
    model = random_model(gpt2(8, 2))
    model.transformer.h[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"difference in transformer\.h\.0\.extra"):
        widen(model, gpt2(16, 2))


class Curvature(NamedTuple):
    hessian: dict[str, Tensor]
    ggn: dict[str, Tensor]


TOKENS = torch.tensor([[3, 7, 3, 0, 9]])  # one of them twice
TARGETS = torch.tensor([[7, 3, 10, 3, 5]])


def loss_of(logits: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), TARGETS.flatten())


def curvature(model: Any) -> Curvature:
    """Diagonals of the Hessian and of the GGN by every row of the Hessian and of the Jacobian."""
    model.set_attn_implementation("eager")
    parameters = dict(model.named_parameters())
    logits = model(TOKENS, use_cache=False).logits[0]
    gradients = torch.autograd.grad(loss_of(logits[None]), list(parameters.values()), create_graph=True)
    rows = every_row(torch.cat([gradient.flatten() for gradient in gradients]), parameters)
    jacobian = every_row(logits.flatten(), parameters).unflatten(0, logits.shape)
    p = logits.detach().softmax(dim=-1)
    # diag Σ_t Jᵀ (diag p − p pᵀ) J / T, as a variance over the vocabulary
    mean = torch.einsum("tv,tvn->tn", p, jacobian)
    ggn = torch.einsum("tv,tvn->n", p, (jacobian - mean[:, None]) ** 2) / len(logits)
    return Curvature(split(rows.diagonal(), parameters), split(ggn, parameters))


def every_row(values: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    identity = torch.eye(len(values), dtype=values.dtype)
    parts = [
        torch.autograd.grad(values, list(parameters.values()), rows, retain_graph=True, is_grads_batched=True)
        for rows in identity.split(512)
    ]
    return torch.cat([torch.cat([part.flatten(1) for part in some], dim=1) for some in parts])


def split(flat: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    pieces = flat.split([parameter.numel() for parameter in parameters.values()])
    return {
        name: piece.detach().reshape(value.shape)
        for piece, (name, value) in zip(pieces, parameters.items(), strict=True)
    }


WIDENED = {
    "GPT-2: more heads, tied, no whole ratio of the MLP, a new layer": (gpt2(4, 1, 5), gpt2(8, 2, 12, layers=2)),
    "GPT-2: more and larger heads, untied": (
        gpt2(4, 2, 5, tie_word_embeddings=False),
        gpt2(12, 2, 5, tie_word_embeddings=False),
    ),
    "Llama: more query heads, biases, tied, a new layer": (
        llama(4, 2, 1, 5, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        llama(8, 4, 1, 10, layers=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    ),
    "Llama: more key-value heads, larger heads": (
        llama(4, 2, 1, 5, head_dim=4),
        llama(8, 4, 2, 5, head_dim=8),
    ),
}

# What the small model's traces alone do not tell of the Hessian; all else they do.
NEED_EXCESS = {
    "GPT-2: more heads, tied, no whole ratio of the MLP, a new layer": {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.attn.c_proj.bias",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_fc.bias",
        "transformer.h.0.mlp.c_proj.weight",
        "transformer.h.0.mlp.c_proj.bias",
        "transformer.h.1.attn.c_proj.bias",
        "transformer.h.1.mlp.c_proj.bias",
    },
    "GPT-2: more and larger heads, untied": {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.attn.c_proj.bias",
        "transformer.h.0.mlp.c_proj.weight",
        "transformer.h.0.mlp.c_proj.bias",
    },
    "Llama: more query heads, biases, tied, a new layer": {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.gate_proj.bias",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.down_proj.bias",
        "model.layers.1.self_attn.o_proj.bias",
        "model.layers.1.mlp.down_proj.bias",
    },
    "Llama: more key-value heads, larger heads": {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    },
}


def weights_of(model: Any, *, weighted: bool) -> dict[str, Tensor]:
    """w², or ones."""
    return {
        name: parameter.detach() ** 2 if weighted else torch.ones_like(parameter)
        for name, parameter in model.named_parameters()
    }


def sums(diagonals: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((diagonal * weights[name]).sum()) for name, diagonal in diagonals.items()}


@pytest.mark.parametrize("name", WIDENED)
def test_the_traces_are_those_predicted(name: str, exact_llama: None) -> None:
    configs, need = WIDENED[name], NEED_EXCESS[name]
    small = random_model(configs[0], seed=2)
    large = widen(small, configs[1])
    before, after = curvature(small), curvature(large)
    excess = hessian_excess(small, TOKENS, loss_of)
    for weighted in (False, True):
        weights, large_weights = (weights_of(model, weighted=weighted) for model in (small, large))
        ggn, hessian = sums(after.ggn, large_weights), sums(after.hessian, large_weights)
        given = {key: value * weights[key] for key, value in before.ggn.items()}
        predicted = predict_traces(*configs, given, kind="ggn", weighted=weighted)
        assert predicted.traces == pytest.approx(ggn, rel=1e-8, abs=1e-12)
        assert predicted.total == pytest.approx(sum(ggn.values()), rel=1e-8)

        given = {key: value * weights[key] for key, value in before.hessian.items()}
        of_excess = {key: value * weights[key] for key, value in excess.items()}
        predicted = predict_traces(*configs, given, kind="hessian", weighted=weighted, excess=of_excess)
        assert predicted.traces == pytest.approx(hessian, rel=1e-8, abs=1e-11)
        assert not predicted.missing

        alone = predict_traces(*configs, given, kind="hessian", weighted=weighted)
        # Biases of new layers weigh nothing.
        unknown = {key for key in need if not weighted or key in before.hessian}
        assert set(alone.missing) == unknown
        known = {key: value for key, value in hessian.items() if key not in unknown}
        assert alone.traces == pytest.approx(known, rel=1e-8, abs=1e-11)
        with pytest.raises(ValueError, match="the total is not known"):
            _ = alone.total
        # Without the excess each of the others would be wrong, so none of them is tested in vain.
        without = predict_traces(
            *configs, given, kind="hessian", weighted=weighted, excess=dict.fromkeys(of_excess, 0.0)
        )
        for key in unknown:
            assert abs(without.traces[key] - hessian[key]) > 1e-3 * abs(hessian[key])


def test_copies_that_serve_different_heads_are_not_predicted(exact_llama: None) -> None:
    configs = llama(4, 2, 1, 5, head_dim=2), llama(12, 6, 2, 5, head_dim=2)  # 3 query heads where there were 2
    small = random_model(configs[0])
    large = widen(small, configs[1])
    before, after = curvature(small), curvature(large)
    predicted = predict_traces(*configs, before.ggn, kind="ggn")
    assert set(predicted.missing) == {f"model.layers.0.self_attn.{part}_proj.weight" for part in "kv"}
    assert all("3 query heads share one where 2 did" in reason for reason in predicted.missing.values())
    expected = {key: float(value.sum()) for key, value in after.ggn.items()}
    assert predicted.traces == pytest.approx({key: expected[key] for key in predicted.traces}, rel=1e-8)
    excess = hessian_excess(small, TOKENS, loss_of)
    predicted = predict_traces(*configs, before.hessian, kind="hessian", excess=excess)
    expected = {key: float(value.sum()) for key, value in after.hessian.items()}
    assert predicted.traces == pytest.approx({key: expected[key] for key in predicted.traces}, rel=1e-8)


def test_the_factors_of_the_docstring() -> None:
    # k = 3 with heads 3 times larger, MLP 2 times wider, tied.
    configs = gpt2(4, 2, 6), gpt2(12, 2, 12)
    model = random_model(configs[0])
    ones = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    count = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layer = "transformer.h.0."
    factors = {
        "transformer.wte.weight": 1 / 3,
        "transformer.ln_f.weight": 3,
        f"{layer}ln_1.bias": 1 / 3,
        f"{layer}attn.c_proj.weight": 3 / 3,
        f"{layer}mlp.c_fc.weight": 3 / 2,
        f"{layer}mlp.c_fc.bias": 1 / 2,
        f"{layer}mlp.c_proj.weight": 2 / 3,
        f"{layer}mlp.c_proj.bias": 1 / 3,
        # queries and keys, k/(t·p²) = √3, and values, 1
        f"{layer}attn.c_attn.weight": (2 * 3**0.5 + 1) / 3,
    }
    traces = predict_traces(*configs, ones, kind="ggn").traces
    assert {name: traces[name] / count[name] for name in factors} == pytest.approx(factors)
    copies = {
        f"{layer}mlp.c_fc.weight": 6,
        f"{layer}mlp.c_proj.weight": 6,
        f"{layer}attn.c_attn.weight": 9,
        "transformer.ln_f.weight": 3,
    }
    traces = predict_traces(*configs, ones, kind="ggn", weighted=True).traces
    assert {name: traces[name] / count[name] for name in copies} == pytest.approx(
        {name: 1 / number for name, number in copies.items()}
    )


def test_sums_do_where_all_entries_scale_alike() -> None:
    configs = gpt2(4, 2, 5), gpt2(8, 4, 10)
    model = random_model(configs[0])
    generator = torch.Generator().manual_seed(0)
    diagonals, excess = (
        {name: torch.rand(parameter.shape, generator=generator) for name, parameter in model.named_parameters()}
        for _ in range(2)
    )
    for part in ("weight", "bias"):
        excess[f"transformer.h.0.attn.c_attn.{part}"][..., 8:] = 0.0  # values have none
    both = [
        predict_traces(*configs, given, kind="hessian", excess=of_excess).traces
        for given, of_excess in (
            (diagonals, excess),
            tuple({name: float(value.sum()) for name, value in values.items()} for values in (diagonals, excess)),
        )
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-5)


def test_a_sum_is_refused_where_entries_scale_differently() -> None:
    configs = gpt2(4, 2), gpt2(8, 2)
    traces = dict.fromkeys(dict(random_model(configs[0]).named_parameters()), 1.0)
    with pytest.raises(ValueError, match=r"c_attn\.weight'\]: expected the diagonal, found a sum"):
        predict_traces(*configs, traces, kind="ggn")


def test_what_a_prediction_needs() -> None:
    configs = gpt2(4, 2), gpt2(8, 4)
    traces = dict.fromkeys(dict(random_model(configs[0]).named_parameters()), 1.0)
    with pytest.raises(KeyError, match=r"unknown kind 'fisher'\. Known: ggn, hessian"):
        predict_traces(*configs, traces, kind="fisher")
    with pytest.raises(ValueError, match="excess is a term of the Hessian"):
        predict_traces(*configs, traces, kind="ggn", excess={})
    with pytest.raises(KeyError, match=r"excess: no parameter 'transformer\.wte\.weight'"):
        predict_traces(*configs, traces, kind="hessian", excess={})
    with pytest.raises(ValueError, match=r"expected a number or a diagonal of shape \(11, 4\), found \(3,\)"):
        predict_traces(*configs, traces | {"transformer.wte.weight": torch.ones(3)}, kind="ggn")
    del traces["transformer.ln_f.bias"]
    with pytest.raises(KeyError, match=r"traces: no parameter 'transformer\.ln_f\.bias'"):
        predict_traces(*configs, traces, kind="ggn")


def test_what_is_never_predicted_says_why() -> None:
    untied = gpt2(4, 2), gpt2(8, 4, tie_word_embeddings=False)
    traces = dict.fromkeys(dict(random_model(untied[0]).named_parameters()), 1.0)
    predicted = predict_traces(*untied, traces, kind="ggn")
    assert set(predicted.missing) == {"transformer.wte.weight", "lm_head.weight"}
    # Units of a sigmoid are not zero where their weights are.
    sigmoid = tuple(gpt2(*sizes, activation_function="sigmoid") for sizes in ((4, 2, 5), (8, 4, 12, 2)))
    predicted = predict_traces(*sigmoid, traces, kind="ggn")
    assert set(predicted.missing) == {f"transformer.h.{layer}.mlp.c_proj.weight" for layer in (0, 1)}
    # The output bias of attention alone is not at the end of the stream.
    attention = tuple(llama(*sizes, attention_bias=True) for sizes in ((4, 2, 2, 5), (8, 4, 4, 10, 2)))
    traces = dict.fromkeys(dict(random_model(attention[0]).named_parameters()), 1.0)
    predicted = predict_traces(*attention, traces, kind="ggn")
    assert set(predicted.missing) == {"model.layers.1.self_attn.o_proj.bias"}


def test_piecewise_linear_units_need_no_excess() -> None:
    configs = tuple(gpt2(*sizes, activation_function="relu") for sizes in ((4, 2, 5), (8, 2, 10)))
    small = random_model(configs[0], seed=3)
    before, after = curvature(small), curvature(widen(small, configs[1]))
    predicted = predict_traces(*configs, before.hessian, kind="hessian")
    for part in ("weight", "bias"):
        name = f"transformer.h.0.mlp.c_fc.{part}"
        assert predicted.traces[name] == pytest.approx(float(after.hessian[name].sum()), rel=1e-8)
        assert not hessian_excess(small, TOKENS, loss_of)[name].any()


@pytest.mark.parametrize(
    "config", [mistral(8, 2, 1, 5, 2, sliding_window=2), qwen2(8, 2, 1, 5, 2)], ids=["mistral", "qwen2"]
)
def test_the_softmax_part_of_the_excess_by_differences(config: Any) -> None:
    """e of queries and keys is a second derivative of ⟨g, outputs of the heads⟩ with g held; windows and biases too."""
    model = random_model(config)
    excess = hessian_excess(model, TOKENS, loss_of)
    attention = model.model.layers[0].self_attn
    seen: dict[str, Tensor] = {}

    def keep(module: Any, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].retain_grad()
        seen["outputs"] = inputs[0]

    handle = attention.o_proj.register_forward_pre_hook(keep)
    # The softmax is float32 inside, so a difference quotient takes a large step.
    loss_of(model(TOKENS).logits).backward()
    pull, step = seen["outputs"].grad, 0.05
    parameters = {name: value for name, value in attention.named_parameters() if name[0] in "qk"}
    assert {f"model.layers.0.self_attn.{name}" for name in parameters} <= set(excess)
    for name, parameter in parameters.items():
        exact = excess[f"model.layers.0.self_attn.{name}"].flatten()
        flat = parameter.data.flatten()
        for index in range(0, len(flat), max(1, len(flat) // 4)):
            values = []
            for shift in (-2, -1, 0, 1, 2):
                moved = flat.clone()
                moved[index] += shift * step
                parameter.data = moved.reshape(parameter.shape)
                model(TOKENS)
                values.append(float((seen["outputs"].detach() * pull).sum()))
            parameter.data = flat.reshape(parameter.shape)
            # fourth-order second difference
            second = torch.tensor([-1.0, 16.0, -30.0, 16.0, -1.0], dtype=torch.float64) @ torch.tensor(values).double()
            assert float(second) / (12 * step**2) == pytest.approx(float(exact[index]), rel=0.02, abs=2e-4)
    handle.remove()


def test_the_excess_leaves_the_model_as_it_was() -> None:
    model = random_model(gpt2(4, 2))
    model.requires_grad_(False)
    excess = hessian_excess(model, TOKENS, loss_of)
    assert all(bool(torch.isfinite(value).all()) for value in excess.values())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="model_type is 'opt', expected one of gpt2"):
        hessian_excess(
            transformers.OPTForCausalLM(
                transformers.OPTConfig(
                    hidden_size=8,
                    num_attention_heads=2,
                    ffn_dim=8,
                    vocab_size=11,
                    num_hidden_layers=1,
                    word_embed_proj_dim=8,
                    pad_token_id=1,
                    bos_token_id=1,
                    eos_token_id=1,
                )
            ),
            TOKENS,
            loss_of,
        )
