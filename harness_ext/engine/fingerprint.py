"""What identifies a model: its weights and whatever else decides what it computes, never its name."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

__all__ = ["model_fingerprint"]

logger = logging.getLogger("lm_eval.harness_ext.engine")

IRRELEVANT = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "use_cache", "architectures", "torch_dtype", "dtype"}
)
"""Config entries that say where a model came from or are fixed by its tensors (their dtype is hashed with them)."""


def model_fingerprint(model: nn.Module, *, autocast_dtype: torch.dtype | None = None) -> str | None:
    """Hash every tensor of the state dict (name, dtype, shape, bytes), the config and the adapters.

    Args:
        model: Any module with a `config`; quantisation states and adapters are part of its state dict.
        autocast_dtype: Mixed-precision dtype of the forward pass.

    Returns:
        32 hexadecimal digits of xxh3-128, the same in every process, which change with a single bit of a weight; None
        where weights are not in this process's memory as they are (offloaded to disk, one part a rank), so that no key exists.
    """
    digest = xxhash.xxh3_128()
    # Tied weights appear under several names: hash the bytes once.
    seen: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            digest.update(f"{name}={_canonical(tensor)};".encode())
            continue
        if tensor.is_meta or hasattr(tensor, "full_tensor"):
            logger.warning(
                "The weight %s is %s, so the model has no fingerprint and its states are not stored.",
                name,
                "offloaded" if tensor.is_meta else "spread over ranks",
            )
            return None
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        # A wrapper around other tensors has no memory of its own: all such have the address 0.
        if not identity[0] or identity not in seen:
            seen[identity] = _hash_of(tensor)
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{seen[identity]};".encode())
    config = model.config.to_dict()
    digest.update(_canonical({key: value for key, value in config.items() if key not in IRRELEVANT}).encode())
    digest.update(str(getattr(model.config, "_attn_implementation", None)).encode())
    digest.update(str(autocast_dtype).encode())
    for name, adapter in sorted(getattr(model, "peft_config", {}).items()):
        settings = {key: value for key, value in adapter.to_dict().items() if "path" not in key}
        digest.update(f"{name}:{_canonical(settings)}".encode())
    # All adapters are in the state dict, whichever of them is active.
    digest.update(_canonical(_active_adapters(model)).encode())
    return digest.hexdigest()


def _hash_of(tensor: Tensor) -> str:
    # One tensor at a time: the copy on the CPU is as large as the largest weight, not as the model.
    if hasattr(tensor, "__tensor_flatten__"):  # a quantised weight made of codes and scales
        names, context = tensor.__tensor_flatten__()
        parts = [f"{name}={_hash_of(getattr(tensor, name))}" for name in names]
        return f"{type(tensor).__name__}({', '.join(parts)}, {_canonical(context)})"
    raw = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return xxhash.xxh3_128(raw.numpy()).hexdigest()


def _active_adapters(model: nn.Module) -> dict[str, Any]:
    """Which adapters take part in a forward pass, and how strongly, by name of the module; see `peft.tuners.BaseTunerLayer`."""
    active = {"": getattr(model, "active_adapter", None) if hasattr(model, "peft_config") else None}
    for name, module in model.named_modules():
        if isinstance(disabled := getattr(module, "disable_adapters", None), bool):
            adapters = [] if disabled else list(module.active_adapters)
            active[name] = [adapters, getattr(module, "scaling", None)]
    return active


def _canonical(value: Any) -> str:
    """JSON that is the same in every process: a set prints in an order of its own in each."""

    def plain(value: Any) -> Any:
        return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)

    return json.dumps(value, sort_keys=True, default=plain)
