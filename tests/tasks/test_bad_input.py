"""What a user gets wrong is said before any model work, with the file, what was expected and what was found."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from worlds import World, evaluate, hf_model, metric_list, natural, probe, task_config

from harness_ext.prompts import PromptError
from harness_ext.tasks import NaturalTask, ProbeTask

pytestmark = pytest.mark.usefixtures("world")

Make = Callable[..., Any]
EITHER = pytest.mark.parametrize("make", [natural, probe])


class NoModel:
    """A model that must not be reached."""

    def __init__(self) -> None:
        self.lm = hf_model()
        self.lm.model.forward = self._reached  # type: ignore[method-assign]

    def _reached(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the model was run")


@pytest.fixture(scope="module")
def untouchable(world: World) -> Any:
    return NoModel().lm


# ------------------------------------------------------------------------------------------------- configs


@EITHER
@pytest.mark.parametrize("key", ["doc_to_text", "doc_to_target", "dataset_path"])
@pytest.mark.parametrize("value", [None, 3])
def test_a_config_without_its_columns(make: Make, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"films\.yaml: task '.*_films' needs `{key}:`, found {value}"):
        make(**{key: value})


@EITHER
@pytest.mark.parametrize("classes", [None, [], ["only"], "label"])
def test_a_config_without_classes(make: Make, classes: Any) -> None:
    with pytest.raises(ValueError, match=r"films\.yaml.*`doc_to_choice:`.*at least two classes.*found"):
        make(doc_to_choice=classes)


@EITHER
def test_an_unknown_metric_names_those_that_exist(make: Make) -> None:
    with pytest.raises(ValueError, match=r"no metric 'acc_norm'\. It has .*macro_f1.*hf_evaluate: true"):
        make(metric_list=metric_list("acc", "acc_norm"))


def test_a_metric_of_the_other_task_is_unknown() -> None:
    with pytest.raises(ValueError, match="no metric 'acc_pmi'"):
        probe(metric_list=metric_list("acc_pmi"))


@EITHER
def test_f1_of_more_than_two_classes_is_refused(make: Make, world: World) -> None:
    world.add_prompt(
        "films/three", '{%- set label_words = {"a": "bad", "b": "good", "c": "the"} -%}{{ text }} This movie is'
    )
    with pytest.raises(ValueError, match="f1"):
        make(doc_to_choice=["a", "b", "c"], metadata={"prompt": "films/three"}, metric_list=metric_list("f1"))


@EITHER
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, r"FileNotFoundError: .*metric script"),
        ("import a_package_that_nobody_has\n", r"ImportError: .*a_package_that_nobody_has"),
        ("raise RuntimeError('no licence')\n", "RuntimeError: no licence"),
    ],
    ids=["absent", "needs a package", "raises"],
)
def test_a_metric_that_the_evaluate_library_cannot_load(
    make: Make, modules: Path, script: str | None, reason: str
) -> None:
    path = modules / "strange.py"
    if script is not None:
        path.write_text(script)
    with pytest.raises(
        ValueError, match=rf"films\.yaml: the evaluate library could not load metric '.*strange\.py' \({reason}"
    ):
        make(metric_list=[{"metric": str(path), "hf_evaluate": True}])


# ------------------------------------------------------------------------------------------------- prompts


def test_an_unknown_prompt_names_the_nearest() -> None:
    with pytest.raises(KeyError, match=r"unknown prompt 'films/plian'.*films/plain"):
        natural(metadata={"prompt": "films/plian"})


@pytest.mark.parametrize("prompt", [None, 5, {}, {"natural_other": "films/plain"}])
def test_a_natural_task_without_a_prompt(prompt: Any) -> None:
    with pytest.raises(ValueError, match="natural task 'natural_films' needs a prompt, found"):
        natural(metadata={"prompt": prompt})


def test_a_prompt_without_label_words_serves_probes_only() -> None:
    with pytest.raises(PromptError, match=r"wordless\.jinja.*no label_words.*'negative', 'positive'"):
        natural(metadata={"prompt": "films/wordless"})
    probe({"prompt": True}, metadata={"prompt": "films/wordless"})


def test_label_words_missing_for_a_class() -> None:
    with pytest.raises(PromptError, match=r"plain\.jinja.*no label words for class 'neutral'"):
        natural(doc_to_choice=["negative", "positive", "neutral"])


@EITHER
def test_a_variable_that_the_dataset_lacks(make: Make, world: World) -> None:
    world.add_prompt(
        "films/column", '{%- set label_words = {"negative": "bad", "positive": "good"} -%}{{ sentence }} is'
    )
    options = {"metadata": {"prompt": "films/column"}}
    with pytest.raises(PromptError, match=r"column\.jinja.*no column 'sentence'.*label, text"):
        natural(**options) if make is natural else probe({"prompt": True}, **options)


def test_a_template_that_shows_the_label(world: World) -> None:
    world.add_prompt(
        "films/leak", '{%- set label_words = {"negative": "bad", "positive": "good"} -%}{{ text }} {{ label }} is'
    )
    with pytest.raises(PromptError, match="shows the model the answer"):
        natural(metadata={"prompt": "films/leak"})


# ------------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (natural, "doc_to_text"),
        pytest.param(natural, "doc_to_target"),
        pytest.param(probe, "doc_to_text"),
        pytest.param(probe, "doc_to_target"),
    ],
)
def test_a_column_that_the_dataset_lacks(make: Make, key: str) -> None:
    with pytest.raises(ValueError, match=r"tests/films.*split 'test'.*no column 'sentence', found text, label"):
        make(**{key: "sentence"})


@EITHER
@pytest.mark.parametrize("hidden", [-1, None])
@pytest.mark.parametrize("share", ["all", "some", "last"])
def test_hidden_labels(make: Make, world: World, hidden: Any, share: str) -> None:
    rows = [
        {**row, "label": hidden if share == "all" or (share == "some" and i % 3 == 0) or i == 15 else row["label"]}
        for i, row in enumerate(world.splits["test"])
    ]
    name = world.add_dataset(f"tests/hidden_{hidden}_{share}", {"train": world.splits["train"], "test": rows})
    count = sum(row["label"] == hidden for row in rows)
    with pytest.raises(ValueError, match=rf"{name}, split 'test': {count} of 16 documents have no label.*eval_split"):
        make(dataset_path=name)


@EITHER
@pytest.mark.parametrize("labels", [[0, 1, 2], [2, 1, 0], ["negative", "neutral"], [0.0, 1.0], [[0], [1]]])
def test_labels_that_are_no_classes(make: Make, world: World, labels: list[Any]) -> None:
    rows = [{"text": f"film {i}", "label": label} for i, label in enumerate(labels)]
    name = world.add_dataset(f"tests/labels{re.sub(r'[^a-z0-9]+', '_', str(labels))}", {"train": rows, "test": rows})
    with pytest.raises(ValueError, match=rf"{name}.*'label' has .*expected 0 to 1 or one of 'negative', 'positive'"):
        make(dataset_path=name)


@EITHER
def test_a_split_that_does_not_exist(make: Make) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected validation\.jsonl.*found test\.jsonl, train\.jsonl"):
        make(metadata={"eval_split": "validation"})


@EITHER
def test_no_evaluated_split(make: Make) -> None:
    with pytest.raises(ValueError, match=r"films\.yaml.*needs `test_split:`"):
        make(test_split=None)


@EITHER
def test_a_split_without_documents(make: Make, world: World) -> None:
    name = world.add_dataset("tests/none", {"train": world.splits["train"]})
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.Value("int64")})
    empty = datasets.Dataset.from_dict({"text": [], "label": []}, features=features)
    empty.to_parquet(world.mirror / name / "test.parquet")
    with pytest.raises(ValueError, match=rf"{name}.*test.*no data"):
        make(dataset_path=name)


@pytest.mark.parametrize(
    ("make", "empty"),
    [
        (natural, ""),
        (natural, "  \n"),
        pytest.param(
            natural,
            None,
        ),
        (probe, ""),
        (probe, "  \n"),
        (probe, None),
    ],
)
@pytest.mark.parametrize("position", [0, 3])
def test_an_empty_evaluated_document(make: Make, world: World, untouchable: Any, empty: Any, position: int) -> None:
    rows = [dict(row) for row in world.splits["test"]]
    rows[position]["text"] = empty
    name = world.add_dataset(
        f"tests/empty_{len(str(empty))}_{position}", {"train": world.splits["train"], "test": rows}
    )
    with pytest.raises(ValueError, match=rf"{name}, split 'test', document {position}.*'text' is empty.*process_docs"):
        evaluate(untouchable, make(dataset_path=name))


@EITHER
def test_an_empty_document_among_chosen_ones(make: Make, world: World, untouchable: Any) -> None:
    rows = [dict(row) for row in world.splits["test"]]
    rows[7]["text"] = ""
    name = world.add_dataset("tests/empty_chosen", {"train": world.splits["train"], "test": rows})
    task = make(dataset_path=name)
    with pytest.raises(ValueError, match="split 'test', document 7"):
        evaluate(untouchable, task, samples={task.task_name: [9, 7, 2]})


def test_a_document_that_is_empty_beyond_the_limit_does_no_harm(world: World) -> None:
    rows = [*world.splits["test"][:3], {"text": "", "label": 0}]
    name = world.add_dataset("tests/empty_at_the_end", {"train": world.splits["train"], "test": rows})
    assert evaluate(hf_model(), natural(dataset_path=name), limit=3)["n-samples"]["natural_films"]["effective"] == 3


# ------------------------------------------------------------------------------------------------- probes


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"layers": 3}, "unknown option 'layers'. Did you mean 'layer'?.*Known: prompt, layer, pooling"),
        ({"zzz": 3}, "unknown option 'zzz'. Known"),
        ([], "expects a mapping"),
        ({"layer": "first"}, "layer is 'first'"),
        ({"layer": True}, "layer is True"),
        ({"pooling": "max"}, "pooling is 'max'"),
        ({"n_per_class": 4, "n_train": 8}, "exclude each other"),
        ({"n_per_class": 0}, "n_per_class is 0"),
        ({"n_train": "all"}, "n_train is 'all'"),
        ({"num_folds": 1}, "num_folds is 1"),
        ({"seeds": []}, "seeds is \\[\\]"),
        ({"seeds": [0, -1]}, "seeds is"),
        ({"seeds": [3, 3]}, "seeds is .*twice"),
        ({"c_grid": [1, 0]}, "c_grid is"),
        ({"c_grid": "1e-3"}, "c_grid is"),
        ({"prompt": 7}, "asked for its prompt, found 7"),
        pytest.param(
            {"c_grid": []},
            "c_grid is",
        ),
        pytest.param(
            {"c_grid": [float("inf")]},
            "c_grid is",
        ),
    ],
)
def test_an_option_of_the_probe(options: Any, problem: str) -> None:
    config = task_config("probe")
    config["metadata"]["probe"] = options
    with pytest.raises(ValueError, match=rf"probe_films.*{problem}"):
        ProbeTask(config=config)


def test_an_unknown_prompt_of_a_probe() -> None:
    with pytest.raises(KeyError, match=r"unknown prompt 'films/plian'.*films/plain"):
        probe({"prompt": "films/plian"})


def test_a_probe_needs_a_training_split() -> None:
    with pytest.raises(ValueError, match=r"probe_films\.yaml: a probe needs `training_split:`"):
        probe(training_split=None)


@pytest.mark.parametrize("change", [{"test_split": "train"}, {"metadata": {"eval_split": "train"}}])
def test_a_probe_is_not_evaluated_on_what_it_was_trained_on(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="split 'train' is both trained on and evaluated"):
        probe(**change)


@pytest.mark.parametrize(
    ("labels", "options", "problem"),
    [
        ([0] * 8, {}, "no training document of class 'positive' among 8"),
        ([1] * 8, {}, "no training document of class 'negative' among 8"),
        ([0] * 6 + [-1] * 2, {}, "'label' has -1"),
        ([0] * 4 + [7] * 4, {}, "'label' has 7"),
        ([0] * 7 + [1], {"n_per_class": 2}, "class 'positive' has 1 documents, n_per_class asks for 2.*at most 1"),
        ([0, 1] * 4, {"n_per_class": 5}, "has 4 documents, n_per_class asks for 5.*at most 4"),
        ([0, 1] * 4, {"n_train": 9}, "n_train is 9, expected 2 to 6, or 8"),
        ([0, 1] * 4, {"n_train": 1}, "n_train is 1, expected 2 to 6"),
    ],
)
def test_a_training_split_that_cannot_be_trained_on(
    world: World, untouchable: Any, labels: list[int], options: dict[str, Any], problem: str
) -> None:
    rows = [{"text": f"film {i}", "label": label} for i, label in enumerate(labels)]
    name = f"tests/train_{abs(hash((*labels, json.dumps(options))))}"
    world.add_dataset(name, {"train": rows, "test": world.splits["test"]})
    with pytest.raises(ValueError, match=rf"{name}.*{problem}"):
        evaluate(untouchable, natural(), probe(options, dataset_path=name))


def test_no_number_of_documents_draws_from_a_class_that_has_none(world: World, untouchable: Any) -> None:
    rows = [{"text": f"film {i}", "label": 0} for i in range(8)]
    name = world.add_dataset("tests/none_of_a_class", {"train": rows, "test": world.splits["test"]})
    with pytest.raises(ValueError, match="no training document of class 'positive' among 8"):
        evaluate(untouchable, probe({"n_per_class": 2}, dataset_path=name))


def test_a_class_with_one_training_document_cannot_be_drawn_from(world: World, untouchable: Any) -> None:
    rows = [{"text": f"film {i}", "label": int(i == 0)} for i in range(8)]
    name = world.add_dataset("tests/one_of_a_class", {"train": rows, "test": world.splits["test"]})
    with pytest.raises(ValueError, match=rf"{name}, split 'train'.*'positive'"):
        evaluate(untouchable, probe({"n_train": 4}, dataset_path=name))


@pytest.mark.parametrize("empty", ["", None])
def test_a_training_split_of_empty_documents(world: World, untouchable: Any, empty: Any) -> None:
    rows = [{"text": empty, "label": i % 2} for i in range(4)] + [{"text": " ", "label": 0}]
    name = world.add_dataset(f"tests/all_empty_{empty}", {"train": rows, "test": world.splits["test"]})
    with pytest.raises(ValueError, match=rf"{name}, split 'train': no document has a text"):
        evaluate(untouchable, probe(dataset_path=name))


@pytest.mark.parametrize("layer", [3, -4])
def test_a_layer_that_the_model_lacks(layer: int) -> None:
    with pytest.raises(ValueError, match=rf"layer {layer}: the model has hidden states 0 \(embedding\) to 2"):
        evaluate(hf_model(), probe({"layer": layer}))


# ------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("kind", ["natural", "probe"])
def test_weights_that_are_not_finite_name_a_prompt_and_the_layer(kind: str, world: World) -> None:
    lm = hf_model()
    lm.model.transformer.ln_f.bias.data[0] = float("nan")
    with pytest.raises(ValueError, match=r"(?s)The prompt .*not finite \(layer last.*finite") as caught:
        evaluate(lm, natural() if kind == "natural" else probe())
    texts = [row["text"] for split in world.splits.values() for row in split]
    assert any(text in str(caught.value) for text in texts)


def test_every_class_takes_a_config_keyword() -> None:
    """lm_eval's factory passes the config to classes whose constructor has a parameter of this name only."""
    for task_class in (NaturalTask, ProbeTask):
        assert "config" in inspect.signature(task_class.__init__).parameters
