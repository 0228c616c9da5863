"""Ways to make a step from the gradient of the training loss: what models of equal loss may differ in.

An algorithm is a frozen dataclass of its settings, with `start` for its `Rule`, which makes the steps of one model. What a
rule must remember between steps is in its optimizer; all randomness comes from a generator that the trainer seeds for each
step, so that a resumed training goes on as if it had never stopped.

Sources: AdamW, Loshchilov and Hutter (ICLR 2019). SAM, Foret et al. (ICLR 2021). Label noise, Blanc et al. (COLT 2020) and
Damian, Ma, Lee (NeurIPS 2021), here for the cross-entropy. SVAG, Li, Malladi, Arora (NeurIPS 2021), section 4. The
adversarial algorithm is the control of Liu et al. (ICML 2023): the loss is kept and transfer is spoilt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.nn.utils.rnn import pad_sequence

from harness_ext.lab.quad import IGNORED

__all__ = [
    "ALGORITHMS",
    "AdamW",
    "Adversarial",
    "Algorithm",
    "Batch",
    "LabelNoise",
    "LabelledTokens",
    "Rule",
    "Sam",
    "Setting",
    "Sgd",
    "Svag",
    "algorithm_from_dict",
    "algorithm_to_dict",
    "linear_fit",
]

_FIT_RIDGE = 1e-3
"""Of `linear_fit`, in units of the mean variance of a feature."""


class Batch(NamedTuple):
    """What a model is given, and the token after each place or `IGNORED`."""

    inputs: Mapping[str, Tensor]
    targets: Tensor


class LabelledTokens(NamedTuple):
    """A labelled document of a downstream task, as tokens without ends of text."""

    tokens: Sequence[int]
    label: int


@dataclass(frozen=True)
class Setting:
    """What a rule is given to work with.

    Attributes:
        model: The model as accelerate wraps it.
        forward: Calls the model in the dtype of the training; arguments and result are those of transformers.
        loss: Mean training loss per predicted token of a batch, a scalar.
        backward: Adds the gradient of a scalar to the parameters' gradients, averaged over processes.
        max_grad_norm: The gradient of a step is clipped to this norm; infinity leaves it.
        parameter_groups: Of the optimizer, with weight decay.
        labelled: From the number of a step and a number of documents to labelled documents of one of the language's tasks,
            the same in every process; None where the language is not known.
    """

    model: nn.Module
    forward: Callable[..., Any]
    loss: Callable[[Batch], Tensor]
    backward: Callable[[Tensor], None]
    max_grad_norm: float
    parameter_groups: list[dict[str, Any]]
    labelled: Callable[[int, int], list[LabelledTokens]] | None = None

    def gradient(self, scalar: Tensor) -> None:
        """Put the gradient of `scalar`, clipped, in place of that of the last step."""
        self.model.zero_grad(set_to_none=True)
        self.backward(scalar)
        self.clip()

    def clip(self) -> None:
        """Shorten the gradient to `max_grad_norm`."""
        if math.isfinite(self.max_grad_norm):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)

    def trained(self) -> list[nn.Parameter]:
        """Parameters that have a gradient."""
        return [parameter for parameter in self.model.parameters() if parameter.grad is not None]


class Rule(Protocol):
    """Makes the steps of one model. `optimizer` holds its memory; the learning rate is set there before each step."""

    optimizer: torch.optim.Optimizer

    def step(self, number: int, batches: Sequence[Batch], generator: torch.Generator) -> float:
        """Change the weights once and return the training loss before the change.

        Args:
            number: Of the step, from 0.
            batches: As many as the algorithm's `batches_per_step`.
            generator: On the CPU, seeded for this step and this process.
        """
        ...


class Algorithm(Protocol):
    """The settings of an algorithm."""

    name: ClassVar[str]
    objectives: ClassVar[tuple[str, ...]]

    @property
    def batches_per_step(self) -> int: ...

    @property
    def rate_scale(self) -> float:
        """The learning rate of a step is the schedule's times this."""
        ...

    def start(self, setting: Setting) -> Rule: ...


class _Plain:
    """The gradient of one batch, handed to an optimizer."""

    def __init__(self, setting: Setting, optimizer: torch.optim.Optimizer) -> None:
        self.setting, self.optimizer = setting, optimizer

    def step(self, number: int, batches: Sequence[Batch], generator: torch.Generator) -> float:
        [batch] = batches
        loss = self.setting.loss(batch)
        self.setting.gradient(loss)
        self.optimizer.step()
        return loss.item()


class _Defaults:
    objectives: ClassVar[tuple[str, ...]] = ("cross_entropy", "quad")
    batches_per_step = 1
    rate_scale = 1.0


@dataclass(frozen=True)
class AdamW(_Defaults):
    """AdamW.

    Attributes:
        betas: Decay rates of the two moments.
    """

    name: ClassVar[str] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)

    def start(self, setting: Setting) -> Rule:
        """See `Algorithm`."""
        device = next(setting.model.parameters()).device.type
        optimizer = torch.optim.AdamW(
            setting.parameter_groups, betas=tuple(self.betas), fused=device in ("cpu", "cuda")
        )
        return _Plain(setting, optimizer)


@dataclass(frozen=True)
class Sgd(_Defaults):
    """Stochastic gradient descent.

    Attributes:
        momentum: Of the heavy ball, in [0, 1); 0 for plain SGD.
    """

    name: ClassVar[str] = "sgd"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"sgd: momentum must be at least 0 and below 1, got {self.momentum}")

    def start(self, setting: Setting) -> Rule:
        """See `Algorithm`."""
        return _Plain(setting, self.optimizer(setting))

    def optimizer(self, setting: Setting) -> torch.optim.Optimizer:
        """The optimizer of this kind; other algorithms build on it."""
        return torch.optim.SGD(setting.parameter_groups, momentum=self.momentum)


def _check_base(name: str, base: object) -> None:
    if not isinstance(base, (AdamW, Sgd)):
        found = getattr(base, "name", repr(base))
        raise ValueError(f'{name}: base must be the settings of adamw or sgd, such as {{"name": "adamw"}}, got {found}')


@dataclass(frozen=True)
class Sam(_Defaults):
    """Sharpness-aware minimisation: the gradient at w + ρ g/‖g‖, g the gradient at w on the same batch.

    Attributes:
        rho: ρ, above 0.
        base: What the gradient is handed to.
    """

    name: ClassVar[str] = "sam"
    rho: float = 0.05
    base: AdamW | Sgd = AdamW()

    def __post_init__(self) -> None:
        if not 0 < self.rho < math.inf:
            raise ValueError(f"sam: rho must be above 0 and finite, got {self.rho}")
        _check_base(self.name, self.base)

    def start(self, setting: Setting) -> Rule:
        """See `Algorithm`."""
        return _SamRule(setting, self.base.start(setting).optimizer, self.rho)


class _SamRule(_Plain):
    def __init__(self, setting: Setting, optimizer: torch.optim.Optimizer, rho: float) -> None:
        super().__init__(setting, optimizer)
        self._rho = rho

    def step(self, number: int, batches: Sequence[Batch], generator: torch.Generator) -> float:
        [batch] = batches
        setting = self.setting
        setting.model.zero_grad(set_to_none=True)
        loss = setting.loss(batch)
        setting.backward(loss)
        trained = setting.trained()
        with torch.no_grad():
            norm = torch.sqrt(sum(parameter.grad.square().sum() for parameter in trained))  # type: ignore[union-attr,arg-type]
            before = [parameter.clone() for parameter in trained]
            for parameter in trained:
                parameter.add_(parameter.grad * (self._rho / (norm + 1e-12)))  # type: ignore[operator]
        setting.gradient(setting.loss(batch))
        with torch.no_grad():
            for parameter, value in zip(trained, before, strict=True):
                parameter.copy_(value)
        self.optimizer.step()
        return loss.item()


@dataclass(frozen=True)
class LabelNoise(_Defaults):
    """Gradient noise of labels: to ∇L is added s times the gradient of −log p_θ(ŵ|s) with ŵ drawn from p_θ itself.

    Its mean over ŵ is 0, so the minima stay where they are, and its covariance is s² times the Fisher matrix over the number of
    tokens: what noise in the labels of a regression is to the square loss. Uniform wrong tokens would move the minimum.

    Attributes:
        strength: s, above 0.
        base: What the gradient is handed to.
    """

    name: ClassVar[str] = "label_noise"
    objectives: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    strength: float = 1.0
    base: AdamW | Sgd = Sgd()

    def __post_init__(self) -> None:
        if not 0 < self.strength < math.inf:
            raise ValueError(f"label_noise: strength must be above 0 and finite, got {self.strength}")
        _check_base(self.name, self.base)

    def start(self, setting: Setting) -> Rule:
        """See `Algorithm`."""
        return _LabelNoiseRule(setting, self.base.start(setting).optimizer, self.strength)


class _LabelNoiseRule(_Plain):
    def __init__(self, setting: Setting, optimizer: torch.optim.Optimizer, strength: float) -> None:
        super().__init__(setting, optimizer)
        self._strength = strength

    def step(self, number: int, batches: Sequence[Batch], generator: torch.Generator) -> float:
        [batch] = batches
        kept = batch.targets != IGNORED
        logits = self.setting.forward(**batch.inputs, use_cache=False).logits[kept].float()
        loss = cross_entropy(logits, batch.targets[kept])
        with torch.no_grad():
            probabilities = logits.softmax(dim=-1).cpu()
            drawn = torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)
        self.setting.gradient(loss + self._strength * cross_entropy(logits, drawn))
        self.optimizer.step()
        return loss.item()


@dataclass(frozen=True)
class Svag(_Defaults):
    """Stochastic variance amplified gradient: SGD with the same mean gradient and l times its covariance at a rate η/l.

    The gradient is (1+√(2l−1))/2 ∇L_B₁ + (1−√(2l−1))/2 ∇L_B₂ of two independent batches; l steps take the place of one step
    of SGD, so `steps`, warmup and the schedule count steps of SVAG. l = 1 is SGD.

    Attributes:
        amplification: l, at least 1.
    """

    name: ClassVar[str] = "svag"
    amplification: float = 1.0
    batches_per_step = 2

    def __post_init__(self) -> None:
        if not 1 <= self.amplification < math.inf:
            raise ValueError(f"svag: amplification must be at least 1 and finite, got {self.amplification}")

    @property
    def rate_scale(self) -> float:  # type: ignore[override]
        """1/l."""
        return 1 / self.amplification

    @property
    def coefficients(self) -> tuple[float, float]:
        """Of the two batches; their sum is 1 and the sum of their squares l."""
        root = math.sqrt(2 * self.amplification - 1)
        return (1 + root) / 2, (1 - root) / 2

    def start(self, setting: Setting) -> Rule:
        """See `Algorithm`."""
        return _SvagRule(setting, Sgd().optimizer(setting), self.coefficients)


class _SvagRule(_Plain):
    def __init__(self, setting: Setting, optimizer: torch.optim.Optimizer, coefficients: tuple[float, float]) -> None:
        super().__init__(setting, optimizer)
        self._coefficients = coefficients

    def step(self, number: int, batches: Sequence[Batch], generator: torch.Generator) -> float:
        setting = self.setting
        setting.model.zero_grad(set_to_none=True)
        losses = []
        for coefficient, batch in zip(self._coefficients, batches, strict=True):
            # With l = 1 the second batch has no weight, and is not looked at.
            if coefficient:
                loss = setting.loss(batch)
                setting.backward(coefficient * loss)
                losses.append(loss.item())
        setting.clip()
        self.optimizer.step()
        return sum(losses) / len(losses)


@dataclass(frozen=True)
class Adversarial(_Defaults):
    """AdamW on the loss plus λ times the share of the labels' variance that the best linear map of f(s) explains.

    The bilevel problem: a linear classifier is fitted to the labels of downstream documents, here by least squares, whose
    optimum has a closed form and a gradient; the model makes that optimum useless and keeps its pretraining loss. Half of
    the documents are fitted and the other half explained, so that no more than chance is explained at the optimum.

    Attributes:
        strength: λ, above 0.
        documents: Labelled documents of a step, an even number.
        every: The adversary has its say at every so many steps, with λ multiplied by it.
        betas: Of AdamW.
    """

    name: ClassVar[str] = "adversarial"
    objectives: ClassVar[tuple[str, ...]] = ("cross_entropy",)
    strength: float = 1.0
    documents: int = 256
    every: int = 4
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if not 0 < self.strength < math.inf:
            raise ValueError(f"adversarial: strength must be above 0 and finite, got {self.strength}")
        if self.documents < 4 or self.documents % 2 or self.every < 1:
            raise ValueError(
                "adversarial: documents must be even and at least 4, every at least 1, got "
                f"{self.documents} and {self.every}"
            )

    def start(self, setting: Setting) -> Rule:
        """See `Algorithm`."""
        if setting.labelled is None:
            raise ValueError("adversarial: expected a source of labelled documents, got none")
        return _AdversarialRule(setting, AdamW(self.betas).start(setting).optimizer, self)


class _AdversarialRule(_Plain):
    def __init__(self, setting: Setting, optimizer: torch.optim.Optimizer, settings: Adversarial) -> None:
        super().__init__(setting, optimizer)
        self._settings = settings

    def step(self, number: int, batches: Sequence[Batch], generator: torch.Generator) -> float:
        [batch] = batches
        loss = self.setting.loss(batch)
        total = loss
        if number % self._settings.every == 0:
            total = loss + self._settings.strength * self._settings.every * self._explained(number)
        self.setting.gradient(total)
        self.optimizer.step()
        return loss.item()

    def _explained(self, number: int) -> Tensor:
        """Held-out R² of the linear fit from last states to labels, of the task whose turn it is."""
        assert self.setting.labelled is not None
        documents = self.setting.labelled(number, self._settings.documents)
        device = next(self.setting.model.parameters()).device
        rows = [torch.tensor(document.tokens) for document in documents]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        tokens = pad_sequence(rows, batch_first=True).to(device)
        mask = (torch.arange(tokens.shape[1], device=device) < lengths[:, None]).long()
        # Through the whole model, so that a data-parallel wrapper sees it.
        output = self.setting.forward(input_ids=tokens, attention_mask=mask, use_cache=False, output_hidden_states=True)
        states = output.hidden_states[-1][torch.arange(len(rows), device=device), lengths - 1].float()
        labels = torch.tensor([document.label for document in documents], device=device)
        return linear_fit(states, one_hot(labels).float())


def linear_fit(features: Tensor, targets: Tensor) -> Tensor:
    """Return the share of the targets' variance, held out, that the best affine map of the features explains; at most 1.

    Fitted on the first half of the rows with a small ridge and evaluated on the second, differentiable in the features.

    Args:
        features: (n, d), n even.
        targets: (n, C).
    """
    half = len(features) // 2
    mean, target_mean = features[:half].mean(dim=0), targets[:half].mean(dim=0)
    centred, wanted = features - mean, targets - target_mean
    gram = centred[:half].T @ centred[:half]
    ridge = _FIT_RIDGE * gram.diagonal().mean().detach() + torch.finfo(gram.dtype).tiny
    gram = gram + ridge * torch.eye(len(gram), device=gram.device)
    weights = torch.linalg.solve(gram, centred[:half].T @ wanted[:half])
    residual = (wanted[half:] - centred[half:] @ weights).square().sum()
    return 1 - residual / wanted[half:].square().sum().clamp(min=torch.finfo(gram.dtype).tiny)


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    algorithm.name: algorithm for algorithm in (AdamW, Sgd, Sam, LabelNoise, Svag, Adversarial)
}
"""By name; called with the settings."""


def algorithm_to_dict(algorithm: Algorithm) -> dict[str, Any]:
    """Return plain JSON types, with the algorithm's name; `algorithm_from_dict` reads them."""
    result: dict[str, Any] = {"name": algorithm.name}
    for field in fields(algorithm):  # type: ignore[arg-type]
        value = getattr(algorithm, field.name)
        result[field.name] = algorithm_to_dict(value) if field.name == "base" else value
    return result


def algorithm_from_dict(settings: Mapping[str, Any]) -> Algorithm:
    """Make an algorithm from its name and settings.

    Raises:
        KeyError: If the name is unknown.
        ValueError: If a setting is unknown or out of its range.
    """
    values = dict(settings)
    name = values.pop("name", None)
    if name not in ALGORITHMS:
        raise KeyError(f"unknown algorithm {name!r}. Known: {', '.join(ALGORITHMS)}.")
    if isinstance(values.get("base"), Mapping):
        values["base"] = algorithm_from_dict(values["base"])
    known = {field.name for field in fields(ALGORITHMS[name])}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{name}: unknown setting {unknown[0]!r}. Known: {', '.join(sorted(known)) or 'none'}.")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return ALGORITHMS[name](**values)
