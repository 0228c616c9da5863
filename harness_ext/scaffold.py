"""The folders of the datasets: reads them, and writes that of a new one.

    task_configs/<name>/_dataset.yaml             which data, which columns, which classes, which prompt
    task_configs/<name>/<evaluator>_<name>.yaml   one for each file of task_configs/_evaluators/
    prompts/<name>/*.jinja                        its prompts

lm_eval reads the same YAMLs by itself; here they are read without it, so that listing tasks is quick.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

__all__ = [
    "DATA_VARIABLE",
    "DatasetConfig",
    "MirrorSplit",
    "NewDataset",
    "evaluator_descriptions",
    "evaluator_names",
    "plan_dataset",
    "read_dataset",
    "read_datasets",
    "read_mirror",
    "write_dataset",
]

DATA_VARIABLE = "HARNESS_EXT_DATA"
"""Environment variable that names the local mirror: a folder of `<org>/<name>/<split>.jsonl` or `.parquet`."""

FIRST_PROMPT = "category"
"""Name of the prompt that a new dataset starts with."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_COLUMN = re.compile(r"[^\W\d]\w*", re.ASCII)
_HELD_OUT = ("validation", "dev", "valid")
_MAX_CLASSES = 100  # more distinct strings than this in the label column: it is no label
_MAX_ROWS = 200_000  # of a split that is read for its labels
# Words that mean something else in a template.
_RESERVED = frozenset(("and", "caller", "dict", "else", "false", "if", "in", "is", "label_words", "loop", "namespace"))
_RESERVED |= frozenset(("none", "not", "or", "range", "self", "super", "true", "False", "None", "True"))
_EVALUATORS = "_evaluators"


@dataclass(frozen=True)
class DatasetConfig:
    """What `_dataset.yaml` and its neighbours say.

    Attributes:
        name: Name of the folder.
        dataset_path: Id on the Hub, also the path in the local mirror.
        config_name: Which of the dataset's configurations on the Hub; None where it has one.
        splits: The splits that it names, training split first.
        text_column: The column of the document.
        label_column: The column of the label.
        classes: Class names, in the order of the labels; none where they are what the data call the labels.
        prompt: Id of the default prompt.
        tasks: The tasks of the folder, sorted.
    """

    name: str
    dataset_path: str
    config_name: str | None
    splits: tuple[str, ...]
    text_column: str
    label_column: str
    classes: tuple[str, ...]
    prompt: str | None
    tasks: tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """Reads `!function a.b.c` as the string `a.b.c`, without importing it."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


def evaluator_names(configs: Path) -> tuple[str, ...]:
    """Return the evaluators that `configs/_evaluators/` has, sorted."""
    return tuple(sorted(path.stem for path in (configs / _EVALUATORS).glob("*.yaml")))


def evaluator_descriptions(configs: Path) -> dict[str, str]:
    """Return what each evaluator does by its name, sorted: the comment that its YAML begins with, "" without one."""
    result = {}
    for name in evaluator_names(configs):
        lines = (configs / _EVALUATORS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        comment = takewhile(lambda line: line.startswith("#"), lines)
        result[name] = " ".join(line.lstrip("#").strip() for line in comment)
    return result


def read_datasets(configs: Path) -> dict[str, DatasetConfig]:
    """Return every dataset of a task_configs folder by name, sorted."""
    return {path.parent.name: read_dataset(path.parent) for path in sorted(configs.glob("*/_dataset.yaml"))}


def read_dataset(folder: Path) -> DatasetConfig:
    """Read `folder/_dataset.yaml` and the names of the tasks beside it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no YAML mapping or lacks a key.
    """
    path = folder / "_dataset.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file. `harness-ext tasks new` writes one.")
    config = _read_yaml(path)
    missing = [key for key in ("dataset_path", "doc_to_text", "doc_to_target") if key not in config]
    if missing:
        raise ValueError(f"{path}: no {', '.join(missing)}. Compare task_configs/sst/_dataset.yaml.")
    classes = config.get("doc_to_choice", [])
    if not isinstance(classes, list):
        raise ValueError(f"{path}: doc_to_choice is {classes!r}; expected the list of class names.")
    splits = (config.get(f"{part}_split") for part in ("training", "validation", "test"))
    tasks = (_read_yaml(task).get("task") for task in folder.glob("*.yaml") if task != path)
    return DatasetConfig(
        name=folder.resolve().name,
        dataset_path=str(config["dataset_path"]),
        config_name=None if config.get("dataset_name") is None else str(config["dataset_name"]),
        splits=tuple(split for split in splits if split),
        text_column=str(config["doc_to_text"]),
        label_column=str(config["doc_to_target"]),
        classes=tuple(str(name) for name in classes),
        prompt=(config.get("metadata") or {}).get("prompt"),
        tasks=tuple(sorted(task for task in tasks if isinstance(task, str))),
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as err:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(err).split())}.") from err
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a mapping, found {type(config).__name__}.")
    return config


# ------------------------------------------------------------------------------------------------- the local mirror


class MirrorSplit(NamedTuple):
    """One file of the local mirror."""

    name: str
    path: Path

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield its rows.

        Raises:
            ValueError: If a line is no JSON object.
        """
        if self.path.suffix == ".parquet":
            import pyarrow.parquet

            for batch in pyarrow.parquet.ParquetFile(self.path).iter_batches():
                yield from batch.to_pylist()
            return
        with self.path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as err:
                    raise ValueError(f"{self.path}, line {number}: not JSON ({err}).") from err
                if not isinstance(row, dict):
                    raise ValueError(f"{self.path}, line {number}: expected a JSON object, found {type(row).__name__}.")
                yield row


def read_mirror(mirror: Path | None, dataset_path: str) -> dict[str, MirrorSplit]:
    """Return the splits that the local mirror has of a dataset, by name; {} without a mirror or without the dataset."""
    if mirror is None:
        return {}
    folder = mirror / dataset_path
    files = [path for suffix in (".parquet", ".jsonl") for path in sorted(folder.glob(f"*{suffix}"))]
    return {path.stem: MirrorSplit(path.stem, path) for path in files}


# ------------------------------------------------------------------------------------------------- a new dataset


class NewDataset(NamedTuple):
    """What is about to be written.

    Attributes:
        files: Path -> text.
        folders: The folders that must not exist yet.
        tasks: Names of the tasks.
        prompt: Id of the first prompt.
    """

    files: dict[Path, str]
    folders: tuple[Path, ...]
    tasks: tuple[str, ...]
    prompt: str


def plan_dataset(
    name: str,
    dataset_path: str,
    *,
    configs: Path,
    prompts: Path,
    evaluators: Path,
    mirror: Path | None = None,
    config_name: str | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    classes: Sequence[str] | None = None,
    train_split: str | None = None,
    test_split: str | None = None,
) -> NewDataset:
    """Work out the files of a new dataset; nothing is written.

    What is not given is read off the local mirror, where that has the dataset.

    Args:
        name: Short name, such as `sst`.
        dataset_path: Id on the Hub, such as `SetFit/sst2`.
        configs: The task_configs folder to write to.
        prompts: The prompts folder to write to.
        evaluators: The task_configs folder that has `_evaluators/`; those that `configs` lacks are copied.
        mirror: The local mirror.
        config_name: Which of the dataset's configurations, where the Hub has several.

    Raises:
        FileExistsError: If the dataset exists.
        ValueError: If a name is malformed, or something is neither given nor found, or they disagree.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: expected lower-case letters, digits and _, a letter first, such as 'sst5'.")
    if not _HUB_ID.fullmatch(dataset_path) or ".." in dataset_path:
        raise ValueError(f"dataset {dataset_path!r}: expected an id of the Hub, such as 'SetFit/sst2'.")
    folders = (configs / name, prompts / name)
    for folder in folders:
        if folder.exists():
            raise FileExistsError(f"{folder} exists, and nothing is overwritten. Choose another name or remove it.")

    splits = read_mirror(mirror, dataset_path)
    train = _choose_split("train", train_split, ("train",), splits)
    rows = list(islice(splits[train].rows(), _MAX_ROWS)) if train in splits else []
    if train in splits and not rows:
        raise ValueError(f"{splits[train].path} is empty.")
    text = _choose_text_column(text_column, rows)
    label = _choose_label_column(label_column, text, rows)
    class_names = _choose_classes(classes, label, rows)
    test = _choose_split("test", test_split, ("test", *_HELD_OUT), splits, label=label)
    held_out = next((split for split in _HELD_OUT if split in splits and split not in (train, test)), None)
    if train == test:
        raise ValueError(f"split {train!r} for training and for testing: a probe would be tested on what it learnt.")

    prompt = f"{name}/{FIRST_PROMPT}"
    dataset = {
        "dataset_path": dataset_path,
        "dataset_name": config_name,
        "training_split": train,
        "validation_split": held_out,
        "test_split": test,
        "fewshot_split": train,
        "doc_to_text": text,
        "doc_to_target": label,
        "doc_to_choice": class_names,
    }
    text_of_yaml = _to_yaml({key: value for key, value in dataset.items() if value is not None}) + (
        f"metadata:\n  version: 1.0\n  prompt: {prompt}\n"
        "  # For probe_subset: make it a dozen words that the task is about, best of one token each.\n"
        f"  subset_words: {_to_yaml(_first_subset_words(class_names))}"
    )
    names = evaluator_names(evaluators)
    files = {configs / name / "_dataset.yaml": text_of_yaml}
    for evaluator in names:
        task = f"{evaluator}_{name}"
        files[configs / name / f"{task}.yaml"] = (
            f"include: [_dataset.yaml, ../{_EVALUATORS}/{evaluator}.yaml]\ntask: {task}\n"
        )
        shared = configs / _EVALUATORS / f"{evaluator}.yaml"
        if not shared.exists():
            files[shared] = (evaluators / _EVALUATORS / f"{evaluator}.yaml").read_text(encoding="utf-8")
    # JSON's strings, lists and objects are Jinja's literals too.
    words = json.dumps({class_name: [class_name] for class_name in class_names}, ensure_ascii=False)
    files[prompts / name / f"{FIRST_PROMPT}.jinja"] = (
        f"{{%- set label_words = {words} -%}}\n{{{{ {text} }}}}\nCategory:\n"
    )
    return NewDataset(files, folders, tuple(f"{evaluator}_{name}" for evaluator in names), prompt)


def write_dataset(new: NewDataset) -> None:
    """Write the files. Each folder appears with all its files or not at all, and none is overwritten.

    Raises:
        FileExistsError: If a folder of the dataset has come to exist.
        OSError: If a file cannot be written.
    """
    for path, text in new.files.items():
        if path.parent not in new.folders:  # a shared evaluator
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    done: list[Path] = []
    try:
        for folder in new.folders:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
                inside = Path(scratch) / folder.name
                inside.mkdir()
                for path, text in new.files.items():
                    if path.parent == folder:
                        (inside / path.name).write_text(text, encoding="utf-8")
                if folder.exists():
                    raise FileExistsError(f"{folder} exists, and nothing is overwritten.")
                os.rename(inside, folder)
            done.append(folder)
    except OSError:
        for folder in done:
            shutil.rmtree(folder)
        raise


def _first_subset_words(class_names: Sequence[str]) -> list[str]:
    """Return the label words of the first prompt, which are the class names, and these as they stand within a sentence."""
    within_sentences = [name.lower() for name in class_names if name.isalpha()]
    return list(dict.fromkeys([*class_names, *within_sentences]))


def _to_yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000)


def _choose_split(
    what: str, given: str | None, usual: Sequence[str], splits: Mapping[str, MirrorSplit], *, label: str | None = None
) -> str:
    known = ", ".join(sorted(splits))
    if given is not None:
        if splits and given not in splits:
            raise ValueError(f"--{what}-split {given!r}: the local mirror has {known}.")
        return given
    if not splits:
        return usual[0]
    for split in usual:
        if split in splits and (label is None or _has_labels(splits[split], label)):
            return split
    wanted = " or ".join(usual)
    raise ValueError(f"no labelled {wanted} split in the local mirror, which has {known}. Give --{what}-split.")


def _has_labels(split: MirrorSplit, label: str) -> bool:
    """Say whether any of the first rows has a label: hidden test labels are -1 or null."""
    return any(row.get(label) not in (None, -1) for row in islice(split.rows(), 100))


def _choose_text_column(given: str | None, rows: Sequence[Mapping[str, Any]]) -> str:
    if rows:
        strings = [name for name, value in rows[0].items() if isinstance(value, str)]
        if given is not None and given not in rows[0]:
            raise ValueError(f"--text-column {given!r}: the columns are {', '.join(rows[0])}.")
        if given is None and not strings:
            raise ValueError(f"no column of strings among {', '.join(rows[0])}. Give --text-column.")
        head = rows[:100]
        given = given or max(strings, key=lambda name: sum(len(str(row.get(name, ""))) for row in head))
    column = given or "text"
    if not _COLUMN.fullmatch(column) or column in _RESERVED:
        raise ValueError(f"column {column!r} cannot be written as a variable of a template. Rename it in the data.")
    return column


def _choose_label_column(given: str | None, text: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return given or "label"
    columns = ", ".join(rows[0])
    if given is not None:
        if given not in rows[0]:
            raise ValueError(f"--label-column {given!r}: the columns are {columns}.")
        return given
    others = [name for name in rows[0] if name != text]
    for name in ("label", "labels", "class", "target", *others):
        if name in others and _looks_like_labels([row.get(name) for row in rows]):
            return name
    raise ValueError(f"no column looks like a label among {columns}. Give --label-column.")


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _looks_like_labels(values: Sequence[Any]) -> bool:
    return all(_is_scalar(value) for value in values) and 2 <= len(set(values)) <= min(_MAX_CLASSES, len(values) - 1)


def _choose_classes(given: Sequence[str] | None, label: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = [name.strip() for name in given or ()]
    if given is not None:
        if len(names) < 2 or not all(names) or len(set(names)) < len(names):
            raise ValueError(f"--classes {','.join(given)}: expected two or more distinct names, as negative,positive.")
        if not rows:
            return names
    if not rows:
        raise ValueError(
            f"the class names are needed: --classes a,b,… in the order of the labels 0, 1, …, or all values of column "
            f"{label!r} if those are strings. (A local mirror, {DATA_VARIABLE}, would be read for them.)"
        )
    values: list[Any] = [row.get(label) for row in rows]
    if not all(_is_scalar(value) for value in values) or len({type(value) for value in values}) > 1:
        kinds = ", ".join(sorted({type(value).__name__ for value in values}))
        raise ValueError(f"column {label!r} has values of type {kinds}; expected whole numbers 0, 1, … or class names.")
    found = sorted(set(values))
    if isinstance(found[0], str):
        if names and set(names) != set(found):
            raise ValueError(f"--classes {','.join(names)}: the values of column {label!r} are {', '.join(found)}.")
        return names or _as_classes(found, label)
    if found[0] < 0:
        raise ValueError(f"column {label!r} has the label {found[0]} in the training split: some labels are hidden.")
    if names:
        if found != list(range(len(names))):
            shown = ", ".join(str(value) for value in found[:12])
            raise ValueError(f"--classes names {len(names)} classes; the labels in column {label!r} are {shown}.")
        return names
    return _names_from_text(label, rows, found)


def _names_from_text(label: str, rows: Sequence[Mapping[str, Any]], found: Sequence[int]) -> list[str]:
    """Read the names of the labels 0, 1, … off the column that spells them, as SetFit's datasets have it."""
    column = f"{label}_text"
    names = {row[label]: row[column] for row in rows if isinstance(row.get(column), str)}
    if list(found) != list(range(len(found))) or sorted(names) != list(found) or not all(names.values()):
        shown = ", ".join(str(value) for value in found[:12])
        raise ValueError(
            f"labels {shown} in column {label!r} have no names. Give --classes a,b,… in the order 0, 1, …."
        )
    return _as_classes([names[value].strip() for value in found], label)


def _as_classes(names: Sequence[str], label: str) -> list[str]:
    if not 2 <= len(names) <= _MAX_CLASSES or len(set(names)) < len(names) or not all(name.strip() for name in names):
        shown = ", ".join(repr(name) for name in names[:8])
        raise ValueError(
            f"column {label!r} gives {len(names)} class names, {shown}; expected 2 to {_MAX_CLASSES} distinct ones. "
            "Give --label-column."
        )
    return list(names)
