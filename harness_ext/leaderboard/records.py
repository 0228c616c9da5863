"""What one result file says, checked and reduced to what the leaderboard needs.

The middle between files and rows: `read` makes records, `cache` keeps them as JSON, `rows` joins those of all files.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FORMAT", "ColumnRecord", "FileRecord", "ModelRecord", "Samples", "TaskRecord", "from_json", "to_json"]

FORMAT = 1
"""Of `to_json`; a cache of another one is not read."""


@dataclass(frozen=True)
class ModelRecord:
    """The evaluated model; see `contracts.Model`, whose names these are."""

    name: str
    revision: str
    sha: str | None
    dtype: str | None
    backend: str
    chat_template: str | None
    system_instruction: str | None
    model_args: list[list[str]]
    num_parameters: int | None
    lab: dict[str, Any] | None


@dataclass(frozen=True)
class Samples:
    """Right and wrong by document.

    Attributes:
        keys: Of the documents, as in `contracts.Document.key`, sorted.
        metrics: For each metric that is a number for every document: [distinct values ascending, codes]; see
            `contracts.Vector`.
        file: Name of the samples file beside the result file; "" if the samples are in the result file.
        filter: Of lm_eval, which these samples are of.
    """

    keys: list[str]
    metrics: dict[str, list[Any]]
    file: str
    filter: str


@dataclass(frozen=True)
class ColumnRecord:
    """A configuration of a task; see `contracts.Column`.

    Attributes:
        prompts: Of each its name, template, label_words and digest.
        settings: What makes the configuration beside task, version, shots and prompts.
    """

    task: str
    version: str
    num_fewshot: int | None
    chat: bool
    kind: str
    features: str
    dataset: str
    prompts: list[dict[str, Any]]
    settings: dict[str, str]

    @functools.cached_property
    def id(self) -> str:
        """The same for equal configurations, and for them only."""
        made = json.dumps(self.fields(), sort_keys=True)
        return "c" + hashlib.sha256(made.encode()).hexdigest()[:12]

    def fields(self) -> dict[str, Any]:
        """Plain types by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class TaskRecord:
    """One task of a result file; see `contracts.Score`.

    Attributes:
        metrics: [value, stderr] by name, with the filter after a comma where it is not "none".
        lower_is_better: Names of metrics.
        main_metrics: The best to show first.
        full_documents: Of the task without a limit.
        loss: Of loss tasks: text, text_label, tokenizer and num_tokens of `contracts.Loss`.
        parts: Of flatness tasks: [layer, kind, size, {measure: trace}].
    """

    column: ColumnRecord
    metrics: dict[str, list[float | None]]
    lower_is_better: list[str]
    main_metrics: list[str]
    chance: float | None
    num_documents: int | None
    full_documents: int | None
    limit: str | None
    command: str
    notes: list[str]
    prompt_results: list[dict[str, Any]]
    loss: dict[str, Any] | None = None
    parts: list[list[Any]] = field(default_factory=list)
    samples: Samples | None = None


@dataclass(frozen=True)
class FileRecord:
    """A result file.

    Attributes:
        digest: SHA-256 of its bytes.
        date: Seconds since 1970; None if the file does not say.
        versions: Of lm_eval, harness_ext, transformers.
        problems: What could not be used, though the rest could.
    """

    digest: str
    date: float | None
    versions: dict[str, str]
    model: ModelRecord
    tasks: tuple[TaskRecord, ...]
    problems: tuple[str, ...] = ()


def to_json(record: FileRecord) -> dict[str, Any]:
    """Plain types, in the order of the fields; a task has the id of its column, whose `fields` are kept apart."""
    tasks = [
        vars(task) | {"column": task.column.id, "samples": task.samples and vars(task.samples)} for task in record.tasks
    ]
    return vars(record) | {"model": vars(record.model), "tasks": tasks, "problems": list(record.problems)}


def from_json(record: Mapping[str, Any], columns: Mapping[str, ColumnRecord]) -> FileRecord:
    """The inverse of `to_json`, for what it made; TypeError or KeyError for anything else.

    Args:
        record: What `to_json` made.
        columns: By id.
    """
    tasks = tuple(
        TaskRecord(
            **{
                **task,
                "column": columns[task["column"]],
                "samples": Samples(**task["samples"]) if task["samples"] else None,
            }
        )
        for task in record["tasks"]
    )
    fields = {**record, "model": ModelRecord(**record["model"]), "tasks": tasks, "problems": tuple(record["problems"])}
    return FileRecord(**fields)
