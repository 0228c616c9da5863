"""Runs jobs of several processes, as a launcher would: `python jobs.py SPEC.json`.

The spec is a list of jobs, run one after the other, or three at once of those that say `waits`: `size` processes, the
`arguments` of `harness-ext run`, their `environment` ({rank} is the rank), where they `write` what they print, what `fails`,
and the arguments of an evaluation before whose error it `catches`. Processes are forks of this one, which has imported what
takes seconds. They meet like those of a launcher (RANK, WORLD_SIZE, MASTER_ADDR, ...), and nothing ends them when one of them
ends, so that they have to do it themselves. Prints as JSON, for each job, exit statuses and seconds.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60
"""After so long a job that hangs is killed."""


def prepare(job: dict[str, Any], rank: int) -> None:
    """Make this process a rank of a job."""
    port = str(job["port"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["size"])}
    os.environ |= {"LOCAL_WORLD_SIZE": str(job["size"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: value.format(rank=rank) for name, value in job.get("environment", {}).items()}
    if job["size"] == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    if job.get("ranks_of_node"):  # a job of several nodes
        os.environ["LOCAL_RANK"] = str(rank % job["ranks_of_node"])
        os.environ["LOCAL_WORLD_SIZE"] = str(job["ranks_of_node"])
    folder = Path(job["write"])
    folder.mkdir(parents=True, exist_ok=True)
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
    faulthandler.dump_traceback_later(LIMIT_SECONDS - 10)
    observe(folder, rank)
    if job.get("fails") and rank in job["fails"]["ranks"]:
        make_fail(job["fails"]["where"], rank)
    if job.get("sharded"):
        shard(folder / f"{rank}.calls")


def observe(folder: Path, rank: int) -> None:
    """Write down which sequences a rank forwards, which weights it fits and what it writes."""
    import numpy as np
    from lm_eval.loggers import EvaluationTracker

    from harness_ext.engine.forward import LastStateModel
    from harness_ext.evaluators import probe

    states, fit, save = LastStateModel.states, probe.fit_probes, EvaluationTracker.save_results_aggregated

    @functools.wraps(states)
    def note_states(self: Any, batch: Any, token_ids: Any, features: Any) -> Any:
        with (folder / f"{rank}.forwarded").open("a") as file:
            for tree in batch:
                for sequence in tree.sequences:
                    print(*token_ids[sequence], file=file)
        return states(self, batch, token_ids, features)

    @functools.wraps(fit)
    def note_fit(*args: Any, **kwargs: Any) -> Any:
        found = fit(*args, **kwargs)
        place = len(list(folder.glob("*.fit.npz")))
        weights = {f"{i}.{j}": one.coefficients for i, of_set in enumerate(found) for j, one in enumerate(of_set)}
        np.savez(folder / f"{place}.{rank}.fit.npz", **weights)
        return found

    @functools.wraps(save)
    def note_save(*args: Any, **kwargs: Any) -> Any:
        (folder / f"{rank}.wrote").touch()
        return save(*args, **kwargs)

    LastStateModel.states = note_states
    probe.fit_probes = note_fit
    EvaluationTracker.save_results_aggregated = note_save


def make_fail(where: str, rank: int) -> None:
    """Raise in this process, or send it a signal, in the second call of a function."""
    from harness_ext.engine.forward import LastStateModel
    from harness_ext.evaluators import probe
    from harness_ext.flatness import run

    if where == "requests":
        from harness_ext.tasks.base import PromptTask

        owner: tuple[Any, str] = (PromptTask, "request")
    else:
        owner = {
            "forward": (LastStateModel, "states"),
            "interrupted": (LastStateModel, "states"),
            "killed": (LastStateModel, "states"),
            "stopped": (LastStateModel, "states"),
            "fit": (probe, "fit_probes"),
            "flatness": (run, "fisher_traces"),
        }[where]
    original = getattr(*owner)
    calls = iter(range(10**9))

    @functools.wraps(original)
    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == (0 if where in ("fit", "flatness") else 1):
            if where in ("killed", "stopped"):
                os.kill(os.getpid(), signal.SIGKILL if where == "killed" else signal.SIGSTOP)
            if where == "interrupted":
                raise KeyboardInterrupt
            raise RuntimeError(f"rank {rank} fails on purpose in {where}")
        return original(*args, **kwargs)

    setattr(*owner, fail)


def shard(calls: Path) -> None:
    """Spread the weights of the evaluated model over the ranks, and write down that it is called."""
    import torch
    from lm_eval.models.huggingface import HFLM
    from torch.distributed.fsdp import fully_shard

    create = HFLM._create_model

    def note_call(*_: Any) -> None:
        with calls.open("a") as file:
            file.write(".")

    def create_sharded(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        for block in self._model.transformer.h:
            fully_shard(block)
        fully_shard(self._model)
        self._model.register_forward_hook(note_call)
        assert isinstance(next(self._model.parameters()), torch.distributed.tensor.DTensor)

    HFLM._create_model = create_sharded


def work(job: dict[str, Any], rank: int) -> None:
    """Be a rank of a job until its end; does not return."""
    prepare(job, rank)
    import torch

    from harness_ext import ranks
    from harness_ext.cli import main

    torch.set_num_threads(1)
    # Signs of life come twice a second; a busy machine may hold up some of them.
    ranks.PULSE_SECONDS, ranks.SILENT_SECONDS = 1.0, 15.0
    if job.get("catches"):
        fail_and_catch(job["catches"])
    status = main(["run", *job["arguments"]])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def fail_and_catch(arguments: dict[str, Any]) -> None:
    """An evaluation that fails on all ranks and whose error is caught, as a script with several evaluations may do."""
    import lm_eval
    import lm_eval.tasks

    from harness_ext import plugin

    plugin.install()
    try:
        lm_eval.simple_evaluate(**arguments)
    except RuntimeError as err:
        print(f"caught: {err}", flush=True)


PORTS: set[int] = set()
"""Of all jobs: one that was found is bound seconds later only."""


def free_port() -> int:
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        if port not in PORTS:
            PORTS.add(port)
            return port


class Running:
    """A job whose processes have been started."""

    def __init__(self, job: dict[str, Any]) -> None:
        job["port"] = free_port()
        self.started = time.monotonic()
        self.stopped = job["fails"]["ranks"] if job.get("fails", {}).get("where") == "stopped" else []
        self.rank_of: dict[int, int] = {}
        self.statuses: dict[int, int | str] = {}
        self.ended: dict[int, float] = {}
        for rank in range(job["size"]):
            process = os.fork()
            if not process:
                work(job, rank)
            self.rank_of[process] = rank

    def look(self) -> bool:
        """Whether all of them have ended; those that hang are killed."""
        seconds = time.monotonic() - self.started
        if set(self.rank_of.values()) <= set(self.stopped):
            for process in self.rank_of:
                os.kill(process, signal.SIGKILL)
        for process, rank in list(self.rank_of.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and seconds > LIMIT_SECONDS:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            if ended or seconds > LIMIT_SECONDS:
                del self.rank_of[process]
                self.statuses[rank] = os.waitstatus_to_exitcode(status) if ended else "killed"
                self.ended[rank] = seconds
        return not self.rank_of

    def outcome(self) -> dict[str, Any]:
        ranks = sorted(self.statuses)
        return {"statuses": [self.statuses[rank] for rank in ranks], "seconds": [self.ended[rank] for rank in ranks]}


def wait_until_fewer(number: int, jobs: list[Running]) -> None:
    while sum(not job.look() for job in jobs) >= number:
        time.sleep(0.05)


def run_all(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs one after the other, but for those that are to fail, whose processes wait for each other most of the time."""
    all_of_them: list[Running] = []
    for job in jobs:
        at_once = 3 if job.get("waits") else 1
        wait_until_fewer(at_once, all_of_them)
        all_of_them.append(Running(job))
    wait_until_fewer(1, all_of_them)
    return [running.outcome() for running in all_of_them]


def main() -> None:
    # Nothing of ours that looks at the environment when it is imported.
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import lm_eval.evaluator
    import lm_eval.loggers
    import lm_eval.models.huggingface
    import sklearn.linear_model  # noqa: F401
    import torch
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import harness_ext.evaluators.probe  # noqa: F401

    torch.set_num_threads(1)
    lm_eval.evaluator.add_env_info = lambda results: None  # slow, and about the machine
    print(json.dumps(run_all(json.loads(Path(sys.argv[1]).read_text()))))


if __name__ == "__main__":
    main()
