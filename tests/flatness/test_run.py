"""A measurement as a whole: estimates and errors, the stop rule, invariance, what is restored."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model

from harness_ext.flatness.options import MIN_BLOCKS, FlatnessOptions
from harness_ext.flatness.run import Block, FlatnessRun, measure

CPU = torch.device("cpu")
TRACES = ("fisher_trace", "hessian_trace")


def some_blocks(count: int, *, length: int = 6, seed: int = 0) -> list[Block]:
    rng = np.random.default_rng(seed)
    text = rng.integers(2, 300, size=(count, length + 1))
    return [Block(row[:-1].tolist(), row[1:].tolist(), number) for number, row in enumerate(text)]


class Notes:
    """Where results outlive a run: in a list, of which only so many may still be made."""

    def __init__(self, left: float = math.inf) -> None:
        self.results: dict[str, Any] = {}
        self.left = left
        self.num_found = self.num_made = 0

    def find(self, questions: Sequence[str]) -> list[Any]:
        found = [self.results.get(question) for question in questions]
        self.num_found += sum(result is not None for result in found)
        return found

    def keep(self, question: str, result: Any) -> None:
        self.num_made += 1
        self.left -= 1
        self.results[question] = json.loads(json.dumps(result))
        if not self.left:
            raise KeyboardInterrupt


def run(
    blocks: list[Block], *, model: Any = None, max_tokens: int = 64, kept: Notes | None = None, **options: Any
) -> FlatnessRun:
    options = {"quantities": TRACES, "include": ("*ln_f*", "*wpe*", "*h.1*")} | options
    return measure(
        tiny_model("gpt2") if model is None else model,
        blocks,
        FlatnessOptions(**options),
        device=CPU,
        max_tokens=max_tokens,
        progress=False,
        kept=kept,
    )


ALL: dict[str, Any] = {"quantities": (*TRACES, "scaled", "lambda_max"), "lambda_blocks": 2}


def same(found: FlatnessRun, expected: FlatnessRun) -> None:
    assert found.values == expected.values
    assert {**found.report, "seconds": 0} == {**expected.report, "seconds": 0}


@pytest.mark.parametrize(
    ("num_blocks", "more"), [(5, {}), (MIN_BLOCKS + 2, {"rel_stderr": 0.9, "quantities": (*TRACES, "lambda_max")})]
)
def test_a_run_that_was_broken_off_goes_on_where_it_was(num_blocks: int, more: dict[str, Any]) -> None:
    blocks = some_blocks(num_blocks)
    undisturbed = Notes()
    expected = run(blocks, kept=undisturbed, **{**ALL, **more})
    same(run(blocks, **{**ALL, **more}), expected)
    for left in (1, undisturbed.num_made // 2, undisturbed.num_made):
        broken = Notes(left)
        with pytest.raises(KeyboardInterrupt):
            run(blocks, kept=broken, **{**ALL, **more})
        broken.left = math.inf
        same(run(blocks, kept=broken, **{**ALL, **more}), expected)
        assert broken.num_made == undisturbed.num_made
        assert broken.num_found >= left


def test_results_on_which_something_else_has_a_bearing_are_not_taken() -> None:
    blocks = some_blocks(3)
    kept = Notes()
    run(blocks, kept=kept)
    assert kept.num_made == 1 + 1 + 3  # a step, a batch for Fisher traces, three blocks for Hessian traces
    for change, num_made in (
        ({"seed": 1}, 5),
        ({"include": ("*ln_f*",)}, 5),
        ({"exclude": ("*bias",)}, 5),
        ({"quantities": (*TRACES, "scaled")}, 4),
        ({"probes": 2}, 3),
        ({"labels": "sampled"}, 1),
        ({"max_tokens": 1}, 3),
    ):
        kept.num_made = 0
        same(run(blocks, kept=kept, **change), run(blocks, **change))
        assert kept.num_made == num_made, change
    # More blocks, and a quantity that has no part in the others.
    more = some_blocks(3) + [block._replace(number=block.number + 3) for block in some_blocks(2, seed=5)]
    kept.num_made = 0
    run(more, kept=kept, max_tokens=18, quantities=(*TRACES, "lambda_max"))
    assert kept.num_made == 1 + 2 + 1  # a batch for Fisher traces, two blocks for Hessian traces, lambda_max


def test_results_of_other_tokens_under_the_same_numbers_are_not_taken() -> None:
    kept = Notes()
    run(some_blocks(3), kept=kept)
    other = some_blocks(3, seed=1)
    same(run(other, kept=kept), run(other))


def test_estimates_are_means_over_blocks_with_their_errors() -> None:
    found = run(some_blocks(5))
    assert sorted(found.values) == list(range(5))
    for name in (*TRACES, "loss"):
        values = np.array([of_block[name] for of_block in found.values.values()])
        estimate = found.report["estimates"][name]
        assert estimate["value"] == pytest.approx(values.mean(), rel=1e-12)
        assert estimate["stderr"] == pytest.approx(values.std(ddof=1) / math.sqrt(5), rel=1e-10)


def test_one_block_has_no_error_and_the_report_is_json() -> None:
    report = run(some_blocks(1)).report
    assert report["estimates"]["fisher_trace"]["stderr"] is None
    json.loads(json.dumps(report, allow_nan=False))


def test_blocks_of_different_lengths_count_by_their_tokens() -> None:
    blocks = [
        *some_blocks(3, length=4),
        *(block._replace(number=block.number + 3) for block in some_blocks(2, length=9)),
    ]
    found = run(blocks, quantities=("fisher_trace",))
    values = np.array([found.values[number]["fisher_trace"] for number in range(5)])
    assert found.report["estimates"]["fisher_trace"]["value"] == pytest.approx(
        np.average(values, weights=[4, 4, 4, 9, 9])
    )
    assert found.report["tokens"] == 30


def test_neither_order_nor_batches_matter() -> None:
    blocks = some_blocks(4)
    together, apart = run(blocks), run(blocks[::-1], max_tokens=1)
    for number in range(4):
        for name, value in together.values[number].items():
            assert apart.values[number][name] == pytest.approx(value, rel=2e-3), name


def test_the_parameters_together_make_the_trace() -> None:
    found = run(some_blocks(3), quantities=("fisher_trace", "scaled"))
    rows = found.report["by_parameter"]
    for name in ("fisher_trace", "fisher_trace_scaled"):
        assert sum(row[name] for row in rows.values()) == pytest.approx(found.report["estimates"][name]["value"])
    assert sum(row["size"] for row in rows.values()) == found.report["num_parameters"]


def test_it_stops_when_every_trace_is_precise() -> None:
    blocks = some_blocks(3 * MIN_BLOCKS)
    found = run(blocks, quantities=("fisher_trace",), rel_stderr=0.9, max_blocks=100, max_tokens=6)
    assert found.report["stopped"] == "rel_stderr"
    assert found.report["blocks"] == MIN_BLOCKS
    estimate = found.report["estimates"]["fisher_trace"]
    assert estimate["stderr"] <= 0.9 * estimate["value"]
    # What was not reached is not there, rather than 0.
    assert set(found.values) == set(range(MIN_BLOCKS))


@pytest.mark.parametrize(("max_blocks", "stopped", "count"), [(2, "max_blocks", 2), (50, "end of corpus", 3)])
def test_it_stops_at_the_latest(max_blocks: int, stopped: str, count: int) -> None:
    found = run(some_blocks(3), quantities=("fisher_trace",), max_blocks=max_blocks)
    assert (found.report["stopped"], found.report["blocks"]) == (stopped, count)


def test_labels_are_drawn_as_asked_and_the_matrix_is_one() -> None:
    blocks = some_blocks(3)
    signs = run(blocks, quantities=("fisher_trace", "ggn_trace"))
    sampled = run(blocks, quantities=("fisher_trace", "ggn_trace"), labels="sampled")
    for number in range(3):
        assert signs.values[number]["fisher_trace"] == signs.values[number]["ggn_trace"]
        assert sampled.values[number]["ggn_trace"] == signs.values[number]["ggn_trace"]
        assert sampled.values[number]["fisher_trace"] != signs.values[number]["fisher_trace"]


def test_lambda_max_has_a_value_for_each_of_its_blocks() -> None:
    found = run(some_blocks(4), quantities=("lambda_max",), lambda_blocks=2)
    told = found.report["lambda_max"]
    assert told["blocks"] == 2
    assert np.mean([found.values[n]["lambda_max"] for n in range(2)]) == pytest.approx(told["value"], rel=1e-6)
    assert "lambda_max" not in found.values.get(2, {})


def test_a_model_in_half_precision_comes_back_as_it_was() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16).train()
    before = {name: (p, p.data, p.data.clone()) for name, p in model.named_parameters()}
    found = run(some_blocks(2), model=model, include=("*layers.1*",))
    assert found.report["dtype_of_model"] == ["bfloat16"]
    assert model.training
    for name, parameter in model.named_parameters():
        same, data, copy = before[name]
        assert parameter is same
        assert parameter.data.data_ptr() == data.data_ptr()
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, copy)
        assert parameter.grad is None
        assert parameter.requires_grad


def test_the_step_was_compared_with_an_exact_product() -> None:
    step = run(some_blocks(1), quantities=("hessian_trace",)).report["difference_step"]
    assert step["difference"] == pytest.approx(step["exact"], rel=0.02)


def test_a_model_that_does_not_fit_is_refused_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness_ext.flatness.run._free_bytes", lambda device: 10)
    with pytest.raises(MemoryError, match=r"float32 weights.* on cpu, .* are free\. Leave lambda_max out"):
        run(some_blocks(1), quantities=("fisher_trace", "lambda_max"))


def test_no_block_at_all() -> None:
    with pytest.raises(ValueError, match="expected at least one block, got none"):
        run([])


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        (("*.nothing",), (), "include: '\\*\\.nothing' matches no parameter"),
        (("*",), ("*nowhere*",), "exclude: '\\*nowhere\\*' matches no parameter"),
        (("*ln_f*",), ("*ln_f*",), "leave no parameter"),
    ],
)
def test_patterns_that_choose_nothing(include: tuple[str, ...], exclude: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(some_blocks(1), include=include, exclude=exclude)
