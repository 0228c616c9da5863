"""One pass over all prompts of all tasks: encode, deduplicate, look up, forward what is missing, read out, answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from harness_ext.contracts import LAST_LAYER, Feature, PromptRequest, PromptStates
from harness_ext.engine.forward import LastStateModel
from harness_ext.engine.plan import NO_ROOT, Batch, Branch, SequenceTable, make_batches
from harness_ext.engine.store import FeatureStore
from harness_ext.engine.tokens import PromptEncoder

__all__ = ["RunSummary", "answer_requests"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

F_OF_S = Feature()

READOUT_ROWS = 1024
"""States collected before their log-probabilities are read out together."""


@dataclass(frozen=True)
class RunSummary:
    """What one pass did; goes into the results JSON.

    Attributes:
        documents: Documents asked about, counted once for each task.
        prompts: Requests.
        distinct_prompts: Different token sequences among the requests' prompts.
        word_continuations: Prompts continued by the first tokens of a multi-token label word.
        from_store: Sequences (prompts and continuations) whose states came from the store.
        forwarded: Sequences that were forwarded.
        tokens: Tokens forwarded, without padding; a continuation counts only its new tokens.
        padding: Padding tokens forwarded.
        cut_prompts: Prompts whose document was cut to fit the model's context.
        seconds: Wall-clock time of the pass, encoding and readout included.
    """

    documents: int
    prompts: int
    distinct_prompts: int
    word_continuations: int
    from_store: int
    forwarded: int
    tokens: int
    padding: int
    cut_prompts: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain types, with `tokens_per_second`."""
        rounded = {"seconds": round(self.seconds, 3), "tokens_per_second": round(self.tokens_per_second, 1)}
        return asdict(self) | rounded

    def __str__(self) -> str:
        continuations = f" + {self.word_continuations:,} word continuations" if self.word_continuations else ""
        cut = f"; {self.cut_prompts:,} documents cut to fit the context" if self.cut_prompts else ""
        return (
            f"prompts: {self.prompts:,} asked, {self.distinct_prompts:,} distinct{continuations}, "
            f"{self.from_store:,} from the store, {self.forwarded:,} forwarded; {self.tokens:,} tokens in "
            f"{self.seconds:.1f} s ({self.tokens_per_second:,.0f} tokens/s){cut}"
        )


class StateTable:
    """Vectors of a run, by sequence and feature, as float32."""

    def __init__(self, sequences_of: Mapping[Feature, Sequence[int]], num_hidden_states: int) -> None:
        self._num_hidden_states = num_hidden_states
        self._position = {
            feature: {sequence: i for i, sequence in enumerate(sequences)}
            for feature, sequences in sequences_of.items()
        }
        self._values: dict[Feature, np.ndarray] = {}

    def put(self, sequence: int, feature: Feature, vector: Tensor) -> None:
        """Keep a vector of shape (d,) if a task asked for it."""
        position = self._position.get(feature, {}).get(sequence)
        if position is None:
            return
        if feature not in self._values:
            self._values[feature] = np.empty((len(self._position[feature]), len(vector)), dtype=np.float32)
        self._values[feature][position] = vector.float().numpy()

    def take(self, rows: Sequence[int], feature: Feature) -> np.ndarray:
        """Return float32 of shape (len(rows), d), a copy."""
        feature = _resolve(feature, self._num_hidden_states)
        position = self._position[feature]
        return self._values[feature][[position[row] for row in rows]]


class _Pass:
    """The state of one pass; see `answer_requests`."""

    def __init__(
        self,
        model: LastStateModel,
        store: FeatureStore | None,
        contexts: Sequence[str],
        requests: Sequence[PromptRequest],
        encoder: PromptEncoder,
    ) -> None:
        self.model, self.store, self.contexts = model, store, contexts
        self.encoded = encoder.encode_requests(contexts, requests)
        self.features = [
            tuple(_resolve(feature, model.num_hidden_states) for feature in request.features) for request in requests
        ]
        self.table = SequenceTable()
        self.prompt_of = [self.table.add(prompt.context) for prompt in self.encoded]
        self.distinct_prompts = len(self.table)
        # For each request and continuation, the (sequence, token) pairs whose log-probabilities add up to its own.
        self.steps = [
            [
                [(self._continued(prompt, context, word[:position]), token) for position, token in enumerate(word)]
                for word in encoded.continuations
            ]
            for prompt, context, encoded in zip(
                self.prompt_of, (prompt.context for prompt in self.encoded), self.encoded, strict=True
            )
        ]
        self.tokens_wanted: dict[int, dict[int, int]] = {}
        for steps in self.steps:
            for sequence, token in (step for word in steps for step in word):
                tokens = self.tokens_wanted.setdefault(sequence, {})
                tokens.setdefault(token, len(tokens))
        self.features_wanted: dict[int, set[Feature]] = {sequence: {F_OF_S} for sequence in self.tokens_wanted}
        for prompt, features in zip(self.prompt_of, self.features, strict=True):
            self.features_wanted.setdefault(prompt, set()).update(features or {F_OF_S})
        self.states = StateTable(self._sequences_of_features(), model.num_hidden_states)
        self.log_probs: dict[int, np.ndarray] = {}
        self._unread: list[tuple[int, Tensor]] = []

    def _continued(self, prompt: int, context: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        return self.table.add(context + tokens, root=prompt) if tokens else prompt

    def _sequences_of_features(self) -> dict[Feature, list[int]]:
        result: dict[Feature, dict[int, None]] = {}
        for prompt, features in zip(self.prompt_of, self.features, strict=True):
            for feature in features:
                result.setdefault(feature, {})[prompt] = None
        return {feature: list(sequences) for feature, sequences in result.items()}

    def look_up(self) -> list[int]:
        """Take what the store has; return the sequences that are missing a wanted feature."""
        unknown = {sequence: set(wanted) for sequence, wanted in self.features_wanted.items()}
        if self.store is not None:
            for feature in sorted({feature for wanted in unknown.values() for feature in wanted}, key=str):
                sequences = [sequence for sequence, wanted in unknown.items() if feature in wanted]
                mask, raw = self.store.get(feature, [self.table.keys[sequence] for sequence in sequences])
                if raw is None:
                    continue
                found = [sequence for sequence, flag in zip(sequences, mask, strict=True) if flag]
                for sequence, vector in zip(found, _from_raw(raw), strict=True):
                    unknown[sequence].discard(feature)
                    self.states.put(sequence, feature, vector)
                    if feature == F_OF_S:
                        self._read_out_later(sequence, vector)
        self.read_out()
        return [sequence for sequence, wanted in unknown.items() if wanted]

    def forward(self, batch: Batch) -> None:
        """Forward a batch; its states go to the store and to the tasks, its log-probabilities are read out."""
        features = sorted(
            {feature for sequence in batch.sequences for feature in self.features_wanted[sequence]}, key=str
        )
        collected: dict[Feature, list[tuple[int, Tensor]]] = {}
        for part in _split_to_memory(self.model, batch, self.table.token_ids, features):
            for sequence, vectors in part.items():
                for feature in self.features_wanted[sequence] | {F_OF_S}:
                    vector = vectors[feature]
                    self._check_finite(sequence, feature, vector)
                    collected.setdefault(feature, []).append((sequence, vector))
                    self.states.put(sequence, feature, vector)
                if sequence not in self.log_probs:
                    self._read_out_later(sequence, vectors[F_OF_S])
        if self.store is not None:
            for feature, rows in collected.items():
                keys = [self.table.keys[sequence] for sequence, _ in rows]
                self.store.add(feature, keys, _to_raw(torch.stack([vector for _, vector in rows])))
        if len(self._unread) >= READOUT_ROWS:
            self.read_out()

    def _read_out_later(self, sequence: int, vector: Tensor) -> None:
        if sequence in self.tokens_wanted:
            self._unread.append((sequence, vector))

    def read_out(self) -> None:
        """Turn collected states into log-probabilities."""
        for start in range(0, len(self._unread), READOUT_ROWS):
            rows = self._unread[start : start + READOUT_ROWS]
            tokens = [list(self.tokens_wanted[sequence]) for sequence, _ in rows]
            found = self.model.log_probs(torch.stack([vector for _, vector in rows]), tokens)
            for (sequence, _), values in zip(rows, found, strict=True):
                if bool(torch.isnan(values).any()):
                    raise ValueError(
                        f"{self._where(sequence)} has log-probabilities that are not numbers. {PRECISION_HINT}"
                    )
                self.log_probs[sequence] = values.double().numpy()
        self._unread.clear()

    def _check_finite(self, sequence: int, feature: Feature, vector: Tensor) -> None:
        if not bool(torch.isfinite(vector).all()):
            raise ValueError(
                f"{self._where(sequence)} has a state that is not finite (layer {feature.layer}, pooling "
                f"{feature.pooling}, dtype {str(vector.dtype).removeprefix('torch.')}). {PRECISION_HINT}"
            )

    def _where(self, sequence: int) -> str:
        root = self.table.roots[sequence]
        prompt = sequence if root == NO_ROOT else root
        text = self.contexts[self.prompt_of.index(prompt)] if prompt in self.prompt_of else "?"
        return f"The prompt {text if len(text) <= 200 else text[:90] + ' … ' + text[-90:]!r}"

    def answers(self) -> list[PromptStates]:
        return [
            PromptStates(
                key=self.table.keys[prompt].hex(),
                log_probs=tuple(
                    float(
                        sum(self.log_probs[sequence][self.tokens_wanted[sequence][token]] for sequence, token in word)
                    )
                    for word in steps
                ),
                cut_tokens=encoded.cut_tokens,
                row=prompt,
                source=self.states,
            )
            for prompt, encoded, steps in zip(self.prompt_of, self.encoded, self.steps, strict=True)
        ]


PRECISION_HINT = (
    "float16 overflows in many models: try --model_args dtype=bfloat16 or dtype=float32, and check that the weights "
    "themselves are finite."
)


def answer_requests(
    contexts: Sequence[str],
    requests: Sequence[PromptRequest],
    *,
    model: LastStateModel,
    encoder: PromptEncoder,
    store: FeatureStore | None,
    max_rows: int | None,
    max_tokens: int,
    batch_cost: int = 0,
    documents: Sequence[int] | None = None,
    progress: bool = True,
) -> tuple[list[PromptStates], RunSummary]:
    """Answer all requests with one forward of each distinct sequence that the store does not have.

    Args:
        contexts: The prompts.
        requests: What is asked of each prompt, of the same length.
        model: The evaluated model.
        encoder: Its tokenizer.
        store: Where states are kept; None: nowhere.
        max_rows: Most sequences in a batch; None: no limit.
        max_tokens: Most tokens in a batch, padding included.
        batch_cost: What one more batch costs, in tokens; see `plan.make_batches`.
        documents: How many documents each request completes, for the progress bar; None: one each.
        progress: Whether to show the bar.

    Returns:
        One answer a request, in order, and what was done.

    Raises:
        ValueError: If a state is not finite, a prompt does not fit the context, or a layer does not exist.
    """
    started = time.perf_counter()
    work = _Pass(model, store, contexts, requests, encoder)
    table, weights = work.table, documents if documents is not None else [1] * len(requests)
    documents_of: dict[int, int] = {}
    for prompt, weight in zip(work.prompt_of, weights, strict=True):
        documents_of[prompt] = documents_of.get(prompt, 0) + weight
    tokens = padding = 0
    try:
        missing = work.look_up()
        lengths = [len(ids) for ids in table.token_ids]
        batches = make_batches(
            lengths, table.roots, missing, max_rows=max_rows, max_tokens=max_tokens, batch_cost=batch_cost
        )
        total = sum(documents_of.values())
        left = sum(documents_of.get(sequence, 0) for sequence in missing)
        bar = tqdm(total=total, initial=total - left, unit="doc", desc="One pass", disable=not progress, smoothing=0.1)
        with bar:
            for batch in batches:
                work.forward(batch)
                real = sum(lengths[sequence] for sequence in batch.sequences)
                padding += len(batch.sequences) * lengths[batch.sequences[0]] - real
                tokens += real + sum(
                    lengths[branch.sequence] - lengths[table.roots[branch.sequence]] for branch in batch.branches
                )
                bar.update(sum(documents_of.get(sequence, 0) for sequence in batch.sequences))
            work.read_out()
    finally:
        if store is not None:
            store.close()
    summary = RunSummary(
        documents=sum(weights),
        prompts=len(requests),
        distinct_prompts=work.distinct_prompts,
        word_continuations=len(table) - work.distinct_prompts,
        from_store=len(table) - len(missing),
        forwarded=len(missing),
        tokens=tokens,
        padding=padding,
        cut_prompts=sum(prompt.cut_tokens > 0 for prompt in work.encoded),
        seconds=time.perf_counter() - started,
    )
    return work.answers(), summary


def _resolve(feature: Feature, num_hidden_states: int) -> Feature:
    """Count negative layers from the end, so that one vector has one name in the store."""
    if feature.layer == LAST_LAYER:
        return feature
    layer = int(feature.layer)
    if not -num_hidden_states <= layer < num_hidden_states:
        raise ValueError(
            f"layer {layer}: the model has hidden states 0 (embedding) to {num_hidden_states - 1}; "
            f'give one of them, a negative index, or "{LAST_LAYER}".'
        )
    return feature._replace(layer=layer % num_hidden_states)


def _to_raw(states: Tensor) -> np.ndarray:
    """The bits of a tensor as numpy, which has no bfloat16."""
    return states.view(torch.uint16).numpy() if states.dtype == torch.bfloat16 else states.numpy()


def _from_raw(raw: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(raw)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def _split_to_memory(
    model: LastStateModel, batch: Batch, token_ids: Sequence[tuple[int, ...]], features: Sequence[Feature]
) -> Iterator[dict[int, dict[Feature, Tensor]]]:
    """Forward a batch, in halves where it does not fit the memory."""
    try:
        found = model.states(batch, token_ids, features)
    except RuntimeError as err:  # torch.OutOfMemoryError is one, and so is the CPU allocator's error
        out_of_memory = isinstance(err, torch.OutOfMemoryError) or "can't allocate memory" in str(err)
        if not out_of_memory or len(batch.sequences) == 1:
            raise
    else:
        yield found
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(batch.sequences) // 2
    logger.warning(
        "A batch of %d prompts does not fit the memory; trying %d. A smaller --batch_size avoids this.",
        len(batch.sequences),
        half,
    )
    first = tuple(branch for branch in batch.branches if branch.row < half)
    second = tuple(Branch(branch.sequence, branch.row - half) for branch in batch.branches if branch.row >= half)
    yield from _split_to_memory(model, Batch(batch.sequences[:half], first), token_ids, features)
    yield from _split_to_memory(model, Batch(batch.sequences[half:], second), token_ids, features)
