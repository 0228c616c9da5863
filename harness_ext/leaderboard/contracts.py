"""What the builder of the leaderboard hands to its pages, and which part of it goes into which data file.

Everything is plain: strings, numbers, None, tuples and mappings of them. Numbers are finite; a value that a result file does
not have, or has as NaN, Infinity, "N/A" or null, is None. Strings that come from result files (`Model.name`, prompts, texts of
documents, reasons, paths) are untrusted: a page must escape them. `id`s are made here, match `[mc][0-9a-f]{12}` and are safe
in file names and URLs.

The pages open from `file://`, where nothing can be fetched, so every data file is a script `harnessExt.data(NAME, JSON)`,
loaded when it is first needed:

    index                 Board.index()              what the table, the scatter and the groups need; loaded first
    models/<model id>     Board.model_file(id)       one model's page
    columns/<column id>   Board.column_file(id)      one task's page: other metrics, prompts, right and wrong by document
    documents/<column id> Board.documents_file(id)   texts of documents on which models disagree

A table has one row a `Model` (name, revision, dtype, chat template, other arguments) and one column a `Column` (task, version,
shots, prompts, settings), so that a column never ranks numbers of different configurations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = [
    "ALPHABET",
    "MISSING",
    "SCHEMA_VERSION",
    "Aggregate",
    "Board",
    "Coefficient",
    "Column",
    "Correlation",
    "Document",
    "Flatness",
    "Hidden",
    "Kind",
    "Lab",
    "Loss",
    "LossGroup",
    "Metric",
    "Model",
    "ModulePart",
    "Prompt",
    "PromptResult",
    "Run",
    "Score",
    "Unreadable",
    "Vector",
    "plain",
]

SCHEMA_VERSION = 1
"""Of the JSON that the methods of `Board` return; the pages refuse another one."""

Kind = Literal["natural", "probe", "quad", "kernel", "finetune", "loss", "flatness", "other"]
"""What a task measures. `Column.features` tells the probes apart; "other" are lm_eval's own and other people's tasks."""

MISSING = "."
"""In `Vector.codes`: the model has no result for the document."""

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""Code of the k-th of `Vector.values` is the k-th character."""


class Metric(NamedTuple):
    """A number with its standard error; both None where the file has a blank."""

    value: float | None
    stderr: float | None


_BLANK = Metric(None, None)


@dataclass(frozen=True)
class Lab:
    """How a model of the lab was made: its lab.json.

    Attributes:
        run: Name of the training run; its checkpoints share it.
        algorithm: Such as `adamw`.
        algorithm_settings: Other entries of the algorithm, such as the learning rate.
        objective: Such as `cross_entropy`.
        seed, step, tokens_seen: Of training.
        language: Kind of the synthetic language, such as `hmm`.
        language_sha256: Which language it is; losses compare within one only.
        architecture: Such as width and depth.
        excess: Pretraining loss above the language's entropy, nats per token; exact but for the sample of contexts.
        validation_loss: Nats per token.
    """

    run: str
    algorithm: str
    algorithm_settings: Mapping[str, Any]
    objective: str
    seed: int | None
    step: int | None
    tokens_seen: int | None
    language: str
    language_sha256: str
    architecture: Mapping[str, Any]
    excess: Metric
    validation_loss: Metric


@dataclass(frozen=True)
class Model:
    """A row: what was evaluated.

    Attributes:
        id: "m" and 12 hexadecimal digits, made of all the fields that tell rows apart.
        name: As the user called it; untrusted, at most 300 characters.
        revision: Of the Hub, or "main".
        sha: Commit of the Hub, if known.
        dtype: Of the weights, such as `bfloat16`; None if the file does not say.
        backend: lm_eval's `--model`, such as `hf`.
        chat_template: First 12 digits of the template's hash, "applied" if a template of unknown text was used, or None.
        system_instruction: First 12 digits of its hash, or None.
        model_args: The other arguments that change results (peft, quantisation, max_length, …), sorted by name.
        family: For filtering; guessed from the name (`family_of` in `rows`), or the training run of a lab model.
        num_parameters: None if the file does not say.
        lab: None for models that are not the lab's.
    """

    id: str
    name: str
    revision: str
    sha: str | None
    dtype: str | None
    backend: str
    chat_template: str | None
    system_instruction: str | None
    model_args: tuple[tuple[str, str], ...]
    family: str
    num_parameters: int | None
    lab: Lab | None = None


@dataclass(frozen=True)
class Prompt:
    """A template of a task.

    Attributes:
        name: Within the task, such as `it_was`; "" for the only text of a task of lm_eval's.
        template: Its source (Jinja), at most 4,000 characters; for lm_eval's own tasks their doc_to_text.
        label_words: Words by class; empty where the task has none.
        digest: Of text and words.
    """

    name: str
    template: str
    label_words: Mapping[str, tuple[str, ...]]
    digest: str | None


@dataclass(frozen=True)
class Column:
    """A task under one configuration.

    Attributes:
        id: "c" and 12 hexadecimal digits.
        task: Such as `natural_sst`; untrusted.
        version: Of the task, as text; "" if unknown.
        num_fewshot: Examples in the prompt.
        chat: Whether a chat template was applied. Its text is the model's (`Model.chat_template`).
        kind: What is measured.
        features: For probes: `f`, `conditional_mean`, `class_words`, …; else "".
        dataset: Such as `SetFit/sst2`.
        prompts: All templates of a sweep; one otherwise.
        label: Short heading that tells this column from others of the board: the task, with what differs from other columns of
            the same task, such as "natural_sst (it_was, 5-shot)".
        metric: The one that the table shows, such as `acc`; lm_eval's filter follows after a comma where it is not `none`.
        metrics: All that any model has, `metric` first.
        higher_is_better: By metric.
        bounded: Whether `metric` lies between 0 and 1, so that intervals are cut there.
        is_share: Whether `metric` is a share of documents, so that Wilson's interval stands in for a standard error.
        chance: Majority rate of the evaluated documents, or 1 over the number of choices; None if unknown. The normalised score
            is (value - chance) / (1 - chance).
        num_documents: Of a run that is not limited; None if unknown.
        settings: Whatever else makes the configuration (split, doc_to_text, filters, layer, seeds, …), text by name.
        lm_eval_versions: Of all runs. With more than one, the page marks the column: they may compute the metric differently.
    """

    id: str
    task: str
    version: str
    num_fewshot: int | None
    chat: bool
    kind: Kind
    features: str
    dataset: str
    prompts: tuple[Prompt, ...]
    label: str
    metric: str
    metrics: tuple[str, ...]
    higher_is_better: Mapping[str, bool]
    bounded: bool
    is_share: bool
    chance: float | None
    num_documents: int | None
    settings: Mapping[str, str]
    lm_eval_versions: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """One evaluation that a result file reports.

    Attributes:
        source: Path of the file below the results folder, with `/`; other files of the same bytes are `copies`.
        date: Seconds since 1970, UTC; None if the file does not say. A page shows it in UTC.
        versions: Such as {"lm_eval": "0.4.13", "harness_ext": "0.1.0", "transformers": …}.
        command: Command line that would repeat the run, ready for a shell.
        metrics: What this run found.
    """

    source: str
    copies: tuple[str, ...]
    date: float | None
    versions: Mapping[str, str]
    command: str
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class PromptResult:
    """What one prompt of a task gave.

    Attributes:
        name: Of the prompt, as in `Column.prompts`; "document" for the bare text.
        metrics: Such as acc, acc_pmi, macro_f1.
        intervals: 95 % (low, high) by metric, where known.
        layers: (layer, accuracy, cross-validation accuracy or None) of a sweep over layers; empty otherwise.
        tied_documents: Documents whose classes tie; None if not counted.
        at_or_below_majority: Metrics that are no better than the commonest class.
        converged: Whether every probe's fit did; None for tasks without a fit.
        premise: The prompt without its document, where calibration used it.
    """

    name: str
    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    layers: tuple[tuple[int, float | None, float | None], ...] = ()
    tied_documents: int | None = None
    at_or_below_majority: tuple[str, ...] = ()
    converged: bool | None = None
    premise: str | None = None


@dataclass(frozen=True)
class Score:
    """All runs of one model on one column; limited runs apart from full ones.

    Attributes:
        model, column: Their ids.
        metrics: Of the run that counts, the latest one. A metric of `Column.metrics` may be missing.
        interval: 95 % interval of `Column.metric`: value -+ 1.96 stderr, cut to [0, 1] for a bounded metric; Wilson's of a
            share whose stderr is missing or zero and number of documents known; None where neither can be had.
        num_documents: Evaluated; None if unknown.
        limit: Why it is less than all: "--limit 100", "--samples", "100 of 1821"; None for a full run.
        runs: Latest first.
        conflict: Whether runs of this same configuration found different numbers. All are in `runs`.
        notes: Warnings for a reader, such as "22 of 22 documents tied".
        prompts: What each prompt gave.

    A score that a build takes from an earlier one (`later`) has its details, which are all that is long, read when they are
    first asked for. It is equal to the one that has them.
    """

    model: str
    column: str
    metrics: Mapping[str, Metric]
    interval: tuple[float, float] | None
    num_documents: int | None
    limit: str | None
    runs: tuple[Run, ...]
    conflict: bool = False
    # By factories, as a default would be an attribute of the class, and found before `__getattr__` is asked.
    notes: tuple[str, ...] = field(default_factory=tuple)
    prompts: tuple[PromptResult, ...] = field(default_factory=tuple)

    @classmethod
    def later(cls, brief: Mapping[str, Any], load: Callable[[Score], Score]) -> Score:
        """A score without its details.

        Args:
            brief: Attributes by name: all but metrics, runs, notes and prompts; and `num_runs`, `has_notes`, `source`,
                `lm_eval_version` and `shown`, a pair of the column's metric and its value.
            load: Makes the whole score.
        """
        made = object.__new__(cls)
        made.__dict__.update(brief)
        made.__dict__["_load"] = load
        return made

    def __getattr__(self, name: str) -> Any:
        if name in _DETAILS and "_load" in self.__dict__:
            whole = self.__dict__.pop("_load")(self)
            self.__dict__.update({detail: getattr(whole, detail) for detail in _DETAILS})
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def metric(self, name: str) -> Metric:
        """A metric; blank where the score does not have it."""
        shown = self.__dict__.get("shown")
        if shown is not None and shown[0] == name:
            return shown[1]
        return self.metrics.get(name, _BLANK)

    @functools.cached_property
    def num_runs(self) -> int:
        return len(self.runs)

    @functools.cached_property
    def has_notes(self) -> bool:
        return bool(self.notes)

    @functools.cached_property
    def source(self) -> str:
        """Of the run that counts."""
        return self.runs[0].source

    @functools.cached_property
    def lm_eval_version(self) -> str | None:
        """Of the run that counts."""
        return self.runs[0].versions.get("lm_eval")


_DETAILS = ("metrics", "runs", "notes", "prompts")


@dataclass(frozen=True)
class Loss:
    """The pretraining loss of a model on a text.

    Attributes:
        model, column: Their ids. For a lab model's exact excess loss `column` is None.
        text: What was read: the text's SHA-256, a "/" and "full", or which windows of which cut. Bits per byte compare within
            one `text` only. For the exact excess loss of lab models: "excess/" and the language's SHA-256.
        text_label: For people, such as "Salesforce/wikitext wikitext-2-v1 test".
        bits_per_byte: The loss axis.
        nats_per_token: Compares within one `tokenizer` only.
        tokenizer: 12 digits of the hash of the text's tokens; in older files, of what they say of the tokenizer: its special
            tokens and into how many tokens it cuts the text.
        limit: As in `Score`.
        num_tokens: Scored; None if unknown.
    """

    model: str
    column: str | None
    text: str
    text_label: str
    bits_per_byte: Metric
    nats_per_token: Metric
    tokenizer: str | None
    limit: str | None
    num_tokens: int | None

    @property
    def axis(self) -> tuple[str, Metric]:
        """The measure that loss-matching uses here, and its value: excess nats for lab models, else bits per byte."""
        if self.text.startswith("excess/"):
            return "nats_per_token", self.nats_per_token
        return "bits_per_byte", self.bits_per_byte


@dataclass(frozen=True)
class ModulePart:
    """Part of a trace.

    Attributes:
        layer: Number of the layer, -1 outside layers.
        kind: Such as `mlp.down_proj`.
        size: Number of parameters.
        traces: By measure: fisher_trace, fisher_trace_scaled.
    """

    layer: int
    kind: str
    size: int
    traces: Mapping[str, float]


@dataclass(frozen=True)
class Flatness:
    """Curvature of the pretraining loss at a model's weights.

    Attributes:
        model, column: Their ids; one column has one text, number of blocks and set of parameters.
        measures: fisher_trace, hessian_trace, …_scaled, …_per_mparam, lambda_max, hessian_over_fisher; smaller is flatter.
        parts: Traces by module; empty where the file has none. In the model's file only.
        limit: As in `Score`.
    """

    model: str
    column: str
    measures: Mapping[str, Metric]
    parts: tuple[ModulePart, ...]
    limit: str | None


@dataclass(frozen=True)
class Vector:
    """Right and wrong of one model on the documents of a column, by `Column.metric`.

    Two models compare if their `documents` are the same set, or one's are among the other's (a limited run); otherwise the
    comparison is refused.

    Attributes:
        model: Its id.
        documents: Which of the column's `document_sets`.
        values: Distinct values, ascending: (0.0, 1.0), or more where a document counts in part (ties, means over prompts).
        codes: One character a document of the set, in its order: that of the value, see `ALPHABET`; `MISSING` for none.
        limit: As in `Score`.
    """

    model: str
    documents: int
    values: tuple[float, ...]
    codes: str
    limit: str | None


@dataclass(frozen=True)
class Document:
    """A document on which models disagree.

    Attributes:
        key: As in `document_sets`: 12 digits of lm_eval's doc_hash, "#2", "#3", … for repetitions.
        text: At most 600 characters; untrusted.
        target: Gold answer; untrusted.
    """

    key: str
    text: str
    target: str


@dataclass(frozen=True)
class LossGroup:
    """Models of one loss, at the default tolerance. The page makes its own when the tolerance is moved.

    Attributes:
        text: As in `Loss`; with it the measure of `Loss.axis`.
        tolerance: In the unit of that measure.
        models: Ids, lowest loss first.
        low, high: Range of the losses.
    """

    text: str
    tolerance: float
    models: tuple[str, ...]
    low: float
    high: float


@dataclass(frozen=True)
class Coefficient:
    """A rank correlation; `value` is None, with a `reason`, where it cannot be computed."""

    value: float | None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Correlation:
    """Does flatness predict downstream where loss does not?

    Attributes:
        text: As in `Loss`: models with a loss on it.
        flatness_column, flatness_measure: What flatness is.
        downstream: Id of the column.
        models: Ids of the models that have all three.
        comparable: Ids of those of them that have `num_parameters`, over which flatness is correlated.
        num_parameters: The size that most of the models have; None if none is known.
        loss_downstream, flatness_downstream: Spearman's coefficients.
        flatness_given_loss: Partial one of flatness with downstream given loss.
        flatness_within_groups: Of flatness with downstream, ranked within the groups of `Board.groups`.
    """

    text: str
    flatness_column: str
    flatness_measure: str
    downstream: str
    models: tuple[str, ...]
    comparable: tuple[str, ...]
    num_parameters: int | None
    loss_downstream: Coefficient
    flatness_downstream: Coefficient
    flatness_given_loss: Coefficient
    flatness_within_groups: Coefficient


@dataclass(frozen=True)
class Aggregate:
    """A model over all columns of one kind that have full runs, of those of its part of the board.

    Rows that lack a column have no numbers, as a mean over other tasks would not compare; `present` of `total` says so. Models
    that no column joins, directly or through other models, are in different parts: what neither has run, neither lacks.

    Attributes:
        model: Its id.
        kind: Of the columns, chat columns apart: "natural", "natural, chat", ….
        present, total: Columns that the model has, and that there are.
        mean: Of the main metrics.
        normalised: Mean of (value - chance) / (1 - chance); None where a column's chance is unknown.
        stderr: Of `normalised`: errors of columns of one dataset, which share documents, are added up, an upper bound; datasets
            are taken as independent. None where a column's is unknown.
        win_rate: Mean over columns of the share of other complete models that this one beats, a tie counting half.
        borda: Sum over columns of the number of complete models that it beats, a tie counting half.
    """

    model: str
    kind: str
    present: int
    total: int
    mean: float | None
    normalised: float | None
    stderr: float | None
    win_rate: float | None
    borda: float | None


@dataclass(frozen=True)
class Unreadable:
    """A file that could not be used, or was used in part, and why."""

    source: str
    reason: str


@dataclass(frozen=True)
class Hidden:
    """How many scores are of limited runs, which the table hides unless asked."""

    limited_scores: int
    limited_models: int


@dataclass(frozen=True)
class Board:
    """All that the pages show.

    Attributes:
        models: Sorted by name, then by what else tells them apart.
        columns: Sorted by kind, task, then by what else tells them apart.
        scores: Full runs, sorted by (column, model) in the order above.
        limited: Limited ones, in the same order; hidden by default and marked.
        losses, flatness: Of full and limited runs.
        document_sets: By column, the sets of documents that vectors name; each a tuple of `Document.key`.
        vectors: By column.
        documents: By column, of bounded size.
        groups, correlations, aggregates: Of full runs.
        stamps: By data file, such as "models/<id>", and "rows/<column id>" for the lines of a column in tables: a text that
            changes whenever the content does, so that what was written from the same board need not be made again. No part of
            what a board says; empty if it is not known.
        unreadable: Files with their reasons, sorted.
        num_files: Result files read.
    """

    models: tuple[Model, ...]
    columns: tuple[Column, ...]
    scores: tuple[Score, ...]
    limited: tuple[Score, ...] = ()
    losses: tuple[Loss, ...] = ()
    flatness: tuple[Flatness, ...] = ()
    document_sets: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    vectors: Mapping[str, tuple[Vector, ...]] = field(default_factory=dict)
    documents: Mapping[str, tuple[Document, ...]] = field(default_factory=dict)
    groups: tuple[LossGroup, ...] = ()
    correlations: tuple[Correlation, ...] = ()
    aggregates: tuple[Aggregate, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    num_files: int = 0
    stamps: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def hidden(self) -> Hidden:
        full = {score.model for score in self.scores}
        return Hidden(len(self.limited), len({score.model for score in self.limited} - full))

    def index(self) -> dict[str, Any]:
        """What the table, the scatter and the groups need.

        Scores lie by column, in arrays as long as `models`, with None where a model has no score, so that 1,000 models and 60
        columns take about a megabyte:

            {"schema_version": 1, "num_files": …, "hidden": {…}, "unreadable": [{source, reason}, …],
             "models": [{…Model}, …],
             "columns": [{…Column without `prompts` and `settings`; "prompt_names": […]}, …],
             "scores":  [OF_COLUMN, …], "limited": [OF_COLUMN or null, …],   in the order of `columns`
             "losses": [{…Loss}, …], "flatness": [{…Flatness without `parts`}, …],
             "groups": [{…LossGroup}, …], "correlations": [{…Correlation}, …], "aggregates": [{…Aggregate}, …]}

        OF_COLUMN is {"value": [number or null, …], "stderr": [number or null, …], "n": number or [number or null, …],
        "flags": {place among the models: flags}}, where flags are "conflict", "repeated", "note" (see the model's file) and,
        for limited runs, "limit: …". Numbers have 5 significant digits; the model's file has all.
        """
        place = {model.id: number for number, model in enumerate(self.models)}
        return {
            "schema_version": SCHEMA_VERSION,
            "num_files": self.num_files,
            "hidden": plain(self.hidden),
            "unreadable": plain(self.unreadable),
            "models": [_without_blanks(plain(model)) for model in self.models],
            "columns": [_index_column(column) for column in self.columns],
            "scores": self._by_column(self.scores, place),
            "limited": self._by_column(self.limited, place),
            "losses": plain(self.losses),
            "flatness": [_without(plain(of_model), "parts") for of_model in self.flatness],
            "groups": plain(self.groups),
            "correlations": plain(self.correlations),
            "aggregates": [_without_blanks(plain(aggregate)) for aggregate in self.aggregates],
        }

    def _by_column(self, scores: Sequence[Score], place: Mapping[str, int]) -> list[dict[str, Any] | None]:
        by_column: dict[str, list[Score]] = {}
        for score in scores:
            by_column.setdefault(score.column, []).append(score)
        return [
            _of_column(column, by_column[column.id], place) if column.id in by_column else None
            for column in self.columns
        ]

    def model_file(self, model_id: str) -> dict[str, Any]:
        """One model's page: {"model": {…Model}, "scores": [{…Score}, …] full and limited, "flatness": [{…Flatness}, …]}."""
        return self._model_files[model_id]

    @functools.cached_property
    def _model_files(self) -> dict[str, dict[str, Any]]:
        files: dict[str, dict[str, Any]] = {
            model.id: {"model": plain(model), "scores": [], "flatness": []} for model in self.models
        }
        for score in (*self.scores, *self.limited):
            files[score.model]["scores"].append(_without_blanks(_plain_score(score)))
        for of_model in self.flatness:
            files[of_model.model]["flatness"].append(plain(of_model))
        return files

    def column_file(self, column_id: str) -> dict[str, Any]:
        """One task's page.

        {"column": {…Column}, "metrics": {metric: {"model": [id, …], "value": […], "stderr": […]}, …} of full runs,
         "prompts": {"names": […], "model": [id, …], "acc": [[number or null for each prompt], …]},
         "document_sets": [[key, …], …], "vectors": [{…Vector}, …]}
        """
        column = self._columns_by_id[column_id]
        scores = self._scores_of_column.get(column_id, [])
        metrics = {}
        for name in column.metrics:
            having = [score for score in scores if name in score.metrics]
            metrics[name] = {
                "model": [score.model for score in having],
                "value": [score.metrics[name].value for score in having],
                "stderr": [score.metrics[name].stderr for score in having],
            }
        names = list(dict.fromkeys(result.name for score in scores for result in score.prompts))
        swept = [score for score in scores if score.prompts]
        accuracies = [
            [{result.name: result.metrics.get("acc") for result in score.prompts}.get(name) for name in names]
            for score in swept
        ]
        return {
            "column": plain(column),
            "metrics": metrics,
            "prompts": {"names": names, "model": [score.model for score in swept], "acc": accuracies},
            "document_sets": plain(self.document_sets.get(column_id, ())),
            "vectors": plain(self.vectors.get(column_id, ())),
        }

    @functools.cached_property
    def _columns_by_id(self) -> dict[str, Column]:
        return {column.id: column for column in self.columns}

    @functools.cached_property
    def _scores_of_column(self) -> dict[str, list[Score]]:
        by_column: dict[str, list[Score]] = {}
        for score in self.scores:
            by_column.setdefault(score.column, []).append(score)
        return by_column

    def documents_file(self, column_id: str) -> dict[str, Any]:
        """Texts for the comparison page: {"column": id, "documents": [{key, text, target}, …]}; the list may be empty."""
        return {"column": column_id, "documents": plain(self.documents.get(column_id, ()))}


def plain(value: Any) -> Any:
    """Dataclasses as dictionaries, `Metric` as [value, stderr], tuples as lists."""
    if isinstance(value, str | int | float) or value is None:
        return value
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    raise TypeError(f"{type(value).__name__} is no part of a board: {value!r}")


def _plain_score(score: Score) -> dict[str, Any]:
    """The same as `plain(score)`, of which a large board has very many."""
    return {
        **{name: getattr(score, name) for name in Score.__dataclass_fields__},
        "metrics": {name: list(metric) for name, metric in score.metrics.items()},
        "interval": None if score.interval is None else list(score.interval),
        "runs": [
            vars(run)
            | {
                "copies": list(run.copies),
                "versions": dict(run.versions),
                "metrics": {name: list(metric) for name, metric in run.metrics.items()},
            }
            for run in score.runs
        ],
        "notes": list(score.notes),
        "prompts": [
            vars(result)
            | {
                "metrics": dict(result.metrics),
                "intervals": {name: list(ends) for name, ends in result.intervals.items()},
                "layers": [list(layer) for layer in result.layers],
                "at_or_below_majority": list(result.at_or_below_majority),
            }
            for result in score.prompts
        ],
    }


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


def _without_blanks(record: dict[str, Any]) -> dict[str, Any]:
    """Without None and empty lists and mappings: a key that is missing is a blank."""
    return {key: value for key, value in record.items() if value is not None and value != [] and value != {}}


def _index_column(column: Column) -> dict[str, Any]:
    record = _without(plain(column), "prompts", "settings")
    return record | {"prompt_names": [prompt.name for prompt in column.prompts]}


def _of_column(column: Column, scores: Sequence[Score], place: Mapping[str, int]) -> dict[str, Any]:
    value: list[float | None] = [None] * len(place)
    stderr: list[float | None] = [None] * len(place)
    documents: list[int | None] = [None] * len(place)
    flags: dict[str, list[str]] = {}
    for score in scores:
        at = place[score.model]
        metric = score.metric(column.metric)
        value[at], stderr[at] = rounded(metric.value), rounded(metric.stderr)
        documents[at] = score.num_documents
        of_score = [
            flag
            for flag, is_set in (
                ("conflict", score.conflict),
                ("repeated", score.num_runs > 1),
                ("note", score.has_notes),
                (f"limit: {score.limit}", score.limit is not None),
            )
            if is_set
        ]
        if of_score:
            flags[str(at)] = of_score
    counts = {score.num_documents for score in scores}
    return {
        "value": value,
        "stderr": stderr,
        "n": counts.pop() if len(counts) == 1 else documents,
        "flags": flags,
    }


def rounded(value: float | None) -> float | None:
    """To 5 significant digits, for the index."""
    return None if value is None else float(f"{value:.5g}")
