"""One result file checked as CI checks it, and copied into the results folder under a name that its content gives."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness_ext.leaderboard import samples as samples_module
from harness_ext.leaderboard import untrusted
from harness_ext.leaderboard.build import find_results
from harness_ext.leaderboard.read import MAX_RESULT_BYTES, credentials, lab_of, model_arguments, read_results
from harness_ext.leaderboard.records import FileRecord

__all__ = ["MAX_SAMPLES_BYTES", "Submission", "add", "results_of", "validate"]

MAX_SAMPLES_BYTES = 25_000_000
"""Of one file of samples as it is kept, which is a fraction of what lm_eval writes."""

_KEPT = ("doc_id", "target", "filter", "doc_hash", "prompt_hash", "target_hash")


@dataclass(frozen=True)
class Submission:
    """A result file that may be added.

    Attributes:
        path: The file.
        record: What it says.
        lab: lab.json of the model, if there is one.
        warnings: What a reviewer should look at.
    """

    path: Path
    record: FileRecord
    lab: Path | None
    warnings: tuple[str, ...]


def results_of(path: Path) -> list[Path]:
    """The result files that a file has a part in: itself, or for samples and lab.json those of their folder and below it.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    if path.name == "lab.json" or path.name.endswith((".lab.json", ".jsonl")):
        return [found.path for found in find_results(path.parent)[0]]
    return [path]


def validate(path: Path, *, look_in_model_folder: bool = False) -> Submission:
    """Check a result file.

    Args:
        path: As lm_eval --output_path writes it, with samples and lab.json beside it if there are any.
        look_in_model_folder: Whether to look for lab.json in the model folder that the file names, too. Only for one's own
            files: anyone may have written the name.

    Raises:
        ValueError: If it cannot go on the leaderboard; the message names the file.
        OSError: If it cannot be read.
    """
    if path.is_symlink():
        raise ValueError(f"{path}: is a link; give the file itself")
    lab = _lab(path, look_in_model_folder)
    try:
        record = read_results(path, lab=None if lab is None else lab_of(lab))
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err
    if record.problems:
        raise ValueError(f"{path}: {'; '.join(record.problems)}")
    held = credentials(untrusted.load_json(path, max_bytes=MAX_RESULT_BYTES)[0])
    if held:
        raise ValueError(
            f"{path}: seems to hold credentials, and what is added is public: {', '.join(held[:6])}"
            f"{', …' if len(held) > 6 else ''}. Delete these entries from the file, and the name and password from addresses; "
            "give lm_eval credentials by environment variables"
        )
    if record.model.name == "unnamed":
        raise ValueError(f"{path}: names no model; run lm_eval with --model_args pretrained=NAME")
    warnings = []
    limited = sorted({task.column.task for task in record.tasks if task.limit is not None})
    if limited:
        warnings.append(f"limited runs are hidden by default: {', '.join(limited)}")
    without = sorted(
        task.column.task
        for task in record.tasks
        if task.samples is None and task.column.kind not in ("loss", "flatness")
    )
    if without:
        warnings.append(f"without samples (--log_samples) models cannot be compared by document: {', '.join(without)}")
    if record.model.dtype is None:
        warnings.append("the file does not say in which dtype the model ran")
    if record.date is None:
        warnings.append("the file has no date")
    return Submission(path, record, lab, tuple(warnings))


def _lab(path: Path, look_in_model_folder: bool) -> Path | None:
    """lab.json beside the result file, or in the model's folder on this machine."""
    for beside in (path.with_name(f"{path.stem}.lab.json"), path.with_name("lab.json")):
        if beside.is_file() and not beside.is_symlink():
            return beside
    if not look_in_model_folder:
        return None
    try:
        found, _ = untrusted.load_json(path, max_bytes=MAX_RESULT_BYTES)
    except ValueError:
        return None
    config = untrusted.mapping(untrusted.mapping(found).get("config"))
    folder = model_arguments(config.get("model_args")).get("pretrained")
    if folder is not None and "\0" not in folder:
        candidate = Path(folder).expanduser() / "lab.json"
        return candidate if candidate.is_file() and _is_of_a_run(candidate) else None
    return None


def _is_of_a_run(path: Path) -> bool:
    """Whether it is that of a checkpoint of the lab: `harness-ext quad train` writes a lab.json without run and language."""
    try:
        found, _ = untrusted.load_json(path, max_bytes=MAX_RESULT_BYTES)
    except ValueError:
        return True  # whose error says what is wrong with it
    return {"run", "language"} <= untrusted.mapping(found).keys()


def add(submission: Submission, results: Path) -> Path:
    """Copy a result file with its samples and lab.json into the results folder.

    The file is copied byte by byte. Of samples what the leaderboard reads is kept: not the prompts and answers, and of a
    document its text.

    Returns:
        The copy. The same file always gets the same name, so that adding it again changes nothing.

    Raises:
        ValueError: If the same file is there under another name, or its samples are too large.
    """
    digest = submission.record.digest
    date = submission.record.date
    stamp = "undated" if date is None else datetime.fromtimestamp(date, timezone.utc).strftime("%Y-%m-%dT%H-%M-%S")
    suffix = f"{stamp}-{digest[:8]}"
    target = results / _folder_name(submission.record.model.name) / f"results_{suffix}.json"
    results.mkdir(parents=True, exist_ok=True)
    for other in find_results(results)[0]:
        same_size = other.path.stat().st_size == submission.path.stat().st_size
        if same_size and other.path != target and hashlib.sha256(other.path.read_bytes()).hexdigest() == digest:
            raise ValueError(f"{submission.path}: the same file is there already, as {other.path}")
    target.parent.mkdir(parents=True, exist_ok=True)
    for task in submission.record.tasks:
        samples = task.samples
        if samples is None or not samples.file:
            continue
        source = submission.path.with_name(samples.file)
        # The name of the task is in the name of the file that was read, so it is safe in that of the copy.
        name = source.name.removeprefix("samples_").removesuffix(".jsonl").rpartition("_")[0]
        content = _slim(source, task.samples.filter if task.samples else "none")
        if len(content) > MAX_SAMPLES_BYTES:
            raise ValueError(
                f"{source}: expected at most {MAX_SAMPLES_BYTES:,} bytes of samples, found {len(content):,}"
            )
        _write(target.with_name(f"samples_{name}_{suffix}.jsonl"), content)
    if submission.lab is not None:
        shutil.copyfile(submission.lab, target.with_name(f"{target.stem}.lab.json"))
    _write(target, submission.path.read_bytes())
    return target


def _folder_name(model: str) -> str:
    """A folder's name for a model; names that had to be changed carry a hash, so that no two models share one."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "__", model).strip("._-")[:80]
    if plain == model:
        return plain
    return f"{plain or 'model'}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def _slim(path: Path, filter_name: str) -> bytes:
    """Samples of one filter without prompts and answers, by doc_id."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for sample in samples_module.samples_lines(path):
        if sample.get("filter", filter_name) != filter_name:
            continue
        kept = {key: sample[key] for key in _KEPT if key in sample} | {"doc_hash": samples_module.doc_hash(sample)}
        numbers = {
            key: value for key, value in sample.items() if key not in kept and isinstance(value, bool | int | float)
        }
        rows.append(
            (int(sample["doc_id"]), kept | {"doc": {"text": samples_module.document_text(sample.get("doc"))}} | numbers)
        )
    rows.sort(key=lambda row: row[0])
    return b"".join(json.dumps(row, ensure_ascii=True, sort_keys=True).encode() + b"\n" for _, row in rows)


def _write(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)
