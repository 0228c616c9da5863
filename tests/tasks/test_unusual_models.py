"""Every task on models of unusual heads, vocabularies, attention and weights, against plain forwards of these models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lm_eval.api.instance import Instance
from oracles import last_state
from tiny import COMMON, CONFIGS, HEADS, SIZES, VOCABULARY, tiny_model, tiny_tokenizer
from torch import nn
from worlds import World, evaluate, feature_probe, hf_model, loss_task, natural, report, samples

from harness_ext.contracts import CONDITIONAL_MEAN, Feature, PromptRequest
from harness_ext.engine.attach import REQUEST_TYPE
from harness_ext.evaluators.quad import plug_in_quad

pytestmark = pytest.mark.usefixtures("world")

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, Callable[[], Any]] = {
    "tied head": CONFIGS["gpt2"],
    "untied head": lambda: transformers.GPT2Config(**CONFIGS["gpt2"]().to_diff_dict() | {"tie_word_embeddings": False}),
    "head bias (GPT-J)": lambda: transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, bos_token_id=0, eos_token_id=0
    ),
    "head bias (Phi)": lambda: transformers.PhiConfig(**COMMON, **SIZES, num_attention_heads=4, pad_token_id=1),
    "soft-capped logits (Gemma 2)": lambda: transformers.Gemma2Config(
        **COMMON, **SIZES, **HEADS, head_dim=8, sliding_window=8, final_logit_softcapping=2.0
    ),
    "scaled logits (Cohere)": CONFIGS["cohere"],
    "scaled logits (Granite)": lambda: transformers.GraniteConfig(**COMMON, **SIZES, **HEADS, logits_scaling=8.0),
    "projected embedding (OPT)": CONFIGS["opt"],
    "sliding window (Mistral)": CONFIGS["mistral"],
    "state space (Mamba)": CONFIGS["mamba"],
    "state space (Mamba 2)": CONFIGS["mamba2"],
    "recurrent (RWKV)": lambda: transformers.RwkvConfig(
        vocab_size=VOCABULARY, context_length=128, hidden_size=32, attention_hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, bos_token_id=0, eos_token_id=0,
    ),
    "hybrid (Jamba)": lambda: transformers.JambaConfig(
        **COMMON, **SIZES, **HEADS, num_experts=2, num_experts_per_tok=1, mamba_d_state=4, attn_layer_period=2,
        attn_layer_offset=1, use_mamba_kernels=False, pad_token_id=1,
    ),
    "experts (Mixtral)": lambda: transformers.MixtralConfig(
        **COMMON, **SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2
    ),
    "experts (Qwen 2)": lambda: transformers.Qwen2MoeConfig(
        **COMMON, **SIZES, **HEADS, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16, pad_token_id=1
    ),
    "experts (Qwen 3)": lambda: transformers.Qwen3MoeConfig(
        **COMMON, **SIZES, **HEADS, **EXPERTS, num_experts=4, head_dim=8, pad_token_id=1
    ),
    "experts (OLMoE)": lambda: transformers.OlmoeConfig(
        **COMMON, **SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, pad_token_id=1
    ),
}  # fmt: skip


def _of_config(config: Any) -> Any:
    CONFIGS["unusual"] = lambda: config
    try:
        return tiny_model("unusual")
    finally:
        del CONFIGS["unusual"]


def _adapted(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **options)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _quantised() -> Any:
    """int8 weights, quantised activations, in torch's own layers, whose `weight` is a method."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces another way
        return torch.ao.quantization.quantize_dynamic(tiny_model("llama"), {nn.Linear}, dtype=torch.qint8)


CHANGED: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: _adapted(target_modules=["q_proj", "v_proj", "down_proj"]),
    "LoRA of the head": lambda: _adapted(target_modules=["q_proj", "lm_head"]),
    "a head of its own beside LoRA": lambda: _adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "bfloat16": lambda: tiny_model("llama", dtype=torch.bfloat16),
}
MODELS = {name: lambda config=config: _of_config(config()) for name, config in FAMILIES.items()} | CHANGED

CONTEXTS = (
    "the film is good. This movie is",
    "the film is bad. This movie is",
    "I hated it, all of it, and so did all who saw it with me. This movie is",
    "x is",
)
WORDS = (" great", " terrible", " good and bad")


def ask(lm: Any, *features: Feature) -> list[Any]:
    request = PromptRequest(WORDS, features)
    instances = [
        Instance(REQUEST_TYPE, doc={}, arguments=(context, request.to_argument()), idx=0, metadata=("t", i, 1))
        for i, context in enumerate(CONTEXTS)
    ]
    return lm.prompt_states(instances)


def forward(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of an unpadded text, float64 of shape (tokens, V)."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


def tolerance(name: str) -> dict[str, float]:
    # The engine multiplies bfloat16 states by the head in float32, the model rounds its logits to 1/16.
    return {"rtol": 0.05, "atol": 0.3} if name == "bfloat16" else {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.parametrize("name", list(MODELS))
def test_answers_are_those_of_plain_forwards(name: str) -> None:
    model, tokenizer = MODELS[name](), tiny_tokenizer()
    answers = ask(hf_model(model, tokenizer), Feature(), Feature(mixture=CONDITIONAL_MEAN))
    source, rows = answers[0].source, [answer.row for answer in answers]
    f, means, p = (
        source.take(rows, Feature()),
        source.take(rows, Feature(mixture=CONDITIONAL_MEAN)),
        source.probabilities(rows),
    )
    phi = source.output_embedding()
    bounds = tolerance(name)
    for row, (context, answer) in enumerate(zip(CONTEXTS, answers, strict=True)):
        ids = tokenizer(context)["input_ids"]
        for word, found in zip(WORDS, answer.log_probs, strict=True):
            whole = tokenizer(context + word)["input_ids"]
            expected = sum(float(forward(model, whole)[t - 1, whole[t]]) for t in range(len(ids), len(whole)))
            assert found == pytest.approx(expected, rel=bounds["rtol"], abs=bounds["atol"])
        expected_p = forward(model, ids)[-1].exp().numpy()
        np.testing.assert_allclose(p[row], expected_p, **bounds)
        np.testing.assert_allclose(f[row], last_state(model, ids).float().numpy(), **bounds)
        np.testing.assert_allclose(means[row], expected_p @ phi.astype(np.float64), **bounds)
    assert phi.shape == (VOCABULARY, f.shape[1])
    np.testing.assert_allclose(source.gram(), phi.astype(np.float64).T @ phi, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", list(MODELS))
def test_the_output_embedding_is_what_the_head_does(name: str) -> None:
    """Of differences of states, so that a bias falls out."""
    model = MODELS[name]()
    answers = ask(hf_model(model), Feature())
    head = model.get_output_embeddings()
    f = torch.from_numpy(answers[0].source.take([0, 1], Feature())).to(next(model.parameters()).dtype)
    with torch.no_grad():
        difference = (head(f[:1]) - head(f[1:])).float().numpy()[0]
    expected = (f[0] - f[1]).float().numpy() @ answers[0].source.output_embedding().T
    np.testing.assert_allclose(difference, expected, **tolerance(name))


@pytest.mark.parametrize("name", list(MODELS))
def test_all_tasks_run(name: str, world: World) -> None:
    """The tasks' own numbers by plain forwards: accuracy of natural, loss in nats; those of probes are finite."""
    world.add_dataset("tests/lines", {"test": [{"text": row["text"]} for row in world.splits["train"]]})
    model, tokenizer = MODELS[name](), tiny_tokenizer()
    lm = hf_model(model, tokenizer)
    few = {"n_per_class": 6}
    tasks = [natural(), feature_probe("probe", few), feature_probe("quad", few), loss_task()]
    results = evaluate(lm, *tasks, limit=6)
    for sample, doc in zip(samples(results, "natural_films"), world.splits["test"][:6], strict=True):
        ids = tokenizer(f"{doc['text']} This movie is")["input_ids"]
        for word, found in zip((" terrible", " great"), sample["resps"][0][0].log_probs, strict=True):
            whole = tokenizer(f"{doc['text']} This movie is{word}")["input_ids"]
            expected = sum(float(forward(model, whole)[t - 1, whole[t]]) for t in range(len(ids), len(whole)))
            bounds = tolerance(name)
            assert found == pytest.approx(expected, rel=bounds["rtol"], abs=bounds["atol"])
    for task in ("probe_films", "quad_films"):
        assert math.isfinite(results["results"][task]["acc,none"])
    found = results["results"]["loss_lines"]["loss,none"]
    assert found == pytest.approx(_nats_of_windows(results, model), rel=5e-2 if name == "bfloat16" else 1e-4)


def _nats_of_windows(results: dict[str, Any], model: Any) -> float:
    nats, count = 0.0, 0
    for sample in samples(results, "loss_lines"):
        argument = sample["arguments"][0][1]
        log_probs = forward(model, argument["tokens"])[-len(argument["targets"]) :]
        nats -= float(log_probs[range(len(argument["targets"])), argument["targets"]].sum())
        count += len(argument["targets"])
    return nats / count


def test_the_plug_in_of_quad_is_that_of_plain_forwards() -> None:
    model, tokenizer = _of_config(FAMILIES["head bias (Phi)"]()), tiny_tokenizer()
    answers = ask(hf_model(model, tokenizer), Feature(mixture=CONDITIONAL_MEAN))
    source = answers[0].source
    phi = model.get_output_embeddings().weight.detach().double().numpy()
    p = np.stack([forward(model, tokenizer(context)["input_ids"])[-1].exp().numpy() for context in CONTEXTS])
    means = source.take([answer.row for answer in answers], Feature(mixture=CONDITIONAL_MEAN))
    found = plug_in_quad(means, source.gram(), ridge=0.0).values
    expected = np.linalg.solve(phi.T @ phi, phi.T @ p.T).T
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------- vocabularies


def test_a_vocabulary_beyond_the_tokenizer_counts_in_the_softmax() -> None:
    config = CONFIGS["gpt2"]()
    config.vocab_size = VOCABULARY + 64
    model = _of_config(config)
    answers = ask(hf_model(model), Feature())
    p = answers[0].source.probabilities([answers[0].row])[0]
    assert p.shape == (VOCABULARY + 64,)
    expected = forward(model, tiny_tokenizer()(CONTEXTS[0])["input_ids"])[-1].exp().numpy()
    np.testing.assert_allclose(p, expected, rtol=1e-4, atol=1e-6)
    assert p[VOCABULARY:].sum() > 1e-3


def test_a_tokenizer_beyond_the_vocabulary_is_refused(world: World) -> None:
    world.add_dataset("tests/lines", {"test": [{"text": row["text"]} for row in world.splits["train"]]})
    config = CONFIGS["gpt2"]()
    config.vocab_size = 200
    lm = hf_model(_of_config(config))
    for task in (natural(), feature_probe("probe"), loss_task()):
        with pytest.raises(ValueError, match=r"token id \d+, and the model has embeddings of 0 to 199.*tokenizer="):
            evaluate(lm, task)


def test_tokens_of_label_words_beyond_the_vocabulary_are_refused() -> None:
    """The last token of a word is no input of the model, whose embedding would not miss it."""
    tokenizer = tiny_tokenizer()
    config = CONFIGS["gpt2"]()
    config.vocab_size = len(tokenizer)
    tokenizer.add_tokens(["great", "terrible"])
    with pytest.raises(ValueError, match=rf"token id {len(tokenizer) - 1}, .* 0 to {config.vocab_size - 1}"):
        evaluate(hf_model(_of_config(config), tokenizer), natural())


def test_no_bos_and_no_eos(world: World) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    config = CONFIGS["gpt2"]()
    config.bos_token_id = config.eos_token_id = None
    model = _of_config(config)
    results = evaluate(hf_model(model, tokenizer), natural(), feature_probe("probe"))
    assert math.isfinite(results["results"]["natural_films"]["acc,none"])
    world.add_prompt("films/bare", '{%- set label_words = {"negative": "bad", "positive": "good"} -%}{{ text }}')
    with pytest.raises(ValueError, match="neither BOS nor EOS to stand for it"):
        evaluate(hf_model(model, tokenizer), natural(metadata={"prompt": "films/bare"}))


def test_documents_beyond_128_tokens_lose_their_beginning(world: World) -> None:
    rows = [
        {"text": f"{'the film is long ' * 60}{i} {row['text']}", "label": row["label"]}
        for i, row in enumerate(world.splits["test"])
    ]
    name = world.add_dataset("tests/long", {"train": rows, "test": rows})
    for family in ("gpt2", "mamba"):
        results = evaluate(
            hf_model(tiny_model(family), max_length=128),
            natural(dataset_path=name),
            feature_probe("probe", dataset_path=name),
        )
        assert report(results, "natural_films")["cut_documents"] == len(rows)


# ------------------------------------------------------------------------------------------------- quantised


def test_a_model_quantised_by_torch_itself() -> None:
    model, tokenizer = _quantised(), tiny_tokenizer()
    answers = ask(hf_model(model, tokenizer), Feature())
    for context, answer in zip(CONTEXTS, answers, strict=True):
        ids = tokenizer(context)["input_ids"]
        whole = tokenizer(context + WORDS[0])["input_ids"]
        expected = sum(float(forward(model, whole)[t - 1, whole[t]]) for t in range(len(ids), len(whole)))
        # Activations are quantised by their range, which differs between a prompt alone and a batch.
        assert answer.log_probs[0] == pytest.approx(expected, rel=0.2, abs=0.5)
