"""The Φ of a causal language model: next-token distributions p_f(·|s) from states f(s), and what is made of them.

Every distribution comes from the model's own logits: the model is called on a single token and a hook puts the given states in
place of its hidden state, so that a bias, soft-capping, scaling and a padded vocabulary are what they are in the model.
Distributions are made a few rows at a time and never kept: no array has (n, V) entries.

Source of the conditional mean Φᵀp_f(·|s) and of the random projection that is its control: Saunshi, Malladi, Arora (ICLR
2021), section 4.2 and appendix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness_ext.contracts import CONDITIONAL_MEAN, RANDOM_PROJECTION
from harness_ext.halves import replace_head_input

__all__ = ["Readout", "inference"]

CHUNK_VALUES = 2**24
"""Logits held at once: 64 MiB in float32, and as much again while they become probabilities."""

KEPT_WEIGHT_BYTES = 2**29
"""A float32 copy of Φ is kept up to this size; a larger one is cast again, block by block, for each chunk."""

BLOCK_ROWS = 8192
"""Rows of Φ cast at once."""

LINEARITY_TOLERANCE = 1e-2
"""Relative; half precision has 8 to 11 bits."""


class Readout:
    """Reads states out; see the module.

    Args:
        model: The causal LM.
        head: Its output embedding.
        device: Where the model takes its token ids.
        autocast_dtype: Mixed-precision dtype that lm_eval was asked for, or None.
    """

    def __init__(
        self, model: nn.Module, head: nn.Module, *, device: torch.device, autocast_dtype: torch.dtype | None = None
    ) -> None:
        self._model, self._head, self._device, self._autocast_dtype = model, head, device, autocast_dtype
        self._float32_weight: Tensor | None = None
        self._random: Tensor | None = None
        self._embedding: Tensor | None = None

    # -------------------------------------------------------------------------------------------- distributions

    def logits(self, states: Tensor) -> Tensor:
        """Return the model's logits, float32 of shape (n, V), for f(s) of shape (n, d).

        V counts the rows that the model pads its vocabulary with, as its own softmax does. Give a few hundred states at a
        time, or use the methods below.
        """
        token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        with (
            replace_head_input(self._head, states.unsqueeze(0)),
            inference(self._device, self._autocast_dtype),
            self._in_float32(),
        ):
            output = self._model(input_ids=token, use_cache=False)
        return output.logits[0].float()

    @torch.inference_mode()
    def read(
        self, states: Tensor, tokens: Sequence[Sequence[int]], mixtures: Sequence[str] = ()
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Read next-token log-probabilities and mixtures of the distribution.

        Args:
            states: f(s) of shape (n, d).
            tokens: Token ids whose log-probability is wanted, for each state.
            mixtures: `CONDITIONAL_MEAN` for Φᵀp, `RANDOM_PROJECTION` for Rᵀp.

        Returns:
            For each state, a float32 tensor with the natural-log probabilities of its tokens; and for each mixture a
            float32 tensor of shape (n, d). All on the CPU.
        """
        log_probs: list[Tensor] = []
        parts: dict[str, list[Tensor]] = {name: [] for name in mixtures}
        for rows, logits, log_partition in self._chunks(states):
            wanted = [torch.tensor(list(ids), dtype=torch.long) for ids in tokens[rows]]
            lengths = [len(ids) for ids in wanted]
            # One gather for the chunk: rows as often as tokens are wanted of them.
            row_of = torch.repeat_interleave(torch.arange(len(wanted)), torch.tensor(lengths)).to(logits.device)
            values = logits[row_of, torch.cat(wanted).to(logits.device)] - log_partition[row_of, 0]
            log_probs += values.cpu().split(lengths)
            if mixtures:
                probabilities = logits.sub_(log_partition).exp_()
                for name in mixtures:
                    parts[name].append(self._mix(probabilities, name).cpu())
        return log_probs, {name: torch.cat(values) for name, values in parts.items()}

    @torch.inference_mode()
    def probabilities(self, states: Tensor) -> np.ndarray:
        """Return p_f(·|s), float32 of shape (n, V), for a few hundred states (n, d)."""
        return np.concatenate(
            [torch.softmax(self.logits(states[rows]), dim=-1).cpu().numpy() for rows in self._slices(len(states))]
        )

    @torch.inference_mode()
    def class_means(self, states: Tensor, labels: np.ndarray, num_classes: int) -> np.ndarray:
        """Return the mean of log p_f(w|s) over the states of each class, for every token w.

        Args:
            states: f(s) of shape (n, d).
            labels: Classes, integers in 0..K-1, shape (n,).
            num_classes: K.

        Returns:
            float64 of shape (K, V), in nats; -inf for tokens that the model rules out after a state of the class.

        Raises:
            ValueError: If a class has no state.
        """
        counts = np.bincount(labels, minlength=num_classes)
        if not counts.all():
            raise ValueError(f"No document of class {int(counts.argmin())} among {len(labels)}. Take more documents.")
        sums: Tensor | None = None
        for rows, logits, log_partition in self._chunks(states):
            if sums is None:
                sums = torch.zeros(num_classes, logits.shape[1], dtype=torch.float64)
            for label in np.unique(labels[rows]):
                members = torch.from_numpy(np.flatnonzero(labels[rows] == label)).to(logits.device)
                # The mean of log-probabilities is that of the logits minus that of the log-partition: no table of them is made.
                # Within a chunk a float32 sum of a few hundred terms is exact to 1e-5; chunks add up in float64.
                sums[label] += (logits[members].sum(0) - log_partition[members].sum()).cpu().double()
        assert sums is not None, "every class has a state"
        return np.asarray(sums.numpy() / counts[:, np.newaxis])

    def _chunks(self, states: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, their logits (a tensor that may be changed, in inference mode) and log-partition (rows, 1)."""
        for rows in self._slices(len(states)):
            logits = self.logits(states[rows])
            yield rows, logits, torch.logsumexp(logits, dim=-1, keepdim=True)

    def _slices(self, num_states: int) -> Iterator[slice]:
        """Yield runs of states whose logits are held at once."""
        size = max(1, CHUNK_VALUES // int(self._model.config.get_text_config().vocab_size))
        for start in range(0, num_states, size):
            yield slice(start, min(start + size, num_states))

    def _mix(self, probabilities: Tensor, name: str) -> Tensor:
        """Multiply (n, V) by Φ or R, in float32."""
        matrix = {CONDITIONAL_MEAN: self.output_embedding, RANDOM_PROJECTION: self._random_matrix}[name]()
        # A model spread over devices returns its logits on the first, and has its output embedding on the last.
        probabilities = probabilities.to(matrix.device)
        if matrix.dtype == torch.float32:
            return probabilities @ matrix
        result = torch.zeros(len(probabilities), matrix.shape[1], device=probabilities.device)
        for start in range(0, len(matrix), BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            result += probabilities[:, rows] @ matrix[rows].float()
        return result

    # ------------------------------------------------------------------------------------------------ matrices

    @property
    def has_bias(self) -> bool:
        """Whether the head adds a bias, which is part of p_f and no part of Φ."""
        return getattr(self._head, "bias", None) is not None

    def output_embedding(self) -> Tensor:
        """Return Φ of shape (V, d), on the model's device: float32, or the weight itself where a copy would be large.

        Of a head that is not a plain linear layer (quantised, adapted) Φ is what it does to the unit vectors. Where weights are
        spread over processes, all have to make the first call together.

        Raises:
            TypeError: If the head is not affine, so that there is no Φ.
        """
        if self._embedding is None:
            head = self._head
            if _is_plain(head):
                weight = self._weight()
                small = weight.numel() * 4 <= KEPT_WEIGHT_BYTES
                self._embedding = self._weight_in_float32() if small else weight
            else:
                self._embedding = self._embedding_of_unit_vectors()
        return self._embedding

    def gram(self) -> np.ndarray:
        """Return ΦᵀΦ of shape (d, d), float64."""
        embedding = self.output_embedding()
        device = torch.device("cpu") if embedding.device.type == "mps" else embedding.device  # which has no float64
        total = torch.zeros(embedding.shape[1], embedding.shape[1], dtype=torch.float64, device=device)
        for start in range(0, len(embedding), BLOCK_ROWS):
            block = embedding[start : start + BLOCK_ROWS].to(device).double()
            total += block.T @ block
        return total.cpu().numpy()

    def _embedding_of_unit_vectors(self) -> Tensor:
        like = next((p for p in self._head.parameters() if p.is_floating_point()), torch.zeros(1))
        dim = int(getattr(self._head, "in_features", 0)) or int(self._model.config.get_text_config().hidden_size)
        # Weights that are offloaded come to the model's own device for a call.
        device = self._device if like.is_meta else like.device
        points = torch.eye(dim, dtype=like.dtype, device=device)
        with inference(self._device, self._autocast_dtype):
            origin = self._head(torch.zeros_like(points[:1])).float()
            weight = self._head(points).float() - origin
            generator = torch.Generator().manual_seed(0)
            probe = torch.randn(4, dim, generator=generator).to(points)
            answer = self._head(probe).float() - origin
            expected = probe.float() @ weight
        if float((answer - expected).norm()) > LINEARITY_TOLERANCE * float(answer.norm()):
            raise TypeError(
                f"The output embedding of {type(self._model).__name__} ({type(self._head).__name__}) is not affine, so it has "
                "no Φ: conditional means and Quad features do not exist for this model. Use features f (probe_<dataset>) or "
                "label words (natural_<dataset>, probe_words_<dataset>)."
            )
        return weight.T.contiguous()

    def _random_matrix(self) -> Tensor:
        """R of shape (V, d), float32: a Gaussian matrix with its columns made orthonormal, the same for every run."""
        if self._random is None:
            embedding = self.output_embedding()
            gaussian = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
            # On the CPU and with the signs of R's diagonal, which differ between implementations: projections are stored,
            # and one store may serve several machines.
            orthonormal, triangle = torch.linalg.qr(gaussian)
            self._random = (orthonormal * triangle.diagonal().sign()).to(embedding.device)
        return self._random

    # ----------------------------------------------------------------------------------------------- precision

    def _weight(self) -> Tensor:
        weight = self._head.weight.detach()
        # Of weights that are spread over processes (FSDP) each has a part outside of the model's own calls.
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight

    def _weight_in_float32(self) -> Tensor:
        weight = self._weight()
        if weight.dtype == torch.float32:
            return weight
        if self._float32_weight is None:
            self._float32_weight = weight.float()
        return self._float32_weight

    @contextlib.contextmanager
    def _in_float32(self) -> Iterator[None]:
        """Let a plain half-precision linear head multiply in float32.

        Logits rounded to bfloat16 differ in steps of 1/16 at the usual magnitudes, so that different label words tie. Heads
        that are not plain linear layers (quantised, adapted, offloaded) are left as they are.
        """
        head = self._head
        if not _is_plain(head) or head.weight.dtype not in (torch.bfloat16, torch.float16):
            yield
            return

        def forward(hidden: Tensor) -> Tensor:
            bias = None if head.bias is None else head.bias.float()
            small = head.weight.numel() * 4 <= KEPT_WEIGHT_BYTES
            with torch.autocast(hidden.device.type, enabled=False):
                if small:
                    return functional.linear(hidden.float(), self._weight_in_float32(), bias)
                blocks = head.weight.split(BLOCK_ROWS)
                logits = torch.cat([functional.linear(hidden.float(), block.float()) for block in blocks], dim=-1)
                return logits if bias is None else logits + bias

        # accelerate wraps the module's forward in its instance: that one comes back afterwards.
        wrapped = head.__dict__.get("forward")
        head.forward = forward
        try:
            yield
        finally:
            del head.forward
            if wrapped is not None:
                head.forward = wrapped


def _is_plain(head: nn.Module) -> bool:
    """Whether the head is a linear layer whose weight is in memory, as it is: whole or in parts, but not quantised."""
    if type(head) is not nn.Linear or head.weight.is_meta:
        return False
    # torchao quantises by other types of tensors in the same layer; those that are spread have `full_tensor`.
    return type(head.weight) in (nn.Parameter, Tensor) or hasattr(head.weight, "full_tensor")


@contextlib.contextmanager
def inference(device: torch.device, autocast_dtype: torch.dtype | None) -> Iterator[None]:
    """No gradients, and the mixed precision that lm_eval was asked for."""
    with (
        torch.inference_mode(),
        torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None),
    ):
        yield
