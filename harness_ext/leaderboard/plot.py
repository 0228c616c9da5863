"""The plot of the README: mean score against pretraining loss, coloured by flatness. The same bytes for the same board."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from typing import TYPE_CHECKING

import numpy as np

from harness_ext.leaderboard.contracts import Aggregate, Board, Metric, plain
from harness_ext.leaderboard.parts import BoardPart, board_parts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm

__all__ = ["PLOT", "draw", "same_plot"]

PLOT = "loss_and_scores.svg"

_FEWEST_MODELS = 4
_MOST_KINDS = 4
_Z = 1.96


def draw(board: Board) -> bytes | None:
    """Draw the largest part of a board that has losses: a panel for each kind of task.

    A point is a model that has all tasks of the kind, with 95 % intervals of both; bands are loss groups.

    Returns:
        SVG with text as text; None if no kind has four models with a loss.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    for part in board_parts(board):
        panels = _panels(board, part)
        if panels:
            return _svg(board, part, panels)
    return None


def _panels(board: Board, part: BoardPart) -> dict[str, list[Aggregate]]:
    losses = _losses(board, part)
    found: dict[str, list[Aggregate]] = {}
    for aggregate in board.aggregates:
        if aggregate.model in losses and aggregate.normalised is not None:
            found.setdefault(aggregate.kind, []).append(aggregate)
    drawn = {kind: of_kind for kind, of_kind in found.items() if len(of_kind) >= _FEWEST_MODELS}
    return dict(list(drawn.items())[:_MOST_KINDS])


def _losses(board: Board, part: BoardPart) -> dict[str, Metric]:
    ids = {model.id for model in part.models}
    return {
        loss.model: loss.axis[1]
        for loss in board.losses
        if loss.text == part.text and loss.limit is None and loss.model in ids and loss.axis[1].value is not None
    }


def _svg(board: Board, part: BoardPart, panels: dict[str, list[Aggregate]]) -> bytes:
    try:
        import matplotlib as mpl
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ImportError("the plot needs matplotlib: pip install 'harness-ext[plots]'") from err

    losses = _losses(board, part)
    flatness = {
        of.model: of.measures[part.flatness[1]].value
        for of in board.flatness
        if part.flatness is not None
        and of.limit is None
        and of.column == part.flatness[0]
        and part.flatness[1] in of.measures
    }
    known = [value for model, value in flatness.items() if model in losses and value is not None and value > 0]
    norm = LogNorm(min(known), max(known)) if len(set(known)) > 1 else None
    shown = [part.text, part.flatness, part.groups, losses, flatness, panels]
    made = hashlib.sha256(json.dumps(plain(shown), sort_keys=True).encode()).hexdigest()[:16]
    # Ids are hashed with a salt, which is random unless it is given.
    with mpl.rc_context({"svg.hashsalt": "harness_ext", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(3.4 * len(panels) + 1, 3.1), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, sharex=True)[0]
        for axis, (kind, aggregates) in zip(axes, panels.items(), strict=True):
            _shade(axis, board, part)
            _points(axis, aggregates, losses, flatness, norm)
            axis.set_title(
                f"{kind}, mean of {aggregates[0].total} task{'s' if aggregates[0].total > 1 else ''}",
                fontsize=8,
                loc="left",
            )
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("score (0 chance, 100 perfect)")
        figure.supxlabel(_axis_label(board, part), fontsize=8)
        if norm is not None and part.flatness is not None:
            bar = figure.colorbar(mpl.cm.ScalarMappable(norm, "viridis"), ax=list(axes), pad=0.01)
            bar.set_ticks(_ticks(min(known), max(known)))
            bar.ax.yaxis.set_major_formatter("{x:g}")
            bar.ax.minorticks_off()
            bar.set_label(f"{part.flatness[1].replace('_', ' ')} (less is flatter;\ncompares among models of one size)")
        stream = io.BytesIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Description": f"data {made}"})
    return stream.getvalue()


def same_plot(first: bytes, second: bytes) -> bool:
    """Whether two plots are the same bytes or, drawn by different versions of matplotlib, show the same data."""
    if first == second:
        return True
    creators, data = zip(*(_described(of) for of in (first, second)), strict=True)
    return None not in creators + data and creators[0] != creators[1] and data[0] == data[1]


def _described(plot: bytes) -> tuple[bytes | None, bytes | None]:
    found = [re.search(pattern, plot) for pattern in (rb"<dc:title>(Matplotlib [^<]*)<", rb"<dc:description>([^<]*)<")]
    creator, data = (match and match[1] for match in found)
    return creator, data


def _ticks(low: float, high: float) -> list[float]:
    """Numbers 1, 2 and 5 times powers of ten between two positive numbers; these two if there are none."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [digit * 10.0**power for power in powers for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]
    return found or [low, high]


def _shade(axis: Axes, board: Board, part: BoardPart) -> None:
    for group in board.groups:
        if group.text == part.text:
            axis.axvspan(group.low, group.high, color="0.5", alpha=0.15, linewidth=0)


def _points(
    axis: Axes,
    aggregates: list[Aggregate],
    losses: dict[str, Metric],
    flatness: dict[str, float | None],
    norm: LogNorm | None,
) -> None:
    ids = [aggregate.model for aggregate in aggregates]
    x = np.array([losses[model].value for model in ids], dtype=np.float64)
    y = 100 * np.array([aggregate.normalised for aggregate in aggregates], dtype=np.float64)
    x_error = _Z * np.array([losses[model].stderr or 0.0 for model in ids])
    y_error = 100 * _Z * np.array([aggregate.stderr or 0.0 for aggregate in aggregates])
    axis.errorbar(x, y, yerr=y_error, xerr=x_error, fmt="none", ecolor="0.6", elinewidth=0.7, zorder=2)
    traces = [flatness.get(model) for model in ids]
    has = np.array([trace is not None and trace > 0 for trace in traces])
    axis.scatter(x[~has], y[~has], s=26, facecolor="white", edgecolor="0.3", linewidth=0.8, zorder=3)
    if has.any():
        colours = np.array([trace for trace, is_known in zip(traces, has, strict=True) if is_known], dtype=np.float64)
        axis.scatter(
            x[has], y[has], c=colours, cmap="viridis", norm=norm, s=26, edgecolor="0.3", linewidth=0.4, zorder=3
        )


def _axis_label(board: Board, part: BoardPart) -> str:
    loss = next(loss for loss in board.losses if loss.text == part.text)
    unit = "bits per byte" if loss.axis[0] == "bits_per_byte" else "nats per token"
    # A dollar sign would start a formula.
    return f"{loss.text_label} ({unit})".replace("$", r"\$")
