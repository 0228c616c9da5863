"""Records of result files joined into rows and columns.

A row is a model under one revision, dtype, chat template, system instruction, backend and set of other arguments; a column is
a task of one version under one number of shots, set of prompts and set of settings. What is in one cell has been run the
same way: several runs collapse to one score with all their values kept, and differing values are flagged. Limited runs are
kept apart.

Everything depends on the set of files and not on their order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness_ext.leaderboard.contracts import (
    Column,
    Flatness,
    Lab,
    Loss,
    Metric,
    Model,
    ModulePart,
    Prompt,
    PromptResult,
    Run,
    Score,
    Vector,
)
from harness_ext.leaderboard.records import ColumnRecord, FileRecord, ModelRecord, TaskRecord
from harness_ext.leaderboard.statistics import interval

__all__ = ["Rows", "Source", "family_of", "make_rows"]

KINDS = ("natural", "probe", "quad", "kernel", "finetune", "other", "loss", "flatness")
"""Order of the columns."""

SAME_VALUE = 1e-9
"""Two runs that differ by less, relative to the value, have found the same number."""

_BACKENDS = {"huggingface": "hf", "hf-auto": "hf", "hf-causal": "hf", "hf-causal-experimental": "hf"}
"""Names of one backend in several versions of lm_eval."""

_SHARES = ("acc", "exact_match", "em", "f1", "macro_f1", "balanced_acc", "pass@", "brier", "ece", "mc1", "mc2")
"""Beginnings of the names of metrics that lie between 0 and 1."""

_NOT_FLATNESS = ("loss", "bits_per_byte")

_SIZE = re.compile(
    r"(\d+([._]\d+)?[kmbt]|\d+x\d+b|xxl|xl|xs|large|medium|small|base|tiny|mini|nano)(?![a-z0-9])", re.IGNORECASE
)


@dataclass(frozen=True)
class Source:
    """A result file: its path below the results folder, and what it says."""

    path: str
    record: FileRecord


@dataclass(frozen=True)
class Rows:
    """What `contracts.Board` has under the same names.

    Attributes:
        sources: Where each vector is from, by column and model: result file, samples file beside it ("" for inside it) and
            lm_eval's filter.
    """

    models: tuple[Model, ...]
    columns: tuple[Column, ...]
    scores: tuple[Score, ...]
    limited: tuple[Score, ...]
    losses: tuple[Loss, ...]
    flatness: tuple[Flatness, ...]
    document_sets: dict[str, tuple[tuple[str, ...], ...]]
    vectors: dict[str, tuple[Vector, ...]]
    sources: dict[tuple[str, str], tuple[str, str, str]]


def family_of(name: str) -> str:
    """Family of a model, guessed from its name: what stands before its size.

    `HuggingFaceTB/SmolLM2-135M-Instruct` is of SmolLM2, `EleutherAI/pythia-160m-deduped` of pythia, `gpt2-xl` of gpt2. A name
    without a size is its own family.
    """
    last = [part for part in name.split("/") if part] or [name]
    parts = re.split(r"[-_ ]", last[-1])
    kept = []
    for part in parts:
        if _SIZE.fullmatch(part):
            break
        kept.append(part)
    return "-".join(kept) or last[-1]


def make_rows(sources: Iterable[Source]) -> Rows:
    """Join the records of all files; see the module."""
    ordered = _without_copies(sources)
    model_ids, models = _models([source.record.model for source, _ in ordered])

    cells: dict[tuple[str, str, str | None], list[tuple[TaskRecord, Run]]] = {}
    columns: dict[str, ColumnRecord] = {}
    for place, (source, copies) in enumerate(ordered):
        record = source.record
        for task in record.tasks:
            columns[task.column.id] = task.column
            run = Run(
                source=source.path,
                copies=copies,
                date=record.date,
                versions=record.versions,
                command=task.command,
                metrics={name: Metric(*pair) for name, pair in task.metrics.items()},
            )
            cells.setdefault((task.column.id, model_ids[place], task.limit), []).append((task, run))

    made = _columns(columns, cells)
    column_order = {column.id: place for place, column in enumerate(made)}
    model_order = {model.id: place for place, model in enumerate(models)}
    by_column = {column.id: column for column in made}
    scores: list[Score] = []
    latest: dict[tuple[str, str, str | None], TaskRecord] = {}
    for key in sorted(cells, key=lambda key: (column_order[key[0]], model_order[key[1]], key[2] or "")):
        runs = sorted(cells[key], key=_newest_first)
        latest[key] = runs[0][0]
        scores.append(_score(by_column[key[0]], key[1], runs))
    scores = _with_counts(scores, by_column)

    vectors, sets, origins = _vectors(by_column, scores, latest)
    return Rows(
        models=models,
        columns=made,
        scores=tuple(score for score in scores if score.limit is None),
        limited=tuple(score for score in scores if score.limit is not None),
        losses=(*_losses(scores, latest), *_excess(models)),
        flatness=tuple(_flatness(scores, by_column, latest)),
        document_sets=sets,
        vectors=vectors,
        sources=origins,
    )


def _without_copies(sources: Iterable[Source]) -> list[tuple[Source, tuple[str, ...]]]:
    """Files of the same bytes once, with the paths of the others; the one with most samples stands for them."""
    by_digest: dict[str, list[Source]] = {}
    for source in sources:
        by_digest.setdefault(source.record.digest, []).append(source)
    result = []
    for same in by_digest.values():
        same.sort(key=lambda source: (-sum(task.samples is not None for task in source.record.tasks), source.path))
        result.append((same[0], tuple(sorted(source.path for source in same[1:]))))
    return sorted(result, key=lambda item: item[0].path)


def _newest_first(item: tuple[TaskRecord, Run]) -> tuple[float, str]:
    date = item[1].date
    return (-date if date is not None else float("inf"), item[1].source)


# ------------------------------------------------------------------------------------------------------------ models


def _models(records: Sequence[ModelRecord]) -> tuple[list[str], tuple[Model, ...]]:
    """Id of each record's row, and the rows."""
    shas: dict[str, set[str]] = {}
    keys = [_model_key(record) for record in records]
    for key, record in zip(keys, records, strict=True):
        if record.sha:
            shas.setdefault(key, set()).add(record.sha)
    ids: list[str] = []
    members: dict[str, list[ModelRecord]] = {}
    for key, record in zip(keys, records, strict=True):
        # A branch may have moved; a run that was offline does not say where it stood.
        moved = [record.sha] if len(shas.get(key, ())) > 1 else []
        made = json.dumps([key, *moved])
        ids.append("m" + hashlib.sha256(made.encode()).hexdigest()[:12])
        members.setdefault(ids[-1], []).append(record)
    models = [_model(identifier, same) for identifier, same in members.items()]
    return ids, tuple(sorted(models, key=_model_order))


def _backend(record: ModelRecord) -> str:
    return _BACKENDS.get(record.backend, record.backend)


def _model_key(record: ModelRecord) -> str:
    lab = record.lab and [record.lab["run"], record.lab["step"], record.lab["language_sha256"]]
    return json.dumps(
        [
            record.name,
            record.revision,
            record.dtype,
            _backend(record),
            record.chat_template,
            record.system_instruction,
            record.model_args,
            lab,
        ]
    )


def _model(identifier: str, records: Sequence[ModelRecord]) -> Model:
    first = records[0]
    lab = None
    if first.lab is not None:
        found = {**first.lab, "excess": Metric(*first.lab["excess"])}
        lab = Lab(**{**found, "validation_loss": Metric(*first.lab["validation_loss"])})
    return Model(
        id=identifier,
        name=first.name,
        revision=first.revision,
        sha=max((record.sha for record in records if record.sha), default=None),
        dtype=first.dtype,
        backend=_backend(first),
        chat_template=first.chat_template,
        system_instruction=first.system_instruction,
        model_args=tuple((key, value) for key, value in first.model_args),
        family=f"lab {lab.language}" if lab is not None else family_of(first.name),
        num_parameters=max((record.num_parameters for record in records if record.num_parameters), default=None),
        lab=lab,
    )


def _model_order(model: Model) -> tuple[Any, ...]:
    return (
        model.name.casefold(),
        model.name,
        model.revision,
        model.dtype or "",
        model.backend,
        model.chat_template or "",
        model.system_instruction or "",
        model.model_args,
        model.id,
    )


# ----------------------------------------------------------------------------------------------------------- columns


def _columns(
    columns: Mapping[str, ColumnRecord], cells: Mapping[tuple[str, str, str | None], Sequence[tuple[TaskRecord, Run]]]
) -> tuple[Column, ...]:
    members: dict[str, list[tuple[TaskRecord, Run]]] = {identifier: [] for identifier in columns}
    for (identifier, _, _), runs in cells.items():
        members[identifier] += runs
    labels = _labels(columns)
    made = [_column(identifier, columns[identifier], labels[identifier], members[identifier]) for identifier in columns]
    return tuple(
        sorted(
            made,
            key=lambda column: (
                KINDS.index(column.kind),
                column.task,
                column.version,
                column.num_fewshot or 0,
                column.id,
            ),
        )
    )


def _column(identifier: str, record: ColumnRecord, label: str, runs: Sequence[tuple[TaskRecord, Run]]) -> Column:
    full = [task for task, _ in runs if task.limit is None]
    firsts = Counter(task.main_metrics[0] for task in full or [task for task, _ in runs])
    metric = min(firsts, key=lambda name: (-firsts[name], name))
    names = {name for task, _ in runs for name in task.metrics}
    lower = {name for task, _ in runs for name in task.lower_is_better}
    chances = Counter(task.chance for task in full or [task for task, _ in runs] if task.chance is not None)
    counts = [task.full_documents or (task.num_documents if task.limit is None else None) for task, _ in runs]
    return Column(
        id=identifier,
        task=record.task,
        version=record.version,
        num_fewshot=record.num_fewshot,
        chat=record.chat,
        kind=record.kind,  # type: ignore[arg-type]
        features=record.features,
        dataset=record.dataset,
        prompts=tuple(
            Prompt(
                name=prompt["name"],
                template=prompt["template"],
                label_words={label: tuple(words) for label, words in prompt["label_words"].items()},
                digest=prompt["digest"],
            )
            for prompt in record.prompts
        ),
        label=label,
        metric=metric,
        metrics=(metric, *sorted(names - {metric})),
        higher_is_better={name: name not in lower for name in sorted(names)},
        bounded=metric.partition(",")[0].startswith(_SHARES),
        chance=min(chances, key=lambda value: (-chances[value], value)) if chances else None,
        num_documents=_commonest(count for count in counts if count),
        settings=record.settings,
        lm_eval_versions=tuple(sorted({run.versions["lm_eval"] for _, run in runs if "lm_eval" in run.versions})),
    )


def _commonest(values: Iterable[int]) -> int | None:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], -value)) if counts else None


def _labels(columns: Mapping[str, ColumnRecord]) -> dict[str, str]:
    """A heading for each column: its task, with what differs from the other columns of the task."""
    of_task: dict[str, list[str]] = {}
    for identifier, record in columns.items():
        of_task.setdefault(record.task, []).append(identifier)
    labels: dict[str, str] = {}
    for task, identifiers in of_task.items():
        traits = {identifier: _traits(columns[identifier]) for identifier in sorted(identifiers)}
        names = sorted({name for found in traits.values() for name in found}, key=_trait_order)
        telling = [name for name in names if len({found.get(name) for found in traits.values()}) > 1]
        made = {
            identifier: ", ".join(found[name] for name in telling if found.get(name))
            for identifier, found in traits.items()
        }
        repeated = Counter(made.values())
        for identifier, words in made.items():
            if repeated[words] > 1:
                words = ", ".join(filter(None, [words, identifier[1:6]]))
            labels[identifier] = f"{task} ({words})" if words else task
    return labels


_TRAITS = ("version", "prompts", "shots", "chat", "features", "dataset", "kind")


def _trait_order(name: str) -> tuple[int, str]:
    return (_TRAITS.index(name) if name in _TRAITS else len(_TRAITS), name)


def _traits(record: ColumnRecord) -> dict[str, str]:
    names = [prompt["name"] for prompt in record.prompts]
    traits = {
        "version": f"v{record.version}" if record.version else "",
        "prompts": names[0] if len(names) == 1 else f"{len(names)} prompts" if names else "",
        "shots": "" if record.num_fewshot is None else f"{record.num_fewshot}-shot",
        "chat": "chat" if record.chat else "",
        "features": record.features,
        "dataset": record.dataset,
        "kind": record.kind,
    }
    # Texts, such as prompts of lm_eval's own tasks, do not fit into a heading; the digits of the id tell them apart.
    return traits | {
        name: f"{name} {value}"
        for name, value in record.settings.items()
        if len(value) <= 24 and not name.startswith(("doc_to_", "process_", "description"))
    }


# ------------------------------------------------------------------------------------------------------------ scores


def _score(column: Column, model: str, runs: Sequence[tuple[TaskRecord, Run]]) -> Score:
    task, run = runs[0]
    metrics = run.metrics
    shown = metrics.get(column.metric, Metric(None, None))
    return Score(
        model=model,
        column=column.id,
        metrics=metrics,
        interval=None
        if shown.value is None
        else interval(shown.value, shown.stderr, task.num_documents, bounded=column.bounded),
        num_documents=task.num_documents,
        limit=task.limit,
        runs=tuple(run for _, run in runs),
        conflict=len(runs) > 1 and _differ([run.metrics for _, run in runs]),
        notes=tuple(task.notes),
        prompts=tuple(_prompt_result(entry) for entry in task.prompt_results),
    )


def _differ(found: Sequence[Mapping[str, Metric]]) -> bool:
    """Whether two runs have different numbers for a metric that both have."""
    first: dict[str, float] = {}
    for metrics in found:
        for name, metric in metrics.items():
            if metric.value is None:
                continue
            known = first.setdefault(name, metric.value)
            if abs(known - metric.value) > SAME_VALUE * max(abs(known), abs(metric.value)):
                return True
    return False


def _prompt_result(entry: Mapping[str, Any]) -> PromptResult:
    return PromptResult(
        name=entry["name"],
        metrics=entry["metrics"],
        intervals={name: (low, high) for name, (low, high) in entry["intervals"].items()},
        layers=tuple((layer, accuracy, cross) for layer, accuracy, cross in entry["layers"]),
        tied_documents=entry["tied_documents"],
        at_or_below_majority=tuple(entry["at_or_below_majority"]),
        converged=entry["converged"],
        premise=entry["premise"],
    )


def _with_counts(scores: Sequence[Score], columns: Mapping[str, Column]) -> list[Score]:
    """Say of full runs which of them had another number of documents than most: the dataset has changed."""
    result = []
    for score in scores:
        column = columns[score.column]
        usual, found = column.num_documents, score.num_documents
        # How many windows a text has depends on the tokenizer.
        is_odd = score.limit is None and usual and found and usual != found and column.kind not in ("loss", "flatness")
        note = f"evaluated on {found:,} documents, most others on {usual:,}" if is_odd else None
        result.append(replace(score, notes=(note, *score.notes)) if note else score)
    return result


# -------------------------------------------------------------------------------------------------- loss and flatness


def _losses(scores: Iterable[Score], latest: Mapping[tuple[str, str, str | None], TaskRecord]) -> list[Loss]:
    blank = Metric(None, None)
    losses = []
    for score in scores:
        loss = latest[score.column, score.model, score.limit].loss
        if loss is not None:
            losses.append(
                Loss(
                    model=score.model,
                    column=score.column,
                    bits_per_byte=score.metrics.get("bits_per_byte", blank),
                    nats_per_token=score.metrics.get("loss", blank),
                    limit=score.limit,
                    **loss,
                )
            )
    return losses


def _excess(models: Iterable[Model]) -> list[Loss]:
    """The exact excess loss of the lab's models."""
    return [
        Loss(
            model=model.id,
            column=None,
            text=f"excess/{model.lab.language_sha256}",
            text_label=f"exact excess loss, {model.lab.language} language {model.lab.language_sha256[:6]}",
            bits_per_byte=Metric(None, None),
            nats_per_token=model.lab.excess,
            # One language has one vocabulary.
            tokenizer=model.lab.language_sha256[:12],
            limit=None,
            num_tokens=None,
        )
        for model in models
        if model.lab is not None and model.lab.excess.value is not None
    ]


def _flatness(
    scores: Iterable[Score], columns: Mapping[str, Column], latest: Mapping[tuple[str, str, str | None], TaskRecord]
) -> Iterable[Flatness]:
    for score in scores:
        if columns[score.column].kind == "flatness":
            parts = latest[score.column, score.model, score.limit].parts
            yield Flatness(
                model=score.model,
                column=score.column,
                measures={name: metric for name, metric in score.metrics.items() if name not in _NOT_FLATNESS},
                parts=tuple(ModulePart(layer, kind, size, traces) for layer, kind, size, traces in parts),
                limit=score.limit,
            )


# ----------------------------------------------------------------------------------------------------------- vectors


def _vectors(
    columns: Mapping[str, Column],
    scores: Iterable[Score],
    latest: Mapping[tuple[str, str, str | None], TaskRecord],
) -> tuple[
    dict[str, tuple[Vector, ...]],
    dict[str, tuple[tuple[str, ...], ...]],
    dict[tuple[str, str], tuple[str, str, str]],
]:
    """Right and wrong by document; of a model with a full run, that one's only."""
    vectors: dict[str, list[Vector]] = {}
    sets: dict[str, dict[tuple[str, ...], int]] = {}
    origins: dict[tuple[str, str], tuple[str, str, str]] = {}
    by_cell: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        by_cell.setdefault((score.column, score.model), []).append(score)
    for (column_id, model), same in by_cell.items():
        metric, _, filter_name = columns[column_id].metric.partition(",")
        for score in sorted(
            same, key=lambda score: (score.limit is not None, -(score.num_documents or 0), score.limit or "")
        ):
            samples = latest[column_id, model, score.limit].samples
            if samples is None or samples.filter != (filter_name or "none") or metric not in samples.metrics:
                continue
            known = sets.setdefault(column_id, {})
            number = known.setdefault(tuple(samples.keys), len(known))
            values, codes = samples.metrics[metric]
            vectors.setdefault(column_id, []).append(Vector(model, number, tuple(values), codes, score.limit))
            origins[column_id, model] = (score.runs[0].source, samples.file, samples.filter)
            break
    return (
        {column: tuple(of_column) for column, of_column in vectors.items()},
        {column: tuple(known) for column, known in sets.items()},
        origins,
    )
