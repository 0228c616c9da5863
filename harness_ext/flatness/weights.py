"""Weights that are moved along a direction and put back bit by bit, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

__all__ = ["Weights"]


class Weights:
    """A context in which parameters θ can be replaced by θ + scale · v; leaving it restores θ.

    The tensors of θ themselves are never written to: the parameters' `data` point to a second set of tensors meanwhile. So
    θ comes back bit by bit at no cost, moves do not accumulate rounding, and the price is the memory of one such set, taken by
    the first move and given back on leaving.

    Do not nest two contexts over the same parameters, and take no graph from one position to another.

    Args:
        parameters: The parameters by name; each must be in memory.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._originals: dict[str, Tensor] = {}
        self._moved: dict[str, Tensor] = {}
        self._is_open = False

    def __enter__(self) -> Weights:
        if self._is_open:
            raise RuntimeError("These weights are moved already; leave their context before you enter it again.")
        self._originals = {name: parameter.data for name, parameter in self._parameters.items()}
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        self._originals, self._moved = {}, {}
        self._is_open = False

    def perturb(self, direction: Mapping[str, Tensor] | Callable[[str, Tensor], Tensor], scale: float) -> None:
        """Set the weights to θ + scale · v; θ is where the context was entered, not where the last move led.

        Args:
            direction: v by name, or a function of a name and that parameter's θ that returns v there (so that all of v need not
                exist at once, for random signs from a generator). Of the parameter's shape, dtype and device; a name that a
                mapping lacks does not move.
            scale: The step.
        """
        if not self._is_open:
            raise RuntimeError("Enter the context first: `with Weights(parameters) as weights: weights.perturb(…)`.")
        for name, parameter in self._parameters.items():
            original = self._originals[name]
            part = direction(name, original) if callable(direction) else direction.get(name)
            if part is None:
                parameter.data = original
                continue
            if name not in self._moved:
                self._moved[name] = torch.empty_like(original)
            torch.add(original, part.detach(), alpha=scale, out=self._moved[name])
            parameter.data = self._moved[name]

    def restore(self) -> None:
        """Set the weights to θ, the very tensors; the context stays open for further moves."""
        for name, original in self._originals.items():
            self._parameters[name].data = original
