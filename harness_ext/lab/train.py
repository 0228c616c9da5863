"""Train a small causal LM on documents by one of `lab.algorithms`, and measure its loss.

The objectives are the cross-entropy and, of a `lab.quad.QuadModel`, the Quad loss. The learning rate rises linearly and then
falls by a cosine, or stays. A `Trainer` can stop after any step and give its state for another to go on from.
Known gap: documents are kept apart, so a model never sees two of them in one context, and few-shot prompts are new to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler, TensorDataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from harness_ext.lab.algorithms import AdamW, Algorithm, Batch, LabelledTokens, Setting, algorithm_to_dict
from harness_ext.lab.quad import IGNORED, QuadModel, last_states, linear_head, quad_losses

__all__ = [
    "OBJECTIVES",
    "Blocks",
    "Loss",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "check_packing",
    "cpu_threads",
    "encode",
    "pack",
    "packed_batches",
    "progress_bar",
    "train",
    "validation_loss",
]

_PACKING_TOLERANCE = 1e-3

OBJECTIVES = ("cross_entropy", "quad")


class Blocks(NamedTuple):
    """Documents laid end to end and cut into blocks of equal size.

    Attributes:
        tokens: int64 (n, block_size).
        positions: int64 (n, block_size), the place of each token in its document as far as the block shows it: every
            document, and every block, begins at 0.
    """

    tokens: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class TrainConfig:
    """How to train; tokens seen = steps * batch_size * block size.

    Attributes:
        steps: Number of optimizer steps, at least 1.
        batch_size: Blocks in each step of one process, at least 1.
        learning_rate: Peak of the schedule.
        warmup: Fraction of the steps over which the rate rises linearly to its peak; a cosine then takes it to
            `final_fraction` of the peak.
        final_fraction: See `warmup`.
        weight_decay: Of matrices only; decoupled under AdamW, an L2 penalty under SGD.
        max_grad_norm: The gradient is clipped to this norm; infinity leaves it.
        algorithm: Makes the steps.
    """

    steps: int
    batch_size: int = 16
    learning_rate: float = 4e-3
    warmup: float = 0.04
    final_fraction: float = 0.05
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    algorithm: Algorithm = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(f"steps and batch_size must be at least 1, got {self.steps} and {self.batch_size}")
        if not 0 < self.learning_rate < math.inf or not self.max_grad_norm > 0:
            raise ValueError(
                f"learning_rate and max_grad_norm must be above 0, got {self.learning_rate} and {self.max_grad_norm}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types: the algorithm's name and settings, and those of the schedule."""
        own = {name: value for name, value in vars(self).items() if name != "algorithm"}
        if math.isinf(self.max_grad_norm):
            own["max_grad_norm"] = None
        return {**algorithm_to_dict(self.algorithm), **own}

    def rate_factor(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, as a fraction of its peak."""
        warmup_steps = max(1, round(self.warmup * self.steps))
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, self.steps - warmup_steps)
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class TrainResult:
    """What training did.

    Attributes:
        steps: Optimizer steps taken.
        tokens: Tokens seen, all processes together.
        losses: This process's training loss at every step, per token: nats, or the Quad loss, which has no unit.
        seconds: Wall time.
    """

    steps: int
    tokens: int
    losses: tuple[float, ...]
    seconds: float


class Loss(NamedTuple):
    """Mean loss per token, its standard error over documents, and the tokens counted.

    The loss is the cross-entropy of the next token in nats, or the Quad loss, which has no unit.
    """

    value: float
    stderr: float
    tokens: int


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let torch use `count` CPU threads inside the block.

    One thread makes a CPU result independent of the number of cores. For a model of width 64 it is also the safe choice:
    threads wait for one another, and on a busy machine two reached a tenth to a half of the speed of one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def encode(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each document, without special tokens."""
    # Without `verbose=False` a document longer than the context gives a warning, but `pack` cuts it.
    return tokenizer(list(documents), add_special_tokens=False, verbose=False)["input_ids"]


def pack(documents: Iterable[Sequence[int]], *, end_of_text: int, block_size: int) -> Blocks:
    """Lay documents end to end, each before an end of text, and cut the stream into blocks; the rest is left out.

    Every second document also has an end of text in front, so that a model learns both to begin a document after one,
    as its loss is measured, and to be given a document without one, as GPT-2 tokenizers encode a prompt.

    Args:
        documents: Token ids without special tokens.
        end_of_text: The token between documents.
        block_size: Tokens in a block.

    Raises:
        ValueError: If the documents do not fill one block.
    """
    parts = [
        [end_of_text, *document, end_of_text] if number % 2 else [*document, end_of_text]
        for number, document in enumerate(documents)
    ]
    stream = np.fromiter(chain.from_iterable(parts), dtype=np.int64)
    num_blocks = len(stream) // block_size
    if num_blocks == 0:
        raise ValueError(f"expected at least {block_size} tokens to fill one block, got {len(stream)}")
    starts = np.zeros(len(stream), dtype=np.int64)
    first_tokens = np.cumsum([0, *(len(part) for part in parts[:-1])])
    starts[first_tokens] = first_tokens
    shape = (num_blocks, block_size)
    starts = np.maximum.accumulate(starts)[: num_blocks * block_size].reshape(shape)
    indices = np.arange(num_blocks * block_size).reshape(shape)
    return Blocks(
        tokens=stream[: num_blocks * block_size].reshape(shape),
        positions=indices - np.maximum(starts, indices[:, :1]),
    )


@torch.no_grad()
def check_packing(model: PreTrainedModel, *, block_size: int) -> None:
    """Check that a model treats a packed block as separate forward passes over its documents do.

    Models with sliding windows, ALiBi or a recurrence do not take the mask that keeps documents apart, some without a word.

    Raises:
        ValueError: If the logits differ.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(block_size, device=model.device).mul(7).remainder(vocabulary)[None]
    training = model.training
    model.eval()
    try:
        # One document, as long as the block, and two.
        for cuts in ([block_size], [block_size // 2, block_size - block_size // 2]):
            positions = torch.cat([torch.arange(cut, device=model.device) for cut in cuts])[None]
            packed = model(**_packed_inputs(tokens, positions), use_cache=False).logits
            apart = torch.cat([model(input_ids=part, use_cache=False).logits for part in tokens.split(cuts, 1)], dim=1)
            difference = float((packed - apart).norm() / apart.norm())
            if not difference < _PACKING_TOLERANCE:
                raise ValueError(f"its logits change by {difference:.0%} of their size")
    except (TypeError, ValueError, RuntimeError) as err:
        raise ValueError(
            f"{type(model).__name__} cannot be trained on packed documents: with the mask that keeps them apart in a block of "
            f"{block_size} tokens it fails ({err}). GPT-2, Llama, Qwen2, GPT-NeoX and OPT can be; a model with a sliding "
            "window, if the block is not longer than the window."
        ) from err
    finally:
        model.train(training)


def packed_batches(
    blocks: Blocks, *, batch_size: int, device: torch.device
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield what a model is given for a batch of blocks, in their order, and the token after each place.

    A token attends to earlier tokens of its own document alone. The target is `lab.quad.IGNORED` where a document ends: its
    end does not tell how the next one begins. The last batch may be smaller.
    """
    for start in range(0, len(blocks.tokens), batch_size):
        rows = slice(start, start + batch_size)
        tokens, positions = (torch.from_numpy(array[rows]).to(device) for array in blocks)
        yield _packed_inputs(tokens, positions), _packed_targets(tokens, positions)


class Trainer:
    """Trains `model` in place, each document seeing only itself.

    The weights after a step depend on the model, the blocks, the configuration and `seed` alone, on a CPU to the last bit for
    a given number of threads, wherever the training stopped in between. No global RNG is read.

    Attributes:
        step: Optimizer steps taken.
        tokens_per_step: Tokens that a step sees, all processes together.
    """

    def __init__(
        self,
        model: PreTrainedModel | QuadModel,
        blocks: Blocks,
        config: TrainConfig,
        *,
        seed: int,
        objective: str = "cross_entropy",
        dtype: torch.dtype = torch.float32,
        labelled: Callable[[int, int], list[LabelledTokens]] | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: A causal LM in float32, or a `QuadModel` of one for the objective "quad"; accelerate chooses its device.
            blocks: As `pack` gives them. They are shuffled, and again each time that all have been seen.
            config: The recipe.
            seed: Of the order of the blocks and of the algorithm's own randomness.
            objective: One of `OBJECTIVES`.
            dtype: Of the forward pass, by autocast where it is not float32; the weights stay in float32.
            labelled: See `algorithms.Setting`.

        Raises:
            KeyError: If the objective is unknown.
            ValueError: If there are fewer blocks than one step takes, or the objective is not one of this model or algorithm.
        """
        _check_objective(model, objective)
        if objective not in config.algorithm.objectives:
            raise ValueError(
                f"the algorithm {config.algorithm.name} has the objective {', '.join(config.algorithm.objectives)}, not "
                f"{objective}"
            )
        self.config, self.step = config, 0
        self._objective, self._dtype, self._seed = objective, dtype, seed
        self._model, self._blocks = model, blocks
        self._accelerator = Accelerator()
        batches = config.algorithm.batches_per_step * self._accelerator.num_processes
        blocks_per_step = config.batch_size * batches
        if len(blocks.tokens) < blocks_per_step:
            raise ValueError(f"expected at least {blocks_per_step} blocks for one step, got {len(blocks.tokens)}")
        self.tokens_per_step = blocks_per_step * blocks.tokens.shape[1]
        self._wrapped = self._accelerator.prepare(model)
        self._rule = config.algorithm.start(
            Setting(
                model=self._wrapped,
                forward=self._forward,
                loss=self._loss,
                backward=self._accelerator.backward,
                max_grad_norm=config.max_grad_norm,
                parameter_groups=_parameter_groups(model, config.weight_decay),
                labelled=labelled,
            )
        )

    def run(self, until: int, *, bar: tqdm | None = None) -> list[float]:
        """Train until `until` steps have been taken, at most `config.steps`, and return this process's loss at each new step.

        Raises:
            FloatingPointError: If the loss stops being finite; the model is then spoilt.
        """
        losses = []
        self._wrapped.train()
        loader = self._batches(until)
        for number in range(self.step, until):
            rate = self.config.learning_rate * self.config.rate_factor(number) * self.config.algorithm.rate_scale
            for group in self._rule.optimizer.param_groups:
                group["lr"] = rate
            batches = [
                Batch(_packed_inputs(tokens, positions), _packed_targets(tokens, positions))
                for tokens, positions in (next(loader) for _ in range(self.config.algorithm.batches_per_step))
            ]
            seed = [self._seed, number, self._accelerator.process_index]
            generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
            loss = self._rule.step(number, batches, generator)
            losses.append(loss)
            self.step = number + 1
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the training loss became {loss} at step {number}; lower learning_rate "
                    f"({self.config.learning_rate}) or raise warmup ({self.config.warmup})"
                )
            if bar is not None:
                bar.set_postfix(loss=f"{loss:.4g}", refresh=False)
                bar.update(self.tokens_per_step)
        self._model.eval()
        return losses

    def state(self) -> dict[str, Any]:
        """Return what training needs to go on: the step, the weights and the optimizer's memory, not copied."""
        return {"step": self.step, "model": self._model.state_dict(), "optimizer": self._rule.optimizer.state_dict()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.step = int(state["step"])
        self._model.load_state_dict(state["model"])
        self._rule.optimizer.load_state_dict(state["optimizer"])

    def _loss(self, batch: Batch) -> Tensor:
        with self._autocast():
            return _mean_loss(self._wrapped, batch, self._objective)

    def _forward(self, **inputs: Any) -> Any:
        with self._autocast():
            return self._wrapped(**inputs)

    def _autocast(self) -> torch.autocast:
        device = self._accelerator.device.type
        return torch.autocast(device, dtype=self._dtype, enabled=self._dtype != torch.float32)

    def _batches(self, until: int) -> Iterator[Sequence[Tensor]]:
        """Yield this process's batches of the steps from `self.step` on."""
        processes = self._accelerator.num_processes
        per_step = self.config.algorithm.batches_per_step * processes
        order = _BlockOrder(
            len(self._blocks.tokens),
            self.config.batch_size,
            seed=self._seed,
            batches=range(self.step * per_step, until * per_step),
        )
        blocks = TensorDataset(torch.from_numpy(self._blocks.tokens), torch.from_numpy(self._blocks.positions))
        # Of itself it would draw a seed from the global RNG.
        generator = torch.Generator().manual_seed(0)
        return iter(self._accelerator.prepare(DataLoader(blocks, batch_sampler=order, generator=generator)))


class _BlockOrder(Sampler[list[int]]):
    """The blocks of each batch: all of them in random order, and again in another until there are enough.

    Blocks that do not fill a batch at the end of an order are left for the next.
    """

    def __init__(self, count: int, batch_size: int, *, seed: int, batches: range) -> None:
        self._count, self._batch_size, self._seed, self._batches = count, batch_size, seed, batches
        # Where accelerate shares batches out among processes, it looks for these.
        self.batch_size, self.drop_last = batch_size, True

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        in_order = self._count // self._batch_size
        order, number = np.empty(0, dtype=np.int64), -1
        for batch in self._batches:
            epoch, place = divmod(batch, in_order)
            if epoch != number:
                order, number = np.random.default_rng([self._seed, epoch]).permutation(self._count), epoch
            yield order[place * self._batch_size : (place + 1) * self._batch_size].tolist()


def train(
    model: PreTrainedModel | QuadModel,
    blocks: Blocks,
    config: TrainConfig,
    *,
    seed: int,
    objective: str = "cross_entropy",
    dtype: torch.dtype = torch.float32,
    show_progress: bool = True,
) -> TrainResult:
    """Train `model` in place to the end of its schedule; see `Trainer`.

    Args:
        model, blocks, config, seed, objective, dtype: As `Trainer` takes them.
        show_progress: Show a bar with tokens, rate, loss and time left on stderr.

    Raises:
        KeyError, ValueError, FloatingPointError: As `Trainer` raises them.
    """
    trainer = Trainer(model, blocks, config, seed=seed, objective=objective, dtype=dtype)
    started = time.perf_counter()
    with progress_bar(config.steps * trainer.tokens_per_step, enabled=show_progress) as bar:
        losses = trainer.run(config.steps, bar=bar)
    seconds = time.perf_counter() - started
    return TrainResult(config.steps, config.steps * trainer.tokens_per_step, tuple(losses), seconds)


def progress_bar(tokens: int, *, enabled: bool = True, done: int = 0, desc: str = "Training") -> tqdm:
    """Return a bar that counts tokens, on the main process only."""
    return tqdm(
        total=tokens,
        initial=done,
        desc=desc,
        unit="tok",
        unit_scale=True,
        disable=not (enabled and PartialState().is_main_process),
    )


@torch.no_grad()
def validation_loss(
    model: PreTrainedModel | QuadModel,
    documents: Sequence[Sequence[int]],
    *,
    end_of_text: int,
    batch_size: int = 64,
    objective: str = "cross_entropy",
) -> Loss:
    """Return the loss on whole documents, each between two ends of text; the first is given, the second is counted.

    The cross-entropy is bounded from below by the language's entropy per token. The Quad loss of a `QuadModel` is ℓ(Wh, Φ),
    that of a causal LM ℓ(f, Φ) of its own output embedding.

    Args:
        model: A causal LM; or a `QuadModel`, for the objective "quad" alone.
        documents: Token ids without special tokens; at least 2 documents, for the standard error.
        end_of_text: The token that opens and closes a document.
        batch_size: Documents in each forward pass; it changes the result by rounding only.
        objective: One of `OBJECTIVES`.

    Raises:
        KeyError: If the objective is unknown.
        ValueError: If there are fewer than 2 documents, one is longer than the model's context, or the objective is not
            defined for this model.
    """
    if objective != "quad" or not isinstance(model, PreTrainedModel):
        _check_objective(model, objective)
    if len(documents) < 2:
        raise ValueError(f"expected at least 2 documents, got {len(documents)}")
    longest = 1 + max(len(document) for document in documents)
    context = model.config.max_position_embeddings
    if longest > context:
        raise ValueError(f"the longest document has {longest} tokens with its end of text; the context is {context}")
    model.eval()
    token_losses = _exact_quad_losses(model) if objective == "quad" else _exact_cross_entropy(model)
    by_length = sorted(range(len(documents)), key=lambda row: len(documents[row]))
    totals = np.zeros(len(documents))
    for start in range(0, len(by_length), batch_size):
        rows = by_length[start : start + batch_size]
        sequences = [torch.tensor([end_of_text, *documents[row], end_of_text]) for row in rows]
        padded = pad_sequence(sequences, batch_first=True, padding_value=IGNORED).to(model.device)
        given, targets = padded[:, :-1], padded[:, 1:]
        is_token = given != IGNORED
        inputs = {"input_ids": given.where(is_token, end_of_text), "attention_mask": is_token.long()}
        totals[rows] = token_losses(inputs, targets.cpu()).sum(dim=1).numpy()
    lengths = np.array([len(document) + 1 for document in documents])
    value = totals.sum() / lengths.sum()
    # Delta method for the ratio of two means.
    residuals = (totals - value * lengths) / lengths.mean()
    stderr = residuals.std(ddof=1) / math.sqrt(len(documents))
    return Loss(value=float(value), stderr=float(stderr), tokens=int(lengths.sum()))


def _check_objective(model: torch.nn.Module, objective: str) -> None:
    if objective not in OBJECTIVES:
        raise KeyError(f"unknown objective {objective!r}. Known: {', '.join(OBJECTIVES)}.")
    if (objective == "quad") != isinstance(model, QuadModel):
        expected = "a lab.quad.QuadModel" if objective == "quad" else "a causal LM"
        raise ValueError(f"expected {expected} for the objective {objective!r}, got a {type(model).__name__}")


def _packed_inputs(tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
    document = (positions == 0).cumsum(dim=1)
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    allowed = (document[:, :, None] == document[:, None, :]) & causal
    # transformers takes an additive float mask of shape (batch, 1, length, length) as it is.
    mask = torch.zeros(allowed.shape, device=tokens.device)
    mask = mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)[:, None]
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


def _packed_targets(tokens: Tensor, positions: Tensor) -> Tensor:
    # The end of a document does not tell how the next one begins.
    following = tokens.masked_fill(positions == 0, IGNORED)[:, 1:]
    return torch.nn.functional.pad(following, (0, 1), value=IGNORED)


def _mean_loss(model: torch.nn.Module, batch: Batch, objective: str) -> Tensor:
    """Mean loss per predicted token."""
    if objective == "quad":
        return model(batch.targets, **batch.inputs).sum() / (batch.targets != IGNORED).sum()
    logits = model(**batch.inputs, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.targets[:, :-1].flatten(), ignore_index=IGNORED)


_TokenLosses = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""From the inputs of a batch and the targets (batch, T) on the CPU to the loss of each place, 0 where there is no target."""


def _exact_cross_entropy(model: torch.nn.Module) -> _TokenLosses:
    def losses(inputs: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        logits = model(**inputs, use_cache=False).logits
        return cross_entropy(logits.cpu().double().transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")

    return losses


def _exact_quad_losses(model: PreTrainedModel | QuadModel) -> _TokenLosses:
    weight = model.embedding if isinstance(model, QuadModel) else linear_head(model).weight
    embedding = weight.detach().cpu().double()
    gram = embedding.T @ embedding

    def losses(inputs: Mapping[str, Tensor], targets: Tensor) -> Tensor:
        states = model.features(inputs) if isinstance(model, QuadModel) else last_states(model, inputs).cpu().double()
        return quad_losses(states, targets, embedding, gram)

    return losses


def _parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
