"""Runs the properties of tests/fuzz for a long time, with new examples every time.

    python benchmarks/fuzz.py                          # all, a thousand examples each
    python benchmarks/fuzz.py --examples 20000 templates result_jsons

Prints the examples of each property and its smallest counterexamples; exits with 1 if there are any. `--seed` repeats a run.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"


def main() -> int:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    sys.path[0] = str(TESTS)  # in place of this folder, whose fuzz.py is another
    from fuzz import cases
    from hypothesis import HealthCheck, Phase, seed, settings
    from worlds import a_world

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases.CASES))
    parser.add_argument("--examples", type=int, default=1000, help="of each property")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--traceback", action="store_true", help="show where a counterexample fails")
    args = parser.parse_args()
    if unknown := set(args.cases) - cases.CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}. There are {', '.join(cases.CASES)}.")
    logging.disable(logging.ERROR)
    profile = settings(
        max_examples=args.examples,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    failed = 0
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory() as folder, a_world(Path(folder)):
        for name in args.cases or cases.CASES:
            run, count = cases.counted(cases.CASES[name])
            start = time.process_time()
            try:
                seed(args.seed)(profile(run))()
                outcome = "held"
            except BaseException as err:  # hypothesis groups several counterexamples
                if isinstance(err, KeyboardInterrupt):
                    raise
                failed += 1
                shown = (
                    traceback.format_exc()
                    if args.traceback
                    else "\n".join([str(err)[:600], *getattr(err, "__notes__", ())])
                )
                outcome = f"FAILED: {type(err).__name__}: {shown}"
            seconds = time.process_time() - start
            print(f"{name:16} {count[0]:8,} examples  {seconds:8.1f} s CPU  {outcome}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
