"""Folders of checkpoints: ordinary Hugging Face models with a `lab.json`, and what a training needs to go on.

A folder appears under its name only when all is written, so whatever moment a process is killed at, a folder that is there
is whole.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "LAB_FILE",
    "SCHEMA_VERSION",
    "Checkpoint",
    "Estimate",
    "find_checkpoints",
    "is_free",
    "load_state",
    "read_checkpoint",
    "remove_leftovers",
    "save",
    "save_state",
    "whole_folder",
    "without_bars",
    "write_record",
    "write_whole",
]

LAB_FILE = "lab.json"
SCHEMA_VERSION = 2
"""Of `lab.json`."""

_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "numpy")
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.(?P<ending>partial|replaced)")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class Estimate(NamedTuple):
    """A mean in nats per token and its standard error over documents."""

    value: float
    stderr: float


@dataclass(frozen=True)
class Checkpoint:
    """A model of a run of the lab, as its `lab.json` tells.

    Attributes:
        folder: The Hugging Face folder.
        run: Name of the run.
        seed: Of the run.
        algorithm: Name of the algorithm.
        objective: "cross_entropy" or "quad".
        step: Optimizer steps taken.
        tokens_seen: In training.
        num_parameters: Tied ones once.
        language_sha256: Of the language's tables: losses compare only within one language.
        excess: Mean of KL(p*(.|s) || p(.|s)) over the validation text; exact but for the choice of text.
        validation_loss: Cross-entropy on that text.
        model: Architecture and sizes.
    """

    folder: Path
    run: str
    seed: int
    algorithm: str
    objective: str
    step: int
    tokens_seen: int
    num_parameters: int
    language_sha256: str
    excess: Estimate
    validation_loss: Estimate
    model: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Run and step."""
        return f"{self.run}-{self.step:08d}"


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers from a progress bar for each small model that is read or written."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write into, which takes the name `folder`, and the place of what is there, when all is written.

    Whatever stops the block leaves `folder` as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = (
        folder.with_name(f".{folder.name}.{os.getpid()}.{ending}") for ending in ("partial", "replaced")
    )
    for left in (partial, replaced):
        shutil.rmtree(left, ignore_errors=True)
    try:
        partial.mkdir()
        yield partial
        if folder.exists():
            # Not one step: killed between the two, the old folder is hidden and the new one not yet there.
            folder.rename(replaced)
        partial.rename(folder)
    finally:
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        for left in (partial, replaced):
            shutil.rmtree(left, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file that is there as a whole or not at all; its folder is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def is_free(folder: Path) -> bool:
    """Whether nothing is at a path, or a folder with nothing but what a process that was killed left half-written."""
    return not folder.exists() or (
        folder.is_dir() and all(_LEFTOVER.fullmatch(path.name) is not None for path in folder.iterdir())
    )


def remove_leftovers(folder: Path) -> None:
    """Delete what processes that were killed left half-written under a folder, by `whole_folder` and `write_whole`.

    What belongs to a process that runs on this machine stays, as does what was being replaced and has no successor: that gets
    its name back.
    """
    for path in sorted(folder.rglob(".*")):
        found = _LEFTOVER.fullmatch(path.name)
        if found is None or not path.exists() or _is_running(int(found["process"])):
            continue
        target = path.with_name(found["name"])
        if found["ending"] == "replaced" and not target.exists():
            path.rename(target)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except OSError:
        return True  # that of another user
    return True


def save(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Write an ordinary Hugging Face folder with its `lab.json`.

    Args:
        folder: Made if it does not exist; see `whole_folder`.
        model: Saved as safetensors.
        tokenizer: Saved beside it.
        record: See `write_record`.

    Returns:
        What `lab.json` holds.
    """
    with without_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return write_record(folder, record)


def write_record(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write `record`, of JSON types and dataclasses, as `lab.json` with a schema version and package versions.

    Returns:
        What the file holds.
    """
    versions = {package: version(package) for package in _PACKAGES}
    text = json.dumps({"schema_version": SCHEMA_VERSION, **record, "versions": versions}, indent=2, default=_to_json)
    (folder / LAB_FILE).write_text(text + "\n", encoding="utf-8")
    return json.loads(text)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the `lab.json` of a folder.

    Raises:
        FileNotFoundError: If the folder has no `lab.json` or no weights.
        ValueError: If the record is of another kind or version.
    """
    path = folder / LAB_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file. Name a checkpoint of `harness-ext lab run`, or its folder.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:
        raise ValueError(
            f"{path}: expected JSON ({err}). Make the checkpoint anew with `harness-ext lab run`."
        ) from err
    found = record.get("schema_version") if isinstance(record, dict) else None
    if found != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, found {found!r}. Make the checkpoint anew with this version."
        )
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise FileNotFoundError(
            f"{folder}: has {LAB_FILE} and no weights; expected {' or '.join(_WEIGHTS)}. Copy the whole folder, or delete it "
            "and run `harness-ext lab run` again."
        )
    try:
        return Checkpoint(
            folder=folder,
            run=str(record["run"]),
            seed=int(record["seed"]),
            algorithm=str(record["algorithm"]["name"]),
            objective=str(record["objective"]),
            step=int(record["step"]),
            tokens_seen=int(record["tokens_seen"]),
            num_parameters=int(record["model"]["num_parameters"]),
            language_sha256=str(record["language"]["sha256"]),
            excess=_estimate(record["excess"]),
            validation_loss=_estimate(record["validation_loss"]),
            model=dict(record["model"]),
        )
    except (KeyError, TypeError, ValueError) as err:
        found = f"no {err}" if isinstance(err, KeyError) else str(err)
        raise ValueError(
            f"{path}: expected the record of a checkpoint of `harness-ext lab run`, found {found}. Make the checkpoint anew."
        ) from err


def find_checkpoints(folder: Path) -> list[Checkpoint]:
    """Read all checkpoints under a folder, sorted by run and step.

    Raises:
        FileNotFoundError: If there is none.
        ValueError, FileNotFoundError: As `read_checkpoint` raises them.
    """
    hidden = [path for path in folder.rglob(LAB_FILE) if path.is_file()]
    folders = [
        path.parent for path in hidden if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not folders:
        raise FileNotFoundError(
            f"{folder}: expected checkpoints, folders with a {LAB_FILE}, found none. Make some with `harness-ext lab run`."
        )
    found = [read_checkpoint(path) for path in folders]
    return sorted(found, key=lambda checkpoint: (checkpoint.run, checkpoint.step))


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write what `Trainer.state` returned as `folder/<step>`, and delete older ones.

    Tensors are safetensors and the rest JSON, so that reading runs no code.
    """
    from safetensors.torch import save_file

    optimizer = state["optimizer"]
    tensors = {f"model.{name}": value for name, value in _apart(state["model"]).items()}
    scalars: dict[str, dict[str, Any]] = {}
    for index, values in optimizer["state"].items():
        for name, value in values.items():
            if hasattr(value, "dtype"):
                tensors[f"optimizer.{index}.{name}"] = value.detach().cpu().contiguous()
            else:
                scalars.setdefault(str(index), {})[name] = value
    target = folder / f"{state['step']:08d}"
    with whole_folder(target) as partial:
        save_file(tensors, partial / "tensors.safetensors")
        text = json.dumps({"step": state["step"], "scalars": scalars, "groups": optimizer["param_groups"]})
        (partial / "state.json").write_text(text, encoding="utf-8")
    for other in _states(folder):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)


def load_state(folder: Path) -> dict[str, Any] | None:
    """Read the newest state that `save_state` wrote, or return None if there is none."""
    from safetensors.torch import load_file

    found = _states(folder)
    if not found:
        return None
    tensors = load_file(found[-1] / "tensors.safetensors")
    rest = json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))
    memory: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in rest["scalars"].items()}
    model = {}
    for name, value in tensors.items():
        kind, _, key = name.partition(".")
        if kind == "model":
            model[key] = value
        else:
            index, _, field = key.partition(".")
            memory.setdefault(int(index), {})[field] = value
    for group in rest["groups"]:
        # JSON has no tuples, and torch compares them.
        group |= {key: tuple(value) for key, value in group.items() if key == "betas"}
    return {"step": rest["step"], "model": model, "optimizer": {"state": memory, "param_groups": rest["groups"]}}


def _apart(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Copies, as safetensors takes no two names of one tensor (a tied head)."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}


def _states(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.isdigit() and path.is_dir())


def _estimate(values: Mapping[str, Any]) -> Estimate:
    estimate = Estimate(float(values["value"]), float(values["stderr"]))
    if not all(math.isfinite(value) for value in estimate):
        raise ValueError(f"{estimate}, where numbers are finite")
    return estimate


def _to_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{LAB_FILE} cannot hold a {type(value).__name__}: {value!r}")
