"""Does flatness predict downstream accuracy where the loss does not: traces against accuracies within loss-matched groups.

Source of the question: Liu, Xie, Li and Ma (2023), who find that of models of equal pretraining loss the flatter one, with
the smaller trace of the Hessian, transfers better: a negative rank correlation. What comes out here is reported whatever its
sign.

A trace is compared among models of one size only, that of most of them, as a trace depends on the number of weights that share
the work. Models of unlike sizes are compared by the traces of the same models widened to one architecture, as the paper does;
these have names of their own, `widened("hessian_trace")`.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness_ext.correlation import Correlation, Heterogeneity, heterogeneity, spearman
from harness_ext.lab.figures import COLOURS, save_figure
from harness_ext.lab.result_files import Measured, ResultFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "ALL_GROUPS",
    "TRACES",
    "Row",
    "Tested",
    "correlate",
    "draw",
    "read_rows",
    "summary_lines",
    "table_lines",
    "widened",
    "write",
    "write_csv",
]

ALL_GROUPS = "all"
"""Name of what is pooled over groups."""

TRACES = ("fisher_trace", "hessian_trace")

_SAME_LOSS = 1e-3
"""Nats per token by which the loss of a widened model may differ from its own: rounding, over the same blocks."""

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


@dataclass(frozen=True)
class Row:
    """A model on a downstream task.

    Attributes:
        model: Name in `groups.json`.
        run: Its training run.
        group: Name of its group.
        algorithm: What it was trained with; an empty string if that is not known.
        task: Downstream task.
        loss: What was matched.
        accuracy: In [0, 1]; its error may be NaN.
        traces: Those measured, in nats per token: of the names in `TRACES`, and `widened` ones.
        sizes: Of each trace, the number of parameters of the model it was measured on; None if that is not known.
    """

    model: str
    run: str
    group: str
    algorithm: str
    task: str
    loss: Measured
    accuracy: Measured
    traces: Mapping[str, Measured]
    sizes: Mapping[str, int | None]


@dataclass(frozen=True)
class Tested:
    """Spearman's ρ of a trace and the accuracies of a task, in one group or pooled over all.

    Attributes:
        task: Downstream task.
        trace: Its name.
        group: Its name, or `ALL_GROUPS`: ranks within each group.
        num_models: Models that have both, of the same size.
        num_left_out: Models of other sizes, which have both too.
        spread: Whether accuracies differ by more than their errors.
        correlation: None if it was refused.
        reason: Why there is no ρ; None if there is.
    """

    task: str
    trace: str
    group: str
    num_models: int
    num_left_out: int
    spread: Heterogeneity
    correlation: Correlation | None
    reason: str | None


def widened(trace: str) -> str:
    """Name of a trace of a model that was widened to the largest architecture."""
    return f"{trace}_widened"


def read_rows(
    groups: Mapping[str, Any],
    files: Sequence[ResultFile],
    *,
    widened_files: Sequence[ResultFile] = (),
    metric: str = "acc",
) -> list[Row]:
    """Join the models of `groups.json` with what was measured of them.

    A result file belongs to the model whose name it has, or whose folder ends in the same run and step: folders may have moved.

    Args:
        groups: Content of `groups.json`, as `match.Matching.to_dict` makes it.
        files: Result files; those of other models are passed over.
        widened_files: Of the same models widened to one architecture.
        metric: Of the downstream tasks: every task that has it is one.

    Returns:
        Rows in the order of groups, models and tasks. A trace or task that a model lacks is left out.

    Raises:
        ValueError: If two files give a model different values, no model has a value of a downstream task, or the loss of a
            widened model is not that of the model.
    """
    own, wide = _by_key(files), _by_key(widened_files)
    rows = []
    for group in groups["groups"]:
        for model in group["models"]:
            name, of_model, of_wide = model["name"], _files_of(model, own), _files_of(model, wide)
            found, of_widened = _collect(name, of_model, metric), _collect(name, of_wide, metric)
            _check_same_loss(name, of_model, of_wide)
            traces = {trace: found["", trace] for trace in TRACES if ("", trace) in found}
            sizes = dict.fromkeys(traces, _size(of_model))
            of_size = {widened(trace): of_widened["", trace] for trace in TRACES if ("", trace) in of_widened}
            traces |= of_size
            sizes |= dict.fromkeys(of_size, _size(of_wide))
            for task in sorted(task for task, measure in found if measure == metric):
                rows.append(
                    Row(
                        model=name,
                        run=str(model.get("run") or name),
                        group=group["name"],
                        algorithm=str(model["details"].get("algorithm") or ""),
                        task=task,
                        loss=Measured(**model["loss"]),
                        accuracy=found[task, metric],
                        traces=traces,
                        sizes=sizes,
                    )
                )
    if not rows:
        raise ValueError(
            f"expected result files with {metric} of the models in the groups, found none in {len(files)} files. "
            "Evaluate the models: lm_eval --tasks … --output_path FOLDER."
        )
    return rows


def _by_key(files: Sequence[ResultFile]) -> dict[str, list[ResultFile]]:
    found: dict[str, list[ResultFile]] = {}
    for file in files:
        for key in {file.model, f"{Path(file.run).name}-{file.step}"}:
            found.setdefault(key, []).append(file)
    return found


def _files_of(model: Mapping[str, Any], by_key: Mapping[str, list[ResultFile]]) -> list[ResultFile]:
    return list({id(file): file for key in _keys(model) for file in by_key.get(key, [])}.values())


def _size(files: Sequence[ResultFile]) -> int | None:
    """Of the model that these are of."""
    return next((file.num_parameters for file in files if file.num_parameters is not None), None)


def _check_same_loss(model: str, own: Sequence[ResultFile], wide: Sequence[ResultFile]) -> None:
    """The flatness task measures the loss on its blocks, which widening leaves alone."""
    for file in wide:
        for task in file.tasks_with("loss"):
            losses = [loss for one in own if (loss := one.measured(task, "loss")) is not None]
            after = file.measured(task, "loss")
            for before in losses:
                if after is not None and not abs(after.value - before.value) < _SAME_LOSS:
                    raise ValueError(
                        f"{file.path}: the widened {model} has the loss {after.value:.5f} on {task}, expected "
                        f"{before.value:.5f}, its own. Delete the file and run `harness-ext lab run` again."
                    )


def _keys(model: Mapping[str, Any]) -> list[str]:
    keys = [model["name"]]
    if model["step"] is not None:
        keys.append(f"{Path(model['run']).name}-{model['step']}")
    return keys


def _collect(model: str, files: Sequence[ResultFile], metric: str) -> dict[tuple[str, str], Measured]:
    """Values by task and metric; traces have no task, for a model has one set of them."""
    found: dict[tuple[str, str], Measured] = {}
    sources: dict[tuple[str, str], Path] = {}
    for file in files:
        for task in file.results:
            for name in (metric, *TRACES):
                measured = file.measured(task, name)
                if measured is None:
                    continue
                key = (task if name == metric else "", name)
                before = found.setdefault(key, measured)
                source = sources.setdefault(key, file.path)
                if not math.isclose(before.value, measured.value, rel_tol=1e-6):
                    raise ValueError(
                        f"{file.path} and {source} have different {name} of {model}: {measured.value:.6g} and "
                        f"{before.value:.6g} ({task}). Leave one out."
                    )
    return found


def correlate(
    rows: Sequence[Row],
    *,
    rng: np.random.Generator,
    traces: Sequence[str] = (*TRACES, *map(widened, TRACES)),
    alpha: float = 0.05,
    num_resamples: int = 10_000,
    num_permutations: int = 10_000,
) -> list[Tested]:
    """Spearman's ρ of each trace and each task, in each group and pooled over groups.

    Checkpoints of one run are permuted and resampled together.

    Refused where accuracies do not differ by more than their errors at level `alpha`: their order is then mostly chance.

    Args:
        rows: As `read_rows` makes them.
        rng: Source of resamples and permutations.
        traces: Names of traces; one that no model has is passed over.
        alpha: Level of the test of the spread.
        num_resamples: See `correlation.spearman`.
        num_permutations: Likewise.

    Returns:
        Task by task, trace by trace, the pooled one first.
    """
    result = []
    for task in dict.fromkeys(row.task for row in rows):
        for trace in traces:
            measured = [row for row in rows if row.task == task and trace in row.traces]
            if not measured:
                continue
            size = _size_of_most(measured, trace)
            names = list(dict.fromkeys(row.group for row in measured))
            for group in (ALL_GROUPS, *names):
                of_group = [row for row in measured if group in (ALL_GROUPS, row.group)]
                used = [row for row in of_group if size is not None and row.sizes[trace] == size]
                labels = [row.group for row in used]
                spread = heterogeneity(
                    [row.accuracy.value for row in used], [row.accuracy.stderr for row in used], labels
                )
                correlation, reason = None, None
                if size is None:
                    reason = f"the sizes of {len(of_group)} models are not known, so their traces do not compare"
                elif spread.reason is not None:
                    reason = f"spread unknown: {spread.reason}"
                elif not spread.exceeds_error(alpha):
                    reason = f"accuracies differ by no more than their errors (p = {spread.p_value:.2g})"
                else:
                    correlation = spearman(
                        [row.traces[trace].value for row in used],
                        [row.accuracy.value for row in used],
                        groups=labels,
                        units=[row.run for row in used],
                        rng=rng,
                        num_resamples=num_resamples,
                        num_permutations=num_permutations,
                    )
                    reason = correlation.reason
                left_out = len(of_group) - len(used)
                result.append(Tested(task, trace, group, len(used), left_out, spread, correlation, reason))
    return result


def _size_of_most(rows: Sequence[Row], trace: str) -> int | None:
    """The commonest size; None if none is known."""
    known = [size for row in rows if (size := row.sizes[trace]) is not None]
    return statistics.mode(known) if known else None


# ---------------------------------------------------------------------------------------------------------- tables


def table_lines(tested: Sequence[Tested]) -> list[str]:
    """The correlations as a Markdown table."""
    lines = [
        "| task | trace | group | models | of other sizes | ρ | interval | p | note |",
        "| --- | --- | --- | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for one in tested:
        found = one.correlation
        cells = [one.task, one.trace, one.group, str(one.num_models), str(one.num_left_out or "")]
        if found is None or one.reason is not None:
            cells += ["", "", "", one.reason or ""]
        else:
            interval = "" if found.interval_reason else f"{found.low:.2f} to {found.high:.2f}"
            cells += [f"{found.value:.2f}", interval, f"{found.p_value:.2g}", found.interval_reason or ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def summary_lines(tested: Sequence[Tested], *, alpha: float = 0.05) -> list[str]:
    """What is pooled over groups: the correlations as a Markdown table, and how many there are by chance and not at all."""
    pooled = [one for one in tested if one.group == ALL_GROUPS]
    found = [one for one in pooled if one.correlation is not None and one.reason is None]
    lines = table_lines(found) if found else []
    if found:
        below = [one for one in found if one.correlation is not None and one.correlation.p_value < alpha]
        negative = sum(one.correlation.value < 0 for one in below if one.correlation is not None)
        lines.append(
            f"{len(below)} of {len(found)} have p < {alpha:g}, {negative} of them ρ < 0, as where flatness helps; by chance "
            f"alone about {alpha * len(found):.1f} would. Runs are permuted whole. The correlations share models, so that they "
            "are not independent."
        )
    refused = [one for one in pooled if one not in found]
    for task in dict.fromkeys(one.task for one in refused):
        of_task = [one for one in refused if one.task == task]
        lines.append(f"No ρ for {task} and {', '.join(one.trace for one in of_task)}: {of_task[0].reason}.")
    return lines


def write_csv(rows: Sequence[Row], tested: Sequence[Tested], folder: Path) -> tuple[Path, Path]:
    """Write `flatness_models.csv`, a line for each model and task, and `flatness_correlations.csv`.

    What is not known is blank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models, correlations = folder / "flatness_models.csv", folder / "flatness_correlations.csv"
    with models.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        traces = (*TRACES, *(map(widened, TRACES)))
        measures = [f"{name}{end}" for name in ("loss", "accuracy", *traces) for end in ("", "_stderr")]
        writer.writerow(["group", "model", "algorithm", "num_parameters", "task", *measures])
        for row in rows:
            values = [row.loss, row.accuracy, *(row.traces.get(name) for name in traces)]
            numbers = [_cell(number) for value in values for number in (value or (None, None))]
            size = next((row.sizes[trace] for trace in TRACES if trace in row.sizes), None)
            writer.writerow([row.group, row.model, row.algorithm, _cell(size), row.task, *numbers])
    with correlations.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        numbers_of = (
            "value",
            "low",
            "high",
            "p_value",
            "confidence",
            "num_permutations",
            "is_enumerated",
            "num_undefined",
        )
        writer.writerow(
            [
                *("task", "trace", "group", "num_models", "num_left_out"),
                *numbers_of,
                *("spread_q", "spread_df", "spread_p_value", "reason"),
            ]
        )
        for one in tested:
            found = [_cell(getattr(one.correlation, name)) if one.correlation else "" for name in numbers_of]
            spread = [_cell(one.spread.statistic), one.spread.degrees_of_freedom, _cell(one.spread.p_value)]
            note = one.reason or (one.correlation.interval_reason if one.correlation else None) or ""
            counts = [one.num_models, one.num_left_out]
            writer.writerow([one.task, one.trace, one.group, *counts, *found, *spread, note])
    return models, correlations


def _cell(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else str(value) if isinstance(value, int) else f"{value:.8g}"


def write(rows: Sequence[Row], tested: Sequence[Tested], folder: Path) -> list[Path]:
    """Write the two tables, and of each trace `flatness_<trace>.png` and `.svg`.

    Raises:
        ImportError: If matplotlib is not installed; the tables are there by then.
    """
    paths = list(write_csv(rows, tested, folder))

    for trace in dict.fromkeys(one.trace for one in tested):
        paths += save_figure(draw(rows, tested, trace), folder / f"flatness_{trace}")
    return paths


# ----------------------------------------------------------------------------------------------------------- figure


def draw(rows: Sequence[Row], tested: Sequence[Tested], trace: str) -> Figure:
    """Draw accuracy against a trace: a panel for each task, a colour for each group, a marker for each algorithm.

    Models of other sizes than most are hollow: their traces are not compared. There are seven colours and ten markers; with
    more groups or algorithms they come again.

    Args:
        rows: As `read_rows` makes them.
        tested: As `correlate` makes them; a panel says what is pooled over groups.
        trace: Its name.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If no model has the trace.
    """
    # No pyplot: it keeps global state and may want a display.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter

    drawn = [row for row in rows if trace in row.traces]
    if not drawn:
        raise ValueError(f"no model has {trace}; run a flatness task, such as lm_eval --tasks flatness_wikitext.")
    tasks = list(dict.fromkeys(row.task for row in drawn))
    groups = list(dict.fromkeys(row.group for row in drawn))
    algorithms = list(dict.fromkeys(row.algorithm for row in drawn))
    colour = {group: COLOURS[place % len(COLOURS)] for place, group in enumerate(groups)}
    marker = {name: _MARKERS[place % len(_MARKERS)] for place, name in enumerate(algorithms)}
    pooled = {one.task: one for one in tested if one.trace == trace and one.group == ALL_GROUPS}

    sizes = {task: _size_of_most([row for row in drawn if row.task == task], trace) for task in tasks}

    columns = min(len(tasks), max(3, math.ceil(math.sqrt(len(tasks)))))
    lines = math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(max(4.6, 3.5 * columns), 3.1 * lines + 0.9), layout=ConstrainedLayoutEngine(hspace=0.04))
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True).ravel()
    values = [row.traces[trace].value for row in drawn]
    is_log = min(values) > 0 and max(values) > 5 * min(values)
    for panel, task in zip(panels, tasks, strict=False):
        for row in drawn:
            if row.task != task:
                continue
            x, y = row.traces[trace], row.accuracy
            is_compared = row.sizes[trace] == sizes[task]
            panel.errorbar(
                x.value,
                y.value,
                xerr=x.stderr if math.isfinite(x.stderr) else None,
                yerr=y.stderr if math.isfinite(y.stderr) else None,
                fmt=marker[row.algorithm],
                color=colour[row.group],
                markersize=5.5 if is_compared else 4.5,
                markerfacecolor=colour[row.group] if is_compared else "white",
                markeredgecolor="white" if is_compared else colour[row.group],
                markeredgewidth=0.6 if is_compared else 0.9,
                elinewidth=0.9,
                alpha=0.95,
            )
        panel.set_title(f"{task}\n{_label(pooled.get(task))}", fontsize=8.5, loc="left")
        # Not in steps of 2.5 %, whose labels would be rounded.
        panel.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
        low, high = panel.get_ylim()
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if high - low > 0.05 else 1))
        if is_log:
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
            panel.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        panel.grid(color="0.9", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(which="both", labelsize=8)
        panel.tick_params(which="major", pad=3.4, length=3.5)
        panel.tick_params(which="minor", pad=4.9, length=2)
    for panel in panels[len(tasks) :]:
        panel.set_axis_off()
    for place, panel in enumerate(panels[: len(tasks)]):
        if place + columns >= len(tasks):
            panel.tick_params(labelbottom=True, which="both")
            panel.set_xlabel(_axis_label(trace), fontsize=8)
        if place % columns == 0:
            panel.set_ylabel("accuracy", fontsize=8)
    known = [one.correlation for one in pooled.values() if one.correlation is not None]
    if known:
        # At the left, above the panels' own titles.
        text = f"Spearman's ρ within loss-matched groups [{known[0].confidence:.0%} interval], permutation p"
        figure.suptitle(text, fontsize=8, x=0.01, ha="left", color="0.35")

    of_groups, of_algorithms = [], []
    for group in groups:
        losses = [row.loss.value for row in drawn if row.group == group]
        label = f"{group}: loss {min(losses):.4f} to {max(losses):.4f}"
        of_groups.append(Line2D([], [], linestyle="", marker="o", color=colour[group], label=label))
    for name in algorithms:
        if name:
            of_algorithms.append(Line2D([], [], linestyle="", marker=marker[name], color="0.35", label=name))
    if any(row.sizes[trace] != sizes[row.task] for row in drawn):
        label = "of another size: not in ρ"
        of_algorithms.append(
            Line2D([], [], linestyle="", marker="o", color="0.35", markerfacecolor="white", label=label)
        )
    style: dict[str, Any] = {"fontsize": 8, "frameon": False, "handletextpad": 0.2, "columnspacing": 1.2}
    figure.legend(handles=of_groups, loc="outside lower left", ncols=columns, **style)
    if of_algorithms:
        figure.legend(
            handles=of_algorithms, loc="outside lower right", ncols=2 if columns == 1 else max(4, columns), **style
        )
    return figure


def _axis_label(trace: str) -> str:
    own = next((name for name in TRACES if trace == widened(name)), None)
    if own is not None:
        return f"{own.replace('_', ' ')}, widened to the largest (nats per token)"
    return f"{trace.replace('_', ' ')} (nats per token)"


def _label(one: Tested | None) -> str:
    """What a panel says of its correlation."""
    if one is None:
        return ""
    if one.correlation is None or one.reason is not None:
        return "no ρ: " + ("no spread beyond error" if one.spread.reason is None else "spread unknown")
    found = one.correlation
    interval = "" if found.interval_reason else f" [{found.low:.2f}, {found.high:.2f}]"
    p = "p < 0.0001" if found.p_value < 1e-4 else f"p = {found.p_value:.1g}"
    return f"ρ = {found.value:.2f}{interval}, {p}".replace("-", "−")
