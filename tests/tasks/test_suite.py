"""All evaluators of a run together: one pass, no more than its largest part needs, and no fit made twice."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_tokenizer
from worlds import FEATURE_PROBES, World, evaluate, feature_probe, hf_model, natural, report

from harness_ext.evaluators import probe as probe_evaluator

WORDS = ["bad", "good", "fine", "terrible"]
"""One to three tokens under the tiny tokenizer."""

ONE_TOKEN = ["bad", "good", "great", "the", "film"]


@pytest.fixture(scope="module")
def lm(world: World) -> Any:
    return hf_model()


def ids(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]


# ------------------------------------------------------------------------------------------------- one pass


def suite(*kinds: str, words: list[str], **changes: Any) -> list[Any]:
    metadata = {"class_words": words[:2], "subset_words": words}
    return [natural(**changes), *(feature_probe(kind, metadata=metadata, **changes) for kind in kinds)]


def test_the_whole_suite_forwards_what_natural_and_probe_do(lm: Any) -> None:
    assert all(len(ids(f" {word}")) == 1 for word in ONE_TOKEN)
    (few,) = evaluate(lm, *suite("probe", words=ONE_TOKEN))["harness_ext"]["passes"]
    (all_of_them,) = evaluate(lm, *suite(*FEATURE_PROBES, words=ONE_TOKEN))["harness_ext"]["passes"]
    for key in ("distinct_prompts", "word_continuations", "forwarded", "tokens", "separate_tokens", "padding"):
        assert all_of_them[key] == few[key], key
    assert few["forwarded"] == 16 + 3 + 16 + 40 + few["word_continuations"]


def test_words_of_several_tokens_add_their_first_tokens_and_nothing_else(lm: Any, world: World) -> None:
    """`natural` needs some after its prompts; the words are asked for after bare documents."""
    (few,) = evaluate(lm, *suite("probe", words=WORDS))["harness_ext"]["passes"]
    (all_of_them,) = evaluate(lm, *suite(*FEATURE_PROBES, words=WORDS))["harness_ext"]["passes"]
    documents = {row["text"] for split in world.splits.values() for row in split}
    beginnings = {tuple(ids(f" {word}")[:k]) for word in WORDS for k in range(1, len(ids(f" {word}")))}
    assert all_of_them["distinct_prompts"] == few["distinct_prompts"]
    added = len(documents) * len(beginnings)
    assert all_of_them["forwarded"] - few["forwarded"] == added > 0
    assert all_of_them["word_continuations"] - few["word_continuations"] == added


def test_a_second_run_of_the_suite_forwards_nothing(lm: Any, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_EXT_CACHE", str(world.cache))
    first, second = (evaluate(lm, *suite(*FEATURE_PROBES, words=WORDS)) for _ in range(2))
    (summary,) = second["harness_ext"]["passes"]
    assert (summary["forwarded"], summary["tokens"]) == (0, 0)
    assert summary["from_store"] == first["harness_ext"]["passes"][0]["forwarded"]
    assert second["results"] == first["results"]
    # A part of it, too, and in another order.
    (summary,) = evaluate(lm, *suite("quad", "probe_full", words=WORDS))["harness_ext"]["passes"]
    assert summary["forwarded"] == 0


# ------------------------------------------------------------------------------------------------- fits


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of feature sets of each call of `fit_probes`."""
    calls: list[int] = []
    fit_probes = probe_evaluator.fit_probes

    def count(feature_sets: Any, *args: Any, **kwargs: Any) -> Any:
        fits = fit_probes(feature_sets, *args, **kwargs)
        calls.append(len(fits))
        return fits

    monkeypatch.setattr(probe_evaluator, "fit_probes", count)
    return calls


@pytest.mark.parametrize("kinds", [("probe", "probe_cmean"), ("probe_cmean", "probe")])
def test_the_reference_is_the_very_fit_of_the_probe(lm: Any, fitted: list[int], kinds: tuple[str, ...]) -> None:
    evaluate(lm, *(feature_probe(kind) for kind in kinds))
    assert fitted == [1, 1]


def test_every_other_kind_is_fitted_once(lm: Any, fitted: list[int]) -> None:
    evaluate(lm, *suite(*FEATURE_PROBES, words=WORDS))
    assert fitted == [1] * len(FEATURE_PROBES)


def test_what_is_fitted_otherwise_is_not_shared(lm: Any, fitted: list[int]) -> None:
    evaluate(lm, feature_probe("probe"), feature_probe("probe_cmean", {"c_grid": [0.1]}))
    assert fitted == [1, 1, 1]
    # Nor from run to run, where the model may be another.
    evaluate(lm, feature_probe("probe"))
    assert fitted == [1, 1, 1, 1]


def test_two_quad_tasks_of_a_run_keep_their_options(lm: Any) -> None:
    ridges = (0.0, 1e6)
    tasks = [
        feature_probe("quad", {"c_grid": [1e-3, 1.0]}, task=f"quad_{i}", metadata={"quad": {"ridge": ridge}})
        for i, ridge in enumerate(ridges)
    ]
    together = evaluate(lm, *tasks)
    for i, ridge in enumerate(ridges):
        alone = evaluate(lm, feature_probe("quad", {"c_grid": [1e-3, 1.0]}, metadata={"quad": {"ridge": ridge}}))
        (told,), (single,) = report(together, f"quad_{i}")["prompts"], report(alone, "quad_films")["prompts"]
        assert told["quad"] == single["quad"]
        assert told["probes"] == single["probes"]


def test_words_after_another_delimiter_have_fits_of_their_own(lm: Any, fitted: list[int]) -> None:
    tasks = [
        feature_probe(
            "probe_words", task=f"probe_words_{i}", target_delimiter=delimiter, metadata={"class_words": WORDS[:2]}
        )
        for i, delimiter in enumerate((" ", ""))
    ]
    evaluate(lm, *tasks)
    assert fitted == [1, 1, 1]
