"""Runs that are killed at random moments, run again: nothing is lost and no number moves. See `benchmarks/kills.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")
def test_killed_runs_lose_at_most_a_batch_and_no_number_moves(tmp_path: Path) -> None:
    """SIGKILL, SIGTERM and interrupts from the keyboard, one each; batches and moments are drawn with a fixed seed."""
    found = run_kills(tmp_path, "--kills", "3", "--during", "forwards", "--documents", "120", "60")
    assert len(found["outcomes"]) == 3
    for outcome in found["outcomes"]:
        assert outcome["ended"], outcome
        assert outcome["difference"] == 0, outcome
        assert outcome["lost"] <= outcome["under_way"], outcome
        assert outcome["begun"] > 0, outcome


def run_kills(folder: Path, *arguments: str) -> dict[str, Any]:
    """The outcomes that the benchmark writes; it runs in a process of its own, since it forks."""
    out = folder / "outcomes.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), *arguments, "--json", str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert out.exists(), done.stdout + done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    return result
