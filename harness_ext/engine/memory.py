"""Lets the C library keep what a forward pass frees, on the CPU under glibc.

A forward pass allocates and frees tensors of megabytes by the hundred. glibc gives such memory back to the kernel at once,
which zeroes every page again at the next use: 14 % of the CPU time of a 135M-parameter model (`benchmarks/engine_speed.py`).
For the length of a pass the memory stays in the process, and goes back to the kernel afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

__all__ = ["kept_memory"]

# Parameters of mallopt(3).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

# Larger requests have a mapping of their own; where the C library refuses the first value it takes the second.
MMAP_THRESHOLDS = (2**30, 2**25)
TRIM_THRESHOLD = 2**31 - 1

# Where glibc's thresholds come to rest by themselves in a program that has freed large blocks.
USUAL_MMAP_THRESHOLD = 2**25
USUAL_TRIM_THRESHOLD = 2**26


@contextlib.contextmanager
def kept_memory(*, enabled: bool) -> Iterator[None]:
    """Keep freed memory in the process while the block runs; does nothing without glibc or with `enabled=False`."""
    libc = _glibc() if enabled else None
    if libc is None:
        yield
        return
    any(libc.mallopt(M_MMAP_THRESHOLD, value) for value in MMAP_THRESHOLDS)
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, USUAL_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, USUAL_TRIM_THRESHOLD)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
