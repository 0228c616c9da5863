"""Trains the runs of a plan, several at a time, each in a process of its own with one thread."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from tqdm.auto import tqdm

from harness_ext.lab.run import Plan, Run, read_log, train_run

__all__ = ["train_all"]

_POLL_SECONDS = 1.0
_TWO_PASSES = ("sam", "adversarial")


def train_all(out: Path, plan: Plan, *, workers: int) -> None:
    """Train all runs of a prepared folder that are not done.

    Under a launcher of several processes (accelerate, torchrun) all of them train each run together, one after the other.

    Args:
        out: The folder.
        plan: Its plan.
        workers: Runs at a time, otherwise.

    Raises:
        RuntimeError: If runs failed; all others have been finished.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        for run in plan.runs:
            train_run(out, run)
        return
    waiting = [run for run in plan.runs if not (out / "runs" / run.name / "done.json").is_file()]
    if not waiting:
        return
    # The longest first, so that none of them is left for the end.
    waiting.sort(key=_work, reverse=True)
    with (
        _progress(out, plan.runs),
        ProcessPoolExecutor(max(1, workers), mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        others = set(multiprocessing.active_children())
        try:
            # Ctrl-C reaches all processes of a terminal. This one ends the workers, which would each print a traceback.
            with _interrupts_held():
                futures: dict[str, Future[None]] = {
                    run.name: pool.submit(_train, out, run, os.getpid()) for run in waiting
                }
            errors = {name: future.exception() for name, future in futures.items()}
        except KeyboardInterrupt:
            # Left alone, the pool would first finish what is running and then what is queued.
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            raise
    failures = [f"{name}: {error}" for name, error in errors.items() if error is not None]
    if failures:
        raise RuntimeError("runs that failed:\n" + "\n".join(failures))


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold SIGINT back until the end of the block; processes that the block starts never get it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _train(out: Path, run: Run, parent: int) -> None:
    def stop_if_orphaned(step: int, steps: int) -> None:
        # Whoever started this process was killed, and may have been started again.
        if os.getppid() != parent:
            os._exit(1)

    train_run(out, run, on_progress=stop_if_orphaned)


def _work(run: Run) -> float:
    """About proportional to the time of a run."""
    per_step = run.train.algorithm.batches_per_step * (2 if run.train.algorithm.name in _TWO_PASSES else 1)
    return float(run.train.steps * per_step * run.model.depth * run.model.width**1.5)


@contextlib.contextmanager
def _progress(out: Path, runs: Sequence[Run]) -> Iterator[None]:
    """Show steps of all runs together, read from their logs."""
    total = sum(run.train.steps for run in runs)
    stop = threading.Event()

    def steps(run: Run) -> int:
        folder = out / "runs" / run.name
        if (folder / "done.json").is_file():
            return run.train.steps
        log = folder / "log.jsonl"
        return max((row["step"] for row in read_log(log)), default=0) if log.is_file() else 0

    def show() -> None:
        with tqdm(total=total, desc=f"Training {len(runs)} runs", unit="step", unit_scale=True) as bar:
            while True:
                is_last = stop.wait(_POLL_SECONDS)
                bar.update(sum(map(steps, runs)) - bar.n)
                if is_last:
                    return

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
