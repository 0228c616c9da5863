"""What is known of a prompt's dataset: its YAML and, in the local mirror, its first documents."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from harness_ext.prompts import Prompt
    from harness_ext.scaffold import DatasetConfig

__all__ = ["Facts", "find_config", "read_facts", "require_config"]


class Facts(NamedTuple):
    """What is known of a dataset.

    Attributes:
        config: What its YAML says; None for a prompt of no known dataset.
        columns: Its columns; None where they are not known.
        examples: Its first documents; none without a local mirror.
        source: Where that was found, for the user.
    """

    config: DatasetConfig | None = None
    columns: tuple[str, ...] | None = None
    examples: tuple[Mapping[str, Any], ...] = ()
    source: str = ""


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


def require_config(name: str) -> DatasetConfig:
    """Read the YAML of a dataset; see `find_config`.

    Raises:
        KeyError: If there is none; the message names those of the package.
    """
    from harness_ext import resources

    config = find_config(name)
    if config is None:
        known = ", ".join(sorted(path.parent.name for path in resources.task_configs_folder().glob("*/_dataset.yaml")))
        raise KeyError(f"unknown dataset {name!r}: neither one of {known} nor a folder with _dataset.yaml.")
    return config


def read_facts(prompt: Prompt, dataset: str | None, *, num_documents: int = 1) -> Facts:
    """Read what is known of a prompt's dataset.

    Without a mirror the columns are not known, beyond those that the YAML names: a prompt that uses others passes.

    Args:
        dataset: A name or a folder; None for the dataset that the prompt's own folder is named after.
        num_documents: Most documents wanted.

    Raises:
        KeyError: If there is no such dataset.
    """
    from harness_ext import resources, scaffold

    if dataset is not None:
        config = require_config(dataset)
    else:
        folder = resources.task_configs_folder() / prompt.path.resolve().parent.name
        if not (folder / "_dataset.yaml").is_file():
            return Facts()
        config = scaffold.read_dataset(folder)
    data = os.environ.get(scaffold.DATA_VARIABLE)
    mirror = scaffold.read_mirror(Path(data).expanduser() if data else None, config.dataset_path)
    for split in config.splits:
        if split in mirror:
            rows = tuple(islice(mirror[split].rows(), num_documents))
            if rows:
                return Facts(config, tuple(rows[0]), rows, f"{config.dataset_path}, {split} split of the local mirror")
    named = {config.text_column, config.label_column}
    columns = tuple(sorted(named)) if prompt.variables <= named else None
    return Facts(config, columns, (), config.dataset_path)
