"""Comparisons: two models on the documents that they share, models of one loss, aggregates over tasks, and whether flatness
predicts downstream where loss does not. Pure.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness_ext import correlation, loss_groups
from harness_ext.leaderboard.contracts import (
    ALPHABET,
    MISSING,
    Aggregate,
    Coefficient,
    Column,
    Correlation,
    Flatness,
    Loss,
    LossGroup,
    Metric,
    Model,
    Score,
    Vector,
)
from harness_ext.leaderboard.statistics import (
    PairedDifference,
    borda,
    mcnemar_exact,
    normalised,
    paired_bootstrap,
    win_rates,
)

__all__ = [
    "TOLERANCES",
    "Comparison",
    "aggregates",
    "compare_vectors",
    "correlations",
    "disagreements",
    "groups_of_loss",
    "is_averaged",
    "main_text",
    "main_values",
    "mean_normalised",
    "parts_of",
]

TOLERANCES = {"bits_per_byte": 0.01, "nats_per_token": 0.005}
"""Default tolerance of loss groups, by measure; nats per token are those of the lab, which matches to the same tolerance."""

FEWEST_MODELS = 4
"""Of a correlation: a partial one needs four."""

CORRELATED_MEASURES = ("fisher_trace", "hessian_trace", "fisher_trace_scaled")

DOWNSTREAM = ("natural", "probe", "quad", "kernel", "finetune", "other")
"""Kinds of columns with scores of tasks."""

_RESAMPLES = 2_000
_MOST_RANKS = 400_000
"""Models times resamples of one bootstrap, for boards of many models."""


@dataclass(frozen=True)
class Comparison:
    """Two models on the same documents.

    Attributes:
        num_documents: That both have.
        first_only, second_only: Documents that only one has right; None where documents count in part.
        p_value: Of the exact McNemar test; None likewise.
        difference: Mean of second less first, with a bootstrap interval.
        is_partial: Whether one model was evaluated on some of the other's documents only.
    """

    num_documents: int
    first_only: int | None
    second_only: int | None
    p_value: float | None
    difference: PairedDifference
    is_partial: bool


def compare_vectors(
    first: Vector, second: Vector, sets: Sequence[Sequence[str]], *, rng: np.random.Generator
) -> Comparison:
    """Compare two models on one column.

    Args:
        first: Of `Board.vectors` of the column.
        second: Likewise.
        sets: `Board.document_sets` of the column.
        rng: Source of the bootstrap's resamples.

    Raises:
        ValueError: If the documents differ: neither set is part of the other, or no document is shared.
    """
    of_first, of_second = _scores_of(first, sets), _scores_of(second, sets)
    shared = sorted(of_first.keys() & of_second.keys())
    smaller = min(len(of_first), len(of_second))
    if not shared or len(shared) < smaller:
        raise ValueError(
            f"the documents differ: {len(of_first):,} and {len(of_second):,}, of which {len(shared):,} are the same by "
            "doc_hash; compare runs on the same version of the dataset"
        )
    a, b = np.array([of_first[key] for key in shared]), np.array([of_second[key] for key in shared])
    first_only = second_only = p_value = None
    if np.isin(a, (0.0, 1.0)).all() and np.isin(b, (0.0, 1.0)).all():
        first_only, second_only = int(np.sum(a > b)), int(np.sum(b > a))
        p_value = mcnemar_exact(first_only, second_only)
    return Comparison(
        num_documents=len(shared),
        first_only=first_only,
        second_only=second_only,
        p_value=p_value,
        difference=paired_bootstrap(a, b, rng=rng),
        is_partial=len(of_first) != len(of_second),
    )


def _scores_of(vector: Vector, sets: Sequence[Sequence[str]]) -> dict[str, float]:
    value = dict(zip(ALPHABET, vector.values, strict=False))
    keys = sets[vector.documents]
    return {key: value[code] for key, code in zip(keys, vector.codes, strict=True) if code != MISSING}


def disagreements(vectors: Sequence[Vector], sets: Sequence[Sequence[str]], most: int) -> list[str]:
    """Documents on which models disagree, those that split the models most evenly first; `most` at most, sorted by key."""
    sums: dict[str, list[float]] = {}
    for vector in vectors:
        for key, score in _scores_of(vector, sets).items():
            total = sums.setdefault(key, [0.0, 0.0, 0.0])
            total[0] += score
            total[1] += score * score
            total[2] += 1
    spread = {key: square / count - (total / count) ** 2 for key, (total, square, count) in sums.items() if count > 1}
    # A spread of rounding errors is none.
    found = sorted(
        (key for key, value in spread.items() if value > 1e-12), key=lambda key: (-round(spread[key], 12), key)
    )
    return sorted(found[:most])


# -------------------------------------------------------------------------------------------------------- loss groups


def groups_of_loss(losses: Iterable[Loss], tolerances: Mapping[str, float] = TOLERANCES) -> tuple[LossGroup, ...]:
    """Models of one loss on each text, of full runs; see `harness_ext.loss_groups`.

    A model whose loss has no standard error is in no group: whether its loss is equal to another cannot be known.
    """
    groups = []
    for text, all_of_text in sorted(_by_text(losses).items()):
        of_text = [loss for loss in all_of_text if loss.axis[1].stderr is not None]
        if not of_text:
            continue
        measure = of_text[0].axis[0]
        values = [loss.axis[1] for loss in of_text]
        found = loss_groups.loss_groups(
            [metric.value for metric in values if metric.value is not None],
            [metric.stderr for metric in values if metric.stderr is not None],
            tolerance=tolerances[measure],
        )
        for group in found.groups:
            members = [of_text[place] for place in group.members]
            low, high = members[0].axis[1].value, members[-1].axis[1].value
            assert low is not None
            assert high is not None
            groups.append(LossGroup(text, tolerances[measure], tuple(loss.model for loss in members), low, high))
    return tuple(groups)


def main_text(losses: Iterable[Loss]) -> str | None:
    """The text of which most models have a loss, of full runs; ties go to the first in the order of texts.

    The exact excess loss of lab models, which resolves more than a sample of text, comes first if at least 3/4 as many have it.
    """
    counts = {text: len(of_text) for text, of_text in sorted(_by_text(losses).items())}
    return max(counts, key=lambda text: counts[text] * (4 if text.startswith("excess/") else 3), default=None)


def _by_text(losses: Iterable[Loss]) -> dict[str, list[Loss]]:
    """Losses of full runs by text, one for each model, in the order given."""
    found: dict[str, dict[str, Loss]] = {}
    for loss in losses:
        if loss.limit is None and loss.axis[1].value is not None:
            found.setdefault(loss.text, {}).setdefault(loss.model, loss)
    return {text: list(of_text.values()) for text, of_text in found.items()}


# -------------------------------------------------------------------------------------------------------- correlations


def correlations(
    models: Iterable[Model],
    columns: Iterable[Column],
    scores: Iterable[Score],
    losses: Iterable[Loss],
    flatness: Iterable[Flatness],
    groups: Iterable[LossGroup],
    *,
    remembered: Callable[[str, Callable[[], Sequence[Coefficient]]], Sequence[Coefficient]] = lambda _, make: make(),
    main: Mapping[str, Mapping[str, Metric]] | None = None,
) -> tuple[Correlation, ...]:
    """Correlate loss and flatness with each downstream column, over the models that have all three, of full runs.

    A trace is a sum over parameters, so flatness is correlated over models of one size only, the commonest. Within loss groups
    it is not correlated with scores that differ by no more than their errors.

    Args:
        models: Of the board.
        columns: Likewise.
        scores: Likewise.
        losses: Likewise.
        flatness: Likewise.
        groups: From `groups_of_loss`.
        remembered: Of a text that says what is correlated, and a function that makes the four coefficients, returns them.
        main: `main_values` of columns and scores, if they are known.
    """
    main = main_values(columns, scores) if main is None else main
    downstream = [
        column for column in columns if column.kind in DOWNSTREAM and len(main.get(column.id, ())) >= FEWEST_MODELS
    ]
    measured: dict[tuple[str, str], dict[str, float]] = {}
    for of_model in flatness:
        for measure in CORRELATED_MEASURES:
            metric = of_model.measures.get(measure)
            if of_model.limit is None and metric is not None and metric.value is not None:
                measured.setdefault((of_model.column, measure), {})[of_model.model] = metric.value
    group_of: dict[tuple[str, str], int] = {}
    for number, group in enumerate(groups):
        group_of.update(dict.fromkeys(((group.text, model) for model in group.models), number))
    model_of = {model.id: model for model in models}
    result = []
    for text, of_text in sorted(_by_text(losses).items()):
        loss = {of_model.model: of_model.axis[1].value for of_model in of_text}
        for (column, measure), traces in sorted(measured.items()):
            for task in downstream:
                accuracy = main[task.id]
                shared = sorted(loss.keys() & traces.keys() & accuracy.keys())
                if len(shared) >= FEWEST_MODELS:
                    result.append(
                        _correlation(
                            remembered,
                            (text, column, measure, task.id),
                            [model_of[model] for model in shared],
                            np.array([loss[model] for model in shared], dtype=np.float64),
                            np.array([traces[model] for model in shared]),
                            [accuracy[model] for model in shared],
                            # A model in no group is alone.
                            [group_of.get((text, model), -1 - place) for place, model in enumerate(shared)],
                        )
                    )
    return tuple(result)


def main_values(columns: Iterable[Column], scores: Iterable[Score]) -> dict[str, dict[str, Metric]]:
    """The main metric by column and model, of full runs, where it has a value."""
    metric = {column.id: column.metric for column in columns}
    found: dict[str, dict[str, Metric]] = {}
    for score in scores:
        shown = score.metric(metric[score.column])
        if score.limit is None and shown.value is not None:
            found.setdefault(score.column, {})[score.model] = shown
    return found


def _correlation(
    remembered: Callable[[str, Callable[[], Sequence[Coefficient]]], Sequence[Coefficient]],
    key: tuple[str, str, str, str],
    models: Sequence[Model],
    loss: np.ndarray,
    traces: np.ndarray,
    scores: Sequence[Metric],
    groups: Sequence[int],
) -> Correlation:
    sizes = [model.num_parameters for model in models]
    size = _commonest(sizes)
    same = [place for place, of_model in enumerate(sizes) if size is not None and of_model == size]
    ids = [model.id for model in models]
    accuracy = np.array([_value(metric) for metric in scores])
    errors = np.array([np.nan if metric.stderr is None else metric.stderr for metric in scores])
    # Seeded by what is correlated, so that a board's other contents do not change these numbers.
    # Checkpoints of one training run are alike: runs are permuted and resampled whole.
    units = [model.id if model.lab is None else f"run {model.lab.run}" for model in models]
    made = json.dumps(
        [key, ids, units, sizes, loss.tolist(), traces.tolist(), accuracy.tolist(), [m.stderr for m in scores], groups]
    )
    seed = int.from_bytes(hashlib.sha256(made.encode()).digest()[:8], "big")

    def make() -> list[Coefficient]:
        resamples = max(100, min(_RESAMPLES, _MOST_RANKS // len(models)))
        draws: dict[str, Any] = {"num_resamples": resamples, "num_permutations": resamples}
        rng = np.random.default_rng(seed)
        of_loss = _coefficient(correlation.spearman(loss, accuracy, units=units, rng=rng, **draws))
        reason = None
        if size is None:
            reason = "no model says how many parameters it has, and traces compare among models of one size only"
        elif len(same) < FEWEST_MODELS:
            reason = f"too few models of one size ({len(same)}); traces compare among models of one size only"
        if reason is not None:
            return [of_loss, *[Coefficient(None, reason=reason)] * 3]
        x, y = traces[same], accuracy[same]
        groups_of_same = [groups[place] for place in same]
        of_run = {"units": [units[place] for place in same], "rng": rng, **draws}
        reason = _no_spread(y, errors[same], groups_of_same)
        within = correlation.spearman(x, y, groups=groups_of_same, **of_run) if reason is None else None
        return [
            of_loss,
            _coefficient(correlation.spearman(x, y, **of_run)),
            _coefficient(correlation.partial_spearman(x, y, loss[same], **of_run)),
            Coefficient(None, reason=reason) if within is None else _coefficient(within),
        ]

    return Correlation(*key, tuple(ids), tuple(ids[place] for place in same), size, *remembered(made, make))


def _commonest(sizes: Iterable[int | None]) -> int | None:
    """The size that most models have, the smaller of two; None if no size is known."""
    counts = Counter(size for size in sizes if size is not None)
    return min(counts, key=lambda size: (-counts[size], size), default=None)


def _no_spread(values: np.ndarray, errors: np.ndarray, groups: Sequence[int]) -> str | None:
    """Why ranks within groups would be those of errors; None if they are not."""
    spread = correlation.heterogeneity(values, errors, groups)
    if spread.reason is not None:
        return f"spread unknown: {spread.reason}"
    if not spread.exceeds_error():
        return f"scores within loss groups differ by no more than their errors (p = {spread.p_value:.2g})"
    return None


def _coefficient(found: correlation.Correlation) -> Coefficient:
    def known(value: float) -> float | None:
        # Linear algebra rounds differently from one machine to another; the last digits are left out.
        return float(f"{value:.6g}") if math.isfinite(value) else None

    return Coefficient(
        known(found.value),
        known(found.low),
        known(found.high),
        known(found.p_value),
        found.reason or found.interval_reason,
    )


# ---------------------------------------------------------------------------------------------------------- aggregates


def parts_of(scores: Iterable[Score]) -> dict[str, int]:
    """Number the parts of a board: models of one part are joined by columns that they share, directly or through others.

    Args:
        scores: Of full runs; numbers follow their order.

    Returns:
        The part of each model and of each column, by id.
    """
    parent: dict[str, str] = {}

    def root(identifier: str) -> str:
        while (above := parent.setdefault(identifier, identifier)) != identifier:
            parent[identifier] = identifier = parent[above]
        return identifier

    for score in scores:
        if parent.get(score.model, score.model) != parent.get(score.column, score.column):
            model, column = root(score.model), root(score.column)
            parent[column] = model
    number: dict[str, int] = {}
    return {identifier: number.setdefault(root(identifier), len(number)) for identifier in list(parent)}


def aggregates(
    columns: Sequence[Column], scores: Sequence[Score], *, main: Mapping[str, Mapping[str, Metric]] | None = None
) -> tuple[Aggregate, ...]:
    """Aggregate over the columns of each kind that have full runs; see `contracts.Aggregate`.

    Args:
        columns: Of the board.
        scores: Likewise.
        main: `main_values` of both, if they are known.
    """
    main = main_values(columns, scores) if main is None else main
    part = parts_of(scores)
    by_kind: dict[tuple[str, int], list[Column]] = {}
    for column in columns:
        if is_averaged(column) and main.get(column.id):
            kind = f"{column.kind}, chat" if column.chat else column.kind
            by_kind.setdefault((kind, part[column.id]), []).append(column)
    result = []
    for (kind, _), of_kind in by_kind.items():
        present: dict[str, int] = {}
        for column in of_kind:
            for model in main[column.id]:
                present[model] = present.get(model, 0) + 1
        complete = sorted(model for model, count in present.items() if count == len(of_kind))
        ranked: dict[str, tuple[float | None, float]] = {}
        if complete:
            columns_of = [[_value(main[column.id][model]) for model in complete] for column in of_kind]
            table = np.array(columns_of).T
            higher = [column.higher_is_better[column.metric] for column in of_kind]
            rates, points = win_rates(table, higher), borda(table, higher)
            for place, model in enumerate(complete):
                ranked[model] = (float(rates[place]) if len(complete) > 1 else None, float(points[place]))
        for model in sorted(present):
            numbers: list[float | None]
            if model in ranked:
                of_model = [main[column.id][model] for column in of_kind]
                mean = sum(map(_value, of_model)) / len(of_model)
                numbers = [mean, *mean_normalised(of_kind, of_model), *ranked[model]]
            else:
                numbers = [None] * 5
            result.append(Aggregate(model, kind, present[model], len(of_kind), *numbers))
    return tuple(result)


def is_averaged(column: Column) -> bool:
    """Whether means count a column. A group is the mean of its tasks, which count themselves."""
    return column.kind in DOWNSTREAM and column.bounded and "group" not in column.settings


def _value(metric: Metric) -> float:
    assert metric.value is not None
    return metric.value


def mean_normalised(columns: Sequence[Column], metrics: Sequence[Metric]) -> tuple[float | None, float | None]:
    """The mean of a model's normalised scores, and its standard error.

    Columns of one dataset share its documents, so their errors are added up, which is the most that they can come to; those of
    different datasets are independent.

    Args:
        columns: At least one.
        metrics: Of a model, with values, in the order of the columns.

    Returns:
        Both None where a column's chance is unknown or less is better; the error None where one is unknown.
    """
    total = 0.0
    of_dataset: dict[str, float] = {}
    is_known = True
    for column, metric in zip(columns, metrics, strict=True):
        if column.chance is None or not column.higher_is_better[column.metric]:
            return None, None
        total += normalised(_value(metric), column.chance)
        if metric.stderr is None:
            is_known = False
        else:
            dataset = column.dataset or column.task
            of_dataset[dataset] = of_dataset.get(dataset, 0.0) + metric.stderr / (1 - column.chance)
    return total / len(columns), math.hypot(*of_dataset.values()) / len(columns) if is_known else None
