"""Time the probe's whole grid (every C on every fold, and the final fit) against scikit-learn on the same folds.

    python benchmarks/probe_grid.py --features states.npz
    python benchmarks/probe_grid.py --shape 6920 576 2 --runs 5 --with-liblinear
    python benchmarks/probe_grid.py --memory --threads 1

Runs alternate between the methods, each in a process of its own, so that peak memory is the method's; "extra GB" is what
it comes to beyond the interpreter, its imports and the input. `--memory` is one run of `ours` on 120,000 x 768 in four
classes, whose extra memory is to stay below 0.9 GB. The clock runs inside the process, without imports and reading;
"CPU s" is what all threads used, which says more than the clock on cores shared with other work.

`--features` names a `.npz` with `features` (n, d) and `labels` (n,) and perhaps `test_features` and `test_labels` (a
`train_` prefix is understood too). `--shape` draws features whose covariance has eigenvalues 1/j, about what last-token
states of small language models show, and labels from a softmax on them.

Methods: `ours` is `fit_probe`; `lbfgs` is StandardScaler and LogisticRegression per fold, with warm starts along C;
`liblinear` is LogisticRegressionCV on raw features with 200 iterations, one-vs-rest, as in Saunshi et al. (ICLR 2021).
Threads are left as they are unless `--threads` is given. On cores that are shared with other work, threads wait for
each other, and `--threads 1` is many times faster for all methods. Peak memory is read from /proc, so this runs on Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

NUM_FOLDS = 5
MEMORY_SHAPE = (120_000, 768, 4)


def run_ours(arrays: Arrays, num_classes: int, seed: int) -> dict[str, Any]:
    """Fit with this project's solver."""
    from harness_ext.evaluators.probe import fit_probe

    started = time.perf_counter()
    fit = fit_probe(arrays["features"], arrays["labels"], num_classes=num_classes, num_folds=NUM_FOLDS, seed=seed)
    seconds = time.perf_counter() - started
    test = None if "test_features" not in arrays else fit.predict(arrays["test_features"])
    return {"seconds": seconds, "c": fit.c, "cv": max(fit.cv_accuracy or (float("nan"),)), "predictions": test}


def run_lbfgs(arrays: Arrays, num_classes: int, seed: int) -> dict[str, Any]:
    """Fit with scikit-learn's default solver on features standardised inside the fold."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.preprocessing import StandardScaler

    from harness_ext.evaluators.probe import DEFAULT_C_GRID

    features, labels = arrays["features"], arrays["labels"]
    started = time.perf_counter()
    accuracy = np.zeros((len(DEFAULT_C_GRID), NUM_FOLDS))
    folds = StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=seed)
    for fold, (train, held_out) in enumerate(folds.split(features, labels)):
        scaler = StandardScaler().fit(features[train])
        train_features, held_out_features = scaler.transform(features[train]), scaler.transform(features[held_out])
        model = LogisticRegression(max_iter=1000, warm_start=True)
        for index, c in enumerate(DEFAULT_C_GRID):
            model.set_params(C=c).fit(train_features, labels[train])
            accuracy[index, fold] = model.score(held_out_features, labels[held_out])
    means = accuracy.mean(axis=1)
    c = DEFAULT_C_GRID[int(means.argmax())]
    scaler = StandardScaler().fit(features)
    model = LogisticRegression(C=c, max_iter=1000).fit(scaler.transform(features), labels)
    seconds = time.perf_counter() - started
    test = None if "test_features" not in arrays else model.predict(scaler.transform(arrays["test_features"]))
    return {"seconds": seconds, "c": c, "cv": float(means.max()), "predictions": test}


def run_liblinear(arrays: Arrays, num_classes: int, seed: int) -> dict[str, Any]:
    """Fit as the source's code does."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.model_selection import StratifiedKFold
    from sklearn.multiclass import OneVsRestClassifier

    from harness_ext.evaluators.probe import DEFAULT_C_GRID

    features, labels = arrays["features"], arrays["labels"]
    started = time.perf_counter()
    model: Any = LogisticRegressionCV(
        Cs=list(DEFAULT_C_GRID),
        cv=StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=seed),
        solver="liblinear",
        max_iter=200,
        scoring="accuracy",
    )
    if num_classes > 2:
        model = OneVsRestClassifier(model)
    model.fit(features, labels)
    seconds = time.perf_counter() - started
    c, cv = float("nan"), float("nan")
    if num_classes == 2:
        # A dict by class in older releases, an array in newer ones.
        scores = next(iter(model.scores_.values())) if isinstance(model.scores_, dict) else model.scores_
        c, cv = float(np.ravel(model.C_)[0]), float(np.asarray(scores).mean(axis=0).max())
    test = None if "test_features" not in arrays else model.predict(arrays["test_features"])
    return {"seconds": seconds, "c": c, "cv": cv, "predictions": test}


METHODS: dict[str, Callable[[Arrays, int, int], dict[str, Any]]] = {
    "ours": run_ours,
    "lbfgs": run_lbfgs,
    "liblinear": run_liblinear,
}


def load(path: Path) -> Arrays:
    """Read the arrays of a `.npz`, without the `train_` prefix of their names."""
    with np.load(path) as file:
        return {name.removeprefix("train_"): file[name] for name in file.files}


def synthesise(num_rows: int, dim: int, num_classes: int, seed: int) -> Arrays:
    """Draw n training and n/4 test rows with a power-law spectrum in a random orthogonal basis, and their labels."""
    generator = np.random.default_rng(seed)
    spread = np.sqrt(1.0 / np.arange(1, dim + 1))
    readout = 3 * generator.standard_normal((dim, num_classes)) * (spread / np.linalg.norm(spread))[:, np.newaxis]
    rotation = np.linalg.qr(generator.standard_normal((dim, dim)))[0].astype(np.float32)
    arrays: Arrays = {}
    for prefix, count in (("", num_rows), ("test_", num_rows // 4)):
        latent = generator.standard_normal((count, dim), dtype=np.float32)
        # argmax of logits plus Gumbel noise is a draw from their softmax.
        noisy = latent @ readout.astype(np.float32) + generator.gumbel(size=(count, num_classes))
        arrays[prefix + "labels"] = noisy.argmax(axis=1)
        arrays[prefix + "features"] = (latent * spread.astype(np.float32)) @ rotation + 1
    return arrays


def work(method: str, path: Path, seed: int) -> None:
    """Run one method and print its result as a line of JSON."""
    warnings.simplefilter("ignore")
    arrays = load(path)
    num_classes = int(arrays["labels"].max()) + 1
    # A small fit imports what is imported at first use, and starts the thread pools.
    generator = np.random.default_rng(seed)
    small = {"features": generator.standard_normal((200, 8)), "labels": np.arange(200) % 2}
    METHODS[method](small, 2, seed)
    # Sets the peak to what is in use now. `ru_maxrss` would not do: it survives exec, with the parent's memory in it.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, cpu = _status("VmRSS"), time.process_time()
    result = METHODS[method](arrays, num_classes, seed)
    result["cpu_seconds"] = time.process_time() - cpu
    predictions = result.pop("predictions")
    result["test"] = None if predictions is None else float((predictions == arrays["test_labels"]).mean())
    result["extra_gb"] = _status("VmHWM") - before
    result["data_gb"] = before
    print(json.dumps(result))


def _status(name: str) -> float:
    """Return a size of this process from /proc, in GB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith(name + ":")]
    return int(line.split()[1]) * 1024 / 1e9


def compare(path: Path, methods: list[str], runs: int, seed: int, threads: int | None) -> None:
    """Alternate the methods and print one row each."""
    limits = {} if threads is None else {f"{name}_NUM_THREADS": str(threads) for name in ("OPENBLAS", "MKL", "OMP")}
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for run in range(runs):
        for method in methods:
            command = [sys.executable, __file__, "--worker", method, "--features", str(path), "--seed", str(seed)]
            environment = {**os.environ, **limits}
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            results[method].append(json.loads(output.splitlines()[-1]))
            print(f"run {run + 1} {method}: {results[method][-1]['seconds']:.2f} s", file=sys.stderr)
    ours = statistics.median(result["seconds"] for result in results["ours"]) if "ours" in results else float("nan")
    header = ("method", "median s", "min", "max", "CPU s", "x ours", "C", "CV acc", "test", "extra GB")
    print("{:10} {:>9} {:>7} {:>7} {:>7} {:>7} {:>8} {:>7} {:>7} {:>9}".format(*header))
    for method, rows in results.items():
        seconds = [row["seconds"] for row in rows]
        median, last = statistics.median(seconds), rows[-1]
        test = "-" if last["test"] is None else f"{last['test']:.4f}"
        print(
            f"{method:10} {median:9.2f} {min(seconds):7.2f} {max(seconds):7.2f} "
            f"{statistics.median(row['cpu_seconds'] for row in rows):7.2f} {median / ours:7.1f} {last['c']:8.0e} "
            f"{last['cv']:7.4f} {test:>7} {max(row['extra_gb'] for row in rows):9.2f}"
        )
    print(f"The interpreter, its imports and the input take {rows[-1]['data_gb']:.2f} GB. CPUs: {os.cpu_count()}.")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--features", type=Path, help=".npz with features and labels")
    source.add_argument("--shape", type=int, nargs=3, default=(6920, 576, 2), metavar=("N", "D", "K"))
    source.add_argument("--memory", action="store_true", help="one run of `ours` on 120,000 x 768, four classes")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="threads of every method")
    parser.add_argument("--only", choices=METHODS, action="append", help="run only these methods")
    parser.add_argument("--with-liblinear", action="store_true")
    parser.add_argument("--worker", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        options.shape, options.runs, options.only = MEMORY_SHAPE, 1, ["ours"]
    methods = options.only or (["ours", "lbfgs"] + (["liblinear"] if options.with_liblinear else []))
    if options.worker:
        work(options.worker, options.features, options.seed)
    elif options.features:
        compare(options.features, methods, options.runs, options.seed, options.threads)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "features.npz"
            num_rows, dim, num_classes = options.shape
            np.savez(path, allow_pickle=False, **synthesise(num_rows, dim, num_classes, options.seed))
            compare(path, methods, options.runs, options.seed, options.threads)


if __name__ == "__main__":
    main()
