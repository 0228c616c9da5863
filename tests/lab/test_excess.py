"""The exact excess against a loop over prefixes, one forward pass each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness_ext.lab.excess import ExactLoss
from harness_ext.lab.languages import make_language
from harness_ext.lab.languages.base import END_OF_TEXT, optimal_cross_entropy
from harness_ext.lab.languages.hmm import random_hmm
from harness_ext.lab.lookup import save_lookup
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.train import cpu_threads, encode, validation_loss

SMALL = ModelConfig(width=16, depth=1, heads=2, context=64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with cpu_threads(1):
        yield


LANGUAGES = {
    "hmm": lambda: random_hmm(0, states=4, words=9, lengths=(3, 7)),
    "pcfg": lambda: make_language("pcfg"),
    "reviews": lambda: make_language("reviews"),
}


@pytest.fixture(scope="module", params=list(LANGUAGES))
def language(request: pytest.FixtureRequest) -> Any:
    return LANGUAGES[request.param]()


def one_by_one(language: Any, model: Any, tokenizer: Any, documents: Any) -> np.ndarray:
    """Excess, loss and tokens of each document, (n, 3): prefix after prefix, text through the tokenizer."""
    rows = []
    for document in documents:
        excess, loss = 0.0, 0.0
        for place in range(len(document) + 1):
            prefix, words = document[:place], [*document, END_OF_TEXT]
            text = END_OF_TEXT + " ".join(prefix)
            with torch.no_grad():
                ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
                assert ids.shape[1] == place + 1
                log_probs = model(ids).logits[0, -1].double().log_softmax(dim=-1).numpy()
            blank = " " if place else ""
            tokens = [
                tokenizer(END_OF_TEXT if word == END_OF_TEXT else blank + word, add_special_tokens=False)["input_ids"]
                for word in [*language.words, END_OF_TEXT]
            ]
            truth = language.next_word(prefix)
            for word, probability, ids_of_word in zip([*language.words, END_OF_TEXT], truth, tokens, strict=True):
                if probability > 0:
                    [token] = ids_of_word
                    excess += probability * (math.log(probability) - log_probs[token])
                    if word == words[place]:
                        loss -= log_probs[token]
        rows.append((excess, loss, len(document) + 1))
    return np.array(rows)


def test_the_excess_equals_a_loop_over_prefixes(language: Any) -> None:
    tokenizer = language.tokenizer(max_length=64)
    model = build_model(SMALL, tokenizer, seed=0).eval()
    documents = language.sample(6, np.random.default_rng(0))
    rows = one_by_one(language, model, tokenizer, documents)
    found = ExactLoss(language, documents).measure(model)
    assert found.tokens == rows[:, 2].sum()
    for estimate, column in ((found.excess, rows[:, 0]), (found.validation_loss, rows[:, 1])):
        value = column.sum() / rows[:, 2].sum()
        assert estimate.value == pytest.approx(value, rel=1e-5)
        spread = np.sqrt(np.square(column - value * rows[:, 2]).sum() / (len(rows) - 1))
        assert estimate.stderr == pytest.approx(spread / math.sqrt(len(rows)) / rows[:, 2].mean(), rel=1e-3)
    assert found.excess.value > 0.1


def test_the_loss_equals_that_of_training_and_the_excess_is_what_is_over_the_entropy(language: Any) -> None:
    tokenizer = language.tokenizer(max_length=64)
    model = build_model(SMALL, tokenizer, seed=0)
    documents = language.sample(400, np.random.default_rng(1))
    exact = ExactLoss(language, documents)
    assert len(exact) == 400
    found = exact.measure(model)
    tokens = encode([" ".join(words) for words in documents], tokenizer)
    loss = validation_loss(model, tokens, end_of_text=tokenizer.eos_token_id)
    assert found.tokens == loss.tokens
    assert found.validation_loss.value == pytest.approx(loss.value, rel=1e-6)
    assert found.validation_loss.stderr == pytest.approx(loss.stderr, rel=1e-4)
    # Both estimate the same excess. Their difference is at most as noisy as both losses: 5 standard errors, 6e-7.
    entropy = optimal_cross_entropy(language, documents)
    difference = found.validation_loss.value - entropy.value - found.excess.value
    assert abs(difference) < 5 * math.hypot(found.validation_loss.stderr, entropy.stderr)
    assert found.excess.stderr < found.validation_loss.stderr


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_batches_and_padding_change_nothing_but_rounding(language: Any, batch_size: int) -> None:
    model = build_model(SMALL, language.tokenizer(max_length=64), seed=0)
    documents = language.sample(40, np.random.default_rng(2))
    expected = ExactLoss(language, documents).measure(model)
    found = ExactLoss(language, documents[::-1]).measure(model, batch_size=batch_size)
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(np.array(found[:2]), np.array(expected[:2]), rtol=1e-5)
    assert not model.training


def test_the_language_itself_has_no_excess(language: Any, tmp_path: Path) -> None:
    tokenizer = language.tokenizer(max_length=64)
    save_lookup(tmp_path, language, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    documents = language.sample(60, np.random.default_rng(3))
    found = ExactLoss(language, documents).measure(model)
    # Rounding of float32 logarithms.
    assert found.excess.value == pytest.approx(0, abs=2e-6)
    assert found.validation_loss.value == pytest.approx(optimal_cross_entropy(language, documents).value, rel=1e-5)


def test_some_of_the_documents_stand_for_all() -> None:
    language = LANGUAGES["hmm"]()
    model = build_model(SMALL, language.tokenizer(max_length=64), seed=0)
    exact = ExactLoss(language, language.sample(400, np.random.default_rng(4)))
    whole, some = exact.measure(model), exact.measure(model, documents=50)
    assert some.tokens == pytest.approx(whole.tokens / 8, rel=0.02)  # of all lengths, since every 8th is taken
    assert abs(some.excess.value - whole.excess.value) < 5 * some.excess.stderr
    assert some.excess.stderr == pytest.approx(whole.excess.stderr * math.sqrt(8), rel=0.5)
    for count in (400, 10_000, None):
        assert exact.measure(model, documents=count) == whole


def test_what_does_not_fit_is_an_error() -> None:
    language = LANGUAGES["hmm"]()
    documents = language.sample(20, np.random.default_rng(5))
    with pytest.raises(ValueError, match="at least 2 documents, got 1"):
        ExactLoss(language, documents[:1])
    exact = ExactLoss(language, documents)
    longest = 1 + max(map(len, documents))
    short = ModelConfig(width=16, depth=1, heads=2, context=longest - 1)
    with pytest.raises(ValueError, match=f"has {longest} tokens with its end of text; the context is {longest - 1}"):
        exact.measure(build_model(short, language.tokenizer(max_length=64), seed=0))
    smaller = random_hmm(0, states=4, words=5).tokenizer(max_length=64)
    with pytest.raises(ValueError, match="the language has 10 tokens, the model 6; they do not belong together"):
        exact.measure(build_model(SMALL, smaller, seed=0))
