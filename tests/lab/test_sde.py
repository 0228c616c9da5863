"""SGD, SVAG and the linear scaling rule from one start, and the condition on the gradient's noise."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from harness_ext.lab.excess import ExactLoss
from harness_ext.lab.languages.hmm import random_hmm
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.quad import IGNORED
from harness_ext.lab.sde import (
    QUICK,
    Difference,
    SdeReport,
    SdeSettings,
    gradient_noise,
    largest_factor,
    least_ratio,
    sde_check,
    welch,
)
from harness_ext.lab.train import Blocks, cpu_threads, encode, pack, packed_batches

SMALL = ModelConfig(width=16, depth=1, heads=2, context=16)
LANGUAGE = random_hmm(0, states=4, words=12, lengths=(6, 8))
TINY = dataclasses.replace(QUICK, steps=8, batch_factors=(2,), seeds=3, evaluations=2, learning_rate=0.1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with cpu_threads(1):
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return LANGUAGE.tokenizer(max_length=16)


@pytest.fixture(scope="module")
def blocks(tokenizer: Any) -> Blocks:
    documents = encode([" ".join(words) for words in LANGUAGE.sample(200, np.random.default_rng(0))], tokenizer)
    return pack(documents, end_of_text=tokenizer.eos_token_id, block_size=16)


# The gradient's noise. ------------------------------------------------------------------------------------------------


def some(blocks: Blocks, rows: Any) -> Blocks:
    return Blocks(blocks.tokens[rows], blocks.positions[rows])


def gradients(model: PreTrainedModel, blocks: Blocks, batch_size: int) -> np.ndarray:
    """Of each batch, (K, parameters)."""
    rows = []
    for inputs, targets in packed_batches(blocks, batch_size=batch_size, device=torch.device("cpu")):
        logits = model(**inputs, use_cache=False).logits
        losses = [
            cross_entropy(logits[row, place], targets[row, place])
            for row, place in itertools.product(*map(range, targets.shape))
            if targets[row, place] != IGNORED
        ]
        found = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        rows.append(torch.cat([gradient.flatten() for gradient in found]).double().numpy())
    return np.array(rows)


def test_noise_and_signal_equal_a_dense_computation(tokenizer: Any, blocks: Blocks) -> None:
    model = build_model(SMALL, tokenizer, seed=0)
    chosen = some(blocks, np.arange(12))
    rows = gradients(model, chosen, 3)
    found = gradient_noise(model, packed_batches(chosen, batch_size=3, device=model.device))
    assert found.noise == pytest.approx(np.var(rows, axis=0, ddof=1).sum(), rel=1e-4)
    products = rows @ rows.T
    off_diagonal = products[~np.eye(len(rows), dtype=bool)].mean()
    assert found.signal == pytest.approx(off_diagonal, rel=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())
    quarter = gradient_noise(model, packed_batches(chosen, batch_size=3, device=model.device), factor=4)
    assert quarter == (pytest.approx(found.noise / 4), found.signal)


def test_noise_and_signal_are_unbiased(tokenizer: Any, blocks: Blocks) -> None:
    """Over all triples of batches from four, so exactly: their mean is the variance and the squared mean of the four."""
    model = build_model(SMALL, tokenizer, seed=0)
    rows = gradients(model, some(blocks, np.arange(4)), 1)
    estimates = [
        gradient_noise(model, packed_batches(some(blocks, list(triple)), batch_size=1, device=model.device))
        for triple in itertools.product(range(4), repeat=3)
    ]
    noise, signal = np.mean(estimates, axis=0)
    assert noise == pytest.approx(np.var(rows, axis=0).sum(), rel=1e-4)
    assert signal == pytest.approx(np.square(rows.mean(axis=0)).sum(), rel=1e-4)


def test_one_batch_tells_nothing_of_the_noise(tokenizer: Any, blocks: Blocks) -> None:
    model = build_model(SMALL, tokenizer, seed=0)
    for count in (0, 1):
        chosen = some(blocks, np.arange(count))
        with pytest.raises(ValueError, match=f"at least 2 batches, got {count}"):
            gradient_noise(model, packed_batches(chosen, batch_size=1, device=model.device))


# The condition. -------------------------------------------------------------------------------------------------------


def test_the_condition_at_the_closeness_of_the_docstring() -> None:
    closeness = math.sqrt(2)
    assert least_ratio(closeness) == pytest.approx(1)
    assert least_ratio(closeness, 4) == pytest.approx(0.5)
    assert least_ratio(closeness, 2) == pytest.approx(0)
    assert largest_factor(30.0, closeness) == pytest.approx(32)


@pytest.mark.parametrize("closeness", [1.1, math.sqrt(2), 3.0])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 40.0])
def test_the_largest_factor_is_where_the_equilibria_cannot_be_close(closeness: float, ratio: float) -> None:
    """Brute force over what (3) comes from: R and R', each with N and G that may lie anywhere within C."""
    factors = np.linspace(1, 2 * largest_factor(ratio, closeness) + 2, 4001)
    near = np.linspace(1 / closeness, closeness, 41)
    noise, signal = ratio * near, near  # κN' and G' by the factors that they may be off
    possible = [(factor * (noise.min() / factor + signal.min())) / (ratio + 1) <= closeness for factor in factors]
    breaks = factors[int(np.argmin(possible))]
    assert breaks == pytest.approx(largest_factor(ratio, closeness), abs=2 * (factors[1] - factors[0]))


def test_the_equilibrium_of_a_scale_invariant_loss_is_that_of_the_condition() -> None:
    """SGD with weight decay on the angle of a vector: E‖θ‖² is η(N + G)/2λ, and the equation would have η N/2λ."""
    rate, decay, runs, steps = 0.05, 0.05, 400, 6000
    rng = np.random.default_rng(0)
    weights = np.tile([1.0, 0.3], (runs, 1))
    squares, noise, signal = [], [], []
    for step in range(steps):
        # L = −cos 3φ/3 of the direction φ; its gradient sin 3φ / ‖θ‖ is along the tangent, as is the noise.
        size = np.linalg.norm(weights, axis=1)
        tangent = np.stack([-weights[:, 1], weights[:, 0]], axis=1) / size[:, None]
        slope = np.sin(3 * np.arctan2(weights[:, 1], weights[:, 0])) / size
        drawn = 1.0 * rng.standard_normal(runs) / size
        weights = (1 - rate * decay) * weights - rate * (slope + drawn)[:, None] * tangent
        if step > steps // 2:
            squares.append(np.square(size).mean())
            noise.append(np.mean(1 / size**2))
            signal.append(np.square(slope).mean())
    n, g, r = np.mean(noise), np.mean(signal), np.mean(squares)
    assert g > 0.1 * n  # so that it matters
    # One step shrinks the square by (1 − ηλ)² and not by 1 − 2ηλ: 0.1 %. The rest is chance, of about 0.1 %.
    assert r == pytest.approx(rate * (n + g) / (2 * decay), rel=0.02)
    assert r > 1.05 * rate * n / (2 * decay)


# Intervals. -----------------------------------------------------------------------------------------------------------


def test_the_interval_is_welchs() -> None:
    rng = np.random.default_rng(0)
    for sizes in ((2, 2), (4, 9), (6, 6)):
        values, others = (rng.standard_normal(size) * size for size in sizes)
        expected = scipy.stats.ttest_ind(values, others, equal_var=False)
        estimate, interval = welch(values.tolist(), others.tolist())
        assert estimate.value / estimate.stderr == pytest.approx(expected.statistic)
        assert interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert welch([1.0, 1.0], [0.5, 0.5]) == ((0.5, 0.0), (0.5, 0.5))


def test_agreement_says_how_much_is_left_possible() -> None:
    agreeing = Difference("excess", "SVAG l=2", 0.1, 0.1, -0.2, 0.4)
    assert agreeing.agrees
    assert agreeing.within == 0.4
    assert not Difference("excess", "SVAG l=2", -0.3, 0.1, -0.4, -0.2).agrees


# The check. -----------------------------------------------------------------------------------------------------------


def flatness(model: PreTrainedModel) -> tuple[float, float]:
    """Stands for an estimator: it tells apart all weights."""
    return sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters()), 0.25


@pytest.fixture(scope="module")
def report() -> SdeReport:
    with cpu_threads(1):
        return sde_check(
            LANGUAGE, SMALL, settings=TINY, measure_flatness=flatness, flatness_name="weight norm", progress=False
        )


def test_all_kinds_run_for_the_same_time_from_the_same_start(report: SdeReport) -> None:
    assert [path.name for path in report.paths] == ["SGD", "SVAG l=1", "SVAG l=2", "SGD 2B"]
    assert [path.steps for path in report.paths] == [8, 8, 16, 4]
    assert [path.batch_size for path in report.paths] == [4, 4, 4, 8]
    assert [path.learning_rate for path in report.paths] == pytest.approx([0.1, 0.1, 0.05, 0.2])
    for path in report.paths:
        assert path.times == pytest.approx((0, 0.4, 0.8))
        assert path.times[-1] == pytest.approx(path.steps * path.learning_rate)
        assert {curve[0] for curve in path.excess} == {report.description["start"]["excess"]}
        assert path.diverged == 0
        for measure in ("excess", "flatness", "accuracy"):
            assert len(path.final(measure)) == 3
        assert len({*path.final("flatness")}) == 3  # no two runs have the same batches
        assert path.flatness_stderr == (0.25,) * 3
    ends = [value for path in report.paths for value in path.flatness]
    assert len({*ends}) == len(ends)


def test_the_differences_are_those_of_the_paths(report: SdeReport) -> None:
    assert len(report.differences) == 3 * 3
    sgd = report.paths[0]
    by_name = {path.name: path for path in report.paths}
    for one in report.differences:
        estimate, interval = welch(by_name[one.name].final(one.measure), sgd.final(one.measure))
        assert (one.value, one.stderr) == estimate
        assert (one.low, one.high) == interval
    last = np.array(sgd.excess)[:, -1] - np.array(sgd.excess)[:, -2]
    assert report.drift.value == pytest.approx(last.mean())


def test_the_scaling_rows_follow_from_the_noise(report: SdeReport) -> None:
    own, scaled = report.scalings
    assert (own.batch_factor, scaled.batch_factor) == (1, 2)
    for one in report.scalings:
        assert one.noise > 0
        if one.reason is None:
            assert one.ratio == pytest.approx(one.noise / one.signal)
    assert own.predicted_ratio == own.ratio
    assert scaled.predicted_ratio == pytest.approx(own.ratio / 2)
    assert own.least_ratio == pytest.approx(1)
    assert scaled.least_ratio == pytest.approx(0)
    assert report.largest_factor == pytest.approx(2 + own.ratio)


def test_the_result_depends_on_the_arguments_alone(report: SdeReport) -> None:
    torch.manual_seed(1)
    again = sde_check(
        LANGUAGE, SMALL, settings=TINY, measure_flatness=flatness, flatness_name="weight norm", progress=False
    )
    assert again == report


def test_a_given_start_is_used_and_left_alone(tokenizer: Any) -> None:
    start = build_model(SMALL, tokenizer, seed=7)
    before = flatness(start)
    settings = dataclasses.replace(TINY, amplifications=(3,), batch_factors=(), seeds=2)
    found = sde_check(LANGUAGE, SMALL, settings=settings, start=start, task=LANGUAGE.tasks[-1], progress=False)
    assert flatness(start) == before
    assert found.task == LANGUAGE.tasks[-1].name
    assert found.description["start"]["trained_here"] is False
    assert found.start_flatness is None
    assert found.flatness_name is None
    assert {one.measure for one in found.differences} == {"excess", "accuracy"}
    # A model without training knows nothing.
    rng = np.random.default_rng(np.random.SeedSequence(0).spawn(4)[1])
    validation = LANGUAGE.sample(settings.validation_documents, rng)
    assert found.description["start"]["excess"] == ExactLoss(LANGUAGE, validation).measure(start).excess.value
    # The probe, on states of one document after the other.
    sets = []
    for child in (2, 3):
        rng = np.random.default_rng(np.random.SeedSequence(0).spawn(4)[child])
        examples = LANGUAGE.tasks[-1].sample(settings.labelled_documents, rng)
        states = []
        for example in examples:
            [row] = encode([" ".join(example.words)], tokenizer)
            with torch.no_grad():
                output = start(torch.tensor([[tokenizer.eos_token_id, *row]]), output_hidden_states=True)
            states.append(output.hidden_states[-1][0, -1].double().numpy())
        sets.append((np.array(states), np.array([example.label for example in examples])))
    (train, labels), (test, test_labels) = sets
    mean, scale = train.mean(axis=0), train.std(axis=0)
    probe = LogisticRegression(max_iter=1000).fit((train - mean) / scale, labels)
    expected = probe.score((test - mean) / scale, test_labels)
    # Rounding may move a document that lies on a boundary.
    assert found.start_accuracy == pytest.approx(expected, abs=1.5 / len(test))


def test_runs_that_diverge_are_told_and_not_compared() -> None:
    # Batches of 2 with twice a rate that is too large already.
    settings = dataclasses.replace(TINY, learning_rate=1e6, seeds=2)
    found = sde_check(LANGUAGE, SMALL, settings=settings, progress=False)
    wild = [path for path in found.paths if path.diverged]
    assert wild
    for one in found.differences:
        if any(path.diverged for path in found.paths if path.name in ("SGD", one.name)):
            assert one.reason is not None
            assert "diverged" in one.reason
            assert math.isnan(one.value)
            assert math.isnan(one.within)
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert any(row["reason"] and row["agrees"] is None and row["value"] is None for row in record["differences"])
    assert "diverged" in found.table()
    pytest.importorskip("matplotlib")
    labels = [line.get_label() for axis in found.draw().axes for line in axis.get_lines()]
    assert any(label.endswith("of 2 diverged)") for label in labels)


def test_the_table_and_the_files(report: SdeReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = report.table()
    for words in (
        "SGD and its equation on the language hmm (seed 0): gpt2 of width 16 and depth 1",
        "weight norm",
        f"accuracy on {LANGUAGE.tasks[0].name}",
        "SVAG l=2",
        "SGD 2B",
        "Of 9 such intervals about 0.5 would miss 0 by chance",
    ):
        assert words in text
    assert all(len(line) == len(line.rstrip()) for line in text.splitlines())
    paths = report.write(tmp_path / "out")
    assert [path.name for path in paths] == ["sde.json", "sde.txt", "sde.png", "sde.svg"]
    assert paths[1].read_text(encoding="utf-8") == text
    record = json.loads(paths[0].read_text(encoding="utf-8"))
    assert record["schema_version"] == 1
    assert record == json.loads(json.dumps(report.to_dict()))
    assert record["paths"][2]["amplification"] == 2
    assert record["differences"][0]["agrees"] in (True, False)
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    first = paths[3].read_bytes()
    report.write(tmp_path / "out")
    assert paths[3].read_bytes() == first
    axes = report.draw().axes
    assert [[line.get_label() for line in axis.get_lines()] for axis in axes] == [
        ["SGD", "SVAG l=1", "SVAG l=2"],
        ["SGD", "SGD 2B"],
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seeds": 1}, "seeds must be at least 2, got 1"),
        ({"amplifications": ()}, "amplifications must be whole numbers from 1"),
        ({"amplifications": (0, 1)}, "amplifications must be whole numbers from 1"),
        ({"amplifications": (2, 2)}, "each value once"),
        ({"batch_factors": (3,)}, "divide the 16 steps, got 3"),
        ({"batch_factors": (1,)}, "at least 2"),
        ({"evaluations": 5}, "evaluations is 5, more than the 4 steps of the shortest run"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"closeness": 1.0}, "closeness above 1"),
        ({"gradient_batches": 1}, "gradient_batches must be at least 2"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(QUICK, **wrong)


def test_a_language_without_tasks_is_an_error() -> None:
    class Silent:
        name, tasks = "silent", ()

    silent: Any = Silent()
    with pytest.raises(ValueError, match="the language 'silent' has no task"):
        sde_check(silent, SMALL, settings=TINY, progress=False)


def test_default_settings_are_those_of_the_issue() -> None:
    assert SdeSettings().amplifications == (1, 2, 4, 8)
    assert SdeSettings().closeness == pytest.approx(math.sqrt(2))
