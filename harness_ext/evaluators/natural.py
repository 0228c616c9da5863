"""Class scores of a task recast as sentence completion, and their calibrations.

A task is natural for a language model when a word after the prompt tells the class: the score of class c is the
probability that the next words are one of its label words, log Σ_{w ∈ words(c)} p_f(w|s), and the prediction is the
class of highest score. Source: Saunshi, Malladi, Arora (ICLR 2021), with several words per class summed as
probabilities.

Raw scores carry the model's liking for the words themselves. Three corrections subtract an estimate of it per class:
`pmi_scores` the score after a premise without the document, `context_scores` the class probability after documents that
say nothing, `centred_scores` the mean score over the documents. None of them changes its input: raw scores are the same
to the bit whatever is computed from them.

Probabilities are averaged in two places. The words of a class are summed as probabilities (`class_log_scores`): they
are different continuations, of which any one tells the class. Several templates are averaged after each has been
normalised over the classes (`ensemble_scores`), as log-probabilities or as probabilities.

All scores are natural logarithms, float64, of shape (n, K): one row per document, one column per class.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

from harness_ext.evaluators import _checks

__all__ = [
    "centred_scores",
    "class_log_scores",
    "class_probabilities",
    "context_scores",
    "ensemble_scores",
    "pmi_scores",
]


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
    values = _checks.log_scores(log_probs, "log_probs")
    owners = _checks.class_labels(
        class_of_word, "class_of_word", num_classes, values.shape[1], each="column of log_probs"
    )
    missing = np.setdiff1d(np.arange(num_classes), owners)
    if missing.size:
        raise ValueError(
            f"Class {missing[0]} has no label word; give at least one word to each of {num_classes} classes."
        )
    _checks.refuse(np.isposinf(values), values, "log_probs", "the logarithm of a probability.")
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
    values = _checks.log_scores(scores, "scores")
    _refuse_nan_and_inf(values, "scores")
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
    values = _checks.log_scores(scores, "scores")
    premise = np.asarray(premise_scores, dtype=np.float64)
    if premise.shape not in {(values.shape[1],), values.shape}:
        raise ValueError(
            f"premise_scores has shape {premise.shape}; expected {(values.shape[1],)} for one premise or "
            f"{values.shape} for one per document."
        )
    advice = "Choose a premise after which every label word is possible."
    _checks.refuse(~np.isfinite(premise), premise, "premise_scores", f"finite numbers. {advice}")
    return values - premise


def context_scores(scores: ArrayLike, content_free_scores: ArrayLike) -> NDArray[np.float64]:
    """Subtract what the model says of documents without content: log p(c|s) - log p_cf(c).

    Contextual calibration. Source: Zhao et al., "Calibrate Before Use" (ICML 2021, arXiv:2102.09690), the diagonal W.
    p_cf(c) is the mean over content-free inputs (theirs are "N/A", "" and "[MASK]" in place of the document) of the
    class probabilities, each input normalised over the classes first. Their code averages the unnormalised label-word
    probabilities and normalises the mean, which gives an input more weight the likelier it makes label words of any
    class; with one input the two agree. p(c|s) is left as it is: normalising it over the classes would move all
    classes of a document alike.

    Args:
        scores: Log-scores of shape (n, K); -inf stays -inf.
        content_free_scores: Log-scores of the m >= 1 content-free inputs: shape (m, K) where they are the same for all
            documents, else (n, m, K). -inf is allowed where another input of the document makes the class possible.

    Returns:
        Corrected scores of shape (n, K).

    Raises:
        ValueError: If shapes do not fit, there is no content-free input, a score is NaN or +inf, an input has -inf for
            every class (it has no class probabilities), or a class has p_cf = 0.
    """
    values = _checks.log_scores(scores, "scores")
    _refuse_nan_and_inf(values, "scores")
    inputs = np.asarray(content_free_scores, dtype=np.float64)
    num_documents, num_classes = values.shape
    per_document = inputs.ndim == 3
    if inputs.ndim not in {2, 3} or inputs.shape[-1] != num_classes or (per_document and len(inputs) != num_documents):
        raise ValueError(
            f"content_free_scores has shape {inputs.shape}; expected (inputs, {num_classes}) for inputs that all "
            f"documents share or ({num_documents}, inputs, {num_classes})."
        )
    if not inputs.shape[-2]:
        raise ValueError(f"content_free_scores has shape {inputs.shape}; expected at least one content-free input.")
    _refuse_nan_and_inf(inputs, "content_free_scores")
    impossible = np.isneginf(inputs)
    if impossible.all(axis=-1).any():
        position = np.argwhere(impossible.all(axis=-1))[0].tolist()
        raise ValueError(
            f"content_free_scores{position} is -inf for every class, so this input has no class probabilities; leave it "
            "out."
        )
    if impossible.all(axis=-2).any():
        position = np.argwhere(impossible.all(axis=-2))[0].tolist()
        raise ValueError(
            f"Class {position[-1]} has probability zero after every content-free input"
            f"{f' of document {position[0]}' if per_document else ''}; choose an input after which it is possible."
        )
    log_prior = logsumexp(_class_log_probabilities(inputs), axis=-2) - np.log(inputs.shape[-2])
    return values - log_prior


def ensemble_scores(scores: ArrayLike, how: Literal["log", "probability"]) -> NDArray[np.float64]:
    """Average the class scores of T templates for the same documents.

    Every template is first normalised over the classes, p_t(c|s) = softmax_c(score_tc):

    - "log" is mean_t log p_t(c|s), the logarithm of the geometric mean: templates multiply their evidence, and one that
      is sure a class is wrong can veto it. What normalising takes off is the same for all classes, so the prediction is
      that of the mean of the scores as they are.
    - "probability" is log mean_t p_t(c|s), the arithmetic mean: the probability of the class when a template is drawn at
      random, so a template that is very sure counts no more than its share of 1/T. Here normalising matters: without it
      a template after which label words of any class are likely would outweigh the others.

    Several words of a class are no templates: `class_log_scores` has summed them, as probabilities, within each template.

    Args:
        scores: Log-scores of shape (T, n, K), T >= 1; -inf is allowed. Where a template has -inf for every class of a
            document it says nothing of it and gives 1/K each, as `class_probabilities` does.
        how: "log" or "probability".

    Returns:
        Shape (n, K). It does not depend on the order of the templates, to the bit, and classes to which the templates
        give the same probabilities, whichever template gives which, stay tied. "log" is not normalised over the classes
        (`class_probabilities` does it). With "log" a class that is impossible under one template has -inf, with
        "probability" only one that is impossible under all.

    Raises:
        ValueError: If the shape does not fit, there is no template, a score is NaN or +inf, or `how` is neither name.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 3 or not len(values):
        raise ValueError(f"scores has shape {values.shape}; expected (templates, documents, classes), templates >= 1.")
    if how not in {"log", "probability"}:
        raise ValueError(f'how is {how!r}; expected "log" or "probability".')
    _refuse_nan_and_inf(values, "scores")
    # In ascending order, since rounding would otherwise break ties by the order of the templates.
    log_probs = np.sort(_class_log_probabilities(values), axis=0)
    if how == "log":
        return log_probs.mean(axis=0)
    return logsumexp(log_probs, axis=0) - np.log(len(values))


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
    values = _checks.log_scores(scores, "scores")
    if not len(values):
        raise ValueError("scores has no rows; centring needs at least one document.")
    finite = np.isfinite(values)
    _refuse_nan_and_inf(values, "scores")
    counts = finite.sum(axis=0)
    if not counts.all():
        label = int(np.flatnonzero(counts == 0)[0])
        raise ValueError(f"Class {label} has score -inf for every document, so it has no mean; check its label words.")
    return values - np.where(finite, values, 0.0).sum(axis=0) / counts


def _class_log_probabilities(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normalise over the last axis, in logarithms; -log K each where all are -inf, as in `class_probabilities`."""
    # In ascending order, so that rounding does not depend on the order of the classes.
    total = logsumexp(np.sort(scores, axis=-1), axis=-1, keepdims=True)
    nothing = np.isneginf(total)
    return np.where(nothing, -np.log(scores.shape[-1]), scores - np.where(nothing, 0.0, total))


def _refuse_nan_and_inf(scores: NDArray[np.float64], name: str) -> None:
    _checks.refuse(np.isnan(scores) | np.isposinf(scores), scores, name, "a log-score.")
