"""CSV, Parquet, JSON and Markdown of a board."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_files import result_file, task_config, write

from harness_ext.leaderboard.build import build_board
from harness_ext.leaderboard.cache import Cache
from harness_ext.leaderboard.contracts import Board
from harness_ext.leaderboard.export import BEGIN, END, EXPORTS, cell_text, long_rows, markdown, spliced, write_exports

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "leaderboard"


def board_of(folder: Path) -> Board:
    return build_board(folder, Cache(None, ""))


@pytest.fixture(scope="module")
def golden_board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    """All golden result files, and what only a board of several models has."""
    folder = tmp_path_factory.mktemp("golden")
    for path in sorted(GOLDEN.rglob("*")):
        if path.name.startswith(("results", "samples")):
            target = folder / path.relative_to(GOLDEN)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    write(folder / "more" / "results_1.json", result_file(["reviews", "films"], model="org/a", acc=0.8))
    write(folder / "more" / "results_2.json", result_file(["reviews", "films"], model="org/b", acc=0.6))
    write(folder / "more" / "results_3.json", result_file(["reviews"], model="org/c", acc=0.7))
    write(folder / "more" / "results_4.json", result_file(["reviews"], model="org/c", acc=0.71, date=1.8e9))
    (folder / "broken.json").write_text("{")
    return board_of(folder)


def test_the_markdown_of_the_golden_files(golden_board: Board, golden: Callable[[str, str], None]) -> None:
    golden("leaderboard/leaderboard.md", markdown(golden_board) + "\n")


def test_the_tables_of_the_golden_files(
    golden_board: Board, golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    write_exports(golden_board, tmp_path)
    golden("leaderboard/leaderboard.csv", (tmp_path / "leaderboard.csv").read_text("utf-8"))


def test_all_formats_have_the_same_rows(golden_board: Board, tmp_path: Path) -> None:
    write_exports(golden_board, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(EXPORTS)
    rows = long_rows(golden_board)
    assert len(rows) == len(golden_board.scores) + len(golden_board.limited)
    assert pq.read_table(tmp_path / "leaderboard.parquet").to_pylist() == rows
    found = json.loads((tmp_path / "leaderboard.json").read_text("utf-8"))
    models = {model["id"]: model["name"] for model in found["models"]}
    columns = {column["id"]: column["label"] for column in found["columns"]}
    assert [(models[of["model_id"]], columns[of["column_id"]], of["value"]) for of in found["scores"]] == [
        (row["model"], row["column"], row["value"]) for row in rows
    ]
    read = list(csv.DictReader(io.StringIO((tmp_path / "leaderboard.csv").read_text("utf-8"), newline="")))
    assert [entry["model_id"] for entry in read] == [row["model_id"] for row in rows]
    assert [entry["value"] for entry in read] == ["" if row["value"] is None else repr(row["value"]) for row in rows]


def test_the_same_board_gives_the_same_bytes(
    golden_board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_exports(golden_board, tmp_path / "a")
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    write_exports(golden_board, tmp_path / "b")
    for name in EXPORTS:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_files_that_would_not_change_are_left_alone(golden_board: Board, tmp_path: Path) -> None:
    write_exports(golden_board, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_exports(golden_board, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


HOSTILE = (
    "<script>alert(1)</script>", "a | b | c", "![x](http://evil/x.png)", "[click](javascript:alert(1))", "`code`", "*b* _i_",
    "https://evil.example", "www.evil.example", "@someone", "#1", "line\nbreak", "<!-- leaderboard:end -->", "=cmd()", "модель",
)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text_in_markdown(name: str, tmp_path: Path) -> None:
    write(tmp_path / "results_1.json", result_file([name], model=name, configs={name: task_config()}))
    text = markdown(board_of(tmp_path))
    assert END not in text
    for raw in ("<script", "](", "https://", "www.", "@someone", "<!--"):
        assert raw not in text.replace("\\`", "")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = {line.replace("\\|", "").count("|") for line in tables}
    assert len(widths) <= 2  # a name makes no cells


@given(st.text(max_size=40))
def test_cells_have_no_markup(text: str) -> None:
    cell = cell_text(text)
    assert "\n" not in cell
    assert "<" not in cell
    unescaped = cell.replace("\\\\", "")
    for character in "|`*[]!":
        assert unescaped.count(character) == unescaped.count("\\" + character)


def test_text_that_a_spreadsheet_would_run_is_text(tmp_path: Path) -> None:
    write(tmp_path / "results_1.json", result_file(model='=HYPERLINK("http://evil")'))
    write_exports(board_of(tmp_path), tmp_path / "out")
    read = next(csv.DictReader((tmp_path / "out" / "leaderboard.csv").open(encoding="utf-8", newline="")))
    assert read["model"] == '\'=HYPERLINK("http://evil")'


def test_an_empty_board_says_how_to_add_a_result(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    board = board_of(tmp_path / "none")
    assert "harness-ext leaderboard add" in markdown(board)
    write_exports(board, tmp_path / "out")
    assert pq.read_table(tmp_path / "out" / "leaderboard.parquet").num_rows == 0
    assert json.loads((tmp_path / "out" / "leaderboard.json").read_text())["models"] == []


def test_limited_runs_are_not_in_the_markdown(tmp_path: Path) -> None:
    write(tmp_path / "results_1.json", result_file(model="org/full"))
    write(tmp_path / "results_2.json", result_file(model="org/part", effective=5))
    text = markdown(board_of(tmp_path))
    assert "org/full" in text.replace("\\", "")
    assert "org/part" not in text.replace("\\", "")
    assert "Of limited runs 1 score is hidden." in text


@pytest.mark.parametrize("document", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_markers_that_are_missing_or_wrong(document: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md: expected the lines"):
        spliced(document, "table", name="README.md")


def test_splicing_changes_nothing_else_and_twice_is_once() -> None:
    document = f"# A\n\n{BEGIN}\nold\n{END}\n\nrest\n"
    once = spliced(document, "new", name="README.md")
    assert once == f"# A\n\n{BEGIN}\nnew\n{END}\n\nrest\n"
    assert spliced(once, "new", name="README.md") == once


def test_a_big_board_is_cut_in_the_markdown(tmp_path: Path) -> None:
    names = [f"task{number:02d}" for number in range(20)]
    for number in range(40):
        made: dict[str, Any] = result_file(names, model=f"org/m{number}", acc=0.5 + number / 100)
        write(tmp_path / f"results_{number}.json", made)
    text = markdown(board_of(tmp_path))
    assert "10 more models are on the pages" in text
    assert "8 more tasks are on the pages" in text
    assert len(text) < 60_000
