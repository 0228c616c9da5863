"""Label words of natural tasks against exhaustive choice and explicit loops, and languages where the best ones are known."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from harness_ext.lab.languages import LANGUAGES, make_language
from harness_ext.lab.languages.base import Example, Language, Task, bayes_accuracy
from harness_ext.lab.languages.hmm import Hmm, Question, random_hmm
from harness_ext.lab.languages.label_words import best_label_words, last_word_probabilities, natural_ceiling


@functools.cache
def language_of(kind: str) -> Language:
    return make_language(kind)


def words_of_their_own() -> Hmm:
    """Three states with two words each that no other state writes: the next word is the next state."""
    rng = np.random.default_rng(0)
    emission = np.zeros((3, 6))
    for state in range(3):
        emission[state, [state, 5 - state]] = 0.7, 0.3
    return Hmm(
        words=tuple("abcdef"),
        length_probabilities=np.eye(6)[-1],
        regime_probabilities=np.array([0.5, 0.5]),
        initial=np.full((2, 3), 1 / 3),
        transition=rng.dirichlet(np.full(3, 0.5), size=(2, 3)),
        emission=emission,
        questions=(Question("next_state", 3, positions=(-1,), state_values=(0, 1, 2)),),
    )


def rule_value(
    language: Language, task: Task, words: Mapping[str, Sequence[str]], documents: Sequence[Sequence[str]]
) -> float:
    """Mean p(predicted class | document), by a loop."""
    total = 0.0
    for document in documents:
        row = language.next_word((*document, *task.cue))
        scores = [sum(row[language.words.index(word)] for word in words[label]) for label in task.classes]
        total += task.posterior(document)[int(np.argmax(scores))]
    return total / len(documents)


@pytest.mark.parametrize("kind", LANGUAGES)
def test_the_words_that_may_follow_a_document_and_its_cue(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness_ext.lab.languages.label_words._CHUNK", 3)
    language = language_of(kind)
    for task in language.tasks:
        documents = [example.words for example in task.sample(7, np.random.default_rng(1))]
        rows = last_word_probabilities(language, task, documents)
        assert rows.shape == (7, len(language.words))
        for document, row in zip(documents, rows, strict=True):
            expected = language.next_word((*document, *task.cue))
            np.testing.assert_allclose(row, expected[:-1], rtol=0, atol=1e-12)
            # Something is left to say: a task's document is never complete.
            assert row.sum() > 1e-3
        assert last_word_probabilities(language, task, []).shape == (0, len(language.words))


def test_words_that_one_state_alone_writes_make_the_natural_task_the_bayes_classifier() -> None:
    language = words_of_their_own()
    (task,) = language.tasks
    words = best_label_words(language, task, per_class=2, rng=np.random.default_rng(2), count=300)
    assert {label: set(of_class) for label, of_class in words.items()} == {
        "class0": {"a", "f"}, "class1": {"b", "e"}, "class2": {"c", "d"}
    }  # fmt: skip
    # In the order in which they rise with their class: all probability of a state's words is 7 to 3.
    assert [of_class[0] for of_class in words.values()] == ["a", "b", "c"]
    examples = task.sample(500, np.random.default_rng(3))
    assert natural_ceiling(language, task, words, examples) == bayes_accuracy(task, examples).accuracy


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_nearly_that_of_trying_all(seed: int) -> None:
    """Five words, two classes, one word each: 20 choices. A local search may miss the best, but not by much."""
    language = random_hmm(seed, states=3, words=5, lengths=(4, 4), switches=1, emission_temperature=0.7)
    of_two_classes = [task for task in language.tasks if len(task.classes) == 2]
    assert len(of_two_classes) > 2
    for task in of_two_classes:
        words = best_label_words(language, task, per_class=1, rng=np.random.default_rng(4), count=40)
        chosen = tuple(of_class[0] for of_class in words.values())
        documents = [example.words for example in task.sample(40, np.random.default_rng(4))]
        values = {
            pair: rule_value(
                language, task, {label: (word,) for label, word in zip(task.classes, pair, strict=True)}, documents
            )
            for pair in itertools.permutations(language.words, 2)
        }
        assert values[chosen] >= max(values.values()) - 0.03
        # No other word in the place of one of the two gains anything.
        neighbours = [pair for pair in values if (pair[0] == chosen[0]) != (pair[1] == chosen[1])]
        assert len(neighbours) == 6
        assert values[chosen] >= max(values[pair] for pair in neighbours) - 1e-6


@pytest.mark.parametrize("kind", LANGUAGES)
def test_label_words_of_the_default_languages(kind: str) -> None:
    language = language_of(kind)
    for task in language.tasks:
        words = best_label_words(language, task, per_class=3, rng=np.random.default_rng(5), count=400)
        assert words == best_label_words(language, task, per_class=3, rng=np.random.default_rng(5), count=400)
        assert tuple(words) == task.classes
        every = [word for of_class in words.values() for word in of_class]
        assert len(set(every)) == len(every) == 3 * len(task.classes)
        assert set(every) <= set(language.words)
        examples = task.sample(1500, np.random.default_rng(6))
        ceiling = natural_ceiling(language, task, words, examples)
        bayes = bayes_accuracy(task, examples)
        # Of the same labels; on average the Bayes classifier is the better one, and 5 standard errors of a difference of
        # two shares of 1,500 are below 0.1: a false alarm in 10^6.
        assert 1 / len(task.classes) < ceiling < bayes.accuracy + 0.1


@pytest.mark.parametrize(
    ("kind", "name"), [("hmm", "hmm_next_state"), ("reviews", "reviews"), ("reviews", "reviews_topic")]
)
def test_tasks_that_the_next_word_settles_reach_the_bayes_accuracy(kind: str, name: str) -> None:
    """Within 5 standard errors, 0.03, of the share of documents on which the two rules differ at all."""
    language = language_of(kind)
    (task,) = (task for task in language.tasks if task.name == name)
    words = best_label_words(language, task, per_class=5, rng=np.random.default_rng(7))
    examples = task.sample(2000, np.random.default_rng(8))
    assert natural_ceiling(language, task, words, examples) > bayes_accuracy(task, examples).accuracy - 0.03


def test_the_ceiling_by_hand() -> None:
    language = words_of_their_own()
    (task,) = language.tasks
    words = {"class0": ["a"], "class1": ["b", "e"], "class2": ["c"]}
    examples = task.sample(100, np.random.default_rng(9))
    right = 0
    for example in examples:
        row = language.next_word(example.words)
        right += int(np.argmax([row[0], row[1] + row[4], row[2]])) == example.label
    assert natural_ceiling(language, task, words, examples) == right / 100
    # Words that none of these documents can be followed by: three classes tie and share each point.
    impossible = Hmm(**{
        field: getattr(language, field)
        for field in ("length_probabilities", "regime_probabilities", "initial", "transition", "questions")
    }, words=tuple("abcdefxyz"), emission=np.hstack([language.emission, np.zeros((3, 3))]))  # fmt: skip
    (task,) = impossible.tasks
    tied = {"class0": ["x"], "class1": ["y"], "class2": ["z"]}
    assert natural_ceiling(impossible, task, tied, examples) == pytest.approx(1 / 3)


def test_what_cannot_be_chosen_or_scored() -> None:
    language = words_of_their_own()
    (task,) = language.tasks
    rng = np.random.default_rng(0)
    for per_class in (0, 3):
        with pytest.raises(ValueError, match=rf"per_class must be 1 to 2, 3 classes having 6 words.*got {per_class}"):
            best_label_words(language, task, per_class=per_class, rng=rng)
    with pytest.raises(ValueError, match="count must be at least 2, got 1"):
        best_label_words(language, task, per_class=1, rng=rng, count=1)
    words = {"class0": ["a"], "class1": ["b"], "class2": ["c"]}
    examples = [Example(("a", "b"), 0)]
    with pytest.raises(ValueError, match="at least one example"):
        natural_ceiling(language, task, words, [])
    with pytest.raises(ValueError, match="no label words for class1"):
        natural_ceiling(language, task, words | {"class1": []}, examples)
    with pytest.raises(ValueError, match="not of the language: z"):
        natural_ceiling(language, task, words | {"class1": ["z"]}, examples)
