"""Documents shared out among processes: what needs all answers is computed from those of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from worlds import World, feature_probe, hf_model, natural, reviews

from harness_ext.engine.readout import Readout
from harness_ext.tasks.base import PromptTask

RANKS = 3
BOTH = {"prompt": ["films/plain", "films/several"]}


def answered(lm: Any, task: PromptTask, rank: int, world_size: int) -> PromptTask:
    """A task of one rank, with its answers."""
    task.build_all_requests(rank=rank, world_size=world_size)
    for instance, answer in zip(task.instances, lm.prompt_states(task.instances), strict=True):
        instance.resps.append(answer)
    return task


def reports(monkeypatch: pytest.MonkeyPatch, tasks: list[PromptTask]) -> list[Mapping[str, Any]]:
    """Evaluate ranks at once, in threads in place of processes."""
    shelf: list[list[Any]] = [[] for _ in tasks]
    barrier = threading.Barrier(len(tasks), timeout=60)
    rank_of = {id(task): rank for rank, task in enumerate(tasks)}
    failures: list[BaseException] = []

    def gather(self: PromptTask, values: list[Any]) -> list[Any]:
        shelf[rank_of[id(self)]] = values
        barrier.wait()
        everything = [value for of_rank in shelf for value in of_rank]
        barrier.wait()
        return everything

    def work(task: PromptTask) -> None:
        try:
            task.apply_filters()
        except BaseException as err:
            failures.append(err)
            barrier.abort()

    # Ranks are processes with a model each; these threads share one, whose head has a hook while it reads out.
    alone, logits = threading.Lock(), Readout.logits

    def one_at_a_time(self: Readout, states: Any) -> Any:
        with alone:
            return logits(self, states)

    monkeypatch.setattr(Readout, "logits", one_at_a_time)
    monkeypatch.setattr(PromptTask, "gather", gather)
    threads = [threading.Thread(target=work, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [task.config.metadata["report"] for task in tasks]


@pytest.mark.parametrize(
    "make",
    [
        lambda name: natural(dataset_path=name, metadata=BOTH),
        lambda name: feature_probe("probe", {"layer": "all", "prompt": True}, dataset_path=name, metadata=BOTH),
        lambda name: feature_probe("probe_full", {"seeds": [0, 1], "n_per_class": 8}, dataset_path=name),
    ],
    ids=["natural", "probe", "probe_full"],
)
def test_every_rank_reports_what_one_process_does(
    world: World, monkeypatch: pytest.MonkeyPatch, make: Callable[[str], PromptTask]
) -> None:
    name = world.add_dataset(
        "tests/shared_out", {"train": world.splits["train"], "test": reviews(20, seed=3, noise=0.3)}
    )
    lm = hf_model()
    (alone,) = reports(monkeypatch, [answered(lm, make(name), 0, 1)])
    shared = reports(monkeypatch, [answered(lm, make(name), rank, RANKS) for rank in range(RANKS)])
    for told in shared:
        assert told["documents"] == alone["documents"] == 20
        assert told["majority_rate"] == alone["majority_rate"]
        for entry, expected in zip(told["prompts"], alone["prompts"], strict=True):
            for key in ("metrics", "mean_class_log_score", "acc", "f_accuracy"):
                assert entry.get(key) == pytest.approx(expected.get(key), abs=1e-5), key
            for key in ("premise", "tied_documents", "at_or_below_majority"):
                assert entry.get(key) == expected.get(key), key
            for layer, of_layer in zip(entry.get("layers", ()), expected.get("layers", ()), strict=True):
                assert layer["acc"] == pytest.approx(of_layer["acc"])
