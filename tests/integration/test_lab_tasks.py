"""lm_eval on the folder of a small model of a language: the data, the classes and the prompts come with the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
import pytest
from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from harness_ext import plugin, prompts, resources
from harness_ext.lab.languages import make_language
from harness_ext.lab.languages.datasets import write_language_data
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.prompts import PROMPTS_VARIABLE
from harness_ext.tasks.data import DATA_VARIABLE

# Other numbers of classes than in the default languages.
SIZES: dict[str, dict[str, Any]] = {
    "hmm": {"states": 5, "words": 30, "lengths": (8, 10), "settings": 3, "switches": 1},
    "pcfg": {"symbols": (3, 4), "top_rules": 4, "words": 20, "word_sharing": 2, "constituents": ((1, "last"),)},
    "reviews": {},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (DATA_VARIABLE, PROMPTS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HARNESS_EXT_CACHE", "off")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)


@pytest.fixture(scope="module", params=SIZES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and the data of its language, in a folder with the name of its kind."""
    kind: str = request.param
    language = make_language(kind, 1, SIZES[kind])
    folder = tmp_path_factory.mktemp("lab") / kind
    rng = np.random.default_rng(0)
    write_language_data(folder, language, num_train_per_class=6, num_test=20, num_validation=20, rng=rng)
    tokenizer = language.tokenizer(max_length=64)
    build_model(ModelConfig(width=8, depth=1, heads=2), tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def evaluate(folder: Path, tasks: list[str], *, pretrained: Path | None = None) -> dict[str, Any]:
    plugin.install()
    model_args = {"pretrained": str(pretrained or folder)}
    metadata = {**model_args, "probe": {"c_grid": [0.1], "num_folds": 2}}
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=model_args,
        tasks=tasks,
        batch_size=16,
        device="cpu",
        bootstrap_iters=10,
        task_manager=TaskManager(
            include_path=str(resources.task_configs_folder()), include_defaults=False, metadata=metadata
        ),
    )
    assert results is not None
    return results


def truth_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "data" / "truth.json").read_text())["tasks"]


def test_the_tasks_run_on_languages_of_any_size(folder: Path) -> None:
    kind = folder.name
    names = [name for name in truth_of(folder) if name != "reviews"]
    tasks = [f"natural_{name}" for name in names] + [f"probe_{names[0]}"]
    if kind == "hmm":
        tasks += [f"{evaluator}_{names[0]}" for evaluator in ("probe_words", "probe_subset")]
    tasks.append(f"loss_{'demo' if kind == 'reviews' else kind}")
    results = evaluate(folder, tasks)
    assert set(results["results"]) == set(tasks)
    for name in names:
        truth = truth_of(folder)[name]
        for task in {f"natural_{name}", f"probe_{name}"} & set(tasks):
            assert results["configs"][task]["doc_to_choice"] == truth["classes"]
            assert results["results"][task]["majority_rate,none"] == pytest.approx(truth["majority"])
            assert 0 <= results["results"][task]["acc,none"] <= 1
        (described,) = results["configs"][f"natural_{name}"]["metadata"]["report"]["prompts"]
        assert described["id"] == f"{name}/next_word"
        assert list(described["label_words"]) == truth["classes"]


def test_a_checkpoint_finds_the_data_of_its_family(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data lie once beside many checkpoints, and HARNESS_EXT_DATA names them."""
    name = next(name for name in truth_of(folder) if name != "reviews")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (checkpoint / path.name).write_bytes(path.read_bytes())
    with pytest.raises((KeyError, FileNotFoundError), match=f"{name}"):
        evaluate(folder, [f"natural_{name}"], pretrained=checkpoint)
    monkeypatch.setenv(DATA_VARIABLE, str(folder / "data"))
    results = evaluate(folder, [f"natural_{name}"], pretrained=checkpoint)
    assert results["results"][f"natural_{name}"]["acc,none"] >= 0


def test_the_users_own_prompt_wins_and_the_packages_stay(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(name for name in truth_of(folder) if name != "reviews")
    data = folder / "data"
    prompt_id = f"{name}/next_word"
    beside = prompts.load_prompt(prompt_id, data_folders=[data])
    assert beside.path == data / "prompts" / f"{prompt_id}.jinja"
    assert prompts.resolve_prompts(f"{name}/*", with_label_words=True, data_folders=[data]) == (prompt_id,)
    with pytest.raises(KeyError, match=f"unknown prompt '{prompt_id}'"):
        prompts.load_prompt(prompt_id)

    own = tmp_path / "own" / f"{prompt_id}.jinja"
    own.parent.mkdir(parents=True)
    own.write_text(beside.source.replace("{{ text }}", "{{ text }}  "))
    monkeypatch.setenv(PROMPTS_VARIABLE, str(tmp_path / "own"))
    assert prompts.load_prompt(prompt_id, data_folders=[data]).path == own

    # A model's folder cannot change what `natural_sst` asks.
    (tmp_path / "data" / "prompts" / "sst").mkdir(parents=True)
    (tmp_path / "data" / "prompts" / "sst" / "this_movie_is.jinja").write_text("{{ text }} mine")
    package = prompts.load_prompt("sst/this_movie_is")
    assert prompts.load_prompt("sst/this_movie_is", data_folders=[tmp_path / "data"]) == package
