"""Learned Quad heads g(s) = head(f(s)) of a frozen language model, trained on unlabelled text with Φ fixed.

Source: Saunshi, Malladi, Arora (ICLR 2021), section 5. The Quad loss of features g is
ℓ(g, Φ) = E[−⟨g(s), φ_w⟩ + ½‖Φ g(s)‖²], w the token after s; its optimum is (ΦᵀΦ)⁻¹Φᵀp(·|s).

With G = ΦᵀΦ, y_w = G^(−½)φ_w and u = G^½ g it is E[−⟨u, y_w⟩ + ½‖u‖²] = ½E‖u − y_w‖² − ½E‖y_w‖²: least squares with
whitened targets. All heads are fitted in u, so that the condition number of G (10⁴ to 10⁶ in real models) slows nothing down
and no step touches the vocabulary. The optimum is −½E‖G^(−½)Φᵀp‖² and lies between −½ and 0.

Known gaps: the states of the texts are held in memory for the heads `mlp` and `block`; `block` has no positions of its own
beside those that the states carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from harness_ext.contracts import TokenStates

__all__ = ["KINDS", "RIDGES", "QuadHead", "QuadReport", "train_quad_head"]

KINDS = ("linear", "mlp", "block")

RIDGES = (0.0, *(10.0**power for power in range(-8, 2)))
"""Ridge penalties of the linear solution that validation chooses among, in units of the mean eigenvalue of E[h hᵀ]."""

GRAM_CUTOFF = 1e-10
"""Eigenvalues of ΦᵀΦ below this share of the largest are taken for zero: the loss does not depend on g there, and g is 0."""

STATES_CUTOFF = 1e-12
"""The same for E[h hᵀ], h in float32."""

CHUNK_ROWS = 8192
"""Rows cast to float64, or sent through a head, at once."""

RATE_TIMES_WIDTH = 0.2
"""The best rate of Adam falls as 1 / width (Yang et al., 2021); 3e-3 was good at d = 64 and 3e-4 at d = 576."""

_PAD = -1
_HEAD_DIM = 64
_WARMUP = 0.05


@dataclass(frozen=True)
class QuadReport:
    """How a head was trained. Losses are Quad losses; without unit, and below 0 where the head is better than g = 0.

    Attributes:
        kind: One of `KINDS`.
        train_tokens: Predicted tokens trained on.
        validation_tokens: Predicted tokens of the held-out texts.
        linear_train_loss: Of the best linear head, which is found in closed form, on the training texts.
        linear_validation_loss: The same on the held-out texts. `mlp` and `block` start from this head.
        ridge: The member of the ridge ladder that validation chose for the linear head.
        gram_rank: Eigenvalues of ΦᵀΦ that are not taken for zero; below d, g has no part in the other directions.
        train_losses: Of each epoch, a mean over its batches while the weights move; empty for `linear`.
        validation_losses: After each epoch; empty for `linear`.
        best_epoch: The epoch whose weights were kept, counted from 1; 0 for the linear head itself.
    """

    kind: str
    train_tokens: int
    validation_tokens: int
    linear_train_loss: float
    linear_validation_loss: float
    ridge: float
    gram_rank: int
    train_losses: tuple[float, ...] = ()
    validation_losses: tuple[float, ...] = ()
    best_epoch: int = 0

    @property
    def validation_loss(self) -> float:
        """Of the weights that were kept."""
        return min((self.linear_validation_loss, *self.validation_losses))


class QuadHead:
    """g as a function of states; made by `train_quad_head`.

    Attributes:
        kind: One of `KINDS`.
        report: How it was trained.
    """

    def __init__(self, kind: str, module: nn.Module, report: QuadReport, *, device: torch.device) -> None:
        self.kind, self.report = kind, report
        self._module, self._device = module.eval(), device

    def features(self, states: np.ndarray | Tensor) -> np.ndarray:
        """Return g, float32 of shape (n, d), of states f(s) of shape (n, d).

        Raises:
            TypeError: If the head is a `block`, which reads the states of all tokens of a text.
        """
        if self.kind == "block":
            raise TypeError(
                "A Quad head of kind 'block' attends to the states of a whole text: expected features_of_texts([(T, d), …]), "
                "got single states. Use it, or a head of kind 'linear' or 'mlp'."
            )
        rows = torch.as_tensor(states, dtype=torch.float32)
        with torch.inference_mode():
            parts = [self._module(part.to(self._device)).cpu() for part in rows.split(CHUNK_ROWS)]
        return torch.cat(parts).numpy()

    def features_of_texts(self, states: Sequence[np.ndarray | Tensor]) -> np.ndarray:
        """Return g at the last token of each text, float32 of shape (n, d).

        Args:
            states: Of each text, f at all its tokens, shape (T, d) with T >= 1; T may differ between texts.
        """
        texts = [torch.as_tensor(text, dtype=torch.float32) for text in states]
        if self.kind != "block":
            return self.features(torch.stack([text[-1] for text in texts]))
        result = np.empty((len(texts), texts[0].shape[1]), dtype=np.float32)
        order = np.argsort([len(text) for text in texts], kind="stable")
        with torch.inference_mode():
            for rows in _by_budget(order, [len(text) for text in texts], CHUNK_ROWS):
                last = torch.tensor([len(texts[row]) - 1 for row in rows])
                padded = pad_sequence([texts[row] for row in rows], batch_first=True).to(self._device)
                result[rows] = self._module(padded)[torch.arange(len(rows)), last].cpu().numpy()
        return result


def train_quad_head(
    kind: str,
    texts: Iterable[TokenStates],
    output_embedding: np.ndarray | Tensor,
    *,
    seed: int,
    epochs: int = 20,
    patience: int = 3,
    learning_rate: float | None = None,
    weight_decay: float = 0.01,
    batch_tokens: int = 2048,
    validation_share: float = 0.1,
    ridges: Sequence[float] = RIDGES,
    device: torch.device | str = "cpu",
    show_progress: bool = False,
) -> QuadHead:
    """Train a Quad head on unlabelled texts; the state of token t predicts token t + 1.

    `linear` is g = A h, solved in closed form: A = (ΦᵀΦ)⁻¹ E[φ_w hᵀ] (E[h hᵀ] + λI)⁻¹ with λ chosen on held-out texts; one
    pass over `texts`, and no text is kept. `mlp` adds to it a hidden layer of width 4d, `block` a pre-norm transformer block
    over the states of the text. Both additions begin at zero, so that the head begins as the linear one; AdamW trains the
    addition on standardised states, and the epoch that is best on held-out texts is kept.

    The result depends on the arguments alone; no global RNG is read.

    Args:
        kind: One of `KINDS`.
        texts: Iterated once. A text of one token predicts nothing and is passed over.
        output_embedding: Φ, shape (V, d).
        seed: Of the held-out texts, the initial weights and the order of batches.
        epochs: Most passes over the texts, at least 1.
        patience: Training ends after so many epochs without a better held-out loss.
        learning_rate: Peak; None for `RATE_TIMES_WIDTH` / d. It rises over the first twentieth of the steps, then falls as
            a cosine.
        weight_decay: Decoupled; matrices only.
        batch_tokens: Tokens of a step; of `block`, padding included, and at least one text.
        validation_share: Share of the texts that is held out, between 0 and 1.
        ridges: Candidates for λ, in units of the mean eigenvalue of E[h hᵀ].
        device: Where Φ and the head are.
        show_progress: Show a bar with epochs and losses on stderr.

    Raises:
        KeyError: If the kind is unknown.
        ValueError: If a number is out of range, fewer than 2 texts have 2 tokens, shapes do not agree, a token id is not
            a row of Φ, or a state is not finite.
        FloatingPointError: If the loss stops being finite.
    """
    if kind not in KINDS:
        raise KeyError(f"unknown kind of Quad head {kind!r}. Known: {', '.join(KINDS)}.")
    if min(epochs, patience, batch_tokens) < 1:
        raise ValueError(
            f"epochs, patience and batch_tokens must be at least 1, got {epochs}, {patience} and {batch_tokens}"
        )
    if not 0 < validation_share < 1:
        raise ValueError(f"validation_share must be between 0 and 1, both excluded, got {validation_share}")
    if not ridges or min(ridges) < 0:
        raise ValueError(f"ridges must be numbers of at least 0, got {list(ridges)}")
    generator = torch.Generator().manual_seed(seed)
    device = torch.device(device)
    whitening = _whiten(torch.as_tensor(output_embedding).to(device))
    train, validation = _read(
        texts,
        whitening.targets,
        share=validation_share,
        keep=kind != "linear",
        generator=generator,
    )
    linear = _solve_linear(train, validation, ridges)
    report = QuadReport(
        kind=kind,
        train_tokens=train.count,
        validation_tokens=validation.count,
        linear_train_loss=train.loss(linear.matrix),
        linear_validation_loss=validation.loss(linear.matrix),
        ridge=linear.ridge,
        gram_rank=whitening.rank,
    )
    if kind == "linear":
        weight = (whitening.inverse_root @ linear.matrix).float()
        return QuadHead(kind, _Linear(weight), report, device=device)

    # In units of the root mean square of the targets' entries, so that one learning rate suits every vocabulary.
    scale = math.sqrt(train.target_square / (train.count * whitening.targets.shape[1]))
    mean, spread = train.state_moments()
    addition = (_Mlp if kind == "mlp" else _Block)(len(mean), generator)
    if kind == "mlp":
        train, validation = train.tokens_apart(), validation.tokens_apart()
    module = _Corrected(
        addition.to(device),
        linear=(linear.matrix / scale).float(),
        mean=mean.float(),
        spread=spread.float(),
        readout=(whitening.inverse_root * scale).float(),
    ).to(device)
    train_losses, validation_losses, best_epoch = _fit(
        module,
        whitening.targets / scale,
        train,
        validation,
        unit=scale**2,
        start_loss=report.linear_validation_loss,
        epochs=epochs,
        patience=patience,
        learning_rate=RATE_TIMES_WIDTH / len(mean) if learning_rate is None else learning_rate,
        weight_decay=weight_decay,
        batch_tokens=batch_tokens,
        generator=generator,
        progress="Quad head" if show_progress else None,
    )
    report = replace(report, train_losses=train_losses, validation_losses=validation_losses, best_epoch=best_epoch)
    return QuadHead(kind, module, report, device=device)


# ---------------------------------------------------------------------------------------------------- whitening


class _Whitening(NamedTuple):
    """G^(−½), float64 (d, d), on the directions where G = ΦᵀΦ is not 0; y_w = G^(−½)φ_w, float32 (V, d); rank of G."""

    inverse_root: Tensor
    targets: Tensor
    rank: int


def _whiten(embedding: Tensor) -> _Whitening:
    if embedding.ndim != 2:
        raise ValueError(f"expected an output embedding of shape (V, d), got {tuple(embedding.shape)}")
    gram = sum(block.double().T @ block.double() for block in embedding.split(CHUNK_ROWS))
    assert isinstance(gram, Tensor)
    if not bool(torch.isfinite(gram).all()):
        raise ValueError("the output embedding holds values that are not finite")
    values, vectors = torch.linalg.eigh(gram)
    kept = values > GRAM_CUTOFF * values[-1]
    if not bool(kept.any()):
        raise ValueError("the output embedding is 0: there is nothing that a Quad head could predict")
    root = vectors[:, kept] * values[kept].rsqrt() @ vectors[:, kept].T
    targets = torch.cat([(block.double() @ root).float() for block in embedding.split(CHUNK_ROWS)])
    return _Whitening(root, targets, int(kept.sum()))


# -------------------------------------------------------------------------------------------------------- texts


@dataclass
class _Part:
    """Sums over the predicted tokens of the training or held-out texts, in float64, and the texts themselves if kept.

    Attributes:
        states_square: Σ h hᵀ, (d, d).
        cross: Σ y_w hᵀ, (d, d).
        states_sum: Σ h, (d,).
        target_square: Σ ‖y_w‖².
        count: Predicted tokens.
        states: Of each text, (T − 1, d), float32 on the CPU; after `tokens_apart` of all tokens, (count, d).
        next_tokens: Of each text, (T − 1,); after `tokens_apart` (count,).
    """

    states_square: Tensor
    cross: Tensor
    states_sum: Tensor
    target_square: float = 0.0
    count: int = 0
    states: list[Tensor] | Tensor = field(default_factory=list)
    next_tokens: list[Tensor] | Tensor = field(default_factory=list)

    def add(self, states: Tensor, next_tokens: Tensor, targets: Tensor) -> None:
        for rows, tokens in zip(states.split(CHUNK_ROWS), next_tokens.split(CHUNK_ROWS), strict=True):
            wide = rows.to(targets.device).double()
            wanted = targets[tokens.to(targets.device)].double()
            self.states_square += wide.T @ wide
            self.cross += wanted.T @ wide
            self.states_sum += wide.sum(0)
            self.target_square += float(wanted.square().sum())
            self.count += len(tokens)

    def loss(self, matrix: Tensor) -> float:
        """The Quad loss of u = matrix @ h."""
        square = matrix @ self.states_square @ matrix.T
        return float(square.trace() / 2 - (matrix * self.cross).sum()) / self.count

    def tokens_apart(self) -> _Part:
        """Return the part with the tokens of all texts in one array each, and leave none here."""
        apart = replace(self, states=torch.cat(list(self.states)), next_tokens=torch.cat(list(self.next_tokens)))
        self.states, self.next_tokens = [], []
        return apart

    def state_moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each entry of h; 1 in place of a deviation of about 0."""
        mean = self.states_sum / self.count
        second = self.states_square.diagonal() / self.count
        variance = second - mean.square()
        return mean, torch.where(variance > STATES_CUTOFF * second, variance, torch.ones_like(variance)).sqrt()


def _read(
    texts: Iterable[TokenStates], targets: Tensor, *, share: float, keep: bool, generator: torch.Generator
) -> tuple[_Part, _Part]:
    """Return training and held-out texts."""
    vocabulary, dim = targets.shape

    def empty() -> _Part:
        zero = torch.zeros(dim, dim, dtype=torch.float64, device=targets.device)
        return _Part(zero, zero.clone(), zero[0].clone())

    parts = (empty(), empty())
    waiting: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])
    kept: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])

    def flush(side: int) -> None:
        if waiting[side]:
            states, tokens = (torch.cat(column) for column in zip(*waiting[side], strict=True))
            parts[side].add(states, tokens, targets)
            waiting[side].clear()

    number = 0
    for text in texts:
        states = torch.as_tensor(text.states, dtype=torch.float32)
        tokens = torch.as_tensor(text.token_ids, dtype=torch.long)
        if states.shape != (len(tokens), dim):
            raise ValueError(
                f"expected states of shape (T, {dim}) for T token ids, as Φ has {dim} columns; got {tuple(states.shape)} for "
                f"{len(tokens)} token ids"
            )
        if len(tokens) < 2:
            continue
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise ValueError(f"expected token ids from 0 to {vocabulary - 1}, got {tokens.min()} to {tokens.max()}")
        if not bool(torch.isfinite(states).all()):
            raise ValueError(f"text {number} has states that are not finite; try a wider dtype for the model")
        # The first two texts are one of each, so that neither part is empty however few there are.
        drawn = bool(torch.rand((), generator=generator) < share)
        side = number if number < 2 else int(drawn)
        number += 1
        pair = states[:-1], tokens[1:]
        if keep:
            kept[side].append(pair)
        waiting[side].append(pair)
        if sum(len(tokens) for _, tokens in waiting[side]) >= CHUNK_ROWS:
            flush(side)
    flush(0)
    flush(1)
    if number < 2:
        raise ValueError(
            f"expected at least 2 texts of at least 2 tokens, one to train on and one to hold out, got {number}"
        )
    for part, pairs in zip(parts, kept, strict=True):
        part.states, part.next_tokens = [states for states, _ in pairs], [tokens for _, tokens in pairs]
    return parts


# ------------------------------------------------------------------------------------------------------- linear


class _Solution(NamedTuple):
    matrix: Tensor
    ridge: float


def _solve_linear(train: _Part, validation: _Part, ridges: Sequence[float]) -> _Solution:
    """Return the u = B h, float64 (d, d), that is best on held-out texts: B = E[y hᵀ](E[h hᵀ] + λI)⁻¹."""
    values, vectors = torch.linalg.eigh(train.states_square)
    rotated = train.cross @ vectors
    unit = float(values.mean())
    kept = values > STATES_CUTOFF * values[-1]
    best: tuple[float, _Solution] | None = None
    for ridge in ridges:
        inverse = torch.where(kept, 1 / (values + ridge * unit).where(kept, torch.ones_like(values)), 0.0)
        candidate = _Solution(rotated * inverse @ vectors.T, ridge)
        loss = validation.loss(candidate.matrix)
        if best is None or loss < best[0]:
            best = loss, candidate
    assert best is not None, "there is at least one ridge"
    return best[1]


# ---------------------------------------------------------------------------------------------------- the heads


class _Linear(nn.Module):
    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, states: Tensor) -> Tensor:
        return states @ self.weight.T


class _Corrected(nn.Module):
    """g = readout (linear h + addition((h − mean) / spread)); `whitened` is what the readout multiplies."""

    linear: Tensor
    mean: Tensor
    spread: Tensor
    readout: Tensor

    def __init__(self, addition: nn.Module, *, linear: Tensor, mean: Tensor, spread: Tensor, readout: Tensor) -> None:
        super().__init__()
        self.addition = addition
        for name, value in (("linear", linear), ("mean", mean), ("spread", spread), ("readout", readout)):
            self.register_buffer(name, value)

    def whitened(self, states: Tensor) -> Tensor:
        return states @ self.linear.T + self.addition((states - self.mean) / self.spread)

    def forward(self, states: Tensor) -> Tensor:
        return self.whitened(states) @ self.readout.T


class _Mlp(nn.Module):
    """One hidden layer of width 4d, with an output layer that begins at 0."""

    def __init__(self, dim: int, generator: torch.Generator) -> None:
        super().__init__()
        self.hidden = _layer(dim, 4 * dim, generator)
        self.output = _layer(4 * dim, dim, None)

    def forward(self, states: Tensor) -> Tensor:
        return self.output(functional.gelu(self.hidden(states)))


class _Block(nn.Module):
    """A pre-norm transformer block and an output layer that begins at 0; states of shape (batch, T, d), causal.

    Padding comes after a text, where no state of the text attends to it.
    """

    def __init__(self, dim: int, generator: torch.Generator) -> None:
        super().__init__()
        head_dim = max(size for size in range(1, min(dim, _HEAD_DIM) + 1) if dim % size == 0)
        self.heads = dim // head_dim
        self.attention_norm, self.mlp_norm, self.output_norm = (nn.LayerNorm(dim) for _ in range(3))
        self.query_key_value = _layer(dim, 3 * dim, generator)
        self.attended = _layer(dim, dim, generator)
        self.hidden = _layer(dim, 4 * dim, generator)
        self.contracted = _layer(4 * dim, dim, generator)
        self.output = _layer(dim, dim, None)

    def forward(self, states: Tensor) -> Tensor:
        batch, length, dim = states.shape
        split = self.query_key_value(self.attention_norm(states)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.attended(mixed.transpose(1, 2).reshape(batch, length, dim))
        states = states + self.contracted(functional.gelu(self.hidden(self.mlp_norm(states))))
        return self.output(self.output_norm(states))


def _layer(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    """A linear layer with weights of variance 1 / inputs, or 0 without a generator; the global RNG is not read."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    with torch.no_grad():
        layer.bias.zero_()
        if generator is None:
            layer.weight.zero_()
        else:
            layer.weight.normal_(0, inputs**-0.5, generator=generator)
    return layer


# -------------------------------------------------------------------------------------------------- their training


class _Batch(NamedTuple):
    """States (…, d) and the tokens that follow (…), `_PAD` where there is none."""

    states: Tensor
    next_tokens: Tensor


def _fit(
    module: _Corrected,
    targets: Tensor,
    train: _Part,
    validation: _Part,
    *,
    unit: float,
    start_loss: float,
    epochs: int,
    patience: int,
    learning_rate: float,
    weight_decay: float,
    batch_tokens: int,
    generator: torch.Generator,
    progress: str | None,
) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Train the addition in place and return the losses of the epochs, training and held-out, and the best epoch.

    `unit` is the Quad loss of 1 in the units of `targets`; `start_loss` that of the addition 0 on held-out texts.
    """
    parameters = list(module.addition.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    best_loss, best_epoch = start_loss, 0
    best_weights = {name: value.clone() for name, value in module.addition.state_dict().items()}
    train_losses: list[float] = []
    validation_losses: list[float] = []
    with tqdm(range(1, epochs + 1), desc=progress, unit="epoch", disable=progress is None) as bar:
        for epoch in bar:
            total = 0.0
            batches = _batches(train, batch_tokens, generator)
            for number, rows in enumerate(batches):
                done = (epoch - 1 + number / len(batches)) / epochs
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * _rate_factor(done)
                loss = _loss_sum(module, targets, _take(train, rows))
                optimizer.zero_grad()
                # Per token and per entry; divided by the mean number of tokens in a batch, so that every token counts alike.
                (loss * (len(batches) / (train.count * targets.shape[1]))).backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                total += float(loss.detach())
            with torch.no_grad():
                held_out = sum(
                    float(_loss_sum(module, targets, _take(validation, rows)))
                    for rows in _batches(validation, CHUNK_ROWS, None)
                )
            train_losses.append(unit * total / train.count)
            validation_losses.append(unit * held_out / validation.count)
            if not math.isfinite(train_losses[-1] + validation_losses[-1]):
                raise FloatingPointError(
                    f"the Quad loss became {validation_losses[-1]} in epoch {epoch}; lower learning_rate ({learning_rate})"
                )
            bar.set_postfix(train=f"{train_losses[-1]:.4g}", validation=f"{validation_losses[-1]:.4g}", refresh=False)
            if validation_losses[-1] < best_loss:
                best_loss, best_epoch = validation_losses[-1], epoch
                best_weights = {name: value.clone() for name, value in module.addition.state_dict().items()}
            elif epoch - best_epoch >= patience:
                break
    module.addition.load_state_dict(best_weights)
    return tuple(train_losses), tuple(validation_losses), best_epoch


def _rate_factor(done: float) -> float:
    """The learning rate as a fraction of its peak, `done` the fraction of the steps taken."""
    # From a tenth: at 0 the first step would be lost.
    return min(0.1 + done / _WARMUP, 0.5 + 0.5 * math.cos(math.pi * done))


def _loss_sum(module: _Corrected, targets: Tensor, batch: _Batch) -> Tensor:
    """Σ −⟨u, y_w⟩ + ½‖u‖² over the tokens of a batch."""
    whitened = module.whitened(batch.states)
    wanted = targets[batch.next_tokens.clamp(min=0)]
    losses = (whitened * (whitened / 2 - wanted)).sum(dim=-1)
    return losses.masked_fill(batch.next_tokens == _PAD, 0.0).sum()


def _batches(part: _Part, budget: int, generator: torch.Generator | None) -> list[np.ndarray]:
    """Return rows of texts, or of tokens where they are apart, for each batch: shuffled, or in order without generator."""
    count = len(part.states)
    order = np.arange(count) if generator is None else torch.randperm(count, generator=generator).numpy()
    if isinstance(part.states, Tensor):
        return np.array_split(order, math.ceil(count / budget))
    lengths = [len(states) for states in part.states]
    # Texts of like length together; the shuffle before decides among equals.
    batches = list(_by_budget(order[np.argsort([lengths[row] for row in order], kind="stable")], lengths, budget))
    if generator is None:
        return batches
    return [batches[number] for number in torch.randperm(len(batches), generator=generator).tolist()]


def _by_budget(order: np.ndarray, lengths: Sequence[int], budget: int) -> Iterator[np.ndarray]:
    """Cut rows, which are ordered from short to long, where rows × longest would exceed the budget; at least one row."""
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - start) * lengths[order[end]] > budget:
            yield order[start:end]
            start = end


def _take(part: _Part, rows: np.ndarray) -> _Batch:
    if isinstance(part.states, Tensor) and isinstance(part.next_tokens, Tensor):
        index = torch.from_numpy(rows)
        states, next_tokens = part.states[index], part.next_tokens[index]
    else:
        states = pad_sequence([part.states[row] for row in rows], batch_first=True)
        next_tokens = pad_sequence([part.next_tokens[row] for row in rows], batch_first=True, padding_value=_PAD)
    device = part.cross.device
    return _Batch(states.to(device), next_tokens.to(device))
