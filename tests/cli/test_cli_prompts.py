"""`harness-ext prompts list|show|check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from harness_ext.cli import main
from harness_ext.prompts import PROMPTS_VARIABLE, find_prompts
from harness_ext.scaffold import DATA_VARIABLE


@pytest.fixture(autouse=True)
def no_folders_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROMPTS_VARIABLE, raising=False)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a byte-level tokenizer that splits every word into its letters, except `great`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    merges = [("Ġ", "g"), ("r", "e"), ("a", "t"), ("Ġg", "re"), ("Ġgre", "at")]
    vocabulary = {piece: number for number, piece in enumerate([*sorted(letters), *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "list", "sst/*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(find_prompts("sst/*"))
    assert any(
        line.startswith("sst/this_movie_is ") and "negative: terrible; positive: great" in line for line in lines
    )
    assert main(["prompts", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(find_prompts("*"))


def test_unknown_names_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["list", "tss/*"], ["show", "sst/it_wsa"], ["check", "sst/it_wsa"], ["show", "../x/y"]):
        assert main(["prompts", *command]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: ")
        assert len(captured.err.splitlines()) == 1
    assert main(["prompts", "check", "sst/it_was", "--dataset", "sts"]) == 2
    assert "unknown dataset 'sts'" in capsys.readouterr().err


def test_show_marks_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "show", "sst/it_was"]) == 0
    out = capsys.readouterr().out
    assert "[an example of text] It was" in out
    assert "negative: terrible; positive: great" in out
    assert out.endswith("for acc_pmi\nIt was\n")


def test_show_takes_its_example_from_the_local_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "SetFit" / "sst2"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(json.dumps({"text": "so so .", "label": 0}) + "\n", encoding="utf-8")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert main(["prompts", "show", "sst/it_was"]) == 0
    assert "a document of SetFit/sst2, train split of the local mirror\n[so so .] It was\n" in capsys.readouterr().out


def test_check_of_everything_that_ships_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", "check", "*"]) == 0
    assert capsys.readouterr().out.endswith(f"\n{len(find_prompts('*'))} prompts, 0 errors\n")


def test_check_shows_the_ids_that_are_used(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    assert main(["prompts", "check", "sst/this_movie_is", "--model", model]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    great = tokenizer.encode(" great", add_special_tokens=False)
    assert len(great) == 1
    assert ["positive", "great", str(great[0]), "'Ġgreat'"] in rows
    terrible = tokenizer.encode(" terrible", add_special_tokens=False)
    assert next(row for row in rows if row[:2] == ["negative", "terrible"])[2 : 2 + len(terrible)] == [
        str(number) for number in terrible
    ]
    assert ["info:", "word", "'terrible'", "of", "'negative'", "is", "9", "tokens;"] in [row[:8] for row in rows]


def test_check_warns_of_first_tokens_that_are_the_same(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.jinja"
    path.write_text('{%- set label_words = {"negative": "possible", "positive": "positive"} -%}\n{{ text }} It is\n')
    assert main(["prompts", "check", str(path), "--model", model, "--dataset", "sst"]) == 0
    assert "begin with the same token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ('{%- set label_words = {"negative": "bad"} -%}\n{{ text }} It is\n', "class 'positive'"),
        ('{%- set label_words = {"negative": "bad", "positive": "good"} -%}\n{{ text }} It is \n', "white space"),
        ('{%- set label_words = {"negative": "bad", "positive": "good"} -%}\n{{ label }} It is\n', "label column"),
        ("{% set label_words = text %}", "not a dictionary"),
        ("{{ text ", "unexpected end"),
    ],
)
def test_check_returns_1_for_errors(source: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jinja"
    path.write_text(source)
    assert main(["prompts", "check", str(path), "sst/it_was", "--dataset", "sst"]) == 1
    out = capsys.readouterr().out
    assert part in out
    assert "2 prompts, 1 error" in out  # the second is still checked


def test_the_columns_are_those_of_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sst" / "one.jinja"
    path.parent.mkdir()
    path.write_text('{%- set label_words = {"negative": "bad", "positive": "good"} -%}\n{{ title }} {{ text }} It is\n')
    assert main(["prompts", "check", str(path)]) == 0  # the folder names the dataset, whose columns are not known
    folder = tmp_path / "SetFit" / "sst2"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(json.dumps({"text": "so so .", "label": 0}) + "\n", encoding="utf-8")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert main(["prompts", "check", str(path)]) == 1
    assert "no column 'title'" in capsys.readouterr().out


def test_a_prompt_of_no_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jinja"
    path.write_text("{{ text }} It is\n")
    assert main(["prompts", "check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "dataset not known" in out
    assert "natural tasks refuse it" in out
