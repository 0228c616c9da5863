"""Between the words of a language and the tokens of its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from harness_ext.lab.languages.base import Language

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["WordTokens", "word_tokens"]


class WordTokens(NamedTuple):
    """Which tokens the words of a language are; GPT-2's tokenizers have one for a word with its blank, another without.

    Attributes:
        first: The token of each word at the beginning of a document, int64; -1 for a word that none begins with.
        later: Its token anywhere else.
        end_of_text: The token of the end of text.
        size: V, the number of tokens.
    """

    first: np.ndarray
    later: np.ndarray
    end_of_text: int
    size: int

    def encode(self, documents: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the tokens of documents, which are given as indices of words; int64, no end of text."""
        result = []
        for words in documents:
            tokens = self.later[np.asarray(words, dtype=np.int64)]
            if len(tokens):
                tokens[0] = self.first[words[0]]
            result.append(tokens)
        return result


def word_tokens(language: Language, tokenizer: PreTrainedTokenizerBase) -> WordTokens:
    """Find the token of each word.

    Raises:
        ValueError: If a word of the language is not one token of its own, or there is no end of text.
    """
    words = language.words
    end_of_text = tokenizer.eos_token_id
    if end_of_text is None:
        raise ValueError(f"expected a tokenizer of the language {language.name!r}, found one without an end of text")
    begins = language.next_word(())[:-1] > 0
    first = np.where(begins, _single_tokens(tokenizer, words), -1)
    later = _single_tokens(tokenizer, [f" {word}" for word in words])
    for tokens, used in ((first, begins), (later, np.ones(len(words), dtype=bool))):
        # What a tokenizer reads an unknown string as may be the end of text.
        wrong = used & (
            (tokens < 0)
            | np.isin(tokens, [end_of_text, end_of_text if tokenizer.unk_token_id is None else tokenizer.unk_token_id])
        )
        if wrong.any():
            raise ValueError(
                f"expected a tokenizer with one token for each word of the language {language.name!r}; it has none for "
                f"{words[int(wrong.argmax())]!r}. Take language.tokenizer(max_length=...)."
            )
    return WordTokens(first, later, end_of_text, len(tokenizer))


def _single_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> np.ndarray:
    """Return the token of each text, int64; -1 where it is not one token."""
    found = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return np.array([ids[0] if len(ids) == 1 else -1 for ids in found], dtype=np.int64)
