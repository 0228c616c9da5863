"""Options of probe tasks, read from lm_eval's `--metadata` and checked before any model work."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from harness_ext.contracts import ALL_LAYERS, LAST_LAYER

__all__ = ["ProbeOptions", "QuadOptions", "check_settings", "read_options"]


class _Checked(Protocol):
    def problem(self) -> str | None: ...


Options = TypeVar("Options", bound=_Checked)


def read_options(cls: type[Options], key: str, value: Any, task: str) -> Options:
    """Make a dataclass of options from a mapping.

    Args:
        cls: `ProbeOptions` or `QuadOptions`.
        key: Under which `--metadata` has them.
        value: The mapping; None for the defaults. A list becomes a tuple.
        task: For messages.

    Raises:
        ValueError: If an option is unknown or has a value that it cannot have.
    """
    if value is None:
        return cls()
    form = f"{task}: --metadata '{{\"{key}\": {{...}}}}'"
    if not isinstance(value, Mapping):
        raise ValueError(f"{form} expects a mapping of options, found {value!r}.")
    known = [option.name for option in fields(cls)]  # type: ignore[arg-type]
    for name in value:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{form}: unknown option {name!r}.{hint} Known: {', '.join(known)}.")
    options = {name: tuple(given) if isinstance(given, list) else given for name, given in value.items()}
    for name in ("seeds", "c_grid"):
        given = options.get(name)
        if name in options and (isinstance(given, str) or not isinstance(given, Sequence)):
            options[name] = None if given is None and name == "c_grid" else (given,)
    result = cls(**options)
    problem = result.problem()
    if problem:
        raise ValueError(f"{form}: {problem}.")
    return result


_SETTINGS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(
        ("training_split", "validation_split", "test_split", "fewshot_split"), (str, "the name of a split")
    ),
    "dataset_name": (str, "a name"),
    **dict.fromkeys(("target_delimiter", "fewshot_delimiter", "gen_prefix"), (str, "a string")),
    "dataset_kwargs": (Mapping, "a mapping"),
    "metadata": (Mapping, "a mapping"),
}
"""What lm_eval reads and does not check; None stands for the default, where that is not a string."""

_NEVER_NONE = ("target_delimiter", "fewshot_delimiter")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings of a task's YAML that are of the wrong type, of which lm_eval would make an error that names neither.

    Args:
        settings: The YAML, as lm_eval hands it to the task.

    Raises:
        ValueError: With the name of the setting, what is expected and what is there.
    """
    metadata = settings.get("metadata")
    source = metadata.get("config_source", "task config") if isinstance(metadata, Mapping) else "task config"
    for key, (kind, expected) in _SETTINGS.items():
        value = settings.get(key)
        is_default = value is None and not (key in settings and key in _NEVER_NONE)
        if not is_default and not isinstance(value, kind):
            raise ValueError(f"{source}: task {settings.get('task')!r}: `{key}:` is {value!r}, expected {expected}.")
    shots = settings.get("num_fewshot")
    if shots is not None and not (_is_integer(shots) and shots >= 0):
        raise ValueError(f"{source}: `num_fewshot:` is {shots!r}, expected an integer of at least 0.")
    entries = settings.get("metric_list") or []
    if not isinstance(entries, list) or not all(
        isinstance(entry, Mapping) and isinstance(entry.get("metric"), str) for entry in entries
    ):
        raise ValueError(f"{source}: `metric_list:` is {entries!r}, expected a list such as [{{metric: acc}}].")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class ProbeOptions:
    """Options of a probe.

    Attributes:
        prompt: False: the state of the bare document. True: of the document under the task's prompt. A prompt's id or path, a
            pattern or a list of them: under each of these prompts. Class words are those of the task's prompt in any case.
        layer: "last" for f(s), or an index into the model's hidden states (0 is the embedding); a list of these, or "all"
            hidden states: a sweep, which reports each layer and predicts with that of highest cross-validation accuracy.
        pooling: "last" token or "mean" over tokens.
        n_per_class: Training documents of each class; None: all.
        n_train: Training documents in all, classes in their proportions; None: all.
        seeds: One training sample and one probe for each seed; metrics are means over them.
        num_folds: Folds of the cross-validation that chooses C.
        c_grid: Values of C; None: the evaluator's.
        one_token_words: Whether words of several tokens are left out of class-word and subset features, as in the source,
            instead of being scored exactly, by forwards of their first tokens after each document.
    """

    prompt: bool | str | tuple[str, ...] = False
    layer: str | int | tuple[str | int, ...] = LAST_LAYER
    pooling: str = "last"
    n_per_class: int | None = None
    n_train: int | None = None
    seeds: tuple[int, ...] = (0,)
    num_folds: int = 5
    c_grid: tuple[float, ...] | None = None
    one_token_words: bool = False

    def problem(self) -> str | None:
        """What is wrong with them, or None."""

        layers = self.layer if isinstance(self.layer, tuple) else (self.layer,)
        for layer in layers:
            if layer not in (LAST_LAYER, ALL_LAYERS) and not _is_integer(layer):
                return f'layer is {layer!r}, expected "{LAST_LAYER}", "{ALL_LAYERS}", an integer, or a list of integers'
        if not layers or len(set(layers)) < len(layers) or (ALL_LAYERS in layers and len(layers) > 1):
            return f"layer is {list(layers)!r}, expected distinct layers, at least one"
        if self.pooling not in ("last", "mean"):
            return f'pooling is {self.pooling!r}, expected "last" or "mean"'
        if self.n_per_class is not None and self.n_train is not None:
            return "n_per_class and n_train exclude each other, give one"
        for name in ("n_per_class", "n_train"):
            value = getattr(self, name)
            if value is not None and not (_is_integer(value) and value >= 1):
                return f"{name} is {value!r}, expected a positive integer"
        if not _is_integer(self.num_folds) or self.num_folds < 2:
            return f"num_folds is {self.num_folds!r}, expected an integer of at least 2"
        if not self.seeds or not all(_is_integer(seed) and seed >= 0 for seed in self.seeds):
            return f"seeds is {list(self.seeds)!r}, expected a list of non-negative integers"
        if len(set(self.seeds)) < len(self.seeds):
            return f"seeds is {list(self.seeds)!r}: a seed that occurs twice gives the same sample twice"
        if self.c_grid is not None and (
            not self.c_grid or not all(isinstance(c, int | float) and 0 < c < float("inf") for c in self.c_grid)
        ):
            return f"c_grid is {list(self.c_grid)!r}, expected positive numbers, at least one"
        if self.one_token_words not in (True, False):
            return f"one_token_words is {self.one_token_words!r}, expected true or false"
        return None


@dataclass(frozen=True)
class QuadOptions:
    """Options of Quad features, `--metadata '{"quad": {...}}'`.

    Attributes:
        head: "plug_in" for the closed form from p_f; "linear", "mlp" or "block" for a head on f(s) that is trained on the text
            of the training documents, without their labels.
        ridge: λ of the plug-in (ΦᵀΦ + λI)⁻¹Φᵀp_f; None: the evaluator's default.
        seed: Of the training of a head.
        epochs: Most passes over the text.
    """

    head: str = "plug_in"
    ridge: float | None = None
    seed: int = 0
    epochs: int = 20

    def problem(self) -> str | None:
        """What is wrong with them, or None."""
        heads = ("plug_in", "linear", "mlp", "block")
        if self.head not in heads:
            return f"head is {self.head!r}, expected one of {', '.join(heads)}"
        is_number = isinstance(self.ridge, int | float) and not isinstance(self.ridge, bool)
        if self.ridge is not None and (not is_number or not 0 <= self.ridge < float("inf")):
            return f"ridge is {self.ridge!r}, expected a number of at least 0"
        if self.ridge is not None and self.head != "plug_in":
            return f"ridge belongs to the plug-in, and head is {self.head!r}, which chooses its own on held-out text"
        if not _is_integer(self.seed) or self.seed < 0:
            return f"seed is {self.seed!r}, expected a non-negative integer"
        if not _is_integer(self.epochs) or self.epochs < 1:
            return f"epochs is {self.epochs!r}, expected a positive integer"
        return None
