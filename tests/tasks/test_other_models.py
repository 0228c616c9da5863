"""Models that give no states: natural tasks by their `loglikelihood`, probes refused before any work."""

from __future__ import annotations

import logging
import math
import zlib
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from worlds import NATURAL_METRICS, World, evaluate, natural, probe, report, samples, stock_task

pytestmark = pytest.mark.usefixtures("world")


class Scorer(LM):
    """Answers with a number that depends on the pair alone, and counts what it is asked."""

    def __init__(self, special: dict[str, float] | None = None) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []
        self.special = special or {}

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        self.asked += [request.args for request in requests]
        return [(self.score(*request.args), False) for request in requests]

    def score(self, context: str, word: str) -> float:
        return self.special.get(word, -1.0 - zlib.crc32(f"{context}|{word}".encode()) / 2**29)

    def loglikelihood_rolling(self, requests: list[Any]) -> Any:
        raise AssertionError

    def generate_until(self, requests: list[Any]) -> Any:
        raise AssertionError


def test_natural_tasks_run_by_loglikelihood(world: World) -> None:
    model = Scorer()
    results = evaluate(model, natural(metadata={"prompt": "films/several"}))
    premise = samples(results, "natural_films")[0]["resps"][1][0]
    for sample, doc in zip(samples(results, "natural_films"), world.splits["test"], strict=True):
        answer = sample["resps"][0][0]
        context = f"Review: {doc['text']} It was"
        words = [" bad", " terrible", " good", " fine"]
        assert answer.log_probs == tuple(model.score(context, word) for word in words)
        assert premise.log_probs == tuple(model.score("Review: It was", word) for word in words)
        raw = [sum(map(math.exp, answer.log_probs[:2])), sum(map(math.exp, answer.log_probs[2:]))]
        bare = [sum(map(math.exp, premise.log_probs[:2])), sum(map(math.exp, premise.log_probs[2:]))]
        assert sample["acc"] == float((raw[1] > raw[0]) == bool(doc["label"]))
        assert sample["acc_pmi"] == float((raw[1] / bare[1] > raw[0] / bare[0]) == bool(doc["label"]))
    found = results["results"]["natural_films"]
    assert all(math.isfinite(found[f"{name},none"]) for name in NATURAL_METRICS)
    assert "harness_ext" not in results


def test_every_pair_is_asked_once(world: World) -> None:
    model = Scorer()
    evaluate(model, natural(), natural(task="natural_again"))
    texts = [f"{row['text']} This movie is" for row in world.splits["test"]]
    texts += ["This movie is", "N/A This movie is", "[MASK] This movie is"]
    assert sorted(model.asked) == sorted((text, word) for text in texts for word in (" terrible", " great"))


def test_the_dummy_model_of_lm_eval() -> None:
    results = evaluate("dummy", natural())
    assert 0 <= results["results"]["natural_films"]["acc,none"] <= 1


@pytest.mark.parametrize("cached", [False, True])
def test_a_probe_stops_before_any_model_work(world: World, tmp_path: Path, cached: bool) -> None:
    """Also where another task, whose requests come first, could run."""
    model = Scorer()
    options = {"use_cache": str(tmp_path / "responses")} if cached else {}
    with pytest.raises(TypeError, match=r"probe_films needs the model's hidden states.*--model hf"):
        evaluate(model, stock_task(world), natural(), probe(), **options)
    assert model.asked == []


def test_the_error_names_the_model_within_the_cache(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="which Scorer does not give"):
        evaluate(Scorer(), probe(), use_cache=str(tmp_path / "responses"))


def test_a_probe_alone_says_so_of_lm_evals_dummy() -> None:
    dummy = get_model("dummy")()
    with pytest.raises(TypeError, match=r"probe_films.*DummyLM.*--model hf.*natural_\*"):
        evaluate(dummy, probe())


def test_models_run_again_after_a_refusal(world: World) -> None:
    model = Scorer()
    with pytest.raises(TypeError):
        evaluate(model, probe())
    assert evaluate(model, natural(), limit=2)["n-samples"]["natural_films"]["effective"] == 2


def test_equal_scores_are_ties(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        results = evaluate(Scorer({" terrible": -3.0, " great": -3.0}), natural())
    assert results["results"]["natural_films"]["acc,none"] == 0.5
    assert report(results, "natural_films")["prompts"][0]["tied_documents"] == 16
    assert "degenerate, documents tied between classes: 16/16 under plain" in caplog.text


def test_a_premise_of_probability_zero_leaves_acc_pmi_out(caplog: pytest.LogCaptureFixture) -> None:
    class NoPremise(Scorer):
        def score(self, context: str, word: str) -> float:
            return -math.inf if context == "This movie is" and word == " great" else super().score(context, word)

    with caplog.at_level(logging.WARNING):
        results = evaluate(NoPremise(), natural())
    found = results["results"]["natural_films"]
    assert "acc_pmi,none" not in found
    (told,) = report(results, "natural_films")["prompts"]
    assert list(told["not_computed"]) == ["acc_pmi"]
    assert "acc_pmi" not in told["metrics"]
    assert "acc_pmi not computed" in caplog.text
    assert math.isfinite(found["acc,none"])


def test_a_class_of_probability_zero_costs_only_what_cannot_be_computed() -> None:
    results = evaluate(Scorer({" great": -math.inf}), natural())
    found = results["results"]["natural_films"]
    assert found["acc,none"] == 0.5  # all predictions are the other class
    assert "acc_batch,none" not in found


def test_a_document_of_probability_zero_keeps_the_report_finite(world: World) -> None:
    first = f"{world.splits['test'][0]['text']} This movie is"

    class NoFirst(Scorer):
        def score(self, context: str, word: str) -> float:
            return -math.inf if context == first and word == " great" else super().score(context, word)

    (told,) = report(evaluate(NoFirst(), natural()), "natural_films")["prompts"]
    assert all(value is None or math.isfinite(value) for value in told["mean_class_log_score"].values())


def test_scores_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(ValueError, match="is NaN"):
        evaluate(Scorer({" great": math.nan}), natural())


def test_a_cache_of_responses_is_used(tmp_path: Path) -> None:
    """On a paid API it saves the money of a second run."""
    cache = str(tmp_path / "responses")
    model = Scorer()
    first = evaluate(model, natural(), use_cache=cache)
    asked = len(model.asked)
    second = evaluate(model, natural(), use_cache=cache)
    assert len(model.asked) == asked
    assert second["results"] == first["results"]
