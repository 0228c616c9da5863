"""The largest eigenvalue of the Hessian of the mean loss over some blocks, with a memory of few vectors.

Locally optimal conjugate gradient (Knyazev 2001, LOBPCG with one vector and no preconditioner): each iteration takes the best
combination of the vector x, its residual and the last step. For the number of products it needs that is as good as Lanczos,
which would have to keep or repeat all its vectors to give an eigenvector, and far better than power iteration.

A product is a central difference of gradients, H v ≈ (∇L(θ + h v) − ∇L(θ − h v)) / 2h: two forward and backward passes with any
attention and any kernels, where double backward needs unfused attention, more time and a graph twice as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from harness_ext.flatness.loss import Blocks, PretrainingLoss
from harness_ext.flatness.signs import generator_of, random_signs
from harness_ext.flatness.weights import Weights

__all__ = ["TopEigenvalue", "top_eigenvalue"]

Vector = dict[str, Tensor]
"""A vector over the parameters, by name."""

STORED = torch.bfloat16
"""Type of the vectors that are kept. Rounding x moves its Rayleigh quotient by the square of 2⁻⁹ only, and everything that is
derived from a rounded vector is derived from its rounded values."""

LOSS_CHANGE = 3e-5
"""Nats by which a step may change the loss along a direction of the largest curvature seen: far above float32's rounding."""

FIRST_LOSS_CHANGE = 1e-2
"""Nats by which the first step, along the gradient, may change the loss, before any curvature was seen."""

LARGEST_STEP = 3e-4
"""Root mean square of the changes of the weights by a step, at most, where the curvature would allow more."""

PIECE = 2**20
"""Elements worked on at once, so that what a piece needs stays in the cache and out of the peak of memory."""

NOISE = 0.05
"""Length of the random part of the start, relative to the gradient's."""


class TopEigenvalue(NamedTuple):
    """The largest eigenvalue of a Hessian, as far as it was found.

    Attributes:
        value: The Rayleigh quotient uᵀHu of the unit vector u that was found, a lower bound of the largest eigenvalue.
        residual: ‖Hu − value · u‖: an eigenvalue is within this of the value. The value's own error is of second order, at most
            residual² over the distance to the next eigenvalue.
        iterations: Iterations done.
        per_block: uᵀH_b u for each block, float64 of shape (n,) in the order of the blocks; their mean is the value.
        converged: Whether the residual is within the tolerance. Never where the value is 0.
        products: Products with the Hessian; each costs two gradients of all blocks.
    """

    value: float
    residual: float
    iterations: int
    per_block: np.ndarray
    converged: bool
    products: int


def top_eigenvalue(
    loss: PretrainingLoss,
    parameters: Mapping[str, nn.Parameter],
    blocks_list: Sequence[Blocks],
    *,
    seed: int,
    max_iterations: int,
    tolerance: float,
) -> TopEigenvalue:
    """Find the algebraically largest eigenvalue λ of H, the Hessian of the mean of L over all blocks.

    By first-order perturbation theory a change dH of the Hessian changes λ by uᵀ dH u. So the values uᵀH_b u of the blocks
    are what λ is a mean of, and their standard error is the error of λ by the delta method. It covers the choice of the
    blocks at this number of blocks. It covers neither what is left of the iteration's error (`residual`) nor the bias: u is
    fitted to these blocks, so that λ of few blocks is on average above λ of the corpus (it is a maximum, and convex in H).

    Call it inside `prepared`. The weights come back bit by bit. Besides the weights, memory holds two vectors in float32 (one
    of them in bfloat16 if the weights came from that) and four in bfloat16, and the graph of one block. The result depends
    neither on how the blocks are batched, nor on the device's random numbers. Where the loss has kinks (ReLU), differences see
    the curvature that the kinks have on average, and double backward does not.

    Args:
        loss: L, of a model in float32 or float64: differences of gradients drown in the rounding of half precision.
        parameters: What H is with respect to, by name; each requires a gradient.
        blocks_list: Batches of blocks; blocks may differ in length between batches, and each block counts the same.
        seed: Of the random part of the vector that the iteration starts from.
        max_iterations: When to give up.
        tolerance: Of the residual, relative to the value. The value's own error is of second order, but the iteration can rest
            for a while near a smaller eigenvalue, of which only a small residual is a remedy: 0.01 is a good choice, and
            below 0.003 the rounding of vectors is in the way.

    Returns:
        The value; `converged` is False where the tolerance was not reached.

    Raises:
        ValueError: If there are no blocks, or a parameter needs no gradient or is of half precision.
        FloatingPointError: If the loss or its gradient is not finite.
    """
    if not blocks_list:
        raise ValueError("blocks_list is empty; expected at least one batch of blocks.")
    if max_iterations < 1 or not 0 < tolerance < 1:
        raise ValueError(
            f"max_iterations is {max_iterations} and tolerance {tolerance}; expected at least 1, and between 0 and 1."
        )
    for name, parameter in parameters.items():
        if not parameter.requires_grad or parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parameter {name} has dtype {parameter.dtype} and requires_grad={parameter.requires_grad}; expected "
                "float32 and True. Enter `prepared(model, parameters)` before."
            )
    with _own_gradients(parameters):
        hessian = _Hessian(loss, parameters, [of_b.one(row) for of_b in blocks_list for row in range(len(of_b.tokens))])
        return _Search(hessian, seed).run(max_iterations, tolerance)


class _Search:
    """State of the iteration: x, the unit residual d, the last step p with H p, all in `STORED`.

    H x is not kept: it is ‖r‖ d + ρ x, to within the rounding of the residual.
    """

    def __init__(self, hessian: _Hessian, seed: int) -> None:
        self.hessian = hessian
        self.x = self.start(seed)
        self.d: Vector = {}
        self.p: Vector = {}
        self.hp: Vector = {}
        self.rho = self.length = 0.0

    def start(self, seed: int) -> Vector:
        """The unit gradient and a little noise.

        The gradient of a trained model lies mostly along eigenvectors of large curvature (Gur-Ari et al. 2018), which saves
        products; the noise gives every eigenvector a share.
        """
        gradient = self.hessian.gradient()
        length = math.sqrt(_dot(gradient, gradient))
        count = sum(part.numel() for part in gradient.values())
        start = {}
        for name, part in gradient.items():
            signs = random_signs(part.shape, generator_of(seed, 0, f"eigenvalue {name}")).to(part)
            noise = signs.mul_((NOISE if length else 1.0) / math.sqrt(count))
            start[name] = (noise.add_(part, alpha=1 / length) if length else noise).to(STORED)
        return start

    def run(self, max_iterations: int, tolerance: float) -> TopEigenvalue:
        """Iterate until the residual of a fresh product, not of the recurrence, is small enough."""
        iterations = 0
        self.set_residual(self.hessian.times(self.x))
        while True:
            while iterations < max_iterations and not self.length <= tolerance * abs(self.rho):
                self.improve()
                iterations += 1
            fresh, per_block = self.hessian.times_by_block(self.x)
            square = _dot(self.x, self.x)
            self.set_residual(fresh)
            value = float(per_block.mean()) / square
            residual = self.length / math.sqrt(square)
            converged = value != 0 and residual <= tolerance * abs(value)
            if converged or iterations >= max_iterations or value == 0:
                return TopEigenvalue(
                    value, residual, iterations, per_block / square, converged, self.hessian.num_products
                )
            # At least one, as the two residuals that are compared with the tolerance differ by rounding.
            self.improve()
            iterations += 1

    def set_residual(self, hx: Vector) -> None:
        """Set ρ and the residual from H x, which is overwritten."""
        self.rho = _dot(self.x, hx) / _dot(self.x, self.x)
        for name, x in self.x.items():
            hx[name].sub_(x, alpha=self.rho)
        self.length = math.sqrt(_dot(hx, hx))
        if not math.isfinite(self.length):
            numbers = [number for block in self.hessian.blocks for number in block.numbers]
            raise FloatingPointError(
                f"The gradient of the loss of blocks {numbers[:8]} is not finite at or near the weights, so neither is "
                "lambda_max. Look at the losses of these blocks."
            )
        scale = 1 / self.length if self.length else 0.0
        for name, part in hx.items():
            if name not in self.d:
                self.d[name] = torch.empty_like(self.x[name])
            self.d[name].copy_(part.mul_(scale))

    def improve(self) -> None:
        """Replace x by the vector of the largest Rayleigh quotient in the span of x, d and p."""
        hd = self.hessian.times(self.d)
        x, d, p, hp = self.x, self.d, self.p, self.hp
        # Gram matrices of (x, d, p), without and with H between. H d is fresh, so its products are taken rather than those of
        # the recurrence.
        xx, xd, dd = _dot(x, x), _dot(x, d), _dot(d, d)
        gram = [[xx, xd], [xd, dd]]
        between = [[self.rho * xx, _dot(x, hd)], [0.0, _dot(d, hd)]]
        if p:
            xp, dp = _dot(x, p), _dot(d, p)
            gram = [[xx, xd, xp], [xd, dd, dp], [xp, dp, _dot(p, p)]]
            between = [[*between[0], _dot(x, hp)], [*between[1], _dot(p, hd)], [0.0, 0.0, _dot(p, hp)]]
        a, b, c = _largest(np.array(between), np.array(gram))
        for name in x:
            if name not in p:
                p[name], hp[name] = torch.zeros_like(x[name]), torch.zeros_like(x[name])
            whole = (x[name], d[name], p[name], hp[name], hd[name])
            for x_, d_, p_, hp_, hd_ in zip(*(part.view(-1).split(PIECE) for part in whole), strict=True):
                old, unit = x_.to(hd_.dtype), d_.to(hd_.dtype)
                step = p_.to(hd_.dtype).mul_(c).add_(unit, alpha=b)
                h_step = hp_.to(hd_.dtype).mul_(c).add_(hd_, alpha=b)
                p_.copy_(step)
                hp_.copy_(h_step)
                # x is rounded, and H x is not: the residual is that of the rounded x up to H times the rounding, which is
                # nothing, as rounding has no preferred direction among so many.
                x_.copy_(step.add_(old, alpha=a))
                hd_.copy_(h_step.add_(unit.mul_(self.length).add_(old, alpha=self.rho), alpha=a))
        self.set_residual(hd)


class _Hessian:
    """Products with the Hessian of the mean loss over blocks."""

    def __init__(self, loss: PretrainingLoss, parameters: Mapping[str, nn.Parameter], blocks: Sequence[Blocks]) -> None:
        self.loss, self.parameters, self.blocks = loss, dict(parameters), blocks
        self.num_products = 0
        self.largest_step = LARGEST_STEP * math.sqrt(sum(parameter.numel() for parameter in parameters.values()))
        self.step = self.largest_step
        self.curvature = 0.0
        # Weights may move in place unless two tensors of the model share memory without being one.
        tensors = [t for t in (*loss.model.parameters(), *loss.model.buffers()) if t.numel() and not t.is_meta]
        self.compact = len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)

    def gradient(self) -> Vector:
        """Return the gradient of the mean loss, in the type of the weights."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for block in self.blocks:
            _add_gradient(self.loss, block)
        gradient = self._take(1 / len(self.blocks))
        if length := math.sqrt(_dot(gradient, gradient)):
            self.step = min(self.step, FIRST_LOSS_CHANGE / length)
        return gradient

    def times(self, vector: Vector) -> Vector:
        """Return H v, in the type of the weights."""
        return self._times(vector, by_block=False)[0]

    def times_by_block(self, vector: Vector) -> tuple[Vector, np.ndarray]:
        """Return H v, and vᵀH_b v for each block, float64 of shape (n,)."""
        return self._times(vector, by_block=True)

    def _times(self, vector: Vector, *, by_block: bool) -> tuple[Vector, np.ndarray]:
        """H v, and the values of blocks if they are wanted: each costs a pass over the parameters."""
        self.num_products += 1
        length = math.sqrt(_dot(vector, vector))
        if length == 0:
            return {name: torch.zeros_like(p) for name, p in self.parameters.items()}, np.zeros(len(self.blocks))
        step = self.step / length
        width = 0.0
        slopes = np.zeros((2, len(self.blocks)))
        for parameter in self.parameters.values():
            parameter.grad = None
        with Weights(self.parameters, compact=self.compact) as weights:
            for side, sign in enumerate((1, -1)):
                weights.perturb(vector, sign * step)
                # Twice the step, less what rounding has left out, which in large weights is all of it. For an eigenvector this
                # makes up for it to first order.
                width += sign * weights.displacement(vector) / length**2
                # The sum of one side is subtracted from the other's as that builds up, in the one vector `grad`.
                for parameter in self.parameters.values():
                    if parameter.grad is not None:
                        parameter.grad.neg_()
                before = self._slope(vector) if by_block else math.nan
                for number, block in enumerate(self.blocks):
                    _add_gradient(self.loss, block)
                    after = self._slope(vector) if by_block else math.nan
                    slopes[side, number], before = after - before, after
        product = self._take(-1 / (width * len(self.blocks)))
        self.curvature = max(self.curvature, math.sqrt(_dot(product, product)) / length)
        if self.curvature:
            self.step = min(self.largest_step, math.sqrt(2 * LOSS_CHANGE / self.curvature))
        return product, (slopes[0] - slopes[1]) / width

    def _take(self, scale: float) -> Vector:
        """Move `grad`, scaled, out of the parameters; zeros for one that the loss does not depend on."""
        taken = {}
        for name, parameter in self.parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.mul_(scale)
            taken[name] = gradient.contiguous()
            parameter.grad = None
        return taken

    def _slope(self, vector: Vector) -> float:
        return _dot(vector, {name: p.grad for name, p in self.parameters.items() if p.grad is not None})


def _add_gradient(loss: PretrainingLoss, block: Blocks) -> None:
    """Add the gradient of the loss of one block to `grad`, with the logits of one chunk at a time in memory."""
    states = loss.states(block.tokens).flatten(0, 1)
    targets = block.targets.flatten()
    # Cut between body and head: each chunk's graph ends at the cut and is freed with its backward pass.
    cut = states.detach().requires_grad_()
    for piece in loss.chunks(len(states)):
        logits = loss.logits(cut[piece])
        losses = nn.functional.cross_entropy(logits, targets[piece].to(logits.device), reduction="sum")
        (losses / len(targets)).backward()
    if states.requires_grad:
        states.backward(cut.grad)


def _dot(a: Vector, b: Mapping[str, Tensor]) -> float:
    """⟨a, b⟩ over the names that b has, accumulated in float64 over pieces."""
    total = 0.0
    for name, part in b.items():
        dtype = torch.promote_types(torch.float32, torch.promote_types(a[name].dtype, part.dtype))
        pieces = zip(a[name].reshape(-1).split(PIECE), part.reshape(-1).split(PIECE), strict=True)
        total += sum(float(torch.dot(of_a.to(dtype), of_b.to(dtype))) for of_a, of_b in pieces)
    return total


def _largest(between: np.ndarray, gram: np.ndarray) -> tuple[float, float, float]:
    """The coefficients of the vector of unit length with the largest quotient cᵀAc / cᵀGc; A is given by its upper half.

    Directions that G says are hardly there are left out: near convergence the three vectors are nearly dependent.
    """
    scale = 1 / np.sqrt(np.maximum(np.diag(gram), np.finfo(float).tiny))
    values, vectors = np.linalg.eigh(gram * np.outer(scale, scale))
    kept = values > 1e-6 * values[-1]
    basis = scale[:, None] * vectors[:, kept] / np.sqrt(values[kept])
    upper = np.triu(between)
    symmetric = upper + np.triu(between, 1).T
    _, best = np.linalg.eigh(basis.T @ symmetric @ basis)
    coefficients = basis @ best[:, -1]
    a, b, c = [*coefficients.tolist(), 0.0][:3]
    return a, b, c


@contextmanager
def _own_gradients(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Use the parameters' `grad` as scratch memory and give it back as it was."""
    before = [(parameter, parameter.grad) for parameter in parameters.values()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
