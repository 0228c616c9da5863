"""The YAMLs and the templates belong together: each dataset has each evaluator, and each prompt suits its dataset."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from lm_eval.config.task import TaskConfig
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from harness_ext import resources, scaffold
from harness_ext.lab.languages import LANGUAGES, make_language
from harness_ext.lab.languages.datasets import PROMPT_NAME
from harness_ext.prompts import (
    PROMPTS_VARIABLE,
    check_prompt,
    duplicate_prompts,
    find_prompts,
    load_prompt,
    words_by_class,
)

CONFIGS = resources.task_configs_folder()
DATASETS = scaffold.read_datasets(CONFIGS)
# Datasets of a language, by the tag of their tasks: data, classes and prompts come in the folder of a model of the lab.
LAB = {
    "lab_hmm": [name for name in DATASETS if name.startswith("hmm_")],
    "lab_pcfg": [name for name in DATASETS if name.startswith("pcfg_")],
    "lab_reviews": ["reviews_topic"],
}
OF_LAB = [name for names in LAB.values() for name in names]
WITH_PROMPTS = [name for name in DATASETS if name not in OF_LAB]
EVALUATORS = scaffold.evaluator_names(CONFIGS)
TASKS = [(evaluator, dataset) for dataset in DATASETS for evaluator in EVALUATORS]
# Tasks on running text, by corpus: `demo` comes in a model's folder, `corpus` is whatever --metadata says.
CORPORA = {"wikitext": "wikitext", "demo": "demo_text", "hmm": "hmm_text", "pcfg": "pcfg_text", "corpus": "corpus"}
LOSSES = {"loss": "LossTask", "flatness": "FlatnessTask"}
CORPUS_TASKS = [(kind, corpus) for corpus in CORPORA for kind in LOSSES]
OURS = {f"{kind}_{source}" for kind, source in TASKS + CORPUS_TASKS} | {*EVALUATORS, *LOSSES, "demo", *LAB}

# Evaluator -> class that runs it.
CLASSES = {
    "natural": "NaturalTask",
    "probe": "ProbeTask",
    "probe_cmean": "ConditionalMeanProbe",
    "probe_full": "ProbabilitiesProbe",
    "probe_random": "RandomProjectionProbe",
    "probe_subset": "SubsetWordsProbe",
    "probe_words": "ClassWordsProbe",
    "quad": "QuadProbe",
}

# What the Hub's datasets have, for checks without a network. A dataset that is not here may use the two columns that
# its YAML names.
COLUMNS = {
    "agnews": {"text", "label"},
    "cr": {"text", "label", "label_text"},
    "demo": {"text", "label", "label_text"},
    "imdb": {"text", "label"},
    "mpqa": {"sentence", "label"},
    "mr": {"text", "label"},
    "sst": {"text", "label", "label_text"},
    "sst5": {"text", "label", "label_text"},
    "subj": {"text", "label", "label_text"},
}


@pytest.fixture(autouse=True)
def only_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROMPTS_VARIABLE, raising=False)


def _merged(evaluator: str, dataset: str, *, resolve: bool = False) -> dict[str, Any]:
    return load_yaml(CONFIGS / dataset / f"{evaluator}_{dataset}.yaml", resolve_func=resolve)


def test_the_datasets_of_the_project_are_there() -> None:
    assert set(DATASETS) >= {"sst", "sst5", "mr", "subj", "mpqa", "cr", "trec", "agnews", "imdb", "demo"}
    assert set(EVALUATORS) == set(CLASSES)


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_dataset_has_every_evaluator_and_nothing_else(dataset: str) -> None:
    expected = {"_dataset.yaml", *(f"{evaluator}_{dataset}.yaml" for evaluator in EVALUATORS)}
    assert {path.name for path in (CONFIGS / dataset).iterdir()} == expected


def test_no_folder_lacks_its_dataset_yaml() -> None:
    folders = {path.name for path in CONFIGS.iterdir() if path.is_dir()}
    assert folders == {*DATASETS, *CORPORA.values(), "_evaluators", "_losses"}


@pytest.mark.parametrize(("kind", "corpus"), CORPUS_TASKS)
def test_a_task_on_text_is_its_corpus_and_its_kind(kind: str, corpus: str) -> None:
    folder = CONFIGS / CORPORA[corpus]
    expected = {"_corpus.yaml", *(f"{name}_{corpus}.yaml" for name in LOSSES)}
    assert {path.name for path in folder.iterdir()} == expected
    config = load_yaml(folder / f"{kind}_{corpus}.yaml", resolve_func=True)
    assert config["task"] == f"{kind}_{corpus}"
    assert config.keys() - {"class"} <= {field.name for field in fields(TaskConfig)}
    assert config["class"].__name__ == LOSSES[kind]
    assert config["metadata"].keys() <= {"version", "block_tokens", "corpus"}
    assert "metadata" not in load_yaml(CONFIGS / "_losses" / f"{kind}.yaml", resolve_func=False)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_tag_of_tasks_on_text_needs_neither_a_model_folder_nor_options(kind: str) -> None:
    index = TaskManager(include_path=str(CONFIGS), include_defaults=False).task_index
    assert index[kind].tags == {f"{kind}_wikitext"}
    # A folder of a demo may hold the reviews and not the text.
    for tag in ("demo", *LAB):
        assert not {name for name in index[tag].tags if name.startswith(f"{kind}_")}


@pytest.mark.parametrize(("evaluator", "dataset"), TASKS)
def test_a_task_is_its_dataset_and_its_evaluator(evaluator: str, dataset: str) -> None:
    config = _merged(evaluator, dataset)
    assert config["task"] == f"{evaluator}_{dataset}"
    assert config.keys() - {"class"} <= {field.name for field in fields(TaskConfig)}
    # lm_eval merges includes key by key and would lose one of two metadata mappings.
    assert config["metadata"].keys() - {"split_sizes"} == {"version", "prompt", "subset_words"}
    assert "metadata" not in load_yaml(CONFIGS / "_evaluators" / f"{evaluator}.yaml", resolve_func=False)
    assert config["output_type"] == "multiple_choice"
    assert config["training_split"] == config["fewshot_split"] != config["test_split"]
    for metric in config["metric_list"]:
        assert set(metric) == {"metric", "aggregation", "higher_is_better"}


@pytest.mark.parametrize(("evaluator", "name"), CLASSES.items())
def test_the_class_can_be_imported(evaluator: str, name: str) -> None:
    task_class = _merged(evaluator, "sst", resolve=True)["class"]
    assert task_class.__name__ == name
    assert task_class.__module__.startswith("harness_ext.tasks")


PROBE_METRICS = {"acc", "balanced_acc", "macro_f1", "ece", "majority_rate"}


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_the_metrics(evaluator: str) -> None:
    metrics = {entry["metric"]: entry for entry in _merged(evaluator, "sst")["metric_list"]}
    of_natural = {"acc_pmi", "acc_batch", "acc_context", "brier"} if evaluator == "natural" else set()
    assert set(metrics) == PROBE_METRICS | of_natural
    assert {name for name, entry in metrics.items() if not entry["higher_is_better"]} == metrics.keys() & {
        "brier",
        "ece",
    }


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_subset_words_are_distinct_and_about_a_dozen(dataset: str) -> None:
    words = _merged("probe_subset", dataset)["metadata"]["subset_words"]
    assert all(isinstance(word, str) and word == word.strip() and word for word in words)
    assert len(set(words)) == len(words)
    assert (6 if dataset == "demo" else 12) <= len(words) <= 20


def test_every_evaluator_says_what_it_does() -> None:
    described = scaffold.evaluator_descriptions(CONFIGS)
    assert tuple(described) == EVALUATORS
    assert all(text.endswith(".") for text in described.values())


def test_lm_eval_sees_the_tasks_and_tags_and_no_others() -> None:
    index = TaskManager(include_path=str(CONFIGS), include_defaults=False).task_index
    assert set(index) == OURS
    # The data of the demo and of the lab are beside their models, so `--tasks natural` on another model must not ask for them.
    for evaluator in EVALUATORS:
        assert index[evaluator].tags == {
            f"{evaluator}_{dataset}" for dataset in DATASETS if dataset in WITH_PROMPTS and dataset != "demo"
        }
        assert f"{evaluator}_demo" in index["demo"].tags
    for tag, names in LAB.items():
        assert index[tag].tags == {f"{evaluator}_{name}" for evaluator in EVALUATORS for name in names}


@pytest.mark.slow
def test_no_name_is_one_of_lm_evals_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.tasks

    own = Path(lm_eval.tasks.__file__).parent
    builtin = TaskManager(include_path=None).task_index
    for name in OURS & set(builtin):
        path = builtin[name].yaml_path
        assert path is None or not path.is_relative_to(own)
    prefixes = tuple(f"{evaluator}_" for evaluator in EVALUATORS)
    assert not [
        name
        for name, entry in builtin.items()
        if entry.yaml_path and entry.yaml_path.is_relative_to(own) and name.startswith(prefixes)
    ]


# ------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("prompt_id", find_prompts("*"))
def test_every_prompt_suits_its_dataset(prompt_id: str) -> None:
    prompt = load_prompt(prompt_id)
    dataset = DATASETS[prompt_id.partition("/")[0]]
    columns = COLUMNS.get(dataset.name, {dataset.text_column, dataset.label_column})
    findings = check_prompt(prompt, columns=columns, classes=dataset.classes, label_column=dataset.label_column)
    assert findings == []
    assert prompt.variables == {dataset.text_column}
    assert prompt.source == prompt.source.rstrip()


@pytest.mark.parametrize("dataset", WITH_PROMPTS)
def test_the_default_prompt_has_words_for_every_class(dataset: str) -> None:
    config = DATASETS[dataset]
    assert config.prompt is not None
    assert config.prompt.startswith(f"{dataset}/")
    assert all(words_by_class(load_prompt(config.prompt), config.classes))


@pytest.mark.parametrize("dataset", WITH_PROMPTS)
def test_there_are_three_prompts_of_our_own_beside_the_papers(dataset: str) -> None:
    sources = [load_prompt(prompt_id).source for prompt_id in find_prompts(f"{dataset}/*")]
    assert sum("et al." not in source for source in sources) >= 3


@pytest.mark.parametrize("dataset", WITH_PROMPTS)
def test_no_two_prompts_are_the_same(dataset: str) -> None:
    assert duplicate_prompts(load_prompt(prompt_id) for prompt_id in find_prompts(f"{dataset}/*")) == []


@pytest.mark.parametrize(("dataset", "count"), [("sst", 8), ("imdb", 8), ("agnews", 6)])
def test_a_sweep_has_different_texts_that_share_their_document(dataset: str, count: int) -> None:
    column, document = DATASETS[dataset].text_column, "so it goes<br />on ."
    texts = {load_prompt(prompt_id).render({column: document}).text for prompt_id in find_prompts(f"{dataset}/*")}
    assert sum(text.startswith(document) for text in texts) >= count


def test_the_default_of_sst_is_that_of_the_readme() -> None:
    prompt = load_prompt("sst/this_movie_is")
    assert DATASETS["sst"].prompt == prompt.id
    assert prompt.render({"text": "fine ."}).text == "fine . This movie is"
    assert prompt.label_words == {"negative": ("terrible",), "positive": ("great",)}


# ------------------------------------------------------------------------------------------------- the real data


@pytest.mark.parametrize("kind", LANGUAGES)
def test_the_datasets_of_the_lab_are_those_of_the_default_languages(kind: str) -> None:
    language = make_language(kind)
    # The sentiment of the reviews is the dataset `demo`.
    tasks = [task for task in language.tasks if task.name != "reviews"]
    assert sorted(task.name for task in tasks) == LAB[f"lab_{kind}"]
    for task in tasks:
        config = DATASETS[task.name]
        assert config.dataset_path == f"harness_ext/{task.name}"
        assert config.classes == ()
        assert config.prompt == f"{task.name}/{PROMPT_NAME}"
        assert set(_merged("probe_subset", task.name)["metadata"]["subset_words"]) <= set(language.words)
    corpus = load_yaml(CONFIGS / f"{'demo' if kind == 'reviews' else kind}_text" / "_corpus.yaml", resolve_func=False)
    assert corpus["dataset_path"] == f"harness_ext/{kind}_text"


@pytest.mark.parametrize("dataset", WITH_PROMPTS)
def test_yaml_and_prompts_agree_with_the_local_mirror(dataset: str) -> None:
    config = DATASETS[dataset]
    data = os.environ.get(scaffold.DATA_VARIABLE)
    splits = scaffold.read_mirror(Path(data) if data else None, config.dataset_path)
    if not splits:
        pytest.skip(f"{scaffold.DATA_VARIABLE} has no {config.dataset_path}")
    assert set(config.splits) <= set(splits)
    for split in config.splits:
        rows = list(islice(splits[split].rows(), 3000))
        labels = {row[config.label_column] for row in rows}
        if all(isinstance(label, str) for label in labels):
            assert labels == set(config.classes)
        else:
            assert labels <= set(range(len(config.classes)))
        if "label_text" in rows[0]:
            assert {row["label_text"] for row in rows} == {config.classes[row["label"]] for row in rows}
        for prompt_id in find_prompts(f"{dataset}/*"):
            findings = check_prompt(
                load_prompt(prompt_id),
                columns=rows[0],
                classes=config.classes,
                label_column=config.label_column,
                example=rows[0],
            )
            assert findings == [], json.dumps(rows[0])
