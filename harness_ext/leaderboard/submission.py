"""Result files checked as CI checks them, and copied into the results folder under names that their content gives."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from harness_ext.leaderboard import samples as samples_module
from harness_ext.leaderboard import untrusted
from harness_ext.leaderboard.build import find_results
from harness_ext.leaderboard.read import (
    MAX_RESULT_BYTES,
    credentials,
    lab_of,
    model_arguments,
    read_results,
    result_record,
)
from harness_ext.leaderboard.records import FileRecord, Samples

__all__ = ["ALL", "MAX_SAMPLES_BYTES", "NONE", "Added", "Submission", "add", "check_kept", "results_of", "validate"]

MAX_SAMPLES_BYTES = 25_000_000
"""Of one file of samples as it is kept, which is a fraction of what lm_eval writes."""

ALL, NONE = "all", "none"
"""Whose samples are kept, instead of names of tasks."""


@dataclass(frozen=True)
class Submission:
    """A result file that may be added.

    Attributes:
        path: The file.
        record: What it says, with the samples that are to be kept.
        lab: lab.json of the model, if there is one.
        warnings: What a reviewer should look at.
    """

    path: Path
    record: FileRecord
    lab: Path | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Added:
    """A result file in the results folder.

    Attributes:
        path: The copy.
        samples: Bytes of the file of samples of each task.
    """

    path: Path
    samples: dict[str, int]


def results_of(path: Path) -> list[Path]:
    """The result files that a file has a part in: itself, or for samples and lab.json those of their folder and below it.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    if path.name == "lab.json" or path.name.endswith((".lab.json", ".jsonl")):
        return [found.path for found in find_results(path.parent)[0]]
    return [path]


def validate(path: Path, *, samples: str = ALL, look_in_model_folder: bool = False) -> Submission:
    """Check a result file.

    Args:
        path: As lm_eval --output_path writes it, with samples and lab.json beside it if there are any.
        samples: Of which tasks samples are kept: `ALL`, `NONE` (then the files are not read), or names and patterns such as
            `natural_*` with commas between them.
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
        record = _record(path, samples, lab)
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err
    if record.problems:
        raise ValueError(f"{path}: {'; '.join(record.problems)}")
    record = _with_samples_of(record, samples, path)
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


def _record(path: Path, samples: str, lab: Path | None) -> FileRecord:
    of_run = None if lab is None else lab_of(lab)
    if samples != NONE:
        return read_results(path, lab=of_run)
    found, data = untrusted.load_json(path, max_bytes=MAX_RESULT_BYTES)
    return result_record(found, digest=hashlib.sha256(data).hexdigest(), lab=of_run)


def _with_samples_of(record: FileRecord, samples: str, path: Path) -> FileRecord:
    """The record without the samples of tasks that are not named."""
    if samples in (ALL, NONE):
        return record
    patterns = [pattern.strip() for pattern in samples.split(",") if pattern.strip()]
    known = sorted({task.column.task for task in record.tasks if task.samples is not None})
    for pattern in patterns or [samples]:
        if not fnmatch.filter(known, pattern):
            raise ValueError(
                f"{path}: --samples {pattern}: expected {ALL}, {NONE} or tasks that have samples beside the file, found none "
                f"of the name; there are {', '.join(known[:20]) or 'no samples'}{', …' if len(known) > 20 else ''}"
            )
    tasks = tuple(
        task
        if any(fnmatch.fnmatchcase(task.column.task, pattern) for pattern in patterns)
        else replace(task, samples=None)
        for task in record.tasks
    )
    return replace(record, tasks=tasks)


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
        try:
            is_there = candidate.is_file()
        except OSError:  # a name longer than file systems take, or a folder that is closed to us
            return None
        return candidate if is_there and _is_of_a_run(candidate) else None
    return None


def _is_of_a_run(path: Path) -> bool:
    """Whether it is that of a checkpoint of the lab: `harness-ext quad train` writes a lab.json without run and language."""
    try:
        found, _ = untrusted.load_json(path, max_bytes=MAX_RESULT_BYTES)
    except ValueError:
        return True  # whose error says what is wrong with it
    return {"run", "language"} <= untrusted.mapping(found).keys()


def add(submissions: Sequence[Submission], results: Path) -> list[Added]:
    """Copy result files with their samples and lab.json into the results folder.

    A result file is copied byte by byte. Of samples what the leaderboard reads is kept; see `samples.thin_samples`. All are
    checked and written aside first, and nothing is there after an error in that; a result file comes after its samples.

    Returns:
        The copies. The same file always gets the same name, so that adding it again changes nothing, or adds samples.

    Raises:
        ValueError: If the same file is there under another name, its samples are too large, or it changed meanwhile.
        OSError: If a file cannot be read or written.
    """
    results.mkdir(parents=True, exist_ok=True)
    by_size: dict[int, list[Path]] = {}
    for other in find_results(results)[0]:
        by_size.setdefault(other.path.stat().st_size, []).append(other.path)
    aside = Path(tempfile.mkdtemp(prefix=".adding-", dir=results))
    try:
        made = []
        files: list[tuple[Path, Path]] = []
        for submission in submissions:
            target = _target(submission, results)
            content = _unchanged(submission)
            for other_path in by_size.get(len(content), ()):
                if other_path != target and other_path.read_bytes() == content:
                    raise ValueError(f"{submission.path}: the same file is there already, as {other_path}")
            sizes = {}
            beside = [(target, content)]
            if submission.lab is not None:
                beside.append((target.with_name(f"{target.stem}.lab.json"), submission.lab.read_bytes()))
            for task, source, thin in _thin(submission):
                sizes[task] = len(thin)
                # The name of the task is in the name of the file that was read, so it is safe in that of the copy.
                name = source.name.removesuffix(".jsonl").rpartition("_")[0]
                beside.append((target.with_name(f"{name}_{target.stem.removeprefix('results_')}.jsonl"), thin))
            for path, data in reversed(beside):
                files.append((aside / str(len(files)), path))
                files[-1][0].write_bytes(data)
            made.append(Added(target, sizes))
        for partial, path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.replace(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return made


def check_kept(submissions: Sequence[Submission], samples: Sequence[Path] = ()) -> None:
    """Check that samples in the results folder are as `add` keeps them: without prompts and answers, which nobody reads.

    Args:
        submissions: Result files in the folder.
        samples: Files that are to be samples of these.

    Raises:
        ValueError: If a file of samples holds anything else, or is of no task whose samples are read.
        OSError: If a file cannot be read.
    """
    read = set()
    for submission in submissions:
        for _, source, content in _thin(submission):
            read.add(source.resolve())
            if source.read_bytes() != content:
                raise ValueError(
                    f"{source}: expected samples as `harness-ext leaderboard add` keeps them, found other content. Add "
                    "the result file by that command, from the folder where lm_eval wrote it"
                )
    for path in samples:
        if path.is_symlink():
            raise ValueError(f"{path}: is a link; give the file itself")
        if path.resolve() not in read:
            raise ValueError(
                f"{path}: expected samples_TASK_DATE.jsonl beside results_DATE.json, of a task there that is compared by "
                "document; found no such task. Delete it"
            )


def _target(submission: Submission, results: Path) -> Path:
    date = submission.record.date
    stamp = "undated" if date is None else datetime.fromtimestamp(date, timezone.utc).strftime("%Y-%m-%dT%H-%M-%S")
    folder = results / _folder_name(submission.record.model.name)
    return folder / f"results_{stamp}-{submission.record.digest[:8]}.json"


def _unchanged(submission: Submission) -> bytes:
    content = submission.path.read_bytes()
    if hashlib.sha256(content).hexdigest() != submission.record.digest:
        raise ValueError(f"{submission.path}: was changed while it was read; try again")
    return content


def _thin(submission: Submission) -> Iterator[tuple[str, Path, bytes]]:
    """Task, file and content as it is kept of the samples beside a result file."""
    for task in submission.record.tasks:
        kept = task.samples
        if kept is None or not kept.file:
            continue
        source = submission.path.with_name(kept.file)
        try:
            content = samples_module.thin_samples(
                samples_module.samples_lines(source), kept.metrics, filter_name=kept.filter
            )
            again = _joined(content, kept)
        except ValueError as err:
            raise ValueError(f"{source}: {err}") from err
        if again != kept:
            raise ValueError(f"{source}: was changed while it was read; try again")
        if len(content) > MAX_SAMPLES_BYTES:
            raise ValueError(
                f"{source}: expected at most {MAX_SAMPLES_BYTES:,} bytes of samples as they are kept, found "
                f"{len(content):,}. Leave them out by --samples TASK,… with the names of the others"
            )
        yield task.column.task, source, content


def _joined(content: bytes, kept: Samples) -> Samples | None:
    lines = (untrusted.mapping(untrusted.parse_json(line)) for line in io.BytesIO(content))
    return samples_module.join_samples(lines, list(kept.metrics), filter_name=kept.filter, file=kept.file)


def _folder_name(model: str) -> str:
    """A folder's name for a model; names that had to be changed carry a hash, so that no two models share one."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "__", model).strip("._-")[:80]
    if plain == model:
        return plain
    return f"{plain or 'model'}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
