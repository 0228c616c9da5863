"""What probes see: matrices of features made of the engine's answers, one function for each kind of features.

Every kind is a function of f(s) and Φ, so none costs a forward pass beyond that of f(s) — but for label words of more than one
token, whose first tokens have to be forwarded after each document, and for Quad heads that are trained on text.

Source: Saunshi, Malladi, Arora (ICLR 2021), Tables 1 and 2 and section 5.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from harness_ext.contracts import (
    CONDITIONAL_MEAN,
    RANDOM_PROJECTION,
    Feature,
    FeatureSource,
    PromptStates,
    TokenStates,
)
from harness_ext.tasks.options import QuadOptions

__all__ = ["CONDITIONAL_MEANS", "F_OF_S", "KINDS", "Answers", "FeatureKind", "FeatureSet", "states"]

TEXTS_AT_ONCE = 64

MOST_TEXT_TOKENS = 2**19
"""Tokens that Quad heads of kind mlp and block are trained on at most: all their states are held, 1.2 GB at d = 576."""

logger = logging.getLogger("lm_eval.harness_ext.tasks")

F_OF_S = Feature()
CONDITIONAL_MEANS = Feature(mixture=CONDITIONAL_MEAN)

MOST_DIRECTIONS = 1024
MOST_VALUES = 2**27
"""A probe on p_f sees its coordinates along so many directions at most, and along no more than make half a GiB of the
coordinates of the training documents, or of the directions themselves. On SST-2 under SmolLM2-135M, where 1,024 directions
leave out 2e-4 of the variance, cross-validation found 80.8 % with 1,023, 80.9 % with 2,046, and 79.9 % with 511."""

ROWS_AT_ONCE = 256
"""Documents whose p_f is held."""


@dataclass(frozen=True)
class Answers:
    """The engine's answers for one prompt.

    Attributes:
        train: Of the training documents.
        test: Of the evaluated documents.
        train_texts: What the model read of the training documents.
        test_texts: Likewise.
        words: The words whose log-probabilities were asked for.
    """

    train: Sequence[PromptStates]
    test: Sequence[PromptStates]
    train_texts: Sequence[str] = ()
    test_texts: Sequence[str] = ()
    words: Sequence[str] = ()

    @property
    def source(self) -> FeatureSource:
        """Where the vectors are."""
        source = self.train[0].source
        assert source is not None, "the engine answers requests for features with a source"
        return source

    @property
    def train_rows(self) -> list[int]:
        return [answer.row for answer in self.train]

    @property
    def test_rows(self) -> list[int]:
        return [answer.row for answer in self.test]


@dataclass(frozen=True)
class FeatureSet:
    """One matrix of features, made when it is first asked for.

    Attributes:
        name: Identifies it among all of a run.
        make_train: Makes features of the training documents, shape (n, d).
        make_test: Likewise of the evaluated documents.
        scaling: How `evaluators.probe` scales the columns.
        total_variance: What their variances then add up to, where `scaling` is "common".
        report: What to say about it in the results JSON.
    """

    name: str
    make_train: Callable[[], np.ndarray]
    make_test: Callable[[], np.ndarray]
    scaling: Literal["columns", "common"] = "columns"
    total_variance: float | None = None
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FeatureKind:
    """A kind of features.

    Attributes:
        asked: Vectors to ask of the engine for each document, beside those of f(s) at the layers of the options.
        words: Which list of words to ask for: "class_words", "subset_words" or none.
        make: Makes the set; only Quad features look at the options.
        layers: Whether other layers than f(s) make sense.
    """

    asked: tuple[Feature, ...]
    make: Callable[[Answers, QuadOptions], FeatureSet]
    words: str = ""
    layers: bool = False


def states(answers: Answers, feature: Feature) -> FeatureSet:
    """The vector of a layer; f(s) by default."""
    return FeatureSet(
        name=feature.name,
        make_train=lambda: answers.source.take(answers.train_rows, feature),
        make_test=lambda: answers.source.take(answers.test_rows, feature),
    )


def mixture(answers: Answers, options: QuadOptions, *, name: str) -> FeatureSet:
    """Φᵀp_f(·|s), or Rᵀp_f(·|s) for a random R."""
    return replace(states(answers, Feature(mixture=name)), report={"feature_notes": _notes(answers)})


def _notes(answers: Answers) -> list[str]:
    biased = "The output embedding has a bias: it is part of p_f, and no part of Φ."
    return [biased] if answers.source.has_output_bias else []


def word_log_probabilities(answers: Answers, options: QuadOptions) -> FeatureSet:
    """log p_f(w|s) of each word, a word of several tokens by the product over its tokens.

    Raises:
        ValueError: If no word is left.
    """
    lengths = np.array(answers.train[0].num_tokens)
    train = np.array([answer.log_probs for answer in answers.train])
    test = np.array([answer.log_probs for answer in answers.test])
    # NaN marks words of several tokens where the task wants one-token words only. The training documents decide; after an odd
    # end of an evaluated document a word may have another number of tokens.
    kept = ~np.isnan(train).any(axis=0)
    if np.isnan(test[:, kept]).any():
        word = [word for word, flag in zip(answers.words, kept, strict=True) if flag][
            int(np.isnan(test[:, kept]).any(axis=0).argmax())
        ]
        raise ValueError(
            f"the word {word!r} is one token after every training document and several after an evaluated one. Leave it out, "
            'or let such words count: --metadata \'{"probe": {"one_token_words": false}}\'.'
        )
    if not kept.any():
        raise ValueError(
            f"none of the words {', '.join(map(repr, answers.words))} is one token under this model's tokenizer. Give others "
            'by --metadata, or let words of several tokens count: --metadata \'{"probe": {"one_token_words": false}}\'.'
        )
    report = {
        "words": [word for word, flag in zip(answers.words, kept, strict=True) if flag],
        "words_of_several_tokens": {
            word: int(length) for word, length in zip(answers.words, lengths, strict=True) if length > 1
        },
        "words_left_out": [word for word, flag in zip(answers.words, kept, strict=True) if not flag],
    }
    # Named by their values, since the same words after another delimiter have others.
    name = f"words {hash(train[:, kept].tobytes())}"
    return FeatureSet(name, lambda: train[:, kept], lambda: test[:, kept], report=report)


def probabilities(answers: Answers, options: QuadOptions) -> FeatureSet:
    """p_f(·|s) along the directions in which it varies most over the training documents; see `evaluators.directions`.

    All words count, in their own proportions: the columns are the coordinates of p_f, not standardised. Their variances add
    up to V, as those of V standardised columns do, however many directions there are.

    Raises:
        ValueError: If p_f is the same after every training document.
    """
    from harness_ext.evaluators.directions import leading_directions

    source, count = answers.source, len(answers.train)

    def blocks(rows: Sequence[int]) -> Iterator[np.ndarray]:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            yield source.probabilities(rows[start : start + ROWS_AT_ONCE])

    vocabulary = source.probabilities(answers.train_rows[:1]).shape[1]
    most = max(1, min(MOST_DIRECTIONS, MOST_VALUES // count, MOST_VALUES // vocabulary))
    try:
        directions, train = leading_directions(lambda: blocks(answers.train_rows), count, most, device=source.device)
    except ValueError as err:
        raise ValueError(
            f"p_f(·|s) is the same after every training document, so there is nothing to fit: {err}."
        ) from err

    # They are asked for by the predictions and again by the accuracies.
    @functools.cache
    def test() -> np.ndarray:
        return directions.coordinates(lambda: blocks(answers.test_rows), len(answers.test))

    report = {
        "vocabulary": vocabulary,
        "directions": train.shape[1],
        "variance_left_out": directions.variance_left_out,
    }
    return FeatureSet(
        "probabilities",
        lambda: train,
        test,
        scaling="common",
        total_variance=float(vocabulary),
        report=report,
    )


def quad(answers: Answers, options: QuadOptions) -> FeatureSet:
    """g(s), the minimiser of the Quad loss: in closed form from p_f, or by a head trained on text."""
    if options.head != "plug_in":
        return _learned_quad(answers, options)
    from harness_ext.evaluators.quad import plug_in_quad

    gram = answers.source.gram()
    train = plug_in_quad(answers.source.take(answers.train_rows, CONDITIONAL_MEANS), gram, ridge=options.ridge)
    test = plug_in_quad(answers.source.take(answers.test_rows, CONDITIONAL_MEANS), gram, ridge=options.ridge)
    report = {
        "ridge": train.ridge,
        "gram_condition_number": train.condition_number,
        "gram_rank": train.rank,
        "notes": [*train.notes, *_notes(answers)],
    }
    return FeatureSet(f"quad {options}", lambda: train.values, lambda: test.values, report={"quad": report})


def _learned_quad(answers: Answers, options: QuadOptions) -> FeatureSet:
    from harness_ext.engine.quad_head import train_quad_head

    source = answers.source
    texts = source.text_states(answers.train_texts)
    head = train_quad_head(
        options.head,
        texts if options.head == "linear" else _first_tokens(texts, MOST_TEXT_TOKENS),
        source.output_embedding(),
        seed=options.seed,
        epochs=options.epochs,
        device=source.device,
        show_progress=True,
    )

    def features(rows: Sequence[int], texts: Sequence[str]) -> np.ndarray:
        if options.head == "block":  # it reads the states of all tokens, of a few texts at a time
            states_of = (text.states for text in source.text_states(texts))
            groups = iter(lambda: list(itertools.islice(states_of, TEXTS_AT_ONCE)), [])
            return np.concatenate([head.features_of_texts(group) for group in groups])
        return head.features(source.take(rows, F_OF_S))

    train = features(answers.train_rows, answers.train_texts)
    test = features(answers.test_rows, answers.test_texts)
    report = asdict(head.report) | {"validation_loss": head.report.validation_loss, "notes": _notes(answers)}
    return FeatureSet(f"quad {options}", lambda: train, lambda: test, report={"quad": report})


def _first_tokens(texts: Iterable[TokenStates], budget: int) -> Iterator[TokenStates]:
    """Yield texts until they have so many tokens."""
    for text in texts:
        yield text
        budget -= len(text.token_ids)
        if budget <= 0:
            return


KINDS: dict[str, FeatureKind] = {
    "f": FeatureKind((), lambda answers, options: states(answers, F_OF_S), layers=True),
    "conditional_mean": FeatureKind((CONDITIONAL_MEANS,), functools.partial(mixture, name=CONDITIONAL_MEAN)),
    "random_projection": FeatureKind(
        (Feature(mixture=RANDOM_PROJECTION),), functools.partial(mixture, name=RANDOM_PROJECTION)
    ),
    "class_words": FeatureKind((), word_log_probabilities, words="class_words"),
    "subset_words": FeatureKind((), word_log_probabilities, words="subset_words"),
    "probabilities": FeatureKind((), probabilities),
    "quad": FeatureKind((CONDITIONAL_MEANS,), quad),
}
"""Kinds of features by name."""
