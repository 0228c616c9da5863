"""The pretraining loss as a function of the weights, and the model made ready for its derivatives.

For a block of T tokens x with targets w, L(θ) = −(1/T) Σ_t log p_θ(w_t | x_≤t), in nats per token. Everything in this
package is a derivative of L, so traces too are those of the mean over tokens, not of the sum.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harness_ext.halves import capture_head_input, replace_head_input

__all__ = ["Blocks", "PretrainingLoss", "prepared", "select_parameters"]

CHUNK_VALUES = 2**23
"""Logits held at once by a chunk: 32 MiB in float32; their softmax and gradient take as much again each."""


class Blocks(NamedTuple):
    """A batch of B blocks of equal length, all of whose T targets count.

    Attributes:
        tokens: What the model reads, int64 of shape (B, T).
        targets: What it has to predict at each position, int64 of shape (B, T).
        numbers: Number of each block in its corpus, which seeds what is random about it; B of them.
    """

    tokens: Tensor
    targets: Tensor
    numbers: tuple[int, ...]

    def one(self, row: int) -> Blocks:
        """The batch of one block."""
        return Blocks(self.tokens[row : row + 1], self.targets[row : row + 1], (self.numbers[row],))


class PretrainingLoss:
    """L(θ) at the current weights of a model; see the module. Wrap its use in `prepared`.

    Args:
        model: A transformers causal LM, or a PEFT model around one.
        device: Where the model takes its token ids.

    Raises:
        TypeError: If the model has no output embedding.
    """

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        head = model.get_output_embeddings()
        if head is None:
            raise TypeError(
                f"{type(model).__name__}.get_output_embeddings() is None; expected a causal language model, whose loss has a "
                "next-token distribution. Load it with AutoModelForCausalLM (--model hf)."
            )
        self.model, self.head, self.device = model, head, device

    def states(self, tokens: Tensor) -> Tensor:
        """Return f of shape (B, T, d) for tokens of shape (B, T), with its graph if gradients are on."""
        with capture_head_input(self.model, self.head) as captured:
            self.model(input_ids=tokens.to(self.device), use_cache=False)
        return captured[0]

    def logits(self, states: Tensor) -> Tensor:
        """Return the model's logits, float32 of shape (N, V), for states of shape (N, d)."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with replace_head_input(self.head, states.unsqueeze(0)):
            output = self.model(input_ids=token, use_cache=False)
        return output.logits[0].float()

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Cut a sequence of tokens so that the logits of one piece take `CHUNK_VALUES` at most."""
        size = max(1, CHUNK_VALUES // int(self.model.config.get_text_config().vocab_size))
        for start in range(0, num_tokens, size):
            yield slice(start, min(start + size, num_tokens))

    @torch.no_grad()
    def token_losses(self, blocks: Blocks) -> Tensor:
        """Return −log p(target), float32 of shape (B, T) on the CPU; no gradients."""
        states = self.states(blocks.tokens).flatten(0, 1)
        targets = blocks.targets.flatten()
        losses = [
            nn.functional.cross_entropy(
                logits := self.logits(states[piece]), targets[piece].to(logits.device), reduction="none"
            ).cpu()
            for piece in self.chunks(len(states))
        ]
        return torch.cat(losses).view(blocks.targets.shape)

    def mean_loss(self, blocks: Blocks) -> Tensor:
        """Return L over all tokens of the batch as a scalar with its graph, for derivatives of any order.

        The logits of the whole batch are in the graph: give few blocks.
        """
        logits = self.logits(self.states(blocks.tokens).flatten(0, 1))
        return nn.functional.cross_entropy(logits, blocks.targets.flatten().to(logits.device))


def select_parameters(
    model: nn.Module, *, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()
) -> dict[str, nn.Parameter]:
    """Choose parameters by name; a tied one counts once, under its first name.

    Args:
        model: The model.
        include: Shell patterns such as `*.mlp.*`; a parameter is chosen if one of them matches one of its names.
        exclude: Patterns of names that are left out, with priority.

    Returns:
        The chosen parameters by their first names, in the model's order.

    Raises:
        ValueError: If a pattern matches nothing, or nothing is left.
        TypeError: If a chosen parameter is not of a floating-point type or not in memory, so that it has no derivative here.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)

    def matched(patterns: Sequence[str], option: str) -> set[nn.Parameter]:
        found = set()
        for pattern in patterns:
            hits = {p for p, of_p in names.items() if any(fnmatch.fnmatchcase(name, pattern) for name in of_p)}
            if not hits:
                some = ", ".join(name for of_p in list(names.values())[:4] for name in of_p[:1])
                raise ValueError(
                    f"flatness option {option}: {pattern!r} matches no parameter. Patterns are shell patterns for whole "
                    f"names, such as '*.mlp.*'; the names here are {some}, …"
                )
            found |= hits
        return found

    chosen = matched(include, "include") - matched(exclude, "exclude")
    if not chosen:
        raise ValueError(f"flatness options include {list(include)} and exclude {list(exclude)} leave no parameter.")
    selected = {of_p[0]: p for p, of_p in names.items() if p in chosen}
    for name, parameter in selected.items():
        if not parameter.is_floating_point():
            raise TypeError(
                f"parameter {name} has dtype {parameter.dtype}, as in a quantised model, and no derivative. Load the model "
                "without quantisation, or leave such parameters out by the flatness option `exclude`."
            )
        if parameter.is_meta:
            raise TypeError(
                f"parameter {name} is offloaded, so it cannot be perturbed. Load the model into memory, or leave it out "
                "by the flatness option `exclude`."
            )
    return selected


@contextlib.contextmanager
def prepared(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Put the model into the state in which derivatives are right, and back into the one it was in.

    Inside, the model is in eval mode (dropout off), in float32 throughout, autocast is off, exactly the given parameters
    require gradients, and an embedding's row for padding has a gradient like any other: a block has no padding, and where the
    token of padding is the end of text the loss depends on that row. Afterwards weights are the very tensors they were before,
    bit by bit.
    """
    training = [module for module in model.modules() if module.training]
    tensors = [*model.parameters(), *model.buffers()]
    before = [(tensor, tensor.data, tensor.requires_grad, tensor.grad) for tensor in tensors]
    chosen = {id(parameter) for parameter in parameters.values()}
    padded = [(m, m.padding_idx) for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    devices = {tensor.device.type for tensor in tensors if not tensor.is_meta}
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            model.eval()
            for module, _ in padded:
                module.padding_idx = None
            for tensor, data, _, _ in before:
                if data.is_floating_point() and data.dtype != torch.float32 and not data.is_meta:
                    tensor.data = data.float()
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(id(tensor) in chosen)
                    tensor.grad = None
            yield
        finally:
            for tensor, data, requires_grad, grad in before:
                tensor.grad = None  # first: a gradient has to have the dtype of its tensor
                tensor.data = data
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(requires_grad)
                    tensor.grad = grad
            for module, padding in padded:
                module.padding_idx = padding
            for module in training:
                module.training = True
