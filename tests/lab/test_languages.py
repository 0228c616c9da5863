"""What all languages share: tokenizer, dataset files, Bayes accuracy and the optimal predictor's cross-entropy, by hand."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from harness_ext.lab.languages import LANGUAGES, language_from_dict, make_language
from harness_ext.lab.languages.base import (
    END_OF_TEXT,
    Example,
    Language,
    Task,
    bayes_accuracy,
    optimal_cross_entropy,
    word_tokenizer,
    write_dataset,
)

# Some that a tokenizer might split, join, strip or take for a special token.
WORDS = ("w1", "w10", "don't", ".", "##ing", "naïve", "Ġ", "[UNK]", "</s>", "a")


class TwoWords:
    """A document is "a" with probability 1/4 and "b b" with probability 3/4."""

    name = "two_words"
    words = ("a", "b")
    tasks: tuple[Task, ...] = ()

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
        return [("a",) if is_a else ("b", "b") for is_a in rng.random(count) < 0.25]

    def next_words(self, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
        return [np.array([self.next_word(words[:t]) for t in range(len(words) + 1)]) for words in documents]

    def next_word(self, prefix: Sequence[str]) -> np.ndarray:
        tables = {(): [0.25, 0.75, 0.0], ("a",): [0.0, 0.0, 1.0], ("b",): [0.0, 1.0, 0.0], ("b", "b"): [0.0, 0.0, 1.0]}
        return np.array(tables[tuple(prefix)])

    def log_probabilities(self, document: Sequence[str]) -> np.ndarray:
        return np.log({("a",): [0.25, 1.0], ("b", "b"): [0.75, 1.0, 1.0]}[tuple(document)])

    def log_probabilities_of(self, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
        return [self.log_probabilities(document) for document in documents]

    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        return word_tokenizer(self.words, max_length=max_length)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.name}


class FirstWord:
    """A task of three classes with a fixed posterior for each first word."""

    name = "two_words_first"
    classes = ("low", "middle", "high")
    cue: tuple[str, ...] = ()

    def sample(self, count: int, rng: np.random.Generator) -> list[Example]:
        raise NotImplementedError

    def posterior(self, words: Sequence[str]) -> np.ndarray:
        return np.array({"a": [0.5, 0.3, 0.2], "b": [0.1, 0.2, 0.7]}[words[0]])

    def posteriors(self, documents: Sequence[Sequence[str]]) -> np.ndarray:
        return np.array([self.posterior(document) for document in documents])


def test_cross_entropy_of_a_two_word_language_by_hand() -> None:
    language: Language = TwoWords()
    # In the proportions of the language the estimate is the entropy itself: 2 tokens for "a", 3 for "b b".
    result = optimal_cross_entropy(language, [("a",), ("b", "b"), ("b", "b"), ("b", "b")])
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    mean_length = 0.25 * 2 + 0.75 * 3
    assert result.value == pytest.approx(entropy / mean_length, rel=1e-14)
    # The delta method: sd(nats - value * length) / (mean length * √n), with n - 1 in the variance.
    residual_a = math.log(4) - result.value * 2
    residual_b = math.log(4 / 3) - result.value * 3
    variance = (residual_a**2 + 3 * residual_b**2) / 3
    assert result.stderr == pytest.approx(math.sqrt(variance / 4) / mean_length, rel=1e-12)


def test_the_standard_error_is_that_of_repeated_samples() -> None:
    language = TwoWords()
    rng = np.random.default_rng(0)
    results = [optimal_cross_entropy(language, language.sample(200, rng)) for _ in range(400)]
    values = np.array([result.value for result in results])
    truth = (0.25 * math.log(4) + 0.75 * math.log(4 / 3)) / (0.25 * 2 + 0.75 * 3)
    stderr = float(np.mean([result.stderr for result in results]))
    # Of 400 draws the standard deviation has a relative error of about 1/√800; 5 of them are a false alarm in 10^6. The
    # mean is off by less than 5 standard errors but once in 10^6, and the bias of the ratio is far smaller.
    assert values.std(ddof=1) == pytest.approx(stderr, rel=5 / math.sqrt(800))
    assert abs(values.mean() - truth) < 5 * stderr / math.sqrt(400)


def test_cross_entropy_needs_two_documents() -> None:
    with pytest.raises(ValueError, match="at least two documents, got 1"):
        optimal_cross_entropy(TwoWords(), [("a",)])


def test_bayes_accuracy_by_hand() -> None:
    task: Task = FirstWord()
    # argmax is 0 after "a" and 2 after "b": right, wrong, right, right.
    examples = [Example(("a",), 0), Example(("a",), 1), Example(("b", "b"), 2), Example(("b", "b"), 2)]
    result = bayes_accuracy(task, examples)
    assert result.accuracy == 0.75
    assert result.expected == pytest.approx((0.5 + 0.5 + 0.7 + 0.7) / 4)


def test_bayes_accuracy_needs_an_example() -> None:
    with pytest.raises(ValueError, match=r"two_words_first.*at least one example"):
        bayes_accuracy(FirstWord(), [])


def test_write_dataset(tmp_path: Path) -> None:
    splits = {"train": [Example(("a",), 0), Example(("naïve", "b"), 2)], "test": [Example(("b",), 1)]}
    target = write_dataset(tmp_path, FirstWord(), splits)
    assert target == tmp_path / "harness_ext" / "two_words_first"
    assert sorted(path.name for path in target.iterdir()) == ["test.jsonl", "train.jsonl"]
    rows = [json.loads(line) for line in (target / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [
        {"text": "a", "label": 0, "label_text": "low"},
        {"text": "naïve b", "label": 2, "label_text": "high"},
    ]
    # Written again, it holds the new rows alone.
    write_dataset(tmp_path, FirstWord(), {"test": []})
    assert (target / "test.jsonl").read_text(encoding="utf-8") == ""
    assert len((target / "train.jsonl").read_text(encoding="utf-8").splitlines()) == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=8))
def test_tokenizer_round_trip(document: list[str]) -> None:
    tokenizer = word_tokenizer(WORDS, max_length=16)
    ids = tokenizer(" ".join(document))["input_ids"]
    assert ids == [WORDS.index(word) for word in document]
    assert tokenizer.decode(ids) == " ".join(document)


def test_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    word_tokenizer(WORDS, max_length=16).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = " ".join(WORDS)
    assert len(loaded) == len(WORDS) + 1
    assert loaded(text)["input_ids"] == list(range(len(WORDS)))
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.model_max_length == 16
    assert loaded.bos_token == loaded.eos_token == END_OF_TEXT
    assert loaded.bos_token_id == loaded.eos_token_id == len(WORDS)
    assert loaded(f"a {END_OF_TEXT} a")["input_ids"] == [9, len(WORDS), 9]


def test_what_is_no_word_is_read_as_the_end_of_text(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(("a", "<unk>", "b"), max_length=4)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert each("a N/A <unk> b")["input_ids"] == [0, 3, 1, 2]
        assert len(each) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "b", "a"), "distinct, got 1 repeated"),
        (("a", ""), r"got \[''\]"),
        (("a", "b c"), r"got \['b c'\]"),
        (("a", "b\n"), "without blanks"),
        (("a", END_OF_TEXT), "other than"),
    ],
)
def test_tokenizer_refuses_bad_vocabularies(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        word_tokenizer(words, max_length=4)


@pytest.mark.parametrize("kind", LANGUAGES)
def test_every_language_keeps_its_promises(kind: str, tmp_path: Path) -> None:
    make = functools.partial(make_language, kind)
    language = make()
    documents = language.sample(4, np.random.default_rng(1))
    assert documents == make().sample(4, np.random.default_rng(1))
    column = {word: index for index, word in enumerate(language.words)}
    for document, logs in zip(documents, language.log_probabilities_of(documents), strict=True):
        np.testing.assert_allclose(language.log_probabilities(document), logs, rtol=0, atol=1e-11)
        (table,) = language.next_words([document])
        for t in range(len(document) + 1):
            following = language.next_word(document[:t])
            assert following.shape == (len(language.words) + 1,)
            np.testing.assert_allclose(table[t], following, rtol=0, atol=1e-12)
            assert following.min() >= 0
            assert following.sum() == pytest.approx(1.0, abs=1e-9)
            index = column[document[t]] if t < len(document) else -1
            assert math.log(following[index]) == pytest.approx(logs[t], abs=1e-9)
    tokenizer = language.tokenizer(max_length=128)
    assert tokenizer.model_max_length == 128
    texts = [" ".join(document) for document in documents]
    assert [tokenizer.decode(ids) for ids in tokenizer(texts)["input_ids"]] == texts

    data = language.to_dict()
    assert data["kind"] == language.name == kind
    again = language_from_dict(json.loads(json.dumps(data)))
    assert json.dumps(again.to_dict()) == json.dumps(data)

    assert len({task.name for task in language.tasks}) == len(language.tasks) > 0
    for task in language.tasks:
        assert set(task.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")
        assert len(set(task.classes)) == len(task.classes) >= 2
        assert all(label.split() == [label] for label in task.classes)
        assert language.next_words(
            [(*example.words, *task.cue) for example in task.sample(3, np.random.default_rng(3))]
        )
        examples = task.sample(4, np.random.default_rng(2))
        assert examples == task.sample(4, np.random.default_rng(2))
        posteriors = task.posteriors([example.words for example in examples])
        assert posteriors.shape == (4, len(task.classes))
        np.testing.assert_allclose(posteriors.sum(axis=1), 1.0, rtol=0, atol=1e-9)
        for example, posterior in zip(examples, posteriors, strict=True):
            assert posterior[example.label] > 0
            np.testing.assert_allclose(task.posterior(example.words), posterior, rtol=0, atol=1e-11)
        lines = (
            (write_dataset(tmp_path, task, {"test": examples}) / "test.jsonl").read_text(encoding="utf-8").splitlines()
        )
        assert [json.loads(line)["label_text"] for line in lines] == [task.classes[row.label] for row in examples]


def test_sizes_reach_the_language() -> None:
    language = make_language("hmm", 3, {"states": 4, "words": 12, "lengths": (5, 6)})
    assert language.words == tuple(f"w{index}" for index in range(12))
    assert make_language("hmm", 3, {"states": 4, "words": 12, "lengths": [5, 6]}).to_dict() == language.to_dict()


@pytest.mark.parametrize(
    ("kind", "seed", "sizes", "message"),
    [
        ("hhm", 0, {}, r"^unknown kind of language 'hhm'\. Did you mean 'hmm'\? Known: hmm, pcfg, reviews\.$"),
        (
            "hmm",
            0,
            {"sates": 3},
            r"^language 'hmm' has no size 'sates'\. Did you mean 'states'\? Known: states, words, ",
        ),
        ("hmm", 0, {"seed": 3}, r"^language 'hmm' has no size 'seed'\."),
        ("reviews", 0, {"words": 3}, r"^language 'reviews' has no size 'words'\. Known: none\.$"),
        (
            "hmm",
            0,
            {"states": 61},
            r"^language 'hmm', seed 0, states=61: states must be 1 to 60, got 61; more states than",
        ),
        ("hmm", -1, {}, r"^language 'hmm', seed -1: seed must be at least 0"),
        ("hmm", 0, {"states": "ten"}, r"^language 'hmm', seed 0, states='ten': "),
        ("hmm", 0, {"lengths": 24}, r"^language 'hmm', seed 0, lengths=24: "),
        ("pcfg", 0, {"symbols": ()}, r"^language 'pcfg', seed 0, symbols=\(\): symbols must be of 1 to 6 levels"),
    ],
)
def test_what_no_language_can_be_drawn_from(kind: str, seed: int, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_language(kind, seed, sizes)
    assert "\n" not in str(caught.value)


def test_tables_that_are_no_language_are_an_error() -> None:
    for tables, message in (
        (
            {"kind": "hm"},
            r"expected its kind under 'kind', found 'hm'\. Did you mean 'hmm'\? Known: hmm, pcfg, reviews",
        ),
        ({}, "found None"),
        ([], "found None"),
        ({"kind": ["hmm"]}, r"found \['hmm'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            language_from_dict(tables)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", LANGUAGES)
@pytest.mark.parametrize("value", [None, 1, "x", [], [[1.0]], {"x": 1}])
def test_a_table_of_another_form_is_a_value_error(kind: str, value: Any) -> None:
    tables = make_language(kind).to_dict()
    for name in tables:
        if name not in ("kind", "questions", "constituents"):  # which may be empty
            with pytest.raises(ValueError, match=f"^not the tables of a language of kind '{kind}': "):
                language_from_dict(tables | {name: value})
            with pytest.raises(ValueError, match=rf"kind '{kind}'.*missing"):
                language_from_dict({key: table for key, table in tables.items() if key != name})
