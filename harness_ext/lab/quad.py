"""Language models trained with the Quad objective, and the ordinary Hugging Face models that they become.

Source: Saunshi, Malladi, Arora (ICLR 2021), section 5: ℓ(f, Φ) = E[−⟨f(s), φ_w⟩ + ½‖Φ f(s)‖²], w the token after s. Φ is
untied from the input embedding, begins as the model's output embedding and is kept fixed unless asked; one more linear layer W
follows the transformer, f(s) = W h(s). As ℓ(Wh, Φ) = ℓ(h, ΦW), the model that is saved has ΦW for its output embedding and
needs no code of its own.

The loss of the best f lies between −½ and 0, and the logits Φf(s) of a Quad model approximate the next token's
*probabilities*. Their softmax, which lm_eval reports as likelihoods, ranks tokens alike and is no estimate of how likely they
are.

The trained parameter is U with W = MU, M in proportion to (ΦᵀΦ)^(−½): the loss is then well conditioned in U, whatever
Φ is. ‖Φf‖² goes through the d × d matrix ΦᵀΦ, never through the vocabulary.

Known gaps: a model whose logits are not Φf(s) + b (soft-capped or scaled) is refused; the bias b has no place in the loss,
and is 0 in the model that is saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["IGNORED", "QuadModel", "last_states", "linear_head", "quad_losses"]

IGNORED = -100
"""In the place of a target: no token is predicted there."""

_GRAM_CUTOFF = 1e-10
_RIDGE = 1e-4
"""Of `fit_linear`, in units of the mean eigenvalue of E[h hᵀ]."""
_CHUNK_ROWS = 8192
_LINEARITY_TOLERANCE = 1e-3


def quad_losses(features: Tensor, targets: Tensor, embedding: Tensor, gram: Tensor) -> Tensor:
    """Return −⟨f(s), φ_w⟩ + ½‖Φf(s)‖² of each place, shape (…), 0 where the target is `IGNORED`.

    Args:
        features: f(s), shape (…, d).
        targets: w, int64 of shape (…).
        embedding: Φ, shape (V, d).
        gram: ΦᵀΦ, shape (d, d).
    """
    wanted = embedding[targets.clamp(min=0)]
    losses = (features * (features @ gram / 2 - wanted)).sum(dim=-1)
    return losses.masked_fill(targets == IGNORED, 0.0)


def last_states(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return what the model's output embedding would be given, float32 of shape (batch, T, d)."""
    return model.base_model(**inputs, use_cache=False).last_hidden_state.float()


def linear_head(model: PreTrainedModel) -> nn.Linear:
    """Return the output embedding after a check that the logits are Φ f(s) + b.

    Raises:
        ValueError: If they are not, so that the Quad loss of this model is not defined.
    """
    head = model.get_output_embeddings()
    name = type(model).__name__
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{name}: expected a linear output embedding, got {type(head).__name__}. The Quad objective needs logits Φf(s); "
            "take another model."
        )
    tokens = torch.arange(min(8, head.out_features), device=head.weight.device)[None]
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        expected = head(last_states(model, {"input_ids": tokens}).to(head.weight.dtype)).float()
    model.train(training)
    if logits.shape != expected.shape or (logits - expected).norm() > _LINEARITY_TOLERANCE * expected.norm():
        raise ValueError(
            f"{name}: its logits are not the output embedding's answer to its last state (they are scaled, soft-capped or "
            "padded). The Quad objective needs logits Φf(s); take another model."
        )
    return head


class QuadModel(nn.Module):
    """A causal LM under the Quad objective.

    Attributes:
        model: The causal LM. Its output embedding has no part in the loss, and is ΦW after `fold`.
        embedding: Φ, float32 of shape (V, d); a parameter if it is trained.
        dropped_bias: Whether the model's output embedding had a bias, which is now 0.
    """

    embedding: Tensor
    preconditioner: Tensor
    whitened: Tensor
    gram: Tensor

    def __init__(self, model: PreTrainedModel, *, train_embedding: bool = False) -> None:
        """Begin with W = 0, so that the loss is 0.

        Args:
            model: Taken over: its output embedding is untied from the input embedding, here and in its configuration. The
                input embedding stays as it is.
            train_embedding: Whether Φ is trained.

        Raises:
            ValueError: If the model's logits are not Φf(s) + b, or Φ is 0 or not finite.
        """
        super().__init__()
        head = linear_head(model)
        embedding = head.weight.detach().float().clone()
        root, rank = _inverse_root(embedding)
        self.dropped_bias = head.bias is not None and bool(head.bias.any())
        _untie(model, head)
        self.model = model
        self.train_embedding = train_embedding
        # u of size about 1 for tokens drawn evenly; `fit_linear` knows how they are drawn.
        self._scale = math.sqrt(rank / embedding.numel())
        self.register_buffer("preconditioner", (root * self._scale).float())
        if train_embedding:
            self.embedding = nn.Parameter(embedding)
        else:
            self.register_buffer("embedding", embedding)
            self.register_buffer("whitened", torch.empty(0), persistent=False)
            self.register_buffer("gram", torch.empty(0), persistent=False)
            self._whiten()
        self.linear = nn.Parameter(torch.zeros_like(self.preconditioner))

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.linear.device

    def forward(self, targets: Tensor, **inputs: Tensor) -> Tensor:
        """Return `quad_losses` of the places of a batch.

        Args:
            targets: The token after each place, int64 of shape (batch, T), or `IGNORED`.
            inputs: What the model is given; `input_ids` of shape (batch, T), masks, positions.
        """
        states = last_states(self.model, inputs)
        # Under autocast the transformer alone runs in half precision.
        with torch.autocast(states.device.type, enabled=False):
            coordinates = states @ self.linear.T
            if not self.train_embedding:
                return quad_losses(coordinates, targets, self.whitened, self.gram)
            features = coordinates @ self.preconditioner
            return quad_losses(features, targets, self.embedding, self.embedding.T @ self.embedding)

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return f(s) = W h(s), shape (batch, T, d), float64 on the CPU."""
        return last_states(self.model, inputs).cpu().double() @ self._layer().cpu().T

    @torch.no_grad()
    def fit_linear(self, batches: Iterable[tuple[Mapping[str, Tensor], Tensor]]) -> int:
        """Set W to the best linear layer for the model as it is, in closed form with a small ridge; Φ stays.

        Args:
            batches: Pairs of inputs and targets, as `forward` takes them.

        Returns:
            The number of predicted tokens that were seen.

        Raises:
            ValueError: If there were none.
        """
        dim = len(self.preconditioner)
        square = torch.zeros(dim, dim, dtype=torch.float64, device=self.device)
        cross, target_square, count = torch.zeros_like(square), 0.0, 0
        root = self.preconditioner.double()
        for inputs, targets in batches:
            kept = targets != IGNORED
            states = last_states(self.model, inputs)[kept].double()
            wanted = self.embedding[targets[kept]].double() @ root
            square += states.T @ states
            cross += wanted.T @ states
            target_square += float(wanted.square().sum())
            count += len(states)
        if count == 0:
            raise ValueError("expected at least one predicted token to fit the linear layer to, got none")
        square.diagonal().add_(_RIDGE * float(square.diagonal().mean()))
        # With y = (ΦᵀΦ)^(−½)φ_w and M = s (ΦᵀΦ)^(−½), `wanted` is s y and the best u is E[y hᵀ] E[h hᵀ]⁻¹ h / s.
        # u has entries of about 1 where s is the root mean square of those of y.
        scale = self._scale
        root_mean_square = math.sqrt(target_square / (count * dim)) / scale
        self.linear.copy_(torch.linalg.solve(square, cross.T).T / (scale * root_mean_square))
        self.preconditioner.mul_(root_mean_square / scale)
        self._scale = root_mean_square
        if not self.train_embedding:
            self._whiten()
        return count

    @torch.no_grad()
    def fold(self) -> PreTrainedModel:
        """Write ΦW into the model's output embedding and return the model, in eval mode."""
        head = self.model.get_output_embeddings()
        folded = [block.double() @ self._layer() for block in self.embedding.split(_CHUNK_ROWS)]
        head.weight.copy_(torch.cat(folded))
        return self.model.eval()

    def _layer(self) -> Tensor:
        """W = MU, float64 (d, d)."""
        return (self.preconditioner.double() @ self.linear.double()).detach()

    def _whiten(self) -> None:
        root = self.preconditioner.double()
        blocks = self.embedding.split(_CHUNK_ROWS)
        self.whitened = torch.cat([(block.double() @ root).float() for block in blocks])
        self.gram = (root @ _gram(self.embedding) @ root).float()


class _Root(NamedTuple):
    """(ΦᵀΦ)^(−½), float64 (d, d), on the directions where ΦᵀΦ is not 0, and their number."""

    matrix: Tensor
    rank: int


def _gram(embedding: Tensor) -> Tensor:
    total = torch.zeros(embedding.shape[1], embedding.shape[1], dtype=torch.float64, device=embedding.device)
    for block in embedding.split(_CHUNK_ROWS):
        total += block.double().T @ block.double()
    return total


def _inverse_root(embedding: Tensor) -> _Root:
    gram = _gram(embedding)
    if not bool(torch.isfinite(gram).all()) or not bool(gram.any()):
        raise ValueError("expected an output embedding with finite values, not all 0; this model cannot be trained")
    values, vectors = torch.linalg.eigh(gram)
    kept = values > _GRAM_CUTOFF * values[-1]
    return _Root(vectors[:, kept] * values[kept].rsqrt() @ vectors[:, kept].T, int(kept.sum()))


def _untie(model: PreTrainedModel, head: nn.Linear) -> None:
    """Give the model an output embedding of its own, which is not trained, with a bias of 0 if there was one."""
    own = nn.utils.skip_init(nn.Linear, head.in_features, head.out_features, bias=head.bias is not None)
    own = own.to(device=head.weight.device, dtype=head.weight.dtype).requires_grad_(False)
    own.weight.copy_(head.weight.detach())
    if own.bias is not None:
        own.bias.zero_()
    model.set_output_embeddings(own)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    # transformers reads the configuration when a model is made and remembers what it tied.
    model.all_tied_weights_keys = {}
