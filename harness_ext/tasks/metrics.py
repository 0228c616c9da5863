"""Our metrics in lm_eval's registry, and lm_eval's and `evaluate`'s metrics on our predictions.

A metric that is a mean over documents has one number a document. Any other has one item a document, (gold, predictions)
with one prediction for each of the task's runs (probes fitted on several training samples; a natural task has one run),
and is the mean over runs of the metric over documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api import registry

from harness_ext.evaluators import scores

__all__ = [
    "MEAN_METRICS",
    "GoldAndPredictions",
    "MacroF1",
    "aggregate_evaluate_metric",
    "aggregate_runs",
    "macro_f1",
    "macro_f1_stderr",
    "register_metrics",
]

GoldAndPredictions = tuple[int, tuple[int, ...]]

MEAN_METRICS = {"acc_pmi": True, "acc_batch": True, "brier": False}
"""Metrics of ours that are means over documents, and whether higher is better."""

BOOTSTRAP_DRAWS = 1000


def register_metrics() -> None:
    """Add our metrics and aggregations to lm_eval's registry; calling it again changes nothing."""
    if "macro_f1" in registry.METRIC_REGISTRY:
        return
    registry.get_metric("acc")  # fills the registry with lm_eval's own, which it does only while it is empty
    registry.register_aggregation("macro_f1")(macro_f1)
    registry.register_metric(metric="macro_f1", higher_is_better=True, aggregation="macro_f1")(_pass_through)
    for name, higher_is_better in MEAN_METRICS.items():
        registry.register_metric(metric=name, higher_is_better=higher_is_better, aggregation="mean")(_pass_through)


def _pass_through(items: Any) -> Any:
    return items


def macro_f1(items: Sequence[GoldAndPredictions], *, num_classes: int | None = None) -> float:
    """Macro-F1 over documents, averaged over runs; without `num_classes`, the classes are 0 to the largest that occurs."""

    def metric(gold: np.ndarray, predicted: np.ndarray) -> float:
        return scores.macro_f1(gold, predicted, num_classes or int(max(gold.max(), predicted.max())) + 1)

    return aggregate_runs(items, metric)


class MacroF1:
    """`macro_f1` of a task with K classes, as an aggregation that brings its own standard error; see `engine.attach`."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes

    def __call__(self, items: Sequence[GoldAndPredictions]) -> float:
        return macro_f1(items, num_classes=self._num_classes)

    def stderr(self, items: Sequence[GoldAndPredictions]) -> float:
        return macro_f1_stderr(items, num_classes=self._num_classes)


def macro_f1_stderr(items: Sequence[GoldAndPredictions], *, num_classes: int) -> float:
    """Bootstrap standard error of `macro_f1` of the first run over documents; NaN for fewer than two documents."""
    if len(items) < 2:
        return float("nan")
    gold, predicted = _runs(items)
    generator = np.random.default_rng(0)
    return scores.macro_f1_stderr(gold, predicted[0], num_classes, draws=BOOTSTRAP_DRAWS, generator=generator)


def aggregate_runs(items: Sequence[GoldAndPredictions], metric: Callable[[np.ndarray, np.ndarray], float]) -> float:
    """Mean over runs of `metric(gold (n,), predictions (n,))`."""
    gold, predicted = _runs(items)
    return float(np.mean([metric(gold, run) for run in predicted]))


def aggregate_evaluate_metric(
    items: Sequence[GoldAndPredictions],
    *,
    name: str,
    compute: Callable[..., Mapping[str, Any]],
    options: Mapping[str, Any],
) -> float:
    """A metric of the `evaluate` library over documents, averaged over runs."""

    def metric(gold: np.ndarray, predicted: np.ndarray) -> float:
        result = compute(predictions=predicted.tolist(), references=gold.tolist(), **options)
        return float(result[name] if name in result else next(iter(result.values())))

    return aggregate_runs(items, metric)


def _runs(items: Sequence[GoldAndPredictions]) -> tuple[np.ndarray, np.ndarray]:
    gold = np.array([label for label, _ in items])
    return gold, np.array([predictions for _, predictions in items]).T
