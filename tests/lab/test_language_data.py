"""The data folder of a language: its files, that they are balanced and apart, and that the truth is what they say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness_ext.lab.languages import LANGUAGES, datasets, make_language
from harness_ext.lab.languages.base import Example, Language, bayes_accuracy, optimal_cross_entropy
from harness_ext.lab.languages.datasets import PROMPT_NAME, write_language_data
from harness_ext.lab.languages.label_words import natural_ceiling
from harness_ext.lab.languages.pcfg import Pcfg, Rules
from harness_ext.prompts import load_prompt

SIZES = {"num_train_per_class": 6, "num_test": 40, "num_validation": 20}


def write(folder: Path, language: Language, seed: int = 0, **sizes: int) -> dict[str, Any]:
    return write_language_data(folder, language, **(SIZES | sizes), rng=np.random.default_rng(seed))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", LANGUAGES)
def test_everything_that_the_tasks_read(kind: str, tmp_path: Path) -> None:
    language = make_language(kind)
    truth = write(tmp_path / "new", language)
    data = tmp_path / "new" / "data"
    assert [path.name for path in data.parent.iterdir()] == ["data"]
    assert json.loads((data / "truth.json").read_text()) == truth
    assert truth["left_out"] == {}
    assert set(truth["tasks"]) == {task.name for task in language.tasks}
    expected = {"truth.json", f"harness_ext/{kind}_text/test.jsonl"}
    for task in language.tasks:
        expected |= {f"harness_ext/{task.name}/{split}.jsonl" for split in ("train", "test")}
        expected.add(f"prompts/{task.name}/{PROMPT_NAME}.jinja")
    assert set(contents(data)) == expected

    text = [tuple(row["text"].split()) for row in rows(data / "harness_ext" / f"{kind}_text" / "test.jsonl")]
    assert len(text) == 20
    entropy = optimal_cross_entropy(language, text)
    assert truth["entropy"] == {"value": entropy.value, "stderr": entropy.stderr}

    for task in language.tasks:
        splits = {split: rows(data / "harness_ext" / task.name / f"{split}.jsonl") for split in ("train", "test")}
        for split in splits.values():
            assert all(row["label_text"] == task.classes[row["label"]] for row in split)
        assert Counter(row["label"] for row in splits["train"]) == dict.fromkeys(range(len(task.classes)), 6)
        assert not {row["text"] for row in splits["train"]} & {row["text"] for row in splits["test"]}
        test = [Example(tuple(row["text"].split()), row["label"]) for row in splits["test"]]
        bayes = bayes_accuracy(task, test)
        prompt = load_prompt(data / "prompts" / task.name / f"{PROMPT_NAME}.jinja")
        assert prompt.render({"text": "a b ."}).text == " ".join(["a b .", *task.cue])
        assert tuple(prompt.label_words) == task.classes
        assert truth["tasks"][task.name] == {
            "classes": list(task.classes),
            "bayes_accuracy": {"accuracy": bayes.accuracy, "expected": bayes.expected},
            "natural_ceiling": natural_ceiling(language, task, prompt.label_words, test),
            "majority": max(Counter(example.label for example in test).values()) / 40,
            "num_train": 6 * len(task.classes),
            "num_test": 40,
        }


def test_a_seed_decides_every_byte(tmp_path: Path) -> None:
    language = make_language("hmm", 0, {"states": 4, "words": 12})
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(tmp_path / name, language, seed)
    first, again, other = (contents(tmp_path / name) for name in "abc")
    assert first == again
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first if name.endswith("l"))
    # One part does not depend on the size of another.
    write(tmp_path / "d", language, num_train_per_class=9)
    longer = contents(tmp_path / "d")
    assert {name for name in first if first[name] != longer[name]} == {"data/truth.json"} | {
        name for name in first if name.endswith("train.jsonl")
    }


def few_sentences(third: float) -> Pcfg:
    """Three rules, and six sentences of two words, two of each rule; the third rule is a rare one."""
    return Pcfg(
        rules=(Rules(((0, 3), (1, 3), (2, 3)), np.array([[0.5 - third / 2, 0.5 - third / 2, third]])),),
        emissions=np.array([[0.9, 0.1, 0, 0, 0, 0, 0], [0, 0, 0.9, 0.1, 0, 0, 0], [0, 0, 0, 0, 0.5, 0.5, 0],
                            [0, 0, 0, 0, 0, 0, 1.0]]),
        words=tuple("abcdefz"),
    )  # fmt: skip


def test_a_task_that_cannot_be_trained_on_is_left_out_with_the_reason(tmp_path: Path) -> None:
    """A test set of 40 has all documents of the two frequent rules, but once in 10^7, so that none is left for training."""
    truth = write(tmp_path, few_sentences(1e-9))
    assert truth["tasks"] == {}
    assert truth["left_out"] == {"pcfg_top_rule": "class 'rule0' has 0 training documents that are not in the test set"}
    assert set(contents(tmp_path / "data")) == {"truth.json", "harness_ext/pcfg_text/test.jsonl"}


def test_a_class_that_is_too_rare_has_fewer_training_documents(tmp_path: Path) -> None:
    class Rare:
        """A language's task with a class of 1 in 500, of which 6 of 18 · 50 drawn documents cannot be expected."""

        def __init__(self, task: Any) -> None:
            self._task = task

        def __getattr__(self, name: str) -> Any:
            return getattr(self._task, name)

        def sample(self, count: int, rng: np.random.Generator) -> list[Example]:
            examples = self._task.sample(count, rng)
            return [example for example in examples if example.label or rng.random() < 0.002]

    language = make_language("hmm", 0, {"states": 4, "words": 12, "switches": 1})
    task = Rare(language.tasks[0])
    drawn = datasets._training_examples(task, 6, set(), np.random.default_rng(0))
    counts = Counter(example.label for example in drawn)
    assert counts[1] == 6
    assert counts[0] < 6


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(datasets, "_write_prompt", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path, make_language("hmm"))
    assert list(tmp_path.iterdir()) == []


def test_data_that_are_there_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match=r"data exists already\. Remove it, or name another folder"):
        write(tmp_path, make_language("hmm"))
    assert (tmp_path / "data" / "mine").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_train_per_class": 1}, "num_train_per_class must be at least 2, got 1"),
        ({"num_test": 0}, "num_test must be at least 1, got 0"),
        ({"num_validation": 1}, "num_validation must be at least 2, got 1"),
    ],
)
def test_sizes_out_of_range(tmp_path: Path, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "x", make_language("hmm"), **sizes)
    assert not (tmp_path / "x").exists()


def test_more_classes_than_words_have_no_natural_task(tmp_path: Path) -> None:
    language = make_language("hmm", 0, {"states": 2, "words": 3, "switches": 2})
    truth = write(tmp_path, language)
    assert truth["tasks"]["hmm_regime"]["natural_ceiling"] is None
    assert not (tmp_path / "data" / "prompts" / "hmm_regime").exists()
    assert truth["tasks"]["hmm_switch"]["natural_ceiling"] > 0.4
