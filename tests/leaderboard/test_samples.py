"""Samples as they are kept: the reader gets from them what it gets from lm_eval's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from result_files import sample, write_samples

from harness_ext.leaderboard import untrusted
from harness_ext.leaderboard.samples import (
    TEXT_CHARACTERS,
    join_samples,
    read_documents,
    samples_lines,
    thin_samples,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "leaderboard"
METRICS = ["acc", "f1"]


def lines_of(content: bytes) -> list[Any]:
    return [untrusted.parse_json(line) for line in content.splitlines(keepends=True)]


def outcome(samples: Sequence[Mapping[str, Any]], filter_name: str) -> Any:
    """Samples and Documents, or why there are none."""
    try:
        return (
            join_samples(samples, METRICS, filter_name=filter_name, file="samples_x_1.jsonl"),
            read_documents(samples, filter_name=filter_name),
        )
    except ValueError as err:
        return str(err)


# Characters that JSON escapes, that end a line for str.splitlines, of four bytes, and lone surrogates.
texts = st.text(
    st.sampled_from('a é"\\\n\r\t\x00\x1f\x85\u2028\ufeff\U0001f600\ud800<'), max_size=30
) | st.sampled_from(
    ["x" * (TEXT_CHARACTERS - 1), "x" * TEXT_CHARACTERS, "é" * (TEXT_CHARACTERS + 1), "\U0001f600" * 2000]
)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    texts,
    st.sampled_from(["1", "0.5", "nan", "1e999"]),
)
nested = st.recursive(values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
scores = st.sampled_from([0.0, 1.0, 0, 1, 0.5, "1.0", 1 / 3, -0.0, 1e-300]) | values


@st.composite
def samples(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Samples as anyone may have written them; most can be used."""
    found: list[dict[str, Any]] = []
    for place in draw(st.permutations(range(draw(st.integers(0, 6))))):
        made: dict[str, Any] = {
            "doc_id": draw(st.sampled_from([place, float(place), str(place)])),
            "doc": draw(nested),
            "doc_hash": draw(st.sampled_from(["ab" * 32, "cd" * 32, f"{place:064d}"])),
            "target": draw(nested),
            "acc": draw(scores),
            "f1": draw(scores),
            "arguments": draw(nested),
        }
        if draw(st.booleans()):
            made["filter"] = draw(st.sampled_from(["none", "none", "none", "strict"]))
        for name in draw(st.sets(st.sampled_from([*made, "doc_hash", "f1"]), max_size=1)):
            if draw(st.integers(0, 3)) == 0:
                made[name] = draw(nested)
            elif name != "doc_id":
                made.pop(name)
        found.append(made)
    return found


@settings(max_examples=300, deadline=None, derandomize=True)
@given(samples(), st.sampled_from(["none", "strict"]))
@example([{"doc_id": 3, "doc": {"a": "short", "b": "longer"}, "acc": 1.0}], "none")
@example([{"doc_id": i, "doc": {"text": "the same text, twice there"}, "acc": i % 2} for i in range(3)], "none")
def test_thin_samples_are_read_as_the_whole_ones(made: list[dict[str, Any]], filter_name: str) -> None:
    # As a file says it: bare NaN is None, a lone surrogate stays one.
    whole = lines_of(b"".join(json.dumps(line).encode() + b"\n" for line in made))
    expected = outcome(whole, filter_name)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected)):
            thin_samples(whole, METRICS, filter_name=filter_name)
        return
    thin = thin_samples(whole, METRICS, filter_name=filter_name)
    assert outcome(lines_of(thin), filter_name) == expected
    # The same bytes whatever the order, and of what is thin already.
    assert thin_samples(whole[::-1], METRICS[::-1], filter_name=filter_name) == thin
    assert thin_samples(lines_of(thin), METRICS, filter_name=filter_name) == thin


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.rglob("samples_*.jsonl")), ids=lambda path: f"{path.parts[-2]}-{path.name}"
)
def test_files_of_lm_eval_are_read_the_same_and_are_a_fraction_of_the_size(path: Path, tmp_path: Path) -> None:
    whole = list(samples_lines(path))
    filter_name = whole[0].get("filter", "none")
    expected = outcome(whole, filter_name)
    assert isinstance(expected, tuple)
    assert expected[1]
    thin = tmp_path / "thin.jsonl"
    thin.write_bytes(thin_samples(whole, METRICS, filter_name=filter_name))
    assert outcome(list(samples_lines(thin)), filter_name) == expected
    assert thin.stat().st_size < 0.5 * path.stat().st_size


def test_what_a_line_has_is_bounded() -> None:
    hostile = sample(0, 1.0, "\x00" * 100_000) | {
        "target": ["x" * 100_000],
        "arguments": "x" * 100_000,
        "api_key": "secret",
        "x" * 1000: 1.0,
        "acc": 10**300,
    }
    (line,) = thin_samples([hostile], METRICS, filter_name="none").splitlines()
    assert set(json.loads(line)) == {"acc", "doc", "doc_hash", "doc_id", "target"}
    # Of four bytes at most a character, or "\u0000" and the like for one that JSON escapes.
    assert len(line) < 6 * TEXT_CHARACTERS + 1000


def test_a_line_has_hash_scores_target_and_text(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "samples.jsonl", [sample(1, 1.0, "A text of ordinary length."), sample(0, 0.5)])
    first, second = thin_samples(samples_lines(path), ["acc"], filter_name="none").decode().splitlines()
    assert json.loads(first)["acc"] == 0.5
    assert second == (
        '{"acc":1.0,"doc":{"text":"A text of ordinary length."},"doc_hash":'
        f'"{sample(1, 1.0, "A text of ordinary length.")["doc_hash"]}","doc_id":1,"target":"1"}}'
    )
    strict = thin_samples([sample(0, 1.0, filter="strict")], ["acc"], filter_name="strict")
    assert json.loads(strict)["filter"] == "strict"


def test_metrics_that_are_called_like_other_fields_are_left_out() -> None:
    made = [
        {"doc_id": 0, "doc": {"text": "a text"}, "doc_hash": "ab" * 32, "target": 1.0, "filter": "none", "acc": 1.0}
    ]
    names = ["acc", "doc_id", "target"]
    read = join_samples(made, names, filter_name="none", file="")
    assert read is not None
    assert list(read.metrics) == ["acc"]
    thin = [json.loads(line) for line in thin_samples(made, names, filter_name="none").splitlines()]
    assert join_samples(thin, names, filter_name="none", file="") == read
