"""Whatever comes from outside ends in a right result or one clear error; see `cases`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from fuzz import cases
from hypothesis import HealthCheck, settings
from worlds import World, a_world

from harness_ext.contracts import Span

EXAMPLES = {
    "scores": 120,
    "batches": 15,
    "templates": 500,
    "options": 400,
    "task_configs": 80,
    "corpus_configs": 60,
    "result_jsons": 250,
    "data_files": 50,
    "stores": 80,
}


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with a_world(tmp_path_factory.mktemp("world")) as made:
        yield made


def test_every_case_is_run() -> None:
    assert EXAMPLES.keys() == cases.CASES.keys()


@pytest.mark.parametrize("name", list(cases.CASES))
def test_the_same_examples_every_time(name: str) -> None:
    profile = settings(
        max_examples=EXAMPLES[name],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    profile(cases.CASES[name])()


TEXTS = {
    "combining marks": "e\u0301\u0301\u0323 a\u030a is",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 is",
    "right to left": "שלום مرحبا \u202eabc\u202c is",
    "NUL": "a\0b \0 is",
    "byte order mark": "\ufefftext is",
    "special tokens as text": "<eos> and <bos> or <pad> is",
    "blank": "  ",
    "empty": "",
}


@pytest.mark.parametrize("text", list(TEXTS))
@pytest.mark.parametrize("tokenizer", sorted(cases.TOKENIZERS))
def test_odd_texts_under_every_tokenizer(tokenizer: str, text: str) -> None:
    cases.check_scores(tokenizer, TEXTS[text], [" great", " terrible film", "\u0301", "👩‍👩‍👧‍👦"], document=None)


@pytest.mark.parametrize(
    ("tokenizer", "unit"),
    [
        *((tokenizer, "a") for tokenizer in sorted(cases.TOKENIZERS) if tokenizer not in ("BOS", "added tokens")),
        ("byte-level", "漢"),
        ("byte fallback, BOS", "é"),
        ("unigram", "great "),
    ],
)
def test_words_of_a_hundred_kilobytes(tokenizer: str, unit: str) -> None:
    """The document is cut to what fits; what cannot be cut is refused."""
    body = unit * (100_000 // len(unit.encode()))
    context = f"Review: {body} This movie is"
    lm = cases.language_model(tokenizer)
    request = cases.PromptRequest((" great",), document=Span(8, 8 + len(body)))
    (answer,) = cases.ask(tokenizer, [context], [request])
    length = len(lm.tokenizer(context, add_special_tokens=False)["input_ids"])
    assert (answer.cut_tokens > 0) == (length + 1 > lm.max_length)
    assert answer.log_probs[0] < 0
    with pytest.raises(ValueError, match="nothing can be cut") if answer.cut_tokens else contextlib.nullcontext():
        cases.ask(tokenizer, [context], [cases.PromptRequest((" great",))])
