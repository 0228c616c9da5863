"""What `harness-ext lab` says of evaluated models: a line for each, and the correlation of flatness with accuracy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_ext.cli.evaluation import find_results

if TYPE_CHECKING:
    from harness_ext.lab.result_files import Measured, ResultFile

__all__ = ["GROUPS_FILE", "RESULTS", "WIDENED_RESULTS", "print_results", "write_json", "write_report"]

GROUPS_FILE = "groups.json"
RESULTS = "results"
WIDENED_RESULTS = "results_widened"
"""Of models widened to one size, apart from those of the models themselves."""

_SEED_OF_STATISTICS = 0
_UNMATCHED = "-"


def print_results(out: Path) -> None:
    """Print a line for each evaluated model: its loss, mean accuracies by kind of task, and traces."""
    print("\n".join(_aligned(_result_rows(out))), flush=True)


def _result_rows(out: Path) -> list[list[str]]:
    from harness_ext.lab.checkpoints import find_checkpoints
    from harness_ext.lab.flatness_report import TRACES, widened
    from harness_ext.lab.result_files import read_result_file

    groups = json.loads((out / GROUPS_FILE).read_text(encoding="utf-8"))["groups"]
    models = [(group["name"], model["name"], model["loss"]["value"]) for group in groups for model in group["models"]]
    matched = {name for _, name, _ in models}
    others = [one for one in find_checkpoints(out / "runs") if one.name not in matched]
    models += [(_UNMATCHED, one.name, one.excess.value) for one in others]
    found = []
    for group, name, loss in models:
        path, wide = (find_results(out / folder, name) for folder in (RESULTS, WIDENED_RESULTS))
        if path is not None:
            found.append((group, name, loss, read_result_file(path), read_result_file(wide) if wide else None))
    kinds = list(dict.fromkeys(kind for *_, file, _ in found for kind in _accuracies(file)))
    has_widened = any(wide is not None for *_, wide in found)
    rows = [["group", "model", "excess", *kinds, *TRACES, *(map(widened, TRACES) if has_widened else ())]]
    for group, name, loss, file, wide_file in found:
        accuracies = _accuracies(file)
        traces = [_trace(file, trace) for trace in TRACES]
        if has_widened:
            traces += [None if wide_file is None else _trace(wide_file, trace) for trace in TRACES]
        rows.append(
            [
                group,
                name,
                f"{loss:.4f}",
                *(f"{_mean(accuracies[kind]):.1%}" if kind in accuracies else "-" for kind in kinds),
                *("-" if value is None else f"{value.value:.1f} ± {value.stderr:.1f}" for value in traces),
            ]
        )
    return rows


def _accuracies(file: ResultFile) -> dict[str, list[float]]:
    """By kind of task."""
    accuracies: dict[str, list[float]] = {}
    for task in file.results:
        measured = file.measured(task, "acc")
        if measured is not None:
            accuracies.setdefault(_kind(task), []).append(measured.value)
    return accuracies


def _kind(task: str) -> str:
    """`probe_cmean` of `probe_cmean_hmm_regime`; datasets of the lab begin with the language's kind."""
    for kind in ("hmm", "pcfg", "reviews"):
        head, found, _ = task.partition(f"_{kind}_")
        if found:
            return head
    return task


def _trace(file: ResultFile, trace: str) -> Measured | None:
    found = (file.measured(task, trace) for task in file.results)
    return next((one for one in found if one is not None), None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def write_report(out: Path, folder: Path) -> None:
    """Correlate flatness with downstream accuracy in the groups of a lab's folder; print what is pooled, write all.

    `models.txt` is what `print_results` prints; `lab.flatness_report` makes the tables and figures.
    """
    import numpy as np

    from harness_ext.lab import flatness_report
    from harness_ext.lab.result_files import read_result_files

    groups = json.loads((out / GROUPS_FILE).read_text(encoding="utf-8"))
    files, wide = (sorted((out / name).rglob("results_*.json")) for name in (RESULTS, WIDENED_RESULTS))
    rows = flatness_report.read_rows(
        groups, read_result_files(files), widened_files=read_result_files(wide) if wide else ()
    )
    tested = flatness_report.correlate(rows, rng=np.random.default_rng(_SEED_OF_STATISTICS))
    print("\n".join(flatness_report.summary_lines(tested)), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.txt").write_text("\n".join(_aligned(_result_rows(out))) + "\n", encoding="utf-8")
    try:
        flatness_report.write(rows, tested, folder)
    except ImportError:
        print("The figures need matplotlib: pip install 'harness-ext[plots]'")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that is there as a whole or not at all."""
    from harness_ext.lab.checkpoints import write_whole

    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
