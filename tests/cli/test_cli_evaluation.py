"""lm_eval, started once for each model; here replaced by a process that writes what it was asked for."""

from __future__ import annotations

import json
import subprocess
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness_ext.cli import evaluation, main
from harness_ext.cli.evaluation import Evaluation, evaluate_all
from harness_ext.cli.lab import run as lab_run
from harness_ext.lab import checkpoints


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the processes that were started."""
    commands: list[list[str]] = []

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(list(command))
        folder = Path(command[command.index("--output_path") + 1]) / "model"
        folder.mkdir(parents=True)
        (folder / f"results_{len(commands)}.json").write_text(json.dumps({"run": len(commands)}))
        if "--log_samples" in command:
            (folder / f"samples_natural_{len(commands)}.jsonl").write_text("{}\n")
        return subprocess.CompletedProcess(command, 0)

    faked = types.SimpleNamespace(run=run, STDOUT=subprocess.STDOUT, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(evaluation, "subprocess", faked)
    return commands


def evaluate(folder: Path, *names: str, log_samples: bool) -> dict[str, int]:
    """Content of the result files by the models' names."""
    evaluations = [Evaluation(name, name, ["natural"], log_samples=log_samples) for name in names]
    found = evaluate_all(evaluations, where=folder, out=folder / "results", workers=1, threads=1)
    return {name: json.loads(path.read_text())["run"] for name, path in found.items()}


def test_samples_are_kept_where_they_are_asked_for(started: list[list[str]], tmp_path: Path) -> None:
    assert evaluate(tmp_path, "a", log_samples=False) == {"a": 1}
    assert "--log_samples" not in started[0]
    assert not list(tmp_path.rglob("samples_*"))
    # A model without samples is evaluated again, in the place of what there was, and one with samples is left alone.
    assert evaluate(tmp_path, "a", "b", log_samples=True) == {"a": 2, "b": 3}
    assert all("--log_samples" in command for command in started[1:])
    assert evaluate(tmp_path, "a", "b", log_samples=True) == {"a": 2, "b": 3}
    assert evaluate(tmp_path, "a", "b", log_samples=False) == {"a": 2, "b": 3}
    assert len(started) == 3
    assert sorted(path.name for path in (tmp_path / "results").rglob("*_*.json*")) == [
        "results_2.json",
        "results_3.json",
        "samples_natural_2.jsonl",
        "samples_natural_3.jsonl",
    ]


@pytest.mark.parametrize("option", [None, "--log_samples", "--log-samples"])
def test_lab_run_passes_the_option_on(option: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = types.SimpleNamespace(
        name="run-1",
        run="run",
        objective="cross_entropy",
        excess=types.SimpleNamespace(value=0.1),
        folder=tmp_path / "runs" / "run" / "checkpoints" / "step_1",
    )
    matching = types.SimpleNamespace(to_dict=lambda: {"groups": [{"models": [{"name": "run-1"}]}]})
    asked: list[Evaluation] = []
    monkeypatch.setattr(lab_run, "train_and_match", lambda *_, **__: matching)
    monkeypatch.setattr(checkpoints, "find_checkpoints", lambda _: [checkpoint])
    monkeypatch.setattr(lab_run, "evaluate_all", lambda evaluations, **_: asked.extend(evaluations))
    for name, returned in (
        ("measure_widened", {}),
        ("link_data", None),
        ("print_results", None),
        ("write_report", None),
    ):
        monkeypatch.setattr(lab_run, name, lambda *_, returned=returned, **__: returned)
    assert main(["lab", "run", "--out", str(tmp_path), *([option] if option else [])]) == 0
    (evaluation_asked,) = asked
    assert evaluation_asked.log_samples is (option is not None)
