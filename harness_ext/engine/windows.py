"""A corpus cut into windows: each token is predicted once, from the tokens before it in its window.

Pure: token ids in, windows out. The rule is that of lm_eval's rolling log-likelihood: the first token of a text is predicted
from a prefix token, and each later window starts with the last token of the one before it. A last window that is short of
tokens looks further back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["TextTokens", "Window", "encode_text", "windows_of_text"]


class TextTokens(NamedTuple):
    """A text as a tokenizer sees it.

    Attributes:
        ids: Token ids without special tokens.
        starts: For each token the character at which it starts, never decreasing; None where the tokenizer does not say.
    """

    ids: list[int]
    starts: list[int] | None


class Window(NamedTuple):
    """One input of a model.

    Attributes:
        tokens: What the model reads.
        targets: What it has to predict at its last `len(targets)` positions.
        num_bytes: UTF-8 bytes of the text that the targets stand for; a character that is split between two windows counts in
            the second. A share of the text's bytes where the tokenizer does not say which characters a token has.
        text: That text; empty in the second case.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    num_bytes: float
    text: str

    @property
    def is_whole(self) -> bool:
        """Whether every position is scored."""
        return len(self.tokens) == len(self.targets)


def encode_text(tokenizer: Any, text: str) -> TextTokens:
    """Encode a text of any length, without special tokens."""
    has_offsets = bool(getattr(tokenizer, "is_fast", False))
    # verbose=False: the tokenizer would warn of a text longer than the model's context.
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=has_offsets,
        verbose=False,
    )
    if not has_offsets:
        return TextTokens(list(encoded["input_ids"]), None)
    starts, latest = [], 0
    for start, _ in encoded["offset_mapping"]:
        latest = max(latest, start)
        starts.append(latest)
    return TextTokens(list(encoded["input_ids"]), starts)


def windows_of_text(
    text: str, encoded: TextTokens, *, length: int, prefix: int, end: int | None = None
) -> Iterator[Window]:
    """Cut one text.

    Args:
        text: The text.
        encoded: Its tokens.
        length: Most tokens that the model reads at once.
        prefix: Token that stands before the text, usually BOS.
        end: Token that is predicted after the text's last one, or None. It stands for no bytes.
    """
    ids = [*encoded.ids, end] if end is not None else encoded.ids
    for first in range(0, len(ids), length):
        last = min(first + length, len(ids))
        # The last window of several reads as many tokens as the others.
        begin = first if first == 0 or last - first == length else last - length
        tokens = [prefix, *ids[: last - 1]] if begin == 0 else ids[begin - 1 : last - 1]
        if encoded.starts is None:
            num_text = min(last, len(encoded.ids)) - first
            piece, num_bytes = "", len(text.encode()) * num_text / max(len(encoded.ids), 1)
        else:
            start = 0 if first == 0 else _start(encoded.starts, first, text)
            piece = text[start : _start(encoded.starts, last, text)]
            num_bytes = float(len(piece.encode("utf-8", errors="surrogatepass")))
        yield Window(tuple(tokens), tuple(ids[first:last]), num_bytes, piece)


def _start(starts: Sequence[int], position: int, text: str) -> int:
    return starts[position] if position < len(starts) else len(text)
