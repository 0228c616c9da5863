"""Weights that are moved along a direction and put back bit by bit, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

__all__ = ["Weights"]


class Weights:
    """A context in which parameters θ can be replaced by θ + scale · v; leaving it restores θ.

    The tensors of θ themselves are not written to: the parameters' `data` point to a second set of tensors meanwhile. So θ
    comes back bit by bit at no cost, moves do not accumulate rounding, and the price is the memory of one such set, taken by
    the first move and given back on leaving.

    Do not nest two contexts over the same parameters, and take no graph from one position to another.

    Args:
        parameters: The parameters by name; each must be in memory.
        compact: Halve the price where θ came from a model in bfloat16: write into the tensors of θ, and keep θ in bfloat16
            where that is exactly the same. Nothing else may hold on to them then.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, compact: bool = False) -> None:
        self._parameters = dict(parameters)
        self._compact = compact
        self._originals: dict[str, Tensor] = {}
        self._moved: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}

    def __enter__(self) -> Weights:
        if self._originals:
            raise RuntimeError("These weights are moved already; leave their context before you enter it again.")
        self._originals = {name: parameter.data for name, parameter in self._parameters.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        self._originals, self._moved, self._kept = {}, {}, {}

    def perturb(self, direction: Mapping[str, Tensor] | Callable[[str, Tensor], Tensor], scale: float) -> None:
        """Set the weights to θ + scale · v; θ is where the context was entered, not where the last move led.

        Args:
            direction: v by name, or a function of a name and that parameter's θ that returns v there (so that all of v need not
                exist at once, for random signs from a generator). Of the parameter's shape and device and at most its
                precision; a name that a mapping lacks does not move.
            scale: The step.
        """
        if not self._originals:
            raise RuntimeError("Enter the context first: `with Weights(parameters) as weights: weights.perturb(…)`.")
        for name, parameter in self._parameters.items():
            theta = self._theta(name)
            part = direction(name, theta) if callable(direction) else direction.get(name)
            if part is None:
                self._restore(name)
                continue
            if name not in self._moved:
                self._moved[name] = self._room(name)
            torch.add(theta, part.detach(), alpha=scale, out=self._moved[name])
            parameter.data = self._moved[name]

    def displacement(self, vector: Mapping[str, Tensor]) -> float:
        """Return ⟨vector, θ_now − θ⟩, of what rounding has left of the last move.

        A step that is small against a weight is rounded to that weight's precision; without that, a move along the vector
        itself would give scale · ‖vector‖².
        """
        total = 0.0
        for name, part in vector.items():
            moved = (self._parameters[name].detach() - self._theta(name)).flatten()
            total += float(torch.dot(moved, part.detach().flatten().to(moved)))
        return total

    def restore(self) -> None:
        """Set the weights to θ, the very tensors; the context stays open for further moves."""
        for name in self._originals:
            self._restore(name)

    def _restore(self, name: str) -> None:
        if name in self._kept:
            self._originals[name].copy_(self._kept[name])
        self._parameters[name].data = self._originals[name]

    def _theta(self, name: str) -> Tensor:
        original = self._originals[name]
        return self._kept[name].to(original.dtype) if name in self._kept else original

    def _room(self, name: str) -> Tensor:
        """Where the moved values of a parameter go."""
        original = self._originals[name]
        if self._compact:
            kept = original.to(torch.bfloat16)
            if torch.equal(kept.to(original.dtype), original):
                self._kept[name] = kept
                return original
        return torch.empty_like(original)
