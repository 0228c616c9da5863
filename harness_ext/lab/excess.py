"""The exact excess loss of a model of a synthetic language: how far its predictions are from the language's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from harness_ext.lab.checkpoints import Estimate
from harness_ext.lab.languages.base import Language
from harness_ext.lab.languages.tokens import word_tokens

__all__ = ["ExactLoss", "Excess"]


class Excess(NamedTuple):
    """Losses of a model on a fixed set of documents, nats per token, ends of text counted.

    Attributes:
        excess: Mean of KL(p*(.|s) || p(.|s)) over the tokens' prefixes s.
        validation_loss: Mean of -log p(w|s), the tokens w as they stand there.
        tokens: Tokens counted.
    """

    excess: Estimate
    validation_loss: Estimate
    tokens: int


class ExactLoss:
    """Measures models against the language's own next-word distributions on documents.

    Tokens are those of `Language.tokenizer`. A document is read after an end of text, and its own is predicted.

    The excess is summed over the whole vocabulary at every place, not over the words that happen to stand there, so that its
    standard error is that of the choice of prefixes alone: several times smaller than that of a difference of two
    cross-entropies.
    """

    def __init__(self, language: Language, documents: Sequence[Sequence[str]]) -> None:
        """Work out p* at every place.

        Args:
            language: Its tokens are the model's.
            documents: At least 2.

        Raises:
            ValueError: If there are fewer than 2 documents.
        """
        if len(documents) < 2:
            raise ValueError(f"expected at least 2 documents, got {len(documents)}")
        index = {word: number for number, word in enumerate(language.words)}
        # Sorted by length, so that batches have little padding.
        documents = sorted(documents, key=len)
        tokens = word_tokens(language, language.tokenizer(max_length=len(documents[-1]) + 1))
        encoded = tokens.encode([[index[word] for word in document] for document in documents])
        self._size, self._end = tokens.size, tokens.end_of_text
        self._tokens = [torch.from_numpy(row) for row in encoded]
        self._truth = [torch.from_numpy(np.asarray(rows)).float() for rows in language.next_words(documents)]
        # The token of each column of p*, at the first place and elsewhere; what no document begins with has probability 0.
        self._first = torch.from_numpy(np.append(np.where(tokens.first < 0, 0, tokens.first), tokens.end_of_text))
        self._later = torch.from_numpy(np.append(tokens.later, tokens.end_of_text))

    def __len__(self) -> int:
        return len(self._tokens)

    @torch.no_grad()
    def measure(self, model: PreTrainedModel, *, documents: int | None = None, batch_size: int = 128) -> Excess:
        """Measure a model, on every k-th document where only some are wanted.

        Args:
            model: A causal LM of the language's vocabulary; in eval mode afterwards.
            documents: About how many; all where None.
            batch_size: Documents in each forward pass; it changes the result by rounding only.

        Raises:
            ValueError: If the vocabulary or the context is too small.
        """
        longest = len(self._tokens[-1]) + 1
        context = getattr(model.config, "max_position_embeddings", None)
        if context is not None and longest > context:
            raise ValueError(
                f"the longest document has {longest} tokens with its end of text; the context is {context}"
            )
        if model.config.vocab_size < self._size:
            raise ValueError(
                f"the language has {self._size} tokens, the model {model.config.vocab_size}; they do not belong together"
            )
        model.eval()
        every = 1 if documents is None else max(1, len(self) // max(2, documents))
        chosen = range(0, len(self), every)
        sums = np.zeros((len(chosen), 3))
        for start in range(0, len(chosen), batch_size):
            rows = chosen[start : start + batch_size]
            sums[start : start + len(rows)] = self._sums(model, rows)
        return Excess(_ratio(sums[:, 0], sums[:, 2]), _ratio(sums[:, 1], sums[:, 2]), int(sums[:, 2].sum()))

    def _sums(self, model: PreTrainedModel, rows: Sequence[int]) -> np.ndarray:
        """Excess, loss and tokens of documents, (n, 3)."""
        end = torch.tensor([self._end])
        given = pad_sequence([torch.cat([end, self._tokens[row]]) for row in rows], batch_first=True)
        targets = pad_sequence([torch.cat([self._tokens[row], end]) for row in rows], batch_first=True)
        truth = pad_sequence([self._truth[row] for row in rows], batch_first=True).to(model.device)
        lengths = torch.tensor([len(self._tokens[row]) + 1 for row in rows])
        mask = torch.arange(given.shape[1]) < lengths[:, None]
        logits = model(
            input_ids=given.to(model.device), attention_mask=mask.long().to(model.device), use_cache=False
        ).logits.float()
        log_probs = logits.log_softmax(dim=-1)
        of_words = torch.cat([log_probs[:, :1, self._first], log_probs[:, 1:, self._later]], dim=1)
        # Padding rows of the truth are 0 and give 0. A model wastes what it gives to tokens that are no words.
        divergence = (torch.xlogy(truth, truth) - truth * of_words).sum(dim=-1)
        losses = -log_probs.gather(-1, targets.to(model.device)[..., None])[..., 0] * mask.to(model.device)
        columns = (divergence.double().sum(dim=1), losses.double().sum(dim=1), lengths)
        return np.stack([column.cpu().double().numpy() for column in columns], axis=1)


def _ratio(numerators: np.ndarray, denominators: np.ndarray) -> Estimate:
    value = numerators.sum() / denominators.sum()
    # Delta method for the ratio of two means.
    residuals = (numerators - value * denominators) / denominators.mean()
    return Estimate(float(value), float(residuals.std(ddof=1) / math.sqrt(len(numerators))))
