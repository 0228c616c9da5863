"""Frozen data that crosses the layers of harness_ext. Imports numpy only.

A language model is a pair (f, Φ): `f(s)` is the state of prompt s at its last token, Φ the output embedding, and
p_f(·|s) = softmax(Φ f(s) + b). A task asks the engine for log-probabilities of continuations and for states, and the
engine answers each request with one `PromptStates`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = [
    "ALL_LAYERS",
    "CONDITIONAL_MEAN",
    "LAST_LAYER",
    "RANDOM_PROJECTION",
    "Feature",
    "FeatureSource",
    "PromptRequest",
    "PromptStates",
    "Span",
    "TokenStates",
    "WindowAnswer",
    "WindowRequest",
]

LAST_LAYER = "last"
"""The input of the output embedding, after the final norm: f(s)."""

ALL_LAYERS = "all"
"""As the layer of a requested feature: every hidden state, from the embedding to the last."""

CONDITIONAL_MEAN = "conditional_mean"
"""Mixture Φᵀp_f(·|s): the conditional mean features."""

RANDOM_PROJECTION = "random_projection"
"""Mixture Rᵀp_f(·|s), R of shape (V, d) a Gaussian matrix with orthonormalised columns: the control for Φ."""


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
        mixture: Empty for the state itself; `CONDITIONAL_MEAN` or `RANDOM_PROJECTION` for what f(s) says about the next token,
            mixed with that matrix. Of f(s) only, so the layer is `LAST_LAYER` and the pooling "last".
    """

    layer: str | int = LAST_LAYER
    pooling: str = "last"
    mixture: str = ""

    @property
    def name(self) -> str:
        """A short name that is safe in file names, such as `last.last`, `6.mean` or `last.last.conditional_mean`."""
        return f"{self.layer}.{self.pooling}" + (f".{self.mixture}" if self.mixture else "")


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """What a task asks about one prompt; the second argument of a `prompt_states` request.

    Attributes:
        continuations: Strings whose log-probability after the prompt is wanted, each with its own leading blank.
        features: Vectors wanted for the prompt.
        document: Where the document stands in the prompt. A prompt that is longer than the model's context loses the
            beginning of its document and nothing else. None: the prompt may not be cut.
        one_token: Whether continuations of more than one token are left unscored, NaN, instead of being scored exactly by a
            forward of their first tokens.
    """

    continuations: tuple[str, ...] = ()
    features: tuple[Feature, ...] = ()
    document: Span | None = None
    one_token: bool = False

    def to_argument(self) -> dict[str, Any]:
        """Return plain JSON types, for lm_eval's `Instance.arguments`, which ends up in the samples file.

        Not to be written to: equal requests have one.
        """
        return _argument(self)

    @classmethod
    def from_argument(cls, argument: Mapping[str, Any]) -> PromptRequest:
        """Inverse of `to_argument`."""
        document = argument["document"]
        request = cls(
            continuations=tuple(argument["continuations"]),
            features=tuple(Feature(*feature) for feature in argument["features"]),
            document=None if document is None else Span(*document),
            one_token=bool(argument["one_token"]),
        )
        return _interned(request)


# The requests of a task ask for the same few things of many thousand documents, which differ in their length only: each is kept
# once. Documents of a language have a few thousand lengths.


@functools.lru_cache(maxsize=8192)
def _interned(request: PromptRequest) -> PromptRequest:
    return request


@functools.lru_cache(maxsize=8192)
def _argument(request: PromptRequest) -> dict[str, Any]:
    return {
        "continuations": _listed(request.continuations),
        "features": _listed(request.features),
        "document": None if request.document is None else list(request.document),
        "one_token": request.one_token,
    }


@functools.lru_cache(maxsize=1024)
def _listed(values: tuple[Any, ...]) -> list[Any]:
    return [list(value) if isinstance(value, tuple) else value for value in values]


class TokenStates(NamedTuple):
    """An unlabelled text as the model sees it: `states[t]` is f of its first t + 1 tokens.

    Attributes:
        token_ids: int64 of shape (T,).
        states: float32 of shape (T, d).
    """

    token_ids: np.ndarray
    states: np.ndarray


class FeatureSource(Protocol):
    """The vectors of a run, and the model that gave them."""

    def take(self, rows: Sequence[int], feature: Feature) -> np.ndarray:
        """Return float32 of shape (len(rows), d); the feature was asked for in the requests of these rows."""
        ...

    def gram(self) -> np.ndarray:
        """Return ΦᵀΦ, float64 of shape (d, d).

        Raises:
            TypeError: If the model's output embedding is not affine.
        """
        ...

    @property
    def has_output_bias(self) -> bool:
        """Whether the output embedding has a bias, which is part of p_f and no part of Φ."""
        ...

    def probabilities(self, rows: Sequence[int]) -> np.ndarray:
        """Return p_f(·|s), float32 of shape (len(rows), V), for a few hundred rows; f(s) was asked for."""
        ...

    def output_embedding(self) -> np.ndarray:
        """Return Φ, float32 of shape (V, d); raises as `gram`."""
        ...

    def text_states(self, texts: Sequence[str]) -> Iterator[TokenStates]:
        """Forward texts and yield the states of all their tokens; a text beyond the model's context loses its beginning."""
        ...

    @property
    def num_hidden_states(self) -> int:
        """Number of layers of `ALL_LAYERS`."""
        ...

    @property
    def device(self) -> str:
        """Where features may be fitted, as torch names it: where the model computes, if that has float64."""
        ...


@dataclass(frozen=True, slots=True)
class PromptStates:
    """The engine's answer to one request.

    lm_eval writes answers into the samples file as text and sends them between processes, so vectors stay in `source`,
    which neither does `str` show nor `pickle` follow.

    Attributes:
        key: Hash of the prompt's token ids. Equal prompts have equal keys.
        log_probs: Natural-log probability of each continuation, in the order of the request; NaN for one left unscored.
        num_tokens: Tokens of each continuation; empty where the model does not say.
        cut_tokens: How many tokens of the document did not fit the model's context.
        row: The prompt's row in `source`.
        source: The vectors; None where the model gives no states.
    """

    key: str
    log_probs: tuple[float, ...] = ()
    num_tokens: tuple[int, ...] = ()
    cut_tokens: int = 0
    row: int = -1
    source: FeatureSource | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        rounded = [None if math.isnan(value) else round(value, 6) for value in self.log_probs]
        return json.dumps({"key": self.key, "log_probs": rounded, "cut_tokens": self.cut_tokens})

    def __reduce__(self) -> tuple[Any, ...]:
        return PromptStates, (self.key, self.log_probs, self.num_tokens, self.cut_tokens)


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """A window of a corpus; the second argument of a `window_losses` or `window_flatness` request.

    Attributes:
        tokens: What the model reads.
        targets: What it has to predict at its last `len(targets)` positions.
        number: The window's place in its corpus.
        options: Options of the flatness of the task's windows, all the same; None for losses.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    number: int
    options: Mapping[str, Any] | None = None

    def to_argument(self) -> dict[str, Any]:
        """Return plain JSON types, for lm_eval's `Instance.arguments`, which ends up in the samples file."""
        return {
            "tokens": list(self.tokens),
            "targets": list(self.targets),
            "number": self.number,
            "options": None if self.options is None else dict(self.options),
        }

    @classmethod
    def from_argument(cls, argument: Mapping[str, Any]) -> WindowRequest:
        """Inverse of `to_argument`."""
        return cls(
            tokens=tuple(argument["tokens"]),
            targets=tuple(argument["targets"]),
            number=int(argument["number"]),
            options=argument["options"],
        )


@dataclass(frozen=True)
class WindowAnswer:
    """The engine's answer about one window.

    Attributes:
        values: Means over the window's scored tokens, by name, such as `loss` in nats; None for a window that was not measured.
        run: What was done for all windows of the task, plain JSON types.
    """

    values: Mapping[str, float] | None
    run: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return json.dumps(None if self.values is None else dict(self.values))
