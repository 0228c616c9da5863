"""A board as CSV, Parquet, JSON and Markdown, the same bytes for the same board.

The tables have one line for each score of a model on a task, with the task's main metric; limited runs are in them, and marked.
The pages have everything else.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness_ext.leaderboard.contracts import SCHEMA_VERSION, Board, Column, Metric, Model, Score, plain

__all__ = ["BEGIN", "END", "EXPORTS", "cell_text", "long_rows", "markdown", "spliced", "write_exports"]

EXPORTS = {
    "leaderboard.csv": "CSV",
    "leaderboard.parquet": "Parquet",
    "leaderboard.json": "JSON",
    "leaderboard.md": "Markdown",
}
"""Files that are written beside the pages, with their labels."""

BEGIN, END = "<!-- leaderboard:begin -->", "<!-- leaderboard:end -->"

FIELDS: dict[str, type] = {
    "model_id": str,
    "model": str,
    "revision": str,
    "dtype": str,
    "backend": str,
    "chat_template": str,
    "model_args": str,
    "family": str,
    "num_parameters": int,
    "column_id": str,
    "column": str,
    "task": str,
    "version": str,
    "kind": str,
    "num_fewshot": int,
    "metric": str,
    "value": float,
    "stderr": float,
    "low": float,
    "high": float,
    "chance": float,
    "num_documents": int,
    "limit": str,
    "num_runs": int,
    "conflict": bool,
    "lm_eval_version": str,
    "source": str,
}
"""Columns of the tables and their types; a blank is empty in CSV and null elsewhere."""

_OF_SCORE = (
    "model_id", "column_id", "metric", "value", "stderr", "low", "high", "num_documents", "limit", "num_runs", "conflict",
    "lm_eval_version", "source",
)  # fmt: skip
"""Those of `FIELDS` that are neither the model's nor the column's: the JSON has these apart."""

_KINDS = ("natural", "probe", "quad", "kernel", "finetune", "other")
_MOST_MODELS = 30
_MOST_COLUMNS = 12

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings that make a spreadsheet take text for a formula."""


def long_rows(board: Board) -> list[dict[str, Any]]:
    """One mapping for each score, full runs first; keys are `FIELDS`."""
    models = {model.id: model for model in board.models}
    columns = {column.id: column for column in board.columns}
    return [_long_row(models[score.model], columns[score.column], score) for score in (*board.scores, *board.limited)]


def _long_row(model: Model, column: Column, score: Score) -> dict[str, Any]:
    shown = score.metrics.get(column.metric, Metric(None, None))
    low, high = score.interval or (None, None)
    return {
        "model_id": model.id,
        "model": model.name,
        "revision": model.revision,
        "dtype": model.dtype,
        "backend": model.backend,
        "chat_template": model.chat_template,
        "model_args": ",".join(f"{key}={value}" for key, value in model.model_args) or None,
        "family": model.family,
        "num_parameters": model.num_parameters,
        "column_id": column.id,
        "column": column.label,
        "task": column.task,
        "version": column.version,
        "kind": column.kind,
        "num_fewshot": column.num_fewshot,
        "metric": column.metric,
        "value": shown.value,
        "stderr": shown.stderr,
        "low": low,
        "high": high,
        "chance": column.chance,
        "num_documents": score.num_documents,
        "limit": score.limit,
        "num_runs": len(score.runs),
        "conflict": score.conflict,
        "lm_eval_version": score.runs[0].versions.get("lm_eval"),
        "source": score.runs[0].source,
    }


def write_exports(board: Board, folder: Path) -> None:
    """Write the files of `EXPORTS`; those that would not change are left alone."""
    rows = long_rows(board)
    contents: dict[str, Callable[[], bytes]] = {
        "leaderboard.csv": lambda: _csv(rows),
        "leaderboard.parquet": lambda: _parquet(rows),
        "leaderboard.json": lambda: _json(board, rows),
        "leaderboard.md": lambda: (markdown(board) + "\n").encode("utf-8"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in EXPORTS:
        path, content = folder / name, contents[name]()
        if not (path.is_file() and path.read_bytes() == content):
            path.write_bytes(content)


def _csv(rows: Iterable[Mapping[str, Any]]) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(FIELDS)
    for row in rows:
        writer.writerow([_csv_cell(row[name]) for name in FIELDS])
    return stream.getvalue().encode("utf-8")


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    return repr(value)


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in FIELDS.items()])
    columns = [pa.array([row[name] for row in rows], type=schema.field(name).type) for name in FIELDS]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=schema), sink, compression="zstd", version="2.6")
    return bytes(sink.getvalue().to_pybytes())


def _json(board: Board, rows: Sequence[Mapping[str, Any]]) -> bytes:
    value = {
        "schema_version": SCHEMA_VERSION,
        "num_files": board.num_files,
        "models": plain(board.models),
        "columns": plain(board.columns),
        "scores": [{key: row[key] for key in _OF_SCORE} for row in rows],
        "losses": plain(board.losses),
        "flatness": [{key: of for key, of in plain(entry).items() if key != "parts"} for entry in board.flatness],
        "groups": plain(board.groups),
        "correlations": plain(board.correlations),
        "aggregates": plain(board.aggregates),
        "unreadable": plain(board.unreadable),
    }
    # One line an entry, so that a change of one score is a change of one line.
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    parts = []
    for key, of_key in value.items():
        if isinstance(of_key, list):
            lines = ",\n".join(encode(entry) for entry in of_key)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]" if lines else f"{json.dumps(key)}: []")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(of_key)}")
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode("utf-8")


# ---------------------------------------------------------------------------------------------------------- Markdown


def cell_text(text: str, most: int = 60) -> str:
    """Untrusted text as a cell of a Markdown table: nothing in it is markup, a link or HTML."""
    text = text if len(text) <= most else text[: most - 1] + "…"
    escaped = re.sub(r"([\\`*_\[\]()#!|~$])", r"\\\1", text)
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    # An address would become a link by itself.
    return re.sub(r"(?i)\b(https?|ftp|www)\b(?=[:.])", "\\1\N{ZERO WIDTH SPACE}", escaped).replace("\n", " ")


def markdown(board: Board) -> str:
    """The board as tables: models with loss, flatness and means, then the scores of each kind of task."""
    if not board.scores:
        lines = ["No full run yet."]
        if board.limited:
            lines = [f"No full run yet; {_count(len(board.limited), 'score')} of limited runs are on the pages."]
        return "\n".join([*lines, "", "`harness-ext leaderboard add RESULT.json` adds a result file of lm_eval."])
    order = _order(board)
    shown = order[:_MOST_MODELS]
    parts = [_summary(board, shown)]
    for kind in _KINDS:
        columns = [column for column in board.columns if column.kind == kind]
        table = _scores_table(board, kind, columns, shown)
        if table:
            parts.append(table)
    notes = []
    if len(order) > len(shown):
        notes.append(f"{len(order) - len(shown):,} more models are on the pages.")
    if board.limited:
        notes.append(
            f"Of limited runs {_count(len(board.limited), 'score')} {'is' if len(board.limited) == 1 else 'are'} hidden."
        )
    if board.unreadable:
        notes.append(f"{_count(len(board.unreadable), 'file')} could not be used; the pages say why.")
    if any(score.conflict for score in board.scores):
        notes.append("≠: runs of the same configuration differ; the latest is shown.")
    if notes:
        parts.append(" ".join(notes))
    return "\n\n".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _order(board: Board) -> list[Model]:
    """Models with a full run: complete rows by their mean normalised score, then the others as the board has them."""
    having = {score.model for score in board.scores} | {loss.model for loss in board.losses if loss.limit is None}
    best: dict[str, float] = {}
    for aggregate in board.aggregates:
        if aggregate.normalised is not None:
            best[aggregate.model] = max(best.get(aggregate.model, aggregate.normalised), aggregate.normalised)
    return sorted(
        (model for model in board.models if model.id in having),
        key=lambda model: (model.id not in best, -best.get(model.id, 0.0)),
    )


def _summary(board: Board, models: Sequence[Model]) -> str:
    texts = sorted({loss.text: loss.text_label for loss in board.losses if loss.limit is None}.items())
    losses = {(loss.model, loss.text): loss.axis for loss in board.losses if loss.limit is None}
    traces = {(flat.model, flat.column): flat.measures for flat in board.flatness if flat.limit is None}
    used = [column for column in board.columns if any(key[1] == column.id for key in traces)]
    kinds = list(dict.fromkeys(aggregate.kind for aggregate in board.aggregates))
    means = {(aggregate.model, aggregate.kind): aggregate for aggregate in board.aggregates}
    unit = {"bits_per_byte": "bits per byte", "nats_per_token": "nats per token"}
    axis = {text: next(losses[key][0] for key in losses if key[1] == text) for text, _ in texts}
    header = [
        "model",
        "parameters",
        "dtype",
        *(f"{unit[axis[text]]}, {cell_text(label)}" for text, label in texts),
        *map(_heading, used),
        *(f"{kind}: mean (normalised)" for kind in kinds),
    ]
    rows = []
    for model in models:
        cells = [cell_text(model.name), _size(model.num_parameters), cell_text(model.dtype or "")]
        for text, _ in texts:
            cells.append(_with_error(losses[model.id, text][1]) if (model.id, text) in losses else "")
        for column in used:
            found = traces.get((model.id, column.id), {}).get(column.metric)
            cells.append(_with_error(found) if found is not None else "")
        for kind in kinds:
            of_kind = means.get((model.id, kind))
            if of_kind is None:
                cells.append("")
            elif of_kind.mean is None:
                cells.append(f"{of_kind.present} of {of_kind.total} tasks")
            else:
                normal = "" if of_kind.normalised is None else f" ({100 * of_kind.normalised:.1f})"
                cells.append(f"{100 * of_kind.mean:.1f}{normal}")
        rows.append(cells)
    return _table(header, rows)


def _scores_table(board: Board, kind: str, columns: Sequence[Column], models: Sequence[Model]) -> str:
    ids = {column.id for column in columns}
    scores = {(score.model, score.column): score for score in board.scores if score.column in ids}
    having = [column for column in columns if any(key[1] == column.id for key in scores)]
    if not having:
        return ""
    shown = having[:_MOST_COLUMNS]
    rows = [
        [cell_text(model.name), *(_score_text(column, scores.get((model.id, column.id))) for column in shown)]
        for model in models
        if any((model.id, column.id) in scores for column in shown)
    ]
    more = f" ({len(having) - len(shown)} more tasks are on the pages)" if len(having) > len(shown) else ""
    heading = f"**{kind}**, with 95 % intervals{more}"
    return heading + "\n\n" + _table(["model", *map(_heading, shown)], rows)


def _heading(column: Column) -> str:
    metric = "" if column.metric == "acc" else f": {column.metric}"
    return cell_text(f"{column.label}{metric}", 80)


def _score_text(column: Column, score: Score | None) -> str:
    if score is None:
        return ""
    value = score.metrics.get(column.metric, Metric(None, None)).value
    if value is None:
        return ""
    scale, digits = (100, 1) if column.bounded else (1, 3)
    text = f"{scale * value:.{digits}f}"
    if score.interval is not None:
        text += f" [{scale * score.interval[0]:.{digits}f}, {scale * score.interval[1]:.{digits}f}]"
    return text + (" ≠" if score.conflict else "")


def _with_error(metric: Metric) -> str:
    if metric.value is None:
        return ""
    return f"{metric.value:.4g}" + (f" ± {metric.stderr:.1g}" if metric.stderr else "")


def _size(count: int | None) -> str:
    if count is None:
        return ""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def spliced(document: str, table: str, *, name: str) -> str:
    """A document with the table between its markers.

    Args:
        document: Has `BEGIN` and, after it, `END`, once each.
        table: To put there; no marker can be in it, as `cell_text` escapes them.
        name: Of the document, for messages.

    Raises:
        ValueError: If the markers are missing, twice there, or in the wrong order.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1 or document.index(BEGIN) > document.index(END):
        raise ValueError(f"{name}: expected the lines {BEGIN} and {END}, once each and in this order")
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"
