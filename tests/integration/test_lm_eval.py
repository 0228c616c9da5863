"""lm_eval's command line on a model folder, a mirror of every shipped dataset, and the shipped YAMLs and prompts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
from tiny import tiny_model, tiny_tokenizer
from worlds import DATASET, World, a_world, metric_list, reviews, task_config, write_split

from harness_ext import __version__, plugin, resources, scaffold
from harness_ext.engine.attach import REQUEST_TYPE
from harness_ext.tasks.data import DATA_VARIABLE

REAL_DATA = os.environ.get(DATA_VARIABLE)
"""Read before any world sets it."""

SHIPPED = scaffold.read_datasets(resources.task_configs_folder())
TASKS = sorted(task for config in SHIPPED.values() for task in config.tasks)


def save_model(folder: Path, family: str, **kwargs: Any) -> Path:
    tiny_model(family, **kwargs).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def rows_for(config: scaffold.DatasetConfig, count: int, *, seed: int) -> list[dict[str, Any]]:
    """Documents of a shipped dataset, its classes in turn; labels are names for TREC and numbers elsewhere."""
    named = config.name == "trec"
    return [
        {
            config.text_column: f"{row['text']} {i}",
            config.label_column: config.classes[i % len(config.classes)] if named else i % len(config.classes),
        }
        for i, row in enumerate(reviews(count, seed=seed))
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A mirror of every dataset, 18 training and 6 test documents each, and models under `models/`."""
    with a_world(tmp_path_factory.mktemp("world")) as made:
        save_model(made.folder / "models" / "gpt2", "gpt2")
        for config in SHIPPED.values():
            own = config.dataset_path.startswith("harness_ext/")
            folder = made.folder / "models" / "gpt2" / "data" if own else made.mirror
            for split, count, seed in (("train", 18, 0), ("test", 6, 1)):
                write_split(folder / config.dataset_path, split, rows_for(config, count, seed=seed))
        yield made


@dataclass(frozen=True)
class Output:
    """What one run wrote."""

    results: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]]


def read_output(folder: Path) -> Output:
    (results,) = folder.rglob("results_*.json")
    text = results.read_text()
    assert "NaN" not in text
    samples = {
        path.name.removeprefix("samples_").rpartition("_")[0]: [
            json.loads(line) for line in path.read_text().splitlines()
        ]
        for path in folder.rglob("samples_*.jsonl")
    }
    for of_task in samples.values():
        of_task.sort(key=lambda sample: sample["doc_id"])
    return Output(json.loads(text), samples)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`lm_eval …` in this process, without the seconds that scanning lm_eval's own tasks takes."""
    plugin.install()
    scan = TaskManager.__init__

    def scan_without_defaults(self: TaskManager, *args: Any, **kwargs: Any) -> None:
        scan(self, *args, **{**kwargs, "include_defaults": False})

    monkeypatch.setattr(TaskManager, "__init__", scan_without_defaults)

    def run(*arguments: Any) -> None:
        monkeypatch.setattr(sys, "argv", ["lm_eval", *map(str, arguments)])
        cli_evaluate()

    return run


def arguments(model: Path, tasks: str, output: Path, *more: str) -> list[Any]:
    return [
        *("run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu"),
        *("--batch_size", 8, "--tasks", tasks, "--output_path", output, "--log_samples", *more),
    ]


# ------------------------------------------------------------------------------------------------- one whole run


def test_the_command_of_the_readme(world: World, tmp_path: Path) -> None:
    """In a process of its own, with lm_eval's tasks around ours and no --include_path."""
    code = "from harness_ext import plugin; plugin.install()\nfrom lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    done = subprocess.run(
        [
            *(sys.executable, "-c", code),
            *map(str, arguments(world.folder / "models" / "gpt2", "natural_sst,probe_agnews", tmp_path)),
        ],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
            "HARNESS_EXT_CACHE": str(tmp_path / "states"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for row in ("natural_sst", "probe_agnews", "acc_pmi", "acc_batch", "macro_f1", "brier"):
        assert row in done.stdout
    assert "distinct" in done.stderr
    assert "One pass" in done.stderr
    output = read_output(tmp_path)
    assert set(output.results["results"]) == {"natural_sst", "probe_agnews"}
    assert {name: len(rows) for name, rows in output.samples.items()} == {"natural_sst": 6, "probe_agnews": 6}
    engine = output.results["harness_ext"]
    assert engine["version"] == __version__
    assert engine["passes"][0]["forwarded"] == engine["passes"][0]["distinct_prompts"] == 6 + 1 + 6 + 18
    assert len(engine["passes"][0]["model_fingerprint"]) == 32
    assert list((tmp_path / "states").rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------------- every shipped task


def test_every_shipped_task_runs_and_a_second_run_forwards_nothing(
    world: World, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "states"))
    outputs = []
    for name in ("first", "second"):
        command(*arguments(world.folder / "models" / "gpt2", "natural,probe,demo", tmp_path / name))
        outputs.append(read_output(tmp_path / name))
    first, second = outputs
    assert sorted(first.results["results"]) == sorted(first.samples) == TASKS
    for task in TASKS:
        config = SHIPPED[task.partition("_")[2]]
        found = first.results["results"][task]
        told = first.results["configs"][task]["metadata"]["report"]
        assert 0 <= found["acc,none"] <= 1
        assert 0 <= found["macro_f1,none"] <= 1
        assert found["sample_len"] == told["documents"] == 6
        assert told["data"].endswith(config.dataset_path)
        assert [s["target"] for s in first.samples[task]] == [str(i % len(config.classes)) for i in range(6)]
        if task.startswith("natural"):
            assert told["prompt"]["id"] == config.prompt
        else:
            assert told["training_documents"] == [18]
            assert told["probes"][0]["C"] in told["probes"][0]["c_grid"]
    (passed,) = first.results["harness_ext"]["passes"]
    assert passed["forwarded"] > 0
    (again,) = second.results["harness_ext"]["passes"]
    assert (again["forwarded"], again["tokens"], again["from_store"]) == (0, 0, passed["forwarded"])
    assert second.results["results"] == first.results["results"]
    for task in TASKS:
        assert [s["resps"] for s in second.samples[task]] == [s["resps"] for s in first.samples[task]]


def test_options_of_one_run_come_by_metadata(world: World, tmp_path: Path, command: Any) -> None:
    options = {
        "prompt": {"natural_sst": "sst/it_was"},
        "probe": {"n_per_class": 4, "seeds": [0, 1], "layer": 1, "c_grid": [0.1]},
        "eval_split": "train",
    }
    command(
        *arguments(world.folder / "models" / "gpt2", "natural_sst", tmp_path / "natural"),
        *("--metadata", json.dumps(options), "--num_fewshot", "1", "--limit", "4"),
    )
    del options["eval_split"]
    command(
        *arguments(world.folder / "models" / "gpt2", "probe_sst", tmp_path / "probe"),
        *("--metadata", json.dumps(options), "--predict_only"),
    )
    natural, probe = (read_output(tmp_path / name) for name in ("natural", "probe"))
    config = natural.results["configs"]["natural_sst"]
    assert config["metadata"]["report"]["prompt"]["id"] == "sst/it_was"
    assert config["test_split"] == "train"
    assert natural.results["n-shot"]["natural_sst"] == 1
    assert len(natural.samples["natural_sst"]) == 4
    assert "acc,none" not in probe.results["results"]["probe_sst"]
    assert len(probe.samples["probe_sst"]) == 6


def test_a_prompt_for_one_task_leaves_the_others_theirs(world: World) -> None:
    manager = TaskManager(include_defaults=False, metadata={"prompt": {"natural_sst": "sst/it_was"}})
    tasks = manager.load(["natural_sst", "natural_cr"])["tasks"]
    assert {name: task.template.id for name, task in tasks.items()} == {
        "natural_sst": "sst/it_was",
        "natural_cr": SHIPPED["cr"].prompt,
    }


def test_lm_eval_lists_and_validates_our_tasks(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command("ls", "tasks")
    listed = re.findall(r"^\|\s*(\w+)\s*\|", capsys.readouterr().out, flags=re.MULTILINE)
    assert set(TASKS) <= set(listed)
    command("validate", "--tasks", ",".join(TASKS))
    assert "All tasks found and valid" in capsys.readouterr().out


def test_a_wrong_prompt_ends_the_run_before_the_documents(world: World, tmp_path: Path, command: Any) -> None:
    with pytest.raises(KeyError, match=r"unknown prompt 'sst/it_wos'.*sst/it_was"):
        command(
            *arguments(world.folder / "models" / "gpt2", "natural_sst", tmp_path),
            *("--metadata", '{"prompt": "sst/it_wos"}'),
        )
    assert not list(tmp_path.rglob("results_*.json"))


# ------------------------------------------------------------------------------------------------- agreement with lm_eval


def yaml_of(config: dict[str, Any]) -> str:
    """A config as YAML, which contains JSON; the class is a tag that JSON has not."""
    name = config.pop("class", None)
    head = "" if name is None else f"class: !function harness_ext.tasks.{name}\n"
    return head + "".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items())


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
@pytest.mark.parametrize("words", [["bad", "good"], ["terrible", "outstanding work"]])
def test_log_probabilities_are_those_of_lm_evals_multiple_choice(
    world: World, tmp_path: Path, command: Any, family: str, words: list[str]
) -> None:
    """Words of one and of several tokens, fp32, lm_eval's own task beside ours in one run."""
    model = world.folder / "models" / family
    if not model.exists():
        save_model(model, family)
    label_words = json.dumps({"negative": words[0], "positive": words[1]})
    world.add_prompt("films/agree", f"{{%- set label_words = {label_words} -%}}{{{{ text }}}} This movie is")
    ours = task_config("natural", metadata={"prompt": "films/agree"}) | {"class": "NaturalTask"}
    stock = task_config("natural", metric_list=metric_list("acc")) | {
        "task": "stock_films",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {s: str(world.mirror / DATASET / f"{s}.jsonl") for s in ("train", "test")}},
        "doc_to_text": "{{ text }} This movie is",
        "doc_to_choice": words,
    }
    (tmp_path / "yaml").mkdir()
    for config in (ours, stock):
        (tmp_path / "yaml" / f"{config['task']}.yaml").write_text(yaml_of(config))
    command(*arguments(model, "natural_films,stock_films", tmp_path / "out", "--include_path", str(tmp_path / "yaml")))
    output = read_output(tmp_path / "out")
    assert len(output.samples["natural_films"]) == len(output.samples["stock_films"]) == 16
    for own, other in zip(output.samples["natural_films"], output.samples["stock_films"], strict=True):
        found = json.loads(own["resps"][0][0])["log_probs"]
        assert found == pytest.approx([float(answers[0][0]) for answers in other["resps"]], abs=1e-4)
        assert own["acc"] == other["acc"]
    results = output.results["results"]
    assert results["natural_films"]["acc,none"] == results["stock_films"]["acc,none"]


# ------------------------------------------------------------------------------------------------- the real data


@pytest.mark.parametrize("dataset", [name for name in SHIPPED if name != "demo"])
def test_shipped_tasks_make_requests_of_the_real_data(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = SHIPPED[dataset].dataset_path
    if not REAL_DATA or not (Path(REAL_DATA) / path).is_dir():
        pytest.skip(f"{DATA_VARIABLE} names no folder with {path}")
    monkeypatch.setenv(DATA_VARIABLE, REAL_DATA)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    plugin.install()
    manager = TaskManager(include_defaults=False, metadata={"probe": {"n_per_class": 2}})
    tasks = manager.load([f"natural_{dataset}", f"probe_{dataset}"])["tasks"]
    for task in tasks.values():
        task.build_all_requests(limit=5)
        assert {instance.request_type for instance in task.instances} == {REQUEST_TYPE}
    natural, probe = (tasks[f"{kind}_{dataset}"].instances for kind in ("natural", "probe"))
    assert len(natural) == 2 * 5
    assert sorted(i.doc_id >= 0 for i in probe) == [False] * 2 * len(SHIPPED[dataset].classes) + [True] * 5
    for instance in natural[::2]:
        start, end = instance.args[1]["document"]
        assert instance.args[0][start:end].strip() == instance.doc[SHIPPED[dataset].text_column].strip()
