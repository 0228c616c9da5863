"""What is known of a prompt's dataset: its YAML and, in the local mirror or a folder of the lab, its first documents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from harness_ext.prompts import Prompt
    from harness_ext.scaffold import DatasetConfig, MirrorSplit

__all__ = ["Facts", "data_folders", "find_config", "read_facts", "require_config"]

_OWN = "harness_ext/"
"""Datasets of synthetic languages, which the folder of a model brings along, with prompts for them."""

_LABEL_NAMES = "label_text"


class Facts(NamedTuple):
    """What is known of a dataset.

    Attributes:
        config: What its YAML says, and the classes that its data name; None for a prompt of no known dataset.
        columns: Its columns; None where they are not known.
        examples: Its first documents; none where there are no data.
        source: Where that was found, for the user.
    """

    config: DatasetConfig | None = None
    columns: tuple[str, ...] | None = None
    examples: tuple[Mapping[str, Any], ...] = ()
    source: str = ""


def data_folders(model: str | None, prompt: Path | None = None) -> tuple[Path, ...]:
    """Return the folders of data that there are, in the order in which the tasks look a dataset up.

    Args:
        model: A model that may be a folder of the lab, with `data/` in it.
        prompt: A prompt's file, which may be `data/prompts/<dataset>/<name>.jinja` of such a folder.
    """
    from harness_ext import scaffold

    mirror = os.environ.get(scaffold.DATA_VARIABLE)
    folders = [Path(mirror).expanduser()] if mirror else []
    if model is not None:
        folders.append(Path(model).expanduser() / "data")
    if prompt is not None and prompt.resolve().parents[1].name == "prompts":
        folders.append(prompt.resolve().parents[2])
    return tuple(folder for folder in folders if folder.is_dir())


def find_config(name: str) -> DatasetConfig | None:
    """Read the YAML of a dataset of the package, or of a folder with `_dataset.yaml`; None if there is none.

    Raises:
        ValueError: If it is malformed.
    """
    from harness_ext import resources, scaffold

    for folder in (resources.task_configs_folder() / name, Path(name).expanduser()):
        if (folder / "_dataset.yaml").is_file():
            return scaffold.read_dataset(folder)
    return None


def require_config(name: str, folders: Sequence[Path] = ()) -> DatasetConfig:
    """Read the YAML of a dataset, and the names of its classes from its data where the YAML has none; see `find_config`.

    Args:
        name: A name or a folder.
        folders: Of data, see `data_folders`.

    Raises:
        KeyError: If there is none; the message names those of the package.
    """
    from harness_ext import resources

    config = find_config(name)
    if config is None:
        known = ", ".join(sorted(path.parent.name for path in resources.task_configs_folder().glob("*/_dataset.yaml")))
        raise KeyError(f"unknown dataset {name!r}: neither one of {known} nor a folder with _dataset.yaml.")
    return config if config.classes else replace(config, classes=_classes_of_data(config, folders))


def _find_data(config: DatasetConfig, folders: Sequence[Path]) -> tuple[Path | None, dict[str, MirrorSplit]]:
    """The first folder that has the dataset, and its splits."""
    from harness_ext import scaffold

    # A model's folder has nothing to say about datasets of others.
    is_own, mirror = config.dataset_path.startswith(_OWN), data_folders(None)
    for folder in folders if is_own else mirror:
        splits = scaffold.read_mirror(folder, config.dataset_path)
        if splits:
            return folder, splits
    return None, {}


def _classes_of_data(config: DatasetConfig, folders: Sequence[Path]) -> tuple[str, ...]:
    """What `label_text` calls the labels 0 … K - 1; () where it does not name all of them."""
    _, splits = _find_data(config, folders)
    for split in config.splits:
        if split in splits:
            names = {row.get(config.label_column): row.get(_LABEL_NAMES) for row in splits[split].rows()}
            if names.keys() == set(range(len(names))) and None not in names.values():
                return tuple(str(names[label]) for label in range(len(names)))
    return ()


def read_facts(prompt: Prompt, dataset: str | None, *, num_documents: int = 1, folders: Sequence[Path] = ()) -> Facts:
    """Read what is known of a prompt's dataset.

    Without data the columns are not known, beyond those that the YAML names: a prompt that uses others passes.

    Args:
        dataset: A name or a folder; None for the dataset that the prompt's own folder is named after.
        num_documents: Most documents wanted.
        folders: Of data, see `data_folders`.

    Raises:
        KeyError: If there is no such dataset.
    """
    from harness_ext import resources

    if dataset is not None:
        config = require_config(dataset, folders)
    else:
        folder = resources.task_configs_folder() / prompt.path.resolve().parent.name
        if not (folder / "_dataset.yaml").is_file():
            return Facts()
        config = require_config(folder.name, folders)
    data, splits = _find_data(config, folders)
    for split in config.splits:
        if split in splits:
            rows = tuple(islice(splits[split].rows(), num_documents))
            if rows:
                where = f"of {data}" if config.dataset_path.startswith(_OWN) else "of the local mirror"
                return Facts(config, tuple(rows[0]), rows, f"{config.dataset_path}, {split} split {where}")
    named = {config.text_column, config.label_column}
    columns = tuple(sorted(named)) if prompt.variables <= named else None
    return Facts(config, columns, (), config.dataset_path)
