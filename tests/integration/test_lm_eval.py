"""lm_eval's command line on a model folder, a mirror of every shipped dataset, and the shipped YAMLs and prompts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval.__main__ import cli_evaluate
from lm_eval.tasks import TaskManager
from tiny import tiny_model, tiny_tokenizer
from worlds import DATASET, World, a_world, metric_list, reviews, task_config, write_split

from harness_ext import __version__, plugin, resources, scaffold
from harness_ext.cli.evaluation import link_data
from harness_ext.engine.attach import REQUEST_TYPE
from harness_ext.lab.checkpoints import find_checkpoints
from harness_ext.lab.model import ModelConfig
from harness_ext.lab.run import Plan, Run, prepare, train_run
from harness_ext.lab.train import TrainConfig
from harness_ext.prompts import find_prompts, load_prompt
from harness_ext.tasks.data import DATA_VARIABLE
from harness_ext.tasks.metrics import FLATNESS

REAL_DATA = os.environ.get(DATA_VARIABLE)
"""Read before any world sets it."""

SHIPPED = {
    name: config
    for name, config in scaffold.read_datasets(resources.task_configs_folder()).items()
    # Datasets of the lab say their classes themselves, and come with their models.
    if config.classes
}
EVALUATORS = scaffold.evaluator_names(resources.task_configs_folder())
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
    samples = {
        path.name.removeprefix("samples_").rpartition("_")[0]: [
            strict_json(line) for line in path.read_text().splitlines()
        ]
        for path in folder.rglob("samples_*.jsonl")
    }
    for of_task in samples.values():
        of_task.sort(key=lambda sample: sample["doc_id"])
    return Output(strict_json(results.read_text()), samples)


def strict_json(text: str) -> Any:
    """Read JSON that has none of Python's additions NaN, Infinity and -Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def report_of(output: Output, task: str) -> dict[str, Any]:
    """What a task says about its run."""
    return output.results["configs"][task]["metadata"]["report"]


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


PROBE_METRICS = {"acc", "balanced_acc", "macro_f1", "ece", "majority_rate"}
NATURAL_METRICS = PROBE_METRICS | {"acc_pmi", "acc_batch", "acc_context", "brier"}


def metrics_of(output: Output, task: str) -> dict[str, Any]:
    """{metric: value} of a task, without standard errors."""
    return {
        name.removesuffix(",none"): value
        for name, value in output.results["results"][task].items()
        if name.endswith(",none") and not name.endswith("_stderr,none")
    }


def test_a_sweep_and_probes_from_the_command_line(world: World, tmp_path: Path) -> None:
    """In a process of its own, with lm_eval's tasks around ours and no --include_path."""
    code = "from harness_ext import plugin; plugin.install()\nfrom lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    tasks = "natural_sst,probe_cmean_sst,quad_sst,probe_agnews"
    done = subprocess.run(
        [
            *(sys.executable, "-c", code),
            *map(str, arguments(world.folder / "models" / "gpt2", tasks, tmp_path)),
            *("--metadata", json.dumps({"prompt": "sst/*"})),
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
    for row in (*tasks.split(","), "acc_pmi", "acc_context", "macro_f1", "ece", "acc_worst", "acc@it_was"):
        assert row in done.stdout
    assert "distinct" in done.stderr
    assert "One pass" in done.stderr
    output = read_output(tmp_path)
    assert {name: len(rows) for name, rows in output.samples.items()} == dict.fromkeys(tasks.split(","), 6)

    prompts = find_prompts("sst/*")
    names = [prompt.rpartition("/")[2] for prompt in prompts]
    of_prompts = {f"acc@{name}" for name in names}
    swept = metrics_of(output, "natural_sst")
    assert swept.keys() == NATURAL_METRICS | of_prompts | {"acc_worst", "acc_best", "acc_ensemble", "acc_mixture"}
    accuracies = [swept[name] for name in of_prompts]
    assert [swept["acc_worst"], swept["acc_best"]] == [min(accuracies), max(accuracies)]
    assert swept["acc"] == pytest.approx(sum(accuracies) / len(names))
    described = report_of(output, "natural_sst")["prompts"]
    assert [entry["metrics"]["acc"] for entry in described] == [swept[f"acc@{name}"] for name in names]
    for task, features in (("probe_cmean_sst", "conditional_mean"), ("quad_sst", "quad"), ("probe_agnews", "f")):
        assert metrics_of(output, task).keys() == PROBE_METRICS
        assert report_of(output, task)["features"] == features

    engine = output.results["harness_ext"]
    assert engine["version"] == __version__
    (passed,) = engine["passes"]
    texts = {load_prompt(prompt).render({"text": "fine ."}).text for prompt in prompts}
    # Each text around the test documents, around nothing and around two documents that say nothing; then the bare
    # documents of both splits, which are the same for all three probes here.
    assert passed["distinct_prompts"] == (6 + 1 + 2) * len(texts) + 6 + 18
    assert passed["forwarded"] == passed["distinct_prompts"] + passed["word_continuations"]
    assert passed["tokens"] < passed["separate_tokens"]
    assert len(passed["model_fingerprint"]) == 32
    assert list((tmp_path / "states").rglob("*.safetensors"))


# ------------------------------------------------------------------------------------------------- every shipped task


def test_every_shipped_task_runs_and_a_second_run_forwards_nothing(
    world: World, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(tmp_path / "states"))
    outputs = []
    # The second run leaves out evaluators whose fits would only take their time again, but none that asks for words.
    again = ("natural", "probe_words", "probe_subset", "quad", "demo")
    for name, asked in (("first", (*EVALUATORS, "demo")), ("second", again)):
        command(*arguments(world.folder / "models" / "gpt2", ",".join(asked), tmp_path / name))
        outputs.append(read_output(tmp_path / name))
    first, second = outputs
    assert sorted(first.results["results"]) == sorted(first.samples) == TASKS
    for task in TASKS:
        config = SHIPPED[task.rpartition("_")[2]]
        found = first.results["results"][task]
        told = report_of(first, task)
        assert 0 <= found["acc,none"] <= 1
        assert 0 <= found["macro_f1,none"] <= 1
        assert found["sample_len"] == told["documents"] == 6
        assert told["data"].endswith(config.dataset_path)
        assert [s["target"] for s in first.samples[task]] == [str(i % len(config.classes)) for i in range(6)]
        if task.startswith("natural"):
            assert told["prompts"][0]["id"] == config.prompt
            assert metrics_of(first, task).keys() == NATURAL_METRICS
        else:
            assert told["training_documents"] == [18]
            (probe,) = told["prompts"][0]["probes"]
            assert probe["C"] in probe["c_grid"]
            assert metrics_of(first, task).keys() == PROBE_METRICS
    (passed,) = first.results["harness_ext"]["passes"]
    assert passed["forwarded"] > 0
    (passed_again,) = second.results["harness_ext"]["passes"]
    assert (passed_again["forwarded"], passed_again["tokens"]) == (0, 0)
    assert passed_again["from_store"] == passed["forwarded"]
    assert len(second.results["results"]) == 4 * (len(SHIPPED) - 1) + len(EVALUATORS)
    for task in second.results["results"]:
        # States from the store are read out in other batches, and log-probabilities rounded to float32 otherwise.
        for name, value in first.results["results"][task].items():
            expected = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert second.results["results"][task][name] == expected
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
    assert [entry["id"] for entry in report_of(natural, "natural_sst")["prompts"]] == ["sst/it_was"]
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


def test_loss_and_flatness_of_wikitext(world: World, tmp_path: Path, command: Any) -> None:
    rows = [{"text": f" the film number {number} is good , over and over again . "} for number in range(60)]
    write_split(world.mirror / "Salesforce" / "wikitext", "test", rows)
    options = {"block_tokens": 16, "flatness": {"max_blocks": 3, "lambda_blocks": 2, "include": ["*h.1*"]}}
    command(
        *arguments(world.folder / "models" / "gpt2", "loss_wikitext,flatness_wikitext", tmp_path / "out"),
        *("--metadata", json.dumps(options), "--limit", 3),
    )
    output = read_output(tmp_path / "out")
    loss, flatness = metrics_of(output, "loss_wikitext"), metrics_of(output, "flatness_wikitext")
    assert loss.keys() == {"loss", "bits_per_byte"}
    assert flatness.keys() == set(FLATNESS) - {"ggn_trace", "ggn_trace_scaled"}
    assert flatness["loss"] == pytest.approx(loss["loss"], rel=1e-5)
    assert flatness["bits_per_byte"] == pytest.approx(loss["bits_per_byte"], rel=1e-5)
    told = report_of(output, "flatness_wikitext")
    assert told["window_flatness"]["blocks"] == 3
    assert told["text_sha256"] == report_of(output, "loss_wikitext")["text_sha256"]
    assert output.results["configs"]["flatness_wikitext"]["metadata"]["flatness"]["max_blocks"] == 3
    for name in ("fisher_trace", "hessian_trace", "hessian_over_fisher", "lambda_max", "loss"):
        assert output.results["results"]["flatness_wikitext"][f"{name}_stderr,none"] > 0


def test_the_loss_of_a_labs_text_is_the_one_its_checkpoint_has(tmp_path: Path, command: Any) -> None:
    model = ModelConfig(width=16, depth=1, heads=2)
    run = Run("adamw", model, TrainConfig(steps=10, batch_size=4))
    plan = Plan("tiny", "reviews", (run,), documents=200, block_size=64, num_train_per_class=10, num_test=20)
    plan = replace(plan, num_validation=50, evaluate_every=10)
    prepare(tmp_path / "lab", plan)
    train_run(tmp_path / "lab", run)
    [checkpoint] = find_checkpoints(tmp_path / "lab")
    link_data(tmp_path / "lab" / "data", checkpoint.folder / "data")
    command(*arguments(checkpoint.folder, "loss_demo", tmp_path / "out"))
    output = read_output(tmp_path / "out")
    assert metrics_of(output, "loss_demo")["loss"] == pytest.approx(checkpoint.validation_loss.value, rel=1e-5)
    assert report_of(output, "loss_demo")["num_texts"] == 50


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
    # The prompt of each document, and those without one or with two that say nothing, which the first asks for.
    assert [instance.idx for instance in natural] == [0, 1, 2, 3, 0, 0, 0, 0]
    assert sorted(i.doc_id >= 0 for i in probe) == [False] * 2 * len(SHIPPED[dataset].classes) + [True] * 5
    for instance in (instance for instance in natural if instance.idx == 0):
        start, end = instance.args[1]["document"]
        assert instance.args[0][start:end].strip() == instance.doc[SHIPPED[dataset].text_column].strip()
