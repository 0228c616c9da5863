"""Calibrated accuracies, and what stands beside accuracies to say what they are worth, recomputed from the logged answers."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score
from tiny import tiny_tokenizer
from worlds import World, evaluate, hf_model, metric_list, natural, probe, report, reviews, samples

from harness_ext.prompts import load_prompt

ALL = ("acc", "acc_pmi", "acc_batch", "acc_context", "balanced_acc", "macro_f1", "brier", "ece", "majority_rate")
WORDS = '{%- set label_words = {"negative": ["bad", "terrible"], "positive": ["good", "fine"]} -%}'


@pytest.fixture(scope="module")
def lm(world: World) -> Any:
    return hf_model()


@pytest.fixture(scope="module")
def many(world: World) -> str:
    """A dataset of unequal classes, the second the commoner."""
    rows = reviews(90, seed=4, noise=0.3)
    kept = [row for row in rows if row["label"] == 1] + [row for row in rows if row["label"] == 0][:20]
    return world.add_dataset("tests/unequal", {"train": world.splits["train"], "test": kept})


@pytest.fixture(scope="module")
def results(lm: Any, many: str) -> dict[str, Any]:
    return evaluate(lm, natural(dataset_path=many, metadata={"prompt": "films/several"}, metric_list=metric_list(*ALL)))


def class_scores(log_probs: Sequence[float], prompt_id: str = "films/several") -> np.ndarray:
    values = iter(log_probs)
    words = load_prompt(prompt_id).label_words.values()
    return np.log([sum(math.exp(next(values)) for _ in of_class) for of_class in words])


def answers(results: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Log-probabilities by context, whichever document asked."""
    return {
        context: answer.log_probs
        for sample in samples(results, "natural_films")
        for (context, _), (answer,) in zip(sample["arguments"], sample["resps"], strict=True)
    }


def golds(results: dict[str, Any]) -> np.ndarray:
    return np.array([s["doc"]["label"] for s in samples(results, "natural_films")])


def raw_scores(results: dict[str, Any]) -> np.ndarray:
    return np.stack([class_scores(s["resps"][0][0].log_probs) for s in samples(results, "natural_films")])


# ------------------------------------------------------------------------------------------------- raw numbers


@pytest.mark.parametrize("prompt", ["films/several", ["films/plain", "films/several"]])
def test_raw_numbers_are_the_same_to_the_bit_whatever_is_calibrated(lm: Any, many: str, prompt: Any) -> None:
    runs = [
        evaluate(lm, natural(dataset_path=many, metadata={"prompt": prompt}, metric_list=metric_list(*names)))
        for names in (("acc",), ALL, ALL[::-1])
    ]
    log_probs = [answers(run) for run in runs]
    assert log_probs[0] == log_probs[1] == log_probs[2]
    rows = [[s["acc"] for s in samples(run, "natural_films")] for run in runs]
    assert rows[0] == rows[1] == rows[2]
    values = [
        {name: v for name, v in run["results"]["natural_films"].items() if name.startswith("acc")} for run in runs
    ]
    for name, value in values[0].items():
        assert values[1][name] == values[2][name] == value, name


# ------------------------------------------------------------------------------------------------- acc_context


def test_acc_context_divides_by_what_documents_without_content_give(results: dict[str, Any]) -> None:
    by_text = answers(results)
    of_inputs = [class_scores(by_text[f"Review: {text}It was"]) for text in ("N/A ", "[MASK] ", "")]
    prior = np.mean([np.exp(scores) / np.exp(scores).sum() for scores in of_inputs], axis=0)
    hits = (np.exp(raw_scores(results)) / prior).argmax(axis=1) == golds(results)
    assert [s["acc_context"] for s in samples(results, "natural_films")] == hits.astype(float).tolist()
    assert results["results"]["natural_films"]["acc_context,none"] == pytest.approx(hits.mean())


def test_the_calibrations_differ(results: dict[str, Any]) -> None:
    """Otherwise a test of one could pass with the numbers of another."""
    rows = {name: [s[name] for s in samples(results, "natural_films")] for name in ALL[:4]}
    for first, second in itertools.combinations(rows, 2):
        if {first, second} != {"acc_pmi", "acc_context"}:
            assert rows[first] != rows[second], (first, second)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ text }} It was", ["It was", "N/A It was", "[MASK] It was"]),
        ("Read.\n{{ text | trim }}\nIt was", ["Read.\nIt was", "Read.\nN/A\nIt was", "Read.\n[MASK]\nIt was"]),
        (
            "{{ text }} Again: {{ text }} It was",
            ["Again:  It was", "N/A Again: N/A It was", "[MASK] Again: [MASK] It was"],
        ),
        ("{{ text | upper }} ({{ text | length }}) It was", None),
    ],
)
def test_content_free_texts_are_the_prompt_with_another_document(
    lm: Any, world: World, template: str, expected: list[str] | None
) -> None:
    prompt = world.add_prompt(f"content/p{abs(hash(template))}", WORDS + template)
    results = evaluate(lm, natural(metadata={"prompt": prompt}), limit=2)
    first, second = ([context for context, _ in s["arguments"]] for s in samples(results, "natural_films"))
    if expected is None:  # of a template that looks at the document, too
        text = world.splits["test"][0]["text"]
        assert first[0] == f"{text.upper()} ({len(text)}) It was"
        assert first[2:] == ["N/A (3) It was", "[MASK] (6) It was"]
        return
    assert first[1:] == expected
    assert len(second) == 1


def test_content_free_texts_keep_examples_and_chat_template(world: World) -> None:
    lm = hf_model()
    lm.tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }}\n{% endfor %}a\n"
    prompt = world.add_prompt("content/twice", WORDS + "{{ text }} Again: {{ text }} It was")
    task = natural(metadata={"prompt": prompt})
    results = evaluate(lm, task, num_fewshot=1, apply_chat_template=True, limit=3)
    for sample in samples(results, "natural_films"):
        contexts = [context for context, _ in sample["arguments"]]
        text = sample["doc"]["text"]
        head = contexts[0].removesuffix(f"{text} Again: {text} It was\na")
        assert head != contexts[0]
        assert contexts[2:] == [f"{head}{free} Again: {free} It was\na" for free in ("N/A", "[MASK]")]


def test_content_free_texts_are_cut_as_documents_are(world: World) -> None:
    """Where little room is left for a document, there is as little for what stands for it."""
    template, words = (len(tiny_tokenizer()(text)["input_ids"]) for text in (" This movie is", "terrible"))
    room = template + words  # a word's last token is no input: one token for the document
    assert len(tiny_tokenizer()("[MASK]")["input_ids"]) > 1
    results = evaluate(hf_model(max_length=room), natural(metric_list=metric_list(*ALL)))
    assert report(results, "natural_films")["cut_documents"] == 16
    assert 0 <= results["results"]["natural_films"]["acc_context,none"] <= 1


# ------------------------------------------------------------------------------------------------- beside accuracy


def calibration_error(probabilities: np.ndarray, gold: np.ndarray) -> float:
    """Fifteen bins of confidence, document by document."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for row, label in zip(probabilities, gold, strict=True):
        confidence = row.max()
        bins.setdefault(math.ceil(confidence * 15 - 1e-12), []).append((float(row.argmax() == label), confidence))
    return sum(len(of_bin) * abs(np.mean(of_bin, axis=0) @ [1, -1]) for of_bin in bins.values()) / len(gold)


def test_metrics_of_natural_tasks(results: dict[str, Any]) -> None:
    raw, gold, found = raw_scores(results), golds(results), results["results"]["natural_films"]
    predicted = raw.argmax(axis=1)
    probabilities = np.exp(raw) / np.exp(raw).sum(axis=1, keepdims=True)
    expected = {
        "acc": np.mean(predicted == gold),
        "balanced_acc": balanced_accuracy_score(gold, predicted),
        "macro_f1": f1_score(gold, predicted, average="macro"),
        "ece": calibration_error(probabilities, gold),
        "brier": np.square(probabilities - np.eye(2)[gold]).sum(axis=1).mean(),
    }
    (told,) = report(results, "natural_films")["prompts"]
    for name, value in expected.items():
        assert found[f"{name},none"] == pytest.approx(value), name
        assert told["metrics"][name] == pytest.approx(value), name
    assert found["majority_rate,none"] == np.bincount(gold).max() / len(gold) > 0.5
    assert report(results, "natural_films")["majority_rate"] == found["majority_rate,none"]
    assert found["balanced_acc,none"] != pytest.approx(found["acc,none"])
    for name, (low, high) in told["intervals_95"].items():
        assert low <= told["metrics"][name] <= high
        assert low < high


def test_metrics_of_probes(lm: Any, many: str) -> None:
    names = ("acc", "balanced_acc", "macro_f1", "ece", "majority_rate")
    task = probe({"n_per_class": 8, "seeds": [0, 1]}, dataset_path=many, metric_list=metric_list(*names))
    results = evaluate(lm, task)
    found = results["results"]["probe_films"]
    rows = samples(results, "probe_films")
    gold = np.array([s["doc"]["label"] for s in rows])
    probabilities = np.array([s["ece"][1] for s in rows]).swapaxes(0, 1)  # (seeds, documents, classes)
    predicted = probabilities.argmax(axis=2)
    assert (predicted[0] != predicted[1]).any()
    expected = {
        "acc": np.mean(predicted == gold),
        "balanced_acc": np.mean([balanced_accuracy_score(gold, run) for run in predicted]),
        "macro_f1": np.mean([f1_score(gold, run, average="macro") for run in predicted]),
        "ece": np.mean([calibration_error(run, gold) for run in probabilities]),
        "majority_rate": np.bincount(gold).max() / len(gold),
    }
    for name, value in expected.items():
        assert found[f"{name},none"] == pytest.approx(value), name
    assert report(results, "probe_films")["majority_rate"] == found["majority_rate,none"]


def test_an_accuracy_at_or_below_the_majority_rate_is_marked_and_warned_of_once(
    lm: Any, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The same prompt with its words exchanged is right where the other is wrong."""
    sources = ('{"negative": "bad", "positive": "good"}', '{"negative": "good", "positive": "bad"}')
    prompts = [
        world.add_prompt(f"content/{name}", f"{{%- set label_words = {words} -%}}{{{{ text }}}} It was")
        for name, words in zip(("straight", "crossed"), sources, strict=True)
    ]
    # Labels that are what the first prompt predicts, so that it is always right and the second always wrong.
    first = evaluate(lm, natural(metadata={"prompt": prompts[0]}))
    labelled = [
        {**sample["doc"], "label": int(np.argmax(sample["resps"][0][0].log_probs))}
        for sample in samples(first, "natural_films")
    ]
    name = world.add_dataset("tests/as_predicted", {"train": world.splits["train"], "test": labelled})
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        results = evaluate(lm, natural(dataset_path=name, metadata={"prompt": prompts}))
    told = report(results, "natural_films")
    rate = told["majority_rate"]
    assert 0.5 <= rate < 1
    for entry, accuracy in zip(told["prompts"], (1.0, 0.0), strict=True):
        assert entry["metrics"]["acc"] == accuracy
        low = [key for key in ("acc", "acc_pmi", "acc_batch", "acc_context") if entry["metrics"][key] <= rate + 1e-9]
        assert entry["at_or_below_majority"] == low
    message = f"natural_films: acc is not above the share of the commonest class, {rate:.4f} (prompt: crossed)."
    assert caplog.text.count("is not above the share of the commonest class") == caplog.text.count(message) == 1
