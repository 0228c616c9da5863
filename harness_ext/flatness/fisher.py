"""Trace of the Fisher matrix of each block, from squared gradient norms that are read off one backward pass.

For a block of T tokens with logits z_t, J_t = ∂z_t/∂θ, p_t = softmax(z_t) and C_t = diag(p_t) − p_t p_tᵀ,

    F = (1/T) Σ_t E_{ŵ~p_t}[∇log p_t(ŵ) ∇log p_t(ŵ)ᵀ] = (1/T) Σ_t J_tᵀ C_t J_t.

It is the generalised Gauss-Newton matrix of the block's loss (Schraudolph, 2002; Martens, 2020, "New insights and
perspectives on the natural gradient method", §9), and equals its Hessian in expectation where the model is the true
conditional distribution.

Estimate. With u_t independent over t, of mean 0 and covariance C_t, and g = Σ_t J_tᵀ u_t, the mean of ‖g‖²/T is tr F.
Either u_t = p_t − e_ŵ with a label ŵ drawn from p_t, or u_t = √p_t∘ε − p_t(√p_tᵀε) with random signs ε, whose variance is
lower. The output embedding acts on each position alone, so there products with different t have mean 0 and its own part
of tr F is Σ_t ‖h_t‖² Σ_v C_t[v, v]/T: this is computed, exact and without noise. A tied one adds the sampled part of its
lookups and twice the product of both.

Norms. A gradient is a sum of products of what went into an operation and of the derivative by what came out; for
y = x Wᵀ it is Σ_s δ_s x_sᵀ with squared norm Σ_{s,s'} ⟨x_s, x_s'⟩⟨δ_s, δ_s'⟩ (the ghost norm; Goodfellow, 2015,
arXiv:1510.01799; Li et al., 2022, arXiv:2110.05679, §4), so gradients of blocks need not exist. A parameter is followed
by where torch functions take it and not by the module that owns it, so that a use outside that module is seen too; what
is used in some other way is differentiated block by block.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from harness_ext.flatness.loss import Blocks, PretrainingLoss
from harness_ext.flatness.signs import generator_of, random_signs

__all__ = ["FisherTraces", "fisher_traces"]

logger = logging.getLogger(__name__)

PRODUCT_VALUES = 2**17
"""Values of per-block gradients that exist at once: 512 KiB in float32, still in cache when they are squared."""

Labels = Literal["signs", "sampled"]


class FisherTraces(NamedTuple):
    """Estimates for each of B blocks; their expectation over seeds is exact, up to float32 in the model itself.

    Attributes:
        losses: L of each block in nats per token, float64 of shape (B,); not random.
        traces: tr F, float64 of shape (B,). Noise may put a small one below 0.
        scaled_traces: Σ_i w_i² F_ii, which rescalings of the weights that leave the function alone do not change, float64 of
            shape (B,); None if it was not asked for.
        by_parameter: The part of each parameter, (B,) each; they sum to `traces`.
        scaled_by_parameter: The same for `scaled_traces`.
        looped: Names of the parameters whose gradients were taken block by block.
    """

    losses: np.ndarray
    traces: np.ndarray
    scaled_traces: np.ndarray | None
    by_parameter: dict[str, np.ndarray]
    scaled_by_parameter: dict[str, np.ndarray] | None
    looped: tuple[str, ...]


def fisher_traces(
    loss: PretrainingLoss,
    parameters: Mapping[str, nn.Parameter],
    blocks: Blocks,
    *,
    seed: int,
    draw: int = 0,
    draws: int = 1,
    labels: Labels = "signs",
    scaled: bool = True,
) -> FisherTraces:
    """Estimate the Fisher trace of each block over the given parameters. Call it inside `prepared`.

    One forward pass, and for each draw one backward pass that computes no gradient of a weight. The random numbers of a block
    depend on the seed, its number and the draw only, so that batches and chunks do not change them.

    Args:
        loss: The loss of the model.
        parameters: Those that count, as `select_parameters` gives them. One that the loss does not depend on has trace 0.
        blocks: The blocks.
        seed: Seeds what is random.
        draw: Number of the first draw.
        draws: How many draws to average; they share the forward pass. Fresh blocks are better than further draws.
        labels: `signs` or labels `sampled` from the model; see the module.
        scaled: Whether to compute Σ_i w_i² F_ii as well. It needs the gradient of each block piece by piece, where tr F alone
            mostly does not.

    Raises:
        ValueError: If a parameter does not require a gradient, which `prepared` sees to, or an argument is out of range.
    """
    if labels not in ("signs", "sampled"):
        raise ValueError(f"labels={labels!r}; expected 'signs' or 'sampled'.")
    if draws < 1 or draw < 0:
        raise ValueError(f"draw={draw}, draws={draws}; expected draw ≥ 0 and draws ≥ 1.")
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ValueError(f"parameter {frozen[0]} does not require a gradient; call fisher_traces inside `prepared`.")
    task = _Task(loss, dict(parameters), seed, range(draw, draw + draws), labels, scaled)
    with torch.enable_grad():
        results = _in_one_batch(task, blocks)
        if results is None:
            results = _concatenate([_estimate(task, blocks.one(row)) for row in range(len(blocks.numbers))])
    _tell_looped(loss.model, results.looped)
    return results


@dataclass(frozen=True)
class _Task:
    """What does not change from block to block."""

    loss: PretrainingLoss
    parameters: dict[str, nn.Parameter]
    seed: int
    draws: range
    labels: Labels
    scaled: bool


# Batches. -------------------------------------------------------------------------------------------------------------

_SINGLE: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Models tried with more than one block at once, and whether they need one at a time."""


def _in_one_batch(task: _Task, blocks: Blocks) -> FisherTraces | None:
    """Estimate all blocks at once, or return None if the model does not keep apart the rows of different blocks.

    Which rows of an activation are of which block is read off its shape. The first batch of a model is proof of that: in it
    the first block has to get what it gets alone, where all rows are its own.
    """
    model = task.loss.model
    if len(blocks.numbers) == 1:
        return _estimate(task, blocks)
    if _SINGLE.get(model):
        return None
    try:
        together = _estimate(task, blocks)
    except _UnknownRowsError as error:
        reason = str(error)
    else:
        if model in _SINGLE:
            return together
        alone = _estimate(task, blocks.one(0))
        total = alone.traces[0]
        wrong = [
            name
            for name, one in alone.by_parameter.items()
            if not np.isclose(together.by_parameter[name][0], one[0], rtol=1e-2, atol=1e-5 * total)
        ]
        if not wrong:
            _SINGLE[model] = False
            return together
        reason = f"{wrong[0]} differs between a batch and a block alone"
    logger.warning("Fisher traces of %s: one block at a time, since %s.", type(model).__name__, reason)
    _SINGLE[model] = True
    return None


def _concatenate(results: list[FisherTraces]) -> FisherTraces:
    def joined(tables: list[Any]) -> Any:
        return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

    first = results[0]
    return FisherTraces(
        losses=np.concatenate([result.losses for result in results]),
        traces=np.concatenate([result.traces for result in results]),
        scaled_traces=None if first.scaled_traces is None else np.concatenate([r.scaled_traces for r in results]),
        by_parameter=joined([result.by_parameter for result in results]),
        scaled_by_parameter=None if first.scaled_traces is None else joined([r.scaled_by_parameter for r in results]),
        looped=first.looped,
    )


_TOLD: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def _tell_looped(model: nn.Module, names: tuple[str, ...]) -> None:
    new = set(names) - _TOLD.setdefault(model, set())
    if new:
        _TOLD[model] |= new
        some = ", ".join(sorted(new)[:4]) + (", …" if len(new) > 4 else "")
        logger.info(
            "Fisher traces of %s: gradients of %d parameters are taken block by block, as no identity covers their use: %s",
            type(model).__name__,
            len(new),
            some,
        )


def _estimate(task: _Task, blocks: Blocks) -> FisherTraces:
    """Estimate a batch whose rows are told apart by their place in activations."""
    num_blocks, num_tokens = blocks.tokens.shape
    sums = _Sums(task, num_blocks)
    recorder = _Recorder(task.parameters, num_blocks, num_tokens)
    with recorder:
        states = task.loss.states(blocks.tokens)
    used, unknown = recorder.reached(states)
    for name in unknown & recorder.unattributed.keys():
        raise _UnknownRowsError(f"{recorder.unattributed[name]} where {name} is used")
    body: dict[str, list[_Part]] = defaultdict(list)
    for use in used:
        for part in use.parts:
            body[part.name].append(part)
    looped = unknown | {name for name, parts in body.items() if len({type(part) for part in parts}) > 1}

    readout = _Readout(task, blocks, body, looped, sums)
    readout.read(states.detach().flatten(0, 1))
    for k in range(len(task.draws)):
        arrived: dict[str, list[tuple[_Part, Tensor]]] = defaultdict(list)

        vectors: dict[str, Tensor] = {}

        def arrive(use: _Use, gradient: Tensor, k: int = k, arrived: Any = arrived, vectors: Any = vectors) -> None:
            for part in use.parts:
                if part.name in readout.looped:
                    continue
                if isinstance(part, _Vector):
                    new = part.gradient(gradient)
                    vectors[part.name] = vectors[part.name] + new if part.name in vectors else new
                    continue
                arrived[part.name].append((part, gradient))
                if len(arrived[part.name]) == len(body[part.name]):
                    pieces = arrived.pop(part.name)
                    sums.add(part.name, type(part).norms(pieces, task.parameters[part.name].detach(), task.scaled), k)
                    if part.name in readout.tied:
                        sums.add(part.name, readout.cross_terms(part.name, k, pieces), k)

        if used:
            recorder.arrive = arrive
            keep = k < len(task.draws) - 1
            seeds = readout.seeds[k].view_as(states)
            torch.autograd.grad(states, recorder.anchor, seeds, allow_unused=True, retain_graph=keep)
            sums.add_vectors(vectors, k)
    recorder.arrive = None
    del states
    if readout.looped:
        _loop(task, blocks, readout, sums)
    return sums.result(num_tokens, readout, tuple(name for name in task.parameters if name in readout.looped))


Pair = tuple[Tensor, Tensor | None]
"""Σ g² and, if wanted, Σ w² g², float64 on the CPU."""


class _Sums:
    """Sums of squares by parameter and block: what is known exactly, and what each draw says about the rest.

    Averages use a control variate once there are several draws. Seeds s_t at the states have a known E‖s_t‖², so with
    Z = Σ_t ‖s_t‖² the estimate X_k − c_k (Z_k − E Z) has the same mean as X_k if c_k does not depend on draw k. The best c is
    nearly E X/E Z, as a large X comes with large seeds; here it is the mean of the other draws over E Z.
    """

    def __init__(self, task: _Task, num_blocks: int) -> None:
        self.task = task
        self.exact = [{name: np.zeros(num_blocks) for name in task.parameters} for _ in range(2)]
        shape = (len(task.draws), num_blocks)
        self.drawn = [{name: np.zeros(shape) for name in task.parameters} for _ in range(2)]

    def add_exact(self, name: str, pair: Pair, rows: slice) -> None:
        for sums, values in zip(self.exact, pair, strict=True):
            if values is not None:
                sums[name][rows] += values.numpy()

    def add(self, name: str, pair: Pair, draw: int, rows: slice = slice(None)) -> None:
        """Add what the draw of the given place in the task says."""
        for sums, values in zip(self.drawn, pair, strict=True):
            if values is not None:
                sums[name][draw, rows] += values.numpy()

    def add_vectors(self, vectors: Mapping[str, Tensor], draw: int) -> None:
        """Add gradients of vectors, (B, d) each, all at once: there are many and they are small."""
        if not vectors:
            return
        starts = np.cumsum([0, *(vector.shape[1] for vector in vectors.values())])[:-1]
        gradients = torch.cat([vector.cpu() for vector in vectors.values()], 1).double().numpy()
        tables = [gradients]
        if self.task.scaled:
            weights = torch.cat([self.task.parameters[name].detach().cpu() for name in vectors])
            tables.append(gradients * weights.double().numpy())
        for sums, table in zip(self.drawn, tables, strict=False):
            for name, values in zip(vectors, np.add.reduceat(table**2, starts, axis=1).T, strict=True):
                sums[name][draw] += values

    def result(self, num_tokens: int, readout: _Readout, looped: tuple[str, ...]) -> FisherTraces:
        def average(which: int) -> dict[str, np.ndarray]:
            return {
                name: (self.exact[which][name] + readout.control(drawn).mean(0)) / num_tokens
                for name, drawn in self.drawn[which].items()
            }

        plain, scaled = average(0), average(1) if self.task.scaled else None
        return FisherTraces(
            losses=readout.losses,
            traces=np.sum(list(plain.values()), axis=0),
            scaled_traces=None if scaled is None else np.sum(list(scaled.values()), axis=0),
            by_parameter=plain,
            scaled_by_parameter=scaled,
            looped=looped,
        )


# From the states to the logits and back. ------------------------------------------------------------------------------


class _Readout:
    """Seeds of the backward pass at the states, and what the output embedding itself adds to the trace.

    Attributes:
        losses: L of each block, float64 of shape (B,).
        seeds: For each draw, Σ_v u_t[v] ∂z_t[v]/∂f_t of shape (B T, d).
        looped: Parameters whose gradients have to be taken block by block: those that came in, and those that the readout
            uses in a way for which there is no identity.
        tied: Parameters that the body looks rows up in as well: for each draw Σ_t y_t[i] h_t of shape (B, R, d), where i are
            the ids looked up and y_t is the gradient by the output of the embedding.
    """

    def __init__(
        self, task: _Task, blocks: Blocks, body: Mapping[str, list[_Part]], looped: set[str], sums: _Sums
    ) -> None:
        self.task, self.blocks, self.body, self.sums = task, blocks, body, sums
        self.looped = set(looped)
        self.tied: dict[str, list[Tensor]] = {}
        self.losses = np.empty(0)
        self.seeds: list[Tensor] = []
        self.sizes = np.zeros(len(blocks.numbers))
        self.row_norms: Tensor | None = None

    def read(self, states: Tensor) -> None:
        """Go through the states, of shape (B T, d), piece by piece."""
        loss, targets, draws = self.task.loss, self.blocks.targets.flatten(), self.task.draws
        noises = [_Noise(self.task, self.blocks, draw) for draw in draws]
        losses = torch.empty(len(states), dtype=torch.float64)
        self.seeds = [torch.empty_like(states) for _ in draws]
        for piece in loss.chunks(len(states)):
            inputs = states[piece].requires_grad_()
            recorder = _Recorder(self.task.parameters, 1, len(inputs), keep=True)
            with recorder:
                logits = loss.logits(inputs)
            probabilities, losses[piece] = _softmax(logits, targets[piece])
            uses, unknown = recorder.reached(logits)
            if piece.start == 0:
                self._classify(uses, unknown, recorder, logits, inputs)
            slopes = self._add_own_terms(uses, recorder, logits, probabilities, inputs, piece)
            for k, noise in enumerate(noises):
                errors = noise.of(probabilities, piece)
                keep = k < len(noises) - 1
                (self.seeds[k][piece],) = torch.autograd.grad(logits, inputs, errors, retain_graph=keep)
                for name in self.tied:
                    self._add_context(name, k, errors, slopes[name], inputs.detach(), piece)
            recorder.outputs.clear()  # They lead back to the recorder: a cycle would keep the logits alive.
        self.losses = losses.view(self.blocks.tokens.shape).mean(1).numpy()

    def _classify(
        self, uses: list[_Use], unknown: set[str], recorder: _Recorder, logits: Tensor, inputs: Tensor
    ) -> None:
        """Find out for which parameters of the readout there is an identity, from the first piece."""
        self.looped |= unknown
        parts = [(part, use) for use in uses for part in use.parts]
        for part, use in parts:
            others = self.body.get(part.name, [])
            once = sum(other.name == part.name for other, _ in parts) == 1
            exact = once and _is_linear_in(use, inputs) and _is_elementwise(logits, recorder.outputs[use])
            if not exact or (others and not (isinstance(part, _Matrix) and type(others[0]) is _Rows)):
                self.looped.add(part.name)
            elif others and part.name not in self.looped:
                num_ids = sum(other.ids.shape[1] for other in others if isinstance(other, _Rows))
                shape = (len(self.blocks.numbers), num_ids, inputs.shape[-1])
                self.tied[part.name] = [inputs.new_zeros(shape) for _ in self.task.draws]

    def _add_own_terms(
        self, uses: list[_Use], recorder: _Recorder, logits: Tensor, probabilities: Tensor, inputs: Tensor, piece: slice
    ) -> dict[str, Tensor]:
        """Add Σ_t ‖h_t‖² Σ_v D_tv² C_t[v, v] for y = h Wᵀ, D = ∂z/∂y (diagonal); return D of shape (N, V) by name of W."""
        slopes: dict[str, Tensor] = {}
        for use in uses:
            parts = [part for part in use.parts if part.name not in self.looped]
            if not parts:
                continue
            (slope,) = torch.autograd.grad(logits, recorder.outputs[use], torch.ones_like(logits), retain_graph=True)
            slope = slope.reshape(logits.shape)
            variances = (probabilities - probabilities.square()).mul_(slope.square())
            for part in parts:
                weight = self.task.parameters[part.name].detach()
                if isinstance(part, _Matrix):
                    states = inputs.detach()
                    plain = variances.sum(1).double() * states.double().square().sum(1)
                    weighted = self._weighted(variances, weight, states) if self.task.scaled else None
                    slopes[part.name] = slope
                    if len(self.task.draws) > 1:
                        self._add_size(probabilities, slope, weight, piece)
                else:
                    plain = variances.sum(1)
                    weighted = variances @ weight.square() if self.task.scaled else None
                for first, last, rows in _segments(piece, self.blocks.tokens.shape):
                    pair = [
                        None if v is None else v[rows].view(last - first, -1).cpu().double().sum(1)
                        for v in (plain, weighted)
                    ]
                    self.sums.add_exact(part.name, (pair[0], pair[1]), slice(first, last))
        return slopes

    def _add_size(self, probabilities: Tensor, slope: Tensor, weight: Tensor, piece: slice) -> None:
        """Add E‖Wᵀ D u_t‖² = Σ_v p_v D_v² ‖W_v‖² − ‖Wᵀ D p‖²."""
        if self.row_norms is None:
            self.row_norms = torch.linalg.vector_norm(weight, dim=1).square_()
        sloped = probabilities * slope
        sizes = (sloped * slope) @ self.row_norms - (sloped @ weight).square().sum(1)
        for first, last, rows in _segments(piece, self.blocks.tokens.shape):
            self.sizes[first:last] += sizes[rows].view(last - first, -1).cpu().double().sum(1).numpy()

    def control(self, drawn: np.ndarray) -> np.ndarray:
        """Apply the control variate to estimates of shape (draws, B)."""
        if len(drawn) == 1 or not self.sizes.all():
            return drawn
        sizes = np.stack([_squares(seeds.view(len(self.sizes), -1, seeds.shape[1])).numpy() for seeds in self.seeds])
        others = (drawn.sum(0) - drawn) / (len(drawn) - 1)
        return drawn - others * (sizes / self.sizes - 1)

    @staticmethod
    def _weighted(variances: Tensor, weight: Tensor, states: Tensor) -> Tensor:
        """Σ_v variances[t, v] Σ_j W[v, j]² h_t[j]², (N,); W² exists in part only."""
        product = torch.zeros_like(states)
        step = max(1, PRODUCT_VALUES // weight.shape[1])
        for top in range(0, len(weight), step):
            product.addmm_(variances[:, top : top + step], weight[top : top + step].square())
        return product.mul_(states.square()).sum(1)

    def _add_context(self, name: str, k: int, errors: Tensor, slope: Tensor, states: Tensor, piece: slice) -> None:
        ids = torch.cat([part.ids for part in self.body[name] if isinstance(part, _Rows)], 1)
        for first, last, rows in _segments(piece, self.blocks.tokens.shape):
            of_block = ids[first:last].repeat_interleave((rows.stop - rows.start) // (last - first), 0)
            gradients = errors[rows].gather(1, of_block) * slope[rows].gather(1, of_block)
            left = gradients.view(last - first, -1, ids.shape[1])
            self.tied[name][k][first:last] += left.mT @ states[rows].view(last - first, -1, states.shape[-1])

    def cross_terms(self, name: str, k: int, pieces: list[tuple[Any, Tensor]]) -> Pair:
        """Return 2 ⟨gradient by the lookup, gradient by the readout⟩ of a tied matrix, plain and weighted by w²."""
        ids, grads = _joined([(part.ids, grad) for part, grad in pieces])
        product = grads * self.tied[name][k].mul_(2)
        plain = _total(product)
        if not self.task.scaled:
            return plain, None
        return plain, _total(product.mul_(self.task.parameters[name].detach()[ids].square_()))


def _segments(piece: slice, shape: Sequence[int]) -> Iterable[tuple[int, int, slice]]:
    """Cut rows `piece` of B T into runs of whole blocks and parts of blocks.

    Yields:
        First block, one past the last block, and the rows within the piece.
    """
    num_tokens = shape[1]
    start = piece.start
    while start < piece.stop:
        block, offset = divmod(start, num_tokens)
        whole = (piece.stop - start) // num_tokens if offset == 0 else 0
        stop = start + whole * num_tokens if whole else min(piece.stop, (block + 1) * num_tokens)
        yield block, block + max(whole, 1), slice(start - piece.start, stop - piece.start)
        start = stop


def _softmax(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return p of shape (N, V) and −log p(target), float64 of shape (N,) on the CPU."""
    log_probabilities = logits.detach().log_softmax(-1)
    losses = -log_probabilities.gather(1, targets.to(logits.device).unsqueeze(1)).squeeze(1).cpu().double()
    return log_probabilities.exp_(), losses


def _is_linear_in(use: _Use, inputs: Tensor) -> bool:
    """Whether the use is y = h Wᵀ + b of the readout's own inputs, all of them in order."""
    x = use.inputs
    return use.function is F.linear and x.data_ptr() == inputs.data_ptr() and x.numel() == inputs.numel()


def _is_elementwise(logits: Tensor, outputs: Tensor) -> bool:
    """Whether logits of shape (N, V) are functions of outputs element by element: Jᵀr = Jᵀ1 ∘ r for random r if so."""
    if outputs.numel() != logits.numel():
        return False
    generator = torch.Generator().manual_seed(0)
    vector = torch.ones_like(logits)
    vector[:1] = torch.randn(logits.shape[1], generator=generator).to(logits)
    (ones,) = torch.autograd.grad(logits, outputs, torch.ones_like(logits), retain_graph=True)
    (random,) = torch.autograd.grad(logits, outputs, vector, retain_graph=True)
    return torch.allclose(random.reshape(logits.shape), ones.reshape(logits.shape) * vector, rtol=1e-4, atol=1e-6)


class _Noise:
    """u_t of one draw for the tokens of a batch, asked for in order."""

    def __init__(self, task: _Task, blocks: Blocks, draw: int) -> None:
        self.shape, self.labels = blocks.tokens.shape, task.labels
        purpose = f"fisher {task.labels} {draw}"
        self.generators = [generator_of(task.seed, number, purpose) for number in blocks.numbers]

    def of(self, probabilities: Tensor, piece: slice) -> Tensor:
        """Return u, (N, V), for the next rows."""
        size = probabilities.shape[1]
        rows = [
            ((stop.stop - stop.start) // (last - first), block)
            for first, last, stop in _segments(piece, self.shape)
            for block in range(first, last)
        ]
        if self.labels == "sampled":
            uniform = torch.cat([torch.rand(n, generator=self.generators[b], dtype=torch.float64) for n, b in rows])
            cumulative = probabilities.double().cumsum(1)
            values = uniform.to(cumulative.device).unsqueeze(1) * cumulative[:, -1:]
            words = torch.searchsorted(cumulative, values, right=True).clamp_(max=size - 1)
            return probabilities.scatter_add(1, words, torch.full_like(words, -1.0, dtype=probabilities.dtype))
        # Whole words of 64 signs for each token, so that the stream does not depend on how tokens are cut into pieces.
        padded = -(-size // 64) * 64
        signs = torch.cat([random_signs((n, padded), self.generators[b])[:, :size] for n, b in rows])
        roots = probabilities.sqrt().mul_(signs.to(probabilities.device))
        return roots.addcmul_(probabilities, roots.sum(1, keepdim=True), value=-1)


# Following parameters through a forward pass. -------------------------------------------------------------------------


class _UnknownRowsError(Exception):
    """The shape of an activation does not say which rows belong to which block."""


class _Part:
    """How the gradient of one parameter follows from the gradient by the output of an operation."""

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def norms(pieces: list[tuple[Any, Tensor]], weight: Tensor, scaled: bool) -> Pair:
        """Return ‖g_b‖² and ‖w∘g_b‖², (B,) each, of the sum of the gradients of several uses of the same kind.

        Args:
            pieces: Each use, and the gradient by its output, (B, R, ·).
            weight: The parameter.
            scaled: Whether the second is wanted.
        """
        raise NotImplementedError


class _Matrix(_Part):
    """W of y = x Wᵀ, or of y = x W if transposed; x of shape (B, R, d_in)."""

    def __init__(self, name: str, inputs: Tensor, *, transposed: bool = False) -> None:
        super().__init__(name)
        self.inputs, self.transposed = inputs, transposed

    @staticmethod
    def norms(pieces: list[tuple[Any, Tensor]], weight: Tensor, scaled: bool) -> Pair:
        inputs, grads = _joined([(part.inputs, grad) for part, grad in pieces])
        # The rows of the gradient are those of the weight as it is stored.
        left, right = (inputs, grads) if pieces[0][0].transposed else (grads, inputs)
        rows, (height, width) = left.shape[1], weight.shape
        if not scaled and rows * (height + width) < height * width:
            return _total((left @ left.mT).mul_(right @ right.mT)), None
        plain = torch.zeros(len(left), dtype=torch.float64)
        weighted = torch.zeros_like(plain)
        at_once = max(1, min(len(left), PRODUCT_VALUES // (height * width)))
        step = max(1, PRODUCT_VALUES // (at_once * width))
        for first in range(0, len(left), at_once):
            some = slice(first, first + at_once)
            for top in range(0, height, step):
                product = left[some, :, top : top + step].mT @ right[some]
                plain[some] += _squares(product)
                if scaled:
                    weighted[some] += _squares(product.mul_(weight[top : top + step]))
        return plain, weighted if scaled else None


class _Rows(_Part):
    """A table that rows are looked up in; ids of shape (B, R)."""

    def __init__(self, name: str, ids: Tensor) -> None:
        super().__init__(name)
        self.ids = ids

    @staticmethod
    def norms(pieces: list[tuple[Any, Tensor]], weight: Tensor, scaled: bool) -> Pair:
        ids, grads = _joined([(part.ids, grad) for part, grad in pieces])
        num_blocks, size = len(ids), len(weight)
        keys, place = torch.unique(
            ids + torch.arange(num_blocks, device=ids.device).unsqueeze(1) * size, return_inverse=True
        )
        sums = grads.new_zeros(len(keys), grads.shape[-1]).index_add_(0, place.flatten(), grads.flatten(0, 1))
        block = (keys // size).cpu()

        def by_block(values: Tensor) -> Tensor:
            per_row = values.square().sum(-1).cpu().double()
            return per_row.new_zeros(num_blocks).index_add_(0, block, per_row)

        return by_block(sums), by_block(sums * weight[keys % size]) if scaled else None


class _Vector(_Part):
    """w of y = w∘x, with x of shape (B, R, d) made on demand, or of y = x + w, where it is None."""

    def __init__(self, name: str, factors: Callable[[], Tensor] | None) -> None:
        super().__init__(name)
        self.factors = factors

    def gradient(self, grads: Tensor) -> Tensor:
        """Return Σ_s δ_s∘x_s or Σ_s δ_s, (B, d), for δ of shape (B, R, d)."""
        return grads.sum(1) if self.factors is None else (grads * self.factors()).sum(1)


def _joined(pieces: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Lay the rows of several uses end to end."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([left for left, _ in pieces], 1), torch.cat([right for _, right in pieces], 1)


def _squares(values: Tensor) -> Tensor:
    """Sum the squares over all but the first axis: in one pass of float32 over the last, which is short, then in float64."""
    norms = torch.linalg.vector_norm(values, dim=-1).cpu().double()
    return norms.square_().flatten(1).sum(1)


def _total(values: Tensor) -> Tensor:
    """Sum all but the first axis, in float64 over all but the last; on the CPU, since not every accelerator has float64."""
    return values.sum(-1).cpu().double().flatten(1).sum(1) if values.dim() > 2 else values.sum(-1).cpu().double()


class _Use:
    """One operation that took parameters."""

    def __init__(self, recorder: _Recorder, function: Any, inputs: Tensor, parts: tuple[_Part, ...]) -> None:
        self.recorder, self.function, self.inputs, self.parts = recorder, function, inputs, parts


class _Tap(torch.autograd.Function):
    """The identity, whose backward pass hands the gradient to the recorder.

    The anchor is a leaf that every tap depends on: its gradient is asked for, which is None, so that autograd comes by every
    tap and computes the gradient of no weight.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, use: _Use) -> Tensor:
        ctx.use = use
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        recorder = ctx.use.recorder
        if recorder.arrive is not None:
            recorder.arrive(ctx.use, recorder.by_block(gradient))
        return gradient, None, None


class _Recorder(TorchFunctionMode):
    """Notes which operations take the parameters, cuts those it knows out of the graph, and taps their outputs.

    What it does not know stays in the graph, where `reached` finds it.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], num_blocks: int, num_tokens: int, *, keep: bool = False
    ) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.num_blocks, self.num_tokens = num_blocks, num_tokens
        self.shifted: dict[int, tuple[Tensor, str]] = {}
        self.keep, self.outputs = keep, dict[_Use, Tensor]()
        self.unattributed: dict[str, str] = {}
        self.anchor = torch.zeros((), requires_grad=True)
        self.arrive: Callable[[_Use, Tensor], None] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            names = {name for arg in (*args, *kwargs.values()) if (name := self.name(arg))}
            try:
                if names:
                    return handler(self, func, *args, **kwargs)
            except _UnknownRowsError as error:
                self.unattributed |= dict.fromkeys(names, str(error))
        return func(*args, **kwargs)

    def name(self, value: Any) -> str | None:
        """The name of a parameter, or of one to which a number was added."""
        if not isinstance(value, Tensor):
            return None
        found = self.names.get(id(value))
        return self.shifted[id(value)][1] if found is None and id(value) in self.shifted else found

    def by_block(self, values: Tensor) -> Tensor:
        """View activations as (B, R, d), by the layouts (B, …, d) and (B T, d)."""
        width = values.shape[-1]
        if self.num_blocks == 1:
            return values.reshape(1, -1, width)
        if values.dim() >= 3 and len(values) == self.num_blocks:
            return values.reshape(self.num_blocks, -1, width)
        if values.dim() == 2 and len(values) == self.num_blocks * self.num_tokens:
            return values.reshape(self.num_blocks, self.num_tokens, width)
        raise _UnknownRowsError(
            f"an activation of {self.num_blocks} blocks of {self.num_tokens} tokens has shape {tuple(values.shape)}"
        )

    def tap(self, function: Any, inputs: Tensor, output: Tensor, *parts: _Part | None) -> Tensor:
        self.by_block(output)
        use = _Use(self, function, inputs, tuple(part for part in parts if part is not None))
        tapped = _Tap.apply(output, self.anchor, use)
        if self.keep:
            self.outputs[use] = tapped
        return tapped

    def reached(self, result: Tensor) -> tuple[list[_Use], set[str]]:
        """Return the tapped uses that a result depends on, and the parameters that it depends on in other ways too."""
        uses, unknown, seen, stack = [], set(), set(), [result.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self.names:
                unknown.add(self.names[id(variable)])
            use = getattr(node, "use", None)
            if isinstance(use, _Use):
                uses.append(use)
            stack.extend(parent for parent, _ in node.next_functions)
        return uses, unknown


def _linear(recorder: _Recorder, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    of_weight, of_bias = recorder.name(weight), recorder.name(bias)
    output = func(input, _constant(weight, of_weight), _constant(bias, of_bias))
    inputs = input.detach()
    return recorder.tap(
        func,
        inputs,
        output,
        _Matrix(of_weight, recorder.by_block(inputs)) if of_weight else None,
        _Vector(of_bias, None) if of_bias else None,
    )


def _addmm(
    recorder: _Recorder, func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    of_weight, of_bias = recorder.name(mat2), recorder.name(input)
    if recorder.name(mat1) or beta != 1 or alpha != 1 or input.dim() != 1:
        return func(input, mat1, mat2, beta=beta, alpha=alpha)
    output = func(_constant(input, of_bias), mat1, _constant(mat2, of_weight))
    inputs = mat1.detach()
    return recorder.tap(
        func,
        inputs,
        output,
        _Matrix(of_weight, recorder.by_block(inputs), transposed=True) if of_weight else None,
        _Vector(of_bias, None) if of_bias else None,
    )


def _embedding(recorder: _Recorder, func: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if input.dim() == 2 and len(input) == 1:
        # Positions are looked up once for all blocks; each needs a gradient of its own.
        input = input.expand(recorder.num_blocks, -1)
    name = recorder.name(weight)
    if name is None:
        return func(input, weight, *args, **kwargs)
    ids = recorder.by_block(input.unsqueeze(-1)).squeeze(-1)
    # Without padding_idx, for which autograd gives the gradient 0 although the loss depends on that row.
    return recorder.tap(func, input, F.embedding(input, weight.detach()), _Rows(name, ids))


def _layer_norm(
    recorder: _Recorder,
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-5,
) -> Tensor:
    of_weight, of_bias = recorder.name(weight), recorder.name(bias)
    extra = {} if func is F.rms_norm else {"bias": _constant(bias, of_bias)}
    output = func(input, normalized_shape, weight=_constant(weight, of_weight), eps=eps, **extra)
    inputs = input.detach()
    return recorder.tap(
        func,
        inputs,
        output,
        _Vector(of_weight, lambda: recorder.by_block(func(inputs, normalized_shape, eps=eps))) if of_weight else None,
        _Vector(of_bias, None) if of_bias else None,
    )


def _rms_norm(
    recorder: _Recorder,
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return _layer_norm(recorder, func, input, normalized_shape, weight, None, eps)


def _multiply(recorder: _Recorder, func: Any, input: Tensor, other: Tensor, **kwargs: Any) -> Tensor:
    return _by_last_axis(recorder, func, input, other, gain=True, **kwargs)


def _add(recorder: _Recorder, func: Any, input: Tensor, other: Any, **kwargs: Any) -> Tensor:
    if not isinstance(other, Tensor) and not kwargs:
        # y = c + w has the gradient of w. It stays in the graph, so that a use which is not known is found.
        output = func(input, other)
        name = recorder.name(input)
        assert name is not None
        recorder.shifted[id(output)] = (output, name)
        return output
    return _by_last_axis(recorder, func, input, other, gain=False, **kwargs)


def _by_last_axis(recorder: _Recorder, func: Any, a: Tensor, b: Tensor, *, gain: bool, **kwargs: Any) -> Tensor:
    """w∘x or w + x for a vector w and activations x with as many features."""
    vector, x = (a, b) if recorder.name(a) else (b, a)
    if (
        kwargs
        or not isinstance(x, Tensor)
        or recorder.name(x)
        or vector.dim() != 1
        or x.dim() < 2
        or x.shape[-1] != vector.shape[0]
        or (name := recorder.name(vector)) is None
    ):
        return func(a, b, **kwargs)
    factors = recorder.by_block(x.detach())
    output = func(vector.detach(), x)
    return recorder.tap(func, x.detach(), output, _Vector(name, (lambda: factors) if gain else None))


def _constant(value: Tensor | None, name: str | None) -> Tensor | None:
    return value if value is None or name is None else value.detach()


_HANDLERS: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.mul: _multiply,
    Tensor.mul: _multiply,
    Tensor.__mul__: _multiply,
    Tensor.__rmul__: _multiply,
    torch.add: _add,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.__radd__: _add,
}


# Block by block. ------------------------------------------------------------------------------------------------------


def _loop(task: _Task, blocks: Blocks, readout: _Readout, sums: _Sums) -> None:
    """Differentiate by the parameters that have no identity, for one block and draw at a time."""
    loss, names = task.loss, sorted(readout.looped)
    parameters = [task.parameters[name] for name in names]
    num_tokens = blocks.tokens.shape[1]
    for row in range(len(blocks.numbers)):
        block = blocks.one(row)
        states = loss.states(block.tokens)[0]
        seeds = [seed[row * num_tokens : (row + 1) * num_tokens] for seed in readout.seeds]
        for k, draw in enumerate(task.draws):
            gradients = [torch.zeros_like(parameter) for parameter in parameters]

            def add(output: Tensor, seed: Tensor, keep: bool, gradients: list[Tensor] = gradients) -> None:
                if not output.requires_grad:
                    return
                new = torch.autograd.grad(output, parameters, seed, allow_unused=True, retain_graph=keep)
                for total, gradient in zip(gradients, new, strict=True):
                    if gradient is not None:
                        total += gradient

            add(states, seeds[k], k < len(task.draws) - 1)
            noise = _Noise(task, block, draw)
            for piece in loss.chunks(num_tokens):
                logits = loss.logits(states.detach()[piece])
                add(logits, noise.of(logits.detach().softmax(-1), piece), False)
            for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
                flat = gradient.flatten()
                plain = _total(flat.square().unsqueeze(0))
                scaled = _total((flat * parameter.detach().flatten()).square().unsqueeze(0)) if task.scaled else None
                sums.add(name, (plain, scaled), k, slice(row, row + 1))
