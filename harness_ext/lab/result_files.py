"""Reads result files of lm_eval: which model was measured, and what came out.

Only what matching and its report need; files are the ordinary JSON that `lm_eval --output_path` writes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Measured", "ResultFile", "read_result_file", "read_result_files"]

_STEP = re.compile(r"(?:^|[/_-])step[_-]?0*(\d+)$")


class Measured(NamedTuple):
    """A value and its standard error, which is NaN where lm_eval gives none."""

    value: float
    stderr: float


@dataclass(frozen=True)
class ResultFile:
    """One run of lm_eval on one model.

    Attributes:
        path: The file.
        model: The model: path or Hub id, with `@revision`, and dtype and adapter where they are given.
        run: What checkpoints of one training run have in common: the path or id without the step.
        step: Training step, of a folder `step_N` or a revision `stepN`; None if neither says one.
        folder: `pretrained`, as given.
        num_parameters: As lm_eval counts; None if it does not say.
        results: Of each task, its metrics as lm_eval names them, such as `loss,none`.
        configs: Of each task, its configuration.
        num_documents: Of each task, the documents evaluated; None if the file does not say.
    """

    path: Path
    model: str
    run: str
    step: int | None
    folder: str
    num_parameters: int | None
    results: Mapping[str, Mapping[str, Any]]
    configs: Mapping[str, Mapping[str, Any]]
    num_documents: Mapping[str, int | None]

    def measured(self, task: str, metric: str) -> Measured | None:
        """A metric of a task with its error, of the filter `none` or else the first; None if there is no finite value."""
        of_task = self.results.get(task, {})
        filters = [key.partition(",")[2] for key in of_task if key.partition(",")[0] == metric]
        for name in sorted(filters, key=lambda name: name != "none")[:1]:
            suffix = f",{name}" if name else ""
            value, stderr = _number(of_task[metric + suffix]), _number(of_task.get(f"{metric}_stderr{suffix}"))
            if math.isfinite(value):
                return Measured(value, stderr)
        return None

    def tasks_with(self, metric: str) -> list[str]:
        """Tasks that have the metric."""
        return [task for task in self.results if self.measured(task, metric) is not None]

    def report(self, task: str) -> Mapping[str, Any]:
        """What the task found out about itself, `metadata.report`."""
        found = _mapping(_mapping(self.configs.get(task)).get("metadata")).get("report")
        return _mapping(found)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float:
    """lm_eval writes "N/A" for an error it has not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    return float(value)


def read_result_file(path: Path) -> ResultFile:
    """Read one file.

    Raises:
        ValueError: If it is no results JSON of lm_eval, or does not say which model it is of.
        OSError: If it cannot be read.
    """
    expected = f"{path}: expected a results JSON, as lm_eval --output_path writes it"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise ValueError(f"{expected}, found something else ({err}).") from err
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise ValueError(f"{expected}, found JSON without `results`.")
    config = _mapping(content.get("config"))
    arguments = _arguments(config.get("model_args"))
    pretrained = arguments.get("pretrained")
    if not pretrained:
        raise ValueError(
            f"{expected}, found no `pretrained` in config.model_args, which is {config.get('model_args')!r}."
        )
    folder = str(pretrained).rstrip("/") or "/"
    revision = str(arguments.get("revision") or "main")
    others = [str(arguments[name]) for name in ("dtype", "peft") if arguments.get(name)]
    model = folder + ("" if revision == "main" else f"@{revision}") + (f" ({', '.join(others)})" if others else "")
    of_folder, of_revision = _STEP.search(folder), _STEP.search(revision)
    step = of_revision or of_folder
    run = folder[: of_folder.start()] if of_folder else folder
    counts = _mapping(content.get("n-samples"))
    parameters = config.get("model_num_parameters")
    results = {str(task): _mapping(of_task) for task, of_task in content["results"].items()}
    return ResultFile(
        path=path,
        model=model,
        run=run.removesuffix("/checkpoints"),
        step=int(step.group(1)) if step else None,
        folder=folder,
        num_parameters=parameters if isinstance(parameters, int) and parameters > 0 else None,
        results=results,
        configs={str(task): _mapping(of_task) for task, of_task in _mapping(content.get("configs")).items()},
        num_documents={task: _mapping(counts.get(task)).get("effective") for task in results},
    )


def read_result_files(paths: Sequence[Path]) -> list[ResultFile]:
    """Read files, and all `results_*.json` under folders, sorted by path.

    Raises:
        ValueError: If a file is wrong, or there is none.
        OSError: If one cannot be read.
    """
    found: set[Path] = set()
    for path in paths:
        if path.is_dir():
            found.update(path.rglob("results_*.json"))
        else:
            found.add(path)
    if not found:
        where = ", ".join(map(str, paths)) or "no file was named"
        raise ValueError(f"{where}: expected results_*.json, as lm_eval --output_path FOLDER writes them, found none.")
    return [read_result_file(path) for path in sorted(found)]


def _arguments(given: Any) -> dict[str, Any]:
    """`model_args`, which older releases of lm_eval write as the string `key=value,…`."""
    if isinstance(given, Mapping):
        return dict(given)
    pairs = (item.partition("=") for item in str(given or "").split(","))
    return {key.strip(): value.strip() for key, _, value in pairs if value}
