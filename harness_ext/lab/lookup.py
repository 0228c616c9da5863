"""The lookup-table predictor: p*(·|s) itself, as an ordinary Hugging Face model.

Source: Liu, Xie, Li and Ma (ICML 2023), the control of least possible pretraining loss whose states hold the conditional
probabilities and nothing else. In terms of f and Φ: f(s) = log p*(·|s) ∈ R^V, V the number of tokens, and Φ is the identity, so
the logits are log p*(·|s) and p_f = p*. A probe on f can use what p* says of the class, and no more.

Nothing is stored for each s, and nothing is trained: the body has the language's tables and computes p* of every prefix in a
batch by the language's own exact algorithm. A document is what stands after the last end of text; one that begins without an
end of text, as prompts do, is the same as one that begins after it.

What cannot be exact, and what is done:

- log 0 is not finite. f has log max(p*, `FLOOR`), which adds at most V · FLOOR to the excess, 1e-25 nats for a hundred
  thousand tokens. What is seen of it in float32 is the rounding of log p*, about 1e-7 nats for a token.
- After a prefix that cannot occur in the language there is no p*. There the prediction is uniform over the V tokens, until the
  next end of text. So a prompt that no text begins with scores all label words alike.

Known gap: no key/value cache, so `generate` computes the whole document again for each word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from harness_ext.lab.languages import language_from_dict
from harness_ext.lab.languages.tokens import WordTokens, word_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from harness_ext.lab.languages.base import Language

__all__ = [
    "FLOOR",
    "LookupConfig",
    "LookupForCausalLM",
    "LookupModel",
    "possible_next_words",
    "refuse_other_code",
    "register_lookup",
    "save_lookup",
]

FLOOR = 1e-30
"""Least probability of the model; float32 holds its logarithm and the number itself."""

MODELING_FILE = "modeling_lookup.py"

_MODELING_SOURCE = '''"""What `trust_remote_code=True` runs: the model's code is that of the installed package harness_ext."""

from harness_ext.lab.lookup import LookupConfig, LookupForCausalLM

__all__ = ["LookupConfig", "LookupForCausalLM"]
'''


class LookupConfig(PreTrainedConfig):
    """Configuration; it holds the language.

    Attributes:
        language: `Language.to_dict()`, from which the tables come back to the last bit.
        first_tokens: `WordTokens.first`.
        later_tokens: `WordTokens.later`.
        max_position_embeddings: Longest input that lm_eval gives to the model. The model itself has no limit.
    """

    model_type = "harness_ext_lookup"

    language: dict[str, Any] | None = None
    first_tokens: list[int] | None = None
    later_tokens: list[int] | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    max_position_embeddings: int = 64
    tie_word_embeddings: bool = False
    use_cache: bool = False


class _Lookup(PreTrainedModel):
    config_class = LookupConfig

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            initialization.eye_(module.weight)


class LookupModel(_Lookup):
    """The body: token ids in, f(s) = log p*(·|s) of every prefix out. It has no parameters."""

    def __init__(self, config: LookupConfig) -> None:
        super().__init__(config)
        if config.language is None or config.first_tokens is None or config.later_tokens is None:
            raise ValueError(
                f"{type(self).__name__}: the configuration has no language. Write the folder with "
                "harness_ext.lab.lookup.save_lookup."
            )
        self.language = language_from_dict(config.language)
        self.tokens = WordTokens(
            np.array(config.first_tokens, dtype=np.int64),
            np.array(config.later_tokens, dtype=np.int64),
            config.eos_token_id,
            config.vocab_size,
        )
        self._first_word = _words_of(self.tokens.first, self.tokens.size)
        self._later_word = _words_of(self.tokens.later, self.tokens.size)
        # Follows the model's dtype, which a module without parameters would not know.
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self.post_init()

    def get_input_embeddings(self) -> None:
        return None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        """Return log p* after each token, shape (B, T, V), in the dtype of the model.

        Args:
            input_ids: int64 (B, T).
            attention_mask: (B, T), 0 for padding, on either side. Padding is passed over, and its own rows are uniform.
                Without a mask padding counts as text; on the right it then changes nothing to its left.
            use_cache: Ignored; there is no cache.
            output_hidden_states: Whether to return f(s) as the one hidden state, too.
            return_dict: Ignored; a `BaseModelOutput` is returned.

        Raises:
            ValueError: If the mask has another shape, or an id is none of the vocabulary.
        """
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"{type(self).__name__}: expected an attention_mask of the shape of input_ids, {tuple(input_ids.shape)}, got "
                f"{tuple(attention_mask.shape)}. A mask between tokens has no meaning here; put an end of text between "
                "documents."
            )
        kept = None if attention_mask is None else attention_mask.bool().cpu().numpy()
        values = self._log_probabilities(input_ids.cpu().numpy(), kept)
        states = torch.from_numpy(values).to(self._like.dtype).to(input_ids.device)
        return BaseModelOutput(last_hidden_state=states, hidden_states=(states,) if output_hidden_states else None)

    def _log_probabilities(self, ids: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
        words, tokens = self.language.words, self.tokens
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokens.size:
            raise ValueError(
                f"{type(self).__name__}: expected token ids from 0 to {tokens.size - 1}, got {int(ids.min())} to "
                f"{int(ids.max())}"
            )
        # Documents that are in the batch more than once, as the documents of several prompts are, are computed once.
        places: dict[tuple[str, ...], list[tuple[int, np.ndarray]]] = {}
        for row, of_row in enumerate(ids):
            columns = np.arange(len(of_row)) if kept is None else np.flatnonzero(kept[row])
            for piece, opened in _documents(of_row[columns], tokens.end_of_text):
                at = columns[piece]
                read = of_row[at[1:] if opened else at]
                indices = self._later_word[read]
                indices[:1] = self._first_word[read[:1]]
                no_word = np.flatnonzero(indices < 0)
                length = int(no_word[0]) if len(no_word) else len(indices)
                document = tuple(words[index] for index in indices[:length])
                # Where the prediction after k words stands, for k from 0; that after none may have no place.
                places.setdefault(document, []).append((row, at if opened else np.concatenate([[-1], at])))
        values = np.full((*ids.shape, tokens.size), -np.log(tokens.size))
        first, later = np.append(tokens.first, tokens.end_of_text), np.append(tokens.later, tokens.end_of_text)
        can_begin = first >= 0
        for found, table in zip(places.values(), possible_next_words(self.language, list(places)), strict=True):
            logs = np.full((len(table), tokens.size), np.log(FLOOR))
            table = np.log(np.maximum(table, FLOOR))
            logs[0, first[can_begin]] = table[0, can_begin]
            logs[1:, later] = table[1:]
            for row, at in found:
                begin = int(at[0] < 0)
                values[row, at[begin : len(logs)]] = logs[begin:]
        return values


class LookupForCausalLM(_Lookup, GenerationMixin):
    """The model; its output embedding is the identity and is not trained.

    Its only weight says nothing about the language, so derivatives of the loss by it have no meaning: with a weight that
    requires a gradient, as measures of flatness and training ask for, `forward` raises TypeError.
    """

    base_model_prefix = "model"

    def __init__(self, config: LookupConfig) -> None:
        super().__init__(config)
        self.model = LookupModel(config)
        self.lm_head = nn.Linear(config.vocab_size, config.vocab_size, bias=False)
        self.post_init()
        self.requires_grad_(False)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load the model, as every transformers model."""
        loaded = super().from_pretrained(*args, **kwargs)
        # Loading makes new parameters, which require gradients.
        (loaded[0] if isinstance(loaded, tuple) else loaded).requires_grad_(False)
        return loaded

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> None:
        return None

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> CausalLMOutput:
        """Return the logits log p*, shape (B, T, V), and the mean cross-entropy of `labels` if they are given.

        Arguments are those of `LookupModel.forward` and, as in every transformers model, `labels` and `logits_to_keep`.

        Raises:
            TypeError: If a weight requires a gradient.
            ValueError: As `LookupModel.forward`.
        """
        if self.lm_head.weight.requires_grad:
            raise TypeError(
                "A lookup table has no trained parameters, so it can be neither trained nor measured for flatness: its "
                "only weight is the identity that reads log p* out. Leave this model out of flatness_* tasks."
            )
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=output_hidden_states
        )
        states = outputs.last_hidden_state
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states[:, rows])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


def possible_next_words(language: Language, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """Return `Language.next_words` as far as it goes: (k + 1, words + 1) where the longest prefix that can occur has k words.

    No document is refused. (A language refuses all documents together if one of them cannot occur, and does not say which.)
    """
    if not documents:
        return []
    try:
        return language.next_words(documents)
    except ValueError:
        pass
    # Most of what cannot occur is a possible document and then padding, one word again and again.
    index = {word: column for column, word in enumerate(language.words)}
    bodies = [_without_last_run(document) for document in documents]
    try:
        tables = language.next_words(bodies)
    except ValueError:
        return _halved(language, documents)
    goes_on = [
        row
        for row, (document, body) in enumerate(zip(documents, bodies, strict=True))
        if len(document) > len(body) and tables[row][-1, index[document[len(body)]]] > 0
    ]
    for row, table in zip(goes_on, _halved(language, [documents[row] for row in goes_on]), strict=True):
        tables[row] = table
    return tables


def register_lookup() -> None:
    """Let transformers' Auto classes load such folders in this process without `trust_remote_code=True`."""
    AutoConfig.register(LookupConfig.model_type, LookupConfig, exist_ok=True)
    AutoModelForCausalLM.register(LookupConfig, LookupForCausalLM, exist_ok=True)


def save_lookup(folder: Path, language: Language, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the predictor of a language as a Hugging Face folder that loads with `trust_remote_code=True`.

    Beside configuration, weights (the identity) and tokenizer there is a file of code that imports this module, so harness_ext
    has to be installed where the model is loaded.

    Args:
        folder: Made if it does not exist.
        language: Any language of the lab.
        tokenizer: `language.tokenizer(max_length=...)`; its `model_max_length` becomes the context that lm_eval fills.

    Raises:
        ValueError: As `word_tokens`.
    """
    tokens = word_tokens(language, tokenizer)
    config = LookupConfig(
        language=language.to_dict(),
        first_tokens=tokens.first.tolist(),
        later_tokens=tokens.later.tolist(),
        vocab_size=tokens.size,
        hidden_size=tokens.size,
        max_position_embeddings=int(tokenizer.model_max_length),
        bos_token_id=tokens.end_of_text,
        eos_token_id=tokens.end_of_text,
        architectures=[LookupForCausalLM.__name__],
    )
    config.auto_map = _auto_map()
    model = LookupForCausalLM(config)
    # Once such a folder was loaded, transformers would copy this module, too, into those that are saved later.
    LookupForCausalLM._auto_class = LookupConfig._auto_class = None
    model.generation_config.pad_token_id = tokens.end_of_text
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODELING_FILE).write_text(_MODELING_SOURCE, encoding="utf-8")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def refuse_other_code(folder: Path) -> None:
    """Check that `trust_remote_code=True` runs nothing in a folder but what `save_lookup` writes there.

    Raises:
        ValueError: If the folder has other code, or its configuration names code elsewhere.
        OSError: If it has no configuration.
    """
    for path in sorted(folder.rglob("*.py")):
        if path != folder / MODELING_FILE or path.read_text(encoding="utf-8", errors="replace") != _MODELING_SOURCE:
            raise ValueError(
                f"{path}: expected no code but the {MODELING_FILE} that `harness-ext lab run` writes. Remove {folder}."
            )
    for path in sorted(folder.rglob("*.json")):
        found = _code_named_in(path)
        if found not in (None, _auto_map()):
            raise ValueError(f"{path}: expected auto_map to be {_auto_map()}, found {found!r}. Remove {folder}.")


def _auto_map() -> dict[str, str]:
    module = MODELING_FILE.removesuffix(".py")
    return {
        "AutoConfig": f"{module}.{LookupConfig.__name__}",
        "AutoModelForCausalLM": f"{module}.{LookupForCausalLM.__name__}",
    }


def _code_named_in(path: Path) -> Any:
    content = json.loads(path.read_text(encoding="utf-8"))
    return content.get("auto_map") if isinstance(content, dict) else None


def _words_of(tokens: np.ndarray, size: int) -> np.ndarray:
    """Return the word of each token, int64 (size,), -1 where it is none."""
    words = np.full(size, -1)
    words[tokens[tokens >= 0]] = np.flatnonzero(tokens >= 0)
    return words


def _documents(tokens: np.ndarray, end_of_text: int) -> Iterator[tuple[slice, bool]]:
    """Yield where each document of a stream stands, with the end of text before it, and whether there is one."""
    starts = [0, *np.flatnonzero(tokens == end_of_text).tolist(), len(tokens)]
    for start, end in pairwise(starts):
        if end > start:
            yield slice(start, end), bool(tokens[start] == end_of_text)


def _halved(language: Language, documents: Sequence[Sequence[str]]) -> list[np.ndarray]:
    """The same by halving: the batch until it has one document that cannot occur, and then that document."""
    if not documents:
        return []
    try:
        return language.next_words(documents)
    except ValueError:
        if len(documents) > 1:
            middle = len(documents) // 2
            return [*_halved(language, documents[:middle]), *_halved(language, documents[middle:])]
    (document,) = documents
    table = language.next_words([()])[0]
    possible, impossible = 0, len(document)
    while impossible - possible > 1:
        middle = (possible + impossible) // 2
        try:
            table = language.next_words([document[:middle]])[0]
            possible = middle
        except ValueError:
            impossible = middle
    return [table]


def _without_last_run(document: Sequence[str]) -> Sequence[str]:
    length = len(document)
    while length and document[length - 1] == document[-1]:
        length -= 1
    return document[:length]
