"""The bounded classifiers against general solvers, the inequalities as properties, and a tiny lab checked as a whole."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit, rel_entr
from transformers import AutoModelForCausalLM

from harness_ext.lab.checkpoints import Checkpoint, Estimate
from harness_ext.lab.languages import make_language
from harness_ext.lab.languages.base import Language, write_dataset
from harness_ext.lab.lookup import save_lookup
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.theory import TheoryReport, check_theory, fit_bounded, logistic_losses, read_contexts
from harness_ext.lab.train import cpu_threads

SIZES = {"states": 4, "words": 8, "lengths": (3, 6)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with cpu_threads(1):
        yield


def problem(seed: int, *, rows: int = 40, size: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Distributions and signs that depend on them."""
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(size, 0.7), rows)
    signs = np.where(rng.random(rows) < expit(4 * (probabilities[:, 0] - probabilities[:, 1])), 1.0, -1.0)
    return probabilities, signs


def mean_loss(probabilities: np.ndarray, signs: np.ndarray, coefficients: np.ndarray) -> float:
    return sum(
        math.log1p(math.exp(-y * sum(v * p for v, p in zip(coefficients, row, strict=True))))
        for row, y in zip(probabilities, signs, strict=True)
    ) / len(signs)


# --------------------------------------------------------------------------------------------------------- the fits


@pytest.mark.parametrize("bound", [0.5, 4.0, 60.0, 1e4])
@pytest.mark.parametrize("seed", range(3))
def test_the_box_against_lbfgsb(bound: float, seed: int) -> None:
    probabilities, signs = problem(seed)

    def value_and_gradient(u: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (probabilities @ u) * bound
        slopes = -(probabilities.T @ (signs * expit(-margins))) * bound / len(signs)
        return float(np.logaddexp(0, -margins).mean()), slopes

    oracle = minimize(
        value_and_gradient,
        np.zeros(probabilities.shape[1]),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-1, 1)] * probabilities.shape[1],
        options={"maxiter": 20000, "maxfun": 100000, "ftol": 1e-15, "gtol": 1e-9},
    )
    found = fit_bounded(probabilities, signs, bound)
    assert np.abs(found.coefficients).max() <= bound
    assert found.loss == pytest.approx(mean_loss(probabilities, signs, found.coefficients), rel=1e-12)
    assert 0 <= found.gap <= 1e-6
    # The minimum is not below what the certificate says, and the fit is no better than a minimum.
    assert found.loss - found.gap <= oracle.fun + 1e-12
    assert found.loss <= oracle.fun + 1e-6


@pytest.mark.parametrize("bound", [0.5, 4.0, 60.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_box_across_a_span_against_slsqp(bound: float, seed: int) -> None:
    probabilities, signs = problem(seed)
    embedding = np.random.default_rng(100 + seed).normal(size=(7, 3))

    def value_and_gradient(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (probabilities @ (embedding @ weights)) * bound
        slopes = -embedding.T @ (probabilities.T @ (signs * expit(-margins))) * bound / len(signs)
        return float(np.logaddexp(0, -margins).mean()), slopes

    constraint = {
        "type": "ineq",
        "fun": lambda weights: np.concatenate([1 - embedding @ weights, 1 + embedding @ weights]),
        "jac": lambda weights: np.concatenate([-embedding, embedding]),
    }
    oracle = minimize(
        value_and_gradient,
        np.zeros(3),
        jac=True,
        method="SLSQP",
        constraints=[constraint],
        options={"maxiter": 2000, "ftol": 1e-14},
    )
    assert oracle.success
    found = fit_bounded(probabilities, signs, bound, embedding=embedding)
    assert np.abs(found.coefficients).max() <= bound
    weights, residual, *_ = np.linalg.lstsq(embedding, found.coefficients, rcond=None)
    assert residual.sum() < 1e-18 * bound**2
    features = probabilities @ embedding  # Φᵀp of each row
    assert found.loss == pytest.approx(logistic_losses(features, signs, weights).mean(), rel=1e-10)
    assert 0 <= found.gap <= 1e-6
    # SLSQP may leave the box by rounding.
    assert found.loss - found.gap <= oracle.fun + 1e-8
    assert found.loss <= oracle.fun + 1e-6


def test_an_embedding_of_full_rank_restricts_nothing_and_dependent_columns_add_nothing() -> None:
    probabilities, signs = problem(5)
    rng = np.random.default_rng(6)
    square = fit_bounded(probabilities, signs, 10.0, embedding=rng.normal(size=(7, 12)))
    assert square.loss == pytest.approx(fit_bounded(probabilities, signs, 10.0).loss, abs=2e-6)
    narrow = rng.normal(size=(7, 2))
    doubled = fit_bounded(
        probabilities, signs, 10.0, embedding=np.column_stack([narrow, narrow @ rng.normal(size=(2, 3))])
    )
    assert doubled.loss == pytest.approx(fit_bounded(probabilities, signs, 10.0, embedding=narrow).loss, abs=2e-6)


def test_separable_classes_are_bounded_by_the_box() -> None:
    """One word each: the best v is B on one and −B on the other."""
    found = fit_bounded(np.eye(2), np.array([1.0, -1.0]), 5.0)
    np.testing.assert_allclose(found.coefficients, [5.0, -5.0], atol=1e-3)
    assert found.loss == pytest.approx(math.log1p(math.exp(-5)), abs=1e-6)


@pytest.mark.parametrize("bound", [1.0, 1e2, 1e4, 1e5])
def test_words_that_go_together(bound: float) -> None:
    """More words than rows, some of them copies of others or absent: the minimum is still found, and certified."""
    probabilities, signs = problem(7, rows=12, size=9)
    repeated = np.column_stack([probabilities / 2, probabilities / 2, np.zeros((12, 6))])
    found = fit_bounded(repeated, signs, bound)
    assert 0 <= found.gap <= 1e-6
    assert found.loss == pytest.approx(fit_bounded(probabilities, signs, bound).loss, abs=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bound": 0.0}, "bound is 0.0"),
        ({"bound": math.inf}, "bound is inf"),
        ({"signs": np.array([0.0, 1.0])}, "signs of -1 or 1"),
        ({"signs": np.array([1.0])}, "and n signs"),
        ({"embedding": np.zeros((3, 2))}, "embedding of 2 rows"),
        ({"embedding": np.zeros((2, 2))}, "not 0"),
    ],
)
def test_wrong_problems(changes: dict[str, object], message: str) -> None:
    arguments = {"probabilities": np.eye(2), "signs": np.array([1.0, -1.0]), "bound": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        fit_bounded(**arguments)


# ---------------------------------------------------------------------------------------------------- inequalities


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), bound=st.floats(0.01, 100.0), nearness=st.floats(1e-4, 1.0))
def test_the_bound_holds_for_any_classifier_on_any_rows(seed: int, bound: float, nearness: float) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.dirichlet(np.full(5, 0.5), 6)
    model = (1 - nearness) * truth + nearness * rng.dirichlet(np.full(5, 0.5), 6)
    signs = rng.choice([-1.0, 1.0], 6)
    excess = rel_entr(truth, model).sum(axis=1).mean()
    # Corners of the box are the worst.
    coefficients = bound * rng.choice([-1.0, 1.0], 5) * np.where(rng.random(5) < 0.5, 1.0, rng.random(5))
    on_model, on_truth = (logistic_losses(of, signs, coefficients).mean() for of in (model, truth))
    assert on_model <= on_truth + bound * math.sqrt(2 * excess) + 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_where_the_bound_says_something(seed: int) -> None:
    """τ(B) + B √(2 ε) is below log 2 for some B if and only if ε < ‖E y p‖₁² / 8."""
    probabilities, signs = problem(seed)
    informative = np.abs((signs[:, None] * probabilities).mean(axis=0)).sum() ** 2 / 8
    bounds = np.geomspace(1e-2, 100, 25)
    taus = np.array([fit_bounded(probabilities, signs, bound).loss for bound in bounds])
    for factor, is_informative in ((0.9, True), (1.0, False), (1.5, False)):
        least = (taus + bounds * math.sqrt(2 * factor * informative)).min()
        # A fit is up to 1e-6 above its minimum; one that says something is so by more at the smallest B.
        assert bool(least < math.log(2) - 1e-9) == is_informative


# ------------------------------------------------------------------------------------------------------- a tiny lab


def a_checkpoint(folder: Path, run: str, step: int, excess: float, objective: str = "cross_entropy") -> Checkpoint:
    return Checkpoint(
        folder=folder,
        run=run,
        seed=0,
        algorithm="adamw",
        objective=objective,
        step=step,
        tokens_seen=0,
        num_parameters=1,
        language_sha256="0",
        excess=Estimate(excess, 0.01),
        validation_loss=Estimate(3.0, 0.01),
        model={},
    )


def a_lab(out: Path, language: Language) -> list[Checkpoint]:
    """Data, a lookup table, and two models with random weights, one of which is near uniform."""
    out.mkdir()
    (out / "language.json").write_text(json.dumps(language.to_dict()))
    rng = np.random.default_rng(0)
    for task in language.tasks:
        write_dataset(out / "data", task, {"train": task.sample(90, rng), "test": task.sample(70, rng)})
    tokenizer = language.tokenizer(max_length=64)
    save_lookup(out / "lookup", language, tokenizer)
    checkpoints = [a_checkpoint(out / "lookup", "lookup", 0, 0.0)]
    for step, spread in ((10, 1.0), (20, 0.3)):
        model = build_model(ModelConfig(width=6, depth=1, heads=2), tokenizer, seed=1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(spread if parameter.ndim > 1 else 1.0)
        folder = out / f"step{step}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        checkpoints.append(a_checkpoint(folder, "gpt2", step, spread))
    return checkpoints


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Checkpoint], TheoryReport]:
    out = tmp_path_factory.mktemp("lab") / "out"
    checkpoints = a_lab(out, make_language("hmm", 0, SIZES))
    quad = a_checkpoint(out / "step10", "quad", 5, 1.0, "quad")
    with cpu_threads(1):
        report = check_theory(out, bound_B=(2.0, 20.0), checkpoints=[*checkpoints, quad], progress=False)
    return out, checkpoints, report


def test_what_has_rows_and_what_is_left_out(lab: tuple[Path, list[Checkpoint], TheoryReport]) -> None:
    report = lab[2]
    language = make_language("hmm", 0, SIZES)
    binary = sorted(task.name for task in language.tasks if len(task.classes) == 2)
    keys = [(row.task, row.bound_B, row.run, row.step) for row in report.rows]
    assert len(binary) > 1
    assert keys == [
        (task, bound, run, step)
        for task in binary
        for bound in (2.0, 20.0)
        for run, step in (("gpt2", 10), ("gpt2", 20), ("lookup", 0))
    ]
    others = {task.name for task in language.tasks} - set(binary)
    assert set(report.left_out) == others | {"quad-00000005"}
    assert "classes" in report.left_out["hmm_regime"]
    assert "objective is quad" in report.left_out["quad-00000005"]


def test_the_theorems_hold(lab: tuple[Path, list[Checkpoint], TheoryReport]) -> None:
    for row in lab[2].rows:
        slack = row.bound_B * math.sqrt(2 * row.excess_task)
        assert row.bound == pytest.approx(row.tau + slack)
        assert row.bound_phi == pytest.approx(row.tau_phi + slack)
        # On test documents for the transferred classifier, on training documents for the minima.
        assert row.loss_transferred <= row.bound + 1e-9
        assert row.train_loss_pf <= row.train_bound + row.gap
        assert row.train_loss_cmean >= row.train_loss_pf - row.gap
        assert row.train_tau <= math.log(2)
        assert row.bayes_loss < row.tau + 4 * row.tau_stderr
        assert 0 <= row.gap <= 1e-6


def test_the_lookup_table_attains_tau(lab: tuple[Path, list[Checkpoint], TheoryReport]) -> None:
    rows = [row for row in lab[2].rows if row.run == "lookup"]
    for row in rows:
        assert row.excess_task < 1e-12
        assert row.phi_rank == row.vocabulary == 9
        for loss in (row.loss_pf, row.loss_cmean, row.tau_phi, row.loss_transferred):
            # p_f is p* rounded to float32.
            assert loss == pytest.approx(row.tau, abs=2e-3)
        assert row.train_loss_pf == pytest.approx(row.train_tau, abs=1e-5)


def test_a_row_against_the_definitions(lab: tuple[Path, list[Checkpoint], TheoryReport]) -> None:
    """One document at a time, and the classifiers by the solver that was tested above."""
    out, checkpoints, report = lab
    language = make_language("hmm", 0, SIZES)
    row = next(row for row in report.rows if row.step == 10 and row.bound_B == 20.0)
    model = AutoModelForCausalLM.from_pretrained(checkpoints[1].folder)
    embedding = model.get_output_embeddings().weight.detach().double().numpy()
    index = {word: token for token, word in enumerate(language.words)}
    truths, models, signs = {}, {}, {}
    for split in ("train", "test"):
        lines = (out / "data" / "harness_ext" / row.task / f"{split}.jsonl").read_text().splitlines()
        documents = [json.loads(line) for line in lines]
        words = [document["text"].split() for document in documents]
        signs[split] = np.array([1.0 if document["label"] == 1 else -1.0 for document in documents])
        truths[split] = np.array([language.next_word(of_one) for of_one in words])
        with torch.no_grad():
            logits = [model(torch.tensor([[8, *map(index.get, of_one)]])).logits[0, -1] for of_one in words]
        models[split] = torch.stack(logits).double().softmax(dim=-1).numpy()
    excess = rel_entr(truths["test"], models["test"]).sum(axis=1)
    assert row.excess_task == pytest.approx(excess.mean(), rel=1e-5)
    assert row.excess_task_stderr == pytest.approx(excess.std(ddof=1) / math.sqrt(70), rel=1e-5)
    assert row.phi_rank == 6
    for name, table, phi in (
        ("loss_pf", models, None),
        ("tau", truths, None),
        ("loss_cmean", models, embedding),
        ("tau_phi", truths, embedding),
    ):
        fit = fit_bounded(table["train"], signs["train"], 20.0, embedding=phi)
        losses = logistic_losses(table["test"], signs["test"], fit.coefficients)
        # Two fits of one problem within 1e-6 of its minimum, whose test losses differ by more.
        assert getattr(row, name) == pytest.approx(losses.mean(), abs=2e-3)
        assert getattr(row, f"{name}_stderr") == pytest.approx(losses.std(ddof=1) / math.sqrt(70), rel=2e-2)


def test_a_language_whose_words_are_some_of_the_tokens(tmp_path: Path) -> None:
    """With a cue after the document, and a tokenizer of the GPT-2 kind."""
    language = make_language("reviews")
    (task,) = (task for task in language.tasks if len(task.classes) == 2)
    checkpoints = a_lab(tmp_path / "out", language)
    report = check_theory(tmp_path / "out", checkpoints=checkpoints, num_documents=50, progress=False)
    contexts = read_contexts(tmp_path / "out" / "data", language, task, "test", 50)
    assert all(text.endswith(f" {' '.join(task.cue)}") for text in contexts.texts)
    words = contexts.texts[7].split()
    np.testing.assert_allclose(contexts.probabilities[7], language.next_word(words), rtol=1e-12, atol=1e-15)
    (bound,) = {row.bound_B for row in report.rows}
    assert math.log2(bound) == int(math.log2(bound))
    for row in report.rows:
        assert row.num_train == row.num_test == 50
        assert row.vocabulary > len(language.words) + 1
        assert row.loss_transferred <= row.bound + 1e-9
        assert row.train_loss_pf <= row.train_bound + row.gap
        assert row.phi_rank == (row.vocabulary if row.run == "lookup" else 6)
    assert next(row for row in report.rows if row.run == "lookup").excess_task < 1e-12


def test_a_measured_bound_is_the_first_that_binds_little(lab: tuple[Path, list[Checkpoint], TheoryReport]) -> None:
    out, checkpoints, _ = lab
    language = make_language("hmm", 0, SIZES)
    task = next(task for task in language.tasks if task.name == "hmm_switch")
    (row,) = check_theory(out, tasks=["hmm_switch"], checkpoints=checkpoints[:1], progress=False).rows
    train = read_contexts(out / "data", language, task, "train")
    free, at, below = (
        fit_bounded(train.probabilities, train.signs, bound).loss for bound in (1e4, row.bound_B, row.bound_B / 2)
    )
    assert at <= free + 1e-3 < below


# ------------------------------------------------------------------------------------------------------------- output


def test_tables_and_figures(lab: tuple[Path, list[Checkpoint], TheoryReport], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = lab[2]
    paths = report.write(tmp_path / "theory")
    assert sorted(path.name for path in paths) == ["theory.csv", "theory.png", "theory.svg", "theory_left_out.json"]
    with paths[0].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(report.rows)
    for row, read in zip(report.rows, rows, strict=True):
        assert (read["checkpoint"], read["task"]) == (row.checkpoint, row.task)
        assert float(read["loss_pf"]) == row.loss_pf
        assert int(read["step"]) == row.step
    assert json.loads(paths[1].read_text()) == report.left_out
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in paths[3].read_text()
    again = report.write(tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_the_figure_has_a_panel_for_each_task_and_bound(lab: tuple[Path, list[Checkpoint], TheoryReport]) -> None:
    pytest.importorskip("matplotlib")
    report = lab[2]
    panels = {(row.task, row.bound_B) for row in report.rows}
    titles = [axis.get_title(loc="left") for axis in report.draw().axes if axis.get_visible()]
    assert sorted(titles) == sorted(f"{task},  B = {bound:g}" for task, bound in panels)
    single = replace(report, rows=tuple(row for row in report.rows if row.bound_B == 2.0))
    assert sum(axis.get_visible() for axis in single.draw().axes) == len(panels) / 2


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bound_B": 0.0}, "bound_B is 0.0"),
        ({"bound_B": ()}, r"bound_B is \(\)"),
        ({"num_documents": 1}, "at least 2"),
        ({"tasks": ["hmm_regimes"]}, "unknown task 'hmm_regimes'.*hmm_switch"),
        ({"tasks": ["hmm_regime"]}, "4 classes"),
    ],
)
def test_wrong_arguments(
    lab: tuple[Path, list[Checkpoint], TheoryReport], arguments: dict[str, object], message: str
) -> None:
    out, checkpoints, _ = lab
    with pytest.raises(ValueError, match=message):
        check_theory(out, checkpoints=checkpoints, progress=False, **arguments)


def test_wrong_checkpoints(lab: tuple[Path, list[Checkpoint], TheoryReport], tmp_path: Path) -> None:
    out, checkpoints, _ = lab
    with pytest.raises(ValueError, match="objective cross_entropy, found none among 1"):
        check_theory(out, checkpoints=[replace(checkpoints[1], objective="quad")], progress=False)
    with pytest.raises(ValueError, match="found one of another"):
        check_theory(out, checkpoints=[*checkpoints, replace(checkpoints[1], language_sha256="1")], progress=False)
    other = make_language("hmm", 0, {**SIZES, "words": 7})
    save_lookup(tmp_path / "other", other, other.tokenizer(max_length=8))
    stranger = [a_checkpoint(tmp_path / "other", "other", 0, 0.0)]
    with pytest.raises(ValueError, match=r"other: .*Is this checkpoint of another language\?"):
        check_theory(out, checkpoints=stranger, progress=False)


def test_missing_files(lab: tuple[Path, list[Checkpoint], TheoryReport], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"language\.json is missing"):
        check_theory(tmp_path, progress=False)
    (tmp_path / "language.json").write_text((lab[0] / "language.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl is missing"):
        check_theory(tmp_path, checkpoints=lab[1], progress=False)
