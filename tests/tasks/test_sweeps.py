"""Several prompts in one run: each is what it is alone, and what they are together is recomputed from the logged answers."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef
from tiny import tiny_tokenizer
from worlds import (
    NATURAL_METRICS,
    World,
    evaluate,
    feature_probe,
    hf_model,
    metric_list,
    natural,
    probe,
    report,
    reviews,
    samples,
)

from harness_ext.prompts import load_prompt

BOTH = ["films/plain", "films/several"]
NAMES = ("plain", "several")
FEATURES = ("probe", "probe_cmean", "probe_words", "probe_full", "quad")

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] | trim }}\n{% endfor %}a\n"


@pytest.fixture(scope="module")
def lm(world: World) -> Any:
    return hf_model()


@pytest.fixture(scope="module")
def noisy(world: World) -> str:
    """A dataset with more documents, whose labels say less of them."""
    return world.add_dataset("tests/swept", {"train": world.splits["train"], "test": reviews(60, seed=4, noise=0.3)})


@pytest.fixture(scope="module")
def swept(lm: Any, noisy: str) -> dict[str, Any]:
    return evaluate(lm, natural(dataset_path=noisy, metadata={"prompt": BOTH}))


def sweep_log_probs(results: dict[str, Any], position: int, task: str = "natural_films") -> list[tuple[float, ...]]:
    """Of the words of the prompt at a position of the sweep, for each document."""
    return [s["resps"][position][0].log_probs for s in samples(results, task)]


def class_probabilities(log_probs: Sequence[float], prompt_id: str) -> list[float]:
    """Of one document: word probabilities summed by class, then normalised."""
    values = iter(log_probs)
    of_classes = [
        sum(math.exp(next(values)) for _ in of_class) for of_class in load_prompt(prompt_id).label_words.values()
    ]
    return [value / sum(of_classes) for value in of_classes]


def credit(of_classes: Sequence[float], gold: int) -> float:
    return float(max(range(len(of_classes)), key=lambda label: of_classes[label]) == gold)


# ------------------------------------------------------------------------------------------------- natural tasks


@pytest.mark.parametrize("num_fewshot", [0, 2])
@pytest.mark.parametrize("chat", [False, True])
def test_each_prompt_is_what_it_is_alone(world: World, num_fewshot: int, chat: bool) -> None:
    """Also with examples, which are the same under each prompt and those of a run of that prompt alone."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    lm = hf_model(tokenizer=tokenizer)
    options = {"num_fewshot": num_fewshot, "apply_chat_template": chat, "limit": 6}
    together = evaluate(lm, natural(metadata={"prompt": BOTH}), **options)
    found = together["results"]["natural_films"]
    for position, (prompt_id, name) in enumerate(zip(BOTH, NAMES, strict=True)):
        alone = evaluate(lm, natural(metadata={"prompt": prompt_id}), **options)
        asked, expected = (
            [s["arguments"][place] for s in samples(results, "natural_films")]
            for results, place in ((together, position), (alone, 0))
        )
        assert asked == expected
        assert np.array(sweep_log_probs(together, position)) == pytest.approx(
            np.array(sweep_log_probs(alone, 0)), abs=1e-5
        )
        values, told = alone["results"]["natural_films"], report(together, "natural_films")["prompts"][position]
        assert found[f"acc@{name},none"] == values["acc,none"] == told["metrics"]["acc"]
        for metric in NATURAL_METRICS:
            assert told["metrics"][metric] == pytest.approx(values[f"{metric},none"], abs=1e-5)
        (single,) = report(alone, "natural_films")["prompts"]
        assert told["premise"] == single["premise"]
        assert told["digest"] == single["digest"]
    if num_fewshot:
        examples = [
            {text for text in (row["text"] for row in world.splits["train"]) if text in context}
            for context, _ in (samples(together, "natural_films")[0]["arguments"][place] for place in (0, 1))
        ]
        assert examples[0] == examples[1] != set()


def test_metrics_are_means_over_the_prompts(swept: dict[str, Any]) -> None:
    found = swept["results"]["natural_films"]
    told = [entry["metrics"] for entry in report(swept, "natural_films")["prompts"]]
    for metric in NATURAL_METRICS:
        assert found[f"{metric},none"] == pytest.approx(np.mean([entry[metric] for entry in told]))
    accuracies = [entry["acc"] for entry in told]
    assert accuracies[0] != accuracies[1]
    assert (found["acc_worst,none"], found["acc_best,none"]) == (min(accuracies), max(accuracies))


def test_the_ensembles_are_those_of_a_loop_over_the_logged_answers(swept: dict[str, Any]) -> None:
    rows: dict[str, list[float]] = {"acc_ensemble": [], "acc_mixture": []}
    for sample in samples(swept, "natural_films"):
        gold = sample["doc"]["label"]
        by_prompt = [
            class_probabilities(sample["resps"][position][0].log_probs, prompt_id)
            for position, prompt_id in enumerate(BOTH)
        ]
        rows["acc_ensemble"].append(
            credit([sum(math.log(of_prompt[c]) for of_prompt in by_prompt) for c in (0, 1)], gold)
        )
        rows["acc_mixture"].append(credit([sum(of_prompt[c] for of_prompt in by_prompt) for c in (0, 1)], gold))
    for metric, values in rows.items():
        assert [s[metric] for s in samples(swept, "natural_films")] == values
        assert swept["results"]["natural_films"][f"{metric},none"] == pytest.approx(np.mean(values))
    singles = [[s[f"acc@{name}"] for s in samples(swept, "natural_films")] for name in NAMES]
    assert rows["acc_ensemble"] not in singles


def test_the_results_json_names_the_metrics(swept: dict[str, Any]) -> None:
    found = swept["results"]["natural_films"]
    of_sweep = ["acc_worst", "acc_best", "acc_ensemble", "acc_mixture", "acc@plain", "acc@several"]
    for name in [*NATURAL_METRICS, *of_sweep]:
        assert 0 <= found[f"{name},none"] <= 2
        assert 0 <= found[f"{name}_stderr,none"] < 0.5
    assert all(swept["higher_is_better"]["natural_films"][name] for name in of_sweep)
    json.dumps([swept[key] for key in ("results", "configs", "harness_ext")], allow_nan=False)
    assert [entry["name"] for entry in report(swept, "natural_films")["prompts"]] == list(NAMES)


def test_one_prompt_has_no_metrics_of_a_sweep(lm: Any) -> None:
    for prompt in ("films/plain", ["films/plain"], "films/pl?in"):
        found = evaluate(lm, natural(metadata={"prompt": prompt}), limit=2)["results"]["natural_films"]
        assert not [name for name in found if "@" in name or "ensemble" in name or "worst" in name]


def test_a_pattern_leaves_out_what_natural_tasks_cannot_use(
    lm: Any, noisy: str, swept: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        results = evaluate(lm, natural(dataset_path=noisy, metadata={"prompt": "films/[psw]*"}))
    assert "films/wordless" in caplog.text
    assert results["results"]["natural_films"] == swept["results"]["natural_films"]


def test_a_list_of_a_mapping_is_a_sweep_of_its_task(lm: Any, noisy: str, swept: dict[str, Any]) -> None:
    options = {
        "dataset_path": noisy,
        "metadata": {"prompt": {"natural_films": BOTH, "natural_other": "films/wordless"}},
    }
    assert evaluate(lm, natural(**options))["results"] == swept["results"]


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(KeyError, match=r"films/plian\*.*films/plain"):
        natural(metadata={"prompt": "films/plian*"})
    with pytest.raises(KeyError, match="flims"):
        probe({"prompt": ["films/plain", "flims/*"]})


def test_prompts_of_the_same_text_are_flagged(lm: Any, world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.add_prompt("copies/first", load_prompt("films/plain").source)
    world.add_prompt("copies/second", load_prompt("films/plain").source)
    options = {"metadata": {"prompt": "copies/*"}}
    for task in (natural(**options), probe({"prompt": "copies/*"})):
        with caplog.at_level(logging.WARNING):
            results = evaluate(lm, task, limit=3)
        assert report(results, task.task_name)["duplicate_prompts"] == [["copies/first", "copies/second"]]
        assert f"{task.task_name}: prompts of the same text and words: copies/first = copies/second" in caplog.text
    # They are asked once.
    assert evaluate(lm, natural(**options), limit=3)["harness_ext"]["passes"][0]["distinct_prompts"] == 3 + 3


def test_prompts_of_the_same_name_go_by_their_ids(lm: Any, world: World) -> None:
    world.add_prompt("others/plain", load_prompt("films/several").source)
    results = evaluate(lm, natural(metadata={"prompt": ["films/plain", "others/plain", "films/several"]}), limit=2)
    accuracies = [name for name in results["results"]["natural_films"] if name.startswith("acc@")]
    assert [name.split(",")[0] for name in accuracies if "stderr" not in name] == [
        "acc@films/plain",
        "acc@others/plain",
        "acc@several",
    ]


def test_prompts_are_forwarded_in_one_pass_and_share_their_documents(lm: Any, world: World) -> None:
    other = world.add_prompt(
        "others/short", '{%- set label_words = {"negative": "bad", "positive": "good"} -%}{{ text }} In short'
    )
    results = evaluate(lm, natural(metadata={"prompt": ["films/plain", other]}))
    (summary,) = results["harness_ext"]["passes"]
    assert summary["documents"] == len(world.splits["test"])
    assert summary["prompts"] == 2 * len(world.splits["test"]) + 6
    assert summary["tokens"] < summary["separate_tokens"]


def test_a_sweep_runs_without_metrics(lm: Any, noisy: str, swept: dict[str, Any]) -> None:
    results = evaluate(lm, natural(dataset_path=noisy, metadata={"prompt": BOTH}), predict_only=True)
    assert not [name for name in results["results"]["natural_films"] if "," in name]
    assert sweep_log_probs(results, 1) == sweep_log_probs(swept, 1)


# ------------------------------------------------------------------------------------------------- probes


@pytest.mark.parametrize("kind", ["probe", "probe_subset"])
def test_a_probe_under_each_prompt_is_what_it_is_alone(lm: Any, world: World, kind: str) -> None:
    rows = reviews(90, seed=2, noise=0.2)
    name = world.add_dataset("tests/swept_probe", {"train": rows[:50], "test": rows[50:]})
    prompts = [*BOTH, "films/wordless"]
    changes = {
        "dataset_path": name,
        "metadata": {"subset_words": ["bad", "good", "great"]},
        "metric_list": metric_list("acc", "ece"),
    }
    options = {"n_per_class": 12, "seeds": [0, 1]}
    results = evaluate(lm, feature_probe(kind, {**options, "prompt": prompts}, **changes))
    found, told = results["results"][f"{kind}_films"], report(results, f"{kind}_films")["prompts"]
    accuracies = []
    for prompt_id, entry in zip(prompts, told, strict=True):
        alone = evaluate(lm, feature_probe(kind, {**options, "prompt": prompt_id}, **changes))
        value = alone["results"][f"{kind}_films"]["acc,none"]
        accuracies.append(value)
        assert entry["acc"] == pytest.approx(value, abs=1e-9)
        assert found[f"acc@{entry['name']},none"] == pytest.approx(value, abs=1e-9)
        (single,) = report(alone, f"{kind}_films")["prompts"]
        assert [probe["C"] for probe in entry["probes"]] == [probe["C"] for probe in single["probes"]]
    assert len(set(accuracies)) > 1
    assert found["acc,none"] == pytest.approx(np.mean(accuracies))
    assert found["acc_worst,none"] == pytest.approx(min(accuracies))
    assert found["acc_best,none"] == pytest.approx(max(accuracies))
    # Of all prompts together, averaged over seeds.
    together: dict[str, list[float]] = {"acc_ensemble": [], "acc_mixture": []}
    for sample in samples(results, f"{kind}_films"):
        gold, runs = sample["ece"]
        by_prompt = [runs[:2], runs[2:4], runs[4:]]
        for metric, weigh in (("acc_ensemble", math.log), ("acc_mixture", float)):
            of_seeds = [
                credit([sum(weigh(of_prompt[seed][label]) for of_prompt in by_prompt) for label in (0, 1)], gold)
                for seed in (0, 1)
            ]
            together[metric].append(sum(of_seeds) / 2)
            assert sample[metric] == together[metric][-1]
    for metric, values in together.items():
        assert found[f"{metric},none"] == pytest.approx(np.mean(values))


def test_the_prompt_of_the_task_may_be_a_sweep_of_the_probe(lm: Any) -> None:
    results = evaluate(lm, probe({"prompt": True}, metadata={"prompt": BOTH}), limit=3)
    assert [entry["id"] for entry in report(results, "probe_films")["prompts"]] == BOTH


# ------------------------------------------------------------------------------------------------- together with the rest


def test_lm_evals_own_metrics_are_those_of_the_ensemble(lm: Any, noisy: str) -> None:
    names = ("acc", "f1", "mcc", "brier_score")
    task = natural(dataset_path=noisy, metadata={"prompt": BOTH}, metric_list=metric_list(*names))
    results = evaluate(lm, task, bootstrap_iters=0)
    found = results["results"]["natural_films"]
    together = []
    for sample in samples(results, "natural_films"):
        by_prompt = [
            np.log(class_probabilities(sample["resps"][position][0].log_probs, prompt_id))
            for position, prompt_id in enumerate(BOTH)
        ]
        together.append(np.exp(np.mean(by_prompt, axis=0)))
    probabilities = np.array(together) / np.sum(together, axis=1, keepdims=True)
    gold = np.array([s["doc"]["label"] for s in samples(results, "natural_films")])
    predicted = probabilities.argmax(axis=1)
    assert found["f1,none"] == pytest.approx(f1_score(gold, predicted))
    assert found["mcc,none"] == pytest.approx(matthews_corrcoef(gold, predicted))
    assert found["brier_score,none"] == pytest.approx(np.square(probabilities - np.eye(2)[gold]).sum(axis=1).mean())


def test_three_classes(lm: Any, world: World) -> None:
    for name, words in (("a", ("bad", "good", "great")), ("b", ("terrible", "fine", "the"))):
        label_words = json.dumps(dict(zip("xyz", words, strict=True)))
        world.add_prompt(f"three/{name}", f"{{%- set label_words = {label_words} -%}}{{{{ text }}}} It was")
    rows = [{**row, "label": i % 3} for i, row in enumerate(reviews(60, seed=9))]
    name = world.add_dataset("tests/three_swept", {"train": rows[:40], "test": rows[40:]})
    changes = {"dataset_path": name, "doc_to_choice": ["x", "y", "z"], "metadata": {"prompt": "three/*"}}
    results = evaluate(lm, natural(**changes), *(feature_probe(k, {"prompt": True}, **changes) for k in FEATURES))
    for task in results["results"]:
        found = results["results"][task]
        accuracies = [found["acc@a,none"], found["acc@b,none"]]
        assert found["acc,none"] == pytest.approx(np.mean(accuracies))
        assert found["acc_worst,none"] == pytest.approx(min(accuracies))
        assert 0 <= found["acc_mixture,none"] <= 1


def test_a_model_without_states_sweeps_natural_tasks() -> None:
    results = evaluate("dummy", natural(metadata={"prompt": BOTH}))
    assert 0 <= results["results"]["natural_films"]["acc@several,none"] <= 1


def test_a_cache_of_responses_is_no_obstacle(lm: Any, tmp_path: Path) -> None:
    """Answers that lm_eval would take from its cache have no vectors."""
    tasks = [natural(metadata={"prompt": BOTH}), *(feature_probe(k, {"prompt": BOTH[0]}) for k in ("probe", "quad"))]
    first, second = (evaluate(lm, *tasks, use_cache=str(tmp_path / "responses")) for _ in range(2))
    assert first["results"] == second["results"]
