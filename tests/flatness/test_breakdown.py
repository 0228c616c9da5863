"""Traces by part of the model: names, sums, table, chart."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from harness_ext.flatness.breakdown import draw, read_breakdowns, table_lines
from harness_ext.parameter_names import NO_LAYER

ROWS = {
    "transformer.wte.weight": {"size": 100, "fisher_trace": 2.0, "fisher_trace_scaled": 0.2},
    "transformer.h.0.attn.c_attn.weight": {"size": 48, "fisher_trace": 1.0, "fisher_trace_scaled": 0.1},
    "transformer.h.0.attn.c_attn.bias": {"size": 12, "fisher_trace": 0.5, "fisher_trace_scaled": 0.3},
    "transformer.h.1.attn.c_attn.weight": {"size": 48, "fisher_trace": 4.0, "fisher_trace_scaled": 0.1},
    "transformer.ln_f.weight": {"size": 4, "fisher_trace": 0.5, "fisher_trace_scaled": 0.3},
}


def results(rows: Any = ROWS) -> dict[str, Any]:
    report = {"report": {"window_flatness": {"by_parameter": rows}}}
    return {
        "model_name": "a/b",
        "configs": {"flatness_x": {"metadata": report}, "loss_x": {"metadata": {"report": {}}}},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results()), encoding="utf-8")
    return path


def test_parts_add_up(path: Path) -> None:
    (found,) = read_breakdowns(path)
    assert (found.model, found.task) == ("a/b", "flatness_x")
    assert found.total("fisher_trace") == 8.0
    kinds, layers = found.by("kind"), found.by("layer")
    assert {kind: part.traces["fisher_trace"] for kind, part in kinds.items()} == {
        "wte": 2.0,
        "attn.c_attn": 5.5,
        "ln_f": 0.5,
    }
    assert {layer: part.traces["fisher_trace"] for layer, part in layers.items()} == {NO_LAYER: 2.5, 0: 1.5, 1: 4.0}
    assert kinds["attn.c_attn"].size == 108
    assert sum(part.size for part in layers.values()) == 212


def test_the_table_has_shares(path: Path) -> None:
    lines = table_lines(read_breakdowns(path)[0])
    assert lines[0] == "| part | parameters | fisher_trace | % | fisher_trace_scaled | % |"
    assert lines[2] == "| attn.c_attn | 108 | 5.5 | 68.8 | 0.5 | 50.0 |"
    assert lines[5] == "| outside layers | 104 | 2.5 | 31.2 | 0.5 | 50.0 |"
    assert {line.count("|") for line in lines} == {7}


def test_the_chart_has_a_bar_for_each_part(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = draw(read_breakdowns(path), "fisher_trace")
    of_kind, of_layer = figure.axes
    assert [bar.get_width() for bar in of_kind.patches] == [0.5, 2.0, 5.5]
    assert [bar.get_height() for bar in of_layer.patches] == [2.5, 1.5, 4.0]
    figure.savefig(tmp_path / "chart.svg")
    xml.etree.ElementTree.parse(tmp_path / "chart.svg")


def test_without_weight_scaled_traces(tmp_path: Path) -> None:
    rows = {name: {key: value for key, value in row.items() if "scaled" not in key} for name, row in ROWS.items()}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results(rows)), encoding="utf-8")
    (found,) = read_breakdowns(path)
    assert found.columns == ("fisher_trace",)
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="has no fisher_trace_scaled; it has fisher_trace"):
        draw([found], "fisher_trace_scaled")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00"])
def test_a_file_that_is_no_result(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"x\.json: expected a results JSON"):
        read_breakdowns(path)


def test_a_result_without_flatness(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(results({})), encoding="utf-8")
    with pytest.raises(ValueError, match="has no traces by parameter; its tasks are flatness_x, loss_x"):
        read_breakdowns(path)
