"""Traces against accuracies within groups: joining files, correlations, tables, figure."""

from __future__ import annotations

import csv
import json
import math
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness_ext.correlation import spearman_rho
from harness_ext.lab.flatness_report import (
    ALL_GROUPS,
    Row,
    correlate,
    draw,
    read_rows,
    table_lines,
    widened,
    write,
)
from harness_ext.lab.result_files import Measured, read_result_files

WIDENED = widened("fisher_trace")
ALGORITHMS = ("adamw", "sgd", "sam", "adamw", "adversarial")


def rows(
    slope: float = -0.02, noise: float = 0.004, stderr: float = 0.006, tasks: tuple[str, ...] = ("probe_a",)
) -> list[Row]:
    """Fifteen models in three groups; accuracy falls with the trace in each, by `slope` a factor of e."""
    rng = np.random.default_rng(0)
    result = []
    for place, group in enumerate("ABC"):
        for number in range(5):
            trace = math.exp(rng.uniform(3, 5))
            for task in tasks:
                accuracy = 0.9 - 0.05 * place + slope * math.log(trace) + noise * rng.normal()
                result.append(
                    Row(
                        model=f"{ALGORITHMS[number]}-{group}{number}",
                        run=f"{ALGORITHMS[number]}-{group}{number}",
                        group=group,
                        algorithm=ALGORITHMS[number],
                        task=task,
                        loss=Measured(0.02 * (place + 1) + 0.0005 * number, 0.0003),
                        accuracy=Measured(accuracy, stderr),
                        traces={"fisher_trace": Measured(trace, 0.04 * trace)},
                        sizes={"fisher_trace": 1000},
                    )
                )
    return result


def test_checkpoints_of_a_run_are_permuted_together() -> None:
    apart = [one for one in correlations_of(rows()) if one.group == ALL_GROUPS]
    together = [replace(row, run=row.model[-1]) for row in rows()]
    (found,) = [one for one in correlations_of(together) if one.group == ALL_GROUPS]
    assert found.correlation.value == apart[0].correlation.value
    assert found.correlation.num_permutations == math.factorial(5)
    assert found.correlation.p_value > apart[0].correlation.p_value


def test_traces_of_models_of_unknown_size_do_not_compare() -> None:
    unknown = [replace(row, sizes={"fisher_trace": None}) for row in rows()]
    for one in correlations_of(unknown):
        assert one.correlation is None
        assert "sizes of" in one.reason
    some = [replace(row, sizes={"fisher_trace": None}) if row.group == "A" else row for row in rows()]
    (pooled,) = [one for one in correlations_of(some) if one.group == ALL_GROUPS]
    assert (pooled.num_models, pooled.num_left_out) == (10, 5)


def correlations_of(found: list[Row], **options: Any) -> list[Any]:
    return correlate(found, rng=np.random.default_rng(1), num_resamples=300, num_permutations=300, **options)


def test_pooled_and_by_group() -> None:
    found = correlations_of(rows())
    assert [(one.task, one.trace, one.group, one.num_models) for one in found] == [
        ("probe_a", "fisher_trace", group, number) for group, number in ((ALL_GROUPS, 15), ("A", 5), ("B", 5), ("C", 5))
    ]
    pooled = found[0].correlation
    used = rows()
    assert pooled.value == spearman_rho(
        [row.traces["fisher_trace"].value for row in used],
        [row.accuracy.value for row in used],
        [row.group for row in used],
    )
    assert pooled.value < -0.8
    assert pooled.p_value < 1e-3
    assert pooled.num_groups == 3


def test_no_correlation_is_drawn_over_accuracies_equal_within_their_errors() -> None:
    found = correlations_of(rows(slope=0, noise=0.002, stderr=0.02))
    assert all(one.correlation is None for one in found)
    assert found[0].reason.startswith("accuracies differ by no more than their errors (p = ")
    # Groups differ by 5 points; that is not a spread within them.
    assert found[0].spread.degrees_of_freedom == 12


def test_a_task_without_errors_is_refused() -> None:
    found = correlations_of(rows(stderr=math.nan))
    assert found[0].reason == "spread unknown: 15 of 15 values have no standard error"


def test_tables(tmp_path: Path) -> None:
    used = [*rows(), *rows(slope=0, noise=0.001, stderr=0.03, tasks=("probe_flat",))]
    found = correlations_of(used)
    lines = table_lines(found)
    assert len(lines) == 2 + 8
    assert lines[2].startswith("| probe_a | fisher_trace | all | 15 |  | -0.")
    assert "differ by no more than their errors" in lines[6]
    assert len({line.count("|") for line in lines}) == 1

    pytest.importorskip("matplotlib")
    paths = {path.name: path for path in write(used, found, tmp_path / "new")}
    assert set(paths) == {
        "flatness_models.csv",
        "flatness_correlations.csv",
        "flatness_fisher_trace.png",
        "flatness_fisher_trace.svg",
    }
    with paths["flatness_models.csv"].open(encoding="utf-8") as file:
        models = list(csv.DictReader(file))
    again = write(used, found, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [paths[path.name].read_bytes() for path in again]
    assert len(models) == 30
    assert float(models[0]["accuracy"]) == pytest.approx(used[0].accuracy.value, rel=1e-7)
    assert models[0]["hessian_trace"] == ""
    with paths["flatness_correlations.csv"].open(encoding="utf-8") as file:
        correlations = list(csv.DictReader(file))
    assert float(correlations[0]["value"]) == pytest.approx(found[0].correlation.value, rel=1e-7)
    assert correlations[0]["is_enumerated"] == "True"
    refused = next(line for line in correlations if line["task"] == "probe_flat")
    assert (refused["value"], refused["p_value"]) == ("", "")
    assert refused["reason"].startswith("accuracies differ by no more")


def test_the_figure_says_what_was_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    used = [*rows(), *rows(slope=0, noise=0.001, stderr=0.03, tasks=("probe_flat",))]
    figure = draw(used, correlations_of(used), "fisher_trace")
    drawn = [panel for panel in figure.axes if panel.axison]
    titles = [panel.get_title(loc="left") for panel in drawn]
    assert titles[0].startswith("probe_a\nρ = −0.")
    assert titles[1] == "probe_flat\nno ρ: no spread beyond error"
    assert [len(panel.containers) for panel in drawn] == [15, 15]
    path = tmp_path / "figure.svg"
    figure.savefig(path)
    xml.etree.ElementTree.parse(path)
    with pytest.raises(ValueError, match="no model has hessian_trace"):
        draw(used, [], "hessian_trace")


# ------------------------------------------------------------------------------------------------------------- files


def write_results(folder: Path, pretrained: str, results: dict[str, Any], size: int | None = None) -> None:
    folder.mkdir(parents=True)
    config = {"model_args": {"pretrained": pretrained}, "model_num_parameters": size}
    content = {"results": results, "configs": {}, "config": config}
    (folder / "results_1.json").write_text(json.dumps(content), encoding="utf-8")


def groups_of(*models: tuple[str, int]) -> dict[str, Any]:
    return {
        "groups": [
            {
                "name": "A",
                "models": [
                    {
                        "name": f"{run}-{step:08d}",
                        "run": run,
                        "step": step,
                        "loss": {"value": 0.02, "stderr": 0.001},
                        "details": {"algorithm": run},
                    }
                    for run, step in models
                ],
            }
        ]
    }


ACCURACY = {"probe_a": {"acc,none": 0.8, "acc_stderr,none": 0.01, "ece,none": 0.1}}
FLATNESS = {"flatness_x": {"fisher_trace,none": 50.0, "fisher_trace_stderr,none": 2.0, "hessian_trace,none": "N/A"}}


def test_rows_join_the_files_of_a_model(tmp_path: Path) -> None:
    write_results(tmp_path / "1", "/moved/runs/sgd/checkpoints/step_00000600", ACCURACY)
    write_results(tmp_path / "2", "/moved/runs/sgd/checkpoints/step_00000600", FLATNESS)
    write_results(tmp_path / "3", "/moved/runs/sgd/checkpoints/step_00000700", {"probe_a": {"acc,none": 0.1}})
    write_results(tmp_path / "4", "/moved/runs/adamw/checkpoints/step_00000100", {"probe_b": {"acc,none": 0.7}})
    found = read_rows(groups_of(("sgd", 600), ("adamw", 100)), read_result_files([tmp_path]))
    assert [(row.model, row.task) for row in found] == [("sgd-00000600", "probe_a"), ("adamw-00000100", "probe_b")]
    assert found[0].accuracy == (0.8, 0.01)
    assert found[0].traces == {"fisher_trace": (50.0, 2.0)}
    assert math.isnan(found[1].accuracy.stderr)
    assert found[1].traces == {}


def test_a_trace_is_compared_among_models_of_one_size() -> None:
    """Two of fifteen are larger, in the middle of the ranks of the others; alone, each group's ρ is −1."""
    used = rows(noise=0.0)
    for place in (0, 6):
        sizes, traces = {"fisher_trace": 4000, WIDENED: 4000}, {"fisher_trace": Measured(1.0, 0.1)}
        used[place] = replace(used[place], sizes=sizes, traces=traces | {WIDENED: used[place].traces["fisher_trace"]})
    for place, row in enumerate(used):
        if WIDENED not in row.traces:
            traces = dict(row.traces) | {WIDENED: row.traces["fisher_trace"]}
            used[place] = replace(row, traces=traces, sizes={**row.sizes, WIDENED: 4000})
    found = {(one.trace, one.group): one for one in correlations_of(used)}
    counts = {key: (one.num_models, one.num_left_out) for key, one in found.items()}
    assert counts["fisher_trace", ALL_GROUPS] == (13, 2)
    assert [counts["fisher_trace", group] for group in "ABC"] == [(4, 1), (4, 1), (5, 0)]
    assert counts[WIDENED, ALL_GROUPS] == (15, 0)
    assert found["fisher_trace", ALL_GROUPS].correlation.value == pytest.approx(-1)
    assert found[WIDENED, ALL_GROUPS].correlation.value == pytest.approx(-1)
    assert "| fisher_trace | all | 13 | 2 |" in "\n".join(table_lines([found["fisher_trace", ALL_GROUPS]]))
    panel = draw(used, list(found.values()), "fisher_trace").axes[0]
    hollow = [drawn for drawn in panel.containers if drawn.lines[0].get_markerfacecolor() == "white"]
    assert len(hollow) == 2


def test_traces_of_widened_models_are_joined(tmp_path: Path) -> None:
    own, wide = tmp_path / "own", tmp_path / "wide"
    loss = {"loss,none": 2.5}
    write_results(own / "1", "runs/sgd/checkpoints/step_00000600", ACCURACY, size=1000)
    write_results(
        own / "2", "runs/sgd/checkpoints/step_00000600", {"flatness_x": FLATNESS["flatness_x"] | loss}, size=1000
    )
    of_wide = {"flatness_x": {"fisher_trace,none": 30.0, "fisher_trace_stderr,none": 1.0} | loss}
    write_results(wide / "1", "widened/sgd/checkpoints/step_00000600", of_wide, size=4000)
    [row] = read_rows(groups_of(("sgd", 600)), read_result_files([own]), widened_files=read_result_files([wide]))
    assert row.traces == {"fisher_trace": (50.0, 2.0), WIDENED: (30.0, 1.0)}
    assert row.sizes == {"fisher_trace": 1000, WIDENED: 4000}

    other = {"flatness_x": of_wide["flatness_x"] | {"loss,none": 2.6}}
    write_results(wide / "other", "widened/sgd/checkpoints/step_00000600", other, size=4000)
    with pytest.raises(ValueError, match=r"the widened sgd-00000600 has the loss 2\.60000 .*expected 2\.50000"):
        read_rows(
            groups_of(("sgd", 600)),
            read_result_files([own]),
            widened_files=read_result_files([wide / "other"]),
        )


def test_files_that_disagree(tmp_path: Path) -> None:
    write_results(tmp_path / "1", "runs/sgd/checkpoints/step_00000600", ACCURACY)
    write_results(tmp_path / "2", "runs/sgd/checkpoints/step_00000600", {"probe_a": {"acc,none": 0.81}})
    with pytest.raises(ValueError, match=r"2/results_1.json and .*1/results_1.json have different acc of sgd-00000600"):
        read_rows(groups_of(("sgd", 600)), read_result_files([tmp_path]))


def test_no_result_of_the_models(tmp_path: Path) -> None:
    write_results(tmp_path / "1", "other", ACCURACY)
    with pytest.raises(ValueError, match="found none in 1 files"):
        read_rows(groups_of(("sgd", 600)), read_result_files([tmp_path]))
