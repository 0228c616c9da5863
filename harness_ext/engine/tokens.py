"""From prompts to token ids: exactly lm_eval's encoding where that is right, and a stated rule where it is not.

A context and a continuation are encoded together and the continuation is what follows the context, as lm_eval does, so
scores are comparable. Different from lm_eval: every text decides on its own whether it starts with BOS; a tokenizer that
appends EOS does not turn every continuation into EOS; a continuation whose first characters merge with the end of the
context is encoded alone instead of losing tokens; an over-long prompt loses the beginning of its document, never its
template.
"""

from __future__ import annotations

import bisect
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness_ext.contracts import PromptRequest, Span

__all__ = ["EncodedPrompt", "PromptEncoder", "refuse_unknown_ids"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

TEXTS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of one request.

    Attributes:
        context: At least one token id.
        continuations: Token ids of each continuation, at least one each.
        cut_tokens: Tokens that the document lost.
    """

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    cut_tokens: int


def refuse_unknown_ids(ids: Iterable[int], num_embeddings: int | None) -> None:
    """Refuse a tokenizer that is not the model's own, before its ids are looked up in the embedding.

    Raises:
        ValueError: If an id has no row among `num_embeddings`; None: they are not known.
    """
    largest = max(ids, default=-1)
    if num_embeddings is not None and largest >= num_embeddings:
        raise ValueError(
            f"The tokenizer gives token id {largest}, and the model has embeddings of 0 to {num_embeddings - 1}: they do not "
            "belong together. Give the model's own tokenizer, --model_args tokenizer=NAME."
        )


class PromptEncoder:
    """Encodes prompts for one model.

    Args:
        tokenizer: A transformers tokenizer, fast or slow.
        max_length: Most tokens that the model may see at once.
        add_special_tokens: lm_eval's `add_bos_token`; None leaves it to the tokenizer.
        prefix_token_id: What stands for an empty prompt, usually BOS; None where the tokenizer has neither BOS nor EOS.
        num_embeddings: Rows of the model's input embedding; None where they are not known.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int,
        add_special_tokens: bool | None,
        prefix_token_id: int | None,
        num_embeddings: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_embeddings = num_embeddings
        self.max_length = max_length
        self._special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        self._prefix_token_id = prefix_token_id
        self._known_ids: dict[int, int] = {}
        self._prefix_text = None if prefix_token_id is None else tokenizer.decode(prefix_token_id)
        self._appended = self._count_appended()
        self._merged_warned = False

    def _count_appended(self) -> int:
        """How many special tokens the tokenizer puts after a text (EOS, [SEP]): they are no part of a prompt."""
        special = self._call(["a"], **self._special)[0]
        plain = self._call(["a"], add_special_tokens=False)[0]
        for appended in range(len(special) - len(plain), 0, -1):
            if special[len(special) - appended - len(plain) : -appended] == plain:
                return appended
        return 0

    def _call(self, texts: list[str], **kwargs: Any) -> list[list[int]]:
        ids: list[list[int]] = []
        # In blocks, since a tokenizer returns a hundred bytes or more a token, of which the ids are a few.
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            # verbose=False: it would warn of texts longer than the model's context, which are cut later.
            found = self._tokenizer(
                texts[start : start + TEXTS_AT_ONCE], return_attention_mask=False, verbose=False, **kwargs
            )["input_ids"]
            # One object for each id that occurs, not one for each token.
            ids += [[self._known_ids.setdefault(token, token) for token in of_text] for of_text in found]
        refuse_unknown_ids(self._known_ids, self._num_embeddings)
        return ids

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts as prompts: BOS where the model's convention asks for it and the text does not bring it."""
        encoded: list[list[int]] = [[] for _ in texts]
        with_bos = [bool(self._prefix_text) and text.startswith(str(self._prefix_text)) for text in texts]
        for brings_bos in (False, True):
            chosen = [i for i, flag in enumerate(with_bos) if flag == brings_bos]
            if not chosen:
                continue
            kwargs = {"add_special_tokens": False} if brings_bos else self._special
            appended = 0 if kwargs.get("add_special_tokens") is False else self._appended
            for i, ids in zip(chosen, self._call([texts[i] for i in chosen], **kwargs), strict=True):
                encoded[i] = ids[: len(ids) - appended] if appended else ids
        return encoded

    def encode_requests(self, contexts: Sequence[str], requests: Sequence[PromptRequest]) -> list[EncodedPrompt]:
        """Encode every request's context and continuations, cutting documents that do not fit.

        Args:
            contexts: The prompts.
            requests: What is asked of each, of the same length.

        Raises:
            ValueError: If a prompt does not fit even without its document, or is empty and the model has no BOS or EOS.
        """
        reserved = self._reserve(requests)
        distinct = list(dict.fromkeys(contexts))
        ids_of = dict(zip(distinct, self.encode(distinct), strict=True))

        texts: list[str] = []
        cuts: list[int] = []
        for context, request in zip(contexts, requests, strict=True):
            limit = self.max_length - max((reserved[word] for word in request.continuations), default=0)
            before = len(ids_of[context])
            if before > limit:
                context = self._cut(context, request.document, limit)
                if context not in ids_of:
                    ids_of[context] = self.encode([context])[0]
            texts.append(context)
            cuts.append(before - len(ids_of[context]))

        pairs = list(
            dict.fromkeys(
                (text, word) for text, request in zip(texts, requests, strict=True) for word in request.continuations
            )
        )
        continuation_of = self._encode_continuations(pairs, ids_of)
        return [
            EncodedPrompt(
                context=self.or_prefix(ids_of[text], text),
                continuations=tuple(continuation_of[text, word] for word in request.continuations),
                cut_tokens=cut,
            )
            for text, request, cut in zip(texts, requests, cuts, strict=True)
        ]

    def _reserve(self, requests: Sequence[PromptRequest]) -> dict[str, int]:
        """Tokens to keep free for each continuation: all of it but the last token, which is never an input."""
        words = list(dict.fromkeys(word for request in requests for word in request.continuations))
        if not words:
            return {}
        # A continuation encoded alone is never shorter than after a context, but for merges across the boundary.
        return {
            word: max(len(ids) - 1, 0)
            for word, ids in zip(words, self._call(words, add_special_tokens=False), strict=True)
        }

    def or_prefix(self, ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Return the token ids of a text, or the prefix token where it has none."""
        if ids:
            return tuple(ids)
        if self._prefix_token_id is None:
            raise ValueError(
                f"The prompt {text!r} has no tokens, and the tokenizer has neither BOS nor EOS to stand for it. "
                "Give --model_args prefix_token_id=ID, or use a template with words in it."
            )
        return (self._prefix_token_id,)

    def _encode_continuations(
        self, pairs: list[tuple[str, str]], ids_of: dict[str, list[int]]
    ) -> dict[tuple[str, str], tuple[int, ...]]:
        whole = self.encode([text + word for text, word in pairs]) if pairs else []
        alone: dict[str, tuple[int, ...]] = {}
        result = {}
        for (text, word), ids in zip(pairs, whole, strict=True):
            context = ids_of[text]
            if context and len(ids) > len(context) and ids[: len(context)] == context:
                result[text, word] = tuple(ids[len(context) :])
                continue
            if word not in alone:
                alone[word] = tuple(self._call([word], add_special_tokens=False)[0])
                if not alone[word]:
                    raise ValueError(f"The label word {word!r} has no tokens under this model's tokenizer.")
            if context and not self._merged_warned:
                self._merged_warned = True
                logger.warning(
                    "The tokenizer merges the end of the prompt %r with the label word %r, so the word is encoded on its "
                    "own. Scores of such prompts are not comparable with lm_eval's; let the template end in a whole "
                    "word.",
                    text[-40:],
                    word,
                )
            result[text, word] = alone[word]
        return result

    def _cut(self, text: str, document: Span | None, limit: int) -> str:
        """Drop the beginning of the document, up to a word boundary, so that at most `limit` tokens remain."""
        if document is None:
            raise ValueError(
                f"A prompt has {len(self.encode([text])[0])} tokens, the model takes {limit}, and the template does not "
                f"show which part of it is the document, so nothing can be cut: {text[:60]!r}…. Use a template that "
                "prints the document unchanged, or a model with a longer context (--model_args max_length=N)."
            )
        head, body, tail = text[: document.start], text[document.start : document.end], text[document.end :]
        starts = [match.start() for match in re.finditer(r"\S+", body)]
        if len(starts) < 2:
            starts = list(range(len(body)))
        starts.append(len(body))

        def fits(start: int) -> bool:
            return len(self.encode([head + body[start:] + tail])[0]) <= limit

        first = bisect.bisect_left(starts, True, key=fits)
        if first == len(starts):
            raise ValueError(
                f"A prompt does not fit the model's {limit} tokens even without its document: {text[:60]!r}…. "
                "Use fewer few-shot examples (--num_fewshot), a shorter template, or a model with a longer context."
            )
        return head + body[starts[first] :] + tail
