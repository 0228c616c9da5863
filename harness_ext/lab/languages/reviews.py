"""A synthetic language of English movie reviews in which every probability is known.

A review has a hidden sentiment and a hidden topic. Its body is a few sentences; each is drawn from a list of templates,
and each slot of a template from a table p(word | sentiment, topic). The tables of the two sentiments overlap, some
sentences turn a word's meaning round ("the plot was not clumsy .") and some carry another person's opinion, which says
nothing, so the sentiment can be told from the body only up to the Bayes error, which is computed exactly. One more
sentence, the verdict ("this movie is great ."), closes the review; its last word is drawn given the sentiment.

The downstream tasks are classification of bodies by sentiment and by topic. The language is this project's own; no text was
copied.

Everything exact comes from reading a text word by word with a belief about sentiment, topic and the template that is being
written: the forward algorithm of a hidden Markov model whose states are those three and the place in the template.

Known gap: the sentences of a review are independent given sentiment and topic, so a review may contradict itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from harness_ext.lab.languages.base import END_OF_TEXT, ByDocument, Example, TaskByDocument, word_indices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "KIND",
    "SENTIMENTS",
    "VARIABLES",
    "HiddenVariableTask",
    "Review",
    "ReviewGrammar",
    "Slot",
    "Template",
    "build_tokenizer",
    "default_grammar",
    "fixed_reviews",
]

KIND = "reviews"
"""Value of `kind` in what `to_dict` returns."""

SENTIMENTS = ("negative", "positive")

VARIABLES = ("sentiment", "topic")
"""What a body can be asked for."""

_STOP = "."
_TABLES = ("sentiment_probabilities", "topic_probabilities", "length_probabilities")
_CHUNK = 1024
"""Texts that are read at once; it bounds the memory and changes no result by more than rounding."""


@dataclass(frozen=True, eq=False)
class Slot:
    """A table p(word | sentiment, topic).

    Attributes:
        words: The W distinct words that may stand here.
        probabilities: float64 of shape (S, T, W); every row over W sums to 1.
    """

    words: tuple[str, ...]
    probabilities: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "probabilities", _read_only(self.probabilities))
        if len(set(self.words)) != len(self.words):
            raise ValueError(f"a slot's words must be distinct, got {self.words}")
        if self.probabilities.ndim != 3 or self.probabilities.shape[2] != len(self.words):
            raise ValueError(f"expected a table of shape (S, T, {len(self.words)}), got {self.probabilities.shape}")
        is_row = np.isclose(self.probabilities.sum(axis=2), 1.0, rtol=0, atol=1e-12)
        if not ((self.probabilities >= 0).all() and is_row.all()):
            raise ValueError(f"rows of a slot's table must be distributions; slot with words {self.words} is not")

    @cached_property
    def cumulative(self) -> list[list[list[float]]]:
        return [[_cumulative(row) for row in rows] for rows in self.probabilities]


class Template(NamedTuple):
    """A pattern for one sentence and its probability among its kind.

    Attributes:
        parts: Literal words, and slot names in braces: ("the", "{part}", "was", "{quality}", ".").
        probability: p(template); it depends neither on sentiment nor on topic.
    """

    parts: tuple[str, ...]
    probability: float


class Review(NamedTuple):
    """One draw from the language; `sentiment` and `topic` are indices of the hidden variables."""

    sentiment: int
    topic: int
    body: tuple[str, ...]
    verdict: tuple[str, ...]

    @property
    def text(self) -> str:
        """The body: what the downstream task shows."""
        return " ".join(self.body)

    @property
    def document(self) -> str:
        """Body and verdict: what a language model is trained on."""
        return " ".join(self.body + self.verdict)


@dataclass(frozen=True, eq=False)
class ReviewGrammar(ByDocument):
    """The language, as explicit tables. S sentiments, T topics.

    Attributes:
        topics: Names of the T topics.
        sentiment_probabilities: float64 (S,).
        topic_probabilities: float64 (T,).
        length_probabilities: float64 (L,); entry k is the probability of a body of k + 1 sentences.
        body: Templates of body sentences. Two of them may write the same sentence.
        verdict: Templates of the closing sentence. None of them can write a body sentence.
        slots: The tables that the templates name.
        cues: For each of VARIABLES, the beginning of a sentence whose next word tells it, such as ("this", "movie", "is").
    """

    topics: tuple[str, ...]
    sentiment_probabilities: np.ndarray
    topic_probabilities: np.ndarray
    length_probabilities: np.ndarray
    body: tuple[Template, ...]
    verdict: tuple[Template, ...]
    slots: Mapping[str, Slot]
    cues: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        for field in ("sentiment_probabilities", "topic_probabilities", "length_probabilities"):
            object.__setattr__(self, field, _read_only(getattr(self, field)))
        shape = (len(SENTIMENTS), len(self.topics))
        for name, row in (
            ("sentiment_probabilities", self.sentiment_probabilities),
            ("topic_probabilities", self.topic_probabilities),
            ("length_probabilities", self.length_probabilities),
            ("probabilities of the body templates", np.array([template.probability for template in self.body])),
            ("probabilities of the verdict templates", np.array([template.probability for template in self.verdict])),
        ):
            if row.ndim != 1 or not ((row >= 0).all() and np.isclose(row.sum(), 1.0, rtol=0, atol=1e-12)):
                raise ValueError(f"{name} must be a distribution, got {row.tolist()} with sum {row.sum()}")
        if (len(self.sentiment_probabilities), len(self.topic_probabilities)) != shape:
            raise ValueError(f"expected {shape[0]} sentiments and {shape[1]} topics")
        if set(self.cues) != set(VARIABLES):
            raise ValueError(f"cues must be for {', '.join(VARIABLES)}, got {', '.join(map(repr, self.cues))}")
        for variable, cue in self.cues.items():
            if not any(_begins(cue, template) for template in self.body + self.verdict):
                raise ValueError(f"the cue of the {variable} must begin a template up to a slot, got {' '.join(cue)!r}")
        for template in self.body + self.verdict:
            if template.parts[-1] != _STOP or _STOP in template.parts[:-1]:
                raise ValueError(f"a template ends in its only full stop, got {' '.join(template.parts)!r}")
            for name in _slot_names(template):
                if name not in self.slots:
                    raise ValueError(
                        f"template {' '.join(template.parts)!r} names the slot {name!r}. "
                        f"Known: {', '.join(sorted(self.slots))}."
                    )
        for name, slot in self.slots.items():
            if _STOP in slot.words:
                raise ValueError(f"slot {name!r} has a full stop among its words, which only ends sentences")
            if slot.probabilities.shape[:2] != shape:
                raise ValueError(f"slot {name!r} has a table of shape {slot.probabilities.shape}, expected {shape}")
        for first in self.verdict:
            for second in self.body:
                if self._may_coincide(first, second):
                    raise ValueError(
                        f"a verdict and a body sentence could be the same: {' '.join(first.parts)!r} and "
                        f"{' '.join(second.parts)!r}"
                    )

    @property
    def name(self) -> str:
        return KIND

    @cached_property
    def tasks(self) -> tuple[HiddenVariableTask, ...]:
        return tuple(HiddenVariableTask(self, variable) for variable in VARIABLES if self.most_sentences(variable))

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Every word of the language, sorted."""
        literals = {
            part for template in self.body + self.verdict for part in template.parts if not part.startswith("{")
        }
        return tuple(sorted(literals.union(*(slot.words for slot in self.slots.values()))))

    @cached_property
    def opening_words(self) -> tuple[str, ...]:
        """Every word that a review may begin with, sorted."""
        return tuple(sorted({word for template in self.body for word in self._words_of(template.parts[0])}))

    def most_sentences(self, variable: str) -> int:
        """Sentences of the longest bodies that the cue of one of VARIABLES can follow; 0 if it can follow none."""
        longest = int(np.flatnonzero(self.length_probabilities)[-1]) + 1
        is_of_verdict = any(_begins(self.cues[variable], template) for template in self.verdict)
        return longest if is_of_verdict else longest - 1

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
        """Draw documents, body and verdict, independently."""
        return [review.body + review.verdict for review in self.sample_many(count, rng)]

    def _sample_review(self, rng: np.random.Generator) -> Review:
        # One call for all the uniforms that a review can need: calls cost more than numbers.
        uniforms = iter(rng.random(self._most_draws).tolist())
        sentiment = bisect_right(self._cumulatives.sentiment, next(uniforms))
        topic = bisect_right(self._cumulatives.topic, next(uniforms))
        num_sentences = 1 + bisect_right(self._cumulatives.length, next(uniforms))
        body: list[str] = []
        for _ in range(num_sentences):
            template = self.body[bisect_right(self._cumulatives.body, next(uniforms))]
            body += self._fill(template, sentiment, topic, uniforms)
        closing = self.verdict[bisect_right(self._cumulatives.verdict, next(uniforms))]
        verdict = tuple(self._fill(closing, sentiment, topic, uniforms))
        return Review(sentiment=sentiment, topic=topic, body=tuple(body), verdict=verdict)

    def sample_many(
        self, count: int, rng: np.random.Generator, *, without: Collection[tuple[str, ...]] = ()
    ) -> list[Review]:
        """Draw `count` independent reviews, with their hidden variables, whose bodies are not in `without`.

        Leaving out bodies, whatever their sentiment, leaves p(sentiment | body) of the others as it is.
        """
        left_out = frozenset(without)
        reviews: list[Review] = []
        while len(reviews) < count:
            review = self._sample_review(rng)
            if review.body not in left_out:
                reviews.append(review)
        return reviews

    def next_words(self, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return p* after every prefix of each document, the empty one and the whole included: float64 (len + 1, V + 1) each.

        Raises:
            ValueError: If a document is no prefix of any that can occur.
        """
        result: list[np.ndarray] = [np.empty(0)] * len(documents)
        for rows, ids in word_indices(documents, self._index, most=_CHUNK):
            reading = _Reading(self, len(rows))
            possible = np.ones(len(rows), dtype=bool)
            tables = np.empty((len(rows), ids.shape[1] + 1, len(self.words) + 1))
            for t in range(ids.shape[1] + 1):
                if t > 0:
                    possible &= reading.observe(ids[:, t - 1]) > 0
                tables[:, t, :-1] = reading.word_probabilities()
                tables[:, t, -1] = reading.has_ended
            self._check_possible(documents, rows, possible)
            for row, table in zip(rows, tables, strict=True):
                result[row] = table
        return result

    def log_probabilities_of(self, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return `log_probabilities` of each document; many at once are faster.

        Raises:
            ValueError: If a document cannot occur.
        """
        result: list[np.ndarray] = [np.empty(0)] * len(documents)
        for rows, ids in word_indices(documents, self._index, most=_CHUNK):
            reading = _Reading(self, len(rows))
            # The end of text is certain after a verdict.
            probabilities = np.ones((len(rows), ids.shape[1] + 1))
            for t, word in enumerate(ids.T):
                probabilities[:, t] = reading.observe(word)
            self._check_possible(documents, rows, (probabilities > 0).all(axis=1) & reading.has_ended)
            for row, values in zip(rows, np.log(probabilities), strict=True):
                result[row] = values
        return result

    def posteriors(self, bodies: Sequence[Sequence[str]]) -> np.ndarray:
        """Return p(sentiment, topic | body), float64 of shape (n, S, T), summed over what may have written each sentence.

        Raises:
            ValueError: If a text is no body: not whole sentences, or with a verdict.
        """
        result = np.empty((len(bodies), len(SENTIMENTS), len(self.topics)))
        for rows, ids in word_indices(bodies, self._index, most=_CHUNK):
            reading = _Reading(self, len(rows))
            possible = np.full(len(rows), ids.shape[1] > 0)
            for word in ids.T:
                possible &= reading.observe(word) > 0
            possible &= reading.is_between & ~reading.has_ended
            if not possible.all():
                body = " ".join(bodies[rows[int(possible.argmin())]])
                raise ValueError(
                    f"not a body of this language, 1 to {len(self.length_probabilities)} of its sentences that end in a full "
                    f"stop, without the verdict: {body!r}"
                )
            result[rows] = reading.hidden.reshape(-1, *result.shape[1:])
        return result

    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        """Return `build_tokenizer` of this language."""
        return build_tokenizer(self, max_length=max_length)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types from which `from_dict` makes the language again, to the last bit."""
        return {
            "kind": KIND,
            "topics": list(self.topics),
            **{name: getattr(self, name).tolist() for name in _TABLES},
            **{
                name: [{"parts": list(template.parts), "probability": template.probability} for template in templates]
                for name, templates in (("body", self.body), ("verdict", self.verdict))
            },
            "slots": {
                name: {"words": list(slot.words), "probabilities": slot.probabilities.tolist()}
                for name, slot in self.slots.items()
            },
            "cues": {variable: list(cue) for variable, cue in self.cues.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ReviewGrammar:
        """Make the language that `to_dict` described.

        Raises:
            ValueError: If `kind` is another, a field is missing or unknown, or the tables are not those of a language.
        """
        expected = {"kind", "topics", "body", "verdict", "slots", "cues", *_TABLES}
        if data.get("kind") != KIND:
            raise ValueError(f"expected a language of kind {KIND!r}, got {data.get('kind')!r}")
        if set(data) != expected:
            raise ValueError(
                f"a language of kind {KIND!r}: missing {sorted(expected - set(data))}, unknown {sorted(set(data) - expected)}"
            )
        body, verdict = (
            tuple(Template(parts=tuple(entry["parts"]), probability=entry["probability"]) for entry in data[name])
            for name in ("body", "verdict")
        )
        return cls(
            topics=tuple(data["topics"]),
            **{name: np.array(data[name], dtype=float) for name in _TABLES},
            body=body,
            verdict=verdict,
            slots={
                name: Slot(tuple(slot["words"]), np.array(slot["probabilities"], dtype=float))
                for name, slot in data["slots"].items()
            },
            cues={variable: tuple(cue) for variable, cue in data["cues"].items()},
        )

    @cached_property
    def _index(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    @cached_property
    def _places(self) -> np.ndarray:
        """p(word | place in the template, sentiment and topic, template): float64 (P, S·T, M, V), for P places of the longest
        of the M templates, those of bodies first; 0 behind the end of a template."""
        templates = self.body + self.verdict
        num_hidden = len(SENTIMENTS) * len(self.topics)
        longest = max(len(template.parts) for template in templates)
        table = np.zeros((longest, num_hidden, len(templates), len(self.words)))
        for number, template in enumerate(templates):
            for place, part in enumerate(template.parts):
                if part.startswith("{"):
                    slot = self.slots[part[1:-1]]
                    columns = [self._index[word] for word in slot.words]
                    table[place, :, number, columns] = slot.probabilities.reshape(num_hidden, -1).T
                else:
                    table[place, :, number, self._index[part]] = 1.0
        return table

    @cached_property
    def _openings(self) -> np.ndarray:
        """p(template | sentences of the body so far), float64 (L + 1, M); its order is that of `_places`."""
        lengths = np.concatenate([[0.0], self.length_probabilities])
        at_least = np.cumsum(lengths[::-1])[::-1]
        closing = np.divide(lengths, at_least, out=np.ones_like(lengths), where=at_least > 0)
        body, verdict = (
            np.array([template.probability for template in templates]) for templates in (self.body, self.verdict)
        )
        return np.hstack([np.outer(1 - closing, body), np.outer(closing, verdict)])

    def _check_possible(self, documents: Sequence[Sequence[str]], rows: np.ndarray, possible: np.ndarray) -> None:
        if not possible.all():
            document = documents[rows[int(possible.argmin())]]
            raise ValueError(f"not a text of this language, its probability is 0: {' '.join(document)!r}")

    @cached_property
    def _cumulatives(self) -> _Cumulatives:
        return _Cumulatives(
            sentiment=_cumulative(self.sentiment_probabilities),
            topic=_cumulative(self.topic_probabilities),
            length=_cumulative(self.length_probabilities),
            body=_cumulative([template.probability for template in self.body]),
            verdict=_cumulative([template.probability for template in self.verdict]),
        )

    @cached_property
    def _most_draws(self) -> int:
        body = 1 + max(len(_slot_names(template)) for template in self.body)
        verdict = 1 + max(len(_slot_names(template)) for template in self.verdict)
        return 3 + len(self.length_probabilities) * body + verdict

    def _words_of(self, part: str) -> tuple[str, ...]:
        return self.slots[part[1:-1]].words if part.startswith("{") else (part,)

    def _may_coincide(self, first: Template, second: Template) -> bool:
        return len(first.parts) == len(second.parts) and all(
            set(self._words_of(left)) & set(self._words_of(right))
            for left, right in zip(first.parts, second.parts, strict=True)
        )

    def _fill(self, template: Template, sentiment: int, topic: int, uniforms: Iterator[float]) -> list[str]:
        words = []
        for part in template.parts:
            if part.startswith("{"):
                slot = self.slots[part[1:-1]]
                words.append(slot.words[bisect_right(slot.cumulative[sentiment][topic], next(uniforms))])
            else:
                words.append(part)
        return words


@dataclass(frozen=True, eq=False)
class HiddenVariableTask(TaskByDocument):
    """The downstream task that asks a body for its sentiment or its topic.

    The classifier sees bodies that the task's cue can follow. How many sentences a body has says nothing about either.

    Attributes:
        variable: One of VARIABLES.
    """

    language: ReviewGrammar
    variable: str

    def __post_init__(self) -> None:
        if self.variable not in VARIABLES:
            raise ValueError(f"variable must be one of {', '.join(VARIABLES)}, got {self.variable!r}")

    @property
    def name(self) -> str:
        # The older of the two has the name of the language.
        return KIND if self.variable == "sentiment" else f"{KIND}_{self.variable}"

    @property
    def classes(self) -> tuple[str, ...]:
        return SENTIMENTS if self.variable == "sentiment" else self.language.topics

    @property
    def cue(self) -> tuple[str, ...]:
        return self.language.cues[self.variable]

    def sample(self, count: int, rng: np.random.Generator) -> list[Example]:
        """Draw labelled bodies, independently."""
        most = self.language.most_sentences(self.variable)
        examples: list[Example] = []
        while len(examples) < count:
            reviews = self.language.sample_many(count - len(examples), rng)
            examples += [self.example(review) for review in reviews if review.body.count(_STOP) <= most]
        return examples

    def example(self, review: Review) -> Example:
        """Return the body of a review with its label."""
        return Example(review.body, getattr(review, self.variable))

    def posteriors(self, documents: Sequence[Sequence[str]]) -> np.ndarray:
        """Return p(class | body) of each body, exactly, float64 (n, C).

        Raises:
            ValueError: If a document is no body.
        """
        return self.language.posteriors(documents).sum(axis=2 if self.variable == "sentiment" else 1)


class _Reading:
    """What the words so far of n texts, as many of each, tell.

    Attributes:
        joint: float64 (n, S·T, M), p(sentiment and topic, template of the sentence that is being written | words so far).
        place: int64 (n,), words so far of that sentence.
        has_ended: bool (n,), whether the last word closed the verdict.
    """

    def __init__(self, language: ReviewGrammar, count: int) -> None:
        self._language = language
        prior = np.outer(language.sentiment_probabilities, language.topic_probabilities).reshape(-1)
        self.joint = np.tile(prior[:, None] * language._openings[0], (count, 1, 1))
        self.place = np.zeros(count, dtype=np.int64)
        self.has_ended = np.zeros(count, dtype=bool)
        self._sentences = np.zeros(count, dtype=np.int64)

    @property
    def hidden(self) -> np.ndarray:
        """p(sentiment and topic | words so far), float64 (n, S·T)."""
        return self.joint.sum(axis=2)

    @property
    def is_between(self) -> np.ndarray:
        """Whether the last word ended a sentence, bool (n,)."""
        return (self.place == 0) & (self._sentences > 0)

    def observe(self, word: np.ndarray) -> np.ndarray:
        """Take in the next word of each text, indices (n,), and return its probability, float64 (n,)."""
        joint = self.joint * self._language._places[self.place, :, :, word]
        scale = np.where(self.has_ended, 0.0, joint.sum(axis=(1, 2)))
        joint /= np.where(scale > 0, scale, 1.0)[:, None, None]
        # No sentence goes on behind a full stop, and one that cannot be ended is never at the end of all templates.
        closed = word == self._language._index[_STOP]
        is_verdict = joint[:, :, len(self._language.body) :].any(axis=(1, 2))
        self.has_ended |= closed & is_verdict
        self._sentences += closed
        openings = self._language._openings[np.minimum(self._sentences, len(self._language._openings) - 1)]
        begun = joint.sum(axis=2)[:, :, None] * openings[:, None]
        self.joint = np.where(closed[:, None, None], begun, joint)
        self.place = np.where(closed, 0, np.minimum(self.place + 1, len(self._language._places) - 1))
        return scale

    def word_probabilities(self) -> np.ndarray:
        """Return p(next word | words so far), float64 (n, V)."""
        places = self._language._places
        num_writers, num_words = self.joint[0].size, places.shape[-1]
        result = np.zeros((len(self.joint), num_words))
        for place in np.unique(self.place):
            rows = np.flatnonzero((self.place == place) & ~self.has_ended)
            result[rows] = self.joint[rows].reshape(-1, num_writers) @ places[place].reshape(num_writers, num_words)
        return result


class _Cumulatives(NamedTuple):
    sentiment: list[float]
    topic: list[float]
    length: list[float]
    body: list[float]
    verdict: list[float]


def _cumulative(probabilities: Sequence[float] | np.ndarray) -> list[float]:
    # Ends in infinity, so that bisect_right(row, u) is an index of the table for every u in [0, 1).
    return [*np.cumsum(probabilities)[:-1].tolist(), float("inf")]


def _slot_names(template: Template) -> list[str]:
    return [part[1:-1] for part in template.parts if part.startswith("{")]


def _begins(cue: Sequence[str], template: Template) -> bool:
    parts = template.parts
    return parts[: len(cue)] == tuple(cue) and len(parts) > len(cue) and parts[len(cue)].startswith("{")


def _read_only(table: np.ndarray) -> np.ndarray:
    copy = np.array(table, dtype=np.float64)
    copy.flags.writeable = False
    return copy


def build_tokenizer(grammar: ReviewGrammar, *, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, GPT-2 style, in which every word of the language is one token.

    Merging goes on until each word with its leading blank, and each opening word without one, is a single token, so the
    result depends on the grammar's words alone. Any other text is encoded in smaller pieces, down to bytes. The end of
    text is the BOS and the EOS; no special token is added to a text.

    Args:
        max_length: Context length of the model, recorded as `model_max_length`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2**16,
        show_progress=False,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([*grammar.opening_words, *(" " + word for word in grammar.words)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )


# The default grammar. A word's lean l multiplies its weight by exp(l) under the positive sentiment and by exp(-l) under
# the negative one, so it carries a log-likelihood ratio of about 2 l nats.
_STRONG, _MILD = 1.8, 0.8
# Weights fall by this factor from word to word of a list. A few frequent words let a tiny model see early on that there
# is a sentiment at all: with flat lists twice as long it learns every pattern but this one for 600,000 tokens.
_LEANING_DECAY, _PLAIN_DECAY = 0.7, 0.85

_TOPICS = ("comedy", "thriller", "romance", "western")

_NOUNS = {
    "comedy": "comedy farce satire parody",
    "thriller": "thriller mystery chiller caper",
    "romance": "romance melodrama weepie musical",
    "western": "western epic saga adventure",
}
_COMMON_NOUNS = "movie film picture feature"
_THINGS = {
    "comedy": "jokes gags puns pranks stunts impressions",
    "thriller": "clues twists chases murders spies suspects",
    "romance": "kisses letters dances lovers weddings vows",
    "western": "horses duels outlaws saloons gunfights sheriffs",
}
# Lists that lean, from strongly positive by neutral to strongly negative; moods have no neutral words.
_MOODS = {
    "comedy": ("hilarious witty", "silly cheeky", "", "childish noisy", "unfunny lame"),
    "thriller": ("gripping tense", "clever dark", "", "slow confusing", "predictable implausible"),
    "romance": ("touching tender", "sweet dreamy", "", "sappy soft", "cold loveless"),
    "western": ("majestic rugged", "grand dusty", "", "tired creaky", "stale lifeless"),
}
_QUALITIES = (
    "superb elegant inventive vivid polished",
    "fresh lively crisp smooth honest",
    "simple quiet strange modern familiar",
    "uneven thin heavy rough vague",
    "clumsy dull lazy shallow tedious",
)
_ATTITUDES = (
    "loved adored treasured",
    "enjoyed liked admired",
    "noticed remembered followed",
    "doubted questioned tolerated",
    "hated loathed endured",
)
_REACTIONS = ("cheered applauded", "laughed smiled", "waited whispered", "fidgeted shrugged", "yawned groaned")
_DEEDS = (
    "mastered elevated perfected",
    "improved rescued refined",
    "handled planned changed",
    "rushed stretched neglected",
    "ruined wasted botched",
)

# The last word of a review, with its probability within its list.
_GOOD_VERDICTS = {
    "great": 0.34, "good": 0.24, "wonderful": 0.12, "excellent": 0.1, "fantastic": 0.08, "brilliant": 0.06, "lovely": 0.06
}  # fmt: skip
_BAD_VERDICTS = {
    "terrible": 0.34, "bad": 0.24, "awful": 0.12, "horrible": 0.1, "dreadful": 0.08, "poor": 0.06, "pathetic": 0.06
}  # fmt: skip
_NEUTRAL_VERDICTS = {"okay": 0.4, "average": 0.35, "acceptable": 0.25}
_GOOD_FEELINGS = {"delighted": 0.3, "happy": 0.25, "thrilled": 0.2, "pleased": 0.15, "moved": 0.1}
_BAD_FEELINGS = {"disappointed": 0.3, "bored": 0.25, "annoyed": 0.2, "sad": 0.15, "cheated": 0.1}
_NEUTRAL_FEELINGS = {"surprised": 0.6, "calm": 0.4}
_CONTRARY_SHARE, _NEUTRAL_SHARE = 0.06, 0.06

# Lists that depend on nothing.
_PLAIN = {
    "person": "brother sister mother father friend cousin neighbour uncle aunt daughter son husband wife colleague",
    "part": "acting plot script dialogue music editing pacing lighting casting ending opening story soundtrack "
    "photography direction scenery narration choreography",
    "maker": "director writer lead villain hero heroine cast crew producer composer narrator star",
    "moment": "credits finale intermission climax introduction prologue",
    "place": "cinema theatre festival library school club",
    "day": "saturday friday sunday monday tuesday wednesday thursday",
}

_BODY = (
    (3.0, "the {part} was {quality} and {quality} ."),
    (2.0, "the {part} was {quality} ."),
    (1.0, "the {things} were {mood} ."),
    (1.0, "the {things} were {quality} and {mood} ."),
    (1.0, "i {attitude} the {part} ."),
    (1.0, "the {maker} {deed} the {part} ."),
    (1.0, "it is one {quality} {noun} with {mood} {things} ."),
    (0.5, "everyone {reaction} during the {moment} ."),
    (0.5, "the {part} was not {quality_denied} ."),
    (0.5, "my {person} found the {part} {quality_other} ."),
    (0.5, "i watched this {noun} with my {person} ."),
    (0.5, "we saw it at the {place} on {day} ."),
)
_VERDICT = (
    (0.5, "this movie is {verdict} ."),
    (0.25, "overall it was {verdict} ."),
    (0.25, "i felt {feeling} ."),
)
_LENGTH_PROBABILITIES = (0.3, 0.3, 0.25, 0.15)


def default_grammar() -> ReviewGrammar:
    """Return the grammar of the demo: 2 sentiments, 4 topics, bodies of 1 to 4 sentences."""
    quality = _leaning_slot(_QUALITIES)
    slots = {
        "quality": quality,
        "quality_denied": _denied(quality),
        "quality_other": _other(quality),
        "attitude": _leaning_slot(_ATTITUDES),
        "reaction": _leaning_slot(_REACTIONS),
        "deed": _leaning_slot(_DEEDS),
        "mood": _topical_slot([_leaning_slot(_MOODS[topic]) for topic in _TOPICS], own=0.85),
        "things": _topical_slot([_plain_slot(_THINGS[topic]) for topic in _TOPICS], own=0.8),
        "noun": _topical_slot([_plain_slot(_NOUNS[topic]) for topic in _TOPICS], own=0.45, common=_COMMON_NOUNS),
        "verdict": _closing_slot(_GOOD_VERDICTS, _NEUTRAL_VERDICTS, _BAD_VERDICTS),
        "feeling": _closing_slot(_GOOD_FEELINGS, _NEUTRAL_FEELINGS, _BAD_FEELINGS),
        **{name: _plain_slot(words) for name, words in _PLAIN.items()},
    }
    return ReviewGrammar(
        topics=_TOPICS,
        sentiment_probabilities=np.full(len(SENTIMENTS), 1 / len(SENTIMENTS)),
        topic_probabilities=np.full(len(_TOPICS), 1 / len(_TOPICS)),
        length_probabilities=np.array(_LENGTH_PROBABILITIES),
        body=_templates(_BODY),
        verdict=_templates(_VERDICT),
        slots=slots,
        cues={"sentiment": ("this", "movie", "is"), "topic": ("i", "watched", "this")},
    )


def fixed_reviews(seed: int = 0) -> ReviewGrammar:
    """Return `default_grammar`. Its tables are written down, so every seed gives the same language.

    Raises:
        ValueError: If the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return default_grammar()


def _templates(lines: Sequence[tuple[float, str]]) -> tuple[Template, ...]:
    total = sum(weight for weight, _ in lines)
    return tuple(Template(parts=tuple(line.split()), probability=weight / total) for weight, line in lines)


def _plain_slot(words: str) -> Slot:
    """A slot that depends on no hidden variable."""
    members = tuple(words.split())
    row = _normalise(_falling_weights(len(members), _PLAIN_DECAY))
    return Slot(members, np.tile(row, (len(SENTIMENTS), len(_TOPICS), 1)))


def _leaning_slot(groups: Sequence[str]) -> Slot:
    """A slot that depends on the sentiment; `groups` go from strongly positive to strongly negative."""
    words: list[str] = []
    weights = []
    for lean, group in zip((_STRONG, _MILD, 0.0, -_MILD, -_STRONG), groups, strict=True):
        members = group.split()
        words += members
        weights.append(np.exp([[-lean], [lean]]) * _falling_weights(len(members), _LEANING_DECAY))
    table = _normalise(np.concatenate(weights, axis=1))
    return Slot(tuple(words), np.repeat(table[:, None], len(_TOPICS), axis=1))


def _topical_slot(lists: Sequence[Slot], *, own: float, common: str = "", common_share: float = 0.4) -> Slot:
    """A mixture of one list per topic: a topic takes its own list with probability `own`, and the others equally else.

    Where there is a `common` list, every topic takes it with probability `common_share`.
    """
    num_topics = len(_TOPICS)
    rest = 1 - own - (common_share if common else 0.0)
    shares = np.where(np.eye(num_topics, dtype=bool), own, rest / (num_topics - 1))
    if common:
        lists = [*lists, _plain_slot(common)]
        shares = np.hstack([shares, np.full((num_topics, 1), common_share)])
    words = tuple(word for slot in lists for word in slot.words)
    blocks = [slot.probabilities * shares[None, :, number, None] for number, slot in enumerate(lists)]
    return Slot(words, np.concatenate(blocks, axis=2))


def _closing_slot(good: Mapping[str, float], neutral: Mapping[str, float], bad: Mapping[str, float]) -> Slot:
    """The last word of a review: it agrees with the sentiment except for the contrary and the neutral share."""
    agreeing = 1 - _CONTRARY_SHARE - _NEUTRAL_SHARE
    lists = [np.array(list(part.values())) for part in (good, neutral, bad)]
    rows = [
        np.concatenate([share * row for share, row in zip(shares, lists, strict=True)])
        for shares in ((_CONTRARY_SHARE, _NEUTRAL_SHARE, agreeing), (agreeing, _NEUTRAL_SHARE, _CONTRARY_SHARE))
    ]
    return Slot((*good, *neutral, *bad), np.repeat(np.stack(rows)[:, None], len(_TOPICS), axis=1))


def _denied(slot: Slot) -> Slot:
    """The words as they stand under a negation: drawn as if the sentiment were the opposite one."""
    return Slot(slot.words, slot.probabilities[::-1].copy())


def _other(slot: Slot) -> Slot:
    """The words of another person, whose sentiment is independent of the writer's."""
    return Slot(slot.words, np.repeat(slot.probabilities.mean(axis=0, keepdims=True), len(SENTIMENTS), axis=0))


def _falling_weights(count: int, decay: float) -> np.ndarray:
    return decay ** np.arange(count)


def _normalise(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=-1, keepdims=True)
