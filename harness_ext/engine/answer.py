"""One pass over all prompts of all tasks: encode, deduplicate, look up, forward what is missing, read out, answer."""

from __future__ import annotations

import functools
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

PUT_ROWS = 4096
"""Vectors converted to float32 together."""

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
        self,
        sequences_of: Mapping[Feature, Sequence[int]],
        num_sequences: int,
        model: LastStateModel,
        encoder: PromptEncoder,
    ) -> None:
        self._model, self._encoder = model, encoder
        # The row of each sequence among the vectors of a feature; -1 where no task asked for it.
        self._position = {feature: _positions(sequences, num_sequences) for feature, sequences in sequences_of.items()}
        self._values: dict[Feature, np.ndarray] = {}

    def put(self, sequences: Sequence[int], feature: Feature, vectors: Tensor) -> None:
        """Keep those of the vectors (n, d) that a task asked for."""
        if feature not in self._position:
            return
        of_all = self._position[feature]
        position = of_all[np.array(sequences, dtype=np.int64)]
        kept = np.flatnonzero(position >= 0)
        if not len(kept):
            return
        if feature not in self._values:
            self._values[feature] = np.empty((int(of_all.max()) + 1, vectors.shape[1]), dtype=np.float32)
        # Vectors from the store come all at once: no second copy of them is made.
        for start in range(0, len(kept), PUT_ROWS):
            rows = kept[start : start + PUT_ROWS]
            self._values[feature][position[rows]] = vectors[torch.from_numpy(rows)].float().numpy()

    def take(self, rows: Sequence[int], feature: Feature) -> np.ndarray:
        """Return float32 of shape (len(rows), d), not to be written to: a copy only where the rows are scattered."""
        feature = _resolve(feature, self._model.num_hidden_states)
        position = self._position[feature][np.array(rows, dtype=np.int64)]
        if len(position) and position.min() < 0:
            raise KeyError(f"{feature} was not asked for in the request of row {rows[int(position.argmin())]}.")
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

    def probabilities(self, rows: Sequence[int]) -> np.ndarray:
        """Return p_f(·|s), float32 of shape (len(rows), V), for a few hundred rows."""
        return self._model.readout.probabilities(torch.from_numpy(self.take(rows, F_OF_S)))

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
    """The state of one pass; see `answer_requests`.

    There may be a million requests that ask for the same few things, so what is known of a request or a sequence is a place in
    a list or an array, and tuples and sets of equal content are one object (`_shared`).
    """

    def __init__(
        self,
        model: LastStateModel,
        store: FeatureStore | None,
        contexts: Sequence[str],
        requests: Sequence[PromptRequest],
        encoder: PromptEncoder,
    ) -> None:
        self.model, self.store, self.contexts, self.requests = model, store, contexts, requests
        self._interned: dict[Any, Any] = {}
        self.table = SequenceTable()
        self.prompt_of: list[int] = []
        self.words: list[tuple[tuple[int, ...], ...]] = []
        self.cut_tokens: list[int] = []
        for encoded in encoder.encode_requests(contexts, requests):
            self.prompt_of.append(self.table.add(encoded.context))
            self.words.append(self._shared(encoded.continuations))
            self.cut_tokens.append(encoded.cut_tokens)
        self.distinct_prompts = len(self.table)
        # Prompts that are continued by the first tokens of a label word, by the sequence that this gives.
        self.continued_from: dict[int, int] = {}
        # Of each sequence, the tokens whose log-probability is wanted, and where in `log_probs` those of the first one are.
        self.tokens_wanted = self._tokens_of_sequences()
        self.starts = np.cumsum([0, *map(len, self.tokens_wanted)])
        self.log_probs = np.full(self.starts[-1], np.nan)
        self.is_read = np.zeros(len(self.table), dtype=bool)
        # Of each sequence, the vectors wanted: states, f(s) among them, and mixtures that are still to be made of it.
        self.states_wanted, self.mixtures_wanted = self._features_of_sequences()
        self.states = StateTable(self._sequences_of_features(), len(self.table), model, encoder)
        self._unread: list[tuple[list[int], Tensor]] = []

    def _shared(self, value: Any) -> Any:
        return self._interned.setdefault(value, value)

    def _steps(self, request: int) -> Iterator[list[tuple[int, int]] | None]:
        """Yield the (sequence, token) pairs whose log-probabilities add up to that of each continuation; None: not wanted."""
        for word in self.words[request]:
            if len(word) > 1 and self.requests[request].one_token:
                yield None
            else:
                yield [
                    (self._continued(self.prompt_of[request], word[:position]), token)
                    for position, token in enumerate(word)
                ]

    def _continued(self, prompt: int, tokens: tuple[int, ...]) -> int:
        if not tokens:
            return prompt
        sequence = self.table.add(self.table.token_ids[prompt] + tokens)
        self.continued_from.setdefault(sequence, prompt)
        return sequence

    def _tokens_of_sequences(self) -> list[tuple[int, ...]]:
        wanted: dict[int, tuple[int, ...]] = {}
        for request in range(len(self.requests)):
            of_request: dict[int, list[int]] = {}
            for sequence, token in (step for word in self._steps(request) for step in word or ()):
                of_request.setdefault(sequence, []).append(token)
            for sequence, tokens in of_request.items():
                wanted[sequence] = self._shared(tuple(dict.fromkeys((*wanted.get(sequence, ()), *tokens))))
        return [wanted.get(sequence, ()) for sequence in range(len(self.table))]

    def _features(self, request: int) -> tuple[Feature, ...]:
        return _expanded(self.requests[request].features, self.model.num_hidden_states)

    def _features_of_sequences(self) -> tuple[list[frozenset[Feature]], list[frozenset[Feature]]]:
        f_only, nothing = frozenset({F_OF_S}), frozenset[Feature]()
        states = [f_only if tokens else nothing for tokens in self.tokens_wanted]
        mixtures = [nothing] * len(self.table)
        for request, prompt in enumerate(self.prompt_of):
            features = self._features(request)
            mixed = {feature for feature in features if feature.mixture}
            plain = {feature for feature in features if not feature.mixture}
            if mixed or not plain:
                plain.add(F_OF_S)
            states[prompt] = self._shared(states[prompt] | plain)
            mixtures[prompt] = self._shared(mixtures[prompt] | mixed)
        return states, mixtures

    def _sequences_of_features(self) -> dict[Feature, list[int]]:
        result: dict[Feature, dict[int, None]] = {}
        for request, prompt in enumerate(self.prompt_of):
            for feature in self._features(request):
                result.setdefault(feature, {})[prompt] = None
        return {feature: list(sequences) for feature, sequences in result.items()}

    def look_up(self) -> list[int]:
        """Take what the store has; return the sequences that are missing a wanted state."""
        is_missing = np.zeros(len(self.table), dtype=bool)
        for feature in _sorted(self.mixtures_wanted):
            found, vectors = self._stored(feature, self.mixtures_wanted)
            self.states.put(found, feature, vectors)
            self._have_mixture(found, feature)
        for feature in _sorted(self.states_wanted):
            found, vectors = self._stored(feature, self.states_wanted)
            self.states.put(found, feature, vectors)
            # After the mixtures, so that those from the store are not made again.
            if feature == F_OF_S:
                self._read_out_later(found, vectors)
            missing = np.array([feature in features for features in self.states_wanted], dtype=bool)
            missing[found] = False
            is_missing |= missing
        self.read_out()
        return np.flatnonzero(is_missing).tolist()

    def _stored(self, feature: Feature, wanted: Sequence[frozenset[Feature]]) -> tuple[list[int], Tensor]:
        if self.store is None:
            return [], torch.empty(0)
        sequences = [sequence for sequence, features in enumerate(wanted) if feature in features]
        mask, raw = self.store.get(feature, [self.table.keys[sequence] for sequence in sequences])
        if raw is None:
            return [], torch.empty(0)
        return [sequence for sequence, flag in zip(sequences, mask, strict=True) if flag], _from_raw(raw)

    def _have_mixture(self, sequences: Sequence[int], feature: Feature) -> None:
        for sequence in sequences:
            self.mixtures_wanted[sequence] = self._shared(self.mixtures_wanted[sequence] - {feature})

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
        if sum(len(sequences) for sequences, _ in self._unread) >= READOUT_ROWS:
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
        rows = [
            row
            for row, sequence in enumerate(sequences)
            if (self.tokens_wanted[sequence] and not self.is_read[sequence]) or self.mixtures_wanted[sequence]
        ]
        if rows:
            everything = len(rows) == len(vectors)
            self._unread.append(([sequences[row] for row in rows], vectors if everything else vectors[rows]))

    def read_out(self) -> None:
        """Turn collected states into log-probabilities and mixtures."""
        if not self._unread:
            return
        sequences = [sequence for of_block, _ in self._unread for sequence in of_block]
        blocks = [vectors for _, vectors in self._unread]
        vectors = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        self._unread.clear()
        by_mixtures: dict[frozenset[Feature], list[int]] = {}
        for row, sequence in enumerate(sequences):
            by_mixtures.setdefault(self.mixtures_wanted[sequence], []).append(row)
        for mixtures, waiting in by_mixtures.items():
            for start in range(0, len(waiting), READOUT_ROWS):
                rows = waiting[start : start + READOUT_ROWS]
                self._read_out([sequences[row] for row in rows], vectors[rows], sorted(mixtures, key=str))

    def _read_out(self, sequences: Sequence[int], vectors: Tensor, mixtures: Sequence[Feature]) -> None:
        tokens = [self.tokens_wanted[sequence] for sequence in sequences]
        found, mixed = self.model.readout.read(vectors, tokens, [feature.mixture for feature in mixtures])
        # In one array: a small one for each sequence would take more memory than its numbers.
        values = torch.cat(found).double().numpy()
        bounds = np.cumsum([0, *map(len, tokens)])
        if len(bad := np.flatnonzero(np.isnan(values))):
            sequence = sequences[int(np.searchsorted(bounds, bad[0], side="right")) - 1]
            raise ValueError(f"{self._where(sequence)} has log-probabilities that are not numbers. {PRECISION_HINT}")
        for sequence, first, last in zip(sequences, bounds, bounds[1:], strict=False):
            self.log_probs[self.starts[sequence] : self.starts[sequence + 1]] = values[first:last]
        self.is_read[sequences] = True
        for feature in mixtures:
            self._keep(sequences, feature, mixed[feature.mixture])
            self._have_mixture(sequences, feature)

    def _where(self, sequence: int) -> str:
        prompt = self.continued_from.get(sequence, sequence)
        text = self.contexts[self.prompt_of.index(prompt)] if prompt in self.prompt_of else "?"
        return f"The prompt {text if len(text) <= 200 else text[:90] + ' … ' + text[-90:]!r}"

    def answers(self) -> list[PromptStates]:
        """One answer a request; those about one prompt share what they can."""
        keys = [key.hex() for key in self.table.keys[: self.distinct_prompts]]
        places: dict[tuple[int, ...], dict[int, int]] = {}
        for tokens in self.tokens_wanted:
            if tokens not in places:
                places[tokens] = {token: place for place, token in enumerate(tokens)}

        def log_prob(sequence: int, token: int) -> float:
            return float(self.log_probs[self.starts[sequence] + places[self.tokens_wanted[sequence]][token]])

        return [
            PromptStates(
                key=keys[prompt],
                log_probs=tuple(
                    float("nan") if word is None else float(sum(log_prob(sequence, token) for sequence, token in word))
                    for word in self._steps(request)
                ),
                num_tokens=self._shared(tuple(len(word) for word in self.words[request])),
                cut_tokens=self.cut_tokens[request],
                row=prompt,
                source=self.states,
            )
            for request, prompt in enumerate(self.prompt_of)
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
    documents_of = np.zeros(len(table), dtype=np.int64)
    np.add.at(documents_of, work.prompt_of, weights)
    try:
        missing = work.look_up()
        trees = share_prefixes(table.token_ids, missing)
        batches = make_batches(trees, max_rows=max_rows, max_tokens=max_tokens, batch_cost=batch_cost)
        total = int(documents_of.sum())
        left = int(documents_of[missing].sum())
        bar = tqdm(total=total, initial=total - left, unit="doc", desc="One pass", disable=not progress, smoothing=0.1)
        with bar:
            for batch in batches:
                work.forward(batch)
                bar.update(int(documents_of[[sequence for tree in batch for sequence in tree.sequences]].sum()))
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
        cut_prompts=sum(cut > 0 for cut in work.cut_tokens),
        seconds=time.perf_counter() - started,
    )
    return work.answers(), summary


def _positions(sequences: Sequence[int], num_sequences: int) -> np.ndarray:
    """Where each of 0..num_sequences - 1 stands among the sequences, -1 where it does not."""
    position = np.full(num_sequences, -1, dtype=np.int64)
    position[np.asarray(sequences, dtype=np.int64)] = np.arange(len(sequences))
    return position


def _sorted(wanted: Sequence[frozenset[Feature]]) -> list[Feature]:
    """All features that some sequence wants, in an order that depends on nothing but their names."""
    return sorted(frozenset[Feature]().union(*set(wanted)), key=str)


@functools.lru_cache(maxsize=1024)
def _expanded(features: tuple[Feature, ...], num_hidden_states: int) -> tuple[Feature, ...]:
    """Features with `ALL_LAYERS` as one for each layer, and all layers counted from 0."""
    return tuple(
        _resolve(feature._replace(layer=layer), num_hidden_states)
        for feature in features
        for layer in (range(num_hidden_states) if feature.layer == ALL_LAYERS else (feature.layer,))
    )


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
