"""Random signs that depend on a seed, a block and a purpose only: not on batch size, order or the number of processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

__all__ = ["generator_of", "random_signs"]


def generator_of(seed: int, block: int, purpose: str, *, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator of one block's random numbers for one purpose, such as `hessian probe 0`."""
    digest = blake2b(f"{seed}/{block}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def random_signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return independent values −1 and +1 with equal probability, float32 of the given shape, on the generator's device."""
    count = torch.Size(shape).numel()
    device = generator.device
    # One draw of 64 bits gives 64 signs: the generator is the slow part.
    words = torch.empty(-(-count // 64), dtype=torch.int64, device=device)
    words.random_(torch.iinfo(torch.int64).min, None, generator=generator)
    return (
        _signs_of_byte(device).index_select(0, words.view(torch.uint8).int()).view(-1)[:count].view(torch.Size(shape))
    )


@functools.lru_cache(maxsize=8)
def _signs_of_byte(device: torch.device) -> Tensor:
    """A row of eight signs for each byte, float32 of shape (256, 8)."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (bits * 2 - 1).float().to(device)
