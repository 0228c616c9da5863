"""Measure what our .pth file adds to every start of Python and to `lm_eval --help`.

    python benchmarks/startup.py [--runs 300] [--help-runs 20]

Run it with the Python of an environment that has lm_eval and harness_ext. It makes two temporary environments that
read that one's packages, one with our .pth file and one without, and starts them in turn. The differences are of
neighbouring runs; their median is what we add. CPU time (user and system) is steadier than wall time on a busy machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import harness_ext


class Cost(NamedTuple):
    """Milliseconds of one process."""

    wall: float
    cpu: float


def make_environment(folder: Path, *, ours: bool) -> Path:
    """Return the Python of a new environment. Paths that a .pth file adds do not have their own .pth files read."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site_packages = next(folder.glob("lib/python3*/site-packages"))
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("lm_eval is not installed beside this Python.")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    package = Path(harness_ext.__file__).parent
    (site_packages / "_dependencies.pth").write_text("\n".join([*shared, str(Path(spec.origin).parents[1])]) + "\n")
    if ours:
        (site_packages / "_harness_ext.pth").write_text(f"{package.parent}\n")
        # Of a checkout, or of site-packages, where an installed .pth lies beside the package.
        found = [path for path in (package / "harness_ext.pth", package.parent / "harness_ext.pth") if path.exists()]
        shutil.copy(found[0], site_packages / "harness_ext.pth")
    return folder / "bin" / "python"


def measure(command: list[str]) -> Cost:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/")
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(1000 * wall, 1000 * cpu)


def compare(name: str, without: Path, with_ours: Path, arguments: list[str], runs: int, bound: float) -> None:
    pairs: list[tuple[Cost, Cost]] = []
    for index in range(runs + 1):
        order = (without, with_ours) if index % 2 else (with_ours, without)
        costs = {python: measure([str(python), *arguments]) for python in order}
        if index:  # the first pair writes byte code and fills the file cache
            pairs.append((costs[without], costs[with_ours]))
    print(f"{name}: {runs} pairs of runs, in ms")
    for kind in Cost._fields:
        base = [getattr(pair[0], kind) for pair in pairs]
        ours = [getattr(pair[1], kind) for pair in pairs]
        low, middle, high = statistics.quantiles([b - a for a, b in zip(base, ours, strict=True)], n=4)
        print(
            f"  {kind:4}  without {statistics.median(base):8.2f}  with {statistics.median(ours):8.2f}  "
            f"we add {middle:6.2f} (quartiles {low:.2f} to {high:.2f}; wanted: below {bound:g})"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help="pairs of `python -c pass`")
    parser.add_argument("--help-runs", type=int, default=20, help="pairs of `python -m lm_eval --help`")
    args = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        without = make_environment(Path(folder) / "without", ours=False)
        with_ours = make_environment(Path(folder) / "with", ours=True)
        compare("python -c pass", without, with_ours, ["-c", "pass"], args.runs, 2)
        compare("python -m lm_eval --help", without, with_ours, ["-m", "lm_eval", "--help"], args.help_runs, 50)
    return 0


if __name__ == "__main__":
    sys.exit(main())
