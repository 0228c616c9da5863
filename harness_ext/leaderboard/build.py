"""A folder of result files as a board: find the files, read those that are new, join, compare.

The board depends on the bytes of the files and their paths below the folder, and on nothing else: not on the order of the
files, the clock, the locale, or what the cache holds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness_ext import __version__
from harness_ext.leaderboard import compare, records, samples, untrusted
from harness_ext.leaderboard.cache import Cache, Kept, cache_folder
from harness_ext.leaderboard.contracts import Board, Coefficient, Document, Unreadable
from harness_ext.leaderboard.read import lab_of, read_results
from harness_ext.leaderboard.records import ColumnRecord, FileRecord, ModelRecord
from harness_ext.leaderboard.rows import Head, Rows, Source, head_of, make_rows

__all__ = ["MOST_DOCUMENTS", "Found", "build_board", "find_results", "open_cache"]

MOST_DOCUMENTS = 400
"""Texts of a column that the comparison page can show."""

_MOST_TEXT = 300_000
"""Characters of them all."""

_PURE = ("correlation", "loss_groups", "parameter_names")
"""Modules beside this package that it computes with."""

_HEADS = "heads"
"""Name in the cache of models, and of [stamp, digest, place of its model, tasks, problems] by file; see `rows.Head`."""

_LAB_FILES = ("lab.json", "plan.json", "groups.json")
"""What the lab writes beside the results of its models; lm_eval never writes files of these names."""


@dataclass(frozen=True)
class Found:
    """A result file.

    Attributes:
        path: Where it is.
        name: Its path below the folder, with `/`, for people.
        lab: lab.json of its model; None without.
        stamp: Sizes and times of change of the file, its samples and lab.json.
    """

    path: Path
    name: str
    lab: Path | None
    stamp: str


def find_results(root: Path) -> tuple[list[Found], list[Unreadable]]:
    """Find every `.json` below a folder, but for the lab's own, in the order of their paths; links are listed and not followed.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: expected a folder of result files, as lm_eval --output_path writes them")
    found: list[Found] = []
    refused: list[Unreadable] = []
    for entry in _walk(root, root, None):
        if isinstance(entry, Found):
            found.append(entry)
        else:
            refused.append(entry)
    return sorted(found, key=lambda file: file.name), sorted(refused, key=lambda entry: entry.source)


def _walk(folder: Path, root: Path, lab: os.DirEntry[str] | None) -> Iterator[Found | Unreadable]:
    with os.scandir(folder) as listing:
        entries = sorted((entry for entry in listing if not entry.name.startswith(".")), key=lambda entry: entry.name)
    files = {entry.name: entry for entry in entries if entry.is_file(follow_symlinks=False)}
    lab = files.get("lab.json", lab)
    of_date: dict[str, list[os.DirEntry[str]]] = {}
    for name, entry in files.items():
        if name.startswith("samples_") and name.endswith(".jsonl"):
            of_date.setdefault(name.removesuffix(".jsonl").rpartition("_")[2], []).append(entry)
    above = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    for entry in entries:
        name = entry.name
        shown = untrusted.name(f"{above}{name}", 500)
        if name in files:
            if name.endswith(".json") and not _is_lab_file(name):
                stem = name.removesuffix(".json")
                own = files.get(f"{stem}.lab.json", lab)
                read = [entry, *of_date.get(stem.rpartition("_")[2], ()), *([own] if own is not None else ())]
                stamp = repr([(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in read])
                yield Found(folder / name, shown, None if own is None else Path(own.path), stamp)
        elif entry.is_symlink():
            if name.endswith(".json"):
                yield Unreadable(shown, "is a link; links are not followed")
        elif entry.is_dir():
            yield from _walk(Path(entry.path), root, lab)


def _is_lab_file(name: str) -> bool:
    return name in _LAB_FILES or name.endswith(".lab.json")


def open_cache(root: Path) -> Cache:
    """The cache of a folder of result files."""
    folder = cache_folder()
    digest = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return Cache(None if folder is None else folder / f"{digest}.sqlite", _version_of_code())


@functools.cache
def _version_of_code() -> str:
    """Changes whenever the code does of which the cache keeps results."""
    made = hashlib.sha256(f"{__version__}, {records.FORMAT}".encode())
    folder = Path(__file__).parent
    for path in (*sorted(folder.glob("*.py")), *(folder.parent / f"{name}.py" for name in _PURE)):
        made.update(path.read_bytes())
    return made.hexdigest()


def build_board(root: Path, cache: Cache) -> Board:
    """Read all result files below a folder and join them.

    Args:
        root: The folder; it may hold no result file.
        cache: What earlier builds have read; what is new is added to it.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    files, refused = find_results(root)
    read = _Reading(cache)
    sources: list[Source] = []
    for file in files:
        source = read.source(file)
        if isinstance(source, str):
            refused.append(Unreadable(file.name, source))
        else:
            sources.append(source)
            refused += [Unreadable(file.name, problem) for problem in read.problems(file)]
    rows = read.rows(sources)
    documents = {
        column: tuple(read.documents(rows, column, {file.name: file for file in files})) for column in rows.vectors
    }
    groups = compare.groups_of_loss(rows.losses)
    main = compare.main_values(rows.columns, rows.scores)
    correlations = compare.correlations(
        rows.models,
        rows.columns,
        rows.scores,
        rows.losses,
        rows.flatness,
        groups,
        remembered=read.coefficients,
        main=main,
    )
    read.save()
    return Board(
        models=rows.models,
        columns=rows.columns,
        scores=rows.scores,
        limited=rows.limited,
        losses=rows.losses,
        flatness=rows.flatness,
        document_sets=rows.document_sets,
        vectors=rows.vectors,
        documents=documents,
        groups=groups,
        correlations=correlations,
        aggregates=compare.aggregates(rows.columns, rows.scores, main=main),
        unreadable=tuple(sorted(refused, key=lambda entry: (entry.source, entry.reason))),
        num_files=len(sources),
        stamps={name: f"{stamp} {_version_of_code()}" for name, stamp in rows.stamps.items()},
    )


class _Reading:
    """Reads files, or takes what the cache has of them."""

    def __init__(self, cache: Cache) -> None:
        self._kept = Kept(cache)
        self._columns: dict[str, ColumnRecord] = {}
        text = self._kept.take(_HEADS, "")
        models, self._known_heads = ([], {}) if text is None else json.loads(text)
        # Files of one model share it, so that it is made and compared once.
        self._known_models = [ModelRecord(**model) for model in models]
        self._heads: dict[str, list[Any]] = {}
        self._models: dict[int, int] = {}
        self._model_records: list[ModelRecord] = []

    def source(self, file: Found) -> Source | str:
        """A file as a source, whose record is read when it is first asked for; or why there is none."""
        self._kept.use(f"file:{file.name}")
        known = self._known_heads.get(file.name)
        if known is None or known[0] != file.stamp:
            record = self._record(file)
            if isinstance(record, str):
                return record
            head = head_of(record)
            place = self._place_of(head.model)
            self._heads[file.name] = [
                file.stamp,
                head.digest,
                place,
                list(map(list, head.tasks)),
                list(record.problems),
            ]
            return Source(file.name, record, head=head, stamp=file.stamp)
        _, digest, place, tasks, problems = known
        model = self._known_models[place]
        self._heads[file.name] = [file.stamp, digest, self._place_of(model), tasks, problems]
        for column, _, _ in tasks:
            self._kept.use(f"column:{column}")
        head = Head(digest, model, tasks)
        return Source(file.name, lambda: self._again(file), head=head, stamp=file.stamp)

    def _place_of(self, model: ModelRecord) -> int:
        place = self._models.setdefault(id(model), len(self._model_records))
        if place == len(self._model_records):
            self._model_records.append(model)
        return place

    def problems(self, file: Found) -> Sequence[str]:
        """What could not be used of a file that could."""
        return self._heads[file.name][4]

    def _again(self, file: Found) -> FileRecord:
        record = self._record(file)
        if isinstance(record, str):
            raise ValueError(f"{file.path}: has changed while the leaderboard was built ({record}); build it again")
        return record

    def _record(self, file: Found) -> FileRecord | str:
        """The record of a file, or why there is none."""
        name = f"file:{file.name}"
        text = self._kept.take(name, file.stamp)
        if text is not None:
            found = json.loads(text)
            if isinstance(found, str):
                return found
            columns = {task["column"]: self._column(task["column"]) for task in found["tasks"]}
            if None not in columns.values():
                return records.from_json(found, columns)  # type: ignore[arg-type]
        try:
            lab = None if file.lab is None else lab_of(file.lab)
            record = read_results(file.path, lab=lab)
        except (ValueError, RecursionError) as err:
            reason = untrusted.name(str(err), 600)
            self._keep(name, file.stamp, reason)
            return reason
        except OSError as err:  # may be otherwise the next time
            return untrusted.name(f"cannot be read: {err.strerror or err}", 600)
        self._keep(name, file.stamp, records.to_json(record))
        for task in record.tasks:
            if self._column(task.column.id) is None:
                self._columns[task.column.id] = task.column
                self._keep(f"column:{task.column.id}", task.column.id, task.column.fields())
        return record

    def _column(self, identifier: str) -> ColumnRecord | None:
        if identifier not in self._columns:
            text = self._kept.take(f"column:{identifier}", identifier)
            if text is None:
                return None
            self._columns[identifier] = ColumnRecord(**json.loads(text))
        return self._columns[identifier]

    def _keep(self, name: str, stamp: str, value: Any) -> None:
        self._kept.keep(name, stamp, json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    def rows(self, sources: Iterable[Source]) -> Rows:
        """Join sources, of what has changed."""
        return make_rows(sources, memory=self._kept)

    def documents(self, rows: Rows, column: str, files: dict[str, Found]) -> Iterable[Document]:
        """Texts of the documents on which models disagree, from as few samples files as have them all."""
        vectors, sets = rows.vectors[column], rows.document_sets[column]
        wanted = set(compare.disagreements(vectors, sets, MOST_DOCUMENTS))
        found: dict[str, Document] = {}
        for vector in sorted(
            vectors, key=lambda vector: (-len(sets[vector.documents]), rows.sources[column, vector.model])
        ):
            if wanted.isdisjoint(sets[vector.documents]) or wanted <= found.keys():
                continue
            result, name, filter_name = rows.sources[column, vector.model]
            if name:
                for document in self._texts(files[result], name, filter_name):
                    if document.key in wanted:
                        found.setdefault(document.key, document)
        return _bounded(sorted(found.values(), key=lambda document: document.key))

    def _texts(self, file: Found, name: str, filter_name: str) -> Sequence[Document]:
        path = file.path.with_name(name)
        cached = f"texts:{file.name}:{name}:{filter_name}"
        text = self._kept.take(cached, file.stamp)
        if text is not None:
            return [Document(*entry) for entry in json.loads(text)]
        found = samples.read_documents(samples.samples_lines(path), filter_name=filter_name)
        self._keep(cached, file.stamp, [list(asdict(document).values()) for document in found])
        return found

    def coefficients(self, made: str, make: Callable[[], Sequence[Coefficient]]) -> Sequence[Coefficient]:
        """Coefficients of what a text says is correlated; the bootstrap takes longer than all the rest of a build."""
        digest = hashlib.sha256(made.encode()).hexdigest()
        text = self._kept.take(f"correlation:{digest}", digest)
        if text is not None:
            return [Coefficient(*entry) for entry in json.loads(text)]
        found = make()
        self._keep(f"correlation:{digest}", digest, [list(vars(entry).values()) for entry in found])
        return found

    def save(self) -> None:
        """Keep what is new, forget what was not asked for."""
        if self._heads != self._known_heads:
            self._keep(_HEADS, "", [[vars(model) for model in self._model_records], self._heads])
        self._kept.save()


def _bounded(documents: Iterable[Document]) -> Iterator[Document]:
    total = 0
    for document in documents:
        total += len(document.text) + len(document.target)
        if total > _MOST_TEXT:
            return
        yield document
