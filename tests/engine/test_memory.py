from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from harness_ext.engine import memory
from harness_ext.engine.memory import kept_memory

# Frees and takes the same 8 MB a hundred times, and prints how many pages the kernel had to provide again.
REUSE = """
import resource, sys
import numpy as np
from harness_ext.engine.memory import kept_memory
with kept_memory(enabled=sys.argv[1] == "on"):
    np.ones(2**20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        large, other = np.ones(2**20), np.ones(2**20)
        del large, other
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(switch: str) -> int:
    result = subprocess.run([sys.executable, "-c", REUSE, switch], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(memory._glibc() is None, reason="only glibc has mallopt and malloc_trim")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    pages = 100 * 2 * 2**20 * 8 // resource.getpagesize()
    assert faults("on") < pages / 10


def test_it_is_harmless_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    with kept_memory(enabled=True):
        pass


def test_it_is_undone_after_an_error() -> None:
    with pytest.raises(KeyError), kept_memory(enabled=True):
        raise KeyError
