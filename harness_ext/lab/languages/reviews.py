"""A synthetic language of English movie reviews in which every probability is known.

A review has a hidden sentiment and a hidden topic. Its body is a few sentences; each is drawn from a list of templates,
and each slot of a template from a table p(word | sentiment, topic). The tables of the two sentiments overlap, some
sentences turn a word's meaning round ("the plot was not clumsy .") and some carry another person's opinion, which says
nothing, so the sentiment can be told from the body only up to the Bayes error, which is computed exactly. One more
sentence, the verdict ("this movie is great ."), closes the review; its last word is drawn given the sentiment.

The downstream task is sentiment classification of bodies. The language is this project's own; no text was copied.
Known gap: the sentences of a review are independent given sentiment and topic, so a review may contradict itself.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "DATASET",
    "END_OF_TEXT",
    "SENTIMENTS",
    "TEXT_DATASET",
    "BayesAccuracy",
    "Entropy",
    "Review",
    "ReviewGrammar",
    "Slot",
    "Template",
    "bayes_accuracy",
    "build_tokenizer",
    "default_grammar",
    "entropy",
    "write_dataset",
    "write_text",
]

SENTIMENTS = ("negative", "positive")
DATASET = "harness_ext/reviews"
"""Name of the downstream dataset, as `dataset_path` of a task."""

TEXT_DATASET = "harness_ext/reviews_text"
"""Name of the held-out text, as `dataset_path` of a task on running text."""

END_OF_TEXT = "<|endoftext|>"


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
        if len(set(self.words)) != len(self.words):
            raise ValueError(f"a slot's words must be distinct, got {self.words}")
        if self.probabilities.ndim != 3 or self.probabilities.shape[2] != len(self.words):
            raise ValueError(f"expected a table of shape (S, T, {len(self.words)}), got {self.probabilities.shape}")
        if (self.probabilities < 0).any() or not np.allclose(self.probabilities.sum(axis=2), 1.0, atol=1e-12):
            raise ValueError(f"rows of a slot's table must be distributions; slot with words {self.words} is not")

    @cached_property
    def index(self) -> dict[str, int]:
        return {word: position for position, word in enumerate(self.words)}

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


class BayesAccuracy(NamedTuple):
    """What the best possible classifier reaches on a set of n documents.

    Attributes:
        accuracy: Fraction of the n documents that argmax p(sentiment | body) labels rightly.
        expected: Mean of max p(sentiment | body), the expectation of `accuracy` over the labels of these documents.
    """

    accuracy: float
    expected: float


class Entropy(NamedTuple):
    """Cross-entropy of the optimal predictor, nats per token, and its standard error over documents."""

    value: float
    stderr: float


@dataclass(frozen=True, eq=False)
class ReviewGrammar:
    """The language, as explicit tables. S sentiments, T topics.

    Attributes:
        topics: Names of the T topics.
        sentiment_probabilities: float64 (S,).
        topic_probabilities: float64 (T,).
        length_probabilities: float64 (L,); entry k is the probability of a body of k + 1 sentences.
        body: Templates of body sentences. Two of them may write the same sentence.
        verdict: Templates of the closing sentence. None of them can write a body sentence.
        slots: The tables that the templates name.
    """

    topics: tuple[str, ...]
    sentiment_probabilities: np.ndarray
    topic_probabilities: np.ndarray
    length_probabilities: np.ndarray
    body: tuple[Template, ...]
    verdict: tuple[Template, ...]
    slots: Mapping[str, Slot]

    def __post_init__(self) -> None:
        shape = (len(SENTIMENTS), len(self.topics))
        for name, row in (
            ("sentiment_probabilities", self.sentiment_probabilities),
            ("topic_probabilities", self.topic_probabilities),
            ("length_probabilities", self.length_probabilities),
            ("probabilities of the body templates", np.array([template.probability for template in self.body])),
            ("probabilities of the verdict templates", np.array([template.probability for template in self.verdict])),
        ):
            if (row < 0).any() or not np.isclose(row.sum(), 1.0, atol=1e-12):
                raise ValueError(f"{name} must be a distribution, got {row.tolist()} with sum {row.sum()}")
        if (len(self.sentiment_probabilities), len(self.topic_probabilities)) != shape:
            raise ValueError(f"expected {shape[0]} sentiments and {shape[1]} topics")
        for template in self.body + self.verdict:
            if template.parts[-1] != "." or "." in template.parts[:-1]:
                raise ValueError(f"a template ends in its only full stop, got {' '.join(template.parts)!r}")
            for name in _slot_names(template):
                if name not in self.slots:
                    raise ValueError(
                        f"template {' '.join(template.parts)!r} names the slot {name!r}. "
                        f"Known: {', '.join(sorted(self.slots))}."
                    )
        for name, slot in self.slots.items():
            if slot.probabilities.shape[:2] != shape:
                raise ValueError(f"slot {name!r} has a table of shape {slot.probabilities.shape}, expected {shape}")
        for first in self.verdict:
            for second in self.body:
                if self._may_coincide(first, second):
                    raise ValueError(
                        f"a verdict and a body sentence could be the same: {' '.join(first.parts)!r} and "
                        f"{' '.join(second.parts)!r}"
                    )

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

    def sample(self, rng: np.random.Generator) -> Review:
        """Draw one review."""
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
        """Draw `count` independent reviews whose bodies are not in `without`, such as those of a training set.

        Leaving out bodies, whatever their sentiment, leaves p(sentiment | body) of the others as it is.
        """
        left_out = frozenset(without)
        reviews: list[Review] = []
        while len(reviews) < count:
            review = self.sample(rng)
            if review.body not in left_out:
                reviews.append(review)
        return reviews

    def log_likelihood(self, words: Sequence[str], *, has_verdict: bool) -> np.ndarray:
        """Return log p(words | sentiment, topic), summed over the templates that may have written each sentence.

        Args:
            words: The words of a whole review, or of a body.
            has_verdict: Whether the last sentence of `words` is the verdict.

        Returns:
            float64 of shape (S, T), in nats; -inf where the pair cannot produce the words.

        Raises:
            ValueError: If the language cannot produce the words under any sentiment and topic.
        """
        sentences = _split_sentences(words)
        body, closing = (sentences[:-1], sentences[-1:]) if has_verdict else (sentences, [])
        if not 1 <= len(body) <= len(self.length_probabilities):
            raise ValueError(
                f"expected a body of 1 to {len(self.length_probabilities)} sentences, got {len(body)}: "
                f"{' '.join(words)!r}"
            )
        likelihood = np.full((len(SENTIMENTS), len(self.topics)), np.log(self.length_probabilities[len(body) - 1]))
        for sentence in body:
            likelihood += self._sentence_log_likelihood(sentence, self._body_by_shape, "body")
        for sentence in closing:
            likelihood += self._sentence_log_likelihood(sentence, self._verdict_by_shape, "verdict")
        return likelihood

    def log_probability(self, document: Sequence[str]) -> float:
        """Return log p(document) of a whole review, the hidden variables summed out, in nats."""
        return float(_log_sum_exp(self._log_prior + self.log_likelihood(document, has_verdict=True)))

    def posterior(self, body: Sequence[str]) -> np.ndarray:
        """Return p(sentiment | body) by Bayes' rule, summed over topics and templates: float64 (S,)."""
        log_joint = self._log_prior + self.log_likelihood(body, has_verdict=False)
        return np.exp(log_joint - _log_sum_exp(log_joint)).sum(axis=1)

    @cached_property
    def _log_prior(self) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(np.outer(self.sentiment_probabilities, self.topic_probabilities))

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

    @cached_property
    def _body_by_shape(self) -> dict[tuple[int, str], list[Template]]:
        return self._group_by_shape(self.body)

    @cached_property
    def _verdict_by_shape(self) -> dict[tuple[int, str], list[Template]]:
        return self._group_by_shape(self.verdict)

    def _group_by_shape(self, templates: Iterable[Template]) -> dict[tuple[int, str], list[Template]]:
        # Length and first word: what tells at a glance that a template did not write a sentence.
        groups: dict[tuple[int, str], list[Template]] = {}
        for template in templates:
            for word in self._words_of(template.parts[0]):
                groups.setdefault((len(template.parts), word), []).append(template)
        return groups

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

    def _sentence_log_likelihood(
        self, sentence: tuple[str, ...], templates: Mapping[tuple[int, str], list[Template]], kind: str
    ) -> np.ndarray:
        likelihood = np.zeros((len(SENTIMENTS), len(self.topics)))
        for template in templates.get((len(sentence), sentence[0]), ()):
            term = np.full_like(likelihood, template.probability)
            for part, word in zip(template.parts, sentence, strict=True):
                if part.startswith("{"):
                    slot = self.slots[part[1:-1]]
                    if word not in slot.index:
                        break
                    term *= slot.probabilities[:, :, slot.index[word]]
                elif part != word:
                    break
            else:
                likelihood += term
        if not likelihood.any():
            raise ValueError(f"not a {kind} sentence of this language: {' '.join(sentence)!r}")
        with np.errstate(divide="ignore"):
            return np.log(likelihood)


class _Cumulatives(NamedTuple):
    sentiment: list[float]
    topic: list[float]
    length: list[float]
    body: list[float]
    verdict: list[float]


def _cumulative(probabilities: Sequence[float] | np.ndarray) -> list[float]:
    # Ends in infinity, so that bisect_right(row, u) is an index of the table for every u in [0, 1).
    return [*np.cumsum(probabilities)[:-1].tolist(), float("inf")]


def _log_sum_exp(values: np.ndarray) -> np.ndarray:
    largest = values.max()
    return largest + np.log(np.exp(values - largest).sum())


def _slot_names(template: Template) -> list[str]:
    return [part[1:-1] for part in template.parts if part.startswith("{")]


def _split_sentences(words: Sequence[str]) -> list[tuple[str, ...]]:
    if not words or words[-1] != ".":
        raise ValueError(f"expected sentences that end in a full stop, got {' '.join(words)!r}")
    ends = [position + 1 for position, word in enumerate(words) if word == "."]
    return [tuple(words[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def bayes_accuracy(grammar: ReviewGrammar, reviews: Sequence[Review]) -> BayesAccuracy:
    """Score the Bayes classifier of the sentiment, given the body, on a test set."""
    posteriors = np.array([grammar.posterior(review.body) for review in reviews])
    labels = np.array([review.sentiment for review in reviews])
    return BayesAccuracy(
        accuracy=float((posteriors.argmax(axis=1) == labels).mean()), expected=float(posteriors.max(axis=1).mean())
    )


def entropy(grammar: ReviewGrammar, reviews: Sequence[Review]) -> Entropy:
    """Estimate the entropy per token from a sample: the mean of -log p(document) over the mean length.

    A document's tokens are its words and the end of text, which is certain after the verdict.
    """
    nats = np.array([-grammar.log_probability(review.body + review.verdict) for review in reviews])
    lengths = np.array([len(review.body) + len(review.verdict) + 1 for review in reviews])
    value = nats.sum() / lengths.sum()
    # Delta method for the ratio of two means.
    residuals = (nats - value * lengths) / lengths.mean()
    return Entropy(value=float(value), stderr=float(residuals.std(ddof=1) / np.sqrt(len(reviews))))


def write_dataset(folder: Path, *, train: Sequence[Review], test: Sequence[Review]) -> Path:
    """Write the downstream task as `<folder>/harness_ext/reviews/{train,test}.jsonl`.

    The columns are `text` (the body without the verdict), `label` (0 negative, 1 positive) and `label_text`.

    Returns:
        The folder that holds the two files.
    """
    target = folder / DATASET
    target.mkdir(parents=True, exist_ok=True)
    for split, reviews in (("train", train), ("test", test)):
        with (target / f"{split}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            for review in reviews:
                row = {"text": review.text, "label": review.sentiment, "label_text": SENTIMENTS[review.sentiment]}
                file.write(json.dumps(row) + "\n")
    return target


def write_text(folder: Path, sample: Sequence[Review]) -> Path:
    """Write held-out text, verdicts included, as `<folder>/harness_ext/reviews_text/test.jsonl` with the column `text`.

    Returns:
        The file.
    """
    target = folder / TEXT_DATASET
    target.mkdir(parents=True, exist_ok=True)
    path = target / "test.jsonl"
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps({"text": review.document}) + "\n" for review in sample)
    return path


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
    )


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
