"""Values that a metric cannot have: refused by `add`, listed and left blank by `build`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from result_files import loss_config, result_file, write

from harness_ext.leaderboard.build import build_board
from harness_ext.leaderboard.cache import Cache
from harness_ext.leaderboard.ranges import range_of
from harness_ext.leaderboard.read import result_record
from harness_ext.leaderboard.submission import validate

SHARES = [
    "acc", "acc_norm", "acc_pmi", "acc_batch", "acc_context", "balanced_acc", "macro_f1", "f1", "ece", "majority_rate",
    "acc_worst", "acc_best", "acc_ensemble", "acc_mixture", "acc@it_was", "pass@1", "mc2",
]  # fmt: skip


@pytest.mark.parametrize("metric", SHARES)
def test_shares_of_our_tasks_lie_between_0_and_1(metric: str) -> None:
    possible = range_of(metric, "natural")
    assert possible is not None
    assert [value in possible for value in (-5, -1e-3, 0, 0.5, 1, 1 + 1e-12, 1.001, 75.0, 1e308)] == [
        False, False, True, True, True, True, False, False, False
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "inside", "outside"),
    [
        ("mcc", [-1, 0, 1], [-1.01, 1.01]),
        ("brier", [0, 2], [-0.1, 2.1]),
        ("loss", [0, 11.5, 1e6], [-0.1]),
        ("bits_per_byte", [0, 1.2], [-0.1]),
        ("word_perplexity", [1e-3, 40, 1e300], [0, -1]),
        ("fisher_trace", [0, 1e9], [-1]),
        ("exact_match,strict-match", [0, 1, 75], [-1, 101]),  # SQuAD 2.0 gives per cent
        ("f1", [0, 75], [-1, 101]),
        ("acc,none", [0, 1], [75]),
    ],
)
def test_what_lm_evals_own_tasks_may_have(metric: str, inside: list[float], outside: list[float]) -> None:
    possible = range_of(metric, "other")
    assert possible is not None
    assert all(value in possible for value in inside)
    assert not any(value in possible for value in outside)


@pytest.mark.parametrize("metric", ["hessian_trace", "lambda_max", "likelihood_diff", "acc_difference", "bleu_diff"])
def test_of_other_metrics_nothing_is_known(metric: str) -> None:
    assert range_of(metric, "other") is None


def hostile(value: Any, metric: str = "acc", **changes: Any) -> dict[str, Any]:
    entry = {f"{metric},none": value, f"{metric}_stderr,none": 0.01, "mcc,none": 0.5}
    return result_file({"reviews": entry}, **changes)


@pytest.mark.parametrize(
    ("value", "metric", "expected"),
    [
        (-5, "acc", "acc of reviews is -5, expected 0 to 1"),
        (1e308, "acc_norm", "acc_norm of reviews is 1e+308, expected 0 to 1"),
        ("75.5", "acc", "acc of reviews is 75.5, expected 0 to 1"),
        (-0.5, "loss", "loss of reviews is -0.5, expected 0 or more"),
        (0, "word_perplexity", "word_perplexity of reviews is 0, expected a number above 0"),
    ],
)
def test_add_refuses_the_file_and_build_leaves_the_cell_blank(
    value: Any, metric: str, expected: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "results_1.json", hostile(value, metric))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        validate(path)
    assert str(caught.value) == f"{path}: {expected}"
    board = build_board(tmp_path, Cache(None, ""))
    assert [(entry.source, entry.reason) for entry in board.unreadable] == [("results_1.json", expected)]
    [score] = board.scores
    assert tuple(score.metrics[metric]) == (None, None)
    assert score.metrics["mcc"].value == 0.5
    assert score.interval is None or board.columns[0].metric == "mcc"


@pytest.mark.parametrize("value", [0, 1, 0.5, "N/A", math.nan, None])
def test_possible_values_and_blanks_are_no_problem(value: Any) -> None:
    assert result_record(hostile(value), digest="").problems == ()


def test_a_prompt_of_a_sweep_is_checked_too() -> None:
    entry = {"name": "it_was", "label_words": {"a": ["b"]}, "metrics": {"acc": -3, "ece": 0.1, "brier": 1.5}}
    config = loss_config() | {"metadata": {"version": 1.0, "report": {"prompts": [entry]}}}
    found = result_record(hostile(0.5, configs={"reviews": config}), digest="")
    assert found.problems == ("acc of reviews, prompt it_was is -3, expected 0 to 1",)
    assert found.tasks[0].prompt_results[0]["metrics"] == {"ece": 0.1, "brier": 1.5}


def test_a_model_whose_name_no_file_system_takes_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness_ext.cli import main

    monkeypatch.chdir(tmp_path)
    files = [
        write(tmp_path / f"results_{end}.json", result_file(model="x" * 290 + end, documents=2)) for end in ("a", "b")
    ]
    for _ in range(2):  # again changes nothing
        assert main(["leaderboard", "add", *map(str, files), "--results", "out"]) == 0, capsys.readouterr().err
        folders = sorted(path.name for path in Path("out").iterdir())
        assert len(folders) == 2
        assert all(name.startswith("x" * 80 + "-") and len(name) == 89 for name in folders)
