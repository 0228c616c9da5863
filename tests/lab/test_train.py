"""Training, its loss, and the folder that it leaves."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from harness_ext.lab.checkpoints import save
from harness_ext.lab.languages.base import optimal_cross_entropy
from harness_ext.lab.languages.reviews import build_tokenizer, default_grammar
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.quad import IGNORED, QuadModel
from harness_ext.lab.train import (
    Blocks,
    TrainConfig,
    check_packing,
    cpu_threads,
    encode,
    pack,
    packed_batches,
    train,
    validation_loss,
)

SMALL = ModelConfig(width=16, depth=1, heads=2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with cpu_threads(1):
        yield


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(default_grammar(), max_length=64)


@pytest.fixture(scope="module")
def documents(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    reviews = default_grammar().sample_many(600, np.random.default_rng(0))
    return encode([review.document for review in reviews], tokenizer)


@pytest.fixture(scope="module")
def blocks(tokenizer: PreTrainedTokenizerBase, documents: list[list[int]]) -> Blocks:
    return pack(documents, end_of_text=tokenizer.eos_token_id, block_size=64)


def document_nats(model: PreTrainedModel, tokens: list[int]) -> list[float]:
    """-log p of every token but the first, by one forward pass without mask or padding."""
    with torch.no_grad():
        log_probs = model(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)
    return [-log_probs[place, token].item() for place, token in enumerate(tokens[1:])]


@settings(max_examples=200, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 9), max_size=9), max_size=9),
    block_size=st.integers(1, 12),
)
def test_pack_equals_a_plain_loop(documents: list[list[int]], block_size: int) -> None:
    tokens: list[int] = []
    numbers: list[int] = []
    for number, document in enumerate(documents):
        part = ([0] if number % 2 else []) + document + [0]
        tokens += part
        numbers += [number] * len(part)
    count = len(tokens) // block_size
    if count == 0:
        with pytest.raises(ValueError, match=f"at least {block_size} tokens.*got {len(tokens)}"):
            pack(documents, end_of_text=0, block_size=block_size)
        return
    blocks = pack(documents, end_of_text=0, block_size=block_size)
    assert blocks.tokens.shape == blocks.positions.shape == (count, block_size)
    assert blocks.tokens.ravel().tolist() == tokens[: count * block_size]
    for row in range(count):
        inside = numbers[row * block_size : (row + 1) * block_size]
        assert blocks.positions[row].tolist() == [place - inside.index(number) for place, number in enumerate(inside)]


def test_packed_documents_do_not_see_each_other(tokenizer: PreTrainedTokenizerBase, documents: list[list[int]]) -> None:
    """The first step's loss, which is measured before the weights change, equals that of separate forward passes."""
    end_of_text = tokenizer.eos_token_id
    whole = [end_of_text, *documents[0], end_of_text]
    parts = [[*documents[1], end_of_text], whole, documents[2][:7]]
    tokens = np.array([[token for part in parts for token in part]])
    positions = np.array([[place for part in parts for place in range(len(part))]])
    model = build_model(SMALL, tokenizer, seed=0)
    expected = np.mean([nats for part in parts for nats in document_nats(model, part)])
    result = train(model, Blocks(tokens, positions), TrainConfig(steps=1, batch_size=1), seed=0, show_progress=False)
    assert result.losses[0] == pytest.approx(expected, abs=1e-5)


def test_packed_targets_are_the_next_tokens_of_the_same_document(blocks: Blocks) -> None:
    batches = list(packed_batches(blocks, batch_size=5, device=torch.device("cpu")))
    assert sum(len(targets) for _, targets in batches) == len(blocks.tokens)
    rows = [(inputs["input_ids"][row], targets[row]) for inputs, targets in batches for row in range(len(targets))]
    for (tokens, targets), positions in zip(rows, blocks.positions, strict=True):
        assert tokens.shape == targets.shape
        for place in range(len(tokens)):
            is_last = place + 1 == len(tokens) or positions[place + 1] == 0
            assert targets[place] == (IGNORED if is_last else tokens[place + 1])


def test_the_quad_loss_of_packed_documents_is_that_of_separate_ones(
    tokenizer: PreTrainedTokenizerBase, documents: list[list[int]]
) -> None:
    parts = [documents[1], documents[2][:7]]
    tokens = np.array([[token for part in parts for token in part]])
    positions = np.array([[place for part in parts for place in range(len(part))]])
    model = QuadModel(build_model(SMALL, tokenizer, seed=0))
    with torch.no_grad():
        model.linear.copy_(torch.randn(model.linear.shape, generator=torch.Generator().manual_seed(0)))
    losses: list[float] = []
    with torch.no_grad():
        for part in parts:
            logits = model.features({"input_ids": torch.tensor([part])})[0] @ model.embedding.double().T
            losses += [
                float(0.5 * row.square().sum() - row[token]) for row, token in zip(logits[:-1], part[1:], strict=True)
            ]
    blocks, config = Blocks(tokens, positions), TrainConfig(steps=1, batch_size=1)
    result = train(model, blocks, config, seed=0, objective="quad", show_progress=False)
    assert result.losses[0] == pytest.approx(np.mean(losses), rel=1e-4)


def test_an_objective_that_does_not_fit_is_an_error(tokenizer: PreTrainedTokenizerBase, blocks: Blocks) -> None:
    model, config = build_model(SMALL, tokenizer, seed=0), TrainConfig(steps=1)
    with pytest.raises(KeyError, match=r"unknown objective 'mse'\. Known: cross_entropy, quad"):
        train(model, blocks, config, seed=0, objective="mse")
    with pytest.raises(ValueError, match=r"a lab\.quad\.QuadModel for the objective 'quad', got a GPT2LMHeadModel"):
        train(model, blocks, config, seed=0, objective="quad")
    quad = QuadModel(model)
    with pytest.raises(ValueError, match="a causal LM for the objective 'cross_entropy', got a QuadModel"):
        train(quad, blocks, config, seed=0)
    with pytest.raises(ValueError, match="a causal LM for the objective"):
        validation_loss(quad, [[1], [2]], end_of_text=0)
    with pytest.raises(KeyError, match="unknown objective 'mse'"):
        validation_loss(model, [[1], [2]], end_of_text=0, objective="mse")


def test_half_precision_trains_and_leaves_the_weights_as_they_are(
    tokenizer: PreTrainedTokenizerBase, blocks: Blocks
) -> None:
    config = TrainConfig(steps=3, batch_size=4)
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(SMALL, tokenizer, seed=0)
        losses[dtype] = train(model, blocks, config, seed=0, dtype=dtype, show_progress=False).losses
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses[torch.bfloat16] != losses[torch.float32]
    # 8 bits of a logit.
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], rel=1e-2)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "neox", "opt"])
def test_models_that_keep_packed_documents_apart_pass_the_check(family: str) -> None:
    check_packing(tiny_model(family), block_size=33)


def test_models_that_do_not_are_refused() -> None:
    mistral = tiny_model("mistral")  # with a window of 8 tokens
    check_packing(mistral, block_size=8)
    for model in (mistral, tiny_model("bloom"), tiny_model("mamba")):
        with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be trained on packed documents"):
            check_packing(model, block_size=33)


def test_training_lowers_the_loss_and_depends_on_the_seed_alone(
    tokenizer: PreTrainedTokenizerBase, documents: list[list[int]], blocks: Blocks
) -> None:
    config = TrainConfig(steps=40, batch_size=8)
    end_of_text = tokenizer.eos_token_id
    models, results = [], []
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for seed in (1, 1, 2):
        model = build_model(SMALL, tokenizer, seed=0)
        untrained = validation_loss(model, documents[:50], end_of_text=end_of_text).value
        results.append(train(model, blocks, config, seed=seed, show_progress=False))
        models.append(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert results[0].losses == results[1].losses
    assert results[0].losses != results[2].losses
    first, again = models[0].state_dict(), models[1].state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert (results[0].steps, results[0].tokens) == (40, 40 * 8 * 64)
    trained = validation_loss(models[0], documents[:50], end_of_text=end_of_text).value
    assert trained < untrained - 1
    assert not models[0].training


def test_training_goes_on_after_all_blocks_were_seen(tokenizer: PreTrainedTokenizerBase, blocks: Blocks) -> None:
    few = Blocks(blocks.tokens[:5], blocks.positions[:5])
    config = TrainConfig(steps=7, batch_size=2)
    result = train(build_model(SMALL, tokenizer, seed=0), few, config, seed=0, show_progress=False)
    assert len(result.losses) == 7
    with pytest.raises(ValueError, match=r"at least 6 blocks.*got 5"):
        train(build_model(SMALL, tokenizer, seed=0), few, TrainConfig(steps=1, batch_size=6), seed=0)


def test_training_stops_when_the_loss_is_not_finite(tokenizer: PreTrainedTokenizerBase, blocks: Blocks) -> None:
    model = build_model(SMALL, tokenizer, seed=0)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = math.nan
    with pytest.raises(FloatingPointError, match="became nan at step 0; lower learning_rate"):
        train(model, blocks, TrainConfig(steps=2, batch_size=2), seed=0, show_progress=False)


def test_learning_rate_rises_and_falls() -> None:
    config = TrainConfig(steps=100, warmup=0.1, final_fraction=0.2)
    factors = [config.rate_factor(step) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert factors[10] == 1
    assert all(left > right for left, right in pairwise(factors[10:]))
    assert factors[-1] == pytest.approx(0.2, abs=0.01)
    assert TrainConfig(steps=1).rate_factor(0) == 1
    with pytest.raises(ValueError, match="at least 1"):
        TrainConfig(steps=0)


def test_validation_loss_equals_that_of_separate_forward_passes(
    tokenizer: PreTrainedTokenizerBase, documents: list[list[int]]
) -> None:
    end_of_text = tokenizer.eos_token_id
    model = build_model(SMALL, tokenizer, seed=0)
    chosen = documents[:20]
    nats = [document_nats(model, [end_of_text, *document, end_of_text]) for document in chosen]
    for batch_size in (1, 7, 64):
        loss = validation_loss(model, chosen, end_of_text=end_of_text, batch_size=batch_size)
        assert loss.tokens == sum(len(document) + 1 for document in chosen)
        assert loss.value == pytest.approx(sum(map(sum, nats)) / loss.tokens, abs=1e-6)
        assert 0 < loss.stderr < 1


def test_a_model_without_knowledge_loses_the_log_of_the_vocabulary(
    tokenizer: PreTrainedTokenizerBase, documents: list[list[int]]
) -> None:
    model = build_model(SMALL, tokenizer, seed=0)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    loss = validation_loss(model, documents[:5], end_of_text=tokenizer.eos_token_id)
    assert loss.value == pytest.approx(math.log(len(tokenizer)), abs=1e-6)


def test_loss_and_entropy_count_the_same_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    grammar = default_grammar()
    reviews = grammar.sample_many(50, np.random.default_rng(1))
    documents = encode([review.document for review in reviews], tokenizer)
    loss = validation_loss(build_model(SMALL, tokenizer, seed=0), documents, end_of_text=tokenizer.eos_token_id)
    texts = [review.body + review.verdict for review in reviews]
    nats = -sum(logs.sum() for logs in grammar.log_probabilities_of(texts))
    assert optimal_cross_entropy(grammar, texts).value * loss.tokens == pytest.approx(nats)


def test_wrong_validation_documents_are_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    model = build_model(ModelConfig(width=16, depth=1, heads=2, context=8), tokenizer, seed=0)
    with pytest.raises(ValueError, match="at least 2 documents, got 1"):
        validation_loss(model, [[1]], end_of_text=0)
    validation_loss(model, [[1], [1] * 7], end_of_text=0)
    with pytest.raises(ValueError, match="has 9 tokens with its end of text; the context is 8"):
        validation_loss(model, [[1], [1] * 8], end_of_text=0)


def test_saved_folder_is_an_ordinary_model(
    tokenizer: PreTrainedTokenizerBase, documents: list[list[int]], tmp_path: Path
) -> None:
    model = build_model(SMALL, tokenizer, seed=0).eval()
    config = TrainConfig(steps=3)
    record = save(tmp_path / "model", model, tokenizer, {"seed": 0, "algorithm": config})
    assert record == json.loads((tmp_path / "model" / "lab.json").read_text())
    assert record["schema_version"] == 2
    assert record["algorithm"]["learning_rate"] == config.learning_rate
    assert record["versions"]["torch"]
    assert (tmp_path / "model" / "model.safetensors").is_file()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        loaded_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
        inputs = loaded_tokenizer("the acting was superb . this movie is", return_tensors="pt")
        assert (
            inputs["input_ids"].tolist()
            == tokenizer("the acting was superb . this movie is", return_tensors="pt")["input_ids"].tolist()
        )
        generated = loaded.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert generated.shape[1] <= inputs["input_ids"].shape[1] + 2
    with torch.no_grad():
        tokens = torch.tensor([documents[0]])
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_a_record_of_something_else_is_an_error(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"lab.json cannot hold a set"):
        save(tmp_path, build_model(SMALL, tokenizer, seed=0), tokenizer, {"seed": {1}})
    assert not (tmp_path / "lab.json").exists()


def test_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), cpu_threads(before + 1):
        1 / (torch.get_num_threads() - before - 1)
    assert torch.get_num_threads() == before
