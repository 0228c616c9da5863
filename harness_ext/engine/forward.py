"""Runs a causal language model: states of the last token, and log-probabilities from the model's own logits.

Both are found at the same place for every architecture: the module that `get_output_embeddings()` returns. Its input is
f(s), after the final norm and any projection. In a pass over prompts a hook keeps that input at each prompt's last token
and hands the module one row only, so no (tokens, V) logits are computed. To read out, the model is called on a single
token and the hook puts the kept states in place of its hidden state: whatever the model does after its output embedding
(bias, soft-capping, scaling) is done to our states too.

Prompts are padded on the right and no attention mask is passed: a causal model's real tokens never see what comes after
them, positions are those of the unpadded prompt, state-space models work alike, and attention keeps its fastest kernel.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness_ext.contracts import LAST_LAYER, Feature
from harness_ext.engine.plan import Batch

__all__ = ["LastStateModel"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

F_OF_S = Feature()

READOUT_VALUES = 2**25
"""Logits held at once while reading out: 128 MiB in float32."""

BRANCH_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Relative difference up to which a continued cache counts as exact; half precision has 8 to 11 bits: 5e-2."""


class LastStateModel:
    """A causal LM as the pair (f, Φ).

    Args:
        model: A transformers causal LM, or a PEFT model around one, in eval mode.
        device: Where token ids are put; a model spread by `device_map` takes it from there.
        autocast_dtype: Mixed-precision dtype that lm_eval was asked for, or None.

    Raises:
        TypeError: If the model has no output embedding.
    """

    def __init__(self, model: nn.Module, *, device: torch.device, autocast_dtype: torch.dtype | None = None) -> None:
        head = model.get_output_embeddings()
        if head is None:
            raise TypeError(f"{type(model).__name__}.get_output_embeddings() is None, so it has no f(s).")
        self._model = model
        self._head = head
        self._autocast_dtype = autocast_dtype
        self._device = device
        self._config = model.config.get_text_config()
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        # transformers renamed the argument in 5.24 and drops the old name in 5.40.
        self._cache_name = "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"
        # Whether continuing a cache was seen to be exact, for rows without and with padding.
        self._branches_exact: dict[bool, bool] = {}

    @property
    def num_hidden_states(self) -> int:
        """Length of `hidden_states`: the number of blocks plus one."""
        return int(self._config.num_hidden_layers) + 1

    def states(
        self, batch: Batch, token_ids: Sequence[tuple[int, ...]], features: Sequence[Feature]
    ) -> dict[int, dict[Feature, Tensor]]:
        """Forward a batch and its branches.

        Args:
            batch: Which sequences; see `plan`.
            token_ids: All sequences, indexed as in `batch`.
            features: Vectors wanted of each sequence of the batch; f(s) is always among the result. Branches give f(s)
                only.

        Returns:
            For each sequence of the batch and each of its branches, feature -> tensor of shape (d,) on the CPU, in the
            dtype of the model's hidden states.
        """
        rows = [token_ids[sequence] for sequence in batch.sequences]
        found, cache = self._forward(rows, features, use_cache=bool(batch.branches))
        result = {
            sequence: {feature: found[feature][row] for feature in found}
            for row, sequence in enumerate(batch.sequences)
        }
        if batch.branches:
            result |= self._branch_states(batch, token_ids, cache)
        return result

    def log_probs(self, states: Tensor, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probabilities of next tokens, by the model's own readout.

        Args:
            states: f(s) of shape (n, d), as `states` returned them.
            tokens: Token ids wanted for each of the n states.

        Returns:
            For each state, a float32 tensor with the natural-log probabilities of its tokens.
        """
        result: list[Tensor] = []
        rows = max(1, READOUT_VALUES // int(self._config.vocab_size))
        for start in range(0, len(states), rows):
            logits = self._readout(states[start : start + rows]).float()
            log_partition = torch.logsumexp(logits, dim=-1, keepdim=True)
            for row, wanted in enumerate(tokens[start : start + rows]):
                index = torch.tensor(wanted, dtype=torch.long, device=logits.device)
                result.append((logits[row, index] - log_partition[row]).cpu())
        return result

    # ------------------------------------------------------------------------------------------------ one pass

    def _forward(
        self,
        rows: Sequence[tuple[int, ...]],
        features: Sequence[Feature],
        *,
        use_cache: bool = False,
        cache: Any = None,
        prefix_lengths: Sequence[int] | None = None,
    ) -> tuple[dict[Feature, Tensor], Any]:
        """Forward right-padded rows; with `cache`, rows continue cached prefixes of the given unpadded lengths."""
        lengths = torch.tensor([len(row) for row in rows])
        inputs = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        kwargs: dict[str, Any] = {"input_ids": inputs.to(self._device), "use_cache": use_cache or cache is not None}
        if cache is not None:
            assert prefix_lengths is not None
            kwargs |= self._continue_arguments(cache, prefix_lengths, inputs.shape[1])
        layers = [feature for feature in features if feature.layer != LAST_LAYER]
        if layers:
            kwargs["output_hidden_states"] = True

        with self._inference(), self._capture_head_input() as captured:
            output = self._model(**kwargs)
        hidden = captured[0]
        found = {F_OF_S: _pool(hidden, lengths, "last")}
        for feature in features:
            source = hidden if feature.layer == LAST_LAYER else output.hidden_states[feature.layer]
            found[feature] = _pool(source, lengths, feature.pooling)
        found = {feature: value.cpu() for feature, value in found.items()}
        return found, getattr(output, self._cache_name, None)

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        device_type = self._device.type
        with (
            torch.inference_mode(),
            torch.autocast(device_type, dtype=self._autocast_dtype, enabled=self._autocast_dtype is not None),
        ):
            yield

    @contextlib.contextmanager
    def _capture_head_input(self) -> Iterator[list[Tensor]]:
        """Collect the input of the output embedding, which itself is run on one row to keep the model's code happy."""
        captured: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            captured.append(args[0])
            return (args[0][:1, -1:], *args[1:])

        handle = self._head.register_forward_pre_hook(keep)
        try:
            yield captured
        finally:
            handle.remove()
        if len(captured) != 1 or captured[0].dim() != 3:
            raise TypeError(
                f"{type(self._model).__name__} called its output embedding {len(captured)} times in one forward pass, "
                "expected once with (rows, tokens, d), so f(s) is not defined for it. Natural tasks can run on another backend "
                "(for example --model vllm); probe tasks cannot."
            )

    # ------------------------------------------------------------------------------------------------- readout

    def _readout(self, states: Tensor) -> Tensor:
        """Logits of shape (n, V) of f(s) given as (n, d)."""

        def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (states.to(device=args[0].device, dtype=args[0].dtype).unsqueeze(0), *args[1:])

        token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        handle = self._head.register_forward_pre_hook(replace)
        try:
            with self._inference(), _float32_head(self._head):
                output = self._model(input_ids=token, use_cache=False)
        finally:
            handle.remove()
        return output.logits[0]

    # ------------------------------------------------------------------------------------------------ branches

    def _branch_states(
        self, batch: Batch, token_ids: Sequence[tuple[int, ...]], cache: Any
    ) -> dict[int, dict[Feature, Tensor]]:
        """f(s) of sequences that continue rows of the batch, from the cache where that is exact for this model."""
        result: dict[int, dict[Feature, Tensor]] = {}
        padded_length = len(token_ids[batch.sequences[0]])
        prefix_lengths = [len(token_ids[sequence]) for sequence in batch.sequences]
        # Branches of one call have equal numbers of new tokens, and rows with and without padding are kept apart,
        # since the one may be exact where the other is not.
        groups: dict[tuple[int, bool], list[Any]] = {}
        for branch in batch.branches:
            prefix = prefix_lengths[branch.row]
            new = len(token_ids[branch.sequence]) - prefix
            groups.setdefault((new, prefix < padded_length), []).append(branch)
        for (_, padded), branches in groups.items():
            for start in range(0, len(branches), len(batch.sequences)):
                chunk = branches[start : start + len(batch.sequences)]
                whole = [token_ids[branch.sequence] for branch in chunk]
                found = None
                if self._may_branch(cache, padded, padded_length + len(whole[0])):
                    found = self._continue(cache, chunk, whole, prefix_lengths, padded)
                if found is None:
                    order = sorted(range(len(whole)), key=lambda row: -len(whole[row]))
                    plain = self._forward([whole[row] for row in order], [])[0][F_OF_S]
                    found = torch.empty_like(plain)
                    found[order] = plain
                for row, branch in enumerate(chunk):
                    result[branch.sequence] = {F_OF_S: found[row]}
        return result

    def _may_branch(self, cache: Any, padded: bool, total_length: int) -> bool:
        if not self._branches_exact.get(padded, True):
            return False
        layers = getattr(cache, "layers", None)
        if not layers or not all(hasattr(layer, "batch_select_indices") for layer in layers):
            return False
        # A sliding window counts padding as tokens, and its cache forgets the beginning.
        window = getattr(self._config, "sliding_window", None) or getattr(self._config, "attention_chunk_size", None)
        return window is None or total_length <= window

    def _continue(
        self,
        cache: Any,
        chunk: Sequence[Any],
        whole: Sequence[tuple[int, ...]],
        prefix_lengths: Sequence[int],
        padded: bool,
    ) -> Tensor | None:
        """f(s) of `whole`, whose beginnings are rows of the cache; None where that turns out not to be exact."""
        prefixes = [prefix_lengths[branch.row] for branch in chunk]
        suffixes = [row[prefix:] for row, prefix in zip(whole, prefixes, strict=True)]
        selected = copy.deepcopy(cache)
        selected.batch_select_indices(torch.tensor([branch.row for branch in chunk], device=self._device))
        found = self._forward(suffixes, [], cache=selected, prefix_lengths=prefixes)[0][F_OF_S]
        if padded not in self._branches_exact:
            probe = min(range(len(whole)), key=lambda row: prefixes[row])  # the row with the most padding
            plain = self._forward([whole[probe]], [])[0][F_OF_S][0].float()
            difference = float((found[probe].float() - plain).norm() / plain.norm())
            exact = difference <= BRANCH_TOLERANCE.get(found.dtype, 5e-2)
            self._branches_exact[padded] = exact
            if not exact:
                logger.warning(
                    "%s does not continue %s prompts exactly from its cache (relative difference %.1e), so multi-token "
                    "label words are computed by separate passes.",
                    type(self._model).__name__,
                    "padded" if padded else "cached",
                    difference,
                )
                return None
        return found

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


def _pool(hidden: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    """Reduce (rows, positions, d) to (rows, d) over the real tokens; positions before them (virtual tokens) count not."""
    lengths = lengths.to(hidden.device)
    virtual = hidden.shape[1] - int(lengths.max())
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), virtual + lengths - 1]
    positions = torch.arange(hidden.shape[1], device=hidden.device) - virtual
    real = (positions >= 0) & (positions < lengths.unsqueeze(1))
    # A float32 sum: thousands of bfloat16 terms would lose all but the first few hundred.
    total = torch.where(real.unsqueeze(-1), hidden, 0).sum(1, dtype=torch.float32)
    return (total / lengths.unsqueeze(1)).to(hidden.dtype)


@contextlib.contextmanager
def _float32_head(head: nn.Module) -> Iterator[None]:
    """Let a plain half-precision linear head multiply in float32.

    Logits rounded to bfloat16 differ in steps of 1/16 at the usual magnitudes, so that different label words tie. Heads
    that are not plain linear layers (quantised, adapted, offloaded) are left as they are.
    """
    if (
        type(head) is not nn.Linear
        or head.weight.dtype not in (torch.bfloat16, torch.float16)
        or hasattr(head, "_hf_hook")
    ):
        yield
        return

    def forward(hidden: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.float()
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), head.weight.float(), bias)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
