"""`harness-ext lab`: a small preset from the first step to the report, killed on the way, and what each action refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig

from harness_ext.cli import main
from harness_ext.cli.lab import widened
from harness_ext.lab import sde
from harness_ext.lab.checkpoints import find_checkpoints
from harness_ext.lab.presets import PRESETS

# A process for each line of input, a fork of one that has imported what takes seconds. lm_eval is left out (the demo's test
# runs it): what evaluates a model here counts its parameters and makes up the rest.
_LAB = """
import json, os, subprocess, sys, time, types
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from harness_ext.cli import evaluation, main
from harness_ext.lab import presets, training
from harness_ext.lab.algorithms import Sgd
from harness_ext.lab.model import ModelConfig
from harness_ext.lab.run import Plan, Run
from harness_ext.lab.train import TrainConfig

def tiny(seed):
    def run(name, width, depth=1, architecture="gpt2"):
        model = ModelConfig(width=width, depth=depth, heads=2, context=32, architecture=architecture)
        return Run(name, model, TrainConfig(steps=60, batch_size=4), seed=seed, keep=(60,))

    return Plan(
        name="demo",
        language="hmm",
        sizes={"states": 4, "words": 16, "lengths": [10, 14]},
        seed=seed,
        runs=(run("small", 8), run("large", 16), run("deep", 8, depth=2), run("llama", 8, architecture="llama")),
        tolerance=5.0,
        evaluate_every=5,
        documents=300,
        block_size=25,
        num_train_per_class=20,
        num_test=40,
        num_validation=40,
        measured_documents=20,
        tasks=("probe_hmm_switch", "flatness_hmm"),
    )

def lm_eval(command, cwd, env, **others):
    given = dict(zip(command[4::2], command[5::2]))
    arguments = dict(pair.split("=") for pair in given["--model_args"].split(","))
    folder, tasks = Path(cwd) / arguments["pretrained"], given["--tasks"].split(",")
    assert (folder / "data" / "harness_ext" / "hmm_switch" / "test.jsonl").is_file()
    assert "HARNESS_EXT_DATA" not in env
    lookup = arguments.get("trust_remote_code") == "True"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=lookup)
    parameters = model.num_parameters()
    tokens = torch.tensor([[0, 3, 2, 1]])
    with torch.no_grad():
        loss = float(model(tokens, labels=tokens).loss)
    results = {"probe_hmm_switch": {"acc,none": 0.4 + loss / 20, "acc_stderr,none": 0.001}}
    if not lookup:
        trace = {"fisher_trace,none": 1e3 / parameters, "fisher_trace_stderr,none": 1e-3}
        results["flatness_hmm"] = {"loss,none": loss, **trace}
    if "--metadata" in given:
        assert json.loads(given["--metadata"])["flatness"]["quantities"] == ["fisher_trace", "hessian_trace"]
    content = {"results": {task: results[task] for task in tasks}, "configs": {}}
    content["config"] = {"model_args": arguments, "model_num_parameters": parameters}
    file = Path(given["--output_path"]) / "results_2026.json"
    file.write_text("{")
    time.sleep(0.05)
    file.write_text(json.dumps(content))
    return subprocess.CompletedProcess(command, 0)

presets.PRESETS["demo"] = tiny
evaluation.subprocess = types.SimpleNamespace(run=lm_eval, STDOUT=subprocess.STDOUT, DEVNULL=subprocess.DEVNULL)
context = training.multiprocessing.get_context
training.multiprocessing.get_context = lambda method: context("fork")
for line in sys.stdin:
    child = os.fork()
    if not child:
        output = os.open(sys.argv[1] + ".out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            status = main(["lab", "run", "--preset", "demo", "--out", sys.argv[1], "--workers", "1"])
        except BaseException as err:
            print(repr(err), file=sys.stderr)
            status = 99
        sys.stdout.flush()
        os._exit(status)
    print(child, flush=True)
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def wait_for(found: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that was killed in training and in evaluation, and all that it printed."""
    out = tmp_path_factory.mktemp("lab") / "out"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HARNESS_EXT_DATA": "elsewhere"}
    moments = (
        lambda: any(out.glob("runs/*/log.jsonl")),
        lambda: any(out.glob("runs/*/checkpoints/step_00000060")),
        lambda: any(out.glob("results/*/results_*.json")),
        lambda: any(out.glob("results_widened/*/results_*.json")),
    )
    with subprocess.Popen(
        [sys.executable, "-c", _LAB, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for moment in moments:
            print(file=parent.stdin, flush=True)
            child = int(parent.stdout.readline())
            wait_for(moment)
            os.kill(child, signal.SIGKILL)
            assert int(parent.stdout.readline()) == -signal.SIGKILL
        before = {path: path.stat().st_mtime_ns for path in [*out.rglob("results_*.json"), *out.rglob("lab.json")]}
        print(file=parent.stdin, flush=True)
        parent.stdout.readline()
        status = int(parent.stdout.readline())
        printed = out.with_name("out.out").read_text(encoding="utf-8")
        assert status == 0, printed[-3000:]
        parent.stdin.close()
    whole = {path: time for path, time in before.items() if not any(part.startswith(".") for part in path.parts)}
    assert len(whole) >= 5
    for path, time_of in whole.items():
        if "widened" not in path.parts:  # their folders are for the time of the measurement
            assert path.stat().st_mtime_ns == time_of, path
    return out, printed


def test_a_run_killed_again_and_again_ends_as_others_do(lab: tuple[Path, str]) -> None:
    out, printed = lab
    names = {"small", "large", "deep", "llama"}
    checkpoints = find_checkpoints(out / "runs")
    assert {one.run for one in checkpoints} == {*names, "lookup"}
    assert {one.step for one in checkpoints if one.run != "lookup"} == {60}
    [group] = json.loads((out / "groups.json").read_text())["groups"]
    matched = {model["name"] for model in group["models"]}
    assert {name.rpartition("-")[0] for name in matched} == names
    assert {path.parent.name for path in out.glob("results/*/results_*.json")} >= {*matched, "lookup-00000000"}
    assert [path.relative_to(out) for path in out.rglob(".*")] == []
    assert not (out / "widened").exists()
    assert "Tables and figures are in" in printed
    assert (out / "report" / "flatness_models.csv").is_file()


def test_flatness_of_unlike_sizes_is_that_of_one_size(lab: tuple[Path, str]) -> None:
    """The traces made up here are one over the size, so that those of widened models are all equal."""
    out, printed = lab
    found = [json.loads(path.read_text()) for path in out.glob("results_widened/*/results_*.json")]
    matched = {model["name"] for model in json.loads((out / "groups.json").read_text())["groups"][0]["models"]}
    assert len(found) == len([name for name in matched if not name.startswith("llama")])
    [size] = {one["config"]["model_num_parameters"] for one in found}
    assert size == 16 * 17 + 16 * 32 + 2 * (12 * 16**2 + 13 * 16) + 2 * 16  # words and positions, two layers, last norm
    assert re.search(
        r"^llama-\d+: no flatness as the largest architecture: a llama, where most are gpt2$", printed, re.M
    )
    table = (out / "report" / "models.txt").read_text()
    assert table in printed
    assert "fisher_trace_widened" in table.splitlines()[0]
    [llama] = [line for line in table.splitlines() if "llama" in line and line.startswith("A")]
    assert llama.split()[-2:] == ["-", "-"]
    assert [line.split()[1] for line in table.splitlines() if line.startswith("-")][-1] == "lookup-00000000"


def test_theory_of_a_run(lab: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = lab
    assert main(["lab", "theory", str(out), "--documents", "40", "--out", str(tmp_path), "--tasks", "hmm_switch"]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"theory.csv", "theory.png", "theory.svg", "flatness_models.csv", "flatness_correlations.csv"}
    rows = (tmp_path / "theory.csv").read_text().splitlines()
    assert len([row for row in rows if row.startswith("lookup-")]) == 1
    assert str(tmp_path / "theory.png") in capsys.readouterr().out


def test_theory_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "theory", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err


# Matching. -------------------------------------------------------------------------------------------------------------


def write_losses(folder: Path, losses: dict[str, float]) -> None:
    for name, loss in losses.items():
        results = {"loss_wikitext": {"bits_per_byte,none": loss, "bits_per_byte_stderr,none": 0.0005}}
        config = {"model_args": {"pretrained": name}, "model_num_parameters": 1000}
        metadata = {"report": {"text_sha256": "a" * 64, "block_tokens": 128, "num_windows": 100}}
        content = {"results": results, "config": config, "configs": {"loss_wikitext": {"metadata": metadata}}}
        path = folder / name.replace("/", "_") / "results_2026.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(content), encoding="utf-8")


OWN = {
    "mine/a/step_1000": 1.1,
    "mine/b/step_3000": 1.1004,
    "mine/c/step_500": 1.1009,
    "mine/d/step_500": 1.3,
    "mine/e/step_900": 1.31,
}


def test_a_users_own_models_are_matched_by_their_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_losses(tmp_path / "results", OWN)
    out = tmp_path / "groups.json"
    command = ["lab", "match", "--results", str(tmp_path / "results"), "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["unit"] == "bits per byte"
    [group] = found["groups"]
    assert {Path(model["run"]).name for model in group["models"]} == {"a", "b", "c"}
    assert "2 models in no group" in printed


def test_a_tolerance_that_matches_nothing_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_losses(tmp_path, OWN)
    assert main(["lab", "match", "--results", str(tmp_path), "--tolerance", "0.0001"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"nearest pairs: \S*a\S* and \S*b\S*: 0\.0004 ±", error)
    smallest = re.search(r"--tolerance (\S+)\. ", error)
    assert smallest is not None, error
    assert main(["lab", "match", "--results", str(tmp_path), "--tolerance", smallest[1]]) == 0


def test_a_checkpoint_without_weights_is_named(
    lab: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(lab[0] / "runs", tmp_path / "runs")
    [weights] = (tmp_path / "runs" / "small").rglob("step_00000060/model.safetensors")
    weights.unlink()
    assert main(["lab", "match", str(tmp_path / "runs"), "--tolerance", "5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"harness-ext: error: {weights.parent}: has lab.json and no weights")
    shutil.rmtree(weights.parent)
    assert main(["lab", "match", str(tmp_path / "runs"), "--tolerance", "5"]) == 0


def test_folders_and_results_are_one_or_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ([], ["runs", "--results", "results"]):
        assert main(["lab", "match", *given]) == 2
        assert "expected either folders with checkpoints, or --results" in capsys.readouterr().err


# What cannot be made. ---------------------------------------------------------------------------------------------------


def test_more_states_than_the_vocabulary_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PRESETS["cpu"](0)
    monkeypatch.setitem(PRESETS, "cpu", lambda seed: replace(plan, sizes={"states": 10, "words": 8}))
    assert main(["lab", "run", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("harness-ext: error: language 'hmm', seed 0, states=10, words=8: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers 0: expected at least 1"),
        (["--seed", "-1"], "--seed -1: expected a number from 0"),
    ],
)
def test_arguments_out_of_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["lab", "run", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# Widening. --------------------------------------------------------------------------------------------------------------


def test_the_common_architecture_has_the_largest_of_each_size() -> None:
    wide, deep = GPT2Config(n_embd=32, n_layer=1, n_head=2), GPT2Config(n_embd=16, n_layer=3, n_head=4)
    common = widened.common_architecture([wide, deep])
    assert (common.n_embd, common.n_layer, common.n_head, common.n_inner) == (32, 3, 4, None)
    assert (wide.n_layer, deep.n_embd) == (1, 16)
    llamas = [
        LlamaConfig(hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2),
        LlamaConfig(hidden_size=32, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2),
    ]
    large = widened.common_architecture(llamas)
    assert (large.hidden_size, large.intermediate_size, large.num_hidden_layers, large.head_dim) == (32, 96, 2, 16)


# SGD and its equation. ----------------------------------------------------------------------------------------------------

TINY = [
    "--quick",
    "--steps",
    "8",
    "--seeds",
    "2",
    "--batch-factors",
    "2",
    "--amplifications",
    "1",
    "--learning-rate",
    "0.1",
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = replace(
        sde.QUICK,
        start_steps=5,
        evaluations=2,
        training_documents=60,
        validation_documents=10,
        labelled_documents=40,
        gradient_batches=4,
    )
    monkeypatch.setattr(sde, "QUICK", smaller)


@pytest.mark.usefixtures("small")
def test_sde_check_from_a_checkpoint(lab: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = lab[0] / "runs" / "large" / "checkpoints" / "step_00000060"
    command = ["lab", "sde-check", *TINY, "--start", str(start), "--task", "hmm_state", "--out", str(tmp_path / "sde")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "sde" / "sde.json").read_text())
    assert record["description"]["model"]["width"] == 16
    assert record["description"]["start"]["trained_here"] is False
    assert record["task"] == "hmm_state"
    assert [path["name"] for path in record["paths"]] == ["SGD", "SVAG l=1", "SGD 2B"]
    # Its excess is that of lab.json but for the choice of text: 4.5 standard errors of 10 documents.
    own = json.loads((start / "lab.json").read_text())["excess"]
    assert record["description"]["start"]["excess"] == pytest.approx(own["value"], rel=0.5)
    assert record["flatness_name"] == "Fisher trace"
    assert record["start_flatness"]["value"] > 0
    assert (tmp_path / "sde" / "sde.txt").read_text() in printed
    assert (tmp_path / "sde" / "sde.png").is_file()
    for name in ("language", "width", "depth"):
        assert main([*command, f"--{name}", {"language": "hmm"}.get(name, "8")]) == 2
        assert f"--{name} is that of --start" in capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_sde_check_of_a_model_that_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sde"
    command = ["lab", "sde-check", *TINY, "--width", "8", "--depth", "1", "--no-flatness", "--out", str(out)]

    def no_matplotlib(self: sde.SdeReport) -> None:
        raise ImportError("No module named 'matplotlib'")

    with monkeypatch.context() as patch:
        patch.setattr(sde.SdeReport, "draw", no_matplotlib)
        assert main(command) == 2
    printed = capsys.readouterr()
    assert "the figure needs matplotlib: pip install 'harness-ext[plots]'" in printed.err
    assert "Fisher" not in printed.out
    assert {path.name for path in out.iterdir()} == {"sde.json", "sde.txt"}

    def diverges(*_: object, **__: object) -> None:
        raise FloatingPointError("the training loss became nan at step 3")

    monkeypatch.setattr(sde, "sde_check", diverges)
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "harness-ext: error: the start's training diverged (the training loss became nan at step 3); name a checkpoint with "
        "--start\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--language", "hnm"], "unknown kind of language 'hnm'. Did you mean 'hmm'?"),
        (["--task", "nothing"], "--task nothing: expected a task of the language hmm: hmm_"),
        (["--batch-factors", "3"], "batch_factors must be at least 2 and divide the 200 steps, got 3"),
        (["--amplifications", "0"], "amplifications must be whole numbers from 1"),
        (["--width", "30"], "width must be a multiple of heads"),
        (["--start", "nowhere"], "nowhere/lab.json: no such file"),
        (["--learning-rate", "0"], "learning_rate must be above 0"),
    ],
)
def test_what_sde_check_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["lab", "sde-check", "--out", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("harness-ext: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_lookup_table_is_no_start(lab: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    [folder] = (lab[0] / "runs" / "lookup" / "checkpoints").iterdir()
    assert main(["lab", "sde-check", *TINY, "--start", str(folder)]) == 2
    assert "expected a trained model" in capsys.readouterr().err
