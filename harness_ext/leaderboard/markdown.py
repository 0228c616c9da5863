"""A board as Markdown tables: all of it, and in short for a README. Text of result files is escaped. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

from harness_ext.leaderboard import compare
from harness_ext.leaderboard.contracts import (
    Aggregate,
    Board,
    Coefficient,
    Column,
    Correlation,
    Metric,
    Model,
    Score,
)
from harness_ext.leaderboard.parts import BoardPart, board_parts

__all__ = ["BEGIN", "END", "cell_text", "markdown", "readme", "spliced", "with_error"]

BEGIN, END = "<!-- leaderboard:begin -->", "<!-- leaderboard:end -->"

_KINDS = ("natural", "probe", "quad", "kernel", "finetune", "other")
_MOST_MODELS = 100
_MOST_IN_README = 12
_MOST_PARTS_IN_README = 3
_MOST_COLUMNS = 12

_BLANK = Metric(None, None)


def cell_text(text: str, most: int = 60) -> str:
    """Untrusted text as a cell of a Markdown table: nothing in it is markup, a link or HTML."""
    text = text if len(text) <= most else text[: most - 1] + "…"
    escaped = re.sub(r"([\\`*_\[\]()#!|~$])", r"\\\1", text)
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
    # An address would become a link by itself.
    return re.sub(r"(?i)\b(https?|ftp|www)\b(?=[:.])", "\\1\N{ZERO WIDTH SPACE}", escaped).replace("\n", " ")


def markdown(board: Board, *, plot: str | None = None) -> str:
    """The board as tables, by its parts: models with loss, flatness and means, the scores of each kind of task, correlations.

    Args:
        board: What to show.
        plot: Path of the plot, to link to; None without.
    """
    tables = [_PartTables(board, part) for part in board_parts(board)]
    if not tables:
        return _nothing(board)
    parts = [_image(plot)] if plot is not None else []
    for of_part in tables:
        if len(tables) > 1:
            parts.append(of_part.heading())
        shown = of_part.models[:_MOST_MODELS]
        parts.append(of_part.summary(shown, all_texts=True))
        for kind in _KINDS:
            parts += filter(None, [of_part.scores(kind, shown)])
        parts += filter(None, [of_part.correlations()])
        hidden = len(of_part.models) - len(shown)
        if hidden:
            parts.append(f"{hidden:,} more models are on the pages.")
    return "\n\n".join([*parts, *_notes(board)])


def readme(board: Board, *, plot: str | None = None, more: str | None = None) -> str:
    """The board in short, for a README: of each part the first models, by loss, and what is found of flatness.

    Args:
        board: What to show.
        plot: Path of the plot, to link to; None without.
        more: Path of the whole tables, to link to.
    """
    tables = [_PartTables(board, part) for part in board_parts(board)]
    if not tables:
        return _nothing(board)
    parts = [_image(plot)] if plot is not None else []
    hidden = sum(len(of_part.models) for of_part in tables[_MOST_PARTS_IN_README:])
    for of_part in tables[:_MOST_PARTS_IN_README]:
        shown = of_part.models[:_MOST_IN_README]
        hidden += len(of_part.models) - len(shown)
        parts.append(of_part.summary(shown, all_texts=False))
        parts += filter(None, [of_part.finding()])
    if more is not None:
        rest = f"{_count(hidden, 'more model')} and all scores" if hidden else "all scores"
        parts.append(f"[All tables]({more}): {rest}.")
    return "\n\n".join([*parts, *_notes(board)])


def _nothing(board: Board) -> str:
    line = "No full run yet."
    if board.limited:
        line = f"No full run yet; {_count(len(board.limited), 'score')} of limited runs are on the pages."
    return f"{line}\n\n`harness-ext leaderboard add RESULT.json` adds a result file of lm_eval."


def _image(plot: str) -> str:
    return f"![Mean score against pretraining loss, coloured by flatness]({plot})"


def _notes(board: Board) -> list[str]:
    notes = [
        "± is one standard error. Means are of scores between chance (0) and perfect (100), with 95 % intervals; errors of "
        "tasks on one dataset, which share documents, are added up (an upper bound), those of different datasets taken as "
        "independent."
    ]
    without = {
        loss.model
        for loss in board.losses
        if loss.limit is None and loss.axis[1].value is not None and loss.axis[1].stderr is None
    }
    if without:
        notes.append(
            f"{_count(len(without), 'model')} {'has' if len(without) == 1 else 'have'} a loss without standard error, which "
            "puts a model in no loss group."
        )
    if any(of.mean is not None and of.normalised is None for of in board.aggregates):
        notes.append("Raw means are of scores as they are, where the chance of a task is unknown.")
    if board.limited:
        notes.append(
            f"Of limited runs {_count(len(board.limited), 'score')} {'is' if len(board.limited) == 1 else 'are'} hidden."
        )
    if board.unreadable:
        notes.append(f"{_count(len(board.unreadable), 'file')} could not be used; the pages say why.")
    if any(score.conflict for score in board.scores):
        notes.append("≠: runs of the same configuration differ; the latest is shown.")
    return [" ".join(notes)]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


class _PartTables:
    """The Markdown of a part."""

    def __init__(self, board: Board, part: BoardPart) -> None:
        self.board, self.part, self.models = board, part, part.models
        self.columns = [column for column in board.columns if column.id in part.columns]

    def heading(self) -> str:
        tasks = [column for column in self.columns if column.kind in compare.DOWNSTREAM]
        return f"**{_count(len(self.models), 'model')}" + (f", {_count(len(tasks), 'task')}**" if tasks else "**")

    def summary(self, models: Sequence[Model], *, all_texts: bool) -> str:
        """Models with loss, flatness and means, the given ones."""
        ids = {model.id for model in self.models}
        of_part = [loss for loss in self.board.losses if loss.limit is None and loss.model in ids]
        texts = sorted(
            {loss.text: loss.text_label for loss in of_part if all_texts or loss.text == self.part.text}.items(),
            key=lambda item: (item[0] != self.part.text, item),
        )
        losses = {(loss.model, loss.text): loss.axis for loss in of_part}
        axis = {text: next(measure for key, (measure, _) in losses.items() if key[1] == text) for text, _ in texts}
        traces = {(flat.model, flat.column): flat.measures for flat in self.board.flatness if flat.limit is None}
        used = [column for column in self.columns if column.kind == "flatness"]
        means = {(aggregate.model, aggregate.kind): aggregate for aggregate in self.board.aggregates}
        kinds = list(dict.fromkeys(aggregate.kind for aggregate in self.board.aggregates if aggregate.model in ids))
        unit = {"bits_per_byte": "bits per byte", "nats_per_token": "nats per token"}
        is_grouped = any(model.id in self.part.groups for model in self.models)
        dtypes = {model.dtype for model in self.models}
        header = [
            "model",
            "parameters",
            *(["dtype"] if len(dtypes) > 1 else []),
            *(["loss group"] if is_grouped else []),
            *(f"{cell_text(label)} ({unit[axis[text]]})" for text, label in texts),
            *map(_heading, used),
            *(f"{kind}, mean of {self._total(kind)}" for kind in kinds),
        ]
        rows = []
        for model in models:
            cells = [cell_text(model.name), _size(model.num_parameters)]
            if len(dtypes) > 1:
                cells.append(cell_text(model.dtype or ""))
            if is_grouped:
                cells.append(str(self.part.groups.get(model.id, "")))
            for text, _ in texts:
                cells.append(with_error(losses[model.id, text][1]) if (model.id, text) in losses else "")
            for column in used:
                found = traces.get((model.id, column.id), {}).get(column.metric)
                cells.append(with_error(found) if found is not None else "")
            cells += [_mean_text(means.get((model.id, kind))) for kind in kinds]
            rows.append(cells)
        return _table(header, rows)

    def _total(self, kind: str) -> str:
        ids = {model.id for model in self.models}
        totals = {of.total for of in self.board.aggregates if of.kind == kind and of.model in ids}
        return _count(max(totals), "task")

    def scores(self, kind: str, models: Sequence[Model]) -> str:
        """Scores on the tasks of a kind; "" without any."""
        ids = {column.id for column in self.columns if column.kind == kind}
        scores = {(score.model, score.column): score for score in self.board.scores if score.column in ids}
        filled = {column for _, column in scores}
        having = [column for column in self.columns if column.id in filled]
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

    def _correlations(self) -> list[Correlation]:
        return [
            found
            for found in self.board.correlations
            if found.downstream in self.part.columns
            and found.text == self.part.text
            and (found.flatness_column, found.flatness_measure) == self.part.flatness
        ]

    def correlations(self) -> str:
        """Whether flatness predicts downstream where loss does not; "" where that cannot be asked."""
        found = self._correlations()
        if not found:
            return ""
        labels = {column.id: column.label for column in self.columns}
        size = found[0].num_parameters
        heading = (
            "**Does flatness predict scores where loss does not?** Spearman's rank correlations over models, with 95 % "
            "bootstrap intervals and permutation p-values; less loss or curvature with higher scores is negative. Traces "
            f"compare among models of one size only, so flatness is correlated over those of "
            f"{'one size' if size is None else f'{_size(size)} parameters'}."
        )
        header = [
            "task",
            "models",
            "loss",
            "of one size",
            "flatness",
            "flatness given loss",
            "flatness within loss groups",
        ]
        rows = [
            [
                cell_text(labels[entry.downstream], 80),
                str(len(entry.models)),
                _coefficient(entry.loss_downstream),
                str(len(entry.comparable)),
                _coefficient(entry.flatness_downstream),
                _coefficient(entry.flatness_given_loss),
                _coefficient(entry.flatness_within_groups),
            ]
            for entry in found
        ]
        return heading + "\n\n" + _table(header, rows)

    def finding(self) -> str:
        """The same in a sentence."""
        found = self._correlations()
        within = [entry.flatness_within_groups for entry in found if entry.flatness_within_groups.value is not None]
        if not within:
            return ""
        values = sorted(of.value for of in within if of.value is not None)
        tested = [of.p_value for of in within if of.p_value is not None]
        few = sum(p_value < 0.05 for p_value in tested)
        sizes = sorted({_size(entry.num_parameters) for entry in found if entry.flatness_within_groups in within})
        without = len(found) - len(within)
        label = next(
            column.label for column in self.columns if self.part.flatness and column.id == self.part.flatness[0]
        )
        measure = self.part.flatness[1].replace("_", " ") if self.part.flatness else ""
        return (
            f"Among models of one size ({' or '.join(sizes)} parameters) and within loss groups, the rank correlation of "
            f"flatness ({measure} of {cell_text(label)}; less is flatter) with the score is from {_signed(values[0])} to "
            f"{_signed(values[-1])} on {_count(len(values), 'task')}, median {_signed(statistics.median(values))}; p < 0.05 on "
            f"{few} of {len(tested)}, where chance alone gives about {0.05 * len(tested):.2g}."
            + (f" {_count(without, 'more task')} cannot be used; the tables say why." if without else "")
        )


def _coefficient(found: Coefficient) -> str:
    if found.value is None:
        return cell_text(found.reason or "", 120)
    ends = "" if found.low is None or found.high is None else f" [{_signed(found.low)}, {_signed(found.high)}]"
    return _signed(found.value) + ends + ("" if found.p_value is None else f", p {found.p_value:.2g}")


def _signed(value: float) -> str:
    # Rounded first, so that there is no -0.00.
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def _mean_text(found: Aggregate | None) -> str:
    if found is None:
        return ""
    if found.mean is None:
        return f"{found.present} of {_count(found.total, 'task')}"
    if found.normalised is None:
        return f"{100 * found.mean:.1f} raw"
    value = f"{100 * found.normalised:.1f}"
    if found.stderr is None:
        return f"{value} (no interval)"
    return f"{value} [{', '.join(f'{100 * (found.normalised + side * found.stderr):.1f}' for side in (-1.96, 1.96))}]"


def _heading(column: Column) -> str:
    metric = "" if column.metric == "acc" else f": {column.metric}"
    return cell_text(f"{column.label}{metric}", 80)


def _score_text(column: Column, score: Score | None) -> str:
    if score is None:
        return ""
    value = score.metric(column.metric).value
    if value is None:
        return ""
    scale, digits = (100, 1) if column.bounded else (1, 3)
    text = f"{scale * value:.{digits}f}"
    if score.interval is not None:
        text += f" [{scale * score.interval[0]:.{digits}f}, {scale * score.interval[1]:.{digits}f}]"
    return text + (" ≠" if score.conflict else "")


def with_error(metric: Metric) -> str:
    """A number of four digits with its standard error of one; "" for a blank."""
    if metric.value is None:
        return ""
    # Twice, so that 70 is not 7e+01.
    return f"{metric.value:.4g}" + (f" ± {float(f'{metric.stderr:.1g}'):g}" if metric.stderr else "")


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
