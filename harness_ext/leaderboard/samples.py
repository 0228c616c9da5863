"""samples_*.jsonl of lm_eval: which documents a model got right.

A document is known by lm_eval's doc_hash, the SHA-256 of its JSON, of which 12 digits are kept; the same document met again in
a task is "#2", "#3", … in the order of doc_id, so that repetitions pair up too. Files before lm_eval 0.4.3 have no hash: it is
made here by the same rule.

lm_eval keeps of each document its prompt, the model's answers and all that a metric is made of. `thin_samples` keeps what
this module reads, in the same format, so that a results folder can hold it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness_ext.leaderboard import untrusted
from harness_ext.leaderboard.contracts import ALPHABET, Document
from harness_ext.leaderboard.records import Samples

__all__ = [
    "MAX_DOCUMENTS",
    "doc_hash",
    "document_text",
    "join_samples",
    "read_documents",
    "sample_files",
    "samples_lines",
    "thin_samples",
]

MAX_DOCUMENTS = 200_000
MAX_LINE_BYTES = 8_000_000
TEXT_CHARACTERS = 600
TARGET_CHARACTERS = 120

_SHORT_FIELD = 20
"""Characters below which a field of a document is more likely a label or a name than text to read."""


_NO_METRICS = {"doc", "doc_hash", "doc_id", "filter", "target"}
"""Fields of a sample that mean something else, whatever a task calls its metrics."""


def sample_files(result: Path, task: str) -> Path | None:
    """The samples of a task beside a result file, which have the same date in their name; None if there are none.

    lm_eval writes results_DATE.json with samples_TASK_DATE.jsonl, and NAME_DATE.json where --output_path ends in .json.
    """
    date = (
        result.stem.removeprefix("results_") if result.stem.startswith("results_") else result.stem.rpartition("_")[2]
    )
    # Task names come from the file; one with a separator cannot be a file of this folder.
    if not date or any(character in task for character in "/\\\0"):
        return None
    name = f"samples_{task}_{date}.jsonl"
    # Asked of every task of every file, so first without making a path.
    if len(name) > 255 or not os.path.isfile(f"{result.parent}/{name}"):
        return None
    path = result.parent / name
    return None if path.is_symlink() else path


def samples_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file, one JSON object a line; lm_eval 0.4.0 wrote one list.

    Raises:
        ValueError: If a line is too long or no JSON object.
        OSError: If the file cannot be read.
    """
    with path.open("rb") as stream:
        for count, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"line {count}: expected at most {MAX_LINE_BYTES:,} bytes, found more")
            if count == 1 and line.strip() == b"[":
                rest = line + stream.read(16 * MAX_LINE_BYTES)
                found = untrusted.parse_json(rest)
                yield from (sample for sample in found if isinstance(sample, dict))
                return
            if not line.strip():
                continue
            try:
                sample = untrusted.parse_json(line)
            except ValueError as err:
                raise ValueError(f"line {count}: {err}") from err
            if not isinstance(sample, dict):
                raise ValueError(f"line {count}: expected a JSON object, found {type(sample).__name__}")
            yield sample


def join_samples(
    samples: Iterable[Mapping[str, Any]], metrics: Sequence[str], *, filter_name: str, file: str
) -> Samples | None:
    """Reduce samples to right and wrong by document.

    Args:
        samples: As `samples_lines` gives them, in any order.
        metrics: Names that may be wanted; those that are a number for every document are kept.
        filter_name: lm_eval's filter whose samples count; files before 0.4.5 do not name it.
        file: For `Samples.file`.

    Returns:
        None if there are no samples of the filter, or no metric of them is a number for each.

    Raises:
        ValueError: If a document is there twice, or has neither hash nor content, or there are more than `MAX_DOCUMENTS`.
    """
    metrics = [metric for metric in metrics if metric not in _NO_METRICS]
    rows: dict[int, tuple[str, list[float | None]]] = {}
    for doc_id, sample in _of_filter(samples, filter_name):
        rows[doc_id] = (doc_hash(sample), [untrusted.number(sample.get(metric)) for metric in metrics])
    keyed = sorted(
        (key, values) for key, (_, values) in _numbered({doc_id: row[0] for doc_id, row in rows.items()}, rows)
    )
    found: dict[str, list[Any]] = {}
    for place, metric in enumerate(metrics):
        column = [values[place] for _, values in keyed]
        values = sorted({value for value in column if value is not None})
        if column and None not in column and len(values) <= len(ALPHABET):
            code = {value: ALPHABET[number] for number, value in enumerate(values)}
            found[metric] = [values, "".join(code[value] for value in column if value is not None)]
    return Samples([key for key, _ in keyed], found, file, filter_name) if found else None


def read_documents(samples: Iterable[Mapping[str, Any]], *, filter_name: str) -> list[Document]:
    """Text and gold answer of each document, sorted by key; see `Document`."""
    hashes: dict[int, str] = {}
    rows: dict[int, tuple[str, str]] = {}
    for sample in samples:
        doc_id = untrusted.whole_number(sample.get("doc_id"))
        if doc_id is not None and sample.get("filter", filter_name) == filter_name:
            hashes[doc_id] = doc_hash(sample)
            rows[doc_id] = (document_text(sample.get("doc")), untrusted.text(sample.get("target"), TARGET_CHARACTERS))
    return sorted(
        (Document(key, text, target) for key, (text, target) in _numbered(hashes, rows)),
        key=lambda document: document.key,
    )


def thin_samples(samples: Iterable[Mapping[str, Any]], metrics: Iterable[str], *, filter_name: str) -> bytes:
    """What `join_samples` and `read_documents` read of samples, as a file that they read the same from.

    A line has doc_id, doc_hash in full, the filter where it is not "none", the metrics, and target and text cut as
    `read_documents` cuts them.

    Args:
        samples: As `samples_lines` gives them, in any order.
        metrics: Names that are kept, where they are numbers.
        filter_name: The filter that is kept.

    Returns:
        JSON lines in the order of doc_id. The same for the same samples; that of thin samples is what they are.

    Raises:
        ValueError: As `join_samples`.
    """
    names = sorted(set(metrics) - _NO_METRICS)
    lines: dict[int, bytes] = {}
    for doc_id, sample in _of_filter(samples, filter_name):
        numbers = {name: untrusted.number(sample.get(name)) for name in names}
        kept = {name: number for name, number in numbers.items() if number is not None} | {
            "doc": {"text": document_text(sample.get("doc"))},
            "doc_hash": doc_hash(sample),
            "doc_id": doc_id,
            "target": untrusted.text(sample.get("target"), TARGET_CHARACTERS),
        }
        if filter_name != "none":
            kept["filter"] = filter_name
        line = json.dumps(kept, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
        lines[doc_id] = line.encode("utf-8") + b"\n"
    return b"".join(lines[doc_id] for doc_id in sorted(lines))


def _of_filter(samples: Iterable[Mapping[str, Any]], filter_name: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """doc_id and sample of those of the filter; files before lm_eval 0.4.5 do not name it.

    Raises:
        ValueError: If a document has no number or is there twice, or there are more than `MAX_DOCUMENTS`.
    """
    met: set[int] = set()
    for sample in samples:
        if sample.get("filter", filter_name) != filter_name:
            continue
        doc_id = untrusted.whole_number(sample.get("doc_id"))
        if doc_id is None:
            raise ValueError(f"doc_id is {sample.get('doc_id')!r}, expected the number of a document")
        if doc_id in met:
            raise ValueError(f"document {doc_id} is there twice")
        if len(met) >= MAX_DOCUMENTS:
            raise ValueError(f"expected at most {MAX_DOCUMENTS:,} documents, found more")
        met.add(doc_id)
        yield doc_id, sample


def _numbered(hashes: Mapping[int, str], rows: Mapping[int, Any]) -> Iterator[tuple[str, Any]]:
    """Key and row of each document, in the order of doc_id, repetitions numbered."""
    met: dict[str, int] = {}
    for doc_id in sorted(rows):
        digest = hashes[doc_id][:12]
        met[digest] = met.get(digest, 0) + 1
        yield (digest if met[digest] == 1 else f"{digest}#{met[digest]}"), rows[doc_id]


def doc_hash(sample: Mapping[str, Any]) -> str:
    """lm_eval's hash of a sample's document, made here where the file has none.

    Raises:
        ValueError: If the document is not there either.
    """
    given = sample.get("doc_hash")
    if isinstance(given, str) and len(given) == 64 and all(digit in "0123456789abcdef" for digit in given):
        return given
    if sample.get("doc") is None:
        raise ValueError(f"document {sample.get('doc_id')} has neither doc_hash nor doc")
    made = json.dumps(sample["doc"], indent=2, ensure_ascii=False)
    return hashlib.sha256(made.encode("utf-8", errors="replace")).hexdigest()


def document_text(doc: Any) -> str:
    """What to show of a document: its fields of a document that are text to read, or its longest one."""
    if not isinstance(doc, dict):
        return untrusted.text(doc, TEXT_CHARACTERS)
    fields = [value for value in doc.values() if isinstance(value, str)]
    texts = [value for value in fields if len(value) >= _SHORT_FIELD] or [max(fields, key=len, default="")]
    return untrusted.text("\n".join(texts), TEXT_CHARACTERS)
