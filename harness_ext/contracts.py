"""Frozen data that crosses the layers of harness_ext. Imports numpy only.

A language model is a pair (f, Φ): `f(s)` is the state of prompt s at its last token, Φ the output embedding, and
p_f(·|s) = softmax(Φ f(s) + b). A task asks the engine for log-probabilities of continuations and for states, and the
engine answers each request with one `PromptStates`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = [
    "LAST_LAYER",
    "Feature",
    "FeatureSource",
    "PromptRequest",
    "PromptStates",
    "Span",
]

LAST_LAYER = "last"
"""The input of the output embedding, after the final norm: f(s)."""


class Span(NamedTuple):
    """Characters `start` (included) to `end` (excluded) of a string."""

    start: int
    end: int


class Feature(NamedTuple):
    """Which vector of a forward pass is wanted.

    Attributes:
        layer: `LAST_LAYER` for f(s), or an index into transformers' `hidden_states`: 0 is the embedding, k the output of
            block k. Negative indices count from the end, so -1 is the last entry of `hidden_states`.
        pooling: "last" for the state of the last token, "mean" for the mean over all tokens of the prompt.
    """

    layer: str | int = LAST_LAYER
    pooling: str = "last"

    @property
    def name(self) -> str:
        """A short name that is safe in file names, such as `last.last` or `6.mean`."""
        return f"{self.layer}.{self.pooling}"


@dataclass(frozen=True)
class PromptRequest:
    """What a task asks about one prompt; the second argument of a `prompt_states` request.

    Attributes:
        continuations: Strings whose log-probability after the prompt is wanted, each with its own leading blank.
        features: Vectors wanted for the prompt.
        document: Where the document stands in the prompt. A prompt that is longer than the model's context loses the
            beginning of its document and nothing else. None: the prompt may not be cut.
    """

    continuations: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()
    document: Span | None = None

    def to_argument(self) -> dict[str, Any]:
        """Return plain JSON types, for lm_eval's `Instance.arguments`, which ends up in the samples file."""
        return {
            "continuations": list(self.continuations),
            "features": [list(feature) for feature in self.features],
            "document": None if self.document is None else list(self.document),
        }

    @classmethod
    def from_argument(cls, argument: Mapping[str, Any]) -> PromptRequest:
        """Inverse of `to_argument`."""
        document = argument["document"]
        return cls(
            continuations=tuple(argument["continuations"]),
            features=tuple(Feature(*feature) for feature in argument["features"]),
            document=None if document is None else Span(*document),
        )


class FeatureSource(Protocol):
    """Where the vectors of a run are kept."""

    def take(self, rows: Sequence[int], feature: Feature) -> np.ndarray:
        """Return float32 of shape (len(rows), d)."""
        ...


@dataclass(frozen=True)
class PromptStates:
    """The engine's answer to one request.

    lm_eval writes answers into the samples file as text and sends them between processes, so vectors stay in `source`,
    which neither does `str` show nor `pickle` follow.

    Attributes:
        key: Hash of the prompt's token ids. Equal prompts have equal keys.
        log_probs: Natural-log probability of each continuation, in the order of the request.
        cut_tokens: How many tokens of the document did not fit the model's context.
        row: The prompt's row in `source`.
        source: The vectors; None where the model gives no states.
    """

    key: str
    log_probs: tuple[float, ...] = ()
    cut_tokens: int = 0
    row: int = -1
    source: FeatureSource | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return json.dumps(
            {"key": self.key, "log_probs": [round(value, 6) for value in self.log_probs], "cut_tokens": self.cut_tokens}
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None, "row": -1}
