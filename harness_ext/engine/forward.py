"""Runs a causal language model: states of the last token, and log-probabilities from the model's own logits.

Both are found at the same place for every architecture: the module that `get_output_embeddings()` returns. Its input is
f(s), after the final norm and any projection. In a pass over prompts a hook keeps that input and hands the module one row
only, so no (tokens, V) logits are computed. To read out, the model is called on a single token and the hook puts the kept
states in place of its hidden state: whatever the model does after its output embedding (bias, soft-capping, scaling) is done
to our states too.

Prompts that share nothing are padded on the right and no attention mask is passed: a causal model's real tokens never see
what comes after them, positions are those of the unpadded prompt, state-space models work alike, and attention keeps its
fastest kernel. Prompts that share a beginning (`plan.Tree`) are computed in the first of these ways that is exact for the
model, which the first batch of each kind proves by a comparison with separate forwards:

    packed    one row for all, with a mask that shows each token its own ancestors and explicit positions
    cached    the shared beginning, then each rest from a copy of its key/value cache
    separate  each prompt on its own
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from harness_ext.contracts import LAST_LAYER, Feature
from harness_ext.engine.plan import Tree, common_prefix_length, pack
from harness_ext.engine.readout import Readout, inference
from harness_ext.halves import capture_head_input

__all__ = ["WAYS", "BatchStates", "ForwardCounts", "LastStateModel", "is_out_of_memory"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

F_OF_S = Feature()

SHARING_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Relative difference up to which a way of sharing counts as exact. In half precision it is four units of rounding, or three
times what the same prompts differ by when they are forwarded together and alone. (SmolLM2-135M in bfloat16, whose unit is 8e-3:
up to 2e-2 for either.)"""

WAYS = ("packed", "cached", "separate")
"""Ways of computing prompts that share a beginning, in the order in which they are tried."""

WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
"""Where configurations say how far their local attention reaches."""

COMPARED_SEQUENCES = 4
"""Sequences of a tree that are forwarded separately too."""


@dataclass
class ForwardCounts:
    """What a model was made to compute.

    Attributes:
        tokens: Tokens forwarded, without padding; what several prompts share counts once where it was shared.
        padding: Padding tokens forwarded.
        ways: Ways of sharing that were used, in the order of first use.
    """

    tokens: int = 0
    padding: int = 0
    ways: dict[str, None] = field(default_factory=dict)


class BatchStates(NamedTuple):
    """Vectors of a batch.

    Attributes:
        sequences: S indices into the table.
        vectors: For each feature, a tensor of shape (S, d) on the CPU, in the dtype of the model's hidden states.
    """

    sequences: list[int]
    vectors: dict[Feature, Tensor]


class LastStateModel:
    """The f of a causal LM; `readout` is its Φ.

    Args:
        model: A transformers causal LM, or a PEFT model around one, in eval mode.
        device: Where token ids are put; a model spread by `device_map` takes it from there.
        autocast_dtype: Mixed-precision dtype that lm_eval was asked for, or None.
        is_spread: Whether other processes hold parts of its weights and make each pass with this one. A pass that fails half
            way leaves them waiting, so that its error is raised and no other way is tried.

    Raises:
        TypeError: If the model has no output embedding.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        autocast_dtype: torch.dtype | None = None,
        is_spread: bool = False,
    ) -> None:
        head = model.get_output_embeddings()
        if head is None:
            raise TypeError(f"{type(model).__name__}.get_output_embeddings() is None, so it has no f(s).")
        self._model = model
        self._head = head
        self._autocast_dtype = autocast_dtype
        self._device = device
        self.is_spread = is_spread
        self._config = model.config.get_text_config()
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._parameters = inspect.signature(inner.forward).parameters
        # transformers renamed the argument in 5.24 and drops the old name in 5.40.
        self._cache_name = "cache" if "cache" in self._parameters else "past_key_values"
        # Whether a way of sharing was seen to be exact, for batches without and with padding.
        self._exact: dict[tuple[str, bool], bool] = {}
        self.counts = ForwardCounts()
        self.readout = Readout(model, head, device=device, autocast_dtype=autocast_dtype)

    @property
    def num_hidden_states(self) -> int:
        """Length of `hidden_states`: the number of blocks plus one."""
        return int(self._config.num_hidden_layers) + 1

    @property
    def device(self) -> torch.device:
        """Where the model takes its token ids."""
        return self._device

    def states(
        self, batch: Sequence[Tree], token_ids: Sequence[tuple[int, ...]], features: Sequence[Feature]
    ) -> BatchStates:
        """Forward a batch.

        Args:
            batch: Trees, the longest first; see `plan.make_batches`.
            token_ids: All sequences, indexed as in `batch`.
            features: Vectors wanted of each sequence, no mixtures; f(s) is always among the result.

        Returns:
            The vectors, in whatever order of the sequences.
        """
        if all(len(tree.sequences) == 1 for tree in batch):
            return self._separate(batch, token_ids, features)
        padded = _is_padded(batch)
        ways = {"packed": self._packed, "cached": self._cached}
        for way in self._possible_ways(batch, token_ids, features):
            known = self._exact.get((way, padded))
            if known is False:
                continue
            try:
                found = ways[way](batch, token_ids, features)
            except (TypeError, ValueError, IndexError, RuntimeError) as err:
                # A model of foreign code may not know such masks or caches; what was exact once does not fail for that.
                if known or self.is_spread or is_out_of_memory(err):
                    raise
                logger.info("%s: %s prompts failed (%s).", type(self._model).__name__, way, err)
                found = None
            if known is None:
                self._exact[way, padded] = found is not None and self._agrees(found, batch, token_ids, way)
                if not self._exact[way, padded]:
                    continue
            if found is not None:
                self.counts.ways[way] = None
                return found
        self.counts.ways["separate"] = None
        return self._separate(batch, token_ids, features)

    def kind_of(
        self, batch: Sequence[Tree], token_ids: Sequence[tuple[int, ...]], features: Sequence[Feature]
    ) -> tuple[str, bool] | None:
        """The first way of sharing to try with a batch, and whether the batch is padded; None where nothing is shared.

        The first batch of a kind proves whether the way is exact.
        """
        if all(len(tree.sequences) == 1 for tree in batch):
            return None
        ways = self._possible_ways(batch, token_ids, features)
        return (ways[0], _is_padded(batch)) if ways else None

    def proofs(self) -> list[tuple[str, bool, bool]]:
        """What is proven: a way, whether with padding, and whether it is exact."""
        return [(way, padded, is_exact) for (way, padded), is_exact in self._exact.items()]

    def adopt_proofs(self, proofs: Sequence[tuple[str, bool, bool]]) -> None:
        """Take what an equal model has proven, in another process."""
        self._exact.update({(way, padded): is_exact for way, padded, is_exact in proofs})

    def token_states(self, rows: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return f of every prefix of each row, shape (len(row), d), in the dtype of the hidden states, on the CPU."""
        hidden, _ = self._forward(_padded(rows), sum(map(len, rows)))
        virtual = hidden[LAST_LAYER].shape[1] - max(map(len, rows))
        return [
            values[virtual : virtual + len(row)].cpu() for values, row in zip(hidden[LAST_LAYER], rows, strict=True)
        ]

    # ------------------------------------------------------------------------------------------------ one pass

    def _forward(
        self, inputs: Tensor, num_tokens: int, layers: Sequence[str | int] = (), **kwargs: Any
    ) -> tuple[dict[str | int, Tensor], Any]:
        """Return hidden states (rows, positions, d) by layer, f always among them, and the key/value cache if asked for."""
        self.counts.tokens += num_tokens
        self.counts.padding += inputs.numel() - num_tokens
        wanted = [layer for layer in layers if layer != LAST_LAYER]
        kwargs = {"use_cache": False, **kwargs} | ({"output_hidden_states": True} if wanted else {})
        with inference(self._device, self._autocast_dtype), capture_head_input(self._model, self._head) as captured:
            output = self._model(input_ids=inputs.to(self._device), **kwargs)
        hidden = {layer: output.hidden_states[layer] for layer in wanted} | {LAST_LAYER: captured[0]}
        return hidden, getattr(output, self._cache_name, None)

    # ------------------------------------------------------------------------------------------- ways of sharing

    def _possible_ways(
        self, batch: Sequence[Tree], token_ids: Sequence[tuple[int, ...]], features: Sequence[Feature]
    ) -> list[str]:
        """Ways that nothing about the model or the batch rules out."""
        adapters = getattr(self._model, "peft_config", {}).values()
        if any(adapter.is_prompt_learning for adapter in adapters):
            return []
        # A window counts neighbours in the row, padding among them, and its cache forgets the beginning.
        found = [getattr(self._config, name, None) for name in WINDOWS]
        window = min((size for size in found if isinstance(size, int)), default=None)
        ways = []
        # The other implementations of attention take no mask of this shape.
        attention = getattr(self._config, "_attn_implementation", None)
        fits = window is None or batch[0].num_tokens <= window
        if fits and "position_ids" in self._parameters and attention in ("sdpa", "eager"):
            ways.append("packed")
        lengths = [[len(token_ids[sequence]) for sequence in tree.sequences] for tree in batch]
        shared = [_shared_length(tree, token_ids) for tree in batch]
        longest_rest = max(max(of_tree) - prefix for of_tree, prefix in zip(lengths, shared, strict=True))
        fits = window is None or max(shared) + longest_rest <= window
        if fits and all(feature.pooling == "last" for feature in features):
            ways.append("cached")
        return ways

    def _agrees(self, found: BatchStates, batch: Sequence[Tree], token_ids: Any, way: str) -> bool:
        """Whether f(s) is that of separate forwards, for the tree of most sequences and for that of most tokens."""
        trees = {min(batch, key=lambda tree: (-len(tree.sequences), tree.num_tokens)), batch[0]}
        compared = [
            Tree((sequence,), len(token_ids[sequence]))
            for tree in sorted(trees, key=lambda tree: tree.sequences)
            for sequence in tree.sequences[-COMPARED_SEQUENCES:]
        ]
        compared.sort(key=lambda single: -single.num_tokens)
        plain = self._separate(compared, token_ids, [])
        row_of = {sequence: row for row, sequence in enumerate(found.sequences)}
        difference = _relative_difference(
            found.vectors[F_OF_S][[row_of[sequence] for sequence in plain.sequences]], plain.vectors[F_OF_S]
        )
        dtype = plain.vectors[F_OF_S].dtype
        tolerance = SHARING_TOLERANCE.get(dtype, 4 * torch.finfo(dtype).eps)
        if difference > tolerance and dtype not in SHARING_TOLERANCE:
            alone = torch.cat([self._separate([single], token_ids, []).vectors[F_OF_S] for single in compared])
            tolerance = 3 * _relative_difference(alone, plain.vectors[F_OF_S])
        exact = difference <= tolerance
        if not exact:
            logger.warning(
                "%s: prompts that share a beginning are not exact when %s (relative difference %.1e), so another way is used.",
                type(self._model).__name__,
                way,
                difference,
            )
        return exact

    def _separate(
        self, batch: Sequence[Tree], token_ids: Sequence[tuple[int, ...]], features: Sequence[Feature]
    ) -> BatchStates:
        """Right-padded rows without a mask, no more tokens at once than the batch has as trees."""
        sequences = sorted(
            (sequence for tree in batch for sequence in tree.sequences), key=lambda sequence: -len(token_ids[sequence])
        )
        num_rows = max(1, len(batch) * batch[0].num_tokens // len(token_ids[sequences[0]]))
        parts = []
        for start in range(0, len(sequences), num_rows):
            chunk = sequences[start : start + num_rows]
            rows = [token_ids[sequence] for sequence in chunk]
            hidden, _ = self._forward(_padded(rows), sum(map(len, rows)), [feature.layer for feature in features])
            virtual = hidden[LAST_LAYER].shape[1] - len(rows[0])  # tokens that an adapter puts before the prompt
            paths = [np.arange(virtual, virtual + len(row)) for row in rows]
            parts.append(_read(hidden, features, chunk, range(len(rows)), paths))
        return _joined(parts)

    def _packed(
        self, batch: Sequence[Tree], token_ids: Sequence[tuple[int, ...]], features: Sequence[Feature]
    ) -> BatchStates:
        width = batch[0].num_tokens
        inputs = torch.zeros(len(batch), width, dtype=torch.long)
        positions = torch.zeros(len(batch), width, dtype=torch.long)
        # Padding attends to itself, since a row of the softmax that sees nothing is not a number.
        visible = torch.eye(width, dtype=torch.bool).repeat(len(batch), 1, 1)
        sequences: list[int] = []
        rows: list[int] = []
        paths: list[np.ndarray] = []
        for row, tree in enumerate(batch):
            packed = pack(tree, token_ids)
            used = slice(0, tree.num_tokens)
            inputs[row, used] = torch.from_numpy(packed.token_ids)
            positions[row, used] = torch.from_numpy(packed.positions)
            visible[row, used, used] = torch.from_numpy(packed.visible)
            sequences += tree.sequences
            rows += [row] * len(tree.sequences)
            paths += packed.paths
        dtype = self._autocast_dtype or next(p.dtype for p in self._model.parameters() if p.is_floating_point())
        # Additive, since eager attention adds a boolean mask as 0 and 1 without an error.
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
        hidden, _ = self._forward(
            inputs,
            sum(tree.num_tokens for tree in batch),
            [feature.layer for feature in features],
            attention_mask=mask.unsqueeze(1).to(self._device),
            position_ids=positions.to(self._device),
        )
        return _read(hidden, features, sequences, rows, paths)

    def _cached(
        self, batch: Sequence[Tree], token_ids: Sequence[tuple[int, ...]], features: Sequence[Feature]
    ) -> BatchStates | None:
        """Forward what all sequences of a tree share, then each rest; None where the model's cache cannot be copied."""
        order = sorted(((_shared_length(tree, token_ids), tree) for tree in batch), key=lambda item: -item[0])
        prefixes = [token_ids[tree.sequences[0]][:shared] for shared, tree in order]
        layers = [feature.layer for feature in features]
        hidden, cache = self._forward(_padded(prefixes), sum(map(len, prefixes)), layers, use_cache=True)
        cache_layers = getattr(cache, "layers", None)
        if not cache_layers or not all(hasattr(layer, "batch_select_indices") for layer in cache_layers):
            return None
        # The first sequence of a tree may be what the others share.
        whole = {
            tree.sequences[0]: row
            for row, (shared, tree) in enumerate(order)
            if shared == len(token_ids[tree.sequences[0]])
        }
        paths = [np.arange(len(prefixes[row])) for row in whole.values()]
        parts = [_read(hidden, features, list(whole), list(whole.values()), paths)] if whole else []
        rests = [
            (sequence, row)
            for row, (_, tree) in enumerate(order)
            for sequence in tree.sequences
            if sequence not in whole
        ]
        rests.sort(key=lambda item: len(prefixes[item[1]]) - len(token_ids[item[0]]))
        for start in range(0, len(rests), len(batch)):
            chunk = rests[start : start + len(batch)]
            lengths = [len(prefixes[row]) for _, row in chunk]
            suffixes = [token_ids[sequence][length:] for (sequence, _), length in zip(chunk, lengths, strict=True)]
            selected = copy.deepcopy(cache)
            selected.batch_select_indices(torch.tensor([row for _, row in chunk], device=self._device))
            inputs = _padded(suffixes)
            continued = self._continue_arguments(selected, lengths, inputs.shape[1])
            hidden, _ = self._forward(inputs, sum(map(len, suffixes)), layers, use_cache=True, **continued)
            paths = [np.arange(len(suffix)) for suffix in suffixes]
            parts.append(_read(hidden, features, [sequence for sequence, _ in chunk], range(len(chunk)), paths))
        return _joined(parts)

    def _continue_arguments(self, cache: Any, prefix_lengths: Sequence[int], new_tokens: int) -> dict[str, Any]:
        past = int(cache.get_seq_length())
        prefixes = torch.tensor(prefix_lengths, device=self._device).unsqueeze(1)
        arguments: dict[str, Any] = {
            self._cache_name: cache,
            "position_ids": prefixes + torch.arange(new_tokens, device=self._device),
        }
        if min(prefix_lengths) < past:
            slots = torch.arange(past + new_tokens, device=self._device)
            arguments["attention_mask"] = ((slots < prefixes) | (slots >= past)).long()
        return arguments


def is_out_of_memory(err: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU, whose allocator has no class of its own."""
    return isinstance(err, torch.OutOfMemoryError) or "can't allocate memory" in str(err)


def _is_padded(batch: Sequence[Tree]) -> bool:
    return any(tree.num_tokens < batch[0].num_tokens for tree in batch)


def _shared_length(tree: Tree, token_ids: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all sequences of a tree begin with: those that its first and its last share."""
    return common_prefix_length(token_ids[tree.sequences[0]], token_ids[tree.sequences[-1]])


def _relative_difference(values: Tensor, expected: Tensor) -> float:
    """Largest |row - expected| / |expected| over rows."""
    return float(((values.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)).max())


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of token ids padded on the right, shape (rows, longest)."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _read(
    hidden: dict[str | int, Tensor],
    features: Sequence[Feature],
    sequences: Sequence[int],
    rows: Sequence[int],
    paths: Sequence[np.ndarray],
) -> BatchStates:
    """Reduce hidden states (rows, positions, d) to one vector a sequence: `paths` says where its tokens stand in its row."""
    found = {}
    for feature in dict.fromkeys((F_OF_S, *features)):
        values = hidden[feature.layer]
        row_index = torch.tensor(list(rows), device=values.device)
        if feature.pooling == "last":
            ends = torch.tensor([int(path[-1]) for path in paths], device=values.device)
            found[feature] = values[row_index, ends].cpu()
        else:
            # A float32 sum: thousands of bfloat16 terms would lose all but the first few hundred.
            means = [
                values[row, torch.from_numpy(path).to(values.device)].mean(0, dtype=torch.float32)
                for row, path in zip(rows, paths, strict=True)
            ]
            found[feature] = torch.stack(means).to(values.dtype).cpu()
    return BatchStates(list(sequences), found)


def _joined(parts: Sequence[BatchStates]) -> BatchStates:
    return BatchStates(
        [sequence for part in parts for sequence in part.sequences],
        {feature: torch.cat([part.vectors[feature] for part in parts]) for feature in parts[0].vectors},
    )
