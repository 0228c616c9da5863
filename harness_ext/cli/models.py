"""What the user reads where a model or its tokenizer cannot be loaded: one line instead of a library's many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from harness_ext.cli.errors import is_raised_by_us, message_of

__all__ = ["loading"]

_TRUE = {"1", "on", "yes", "true"}
"""As huggingface_hub reads its variables, in any case."""


_FILES = ("config.json", "adapter_config.json")
_TOKENIZER_FILES = (*_FILES, "tokenizer_config.json", "tokenizer.json", "tokenizer.model")
"""One of which a folder of a model has, or of a tokenizer."""


@contextlib.contextmanager
def loading(name: str, option: str = "", *, what: str = "a model") -> Iterator[None]:
    """Raise an error that says what to type where the block cannot load `name`.

    Args:
        name: A folder, or an id on the Hub.
        option: Of the command line that gave it, such as `--model`.
        what: That was to be loaded.

    Raises:
        ValueError: For an error of a library in the block; one that we raised passes through.
    """
    try:
        yield
    except Exception as err:
        is_of_files = isinstance(err, OSError | ValueError | KeyError | ImportError) or _is_of_weights(err)
        if is_raised_by_us(err) or not is_of_files:
            raise
        raise ValueError(f"{option} {name}".strip() + f": {_reason(name, what, err)}") from err


def _is_of_weights(error: Exception) -> bool:
    """Whether weights are cut off or damaged, or of other shapes than the configuration says."""
    from safetensors import SafetensorError

    said = str(error)
    return isinstance(error, SafetensorError) or (
        isinstance(error, RuntimeError)
        and ("state_dict" in said or "size mismatch" in said or "PytorchStreamReader" in said)
    )


def _reason(name: str, what: str, error: Exception) -> str:
    path = Path(name).expanduser()
    said = next(iter(message_of(error).strip().splitlines()), type(error).__name__)
    if path.is_file():
        return f"expected a folder with {what}, found a file. Name its folder."
    if path.is_dir():
        names = _TOKENIZER_FILES if what == "a tokenizer" else _FILES
        if not any((path / name).is_file() for name in names):
            return f"expected a folder with {what}, found no config.json in it. Name a folder that save_pretrained has written."
        return f"{what} cannot be loaded from this folder ({said})"
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return f"no such folder. Expected a folder with {what}, or an id on the Hub such as gpt2."
    if (
        os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE
        or os.environ.get("TRANSFORMERS_OFFLINE", "").lower() in _TRUE
    ):
        return (
            "neither a folder here nor in this machine's copies of the Hub, where alone it is looked for as HF_HUB_OFFLINE is "
            f"set. Expected a folder with {what}, or an id on the Hub; to download it, unset HF_HUB_OFFLINE."
        )
    return (
        "no folder here, and the Hub did not give it: expected a folder with "
        f"{what}, or an id on the Hub such as gpt2 ({said})"
    )
