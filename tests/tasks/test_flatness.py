"""Flatness tasks through lm_eval: metrics and their errors, the same blocks as the loss, what the results say."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model
from worlds import World, corpus_config, evaluate, hf_model, loss_task, report, samples

from harness_ext.tasks import FlatnessTask
from harness_ext.tasks.metrics import FLATNESS

ROWS = [f"the film number {number} is good , and this movie is bad , over and over again ." for number in range(40)]
OPTIONS = {"max_blocks": 3, "lambda_blocks": 2, "include": ["*ln_f*", "*h.1*"]}


@pytest.fixture(scope="module", autouse=True)
def corpus(world: World) -> str:
    return world.add_dataset("tests/lines", {"test": [{"text": row} for row in ROWS]})


def flatness_task(**options: Any) -> FlatnessTask:
    metadata = {"block_tokens": 12, "flatness": OPTIONS | options}
    return FlatnessTask(config=corpus_config("flatness", metadata=metadata))


def test_the_metrics_are_means_over_blocks_with_their_errors() -> None:
    results = evaluate(hf_model(), flatness_task())
    found, told = results["results"]["flatness_lines"], report(results, "flatness_lines")["window_flatness"]
    of_task = {name.split(",")[0] for name in found if ",none" in name and "_stderr" not in name}
    assert of_task == set(FLATNESS) - {"ggn_trace", "ggn_trace_scaled"}
    for name in ("fisher_trace", "hessian_trace", "loss", "fisher_trace_scaled", "hessian_trace_scaled", "lambda_max"):
        items = [sample[name] for sample in samples(results, "flatness_lines")]
        assert len(items) == 3
        values = np.array([total / count for total, count in items if count])
        assert len(values) == (2 if name == "lambda_max" else 3)
        assert found[f"{name},none"] == pytest.approx(values.mean(), rel=1e-9)
        assert found[f"{name}_stderr,none"] == pytest.approx(values.std(ddof=1) / math.sqrt(len(values)), rel=1e-6)
        assert told["estimates"][name]["value"] == pytest.approx(found[f"{name},none"], rel=1e-9)
    for name in ("fisher_trace", "hessian_trace"):
        per_million = 1e6 * found[f"{name},none"] / told["num_parameters"]
        assert found[f"{name}_per_mparam,none"] == pytest.approx(per_million, rel=1e-9)
    ratio = found["hessian_trace,none"] / found["fisher_trace,none"]
    assert found["hessian_over_fisher,none"] == pytest.approx(ratio, rel=1e-9)
    json.dumps(results["results"])


def test_loss_and_flatness_are_of_the_same_blocks() -> None:
    task = loss_task(metadata={"block_tokens": 12})
    results = evaluate(hf_model(), task, flatness_task(quantities=["fisher_trace"]), limit=3)
    of_loss, of_flatness = samples(results, "loss_lines"), samples(results, "flatness_lines")
    assert [sample["doc"] for sample in of_loss] == [sample["doc"] for sample in of_flatness]
    for one, other in zip(of_loss, of_flatness, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_default_attention_and_weights_are_left_as_they_were() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    assert model.config._attn_implementation == "sdpa"
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    results = evaluate(hf_model(model), flatness_task(include=["*norm*", "*layers.1.mlp*"]))
    told = report(results, "flatness_lines")["window_flatness"]
    assert told["dtype_of_model"] == ["bfloat16"]
    assert told["attention"] == model.config._attn_implementation == "sdpa"
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_two_tasks_with_options_of_their_own() -> None:
    tasks = [flatness_task(quantities=["fisher_trace"], seed=seed, max_blocks=2) for seed in (0, 1)]
    for task, name in zip(tasks, ("flatness_a", "flatness_b"), strict=True):
        task.config.task = name
    together = evaluate(hf_model(), *tasks)["results"]
    alone = evaluate(hf_model(), flatness_task(quantities=["fisher_trace"], seed=1, max_blocks=2))["results"]
    assert together["flatness_b"]["fisher_trace,none"] == alone["flatness_lines"]["fisher_trace,none"]
    assert together["flatness_a"]["fisher_trace,none"] != together["flatness_b"]["fisher_trace,none"]


def test_blocks_after_the_stop_have_no_metrics() -> None:
    options = {"quantities": ["fisher_trace"], "rel_stderr": 0.9, "max_blocks": 40}
    results = evaluate(hf_model(batch_size=1), flatness_task(**options))
    told = report(results, "flatness_lines")["window_flatness"]
    assert told["stopped"] == "rel_stderr"
    measured = [sample for sample in samples(results, "flatness_lines") if sample["metrics"]]
    assert len(measured) == told["blocks"] < len(samples(results, "flatness_lines"))


def test_windows_that_are_not_whole_are_left_out_and_counted() -> None:
    results = evaluate(hf_model(), flatness_task(quantities=["fisher_trace"]))
    told = report(results, "flatness_lines")
    assert told["windows_left_out"] in (0, 1)
    assert told["num_windows"] * 12 - told["num_tokens"] < 12
    assert {sample["doc"]["num_tokens"] for sample in samples(results, "flatness_lines")} == {12}
