"""Everything of a language that tasks of lm_eval read, as the `data/` of a model's folder, and the truth about it.

data/harness_ext/<task>/{train,test}.jsonl     columns text, label, label_text
data/harness_ext/<kind>_text/test.jsonl        column text, held-out documents
data/prompts/<task>/next_word.jinja            the label words of the natural task
data/truth.json                                what the best classifier and the exact language model reach
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness_ext.lab.languages.base import (
    Example,
    Language,
    Task,
    bayes_accuracy,
    optimal_cross_entropy,
    write_dataset,
    write_text,
)
from harness_ext.lab.languages.label_words import best_label_words, natural_ceiling

__all__ = ["PROMPT_NAME", "write_language_data"]

PROMPT_NAME = "next_word"
"""Name of the prompt of each task, whose id is `<task>/next_word`."""

SCHEMA_VERSION = 1

_WORDS_PER_CLASS = 5
_PATIENCE = 50
"""Training documents are drawn until every class has its share, but at most this many for each that is wanted."""


def write_language_data(
    folder: Path,
    language: Language,
    *,
    num_train_per_class: int,
    num_test: int,
    num_validation: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Write `<folder>/data` for all tasks of a language; it appears whole or not at all.

    Test documents are drawn from the language. Training documents have as many of each class, as far as a class is frequent
    enough, and are never documents of the test set. The same language, numbers and state of `rng` give the same bytes.

    A task that cannot be trained on, since a class has fewer than two documents, is left out; `truth.json` says so.

    Args:
        folder: Of a model, or of a family of models.
        num_train_per_class: Most training documents of each class, at least 2.
        num_test: Of each task, at least 1.
        num_validation: Documents of held-out text, at least 2.
        rng: Draws everything.

    Returns:
        What `truth.json` holds: schema_version; `entropy` {value, stderr}, the cross-entropy of p* on the held-out text in nats
        per token; `tasks`, for each task {classes, bayes_accuracy {accuracy, expected}, natural_ceiling, majority, num_train,
        num_test}, all accuracies on the test set; and `left_out`, the reason for each task that is.

    Raises:
        FileExistsError: If there is a `<folder>/data` already.
        ValueError: If a number is out of its range.
    """
    for name, value, low in (
        ("num_train_per_class", num_train_per_class, 2),
        ("num_test", num_test, 1),
        ("num_validation", num_validation, 2),
    ):
        if value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")
    target = folder / "data"
    if target.exists():
        raise FileExistsError(f"{target} exists already. Remove it, or name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".data.{os.getpid()}.partial"
    try:
        truth = _write(partial, language, num_train_per_class, num_test, num_validation, rng)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return truth


def _write(
    folder: Path, language: Language, num_per_class: int, num_test: int, num_validation: int, rng: np.random.Generator
) -> dict[str, Any]:
    # One stream for each use, so that a task's data do not depend on the sizes of the others.
    text_rng, *task_rngs = rng.spawn(1 + len(language.tasks))
    held_out = language.sample(num_validation, text_rng)
    write_text(folder, language, held_out)
    tasks, left_out = {}, {}
    for task, task_rng in zip(language.tasks, task_rngs, strict=True):
        test_rng, train_rng, words_rng = task_rng.spawn(3)
        test = task.sample(num_test, test_rng)
        train = _training_examples(task, num_per_class, {example.words for example in test}, train_rng)
        counts = np.bincount([example.label for example in train], minlength=len(task.classes))
        if counts.min() < 2:
            rarest = task.classes[int(counts.argmin())]
            left_out[task.name] = f"class {rarest!r} has {counts.min()} training documents that are not in the test set"
            continue
        write_dataset(folder, task, {"train": train, "test": test})
        per_class = min(_WORDS_PER_CLASS, len(language.words) // len(task.classes))
        if per_class:
            words = best_label_words(language, task, per_class=per_class, rng=words_rng)
            _write_prompt(folder / "prompts" / task.name, task, words)
        tasks[task.name] = {
            "classes": list(task.classes),
            "bayes_accuracy": asdict(bayes_accuracy(task, test)),
            # More classes than words have no natural task.
            "natural_ceiling": natural_ceiling(language, task, words, test) if per_class else None,
            "majority": float(np.bincount([example.label for example in test]).max() / num_test),
            "num_train": len(train),
            "num_test": num_test,
        }
    truth = {
        "schema_version": SCHEMA_VERSION,
        "entropy": asdict(optimal_cross_entropy(language, held_out)),
        "tasks": tasks,
        "left_out": left_out,
    }
    (folder / "truth.json").write_text(json.dumps(truth, indent=2) + "\n", encoding="utf-8")
    return truth


def _training_examples(
    task: Task, num_per_class: int, without: set[tuple[str, ...]], rng: np.random.Generator
) -> list[Example]:
    """Draw up to a number of examples of each class whose documents are not in `without`.

    Leaving out documents, whatever their class, and choosing among the others by their class alone leaves p(document | class)
    of the others as it is.
    """
    num_classes = len(task.classes)
    wanted = num_classes * num_per_class
    kept: list[Example] = []
    counts = [0] * num_classes
    for _ in range(_PATIENCE):
        for example in task.sample(wanted, rng):
            if counts[example.label] < num_per_class and example.words not in without:
                counts[example.label] += 1
                kept.append(example)
        if len(kept) == wanted:
            break
    return kept


def _write_prompt(folder: Path, task: Task, words: dict[str, tuple[str, ...]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    label_words: dict[str, Sequence[str]] = {label: list(of_class) for label, of_class in words.items()}
    text = " ".join(["{{ text }}", *task.cue])
    source = f"{{%- set label_words = {json.dumps(label_words)} -%}}\n{text}\n"
    (folder / f"{PROMPT_NAME}.jinja").write_text(source, encoding="utf-8", newline="\n")
