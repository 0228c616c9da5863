"""The lookup-table predictor against `Language.next_word`, prefix by prefix, and through transformers and lm_eval."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds import World, a_world, corpus_config, evaluate, feature_probe, loss_task, natural, samples

from harness_ext.lab.languages import make_language
from harness_ext.lab.languages.base import (
    Language,
    optimal_cross_entropy,
    word_tokenizer,
    write_dataset,
    write_text,
)
from harness_ext.lab.languages.hmm import Hmm, random_hmm
from harness_ext.lab.languages.pcfg import random_pcfg
from harness_ext.lab.lookup import (
    FLOOR,
    LookupForCausalLM,
    possible_next_words,
    refuse_other_code,
    register_lookup,
    save_lookup,
)
from harness_ext.lab.quad import linear_head
from harness_ext.lab.train import cpu_threads, encode, validation_loss
from harness_ext.tasks import FlatnessTask

CONTEXT = 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with cpu_threads(1):
        yield


def tiny_hmm() -> Hmm:
    """Words, steps and lengths that cannot be: some prefixes have no p*, and some of p* is 0."""
    return Hmm(
        words=("a", "b", "c", "d"),
        length_probabilities=np.array([0.2, 0.0, 0.5, 0.3]),
        regime_probabilities=np.array([0.35, 0.65]),
        initial=np.array([[0.5, 0.5, 0.0], [0.1, 0.9, 0.0]]),
        transition=np.array(
            [
                [[0.7, 0.3, 0.0], [0.0, 0.4, 0.6], [1.0, 0.0, 0.0]],
                [[0.2, 0.8, 0.0], [0.6, 0.1, 0.3], [1.0, 0.0, 0.0]],
            ]
        ),
        emission=np.array([[0.7, 0.3, 0.0, 0.0], [0.2, 0.8, 0.0, 0.0], [0.0, 0.0, 0.4, 0.6]]),
    )


LANGUAGES = {
    "hmm": tiny_hmm(),
    "pcfg": random_pcfg(0, symbols=(2, 3), top_rules=3, words=6, word_sharing=1.5),
}


def load(folder: Path, language: Language, **kwargs: Any) -> LookupForCausalLM:
    if not folder.exists():
        save_lookup(folder, language, word_tokenizer(language.words, max_length=CONTEXT))
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **kwargs).eval()


@pytest.fixture(scope="module", params=list(LANGUAGES))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Language, Any]:
    """A language and its model in float64."""
    language = LANGUAGES[request.param]
    return language, load(tmp_path_factory.mktemp(request.param) / "model", language, dtype=torch.float64)


def expected_log_probabilities(language: Language, tokens: list[int]) -> np.ndarray:
    """One prefix after the other, by the definition."""
    end_of_text = len(language.words)
    rows = []
    for length in range(1, len(tokens) + 1):
        seen = tokens[:length]
        start = max((place + 1 for place, token in enumerate(seen) if token == end_of_text), default=0)
        prefix = [language.words[token] for token in seen[start:]]
        try:
            rows.append(np.log(np.maximum(language.next_word(prefix), FLOOR)))
        except ValueError:
            rows.append(np.full(end_of_text + 1, -math.log(end_of_text + 1)))
    return np.array(rows)


def logits_of(model: LookupForCausalLM, rows: list[list[int]], **kwargs: Any) -> np.ndarray:
    return model(input_ids=torch.tensor(rows), **kwargs).logits.numpy()


# -------------------------------------------------------------------------------------------------------- exactness


def test_logits_are_log_p_star(loaded: tuple[Language, Any]) -> None:
    """After an end of text and without one, at every place of documents of the language, in one batch."""
    language, model = loaded
    end_of_text = len(language.words)
    index = {word: token for token, word in enumerate(language.words)}
    rows: list[list[int]] = [[], [end_of_text]]
    for number, document in enumerate(language.sample(8, np.random.default_rng(0))):
        rows[number % 2] += [*(index[word] for word in document), end_of_text]
    shortest = min(map(len, rows))
    rows = [row[:shortest] for row in rows]
    found = logits_of(model, rows)
    for row, logits in zip(rows, found, strict=True):
        expected = expected_log_probabilities(language, row)
        # None of them is the answer to what cannot occur.
        assert (expected != expected[0, 0]).any(axis=1).all()
        np.testing.assert_allclose(logits, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.logaddexp.reduce(found, axis=-1), 0.0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_stream_of_tokens(loaded: tuple[Language, Any], data: st.DataObject) -> None:
    """Also what cannot occur, which is uniform until the next end of text, and rows that differ in what is possible."""
    language, model = loaded
    length = data.draw(st.integers(1, 9))
    token = st.integers(0, len(language.words))
    rows = data.draw(st.lists(st.lists(token, min_size=length, max_size=length), min_size=1, max_size=5))
    for row, logits in zip(rows, logits_of(model, rows), strict=True):
        np.testing.assert_allclose(logits, expected_log_probabilities(language, row), rtol=1e-12, atol=1e-12)


def test_every_document_of_up_to_five_words() -> None:
    """In one call: the batch has every mixture of what is possible and what is not."""
    language = tiny_hmm()
    documents = [document for length in range(6) for document in product(language.words, repeat=length)]
    found = possible_next_words(language, documents)
    impossible = 0
    for document, table in zip(documents, found, strict=True):
        for length, row in enumerate(table):
            np.testing.assert_allclose(row, language.next_word(document[:length]), rtol=1e-12, atol=1e-15)
        if len(table) <= len(document):
            impossible += 1
            with pytest.raises(ValueError, match="probability is 0"):
                language.next_word(document[: len(table)])
    assert 0 < impossible < len(documents)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_padding_changes_nothing(loaded: tuple[Language, Any], data: st.DataObject) -> None:
    language, model = loaded
    token = st.integers(0, len(language.words))
    row = data.draw(st.lists(token, min_size=1, max_size=7))
    alone = logits_of(model, [row])[0]
    left, right = data.draw(st.lists(token, max_size=4)), data.draw(st.lists(token, max_size=4))
    # On the right it needs no mask, as the engine pads.
    # Documents of other lengths are multiplied in other blocks, which rounds otherwise.
    np.testing.assert_allclose(logits_of(model, [row + right])[0, : len(row)], alone, rtol=1e-12)
    mask = torch.tensor([[0] * len(left) + [1] * len(row) + [0] * len(right)])
    padded = logits_of(model, [left + row + right], attention_mask=mask)[0]
    np.testing.assert_allclose(padded[len(left) : len(left) + len(row)], alone, rtol=1e-12)
    uniform = -math.log(len(language.words) + 1)
    np.testing.assert_allclose(padded[mask[0].numpy() == 0], uniform, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-7)])
def test_the_loss_is_the_entropy(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    """Excess 0 but for rounding; the floor has no part in it that could be seen."""
    language = random_hmm(0, states=4, words=12, lengths=(3, 9))
    model = load(tmp_path / "model", language, dtype=dtype)
    documents = language.sample(300, np.random.default_rng(1))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=True)
    loss = validation_loss(
        model, encode([" ".join(document) for document in documents], tokenizer), end_of_text=tokenizer.eos_token_id
    )
    entropy = optimal_cross_entropy(language, documents)
    assert loss.value == pytest.approx(entropy.value, abs=tolerance)
    # Σ max(p*, FLOOR) is the only thing that the floor adds.
    assert math.log1p((len(language.words) + 1) * FLOOR) < 1e-28


# ------------------------------------------------------------------------------------------------ transformers


def test_it_is_a_pair_of_f_and_the_identity(tmp_path: Path) -> None:
    model = load(tmp_path / "model", tiny_hmm())
    inputs = torch.tensor([[4, 0, 1]])
    assert model.dtype == torch.float32
    assert torch.equal(linear_head(model).weight, torch.eye(5))
    output = model(input_ids=inputs, output_hidden_states=True)
    (states,) = output.hidden_states
    assert torch.equal(states, model.base_model(input_ids=inputs).last_hidden_state)
    assert torch.equal(states, output.logits)
    assert torch.equal(model(input_ids=inputs, logits_to_keep=1).logits, output.logits[:, -1:])


def test_labels_give_the_mean_loss(tmp_path: Path) -> None:
    language = tiny_hmm()
    model = load(tmp_path / "model", language, dtype=torch.float64)
    tokens = torch.tensor([[4, 0, 1, 0, 4]])
    loss = model(input_ids=tokens, labels=tokens).loss
    # transformers' loss is float32.
    assert float(loss) == pytest.approx(-language.log_probabilities(("a", "b", "a")).mean(), rel=1e-6)


def test_it_is_saved_again_and_loads_in_this_process_without_trust(tmp_path: Path) -> None:
    language = random_hmm(3, states=3, words=7, lengths=(2, 5))
    model = load(tmp_path / "model", language)
    model.save_pretrained(tmp_path / "copy")
    register_lookup()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    assert type(again) is LookupForCausalLM
    assert again.config.max_position_embeddings == CONTEXT
    for table in ("initial", "transition", "emission", "length_probabilities"):
        np.testing.assert_array_equal(getattr(again.model.language, table), getattr(language, table))
    assert not again.lm_head.weight.requires_grad


def test_a_folder_written_after_one_was_loaded_has_the_same_files(tmp_path: Path) -> None:
    language = tiny_hmm()
    for name in ("first", "second"):
        save_lookup(tmp_path / name, language, language.tokenizer(max_length=32))
        load(tmp_path / name, language)
        refuse_other_code(tmp_path / name)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "second")
    )
    assert first == second


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("modeling_lookup.py", "import os"),
        ("tokenization.py", ""),
        ("deeper/code.py", ""),
        ("config.json", '{"auto_map": {"AutoModelForCausalLM": "someone/else--modeling.Model"}}'),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": "code.Tokenizer"}}'),
    ],
)
def test_code_of_others_is_refused(tmp_path: Path, name: str, text: str) -> None:
    language = tiny_hmm()
    save_lookup(tmp_path, language, language.tokenizer(max_length=32))
    refuse_other_code(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name}: expected .* Remove"):
        refuse_other_code(tmp_path)


def test_generate_writes_documents_of_the_language(tmp_path: Path) -> None:
    language = tiny_hmm()
    model = load(tmp_path / "model", language)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = model.generate(torch.full((50, 1), 4), do_sample=True, top_k=0, max_new_tokens=6)
    lengths = set()
    for row in found.tolist():
        words = [language.words[token] for token in row[1 : row.index(4, 1)]]
        assert np.isfinite(language.log_probabilities(words)).all()
        lengths.add(len(words))
    assert lengths == {1, 3, 4}


def test_a_greedy_word_after_a_padded_prompt(tmp_path: Path) -> None:
    language = tiny_hmm()
    model = load(tmp_path / "model", language)
    prompts, mask = torch.tensor([[4, 4, 0], [4, 0, 1]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    found = model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=1)[:, -1].tolist()
    assert found == [language.next_word(prefix).argmax() for prefix in (("a",), ("a", "b"))]


# ----------------------------------------------------------------------------------------------------------- refusals


def test_a_weight_that_requires_a_gradient(tmp_path: Path) -> None:
    model = load(tmp_path / "model", tiny_hmm())
    model.requires_grad_(True)
    with pytest.raises(TypeError, match="no trained parameters"):
        model(input_ids=torch.tensor([[4]]))


def test_a_mask_between_tokens_and_unknown_ids(tmp_path: Path) -> None:
    model = load(tmp_path / "model", tiny_hmm())
    with pytest.raises(ValueError, match=r"shape of input_ids, \(1, 2\), got \(1, 1, 2, 2\)"):
        model(input_ids=torch.tensor([[4, 0]]), attention_mask=torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match="from 0 to 4, got 0 to 5"):
        model(input_ids=torch.tensor([[0, 5]]))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    language = tiny_hmm()
    with pytest.raises(ValueError, match=r"one token for each word of the language 'hmm'; it has none for 'd'"):
        save_lookup(tmp_path / "model", language, word_tokenizer(("a", "b", "c"), max_length=CONTEXT))
    pieces = make_language("reviews").tokenizer(max_length=CONTEXT)
    with pytest.raises(ValueError, match="none for 'bbb'"):
        save_lookup(tmp_path / "model", replace(language, words=("a", "bbb", "c", "d")), pieces)
    pieces.eos_token = None
    with pytest.raises(ValueError, match="without an end of text"):
        save_lookup(tmp_path / "model", language, pieces)
    assert not (tmp_path / "model").exists()


def test_a_tokenizer_in_another_order(tmp_path: Path) -> None:
    language = tiny_hmm()
    save_lookup(tmp_path / "model", language, word_tokenizer(("d", "b", "e", "a", "c"), max_length=CONTEXT))
    model = load(tmp_path / "model", language, dtype=torch.float64)
    expected = language.next_words([("a", "b")])[0]
    found = np.exp(logits_of(model, [[5, 3, 1]])[0])
    np.testing.assert_allclose(found[:, [3, 1, 4, 0, 5]], np.maximum(expected, FLOOR), rtol=1e-12)
    np.testing.assert_allclose(found[:, 2], FLOOR, rtol=1e-12)


def test_words_with_a_blank_and_without(tmp_path: Path) -> None:
    """A tokenizer of the GPT-2 kind has two tokens for a word; the wrong one cannot occur."""
    language = make_language("reviews")
    tokenizer = language.tokenizer(max_length=64)
    save_lookup(tmp_path / "model", language, tokenizer)
    model = load(tmp_path / "model", language, dtype=torch.float64)
    documents = language.sample(20, np.random.default_rng(0))
    ids = encode([" ".join(document) for document in documents], tokenizer)
    for document, tokens in zip(documents, ids, strict=True):
        targets = [*tokens, tokenizer.eos_token_id]
        logits = logits_of(model, [[tokenizer.eos_token_id, *tokens]])[0]
        found = logits[np.arange(len(targets)), targets]
        np.testing.assert_allclose(found, language.log_probabilities(document), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(np.logaddexp.reduce(logits, axis=1), 0.0, atol=1e-12)
    with_blank = tokenizer(" " + documents[0][0])["input_ids"]
    logits = logits_of(model, [[*with_blank, *ids[0][1:3], tokenizer.eos_token_id, *ids[0][:2]]])[0]
    np.testing.assert_allclose(logits[:3], -math.log(len(tokenizer)), rtol=1e-12)
    assert (logits[3:].max(axis=1) > math.log(1e-3)).all()
    assert (logits[3:].min(axis=1) == math.log(FLOOR)).all()


def test_a_configuration_without_a_language() -> None:
    from harness_ext.lab.lookup import LookupConfig

    with pytest.raises(ValueError, match="no language"):
        LookupForCausalLM(LookupConfig(vocab_size=5))


# -------------------------------------------------------------------------------------------------------------- lm_eval

PROMPT = '{%- set label_words = {"negative": ["w0", "w1", "w2"], "positive": ["w3", "w4"]} -%}\n{{ text }}'


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with a_world(tmp_path_factory.mktemp("world")) as made:
        made.add_prompt("hmm/next_word", PROMPT)
        made.add_prompt("hmm/then", f"{PROMPT} w1")
        yield made


@pytest.fixture(scope="module")
def language(world: World) -> Hmm:
    """Its task `hmm_switch` and its text lie in the mirror, its model in `model`."""
    made = random_hmm(1, states=4, words=9, lengths=(4, 8))
    rng = np.random.default_rng(0)
    task = next(task for task in made.tasks if task.name == "hmm_switch")
    write_dataset(world.mirror, task, {"train": task.sample(60, rng), "test": task.sample(40, rng)})
    write_text(world.mirror, made, made.sample(40, rng))
    save_lookup(world.folder / "model", made, word_tokenizer(made.words, max_length=CONTEXT))
    return made


@pytest.fixture(scope="module")
def lm(world: World, language: Hmm) -> Any:
    from lm_eval.models.huggingface import HFLM

    folder = str(world.folder / "model")
    return HFLM(pretrained=folder, trust_remote_code=True, device="cpu", batch_size=8)


def test_lm_eval_scores_are_p_star(lm: Any, language: Hmm) -> None:
    options = {"dataset_path": "harness_ext/hmm_switch", "metadata": {"prompt": "hmm/next_word"}}
    results = evaluate(lm, natural(**options))
    logged = samples(results, "natural_films")
    assert len(logged) == 40
    right = []
    for sample in logged:
        p = language.next_word(sample["doc"]["text"].split())
        right.append((p[:3].sum() < p[3:5].sum()) == sample["doc"]["label"])
    assert results["results"]["natural_films"]["acc,none"] == pytest.approx(np.mean(right))


def test_lm_eval_probes_quad_and_loss_run(lm: Any, language: Hmm) -> None:
    kinds = {"probe": "hmm/then", "probe_cmean": "hmm/next_word", "probe_full": "hmm/next_word", "quad": "hmm/then"}
    tasks = [
        feature_probe(kind, {}, dataset_path="harness_ext/hmm_switch", metadata={"prompt": prompt})
        for kind, prompt in kinds.items()
    ]
    text = loss_task(dataset_path="harness_ext/hmm_text", metadata={"corpus": {"join": None, "end_of_text": True}})
    results = evaluate(lm, *tasks, text)["results"]
    for kind in kinds:
        assert 0.4 < results[f"{kind}_films"]["acc,none"] <= 1.0
    documents = [tuple(sample["text"].split()) for sample in text.dataset["test"]]
    assert results["loss_lines"]["loss,none"] == pytest.approx(
        optimal_cross_entropy(language, documents).value, abs=1e-6
    )


def test_flatness_ends_in_one_clear_message(lm: Any, language: Hmm) -> None:
    corpus = {"dataset_path": "harness_ext/hmm_text", "metadata": {"corpus": {"join": None, "end_of_text": True}}}
    with pytest.raises(TypeError, match="A lookup table has no trained parameters") as caught:
        evaluate(lm, FlatnessTask(config=corpus_config("flatness", **corpus)))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
