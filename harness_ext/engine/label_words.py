"""Label words that a model itself suggests: those it finds likely after documents of a class, chosen by accuracy.

Source: Gao, Fisch, Chen, "Making Pre-trained Language Models Better Few-shot Learners" (LM-BFF, ACL 2021), section 5.1. For
class c the candidates are the k words w of highest Σ_{s of class c} log p_f(w|s); among the assignments of one candidate to
each class those of highest zero-shot accuracy on the same documents are kept. Two differences: words are complete words of
a causal model's vocabulary, in place of a masked model's; and where all assignments are too many the search goes class by
class, in place of a smaller k.

Nothing here sees a model: the means over a class come from `engine.readout.Readout.class_means` and the candidates'
log-probabilities from `Readout.read`, which stream over the documents and never hold (n, V) of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Assignment",
    "WordSearch",
    "search_words",
    "token_texts",
    "top_tokens",
    "whole_words",
]

MAX_COMPARISONS = 10**9
"""Scores compared in a search of all assignments: eight seconds on one core. Beyond, it goes class by class."""

STARTS = 10
"""Starting points of a search class by class."""


# ------------------------------------------------------------------------------------------------- the vocabulary


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token inside of a text, with the blank that it may begin with.

    Decoded alone, a token of SentencePiece loses that blank, so each is decoded after another one. A token that is a
    part of a character has no text of its own and comes as the tokenizer writes it, such as `<0xE2>`.
    """
    if not len(ids):
        return []
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    alone = tokenizer.decode(anchor, **options)
    decoded = tokenizer.batch_decode([[*anchor, int(token)] for token in ids], **options)
    names = tokenizer.convert_ids_to_tokens([int(token) for token in ids])
    return [
        text.removeprefix(alone) if "\ufffd" not in text and text.startswith(alone) else str(name)
        for text, name in zip(decoded, names, strict=True)
    ]


def whole_words(
    tokenizer: Any, encode: Callable[[list[str]], list[list[int]]], *, context: str, num_tokens: int
) -> dict[int, str]:
    """Return the tokens that are a whole word after a blank, with the word.

    A word is of letters and digits only, and `context + " " + word` must be encoded as the context and that one token,
    which is how a label word is scored.

    Args:
        tokenizer: A transformers tokenizer.
        encode: Texts -> token ids, as the engine encodes prompts.
        context: The end of a prompt. A tokenizer that merges across blanks gives other words after other contexts.
        num_tokens: V; token ids from there on have no logit.
    """
    ids = range(min(len(tokenizer), num_tokens))
    special = set(tokenizer.all_special_ids)
    texts = zip(ids, token_texts(tokenizer, ids), strict=True)
    words = {
        token: text[1:] for token, text in texts if text[:1] == " " and text[1:].isalnum() and token not in special
    }
    before, *encoded = encode([context, *(f"{context} {word}" for word in words.values())])
    return {
        token: word for (token, word), found in zip(words.items(), encoded, strict=True) if found == [*before, token]
    }


# ------------------------------------------------------------------------------------------------- the search


class Assignment(NamedTuple):
    """One word for each class.

    Attributes:
        columns: For each class the column of its word.
        accuracy: Share of the documents whose class's word scores highest; t tied classes share the point.
    """

    columns: tuple[int, ...]
    accuracy: float


@dataclass(frozen=True)
class WordSearch:
    """What a search found.

    Attributes:
        best: Assignments, best first; equal accuracies by the candidates' order.
        exhaustive: Whether all assignments were tried.
    """

    best: tuple[Assignment, ...]
    exhaustive: bool


def top_tokens(means: ArrayLike, tokens: Sequence[int], count: int) -> NDArray[np.int64]:
    """Return for each class the `count` tokens of highest score among `tokens`, best first; lower ids win ties.

    Args:
        means: Scores of all tokens, shape (K, V), such as `engine.readout.Readout.class_means`.
        tokens: Token ids that may be chosen.
        count: How many; all of `tokens` where there are fewer.

    Returns:
        Token ids, shape (K, min(count, len(tokens))).

    Raises:
        ValueError: If there is no token to choose from, or `count` < 1.
    """
    if count < 1 or not len(tokens):
        raise ValueError(f"{count} words of {len(tokens)} were asked for; expected at least 1 of 1.")
    allowed = np.unique(np.asarray(tokens, dtype=np.int64))
    values = np.asarray(means)[:, allowed]
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return allowed[order]


def search_words(
    scores: ArrayLike,
    labels: ArrayLike,
    candidates: Sequence[Sequence[int]] | NDArray[np.int64],
    *,
    num_best: int,
    max_comparisons: int = MAX_COMPARISONS,
) -> WordSearch:
    """Find the assignments of one candidate to each class that classify best; no word serves two classes.

    All assignments are tried where n k^K comparisons are few enough. Else, from several starting points, the word of one
    class at a time is changed for the best one, the others being kept, until no change helps; every assignment seen on
    the way may be among the best.

    Args:
        scores: A score of each word after each document, higher is likelier: shape (n, W). Log-probabilities for the
            raw accuracy; the same minus their column means for that of centred scores.
        labels: Gold classes, integers in 0..K-1, shape (n,), n >= 1.
        candidates: For each of the K >= 2 classes columns of `scores`, the most likely first.
        num_best: How many assignments are wanted, >= 1; fewer come back where there are not as many.
        max_comparisons: Most comparisons in a search of all.

    Raises:
        ValueError: If shapes do not fit, a score is NaN, a label is no class, or no assignment gives each class a word
            of its own.
    """
    values, gold = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    if values.ndim != 2 or gold.shape != (len(values),) or not len(values):
        raise ValueError(f"scores has shape {values.shape} and labels {gold.shape}; expected (n, W) and (n,), n >= 1.")
    if np.isnan(values).any():
        raise ValueError("scores has a NaN; a NaN score can neither win nor lose.")
    if len(candidates) < 2 or not all(len(of_class) for of_class in candidates):
        raise ValueError(f"candidates for {len(candidates)} classes; expected at least one for each of two or more.")
    if gold.min() < 0 or gold.max() >= len(candidates):
        raise ValueError(f"labels are {gold.min()} to {gold.max()}; expected classes in 0..{len(candidates) - 1}.")
    if num_best < 1:
        raise ValueError(f"num_best is {num_best}; expected at least 1.")
    search = _Search(values, gold, [np.asarray(of_class, dtype=np.int64) for of_class in candidates], num_best)
    comparisons = len(values)
    for of_class in candidates:
        comparisons *= len(of_class)  # Python's integers do not overflow
    exhaustive = comparisons <= max_comparisons
    if exhaustive:
        search.all()
    else:
        search.by_class()
    if not search.found:
        raise ValueError("No assignment gives each class a word of its own. Take more candidates.")
    return WordSearch(search.best(), exhaustive)


class _Search:
    """The assignments seen so far, as ranks among the candidates."""

    def __init__(
        self, scores: NDArray[np.float64], gold: NDArray[Any], candidates: list[NDArray[np.int64]], num_best: int
    ) -> None:
        self.scores, self.gold, self.candidates, self.num_best = scores, gold, candidates, num_best
        self.columns_of = [scores[:, of_class] for of_class in candidates]
        self.found: dict[tuple[int, ...], float] = {}

    def all(self) -> None:
        last = len(self.candidates) - 1
        for ranks in itertools.product(*(range(len(of_class)) for of_class in self.candidates[:last])):
            columns = [int(self.candidates[label][rank]) for label, rank in enumerate(ranks)]
            if len(set(columns)) == last:
                self._try((*ranks, 0), last)

    def by_class(self) -> None:
        for start in range(STARTS):
            ranks = self._distinct(start)
            if ranks is None:
                continue
            reached = -1.0
            while True:
                for label in range(len(ranks)):
                    ranks = self._try(ranks, label)
                if self.found_accuracy <= reached:
                    break
                reached = self.found_accuracy

    def _distinct(self, start: int) -> tuple[int, ...] | None:
        """Give each class its candidate of rank `start`, or the next one that no class before it has."""
        used: set[int] = set()
        ranks = []
        for of_class in self.candidates:
            free = [rank for rank in range(len(of_class)) if int(of_class[rank]) not in used]
            if not free:
                return None
            ranks.append(next((rank for rank in free if rank >= start), free[-1]))
            used.add(int(of_class[ranks[-1]]))
        return tuple(ranks)

    def _try(self, ranks: tuple[int, ...], label: int) -> tuple[int, ...]:
        """Try every word for one class beside the others' words; return the best ranks."""
        others = {int(self.candidates[c][rank]) for c, rank in enumerate(ranks) if c != label}
        accuracies = self._accuracies(ranks, label)
        accuracies[[int(column) in others for column in self.candidates[label]]] = -1.0
        order = np.argsort(-accuracies, kind="stable")
        for rank in order[: self.num_best]:
            if accuracies[rank] >= 0:
                self.found[(*ranks[:label], int(rank), *ranks[label + 1 :])] = float(accuracies[rank])
        if len(self.found) > 100 * self.num_best:
            self.found = dict(self._sorted()[: self.num_best])
        self.found_accuracy = float(accuracies[order[0]])
        return (*ranks[:label], int(order[0]), *ranks[label + 1 :])

    def _accuracies(self, ranks: tuple[int, ...], label: int) -> NDArray[np.float64]:
        """Accuracy with each candidate of `label` beside the others' words.

        With m the highest score of the other classes and t the number of them that have it, a document of class `label`
        counts 1 where the new word's score is above m and 1/(t+1) where it is equal; one of another class, if that one
        has m, counts 1/t where it is below and 1/(t+1) where it is equal.
        """
        rest = np.stack([self.columns_of[c][:, rank] for c, rank in enumerate(ranks) if c != label], axis=1)
        highest = rest.max(axis=1)
        num_highest = (rest == highest[:, np.newaxis]).sum(axis=1)
        own = self.gold == label
        position = np.where(self.gold > label, self.gold - 1, self.gold)  # in `rest`, which lacks `label`
        position[own] = 0
        leads = ~own & (rest[np.arange(len(rest)), position] == highest)
        if_below = leads / num_highest
        if_equal = (own | leads) / (num_highest + 1)
        new = self.columns_of[label]
        total = if_below.sum() + (own - if_below) @ (new > highest[:, np.newaxis])
        total += (if_equal - if_below) @ (new == highest[:, np.newaxis])
        # The same shares added in another order differ in their last bits, and must tie.
        return np.round(total / len(self.gold), 12)

    def _sorted(self) -> list[tuple[tuple[int, ...], float]]:
        return sorted(self.found.items(), key=lambda item: (-item[1], sum(item[0]), item[0]))

    def best(self) -> tuple[Assignment, ...]:
        return tuple(
            Assignment(tuple(int(self.candidates[label][rank]) for label, rank in enumerate(ranks)), accuracy)
            for ranks, accuracy in self._sorted()[: self.num_best]
        )
