"""The grammar against the enumeration of all derivations of small ones."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, norm

from harness_ext.lab.languages import pcfg
from harness_ext.lab.languages.base import NUM_WITHHELD, Language, Task, bayes_accuracy, optimal_cross_entropy
from harness_ext.lab.languages.pcfg import (
    MAX_LEVELS,
    SIDES,
    ConstituentTask,
    Pcfg,
    Rules,
    TopRuleTask,
    random_pcfg,
)

Z_ONE_IN_A_MILLION = norm.isf(0.5e-6)


class Tree(NamedTuple):
    """One derivation from a symbol, by brute force; a node is (level, symbol, start, end)."""

    probability: float
    words: tuple[str, ...]
    nodes: tuple[tuple[int, int, int, int], ...]
    rule: int


def trees(language: Pcfg, level: int, symbol: int) -> Iterator[Tree]:
    """Every derivation of a symbol, with a positive probability."""
    if level == language.num_levels:
        for word, probability in zip(language.words, language.emissions[symbol], strict=True):
            if probability:
                yield Tree(float(probability), (word,), ((level, symbol, 0, 1),), -1)
        return
    rules = language.rules[level]
    for number, side in enumerate(rules.right_hand_sides):
        if not rules.probabilities[symbol, number]:
            continue
        for parts in product(*(list(trees(language, level + 1, child)) for child in side)):
            probability, words, nodes = float(rules.probabilities[symbol, number]), (), ()
            for part in parts:
                probability *= part.probability
                nodes += tuple((lv, sy, i + len(words), j + len(words)) for lv, sy, i, j in part.nodes)
                words += part.words
            yield Tree(probability, words, ((level, symbol, 0, len(words)), *nodes), number)


def two_levels() -> Pcfg:
    """By hand: a start symbol with one and with two children, shared right-hand sides, a symbol that writes one word."""
    return Pcfg(
        rules=(
            Rules(((0, 1), (1, 0), (1,), (1, 1)), np.array([[0.4, 0.3, 0.2, 0.1]])),
            Rules(((0, 1), (2,), (1, 0), (2, 2)), np.array([[0.5, 0.25, 0.25, 0.0], [0.3, 0.0, 0.3, 0.4]])),
        ),
        emissions=np.array([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.0, 0.0, 1.0]]),
        words=("a", "b", "c"),
        constituents=((1, "first"), (2, "last")),
    )


def three_levels() -> Pcfg:
    return random_pcfg(
        3, symbols=(2, 2, 2), top_rules=2, rules=1, rule_sharing=1, one_child=0.3, words=2, word_sharing=2,
        constituents=((1, "last"), (3, "first")),
    )  # fmt: skip


def balanced() -> Pcfg:
    return random_pcfg(
        4,
        symbols=(2, 3),
        top_rules=3,
        rules=3,
        rule_sharing=1.5,
        one_child=0,
        words=4,
        word_sharing=2.25,
        constituents=(),
    )


class World(NamedTuple):
    language: Pcfg
    trees: list[Tree]
    documents: dict[tuple[str, ...], float]


@pytest.fixture(scope="module", params=[two_levels, three_levels, balanced])
def world(request: pytest.FixtureRequest) -> World:
    make: Callable[[], Pcfg] = request.param
    language = make()
    every = list(trees(language, 0, 0))
    documents: dict[tuple[str, ...], float] = defaultdict(float)
    for tree in every:
        documents[tree.words] += tree.probability
    return World(language, every, dict(documents))


@pytest.fixture(scope="module")
def default() -> Pcfg:
    return random_pcfg()


def some(documents: Iterable[tuple[str, ...]], count: int) -> list[tuple[str, ...]]:
    """About `count` documents, as many of each length, evenly through the list."""
    by_length: dict[int, list[tuple[str, ...]]] = defaultdict(list)
    for document in sorted(documents):
        by_length[len(document)].append(document)
    share = -(-count // len(by_length))
    return [document for group in by_length.values() for document in group[:: -(-len(group) // share)]]


def test_derivations_are_ambiguous_and_lengths_are_those_of_enumeration(world: World) -> None:
    assert sum(world.documents.values()) == pytest.approx(1, abs=1e-12)
    assert len(world.trees) > 1.5 * len(world.documents)
    assert tuple(sorted({len(document) for document in world.documents})) == world.language.lengths[0]
    assert world.language.longest == max(map(len, world.documents))


def test_probabilities_of_all_sentences_equal_those_of_enumeration(world: World) -> None:
    logs = world.language.log_probabilities_of(list(world.documents))
    assert [len(row) for row in logs] == [len(document) + 1 for document in world.documents]
    measured = np.exp([row.sum() for row in logs])
    np.testing.assert_allclose(measured, list(world.documents.values()), rtol=1e-12)
    assert measured.sum() == pytest.approx(1, abs=1e-12)


def test_next_word_and_prefix_probabilities_equal_those_of_enumeration(world: World) -> None:
    language = world.language
    counts: dict[tuple[str, ...], np.ndarray] = defaultdict(lambda: np.zeros(len(language.words) + 1))
    for document, probability in world.documents.items():
        for length in range(len(document)):
            counts[document[:length]][language.words.index(document[length])] += probability
        counts[document][-1] += probability
    prefixes = some(counts, 60)
    assert {len(prefix) for prefix in prefixes} == set(range(language.longest + 1))
    for prefix in prefixes:
        measured = language.next_word(prefix)
        assert measured.shape == (len(language.words) + 1,)
        np.testing.assert_allclose(measured, counts[prefix] / counts[prefix].sum(), rtol=1e-12, atol=1e-15)
    for document in some(world.documents, 30):
        steps = [counts[document[:length]] / counts[document[:length]].sum() for length in range(len(document) + 1)]
        columns = [*(language.words.index(word) for word in document), -1]
        expected = np.log([step[column] for step, column in zip(steps, columns, strict=True)])
        np.testing.assert_allclose(language.log_probabilities(document), expected, rtol=0, atol=1e-12)


def test_what_cannot_occur_is_refused(world: World) -> None:
    language = world.language
    prefixes = {document[:length] for document in world.documents for length in range(len(document) + 1)}
    for length in range(min(language.longest + 2, 5)):
        for words in product(language.words, repeat=length):
            if words not in prefixes:
                with pytest.raises(ValueError, match="not a beginning of a sentence"):
                    language.next_word(words)
            if words not in world.documents:
                for refusing in (
                    language.log_probabilities,
                    lambda words: language.top_rule_posteriors([words]),
                    lambda words: language.constituent_posteriors([words], 1, "last"),
                    lambda words: language.span_posterior(words, 1, 0, len(words)),
                ):
                    if words or refusing is language.log_probabilities:
                        with pytest.raises(ValueError, match=r"not a sentence|start and end"):
                            refusing(words)
            if not any(document[:-1] == words for document in world.documents):
                for task in language.tasks:
                    with pytest.raises(ValueError, match="not a sentence without its last 1 word"):
                        task.posterior(words)


def test_inside_chart_equals_enumeration(world: World) -> None:
    language = world.language
    yields = [
        [defaultdict(float) for _ in range(language.sizes[level])] for level in range(language.num_levels + 1)
    ]  # fmt: skip
    for level, symbols in enumerate(yields):
        for symbol, table in enumerate(symbols):
            for tree in trees(language, level, symbol):
                table[tree.words] += tree.probability
    for document in some(world.documents, 15):
        chart = language.inside(document)
        assert [table.shape[2] for table in chart] == list(language.sizes)
        for level, table in enumerate(chart):
            for start, end in product(range(len(document) + 1), repeat=2):
                expected = [
                    part[document[start:end]] if end > start and (level or not start) else 0.0 for part in yields[level]
                ]
                np.testing.assert_allclose(table[start, end], expected, rtol=1e-12, atol=1e-300)


def test_posteriors_equal_those_of_enumeration(world: World) -> None:
    language = world.language
    chosen = some(world.documents, 25)
    of_document = {document: [tree for tree in world.trees if tree.words == document] for document in chosen}
    for document, derivations in of_document.items():
        total = world.documents[document]
        rules = np.zeros(len(language.rules[0].right_hand_sides))
        spans: dict[tuple[int, int, int], np.ndarray] = {
            (level, start, end): np.zeros(language.sizes[level])
            for level in range(1, language.num_levels + 1)
            for start in range(len(document))
            for end in range(start + 1, len(document) + 1)
        }
        for tree in derivations:
            rules[tree.rule] += tree.probability / total
            for level, symbol, start, end in tree.nodes:
                if level:
                    spans[level, start, end][symbol] += tree.probability / total
        np.testing.assert_allclose(language.top_rule_posteriors([document])[0], rules, rtol=0, atol=1e-12)
        for (level, start, end), expected in spans.items():
            measured = language.span_posterior(document, level, start, end)
            np.testing.assert_allclose(measured, expected, rtol=0, atol=1e-12)
        for level, side in product(range(1, language.num_levels + 1), SIDES):
            expected = sum(
                table
                for (at, start, end), table in spans.items()
                if at == level and (start == 0 if side == "first" else end == len(document))
            )
            measured = language.constituent_posteriors([document], level, side)[0]
            np.testing.assert_allclose(measured, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_unseen", [1, 2])
def test_posteriors_without_the_last_words_equal_those_of_enumeration(world: World, num_unseen: int) -> None:
    language = world.language
    beginnings: dict[tuple[str, ...], list[Tree]] = defaultdict(list)
    for tree in world.trees:
        if len(tree.words) > num_unseen:
            beginnings[tree.words[:-num_unseen]].append(tree)
    for shown in some(beginnings, 20):
        derivations = beginnings[shown]
        total = sum(tree.probability for tree in derivations)
        rules = np.zeros(len(language.rules[0].right_hand_sides))
        sides = {
            (level, side): np.zeros(language.sizes[level])
            for level, side in product(range(1, language.num_levels + 1), SIDES)
        }
        for tree in derivations:
            rules[tree.rule] += tree.probability / total
            for level, symbol, start, end in tree.nodes:
                if level and start == 0:
                    sides[level, "first"][symbol] += tree.probability / total
                if level and end == len(tree.words):
                    sides[level, "last"][symbol] += tree.probability / total
        measured = language.top_rule_posteriors([shown], num_unseen=num_unseen)[0]
        np.testing.assert_allclose(measured, rules, rtol=0, atol=1e-12)
        for (level, side), expected in sides.items():
            measured = language.constituent_posteriors([shown], level, side, num_unseen=num_unseen)[0]
            np.testing.assert_allclose(measured, expected, rtol=0, atol=1e-12)
            if num_unseen == NUM_WITHHELD:
                measured = ConstituentTask(language, level, side).posterior(shown)
                np.testing.assert_allclose(measured, expected, rtol=0, atol=1e-12)
        if num_unseen == NUM_WITHHELD:
            np.testing.assert_allclose(TopRuleTask(language).posterior(shown), rules, rtol=0, atol=1e-12)


def test_tasks_show_sentences_of_two_words_or_more_without_the_last() -> None:
    emissions, words = np.array([[0.5, 0.5], [1.0, 0.0]]), ("a", "b")
    language = Pcfg((Rules(((0,), (0, 1), (1, 1)), np.array([[0.4, 0.3, 0.3]])),), emissions, words)
    assert language.lengths[0] == (1, 2)
    task = TopRuleTask(language)
    examples = task.sample(300, np.random.default_rng(3))
    drawn = language.sample_derivations(300, np.random.default_rng(3), shortest=2)
    assert [(example.words, example.label) for example in examples] == [
        (derivation.words[:-1], derivation.top_rule) for derivation in drawn
    ]
    assert {len(example.words) for example in examples} == {1}
    # p(rule, "a …"): 0.3 · 0.5 against 0.3 · 1; the rule that writes one word is out.
    np.testing.assert_allclose(task.posterior(("a",)), [0, 1 / 3, 2 / 3], rtol=1e-12)
    with pytest.raises(ValueError, match="no document of this language has 3 words or more"):
        language.sample_derivations(1, np.random.default_rng(0), shortest=3)
    one_word = Pcfg((Rules(((0,), (1,)), np.array([[0.5, 0.5]])),), emissions, words, ((1, "first"),))
    assert one_word.tasks == ()


def test_sampler_agrees_with_the_exact_probabilities(world: World) -> None:
    """Chi-square of whole derivations, rare ones pooled: false-alarm probability 1e-6 a grammar (the seed is fixed)."""
    count, language = 20000, world.language
    exact: dict[tuple, float] = defaultdict(float)
    for tree in world.trees:
        symbols = tuple(
            tuple(symbol for at, symbol, *_ in tree.nodes if at == level) for level in range(1, language.num_levels + 1)
        )
        exact[tree.words, tree.rule, symbols] += count * tree.probability
    drawn: dict[tuple, int] = defaultdict(int)
    for words, rule, symbols in language.sample_derivations(count, np.random.default_rng(0)):
        drawn[words, rule, symbols] += 1
    assert set(drawn) <= set(exact)
    common = [cell for cell, expected in exact.items() if expected >= 10]
    expected = np.array([*(exact[cell] for cell in common), sum(exact.values())])
    observed = np.array([*(drawn[cell] for cell in common), count])
    # The last cell is that of all the others.
    expected[-1] -= expected[:-1].sum()
    observed[-1] -= observed[:-1].sum()
    assert len(common) > 5
    assert expected[-1] > 10 or expected[-1] == pytest.approx(0, abs=1e-6)
    used = expected > 1e-6
    assert observed[~used].sum() == 0
    assert ((observed - expected)[used] ** 2 / expected[used]).sum() < chi2.isf(1e-6, df=used.sum() - 1)


def test_default_tasks_are_calibrated_and_leave_room(default: Pcfg) -> None:
    """Mean of label's probability against that of squares: z-test, false-alarm probability 1e-6 a task (seeds are fixed)."""
    for number, task in enumerate(default.tasks):
        examples = task.sample(2000, np.random.default_rng(number))
        posteriors = task.posteriors([example.words for example in examples])
        labels = np.array([example.label for example in examples])
        assert posteriors.shape == (2000, len(task.classes))
        np.testing.assert_allclose(posteriors.sum(axis=1), 1, rtol=0, atol=1e-12)
        # E[p(label)] = E[sum of squares], given the words; the variance given the words is known too.
        of_label = posteriors[np.arange(2000), labels]
        mean = (posteriors**2).sum(axis=1)
        variance = (posteriors**3).sum(axis=1) - mean**2
        assert abs((of_label - mean).sum()) < Z_ONE_IN_A_MILLION * np.sqrt(variance.sum())
        majority = np.bincount(labels).max() / 2000
        bayes = bayes_accuracy(task, examples)
        # 0.77 to 0.93, with standard errors of about 0.01.
        assert 0.70 < bayes.expected < 0.97
        assert bayes.expected > majority + 0.4
        best = posteriors.max(axis=1)
        hits = posteriors.argmax(axis=1) == labels
        assert abs((hits - best).sum()) < Z_ONE_IN_A_MILLION * np.sqrt((best * (1 - best)).sum())


def test_default_grammar_has_the_shape_that_is_documented(default: Pcfg) -> None:
    assert len({task.name for task in default.tasks}) == len(default.tasks)
    for task in default.tasks:
        assert len(set(task.classes)) == len(task.classes)
        assert all(label.split() == [label] for label in task.classes)
    for rules in default.rules:
        assert rules.probabilities.any(axis=0).all()
    for language in (default, random_pcfg(symbols=(2, 3), top_rules=4, rules=1, words=10, word_sharing=1)):
        assert language.emissions.any(axis=0).all()
    # Symbols share right-hand sides and words.
    for table in (*(rules.probabilities for rules in default.rules[1:]), default.emissions):
        assert ((table > 0).sum(axis=0) > 1).any()
    documents = default.sample(300, np.random.default_rng(1))
    assert {len(document) for document in documents} <= set(default.lengths[0])
    assert optimal_cross_entropy(default, documents).value < np.log(len(default.words))


def test_the_protocols_are_implemented(default: Pcfg) -> None:
    language: Language = default
    tasks: tuple[Task, ...] = default.tasks
    assert language.name == "pcfg"
    assert all(task.name.startswith("pcfg_") for task in tasks)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    symbols=st.lists(st.integers(2, 4), min_size=1, max_size=4),
    one_child=st.sampled_from([0.0, 0.2, 0.7]),
    concentration=st.sampled_from([0.05, 1.0]),
)
def test_next_word_sums_to_one_and_is_what_log_probabilities_say(
    seed: int, symbols: list[int], one_child: float, concentration: float
) -> None:
    language = random_pcfg(
        seed, symbols=symbols, top_rules=3, rules=2, rule_sharing=2, one_child=one_child, words=7, word_sharing=2,
        concentration=concentration, constituents=(),
    )  # fmt: skip
    (document,) = language.sample(1, np.random.default_rng(seed))
    logs = language.log_probabilities(document)
    for length in range(len(document) + 1):
        row = language.next_word(document[:length])
        assert row.sum() == pytest.approx(1, abs=1e-9)
        assert row.min() >= 0
        column = language.words.index(document[length]) if length < len(document) else -1
        assert np.log(row[column]) == pytest.approx(logs[length], abs=1e-9)
    (table,) = language.next_words([document])
    for length, row in enumerate(table):
        np.testing.assert_allclose(row, language.next_word(document[:length]), rtol=0, atol=1e-12)
    for task in (TopRuleTask(language), ConstituentTask(language, len(symbols), "last")):
        assert task.posterior(document[:-1]).sum() == pytest.approx(1, abs=1e-9)


def test_batches_change_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    language, sentences = world.language, some(world.documents, 10)
    task = ConstituentTask(language, 1, "last")
    documents = [sentence[:-1] for sentence in sentences if len(sentence) > 1]
    tables = language.next_words(sentences)
    whole = (
        language.log_probabilities_of(sentences),
        task.posteriors(documents),
        TopRuleTask(language).posteriors(documents),
    )
    monkeypatch.setattr(pcfg, "_BATCH_SIZE", 3)
    for row, expected in zip(language.log_probabilities_of(sentences), whole[0], strict=True):
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-12)
    for row, expected in zip(language.next_words(sentences), tables, strict=True):
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-12)
    assert language.next_words([]) == []
    np.testing.assert_allclose(task.posteriors(documents), whole[1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(TopRuleTask(language).posteriors(documents), whole[2], rtol=0, atol=1e-12)
    assert language.log_probabilities_of([]) == []
    assert task.posteriors([]).shape == (0, len(task.classes))
    assert TopRuleTask(language).posteriors([]).shape == (0, len(language.rules[0].right_hand_sides))


def test_long_sentences_of_rare_words_do_not_underflow() -> None:
    """All words alike: a sentence of 64 words has probability V^-64, below the smallest float64."""
    num_words = 200_000
    language = Pcfg(
        rules=tuple(Rules(((0, 0),), np.ones((1, 1))) for _ in range(MAX_LEVELS)),
        emissions=np.full((1, num_words), 1 / num_words),
        words=tuple(f"w{number}" for number in range(num_words)),
    )
    document = language.words[:64]
    np.testing.assert_allclose(language.log_probabilities(document)[:64], -np.log(num_words), rtol=1e-12)
    assert language.log_probabilities(document)[64] == pytest.approx(0, abs=1e-12)
    assert language.next_word(document[:63])[5] == pytest.approx(1 / num_words, rel=1e-12)
    assert language.span_posterior(document, 3, 8, 16).tolist() == pytest.approx([1])


def test_seed_and_generator_decide_everything(default: Pcfg) -> None:
    again = random_pcfg()
    assert again.to_dict() == default.to_dict()
    assert random_pcfg(1).to_dict() != default.to_dict()
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    first = default.sample_derivations(20, np.random.default_rng(5))
    assert (np.random.get_state()[1] == state).all()
    assert again.sample_derivations(20, np.random.default_rng(5)) == first
    assert default.sample(20, np.random.default_rng(5)) == [drawn.words for drawn in first]
    assert default.sample(20, np.random.default_rng(6)) != [drawn.words for drawn in first]
    assert default.sample(0, np.random.default_rng(5)) == []


def test_json_makes_the_same_language_again(world: World, default: Pcfg) -> None:
    for language in (world.language, default):
        again = Pcfg.from_dict(json.loads(json.dumps(language.to_dict())))
        assert again.to_dict() == language.to_dict()
        assert (again.words, again.constituents) == (language.words, language.constituents)
        assert (again.emissions == language.emissions).all()
        for mine, other in zip(again.rules, language.rules, strict=True):
            assert mine.right_hand_sides == other.right_hand_sides
            assert (mine.probabilities == other.probabilities).all()
        assert [task.name for task in again.tasks] == [task.name for task in language.tasks]


def test_tables_are_read_only_copies() -> None:
    table = np.array([[0.5, 0.5]])
    rules = Rules(((0, 0), (0,)), table)
    table[0] = [1, 0]
    assert rules.probabilities.tolist() == [[0.5, 0.5]]
    with pytest.raises(ValueError, match="read-only"):
        rules.probabilities[0, 0] = 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"symbols": ()}, f"symbols must be of 1 to {MAX_LEVELS} levels, got 0"),
        ({"symbols": (5,) * 7}, f"symbols must be of 1 to {MAX_LEVELS} levels, got 7"),
        ({"symbols": (5, 0)}, "symbols must be at least 1, got 0"),
        ({"symbols": (2, 8), "top_rules": 5}, "top_rules must be 1 to 4, got 5"),
        ({"rules": 0}, "rules must be at least 1, got 0"),
        (
            {"symbols": (4, 3), "rules": 5, "rule_sharing": 2, "word_sharing": 2},
            "rules must be at most 4 for 4 symbols of level 1.*got 5",
        ),
        ({"rule_sharing": 0.5}, "rule_sharing must be 1 to 5, got 0.5"),
        ({"rule_sharing": 6}, "rule_sharing must be 1 to 5, got 6"),
        ({"words": 7}, "words must be at least 8, got 7"),
        ({"word_sharing": 8.5}, "word_sharing must be 1 to 8, got 8.5"),
        ({"word_sharing": float("nan")}, "word_sharing must be 1 to 8, got nan"),
        ({"one_child": 1.0}, "one_child must be at least 0 and below 1, got 1.0"),
        ({"one_child": float("nan")}, "one_child must be at least 0 and below 1, got nan"),
        ({"concentration": 0.0}, "concentration must be above 0 and finite, got 0.0"),
        ({"constituents": ((9, "first"),)}, "level of a constituent must be 1 to 3, got 9"),
        ({"constituents": ((1, "middle"),)}, "side of a constituent must be one of first, last, got 'middle'"),
    ],
)
def test_wrong_sizes_are_an_error(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_pcfg(**{"seed": 0, **arguments})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": ("a", "b", "a")}, "words must be distinct, got 1 repeated"),
        ({"words": ("a", "b")}, r"emissions must be of shape \(symbols, 2\)"),
        ({"emissions": np.full((3, 3), 0.4)}, "emissions must have rows that are distributions"),
        ({"emissions": np.array([[np.nan, 0.5, 0.5]] * 3)}, "emissions must have rows that are distributions"),
        ({"emissions": np.full((2, 3), 1 / 3)}, "rules of level 1 name symbol 2 of level 2, which has 2"),
        ({"rules": ()}, f"rules must be of 1 to {MAX_LEVELS} levels, got 0"),
        ({"rules": (Rules(((0,),), np.ones((2, 1))),)}, "rules of level 0 must have one symbol"),
        ({"constituents": ((3, "last"),)}, "level of a constituent must be 1 to 2, got 3"),
    ],
)
def test_tables_that_do_not_fit_are_an_error(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(two_levels(), **change)


@pytest.mark.parametrize(
    ("sides", "table", "message"),
    [
        (((0, 0), (0, 0)), [[0.5, 0.5]], "right_hand_sides must be distinct"),
        (((0, 0, 0),), [[1.0]], r"of 1 or 2 symbols numbered from 0, got \(0, 0, 0\)"),
        (((0, -1),), [[1.0]], "of 1 or 2 symbols numbered from 0"),
        ((), [[]], "not empty"),
        (((0,),), [[1.5]], "rows that are distributions"),
        (((0,), (1,)), [[-0.5, 1.5]], "rows that are distributions"),
    ],
)
def test_wrong_rules_are_an_error(sides: tuple, table: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rules(sides, np.array(table))


def test_wrong_questions_are_an_error() -> None:
    language = two_levels()
    with pytest.raises(ValueError, match="word 1 is not of this language: 'x' in 'a x'"):
        language.log_probabilities(("a", "x"))
    with pytest.raises(ValueError, match="level must be 1 to 2, got 0"):
        language.span_posterior(("c",), 0, 0, 1)
    with pytest.raises(ValueError, match="0 <= start < end <= 1, got 1 and 1"):
        language.span_posterior(("c",), 1, 1, 1)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        language.sample(-1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="kind must be 'pcfg', got 'hmm'"):
        Pcfg.from_dict({"kind": "hmm"})
    with pytest.raises(ValueError, match="needs emissions, which is missing"):
        Pcfg.from_dict({key: value for key, value in language.to_dict().items() if key != "emissions"})
