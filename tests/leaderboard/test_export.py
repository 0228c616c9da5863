"""CSV, Parquet, JSON and Markdown of a board."""

from __future__ import annotations

import csv
import io
import json
import shutil
import xml.etree.ElementTree
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
from harness_ext.leaderboard.export import EXPORTS, TABLES, long_rows, write_exports, write_tables
from harness_ext.leaderboard.markdown import BEGIN, END, cell_text, markdown, readme, spliced
from harness_ext.leaderboard.plot import PLOT, draw, same_plot

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
    text = markdown(golden_board)
    names = {
        model.name for model in golden_board.models if any(score.model == model.id for score in golden_board.scores)
    }
    assert names
    assert all(cell_text(name) in text for name in names)
    golden("leaderboard/leaderboard.md", text + "\n")


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
    with (tmp_path / "out" / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
        read = next(csv.DictReader(file))
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
    for number in range(102):
        made: dict[str, Any] = result_file(names, model=f"org/m{number}", acc=0.3 + number / 200)
        write(tmp_path / f"results_{number}.json", made)
    board = board_of(tmp_path)
    text = markdown(board)
    assert "2 more models are on the pages" in text
    assert "8 more tasks are on the pages" in text
    short = readme(board, more="tables/leaderboard.md")
    assert "[All tables](tables/leaderboard.md): 90 more models and all scores." in short
    # The best by their mean come first.
    assert [line.split(" |")[0] for line in short.splitlines() if "org" in line] == [
        f"| org/m{number}" for number in range(101, 89, -1)
    ]


# ------------------------------------------------------------------------------- parts of a board, the plot, the README


def matched_files(folder: Path, *, number: int, others: int = 0) -> None:
    """Models of two loss groups, each flatter than the one before and better; and `others` that share no task with them."""
    report = {"text_sha256": "5" * 64, "num_tokens": 1000, "block_tokens": 128}
    flat = {"blocks": 8, "include": ["*"], "exclude": [], "seed": 0, "by_parameter": {}}
    for place in range(number):
        loss, trace = 1.0 + 0.2 * (place % 2) + 1e-4 * place, 100.0 / (1 + place)
        of_loss = {"bits_per_byte,none": loss, "bits_per_byte_stderr,none": 1e-4, "loss,none": 2 * loss}
        tasks = {
            "reviews": {"acc,none": 0.55 + 0.02 * place, "acc_stderr,none": 0.01},
            "loss_x": of_loss,
            "flatness_x": {"fisher_trace,none": trace, "fisher_trace_stderr,none": 1.0},
        }
        configs = {
            "reviews": task_config(),
            "loss_x": {"dataset_path": "made/$x$", "test_split": "test", "metadata": {"report": report}},
            "flatness_x": {"metadata": {"report": report | {"window_flatness": flat}}},
        }
        write(folder / f"results_{place}.json", result_file(tasks, model=f"org/m{place}", configs=configs))
    for place in range(others):
        write(folder / f"results_o{place}.json", result_file(["films"], model=f"org/o{place}", acc=0.6))


def test_models_without_a_task_in_common_are_in_tables_of_their_own(tmp_path: Path) -> None:
    matched_files(tmp_path, number=6, others=1)
    board = board_of(tmp_path)
    for text in (markdown(board), readme(board)):
        tables = [part for part in text.split("\n\n") if part.startswith("| model | param")]
        assert [table.count("\n| org") for table in tables] == [6, 1]
        assert all("mean of 1 task |" in table for table in tables)  # not "1 of 2"
        assert "of 2 task" not in text
        # The loss group comes first, then the score.
        assert [line.split(" |")[0][-1] for line in tables[0].splitlines()[2:]] == list("420531")


def test_the_short_table_says_what_is_found_within_groups(tmp_path: Path) -> None:
    matched_files(tmp_path, number=8)
    text = readme(board_of(tmp_path), plot="a/plot.svg", more="a/leaderboard.md")
    assert text.startswith("![Mean score against pretraining loss, coloured by flatness](a/plot.svg)\n\n")
    # The flatter, the better, with no exception.
    assert "Among models of one size (1M parameters) and within loss groups, the rank correlation" in text
    assert (
        "score is from −1.00 to −1.00 on 1 task, median −1.00; p < 0.05 on 1 of 1, where chance alone gives about 0.05."
        in text
    )
    whole = markdown(board_of(tmp_path))
    assert "| reviews | 8 | " in whole
    assert "| 8 | −1.00, p 5e-05 | −1.00, p 9.9e-05 | −1.00, p 0.0035 |" in whole


def test_models_that_do_not_compare_are_named_with_the_reason(tmp_path: Path) -> None:
    matched_files(tmp_path, number=8)
    for place in range(8):
        path = tmp_path / f"results_{place}.json"
        found = json.loads(path.read_text("utf-8"))
        found["config"]["model_num_parameters"] = 10**6 + place
        if place == 3:
            del found["results"]["loss_x"]["bits_per_byte_stderr,none"]
        path.write_text(json.dumps(found), encoding="utf-8")
    text = markdown(board_of(tmp_path))
    assert "too few models of one size \\(1\\); traces compare among models of one size only" in text
    assert "1 model has a loss without standard error, which puts a model in no loss group." in text
    assert "rank correlation of flatness" not in readme(board_of(tmp_path))


def test_tables_and_plot_are_the_same_bytes_whatever_surrounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matched_files(tmp_path / "results", number=6)
    board = board_of(tmp_path / "results")
    assert write_tables(board, tmp_path / "a") == PLOT
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    write_tables(board, tmp_path / "b")
    assert {path.name for path in (tmp_path / "a").iterdir()} == set(TABLES)
    for name in TABLES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert f"]({PLOT})" in (tmp_path / "a" / "leaderboard.md").read_text("utf-8")


def test_the_plot_shows_every_model_and_takes_no_name_for_a_formula(tmp_path: Path) -> None:
    matched_files(tmp_path, number=6, others=3)
    plot = draw(board_of(tmp_path))
    assert plot is not None
    root = xml.etree.ElementTree.fromstring(plot)
    texts = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "made/$x$ test (bits per byte)" in texts
    assert "other, mean of 1 task" in texts
    points = [node for node in root.iter() if node.get("id", "").startswith("PathCollection")]
    marks = [use for node in points for use in node.iter("{http://www.w3.org/2000/svg}use")]
    assert len(marks) == 6


def test_no_plot_of_too_few_models_and_an_old_one_goes(tmp_path: Path) -> None:
    matched_files(tmp_path / "results", number=3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / PLOT).write_bytes(b"old")
    assert write_tables(board_of(tmp_path / "results"), tmp_path / "out") is None
    assert not (tmp_path / "out" / PLOT).exists()
    assert PLOT not in (tmp_path / "out" / "leaderboard.md").read_text("utf-8")


def test_plots_of_two_versions_of_matplotlib_are_told_by_their_data(tmp_path: Path) -> None:
    matched_files(tmp_path, number=6)
    plot = draw(board_of(tmp_path))
    assert plot is not None
    other_version = plot.replace(b"Matplotlib v", b"Matplotlib v0") + b"\n"
    assert same_plot(plot, plot)
    assert same_plot(plot, other_version)
    assert not same_plot(plot, plot + b"\n")  # of one version every byte counts
    assert not same_plot(plot, other_version.replace(b">data ", b">data 0"))
    assert not same_plot(plot, b"no plot")
