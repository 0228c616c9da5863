"""Runs lm_eval on model folders, each in a process of its own, as a user would from the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Evaluation", "evaluate_all", "find_results", "link_data"]

BATCH_SIZE = 64
_SHOWN_LINES = 15


@dataclass(frozen=True)
class Evaluation:
    """One model to evaluate.

    Attributes:
        name: Of the folder of its results.
        model: Its folder, as the results are to call it: relative to the folder in which lm_eval runs.
        tasks: Names of tasks.
        model_args: Further arguments of the model.
        metadata: Options of the tasks, lm_eval's `--metadata`.
        log_samples: Whether to keep `samples_*.jsonl` beside the result file, lm_eval's `--log_samples`.
    """

    name: str
    model: str
    tasks: Sequence[str]
    model_args: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    log_samples: bool = False


def find_results(folder: Path, name: str) -> Path | None:
    """Return the newest result file of a model under `folder/<name>`, or None."""
    found = sorted((folder / name).rglob("results_*.json"))
    return found[-1] if found else None


def evaluate_all(
    evaluations: Sequence[Evaluation], *, where: Path, out: Path, workers: int, threads: int, what: str = "Evaluating"
) -> dict[str, Path]:
    """Evaluate models that have no result file yet, or lack samples that are asked for, several at a time.

    Args:
        evaluations: What to evaluate.
        where: Folder in which lm_eval runs.
        out: Folder of the results, `<out>/<name>/…/results_*.json`; lm_eval's messages are in `<out>/<name>.log`.
        workers: Processes at a time.
        threads: CPU threads of each.
        what: Text of the progress bar.

    Returns:
        Result files by name.

    Raises:
        RuntimeError: If lm_eval failed or wrote no results; the others have been finished.
    """
    from tqdm.auto import tqdm

    out.mkdir(parents=True, exist_ok=True)
    missing = [evaluation for evaluation in evaluations if not _is_done(evaluation, out)]
    failures: list[str] = []
    with (
        ThreadPoolExecutor(max(1, workers)) as pool,
        tqdm(total=len(evaluations), initial=len(evaluations) - len(missing), desc=what, unit="model") as bar,
    ):
        for failure in pool.map(lambda evaluation: _evaluate(evaluation, where, out, threads), missing):
            bar.update()
            if failure is not None:
                failures.append(failure)
    if failures:
        raise RuntimeError("\n".join(failures))
    results = {evaluation.name: find_results(out, evaluation.name) for evaluation in evaluations}
    return {name: path for name, path in results.items() if path is not None}


def _is_done(evaluation: Evaluation, out: Path) -> bool:
    found = find_results(out, evaluation.name)
    return found is not None and (not evaluation.log_samples or any(found.parent.glob("samples_*.jsonl")))


def link_data(source: Path, target: Path) -> None:
    """Give a checkpoint the data of its language, as hard links where the file system has them."""
    from harness_ext.lab.checkpoints import whole_folder

    if target.is_dir():
        return

    def link(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    with whole_folder(target) as folder:
        shutil.copytree(source, folder, copy_function=link, dirs_exist_ok=True)


def _evaluate(evaluation: Evaluation, where: Path, out: Path, threads: int) -> str | None:
    """Return what went wrong, or None; what was found out is there as a whole or not at all."""
    from harness_ext.lab.checkpoints import whole_folder

    log = out / f"{evaluation.name}.log"
    try:
        with whole_folder(out / evaluation.name) as folder:
            status = _run_lm_eval(evaluation, where, folder, log, threads)
            if status != 0 or not any(folder.rglob("results_*.json")):
                last = (
                    log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()[-_SHOWN_LINES:]
                )
                raise RuntimeError(
                    f"{evaluation.name}: lm_eval ended with status {status}; its last lines, of {log}:\n"
                    + "\n".join(last)
                )
    except RuntimeError as err:
        return str(err)
    return None


def _run_lm_eval(evaluation: Evaluation, where: Path, folder: Path, log: Path, threads: int) -> int:
    """Return the exit status."""
    arguments = {"pretrained": evaluation.model, **evaluation.model_args}
    command = [sys.executable, "-m", "harness_ext", "run", "--model", "hf", "--batch_size", str(BATCH_SIZE)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", ",".join(evaluation.tasks), "--output_path", str(folder.resolve())]
    if evaluation.metadata:
        command += ["--metadata", json.dumps(evaluation.metadata)]
    if evaluation.log_samples:
        command.append("--log_samples")
    # A model's own data, whatever mirror the user has, and no store: every prompt is asked once.
    hidden = ("HARNESS_EXT_DATA", "HARNESS_EXT_PROMPTS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HARNESS_EXT_CACHE": "off",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w", encoding="utf-8") as file:
        return subprocess.run(
            command, cwd=where, env=environment, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        ).returncode
