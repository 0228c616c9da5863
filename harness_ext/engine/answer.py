"""One pass over all prompts of all tasks: encode, deduplicate, look up, forward what is missing, read out, answer.

The processes of a job make the same plan of all prompts, compute the portions of it that are theirs, and send what tasks asked
for to rank 0. The plan does not depend on how many they are, so neither does any number; see `plan`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness_ext.contracts import ALL_LAYERS, LAST_LAYER, Feature, PromptRequest, PromptStates, TokenStates
from harness_ext.engine.forward import WAYS, BatchStates, LastStateModel, is_out_of_memory
from harness_ext.engine.plan import Portion, SequenceTable, Tree, make_batches, make_portions, share_prefixes
from harness_ext.engine.store import FeatureStore
from harness_ext.engine.tokens import PromptEncoder
from harness_ext.ranks import ALONE, Lockstep, Progress, Ranks, share_out

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
        processes: Ranks that shared the work.
        busiest_share: Share of all tokens, padding included, that the busiest of them forwarded: at best 1 / processes.
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
    processes: int
    busiest_share: float
    cut_prompts: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain types, with `tokens_per_second`."""
        rounded = {
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "busiest_share": round(self.busiest_share, 4),
        }
        return asdict(self) | rounded

    def __str__(self) -> str:
        continuations = f" + {self.word_continuations:,} word continuations" if self.word_continuations else ""
        shared = f" instead of {self.separate_tokens:,} ({self.sharing} prefixes)" if self.sharing != "none" else ""
        processes = ""
        if self.processes > 1:
            processes = f"; {self.processes} processes, the busiest with {self.busiest_share:.1%} of the tokens"
        cut = f"; {self.cut_prompts:,} documents cut to fit the context" if self.cut_prompts else ""
        return (
            f"prompts: {self.prompts:,} asked, {self.distinct_prompts:,} distinct{continuations}, "
            f"{self.from_store:,} from the store, {self.forwarded:,} forwarded; {self.tokens:,} tokens{shared} in "
            f"{self.seconds:.1f} s ({self.tokens_per_second:,.0f} tokens/s){processes}{cut}"
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

    def to_first(self, sequences: Sequence[int], ranks: Ranks) -> None:
        """Send the vectors of sequences that this rank has computed to rank 0; other ranks keep none."""
        for feature, of_all in sorted(self._position.items(), key=lambda item: str(item[0])):
            position = of_all[np.array(sequences, dtype=np.int64)]
            mine = self._values.get(feature, np.empty((0, 0), dtype=np.float32))
            for places, vectors in ranks.to_first(position[position >= 0], mine):
                if feature not in self._values:
                    self._values[feature] = np.empty((int(of_all.max()) + 1, vectors.shape[1]), dtype=np.float32)
                self._values[feature][places] = vectors
        if not ranks.is_first:
            self._values.clear()

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


States = tuple[list[int], Tensor]
"""Sequences and their f(s), of shape (S, d)."""


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
        # Of each sequence, the vectors wanted: states, f(s) among them, and mixtures, some of which are still to be made of it.
        self.states_wanted, self.mixtures_wanted = self._features_of_sequences()
        self._mixtures_left = list(self.mixtures_wanted)
        self.states = StateTable(self._sequences_of_features(), len(self.table), model, encoder)
        # States from the store that are still to be read out, and the row of each sequence among them.
        self._stored_row, self._stored_states = np.empty(0, dtype=np.int64), torch.empty(0)
        self.finished: list[int] = []

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
            # f(s) of every sequence is computed and stored, and by it a batch is known to be stored as a whole.
            plain = {F_OF_S, *(feature for feature in features if not feature.mixture)}
            states[prompt] = self._shared(states[prompt] | plain)
            mixtures[prompt] = self._shared(mixtures[prompt] | mixed)
        return states, mixtures

    def _sequences_of_features(self) -> dict[Feature, list[int]]:
        result: dict[Feature, dict[int, None]] = {}
        for request, prompt in enumerate(self.prompt_of):
            for feature in self._features(request):
                result.setdefault(feature, {})[prompt] = None
        return {feature: list(sequences) for feature, sequences in result.items()}

    def digest(self) -> str:
        """What ranks that share this pass out must have in common."""
        text = blake2b(b"".join(self.table.keys), digest_size=16)
        for values in (self.prompt_of, self.tokens_wanted, [sorted(map(str, wanted)) for wanted in self._wanted()]):
            text.update(repr(values).encode())
        return text.hexdigest()

    def _wanted(self) -> list[frozenset[Feature]]:
        return [states | mixtures for states, mixtures in zip(self.states_wanted, self.mixtures_wanted, strict=True)]

    # ------------------------------------------------------------------------------------------------ the store

    def find_stored(self) -> np.ndarray:
        """Which sequences the store of this process has every state of, bool of shape (n,)."""
        complete = np.ones(len(self.table), dtype=bool)
        for feature in _sorted(self.states_wanted):
            asked = [sequence for sequence, features in enumerate(self.states_wanted) if feature in features]
            keys = [self.table.keys[sequence] for sequence in asked]
            complete[asked] &= self.store.has(feature, keys) if self.store is not None else False
        return complete

    def take_stored(self, sequences: Sequence[int]) -> np.ndarray:
        """Take what the store has of sequences; returns which of all it has every state of, bool of shape (n,)."""
        complete = np.zeros(len(self.table), dtype=bool)
        complete[sequences] = True
        for wanted in (self.mixtures_wanted, self.states_wanted):
            for feature in _sorted(wanted):
                asked = [sequence for sequence in sequences if feature in wanted[sequence]]
                found, vectors = self._stored(feature, asked)
                self.states.put(found, feature, vectors)
                if feature.mixture:
                    self._have_mixture(found, feature)
                    continue
                if feature == F_OF_S:
                    self._stored_row = _positions(found, len(self.table))
                    self._stored_states = vectors
                missing = _positions(asked, len(self.table)) >= 0
                missing[found] = False
                complete &= ~missing
        return complete

    def _stored(self, feature: Feature, sequences: Sequence[int]) -> tuple[Sequence[int], Tensor]:
        if self.store is None or not len(sequences):
            return [], torch.empty(0)
        mask, raw = self.store.get(feature, [self.table.keys[sequence] for sequence in sequences])
        if raw is None:
            return [], torch.empty(0)
        return [sequence for sequence, flag in zip(sequences, mask, strict=True) if flag], _from_raw(raw)

    def _have_mixture(self, sequences: Sequence[int], feature: Feature) -> None:
        for sequence in sequences:
            self._mixtures_left[sequence] = self._shared(self._mixtures_left[sequence] - {feature})

    # ---------------------------------------------------------------------------------------------- the portions

    def features_of(self, batch: Sequence[Tree]) -> list[Feature]:
        """Vectors wanted of a batch, in an order that depends on nothing but their names."""
        return _sorted([self.states_wanted[sequence] for tree in batch for sequence in tree.sequences])

    def forward(self, batch: Sequence[Tree]) -> list[States]:
        """Forward a batch; its vectors go to the store and to the tasks. Returns f(s), to be read out."""
        found = []
        for sequences, vectors in _split_to_memory(self.model, batch, self.table.token_ids, self.features_of(batch)):
            # f(s) last: where the store has it, it has the others.
            for feature in sorted(vectors, key=lambda feature: (feature == F_OF_S, str(feature))):
                rows = [row for row, sequence in enumerate(sequences) if feature in self.states_wanted[sequence]]
                if rows:
                    everything = len(rows) == len(sequences)
                    values = vectors[feature] if everything else vectors[feature][rows]
                    self._keep([sequences[row] for row in rows], feature, values)
            found.append((sequences, vectors[F_OF_S]))
        return found

    def finish(self, portion: Portion, forwarded: list[States]) -> None:
        """Read out the states of a portion, of which some were forwarded."""
        if portion.stored:
            places = torch.from_numpy(self._stored_row[list(portion.stored)])
            forwarded = [*forwarded, (list(portion.stored), self._stored_states[places])]
        # By their number, since a batch that was forwarded has them in another order than the store.
        sequences = np.concatenate([of_block for of_block, _ in forwarded])
        order = np.argsort(sequences)
        vectors = torch.cat([of_block for _, of_block in forwarded])[torch.from_numpy(order)]
        by_mixtures: dict[frozenset[Feature], list[int]] = {}
        for row, sequence in enumerate(sequences[order].tolist()):
            by_mixtures.setdefault(self.mixtures_wanted[sequence], []).append(row)
        for _, waiting in sorted(by_mixtures.items(), key=lambda item: item[1]):
            for start in range(0, len(waiting), READOUT_ROWS):
                rows = waiting[start : start + READOUT_ROWS]
                self._read_out(sequences[order][rows].tolist(), vectors[rows])
        self.finished += sequences.tolist()

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

    def _read_out(self, sequences: Sequence[int], vectors: Tensor) -> None:
        """Turn states into log-probabilities and mixtures, where any of either is wanted."""
        tokens = [self.tokens_wanted[sequence] for sequence in sequences]
        mixtures = _sorted([self._mixtures_left[sequence] for sequence in sequences])
        if not mixtures and not any(tokens):
            return
        found, mixed = self.model.readout.read(vectors, tokens, [feature.mixture for feature in mixtures])
        # In one array: a small one for each sequence would take more memory than its numbers.
        values = torch.cat(found).double().numpy()
        bounds = np.cumsum([0, *map(len, tokens)])
        if len(bad := np.flatnonzero(np.isnan(values))):
            sequence = sequences[int(np.searchsorted(bounds, bad[0], side="right")) - 1]
            raise ValueError(f"{self._where(sequence)} has log-probabilities that are not numbers. {PRECISION_HINT}")
        for sequence, first, last in zip(sequences, bounds, bounds[1:], strict=False):
            self.log_probs[self.starts[sequence] : self.starts[sequence + 1]] = values[first:last]
        for feature in mixtures:
            rows = [row for row, sequence in enumerate(sequences) if feature in self._mixtures_left[sequence]]
            left = [sequences[row] for row in rows]
            self._keep(left, feature, mixed[feature.mixture][rows])
            self._have_mixture(left, feature)

    def exchange(self, ranks: Ranks) -> None:
        """Give log-probabilities to all ranks, and what tasks asked for to rank 0."""
        if ranks.is_alone:
            return
        # Each is read by one rank. -inf is a log-probability.
        is_read = ~np.isnan(self.log_probs)
        count = ranks.sum(is_read.astype(np.int64))
        if len(bad := np.flatnonzero(count != 1)):
            sequence = int(np.searchsorted(self.starts, bad[0], side="right")) - 1
            raise RuntimeError(
                f"{self._where(sequence)} was read out by {count[bad[0]]} ranks and not by one, like {len(bad)} "
                "log-probabilities: a fault of harness_ext, please report what HARNESS_EXT_DEBUG=1 shows."
            )
        self.log_probs = ranks.sum(np.where(is_read, self.log_probs, 0.0))
        self.states.to_first(self.finished, ranks)

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
    ranks: Ranks = ALONE,
    lockstep: Lockstep | None = None,
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
        ranks: The processes that share the work, all of which call this with the same requests. Log-probabilities come to all
            of them, vectors to rank 0.
        lockstep: What makes the forward passes of a model that is spread over the ranks; None: each rank has all of it.

    Returns:
        One answer a request, in order, and what was done by all ranks.

    Raises:
        ValueError: If a state is not finite, a prompt does not fit the context, or a layer does not exist.
        TypeError: If a mixture is asked for and the model's output embedding is not affine.
        RuntimeError: If ranks have different requests.
    """
    started = time.perf_counter()
    if any(feature.mixture for request in requests for feature in request.features):
        model.readout.output_embedding()  # raises now, and not after the pass, where there is none
    work = _Pass(model, store, contexts, requests, encoder)
    table, weights = work.table, documents if documents is not None else [1] * len(requests)
    documents_of = np.zeros(len(table), dtype=np.int64)
    np.add.at(documents_of, work.prompt_of, weights)
    limits: dict[str, Any] = {"max_rows": max_rows, "max_tokens": max_tokens, "batch_cost": batch_cost}
    together = lockstep.work if lockstep is not None else contextlib.nullcontext
    try:
        ranks.check_same(work.digest() if not ranks.is_alone else "", "prompts")
        everything = range(len(table))
        # Several ranks look first, and take what is theirs once they know what is.
        mine = work.take_stored(everything) if ranks.is_alone else work.find_stored()
        where = ranks.gather_flags(mine)
        is_stored = np.logical_or.reduce(where)
        portions = make_portions(table.token_ids, is_stored, **limits, max_sequences=READOUT_ROWS)
        proofs = [] if ranks.is_alone else _proofs(work, portions)
        rank_of = _ranks_of(portions, where, of_first={portion for portion, _ in proofs})
        portions = [portion for portion, rank in zip(portions, rank_of, strict=True) if rank == ranks.rank]
        if not ranks.is_alone:
            mine = work.take_stored([sequence for portion in portions for sequence in portion.stored])
        bar = Progress(
            ranks,
            total=int(documents_of.sum()),
            initial=int(documents_of[is_stored].sum()),
            unit="doc",
            desc="One pass",
            shown=progress,
            smoothing=0.1,
        )

        def forward(batch: Sequence[Tree]) -> list[States]:
            found = work.forward(batch)
            done = [sequence for sequences, _ in found for sequence in sequences]
            bar.update(int(documents_of[done][~is_stored[done]].sum()))
            return found

        with bar:
            early: dict[int, list[States]] = {}
            if proofs:
                with together():
                    for _, batch in proofs if ranks.is_first else ():
                        early[id(batch)] = forward(batch)
                model.adopt_proofs(ranks.share(model.proofs())[0])
            with together():
                for portion in portions:
                    # What the store has lost since, or another rank's store had only.
                    lost = [sequence for sequence in portion.stored if not mine[sequence]]
                    batches = [*portion.batches, *make_batches(share_prefixes(table.token_ids, lost), **limits)]
                    found = [states for batch in batches for states in early.pop(id(batch), None) or forward(batch)]
                    kept = tuple(sequence for sequence in portion.stored if mine[sequence])
                    work.finish(Portion(tuple(batches), kept), found)
            bar.finish()
        work.exchange(ranks)
    finally:
        if store is not None:
            store.close()
    of_ranks = ranks.share([model.counts.tokens, model.counts.padding, list(model.counts.ways)])
    computed = [tokens + padding for tokens, padding, _ in of_ranks]
    ways = {way for *_, of_rank in of_ranks for way in of_rank}
    num_stored = int(is_stored.sum())
    summary = RunSummary(
        documents=sum(weights),
        prompts=len(requests),
        distinct_prompts=work.distinct_prompts,
        word_continuations=len(table) - work.distinct_prompts,
        from_store=num_stored,
        forwarded=len(table) - num_stored,
        tokens=sum(tokens for tokens, *_ in of_ranks),
        separate_tokens=sum(len(table.token_ids[sequence]) for sequence in np.flatnonzero(~is_stored)),
        sharing=" and ".join(way for way in WAYS if way in ways) or "none",
        padding=sum(padding for _, padding, _ in of_ranks),
        processes=ranks.size,
        busiest_share=max(computed) / sum(computed) if sum(computed) else 1 / ranks.size,
        cut_prompts=sum(cut > 0 for cut in work.cut_tokens),
        seconds=time.perf_counter() - started,
    )
    return work.answers(), summary


def _proofs(work: _Pass, portions: Sequence[Portion]) -> list[tuple[int, tuple[Tree, ...]]]:
    """The batches, with their portions, that prove whether a way of sharing is exact: the first of each kind."""
    found: dict[tuple[str, bool], tuple[int, tuple[Tree, ...]]] = {}
    for place, portion in enumerate(portions):
        for batch in portion.batches:
            kind = work.model.kind_of(batch, work.table.token_ids, work.features_of(batch))
            if kind is not None:
                found.setdefault(kind, (place, batch))
    return list(found.values())


def _ranks_of(portions: Sequence[Portion], where: np.ndarray, *, of_first: Collection[int]) -> list[int]:
    """Which rank has each portion: one that has most of what is stored of it, and as few tokens as the others.

    Args:
        portions: All of them.
        where: What each rank's store has, bool of shape (ranks, n).
        of_first: Portions that rank 0 has to compute.
    """
    size = len(where)
    possible: list[Sequence[int]] = []
    for place, portion in enumerate(portions):
        has = where[:, list(portion.stored)].sum(axis=1)
        possible.append([0] if place in of_first else np.flatnonzero(has == has.max()).tolist())
    return share_out([portion.cost for portion in portions], size, possible=possible)


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
        if model.is_spread:
            raise RuntimeError(
                f"A batch of {sum(len(tree.sequences) for tree in batch)} prompts does not fit the memory, and cannot be "
                "split where weights are spread over processes, which have begun the same pass: give a smaller --batch_size, "
                "a number of prompts."
            ) from err
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
