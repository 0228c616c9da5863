"""Traces by part of the model: what a flatness task writes by parameter, summed over layers and over kinds of modules.

Pure: reads the JSON of an lm_eval run, and draws with matplotlib if that is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness_ext.parameter_names import NO_LAYER, place_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLUMNS", "Breakdown", "Part", "draw", "read_breakdowns", "table_lines"]

COLUMNS = ("fisher_trace", "fisher_trace_scaled")
"""What results have by parameter."""


class Part(NamedTuple):
    """Parameters of one kind in one layer.

    Attributes:
        layer: Number of the layer, or `NO_LAYER`.
        kind: Name of the module without the layer's, such as `mlp.down_proj`.
        size: Number of parameters.
        traces: Their part of each of `COLUMNS` that was measured.
    """

    layer: int
    kind: str
    size: int
    traces: Mapping[str, float]


class Breakdown(NamedTuple):
    """The parts of one task's measurement on one model."""

    model: str
    task: str
    parts: tuple[Part, ...]

    def total(self, column: str) -> float:
        return sum(part.traces[column] for part in self.parts)

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of `COLUMNS` that were measured."""
        return tuple(column for column in COLUMNS if all(column in part.traces for part in self.parts))

    def by(self, field: str) -> dict[Any, Part]:
        """Sum over all parts that agree in `layer`, or in `kind`, in the order in which they occur."""
        groups: dict[Any, list[Part]] = {}
        for part in self.parts:
            groups.setdefault(getattr(part, field), []).append(part)
        return {
            key: Part(
                layer=members[0].layer if field == "layer" else NO_LAYER,
                kind=members[0].kind if field == "kind" else "",
                size=sum(part.size for part in members),
                traces={column: sum(part.traces[column] for part in members) for column in self.columns},
            )
            for key, members in groups.items()
        }


def read_breakdowns(path: Path) -> list[Breakdown]:
    """Read the measurements of a results JSON, one for each flatness task in it.

    Raises:
        ValueError: If the file is no results JSON of lm_eval, or has no traces by parameter.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        configs = results["configs"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as err:
        raise ValueError(
            f"{path}: expected a results JSON, as lm_eval --output_path writes it, found something else ({err!r})."
        ) from err
    found = []
    for task, config in configs.items():
        report = ((config or {}).get("metadata") or {}).get("report") or {}
        rows = (report.get("window_flatness") or {}).get("by_parameter") or {}
        if rows:
            parts = _parts(rows)
            found.append(Breakdown(str(results.get("model_name") or "model"), str(task), parts))
    if not found:
        raise ValueError(
            f"{path}: has no traces by parameter; its tasks are {', '.join(map(str, configs)) or 'none'}. Run a flatness task "
            "with fisher_trace among its quantities, such as lm_eval --tasks flatness_wikitext … --output_path FOLDER."
        )
    return found


def _parts(rows: Mapping[str, Mapping[str, float]]) -> tuple[Part, ...]:
    sums: dict[tuple[int, str], dict[str, float]] = {}
    for name, row in rows.items():
        total = sums.setdefault(place_of(name), {})
        for key, value in row.items():
            total[key] = total.get(key, 0.0) + value
    return tuple(
        Part(layer, kind, int(total["size"]), {column: total[column] for column in COLUMNS if column in total})
        for (layer, kind), total in sums.items()
    )


def table_lines(breakdown: Breakdown) -> list[str]:
    """The breakdown as a Markdown table: kinds of modules, largest trace first, then layers."""
    columns = breakdown.columns
    header = ["part", "parameters", *(f"{column} | %" for column in columns)]
    lines = [
        "| " + " | ".join(header) + " |",
        "| --- | ---: |" + " ---: | ---: |" * len(columns),
    ]
    kinds = sorted(breakdown.by("kind").items(), key=lambda item: -item[1].traces[columns[0]])
    layers = [
        (f"layer {layer}" if layer != NO_LAYER else "outside layers", part)
        for layer, part in sorted(breakdown.by("layer").items())
    ]
    for name, part in [*kinds, *layers]:
        cells = [str(name), f"{part.size:,}"]
        for column in columns:
            total = breakdown.total(column)
            cells.append(f"{part.traces[column]:.4g} | {100 * part.traces[column] / total:.1f}" if total else "0 | ")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(breakdowns: Sequence[Breakdown], column: str) -> Figure:
    """Draw bars: the share of each kind of module in the trace, and of each layer.

    Args:
        breakdowns: One row of panels each.
        column: One of `COLUMNS`.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If a breakdown has no such column.
    """
    # No pyplot: it keeps global state and may want a display.
    from matplotlib.figure import Figure

    for breakdown in breakdowns:
        if column not in breakdown.columns:
            raise ValueError(
                f"{breakdown.task} has no {column}; it has {', '.join(breakdown.columns)}. Add `scaled` to the flatness "
                "option `quantities`."
            )
    kinds_of = [sorted(b.by("kind").items(), key=lambda item: item[1].traces[column]) for b in breakdowns]
    heights = [max(2.4, 0.28 * len(kinds) + 0.9) for kinds in kinds_of]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    axes = figure.subplots(len(breakdowns), 2, squeeze=False, height_ratios=heights)
    for row, (breakdown, kinds) in enumerate(zip(breakdowns, kinds_of, strict=True)):
        of_kind, of_layer = axes[row]
        label = column.replace("_", " ") + " (nats per token)"
        of_kind.barh([kind for kind, _ in kinds], [part.traces[column] for _, part in kinds], color="#0072B2")
        of_kind.set_xlabel(label)
        total = breakdown.total(column)
        of_kind.set_title(f"{breakdown.model}\n{breakdown.task}: {total:.4g}", fontsize=9, loc="left")
        layers = sorted(breakdown.by("layer").items())
        names = [str(layer) if layer != NO_LAYER else "other" for layer, _ in layers]
        of_layer.bar(names, [part.traces[column] for _, part in layers], color="#E69F00")
        of_layer.set_xlabel("layer")
        of_layer.set_ylabel(label)
        if len(names) > 16:
            of_layer.tick_params(axis="x", labelrotation=90)
        for axis in (of_kind, of_layer):
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8)
    return figure
