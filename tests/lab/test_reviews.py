"""The reviews language against enumeration of a small grammar, and its sampler against its probabilities."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from harness_ext.lab.languages import reviews as reviews_module
from harness_ext.lab.languages.base import (
    END_OF_TEXT,
    BayesAccuracy,
    bayes_accuracy,
    optimal_cross_entropy,
    write_dataset,
    write_text,
)
from harness_ext.lab.languages.reviews import (
    HiddenVariableTask,
    Review,
    ReviewGrammar,
    Slot,
    Template,
    build_tokenizer,
    default_grammar,
    fixed_reviews,
)

# Standard normal quantile: the probability that |z| exceeds it is 1e-6.
Z_ONE_IN_A_MILLION = 4.892


@pytest.fixture(scope="module")
def grammar() -> ReviewGrammar:
    return default_grammar()


@pytest.fixture(scope="module")
def tokenizer(grammar: ReviewGrammar) -> PreTrainedTokenizerBase:
    return build_tokenizer(grammar, max_length=64)


def small_grammar() -> ReviewGrammar:
    """Two topics, bodies of one or two sentences, words shared by slots, and two templates that write "it was odd ."."""
    tone = Slot(
        ("bright", "odd", "grim"), np.array([[[0.1, 0.3, 0.6], [0.2, 0.2, 0.6]], [[0.7, 0.2, 0.1], [0.5, 0.5, 0]]])
    )
    place = Slot(
        ("sea", "odd", "moor"), np.array([[[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]], [[0.6, 0.1, 0.3], [0, 0.1, 0.9]]])
    )
    verdict = Slot(("good", "bad"), np.array([[[0.1, 0.9], [0.2, 0.8]], [[0.8, 0.2], [0.9, 0.1]]]))
    return ReviewGrammar(
        topics=("shore", "hill"),
        sentiment_probabilities=np.array([0.4, 0.6]),
        topic_probabilities=np.array([0.7, 0.3]),
        length_probabilities=np.array([0.55, 0.45]),
        body=(
            Template(("it", "was", "{tone}", "."), 0.5),
            Template(("it", "was", "{place}", "."), 0.3),
            Template(("{place}", "and", "{tone}", "."), 0.2),
        ),
        verdict=(Template(("so", "{verdict}", "."), 0.75), Template(("{verdict}", "it", "is", "."), 0.25)),
        slots={"tone": tone, "place": place, "verdict": verdict},
        cues={"sentiment": ("so",), "topic": ("it", "was")},
    )


def document(review: Review) -> tuple[str, ...]:
    return review.body + review.verdict


def bayes_of_sentiment(grammar: ReviewGrammar, reviews: Sequence[Review]) -> BayesAccuracy:
    task = grammar.tasks[0]
    return bayes_accuracy(task, [task.example(review) for review in reviews])


def sentences(grammar: ReviewGrammar, template: Template, s: int, t: int) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every way to fill a template, with its probability."""
    choices = []
    for part in template.parts:
        if part.startswith("{"):
            slot = grammar.slots[part.strip("{}")]
            choices.append(list(zip(slot.words, slot.probabilities[s, t], strict=True)))
        else:
            choices.append([(part, 1.0)])
    for choice in itertools.product(*choices):
        yield tuple(word for word, _ in choice), template.probability * float(np.prod([p for _, p in choice]))


def enumerate_documents(grammar: ReviewGrammar) -> dict[tuple[tuple[str, ...], tuple[str, ...]], np.ndarray]:
    """Return p(sentiment, topic, body, verdict) as (S, T) arrays by running every derivation."""
    joint: dict = {}
    shape = (2, len(grammar.topics))
    for s, t in np.ndindex(*shape):
        prior = grammar.sentiment_probabilities[s] * grammar.topic_probabilities[t]
        one = [pair for template in grammar.body for pair in sentences(grammar, template, s, t)]
        closing = [pair for template in grammar.verdict for pair in sentences(grammar, template, s, t)]
        for length, length_probability in enumerate(grammar.length_probabilities, start=1):
            for *body, end in itertools.product(*[one] * length, closing):
                key = (sum((words for words, _ in body), ()), end[0])
                probability = prior * length_probability * np.prod([p for _, p in body]) * end[1]
                joint.setdefault(key, np.zeros(shape))[s, t] += probability
    return joint


def test_probabilities_equal_those_of_enumeration() -> None:
    grammar = small_grammar()
    joint = enumerate_documents(grammar)
    assert sum(table.sum() for table in joint.values()) == pytest.approx(1.0, abs=1e-12)
    of_document = {body + verdict: table.sum() for (body, verdict), table in joint.items() if table.any()}
    logs = grammar.log_probabilities_of(list(of_document))
    np.testing.assert_allclose([row.sum() for row in logs], np.log(list(of_document.values())), rtol=0, atol=1e-12)
    of_body: dict = {}
    for (body, _), table in joint.items():
        of_body[body] = of_body.get(body, 0) + table
    of_body = {body: table / table.sum() for body, table in of_body.items() if table.any()}
    np.testing.assert_allclose(grammar.posteriors(list(of_body)), list(of_body.values()), rtol=0, atol=1e-12)
    for number, (body, table) in enumerate(of_body.items()):
        if number % 20 == 0:
            for axis, task in enumerate(grammar.tasks):
                np.testing.assert_allclose(task.posterior(body), table.sum(axis=1 - axis), rtol=0, atol=1e-12)


def test_next_words_equal_those_of_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = small_grammar()
    column = {word: index for index, word in enumerate(grammar.words)}
    after: dict[tuple[str, ...], np.ndarray] = {}
    possible = {body + verdict: table.sum() for (body, verdict), table in enumerate_documents(grammar).items()}
    possible = {words: p for words, p in possible.items() if p > 0}
    for words, p in possible.items():
        for t in range(len(words) + 1):
            counts = after.setdefault(words[:t], np.zeros(len(column) + 1))
            counts[column[words[t]] if t < len(words) else -1] += p
    chosen = list(possible)[::7]
    tables = grammar.next_words(chosen)
    monkeypatch.setattr(reviews_module, "_CHUNK", 3)
    in_small_batches = grammar.next_words(chosen)
    for words, table, again in zip(chosen, tables, in_small_batches, strict=True):
        expected = np.array([after[words[:t]] / after[words[:t]].sum() for t in range(len(words) + 1)])
        np.testing.assert_allclose(table, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(again, table, rtol=0, atol=1e-14)
    for words in chosen[::50]:
        for t in range(len(words) + 1):
            np.testing.assert_allclose(
                grammar.next_word(words[:t]), after[words[:t]] / after[words[:t]].sum(), rtol=0, atol=1e-12
            )
    assert grammar.next_words([]) == grammar.log_probabilities_of([]) == []


@pytest.mark.parametrize(
    "prefix",
    [
        "odd so",
        "it was odd so",
        "so good .",  # a verdict alone
        "it was odd . so good . it",  # after the verdict
        "it was odd . it was odd . it",  # a third sentence that is no verdict
    ],
)
def test_prefixes_that_cannot_occur(prefix: str) -> None:
    with pytest.raises(ValueError, match="not a text of this language"):
        small_grammar().next_word(prefix.split())


def test_sampler_follows_the_probabilities() -> None:
    """Chi-square test of documents and hidden variables; false-alarm probability 1e-6 (the seed is fixed)."""
    grammar = small_grammar()
    count = 20_000
    cells = {
        (s, t, body, verdict): count * table[s, t]
        for (body, verdict), table in enumerate_documents(grammar).items()
        for s, t in np.ndindex(*table.shape)
    }
    reviews = grammar.sample_many(count, np.random.default_rng(0))
    seen = Counter((review.sentiment, review.topic, review.body, review.verdict) for review in reviews)
    assert all(cells[cell] > 0 for cell in seen)
    large = [cell for cell, expected in cells.items() if expected >= 10]
    expected = np.array([cells[cell] for cell in large] + [sum(e for e in cells.values() if e < 10)])
    observed = np.array([seen[cell] for cell in large])
    observed = np.append(observed, count - observed.sum())
    assert ((observed - expected) ** 2 / expected).sum() < chi2.isf(1e-6, df=len(expected) - 1)


def test_bayes_accuracy_and_entropy_equal_those_of_enumeration() -> None:
    """Each within 4.892 standard errors: false-alarm probability 1e-6 each (the seed is fixed)."""
    grammar = small_grammar()
    joint = enumerate_documents(grammar)
    of_body: dict = {}
    for (body, _), table in joint.items():
        of_body[body] = of_body.get(body, 0) + table.sum(axis=1)
    exact_accuracy = sum(table.max() for table in of_body.values())
    exact_nats = -sum(table.sum() * np.log(table.sum()) for table in joint.values() if table.any())
    exact_length = sum(table.sum() * (len(body) + len(verdict) + 1) for (body, verdict), table in joint.items())
    count = 5000
    reviews = grammar.sample_many(count, np.random.default_rng(1))
    measured = bayes_of_sentiment(grammar, reviews)
    stderr = np.sqrt(exact_accuracy * (1 - exact_accuracy) / count)
    assert abs(measured.accuracy - exact_accuracy) < Z_ONE_IN_A_MILLION * stderr
    assert abs(measured.expected - exact_accuracy) < Z_ONE_IN_A_MILLION * stderr  # its own is smaller
    estimate = optimal_cross_entropy(grammar, [document(review) for review in reviews])
    assert abs(estimate.value - exact_nats / exact_length) < Z_ONE_IN_A_MILLION * estimate.stderr
    assert estimate.stderr < 0.01


def test_bayes_accuracy_of_the_demo_is_between_90_and_95_percent_and_agrees_with_another_sample(
    grammar: ReviewGrammar,
) -> None:
    """Two independent estimates of one number; false-alarm probability 1e-6 (the seeds are fixed)."""
    count = 4000
    expected = bayes_of_sentiment(grammar, grammar.sample_many(count, np.random.default_rng(2))).expected
    accuracy = bayes_of_sentiment(grammar, grammar.sample_many(count, np.random.default_rng(3))).accuracy
    # A variable in [0, 1] of mean m has a variance of at most m (1 - m), so the same bound serves for both.
    stderr = np.sqrt(2 * accuracy * (1 - accuracy) / count)
    assert abs(expected - accuracy) < Z_ONE_IN_A_MILLION * stderr
    assert 0.90 < expected < 0.95


def test_posterior_is_calibrated(grammar: ReviewGrammar) -> None:
    """Sum of label minus posterior, over its standard deviation, for all and for doubtful bodies; 2e-6 in all."""
    reviews = grammar.sample_many(4000, np.random.default_rng(4))
    positive = grammar.tasks[0].posteriors([review.body for review in reviews])[:, 1]
    labels = np.array([review.sentiment for review in reviews])
    for chosen in (np.ones(len(reviews), dtype=bool), np.abs(positive - 0.5) < 0.4):
        gap = (labels - positive)[chosen].sum() / np.sqrt((positive * (1 - positive))[chosen].sum())
        assert abs(gap) < Z_ONE_IN_A_MILLION


@pytest.mark.parametrize(
    ("body", "low", "high"),
    [
        ("the acting was superb .", 0.9, 1),
        ("the acting was clumsy .", 0, 0.1),
        ("the acting was not superb .", 0, 0.1),
        ("my brother found the acting superb .", 0.5, 0.5),  # another person's opinion says nothing
        ("we saw it at the cinema on monday .", 0.5, 0.5),
    ],
)
def test_posterior_is_that_of_the_meaning(grammar: ReviewGrammar, body: str, low: float, high: float) -> None:
    assert low - 1e-12 <= grammar.tasks[0].posterior(body.split())[1] <= high + 1e-12


def test_sampling_depends_on_the_generator_alone(grammar: ReviewGrammar) -> None:
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    first = grammar.sample_many(20, np.random.default_rng(5))
    assert (np.random.get_state()[1] == state).all()
    np.random.seed(1)
    assert default_grammar().sample_many(30, np.random.default_rng(5))[:20] == first
    assert grammar.sample_many(20, np.random.default_rng(6)) != first


def test_sampling_can_leave_bodies_out() -> None:
    grammar = small_grammar()
    left_out = {review.body for review in grammar.sample_many(20, np.random.default_rng(7))}
    others = grammar.sample_many(200, np.random.default_rng(8), without=left_out)
    assert len(others) == 200
    assert not left_out & {review.body for review in others}


def test_every_review_fits_the_demo_model(grammar: ReviewGrammar) -> None:
    longest = max(len(template.parts) for template in grammar.body) * len(grammar.length_probabilities)
    assert longest + max(len(template.parts) for template in grammar.verdict) + 2 <= 64


@pytest.mark.parametrize(
    "words",
    [
        "the acting was great .",
        "the acting was superb",
        "",
        "this movie is great .",
        "the acting was superb . this movie is great .",
        "the acting was superb . " * 5,
    ],
)
def test_what_is_no_body_is_an_error(grammar: ReviewGrammar, words: str) -> None:
    with pytest.raises(ValueError, match=r"not a body of this language, 1 to 4 .*without the verdict: '"):
        grammar.tasks[0].posterior(words.split())


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            "the acting was superb . the plot was dull .",
            r"probability is 0: 'the acting was superb \. the plot was dull \.'",
        ),
        ("this movie is great .", "probability is 0"),
        ("the cat was superb .", "'cat' is no word of this language"),
    ],
)
def test_a_document_is_a_body_and_a_verdict(grammar: ReviewGrammar, document: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grammar.log_probabilities(document.split())


def test_bodies_of_the_topic_can_go_on() -> None:
    """The cue of the small grammar's topic begins a body sentence, of which there are two at most."""
    grammar = small_grammar()
    sentiment, topic = grammar.tasks
    assert (sentiment.name, topic.name) == ("reviews", "reviews_topic")
    assert topic.classes == grammar.topics
    rng = np.random.default_rng(12)
    assert {example.words.count(".") for example in topic.sample(200, rng)} == {1}
    assert {example.words.count(".") for example in sentiment.sample(200, rng)} == {1, 2}
    assert grammar.next_words([(*example.words, *topic.cue) for example in topic.sample(20, rng)])
    one_sentence = replace(grammar, length_probabilities=np.array([1.0, 0.0]))
    assert [task.variable for task in one_sentence.tasks] == ["sentiment"]
    with pytest.raises(ValueError, match="variable must be one of sentiment, topic, got 'length'"):
        HiddenVariableTask(grammar, "length")


def test_the_topic_is_calibrated_and_leaves_room(grammar: ReviewGrammar) -> None:
    """Hits against their probabilities given the bodies: false-alarm probability 1e-6 (the seed is fixed)."""
    task = grammar.tasks[1]
    examples = task.sample(3000, np.random.default_rng(13))
    result = bayes_accuracy(task, examples)
    sure = task.posteriors([example.words for example in examples]).max(axis=1)
    gap = (result.accuracy - result.expected) * len(sure)
    assert abs(gap) < Z_ONE_IN_A_MILLION * math.sqrt((sure * (1 - sure)).sum())
    # 0.52, with a standard error below 0.01; topics are uniform.
    assert 0.45 < result.expected < 0.6


def test_json_makes_the_same_language_again(grammar: ReviewGrammar) -> None:
    for language in (grammar, small_grammar()):
        data = language.to_dict()
        again = ReviewGrammar.from_dict(json.loads(json.dumps(data)))
        assert again.to_dict() == data
        rng = np.random.default_rng(14)
        documents = language.sample(20, rng)
        for first, second in zip(language.next_words(documents), again.next_words(documents), strict=True):
            np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "pcfg"}, "expected a language of kind 'reviews', got 'pcfg'"),
        ({"topics": ["shore"]}, "expected 2 sentiments and 1 topics"),
        ({"more": 1}, r"missing \[\], unknown \['more'\]"),
        ({"length_probabilities": [0.5, 0.4]}, "length_probabilities must be a distribution"),
    ],
)
def test_from_dict_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReviewGrammar.from_dict(small_grammar().to_dict() | change)


def test_every_seed_gives_the_same_language() -> None:
    assert fixed_reviews(3).to_dict() == default_grammar().to_dict()
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        fixed_reviews(-1)


def test_tables_are_read_only(grammar: ReviewGrammar) -> None:
    for table in (grammar.topic_probabilities, grammar.slots["quality"].probabilities):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length_probabilities": np.array([0.5, 0.4])}, "length_probabilities must be a distribution"),
        ({"topics": ("shore",), "topic_probabilities": np.array([1.0])}, r"shape \(2, 2, 3\), expected \(2, 1\)"),
        ({"topics": ("shore",)}, "expected 2 sentiments and 1 topics"),
        ({"body": (Template(("it", "was", "{mood}", "."), 1.0),)}, "'mood'.*Known: place, tone, verdict"),
        ({"body": (Template(("it", "was", "{tone}"), 1.0),)}, "only full stop"),
        (
            {
                "body": (Template(("so", "{tone}", "."), 0.5), Template(("so", "bad", "."), 0.5)),
                "cues": {"sentiment": ("so",), "topic": ("so",)},
            },
            "could be the same",
        ),
        ({"cues": {"sentiment": ("so",)}}, "cues must be for sentiment, topic, got 'sentiment'"),
        ({"cues": {"sentiment": ("so",), "topic": ("it",)}}, "cue of the topic must begin a template.*'it'"),
    ],
)
def test_a_wrong_grammar_is_an_error(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(small_grammar(), **change)


@pytest.mark.parametrize(
    ("words", "table", "message"),
    [
        (("a", "a"), [[[0.5, 0.5]]], "distinct"),
        (("a", "b"), [[0.5, 0.5]], "shape"),
        (("a", "b"), [[[0.5, 0.6]]], "distributions"),
        (("a", "b"), [[[-0.5, 1.5]]], "distributions"),
    ],
)
def test_a_wrong_slot_is_an_error(words: tuple[str, ...], table: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slot(words, np.array(table))


def test_dataset_is_in_the_layout_of_the_local_mirror(grammar: ReviewGrammar, tmp_path: Path) -> None:
    task = grammar.tasks[0]
    reviews = grammar.sample_many(30, np.random.default_rng(9))
    folder = write_dataset(tmp_path, task, {"train": [task.example(review) for review in reviews]})
    assert folder == tmp_path / "harness_ext" / "reviews"
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert rows == [
        {"text": review.text, "label": review.sentiment, "label_text": ("negative", "positive")[review.sentiment]}
        for review in reviews
    ]
    assert {row["label"] for row in rows} == {0, 1}


def test_the_text_has_the_verdicts(grammar: ReviewGrammar, tmp_path: Path) -> None:
    sample = grammar.sample_many(5, np.random.default_rng(0))
    path = write_text(tmp_path, grammar, [document(review) for review in sample])
    assert path == tmp_path / "harness_ext" / "reviews_text" / "test.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows == [{"text": review.document} for review in sample]
    assert grammar.sample(5, np.random.default_rng(0)) == [document(review) for review in sample]


def test_prompts_of_the_demo_use_words_of_the_language(grammar: ReviewGrammar) -> None:
    assert {"great", "good", "terrible", "bad"} <= set(grammar.slots["verdict"].words)
    assert {"delighted", "happy", "thrilled", "disappointed", "bored", "annoyed"} <= set(grammar.slots["feeling"].words)
    openings = {" ".join(template.parts[:-2]) for template in grammar.verdict}
    assert openings == {"this movie is", "overall it was", "i felt"}


def test_every_word_is_one_token(grammar: ReviewGrammar, tokenizer: PreTrainedTokenizerBase) -> None:
    assert 200 < len(grammar.words) < 1000
    for word in grammar.words:
        assert len(tokenizer(" " + word)["input_ids"]) == 1, word
    for word in grammar.opening_words:
        assert len(tokenizer(word)["input_ids"]) == 1, word
    for review in grammar.sample_many(200, np.random.default_rng(11)):
        ids = tokenizer(review.document)["input_ids"]
        assert len(ids) == len(review.body) + len(review.verdict)
        assert tokenizer.decode(ids) == review.document


def test_tokenizer_is_deterministic_and_survives_saving(
    grammar: ReviewGrammar, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    again = build_tokenizer(default_grammar(), max_length=64)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the acting was clumsy .", " this movie is", "A Café, 3 €!", END_OF_TEXT):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert len(loaded) == len(tokenizer)
    assert loaded.bos_token == loaded.eos_token == END_OF_TEXT
    assert loaded.model_max_length == 64
    assert loaded(END_OF_TEXT)["input_ids"] == [loaded.eos_token_id]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20).filter(lambda text: END_OF_TEXT not in text))
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
