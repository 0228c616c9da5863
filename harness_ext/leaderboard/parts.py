"""The parts of a board: models that tasks join, in the order in which tables show them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness_ext.leaderboard import compare
from harness_ext.leaderboard.contracts import Board, Column, Metric, Model

__all__ = ["BoardPart", "board_parts"]

_BLANK = Metric(None, None)


@dataclass(frozen=True)
class BoardPart:
    """Models that columns join, with full runs.

    Attributes:
        models: By loss group, then by mean score; what has neither comes last.
        columns: Ids of those that join them.
        text: The loss that groups them; None without losses.
        flatness: Column and measure of flatness; None without.
        groups: Number of the loss group, from 1 for the lowest loss, by model.
        means: Mean of all normalised scores, with its standard error, of models that have all of the part's tasks.
    """

    models: tuple[Model, ...]
    columns: frozenset[str]
    text: str | None
    flatness: tuple[str, str] | None
    groups: Mapping[str, int]
    means: Mapping[str, Metric]


def board_parts(board: Board) -> list[BoardPart]:
    """The parts of a board, that of most models first."""
    part_of = compare.parts_of(board.scores)
    by_part: dict[int, list[Model]] = {}
    for model in board.models:
        if model.id in part_of:
            by_part.setdefault(part_of[model.id], []).append(model)
    columns = {column.id: column for column in board.columns}
    main = compare.main_values(board.columns, board.scores)
    result = []
    for number, models in by_part.items():
        ids = {model.id for model in models}
        text = compare.main_text(loss for loss in board.losses if loss.model in ids)
        groups: dict[str, int] = {}
        for place, group in enumerate((group for group in board.groups if group.text == text), 1):
            groups |= dict.fromkeys(group.models, place)
        counts: dict[tuple[str, str], int] = {}
        for of_model in board.flatness:
            measure = columns[of_model.column].metric
            if (
                of_model.model in ids
                and of_model.limit is None
                and of_model.measures.get(measure, _BLANK).value is not None
            ):
                counts[of_model.column, measure] = counts.get((of_model.column, measure), 0) + 1
        averaged = {
            column.id: column
            for column in board.columns
            if part_of.get(column.id) == number and compare.is_averaged(column) and column.id in main
        }
        means = _means(averaged, main, models)
        # The order of the board settles ties.
        models.sort(
            key=lambda model: (
                groups.get(model.id, len(groups) + 1),
                -_known(means.get(model.id, _BLANK).value),
            )
        )
        result.append(
            BoardPart(
                models=tuple(models),
                columns=frozenset(column for column in columns if part_of.get(column) == number),
                text=text,
                flatness=min(counts, key=lambda key: (-counts[key], key), default=None),
                groups=groups,
                means=means,
            )
        )
    return sorted(result, key=lambda part: -len(part.models))


def _known(value: float | None) -> float:
    return -math.inf if value is None else value


def _means(
    columns: Mapping[str, Column], main: Mapping[str, Mapping[str, Metric]], models: Iterable[Model]
) -> dict[str, Metric]:
    """Means over the tasks of all kinds, of models that have them all; none where a task cannot be normalised."""
    means = {}
    for model in models:
        found = [main[column][model.id] for column in columns if model.id in main[column]]
        if found and len(found) == len(columns):
            value, stderr = compare.mean_normalised(list(columns.values()), found)
            if value is not None:
                means[model.id] = Metric(value, stderr)
    return means
