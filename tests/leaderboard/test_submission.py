"""Adding a result file, and what a pull request changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from result_files import lab_json, result_file, sample, write, write_samples

from harness_ext.leaderboard.build import build_board
from harness_ext.leaderboard.cache import Cache
from harness_ext.leaderboard.changes import changes
from harness_ext.leaderboard.contracts import Board
from harness_ext.leaderboard.submission import add, validate

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "leaderboard"


def board_of(folder: Path) -> Board:
    return build_board(folder, Cache(None, ""))


def test_a_real_file_is_added_with_slim_samples_that_say_the_same(tmp_path: Path) -> None:
    source = next((GOLDEN / "lm_eval-0.4.13" / "plain").glob("*.json"))
    found = validate(source)
    assert found.warnings == ()
    target = add(found, tmp_path / "results")
    assert target.parent.name.startswith("tiny__gpt2-")
    assert target.read_bytes() == source.read_bytes()
    (samples,) = target.parent.glob("*.jsonl")
    assert samples.stat().st_size < 0.5 * next(source.parent.glob("*.jsonl")).stat().st_size
    whole = tmp_path / "whole"
    shutil.copytree(source.parent, whole)
    ours, theirs = board_of(tmp_path / "results"), board_of(whole)
    assert ours.vectors == theirs.vectors
    assert ours.document_sets == theirs.document_sets
    # Adding again changes nothing.
    before = {path: path.read_bytes() for path in target.parent.iterdir()}
    assert add(validate(source), tmp_path / "results") == target
    assert {path: path.read_bytes() for path in target.parent.iterdir()} == before
    # What was added can be checked where it lies, as CI does.
    assert validate(target).record.digest == found.record.digest


def test_samples_without_hashes_keep_their_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "in" / "results_1.json", result_file(documents=2))
    lines = [sample(0, 1.0), sample(1, 0.0)]
    expected = {line["doc_hash"][:12] for line in lines}
    for line in lines:
        del line["doc_hash"]
    write_samples(tmp_path / "in" / "samples_reviews_1.jsonl", lines)
    add(validate(path), tmp_path / "results")
    (sets,) = board_of(tmp_path / "results").document_sets.values()
    assert set(sets[0]) == expected


def test_the_same_file_under_another_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.json", result_file())
    write(tmp_path / "results" / "other" / "results_1.json", result_file())
    with pytest.raises(ValueError, match="the same file is there already"):
        add(validate(path), tmp_path / "results")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "expected JSON"),
        (b'{"a": 1}', "expected a result file of lm_eval"),
        (json.dumps(result_file(lm_eval_version="9.9")).encode(), "lm_eval_version is '9.9'"),
        (
            json.dumps(result_file(model="", config={"model": "", "model_args": ""}, model_name="")).encode(),
            "names no model",
        ),
    ],
)
def test_bad_files_are_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        validate(path)
    assert "bad.json" in str(caught.value)


def test_bad_samples_and_links_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "results_1.json", result_file(documents=3))
    write_samples(tmp_path / "samples_reviews_1.jsonl", [sample(0, 1.0)])
    with pytest.raises(ValueError, match="there are 1 documents"):
        validate(path)
    (tmp_path / "link.json").symlink_to(path)
    with pytest.raises(ValueError, match="is a link"):
        validate(tmp_path / "link.json")


def test_what_a_reviewer_should_look_at(tmp_path: Path) -> None:
    made = result_file(effective=5, date=None, config={"model_dtype": None})
    warnings = " ".join(validate(write(tmp_path / "a.json", made)).warnings)
    for words in ("limited runs are hidden", "--log_samples", "dtype", "no date"):
        assert words in warnings


@pytest.mark.parametrize("name", ["../../escape", "/etc/passwd", "a" * 300, "名前", "..", ".", "con\x00", "a/b"])
def test_the_name_of_a_model_does_not_choose_the_folder(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.json", result_file(model=name))
    target = add(validate(path), tmp_path / "results")
    assert target.parent.parent == tmp_path / "results"
    assert len(target.parent.name) < 120
    assert board_of(tmp_path / "results").num_files == 1


def test_two_models_never_share_a_folder(tmp_path: Path) -> None:
    folders = {
        add(validate(write(tmp_path / f"{place}.json", result_file(model=name))), tmp_path / "results").parent
        for place, name in enumerate(("a/b", "a__b", "a b", "a:b"))
    }
    assert len(folders) == 4


def test_lab_json_goes_along(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write(model / "lab.json", lab_json())
    path = write(tmp_path / "in.json", result_file(model=str(model)))
    assert validate(path).lab is None  # a file that anyone may have written does not choose what is read
    target = add(validate(path, look_in_model_folder=True), tmp_path / "results")
    assert target.with_name(f"{target.stem}.lab.json").is_file()
    (found,) = board_of(tmp_path / "results").models
    assert found.name == "adamw-w64-00000600"


# ------------------------------------------------------------------------------------------------------------ changes


def test_changes_are_new_changed_and_gone_rows(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        write(folder / "same.json", result_file(model="org/same"))
    write(old / "moved.json", result_file(model="org/moved", acc=0.5))
    write(new / "moved.json", result_file(model="org/moved", acc=0.6))
    write(old / "gone.json", result_file(model="org/gone"))
    write(new / "new.json", result_file(model="org/<b>new</b>", effective=5))
    (new / "bad.json").write_text("{")
    text = changes(board_of(old), board_of(new))
    lines = text.replace("\\", "").splitlines()
    assert lines[0] == "### Leaderboard: 1 new, 1 changed, 1 gone"
    assert any("org/moved" in line and "| 0.5 ± 0.05 | 0.6 ± 0.05 |" in line for line in lines)
    assert any("&lt;b&gt;new&lt;/b&gt;" in line and "limited: 5 of 100" in line for line in lines)
    assert not any("org/same" in line for line in lines)
    assert any("bad.json: expected JSON" in line for line in lines)


def test_no_change(tmp_path: Path) -> None:
    write(tmp_path / "a.json", result_file())
    board = board_of(tmp_path)
    assert changes(board, board) == "### Leaderboard: no score changes\n"


def test_a_second_run_of_other_numbers_is_a_change(tmp_path: Path) -> None:
    write(tmp_path / "a.json", result_file(acc=0.5))
    old = board_of(tmp_path)
    write(tmp_path / "b.json", result_file(acc=0.6, date=1e9))
    assert "2 runs, which differ" in changes(old, board_of(tmp_path)).replace("\\", "")
