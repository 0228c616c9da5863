"""Plans, the training of their runs, and what a killed run leaves."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness_ext.lab import run as lab_run
from harness_ext.lab.algorithms import Adversarial, LabelNoise, Sam, Sgd, Svag
from harness_ext.lab.checkpoints import find_checkpoints, read_checkpoint
from harness_ext.lab.model import ModelConfig
from harness_ext.lab.presets import PRESETS
from harness_ext.lab.run import (
    LOOKUP,
    Plan,
    Run,
    exact_loss,
    plan_from_dict,
    prepare,
    read_log,
    read_plan,
    train_run,
    write_lookup,
)
from harness_ext.lab.train import TrainConfig
from harness_ext.lab.training import train_all

TINY = ModelConfig(width=16, depth=1, heads=2, context=32)


def tiny_plan(*runs: Run, **changes: object) -> Plan:
    plan = Plan(
        name="tiny",
        language="hmm",
        sizes={"states": 4, "words": 16, "lengths": [10, 14]},
        runs=runs or (Run("adamw", TINY, TrainConfig(steps=20, batch_size=4), keep=(10,)),),
        evaluate_every=5,
        documents=300,
        block_size=25,
        num_train_per_class=20,
        num_test=30,
        num_validation=40,
        measured_documents=20,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def checkpoints_of(out: Path) -> dict[str, bytes]:
    return {checkpoint.name: weights(checkpoint.folder) for checkpoint in find_checkpoints(out / "runs")}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_survive_json_and_have_distinct_names(preset: str) -> None:
    plan = PRESETS[preset](3)
    assert plan_from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert len({run.name for run in plan.runs}) == len(plan.runs)
    assert {run.seed for run in plan.runs} | {plan.seed} == {3}


def test_every_algorithm_survives_json() -> None:
    algorithms = (Sgd(0.9), Sam(0.1, Sgd()), LabelNoise(2.0), Svag(4), Adversarial(documents=8))
    runs = [
        Run(algorithm.name, TINY, TrainConfig(steps=1, max_grad_norm=math.inf, algorithm=algorithm))
        for algorithm in algorithms
    ]
    plan = tiny_plan(*runs)
    assert plan_from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False))) == plan


def test_a_prepared_folder_is_prepared_once(tmp_path: Path) -> None:
    out = tmp_path / "lab"
    prepare(out, tiny_plan())
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    prepare(out, tiny_plan())
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    with pytest.raises(ValueError, match=r"another plan.*--out"):
        prepare(out, tiny_plan(seed=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="something else"):
        prepare(tmp_path / "mine", tiny_plan())


def test_killed_before_its_first_file_was_whole_a_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / ".plan.json.999999999.partial").write_text("{")
    prepare(tmp_path, tiny_plan())
    assert not list(tmp_path.glob(".*"))


def test_more_states_than_words_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="states must be 1 to 5"):
        prepare(tmp_path / "lab", tiny_plan(sizes={"states": 6, "words": 5}))
    assert not (tmp_path / "lab").exists()


def test_checkpoints_are_ordinary_folders_with_exact_losses(tmp_path: Path) -> None:
    prepare(tmp_path, tiny_plan())
    [run] = read_plan(tmp_path).runs
    train_run(tmp_path, run)
    found = find_checkpoints(tmp_path / "runs")
    assert [checkpoint.step for checkpoint in found] == [10, 20]
    model = AutoModelForCausalLM.from_pretrained(found[-1].folder)
    assert len(AutoTokenizer.from_pretrained(found[-1].folder)) == model.config.vocab_size
    measured = exact_loss(tmp_path).measure(model)
    assert found[-1].excess == pytest.approx(measured.excess)
    assert found[-1].validation_loss == pytest.approx(measured.validation_loss)
    assert found[-1].tokens_seen == 20 * 4 * 25
    assert [row["step"] for row in read_log(tmp_path / "runs" / "adamw" / "log.jsonl")] == [5, 10, 15, 20]
    assert not (tmp_path / "runs" / "adamw" / "state").exists()


def test_levels_are_kept_once_and_end_the_run(tmp_path: Path) -> None:
    """The first measurement is below 10 nats, and the second level is never reached or is the last thing to happen."""
    run = Run("adamw", TINY, TrainConfig(steps=60, batch_size=4), keep=(15,))
    prepare(tmp_path, tiny_plan(run, levels=(10.0,)))
    train_run(tmp_path, run)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path / "runs")] == [5, 15]
    assert json.loads((tmp_path / "runs" / "adamw" / "done.json").read_text()) == {"step": 15, "ended": "enough"}
    record = json.loads((tmp_path / "runs" / "adamw" / "checkpoints" / "step_00000005" / "lab.json").read_text())
    assert record["levels"] == [10.0]


@pytest.mark.parametrize("objective", ["cross_entropy", "quad"])
def test_an_interrupted_run_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    run = Run("one", TINY, TrainConfig(steps=120, batch_size=4), keep=(40, 90), objective=objective)
    for name in ("straight", "stopped"):
        prepare(tmp_path / name, tiny_plan(run))
    train_run(tmp_path / "straight", run)

    class Stop(Exception):
        pass

    def stop_at(where: int) -> object:
        def on_progress(step: int, steps: int) -> None:
            if step == where:
                raise Stop

        return on_progress

    for where in (30, 75, 95):
        with pytest.raises(Stop):
            train_run(tmp_path / "stopped", run, on_progress=stop_at(where))  # type: ignore[arg-type]
    train_run(tmp_path / "stopped", run)
    expected = checkpoints_of(tmp_path / "straight")
    assert list(expected) == ["one-00000040", "one-00000090", "one-00000120"]
    assert checkpoints_of(tmp_path / "stopped") == expected
    logs = [list(read_log(tmp_path / name / "runs" / "one" / "log.jsonl")) for name in ("straight", "stopped")]
    assert logs[0] == logs[1]


_TRAINS_IN_CHILDREN = """
import os, sys
from pathlib import Path
from harness_ext.lab.run import read_plan, train_run

# A process for each line of input: a fork of this one, which has imported what takes seconds.
out = Path(sys.argv[1])
for _ in sys.stdin:
    child = os.fork()
    if not child:
        train_run(out, read_plan(out).runs[0])
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def test_killed_at_random_moments_nothing_is_half_written(tmp_path: Path) -> None:
    run = Run("one", TINY, TrainConfig(steps=400, batch_size=4), keep=tuple(range(20, 400, 20)))
    for name in ("straight", "killed"):
        prepare(tmp_path / name, tiny_plan(run))
    train_run(tmp_path / "straight", run)
    expected = checkpoints_of(tmp_path / "straight")
    rng = np.random.default_rng(0)
    killed = tmp_path / "killed"
    log = killed / "runs" / "one" / "log.jsonl"
    command = [sys.executable, "-c", _TRAINS_IN_CHILDREN, str(killed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for wait in rng.uniform(0.01, 0.3, size=4):
            before = len(log.read_text()) if log.is_file() else 0
            print(file=parent.stdin, flush=True)
            child = int(parent.stdout.readline())
            # Only once it trains, or has ended.
            deadline = time.monotonic() + 60
            while (not log.is_file() or len(log.read_text()) <= before) and time.monotonic() < deadline:
                if (killed / "runs" / "one" / "done.json").is_file():
                    break
                time.sleep(0.01)
            time.sleep(wait)
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "ended\n"
            if any((killed / "runs").rglob("lab.json")):
                found = checkpoints_of(killed)
                assert found.items() <= expected.items()
        parent.stdin.close()
    prepare(killed, tiny_plan(run))
    assert [path.name for path in killed.rglob(".*")] == []
    train_run(killed, run)
    assert checkpoints_of(killed) == expected


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    good = Run("good", TINY, TrainConfig(steps=5, batch_size=4))
    bad = Run(
        "bad", TINY, TrainConfig(steps=5, batch_size=4, learning_rate=1e30, max_grad_norm=math.inf, algorithm=Sgd())
    )
    plan = tiny_plan(bad, good)
    prepare(tmp_path, plan)
    with pytest.raises(RuntimeError, match=r"bad: the training loss became .*lower learning_rate"):
        train_all(tmp_path, plan, workers=1)
    assert [checkpoint.run for checkpoint in find_checkpoints(tmp_path / "runs")] == ["good"]


def test_out_of_memory_names_the_run_and_what_to_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, tiny_plan())
    [run] = read_plan(tmp_path).runs

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lab_run.Trainer, "run", full)
    with pytest.raises(MemoryError, match=r"adamw: out of memory on cpu\. Lower batch_size \(4\)"):
        train_run(tmp_path, run)


def test_the_lookup_table_is_a_checkpoint_without_excess(tmp_path: Path) -> None:
    prepare(tmp_path, tiny_plan())
    write_lookup(tmp_path)
    write_lookup(tmp_path)
    [checkpoint] = find_checkpoints(tmp_path / "runs")
    assert checkpoint.run == checkpoint.algorithm == LOOKUP
    assert checkpoint.excess.value == pytest.approx(0, abs=1e-6)
    assert read_checkpoint(checkpoint.folder) == checkpoint


@pytest.mark.parametrize("content", ["{", "[]", '{"runs": []}', '{"made_by": "harness-ext lab", "runs": [{}]}'])
def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ValueError, match=r"plan\.json: expected the plan"):
        read_plan(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_plan(tmp_path / "other")
