"""The theory of language models on classification tasks, checked where everything in it is known.

Source: Saunshi, Malladi and Arora (ICLR 2021), sections 3 and 4. A binary task T is a distribution of contexts s with labels
y = ±1. A linear classifier v ∈ R^V on next-word probabilities p has the loss

    ℓ_T(p, v) = E_T log(1 + exp(−y v·p(·|s))),

and T is (τ, B)-natural if some v with ‖v‖_∞ ≤ B has ℓ_T(p*, v) ≤ τ; τ(B) is the least such τ. Here, as in the source, there is
no intercept; probabilities sum to 1, so the constant vectors within the box make one of absolute value at most B.

The bound. The logistic loss is 1-Lipschitz in v·p, and |v·(p − q)| ≤ ‖v‖_∞ ‖p − q‖₁, which is at most B √(2 KL(q ‖ p)) by
Pinsker's inequality. With the excess of the model on the task's own contexts, ε_T = E_T KL(p*(·|s) ‖ p_f(·|s)), and E√X ≤ √E X,

    ℓ_T(p_f, v) ≤ ℓ_T(p*, v) + B √(2 ε_T)    for each v with ‖v‖_∞ ≤ B,                                          (1)
    min_v ℓ_T(p_f, v) ≤ τ(B) + B √(2 ε_T)    by the v that is best on p*.                                        (2)

Both hold on every set of documents, not in expectation alone, if both sides are taken on it. If the contexts of the task are
among those of the language, p_L(s) ≥ γ p_T(s), then ε_T ≤ ε/γ with the excess ε over all contexts, which is the form in which
the source states it: τ + √(2 B² ε/γ). ε and ε_T are both measured here, so γ is not needed.

With Φᵀp_f ∈ R^d for features and λ ∈ R^d for a classifier, λ·Φᵀp = (Φλ)·p: it is the classifier v = Φλ. (2) holds within
the span of Φ with τ_Φ(B), the least loss on p* of such a v, in place of τ(B). (The source measures the excess over the best f
for the same Φ, which is smaller.) Where Φ has rank V there is no difference from p_f.

A model may have tokens that are no words of the language, as those of a GPT-2 tokenizer. V counts them too, and p* is 0
there; a classifier on p_f has one coefficient for all of them together, one on Φᵀp_f has what Φλ is there.

Classifiers are fitted on the training documents of a task and scored on its test documents. A context is an end of text, a
document and the task's cue, as in the loss that ε is the excess of.

Known gaps: tasks of two classes only, as in the source (its loss for more classes is another one, and (1) has other constants);
models of the cross-entropy objective only: p_f of a Quad model is no estimate of p*.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import LinAlgError, cho_factor, cho_solve, qr, solve_triangular
from scipy.special import expit, log_softmax
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from harness_ext.lab.checkpoints import Checkpoint, find_checkpoints, without_bars
from harness_ext.lab.figures import COLOURS, save_figure
from harness_ext.lab.languages import language_from_dict
from harness_ext.lab.languages.base import ORGANISATION
from harness_ext.lab.languages.tokens import word_tokens
from harness_ext.lab.lookup import register_lookup
from harness_ext.lab.quad import last_states, linear_head
from harness_ext.lab.train import cpu_threads, encode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from harness_ext.lab.languages.base import Language, Task

__all__ = [
    "BoundedFit",
    "Contexts",
    "TheoryReport",
    "TheoryRow",
    "check_theory",
    "fit_bounded",
    "logistic_losses",
    "read_contexts",
]

_FREE_BOUND = 1e4
_LEAST_BOUND = 1.0
_BOUND_MARGIN = 1e-3
"""Where no B is given it is the first of 1, 2, 4, … at which τ(B) on the training documents is within so many nats of what it
is at `_FREE_BOUND`: a larger B would loosen the bound and leave τ where it is."""

TOLERANCE = 1e-6
"""Of a fit: its training loss is at most so many nats above the least one."""

_RANK_CUTOFF = 1e-6
"""Singular values of Φ below this share of the largest are taken for rounding of float32."""

_BARRIER_SHRINKAGE = 10.0
_CENTRED = 1e-3
"""Newton's decrement, squared and in units of the barrier's weight, from which the weight shrinks."""
_MAX_NEWTON_STEPS = 400
_LEAST_PIVOT = 1e-5
_BATCH_SIZE = 128


class BoundedFit(NamedTuple):
    """The best classifier within a bound.

    Attributes:
        coefficients: v, float64 (V,), ‖v‖_∞ ≤ B.
        loss: Mean logistic loss on the rows that it was fitted to, in nats.
        gap: `loss` is at most this far above the minimum, by duality.
    """

    coefficients: np.ndarray
    loss: float
    gap: float


class Contexts(NamedTuple):
    """Labelled contexts of a task.

    Attributes:
        texts: Document and cue of each, n of them.
        signs: y, float64 (n,): +1 for class 1 and −1 for class 0.
        probabilities: p*(·|s), float64 (n, W + 1), of the W words and then the end of text.
        bayes_loss: Mean of −log p(y | document), the least loss of any classifier at all, in nats.
    """

    texts: tuple[str, ...]
    signs: np.ndarray
    probabilities: np.ndarray
    bayes_loss: float


@dataclass(frozen=True)
class TheoryRow:
    """One checkpoint on one task within one bound. Losses are mean logistic losses in nats, errors are standard errors over
    documents, and what does not begin with `train_` is measured on test documents.

    Attributes:
        checkpoint: Its name.
        run: The run that it is of.
        step: Its training step.
        excess: ε, over all contexts of the language, nats per token; from the checkpoint's `lab.json`.
        task: The task's name.
        excess_task: ε_T, over the contexts of the task.
        bound_B: B.
        loss_pf: Of the classifier fitted on p_f.
        loss_cmean: Of the classifier fitted on Φᵀp_f.
        tau: τ(B): of the classifier fitted on p*.
        tau_phi: τ_Φ(B): of the classifier in the span of Φ fitted on p*.
        loss_transferred: On p_f, of the classifier fitted on p*; by (1) it never exceeds `bound`.
        bound: τ(B) + B √(2 ε_T).
        bound_phi: τ_Φ(B) + B √(2 ε_T).
        excess_informative: ‖E y p*‖₁² / 8. With a larger ε_T the bound exceeds log 2 at every B, and says nothing: τ is convex
            in B with the slope −‖E y p*‖₁ / 2 at B = 0, where it is log 2.
        bayes_loss: Least loss of any classifier on the words.
        train_loss_pf: Minimum on p_f; by (2) it never exceeds `train_bound`, but for `gap`.
        train_loss_cmean: Minimum on Φᵀp_f.
        train_tau: Minimum on p*.
        train_bound: The bound on the training documents.
        phi_rank: Rank of Φ; V if Φᵀp_f says all that p_f says.
        vocabulary: V, the model's tokens.
        gap: Largest possible distance of a fit from its minimum, in nats.
        num_train: Training documents.
        num_test: Test documents.
    """

    checkpoint: str
    run: str
    step: int
    excess: float
    excess_stderr: float
    task: str
    excess_task: float
    excess_task_stderr: float
    bound_B: float
    loss_pf: float
    loss_pf_stderr: float
    loss_cmean: float
    loss_cmean_stderr: float
    tau: float
    tau_stderr: float
    tau_phi: float
    tau_phi_stderr: float
    loss_transferred: float
    loss_transferred_stderr: float
    bound: float
    bound_stderr: float
    bound_phi: float
    excess_informative: float
    bayes_loss: float
    train_loss_pf: float
    train_loss_cmean: float
    train_tau: float
    train_bound: float
    phi_rank: int
    vocabulary: int
    gap: float
    num_train: int
    num_test: int


@dataclass(frozen=True)
class TheoryReport:
    """What came out.

    Attributes:
        rows: Ordered by task, B, run and step.
        left_out: Why a task or a checkpoint has no rows, by its name.
    """

    rows: tuple[TheoryRow, ...]
    left_out: Mapping[str, str]

    def write(self, folder: Path) -> list[Path]:
        """Write `theory.csv`, `theory_left_out.json`, and the figure as `theory.png` and `theory.svg`.

        Raises:
            ImportError: If matplotlib is not installed; the tables are written by then.
        """
        folder.mkdir(parents=True, exist_ok=True)
        table, left_out = folder / "theory.csv", folder / "theory_left_out.json"
        self.write_csv(table)
        left_out.write_text(json.dumps(dict(self.left_out), indent=2) + "\n", encoding="utf-8")
        return [table, left_out, *save_figure(self.draw(), folder / "theory")]

    def write_csv(self, path: Path) -> None:
        """Write the rows, one line each, with the attributes of `TheoryRow` for columns."""
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(TheoryRow)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in self.rows)

    def draw(self) -> Figure:
        """Draw the losses against √ε: a panel for each task (and each B), a colour for each run.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        return _draw(self.rows)


def check_theory(
    out_folder: Path,
    *,
    bound_B: float | Sequence[float] | None = None,
    tasks: Sequence[str] | None = None,
    num_documents: int | None = 2000,
    checkpoints: Sequence[Checkpoint] | None = None,
    progress: bool = True,
) -> TheoryReport:
    """Fit the classifiers for each checkpoint of a lab run.

    Args:
        out_folder: Folder of `harness-ext lab run`: `language.json`, and the tasks under `data/`.
        bound_B: B, one or several, above 0. None measures one for each task: the least power of 2 beyond which τ(B) hardly
            falls.
        tasks: Names of tasks of two classes; None takes all that the language has.
        num_documents: Training documents, and test documents, of each task at most; None takes all.
        checkpoints: What to check; None takes all that are found under `out_folder`.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If a bound is not above 0, a task is unknown or has more than two classes, there is nothing to check, or a
            checkpoint is of another language.
        FileNotFoundError: If the language or a task's documents are missing.
    """
    bounds = [] if bound_B is None else np.atleast_1d(np.asarray(bound_B, dtype=np.float64)).tolist()
    if bound_B is not None and not (bounds and all(math.isfinite(bound) and bound > 0 for bound in bounds)):
        raise ValueError(f"bound_B is {bound_B!r}; expected numbers above 0")
    if num_documents is not None and num_documents < 2:
        raise ValueError(f"num_documents is {num_documents}; expected at least 2, for standard errors")
    path = out_folder / "language.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; expected the folder of a `harness-ext lab run`")
    language = language_from_dict(json.loads(path.read_text(encoding="utf-8")))
    left_out: dict[str, str] = {}
    found = find_checkpoints(out_folder) if checkpoints is None else list(checkpoints)
    kept = []
    for checkpoint in found:
        if checkpoint.objective == "cross_entropy":
            kept.append(checkpoint)
        else:
            left_out[checkpoint.name] = (
                f"its objective is {checkpoint.objective}, so the softmax of its logits is no estimate of p*"
            )
    if not kept:
        raise ValueError(
            f"{out_folder}: expected checkpoints trained with the objective cross_entropy, found none among {len(found)}"
        )
    others = [checkpoint for checkpoint in kept if checkpoint.language_sha256 != kept[0].language_sha256]
    if others:
        raise ValueError(
            f"{others[0].folder}: expected a checkpoint of the language of {kept[0].folder}, found one of another. Check the "
            "checkpoints of one run of `harness-ext lab run` at a time."
        )
    problems = {}
    for task in _chosen_tasks(language, tasks, left_out):
        train, test = (
            read_contexts(out_folder / "data", language, task, split, num_documents) for split in ("train", "test")
        )
        task_bounds = bounds or [_measured_bound(train)]
        fits = {bound: fit_bounded(train.probabilities, train.signs, bound) for bound in task_bounds}
        problems[task.name] = _Problem(train, test, fits)
    rows: list[TheoryRow] = []
    # On matrices of this size two threads wait for each other, a hundred times as long where the cores are busy.
    with threadpool_limits(1), cpu_threads(1):
        for checkpoint in tqdm(kept, desc="Theory", unit=" checkpoints", disable=not progress):
            rows += _rows(checkpoint, language, problems)
    rows.sort(key=lambda row: (row.task, row.bound_B, row.run, row.step))
    return TheoryReport(tuple(rows), left_out)


def read_contexts(data: Path, language: Language, task: Task, split: str, count: int | None = None) -> Contexts:
    """Read the first documents of a task's dataset, as `languages.base.write_dataset` writes it, and what is known of them.

    Args:
        data: Folder that holds `harness_ext/<task>/<split>.jsonl`.
        language: The language.
        task: A task of two classes.
        split: `train` or `test`.
        count: Documents at most; None for all.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If there are fewer than two documents, or a label is not 0 or 1.
    """
    path = data / ORGANISATION / task.name / f"{split}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; expected the documents of the task {task.name}")
    documents: list[tuple[str, ...]] = []
    labels: list[int] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if count is not None and len(labels) == count:
                break
            row = json.loads(line)
            documents.append(tuple(row["text"].split()))
            labels.append(row["label"])
    if len(labels) < 2 or not set(labels) <= {0, 1}:
        raise ValueError(
            f"{path}: expected at least 2 documents with labels 0 and 1, got {len(labels)} with labels {sorted(set(labels))}"
        )
    posteriors = task.posteriors(documents)
    prompts = [(*document, *task.cue) for document in documents]
    return Contexts(
        texts=tuple(" ".join(prompt) for prompt in prompts),
        signs=2.0 * np.array(labels) - 1.0,
        probabilities=np.array([table[-1] for table in _next_words(language, prompts)]),
        bayes_loss=float(-np.log(posteriors[np.arange(len(labels)), labels]).mean()),
    )


def logistic_losses(probabilities: np.ndarray, signs: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Return log(1 + exp(−y v·p)) of each row, float64 (n,), in nats.

    Args:
        probabilities: p, (n, V).
        signs: y, ±1, (n,).
        coefficients: v, (V,).
    """
    return np.logaddexp(0.0, -signs * (probabilities @ coefficients))


def fit_bounded(
    probabilities: np.ndarray,
    signs: np.ndarray,
    bound: float,
    *,
    embedding: np.ndarray | None = None,
    tolerance: float = TOLERANCE,
) -> BoundedFit:
    """Return the classifier v of least mean logistic loss with ‖v‖_∞ ≤ B, on p or, as v = Φλ, on Φᵀp.

    The problem is convex: it is solved by Newton's method with a logarithmic barrier (Boyd and Vandenberghe, 2004, section
    11.3), which takes a box across a subspace as well as a plain one and proves how near the minimum is. With u = v/B, g the
    gradient of the loss by u and any z that agrees with −g on the subspace, no u' there has a loss below
    loss + g·(u' − u) ≥ loss − (‖z‖₁ + g·u); z comes from the barrier.

    Args:
        probabilities: p of each row, float64 (n, V).
        signs: y, ±1, (n,).
        bound: B, above 0.
        embedding: Φ, (V, d), or None for any v.
        tolerance: Largest distance from the minimum, in nats.

    Raises:
        ValueError: If shapes do not fit or a number is out of its range.
        ArithmeticError: If the tolerance is not reached.
    """
    if probabilities.ndim != 2 or signs.shape != probabilities.shape[:1] or not len(signs):
        raise ValueError(f"expected (n, V) probabilities and n signs, got {probabilities.shape} and {signs.shape}")
    if not np.isin(signs, (-1.0, 1.0)).all():
        raise ValueError("expected signs of -1 or 1")
    if not (math.isfinite(bound) and bound > 0):
        raise ValueError(f"bound is {bound}; expected a number above 0")
    if embedding is None:
        return _fit(probabilities, signs, bound, None, tolerance)
    if embedding.ndim != 2 or len(embedding) != probabilities.shape[1]:
        raise ValueError(f"expected an embedding of {probabilities.shape[1]} rows, got shape {embedding.shape}")
    return _fit(probabilities, signs, bound, _orthonormal_span(embedding), tolerance)


def _fit(
    probabilities: np.ndarray, signs: np.ndarray, bound: float, span: np.ndarray | None, tolerance: float = TOLERANCE
) -> BoundedFit:
    """See `fit_bounded`; span (V, r) has orthonormal columns, u = span @ a."""
    size = probabilities.shape[1]
    basis = np.eye(size) if span is None else span
    # Row i of `margins` times a is y_i v·p_i.
    inputs = (bound * signs)[:, None] * (probabilities if span is None else probabilities @ span)
    point = np.zeros(basis.shape[1])
    weight = 0.1 / size
    gap = math.inf
    for _ in range(_MAX_NEWTON_STEPS):
        box = basis @ point
        room = (1 - box) * (1 + box)
        margins = inputs @ point
        gradient = -(inputs.T @ expit(-margins)) / len(signs)
        # Derivatives of the barrier, −weight Σ log(1 − u²), by u.
        push, stiffness = 2 * weight * box / room, 2 * weight * (1 + box**2) / room**2
        walls = basis * np.sqrt(stiffness)[:, None]
        slopes = inputs * np.sqrt(expit(margins) * expit(-margins) / len(signs))[:, None]
        slope = gradient + basis.T @ push
        direction = -_solve_normal_equations(np.concatenate([walls, slopes]), slope)
        decrement = float(-slope @ direction)
        if decrement > _CENTRED * weight:
            length = _step_length(inputs, margins, box, basis @ direction, direction, weight, decrement)
            point = point + length * direction
            continue
        # Near enough to the minimum for this weight. z is what the barrier pushes with, changed where it is stiff, so that it
        # agrees with −g on the subspace.
        multipliers = push - stiffness * (basis @ _solve_normal_equations(walls, slope))
        gap = float(np.abs(multipliers).sum() - multipliers @ box)
        if gap <= tolerance:
            loss = float(np.logaddexp(0.0, -margins).mean())
            return BoundedFit(coefficients=bound * box, loss=loss, gap=gap)
        weight /= _BARRIER_SHRINKAGE
    raise ArithmeticError(
        f"the classifier within |v| <= {bound} was not found to {tolerance} nats in {_MAX_NEWTON_STEPS} steps; the last is "
        f"within {gap:.2g}. Take a smaller B."
    )


def _solve_normal_equations(rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Solve RᵀR x = y for the rows R (m, r), whose columns are independent.

    By Cholesky's factors, or, where words that go together make RᵀR singular to rounding, by those of R, which is as the
    square root of it.
    """
    square = rows.T @ rows
    scale = 1 / np.sqrt(np.diagonal(square))
    with contextlib.suppress(LinAlgError):
        factor = cho_factor(square * np.outer(scale, scale))
        if np.diagonal(factor[0]).min() > _LEAST_PIVOT:
            return scale * cho_solve(factor, scale * vector)
    (triangle,) = qr(rows, mode="r")
    triangle = triangle[: rows.shape[1]]
    return solve_triangular(triangle, solve_triangular(triangle, vector, trans="T"))


def _step_length(
    inputs: np.ndarray,
    margins: np.ndarray,
    box: np.ndarray,
    box_direction: np.ndarray,
    direction: np.ndarray,
    weight: float,
    decrement: float,
) -> float:
    """Return a step along Newton's direction that stays within the box and lowers the objective (Armijo's rule)."""

    def objective(margins: np.ndarray, box: np.ndarray) -> float:
        return float(np.logaddexp(0.0, -margins).mean() - weight * np.log((1 - box) * (1 + box)).sum())

    margin_direction = inputs @ direction
    with np.errstate(divide="ignore", invalid="ignore"):
        until_wall = np.where(box_direction == 0, np.inf, (np.sign(box_direction) - box) / box_direction)
    step = min(1.0, 0.99 * float(until_wall.min()))
    here = objective(margins, box)
    # Below this a difference of objectives is rounding.
    rounding = 1e-14 * max(1.0, abs(here))
    while step > 1e-12:
        there = objective(margins + step * margin_direction, box + step * box_direction)
        if there <= here - 0.25 * step * decrement + rounding:
            break
        step /= 2
    return step


def _orthonormal_span(embedding: np.ndarray) -> np.ndarray:
    """Return orthonormal columns (V, r) with the span of Φ."""
    left, values, _ = np.linalg.svd(embedding, full_matrices=False)
    if not values[0] > 0:
        raise ValueError("expected an output embedding that is not 0")
    return left[:, values > _RANK_CUTOFF * values[0]]


def _measured_bound(train: Contexts) -> float:
    free = fit_bounded(train.probabilities, train.signs, _FREE_BOUND).loss
    bound = _LEAST_BOUND
    while bound < _FREE_BOUND and fit_bounded(train.probabilities, train.signs, bound).loss > free + _BOUND_MARGIN:
        bound *= 2
    return bound


class _Problem(NamedTuple):
    """A task, and what does not depend on the model: the best classifier on p* for each B."""

    train: Contexts
    test: Contexts
    fits: Mapping[float, BoundedFit]


def _rows(checkpoint: Checkpoint, language: Language, problems: Mapping[str, _Problem]) -> list[TheoryRow]:
    model, reader = _load(checkpoint.folder, language)
    try:
        head = linear_head(model)
    except ValueError as err:
        raise ValueError(f"{checkpoint.folder}: {err}") from err
    span = _orthonormal_span(head.weight.detach().double().numpy())
    rows = []
    for task, (train, test, fits_on_language) in problems.items():
        train_logs, test_logs = (_log_probabilities(model, head, reader.encode(of.texts)) for of in (train, test))
        train_p, test_p = (reader.of_words(np.exp(logs)) for logs in (train_logs, test_logs))
        train_divergence = _divergences(train.probabilities, train_logs[:, reader.columns])
        test_divergence = _divergences(test.probabilities, test_logs[:, reader.columns])
        excess = float(test_divergence.mean())
        for bound, on_language in fits_on_language.items():
            on_pf = fit_bounded(train_p, train.signs, bound)
            pf = logistic_losses(test_p, test.signs, on_pf.coefficients)
            tau = logistic_losses(test.probabilities, test.signs, on_language.coefficients)
            on_cmean, on_language_phi, cmean, tau_phi = on_pf, on_language, pf, tau
            if span.shape[1] < span.shape[0]:
                on_cmean = _fit(np.exp(train_logs), train.signs, bound, span)
                on_language_phi = _fit(reader.of_tokens(train.probabilities), train.signs, bound, span)
                cmean = logistic_losses(np.exp(test_logs), test.signs, on_cmean.coefficients)
                tau_phi = logistic_losses(test.probabilities, test.signs, on_language_phi.coefficients[reader.columns])
            transferred = logistic_losses(
                test_p[:, : test.probabilities.shape[1]], test.signs, on_language.coefficients
            )
            slack = bound * math.sqrt(2 * excess)
            # Delta method: B √(2 ε) moves by B / √(2 ε) times what ε moves by.
            influence = tau + (bound / math.sqrt(2 * excess) * test_divergence if excess > 0 else 0.0)
            rows.append(
                TheoryRow(
                    checkpoint=checkpoint.name,
                    run=checkpoint.run,
                    step=checkpoint.step,
                    excess=checkpoint.excess.value,
                    excess_stderr=checkpoint.excess.stderr,
                    task=task,
                    excess_task=excess,
                    excess_task_stderr=_stderr(test_divergence),
                    bound_B=bound,
                    loss_pf=float(pf.mean()),
                    loss_pf_stderr=_stderr(pf),
                    loss_cmean=float(cmean.mean()),
                    loss_cmean_stderr=_stderr(cmean),
                    tau=float(tau.mean()),
                    tau_stderr=_stderr(tau),
                    tau_phi=float(tau_phi.mean()),
                    tau_phi_stderr=_stderr(tau_phi),
                    loss_transferred=float(transferred.mean()),
                    loss_transferred_stderr=_stderr(transferred),
                    bound=float(tau.mean()) + slack,
                    bound_stderr=_stderr(influence),
                    bound_phi=float(tau_phi.mean()) + slack,
                    excess_informative=float(np.abs(test.signs @ test.probabilities / len(test.signs)).sum() ** 2 / 8),
                    bayes_loss=test.bayes_loss,
                    train_loss_pf=on_pf.loss,
                    train_loss_cmean=on_cmean.loss,
                    train_tau=on_language.loss,
                    train_bound=on_language.loss + bound * math.sqrt(2 * float(train_divergence.mean())),
                    phi_rank=span.shape[1],
                    vocabulary=span.shape[0],
                    gap=max(fit.gap for fit in (on_pf, on_cmean, on_language, on_language_phi)),
                    num_train=len(train.signs),
                    num_test=len(test.signs),
                )
            )
    return rows


def _chosen_tasks(language: Language, names: Sequence[str] | None, left_out: dict[str, str]) -> list[Task]:
    known = {task.name: task for task in language.tasks}
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown task {name!r}. The language {language.name!r} has {', '.join(known)}.")
        if len(known[name].classes) != 2:
            raise ValueError(f"task {name!r} has {len(known[name].classes)} classes; the theory is about tasks of two")
    chosen = []
    for name, task in known.items():
        if names is not None and name not in names:
            continue
        if len(task.classes) == 2:
            chosen.append(task)
        else:
            left_out[name] = f"it has {len(task.classes)} classes, and the theory is about tasks of two"
    if not chosen:
        raise ValueError(
            f"the language {language.name!r} has no task of two classes among {', '.join(known) or 'none'}"
        )
    return chosen


class _Reader:
    """Between the language's words and a model's tokens."""

    def __init__(self, folder: Path, language: Language) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        try:
            tokens = word_tokens(language, self._tokenizer)
        except ValueError as err:
            raise ValueError(f"{folder}: {err} Is this checkpoint of another language?") from err
        self.size, self._end_of_text = tokens.size, tokens.end_of_text
        self.columns = np.append(tokens.later, tokens.end_of_text)
        """Tokens of the words, and of the end of text, anywhere but at the beginning of a document."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids, an end of text first."""
        return [[self._end_of_text, *ids] for ids in encode(texts, self._tokenizer)]

    def of_words(self, probabilities: np.ndarray) -> np.ndarray:
        """From (n, V) to (n, W + 1), and a last column for all other tokens if there are any."""
        chosen = probabilities[:, self.columns]
        if len(self.columns) == self.size:
            return chosen
        rest = np.maximum(probabilities.sum(axis=1) - chosen.sum(axis=1), 0.0)
        return np.column_stack([chosen, rest])

    def of_tokens(self, probabilities: np.ndarray) -> np.ndarray:
        """From (n, W + 1) to (n, V)."""
        result = np.zeros((len(probabilities), self.size))
        result[:, self.columns] = probabilities
        return result


def _load(folder: Path, language: Language) -> tuple[PreTrainedModel, _Reader]:
    register_lookup()
    with without_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reader = _Reader(folder, language)
    size = model.get_output_embeddings().weight.shape[0]
    if size != reader.size:
        raise ValueError(f"{folder}: expected as many logits as the tokenizer has tokens, {reader.size}, got {size}")
    return model, reader


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, head: nn.Linear, contexts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return log p_f(·|s), float64 (n, V), from logits in float32."""
    result = np.empty((len(contexts), head.out_features))
    by_length = sorted(range(len(contexts)), key=lambda row: len(contexts[row]))
    for start in range(0, len(by_length), _BATCH_SIZE):
        rows = by_length[start : start + _BATCH_SIZE]
        padded = pad_sequence([torch.tensor(contexts[row]) for row in rows], batch_first=True)
        ends = torch.tensor([len(contexts[row]) - 1 for row in rows])
        mask = (torch.arange(padded.shape[1]) <= ends[:, None]).long()
        states = last_states(model, {"input_ids": padded, "attention_mask": mask})[torch.arange(len(rows)), ends]
        result[rows] = log_softmax(head(states).double().numpy(), axis=1)
    return result


def _next_words(language: Language, documents: Sequence[Sequence[str]]) -> Iterator[np.ndarray]:
    """`Language.next_words`, with few tables in memory."""
    for start in range(0, len(documents), _BATCH_SIZE):
        yield from language.next_words(documents[start : start + _BATCH_SIZE])


def _divergences(probabilities: np.ndarray, log_probabilities: np.ndarray) -> np.ndarray:
    """Return KL(p* ‖ p_f) of each row, (n,), in nats; rounding below 0 is 0."""
    with np.errstate(divide="ignore"):
        logs = np.where(probabilities > 0, np.log(probabilities) - log_probabilities, 0.0)
    return np.maximum((probabilities * logs).sum(axis=1), 0.0)


def _stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


# ------------------------------------------------------------------------------------------------------------ figure

_STAR_STYLE: dict[str, Any] = {"color": "black", "linewidth": 1.2, "linestyle": (0, (5, 2))}
_BOUND_STYLE: dict[str, Any] = {"color": "0.45", "linewidth": 1.0}
_CHANCE_STYLE: dict[str, Any] = {"color": "0.6", "linewidth": 0.9, "linestyle": ":"}


def _draw(rows: Sequence[TheoryRow]) -> Figure:
    # No pyplot: it keeps global state and may want a display.
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels: dict[str, dict[float, list[TheoryRow]]] = {}
    for row in rows:
        panels.setdefault(row.task, {}).setdefault(row.bound_B, []).append(row)
    runs = sorted({row.run for row in rows})
    if len(runs) <= len(COLOURS):
        colours: dict[str, Any] = dict(zip(runs, COLOURS, strict=False))
    else:
        colours = {run: colormaps["turbo"](0.05 + 0.9 * i / (len(runs) - 1)) for i, run in enumerate(runs)}
    grid_rows = max(len(of_task) for of_task in panels.values())
    columns = len(panels)
    one_each = grid_rows == 1
    if one_each and columns > 3:
        columns = math.ceil(columns / math.ceil(columns / 3))
        grid_rows = math.ceil(len(panels) / columns)
    legend_columns = min(4, max(2, 2 * columns))
    legend_lines = math.ceil((len(runs) + 5) / legend_columns)
    figure = Figure(
        figsize=(max(5.0, 3.2 * columns + 0.4), 2.7 * grid_rows + 0.2 * legend_lines + 0.2), layout="constrained"
    )
    axes = figure.subplots(grid_rows, columns, squeeze=False, sharex=True)
    for axis in axes.flat:
        axis.set_visible(False)
    for place, (task, of_bounds) in enumerate(panels.items()):
        everywhere = [row for of_bound in of_bounds.values() for row in of_bound]
        for line, bound in enumerate(sorted(of_bounds)):
            axis = axes.flat[place] if one_each else axes[line][place]
            axis.set_visible(True)
            _draw_panel(axis, of_bounds[bound], everywhere, colours)
            axis.set_title(f"{task},  B = {bound:g}", fontsize=9, loc="left")
    for axis in axes[:, 0]:
        axis.set_ylabel("logistic loss (nats)", fontsize=9)
    for column in range(columns):
        lowest = [axis for axis in axes[:, column] if axis.get_visible()][-1]
        lowest.set_xlabel(r"$\sqrt{\varepsilon}$,  $\varepsilon$ in nats per token", fontsize=9)
        lowest.tick_params(labelbottom=True)
    markers: dict[str, Any] = {"color": "0.25", "markersize": 4}
    handles = [Line2D([], [], color=colour, marker="o", markersize=4, label=run) for run, colour in colours.items()]
    handles += [
        Line2D([], [], marker="o", label=r"on $p_f$", **markers),
        Line2D(
            [],
            [],
            marker="s",
            markerfacecolor="white",
            linestyle="--",
            label=r"on $\Phi^\top p_f$, if rank $\Phi < V$",
            **markers,
        ),
        Line2D([], [], label=r"$\tau(B)$: on $p^*$", **_STAR_STYLE),
        Line2D([], [], label=r"$\tau(B) + B\sqrt{2\varepsilon_T}$", **_BOUND_STYLE),
        Line2D([], [], label=r"chance, $\log 2$", **_CHANCE_STYLE),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns, fontsize=8, frameon=False)
    return figure


def _root(excess: float) -> float:
    """√ε; from logits in float32 an excess of 0 may come out as −1e-9."""
    return math.sqrt(max(excess, 0.0))


def _draw_panel(
    axis: Axes, rows: Sequence[TheoryRow], everywhere: Sequence[TheoryRow], colours: Mapping[str, Any]
) -> None:
    """Draw one task at one B; the axis of losses is the same for all its B, whose rows are `everywhere`."""
    chance, tau = math.log(2), rows[0].tau
    ends = [chance, tau]
    for row in everywhere:
        for loss, error in ((row.loss_pf, row.loss_pf_stderr), (row.loss_cmean, row.loss_cmean_stderr)):
            ends += [loss - error, loss + error]
    lowest, highest = min(ends), max(ends)
    style: dict[str, Any] = {"linewidth": 1.1, "elinewidth": 0.7}
    for run, colour in colours.items():
        along = sorted((row for row in rows if row.run == run), key=lambda row: row.step)
        x = [_root(row.excess) for row in along]
        if any(row.phi_rank < row.vocabulary for row in along):
            losses, errors = [row.loss_cmean for row in along], [row.loss_cmean_stderr for row in along]
            axis.errorbar(
                x, losses, errors, fmt="s--", color=colour, markerfacecolor="white", markersize=6, zorder=3, **style
            )
        losses, errors = [row.loss_pf for row in along], [row.loss_pf_stderr for row in along]
        axis.errorbar(x, losses, errors, fmt="o-", color=colour, markersize=3.5, zorder=4, **style)
    axis.axhline(tau, zorder=2, **_STAR_STYLE)
    axis.axhline(chance, zorder=1, **_CHANCE_STYLE)
    # The bound depends on ε_T; between checkpoints ε_T is taken to be in the same proportion to ε.
    points = sorted({(_root(row.excess), row.bound) for row in rows} | {(0.0, tau)})
    axis.plot(*zip(*points, strict=True), zorder=2, **_BOUND_STYLE)
    least, most = (extreme(row.excess_task for row in rows) for extreme in (min, max))
    note = (
        f"Bayes {rows[0].bayes_loss:.3f};  bound < log 2 only\nfor $\\varepsilon_T$ < {rows[0].excess_informative:.2g},"
    )
    # Below 1e-9 it is rounding: p_f is p*.
    note += f" here {least if least > 1e-9 else 0:.2g} to {most:.2g}"
    axis.text(0.98, 0.98, note, transform=axis.transAxes, ha="right", va="top", fontsize=7, color="0.35")
    axis.set_xlim(left=-0.02 * max(x for x, _ in points) or None)
    # Above there is room for the note.
    axis.set_ylim(lowest - 0.05 * (highest - lowest), highest + 0.25 * (highest - lowest))
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
