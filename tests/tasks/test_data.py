"""Where documents come from: mirror folder, model folder, Hub; without a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from worlds import DATASET, World, evaluate, hf_model, natural, report, reviews, write_split

from harness_ext.tasks.data import DATA_VARIABLE, open_dataset

ROWS = reviews(6)
OWN = "harness_ext/reviews"


@pytest.fixture(autouse=True)
def offline(world: World) -> World:
    """The module's world is the mirror unless a test says otherwise."""
    return world


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    monkeypatch.setenv(DATA_VARIABLE, str(folder))
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Stands for the Hub: keeps the arguments of `datasets.load_dataset` and gives ROWS."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    load_dataset = datasets.load_dataset

    def load(*args: Any, **kwargs: Any) -> Any:
        if args[0] in ("json", "parquet"):
            return load_dataset(*args, **kwargs)
        calls.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


# ------------------------------------------------------------------------------------------------- mirror


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_split_is_the_rows_of_its_file(mirror: Path, suffix: str) -> None:
    write_split(mirror / "org" / "name", "train", ROWS, suffix=suffix)
    splits = open_dataset("org/name", None)
    assert splits["train"].to_list() == ROWS
    assert splits.source == f"local folder {mirror / 'org' / 'name'}"


def test_unicode_and_line_separators_stay_within_a_row(mirror: Path) -> None:
    rows = [{"text": "naïve ☺ film", "label": 0}, {"text": "two\u2028lines\nin one", "label": 1}]
    write_split(mirror / "org" / "name", "test", rows)
    assert open_dataset("org/name", None)["test"].to_list() == rows


def test_an_edited_file_is_read_again(mirror: Path) -> None:
    """`datasets` keeps an Arrow copy of what it read; the copy of an older file must not be served."""
    path = write_split(mirror / "org" / "name", "test", ROWS[:3])
    os.utime(path, ns=(10**18, 10**18))
    assert len(open_dataset("org/name", None)["test"]) == 3
    write_split(mirror / "org" / "name", "test", ROWS[3:])
    assert open_dataset("org/name", None)["test"].to_list() == ROWS[3:]


def test_a_missing_split_names_what_was_expected_and_what_is_there(mirror: Path) -> None:
    folder = mirror / "org" / "name"
    write_split(folder, "train", ROWS)
    with pytest.raises(FileNotFoundError) as caught:
        open_dataset("org/name", None)["test"]
    for part in (str(folder), "test.jsonl", "test.parquet", "train.jsonl", DATA_VARIABLE):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "a", "label": 0}\n{"text": "b", "la',
        "no json at all\n",
        "",
    ],
)
def test_a_damaged_jsonl_is_named(mirror: Path, content: str) -> None:
    path = write_split(mirror / "org" / "name", "test", ROWS)
    path.write_text(content)
    with pytest.raises(ValueError, match=r"test\.jsonl.*json") as caught:
        open_dataset("org/name", None)["test"]
    assert str(path) in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_damaged_parquet_is_named(mirror: Path) -> None:
    path = write_split(mirror / "org" / "name", "test", ROWS, suffix=".parquet")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"test\.parquet.*parquet") as caught:
        open_dataset("org/name", None)["test"]
    assert str(path) in str(caught.value)


def test_the_variable_must_name_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(NotADirectoryError, match=f"{DATA_VARIABLE}=.*nowhere.*unset"):
        open_dataset("org/name", None)


def test_splits_are_loaded_once_and_only_when_asked_for(mirror: Path) -> None:
    folder = mirror / "org" / "name"
    write_split(folder, "test", ROWS)
    write_split(folder, "train", ROWS).write_text("damaged")
    splits = open_dataset("org/name", None)
    assert list(splits) == []
    assert splits["test"] is splits["test"]
    assert list(splits) == ["test"]
    with pytest.raises(ValueError, match="cannot be read"):
        splits["train"]


def test_a_zero_shot_task_never_reads_the_training_split(world: World) -> None:
    name = world.add_dataset("tests/untrainable", {"test": world.splits["test"]})
    write_split(world.mirror / name, "train", []).write_text("damaged")
    results = evaluate(hf_model(), natural(dataset_path=name))
    assert report(results, "natural_films")["documents"] == len(world.splits["test"])
    with pytest.raises(ValueError, match=r"train\.jsonl"):
        evaluate(hf_model(), natural(dataset_path=name), num_fewshot=1)


def test_the_results_say_which_data_were_used(world: World) -> None:
    task = natural()
    assert task.dataset.source == f"local folder {world.mirror / DATASET}"
    evaluated = evaluate(hf_model(), task, limit=1)
    assert report(evaluated, "natural_films")["data"] == task.dataset.source


# ------------------------------------------------------------------------------------------------- Hub


def test_the_hub_gives_what_the_mirror_lacks(mirror: Path, hub: list[Any]) -> None:
    write_split(mirror / "org" / "name", "test", ROWS[:1])
    splits = open_dataset("org/other", "plain", options={"revision": "abc"})
    assert splits.source == "Hugging Face Hub org/other"
    assert hub == []
    assert len(splits["test"]) == len(ROWS)
    assert hub == [(("org/other", "plain"), {"split": "test", "revision": "abc"})]


def test_without_the_variable_everything_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch, hub: list[Any]) -> None:
    monkeypatch.delenv(DATA_VARIABLE)
    open_dataset(DATASET, None)["test"]
    assert hub == [((DATASET, None), {"split": "test"})]


def test_without_internet_and_mirror_the_error_says_which_file_to_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE)
    with pytest.raises(FileNotFoundError, match=rf"{DATA_VARIABLE} is not set.*org/absent/test\.jsonl") as caught:
        open_dataset("org/absent", None)["test"]
    assert caught.value.__cause__ is not None


def test_without_internet_the_error_says_where_the_mirror_was_searched(mirror: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not exist.*org/absent/train\.jsonl") as caught:
        open_dataset("org/absent", None)["train"]
    assert str(mirror / "org" / "absent") in str(caught.value)
    assert DATA_VARIABLE in str(caught.value)


# ------------------------------------------------------------------------------------------------- model folders


def test_a_language_of_the_lab_is_read_beside_its_model(tmp_path: Path, mirror: Path, hub: list[Any]) -> None:
    write_split(tmp_path / "model" / "data" / OWN, "test", ROWS)
    splits = open_dataset(OWN, None, pretrained=str(tmp_path / "model"))
    assert splits["test"].to_list() == ROWS
    assert splits.source == f"local folder {tmp_path / 'model' / 'data' / OWN}"
    assert hub == []


@pytest.mark.parametrize("pretrained", [None, "gpt2", "folder"])
def test_a_language_of_the_lab_is_never_asked_of_the_hub(
    tmp_path: Path, mirror: Path, hub: list[Any], pretrained: str | None
) -> None:
    if pretrained == "folder":
        pretrained = str(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"data/harness_ext/reviews.*harness-ext demo.*pretrained="):
        open_dataset(OWN, None, pretrained=pretrained)
    assert hub == []


def test_a_model_folder_never_replaces_another_dataset(tmp_path: Path, mirror: Path, hub: list[Any]) -> None:
    for name in ("org/name", DATASET):
        write_split(tmp_path / "model" / "data" / name, "test", ROWS[:1])
    splits = open_dataset("org/name", None, pretrained=str(tmp_path / "model"))
    assert splits.source == "Hugging Face Hub org/name"
    assert len(splits["test"]) == len(ROWS)


def test_a_task_finds_the_data_of_the_model_in_its_metadata(tmp_path: Path) -> None:
    write_split(tmp_path / "data" / OWN, "test", ROWS)
    write_split(tmp_path / "data" / OWN, "train", ROWS)
    task = natural(dataset_path=OWN, metadata={"pretrained": str(tmp_path)})
    assert task.eval_docs.to_list() == ROWS
    with pytest.raises(FileNotFoundError, match="harness-ext demo"):
        natural(dataset_path=OWN)


# ------------------------------------------------------------------------------------------------- hostile names


@pytest.mark.parametrize("split", ["../secret/test", "/etc/passwd", "..\\test", "a/../test", "te\0st", ""])
def test_a_split_leads_nowhere_else(mirror: Path, split: str) -> None:
    write_split(mirror / "org" / "name", "test", ROWS)
    write_split(mirror / "org" / "secret", "test", ROWS)
    with pytest.raises(ValueError, match=r"org/name: split .* is no name"):
        open_dataset("org/name", None)[split]


def test_the_option_of_a_task_leads_nowhere_else(world: World) -> None:
    world.add_dataset("tests/secret", {"test": world.splits["test"]})
    with pytest.raises(ValueError, match=r"split '\.\./secret/test' is no name"):
        natural(metadata={"eval_split": "../secret/test"})


@pytest.mark.parametrize("name", ["../secret", "org/../../secret", "/secret", "./org/name", "org//name", "org/name/.."])
def test_a_dataset_of_the_mirror_goes_by_its_id(mirror: Path, hub: list[Any], name: str, tmp_path: Path) -> None:
    """Anything else is a path of the user's, which the library opens, from where the user is."""
    for folder in (tmp_path / "secret", mirror / "secret", mirror / "org" / "name"):
        write_split(folder, "test", ROWS)
    given = str(tmp_path / "secret") if name == "/secret" else name
    assert open_dataset(given, None).source == f"Hugging Face Hub {given}"


@pytest.mark.parametrize("name", ["harness_ext/../../secret", "harness_ext/../x", "harness_ext//reviews"])
def test_a_language_of_the_lab_stays_beside_its_model(tmp_path: Path, mirror: Path, hub: list[Any], name: str) -> None:
    write_split(tmp_path / "secret", "test", ROWS)
    write_split(tmp_path / "model" / "data" / OWN, "test", ROWS)
    with pytest.raises(FileNotFoundError, match="is a dataset of a synthetic language"):
        open_dataset(name, None, pretrained=str(tmp_path / "model"))
    assert hub == []


@pytest.mark.parametrize("link", ["file", "dataset", "data"])
def test_what_comes_with_a_model_does_not_lead_out_of_it(tmp_path: Path, mirror: Path, link: str) -> None:
    target = write_split(tmp_path / "secret" / OWN, "test", ROWS)
    place = {"file": f"data/{OWN}/test.jsonl", "dataset": f"data/{OWN}", "data": "data"}[link]
    path = tmp_path / "model" / place
    path.parent.mkdir(parents=True)
    path.symlink_to({"file": target, "dataset": target.parent, "data": tmp_path / "secret"}[link])
    splits = open_dataset(OWN, None, pretrained=str(tmp_path / "model"))
    with pytest.raises(ValueError, match=r"test\.jsonl leads out of .*model, to .*secret"):
        splits["test"]


def test_links_of_the_users_own_mirror_are_followed(mirror: Path, tmp_path: Path) -> None:
    write_split(tmp_path / "large_disk" / "name", "test", ROWS)
    (mirror / "org").mkdir()
    (mirror / "org" / "name").symlink_to(tmp_path / "large_disk" / "name")
    assert open_dataset("org/name", None)["test"].to_list() == ROWS


@pytest.mark.parametrize("error", [RuntimeError("Dataset scripts are no longer supported"), TypeError("no option x")])
def test_whatever_the_library_raises_is_one_error(
    error: Exception, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(FileNotFoundError, match=f"org/name, split 'test'.*{error}"):
        open_dataset("org/name", None)["test"]


@pytest.mark.parametrize(
    "content",
    [
        b"[1, 2, 3]\n",
        b'"text"\n',
        b"null\n",
        b" \t null\r\n",
        b"\xef\xbb\xbfnull",
        b'\n\nnull\n{"text": "a"}\n',
        b'{"text": "a"} null\n',
        b'{"text": "a"}\n{"text": {"b": 1}}\n',
        b'{"text": "a", "label": 0}\n[1]\n',
        b'{"text": "\xff\xfe"}\n',
        b'{"text": "\\ud800"}\n',
        b"\x00\x01\x02",
        b"\x1f\x8b\x08\x00 no gzip",
        b'{"text": ' * 2000 + b"1" + b"}" * 2000,
        b'{"text": 1e999, "label": 99999999999999999999999999}\n',
    ],
    ids=lambda content: repr(content[:20]),
)
def test_rows_of_any_bytes_are_read_or_refused_by_name(mirror: Path, content: bytes) -> None:
    path = write_split(mirror / "org" / "name", "test", ROWS)
    path.write_bytes(content)
    try:
        rows = open_dataset("org/name", None)["test"].to_list()
    except ValueError as err:
        assert str(path) in str(err)  # noqa: PT017
    else:
        assert all(isinstance(row, dict) for row in rows)
