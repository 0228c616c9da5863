"""What identifies a model: its weights and whatever else decides what it computes, never its name."""

from __future__ import annotations

import json
import logging

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
        32 hexadecimal digits of xxh3-128, which changes with a single bit of a weight; None where weights are not in
        memory (offloaded to disk), so that no key exists.
    """
    digest = xxhash.xxh3_128()
    # Tied weights appear under several names: hash the bytes once.
    seen: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], str] = {}
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            digest.update(f"{name}={tensor!r};".encode())
            continue
        if tensor.is_meta:
            logger.warning(
                "The weight %s is offloaded, so the model has no fingerprint and its states are not stored.", name
            )
            return None
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if identity not in seen:
            # One tensor at a time: the copy on the CPU is as large as the largest weight, not as the model.
            raw = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
            seen[identity] = xxhash.xxh3_128(raw.numpy()).hexdigest()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{seen[identity]};".encode())
    config = model.config.to_dict()
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT}
    digest.update(json.dumps(relevant, sort_keys=True, default=str).encode())
    digest.update(str(getattr(model.config, "_attn_implementation", None)).encode())
    digest.update(str(autocast_dtype).encode())
    for name, adapter in sorted(getattr(model, "peft_config", {}).items()):
        settings = {key: value for key, value in adapter.to_dict().items() if "path" not in key}
        digest.update(f"{name}:{json.dumps(settings, sort_keys=True, default=str)}".encode())
    return digest.hexdigest()
