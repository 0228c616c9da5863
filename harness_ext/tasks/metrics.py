"""Our metrics in lm_eval's registry, and lm_eval's and `evaluate`'s metrics on our predictions.

A metric that is a mean over documents has one number a document. Any other has one item a document, which holds the gold class
and one value for each of the task's runs (the prompts of a sweep, probes fitted on several training samples), and is the mean
over runs of the metric over documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from lm_eval.api import registry

from harness_ext.evaluators import natural, scores
from harness_ext.ratio import Ratio, ratio_of_sums

__all__ = [
    "ENSEMBLES",
    "FLATNESS",
    "INTERVAL_DRAWS",
    "MEAN_METRICS",
    "OF_CLASSES",
    "GoldAndPredictions",
    "aggregate_evaluate_metric",
    "aggregate_runs",
    "ensemble_accuracies",
    "load_evaluate_metric",
    "macro_f1",
    "macro_f1_stderr",
    "of_sweep",
    "pass_through",
    "register_metrics",
]

GoldAndPredictions = tuple[int, tuple[int, ...]]
GoldAndValues = tuple[int, tuple[float, ...]]
GoldAndProbabilities = tuple[int, tuple[tuple[float, ...], ...]]

MEAN_METRICS = {"acc_pmi": True, "acc_batch": True, "acc_context": True, "brier": False}
"""Metrics of ours that are means over documents, and whether higher is better."""

ENSEMBLES: dict[str, Literal["log", "probability"]] = {"acc_ensemble": "log", "acc_mixture": "probability"}
"""Accuracies of all prompts of a sweep together, and how `natural.ensemble_scores` combines them."""

FLATNESS = (
    "loss",
    "bits_per_byte",
    "fisher_trace",
    "hessian_trace",
    "hessian_over_fisher",
    "fisher_trace_scaled",
    "hessian_trace_scaled",
    "ggn_trace",
    "ggn_trace_scaled",
    "fisher_trace_per_mparam",
    "hessian_trace_per_mparam",
    "lambda_max",
)
"""Metrics of flatness tasks; those of loss tasks are the first two."""

BOOTSTRAP_DRAWS = 1000

INTERVAL_DRAWS = 4000
"""Of a percentile interval: its ends then vary by about 2 % of its width from seed to seed."""


def register_metrics() -> None:
    """Add our metrics and aggregations to lm_eval's registry; calling it again changes nothing."""
    if "macro_f1" in registry.METRIC_REGISTRY:
        return
    registry.get_metric("acc")  # fills the registry with lm_eval's own, which it does only while it is empty
    unbound: dict[str, tuple[Callable[..., Any], bool]] = {
        "macro_f1": (macro_f1, True),
        "balanced_acc": (BalancedAccuracy(None), True),
        "ece": (CalibrationError(), False),
        "majority_rate": (MajorityRate(None), True),
    }
    for name, (aggregation, higher_is_better) in unbound.items():
        registry.register_aggregation(name)(aggregation)
        registry.register_metric(metric=name, higher_is_better=higher_is_better, aggregation=name)(pass_through)
    registry.register_aggregation("over_windows")(OverWindows())
    for name in FLATNESS:
        if name in registry.METRIC_REGISTRY:
            continue  # lm_eval's bits_per_byte; our tasks name their own aggregation
        registry.register_metric(metric=name, higher_is_better=False, aggregation="over_windows")(pass_through)
    for name, higher_is_better in MEAN_METRICS.items():
        registry.register_metric(metric=name, higher_is_better=higher_is_better, aggregation="mean")(pass_through)


def pass_through(items: Any) -> Any:
    """A metric whose items our tasks have computed."""
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


class BalancedAccuracy:
    """Mean over classes of the accuracy on the documents of the class, averaged over runs.

    Args:
        num_classes: K; None: classes are 0 to the largest that occurs.
    """

    def __init__(self, num_classes: int | None) -> None:
        self._num_classes = num_classes

    def _arrays(self, items: Sequence[GoldAndValues]) -> tuple[np.ndarray, np.ndarray, int]:
        gold = np.array([label for label, _ in items])
        # Balanced accuracy is linear in the values, so the mean over runs is that of the mean.
        values = np.array([np.mean(of_runs) for _, of_runs in items])
        return values, gold, self._num_classes or int(gold.max()) + 1

    def __call__(self, items: Sequence[GoldAndValues]) -> float:
        return scores.balanced_accuracy(*self._arrays(items))

    def stderr(self, items: Sequence[GoldAndValues]) -> float:
        return scores.balanced_accuracy_stderr(*self._arrays(items))


class CalibrationError:
    """Expected calibration error of the class probabilities, averaged over runs."""

    def __init__(self, num_classes: int | None = None) -> None:
        """The items say how many classes there are; the argument is that of the other aggregations."""

    def __call__(self, items: Sequence[GoldAndProbabilities]) -> float:
        gold = np.array([label for label, _ in items])
        of_runs = np.array([probabilities for _, probabilities in items]).swapaxes(0, 1)
        return float(np.mean([scores.expected_calibration_error(run, gold) for run in of_runs]))


class MajorityRate:
    """Share of the commonest class: what accuracy is worth without a look at the document."""

    def __init__(self, num_classes: int | None) -> None:
        self._num_classes = num_classes

    def __call__(self, items: Sequence[int]) -> float:
        return scores.majority_rate(np.array(items), self._num_classes or int(max(items)) + 1)


class OverWindows:
    """A ratio of sums over windows of a corpus, such as nats over tokens; items are numerator and denominator of a window.

    Where all windows have the same denominator it is the mean over windows, with its usual standard error. A window of (0, 0)
    has no part in it.
    """

    def _ratio(self, items: Sequence[tuple[float, float]]) -> Ratio:
        pairs = np.array(items, dtype=np.float64)
        return ratio_of_sums(*pairs[pairs.any(axis=1)].T)

    def __call__(self, items: Sequence[tuple[float, float]]) -> float:
        return self._ratio(items).value

    def stderr(self, items: Sequence[tuple[float, float]]) -> float:
        return self._ratio(items).stderr


OF_CLASSES: dict[str, Callable[[int], Any]] = {
    "macro_f1": MacroF1,
    "balanced_acc": BalancedAccuracy,
    "ece": CalibrationError,
    "majority_rate": MajorityRate,
}
"""Aggregations that want to know the number of classes."""


class ExtremePrompt:
    """Accuracy of the best or the worst prompt of a sweep; items are the accuracies of a document under each."""

    def __init__(self, choose: Callable[..., Any]) -> None:
        self._choose = choose

    def __call__(self, items: Sequence[tuple[float, ...]]) -> float:
        return float(self._choose(np.mean(items, axis=0)))

    def stderr(self, items: Sequence[tuple[float, ...]]) -> float:
        """Standard error of that prompt's accuracy, as if it had been chosen beforehand; NaN for one document."""
        values = np.array(items)
        if len(values) < 2:
            return float("nan")
        means = values.mean(axis=0)
        chosen = values[:, int(np.flatnonzero(means == self._choose(means))[0])]
        return float(chosen.std(ddof=1) / np.sqrt(len(chosen)))


def of_sweep(names: Sequence[str]) -> dict[str, Callable[..., float]]:
    """Aggregations of a sweep over prompts of these names, by metric."""
    mean = registry.get_aggregation("mean")
    return (
        {"acc_worst": ExtremePrompt(np.min), "acc_best": ExtremePrompt(np.max)}
        | dict.fromkeys(ENSEMBLES, mean)
        | {f"acc@{name}": mean for name in names}
    )


def ensemble_accuracies(class_scores: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Accuracies of documents by all prompts of a sweep together, each of shape (n,).

    Args:
        class_scores: Class log-scores under each prompt, shape (T, n, K).
        labels: Gold classes, shape (n,).
    """
    return {
        name: scores.tie_aware_accuracy(natural.ensemble_scores(class_scores, how), labels).values
        for name, how in ENSEMBLES.items()
    }


def macro_f1_stderr(items: Sequence[GoldAndPredictions], *, num_classes: int) -> float:
    """Bootstrap standard error of `macro_f1` over documents; NaN for fewer than two documents."""
    if len(items) < 2:
        return float("nan")
    gold, predicted = _runs(items)
    generator = np.random.default_rng(0)
    return scores.macro_f1_stderr(gold, predicted.T, num_classes, draws=BOOTSTRAP_DRAWS, generator=generator)


def aggregate_runs(items: Sequence[GoldAndPredictions], metric: Callable[[np.ndarray, np.ndarray], float]) -> float:
    """Mean over runs of `metric(gold (n,), predictions (n,))`."""
    gold, predicted = _runs(items)
    return float(np.mean([metric(gold, run) for run in predicted]))


def load_evaluate_metric(name: str, *, source: str) -> Callable[..., Any]:
    """`compute` of a metric of the `evaluate` library, for one that lm_eval could not load: it drops the reason.

    Args:
        name: As `evaluate.load` takes it: a name or the path of a script.
        source: The task's YAML, for the error.

    Raises:
        ValueError: With the reason why it cannot be loaded.
    """
    import evaluate

    try:
        return evaluate.load(name).compute
    except Exception as error:  # a metric script may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{source}: the evaluate library could not load metric {name!r} ({reason}). Correct `metric_list`, install what "
            "it needs, or without internet give the path of its script."
        ) from error


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
