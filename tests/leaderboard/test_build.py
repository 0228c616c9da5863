"""A folder as a board: what is found, what the cache may change (nothing), and that the order of files does not matter."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from result_files import lab_json, loss_config, result_file, sample, task_config, write, write_samples

from harness_ext.leaderboard.build import build_board, find_results, open_cache
from harness_ext.leaderboard.cache import Cache, cache_folder
from harness_ext.leaderboard.contracts import SCHEMA_VERSION, Board

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "leaderboard"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "cache"))


def board_of(folder: Path, *, cached: bool = True) -> Board:
    cache = open_cache(folder) if cached else Cache(None, "")
    try:
        return build_board(folder, cache)
    finally:
        cache.close()


def results(folder: Path) -> Path:
    """Three models, one of them twice, with samples; one limited run, one of the lab, and one file that is none."""
    for place, model in enumerate(("org/a", "org/b", "org/c")):
        values = [float((number + place) % 3 != 0) for number in range(6)]
        write(folder / model / f"results_{place}.json", result_file(model=model, acc=sum(values) / 6, documents=6))
        write_samples(
            folder / model / f"samples_reviews_{place}.jsonl",
            [sample(number, value) for number, value in enumerate(values)],
        )
    write(folder / "again" / "results_9.json", result_file(model="org/a", acc=0.5, documents=6, date=1.8e9))
    write(folder / "limited.json", result_file(model="org/d", documents=6, effective=2))
    write(folder / "lab" / "results_1.json", result_file(model="/tmp/lab/x", documents=6))
    write(folder / "lab" / "lab.json", lab_json())
    (folder / "broken.json").write_text("{")
    return folder


def test_a_folder_as_a_board(tmp_path: Path) -> None:
    board = board_of(results(tmp_path / "results"))
    assert board.num_files == 6
    assert [model.name for model in board.models] == ["adamw-w64-00000600", "org/a", "org/b", "org/c", "org/d"]
    assert [(entry.source, entry.reason[:13]) for entry in board.unreadable] == [("broken.json", "expected JSON")]
    assert (board.hidden.limited_scores, board.hidden.limited_models) == (1, 1)
    (column,) = board.columns
    # The later run of org/a has no samples.
    assert [vector.model for vector in board.vectors[column.id]] == [
        model.id for model in board.models if model.name in ("org/b", "org/c")
    ]
    texts = {document.text for document in board.documents[column.id]}
    assert texts == {f"This is review number {number}." for number in (1, 2, 4, 5)}


def test_an_empty_folder_and_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    board = board_of(tmp_path / "empty")
    assert (board.num_files, board.models, board.columns, board.scores) == (0, (), (), ())
    assert board.index()["schema_version"] == SCHEMA_VERSION
    with pytest.raises(FileNotFoundError, match="expected a folder of result files"):
        board_of(tmp_path / "nowhere")


def test_links_and_hidden_files_are_not_read(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside" / "results_1.json", result_file())
    folder = tmp_path / "results"
    write(folder / ".hidden" / "results_1.json", result_file())
    write(folder / ".results_2.json", result_file())
    (folder / "linked.json").symlink_to(outside)
    (folder / "linked_folder").symlink_to(outside.parent)
    files, refused = find_results(folder)
    assert files == []
    assert [(entry.source, entry.reason) for entry in refused] == [("linked.json", "is a link; links are not followed")]


def test_a_file_that_cannot_be_read_does_not_stop_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = results(tmp_path / "results")
    real_open = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "limited.json":
            raise PermissionError(13, "Permission denied")
        return real_open(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    found = {entry.source: entry.reason for entry in board_of(folder).unreadable}
    assert found["limited.json"] == "cannot be read: Permission denied"
    monkeypatch.undo()
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "cache"))
    assert "limited.json" not in {entry.source for entry in board_of(folder).unreadable}


@pytest.mark.parametrize("depth", [90, 110, 300, 480, 960, 975, 986, 995, 5000, 200_000])
@pytest.mark.parametrize("place", ["doc_to_text", "doc", "target", "lab"])
def test_deep_nesting_does_not_stop_the_build(place: str, depth: int, tmp_path: Path) -> None:
    """Just below the depth that a parser refuses, what is read could not be written again."""
    nest = "[" * depth + "]" * depth
    folder = tmp_path / "results"
    text = json.dumps(result_file(documents=1, configs={"reviews": task_config(doc_to_text="NEST")}))
    write(folder / "results_2.json", result_file(model="org/other"))
    folder.joinpath("results_1.json").write_text(
        text.replace('"NEST"', nest if place == "doc_to_text" else '"x"'), encoding="utf-8"
    )
    if place in ("doc", "target"):
        line = json.dumps(sample(0, 1.0) | {place: "NEST"}).replace('"NEST"', nest)
        folder.joinpath("samples_reviews_1.jsonl").write_text(line + "\n", encoding="utf-8")
    if place == "lab":
        made = json.dumps(lab_json() | {"model": {"a": "NEST"}}).replace('"NEST"', nest)
        folder.joinpath("results_1.lab.json").write_text(made, encoding="utf-8")
    board = board_of(folder)
    assert "org/other" in {model.name for model in board.models}
    reasons = [entry.reason for entry in board.unreadable]
    if depth < 95:
        assert reasons == []
    else:
        assert len(reasons) == 1
        assert "at most 100 levels" in reasons[0]


def test_a_broken_lab_file_refuses_its_models(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write(folder / "results_1.json", result_file())
    write(folder / "results_1.lab.json", {"schema_version": 1})
    (entry,) = board_of(folder).unreadable
    assert "schema_version 2 of the lab, found 1" in entry.reason


def test_lab_files_are_those_beside_and_above_and_not_outside(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write(tmp_path / "lab.json", lab_json("outside"))
    write(folder / "own" / "results_1.json", result_file())
    write(folder / "own" / "results_1.lab.json", lab_json("own"))
    write(folder / "above" / "lab.json", lab_json("above"))
    write(folder / "above" / "below" / "results_1.json", result_file(date=3.0))
    write(folder / "none" / "results_1.json", result_file(date=4.0))
    assert {model.lab and model.lab.run for model in board_of(folder).models} == {"own", "above", None}


# -------------------------------------------------------------------------------------------------------------- cache


def test_the_cache_changes_nothing_and_sees_every_change(tmp_path: Path) -> None:
    folder = results(tmp_path / "results")
    write(folder / "golden.json", json.loads(next(GOLDEN.glob("*/probe/*.json")).read_text()))
    fresh = board_of(folder, cached=False)
    assert board_of(folder) == fresh
    assert board_of(folder) == fresh  # from the cache
    changes: list[Any] = [
        lambda: write(folder / "new" / "results_1.json", result_file(model="org/new")),
        lambda: write(folder / "limited.json", result_file(model="org/d", acc=0.25)),
        lambda: write_samples(folder / "org/b" / "samples_reviews_1.jsonl", [sample(n, 1.0) for n in range(6)]),
        lambda: write(folder / "lab" / "lab.json", lab_json(excess=0.5)),
        lambda: (folder / "broken.json").unlink(),
        lambda: shutil.rmtree(folder / "again"),
        lambda: (folder / "limited.json").rename(folder / "renamed.json"),
    ]
    for change in changes:
        before = board_of(folder)
        change()
        after = board_of(folder)
        assert after != before
        assert after == board_of(folder, cached=False)


def test_the_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = results(tmp_path / "results")
    expected = board_of(folder)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("read again")

    monkeypatch.setattr("harness_ext.leaderboard.build.read_results", never)
    monkeypatch.setattr("harness_ext.leaderboard.samples.read_documents", never)
    assert board_of(folder) == expected


@pytest.mark.parametrize(
    "spoil",
    [
        "UPDATE texts SET text = replace(text, '0.5', '0.9')",
        "UPDATE texts SET text = '{}'",
        "UPDATE texts SET checksum = x'00'",
        "UPDATE texts SET stamp = 'x'",
        "DELETE FROM texts WHERE name LIKE 'column:%'",
        "DROP TABLE texts",
        "CREATE TABLE other (x)",
    ],
)
def test_a_spoilt_cache_is_not_believed(spoil: str, tmp_path: Path) -> None:
    folder = results(tmp_path / "results")
    expected = board_of(folder)
    (path,) = (tmp_path / "cache" / "leaderboard").glob("*.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute(spoil)
    connection.close()
    assert board_of(folder) == expected
    assert board_of(folder) == expected


def test_a_cache_that_is_no_database_is_made_anew(tmp_path: Path) -> None:
    folder = results(tmp_path / "results")
    expected = board_of(folder)
    (path,) = (tmp_path / "cache" / "leaderboard").glob("*.sqlite")
    path.write_bytes(b"not a database" * 1000)
    assert board_of(folder) == expected
    assert path.read_bytes().startswith(b"SQLite format 3")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    assert cache_folder() is None
    monkeypatch.delenv("HARNESS_EXT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "harness_ext" / "leaderboard"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "file"))
    assert board_of(results(tmp_path / "results")).num_files == 6


# -------------------------------------------------------------------------------------------------------- determinism


def test_other_times_of_change_and_orders_on_disk_give_the_same_board(tmp_path: Path) -> None:
    first = results(tmp_path / "first")
    expected = board_of(first)
    paths = [path for path in first.rglob("*") if path.is_file()]
    random.Random(0).shuffle(paths)
    for path in paths:
        target = tmp_path / "second" / path.relative_to(first)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        os.utime(target, (1.0, 1.0))
    assert board_of(tmp_path / "second") == expected


# --------------------------------------------------------------------------------------------------------- data files


def test_the_data_files_of_a_board(tmp_path: Path) -> None:
    board = board_of(results(tmp_path / "results"))
    index = board.index()
    json.dumps(index, allow_nan=False)
    place = {model["name"]: number for number, model in enumerate(index["models"])}
    (scores,) = index["scores"]
    assert scores["value"][place["org/b"]] == pytest.approx(4 / 6, abs=1e-5)
    assert scores["value"][place["org/d"]] is None
    assert scores["flags"] == {str(place["org/a"]): ["repeated", "conflict"]} or scores["flags"] == {
        str(place["org/a"]): ["conflict", "repeated"]
    }
    assert scores["n"] == 6
    (limited,) = index["limited"]
    assert limited["flags"] == {str(place["org/d"]): ["limit: 2 of 6"]}

    model = board.models[place["org/a"]]
    page = board.model_file(model.id)
    json.dumps(page, allow_nan=False)
    (score,) = page["scores"]
    assert [run["metrics"]["acc"][0] for run in score["runs"]] == [0.5, pytest.approx(4 / 6)]
    assert "lm_eval --model hf" in score["runs"][0]["command"]

    (column,) = board.columns
    task = board.column_file(column.id)
    json.dumps(task, allow_nan=False)
    assert task["metrics"]["acc"]["model"] == [score.model for score in board.scores]
    assert len(task["vectors"]) == 2
    assert board.documents_file(column.id)["documents"][0].keys() == {"key", "text", "target"}


def test_scores_of_a_page_are_those_that_plain_would_make(tmp_path: Path) -> None:
    from harness_ext.leaderboard.contracts import plain

    write(tmp_path / "r" / "a.json", json.loads(next(GOLDEN.glob("*/probe/*.json")).read_text()))
    write(tmp_path / "r" / "b.json", json.loads(next(GOLDEN.glob("*/sweep/*.json")).read_text()))
    board = board_of(tmp_path / "r")
    scores = {(score.model, score.column): score for score in (*board.scores, *board.limited)}
    for model in board.models:
        for found in board.model_file(model.id)["scores"]:
            expected = plain(scores[found["model"], found["column"]])
            assert found == {key: value for key, value in expected.items() if value not in (None, [], {})}


def test_groups_and_correlations_of_a_board(tmp_path: Path) -> None:
    rng = random.Random(0)
    for number in range(6):
        loss = {"loss,none": 3.0, "bits_per_byte,none": 1.1 + number / 1e4, "bits_per_byte_stderr,none": 1e-4}
        tasks = {
            "reviews": {"acc,none": 0.5 + number / 20},
            "loss_text": loss,
            "flatness_text": {"fisher_trace,none": 10.0 - number + rng.random() / 10},
        }
        configs = {"loss_text": loss_config(), "flatness_text": loss_config(window_flatness={"blocks": 64})}
        made = result_file(tasks, model=f"org/m{number}", configs=configs)
        write(tmp_path / "results" / f"results_{number}.json", made)
    board = board_of(tmp_path / "results")
    assert [len(group.models) for group in board.groups] == [6]
    (found,) = board.correlations
    assert found.flatness_downstream.value == pytest.approx(-1)
    assert board_of(tmp_path / "results") == board
    assert board_of(tmp_path / "results", cached=False) == board
