"""What a pass over many requests keeps, and that keeping it once changes no answer."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from harness_ext.contracts import CONDITIONAL_MEAN, Feature, PromptRequest, PromptStates, Span
from harness_ext.engine import answer as answer_module
from harness_ext.engine.answer import answer_requests
from harness_ext.engine.forward import LastStateModel
from harness_ext.engine.store import FeatureStore
from harness_ext.engine.tokens import PromptEncoder
from harness_ext.ranks import Ranks

F = Feature()
MEANS = Feature(mixture=CONDITIONAL_MEAN)
WORDS = (" great", " terrible", " outstanding work")


def run(texts: Sequence[str], requests: Sequence[PromptRequest], *, store: Path | None = None, **limits: Any):
    model = tiny_model("gpt2")
    return answer_requests(
        texts,
        requests,
        model=LastStateModel(model, device=torch.device("cpu")),
        encoder=PromptEncoder(tiny_tokenizer(), max_length=128, add_special_tokens=None, prefix_token_id=0),
        store=None if store is None else FeatureStore(store, "a" * 32, description="tiny"),
        **{"max_rows": 64, "max_tokens": 4096, **limits},
        progress=False,
    )


def texts_of(count: int) -> list[str]:
    letters = "abcdefghij"
    return [" ".join(letters[int(digit)] for digit in f"{i:04d}") for i in range(count)]


def same(first: PromptStates, second: PromptStates, features: Sequence[Feature]) -> None:
    assert first.key == second.key
    assert first.num_tokens == second.num_tokens
    assert first.log_probs == pytest.approx(second.log_probs, abs=1e-5)
    for feature in features:
        found, expected = (each.source.take([each.row], feature) for each in (first, second))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_requests_that_differ_about_equal_prompts_are_each_answered_as_if_alone(monkeypatch) -> None:
    monkeypatch.setattr(answer_module, "READOUT_ROWS", 3)
    monkeypatch.setattr(answer_module, "PUT_ROWS", 2)
    texts = ["the film is good", "x", "the film is good", "it was", "x", "the film is good is"]
    requests = [
        PromptRequest(WORDS[:2], (F,)),
        PromptRequest((), (MEANS,)),
        PromptRequest((WORDS[2], WORDS[0]), (Feature(1), MEANS)),
        PromptRequest(WORDS[1:]),
        PromptRequest(WORDS, one_token=True),
        PromptRequest((), (Feature(-1, "mean"),)),
    ]
    together, summary = run(texts, requests)
    assert (summary.prompts, summary.distinct_prompts) == (6, 4)
    for text, request, found in zip(texts, requests, together, strict=True):
        (alone,), _ = run([text], [request])
        if request.one_token:
            assert np.isnan(found.log_probs).tolist() == np.isnan(alone.log_probs).tolist()
            assert found.num_tokens == alone.num_tokens
        else:
            same(found, alone, request.features)


@pytest.mark.parametrize("stored", [(F,), (MEANS,)], ids=["f", "f and mixture"])
def test_what_the_store_has_of_some_prompts_is_completed(
    tmp_path: Path, stored: tuple[Feature, ...], monkeypatch
) -> None:
    """f(s) alone: mixtures and log-probabilities are made of it; with the mixture: log-probabilities are."""
    monkeypatch.setattr(answer_module, "READOUT_ROWS", 3)
    texts = texts_of(12)
    run(texts[3:10], [PromptRequest((), stored)] * 7, store=tmp_path)
    requests = [PromptRequest(WORDS, (F, MEANS))] * len(texts)
    completed, summary = run(texts, requests, store=tmp_path)
    assert summary.from_store == 7
    expected, _ = run(texts, requests)
    for found, wanted in zip(completed, expected, strict=True):
        same(found, wanted, (F, MEANS))


def test_rows_in_order_are_not_copied_and_rows_out_of_order_are() -> None:
    answers, _ = run(texts_of(6), [PromptRequest((), (F,))] * 6)
    source, rows = answers[0].source, [answer.row for answer in answers]
    everything = source.take(rows, F)
    assert np.shares_memory(everything, source.take(rows[2:5], F))
    scattered = source.take([rows[4], rows[1], rows[4]], F)
    assert not np.shares_memory(everything, scattered)
    assert np.array_equal(scattered, everything[[4, 1, 4]])


def test_a_feature_that_was_not_asked_for_is_no_other_prompts() -> None:
    texts = texts_of(3)
    answers, _ = run(
        texts, [PromptRequest((), (F, Feature(1))), PromptRequest((), (F,)), PromptRequest((), (Feature(1),))]
    )
    assert answers[0].source.take([answers[2].row], Feature(1)).shape == (1, answers[0].source.take([0], F).shape[1])
    with pytest.raises(KeyError, match="not asked for"):
        answers[0].source.take([answers[0].row, answers[1].row], Feature(1))


def test_a_request_keeps_little_beside_its_vectors() -> None:
    """Python objects of a further request that asks for what others ask: its prompt, its tokens, its answer.

    Counted in objects' bytes, which depend neither on speed nor on the allocator: 200 to 320 held afterwards, as Python has
    tuples and numbers to reuse, and 530 at the peak. With dictionaries and sets for each prompt
    it would be 440 or more and 2,570.
    """
    held, peak = [], []
    run(texts_of(50), [PromptRequest((), (F, MEANS))] * 50)  # what is imported and cached once
    for count in (1000, 3000):
        texts = texts_of(count)
        requests = [PromptRequest(WORDS[:2], (F, MEANS))] * count
        gc.collect()
        tracemalloc.start()
        answers, _ = run(texts, requests)
        gc.collect()
        size, high = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        dim = answers[0].source.take([answers[0].row], F).shape[1]
        held.append(size - 2 * 4 * dim * count)
        peak.append(high - 2 * 4 * dim * count)
    assert (held[1] - held[0]) / 2000 < HELD_BYTES
    assert (peak[1] - peak[0]) / 2000 < PEAK_BYTES


HELD_BYTES = 400
PEAK_BYTES = 1000


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda answer: pickle.loads(pickle.dumps(answer))])
def test_a_copied_answer_leaves_the_vectors_behind(duplicate) -> None:
    answers, _ = run(texts_of(2), [PromptRequest(WORDS, (F,))] * 2)
    found = duplicate(answers[1])
    assert found == PromptStates(answers[1].key, answers[1].log_probs, answers[1].num_tokens)
    assert (found.row, found.source) == (-1, None)
    assert str(found) == str(answers[1])
    assert not hasattr(found, "__dict__")


def test_equal_requests_share_their_argument() -> None:
    def request(end: int) -> PromptRequest:
        return PromptRequest((" good", " bad"), (F, Feature(1, "mean")), document=Span(0, end), one_token=True)

    assert request(1000).to_argument() is request(1000).to_argument()
    assert request(1000).to_argument() != request(1001).to_argument()
    for one in (request(3), PromptRequest()):
        assert PromptRequest.from_argument(one.to_argument()) == one
    assert PromptRequest.from_argument(request(3).to_argument()) is PromptRequest.from_argument(
        copy.deepcopy(request(3).to_argument())
    )


@pytest.mark.parametrize("features", [(), (F, Feature(1, "mean")), (MEANS,)], ids=["words", "layers", "mixture"])
def test_a_pass_that_was_broken_off_ends_with_the_very_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: tuple[Feature, ...]
) -> None:
    """Rounding depends on what is computed together, so the second run must not plan anew."""
    monkeypatch.setattr(answer_module, "READOUT_ROWS", 7)
    words = random.Random(0).choices(["a", "film", "the", "end", "good", "bad", "of", "is"], k=1000)
    texts = [" ".join(words[10 * i : 10 * i + 2 + i % 9]) for i in range(60)]
    requests = [PromptRequest(WORDS, features if i % 3 else ()) for i in range(len(texts))]
    limits = {"max_rows": 6, "max_tokens": 256}
    expected, whole = run(texts, requests, **limits)
    states = LastStateModel.states
    for after in (0, 1, 4):
        folder = tmp_path / str(after)
        calls = 0

        def break_off(*args, after: int = after):
            nonlocal calls
            calls += 1
            if calls > after:
                raise KeyboardInterrupt
            return states(*args)

        monkeypatch.setattr(LastStateModel, "states", break_off)
        with pytest.raises(KeyboardInterrupt):
            run(texts, requests, store=folder, **limits)
        monkeypatch.setattr(LastStateModel, "states", states)
        found, rest = run(texts, requests, store=folder, **limits)
        assert rest.from_store + rest.forwarded == whole.forwarded
        assert (rest.from_store > 0) == (after > 0)
        for one, other, request in zip(found, expected, requests, strict=True):
            assert one == other
            for feature in request.features:
                assert np.array_equal(one.source.take([one.row], feature), other.source.take([other.row], feature))


class Halves(Ranks):
    """Rank 0 of two of which the other computes nothing."""

    def share(self, value: Any) -> list[Any]:
        return [value, value]

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def gather_flags(self, flags: np.ndarray) -> np.ndarray:
        return np.stack([flags, flags])

    def counter(self) -> Callable[[int], int]:
        return lambda number: 2


def test_log_probabilities_that_no_rank_has_read_are_an_error_and_not_zero(monkeypatch) -> None:
    monkeypatch.setattr(answer_module, "READOUT_ROWS", 4)
    texts = texts_of(10_000)[::250]
    with pytest.raises(RuntimeError, match="read out by 0 ranks and not by one"):
        run(texts, [PromptRequest(WORDS[:1])] * 40, max_rows=4, ranks=Halves(0, 2))
