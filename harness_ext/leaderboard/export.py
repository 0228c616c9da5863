"""A board as CSV, Parquet, JSON and Markdown, the same bytes for the same board.

The tables have one line for each score of a model on a task, with the task's main metric; limited runs are in them, and marked.
The pages have everything else.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness_ext.leaderboard.contracts import SCHEMA_VERSION, Board, Column, Model, Score, plain
from harness_ext.leaderboard.made import Made, replace
from harness_ext.leaderboard.markdown import markdown
from harness_ext.leaderboard.plot import PLOT, draw

__all__ = ["EXPORTS", "TABLES", "long_rows", "write_exports", "write_tables"]

EXPORTS = {
    "leaderboard.csv": "CSV",
    "leaderboard.parquet": "Parquet",
    "leaderboard.json": "JSON",
    "leaderboard.md": "Markdown",
}
"""Files that are written beside the pages, with their labels."""

TABLES = ("leaderboard.csv", "leaderboard.md", PLOT)
"""Files that are committed with the results; the plot only where there is something to draw."""

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

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings that make a spreadsheet take text for a formula."""


def long_rows(board: Board) -> list[dict[str, Any]]:
    """One mapping for each score, full runs first; keys are `FIELDS`."""
    return [row for block in _blocks(board) for row in block.rows()]


@dataclass(frozen=True)
class _Block:
    """Scores of a column, full ones or limited ones.

    Attributes:
        name: In `Made`.
        stamp: Changes whenever the rows do; None if that is not known.
        rows: Makes them.
    """

    name: str
    stamp: str | None
    rows: Callable[[], list[dict[str, Any]]]


def _blocks(board: Board) -> list[_Block]:
    models = {model.id: model for model in board.models}
    columns = {column.id: column for column in board.columns}
    blocks = []
    for part, scores in (("full", board.scores), ("limited", board.limited)):
        # Scores come sorted by their columns.
        for identifier, same in itertools.groupby(scores, key=lambda score: score.column):
            of_column = list(same)
            blocks.append(
                _Block(
                    f"{part}/{identifier}",
                    board.stamps.get(f"rows/{identifier}"),
                    functools.cache(functools.partial(_long_rows, models, columns[identifier], of_column)),
                )
            )
    return blocks


def _long_rows(models: Mapping[str, Model], column: Column, scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [_long_row(models[score.model], column, score) for score in scores]


def _long_row(model: Model, column: Column, score: Score) -> dict[str, Any]:
    shown = score.metric(column.metric)
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
        "num_runs": score.num_runs,
        "conflict": score.conflict,
        "lm_eval_version": score.lm_eval_version,
        "source": score.source,
    }


def write_exports(board: Board, folder: Path, made: Made | None = None) -> None:
    """Write the files of `EXPORTS`; those that would not change are left alone.

    Args:
        board: What to write.
        folder: Where to; made if it is not there.
        made: What is known of the folder; lines of columns that it has are not made again.
    """
    blocks = _blocks(board)
    made = made or Made(folder)
    contents: dict[str, Callable[[], bytes]] = {
        "leaderboard.csv": lambda: _csv(blocks, made),
        "leaderboard.parquet": lambda: _parquet(blocks, made),
        "leaderboard.json": lambda: _json(board, blocks, made),
        "leaderboard.md": lambda: _markdown(board, None),
    }
    for name in EXPORTS:
        replace(folder / name, contents[name]())


def write_tables(board: Board, folder: Path) -> str | None:
    """Write the files of `TABLES`; those that would not change are left alone.

    Returns:
        Name of the plot; None if there is nothing to draw.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    plot = draw(board)
    replace(folder / "leaderboard.csv", _csv(_blocks(board), Made(folder)))
    replace(folder / "leaderboard.md", _markdown(board, PLOT if plot is not None else None))
    if plot is None:
        (folder / PLOT).unlink(missing_ok=True)
        return None
    replace(folder / PLOT, plot)
    return PLOT


def _markdown(board: Board, plot: str | None) -> bytes:
    return (markdown(board, plot=plot) + "\n").encode("utf-8")


def _csv(blocks: Iterable[_Block], made: Made) -> bytes:
    texts = [made.text(f"csv/{block.name}", block.stamp, functools.partial(_csv_lines, block)) for block in blocks]
    return "".join([",".join(FIELDS), "\n", *texts]).encode("utf-8")


def _csv_lines(block: _Block) -> str:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    for row in block.rows():
        writer.writerow([_csv_cell(row[name]) for name in FIELDS])
    return stream.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{value}" if value.startswith(_FORMULA) else value
    return repr(value)


def _parquet(blocks: Iterable[_Block], made: Made) -> bytes:
    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet as pq

    types = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, types[kind]) for name, kind in FIELDS.items()])

    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

    def arrow(block: _Block) -> bytes:
        # By way of JSON: given a list, pyarrow imports pandas to ask whether it is one of its own.
        lines = "\n".join(map(encode, block.rows())).encode("utf-8")
        table = pa.json.read_json(io.BytesIO(lines), parse_options=pa.json.ParseOptions(explicit_schema=schema))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table.select(schema.names))
        return bytes(sink.getvalue().to_pybytes())

    tables = [
        pa.ipc.open_file(made.data(f"arrow/{block.name}", block.stamp, functools.partial(arrow, block))).read_all()
        for block in blocks
    ]
    sink = pa.BufferOutputStream()
    # As one chunk, so that the same rows are the same bytes however they came together.
    table = pa.concat_tables([pa.Table.from_batches([], schema), *tables]).combine_chunks()
    pq.write_table(table, sink, compression="zstd", version="2.6")
    return bytes(sink.getvalue().to_pybytes())


def _json(board: Board, blocks: Iterable[_Block], made: Made) -> bytes:
    value = {
        "schema_version": SCHEMA_VERSION,
        "num_files": board.num_files,
        "models": plain(board.models),
        "columns": plain(board.columns),
        "scores": None,
        "losses": plain(board.losses),
        "flatness": [{key: of for key, of in plain(entry).items() if key != "parts"} for entry in board.flatness],
        "groups": plain(board.groups),
        "correlations": plain(board.correlations),
        "aggregates": plain(board.aggregates),
        "unreadable": plain(board.unreadable),
    }
    # One line an entry, so that a change of one score is a change of one line.
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

    def score_lines(block: _Block) -> str:
        return ",\n".join(encode({key: row[key] for key in _OF_SCORE}) for row in block.rows())

    parts = []
    for key, of_key in value.items():
        if isinstance(of_key, list) or key == "scores":
            if key == "scores":
                texts = [
                    made.text(f"json/{block.name}", block.stamp, functools.partial(score_lines, block))
                    for block in blocks
                ]
            else:
                texts = [encode(entry) for entry in of_key]
            lines = ",\n".join(texts)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]" if lines else f"{json.dumps(key)}: []")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(of_key)}")
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode("utf-8")
