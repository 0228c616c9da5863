"""What every synthetic language offers: text, the exact next-word distribution p*, and downstream tasks with known truth.

A document is a tuple of words; a language model reads the words joined by blanks and the end of text after them, which is the
last thing it has to predict. Everything random takes a `numpy.random.Generator`, so a seed decides it.

A downstream document is one that can go on: after a document that is complete p* would be the end of text, whatever the class,
and completing it could tell nothing. So the tasks of `hmm` and `pcfg` withhold the last word of a document, and those of
`reviews` its closing sentence.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "END_OF_TEXT",
    "NUM_WITHHELD",
    "ORGANISATION",
    "BayesAccuracy",
    "ByDocument",
    "CrossEntropy",
    "Example",
    "Language",
    "Task",
    "TaskByDocument",
    "bayes_accuracy",
    "optimal_cross_entropy",
    "word_indices",
    "word_tokenizer",
    "write_dataset",
    "write_text",
]

END_OF_TEXT = "<|endoftext|>"

ORGANISATION = "harness_ext"
"""Organisation of the downstream datasets, as in `dataset_path: harness_ext/<name>`."""


NUM_WITHHELD = 1
"""Words at the end of a document that the tasks of `hmm` and `pcfg` do not show."""


class Example(NamedTuple):
    """One labelled document of a downstream task: what the classifier sees, and the class index."""

    words: tuple[str, ...]
    label: int


class Task(Protocol):
    """A downstream classification task of a language."""

    @property
    def name(self) -> str:
        """Part after the slash of its dataset's name, such as `hmm_state`; lower case, digits and underscores."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their labels, all of them words that are distinct from each other."""
        ...

    @property
    def cue(self) -> tuple[str, ...]:
        """Words to read after a document so that the next one tells the class; empty where the next word does without."""
        ...

    def sample(self, count: int, rng: np.random.Generator) -> list[Example]:
        """Draw labelled documents, independently."""
        ...

    def posterior(self, words: Sequence[str]) -> np.ndarray:
        """Return p(class | words), float64 of shape (C,), exactly."""
        ...

    def posteriors(self, documents: Sequence[Sequence[str]]) -> np.ndarray:
        """Return `posterior` of each of N documents, float64 of shape (N, C); many at once are faster."""
        ...


class ByDocument(ABC):
    """What a `Language` says of one document, by what it says of many."""

    @abstractmethod
    def next_words(self, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """See `Language.next_words`."""

    @abstractmethod
    def log_probabilities_of(self, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """See `Language.log_probabilities_of`."""

    def next_word(self, prefix: Sequence[str]) -> np.ndarray:
        """See `Language.next_word`."""
        return self.next_words([prefix])[0][-1]

    def log_probabilities(self, document: Sequence[str]) -> np.ndarray:
        """See `Language.log_probabilities`."""
        return self.log_probabilities_of([document])[0]


class TaskByDocument(ABC):
    """What a `Task` says of one document, by what it says of many."""

    @abstractmethod
    def posteriors(self, documents: Sequence[Sequence[str]]) -> np.ndarray:
        """See `Task.posteriors`."""

    def posterior(self, words: Sequence[str]) -> np.ndarray:
        """See `Task.posterior`."""
        return self.posteriors([words])[0]


class Language(Protocol):
    """A language whose probabilities are all known."""

    @property
    def name(self) -> str: ...

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary without the end of text, in the order of `next_word`'s columns."""
        ...

    @property
    def tasks(self) -> tuple[Task, ...]: ...

    def sample(self, count: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
        """Draw documents, independently."""
        ...

    def next_word(self, prefix: Sequence[str]) -> np.ndarray:
        """Return p*(· | prefix), float64 of shape (V + 1,): the words, then the end of text.

        Raises:
            ValueError: If the prefix cannot occur.
        """
        ...

    def next_words(self, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return p* after every prefix of each document, the empty one and the whole included: float64 (len + 1, V + 1) each.

        Raises:
            ValueError: If a document is no prefix of any that can occur.
        """
        ...

    def log_probabilities(self, document: Sequence[str]) -> np.ndarray:
        """Return log p*(w_t | w_<t), natural logarithm, float64 of shape (len(document) + 1,); the last is the end of text's.

        Raises:
            ValueError: If the document cannot occur.
        """
        ...

    def log_probabilities_of(self, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return `log_probabilities` of each document; many at once are faster.

        Raises:
            ValueError: If a document cannot occur.
        """
        ...

    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        """Return a tokenizer in which every word is one token, for models with a context of `max_length` tokens."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types that make the language again, with the name of its kind under `kind`."""
        ...


@dataclass(frozen=True)
class BayesAccuracy:
    """What the best possible classifier reaches on a set of n documents.

    Attributes:
        accuracy: Fraction of the n documents that argmax p(class | words) labels rightly.
        expected: Mean of max p(class | words), the expectation of `accuracy` over the labels of these documents.
    """

    accuracy: float
    expected: float


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of the optimal predictor on a sample: nats per token, ends of text counted, and its standard error over
    documents."""

    value: float
    stderr: float


def bayes_accuracy(task: Task, examples: Sequence[Example]) -> BayesAccuracy:
    """Score the Bayes classifier of a task.

    Raises:
        ValueError: If there are no examples.
    """
    if not examples:
        raise ValueError(f"task {task.name!r}: expected at least one example, got none")
    posteriors = task.posteriors([example.words for example in examples])
    labels = np.array([example.label for example in examples])
    return BayesAccuracy(
        accuracy=float((posteriors.argmax(axis=1) == labels).mean()), expected=float(posteriors.max(axis=1).mean())
    )


def optimal_cross_entropy(language: Language, documents: Sequence[Sequence[str]]) -> CrossEntropy:
    """Estimate the entropy per token from a sample: the mean of -log p*(document) over the mean length.

    Raises:
        ValueError: If there are fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError(f"expected at least two documents, got {len(documents)}")
    nats = np.array([-logs.sum() for logs in language.log_probabilities_of(documents)])
    lengths = np.array([len(document) + 1 for document in documents])
    value = nats.sum() / lengths.sum()
    # Delta method for the ratio of two means.
    residuals = (nats - value * lengths) / lengths.mean()
    return CrossEntropy(value=float(value), stderr=float(residuals.std(ddof=1) / np.sqrt(len(documents))))


def write_dataset(folder: Path, task: Task, splits: Mapping[str, Sequence[Example]]) -> Path:
    """Write a task as `<folder>/harness_ext/<task>/<split>.jsonl` with the columns `text`, `label` and `label_text`.

    Returns:
        The folder that holds the files.
    """
    target = folder / ORGANISATION / task.name
    target.mkdir(parents=True, exist_ok=True)
    for split, examples in splits.items():
        with (target / f"{split}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            for example in examples:
                row = {"text": " ".join(example.words), "label": example.label}
                file.write(json.dumps(row | {"label_text": task.classes[example.label]}) + "\n")
    return target


def write_text(folder: Path, language: Language, documents: Sequence[Sequence[str]]) -> Path:
    """Write documents as `<folder>/harness_ext/<kind>_text/test.jsonl` with the column `text`.

    Returns:
        The file.
    """
    path = folder / ORGANISATION / f"{language.name}_text" / "test.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps({"text": " ".join(document)}) + "\n" for document in documents)
    return path


def word_indices(
    documents: Sequence[Sequence[str]], index: Mapping[str, int], *, most: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield documents of one length together, at most `most` at once: which they are (n,), and their words (n, length).

    Raises:
        ValueError: If a word is not in `index`.
    """
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    for length in np.unique(lengths):
        same = np.flatnonzero(lengths == length)
        for start in range(0, len(same), most):
            rows = same[start : start + most]
            try:
                ids = np.array([[index[word] for word in documents[row]] for row in rows], dtype=np.int64)
            except KeyError as err:
                raise ValueError(f"{err.args[0]!r} is no word of this language") from None
            yield rows, ids.reshape(len(rows), length)


def word_tokenizer(words: Sequence[str], *, max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a word, split at blanks, ids in the order of `words` and the end of text last.

    The end of text is the BOS and the EOS; no special token is added to a text. A string that is no word of the language is
    read as the end of text: natural tasks also ask what a model says of documents such as "N/A", and here that is no document.

    Args:
        words: Distinct and without blanks.
        max_length: Context length of the model, recorded as `model_max_length`.

    Raises:
        ValueError: If words are not distinct, or one is empty, has a blank or is the end of text.
    """
    if len(set(words)) != len(words):
        raise ValueError(f"words must be distinct, got {len(words) - len(set(words))} repeated ones")
    if bad := [word for word in words if word.split() != [word] or word == END_OF_TEXT]:
        raise ValueError(f"words must be non-empty, without blanks and other than {END_OF_TEXT}; got {bad[:5]!r}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*words, END_OF_TEXT])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Joins by blanks what does not begin with the prefix, and no word does.
    tokenizer.decoder = decoders.WordPiece(prefix="\0", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
