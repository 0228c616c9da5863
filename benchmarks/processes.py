"""Measure what several processes of one thread each gain over one.

    python benchmarks/processes.py --model FOLDER [--tasks natural_sst] [--processes 1 2] [--repeats 1] [-- MORE ARGUMENTS]

Runs `lm_eval`, with the store off, in jobs of so many processes, in turns. Shown are, for lm_eval's `evaluate` (requests,
forward passes, fits, results: all but imports and loading), wall-clock seconds and the CPU seconds of the busiest rank, and
those of its whole process. On a machine where every process has a core of its own the first two agree; on a busy one only CPU
seconds mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def work(folder: Path, arguments: list[str]) -> None:
    """Be one rank: run lm_eval and write down how long it took."""
    from lm_eval import evaluator

    from harness_ext.cli import main

    evaluate = evaluator.evaluate
    spent: dict[str, float] = {}

    def timed(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return evaluate(*args, **kwargs)
        finally:
            spent.update(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)

    evaluator.evaluate = timed
    status = main(["run", *arguments])
    spent["cpu_of_process"] = time.process_time()
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(spent))
    sys.exit(status)


def run(size: int, arguments: list[str]) -> dict[str, float]:
    """Run one job; times of its slowest or busiest rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HARNESS_EXT_CACHE": "off"}
        launcher = [] if size == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command = [sys.executable, *launcher, __file__, "--work-in", name, "--", *arguments]
        started = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        wall = time.perf_counter() - started
        of_ranks = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        for line in done.stderr.splitlines():
            if "prompts: " in line:
                print(f"  {line[line.index('prompts: ') :]}", flush=True)
        return {"wall_of_process": wall} | {key: max(rank[key] for rank in of_ranks) for key in of_ranks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a transformers model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tasks", default="natural_sst")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--work-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("more", nargs="*", help="more arguments of lm_eval")
    args = parser.parse_args()
    if args.work_in is not None:
        work(args.work_in, args.more)
    if args.model is None:
        parser.error("--model is required")
    arguments = ["--model", "hf", "--model_args", f"pretrained={args.model},dtype={args.dtype}", "--device", "cpu"]
    arguments += ["--batch_size", "auto", "--tasks", args.tasks, *args.more]
    found: dict[int, list[dict[str, float]]] = {size: [] for size in args.processes}
    for _ in range(args.repeats):
        for size in args.processes:
            found[size].append(run(size, arguments))
    first = args.processes[0]
    print("processes  " + "  ".join(f"{name:>24}" for name in ("evaluate", "evaluate, CPU", "all, CPU")))
    middle = {
        size: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for size, runs in found.items()
    }
    for size, seconds in middle.items():
        cells = [
            f"{seconds[key]:10.1f} s ({middle[first][key] / seconds[key]:5.2f} ×)"
            for key in ("wall", "cpu", "cpu_of_process")
        ]
        print(f"{size:9}  " + "  ".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()
