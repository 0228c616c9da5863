"""Trace of the true Hessian of the pretraining loss, by second differences of the loss along random directions.

For random signs v, or any v with mean 0 and covariance I, the mean of vᵀHv is tr H (Hutchinson, 1989), and
vᵀHv = (L(θ+hv) + L(θ−hv) − 2 L(θ)) / h² up to O(h²). Only forward passes are needed, so every attention will do.

What is perturbed. Nearly all weights enter in an operation that is linear in them, y = W x. Moving W by εV gives
y = W x(ε) + εV x(ε), in which x(ε) moves too, with the weights before W. The part of vᵀHv that
comes from εV (x(ε) − x(0)) belongs to blocks of H between W and weights before it. These blocks have no part in the
trace, and in vᵀHv they have mean 0, but they hold more than half of its variance. So x is held:
y = W x(ε) + ε V x(0). The mean is tr H as before, and

- V x(0) has mean 0 and covariance x xᵀ ⊗ I over tokens and outputs, and nothing else about V matters to the mean. For
  fewer tokens T than inputs, Rᵀξ with x = RᵀQᵀ and signs ξ of shape (T, outputs) has the same covariance, with
  far fewer signs and products;
- no weight is written to.

This holds for a parameter that is used once. A matrix tied to the embedding is held as the readout of words that are not in
the block; for those that are, V moves with the states, since there the mean of the cross term is not 0. What is used more than
once otherwise, or in an operation that is not known to be linear in it, is moved for real.

A known gap: with ReLU the loss has kinks, whose curvature differences see in part and automatic differentiation does not.
`choose_step` tells.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from harness_ext.flatness.exact import second_derivatives
from harness_ext.flatness.loss import Blocks, PretrainingLoss
from harness_ext.flatness.signs import generator_of, random_signs
from harness_ext.flatness.weights import Weights

__all__ = ["Probe", "Step", "choose_step", "hessian_probe", "hessian_probes"]

logger = logging.getLogger(__name__)

STEP_TOKENS = 64
"""Tokens of the block on which a step is chosen, at most: the exact value needs the graph of second derivatives in memory."""

STEPS = tuple(10 ** (-k / 2) for k in range(2, 9))
"""Steps tried, from 0.1 to 1e-4, by factors of √10."""

NOISE_STEP = 1e-7
"""A step at which the second difference is rounding alone, though logits still differ in their last bits."""


NOISE_SHARE = 0.01
"""Rounding of one block's second difference that is of no account beside the choice of directions and blocks."""


class Probe(NamedTuple):
    """One direction for one block.

    Attributes:
        hessian: What replaces vᵀHv: its mean over seeds is tr H of the block's loss (Σ w_i² H_ii if scaled), in nats per
            token, up to the error of the step. Of either sign.
        loss: L of the block in nats per token.
    """

    hessian: float
    loss: float


class Step(NamedTuple):
    """A step for `hessian_probe`, and how it did on one direction.

    Attributes:
        step: Root mean square of what a weight is moved by.
        relative_error: Estimate of |difference − exact| / |difference|, from the differences only.
        exact: The second derivative along the direction, by automatic differentiation; NaN if the model has none.
        difference: The second difference with this step.
    """

    step: float
    relative_error: float
    exact: float
    difference: float


def hessian_probe(
    loss: PretrainingLoss,
    parameters: Mapping[str, nn.Parameter],
    block: Blocks,
    *,
    seed: int,
    probe: int = 0,
    scaled: bool = False,
    step: float,
) -> Probe:
    """Estimate tr H of one block with one random direction; see `hessian_probes`."""
    return hessian_probes(loss, parameters, block, seed=seed, probes=(probe,), scaled=scaled, step=step)[0]


def hessian_probes(
    loss: PretrainingLoss,
    parameters: Mapping[str, nn.Parameter],
    block: Blocks,
    *,
    seed: int,
    probes: Sequence[int],
    scaled: bool = False,
    step: float,
) -> list[Probe]:
    """Estimate tr H of one block with several random directions, which share the forward pass at θ. Call it inside `prepared`.

    Args:
        loss: L.
        parameters: What H is with respect to, in float32. One that the loss does not depend on adds 0.
        block: A batch of one block. Its number and the seed decide the directions.
        seed: Seeds what is random.
        probes: Numbers of the directions. On fresh blocks one for each is the best use of time.
        scaled: Whether to estimate Σ_i w_i² H_ii, by moving each weight in proportion to itself.
        step: Root mean square of what a weight is moved by, as `choose_step` gives it.

    Raises:
        TypeError: If a parameter is not in float32: in half precision rounding is larger than what is measured.
        ValueError: If there is not exactly one block, or the step is not positive.
    """
    if not step > 0:
        raise ValueError(f"step={step}; expected a positive number, such as that of choose_step.")
    base = _Base(loss, parameters, block)
    return [_Line(base, seed, probe, scaled).probe(step) for probe in probes]


def choose_step(loss: PretrainingLoss, parameters: Mapping[str, nn.Parameter], block: Blocks, *, seed: int) -> Step:
    """Choose a step on one block and compare it with the exact second derivative along the same direction.

    The error of a step h has two parts. Rounding is σ/(√T h²), with σ the standard deviation over tokens of the differences
    with a step so small that there is nothing else in them. Truncation, O(h²), is estimated by the largest change of the second
    difference on the way to smaller steps, beyond their rounding: two neighbours alone may agree by chance where the loss is no
    longer a parabola. Rounding is independent from block to block and averages out, and truncation does not, so the smallest
    step is taken whose rounding is within `NOISE_SHARE` of the value, or else the one with the smallest sum of the two.

    Raises:
        TypeError, ValueError: As `hessian_probes`.
    """
    tokens = slice(0, STEP_TOKENS)
    base = _Base(loss, parameters, Blocks(block.tokens[:, tokens], block.targets[:, tokens], block.numbers))
    line = _Line(base, seed, 0, False)
    noise = float(line.second_difference(NOISE_STEP).square().mean().sqrt()) / math.sqrt(len(base.losses))
    noise = max(noise, torch.finfo(torch.float32).eps * float(base.losses.abs().mean()) / math.sqrt(len(base.losses)))
    values = [float(line.second_difference(step).mean()) / step**2 for step in STEPS]
    best, error = _best_step(values, [2 * noise / step**2 for step in STEPS])
    value = values[best]
    try:
        exact = line.second_derivative()
    except TypeError as reason:
        logger.warning("The step of differences is not compared with an exact value: %s", reason)
        exact = math.nan
    relative = error / abs(value) if value else math.inf
    if abs(value - exact) > 3 * error + 1e-3 * abs(exact):
        logger.warning(
            "Second differences of the loss with step %.1e give %.5g where automatic differentiation gives %.5g, and an "
            "error of %.1g was expected. Do not trust hessian_trace of this model without a look at why.",
            STEPS[best],
            value,
            exact,
            error,
        )
    return Step(STEPS[best], relative, exact, value)


def _best_step(values: Sequence[float], rounding: Sequence[float]) -> tuple[int, float]:
    """Return the place of the step to take, and its error, from second differences and their rounding, largest step first."""
    errors = {}
    for i in range(len(values) - 1):
        changes = [abs(values[i] - values[j]) - rounding[j] for j in range(i + 1, len(values))]
        errors[i] = max(0.0, *changes) + rounding[i]
    quiet = [i for i in errors if rounding[i] <= NOISE_SHARE * abs(values[i])]
    best = max(quiet) if quiet else min(errors, key=lambda i: errors[i] if math.isfinite(errors[i]) else math.inf)
    return best, errors[best]


# The loss at θ, and along a direction. --------------------------------------------------------------------------------


class _Base:
    """One block's forward pass at θ: the losses of its tokens, and which operation takes which parameter.

    Attributes:
        losses: −log p(target), float64 of shape (T,).
        states: f of shape (T, d).
        uses: By operation, the names of those of its parameters whose inputs are held.
        head: Name of the readout's matrix, if its inputs are held.
        tied: The operation that looks up rows of that matrix, if there is one.
        moved: Names of the parameters that are moved for real.
    """

    def __init__(self, loss: PretrainingLoss, parameters: Mapping[str, nn.Parameter], block: Blocks) -> None:
        if len(block.tokens) != 1:
            raise ValueError(f"expected a batch of one block, got {len(block.tokens)}; use blocks.one(row).")
        for name, parameter in parameters.items():
            if parameter.dtype != torch.float32:
                raise TypeError(
                    f"parameter {name} is {parameter.dtype}; differences of the loss need torch.float32. Call this inside "
                    "`prepared(model, parameters)`, which sees to it."
                )
        self.loss, self.parameters, self.block = loss, dict(parameters), block
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.targets = block.targets.flatten()
        self._factors: dict[tuple[int, torch.Size], Tensor] = {}
        with torch.no_grad():
            body, readout = _Recorder(self.names, loss.head), _Recorder(self.names, None)
            with body:
                self.states = loss.states(block.tokens).flatten(0, 1)
            pieces = []
            for piece in loss.chunks(len(self.states)):
                with readout:
                    logits = loss.logits(self.states[piece])
                pieces.append(_token_losses(logits, self.targets[piece]))
            self.losses = torch.cat(pieces)
        self._classify(body, readout)

    def _classify(self, body: _Recorder, readout: _Recorder) -> None:
        of_head = {name for p in self.loss.head.parameters() if (name := self.names.get(id(p)))}
        held = {
            name
            for name, uses in body.uses.items()
            if len(uses) == 1 and name not in body.other and name not in of_head
        }
        self.uses = list(dict.fromkeys(use for uses in body.uses.values() for use in uses))
        self.held = held
        self.head: str | None = None
        self.tied: _Use | None = None
        weight = self.names.get(id(getattr(self.loss.head, "weight", None)))
        if weight is not None and weight not in readout.other | body.other:
            of_readout, of_body = readout.uses.get(weight, []), body.uses.get(weight, [])
            # The body reads one token in that pass, whose lookup is of no account.
            kinds = {use.function for use in of_readout}
            linear = F.linear in kinds and kinds <= {F.linear, F.embedding}
            if linear and (not of_body or (len(of_body) == 1 and of_body[0].function is F.embedding)):
                self.head = weight
                self.tied = of_body[0] if of_body else None
        self.moved = {
            name: parameter for name, parameter in self.parameters.items() if name not in held and name != self.head
        }

    def factor(self, inputs: Tensor) -> Tensor:
        """Return A of shape (rows, k) with A Aᵀ = x xᵀ for inputs x of shape (…, width), and k = min(rows, width)."""
        x = inputs.reshape(-1, inputs.shape[-1])
        if x.shape[0] >= x.shape[1]:
            return x
        key = (inputs.data_ptr(), inputs.shape)
        if key not in self._factors:
            self._factors[key] = torch.linalg.qr(x.mT, mode="r").R.mT
        return self._factors[key]


class _Line:
    """The losses of a block's tokens along one direction v, which depends on the seed, the block's number and the probe."""

    def __init__(self, base: _Base, seed: int, probe: int, scaled: bool) -> None:
        self.base, self.scaled = base, scaled
        number = base.block.numbers[0]
        self._signs_of: Callable[[Sequence[int], str], Tensor] = lambda shape, name: random_signs(
            shape, generator_of(seed, number, f"hessian probe {probe} {name}")
        )
        self.unit = 1.0
        if scaled:
            squares = sum(float(p.detach().double().square().sum()) for p in base.parameters.values())
            self.unit = math.sqrt(squares / sum(p.numel() for p in base.parameters.values())) or 1.0
        self.words = torch.empty(0, dtype=torch.long)
        self.rows = torch.empty(0)
        with torch.no_grad():
            if base.tied is not None and base.head is not None:
                self.words = base.tied.args[0].unique()
                weight = base.parameters[base.head].detach()
                self.rows = self._signs(
                    (len(self.words), weight.shape[1]), f"{base.head} looked up", weight[self.words]
                )
            self.tangents = {use.names: self._tangent(use) for use in base.uses}
            self.of_head = self._tangent_of_head()

    def _signs(self, shape: Sequence[int], name: str, weight: Tensor) -> Tensor:
        """Signs on the weight's device, times the weight if the trace is scaled."""
        signs = self._signs_of(shape, name).to(weight.device)
        return signs.mul_(weight) if self.scaled else signs

    def direction(self, name: str, weight: Tensor) -> Tensor:
        return self._signs(weight.shape, name, weight.detach())

    def _tangent(self, use: _Use) -> Tensor | None:
        """∂y/∂ε of an operation's output with its inputs held; None if none of its parameters is held."""
        base, args = self.base, use.args
        if use is base.tied:
            ids = args[0]
            return self.rows[torch.searchsorted(self.words, ids.flatten())].view(*ids.shape, -1)
        names = [base.names.get(id(arg)) if isinstance(arg, Tensor) else None for arg in args]
        held = [name if name in base.held else None for name in names]
        if not any(held):
            return None
        parts = []
        for place, name in enumerate(held):
            if name is None:
                continue
            weight = args[place].detach()
            if use.function is F.embedding:
                words, of_token = args[0].unique(return_inverse=True)
                parts.append(self._signs((len(words), weight.shape[1]), name, weight[words])[of_token])
            elif (use.function is F.linear and place == 1) or (use.function is torch.addmm and place == 2):
                transposed = use.function is torch.addmm
                inputs = args[1] if transposed else args[0]
                parts.append(self._product(inputs, name, weight if transposed else weight.mT))
            elif use.function in _NORMS and place == 2:
                without = (None,) * (len(args) - 3)  # No weight, no bias.
                parts.append(use.function(*args[:2], *without, args[-1]) * self.direction(name, weight))
            elif use.function in _PRODUCTS:
                parts.append(args[1 - place] * self.direction(name, weight))
            else:  # A bias.
                parts.append(self.direction(name, weight))
        return sum(parts[1:], parts[0])

    def _product(self, inputs: Tensor, name: str, weight: Tensor) -> Tensor:
        """x V or what has its mean and covariance, (…, outputs), for a weight of shape (width, outputs)."""
        if self.scaled:
            flat = inputs @ self._signs(weight.shape, name, weight)
        else:
            factor = self.base.factor(inputs)
            flat = factor @ self._signs_of((factor.shape[1], weight.shape[1]), name).to(factor.device)
        return flat.view(*inputs.shape[:-1], weight.shape[1])

    def _tangent_of_head(self) -> Tensor | None:
        """The right factor (k, V) of ∂z/∂ε at held states; see `_Base.factor`."""
        name = self.base.head
        if name is None:
            return None
        weight = self.base.parameters[name].detach().mT
        if self.scaled:
            right = self._signs(weight.shape, f"{name} read out", weight)
            if len(self.words):
                right[:, self.words] = self.rows.mT
        else:
            width = min(self.base.states.shape)
            right = self._signs_of((width, weight.shape[1]), f"{name} read out").to(weight.device)
        return right

    def head_shift(self, piece: slice, states: Tensor) -> Tensor:
        """∂z/∂ε for the tokens of a piece, (N, V): states held, except for the rows that the embedding looks up."""
        assert self.of_head is not None
        left = self.base.states if self.scaled else self.base.factor(self.base.states)
        shift = left[piece] @ self.of_head
        if len(self.words):
            shift = shift.index_copy(1, self.words, states @ self.rows.mT)
        return shift

    def token_losses(self, scale: float | Tensor) -> Tensor:
        """Return −log p(target), float64 of shape (T,), at ε = scale; with its graph if the scale is a tensor that has one."""
        base, losses = self.base, []
        with _Perturbed(self, scale):
            states = base.loss.states(base.block.tokens).flatten(0, 1)
        for piece in base.loss.chunks(len(states)):
            with _Perturbed(self, scale, piece, states[piece]):
                logits = base.loss.logits(states[piece])
            losses.append(_token_losses(logits, base.targets[piece]))
        return torch.cat(losses)

    @torch.no_grad()
    def second_difference(self, step: float) -> Tensor:
        """Return ℓ(ε) + ℓ(−ε) − 2 ℓ(0) of each token, float64 of shape (T,)."""
        total, scale = -2 * self.base.losses, step / self.unit
        with Weights(self.base.moved) as weights:
            for sign in (1.0, -1.0):
                if self.base.moved:
                    weights.perturb(self.direction, sign * scale)
                total = total + self.token_losses(sign * scale)
        return total

    def second_derivative(self) -> float:
        """Return the second derivative of L along v by automatic differentiation, for which no weight needs a gradient.

        Raises:
            TypeError: If the model has no second derivatives.
        """
        with _one_small_gradient(self.base.loss.model), second_derivatives(self.base.loss.model), torch.enable_grad():
            scale = torch.zeros((), device=self.base.states.device, requires_grad=True)
            value = self.token_losses(scale).mean()
            (slope,) = torch.autograd.grad(value, scale, create_graph=True)
            if not slope.requires_grad:
                return 0.0
            (curvature,) = torch.autograd.grad(slope, scale)
        return float(curvature)

    def probe(self, step: float) -> Probe:
        scale = step / self.unit
        return Probe(float(self.second_difference(step).mean()) / scale**2, float(self.base.losses.mean()))


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """−log p(target) in float64 on the CPU, of shape (N,), from logits of shape (N, V)."""
    of_target = logits.gather(1, targets.to(logits.device).unsqueeze(1)).squeeze(1)
    # Subtracted before the sum: what is left is small, and its rounding is too.
    top = logits.detach().amax(1)
    rest = (logits - top.unsqueeze(1)).exp().cpu().sum(1, dtype=torch.float64).log()
    return rest - (of_target - top).cpu().double()


@contextlib.contextmanager
def _one_small_gradient(model: nn.Module) -> Iterator[None]:
    """Let the smallest parameter alone require a gradient, so that trying second derivatives takes no memory to speak of."""
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in chosen:
            parameter.requires_grad_(False)
        min(chosen, key=lambda parameter: parameter.numel()).requires_grad_(True)
        yield
    finally:
        for parameter in chosen:
            parameter.requires_grad_(True)


# Operations that take parameters. -------------------------------------------------------------------------------------

_NORMS = frozenset({F.layer_norm, F.rms_norm})
_PRODUCTS = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__})
_KNOWN = _NORMS | _PRODUCTS | {F.linear, torch.addmm, F.embedding}


class _Use:
    """One operation that took parameters in a way it is linear in.

    Attributes:
        function: The operation.
        args: What it took, all of it by position.
        names: Those of its parameters, by which the operation is known in the next pass.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], names: tuple[str, ...]) -> None:
        self.function, self.args, self.names = function, args, names


def _is_linear(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], places: set[int]) -> bool:
    """Whether an operation's output is linear in the arguments at these places together, and is known to `_Line._tangent`."""
    if function is F.embedding:
        return places == {1} and (len(args) <= 3 or args[3] is None) and kwargs.get("max_norm") is None
    if kwargs:
        return False
    if function is F.linear:
        return places <= {1, 2} and args[1].dim() == 2
    if function is torch.addmm:
        return len(args) == 3 and places <= {0, 2} and args[0].dim() == 1
    if function is F.layer_norm:
        return places <= {2, 3}
    if function is F.rms_norm:
        return places == {2}
    if function in _PRODUCTS:
        return len(places) == 1 and len(args) == 2 and isinstance(args[1 - min(places)], Tensor)
    return False


class _Recorder(TorchFunctionMode):
    """Notes which operations take the parameters.

    Attributes:
        uses: By name of a parameter, the operations that are linear in it.
        other: Names of those that are taken by other operations too.
    """

    def __init__(self, names: Mapping[int, str], head: nn.Module | None) -> None:
        super().__init__()
        self.names = names
        self.uses: dict[str, list[_Use]] = {}
        self.other: set[str] = set()
        self._of_head = {id(parameter) for parameter in head.parameters()} if head is not None else set()
        self._past_head = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        args, kwargs = _by_position(func, args, kwargs or {})
        places = {i for i, arg in enumerate(args) if isinstance(arg, Tensor) and id(arg) in self.names}
        inside = [a for arg in args if isinstance(arg, (list, tuple)) for a in arg if isinstance(a, Tensor)]
        inside += [arg for arg in kwargs.values() if isinstance(arg, Tensor)]
        nested = {self.names[id(arg)] for arg in inside if id(arg) in self.names}
        if func is F.linear and any(id(arg) in self._of_head for arg in args[1:]):
            # The readout of one row, which keeps the model's code happy; what comes after it acts on logits.
            self._past_head = True
            return output
        if not (places or nested) or not _has_tensor(output) or any(output is args[i] for i in places):
            return output
        names = tuple(self.names[id(args[i])] for i in sorted(places))
        if nested or self._past_head or not _is_linear(func, args, kwargs, places):
            self.other |= nested | set(names)
            return output
        use = _Use(func, args, names)
        for name in names:
            self.uses.setdefault(name, []).append(use)
        return output


def _by_position(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put the arguments of a norm in their places; torch hands them on by keyword."""
    if function not in _NORMS:
        return args, kwargs
    order = ("input", "normalized_shape", "weight", *(["bias"] if function is F.layer_norm else []), "eps")
    default = 1e-5 if function is F.layer_norm else None
    rest = [kwargs.get(name, default if name == "eps" else None) for name in order[len(args) :]]
    return (*args, *rest), {}


def _has_tensor(output: Any) -> bool:
    if isinstance(output, (list, tuple)):
        return any(isinstance(value, Tensor) for value in output)
    return isinstance(output, Tensor)


class _Perturbed(TorchFunctionMode):
    """Adds ε ∂y/∂ε to what operations put out.

    Args:
        line: The direction.
        scale: ε. If a tensor, parameters that are moved are moved here, where autograd sees it.
        piece: Which tokens are read out, or None while states are computed.
        states: Their states.
    """

    def __init__(
        self, line: _Line, scale: float | Tensor, piece: slice | None = None, states: Tensor | None = None
    ) -> None:
        super().__init__()
        self.line, self.scale, self.piece, self.states = line, scale, piece, states

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _by_position(func, args, kwargs or {})
        base = self.line.base
        if isinstance(self.scale, Tensor) and getattr(func, "__name__", "") != "__get__":
            called, kwargs = tree_map(self._moved, (args, kwargs))
        else:
            called = args
        output = func(*called, **kwargs)
        names = tuple(base.names[id(arg)] for arg in args if isinstance(arg, Tensor) and id(arg) in base.names)
        if not names:
            return output
        if func is F.linear and base.head is not None and base.names.get(id(args[1])) == base.head:
            if self.piece is None or self.states is None:
                return output
            return output + self.scale * self.line.head_shift(self.piece, self.states).view(output.shape)
        tangent = self.line.tangents.get(names)
        if tangent is None or self.piece is not None or not isinstance(output, Tensor):
            return output
        return output + self.scale * tangent if func in _KNOWN else output

    def _moved(self, arg: Any) -> Any:
        name = self.line.base.names.get(id(arg)) if isinstance(arg, Tensor) else None
        if name is None or name not in self.line.base.moved:
            return arg
        return arg + self.scale * self.line.direction(name, arg)
