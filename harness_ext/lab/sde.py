"""Whether a stochastic differential equation describes SGD: the check by SVAG, and the condition on the gradient's noise.

Source: Li, Malladi and Arora, "On the Validity of Modeling SGD with Stochastic Differential Equations" (NeurIPS 2021). SGD with
rate η, mean gradient ∇L and covariance Σ of the gradient of a batch of B is likened to

    dθ = −∇L dt + √(η Σ) dW,    η of time to a step.

Simulation (§4). SVAG with amplification l has the mean gradient of SGD, l times its covariance and the rate η/l, so for each l
it is a discretisation of the same equation, in steps of η/l, and for l → ∞ it converges to it. Where SGD follows its equation,
SVAG with l = 2, 4, 8 ends where SGD does. Each runs from one start for the same time, several times with independent batches,
and what is reported is the interval of the difference of means: agreement is a statement of how large a difference is left
possible, not the failure to find one. l = 1 is SGD on other batches, a control whose differences are chance.

Condition (§5). Let G = E‖∇L‖² and N = E tr Σ, N/G the noise-to-signal ratio, and f a test function. A step of SGD and η of the
equation's time change f in mean, divided by η, by

    SGD:  −∇f·∇L + (η/2) (tr(Σ∇²f) + ∇Lᵀ∇²f ∇L) + O(η²),        equation:  −∇f·∇L + (η/2) tr(Σ∇²f).

With f = ‖θ‖²/2 the brackets are N + G and N: the equation leaves out what finite steps along the mean gradient add. For a
scale-invariant loss (∇L·θ = 0) with weight decay λ the equilibrium is thus R = E‖θ‖² = η(N + G)/2λ for SGD and η N/2λ for the
equation. If R, N and G of the two lie within a factor C of each other, then (N + G)/C ≤ C N, or

    N/G ≥ 1/(C² − 1).                                                                                     (1)

The linear scaling rule takes a batch of κB and the rate κη. Its equilibrium is R' = κη(N' + G')/2λ. If R', κN' and G' lie
within a factor C of R, N and G, then κ(N' + G') ≤ C²(κN' + G') and κ(N/κ + G)/C ≤ C(N + G), or

    N'/G' ≥ (1 − C²/κ)/(C² − 1),                                                                          (2)
    κ ≤ C² + (C² − 1) N/G.                                                                                (3)

(2) can be checked where the rule was used; (3) says beforehand where it has to break, from N/G at the batch B. Both are
necessary, not sufficient. With C = √2 they are N/G ≥ 1, N'/G' ≥ 1 − 2/κ and κ ≤ 2 + N/G.

Estimates. From gradients g_i of K independent batches, N is the unbiased variance Σ‖g_i − ḡ‖²/(K − 1), and G the mean of
⟨g_i, g_j⟩ over i ≠ j, which has no share of the noise in it and can come out below 0. Ratios are those of means over runs.

Known gaps: the models here are scale-invariant in few of their weights and have no weight decay, and a run of given length
need not reach equilibrium (its drift is reported), so (1) to (3) are the paper's rule applied outside its theorem. One process
only.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from harness_ext.lab.algorithms import AdamW, Algorithm, Sgd, Svag
from harness_ext.lab.checkpoints import Estimate
from harness_ext.lab.excess import ExactLoss
from harness_ext.lab.figures import BLACK, COLOURS, save_figure
from harness_ext.lab.languages.base import Example, Language, Task
from harness_ext.lab.model import ModelConfig, build_model
from harness_ext.lab.quad import IGNORED, last_states
from harness_ext.lab.train import Blocks, TrainConfig, Trainer, cpu_threads, encode, pack, packed_batches, progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "QUICK",
    "Difference",
    "GradientNoise",
    "Scaling",
    "SdePath",
    "SdeReport",
    "SdeSettings",
    "gradient_noise",
    "largest_factor",
    "least_ratio",
    "sde_check",
    "welch",
]

SCHEMA_VERSION = 1

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class SdeSettings:
    """How large the check is.

    Attributes:
        amplifications: The l of SVAG, whole numbers from 1; each costs 2l times what SGD does (l = 1 the same).
        batch_factors: The κ of the linear scaling rule; each divides `steps`.
        seeds: Runs of each kind, at least 2.
        steps: Of SGD.
        batch_size: B, blocks in a batch.
        learning_rate: η, constant.
        start_steps: Steps of AdamW that make the start, where none is given.
        evaluations: Times at which the excess is measured, the last at the end.
        training_documents: From which all batches are drawn, with replacement.
        validation_documents: On which the excess is measured.
        labelled_documents: For training the probe, and as many for testing it.
        gradient_batches: K, batches of B from which N and G are estimated.
        closeness: C, above 1.
    """

    amplifications: tuple[int, ...] = (1, 2, 4, 8)
    batch_factors: tuple[int, ...] = (2, 4, 8)
    seeds: int = 6
    steps: int = 200
    batch_size: int = 8
    learning_rate: float = 0.3
    start_steps: int = 400
    evaluations: int = 8
    training_documents: int = 10_000
    validation_documents: int = 500
    labelled_documents: int = 2_000
    gradient_batches: int = 128
    closeness: float = math.sqrt(2)

    def __post_init__(self) -> None:
        for name, least in (
            ("seeds", 2),
            ("steps", 1),
            ("batch_size", 1),
            ("start_steps", 1),
            ("evaluations", 1),
            ("training_documents", 2),
            ("validation_documents", 2),
            ("labelled_documents", 2),
            ("gradient_batches", 2),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.amplifications or min(self.amplifications) < 1:
            raise ValueError(f"amplifications must be whole numbers from 1, at least one, got {self.amplifications}")
        for factor in self.batch_factors:
            if factor < 2 or self.steps % factor:
                raise ValueError(
                    f"batch_factors must be at least 2 and divide the {self.steps} steps, got {factor}; the scaled run takes "
                    "steps/factor steps"
                )
        if self.evaluations > self.steps // max(self.batch_factors, default=1):
            raise ValueError(
                f"evaluations is {self.evaluations}, more than the {self.steps // max(self.batch_factors, default=1)} steps of "
                "the shortest run; lower evaluations or the largest batch factor"
            )
        if len({*self.amplifications}) < len(self.amplifications) or len({*self.batch_factors}) < len(
            self.batch_factors
        ):
            raise ValueError(f"expected each value once, got {self.amplifications} and {self.batch_factors}")
        if not 0 < self.learning_rate < math.inf or not 1 < self.closeness < math.inf:
            raise ValueError(
                f"learning_rate must be above 0 and closeness above 1, got {self.learning_rate} and {self.closeness}"
            )


QUICK = SdeSettings(
    amplifications=(1, 2),
    batch_factors=(4,),
    seeds=2,
    steps=16,
    batch_size=4,
    start_steps=40,
    evaluations=4,
    training_documents=400,
    validation_documents=60,
    labelled_documents=200,
    gradient_batches=16,
)
"""Seconds on one core; it shows that everything runs, and its intervals say little."""


class GradientNoise(NamedTuple):
    """Of the gradient of a batch.

    Attributes:
        noise: N, the trace of its covariance.
        signal: G, the squared norm of its mean; unbiased, so it may be below 0.
    """

    noise: float
    signal: float


@dataclass(frozen=True)
class SdePath:
    """Runs of one kind, one for each seed.

    Attributes:
        name: "SGD", "SVAG l=2", "SGD 4B".
        amplification: l; 1 for SGD.
        batch_factor: κ of the linear scaling rule; 1 without it.
        batch_size: Blocks in a batch.
        learning_rate: Of a step.
        steps: Of a run.
        times: Continuous time of each measurement of the excess, the start first: Σ learning rates.
        excess: Nats per token; a tuple over `times` for each seed. NaN after a run diverged.
        flatness: At the end of each run; NaN if it diverged, empty if it was not measured.
        flatness_stderr: Of each.
        accuracy: Of the probe, at the end of each run, in [0, 1].
        diverged: How many runs lost their finite loss.
    """

    name: str
    amplification: int
    batch_factor: int
    batch_size: int
    learning_rate: float
    steps: int
    times: tuple[float, ...]
    excess: tuple[tuple[float, ...], ...]
    flatness: tuple[float, ...]
    flatness_stderr: tuple[float, ...]
    accuracy: tuple[float, ...]
    diverged: int

    def final(self, measure: str) -> tuple[float, ...]:
        """Values at the end of each run of "excess", "flatness" or "accuracy"; none if it was not measured."""
        if measure == "excess":
            return tuple(of_run[-1] for of_run in self.excess)
        return {"flatness": self.flatness, "accuracy": self.accuracy}[measure]


@dataclass(frozen=True)
class Difference:
    """How far the mean over runs of one kind is from that of SGD.

    Attributes:
        measure: "excess", "flatness" or "accuracy".
        name: Of the path.
        value: Mean of the path less mean of SGD.
        stderr: Its standard error over seeds, variances not taken to be equal.
        low: Of the 95 % interval (Welch, 1947).
        high: Of the 95 % interval.
        reason: Why there is no interval, its numbers being NaN; None if there is one.
    """

    measure: str
    name: str
    value: float
    stderr: float
    low: float
    high: float
    reason: str | None = None

    @property
    def within(self) -> float:
        """The largest absolute difference in the interval."""
        return max(abs(self.low), abs(self.high))

    @property
    def agrees(self) -> bool:
        """Whether 0 lies in the interval; then the two agree within ± `within`."""
        return self.low <= 0 <= self.high


@dataclass(frozen=True)
class Scaling:
    """The noise-to-signal ratio at the end of the runs of SGD with one batch size, and what it has to be.

    Attributes:
        name: Of the path.
        batch_factor: κ.
        noise: N of this batch size, mean over runs.
        signal: G, mean over runs.
        ratio: N/G, NaN if G is not above 0.
        ratio_stderr: Over runs, by the delta method.
        predicted_ratio: N/G of SGD divided by κ, which it is where the linear scaling rule keeps the equilibrium.
        least_ratio: What (1) of the module asks at κ = 1, and (2) elsewhere.
        holds: Whether the ratio reaches it; None where the standard error leaves it open.
        reason: Why there is no ratio; None if there is one.
    """

    name: str
    batch_factor: int
    noise: float
    signal: float
    ratio: float
    ratio_stderr: float
    predicted_ratio: float
    least_ratio: float
    holds: bool | None
    reason: str | None = None


@dataclass(frozen=True)
class SdeReport:
    """What came out.

    Attributes:
        settings: As asked for.
        description: Language, model and sizes: JSON types.
        task: Name of the downstream task.
        flatness_name: What the flatness is; None if it was not measured.
        start_accuracy: Of the probe at the start.
        start_flatness: At the start; None if it was not measured.
        paths: SGD first, then SVAG by l, then the linear scaling rule by κ.
        differences: Of each path but SGD, measure by measure.
        scalings: For SGD and each batch factor.
        largest_factor: κ at which the linear scaling rule has to break, (3) of the module; NaN without a ratio.
        largest_factor_stderr: Of it.
        drift: Change of SGD's excess over the last quarter of the time: 0 at equilibrium.
    """

    settings: SdeSettings
    description: Mapping[str, Any]
    task: str
    flatness_name: str | None
    start_accuracy: float
    start_flatness: Estimate | None
    paths: tuple[SdePath, ...]
    differences: tuple[Difference, ...]
    scalings: tuple[Scaling, ...]
    largest_factor: float
    largest_factor_stderr: float
    drift: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types with a schema version; None for a number that cannot be computed."""
        record = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        for difference, one in zip(record["differences"], self.differences, strict=True):
            difference |= {"agrees": None if one.reason else one.agrees, "within": one.within}
        return _without_nan(record)

    def table(self) -> str:
        """Return the report as text."""
        return "\n".join(_table_lines(self)) + "\n"

    def write(self, folder: Path) -> list[Path]:
        """Write `sde.json`, `sde.txt`, and the figure as `sde.png` and `sde.svg`.

        Raises:
            ImportError: If matplotlib is not installed; the others are written by then.
        """
        folder.mkdir(parents=True, exist_ok=True)
        record, table = folder / "sde.json", folder / "sde.txt"
        record.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        table.write_text(self.table(), encoding="utf-8")

        return [record, table, *save_figure(self.draw(), folder / "sde")]

    def draw(self) -> Figure:
        """Draw the excess against continuous time: SGD and SVAG on the left, the linear scaling rule on the right.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        return _draw(self)


def sde_check(
    language: Language,
    model_config: ModelConfig,
    *,
    settings: SdeSettings | None = None,
    seed: int = 0,
    start: PreTrainedModel | None = None,
    task: Task | None = None,
    measure_flatness: Callable[[PreTrainedModel], tuple[float, float]] | None = None,
    flatness_name: str = "flatness",
    progress: bool = True,
) -> SdeReport:
    """Run SGD, SVAG and the linear scaling rule from one start for the same time, and compare where they end.

    The result depends on the arguments alone, on a CPU to the last bit; one thread is used there.

    Args:
        language: What is trained on.
        model_config: Sizes of the model, and the length of its blocks; with `start`, those of `start`.
        settings: `SdeSettings()` where None.
        seed: Of the model, the text and all batches.
        start: Where all runs begin, a causal LM of the language's tokenizer; unchanged. None trains one.
        task: Downstream task; the language's first where None.
        measure_flatness: From a model to a value and its standard error, such as a Fisher trace; None leaves flatness out.
        flatness_name: What it measures, for the report.
        progress: Show a progress bar on stderr.

    Raises:
        ValueError: If the language has no task, or there is too little text for one batch.
        FloatingPointError: If the training of the start diverges.
    """
    settings = SdeSettings() if settings is None else settings
    if task is None:
        if not language.tasks:
            raise ValueError(f"the language {language.name!r} has no task; expected one to compare models on")
        task = language.tasks[0]
    with cpu_threads(1):
        world = _World(language, model_config, settings, task, seed, measure_flatness)
        kinds = _kinds(settings)
        blocks = settings.start_steps * settings.batch_size if start is None else 0
        blocks += settings.seeds * sum(kind.blocks for kind in kinds)
        trained_here = start is None
        with progress_bar(blocks * model_config.context, enabled=progress, desc="SGD and SVAG") as bar:
            start = world.train_start(bar) if start is None else start
            started = world.measure(start)
            outcomes = [world.run(start, kind, number, bar) for number, kind in enumerate(kinds)]
    paths = tuple(outcome.path for outcome in outcomes)
    differences = tuple(
        _difference(measure, path, paths[0])
        for measure in ("excess", *(("flatness",) if measure_flatness else ()), "accuracy")
        for path in paths[1:]
    )
    scalings = _scalings([outcome for outcome in outcomes if outcome.noise is not None], settings.closeness)
    final = np.array(paths[0].excess)
    quarter = final[:, -1] - final[:, -1 - math.ceil(settings.evaluations / 4)]
    own = scalings[0]
    return SdeReport(
        settings=settings,
        description={
            "language": language.name,
            "seed": seed,
            "model": {**asdict(model_config), "num_parameters": start.num_parameters()},
            "start": {"excess": started.excess, "trained_here": trained_here},
        },
        task=task.name,
        flatness_name=flatness_name if measure_flatness else None,
        start_accuracy=started.accuracy,
        start_flatness=started.flatness,
        paths=paths,
        differences=differences,
        scalings=scalings,
        largest_factor=largest_factor(own.ratio, settings.closeness),
        largest_factor_stderr=(settings.closeness**2 - 1) * own.ratio_stderr,
        drift=Estimate(float(quarter.mean()), _stderr(quarter)),
    )


def gradient_noise(
    model: PreTrainedModel, batches: Iterable[tuple[Mapping[str, Tensor], Tensor]], *, factor: int = 1
) -> GradientNoise:
    """Estimate N and G of the mean next-token loss at a model's weights; see the module.

    Args:
        model: A causal LM; its gradients are None afterwards.
        batches: Independent batches of equal size as `train.packed_batches` gives them, at least 2.
        factor: N is that of batches of so many of these: divided by it, as batches of independent blocks have it.

    Raises:
        ValueError: If there are fewer than 2 batches.
    """
    total: Tensor | None = None
    count, squares = 0, 0.0
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for inputs, targets in batches:
        model.zero_grad(set_to_none=True)
        logits = model(**inputs, use_cache=False).logits
        cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
        total = gradient.double() if total is None else total.add_(gradient)
        squares += float(gradient.double().square().sum())
        count += 1
    model.zero_grad(set_to_none=True)
    if total is None or count < 2:
        raise ValueError(f"expected at least 2 batches, got {count}")
    square = float(total.square().sum())
    return GradientNoise(
        noise=(squares - square / count) / (count - 1) / factor, signal=(square - squares) / (count * (count - 1))
    )


def least_ratio(closeness: float, factor: float = math.inf) -> float:
    """Return the least N'/G' with which the linear scaling rule by `factor` can hold within C, (2) of the module.

    With an infinite factor it is (1): what SGD needs to follow its equation.
    """
    return (1 - closeness**2 / factor) / (closeness**2 - 1)


def largest_factor(ratio: float, closeness: float) -> float:
    """Return the largest κ with which the linear scaling rule can hold within C, from N/G without it: (3) of the module."""
    return closeness**2 + (closeness**2 - 1) * ratio


def welch(values: Sequence[float], others: Sequence[float]) -> tuple[Estimate, tuple[float, float]]:
    """Return mean(values) − mean(others) with its standard error and its 95 % interval (Welch, 1947).

    Both are independent samples of normal variables of whatever variances, at least 2 each.
    """
    variances = [float(np.var(sample, ddof=1)) / len(sample) for sample in (values, others)]
    stderr = math.sqrt(sum(variances))
    value = float(np.mean(values) - np.mean(others))
    if stderr == 0:
        return Estimate(value, 0.0), (value, value)
    freedom = sum(variances) ** 2 / sum(
        variance**2 / (len(sample) - 1) for variance, sample in zip(variances, (values, others), strict=True)
    )
    half = float(student.ppf((1 + _CONFIDENCE) / 2, freedom)) * stderr
    return Estimate(value, stderr), (value - half, value + half)


class _Kind(NamedTuple):
    """What is run: the settings of a path."""

    name: str
    algorithm: Algorithm
    amplification: int
    batch_factor: int
    batch_size: int
    learning_rate: float
    steps: int

    @property
    def blocks(self) -> int:
        """That one run reads."""
        return self.steps * self.batch_size * self.algorithm.batches_per_step


def _kinds(settings: SdeSettings) -> list[_Kind]:
    size, rate, steps = settings.batch_size, settings.learning_rate, settings.steps
    # The trainer divides the rate of SVAG by l itself.
    return [
        _Kind("SGD", Sgd(), 1, 1, size, rate, steps),
        *(_Kind(f"SVAG l={by}", Svag(by), by, 1, size, rate, steps * by) for by in settings.amplifications),
        *(_Kind(f"SGD {by}B", Sgd(), 1, by, size * by, rate * by, steps // by) for by in settings.batch_factors),
    ]


class _Measured(NamedTuple):
    excess: float
    accuracy: float
    flatness: Estimate | None


class _Outcome(NamedTuple):
    path: SdePath
    noise: list[GradientNoise] | None


class _World:
    """Text, and everything that is measured on a model."""

    def __init__(
        self,
        language: Language,
        model_config: ModelConfig,
        settings: SdeSettings,
        task: Task,
        seed: int,
        measure_flatness: Callable[[PreTrainedModel], tuple[float, float]] | None,
    ) -> None:
        self._config, self._settings, self._seed = model_config, settings, seed
        self._measure_flatness = measure_flatness
        # One stream for each use, so that none depends on how much another draws.
        rngs = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(4)]
        self._tokenizer = language.tokenizer(max_length=model_config.context)
        training = language.sample(settings.training_documents, rngs[0])
        self._pool = pack(
            encode([" ".join(words) for words in training], self._tokenizer),
            end_of_text=self._tokenizer.eos_token_id,
            block_size=model_config.context,
        )
        self._loss = ExactLoss(language, language.sample(settings.validation_documents, rngs[1]))
        self._probe = _Probe(
            self._tokenizer,
            task.sample(settings.labelled_documents, rngs[2]),
            task.sample(settings.labelled_documents, rngs[3]),
        )

    def train_start(self, bar: tqdm) -> PreTrainedModel:
        """Train the model that all runs start from."""
        model = build_model(self._config, self._tokenizer, seed=self._seed)
        config = TrainConfig(steps=self._settings.start_steps, batch_size=self._settings.batch_size, algorithm=AdamW())
        Trainer(model, self._pool, config, seed=self._seed).run(config.steps, bar=bar)
        return model

    def measure(self, model: PreTrainedModel) -> _Measured:
        """Measure the end of a run, or the start."""
        excess = self._loss.measure(model).excess.value
        accuracy = self._probe.accuracy(model)
        flatness = None if self._measure_flatness is None else Estimate(*map(float, self._measure_flatness(model)))
        return _Measured(excess, accuracy, flatness)

    def run(self, start: PreTrainedModel, kind: _Kind, number: int, bar: tqdm) -> _Outcome:
        """Make all runs of one kind; `number` is its own, for its batches."""
        settings = self._settings
        points = [round(kind.steps * place / settings.evaluations) for place in range(settings.evaluations + 1)]
        rate = kind.learning_rate * kind.algorithm.rate_scale
        start_excess = self._loss.measure(start).excess.value
        curves, ends, noise = [], [], []
        for run in range(settings.seeds):
            model = copy.deepcopy(start)
            rng = np.random.default_rng([self._seed, number, run])
            config = TrainConfig(
                steps=kind.steps,
                batch_size=kind.batch_size,
                learning_rate=kind.learning_rate,
                warmup=0.0,
                final_fraction=1.0,
                weight_decay=0.0,
                max_grad_norm=math.inf,
                algorithm=kind.algorithm,
            )
            trainer = Trainer(model, self._draw(kind.blocks, rng), config, seed=run)
            curve, end = [start_excess], _Measured(math.nan, math.nan, Estimate(math.nan, math.nan))
            try:
                for point in points[1:]:
                    trainer.run(point, bar=bar)
                    curve.append(self._loss.measure(model).excess.value)
                if math.isfinite(curve[-1]):
                    end = self.measure(model)
            except FloatingPointError:
                bar.update((kind.steps - trainer.step) * trainer.tokens_per_step)
            curves.append(tuple(curve + [math.nan] * (len(points) - len(curve))))
            ends.append(end)
            # N and G are asked of SGD alone.
            if isinstance(kind.algorithm, Sgd) and math.isfinite(end.excess):
                noise.append(self._noise(model, kind.batch_factor, rng))
        flatness = [end.flatness for end in ends if self._measure_flatness is not None and end.flatness is not None]
        path = SdePath(
            name=kind.name,
            amplification=kind.amplification,
            batch_factor=kind.batch_factor,
            batch_size=kind.batch_size,
            learning_rate=rate,
            steps=kind.steps,
            times=tuple(point * rate for point in points),
            excess=tuple(curves),
            flatness=tuple(value.value for value in flatness),
            flatness_stderr=tuple(value.stderr for value in flatness),
            accuracy=tuple(end.accuracy for end in ends),
            diverged=sum(not math.isfinite(end.excess) for end in ends),
        )
        return _Outcome(path, noise if isinstance(kind.algorithm, Sgd) else None)

    def _draw(self, count: int, rng: np.random.Generator) -> Blocks:
        """Independent blocks, with replacement, as the theory has them."""
        rows = rng.integers(len(self._pool.tokens), size=count)
        return Blocks(self._pool.tokens[rows], self._pool.positions[rows])

    def _noise(self, model: PreTrainedModel, factor: int, rng: np.random.Generator) -> GradientNoise:
        size = self._settings.batch_size
        blocks = self._draw(self._settings.gradient_batches * size, rng)
        return gradient_noise(model, packed_batches(blocks, batch_size=size, device=model.device), factor=factor)


class _Probe:
    """Logistic regression from last states to the labels of a task."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train: Sequence[Example], test: Sequence[Example]) -> None:
        end = tokenizer.eos_token_id
        self._rows, self._labels = [], []
        for examples in (train, test):
            documents = encode([" ".join(example.words) for example in examples], tokenizer)
            self._rows.append([torch.tensor([end, *document]) for document in documents])
            self._labels.append(np.array([example.label for example in examples]))
        if len({*self._labels[0].tolist()}) < 2:
            raise ValueError("the probe's training documents are all of one class; raise labelled_documents")

    def accuracy(self, model: PreTrainedModel) -> float:
        """Return the share of the test documents that are labelled rightly."""
        train, test = (self._states(model, rows) for rows in self._rows)
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        return float(probe.fit(train, self._labels[0]).score(test, self._labels[1]))

    @staticmethod
    @torch.no_grad()
    def _states(model: PreTrainedModel, rows: Sequence[Tensor], batch_size: int = 256) -> np.ndarray:
        """f of each document, float64 (n, d)."""
        model.eval()
        states = []
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            lengths = torch.tensor([len(row) for row in batch])
            # Padding stands on the right, where a causal model does not see it.
            tokens = pad_sequence(list(batch), batch_first=True)
            mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
            inputs = {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}
            states.append(last_states(model, inputs)[torch.arange(len(batch)), lengths - 1].cpu().double().numpy())
        return np.concatenate(states)


def _difference(measure: str, path: SdePath, sgd: SdePath) -> Difference:
    for one in (path, sgd):
        if one.diverged:
            reason = f"{one.diverged} of {len(one.excess)} runs of {one.name} diverged"
            return Difference(measure, path.name, math.nan, math.nan, math.nan, math.nan, reason)
    estimate, (low, high) = welch(path.final(measure), sgd.final(measure))
    if estimate.stderr == 0:
        # Of a few runs, accuracies are often equal to the last document.
        reason = "the runs of either kind do not differ, so there is no interval"
        return Difference(measure, path.name, estimate.value, math.nan, math.nan, math.nan, reason)
    return Difference(measure, path.name, estimate.value, estimate.stderr, low, high)


def _scalings(outcomes: Sequence[_Outcome], closeness: float) -> tuple[Scaling, ...]:
    """Rows of SGD and of each batch factor, SGD's first."""
    rows: list[Scaling] = []
    for path, noise in outcomes:
        factor = path.batch_factor
        least = least_ratio(closeness) if factor == 1 else least_ratio(closeness, factor)
        ratio, stderr, reason = math.nan, math.nan, None
        mean = np.array(noise).mean(axis=0) if noise else np.full(2, math.nan)
        if path.diverged:
            reason = f"{path.diverged} of {len(path.excess)} runs diverged"
        elif mean[1] <= 0:
            reason = f"G came out as {mean[1]:.2g}; raise gradient_batches"
        else:
            ratio = mean[0] / mean[1]
            pairs = np.array(noise)
            # Delta method for the ratio of two means.
            stderr = _stderr((pairs[:, 0] - ratio * pairs[:, 1]) / mean[1])
        holds = None
        if reason is None and abs(ratio - least) > 2 * stderr:
            holds = bool(ratio > least)
        rows.append(
            Scaling(
                name=path.name,
                batch_factor=factor,
                noise=float(mean[0]),
                signal=float(mean[1]),
                ratio=float(ratio),
                ratio_stderr=float(stderr),
                predicted_ratio=float(rows[0].ratio / factor if rows else ratio),
                least_ratio=least,
                holds=holds,
                reason=reason,
            )
        )
    return tuple(rows)


def _stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def _without_nan(value: Any) -> Any:
    if isinstance(value, Estimate):
        return _without_nan(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# Text and figure. -----------------------------------------------------------------------------------------------------


def _table_lines(report: SdeReport) -> list[str]:
    settings, model = report.settings, report.description["model"]
    names = {"excess": "excess", "flatness": report.flatness_name or "", "accuracy": f"accuracy on {report.task}"}
    measures = [measure for measure, name in names.items() if name]
    formats = {"excess": ".5f", "flatness": ".4g", "accuracy": ".4f"}
    starts = {"excess": report.description["start"]["excess"], "accuracy": report.start_accuracy}
    if report.start_flatness is not None:
        starts["flatness"] = report.start_flatness.value
    lines = [
        f"SGD and its equation on the language {report.description['language']} (seed {report.description['seed']}): "
        f"{model['architecture']} of width {model['width']} and depth {model['depth']}, {model['num_parameters']:,} "
        "parameters.",
        f"Rate {settings.learning_rate:g}, batches of {settings.batch_size} blocks of {model['context']} tokens, "
        f"{settings.steps} steps of SGD, time {report.paths[0].times[-1]:g}; {settings.seeds} runs of each kind.",
        "",
    ]
    header = ["at the end", *(names[measure] for measure in measures)]
    rows = [["start", *(format(starts[measure], formats[measure]) for measure in measures)]]
    for path in report.paths:
        row = [path.name]
        for measure in measures:
            values = np.array(path.final(measure))
            row.append(
                f"{path.diverged} of {len(values)} diverged"
                if path.diverged
                else f"{values.mean():{formats[measure]}} ± {_stderr(values):.2g}"
            )
        rows.append(row)
    lines += [*_aligned([header, *rows]), ""]
    lines.append("Difference from SGD, with the 95 % interval over runs")
    rows = []
    for one in report.differences:
        form = "+" + formats[one.measure]
        if one.reason is not None:
            value = f"{one.value:{form}}" if math.isfinite(one.value) else "-"
            rows.append([one.name, names[one.measure], value, "-", one.reason])
            continue
        verdict = f"agrees within ±{one.within:.2g}" if one.agrees else "differs"
        interval = f"[{one.low:{form}}, {one.high:{form}}]"
        rows.append([one.name, names[one.measure], f"{one.value:{form}}", interval, verdict])
    lines += _aligned(rows)
    counted = [one for one in report.differences if one.reason is None]
    lines += [
        f"Of {len(counted)} such intervals about {(1 - _CONFIDENCE) * len(counted):.1f} would miss 0 by chance if all agreed; "
        f"{sum(not one.agrees for one in counted)} do.",
        f"Over the last quarter of the time SGD's excess changes by {report.drift.value:+.2g} ± {report.drift.stderr:.1g}; at "
        "equilibrium it would be 0.",
        "",
        f"Noise-to-signal ratio N/G of the gradient, and what is necessary within a factor C = {settings.closeness:.4g}",
    ]
    words = {True: "holds", False: "broken", None: "open: within 2 standard errors"}
    rows = [["", "N", "G", "N/G", "expected", "necessary", ""]]
    rows += [
        [
            one.name,
            _number(one.noise),
            _number(one.signal),
            "-" if one.reason else f"{one.ratio:.3g} ± {one.ratio_stderr:.1g}",
            "" if one.batch_factor == 1 else _number(one.predicted_ratio),
            _number(round(one.least_ratio, 9) + 0.0),
            one.reason or words[one.holds],
        ]
        for one in report.scalings
    ]
    lines += _aligned(rows)
    if math.isfinite(report.largest_factor):
        lines.append(
            f"From N/G of SGD the linear scaling rule has to break at a batch of {report.largest_factor:.3g} ± "
            f"{report.largest_factor_stderr:.1g} times B or before."
        )
    return lines


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# Black for SGD itself.
_COLOURS = (BLACK, *COLOURS[:-1])


def _draw(report: SdeReport) -> Figure:
    # No pyplot: it keeps global state and may want a display.
    from matplotlib.figure import Figure

    sgd = report.paths[0]
    panels = [("SVAG", [path for path in report.paths if path.batch_factor == 1])]
    if report.settings.batch_factors:
        panels.append(("linear scaling rule", [sgd, *(path for path in report.paths if path.batch_factor > 1)]))
    figure = Figure(figsize=(1 + 3.6 * len(panels), 3.2), layout="constrained")
    for axis, (title, paths) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        shown: list[float] = []
        for place, path in enumerate(paths):
            curves = np.array(path.excess)
            # A run that diverged ends the line of its kind.
            mean, error = curves.mean(axis=0), curves.std(axis=0, ddof=1) / math.sqrt(len(curves))
            colour = _COLOURS[place % len(_COLOURS)]
            label = f"{path.name} ({path.diverged} of {len(curves)} diverged)" if path.diverged else path.name
            axis.plot(path.times, mean, marker="o", markersize=3, linewidth=1.2, color=colour, label=label)
            axis.fill_between(path.times, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
            if not path.diverged:
                shown += [*(mean - error), *(mean + error)]
        if shown:
            # What diverges leaves the panel, or nothing else could be seen in it.
            margin = 0.05 * (max(shown) - min(shown))
            axis.set_ylim(min(shown) - margin, max(shown) + margin)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("continuous time", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=8, frameon=False)
        axis.set_ylabel("excess loss (nats per token)", fontsize=9)
    return figure
