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
from harness_ext.leaderboard.cache import Cache, cache_folder
from harness_ext.leaderboard.contracts import Board, Coefficient, Document, Unreadable
from harness_ext.leaderboard.read import lab_of, read_results
from harness_ext.leaderboard.records import ColumnRecord, FileRecord
from harness_ext.leaderboard.rows import Rows, Source, make_rows

__all__ = ["MOST_DOCUMENTS", "Found", "build_board", "find_results", "open_cache"]

MOST_DOCUMENTS = 400
"""Texts of a column that the comparison page can show."""

_MOST_TEXT = 300_000
"""Characters of them all."""


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
    """Find every `.json` below a folder, but for lab.json, in the order of their paths; links are listed and not followed.

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
    for entry in entries:
        path = Path(entry.path)
        shown = untrusted.name(path.relative_to(root).as_posix(), 500)
        if entry.is_symlink():
            if entry.name.endswith(".json"):
                yield Unreadable(shown, "is a link; links are not followed")
        elif entry.is_dir():
            yield from _walk(path, root, lab)
        elif entry.name in files and entry.name.endswith(".json") and not _is_lab_file(entry.name):
            own = files.get(f"{path.stem}.lab.json", lab)
            beside = of_date.get(path.stem.rpartition("_")[2], [])
            read = [entry, *beside, *([own] if own is not None else [])]
            stamp = json.dumps([[file.name, (status := file.stat()).st_size, status.st_mtime_ns] for file in read])
            yield Found(path, shown, None if own is None else Path(own.path), stamp)


def _is_lab_file(name: str) -> bool:
    return name == "lab.json" or name.endswith(".lab.json")


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
    for name in ("read", "records", "samples", "untrusted", "compare", "../correlation"):
        made.update((folder / f"{name}.py").read_bytes())
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
        record = read.record(file)
        if isinstance(record, str):
            refused.append(Unreadable(file.name, record))
        else:
            sources.append(Source(file.name, record))
            refused += [Unreadable(file.name, problem) for problem in record.problems]
    rows = make_rows(sources)
    documents = {
        column: tuple(read.documents(rows, column, {file.name: file for file in files})) for column in rows.vectors
    }
    groups = compare.groups_of_loss(rows.losses)
    correlations = compare.correlations(
        rows.columns, rows.scores, rows.losses, rows.flatness, groups, remembered=read.coefficients
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
        aggregates=compare.aggregates(rows.columns, rows.scores),
        unreadable=tuple(sorted(refused, key=lambda entry: (entry.source, entry.reason))),
        num_files=len(sources),
    )


class _Reading:
    """Reads files, or takes what the cache has of them."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._known = cache.all()
        self._changed: dict[str, tuple[str, str]] = {}
        self._used: set[str] = set()
        self._columns: dict[str, ColumnRecord] = {}
        for name, (stamp, text) in self._known.items():
            if name.startswith("column:"):
                self._columns[stamp] = ColumnRecord(**json.loads(text))

    def _take(self, name: str, stamp: str) -> str | None:
        self._used.add(name)
        known = self._known.get(name)
        return known[1] if known is not None and known[0] == stamp else None

    def _keep(self, name: str, stamp: str, value: Any) -> None:
        self._used.add(name)
        self._changed[name] = (stamp, json.dumps(value, ensure_ascii=False, separators=(",", ":")))

    def record(self, file: Found) -> FileRecord | str:
        """The record of a file, or why there is none."""
        name = f"file:{file.name}"
        text = self._take(name, file.stamp)
        if text is not None:
            found = json.loads(text)
            if isinstance(found, str):
                return found
            if all(task["column"] in self._columns for task in found["tasks"]):
                for task in found["tasks"]:
                    self._used.add(f"column:{task['column']}")
                return records.from_json(found, self._columns)
        try:
            lab = None if file.lab is None else lab_of(file.lab)
            record = read_results(file.path, lab=lab)
        except ValueError as err:
            reason = untrusted.name(str(err), 600)
            self._keep(name, file.stamp, reason)
            return reason
        except OSError as err:  # may be otherwise the next time
            return untrusted.name(f"cannot be read: {err.strerror or err}", 600)
        self._keep(name, file.stamp, records.to_json(record))
        for task in record.tasks:
            column = task.column
            if column.id not in self._columns:
                self._columns[column.id] = column
                self._keep(f"column:{column.id}", column.id, column.fields())
            self._used.add(f"column:{column.id}")
        return record

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
        text = self._take(cached, file.stamp)
        if text is not None:
            return [Document(*entry) for entry in json.loads(text)]
        found = samples.read_documents(samples.samples_lines(path), filter_name=filter_name)
        self._keep(cached, file.stamp, [list(asdict(document).values()) for document in found])
        return found

    def coefficients(self, made: str, make: Callable[[], Sequence[Coefficient]]) -> Sequence[Coefficient]:
        """Coefficients of what a text says is correlated; the bootstrap takes longer than all the rest of a build."""
        name = f"correlation:{hashlib.sha256(made.encode()).hexdigest()}"
        text = self._take(name, made)
        if text is not None:
            return [Coefficient(*entry) for entry in json.loads(text)]
        found = make()
        self._keep(name, made, [list(vars(entry).values()) for entry in found])
        return found

    def save(self) -> None:
        """Keep what is new, forget what was not asked for."""
        self._cache.update(self._changed, [name for name in self._known if name not in self._used])


def _bounded(documents: Iterable[Document]) -> Iterator[Document]:
    total = 0
    for document in documents:
        total += len(document.text) + len(document.target)
        if total > _MOST_TEXT:
            return
        yield document
