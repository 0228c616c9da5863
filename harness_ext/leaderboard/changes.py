"""What a pull request changes on the leaderboard, as Markdown for a comment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness_ext.leaderboard.contracts import Board, Column, Model, Score
from harness_ext.leaderboard.markdown import cell_text, with_error

__all__ = ["changes"]

_MOST_LINES = 200


def changes(old: Board, new: Board) -> str:
    """Compare two boards: scores that are new, gone, or of another value, and files that cannot be used.

    Returns:
        Markdown that is safe to post: text of result files is escaped.
    """
    before, after = _cells(old), _cells(new)
    models = {model.id: model for model in (*old.models, *new.models)}
    columns = {column.id: column for column in (*old.columns, *new.columns)}
    added = sorted(_line(models, columns, None, score) for key, score in after.items() if key not in before)
    gone = sorted(_line(models, columns, score, None) for key, score in before.items() if key not in after)
    changed = sorted(
        _line(models, columns, before[key], score)
        for key, score in after.items()
        if key in before and _numbers(before[key]) != _numbers(score)
    )
    counts = ", ".join(
        f"{len(lines)} {word}" for lines, word in ((added, "new"), (changed, "changed"), (gone, "gone")) if lines
    )
    parts = [f"### Leaderboard: {counts or 'no score changes'}"]
    for heading, lines in (("New", added), ("Changed", changed), ("Gone", gone)):
        if lines:
            parts.append(_table(heading, lines))
    known = {(entry.source, entry.reason) for entry in old.unreadable}
    refused = [entry for entry in new.unreadable if (entry.source, entry.reason) not in known]
    if refused:
        listed = [
            f"- {cell_text(entry.source, 200)}: {cell_text(entry.reason, 400)}" for entry in refused[:_MOST_LINES]
        ]
        parts.append("**Files that cannot be used**\n\n" + "\n".join(listed))
    return "\n\n".join(parts) + "\n"


def _cells(board: Board) -> dict[tuple[str, str, str | None], Score]:
    return {(score.model, score.column, score.limit): score for score in (*board.scores, *board.limited)}


def _numbers(score: Score) -> tuple[object, ...]:
    return (score.metrics, len(score.runs), score.conflict)


def _line(
    models: Mapping[str, Model], columns: Mapping[str, Column], before: Score | None, after: Score | None
) -> tuple[str, ...]:
    score = after or before
    assert score is not None
    model, column = models[score.model], columns[score.column]
    # With what tells rows of one model apart, as a reviewer sees no more than this line.
    variant = [model.revision if model.revision != "main" else "", model.dtype or "", model.chat_template and "chat"]
    notes = []
    if score.limit is not None:
        notes.append(f"limited: {score.limit}")
    if after is not None and len(after.runs) > 1:
        notes.append(f"{len(after.runs)} runs" + (", which differ" if after.conflict else ""))
    notes += after.notes if after is not None else ()
    return (
        cell_text(model.name, 80),
        cell_text(", ".join(filter(None, variant))),
        cell_text(column.label, 80),
        cell_text(column.metric),
        "" if before is None else _value(before, column),
        "" if after is None else _value(after, column),
        cell_text("; ".join(notes), 200),
    )


def _value(score: Score, column: Column) -> str:
    return with_error(score.metric(column.metric)) or "blank"


def _table(heading: str, lines: Iterable[tuple[str, ...]]) -> str:
    rows = list(lines)
    shown = ["| " + " | ".join(line) + " |" for line in rows[:_MOST_LINES]]
    more = [f"\n… and {len(rows) - _MOST_LINES:,} more."] if len(rows) > _MOST_LINES else []
    header = "| model | | task | metric | before | after | |\n| --- | --- | --- | --- | ---: | ---: | --- |"
    return "\n".join([f"**{heading}**\n", header, *shown, *more])
