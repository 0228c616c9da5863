"""Adding a result file, and what a pull request changes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from result_files import lab_json, result_file, sample, task_config, write, write_samples

from harness_ext.leaderboard import submission
from harness_ext.leaderboard.build import build_board
from harness_ext.leaderboard.cache import Cache
from harness_ext.leaderboard.changes import changes
from harness_ext.leaderboard.contracts import ALPHABET, Board
from harness_ext.leaderboard.submission import add, check_kept, results_of, validate

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "leaderboard"


def board_of(folder: Path) -> Board:
    return build_board(folder, Cache(None, ""))


def test_a_real_file_is_added_with_slim_samples_that_say_the_same(tmp_path: Path) -> None:
    source = next((GOLDEN / "lm_eval-0.4.13" / "plain").glob("*.json"))
    found = validate(source)
    assert found.warnings == ()
    target = add([found], tmp_path / "results")[0].path
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
    assert add([validate(source)], tmp_path / "results")[0].path == target
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
    add([validate(path)], tmp_path / "results")
    (sets,) = board_of(tmp_path / "results").document_sets.values()
    assert set(sets[0]) == expected


def run_with_samples(folder: Path, tasks: tuple[str, ...] = ("reviews", "news", "plain"), count: int = 3) -> Path:
    """A result file of which all tasks but `plain` have samples."""
    for task in tasks:
        if task != "plain":
            write_samples(folder / f"samples_{task}_1.jsonl", [sample(i, i % 2) for i in range(count)])
    return write(folder / "results_1.json", result_file(tasks, documents=count))


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        ("all", {"reviews", "news"}),
        ("none", set()),
        ("news", {"news"}),
        ("news, reviews", {"reviews", "news"}),
        ("re*", {"reviews"}),
    ],
)
def test_samples_of_chosen_tasks_are_kept(chosen: str, kept: set[str], tmp_path: Path) -> None:
    found = validate(run_with_samples(tmp_path / "in"), samples=chosen)
    (added,) = add([found], tmp_path / "results")
    assert added.samples.keys() == kept
    files = {path.name.split("_")[1]: path.stat().st_size for path in added.path.parent.glob("*.jsonl")}
    assert files == added.samples
    assert len(board_of(tmp_path / "results").vectors) == len(kept)
    without = " ".join(found.warnings).partition("cannot be compared by document: ")[2]
    assert set(without.split(", ")) == {"reviews", "news", "plain"} - kept


@pytest.mark.parametrize("chosen", ["plain", "news,reviewz", "", ","])
def test_tasks_without_samples_are_named(chosen: str, tmp_path: Path) -> None:
    path = run_with_samples(tmp_path)
    with pytest.raises(
        ValueError, match=r"results_1\.json: --samples .*: expected all, none .*; there are news, reviews$"
    ):
        validate(path, samples=chosen)


def test_samples_that_cannot_be_read_may_be_left_behind(tmp_path: Path) -> None:
    path = run_with_samples(tmp_path / "in")
    (tmp_path / "in" / "samples_news_1.jsonl").write_text('{"doc_id": 0}\n')
    with pytest.raises(ValueError, match="samples of news are left out: document 0 has neither"):
        validate(path, samples="reviews")
    (added,) = add([validate(path, samples="none")], tmp_path / "results")
    assert added.samples == {}


def test_samples_can_be_added_later(tmp_path: Path) -> None:
    path = run_with_samples(tmp_path / "in")
    for chosen, count in (("none", 0), ("news", 1), ("none", 1), ("all", 2)):
        add([validate(path, samples=chosen)], tmp_path / "results")
        assert len(list((tmp_path / "results").rglob("*.jsonl"))) == count
    assert board_of(tmp_path / "results").num_files == 1


def test_nothing_is_added_if_one_file_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = validate(run_with_samples(tmp_path / "good"))
    large = validate(run_with_samples(tmp_path / "large", ("reviews",), count=200))
    results = tmp_path / "results"
    monkeypatch.setattr(submission, "MAX_SAMPLES_BYTES", 10_000)
    with pytest.raises(ValueError, match=r"samples_reviews_1\.jsonl: expected at most 10,000 bytes .* --samples TASK"):
        add([good, large], results)
    assert list(results.iterdir()) == []
    # Nor if a file changes after it was checked.
    write_samples(tmp_path / "good" / "samples_news_1.jsonl", [sample(i, 1.0) for i in range(3)])
    with pytest.raises(ValueError, match=r"samples_news_1\.jsonl: was changed while it was read"):
        add([good], results)
    run_with_samples(tmp_path / "good", ("reviews",))
    with pytest.raises(ValueError, match=r"results_1\.json: was changed while it was read"):
        add([good], results)
    assert list(results.iterdir()) == []


def test_samples_in_the_folder_are_as_they_are_kept(tmp_path: Path) -> None:
    path = run_with_samples(tmp_path / "in", ("reviews",))
    (added,) = add([validate(path)], tmp_path / "results")
    (kept,) = added.path.parent.glob("*.jsonl")
    check_kept([validate(added.path)], [kept])
    # Samples of a task that the file does not have, or of no result file.
    for name in (kept.name.replace("reviews", "news"), "samples_reviews_1.jsonl"):
        shutil.copyfile(kept, kept.with_name(name))
        with pytest.raises(ValueError, match=rf"{name}: expected samples_TASK_DATE\.jsonl beside .* Delete it"):
            check_kept([validate(added.path)], [kept, kept.with_name(name)])
        kept.with_name(name).unlink()
        kept.with_name(name).symlink_to(kept)
        with pytest.raises(ValueError, match=rf"{name}: is a link"):
            check_kept([validate(added.path)], [kept, kept.with_name(name)])
        kept.with_name(name).unlink()
    # As lm_eval writes them, with prompts and answers; and the right ones in another order.
    whole = (tmp_path / "in" / "samples_reviews_1.jsonl").read_bytes()
    for content in (whole, b"".join(kept.read_bytes().splitlines(keepends=True)[::-1])):
        kept.write_bytes(content)
        with pytest.raises(ValueError, match=r"expected samples as `harness-ext leaderboard add` keeps them"):
            check_kept([validate(added.path)])


COMMITTED = Path(__file__).resolve().parents[2] / "leaderboard" / "results"


@pytest.mark.parametrize("path", sorted(COMMITTED.rglob("samples_*.jsonl")), ids=lambda path: path.parent.name)
def test_committed_samples_are_as_they_are_kept_and_give_the_committed_score(path: Path) -> None:
    date = path.stem.rpartition("_")[2]
    found = validate(path.with_name(f"results_{date}.json"))
    check_kept([found], [path])
    (task,) = (task for task in found.record.tasks if task.samples is not None and task.samples.file == path.name)
    assert task.samples is not None
    values, codes = task.samples.metrics["acc"]
    assert sum(values[ALPHABET.index(code)] for code in codes) / len(codes) == task.metrics["acc"][0]


def test_the_same_file_under_another_name_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.json", result_file())
    write(tmp_path / "results" / "other" / "results_1.json", result_file())
    with pytest.raises(ValueError, match="the same file is there already"):
        add([validate(path)], tmp_path / "results")


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
    target = add([validate(path)], tmp_path / "results")[0].path
    assert target.parent.parent == tmp_path / "results"
    assert len(target.parent.name) < 120
    assert board_of(tmp_path / "results").num_files == 1


def test_two_models_never_share_a_folder(tmp_path: Path) -> None:
    folders = {
        add([validate(write(tmp_path / f"{place}.json", result_file(model=name)))], tmp_path / "results")[0].path.parent
        for place, name in enumerate(("a/b", "a__b", "a b", "a:b"))
    }
    assert len(folders) == 4


def test_lab_json_goes_along(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write(model / "lab.json", lab_json())
    path = write(tmp_path / "in.json", result_file(model=str(model)))
    assert validate(path).lab is None  # a file that anyone may have written does not choose what is read
    target = add([validate(path, look_in_model_folder=True)], tmp_path / "results")[0].path
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


# --------------------------------------------------------------------------------------------------------- credentials


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"header": {"Authorization": "Bearer abc"}}, "config.model_args.header"),
        ({"base_url": "https://user:pw@host/v1"}, "config.model_args.base_url"),
        ({"client": {"nested": {"api_key": "abc"}}}, "config.model_args.client"),
        ({"extra": 'x {"Authorization": "abc"}'}, "config.model_args.extra"),
        ({"base_url": "https://host/v1?api_key=abc"}, "config.model_args.base_url"),
        ({"revision": f"hf_{'a' * 34}"}, "config.model_args.revision"),
        ('pretrained=a,header={"Authorization": "Bearer abc", "X": "k=v"},batch_size=1', "config.model_args.header"),
        ("pretrained=a,hf_token=abc", "config.model_args.hf_token"),
        ("pretrained=https://user:pw@host/model", "config.model_args.pretrained"),
    ],
)
def test_a_file_with_credentials_is_refused_by_the_name_of_the_argument(
    arguments: dict[str, object] | str, name: str, tmp_path: Path
) -> None:
    given = arguments if isinstance(arguments, str) else {"pretrained": "org/a"} | arguments
    path = write(tmp_path / "results_1.json", result_file(config={"model_args": given}))
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        validate(path)
    assert "Delete these entries" in str(caught.value)
    assert "abc" not in str(caught.value)
    assert "pw@" not in str(caught.value)


def test_credentials_that_lm_eval_copies_into_the_metadata_of_tasks_are_refused(tmp_path: Path) -> None:
    config = task_config(metadata={"version": 1.0, "pretrained": "a", "api_key": "abc"})
    path = write(tmp_path / "results_1.json", result_file(configs={"reviews": config}))
    with pytest.raises(ValueError, match=r"configs\.reviews\.metadata\.api_key"):
        validate(path)


@pytest.mark.parametrize(
    "arguments",
    ["pretrained=a,use_auth_token=True,add_bos_token=True", {"pretrained": "a", "token": None, "api_key": "EMPTY"}],
)
def test_switches_and_special_tokens_are_no_credentials(arguments: object, tmp_path: Path) -> None:
    validate(write(tmp_path / "results_1.json", result_file(config={"model_args": arguments})))


@pytest.mark.parametrize("as_text", [False, True])
def test_lab_json_is_found_in_the_model_folder_of_both_schemas(as_text: bool, tmp_path: Path) -> None:
    lab = write(tmp_path / "model" / "lab.json", lab_json())
    folder = str(lab.parent)
    arguments = f"pretrained={folder},dtype=float32" if as_text else {"pretrained": folder}
    path = write(tmp_path / "in" / "results_1.json", result_file(config={"model_args": arguments}))
    assert validate(path, look_in_model_folder=True).lab == lab
    assert validate(path).lab is None


def test_samples_and_lab_json_stand_for_the_result_files_beside_them(tmp_path: Path) -> None:
    first = write(tmp_path / "results_1.json", result_file())
    below = write(tmp_path / "m" / "results_2.json", result_file())
    lab = write(tmp_path / "m" / "results_2.lab.json", lab_json())
    assert results_of(first) == [first]
    assert results_of(lab) == [below]
    assert results_of(write(tmp_path / "lab.json", lab_json())) == [below, first]
    assert results_of(tmp_path / "m" / "samples_reviews_2.jsonl") == [below]
    collab = tmp_path / "results_2026_collab.json"
    assert results_of(collab) == [collab]
