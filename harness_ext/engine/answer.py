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

from harness_ext.contracts import ALL_LAYERS, LAST_LAYER, Feature, PromptRequest, PromptStates, TokenStates
from harness_ext.engine.forward import BatchStates, LastStateModel, is_out_of_memory
from harness_ext.engine.plan import SequenceTable, Tree, make_batches, share_prefixes
from harness_ext.engine.store import FeatureStore
from harness_ext.engine.tokens import PromptEncoder

__all__ = ["RunSummary", "answer_requests"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

F_OF_S = Feature()

READOUT_ROWS = 1024
"""States collected before their log-probabilities are read out together."""

TEXT_TOKENS = 4096
"""Tokens in a batch of whole texts, padding included."""


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
        tokens: Tokens forwarded, without padding; what several sequences share counts once where it was shared.
        separate_tokens: Tokens that separate forwards of the same sequences would have taken.
        sharing: How common beginnings were shared: "packed", "cached" or "separate" (see `engine.forward`), several joined by
            " and "; "none" where no two sequences begin alike.
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
    separate_tokens: int
    sharing: str
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
        shared = f" instead of {self.separate_tokens:,} ({self.sharing} prefixes)" if self.sharing != "none" else ""
        cut = f"; {self.cut_prompts:,} documents cut to fit the context" if self.cut_prompts else ""
        return (
            f"prompts: {self.prompts:,} asked, {self.distinct_prompts:,} distinct{continuations}, "
            f"{self.from_store:,} from the store, {self.forwarded:,} forwarded; {self.tokens:,} tokens{shared} in "
            f"{self.seconds:.1f} s ({self.tokens_per_second:,.0f} tokens/s){cut}"
        )


class StateTable:
    """The vectors of a run and the model that gave them; a `contracts.FeatureSource`."""

    def __init__(
        self, sequences_of: Mapping[Feature, Sequence[int]], model: LastStateModel, encoder: PromptEncoder
    ) -> None:
        self._model, self._encoder = model, encoder
        self._position = {
            feature: {sequence: i for i, sequence in enumerate(sequences)}
            for feature, sequences in sequences_of.items()
        }
        self._values: dict[Feature, np.ndarray] = {}

    def put(self, sequences: Sequence[int], feature: Feature, vectors: Tensor) -> None:
        """Keep those of the vectors (n, d) that a task asked for."""
        position = self._position.get(feature, {})
        kept = [row for row, sequence in enumerate(sequences) if sequence in position]
        if not kept:
            return
        if feature not in self._values:
            self._values[feature] = np.empty((len(position), vectors.shape[1]), dtype=np.float32)
        self._values[feature][[position[sequences[row]] for row in kept]] = vectors[kept].float().numpy()

    def take(self, rows: Sequence[int], feature: Feature) -> np.ndarray:
        """Return float32 of shape (len(rows), d), not to be written to: a copy only where the rows are scattered."""
        feature = _resolve(feature, self._model.num_hidden_states)
        of_row = self._position[feature]
        position = np.array([of_row[row] for row in rows], dtype=np.int64)
        values = self._values[feature]
        if len(position) and np.array_equal(position, np.arange(position[0], position[0] + len(position))):
            return values[position[0] : position[0] + len(position)]
        return values[position]

    def gram(self) -> np.ndarray:
        """Return ΦᵀΦ, float64 of shape (d, d); raises TypeError where the output embedding is not affine."""
        return self._model.readout.gram()

    def output_embedding(self) -> np.ndarray:
        """Return Φ, float32 of shape (V, d); raises as `gram`."""
        return np.asarray(self._model.readout.output_embedding().float().cpu().numpy())

    @property
    def has_output_bias(self) -> bool:
        """Whether the output embedding has a bias."""
        return self._model.readout.has_bias

    def probability_variances(self, rows: Sequence[int]) -> np.ndarray:
        """Return the variance over rows of p_f(w|s), float64 of shape (V,)."""
        return self._model.readout.variances(torch.from_numpy(self.take(rows, F_OF_S)))

    def probabilities(self, rows: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Return p_f of some tokens, float32 of shape (len(rows), len(tokens))."""
        return self._model.readout.probabilities(torch.from_numpy(self.take(rows, F_OF_S)), tokens)

    def text_states(self, texts: Sequence[str]) -> Iterator[TokenStates]:
        """Forward texts and yield the states of all their tokens, in order.

        A text that is longer than the model's context loses its beginning. These forwards are no part of the pass: they are in
        no summary and no store.
        """
        rows = [
            self._encoder.or_prefix(ids[-self._encoder.max_length :], text)
            for ids, text in zip(self._encoder.encode(texts), texts, strict=True)
        ]
        for batch in _batches_in_order(rows):
            for row, states in zip(batch, self._model.token_states(batch), strict=True):
                yield TokenStates(np.array(row, dtype=np.int64), states.float().numpy())

    @property
    def num_hidden_states(self) -> int:
        """Number of layers of `ALL_LAYERS`."""
        return self._model.num_hidden_states

    @property
    def device(self) -> str:
        """Where features may be fitted: where the model computes, if that has float64."""
        return "cpu" if self._model.device.type == "mps" else str(self._model.device)


def _batches_in_order(rows: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
    """Split rows into runs of at most `TEXT_TOKENS` tokens, padding included, or one row."""
    start = longest = 0
    for stop, row in enumerate(rows):
        longest = max(longest, len(row))
        if stop > start and longest * (stop + 1 - start) > TEXT_TOKENS:
            yield rows[start:stop]
            start, longest = stop, len(row)
    if rows:
        yield rows[start:]


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
            tuple(one for feature in request.features for one in _expanded(feature, model.num_hidden_states))
            for request in requests
        ]
        self.table = SequenceTable()
        self.prompt_of = [self.table.add(prompt.context) for prompt in self.encoded]
        self.distinct_prompts = len(self.table)
        # Prompts that are continued by the first tokens of a label word, by the sequence that this gives.
        self.continued_from: dict[int, int] = {}
        # For each request and continuation, the (sequence, token) pairs whose log-probabilities add up to its own; None
        # for one that is not wanted.
        self.steps: list[list[list[tuple[int, int]] | None]] = [
            [
                [
                    (self._continued(prompt, encoded.context, word[:position]), token)
                    for position, token in enumerate(word)
                ]
                if len(word) == 1 or not request.one_token
                else None
                for word in encoded.continuations
            ]
            for prompt, encoded, request in zip(self.prompt_of, self.encoded, requests, strict=True)
        ]
        self.tokens_wanted: dict[int, dict[int, int]] = {}
        for steps in self.steps:
            for sequence, token in (step for word in steps for step in word or ()):
                tokens = self.tokens_wanted.setdefault(sequence, {})
                tokens.setdefault(token, len(tokens))
        self.states_wanted: dict[int, set[Feature]] = {sequence: {F_OF_S} for sequence in self.tokens_wanted}
        self.mixtures_wanted: dict[int, set[Feature]] = {}
        for prompt, features in zip(self.prompt_of, self.features, strict=True):
            mixtures = {feature for feature in features if feature.mixture}
            plain = {feature for feature in features if not feature.mixture}
            self.states_wanted.setdefault(prompt, set()).update(plain or {F_OF_S}, {F_OF_S} if mixtures else ())
            if mixtures:
                self.mixtures_wanted.setdefault(prompt, set()).update(mixtures)
        self.states = StateTable(self._sequences_of_features(), model, encoder)
        self.log_probs: dict[int, np.ndarray] = {}
        self._unread: list[tuple[int, Tensor]] = []

    def _continued(self, prompt: int, context: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        if not tokens:
            return prompt
        sequence = self.table.add(context + tokens)
        self.continued_from.setdefault(sequence, prompt)
        return sequence

    def _sequences_of_features(self) -> dict[Feature, list[int]]:
        result: dict[Feature, dict[int, None]] = {}
        for prompt, features in zip(self.prompt_of, self.features, strict=True):
            for feature in features:
                result.setdefault(feature, {})[prompt] = None
        return {feature: list(sequences) for feature, sequences in result.items()}

    def look_up(self) -> list[int]:
        """Take what the store has; return the sequences that are missing a wanted state."""
        unknown = {sequence: set(wanted) for sequence, wanted in self.states_wanted.items()}
        f_of_s: list[tuple[list[int], Tensor]] = []
        for wanted in (self.mixtures_wanted, unknown):
            for feature in sorted({feature for features in wanted.values() for feature in features}, key=str):
                sequences = [sequence for sequence, features in wanted.items() if feature in features]
                found, vectors = self._stored(feature, sequences)
                for sequence in found:
                    wanted[sequence].discard(feature)
                self.states.put(found, feature, vectors)
                if feature == F_OF_S:
                    f_of_s.append((found, vectors))
        for sequences, vectors in f_of_s:
            self._read_out_later(sequences, vectors)
        self.read_out()
        return [sequence for sequence, features in unknown.items() if features]

    def _stored(self, feature: Feature, sequences: Sequence[int]) -> tuple[list[int], Tensor]:
        if self.store is None:
            return [], torch.empty(0)
        mask, raw = self.store.get(feature, [self.table.keys[sequence] for sequence in sequences])
        if raw is None:
            return [], torch.empty(0)
        return [sequence for sequence, flag in zip(sequences, mask, strict=True) if flag], _from_raw(raw)

    def forward(self, batch: Sequence[Tree]) -> None:
        """Forward a batch; its states go to the store and to the tasks, its log-probabilities are read out."""
        wanted = {feature for tree in batch for sequence in tree.sequences for feature in self.states_wanted[sequence]}
        for sequences, vectors in _split_to_memory(self.model, batch, self.table.token_ids, sorted(wanted, key=str)):
            for feature, values in vectors.items():
                rows = [
                    row
                    for row, sequence in enumerate(sequences)
                    if feature in self.states_wanted[sequence] or feature == F_OF_S
                ]
                if rows:
                    self._keep([sequences[row] for row in rows], feature, values[rows])
            self._read_out_later(sequences, vectors[F_OF_S])
        if len(self._unread) >= READOUT_ROWS:
            self.read_out()

    def _keep(self, sequences: Sequence[int], feature: Feature, vectors: Tensor) -> None:
        finite = torch.isfinite(vectors).all(dim=1)
        if not bool(finite.all()):
            raise ValueError(
                f"{self._where(sequences[int((~finite).nonzero()[0])])} has a state that is not finite (layer "
                f"{feature.layer}, pooling {feature.pooling}, dtype {str(vectors.dtype).removeprefix('torch.')}). "
                f"{PRECISION_HINT}"
            )
        self.states.put(sequences, feature, vectors)
        if self.store is not None:
            self.store.add(feature, [self.table.keys[sequence] for sequence in sequences], _to_raw(vectors))

    def _read_out_later(self, sequences: Sequence[int], vectors: Tensor) -> None:
        for sequence, vector in zip(sequences, vectors, strict=True):
            unread = sequence in self.tokens_wanted and sequence not in self.log_probs
            if unread or self.mixtures_wanted.get(sequence):
                self._unread.append((sequence, vector))

    def read_out(self) -> None:
        """Turn collected states into log-probabilities and mixtures."""
        by_mixtures: dict[tuple[Feature, ...], list[tuple[int, Tensor]]] = {}
        for sequence, vector in self._unread:
            mixtures = tuple(sorted(self.mixtures_wanted.get(sequence, ()), key=str))
            by_mixtures.setdefault(mixtures, []).append((sequence, vector))
        for mixtures, waiting in by_mixtures.items():
            for start in range(0, len(waiting), READOUT_ROWS):
                sequences, vectors = zip(*waiting[start : start + READOUT_ROWS], strict=True)
                self._read_out(sequences, torch.stack(vectors), mixtures)
        self._unread.clear()

    def _read_out(self, sequences: Sequence[int], vectors: Tensor, mixtures: Sequence[Feature]) -> None:
        tokens = [list(self.tokens_wanted.get(sequence, ())) for sequence in sequences]
        found, mixed = self.model.readout.read(vectors, tokens, [feature.mixture for feature in mixtures])
        for sequence, values in zip(sequences, found, strict=True):
            if bool(torch.isnan(values).any()):
                raise ValueError(
                    f"{self._where(sequence)} has log-probabilities that are not numbers. {PRECISION_HINT}"
                )
            self.log_probs[sequence] = values.double().numpy()
        for feature in mixtures:
            self._keep(sequences, feature, mixed[feature.mixture])
            for sequence in sequences:
                self.mixtures_wanted[sequence].discard(feature)

    def _where(self, sequence: int) -> str:
        prompt = self.continued_from.get(sequence, sequence)
        text = self.contexts[self.prompt_of.index(prompt)] if prompt in self.prompt_of else "?"
        return f"The prompt {text if len(text) <= 200 else text[:90] + ' … ' + text[-90:]!r}"

    def answers(self) -> list[PromptStates]:
        return [
            PromptStates(
                key=self.table.keys[prompt].hex(),
                log_probs=tuple(
                    float("nan")
                    if word is None
                    else float(
                        sum(self.log_probs[sequence][self.tokens_wanted[sequence][token]] for sequence, token in word)
                    )
                    for word in steps
                ),
                num_tokens=tuple(len(word) for word in encoded.continuations),
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
        TypeError: If a mixture is asked for and the model's output embedding is not affine.
    """
    started = time.perf_counter()
    if any(feature.mixture for request in requests for feature in request.features):
        model.readout.output_embedding()  # raises now, and not after the pass, where there is none
    work = _Pass(model, store, contexts, requests, encoder)
    table, weights = work.table, documents if documents is not None else [1] * len(requests)
    documents_of: dict[int, int] = {}
    for prompt, weight in zip(work.prompt_of, weights, strict=True):
        documents_of[prompt] = documents_of.get(prompt, 0) + weight
    try:
        missing = work.look_up()
        trees = share_prefixes(table.token_ids, missing)
        batches = make_batches(trees, max_rows=max_rows, max_tokens=max_tokens, batch_cost=batch_cost)
        total = sum(documents_of.values())
        left = sum(documents_of.get(sequence, 0) for sequence in missing)
        bar = tqdm(total=total, initial=total - left, unit="doc", desc="One pass", disable=not progress, smoothing=0.1)
        with bar:
            for batch in batches:
                work.forward(batch)
                bar.update(sum(documents_of.get(sequence, 0) for tree in batch for sequence in tree.sequences))
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
        tokens=model.counts.tokens,
        separate_tokens=sum(len(table.token_ids[sequence]) for sequence in missing),
        sharing=" and ".join(model.counts.ways) or "none",
        padding=model.counts.padding,
        cut_prompts=sum(prompt.cut_tokens > 0 for prompt in work.encoded),
        seconds=time.perf_counter() - started,
    )
    return work.answers(), summary


def _expanded(feature: Feature, num_hidden_states: int) -> Iterator[Feature]:
    layers = range(num_hidden_states) if feature.layer == ALL_LAYERS else (feature.layer,)
    for layer in layers:
        yield _resolve(feature._replace(layer=layer), num_hidden_states)


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
    model: LastStateModel, batch: Sequence[Tree], token_ids: Sequence[tuple[int, ...]], features: Sequence[Feature]
) -> Iterator[BatchStates]:
    """Forward a batch, in halves where it does not fit the memory."""
    try:
        found = model.states(batch, token_ids, features)
    except RuntimeError as err:
        if not is_out_of_memory(err) or (len(batch) == 1 and len(batch[0].sequences) == 1):
            raise
    else:
        yield found
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(batch) // 2
    logger.warning(
        "A batch of %d prompts does not fit the memory; trying half of it. A smaller --batch_size avoids this.",
        sum(len(tree.sequences) for tree in batch),
    )
    parts = (batch[:half], batch[half:]) if half else tuple((tree,) for tree in batch[0].halves(token_ids))
    for part in parts:
        yield from _split_to_memory(model, part, token_ids, features)
