"""`harness-ext tasks list|new`: what is listed, what is written, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness_ext import resources, scaffold
from harness_ext.cli import main
from harness_ext.prompts import PROMPTS_VARIABLE, check_prompt, load_prompt, words_by_class
from harness_ext.scaffold import DATA_VARIABLE

SENTENCES = ["a fine film", "a dull film", "fine again", "dull , dull"]


@pytest.fixture(autouse=True)
def no_folders_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROMPTS_VARIABLE, raising=False)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "data"))
    return tmp_path / "data"


def _save(mirror: Path, dataset: str, **splits: Sequence[dict[str, Any]]) -> None:
    folder = mirror / dataset
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def _rows(labels: Sequence[Any], *, text: str = "text", label: str = "label") -> list[dict[str, Any]]:
    return [{text: SENTENCES[i % 4], label: value} for i, value in enumerate(labels)]


def _new(into: Path, *arguments: str, dataset: str = "org/films", name: str = "films") -> int:
    return main(["tasks", "new", name, "--dataset", dataset, "--into", str(into), *arguments])


def test_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["tasks", "list"]) == 0
    out = capsys.readouterr().out
    configs = resources.task_configs_folder()
    evaluators, datasets = scaffold.evaluator_descriptions(configs), scaffold.read_datasets(configs)
    unwrapped = " ".join(out.split())
    for name, description in evaluators.items():
        assert f" {name} {description} " in unwrapped
    for name, config in datasets.items():
        assert f"\n  {name}  ({config.dataset_path})\n    classes  " in out
    assert "default sst/this_movie_is\n" in out
    assert max(map(len, out.splitlines())) <= 80


def test_list_names_the_tasks_of_a_dataset_that_lacks_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _new(tmp_path, "--classes", "bad,good") == 0
    assert _new(tmp_path, "--classes", "bad,good", name="other") == 0
    for name in ("probe_cmean", "quad"):
        (tmp_path / "task_configs" / "films" / f"{name}_films.yaml").unlink()
    monkeypatch.setattr(resources, "task_configs_folder", lambda: tmp_path / "task_configs")
    monkeypatch.setenv("COLUMNS", "100")
    capsys.readouterr()
    assert main(["tasks", "list"]) == 0
    out = capsys.readouterr().out
    assert "    tasks    natural_films, probe_films, probe_full_films, probe_random_films, probe_subset_films,\n" in out
    assert "             probe_words_films\n    classes  bad, good\n" in out
    assert "quad_films" not in out
    assert "natural_other" not in out


def test_a_new_dataset_from_flags_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _new(tmp_path, "--text-column", "review", "--label-column", "stars", "--classes", "bad,so-so,good") == 0
    out = capsys.readouterr().out
    config = scaffold.read_dataset(tmp_path / "task_configs" / "films")
    tasks = [f"{evaluator}_films" for evaluator in scaffold.evaluator_names(resources.task_configs_folder())]
    assert config == scaffold.DatasetConfig(
        name="films",
        dataset_path="org/films",
        config_name=None,
        splits=("train", "test"),
        text_column="review",
        label_column="stars",
        classes=("bad", "so-so", "good"),
        prompt="films/category",
        tasks=tuple(sorted(tasks)),
    )
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path / "prompts"))
    prompt = load_prompt("films/category")
    assert words_by_class(prompt, config.classes) == (("bad",), ("so-so",), ("good",))
    assert check_prompt(prompt, columns=["review", "stars"], classes=config.classes, label_column="stars") == []
    assert prompt.render({"review": "x", "stars": 1}).text == "x\nCategory:"

    check, evaluate = out.splitlines()[-2:]
    variable = f"{PROMPTS_VARIABLE}={tmp_path}/prompts"
    folder = f"{tmp_path}/task_configs/films"
    assert check == f"  {variable} harness-ext prompts check films/category --model gpt2 --dataset {folder}"
    assert f"lm_eval --tasks {','.join(tasks)} " in evaluate
    assert f"--include_path {tmp_path}/task_configs" in evaluate
    assert main(["prompts", "check", "films/category", "--dataset", folder]) == 0


def test_the_subset_words_are_those_of_the_classes(tmp_path: Path) -> None:
    assert _new(tmp_path, "--classes", "World,very bad,Sci/Tech,so: #so", "--config", "v2") == 0
    folder = tmp_path / "task_configs" / "films"
    text = (folder / "_dataset.yaml").read_text(encoding="utf-8")
    metadata = yaml.safe_load(text)["metadata"]
    assert metadata["subset_words"] == ["World", "very bad", "Sci/Tech", "so: #so", "world"]
    assert re.search(r"^  # For probe_subset: make it a dozen words .*\n  subset_words:", text, flags=re.MULTILINE)
    assert scaffold.read_dataset(folder).config_name == "v2"


def test_lm_eval_loads_the_new_tasks(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    _save(mirror, "org/films", train=_rows([0, 1, 1, 0]), test=_rows([1, 0]))
    assert _new(tmp_path, "--classes", "bad,good") == 0
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path / "prompts"))
    manager = TaskManager(include_path=str(tmp_path / "task_configs"), include_defaults=False)
    names = [f"{evaluator}_films" for evaluator in scaffold.evaluator_names(resources.task_configs_folder())]
    assert set(names) <= set(manager.task_index)
    assert {"natural_films"} <= manager.task_index["natural"].tags
    tasks = manager.load(names)["tasks"]
    assert tasks["probe_subset_films"].words == tasks["probe_words_films"].words == ("bad", "good")
    assert tasks["natural_films"].template.id == "films/category"


def test_what_is_not_given_is_read_off_the_mirror(mirror: Path, tmp_path: Path) -> None:
    rows = [{"id": i, **row, "label_text": ["bad", "good"][row["label"]]} for i, row in enumerate(_rows([0, 1, 1, 0]))]
    _save(mirror, "org/films", train=rows, validation=rows, test=rows)
    assert _new(tmp_path) == 0
    config = scaffold.read_dataset(tmp_path / "task_configs" / "films")
    assert (config.text_column, config.label_column, config.classes) == ("text", "label", ("bad", "good"))
    assert config.splits == ("train", "validation", "test")


def test_string_labels_are_the_classes(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(mirror, "org/films", train=_rows(["yes", "no", 'it\'s "so"', "no"]), dev=_rows(["yes"]))
    assert _new(tmp_path) == 0
    config = scaffold.read_dataset(tmp_path / "task_configs" / "films")
    assert config.classes == ('it\'s "so"', "no", "yes")
    assert config.splits == ("train", "dev")
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path / "prompts"))
    assert words_by_class(load_prompt("films/category"), config.classes)[0] == ('it\'s "so"',)


def test_parquet_and_other_column_names(mirror: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (mirror / "films").mkdir(parents=True)
    table = pyarrow.Table.from_pylist(_rows([1, 0, 1, 0], text="sentence", label="coarse"))
    for split in ("train", "test"):
        pyarrow.parquet.write_table(table, mirror / "films" / f"{split}.parquet")
    assert _new(tmp_path, "--classes", "bad,good", dataset="films") == 0
    config = scaffold.read_dataset(tmp_path / "task_configs" / "films")
    assert (config.text_column, config.label_column) == ("sentence", "coarse")


def test_a_test_split_with_hidden_labels_is_passed_over(mirror: Path, tmp_path: Path) -> None:
    _save(mirror, "org/films", train=_rows([0, 1, 0]), validation=_rows([0, 1]), test=_rows([-1, -1]))
    assert _new(tmp_path, "--classes", "bad,good") == 0
    assert scaffold.read_dataset(tmp_path / "task_configs" / "films").splits == ("train", "validation")


@pytest.mark.parametrize("name", ["Films", "my films", "../films", "films/x", "_evaluators", "5films", "", "é"])
def test_names_are_checked(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _new(tmp_path, "--classes", "bad,good", name=name) == 2
    assert f"name {name!r}: expected" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "the class names are needed: --classes a,b"),
        (["--classes", "bad"], "two or more distinct names"),
        (["--classes", "bad,bad"], "two or more distinct names"),
        (["--classes", "bad,"], "two or more distinct names"),
        (["--classes", "bad,good", "--text-column", "my text"], "cannot be written as a variable"),
        (["--classes", "bad,good", "--text-column", "not"], "cannot be written as a variable"),
        (["--classes", "bad,good", "--test-split", "train"], "tested on what it learnt"),
    ],
)
def test_flags_are_checked(arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _new(tmp_path, *arguments) == 2
    assert part in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("dataset", ["../films", "org/films/more", "org films", "", "https://x.org/y"])
def test_the_hub_id_is_checked(dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _new(tmp_path, "--classes", "bad,good", dataset=dataset) == 2
    assert "expected an id of the Hub" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("labels", "arguments", "part"),
    [
        ([0, 1, 0], [], "labels 0, 1 in column 'label' have no names. Give --classes"),
        ([0, 1, 2, 0], ["--classes", "bad,good"], "names 2 classes; the labels in column 'label' are 0, 1, 2"),
        ([1, 2, 1], ["--classes", "bad,good"], "the labels in column 'label' are 1, 2"),
        ([0, -1, 0], ["--classes", "bad,good"], "some labels are hidden"),
        (["n", "p", "n"], ["--classes", "bad,good"], "the values of column 'label' are n, p"),
        ([0.5, 1.5, 0.5], ["--label-column", "label", "--classes", "a,b"], "values of type float"),
        ([True, False, True], ["--label-column", "label", "--classes", "a,b"], "values of type bool"),
        ([0, 1, 0], ["--label-column", "lable"], "the columns are text, label"),
        ([0, 1, 0], ["--text-column", "sentence"], "the columns are text, label"),
        ([0, 1, 0], ["--classes", "a,b", "--train-split", "training"], "the local mirror has test, train"),
        (["a", "b", "c"], [], "no column looks like a label"),
    ],
)
def test_what_the_mirror_contradicts_is_refused(
    labels: list[Any], arguments: list[str], part: str, mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(mirror, "org/films", train=_rows(labels), test=_rows(labels))
    assert _new(tmp_path / "own", *arguments) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "own").exists()


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts" / "films").mkdir(parents=True)
    assert _new(tmp_path, "--classes", "bad,good") == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert not (tmp_path / "task_configs").exists()
    assert _new(tmp_path, "--classes", "bad,good", name="sst") == 2
    assert "is a dataset of harness_ext itself" in capsys.readouterr().err

    assert _new(tmp_path, "--classes", "bad,good", name="other") == 0
    yaml_before = (tmp_path / "task_configs" / "_evaluators" / "natural.yaml").read_text() + "# mine\n"
    (tmp_path / "task_configs" / "_evaluators" / "natural.yaml").write_text(yaml_before)
    assert _new(tmp_path, "--classes", "bad,good", name="third") == 0
    assert (tmp_path / "task_configs" / "_evaluators" / "natural.yaml").read_text() == yaml_before
    assert _new(tmp_path, "--classes", "bad,good", name="third") == 2


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed: list[str] = []

    def rename(source: Path, target: Path) -> None:
        if renamed:
            raise OSError(28, "No space left on device")
        renamed.append(str(target))
        Path(source).replace(target)

    monkeypatch.setattr(scaffold.os, "rename", rename)
    assert _new(tmp_path, "--classes", "bad,good") == 2
    assert renamed
    assert not (tmp_path / "task_configs" / "films").exists()
    assert [path.name for path in tmp_path.rglob("*films*")] == []


def test_an_installed_copy_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import harness_ext

    monkeypatch.setattr(harness_ext, "__file__", str(resources.task_configs_folder().parent / "__init__.py"))
    assert main(["tasks", "new", "films", "--dataset", "org/films", "--classes", "bad,good"]) == 2
    assert "Give --into DIR" in capsys.readouterr().err


def test_a_checkout_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    shutil.copytree(resources.task_configs_folder(), tmp_path / "task_configs")
    (tmp_path / "prompts").mkdir()
    monkeypatch.setattr(resources, "task_configs_folder", lambda: tmp_path / "task_configs")
    monkeypatch.setattr(resources, "prompts_folder", lambda: tmp_path / "prompts")
    assert main(["tasks", "new", "films", "--dataset", "org/films", "--classes", "bad,good"]) == 0
    assert "films" in scaffold.read_datasets(tmp_path / "task_configs")
    assert load_prompt("films/category").id == "films/category"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("dataset_path: [", "not valid YAML"),
        ("- a list", "expected a mapping, found list"),
        ("dataset_path: x\ndoc_to_text: text", "no doc_to_target"),
        (
            "dataset_path: x\ndoc_to_text: t\ndoc_to_target: l\ndoc_to_choice: '{{ x }}'",
            "expected the list of class names",
        ),
    ],
)
def test_a_broken_dataset_yaml_is_named(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "_dataset.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"_dataset\.yaml") as caught:
        scaffold.read_dataset(tmp_path)
    assert part in str(caught.value)


def test_a_broken_line_of_the_mirror_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "train.jsonl").write_text('{"text": "a"}\n\n[1]\n{"text": \n')
    split = scaffold.read_mirror(tmp_path, "x")["train"]
    with pytest.raises(ValueError, match=r"train\.jsonl, line 3: expected a JSON object, found list"):
        list(split.rows())
    assert scaffold.read_mirror(None, "x") == {}
    assert scaffold.read_mirror(tmp_path, "y") == {}
