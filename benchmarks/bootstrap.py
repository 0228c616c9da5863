"""Time 10,000 bootstrap draws of macro-F1 for 2,000 documents against drawing the documents themselves.

    python benchmarks/bootstrap.py
    python benchmarks/bootstrap.py --documents 872 --classes 2 3 --draws 100000

`ours` is `macro_f1_interval`. `scipy` is `scipy.stats.bootstrap`, paired and percentile, with a vectorised macro-F1 in
numpy, in batches of 100. `sklearn` resamples in a loop and calls `f1_score`, as lm_eval's own bootstrap does. These two
make `--reference-draws` draws, and their seconds are scaled to `--draws`, to which they are proportional. Every method
runs `--runs` times, in alternation; the table has medians. The other intervals of this project follow, in full.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness_ext.evaluators import scores

Labels = NDArray[np.int64]


def synthesise(num_documents: int, num_classes: int) -> tuple[Labels, Labels, NDArray[np.float64]]:
    """Draw gold classes, predictions that are right in about seven cases of ten, and class probabilities."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, num_classes, num_documents)
    predictions = np.where(
        generator.random(num_documents) < 0.7, labels, generator.integers(0, num_classes, num_documents)
    )
    return labels, predictions, generator.dirichlet(np.ones(num_classes), num_documents)


def draw_with_scipy(labels: Labels, predictions: Labels, num_classes: int, draws: int) -> None:
    """Resample documents with scipy, all of a batch at once."""
    import scipy.stats

    def macro_f1(gold: Labels, predicted: Labels, axis: int = -1) -> NDArray[np.float64]:
        hits, by_class = gold == predicted, []
        for label in range(num_classes):
            is_gold, is_predicted = gold == label, predicted == label
            support = is_gold.sum(axis=axis) + is_predicted.sum(axis=axis)
            by_class.append(2 * (is_gold & hits).sum(axis=axis) / np.maximum(support, 1))
        return np.mean(by_class, axis=0)

    scipy.stats.bootstrap(
        (labels, predictions),
        macro_f1,
        n_resamples=draws,
        batch=100,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),
    )


def draw_with_sklearn(labels: Labels, predictions: Labels, num_classes: int, draws: int) -> None:
    """Resample documents in a loop around scikit-learn's F1."""
    from sklearn.metrics import f1_score

    generator = np.random.default_rng(0)
    for _ in range(draws):
        rows = generator.integers(len(labels), size=len(labels))
        f1_score(labels[rows], predictions[rows], average="macro", labels=range(num_classes), zero_division=0)


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def compare(num_documents: int, num_classes: int, draws: int, reference_draws: int, runs: int) -> None:
    """Print one row for each method and each interval."""
    labels, predictions, probabilities = synthesise(num_documents, num_classes)
    credit, losses = (labels == predictions).astype(float), scores.brier(probabilities, labels)

    def options() -> dict[str, Any]:
        return {"draws": draws, "generator": np.random.default_rng(0)}

    scale = draws / reference_draws
    methods: dict[str, tuple[float, Callable[[], object]]] = {
        "macro-F1, ours": (1, lambda: scores.macro_f1_interval(labels, predictions, num_classes, **options())),
        "macro-F1, scipy": (scale, lambda: draw_with_scipy(labels, predictions, num_classes, reference_draws)),
        "macro-F1, sklearn": (scale, lambda: draw_with_sklearn(labels, predictions, num_classes, reference_draws)),
        "accuracy, ours": (1, lambda: scores.mean_interval(credit, **options())),
        "balanced accuracy, ours": (
            1,
            lambda: scores.balanced_accuracy_interval(credit, labels, num_classes, **options()),
        ),
        "Brier score, ours": (1, lambda: scores.mean_interval(losses, **options())),
        "calibration error, ours": (1, lambda: scores.calibration_error_interval(probabilities, labels, **options())),
    }
    draw_with_scipy(labels, predictions, num_classes, 10)  # imports are not timed
    draw_with_sklearn(labels, predictions, num_classes, 10)
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(runs):
        for name, (factor, function) in methods.items():
            taken[name].append(factor * seconds(function))
    print(f"n = {num_documents}, K = {num_classes}, {draws} draws, {runs} runs")
    ours = statistics.median(taken["macro-F1, ours"])
    for name, values in taken.items():
        ratio = f"{statistics.median(values) / ours:9.0f} x" if name.startswith("macro-F1") else ""
        note = f"  scaled from {reference_draws} draws" if methods[name][0] != 1 else ""
        print(f"  {name:24} {statistics.median(values):9.4f} s{ratio}{note}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--classes", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--reference-draws", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for num_classes in options.classes:
        compare(options.documents, num_classes, options.draws, options.reference_draws, options.runs)


if __name__ == "__main__":
    main()
