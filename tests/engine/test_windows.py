"""Windows of a text: lm_eval's rule token by token, and every byte exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tiny import tiny_tokenizer

from harness_ext.engine.windows import TextTokens, encode_text, windows_of_text

TOKENIZER = tiny_tokenizer()
PREFIX = 0


@given(count=st.integers(0, 40), length=st.integers(1, 12))
def test_windows_are_those_of_lm_eval(count: int, length: int) -> None:
    ids = list(range(100, 100 + count))
    ours = windows_of_text("", TextTokens(ids, None), length=length, prefix=PREFIX)
    theirs = [
        make_disjoint_window(pair)
        for pair in get_rolling_token_windows(ids, prefix_token=PREFIX, max_seq_len=length, context_len=1)
    ]
    assert [(window.tokens, window.targets) for window in ours] == [
        (tuple([*context, *targets][:-1]), tuple(targets)) for context, targets in theirs
    ]


@given(text=st.text(max_size=60), length=st.integers(1, 9))
@settings(max_examples=200)
def test_bytes_and_text_add_up(text: str, length: int) -> None:
    windows = list(windows_of_text(text, encode_text(TOKENIZER, text), length=length, prefix=PREFIX))
    assert "".join(window.text for window in windows) == text
    assert sum(window.num_bytes for window in windows) == len(text.encode())
    assert [token for window in windows for token in window.targets] == encode_text(TOKENIZER, text).ids


def test_a_character_split_between_windows_counts_in_the_second() -> None:
    text = "a€b"  # bytes of € are tokens of their own under the tiny tokenizer
    encoded = encode_text(TOKENIZER, text)
    assert len(encoded.ids) == 5
    windows = list(windows_of_text(text, encoded, length=2, prefix=PREFIX))
    assert [window.text for window in windows] == ["a", "€", "b"]
    assert [window.num_bytes for window in windows] == [1, 3, 1]


def test_without_offsets_bytes_are_shared_by_tokens() -> None:
    windows = list(windows_of_text("abcdef", TextTokens([5, 6, 7], None), length=2, prefix=PREFIX))
    assert [window.num_bytes for window in windows] == [4.0, 2.0]
    assert {window.text for window in windows} == {""}


@pytest.mark.parametrize("length", [2, 3, 10])
def test_the_end_is_predicted_and_stands_for_no_bytes(length: int) -> None:
    text = "abc"
    encoded = encode_text(TOKENIZER, text)
    windows = list(windows_of_text(text, encoded, length=length, prefix=PREFIX, end=9))
    assert [token for window in windows for token in window.targets] == [*encoded.ids, 9]
    assert sum(window.num_bytes for window in windows) == 3


def test_whole_windows_are_those_without_a_second_context() -> None:
    encoded = TextTokens([1, 2, 3, 4, 5], None)
    windows = list(windows_of_text("xxxxx", encoded, length=2, prefix=PREFIX))
    assert [window.is_whole for window in windows] == [True, True, False]
    assert windows[-1].tokens == (3, 4)
    # A text that is shorter than a window is whole.
    assert all(window.is_whole for window in windows_of_text("xxxxx", encoded, length=9, prefix=PREFIX))
