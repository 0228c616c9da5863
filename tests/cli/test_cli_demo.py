"""`harness-ext demo`: what it makes, what it refuses, and what it prints after a run of lm_eval."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness_ext.cli import demo, main
from harness_ext.cli.lab import report
from harness_ext.cli.lab import run as lab
from harness_ext.lab import presets
from harness_ext.lab.checkpoints import find_checkpoints
from harness_ext.lab.run import Plan

_DEMO = presets.PRESETS["demo"]


def small_demo(seed: int) -> Plan:
    """The demo with few documents and steps, and one group of whatever loss its models have by then.

    Without flatness and the lookup table: what each adds is a run of lm_eval.
    """
    plan = _DEMO(seed)
    runs = tuple(replace(run, train=replace(run.train, steps=3), keep=(3,)) for run in plan.runs)
    sizes = {"documents": 500, "num_train_per_class": 50, "num_test": 100, "num_validation": 50, "evaluate_every": 3}
    tasks = tuple(task for task in plan.tasks if not task.startswith("flatness"))
    return replace(plan, runs=runs, levels=(), tolerance=5.0, lookup=False, tasks=tasks, **sizes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to train, and nothing outside the test's folder."""
    monkeypatch.setitem(presets.PRESETS, "demo", small_demo)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    monkeypatch.delenv("HARNESS_EXT_DATA", raising=False)


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    ("name", "content"),
    [("notes.txt", "mine"), ("plan.json", '{"made_by": "someone"}'), ("plan.json", "[]"), ("plan.json", "{")],
)
def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, force: list[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["demo", "--out", str(tmp_path), *force]) == 2
    assert "not a demo" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == content


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo").write_text("mine")
    assert main(["demo", "--out", str(tmp_path / "demo"), "--force"]) == 2
    assert "not a demo" in capsys.readouterr().err


def test_a_seed_out_of_range_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "demo"), "--seed", "-1"]) == 2
    assert "--seed -1: expected a number from 0" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_a_demo_is_made_once_evaluated_by_lm_eval_and_replaced_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "demo"
    command = ["demo", "--out", str(folder)]
    assert main(command) == 0
    out = capsys.readouterr().out
    truth = json.loads((folder / "data" / "truth.json").read_text())["tasks"]["reviews"]
    bayes, majority = truth["bayes_accuracy"]["accuracy"], truth["majority"]
    for task in ("natural_demo", "probe_demo"):
        assert re.search(rf"^{task} +\d+\.\d% ± \d+\.\d% +{bayes:.1%} +{majority:.1%}$", out, re.MULTILINE)
    [best] = re.findall(r"pretrained=(\S+)", out)
    assert (Path(best) / "data" / "harness_ext" / "reviews" / "test.jsonl").is_file()
    checkpoints = {
        one.name: (one.folder / "model.safetensors").read_bytes() for one in find_checkpoints(folder / "runs")
    }
    assert {name.rpartition("-")[0] for name in checkpoints} == {"adamw-w64", "adamw-w32", "sam-w64"}
    results = {path: path.stat().st_mtime_ns for path in folder.rglob("results_*.json")}
    assert len(results) == 3

    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("results_*.json")} == results
    capsys.readouterr()
    assert main([*command, "--seed", "7"]) == 2
    assert re.search(r"holds a demo of --seed 0\. .*--force.*--out", capsys.readouterr().err)

    monkeypatch.setattr(lab, "evaluate", lambda *_, **__: {})
    monkeypatch.setattr(report, "print_results", lambda *_: None)
    monkeypatch.setattr(demo, "_print_accuracies", lambda *_: None)
    assert main([*command, "--seed", "7", "--force"]) == 0
    assert json.loads((folder / "plan.json").read_text())["seed"] == 7
    again = {one.name: (one.folder / "model.safetensors").read_bytes() for one in find_checkpoints(folder / "runs")}
    assert again.keys() == checkpoints.keys()
    assert again["adamw-w64-00000003"] != checkpoints["adamw-w64-00000003"]


@pytest.mark.slow
def test_the_demo_is_well_above_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chance is 50 % with a standard error of 1.1 % on 2,000 documents; the Bayes-optimal accuracy is about 94 %."""
    monkeypatch.setitem(presets.PRESETS, "demo", _DEMO)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 0
    [path] = (tmp_path / "demo" / "results" / "adamw-w64-00001000").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    assert results["natural_demo"]["acc,none"] > 0.87
    assert results["probe_demo"]["acc,none"] > 0.75
    # Exact predictions of the next word, and after a sentence that word tells nothing of the sentiment: within 4.5 errors.
    [path] = (tmp_path / "demo" / "results" / "lookup-00000000").rglob("results_*.json")
    lookup = json.loads(path.read_text())["results"]
    assert lookup["natural_demo"]["acc,none"] > 0.91
    assert abs(lookup["probe_demo"]["acc,none"] - 0.5) < 4.5 * lookup["probe_demo"]["acc_stderr,none"]
