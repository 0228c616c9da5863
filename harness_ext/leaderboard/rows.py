"""Records of result files joined into rows and columns.

A row is a model under one revision, dtype, chat template, system instruction, backend and set of other arguments; a column is
a task of one version under one number of shots, set of prompts and set of settings. What is in one cell has been run the
same way: several runs collapse to one score with all their values kept, and differing values are flagged. Limited runs are
kept apart.

Everything depends on the set of files and not on their order.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

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
    plain,
)
from harness_ext.leaderboard.ranges import is_bounded, is_share
from harness_ext.leaderboard.records import ColumnRecord, FileRecord, ModelRecord, TaskRecord
from harness_ext.leaderboard.statistics import interval

__all__ = ["Head", "Memory", "Rows", "Source", "family_of", "head_of", "make_rows"]

KINDS = ("natural", "probe", "quad", "kernel", "finetune", "other", "loss", "flatness")
"""Order of the columns."""

SAME_VALUE = 1e-6
"""Two runs that differ by less, relative to the value, have found the same number: another number of threads adds up in another
order, and calibration errors differ by 1e-7. One document among 100,000 is more."""

_BACKENDS = {"huggingface": "hf", "hf-auto": "hf", "hf-causal": "hf", "hf-causal-experimental": "hf"}
"""Names of one backend in several versions of lm_eval."""

_NOT_FLATNESS = ("loss", "bits_per_byte")

_SIZE = re.compile(
    r"(\d+([._]\d+)?[kmbt]|\d+x\d+b|xxl|xl|xs|large|medium|small|base|tiny|mini|nano)(?![a-z0-9])", re.IGNORECASE
)


@dataclass(frozen=True)
class Head:
    """What has to be known of a file to say which cells of the table it fills.

    Attributes:
        digest: As in `FileRecord`.
        model: Likewise.
        tasks: (column, limit, whether there are samples) of each task.
    """

    digest: str
    model: ModelRecord
    tasks: Sequence[Sequence[Any]]


def head_of(record: FileRecord) -> Head:
    """The head of a record."""
    tasks = tuple((task.column.id, task.limit, task.samples is not None) for task in record.tasks)
    return Head(record.digest, record.model, tasks)


class Source:
    """A result file: its path below the results folder, and what it says.

    Args:
        path: Of the file.
        record: What it says, or what reads that when it is first asked for.
        head: Of the record, if that is not read yet.
        stamp: Changes whenever the record does.
    """

    def __init__(
        self, path: str, record: FileRecord | Callable[[], FileRecord], *, head: Head | None = None, stamp: str = ""
    ) -> None:
        self.path, self.stamp = path, stamp
        self._record = record
        if head is not None:
            self.__dict__["head"] = head

    @functools.cached_property
    def record(self) -> FileRecord:
        return self._record if isinstance(self._record, FileRecord) else self._record()

    @functools.cached_property
    def head(self) -> Head:
        return head_of(self.record)


class Memory(Protocol):
    """What an earlier build made of a column; see `build`."""

    def take(self, name: str, stamp: str) -> str | None:
        """The text kept under a name, if its stamp is this one."""

    def keep(self, name: str, stamp: str, text: str) -> None:
        """Keep a text."""


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
    stamps: dict[str, str]


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


def make_rows(sources: Iterable[Source], *, memory: Memory | None = None) -> Rows:
    """Join the records of all files; see the module.

    Args:
        sources: The files.
        memory: With it, a column all of whose files are as they were is taken as it was made then, and their records are not
            asked for. The rows are equal to those without.
    """
    ordered = _without_copies(sources)
    model_ids, models = _models([source.head.model for source, _ in ordered])
    model_order = {model.id: place for place, model in enumerate(models)}
    cells: dict[str, dict[tuple[str, str | None], list[_Entry]]] = {}
    with_samples: set[str] = set()
    for place, (source, copies) in enumerate(ordered):
        of_source = _Of(source, copies)
        for number, (column, limit, has_samples) in enumerate(source.head.tasks):
            cells.setdefault(column, {}).setdefault((model_ids[place], limit), []).append(_Entry(of_source, number))
            if has_samples:
                with_samples.add(column)

    for column, of_column in cells.items():
        keys = sorted(of_column, key=lambda key: (model_order[key[0]], key[1] or ""))
        cells[column] = {key: of_column[key] for key in keys}
    made = {
        column: _column_rows(column, of_column, memory, has_samples=column in with_samples)
        for column, of_column in cells.items()
    }
    columns = _ordered([of_column.column for of_column in made.values()])
    by_column = {column.id: column for column in columns}

    scores = [score for column in columns for score in made[column.id].scores]
    latest = {(column, *key): task for column, of_column in made.items() for key, task in of_column.latest.items()}
    measured = [score for score in scores if by_column[score.column].kind in ("loss", "flatness")]
    vectors, sets, origins = _vectors(by_column, [score for score in scores if score.column in with_samples], latest)
    return Rows(
        models=models,
        columns=columns,
        scores=tuple(score for score in scores if score.limit is None),
        limited=tuple(score for score in scores if score.limit is not None),
        losses=(*_losses(measured, latest), *_excess(models)),
        flatness=tuple(_flatness(measured, by_column, latest)),
        document_sets=sets,
        vectors=vectors,
        sources=origins,
        stamps={} if memory is None else _stamps(models, columns, cells, made),
    )


class _Of:
    """A file with the paths of its copies."""

    def __init__(self, source: Source, copies: tuple[str, ...]) -> None:
        self.source, self.copies = source, copies

    @functools.cached_property
    def stamp(self) -> str:
        made = repr((self.source.path, self.source.stamp, self.copies))
        return hashlib.blake2b(made.encode("utf-8", errors="surrogatepass"), digest_size=12).hexdigest()


class _Entry(NamedTuple):
    """One task of a file: `number` is its place among the tasks."""

    of: _Of
    number: int

    @property
    def stamp(self) -> str:
        return f"{self.of.stamp} {self.number}"

    def run(self) -> tuple[TaskRecord, Run]:
        record = self.of.source.record
        task = record.tasks[self.number]
        return task, Run(
            source=self.of.source.path,
            copies=self.of.copies,
            date=record.date,
            versions=record.versions,
            command=task.command,
            metrics={name: Metric(*pair) for name, pair in task.metrics.items()},
        )


def _stamp_of(cell: Sequence[_Entry]) -> str:
    return cell[0].stamp if len(cell) == 1 else " ".join(entry.stamp for entry in cell)


_Cells = Mapping[tuple[str, str | None], Sequence[_Entry]]


@dataclass(frozen=True)
class _ColumnRows:
    """A column with its scores.

    Attributes:
        column: Without its label, which depends on the other columns.
        scores: In the order of the models.
        latest: The record that counts, by model and limit; empty where the column was made earlier.
        stamp: Changes whenever the rest does.
        cell_stamps: Of each score, in their order.
    """

    column: Column
    scores: tuple[Score, ...]
    latest: Mapping[tuple[str, str | None], TaskRecord]
    stamp: str
    cell_stamps: Sequence[str]


def _column_rows(identifier: str, cells: _Cells, memory: Memory | None, *, has_samples: bool) -> _ColumnRows:
    stamp, cell_stamps = "", []
    if memory is not None:
        cell_stamps = [f"{limit} {_stamp_of(of_cell)}" for (_, limit), of_cell in cells.items()]
        stamp = _hash([[model for model, _ in cells], cell_stamps])
        if not has_samples:
            known = memory.take(f"joined:{identifier}", stamp)
            if known is not None:
                return _earlier(identifier, json.loads(known), cells, stamp, cell_stamps)
    runs = {key: sorted((entry.run() for entry in of_cell), key=_newest_first) for key, of_cell in cells.items()}
    record = next(iter(runs.values()))[0][0].column
    column = _column(identifier, record, [run for of_cell in runs.values() for run in of_cell])
    scores = tuple(_score(column, model, of_cell) for (model, _), of_cell in runs.items())
    # Of losses and flatness more is wanted than what a score has.
    if memory is not None and not has_samples and column.kind not in ("loss", "flatness"):
        briefs = [_brief(column, score) for score in scores]
        memory.keep(f"joined:{identifier}", stamp, _json([plain(column), briefs]))
    return _ColumnRows(column, scores, {key: of_cell[0][0] for key, of_cell in runs.items()}, stamp, cell_stamps)


def _brief(column: Column, score: Score) -> list[Any]:
    return [
        score.metric(column.metric),
        score.interval,
        score.num_documents,
        score.conflict,
        score.num_runs,
        score.has_notes,
        score.source,
        score.lm_eval_version,
    ]


def _earlier(identifier: str, known: list[Any], cells: _Cells, stamp: str, cell_stamps: Sequence[str]) -> _ColumnRows:
    """The column as it was made, whose scores have their details read when they are asked for."""
    fields, briefs = known
    prompts = tuple(
        Prompt(**{**prompt, "label_words": {label: tuple(words) for label, words in prompt["label_words"].items()}})
        for prompt in fields["prompts"]
    )
    column = Column(
        **{
            **fields,
            "prompts": prompts,
            "metrics": tuple(fields["metrics"]),
            "lm_eval_versions": tuple(fields["lm_eval_versions"]),
        }
    )

    def load(score: Score) -> Score:
        runs = sorted((entry.run() for entry in cells[score.model, score.limit]), key=_newest_first)
        return _score(column, score.model, runs)

    scores = tuple(
        Score.later(
            {
                "model": model,
                "column": identifier,
                "shown": (column.metric, Metric(*shown)),
                "interval": None if ends is None else tuple(ends),
                "num_documents": count,
                "limit": limit,
                "conflict": conflict,
                "num_runs": num_runs,
                "has_notes": has_notes,
                "source": source,
                "lm_eval_version": version,
            },
            load,
        )
        for (model, limit), (shown, ends, count, conflict, num_runs, has_notes, source, version) in zip(
            cells, briefs, strict=True
        )
    )
    return _ColumnRows(column, scores, {}, stamp, cell_stamps)


def _stamps(
    models: Iterable[Model],
    columns: Iterable[Column],
    cells: Mapping[str, _Cells],
    made: Mapping[str, _ColumnRows],
) -> dict[str, str]:
    """See `contracts.Board.stamps`: of what a page is made, hashed."""
    of_model = {model.id: _hash(plain(model)) for model in models}
    pages = {model: [stamp] for model, stamp in of_model.items()}
    stamps = {}
    for column in columns:
        of_column = cells[column.id]
        # What a score takes from its column.
        facts = f"{column.id} {column.metric} {column.bounded} {column.is_share} {column.num_documents} {column.kind}"
        for (model, _), stamp in zip(of_column, made[column.id].cell_stamps, strict=True):
            pages[model].append(f"{facts} {stamp}")
        stamps[f"columns/{column.id}"] = stamp = _hash([made[column.id].stamp, plain(column)])
        stamps[f"rows/{column.id}"] = _hash([stamp, [of_model[model] for model, _ in of_column]])
    return stamps | {f"models/{model}": _hash(parts) for model, parts in pages.items()}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _hash(value: Any) -> str:
    return hashlib.blake2b(_json(value).encode("utf-8", errors="surrogatepass"), digest_size=12).hexdigest()


def _without_copies(sources: Iterable[Source]) -> list[tuple[Source, tuple[str, ...]]]:
    """Files of the same bytes once, with the paths of the others; the one with most samples stands for them."""
    by_digest: dict[str, list[Source]] = {}
    for source in sources:
        by_digest.setdefault(source.head.digest, []).append(source)
    result = []
    for same in by_digest.values():
        if len(same) > 1:
            same.sort(key=lambda source: (-sum(has for _, _, has in source.head.tasks), source.path))
        result.append((same[0], tuple(sorted(source.path for source in same[1:]))))
    return sorted(result, key=lambda item: item[0].path)


def _newest_first(item: tuple[TaskRecord, Run]) -> tuple[float, str]:
    date = item[1].date
    return (-date if date is not None else float("inf"), item[1].source)


# ------------------------------------------------------------------------------------------------------------ models


def _models(records: Sequence[ModelRecord]) -> tuple[list[str], tuple[Model, ...]]:
    """Id of each record's row, and the rows."""
    shas: dict[str, set[str]] = {}
    # Many files have the same record.
    key_of = {id(record): _model_key(record) for record in {id(record): record for record in records}.values()}
    keys = [key_of[id(record)] for record in records]
    for key, record in zip(keys, records, strict=True):
        if record.sha:
            shas.setdefault(key, set()).add(record.sha)
    ids: list[str] = []
    members: dict[str, list[ModelRecord]] = {}
    id_of: dict[tuple[str | None, ...], str] = {}
    for key, record in zip(keys, records, strict=True):
        # A branch may have moved; a run that was offline does not say where it stood.
        moved = (key, record.sha) if len(shas.get(key, ())) > 1 else (key,)
        if moved not in id_of:
            id_of[moved] = "m" + hashlib.sha256(json.dumps(moved).encode()).hexdigest()[:12]
        ids.append(id_of[moved])
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
        family=lab.run if lab is not None else family_of(first.name),
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


def _ordered(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Columns in their order, with labels."""
    labels = _labels(columns)
    return tuple(
        sorted(
            (replace(column, label=labels[column.id]) for column in columns),
            key=lambda column: (
                KINDS.index(column.kind),
                column.task,
                column.version,
                column.num_fewshot or 0,
                column.id,
            ),
        )
    )


def _column(identifier: str, record: ColumnRecord, runs: Sequence[tuple[TaskRecord, Run]]) -> Column:
    """A column, as yet without a label."""
    full = [task for task, _ in runs if task.limit is None]
    firsts = Counter(task.main_metrics[0] for task in full or [task for task, _ in runs])
    metric = min(firsts, key=lambda name: (-firsts[name], name))
    names = {name for task, _ in runs for name in task.metrics}
    lower = {name for task, _ in runs for name in task.lower_is_better}
    chances = Counter(task.chance for task in full or [task for task, _ in runs] if task.chance is not None)
    counts = [task.full_documents or (task.num_documents if task.limit is None else None) for task, _ in runs]
    shown_values = [run.metrics[metric] for _, run in runs if metric in run.metrics]
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
        label="",
        metric=metric,
        metrics=(metric, *sorted(names - {metric})),
        higher_is_better={name: name not in lower for name in sorted(names)},
        bounded=is_bounded(metric)
        # Some tasks give per cent under these names.
        and all(0 <= shown.value <= 1 for shown in shown_values if shown.value is not None),
        is_share=is_share(metric),
        chance=min(chances, key=lambda value: (-chances[value], value)) if chances else None,
        num_documents=_commonest(count for count in counts if count),
        settings=record.settings,
        lm_eval_versions=tuple(sorted({run.versions["lm_eval"] for _, run in runs if "lm_eval" in run.versions})),
    )


def _commonest(values: Iterable[int]) -> int | None:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], -value)) if counts else None


def _labels(columns: Iterable[Column]) -> dict[str, str]:
    """A heading for each column: its task, with what differs from other columns of the task; that it is of a sample always."""
    of_task: dict[str, list[Column]] = {}
    for column in columns:
        of_task.setdefault(column.task, []).append(column)
    labels: dict[str, str] = {}
    for task, same in of_task.items():
        traits = {column.id: _traits(column) for column in sorted(same, key=lambda column: column.id)}
        names = sorted({name for found in traits.values() for name in found}, key=_trait_order)
        telling = [
            name for name in names if name == "sample" or len({found.get(name) for found in traits.values()}) > 1
        ]
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


def _traits(column: Column) -> dict[str, str]:
    names = [prompt.name for prompt in column.prompts]
    traits = {
        "version": f"v{column.version}" if column.version else "",
        "prompts": names[0] if len(names) == 1 else f"{len(names)} prompts" if names else "",
        "shots": "" if column.num_fewshot is None else f"{column.num_fewshot}-shot",
        "chat": "chat" if column.chat else "",
        "features": column.features,
        "dataset": column.dataset,
        "kind": column.kind,
        "sample": "sample" if column.settings.get("sample") else "",
    }
    # Texts, such as prompts of lm_eval's own tasks, do not fit into a heading; the digits of the id tell them apart.
    return traits | {
        name: f"{name} {value}"
        for name, value in column.settings.items()
        if name not in traits and len(value) <= 24 and not name.startswith(("doc_to_", "process_", "description"))
    }


# ------------------------------------------------------------------------------------------------------------ scores


def _score(column: Column, model: str, runs: Sequence[tuple[TaskRecord, Run]]) -> Score:
    task, run = runs[0]
    metrics = run.metrics
    shown = metrics.get(column.metric, Metric(None, None))
    note = _counts_note(column, task)
    return Score(
        model=model,
        column=column.id,
        metrics=metrics,
        interval=None
        if shown.value is None
        else interval(shown.value, shown.stderr, task.num_documents, bounded=column.bounded, is_share=column.is_share),
        num_documents=task.num_documents,
        limit=task.limit,
        runs=tuple(run for _, run in runs),
        conflict=len(runs) > 1 and _differ([run.metrics for _, run in runs]),
        notes=(note, *task.notes) if note else tuple(task.notes),
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


def _counts_note(column: Column, task: TaskRecord) -> str | None:
    """Of a full run on another number of documents than most: the dataset has changed."""
    usual, found = column.num_documents, task.num_documents
    # How many windows a text has depends on the tokenizer.
    is_odd = task.limit is None and usual and found and usual != found and column.kind not in ("loss", "flatness")
    return f"evaluated on {found:,} documents, most others on {usual:,}" if is_odd else None


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
