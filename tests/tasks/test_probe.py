"""Probe tasks run by lm_eval, against states of plain forwards and scikit-learn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from oracles import hidden_states, last_state
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, matthews_corrcoef
from sklearn.preprocessing import StandardScaler
from tiny import POSITIONS, tiny_model, tiny_tokenizer
from worlds import World, evaluate, hf_model, metric_list, natural, probe, report, reviews, samples

from harness_ext.contracts import Feature
from harness_ext.tasks import ProbeTask

pytestmark = pytest.mark.usefixtures("world")

LAST_WORD = {"layer": 0}
"""The embedding of a document's last token: all that a label of `ending_in` depends on, and nothing else."""


def ending_in(cues: Sequence[str], *, seed: int) -> list[dict[str, Any]]:
    """16 documents for each cue word, whose last word says the class."""
    texts = [row["text"] for row in reviews(16, seed=seed)]
    return [{"text": f"{text} {cue}", "label": label} for text in texts for label, cue in enumerate(cues)]


@pytest.fixture(scope="module")
def readable(world: World) -> Any:
    """A model without absolute positions, so that its embeddings are those of the words."""
    return hf_model(tiny_model("llama"))


@pytest.fixture(scope="module")
def lm(world: World) -> Any:
    return hf_model()


def oracle(lm: Any, text: str, feature: Feature) -> np.ndarray:
    ids = tiny_tokenizer()(text)["input_ids"]
    if feature.layer == "last" and feature.pooling == "last":
        return last_state(lm.model, ids).numpy()
    layer = -1 if feature.layer == "last" else int(feature.layer)
    states = hidden_states(lm.model, ids)[layer]
    return (states[-1] if feature.pooling == "last" else states.mean(0)).numpy()


def training_texts(task: ProbeTask) -> list[str]:
    return [i.doc["text"] for i in task.instances if i.doc_id < 0]


def probes_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The fits of the only prompt, one for each seed."""
    (entry,) = report(results, "probe_films")["prompts"]
    return entry["probes"]


def training_sets(task: ProbeTask) -> list[tuple[int, ...]]:
    return [tuple(sample.tolist()) for sample in task._samples]


# ------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({}, ""),
        ({"prompt": True}, " This movie is"),
        ({"prompt": "films/wordless"}, " In short"),
        ({"layer": 1}, ""),
        ({"layer": -1, "pooling": "mean"}, ""),
        ({"pooling": "mean", "prompt": True}, " This movie is"),
        ({"layer": 0, "pooling": "mean"}, ""),
    ],
)
def test_features_are_states_of_plain_forwards(lm: Any, world: World, options: dict[str, Any], ending: str) -> None:
    task = probe(options)
    results = evaluate(lm, task, limit=4)
    feature = Feature(options.get("layer", "last"), options.get("pooling", "last"))
    assert [i.args[0] for i in task.instances if i.doc_id >= 0] == [
        f"{row['text']}{ending}" for row in world.splits["test"][:4]
    ]
    assert training_texts(task) == [row["text"] for row in world.splits["train"]]
    for instance in task.instances[::5]:
        (answer,) = instance.resps
        assert instance.args[0] == f"{instance.doc['text']}{ending}"
        expected = oracle(lm, instance.args[0], feature)
        assert answer.source.take([answer.row], feature)[0] == pytest.approx(expected, abs=1e-4)
    told = report(results, "probe_films")
    assert ("template" in told["prompts"][0]) == bool(ending)
    assert {key: told["options"][key] for key in options} == options


def test_a_probe_is_scikit_learns_on_the_same_states(lm: Any, world: World) -> None:
    results = evaluate(lm, probe({"c_grid": [0.01, 0.1, 1.0]}))
    (fitted,) = probes_of(results)
    train, test = (
        np.stack([oracle(lm, row["text"], Feature()) for row in world.splits[split]]).astype(np.float64)
        for split in ("train", "test")
    )
    train_labels, gold = (np.array([row["label"] for row in world.splits[split]]) for split in ("train", "test"))
    scaler = StandardScaler().fit(train)
    reference = LogisticRegression(C=fitted["C"], tol=1e-8, max_iter=10_000).fit(scaler.transform(train), train_labels)
    predicted = reference.predict(scaler.transform(test))
    margins = np.abs(reference.decision_function(scaler.transform(test)))
    assert margins.min() > 1e-3  # so that no prediction hangs on rounding
    found = samples(results, "probe_films")
    assert [s["macro_f1"] for s in found] == [(g, (p,)) for g, p in zip(gold.tolist(), predicted.tolist(), strict=True)]
    assert [s["acc"] for s in found] == (predicted == gold).astype(float).tolist()
    assert results["results"]["probe_films"]["acc,none"] == pytest.approx(np.mean(predicted == gold))
    assert results["results"]["probe_films"]["macro_f1,none"] == pytest.approx(
        f1_score(gold, predicted, average="macro")
    )
    assert fitted["train_accuracy"] == pytest.approx(reference.score(scaler.transform(train), train_labels))
    assert fitted["cv_accuracy"] == max(fitted["cv_accuracy_per_c"])
    assert fitted["C"] == fitted["c_grid"][int(np.argmax(fitted["cv_accuracy_per_c"]))]
    assert fitted["converged"] is True
    assert fitted["acc"] == results["results"]["probe_films"]["acc,none"]


def test_a_probe_finds_what_the_states_know(readable: Any, world: World) -> None:
    name = world.add_dataset(
        "tests/easy", {"train": ending_in(["bad", "good"], seed=5), "test": ending_in(["bad", "good"], seed=6)}
    )
    found = evaluate(readable, probe(LAST_WORD, dataset_path=name))["results"]["probe_films"]
    assert (found["acc,none"], found["macro_f1,none"]) == (1.0, 1.0)


def test_a_probe_finds_nothing_in_labels_that_mean_nothing(lm: Any, world: World) -> None:
    """64 fair coins: 49 or more right has probability 1e-5 (binomial tail)."""
    rows = reviews(128, seed=3, noise=1.0)
    name = world.add_dataset("tests/noise", {"train": rows[:64], "test": rows[64:]})
    assert evaluate(lm, probe(dataset_path=name))["results"]["probe_films"]["acc,none"] <= 0.75


def test_three_classes_by_name(readable: Any, world: World) -> None:
    """Labels of a column of strings, in the order of `doc_to_choice`."""
    names = ["bad", "good", "film"]
    splits = {
        split: [{**row, "label": names[row["label"]]} for row in ending_in(names, seed=seed)]
        for split, seed in (("train", 5), ("test", 6))
    }
    name = world.add_dataset("tests/three_names", splits)
    results = evaluate(readable, probe(LAST_WORD, dataset_path=name, doc_to_choice=names))
    assert results["results"]["probe_films"]["acc,none"] == 1.0
    assert [s["target"] for s in samples(results, "probe_films")] == [0, 1, 2] * 16


def test_the_batch_size_does_not_matter(lm: Any) -> None:
    first = evaluate(lm, probe())
    for size in (1, "auto"):
        found = evaluate(hf_model(batch_size=size), probe())
        assert found["results"] == first["results"]


# ------------------------------------------------------------------------------------------------- training samples


def test_n_per_class_draws_so_many_of_each(lm: Any, world: World) -> None:
    task = probe({"n_per_class": 5, "seeds": [0, 1, 2, 3, 4]})
    results = evaluate(lm, task)
    sets = training_sets(task)
    labels = np.array([row["label"] for row in world.splits["train"]])
    assert len(set(sets)) == 5
    for drawn in sets:
        assert np.bincount(labels[list(drawn)]).tolist() == [5, 5]
        assert len(set(drawn)) == 10
    union = set().union(*sets)
    assert training_texts(task) == [world.splits["train"][i]["text"] for i in sorted(union)]
    assert report(results, "probe_films")["training_documents"] == [10] * 5


def test_n_train_keeps_the_proportions(lm: Any, world: World) -> None:
    rows = reviews(40, seed=8)
    kept = [row for row in rows if row["label"] == 0] + [row for row in rows if row["label"] == 1][:10]
    name = world.add_dataset("tests/skewed", {"train": kept, "test": world.splits["test"]})
    task = probe({"n_train": 12, "seeds": [0, 1]}, dataset_path=name)
    evaluate(lm, task)
    sets = training_sets(task)
    assert sets[0] != sets[1]
    for drawn in sets:
        assert np.bincount([kept[i]["label"] for i in drawn]).tolist() == [8, 4]


def test_all_training_documents_may_be_asked_for_by_number(lm: Any, world: World) -> None:
    task = probe({"n_train": 40})
    evaluate(lm, task)
    assert training_sets(task) == [tuple(range(40))]


def test_samples_depend_on_the_seed_alone(lm: Any) -> None:
    options = {"n_per_class": 4, "seeds": [11, 12]}
    tasks = [probe(options), probe(options), probe({**options, "seeds": [12, 13]})]
    results = [evaluate(lm, task, random_seed=i, numpy_random_seed=i) for i, task in enumerate(tasks)]
    sets = [training_sets(task) for task in tasks]
    assert sets[0] == sets[1]
    assert sets[2][0] == sets[0][1]
    assert sets[2][1] not in sets[0]
    assert results[0]["results"] == results[1]["results"]


def test_metrics_are_means_over_seeds(lm: Any, world: World) -> None:
    rows = reviews(90, seed=2, noise=0.5)
    name = world.add_dataset("tests/noisy", {"train": rows[:50], "test": rows[50:]})
    results = evaluate(lm, probe({"n_per_class": 8, "seeds": [0, 1, 2, 3, 4]}, dataset_path=name))
    fitted = probes_of(results)
    accuracies = [run["acc"] for run in fitted]
    assert [run["seed"] for run in fitted] == [0, 1, 2, 3, 4]
    assert np.std(accuracies) > 0
    found = samples(results, "probe_films")
    gold = np.array([s["macro_f1"][0] for s in found])
    predicted = np.array([s["macro_f1"][1] for s in found])
    assert gold.tolist() == [row["label"] for row in rows[50:]]
    assert predicted.shape == (40, 5)
    assert accuracies == pytest.approx((predicted == gold[:, None]).mean(axis=0).tolist())
    values = results["results"]["probe_films"]
    assert values["acc,none"] == pytest.approx(np.mean(accuracies))
    assert values["macro_f1,none"] == pytest.approx(
        np.mean([f1_score(gold, run, average="macro") for run in predicted.T])
    )
    assert [s["acc"] for s in found] == pytest.approx((predicted == gold[:, None]).mean(axis=1).tolist())


def test_a_limit_leaves_the_training_documents_alone(lm: Any, world: World) -> None:
    whole = evaluate(lm, probe())
    for options in ({"limit": 3}, {"samples": {"probe_films": [0, 1, 2]}}):
        results = evaluate(lm, probe(), **options)
        told = report(results, "probe_films")
        assert (told["documents"], told["training_documents"]) == (3, [40])
        assert [s["acc"] for s in samples(results, "probe_films")] == [s["acc"] for s in samples(whole, "probe_films")][
            :3
        ]
        assert results["n-samples"]["probe_films"] == {"original": 16, "effective": 3}


def test_a_class_of_few_documents_means_fewer_folds(lm: Any, world: World) -> None:
    rows = [row for row in world.splits["train"] if row["label"] == 0] + [
        row for row in world.splits["train"] if row["label"] == 1
    ][:2]
    name = world.add_dataset("tests/rare", {"train": rows, "test": world.splits["test"]})
    (fitted,) = probes_of(evaluate(lm, probe(dataset_path=name)))
    assert fitted["num_folds"] == 2
    assert any("2 folds instead of 3" in note for note in fitted["notes"])
    (alone,) = probes_of(evaluate(lm, probe({"n_per_class": 1}, dataset_path=name)))
    assert (alone["num_folds"], alone["cv_accuracy"], alone["C"]) == (0, None, 1.0)
    assert any("No cross-validation" in note for note in alone["notes"])


# ------------------------------------------------------------------------------------------------- documents


def test_evaluated_documents_that_were_trained_on_are_counted(
    lm: Any, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    train = world.splits["train"]
    name = world.add_dataset("tests/shared", {"train": train, "test": [*world.splits["test"][:5], *train[:3]]})
    with caplog.at_level(logging.WARNING):
        results = evaluate(lm, probe(dataset_path=name))
    assert report(results, "probe_films")["overlap"] == 3
    assert "probe_films: 3 evaluated documents are also among the training documents" in caplog.text
    assert report(evaluate(lm, probe(dataset_path=name), limit=6), "probe_films")["overlap"] == 1
    assert report(evaluate(lm, probe()), "probe_films")["overlap"] == 0


def test_documents_of_both_splits_are_forwarded_once(lm: Any, world: World) -> None:
    train = world.splits["train"]
    name = world.add_dataset("tests/same_texts", {"train": train, "test": train[:10]})
    (summary,) = evaluate(lm, probe(dataset_path=name))["harness_ext"]["passes"]
    assert (summary["prompts"], summary["forwarded"]) == (50, 40)


@pytest.mark.parametrize("empty", ["", " \n", None])
def test_empty_training_documents_are_left_out_and_counted(
    lm: Any, world: World, caplog: pytest.LogCaptureFixture, empty: str | None
) -> None:
    train = [dict(row) for row in world.splits["train"]]
    train[0]["text"] = train[7]["text"] = empty
    name = world.add_dataset(f"tests/holes_{len(str(empty))}", {"train": train, "test": world.splits["test"]})
    task = probe(dataset_path=name)
    with caplog.at_level(logging.WARNING):
        results = evaluate(lm, task)
    told = report(results, "probe_films")
    assert told["empty_training_documents"] == 2
    assert told["training_documents"] == [38]
    assert "probe_films: 2 empty training documents are left out" in caplog.text
    assert training_sets(task) == [tuple(i for i in range(40) if i not in (0, 7))]


def test_long_documents_are_cut_and_counted_in_both_splits(lm: Any, world: World) -> None:
    long = " ".join(f"word{i}" for i in range(100))
    train = [dict(row) for row in world.splits["train"]]
    test = [dict(row) for row in world.splits["test"][:4]]
    train[3]["text"] = f"{long} good"
    for row in test[:2]:
        row["text"] = f"{row['text']} {long}"
    name = world.add_dataset("tests/long_documents", {"train": train, "test": test})
    task = probe(dataset_path=name)
    told = report(evaluate(lm, task), "probe_films")
    assert (told["cut_documents"], told["cut_training_documents"]) == (2, 1)
    answers = {i.doc_id: i.resps[0] for i in task.instances}
    # What is left of a document is its end: the state is that of the last words.
    whole = tiny_tokenizer()(train[3]["text"])["input_ids"]
    kept = len(whole) - answers[-4].cut_tokens
    assert POSITIONS - 6 < kept <= POSITIONS
    text = tiny_tokenizer().decode(whole[-kept:])
    found = answers[-4].source.take([answers[-4].row], Feature())[0]
    assert found == pytest.approx(oracle(lm, text, Feature()), abs=1e-4)


def test_one_class_in_the_evaluated_split_is_no_error(readable: Any, world: World) -> None:
    rows = [row for row in ending_in(["bad", "good"], seed=6) if row["label"] == 1]
    name = world.add_dataset("tests/one_gold", {"train": ending_in(["bad", "good"], seed=5), "test": rows})
    found = evaluate(readable, probe(LAST_WORD, dataset_path=name))["results"]["probe_films"]
    # Macro-F1 is a mean over the task's classes; one that is neither gold nor predicted counts 0.
    assert (found["acc,none"], found["macro_f1,none"]) == (1.0, 0.5)


def test_process_docs_shapes_both_splits(lm: Any, world: World) -> None:
    def only_short(documents: Any) -> Any:
        return documents.filter(lambda doc: len(doc["text"]) < 25)

    task = probe(process_docs=only_short)
    results = evaluate(lm, task)
    short = {split: [row for row in rows if len(row["text"]) < 25] for split, rows in world.splits.items()}
    assert training_texts(task) == [row["text"] for row in short["train"]]
    assert [s["doc"] for s in samples(results, "probe_films")] == short["test"]


# ------------------------------------------------------------------------------------------------- lm_eval's options


def test_predict_only_fits_nothing(lm: Any) -> None:
    results = evaluate(lm, probe(), predict_only=True)
    assert not [name for name in results["results"]["probe_films"] if "," in name]
    assert report(results, "probe_films")["prompts"] == [{"name": "document"}]
    assert len(samples(results, "probe_films")) == 16


def test_training_documents_are_not_among_the_samples(lm: Any, world: World) -> None:
    results = evaluate(lm, probe())
    assert [s["doc"] for s in samples(results, "probe_films")] == world.splits["test"]
    assert [s["doc_id"] for s in samples(results, "probe_films")] == list(range(16))
    assert "samples" not in evaluate(lm, probe(), log_samples=False)


def test_a_probe_stays_zero_shot(lm: Any, world: World) -> None:
    results = evaluate(lm, probe(), natural(), num_fewshot=2, limit=3)
    assert [s["arguments"][0][0] for s in samples(results, "probe_films")] == [
        row["text"] for row in world.splits["test"][:3]
    ]
    assert results["n-shot"] == {"natural_films": 2, "probe_films": 0}


def test_a_probe_whose_yaml_says_nothing_of_shots_treats_both_splits_alike(lm: Any) -> None:
    task = probe(num_fewshot=None)
    evaluate(lm, task, num_fewshot=2, limit=3)
    assert all(("\n\n" in i.args[0]) == ("\n\n" in task.instances[0].args[0]) for i in task.instances)


def test_a_chat_template_is_applied_to_both_splits(world: World) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
    task = probe()
    evaluate(hf_model(tokenizer=tokenizer), task, apply_chat_template=True, system_instruction="Read.", limit=2)
    assert len(task.instances) == 42
    for instance in task.instances:
        assert instance.args[0] == f"[system] Read.\n[user] {instance.doc['text']}\n[assistant]"
        start, end = instance.args[1]["document"]
        assert instance.args[0][start:end] == instance.doc["text"]


def test_lm_evals_own_metrics(lm: Any, world: World) -> None:
    rows = reviews(60, seed=4, noise=0.4)
    name = world.add_dataset("tests/metrics", {"train": rows[:40], "test": rows[40:]})
    options = {"n_per_class": 6, "seeds": [0, 1]}
    task = probe(options, dataset_path=name, metric_list=metric_list("acc", "macro_f1", "f1", "mcc"))
    results = evaluate(lm, task, bootstrap_iters=0)
    found = samples(results, "probe_films")
    gold, first = [s["macro_f1"][0] for s in found], [s["macro_f1"][1][0] for s in found]
    assert results["results"]["probe_films"]["f1,none"] == pytest.approx(f1_score(gold, first))
    assert results["results"]["probe_films"]["mcc,none"] == pytest.approx(matthews_corrcoef(gold, first))


# ------------------------------------------------------------------------------------------------- layers


def test_a_sweep_over_layers_is_what_its_layers_are_alone(lm: Any, world: World) -> None:
    rows = reviews(90, seed=2, noise=0.2)
    name = world.add_dataset("tests/layers", {"train": rows[:50], "test": rows[50:]})
    options = {"c_grid": [0.01, 1.0], "n_per_class": 15, "seeds": [0, 1]}
    task = probe({**options, "layer": "all"}, dataset_path=name)
    results = evaluate(lm, task)
    (told,) = report(results, "probe_films")["prompts"]
    assert [entry["layer"] for entry in told["layers"]] == [0, 1, 2]
    (summary,) = results["harness_ext"]["passes"]
    by_layer = []
    for entry in told["layers"]:
        alone = evaluate(lm, probe({**options, "layer": entry["layer"]}, dataset_path=name))
        (single,) = report(alone, "probe_films")["prompts"]
        assert entry["acc"] == pytest.approx(alone["results"]["probe_films"]["acc,none"], abs=1e-9)
        assert entry["cv_accuracy"] == pytest.approx(np.mean([p["cv_accuracy"] for p in single["probes"]]))
        assert summary["tokens"] == alone["harness_ext"]["passes"][0]["tokens"]
        by_layer.append(single["probes"])
    assert len({entry["acc"] for entry in told["layers"]}) > 1
    for seed, fit in enumerate(told["probes"]):
        cv = [probes[seed]["cv_accuracy"] for probes in by_layer]
        assert fit["layer"] == cv.index(max(cv))
        assert fit["acc"] == by_layer[fit["layer"]][seed]["acc"]
    assert results["results"]["probe_films"]["acc,none"] == pytest.approx(np.mean([p["acc"] for p in told["probes"]]))


def test_a_list_of_layers(lm: Any) -> None:
    (told,) = report(evaluate(lm, probe({"layer": [-1, 0, "last"], "pooling": "mean"})), "probe_films")["prompts"]
    assert [entry["layer"] for entry in told["layers"]] == [-1, 0, "last"]
    for entry in told["layers"]:
        alone = evaluate(lm, probe({"layer": entry["layer"], "pooling": "mean"}))
        assert entry["acc"] == alone["results"]["probe_films"]["acc,none"]


def test_one_layer_is_no_sweep(lm: Any) -> None:
    (told,) = report(evaluate(lm, probe({"layer": 1})), "probe_films")["prompts"]
    assert "layers" not in told
    assert told["probes"][0]["layer"] == 1


def test_layers_without_cross_validation_predict_with_the_last(lm: Any) -> None:
    (told,) = report(evaluate(lm, probe({"layer": [1, 0], "n_per_class": 1})), "probe_films")["prompts"]
    assert [entry["cv_accuracy"] for entry in told["layers"]] == [None, None]
    assert told["probes"][0]["layer"] == 0
