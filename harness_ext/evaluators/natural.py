"""Class scores of a task recast as sentence completion, and their calibrations.

A task is natural for a language model when a word after the prompt tells the class: the score of class c is the
probability that the next words are one of its label words, log Σ_{w ∈ words(c)} p_f(w|s), and the prediction is the
class of highest score. Source: Saunshi, Malladi, Arora (ICLR 2021), with several words per class summed as
probabilities.

Raw scores carry the model's liking for the words themselves. Two corrections subtract an estimate of it per class:
`pmi_scores` the score after a premise without the document, `centred_scores` the mean score over the documents.

All scores are natural logarithms, float64, of shape (n, K): one row per document, one column per class.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

__all__ = ["centred_scores", "class_log_scores", "class_probabilities", "pmi_scores"]


def class_log_scores(log_probs: ArrayLike, class_of_word: ArrayLike, num_classes: int) -> NDArray[np.float64]:
    """Sum the probabilities of each class's label words: score[i, c] = log Σ_{w ∈ words(c)} p(w | s_i).

    Args:
        log_probs: Natural-log probability of each label word after each prompt, shape (n, W); -inf is probability zero.
        class_of_word: Class of each label word, integers in 0..K-1, shape (W,). The words of a class should differ in
            their tokens: a word listed twice counts twice.
        num_classes: K, >= 1.

    Returns:
        Scores of shape (n, K); -inf exactly where every word of the class has -inf.

    Raises:
        ValueError: If shapes do not fit, a class has no word, a word has no such class, or a log-probability is NaN or
            +inf.
    """
    values = _matrix(log_probs, "log_probs")
    owners = np.asarray(class_of_word)
    if owners.shape != (values.shape[1],):
        raise ValueError(
            f"class_of_word has shape {owners.shape}; expected one class for each of the {values.shape[1]} columns of "
            "log_probs."
        )
    if not np.issubdtype(owners.dtype, np.integer):
        raise ValueError(f"class_of_word has dtype {owners.dtype}; expected integers in 0..{num_classes - 1}.")
    if owners.size and not (owners.min() >= 0 and owners.max() < num_classes):
        word = int(np.flatnonzero((owners < 0) | (owners >= num_classes))[0])
        raise ValueError(f"class_of_word[{word}] is {owners[word]}; expected a class in 0..{num_classes - 1}.")
    missing = np.setdiff1d(np.arange(num_classes), owners)
    if missing.size:
        raise ValueError(
            f"Class {missing[0]} has no label word; give at least one word to each of {num_classes} classes."
        )
    if np.isposinf(values).any():
        row, column = np.argwhere(np.isposinf(values))[0]
        raise ValueError(f"log_probs[{row}, {column}] is +inf; expected the logarithm of a probability.")
    return np.stack([logsumexp(values[:, owners == label], axis=1) for label in range(num_classes)], axis=1)


def class_probabilities(scores: ArrayLike) -> NDArray[np.float64]:
    """Normalise scores over the classes: softmax along each row.

    Args:
        scores: Log-scores of shape (n, K).

    Returns:
        Probabilities of shape (n, K), rows summing to 1. A row whose scores are all -inf says nothing about the class
        and gives 1/K each, as `tie_aware_accuracy` gives it 1/K.

    Raises:
        ValueError: If a score is NaN or +inf.
    """
    values = _matrix(scores, "scores")
    if np.isposinf(values).any():
        row, column = np.argwhere(np.isposinf(values))[0]
        raise ValueError(f"scores[{row}, {column}] is +inf; expected a log-score.")
    top = values.max(axis=1, keepdims=True)
    shifted = np.where(np.isneginf(top), 0.0, values - np.where(np.isneginf(top), 0.0, top))
    weights = np.exp(shifted)
    return weights / weights.sum(axis=1, keepdims=True)


def pmi_scores(scores: ArrayLike, premise_scores: ArrayLike) -> NDArray[np.float64]:
    """Subtract the scores of a premise without the document: log p(c|s) - log p(c|premise).

    Domain-conditional PMI. Source: Holtzman et al., "Surface Form Competition" (EMNLP 2021).

    Args:
        scores: Log-scores of shape (n, K).
        premise_scores: Log-scores of the premise, the template without its document: shape (K,) where the premise is
            the same for all documents, else (n, K).

    Returns:
        Corrected scores of shape (n, K).

    Raises:
        ValueError: If shapes do not fit, a score is NaN, or a premise score is infinite: a class to which the premise
            gives probability zero has no PMI.
    """
    values = _matrix(scores, "scores")
    premise = np.asarray(premise_scores, dtype=np.float64)
    if premise.shape not in {(values.shape[1],), values.shape}:
        raise ValueError(
            f"premise_scores has shape {premise.shape}; expected {(values.shape[1],)} for one premise or "
            f"{values.shape} for one per document."
        )
    if not np.isfinite(premise).all():
        position = tuple(int(index) for index in np.argwhere(~np.isfinite(premise))[0])
        raise ValueError(
            f"premise_scores{list(position)} is {premise[position]}; expected finite numbers. Choose a premise "
            "after which every label word is possible."
        )
    return values - premise


def centred_scores(scores: ArrayLike) -> NDArray[np.float64]:
    """Subtract each class's mean score over the documents: score[i, c] - mean_j score[j, c].

    Batch calibration in its additive form on log-scores. Source: Zhou et al., "Batch Calibration" (ICLR 2024). No label
    is used, but the result for one document depends on the others: it is a property of the evaluated set.

    It does not matter whether documents are normalised over the classes first. With a_i = log Σ_c exp(s_ic),

        (s_ic - a_i) - mean_j (s_jc - a_j) = (s_ic - mean_j s_jc) - (a_i - mean_j a_j),

    which differs from the centred s_ic by a number that is the same for all classes of document i, so the argmax stays.

    Args:
        scores: Log-scores of shape (n, K), n >= 1. A score of -inf stays -inf and is left out of its class's mean,
            which would otherwise be -inf and decide every other document.

    Returns:
        Centred scores of shape (n, K).

    Raises:
        ValueError: If there is no document, a score is NaN or +inf, or a class has no finite score at all.
    """
    values = _matrix(scores, "scores")
    if not len(values):
        raise ValueError("scores has no rows; centring needs at least one document.")
    finite = np.isfinite(values)
    if np.isposinf(values).any():
        row, column = np.argwhere(np.isposinf(values))[0]
        raise ValueError(f"scores[{row}, {column}] is +inf; expected a log-score.")
    counts = finite.sum(axis=0)
    if not counts.all():
        label = int(np.flatnonzero(counts == 0)[0])
        raise ValueError(f"Class {label} has score -inf for every document, so it has no mean; check its label words.")
    return values - np.where(finite, values, 0.0).sum(axis=0) / counts


def _matrix(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return float64 of shape (n, K) without NaN, or say where it is not."""
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2:
        raise ValueError(f"{name} has shape {matrix.shape}; expected two dimensions, (documents, columns).")
    if np.isnan(matrix).any():
        row, column = np.argwhere(np.isnan(matrix))[0]
        raise ValueError(
            f"{name}[{row}, {column}] is NaN; expected a number. Look for NaN in the model's output first."
        )
    return matrix
