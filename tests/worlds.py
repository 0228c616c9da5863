"""A small world for tests of whole tasks: a dataset of reviews in a mirror folder, prompts, a tiny model, task configs."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest
import threadpoolctl
import torch
from lm_eval import evaluator
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tiny import tiny_model, tiny_tokenizer

from harness_ext.engine.store import cache_root
from harness_ext.prompts import PROMPTS_VARIABLE
from harness_ext.tasks import (
    ClassWordsProbe,
    ConditionalMeanProbe,
    LossTask,
    NaturalTask,
    ProbabilitiesProbe,
    ProbeTask,
    QuadProbe,
    RandomProjectionProbe,
    SubsetWordsProbe,
)
from harness_ext.tasks.data import DATA_VARIABLE

DATASET = "tests/films"
CLASSES = ("negative", "positive")
CUES = (("bad", "dull", "awful"), ("good", "great", "fine"))
FILLERS = ("the film", "a story", "this movie", "and the end", "of it all", "with the music", "is", "in parts")

# {prompt id: template}; the words of `several` are one to three tokens under the tiny tokenizer.
PROMPTS = {
    "films/plain": '{%- set label_words = {"negative": "terrible", "positive": "great"} -%}\n{{ text }} This movie is',
    "films/several": (
        '{%- set label_words = {"negative": ["bad", "terrible"], "positive": ["good", "fine"]} -%}\n'
        "Review: {{ text }} It was"
    ),
    "films/wordless": "{{ text }} In short",
}


FEATURE_PROBES: dict[str, type[ProbeTask]] = {
    "probe": ProbeTask,
    "probe_cmean": ConditionalMeanProbe,
    "probe_words": ClassWordsProbe,
    "probe_subset": SubsetWordsProbe,
    "probe_full": ProbabilitiesProbe,
    "probe_random": RandomProjectionProbe,
    "quad": QuadProbe,
}
"""Task classes by the first part of the names of their tasks."""


def reviews(count: int, *, seed: int = 0, noise: float = 0.0, classes: int = 2) -> list[dict[str, Any]]:
    """Distinct documents of balanced classes; `noise` is the share of labels that say nothing of the text."""
    rng = random.Random(seed)
    texts: dict[str, int] = {}
    while len(texts) < count:
        label = len(texts) % classes
        words = [rng.choice(FILLERS) for _ in range(rng.randint(1, 4))]
        words.insert(rng.randint(0, len(words)), rng.choice(CUES[label % 2]) + ("" if label < 2 else " too"))
        texts.setdefault(" ".join(words), label)
    return [
        {"text": text, "label": rng.randrange(classes) if rng.random() < noise else label}
        for text, label in texts.items()
    ]


def write_split(folder: Path, split: str, rows: Sequence[Mapping[str, Any]], *, suffix: str = ".jsonl") -> Path:
    """Write one file of a mirror."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}{suffix}"
    if suffix == ".parquet":
        datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@dataclass(frozen=True)
class World:
    """Folders that the environment points to, and the splits of `DATASET`."""

    folder: Path
    splits: Mapping[str, list[dict[str, Any]]]

    @property
    def mirror(self) -> Path:
        return self.folder / "data"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def add_dataset(self, name: str, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
        """Write another dataset to the mirror; returns its path for a config."""
        for split, rows in splits.items():
            write_split(self.mirror / name, split, rows)
        return name

    def add_prompt(self, prompt_id: str, source: str) -> str:
        path = self.folder / "prompts" / f"{prompt_id}.jinja"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return prompt_id


@contextlib.contextmanager
def a_world(folder: Path, *, train: int = 40, test: int = 16) -> Iterator[World]:
    """Make a world in `folder`, without network, feature store and lm_eval's slow report on the machine."""
    rows = reviews(train + test)
    world = World(folder, {"train": rows[:train], "test": rows[train:]})
    world.add_dataset(DATASET, world.splits)
    for prompt_id, source in PROMPTS.items():
        world.add_prompt(prompt_id, source)
    threads = torch.get_num_threads()
    # Two threads on matrices of this size only wait for each other, three times as long where the cores are busy.
    with threadpoolctl.threadpool_limits(1), pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATA_VARIABLE, str(world.mirror))
        patch.setenv(PROMPTS_VARIABLE, str(folder / "prompts"))
        patch.setenv("HARNESS_EXT_CACHE", "off")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(evaluator, "add_env_info", lambda results: None)
        assert cache_root() is None
        torch.set_num_threads(1)
        yield world
        torch.set_num_threads(threads)


def task_config(kind: str, **changes: Any) -> dict[str, Any]:
    """The config of `natural_films`, `probe_films`, …, as lm_eval's factory passes it; `metadata` is merged."""
    metadata = {"version": 1.0, "prompt": "films/plain", "config_source": f"{kind}_films.yaml"}
    metadata |= changes.pop("metadata", {})
    if kind != "natural":
        metadata["probe"] = {"c_grid": [0.01, 1.0], "num_folds": 3, **metadata.get("probe", {})}
    return {
        "task": f"{kind}_films",
        "output_type": "multiple_choice",
        "dataset_path": DATASET,
        "training_split": "train",
        "test_split": "test",
        "fewshot_split": "train",
        "doc_to_text": "text",
        "doc_to_target": "label",
        "doc_to_choice": list(CLASSES),
        "metric_list": metric_list(*(NATURAL_METRICS if kind == "natural" else ("acc", "macro_f1"))),
        **({} if kind == "natural" else {"num_fewshot": 0}),
        **changes,
        "metadata": metadata,
    }


NATURAL_METRICS = ("acc", "acc_pmi", "acc_batch", "macro_f1", "brier")


def metric_list(*names: str) -> list[dict[str, Any]]:
    """Entries as the shipped YAMLs write them."""
    aggregations = {name: name for name in ("macro_f1", "balanced_acc", "ece", "majority_rate", "f1", "brier_score")}
    aggregations["mcc"] = "matthews_corrcoef"
    return [
        {
            "metric": name,
            "aggregation": aggregations.get(name, "mean"),
            "higher_is_better": not name.startswith(("brier", "ece")),
        }
        for name in names
    ]


def natural(**changes: Any) -> NaturalTask:
    return NaturalTask(config=task_config("natural", **changes))


def probe(options: Mapping[str, Any] | None = None, **changes: Any) -> ProbeTask:
    """`options` are those of `metadata: {probe: …}`."""
    return feature_probe("probe", options, **changes)


def feature_probe(kind: str, options: Mapping[str, Any] | None = None, **changes: Any) -> ProbeTask:
    """A task of `FEATURE_PROBES` by its kind; `options` are those of `metadata: {probe: …}`."""
    metadata = {**changes.pop("metadata", {}), **({} if options is None else {"probe": dict(options)})}
    return FEATURE_PROBES[kind](config=task_config(kind, metadata=metadata, **changes))


def corpus_config(kind: str, **changes: Any) -> dict[str, Any]:
    """The config of `loss_lines` or `flatness_lines`, on the dataset `tests/lines` of one column; `metadata` is merged."""
    metadata = {"version": 1.0, "block_tokens": 24, "corpus": {"join": "\n"}} | changes.pop("metadata", {})
    return {
        "task": f"{kind}_lines",
        "output_type": "loglikelihood_rolling",
        "dataset_path": "tests/lines",
        "test_split": "test",
        "doc_to_text": "text",
        "num_fewshot": 0,
        **changes,
        "metadata": metadata,
    }


def loss_task(**changes: Any) -> LossTask:
    return LossTask(config=corpus_config("loss", **changes))


def stock_task(world: World, **changes: Any) -> ConfigurableTask:
    """lm_eval's own multiple_choice task, `stock`, with the documents, the prompt and the words of `films/plain`."""
    files = {split: str(world.mirror / DATASET / f"{split}.jsonl") for split in world.splits}
    config = {
        **task_config("natural", metric_list=metric_list("acc")),
        "task": "stock",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "doc_to_text": "{{ text }} This movie is",
        "doc_to_choice": ["terrible", "great"],
        **changes,
    }
    return ConfigurableTask(config=config)


def hf_model(model: Any = None, tokenizer: Any = None, **kwargs: Any) -> HFLM:
    """`--model hf` around a tiny model, GPT-2 unless told otherwise."""
    return HFLM(
        pretrained=tiny_model("gpt2") if model is None else model,
        tokenizer=tiny_tokenizer() if tokenizer is None else tokenizer,
        **{"batch_size": 8, **kwargs},
    )


@functools.cache
def _task_manager() -> TaskManager:
    return TaskManager(include_defaults=False)  # with lm_eval's own tasks it takes seconds


def evaluate(lm: Any, *tasks: Any, **kwargs: Any) -> dict[str, Any]:
    """lm_eval's `simple_evaluate` on task objects, without its bootstrap of 100,000 draws."""
    options = {"task_manager": _task_manager(), "bootstrap_iters": 10, **kwargs}
    results = evaluator.simple_evaluate(lm, tasks=list(tasks), **options)
    assert results is not None
    return results


def report(results: Mapping[str, Any], task: str) -> dict[str, Any]:
    """What a task says about its run in the results JSON."""
    return results["configs"][task]["metadata"]["report"]


def samples(results: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
