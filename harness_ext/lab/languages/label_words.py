"""Label words of a downstream task, chosen by the exact next-word distribution, and how good they can be.

A natural task reads a document (and the task's cue) and predicts the class whose label words have the largest total
probability as the next word (Saunshi, Malladi, Arora, ICLR 2021). A language model that has learned the language exactly
gives them the probabilities p*, so the accuracy under p* is what that model reaches: the ceiling of the natural task. It lies
below the Bayes accuracy where the next word tells less of the class than the document does, which for a class that is a sum
of hidden values may be nothing.

Known gap: the search is a local one, and a ceiling that of the words that were found, not of all that could be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from harness_ext.lab.languages.base import Example, Language, Task

__all__ = ["best_label_words", "last_word_probabilities", "natural_ceiling"]

_RANDOM_STARTS = 4
_MOST_SWEEPS = 10
_CHUNK = 256
"""Documents whose next words at every position are in memory at once."""


def last_word_probabilities(language: Language, task: Task, documents: Sequence[Sequence[str]]) -> np.ndarray:
    """Return p*(word | document and the task's cue), float64 of shape (n, V): without the end of text, rows sum to 1 or less.

    Raises:
        ValueError: If a document cannot occur, or the cue cannot follow it.
    """
    prefixes = [(*document, *task.cue) for document in documents]
    rows = [np.zeros((0, len(language.words)))]
    for start in range(0, len(prefixes), _CHUNK):
        tables = language.next_words(prefixes[start : start + _CHUNK])
        rows.append(np.array([table[-1, :-1] for table in tables]))
    return np.concatenate(rows)


def best_label_words(
    language: Language, task: Task, *, per_class: int, rng: np.random.Generator, count: int = 2000
) -> dict[str, tuple[str, ...]]:
    """Choose label words for each class, distinct over all classes.

    The words are chosen for the accuracy of the rule itself, on `count` documents: the mean over documents of p(predicted class
    | document), which has the same expectation as the share of right labels and less noise. One start gives each class the
    words whose probability rises most with it, some others are random; from each, every word in turn is replaced by that unused
    word, if any, which gains most, until none does, and the best end counts. A ratio of the probabilities would be a poor
    guide, since the rule adds them up: the words of the largest ratio are rare ones, which no sum feels.

    Args:
        per_class: Words of each class, in the order in which they rise with it.
        rng: Draws the documents and the random starts.
        count: Documents, at least 2.

    Raises:
        ValueError: If the language has too few words, or an argument is out of its range.
    """
    num_classes, num_words = len(task.classes), len(language.words)
    if not 1 <= per_class <= num_words // num_classes:
        raise ValueError(
            f"task {task.name!r}: per_class must be 1 to {num_words // num_classes}, {num_classes} classes having "
            f"{num_words} words between them, got {per_class}"
        )
    if count < 2:
        raise ValueError(f"task {task.name!r}: count must be at least 2, got {count}")
    documents = [example.words for example in task.sample(count, rng)]
    words = last_word_probabilities(language, task, documents)
    posteriors = task.posteriors(documents)
    # Σ_documents p(class) (p(word) - mean p(word)): how much a word rises with a class, (C, V).
    rise = posteriors.T @ (words - words.mean(axis=0))
    starts = [_start(rise, per_class)]
    for _ in range(_RANDOM_STARTS):
        order = rng.permutation(num_words)[: num_classes * per_class]
        starts.append(order.reshape(num_classes, per_class).tolist())
    for start in starts:
        for _ in range(_MOST_SWEEPS):
            if not _improve(start, words, posteriors):
                break
    chosen = max(starts, key=lambda end: _value(end, words, posteriors))
    result = {}
    for label, of_class in enumerate(chosen):
        falling = sorted(of_class, key=lambda word: (-rise[label, word], word))
        result[task.classes[label]] = tuple(language.words[word] for word in falling)
    return result


def natural_ceiling(
    language: Language, task: Task, words: Mapping[str, Sequence[str]], examples: Sequence[Example]
) -> float:
    """Return the accuracy of the rule under p*: t classes that tie for the largest sum share the point, as in natural tasks.

    Args:
        words: Label words of each class of the task.
        examples: At least one; others than those that the words were chosen on.

    Raises:
        ValueError: If there are no examples, a class has no words, or a word is not of the language.
    """
    if not examples:
        raise ValueError(f"task {task.name!r}: expected at least one example, got none")
    if missing := [label for label in task.classes if not words.get(label)]:
        raise ValueError(f"task {task.name!r}: no label words for {', '.join(missing)}")
    column = {word: index for index, word in enumerate(language.words)}
    if unknown := [word for of_class in words.values() for word in of_class if word not in column]:
        raise ValueError(f"task {task.name!r}: label words that are not of the language: {', '.join(unknown)}")
    probabilities = last_word_probabilities(language, task, [example.words for example in examples])
    scores = np.stack(
        [probabilities[:, [column[word] for word in words[label]]].sum(axis=1) for label in task.classes], axis=1
    )
    labels = np.array([example.label for example in examples])
    # Sums of the same probabilities in another order differ in the last bits.
    is_best = scores >= scores.max(axis=1, keepdims=True) * (1 - 1e-12)
    return float((is_best[np.arange(len(labels)), labels] / is_best.sum(axis=1)).mean())


def _start(rise: np.ndarray, per_class: int) -> list[list[int]]:
    """Give each class its share of words, the largest rise first, whichever class it is of."""
    chosen: list[list[int]] = [[] for _ in rise]
    used: set[int] = set()
    for flat in np.argsort(-rise, axis=None, kind="stable").tolist():
        label, word = divmod(flat, rise.shape[1])
        if word not in used and len(chosen[label]) < per_class:
            chosen[label].append(word)
            used.add(word)
    return chosen


def _scores(chosen: list[list[int]], words: np.ndarray) -> np.ndarray:
    return np.stack([words[:, of_class].sum(axis=1) for of_class in chosen], axis=1)


def _value(chosen: list[list[int]], words: np.ndarray, posteriors: np.ndarray) -> float:
    """The mean of p(predicted class | document)."""
    predicted = _scores(chosen, words).argmax(axis=1)
    return float(posteriors[np.arange(len(words)), predicted].mean())


def _improve(chosen: list[list[int]], words: np.ndarray, posteriors: np.ndarray) -> bool:
    """Replace each word once by the unused one that gains most; says whether anything was gained."""
    scores = _scores(chosen, words)
    rows = np.arange(len(words))
    possible: np.ndarray = words.max(axis=0) > 0
    improved = False
    for label, of_class in enumerate(chosen):
        others = np.delete(scores, label, axis=1)
        rival = others.argmax(axis=1)
        rival += rival >= label
        # What the document counts for if this class wins, over what it counts for if not.
        gain = posteriors[:, label] - posteriors[rows, rival]
        for slot, word in enumerate(of_class):
            rest = scores[:, label] - words[:, word]
            used = {other for part in chosen for other in part}
            unused = [other for other in range(words.shape[1]) if other not in used]
            # Of the words that are never possible here, which change no sum, one is as good as another.
            impossible = [other for other in unused if not possible[other]][:1]
            candidates = np.array([word, *(other for other in unused if possible[other]), *impossible])
            wins = rest[:, None] + words[:, candidates] > others.max(axis=1)[:, None]
            values = gain @ wins
            best = int(values.argmax())
            # By more than rounding, so that the search ends.
            if values[best] > values[0] + 1e-9 * len(words):
                of_class[slot] = int(candidates[best])
                scores[:, label] = words[:, of_class].sum(axis=1)
                improved = True
    return improved
