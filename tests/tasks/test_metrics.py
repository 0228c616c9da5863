"""Metrics of ours, of lm_eval and of `evaluate`, and what of them reaches the results JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import evaluate as evaluate_library
import numpy as np
import pytest
from lm_eval.api import registry
from sklearn.metrics import f1_score, matthews_corrcoef
from worlds import NATURAL_METRICS, World, evaluate, hf_model, metric_list, natural, probe, report, reviews, samples

from harness_ext.tasks import metrics

pytestmark = pytest.mark.usefixtures("world")

SCRIPT = """
import datasets
import evaluate
from sklearn.metrics import f1_score


class {name}(evaluate.Metric):
    def _info(self):
        features = datasets.Features({{"predictions": datasets.Value("int32"), "references": datasets.Value("int32")}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, average="binary"):
        return {{"{key}": f1_score(references, predictions, average=average), "n": len(references)}}
"""

GOLD = [0, 0, 1, 2, 2, 1, 0, 2]
RUNS = [[0, 1, 1, 2, 0, 1, 0, 2], [0, 0, 2, 2, 2, 1, 1, 1]]
ITEMS = [(gold, (RUNS[0][i], RUNS[1][i])) for i, gold in enumerate(GOLD)]


@pytest.fixture(scope="module")
def lm(world: World) -> Any:
    return hf_model()


def predictions(results: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Gold classes, and the predictions recomputed from the logged log-probabilities (one word a class)."""
    found = samples(results, "natural_films")
    return [s["doc"]["label"] for s in found], [int(np.argmax(s["resps"][0][0].log_probs)) for s in found]


# ------------------------------------------------------------------------------------------------- aggregations


def test_macro_f1_is_the_mean_over_runs_of_scikit_learns() -> None:
    for classes in (3, 4):
        expected = np.mean(
            [f1_score(GOLD, run, average="macro", labels=range(classes), zero_division=0) for run in RUNS]
        )
        assert metrics.macro_f1(ITEMS, num_classes=classes) == pytest.approx(expected)
    assert metrics.macro_f1(ITEMS) == metrics.macro_f1(ITEMS, num_classes=3)


def test_the_standard_error_of_macro_f1_is_that_of_resampled_documents() -> None:
    """1,000 draws of ours deviate by 2.2 % (1 / sqrt(2 draws)), 500 of the reference by 3.2 %: 16 % is 4 sigma, 1 in 10⁴."""
    rng = np.random.default_rng(1)
    gold = rng.integers(0, 3, 60)
    predicted = np.where(rng.random(60) < 0.7, gold, rng.integers(0, 3, 60))
    items = [(int(g), (int(p),)) for g, p in zip(gold, predicted, strict=True)]
    draws = []
    for _ in range(500):
        chosen = rng.integers(0, 60, 60)
        draws.append(f1_score(gold[chosen], predicted[chosen], average="macro", labels=range(3), zero_division=0))
    found = metrics.macro_f1_stderr(items, num_classes=3)
    assert found == pytest.approx(np.std(draws), rel=0.16)
    assert found == metrics.macro_f1_stderr(items, num_classes=3)


def test_metrics_are_registered_once() -> None:
    before = {name: registry.get_metric(name) for name in ("acc", "macro_f1", "acc_pmi", "acc_batch", "brier")}
    metrics.register_metrics()
    assert {name: registry.get_metric(name) for name in before} == before
    assert registry.is_higher_better("acc_pmi") is True
    assert registry.is_higher_better("brier") is False
    assert registry.get_metric_aggregation("macro_f1") is metrics.macro_f1
    assert registry.get_metric_aggregation("acc_batch") is registry.get_aggregation("mean")


# ------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("kind", ["natural", "probe"])
def test_the_results_are_plain_and_finite(lm: Any, kind: str) -> None:
    task = natural() if kind == "natural" else probe({"seeds": [0, 1], "n_per_class": 6})
    results = evaluate(lm, task)

    def check(value: Any, where: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                assert type(key) is str, where
                check(inner, f"{where}.{key}")
        elif isinstance(value, list | tuple):
            for inner in value:
                check(inner, where)
        else:
            assert type(value) in (str, int, float, bool, type(None)), f"{where}: {type(value)}"
            assert not isinstance(value, float) or math.isfinite(value), f"{where}: {value}"

    for key in ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "harness_ext"):
        check(results[key], key)
        json.dumps(results[key], allow_nan=False)
    for sample in samples(results, task.task_name):
        check({name: sample[name] for name in sample["metrics"]}, "sample")


@pytest.mark.parametrize("kind", ["natural", "probe"])
def test_every_metric_has_a_value_and_a_standard_error(lm: Any, kind: str) -> None:
    names = NATURAL_METRICS if kind == "natural" else ("acc", "macro_f1")
    found = evaluate(lm, natural() if kind == "natural" else probe())["results"][f"{kind}_films"]
    for name in names:
        assert 0 <= found[f"{name},none"] <= 2
        assert 0 < found[f"{name}_stderr,none"] < 0.5
    assert found["sample_len"] == 16


def test_one_document_has_no_standard_error(lm: Any) -> None:
    found = evaluate(lm, natural(), probe(), limit=1)["results"]
    for task in ("natural_films", "probe_films"):
        assert {value for name, value in found[task].items() if "_stderr," in name} == {"N/A"}


def test_no_bootstrap_no_standard_error(lm: Any) -> None:
    found = evaluate(lm, natural(), bootstrap_iters=0)["results"]["natural_films"]
    assert {value for name, value in found.items() if "_stderr," in name} == {"N/A"}


def test_a_standard_error_has_no_standard_error(lm: Any) -> None:
    results = evaluate(lm, natural())
    assert not [name for name in results["results"]["natural_films"] if "stderr_stderr" in name]
    assert "macro_f1_stderr" not in samples(results, "natural_films")[0]["metrics"]


def test_whether_higher_is_better_is_said_of_the_metrics(lm: Any) -> None:
    results = evaluate(lm, natural(), limit=2)
    assert results["higher_is_better"]["natural_films"] == {name: name != "brier" for name in NATURAL_METRICS}


def test_default_metrics_where_the_yaml_has_none(lm: Any) -> None:
    results = evaluate(lm, natural(metric_list=None), probe(metric_list=None), limit=3)
    for task in ("natural_films", "probe_films"):
        assert {"acc,none", "macro_f1,none"} <= set(results["results"][task])


# ------------------------------------------------------------------------------------------------- lm_eval's and evaluate's


def test_lm_evals_own_metrics(lm: Any, world: World) -> None:
    name = world.add_dataset("tests/forty", {"train": world.splits["train"], "test": reviews(40, seed=9)})
    task = natural(dataset_path=name, metric_list=metric_list("acc", "f1", "mcc", "brier_score", "brier"))
    results = evaluate(lm, task, bootstrap_iters=0)
    gold, predicted = predictions(results)
    found = results["results"]["natural_films"]
    assert 0 < sum(predicted) < 40
    assert found["f1,none"] == pytest.approx(f1_score(gold, predicted))
    assert found["mcc,none"] == pytest.approx(matthews_corrcoef(gold, predicted))
    assert found["brier_score,none"] == pytest.approx(found["brier,none"])


@pytest.mark.parametrize("kind", ["natural", "probe"])
def test_a_metric_script_of_the_evaluate_library(lm: Any, world: World, modules: Path, kind: str) -> None:
    path = modules / f"our_f1_{kind}.py"
    path.write_text(SCRIPT.format(name="OurF1", key=path.stem))
    entries = [*metric_list("acc"), {"metric": str(path), "hf_evaluate": True, "average": "macro"}]
    name = world.add_dataset("tests/forty", {"train": world.splits["train"], "test": reviews(40, seed=9)})
    make = natural if kind == "natural" else probe
    results = evaluate(lm, make(dataset_path=name, metric_list=entries))
    found = results["results"][f"{kind}_films"]
    if kind == "natural":
        gold, predicted = predictions(results)
        assert found[f"{path},none"] == pytest.approx(f1_score(gold, predicted, average="macro"))
    reference = evaluate(lm, make(dataset_path=name, metric_list=metric_list("macro_f1")))
    assert found[f"{path},none"] == pytest.approx(reference["results"][f"{kind}_films"]["macro_f1,none"])
    assert results["higher_is_better"][f"{kind}_films"][str(path)] is True


@pytest.mark.parametrize("kind", ["natural", "probe"])
def test_a_metric_of_the_evaluate_library_may_have_a_name_that_lm_eval_has(
    lm: Any, modules: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = modules / "f1.py"
    path.write_text(SCRIPT.format(name="F1", key="f1"))
    load = evaluate_library.load
    monkeypatch.setattr(evaluate_library, "load", lambda name: load(str(path) if name == "f1" else name))
    entries = [{"metric": "f1", "hf_evaluate": True, "average": "macro"}, *metric_list("macro_f1")]
    found = evaluate(lm, (natural if kind == "natural" else probe)(metric_list=entries))["results"][f"{kind}_films"]
    assert found["f1,none"] == pytest.approx(found["macro_f1,none"])


def test_a_metric_script_over_several_seeds_is_the_mean_over_them(lm: Any, world: World, modules: Path) -> None:
    path = modules / "our_f1_seeds.py"
    path.write_text(SCRIPT.format(name="OurF1", key="something_else"))
    entries = [{"metric": str(path), "hf_evaluate": True, "average": "macro"}, *metric_list("macro_f1")]
    rows = reviews(60, seed=2, noise=0.5)
    name = world.add_dataset("tests/metric_noise", {"train": rows[:40], "test": rows[40:]})
    results = evaluate(lm, probe({"n_per_class": 6, "seeds": [0, 1, 2]}, dataset_path=name, metric_list=entries))
    found = results["results"]["probe_films"]
    assert len({run["acc"] for run in report(results, "probe_films")["prompts"][0]["probes"]}) > 1
    assert found[f"{path},none"] == pytest.approx(found["macro_f1,none"])
